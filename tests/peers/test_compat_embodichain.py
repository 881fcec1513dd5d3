"""relive.compat.embodichain beside EmbodiChain itself: the same rollouts in both, and its algorithms on ours."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

import relive.compat.embodichain as ours
from peers.embodichain_host import host

theirs, algo, collector, policies = (host(name) for name in ("buffer", "algo", "collector", "policies"))

N, T, OBS, ACTIONS = 8, 6, 3, 2
CPU = torch.device("cpu")


SIZES = {"critic_obs_dim": 5, "distribution_param_dim": ACTIONS}


def collect(buffer: Any, seed: int = 0, done: float = 0.2, cut: float = 0.0) -> TensorDict:
    """Random steps; those of ``cut`` that do not terminate meet a time limit."""
    generator = torch.Generator().manual_seed(seed)
    rollout = buffer.start_rollout()
    rollout["obs"].copy_(torch.rand((N, T + 1, OBS), generator=generator))
    rollout["value"].copy_(torch.rand((N, T + 1), generator=generator))
    if "critic_obs" in rollout.keys():
        rollout["critic_obs"].copy_(torch.rand(rollout["critic_obs"].shape, generator=generator))
    for t in range(T):
        for name in ("action_mean", "action_std"):
            if name in rollout.keys():
                rollout[name][:, t] = torch.rand((N, ACTIONS), generator=generator)
        for name in ("action", "sample_log_prob", "reward"):
            rollout[name][:, t] = torch.rand(rollout[name][:, t].shape, generator=generator)
        rollout["terminated"][:, t] = torch.rand(N, generator=generator) < done
        rollout["truncated"][:, t] = (torch.rand(N, generator=generator) < cut) & ~rollout["terminated"][:, t]
        rollout["done"][:, t] = rollout["terminated"][:, t] | rollout["truncated"][:, t]
    buffer.add(rollout)
    return rollout


def both(**sizes: int) -> tuple[Any, Any]:
    return tuple(module.RolloutBuffer(N, T, OBS, ACTIONS, CPU, **sizes) for module in (ours, theirs))


def assert_same(mine: TensorDict, its: TensorDict) -> None:
    """Equal in what EmbodiChain's has; ours may have more."""
    assert mine.batch_size == its.batch_size
    for name in its.keys():
        assert mine[name].dtype is its[name].dtype, name
        assert torch.equal(mine[name], its[name]), name


def test_the_constructors_show_the_same_arguments() -> None:
    mine, its = (inspect.signature(module.RolloutBuffer).parameters for module in (ours, theirs))
    assert list(mine) == list(its)
    assert all(mine[name].default in (its[name].default, "cpu") for name in its)


@pytest.mark.parametrize("sizes", [{}, SIZES, {"distribution_param_dim": None, "critic_obs_dim": 5}])
def test_the_rollout_and_what_comes_out_of_it_are_the_same(sizes: Any) -> None:
    mine, its = both(**sizes)
    for seed in (0, 1):
        a, b = (collect(buffer, seed) for buffer in (mine, its))
        assert_same(a, b)
        for flatten in (False, True):
            assert_same(ours.transition_view(a, flatten), theirs.transition_view(b, flatten))
        assert_same(mine.get(), its.get())


def test_an_epoch_of_minibatches_holds_the_same_rows_in_batches_of_the_same_sizes() -> None:
    found = []
    for buffer, module in zip(both(), (ours, theirs), strict=True):
        collect(buffer)
        batches = list(module.iterate_minibatches(buffer.get(), 10, CPU))
        rows = sorted(
            torch.cat([torch.cat([b["obs"], b["action"], b["next_value"][:, None]], 1) for b in batches]).tolist()
        )
        found.append(([len(b["obs"]) for b in batches], rows))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["empty", "taken", "full", "foreign", "shape"])
def test_the_same_calls_raise_the_same_errors(name: str) -> None:
    raised = []
    for buffer in both():
        if name != "empty":
            collect(buffer)
        if name in ("taken", "shape", "foreign"):
            buffer.get(flatten=False)
        if name == "shape":
            buffer.buffer["value"] = torch.zeros(N, T + 1, 1)
        calls = {
            "empty": buffer.get,
            "taken": buffer.get,
            "full": buffer.start_rollout,
            "foreign": lambda b=buffer: b.add(b.buffer.clone()),
            "shape": lambda b=buffer: b.add(b.buffer),
        }
        with pytest.raises((RuntimeError, ValueError)) as error:
            calls[name]()
        raised.append((isinstance(error.value, RuntimeError), str(error.value)))
    assert raised[0] == raised[1]


def test_gae_is_the_same_where_no_step_was_truncated() -> None:
    rollouts = [collect(buffer) for buffer in both()]
    mine, its = (f(r, 0.97, 0.9) for f, r in zip((ours.compute_gae, algo.compute_gae), rollouts, strict=True))
    torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)
    for name in ("advantage", "return"):
        torch.testing.assert_close(rollouts[0][name], rollouts[1][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first", [True, False])
def test_group_advantages_are_those_of_grpo(first: bool) -> None:
    mine, its = (collect(buffer) for buffer in both())
    cfg = algo.GRPOCfg(device="cpu", gamma=0.9, group_size=4, kl_coef=0.0, truncate_at_first_done=first)
    grpo = algo.GRPO(cfg, nn.Linear(1, 1))
    returns, mask = grpo._compute_step_returns_and_mask(its["reward"][:, :-1], its["done"][:, :-1])
    expected = grpo._compute_step_group_advantages(returns, mask)
    advantage, found = ours.compute_group_advantage(mine, 0.9, 4, truncate_at_first_done=first)
    assert torch.equal(found, mask)
    torch.testing.assert_close(mine["seq_return"][:, :-1], returns, rtol=1e-5, atol=1e-6)
    # where all of a group are alike, and where one is left, their float32 mean is a little off and eps blows that up
    torch.testing.assert_close(advantage, expected, rtol=1e-3, atol=1e-3)


def test_gae_is_the_same_with_time_limits_that_are_valued_by_the_observation_before_them() -> None:
    rollouts = [collect(buffer, cut=0.3) for buffer in both()]
    assert bool(rollouts[0]["truncated"].any())
    mine = ours.compute_gae(rollouts[0], 0.97, 0.9, truncation="own_value")
    torch.testing.assert_close(mine, algo.compute_gae(rollouts[1], 0.97, 0.9), rtol=1e-5, atol=1e-6)


# -- where EmbodiChain is wrong ---------------------------------------------------------------------------------------


def test_embodichain_values_a_time_limit_by_the_observation_before_it_and_ours_by_the_one_it_ended_on() -> None:
    """Values fall from 10 to 0 along an episode that is never rewarded; the limit is met on the way, at 6."""
    rollouts = [collect(buffer, done=0.0) for buffer in both()]
    for rollout in rollouts:
        rollout["reward"].zero_()
        rollout["value"].copy_(torch.tensor([10.0, 8, 10, 8, 6, 4, 2]).expand(N, T + 1))
        rollout["truncated"][:, 1] = rollout["done"][:, 1] = True
    assert (algo.compute_gae(rollouts[1], 1.0, 1.0)[1][:, 1] == 8).all()
    with pytest.raises(ValueError, match="has no final value"):
        ours.compute_gae(rollouts[0], 1.0, 1.0)
    rollouts[0]["final_value"][:, 1] = 6
    assert (ours.compute_gae(rollouts[0], 1.0, 1.0)[1][:, 1] == 6).all()
    assert (ours.compute_gae(rollouts[0], 1.0, 1.0, truncation="terminal")[1][:, 1] == 0).all()


def test_embodichain_bootstraps_a_terminal_that_is_truncated_too_and_ours_does_not() -> None:
    rollouts = [collect(buffer, done=0.0) for buffer in both()]
    for rollout in rollouts:
        rollout["value"].fill_(10)
        rollout["reward"].zero_()
        for name in ("terminated", "truncated", "done"):
            rollout[name][:, 1] = True
    assert (algo.compute_gae(rollouts[1], 1.0, 1.0)[1][:, 1] == 10).all()
    for truncation in ("bootstrap", "own_value", "terminal"):
        assert (ours.compute_gae(rollouts[0], 1.0, 1.0, truncation=truncation)[1][:, 1] == 0).all()


def test_embodichain_drops_fields_that_it_does_not_know_and_ours_serves_them() -> None:
    for buffer, module, kept in zip(both(), (ours, theirs), (True, False), strict=True):
        rollout = collect(buffer)
        rollout["goal"] = torch.rand(N, T + 1, 2)
        assert ("goal" in module.transition_view(rollout).keys()) is kept


def test_embodichain_takes_a_rollout_that_nobody_wrote_and_ours_does_not() -> None:
    mine, its = both()
    its.add(its.start_rollout())
    assert its.is_full()
    with pytest.raises(RuntimeError, match="the reward of step 0 of env 0 is missing"):
        mine.add(mine.start_rollout())


def test_embodichains_flat_rollout_of_one_env_is_the_storage_and_ours_a_copy() -> None:
    for module, copied in ((theirs, False), (ours, True)):
        buffer = module.RolloutBuffer(1, T, OBS, ACTIONS, CPU)
        rollout = buffer.start_rollout()
        rollout["reward"][:, :T] = 1
        buffer.add(rollout)
        buffer.get()["reward"].zero_()
        assert bool(buffer.buffer["reward"].any()) is copied


# -- EmbodiChain's own training on our rollouts -----------------------------------------------------------------------


class Task:
    """Say the number that is shown; episodes are 4 steps long, and every env of a group is shown the same."""

    num_envs = 32

    def __init__(self) -> None:
        self._generator, self._time = torch.Generator().manual_seed(0), 0

    def reset(self) -> tuple[Any, dict[str, Any]]:
        shown = torch.rand(self.num_envs // 4, generator=self._generator).repeat_interleave(4)
        self._cue = shown[:, None] * 2 - 1
        return self._obs(), {}

    def _obs(self) -> TensorDict:
        return TensorDict({"cue": self._cue}, [self.num_envs])

    def step(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        reward = -(action - self._cue).square().sum(1)
        self._time += 1
        done = torch.full((self.num_envs,), self._time % 4 == 0)
        if done[0]:
            self.reset()
        return self._obs(), reward, done, torch.zeros_like(done), {}


def policy() -> Any:
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)) for _ in range(2)]
    return policies.ActorCritic(1, 1, CPU, *nets)


def learn(name: str, module: Any, updates: int) -> tuple[float, float]:
    """The mean reward of the first and the last rollouts."""
    options: dict[str, Any] = {"batch_size": 128, "gamma": 0.5, "n_epochs": 5}
    options["optimizer"] = {"name": "adam", "learning_rate": 5e-3, "kwargs": {}}
    agent = policy()
    algorithm = algo.build_algo(name, options, agent, CPU)
    source = collector.SyncCollector(Task(), agent, CPU, reset_every_rollout=name == "grpo")
    buffer = module.RolloutBuffer(Task.num_envs, 8, 1, 1, CPU, distribution_param_dim=1)
    rewards = []
    for _ in range(updates):
        buffer.add(source.collect(8, buffer.start_rollout()))
        rollout = buffer.get(flatten=False)
        rewards.append(rollout["reward"][:, :-1].mean().item())
        algorithm.update(rollout)
    return rewards[0], sum(rewards[-5:]) / 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_embodichains_algorithms_learn_on_our_rollouts_as_well_as_on_their_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, its = learn(name, theirs, 60)
    _, buffer_alone = learn(name, ours, 60)
    module = host(f"algo.{name}")
    for function in ("transition_view", "iterate_minibatches", "compute_gae"):
        if hasattr(module, function):
            monkeypatch.setattr(module, function, getattr(ours, function))
    _, everything = learn(name, ours, 60)
    print(f"{name}: {first:.3f} at first, {its:.3f} its own, {buffer_alone:.3f} our buffer, {everything:.3f} all ours")
    assert its > first / 2
    assert min(buffer_alone, everything) > its - 0.1


@pytest.mark.parametrize("full", [False, True])
def test_a_buffer_of_embodichain_becomes_ours_with_its_rollout(full: bool) -> None:
    its = theirs.RolloutBuffer(N, T, OBS, ACTIONS, CPU, **SIZES)
    rollout = collect(its)
    rollout["advantage"] = torch.rand(N, T + 1)
    if not full:
        its.get()
    made = ours.RolloutBuffer.from_original(its)
    assert made.is_full() is full
    assert_same(made.buffer, rollout)
    if full:
        assert_same(made.get(), its.get())
    collect(made, 1)  # the next rollout has no advantages
    assert "advantage" not in made.buffer.keys()
