"""DQN with a replay of each library: one learner, and an adapter for each."""

import importlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replay_data import drawing
from rollout_data import box
from training_play import GAMMA, Clock, Env, improve, perceptron, shapes_differ

CAPACITY, START, SYNC = 20_000, 32, 100
Batch = tuple[Tensor, ...]  # obs, action, reward, next_obs, discount


@dataclass(frozen=True)
class Dqn:
    """`steps` steps of `envs` environments, and after each of them an update with `batch` transitions."""

    envs: int
    steps: int
    obs_dim: int = 17
    actions: int = 6
    batch: int = 64

    def learn(self, storage: Any, clock: Clock) -> str:
        """A whole training; returns what was wrong with its first batch, if anything."""
        env, wrong = Env(self.envs, self.obs_dim, 1), ""
        torch.manual_seed(0)
        q = perceptron(self.obs_dim, self.actions)
        target, optimizer = deepcopy(q), torch.optim.Adam(q.parameters(), lr=1e-3)
        for step in range(self.steps):
            with torch.no_grad():
                obs, random = env.obs, torch.rand(self.envs) < 0.1
                action = torch.where(random, torch.randint(self.actions, (self.envs,)), q(obs).argmax(-1))
            after, reward, terminated, truncated = env.step(action[:, None])
            arrays = (tensor.numpy() for tensor in (obs, action, reward, after, terminated, truncated))
            clock(storage.add, *arrays)
            if step < START:
                continue
            batch = clock(storage.sample)
            if step == START:
                vector, many = (self.batch, self.obs_dim), (self.batch,)
                wrong = shapes_differ(batch, vector, many, many, vector, many)
                if not wrong and not torch.allclose(batch[2], -batch[3].square().mean(-1)):
                    wrong = "rewards are of other steps"
            obs, action, reward, following, discount = batch
            with torch.no_grad():
                wanted = reward + discount * target(following).amax(-1)
            improve(optimizer, (q(obs).gather(1, action[:, None]).squeeze(1) - wanted).square().mean())
            if step % SYNC == 0:
                target.load_state_dict(q.state_dict())
        return wrong


class Ready:
    """No storage: the same ready batch each time."""

    def __init__(self, work: Dqn) -> None:
        B = work.batch
        obs, action = torch.zeros(2, B, work.obs_dim), torch.zeros(B, dtype=torch.int64)
        self.batch = obs[0], action, torch.ones(B), obs[1], torch.full((B,), GAMMA)

    def add(self, *_: Any) -> None: ...

    def sample(self) -> Batch:
        return self.batch


class Relive:
    def __init__(self, work: Dqn) -> None:
        relive = importlib.import_module("relive")
        flag = relive.Field((), torch.bool)
        fields = {"obs": (work.obs_dim,), "action": relive.Field((), torch.int64), "reward": ()}
        schema = relive.Schema({**fields, "terminated": flag, "truncated": flag})
        view = relive.Transition(GAMMA)
        self.replay = relive.ReplayBuffer(schema, CAPACITY, num_envs=work.envs, view=view, seed=0)
        self.draw: Callable[[], Any] | None = None  # there is nothing to draw yet
        self.size = work.batch

    def add(self, obs: Any, action: Any, reward: Any, after: Any, terminated: Any, truncated: Any) -> None:
        flags = {"terminated": terminated, "truncated": truncated}
        self.replay.add(obs=obs, action=action, reward=reward, next_obs=after, **flags)  # it keeps final ones only

    def sample(self) -> Batch:
        self.draw = self.draw or drawing(self.replay, self.size, reuse=True)
        batch = self.draw()
        return tuple(batch[name] for name in ("obs", "action", "reward", "next_obs", "discount"))


class StableBaselines3:
    def __init__(self, work: Dqn) -> None:
        kind = importlib.import_module("stable_baselines3.common.buffers").ReplayBuffer
        spaces = importlib.import_module("gymnasium.spaces")
        space = box(work.obs_dim), spaces.Discrete(work.actions)
        self.buffer, self.size = kind(CAPACITY, *space, "cpu", n_envs=work.envs), work.batch

    def add(self, obs: Any, action: Any, reward: Any, after: Any, terminated: Any, truncated: Any) -> None:
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": True} if cut else {} for cut in truncated]
        self.buffer.add(obs, after, action, reward, terminated | truncated, infos)

    def sample(self) -> Batch:
        b = self.buffer.sample(self.size)
        discount = GAMMA * (1 - b.dones.squeeze(-1))
        return b.observations, b.actions.squeeze(-1), b.rewards.squeeze(-1), b.next_observations, discount


class Tianshou:
    def __init__(self, work: Dqn) -> None:
        collection = importlib.import_module("tianshou.data")
        self.make, self.size = collection.Batch, work.batch
        self.buffer = collection.VectorReplayBuffer(CAPACITY, work.envs)

    def add(self, obs: Any, action: Any, reward: Any, after: Any, terminated: Any, truncated: Any) -> None:
        flags = {"terminated": terminated, "truncated": truncated}
        self.buffer.add(self.make(obs=obs, act=action, rew=reward, obs_next=after, **flags))

    def sample(self) -> Batch:
        b = self.buffer.sample(self.size)[0]
        discount = np.where(b.terminated, np.float32(0), np.float32(GAMMA))
        return tuple(map(torch.from_numpy, (b.obs, b.act, b.rew.astype(np.float32), b.obs_next, discount)))


class Cpprb:
    def __init__(self, work: Dqn) -> None:
        obs = {"shape": work.obs_dim}
        fields = {"obs": obs, "act": {"dtype": np.int64}, "rew": {}, "next_obs": obs, "done": {}}
        self.buffer, self.size = importlib.import_module("cpprb").ReplayBuffer(CAPACITY, fields), work.batch

    def add(self, obs: Any, action: Any, reward: Any, after: Any, terminated: Any, _: Any) -> None:
        self.buffer.add(obs=obs, act=action, rew=reward, next_obs=after, done=terminated)

    def sample(self) -> Batch:
        b = self.buffer.sample(self.size)
        act, rew, discount = b["act"][:, 0], b["rew"][:, 0], np.float32(GAMMA) * (1 - b["done"][:, 0])
        return tuple(map(torch.from_numpy, (b["obs"], act, rew, b["next_obs"], discount)))


class TorchRl:
    def __init__(self, work: Dqn) -> None:
        collection = importlib.import_module("torchrl.data")
        self.dict = importlib.import_module("tensordict").TensorDict
        storage = collection.LazyTensorStorage(CAPACITY)
        self.buffer = collection.TensorDictReplayBuffer(storage=storage, batch_size=work.batch)

    def add(self, obs: Any, action: Any, reward: Any, after: Any, terminated: Any, _: Any) -> None:
        arrays = {"obs": obs, "action": action, "reward": reward, "next_obs": after, "terminated": terminated}
        step = {name: torch.from_numpy(array) for name, array in arrays.items()}
        self.buffer.extend(self.dict(step, batch_size=[len(obs)]))

    def sample(self) -> Batch:
        b = self.buffer.sample()
        return b["obs"], b["action"], b["reward"], b["next_obs"], GAMMA * (~b["terminated"]).float()
