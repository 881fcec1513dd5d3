"""Each mistake that a loop can make, planted and found; and nothing found where there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import relive
from relive import Collector, Field, Hindsight, NStep, Prioritized, ReplayBuffer, RolloutBuffer, Schema
from relive.look.readers import experience_of
from support import loops
from support.effort import first_of, in_ci
from support.loops import Arrays


def rules(report: Any) -> set[str]:
    return {finding.rule for finding in report.findings}


def sure(report: Any) -> set[str]:
    return {finding.rule for finding in report.findings if finding.sure != "possible"}


@pytest.mark.parametrize("seed", first_of(1, range(4)))
@pytest.mark.parametrize("keep", [lambda x: x, loops.without_next_obs])
def test_nothing_is_found_where_nothing_is_wrong(keep: Callable[[Arrays], Arrays], seed: int) -> None:
    report = relive.audit(keep(loops.stored(loops.walk(seed=seed))))
    expected = set() if keep(loops.stored(loops.walk(2))).get("next_obs") is not None else {
        "truncation-without-final-observation"}  # fmt: skip
    assert rules(report) == expected, str(report)
    assert report.ok == (not expected)


PLANTED: dict[str, tuple[Callable[[list[Arrays]], Arrays], str]] = {
    "a reset observation as the final one": (loops.reset_as_final, "reset-as-final-observation"),
    "ignored steps": (loops.ignored_steps, "autoreset-step-stored"),
    "ignored steps, no next_obs": (
        lambda e: loops.without_next_obs(loops.ignored_steps(e)), "autoreset-step-stored"),
    "flags a row late": (loops.shifted("flags", 1), "ends-one-row-off"),
    "flags a row early": (loops.shifted("flags", -1), "ends-one-row-off"),
    "flags a row late, no next_obs": (
        lambda e: loops.without_next_obs(loops.shifted("flags", 1)(e)), "ends-one-row-off"),
    "rewards a row late": (loops.shifted("reward", 1), "reward-one-step-off"),
    "rewards a row early": (loops.shifted("reward", -1), "reward-one-step-off"),
    "time limits as terminals": (loops.truncated_as_terminal, "time-limit-as-terminal"),
    "windows over ends": (loops.n_step, "n-step-over-an-end"),
    "the first step's flag": (lambda e: loops.n_step(e, own_flags=True), "n-step-flag-of-first-step"),
    "no final observation": (
        lambda e: loops.without_next_obs(loops.stored(e)), "truncation-without-final-observation"),
}  # fmt: skip


@pytest.mark.parametrize("seed", first_of(1, range(3)))
@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_found_by_its_name(mistake: str, seed: int) -> None:
    loop, rule = PLANTED[mistake]
    report = relive.audit(loop(loops.walk(seed=seed)))
    assert rule in sure(report), str(report)
    assert not report.ok
    finding = next(f for f in report.findings if f.rule == rule)
    assert finding.rows > 0
    assert 0 < finding.share <= 1
    assert finding.mend
    others = sure(report) - {rule, "truncation-without-final-observation"}
    assert not others, str(report)


def changed(name: str, change: Callable[[np.ndarray], Any]) -> Arrays:
    arrays = loops.stored(loops.walk())
    result = change(arrays[name])
    return arrays if result is None else {**arrays, name: result}


def poison(x: np.ndarray) -> None:
    x[7] = np.nan


VALUES: dict[str, tuple[Callable[[], Arrays], str]] = {
    "NaN in an observation": (lambda: changed("obs", poison), "not-finite"),
    "NaN in a reward": (lambda: changed("reward", poison), "not-finite"),
    "a constant observation": (
        lambda: {**loops.stored(loops.walk()), "obs": np.zeros((len(loops.stored(loops.walk())["reward"]), 3))},
        "constant-field"),
    "bytes as floats": (
        lambda: {name: x for name, x in changed("obs", lambda x: np.random.default_rng(0).integers(
            0, 256, (len(x), 8, 8)).astype(np.float32)).items() if name != "next_obs"}, "bytes-as-floats"),
    "everything twice": (
        lambda: {name: np.concatenate([x, x]) for name, x in loops.stored(loops.walk()).items()}, "duplicate-rows"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", VALUES)
def test_wrong_numbers_are_found(mistake: str) -> None:
    make, rule = VALUES[mistake]
    assert rule in sure(relive.audit(make())), mistake


def test_an_action_that_never_changes_is_found_and_may_be_meant() -> None:
    report = relive.audit(changed("action", np.zeros_like))
    assert ("constant-field", "possible") in {(finding.rule, finding.sure) for finding in report.findings}


def test_what_lies_outside_a_space_is_found() -> None:
    arrays = loops.stored(loops.walk())
    spaces = {"action": gym.spaces.Box(-1, 1, (2,)), "obs": gym.spaces.Box(-100, 100, (3,))}
    assert relive.audit(arrays, spaces=spaces).ok
    arrays["action"][3] = 1.5
    (finding,) = relive.audit(arrays, spaces=spaces).findings
    assert (finding.rule, finding.rows, finding.examples) == ("outside-space", 1, (3,))


def collected(mode: AutoresetMode, env: str = "CartPole-v1", steps: int = 400, **options: Any) -> ReplayBuffer:
    envs = SyncVectorEnv([lambda: gym.make(env, **options) for _ in range(3)], autoreset_mode=mode)
    schema = Schema.from_spaces(envs.single_observation_space, envs.single_action_space)
    replay = ReplayBuffer(schema, 3000, 3, seed=0)
    collector = Collector(envs, lambda obs: {"action": envs.action_space.sample()}, replay, seed=0)
    envs.action_space.seed(0)
    collector.collect(steps)
    return replay


@pytest.mark.parametrize(
    ("env", "options", "mode"),
    [
        (env, options, mode)
        if (env == "CartPole-v1") == (mode != AutoresetMode.DISABLED)
        else in_ci(env, options, mode)
        for env, options in [("CartPole-v1", {}), ("Pendulum-v1", {"max_episode_steps": 30})]
        for mode in AutoresetMode
    ],
)
def test_what_a_collector_stores_is_clean(
    env: str, options: dict[str, Any], mode: AutoresetMode, tmp_path: Path
) -> None:
    replay = collected(mode, env, **options)
    report = relive.audit(replay)
    assert not report.findings, str(report)
    assert report.rows == len(replay)
    replay.save(tmp_path / "save")
    saved = relive.audit(tmp_path / "save")
    assert (saved.rows, saved.episodes, saved.findings) == (report.rows, report.episodes, ())


def replay_of(arrays: Arrays, view: Any = None, sampler: Any = None, **options: Any) -> ReplayBuffer:
    schema = Schema({
        "obs": (3,), "action": (2,), "reward": (), "terminated": Field((), torch.bool),
        "truncated": Field((), torch.bool),
    })  # fmt: skip
    replay = ReplayBuffer(schema, 4000, 1, view=view, sampler=sampler, check_ends=False, seed=0, **options)
    replay.extend({name: x[:, None] for name, x in arrays.items()})
    return replay


def test_a_replay_of_relive_shows_its_loops_mistakes_with_public_indices() -> None:
    replay = replay_of(loops.ignored_steps(loops.walk()))
    (finding,) = relive.audit(replay).findings
    assert finding.rule == "autoreset-step-stored"
    batch = replay.slice(0)
    where = [list(batch["index"]).index(index) for index in finding.examples]
    assert all(batch["reward"][where] == 0)


def test_right_batches_pass_and_wrong_ones_do_not() -> None:
    replay = replay_of(loops.stored(loops.walk()), view=NStep(3, 0.9))
    batch = replay.sample(200)
    assert relive.audit(replay, batch=batch, n=3, gamma=0.9).ok
    assert "n-step-sum" in rules(relive.audit(replay, batch={**batch, "reward": batch["reward"] + 1}, n=3, gamma=0.9))
    flags = {**batch, "terminated": ~batch["terminated"]}
    assert "n-step-flag-of-first-step" in rules(relive.audit(replay, batch=flags, n=3, gamma=0.9))
    moved = {**batch, "next_obs": batch["next_obs"].roll(1, 0)}
    assert "n-step-next-observation" in rules(relive.audit(replay, batch=moved, n=3, gamma=0.9))


def goals(seed: int = 0) -> ReplayBuffer:
    goal = {"observation": (2,), "achieved_goal": (1,), "desired_goal": (1,)}
    schema = Schema({"obs": goal, "action": (1,), "reward": (), "terminated": Field((), torch.bool),
                     "truncated": Field((), torch.bool)})  # fmt: skip
    replay = ReplayBuffer(schema, 2000, 1, view=Hindsight(near, terminated_fn=reached, gamma=1.0), seed=seed)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        desired, at = rng.normal(size=1), rng.normal(size=1)
        for t in range(15):
            after = at + rng.normal(size=1)

            def seen(x: np.ndarray, goal: np.ndarray = desired) -> Any:
                return {"observation": np.append(x, 0), "achieved_goal": x, "desired_goal": goal}

            replay.add(obs=seen(at), action=after - at, reward=[near(after, desired)],
                       terminated=[reached(after, desired)], truncated=[t == 14], next_obs=seen(after))  # fmt: skip
            at = after
            if reached(after, desired):
                break
    return replay


def near(achieved: Any, desired: Any) -> Any:
    return -np.abs(achieved - desired)[..., 0]


def reached(achieved: Any, desired: Any) -> Any:
    return np.abs(achieved - desired)[..., 0] < 0.05


def test_goals_rewards_and_terminals_of_relabelled_rows_are_compared() -> None:
    replay = goals()
    batch = replay.sample(128)
    functions: Any = {"reward_fn": near, "terminated_fn": reached}
    assert relive.audit(replay, batch=batch, **functions).ok
    stale = {**batch, "reward": batch["reward"] * 0 - 7}
    assert "reward-of-the-old-goal" in rules(relive.audit(replay, batch=stale, **functions))
    stale = {**batch, "terminated": torch.zeros(128, dtype=torch.bool)}
    assert "terminal-of-the-old-goal" in rules(relive.audit(replay, batch=stale, **functions))
    foreign = {**batch, "obs": {**batch["obs"], "desired_goal": batch["obs"]["desired_goal"].roll(1, 0) + 3}}
    assert "goal-of-another-episode" in rules(relive.audit(replay, batch=foreign))


def test_a_goal_that_only_the_next_episode_reached_is_foreign() -> None:
    replay = goals()
    batch, steps = replay.sample(128), experience_of(replay)
    assert steps.next_obs is not None
    assert steps.place is not None
    row = np.searchsorted(steps.place, batch["index"].numpy())
    ends = np.flatnonzero(steps.ended)
    later = np.minimum(ends[np.searchsorted(ends, row)] + 1, len(steps) - 1)
    goal = torch.from_numpy(steps.next_obs["achieved_goal",][later])
    foreign = {**batch, "obs": {**batch["obs"], "desired_goal": goal}}
    assert "goal-of-another-episode" in rules(relive.audit(replay, batch=foreign))


def test_sequences_whose_steps_are_out_of_order_are_found() -> None:
    arrays = {name: x[:40] for name, x in loops.stored(loops.walk(5, stop=0.0)).items()}
    starts = np.random.default_rng(0).integers(36, size=(200, 16))[..., None]
    assert "sequence-over-an-end" not in rules(relive.audit(arrays, draws=starts + np.arange(4)))
    assert "sequence-over-an-end" in rules(relive.audit(arrays, draws=starts + np.array([0, 2, 1, 3])))


def test_draws_show_what_never_comes() -> None:
    arrays = loops.stored(loops.walk(10))
    rng, count = np.random.default_rng(0), len(arrays["reward"])
    assert relive.audit(arrays, draws=rng.integers(count, size=(40 * count // 32, 32))).ok
    inner = np.flatnonzero(~(arrays["terminated"] | arrays["truncated"]))
    few = rng.choice(inner, (40 * count // 32, 32))
    assert rules(relive.audit(arrays, draws=few)) == {"last-steps-never-drawn"}
    assert rules(relive.audit(arrays, draws=few % (count // 2))) == {"steps-never-drawn"}
    assert "same-order-every-epoch" in rules(relive.audit(arrays, draws=np.tile(rng.permutation(count), (3, 1))))
    starts = rng.integers(count - 8, size=(500, 16))
    assert "sequence-over-an-end" in rules(relive.audit(arrays, draws=starts[..., None] + np.arange(8)))


def test_priorities_that_nobody_could_draw_by() -> None:
    replay = replay_of(loops.stored(loops.walk()), sampler=Prioritized())
    assert relive.audit(replay).ok
    for change, rule in ((np.nan, "priority-not-finite"), (0.0, "priority-zero")):
        steps = experience_of(replay)
        assert steps.priorities is not None
        steps.priorities[5] = change
        assert rules(relive.audit(steps)) == {rule}
    steps = experience_of(replay)
    assert steps.drawable is not None
    steps.drawable[5] = False
    assert rules(relive.audit(steps)) == {"priority-of-dead-row"}


def test_a_rollout_is_read_with_its_final_values() -> None:
    schema = Schema.from_spaces(gym.spaces.Box(-9, 9, (3,)), gym.spaces.Box(-1, 1, (2,)), value=())
    arrays = loops.stored(loops.walk(6))
    rollout = RolloutBuffer(schema, len(arrays["reward"]), 1)
    for t in range(len(arrays["reward"])):
        step = {name: x[t : t + 1] for name, x in arrays.items() if name != "next_obs"}
        rollout.add(**step, value=[0.0], final_value=[1.0])
    assert relive.audit(rollout).ok, str(relive.audit(rollout))
    lost = RolloutBuffer(schema, len(arrays["reward"]), 1)
    for t in range(len(arrays["reward"])):
        lost.add(**{name: x[t : t + 1] for name, x in arrays.items() if name != "next_obs"}, value=[0.0])
    assert "truncation-without-final-observation" in rules(relive.audit(lost))


def test_a_report_is_text_and_json() -> None:
    report = relive.audit(loops.reset_as_final(loops.walk()))
    assert "reset-as-final-observation" in str(report)
    assert "final_obs" in str(report)
    read = json.loads(report.to_json())
    assert read["ok"] is False
    assert read["findings"][0]["rule"] == "reset-as-final-observation"


def test_what_cannot_be_read_is_refused_by_name() -> None:
    with pytest.raises(relive.errors.FieldError, match="lacks"):
        relive.audit({"obs": np.zeros((3, 1))})
    with pytest.raises(relive.errors.FieldError, match="not known"):
        relive.audit(object())
    with pytest.raises(relive.errors.ShapeError, match="action"):
        relive.audit({"obs": np.zeros((3, 1)), "reward": np.zeros(3), "terminated": np.zeros(3, bool),
                      "action": np.zeros(4)})  # fmt: skip


def run(*arguments: str) -> tuple[int, str]:
    from typer.testing import CliRunner

    from relive.cli import app

    result = CliRunner().invoke(app, ["audit", *arguments])
    return result.exit_code, result.output


def test_the_command_line_says_what_it_found_and_its_status_says_whether(tmp_path: Path) -> None:
    replay_of(loops.stored(loops.walk())).save(tmp_path / "right")
    replay_of(loops.ignored_steps(loops.walk())).save(tmp_path / "wrong")
    assert run(str(tmp_path / "right"))[0] == 0
    status, text = run(str(tmp_path / "wrong"))
    assert status == 1
    assert "autoreset-step-stored" in text
    status, text = run(str(tmp_path / "wrong"), "--json")
    assert (status, json.loads(text)["findings"][0]["rule"]) == (1, "autoreset-step-stored")
    status, text = run(str(tmp_path / "nothing"))
    assert status == 2
    np.savez(tmp_path / "flat.npz", **loops.reset_as_final(loops.walk()))
    assert "reset-as-final-observation" in run(str(tmp_path / "flat.npz"), "--json")[1]
    np.savez(tmp_path / "pickled.npz", obs=np.array([object()]), allow_pickle=True)
    assert run(str(tmp_path / "pickled.npz"))[0] == 2
