"""Rules on the order of rows: whether each leads to the following one, repeats others, or stacks frames of another
episode.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..steps.arrays import Array, Bools, Ints
from ..steps.trees import dotted
from .digests import digests
from .ends import offset_of_ends
from .experience import Experience, same_rows
from .findings import Finding, Lack, Looked, Verdict, found

__all__ = ["continuity", "duplicate_rows", "lagging", "stacks"]


FEW = 3
"""How many rows must look wrong before there is a finding."""

SOME = 0.1
"""The share of rows that lead to the following one by which the rows are known to be in the order of time."""

ELSEWHERE = 0.3
"""The share of rows that must lead to another stored row before rows count as out of order."""


def continuity(steps: Experience) -> Verdict:
    """Rows whose next observation is not the following row's, though no end is flagged between them."""
    if steps.next_obs is None:
        return Lack("it keeps no next observations to compare with the following rows", absent=True)
    if not steps.ordered:
        return Lack("the transitions have no order")
    if not steps.inner.any():
        return Lack("no step is followed by another one of its episode")
    if steps.window > 1:
        late = lagging(steps)
        if late is not None:
            return Looked(int(steps.inner.sum()), [late])
        return Lack("rows are n-step transitions", absent=True)
    if offset_of_ends(steps):
        return Lack("ends are flagged one row off")
    broken = steps.inner & ~steps.chained
    frozen, rest = broken & steps.still, broken & ~steps.still
    looked, findings = int(steps.inner.sum()), list[Finding]()
    if frozen.sum() >= FEW and frozen.sum() > broken.sum() / 2:
        findings.append(found("next-observation-is-the-observation", "certain",
                              "observation and next observation of a row are the same, but the following row has "
                              "another: the one was written over the other, or stored twice",
                              "store a copy of the observation before step(), and what step() returned as next_obs",
                              frozen, looked, place=steps.place))  # fmt: skip
    else:
        rest = broken
    if rest.sum() <= looked / 2:
        if rest.any():
            # with one flag for all ends, a time limit rightly has no flag if steps are read one by one
            findings.append(_unmarked(steps, rest, "possible" if steps.truncated is None else "certain"))
        return Looked(looked, findings)
    verdict = _mostly_broken(steps, rest)
    return Looked(looked, [*findings, verdict]) if isinstance(verdict, Finding) else verdict


def lagging(steps: Experience) -> Finding | None:
    """Observations of the row before, which look like transitions of two steps; None if there are none.

    The row before an end then leads to the observation two rows after it, beyond the end, but the row of the end, whose
    next observation is the final one, does not. Transitions of two steps do both or neither.
    """
    if steps.window != 2:
        return None
    reach = np.append(steps.reaches(2), [False, False])
    ends = np.flatnonzero(steps.ended & steps.follows)
    ends = ends[(ends > 0) & (ends < len(steps) - 2)]
    ends = ends[steps.inner[ends - 1] & steps.follows[ends + 1] & ~steps.ended[ends + 1]]
    if len(ends) < FEW or reach[ends - 1].mean() < 1 - SOME or reach[ends].mean() > SOME:
        return None
    return found("observation-one-step-late", "certain",
                 "observations are those of the row before: a next observation is that of the row after the following "
                 "one, and first observations of episodes are of the episode before",
                 "store a copy of the observation that the action was chosen on, before step() overwrites it",
                 np.arange(len(steps)), len(steps), place=steps.place)  # fmt: skip


def _unmarked(steps: Experience, rows: Bools, sure: Any) -> Finding:
    return found("unmarked-end", sure,
                 "the next observation is not that of the following row, though no end is flagged: returns and "
                 "sequences would run on into other steps",
                 "flag such steps as truncated, or interrupt() the env before its next step",
                 rows, int(steps.inner.sum()), place=steps.place)  # fmt: skip


def _mostly_broken(steps: Experience, rest: Bools) -> Finding | Lack:
    """What is wrong where most rows do not lead to the following one; why that is not known, if it is not."""
    looked = int(steps.inner.sum())
    scale = _scale(steps, np.flatnonzero(rest))
    if scale is not None:
        drift = scale < NEARLY
        return found("next-observation-on-another-scale", "possible" if drift else "certain",
                     "next observations are those of the following rows on another scale"
                     + (", nearly the same one, as by a running normalisation, or by rounding" if drift else ""),
                     "normalise observations and next observations with the same numbers, best when a batch is read",
                     rest, looked, place=steps.place)  # fmt: skip
    if steps.chained[steps.inner].mean() > SOME:
        return _unmarked(steps, rest, "likely")
    elsewhere = _lead_elsewhere(steps)
    if elsewhere[rest].mean() > ELSEWHERE:
        return found("rows-out-of-order", "likely",
                     "most rows lead to the observation of a row elsewhere, and not of the following one: the rows are "
                     "not in the order of time, so returns, n-step targets and sequences of them are wrong",
                     "store rows env by env in the order of time, or in a ReplayBuffer(ordered=False)",
                     rest & elsewhere, looked, place=steps.place)  # fmt: skip
    return Lack("most rows lead to an observation that no stored row begins with, so their order in time is not known")


NEARLY = 0.05
"""Scales and offsets that differ by less than this share count as a drift."""


def _scale(steps: Experience, rows: Ints) -> float | None:
    """How far the scale of next observations lies from that of the following rows; None if they differ otherwise."""
    rows = rows[:: max(len(rows) // 5000, 1)]
    if len(rows) < 50 or not steps.numbers.shape[1] or steps.numbers.dtype.kind != "f":
        return None
    given, true, before = (np.asarray(x, np.float64) for x in (
        steps.next_numbers[rows], steps.numbers[rows + 1], steps.numbers[rows]))  # fmt: skip
    varies = (true.std(0) > 0) & (given.std(0) > 0)
    if not varies.any() or not (np.isfinite(given).all() and np.isfinite(true).all()):
        return None
    given, true, before = given[:, varies], true[:, varies], before[:, varies]
    centred = given - given.mean(0)
    slope = (centred * (true - true.mean(0))).sum(0) / (centred**2).sum(0)
    offset = true.mean(0) - slope * given.mean(0)
    left = ((true - offset - slope * given) ** 2).mean(0)
    if (left > 0.05 * ((true - before) ** 2).mean(0)).any():
        return None
    return float(np.maximum(np.abs(slope - 1), np.abs(offset) / true.std(0)).max())


def _lead_elsewhere(steps: Experience) -> Bools:
    """Whether the next observation of a row is the observation of any row, bool ``[S]``."""
    after = steps.next_obs or {}
    known = digests([leaf.reshape(len(steps), -1) for leaf in steps.obs.values()])
    return np.isin(digests([after[path].reshape(len(steps), -1) for path in steps.obs]), known)


def stacks(steps: Experience) -> Verdict:
    """Stacks of frames, as obs ``[S, K, ...]``, whose first ones at an episode's start are of the episode before."""
    kinds = [(path, kind) for path, leaf in steps.obs.items() if (kind := _stack_of(steps, leaf)) is not None]
    if not kinds:
        return Lack("observations are no stacks of frames", absent=True)
    ends = np.flatnonzero(steps.ended & steps.follows)
    if len(ends) < FEW:
        return Lack(f"fewer than {FEW} episodes end before another stored one")
    findings: list[Finding] = []
    for path, (axis, size, newest_last) in kinds:
        older, newer = _parts(axis, size, newest_last)
        leaf, wrong = steps.obs[path], np.zeros(len(ends), np.bool_)
        first, before = older(leaf[ends + 1]), newer(leaf[ends])
        # a padded stack repeats one frame, or holds zeros; and where all frames are alike, nothing shows
        varied, shown = ((x != _one_frame(x, axis, size)).reshape(len(ends), -1).any(1) for x in (first, before))
        for last in (leaf, (steps.next_obs or {}).get(path)):
            if last is not None:
                wrong |= same_rows(first, newer(last[ends]))
        wrong &= varied
        if wrong.sum() >= FEW and wrong.sum() > shown.sum() / 2:
            findings.append(found("stack-over-an-end", "certain",
                                  f"the first stacks of an episode in '{dotted(('obs', *path))}' hold frames of the "
                                  "episode before",
                                  "empty the stack at each reset; relive.FrameStack stacks single frames when it reads",
                                  ends[wrong] + 1, len(ends), place=steps.place))  # fmt: skip
    return Looked(len(ends), findings)


def _stack_of(steps: Experience, leaf: Array) -> tuple[int, int, bool] | None:
    """The axis of a stack, the length of a frame along it, and whether the newest frame is the last; or None."""
    rows = np.flatnonzero(steps.inner & ~steps.still)
    rows = rows[:: max(len(rows) // 500, 1)]
    if leaf.ndim < 2:
        return None
    here, there = leaf[rows], leaf[rows + 1]
    for axis in (1,) if leaf.ndim < 3 else (1, leaf.ndim - 1):
        count = leaf.shape[axis]
        for size in (1,) if leaf.ndim > 2 else range(1, count // 2 + 1):
            if count % size or not 2 <= count // size <= 16:
                continue
            for newest_last in (True, False):
                older, newer = _parts(axis, size, newest_last)
                varied = ~same_rows(older(here), newer(here))
                if varied.sum() >= 20 and same_rows(older(there), newer(here))[varied].mean() > 0.95:
                    return axis, size, newest_last
    return None


def _parts(axis: int, size: int, newest_last: bool) -> tuple[Any, Any]:
    """Functions of stacks ``[K, ...]``: all frames but the newest, and all frames but the oldest."""

    def part(taken: slice) -> Any:
        def of(stacked: Array) -> Array:
            return np.ascontiguousarray(stacked[(slice(None),) * axis + (taken,)])

        return of

    first, last = part(slice(None, -size)), part(slice(size, None))
    return (first, last) if newest_last else (last, first)


def _one_frame(frames: Array, axis: int, size: int) -> Array:
    """The first frame of each stack again and again, in the shape of ``frames``."""
    one = frames[(slice(None),) * axis + (slice(None, size),)]
    return np.concatenate([one] * (frames.shape[axis] // size), axis)


def duplicate_rows(steps: Experience) -> Verdict:
    """Steps that are stored more than once. Observations must be continuous, so that none comes twice by chance."""
    numbers = steps.numbers
    if len(steps) < 20:
        return Lack("fewer than 20 steps are stored")
    if not numbers.shape[1] or numbers.dtype.kind != "f":
        return Lack("observations are images or whole numbers, which may well come again")
    sample = numbers[:: max(len(steps) // 1000, 1)]
    if np.array_equal(sample, np.round(sample)):
        return Lack("observations are images or whole numbers, which may well come again")
    return Looked(len(steps), _repeated(steps) if _may_repeat([numbers, steps.reward]) else ())


def _repeated(steps: Experience) -> Iterator[Finding]:
    numbers = steps.numbers
    digest = digests([numbers, *steps.action.values(), steps.reward, steps.next_numbers])
    _, first, kind, counts = np.unique(digest, return_index=True, return_inverse=True, return_counts=True)
    again = ~steps.still & (steps.jump > 0)
    again[first] = False
    again &= _in_step(steps, np.arange(len(steps)) - first[kind.reshape(-1)], again)
    if again.sum() > len(steps) / 10:
        yield found("duplicate-rows", "likely",
                    f"rows repeat others to the bit, up to {counts.max()} times",
                    "look for steps that are added twice, a save that is loaded into a buffer that has it already, or "
                    "environments with one seed",
                    again, len(steps), place=steps.place)  # fmt: skip


def _in_step(steps: Experience, back: Ints, again: Bools) -> Bools:
    """Which repeated rows are real copies: they repeat their first copies beyond the end of an episode, or come right
    after them.

    In a deterministic env the same episode comes again and again, too, but each time after another episode.

    Args:
        steps: the steps.
        back: how many rows before each row its first copy lies.
        again: which rows are copies.
    """
    begins = np.append(True, (back[1:] != back[:-1]) | ~again[1:] | ~again[:-1])
    run = np.cumsum(begins) - 1
    inner = steps.ended & again & ~np.append(begins[1:], True)  # an end, after which the run goes on
    return (np.bincount(run, inner)[run] >= OVER_ENDS) | (back == 1)


OVER_ENDS = 2
"""How many ends of episodes a run of copies must go beyond."""


def _may_repeat(columns: list[Array]) -> bool:
    """A quick look at the first few numbers of each row: whether a tenth of all rows may repeat others."""
    ordered = np.sort(digests([column.reshape(len(column), -1)[:, :3] for column in columns]))
    return int(np.count_nonzero(ordered[1:] == ordered[:-1])) > len(ordered) / 10
