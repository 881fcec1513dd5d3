"""Blocks: many arrays in one piece of memory, so that a message between processes is one object, not one per field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..batches.sequences import SequenceBatch
from ..batches.tensordicts import as_tensordict
from ..memory.layout import typed
from ..steps.arrays import NUMPY_DTYPES, Array, numpy_dtype, numpy_view, torch_dtype
from ..steps.schema import Schema
from ..steps.trees import Path, descend

__all__ = ["Block", "Part", "host_leaf", "joined", "joined_batch", "packed", "packed_batch", "unpacked"]


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
    """None for steps and transitions; for a batch of sequences, whether time is its first axis."""


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
    parts = [_sum(part, [source[part.path] for source in sources]) for part in blocks[0].parts]
    offsets, size = _offsets(parts)
    memory, found = np.empty(size, np.uint8), dict[Path, Tensor]()
    for part, offset in zip(parts, offsets, strict=True):
        target, end = _at(memory, offset, part), 0
        for source in sources:
            array = source[part.path]
            begin, end = end, end + array.shape[part.axis]
            np.copyto(target[(slice(None),) * part.axis + (slice(begin, end),)], array)
        found[part.path] = typed(target, part.dtype)
    return found


def packed_batch(batch: Any, schema: Schema) -> Block:
    """A batch that a replay of this schema drew: a TensorDict, or a SequenceBatch."""
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


def _sum(part: Part, arrays: Iterable[Array]) -> Part:
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
    return np.ndarray(part.shape, numpy_dtype(part.dtype), memory.data, offset)


def _array(leaf: Any) -> Array:
    return numpy_view(leaf.detach()) if isinstance(leaf, Tensor) else np.asarray(leaf)


def _dtype(leaf: Any) -> torch.dtype:
    return leaf.dtype if isinstance(leaf, Tensor) else torch_dtype(leaf.dtype)


def host_leaf(array: Array, dtype: torch.dtype) -> Any:
    """An array of a block as a replay takes it: as it is, or as a tensor if NumPy lacks the dtype."""
    return array if dtype in NUMPY_DTYPES else typed(array.copy(), dtype)  # torch warns of read-only memory
