"""Rules on rewards and repeats: they compare a row's numbers with those of other rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..steps.arrays import Array, Bools, Ints
from .digests import digests
from .experience import Experience
from .findings import Finding, found

__all__ = ["duplicate_rows", "features", "reward_one_step_off", "ridge"]


SAMPLE, TEST = 3000, 1500
"""How many rows the reward is learned from, and how many it is tested on."""

FEATURES = 64


def reward_one_step_off(steps: Experience) -> Iterator[Finding]:
    """Rewards that follow from the step before or after, and not from the step in their own row.

    The reward is learned from the other numbers of a row, by ridge regression on random Fourier features (Rahimi and
    Recht 2007): once for the row's own reward, and once for those of its neighbours in the same episode.
    """
    inside = np.flatnonzero(steps.follows[1:-1] & steps.follows[:-2] & ~steps.ended[1:-1] & ~steps.ended[:-2]) + 1
    reward = steps.reward.astype(np.float64)
    if len(inside) < 200 or not np.isfinite(reward).all() or np.ptp(reward[inside]) == 0 or not steps.numbers.shape[1]:
        return
    rng = np.random.default_rng(0)
    chosen = rng.permutation(inside)[: SAMPLE + TEST] if len(inside) > SAMPLE + TEST else rng.permutation(inside)
    known = features(steps, chosen, rng)
    if known is None:
        return
    lags = (-1, 0, 1)
    targets = np.stack([reward[chosen + lag] for lag in lags], 1)
    missed = dict(zip(lags, _unexplained(known(steps, chosen), targets), strict=True))
    best = min(missed, key=lambda lag: missed[lag])
    if best and missed[best] < 0.1 and missed[best] < 0.2 * missed[0] and missed[0] > 0.05:  # clearly better
        word = "after" if best > 0 else "before"
        yield found("reward-one-step-off", "likely",
                    f"the reward of a step is stored in the row {word} it: there it follows from observation and "
                    f"action but for {missed[best]:.0%} of its variance, in its own row but for {missed[0]:.0%}",
                    "store the reward that step() returned in the row of the observation and action given to it",
                    np.arange(len(steps)), len(steps), place=steps.place)  # fmt: skip


def features(steps: Experience, rows: Array, rng: np.random.Generator) -> Predictors | None:
    """The numbers from which the reward of rows ``[K]`` may follow; None if one is not finite, or nothing varies."""
    raw = _raw(steps, rows)
    if not np.isfinite(raw).all():
        return None
    spread = raw.std(0)
    size = int((spread > 0).sum())
    if not size:
        return None
    return Predictors(raw.mean(0), spread, rng.standard_normal((size, FEATURES)) / np.sqrt(size))


def _raw(steps: Experience, rows: Array) -> Array:
    """Observation, action and next observation of rows side by side, float64 ``[K, D]``."""
    action = [leaf[rows].reshape(len(rows), -1) for leaf in steps.action.values()]
    parts = [steps.numbers[rows], steps.next_numbers[rows], *(x for x in action if x.shape[1] <= 64)]
    return np.concatenate([np.asarray(part, np.float64) for part in parts], 1)


@dataclass(frozen=True)
class Predictors:
    """Numbers from which a reward may follow: the numbers of a row, their squares, and waves of them.

    Args:
        mean: the mean of the rows' numbers, ``[D]``.
        spread: their standard deviation, ``[D]``; numbers that do not vary are left out.
        waves: directions ``[D', F]`` of random Fourier features.
    """

    mean: Array
    spread: Array
    waves: Array

    def __call__(self, steps: Experience, rows: Array) -> Array:
        """The numbers ``[K, ...]`` of rows."""
        varies = self.spread > 0
        raw = (_raw(steps, rows) - self.mean)[:, varies] / self.spread[varies]
        waves = raw @ self.waves
        return np.concatenate([np.ones((len(raw), 1)), raw, raw**2, np.sin(waves), np.cos(waves)], 1)


def _unexplained(given: Array, targets: Array) -> list[float]:
    """The share of each target's variance that ``given`` does not explain, on rows that were not learned from."""
    half = 2 * len(given) // 3
    rest = targets[half:]
    missed = ((given[half:] @ ridge(given[:half], targets[:half]) - rest) ** 2).mean(0)
    return [float(share) for share in missed / np.maximum(rest.var(0), 1e-30)]


def ridge(given: Array, targets: Array) -> Array:
    """Weights ``[F, ...]`` that predict targets from ``given`` ``[K, F]``, by ridge regression."""
    gram = given.T @ given + 1e-6 * len(given) * np.eye(given.shape[1])
    return np.linalg.solve(gram, given.T @ targets)


def duplicate_rows(steps: Experience) -> Iterator[Finding]:
    """Steps that are stored more than once. Observations must be continuous, so that none comes twice by chance."""
    numbers = steps.numbers
    if len(steps) < 20 or not numbers.shape[1] or numbers.dtype.kind != "f":
        return
    sample = numbers[:: max(len(steps) // 1000, 1)]
    if np.array_equal(sample, np.round(sample)):
        return
    if not _may_repeat([numbers, steps.reward]):
        return
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
