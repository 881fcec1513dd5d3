"""Warming up: a filled buffer, and a training that is left alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor

from relive import GAE, Collector, errors
from support import tagged_envs
from support.tagged_collections import (
    CARTPOLE,
    Edited,
    Torched,
    cartpoles,
    check_against_oracle,
    check_unbroken,
    discrete,
    every_mode,
    hide,
    make_buffer,
    policy,
    stored,
    truth,
)


@every_mode
@pytest.mark.parametrize("given", ["nothing", "policy", "envs"])
def test_warming_up_leaves_the_training_untouched(given: str, mode: AutoresetMode) -> None:
    collectors = []
    for warmed in (True, False):
        envs = cartpoles(mode)
        collector = Collector(envs, CARTPOLE, make_buffer(envs, 20), seed=3)
        for _ in range(2):
            collector.collect(13)
            if warmed:
                counters = collector.total_steps, collector.total_episodes, list(collector.returns)
                extra = make_buffer(envs, 25)
                options: dict[str, Any] = {"policy": {"policy": CARTPOLE}, "envs": {"envs": cartpoles(mode)}}.get(
                    given, {}
                )
                stats = collector.warm(extra, 25, seed=8, **options)
                assert extra.is_full
                assert stats.num_steps == len(extra)
                assert stats.num_episodes > 0
                assert counters == (collector.total_steps, collector.total_episodes, list(collector.returns))
                assert collector.buffer.steps == 13
            collector.buffer.clear()
        stats = collector.collect()
        collectors.append(collector)
    a, b = collectors
    for name in ("obs", "action", "reward", "terminated", "truncated", "value", "mask"):
        assert torch.equal(a.buffer[name], b.buffer[name]), name
    cut = a.buffer["truncated"] & ~a.buffer["terminated"]
    assert torch.equal(a.buffer["final_value"][cut], b.buffer["final_value"][cut])
    assert list(a.returns) == list(b.returns)
    assert a.total_steps == b.total_steps


@every_mode
def test_a_warm_buffer_holds_real_steps_in_the_training_envs_own_mode(mode: AutoresetMode) -> None:
    schedule = tagged_envs.cycle([(3, "truncated")], [(2, "terminated")])
    envs = tagged_envs.make_tagged(2, mode, schedule)
    collector = Collector(envs, policy, make_buffer(envs, 4), seed=0)
    extra = make_buffer(envs, 12)
    collector.warm(extra, 9, policy=policy, seed=6)
    assert extra.steps == 9
    rows = stored(extra)
    assert rows == truth(schedule, [len(mine) for mine in rows], seed=6)
    assert (~extra["mask"]).any() == (mode is AutoresetMode.NEXT_STEP)


@every_mode
def test_warming_up_again_adds_to_the_buffer_and_joins_no_two_episodes(mode: AutoresetMode) -> None:
    envs = tagged_envs.make_tagged(2, mode, tagged_envs.cycle([(7, "truncated")], [(5, "terminated")]))
    collector = Collector(envs, policy, make_buffer(envs, 4), seed=0)
    extra = make_buffer(envs, 12)
    collector.warm(extra, 9, policy=policy, seed=6)
    before = extra["obs"].clone()
    collector.warm(extra, 3, policy=policy, seed=7)
    assert extra.is_full
    assert torch.equal(extra["obs"][:9], before)
    check_unbroken(extra)
    extra.finish(GAE(gamma=0.9, lam=0.8))
    check_against_oracle(extra)


@every_mode
@pytest.mark.parametrize("played", [0, 5])
@pytest.mark.parametrize("wrap", [False, True])
def test_steps_of_a_warm_up_leave_the_collectors_own_rollout_unless_it_wraps(
    wrap: bool, played: int, mode: AutoresetMode
) -> None:
    envs = tagged_envs.make_tagged(2, mode, tagged_envs.cycle([(7, "truncated")], [(5, "terminated")]))
    collector = Collector(envs, policy, make_buffer(envs, 12, wrap=wrap), seed=0)
    rollout = collector.buffer
    if played:
        collector.collect(played)
    collector.warm(rollout, 4, policy=policy, seed=6)
    assert rollout.steps == 4 + played  # to be looked at
    total = collector.total_steps
    collector.collect(7)
    assert rollout.steps == (11 if wrap and not played else 12 if wrap else 7)
    own = rollout["mask"][-7:]
    assert collector.total_steps == total + own.sum()
    tags = tagged_envs.decode(rollout["obs"])
    assert (tags.step[-7] == 0).all()  # in new episodes
    assert wrap == (6 in tags.seed)
    assert (tags.seed[-7:] != 6).all()
    check_unbroken(rollout)
    rollout.finish(GAE(gamma=0.9, lam=0.8), partial=True)
    check_against_oracle(rollout)
    assert all(seq["is_start"][0].all() for seq in rollout.sequences(complete=True))


def test_warming_up_is_a_function_of_its_seed() -> None:
    envs = cartpoles(AutoresetMode.SAME_STEP)
    collector = Collector(envs, CARTPOLE, make_buffer(envs, 5), seed=3)

    def warm(seed: int | None) -> tuple[Tensor, Tensor]:
        extra = make_buffer(envs, 40)
        collector.warm(extra, 40, seed=seed)
        return extra["obs"], extra["action"]

    one, same, other = warm(1), warm(1), warm(2)
    assert torch.equal(one[0], same[0])
    assert torch.equal(one[1], same[1])
    assert not torch.equal(one[0][0], other[0][0])
    assert not torch.equal(one[1], other[1])
    assert not torch.equal(warm(None)[1], warm(None)[1])
    assert 0.3 < one[1].float().mean() < 0.7


def test_a_given_policy_warms_up_and_its_own_values_are_stored() -> None:
    envs = tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.always(3, "truncated"))
    collector = Collector(envs, policy, make_buffer(envs, 5), seed=0)
    extra = make_buffer(envs, 8)
    collector.warm(extra, 8, policy=lambda obs: policy(obs) | {"value": 5 + tagged_envs.tagged_value(obs)}, seed=0)
    assert torch.equal(extra["value"], 5 + tagged_envs.tagged_value(extra["obs"]))
    tag = tagged_envs.decode(extra["obs"])
    final = torch.as_tensor(5 + tagged_envs.value_of(tag._replace(step=tag.step + 1)), dtype=torch.float32)
    assert torch.equal(extra["final_value"][extra["truncated"]], final[extra["truncated"]])


@pytest.mark.parametrize("kind", ["env", "vector"])
def test_warming_up_keeps_wrappers_and_arguments_of_the_envs(kind: str) -> None:
    def make() -> gym.Env[Any, Any]:
        env = gym.make("CartPole-v1", max_episode_steps=6, sutton_barto_reward=True)
        return gym.wrappers.ClipReward(gym.wrappers.TimeLimit(env, 4), 0.25, 0.5)

    envs: Any = make() if kind == "env" else SyncVectorEnv([make, make], autoreset_mode=AutoresetMode.SAME_STEP)
    collector = Collector(envs, lambda obs: {"action": discrete(obs, 1), "value": obs[:, 0]}, make_buffer(envs, 8))
    extra = make_buffer(envs, 40)
    stats = collector.warm(extra, 40, seed=0)
    assert stats.episode_lengths == [4] * (10 if kind == "env" else 20)  # without the outer limit, 6
    assert (extra["reward"] == 0.25).all()  # without the argument 0.5, without the wrapper 0, without both 1


class Bare(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper that does not say how it was made."""


def shared_envs(wrap: Callable[[Any], Any]) -> tuple[list[tagged_envs.TaggedEnv], SyncVectorEnv]:
    inner = [tagged_envs.TaggedEnv(n, tagged_envs.always(3), check_actions=False) for n in range(2)]
    return inner, SyncVectorEnv([lambda env=env: wrap(env) for env in inner], autoreset_mode=AutoresetMode.SAME_STEP)


@pytest.mark.parametrize(
    "envs",
    [
        tagged_envs.TaggedEnv(0, tagged_envs.always(3)),
        Bare(gym.make("CartPole-v1")),
        Edited(tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.always(3)), hide),
        Torched(tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.always(3))),
    ],
    ids=["no spec", "a wrapper without arguments", "a vector wrapper", "a torch-native env"],
)
def test_envs_that_cannot_be_made_again_are_refused_with_the_way_out(envs: Any) -> None:
    collector = Collector(envs, policy, make_buffer(envs, 4))
    with pytest.raises(errors.EnvError, match=r"warm\(\.\.\., envs="):
        collector.warm(make_buffer(envs, 4), 4)


@pytest.mark.parametrize("wrap", [lambda env: env, Bare], ids=["as they are", "under a new wrapper"])
def test_envs_whose_makers_hand_out_the_training_envs_again_are_refused(wrap: Callable[[Any], Any]) -> None:
    inner, envs = shared_envs(wrap)
    collector = Collector(envs, policy, make_buffer(envs, 4), seed=0)
    collector.collect()
    before = [env.tag for env in inner]
    with pytest.raises(errors.EnvError, match=r"warm\(\.\.\., envs="):
        collector.warm(make_buffer(envs, 4), 4)
    assert [env.tag for env in inner] == before


class Closing(tagged_envs.TaggedEnv):
    """Keeps a list of the envs that are open."""

    open: list[Closing]

    def __init__(self, opened: list[Closing], env: int) -> None:
        super().__init__(env, tagged_envs.always(3), check_actions=False)
        opened.append(self)
        self.open = opened

    def close(self) -> None:
        self.open.remove(self)


def closing(opened: list[Closing], num_envs: int = 2) -> SyncVectorEnv:
    makers = [partial(Closing, opened, n) for n in range(num_envs)]
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


def fail(obs: Any) -> Any:
    raise RuntimeError("the policy failed")


def test_warming_up_closes_the_envs_it_made_and_not_those_it_was_given() -> None:
    opened: list[Closing] = []
    make = partial(closing, opened)
    collector = Collector(make, policy, make_buffer(make(), 4))
    training = list(opened)
    extra = make_buffer(collector.envs, 4)
    collector.warm(extra, 4)
    assert opened == training
    collector.warm(extra, 4, envs=make)
    assert opened == training
    own = make()
    collector.warm(extra, 4, envs=own)
    assert len(opened) == len(training) + 2
    with pytest.raises(RuntimeError, match="the policy failed"):
        collector.warm(extra, 4, policy=fail)
    assert len(opened) == len(training) + 2


def test_warming_up_closes_the_envs_it_made_though_they_are_of_no_use() -> None:
    opened: list[Closing] = []
    envs = closing(opened)
    collector = Collector(envs, policy, make_buffer(envs, 4))
    with pytest.raises(errors.EnvError, match="made for 2 envs, the vector env has 3"):
        collector.warm(make_buffer(envs, 4), 4, envs=partial(closing, opened, 3))
    assert len(opened) == 2


def test_a_warm_up_that_was_refused_changes_nothing_and_a_reset_does_not_keep_its_steps() -> None:
    envs = cartpoles(AutoresetMode.NEXT_STEP)
    collector = Collector(envs, CARTPOLE, make_buffer(envs, 12), seed=3)
    rollout = collector.buffer
    collector.collect(6)
    before = rollout["obs"].clone()
    with pytest.raises(errors.ParameterError, match="num_steps"):
        collector.warm(rollout, 0)
    collector.collect(6)
    assert rollout.is_full
    assert torch.equal(rollout["obs"][:6], before)
    rollout.clear()
    collector.warm(rollout, 5, seed=1)
    collector.reset(seed=4)
    assert collector.collect().num_steps > 20
    assert rollout.is_full
