"""Rules that learn one number of a row from others: rewards, observations and values that fit another row better.

A number is learned by kernel ridge regression on the other numbers of a row (smoothing spline ANOVA, Wahba 1990, with
Gaussians), and is tested on rows that were not learned from. A rule compares how well a field fits the row it stands in
with how well it fits the rows before and after.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..steps.arrays import Array, Bools, Ints
from .ends import offset_of_ends, stored_ignored_steps
from .experience import Experience
from .findings import Lack, Looked, Verdict, found

__all__ = ["action_one_step_off", "expected_rewards", "resets", "reward_one_step_off", "running_sums",
           "value_one_step_off"]  # fmt: skip


LEAST, FIRST, SAMPLE = 200, 450, 1200
"""The fewest rows that something is learned from; those that suffice where a field clearly fits its own row; and the
most, which are looked at if it does not."""

FOLDS = 3
"""A row is predicted from what was learned from the rows of the other folds."""

LAGS = (0, -1, 1)
"""A field may fit its own row, the row before it, or the row after it."""

CLEARLY = 0.5
"""Another row fits clearly better if it leaves less than this share of the squared error of a row's own."""

FAR_BEYOND_NOISE = 6.0
"""And if the mean difference of the errors is this many times its standard error."""

SOMETHING = 0.9
"""What is learned leaves at most this share of the variance, or nothing was learned."""

WIDTH = 0.6
"""How far numbers may lie apart and still be alike, in standard deviations."""

RIDGES = (1e-4, 1e-2, 1.0)
"""Strengths of the penalty. The one that predicts best is used."""

HUGE = 1e30
"""Larger numbers overflow when they are multiplied."""


@dataclass(frozen=True)
class Scale:
    """How to bring numbers to one scale.

    Args:
        mean: of the rows' numbers, ``[D]``.
        spread: their standard deviation, ``[D]``; numbers that do not vary are left out.
    """

    mean: Array
    spread: Array

    @classmethod
    def of(cls, raw: Array) -> Scale:
        """The scale of these rows ``[K, D]``."""
        spread = raw.std(0)
        return cls(raw.mean(0), np.where(spread > 1e-9 * np.abs(raw).max(0, initial=0), spread, 0.0))

    def __call__(self, raw: Array) -> Array:
        """Rows ``[K, D]`` on this scale, ``[K, D']``."""
        varies = self.spread > 0
        return np.clip((raw - self.mean)[:, varies] / self.spread[varies], -8, 8)


def alike(rows: Array, others: Array) -> Array:
    """How alike rows ``[K, D]`` and others ``[L, D]`` are, ``[K, L]``: the kernel of what is learned.

    1 + xy + the mean of k + the mean of kk' over pairs of numbers, where k is a Gaussian of one number. So functions of
    single numbers and of pairs are learned quickly, whatever their form, even beside many numbers that do not matter.
    """
    size = max(rows.shape[1], 1)
    ones, squares, one = (np.zeros((len(rows), len(others)), np.float32) for _ in range(3))
    for x, y in zip((rows / WIDTH).T.astype(np.float32), (others / WIDTH).T.astype(np.float32), strict=True):
        np.subtract(x[:, None], y[None], out=one)
        one *= one
        one *= -0.5
        np.exp(one, out=one)
        ones += one
        one *= one
        squares += one
    pairs = (ones**2 - squares) / max(size * (size - 1), 1)
    return 1 + rows @ others.T / size + (ones / size + pairs).astype(np.float64)


def _learned(kernel: Array, targets: Array, penalty: float) -> Array:
    """The weights ``[K, ...]`` of rows by their kernel ``[K, K]``. ``alike(others, rows) @ weights`` predicts."""
    ridged = kernel.copy()
    ridged[np.diag_indices_from(ridged)] += penalty
    return np.linalg.solve(ridged, targets)


def _predicted(kernel: Array, targets: Array, penalty: float) -> Array:
    """Targets ``[K, M]`` as the rows of other folds predict them."""
    fold, mean = np.arange(len(targets)) % FOLDS, targets.mean(0)
    predicted = np.empty(targets.shape)
    for k in range(FOLDS):
        test, known = np.flatnonzero(fold == k), np.flatnonzero(fold != k)
        weights = _learned(kernel[np.ix_(known, known)], targets[known] - mean, penalty)
        predicted[test] = mean + kernel[np.ix_(test, known)] @ weights
    return predicted


def _errors(kernel: Array, targets: Array) -> Array:
    """The squared errors ``[K, M]`` of predicting targets ``[K, M]`` from what other rows taught, over the variance."""
    best = np.full(targets.shape, np.inf)
    for penalty in RIDGES:
        errors = (_predicted(kernel, targets, penalty) - targets) ** 2
        # one wild prediction says nothing of a fit: no error counts for more than a hundred spreads
        errors = np.minimum(errors / np.maximum(targets.var(0), 1e-30), 100.0)
        better = errors.mean(0) < best.mean(0)
        best[:, better] = errors[:, better]
    return best


def _clearly_less(one: Array, other: Array) -> bool:
    """Whether errors ``[K]`` are clearly smaller than others of the same rows."""
    less = other - one
    return bool(one.mean() < CLEARLY * other.mean()
                and less.mean() > FAR_BEYOND_NOISE * less.std() / np.sqrt(len(less)))  # fmt: skip


def _within(steps: Experience) -> Ints:
    """A sample of the rows whose neighbours on both sides are of the same episode, in a random order."""
    inner = steps.inner
    rows = np.flatnonzero(inner[1:-1] & inner[:-2]) + 1
    return np.random.default_rng(0).permutation(rows)[:SAMPLE]


def _acts(steps: Experience) -> Array | None:
    """The actions of all rows side by side, ``[S, A]``: a flag for each value of discrete ones; None without any."""
    parts: list[Array] = []
    for leaf in steps.action.values():
        flat = leaf.reshape(len(steps), -1)
        if flat.shape[1] > 64 or flat.dtype.kind == "c":
            continue
        kinds = np.unique(flat[:: max(len(flat) // 2000, 1)])
        if flat.shape[1] == 1 and 2 < len(kinds) <= 20 and np.array_equal(kinds, np.round(kinds)):
            parts.append((flat == kinds[None, 1:]).astype(np.float64))
        else:
            parts.append(flat.astype(np.float64))
    found_ = np.concatenate(parts, 1) if parts else np.empty((len(steps), 0))
    return found_ if found_.shape[1] and np.isfinite(found_).all() else None


def _cannot(steps: Experience, rows: Ints) -> Lack | None:
    """Why nothing can be learned from these rows; None if something can."""
    if steps.disorder:
        return Lack(steps.disorder)
    if len(rows) < LEAST:
        return Lack(f"fewer than {LEAST} steps lie within episodes")
    if not steps.numbers.shape[1]:
        return Lack("observations are images, of which nothing is learned")
    if not (np.isfinite(steps.numbers[rows]).all() and np.isfinite(steps.next_numbers[rows]).all()):
        return Lack("observations hold numbers that are not finite")
    if np.abs(steps.numbers[rows]).max() > HUGE:
        return Lack("observations are too large to compute with")
    return None


def _whole_row(steps: Experience, rows: Ints) -> Array:
    """Observation, action and next observation of rows side by side, float64 ``[K, D]``."""
    acts = _acts(steps)
    parts = [steps.numbers[rows], steps.next_numbers[rows], *([] if acts is None else [acts[rows]])]
    return np.concatenate([np.asarray(part, np.float64) for part in parts], 1)


def _fitting_rows(raw: Array, column: Array, rows: Ints) -> dict[int, Array]:
    """The errors ``[K]`` of learning a column ``[S]`` of the row ``lag`` rows after each from the row's numbers."""
    plain = Scale.of(raw)(raw)
    errors = _errors(alike(plain, plain), np.stack([column[rows + lag] for lag in LAGS], 1))
    return dict(zip(LAGS, errors.T, strict=True))


def _better_lag(errors: dict[int, Array]) -> int:
    """The lag at which a column fits clearly better than in its own row; 0 if there is none."""
    best = min(errors, key=lambda lag: float(errors[lag].mean()))
    return best if best and _clearly_less(errors[best], errors[0]) else 0


def _fits_its_own(errors: dict[int, Array]) -> bool:
    """Whether a first look at a few rows settles that a column fits its own row best."""
    left = {lag: float(error.mean()) for lag, error in errors.items()}
    return left[0] < SOMETHING * min(1.0, left[-1], left[1])


def reward_one_step_off(steps: Experience) -> Verdict:
    """Rewards that follow from the step before or after, and not from the step in their own row."""
    rows = _within(steps)
    lack = _cannot(steps, rows)
    if lack is not None:
        return lack
    reward = steps.reward.astype(np.float64)
    if not np.isfinite(reward[rows]).all() or np.abs(reward).max() > HUGE:
        return Lack("rewards are not finite, or too large to compute with")
    if np.ptp(reward[rows]) == 0:
        return Lack("rewards are the same in all steps within episodes")
    whole = _whole_row(steps, rows)
    if _fits_its_own(_fitting_rows(whole[:FIRST], reward, rows[:FIRST])):
        return Looked(len(rows))
    errors = _fitting_rows(whole, reward, rows)
    left = {lag: float(error.mean()) for lag, error in errors.items()}
    if min(left.values()) > SOMETHING:
        return Lack("rewards do not follow from observations and actions, of this row or of a neighbour")
    best = _better_lag(errors)
    if not best:
        return Looked(len(rows))
    word = "after" if best > 0 else "before"
    return Looked(len(rows), [
        found("reward-one-step-off", "likely",
              f"the reward of a step is stored in the row {word} it: there it follows from observation and "
              f"action but for {left[best]:.1%} of its variance, in its own row but for {left[0]:.1%}",
              "store the reward that step() returned in the row of the observation and action given to it",
              np.arange(len(steps)), len(steps), place=steps.place)])  # fmt: skip


def action_one_step_off(steps: Experience) -> Verdict:
    """Actions that move the observation of the row before or after, and not that of their own row.

    The action of the following row may depend on the observation that this row led to. So its part that follows from
    that observation is taken away first.
    """
    rows = _within(steps)
    lack, acts = _cannot(steps, rows), _acts(steps)
    if lack is not None or acts is None:
        return lack or Lack("it keeps no actions that can be computed with")
    if steps.window > 1:
        return Lack("rows are n-step transitions, of which the action is one of several")
    if not (acts[rows] != acts[rows[0]]).any():
        return Lack("actions are the same in all steps within episodes")
    before = np.asarray(steps.numbers[rows], np.float64)
    moved = np.asarray(steps.next_numbers[rows], np.float64) - before
    moved = moved[:, moved.std(0) > 1e-9 * np.abs(before).max(initial=1e-30)]
    if not moved.shape[1]:
        return Lack("observations do not change within episodes")
    first = _moving(steps, acts, rows[:FIRST], moved[:FIRST], (0,))
    if (first[0].mean(0) < SHOWN * first[None].mean(0))[first[None].mean(0) > 1e-4].any():
        return Looked(len(rows))  # its own action moves the observation
    found_ = _moving(steps, acts, rows, moved, LAGS)
    alone, errors = found_.pop(None), found_
    left = {lag: error.mean(0) for lag, error in errors.items()}
    # the numbers that an action moves, each as a share of what observations alone leave
    shown = (np.minimum.reduce(list(left.values())) < SHOWN * alone.mean(0)) & (alone.mean(0) > 1e-4)
    if not shown.any():
        return Lack("actions do not show in how observations change")
    per_row = {lag: (error / alone.mean(0))[:, shown].mean(1) for lag, error in errors.items()}
    best = min((-1, 1), key=lambda lag: float(per_row[lag].mean()))
    own, other = float(per_row[0].mean()), float(per_row[best].mean())
    if own < 1 - 0.2 * (1 - other) or not _clearly_less(per_row[best], per_row[0]):
        return Looked(len(rows))  # its own action moves the observation, too
    word = "after" if best > 0 else "before"
    # an action cannot move what was seen before it; but an env may well be moved by the action before
    return Looked(len(rows), [
        found("action-one-step-off", "possible" if best < 0 or _pays(steps, acts, rows) else "likely",
              f"the action of a step is stored in the row {word} it: with the one there, the next observation follows "
              f"but for {other:.1%} of what observations alone leave open, with the row's own but for {own:.1%}"
              + ("; or the policy reacts to changes that it does not cause" if best > 0 else
                 "; or the env acts one step late"),
              "store the action that was given to step() with the observation it was chosen on",
              np.arange(len(steps)), len(steps), place=steps.place)])  # fmt: skip


def _pays(steps: Experience, acts: Array, rows: Ints) -> bool:
    """Whether the reward of a row follows from its own action, and hardly without it, however the row moved."""
    reward = steps.reward[rows].astype(np.float64)[:, None]
    if not np.isfinite(reward).all() or np.abs(reward).max() > HUGE or np.ptp(reward) == 0:
        return False
    raw = np.concatenate([steps.numbers[rows], steps.next_numbers[rows]], 1).astype(np.float64)
    without, acted = Scale.of(raw)(raw), np.concatenate([raw, acts[rows]], 1)
    with_ = Scale.of(acted)(acted)
    left = [float(_errors(alike(plain, plain), reward).mean()) for plain in (with_, without)]
    return left[0] < CLEARLY * left[1]


SHOWN = 0.7
"""An action shows in a number if it leaves less than this share of the error that observations alone leave."""


def _moving(steps: Experience, acts: Array, rows: Ints, moved: Array, lags: tuple[int, ...]) -> dict[int | None, Array]:
    """The errors ``[K, M]`` of learning how observations move, from them and the action ``lag`` rows after these; and
    from them alone, by None.
    """
    raw = np.asarray(steps.numbers[rows], np.float64)
    state = alike(*2 * (Scale.of(raw)(raw),))
    errors: dict[int | None, Array] = {None: _errors(state, moved)}
    return errors | {
        lag: _errors(state + (1 + state) * _alike_actions(steps, acts, rows, lag), moved) for lag in lags
    }  # fmt: skip


OF_ITS_OWN = 0.1
"""The share of an action's variance that must not follow from the observation it was chosen on."""


def _alike_actions(steps: Experience, acts: Array, rows: Ints, lag: int) -> Array:
    """How alike the actions ``lag`` rows after these are, ``[K, K]``: products of them and of their squares."""
    plain = Scale.of(acts[rows + lag])(acts[rows + lag])
    kinds = plain if plain.shape[1] > 8 else np.concatenate([plain, plain**2], 1)
    kinds = kinds[:, kinds.std(0) > 1e-9]
    if lag > 0:
        raw = np.asarray(steps.next_numbers[rows], np.float64)
        after = alike(*2 * (Scale.of(raw)(raw),))
        own = kinds - _predicted(after, kinds, RIDGES[1])
        kinds = own[:, own.var(0) > OF_ITS_OWN * kinds.var(0)]  # the rest is an error of the prediction
    return kinds @ kinds.T / max(plain.shape[1], 1)


def value_one_step_off(steps: Experience) -> Verdict:
    """Values that follow from the observation of the row before or after, and not from that of their own row."""
    value = steps.others.get(("value",))
    if value is None or value.size != len(steps) or value.dtype.kind not in "biuf":
        return Lack("it keeps no values", absent=True)
    rows = _within(steps)
    lack = _cannot(steps, rows)
    if lack is not None:
        return lack
    numbers = value.reshape(-1).astype(np.float64)
    if not np.isfinite(numbers).all() or np.ptp(numbers[rows]) == 0:
        return Lack("values are not finite, or the same in all steps")
    before = np.asarray(steps.numbers[rows], np.float64)
    if _fits_its_own(_fitting_rows(before[:FIRST], numbers, rows[:FIRST])):
        return Looked(len(rows))
    errors = _fitting_rows(before, numbers, rows)
    left = {lag: float(error.mean()) for lag, error in errors.items()}
    if min(left.values()) > SOMETHING:
        return Lack("values do not follow from observations, of this row or of a neighbour")
    best = _better_lag(errors)
    if not best:
        return Looked(len(rows))
    word = "after" if best > 0 else "before"
    return Looked(len(rows), [
        found("value-one-step-off", "likely",
              f"the value of an observation is stored in the row {word} it: from the observation there it follows but "
              f"for {left[best]:.1%} of its variance, from its own row's but for {left[0]:.1%}",
              "store V(obs) in the row of that observation",
              np.arange(len(steps)), len(steps), place=steps.place)])  # fmt: skip


STARTS = 5
"""How many first steps of episodes must be stored before sums over episodes can be told."""


def running_sums(steps: Experience) -> Verdict:
    """Rewards that are the sum of all rewards since the episode began.

    Differences of neighbours are then rewards: they are the same everywhere or follow from observation and action, the
    stored rewards do not, and those of first steps are like the differences.
    """
    if steps.disorder:
        return Lack(steps.disorder)
    reward = steps.reward.astype(np.float64)
    if not np.isfinite(reward).all() or np.abs(reward).max(initial=0) > HUGE:
        return Lack("rewards are not finite, or too large to compute with")
    first = steps.starts.copy()
    if steps.step is not None:
        first |= steps.step == 0
    starts, later = np.flatnonzero(first), np.flatnonzero(steps.inner[:-1]) + 1
    if len(starts) < STARTS:
        return Lack(f"fewer than {STARTS} first steps of episodes are stored")
    later = np.random.default_rng(0).permutation(later)[:SAMPLE]
    if len(later) < LEAST // 2:
        return Lack(f"fewer than {LEAST // 2} steps lie within episodes")
    gained = reward[later] - reward[later - 1]
    spread = float(reward[later].var())
    if spread == 0:
        return Looked(len(later))
    if np.ptp(gained) <= 1e-4 * np.abs(gained).max():
        same = np.abs(reward[starts] - gained[0]) <= 1e-4 * abs(gained[0])
        told = bool(same.mean() > 0.9 and len(np.unique(reward[later])) >= STARTS)
        told = told and not _follow(steps, later, reward[later])
    elif np.median(np.abs(reward[starts])) > 3 * np.abs(gained).mean():
        told = False  # first rewards are no gains
    else:
        lack = _cannot(steps, later)
        if lack is not None:
            return lack
        raw = _whole_row(steps, np.concatenate([later, starts]))
        plain = Scale.of(raw)(raw)
        here, there = plain[: len(later)], plain[len(later) :]
        kernel = alike(here, here)
        apart = _errors(kernel, np.stack([gained, reward[later]], 1)) * np.array([gained.var(), spread])
        of_gain, of_reward = (float(error) for error in apart.mean(0))
        expected = gained.mean() + alike(there, here) @ _learned(kernel, gained - gained.mean(), RIDGES[1])
        at_starts = np.median(np.abs(expected - reward[starts]))
        told = bool(of_gain < 0.5 * max(gained.var(), gained.mean() ** 2) and of_gain < 0.1 * of_reward
                    and at_starts < 3 * np.sqrt(of_gain) + 0.05 * np.abs(gained).mean()
                    and at_starts < 0.3 * np.abs(reward[later]).mean())  # fmt: skip
    if not told:
        return Looked(len(later))
    return Looked(len(later), [
        found("reward-is-a-sum", "likely",
              "rewards are sums since the episode began: what they gain from step to step follows from the step, and "
              "first steps have just that",
              "store the reward of each step, and not the return so far",
              np.arange(len(steps)), len(steps), place=steps.place)])  # fmt: skip


def _follow(steps: Experience, rows: Ints, column: Array) -> bool:
    """Whether a column ``[K]`` follows from the rows, nearly in full."""
    if _cannot(steps, rows) is not None:
        return False
    raw = _whole_row(steps, rows)
    plain = Scale.of(raw)(raw)
    return float(_errors(alike(plain, plain), column[:, None]).mean()) < 0.01


def resets(steps: Experience) -> Verdict:
    """Resets that nobody flagged, in data without next observations.

    The following observation is learned from observation and action. Where it is far from what they lead to in most of
    its numbers, and what comes instead is much the same each time, or comes after the same number of steps each time, a
    new episode began.
    """
    if steps.next_obs is not None:
        return Lack("next observations are stored, and show where rows do not go on", absent=True)
    rows = np.flatnonzero(steps.inner)
    lack = _cannot(steps, rows)
    if lack is not None:
        return lack
    if steps.numbers.dtype.kind != "f" or _whole(steps.numbers):
        return Lack("observations are whole numbers, which may well jump")
    rows = rows[: 10 * SAMPLE]
    acts = _acts(steps)
    raw = np.asarray(steps.numbers[rows], np.float64)
    raw = raw if acts is None else np.concatenate([raw, acts[rows]], 1)
    moved = np.asarray(steps.numbers[rows + 1], np.float64) - steps.numbers[rows]
    varies = moved.std(0) > 1e-6 * np.abs(steps.numbers[rows]).max(0)
    if not varies.any():
        return Lack("observations do not change within episodes")
    far = _far_off(Scale.of(raw)(raw), moved[:, varies])
    # what lies beside a flagged end is the business of other rules
    flagged = np.flatnonzero(steps.ended)
    near = np.isin(rows, np.concatenate([flagged - 1, flagged, flagged + 1]))
    broken = rows[far & ~near]
    few = len(broken) < FEW or len(broken) > MOST_RESETS * len(rows)
    if few or not (_land_together(steps, broken, varies) or _at_one_length(broken)):
        return Looked(len(rows))
    if offset_of_ends(steps) or stored_ignored_steps(steps) is not None:
        return Lack("ends are flagged one row off, or ignored steps are stored")
    jumps = np.isin(rows, broken)
    kept = np.concatenate([np.flatnonzero(jumps), np.flatnonzero(~jumps)[: SAMPLE // 2]])
    plain = Scale.of(raw[kept])(raw[kept])
    # a state may rightly lead to a jump: a clock, or a task that goes on elsewhere once its goal is reached
    follows = _errors(alike(plain, plain), jumps[kept, None].astype(np.float64)).mean() < FORESEEN
    return Looked(len(rows), [
        found("reset-not-flagged", "possible" if follows else "likely",
              "observations jump where nothing leads them, each time to the same region or after the same number of "
              "steps: a new episode began there, and no end is flagged"
              + ("; or the env itself jumps from such states" if follows else ""),
              "store terminated and truncated as step() returned them",
              broken, len(rows), place=steps.place)])  # fmt: skip


FORESEEN = 0.5
"""Jumps follow from what leads to them if less than this share of their variance is left."""

FEW, MOST_RESETS = 3, 0.15
"""How many resets there must be, and the largest share of rows that may be some."""


def _far_off(plain: Array, moved: Array) -> Bools:
    """Which rows moved far otherwise than others lead to expect, in most of their numbers, bool ``[K]``."""
    # what moves far is not learned from: an end by a state, such as a fall, would be learned as a step
    calm = np.flatnonzero((np.abs(moved) > 5 * np.median(np.abs(moved), 0) + 1e-9).mean(1) < 0.5)
    if len(calm) < LEAST // 2:
        return np.zeros(len(moved), np.bool_)
    kept = np.random.default_rng(0).permutation(calm)[:SAMPLE]
    mean = moved[kept].mean(0)
    weights = _learned(alike(plain[kept], plain[kept]), moved[kept] - mean, RIDGES[1])
    missed = np.concatenate([
        np.abs(alike(plain[i : i + SAMPLE], plain[kept]) @ weights + mean - moved[i : i + SAMPLE])
        for i in range(0, len(plain), SAMPLE)
    ])  # fmt: skip
    usual = np.quantile(missed[calm], 0.95, axis=0) + 0.05 * np.abs(moved[calm]).mean(0)
    return (missed > 4 * usual).mean(1) >= 0.6


def _land_together(steps: Experience, broken: Ints, varies: Bools) -> bool:
    """Whether the rows after these lie much nearer to each other than all rows do, in half of their numbers or more."""
    landed = np.asarray(steps.numbers[broken + 1], np.float64)[:, varies]
    usual = np.asarray(steps.numbers, np.float64)[:, varies].var(0)
    return bool((landed.var(0) < 0.2 * usual).mean() >= 0.5)


def _at_one_length(broken: Ints) -> bool:
    """Whether these rows come at one distance from each other, or at multiples of it, where some were not noticed."""
    gaps = np.diff(broken)
    return len(gaps) >= FEW and gaps.min() > 10 and bool((gaps % gaps.min() == 0).mean() > 0.9)


def _whole(numbers: Array) -> bool:
    """Whether the numbers of a sample are whole."""
    sample = numbers[:: max(len(numbers) // 1000, 1)]
    return bool(np.array_equal(sample, np.round(sample)))


def expected_rewards(steps: Experience, calm: Ints, rows: Ints) -> Array | None:
    """The rewards that rows ``calm`` lead to expect in ``rows``, ``[K]``; None if they predict too badly."""
    reward = steps.reward.astype(np.float64)
    if np.ptp(reward[calm]) == 0:
        return np.full(len(rows), reward[calm[0]])
    if not steps.numbers.shape[1]:
        return None
    known = np.random.default_rng(0).permutation(calm)[:SAMPLE]
    raw = _whole_row(steps, known)
    if not np.isfinite(raw).all() or np.abs(raw).max() > HUGE or np.abs(reward).max() > HUGE:
        return None
    scale, mean = Scale.of(raw), reward[known].mean()
    plain = scale(raw)
    kernel = alike(plain, plain)
    if _errors(kernel, reward[known, None]).mean() > 0.05:
        return None
    weights = _learned(kernel, reward[known] - mean, RIDGES[0])
    return mean + alike(scale(_whole_row(steps, rows)), plain) @ weights
