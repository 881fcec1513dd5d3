"""skrl's own agents on its memory and on ours: to the last bit the same weights, where its memory is right."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from relive.compat.skrl import RandomMemory

theirs: Any = import_module("skrl.memories.torch")
agents: Any = import_module("skrl.agents.torch")
envs: Any = import_module("skrl.envs.wrappers.torch")
models: Any = import_module("skrl.models.torch")
trainers: Any = import_module("skrl.trainers.torch")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.parametrize("seed", range(2))]

N, HIDDEN, LENGTH = 4, 8, 4


class Follow(gym.Env[Any, Any]):
    """The action is to be the number that is shown; every five to nine numbers an episode ends, in one of two ways."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(5, 10))
        return self.show(), {}

    def show(self) -> Any:
        self.shown = self.np_random.uniform(-0.8, 0.8, 2).astype(np.float32)
        return self.shown

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = -float(abs(action[0] - self.shown[0]))
        self.left -= 1
        over, cut = self.left == 0, self.shown[1] > 0
        return self.show(), reward, bool(over and not cut), bool(over and cut), {}


def seeded() -> Any:
    vec = gym.vector.SyncVectorEnv([Follow] * N, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    return envs.wrap_env(vec, verbose=False)


class Recurrent(models.Model):
    """A GRU, cut where an episode ended, as skrl's examples have it; without states it is a plain layer."""

    def __init__(self, env: Any, inputs: int, outputs: int, recurrent: bool) -> None:
        models.Model.__init__(
            self, observation_space=env.observation_space, action_space=env.action_space, device="cpu"
        )
        self.recurrent = recurrent
        self.layer = torch.nn.GRU(inputs, HIDDEN, batch_first=True) if recurrent else torch.nn.Linear(inputs, HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, outputs)
        self.log_std = torch.nn.Parameter(torch.zeros(outputs))

    def get_specification(self) -> Any:
        return {"rnn": {"sequence_length": LENGTH, "sizes": [(1, N, HIDDEN)]}} if self.recurrent else {}

    def features(self, inputs: Any) -> tuple[Any, dict[str, Any]]:
        seen = inputs["observations"]
        if "taken_actions" in inputs and self.layer_inputs > seen.shape[1]:
            seen = torch.cat([seen, inputs["taken_actions"]], 1)
        if not self.recurrent:
            return torch.tanh(self.layer(seen)), {}
        state = inputs["rnn"][0]
        if not self.training:
            out, state = self.layer(seen.unsqueeze(1), state.contiguous())
            return out.squeeze(1), {"rnn": [state]}
        seen, outs = seen.view(-1, LENGTH, seen.shape[1]), []
        state = state.view(1, -1, LENGTH, HIDDEN)[:, :, 0].contiguous()
        over = (inputs["terminated"] | inputs["truncated"]).view(-1, LENGTH)
        for t in range(LENGTH):
            out, state = self.layer(seen[:, t : t + 1], state)
            state = state * ~over[:, t].view(1, -1, 1)
            outs.append(out)
        return torch.cat(outs, 1).flatten(0, 1), {"rnn": [state]}

    @property
    def layer_inputs(self) -> int:
        return self.layer.input_size if self.recurrent else self.layer.in_features


class Policy(models.GaussianMixin, Recurrent):
    def __init__(self, env: Any, recurrent: bool = False) -> None:
        Recurrent.__init__(self, env, 2, 1, recurrent)
        models.GaussianMixin.__init__(self)

    def compute(self, inputs: Any, role: str = "") -> tuple[Any, dict[str, Any]]:
        out, more = self.features(inputs)
        return torch.tanh(self.head(out)), {"log_std": self.log_std, **more}


class Actor(models.DeterministicMixin, Recurrent):
    def __init__(self, env: Any, recurrent: bool = False) -> None:
        Recurrent.__init__(self, env, 2, 1, recurrent)
        models.DeterministicMixin.__init__(self)

    def compute(self, inputs: Any, role: str = "") -> tuple[Any, dict[str, Any]]:
        out, more = self.features(inputs)
        return torch.tanh(self.head(out)), more


class Critic(models.DeterministicMixin, Recurrent):
    def __init__(self, env: Any, inputs: int, recurrent: bool = False) -> None:
        Recurrent.__init__(self, env, inputs, 1, recurrent)
        models.DeterministicMixin.__init__(self)

    def compute(self, inputs: Any, role: str = "") -> tuple[Any, dict[str, Any]]:
        out, more = self.features(inputs)
        return self.head(out), more


def on_policy(env: Any, recurrent: bool) -> dict[str, Any]:
    return {"policy": Policy(env, recurrent), "value": Critic(env, 2, recurrent)}


def off_policy(env: Any, recurrent: bool, actor: Any = Policy, critics: int = 2) -> dict[str, Any]:
    names = [f"critic_{i + 1}" for i in range(critics)] if critics > 1 else ["critic"]
    made = {"policy": actor(env, recurrent)} | {name: Critic(env, 3, recurrent) for name in names}
    made |= {f"target_{name}": Critic(env, 3, recurrent) for name in names}
    return made if actor is Policy else made | {"target_policy": actor(env, recurrent)}


def trained(
    kind: Any, name: str, seed: int, *, size: int = 12, steps: int = 60, options: Any = None, **memory: Any
) -> tuple[dict[str, Any], Any]:
    """The weights that an agent of skrl ends with on a memory, and that memory."""
    torch.manual_seed(seed)
    env, recurrent = seeded(), name.endswith("_RNN")
    env.unwrapped.reset(seed=seed)
    algorithm = name.removesuffix("_RNN")
    module = import_module(f"skrl.agents.torch.{algorithm.lower()}")
    networks = {
        "SAC": lambda: off_policy(env, recurrent),
        "TD3": lambda: off_policy(env, recurrent, Actor),
        "DDPG": lambda: off_policy(env, recurrent, Actor, 1),
    }.get(algorithm, lambda: on_policy(env, recurrent))()
    held = kind(memory_size=size, num_envs=N, device="cpu", **memory)
    quiet = {"write_interval": 0, "checkpoint_interval": 0}
    agent = getattr(module, name)(
        models=networks, memory=held, observation_space=env.observation_space, action_space=env.action_space,
        device="cpu", cfg={"experiment": quiet, "learning_rate": 3e-3, **(options or {})},
    )  # fmt: skip
    before = [x.clone() for network in networks.values() for x in network.parameters()]
    cfg = {"timesteps": steps, "headless": True, "disable_progressbar": True, "close_environment_at_exit": False}
    trainers.SequentialTrainer(env=env, agents=agent, cfg=cfg).train()
    weights = {f"{role}.{key}": x for role, network in networks.items() for key, x in network.state_dict().items()}
    after = [x for network in networks.values() for x in network.parameters()]
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return weights, held


def assert_equal(name: str, seed: int, **options: Any) -> None:
    (host, its), (mine, own) = (trained(kind, name, seed, **options) for kind in (theirs.RandomMemory, RandomMemory))
    assert isinstance(own, theirs.Memory)
    assert mine.keys() == host.keys()
    for key in host:
        assert torch.equal(mine[key], host[key]), key
    for key in its.get_tensor_names():
        assert torch.equal(own.tensors[key].nan_to_num(-1), its.tensors[key].nan_to_num(-1)), key


ROLLOUT = {"rollouts": 12, "learning_epochs": 3, "mini_batches": 4}


@pytest.mark.parametrize("name", ["PPO", "RPO", "PPO_RNN", "RPO_RNN"])
def test_rollouts_in_minibatches_lead_to_the_same_weights(name: str, seed: int) -> None:
    assert_equal(name, seed, options=ROLLOUT)


@pytest.mark.parametrize("name", ["A2C", "A2C_RNN", "TRPO", "TRPO_RNN"])
def test_rollouts_of_other_algorithms_lead_to_the_same_weights(name: str, seed: int) -> None:
    assert_equal(name, seed, options={"rollouts": 12})


REPLAY = {"batch_size": 16, "random_timesteps": 6, "learning_starts": 6}


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("name", ["SAC", "TD3", "DDPG"])
def test_batches_of_a_replay_that_wraps_lead_to_the_same_weights(name: str, replacement: bool, seed: int) -> None:
    assert_equal(name, seed, options=REPLAY, size=25, replacement=replacement)


@pytest.mark.parametrize("name", ["SAC_RNN", "TD3_RNN", "DDPG_RNN"])
def test_sequences_of_a_replay_lead_to_the_same_weights_until_it_wraps(name: str, seed: int) -> None:
    options = REPLAY | {"random_timesteps": 0}
    assert_equal(name, seed, options=options, size=60)
    ((host, _), (mine, _)) = (trained(kind, name, seed, options=options, size=25) for kind in
                              (theirs.RandomMemory, RandomMemory))  # fmt: skip
    assert any(not torch.equal(mine[key], host[key]) for key in host)  # theirs then crosses the seam


def test_a_second_trainer_can_take_over_a_recurrent_agent(seed: int, tmp_path: Path) -> None:
    """Each trainer initializes its agent, which creates the tensors of the memory; skrl's refuses the second time."""
    torch.manual_seed(seed)
    for kind in (RandomMemory, theirs.RandomMemory):
        env = seeded()
        module = import_module("skrl.agents.torch.ppo")
        quiet = {"write_interval": 0, "checkpoint_interval": 0, "directory": str(tmp_path)}
        agent = module.PPO_RNN(
            models=on_policy(env, True), memory=kind(memory_size=12, num_envs=N, device="cpu"),
            observation_space=env.observation_space, action_space=env.action_space, device="cpu",
            cfg={"experiment": quiet, **ROLLOUT},
        )  # fmt: skip
        cfg = {"timesteps": 24, "headless": True, "disable_progressbar": True, "close_environment_at_exit": False}
        trainers.SequentialTrainer(env=env, agents=agent, cfg=cfg).train()
        if kind is RandomMemory:
            trainers.SequentialTrainer(env=env, agents=agent, cfg=cfg).train()
        else:
            with pytest.raises(ValueError, match="doesn't match the existing one"):
                trainers.SequentialTrainer(env=env, agents=agent, cfg=cfg).train()
