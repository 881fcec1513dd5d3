"""Storage of single steps, for feed-forward actors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...replay.buffer import ReplayBuffer
from ...samplers.contract import Sampler
from ...steps.arrays import as_host
from ...steps.schema import Field, Schema
from ...views.transitions import NStep
from ..continuity import Continuity, breaks
from ..trees import mapped
from .keys import DONE2, NAMES, OBS2, STATES
from .memory import Memory
from .steps import (
    NUMBERS,
    Steps,
    arrays_of,
    as_stored,
    dtypes_of,
    integers_of,
    schema_of,
    step_of,
    stored_keys,
)

__all__ = ["Flat"]

Data = dict[str, Any]


class Flat:
    """A replay of steps ``[N, ...]`` by PyTorchRL's keys. Recurrent states are one row of zeros, as in PyTorchRL.

    Args:
        sample: a transition.
        max_size: steps per env.
        known: keys that are stored if a transition has them.
        sampler: of the replay.
        view: of the replay.
        seed: of the replay.
        copies: whether relabelled copies of steps will be added. ``size`` and :meth:`read` ignore these.
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
        self.keys, self.num_envs = stored_keys(sample, known), len(sample[DONE2])
        self.shapes = {key: mapped(lambda value: tuple(value.shape[1:]), sample[key]) for key in self.keys}
        """Key -> the shape without the env axis, or a dictionary of shapes."""
        self.members = {key: list(sample[key]) if isinstance(sample[key], Mapping) else None for key in self.keys}
        self.states = {
            key: mapped(lambda value: np.zeros((1, *value.shape), np.float32), sample[key])
            for key in STATES
            if key in known and sample.get(key) is not None
        }
        self._continuity = Continuity()
        schema = schema_of(sample, self.keys)
        self._integers = integers_of(schema)
        constant = {"copied": np.zeros(self.num_envs, np.bool_)} if copies else {}
        self._steps = Steps(sample, self.keys, self._integers, constant)
        self._columns = [
            (key, NAMES[key], self.members[key], key in NUMBERS and self.shapes[key] == (1,), not _floats(schema, key))
            for key in self.keys
        ]
        self.replay = ReplayBuffer(
            schema.extend(copied=Field((), torch.bool)) if copies else schema, max_size * self.num_envs, self.num_envs,
            own_next_obs=True, check_ends=False, sampler=sampler, view=view, seed=seed,
        )  # fmt: skip
        self.copies = copies
        self._memory = Memory(self.replay, self._names)

    @property
    def view(self) -> NStep:
        """The view of the replay."""
        return self.replay.view

    @property
    def _names(self) -> dict[str, str]:
        return {key: NAMES[key] for key in self.keys}

    @property
    def added(self) -> int:
        """Steps per env since the last :meth:`clear`."""
        return self._memory.added

    @property
    def size(self) -> int:
        """Steps per env."""
        if self.copies:
            return min(len(self._alone(env)) for env in range(self.num_envs))
        return len(self.replay) // self.num_envs

    def _alone(self, env: int) -> Any:
        """The steps of an env in the order of time, without relabelled copies."""
        rows = self.replay.slice(env)
        return rows[~rows["copied"]]

    def insert(self, sample: Mapping[str, Any]) -> None:
        """Store one step of every env."""
        step = self._steps(sample)
        if self.view.n == 1:  # only the step itself is read; see read_windows
            self.replay.add(step)
        else:
            self._continuity.follow(self.replay, step["obs"])
            self.replay.add(step)
            self._continuity.note(mapped(np.copy, step["next_obs"]), step["terminated"].copy())
        self._memory.added += 1

    def extend(self, data: Mapping[str, Any]) -> None:
        """Store steps ``[T, N, ...]`` of one or several collectors. Successive steps need not belong together."""
        steps = as_stored(step_of(data, self.keys, axes=2), self._integers)
        if self.copies:
            steps["copied"] = np.zeros_like(steps["terminated"])
        if self.view.n == 1:
            self.replay.extend(steps)
        else:
            steps["truncated"][:-1] = breaks(steps["obs"], steps["next_obs"], steps["terminated"])
            self._continuity.follow(self.replay, mapped(lambda value: value[0], steps["obs"]))
            self.replay.extend(steps)
            self._continuity.note(mapped(lambda value: value[-1].copy(), steps["next_obs"]), steps["terminated"][-1])
        self._memory.added += len(steps["terminated"])

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
            obs, next_obs, done = (arrays_of(steps[name]) for name in ("obs", "next_obs", "terminated"))
            last = steps["index"][:-1][torch.from_numpy(breaks(obs, next_obs, done)[:, 0])]
            flags[env * rows + last // self.num_envs % rows] = True
        self.replay.interrupt()  # the next steps are not checked against these
        self._continuity.forget()

    def clear(self) -> None:
        """Forget all steps."""
        self.replay.clear()
        self._memory.forget()

    def resize(self, max_size: int, sampler: Sampler) -> None:
        """Change the number of steps that fit, and keep the newest."""
        old, view = self.replay, self.view
        old.view = NStep()  # each buffer has a view of its own
        self.replay = ReplayBuffer(
            old.schema, max_size * self.num_envs, self.num_envs, own_next_obs=True, check_ends=False,
            sampler=sampler, view=view, seed=old.seed,
        )  # fmt: skip
        self.replay.append(old)
        kept = len(self.replay) // self.num_envs
        self._memory = Memory(self.replay, self._names, self.size, before=len(old) // self.num_envs - kept)

    def read(self, start: int, end: int, by_position: bool, keys: Iterable[str] | None = None) -> Data:
        """``keys`` (default: all) of steps, float32 ``[T, N, ...]``, by position in memory or from the oldest on."""
        wanted, size = [*self.keys, *self.states] if keys is None else keys, self.size
        count = max(min(end, size) - start, 0)
        if self.copies:
            envs = [self._alone(env) for env in range(self.num_envs)]
            envs = [env[len(env) - size :][start : start + count] for env in envs]
            rows = {key: mapped(_stacked, self.shapes[key], *[env[NAMES[key]] for env in envs]) for key in self.keys}
        else:
            first = start if by_position else start + max(self.added - size, 0)
            rows = {key: self._memory.read(key, first, count) for key in wanted if key in self.keys}
        found = {key: mapped(_shaped, self.shapes[key], rows[key]) for key in wanted if key in rows}
        states = {key: self.states[key] for key in wanted if key in self.states}
        return found | {key: mapped(lambda value: value[start:end].copy(), s) for key, s in states.items()}

    def batches(self, count: int, batch_size: int) -> Iterator[tuple[Data, Any]]:
        """Batches ``[B, ...]`` by key, float32; and the replay's own batches."""
        for drawn in self.replay.batches(count, batch_size):
            batch: Data = dict(drawn.items())
            found: Data = {}
            for key, name, members, single, others in self._columns:
                value: Any = batch[name]
                if members is not None:
                    value = {member: value[member] for member in members}
                if others:
                    value = mapped(Tensor.float, value)
                found[key] = value.unsqueeze(1) if single else value
            yield found | {key: mapped(_first, states) for key, states in self.states.items()}, batch

    def steps_used(self, batch: Data) -> Tensor:
        """The number of rewards in each window of a batch, float32 ``[B, 1]``."""
        return batch["steps"].float().unsqueeze(1)


def _stacked(_: Any, *envs: Any) -> Any:
    """Steps ``[T, ...]`` of each env as float32 ``[T, N, ...]``."""
    return np.stack([as_host(env) for env in envs], 1).astype(np.float32)


def _shaped(shape: Any, rows: Any) -> Any:
    """Add the axis of size 1 that relive leaves out."""
    return rows if rows.shape[2:] == shape else rows.reshape(*rows.shape[:2], *shape)


def _floats(schema: Schema, key: str) -> bool:
    """Whether a key is stored as float32."""
    return set(dtypes_of(schema["obs" if key == OBS2 else NAMES[key]])) == {torch.float32}


def _first(states: Any) -> Tensor:
    return torch.from_numpy(states[0, :1].copy())
