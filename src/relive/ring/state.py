"""RingState: a ring's memory, and what can be read off it: which rows are live, and where they lie."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import kernels
from ..errors import ParameterError
from ..kernels.ring_state import (
    COLUMNS,
    COMPLETED,
    COUNTERS,
    DRAWABLE,
    EPISODES,
    HEAD,
    NEXT,
    NOT_FINITE,
    TAIL,
    RingArrays,
)
from ..kernels.undo_note import undo_size
from ..memory.store import Store, vector
from ..steps.arrays import Ints
from .span import Span

__all__ = ["PIECE", "RingState", "piece_of", "undo_words"]


PIECE = 4096
"""The most rows stored at once. The memory that they are packed in is kept."""


UNLIMITED = 2**62
"""More than any number of a row."""


def piece_of(rows: int) -> int:
    """How many successive steps are stored at once in a ring of ``rows`` rows an env.

    Each takes up to two rows, and together they must not fill the ring of an env.
    """
    return max(min(rows // 2, PIECE), 1)


def undo_words(num_envs: int, rows: int) -> int:
    """How many words a ring in files has to note how to take back any of its changes."""
    return undo_size(num_envs, max(num_envs, piece_of(rows)))


class RingState:
    """The cursors, the counters and what is noted of each row. :class:`relive.ring.Ring` changes them.

    Args:
        num_envs: N.
        rows: rows per env, at least 2.
        store: where the rows lie.
        ordered: as :class:`relive.ring.Ring` takes it.
    """

    def __init__(self, num_envs: int, rows: int, store: Store, ordered: bool) -> None:
        if num_envs < 1 or rows < 2:
            raise ParameterError(f"a ring needs at least 1 env and 2 rows per env, got {num_envs} and {rows}")
        self.num_envs, self.rows, self.store = num_envs, rows, store
        self.leaves, self.layout, self.batch = store.leaves, store.layout, store.batch
        """The fields of a step, and where they are in a row of memory and in one of a batch, as far as kernels go."""
        keeper = store.keeper
        self.state: Ints = keeper.take("state", (num_envs, COLUMNS), np.int64)
        self.counters: Ints = keeper.take("counters", (COUNTERS,), np.int64)
        self.step, self.stamp, self.order = store.meta("_step"), store.meta("_stamp"), store.meta("_order")
        self.alone = any(path[0] == "next_obs" for path in store.leaves)
        """Whether each row is complete with a next observation of its own."""
        self.linked = self.alone and ordered
        """Whether such rows go on from one another."""
        starts, none = store.layout.starts, np.empty(0, np.int64)
        reward, terminated, truncated = map(store.meta, ("reward", "terminated", "truncated"))
        self.arrays = RingArrays(
            rows, starts[3], starts[1], self.state, self.counters, store.target, self.step, self.stamp, self.order,
            reward, terminated, truncated, none.astype(np.int32), none,
        )  # fmt: skip
        if keeper.durable:
            size = undo_words(num_envs, rows)
            reserve = np.full(num_envs, UNLIMITED, np.int64)
            self.arrays = self.arrays._replace(undo=keeper.take("undo", (size,), np.int64), reserve=reserve)
        """All that kernels read and write; kept here, since :attr:`handle` has only their addresses."""
        self.handle: Ints = kernels.fast().handle_of(self.arrays)
        """What compiled kernels take for :attr:`arrays`."""
        self.notes_ends = False
        """Whether :meth:`ends` was asked for."""

    @property
    def drawable(self) -> int:
        """How many anchors there are: rows that can be drawn."""
        return int(self.counters[DRAWABLE])

    @property
    def completed(self) -> int:
        """How many transitions were ever completed."""
        return int(self.counters[COMPLETED])

    @property
    def episodes(self) -> int:
        """How many episodes have ended."""
        return int(self.counters[EPISODES])

    @property
    def not_finite(self) -> int:
        """How many rewards were NaN or infinite, among all that were ever added."""
        return int(self.counters[NOT_FINITE])

    @not_finite.setter
    def not_finite(self, count: int) -> None:
        self.counters[NOT_FINITE] = count

    @property
    def oldest(self) -> Ints:
        """The number of the oldest live row of each env, ``[N]``."""
        return np.maximum(self.state[:, TAIL], self.state[:, HEAD] - self.rows)

    @property
    def heads(self) -> Ints:
        """The number that each env's next row will have, ``[N]``."""
        return self.state[:, HEAD]

    @property
    def under_way(self) -> Any:
        """Whether the newest row of each env is in an episode that goes on with the next, bool ``[N]``."""
        return self.state[:, NEXT] > 0

    @property
    def rows_live(self) -> int:
        """How many rows are live, in all envs."""
        return int((self.heads - self.oldest).sum())

    @property
    def span(self) -> Span:
        """The live rows: for each env, a range of numbers."""
        return Span(self.oldest, self.heads.copy())

    def live(self, low: int = 0, high: int | None = None) -> tuple[Ints, Ints]:
        """The envs and numbers of live rows, env by env in the order of time: all, or from ``low`` up to ``high``."""
        return self.span.rows(low, high)

    def places(self, low: int = 0, high: int | None = None) -> Ints:
        """Where the same rows lie."""
        return self.span.places(self.rows, low, high)

    def live_places(self, env: int) -> Ints:
        """The places of an env's live rows, in the order of time."""
        numbers = np.arange(int(self.oldest[env]), int(self.heads[env]), dtype=np.int64)
        return env * self.rows + numbers % self.rows

    def anchors(self) -> Ints:
        """The places of all rows that can be drawn, env by env in the order of time."""
        self.store.keeper.expect_scan()
        out = np.empty(self.rows_live, np.int64)
        found = kernels.fast().anchors(self.handle, out)
        return out[:found]

    def find(self, index: Ints) -> tuple[Ints, int]:
        """Places of public indices, -1 for those that can no longer be drawn; and the first never issued, or -1."""
        index = vector(index)
        places = np.empty(len(index), np.int64)
        bad = kernels.fast().live(self.handle, index, places)
        return places, int(bad)

    def ends(self) -> tuple[Any, Ints]:
        """The last row of each episode, as far as it is noted, for :func:`relive.kernels.reference.plan_goals`.

        The first array, int32 ``[N * rows]``, holds at ``e * rows + k % rows`` the number of the last row of episode k
        of env e, modulo 2**32. The second, ``[N]``, is the number up to which each env's rows were noted. The kernel
        notes what has come since. A ring that is never asked for its ends keeps neither.
        """
        if not self.notes_ends:
            ends, seen = np.zeros(self.num_envs * self.rows, np.int32), np.zeros(self.num_envs, np.int64)
            self.arrays = self.arrays._replace(ends=ends, seen=seen)
            self.handle[:] = kernels.fast().handle_of(self.arrays)
            self.notes_ends = True  # last: an exception before this line has the next call begin again
        return self.arrays.ends, self.arrays.seen
