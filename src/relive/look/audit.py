"""audit: mistakes in stored experience that would teach the wrong thing.

In order: the rules; the audit; rules on a drawn batch; rules on many draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ..collect.progress import progress_bar
from ..errors import DTypeError, FieldError, ShapeError
from ..parameters import COUNT_RULE, GAMMA_RULE, an_instance, require
from ..parameters import Rule as ParameterRule
from ..printable import printable
from ..steps.arrays import Array, Bools, Ints, as_host, whole_numbers
from ..steps.schema import dotted
from . import continuity, targets, values
from .experience import Experience, episodes_of, leaves_of, same_rows
from .findings import Finding, Lack, Look, Report, Rule, Verdict, finding, rule, skip_if, surest_first
from .heads import heads_of
from .readers import experience_of
from .values import Function, answers_of

RULES: tuple[Rule[Experience], ...] = (
    continuity.continuity, continuity.next_episode_after_end, continuity.ends_one_row_off, values.resets,
    continuity.truncation_without_final, continuity.windows, continuity.stacks, values.action_one_step_off,
    values.reward_one_step_off, values.running_sums, continuity.duplicate_rows, values.not_finite,
    values.constant_fields, values.odd_envs, values.bytes_as_floats, values.actions_as_floats, values.odd_flags,
    values.priorities,
)  # fmt: skip
"""The rules that look at every source, without an argument."""

FUNCTION_RULE: ParameterRule = (lambda function: function is None or callable(function), "expected a function, or None")

MANY = 1_000_000
"""Steps from which an audit may take long enough for a progress bar."""


def audit(
    source: object,
    *,
    batch: Mapping[str, object] | None = None,
    n: int | None = None,
    gamma: float | None = None,
    reward_fn: Callable[..., object] | None = None,
    terminated_fn: Callable[..., object] | None = None,
    policy: Callable[..., object] | None = None,
    critic: Callable[..., object] | None = None,
    draws: object = None,
    spaces: Mapping[str, object] | None = None,
    max_episode_steps: int | None = None,
) -> Report:
    """Look for mistakes in stored experience that would teach the wrong thing. Nothing is changed.

    Args:
        source: a :class:`relive.ReplayBuffer` or :class:`relive.RolloutBuffer`; the path of a save; a live buffer of
            another library, see docs/audit.md; or a dict of arrays, ``[T, ...]`` of one env or ``[T, N, ...]``:
            ``obs``, ``reward``, ``terminated``, and, if you have them, ``action``, ``truncated``, ``next_obs`` or
            ``final_obs``; or arrays under CleanRL's own names.
        batch: a drawn batch to compare with the stored steps: ``index``, which says where its rows lie, ``obs``,
            ``reward``, ``next_obs`` and ``terminated``, of ``n`` steps with ``gamma``.
        n: rewards per window of ``batch``. Default: 1.
        gamma: discount per step of ``batch``, by default 0.99; and the discount that stored advantages should have.
        reward_fn: (achieved, desired) -> the rewards that rows should have by their goals: rows of ``batch`` with
            another goal than was stored, and stored rows.
        terminated_fn: (achieved, desired) -> the flags, bool, that such rows should have.
        policy: (obs, action) -> log π(action | obs), ``[B]``, to compare a stored ``log_prob`` with: the policy that
            played. It gets tensors, or arrays if it cannot take tensors; nested observations come as dicts.
        critic: obs -> V(obs), ``[B]``, or ``[B, K]`` of K heads, to compare a stored ``value`` with, in the same way.
        draws: rows that were drawn, ``[K, B]``, or sequences ``[K, B, T]``, padded with -1. Pass so many that every
            stored row is expected ten times.
        spaces: ``obs`` and ``action`` -> Gymnasium space of one env.
        max_episode_steps: the time limit of the env. Default: the one that ``Schema.from_env`` found, if the source
            keeps it.

    Returns:
        a report of what was found, the surest first, with what each rule looked at. ``bool(report)`` is True if nothing
        was certain or likely. ``report.lacks`` says what was not looked at, and why; also which of the arguments had
        nothing to be compared with.

    Raises:
        FieldError, ShapeError, DTypeError: the source, ``batch`` or ``draws`` cannot be read.
        ParameterError: one of the other arguments is out of range or of a wrong kind.
    """
    if n is not None:
        require("audit", COUNT_RULE, n=n)
    if gamma is not None:
        require("audit", GAMMA_RULE, gamma=gamma)
    functions = {"reward_fn": reward_fn, "terminated_fn": terminated_fn, "policy": policy, "critic": critic}
    require("audit", FUNCTION_RULE, **functions)
    require("audit", an_instance(Mapping, "a mapping from 'obs' and 'action' to spaces"), spaces=spaces)
    if max_episode_steps is not None:
        require("audit", COUNT_RULE, max_episode_steps=max_episode_steps)
    steps = experience_of(source)
    limit = steps.max_episode_steps if max_episode_steps is None else max_episode_steps
    rules: list[tuple[Rule[...], tuple[object, ...]]] = [(rule, ()) for rule in RULES]
    rules += [
        (continuity.time_limit_as_terminal, (limit,)),
        (values.outside_space, (dict(spaces or {}),)),
        (values.goal_rewards, (None if batch is not None else reward_fn,)),
        (values.goal_terminals, (None if batch is not None else terminated_fn,)),
        (values.log_probs, (policy,)),
    ]
    heads = heads_of(steps)
    of_heads: list[tuple[Rule[...], tuple[object, ...]]] = [
        (targets.advantages, (gamma,)), (targets.rewards_with_values, ()), (values.value_one_step_off, ()),
        (values.values_of_critic, (critic,)),
    ]  # fmt: skip
    looks = [(each, options, None) for each, options in rules]
    looks += [(each, (head, *options), head) for each, options in of_heads for head in heads]
    entries: list[Verdict] = []
    with progress_bar(len(looks), None if len(steps) >= MANY else False, "auditing", "rules") as counted:
        for each, options, head in counted(looks):
            entry = each(steps, *options) if len(steps) else each.lacks("there is no step")
            entries.append(entry if head is None else head.named(entry))
    lacks = list(steps.lacks)
    compared = [entry for (each, *_), entry in zip(looks, entries, strict=True) if each is targets.advantages]
    if batch is not None:
        entries += batch_verdicts(steps, batch, n=1 if n is None else n, gamma=0.99 if gamma is None else gamma,
                                  reward_fn=reward_fn, terminated_fn=terminated_fn)  # fmt: skip
    else:
        lacks += ["n was given, but no batch to compare with; pass batch, too"] if n is not None else []
        if gamma is not None and all(check.lack is not None for check, _ in compared):
            lacks.append("gamma was given, but neither a batch nor advantages of values to compare with; pass batch")
    if draws is not None:
        entries += draw_verdicts(steps, draws)
    checks = tuple(check for check, _ in entries)
    lacks += [f"{', '.join(check.rules)}: {check.lack}" for check in checks if check.lack and not check.absent]
    findings = surest_first([finding for _, some in entries for finding in some])
    source, lacks = printable(steps.source), map(printable, lacks)
    return Report(source, len(steps), int(steps.ended.sum()), findings, tuple(lacks), checks)


# -- a drawn batch -----------------------------------------------------------------------------------------------------

COMPARED = "obs", "reward", "next_obs", "terminated"
"""The fields of a batch that are compared with the stored steps."""

ACHIEVED, DESIRED = ("achieved_goal",), ("desired_goal",)
"""Members of goal observations, by Gymnasium-Robotics' names."""

SCALARS = "reward", "terminated"
"""The fields of a batch with one number for each row."""


def batch_verdicts(
    steps: Experience,
    batch: Mapping[str, object],
    *,
    n: int,
    gamma: float,
    reward_fn: Function | None,
    terminated_fn: Function | None,
) -> list[Verdict]:
    """Compare a drawn batch of n-step transitions with the stored steps.

    Raises:
        FieldError, ShapeError, DTypeError: it is not a batch ``[B]`` with ``index`` and ``reward``.
    """
    _require_batch(batch)
    rows = _positions(steps, as_host(batch["index"]).reshape(-1))
    known: Bools = rows >= 0
    if not known.any():
        rules = _sums, _goals, OF_REWARDS, OF_TERMINALS
        return [each.lacks("no 'index' of the batch is that of a stored row") for each in rules]
    window = _windows(steps, np.maximum(rows, 0), n)
    relabelled = _relabelled(steps, batch, rows) & known
    if reward_fn is not None and relabelled.any():
        # where rewards of new goals are known, those of the other rows are too
        sums = _sums.lacks("reward_fn was given, so relabelled rows of the batch were looked at, and no others")
    else:
        sums = _sums(steps, batch, window, known & ~relabelled, gamma)
    return [
        sums,
        _goals(steps, batch, rows, relabelled),
        OF_REWARDS("reward-of-the-old-goal", batch, relabelled, "reward", reward_fn, n),
        OF_TERMINALS("terminal-of-the-old-goal", batch, relabelled, "terminated", terminated_fn, n),
    ]


def _require_batch(batch: Any) -> None:
    """Require a batch ``[B]`` with ``index`` and ``reward``, and numbers in all fields that are compared.

    Raises:
        FieldError, ShapeError, DTypeError: it is none.
    """
    lacking = [name for name in ("index", "reward") if not (hasattr(batch, "keys") and name in batch.keys())]
    if lacking:
        raise FieldError(f"batch: expected a batch with 'index' and 'reward', got a {type(batch).__name__} without")
    count = whole_numbers(batch["index"], "batch: 'index'").size
    for name in COMPARED:
        if name not in batch.keys():
            continue
        leaves = {(): as_host(batch[name], name)} if name in SCALARS else leaves_of(batch[name], name=name)
        for path, leaf in leaves.items():
            where = dotted((name, *path))
            if leaf.shape[:1] != (count,) or (name in SCALARS and leaf.size != count):
                raise ShapeError(f"batch: '{where}': expected {count} rows, as 'index' has, got {leaf.shape}")
            if leaf.dtype.kind not in "biufc" or (name in SCALARS and leaf.dtype.kind == "c"):
                raise DTypeError(f"batch: '{where}': expected numbers, got {leaf.dtype}")


def _positions(steps: Experience, index: Ints) -> Ints:
    """The positions of a batch's rows in the experience; -1 for rows that are not there."""
    if steps.place is None:
        return np.where((index >= 0) & (index < len(steps)), index, -1)
    order = np.argsort(steps.place)
    at = np.clip(np.searchsorted(steps.place, index, sorter=order), 0, len(steps) - 1)
    return np.where(steps.place[order[at]] == index, order[at], -1)


def _windows(steps: Experience, rows: Ints, n: int) -> tuple[Ints, Bools]:
    """The rows of each n-step window ``[B, n]``, and which of them belong to it."""
    within = np.minimum(rows[:, None] + np.arange(min(n, len(steps) + 1)), len(steps) - 1)  # none is longer
    goes_on = (~steps.ended & steps.follows)[within]
    return within, np.cumprod(np.column_stack([np.ones(len(rows), int), goes_on[:, :-1]]), 1).astype(np.bool_)


@rule("n-step-sum", "n-step-over-an-end", "n-step-flag-of-first-step", "n-step-next-observation")
def _sums(
    steps: Experience, batch: Mapping[str, object], window: tuple[Ints, Bools], rows: Bools, gamma: float
) -> Look:
    """Rewards, flags and next observations that are not those of a window that stops at an end."""
    skip_if(not rows.any(), "all rows of the batch have another goal than was stored")
    within, inside = window
    last = within[np.arange(len(within)), inside.sum(1) - 1]
    powers = np.power(gamma, np.arange(within.shape[1], dtype=np.float64))
    worth = np.where(inside, powers, 0.0)
    right: Array = (steps.reward[within].astype(np.float64) * worth).sum(1)
    drawn = as_host(batch["reward"]).reshape(-1).astype(np.float64)
    # the newest stored step may be followed by a step that the batch has and the audit does not have
    known, rows = rows, rows & (steps.ended[last] | (inside.sum(1) == within.shape[1]))
    off = rows & ~np.isclose(drawn, right, rtol=1e-4, atol=1e-5)
    over = off & steps.ended[within[:, :-1]].any(1)
    yield from finding("n-step-over-an-end" if over.sum() > off.sum() / 2 else "n-step-sum", "certain",
                       "rewards of a batch are not the discounted sum of a window that stops at an end",
                       "stop each window at terminated or truncated, and at the ring's seam",
                       off, int(rows.sum()))  # fmt: skip
    if "terminated" in batch:
        flag = as_host(batch["terminated"]).reshape(-1).astype(np.bool_)
        yield from finding("n-step-flag-of-first-step", "certain",
                           "terminated in a batch is not that of the window's last step",
                           "return the flags of the last step of the window",
                           rows & (flag != steps.terminated[last]), int(rows.sum()))  # fmt: skip
    yield from _over_the_seam(steps, batch, within, known, gamma)
    if "next_obs" in batch and steps.next_obs is not None:
        equal = np.ones(len(rows), np.bool_)
        for path, leaf in leaves_of(batch["next_obs"]).items():
            if path in steps.next_obs and path != DESIRED:
                equal &= same_rows(leaf.astype(steps.next_obs[path].dtype), steps.next_obs[path][last])
        yield from finding("n-step-next-observation", "certain",
                           "the next observation of a batch is not the one after the window's last step",
                           "return the observation after the last step, the final one at an end",
                           rows & ~equal, int(rows.sum()))  # fmt: skip
    return int(known.sum())


def _over_the_seam(
    steps: Experience, batch: Mapping[str, object], within: Ints, known: Bools, gamma: float
) -> Iterator[Finding]:
    """Windows that run from an env's newest step on to its oldest, because the two lie side by side in a ring."""
    n = int(within.shape[1])
    if n < 2 or "next_obs" not in batch or steps.next_obs is None:
        return
    last: Ints = np.flatnonzero(~steps.follows)  # of each env, or of each run of steps
    run = np.searchsorted(last, within[:, 0])
    newest, oldest = last[run][:, None], np.append(0, last[:-1] + 1)[run][:, None]
    straight = within[:, :1] + np.arange(n)
    beyond = straight > newest
    rows = np.minimum(np.where(beyond, oldest + straight - newest - 1, straight), len(steps) - 1)
    worth = steps.reward[rows].astype(np.float64) * np.power(gamma, np.arange(n, dtype=np.float64))
    goes_on = np.cumprod(np.column_stack([np.ones(len(rows), int), ~steps.ended[rows[:, :-1]]]), 1)
    drawn = as_host(batch["reward"]).reshape(-1).astype(np.float64)

    def is_sum(summed: Array) -> Bools:
        return np.isclose(drawn, summed.sum(1), rtol=1e-4, atol=1e-5)

    crossing = known & beyond.any(1) & ~(steps.ended[rows] & ~beyond).any(1)
    over = crossing & is_sum(worth)
    # or the next observation is that of the newest step, and the rewards alone are summed beyond it
    alone = crossing & is_sum(worth * goes_on) & ~is_sum(worth * ~beyond)
    for path, leaf in leaves_of(batch["next_obs"]).items():
        if path in steps.next_obs:
            stored = steps.next_obs[path]
            over &= same_rows(leaf.astype(stored.dtype), stored[rows[:, -1]])
            alone &= same_rows(leaf.astype(stored.dtype), stored[newest[:, 0]])
    over |= alone
    yield from finding("n-step-over-an-end", "certain",
                       "windows of a batch run from the newest stored step on to the oldest, across the ring's seam",
                       "stop each window at the newest step", over, len(rows))  # fmt: skip


def _relabelled(steps: Experience, batch: Mapping[str, object], rows: Ints) -> Bools:
    """True where a row of a batch has another goal than was stored, bool ``[B]``."""
    goals = leaves_of(batch["obs"]).get(DESIRED)
    stored = steps.obs.get(DESIRED)
    if goals is None or stored is None:
        return np.zeros(len(rows), np.bool_)
    return ~same_rows(goals.astype(stored.dtype), stored[np.maximum(rows, 0)])


@rule("goal-of-another-episode")
def _goals(steps: Experience, batch: Mapping[str, object], rows: Ints, relabelled: Bools) -> Look:
    """Goals that were reached in no step of the row's own episode."""
    skip_if(not relabelled.any(), "no row of the batch has another goal than was stored", absent=True)
    if steps.next_obs is None:
        raise Lack("the source keeps no next observations, which say what goals were reached")
    goals, reached = leaves_of(batch["obs"])[DESIRED], steps.next_obs[ACHIEVED]
    episode = np.cumsum(np.append(0, (steps.ended | ~steps.follows)[:-1]))
    foreign = np.zeros(len(rows), np.bool_)
    bounds = np.searchsorted(episode, [episode[rows], episode[rows] + 1])
    for b in np.flatnonzero(relabelled):
        mine = reached[bounds[0, b] : bounds[1, b]]
        foreign[b] = not same_rows(mine, np.broadcast_to(goals[b], mine.shape).astype(mine.dtype)).any()
    yield from finding("goal-of-another-episode", "certain",
                       "relabelled rows have a goal that their episode never reached",
                       "choose goals among the stored steps of the row's own episode, also after the ring came round",
                       foreign, int(relabelled.sum()))  # fmt: skip
    return int(relabelled.sum())


def _computed(
    rule_name: str, batch: Mapping[str, object], relabelled: Bools, name: str, function: Function | None, n: int
) -> Look:
    """Rewards or terminals of relabelled rows, of one step each, that are not those of their new goal."""
    if function is None:
        raise Lack(f"pass {name}_fn, a function of achieved and desired goals", absent=not relabelled.any())
    skip_if(not relabelled.any(), f"{name}_fn was given, but no row of the batch has another goal than was stored")
    skip_if(n != 1, f"{name}_fn was given, but relabelled rows are looked at for n=1 only")
    if name not in batch.keys() or ACHIEVED not in leaves_of(batch.get("next_obs", {})):
        raise Lack(f"{name}_fn was given, but the batch lacks '{name}' or 'next_obs' with goals")
    reached = leaves_of(batch["next_obs"])[ACHIEVED][relabelled]
    goals, at = leaves_of(batch["obs"])[DESIRED][relabelled], np.flatnonzero(relabelled)
    drawn = as_host(batch[name]).reshape(-1)[relabelled].astype(np.float64)
    right = answers_of(f"{name}_fn", function, np.arange(len(at)), {(): reached}, {(): goals}, arrays=True)
    yield from finding(rule_name, "certain", f"'{name}' of relabelled rows is not that of their new goal",
                       f"compute {name} again from the achieved and the new goal",
                       at[~np.isclose(drawn, right)], len(at))  # fmt: skip
    return len(at)


OF_REWARDS, OF_TERMINALS = Rule(("reward-of-the-old-goal",), _computed), Rule(("terminal-of-the-old-goal",), _computed)


# -- many draws --------------------------------------------------------------------------------------------------------


def draw_verdicts(steps: Experience, draws: object) -> list[Verdict]:
    """Look for mistakes in many draws.

    Draws are rows ``[..., B]``, or sequences ``[..., B, T]``, given as positions, with -1 as padding. There should
    be so many that every row is expected ten times or more.

    Raises:
        DTypeError, ShapeError: they are not an array of whole numbers.
    """
    index = whole_numbers(draws, "draws")
    rows = _positions(steps, index.reshape(-1)).reshape(index.shape)
    rows[index < 0] = -1
    counts = np.bincount(rows[rows >= 0], minlength=len(steps))
    if not counts.sum():
        rules = _crossing, _same_order, _never, _uneven
        return [each.lacks("no draw is that of a stored row") for each in rules]
    return [_crossing(steps, rows), _same_order(rows), _never(steps, counts), _uneven(steps, counts)]


@rule("sequence-over-an-end")
def _crossing(steps: Experience, draws: Array) -> Look:
    """Sequences that run over an end, or over the place where the newest step lies beside the oldest."""
    skip_if(draws.ndim < 3, "draws are rows [K, B], and no sequences [K, B, T]", absent=True)
    rows = draws.reshape(-1, draws.shape[2])
    here, there = rows[:, :-1], rows[:, 1:]
    real = (here >= 0) & (there >= 0)
    goes_on = (~steps.ended & steps.follows)[np.maximum(here, 0)] & (there == here + 1)
    yield from finding("sequence-over-an-end", "certain", "sequences run over an episode's end or the ring's seam",
                       "cut sequences at ends, or reset the hidden state there",
                       (real & ~goes_on).any(1), len(rows))  # fmt: skip
    return rows.size


@rule("same-order-every-epoch")
def _same_order(rows: Array) -> Look:
    """Epochs that all come in one order."""
    if rows.ndim < 2 or len(rows) < 2 or rows.shape[1] < 3:
        raise Lack("draws have fewer than two epochs, or epochs of fewer than three rows")
    if bool((rows == rows[0]).all()):
        yield from finding("same-order-every-epoch", "certain", "every epoch comes in the same order",
                           "draw a new permutation for each epoch", np.arange(len(rows)), len(rows))  # fmt: skip
    return rows.size


@rule("last-steps-never-drawn", "steps-never-drawn")
def _never(steps: Experience, counts: Array) -> Look:
    """Rows that are never drawn though all should be: last steps of episodes, tails, or any others."""
    never = counts == 0
    if np.median(counts[~never]) < 8 and never.any():
        raise Lack("draws are too few: each stored row should be expected ten times")
    if (never & steps.ended).sum() > steps.ended.sum() / 2:
        name, what = "last-steps-never-drawn", "the last steps of episodes are never drawn"
    else:
        name, what = "steps-never-drawn", "stored steps are never drawn"
    mend = "let every stored transition, and every tail of an episode, be drawn"
    yield from steps.finding(name, "certain", what, mend, never)
    return len(steps)


VARIED = 5
"""How many different lengths episodes must have. There must be at least twice as many episodes."""


@rule("short-episodes-favoured")
def _uneven(steps: Experience, counts: Array) -> Look:
    """Steps that are drawn the more often, the shorter their episode is."""
    table = episodes_of(steps)
    length = table["length"].astype(np.float64)
    if len(length) < 2 * VARIED or len(np.unique(length)) < VARIED:
        raise Lack(f"fewer than {2 * VARIED} episodes are stored, or they have fewer than {VARIED} lengths")
    mean = np.add.reduceat(counts, table["start"]) / length
    skip_if((mean * length < 8).any(), "draws are too few: each episode should be drawn eight times")
    x, y = np.log(length) - np.log(length).mean(), np.log(mean) - np.log(mean).mean()
    slope, agree = float(x @ y / (x @ x)), float((x @ y) ** 2 / max(float((x @ x) * (y @ y)), 1e-30))
    if slope < -0.5 and agree > 0.8:
        often = np.repeat(mean, length.astype(np.int64)) > 2 * counts.mean()
        yield from steps.finding("short-episodes-favoured", "possible",
            "the shorter an episode is, the more often each of its steps comes: episodes are drawn, not steps",
            "draw windows or steps uniformly, or weigh episodes by their length, unless this is meant",
            often)  # fmt: skip
    return len(steps)
