"""A recurrent Q-network on sequences, as in R2D2, with a replay of each library that has such sequences."""

import importlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from replay_data import drawing
from training_play import GAMMA, Clock, Env, improve, shapes_differ

CAPACITY, LENGTH, HIDDEN, START, SYNC = 64_000, 40, 64, 100, 100
Batch = tuple[Tensor, ...]  # obs, action, reward, terminated, mask [L, B]; hidden


@dataclass(frozen=True)
class R2d2:
    """`steps` steps of `envs` environments, and after every fourth an update with `batch` sequences of 40 steps."""

    envs: int
    steps: int
    obs_dim: int = 17
    actions: int = 6
    batch: int = 32

    def learn(self, storage: Any, clock: Clock) -> str:
        """A whole training; returns what was wrong with its first batch, if anything."""
        env, wrong = Env(self.envs, self.obs_dim, 1), ""
        torch.manual_seed(0)
        q = nn.ModuleList([nn.GRU(self.obs_dim, HIDDEN), nn.Linear(HIDDEN, self.actions)])
        target, optimizer = deepcopy(q), torch.optim.Adam(q.parameters(), lr=1e-3)
        hidden = torch.zeros(1, self.envs, HIDDEN)
        for step in range(self.steps):
            obs, before = env.obs, hidden
            with torch.no_grad():
                out, hidden = q[0](obs[None], before)
                random = torch.rand(self.envs) < 0.1
                action = torch.where(random, torch.randint(self.actions, (self.envs,)), q[1](out[0]).argmax(-1))
            after, reward, terminated, truncated = env.step(action[:, None])
            hidden = hidden * ~(terminated | truncated)[:, None]
            tensors = obs, action, reward, after, terminated, truncated, before[0]
            clock(storage.add, *(tensor.numpy() for tensor in tensors))
            if step < START or step % 4:
                continue
            batch = clock(storage.sample)
            if step == START:
                steps = LENGTH, self.batch
                wrong = shapes_differ(batch, (*steps, self.obs_dim), *[steps] * 4, (1, self.batch, HIDDEN))
            obs, action, reward, terminated, mask, first = batch
            real = mask[:-1] & (mask[1:] | terminated[:-1])
            if step == START and not wrong:
                followed = mask[:-1] & mask[1:]
                fits = torch.isclose(reward[:-1], -obs[1:].square().mean(-1))
                wrong = "" if fits[followed].all() else "rewards are of other steps"
            with torch.no_grad():
                following = target[1](target[0](obs, first)[0])[1:].amax(-1)
            values = q[1](q[0](obs, first)[0])[:-1].gather(-1, action[:-1, :, None]).squeeze(-1)
            error = values - reward[:-1] - GAMMA * ~terminated[:-1] * following
            improve(optimizer, (error.square() * real).sum() / real.sum())
            if step % SYNC == 0:
                target.load_state_dict(q.state_dict())
        return wrong


class Ready:
    """No storage: the same ready batch each time."""

    def __init__(self, work: R2d2) -> None:
        shape = LENGTH, work.batch
        flags = torch.zeros(shape, dtype=torch.bool), torch.ones(shape, dtype=torch.bool)
        obs, action = torch.zeros(*shape, work.obs_dim), torch.zeros(shape, dtype=torch.int64)
        self.batch = obs, action, torch.ones(shape), *flags, torch.zeros(1, work.batch, HIDDEN)

    def add(self, *_: Any) -> None: ...

    def sample(self) -> Batch:
        return self.batch


class Relive:
    def __init__(self, work: R2d2) -> None:
        relive = importlib.import_module("relive")
        flags = {name: relive.Field((), torch.bool) for name in ("terminated", "truncated")}
        fields = {"obs": (work.obs_dim,), "action": relive.Field((), torch.int64), "reward": ()}
        schema = relive.Schema({**fields, **flags, "hidden": (1, HIDDEN)})
        view = relive.Sequence(LENGTH)
        self.replay = relive.ReplayBuffer(schema, CAPACITY, num_envs=work.envs, view=view, seed=0)
        self.draw: Callable[[], Any] | None = None  # there is nothing to draw yet
        self.size = work.batch

    def add(self, obs: Any, action: Any, reward: Any, after: Any, terminated: Any, truncated: Any, hidden: Any) -> None:
        step = {"obs": obs, "action": action, "reward": reward, "terminated": terminated, "truncated": truncated}
        self.replay.add(**step, hidden=hidden[:, None], next_obs=after)  # it keeps final ones only

    def sample(self) -> Batch:
        self.draw = self.draw or drawing(self.replay, self.size, reuse=True)
        b = self.draw()
        names = "obs", "action", "reward", "terminated", "mask"
        return *(b[name][:LENGTH] for name in names), b["hidden"]


class Tianshou:
    """It has stacks rather than sequences: the steps up to one, and copies of an episode's first before it."""

    def __init__(self, work: R2d2) -> None:
        collection = importlib.import_module("tianshou.data")
        self.make, self.size = collection.Batch, work.batch
        self.buffer = collection.VectorReplayBuffer(CAPACITY, work.envs)

    def add(self, obs: Any, action: Any, reward: Any, after: Any, terminated: Any, truncated: Any, hidden: Any) -> None:
        flags = {"terminated": terminated, "truncated": truncated}
        state = self.make(hidden=hidden)
        self.buffer.add(self.make(obs=obs, act=action, rew=reward, obs_next=after, policy=state, **flags))

    def sample(self) -> Batch:
        last = self.buffer.sample_indices(self.size)
        stacked = [self.buffer.get(last, name, stack_num=LENGTH) for name in ("obs", "act", "rew", "terminated")]
        obs, action, reward, terminated = (torch.from_numpy(array).transpose(0, 1) for array in stacked)
        first = last
        for _ in range(LENGTH - 1):
            first = self.buffer.prev(first)
        hidden = torch.from_numpy(self.buffer.policy.hidden[first])[None]
        mask = torch.ones(obs.shape[:2], dtype=torch.bool)
        mask[:-1] = (obs[1:] != obs[:-1]).any(-1)
        return obs, action, reward.float(), terminated, mask, hidden


class TorchRl:
    """Slices of 40 steps of one episode, each with the states of all its steps."""

    def __init__(self, work: R2d2) -> None:
        collection = importlib.import_module("torchrl.data")
        self.dict, self.size = importlib.import_module("tensordict").TensorDict, work.batch
        sampler = collection.SliceSampler(slice_len=LENGTH, end_key=("next", "done"))
        storage = collection.LazyTensorStorage(CAPACITY, ndim=2)
        self.buffer = collection.ReplayBuffer(
            storage=storage, sampler=sampler, batch_size=LENGTH * work.batch, dim_extend=0
        )

    def add(self, obs: Any, action: Any, reward: Any, after: Any, terminated: Any, truncated: Any, hidden: Any) -> None:
        names = "obs", "action", "reward", "hidden"
        step: dict[str, Any] = {
            name: torch.from_numpy(x)[None] for name, x in zip(names, (obs, action, reward, hidden), strict=True)
        }
        flags = {"terminated": terminated, "done": terminated | truncated}
        step["next"] = {name: torch.from_numpy(flag)[None] for name, flag in flags.items()}
        self.buffer.extend(self.dict(step, batch_size=[1, len(obs)]))

    def sample(self) -> Batch:
        b = self.buffer.sample().view(self.size, LENGTH).transpose(0, 1)
        mask = torch.ones(LENGTH, self.size, dtype=torch.bool)
        return b["obs"], b["action"], b["reward"], b["next", "terminated"], mask, b["hidden"][None, 0]
