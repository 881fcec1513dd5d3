"""Bare rings after random plays, added row by row as the invariants of :class:`relive.ring.Ring` say."""

from __future__ import annotations

from typing import Any

import numpy as np

from relive import core
from relive.core.words import (
    ALONE,
    COMPLETED,
    COUNT,
    COUNTERS,
    HEAD,
    LENGTH,
    LONGEST,
    NEXT,
    STRIDE,
    TAIL,
    RingArrays,
)


def column(rows: Any, byte: int, dtype: Any) -> Any:
    """The numbers at a byte of packed rows ``[R, W]``, over the same memory."""
    return rows[:, byte : byte + np.dtype(dtype).itemsize].view(dtype)[:, 0]


class RingPlay:
    """A ring of random bytes in random places of a play.

    Rows begin with a reward and two flags; bookkeeping is in their last 16 bytes.

    Args:
        rng: decides on everything.
        kind: 0, or ALONE or LINKED for rows with next observations of their own.
        num_envs: N; default: random.
        rows: rows per env; default: random.
    """

    def __init__(
        self, rng: np.random.Generator, kind: int = 0, num_envs: int | None = None, rows: int | None = None
    ) -> None:
        self.rng, self.kind = rng, kind
        self.num_envs, self.rows = num_envs or int(rng.integers(1, 6)), rows or int(rng.integers(2, 24))
        self.width = 16 * int(rng.integers(3, 9))
        self.step_bytes = self.width - 16
        places = self.num_envs * self.rows
        memory = rng.integers(0, 256, (places, self.width), np.uint8)
        memory[:, 4:6], memory[:, -16:] = memory[:, 4:6] < 50, 0
        reward = column(memory, 0, np.float32)
        reward[:] = rng.standard_normal(places)
        # a ring that begins, or one that has seen very many rows and was cleared
        old = rng.integers(0, 2**50, self.num_envs) * int(rng.random() < 0.4)
        done = rng.choice([2**31 - 5, 2**32 - 5, 2**33], self.num_envs) * (old > 0)
        state = np.stack([old, old, np.zeros_like(old), done], axis=1)
        counters = np.zeros(COUNTERS, np.int64)
        counters[COMPLETED] = done.sum()
        length = int(rng.integers(1, 7))
        counters[LENGTH], counters[STRIDE] = length, rng.integers(1, length + 1)
        end = self.width - 16
        book = column(memory, end + 8, np.int32), column(memory, end, np.int64), column(memory, end + 12, np.int32)
        book[1][:] = -1
        flags = reward, column(memory, 4, np.uint8), column(memory, 5, np.uint8)
        ends = np.zeros(places, np.int32), np.zeros(self.num_envs, np.int64)
        self.arrays = RingArrays(self.rows, end, end, state, counters, memory, *book, *flags, *ends)
        self._core = core.Ring(self.arrays)

    @property
    def core(self) -> core.Ring:
        """The ring as compiled code takes it, told that it may have changed."""
        self._core.changed()
        return self._core

    def add(self, e: int, ended: str = ".") -> None:
        """One more step of an env: it goes on ("."), terminates ("T"), is truncated ("U"), or both ("B")."""
        ring = self.arrays
        place = self._append(e)
        ring.reward[place] = self.rng.standard_normal()
        ring.terminated[place], ring.truncated[place] = ended in "TB", ended in "UB"
        if self.kind:  # complete at once
            self._complete(e, place)
            if ended != "." or self.kind == ALONE:
                ring.state[e, NEXT] = 0
        elif ended != ".":
            final = self._append(e)
            ring.stamp[final], ring.state[e, NEXT] = -1 - ring.counters[COMPLETED], 0

    def _append(self, e: int) -> int:
        ring, (head, _, index, count) = self.arrays, self.arrays.state[e].tolist()
        stamp = -1 - ring.counters[COMPLETED]
        if index and not self.kind:
            self._complete(e, e * self.rows + (head - 1) % self.rows)
            count += 1
        place = e * self.rows + head % self.rows
        ring.memory[place, : self.step_bytes] = self.rng.integers(0, 256, self.step_bytes, np.uint8)
        ring.step[place], ring.stamp[place], ring.order[place] = index, stamp, np.int64(count).astype(np.int32)
        ring.reward[place], ring.terminated[place], ring.truncated[place] = 0.0, 0, 0
        ring.state[e, HEAD], ring.state[e, NEXT] = head + 1, index + 1 if index + 1 < LONGEST else 0
        return place

    def _complete(self, e: int, place: int) -> None:
        ring = self.arrays
        ring.stamp[place] = ring.counters[COMPLETED]
        ring.counters[COMPLETED] += 1
        ring.state[e, COUNT] += 1

    def play(self, steps: int) -> RingPlay:
        """Some steps of some envs; now and then an episode is interrupted, an env cleared, or an episode very old."""
        rng, state = self.rng, self.arrays.state
        rare = rng.choice([0.02, 0.1, 0.4])
        for _ in range(steps):
            e = int(rng.integers(self.num_envs))
            self.add(e, "." if rng.random() > rare else str(rng.choice(list("TUB"))))
            chance = rng.random()
            if chance < 0.03:
                state[e, NEXT] = 0
            elif chance < 0.05:
                state[e, TAIL], state[e, NEXT] = state[e, HEAD], 0
            elif chance < 0.07 and self.kind != ALONE:
                self._age(e)
        return self

    def _age(self, e: int) -> None:
        """The episode under way has gone on for about as long as an int32 can count; all before it is gone."""
        state, index = self.arrays.state, int(self.arrays.state[e, NEXT])
        if not 0 < index < 100:
            return
        more, head = LONGEST - int(self.rng.integers(1, 5)) - index, int(state[e, HEAD])
        state[e, NEXT] += more
        state[e, TAIL] = max(state[e, TAIL], head - index)
        for number in range(head - min(index, self.rows), head):
            self.arrays.step[e * self.rows + number % self.rows] += more

    def live(self, complete: bool = True) -> Any:
        """The places of the live rows, or of those of them that are complete."""
        ring = self.arrays
        places = [
            e * self.rows + number % self.rows
            for e, (head, tail, _, _) in enumerate(ring.state.tolist())
            for number in range(max(tail, head - self.rows), head)
        ]
        return np.array([place for place in places if not complete or ring.stamp[place] >= 0], np.int64)

    def window_layout(self, own: bool | None = None) -> core.WindowLayout:
        """A random layout of rows of 192 bytes: results are between bytes 80 and 112."""
        rng, wide = self.rng, self.width
        own, own_at = bool(self.kind) if own is None else own, int(rng.integers(0, 17))
        return core.WindowLayout(
            index=80, next_index=88, discount=96, steps=100, reward=104, terminated=108, truncated=109,
            step_bytes=int(rng.integers(0, min(81, wide + 1))), next_at=112,
            next_bytes=-1 if own else int(rng.integers(0, min(wide, 80) + 1)),
            own_at=own_at, own_bytes=int(rng.integers(0, min(wide - own_at, 80) + 1)),
        )  # fmt: skip
