"""RecordedEnv: an environment that writes its own steps into a lane, in the process that it runs in."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, SupportsFloat, TypeVar

import gymnasium as gym
import numpy as np

from ..errors import LifecycleError

Obs = TypeVar("Obs")
Act = TypeVar("Act")


# It is alone in this file: its base class is needed at import, and `import relive` must not import gymnasium.
class RecordedEnv(gym.Wrapper[Obs, Act, Obs, Act]):
    """An env that writes each of its steps into a lane; made by :meth:`relive.Lanes.recorded`.

    Args:
        env: the env that is stepped.
        make_writer: makes the lane's ``LaneWriter``; called at the first reset, in the process that plays.
    """

    def __init__(self, env: gym.Env[Obs, Act], make_writer: Callable[[], Any]) -> None:
        super().__init__(env)
        self._make_writer = make_writer
        self._writer: Any = None
        self._obs: Obs | None = None
        self._goes_on = False
        """True while an episode is under way."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        """Reset the env. An episode that was under way is interrupted."""
        obs, info = self.env.reset(seed=seed, options=options)
        if self._writer is None:
            self._writer = self._make_writer()
        if self._goes_on:
            self._writer.interrupt()
        self._obs, self._goes_on = deepcopy(obs), True  # a copy, because an env may use the memory again
        return obs, info

    def step(self, action: Act) -> tuple[Obs, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step the env and write the step. The call waits while the lane is full.

        Raises:
            LifecycleError: the env was not reset since it was made or closed.
            FieldError, ShapeError, DTypeError: the step does not fit the schema of the lanes.
        """
        if self._writer is None:
            raise LifecycleError("step(): call reset() first")
        obs, reward, terminated, truncated, info = self.env.step(action)
        done = bool(terminated or truncated)
        step = {
            "obs": self._obs,
            "action": action,
            "reward": np.float32(reward),
            "terminated": bool(terminated),
            "truncated": bool(truncated),
        }
        # a single env does not reset itself: at the end of an episode, obs is the final observation
        self._writer.add(step | {"next_obs": obs} if done or self._writer.own_next_obs else step)
        self._obs, self._goes_on = deepcopy(obs), not done
        return obs, reward, terminated, truncated, info

    def close(self) -> None:
        """Close the env, and let another process write to the lane."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        super().close()
