"""Hindsight in plain Python: which goal a row of a batch gets instead of its own, and its window with that goal.

A goal is the place of a row, and stands for what the step before that row achieved. The live rows of an episode run
from ``first`` to ``end``, its boundary row or its newest.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..ring_state import HEAD, NEXT
from .nstep import INDEX, REWARD, STEPS, TERMINATED, TRUNCATED, add_reward, read, write_window
from .places import Ints, oldest, place_after, place_of, row_at
from .random import uniform

__all__ = ["EPISODE", "FINAL", "FUTURE", "PAST", "RANDOM", "choose_goals", "relabel_windows"]

FUTURE, FINAL, EPISODE, PAST, RANDOM = range(5)
"""The strategies, which say where a goal may come from: the steps from the anchor on, the last, all of the episode,
those before the anchor; or any step of the whole replay."""
GOALS = 2**32
"""The first number of a batch's stream that decides on goals; samplers stay below."""


def choose_goals(
    places: Ints, key: int, ratio: float, strategy: int, finished: bool, rows: int, state: Ints, step: Any, order: Any,
    ends: Any, seen: Ints, others: Ints, source: Any, at: Ints, out: Any, to: Ints, goal: Ints, which: Ints,
    begin: Ints, now: Ints, after: Ints, spans: Ints, rewards: Any, flags: Any, achieved: Any, desired: Any,
) -> int:  # fmt: skip
    """Which rows of a batch get another goal, which, and the steps of their windows.

    Row i of the batch is relabelled if number GOALS + 2i of the stream ``key`` is below ``ratio``, it has a step to
    choose from, and, if only ``finished`` episodes count, its own is over. The next number of the stream chooses among
    these steps. ``others`` are the places of transitions drawn for RANDOM. ``out`` holds the rows of the batch as
    :func:`relive.kernels.reference.windows.windows` made them.

    For the m-th of those rows, ``which[m]`` is its i; ``spans[:, m]`` are the places of ``first``, ``end`` and the
    goal; and the steps of its window are entries ``begin[m]`` to ``begin[m + 1]`` of the following: ``now`` and
    ``after``, the places of a step and of the row that follows; ``rewards`` and ``flags`` (terminated, truncated) as
    they were recorded; ``achieved`` and ``desired``, the ``goal[1]`` bytes at ``goal[0]`` of the row that follows and
    of the goal. ``ends`` and ``seen`` are notes of the fast twin. Returns the number of rows relabelled.
    """

    def following(place: int) -> int:
        return place_after(place, place // rows * rows, rows)

    found = begin[0] = 0
    for i, place in enumerate(places.tolist()):
        e, _, number = row_at(place, rows, state)
        least, head = oldest(e, rows, state), int(state[e, HEAD])
        if number < least:  # there is no such row any more, or not yet
            continue
        first = number - min(int(step[place]), number - least)
        end = number
        while end + 1 < head and step[place_of(end + 1, e, rows)] == step[place_of(end, e, rows)] + 1:
            end += 1
        low, high = {
            FUTURE: (number + 1, end),
            FINAL: (end, end),
            EPISODE: (first + 1, end),
            PAST: (first + 1, number),
            RANDOM: (0, 0),
        }[strategy]
        under_way = end == head - 1 and state[e, NEXT] > 0
        if uniform(key, GOALS + 2 * i) >= ratio or high < low or (finished and under_way):
            continue
        chosen = low + int(uniform(key, GOALS + 2 * i + 1) * (high - low + 1))
        aim = following(int(others[i])) if strategy == RANDOM else place_of(chosen, e, rows)
        which[found] = i
        spans[:, found] = place_of(first, e, rows), place_of(end, e, rows), aim
        entry, here = int(begin[found]), place
        for _ in range(read(out[i], to[STEPS], np.int32)):
            now[entry], after[entry] = here, following(here)
            rewards[entry] = read(source[here], at[REWARD], np.float32)
            flags[:, entry] = source[here, at[TERMINATED]], source[here, at[TRUNCATED]]
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
    """Rewrite the windows of relabelled rows: they end where a step terminates or is truncated, or with the last.

    ``which``, ``begin`` and ``after`` are as :func:`choose_goals` left them, ``rewards``, ``terminated`` and
    ``truncated`` those of the steps with the new goal; ``out``, ``to``, ``sizes`` and ``last`` are those of
    :func:`windows`. The goals ``desired`` go to the bytes ``goals`` of the rows. ``used[m]`` is the window's last step.
    ``mask`` becomes True for those rows.
    """
    for m, i in enumerate(which.tolist()):
        value, discount, k, entry = 0.0, 1.0, 0, int(begin[m])
        for entry in range(begin[m], begin[m + 1]):
            value, discount = add_reward(value, discount, rewards[entry], gamma)
            k += 1
            if terminated[entry] or truncated[entry]:
                break
        used[m], last[i], mask[i] = entry, after[entry], True
        following = read(out[i], to[INDEX], np.int64) + k * envs
        write_window(out[i], to, following, k, value, discount, terminated[entry], truncated[entry])
        if sizes[2] > 0:
            out[i, sizes[1] : sizes[1] + sizes[2]] = source[after[entry], : sizes[2]]
        for byte in goals.tolist():
            out[i, byte : byte + desired.shape[1]] = desired[begin[m]]
