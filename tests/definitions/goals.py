"""Which rows of a batch get another goal, which goal, and what their windows are then, in plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np

from definitions.places import oldest, place_after, place_of, row_at
from definitions.windows import get, put, read_windows, summed
from relive.core.words import HEAD, NEXT

FUTURE, FINAL, EPISODE, PAST, RANDOM = range(5)
GOALS = 2**32
"""The first number of a batch's stream that decides on goals; samplers stay below."""


def uniform(stream: int, number: int) -> float:
    """A number of a stream, in [0, 1): the upper 53 bits of splitmix64 (Steele, Lea and Flood 2014)."""
    z = (stream + 0x9E3779B97F4A7C15 * number) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53


def plan_goals(
    ring: Any, layout: Any, places: Any, n: int, gamma: float, key: int, ratio: float, others: Any, out: Any,
    last: Any, steps: Any, pairs: Any,
) -> int:  # fmt: skip
    """A batch of windows, which of its rows get another goal, which goal, and the steps of these rows' windows.

    Returns the number of rows with another goal, or -1 - i if ``places[i]`` is not that of a row.

    ``out`` and ``last`` become those of :func:`definitions.windows.read_windows`, with no row marked. Row i of the
    batch is relabelled if number GOALS + 2i of the stream ``key`` is below ``ratio``, it has a step to choose from,
    and, if only episodes that are over count, its own is over. The next number of the stream chooses among these steps.
    ``others`` are the places of transitions drawn for RANDOM. The new goals are written into ``out``.

    ``steps`` has the members of :class:`relive.core.RelabelledSteps`. ``pairs``, uint8 ``[2 * M * goal_bytes]``, become
    the goals that were achieved after the M steps, and the new goals.
    """
    bad = read_windows(ring, layout.window, places, n, gamma, out, last)
    if bad >= 0:
        return -1 - bad
    out[:, layout.mark] = 0
    rows, at, size = ring.rows, layout.goal_at, layout.goal_bytes
    reached, wanted = pairs.reshape(2, len(steps.now), size)
    found = steps.begin[0] = 0
    for i, place in enumerate(places.tolist()):
        e, number = row_at(place, ring)
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
        }[layout.strategy]
        under_way = end == head - 1 and ring.state[e, NEXT] > 0
        if uniform(key, GOALS + 2 * i) >= ratio or high < low or (layout.finished and under_way):
            continue
        chosen = low + int(uniform(key, GOALS + 2 * i + 1) * (high - low + 1))
        aim = place_after(int(others[i]), rows) if layout.strategy == RANDOM else place_of(chosen, e, rows)
        steps.which[found] = i
        steps.spans[:, found] = place_of(first, e, rows), place_of(end, e, rows), aim
        entry, here = int(steps.begin[found]), place
        for _ in range(get(out[i], layout.window.steps, np.int32)):
            steps.now[entry], steps.after[entry] = here, place_after(here, rows)
            steps.rewards[entry] = ring.reward[here]
            steps.flags[:, entry] = ring.terminated[here], ring.truncated[here]
            reached[entry] = ring.memory[steps.after[entry], at : at + size]
            wanted[entry] = ring.memory[aim, at : at + size]
            here, entry = place_after(here, rows), entry + 1
        for byte in (layout.into_obs, layout.into_next):
            out[i, byte : byte + size] = ring.memory[aim, at : at + size]
        found += 1
        steps.begin[found] = entry
    return found


def relabel_windows(
    ring: Any, layout: Any, gamma: float, found: int, judged: bool, out: Any, last: Any, steps: Any, rewards: Any
) -> int:
    """Rewrite the windows of relabelled rows: they end where a step terminates or is truncated, or with the last.

    ``out``, ``last`` and ``steps`` are as :func:`plan_goals` left them, with ``found`` rows; but ``steps`` has the
    flags of the new goals. ``rewards``, float32 ``[M]`` or more, are those of the new goals. These rows are marked.

    If the rewards were ``judged`` by the new goals, they have to be finite. Returns -1, or the first step with another
    reward; then nothing is written.
    """
    to, size = layout.window, layout.goal_bytes
    if judged and not np.isfinite(rewards[: steps.begin[found]]).all():
        return int(np.argmin(np.isfinite(rewards)))
    for m, i in enumerate(steps.which[:found].tolist()):
        window = list(range(int(steps.begin[m]), int(steps.begin[m + 1])))
        ended = [entry for entry in window if steps.flags[:, entry].any()]
        end = min(ended, default=window[-1])
        kept = [rewards[entry] for entry in window if entry <= end]
        value, discount = summed(kept, gamma)
        terminal, cut = steps.flags[:, end]
        steps.used[m], last[i], out[i, layout.mark] = end, steps.after[end], 1
        # the row k later in the same env
        put(out[i], to.next_index, get(out[i], to.index, np.int64) + len(kept) * len(ring.state), np.int64)
        put(out[i], to.discount, 0.0 if terminal else discount, np.float32)
        put(out[i], to.steps, len(kept), np.int32)
        put(out[i], to.reward, value, np.float32)
        put(out[i], to.terminated, terminal, np.uint8)
        put(out[i], to.truncated, cut, np.uint8)
        if to.next_bytes > 0:
            out[i, to.next_at : to.next_at + to.next_bytes] = ring.memory[last[i], : to.next_bytes]
        out[i, layout.into_next : layout.into_next + size] = out[i, layout.into_obs : layout.into_obs + size]
    return -1
