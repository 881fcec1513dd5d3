"""What people write instead of a replay library: preallocated tensors, slices to add, `index_select` or `x[i]` to draw.

CleanRL and LeanRL do so. Nothing is checked, no episode ends by itself, and what was prepared once is not measured.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tables
from replay_data import ALPHA, BATCH, BETA, EPISODE, GAMMA, Line, Made, Transitions, td_errors

FIELDS = ("obs", "action", "reward", "next_obs", "done")
Fields = dict[str, Tensor]


def line(way: str, note: str, make: Callable[[Any], Made]) -> Line:
    """A contender of this kind."""
    return Line(tables.HAND + way, "torch", note, make, "hand")


def columns(data: Transitions) -> Fields:
    """All transitions, a tensor `[rows, ...]` for each field; `done` is 1 where an episode terminated."""
    everything = data.all()
    everything["done"] = everything["terminated"].astype(np.float32)
    return {name: torch.from_numpy(everything[name]) for name in FIELDS}


# batches of transitions


def by_index_select(data: Transitions) -> Made:
    fields = list(columns(data).values())

    def sample() -> list[Tensor]:
        rows = torch.randint(data.rows, (BATCH,))
        return [field.index_select(0, rows) for field in fields]

    return sample, lambda: wrong(data, sample())


def by_index(data: Transitions) -> Made:
    fields = list(columns(data).values())

    def sample() -> list[Tensor]:
        rows = torch.randint(data.rows, (BATCH,))
        return [field[rows] for field in fields]

    return sample, lambda: wrong(data, sample())


def from_one_table(data: Transitions) -> Made:
    """All fields are columns of one float32 tensor, and a batch's are views of its columns."""
    fields = [field.reshape(data.rows, -1) for field in columns(data).values()]
    table, widths = torch.cat(fields, 1), [field.shape[1] for field in fields]

    def sample() -> tuple[Tensor, ...]:
        rows = torch.randint(data.rows, (BATCH,))
        return table.index_select(0, rows).split(widths, 1)

    return sample, lambda: wrong(data, sample())


def wrong(data: Transitions, batch: Any) -> str:
    """What is wrong with a batch of these five fields, if anything."""
    obs, _, reward, next_obs, _ = batch
    return data.wrong(obs, reward, next_obs)


# 3-step windows, made when a batch is read


class Windows:
    """The sums of a batch's next `n` rewards, as far as its episodes go, from the fields of single transitions."""

    def __init__(self, fields: Fields, ended: Tensor, n: int) -> None:
        self.fields, self.ended, self.n = fields, ended, n
        self.ahead, self.powers = torch.arange(n), GAMMA ** torch.arange(n + 1)

    def sample(self, rows: int) -> tuple[Tensor, ...]:
        """Obs, action, reward, next_obs and discount of windows that begin in one of the first `rows`."""
        get, n = self.fields, self.n
        first = torch.randint(rows - n + 1, (BATCH,))
        steps = (first[:, None] + self.ahead).view(-1)
        over = self.ended.index_select(0, steps).view(-1, n).cumsum(1)
        going = torch.ones(BATCH, n)
        going[:, 1:] = over[:, :-1] == 0
        used = going.sum(1).long()
        reward = (get["reward"].index_select(0, steps).view(-1, n) * going * self.powers[:n]).sum(1)
        last = first + used - 1
        obs, action = (get[name].index_select(0, first) for name in ("obs", "action"))
        discount = self.powers.index_select(0, used) * (1 - get["done"].index_select(0, last))
        return obs, action, reward, get["next_obs"].index_select(0, last), discount


def windows(data: Transitions) -> Made:
    everything = data.all()
    ended = torch.from_numpy((everything["terminated"] | everything["truncated"]).astype(np.float32))
    made = Windows(columns(data), ended, data.n)

    def sample() -> tuple[Tensor, ...]:
        return made.sample(data.rows)

    return sample, lambda: wrong(data, sample())


# priorities


class SumTree:
    """Sums of priorities in a NumPy array; all rows of a call go down or up a level at once."""

    def __init__(self, rows: int) -> None:
        self.depth = (rows - 1).bit_length()
        self.leaves = 1 << self.depth
        self.sums = np.zeros(2 * self.leaves)
        self.rng = np.random.default_rng(0)

    def set(self, rows: np.ndarray, priorities: Any) -> None:
        node = rows + self.leaves
        self.sums[node] = priorities
        for _ in range(self.depth):
            node >>= 1
            self.sums[node] = self.sums[2 * node] + self.sums[2 * node + 1]

    def draw(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows, one out of each of `count` equal parts of the total, and their shares of it."""
        part = (np.arange(count) + self.rng.random(count)) * (self.sums[1] / count)
        node = np.ones(count, np.int64)
        for _ in range(self.depth):
            node *= 2
            left = self.sums[node]
            right = part >= left
            part -= left * right
            node += right
        return node - self.leaves, self.sums[node] / self.sums[1]


def prioritized(data: Transitions) -> Made:
    fields, tree, errors = list(columns(data).values()), SumTree(data.rows), td_errors()
    tree.set(np.arange(data.rows), 1.0)

    def sample() -> list[Tensor]:
        places, shares = tree.draw(BATCH)
        weights = (data.rows * shares) ** -BETA
        rows = torch.from_numpy(places)
        batch = [field.index_select(0, rows) for field in fields]
        batch.append(torch.from_numpy((weights / weights.max()).astype(np.float32)))
        tree.set(places, (np.abs(errors) + 1e-6) ** ALPHA)
        return batch

    return sample, lambda: wrong(data, sample()[:-1])


# adding steps


class Store:
    """A ring of steps of all envs, `[T, N, ...]`, in NumPy arrays that torch sees as well."""

    def __init__(self, data: Transitions) -> None:
        self.data, self.at, self.added = data, 0, 0
        shape = data.steps, data.envs
        scalars: tuple[int, ...] = ()
        shapes = {"obs": data.obs_shape, "action": (data.action_dim,), "reward": scalars, "next_obs": data.obs_shape}
        self.arrays = {name: np.zeros((*shape, *shapes.get(name, scalars)), np.float32) for name in FIELDS}
        self.ended = np.zeros(shape, np.float32)
        self.tree = SumTree(data.rows) if data.prioritized else None
        self.places = np.arange(data.rows).reshape(shape)

    def adder(self, arrays: dict[str, Any], ended: Any) -> Callable[..., None]:
        """`add` by slices of these arrays or tensors."""
        obs, action, reward, next_obs, done = (arrays[name] for name in FIELDS)
        windows, tree, places, steps = self.data.n > 1, self.tree, self.places, self.data.steps

        def add(o: Any, a: Any, r: Any, following: Any, d: Any, end: Any) -> None:
            at = self.at
            obs[at] = o
            action[at] = a
            reward[at] = r
            next_obs[at] = following
            done[at] = d
            if windows:
                ended[at] = end
            if tree is not None:
                tree.set(places[at], 1.0)
            self.at = at + 1 if at + 1 < steps else 0

        return add

    def batch(self) -> tuple[Any, ...]:
        """A batch of the first steps, by which `check` sees what was stored."""
        steps = 2 * EPISODE
        flat = {name: torch.from_numpy(array[:steps]).flatten(0, 1) for name, array in self.arrays.items()}
        if self.data.n > 1:
            return Windows(flat, torch.from_numpy(self.ended[:steps]).flatten(), self.data.n).sample(steps)
        rows = torch.randint(steps * self.data.envs, (BATCH,))
        if self.tree is not None:
            assert self.tree.sums[1] == steps * self.data.envs
        return tuple(field[rows] for field in flat.values())


def step(columns: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """The arguments of `add`."""
    done = columns["terminated"].astype(np.float32)
    ended = (columns["terminated"] | columns["truncated"]).astype(np.float32)
    return *(columns[name] for name in FIELDS[:-1]), done, ended


def torch_step(columns: dict[str, np.ndarray]) -> tuple[Tensor, ...]:
    return tuple(map(torch.from_numpy, step(columns)))
