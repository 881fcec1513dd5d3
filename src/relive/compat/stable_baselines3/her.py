"""HerReplayBuffer of Stable-Baselines3 2.9 over :class:`relive.Hindsight`."""

from __future__ import annotations

import copy
import warnings
from importlib import import_module
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from ...steps.arrays import Array, numpy_view
from ...steps.schema import Field
from ...views.hindsight import Hindsight
from ..arrays import sent
from .uniform import DictReplayBuffer

__all__ = ["HerReplayBuffer"]

her: Any = import_module("stable_baselines3.her.her_replay_buffer")
strategies: Any = import_module("stable_baselines3.her.goal_selection_strategy")


STEP = "step"
"""The field that holds the place of a step's info dictionary in the flat ``infos``."""


class _Goals:
    """Calls the training env about goals. The env is not pickled with the buffer.

    Args:
        env: the training env.
        infos: the info dictionaries of the steps, object ``[buffer_size, n_envs]``; None if they are not kept.
    """

    def __init__(self, env: Any, infos: Array | None) -> None:
        self.env, self.infos = env, infos

    def _ask(self, method: str, achieved: Array, desired: Array, steps: Array | None) -> Any:
        assert self.env is not None, (
            "You must initialize HerReplayBuffer with a VecEnv so it can compute rewards for virtual transitions"
        )
        infos: Any = [{} for _ in range(len(achieved))]
        if self.infos is not None:
            infos = copy.deepcopy(self.infos.reshape(-1)[steps])  # the env may write to them
        return np.asarray(self.env.env_method(method, achieved, desired, infos, indices=[0])[0])

    def reward(self, achieved: Array, desired: Array, steps: Array | None = None) -> Array:
        """The first env's ``compute_reward``, float32 ``[M]``."""
        return self._ask("compute_reward", achieved, desired, steps).astype(np.float32)

    def terminated(self, achieved: Array, desired: Array, steps: Array | None = None) -> Array:
        """The first env's ``compute_terminated``, bool ``[M]``."""
        return self._ask("compute_terminated", achieved, desired, steps).astype(np.bool_)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"env": None}


class HerReplayBuffer(DictReplayBuffer, her.HerReplayBuffer):
    """``stable_baselines3.her.HerReplayBuffer`` with its arguments, and ``seed``.

    Each observation is stored once. Each row is relabelled independently with probability ``her_ratio``. Rows of
    unfinished episodes can be relabelled, too, with goals achieved so far. The env's ``compute_terminated(achieved,
    desired, info)``, if there is one, decides which relabelled rows are terminal; otherwise the recorded flag stays.

    Args:
        buffer_size: rows over all envs. An episode of k steps takes k + 1 rows.
        observation_space: of one env, with ``achieved_goal`` and ``desired_goal``.
        action_space: of one env.
        env: the training env. Its first member's ``compute_reward`` is called, with empty infos.
        device: of the batches.
        n_envs: N.
        optimize_memory_usage: has no effect.
        handle_timeout_termination: see :class:`ReplayBuffer`.
        n_sampled_goal: relabelled rows per original row.
        goal_selection_strategy: "future", "final" or "episode", or the host's enumeration.
        copy_info_dict: keep the infos of all steps and pass copies of them to ``compute_reward``.
        seed: see :class:`ReplayBuffer`.
        n_steps: rewards per window, each recomputed. Above 1, batches have ``discounts``.
        gamma: discount per step of windows.

    Raises:
        TypeError: a subclass overrides methods that are not called here, such as ``_sample_goals``.
    """

    _replaced = (*DictReplayBuffer._replaced, "_get_real_samples", "_get_virtual_samples", "_sample_goals")

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        action_space: spaces.Space[Any],
        env: Any,
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_sampled_goal: int = 4,
        goal_selection_strategy: Any = "future",
        copy_info_dict: bool = False,
        *,
        seed: int | None = None,
        n_steps: int = 1,
        gamma: float = 0.99,
    ) -> None:
        if isinstance(goal_selection_strategy, str):
            goal_selection_strategy = strategies.KEY_TO_GOAL_STRATEGY[goal_selection_strategy.lower()]
        assert isinstance(goal_selection_strategy, strategies.GoalSelectionStrategy), (
            f"Invalid goal selection strategy, please use one of {list(strategies.GoalSelectionStrategy)}"
        )
        self.goal_selection_strategy, self.n_sampled_goal = goal_selection_strategy, n_sampled_goal
        self.her_ratio, self.copy_info_dict = 1 - 1.0 / (n_sampled_goal + 1), copy_info_dict
        self.infos, further = None, {}
        if copy_info_dict:
            self.infos = np.full((max(buffer_size // n_envs, 2), n_envs), None)
            further = {STEP: Field((), torch.int64)}
        self._goals = _Goals(env, self.infos)
        knows_ends = env is not None and env.has_attr("compute_terminated")
        view = Hindsight(
            self._goals.reward, goal_selection_strategy.name.lower(), k=n_sampled_goal, n=n_steps, gamma=gamma,
            terminated_fn=self._goals.terminated if knows_ends else None, info=STEP if copy_info_dict else None,
        )  # fmt: skip
        super().__init__(
            buffer_size, observation_space, action_space, device, n_envs, optimize_memory_usage,
            handle_timeout_termination, seed=seed, view=view, **further,
        )  # fmt: skip

    @classmethod
    def _options_of(cls, original: Any) -> dict[str, Any]:
        names = "env", "n_sampled_goal", "goal_selection_strategy", "copy_info_dict"
        return super()._options_of(original) | {name: getattr(original, name) for name in names}

    def _taken(self, original: Any, rows: Array) -> dict[str, Any]:
        if self.infos is None:
            return {}
        steps = (self._added + np.arange(len(rows))) % self.buffer_size
        self.infos[steps] = original.infos[rows]
        return {STEP: steps[:, None] * self.n_envs + np.arange(self.n_envs)}

    def add(
        self, obs: Any, next_obs: Any, action: Array, reward: Array, done: Array, infos: list[dict[str, Any]]
    ) -> None:
        """Like :meth:`ReplayBuffer.add`. With ``copy_info_dict`` the infos are kept without a copy."""
        if self.infos is not None:
            self.infos[self.pos] = infos
            self._further = {STEP: self.pos * self.n_envs + np.arange(self.n_envs)}
        super().add(obs, next_obs, action, reward, done, infos)

    @property
    def _stores_once(self) -> bool:
        return True

    @property
    def env(self) -> Any:
        """The training env; None after unpickling, until :meth:`set_env`."""
        return self._goals.env

    def set_env(self, env: Any) -> None:
        """Set the training env after unpickling.

        Raises:
            ValueError: the buffer has one.
        """
        if self._goals.env is not None:
            raise ValueError("Trying to set env of already initialized environment.")
        self._goals.env = env

    def __getattr__(self, name: str) -> Any:
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name in ("ep_start", "ep_length", "_current_ep_start"):
            text += ": rows are stored in another order than the host's; `dones` says where episodes end"
        raise AttributeError(text)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._goals = self._view.reward_fn.__self__

    def truncate_last_trajectory(self) -> None:
        """Cut off the unfinished episodes. Their newest steps lack a next observation and are never drawn."""
        if not np.all(self._done):
            warnings.warn(
                "The last trajectory in the replay buffer will be truncated.\n"
                "If you are in the same episode as when the replay buffer was saved,\n"
                "you should use `truncate_last_trajectory=False` to avoid that issue.",
                stacklevel=2,
            )
            self._replay.interrupt()

    def _drawn(self, batch_size: int, env: Any) -> Any:
        return self._replay.sample(batch_size)

    def _fields(self, batch: Any, env: Any) -> tuple[Any, ...]:
        obs, action, next_obs, dones, reward = super()._fields(batch, env)
        if env is not None:
            reward = sent(self._normalize_reward(numpy_view(batch["reward"].unsqueeze(1)), env), self.device)
        if self._view.n == 1:
            return obs, action, next_obs, dones, reward
        discounts = torch.pow(torch.tensor(self._view.gamma), batch["steps"].float()).unsqueeze(1)
        return obs, action, next_obs, dones, reward, sent(discounts, self.device)
