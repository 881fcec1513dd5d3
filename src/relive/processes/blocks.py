"""Blocks: arrays, and batches of a replay, one after another in one piece of memory.

Pickle and Ray pass such memory on without a look inside, and another process can read a batch from it in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..batches import Batch, SequenceBatch, as_batch, leaves_by_path
from ..memory.layout import typed
from ..steps.arrays import Array, Leaf, numpy_dtype, numpy_view, torch_dtype
from ..steps.schema import Path, map_leaves
from .shared import CACHE_LINE


class ArraySpec(NamedTuple):
    """One array of a block."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    axis: int = 0
    """The axis that counts the rows of the batch: blocks are joined along it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class BlockSpec:
    """All that a reader of a block needs besides its bytes.

    The paths of a batch of sequences begin with "rows", "facts" or "states".
    """

    parts: tuple[ArraySpec, ...]
    """The arrays, in the order of memory."""
    hidden: object = None
    """The nesting of the states, each as its number; None where there are none."""
    time_first: bool | None = None
    """None for steps and transitions; for a batch of sequences, True if time is its first axis."""

    @cached_property
    def offsets(self) -> list[int]:
        """The byte at which each part begins, and the one at which the last part ends.

        Parts begin at cache lines, which are aligned for every dtype.
        """
        offsets = [0]
        for part in self.parts:
            offsets.append(offsets[-1] + -(-part.nbytes // CACHE_LINE) * CACHE_LINE)
        return offsets

    @property
    def nbytes(self) -> int:
        """Bytes of such a block."""
        return self.offsets[-1]

    def arrays(self, memory: NDArray[np.uint8]) -> dict[Path, Array]:
        """The arrays of a block by path, over its memory. If NumPy lacks a dtype, the array holds its bits."""
        return {
            part.path: np.ndarray(part.shape, numpy_dtype(part.dtype), memory.data, offset)
            for part, offset in zip(self.parts, self.offsets, strict=False)  # offsets has the end as well
        }

    def tensors(self, memory: Tensor) -> dict[Path, Tensor]:
        """The arrays of a block as tensors over its memory, which can be written to, and be on a device."""
        return {
            part.path: memory[start : start + part.nbytes].view(part.dtype).view(part.shape)
            for part, start in zip(self.parts, self.offsets, strict=False)
        }

    def batch(self, leaves: Mapping[Path, Tensor], extras: Mapping[str, Tensor] | None = None) -> Batch:
        """The batch with these tensors, and with further fields ``extras`` ``[B]``."""
        if self.time_first is None:
            given = {(name,): extra for name, extra in (extras or {}).items()}
            return as_batch({**leaves, **given})

        def state(number: int) -> Tensor:
            return of["states"][str(number),]

        of: dict[str, dict[Path, Tensor]] = {"rows": {}, "facts": {}, "states": {}}
        for path, leaf in leaves.items():
            of[path[0]][path[1:]] = leaf
        facts = {name: fact for (name,), fact in of["facts"].items()} | dict(extras or {})
        return SequenceBatch.of(of["rows"], facts, map_leaves(state, self.hidden), time_first=self.time_first)


class Block(NamedTuple):
    """Arrays in one piece of memory, to send to another process. Tensors would be sent as open files."""

    spec: BlockSpec
    memory: NDArray[np.uint8]
    """uint8 ``[bytes]``. It may be read-only: what Ray returns lies in memory that several processes share."""

    def arrays(self) -> dict[Path, Array]:
        """The arrays by path, as :meth:`BlockSpec.arrays`."""
        return self.spec.arrays(self.memory)

    def tensors(self) -> dict[Path, Tensor]:
        """The arrays by path as tensors, each in memory of its own."""
        arrays = self.arrays()
        return {part.path: typed(arrays[part.path].copy(), part.dtype) for part in self.spec.parts}

    def batch(self) -> Batch:
        """The batch, over these bytes, which can be written to."""
        return self.spec.batch(self.spec.tensors(torch.from_numpy(self.memory)))


def packed(leaves: Mapping[Path, Leaf]) -> Block:
    """A block of arrays and CPU tensors by path. Each byte is copied once."""
    dtypes = [leaf.dtype if isinstance(leaf, Tensor) else torch_dtype(leaf.dtype) for leaf in leaves.values()]
    shapes = [tuple(leaf.shape) for leaf in leaves.values()]
    return _filled(BlockSpec(tuple(map(ArraySpec, leaves, dtypes, shapes))), leaves.values())


def packed_batch(batch: Batch) -> Block:
    """The block of a batch of a replay."""
    return _filled(*spec_of(batch))


def _filled(spec: BlockSpec, values: Iterable[Leaf]) -> Block:
    memory = np.empty(spec.nbytes, np.uint8)
    for target, value in zip(spec.arrays(memory).values(), values, strict=True):
        np.copyto(target, numpy_view(value.detach().cpu()) if isinstance(value, Tensor) else value)
    return Block(spec, memory)


def joined_batch(blocks: Sequence[Block], extras: Mapping[str, Tensor]) -> Batch:
    """The batch with the rows of several batches, one after another, and with further fields ``extras`` ``[B]``.

    Nobody else has its memory, so it may be written to, even if the blocks are read-only.
    """
    spec, sources = blocks[0].spec, [block.arrays() for block in blocks]
    leaves = {
        part.path: typed(np.concatenate([source[part.path] for source in sources], part.axis), part.dtype)
        for part in spec.parts
    }
    return spec.batch(leaves, extras)


def is_batch(value: object) -> TypeGuard[Batch]:
    """True for a batch of a replay, of transitions or of sequences."""
    return isinstance(value, Batch)


def spec_of(batch: Batch) -> tuple[BlockSpec, list[Tensor]]:
    """The spec of a batch of a replay, and its tensors in the spec's order."""
    if not isinstance(batch, SequenceBatch):
        named = leaves_by_path(batch)
        parts = [ArraySpec(path, x.dtype, tuple(x.shape)) for path, x in named.items()]
        return BlockSpec(tuple(parts)), [*named.values()]
    rows, facts, hidden = batch.parts
    states = list[Tensor]()

    def number(state: Tensor) -> int:
        states.append(state)
        return len(states) - 1

    numbers = map_leaves(number, hidden)
    axis = 1 if batch.time_first else 0
    parts = [ArraySpec(("rows", *path), x.dtype, tuple(x.shape), axis) for path, x in rows.items()]
    parts += [ArraySpec(("facts", name), x.dtype, tuple(x.shape)) for name, x in facts.items()]
    # [layers, B, size], or [B, size]
    parts += [ArraySpec(("states", str(i)), x.dtype, tuple(x.shape), int(x.dim() > 2)) for i, x in enumerate(states)]
    return BlockSpec(tuple(parts), numbers, batch.time_first), [*rows.values(), *facts.values(), *states]
