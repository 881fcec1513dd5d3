"""The state of a replay as arrays and JSON, for saves and pickles, and back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor

from .. import files
from ..errors import FileFormatError
from ..files.entries import entry, integers, whole
from ..memory.estimate import free_memory
from ..memory.layout import typed
from ..steps.arrays import numpy_view
from ..steps.schema import Schema
from .parts import describe, rebuild
from .progress import Progress
from .reader import Reader
from .saved_ring import restore_ring, ring_state
from .validate import require_reach
from .writer import Writer

__all__ = ["Saver", "constructor_arguments", "read_save", "typed_tensors"]


KIND = "relive.ReplayBuffer"


class Saver:
    """The saving side of a replay: its state for files and for pickle. Its caller holds the replay's lock.

    Args:
        writer: stores its steps.
        reader: reads its batches.
        progress: counts what it has drawn.
        device: where its rows live.
    """

    def __init__(self, writer: Writer, reader: Reader, progress: Progress, device: torch.device) -> None:
        self._writer, self._reader, self._progress, self._device = writer, reader, progress, device

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The whole state: arrays by name, and JSON. Rows are read only when they are written to a file."""
        writer, progress = self._writer, self._progress
        facts = {
            "kind": KIND,
            "schema": json.loads(writer.schema.to_json()),
            "ordered": writer.ordered,
            "own_next_obs": writer.own_next_obs,
            "check_ends": writer.check_ends,
            "debug": writer.debug,
            "seed": progress.seed,
            "counts": [progress.draws, progress.sampled, progress.late],
            "first": progress.first,
            "not_finite_rewards": writer.ring.not_finite,
            "view": describe(self._reader.view),
        }
        return ring_state(writer.ring, writer.sampler, facts)

    def pickled(self, sampler: Any) -> tuple[Any, ...]:
        """The state as ``_unpickled`` takes it: arrays, JSON, device, and the user's own sampler and view, or None.

        ``sampler`` is the one that the user passed.
        """
        tensors, content = self.state()
        arrays = {name: x.whole() if isinstance(x, files.Streamed) else x for name, x in tensors.items()}
        # a copy, since copy.copy would have both buffers read through one view
        view = copy(self._reader.view) if content["view"] is None else None
        own = sampler if content["sampler"] is None else None
        return bare_arrays(arrays), content, str(self._device), own, view

    def restore(self, tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> None:
        """Put a state into a new replay, which was made with its :func:`constructor_arguments`.

        Raises:
            FileFormatError, InvariantError, ValueError, KeyError: the state contradicts itself.
        """
        ring, progress = self._writer.ring, self._progress
        progress.draws, progress.sampled, progress.late = integers(content, "counts", 3).tolist()
        progress.first = whole({"first": 0, **content}, "first")
        restore_ring(ring, self._writer.sampler, tensors, content)
        ring.not_finite = whole({"not_finite_rewards": 0, **content}, "not_finite_rewards")


def constructor_arguments(
    tensors: Mapping[str, Tensor], content: Mapping[str, Any], sampler: Any, view: Any
) -> dict[str, Any]:
    """The constructor's arguments for a replay with this state. ``sampler`` and ``view`` replace the saved ones.

    Raises:
        FileFormatError, ParameterError, SchemaError, KeyError: the state is not one that relive writes.
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


def read_save(path: str | os.PathLike[str]) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """The state in the directory ``path``.

    Raises:
        FileFormatError: there is no save of a replay, or it is damaged.
    """
    tensors, content = files.read(path, most=free_memory())
    if content.get("kind") != KIND:
        raise FileFormatError(f"'{path}' is a save of {content.get('kind')!r}, not of a {KIND}")
    return tensors, content


def bare_arrays(state: Mapping[str, Any]) -> dict[str, tuple[Any, torch.dtype]]:
    """Arrays and their dtypes, for pickle. Tensors would be sent by multiprocessing as open files."""
    tensors = {name: torch.as_tensor(value) for name, value in state.items()}
    return {name: (numpy_view(x), x.dtype) for name, x in tensors.items()}


def typed_tensors(arrays: Mapping[str, tuple[Any, torch.dtype]]) -> dict[str, Tensor]:
    """The tensors that :func:`bare_arrays` converted."""
    return {name: typed(array, dtype) for name, (array, dtype) in arrays.items()}
