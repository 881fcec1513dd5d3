"""rsl_rl's algorithms with the storage of this package in place of their own."""

from __future__ import annotations

from typing import Any

import rsl_rl.algorithms as host
import torch
from torch import Tensor

from .storage import RolloutStorage

__all__ = ["PPO", "Distillation"]

Base: Any = host.PPO
DistillationBase: Any = host.Distillation


def _ours(storage: Any, example: Any) -> RolloutStorage:
    if isinstance(storage, RolloutStorage):
        return storage
    shape = storage.num_envs, storage.num_transitions_per_env
    return RolloutStorage(storage.training_type, *shape, example, storage.actions_shape, storage.device)


class PPO(Base):
    """rsl_rl's PPO, which values a time-out by V(the true final observation) where the env tells it.

    ``extras["time_outs"]`` says which envs were cut off, as rsl_rl has it, and ``extras["final_obs"]``, like the
    observations, what they ended on; rows of other envs are not read. Where there is no ``final_obs``, rsl_rl's own
    approximation is all that is left: the reward is given γV(s_t), the value of the state before the step.
    """

    def __init__(self, actor: Any, critic: Any, storage: Any, *args: Any, **options: Any) -> None:
        super().__init__(actor, critic, storage, *args, **options)
        self.storage = _ours(storage, storage.observations[0])
        self.transition = RolloutStorage.Transition()

    def process_env_step(self, obs: Any, rewards: Tensor, dones: Tensor, extras: dict[str, Any]) -> None:
        """Record one step; arguments as in rsl_rl."""
        time_outs, final_obs = extras.get("time_outs"), extras.get("final_obs")
        if time_outs is not None and final_obs is not None:
            extras = {name: value for name, value in extras.items() if name != "time_outs"}
            self.transition.time_outs = time_outs = time_outs.to(self.device).bool()
            if bool(time_outs.any()):
                self.transition.final_values = self._value(final_obs.to(self.device))
        super().process_env_step(obs, rewards, dones, extras)

    def compute_returns(self, obs: Any) -> None:
        """GAE over the storage, and the advantages, normalised as rsl_rl does."""
        normalize = not self.normalize_advantage_per_mini_batch
        self.storage.compute_returns(self._value(obs), self.gamma, self.lam, normalize_advantage=normalize)

    def _value(self, obs: Any) -> Tensor:
        """V of observations that follow the last one; a recurrent critic forgets that it saw them."""
        state = self.critic.get_hidden_state()
        with torch.no_grad():
            value = self.critic(obs)
        self.critic.reset(hidden_state=state)
        return value


class Distillation(DistillationBase):
    """rsl_rl's distillation over the storage of this package."""

    def __init__(self, student: Any, teacher: Any, storage: Any, *args: Any, **options: Any) -> None:
        super().__init__(student, teacher, storage, *args, **options)
        self.storage = _ours(storage, storage.observations[0])
        self.transition = RolloutStorage.Transition()
