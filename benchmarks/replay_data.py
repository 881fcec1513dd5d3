"""The transitions that the replays are measured on, how each package's replay is made and filled, and what is right.

Filling a million rows step by step would take some packages minutes, so `filled` hands them over in bulk: by one call
where the package has one, else by setting its arrays. Sampling does not know the difference.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch

GAMMA = 0.99
ALPHA, BETA = 0.6, 0.4
EPISODE = 200


@dataclass(frozen=True)
class Transitions:
    """`rows` transitions of `envs` envs, which number them: env e has e * rows / envs and those that follow.

    The observation and the reward of a transition are its number, its next observation is the number after it, whether
    an episode of 200 ends there or not: a batch shows by itself whether it is right. Every other end is a terminal.
    """

    rows: int
    envs: int = 1
    obs_shape: tuple[int, ...] = (17,)
    action_dim: int = 6
    n: int = 1
    """Rewards per window."""
    prioritized: bool = False

    @property
    def steps(self) -> int:
        return self.rows // self.envs

    def step(self, t: int = 0) -> dict[str, np.ndarray]:
        """Step t of all envs, `[N, ...]`, as arrays of their own."""
        return self._columns(np.arange(self.envs) * self.steps + t)

    def all(self) -> dict[str, np.ndarray]:
        """All transitions, env by env, `[rows, ...]`."""
        return self._columns(np.arange(self.rows))

    def _columns(self, number: np.ndarray) -> dict[str, np.ndarray]:
        wide = (len(number), *(1 for _ in self.obs_shape))
        shape = (len(number), *self.obs_shape)
        end = number % self.steps % EPISODE == EPISODE - 1
        odd = number % self.steps // EPISODE % 2 == 1
        obs = np.broadcast_to(number.reshape(wide), shape)
        return {
            "obs": obs.astype(np.float32),
            "action": np.ones((len(number), self.action_dim), np.float32),
            "reward": number.astype(np.float32),
            "next_obs": (obs + 1).astype(np.float32),
            "terminated": end & odd,
            "truncated": end & ~odd,
        }

    def wrong(self, obs: Any, reward: Any, next_obs: Any) -> str:
        """What is wrong with a batch, if anything; its windows may be shorter than `n` only at an episode's end."""
        batch = len(obs)
        first = np.asarray(obs, np.float64).reshape(batch, -1)
        last = np.asarray(next_obs, np.float64).reshape(batch, -1)
        if batch != BATCH or (first != first[:, :1]).any() or (last != last[:, :1]).any():
            return "observations differ"
        number = first[:, 0]
        left = EPISODE - number % self.steps % EPISODE
        newest = number % self.steps >= self.steps - 2 * self.n  # where windows may be short
        used = last[:, 0] - number
        if ((used != np.minimum(left, self.n)) & ~newest).any():
            return f"{(used != np.minimum(left, self.n)).mean():.2%} of next_obs are wrong"
        powers = [GAMMA**k * (number + k) * (k < used) for k in range(self.n)]
        got = np.asarray(reward, np.float64).reshape(-1)
        return "" if np.allclose(got, np.sum(powers, axis=0), rtol=1e-5) else "rewards differ"

    def windows(self) -> dict[str, np.ndarray]:
        """All transitions with the n-step reward and next observation, for the peers that store those."""
        columns, number = self.all(), np.arange(self.rows)
        within = number % self.steps
        used = np.minimum(np.minimum(EPISODE - within % EPISODE, self.n), self.steps - within)
        total = np.zeros(self.rows)
        for k in range(self.n):
            total += np.where(k < used, GAMMA**k * (number + k), 0.0)
        last = number + used - 1
        ends = {name: columns[name][last] for name in ("terminated", "truncated", "next_obs")}
        return columns | ends | {"reward": total.astype(np.float32), "used": used}


BATCH = 256
Made = tuple[Callable[[], Any], Callable[[], str]]


@dataclass
class Line:
    """A contender as one function: `make` builds what is not measured and returns `run` and `check`.

    A `run` that makes a batch also reads from it, as torch tensors, the fields that a learner uses.
    """

    label: str
    package: str
    note: str
    make: Callable[[Any], Made]
    role: str = "peer"
    run: Callable[[], Any] = field(init=False)
    check: Callable[[], str] = field(init=False)

    def setup(self, data: Any) -> None:
        self.run, self.check = self.make(data)


def td_errors() -> np.ndarray:
    """TD errors for the transitions of a batch."""
    return np.random.default_rng(0).random(BATCH, np.float32)


# relive

ENDLESS = 10**12
"""More batches than anybody draws."""


def drawing(replay: Any, size: int, reuse: bool = False) -> Callable[[], Any]:
    """What gives the next batch: `sample`, or one that is written to the memory of an earlier one."""
    if not reuse:
        return lambda: replay.sample(size)
    return replay.batches(ENDLESS, size, reuse=True).__next__


def relive_schema(relive: ModuleType, data: Transitions) -> Any:
    flag = relive.Field((), torch.bool)
    return relive.Schema(
        {
            "obs": relive.Field(data.obs_shape),
            "action": relive.Field((data.action_dim,)),
            "reward": relive.Field(()),
            "terminated": flag,
            "truncated": flag,
        }
    )


def relive_replay(data: Transitions, fill: bool = True) -> Any:
    """A replay with room for all transitions and the boundary rows of their episodes."""
    relive = importlib.import_module("relive")
    rows = data.steps + data.steps // EPISODE + 1
    sampler = relive.Prioritized(ALPHA, BETA) if data.prioritized else relive.Uniform()
    schema, view = relive_schema(relive, data), relive.NStep(data.n, GAMMA)
    replay = relive.ReplayBuffer(schema, rows * data.envs, data.envs, sampler=sampler, view=view, seed=0)
    if fill:
        everything = data.all()
        by_env = {name: array.reshape(data.envs, data.steps, *array.shape[1:]) for name, array in everything.items()}
        for t in range(data.steps):
            replay.add({name: array[:, t] for name, array in by_env.items()})
    return replay


# stable-baselines3


def sb3_replay(data: Transitions, fill: bool = True) -> Any:
    buffers = importlib.import_module("stable_baselines3.common.buffers")
    spaces = importlib.import_module("gymnasium.spaces")
    obs_space, act_space = (spaces.Box(-np.inf, np.inf, shape) for shape in (data.obs_shape, (data.action_dim,)))
    kind, more = buffers.ReplayBuffer, {}
    if data.n > 1:
        kind, more = buffers.NStepReplayBuffer, {"n_steps": data.n, "gamma": GAMMA}
    buffer = kind(data.rows, obs_space, act_space, "cpu", n_envs=data.envs, **more)
    if fill:
        columns = data.all()
        done = columns["terminated"] | columns["truncated"]
        arrays = {"observations": "obs", "next_observations": "next_obs", "actions": "action", "rewards": "reward"}
        source = columns | {"done": done}
        for name, key in (arrays | {"dones": "done", "timeouts": "truncated"}).items():
            by_env = source[key].reshape(data.envs, data.steps, *source[key].shape[1:])
            getattr(buffer, name)[:] = by_env.swapaxes(0, 1)
        buffer.full, buffer.pos = True, 0
    return buffer


# tianshou


def tianshou_step(step: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = {"obs": "obs", "act": "action", "rew": "reward", "obs_next": "next_obs"}
    flags = {"terminated": "terminated", "truncated": "truncated"}
    return {name: step[key] for name, key in (names | flags).items()}


def tianshou_replay(data: Transitions, fill: bool = True) -> Any:
    """The vector form of its replay, which its trainers use, filled by set_batch."""
    collection = importlib.import_module("tianshou.data")
    if data.prioritized:
        buffer = collection.PrioritizedVectorReplayBuffer(data.rows, data.envs, alpha=ALPHA, beta=BETA)
    else:
        buffer = collection.VectorReplayBuffer(data.rows, data.envs)
    if not fill:
        return buffer
    columns = data.all()
    step = tianshou_step(columns) | {"done": columns["terminated"] | columns["truncated"]}
    step["rew"] = step["rew"].astype(np.float64)  # as `add` has it
    buffer.set_batch(collection.Batch(**step))
    for env, inner in enumerate(buffer.buffers):
        inner._size, inner._insertion_idx = data.steps, 0
        inner.last_index[0] = data.steps - 1
        buffer._lengths[env], buffer.last_index[env] = data.steps, (env + 1) * data.steps - 1
    buffer._size = data.rows
    if data.prioritized:
        buffer.init_weight(np.arange(data.rows))
    return buffer


# cpprb


def cpprb_fields(data: Transitions) -> dict[str, dict[str, Any]]:
    obs = {"shape": data.obs_shape}
    return {"obs": obs, "act": {"shape": data.action_dim}, "rew": {}, "done": {}, "next_obs": obs}


def cpprb_step(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = {"obs": "obs", "act": "action", "rew": "reward", "next_obs": "next_obs"}
    step = {name: columns[key] for name, key in names.items()}
    return step | {"done": columns["terminated"].astype(np.float32)}


def cpprb_replay(data: Transitions, fill: bool = True) -> Any:
    """Its replay, filled by one `add` per episode and `on_episode_end` if it makes windows, else by one for all."""
    cpprb = importlib.import_module("cpprb")
    options: dict[str, Any] = {"alpha": ALPHA} if data.prioritized else {}
    if data.n > 1:
        options["Nstep"] = {"size": data.n, "gamma": GAMMA, "rew": "rew", "next": "next_obs"}
    kind = cpprb.PrioritizedReplayBuffer if data.prioritized else cpprb.ReplayBuffer
    buffer = kind(data.rows, cpprb_fields(data), **options)
    if fill:
        step = cpprb_step(data.all())
        if data.n == 1:
            buffer.add(**step)
        for start in range(0, data.rows if data.n > 1 else 0, EPISODE):
            buffer.add(**{name: array[start : start + EPISODE] for name, array in step.items()})
            buffer.on_episode_end()
    return buffer


# torchrl


def torchrl_step(columns: Mapping[str, np.ndarray]) -> Any:
    """A TensorDict `[rows]` as its collectors write it."""
    tensordict = importlib.import_module("tensordict").TensorDict
    t = {name: torch.from_numpy(array) for name, array in columns.items()}
    size = [len(columns["reward"])]
    flags = {name: t[name][:, None] for name in ("terminated", "truncated")}
    following = {"obs": t["next_obs"], "reward": t["reward"][:, None], "done": flags["terminated"] | flags["truncated"]}
    return tensordict(
        {"obs": t["obs"], "action": t["action"], "next": tensordict(following | flags, size)}, batch_size=size
    )


def torchrl_replay(data: Transitions, fill: bool = True, batch: int = BATCH, **options: Any) -> Any:
    """Its replay for TensorDicts, filled by one `extend`."""
    collection = importlib.import_module("torchrl.data")
    kind = collection.TensorDictReplayBuffer
    if data.prioritized:
        kind = collection.TensorDictPrioritizedReplayBuffer
        options |= {"alpha": ALPHA, "beta": BETA}
    buffer = kind(storage=collection.LazyTensorStorage(data.rows), batch_size=batch, **options)
    if fill:
        buffer.extend(torchrl_step(data.all()))
    return buffer


# agilerl


def agilerl_step(columns: Mapping[str, np.ndarray]) -> Any:
    """A TensorDict `[rows]` as its training loops make it."""
    tensordict = importlib.import_module("tensordict").TensorDict
    names = ("obs", "action", "reward", "next_obs")
    t = {name: torch.from_numpy(columns[name]) for name in names}
    t["done"] = torch.from_numpy(columns["terminated"].astype(np.float32))
    return tensordict(t, batch_size=[len(columns["reward"])])


def agilerl_replay(data: Transitions, fill: bool = True) -> Any:
    """Its replay, filled by one `add`."""
    module = importlib.import_module("agilerl.components.replay_buffer")
    if data.prioritized:
        buffer = module.PrioritizedReplayBuffer(data.rows, alpha=ALPHA)
    elif data.n > 1:
        buffer = module.MultiStepReplayBuffer(data.rows, n_step=data.n, gamma=GAMMA)
    else:
        buffer = module.ReplayBuffer(data.rows)
    if fill:
        module.ReplayBuffer.add(buffer, agilerl_step(data.windows()))
    return buffer


# The floor of a random read


class GatherFloor:
    """Gathers packed rows at ready random places, `length` neighbours at each, into a ready batch."""

    package, role = "", "floor"

    def __init__(self, row_bytes: int, more_bytes: int, batch: int = BATCH, length: int = 1) -> None:
        self.row_bytes, self.more_bytes, self.batch, self.length = row_bytes, more_bytes, batch, length
        self.label = f"gather of packed rows of {row_bytes} bytes"
        what = "random rows" if length == 1 else f"runs of {length} rows at random places"
        more = f" and {more_bytes} bytes of their successors" if more_bytes else ""
        self.note = f"a numba loop that copies {batch} {what}{more} to one block, at ready places, other ones each time"

    def setup(self, data: Transitions) -> None:
        words, more = self.row_bytes // 8, self.more_bytes // 8
        self.rows = np.ones((data.rows + 1, words), np.int64)
        self.out = np.zeros((self.batch, words * self.length + more), np.int64)
        rng = np.random.default_rng(0)
        self.places = list(rng.integers(0, data.rows - self.length + 1, (512, self.batch)))
        self.gather, self.count = gather_kernel(), 0

    def run(self) -> None:
        self.count = (self.count + 1) % 512
        self.gather(self.rows, self.places[self.count], self.out)

    def check(self) -> str:
        self.run()
        return "" if self.out.all() else "rows differ"


def gather_kernel() -> Any:
    numba: Any = importlib.import_module("numba")

    @numba.njit
    def gather(rows: Any, places: Any, out: Any) -> None:
        flat, words = rows.reshape(-1), rows.shape[1]
        for i in range(places.size):
            start = places[i] * words
            source, target = flat[start : start + out.shape[1]], out[i]
            for k in range(target.size):  # over slices of their own, or the compiler fears that they overlap
                target[k] = source[k]

    return gather
