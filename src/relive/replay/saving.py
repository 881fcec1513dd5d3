"""A replay as arrays and JSON, for saves and for pickle, and a new one with that state."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import files as persist
from ..errors import FileFormatError
from ..files.entries import entry, integers, whole
from ..memory.estimate import free_memory
from ..memory.layout import typed
from ..ring.ring import Ring
from ..samplers.contract import Sampler
from ..steps.arrays import numpy_view
from ..steps.schema import Schema
from ..views.contract import View
from .parts import describe, rebuild
from .progress import Progress
from .saved_ring import restore_ring, ring_state
from .validate import require_reach

__all__ = [
    "bare_arrays",
    "constructor_arguments",
    "read_save",
    "replay_state",
    "restore_replay",
    "typed_tensors",
    "whole_arrays",
]


KIND = "relive.ReplayBuffer"


def replay_state(
    ring: Ring, sampler: Sampler, schema: Schema, view: View, progress: Progress, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Everything that a replay is, with rows that are read when they are written: arrays by name, and what is JSON.

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


def constructor_arguments(
    tensors: Mapping[str, Tensor], content: Mapping[str, Any], sampler: Any, view: Any
) -> dict[str, Any]:
    """The constructor's arguments for a replay with this state; ``sampler`` and ``view`` where they are not None.

    Raises:
        FileFormatError, ParameterError, SchemaError, KeyError: the state makes no sense.
    """
    rows, num_envs = whole(content, "rows_per_env"), whole(content, "num_envs")
    integers(content, "state", num_envs, 4)  # before any memory is taken for as many envs
    if view is None:
        view = rebuild(content.get("view"), "view")
        require_reach(view, len(tensors["rows"]))
    return {
        "schema": Schema.from_json(json.dumps(content.get("schema"))),
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


def restore_replay(
    ring: Ring, sampler: Sampler, progress: Progress, tensors: Mapping[str, Tensor], content: Mapping[str, Any]
) -> None:
    """Put a state into a new replay that :func:`constructor_arguments` made.

    Raises:
        FileFormatError, InvariantError, ValueError, KeyError: it makes no sense.
    """
    progress.draws, progress.sampled, progress.late = integers(content, "counts", 3).tolist()
    progress.first = whole({"first": 0, **content}, "first")
    restore_ring(ring, sampler, tensors, content)
    ring.not_finite = whole({"not_finite_rewards": 0, **content}, "not_finite_rewards")


def read_save(path: str | os.PathLike[str]) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """The state in the directory ``path``.

    Raises:
        FileFormatError: there is no save of a replay, or it is damaged.
    """
    tensors, content = persist.read(path, most=free_memory())
    if content.get("kind") != KIND:
        raise FileFormatError(f"'{path}' is a save of {content.get('kind')!r}, not of a {KIND}")
    return tensors, content


def whole_arrays(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a state, with all rows read."""
    return {name: x.whole() if isinstance(x, persist.Streamed) else x for name, x in tensors.items()}


def bare_arrays(state: Mapping[str, Any]) -> dict[str, tuple[Any, torch.dtype]]:
    """Arrays and their dtypes for pickle; no tensors, which multiprocessing would send as open files."""
    tensors = {name: torch.as_tensor(value) for name, value in state.items()}
    return {name: (numpy_view(x), x.dtype) for name, x in tensors.items()}


def typed_tensors(arrays: Mapping[str, tuple[Any, torch.dtype]]) -> dict[str, Tensor]:
    """What :func:`bare_arrays` took apart."""
    return {name: typed(array, dtype) for name, (array, dtype) in arrays.items()}
