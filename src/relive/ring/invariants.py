"""The invariants of a ring, which :class:`relive.ring.Ring` numbers, as tests of what it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import InvariantError
from ..kernels.ring_state import COUNT, NEXT
from ..steps.arrays import Ints
from .state import RingState

__all__ = ["LARGEST", "check", "check_cursors"]


LARGEST = 2**52
"""The largest number of a row that the kernels can use. A million rows a second reach it after 142 years."""


PIECE = 2**18
"""Rows tested at once."""


def check(ring: RingState, recount: bool = True) -> None:
    """See :meth:`relive.ring.Ring.check`. Without ``recount``, what can be drawn has just been counted."""
    check_cursors(ring, LARGEST)
    ring.store.keeper.expect_scan()
    stamps = [np.empty(0, np.int64)]
    for low in range(0, ring.rows_live, PIECE):  # each piece begins with the last row of the one before
        found = _check_rows(ring, *ring.live(max(low - 1, 0), low + PIECE))
        stamps.append(found[low > 0 :])
    known = np.sort(np.concatenate(stamps))
    _require((known[1:] != known[:-1]) | (known[1:] < 0), "5: two transitions have one stamp")
    found = len(ring.anchors()) if recount else ring.drawable
    _require(ring.drawable == found, f"6: {ring.drawable} counted, {found} found")


def check_cursors(ring: RingState, most: int) -> None:
    """Test the cursors and counters, as far as they show it alone, before they are used to find rows.

    Args:
        ring: the ring.
        most: the largest number that a row may have.

    Raises:
        InvariantError: names the first that does not hold.
    """
    head, tail, following, count = ring.state.T
    _require(
        (tail >= 0) & (tail <= head) & (head <= min(most, 2**62 // ring.num_envs)),
        "1: the cursors are not numbers of rows",
    )
    live = head > ring.oldest
    _require((following >= 0) & (live | (following == 0)), "4: the next row is in no episode")
    _require((count >= 0) & (count <= head), "7: more transitions than rows")
    _require(ring.completed == int(count.sum()), f"7: {ring.completed} completed, {int(count.sum())} in the envs")
    _require(0 <= ring.episodes <= ring.completed, f"8: {ring.episodes} episodes have ended")


def _check_rows(ring: RingState, env: Ints, number: Ints) -> Ints:
    """The invariants of some successive live rows; gives their stamps."""
    place = env * ring.rows + number % ring.rows
    step, stamp, order = (x[place].astype(np.int64) for x in (ring.step, ring.stamp, ring.order))
    complete, newest = stamp >= 0, number == ring.heads[env] - 1
    passed, same_env = np.where(complete, stamp, -1 - stamp), env[1:] == env[:-1]
    begins, goes_on = step[1:] == 0, step[1:] == step[:-1] + 1
    ahead = (ring.state[env, COUNT] - order) % 2**32
    before = ring.state[env, COUNT] - ahead

    def require(holds: Any, what: str) -> None:
        rows = holds if len(holds) == len(env) else np.append(holds | ~same_env, True)
        if not rows.all():
            at = int(rows.argmin())
            raise InvariantError(f"invariant {what.format(f'row {number[at]} of env {env[at]}')}")

    require(step >= 0, "4: step of {} is not one")
    require(begins | goes_on, "4: step after {} neither starts nor goes on")
    following = ring.state[env, NEXT]
    require(~newest | (following == 0) | (following == step + 1), "4: what comes after {} is not its next step")
    require((passed >= 0) & (passed < ring.completed + ~complete), "5: the stamp of {} was never issued")
    require(passed[1:] >= passed[:-1], "5: the stamps after {} are not in order")
    if ring.alone:
        require(complete, "5: {} has its own next_obs and is not complete")
        require(ring.linked | (step == 0), "4: {} stands alone and is in an episode")
    else:
        require(~complete[:-1] | goes_on, "5: {} is complete and has no successor")
        require(~newest | ~complete, "5: {} is the newest and complete")
        require(complete[:-1] | begins, "8: {} ends an episode that goes on")
    require((before >= 0) & (before <= number), "7: {} miscounts the transitions before it")
    require(ahead[1:] == ahead[:-1] - complete[:-1], "7: the row after {} miscounts the transitions of its env")
    require(~newest | (ahead == complete), "7: {} miscounts the transitions of its env")
    if ring.notes_ends:
        _check_ends(ring, env, number, number - before, require)
    return stamp


def _check_ends(ring: RingState, env: Ints, number: Ints, episode: Ints, require: Callable[[Any, str], None]) -> None:
    """Invariant 8: what is noted as the last rows of episodes."""
    ends, seen = ring.ends()
    last = np.append((episode[1:] != episode[:-1]) | (env[1:] != env[:-1]), False)
    last |= number == np.minimum(seen, ring.heads)[env] - 1
    noted = ends[env * ring.rows + episode % ring.rows]
    right = (noted - number) % 2**32 == 0
    require(~last | (number >= seen[env]) | right, "8: the episode of {} ends elsewhere")


def _require(holds: Any, what: str) -> None:
    if not np.all(holds):
        raise InvariantError(f"invariant {what}")
