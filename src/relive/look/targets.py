"""Rules on advantages and returns: whether they stop at ends, and what they bootstrap from at time limits.

Generalized advantage estimation (Schulman et al. 2016) says that the return of a step less its reward is
γ V(next) + γλ A(next) inside an episode, 0 at a terminal, and γ V(final observation) at a time limit. γ and γλ are
computed from the steps inside episodes, so they need not be known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..steps.arrays import Array, Bools
from .experience import Experience
from .findings import Finding, found
from .order import features, ridge

__all__ = ["advantages", "rewards_with_values"]


FEW = 3
"""How many ends must look wrong before there is a finding."""

MOST = 0.9
"""The share of ends that must agree with one formula."""

EXACT = 1e-3
"""How far a number may differ from a formula, as a share of the spread of all returns, since columns are float32."""


@dataclass(frozen=True)
class Recursion:
    """What each step's return adds to its reward, and what it could add by each formula: all ``[S]``.

    Args:
        rest: the return less the reward.
        onward: γ V(next row) + γλ A(next row), as inside an episode.
        next: γ V(next row).
        before: γ V of the row itself.
        near: smaller differences count as none.
    """

    rest: Array
    onward: Array
    next: Array
    before: Array
    near: float

    def adds(self, rows: Bools, other: Array | float) -> Bools:
        """Which of ``rows`` add ``other``, within rounding."""
        return rows & (np.abs(self.rest - other) < self.near)

    def tells_apart(self) -> Bools:
        """Where all that a row could add differs, so that it is clear which of these the row adds."""
        values = [np.zeros_like(self.rest), self.onward, self.next, self.before]
        pairs = [(a, b) for i, a in enumerate(values) for b in values[i + 1 :]]
        return np.logical_and.reduce([np.abs(a - b) > 4 * self.near for a, b in pairs])


def advantages(steps: Experience) -> Iterator[Finding]:
    """Advantages that run over ends, and time limits that bootstrap from nothing or from another state."""
    parts = _recursion(steps)
    if parts is None:
        return
    shown = steps.ended & steps.follows & parts.tells_apart()
    cut = np.zeros_like(shown) if steps.truncated is None else steps.truncated & ~steps.terminated
    kinds = [kind for kind in (shown & cut, shown & ~cut) if _stands_out(parts.adds(kind, parts.onward), kind)]
    if kinds:
        over = parts.adds(np.logical_or.reduce(kinds), parts.onward)
        yield found("advantage-over-an-end", "certain",
                    "advantages run on over the end of an episode: the next episode's values and rewards count for "
                    "the last steps of this one",
                    "cut the recursion where the step itself ended its episode, not by the flag of another row",
                    over, int(shown.sum()), place=steps.place)  # fmt: skip
        return
    yield from _at_limits(steps, parts, shown & cut)
    last = ~steps.follows & ~steps.ended & (np.abs(parts.before) > 4 * parts.near)
    none = parts.adds(last, 0.0)
    if steps.last_flags and _stands_out(none, last):
        yield found("rollout-end-without-bootstrap", "certain",
                    "the last steps of the rollout did not end their episodes, and their returns hold no value of "
                    "what comes after",
                    "bootstrap from the value of the observation after the last step",
                    none, int(last.sum()), place=steps.place)  # fmt: skip


def _at_limits(steps: Experience, parts: Recursion, limits: Bools) -> Iterator[Finding]:
    """What time limits bootstrap from, where it is not the final observation."""
    none = parts.adds(limits, 0.0)
    if _stands_out(none, limits):
        yield found("truncation-without-bootstrap", "certain",
                    "returns of truncated steps hold no value of what comes after: a time limit counts as a terminal",
                    "bootstrap truncated steps from the value of the final observation",
                    none, int(limits.sum()), place=steps.place)  # fmt: skip
    shown = limits & _final_apart(steps, parts)
    before = parts.adds(shown, parts.before)
    if _stands_out(before, shown):
        yield found("bootstrap-before-the-step", "certain",
                    "truncated steps bootstrap from the value of the observation before them",
                    "bootstrap from the value of the final observation",
                    before, int(shown.sum()), place=steps.place)  # fmt: skip
    after, calm = parts.adds(limits, parts.next), steps.follows & ~steps.ended
    # a following row that begins where this one ended has the right value: NEXT_STEP autoreset stores such rows
    if _stands_out(after, limits) and np.median(steps.jump[limits]) > 3 * np.median(steps.jump[calm]):
        yield found("bootstrap-from-the-next-episode", "certain" if steps.next_obs is None else "likely",
                    "truncated steps bootstrap from the value of the next episode's first observation",
                    "bootstrap from the value of the final observation",
                    after, int(limits.sum()), place=steps.place)  # fmt: skip


def _final_apart(steps: Experience, parts: Recursion) -> Bools:
    """Where the value of the final observation differs from that of the row itself, so that they are told apart.

    If the final value is not known, the values of steps inside episodes decide: they differ almost always, or never.
    """
    final, value = _numbers(steps, "final_value"), np.asarray(_numbers(steps, "value"))
    if final is not None:
        return np.nan_to_num(np.abs(final - value)) > 8 * parts.near
    calm = steps.follows & ~steps.ended
    same = np.abs(np.append(value[1:], 0.0) - value)[calm] < 8 * parts.near
    return np.full(len(steps), bool(same.mean() < 1 - MOST))


def _stands_out(rows: Bools, of: Bools) -> bool:
    return bool(rows.sum() >= FEW and rows.sum() > MOST * of.sum())


def _recursion(steps: Experience) -> Recursion | None:
    """The parts of each step's return; None if there are no advantages, or they are of another kind."""
    value, total, advantage = (_numbers(steps, name) for name in ("value", "return", "advantage"))
    if total is None and value is not None and advantage is not None:
        total = value + advantage
    if value is None or total is None:
        return None
    rest = total - steps.reward
    if not np.isfinite(rest).all() or not np.isfinite(value).all():
        return None
    known = np.stack([np.append(value[1:], 0.0), np.append((total - value)[1:], 0.0)], 1)
    inside = steps.follows & ~steps.ended & ~np.append(steps.ended[1:], False)
    if inside.sum() < 20 or np.ptp(known[inside, 0]) == 0:
        return None
    weights = np.linalg.lstsq(known[inside], rest[inside])[0]
    near = EXACT * float(rest[inside].std()) + 1e-6 * float(np.abs(total).max())
    onward = known @ weights
    if (np.abs(rest - onward)[inside] < near).mean() < MOST or not 0.3 < weights[0] < 1.001:
        return None
    return Recursion(rest, onward, weights[0] * known[:, 0], weights[0] * value, near)


def _numbers(steps: Experience, name: str) -> Array | None:
    """A further column as float64 ``[S]``; None if it is missing, or does not have one number per step."""
    column = steps.others.get((name,))
    if column is None or column.size != len(steps) or column.dtype.kind not in "biuf":
        return None
    return column.reshape(-1).astype(np.float64)


def rewards_with_values(steps: Experience) -> Iterator[Finding]:
    """Rewards of last steps that hold a value: they exceed what steps inside episodes lead to expect, and the excess
    follows V.

    The rule needs a reward that can be learned from the other numbers of a row, or that is the same everywhere.
    """
    value = _numbers(steps, "value")
    calm, ends = np.flatnonzero(~steps.ended & steps.follows), np.flatnonzero(steps.ended)
    if value is None or len(ends) < 2 * FEW or len(calm) < 100 or not np.isfinite(steps.reward).all():
        return
    extra, worth = _unexpected(steps, calm, ends), value[ends]
    if extra is None:
        return
    held = np.abs(extra) > 0.1 * np.abs(worth).max()  # terminals hold none
    if held.sum() < 2 * FEW or np.ptp(worth[held]) == 0:
        return
    slope = float(extra[held] @ worth[held] / (worth[held] @ worth[held]))
    left = float(((extra[held] - slope * worth[held]) ** 2).mean() / (extra[held] ** 2).mean())
    if left < 0.05 and 0.5 < slope < 1.5:
        yield found("reward-holds-a-value", "possible",
                    "rewards of last steps are larger than others by about the value of their observation: the "
                    "bootstrap value of a time limit was added to them, so they are not what the env gave",
                    "store rewards as the env gave them, and bootstrap where the return is computed",
                    ends[held], len(ends), place=steps.place)  # fmt: skip


def _unexpected(steps: Experience, calm: Array, ends: Array) -> Array | None:
    """The rewards of rows ``ends`` minus those that rows ``calm`` lead to expect; None if these predict too badly."""
    reward, rng = steps.reward.astype(np.float64), np.random.default_rng(0)
    if np.ptp(reward[calm]) == 0:
        return reward[ends] - reward[calm[0]]
    rows = rng.permutation(calm)[:3000]
    known = features(steps, rows, rng) if steps.numbers.shape[1] else None
    if known is None:
        return None
    half = 2 * len(rows) // 3
    weights = ridge(known(steps, rows[:half]), reward[rows[:half]])
    missed = known(steps, rows[half:]) @ weights - reward[rows[half:]]
    if missed.var() > 0.05 * max(float(reward[rows].var()), 1e-30):
        return None
    return reward[ends] - known(steps, ends) @ weights
