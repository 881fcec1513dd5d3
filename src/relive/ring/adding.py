"""Adding and Change: what a call that changes a ring notes before it does."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import kernels
from ..errors import FieldError, LifecycleError, ParameterError, ReliveError
from ..kernels.ring_state import USED_UP, StagedRows
from ..steps.arrays import Ints
from .rule import Rule
from .state import RingState

__all__ = ["NOBODY", "Adding", "Change", "Ended", "missing_final", "refused"]


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


class Ended(NamedTuple):
    """Why a ring can no longer be used, in place of a change: every call on a replay looks for one first."""

    reason: str
    """Who or what ended it, and what to do."""
    cut: Ints = NOBODY
    since: int = 2**63 - 1

    def error(self) -> LifecycleError:
        """The error for every further call."""
        return LifecycleError(self.reason)


class Adding:
    """What a kernel reads and notes when rows are added, and the ``handle`` of all that.

    With ``cut``, ``envs``, ``tails``, ``since`` and the three that are fixed it also serves as a :class:`Change`, which
    so costs nothing to make.

    Args:
        ring: the ring that gets the rows.
        envs: int64 ``[K]``; later calls may put another array of the same length in its place.
        staged: the rows, uint8 ``[K, W]``.
        final: those of the final observations.
        size: how many events there may be.
    """

    __slots__ = ("_ring", "arrays", "cut", "envs", "final", "finals", "handle", "opens", "places", "since", "staged",
                 "tails", "where")  # fmt: skip
    rule, clears, rewinds = None, False, False
    envs: Ints
    cut: Ints
    since: int

    def __init__(self, ring: RingState, envs: Ints, staged: Any, final: Any, size: int) -> None:
        self.envs, self.staged, self.final = envs, staged, final
        count, self.cut, self.since, self._ring = len(envs), envs, 0, ring.handle
        self.places, self.finals, self.tails, self.where = (np.zeros(n, np.int64) for n in (count, count, count, size))
        self.opens, fields = np.zeros(size, np.uint8), ring.store.layout.arrays(staged)
        terminated, truncated = (fields[name,].view(np.uint8) for name in ("terminated", "truncated"))
        self.arrays = StagedRows(
            envs, staged, final, fields["reward",], terminated, truncated,
            self.places, self.finals, self.tails, self.where, self.opens,
        )  # fmt: skip
        self.handle: Ints = kernels.fast().handle_of(self.arrays)

    def take(self, envs: Ints) -> None:
        """Add to these envs from now on, as many as before."""
        self.tails.fill(0)  # they belong to other envs
        self.envs = NOBODY  # until the address is that of the same array
        self.handle[0] = envs.__array_interface__["data"][0]
        self.envs = envs

    def plan(self, mode: int, undo: Any = None) -> None:
        """Note where the rows will go, and up to which numbers others make way for them.

        Raises:
            FieldError, ParameterError: the rows are refused.
        """
        found = kernels.fast().plan_rows(self._ring, self.handle, mode)
        if found == USED_UP and undo.renew is not None and undo.renew(len(self.envs)):
            found = kernels.fast().plan_rows(self._ring, self.handle, mode)
        if found < 0:
            raise refused(self.envs, found)


def refused(envs: Ints, found: int) -> ReliveError:
    """The error for rows of ``envs`` that a kernel refused with the number ``found``."""
    if found == USED_UP:
        return ParameterError(
            f"add: {len(envs)} rows are too many for one call of a replay in files; add fewer steps at once"
        )
    return missing_final(int(envs[-1 - found]))


def missing_final(env: int) -> FieldError:
    """The error for an episode that ended without a final observation."""
    return FieldError(
        f"field 'next_obs': the episode of env {env} ended and its final observation is missing; pass next_obs "
        "(Gymnasium's final_obs where there is one), [N, ...]; it is read only where an episode ended"
    )
