"""FastTD3 and holosoma from checkouts of their sources, which no index has, without simulators and loggers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

__all__ = ["Point", "buffer_of", "train"]

CHECKOUTS = Path(os.environ.get("RELIVE_CHECKOUTS", Path(__file__).resolve().parents[2] / "build" / "checkouts"))
FILES = {
    "fasttd3": CHECKOUTS / "FastTD3/fast_td3/fast_td3_utils.py",
    "holosoma": CHECKOUTS / "holosoma/src/holosoma/holosoma/agents/fast_sac/fast_sac_utils.py",
}


def buffer_of(library: str) -> Any:
    """The class of its replay buffer."""
    file = FILES[library]
    assert file.is_file(), f"'{file}' is missing: `make checkouts` gets it"
    with pytest.MonkeyPatch.context() as patch:
        config: Any = ModuleType("holosoma.config_types.algo")
        config.FastSACConfig = object  # for an annotation
        for name in ("holosoma", "holosoma.config_types", "holosoma.config_types.algo"):
            patch.setitem(sys.modules, name, config)
        spec = spec_from_file_location(f"{library}_utils", file)
        assert spec
        assert spec.loader
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    return module.SimpleReplayBuffer


class Point:
    """Go to 0 and stay there: N points in a plane, under the names of FastTD3's environments.

    A point starts anywhere in a square. Its episode ends after 20 steps, or if it leaves a larger square.
    """

    num_obs, num_actions, max_episode_steps = 4, 2, 20

    def __init__(self, num_envs: int, asymmetric: bool = False) -> None:
        self.num_envs, self.asymmetric_obs = num_envs, asymmetric
        self.num_privileged_obs = 6
        """What the critic observes: the same, and the square of the distance, twice."""
        self._rng, self.rewards = torch.Generator().manual_seed(0), list[float]()
        self.reset()

    def _start(self) -> Tensor:
        return torch.rand(self.num_envs, 2, generator=self._rng) * 2 - 1

    def reset(self) -> Tensor:
        """All points anew, at different times of their episodes."""
        self._x, self._last = self._start(), torch.zeros(self.num_envs, 2)
        self._time = torch.randint(self.max_episode_steps, (self.num_envs,), generator=self._rng)
        return self._obs()

    def reset_with_critic_obs(self) -> tuple[Tensor, Tensor]:
        """As :meth:`reset`, with what the critic observes."""
        obs = self.reset()
        return obs, self._critic(obs)

    def _obs(self) -> Tensor:
        return torch.cat([self._x, self._last], 1)

    @staticmethod
    def _critic(obs: Tensor) -> Tensor:
        far = obs[:, :2].square().sum(1, keepdim=True)
        return torch.cat([obs, far, far], 1)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """Resets a point whose episode ended; ``raw`` has the observation that it ended on."""
        self._x, self._last = self._x + 0.2 * actions.clamp(-1, 1), actions.clone()
        self._time += 1
        reward = -self._x.square().sum(1)
        self.rewards.append(reward.mean().item())
        terminal, raw = (self._x.abs() > 2).any(1), self._obs()
        truncated = (self._time >= self.max_episode_steps) & ~terminal
        done = terminal | truncated
        self._x = torch.where(done[:, None], self._start(), self._x)
        self._last = torch.where(done[:, None], 0.0, self._last)
        self._time = torch.where(done, 0, self._time)
        obs = self._obs()
        seen = {"raw": {"obs": raw, "critic_obs": self._critic(raw)}, "critic": self._critic(obs)}
        return obs, reward, done, {"time_outs": truncated, "observations": seen}


class _Silence:
    """In place of ``tqdm.tqdm``."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def update(self, *_: Any) -> None: ...

    def set_description(self, *_: Any) -> None: ...


@contextmanager
def _scripts(make_args: Any, env: Any) -> Iterator[Any]:
    """FastTD3's ``train.py``, imported among modules in place of those that it does not need here."""
    with pytest.MonkeyPatch.context() as patch:
        folder = FILES["fasttd3"].parent
        patch.syspath_prepend(str(folder))
        parts: dict[str, Any] = {name: ModuleType(name) for name in ("wandb", "tqdm", "tyro", "environments")}
        parts["tqdm"].tqdm, parts["tyro"].cli = _Silence, make_args
        for name in ("humanoid_bench_env", "mujoco_playground_env"):
            module: Any = ModuleType(name)
            module.HumanoidBenchEnv, module.make_env = lambda *_, **__: env, lambda *_, **__: (env, env, env)
            parts[f"environments.{name}"] = module
        for name, module in parts.items():
            patch.setitem(sys.modules, name, module)
        for name in ("train", "hyperparams", "fast_td3", "fast_td3_utils"):
            patch.delitem(sys.modules, name, raising=False)
        for name in ("OMP_NUM_THREADS", "MUJOCO_GL", "TORCHDYNAMO_INLINE_INBUILT_NN_MODULES"):
            patch.setenv(name, "1")  # it sets these and more, which end with the patch
        precision = torch.get_float32_matmul_precision()
        try:
            yield import_module("train")
        finally:
            torch.set_float32_matmul_precision(precision)
            for name in ("train", "hyperparams", "fast_td3", "fast_td3_utils"):
                sys.modules.pop(name, None)


def train(buffer: Any, asymmetric: bool = False, num_envs: int = 16, **options: Any) -> list[float]:
    """Run FastTD3's own ``main()`` on a small task with this class of buffer; the mean reward of each step."""
    env = Point(num_envs, asymmetric)
    given: dict[str, Any] = {
        "env_name": "Point" if asymmetric else "h1-point", "cuda": False, "compile": False, "amp": False,
        "use_wandb": False, "num_envs": env.num_envs, "buffer_size": 128, "batch_size": 512, "v_min": -20.0,
        "v_max": 1.0, "num_atoms": 51, "actor_hidden_dim": 64, "critic_hidden_dim": 128, "gamma": 0.9,
        "render_interval": 0, "save_interval": 0, "eval_interval": 100, **options,
    }  # fmt: skip
    with _scripts(lambda kind: replace(kind(), **given), env) as script:
        script.SimpleReplayBuffer = buffer
        script.main()
    return env.rewards
