"""The audit against plays of real environments that were written without a look at its rules."""

from __future__ import annotations

from typing import Any

import pytest

import relive
from support import blind_logs
from support.effort import CI

KEEPS_NO_FINAL = {"truncation-without-final-observation"}
"""What logs without next observations rightly get: a learner would lack the observation that a time limit left."""

UNSEEN = {
    "reset-as-final-ball",
    "rows-shuffled-cartpole-ppo-without-next-obs",
    "rows-shuffled-pendulum-ppo-without-next-obs",
    "rewards-late-acrobot",
    "rewards-early-pendulum",
    "rewards-early-acrobot",
    "rewards-early-mountaincar-continuous",
    "rewards-early-ball",
    "dead-env-cartpole-eight-halfway",
    "dead-env-pendulum-eight-halfway",
    "one-env-without-rewards-cartpole-eight",
    "goals-of-the-next-episode-reach",
    "goals-of-the-next-episode-reach-dense",
    "unflagged-terminals-cartpole-one",
    "unflagged-terminals-hopper",
    "actions-late-cheetah",
    "actions-early-cartpole",
    "actions-early-pendulum",
    "actions-early-cheetah",
    "log-prob-of-another-action-cartpole-ppo-policy-unknown",
    "log-prob-of-another-action-pendulum-ppo-policy-unknown",
    "values-early-pendulum-ppo-critic-unknown",
    "limits-as-terminals-pendulum-limit-unknown",
    "limits-as-terminals-mountaincar-limit-limit-unknown",
    "done-as-terminated-cheetah-limit-unknown",
    "done-as-terminated-reach-limit-unknown",
    "flags-swapped-cartpole-one-limit-known",
    "flags-swapped-cartpole-one-limit-unknown",
    "flags-swapped-mountaincar-limit-unknown",
    "frames-wrapped-ball",
    "floats-in-bytes-cartpole-spaces-known",
    "floats-in-bytes-cartpole-spaces-unknown",
    "floats-in-bytes-pendulum-spaces-unknown",
    "actions-of-the-next-env-pendulum-eight",
    "actions-of-the-next-env-cartpole",
    "actions-of-the-next-env-cheetah",
    "rewards-discounted-cartpole-eight",
    "rewards-discounted-pendulum",
    "two-envs-in-one-stream-cartpole-with-next-obs",
    "two-envs-in-one-stream-cartpole-without-next-obs",
    "two-envs-in-one-stream-pendulum-with-next-obs",
    "two-envs-in-one-stream-pendulum-without-next-obs",
    "two-envs-in-one-stream-cheetah-with-next-obs",
    "two-envs-in-one-stream-cheetah-without-next-obs",
}
"""What the audit does not find, most of it because the log does not say it. What it finds one day comes off here."""


def spread(cases: list[Any], every: int) -> list[Any]:
    """One case in so many in CI, and every twelfth of these quickly; the others in slow tests."""
    marks = [() if i % (12 * every) == 0 else CI if i % every == 0 else pytest.mark.slow for i in range(len(cases))]
    return [pytest.param(case, marks=mark, id=case.name) for case, mark in zip(cases, marks, strict=True)]


def found(made: tuple[Any, dict[str, Any]]) -> set[str]:
    source, options = made
    return {finding.rule for finding in relive.audit(source, **options).findings if finding.sure != "possible"}


@pytest.mark.parametrize("case", spread(blind_logs.RIGHT, 11))
def test_nothing_is_found_in_what_was_stored_rightly(case: Any) -> None:
    assert found(case.make()) <= (KEEPS_NO_FINAL if "no-next-obs" in case.name or "without-next-obs" in case.name
                                  else set())  # fmt: skip


@pytest.mark.parametrize("case", spread(blind_logs.BUGS, 11))
def test_a_mistake_is_found_that_is_not_in_the_same_play_stored_rightly(case: Any) -> None:
    new = found(case.make()) - found(case.twin())
    assert bool(new) == (case.name not in UNSEEN), new
