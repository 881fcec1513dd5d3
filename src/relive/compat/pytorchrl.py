"""PyTorchRL's off-policy buffers on relive's core. PyTorchRL need not be installed."""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from inspect import Signature, signature
from operator import itemgetter
from threading import Lock
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..errors import FieldError, LifecycleError, ParameterError, ShapeError
from ..parameters import seed_or_drawn
from ..replay.buffer import ReplayBuffer as Core
from ..samplers.contract import Sampler
from ..samplers.prioritized import Prioritized
from ..samplers.recent import Recent
from ..samplers.uniform import Uniform
from ..steps.arrays import Array, Bools, Doubles, Ints, as_host, numpy_dtype, torch_dtype
from ..steps.schema import Field, Node, Schema, map_leaves
from ..views.hindsight import Hindsight
from ..views.transitions import NStep, Transition
from .base import FLAG, Continuity, Device, DropIn, Nested, Obs, Shape, alias, breaks, contents_of, mapped, oldest_first

__all__ = [
    "ACT",
    "ACTPROBS",
    "ALGORITHM",
    "DONE",
    "DONE2",
    "EPISODES",
    "IREW",
    "OBS",
    "OBS2",
    "REW",
    "RHS",
    "RHS2",
    "EREBuffer",
    "HERBuffer",
    "HerFunction",
    "NStepReplayBuffer",
    "OffPolicyDataKeys",
    "PERBuffer",
    "ReplayBuffer",
]

OBS, RHS, DONE, ACT, ACTPROBS = "Observation", "RecurrentHiddenStates", "Done", "Action", "ActionProbs"
REW, IREW = "Reward", "IntrinsicReward"
OBS2, RHS2, DONE2 = "NextObservation", "NextRecurrentHiddenStates", "NextDone"
ALGORITHM, EPISODES = "Algorithm", "Episodes"
STATES = (RHS, RHS2)
NAMES = {
    OBS: "obs",
    RHS: RHS,
    DONE: "episode_start",
    ACT: "action",
    REW: "reward",
    IREW: "intrinsic_reward",
    OBS2: "next_obs",
    RHS2: RHS2,
    DONE2: "terminated",
    ACTPROBS: "action_probs",
}
"""PyTorchRL's keys -> relive's fields. Numbers are ``[N, 1]``, or ``[N]``, as the first transition has them."""
OffPolicyDataKeys: tuple[str, ...] = tuple(NAMES)
"""The keys that the buffers store."""
Data = dict[str, Any]
Steps: TypeAlias = "Mapping[str, Nested[Tensor | Array] | None]"
"""Steps by PyTorchRL's keys: tensors, or dictionaries of them; None where a key is missing."""
AFTER = (OBS2, RHS2, DONE2)
"""Keys read from a window's last step. All others are read from its first step."""
OF_STEPS = {REW: "rewards", DONE2: "dones"}
"""Fields of a sequence's steps. relive stores a sequence as one transition, whose own reward has the usual name."""
Factory: TypeAlias = "Callable[[Device, Actor, Algorithm, object], ReplayBuffer]"
LEAST = 1e-6
"""The epsilon used for ``epsilon=0``. With 0, a transition without error could never be drawn again."""
Relabelled = tuple[Obs, Obs, Obs, Obs, Array]
HerFunction = Callable[..., Relabelled]
OF_FACTORY = ("device", "actor", "algorithm", "envs")
"""The arguments that a buffer gets from whoever calls the factory: its second to fifth."""


class Actor(Protocol):
    """The members of an actor that the buffers read."""

    @property
    def is_recurrent(self) -> bool:
        """Whether sequences are stored."""
        ...

    @property
    def sequence_overlap(self) -> float:
        """The share of their steps that successive sequences have in common; read if the actor is recurrent."""
        ...


class Algorithm(Protocol):
    """The members of an algorithm that the buffers read, besides ``gamma``, if it has one."""

    @property
    def update_every(self) -> int:
        """The steps of a sequence; read if the actor is recurrent."""
        ...


class OriginalReplay(Protocol):
    """The members of a PyTorchRL buffer that are read, besides the arguments of its constructor."""

    data: Data
    max_size: int
    recurrent_actor: bool
    size: int
    step: int


class Maker:
    """``create_factory`` of a class of buffers. Each class shows the arguments of its own constructor."""

    def __get__(self, buffer: object, owner: type[ReplayBuffer]) -> Callable[..., Factory]:
        """The function of one class."""

        def create_factory(size: int, *options: Any, **named: Any) -> Factory:
            """A function ``(device, actor, algorithm, envs)`` that creates such buffers; arguments as of the class."""
            signature(owner).bind(size, *OF_FACTORY, *options, **named)  # an unknown one is refused here already
            return lambda device, actor, algorithm, envs: owner(size, device, actor, algorithm, envs, *options, **named)

        shown = [one for one in signature(owner).parameters.values() if one.name not in OF_FACTORY]
        vars(create_factory)["__signature__"] = Signature(shown, return_annotation=Factory)
        return create_factory


class ReplayBuffer(DropIn):
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
    _own_attribute = "_rows"
    _renamed: ClassVar = {"size": "max_size", "algorithm": "algo", "default_error": "error", "eta": "initial_eta"}
    _lacking = ("envs",)
    _copies = False
    """Whether relabelled copies of steps are stored, too."""

    def __init__(
        self, size: int, device: Device, actor: Actor, algorithm: Algorithm, envs: object, *, seed: int | None = None
    ) -> None:
        self.device: Device = device
        self.actor: Actor = actor
        self.algo: Algorithm = algorithm
        self.envs: object = envs
        self.recurrent_actor: bool = bool(actor.is_recurrent)
        self._seed = seed_or_drawn(seed)
        self._view = NStep(1, float(getattr(algorithm, "gamma", 1.0)))
        self._adopt(self._new_sampler())
        self._rows: Flat | Sequences | None = None
        self._handed: weakref.ref[Collected] | None = None
        self._away = False
        self.max_size = size
        if self.recurrent_actor:
            self.sequence_length: int = int(algorithm.update_every)
            self.overlap_length: int = int(actor.sequence_overlap * self.sequence_length)
            self.non_overlap_length: int = self.sequence_length - self.overlap_length
            if not 0 <= self.overlap_length < self.sequence_length:
                raise ParameterError(
                    f"sequence_overlap={actor.sequence_overlap!r}: successive sequences of {self.sequence_length} "
                    f"steps would share {self.overlap_length} of them; choose a share from 0 up to, not including, 1"
                )
            self.max_size = self._whole(size)

    def _whole(self, size: int) -> int:
        """Steps in whole sequences, doubled because sequences overlap."""
        return size // self.sequence_length * self.sequence_length * 2

    create_factory: Maker = Maker()

    def _new_sampler(self) -> Sampler:
        return Uniform()

    def _adopt(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __getstate__(self) -> Data:
        return {**self.__dict__, "_handed": None}  # a copy of this buffer did not return those steps

    def _restore(self, state: Data) -> None:
        self.__dict__.update(state)
        if self._rows is not None:
            self._take_parts(self._rows)

    @classmethod
    def _arguments_of(cls, original: OriginalReplay) -> dict[str, object]:
        known = {"envs": None} | super()._arguments_of(original)
        if original.recurrent_actor:
            known["size"] = original.max_size // 2  # the constructor doubles it
        return known

    def _take_over(self, original: OriginalReplay) -> None:
        """Insert the steps, oldest first.

        Raises:
            LifecycleError: they are sums of several rewards.
        """
        n_step = getattr(original, "n_step", 1)
        if n_step > 1:
            raise LifecycleError(
                f"from_original: the rows of the original are sums of n_step={n_step} rewards, and its steps are lost; "
                "collect again, or convert a buffer with n_step=1"
            )
        rows = self._rows_of(original)
        if len(rows):
            known = original.data.keys() & NAMES.keys()
            states = () if self.recurrent_actor else known & set(STATES)  # a single row, as PyTorchRL stores them
            steps = contents_of(original.data, known.difference(states), rows)
            self.insert_data_slice(steps | contents_of(original.data, states))

    def _rows_of(self, original: OriginalReplay) -> Ints:
        """The rows of an original in the order of time; with a recurrent actor, those of its whole sequences."""
        length = self.sequence_length if self.recurrent_actor else 1
        sequences = np.arange(int(original.size) // length)  # after a reset, `step` is 0 and they go on there
        if original.size == original.max_size:
            sequences = oldest_first(len(sequences), original.step // length, True)
            if original.step % length:
                sequences = sequences[1:]  # new steps have replaced a part of the oldest sequence
        return (sequences[:, None] * length + np.arange(length)).reshape(-1)

    def _take_parts(self, rows: Flat | Sequences) -> None:
        """Use the sampler and the view of these rows."""
        self._view = rows.view
        self._adopt(rows.replay.sampler)

    # -- writing ------------------------------------------------------------------------------------------------

    def init_tensors(self, sample: Steps) -> None:
        """Allocate memory for transitions like this one, ``[N, ...]`` per key. The first insert does it, too."""
        parts = sample, self.storage_tensors, self._seed, self.max_size, self._sampler, self._view
        if self.recurrent_actor:
            self._rows = Sequences(*parts, self.sequence_length, self.overlap_length)
        else:
            self._rows = Flat(*parts, self._copies)

    def insert_transition(self, sample: Steps) -> None:
        """Store one step of every env: tensors ``[N, ...]``, or dictionaries of them, by key.

        Raises:
            FieldError, ShapeError, DTypeError: it differs in form from the first one. Nothing is stored.
        """
        if self._handed is not None:
            self._settle()
        if self._rows is None:
            self.init_tensors(sample)
        self._stored.insert(sample)

    def insert_data_slice(self, new_data: Steps) -> None:
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

    def _are_back(self, new_data: Steps) -> bool:
        """Whether these are the steps that :meth:`reset` removed."""
        collected, rows = self._collected(), self._rows
        if collected is not None and new_data is collected and collected.unread:
            return True
        done = new_data.get(DONE2)
        if rows is None or done is None or len(done) != rows.size:
            return False
        there = rows.read()
        return there.keys() == new_data.keys() and all(_equal(value, new_data[key]) for key, value in there.items())

    def _append(self, new_data: Steps) -> None:
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
            states = {key: value for key in STATES if (value := new_data.get(key)) is not None}
            self.init_tensors({key: mapped(itemgetter(0), value) for key, value in {**staged, **states}.items()})
        self._extend(staged)

    def _extend(self, steps: Data) -> None:
        """Store checked steps ``[T, N, ...]``."""
        self._stored.extend(steps)

    def insert_single_tensor_slice(
        self, tensor_storage: Data, tensor_key: str, tensor_values: Nested[Tensor | Array]
    ) -> int:
        """Add one key's steps, ``[T, N, ...]`` or a dictionary, to the slice ``tensor_storage``; returns T.

        Rows hold all keys of a step, so only :meth:`insert_data_slice` can store the finished slice.
        """
        tensor_storage[tensor_key] = tensor_values
        lengths: set[int] = {len(tensor_values)}
        if isinstance(tensor_values, dict):
            lengths = {len(member) for member in tensor_values.values()}
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
    def _stored(self) -> Flat | Sequences:
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
        return {} if self._rows is None else self._at(np.arange(self.max_size))

    def _at(self, positions: Ints, keys: Iterable[str] | None = None) -> Data:
        """The steps at these positions of the memory, float32 ``[K, N, ...]`` by key."""
        rows = self._stored
        size, single = rows.size, () if self.recurrent_actor else STATES  # these have one row for all steps
        number = (positions - self.step + size) % self.max_size  # in the order of time
        there = number < size
        low, high = (int(number[there].min()), int(number[there].max()) + 1) if there.any() else (0, 0)

        def placed(value: Array) -> Array:
            out = np.zeros((len(positions), *value.shape[1:]), value.dtype)
            out[there] = value[number[there] - low]
            return out

        found = rows.read(keys, low, high)
        return {key: value if key in single else mapped(placed, value) for key, value in found.items()}

    def get_data_slice(self, start_pos: int, end_pos: int) -> Data:
        """A copy of the steps at these positions, float32 ``[T, N, ...]`` by key; zero where nothing is stored.

        Keys that transitions lack are None.
        """
        found = {} if self._rows is None else self._at(np.arange(self.max_size)[start_pos:end_pos])
        if not self.recurrent_actor:  # then these have one row for all steps
            found |= {key: mapped(itemgetter(slice(start_pos, end_pos)), found[key]) for key in STATES if key in found}
        return dict.fromkeys(self.storage_tensors) | found

    def get_all_buffer_data(self, data_to_cpu: bool = False) -> MutableMapping[str, Any]:
        """All steps in the order of time, float32 ``[size, N, ...]`` by key, copied; always in RAM.

        The copy is made on first use, or before this buffer changes; see :meth:`insert_data_slice`.
        """
        if self._rows is None:
            return {}
        rows = self._stored
        collected = Collected(rows.read)
        self._handed = weakref.ref(collected)
        return collected

    def copy_single_tensor(self, key: str, position: int) -> Nested[Array]:
        """A copy of one key at a position, float32 ``[N, ...]``, or a dictionary."""
        return mapped(lambda value: value[0], self._at(np.array([position % self.max_size]), (key,))[key])

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

    def _sent(self, value: object) -> object:
        return value.to(self.device) if isinstance(value, Tensor) else value

    def _extras(self, extras: Data, number: int, of: int) -> Data:
        return {}

    def update_storage_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Set an attribute, if it exists. A new ``max_size`` keeps the newest steps that fit."""
        if not hasattr(self, parameter_name):
            return
        if parameter_name == "max_size":
            whole = self._whole(new_parameter_value) if self.recurrent_actor else new_parameter_value
            self._settle()
            self.max_size: int = whole
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
        self, size: int, device: Device, actor: Actor, algorithm: Algorithm, envs: object, n_step: int = 1, *,
        seed: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(size, device, actor, algorithm, envs, seed=seed)
        self.n_step = n_step

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

    gamma: float = alias("_view.gamma", "Discount per step.")

    def _extras(self, extras: Data, number: int, of: int) -> Data:
        return {"n_step": 1 if self.n_step == 1 else self._stored.steps_used(extras)}


class PERBuffer(NStepReplayBuffer):
    """``pytorchrl.agent.storages.PERBuffer``: drawn in proportion to (abs(TD error) + epsilon)^alpha.

    Batches have ``idxs`` and the importance weights ``per_weights``, float32 ``[B, 1]``, divided by the largest one in
    the buffer. :meth:`after_gradients` reads the errors in ``info["Algorithm"]["errors"]``. With ``alpha=0`` draws are
    uniform, ``per_weights`` is 1.0 and errors are not read. A sequence's priority is 0.9 max + 0.1 mean over its steps.

    Args:
        size: this and the others as in :class:`NStepReplayBuffer`.
        epsilon: added to the absolute value of each TD error; 0 counts as 1e-6.
        alpha: the exponent of priorities; 0 is uniform.
        beta: the exponent of importance weights.
        default_error: the TD error that new transitions start with.
    """

    def __init__(
        self, size: int, device: Device, actor: Actor, algorithm: Algorithm, envs: object, n_step: int = 1,
        epsilon: float = 0.0, alpha: float = 0.0, beta: float = 1.0, default_error: float = 1000000, *,
        seed: int | None = None,
    ) -> None:  # fmt: skip
        self._epsilon = epsilon
        given = SimpleNamespace(alpha=alpha, beta=beta, default_error=default_error)
        self._priorities: Prioritized | SimpleNamespace = given
        super().__init__(size, device, actor, algorithm, envs, n_step, seed=seed)

    def _new_sampler(self) -> Sampler:
        eps, error = self._epsilon or LEAST, self.error
        return Prioritized(self.alpha, self.beta, eps=eps, stratified=False, normalize="buffer", default_error=error)

    def _adopt(self, sampler: Any) -> None:
        super()._adopt(sampler)
        self._priorities = sampler.prioritized or sampler

    @property
    def epsilon(self) -> float:
        """Added to each |TD error|; a change affects all stored transitions."""
        return self._epsilon

    @epsilon.setter
    def epsilon(self, epsilon: float) -> None:
        self._priorities.eps = epsilon or LEAST
        self._epsilon = epsilon

    error: float = alias("_priorities.default_error", "The TD error that new transitions start with.")
    alpha: float = alias("_priorities.alpha", "The exponent of priorities; a change affects all stored transitions.")
    beta: float = alias("_priorities.beta", "The exponent of importance weights.")

    def get_priority(self, error: Any) -> Any:
        """(error + epsilon)^alpha for errors of at least 0: arrays, tensors or numbers."""
        return (error + self.epsilon) ** self.alpha

    def get_sequence_priority(self, sequence_data: Array, eta: float = 0.9) -> Doubles:
        """eta · max + (1 - eta) · mean over the first axis."""
        return eta * np.max(sequence_data, axis=0) + (1 - eta) * np.mean(sequence_data, axis=0)

    def _extras(self, extras: Data, number: int, of: int) -> Data:
        weights: Tensor | float = 1.0
        if self.alpha != 0.0:
            each: Tensor = extras["weight"].unsqueeze(1)
            weights = each.repeat_interleave(self.sequence_length, 0) if self.recurrent_actor else each
        common = super()._extras(extras, number, of)
        return {**common, "per_weights": weights, "idxs": extras["index"].numpy()}

    def after_gradients(self, batch: Data, info: Data) -> Data:
        """Set the priorities of a batch from the TD errors that its update reported.

        Raises:
            AssertionError: the algorithm reported no errors.
            ShapeError, NotFiniteError: the errors do not fit the batch, or are not finite. Nothing is changed.
        """
        if self.alpha != 0.0 and "idxs" in batch:
            weighted = isinstance(batch.get("per_weights"), Tensor)
            errors = info[ALGORITHM].get("errors")
            assert errors is not None or not weighted, "TD errors missing!"
            index = batch.pop("idxs")
            if errors is not None:
                found = as_host(errors).reshape(len(index), -1)
                found = self._joint(found) if self.recurrent_actor else found.reshape(-1)
                self._stored.replay.update_priorities(index, found)
        return info

    def _take_over(self, original: OriginalReplay) -> None:
        """As in :class:`ReplayBuffer`, with the priorities."""
        super()._take_over(original)
        priorities = original.data.get("priority")
        if priorities is None or self.alpha == 0.0 or self._copies:
            return
        length = self.sequence_length if self.recurrent_actor else 1  # the steps of a sequence have one priority
        stored = priorities[self._rows_of(original)[::length]].reshape(-1)
        errors = np.maximum(stored ** (1 / self.alpha) - (self.epsilon or LEAST), 0.0)
        # the buffer was empty: the index of item k of env n is k * N + n
        self._stored.replay.update_priorities(np.arange(len(errors)), errors)

    def _joint(self, errors: Array) -> Doubles:
        """One error per sequence ``[S]`` that yields the joint priority of its steps' errors ``[S, K]``."""
        priority = self.get_sequence_priority(self.get_priority(np.abs(errors.T.astype(np.float64))))
        return np.maximum(priority ** (1 / self.alpha) - self.epsilon, 0.0)


class EREBuffer(PERBuffer):
    """``pytorchrl.agent.storages.EREBuffer``: batch k of K is drawn from the newest c_k transitions of all envs.

    c_k = max(M η^(1000 k / K), cmin) for k = 1 .. K and M stored transitions; batches have ``ck``. "Newest" means the
    order of time, also after the ring has wrapped or was resized. With ``alpha`` above 0, the draw among them is
    prioritized. ``eta`` follows the returns in ``info["Episodes"]["TrainReward"]``; see :meth:`update_eta`.

    Args:
        size: this and the others as in :class:`PERBuffer`.
        eta: η, how sharply the window shrinks; 1 draws from all transitions.
        cmin: the least number of transitions in the window.
    """

    def __init__(
        self, size: int, device: Device, actor: Actor, algorithm: Algorithm, envs: object, n_step: int = 1,
        epsilon: float = 0.0, alpha: float = 0.0, beta: float = 1.0, default_error: float = 1000000, eta: float = 1.0,
        cmin: int = 5000, *, seed: int | None = None,
    ) -> None:  # fmt: skip
        self._cmin, self._recent = cmin, Recent(eta, cmin, adapt=True)
        options = n_step, epsilon, alpha, beta, default_error
        super().__init__(size, device, actor, algorithm, envs, *options, seed=seed)

    def _new_sampler(self) -> Sampler:
        inner: Any = super()._new_sampler()
        recent = Recent(self.initial_eta, self._least(), inner=inner, adapt=True)
        recent.eta = self.eta
        return recent

    def _adopt(self, sampler: Any) -> None:
        super()._adopt(sampler)
        self._recent = sampler

    def _least(self) -> int:
        """``cmin`` in items of the replay: transitions, or sequences."""
        return max(self._cmin // (int(self.algo.update_every) if self.recurrent_actor else 1), 1)

    initial_eta: float = alias("_recent.sharpest", "η while returns rise.")
    eta: float = alias("_recent.eta", "η now.")

    @property
    def cmin(self) -> int:
        """The least number of transitions in the window."""
        return self._cmin

    @cmin.setter
    def cmin(self, cmin: int) -> None:
        self._cmin = cmin
        self._recent.c_min = self._least()

    def _extras(self, extras: Data, number: int, of: int) -> Data:
        found = super()._extras(extras, number, of)
        if self.alpha == 0.0 and not self.recurrent_actor:
            del found["per_weights"]
        rows = self._stored.replay
        window = min(self._recent.window(number, of), len(rows))
        return {**found, "ck": max(window // rows.num_envs, 1) if self.recurrent_actor else window}

    def after_gradients(self, batch: Data, info: Data) -> Data:
        """As in :class:`PERBuffer`; then :meth:`update_eta`."""
        return self.update_eta(super().after_gradients(batch, info))

    def update_eta(self, info: Data) -> Data:
        """Adapt ``eta`` to the returns of the last 20 episodes: ``initial_eta`` while they rise, 1 while they fall.

        After 20 episodes, ``info["Algorithm"]`` gets ``eta`` and ``RewardGradient``, from -1 to 1.
        """
        returns = info.get(EPISODES, {}).get("TrainReward", ())
        for value in np.atleast_1d(np.asarray(returns, np.float64)):
            self._recent.observe(float(value))
        if self._recent.progress is not None:
            info.setdefault(ALGORITHM, {}).update(RewardGradient=self._recent.progress, eta=self.eta)
        return info


def unchanged(obs: Obs, rhs: Obs, obs2: Obs, rhs2: Obs, rew: Array, initial_state: Obs, final_state: Obs) -> Relabelled:
    """The default ``her_function``: the transitions unchanged."""
    return obs, rhs, obs2, rhs2, rew


class HERBuffer(EREBuffer):
    """``pytorchrl.agent.storages.HERBuffer``: when an episode ends, a copy relabelled by ``her_function`` is appended.

    ``her_function(obs, rhs, obs2, rhs2, rew, initial_state, final_state) -> (obs, rhs, obs2, rhs2, rew)`` gets float32
    arrays ``[K, ...]``, or dictionaries of them: K steps of one env's episode. (The host passes one step of K envs.)
    ``initial_state`` is the first stored observation of the episode and ``final_state`` the last one, repeated for each
    step; recurrent states are zeros. Episodes may have any length, in any number of envs, and may wrap around the end
    of the memory. PyTorchRL's envs reset themselves and lose the final observation. So ``final_state`` is the
    observation before the last step, and the copy leaves out the last step. Flags are copied. ``size`` and slices
    ignore copies; a buffer that a slice is inserted into makes its own. Copies use part of the ``size`` steps of
    memory. Feed-forward actors only.

    Args:
        size: this and the others as in :class:`EREBuffer`.
        her_function: see above.

    Raises:
        LifecycleError: the actor is recurrent.
    """

    _copies = True

    def __init__(
        self, size: int, device: Device, actor: Actor, algorithm: Algorithm, envs: object,
        her_function: HerFunction = unchanged, n_step: int = 1, epsilon: float = 0.0, alpha: float = 0.0,
        beta: float = 1.0, default_error: float = 1000000, eta: float = 1.0, cmin: int = 5000, *,
        seed: int | None = None,
    ) -> None:  # fmt: skip
        options = n_step, epsilon, alpha, beta, default_error, eta, cmin
        super().__init__(size, device, actor, algorithm, envs, *options, seed=seed)
        if self.recurrent_actor:
            raise LifecycleError(
                "HERBuffer: the actor is recurrent, but its states come from the original observations, not from "
                "relabelled ones; use a feed-forward actor, or EREBuffer, which has everything else that HERBuffer has"
            )
        self.her_function = her_function
        self._lengths = np.zeros(0, np.int64)

    def insert_transition(self, sample: Steps) -> None:
        """As in :class:`ReplayBuffer`; then append copies of the episodes that ended."""
        super().insert_transition(sample)
        self._count(as_host(sample[DONE2]).reshape(1, -1) != 0)

    def _extend(self, steps: Data) -> None:
        """As in :class:`ReplayBuffer`. The copy of an episode is added right after its end."""
        done = as_host(steps[DONE2])
        done = done.reshape(*done.shape[:2]) != 0
        cuts = [0, *(np.flatnonzero(done.any(1)) + 1).tolist(), len(done)]
        for low, high in itertools.pairwise(dict.fromkeys(cuts)):
            part = itemgetter(slice(low, high))
            super()._extend({key: mapped(part, value) for key, value in steps.items()})
            self._count(done[low:high])

    def _count(self, done: Bools) -> None:
        """Count stored steps, bool ``[T, N]``. Only the last one may end episodes."""
        if not len(self._lengths):
            self._lengths = np.zeros(done.shape[1], np.int64)
        self._lengths += len(done)
        ended = np.flatnonzero(done[-1])
        if len(ended):
            self.handle_end_of_episode(ended)
            self._lengths[ended] = 0

    def _forget(self) -> None:
        """As in :class:`ReplayBuffer`. Unfinished episodes are counted from here."""
        super()._forget()
        self._lengths[:] = 0

    def handle_end_of_episode(self, envs: Iterable[int] | None = None) -> None:
        """Append relabelled copies of the episodes that these envs (default: all) just ended."""
        replay = self._stored.replay
        hindsight = Hindsight(relabel=self._relabel, strategy="final", k=1)
        for env in range(replay.num_envs) if envs is None else envs:
            count = int(self._lengths[env])
            if not count:
                continue
            stored = replay.slice(int(env), -count)
            episode = _episode({name: x for name, x in stored.items() if name not in ("index", "complete")})
            if not len(episode["reward"]):
                continue
            copy = hindsight.copies(episode, 1, seed=0)
            copy["copied"] = np.ones_like(copy["terminated"])
            replay.extend(copy, envs=[int(env)])
            replay.interrupt([int(env)])

    def _relabel(self, steps: Data, initial: Obs, final: Obs, chosen: object) -> Data:
        """Call ``her_function`` for :class:`relive.Hindsight`."""
        count, stored = len(steps["reward"]), self._stored
        rhs, rhs2 = (stored.zeros(key, count) if key in stored.states else np.zeros(count) for key in STATES)
        given = steps["obs"], steps["next_obs"], initial, final
        obs, obs2, *ends = (mapped(lambda x: np.array(x, np.float32), value) for value in given)
        reward = np.array(steps["reward"], np.float32).reshape(count, *stored.shapes[REW])
        obs, _, obs2, _, reward = self.her_function(obs, rhs, obs2, rhs2, reward, *ends)
        changed = {"obs": _like(obs, steps["obs"]), "next_obs": _like(obs2, steps["next_obs"])}
        return {**changed, "reward": np.asarray(reward, np.float32).reshape(-1)}


class Collected(MutableMapping[str, Any]):
    """Steps by key at the time of the call, read from the buffer on first use.

    A PyTorchRL learner that collects by itself takes all steps out of its buffer, resets the buffer and puts them back
    in each round. If they come back unread, the buffer has nothing to do; otherwise it compares them. Before any other
    change the buffer reads them. It is pickled as a plain dictionary.

    Args:
        read: returns the steps.
    """

    def __init__(self, read: Callable[[], Data]) -> None:
        self._read: Callable[[], Data] | None = read
        self._found: Data = {}
        self._lock = Lock()

    @property
    def unread(self) -> bool:
        """Whether the steps have not been read yet."""
        return self._read is not None

    def content(self) -> Data:
        """The steps, float32 ``[T, N, ...]`` by key."""
        with self._lock:  # the collector and the learner may be threads
            if self._read is not None:
                self._found = self._read()
                self._read = None
        return self._found

    def __getitem__(self, key: str) -> Any:
        return self.content()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.content()[key] = value

    def __delitem__(self, key: str) -> None:
        del self.content()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.content())

    def __len__(self) -> int:
        return len(self.content())

    def __repr__(self) -> str:
        return repr(self.content())

    def __reduce__(self) -> tuple[object, ...]:
        return dict, (self.content(),)


class KeyedRows(ABC):
    """The rows of a buffer by PyTorchRL's keys, in a replay that gets a row of each env at a time.

    Args:
        sample: a transition.
        known: keys that are stored if a transition has them.
        seed: of the replay.
        length: steps of a row.
    """

    replay: Core[Sampler, NStep]

    def __init__(self, sample: Steps, known: tuple[str, ...], seed: int | None, length: int = 1) -> None:
        had = {key: value for key in known if (value := sample.get(key)) is not None}
        self.keys: tuple[str, ...] = tuple(key for key in had if key not in STATES)
        """The keys without those of recurrent states."""
        self.num_envs: int = len(had[DONE2])
        self.length: int = length
        self._seed = seed
        self.shapes: dict[str, Shape] = {key: mapped(lambda x: tuple(x.shape[1:]), x) for key, x in had.items()}
        """Key -> the shape without the env axis, or a dictionary of shapes."""
        self.states: tuple[str, ...] = tuple(key for key in had if key in STATES)
        self._flat = schema_of(sample, self.keys)
        self._integers = integers_of(self._flat)
        self._count = 0
        """Rows of each env since the last :meth:`clear`."""

    @property
    @abstractmethod
    def view(self) -> NStep:
        """Holds n and γ."""

    @abstractmethod
    def _build(self, max_size: int, sampler: Sampler, view: NStep) -> Core[Sampler, NStep]:
        """An empty replay for so many steps of each env."""

    @property
    def added(self) -> int:
        """Steps per env since the last :meth:`clear`, in whole rows."""
        return self._count * self.length

    @property
    def size(self) -> int:
        """Steps per env, in whole rows. Steps that two rows share count twice."""
        return len(self.replay) // self.num_envs * self.length

    def clear(self) -> None:
        """Forget all rows."""
        self.replay.clear()
        self._count = 0

    def resize(self, max_size: int, sampler: Sampler) -> None:
        """Change the number of steps that fit, and keep the newest rows."""
        old, view = self.replay, self.view
        old.view = Transition()  # each replay has a view of its own
        self.replay = self._build(max_size, sampler, view)
        self.replay.append(old)
        self._count = self.size // self.length

    def _rows(self, env: int) -> Ints:
        """The rows of an env in the replay's block, in the order of time."""
        ends = [self.replay.slice(env, start, stop)["index"] for start, stop in ((0, 1), (-1, None))]
        first, last = (int(index[0]) // self.num_envs if len(index) else 0 for index in ends)
        rows = len(self.replay.block["truncated"]) // self.num_envs
        return env * rows + np.arange(first, last + len(ends[0])) % rows

    @staticmethod
    def _name(key: str) -> str:
        """relive's field of a key."""
        return NAMES[key]

    def zeros(self, key: str, *front: int) -> Nested[Array]:
        """A recurrent state, ``[*front, ...]``, or a dictionary of them."""
        return mapped(lambda shape: np.zeros((*front, *shape), np.float32), self.shapes[key])

    def read(self, keys: Iterable[str] | None = None, low: int = 0, high: int | None = None) -> Data:
        """Steps in the order of time, float32 ``[T, N, ...]`` by key.

        Args:
            keys: default: all.
            low: the first step, 0 for the oldest.
            high: the step after the last; default: up to the newest.
        """
        size, block = self.size, self.replay.block
        high = size if high is None else high
        wanted, begin = set(self.keys if keys is None else keys), low // self.length
        counted = size // self.length
        envs = [self._rows(env) for env in range(self.num_envs)]
        rows = [torch.from_numpy(x[len(x) - counted :][begin : -(-high // self.length)]) for x in envs]

        def together(shape: tuple[int, ...], column: Tensor) -> Array:
            steps = [as_host(column[places]).reshape(-1, *shape) for places in rows]
            return np.stack(steps, 1)[low - begin * self.length :][: high - low].astype(np.float32)

        return {key: mapped(together, self.shapes[key], block[self._name(key)]) for key in self.keys if key in wanted}


class Flat(KeyedRows):
    """Steps ``[N, ...]``. Recurrent states are one row of zeros, as in PyTorchRL.

    Args:
        sample: this and the others as in :class:`KeyedRows`.
        max_size: steps per env.
        sampler: of the replay.
        view: of the replay.
        copies: whether relabelled copies of steps will be added. ``size`` and :meth:`read` ignore these.
    """

    def __init__(
        self, sample: Steps, known: tuple[str, ...], seed: int | None, max_size: int, sampler: Sampler,
        view: NStep, copies: bool,
    ) -> None:  # fmt: skip
        super().__init__(sample, known, seed)
        self._continuity = Continuity()
        self.copies: bool = copies
        self.replay: Core[Sampler, NStep] = self._build(max_size, sampler, view)

    @property
    def view(self) -> NStep:
        """The view of the replay. A copied replay has a view of its own."""
        return self.replay.view

    def _build(self, max_size: int, sampler: Sampler, view: NStep) -> Core[Sampler, NStep]:
        schema = self._flat.extend(copied=FLAG) if self.copies else self._flat
        size = max_size * self.num_envs, self.num_envs
        return Core(schema, *size, own_next_obs=True, check_ends=False, sampler=sampler, view=view, seed=self._seed)

    @property
    def size(self) -> int:
        """Steps per env."""
        return min(len(self._rows(env)) for env in range(self.num_envs)) if self.copies else super().size

    def _rows(self, env: int) -> Ints:
        """As in :class:`KeyedRows`, without relabelled copies."""
        rows = super()._rows(env)
        return rows[~as_host(self.replay.block["copied"])[rows]] if self.copies else rows

    def _step(self, data: Steps, axes: int) -> Data:
        step = as_stored(step_of(data, self.keys, axes), self._integers)
        return step | {"copied": np.zeros_like(step["terminated"])} if self.copies else step

    def insert(self, sample: Steps) -> None:
        """Store one step of every env."""
        step = self._step(sample, 1)
        checked = self.view.n > 1  # if n is 1, only the step itself is read; see read_windows
        if checked:
            self._continuity.follow(self.replay, mapped(array_like, step["obs"]))
        self.replay.add(step)
        if checked:
            self._continuity.note(mapped(lambda x: array_like(x).copy(), step["next_obs"]), step["terminated"])
        self._count += 1

    def extend(self, data: Steps) -> None:
        """Store steps ``[T, N, ...]`` of one or several collectors. Successive steps need not belong together."""
        steps = self._step(data, 2)
        checked = self.view.n > 1
        if checked:
            steps["truncated"][:-1] = breaks(steps["obs"], steps["next_obs"], steps["terminated"])
            self._continuity.follow(self.replay, mapped(lambda value: value[0], steps["obs"]))
        self.replay.extend(steps)
        if checked:
            self._continuity.note(mapped(lambda value: value[-1].copy(), steps["next_obs"]), steps["terminated"][-1])
        self._count += len(steps["terminated"])

    def read_windows(self, n: int) -> None:
        """From now on, batches hold windows of up to ``n`` rewards.

        While n is 1, steps are stored without checking that one follows from the other. When n first exceeds 1, steps
        that do not lead to the one after them are marked as truncated.
        """
        before, self.view.n = self.view.n, n
        if n == 1 or before > 1:
            return
        flags = self.replay.block["truncated"]
        rows = len(flags) // self.num_envs
        for env in range(self.num_envs):
            steps = self.replay.slice(env)
            obs, next_obs = arrays_of(steps["obs"]), arrays_of(steps["next_obs"])
            lost = breaks(obs, next_obs, as_host(steps["terminated"])[:, None])[:, 0]
            last = steps["index"][:-1][torch.from_numpy(lost)]
            flags[env * rows + last // self.num_envs % rows] = True
        self.replay.interrupt()  # the next steps are not checked against these
        self._continuity.forget()

    def read(self, keys: Iterable[str] | None = None, low: int = 0, high: int | None = None) -> Data:
        """As in :class:`KeyedRows`; states have one row, whatever the steps."""
        wanted = [key for key in self.states if keys is None or key in keys]
        return super().read(keys, low, high) | {key: self.zeros(key, 1, self.num_envs) for key in wanted}

    def batches(self, count: int, batch_size: int) -> Iterator[tuple[Data, Data]]:
        """Batches ``[B, ...]`` by key, float32; and the replay's own batches."""
        for drawn in self.replay.batches(count, batch_size):
            batch: Data = dict(drawn.items())
            found = {key: mapped(_shown, self.shapes[key], batch[NAMES[key]]) for key in self.keys}
            for key in self.states:
                found[key] = mapped(
                    lambda shape: torch.zeros((1, *shape), dtype=torch.float32, device="cpu"), self.shapes[key]
                )
            yield found, batch

    def steps_used(self, batch: Data) -> Tensor:
        """The number of rewards in each window of a batch, float32 ``[B, 1]``."""
        return batch["steps"].float().unsqueeze(1)


class Sequences(KeyedRows):
    """Sequences of L steps with n-step rewards, built while steps are added.

    A small replay holds the newest L + n - 1 steps of each env. Every L - overlap steps, its oldest L steps become a
    sequence. Row t of a sequence has the sum of up to n rewards from step t on, within the episode. Its next
    observation, next states and next flag are those of step t + n - 1, even if an episode ended in between: a recurrent
    network reads the rows in order and must not miss a step. Where an episode ends before that step, ``n_step`` is
    infinite, so γ^n is 0 and no target mixes two episodes.

    Only the flags mark the ends of episodes, as in PyTorchRL's networks.

    Args:
        sample: this and the others as in :class:`KeyedRows`; ``length`` is L.
        max_size: steps per env, in whole sequences.
        sampler: of the replay.
        view: reads the sums of rewards.
        overlap: steps that successive sequences share.

    Raises:
        ParameterError: n is above L, or above 1 for transitions without ``Done``.
    """

    def __init__(
        self, sample: Steps, known: tuple[str, ...], seed: int | None, max_size: int, sampler: Sampler,
        view: NStep, length: int, overlap: int,
    ) -> None:  # fmt: skip
        super().__init__(sample, known, seed, length)
        if not 1 <= view.n <= length or (view.n > 1 and DONE not in self.keys):
            raise ParameterError(
                f"n_step={view.n}: expected at most the {length} steps of a sequence, and transitions with {DONE!r}; "
                "choose a larger update_every, or a smaller n_step"
            )
        self._stride, self._waits = length - overlap, length + view.n - 1
        flat, states = self._flat, {key: mapped(Field, self.shapes[key]) for key in self.states}
        size = max(self._waits, 2) * self.num_envs, self.num_envs
        self._newest = Core(flat.extend(**states), *size, own_next_obs=True, check_ends=False, seed=0)
        self._view, self._single = view, NStep(1)
        self._seen = 0

        def of_sequence(field: Field) -> Field:
            return Field((length, *field.shape), field.dtype)

        stored = {self._name(key): flat[NAMES[key]] for key in self.keys if NAMES[key] in flat}
        fields: dict[str, Node] = map_leaves(of_sequence, stored)
        flags = {name: flat[name] for name in ("reward", "terminated", "truncated")}
        used = {"n_step": Field((length,))} if view.n > 1 else {}
        self._schema = Schema({**fields, **states, **flags, **used})
        self.replay: Core[Sampler, NStep] = self._build(max_size, sampler, view)

    @property
    def view(self) -> NStep:
        """The view that sums rewards."""
        return self._view

    def _build(self, max_size: int, sampler: Sampler, view: NStep) -> Core[Sampler, NStep]:
        rows = max_size // self.length * self.num_envs
        return Core(self._schema, rows, self.num_envs, ordered=False, sampler=sampler, seed=self._seed)

    @staticmethod
    def _name(key: str) -> str:
        return OF_STEPS.get(key, NAMES[key])

    def insert(self, sample: Steps) -> None:
        """Add one step of every env."""
        self._newest.add(as_stored(step_of(sample, (*self.keys, *self.states)), self._integers))
        self._seen += 1
        if self._seen >= self._waits and (self._seen - self._waits) % self._stride == 0:
            self._store_oldest()

    def _store_oldest(self) -> None:
        length, envs, n = self.length, self.num_envs, self.view.n
        steps = self._waiting(self._single)
        rewards = steps if n == 1 else self._waiting(self.view)

        def part(key: str) -> Nested[Array]:
            first, source = n - 1 if key in AFTER else 0, rewards if key == REW else steps

            def cut(_: object, values: Tensor) -> Array:
                rows = as_host(values)[-self._waits * envs :]
                return rows.reshape(self._waits, envs, *rows.shape[1:])[first : first + length]

            return mapped(cut, self.shapes[key], source[NAMES[key]])

        fields = {self._name(key): mapped(lambda value: value.swapaxes(0, 1)[None], part(key)) for key in self.keys}
        states = {key: mapped(lambda value: value[:1], part(key)) for key in self.states}
        self._append({**fields, **states}, 1)

    def _waiting(self, view: NStep) -> Data:
        """The waiting steps, read through a view, in the order of time: ``[W N, ...]``."""
        self._newest.view = view
        return dict(self._newest.data().items())

    def _append(self, fields: Data, count: int) -> None:
        """Store sequences ``[K, N, ...]``. The replay's own reward and flags are unused."""
        shape = count, self.num_envs
        none = np.zeros(shape, np.bool_)
        step = {**fields, "reward": np.zeros(shape, np.float32), "terminated": none, "truncated": none}
        if self.view.n > 1:
            step["n_step"] = self._steps_used(fields[self._name(DONE)], fields[self._name(DONE2)])
        step = {name: mapped(lambda x: np.ascontiguousarray(as_host(x)), value) for name, value in step.items()}
        self.replay.extend(step)
        self._count += count

    def extend(self, data: Steps) -> None:
        """Store whole sequences, ``[K L, N, ...]`` end to end, with the states before each sequence's first step.

        Raises:
            AssertionError: the steps are not a whole number of sequences.
        """
        steps, length = as_stored(step_of(data, self.keys, axes=2), self._integers), self.length
        count = len(steps["terminated"])
        assert count % length == 0, f"expected whole sequences of {length} steps, got {count} steps"

        def cut(value: Array) -> Array:
            return value.reshape(count // length, length, *value.shape[1:]).swapaxes(1, 2)

        fields = {self._name(key): mapped(cut, steps[NAMES[key]]) for key in self.keys}
        states = {key: mapped(lambda v: as_host(v)[::length].astype(np.float32), data[key]) for key in self.states}
        self._append({**fields, **states}, count // length)

    def read_windows(self, n: int) -> None:
        """Refuse to change n, because sums of n rewards are stored.

        Raises:
            LifecycleError: ``n`` differs.
        """
        if n != self.view.n:
            raise LifecycleError(
                f"n_step: sequences with windows of {self.view.n} rewards are stored; create a buffer with n_step={n!r}"
            )

    def read(self, keys: Iterable[str] | None = None, low: int = 0, high: int | None = None) -> Data:
        """As in :class:`KeyedRows`. States are zero except before a sequence's first step."""
        block, wanted = self.replay.block, [key for key in self.states if keys is None or key in keys]
        rows = torch.from_numpy(np.stack([self._rows(env) for env in range(self.num_envs)], 1))

        def firsts(shape: tuple[int, ...], column: Tensor) -> Array:
            out = np.zeros((self.size, self.num_envs, *shape), np.float32)
            out[:: self.length] = as_host(column[rows])
            return out[low:high]

        return super().read(keys, low, high) | {key: mapped(firsts, self.shapes[key], block[key]) for key in wanted}

    def batches(self, count: int, batch_size: int) -> Iterator[tuple[Data, Data]]:
        """Batches of sequences by key, float32 ``[S L, ...]``, states ``[S, ...]``; and the replay's own batches."""
        for batch in self.replay.batches(count, -(-batch_size // self.length)):
            found: Data = {
                key: mapped(lambda shape, x: x.reshape(-1, *shape).float(), self.shapes[key], batch[self._name(key)])
                for key in self.keys
            }
            if self.view.n > 1 and self.view.gamma == 1.0:  # no power of 1 is 0, so the flag must end the target
                found[DONE2] = torch.maximum(found[DONE2], self.steps_used(batch).isinf().float())
            states = {key: mapped(lambda _, state: state, self.shapes[key], batch[key]) for key in self.states}
            yield found | states, batch

    def steps_used(self, batch: Data) -> Tensor:
        """n of each window of a batch, float32 ``[S L, 1]``; infinite where its episode ended before."""
        return batch["n_step"].reshape(-1, 1)

    def _steps_used(self, starts: Array, ends: Array) -> Array:
        """n of each window, as :meth:`steps_used` gives it, from the flags before and after steps of ``[..., L]``."""
        n, length = self.view.n, self.length
        # the flags before steps 0 .. L + n - 2; `ends` holds the flags after steps n - 1 .. L + n - 2
        flags = np.concatenate([starts.reshape(ends.shape) != 0, ends[..., length - n : length - 1]], -1).cumsum(-1)
        return np.where(flags[..., n - 1 :] > flags[..., :length], np.inf, n).astype(np.float32)


def step_of(sample: Steps, keys: tuple[str, ...], axes: int = 1) -> Data:
    """A transition as a step of relive ``[N, ...]``; with ``axes=2``, several as arrays ``[T, N, ...]``.

    Raises:
        FieldError: a key is missing.
        ShapeError: Reward or NextDone have more than one number per env, or are a dictionary.
    """
    step: Data = {}
    for key in keys:
        value = sample.get(key)
        if value is None:
            raise FieldError(f"{key!r} is missing; the first transition had {', '.join(keys)}")
        # many steps are flattened faster as arrays; the buffer copies a single one as it is
        step[NAMES[key]] = value if axes == 1 else mapped(array_like, value)
    reward = _numbers(REW, sample[REW], axes)
    step["reward"] = reward if reward.dtype == np.float32 else reward.astype(np.float32)
    step["terminated"] = _numbers(DONE2, sample[DONE2], axes) != 0
    step["truncated"] = np.zeros(step["terminated"].shape, np.bool_)
    return step


def _numbers(key: str, value: Nested[Tensor | Array] | None, axes: int) -> Array:
    """One number per env, ``[N, 1]`` or ``[N]``, as ``[N]``."""
    array = array_like(value)
    shape = array.shape
    if len(shape) < axes or shape[axes:] not in ((1,), ()):
        found = f"a dictionary of {', '.join(value)}" if isinstance(value, Mapping) else shape
        raise ShapeError(f"{key!r}: expected one number per env, as [N, 1], got {found}")
    return array.reshape(shape[:axes])


def array_like(value: Any) -> Array:
    """A value as :func:`as_host` gives it. Tensors that NumPy can share, as most can, take half the time here."""
    try:
        return value.numpy()
    except (AttributeError, RuntimeError, TypeError):
        return as_host(value)


def as_stored(steps: Data, integers: Mapping[str, Nested[Field]]) -> Data:
    """Cast whole numbers that arrive as floats, as in slices, to the stored integer dtypes."""
    for name, fields in integers.items():
        steps[name] = mapped(_whole, fields, steps[name])
    return steps


def _whole(field: Field, value: Tensor | Array) -> Tensor | Array:
    array, dtype = as_host(value), numpy_dtype(field.dtype)
    if array.dtype.kind != "f" or dtype.kind == "f":
        return value
    cast = array.astype(dtype)
    return cast if (cast == array).all() else value  # the replay refuses fractions


def schema_of(sample: Steps, keys: tuple[str, ...]) -> Schema:
    """The fields of these keys, with the dtypes of the first transition."""
    step = step_of(sample, keys)
    fields = {name: mapped(_field, value) for name, value in step.items() if name != NAMES[OBS2]}
    return Schema(fields)


def _field(value: Tensor | Array) -> Field:
    array = as_host(value)
    dtype = torch_dtype(array.dtype)
    return Field(array.shape[1:], torch.float32 if dtype is torch.float64 else dtype)


def integers_of(schema: Schema) -> dict[str, Nested[Field]]:
    """The fields that are not floats, by name; for a dictionary, the fields of its members."""
    names = {path[0] for path, field in schema.leaves.items() if not field.dtype.is_floating_point}
    found: dict[str, Any] = {name: schema[name] for name in names - {"terminated", "truncated"}}
    return found | ({NAMES[OBS2]: found["obs"]} if "obs" in found else {})


def arrays_of(steps: Nested[Tensor]) -> Nested[Array]:
    """Steps of one env ``[T, ...]``, or a dictionary of them, as arrays ``[T, 1, ...]``."""
    return mapped(lambda value: as_host(value)[:, None], steps)


def _shown(shape: tuple[int, ...], value: Tensor) -> Tensor:
    """Steps of a batch as float32, with the axis of 1 that relive leaves out. The checks save time."""
    value = value if value.dtype is torch.float32 else value.float()
    return value.unsqueeze(1) if value.dim() == len(shape) else value


def _equal(there: Nested[Array], given: Any) -> bool:
    """Whether arrays, or dictionaries of arrays, are equal."""
    if isinstance(there, np.ndarray):
        return np.array_equal(there, as_host(given), equal_nan=True)
    return there.keys() == given.keys() and all(_equal(value, given[key]) for key, value in there.items())


def _episode(steps: Data) -> Data:
    """The newest steps in which each leads to the next, without the last step; arrays ``[T, 1, ...]``.

    An episode is cut where steps of another collector were stored between its own.
    """
    fields: Data = {name: arrays_of(steps[name]) for name in steps.keys()}
    cuts = np.flatnonzero(breaks(fields["obs"], fields["next_obs"], fields["terminated"]))
    part = itemgetter(slice(cuts[-1] + 1 if len(cuts) else 0, -1))
    return {name: mapped(part, value) for name, value in fields.items()}


def _like(value: Nested[Array], stored: Nested[Array]) -> Nested[Array]:
    """``value`` with the dtypes of ``stored``."""
    return mapped(lambda had, new: np.asarray(new).astype(had.dtype), stored, value)
