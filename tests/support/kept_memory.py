"""Replays whose memory outlives them, without files: what a process leaves is a copy of arrays, whole or torn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from relive import ReplayBuffer
from relive.memory.allocator import RAM, Allocator
from relive.ring.ring import Undo
from support import internals
from support.twins import Twin

Arrays = dict[str, Any]


class Held(Allocator):
    """Arrays in private memory that a second replay may take over."""

    durable = True

    def __init__(self, arrays: Arrays | None = None) -> None:
        self.arrays = {} if arrays is None else arrays
        self.before = frozenset(self.arrays)
        self.died = arrays is not None

    def take(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        if name not in self.arrays:
            self.arrays[name] = RAM.take(name, shape, dtype)
        found = self.arrays[name]
        assert (found.shape, found.dtype) == (shape, dtype)
        return found

    def has(self, name: str) -> bool:
        return name in self.before


def copied(arrays: Arrays) -> Arrays:
    return {name: array.copy() for name, array in arrays.items()}


def torn(before: Arrays, after: Arrays, rng: np.random.Generator, kept: tuple[str, ...]) -> Arrays:
    """Each word of 4 bytes as it was or as it was to become, but for the arrays ``kept``, which are as ``after``."""
    mixed = copied(after)
    share = rng.choice([0.02, 0.5, 0.98])
    for name, array in mixed.items():
        if name not in kept and name in before:
            words, old = array.reshape(-1).view(np.uint32), before[name].reshape(-1).view(np.uint32)
            words[:] = np.where(rng.random(len(words)) < share, old, words)
    return mixed


class HeldTwin(Twin):
    """A twin whose buffer is in such memory, and can be killed."""

    def __init__(self, rows: int, sampler: Callable[[], Any], view: Callable[[], Any], **facts: Any) -> None:
        super().__init__(2, rows, sampler=sampler(), view=view(), **facts)
        self.make, self.rows = (sampler, view), rows
        self.hold(None)

    def hold(self, arrays: Arrays | None, settle: bool = True) -> None:
        """Go on in another replay, with these arrays. If it does not settle, it is as if killed while it was opened."""
        self.allocator, (sampler, view) = Held(arrays), self.make
        options = {**self.options, "sampler": sampler(), "view": view(), "store": self.allocator}
        self.buffer = ReplayBuffer(self.schema, self.rows * 2, 2, **options)
        if settle:
            internals.ring(self.buffer).commit()

    def revive(self, arrays: Arrays) -> None:
        """Go on after a kill that left these arrays: episodes are cut, and some of the oldest rows are gone."""
        self.hold(arrays, settle=False)
        self.hold(arrays)
        for env in (0, 1):
            self.truth.interrupt(env)
            self.lives[env].restart()
            live, oldest = self.truth.live(env), int(internals.ring(self.buffer).oldest[env])
            due = live[0].number if live else int(internals.ring(self.buffer).heads[env])
            assert 0 <= oldest - due <= 2, f"rows {due} to {oldest} of env {env} are gone"
            self.truth._cleared[env] = max(self.truth._cleared[env], oldest)


def during(twin: HeldTwin, call: Callable[[], Any], monkeypatch: Any) -> list[Arrays]:
    """What is in memory at the end of each change that a call makes, before the note of it is given up."""
    found, end = list[Arrays](), Undo.end

    def noting(self: Undo) -> None:
        if self.active:
            found.append(copied(twin.allocator.arrays))
        end(self)

    with monkeypatch.context() as patch:
        patch.setattr(Undo, "end", noting)
        call()
    return found
