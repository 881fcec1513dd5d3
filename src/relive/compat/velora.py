"""Velora's ``ReplayBuffer`` and ``BatchExperience`` (release 0.2) on relive, and the ``RolloutBuffer`` it removed.

Change the import to ``from relive.compat.velora import ReplayBuffer``. Velora itself is not needed.
``docs/migration/velora.md`` lists what is fixed, what is faster and what differs.
"""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import safetensors
import torch
from torch import Tensor

from ..batches import Batch
from ..errors import FileFormatError, NoSaveError, ParameterError
from ..files import disk, format, save
from ..files.format import pieces
from ..parameters import is_count, torch_device
from ..printable import shown
from ..replay.buffer import ReplayBuffer as Replay
from ..returns import GAE
from ..rollout.buffer import RolloutBuffer as Rollout
from ..steps.arrays import Array, to_tensor
from ..steps.schema import Schema, Spec
from .base import (
    FLAG,
    Column,
    Device,
    DropIn,
    StepError,
    StepShapeError,
    Values,
    array_of,
    contents_of,
    placed,
    renew,
    sent,
    table_of,
)

__all__ = ["BatchExperience", "ReplayBuffer", "RolloutBatch", "RolloutBuffer", "StepError", "checked", "read_files"]

ENDING = ".safetensors"
CHECKSUM = "relive.crc32"
"""The entry in the safetensors header that holds the CRC-32 of the tensors."""
SIZES = ("capacity", "state_dim", "action_dim", "hidden_dim", "position", "size")
"""The entries of the metadata; the first four are arguments of the constructor."""
WIDTHS = {"states": "state_dim", "actions": "action_dim", "next_states": "state_dim", "hiddens": "hidden_dim"}
"""Column -> the argument that says how many numbers it has. The others have one."""
UNKNOWN = np.zeros(1, np.bool_)
"""Velora does not distinguish terminals and truncations. relive's flags stay False; ``done`` is a further column."""


class Agent(Protocol):
    """The part of an agent that :meth:`ReplayBuffer.warm` needs."""

    device: torch.device
    env: Any

    def predict(self, states: Tensor, hidden: Tensor | None, *, train_mode: bool) -> tuple[Tensor, Tensor]:
        """The actions and the actor's next recurrent states, ``[N, ...]``."""
        ...


@dataclass
class BatchExperience:
    """Transitions ``[B, ...]``, all float32 and contiguous.

    Attributes:
        states: ``[B, state_dim]``.
        actions: ``[B, action_dim]``.
        rewards: ``[B, 1]``.
        next_states: ``[B, state_dim]``.
        dones: ``[B, 1]``.
        hiddens: ``[B, hidden_dim]``, the actor's recurrent states.
    """

    states: Tensor
    actions: Tensor
    rewards: Tensor
    next_states: Tensor
    dones: Tensor
    hiddens: Tensor


class ReplayBuffer(DropIn):
    """The newest ``capacity`` transitions, in no particular order, under Velora's names.

    ``states``, ``actions``, ``rewards``, ``next_states``, ``dones`` and ``hiddens`` are views into the storage,
    float32 ``[capacity, size]``; rewards and dones have size 1. Assigning to one copies into it. Unused rows are zero.
    The views are not contiguous, because the fields of a transition are stored side by side. ``hiddens`` are what
    Velora's agent passes: its recurrent state after the step.

    Args:
        capacity: transitions, at least 2.
        state_dim: numbers of an observation.
        action_dim: numbers of an action.
        hidden_dim: numbers of the actor's recurrent state.
        device: of the storage; None is the CPU.
        seed: not in Velora; batch t is a function of (seed, t). None draws a seed for each batch from torch's
            default generator, as Velora does.

    Raises:
        ParameterError: a capacity below 2, or above what fits into memory.
    """

    states: Column = Column("obs")
    actions: Column = Column("action")
    rewards: Column = Column("reward", single=True)
    next_states: Column = Column("next_obs")
    dones: Column = Column("done", single=True)
    hiddens: Column = Column("memory")
    _own_attribute = "_replay"

    def __init__(
        self,
        capacity: int,
        state_dim: int,
        action_dim: int,
        hidden_dim: int,
        *,
        device: Device | None = None,
        seed: int | None = None,
    ) -> None:
        self.capacity: int = capacity
        self.state_dim: int = state_dim
        self.action_dim: int = action_dim
        self.hidden_dim: int = hidden_dim
        self.device: Device | None = device
        fields: dict[str, Spec] = {"obs": (state_dim,), "action": (action_dim,), "reward": (), "done": ()}
        fields |= {"terminated": FLAG, "truncated": FLAG, "memory": (hidden_dim,)}
        self._replay = Replay(Schema(fields), capacity, ordered=False, device=device or "cpu", seed=seed or 0)
        self._seed = seed
        self._on, self._added = None if self._replay.device.type == "cpu" else self._replay.device, 0
        self._numbers = np.zeros(1, np.float32), np.zeros(1, np.float32)

    @property
    def position(self) -> int:
        """The row of the next transition."""
        return self._added % self.capacity

    @property
    def size(self) -> int:
        """How many transitions are stored."""
        return min(self._added, self.capacity)

    def __len__(self) -> int:
        """How many transitions are stored."""
        return self.size

    def column(self, name: str) -> Tensor:
        """A column of the storage as a view, ``[capacity, size]`` or ``[capacity]``; ``name`` is relive's."""
        return self._replay.block[name]

    # -- writing ------------------------------------------------------------------------------------------------

    def add(
        self, state: Values, action: Values, reward: Values, next_state: Values, done: Values, hidden: Values
    ) -> None:
        """Store one transition. Each value may have a leading axis of 1.

        Raises:
            StepShapeError: a value has the wrong size. Nothing is stored.
        """
        on, (rewards, dones) = self._on, self._numbers
        if isinstance(reward, float) and isinstance(done, bool | np.bool_):
            rewards[0], dones[0] = reward, done
        else:
            rewards, dones = row("reward", reward, 1, on)[0], row("done", done, 1, on)[0]
        step = {
            "obs": row("state", state, self.state_dim, on),
            "action": row("action", action, self.action_dim, on),
            "reward": rewards,
            "next_obs": row("next_state", next_state, self.state_dim, on),
            "done": dones,
            "memory": row("hidden", hidden, self.hidden_dim, on),
            "terminated": UNKNOWN,
            "truncated": UNKNOWN,
        }
        self._replay.add(step)
        self._added += 1

    def add_multi(
        self, states: Values, actions: Values, rewards: Values, next_states: Values, dones: Values, hiddens: Values
    ) -> None:
        """Store several transitions ``[B, ...]``; rewards and dones may be ``[B]``. The last ``capacity`` stay.

        Raises:
            StepShapeError: a shape does not fit. Nothing is stored.
        """
        count, values = np.shape(states)[0], (states, actions, rewards, next_states, dones, hiddens)
        columns: dict[str, Array | Tensor] = dict.fromkeys(("terminated", "truncated"), np.zeros((count, 1), np.bool_))
        for (name, column), given in zip(FIELDS.items(), values, strict=True):
            size = getattr(self, WIDTHS[name]) if name in WIDTHS else None
            columns[column.name] = rows(name, given, count, size, self._on)
        self._replay.extend(columns)
        self._added += count

    def warm(self, agent: Agent, n_samples: int, num_envs: int = 8, *, envs: Any = None) -> None:
        """Play ``agent`` in new copies of its environment, and store ``n_samples`` transitions.

        ``dones`` are True for terminals only. Steps that reset an environment are left out. Each episode begins with
        the actor's initial recurrent state. The first reset uses ``agent.seed``, if there is one.

        Args:
            agent: Velora's, or any object with ``predict(states, hidden, train_mode=True)`` and ``env``.
            n_samples: transitions to add, at most ``capacity``.
            num_envs: parallel environments, at least 2.
            envs: not in Velora; a vector environment to play in, if ``agent.env`` cannot be made again from its spec.

        Raises:
            ParameterError: fewer than 2 environments, or more samples than there is room for.
        """
        if num_envs < 2:
            raise ParameterError(f"'{num_envs=}' cannot be smaller than 2.")
        if n_samples > self.capacity:
            raise ParameterError(
                f"'{n_samples=}' do not fit: the buffer's capacity is {self.capacity}; ask for that many"
            )
        for block in generated(agent, n_samples, num_envs, envs):
            self.add_multi(*block)

    # -- reading ------------------------------------------------------------------------------------------------

    def sample(self, batch_size: int) -> BatchExperience:
        """``batch_size`` transitions, drawn uniformly with replacement and copied.

        Raises:
            ParameterError: fewer are stored.
        """
        if len(self) < batch_size:
            raise ParameterError(
                f"Buffer does not contain enough experiences. Available: {len(self)}, Requested: {batch_size}"
            )
        renew(self._replay, self._seed)
        batch = self._replay.sample(batch_size)
        return BatchExperience(**{name: x.shown(batch[x.name].contiguous()) for name, x in FIELDS.items()})

    def metadata(self) -> dict[str, int | str | None]:
        """Sizes and cursors, with the entries of Velora's ``metadata.json``."""
        return {name: getattr(self, name) for name in SIZES} | {"device": str(self.device) if self.device else None}

    def state_dict(self) -> dict[str, Tensor]:
        """Contiguous copies of the six tensors ``[capacity, ...]``, as Velora's ``save_model`` writes them."""
        return {name: getattr(self, name).contiguous() for name in FIELDS}

    def config(self) -> Any:
        """Velora's ``BufferConfig`` for its agents' configurations. Velora must be installed."""
        config: Any = import_module("velora.models.config")
        return config.BufferConfig(type="ReplayBuffer", **{name: getattr(self, name) for name in SIZES[:4]})

    # -- files --------------------------------------------------------------------------------------------------

    def save(self, dirpath: str | os.PathLike[str], prefix: str = "buffer_") -> None:
        """Write ``<prefix>metadata.json`` and ``<prefix>state.safetensors`` into a directory, as Velora does.

        Each file is replaced completely or not at all.
        """
        write_files(dirpath, prefix, self.metadata(), {name: getattr(self, name) for name in FIELDS})

    @classmethod
    def load(
        cls,
        state_path: str | os.PathLike[str],
        metadata: Mapping[str, Any],
        *,
        device: Device | None = None,
        seed: int | None = None,
    ) -> ReplayBuffer:
        """Load a buffer that Velora or relive saved.

        Args:
            state_path: the ``.safetensors`` file, with or without that ending.
            metadata: the content of the ``.json`` file.
            device: not in Velora; replaces the device in the metadata.
            seed: not in Velora; see the class.

        Raises:
            NoSaveError: there is no such file. Also a FileNotFoundError.
            FileFormatError: the file is damaged, is not Velora's, or contradicts the metadata.
        """
        known = checked(metadata)
        where = _device_of(known["device"]) if device is None else torch_device("load", device)
        original = SimpleNamespace(**known, **read_files(state_path, known, FIELDS))
        return cls.from_original(original, device=where, seed=seed)

    def _take_over(self, original: Any) -> None:
        if not original.size:
            return
        self.add_multi(*contents_of(original, FIELDS, slice(original.size)).values())
        if original.size == self.capacity and original.position:
            # added once more, so that the next transition goes to `position`
            self.add_multi(*contents_of(original, FIELDS, slice(original.position)).values())

    def __repr__(self) -> str:
        sizes = f"{self.capacity}, {self.state_dim}, {self.action_dim}, {self.hidden_dim}"
        return f"ReplayBuffer({sizes}, device={self.device!r}, seed={self._seed})"


def _device_of(name: str | None) -> torch.device:
    """The device that a file's metadata names.

    Raises:
        FileFormatError: it is none that holds tensors here.
    """
    problem = "it holds no numbers"
    try:
        where = torch_device("load", name or "cpu")
        if where.type != "meta":
            return where
    except ParameterError as error:
        problem = str(error)
    raise FileFormatError(f"metadata 'device': {shown(name)}: {problem}; pass load(..., device='cpu')")


FIELDS = table_of(ReplayBuffer)


@dataclass
class RolloutBatch:
    """Steps of a rollout ``[B, ...]``, all float32.

    Attributes:
        states: ``[B, state_dim]``.
        actions: ``[B, action_dim]``.
        rewards: ``[B, 1]``, as are ``dones``, ``log_probs``, ``values``, ``advantages`` and ``returns``.
        dones: whether the step ended its episode.
        hiddens: ``[B, hidden_dim]``, the network's recurrent state before the step.
        log_probs: of the stored actions.
        values: V(states).
        advantages: by GAE over the whole rollout.
        returns: advantages + values.
    """

    states: Tensor
    actions: Tensor
    rewards: Tensor
    dones: Tensor
    hiddens: Tensor
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


ROLLOUT_FIELDS = {
    "states": Column("obs"),
    "actions": Column("action"),
    "rewards": Column("reward", single=True),
    "dones": Column("ended", single=True),
    "hiddens": Column("hidden"),
    "log_probs": Column("log_prob", single=True),
    "values": Column("value", single=True),
    "advantages": Column("advantage", single=True),
    "returns": Column("return", single=True),
}


class RolloutBuffer:
    """``capacity`` steps of one policy, added ``num_envs`` at a time. Empty it when it is full.

    Velora's buffer computed advantages within shuffled minibatches, kept no recurrent states, and paired
    log-probabilities with other actions. Here :meth:`finish` computes advantages once, in the order of time, and the
    state, action and log-probability of a row belong together. ``rollout`` is the :class:`relive.RolloutBuffer`
    underneath; ``buffer.rollout.sequences(16)`` gives sequences to train a recurrent network.

    Args:
        capacity: steps over all environments, a multiple of ``num_envs``.
        state_dim: numbers of an observation.
        action_dim: numbers of an action.
        hidden_dim: numbers of the network's recurrent state.
        num_envs: N.
        gamma: discount per step.
        gae_lambda: λ.
        device: of the storage; None is the CPU.
        seed: of the order of batches. None draws one from torch's default generator for each :meth:`sample`.

    Raises:
        ParameterError: ``num_envs`` is below 1, or ``capacity`` is no positive multiple of it.
    """

    def __init__(
        self,
        capacity: int,
        state_dim: int,
        action_dim: int,
        hidden_dim: int,
        *,
        num_envs: int = 1,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        device: Device | None = None,
        seed: int | None = None,
    ) -> None:
        if not is_count(num_envs, 1) or not is_count(capacity, 1) or capacity % num_envs:
            raise ParameterError(f"'{capacity=}' must be a multiple of '{num_envs=}', since that many come at a time")
        self.capacity: int = capacity
        self.state_dim: int = state_dim
        self.action_dim: int = action_dim
        self.hidden_dim: int = hidden_dim
        self.num_envs: int = num_envs
        self.gamma: float = gamma
        self.gae_lambda: float = gae_lambda
        self.device: Device | None = device
        fields: dict[str, Spec] = {"obs": (state_dim,), "action": (action_dim,), "reward": (), "ended": ()}
        fields |= {"terminated": FLAG, "truncated": FLAG, "value": (), "log_prob": (), "hidden": (hidden_dim,)}
        self.rollout: Rollout = Rollout(
            Schema(fields), capacity // num_envs, num_envs, device=device or "cpu", seed=seed or 0
        )
        self._seed = seed

    @property
    def size(self) -> int:
        """The number of steps stored, over all environments."""
        return self.rollout.steps * self.num_envs

    def __len__(self) -> int:
        """The number of steps stored, over all environments."""
        return self.size

    def add(
        self,
        states: Values,
        actions: Values,
        rewards: Values,
        dones: Values,
        hiddens: Values,
        log_probs: Values,
        values: Values,
        *,
        truncated: Values | None = None,
        final_values: Values | None = None,
    ) -> None:
        """Store one step of each environment.

        Args:
            states: ``[N, state_dim]``.
            actions: ``[N, action_dim]``.
            rewards: ``[N]`` or ``[N, 1]``, like all others below except ``hiddens``.
            dones: whether the step ended its episode.
            hiddens: ``[N, hidden_dim]``, the network's input state at ``states``.
            log_probs: of these actions.
            values: V(states).
            truncated: which of the done steps were cut off rather than terminal; by default none.
            final_values: V(final observation), read where ``truncated``.

        Raises:
            BufferError: the buffer is full.
            StepShapeError: a shape does not fit. Nothing is stored.
        """
        if self.rollout.is_full:
            raise BufferError("Buffer full! Use the 'empty()' method first.")
        numbers = {"reward": rewards, "ended": dones, "log_prob": log_probs, "value": values}
        step = {name: self._rows(name, value) for name, value in numbers.items()}
        step["obs"] = self._rows("obs", states, self.state_dim)
        step["action"] = self._rows("action", actions, self.action_dim)
        step["hidden"] = self._rows("hidden", hiddens, self.hidden_dim)
        done = step["ended"] != 0
        cut = done & (False if truncated is None else self._rows("truncated", truncated) != 0)
        if final_values is not None:
            step["final_value"] = self._rows("final_values", final_values)
        self.rollout.add(step, terminated=done & ~cut, truncated=cut)

    def finish(self, last_values: Values) -> None:
        """Compute advantages and returns by GAE.

        Args:
            last_values: ``[N]`` or ``[N, 1]``, V of the states after the newest step.

        Raises:
            BufferError: the buffer is not full.
            FieldError: a truncated step has no final value.
        """
        self._require_full()
        estimator = GAE(gamma=self.gamma, lam=self.gae_lambda)
        self.rollout.finish(estimator, last_value=self._rows("last_values", last_values))

    def sample(self, batch_size: int) -> Iterator[RolloutBatch]:
        """All steps in a new random order, ``batch_size`` at a time. The last batch may be smaller.

        Raises:
            BufferError: at this call, if the buffer is not full or :meth:`finish` was not called.
        """
        self._require_full()
        if "advantage" not in self.rollout:
            raise BufferError("Advantages are missing! Use the 'finish()' method first.")
        renew(self.rollout, self._seed)
        fields = tuple(column.name for column in ROLLOUT_FIELDS.values())
        return map(self._batch, self.rollout.minibatches(batch_size, fields=fields))

    def empty(self) -> None:
        """Forget all steps."""
        self.rollout.clear()

    def _require_full(self) -> None:
        if not self.size:
            raise BufferError("Buffer is empty!")
        if not self.rollout.is_full:
            raise BufferError(f"Buffer is not full! {self.size} of {self.capacity} steps are stored.")

    def _rows(self, name: str, value: Values, size: int | None = None) -> Array | Tensor:
        device = self.rollout.device
        return rows(name, value, self.num_envs, size, None if device.type == "cpu" else device)[:, 0]

    def _batch(self, batch: Batch) -> RolloutBatch:
        return RolloutBatch(**{name: x.shown(batch[x.name]) for name, x in ROLLOUT_FIELDS.items()})


def row(name: str, value: Any, size: int, device: torch.device | None) -> Array | Tensor:
    """One step's value as float32 ``[1, size]``. A single number is repeated.

    Raises:
        StepShapeError: it has another number of elements.
    """
    given = value
    if value.__class__ is not Tensor or value.dtype is not torch.float32 or not value.is_cpu or device is not None:
        given = placed(name, value, device)
    shape = given.shape
    if shape == (1, size):
        return given
    if shape == (size,):
        return given[None]
    count = prod(shape)
    if count == size:
        return given.reshape(1, size)
    if count != 1:
        raise StepShapeError(f"'{name}': expected {size} numbers, got {tuple(shape)}")
    return to_tensor(given).reshape(1, 1).expand(1, size)


def rows(name: str, value: Values, count: int, size: int | None, device: torch.device | None) -> Array | Tensor:
    """Several steps' values as float32 ``[count, 1, size]``; numbers, of size None, as ``[count, 1]``.

    Raises:
        StepShapeError: another shape than ``[count, size]``; numbers, and values of size 1, may be ``[count]``.
    """
    given = placed(name, value, device)
    shape, width = given.shape, 1 if size is None else size
    if shape != (count, width) and (shape != (count,) or width != 1):
        raise StepShapeError(f"'{name}': expected {(count, width)} (rows first), got {tuple(shape)}")
    return given.reshape((count, 1) if size is None else (count, 1, size))


def generated(agent: Agent, count: int, num_envs: int, envs: Any) -> Iterator[list[Tensor]]:
    """``count`` transitions in blocks: states, actions, rewards, next states, terminals, and the actor's states.

    The environments reset in a separate step (``NEXT_STEP``) and ignore its action. That step is left out, so the next
    state of a step is always the one that it led to.
    """
    playing = _copies(agent.env, num_envs) if envs is None else envs
    first, _ = playing.reset(seed=getattr(agent, "seed", None))
    states, hidden = sent(array_of("states", first), agent.device), None
    ended = torch.zeros(len(states), dtype=torch.bool, device=states.device)
    try:
        while count > 0:
            actions, hidden = agent.predict(states, hidden, train_mode=True)
            outcome = playing.step(actions.cpu().numpy())[:4]
            following, rewards, terminated, truncated = (sent(array_of("outcome", x), agent.device) for x in outcome)
            real = (~ended).nonzero().squeeze(1)[:count]
            if len(real):
                columns = states, actions, rewards, following, terminated, hidden
                yield [column[real] for column in columns]
            count -= len(real)
            hidden = torch.where(ended.unsqueeze(1), 0.0, hidden)  # an episode begins with the initial recurrent state
            states, ended = following, ((terminated + truncated) > 0) & ~ended
    finally:
        if envs is None:
            playing.close()


def _copies(env: Any, num_envs: int) -> Any:
    """Parallel copies of an environment, with its arguments and wrappers."""
    import gymnasium
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    make = partial(gymnasium.make, env.spec)
    return SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)


def checked(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata, checked.

    Raises:
        FileFormatError: an entry is missing, of the wrong type, or contradicts another.
    """
    for name in SIZES:
        value = metadata.get(name)
        if type(value) is not int or value < 0:
            raise FileFormatError(f"metadata '{name}': expected a whole number of at least 0, got {shown(value)}")
    capacity, size, position = (metadata[name] for name in ("capacity", "size", "position"))
    if size > capacity or not (position == size if size < capacity else position < max(capacity, 1)):
        raise FileFormatError(
            f"metadata: size={size} and position={position} contradict capacity={capacity}; use another copy"
        )
    if not isinstance(metadata.get("device"), str | None):
        raise FileFormatError(f"metadata 'device': expected a string or null, got {shown(metadata['device'])}")
    return {name: metadata[name] for name in SIZES} | {"device": metadata.get("device")}


def write_files(
    path: str | os.PathLike[str], prefix: str, metadata: Mapping[str, object], state: Mapping[str, Tensor]
) -> None:
    """Write both files under temporary names, then rename them. Tensors may have any strides and device.

    Saves into one directory take turns. The checksum of the tensors is in the header, which Velora ignores.
    """
    folder = disk.usable(path)
    tensors = dict(sorted(state.items()))  # the order of safetensors for tensors of one dtype
    specs = format.plan(tensors, "")
    header, size = format.header(specs, {CHECKSUM: "0" * 8}), sum(spec.nbytes for spec in specs.values())
    crc = 0

    def content() -> Iterator[memoryview]:
        nonlocal crc
        yield memoryview(header)
        for piece in itertools.chain.from_iterable(map(pieces, tensors.values())):
            crc = zlib.crc32(piece, crc)
            yield piece

    def checksum() -> tuple[int, bytes]:
        return header.index(b"0" * 8), f"{crc:08x}".encode()

    text = json.dumps(dict(metadata), indent=2).encode()
    names = f"{prefix}state{ENDING}", f"{prefix}metadata.json"
    with save.locked_directory(folder):
        beside = [folder / f".{name}.beside" for name in names]
        try:
            for file in beside:
                file.unlink(missing_ok=True)  # left behind by a process that was killed
            disk.write_file(beside[0], content(), len(header) + size, last=checksum)
            disk.write_file(beside[1], [memoryview(text)], len(text))
            for file, name in zip(beside, names, strict=True):
                file.replace(folder / name)
        finally:
            for file in beside:
                file.unlink(missing_ok=True)


def read_files(path: str | os.PathLike[str], metadata: Mapping[str, Any], names: Iterable[str]) -> dict[str, Tensor]:
    """The first ``size`` rows of each tensor.

    Raises:
        NoSaveError: no such file.
        FileFormatError: the file is damaged, or its tensors differ from the metadata.
    """
    file = _found(Path(path))
    found: dict[str, Tensor] = {}
    reader: Any = safetensors
    try:
        # safetensors reads slices onto torch's default device
        with torch.device("cpu"), reader.safe_open(file, framework="pt") as content:
            known = set(content.keys())
            for name in names:
                if name not in known:
                    raise FileFormatError(f"'{file}' has no tensor '{name}'; give the file of a Velora buffer")
                part: Any = content.get_slice(name)
                expected = [metadata["capacity"], metadata[WIDTHS[name]] if name in WIDTHS else 1]
                if part.get_shape() != expected or part.get_dtype() != "F32":
                    got = f"{part.get_dtype()} {part.get_shape()}"
                    raise FileFormatError(f"'{file}', tensor '{name}': expected F32 {expected}, got {got}")
                found[name] = part[: metadata["size"]].to(torch.float32)
            _require_checksum(content, sorted(known), file)  # it is that of all tensors, whichever are asked for
    except safetensors.SafetensorError as error:
        raise FileFormatError(f"'{file}' is damaged, or is not a safetensors file: {error}") from error
    return found


def _require_checksum(content: Any, names: Iterable[str], file: Path) -> None:
    """Refuse tensors that changed since they were saved. Files of Velora have no checksum and pass.

    Raises:
        FileFormatError: the checksum differs.
    """
    notes: dict[str, str] = content.metadata() or {}
    if CHECKSUM not in notes:
        return
    crc = 0
    for piece in itertools.chain.from_iterable(pieces(content.get_tensor(name)) for name in names):
        crc = zlib.crc32(piece, crc)
    if f"{crc:08x}" != notes[CHECKSUM]:
        raise FileFormatError(
            f"'{file}' is damaged: expected the checksum {notes[CHECKSUM]:.8}, got {crc:08x}; use another copy"
        )


def _found(path: Path) -> Path:
    """The file at ``path``, or with the ending added, or with the last suffix replaced, as Velora does."""
    for file in (path, path.with_name(path.name + ENDING), path.with_suffix(ENDING)):
        if file.name.endswith(ENDING) and file.is_file():
            return file
    raise NoSaveError(f"no file '{path}', with or without '{ENDING}'; give the one that save() wrote")
