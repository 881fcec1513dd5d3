"""The containers that go into rsl_rl's storage and come out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["Batch", "Transition"]


class Transition:
    """One step of all envs, filled bit by bit.

    ``observations``, ``actions``, ``rewards``, ``dones``; for reinforcement learning ``values``, ``actions_log_prob``,
    ``distribution_params``; for distillation ``privileged_actions``; ``hidden_states`` (actor's, critic's), before the
    step. Beyond rsl_rl: ``time_outs`` ``[N]``, and ``final_values`` ``[N]``, read where a time-out is.
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
        """Back to nothing."""
        self.__init__()


@dataclass(eq=False)
class Batch:
    """A minibatch of tensors, ``observations`` being a TensorDict; what the kind of training does not need is None."""

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
