"""Messages of a cluster: the link by which they travel, the blocks of arrays in them, and the queue of rollouts.

Nothing here knows of Ray. :mod:`relive.cluster.ray` has the link to its actors.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..batches import SequenceBatch, as_tensordict
from ..errors import LifecycleError
from ..memory.layout import typed
from ..steps.arrays import NUMPY_DTYPES, Array, numpy_dtype, numpy_view, torch_dtype
from ..steps.schema import Path, Schema, descend

__all__ = [
    "PAUSE",
    "Block",
    "Fetched",
    "Label",
    "Link",
    "RolloutQueue",
    "host_leaf",
    "joined",
    "joined_batch",
    "packed",
    "packed_batch",
    "unpacked",
]

PAUSE = 0.05
"""Seconds between two questions to shards that do not answer."""


class Link(Protocol):
    """How messages travel to shards. If other processes are to send steps, the link can be pickled."""

    def call(self, shard: int, method: str, *arguments: Any) -> Any:
        """Send a message to a shard, and return what :meth:`answers` takes."""
        ...

    def answers(self, calls: Mapping[int, Any], timeout: float) -> tuple[dict[int, Any], set[int]]:
        """The answers that came within ``timeout`` seconds, by key, and the keys of the calls that failed.

        A call whose answer has not come is in neither of the two. An error that a shard raised is raised here.
        """
        ...

    def close(self) -> None:
        """End the shards."""
        ...


# Blocks


ALIGNMENT = 64
"""Every array begins at a multiple of so many bytes: a cache line, and enough for every dtype."""


class Part(NamedTuple):
    """One array of a block."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    axis: int
    """The axis that counts the rows of the batch: blocks are joined along it."""


class Block(NamedTuple):
    """Arrays one after another in one piece of memory. Pickle and Ray pass it on without a look inside."""

    parts: tuple[Part, ...]
    memory: NDArray[np.uint8]
    """uint8 ``[bytes]``. It may be read-only: what Ray returns lies in memory that several processes share."""
    time_first: bool | None = None
    """None for steps and transitions; for a batch of sequences, True if time is its first axis."""


def packed(leaves: Mapping[Path, Any], axes: Mapping[Path, int] | None = None, time_first: bool | None = None) -> Block:
    """A block of arrays and CPU tensors by path. Each byte is copied once.

    Args:
        leaves: path -> array or tensor.
        axes: path -> the axis that counts the rows of the batch, where it is not axis 0.
        time_first: as in :class:`Block`.
    """
    axes = axes or {}
    arrays = {path: _array(leaf) for path, leaf in leaves.items()}
    parts = tuple(Part(path, _dtype(leaf), arrays[path].shape, axes.get(path, 0)) for path, leaf in leaves.items())
    offsets, size = _offsets(parts)
    memory = np.empty(size, np.uint8)
    for part, offset in zip(parts, offsets, strict=True):
        np.copyto(_at(memory, offset, part), arrays[part.path])
    return Block(parts, memory, time_first)


def unpacked(block: Block) -> dict[Path, Array]:
    """The arrays of a block by path, over its memory. If NumPy lacks a dtype, the array holds its bits."""
    offsets, _ = _offsets(block.parts)
    return {part.path: _at(block.memory, offset, part) for part, offset in zip(block.parts, offsets, strict=True)}


def joined(blocks: Sequence[Block]) -> dict[Path, Tensor]:
    """The rows of several blocks of the same fields, one block after another, as tensors in memory of their own.

    Each byte is copied once. Nobody else has the new memory, so it may be written to, even if the blocks are read-only.
    """
    sources = [unpacked(block) for block in blocks]
    parts = [_with_rows_of(part, [source[part.path] for source in sources]) for part in blocks[0].parts]
    offsets, size = _offsets(parts)
    memory, tensors = np.empty(size, np.uint8), dict[Path, Tensor]()
    for part, offset in zip(parts, offsets, strict=True):
        target, end = _at(memory, offset, part), 0
        for source in sources:
            array = source[part.path]
            begin, end = end, end + array.shape[part.axis]
            # blocks lie one after another along the axis of rows, which need not be the first one
            np.copyto(target[(slice(None),) * part.axis + (slice(begin, end),)], array)
        tensors[part.path] = typed(target, part.dtype)
    return tensors


def packed_batch(batch: Any, schema: Schema) -> Block:
    """The block of a batch that a replay of this schema drew: a TensorDict, or a SequenceBatch."""
    if not isinstance(batch, SequenceBatch):
        return packed({key if isinstance(key, tuple) else (key,): leaf for key, leaf in batch.items(True, True)})
    leaves, facts, hidden = batch.parts
    states = {path: descend(hidden, path[1:]) for path in schema.leaves if path[0] == "hidden"} if hidden else {}
    rows = 1 if batch.time_first else 0
    axes = {("rows", *path): rows for path in leaves}
    axes |= {("states", *path): int(state.dim() > 2) for path, state in states.items()}  # [layers, B, size]
    named = {("rows", *path): leaf for path, leaf in leaves.items()}
    named |= {("facts", name): fact for name, fact in facts.items()}
    named |= {("states", *path): state for path, state in states.items()}
    return packed(named, axes, batch.time_first)


def joined_batch(blocks: Sequence[Block], schema: Schema, extras: Mapping[str, Tensor]) -> Any:
    """The batch with the rows of several batches, one after another, and with further fields ``extras`` ``[B]``."""
    time_first, leaves = blocks[0].time_first, joined(blocks)
    if time_first is None:
        leaves |= {(name,): extra for name, extra in extras.items()}
        return as_tensordict(leaves, (leaves["reward",].shape[0],))
    of: dict[str, dict[Path, Tensor]] = {"rows": {}, "facts": {}, "states": {}}
    for path, leaf in leaves.items():
        of[path[0]][path[1:]] = leaf
    facts = {name: fact for (name,), fact in of["facts"].items()} | dict(extras)
    hidden = schema.rebuild("hidden", of["states"].__getitem__) if of["states"] else None
    return SequenceBatch(of["rows"], facts, hidden, time_first=time_first)


def host_leaf(array: Array, dtype: torch.dtype) -> Any:
    """An array of a block as a replay takes it: as it is, or as a tensor if NumPy lacks the dtype."""
    return array if dtype in NUMPY_DTYPES else typed(array.copy(), dtype)  # torch warns of read-only memory


def _with_rows_of(part: Part, arrays: Iterable[Array]) -> Part:
    """A part with as many rows as all of these arrays together."""
    shape = list(part.shape)
    shape[part.axis] = sum(array.shape[part.axis] for array in arrays)
    return part._replace(shape=tuple(shape))


def _offsets(parts: Iterable[Part]) -> tuple[list[int], int]:
    """The byte at which each part begins, and where the last one ends."""
    offsets, end = list[int](), 0
    for part in parts:
        offsets.append(end)
        end += -(-prod(part.shape) * part.dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _at(memory: NDArray[np.uint8], offset: int, part: Part) -> Array:
    """A part as an array over the memory of its block."""
    # numpy_dtype has the size of the torch dtype, also where NumPy lacks it and the array holds its bits
    return np.ndarray(part.shape, numpy_dtype(part.dtype), memory.data, offset)


def _array(leaf: Any) -> Array:
    return numpy_view(leaf.detach()) if isinstance(leaf, Tensor) else np.asarray(leaf)


def _dtype(leaf: Any) -> torch.dtype:
    return leaf.dtype if isinstance(leaf, Tensor) else torch_dtype(leaf.dtype)


# The queue of rollouts


class Label(NamedTuple):
    """The label that identifies a rollout."""

    worker: str
    life: str
    """The life of the sender: another one after every restart of the worker."""
    number: int
    """The number of the rollout in this life, from 1."""
    version: int
    """The version of the policy that played it."""


class Fetched(NamedTuple):
    """The queue's answer to the learner."""

    born: str
    """The life of the queue."""
    place: int
    """The place in line of the last rollout that was given or dropped."""
    label: Label | None
    block: Block | None
    """The rollout, or None if there is none yet."""
    dropped: list[Label]
    """Rollouts before this one that were too old."""


class RolloutQueue:
    """The rollouts on their way, in the order in which they came. The queue runs in a process of its own.

    A rollout stays until the learner settles it: the answer to :meth:`fetch` may be lost, and the learner may restart.

    Args:
        capacity: the most rollouts in the queue. Those that were fetched and not settled count, too.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self._born = capacity, os.urandom(8).hex()
        self._line = deque[tuple[int, Label, Block]]()
        """The rollouts that are not settled, each with its place in line. Places grow and are never used again."""
        self._came = 0
        self._last: dict[str, tuple[str, int]] = {}
        """The life of each worker's sender, and the number of the last rollout that came from it."""
        self._repeated = 0

    def begin(self, worker: str, life: str) -> None:
        """Note that a sender begins. Earlier senders of the same worker are refused from now on."""
        self._last[worker] = life, 0

    def room(self) -> bool:
        """True if there is room for another rollout."""
        return len(self._line) < self._capacity

    def put(self, label: Label, block: Block) -> bool:
        """Keep a rollout; False if there is no room. A rollout that came before is not kept again.

        Raises:
            LifecycleError: the worker has a newer sender.
        """
        life, number = self._last.get(label.worker, (label.life, 0))
        if life != label.life:
            raise LifecycleError(f"worker {label.worker!r} has a newer sender; give each worker a name of its own")
        if label.number <= number:  # its confirmation was lost, so the sender sent it again
            self._repeated += 1
            return True
        if not self.room():
            return False
        self._came += 1
        self._line.append((self._came, label, block))
        self._last[label.worker] = label.life, label.number
        return True

    def fetch(self, born: str, place: int, oldest: int) -> Fetched:
        """The first rollout behind this place in line whose version is at least ``oldest``. Older ones are dropped.

        The place belongs to the life ``born`` of the queue. If the queue is in another life, the line begins anew.
        """
        place, dropped = place if born == self._born else 0, list[Label]()
        for entry in [waiting for waiting in self._line if waiting[0] > place]:
            place, label, block = entry
            if label.version >= oldest:
                return Fetched(self._born, place, label, block, dropped)
            dropped.append(label)
            self._line.remove(entry)
        return Fetched(self._born, place, None, None, dropped)

    def settle(self, born: str, place: int) -> None:
        """Remove the rollouts up to this place in line: the learner does not need them again."""
        # a place of an earlier life says nothing about this line
        while born == self._born and self._line and self._line[0][0] <= place:
            self._line.popleft()

    def stats(self) -> dict[str, float]:
        """``came``, ``kept``, ``repeated``: how many rollouts came, how many are in the queue, how many came again."""
        return {"came": float(self._came), "kept": float(len(self._line)), "repeated": float(self._repeated)}
