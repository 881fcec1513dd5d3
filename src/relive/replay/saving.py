"""A replay as arrays and JSON, for saves and for pickle, and a new one with that state."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor

from .. import files
from ..files import disk
from ..files.entries import entry, integers, whole
from ..memory.layout import typed
from ..steps.arrays import numpy_view
from ..steps.changes import Origin
from ..steps.schema import Schema
from ..steps.trees import Path
from .conversion import Conversion
from .fields import stored_fields
from .parts import describe
from .progress import Progress
from .reader import Reader
from .saved_ring import restore_ring, ring_state, row_arrays
from .saves import ReplaySave
from .segments import Segments
from .snapshot import Snapshot
from .sources import Source
from .writer import Writer

__all__ = ["KIND", "Saver", "typed_tensors"]


KIND = "relive.ReplayBuffer"


State = tuple[dict[str, Any], dict[str, Any]]
"""Arrays by name, and what is JSON."""


class Saver:
    """The saving side of a replay: its state for files and for pickle. Its caller holds the replay's lock.

    Args:
        writer: stores the replay's steps.
        reader: reads its batches.
        progress: the counts of its draws.
        device: where its rows live.
    """

    def __init__(self, writer: Writer, reader: Reader, progress: Progress, device: torch.device) -> None:
        self._writer, self._reader, self._progress, self._device = writer, reader, progress, device
        self.segments = Segments()
        """Which rows lie in which directories already."""
        self.saves = files.Saves()
        """The save under way."""
        self._snapshot: Snapshot | None = None

    def state(self) -> State:
        """The whole state of the replay, without its rows."""
        writer, progress = self._writer, self._progress
        facts = {
            "kind": KIND,
            "schema": json.loads(writer.schema.to_json()),
            "ordered": writer.ordered,
            "own_next_obs": writer.own_next_obs,
            "check_ends": writer.check_ends,
            "debug": writer.debug,
            "seed": progress.seed,
            "counts": progress.counts,
            "first": progress.first,
            "not_finite_rewards": writer.ring.not_finite,
            "view": describe(self._reader.view),
        }
        with progress.undone(writer.sampler):  # a loaded replay draws again what the learner had not taken
            return ring_state(writer.ring, writer.sampler, facts)

    def whole_state(self) -> State:
        """The whole state of the replay, with all rows in memory."""
        ring, (arrays, content) = self._writer.ring, self.state()
        arrays = row_arrays(ring, ring.span) | arrays
        return {name: x.whole() if isinstance(x, files.Streamed) else x for name, x in arrays.items()}, content

    def write(self, path: str | os.PathLike[str], extra: Any, taken: Callable[[], object]) -> files.SaveHandle:
        """Write everything to the directory ``path``. Segments that are there already are kept.

        ``extra`` is the learner's state. ``taken`` is called once nothing in memory is needed any more.
        """
        save = self._save(path, extra)
        files.update(path, save.change, taken=taken)
        self.segments.note(path, save.segments)
        return files.SaveHandle(path)

    def start(self, path: str | os.PathLike[str], extra: Any) -> files.SaveHandle:
        """As :meth:`write`, in another thread: it writes the present state while the caller's thread goes on.

        If rows may change unseen, or if two threads must not read them at once, all rows are read before this returns.
        """
        ring, era, save = self._writer.ring, self.segments.era, self._save(path, extra)
        there = disk.usable(path).absolute()  # the process may change its directory meanwhile
        snapshot = Snapshot(ring, save.stable)
        save.detach(snapshot.arrays, snapshot.plan)

        def work() -> None:
            try:
                files.update(there, save.change, taken=snapshot.close)
                self.segments.note(there, save.segments, era)
            finally:
                snapshot.close()

        handle = files.SaveHandle(path, work)
        try:
            self._snapshot = snapshot
            snapshot.open()
            self.saves.begin(handle)
            if not (ring.store.read_aside and self.segments.frozen):
                snapshot.wait()
        except BaseException:
            snapshot.close()  # the thread, if it runs, then gives up at the next row that it wants to read
            self.saves.forget(handle)
            raise
        return handle

    def _save(self, path: str | os.PathLike[str], extra: Any) -> ReplaySave:
        return ReplaySave(self._writer.ring, self.segments.at(path), *self.state(), extra)

    def await_rows(self) -> None:
        """Wait until the save under way, if there is one, has read all rows. Then rows may change in any way."""
        if self._snapshot is not None:
            self._snapshot.wait()
            self._snapshot = None

    def pickled(self, sampler: Any) -> tuple[Any, ...]:
        """The arguments of the function that unpickles: the state, the device, and parts that are not relive's own.

        ``sampler`` is the one that the user gave.
        """
        arrays, content = self.whole_state()
        # a copy, since copy.copy would have both buffers read through one view
        view = copy(self._reader.view) if content["view"] is None else None
        own = sampler if content["sampler"] is None else None
        return bare_arrays(arrays), content, str(self._device), own, view

    def restore(self, source: Source, origins: Mapping[Path, Origin] | None = None) -> None:
        """Put a state into a new replay that was made with its constructor's arguments.

        ``origins`` are the origins of the fields, if the schema was changed.

        Raises:
            FileFormatError, InvariantError, ValueError, KeyError: the state makes no sense.
            DoesNotFitError: a saved number does not fit into its new dtype.
        """
        ring, progress, content = self._writer.ring, self._progress, source.content
        progress.draws, progress.sampled, progress.late = integers(content, "counts", 3).tolist()
        progress.first = whole({"first": 0, **content}, "first")
        own = entry({"own_next_obs": False, **content}, "own_next_obs", bool) or not entry(content, "ordered", bool)
        saved = stored_fields(Schema.from_json(json.dumps(content.get("schema"))), own)
        conversion = Conversion(saved.leaves, ring.store.leaves, origins)
        restore_ring(ring, self._writer.sampler, source, whole(content, "rows_per_env"), conversion)
        ring.not_finite = whole({"not_finite_rewards": 0, **content}, "not_finite_rewards")


def bare_arrays(state: Mapping[str, Any]) -> dict[str, tuple[Any, torch.dtype]]:
    """Arrays and their dtypes for pickle; no tensors, which multiprocessing would send as open files."""
    tensors = {name: torch.as_tensor(value) for name, value in state.items()}
    return {name: (numpy_view(x), x.dtype) for name, x in tensors.items()}


def typed_tensors(arrays: Mapping[str, tuple[Any, torch.dtype]]) -> dict[str, Tensor]:
    """The tensors that :func:`bare_arrays` took apart."""
    return {name: typed(array, dtype) for name, (array, dtype) in arrays.items()}
