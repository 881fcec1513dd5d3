"""PyTorchRL's ReplayBuffer and NStepReplayBuffer (release 3.2), built on :class:`relive.ReplayBuffer`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, cast

import numpy as np
import torch

from ...errors import ParameterError
from ...parameters import seed_or_drawn
from ...samplers.contract import Sampler
from ...samplers.uniform import Uniform
from ...steps.arrays import as_host
from ...views.transitions import NStep
from ..attributes import alias
from ..trees import mapped
from .collected import Collected
from .flat import Flat
from .keys import DONE2, STATES, OffPolicyDataKeys
from .recurrent import Sequences

__all__ = ["NStepReplayBuffer", "ReplayBuffer"]

Data = dict[str, Any]
Factory = Callable[[Any, Any, Any, Any], "ReplayBuffer"]


class ReplayBuffer:
    """``pytorchrl.agent.storages.ReplayBuffer``: steps of all envs, drawn uniformly, read as dictionaries of tensors.

    As PyTorchRL's collector passes them, ``Done`` is the flag of the step before, so it marks an episode's first step,
    and ``NextDone`` is the flag of the step itself, time limits included. Batches are float32; the storage keeps the
    dtypes of the transitions. With a recurrent actor, the items are sequences of ``algorithm.update_every`` steps.
    Successive ones share ``int(actor.sequence_overlap * update_every)`` steps. Episodes may end inside them.

    Args:
        size: steps per env.
        device: of the batches; rows stay in RAM.
        actor: its ``is_recurrent`` and ``sequence_overlap`` are read.
        algorithm: its ``gamma`` and, with a recurrent actor, ``update_every`` are read.
        envs: not read.
        seed: batch t is a function of (seed, t). None draws one seed from torch's default generator, at construction.
            NumPy's generator is never read.

    Raises:
        ParameterError: successive sequences would share all of their steps (``sequence_overlap`` of 1).
    """

    storage_tensors = OffPolicyDataKeys
    _copies = False
    """Whether relabelled copies of steps are stored, too."""

    def __init__(
        self, size: int, device: Any, actor: Any, algorithm: Any, envs: Any, *, seed: int | None = None
    ) -> None:
        self.device, self.actor, self.algo, self.envs = device, actor, algorithm, envs
        self.recurrent_actor = bool(actor.is_recurrent)
        self._seed = seed_or_drawn(seed)
        self._view = NStep(1, float(getattr(algorithm, "gamma", 1.0)))
        self._adopt(self._new_sampler())
        self._rows: Flat | Sequences | None = None
        self._handed: weakref.ref[Collected] | None = None
        self._away = False
        self.max_size = size
        if self.recurrent_actor:
            self.sequence_length = int(algorithm.update_every)
            self.overlap_length = int(actor.sequence_overlap * self.sequence_length)
            self.non_overlap_length = self.sequence_length - self.overlap_length
            if not 0 <= self.overlap_length < self.sequence_length:
                raise ParameterError(
                    f"sequence_overlap={actor.sequence_overlap!r}: successive sequences of {self.sequence_length} "
                    f"steps would share {self.overlap_length} of them; choose a share from 0 up to, not including, 1"
                )
            self.max_size = self._whole(size)

    def _whole(self, size: int) -> int:
        """Steps in whole sequences, doubled because sequences overlap."""
        return size // self.sequence_length * self.sequence_length * 2

    @classmethod
    def create_factory(cls, size: int, *, seed: int | None = None) -> Factory:
        """A function ``(device, actor, algorithm, envs)`` that creates such buffers."""
        return lambda device, actor, algorithm, envs: cls(size, device, actor, algorithm, envs, seed=seed)

    def _new_sampler(self) -> Sampler:
        return Uniform()

    def _adopt(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __getstate__(self) -> Data:
        return {**self.__dict__, "_handed": None}  # a copy of this buffer did not return those steps

    def __setstate__(self, state: Data) -> None:
        self.__dict__.update(state)
        if self._rows is not None:
            self._take_parts(self._rows)

    def _take_parts(self, rows: Flat | Sequences) -> None:
        """Use the sampler and the view of these rows."""
        self._view = rows.view
        self._adopt(rows.replay.sampler)

    # -- writing ------------------------------------------------------------------------------------------------

    def init_tensors(self, sample: Mapping[str, Any]) -> None:
        """Allocate memory for transitions like this one, ``[N, ...]`` per key. The first insert does it, too."""
        parts = self.max_size, self.storage_tensors, self._sampler, self._view, self._seed
        if self.recurrent_actor:
            self._rows = Sequences(sample, *parts, self.sequence_length, self.overlap_length)
        else:
            self._rows = Flat(sample, *parts, copies=self._copies)

    def insert_transition(self, sample: Mapping[str, Any]) -> None:
        """Store one step of every env: tensors ``[N, ...]``, or dictionaries of them, by key.

        Raises:
            FieldError, ShapeError, DTypeError: it differs in form from the first one. Nothing is stored.
        """
        if self._handed is not None:
            self._settle()
        if self._rows is None:
            self.init_tensors(sample)
        self._stored.insert(sample)

    def insert_data_slice(self, new_data: Mapping[str, Any]) -> None:
        """Append steps ``[T, N, ...]`` by key, such as another buffer's :meth:`get_all_buffer_data`.

        If these are the steps that the last :meth:`reset` removed, unchanged or copied, they return to their places
        with their priorities.

        Raises:
            AssertionError: keys have different numbers of steps.
            FieldError, ShapeError, DTypeError: they differ in form from the first transition. Nothing is stored.
        """
        if self._away and self._are_back(new_data):
            self._away = False
            return
        self._settle()
        self._append(new_data)

    def _are_back(self, new_data: Mapping[str, Any]) -> bool:
        """Whether these are the steps that :meth:`reset` removed."""
        collected, rows = self._collected(), self._rows
        if collected is not None and new_data is collected and collected.unread:
            return True
        if rows is None or len(new_data.get(DONE2, ())) != rows.size:
            return False
        there = rows.read(0, rows.size, False)
        return there.keys() == new_data.keys() and all(_equal(value, new_data[key]) for key, value in there.items())

    def _append(self, new_data: Mapping[str, Any]) -> None:
        staged: Data = {}
        lengths = {
            self.insert_single_tensor_slice(staged, key, value)
            for key, value in new_data.items()
            if key in self.storage_tensors and value is not None and (self.recurrent_actor or key not in STATES)
        }
        assert len(lengths) == 1, f"insert_data_slice: expected one number of steps in all keys, got {sorted(lengths)}"
        if not lengths.pop():
            return
        if self._rows is None:
            states = {key: new_data[key] for key in STATES if new_data.get(key) is not None}
            self.init_tensors({key: mapped(lambda x: x[0], value) for key, value in {**staged, **states}.items()})
        self._extend(staged)

    def _extend(self, steps: Data) -> None:
        """Store checked steps ``[T, N, ...]``."""
        self._stored.extend(steps)

    def insert_single_tensor_slice(self, tensor_storage: Data, tensor_key: str, tensor_values: Any) -> int:
        """Add one key's steps, ``[T, N, ...]`` or a dictionary, to the slice ``tensor_storage``; returns T.

        Rows hold all keys of a step, so only :meth:`insert_data_slice` can store the finished slice.
        """
        tensor_storage[tensor_key] = tensor_values
        lengths: set[int] = {len(tensor_values)}
        if isinstance(tensor_values, dict):
            lengths = {len(member) for member in cast("Data", tensor_values).values()}
        assert len(lengths) == 1, f"{tensor_key!r}: expected one number of steps, got {sorted(lengths)}"
        return lengths.pop()

    def reset(self) -> None:
        """Forget all stored steps. With a recurrent actor, the unfinished sequence is kept."""
        self._away = self._rows is not None  # forgotten for good unless the next call returns them

    def _forget(self) -> None:
        self._stored.clear()

    def _collected(self) -> Collected | None:
        """The last result of :meth:`get_all_buffer_data`, if it still exists and the buffer has not changed since."""
        return None if self._handed is None else self._handed()

    def _settle(self) -> None:
        """Before a change: read the steps that were handed out, and forget those that :meth:`reset` removed."""
        collected, away = self._collected(), self._away
        self._handed, self._away = None, False
        if collected is not None:
            collected.content()
        if away:
            self._forget()

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def _stored(self) -> Any:
        if self._away:
            self._settle()
        if self._rows is None:
            raise AssertionError("the buffer is empty; call insert_transition() or insert_data_slice() first")
        return self._rows

    @property
    def size(self) -> int:
        """The number of steps stored per env, at most ``max_size``."""
        return 0 if self._rows is None or self._away else self._rows.size

    @property
    def step(self) -> int:
        """The position of the next step: the number stored since :meth:`reset`, modulo ``max_size``."""
        return 0 if self._rows is None or self._away else self._rows.added % self.max_size

    @property
    def data(self) -> Data:
        """A copy of all memory by key, float32 ``[max_size, N, ...]``; zero where nothing is stored."""
        found = {} if self._rows is None else self.get_data_slice(0, self.max_size)
        return {key: value for key, value in found.items() if value is not None}

    def _padded(self, found: Data, count: int) -> Data:
        def pad(value: Any) -> Any:
            if len(value) == count:
                return value
            out = np.zeros((count, *value.shape[1:]), np.float32)
            out[: len(value)] = value
            return out

        states = () if self.recurrent_actor else STATES
        return {key: value if key in states else mapped(pad, value) for key, value in found.items()}

    def get_data_slice(self, start_pos: int, end_pos: int) -> Data:
        """A copy of the steps at these positions, float32 ``[T, N, ...]`` by key; zero where nothing is stored.

        Keys that transitions lack are None.
        """
        found: Data = dict.fromkeys(self.storage_tensors)
        return found if self._rows is None else found | self._slice(start_pos, end_pos, None)

    def _slice(self, start_pos: int, end_pos: int, keys: tuple[str, ...] | None) -> Data:
        start, end, _ = slice(start_pos, end_pos).indices(self.max_size)
        return self._padded(self._stored.read(start, end, True, keys), max(end - start, 0))

    def get_all_buffer_data(self, data_to_cpu: bool = False) -> MutableMapping[str, Any]:
        """All steps in the order of time, float32 ``[size, N, ...]`` by key, copied; always in RAM.

        The copy is made on first use, or before this buffer changes; see :meth:`insert_data_slice`.
        """
        if self._rows is None:
            return {}
        rows = self._stored
        collected = Collected(lambda: rows.read(0, rows.size, False))
        self._handed = weakref.ref(collected)
        return collected

    def copy_single_tensor(self, key: str, position: int) -> Any:
        """A copy of one key at a position, float32 ``[N, ...]``, or a dictionary."""
        at = position % self.max_size if self.recurrent_actor or key not in STATES else 0
        return mapped(lambda value: value[0], self._slice(at, at + 1, (key,))[key])

    # -- batches ------------------------------------------------------------------------------------------------

    def before_gradients(self) -> None:
        """Does nothing; PyTorchRL calls it before each update."""

    def after_gradients(self, batch: Data, info: Data) -> Data:
        """Returns ``info`` unchanged; PyTorchRL calls it with each batch after the update."""
        return info

    def generate_batches(self, num_mini_batch: int, mini_batch_size: int, num_epochs: int = 1) -> Iterator[Data]:
        """``num_mini_batch`` random batches of ``mini_batch_size`` steps, with replacement: float32 tensors by key.

        With a recurrent actor, a batch holds as many whole sequences as have that many steps, end to end, and the
        recurrent states before each sequence's first step. ``num_epochs`` is ignored, as in PyTorchRL.

        Raises:
            EmptyError: nothing is stored.
        """
        elsewhere = torch.device(self.device).type != "cpu"
        for number, (batch, extras) in enumerate(self._stored.batches(num_mini_batch, mini_batch_size), 1):
            found = batch | self._extras(extras, number, num_mini_batch)
            yield {key: mapped(self._sent, value) for key, value in found.items()} if elsewhere else found

    def _sent(self, value: Any) -> Any:
        return value.to(self.device) if isinstance(value, torch.Tensor) else value

    def _extras(self, extras: Data, number: int, of: int) -> Data:
        return {}

    def update_storage_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Set an attribute, if it exists. A new ``max_size`` keeps the newest steps that fit."""
        if not hasattr(self, parameter_name):
            return
        if parameter_name == "max_size":
            whole = self._whole(new_parameter_value) if self.recurrent_actor else new_parameter_value
            self._settle()
            self.max_size = whole
            if self._rows is not None:
                self._rows.resize(self.max_size, self._new_sampler())
                self._take_parts(self._rows)
            return
        setattr(self, parameter_name, new_parameter_value)


class NStepReplayBuffer(ReplayBuffer):
    """``pytorchrl.agent.storages.NStepReplayBuffer``: sums of up to ``n_step`` rewards, within each env's episodes.

    Single steps are stored, and rewards are summed when a batch is read. So the newest steps can be drawn, too, and
    ``n_step`` and ``gamma`` may be changed at any time. In a batch, ``n_step`` is the number of rewards in each window,
    float32 ``[B, 1]``, so ``gamma ** n_step`` is each window's discount. With ``n_step=1`` it is the number 1.

    With a recurrent actor, sequences are stored with the sums of their rewards. Then ``n_step`` is fixed, and a changed
    ``gamma`` applies to later sequences. The next observation, state and flag of row t are those of step t + ``n_step``
    - 1, so a recurrent target misses no step. Where an episode ends before that step, the batch's ``n_step`` is
    infinite and ``gamma ** n_step`` is 0; for a ``gamma`` of 1, ``NextDone`` is 1 instead.

    Args:
        size: this and the others as in :class:`ReplayBuffer`.
        n_step: rewards per window; with a recurrent actor at most ``update_every``.

    Raises:
        ParameterError: as in :class:`ReplayBuffer`; with a recurrent actor also from the first insert, if ``n_step`` is
            above ``update_every``.
        LifecycleError: ``n_step`` is set to another number where sequences are stored.
    """

    def __init__(
        self, size: int, device: Any, actor: Any, algorithm: Any, envs: Any, n_step: int = 1, *, seed: int | None = None
    ) -> None:
        super().__init__(size, device, actor, algorithm, envs, seed=seed)
        self.n_step = n_step

    @classmethod
    def create_factory(cls, size: int, n_step: int = 1, *, seed: int | None = None) -> Factory:
        """A function ``(device, actor, algorithm, envs)`` that creates such buffers."""
        return lambda device, actor, algorithm, envs: cls(size, device, actor, algorithm, envs, n_step, seed=seed)

    @property
    def n_step(self) -> int:
        """Rewards per window."""
        return self._view.n

    @n_step.setter
    def n_step(self, n_step: int) -> None:
        if self._rows is None:
            self._view.n = n_step
        else:
            self._rows.read_windows(n_step)

    gamma = alias("_view.gamma", "Discount per step.")

    def _extras(self, extras: Data, number: int, of: int) -> Data:
        return {"n_step": 1 if self.n_step == 1 else self._stored.steps_used(extras)}


def _equal(there: Any, given: Any) -> bool:
    """Whether arrays, or dictionaries of arrays, are equal."""
    if isinstance(there, dict):
        members = cast("Data", there)
        return members.keys() == given.keys() and all(_equal(members[key], given[key]) for key in members)
    return np.array_equal(there, as_host(given), equal_nan=True)
