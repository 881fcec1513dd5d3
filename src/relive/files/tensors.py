"""The bytes of tensors and arrays with any strides on any device, in pieces. At most one chunk is copied at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .format import Array, Spec, Streamed

__all__ = ["filled", "pieces"]


Solid = Tensor | NDArray[Any]


CHUNK = 1 << 20
"""Bytes moved at a time. They are checksummed while in the cache, and copies are never larger."""


def pieces(value: Array) -> Iterator[memoryview]:
    """The bytes of a tensor in row-major order, without a copy if it is plain."""
    for part in value.parts() if isinstance(value, Streamed) else (value,):
        for slab in _slabs(part):
            yield from _chunks(_raw(slab))


def filled(spec: Spec, read_into: Callable[[memoryview], None]) -> Tensor:
    """A new tensor, filled by passing its pieces, in the order of :func:`pieces`, to ``read_into``."""
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=spec.dtype)
    # NumPy asks the system for huge pages; the first write to each small page costs more than the copy itself
    raw = np.empty(spec.nbytes, np.uint8)
    for piece in _chunks(memoryview(cast("Any", raw))):
        read_into(piece)
    return torch.from_numpy(raw).view(spec.dtype).reshape(spec.shape)


def _slabs(value: Solid) -> Iterator[Solid]:
    """Parts of ``value`` in row-major order, each plain or at most a chunk."""
    if _is_plain(value) or value.nbytes <= CHUNK:
        yield value
        return
    rows = max(1, CHUNK // (value.nbytes // len(value)))
    for start in range(0, len(value), rows):
        yield from _slabs(value[start] if rows == 1 else value[start : start + rows])


def _is_plain(value: Solid) -> bool:
    """Whether a value's bytes lie in RAM in row-major order."""
    if isinstance(value, Tensor):
        return value.is_cpu and value.is_contiguous() and not value.is_conj() and not value.is_neg()
    return value.flags.c_contiguous


def _raw(slab: Solid) -> memoryview:
    """The bytes of a slab, copied unless it is plain."""
    if isinstance(slab, Tensor):
        plain = slab.detach().cpu().resolve_conj().resolve_neg().contiguous()
        flat = plain.as_strided((plain.numel(),), (1,))  # not reshape: a single element may have any stride
        return memoryview(cast("Any", flat.view(torch.uint8).numpy()))
    return memoryview(cast("Any", np.ascontiguousarray(slab).reshape(-1).view(np.uint8)))


def _chunks(raw: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(raw), CHUNK):
        yield raw[start : start + CHUNK]
