"""A replay as arrays and JSON, for saves and for pickle, and a new one with that state."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import files as persist
from ..errors import FileFormatError
from ..files.entries import entry, integers, whole
from ..files.nested import to_json
from ..memory.estimate import storage_plan
from ..memory.layout import row_layout, typed
from ..ring.ring import Ring
from ..samplers.contract import Sampler
from ..steps.arrays import numpy_view
from ..steps.changes import Origin, SchemaChanges
from ..steps.schema import Schema
from ..steps.trees import Path
from ..views.contract import View
from .conversion import Conversion
from .fields import stored_fields
from .parts import describe, rebuild
from .progress import Progress
from .saved_ring import restore_ring, ring_state, row_arrays
from .segments import Segment, Segments, plan_segments
from .sources import Source, segment_prefix
from .validate import require_reach

__all__ = [
    "bare_arrays",
    "changed_arguments",
    "open_save",
    "replay_state",
    "restore_replay",
    "saved_arguments",
    "typed_tensors",
    "whole_state",
    "write_save",
]


KIND = "relive.ReplayBuffer"


State = tuple[dict[str, Any], dict[str, Any]]
"""Arrays by name, and what is JSON."""


def replay_state(
    ring: Ring, sampler: Sampler, schema: Schema, view: View, progress: Progress, settings: Mapping[str, Any]
) -> State:
    """Everything that a replay is, but for its rows.

    ``settings`` are the arguments of its constructor that are JSON as they are.
    """
    facts = {
        "kind": KIND,
        "schema": json.loads(schema.to_json()),
        **settings,
        "seed": progress.seed,
        "counts": [progress.draws, progress.sampled, progress.late],
        "first": progress.first,
        "not_finite_rewards": ring.not_finite,
        "view": describe(view),
    }
    return ring_state(ring, sampler, facts)


def whole_state(ring: Ring, state: State) -> State:
    """The same with the rows, in memory."""
    arrays, content = state
    return {name: rows.whole() for name, rows in row_arrays(ring, ring.span).items()} | arrays, content


def write_save(
    path: str | os.PathLike[str],
    ring: Ring,
    state: State,
    extra: Any,
    segments: Segments,
    taken: Callable[[], object],
) -> None:
    """Write a state with its rows to the directory ``path``, where segments are kept that did not change.

    Args:
        path: the directory.
        ring: the rows.
        state: what :func:`replay_state` gives.
        extra: the learner's state.
        segments: what is known of this directory; updated.
        taken: called once nothing in memory is needed any more.
    """
    arrays, content = state
    described, tensors = to_json(extra)
    layout, large = row_layout(ring.store.leaves)
    row_bytes = layout.nbytes + sum(ring.store.leaves[name].nbytes for name in large)
    kept: list[Segment] = []

    def change(present: persist.Contents) -> persist.Change:
        nonlocal kept
        known = _known(segments.at(path), present)
        plan = plan_segments(ring, known, row_bytes)
        names = [name for name in present.specs if _segment_of(name) in {segment.name for segment in plan.kept}]
        last = arrays | _segment_arrays(ring, plan.newest)
        kept = [*plan.kept, *plan.new]
        listed = [segment.name for segment in (*kept, plan.newest)]
        return persist.Change(
            [*(_segment_arrays(ring, segment) for segment in plan.new), tensors, last],
            {**content, "extra": described, "segments": listed},
            present.of_tensors(names),
        )

    persist.update(path, change, taken=taken)
    segments.note(path, kept)


def _known(segments: list[Segment], present: persist.Contents) -> list[Segment]:
    """The first segments of a directory, up to one that is not there as it was written."""
    there = {_segment_of(name) for name in present.specs}
    missing = next((i for i, segment in enumerate(segments) if segment.name not in there), len(segments))
    return segments[:missing]


def _segment_of(name: str) -> str | None:
    """The segment that a tensor is of, by its name."""
    return name.split(".")[1] if name.startswith("segment.") else None


def _segment_arrays(ring: Ring, segment: Segment) -> dict[str, Any]:
    prefix = segment_prefix(segment.name)
    return {f"{prefix}span": np.stack(segment.span), **row_arrays(ring, segment.span, prefix)}


def open_save(path: str | os.PathLike[str]) -> persist.Save:
    """Open the save in the directory ``path``.

    Raises:
        FileFormatError: there is no save of a replay, or it is damaged.
    """
    save = persist.Save(path)
    kind = save.content.get("kind")
    if kind != KIND:
        save.close()
        raise FileFormatError(f"'{path}' is a save of {kind!r}, not of a {KIND}")
    return save


def saved_arguments(source: Source, sampler: Any, view: Any) -> dict[str, Any]:
    """The constructor's arguments for a replay with this state; ``sampler`` and ``view`` where they are not None.

    Raises:
        FileFormatError, ParameterError, SchemaError, KeyError: the state makes no sense.
    """
    content = source.content
    rows, num_envs = whole(content, "rows_per_env"), whole(content, "num_envs")
    integers(content, "state", num_envs, 4)  # before any memory is taken for as many envs
    if num_envs < 1 or rows < 2:
        raise FileFormatError(f"the save has {num_envs} envs of {rows} rows; expected at least 1 env and 2 rows")
    schema = Schema.from_json(json.dumps(content.get("schema")))
    stored_fields(schema, False)
    if view is None:
        view = rebuild(content.get("view"), "view")
        require_reach(view, source.row_count)
    return {
        "schema": schema,
        "capacity": rows * num_envs,
        "num_envs": num_envs,
        "sampler": sampler or rebuild(content.get("sampler"), "sampler"),
        "view": view,
        "ordered": entry(content, "ordered", bool),
        "own_next_obs": entry({"own_next_obs": False, **content}, "own_next_obs", bool),
        "check_ends": entry({"check_ends": True, **content}, "check_ends", bool),
        "debug": entry({"debug": False, **content}, "debug", bool),
        "seed": entry(content, "seed", int),
    }


def changed_arguments(
    arguments: dict[str, Any], capacity: int | None, changes: SchemaChanges | None
) -> dict[Path, Origin] | None:
    """Change the arguments of :func:`saved_arguments` as the caller of ``load`` asks.

    Returns:
        where each field of the new schema comes from; None if the schema stays.

    Raises:
        SchemaError: an argument is out of range, or the save has no such fields.
    """
    origins = None
    if changes is not None:
        arguments["schema"], origins = changes.applied(arguments["schema"])
        stored_fields(arguments["schema"], False)
    if capacity is not None:
        own, num_envs = arguments["own_next_obs"] or not arguments["ordered"], arguments["num_envs"]
        leaves, kept = stored_fields(arguments["schema"], own).leaves, arguments["sampler"].nbytes
        device = torch.device(arguments["device"])
        storage_plan(leaves, num_envs, capacity, None, device, kept).require_memory()
        arguments["capacity"] = capacity
    return origins


def restore_replay(
    ring: Ring, sampler: Sampler, progress: Progress, source: Source, origins: Mapping[Path, Origin] | None
) -> None:
    """Put a state into a new replay that was made with :func:`saved_arguments`.

    ``origins`` are those of the fields if the schema was changed.

    Raises:
        FileFormatError, InvariantError, ValueError, KeyError: it makes no sense.
        NotFiniteError: a saved number does not fit into its new dtype.
    """
    content = source.content
    progress.draws, progress.sampled, progress.late = integers(content, "counts", 3).tolist()
    progress.first = whole({"first": 0, **content}, "first")
    own = entry({"own_next_obs": False, **content}, "own_next_obs", bool) or not entry(content, "ordered", bool)
    saved = stored_fields(Schema.from_json(json.dumps(content.get("schema"))), own)
    conversion = Conversion(saved.leaves, ring.store.leaves, origins)
    restore_ring(ring, sampler, source, whole(content, "rows_per_env"), conversion)
    ring.not_finite = whole({"not_finite_rewards": 0, **content}, "not_finite_rewards")


def bare_arrays(state: Mapping[str, Any]) -> dict[str, tuple[Any, torch.dtype]]:
    """Arrays and their dtypes for pickle; no tensors, which multiprocessing would send as open files."""
    tensors = {name: torch.as_tensor(value) for name, value in state.items()}
    return {name: (numpy_view(x), x.dtype) for name, x in tensors.items()}


def typed_tensors(arrays: Mapping[str, tuple[Any, torch.dtype]]) -> dict[str, Tensor]:
    """What :func:`bare_arrays` took apart."""
    return {name: typed(array, dtype) for name, (array, dtype) in arrays.items()}
