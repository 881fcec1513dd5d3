"""Stable-Baselines3's own algorithms on its own buffers and on ours: what is learned on the one is on the other.

Whole trainings, with the figures of several seeds, are in `benchmarks/learn_sb3.py`.
"""

from __future__ import annotations

from copy import deepcopy
from importlib import import_module
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

ours: Any = import_module("relive.compat.stable_baselines3")
buffers: Any = import_module("stable_baselines3.common.buffers")
envs: Any = import_module("stable_baselines3.common.envs")
sb3: Any = import_module("stable_baselines3")
vec_env: Any = import_module("stable_baselines3.common.vec_env")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.parametrize("seed", range(2))]

QUICK: dict[str, Any] = {"learning_rate": 3e-3, "gamma": 0.9, "device": "cpu", "policy_kwargs": {"net_arch": [32]}}
DQN = QUICK | {
    "buffer_size": 2000, "learning_starts": 100, "exploration_fraction": 0.5, "target_update_interval": 100,
}  # fmt: skip


class Chain(gym.Env[Any, Any]):
    """Four steps, each with one right action of two; a wrong one ends it, the last right one brings the reward, 1."""

    observation_space: Any = gym.spaces.Box(0, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.seen(), {}

    def seen(self) -> Any:
        return np.eye(4, dtype=np.float32)[min(self.t, 3)]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        right = int(action) == self.t % 2
        self.t += 1
        return self.seen(), float(right and self.t == 4), not right or self.t == 4, False, {}


class Members(Chain):
    """The same with an observation in two members."""

    observation_space = gym.spaces.Dict({"first": gym.spaces.Discrete(4), "second": gym.spaces.Box(0, 1, (2,))})

    def seen(self) -> Any:
        at = min(self.t, 3)
        return {"first": at, "second": np.eye(2, dtype=np.float32)[at % 2]}


class Follow(gym.Env[Any, Any]):
    """The action is to be the number that is shown; every ten numbers a time limit cuts the episode off."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.show(), {}

    def show(self) -> Any:
        self.shown = self.np_random.uniform(-0.8, 0.8, 1).astype(np.float32)
        return self.shown

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = -float(np.abs(action - self.shown).item())
        self.t += 1
        return self.show(), reward, False, self.t == 10, {}


def score(model: Any, env: Any, episodes: int) -> float:
    """The mean return of the policy, acting greedily; with goals, the share of episodes that reach theirs."""
    total = 0.0
    for episode in range(episodes):
        obs, over = env.reset(seed=100 + episode)[0], False
        while not over:
            obs, reward, terminated, truncated, info = env.step(model.predict(obs, deterministic=True)[0])
            over = terminated or truncated
            total += 0 if "is_success" in info else reward
        total += info.get("is_success", 0)
    return total / episodes


def learned(algorithm: str, name: str, env: Any, steps: int, seed: int, **options: Any) -> list[float]:
    """What is reached on the host's class of a name, and on ours."""
    scores, hosts = [], sb3 if name == "HerReplayBuffer" else buffers
    kind = "rollout" if "Rollout" in name else "replay"
    options = {"policy": "MlpPolicy", "seed": seed} | options
    own, count = options.pop("buffer", {}), options.pop("envs", 1)
    for source, further in ((hosts, {}), (ours, {"seed": seed})):
        options |= {f"{kind}_buffer_class": getattr(source, name), f"{kind}_buffer_kwargs": own | further}
        fresh = deepcopy(options)  # the host notes things in the dictionaries it is given
        model = getattr(sb3, algorithm)(env=vec_env.DummyVecEnv([env] * count), **fresh).learn(steps)
        assert type(getattr(model, f"{kind}_buffer")) is getattr(source, name)
        scores.append(score(model, env(), 20))
    return scores


@pytest.mark.parametrize("name", ["ReplayBuffer", "NStepReplayBuffer"])
def test_dqn_learns_a_reward_at_the_end_of_four_steps(name: str, seed: int) -> None:
    n_steps = {"buffer": {"n_steps": 3, "gamma": 0.9}} if name == "NStepReplayBuffer" else {}
    assert learned("DQN", name, Chain, 4000, seed, **DQN, **n_steps) == [1.0, 1.0]


def test_dqn_learns_it_from_dictionaries(seed: int) -> None:
    options = DQN | {"policy": "MultiInputPolicy"}
    assert learned("DQN", "DictReplayBuffer", Members, 4000, seed, **options) == [1.0, 1.0]


@pytest.mark.parametrize("env", [Follow, "CartPole-v1"])
def test_a_training_sees_what_the_hosts_buffer_holds_each_row_equally_often(env: Any, seed: int) -> None:
    """Beside ours, which wraps four times, the host's gets the same steps; the rows drawn are then looked up there."""
    drawn: list[Any] = []

    class Beside(ours.ReplayBuffer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            kwargs.pop("seed")
            self.host, self.steps = buffers.ReplayBuffer(*args, **kwargs), 0

        def add(self, *step: Any) -> None:
            super().add(*step)
            self.host.add(*step)
            self.steps += 1

        def _samples(self, batch: Any, env: Any) -> Any:
            found, index = super()._samples(batch, env), batch["index"].numpy()
            for own, theirs in zip(found, self.host._get_samples(index % self.buffer_size), strict=True):
                assert own is theirs is None or (own.dtype is theirs.dtype and own.tolist() == theirs.tolist())
            if self.full:
                drawn.append(self.steps - 1 - index)
            return found

    options = deepcopy(QUICK) | {"buffer_size": 500, "learning_starts": 100, "seed": seed}
    own = {"replay_buffer_class": Beside, "replay_buffer_kwargs": {"seed": seed}}
    algorithm, made = (sb3.DQN, env) if isinstance(env, str) else (sb3.SAC, env())
    algorithm("MlpPolicy", made, **options, **own).learn(2000)
    counts, _ = np.histogram(np.concatenate(drawn), 20, (0, 500))
    expected = counts.sum() / 20
    assert len(drawn) > 300
    assert ((counts - expected) ** 2 / expected).sum() < 60  # by chance: once in 200,000 times


@pytest.mark.parametrize("algorithm", ["PPO", "A2C"])
@pytest.mark.parametrize("name", ["RolloutBuffer", "DictRolloutBuffer"])
def test_ppo_and_a2c_learn_it(algorithm: str, name: str, seed: int) -> None:
    nested = name == "DictRolloutBuffer"
    options = QUICK | {"policy": "MultiInputPolicy" if nested else "MlpPolicy", "n_steps": 32, "envs": 8}
    if algorithm == "PPO":
        options |= {"batch_size": 64, "n_epochs": 4}
    assert learned(algorithm, name, Members if nested else Chain, 8000, seed, **options) == [1.0, 1.0]


@pytest.mark.parametrize("env", [Follow, "CartPole-v1"])
@pytest.mark.parametrize("algorithm", ["PPO", "A2C"])
def test_updates_by_whole_rollouts_lead_to_the_same_policy(algorithm: str, env: Any, seed: int) -> None:
    """Then the order within a batch does not matter, and all else is drawn from generators that no buffer reads."""
    options: dict[str, Any] = {"n_steps": 16, "device": "cpu", "seed": seed}
    if algorithm == "PPO":
        options |= {"batch_size": 64, "n_epochs": 3}
    found = []
    for source in (buffers, ours):
        vec = sb3.common.env_util.make_vec_env(env, 4)
        model = getattr(sb3, algorithm)("MlpPolicy", vec, rollout_buffer_class=source.RolloutBuffer, **options)
        before = model.policy.action_net.weight.detach().clone()
        model.learn(64 * 12)
        assert not np.allclose(before, model.policy.action_net.weight.detach(), atol=1e-3)
        found.append([value.numpy() for value in model.policy.state_dict().values()])
    for host, mine in zip(*found, strict=True):
        np.testing.assert_allclose(mine, host, atol=1e-4)  # they add up in another order


def test_sac_follows_what_it_is_shown(seed: int) -> None:
    options = QUICK | {"gamma": 0.5, "learning_starts": 100, "buffer_size": 2000, "batch_size": 64}
    assert min(learned("SAC", "ReplayBuffer", Follow, 800, seed, **options)) > -10 * 0.2  # by chance about -10 * 0.6


def test_dqn_with_hindsight_flips_bits(seed: int) -> None:
    def bits() -> Any:
        return envs.BitFlippingEnv(n_bits=5, max_steps=5)

    options = DQN | {"policy": "MultiInputPolicy", "gradient_steps": 2, "buffer_size": 5000}
    assert min(learned("DQN", "HerReplayBuffer", bits, 2500, seed, **options)) >= 0.9
