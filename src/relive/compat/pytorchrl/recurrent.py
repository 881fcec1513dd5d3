"""Overlapping sequences of all envs, for recurrent actors: each is one item of a replay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np

from ...replay import ReplayBuffer
from ...samplers import Sampler
from ...schema import Field, Schema
from ...views import NStep
from ..continuity import Continuity
from ..trees import mapped, mapped_with
from .keys import DONE2, NAMES, REW, STATES
from .memory import Memory
from .steps import Steps, as_stored, integers_of, plain, schema_of, step_of, stored_keys

__all__ = ["Sequences"]

Data = dict[str, Any]
OF_STEPS = {REW: "rewards", DONE2: "dones"}
"""A sequence is a transition by itself, to relive: what its steps hold has other names than what it needs."""


class Sequences:
    """A replay of sequences of L steps, made as they come in, n-step rewards included.

    The newest steps wait in a small replay of their own, L + n - 1 per env, where every L - overlap steps the oldest L
    are the next sequence.

    Args:
        sample: a transition.
        max_size: steps per env, of whole sequences.
        known: the keys that are stored if a transition has them.
        sampler: of the replay.
        view: n and γ of the rewards.
        seed: of the replay.
        length: L.
        overlap: steps that successive sequences share.
    """

    def __init__(
        self,
        sample: Mapping[str, Any],
        max_size: int,
        known: tuple[str, ...],
        sampler: Sampler,
        view: NStep,
        seed: int | None,
        length: int,
        overlap: int,
    ) -> None:
        self.keys, self.num_envs = stored_keys(sample, known), len(sample[DONE2])
        self.shapes = {key: mapped(lambda value: tuple(value.shape[1:]), sample[key]) for key in self.keys}
        self._length, self._stride, self._waits = length, length - overlap, length + view.n - 1
        self._states = tuple(key for key in STATES if key in known and sample.get(key) is not None)
        self._hidden = {key: mapped(lambda value: tuple(value.shape[1:]), sample[key]) for key in self._states}
        flat = schema_of(sample, self.keys)
        self._steps, self._integers = Steps(sample, (*self.keys, *self._states), {}), integers_of(flat)
        states = {key: mapped(Field, shapes) for key, shapes in self._hidden.items()}
        self._newest = ReplayBuffer(
            flat.extend(**states), max(self._waits, 2) * self.num_envs, self.num_envs, own_next_obs=True,
            check_ends=False, view=view, seed=0,
        )  # fmt: skip
        self._continuity, self._seen = Continuity(), 0
        fields = {self._name(key): mapped(self._longer, flat[NAMES[key]]) for key in self.keys if NAMES[key] in flat}
        flags: dict[str, Any] = {name: flat[name] for name in ("reward", "terminated", "truncated")}
        self._schema, self._seed = Schema({**fields, **states, **flags}), seed
        self.replay = self._build(max_size, sampler)
        self._memory = Memory(self.replay, self._names)

    def _build(self, max_size: int, sampler: Sampler) -> ReplayBuffer:
        rows = max_size // self._length * self.num_envs
        return ReplayBuffer(self._schema, rows, self.num_envs, ordered=False, sampler=sampler, seed=self._seed)

    @property
    def view(self) -> NStep:
        """n and γ of the rewards."""
        return cast("NStep", self._newest.view)

    @staticmethod
    def _name(key: str) -> str:
        return OF_STEPS.get(key, NAMES[key])

    def _longer(self, field: Field) -> Field:
        return Field((self._length, *field.shape), field.dtype)

    @property
    def _names(self) -> dict[str, str]:
        return {key: self._name(key) for key in self.keys} | {key: key for key in self._states}

    @property
    def added(self) -> int:
        """Steps per env since the last :meth:`clear`, of whole sequences."""
        return self._memory.added * self._length

    @property
    def size(self) -> int:
        """Steps per env, of whole sequences; those that two sequences share count twice."""
        return len(self.replay) // self.num_envs * self._length

    def insert(self, sample: Mapping[str, Any]) -> None:
        """One step of every env."""
        step = self._steps(sample)
        self._continuity.follow(self._newest, step["obs"])
        self._newest.add(step)
        self._continuity.note(mapped(np.copy, step["next_obs"]), step["terminated"].copy())
        self._seen += 1
        if self._seen >= self._waits and (self._seen - self._waits) % self._stride == 0:
            self._store_oldest()

    def _store_oldest(self) -> None:
        length, envs = self._length, self.num_envs
        steps = dict(self._newest.data().items())  # time first, as they were completed

        def oldest(_: Any, values: list[Any]) -> Any:
            rows = plain(values[0])
            return rows[: length * envs].reshape(length, envs, *rows.shape[1:])

        fields = {key: mapped_with(oldest, self.shapes[key], [steps[NAMES[key]]]) for key in self.keys}
        fields = {self._name(key): mapped(lambda value: value.swapaxes(0, 1), value) for key, value in fields.items()}
        states = {key: mapped_with(oldest, self._hidden[key], [steps[key]]) for key in self._states}
        self._append({**fields, **{key: mapped(lambda v: v[0], value) for key, value in states.items()}}, (envs,))

    def _append(self, fields: Data, shape: tuple[int, ...]) -> None:
        """Sequences ``[N, ...]``, or ``[K, N, ...]``; the replay's own fields of a transition mean nothing."""
        none = np.zeros(shape, np.bool_)
        step = {**fields, "reward": np.zeros(shape, np.float32), "terminated": none, "truncated": none}
        step = {name: mapped(_contiguous, value) for name, value in step.items()}
        self.replay.add(step) if len(shape) == 1 else self.replay.extend(step)
        self._memory.added += 1 if len(shape) == 1 else shape[0]

    def extend(self, data: Mapping[str, Any]) -> None:
        """Whole sequences one after the other, ``[K L, N, ...]``, with the states before each one's first step.

        Raises:
            AssertionError: not a whole number of sequences.
        """
        steps, length = as_stored(step_of(data, self.keys, axes=2), self._integers), self._length
        count = len(steps["terminated"])
        assert count % length == 0, f"expected whole sequences of {length} steps, got {count} steps"

        def cut(value: Any) -> Any:
            return value.reshape(count // length, length, *value.shape[1:]).swapaxes(1, 2)

        fields = {self._name(key): mapped(cut, steps[NAMES[key]]) for key in self.keys}
        states = {key: mapped(lambda v: plain(v)[::length].astype(np.float32), data[key]) for key in self._states}
        self._append({**fields, **states}, (count // length, self.num_envs))

    def clear(self) -> None:
        """Forget the sequences; the one that has begun goes on."""
        self.replay.clear()
        self._memory.forget()

    def resize(self, max_size: int, sampler: Sampler) -> None:
        """Make room for another number of steps, and keep the newest sequences."""
        old, self.replay = self.replay, self._build(max_size, sampler)
        self.replay.append(old)
        self._memory = Memory(self.replay, self._names, self.size // self._length)

    def read(self, start: int, end: int, by_position: bool, keys: Iterable[str] | None = None) -> Data:
        """``keys`` (default: all) of steps, float32 ``[T, N, ...]``: by position in memory, or from the oldest on.

        States are zeros but for those before a sequence's first step.
        """
        size, length = self.size, self._length
        low, high = start // length, max(-(-min(end, size) // length), start // length)
        first = low if by_position else low + (self.added - size) // length
        part = slice(start - low * length, max(min(end, size), start) - low * length)

        def steps(shape: tuple[int, ...], rows: list[Any]) -> Any:
            return rows[0].swapaxes(1, 2).reshape(-1, self.num_envs, *shape)[part]

        def firsts(shape: tuple[int, ...], rows: list[Any]) -> Any:
            out = np.zeros(((high - low) * length, self.num_envs, *shape), np.float32)
            out[::length] = rows[0]
            return out[part]

        found: Data = {}
        for key in [*self.keys, *self._states] if keys is None else keys:
            if key in self._names:
                rows, of_states = self._memory.read(key, first, high - low), key in self._states
                shapes = self._hidden[key] if of_states else self.shapes[key]
                found[key] = mapped_with(firsts if of_states else steps, shapes, [rows])
        return found

    def batches(self, count: int, batch_size: int) -> Iterator[tuple[Data, Any]]:
        """Batches ``[S L, ...]`` of sequences by key, states ``[S, ...]``, float32, and as the replay has them."""
        for batch in self.replay.batches(count, -(-batch_size // self._length)):
            found = {key: _each([batch[self._name(key)]], self.shapes[key], _joined) for key in self.keys}
            yield found | {key: _members(batch[key], self._hidden[key]) for key in self._states}, batch


def _joined(values: list[Any], shape: tuple[int, ...]) -> Any:
    """Sequences ``[S, L, ...]`` one after the other."""
    return values[0].reshape(-1, *shape).float()


def _contiguous(value: Any) -> Any:
    return np.ascontiguousarray(plain(value))


def _members(value: Any, shapes: Any) -> Any:
    """The tensor of a field, or the dictionary of a nested one."""
    return mapped_with(lambda _, members: members[0], shapes, [value])


def _each(values: list[Any], shapes: Any, function: Any) -> Any:
    """``function(values, shape)``, or that of each member."""
    return mapped_with(lambda shape, members: function(members, shape), shapes, values)
