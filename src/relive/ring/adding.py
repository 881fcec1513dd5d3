"""Adding and Change: what a call that changes a ring notes before it does."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import kernels
from ..errors import FieldError
from .rule import Rule
from .state import Ints, RingState

__all__ = ["NOBODY", "Adding", "Change", "missing_final"]


NOBODY: Ints = np.zeros(0, np.int64)


class Change(NamedTuple):
    """What a call is about to change, noted first, so that the next call can mend what an exception broke off."""

    cut: Ints = NOBODY
    """The envs whose episodes under way do not go on."""
    envs: Ints = NOBODY
    """The envs that get a row."""
    tails: Ints = NOBODY
    """The number up to which, for each of ``envs``, rows make way for it."""
    since: int = 2**63 - 1
    """Transitions stamped from here on are new."""
    rule: Rule | None = None
    """What could be drawn before, where that changes."""
    clears: bool = False
    rewinds: bool = False


class Adding:
    """What a kernel reads and notes when rows are added, and ``bound``, the addresses of all that.

    With ``cut``, ``envs``, ``tails``, ``since`` and the three that are fixed it also serves as a :class:`Change`, which
    so costs nothing to make.

    Args:
        ring: the ring that gets the rows.
        envs: int64 ``[K]``; later calls may put another array of the same length in its place.
        staged: the rows, uint8 ``[K, W]``.
        final: those of the final observations.
        size: how many events there may be.
    """

    __slots__ = ("bound", "cut", "envs", "final", "finals", "opens", "places", "since", "staged", "tails", "where")
    rule, clears, rewinds = None, False, False

    def __init__(self, ring: RingState, envs: Ints, staged: Any, final: Any, size: int) -> None:
        self.envs, self.staged, self.final = envs, staged, final
        count, self.cut, self.since = len(envs), envs, 0
        self.places, self.finals, self.tails, self.where = (np.zeros(n, np.int64) for n in (count, count, count, size))
        self.opens, store = np.zeros(size, np.uint8), ring.store
        self.bound: Ints = kernels.fast().bind_add(
            envs, staged, final, store.flags, store.sizes, store.target, ring.rows, ring.state, ring.counters,
            ring.step, ring.stamp, ring.order, self.places, self.finals, self.where, self.opens, self.tails,
        )  # fmt: skip

    def plan(self, mode: int) -> None:
        """Note where the rows will go, and up to which numbers others make way for them.

        Raises:
            FieldError: a final observation is missing.
        """
        found = kernels.fast().plan_bound(self.bound, mode)
        if found < 0:
            raise missing_final(int(self.envs[-1 - found]))


def missing_final(env: int) -> FieldError:
    """The error for an episode that ended without a final observation."""
    return FieldError(
        f"field 'next_obs': the episode of env {env} ended and its final observation is missing; pass next_obs "
        "(Gymnasium's final_obs where there is one), [N, ...]; it is read only where an episode ended"
    )
