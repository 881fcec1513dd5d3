"""Rules on values, advantages and returns: what stored targets hold at the ends of episodes, head by head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from ..steps.arrays import Array, Bools
from .experience import Experience
from .findings import Finding, Lack, Look, rule, skip_if
from .heads import MOST, Head, inside_of, weights_of
from .values import FEW_TARGETS, expected_rewards

GAMMA_NEAR = 2e-3
"""How far a discount that is computed from advantages may lie from the one that was meant."""


@dataclass(frozen=True)
class Recursion:
    """The part of each step's return beside its reward, and what it would be by each formula: all ``[S]``.

    Args:
        rest: the return minus the reward.
        onward: γ V(next row) + γλ A(next row), as inside an episode.
        next: γ V(next row).
        before: γ V of the row itself.
        near: smaller differences count as none.
        gamma: the discount per step.
    """

    rest: Array
    onward: Array
    next: Array
    before: Array
    near: float
    gamma: float

    def adds(self, rows: Bools, other: Array | float) -> Bools:
        """True where one of ``rows`` adds ``other``, within rounding."""
        return rows & (np.abs(self.rest - other) < self.near)

    def tells_apart(self) -> Bools:
        """True where all that a row could add differs, so that it is clear which of these the row adds."""
        values = [np.zeros_like(self.rest), self.onward, self.next, self.before]
        return np.logical_and.reduce([np.abs(a - b) > 4 * self.near for a, b in combinations(values, 2)])


@rule(
    "advantage-over-an-end",
    "truncation-without-bootstrap",
    "bootstrap-before-the-step",
    "bootstrap-from-the-next-episode",
    "rollout-end-without-bootstrap",
    "advantage-of-another-gamma",
)
def advantages(steps: Experience, head: Head, gamma: float | None = None) -> Look:
    """Advantages that run over ends, and time limits that bootstrap from nothing or from another state.

    Args:
        steps: the steps.
        head: the values that they were computed with.
        gamma: the discount per step that they should have; None if it is not known.
    """
    parts = _recursion(steps, head)
    if gamma is not None and abs(parts.gamma - gamma) > GAMMA_NEAR:
        yield from steps.finding("advantage-of-another-gamma", "certain",
                                 f"advantages were computed with gamma={parts.gamma:.4g}, and not with {gamma:.4g}",
                                 "compute them with the discount that is meant")  # fmt: skip
    shown = steps.ended & steps.follows & parts.tells_apart()
    cut = np.zeros_like(shown) if steps.truncated is None else steps.truncated & ~steps.terminated
    kinds = [kind for kind in (shown & cut, shown & ~cut) if _stands_out(parts.adds(kind, parts.onward), kind)]
    if kinds:
        over = parts.adds(np.logical_or.reduce(kinds), parts.onward)
        yield from steps.finding("advantage-over-an-end", "certain",
            "advantages run on over the end of an episode: the next episode's values and rewards count for the last "
            "steps of this one",
            "cut the recursion where the step itself ended its episode, not by the flag of another row",
            over, int(shown.sum()))  # fmt: skip
        return len(steps)
    yield from _at_limits(steps, head, parts, shown & cut)
    last = ~steps.follows & ~steps.ended & (np.abs(parts.before) > 4 * parts.near)
    none = parts.adds(last, 0.0)
    if steps.last_flags and _stands_out(none, last):
        yield from steps.finding("rollout-end-without-bootstrap", "certain",
            "the last steps of the rollout did not end their episodes, and their returns hold no value of what comes "
            "after", "bootstrap from the value of the observation after the last step",
            none, int(last.sum()))  # fmt: skip
    return len(steps)


def _at_limits(steps: Experience, head: Head, parts: Recursion, limits: Bools) -> Iterator[Finding]:
    """Time limits that bootstrap from something else than the final observation."""
    none = parts.adds(limits, 0.0)
    if _stands_out(none, limits):
        yield from steps.finding("truncation-without-bootstrap", "certain",
            "returns of truncated steps hold no value of what comes after: a time limit counts as a terminal",
            "bootstrap truncated steps from the value of the final observation", none, int(limits.sum()))  # fmt: skip
    shown = limits & _final_apart(steps, head, parts)
    before = parts.adds(shown, parts.before)
    if _stands_out(before, shown):
        yield from steps.finding("bootstrap-before-the-step", "certain",
            "truncated steps bootstrap from the value of the observation before them",
            "bootstrap from the value of the final observation", before, int(shown.sum()))  # fmt: skip
    after, calm = parts.adds(limits, parts.next), steps.follows & ~steps.ended
    # a following row that begins where this one ended has the right value: NEXT_STEP autoreset stores such rows
    if _stands_out(after, limits) and np.median(steps.jump[limits]) > 3 * np.median(steps.jump[calm]):
        yield from steps.finding("bootstrap-from-the-next-episode", "certain" if steps.next_obs is None else "likely",
            "truncated steps bootstrap from the value of the next episode's first observation",
            "bootstrap from the value of the final observation", after, int(limits.sum()))  # fmt: skip


def _final_apart(steps: Experience, head: Head, parts: Recursion) -> Bools:
    """True where the value of the final observation differs from that of the row itself, so that they are told apart.

    If the final value is not known, the values of steps inside episodes decide: they differ almost always, or never.
    """
    value = np.asarray(head.value)
    if head.final is not None:
        return np.nan_to_num(np.abs(head.final - value)) > 8 * parts.near
    calm = steps.follows & ~steps.ended
    same = np.abs(np.append(value[1:], 0.0) - value)[calm] < 8 * parts.near
    return np.full(len(steps), bool(same.mean() < 1 - MOST))


def _stands_out(rows: Bools, of: Bools) -> bool:
    return bool(rows.sum() >= FEW_TARGETS and rows.sum() > MOST * of.sum())


def _recursion(steps: Experience, head: Head) -> Recursion:
    """The parts of each step's return.

    Raises:
        Lack: there are no advantages, or they are of another kind.
    """
    value, total, reward = head.value, head.total, head.reward
    if value is None or total is None or reward is None:
        raise Lack("it keeps no values with advantages or returns", absent=True)
    steps.require_order()
    rest, inside = total - reward, inside_of(steps)
    skip_if(not np.isfinite(rest).all() or not np.isfinite(value).all(), "values or returns are not finite")
    if inside.sum() < 20 or np.ptp(np.append(value[1:], 0.0)[inside]) == 0:
        raise Lack("fewer than 20 steps lie within episodes, or all values are the same")
    known = weights_of(steps, value, reward, total)
    if known is None:
        raise Lack("advantages are not those of generalized advantage estimation, or were normalised")
    weights, onward, near = known
    gamma = float(weights[0])
    return Recursion(rest, onward, gamma * np.append(value[1:], 0.0), gamma * value, near, gamma)


@rule("reward-holds-a-value")
def rewards_with_values(steps: Experience, head: Head) -> Look:
    """Rewards of last steps that hold a value: they exceed what steps inside episodes lead to expect, and the excess
    follows V.

    The rule needs a reward that can be learned from the other numbers of a row, or that is the same everywhere.
    """
    value, reward = head.value, np.asarray(head.reward)
    calm, ends = np.flatnonzero(~steps.ended & steps.follows), np.flatnonzero(steps.ended)
    if value is None:
        raise Lack("it keeps no values", absent=True)
    if len(ends) < 2 * FEW_TARGETS or len(calm) < 100 or not np.isfinite(reward).all():
        raise Lack(f"fewer than {2 * FEW_TARGETS} ends or 100 other steps are stored, or rewards are not finite")
    usual = expected_rewards(steps, reward, calm, ends)
    extra, worth = reward[ends] - usual, value[ends]
    held = np.abs(extra) > 0.1 * np.abs(worth).max()  # terminals hold none
    if held.sum() < 2 * FEW_TARGETS or np.ptp(worth[held]) == 0:
        return len(ends)
    slope = float(extra[held] @ worth[held] / (worth[held] @ worth[held]))
    left = float(((extra[held] - slope * worth[held]) ** 2).mean() / (extra[held] ** 2).mean())
    if left < 0.05 and 0.5 < slope < 1.5:
        yield from steps.finding("reward-holds-a-value", "possible",
            "rewards of last steps are larger than others by about the value of their observation: the bootstrap value "
            "of a time limit was added to them, so they are not what the env gave",
            "store rewards as the env gave them, and bootstrap where the return is computed",
            ends[held], len(ends))  # fmt: skip
    return len(ends)
