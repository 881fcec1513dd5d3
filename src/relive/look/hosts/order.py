"""The order of time in rings and flat stores of other libraries."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from ...steps.arrays import Array, Ints, as_host
from ..digests import digests
from ..experience import Experience, Leaves, from_arrays, leaves_of

__all__ = ["as_blocks", "flat_steps", "in_time", "taking_turns", "threads"]


def in_time(values: Any, position: int, full: bool) -> Any:
    """Rows of a ring ``[R, ...]``, nested or not, from the oldest to the newest."""
    if hasattr(values, "items"):
        members = cast("dict[str, Any]", values)
        return {name: in_time(part, position, full) for name, part in members.items()}
    array = as_host(values)
    return np.concatenate([array[position:], array[:position]]) if full else array[:position]


def as_blocks(values: Any) -> Any:
    """``[T, N, 1]`` as ``[T, N]``, for numbers that a library keeps with a last axis of 1."""
    array = as_host(values)
    return array.reshape(array.shape[:2])


def flat_steps(
    fields: dict[str, Any],
    source: str,
    *,
    full: bool,
    n: int = 1,
    episode: Array | None = None,
    envs: int | None = None,
) -> Experience:
    """Experience of a flat store ``[S, ...]``, oldest first, that may not say which rows are of one env.

    If it says so, by ``envs``, its order is kept, unless observations show that the rows lie env by env instead.
    Otherwise, rows that follow each other stay as they are. Where most of those that do not lead to a later row
    instead, rows are sorted into :func:`threads`.

    Args:
        fields: as :func:`~relive.look.experience.from_arrays` takes them, with ``next_obs``.
        source: what to call them.
        full: whether old rows were overwritten, so that the first episodes may have lost their first steps.
        n: how many steps lie between a row's observation and its next one, if the library says so.
        episode: int ``[S]``, the number of each row's episode, if the library keeps it.
        envs: how many envs have rows in turns, if the library says so.
    """
    found = from_arrays(fields, source, vector=False)
    found.begins = not full
    if envs:
        order = np.arange(len(found)).reshape(-1, envs).T.reshape(-1)
        stated = interleaved(fields, source, order, order % envs, begins=found.begins)
        if episode is not None:
            stated.follows[:-1] &= (np.diff(episode[order]) == 0) | stated.ended[:-1]
        if _goes_on(stated) or not _goes_on(found):
            return stated
    broken = found.follows & ~found.chained & ~found.ended
    if len(found) < 2 or found.next_obs is None or not broken.any():
        return found
    if episode is not None:
        order = np.argsort(episode, kind="stable")
        return interleaved(fields, source, order, episode[order], begins=found.begins)
    stride = stride_of(found, broken)
    if n > 1 or _is_n_step(found, stride):
        env = np.arange(len(found)) % max(stride // n, 1)
        order = np.argsort(env, kind="stable")
        return interleaved(fields, source, order, env[order], begins=found.begins) if n > 1 else found
    joined = threads(found.obs, found.next_obs)
    if joined is not None:
        order, env = joined
        goes_on = np.zeros(len(found), np.bool_)
        goes_on[order[:-1]] = env[1:] == env[:-1]
        if goes_on[broken].mean() > MATCHED:  # rows that lead to no other are no matter of order
            return interleaved(fields, source, order, env, begins=found.begins)
    elif broken.sum() > len(found) * MATCHED:
        found.follows[:] = False
        found.ordered = False
        found.lacks += ("it does not say which rows are of one environment, nor do their observations",)
    return found


def _goes_on(steps: Experience) -> bool:
    """Whether most rows that have not ended lead to the following one."""
    looked = steps.follows & ~steps.ended
    return bool(steps.chained[looked].sum() >= looked.sum() * MATCHED)


def taking_turns(fields: dict[str, Any], source: str) -> Experience | None:
    """Arrays ``[S, ...]`` in which the steps of N envs take turns, as experience; None if they do not."""
    found = from_arrays(fields, source)
    inner = np.flatnonzero(~found.ended)
    if found.next_obs is None or len(found) < TURNS or found.env.any() or not len(inner):
        return None
    if found.chained[inner].mean() > MATCHED:
        return None
    stride = stride_of(found, ~found.ended)
    if stride < 2 or not found.numbers.shape[1]:
        return None
    near, far = (np.abs(found.numbers[k:].astype(np.float64) - found.numbers[:-k]).mean() for k in (1, stride))
    if not far < CLOSER * near:
        return None  # n-step transitions lead as far, but neighbours among them are near to each other
    env = np.arange(len(found)) % stride
    order = np.argsort(env, kind="stable")
    env = env[order]
    reached = inner[inner < len(found) - stride]
    if found.reaches(stride)[reached].mean() < ALL_TURNS:  # in turns, but not always in the same
        joined = threads(found.obs, found.next_obs)
        if joined is None:
            found.follows[:] = False
            found.ordered = False
            found.lacks += ("rows take turns between envs, and neither they nor their observations say which is whose",)
            return found
        order, env = joined
    sorted_ = interleaved(fields, source, order, env, begins=True)
    sorted_.lacks += (f"rows take turns between about {stride} envs, as their observations show; they were read so",)
    return sorted_


TURNS, ALL_TURNS, CLOSER = 20, 0.98, 0.8
"""The fewest rows that show turns; the share of them that must lead to the env's next one; and how much closer these
must lie than neighbours."""


def _is_n_step(steps: Experience, stride: int) -> bool:
    """Whether rows are windows of one env: neighbours then lie nearer to each other than rows a window apart."""
    if stride < 2 or not steps.numbers.shape[1]:
        return False
    near, far = (np.median(np.abs(steps.numbers[k:] - steps.numbers[:-k]).mean(1)) for k in (1, stride))
    return bool(near < far)


def interleaved(fields: dict[str, Any], source: str, order: Ints, env: Ints, *, begins: bool) -> Experience:
    """Experience of flat rows ``[S, ...]`` in another order: rows of equal ``env`` follow each other."""
    sorted_ = {name: {path: leaf[order] for path, leaf in leaves_of(x).items()} for name, x in fields.items()}
    found = from_arrays({name: _nested(leaves) for name, leaves in sorted_.items()}, source, vector=False)
    found.env, found.place, found.begins = env, order, begins
    found.follows = np.append(env[1:] == env[:-1], False)
    return found


def _nested(leaves: Leaves) -> Any:
    """Leaves by path as one array, or as a dict of them by dotted names."""
    return leaves[()] if list(leaves) == [()] else {".".join(path): leaf for path, leaf in leaves.items()}


MATCHED = 0.5
"""The share of rows that must lead to a later one, before rows are said to be threads."""


def threads(obs: Leaves, next_obs: Leaves) -> tuple[Ints, Ints] | None:
    """The rows ``[S]`` thread by thread, and the number of each one's thread; None if observations do not say.

    A row is followed by the first later row whose observation is the one it led to. Under ``NEXT_STEP`` autoreset, and
    where a reset observation is stored as the next one, a thread runs on through all episodes of an env. Where final
    observations are stored, it is one episode.
    """
    size = len(next(iter(obs.values())))
    before = digests([obs[path].reshape(size, -1) for path in obs])
    after = digests([next_obs[path].reshape(size, -1) for path in obs])
    order: Ints = np.argsort(before, kind="stable")  # rows with one observation lie side by side, in the order of time
    known = before[order]
    if np.count_nonzero(known[1:] != known[:-1]) + 1 < size * MATCHED:
        return None  # observations that come again and again name no row
    at, row = np.searchsorted(known, after), np.arange(size)
    following: Ints = np.zeros(size, np.int64)
    matched = np.zeros(size, np.bool_)
    for _ in range(ALIKE):
        place = np.minimum(at, size - 1)
        later = ~matched & (at < size) & (known[place] == after) & (order[place] > row)
        following[later] = order[place[later]]
        matched |= later
        at += 1
    if matched.mean() < MATCHED:
        return None
    rows = np.flatnonzero(matched)
    previous: Ints = np.arange(size)
    previous[following[rows]] = rows  # of several that lead to one row, the last one, which is nearest, is kept
    head, further = previous, previous[previous]
    while not np.array_equal(head, further):  # twice as many steps back each time, so log2(S) rounds at most
        head, further = further, further[further]
    order = np.argsort(head, kind="stable")  # rows of a thread stay in the order of time
    return order, head[order]


def stride_of(steps: Experience, rows: Array) -> int:
    """How many rows after most of ``rows`` (bool ``[S]``, some are True) the row lies that begins with the observation
    they led to; 0 if unknown.
    """
    size, after = len(steps), steps.next_obs or {}
    one = digests([leaf.reshape(size, -1) for leaf in steps.obs.values()])
    other = digests([after[path].reshape(size, -1) for path in steps.obs])
    looked = np.flatnonzero(rows)[:SAMPLE]
    after_end = np.append(one, other[:1] ^ np.uint64(1))  # a place for rows beyond the newest, equal to none of these
    shares = [(other[looked] == after_end[np.minimum(looked + k, size)]).mean() for k in range(1, LONGEST)]
    best = int(np.argmax(shares))
    return best + 1 if shares[best] > MATCHED else 0


ALIKE = 4
"""The most rows with one observation for which the first later one is found."""

LONGEST, SAMPLE = 512, 2000
"""Rows that are looked at for the next one of the same env, and rows for which that is done."""
