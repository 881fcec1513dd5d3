"""What a simulator of point masses has played, as plain lists; and what plays it again to a collector."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from relive import Schema
from support.point_masses import PointMasses


class Step(NamedTuple):
    """A transition of one env; numbers as plain lists, so that equal ones are the same to the bit."""

    obs: list[float]
    action: list[float]
    reward: float
    terminated: bool
    truncated: bool
    next_obs: list[float]


def push(obs: Any, **_: Any) -> Tensor:
    """A policy: a force outwards, so that some envs leave the plane before the time limit."""
    x = plain(obs)
    return x[:, 0:2].sign() + 0.1 * x[:, 4:6]


def worth(obs: Any, **_: Any) -> Tensor:
    """A value function."""
    return plain(obs) @ torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0]).to(plain(obs).device)


def plain(obs: Any) -> Tensor:
    return obs if isinstance(obs, Tensor) else obs["policy"]


def played(num_steps: int, num_envs: int, **options: Any) -> list[list[list[Step]]]:
    """By env, the episodes of the first steps of a simulator under :func:`push`, the newest one unfinished."""
    simulator = PointMasses(num_envs, final="AutoResetWrapper_final_obs", **options)
    episodes: list[list[list[Step]]] = [[[]] for _ in range(num_envs)]
    obs, _ = simulator.reset()
    for _ in range(num_steps):
        action = push(obs)
        after, reward, terminated, truncated, info = simulator.step(action)
        reached = info["AutoResetWrapper_final_obs"]  # what each env saw before any reset
        for n, mine in enumerate(episodes):
            flags = bool(terminated[n]), bool(truncated[n])
            mine[-1].append(Step(obs[n].tolist(), action[n].tolist(), float(reward[n]), *flags, reached[n].tolist()))
            if any(flags):
                mine.append([])
        obs = after
    return episodes


def ended(episodes: list[list[list[Step]]]) -> list[tuple[float, int, int]]:
    """The returns, lengths and envs of the episodes that ended, in the order of time, then of envs."""
    found: list[tuple[int, int, float, int]] = []
    for n, mine in enumerate(episodes):
        at = 0
        for episode in mine[:-1]:
            at, total = at + len(episode), 0.0
            for step in episode:
                total += step.reward
            found.append((at, n, total, len(episode)))
    return [(total, length, n) for _, n, total, length in sorted(found)]


def rows(batch: Mapping[str, Any]) -> list[Step]:
    """A batch as steps."""
    columns = {name: batch[name] for name in Step._fields}
    columns |= {name: plain(columns[name]) for name in ("obs", "next_obs")}
    return [Step(*row) for row in zip(*(columns[name].cpu().tolist() for name in Step._fields), strict=True)]


class Again:
    """A simulator that returns what another one returned; so nothing of its own waits for a device."""

    def __init__(self, simulator: PointMasses, num_steps: int) -> None:
        self.num_envs, self.device = simulator.num_envs, simulator.device
        self._obs, _ = simulator.reset()
        obs, self._answers = self._obs, list[Any]()
        for _ in range(num_steps):
            answer = simulator.step(push(obs))
            obs = answer[0]
            self._answers.append(answer)

    def reset(self) -> Any:
        self._left = iter(self._answers)
        return self._obs

    def step(self, action: Tensor) -> Any:
        return next(self._left)


class Edited:
    """A simulator whose answers are changed by a function of them and of the number of the step."""

    def __init__(self, simulator: Any, edit: Any) -> None:
        self.num_envs, self.device, self._simulator, self._edit = simulator.num_envs, simulator.device, simulator, edit
        self._count = 0

    def reset(self) -> Any:
        return self._simulator.reset()

    def step(self, action: Tensor) -> Any:
        self._count += 1
        return self._edit(self._simulator.step(action), self._count)


class InArrays:
    """A vector env of Gymnasium that plays a simulator and returns arrays."""

    def __init__(self, simulator: PointMasses) -> None:
        self.num_envs, self._simulator = simulator.num_envs, simulator
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        return in_arrays(self._simulator.reset())

    def step(self, action: Any) -> Any:
        return in_arrays(self._simulator.step(torch.as_tensor(action)))


def in_arrays(tree: Any) -> Any:
    """The same with arrays for tensors."""
    if isinstance(tree, dict):
        return {name: in_arrays(member) for name, member in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map(in_arrays, tree))
    return tree.numpy() if isinstance(tree, Tensor) else tree


def schema(simulator: PointMasses, **extras: Any) -> Schema:
    """The fields of its steps."""
    return Schema.from_env(simulator, **extras)


def by_env(tensor: Tensor, present: Iterable[bool]) -> Any:
    """Rows as an object array by env, None where an env has none."""
    found = np.empty(len(tensor), object)
    found[:] = [row if there else None for row, there in zip(tensor, present, strict=True)]
    return found
