"""Rules on what learners aim at: advantages, returns, values, log-probabilities, and the rewards of goals.

Generalized advantage estimation (Schulman et al. 2016) says that the return of a step less its reward is
γ V(next) + γλ A(next) inside an episode, 0 at a terminal, and γ V(final observation) at a time limit. γ and γλ are
computed from the steps inside episodes, so they need not be known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from ..errors import ParameterError
from ..steps.arrays import Array, Bools, Ints, as_host
from .experience import Experience, Leaves, same_rows
from .findings import Finding, Lack, Looked, Verdict, found
from .fits import expected_rewards

__all__ = [
    "advantages",
    "goal_rewards",
    "goal_terminals",
    "log_probs",
    "rewards_with_values",
    "said",
    "values_of_critic",
]


FEW = 3
"""How many ends must look wrong before there is a finding."""

MOST = 0.9
"""The share of ends that must agree with one formula."""

GAMMA_NEAR = 2e-3
"""How far a discount that is computed from advantages may lie from the one that was meant."""

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
        gamma: the discount per step.
    """

    rest: Array
    onward: Array
    next: Array
    before: Array
    near: float
    gamma: float

    def adds(self, rows: Bools, other: Array | float) -> Bools:
        """Which of ``rows`` add ``other``, within rounding."""
        return rows & (np.abs(self.rest - other) < self.near)

    def tells_apart(self) -> Bools:
        """Where all that a row could add differs, so that it is clear which of these the row adds."""
        values = [np.zeros_like(self.rest), self.onward, self.next, self.before]
        pairs = [(a, b) for i, a in enumerate(values) for b in values[i + 1 :]]
        return np.logical_and.reduce([np.abs(a - b) > 4 * self.near for a, b in pairs])


def advantages(steps: Experience, gamma: float | None = None) -> Verdict:
    """Advantages that run over ends, and time limits that bootstrap from nothing or from another state.

    Args:
        steps: the steps.
        gamma: the discount per step that they should have; None if it is not known.
    """
    parts = _recursion(steps)
    return parts if isinstance(parts, Lack) else Looked(len(steps), _advantages(steps, parts, gamma))


def _advantages(steps: Experience, parts: Recursion, gamma: float | None) -> Iterator[Finding]:
    if gamma is not None and abs(parts.gamma - gamma) > GAMMA_NEAR:
        yield found("advantage-of-another-gamma", "certain",
                    f"advantages were computed with gamma={parts.gamma:.4g}, and not with {gamma:.4g}",
                    "compute them with the discount that is meant", np.arange(len(steps)), len(steps),
                    place=steps.place)  # fmt: skip
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


def _recursion(steps: Experience) -> Recursion | Lack:
    """The parts of each step's return; a lack if there are no advantages, or they are of another kind."""
    value, total, advantage = (_numbers(steps, name) for name in ("value", "return", "advantage"))
    if total is None and value is not None and advantage is not None:
        total = value + advantage
    if value is None or total is None:
        return Lack("it keeps no values with advantages or returns", absent=True)
    if steps.disorder:
        return Lack(steps.disorder)
    rest = total - steps.reward
    if not np.isfinite(rest).all() or not np.isfinite(value).all():
        return Lack("values or returns are not finite")
    known = np.stack([np.append(value[1:], 0.0), np.append((total - value)[1:], 0.0)], 1)
    inside = steps.follows & ~steps.ended & ~np.append(steps.ended[1:], False)
    if inside.sum() < 20 or np.ptp(known[inside, 0]) == 0:
        return Lack("fewer than 20 steps lie within episodes, or all values are the same")
    weights = np.linalg.lstsq(known[inside], rest[inside])[0]
    near = EXACT * float(rest[inside].std()) + 1e-6 * float(np.abs(total).max())
    onward = known @ weights
    if (np.abs(rest - onward)[inside] < near).mean() < MOST or not 0.3 < weights[0] < 1.001:
        return Lack("advantages are not those of generalized advantage estimation, or were normalised")
    return Recursion(rest, onward, weights[0] * known[:, 0], weights[0] * value, near, float(weights[0]))


def _numbers(steps: Experience, name: str) -> Array | None:
    """A further column as float64 ``[S]``; None if it is missing, or does not have one number per step."""
    column = steps.others.get((name,))
    if column is None or column.size != len(steps) or column.dtype.kind not in "biuf":
        return None
    return column.reshape(-1).astype(np.float64)


def rewards_with_values(steps: Experience) -> Verdict:
    """Rewards of last steps that hold a value: they exceed what steps inside episodes lead to expect, and the excess
    follows V.

    The rule needs a reward that can be learned from the other numbers of a row, or that is the same everywhere.
    """
    value = _numbers(steps, "value")
    calm, ends = np.flatnonzero(~steps.ended & steps.follows), np.flatnonzero(steps.ended)
    if value is None:
        return Lack("it keeps no values", absent=True)
    if len(ends) < 2 * FEW or len(calm) < 100 or not np.isfinite(steps.reward).all():
        return Lack(f"fewer than {2 * FEW} ends or 100 other steps are stored, or rewards are not finite")
    usual = expected_rewards(steps, calm, ends)
    if usual is None:
        return Lack("rewards do not follow from observations and actions")
    return Looked(len(ends), _held(steps, steps.reward[ends] - usual, value[ends], ends))


def _held(steps: Experience, extra: Array, worth: Array, ends: Ints) -> Iterator[Finding]:
    """The finding that rewards at ends exceed others by about their value."""
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


# -- what a policy, a critic and a reward function say of stored steps -------------------------------------------------

MANY_ROWS = 20_000
"""The most rows that a function of the user is asked about."""

PIECE = 4096
"""Rows per call of such a function."""

AGREES = 1e-3
"""How far numbers may differ from those of the function, as a share of their size, since columns are float32."""


def values_of_critic(steps: Experience, critic: Callable[..., Any] | None) -> Verdict:
    """Values that are not those of the critic."""
    value = _numbers(steps, "value")
    if critic is None:
        return Lack("pass critic, a function from observations to values, to compare values with", absent=value is None)
    if value is None:
        return Lack("critic was given, but the source has no 'value'")
    rows = _some(np.arange(len(steps)))
    told = said("critic", critic, rows, steps.obs)
    return _compared(steps, "value", value, told, rows, "the critic's value of the observation",
                     "store V(obs) with the observation that it was computed from")  # fmt: skip


def log_probs(steps: Experience, policy: Callable[..., Any] | None) -> Verdict:
    """Log-probabilities that are not those of the stored actions."""
    stored = _numbers(steps, "log_prob")
    if policy is None:
        return Lack("pass policy, a function of observations and actions, to compare log-probabilities with",
                    absent=stored is None)  # fmt: skip
    if stored is None or not steps.action:
        return Lack("policy was given, but the source has no 'log_prob' with its 'action'")
    rows = _some(np.arange(len(steps)))
    told = said("policy", policy, rows, steps.obs, steps.action)
    return _compared(steps, "log_prob", stored, told, rows, "the policy's log-probability of the stored action",
                     "store the action that was sampled, before clipping, with its log-probability")  # fmt: skip


def _compared(steps: Experience, name: str, stored: Array, told: Array, rows: Ints, meant: str, mend: str) -> Verdict:
    """Numbers ``[S]`` beside those that a function gave for some rows, ``[K]``."""
    near = AGREES * (np.abs(told) + float(np.nanstd(told)) + 1e-6)
    with np.errstate(invalid="ignore"):
        wrong = ~((np.abs(stored[rows] - told) <= near) | (stored[rows] == told))
    if wrong.sum() <= len(rows) / 1000:  # rounding, and a number or two at the edge of what it can do
        return Looked(len(rows))
    for lag, word in ((1, "before"), (-1, "after")):  # rows of the sample that follow each other
        beside = np.flatnonzero((rows[1:] == rows[:-1] + 1) & steps.inner[rows[:-1]])
        mine, other = (beside, beside + 1) if lag == 1 else (beside + 1, beside)
        with np.errstate(invalid="ignore"):
            fits = np.abs(stored[rows[mine]] - told[other]) <= near[other]
        if len(mine) >= 20 and wrong[mine].mean() > 0.5 and fits.mean() > MOST:
            return Looked(len(rows), [
                found(f"{name.replace('_', '-')}-one-step-off", "certain",
                      f"'{name}' stands one row {word} its own: it is {meant} there", mend,
                      rows[wrong], len(rows), place=steps.place)])  # fmt: skip
    finite = np.isfinite(stored[rows]) & np.isfinite(told)
    pair = stored[rows][finite], told[finite]
    alike = len(pair[0]) > 2 and min(x.std() for x in pair) > 0 and np.corrcoef(*pair)[0, 1] > 0.95
    drifted = alike and wrong.mean() > MOST  # all are a little off, as after an update
    what = f"'{name}' is not {meant}" + ("; it is near, as if the function had been updated since" if drifted else "")
    return Looked(len(rows), [
        found("log-prob-of-another-action" if name == "log_prob" else "value-of-another-observation",
              "possible" if drifted else "likely", what, mend, rows[wrong], len(rows), place=steps.place)])  # fmt: skip


def goal_rewards(steps: Experience, reward_fn: Callable[..., Any] | None) -> Verdict:
    """Rewards that are not those of the stored goal, as where a goal was exchanged and the reward was not."""
    goals = _goals(steps)
    if goals is None:
        if reward_fn is not None:
            return Lack("reward_fn was given, but the source has no observations with 'achieved_goal' and "
                        "'desired_goal', with next observations")  # fmt: skip
        return Lack("it has no goals", absent=True)
    if steps.window > 1:
        return Lack("rows are n-step transitions, whose rewards are sums")
    achieved, desired = goals
    if reward_fn is None:
        return _reached_goals(steps, achieved, desired)
    rows = _some(np.arange(len(steps)))
    right = said("reward_fn", reward_fn, rows, {(): achieved}, {(): desired}, arrays=True)
    wrong = ~np.isclose(steps.reward[rows].astype(np.float64), right, rtol=1e-4, atol=1e-5)
    return Looked(len(rows), [_old_goal(steps, rows[wrong], len(rows), "certain")] if wrong.any() else [])


def goal_terminals(steps: Experience, terminated_fn: Callable[..., Any] | None) -> Verdict:
    """Steps that reach their goal and are not flagged, though ``terminated_fn`` says that they end there."""
    if terminated_fn is None:
        return Lack("pass terminated_fn, a function of achieved and desired goals", absent=True)
    goals = _goals(steps)
    if goals is None:
        return Lack("terminated_fn was given, but the source has no observations with 'achieved_goal' and "
                    "'desired_goal', with next observations")  # fmt: skip
    if steps.window > 1:
        return Lack("rows are n-step transitions, whose flags are those of their last steps")
    rows = _some(np.arange(len(steps)))
    wrong = said("terminated_fn", terminated_fn, rows, *({(): x} for x in goals), arrays=True).astype(np.bool_)
    wrong &= ~steps.terminated[rows]  # an episode may also end for another reason
    return Looked(len(rows), [
        found("terminal-of-the-old-goal", "certain", "steps that reach their goal are not flagged as terminated",
              "compute terminated again from the achieved and the new goal",
              rows[wrong], len(rows), place=steps.place)] if wrong.any() else [])  # fmt: skip


def _goals(steps: Experience) -> tuple[Array, Array] | None:
    """The goal that each step achieved, and the one it was to achieve, ``[S, ...]``; None without goals."""
    after = (steps.next_obs or {}).get(("achieved_goal",))
    desired = steps.obs.get(("desired_goal",))
    return None if after is None or desired is None or after.shape != desired.shape else (after, desired)


def _old_goal(steps: Experience, rows: Ints, looked: int, sure: Any) -> Finding:
    return found("reward-of-the-old-goal", sure,
                 "rewards are not those of the stored goals: goals were exchanged, and the rewards are those of others",
                 "compute the reward again from the achieved and the new goal",
                 rows, looked, place=steps.place)  # fmt: skip


def _reached_goals(steps: Experience, achieved: Array, desired: Array) -> Verdict:
    """Rewards of steps that reached their goal to the bit, beside those of all other steps.

    A step that reached its goal must not earn less than others usually do, nor earn now this and now that.
    """
    met = same_rows(achieved, desired.astype(achieved.dtype))
    reward = steps.reward.astype(np.float64)
    if met.sum() < 2 * FEW or (~met).sum() < 2 * FEW:
        return Lack("too few steps reach their goal exactly; pass reward_fn, a function of achieved and desired goals")
    if not np.isfinite(reward).all():
        return Lack("rewards are not finite")
    mine, others = reward[met], reward[~met]
    spread = float(others.std())
    no_better = bool(mine.mean() <= np.median(others) + 0.1 * spread and mine.mean() <= others.mean() + 0.1 * spread)
    wild = bool(mine.std() > 0.5 * max(spread, 1e-30) and mine.std() > 0)
    wrong = met & (reward <= np.median(others) + 0.5 * spread) if no_better or wild else met & False
    return Looked(
        len(steps), [_old_goal(steps, np.flatnonzero(wrong), int(met.sum()), "likely")] if wrong.any() else []
    )


def _some(rows: Ints) -> Ints:
    """At most :data:`MANY_ROWS` of rows, in runs that lie together."""
    if len(rows) <= MANY_ROWS:
        return rows
    pieces = MANY_ROWS // 500
    begins = np.linspace(0, len(rows) - 500, pieces).astype(np.int64)
    return rows[np.unique(begins[:, None] + np.arange(500))]


def said(name: str, function: Callable[..., Any], rows: Ints, *given: Leaves, arrays: bool = False) -> Array:
    """What a function of the user says of rows, float64 ``[K]``.

    It gets tensors, or arrays if it cannot take these; with ``arrays`` the other way round.

    Raises:
        ParameterError: it raised an error, or did not give one number for each row.
    """
    answers: list[Array] = []
    for i in range(0, len(rows), PIECE):
        some = rows[i : i + PIECE]
        trees = [_tree({path: leaf[some] for path, leaf in leaves.items()}) for leaves in given]
        try:
            with torch.no_grad():
                answer = _asked(function, trees, arrays)
            numbers = as_host(answer, name)
        except Exception as error:
            other = "" if error.__cause__ is None else f"; called in the other way, it raised {error.__cause__!r:.300}"
            raise ParameterError(f"{name}: it failed on {len(some)} stored rows: {error!r:.300}{other}") from error
        if numbers.size != len(some) or numbers.dtype.kind not in "biuf":
            raise ParameterError(
                f"{name}: expected one number for each of {len(some)} rows, got {numbers.dtype} {numbers.shape}"
            )
        answers.append(numbers.reshape(-1).astype(np.float64))
    return np.concatenate(answers)


def _asked(function: Callable[..., Any], trees: list[Any], arrays: bool) -> Any:
    first, second = (trees, map(_tensors, trees)) if arrays else (map(_tensors, trees), trees)
    try:
        return function(*first)
    except (TypeError, AttributeError, ValueError, RuntimeError) as error:
        try:
            return function(*second)
        except (TypeError, AttributeError, ValueError, RuntimeError) as other:
            raise error from other


def _tensors(tree: Any) -> Any:
    """Arrays in nested dicts, as tensors."""
    if isinstance(tree, dict):
        return {name: _tensors(part) for name, part in cast("dict[str, Any]", tree).items()}
    return torch.from_numpy(tree)


def _tree(leaves: Leaves) -> Any:
    """Leaves by path as nested dicts, or as the one array that they are."""
    if list(leaves) == [()]:
        return leaves[()]
    nested: dict[str, Any] = {}
    for path, leaf in leaves.items():
        part = nested
        for name in path[:-1]:
            part = part.setdefault(name, {})
        part[path[-1]] = leaf
    return nested
