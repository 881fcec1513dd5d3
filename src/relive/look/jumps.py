"""Jumps: steps inside an episode that move the observation to where episodes begin."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..steps.arrays import Bools
from .experience import Experience, are_whole
from .findings import Finding

FEW = 3
"""How many jumps a finding needs."""

ENOUGH = 8
"""How many known beginnings of episodes show where these lie."""

BEYOND = 5.0
"""A jump moves this many times farther than the farthest of all ordinary steps."""

AROUND = 5.0
"""An observation lies among others if it is at most this many usual steps outside of them."""

NARROW = 0.3
"""Episodes begin in a part of the range of a number if they do so in this share of it at most."""

MOST = 0.9
"""The share of jumps that must agree."""


# Where the states before them foretell the jumps, a finding stays "possible". A pole that falls, and a task that goes
# on at its start, leave the same log: of what is unexplained they have 0.22 to 0.50 and 0.28 to 0.44.
def joined_episodes(steps: Experience) -> Iterator[Finding]:
    """Steps far beyond all others that lead to where episodes begin, though no end is flagged: two episodes in one.

    A jump alone proves nothing: an angle comes round, and a portal leads elsewhere. So a jump also has to begin outside
    of the place where episodes begin, and to lead into it.
    """
    numbers, begins = steps.numbers, _begins(steps)
    # images and whole numbers may change by any amount in a step; and windows of n steps reach over ends by themselves
    if not numbers.shape[1] or numbers.dtype.kind != "f" or are_whole(numbers) or not np.isfinite(numbers).all():
        return
    # where one flag stands for both kinds of end, a time limit rightly has none
    if begins.sum() < ENOUGH or steps.window > 1 or steps.truncated is None:
        return
    last = steps.ended | ~steps.follows
    inside = ~steps.ended & ~begins & (steps.follows if steps.next_obs is None else True)
    far = np.sort(steps.jump[inside])
    most = max(int(last.sum()) + FEW, len(far) // 20)  # a flag in another row makes one jump
    if len(far) <= 2 * most:
        return
    jumps = inside & (steps.jump > BEYOND * far[len(far) - most - 1])
    rows, calm = np.flatnonzero(jumps), inside & ~jumps
    if len(rows) < FEW:
        return
    around = AROUND * np.abs(steps.next_numbers[calm] - numbers[calm]).mean(0)
    low, high = numbers[begins].min(0), numbers[begins].max(0)
    # where episodes begin all over the range, as at any angle, what lies outside says nothing
    narrow = high - low < NARROW * np.ptp(numbers, 0)
    after, before = ((x >= low - around) & (x <= high + around) for x in (steps.next_numbers[rows], numbers[rows]))
    joined = rows[after.all(1) & ~before[:, narrow].all(1)]
    if len(joined) < FEW or len(joined) <= len(rows) * MOST:
        return
    # the row of a late flag is the one after, or, in a replay, which cannot draw it, none
    late = (last[np.minimum(joined + 1, len(steps) - 1)] | last[joined]).mean() > MOST
    yield from steps.found("jump-inside-an-episode", "likely" if late else "possible",
        "steps inside an episode jump to where episodes begin, far beyond all other steps: "
        + ("flags follow in the row after, so ends are flagged one row late"
           if late else "an end is missing there, or the env itself goes back"),
        "store the flags of the step itself, and next_observations, which show where an episode goes on",
        joined, len(far))  # fmt: skip


def _begins(steps: Experience) -> Bools:
    """True where a row is known to be the first of its episode, bool ``[S]``."""
    if steps.step is not None:
        return steps.step == 0
    return steps.starts | (np.append(True, steps.env[1:] != steps.env[:-1]) & steps.begins)
