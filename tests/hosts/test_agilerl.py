"""AgileRL's own PPO and its own collector, on its rollout buffer and on ours."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from relive.compat.agilerl import BPTTSequenceType, RolloutBuffer

ppo: Any = import_module("agilerl.algorithms.ppo")
collectors: Any = import_module("agilerl.rollouts.on_policy")
wrappers: Any = import_module("agilerl.wrappers.agent")
AGILERLS = ppo.RolloutBuffer

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.parametrize("seed", range(3)),
]


class Chain(gym.Env[Any, Any]):
    """Four steps, each with one right action of two; the reward, 1 if all were right, comes with the last."""

    observation_space = gym.spaces.Box(0, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.right = 0, True
        return self.observe(), {}

    def observe(self) -> Any:
        return np.eye(4, dtype=np.float32)[min(self.t, 3)]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.right &= int(action) == self.t % 2
        self.t += 1
        over = self.t == 4
        return self.observe(), float(over and self.right), over, False, {}


class Recall(gym.Env[Any, Any]):
    """A bit is shown once; after two blank steps the action has to repeat it."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.bit = 0, int(self.np_random.integers(2))
        return np.array([2 * self.bit - 1, 0], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        over = self.t == 3
        right = float(over and int(action) == self.bit)
        return np.array([0, float(self.t == 2)], np.float32), right, over, False, {}


def trained(monkeypatch: pytest.MonkeyPatch, buffer: Any, env: Any, seed: int, updates: int, **options: Any) -> float:
    """The mean score of the last five rollouts of AgileRL's PPO."""
    monkeypatch.setattr(ppo, "RolloutBuffer", buffer)
    wrap = options.pop("wrap", lambda agent: agent)
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - AgileRL's shuffles read it
    envs = gym.vector.SyncVectorEnv([env] * 8, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    config = {"rollout_buffer_config": {"seed": seed}} if buffer is RolloutBuffer else {}
    sizes = {"num_envs": 8, "learn_step": 256, "batch_size": 64, "update_epochs": 4, "lr": 1e-3}
    agent = ppo.PPO(env.observation_space, env.action_space, **sizes | config | options)
    assert type(agent.rollout_buffer) is buffer
    player = wrap(agent)
    recurrent = options.get("recurrent", False)
    collect = collectors.collect_rollouts_recurrent if recurrent else collectors.collect_rollouts
    names, last, scores = ("last_obs", "last_done", "last_scores", "last_info"), [None] * 4, []
    envs.reset(seed=seed)
    for _ in range(updates):
        done, *last = collect(agent, envs, **dict(zip(names, last, strict=True)))
        player.learn()
        scores.append(np.mean(done))
    return float(np.mean(scores[-5:]))


def test_a_reward_at_the_end_of_four_steps_is_learned_on_our_buffer_and_not_on_agilerls(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    assert trained(monkeypatch, AGILERLS, Chain, seed, 40) < 0.5
    assert trained(monkeypatch, RolloutBuffer, Chain, seed, 40) > 0.95


@pytest.mark.parametrize("kind", [kind.name for kind in BPTTSequenceType])
def test_the_recurrent_ppo_remembers_on_our_buffer(monkeypatch: pytest.MonkeyPatch, seed: int, kind: str) -> None:
    lstm = {"encoder_config": {"hidden_state_size": 32}, "latent_dim": 32}
    types: Any = import_module("agilerl.typing")
    options: dict[str, Any] = {"recurrent": True, "max_seq_len": 8, "net_config": lstm, "lr": 3e-3}
    options["bptt_sequence_type"] = types.BPTTSequenceType[kind]
    assert trained(monkeypatch, RolloutBuffer, Recall, seed, 40, **options) > 0.9


def test_observations_are_normalised_in_place(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    def wrapped(agent: Any) -> Any:
        return wrappers.RSNorm(agent)

    assert trained(monkeypatch, RolloutBuffer, Chain, seed, 40, wrap=wrapped) > 0.9
