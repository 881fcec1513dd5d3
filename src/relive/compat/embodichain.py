"""EmbodiChain's rollout buffer, minibatches, GAE and group advantages (release 0.3.2), built on relive's core.

A rollout is one TensorDict ``[N, T + 1]`` that the collector, the environment and the algorithm write in place. Row T
holds the ``obs``, ``critic_obs`` and ``value`` after the last step. It is padding for all other fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor

from .. import core
from ..errors import EmptyError, FieldError, FullError, ParameterError, ShapeError, UnfinishedError
from ..parameters import is_count, one_of, require, seed_or_drawn
from ..returns import gae, group_advantage
from ..rollout.buffer import RolloutBuffer as Rollout
from ..rollout.minibatches import rows_of
from ..steps.schema import Field, Schema, Spec, dotted
from .base import Device, DropIn, as_tensordict, leaves_of

if TYPE_CHECKING:
    from gymnasium import spaces
    from tensordict import TensorDict

__all__ = ["RolloutBuffer", "compute_gae", "compute_group_advantage", "iterate_minibatches", "transition_view"]

DYNAMIC = ("advantage", "return", "seq_mask", "seq_return", "entropy")
"""Fields that algorithms attach to a rollout. They are removed before the next rollout."""
UNPADDED = ("obs", "critic_obs", "value", "mask", "final_value")
"""Fields whose last row is not zeroed: it is the bootstrap row, or is reset elsewhere."""
WIDE = 16
"""Rows of at least this many bytes are copied row by row, which is faster than element by element."""
FLAGS = ("done", "terminated", "truncated")
DISTRIBUTION = ("action_mean", "action_std")
"""Of the policy when it drew an action. An adaptive learning rate compares them with what they are now."""
Size: TypeAlias = "int | Spec | spaces.Space[object] | Mapping[str, Size]"
"""A number of columns, a shape, a field, a Gymnasium space, or a dict of these."""
Truncation = Literal["bootstrap", "own_value", "terminal"]


class RolloutBuffer(DropIn):
    """One rollout ``[N, T + 1]``, written in place in the TensorDict that :meth:`start_rollout` returns.

    Its fields are ``obs``, ``action``, ``sample_log_prob``, ``value``, ``reward``, ``done``, ``terminated`` and
    ``truncated``; ``critic_obs``, and ``action_mean`` and ``action_std``, where their sizes are given. Not in
    EmbodiChain: ``final_value``, V(final observation) of truncated steps, for the user to write and
    :func:`compute_gae` to read. Further fields can be attached.

    Args:
        num_envs: N.
        rollout_len: T.
        obs_dim: numbers of an observation, float32. Not in EmbodiChain: a shape, a :class:`relive.Field`, a Gymnasium
            space, or a dict of these for observations that are not flattened.
        action_dim: the same for an action.
        device: of the rollout.
        critic_obs_dim: the same as ``obs_dim`` for what only the critic sees; None stores no ``critic_obs``.
        distribution_param_dim: the same for ``action_mean`` and ``action_std``; None stores neither.
    """

    _own_attribute = "_buffer"
    _lacking = ("critic_obs_dim", "distribution_param_dim")  # until release 0.3

    def __init__(
        self,
        num_envs: int,
        rollout_len: int,
        obs_dim: Size,
        action_dim: Size,
        device: Device = "cpu",
        critic_obs_dim: Size | None = None,
        distribution_param_dim: Size | None = None,
    ) -> None:
        self.num_envs: int = num_envs
        self.rollout_len: int = rollout_len
        self.obs_dim: Size = obs_dim
        self.action_dim: Size = action_dim
        self.device: Device = device
        self.critic_obs_dim: Size | None = critic_obs_dim
        self.distribution_param_dim: Size | None = distribution_param_dim
        scalars: dict[str, Spec] = dict.fromkeys(("sample_log_prob", "value", "reward"), Field())
        scalars |= dict.fromkeys(FLAGS, Field((), torch.bool))
        given = {"obs": obs_dim, "action": action_dim, "critic_obs": critic_obs_dim}
        given |= dict.fromkeys(DISTRIBUTION, distribution_param_dim)
        schema = Schema({name: _spec(dim) for name, dim in given.items() if dim is not None} | scalars)
        self._buffer = Rollout(schema, rollout_len, num_envs, device=device)
        self._rollout = self._views()
        self._shapes = {name: value.shape for name, value in self._rollout.items(True, True)}

    def _views(self) -> TensorDict:
        return self._buffer.env_major.to_tensordict(2).exclude("mask").to(torch.device(self.device))

    def _restore(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        copies, self._rollout = self._rollout, self._views()  # a pickle turns views into copies
        self._fill(copies)

    def _take_over(self, original: Any) -> None:
        self._fill(original._rollout)
        if original._is_full:
            self._commit()

    def _fill(self, rollout: TensorDict) -> None:
        """Copy a rollout's fields into the shared one, and attach those that it does not have."""
        known = [name for name in self._rollout.keys() if name in rollout.keys()]
        self._rollout.update_(rollout.select(*known))
        self._rollout.update(rollout.exclude(*known))

    @property
    def buffer(self) -> TensorDict:
        """The shared rollout, always the same object."""
        return self._rollout

    def start_rollout(self) -> TensorDict:
        """The shared rollout, to be written in place. Fields that algorithms attached to the last one are removed.

        Raises:
            FullError: the last rollout was not taken by :meth:`get`. Also a RuntimeError.
        """
        if self._buffer.is_full:
            raise FullError("RolloutBuffer already contains a rollout.")
        for name in DYNAMIC:
            if name in self._rollout.keys():
                del self._rollout[name]
        self._buffer.clear()
        self._buffer.reserve()
        padding = self._rollout[:, -1]
        for name in self._buffer.schema.names:
            if name not in UNPADDED:
                padding[name].zero_()
        self._rollout["reward"][:, :-1] = torch.nan  # marks rows that were not written
        self._rollout["final_value"].fill_(torch.nan)
        return self._rollout

    def add(self, rollout: TensorDict) -> None:
        """Declare that the shared rollout was written.

        Raises:
            ParameterError: ``rollout`` is another object.
            ShapeError: one of its fields was replaced by one of another shape.
            UnfinishedError: the reward of a step was not written.
        """
        if rollout is not self._rollout:
            raise ParameterError("RolloutBuffer only accepts its shared rollout TensorDict.")
        for name, shape in self._shapes.items():
            given = rollout[name].shape
            if given != shape:
                raise ShapeError(f"Rollout field '{name}' shape mismatch: expected {tuple(shape)}, got {tuple(given)}.")
        missing = rollout["reward"][:, :-1].isnan()
        if bool(missing.any()):
            env, step = (int(x) for x in missing.nonzero()[0])
            raise UnfinishedError(
                f"the reward of step {step} of env {env} is missing, or NaN; write all {self.rollout_len} steps of the "
                "rollout that start_rollout() gave, then add() it"
            )
        if not self._buffer.is_full:
            self._commit()

    def _commit(self) -> None:
        final_value = self._rollout["final_value"].clone()
        self._buffer.clear()  # rows may have been written without start_rollout()
        self._buffer.reserve()
        self._rollout["final_value"].copy_(final_value)
        self._buffer.commit(last=True)

    def get(self, flatten: bool = True) -> TensorDict:
        """Take the rollout; then :meth:`start_rollout` can be called again.

        Args:
            flatten: True copies the steps, ``[N * T]``, env by env. False returns the shared rollout ``[N, T + 1]``
                itself, which the next :meth:`start_rollout` overwrites; clone it to keep it.

        Raises:
            EmptyError: there is no rollout. Also a RuntimeError.
        """
        if not self._buffer.is_full:
            raise EmptyError("RolloutBuffer is empty.")
        rollout = transition_view(self._rollout, flatten=True) if flatten else self._rollout
        final_value = self._rollout["final_value"].clone()
        self._buffer.clear()
        self._rollout["final_value"].copy_(final_value)
        return rollout

    def is_full(self) -> bool:
        """Whether a rollout was added and not yet taken."""
        return self._buffer.is_full


def _spec(given: Any) -> Any:
    """A :data:`Size` as the schema accepts it."""
    if hasattr(given, "contains"):  # a Gymnasium space; some are mappings, too
        return Schema.from_spaces(given, given)["obs"]
    if isinstance(given, Mapping):
        return {name: _spec(inner) for name, inner in cast("Mapping[str, Any]", given).items()}
    return Field((given,)) if isinstance(given, int) else given


def transition_view(rollout: TensorDict, flatten: bool = False) -> TensorDict:
    """The steps ``[N, T]`` of a rollout ``[N, T + 1]``: all its fields, and ``next_value``, the value of the next row.

    Args:
        rollout: with any fields, nested or not.
        flatten: True copies the steps to ``[N * T]``, env by env; False returns views.
    """
    envs, rows = rollout.batch_size
    fields: dict[Any, Tensor] = {(name,): rollout[name][:, :-1] for name in rollout.keys()}
    if "value" in rollout.keys():
        fields["next_value",] = rollout["value"][:, 1:]
    steps = as_tensordict(fields, (envs, rows - 1), rollout.device)
    if not flatten:
        return steps
    flat = {path: _flat(x) for path, x in leaves_of(steps).items()}
    return as_tensordict(flat, (envs * (rows - 1),), rollout.device)


def _flat(steps: Tensor) -> Tensor:
    """A copy of ``[N, T, ...]`` as ``[N * T, ...]``. Wide rows that are stored time first are copied row by row."""
    envs, count = steps.shape[:2]
    by_time = steps.transpose(0, 1)
    width = steps[:1, :1].nbytes
    if not by_time.is_contiguous() or width < WIDE or not steps.is_cpu:
        return steps.clone(memory_format=torch.contiguous_format).flatten(0, 1)
    source = by_time.reshape(count * envs, -1).view(torch.uint8)
    first, lengths = torch.arange(envs, device="cpu"), torch.full((envs,), count, device="cpu")
    found = core.gather_windows(source, first, envs, lengths, source[0], count)
    return found.view(steps.dtype).view(envs * count, *steps.shape[2:])


def iterate_minibatches(
    rollout: TensorDict,
    batch_size: int,
    device: Device | None = None,
    *,
    fields: tuple[str, ...] | None = None,
    seed: int | None = None,
) -> Iterator[TensorDict]:
    """Minibatches of a flat rollout ``[B]`` in random order. The last one may be smaller.

    Args:
        rollout: ``[B]``, on any device.
        batch_size: rows of a minibatch.
        device: of the minibatches; by default the rollout's.
        fields: not in EmbodiChain; the fields to read, by default all. Fewer are faster.
        seed: of the order; None draws one from torch's default generator, as EmbodiChain does.

    Raises:
        ParameterError: ``batch_size`` is below 1.
    """
    if not is_count(batch_size, 1):
        raise ParameterError(f"batch_size={batch_size!r}: expected a whole number of at least 1")
    total = int(rollout.batch_size[0])
    leaves = leaves_of(rollout if fields is None else rollout.select(*fields))
    rows = rows_of({path: x.unsqueeze(0) for path, x in leaves.items()}, pack=False)
    order = core.permutation(total, seed_or_drawn(seed), 0)
    for low in range(0, total, batch_size):
        index = order[low : low + batch_size]
        batch = as_tensordict(rows.gather(index.to(next(iter(leaves.values())).device)), (len(index),))
        yield batch if device is None else batch.to(device)


def compute_gae(
    rollout: TensorDict,
    gamma: float,
    gae_lambda: float,
    *,
    truncation: Truncation = "bootstrap",
) -> tuple[Tensor, Tensor]:
    """Compute GAE of a rollout ``[N, T + 1]`` and attach ``advantage`` and ``return``. Their last row is 0.

    Args:
        rollout: with ``reward``, ``value``, ``done``, and ``truncated`` if time limits are marked.
        gamma: discount.
        gae_lambda: λ.
        truncation: "bootstrap" bootstraps truncated steps from the rollout's ``final_value``. "own_value" does so from
            their own ``value``, that of the observation before the step, as EmbodiChain does since 0.3: an error of
            one step, for environments whose final observation is out of reach. "terminal" treats them as terminal, as
            EmbodiChain did before. No choice changes the rewards, so what one adds is never added to another.

    Returns:
        advantage and return, ``[N, T]``, views of the attached fields.

    Raises:
        ShapeError: a field has another shape.
        FieldError: a truncated step must be bootstrapped and has no ``final_value``.
        ParameterError: ``truncation`` is none of the three.
    """
    require("compute_gae", one_of(*get_args(Truncation)), truncation=truncation)
    _require_steps(rollout)
    reward, done = rollout["reward"][:, :-1].float().T, rollout["done"][:, :-1].bool().T
    truncated = torch.zeros_like(done)
    if truncation != "terminal" and "truncated" in rollout.keys():
        truncated = rollout["truncated"][:, :-1].bool().T
        if "terminated" in rollout.keys():
            truncated = truncated & ~rollout["terminated"][:, :-1].bool().T
    ends, value = (done & ~truncated, truncated), rollout["value"].float().T
    final_value = value[:-1] if truncation == "own_value" else _final_value(rollout, truncated)
    advantage, ret = gae(reward, value, *ends, final_value=final_value, gamma=gamma, lam=gae_lambda)
    return _attach(rollout, "advantage", advantage), _attach(rollout, "return", ret)


def _final_value(rollout: TensorDict, truncated: Tensor) -> Tensor | None:
    """V(final observation) ``[T, N]``; truncated steps must have it."""
    known = "final_value" in rollout.keys()
    final_value = rollout["final_value"][:, :-1].float().T if known else None
    missing = truncated if final_value is None else truncated & final_value.isnan()
    if bool(missing.any()):
        step, env = (int(x) for x in missing.nonzero()[0])
        raise FieldError(
            f"step {step} of env {env} was truncated and has no final value; write V(true final observation) to "
            "rollout['final_value'] there, pass truncation='own_value' to take the value before the step for it, as "
            "EmbodiChain does, or truncation='terminal' to count time limits as failures"
        )
    return final_value


def compute_group_advantage(
    rollout: TensorDict, gamma: float, group_size: int, *, eps: float = 1e-8, truncate_at_first_done: bool = True
) -> tuple[Tensor, Tensor]:
    """Compute group-relative advantages, as in GRPO, of a rollout ``[N, T + 1]``.

    Attaches ``advantage``, ``seq_mask`` and ``seq_return``, float32.

    Args:
        rollout: with ``reward`` and ``done``.
        gamma: discount.
        group_size: envs of a group, which are consecutive.
        eps: added to the standard deviation.
        truncate_at_first_done: ignore all steps after an env's first done.

    Returns:
        advantage and mask, ``[N, T]``, views of the attached fields.

    Raises:
        ValueError: ``group_size`` does not divide N.
    """
    _require_steps(rollout)
    reward, done = rollout["reward"][:, :-1].float().T, rollout["done"][:, :-1].bool().T
    never = torch.zeros_like(done)
    advantage, ret, mask = group_advantage(
        reward, done, never, group_size=group_size, gamma=gamma, eps=eps, until_first_done=truncate_at_first_done
    )
    _attach(rollout, "seq_return", ret)
    return _attach(rollout, "advantage", advantage), _attach(rollout, "seq_mask", mask.float())


def _require_steps(rollout: TensorDict) -> None:
    expected = tuple(rollout.batch_size)
    for name in ("reward", "done", "value"):
        if name in rollout.keys() and tuple(rollout[name].shape) != expected:
            raise ShapeError(
                f"field '{dotted((name,))}': expected [num_envs, time + 1] = {expected}, "
                f"got {tuple(rollout[name].shape)}"
            )


def _attach(rollout: TensorDict, name: str, column: Tensor) -> Tensor:
    """Attach a column ``[T, N]`` as ``[N, T + 1]``, and return its steps ``[N, T]``."""
    rollout[name] = torch.cat([column, torch.zeros_like(column[:1])]).T
    return rollout[name][:, :-1]
