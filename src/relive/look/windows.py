"""Rules on n-step transitions that were stored ready-made: where their windows end, and which flags they keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..steps.arrays import Bools
from .experience import Experience, same_rows
from .findings import Finding, Lack, Looked, Verdict, found
from .order import lagging

__all__ = ["windows"]


FEW = 3
"""How many rows must look wrong before there is a finding."""

SYSTEMATIC = 0.5
"""The share of the windows that begin equally long before an end, and run over it, before there is a finding."""

MOST = 0.9
"""The share of ends that must lack their tails before there is a finding."""


def windows(steps: Experience) -> Verdict:
    """Windows over an end, cut short by another env's end, with the flag of their first step, or missing at an end."""
    if steps.next_obs is None:
        return Lack("no next observations are stored, which would show n-step transitions", absent=True)
    if steps.disorder:
        return Lack(steps.disorder)
    if steps.window < 2:
        return Lack("rows are transitions of one step", absent=True)
    if lagging(steps) is not None:
        return Lack("observations are those of the row before")
    return Looked(len(steps), _windows(steps, steps.window))


def _windows(steps: Experience, n: int) -> Iterator[Finding]:
    ends_within, crossing = np.zeros(len(steps), np.bool_), np.zeros(len(steps), np.bool_)
    last = steps.ended.copy()  # of episodes: in a row that ends its window at the same place, the flag is the window's
    last[:-1] &= ~(steps.ended[1:] & _lead_to_one(steps, slice(-1), slice(1, None)))
    for k in range(n - 1):  # an end before the window's last step
        ends_within[: len(steps) - k] |= last[k:]
    reach = steps.reaches(n)
    crossing[: len(steps) - n] = reach & ends_within[: len(steps) - n]
    # where observations come again and again, a right window may lead to the one n rows on by chance
    for k in range(1, n - 1):
        crossing[:-k] &= ~(last[k:] & _lead_to_one(steps, slice(-k), slice(k, None)))
    begins = len(steps) - n
    shares = [crossing[:begins][last[k : begins + k]].mean() for k in range(n - 1) if last[k : begins + k].any()]
    if crossing.sum() >= FEW and max(shares) > SYSTEMATIC:
        yield found("n-step-over-an-end", "certain",
                    f"rows are {n}-step transitions, and windows run over an episode's end: the next observation, and "
                    "perhaps some rewards, are of another episode",
                    "stop a window at terminated or truncated, with the discount of the steps it has",
                    crossing, len(steps), place=steps.place)  # fmt: skip
    yield from _cut_short(steps, n)
    yield from _tails(steps, n)
    yield from _flags_of_first_step(steps, n)


def _cut_short(steps: Experience, n: int) -> Iterator[Finding]:
    """Windows of fewer than n steps, though neither an end of their env nor its newest row lies in them.

    That is no mistake where a discount is stored with each window.
    """
    if ("discount",) in steps.others:
        return
    short = np.zeros(len(steps), np.bool_)
    open_ = ~steps.ended & steps.follows
    for k in range(1, n):
        size = len(steps) - n
        joined = np.logical_and.reduce([open_[j : size + j] for j in range(n)])
        short[:size] |= joined & steps.reaches(k)[:size] & ~steps.reaches(n) & ~steps.still[:size]
    if short.sum() >= FEW:
        yield found("n-step-cut-short", "certain",
                    f"rows are {n}-step transitions, and some windows stop after fewer steps though their episode goes "
                    "on, as where another environment's end cuts all windows: a discount of gamma ** n is wrong there",
                    "cut each environment's windows at its own ends, and store the discount of the steps summed",
                    short, len(steps), place=steps.place)  # fmt: skip


def _tails(steps: Experience, n: int) -> Iterator[Finding]:
    """Episodes whose last n windows do not all lead to the final observation."""
    ends = np.flatnonzero(steps.ended & steps.follows & ~steps.still & np.append(False, steps.follows[:-1]))
    ends = ends[~steps.ended[ends - 1] & (ends + n < len(steps))]  # the first window that reaches the end
    reached = np.zeros(len(steps), np.bool_)
    for k in range(1, n + 1):
        reached[: len(steps) - k] |= steps.reaches(k)
    ends = ends[~reached[ends] & ~_lead_to_one(steps, ends, ends - 1)]  # of others, the flags are those of first steps
    if len(ends) < FEW:
        return
    joined, count = np.ones(len(ends), np.bool_), np.ones(len(ends), np.int64)
    for k in range(1, n):
        joined &= steps.ended[ends + k] & _lead_to_one(steps, ends, ends + k)
        count += joined
    alone, leaks = (count == 1) & ~steps.ended[ends + 1], (count == n - 1) & ~steps.ended[ends + n - 1]
    if alone.mean() > MOST:
        yield found("n-step-tail-missing", "likely",
                    f"rows are {n}-step transitions, and of each episode one row alone leads to the final observation: "
                    f"no window begins at the last {n - 1} steps",
                    "at an end, also store the windows that begin at its last n - 1 steps, with fewer rewards each",
                    ends[alone], len(ends), place=steps.place)  # fmt: skip
    elif leaks.mean() > MOST:
        yield found("n-step-over-an-end", "likely",
                    f"rows are {n}-step transitions, and the window that begins at an episode's last step does not "
                    "stop there: it runs on into the next episode",
                    "look at the flag of a window's first step, too",
                    ends[leaks] + n - 1, len(ends), place=steps.place)  # fmt: skip


def _lead_to_one(steps: Experience, rows: Any, others: Any) -> Bools:
    """Whether rows ``[K]`` have the same next observations as ``others``, bool ``[K]``."""
    return np.logical_and.reduce([same_rows(leaf[rows], leaf[others]) for leaf in (steps.next_obs or {}).values()])


def _flags_of_first_step(steps: Experience, n: int) -> Iterator[Finding]:
    """Windows that stop at an end without its flag: their next observation is that of an ended row after them."""
    lost = np.zeros(len(steps), np.bool_)
    open_ = ~steps.ended & steps.follows
    for k in range(1, n):
        size = len(steps) - k
        joined = np.logical_and.reduce([open_[j : size + j] for j in range(k)])
        joined &= _lead_to_one(steps, slice(size), slice(k, None))
        lost[:size] |= joined & steps.terminated[k:] & ~steps.still[:size]
    if lost.sum() >= FEW:
        yield found("n-step-flag-of-first-step", "certain",
                    f"rows are {n}-step transitions whose next observation is a terminal one while terminated is that "
                    "of their first step: a learner bootstraps from the end",
                    "store terminated of the window's last step",
                    lost, len(steps), place=steps.place)  # fmt: skip
