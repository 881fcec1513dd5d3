"""audit: whether stored experience teaches the right thing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..collect.progress import progress_bar
from ..parameters import COUNT_RULE, GAMMA_RULE, an_instance, require
from ..parameters import Rule as ParameterRule
from ..printable import printable
from . import ends, fits, order, targets, values, windows
from .draws import OF_BATCH, OF_DRAWS, batch_verdicts, draw_verdicts
from .experience import Experience
from .findings import Check, Finding, Lack, Report, Verdict, checked, surest_first
from .readers import experience_of

__all__ = ["audit"]


Rule = tuple[tuple[str, ...], Callable[[Experience], Verdict]]
"""The names of the findings that a rule can give, and the rule."""

RULES: tuple[Rule, ...] = (
    (("next-observation-is-the-observation", "observation-one-step-late", "unmarked-end",
      "next-observation-on-another-scale", "rows-out-of-order"),
     order.continuity),
    (("reset-as-final-observation", "autoreset-step-stored", "next-episode-begins-on-the-end"),
     ends.next_episode_after_end),
    (("ends-one-row-off",), ends.ends_one_row_off),
    (("reset-not-flagged",), fits.resets),
    (("truncation-without-final-observation",), ends.truncation_without_final),
    (("n-step-over-an-end", "n-step-cut-short", "n-step-tail-missing", "n-step-flag-of-first-step"), windows.windows),
    (("stack-over-an-end",), order.stacks),
    (("action-one-step-off",), fits.action_one_step_off),
    (("reward-one-step-off",), fits.reward_one_step_off),
    (("reward-is-a-sum",), fits.running_sums),
    (("value-one-step-off",), fits.value_one_step_off),
    (("duplicate-rows",), order.duplicate_rows),
    (("reward-holds-a-value",), targets.rewards_with_values),
    (("not-finite",), values.not_finite),
    (("constant-field",), values.constant_fields),
    (("env-stands-still", "env-earns-the-same"), values.envs_apart),
    (("bytes-as-floats",), values.bytes_as_floats),
    (("actions-as-floats",), values.actions_as_floats),
    (("flag-not-binary",), values.odd_flags),
    (("priority-not-finite", "priority-of-dead-row", "priority-zero"), values.priorities),
)  # fmt: skip
"""The rules that look at every source, without an argument."""

OF_ADVANTAGES = (
    "advantage-over-an-end", "truncation-without-bootstrap", "bootstrap-before-the-step",
    "bootstrap-from-the-next-episode", "rollout-end-without-bootstrap", "advantage-of-another-gamma",
)  # fmt: skip

FUNCTION_RULE: ParameterRule = (lambda function: function is None or callable(function), "expected a function, or None")


MANY = 1_000_000
"""Steps from which an audit may take long enough for a progress bar."""


def audit(
    source: Any,
    *,
    batch: Mapping[str, Any] | None = None,
    n: int | None = None,
    gamma: float | None = None,
    reward_fn: Callable[..., Any] | None = None,
    terminated_fn: Callable[..., Any] | None = None,
    policy: Callable[..., Any] | None = None,
    critic: Callable[..., Any] | None = None,
    draws: Any = None,
    spaces: Mapping[str, Any] | None = None,
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
        critic: obs -> V(obs), ``[B]``, to compare a stored ``value`` with, in the same way.
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
    of_batch = reward_fn is not None and batch is not None, terminated_fn is not None and batch is not None
    rules: tuple[Rule, ...] = (
        *RULES,
        (OF_ADVANTAGES, lambda steps: targets.advantages(steps, gamma)),
        (("time-limit-as-terminal",), lambda steps: ends.time_limit_as_terminal(steps, limit)),
        (("outside-space",), lambda steps: values.outside_space(steps, dict(spaces or {}))),
        (("reward-of-the-old-goal",), lambda steps: targets.goal_rewards(steps, None if of_batch[0] else reward_fn)),
        (("terminal-of-the-old-goal",),
         lambda steps: targets.goal_terminals(steps, None if of_batch[1] else terminated_fn)),
        (("log-prob-of-another-action", "log-prob-one-step-off"), lambda steps: targets.log_probs(steps, policy)),
        (("value-of-another-observation", "value-one-step-off"), lambda steps: targets.values_of_critic(steps, critic)),
    )  # fmt: skip
    entries: list[tuple[Check, tuple[Finding, ...]]] = []
    with progress_bar(len(rules), None if len(steps) >= MANY else False, "auditing", "rules") as tick:
        for names, rule in rules:
            entries.append(checked(names, rule(steps) if len(steps) else Lack("there is no step")))
            tick()
    lacks = list(steps.lacks)
    if batch is not None:
        verdicts = batch_verdicts(steps, batch, n=1 if n is None else n, gamma=0.99 if gamma is None else gamma,
                                  reward_fn=reward_fn, terminated_fn=terminated_fn)  # fmt: skip
        entries += map(checked, OF_BATCH, verdicts)
    else:
        lacks += ["n was given, but no batch to compare with; pass batch, too"] if n is not None else []
        if gamma is not None and entries[len(RULES)][0].lack is not None:
            lacks.append("gamma was given, but neither a batch nor advantages of values to compare with; pass batch")
    if draws is not None:
        entries += map(checked, OF_DRAWS, draw_verdicts(steps, draws))
    checks = tuple(check for check, _ in entries)
    lacks += [f"{', '.join(check.rules)}: {check.lack}" for check in checks if check.lack and not check.absent]
    findings = surest_first([finding for _, some in entries for finding in some])
    source, lacks = printable(steps.source), map(printable, lacks)
    return Report(source, len(steps), int(steps.ended.sum()), findings, tuple(lacks), checks)
