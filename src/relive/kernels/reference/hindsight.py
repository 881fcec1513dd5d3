"""Hindsight in plain Python: which goal a row of a batch gets instead of its own, and what its window comes to then.

A goal is the place of a row: that goal is what was achieved by the step before it. The rows of an episode that are
live run from ``first`` to ``end``, its boundary row or the newest that it had.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .random import uniform

__all__ = ["EPISODE", "FINAL", "FUTURE", "PAST", "RANDOM", "choose_goals", "relabel_windows"]

Ints = NDArray[np.int64]
FUTURE, FINAL, EPISODE, PAST, RANDOM = range(5)
"""The strategies: a step from the anchor on, the last, any, one before the anchor; or any of the whole replay."""
GOALS = 2**32
"""The first number of a batch's stream that decides on goals; samplers stay below."""


def choose_goals(
    places: Ints, key: int, ratio: float, strategy: int, finished: bool, rows: int, state: Ints, step: Any, order: Any,
    ends: Any, seen: Ints, others: Ints, source: Any, at: Ints, out: Any, to: Ints, goal: Ints, which: Ints,
    begin: Ints, now: Ints, after: Ints, spans: Ints, rewards: Any, flags: Any, achieved: Any, desired: Any,
) -> int:  # fmt: skip
    """Which rows of a batch get another goal, which, and the steps of their windows.

    Row i of the batch is relabelled if number GOALS + 2i of the stream ``key`` is below ``ratio``, it has a step to
    choose from, and, if only ``finished`` episodes count, its own is over. Of these steps the next number chooses.
    ``others``
    are the places of transitions drawn for RANDOM. ``out`` holds the rows of the batch as :func:`windows` made them.

    For the m-th of those rows, ``which[m]`` is its i; ``spans[:, m]`` are the places of ``first``, ``end`` and the
    goal; and the steps of its window are entries ``begin[m]`` to ``begin[m + 1]`` of the following: ``now`` and
    ``after``, the places of a step and of the row that follows; ``rewards`` and ``flags`` (terminated, truncated) as
    they were recorded; ``achieved`` and ``desired``, the ``goal[1]`` bytes at ``goal[0]`` of the row that follows and
    of the goal. ``ends`` and ``seen`` are notes of the fast twin. Returns the number of rows relabelled.
    """

    def following(place: int) -> int:
        return place + 1 if (place + 1) % rows else place + 1 - rows

    found = begin[0] = 0
    for i, place in enumerate(places.tolist()):
        e, head = place // rows, int(state[place // rows, 0])
        oldest = max(int(state[e, 1]), head - rows)
        (number,) = [n for n in range(head - rows, head) if n % rows == place % rows]
        if number < oldest:  # there is no such row any more, or not yet
            continue
        first = number - min(int(step[place]), number - oldest)
        end = number
        while end + 1 < head and step[e * rows + (end + 1) % rows] == step[e * rows + end % rows] + 1:
            end += 1
        low, high = {
            FUTURE: (number + 1, end),
            FINAL: (end, end),
            EPISODE: (first + 1, end),
            PAST: (first + 1, number),
            RANDOM: (0, 0),
        }[strategy]
        under_way = end == head - 1 and state[e, 2] > 0
        if uniform(key, GOALS + 2 * i) >= ratio or high < low or (finished and under_way):
            continue
        chosen = low + int(uniform(key, GOALS + 2 * i + 1) * (high - low + 1))
        aim = following(int(others[i])) if strategy == RANDOM else e * rows + chosen % rows
        which[found] = i
        spans[:, found] = e * rows + first % rows, e * rows + end % rows, aim
        entry, here = int(begin[found]), place
        for _ in range(out[i, to[3] : to[3] + 4].view(np.int32)[0]):
            now[entry], after[entry] = here, following(here)
            rewards[entry] = source[here, at[0] : at[0] + 4].view(np.float32)[0]
            flags[:, entry] = source[here, at[1]], source[here, at[2]]
            achieved[entry] = source[after[entry], goal[0] : goal[0] + goal[1]]
            desired[entry] = source[aim, goal[0] : goal[0] + goal[1]]
            here, entry = following(here), entry + 1
        found += 1
        begin[found] = entry
    return found


def relabel_windows(
    which: Ints, begin: Ints, after: Ints, envs: int, gamma: float, rewards: Any, terminated: Any, truncated: Any,
    source: Any, out: Any, to: Ints, sizes: Ints, desired: Any, goals: Ints, last: Ints, used: Ints, mask: Any,
) -> None:  # fmt: skip
    """Write the windows of relabelled rows anew: they end where a step terminates or is truncated, or with the last.

    ``which``, ``begin`` and ``after`` are as :func:`choose_goals` left them, ``rewards``, ``terminated`` and
    ``truncated`` what the steps come to with the new goal; ``out``, ``to``, ``sizes`` and ``last`` are those of
    :func:`windows`. The goals ``desired`` go to the bytes ``goals`` of the rows. ``used[m]`` is the window's last step.
    ``mask`` becomes True for those rows.
    """
    for m, i in enumerate(which.tolist()):
        value, factor, k, entry = 0.0, 1.0, 0, int(begin[m])
        for entry in range(begin[m], begin[m + 1]):
            value += factor * float(rewards[entry])
            factor *= gamma
            k += 1
            if terminated[entry] or truncated[entry]:
                break
        used[m], last[i], mask[i] = entry, after[entry], True
        index = out[i, to[0] : to[0] + 8].view(np.int64)[0]
        for field, (result, dtype) in enumerate(
            [
                (index + k * envs, np.int64),
                (0.0 if terminated[entry] else factor, np.float32),
                (k, np.int32),
                (value, np.float32),
                (terminated[entry], np.uint8),
                (truncated[entry], np.uint8),
            ],
            start=1,
        ):
            out[i, to[field] : to[field] + np.dtype(dtype).itemsize].view(dtype)[0] = result
        if sizes[2] > 0:
            out[i, sizes[1] : sizes[1] + sizes[2]] = source[after[entry], : sizes[2]]
        for byte in goals.tolist():
            out[i, byte : byte + desired.shape[1]] = desired[begin[m]]
