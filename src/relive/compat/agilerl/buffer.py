"""The drop-in for AgileRL's rollout buffer."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from ... import kernels
from ...batches.tensordicts import as_tensordict
from ...errors import FieldError, ParameterError, ShapeError
from ...kernels.reference.random import key as stream
from ...rollout.buffer import RolloutBuffer as Rollout
from ...steps.schema import Field
from ..errors import StepFieldError, StepShapeError
from ..seeds import drawn_by_numpy, renew
from . import sequences
from .columns import Columns, schema_of
from .ends import Ends
from .sequences import BPTTSequenceType, overlap_of
from .steps import FLAG, Fields, Steps, action_field, observation_fields, vector

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["RolloutBuffer"]

SEQUENCES = 1
"""The number of the random stream that shuffles sequences."""

DERIVED = ("buffer", "pos", "full", "_columns", "_steps")
"""Attributes that follow from the others; they are not pickled."""


class RolloutBuffer:
    """The steps ``[capacity, num_envs]`` of one policy, under AgileRL's names.

    ``buffer`` is a TensorDict ``[capacity, num_envs]`` of views into the storage, on the CPU: observations and
    next_observations (nested for a Dict space), actions ``[..., A]``, rewards, dones, values, log_probs, advantages,
    returns, hidden_states ``{name: [..., layers, size]}``, and, from the first step that has them, action_masks and
    episode_starts. dones, masks and starts are bool. The others are float32, or as the spaces say with ``keep_dtypes``.
    Columns can be written in place; ``buffer[name] = column`` is copied into the storage by the next call.

    ``done`` says whether this step ended its episode, as AgileRL's collector passes it. ``last_done`` says whether the
    newest step was terminal. A newest step that is done but not terminal was truncated; ``last_value`` is its bootstrap
    value. For earlier steps AgileRL does not distinguish: done means terminal, unless ``add`` gets ``truncated``.

    Args:
        capacity: steps per environment.
        observation_space: of one environment; Box, Discrete, MultiDiscrete, MultiBinary, or a Dict of them.
        action_space: of one environment; Box, Discrete, MultiDiscrete or MultiBinary.
        num_envs: N.
        device: of the batches.
        gae_lambda: λ.
        gamma: discount per step.
        recurrent: keep hidden states.
        hidden_state_architecture: name -> (layers, anything, size).
        use_gae: False computes Monte-Carlo returns.
        wrap_at_capacity: True keeps the newest ``capacity`` steps; False refuses further steps.
        max_seq_len: steps of a sequence; None is whole episodes.
        bptt_sequence_type: how episodes are cut into sequences.
        keep_dtypes: not in AgileRL; observations and actions keep the dtypes of their spaces.
        autoreset_mode: not in AgileRL; "next_step" leaves out the step after each done, whose action the environments
            ignore. The value of that step is the bootstrap value of a truncated step before it.
        seed: not in AgileRL; of all shuffling and sampling. None draws a seed for each such call, from the generator
            that AgileRL reads there: NumPy's global one for :meth:`get`, otherwise torch's default one.

    Raises:
        ParameterError: ``recurrent`` without an architecture, or an unknown ``autoreset_mode``.
        NotImplementedError: a space that AgileRL does not store, either.
        AssertionError: a Tuple space.
    """

    padded_data: TensorDict | None
    """Sequences end to end, ``[num_sequences * max_sequence_length]``: observations, actions, action_masks, pad_mask,
    and ``initial_hidden_states`` as non-tensor data, ``{name: [num_sequences, layers, size]}``."""
    unpadded_data: TensorDict | None
    """log_probs, advantages, values and returns of all steps, ``[T * N]``, oldest first."""
    num_sequences: int | None
    max_sequence_length: int | None
    """Steps of the longest sequence."""

    def __init__(
        self,
        capacity: int,
        observation_space: Any,
        action_space: Any,
        num_envs: int = 1,
        device: str = "cpu",
        gae_lambda: float = 0.95,
        gamma: float = 0.99,
        recurrent: bool = False,
        hidden_state_architecture: dict[str, tuple[int, ...]] | None = None,
        use_gae: bool = True,
        wrap_at_capacity: bool = False,
        max_seq_len: int | None = None,
        bptt_sequence_type: Any = BPTTSequenceType.CHUNKED,
        *,
        keep_dtypes: bool = False,
        autoreset_mode: Literal["next_step"] | None = None,
        seed: int | None = None,
    ) -> None:
        if recurrent and hidden_state_architecture is None:
            raise ParameterError("hidden_state_architecture must be provided if recurrent=True")
        if autoreset_mode not in (None, "next_step"):
            raise ParameterError(f"autoreset_mode={autoreset_mode!r}: expected 'next_step', or None for any other mode")
        self.capacity, self.num_envs, self.device = capacity, num_envs, device
        self.observation_space, self.action_space = observation_space, action_space
        self.gamma, self.gae_lambda, self.use_gae, self._seed = gamma, gae_lambda, use_gae, seed
        self.recurrent, self.hidden_state_architecture = recurrent, hidden_state_architecture
        self.wrap_at_capacity, self.autoreset_mode = wrap_at_capacity, autoreset_mode
        self.max_seq_len, self.bptt_sequence_type = max_seq_len, bptt_sequence_type
        self._obs = observation_fields(observation_space, keep_dtypes)
        self._action = action_field(action_space, keep_dtypes)
        sizes = cast("dict[str, tuple[int, ...]]", hidden_state_architecture) if recurrent else {}
        self._hidden: Fields = {(key,): Field((size[0], size[2])) for key, size in sizes.items()}
        self._rollout = Rollout(
            schema_of(self._obs, self._action, self._hidden), capacity, num_envs, wrap=wrap_at_capacity, seed=seed or 0
        )
        self._nowhere = np.zeros(num_envs, np.bool_)
        self._ended, self._added, self._shuffles = self._nowhere, 0, 0
        self._forget_sequences()
        self._derive()

    # -- state -------------------------------------------------------------------------------------------------

    @property
    def pos(self) -> int:
        """The row of the next step; ``capacity`` when the last row has just been filled."""
        return (self._added - 1) % self.capacity + 1 if self._added else 0

    @property
    def full(self) -> bool:
        """Whether ``capacity`` steps were added since the last reset."""
        return self._added >= self.capacity

    def size(self) -> int:
        """The number of transitions stored, over all environments."""
        return len(self._rollout)

    def reset(self) -> None:
        """Forget all steps."""
        self._rollout.clear()
        self._added = 0
        self._forget_sequences()

    def _derive(self) -> None:
        """Make the attributes that are not pickled."""
        self._columns = Columns(self._rollout, self._obs, self._hidden)
        self._steps = Steps(self._obs, self._action, self._hidden, self.num_envs)

    @property
    def buffer(self) -> TensorDict:
        """The columns, a TensorDict ``[capacity, num_envs]``; see the class."""
        return self._columns.data

    @buffer.setter
    def buffer(self, columns: TensorDict) -> None:
        self._columns.data = columns

    def __getstate__(self) -> dict[str, Any]:
        """The state, with AgileRL's entries ``buffer``, ``pos`` and ``full``."""
        self._columns.adopt()
        state = {name: value for name, value in self.__dict__.items() if name not in DERIVED}
        return state | {"buffer": self.buffer, "pos": self.pos, "full": self.full}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the state without ``buffer``, ``pos`` and ``full``, which the rollout holds."""
        state = {name: value for name, value in self.__getstate__().items() if name not in DERIVED}
        return _unmade, (type(self),), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a state. If it has a ``buffer``, its columns are copied into the storage.

        Raises:
            StepError: the ``buffer`` is no TensorDict, or one of its columns has another shape.
        """
        self.__dict__.update({name: value for name, value in state.items() if name not in DERIVED})
        self._derive()
        if "buffer" in state:
            self._columns.load(state["buffer"])

    # -- writing ------------------------------------------------------------------------------------------------

    def add(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        done: Any,
        value: Any,
        log_prob: Any,
        next_obs: Any = None,
        hidden_state: Mapping[str, Any] | None = None,
        next_hidden_state: Mapping[str, Any] | None = None,
        episode_start: Any = None,
        action_mask: Any = None,
        *,
        truncated: Any = None,
        final_value: Any = None,
    ) -> None:
        """Append one step of all environments; NumPy or torch, of any dtype.

        Args:
            obs: ``[N, ...]``, or without N for a single environment; for a Dict space, a dict of these.
            action: ``[N, ...]``.
            reward: ``[N]``, as are ``done``, ``value`` and ``log_prob``.
            done: whether this step ended its episode.
            value: V(obs).
            log_prob: of the action.
            next_obs: like ``obs``; by default zeros.
            hidden_state: name -> ``[layers, N, size]``, the network's input state at ``obs``; by default zeros.
            next_hidden_state: not stored, as in AgileRL.
            episode_start: bool ``[N]``; stored but not read, because the starts follow from ``done``.
            action_mask: ``[N, A]``, True is legal; by default all are.
            truncated: not in AgileRL; bool ``[N]``, which of the done steps were cut off rather than terminal.
            final_value: not in AgileRL; ``[N]``, V(final observation), read where ``truncated``.

        Raises:
            ValueError: the buffer is full and does not wrap.
            StepError: a shape or a name does not fit. Nothing is stored.
        """
        if self.full and not self.wrap_at_capacity:
            raise ValueError(
                f"Buffer has reached capacity ({self.capacity} transitions) but received more transitions. "
                "Either increase buffer capacity or set wrap_at_capacity=True."
            )
        self._columns.adopt()
        now = obs, action, reward, done, value, log_prob
        step = self._steps(*now, next_obs, hidden_state, truncated, final_value)
        self._columns.add_optional(step, episode_start, action_mask)
        ended, real = step["terminated"], ~self._ended
        if self.autoreset_mode is not None:
            step["mask"] = real
        try:
            self._rollout.add(step)
        except ShapeError as error:
            raise StepShapeError(str(error)) from error
        except FieldError as error:
            raise StepFieldError(str(error)) from error
        self._added += 1
        self._ended = ended & real if self.autoreset_mode is not None else self._nowhere

    def compute_returns_and_advantages(self, last_value: Any, last_done: Any) -> None:
        """Fill the columns advantages and returns, by GAE, or by Monte-Carlo returns if ``use_gae`` is off.

        Args:
            last_value: ``[N]``, V of the observations after the newest step.
            last_done: ``[N]``, whether the newest step was terminal. AgileRL's collector passes False for a truncated
                step although its ``done`` was True; ``last_value`` is then its bootstrap value.

        Raises:
            FieldError: a step was added as truncated without a final value.
        """
        self._columns.adopt()
        value = vector("last_value", last_value, self.num_envs)
        newest = vector("last_done", last_done, self.num_envs, FLAG)
        if not self._added:
            return
        lam, follows = self.gae_lambda if self.use_gae else None, self.autoreset_mode is not None
        ends = Ends(torch.from_numpy(newest), self.gamma, lam, follows)
        self._rollout.finish(ends, last_value=value, partial=True)

    # -- reading ------------------------------------------------------------------------------------------------

    def get(self, batch_size: int | None = None) -> dict[str, Any]:
        """All transitions, or ``batch_size`` drawn without replacement, copied to NumPy arrays ``[B, ...]``.

        Without ``batch_size``, row ``t * N + n`` is step t of environment n, oldest first. Empty if nothing is stored.
        """
        total = self.size()
        if not total:
            return {}
        if self._seed is None and batch_size is not None:
            self._rollout.seed = drawn_by_numpy()
        some = _at_most(batch_size, f"buffer size {total}", total)
        return cast("dict[str, Any]", self._batch(some, torch.device("cpu")).numpy())

    def get_tensor_batch(
        self, batch_size: int | None = None, device: str | None = None, *, copy: bool = True
    ) -> TensorDict:
        """Like :meth:`get`, as a TensorDict on ``device``; None is the buffer's device.

        ``copy=False`` is not in AgileRL. It returns all transitions as views, as AgileRL does on the CPU: writing to
        one changes the other. Rows are still copied if they are not in the order of time, or some are left out.
        """
        target, total = torch.device(device or self.device), self.size()
        if not total:
            return as_tensordict({}, (), target)
        if batch_size is not None:
            renew(self._rollout, self._seed)
        return self._batch(_at_most(batch_size, f"buffer_size {total}", total), target, copy)

    def _batch(self, batch_size: int | None, device: torch.device, copy: bool = True) -> TensorDict:
        self._columns.adopt()
        return self._columns.read(batch_size, device, copy=copy)

    # -- sequences ----------------------------------------------------------------------------------------------

    def _forget_sequences(self) -> None:
        self.padded_data = self.unpadded_data = None
        self.num_sequences = self.max_sequence_length = None
        self._index: Tensor | None = None

    @property
    def unpadded_slices(self) -> list[Tensor] | None:
        """For each sequence, the rows of :attr:`unpadded_data` that belong to it."""
        padded = cast("Any", self.padded_data)
        if self._index is None or padded is None:
            return None
        return sequences.slices(padded["pad_mask"], self._index)

    def prepare_sequence_tensors(self, device: str | None = None) -> None:
        """Cut the episodes into sequences: fill :attr:`padded_data` and :attr:`unpadded_data`, on ``device``.

        Every step is in a sequence; an episode's last may be shorter. ``action_masks`` are True in padding.

        Raises:
            ValueError: the buffer is empty, or not recurrent.
            NotImplementedError: an unknown ``bptt_sequence_type``.
        """
        if not self.recurrent:
            raise ValueError("prepare_sequence_tensors() is only supported when recurrent=True.")
        if not self.size():
            raise ValueError("Attempting to prepare sequences with empty buffer.")
        self._columns.adopt()
        overlap, target = overlap_of(self.bptt_sequence_type), torch.device(device or self.device)
        paths = self._columns.paths(("observations", "actions", "action_masks"))
        cut = [key for (key,) in self._hidden], self.max_seq_len, overlap
        self.padded_data, self._index = sequences.prepared(self._rollout, paths, *cut, target)
        self.num_sequences, self.max_sequence_length = self._index.shape
        self.unpadded_data = sequences.targets(self._rollout, target)

    # Methods that subclasses of AgileRL's class call or override.

    _pad_sequences = staticmethod(sequences.padded)

    @staticmethod
    def _convert_td_to_np_dict(td: TensorDict) -> dict[str, Any]:
        """The arrays of a TensorDict, with the same nesting."""
        return cast("dict[str, Any]", td.cpu().numpy())

    def _extract_td_sequences(self, episode: Any, max_seq_len: int) -> list[Any]:
        """The sequences of an episode ``[K, ...]``, a tensor or a TensorDict. The last one may be shorter."""
        return sequences.windows_of(episode, max_seq_len, overlap_of(self.bptt_sequence_type))

    def _get_complete_sequences(self, data: Any, episode_done_indices: list[list[int]]) -> tuple[list[Any], int]:
        """The sequences of steps ``[T, N, ...]``, env by env, and the length of the longest episode.

        Args:
            data: a tensor or a TensorDict.
            episode_done_indices: for each env, the last step of each of its episodes.
        """
        return sequences.complete(data, episode_done_indices, self.max_seq_len, self._extract_td_sequences)

    def get_minibatch_sequences(self, batch_size: int) -> Generator[tuple[TensorDict, TensorDict], None, None]:
        """The prepared sequences in random order, ``batch_size`` at a time. Each call has a new order.

        Yields:
            the sequences end to end, ``[b * max_sequence_length]``, and the log_probs, advantages, values and returns
            of their steps without padding. The last minibatch may be smaller.

        Raises:
            ValueError: :meth:`prepare_sequence_tensors` was not called.
        """
        padded, unpadded, index = cast("Any", (self.padded_data, self.unpadded_data, self._index))
        if padded is None or unpadded is None or index is None:
            raise ValueError(
                "Attempting to fetch minibatches before preparing sequences. Call prepare_sequence_tensors() first."
            )
        total = len(index)
        if batch_size > total:
            text = (
                f"Batch size {batch_size} is larger than the number of sequences ({total}), using batch_size = {total}."
            )
            warnings.warn(text, stacklevel=2)
        renew(self._rollout, self._seed)
        number = 0 if self._seed is None else self._shuffles
        order = kernels.permutation(total, stream(self._rollout.seed, SEQUENCES), number).to(index.device)
        self._shuffles += 1
        split: tuple[Tensor, ...] = cast("Any", order).split(min(batch_size, total))
        yield from sequences.minibatches(padded, unpadded, index, split)


def _at_most(batch_size: int | None, size: str, total: int) -> int | None:
    """The number of transitions to draw. None, which means all, if more are wanted than are stored."""
    if batch_size is None or batch_size <= total:
        return batch_size
    warnings.warn(f"Batch size {batch_size} is larger than {size}. Returning all data.", stacklevel=3)
    return None


def _unmade(kind: Any) -> Any:
    """An object without a state; pickle sets the state afterwards."""
    return kind.__new__(kind)
