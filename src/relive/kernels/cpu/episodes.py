"""Windows of rollouts: where episodes start, which windows they are cut into, and rows as padded batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .jit import Bytes, address_t, jit, memcpy, prefetch

__all__ = ["episode_starts", "gather_windows", "plan_windows"]

Ints = NDArray[np.int64]
Bools = NDArray[np.uint8]
LINE = 64
"""Bytes of a cache line."""
AHEAD = 1024
"""Bytes of a row that are loaded ahead; longer ones the processor foresees by itself."""
BLOCK = 4
"""Windows that are copied side by side, so that what is written of a step is in one piece; short rows gain nothing."""


@jit
def episode_starts(done: Bools, real: Bools, ended: Bools, starts: Bools) -> None:
    """See :func:`relive.kernels.reference.episodes.episode_starts`."""
    for t in range(done.shape[0]):
        for env in range(done.shape[1]):
            starts[t, env] = real[t, env] & ended[env]
            ended[env] = done[t, env] | (ended[env] & (1 - real[t, env]))


@jit
def plan_windows(
    done: Bools, real: Bools, starts: Bools, length: int, stride: int, tails: bool, complete: bool, windows: Ints
) -> int:
    """See :func:`relive.kernels.reference.episodes.plan_windows`."""
    found = 0
    steps, envs = done.shape
    for env in range(envs):
        t, origin, begins = 0, 0, 0
        while t < steps:
            if starts[t, env]:
                origin, begins = t, 1
            if not real[t, env]:
                t += 1
                continue
            end = t
            while end + 1 < steps and not done[end, env] and real[end + 1, env]:
                end += 1
            if not complete or (starts[t, env] and done[end, env]):
                found = _cut(env, t, end + 1 - t, origin, begins, length, stride, tails, windows, found)
            t = end + 1
    return found


@jit
def _cut(
    env: int, start: int, run: int, origin: int, begins: int, length: int, stride: int, tails: bool, windows: Ints,
    found: int,
) -> int:  # fmt: skip
    """The windows of one run; how many there are by now."""
    first = 0
    while first == 0 or first + length - stride < run:
        size = min(length, run - first)
        if size == length or tails:
            if found < len(windows):
                windows[found, 0], windows[found, 1], windows[found, 2] = env, start + first, size
                windows[found, 3], windows[found, 4] = origin, begins
            found += 1
        first += stride
    return found


def gather_windows(
    source: Tensor,
    first: Tensor,
    step: int,
    lengths: Tensor,
    pad: Tensor,
    length: int,
    time_first: bool,
    out: Tensor | None = None,
) -> Tensor:
    """See :func:`relive.kernels.reference.episodes.gather_windows`."""
    count, width = len(first), source.shape[1]
    if out is None:
        # NumPy asks for huge pages, torch does not: finding 4 kB pages would take as long as the copy
        shape = (length, count, width) if time_first else (count, length, width)
        out = torch.from_numpy(np.empty(shape, np.uint8))
    per_step, per_window = (count, 1) if time_first else (1, length)
    rows, pads = source.numpy().reshape(-1), pad.numpy()
    _gather(rows, first.numpy(), step, lengths.numpy(), pads, per_step, per_window, length, out.numpy())
    return out


@jit
def _gather(
    source: Any, first: Ints, step: int, lengths: Ints, pad: Bytes, per_step: int, per_window: int, length: int,
    out: Any,
) -> None:  # fmt: skip
    """``per_step`` and ``per_window`` are how many rows of ``out`` lie between successive steps and windows."""
    here, there, blank = source.ctypes.data, out.ctypes.data, pad.ctypes.data
    width, count = np.intp(pad.size), first.size
    ahead, across, between = min(width, AHEAD), per_step * width, step * width
    block = BLOCK if width > 2 * LINE else 1
    for low in range(0, count, block):
        for t in range(length):
            for b in range(low, min(low + block, count)):
                following = min(b + block, count - 1)
                row = first[following] * width + t * between
                for line in range(0, ahead if t < lengths[following] else 0, LINE):
                    prefetch(source, row + line)  # windows lie anywhere: load the next ones while these are copied
                target = address_t(there + b * per_window * width + t * across)
                inside = t < lengths[b]
                memcpy(target, address_t(here + first[b] * width + t * between if inside else blank), width)
