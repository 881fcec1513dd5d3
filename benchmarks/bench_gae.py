"""GAE on a [T, N] rollout: advantages and returns from rewards, values and flags that are already there."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from harness import Contender, CopyFloor, Effort, Workload, measure, write
from tables import HAND

GAMMA, LAMBDA = 0.99, 0.95
SIZES = ((2048, 8), (128, 1024), (24, 4096), (512, 64))
TERMINATED_RATE = TRUNCATED_RATE = 0.005
BYTES = 17  # reward, value and a flag in; advantage and return out


@dataclass(frozen=True)
class Rollout:
    """float32 [T, N] rewards and values (`value` is [T + 1, N]), bool flags, and the expected advantages."""

    reward: np.ndarray
    value: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final_value: np.ndarray
    advantage: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return self.reward.shape[0], self.reward.shape[1]

    @property
    def done(self) -> np.ndarray:
        return self.terminated | self.truncated

    @property
    def next_value(self) -> np.ndarray:
        """V of each step's true next observation, [T, N]."""
        return np.where(self.truncated, self.final_value, self.value[1:])

    @property
    def folded_reward(self) -> np.ndarray:
        """Rewards plus the values of truncated ends, as collectors add them for peers with one flag."""
        return np.where(self.truncated, self.reward + np.float32(GAMMA) * self.final_value, self.reward)

    @staticmethod
    def make(T: int, N: int, seed: int = 0) -> "Rollout":
        rng = np.random.default_rng(seed)
        reward, final_value = (rng.standard_normal((T, N), np.float32) for _ in range(2))
        value = rng.standard_normal((T + 1, N), np.float32)
        draw = rng.random((T, N))
        terminated = draw < TERMINATED_RATE
        truncated = (draw < TERMINATED_RATE + TRUNCATED_RATE) & ~terminated
        next_value = np.where(terminated, 0.0, np.where(truncated, final_value, value[1:])).astype(np.float64)
        delta = reward + GAMMA * next_value - value[:-1]
        advantage = np.zeros((T + 1, N))
        for t in reversed(range(T)):
            advantage[t] = delta[t] + GAMMA * LAMBDA * ~(terminated | truncated)[t] * advantage[t + 1]
        return Rollout(reward, value, terminated, truncated, final_value, advantage[:-1])


def difference(got: Any, data: Rollout) -> str:
    """What differs from the expected advantages, if anything; both [T, N]."""
    gap = float(np.abs(np.asarray(got, np.float64).reshape(data.shape) - data.advantage).max())
    return "" if gap < 1e-3 else f"advantages differ by up to {gap:.2g}"


class Relive:
    label, package, role = "relive.returns.gae", "relive", "ours"
    note = "returns.gae(reward, value, terminated, truncated, final_value=...), torch tensors"

    def setup(self, data: Rollout) -> None:
        self.gae = importlib.import_module("relive").returns.gae
        self.data = data
        arrays = (data.reward, data.value, data.terminated, data.truncated, data.final_value)
        self.reward, self.value, self.terminated, self.truncated, self.final_value = map(torch.from_numpy, arrays)

    def run(self) -> None:
        self.out = self.gae(
            self.reward,
            self.value,
            self.terminated,
            self.truncated,
            final_value=self.final_value,
            gamma=GAMMA,
            lam=LAMBDA,
        )

    def check(self) -> str:
        self.run()
        return difference(self.out[0], self.data)


class ReliveFinish:
    label, package, role = "RolloutBuffer.finish(GAE())", "relive", "ours"
    note = "RolloutBuffer.finish(GAE(gamma, lam)) on a full buffer with its bootstrap row and final values"

    def setup(self, data: Rollout) -> None:
        relive = importlib.import_module("relive")
        T, N = data.shape
        scalar = relive.Field(())
        flag = relive.Field((), torch.bool)
        fields = {
            "obs": relive.Field((1,)),
            "action": scalar,
            "reward": scalar,
            "terminated": flag,
            "truncated": flag,
        }
        self.buffer = relive.RolloutBuffer(relive.Schema(fields | {"value": scalar}), num_steps=T, num_envs=N)
        self.estimator = relive.GAE(gamma=GAMMA, lam=LAMBDA)
        self.data = data
        obs = np.zeros((N, 1), np.float32)
        for t in range(T):
            self.buffer.add(
                obs=obs,
                action=obs[:, 0],
                reward=data.reward[t],
                terminated=data.terminated[t],
                truncated=data.truncated[t],
                value=data.value[t],
                final_value=data.final_value[t],
            )
        self.buffer.set_last(obs=obs, value=data.value[T])

    def run(self) -> None:
        self.buffer.finish(self.estimator)

    def check(self) -> str:
        self.run()
        return difference(self.buffer["advantage"], self.data)


class HandWritten:
    label, package, role = f"{HAND}loop", "torch", "hand"
    note = "the loop over T of CleanRL's ppo.py on [T, N] tensors, values of truncated ends already in the rewards"

    def setup(self, data: Rollout) -> None:
        arrays = data.folded_reward, data.value, 1 - data.done.astype(np.float32)
        self.reward, self.value, self.going = map(torch.from_numpy, arrays)
        self.data = data

    @torch.no_grad()
    def run(self) -> None:
        reward, value, going, trace = self.reward, self.value, self.going, torch.zeros(self.data.shape[1])
        self.advantage = torch.zeros_like(reward)
        for t in reversed(range(len(reward))):
            delta = reward[t] + GAMMA * value[t + 1] * going[t] - value[t]
            self.advantage[t] = trace = delta + GAMMA * LAMBDA * going[t] * trace
        self.returns = self.advantage + value[:-1]

    def check(self) -> str:
        self.run()
        return difference(self.advantage, self.data)


class StableBaselines3:
    label, package, role = "stable-baselines3", "stable-baselines3", "peer"
    note = (
        "RolloutBuffer.compute_returns_and_advantage(last_values, dones);"
        " values of truncated ends already added to the rewards"
    )

    def setup(self, data: Rollout) -> None:
        buffers = importlib.import_module("stable_baselines3.common.buffers")
        spaces = importlib.import_module("gymnasium.spaces")
        T, N = data.shape
        space = spaces.Box(-1.0, 1.0, (1,))
        self.buffer = buffers.RolloutBuffer(T, space, space, "cpu", gae_lambda=LAMBDA, gamma=GAMMA, n_envs=N)
        self.buffer.rewards[:] = data.folded_reward
        self.buffer.values[:] = data.value[:-1]
        self.buffer.episode_starts[1:] = data.done[:-1]
        self.buffer.pos, self.buffer.full = T, True
        self.last_value, self.last_done = torch.from_numpy(data.value[-1].copy()), data.done[-1].copy()
        self.data = data

    def run(self) -> None:
        self.buffer.compute_returns_and_advantage(self.last_value, self.last_done)

    def check(self) -> str:
        self.run()
        return difference(self.buffer.advantages, self.data)


class RslRl:
    label, package, role = "rsl-rl", "rsl-rl-lib", "peer"
    note = (
        "PPO.compute_returns itself, in inference mode as its runner calls it, on a real RolloutStorage and a"
        " stand-in for the PPO object, whose critic returns ready values; without the normalisation of"
        " advantages; values of truncated ends already added to the rewards"
    )

    def setup(self, data: Rollout) -> None:
        compute_returns = importlib.import_module("rsl_rl.algorithms.ppo").PPO.compute_returns
        storage_class = importlib.import_module("rsl_rl.storage").RolloutStorage
        tensordict = importlib.import_module("tensordict")
        T, N = data.shape
        obs = tensordict.TensorDict({"policy": torch.zeros(N, 1)}, batch_size=[N])
        storage = storage_class("rl", N, T, obs, [1], "cpu")
        storage.rewards.copy_(torch.from_numpy(data.folded_reward)[..., None])
        storage.values.copy_(torch.from_numpy(data.value[:-1])[..., None])
        storage.dones.copy_(torch.from_numpy(data.done)[..., None])

        class ReadyCritic:
            last_value = torch.from_numpy(data.value[-1].copy())[:, None]

            def get_hidden_state(self) -> None:
                return None

            def reset(self, hidden_state: Any = None) -> None: ...

            def __call__(self, obs: Any) -> torch.Tensor:
                return self.last_value

        stand_in = SimpleNamespace(
            storage=storage,
            critic=ReadyCritic(),
            gamma=GAMMA,
            lam=LAMBDA,
            normalize_advantage_per_mini_batch=True,
        )
        self.call = torch.inference_mode()(lambda: compute_returns(stand_in, obs))
        self.storage, self.data = storage, data

    def run(self) -> None:
        self.call()

    def check(self) -> str:
        self.run()
        return difference(self.storage.advantages[..., 0], self.data)


class AgileRl:
    label, package, role = "agilerl", "agilerl", "peer"
    note = (
        "RolloutBuffer.compute_returns_and_advantages(last_value, last_done), flags stored as its collector"
        " stores them; values of truncated ends already added to the rewards"
    )

    def setup(self, data: Rollout) -> None:
        buffer_class = importlib.import_module("agilerl.components.rollout_buffer").RolloutBuffer
        spaces = importlib.import_module("gymnasium.spaces")
        T, N = data.shape
        space = spaces.Box(-1.0, 1.0, (1,))
        self.buffer = buffer_class(T, space, space, num_envs=N, gae_lambda=LAMBDA, gamma=GAMMA)
        self.buffer.buffer["rewards"].copy_(torch.from_numpy(data.folded_reward))
        self.buffer.buffer["values"].copy_(torch.from_numpy(data.value[:-1]))
        self.buffer.buffer["dones"].copy_(torch.from_numpy(data.done))
        self.buffer.pos, self.buffer.full = T, True
        self.last_value, self.last_done, self.data = data.value[-1].copy(), data.done[-1].copy(), data

    def run(self) -> None:
        self.buffer.compute_returns_and_advantages(self.last_value, self.last_done)

    def check(self) -> str:
        self.run()
        return difference(self.buffer.buffer["advantages"], self.data)


class TorchRl:
    """One of torchrl's two functions, on [T, N] with the envs in the place of features."""

    package, role = "torchrl", "peer"

    def __init__(self, function: str, label: str) -> None:
        self.function, self.label = function, label
        self.note = f"torchrl.objectives.value.functional.{function} on [T, N] tensors, next values given"

    def setup(self, data: Rollout) -> None:
        functional = importlib.import_module("torchrl.objectives.value.functional")
        self.call = getattr(functional, self.function)
        self.inputs = [
            torch.from_numpy(np.ascontiguousarray(array))
            for array in (data.value[:-1], data.next_value, data.reward, data.done, data.terminated)
        ]
        self.data = data

    def run(self) -> None:
        self.out = self.call(GAMMA, LAMBDA, *self.inputs)

    def check(self) -> str:
        self.run()
        return difference(self.out[0], self.data)


class TianshouKernel:
    label, package, role = "tianshou, kernel alone", "tianshou", "peer"
    note = (
        "tianshou.algorithm.algorithm_base._gae (numba) on ready float32 arrays in its own env-major flat"
        " layout, plus the addition that makes the returns; without masks and index look-ups"
    )

    def setup(self, data: Rollout) -> None:
        self.gae = importlib.import_module("tianshou.algorithm.algorithm_base")._gae

        def flat(array: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(array.T).reshape(-1)

        ends = data.done.copy()
        ends[-1] = True
        next_value = np.where(data.terminated, np.float32(0), data.next_value)
        self.value, self.next_value = flat(data.value[:-1]), flat(next_value)
        self.reward, self.ends, self.data = flat(data.reward), flat(ends), data

    def run(self) -> None:
        self.advantage = self.gae(self.value, self.next_value, self.reward, self.ends, GAMMA, LAMBDA)
        self.returns = self.advantage + self.value

    def check(self) -> str:
        self.run()
        T, N = self.data.shape
        return difference(self.advantage.reshape(N, T).T, self.data)


class Tianshou:
    label, package, role = "tianshou", "tianshou", "peer"
    note = (
        "Algorithm.compute_episodic_return(batch, buffer, indices, v_s_, v_s) on a full VectorReplayBuffer,"
        " values of all observations and of all next observations given"
    )

    def setup(self, data: Rollout) -> None:
        self.compute = importlib.import_module("tianshou.algorithm.algorithm_base").Algorithm.compute_episodic_return
        collection = importlib.import_module("tianshou.data")
        T, N = data.shape
        self.buffer = collection.VectorReplayBuffer(T * N, N)
        obs = np.zeros((N, 1), np.float32)
        for t in range(T):
            step = collection.Batch(obs=obs, act=obs, rew=data.reward[t], obs_next=obs, info={})
            step.terminated, step.truncated = data.terminated[t], data.truncated[t]
            self.buffer.add(step)
        self.batch, self.indices = self.buffer.sample(0)
        self.value = np.ascontiguousarray(data.value[:-1].T).reshape(-1)
        self.next_value = np.ascontiguousarray(data.next_value.T).reshape(-1)
        self.data = data

    def run(self) -> None:
        self.out = self.compute(self.batch, self.buffer, self.indices, self.next_value, self.value, GAMMA, LAMBDA)

    def check(self) -> str:
        self.run()
        T, N = self.data.shape
        return difference(self.out[1].reshape(N, T).T, self.data)


def contenders() -> list[Contender]:
    def size(data: Rollout) -> int:
        return BYTES * data.reward.size

    return [
        CopyFloor(size, f"{BYTES} bytes per step"),
        Relive(),
        ReliveFinish(),
        HandWritten(),
        StableBaselines3(),
        Tianshou(),
        TianshouKernel(),
        TorchRl("generalized_advantage_estimate", "torchrl, loop"),
        TorchRl("vec_generalized_advantage_estimate", "torchrl, vectorized"),
        AgileRl(),
        RslRl(),
    ]


def run(effort: Effort, folder: Path) -> None:
    """Measures all sizes and writes `gae.json`."""
    workloads = [
        measure(Workload(f"({T}, {N})", Rollout.make(T, N), after=True), contenders(), effort) for T, N in SIZES
    ]
    write("gae", "GAE, whole call, by (T, N)", workloads, folder)
