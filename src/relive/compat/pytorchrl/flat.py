"""Single steps of all envs, for feed-forward actors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ...replay import ReplayBuffer
from ...samplers import Sampler
from ...schema import Field, Schema
from ...views import NStep
from ..continuity import Continuity
from ..trees import mapped
from .keys import DONE2, NAMES, OBS2, STATES
from .steps import NUMBERS, Steps, as_stored, integers_of, plain, schema_of, step_of, stored_keys

__all__ = ["Flat"]

Data = dict[str, Any]


class Flat:
    """A replay of steps ``[N, ...]`` by PyTorchRL's keys; recurrent states are one row of zeros, as there.

    Args:
        sample: a transition.
        max_size: steps per env.
        known: the keys that are stored if a transition has them.
        sampler: of the replay.
        view: of the replay.
        seed: of the replay.
        copies: whether copies of steps are going to be added; ``size`` and :meth:`read` know of the steps alone.
    """

    def __init__(
        self,
        sample: Mapping[str, Any],
        max_size: int,
        known: tuple[str, ...],
        sampler: Sampler,
        view: NStep,
        seed: int | None,
        copies: bool = False,
    ) -> None:
        self.keys, self.num_envs, self.added = stored_keys(sample, known), len(sample[DONE2]), 0
        self.shapes = {key: mapped(lambda value: tuple(value.shape[1:]), sample[key]) for key in self.keys}
        """Of each key, without the env axis; of members of a dictionary, in one."""
        self.members = {key: list(sample[key]) if isinstance(sample[key], Mapping) else None for key in self.keys}
        self.states = {
            key: mapped(lambda value: np.zeros((1, *value.shape), np.float32), sample[key])
            for key in STATES
            if key in known and sample.get(key) is not None
        }
        self._continuity = Continuity()
        self._steps = Steps(sample, self.keys, {"copied": np.zeros(self.num_envs, np.bool_)} if copies else {})
        schema = schema_of(sample, self.keys)
        self._integers = integers_of(schema)
        self._columns = [
            (key, NAMES[key], self.members[key], key in NUMBERS and self.shapes[key] == (1,), not _floats(schema, key))
            for key in self.keys
        ]
        self.replay = ReplayBuffer(
            schema.extend(copied=Field((), torch.bool)) if copies else schema, max_size * self.num_envs, self.num_envs,
            own_next_obs=True, sampler=sampler, view=view, seed=seed,
        )  # fmt: skip
        self.copies = copies

    @property
    def view(self) -> NStep:
        """Of the replay."""
        return cast("NStep", self.replay.view)

    @property
    def size(self) -> int:
        """Steps per env."""
        if self.copies:
            return min(len(self._slice(env)) for env in range(self.num_envs))
        return len(self.replay) // self.num_envs

    def _slice(self, env: int, low: int = 0, high: int | None = None) -> Any:
        """Steps of an env in the order of time; with copies among them, counted from the newest that all envs have."""
        if not self.copies:
            return self.replay.slice(env, low, high)
        rows = self.replay.slice(env)
        return rows[~rows["copied"]]

    def insert(self, sample: Mapping[str, Any]) -> None:
        """One step of every env."""
        step = self._steps(sample)
        if self.view.n == 1:  # nothing is read but what a step itself holds
            self.replay.add(step)
        else:
            self._continuity.follow(self.replay, step["obs"])
            self.replay.add(step)
            self._continuity.note(mapped(np.copy, step["next_obs"]), step["terminated"].copy())
        self.added += 1

    def extend(self, data: Mapping[str, Any]) -> None:
        """Steps ``[T, N, ...]``, which may go on from what is stored or not."""
        steps = as_stored(step_of(data, self.keys, axes=2), self._integers)
        if self.copies:
            steps["copied"] = np.zeros_like(steps["terminated"])
        self._continuity.follow(self.replay, mapped(lambda value: value[0], steps["obs"]))
        self.replay.extend(steps)
        self._continuity.note(mapped(lambda value: value[-1].copy(), steps["next_obs"]), steps["terminated"][-1])
        self.added += len(steps["terminated"])

    def clear(self) -> None:
        """Forget the steps."""
        self.replay.clear()
        self.added = 0

    def resize(self, max_size: int, sampler: Sampler) -> None:
        """Make room for another number of steps, and keep the newest."""
        old = self.replay
        self.replay = ReplayBuffer(
            old.schema, max_size * self.num_envs, self.num_envs, own_next_obs=True, sampler=sampler, view=old.view,
            seed=old.seed,
        )  # fmt: skip
        self.replay.append(old)

    def read(self, start: int, end: int, cursor: int | None) -> Data:
        """Steps as float32 ``[T, N, ...]``: of positions in memory, of which ``cursor`` is the next; or in time."""
        size = self.size
        wrapped = cursor is not None and self.added > size and not self.copies
        index = (np.arange(start, min(end, size)) - (cursor or 0) * wrapped) % max(size, 1)
        low, high = (int(index.min()), int(index.max()) + 1) if len(index) else (0, 0)
        envs = [self._slice(env, low, high) for env in range(self.num_envs)]
        envs = [env[len(env) - size :][low:high] for env in envs] if self.copies else envs

        def column(key: str, member: str | None = None) -> Any:
            columns = [env[NAMES[key]] if member is None else env[NAMES[key]][member] for env in envs]
            shape = self.shapes[key] if member is None else self.shapes[key][member]
            rows = np.stack([plain(column)[index - low] for column in columns], 1).astype(np.float32)
            return rows.reshape(*rows.shape[:2], *shape)

        found = {key: self._each(key, column) for key in self.keys}
        return found | {key: mapped(lambda value: value[start:end].copy(), s) for key, s in self.states.items()}

    def _each(self, key: str, function: Any) -> Any:
        """``function(key)``, or ``function(key, member)`` of each member of a dictionary."""
        members = self.members[key]
        return function(key) if members is None else {member: function(key, member) for member in members}

    def batches(self, count: int, batch_size: int) -> Iterator[tuple[Data, Any]]:
        """Batches ``[B, ...]`` by key, float32, and as the replay has them."""
        for drawn in self.replay.batches(count, batch_size):
            batch: Data = dict(drawn.items())
            found: Data = {}
            for key, name, members, single, others in self._columns:
                value = batch[name]
                if members is not None:
                    value = {member: value[member] for member in members}
                if others:
                    value = mapped(Tensor.float, value)
                found[key] = value.unsqueeze(1) if single else value
            yield found | {key: mapped(_first, states) for key, states in self.states.items()}, batch


def _floats(schema: Schema, key: str) -> bool:
    """Whether a key is stored as float32."""
    fields = schema["obs" if key == OBS2 else NAMES[key]]
    return all(field.dtype is torch.float32 for field in (fields.values() if isinstance(fields, Mapping) else [fields]))


def _first(states: Any) -> Tensor:
    return torch.from_numpy(states[0, :1].copy())
