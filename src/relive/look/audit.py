"""audit: whether stored experience teaches the right thing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..collect.progress import progress_bar
from ..parameters import COUNT_RULE, GAMMA_RULE, Rule, an_instance, require
from ..printable import printable
from . import ends, order, targets, values, windows
from .draws import batch_findings, draw_findings
from .experience import Experience
from .findings import Finding, Report, surest_first
from .readers import experience_of

__all__ = ["audit"]


RULES: tuple[Callable[[Experience], Any], ...] = (
    ends.next_episode_after_end,
    ends.ends_one_row_off,
    ends.unmarked_ends,
    ends.truncation_without_final,
    windows.windows,
    order.reward_one_step_off,
    order.duplicate_rows,
    targets.advantages,
    targets.rewards_with_values,
    values.not_finite,
    values.constant_fields,
    values.bytes_as_floats,
    values.actions_as_floats,
    values.odd_flags,
    values.priorities,
)
"""The rules that look at every source."""

FUNCTION_RULE: Rule = (lambda function: function is None or callable(function), "expected a function, or None")


MANY = 1_000_000
"""Steps from which an audit may take long enough for a progress bar."""


def audit(
    source: Any,
    *,
    batch: Mapping[str, Any] | None = None,
    n: int = 1,
    gamma: float = 0.99,
    reward_fn: Callable[..., Any] | None = None,
    terminated_fn: Callable[..., Any] | None = None,
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
        n: rewards per window of ``batch``.
        gamma: discount per step of ``batch``.
        reward_fn: (achieved, desired) -> the rewards that rows of ``batch`` with another goal should have.
        terminated_fn: (achieved, desired) -> the flags, bool, that such rows should have.
        draws: rows that were drawn, ``[K, B]``, or sequences ``[K, B, T]``, padded with -1. Pass so many that every
            stored row is expected ten times.
        spaces: ``obs`` and ``action`` -> Gymnasium space of one env.
        max_episode_steps: the time limit of the env, if it is known.

    Returns:
        a report of what was found, the surest first. ``bool(report)`` is True if nothing was certain or likely.

    Raises:
        FieldError, ShapeError, DTypeError: the source, ``batch`` or ``draws`` cannot be read.
        ParameterError: one of the other arguments is out of range or of a wrong kind.
    """
    require("audit", COUNT_RULE, n=n)
    require("audit", GAMMA_RULE, gamma=gamma)
    require("audit", FUNCTION_RULE, reward_fn=reward_fn, terminated_fn=terminated_fn)
    require("audit", an_instance(Mapping, "a mapping from 'obs' and 'action' to spaces"), spaces=spaces)
    if max_episode_steps is not None:
        require("audit", COUNT_RULE, max_episode_steps=max_episode_steps)
    steps = experience_of(source)
    found: list[Finding] = []
    if len(steps):
        with progress_bar(len(RULES), None if len(steps) >= MANY else False, "auditing", "rules") as tick:
            for rule in RULES:
                found += rule(steps)
                tick()
        found += ends.time_limit_as_terminal(steps, max_episode_steps)
        found += values.outside_space(steps, dict(spaces or {}))
    if batch is not None:
        found += batch_findings(steps, batch, n=n, gamma=gamma, reward_fn=reward_fn, terminated_fn=terminated_fn)
    if draws is not None:
        found += draw_findings(steps, draws)
    source, lacks = printable(steps.source), tuple(map(printable, steps.lacks))
    return Report(source, len(steps), int(steps.ended.sum()), surest_first(found), lacks)
