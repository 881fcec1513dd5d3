"""A simulator of point masses: thousands of envs that step at once in tensors, on any device, as GPU simulators do."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

STARTS = 2**16
"""The number of random starts. An env takes another one for each of its episodes."""

FINAL = ("final_obs", "final_observation", "AutoResetWrapper_final_obs", "terminal", None)
"""The ways to hand out final observations: as Isaac Lab, ManiSkill, MuJoCo Playground and mjlab do, or not at all."""


class PointMasses:
    """``num_envs`` point masses in a plane, pushed towards goals.

    An observation is the position, the velocity and the goal (float32 ``[N, 6]``). An action is the force, from -1 to 1
    (``[N, 2]``). The reward is 1 at the goal, and less the further away. Who leaves the plane ends an episode, and the
    time limit truncates it. Ended envs are reset in the same step, which returns the observation after the reset.

    Args:
        num_envs: N.
        device: of all tensors.
        final: how the final observations are handed out. "AutoResetWrapper_final_obs" has rows by env at every step,
            and nothing waits for the device. The others come only where an episode ended, which the host has to know:
            "final_obs" has rows by env, "final_observation" has a mask as well, and "terminal" has the rows of the
            ended envs, with their numbers. None hides them.
        as_rsl_rl: return what rsl_rl's ``VecEnv`` returns: observations in a TensorDict, in the group "policy"; one
            flag for both ends; the time limits in the extras.
        time_limit: the steps of an episode.
        seed: of the starts.
    """

    size, step_size, pull = 2.0, 0.1, 4.0

    def __init__(
        self,
        num_envs: int = 4096,
        device: str | torch.device = "cpu",
        *,
        final: str | None = "AutoResetWrapper_final_obs",
        as_rsl_rl: bool = False,
        time_limit: int = 100,
        seed: int = 0,
    ) -> None:
        assert final in FINAL
        self.num_envs, self.device, self.final, self.as_rsl_rl = num_envs, torch.device(device), final, as_rsl_rl
        self.time_limit = self.max_episode_length = time_limit
        self.num_actions = 2
        box = gym.spaces.Box(-np.inf, np.inf, (6,), np.float32)
        self.single_observation_space = gym.spaces.Dict(policy=box) if as_rsl_rl else box
        self.single_action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        starts = torch.rand(STARTS, 6, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        starts[:, 2:4] *= 0.5  # velocities
        self.starts = starts.to(self.device)
        self.env = torch.arange(num_envs, device=self.device)
        self.episode, self.age = torch.zeros_like(self.env), torch.zeros_like(self.env)
        self.reset()

    def reset(self) -> tuple[Any, dict[str, Any]]:
        """Start new episodes. Their ages differ, so that not all of them are truncated in the same step."""
        self.episode = self.episode + 1
        self.age = self.env % self.time_limit
        self.state = self._start()
        return self.get_observations(), {}

    def _start(self) -> Tensor:
        return self.starts[(self.env * 7919 + self.episode * 104_729) % STARTS]

    def get_observations(self) -> Any:
        """The current observations."""
        return self._given(self.state)

    def _given(self, obs: Tensor) -> Any:
        return TensorDict({"policy": obs}, batch_size=obs.shape[:1]) if self.as_rsl_rl else obs

    def step(self, action: Tensor) -> tuple[Any, ...]:
        """Make one step in all envs: observations, rewards, terminated, truncated, info; or as rsl_rl."""
        position, velocity, goal = self.state.split(2, dim=1)
        velocity = 0.95 * velocity + self.step_size * self.pull * action.clamp(-1.0, 1.0)
        position = position + self.step_size * velocity
        reached = torch.cat([position, velocity, goal], 1)
        reward = torch.exp(-(position - goal).square().sum(1))
        self.age = self.age + 1
        terminated = (position.abs() > self.size).any(1)
        truncated = self.age >= self.time_limit
        done = terminated | truncated
        self.episode, self.age = self.episode + done, self.age * ~done
        self.state = torch.where(done[:, None], self._start(), reached)
        info = self._final(reached, done)
        if self.as_rsl_rl:
            return self.get_observations(), reward, done.long(), {**info, "time_outs": truncated & ~terminated}
        return self.get_observations(), reward, terminated, truncated, info

    def _final(self, reached: Tensor, done: Tensor) -> dict[str, Any]:
        """The final observations as an info has them; ``reached`` is what each env observes before any reset."""
        if self.final == "AutoResetWrapper_final_obs":
            return {self.final: self._given(reached)}
        if self.final is None or not done.any():
            return {}
        if self.final == "terminal":
            ended = done.nonzero().squeeze(1)
            return {"terminal": {"env_ids": ended, "observations": self._given(reached[ended])}}
        mask = {f"_{self.final}": done} if self.final == "final_observation" else {}
        return {self.final: self._given(reached), **mask}

    def close(self) -> None:
        """Nothing is left open."""
