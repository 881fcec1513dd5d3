"""AgileRL's ``RolloutBuffer`` (``agilerl.components.rollout_buffer``, release 2.58), built on relive's.

Change the import to ``from relive.compat.agilerl import RolloutBuffer, BPTTSequenceType``. AgileRL is not needed.
``docs/migration/agilerl.md`` lists what is fixed, what is faster and what differs.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from .. import core, returns
from ..batches import Overlap, stride_of
from ..core import key as stream
from ..errors import ParameterError
from ..rollout.buffer import RolloutBuffer as Rollout
from ..steps.arrays import Array, to_tensor, torch_dtype
from ..steps.schema import Field, Path, Schema, Spec, map_leaves
from .base import (
    FLAG,
    NUMBER,
    DropIn,
    Nested,
    StepError,
    StepFieldError,
    StepShapeError,
    Values,
    array_of,
    as_tensordict,
    contents_of,
    drawn_by_numpy,
    leaves_of,
    oldest_first,
    renew,
    write_column,
)

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["BPTTSequenceType", "RolloutBuffer", "StepError"]

FIELDS = {
    "observations": "obs",
    "next_observations": "next_obs",
    "actions": "action",
    "rewards": "reward",
    "dones": "terminated",
    "values": "value",
    "log_probs": "log_prob",
    "advantages": "advantage",
    "returns": "return",
    "hidden_states": "hidden",
    "action_masks": "action_mask",
    "episode_starts": "episode_start",
}
"""AgileRL's columns -> relive's fields. AgileRL's done, true for either kind of end, is stored as ``terminated``."""

TARGETS = ("log_probs", "advantages", "values", "returns")
"""The columns that minibatches of sequences have without padding."""

STATES = "initial_hidden_states"
"""AgileRL's name of the states before the sequences of a minibatch."""

SEQUENCES = 1
"""The number of the random stream that shuffles sequences."""

OPTIONAL = ("action_masks", "episode_starts")
"""The bool columns that exist from the first step that has them."""

DERIVED = ("buffer", "pos", "full", "_data", "_own")
"""Attributes that follow from the others; they are not pickled."""

Fields: TypeAlias = "dict[tuple[str, ...], Field]"
"""Member -> field. What is not nested has one member, named ()."""


class BPTTSequenceType(Enum):
    """How episodes are cut into sequences of ``max_seq_len`` steps. AgileRL's own enum is accepted, too."""

    CHUNKED = "chunked"
    MAXIMUM = "maximum"
    FIFTY_PERCENT_OVERLAP = "fifty_percent_overlap"
    FIFTY_PERCENT_OVERLAPPING = FIFTY_PERCENT_OVERLAP  # the name in AgileRL's documents


class RolloutBuffer(DropIn):
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

    _own_attribute = "_rollout"

    def __init__(
        self,
        capacity: int,
        observation_space: spaces.Space[object],
        action_space: spaces.Space[object],
        num_envs: int = 1,
        device: str = "cpu",
        gae_lambda: float = 0.95,
        gamma: float = 0.99,
        recurrent: bool = False,
        hidden_state_architecture: dict[str, tuple[int, ...]] | None = None,
        use_gae: bool = True,
        wrap_at_capacity: bool = False,
        max_seq_len: int | None = None,
        bptt_sequence_type: Enum | str = BPTTSequenceType.CHUNKED,
        *,
        keep_dtypes: bool = False,
        autoreset_mode: Literal["next_step"] | None = None,
        seed: int | None = None,
    ) -> None:
        if recurrent and hidden_state_architecture is None:
            raise ParameterError("hidden_state_architecture must be provided if recurrent=True")
        if autoreset_mode not in (None, "next_step"):
            raise ParameterError(f"autoreset_mode={autoreset_mode!r}: expected 'next_step', or None for any other mode")
        self.capacity: int = capacity
        self.observation_space: spaces.Space[object] = observation_space
        self.action_space: spaces.Space[object] = action_space
        self.num_envs: int = num_envs
        self.device: str = device
        self.gae_lambda: float = gae_lambda
        self.gamma: float = gamma
        self.recurrent: bool = recurrent
        self.hidden_state_architecture: dict[str, tuple[int, ...]] | None = hidden_state_architecture
        self.use_gae: bool = use_gae
        self.wrap_at_capacity: bool = wrap_at_capacity
        self.max_seq_len: int | None = max_seq_len
        self.bptt_sequence_type: Enum | str = bptt_sequence_type
        self.autoreset_mode: Literal["next_step"] | None = autoreset_mode
        self._seed = seed
        self._obs = observation_fields(observation_space, keep_dtypes)
        self._action = action_field(action_space, keep_dtypes)
        sizes = hidden_state_architecture if recurrent and hidden_state_architecture else {}
        self._hidden: Fields = {(key,): Field((size[0], size[2])) for key, size in sizes.items()}
        fields: dict[str, Spec] = {"obs": numbered(self._obs), "next_obs": numbered(self._obs), "action": self._action}
        fields |= {"reward": NUMBER, "terminated": FLAG, "truncated": FLAG, "value": NUMBER, "log_prob": NUMBER}
        fields |= {"advantage": NUMBER, "return": NUMBER} | ({"hidden": numbered(self._hidden)} if recurrent else {})
        self._rollout = Rollout(Schema(fields), capacity, num_envs, wrap=wrap_at_capacity, seed=seed or 0)
        self._nowhere, self._zeros = np.zeros(num_envs, np.bool_), np.zeros(num_envs, np.float32)
        self._ended, self._added, self._shuffles = self._nowhere, 0, 0
        self._forget_sequences()
        self._show()

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

    def _show(self) -> None:
        """Make the TensorDict of the columns, which is not pickled."""
        rollout = self._rollout
        block = rollout.block.rows(slice(rollout.num_steps))
        leaves = {path: block[inner] for path, inner in self._paths().items()}
        self._data: TensorDict = as_tensordict(leaves, (rollout.num_steps, rollout.num_envs), torch.device("cpu"))
        self._own = leaves_of(self._data)
        """The views into the storage, by AgileRL's paths."""

    def _paths(self, names: Iterable[str] = FIELDS) -> dict[Path, Path]:
        """AgileRL's path -> relive's path, for each leaf of those of these columns that exist."""
        known, found = self._rollout.schema.names, dict[Path, Path]()
        nested = {"observations": self._obs, "next_observations": self._obs, "hidden_states": self._hidden}
        for name in names:
            inner = FIELDS[name]
            if inner in known:
                for i, path in enumerate(nested.get(name, [()])):
                    found[(name, *path)] = (inner, str(i)) if path else (inner,)
        return found

    @property
    def buffer(self) -> TensorDict:
        """The columns, a TensorDict ``[capacity, num_envs]``; see the class."""
        return self._data

    @buffer.setter
    def buffer(self, columns: TensorDict) -> None:
        self._data = columns

    def _adopt(self) -> None:
        """Copy tensors that replaced a column of :attr:`buffer` into the storage, and put the columns back.

        Raises:
            StepShapeError: such a tensor has another shape.
        """
        now = leaves_of(self._data)
        for path, column in self._own.items():
            other = now.get(path)
            if other is column:
                continue
            if other is not None:
                write_column(_written(path), column, other)
            self._data[path] = column

    def __getstate__(self) -> dict[str, object]:
        """The state, with AgileRL's entries ``buffer``, ``pos`` and ``full``."""
        self._adopt()
        state = {name: value for name, value in self.__dict__.items() if name not in DERIVED}
        return state | {"buffer": self.buffer, "pos": self.pos, "full": self.full}

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the state without ``buffer``, ``pos`` and ``full``, which the rollout holds."""
        state = {name: value for name, value in self.__getstate__().items() if name not in DERIVED}
        return _unmade, (type(self),), state

    def _restore(self, state: dict[str, object]) -> None:
        """Restore a state of this class. If it has a ``buffer``, its columns are copied into the storage."""
        self.__dict__.update({name: value for name, value in state.items() if name not in DERIVED})
        self._show()
        if "buffer" in state:
            self._fill(state["buffer"])

    def _take_over(self, original: Any) -> None:
        """Put the steps into the rows that they have in the original."""
        for name, column in contents_of(original.buffer, OPTIONAL).items():
            self._allocate(name, Field(tuple(column.shape[2:]), torch.bool))
        self._fill(original.buffer)
        pos, full = int(original.pos), bool(original.full)
        rows = oldest_first(self.capacity, pos, full)
        again = pos % self.capacity if full else 0  # the rows before `pos`, so that they are the newest
        for count in filter(None, (len(rows), again)):
            self._rollout.reserve(count)
            self._rollout.commit()
            self._added += count
        if self.autoreset_mode is not None:
            self._leave_out_resets(torch.from_numpy(rows))

    def _leave_out_resets(self, rows: Tensor) -> None:
        """Leave out the step after each done, as :meth:`add` does. The oldest of these rows counts as a real step."""
        mask = self._rollout.block["mask"]
        for row, done in zip(rows, self._data["dones"][rows].numpy(), strict=True):
            real = ~self._ended
            mask[row] = torch.from_numpy(real)
            self._ended = done & real

    def _fill(self, columns: object) -> None:
        """Copy the columns of a TensorDict ``[capacity, num_envs]`` into the storage.

        Raises:
            StepError: it is no TensorDict, or one of its columns has another shape.
        """
        if not isinstance(columns, type(self._data)):
            raise StepError(f"buffer: expected a TensorDict, got {type(columns).__name__}")
        leaves = leaves_of(columns)
        for path in self._own.keys() & leaves.keys():
            write_column(_written(path), self._own[path], leaves[path])

    # -- writing ------------------------------------------------------------------------------------------------

    def add(
        self,
        obs: Nested[Values],
        action: Values,
        reward: Values,
        done: Values,
        value: Values,
        log_prob: Values,
        next_obs: Nested[Values] | None = None,
        hidden_state: Mapping[str, Values] | None = None,
        next_hidden_state: object = None,
        episode_start: Values | None = None,
        action_mask: Values | None = None,
        *,
        truncated: Values | None = None,
        final_value: Values | None = None,
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
        self._adopt()
        n = self.num_envs
        seen, ended = observation("obs", obs, self._obs, n), vector("done", done, n, FLAG)
        step: dict[str, object] = {
            "obs": seen,
            "next_obs": map_leaves(np.zeros_like, seen)
            if next_obs is None
            else observation("next_obs", next_obs, self._obs, n),
            "action": vector("action", action, n, self._action),
            "reward": vector("reward", reward, n),
            "terminated": ended,
            "truncated": self._nowhere if truncated is None else ended & vector("truncated", truncated, n, FLAG),
            "value": vector("value", value, n),
            "log_prob": vector("log_prob", log_prob, n),
            "advantage": self._zeros,
            "return": self._zeros,
        }
        if self._hidden:
            step["hidden"] = recurrent_states(hidden_state, self._hidden, n)
        if final_value is not None:
            step["final_value"] = vector("final_value", final_value, n)
        self._add_optional(step, episode_start, action_mask)
        real = ~self._ended
        if self.autoreset_mode is not None:
            step["mask"] = real
        self._rollout.add(step)
        self._added += 1
        self._ended = ended & real if self.autoreset_mode is not None else self._nowhere

    def _add_optional(self, step: dict[str, object], episode_start: Values | None, action_mask: Values | None) -> None:
        """Add to a step the fields that AgileRL allocates when a step first has them.

        Raises:
            StepShapeError: a shape does not fit.
        """
        n, known = self.num_envs, self._rollout.schema
        like = cast("Field", known["action_mask"]) if "action_mask" in known else None
        if action_mask is not None:
            field = like or Field((to_tensor(action_mask).numel() // n,), torch.bool)
            step["action_mask"] = vector("action_mask", action_mask, n, field)
            if like is None:
                self._allocate("action_masks", field)
                self._data["action_masks"].fill_(True)
        elif like is not None:
            step["action_mask"] = np.ones((n, *like.shape), np.bool_)
        starts = self._nowhere if episode_start is None else vector("episode_start", episode_start, n, FLAG)
        step["episode_start"] = starts
        if "episode_start" not in known:
            self._allocate("episode_starts", FLAG)

    def _allocate(self, name: str, field: Field) -> None:
        inner = FIELDS[name]
        self._rollout.add_fields(**{inner: field})
        self._data[name] = self._own[name,] = self._rollout.block[inner][: self._rollout.num_steps]

    def compute_returns_and_advantages(self, last_value: Values, last_done: Values) -> None:
        """Fill the columns advantages and returns, by GAE, or by Monte-Carlo returns if ``use_gae`` is off.

        Args:
            last_value: ``[N]``, V of the observations after the newest step.
            last_done: ``[N]``, whether the newest step was terminal. AgileRL's collector passes False for a truncated
                step although its ``done`` was True; ``last_value`` is then its bootstrap value.

        Raises:
            FieldError: a step was added as truncated without a final value.
        """
        self._adopt()
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
        return self._convert_td_to_np_dict(self._batch(some, torch.device("cpu")))

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
        """All steps ``[T * N]``, oldest first, or ``batch_size`` drawn without replacement.

        ``copy=False`` returns views where the stored rows are in the order of time and none is left out.
        """
        self._adopt()
        rollout, paths = self._rollout, self._paths()
        if batch_size is None and not copy and len(rollout) == rollout.steps * rollout.num_envs:
            leaves = {path: rollout[inner].flatten(0, 1) for path, inner in paths.items()}
            return as_tensordict(leaves, (len(rollout),), device)
        columns = columns_of(paths)
        batch = rollout.flat(columns) if batch_size is None else rollout.sample(batch_size, columns)
        return as_tensordict({path: batch[inner] for path, inner in paths.items()}, (len(batch),), device)

    # -- sequences ----------------------------------------------------------------------------------------------

    def _forget_sequences(self) -> None:
        self.padded_data: TensorDict | None = None
        """Sequences end to end, ``[num_sequences * max_sequence_length]``: observations, actions, action_masks,
        pad_mask, and ``initial_hidden_states`` as non-tensor data, ``{name: [num_sequences, layers, size]}``."""
        self.unpadded_data: TensorDict | None = None
        """log_probs, advantages, values and returns of all steps, ``[T * N]``, oldest first."""
        self.num_sequences: int | None = None
        self.max_sequence_length: int | None = None
        """Steps of the longest sequence."""
        self._index: Tensor | None = None
        """The row ``t * N + n`` of each step of :attr:`padded_data`, int64 ``[B, longest]``; arbitrary in padding."""

    @property
    def unpadded_slices(self) -> list[Tensor] | None:
        """For each sequence, the rows of :attr:`unpadded_data` that belong to it."""
        data = self.padded_data
        if self._index is None or data is None:
            return None
        real = data["pad_mask"].view(self._index.shape)
        return list(torch.split(self._index[real].cpu(), real.sum(1).tolist()))

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
        self._adopt()
        overlap, target = overlap_of(self.bptt_sequence_type), torch.device(device or self.device)
        rollout, paths = self._rollout, self._paths(("observations", "actions", "action_masks"))
        (seq,) = rollout.sequences(
            self.max_seq_len,
            overlap="none" if self.max_seq_len is None else overlap,
            fields=columns_of(paths),
            shuffle=False,
            time_first=False,
        )
        longest = int(seq["lengths"].max())
        leaves = {path: seq[inner] for path, inner in paths.items()} | {("pad_mask",): seq["mask"]}
        flat = {path: leaf[:, :longest].flatten(0, 1).to(target) for path, leaf in leaves.items()}
        pairs = zip(self._hidden, seq["hidden"], strict=True)
        states = {key: state.transpose(0, 1).contiguous().to(target) for (key,), state in pairs}
        time = seq["start"].unsqueeze(1) + torch.arange(longest, device="cpu")
        self._index = (time * rollout.num_envs + seq["env"].unsqueeze(1)).to(target)
        self.padded_data = _with_states(flat, len(seq) * longest, states, target)
        self.num_sequences, self.max_sequence_length = self._index.shape
        columns = {(name,): rollout[FIELDS[name]].flatten().to(target, copy=True) for name in TARGETS}
        self.unpadded_data = as_tensordict(columns, (rollout.steps * rollout.num_envs,), target)

    def get_minibatch_sequences(self, batch_size: int) -> Generator[tuple[TensorDict, TensorDict], None, None]:
        """The prepared sequences in random order, ``batch_size`` at a time. Each call has a new order.

        Yields:
            the sequences end to end, ``[b * max_sequence_length]``, and the log_probs, advantages, values and returns
            of their steps without padding. The last minibatch may be smaller.

        Raises:
            ValueError: :meth:`prepare_sequence_tensors` was not called.
        """
        padded, unpadded, index = self.padded_data, self.unpadded_data, self._index
        if padded is None or unpadded is None or index is None:
            raise ValueError(
                "Attempting to fetch minibatches before preparing sequences. Call prepare_sequence_tensors() first."
            )
        total, longest = index.shape
        if batch_size > total:
            text = (
                f"Batch size {batch_size} is larger than the number of sequences ({total}), using batch_size = {total}."
            )
            warnings.warn(text, stacklevel=2)
        renew(self._rollout, self._seed)
        number = 0 if self._seed is None else self._shuffles
        order = core.permutation(total, stream(self._rollout.seed, SEQUENCES), number).to(index.device)
        self._shuffles += 1
        states = cast("dict[str, Tensor]", padded.get_non_tensor(STATES))
        leaves = {path: leaf.view(total, longest, *leaf.shape[1:]) for path, leaf in _tensors(padded).items()}
        columns = _tensors(unpadded)
        for chosen in torch.split(order, min(batch_size, total)):
            batch = {path: leaf.index_select(0, chosen) for path, leaf in leaves.items()}
            rows = index.index_select(0, chosen)[batch["pad_mask",]]
            flat = {path: leaf.flatten(0, 1) for path, leaf in batch.items()}
            first = {key: state.index_select(0, chosen) for key, state in states.items()}
            steps = {path: column.index_select(0, rows) for path, column in columns.items()}
            data = _with_states(flat, len(chosen) * longest, first, index.device)
            yield data, as_tensordict(steps, (len(rows),), index.device)

    # Methods that subclasses of AgileRL's class call or override.

    @staticmethod
    def _pad_sequences(sequences: Sequence[Any], target_length: int | None = None) -> Any:
        """Pad sequences with zeros to one length, ``[B, longest, ...]``.

        Args:
            sequences: tensors or TensorDicts ``[k, ...]``.
            target_length: use this length; longer sequences are cut off. None is the length of the longest.
        """
        if not isinstance(sequences[0], Tensor):
            members = {key: [sequence[key] for sequence in sequences] for key in sequences[0].keys()}
            parts = {(key,): RolloutBuffer._pad_sequences(member, target_length) for key, member in members.items()}
            return as_tensordict(parts, ())
        longest = max(map(len, sequences)) if target_length is None else target_length
        out = sequences[0].new_zeros(len(sequences), longest, *sequences[0].shape[1:])
        for row, sequence in zip(out, sequences, strict=True):
            row[: len(sequence)] = sequence[:longest]
        return out

    @staticmethod
    def _convert_td_to_np_dict(td: TensorDict) -> dict[str, Any]:
        """The arrays of a TensorDict, with the same nesting."""
        return cast("dict[str, Any]", td.cpu().numpy())

    def _extract_td_sequences(self, episode: Any, max_seq_len: int) -> list[Any]:
        """The sequences of an episode ``[K, ...]``, a tensor or a TensorDict. The last one may be shorter."""
        stride = stride_of(max_seq_len, overlap_of(self.bptt_sequence_type))
        starts = range(0, max(len(episode) - max_seq_len, 0) + stride, stride)
        return [episode[start : start + max_seq_len] for start in starts]

    def _get_complete_sequences(self, data: Any, episode_done_indices: list[list[int]]) -> tuple[list[Any], int]:
        """The sequences of steps ``[T, N, ...]``, env by env, and the length of the longest episode.

        Args:
            data: a tensor or a TensorDict.
            episode_done_indices: for each env, the last step of each of its episodes.
        """
        sequences: list[Any] = []
        longest = 1
        for env, lasts in enumerate(episode_done_indices):
            for first, last in zip([0, *(end + 1 for end in lasts)], lasts, strict=False):
                episode = data[first : last + 1, env]
                longest = max(longest, len(episode))
                size = self.max_seq_len or len(episode)
                sequences += self._extract_td_sequences(episode, size) if len(episode) >= size else [episode]
        return sequences, longest


def _at_most(batch_size: int | None, size: str, total: int) -> int | None:
    """The number of transitions to draw. None, which means all, if more are wanted than are stored."""
    if batch_size is None or batch_size <= total:
        return batch_size
    warnings.warn(f"Batch size {batch_size} is larger than {size}. Returning all data.", stacklevel=3)
    return None


def _unmade(kind: type[RolloutBuffer]) -> RolloutBuffer:
    """An object without a state; pickle sets the state afterwards."""
    return kind.__new__(kind)


def _written(path: Path) -> str:
    """A column as a user writes it, for errors."""
    return f"buffer[{', '.join(map(repr, path))}]"


def _tensors(data: TensorDict) -> dict[Path, Tensor]:
    """The tensors of a TensorDict, by their paths."""
    return {path: leaf for path, leaf in leaves_of(data).items() if isinstance(leaf, Tensor)}


def _with_states(
    leaves: Mapping[Path, Tensor], rows: int, states: dict[str, Tensor], device: torch.device
) -> TensorDict:
    """Padded steps, with the initial states of their sequences attached as AgileRL does it."""
    data = as_tensordict(leaves, (rows,), device)
    data.set_non_tensor(STATES, states)
    return data


@dataclass(frozen=True, slots=True)
class Ends:
    """An estimator for ``finish`` that computes advantages and returns from AgileRL's arguments.

    The column ``terminated`` holds AgileRL's ``done``, which is also True for truncated steps. The column ``truncated``
    is True only where ``add`` was given it. ``newest`` is AgileRL's ``last_done``, whether the newest step was
    terminal. A newest step that is done but not terminal was truncated; its bootstrap value is ``last_value``.

    Args:
        newest: bool ``[N]``, see above.
        gamma: discount per step.
        lam: λ of GAE; None for Monte-Carlo returns.
        follows: True if the step after a done step is the reset. Its value is that of the final observation.
    """

    newest: Tensor
    gamma: float
    lam: float | None
    follows: bool

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns needed."""
        return "reward", "value", "terminated", "truncated", "final_value", "mask"

    def __call__(self, **columns: Any) -> dict[str, Tensor]:
        """The columns ``advantage`` and ``return``, ``[T, N]``."""
        done, truncated, value = columns["terminated"], columns["truncated"].clone(), columns["value"]
        truncated[-1] |= done[-1]
        truncated[-1] &= ~self.newest
        terminated = done & ~truncated
        terminated[-1] |= self.newest
        final = columns["final_value"]
        final = torch.full_like(value[1:], float("nan")) if final is None else final.clone()
        after = slice(None) if self.follows else slice(-1, None)
        unknown = final[after].isnan()
        final[after] = torch.where(unknown, value[1:][after], final[after])
        options: dict[str, Any] = {"final_value": final, "mask": columns["mask"], "gamma": self.gamma}
        reward = columns["reward"]
        if self.lam is None:
            ret = returns.monte_carlo(reward, terminated, truncated, value=value, **options)
            return {"advantage": ret - value[:-1], "return": ret}
        advantage, ret = returns.gae(reward, value, terminated, truncated, lam=self.lam, **options)
        return {"advantage": advantage, "return": ret}


# -- what a host passes, as the fields of a step ----------------------------------------------------------------------


def observation_fields(space: spaces.Space[object], keep_dtypes: bool) -> Fields:
    """The fields of one environment's observation. Discrete becomes a vector of one; all are float32, as in AgileRL.

    Raises:
        NotImplementedError: a space that AgileRL does not store.
        AssertionError: a Tuple space.
    """
    if isinstance(space, spaces.Tuple):
        raise AssertionError("Tuple observation spaces are not supported by the rollout buffer.")
    members: dict[Path, spaces.Space[object]] = {(): space}
    if isinstance(space, spaces.Dict):
        inner = cast("Mapping[str, spaces.Space[object]]", space.spaces)
        members = {(name,): member for name, member in inner.items()}
    return {path: _observation_field(member, keep_dtypes) for path, member in members.items()}


def _observation_field(space: spaces.Space[object], keep_dtypes: bool) -> Field:
    dtype = torch_dtype(space.dtype) if keep_dtypes and space.dtype else torch.float32
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return Field(tuple(int(size) for size in space.shape), dtype)
    if isinstance(space, spaces.Discrete):
        return Field((1,), dtype)
    if isinstance(space, spaces.MultiDiscrete):
        return Field((space.shape[0],), dtype)
    raise NotImplementedError(f"{space} observation space is not supported")


ACTIONS: tuple[type, ...] = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def action_field(space: spaces.Space[object], keep_dtypes: bool) -> Field:
    """The field of one environment's action: a float32 vector, as in AgileRL.

    Raises:
        NotImplementedError: a space that AgileRL does not store.
    """
    if not isinstance(space, ACTIONS):
        raise NotImplementedError(f"{space} action space is not supported by AgileRL.")
    field = _observation_field(space, keep_dtypes)
    return Field((prod(field.shape),), field.dtype)


def numbered(fields: Fields) -> Field | tuple[Field, ...]:
    """The fields for relive's schema. Members become a tuple, because AgileRL's names may contain dots."""
    return fields[()] if () in fields else tuple(fields.values())


def vector(name: str, value: Values, num_envs: int, field: Field = NUMBER, any_axes: bool = True) -> Array:
    """One number, vector or array per environment, as an array ``[N, ...]`` of the field's dtype.

    Raises:
        StepShapeError: it has another number of elements. Without ``any_axes``, also if it has other axes than a single
            environment without its axis, two leading axes, or a number for a vector of one.
    """
    array, shape = array_of(name, value, field.dtype), (num_envs, *field.shape)
    if array.shape == shape:
        return array
    if array.size == np.prod(shape) and (
        any_axes or array.shape in (field.shape, shape[:-1]) or array.ndim == len(shape) + 1
    ):
        return array.reshape(shape)
    raise StepShapeError(f"'{name}': expected {shape} (num_envs first), got {tuple(array.shape)}")


def observation(name: str, value: Any, fields: Fields, num_envs: int) -> Array | tuple[Array, ...]:
    """An observation as arrays ``[N, ...]``, nested like :func:`numbered`.

    Raises:
        AssertionError: the space is a Dict and the observation is no mapping.
        KeyError: the observation and the space have different members.
        StepShapeError: a shape does not fit.
    """
    if () in fields:
        return vector(name, value, num_envs, fields[()], any_axes=False)
    if not hasattr(value, "keys"):
        raise AssertionError("Expected a dict observation for a Dict observation space.")
    members: dict[Path, Values] = {(key,): member for key, member in value.items()}
    if members.keys() != fields.keys():
        different = sorted(str(path[0]) for path in members.keys() ^ fields.keys())
        raise KeyError(f"'{name}': expected the members {[key for (key,) in fields]}, got others in {different}")
    return tuple(vector(f"{name}.{path[0]}", members[path], num_envs, x, any_axes=False) for path, x in fields.items())


def recurrent_states(hidden_state: Mapping[str, Values] | None, fields: Fields, num_envs: int) -> tuple[Tensor, ...]:
    """Recurrent states ``[layers, N, size]`` in the order of the storage, ``[N, layers, size]`` each; None is zeros.

    Raises:
        StepFieldError: a state is missing.
        StepShapeError: a shape does not fit.
    """
    if hidden_state is None:
        return tuple(
            torch.zeros(num_envs, *field.shape, dtype=torch.float32, device="cpu") for field in fields.values()
        )
    states: list[Tensor] = []
    for (key,), field in fields.items():
        if key not in hidden_state:
            names = [key for (key,) in fields]
            raise StepFieldError(f"'hidden_state': expected the states {names}, got {list(hidden_state)}")
        state, (layers, size) = to_tensor(hidden_state[key]).detach().cpu(), field.shape
        if tuple(state.shape) != (layers, num_envs, size):
            raise StepShapeError(
                f"'hidden_state[{key!r}]': expected {(layers, num_envs, size)} (layers first), got {tuple(state.shape)}"
            )
        states.append(state.transpose(0, 1).float())
    return tuple(states)


def columns_of(paths: Mapping[Path, Path]) -> tuple[str, ...]:
    """relive's names of the columns that these leaves are in."""
    return tuple(dict.fromkeys(inner[0] for inner in paths.values()))


OVERLAPS: dict[object, Overlap] = {"chunked": "none", "maximum": "max", "fifty_percent_overlap": "half"}


def overlap_of(sequence_type: Enum | str) -> Overlap:
    """relive's name for a sequence type of either library.

    Raises:
        NotImplementedError: an unknown type.
    """
    overlap = OVERLAPS.get(getattr(sequence_type, "value", sequence_type))
    if overlap is None:
        raise NotImplementedError(f"Received unrecognized sequence type: {sequence_type}")
    return overlap
