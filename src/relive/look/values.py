"""Rules on the values of fields.

In order: single fields (not finite, constant, out of their space, of the wrong kind); fields that fit another row
than their own, which is learned from the other rows; and what a policy, a critic or a reward function of the user says
of stored steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ..collect.envs import member
from ..errors import ParameterError
from ..printable import shown
from ..steps.arrays import Array, Bools, Ints, as_host, to_tensor
from ..steps.schema import dotted, map_leaves
from .continuity import offset_of_ends, stored_ignored_steps
from .experience import ArrayTree, Experience, Leaves, are_whole, real_numbers, same_rows, tree_of
from .findings import Finding, Lack, Look, Sureness, finding, rule, skip_if
from .heads import MOST, Head, numbers_of

Function = Callable[..., object]
"""A function of the user's, such as a critic."""

# -- single fields -----------------------------------------------------------------------------------------------------


@rule("not-finite")
def not_finite(steps: Experience) -> Look:
    """NaN and infinities."""
    for path, leaf in steps.leaves.items():
        if leaf.dtype.kind not in "fc" or path[0] in MAY_BE_INFINITE:
            continue
        flat = real_numbers(leaf.reshape(len(leaf), -1))
        if np.isfinite(np.sum(flat, dtype=np.float64)):  # a sum is finite only if all numbers are
            continue
        bad = np.logical_not(np.isfinite(flat).all(1))
        if path[0] == "next_obs" and steps.next_obs is not None:
            bad &= ~steps.still
        yield from steps.finding("not-finite", "certain", f"'{dotted(path)}' holds NaN or infinite numbers",
            "mend the env or the policy; debug=True refuses such steps when they are added",
            bad, field=dotted(path))  # fmt: skip
    return len(steps)


MAY_BE_INFINITE = frozenset(("final_value", "log_prob", "mask"))


@rule("constant-field")
def constant_fields(steps: Experience) -> Look:
    """Observations or actions that never change."""
    skip_if(len(steps) < 20, "fewer than 20 steps are stored")
    for name, group in (("obs", steps.obs), ("action", steps.action)):
        for path, leaf in group.items():
            few = leaf[: len(leaf) // 20 + 2]
            if not (leaf.size and _never_changes(steps, few) and _never_changes(steps, leaf)):
                continue
            where = dotted((name, *path))
            # a policy may always do the same, one of several observations may be fixed, and a bandit has no state
            meant = name == "action" or len(group) > 1 or leaf[0].size == 1 or not steps.inner.any()
            yield from steps.finding(
                "constant-field", "possible" if meant else "likely", f"'{where}' is the same in all rows of an env",
                "check that the loop stores what the env and the policy give at each step", field=where)  # fmt: skip
    yield from _constant_in_episodes(steps)
    return len(steps)


LONG = 10
"""The fewest steps of the episodes within which observations never change."""


def _constant_in_episodes(steps: Experience) -> Iterator[Finding]:
    """Observations that change from one episode to the next, and never within one: an array that was stored as it is.

    All rows of an episode then hold what the env wrote to it last.
    """
    inner = np.flatnonzero(steps.inner)
    if len(inner) < LONG * STARTS or not steps.ordered or not all(leaf.size for leaf in steps.obs.values()):
        return
    ends = int((steps.ended & steps.follows).sum())
    if ends < STARTS or len(inner) < LONG * ends or (not steps.still[inner].all() and steps.next_obs is not None):
        return
    if not all(bool(same_rows(leaf[inner], leaf[inner + 1]).all()) for leaf in steps.obs.values()):
        return
    first = np.flatnonzero(steps.starts)
    if all(bool(same_rows(leaf[first], leaf[first - 1]).all()) for leaf in steps.obs.values()):
        return  # another finding says that they never change at all
    # one number, such as the arm of a bandit or a level, may well be that of an episode
    meant = sum(leaf[0].size for leaf in steps.obs.values()) == 1
    where = "obs" if len(steps.obs) > 1 else dotted(("obs", *next(iter(steps.obs))))
    yield from steps.finding("constant-field", "possible" if meant else "likely",
        f"'{where}' is the same in all rows of an episode: an array that the env goes on writing to was stored, and "
        "all rows hold its last observation; or the task shows one context an episode",
        "store a copy of the observation at each step", steps.inner, len(steps), field=where)  # fmt: skip


def _never_changes(steps: Experience, leaf: Array) -> bool:
    """True if the first rows of a leaf are equal in each env."""
    rows = steps.env[1 : len(leaf)] == steps.env[: len(leaf) - 1]
    return bool(same_rows(leaf[1:], leaf[:-1])[rows].all())


ENOUGH = 50
"""The fewest rows of an env that its figures are compared for."""


@rule("env-stands-still", "env-earns-the-same")
def odd_envs(steps: Experience) -> Look:
    """One env whose observations or rewards never change while those of the others do."""
    kinds, first, counts = np.unique(steps.env, return_index=True, return_counts=True)
    skip_if(len(kinds) < 2, "it has one env, or does not say which rows are of which", absent=True)
    if counts.min() < ENOUGH or not bool((np.diff(first) > 0).all()) or counts.sum() != len(steps):
        raise Lack(f"an env has fewer than {ENOUGH} rows")
    rows = {int(kind): np.flatnonzero(steps.env == kind) for kind in kinds}
    frozen = {env: _longest_still(steps, of_env) for env, of_env in rows.items()}
    moves = np.sort([1 - share for share in frozen.values()])
    dead = [env for env, share in frozen.items() if share > 0.8]
    if dead and len(dead) < len(kinds) / 2 and np.median(list(frozen.values())) < 0.2 and moves[-1] > 0.5:
        what = "observations of env {} do not change, while those of the others do"
        yield from _odd("env-stands-still", steps, dead, what)
        return len(steps)
    quiet = [env for env, of_env in rows.items() if len(np.unique(steps.reward[of_env])) == 1]
    if not quiet or len(quiet) >= len(kinds) / 2:
        return len(steps)
    # how often the others earn something else than what they mostly earn: each earns it in many of its steps
    shares = [float((steps.reward[of_env] != _mostly(steps.reward[of_env])).mean())
              for env, of_env in rows.items() if env not in quiet]  # fmt: skip
    if min(shares) > 0.3:
        what = "rewards of env {} never change, while those of the others often do"
        yield from _odd("env-earns-the-same", steps, quiet, what)
    return len(steps)


def _odd(name: str, steps: Experience, envs: list[int], what: str) -> Iterator[Finding]:
    """The finding that these envs do otherwise than the others; none if there are none."""
    mend = "look at that env: it may have crashed, or its slot is never written"
    return steps.finding(name, "likely", what.format(", ".join(map(str, envs))), mend, np.isin(steps.env, envs))


def _mostly(numbers: Array) -> object:
    """The number that comes most often."""
    kinds, counts = np.unique(numbers, return_counts=True)
    return kinds[np.argmax(counts)]


def _longest_still(steps: Experience, rows: Array) -> float:
    """The longest run of rows of one env with the same observation, as a share of its rows; 0 if actions are the same.

    An agent that stands still by its own choice gives one action again and again.
    """
    same = np.logical_and.reduce([same_rows(leaf[rows[:-1]], leaf[rows[1:]]) for leaf in steps.obs.values()])
    edges = np.flatnonzero(np.concatenate([[True], ~same, [True]]))
    lengths = np.diff(edges)
    longest = int(np.argmax(lengths))
    run = rows[edges[longest] : edges[longest] + lengths[longest]]
    varied = all(bool((leaf[run] != leaf[run[:1]]).any()) for leaf in steps.action.values())
    return float(len(run) / len(rows)) if varied and len(run) >= ENOUGH else 0.0


@rule("bytes-as-floats")
def bytes_as_floats(steps: Experience) -> Look:
    """Float observations that hold the whole numbers 0 to 255: images at four times their size."""
    for path, leaf in steps.obs.items():
        if leaf.dtype.kind != "f" or leaf.ndim < 3 or not len(leaf):
            continue
        sample = leaf[:: max(len(leaf) // 64, 1)]
        if np.array_equal(sample, np.round(sample)) and sample.min() >= 0 and 16 <= sample.max() <= 255:
            where = dotted(("obs", *path))
            sizes = sorted(leaf.shape[1:])[-2:]  # counts of a few things are no image
            yield from steps.finding("bytes-as-floats", "likely" if len(sizes) == 2 and sizes[0] >= 8 else "possible",
                f"'{where}' holds whole numbers from 0 to 255 as {leaf.dtype}: bytes at {leaf.dtype.itemsize} times "
                "their size", "store uint8, and divide by 255 in the network", field=where)  # fmt: skip
    return len(steps)


@rule("actions-as-floats")
def actions_as_floats(steps: Experience) -> Look:
    """Float actions that hold a few whole numbers: discrete actions. float32 loses whole numbers beyond 2 ** 24."""
    skip_if(not steps.action, "it keeps no actions")
    skip_if(len(steps) < 20, "fewer than 20 steps are stored")
    for path, leaf in steps.action.items():
        if leaf.dtype.kind != "f":
            continue
        sample = leaf[:: max(len(leaf) // 1000, 1)]
        kinds = np.unique(sample)
        if 1 < len(kinds) <= len(sample) / 10 and np.array_equal(kinds, np.round(kinds)) and kinds.min() >= 0:
            where = dotted(("action", *path))
            yield from steps.finding("actions-as-floats", "possible", f"'{where}' holds whole numbers as {leaf.dtype}",
                                     "store discrete actions as integers", field=where)  # fmt: skip
    return len(steps)


@rule("flag-not-binary")
def odd_flags(steps: Experience) -> Look:
    """Flags that are neither 0 nor 1, such as sums of the flags of a window."""
    if steps.odd_flags is not None:
        yield from steps.finding(
            "flag-not-binary", "certain", "flags of ends are neither 0 nor 1: 1 - done is then no mask",
            "store whether any step of a window ended, not how many did", steps.odd_flags)  # fmt: skip
    return len(steps)


@rule("outside-space")
def outside_space(steps: Experience, spaces: dict[str, object]) -> Look:
    """Observations and actions outside the Gymnasium spaces that are given.

    Raises:
        ParameterError: ``spaces`` has an entry for something else, or lacks the space of a leaf.
    """
    other = sorted(str(name) for name in spaces if name not in ("obs", "action"))
    if other:
        raise ParameterError(f"spaces: expected the spaces of 'obs' and 'action', got one for {', '.join(other)}")
    skip_if(not spaces, "pass spaces, the spaces of 'obs' and 'action'", absent=True)
    skip_if("action" in spaces and not steps.action, "spaces has one for 'action', but no actions are stored")
    for name, group in (("obs", steps.obs), ("action", steps.action), ("next_obs", steps.next_obs or {})):
        space = spaces.get("obs" if name == "next_obs" else name)
        if space is None:
            continue
        for path, leaf in group.items():
            where, inner = dotted((name, *path)), member(space, path)
            if inner is None:
                raise ParameterError(f"spaces: no space for the stored leaf '{dotted(path)}' in {shown(space, 200)}")
            bad = _outside(inner, leaf, where)
            if name == "next_obs":
                bad &= ~steps.still
            yield from steps.finding("outside-space", "certain", f"'{where}' lies outside {inner}",
                "check scaling, clipping and the order of wrappers; store what the env was given",
                bad, field=where)  # fmt: skip
    return len(steps)


def _outside(space: Any, leaf: Array, where: str) -> Array:
    """True where a row lies outside a Box, Discrete, MultiDiscrete or MultiBinary space, bool ``[S]``.

    Raises:
        ParameterError: this is no space, or one of another size than the field ``where``.
    """
    if not callable(getattr(space, "contains", None)) or isinstance(space, type):
        raise ParameterError(f"spaces: expected a Gymnasium space for '{where}', got {shown(space, 200)}")
    flat, kind = leaf.reshape(len(leaf), -1), type(space).__name__
    low: Any
    high: Any
    if kind == "Box":
        low, high = space.low.reshape(-1), space.high.reshape(-1)
    elif kind == "Discrete":
        low, high = space.start, space.start + space.n - 1
    elif kind == "MultiDiscrete":
        low, high = space.start.reshape(-1), (space.start + space.nvec - 1).reshape(-1)
    elif kind == "MultiBinary":
        low, high = 0, 1
    else:
        return np.zeros(len(leaf), np.bool_)
    if np.size(low) not in (1, flat.shape[1]):
        raise ParameterError(f"spaces: '{where}' has {flat.shape[1]} numbers a step, the space has {np.size(low)}")
    whole = kind != "Box" and flat.dtype.kind == "f"
    with np.errstate(invalid="ignore"):
        bad = (flat < low) | (flat > high)  # another rule reports NaN
        return (bad | (flat != np.round(flat)) if whole else bad).any(1)


@rule("priority-not-finite", "priority-of-dead-row", "priority-zero")
def priorities(steps: Experience) -> Look:
    """Priorities that are not finite, that belong to rows without a transition, or that are 0."""
    weight, drawable = steps.priorities, steps.drawable
    if weight is None or not len(weight):
        raise Lack("it has no priorities", absent=True)
    bad = ~np.isfinite(weight) | (weight < 0)
    yield from finding("priority-not-finite", "certain", "priorities are NaN, infinite or negative",
                       "refuse TD errors that are not finite before they reach the sampler",
                       bad, len(weight))  # fmt: skip
    if drawable is not None:
        yield from finding("priority-of-dead-row", "certain",
                           "rows that hold no transition have a priority, and are drawn",
                           "set the priorities of rows that were cleared, or not yet written, to 0",
                           ~drawable & (weight > 0) & ~bad, len(weight))  # fmt: skip
        yield from finding("priority-zero", "likely", "stored transitions have priority 0, and are never drawn",
                           "add a small eps to every TD error",
                           drawable & (weight == 0), int(drawable.sum()))  # fmt: skip
    return len(weight)


# -- fields that fit another row ---------------------------------------------------------------------------------------

LAGS = (0, -1, 1)
"""A field may fit its own row, the row before it, or the row after it."""

CLEARLY = 0.5
"""Another row fits clearly better if it leaves less than this share of the squared error of a row's own."""

FAR_BEYOND_NOISE = 6.0
"""The mean difference of the errors also has to be this many times its standard error."""

SOMETHING = 0.9
"""Something was learned if it leaves at most this share of the variance."""

HUGE = 1e30
"""Larger numbers overflow when they are multiplied."""


@rule("reward-one-step-off")
def reward_one_step_off(steps: Experience) -> Look:
    """Rewards that follow from the step before or after, and not from the step in their own row."""
    rows = _within(steps)
    _require_learnable(steps, rows)
    skip_if(steps.window > 1, "rows are n-step transitions, whose rewards are sums")
    reward = steps.reward.astype(np.float64)
    if not np.isfinite(reward[rows]).all() or np.abs(reward).max() > HUGE:
        raise Lack("rewards are not finite, or too large to compute with")
    skip_if(np.ptp(reward[rows]) == 0, "rewards are the same in all steps within episodes")
    return (yield from _one_step_off(
        "reward-one-step-off", steps, rows, _whole_row(steps, rows), reward,
        "rewards do not follow from observations and actions, of this row or of a neighbour",
        "the reward of a step is stored in the row {word} it: there it follows from observation and action but for "
        "{there:.1%} of its variance, in its own row but for {own:.1%}",
        "store the reward that step() returned in the row of the observation and action given to it"))  # fmt: skip


@rule("value-one-step-off")
def value_one_step_off(steps: Experience, head: Head) -> Look:
    """Values that follow from the observation of the row before or after, and not from that of their own row."""
    value, rows = head.value, _within(steps)
    if value is None:
        raise Lack("it keeps no values", absent=True)
    _require_learnable(steps, rows)
    skip_if(not np.isfinite(value).all() or np.ptp(value[rows]) == 0, "values are not finite, or the same in all steps")
    return (yield from _one_step_off(
        "value-one-step-off", steps, rows, np.asarray(steps.numbers[rows], np.float64), value,
        "values do not follow from observations, of this row or of a neighbour",
        "the value of an observation is stored in the row {word} it: from the observation there it follows but for "
        "{there:.1%} of its variance, from its own row's but for {own:.1%}",
        "store V(obs) in the row of that observation"))  # fmt: skip


def _one_step_off(
    name: str, steps: Experience, rows: Ints, inputs: Array, target: Array, unrelated: str, text: str, advice: str
) -> Look:
    """A field that follows from the row before or after, and not from its own row.

    Args:
        name: of the finding.
        steps: all steps.
        rows: the rows that are fitted.
        inputs: float64 ``[R, K]``: the numbers of these rows from which the field may follow.
        target: float64 ``[S]``: the field, in all rows.
        unrelated: the answer if it follows from none of them.
        text: of the finding; ``word``, ``there`` and ``own`` are filled in.
        advice: how to mend it.
    """
    own, before, after = _fitting_rows(inputs[:FIRST], target, rows[:FIRST]).mean(1)
    if own < SOMETHING * min(1.0, before, after):  # a part of the rows is quick to fit
        return len(rows)
    errors = _fitting_rows(inputs, target, rows)
    left = errors.mean(1)
    skip_if(left.min() > SOMETHING, unrelated)
    best = int(left.argmin())
    if best and _clearly_less(errors[best], errors[0]):
        word = "after" if LAGS[best] > 0 else "before"
        yield from steps.finding(name, "likely", text.format(word=word, there=left[best], own=left[0]), advice)
    return len(rows)


SHOWN = 0.7
"""An action shows in a number if it leaves less than this share of the error that observations alone leave."""

OF_ITS_OWN = 0.1
"""The share of an action's variance that must not follow from the observation it was chosen on."""


@rule("action-one-step-off")
def action_one_step_off(steps: Experience) -> Look:
    """Actions that move the observation of the row before or after, and not that of their own row.

    The action of the following row may depend on the observation that this row led to. So its part that follows from
    that observation is taken away first.
    """
    rows = _within(steps)
    _require_learnable(steps, rows)
    acts = _acts(steps)
    if acts is None:
        raise Lack("it keeps no actions that can be computed with")
    skip_if(steps.window > 1, "rows are n-step transitions, of which the action is one of several")
    skip_if(not (acts[rows] != acts[rows[0]]).any(), "actions are the same in all steps within episodes")
    before = np.asarray(steps.numbers[rows], np.float64)
    moved = np.asarray(steps.next_numbers[rows], np.float64) - before
    moved = moved[:, moved.std(0) > 1e-9 * np.abs(before).max(initial=1e-30)]
    skip_if(not moved.shape[1], "observations do not change within episodes")
    first = _moving(steps, acts, rows[:FIRST], moved[:FIRST], (0,))
    if (first[0].mean(0) < SHOWN * first[None].mean(0))[first[None].mean(0) > 1e-4].any():
        return len(rows)  # its own action moves the observation
    all_errors = _moving(steps, acts, rows, moved, LAGS)
    of_obs_alone, errors = all_errors.pop(None), all_errors
    left = {lag: error.mean(0) for lag, error in errors.items()}
    # the numbers that an action moves, each as a share of what observations alone leave
    shown = (np.minimum.reduce(list(left.values())) < SHOWN * of_obs_alone.mean(0)) & (of_obs_alone.mean(0) > 1e-4)
    skip_if(not shown.any(), "actions do not show in how observations change")
    per_row = {lag: (error / of_obs_alone.mean(0))[:, shown].mean(1) for lag, error in errors.items()}
    best = min((-1, 1), key=lambda lag: float(per_row[lag].mean()))
    own, other = float(per_row[0].mean()), float(per_row[best].mean())
    if own < 1 - 0.2 * (1 - other) or not _clearly_less(per_row[best], per_row[0]):
        return len(rows)  # its own action moves the observation, too
    word, unless = (("after", "the policy reacts to changes that it does not cause") if best > 0 else
                    ("before", "the env acts one step late"))  # fmt: skip
    # an action cannot move what was seen before it; but an env may well be moved by the action before
    yield from steps.finding("action-one-step-off", "possible" if best < 0 or _pays(steps, acts, rows) else "likely",
        f"the action of a step is stored in the row {word} it: with the one there, the next observation follows but "
        f"for {other:.1%} of what observations alone leave open, with the row's own but for {own:.1%}; or {unless}",
        "store the action that was given to step() with the observation it was chosen on")  # fmt: skip
    return len(rows)


def _pays(steps: Experience, acts: Array, rows: Ints) -> bool:
    """True if the reward of a row follows from its own action, and hardly without it, however the row moved."""
    reward = steps.reward[rows].astype(np.float64)[:, None]
    if not np.isfinite(reward).all() or np.abs(reward).max() > HUGE or np.ptp(reward) == 0:
        return False
    raw = np.concatenate([steps.numbers[rows], steps.next_numbers[rows]], 1).astype(np.float64)
    acted = np.concatenate([raw, acts[rows]], 1)
    with_, without = (float(_errors(kernel_of(numbers), reward).mean()) for numbers in (acted, raw))
    return with_ < CLEARLY * without


def _moving(steps: Experience, acts: Array, rows: Ints, moved: Array, lags: tuple[int, ...]) -> dict[int | None, Array]:
    """The errors ``[K, M]`` of learning how observations move, from them and the action ``lag`` rows after these; and
    from them alone, by None.
    """
    state = kernel_of(np.asarray(steps.numbers[rows], np.float64))
    errors: dict[int | None, Array] = {None: _errors(state, moved)}
    return errors | {lag: _errors(state + (1 + state) * _alike_actions(steps, acts, rows, lag), moved) for lag in lags}


def _alike_actions(steps: Experience, acts: Array, rows: Ints, lag: int) -> Array:
    """How alike the actions ``lag`` rows after these are, ``[K, K]``: products of them and of their squares."""
    plain = scaled(acts[rows + lag])
    kinds = plain if plain.shape[1] > 8 else np.concatenate([plain, plain**2], 1)
    kinds = kinds[:, kinds.std(0) > 1e-9]
    if lag > 0:
        after = kernel_of(np.asarray(steps.next_numbers[rows], np.float64))
        own = kinds - _predicted(after, kinds, (RIDGES[1],))[0]
        kinds = own[:, own.var(0) > OF_ITS_OWN * kinds.var(0)]  # the rest is an error of the prediction
    return kinds @ kinds.T / max(plain.shape[1], 1)


STARTS = 5
"""How many first steps of episodes must be stored before sums over episodes can be told."""


@rule("reward-is-a-sum")
def running_sums(steps: Experience) -> Look:
    """Rewards that are the sum of all rewards since the episode began.

    Differences of neighbours are then rewards: they are the same everywhere or follow from observation and action, the
    stored rewards do not, and those of first steps are like the differences.
    """
    steps.require_order()
    reward = steps.reward.astype(np.float64)
    if not np.isfinite(reward).all() or np.abs(reward).max(initial=0) > HUGE:
        raise Lack("rewards are not finite, or too large to compute with")
    first = steps.starts.copy()
    if steps.step is not None:
        first |= steps.step == 0
    starts, later = np.flatnonzero(first), np.flatnonzero(steps.inner[:-1]) + 1
    skip_if(len(starts) < STARTS, f"fewer than {STARTS} first steps of episodes are stored")
    later = np.random.default_rng(0).permutation(later)[:SAMPLE]
    skip_if(len(later) < LEAST // 2, f"fewer than {LEAST // 2} steps lie within episodes")
    gained = reward[later] - reward[later - 1]
    spread = float(reward[later].var())
    if spread == 0:
        return len(later)
    if np.ptp(gained) <= 1e-4 * np.abs(gained).max():
        same = np.abs(reward[starts] - gained[0]) <= 1e-4 * abs(gained[0])
        is_sum = bool(same.mean() > 0.9 and len(np.unique(reward[later])) >= STARTS)
        is_sum = is_sum and not _follow(steps, later, reward[later])
    elif np.median(np.abs(reward[starts])) > 3 * np.abs(gained).mean():
        is_sum = False  # first rewards are no gains
    else:
        _require_learnable(steps, later)
        raw, targets = _whole_row(steps, np.concatenate([later, starts])), np.stack([gained, reward[later]], 1)
        if len(later) > FIRST:  # a part of the rows is quick to fit
            of_gain, of_reward = _squared_errors(kernel_of(raw[:FIRST]), targets[:FIRST])
            if of_gain > of_reward:
                return len(later)  # of a sum, it is the gains that follow from the step
        plain = scaled(raw)
        here, there = plain[: len(later)], plain[len(later) :]
        kernel = alike(here, here)
        of_gain, of_reward = _squared_errors(kernel, targets)
        expected = gained.mean() + alike(there, here) @ _learned(kernel, gained - gained.mean(), RIDGES[1])
        at_starts = np.median(np.abs(expected - reward[starts]))
        is_sum = bool(of_gain < 0.5 * max(gained.var(), gained.mean() ** 2) and of_gain < 0.1 * of_reward
                    and at_starts < 3 * np.sqrt(of_gain) + 0.05 * np.abs(gained).mean()
                    and at_starts < 0.3 * np.abs(reward[later]).mean())  # fmt: skip
    if is_sum:
        yield from steps.finding("reward-is-a-sum", "likely",
            "rewards are sums since the episode began: what they gain from step to step follows from the step, and "
            "first steps have just that", "store the reward of each step, and not the return so far")  # fmt: skip
    return len(later)


def _squared_errors(kernel: Array, targets: Array) -> list[float]:
    """The mean squared error of predicting each column of targets ``[K, M]`` from what other rows taught."""
    return (_errors(kernel, targets).mean(0) * targets.var(0)).tolist()


def _follow(steps: Experience, rows: Ints, column: Array) -> bool:
    """True if a column ``[K]`` follows from the rows, nearly in full."""
    try:
        _require_learnable(steps, rows)
    except Lack:
        return False
    return float(_errors(kernel_of(_whole_row(steps, rows)), column[:, None]).mean()) < 0.01


FORESEEN = 0.5
"""Jumps follow from what leads to them if less than this share of their variance is left."""

FEW, MOST_RESETS = 3, 0.15
"""How many resets there must be, and the largest share of rows that may be some."""


@rule("reset-not-flagged")
def resets(steps: Experience) -> Look:
    """Resets that nobody flagged, in data without next observations.

    The following observation is learned from observation and action. Where it is far from what they lead to in most of
    its numbers, and what comes instead is much the same each time, or comes after the same number of steps each time, a
    new episode began.
    """
    skip_if(steps.next_obs is not None, "next observations are stored, and show where rows do not go on", absent=True)
    rows = np.flatnonzero(steps.inner)
    _require_learnable(steps, rows)
    if steps.numbers.dtype.kind != "f" or are_whole(steps.numbers):
        raise Lack("observations are whole numbers, which may well jump")
    rows = rows[: 10 * SAMPLE]
    acts = _acts(steps)
    raw = np.asarray(steps.numbers[rows], np.float64)
    raw = raw if acts is None else np.concatenate([raw, acts[rows]], 1)
    moved = np.asarray(steps.numbers[rows + 1], np.float64) - steps.numbers[rows]
    varies = moved.std(0) > 1e-6 * np.abs(steps.numbers[rows]).max(0)
    skip_if(not varies.any(), "observations do not change within episodes")
    far = _far_off(scaled(raw), moved[:, varies])
    # what lies beside a flagged end is the business of other rules
    flagged = np.flatnonzero(steps.ended)
    beside_an_end = np.isin(rows, np.concatenate([flagged - 1, flagged, flagged + 1]))
    broken = rows[far & ~beside_an_end]
    few = len(broken) < FEW or len(broken) > MOST_RESETS * len(rows)
    if few or not (_land_together(steps, broken, varies) or _at_one_length(broken)):
        return len(rows)
    if offset_of_ends(steps) or stored_ignored_steps(steps):
        raise Lack("ends are flagged one row off, or ignored steps are stored")
    jumps = np.isin(rows, broken)
    sample = np.concatenate([np.flatnonzero(jumps), np.flatnonzero(~jumps)[: SAMPLE // 2]])
    # a state may rightly lead to a jump: a clock, or a task that goes on elsewhere once its goal is reached
    follows = _errors(kernel_of(raw[sample]), jumps[sample, None].astype(np.float64)).mean() < FORESEEN
    yield from steps.finding("reset-not-flagged", "possible" if follows else "likely",
        "observations jump where nothing leads them, each time to the same region or after the same number of steps: a "
        "new episode began there, and no end is flagged"
        + ("; or the env itself jumps from such states" if follows else ""),
        "store terminated and truncated as step() returned them", broken, len(rows))  # fmt: skip
    return len(rows)


def _far_off(plain: Array, moved: Array) -> Bools:
    """True where a row moved far otherwise than others lead to expect, in most of its numbers, bool ``[K]``."""
    # what moves far is not learned from: an end by a state, such as a fall, would be learned as a step
    calm = np.flatnonzero((np.abs(moved) > 5 * np.median(np.abs(moved), 0) + 1e-9).mean(1) < 0.5)
    if len(calm) < LEAST // 2:
        return np.zeros(len(moved), np.bool_)
    sample = np.random.default_rng(0).permutation(calm)[:SAMPLE]
    mean = moved[sample].mean(0)
    taught = plain[sample]
    weights = _learned(alike(taught, taught), moved[sample] - mean, RIDGES[1])
    missed = np.concatenate([
        np.abs(alike(plain[i : i + SAMPLE], taught) @ weights + mean - moved[i : i + SAMPLE])
        for i in range(0, len(plain), SAMPLE)
    ])  # fmt: skip
    usual = np.quantile(missed[calm], 0.95, axis=0) + 0.05 * np.abs(moved[calm]).mean(0)
    return (missed > 4 * usual).mean(1) >= 0.6


def _land_together(steps: Experience, broken: Ints, varies: Bools) -> bool:
    """True if the rows after these lie much nearer to each other than all rows do, in half of their numbers or more.

    The middle half of them is compared, since some of these rows may have moved far for another reason.
    """
    numbers = np.asarray(steps.numbers, np.float64)[:, varies]
    landed, usual = (np.subtract(*np.quantile(rows, (0.75, 0.25), axis=0)) for rows in (numbers[broken + 1], numbers))
    return bool((landed < 0.45 * usual).mean() >= 0.5)


def _at_one_length(broken: Ints) -> bool:
    """True if these rows come at one distance from each other, or at multiples of it, where some were not noticed."""
    gaps = np.diff(broken)
    return len(gaps) >= FEW and gaps.min() > 10 and bool((gaps % gaps.min() == 0).mean() > 0.9)


def expected_rewards(steps: Experience, reward: Array, calm: Ints, rows: Ints) -> Array:
    """The rewards that rows ``calm`` lead to expect in ``rows``, ``[K]``.

    Raises:
        Lack: they predict too badly.
    """
    unrelated = "rewards do not follow from observations and actions"
    if np.ptp(reward[calm]) == 0:
        return np.full(len(rows), reward[calm[0]])
    skip_if(not steps.numbers.shape[1], unrelated)
    known = np.random.default_rng(0).permutation(calm)[:SAMPLE]
    raw = _whole_row(steps, known)
    skip_if(not np.isfinite(raw).all() or np.abs(raw).max() > HUGE or np.abs(reward).max() > HUGE, unrelated)
    for size in sorted({min(FIRST, len(known)), len(known)}):  # a part of the rows often suffices
        target, kernel = reward[known[:size]], kernel_of(raw[:size])
        if _errors(kernel, target[:, None]).mean() <= 0.05:
            weights = _learned(kernel, target - target.mean(), RIDGES[0])
            others = scaled(raw[:size], _whole_row(steps, rows))
            return target.mean() + alike(others, scaled(raw[:size])) @ weights
    raise Lack(unrelated)


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
    acts = np.concatenate(parts, 1) if parts else np.empty((len(steps), 0))
    return acts if acts.shape[1] and np.isfinite(acts).all() else None


def _require_learnable(steps: Experience, rows: Ints) -> None:
    """Require that something can be learned from these rows.

    Raises:
        Lack: nothing can.
    """
    steps.require_order()
    skip_if(len(rows) < LEAST, f"fewer than {LEAST} steps lie within episodes")
    skip_if(not steps.numbers.shape[1], "observations are images, of which nothing is learned")
    if not (np.isfinite(steps.numbers[rows]).all() and np.isfinite(steps.next_numbers[rows]).all()):
        raise Lack("observations hold numbers that are not finite")
    if float(np.abs(steps.numbers[rows]).max()) > HUGE:  # of Python: float16 cannot hold HUGE itself
        raise Lack("observations are too large to compute with")


def _whole_row(steps: Experience, rows: Ints) -> Array:
    """Observation, action and next observation of rows side by side, float64 ``[K, D]``."""
    acts = _acts(steps)
    parts = [steps.numbers[rows], steps.next_numbers[rows], *([] if acts is None else [acts[rows]])]
    return np.concatenate([np.asarray(part, np.float64) for part in parts], 1)


def _fitting_rows(raw: Array, column: Array, rows: Ints) -> Array:
    """The errors ``[3, K]`` of learning a column ``[S]``, of the row :data:`LAGS` rows after each, from its numbers."""
    return np.ascontiguousarray(_errors(kernel_of(raw), np.stack([column[rows + lag] for lag in LAGS], 1)).T)


def _clearly_less(one: Array, other: Array) -> bool:
    """True if errors ``[K]`` are clearly smaller than others of the same rows."""
    less = other - one
    return bool(
        one.mean() < CLEARLY * other.mean() and less.mean() > FAR_BEYOND_NOISE * less.std() / np.sqrt(len(less))
    )


# -- what is learned from other rows -----------------------------------------------------------------------------------

LEAST, FIRST, SAMPLE = 200, 450, 1200
"""The fewest rows that something is learned from; those that suffice where a field clearly fits its own row; and the
most, which are looked at if it does not."""

FOLDS = 3
"""A row is predicted from what was learned from the rows of the other folds."""

WIDTH = 0.6
"""How far numbers may lie apart and still be alike, in standard deviations."""

RIDGES = (1e-4, 1e-2, 1.0)
"""Strengths of the penalty. The one that predicts best is used."""


def scaled(raw: Array, others: Array | None = None) -> Array:
    """Rows ``[K, D]``, or others, standardized by these: ``[K, D']``, without the numbers that do not vary in them."""
    spread = raw.std(0)
    varies = spread > 1e-9 * np.abs(raw).max(0, initial=0)
    return np.clip(((raw if others is None else others) - raw.mean(0))[:, varies] / spread[varies], -8, 8)


def kernel_of(raw: Array) -> Array:
    """The likeness of rows ``[K, D]`` with each other, ``[K, K]``, on their own scale."""
    plain = scaled(raw)
    return alike(plain, plain)


def alike(rows: Array, others: Array) -> Array:
    """The likeness of rows ``[K, D]`` and others ``[L, D]``, ``[K, L]``: the kernel that is learned with.

    1 + xy + the mean of k + the mean of kk' over pairs of numbers, where k is a Gaussian of one number. So functions of
    single numbers and of pairs are learned quickly, whatever their form, even beside many numbers that do not matter.
    """
    size, is_same = max(rows.shape[1], 1), rows is others
    left, right = ((x / WIDTH).T.astype(np.float32) for x in (rows, others))
    likeness = np.empty((len(rows), len(others)))
    for i in range(0, len(rows), TILE):
        for j in range(i if is_same else 0, len(others), TILE):  # of rows with themselves, one half is enough
            tile = _alike_by_numbers(left[:, i : i + TILE], right[:, j : j + TILE], size)
            likeness[i : i + TILE, j : j + TILE] = tile
            if is_same:
                likeness[j : j + TILE, i : i + TILE] = tile.T
    return 1 + rows @ others.T / size + likeness


TILE = 128
"""Rows and others that are compared at a time: few enough for the caches of a core."""


def _alike_by_numbers(left: Array, right: Array, size: int) -> Array:
    """The means of k and of kk' for columns ``[D, K]`` and others ``[D, L]``, float32 ``[K, L]``; ``size`` is D."""
    ones, squares, one = (np.zeros((left.shape[1], right.shape[1]), np.float32) for _ in range(3))
    for x, y in zip(left, right, strict=True):
        np.subtract(x[:, None], y[None], out=one)
        one *= one
        one *= -0.5
        np.exp(one, out=one)
        ones += one
        one *= one
        squares += one
    return ones / size + (ones**2 - squares) / max(size * (size - 1), 1)


def _learned(kernel: Array, targets: Array, penalty: float) -> Array:
    """The weights ``[K, ...]`` of rows by their kernel ``[K, K]``. ``alike(others, rows) @ weights`` predicts."""
    ridged = kernel.copy()
    ridged[np.diag_indices_from(ridged)] += penalty
    linalg: Any = torch.linalg  # which leaves its types open
    factor, failed = linalg.cholesky_ex(torch.from_numpy(ridged))
    if failed:  # rounding left it a little below 0 somewhere
        return np.linalg.solve(ridged, targets)
    columns = torch.from_numpy(targets.reshape(len(targets), -1))
    return torch.cholesky_solve(columns, factor).numpy().reshape(targets.shape)


def _predicted(kernel: Array, targets: Array, penalties: tuple[float, ...]) -> Array:
    """Targets ``[K, M]`` as the rows of other folds predict them, with each of the penalties, ``[P, K, M]``."""
    fold, mean = np.arange(len(targets)) % FOLDS, targets.mean(0)
    predicted = np.empty((len(penalties), *targets.shape))
    for k in range(FOLDS):
        test, known = np.flatnonzero(fold == k), np.flatnonzero(fold != k)
        taught, across = kernel[np.ix_(known, known)], kernel[np.ix_(test, known)]
        for p, penalty in enumerate(penalties):
            predicted[p, test] = mean + across @ _learned(taught, targets[known] - mean, penalty)
    return predicted


def _errors(kernel: Array, targets: Array) -> Array:
    """The squared errors ``[K, M]`` of predicting targets ``[K, M]`` from what other rows taught, over the variance."""
    best = np.full(targets.shape, np.inf)
    for predicted in _predicted(kernel, targets, RIDGES):
        # one wild prediction says nothing of a fit: no error counts for more than a hundred spreads
        errors = np.minimum((predicted - targets) ** 2 / np.maximum(targets.var(0), 1e-30), 100.0)
        better = errors.mean(0) < best.mean(0)
        best[:, better] = errors[:, better]
    return best


# -- what functions of the user say ------------------------------------------------------------------------------------

FEW_TARGETS = 3
"""How many steps must look wrong before there is a finding."""

MANY_ROWS = 20_000
"""The most rows that a function of the user is asked about."""

PIECE = 4096
"""Rows per call of such a function."""

AGREES = 1e-3
"""How far numbers may differ from those of the function, as a share of their size, since columns are float32."""


@rule("value-of-another-observation", "value-one-step-off")
def values_of_critic(steps: Experience, head: Head, critic: Function | None) -> Look:
    """Values that are not those of the critic."""
    value = head.value
    if critic is None:
        raise Lack("pass critic, a function from observations to values, to compare values with", absent=value is None)
    if value is None:
        raise Lack("critic was given, but the source has no 'value'")
    rows = _sampled_rows(steps)
    answers = answers_of("critic", critic, rows, steps.obs, place=head.place)
    yield from _compared(steps, "value", "value-of-another-observation", value, answers, rows,
                         "the critic's value of the observation",
                         "store V(obs) with the observation that it was computed from")  # fmt: skip
    return len(rows)


@rule("log-prob-of-another-action", "log-prob-one-step-off")
def log_probs(steps: Experience, policy: Function | None) -> Look:
    """Log-probabilities that are not those of the stored actions."""
    stored = numbers_of(steps, "log_prob")
    if policy is None:
        raise Lack("pass policy, a function of observations and actions, to compare log-probabilities with",
                    absent=stored is None)  # fmt: skip
    if stored is None or not steps.action:
        raise Lack("policy was given, but the source has no 'log_prob' with its 'action'")
    rows = _sampled_rows(steps)
    answers = answers_of("policy", policy, rows, steps.obs, steps.action)
    yield from _compared(steps, "log_prob", "log-prob-of-another-action", stored, answers, rows,
                         "the policy's log-probability of the stored action",
                         "store the action that was sampled, before clipping, with its log-probability")  # fmt: skip
    return len(rows)


def _compared(
    steps: Experience, name: str, of_another: str, stored: Array, answers: Array, rows: Ints, meant: str, mend: str
) -> Iterator[Finding]:
    """Numbers ``[S]`` beside those that a function gave for some rows, ``[K]``."""
    tolerance = AGREES * (np.abs(answers) + float(np.nanstd(answers)) + 1e-6)
    with np.errstate(invalid="ignore"):
        wrong = ~((np.abs(stored[rows] - answers) <= tolerance) | (stored[rows] == answers))
    if wrong.sum() <= len(rows) / 1000:  # rounding, and a number or two at the edge of what it can do
        return
    beside = np.flatnonzero((rows[1:] == rows[:-1] + 1) & steps.inner[rows[:-1]])  # that follow each other
    for mine, other, word in ((beside, beside + 1, "before"), (beside + 1, beside, "after")):
        with np.errstate(invalid="ignore"):
            fits = np.abs(stored[rows[mine]] - answers[other]) <= tolerance[other]
        if len(mine) >= 20 and wrong[mine].mean() > 0.5 and fits.mean() > MOST:
            yield from steps.finding(f"{name.replace('_', '-')}-one-step-off", "certain",
                f"'{name}' stands one row {word} its own: it is {meant} there", mend,
                rows[wrong], len(rows))  # fmt: skip
            return
    finite = np.isfinite(stored[rows]) & np.isfinite(answers)
    pair = stored[rows][finite], answers[finite]
    alike = len(pair[0]) > 2 and min(x.std() for x in pair) > 0 and np.corrcoef(*pair)[0, 1] > 0.95
    drifted = alike and wrong.mean() > MOST  # all are a little off, as after an update
    what = f"'{name}' is not {meant}" + ("; it is near, as if the function had been updated since" if drifted else "")
    yield from steps.finding(of_another, "possible" if drifted else "likely", what, mend, rows[wrong], len(rows))


@rule("reward-of-the-old-goal")
def goal_rewards(steps: Experience, reward_fn: Function | None) -> Look:
    """Rewards that are not those of the stored goal, as where a goal was exchanged and the reward was not."""
    achieved, desired = _goals(steps, "reward_fn", reward_fn)
    skip_if(steps.window > 1, "rows are n-step transitions, whose rewards are sums")
    if reward_fn is None:
        return (yield from _reached_goals(steps, achieved, desired))
    rows = _sampled_rows(steps)
    right = answers_of("reward_fn", reward_fn, rows, {(): achieved}, {(): desired}, arrays=True)
    wrong = ~np.isclose(steps.reward[rows].astype(np.float64), right, rtol=1e-4, atol=1e-5)
    yield from _old_goal(steps, rows[wrong], len(rows), "certain")
    return len(rows)


@rule("terminal-of-the-old-goal")
def goal_terminals(steps: Experience, terminated_fn: Function | None) -> Look:
    """Steps that reach their goal and are not flagged, though ``terminated_fn`` says that they end there."""
    if terminated_fn is None:
        raise Lack("pass terminated_fn, a function of achieved and desired goals", absent=True)
    goals = _goals(steps, "terminated_fn", terminated_fn)
    skip_if(steps.window > 1, "rows are n-step transitions, whose flags are those of their last steps")
    rows = _sampled_rows(steps)
    wrong = answers_of("terminated_fn", terminated_fn, rows, *({(): x} for x in goals), arrays=True).astype(np.bool_)
    wrong &= ~steps.terminated[rows]  # an episode may also end for another reason
    yield from steps.finding(
        "terminal-of-the-old-goal", "certain", "steps that reach their goal are not flagged as terminated",
        "compute terminated again from the achieved and the new goal", rows[wrong], len(rows))  # fmt: skip
    return len(rows)


def _goals(steps: Experience, name: str, function: Function | None) -> tuple[Array, Array]:
    """The goal that each step achieved, and the one it was to achieve, ``[S, ...]``.

    Raises:
        Lack: there are no goals, which the ``function`` called ``name`` would look at.
    """
    after = (steps.next_obs or {}).get(("achieved_goal",))
    desired = steps.obs.get(("desired_goal",))
    if after is None or desired is None or after.shape != desired.shape:
        skip_if(function is None, "it has no goals", absent=True)
        raise Lack(f"{name} was given, but the source has no observations with 'achieved_goal' and 'desired_goal', "
                   "with next observations")  # fmt: skip
    return after, desired


def _old_goal(steps: Experience, rows: Array, looked: int, sure: Sureness) -> Iterator[Finding]:
    return steps.finding("reward-of-the-old-goal", sure,
        "rewards are not those of the stored goals: goals were exchanged, and the rewards are those of others",
        "compute the reward again from the achieved and the new goal", rows, looked)  # fmt: skip


def _reached_goals(steps: Experience, achieved: Array, desired: Array) -> Look:
    """Rewards of steps that reached their goal to the bit, beside those of all other steps.

    A step that reached its goal must not earn less than others usually do, nor earn now this and now that.
    """
    met = same_rows(achieved, desired.astype(achieved.dtype))
    reward = steps.reward.astype(np.float64)
    if met.sum() < 2 * FEW_TARGETS or (~met).sum() < 2 * FEW_TARGETS:
        raise Lack("too few steps reach their goal exactly; pass reward_fn, a function of achieved and desired goals")
    skip_if(not np.isfinite(reward).all(), "rewards are not finite")
    mine, others = reward[met], reward[~met]
    spread = float(others.std())
    no_better = bool(mine.mean() <= np.median(others) + 0.1 * spread and mine.mean() <= others.mean() + 0.1 * spread)
    wild = bool(mine.std() > 0.5 * max(spread, 1e-30) and mine.std() > 0)
    if no_better or wild:
        yield from _old_goal(steps, met & (reward <= np.median(others) + 0.5 * spread), int(met.sum()), "likely")
    return len(steps)


def _sampled_rows(steps: Experience) -> Ints:
    """At most :data:`MANY_ROWS` rows, in runs that lie together."""
    if len(steps) <= MANY_ROWS:
        return np.arange(len(steps))
    begins = np.linspace(0, len(steps) - 500, MANY_ROWS // 500).astype(np.int64)
    return np.unique(begins[:, None] + np.arange(500))


def answers_of(
    name: str,
    function: Function,
    rows: Ints,
    *inputs: Leaves,
    arrays: bool = False,
    place: tuple[int, int] = (0, 1),
) -> Array:
    """The answers of a user's function for rows, float64 ``[K]``.

    It gets tensors, or arrays if it cannot take these; with ``arrays`` the other way round. ``place`` says which number
    of each answer is meant, and how many there are.

    Raises:
        ParameterError: it raised an error, or did not give one number for each row.
    """
    answers: list[Array] = []
    for i in range(0, len(rows), PIECE):
        some = rows[i : i + PIECE]
        trees = [tree_of({path: leaf[some] for path, leaf in leaves.items()}) for leaves in inputs]
        try:
            with torch.no_grad():
                answer = _call(function, trees, arrays)
            numbers = as_host(answer, name)
        except Exception as error:
            other = "" if error.__cause__ is None else f"; called in the other way, it raised {error.__cause__!r:.300}"
            raise ParameterError(f"{name}: it failed on {len(some)} stored rows: {error!r:.300}{other}") from error
        k, count = place
        if numbers.size != len(some) * count or numbers.dtype.kind not in "biuf":
            many = "one number" if count == 1 else f"{count} numbers, one of each head,"
            raise ParameterError(
                f"{name}: expected {many} for each of {len(some)} rows, got {numbers.dtype} {numbers.shape}"
            )
        answers.append(numbers.reshape(len(some), count)[:, k].astype(np.float64))
    return np.concatenate(answers)


def _call(function: Function, trees: list[ArrayTree], arrays: bool) -> object:
    first, second = (trees, map(_tensors, trees)) if arrays else (map(_tensors, trees), trees)
    try:
        return function(*first)
    except (TypeError, AttributeError, ValueError, RuntimeError) as error:
        try:
            return function(*second)
        except (TypeError, AttributeError, ValueError, RuntimeError) as other:
            raise error from other


def _tensors(tree: ArrayTree) -> Any:
    """Arrays in nested dicts, as tensors."""
    return map_leaves(to_tensor, tree)
