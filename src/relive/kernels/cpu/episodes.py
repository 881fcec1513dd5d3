"""Windows of rollouts: where episodes start, how they are cut into windows, and windows as padded rows.

``t`` is a step, ``env`` an env, ``b`` a window. ``here``, ``following`` and ``target`` count bytes: the number of a row
times ``width``, the bytes of a row. All fit in int64, since the rows are in memory and a process has fewer than 2 ** 63
bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .jit import LINE, Bytes, address_t, fill, inlined, jit, memcpy, prefetch
from .rule import window_start

__all__ = ["copy_windows", "episode_starts", "gather_windows", "mark_windows", "plan_windows"]

Ints = NDArray[np.int64]
Bools = NDArray[np.uint8]
AHEAD = 1024
"""Bytes of a run that are loaded ahead; the processor itself loads the rest of a longer one."""
BLOCK = 8192
"""Bytes of padding that are written at once."""
LARGE = 8192
"""From so many bytes on, the system's own way to fill memory is quicker."""


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
    """Add the windows of one run; ``found`` is the number before, and the result the number after."""
    for first in range(0, window_start(run - 1, length, stride) + 1, stride):
        size = min(length, run - first)
        if size == length or tails:
            if found < len(windows):
                windows[found, 0], windows[found, 1], windows[found, 2] = env, start + first, size
                windows[found, 3], windows[found, 4] = origin, begins
            found += 1
    return found


def gather_windows(
    source: Tensor, first: Tensor, step: int, lengths: Tensor, pad: Tensor, length: int, out: Tensor | None = None
) -> Tensor:
    """See :func:`relive.kernels.reference.episodes.gather_windows`."""
    # NumPy asks for huge pages and torch does not; mapping pages of 4 kB would take as long as the copy
    if out is None:
        out = torch.from_numpy(np.empty((len(first), length, source.shape[1]), np.uint8))
    copy_windows(source.numpy().reshape(-1), first.numpy(), step, lengths.numpy(), pad.numpy(), out.numpy())
    return out


@jit
def copy_windows(source: Any, first: Ints, step: int, lengths: Ints, pad: Bytes, out: Any) -> None:
    """The same for arrays; ``source`` is flat, ``out`` is ``[B, length, W]``."""
    count, length, size = out.shape
    width, target, even = np.intp(size), out.ctypes.data, _is_even(pad)
    for b in range(count):
        here, steps = source.ctypes.data + first[b] * width, lengths[b]
        following = first[min(b + 1, count - 1)] * width
        if step == 1:  # one run of bytes: the processor loads its lines ahead, but not those of the next window
            for line in range(0, AHEAD, LINE):
                prefetch(source, following + line)
            memcpy(address_t(target), address_t(here), steps * width)
        else:
            for t in range(steps):
                for line in range(0, min(width, AHEAD), LINE):
                    prefetch(source, following + t * step * width + line)
                memcpy(address_t(target + t * width), address_t(here + t * step * width), width)
        padding = (length - steps) * width
        if even and padding >= LARGE:
            fill(address_t(target + steps * width), pad[0], np.intp(padding))
        else:
            _repeat(target + steps * width, padding, pad)
        target += length * width


@inlined
def _is_even(row: Bytes) -> bool:
    """Whether all bytes of a row are alike, and there is one."""
    alike = row.size > 0
    for byte in row:
        alike &= byte == row[0]
    return alike


@jit
def _repeat(target: int, nbytes: int, row: Bytes) -> None:
    """Fill ``nbytes`` bytes at an address with copies of a row."""
    width = np.intp(row.size)
    block = max(BLOCK // max(width, 1), 1) * width
    filled = min(width, nbytes)
    memcpy(address_t(target), address_t(row.ctypes.data), filled)
    while filled < nbytes:
        more = min(
            filled, nbytes - filled, block
        )  # copied from what is written already, a block that stays in the nearest cache
        memcpy(address_t(target + filled), address_t(target), more)
        filled += more


def mark_windows(lengths: Any, burn_in: Any, is_start: Any, length: int) -> tuple[Tensor, Tensor]:
    """See :func:`relive.kernels.reference.episodes.mark_windows`; arrays do as well."""
    marks = np.empty((2, len(lengths), length), np.uint8)
    _mark(np.asarray(lengths), np.asarray(burn_in), np.asarray(is_start), marks[0], marks[1])
    starts, mask = torch.from_numpy(marks.view(np.bool_)).unbind()
    return starts, mask


@jit
def _mark(lengths: Ints, burn_in: Ints, is_start: Ints, starts: Bools, mask: Bools) -> None:
    starts[:] = 0
    mask[:] = 0
    for b in range(len(lengths)):
        if starts.shape[1]:
            starts[b, 0] = is_start[b]
        mask[b, burn_in[b] : lengths[b]] = 1
