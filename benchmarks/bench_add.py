"""`add`: one vector step into a rollout buffer. A run empties the buffer and fills it; times are per step."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

import after
from harness import Contender, Effort, Workload, aligned, measure, write
from rollout_data import SIZES, Rollout, box, relive_buffer
from tables import HAND


def stored(obs: Any, data: Rollout) -> str:
    """What is wrong with the stored observations, if anything: every step is the same one."""
    expected = np.tile(data.step()["obs"], (data.shape[0], 1))
    return "" if np.array_equal(np.asarray(obs).reshape(expected.shape), expected) else "observations differ"


class AddFloor:
    package, role = "", "floor"
    label = "memcpy of a step's bytes"
    note = "numpy.copyto of all bytes of a step at once, to the next place of a block of T steps"

    def setup(self, data: Rollout) -> None:
        step = np.concatenate([array.reshape(-1).view(np.uint8) for array in data.step().values()])
        self.source = aligned(step.size)
        self.source[:] = step
        block = aligned(step.size * data.shape[0]).reshape(data.shape[0], -1)
        block[:] = 0
        self.places = list(block)

    def run(self) -> None:
        for t in after.steps(len(self.places)):
            np.copyto(self.places[t], self.source)

    def check(self) -> str:
        return ""


class ReliveAdd:
    package, role = "relive", "ours"

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.label = f"relive, {kind}"
        self.note = f"RolloutBuffer.add(obs=..., ...) with {kind} arrays; clear() once a rollout"

    def setup(self, data: Rollout) -> None:
        self.buffer = relive_buffer(importlib.import_module("relive"), data)
        self.step = data.torch_step() if self.kind == "torch" else data.step()
        self.steps, self.data = data.shape[0], data

    def run(self) -> None:
        self.buffer.clear()
        add, step = self.buffer.add, self.step
        for _ in after.steps(self.steps):
            add(
                obs=step["obs"],
                action=step["action"],
                reward=step["reward"],
                terminated=step["terminated"],
                truncated=step["truncated"],
                value=step["value"],
                log_prob=step["log_prob"],
            )

    def check(self) -> str:
        self.run()
        return stored(self.buffer["obs"], self.data)


class HandWrittenAdd:
    package, role = "torch", "hand"

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.label = f"{HAND}{kind} slices"
        self.note = f"x[t] = step, {kind}, for obs, action, reward, done, value and log_prob, as CleanRL stores them"

    def setup(self, data: Rollout) -> None:
        step = data.step()
        step["done"] = (step.pop("terminated") | step.pop("truncated")).astype(np.float32)
        step = {name: step[name] for name in ("obs", "action", "reward", "done", "value", "log_prob")}
        columns = [np.zeros((data.shape[0], *array.shape), np.float32) for array in step.values()]
        self.obs = columns[0]
        self.step: list[Any] = list(step.values())
        self.columns: list[Any] = columns
        if self.kind == "torch":
            self.step, self.columns = ([torch.from_numpy(x) for x in arrays] for arrays in (self.step, columns))
        self.data = data

    def run(self) -> None:
        obs, action, reward, done, value, log_prob = self.columns
        new_obs, new_action, new_reward, new_done, new_value, new_log_prob = self.step
        for t in after.steps(self.data.shape[0]):
            obs[t] = new_obs
            action[t] = new_action
            reward[t] = new_reward
            done[t] = new_done
            value[t] = new_value
            log_prob[t] = new_log_prob

    def check(self) -> str:
        self.run()
        return stored(self.obs, self.data)


class StableBaselines3Add:
    label, package, role = "stable-baselines3", "stable-baselines3", "peer"
    note = (
        "RolloutBuffer.add: obs, action, reward, episode_start in numpy, value and log_prob in torch;"
        " reset() once a rollout, whose new arrays the adds then touch for the first time"
    )

    def setup(self, data: Rollout) -> None:
        buffer_class = importlib.import_module("stable_baselines3.common.buffers").RolloutBuffer
        T, N = data.shape
        self.buffer = buffer_class(T, box(data.obs_dim), box(data.action_dim), "cpu", n_envs=N)
        step, tensors = data.step(), data.torch_step()
        start = step["terminated"] | step["truncated"]
        self.step = step["obs"], step["action"], step["reward"], start, tensors["value"], tensors["log_prob"]
        self.steps, self.data = T, data

    def run(self) -> None:
        self.buffer.reset()
        add = self.buffer.add
        obs, action, reward, start, value, log_prob = self.step
        for _ in after.steps(self.steps):
            add(obs, action, reward, start, value, log_prob)

    def check(self) -> str:
        self.run()
        return stored(self.buffer.observations, self.data)


class RslRlAdd:
    label, package, role = "rsl-rl", "rsl-rl-lib", "peer"
    note = (
        "Transition filled as PPO.act and process_env_step do, then RolloutStorage.add_transition,"
        " in inference mode as its runner does; no distribution parameters stored; clear() once a rollout"
    )

    def setup(self, data: Rollout) -> None:
        storage_class = importlib.import_module("rsl_rl.storage").RolloutStorage
        tensordict = importlib.import_module("tensordict")
        T, N = data.shape
        step = data.torch_step()
        obs = tensordict.TensorDict({"policy": step["obs"]}, batch_size=[N])
        self.storage = storage_class("rl", N, T, obs, [data.action_dim], "cpu")
        done = step["terminated"] | step["truncated"]
        self.step = obs, step["action"], step["reward"], done, step["value"][:, None], step["log_prob"]
        self.transition = storage_class.Transition()
        self.steps, self.data = T, data

    @torch.inference_mode()
    def run(self) -> None:
        self.storage.clear()
        transition, add = self.transition, self.storage.add_transition
        obs, action, reward, done, value, log_prob = self.step
        for _ in after.steps(self.steps):
            transition.actions = action
            transition.values = value
            transition.actions_log_prob = log_prob
            transition.distribution_params = ()
            transition.observations = obs
            transition.rewards = reward
            transition.dones = done
            add(transition)
            transition.clear()

    def check(self) -> str:
        self.run()
        return stored(self.storage.observations["policy"], self.data)


class AgileRlAdd:
    label, package, role = "agilerl", "agilerl", "peer"
    note = "RolloutBuffer.add(obs, action, reward, done, value, log_prob), numpy; no next_obs; reset() once a rollout"

    def setup(self, data: Rollout) -> None:
        buffer_class = importlib.import_module("agilerl.components.rollout_buffer").RolloutBuffer
        T, N = data.shape
        self.buffer = buffer_class(T, box(data.obs_dim), box(data.action_dim), num_envs=N)
        step = data.step()
        done = step["terminated"] | step["truncated"]
        self.step = step["obs"], step["action"], step["reward"], done, step["value"], step["log_prob"]
        self.steps, self.data = T, data

    def run(self) -> None:
        self.buffer.reset()
        add = self.buffer.add
        obs, action, reward, done, value, log_prob = self.step
        for _ in after.steps(self.steps):
            add(obs, action, reward, done, value, log_prob)

    def check(self) -> str:
        self.run()
        return stored(self.buffer.buffer["observations"], self.data)


class TianshouAdd:
    label, package, role = "tianshou", "tianshou", "peer"
    note = (
        "VectorReplayBuffer.add(Batch), numpy, the Batch built each step; value and log_prob in its `policy`"
        " field, no obs_next; the ring wraps"
    )

    def setup(self, data: Rollout) -> None:
        collection = importlib.import_module("tianshou.data")
        T, N = data.shape
        self.batch = collection.Batch
        self.buffer = collection.VectorReplayBuffer(T * N, N)
        step = data.step()
        self.policy = {name: step.pop(name) for name in ("value", "log_prob")}
        self.step = step | {"act": step.pop("action"), "rew": step.pop("reward")}
        self.steps, self.data = T, data

    def run(self) -> None:
        make, add = self.batch, self.buffer.add
        for _ in after.steps(self.steps):
            add(make(policy=make(**self.policy), **self.step))

    def check(self) -> str:
        self.run()
        T, N = self.data.shape
        return stored(self.buffer.obs.reshape(N, T, -1).swapaxes(0, 1), self.data)


class TorchRlAdd:
    label, package, role = "torchrl", "torchrl", "peer"
    note = (
        "ReplayBuffer(storage=LazyTensorStorage(T * N)).extend(TensorDict [N]), TensorDict built beforehand;"
        " the ring wraps"
    )

    def setup(self, data: Rollout) -> None:
        collection = importlib.import_module("torchrl.data")
        tensordict = importlib.import_module("tensordict")
        self.buffer = collection.ReplayBuffer(
            storage=collection.LazyTensorStorage(data.rows), batch_size=data.batch_size
        )
        self.step = tensordict.TensorDict(data.torch_step(), batch_size=[data.shape[1]])
        self.steps, self.data = data.shape[0], data

    def run(self) -> None:
        extend, step = self.buffer.extend, self.step
        for _ in after.steps(self.steps):
            extend(step)

    def check(self) -> str:
        self.run()
        return stored(self.buffer[:]["obs"], self.data)


class TensorDictAdd:
    label, package, role = "tensordict", "tensordict", "peer"
    note = "block[t] = step, both TensorDicts built beforehand"

    def setup(self, data: Rollout) -> None:
        tensordict = importlib.import_module("tensordict")
        T, N = data.shape
        self.step = tensordict.TensorDict(data.torch_step(), batch_size=[N])
        self.block = self.step.unsqueeze(0).expand(T, N).clone()
        self.steps, self.data = T, data

    def run(self) -> None:
        block, step = self.block, self.step
        for t in after.steps(self.steps):
            block[t] = step

    def check(self) -> str:
        self.block.zero_()
        self.run()
        return stored(self.block["obs"], self.data)


def contenders() -> list[Contender]:
    return [
        AddFloor(),
        ReliveAdd("numpy"),
        ReliveAdd("torch"),
        HandWrittenAdd("NumPy"),
        HandWrittenAdd("torch"),
        StableBaselines3Add(),
        TensorDictAdd(),
        RslRlAdd(),
        AgileRlAdd(),
        TianshouAdd(),
        TorchRlAdd(),
    ]


def run(effort: Effort, folder: Path) -> None:
    """Measures `add` and writes `add.json`."""
    workloads = []
    for T, N, obs_dim, action_dim in SIZES:
        data = Rollout.make(T, N, obs_dim, action_dim)
        workloads.append(measure(Workload(f"{N} envs, obs {obs_dim}", data, units=T, after=True), contenders(), effort))
    write("add", "one vector step into a rollout buffer", workloads, folder)
