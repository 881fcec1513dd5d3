"""The rollouts that `add` and the minibatches are measured on, and what their contenders share."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

SIZES = ((2048, 8, 17, 6), (24, 4096, 48, 12))  # T, N, columns of obs, columns of action
BATCHES, EPOCHS = 4, 5
READ_BY_PPO = ("obs", "action", "log_prob", "value", "advantage", "return")


@dataclass(frozen=True)
class Rollout:
    """float32 columns [T, N, ...] and bool flags [T, N]; `value` and `obs[..., 0]` number the rows."""

    columns: Mapping[str, np.ndarray]

    @property
    def shape(self) -> tuple[int, int]:
        return self.columns["reward"].shape[0], self.columns["reward"].shape[1]

    @property
    def rows(self) -> int:
        return self.columns["reward"].size

    @property
    def batch_size(self) -> int:
        return self.rows // BATCHES

    @property
    def obs_dim(self) -> int:
        return self.columns["obs"].shape[-1]

    @property
    def action_dim(self) -> int:
        return self.columns["action"].shape[-1]

    def step(self, t: int = 0) -> dict[str, np.ndarray]:
        """One vector step [N, ...] with the seven fields that go in, as arrays of their own."""
        names = ("obs", "action", "reward", "terminated", "truncated", "value", "log_prob")
        return {name: self.columns[name][t].copy() for name in names}

    def torch_step(self, t: int = 0) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(array) for name, array in self.step(t).items()}

    def tensors(self, names: tuple[str, ...] = READ_BY_PPO) -> dict[str, torch.Tensor]:
        """The named columns as tensors [T, N, ...] of their own."""
        return {name: torch.from_numpy(self.columns[name].copy()) for name in names}

    @staticmethod
    def make(T: int, N: int, obs_dim: int, action_dim: int, seed: int = 0, done: float = 0.01) -> "Rollout":
        """Half of the episodes' ends, which are the share `done` of the steps, are terminals."""
        rng = np.random.default_rng(seed)
        shapes = {"obs": (T, N, obs_dim), "action": (T, N, action_dim)}
        names = ("obs", "action", "reward", "log_prob", "value", "advantage", "return")
        columns: dict[str, np.ndarray] = {}
        columns |= {name: rng.standard_normal(shapes.get(name, (T, N)), np.float32) for name in names}
        columns["value"][:] = np.arange(T * N, dtype=np.float32).reshape(T, N)
        columns["obs"][..., 0] = columns["value"]
        draw = rng.random((T, N))
        columns["terminated"] = draw < done / 2
        columns["truncated"] = (draw < done) & ~columns["terminated"]
        return Rollout(columns)


def box(columns: int) -> Any:
    return importlib.import_module("gymnasium.spaces").Box(-np.inf, np.inf, (columns,))


def relive_buffer(relive: ModuleType, data: Rollout, **more: tuple[int, ...]) -> Any:
    """An empty buffer for such a rollout, with `more` float32 fields than it has."""
    T, N = data.shape
    scalar, flag = relive.Field(()), relive.Field((), torch.bool)
    schema = relive.Schema(
        {
            "obs": relive.Field((data.obs_dim,)),
            "action": relive.Field((data.action_dim,)),
            "reward": scalar,
            "terminated": flag,
            "truncated": flag,
            "value": scalar,
            "log_prob": scalar,
            **{name: relive.Field(shape) for name, shape in more.items()},
        }
    )
    return relive.RolloutBuffer(schema, num_steps=T, num_envs=N)
