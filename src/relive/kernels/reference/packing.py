"""Rows of several fields side by side: how they are packed, and how they are picked in any order."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..ring_state import UNFIT
from .fields import rows_at, split_rows

__all__ = ["PackedFields", "pack_rows", "take_batch", "take_rows"]

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


class PackedFields(NamedTuple):
    """What :func:`take_batch` makes tensors of packed rows with."""

    describe: int
    """The address of torch's function of that name: :class:`relive.kernels.tensor_calls.TensorCalls`."""
    lend: int
    """Likewise."""
    adopt: int
    """Likewise."""
    table: Ints
    """See :func:`relive.kernels.reference.fields.split_rows`."""
    names: int
    """Likewise: the address of the names."""


def pack_rows(columns: Ints, sizes: Ints, offsets: Ints, rows: Bytes, steps: int) -> None:
    """Copy columns side by side: bytes ``offset`` to ``offset + size`` of a packed row are a field of a step.

    Args:
        columns: the address of each column. Its row t * N + n is step t of env n.
        sizes: bytes of a row of each.
        offsets: the byte of a packed row at which each begins.
        rows: ``[N * T, W]``, written; row n * T + t becomes step t of env n.
        steps: T. With 1, packed rows come in the order of the columns' rows.
    """
    envs = len(rows) // steps
    for column, size, offset in zip(columns.tolist(), sizes.tolist(), offsets.tolist(), strict=True):
        for t in range(steps):
            for n in range(envs):
                target = rows.ctypes.data + (n * steps + t) * rows.shape[1] + offset
                ctypes.memmove(target, column + (t * envs + n) * size, size)


def take_rows(source: Bytes, index: Ints, out: Any) -> int:
    """Copy the rows ``index`` of ``source`` ``[R, W]`` to ``out`` ``[B, W]``, all contiguous.

    Returns:
        -1, or the first place in ``index`` whose number is no row; the rows before it are written.
    """
    for b, r in enumerate(index.tolist()):
        if not 0 <= r < len(source):
            return b
        out[b] = source[r]
    return -1


def take_batch(fields: PackedFields, source: Bytes, index: Ints, rows: int, found: int) -> int:
    """:func:`take_rows`, and a tensor for each field of the batch. The GIL is not held while rows are copied.

    Args:
        fields: the rest.
        source: ``[R, W]``, the packed rows.
        index: the rows of the batch, ``[B]``.
        rows: the address (``id``) of a tensor, uint8 ``[B, W]`` in one piece, which the batch will lie in.
        found: see :func:`relive.kernels.reference.fields.split_rows`.

    Returns:
        what :func:`take_rows` returns, or UNFIT if ``rows`` are another tensor. The dicts are as they were unless it is
        -1.
    """
    out = rows_at(rows)
    if out is None or out.shape != (len(index), source.shape[1]):
        return UNFIT
    bad = take_rows(source, index, out)
    if bad >= 0:
        return bad
    made = split_rows(fields.describe, fields.lend, fields.adopt, rows, fields.names, fields.table, found)
    return -1 if made else UNFIT
