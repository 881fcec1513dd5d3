"""Each trap against the real package: first the peer does the wrong thing, then relive does the right one.

A test that fails in its first half says that the peer has been mended: the trap can go.
"""

from __future__ import annotations

import itertools
from importlib import import_module
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from torch import Tensor, nn

from relive import GAE, Collector, Field, MonteCarlo, RolloutBuffer, Schema

agilerl: Any = import_module("agilerl.components.rollout_buffer")
rsl_rl: Any = import_module("rsl_rl.storage")
rsl_rl_algorithms: Any = import_module("rsl_rl.algorithms")
stable_baselines3: Any = import_module("stable_baselines3")

OBS = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
BOX = gym.spaces.Box(-1, 1, (1,), np.float32)


def agilerl_advantages(reward: Any, done: Any, value: Any, last_value: float, **options: Any) -> np.ndarray:
    """One env's advantages by AgileRL's buffer, fed as its own collector feeds it.

    That one stores ``done = terminated | truncated`` of the step itself, and passes ``last_done = terminated``.
    """
    buffer = agilerl.RolloutBuffer(len(reward), OBS, BOX, 1, **options)
    for r, d, v in zip(reward, done, value, strict=True):
        obs = np.zeros((1, 1), np.float32)
        buffer.add(obs, obs, np.array([r]), np.array([d]), np.array([v]), np.zeros(1), next_obs=obs)
    buffer.compute_returns_and_advantages(np.array([last_value]), np.array([False]))
    return buffer.buffer["advantages"].numpy().reshape(-1)


def relive_rollout(reward: Any, value: Any, last_value: float, **ends: Any) -> RolloutBuffer:
    """The same of one env, as relive stores it."""
    schema = Schema.from_spaces(OBS, BOX, value=())
    buffer = RolloutBuffer(schema, len(reward), 1)
    zeros = [False] * len(reward)
    for t, (r, v) in enumerate(zip(reward, value, strict=True)):
        flags = {name: [ends.get(name, zeros)[t]] for name in ("terminated", "truncated")}
        final = {"final_value": [ends["final_value"][t]]} if "final_value" in ends else {}
        buffer.add(obs=np.zeros((1, 1)), action=np.zeros((1, 1)), reward=[r], value=[float(v)], **flags, **final)
    buffer.set_last(value=[last_value])
    return buffer


def test_agilerl_cuts_gae_one_step_late_and_the_last_reward_reaches_no_earlier_step() -> None:
    reward, done, value = [0, 0, 1, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 5, 0]
    theirs = agilerl_advantages(reward, np.array(done, bool), value, 0.0, gamma=0.99, gae_lambda=0.95)
    np.testing.assert_allclose(theirs, [0, 0, 1.2475, -5, 0], atol=1e-3)  # 1.2475: the next episode's value leaks in

    ours = relive_rollout(reward, value, 0.0, terminated=np.array(done, bool)).finish(GAE(gamma=0.99, lam=0.95))
    np.testing.assert_allclose(ours["advantage"].flatten(), [0.88454, 0.9405, 1, -5, 0], atol=1e-5)


def test_agilerls_two_estimators_read_the_same_flags_in_two_ways() -> None:
    reward, done, value = [0, 0, 1, 0, 0], np.array([0, 0, 1, 0, 0], bool), [0, 0, 0, 5, 0]
    one = agilerl_advantages(reward, done, value, 0.0, gamma=0.99, gae_lambda=1.0)
    other = agilerl_advantages(reward, done, value, 0.0, gamma=0.99, use_gae=False)
    assert np.abs(one - other).max() > 0.9  # with λ = 1 the two are one and the same

    rollout = relive_rollout(reward, value, 0.0, terminated=done)
    gae = rollout.finish(GAE(gamma=0.99, lam=1.0))["advantage"].clone()
    monte_carlo = rollout.finish(MonteCarlo(gamma=0.99))["advantage"]
    torch.testing.assert_close(gae, monte_carlo)
    np.testing.assert_allclose(gae.flatten(), other, atol=1e-6)


@pytest.mark.parametrize("use_gae", [True, False])
def test_agilerl_treats_a_time_limit_as_the_end_of_the_world(use_gae: bool) -> None:
    """Everything is worth 10 for ever and nothing is rewarded: no action has an advantage, time limit or not."""
    reward, value, cut = [0.0] * 4, [10.0] * 4, np.array([0, 1, 0, 0], bool)
    theirs = agilerl_advantages(reward, cut, value, 10.0, gamma=1.0, gae_lambda=1.0, use_gae=use_gae)
    assert theirs[0] == -10

    ours = relive_rollout(
        reward, value, 10.0, truncated=cut, final_value=[float("nan"), 10, float("nan"), float("nan")]
    )
    assert not ours.finish(GAE(gamma=1.0, lam=1.0))["advantage"].any()
    assert not ours.finish(MonteCarlo(gamma=1.0))["advantage"].any()


class Count(gym.Env[Any, Any]):
    """Observes how many steps its episode has had; rewarded with 1; the time limit is the only end."""

    def __init__(self, limit: int = 3) -> None:
        self.observation_space = OBS
        self.action_space = gym.spaces.Discrete(2)
        self._limit, self._count = limit, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._count += 1
        return np.full(1, self._count, np.float32), 1.0, False, self._count == self._limit, {}


class Model(nn.Module):
    """What rsl_rl's PPO asks of an actor and of a critic: the value of an observation is ten times itself."""

    is_recurrent = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(10.0))
        self.output_distribution_params: tuple[Tensor, ...] = ()

    def forward(self, obs: TensorDict, stochastic_output: bool = False) -> Tensor:
        out = obs["policy"] * self.weight
        self.output_distribution_params = (out,)
        return out

    def get_hidden_state(self) -> None:
        return None

    def get_output_log_prob(self, actions: Tensor) -> Tensor:
        return actions.sum(-1)

    def reset(self, dones: Any = None, hidden_state: Any = None) -> None:
        pass


def rsl_rl_rollout(num_steps: int, gamma: float, lam: float) -> tuple[Any, list[float]]:
    """One ``Count`` env through rsl_rl's PPO, which is told of the time-outs; its storage, and the env's rewards."""
    env = Count()
    obs, _ = env.reset()

    def given() -> TensorDict:
        return TensorDict({"policy": torch.as_tensor(obs).reshape(1, 1)}, [1])

    storage = rsl_rl.RolloutStorage("rl", 1, num_steps, given(), (1,))
    ppo = rsl_rl_algorithms.PPO(
        Model(), Model(), storage, gamma=gamma, lam=lam, normalize_advantage_per_mini_batch=True
    )
    rewards: list[float] = []
    with torch.no_grad():
        for _ in range(num_steps):
            ppo.act(given())
            obs, reward, _, timeout, _ = env.step(0)
            obs = env.reset()[0] if timeout else obs
            rewards.append(reward)
            flag = torch.tensor([timeout])
            ppo.process_env_step(given(), torch.tensor([reward]), flag, {"time_outs": flag})
        ppo.compute_returns(given())
    return storage, rewards


def relive_count(num_steps: int, gamma: float, lam: float, value: Any) -> RolloutBuffer:
    """The same env through a collector of relive."""
    envs = SyncVectorEnv([Count], autoreset_mode=AutoresetMode.SAME_STEP)
    buffer = RolloutBuffer(Schema.from_env(envs, value=()), num_steps, 1)
    act = torch.zeros(1, dtype=torch.int64)
    Collector(envs, lambda obs: {"action": act, "value": value(obs)}, buffer, seed=0).collect()
    return buffer.finish(GAE(gamma=gamma, lam=lam))


def test_rsl_rl_values_a_time_out_by_the_state_before_the_step() -> None:
    storage, _ = rsl_rl_rollout(5, gamma=0.9, lam=0.0)
    theirs = storage.advantages.flatten()
    # the step from 2, of value 20, was cut off in 3, of value 30: the advantage is 1 + 0.9 * 30 - 20
    assert theirs[2].item() == pytest.approx(1 + 0.9 * 20 - 20)

    ours = relive_count(5, gamma=0.9, lam=0.0, value=lambda obs: 10 * obs[:, 0])["advantage"].flatten()
    assert ours[2].item() == pytest.approx(1 + 0.9 * 30 - 20)
    others = [0, 1, 3, 4]
    torch.testing.assert_close(ours[others], theirs[others])


def test_rsl_rl_edits_the_rewards_it_stores() -> None:
    storage, rewards = rsl_rl_rollout(5, gamma=0.9, lam=0.95)
    assert rewards == [1.0] * 5
    assert storage.rewards.flatten().tolist() == [1, 1, 19, 1, 1]

    assert relive_count(5, 0.9, 0.95, lambda obs: 10 * obs[:, 0])["reward"].flatten().tolist() == rewards


def test_stable_baselines3_edits_the_rewards_to_get_the_advantages_that_relive_gets_without() -> None:
    model = stable_baselines3.PPO("MlpPolicy", Count(), n_steps=8, batch_size=8, gamma=0.9, gae_lambda=0.8, seed=0)
    _, callback = model._setup_learn(8, None)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, 8)
    theirs = model.rollout_buffer
    edited = theirs.rewards.flatten() != 1
    assert np.flatnonzero(edited).tolist() == [2, 5]  # where the time limit struck

    ours = relive_count(8, 0.9, 0.8, lambda obs: model.policy.predict_values(obs).flatten())
    assert (ours["reward"] == 1).all()
    assert ours["truncated"].flatten().numpy().nonzero()[0].tolist() == [2, 5]
    np.testing.assert_allclose(ours["advantage"], theirs.advantages, rtol=1e-4, atol=1e-6)


def test_rsl_rl_serves_the_same_minibatches_every_epoch_and_drops_the_same_rows_always() -> None:
    obs = TensorDict({"policy": torch.zeros(4, 1)}, [4])
    storage = rsl_rl.RolloutStorage("rl", 4, 8, obs, (1,))
    schema = Schema.from_spaces(OBS, BOX, value=())
    ours = RolloutBuffer(schema, 8, 4, seed=0)
    for t in range(8):
        transition = rsl_rl.RolloutStorage.Transition()
        rows = torch.arange(t * 4, t * 4 + 4).float()
        transition.observations = TensorDict({"policy": rows[:, None]}, [4])
        transition.actions, transition.values = torch.zeros(4, 1), torch.zeros(4, 1)
        transition.rewards, transition.dones = torch.zeros(4), torch.zeros(4)
        transition.actions_log_prob, transition.distribution_params = torch.zeros(4), (torch.zeros(4, 1),)
        storage.add_transition(transition)
        flags = dict.fromkeys(("terminated", "truncated"), torch.zeros(4, dtype=torch.bool))
        ours.add(obs=rows[:, None], action=torch.zeros(4, 1), reward=[0.0] * 4, value=[0.0] * 4, **flags)

    def epochs(served: list[list[float]]) -> list[list[list[float]]]:
        return [served[i : i + 5] for i in range(0, len(served), 5)]

    served = [batch.observations["policy"].flatten().tolist() for batch in storage.mini_batch_generator(5, 4)]
    theirs = epochs(served)
    assert theirs == [theirs[0]] * 4
    for epoch in theirs:
        assert sorted(itertools.chain(*epoch)) == list(
            range(30)
        )  # never rows 30 and 31: the last step of the last two envs

    served = [batch["obs"].flatten().tolist() for batch in ours.minibatches(num_batches=5, epochs=4)]
    mine = epochs(served)
    for epoch in mine:
        assert sorted(itertools.chain(*epoch)) == list(range(32))
    compositions = {tuple(frozenset(batch) for batch in epoch) for epoch in mine}
    assert len(compositions) == 4
    dropping = [batch["obs"].flatten().tolist() for batch in ours.minibatches(6, epochs=4, drop_last=True)]
    missing = {frozenset(range(32)) - set(itertools.chain(*epoch)) for epoch in epochs(dropping)}
    assert {len(rows) for rows in missing} == {2}
    assert len(missing) > 1


def test_agilerl_stores_images_and_discrete_actions_as_float32() -> None:
    image, action = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), gym.spaces.Discrete(2**24 + 2)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 84, 84), np.uint8)
    ids = np.array([2**24 + 1, 3])
    theirs = agilerl.RolloutBuffer(3, image, action, 2)
    theirs.add(pixels, ids, np.zeros(2), np.zeros(2), np.zeros(2), np.zeros(2), next_obs=pixels)
    stored = theirs.buffer["observations"]
    assert stored.dtype is torch.float32
    assert theirs.buffer["actions"].dtype is torch.float32
    assert int(theirs.buffer["actions"][0, 0].item()) == 2**24  # another action than the one taken

    ours = RolloutBuffer(Schema.from_spaces(image, action), 3, 2)
    zeros = np.zeros(2, bool)
    ours.add(obs=pixels, action=ids, reward=[0.0, 0.0], terminated=zeros, truncated=zeros)
    kept = ours["obs"]
    assert kept.dtype is torch.uint8
    assert np.array_equal(kept[0], pixels)
    assert ours["action"].dtype is torch.int64
    assert ours["action"][0].tolist() == ids.tolist()
    images = ("observations", "next_observations")  # PPO never reads the second
    assert sum(theirs.buffer[name][0].nbytes for name in images) == 8 * kept[0].nbytes


def test_agilerls_whole_batch_is_the_storage_itself_and_relives_is_a_copy() -> None:
    theirs = agilerl.RolloutBuffer(3, OBS, BOX, 2)
    ours = RolloutBuffer(Schema({"obs": Field((1,)), "reward": Field()}), 3, 2, seed=0)
    for _ in range(3):
        obs = np.full((2, 1), 7, np.float32)
        theirs.add(obs, obs, np.ones(2), np.zeros(2), np.zeros(2), np.zeros(2), next_obs=obs)
        ours.add(obs=obs, reward=np.ones(2))
    batch = theirs.get_tensor_batch()
    batch["observations"].zero_()
    assert not theirs.buffer["observations"].any()

    for batch in (ours.flat(), ours.sample(6), *ours.minibatches(6), *ours.minibatches(2)):
        batch["obs"].zero_()
        batch["reward"].zero_()
    assert (ours["obs"] == 7).all()
    assert (ours["reward"] == 1).all()
