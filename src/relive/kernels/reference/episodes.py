"""Windows of rollouts: where episodes start, how they are cut into windows, and windows as padded rows."""

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
    """Mark the steps that are the first of their episode.

    A step that is not real and ends no episode changes nothing: it may be the one in which ``NEXT_STEP`` autoreset
    resets, or one that was left out in the middle of an episode.

    Args:
        done: ``[T, N]``, ``terminated | truncated``.
        real: ``[T, N]``, the mask.
        ended: ``[N]``, whether the episode before the first row had ended; overwritten by the same for the newest row.
        starts: ``[T, N]``, written.
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
    """Cut runs into windows; a run is as many successive real steps of one episode as there are.

    The windows of a run begin at its steps 0, stride, 2 stride, ... as long as each has a step that no window before it
    has. A window has ``length`` steps, or as many as the run has left.

    Args:
        done: ``[T, N]``, as for :func:`episode_starts`; ``real`` and ``starts`` too.
        length: steps of a window.
        stride: steps from the start of one window to that of the next.
        tails: False leaves out windows of fewer than ``length`` steps.
        complete: True leaves out all but whole episodes.
        windows: ``[K, 5]``, written as far as there is room, env by env in the order of time: the env, the window's
            first step, how many steps it has, the episode's first step in this rollout or 0, and 1 if the episode
            begins there.

    Returns:
        The number of windows, which may be more than there is room for.
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
    """Copy windows out of rows, and fill each up with padding.

    Args:
        source: uint8 ``[R, W]``.
        first: ``[B]``, the first row of each window; its next rows are ``first + step``, ``first + 2 step``, ...
        step: the distance in rows from one step of a window to the next.
        lengths: ``[B]``, how many rows each window has.
        pad: uint8 ``[W]``, the row that fills a window up.
        length: rows of every window with its padding.
        out: a contiguous tensor of the result's shape, to write to instead of a fresh one.

    Returns:
        uint8 ``[B, length, W]``.
    """
    time = torch.arange(length, device=source.device)
    inside = time < lengths[:, None]
    index = torch.where(inside, first[:, None] + time * step, 0)
    rows = source.index_select(0, index.view(-1)).view(*index.shape, -1)
    found = torch.where(inside[..., None], rows, pad)
    return found if out is None else out.copy_(found)


def mark_windows(lengths: Tensor, burn_in: Tensor, is_start: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Which rows of windows begin an episode (only first rows can), and which are steps to learn from.

    Args:
        lengths: ``[B]``, how many rows each window has; the rest is padding.
        burn_in: ``[B]``, how many of those are unrolled only for the state.
        is_start: ``[B]``, 1 where the first row begins an episode.
        length: rows of the batch.

    Returns:
        Both, bool ``[B, length]``.
    """
    time = torch.arange(length, device=lengths.device)
    return (time == 0) & (is_start[:, None] == 1), (time < lengths[:, None]) & (time >= burn_in[:, None])
