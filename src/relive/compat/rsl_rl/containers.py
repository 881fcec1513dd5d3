"""The objects that rsl_rl's storage takes and returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["Batch", "Transition"]


class Transition:
    """One step of all envs, filled field by field.

    ``observations``, ``actions``, ``rewards``, ``dones``; for reinforcement learning ``values``, ``actions_log_prob``,
    ``distribution_params``; for distillation ``privileged_actions``; ``hidden_states`` (actor's, critic's) before the
    step. Not in rsl_rl: ``time_outs`` ``[N]``, and ``final_values`` ``[N]``, read at time-outs.
    """

    def __init__(self) -> None:
        self.observations: TensorDict | None = None
        self.actions: Tensor | None = None
        self.rewards: Tensor | None = None
        self.dones: Tensor | None = None
        self.values: Tensor | None = None
        self.actions_log_prob: Tensor | None = None
        self.distribution_params: tuple[Tensor, ...] | None = None
        self.privileged_actions: Tensor | None = None
        self.hidden_states: tuple[Any, Any] = (None, None)
        self.time_outs: Tensor | None = None
        self.final_values: Tensor | None = None

    def clear(self) -> None:
        """Set all fields back to None."""
        self.__init__()


@dataclass(eq=False)
class Batch:
    """A minibatch of tensors; ``observations`` is a TensorDict. Fields that the training type does not use are None."""

    observations: Any = None
    actions: Any = None
    values: Any = None
    advantages: Any = None
    returns: Any = None
    old_actions_log_prob: Any = None
    old_distribution_params: Any = None
    hidden_states: tuple[Any, Any] = (None, None)
    masks: Any = None
    privileged_actions: Any = None
    dones: Any = None
