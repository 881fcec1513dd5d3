"""rsl_rl's RolloutStorage, built on relive's RolloutBuffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor

from ...batches import Batch as Rows
from ...batches import swap_layers
from ...errors import FieldError, ShapeError
from ...parameters import one_of, require
from ...returns import GAE
from ...rollout.buffer import RolloutBuffer
from ...steps.schema import Field, Node, Schema, Spec, map_leaves
from ..base import FLAG, NUMBER, Column, DropIn, contents_of, renew, table_of, tensordict_of, write_column

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["RolloutStorage", "split_and_pad_trajectories", "unpad_trajectories"]


TYPES = ("rl", "distillation")
READ = ("obs", "action", "value", "advantage", "return", "log_prob")
"""The fields of a PPO minibatch, without those that the first transition declares."""
LEARNED = ("actions", "values", "advantages", "returns")
"""The columns that a minibatch has under their own names."""
STATES = ("a", "c")
"""The actor's and the critic's recurrent states."""


States: TypeAlias = "Tensor | tuple[Tensor, ...]"
"""A network's recurrent states ``[layers, N, size]``: a GRU's tensor, or an LSTM's pair."""


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
        self.hidden_states: tuple[States | None, States | None] = (None, None)
        self.time_outs: Tensor | None = None
        self.final_values: Tensor | None = None

    def clear(self) -> None:
        """Set all fields back to None."""
        self.__init__()


@dataclass(eq=False)
class Minibatch:
    """A minibatch of tensors; ``observations`` is a TensorDict. Fields that the training type does not use are None."""

    observations: Any = None
    actions: Any = None
    values: Any = None
    advantages: Any = None
    returns: Any = None
    old_actions_log_prob: Any = None
    old_distribution_params: Any = None
    hidden_states: tuple[States | None, ...] = (None, None)
    masks: Any = None
    privileged_actions: Any = None
    dones: Any = None


def _saved_states(name: str, doc: str) -> Any:
    """An attribute for one network's states: a list of tensors, or None until a transition has some."""

    def read(self: Any) -> list[Tensor] | None:
        return self._saved(name)

    def write(self: Any, values: Sequence[Tensor] | None) -> None:
        self._save(name, values)

    return property(read, write, doc=doc)


class RolloutStorage(DropIn):
    """The transitions of a rollout ``[T, N]``, added step by step, then read as minibatches.

    All its tensors are views of the rollout. They can be written in place; assigning to an attribute copies into it.

    Args:
        training_type: "rl" or "distillation".
        num_envs: N.
        num_transitions_per_env: T.
        obs: example observations ``[N, ...]`` of every group, nested or not; dtypes are kept.
        actions_shape: of one env's action; float32, as in rsl_rl.
        device: of the storage and the batches.
        reshuffle_each_epoch: False is rsl_rl's behaviour: one permutation for all epochs, and recurrent minibatches
            of envs in order. True draws a new permutation for each epoch, of transitions or of envs.
        seed: permutation k is a function of (seed, k). None draws a seed for each call that makes minibatches from
            torch's default generator, as rsl_rl does.

    Raises:
        ParameterError: an unknown training type, or a size below 1.
    """

    Transition = Transition
    Batch = Minibatch
    _own_attribute = "_buffer"
    _lacking = ("obs",)

    actions: Column = Column("action")
    privileged_actions: Column = Column("privileged_action")
    rewards: Column = Column("reward", single=True)
    values: Column = Column("value", single=True)
    advantages: Column = Column("advantage", single=True)
    returns: Column = Column("return", single=True)
    actions_log_prob: Column = Column("log_prob", single=True)
    final_values: Column = Column("final_value", single=True)
    dones: Column = Column("terminated", single=True, dtype=torch.uint8)
    time_outs: Column = Column("truncated", single=True)

    def __init__(
        self,
        training_type: str,
        num_envs: int,
        num_transitions_per_env: int,
        obs: TensorDict,
        actions_shape: tuple[int, ...] | list[int],
        device: str = "cpu",
        *,
        reshuffle_each_epoch: bool = True,
        seed: int | None = None,
    ) -> None:
        require("RolloutStorage", one_of(*TYPES), training_type=training_type)
        self.training_type: str = training_type
        self.num_envs: int = num_envs
        self.num_transitions_per_env: int = num_transitions_per_env
        self.actions_shape: tuple[int, ...] | list[int] = actions_shape
        self.device: str = device
        self.reshuffle_each_epoch: bool = reshuffle_each_epoch
        action = Field(tuple(actions_shape))
        fields: dict[str, Spec] = {"obs": map_leaves(_field, obs), "action": action, "reward": NUMBER}
        fields |= {"terminated": FLAG, "truncated": FLAG}
        rl = training_type == "rl"
        fields |= {"value": NUMBER, "log_prob": NUMBER} if rl else {"privileged_action": action}
        further = {"advantage": NUMBER, "return": NUMBER} if rl else {}
        size = num_transitions_per_env, num_envs
        self._buffer = RolloutBuffer(Schema(fields), *size, device=device, columns=further, seed=seed or 0)
        self._seed = seed
        self._no_end = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self._params: int | None = None
        self._states: dict[str, int] = {}

    @classmethod
    def _arguments_of(cls, original: Any) -> dict[str, object]:
        return super()._arguments_of(original) | {"obs": original.observations[0]}

    def _take_over(self, original: Any) -> None:
        shared = ("observations", *(name for name in FIELDS if hasattr(original, name)))
        rows = slice(original.step)
        for name, values in contents_of(original, shared, rows).items():
            write_column(name, getattr(self, name)[rows], values)
        for name in ("distribution_params", "saved_hidden_state_a", "saved_hidden_state_c"):
            if getattr(original, name, None) is not None:
                setattr(self, name, getattr(original, name))
        self.step = original.step

    # -- writing ------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of transitions. Assign it after writing that many rows in place."""
        return self._buffer.steps

    @step.setter
    def step(self, count: int) -> None:
        self._buffer.clear()
        if count:
            self._buffer.reserve(count)
            self._buffer.commit(count)

    def add_transition(self, transition: object) -> None:
        """Add one transition, of this package or rsl_rl's own.

        ``rewards``, ``dones``, ``values`` and ``actions_log_prob`` are ``[N]`` or ``[N, 1]``. Not in rsl_rl:
        ``time_outs`` ``[N]`` marks the dones that are time-outs, and ``final_values`` ``[N]`` is V(final observation).

        Raises:
            OverflowError: the storage is full.
            FieldError, ShapeError, DTypeError: a field is missing or does not fit. Nothing is written.
        """
        if self._buffer.is_full:
            raise OverflowError("Rollout buffer overflow! You should call clear() before adding new transitions.")
        if self.training_type == "rl":
            self._learn_shapes(transition)
        self._buffer.add(self._step_of(transition))

    def clear(self) -> None:
        """Start the next rollout."""
        self._buffer.clear()

    # -- reading ------------------------------------------------------------------------------------------------

    def compute_returns(
        self, last_values: Tensor, gamma: float, lam: float, *, normalize_advantage: bool = True
    ) -> None:
        """Compute ``returns`` and ``advantages`` by GAE. Time-outs are bootstrapped from their ``final_values``.

        Args:
            last_values: V of the observations after the last step, ``[N]`` or ``[N, 1]``.
            gamma: discount.
            lam: λ.
            normalize_advantage: normalize advantages over the whole rollout.

        Raises:
            UnfinishedError: fewer than T transitions were added.
            FieldError: a time-out has no final value.
        """
        self._buffer.finish(
            Returns(gamma, lam, normalize_advantage), last_value=self._numbers("last_values", last_values)
        )

    def generator(self) -> Iterator[Minibatch]:
        """The steps in order, each as a batch ``[N, ...]`` of views, for distillation.

        Raises:
            ValueError: the storage is for reinforcement learning.
        """
        if self.training_type != "distillation":
            raise ValueError("This function is only available for distillation training.")
        columns: Any = self.observations, self.privileged_actions, self.dones
        return (
            Minibatch(observations=obs, privileged_actions=actions, dones=dones)
            for _, obs, actions, dones in zip(range(self.step), *columns, strict=False)
        )

    def mini_batch_generator(self, num_mini_batches: int, num_epochs: int = 8) -> Iterator[Minibatch]:
        """Shuffled minibatches ``[B, ...]`` of all transitions.

        Raises:
            ValueError: the storage is for distillation, or has fewer transitions than minibatches.
            EmptyError: no transition was added.
        """
        self._require_rl()
        renew(self._buffer, self._seed)
        fields = (*READ, *(["distribution"] if self._params else []))
        batches = self._buffer.minibatches(
            num_batches=num_mini_batches, epochs=num_epochs, reshuffle=self.reshuffle_each_epoch, fields=fields
        )
        return (
            Minibatch(observations=tensordict_of(batch["obs"], batch["value"].shape), **self._learned(batch))
            for batch in batches
        )

    def recurrent_mini_batch_generator(self, num_mini_batches: int, num_epochs: int = 8) -> Iterator[Minibatch]:
        """Minibatches of whole envs: steps ``[T, B, ...]``, and observations as padded trajectories ``[T, K, ...]``.

        ``hidden_states`` are the states before each trajectory's first step, ``[layers, K, size]``: a tensor or a
        pair. ``masks`` is bool ``[T, K]``. All envs are used. Batches are views of the storage, or of trajectories that
        all epochs share: do not write to them.

        Raises:
            ValueError: the storage is for distillation, or has fewer envs than minibatches.
            EmptyError: no transition was added.
        """
        self._require_rl()
        renew(self._buffer, self._seed)
        fields = (*READ[1:], *(["distribution"] if self._params else []))
        batches = self._buffer.env_batches(
            num_batches=num_mini_batches, epochs=num_epochs, shuffle=self.reshuffle_each_epoch, fields=fields
        )
        for batch in batches:
            hidden: Mapping[str, tuple[Tensor, ...]] = batch.sequences.get("hidden", {})
            states = tuple(_unwrapped(hidden[name]) if name in self._states else None for name in STATES)
            obs, masks = tensordict_of(batch.sequences["obs"], batch.sequences.shape), batch.sequences["mask"]
            learned = self._learned(batch.steps)
            yield Minibatch(observations=obs, masks=masks, hidden_states=states, **learned)

    # -- the attributes of rsl_rl ---------------------------------------------------------------------------------

    def column(self, name: str) -> Tensor:
        """A column of the rollout as a view ``[T, N, ...]``; ``name`` is relive's.

        Raises:
            AttributeError: storages of this training type do not have it.
        """
        columns = self._buffer.block
        if name not in columns.keys() or (name == "final_value" and self.training_type != "rl"):
            attribute = next((host for host, column in FIELDS.items() if column.name == name), name)
            raise AttributeError(f"a storage for {self.training_type!r} has no {attribute!r}")
        return columns[name][:-1]

    @property
    def observations(self) -> TensorDict:
        """All groups, ``[T, N, ...]``. Write to them in place; groups cannot be replaced."""
        return self._buffer.block["obs"].to_tensordict(2)[:-1].to(self.device).lock_()

    @observations.setter
    def observations(self, value: TensorDict) -> None:
        self.observations.copy_(value)

    @property
    def distribution_params(self) -> tuple[Tensor, ...] | None:
        """Parameters of the action distribution, ``[T, N, ...]`` each; None before the first transition."""
        if self._params is None:
            return None
        return tuple(self._buffer.block["distribution", str(i)][:-1] for i in range(self._params))

    @distribution_params.setter
    def distribution_params(self, values: Sequence[Tensor] | None) -> None:
        if values is None:
            self._params = None
            return
        self._declare_params([value[0] for value in values])
        for i, value in enumerate(values):
            write_column(f"distribution_params[{i}]", self._buffer.block["distribution", str(i)][:-1], value)

    saved_hidden_state_a: list[Tensor] | None = _saved_states(
        "a", "The actor's states before each step, ``[T, layers, N, size]``."
    )
    saved_hidden_state_c: list[Tensor] | None = _saved_states(
        "c", "The critic's states before each step, ``[T, layers, N, size]``."
    )

    # -- inside -------------------------------------------------------------------------------------------------

    def _require_rl(self) -> None:
        if self.training_type != "rl":
            raise ValueError("This function is only available for reinforcement learning training.")

    def _learned(self, batch: Rows) -> dict[str, Any]:
        """A PPO batch without its observations, in rsl_rl's names and shapes."""
        return {
            **{name: FIELDS[name].shown(batch[FIELDS[name].name]) for name in LEARNED},
            "old_actions_log_prob": FIELDS["actions_log_prob"].shown(batch["log_prob"]),
            "old_distribution_params": tuple([batch["distribution", str(i)] for i in range(self._params or 0)]),
        }

    def _step_of(self, transition: object) -> dict[str, object]:
        """A transition as a step of the rollout."""
        time_outs, final_values = getattr(transition, "time_outs", None), getattr(transition, "final_values", None)
        dones = self._numbers("dones", required(transition, "dones"), torch.bool)
        cut = self._no_end if time_outs is None else self._numbers("time_outs", time_outs, torch.bool) & dones
        step: dict[str, object] = {
            "obs": map_leaves(partial(self._fit, dtype=None), required(transition, "observations")),
            "action": self._fit(required(transition, "actions")),
            "reward": self._numbers("rewards", required(transition, "rewards")),
            "terminated": dones,
            "truncated": cut,
        }
        if self.training_type == "distillation":
            step["privileged_action"] = self._fit(required(transition, "privileged_actions"))
            return step
        step["value"] = self._numbers("values", required(transition, "values"))
        step["log_prob"] = self._numbers("actions_log_prob", required(transition, "actions_log_prob"))
        if final_values is not None:
            step["final_value"] = self._numbers("final_values", final_values)
        if self._params:
            step["distribution"] = tuple([self._fit(p) for p in required(transition, "distribution_params")])
        if self._states:
            step["hidden"] = {name: self._states_of(name, transition) for name in self._states}
        return step

    def _fit(self, value: Tensor, dtype: torch.dtype | None = torch.float32) -> Tensor:
        """On our device, with this dtype; None is its own. The check first is faster than a ``to`` for nothing."""
        if (dtype is None or value.dtype is dtype) and value.device == self._buffer.device:
            return value
        return value.detach().to(self._buffer.device, dtype or value.dtype)

    def _numbers(self, name: str, value: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """``[N]`` or ``[N, 1]`` as ``[N]``."""
        n = self.num_envs
        if value.shape not in ((n,), (n, 1)):
            raise ShapeError(f"{name}: expected [{n}] or [{n}, 1] numbers, one for each env, got {tuple(value.shape)}")
        fitting = self._fit(value, dtype)
        return fitting if fitting.dim() == 1 else fitting.squeeze(1)

    def _learn_shapes(self, transition: Any) -> None:
        """Declare the distribution parameters and recurrent states of the first transition that has them."""
        if self._params is None:
            self._declare_params(list(transition.distribution_params or ()))
        for name, state in zip(STATES, transition.hidden_states, strict=True):
            if state is not None and name not in self._states:
                self._declare_states(name, [swap_layers(s) for s in _wrapped(state)])

    def _declare_params(self, examples: Sequence[Tensor]) -> None:
        if examples:
            self._buffer.add_fields(distribution=tuple(Field(tuple(p.shape[1:])) for p in examples))
        self._params = len(examples)

    def _declare_states(self, name: str, examples: Sequence[Tensor]) -> None:
        """Declare states of these shapes, ``[N, layers, size]``. Steps added before get zeros."""
        known = dict(cast("Mapping[str, Node]", self._buffer.schema["hidden"])) if self._states else {}
        self._buffer.add_fields(hidden=known | {name: tuple(Field(tuple(s.shape[1:])) for s in examples)})
        self._states[name] = len(examples)

    def _states_of(self, name: str, transition: Any) -> tuple[Tensor, ...]:
        state = transition.hidden_states[STATES.index(name)]  # None where the network starts from its initial state
        if state is None:
            return tuple(torch.zeros_like(column[0]) for column in self._columns_of_states(name))
        return tuple([swap_layers(self._fit(s)) for s in _wrapped(state)])

    def _columns_of_states(self, name: str) -> list[Tensor]:
        """``[T, N, layers, size]`` each."""
        block = self._buffer.block
        return [block["hidden", name, str(i)][:-1] for i in range(self._states[name])]

    def _saved(self, name: str) -> list[Tensor] | None:
        if name not in self._states:
            return None
        return [column.transpose(1, 2) for column in self._columns_of_states(name)]

    def _save(self, name: str, values: Sequence[Tensor] | None) -> None:
        if values is None:
            for shown in self._saved(name) or []:
                shown.zero_()
            return
        if name not in self._states:
            self._declare_states(name, [swap_layers(value[0]) for value in values])
        for shown, value in zip(self._saved(name) or (), values, strict=True):
            write_column(f"saved_hidden_state_{name}", shown, value)


FIELDS = table_of(RolloutStorage)


@dataclass(frozen=True, slots=True)
class Returns:
    """GAE for a column ``terminated`` that holds every done, time-outs included, as rsl_rl stores it."""

    gamma: float
    lam: float
    normalize: bool

    reads = GAE().reads
    """The columns needed."""

    def __call__(self, *, terminated: Tensor, truncated: Tensor, **columns: Any) -> dict[str, Tensor]:
        """The columns ``advantage`` and ``return``, ``[T, N]``."""
        ends = {"terminated": terminated & ~truncated, "truncated": truncated}
        return GAE(self.gamma, self.lam, self.normalize)(**ends, **columns)


def required(transition: object, name: str) -> Any:
    """A required field of a transition.

    Raises:
        FieldError: it is None.
    """
    value = getattr(transition, name)
    if value is None:
        raise FieldError(f"transition.{name} is None; set it before add_transition()")
    return value


def _field(value: Tensor) -> Field:
    """The field of an example ``[N, ...]``."""
    return Field(tuple(value.shape[1:]), value.dtype)


def _wrapped(state: States) -> tuple[Tensor, ...]:
    """An LSTM's pair unchanged, a GRU's state as a tuple of one."""
    return state if isinstance(state, tuple) else (state,)


def _unwrapped(states: tuple[Tensor, ...]) -> States:
    return states[0] if len(states) == 1 else states


def split_and_pad_trajectories(tensor: Any, dones: Tensor) -> tuple[Any, Tensor]:
    """Cut steps at dones into trajectories that are padded with zeros to T.

    rsl_rl hands out this shape, and its users rely on it; to pad to the longest trajectory would be quicker.

    Args:
        tensor: a tensor or TensorDict ``[T, N, ...]``; gradients go through.
        dones: ``[T, N]`` or ``[T, N, 1]``.

    Returns:
        the trajectories ``[T, K, ...]``, env by env and in the order of time; and masks, bool ``[T, K]``, False in
            padding.

    Raises:
        ShapeError: ``tensor`` and ``dones`` have other numbers of steps or envs.
    """
    steps, envs = (int(size) for size in tensor.shape[:2])
    if tuple(dones.shape) not in ((steps, envs), (steps, envs, 1)):
        raise ShapeError(f"dones: expected {(steps, envs)}, with or without a last axis of 1, got {tuple(dones.shape)}")
    ends = dones.reshape(steps, envs) != 0
    ends[-1:] = True  # a slice, since there may be no step
    last = ends.T.flatten().nonzero().squeeze(1)  # each trajectory's last step, counted env by env
    first = torch.cat([last.new_zeros(1), last[:-1] + 1])
    time = torch.arange(steps, device=dones.device).unsqueeze(1)
    masks = time <= last - first
    env, start = first // max(steps, 1), first % max(steps, 1)
    rows = ((start + time) * envs + env).where(masks, 0)
    padded = tensor.flatten(0, 1)[rows]
    if isinstance(padded, Tensor):
        return _blank(padded, masks), masks
    return padded.apply(partial(_blank, masks=masks)), masks


def _blank(padded: Tensor, masks: Tensor) -> Tensor:
    return padded.masked_fill(~masks.view(*masks.shape, *[1] * (padded.dim() - 2)), 0)


def unpad_trajectories(trajectories: Any, masks: Tensor) -> Any:
    """The inverse of :func:`split_and_pad_trajectories`: steps ``[T, N, ...]``.

    Args:
        trajectories: a tensor or TensorDict ``[T, K, ...]``.
        masks: bool ``[T, K]``, False in padding.
    """
    steps = trajectories.transpose(0, 1)[masks.transpose(0, 1)]
    rows = trajectories.shape[0]
    return steps.unflatten(0, (len(steps) // rows, rows)).transpose(0, 1)
