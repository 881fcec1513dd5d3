"""rsl_rl's algorithms with the storage of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import rsl_rl.algorithms as host
import torch
from torch import Tensor

from ..base import passes_on
from .storage import RolloutStorage, Transition

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["PPO", "Distillation"]

Base: Any = host.PPO
DistillationBase: Any = host.Distillation


class PPO(Base):
    """rsl_rl's PPO, which bootstraps a time-out from V(final observation) if the env provides that observation.

    ``extras["time_outs"]`` marks the envs that were cut off, as in rsl_rl. ``extras["final_obs"]`` holds their final
    observations, shaped like the observations; rows of other envs are not read. Without ``final_obs``, rsl_rl's own
    approximation is used: γV(s_t), the value of the state before the step, is added to the reward.
    """

    @passes_on(Base.__init__)
    def __init__(self, actor: object, critic: object, storage: object, *args: object, **options: object) -> None:
        super().__init__(actor, critic, storage, *args, **options)
        self.storage: RolloutStorage = RolloutStorage.from_original(storage)
        self.transition: Transition = RolloutStorage.Transition()

    def process_env_step(self, obs: TensorDict, rewards: Tensor, dones: Tensor, extras: dict[str, Any]) -> None:
        """Record one step. The arguments are rsl_rl's."""
        time_outs, final_obs = extras.get("time_outs"), extras.get("final_obs")
        if time_outs is not None and final_obs is not None:
            extras = {name: value for name, value in extras.items() if name != "time_outs"}
            self.transition.time_outs = time_outs = time_outs.to(self.device).bool()
            if bool(time_outs.any()):
                self.transition.final_values = self._value(final_obs.to(self.device))
        super().process_env_step(obs, rewards, dones, extras)

    def compute_returns(self, obs: TensorDict) -> None:
        """Compute returns and advantages by GAE; advantages are normalized as in rsl_rl."""
        normalize = not self.normalize_advantage_per_mini_batch
        self.storage.compute_returns(self._value(obs), self.gamma, self.lam, normalize_advantage=normalize)

    def _value(self, obs: TensorDict) -> Tensor:
        """V of observations that follow the last ones. A recurrent critic's state is restored afterwards."""
        state = self.critic.get_hidden_state()
        with torch.no_grad():
            value = self.critic(obs)
        self.critic.reset(hidden_state=state)
        return value


class Distillation(DistillationBase):
    """rsl_rl's distillation with the storage of this package."""

    @passes_on(DistillationBase.__init__)
    def __init__(self, student: object, teacher: object, storage: object, *args: object, **options: object) -> None:
        super().__init__(student, teacher, storage, *args, **options)
        self.storage: RolloutStorage = RolloutStorage.from_original(storage)
        self.transition: Transition = RolloutStorage.Transition()
