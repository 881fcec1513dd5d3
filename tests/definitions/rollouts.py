"""What :mod:`relive.core` does with rollouts: T steps of N envs, time first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


def episode_starts(done: Bytes, real: Bytes, ended: Bytes, starts: Bytes) -> None:
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
    done: Bytes, real: Bytes, starts: Bytes, length: int, stride: int, tails: bool, complete: bool
) -> list[list[int]]:
    """Cut runs into windows; a run is as many successive real steps of one episode as there are.

    The windows of a run begin at its steps 0, stride, 2 stride, ... as long as each has a step that no window before it
    has. A window has ``length`` steps, or as many as the run has left.

    Args:
        done: ``[T, N]``, as for :func:`episode_starts`; ``real`` and ``starts`` too.
        length: steps of a window.
        stride: steps from the start of one window to that of the next.
        tails: False leaves out windows of fewer than ``length`` steps.
        complete: True leaves out all but whole episodes.

    Returns:
        Env by env in the order of time: the env, the window's first step, how many steps it has, the episode's first
        step in this rollout or 0, and 1 if the episode begins there.
    """
    windows = list[list[int]]()
    steps, envs = done.shape
    for env in range(envs):
        t = origin = begins = 0
        while t < steps:
            if starts[t, env]:
                origin, begins = t, 1
            end = t  # the first step after the run
            while end < steps and real[end, env]:
                end += 1
                if done[end - 1, env]:
                    break
            whole = end > t and starts[t, env] and done[end - 1, env]
            covered = first = t
            while covered < end and (whole or not complete):
                size = min(length, end - first)
                if size == length or tails:
                    windows.append([env, first, size, origin, begins])
                covered, first = first + size, first + stride
            t = max(end, t + 1)
    return windows


def copy_windows(source: Bytes, first: Ints, step: int, lengths: Ints, pad: Bytes, out: Bytes) -> None:
    """Copy windows of rows ``[R, W]`` to ``out``, ``[B, L, W]``, and fill each up with the row ``pad``.

    Window b has the rows ``first[b]``, ``first[b] + step``, ..., ``lengths[b]`` of them.
    """
    for b, window in enumerate(out):
        for t, row in enumerate(window):
            row[:] = source[first[b] + t * step] if t < lengths[b] else pad


def mark_windows(lengths: Ints, is_start: Ints, length: int) -> NDArray[np.bool_]:
    """Mark the rows of windows that begin an episode (only first rows can), and those that are steps to learn from.

    Args:
        lengths: ``[B]``, how many rows each window has; the rest is padding.
        is_start: ``[B]``, 1 where the first row begins an episode.
        length: rows of the batch.

    Returns:
        Both, bool ``[2, B, length]``.
    """
    time = np.arange(length)
    starts = (time == 0) & (is_start[:, None] == 1)
    return np.stack([starts, time < lengths[:, None]])
