"""One name per hot loop: the fast twin where there is one for the device and dtype, else the torch reference.

The fast twins are imported on first use, so that ``import relive`` compiles nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import reference
from .reference import Grid, refuse_missing

__all__ = [
    "Grid",
    "copy_row",
    "discounted_return",
    "fast",
    "gae",
    "gather_windows",
    "mark_windows",
    "permutation",
    "reference",
    "refuse_missing",
    "vtrace",
]


@cache
def fast() -> Any:
    """The numba twins; the first call imports numba."""
    with _no_collection():
        from . import cpu

        cpu.load_target()
    return cpu


@contextmanager
def _no_collection() -> Generator[None]:
    """Put off garbage collection: numba makes many lasting objects, and collecting takes as long as loading it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _twin(reward: Tensor) -> Any:
    return fast() if reward.dtype is torch.float32 and reward.is_cpu else reference


def gae(grid: Grid, *args: float) -> tuple[Tensor, Tensor]:
    """See :func:`relive.kernels.reference.gae`."""
    return _twin(grid.reward).gae(grid, *args)


def discounted_return(grid: Grid, gamma: float) -> Tensor:
    """See :func:`relive.kernels.reference.discounted_return`."""
    return _twin(grid.reward).discounted_return(grid, gamma)


def vtrace(log_rho: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """See :func:`relive.kernels.reference.vtrace`."""
    return _twin(log_rho).vtrace(log_rho, *args)


def permutation(n: int, seed: int, counter: int) -> Tensor:
    """See :func:`relive.kernels.reference.permutation`; always made on the CPU, so alike for every device."""
    return fast().permutation(n, seed, counter)


def copy_row(sources: Any, targets: Any, nbytes: Any, row: int) -> None:
    """See :func:`relive.kernels.reference.copy_row`."""
    fast().copy_row(sources, targets, nbytes, row)


def gather_windows(source: Tensor, *args: Any) -> Tensor:
    """See :func:`relive.kernels.reference.gather_windows`."""
    return (fast() if source.is_cpu else reference).gather_windows(source, *args)


def mark_windows(lengths: Any, *args: Any) -> tuple[Tensor, Tensor]:
    """See :func:`relive.kernels.reference.mark_windows`; ``lengths`` is an array, or a tensor of any device."""
    on_host = not isinstance(lengths, Tensor) or lengths.is_cpu
    return (fast() if on_host else reference).mark_windows(lengths, *args)
