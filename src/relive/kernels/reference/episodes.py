"""Windows of rollouts: where episodes start, which windows they are cut into, and rows as padded batches."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .rule import window_start

__all__ = ["episode_starts", "gather_windows", "mark_windows", "plan_windows"]

Ints = NDArray[np.int64]
Bools = NDArray[np.uint8]


def episode_starts(done: Bools, real: Bools, ended: Bools, starts: Bools) -> None:
    """Which steps ``[T, N]`` are the first of their episode.

    A step that is not real and ends no episode says nothing: it may be the one in which ``NEXT_STEP`` autoreset resets,
    or one that was left out in the middle of an episode. ``ended`` ``[N]``, whether the episode before had ended by the
    first row, is brought up to the newest.
    """
    for t in range(len(done)):
        for env in range(done.shape[1]):
            starts[t, env] = real[t, env] and ended[env]
            if done[t, env]:
                ended[env] = 1
            elif real[t, env]:
                ended[env] = 0


def plan_windows(
    done: Bools, real: Bools, starts: Bools, length: int, stride: int, tails: bool, complete: bool, windows: Ints
) -> int:
    """Cut the runs of real steps of one episode into windows; how many there are.

    Windows of a run of K steps begin at its steps 0, stride, 2 stride, ... and have ``length`` steps, or as many as are
    left; there is one as long as it brings a step that no window before it has. ``tails`` False leaves out those that
    are shorter, ``complete`` True all but whole episodes. Noted are, env by env in the order of time, (env, start,
    length, where the episode starts or 0, whether it starts there) in ``windows`` ``[K, 5]``, as far as there is room.
    """
    found = 0
    steps, envs = done.shape
    for env in range(envs):
        t = 0
        origin = begins = 0
        while t < steps:
            if starts[t, env]:
                origin, begins = t, 1
            if not real[t, env]:
                t += 1
                continue
            end = t
            while end + 1 < steps and not done[end, env] and real[end + 1, env]:
                end += 1
            whole = starts[t, env] and done[end, env]
            run = end + 1 - t
            starting = range(0, window_start(run - 1, length, stride) + 1, stride) if whole or not complete else ()
            for first in starting:
                size = min(length, run - first)
                if size == length or tails:
                    if found < len(windows):
                        windows[found] = env, t + first, size, origin, begins
                    found += 1
            t = end + 1
    return found


def gather_windows(
    source: Tensor, first: Tensor, step: int, lengths: Tensor, pad: Tensor, length: int, out: Tensor | None = None
) -> Tensor:
    """Rows ``first``, ``first + step``, ... of ``source`` (uint8 ``[R, W]``), ``lengths`` of them for each window.

    Returns:
        uint8 ``[B, length, W]``; ``pad`` (uint8 ``[W]``) stands where a window has no row. ``out``,
        if it is given, a contiguous tensor of that shape.
    """
    time = torch.arange(length, device=source.device)
    inside = time < lengths[:, None]
    index = torch.where(inside, first[:, None] + time * step, 0)
    rows = source.index_select(0, index.view(-1)).view(*index.shape, -1)
    found = torch.where(inside[..., None], rows, pad)
    return found if out is None else out.copy_(found)


def mark_windows(lengths: Tensor, burn_in: Tensor, is_start: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Which rows of windows begin an episode, as only first ones can, and which are to be learned from.

    Args:
        lengths: of each window ``[B]``, how many rows it has; the rest is padding.
        burn_in: how many of those are unrolled for their state alone.
        is_start: 1 where the first row begins an episode.
        length: rows of the batch.

    Returns:
        two bool ``[B, length]``.
    """
    time = torch.arange(length, device=lengths.device)
    return (time == 0) & (is_start[:, None] == 1), (time < lengths[:, None]) & (time >= burn_in[:, None])
