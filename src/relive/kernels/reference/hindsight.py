"""Hindsight in plain Python: which goal a row of a batch gets instead of its own, and its window with that goal.

A goal is the place of a row, and stands for what the step before that row achieved. The live rows of an episode run
from ``first`` to ``end``, its boundary row or its newest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..ring_state import HEAD, NEXT, RingArrays
from .nstep import LAYOUT, NEXT_AT, NEXT_BYTES, add_reward, bootstrap, results, write_window
from .places import Ints, oldest, place_after, place_of, row_at
from .random import uniform
from .windows import windows

__all__ = [
    "EPISODE",
    "FINAL",
    "FINISHED",
    "FUTURE",
    "GOAL_AT",
    "GOAL_BYTES",
    "INTO_NEXT",
    "INTO_OBS",
    "MARK",
    "OTHERS",
    "PAST",
    "RANDOM",
    "STRATEGY",
    "RelabelledSteps",
    "plan_goals",
    "relabel_windows",
]

FUTURE, FINAL, EPISODE, PAST, RANDOM = range(5)
"""The strategies, which say where a goal may come from: the steps from the anchor on, the last, all of the episode,
those before the anchor; or any step of the whole replay."""
GOAL_AT, GOAL_BYTES, INTO_OBS, INTO_NEXT, MARK, STRATEGY, FINISHED = range(LAYOUT, LAYOUT + 7)
"""The entries of ``batch`` after those of :mod:`relive.kernels.reference.nstep`: the byte of a ring's row at which the
achieved goal is, and its bytes (0: kernels cannot read it); the bytes of a batch's row at which the desired goals of
both observations are, and the flag that marks relabelled rows; the strategy; and 1 if only episodes that are over
count."""
GOALS = 2**32
"""The first number of a batch's stream that decides on goals; samplers stay below."""
OTHERS = 2**32 + 1
"""The number of a batch's further stream, by which the goals of RANDOM are drawn."""


class RelabelledSteps(NamedTuple):
    """The steps in the windows of relabelled rows: of a batch of B rows at most B rows, and M = B * n steps.

    The steps of the m-th such row are entries ``begin[m]`` to ``begin[m + 1]`` of all that is ``[M]``.
    """

    which: Ints
    """int64 ``[B]``: the rows of the batch."""
    begin: Ints
    """int64 ``[B + 1]``."""
    now: Ints
    """int64 ``[M]``: the places of the steps."""
    after: Ints
    """int64 ``[M]``: the places of the rows that follow them."""
    spans: Ints
    """int64 ``[3, B]``: the places of the episode's first and last live rows, and of the goal."""
    rewards: Any
    """float32 ``[M]``: the recorded rewards."""
    flags: Any
    """uint8 ``[2, M]``: terminated and truncated, as recorded and then with the new goal."""
    used: Ints
    """int64 ``[B]``: the last step of each window with its new goal."""
    places: Ints
    """int64 ``[B]``: the anchors of a batch that is drawn and read in one call."""
    last: Ints
    """int64 ``[B]``: the places of the rows after its windows."""


def plan_goals(
    ring: RingArrays, batch: Ints, places: Ints, n: int, gamma: float, key: int, ratio: float, others: Ints, out: Any,
    last: Ints, steps: RelabelledSteps, pairs: Any,
) -> int:  # fmt: skip
    """A batch of windows, which of its rows get another goal, which goal, and the steps of these rows' windows.

    Returns the number of rows with another goal, or -1 - i if ``places[i]`` is not that of a row.

    ``out`` and ``last`` become those of :func:`relive.kernels.reference.windows.windows`, with no row marked. Row
    i of the batch is relabelled if number GOALS + 2i of the stream ``key`` is below ``ratio``, it has a step to
    choose from, and, if only episodes that are over count, its own is over. The next number of the stream chooses among
    these steps. ``others`` are the places of transitions drawn for RANDOM. The new goals are written into ``out``.

    ``pairs``, uint8 ``[2, M, GOAL_BYTES]``, become the goals that were achieved after the steps, and the new goals.
    """
    bad = windows(ring, batch, places, n, gamma, out, last)
    if bad >= 0:
        return -1 - bad
    out[:, batch[MARK]] = 0
    rows, at, size = ring.rows, batch[GOAL_AT], batch[GOAL_BYTES]
    counts = results(out, batch).steps

    def following(place: int) -> int:
        return place_after(place, place // rows * rows, rows)

    found = steps.begin[0] = 0
    for i, place in enumerate(places.tolist()):
        e, _, number = row_at(place, ring)
        least, head = oldest(e, ring), int(ring.state[e, HEAD])
        if number < least:  # there is no such row any more, or not yet
            continue
        first = number - min(int(ring.step[place]), number - least)
        end = number
        while end + 1 < head and ring.step[place_of(end + 1, e, rows)] == ring.step[place_of(end, e, rows)] + 1:
            end += 1
        low, high = {
            FUTURE: (number + 1, end),
            FINAL: (end, end),
            EPISODE: (first + 1, end),
            PAST: (first + 1, number),
            RANDOM: (0, 0),
        }[int(batch[STRATEGY])]
        under_way = end == head - 1 and ring.state[e, NEXT] > 0
        if uniform(key, GOALS + 2 * i) >= ratio or high < low or (batch[FINISHED] and under_way):
            continue
        chosen = low + int(uniform(key, GOALS + 2 * i + 1) * (high - low + 1))
        aim = following(int(others[i])) if batch[STRATEGY] == RANDOM else place_of(chosen, e, rows)
        steps.which[found] = i
        steps.spans[:, found] = place_of(first, e, rows), place_of(end, e, rows), aim
        entry, here = int(steps.begin[found]), place
        for _ in range(counts[i]):
            steps.now[entry], steps.after[entry] = here, following(here)
            steps.rewards[entry] = ring.reward[here]
            steps.flags[:, entry] = ring.terminated[here], ring.truncated[here]
            for goals, row in zip(pairs, (steps.after[entry], aim), strict=True):
                goals[entry] = ring.memory[row, at : at + size]
            here, entry = following(here), entry + 1
        for byte in (batch[INTO_OBS], batch[INTO_NEXT]):
            out[i, byte : byte + size] = ring.memory[aim, at : at + size]
        found += 1
        steps.begin[found] = entry
    return found


def relabel_windows(
    ring: RingArrays, batch: Ints, gamma: float, found: int, judged: bool, out: Any, last: Ints, steps: RelabelledSteps,
    rewards: Any,
) -> int:  # fmt: skip
    """Rewrite the windows of relabelled rows: they end where a step terminates or is truncated, or with the last.

    ``out``, ``last`` and ``steps`` are as :func:`plan_goals` left them, with ``found`` rows; but ``steps`` has the
    flags of the new goals. ``rewards``, float32 ``[M]`` or more, are those of the new goals. These rows are marked.

    If the rewards were ``judged`` by the new goals, they have to be finite. Returns -1, or the first step with another
    reward; then nothing is written.
    """
    rewards = rewards[: steps.begin[found]]
    if judged and not np.isfinite(rewards).all():
        return int(np.argmin(np.isfinite(rewards)))
    written, size = results(out, batch), batch[GOAL_BYTES]
    for m, i in enumerate(steps.which[:found].tolist()):
        value, discount, k, entry = 0.0, 1.0, 0, int(steps.begin[m])
        for entry in range(steps.begin[m], steps.begin[m + 1]):
            value, discount = add_reward(value, discount, rewards[entry], gamma)
            k += 1
            if steps.flags[:, entry].any():
                break
        steps.used[m], last[i], out[i, batch[MARK]] = entry, steps.after[entry], 1
        following = written.index[i] + k * len(ring.state)  # the row k later in the same env
        terminal, cut = steps.flags[:, entry]
        write_window(written, i, following, k, value, bootstrap(discount, terminal), terminal, cut)
        if batch[NEXT_BYTES] > 0:
            out[i, batch[NEXT_AT] : batch[NEXT_AT] + batch[NEXT_BYTES]] = ring.memory[last[i], : batch[NEXT_BYTES]]
        out[i, batch[INTO_NEXT] : batch[INTO_NEXT] + size] = out[i, batch[INTO_OBS] : batch[INTO_OBS] + size]
    return -1
