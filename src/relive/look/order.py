"""Rules on rewards, windows and repeats: what a row's numbers say about the steps around it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..steps.arrays import Array
from .digests import digests
from .experience import Bools, Experience, same_rows
from .findings import Finding, found

__all__ = ["duplicate_rows", "reward_one_step_off", "windows_over_ends"]


FEW = 3


def windows_over_ends(steps: Experience, longest: int = 20) -> Iterator[Finding]:
    """n-step transitions that were stored ready made: windows over an end, and flags of their first step alone."""
    if steps.next_obs is None or len(steps) < 4:
        return
    n = _stored_n(steps, longest)
    if n < 2:
        return
    ends_within, crossing = np.zeros(len(steps), np.bool_), np.zeros(len(steps), np.bool_)
    for k in range(n - 1):  # an end before the window's last step
        ends_within[: len(steps) - k] |= steps.ended[k:]
    reach = _reaches(steps, n)
    crossing[: len(steps) - n] = reach & ends_within[: len(steps) - n]
    if crossing.sum() >= FEW:
        yield found("n-step-over-an-end", "certain",
                    f"rows are {n}-step transitions, and windows run over an episode's end: rewards and the next "
                    "observation are of another episode",
                    "stop a window at terminated or truncated, with the discount of the steps it has",
                    crossing, len(steps), place=steps.place)  # fmt: skip
    yield from _flags_of_first_step(steps, n)


def _flags_of_first_step(steps: Experience, n: int) -> Iterator[Finding]:
    """Windows that stop at an end and do not say so: their next observation is that of an ended row after them."""
    lost = np.zeros(len(steps), np.bool_)
    open_ = ~steps.ended & steps.follows
    for k in range(1, n):
        size = len(steps) - k
        same = np.ones(size, np.bool_)
        for leaf in (steps.next_obs or {}).values():
            same &= same_rows(leaf[:size], leaf[k:])
        joined = open_[:size].copy()
        for j in range(1, k):
            joined &= open_[j : size + j]
        lost[:size] |= same & joined & steps.terminated[k:] & ~steps.still[:size]
    if lost.sum() >= FEW:
        yield found("n-step-flag-of-first-step", "certain",
                    f"rows are {n}-step transitions whose next observation is a terminal one while terminated is that "
                    "of their first step: a learner bootstraps from the end",
                    "store terminated of the window's last step",
                    lost, len(steps), place=steps.place)  # fmt: skip


def _stored_n(steps: Experience, longest: int) -> int:
    """How many steps lie between a row's observation and its next observation, most often; 1 if that is the next."""
    inside = steps.follows & ~steps.ended & ~steps.still
    if not inside.any() or steps.chained[inside].mean() > 0.5:
        return 1
    for n in range(2, min(longest, len(steps) - 1) + 1):
        if _reaches(steps, n)[inside[: len(steps) - n]].mean() > 0.5:
            return n
    return 1


def _reaches(steps: Experience, n: int) -> Bools:
    """Whether the next observation of row i is the observation of row i + n, bool ``[S - n]``; in one env."""
    found_ = steps.env[:-n] == steps.env[n:]
    for path, leaf in steps.obs.items():
        found_ &= same_rows((steps.next_obs or {})[path][:-n], leaf[n:])
    return found_


SAMPLE, TEST = 3000, 1500
"""Rows that the reward is learned from, and tested on."""

FEATURES = 64


def reward_one_step_off(steps: Experience) -> Iterator[Finding]:
    """Rewards that the step before or after explains, and the row's own does not.

    The reward is learned from what a row holds, by ridge regression on random Fourier features (Rahimi and Recht 2007),
    once for the row's own reward and once for those of its neighbours in the same episode.
    """
    inside = np.flatnonzero(steps.follows[1:-1] & steps.follows[:-2] & ~steps.ended[1:-1] & ~steps.ended[:-2]) + 1
    reward = steps.reward.astype(np.float64)
    if len(inside) < 200 or not np.isfinite(reward).all() or np.ptp(reward[inside]) == 0 or not steps.numbers.shape[1]:
        return
    rng = np.random.default_rng(0)
    chosen = rng.permutation(inside)[: SAMPLE + TEST] if len(inside) > SAMPLE + TEST else rng.permutation(inside)
    features = _features(steps, chosen, rng)
    if features is None:
        return
    lags = (-1, 0, 1)
    missed = dict(zip(lags, _unexplained(features, np.stack([reward[chosen + lag] for lag in lags], 1)), strict=True))
    best = min(missed, key=lambda lag: missed[lag])
    if best and missed[best] < 0.1 and missed[best] < 0.2 * missed[0]:
        word = "after" if best > 0 else "before"
        yield found("reward-one-step-off", "likely",
                    f"the reward of a step is stored in the row {word} it: there it follows from observation and "
                    f"action but for {missed[best]:.0%} of its variance, in its own row but for {missed[0]:.0%}",
                    "store the reward that step() returned in the row of the observation and action given to it",
                    np.arange(len(steps)), len(steps), place=steps.place)  # fmt: skip


def _features(steps: Experience, rows: Array, rng: np.random.Generator) -> Array | None:
    """What the reward may follow from: observation, action and next observation, and waves of them, ``[K, F]``."""
    action = [leaf[rows].reshape(len(rows), -1) for leaf in steps.action.values()]
    parts = [steps.numbers[rows], steps.next_numbers[rows], *(x for x in action if x.shape[1] <= 64)]
    raw = np.concatenate([np.asarray(part, np.float64) for part in parts], 1)
    if not np.isfinite(raw).all():
        return None
    spread = raw.std(0)
    raw = (raw - raw.mean(0))[:, spread > 0] / spread[spread > 0]
    if not raw.shape[1]:
        return None
    waves = raw @ (rng.standard_normal((raw.shape[1], FEATURES)) / np.sqrt(raw.shape[1]))
    return np.concatenate([np.ones((len(raw), 1)), raw, raw**2, np.sin(waves), np.cos(waves)], 1)


def _unexplained(features: Array, targets: Array) -> list[float]:
    """The share of each target's variance that the features do not explain, on rows that were not learned from."""
    half = 2 * len(features) // 3
    gram = features[:half].T @ features[:half] + 1e-6 * half * np.eye(features.shape[1])
    weights = np.linalg.solve(gram, features[:half].T @ targets[:half])
    rest = targets[half:]
    missed = ((features[half:] @ weights - rest) ** 2).mean(0) / np.maximum(rest.var(0), 1e-30)
    return [float(share) for share in missed]


def duplicate_rows(steps: Experience) -> Iterator[Finding]:
    """Steps that are stored more than once, where observations are continuous, so that none comes twice by chance."""
    numbers = steps.numbers
    if len(steps) < 20 or not numbers.shape[1] or numbers.dtype.kind != "f":
        return
    sample = numbers[:: max(len(steps) // 1000, 1)]
    if np.array_equal(sample, np.round(sample)):
        return
    if not _may_repeat([numbers, steps.reward]):
        return
    digest = digests([numbers, *steps.action.values(), steps.reward, steps.next_numbers])
    _, first, counts = np.unique(digest, return_index=True, return_counts=True)
    again = np.ones(len(steps), np.bool_)
    again[first] = False
    again &= ~steps.still & (steps.jump > 0)
    if again.sum() > len(steps) / 10:
        yield found("duplicate-rows", "likely",
                    f"rows repeat others to the bit, up to {counts.max()} times",
                    "look for steps that are added twice, or a save that is loaded into a buffer that has it already",
                    again, len(steps), place=steps.place)  # fmt: skip


def _may_repeat(columns: list[Array]) -> bool:
    """A quick look at the first few numbers of each row: whether a tenth of all rows may repeat others."""
    ordered = np.sort(digests([column.reshape(len(column), -1)[:, :3] for column in columns]))
    return int(np.count_nonzero(ordered[1:] == ordered[:-1])) > len(ordered) / 10
