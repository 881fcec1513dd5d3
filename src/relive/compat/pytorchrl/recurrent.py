"""Storage of overlapping sequences, for recurrent actors. Each sequence is one item of a replay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import LifecycleError, ParameterError
from ...replay.buffer import ReplayBuffer
from ...samplers.contract import Sampler
from ...steps.arrays import as_host
from ...steps.schema import Field, Schema
from ...views.transitions import NStep
from ..trees import mapped
from .keys import DONE, DONE2, NAMES, OBS2, REW, RHS2, STATES
from .memory import Memory
from .steps import Steps, as_stored, integers_of, schema_of, step_of, stored_keys

__all__ = ["Sequences"]

Data = dict[str, Any]
AFTER = (OBS2, RHS2, DONE2)
"""Keys read from a window's last step. All others are read from its first step."""
OF_STEPS = {REW: "rewards", DONE2: "dones"}
"""Fields of a sequence's steps. relive stores a sequence as one transition, whose own reward has the usual name."""


class Sequences:
    """A replay of sequences of L steps with n-step rewards, built while steps are added.

    A small replay holds the newest L + n - 1 steps of each env. Every L - overlap steps, its oldest L steps become a
    sequence. Row t of a sequence has the sum of up to n rewards from step t on, within the episode. Its next
    observation, next states and next flag are those of step t + n - 1, even if an episode ended in between: a recurrent
    network reads the rows in order and must not miss a step. Where an episode ends before that step, ``n_step`` is
    infinite, so γ^n is 0 and no target mixes two episodes.

    Only the flags mark the ends of episodes, as in PyTorchRL's networks.

    Args:
        sample: a transition.
        max_size: steps per env, in whole sequences.
        known: keys that are stored if a transition has them.
        sampler: of the replay.
        view: holds n and γ.
        seed: of the replay.
        length: L.
        overlap: steps that successive sequences share.

    Raises:
        ParameterError: n is above L, or above 1 for transitions without ``Done``.
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
        if not 1 <= view.n <= length or (view.n > 1 and DONE not in self.keys):
            raise ParameterError(
                f"n_step={view.n}: expected at most the {length} steps of a sequence, and transitions with {DONE!r}; "
                "choose a larger update_every, or a smaller n_step"
            )
        self.shapes = {key: mapped(lambda value: tuple(value.shape[1:]), sample[key]) for key in self.keys}
        self._length, self._stride, self._waits = length, length - overlap, length + view.n - 1
        self._states = tuple(key for key in STATES if key in known and sample.get(key) is not None)
        self._hidden = {key: mapped(lambda value: tuple(value.shape[1:]), sample[key]) for key in self._states}
        flat = schema_of(sample, self.keys)
        self._integers = integers_of(flat)
        self._steps = Steps(sample, (*self.keys, *self._states), self._integers, {})
        states = {key: mapped(Field, shapes) for key, shapes in self._hidden.items()}
        self._newest = ReplayBuffer(
            flat.extend(**states), max(self._waits, 2) * self.num_envs, self.num_envs, own_next_obs=True,
            check_ends=False, seed=0,
        )  # fmt: skip
        self.view, self._single = view, NStep(1)
        self._seen = 0
        fields = {self._name(key): mapped(self._longer, flat[NAMES[key]]) for key in self.keys if NAMES[key] in flat}
        flags: dict[str, Any] = {name: flat[name] for name in ("reward", "terminated", "truncated")}
        used: dict[str, Any] = {"n_step": Field((length,))} if view.n > 1 else {}
        self._schema, self._seed = Schema({**fields, **states, **flags, **used}), seed
        self.replay = self._build(max_size, sampler)
        self._memory = Memory(self.replay, self._names)

    def _build(self, max_size: int, sampler: Sampler) -> ReplayBuffer:
        rows = max_size // self._length * self.num_envs
        return ReplayBuffer(self._schema, rows, self.num_envs, ordered=False, sampler=sampler, seed=self._seed)

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
        """Steps per env since the last :meth:`clear`, in whole sequences."""
        return self._memory.added * self._length

    @property
    def size(self) -> int:
        """Steps per env, in whole sequences. Steps that two sequences share count twice."""
        return len(self.replay) // self.num_envs * self._length

    def insert(self, sample: Mapping[str, Any]) -> None:
        """Add one step of every env."""
        self._newest.add(self._steps(sample))
        self._seen += 1
        if self._seen >= self._waits and (self._seen - self._waits) % self._stride == 0:
            self._store_oldest()

    def _store_oldest(self) -> None:
        length, envs, n = self._length, self.num_envs, self.view.n
        steps = self._waiting(self._single)
        rewards = steps if n == 1 else self._waiting(self.view)

        def part(key: str, shapes: Any) -> Any:
            first, source = n - 1 if key in AFTER else 0, rewards if key == REW else steps

            def cut(_: Any, values: Any) -> Any:
                rows = as_host(values)[-self._waits * envs :]
                return rows.reshape(self._waits, envs, *rows.shape[1:])[first : first + length]

            return mapped(cut, shapes, source[NAMES.get(key, key)])

        fields = {self._name(key): mapped(_by_env, part(key, self.shapes[key])) for key in self.keys}
        states = {key: mapped(lambda value: value[0], part(key, self._hidden[key])) for key in self._states}
        self._append({**fields, **states}, (envs,))

    def _waiting(self, view: NStep) -> Data:
        """The waiting steps, read through a view, in the order of time: ``[W N, ...]``."""
        self._newest.view = view
        return dict(self._newest.data().items())

    def _append(self, fields: Data, shape: tuple[int, ...]) -> None:
        """Store sequences ``[N, ...]`` or ``[K, N, ...]``. The replay's own reward and flags are unused."""
        none = np.zeros(shape, np.bool_)
        step = {**fields, "reward": np.zeros(shape, np.float32), "terminated": none, "truncated": none}
        if self.view.n > 1:
            step["n_step"] = self._steps_used(fields[self._name(DONE)], fields[self._name(DONE2)])
        step = {name: mapped(_contiguous, value) for name, value in step.items()}
        self.replay.add(step) if len(shape) == 1 else self.replay.extend(step)
        self._memory.added += 1 if len(shape) == 1 else shape[0]

    def extend(self, data: Mapping[str, Any]) -> None:
        """Store whole sequences, ``[K L, N, ...]`` end to end, with the states before each sequence's first step.

        Raises:
            AssertionError: the steps are not a whole number of sequences.
        """
        steps, length = as_stored(step_of(data, self.keys, axes=2), self._integers), self._length
        count = len(steps["terminated"])
        assert count % length == 0, f"expected whole sequences of {length} steps, got {count} steps"

        def cut(value: Any) -> Any:
            return value.reshape(count // length, length, *value.shape[1:]).swapaxes(1, 2)

        fields = {self._name(key): mapped(cut, steps[NAMES[key]]) for key in self.keys}
        states = {key: mapped(lambda v: as_host(v)[::length].astype(np.float32), data[key]) for key in self._states}
        self._append({**fields, **states}, (count // length, self.num_envs))

    def clear(self) -> None:
        """Forget the stored sequences. The unfinished one is kept."""
        self.replay.clear()
        self._memory.forget()

    def resize(self, max_size: int, sampler: Sampler) -> None:
        """Change the number of steps that fit, and keep the newest sequences."""
        old, self.replay = self.replay, self._build(max_size, sampler)
        self.replay.append(old)
        kept = len(self.replay) // self.num_envs
        self._memory = Memory(self.replay, self._names, kept, before=len(old) // self.num_envs - kept)

    def read_windows(self, n: int) -> None:
        """Refuse to change n, because sums of n rewards are stored.

        Raises:
            LifecycleError: ``n`` differs.
        """
        if n != self.view.n:
            raise LifecycleError(
                f"n_step: sequences with windows of {self.view.n} rewards are stored; create a buffer with n_step={n!r}"
            )

    def read(self, start: int, end: int, by_position: bool, keys: Iterable[str] | None = None) -> Data:
        """``keys`` (default: all) of steps, float32 ``[T, N, ...]``, by position in memory or counted from the oldest.

        States are zero except before a sequence's first step.
        """
        size, length = self.size, self._length
        low, high = start // length, max(-(-min(end, size) // length), start // length)
        first = low if by_position else low + (self.added - size) // length
        part = slice(start - low * length, max(min(end, size), start) - low * length)

        def steps(shape: tuple[int, ...], rows: Any) -> Any:
            return rows.swapaxes(1, 2).reshape(-1, self.num_envs, *shape)[part]

        def firsts(shape: tuple[int, ...], rows: Any) -> Any:
            out = np.zeros(((high - low) * length, self.num_envs, *shape), np.float32)
            out[::length] = rows
            return out[part]

        found: Data = {}
        for key in [*self.keys, *self._states] if keys is None else keys:
            if key in self._names:
                rows, of_states = self._memory.read(key, first, high - low), key in self._states
                shapes = self._hidden[key] if of_states else self.shapes[key]
                found[key] = mapped(firsts if of_states else steps, shapes, rows)
        return found

    def batches(self, count: int, batch_size: int) -> Iterator[tuple[Data, Any]]:
        """Batches of sequences by key, float32 ``[S L, ...]``, states ``[S, ...]``; and the replay's own batches."""
        for batch in self.replay.batches(count, -(-batch_size // self._length)):
            found = {key: mapped(_joined, self.shapes[key], batch[self._name(key)]) for key in self.keys}
            if self.view.n > 1 and self.view.gamma == 1.0:  # no power of 1 is 0, so the flag must end the target
                found[DONE2] = torch.maximum(found[DONE2], self.steps_used(batch).isinf().float())
            yield found | {key: mapped(_member, self._hidden[key], batch[key]) for key in self._states}, batch

    def steps_used(self, batch: Any) -> Tensor:
        """n of each window of a batch, float32 ``[S L, 1]``; infinite where its episode ended before."""
        return batch["n_step"].reshape(-1, 1)

    def _steps_used(self, starts: Any, ends: Any) -> Any:
        """The same for sequences ``[..., L]``, from the flags before and after their steps."""
        n, length = self.view.n, self._length
        # the flags before steps 0 .. L + n - 2; `ends` holds the flags after steps n - 1 .. L + n - 2
        flags = np.concatenate([starts.reshape(ends.shape) != 0, ends[..., length - n : length - 1]], -1).cumsum(-1)
        return np.where(flags[..., n - 1 :] > flags[..., :length], np.inf, n).astype(np.float32)


def _joined(shape: tuple[int, ...], values: Any) -> Any:
    """Sequences ``[S, L, ...]`` end to end, ``[S L, ...]``."""
    return values.reshape(-1, *shape).float()


def _by_env(value: Any) -> Any:
    return value.swapaxes(0, 1)


def _contiguous(value: Any) -> Any:
    return np.ascontiguousarray(as_host(value))


def _member(shape: tuple[int, ...], value: Tensor) -> Tensor:
    """The tensor itself. Mapped over shapes, this turns a TensorDict into a dictionary."""
    return value
