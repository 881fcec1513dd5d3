"""Mistakes planted in logs of played environments are found, and nothing is found in right ones, however odd."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import relive
from relive import Collector, ReplayBuffer, Schema
from relive.look.findings import Rule
from support import logs, loops
from support.effort import CI
from support.logs import Arrays, explored, steered

Call = Callable[[], Arrays]


def rules(report: Any) -> set[str]:
    return {finding.rule for finding in report.findings}


def sure(report: Any) -> set[str]:
    return {finding.rule for finding in report.findings if finding.sure != "possible"}


def spread(names: Iterable[str], every: int) -> list[Any]:
    """One name in so many in CI, and every sixth of these quickly; the others in slow tests."""
    return [
        pytest.param(name, marks=() if i % (6 * every) == 0 else CI if i % every == 0 else pytest.mark.slow)
        for i, name in enumerate(names)
    ]


def noisy(name: str, **options: Any) -> Arrays:
    return logs.played("Arena", noise=0.05, reward=name, **options)


def written_over(log: Arrays) -> Arrays:
    """One array for both observations, which step() wrote over."""
    return {**log, "obs": log["next_obs"]}


def in_float16(log: Arrays) -> Arrays:
    return {**log, "obs": log["obs"].astype(np.float16).astype(np.float32)}


def normalised(log: Arrays) -> Arrays:
    """Observations and next observations divided by the same running scale, which changes from step to step."""
    scale = (1 + 1 / np.arange(1, len(log["obs"]) + 1)).astype(np.float32)[:, None, None]
    return {**log, "obs": log["obs"] / scale, "next_obs": log["next_obs"] / np.append(scale[1:], scale[-1:], 0)}


RIGHT: dict[str, Call] = {
    **{f"{env}": (lambda env=env: logs.played(env)) for env in logs.ENVS},
    **{f"{env}, one env": (lambda env=env: logs.one_env(logs.played(env))) for env in ("CartPole", "Pendulum")},
    **{f"{env}, a policy": (lambda env=env: logs.played(env, policy=steered))
       for env in ("CartPole", "Pendulum", "Market", "Arena", "Positions", "Contexts")},
    **{f"{env}, an exploring policy": (lambda env=env: logs.played(env, policy=explored))
       for env in ("CartPole", "Market", "Arena", "Positions", "Clocked", "MountainCar")},
    **{f"{env}, no next_obs": (lambda env=env: logs.without_next(logs.played(env)))
       for env in ("CartPole", "Arena", "Target", "Clocked", "Contexts", "Horizon", "Grid")},
    **{f"{env}, skipped frames": (lambda env=env: logs.played(env, skip=4))
       for env in ("CartPole", "Arena", "Pendulum")},
    **{f"{env}, sticky actions": (lambda env=env: logs.played(env, sticky=0.3)) for env in ("CartPole", "Arena")},
    **{f"{env}, n-step": (lambda env=env: logs.n_step(logs.played(env)))
       for env in ("CartPole", "Arena", "Pendulum")},
    **{f"{env}, two steps": (lambda env=env: logs.n_step(logs.played(env), 2)) for env in ("CartPole", "Arena")},
    **{f"{env}, n-step": (lambda env=env: logs.n_step(logs.played(env, max_episode_steps=60)))
       for env in ("CliffWalking", "FrozenLake")},
    **{f"Market, a policy, seed {seed}": (lambda seed=seed: logs.played("Market", policy=steered, seed=seed))
       for seed in (1, 2)},
    **{f"{env}, short": (lambda env=env: {k: x[:30] for k, x in logs.played(env).items()})
       for env in ("CartPole", "Pendulum", "Grid")},
    **{f"{kind} rewards": (lambda kind=kind: noisy(kind))
       for kind in ("constant", "noise", "noisy", "hidden", "sparse", "time", "steps")},
    "sparse rewards, eight envs": lambda: noisy("sparse", envs=8, steps=200),
    "hidden rewards, an exploring policy": lambda: noisy("hidden", policy=explored),
    "portals": lambda: logs.played("Grid", portals=True),
    "portals, no next_obs": lambda: logs.without_next(logs.played("Grid", portals=True)),
    "stacks": lambda: logs.stacked(logs.played("Positions")),
    "stacks padded with zeros": lambda: logs.stacked(logs.played("Images"), padding="zeros"),
    "stacks, an exploring policy": lambda: logs.stacked(logs.played("CartPole", policy=explored)),
    "goals": lambda: logs.goals(""),
    "goals, relabelled": lambda: logs.goals("right"),
    "goals, dense": lambda: logs.goals("right", dense=True),
    "float16 beside float32": lambda: in_float16(logs.played("Arena")),
    "a running scale": lambda: normalised(logs.played("Pendulum")),
    "values": logs.taught,
    "values of a pole": lambda: logs.taught("Clocked"),
    "envs take turns": lambda: logs.interleaved(logs.played("CartPole", envs=3)),
    "envs take turns in a grid": lambda: logs.interleaved(logs.played("Grid", envs=3)),
    "every seventh row": lambda: {k: x[::7] for k, x in logs.played("Arena", steps=2000).items()},
}  # fmt: skip
"""Logs in which nothing is wrong."""


@pytest.mark.parametrize("name", spread(RIGHT, 4))
def test_nothing_is_found_in_right_logs(name: str) -> None:
    log = RIGHT[name]()
    allowed = set[str]() if "next_obs" in log else {"truncation-without-final-observation"}
    report = relive.audit(log)
    assert sure(report) <= allowed, str(report)


MOVED = {"next-observation-is-the-observation"}
ENVS = ("CartPole", "Pendulum", "Acrobot", "Arena")
WRONG: dict[str, tuple[Call, set[str]]] = {
    **{f"{env}: next_obs is obs in {share:.0%}": (
        lambda env=env, share=share: logs.mixed(logs.played(env), share, lambda log: log["obs"]), MOVED)
       for env in ENVS for share in (0.02, 0.1, 0.3, 0.6, 0.9, 1.0)},
    **{f"{env}: next_obs on another scale in {share:.0%}": (
        lambda env=env, share=share: logs.mixed(logs.played(env), share, lambda log: 0.5 * log["next_obs"] + 0.1),
        {"next-observation-on-another-scale", "unmarked-end"})
       for env in ENVS for share in (0.3, 0.6, 0.9, 1.0)},
    **{f"{env}: next_obs of any row in {share:.0%}": (
        lambda env=env, share=share: logs.mixed(
            logs.played(env), share, lambda log: np.random.default_rng(0).permutation(log["next_obs"])),
        {"rows-out-of-order", "unmarked-end"})
       for env in ENVS for share in (0.3, 0.6, 1.0)},
    **{f"{env}: shuffled": (lambda env=env: logs.shuffled(logs.played(env)), {"rows-out-of-order"})
       for env in (*ENVS, "Grid", "Clocked")},
    **{f"{env}: obs is next_obs": (lambda env=env: written_over(logs.played(env)), MOVED)
       for env in ENVS},
    **{f"{env}: obs lags": (lambda env=env: logs.lagging(logs.played(env)), {"observation-one-step-late"})
       for env in ENVS},
    **{f"{env}: rewards {word}": (
        lambda env=env, by=by: logs.rolled(logs.played(env), "reward", by), {"reward-one-step-off"})
       for env, word, by in (("Pendulum", "late", 1), ("Arena", "late", 1), ("Arena", "early", -1))},
    "cliffs: rewards late": (lambda: logs.rolled(noisy("steps", steps=1500), "reward", 1), {"reward-one-step-off"}),
    "Arena: rewards late, no next_obs": (
        lambda: logs.without_next(logs.rolled(logs.played("Arena"), "reward", 1)),
        {"reward-one-step-off"}),
    "Market: rewards late": (lambda: logs.rolled(logs.played("Market"), "reward", 1), {"reward-one-step-off"}),
    **{f"{env}: actions late": (
        lambda env=env: logs.rolled(logs.played(env, steps=600), "action", 1), {"action-one-step-off"})
       for env in ("CartPole", "Pendulum", "Arena", "MountainCar")},
    **{f"{env}: actions late, an exploring policy": (
        lambda env=env: logs.rolled(logs.played(env, steps=600, policy=explored), "action", 1),
        {"action-one-step-off"})
       for env in ("CartPole", "Arena")},
    **{f"{env}: running sums": (lambda env=env: logs.sums(logs.played(env)), {"reward-is-a-sum"})
       for env in ("CartPole", "Pendulum", "Arena", "Acrobot")},
    **{f"{env}: a dead env": (lambda env=env: logs.dead(logs.played(env, envs=8, steps=200)), {"env-stands-still"})
       for env in ("CartPole", "Arena", "Grid")},
    **{f"{env}: no end flagged": (lambda env=env: logs.unflagged(logs.played(env)), {"reset-not-flagged"})
       for env in ("Pendulum", "Arena", "Acrobot")},
    "old rewards of new goals": (lambda: logs.goals("old"), {"reward-of-the-old-goal"}),
    "old dense rewards of new goals": (lambda: logs.goals("old", dense=True), {"reward-of-the-old-goal"}),
    **{f"{env}: stacks over ends": (
        lambda env=env: logs.stacked(logs.played(env), padding="over"), {"stack-over-an-end"})
       for env in ("CartPole", "Images")},
    "values early": (lambda: logs.rolled(logs.taught(), "value", -1), {"value-one-step-off"}),
    "values late": (lambda: logs.rolled(logs.taught(), "value", 1), {"value-one-step-off"}),
}  # fmt: skip
"""Logs with a mistake each, and the names of rules that should find it, one of them at least."""


@pytest.mark.parametrize("name", spread(WRONG, 4))
def test_planted_mistakes_are_found(name: str) -> None:
    make, expected = WRONG[name]
    report = relive.audit(make())
    assert sure(report) & expected, str(report)


@pytest.mark.parametrize("steps", [600, pytest.param(1500, marks=pytest.mark.slow)])
def test_resets_that_a_state_foretells_are_found_and_may_be_the_envs_own(steps: int) -> None:
    """A pole falls from states that show it, as a task that goes on elsewhere would leave them."""
    report = relive.audit(logs.unflagged(logs.played("CartPole", steps=steps)))
    assert [(finding.rule, finding.sure) for finding in report.findings] == [("reset-not-flagged", "possible")]


# -- what an audit looked at, and why not ----------------------------------------------------------------------------


def lack(report: Any, rule: str) -> str | None:
    """Why a rule did not run; None if it did."""
    (found,) = {check.lack for check in report.checks if rule in check.rules and not check.absent} or {"absent"}
    return found


def test_every_rule_of_a_report_ran_on_some_rows_or_says_why_it_did_not() -> None:
    for log in (logs.played("CartPole"), logs.shuffled(logs.played("CartPole")), logs.taught(),
                {name: x[:3] for name, x in logs.played("Images").items()}, logs.goals("right"),
                {name: x[:0] for name, x in logs.played("CartPole").items()}):  # fmt: skip
        report = relive.audit(log)
        assert len(report.checks) == 27
        assert all((check.rows > 0) == (check.lack is None) for check in report.checks)
        said = [check for check in report.checks if check.lack is not None and not check.absent]
        assert all(any(str(check.lack) in line for line in report.lacks) for check in said)
        assert set(rules(report)) <= {name for check in report.checks for name in check.rules}


def test_a_rule_cannot_return_without_a_verdict() -> None:
    def look(findings: Any, verdict: Any) -> Any:
        yield from findings
        return verdict

    some = Rule(("some-rule",), look)
    for verdict in (None, [], iter(())):
        with pytest.raises(TypeError, match="which is no number of rows"):
            some((), verdict)
    with pytest.raises(ValueError, match="says why"):
        some((), 0)
    with pytest.raises(TypeError, match="found observation-one-step-late"):
        some(relive.audit(logs.lagging(logs.played("CartPole"))).findings, 1)


def test_where_rows_have_no_order_each_rule_that_needs_one_says_so() -> None:
    report = relive.audit({name: x[::7] for name, x in logs.played("Arena", steps=2000).items()})
    assert report.ok
    for rule in ("unmarked-end", "ends-one-row-off", "reward-one-step-off", "action-one-step-off",
                 "time-limit-as-terminal", "reward-is-a-sum"):  # fmt: skip
        assert "order" in str(lack(report, rule)), rule
    assert "27 checks ran" in str(report)


# -- arguments -------------------------------------------------------------------------------------------------------


def test_a_policy_and_a_critic_find_what_is_not_theirs() -> None:
    log = logs.taught()
    both: Any = {"policy": logs.policy, "critic": logs.critic}
    right = relive.audit(log, **both)
    assert right.ok, str(right)
    assert {lack(right, rule) for rule in ("log-prob-of-another-action", "value-of-another-observation")} == {None}
    other = {**log, "action": log["action"] + np.random.default_rng(0).normal(0, 0.3, log["action"].shape)}
    assert sure(relive.audit(other, **both)) == {"log-prob-of-another-action"}
    early = relive.audit(logs.rolled(log, "value", -1), **both)
    assert [(finding.rule, finding.sure) for finding in early.findings] == [("value-one-step-off", "certain")]
    assert "log-prob-one-step-off" in sure(relive.audit(logs.rolled(log, "log_prob", 1), **both))
    clipped = {**log, "action": np.clip(log["action"], -0.9, 0.9)}
    (finding,) = relive.audit(clipped, **both).findings
    assert finding.rule == "log-prob-of-another-action"
    assert 0 < finding.share < 0.5


def test_a_critic_that_was_updated_since_is_no_sure_mistake() -> None:
    log = logs.taught()
    report = relive.audit(log, critic=lambda obs: 1.02 * logs.critic(obs) + 0.1)
    assert {finding.rule for finding in report.findings} == {"value-of-another-observation"}
    assert report.ok


def test_functions_may_take_tensors_or_arrays_and_their_errors_name_them() -> None:
    log = logs.taught()
    assert lack(relive.audit(log, critic=lambda obs: torch.sin(obs[:, 0])), "value-of-another-observation") is None
    weights = np.ones(4)
    assert (
        lack(relive.audit(log, critic=lambda obs: obs.astype(float) @ weights), "value-of-another-observation") is None
    )
    with pytest.raises(relive.errors.ParameterError, match="critic: it failed"):
        relive.audit(log, critic=lambda obs: obs.keys())
    with pytest.raises(relive.errors.ParameterError, match="policy: expected one number for each"):
        relive.audit(log, policy=lambda obs, action: obs)


@pytest.mark.parametrize("argument", ["n", "gamma", "reward_fn", "terminated_fn", "policy", "critic"])
def test_an_argument_that_has_nothing_to_be_compared_with_is_named(argument: str) -> None:
    given: Any = {"n": 3, "gamma": 0.9}.get(argument, lambda *args: args[0])
    report = relive.audit(logs.played("CartPole"), **{argument: given})
    assert any(f"{argument} was given" in line for line in report.lacks), report.lacks


def test_a_reward_function_looks_at_stored_goals_without_a_batch() -> None:
    def reward_fn(achieved: Any, desired: Any) -> Any:
        return -1.0 * (abs(achieved - desired).sum(-1) > 0.05)

    assert relive.audit(logs.goals("right"), reward_fn=reward_fn).ok
    (finding,) = relive.audit(logs.goals("old"), reward_fn=reward_fn).findings
    assert (finding.rule, finding.sure) == ("reward-of-the-old-goal", "certain")


def test_gamma_is_compared_with_that_of_stored_advantages() -> None:
    rollout = loops.rollout(gamma=0.97)
    assert relive.audit(rollout, gamma=0.97).ok
    assert sure(relive.audit(rollout, gamma=0.99)) == {"advantage-of-another-gamma"}


def test_spaces_of_other_names_are_refused() -> None:
    with pytest.raises(relive.errors.ParameterError, match="got one for observation"):
        relive.audit(logs.played("CartPole"), spaces={"observation": None})


# -- time limits -----------------------------------------------------------------------------------------------------


def filled(limit_as_terminal: bool) -> ReplayBuffer:
    """A replay of Pendulum, whose episodes all have one length."""
    env = gym.make("Pendulum-v1", max_episode_steps=30)
    replay = ReplayBuffer(Schema.from_env(env), 400, seed=0)
    obs, _ = env.reset(seed=0)
    env.action_space.seed(0)
    for _ in range(150):
        action = env.action_space.sample()
        after, reward, terminated, truncated, _ = env.step(action)
        replay.add(obs=obs, action=action, reward=reward, terminated=terminated or (truncated and limit_as_terminal),
                   truncated=truncated and not limit_as_terminal, next_obs=after)  # fmt: skip
        obs = env.reset()[0] if terminated or truncated else after
    return replay


def test_the_time_limit_in_a_schema_is_looked_for_in_replays_and_their_saves(tmp_path: Path) -> None:
    for wrong in (False, True):
        replay = filled(wrong)
        replay.save(tmp_path / str(wrong))
        for source in (replay, tmp_path / str(wrong)):
            found = {(f.rule, f.sure) for f in relive.audit(source).findings}
            assert found == ({("time-limit-as-terminal", "certain")} if wrong else set()), source


def test_without_a_limit_one_length_of_all_episodes_is_said_to_hide_it() -> None:
    log = logs.limits_as_terminals(logs.played("Pendulum"))
    images = log | {name: np.repeat(log[name], 200, -1) for name in ("obs", "next_obs")}
    assert "pass max_episode_steps" in str(lack(relive.audit(images), "time-limit-as-terminal"))
    report = relive.audit(log)
    (finding,) = report.findings
    assert (finding.rule, finding.sure) == ("time-limit-as-terminal", "possible")
    assert "pass max_episode_steps" in finding.mend
    assert not relive.audit(logs.limits_as_terminals(logs.played("Pendulum")), max_episode_steps=100).ok


# -- what relive itself hands out ------------------------------------------------------------------------------------


def test_rows_of_a_replay_are_read_in_the_order_of_time_again() -> None:
    envs = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    envs.action_space.seed(0)
    replay = ReplayBuffer(Schema.from_env(envs), 900, 3, seed=0)
    Collector(envs, lambda obs: {"action": envs.action_space.sample()}, replay, seed=0).collect(400)  # it came round
    rows = replay.data()
    plain = {name: rows[name] for name in ("obs", "action", "reward", "terminated", "truncated", "next_obs")}
    sources: list[Any] = [rows, {name: x.numpy() for name, x in rows.items()}, plain, replay.slice(1)]
    for source in sources:
        report = relive.audit(source)
        assert not report.findings, str(report)
        assert lack(report, "unmarked-end") is None
    assert relive.audit(rows).episodes == relive.audit(replay).episodes
