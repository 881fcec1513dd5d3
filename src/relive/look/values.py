"""Rules on single fields: numbers that are not finite, constant, out of their space, or of the wrong kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import numpy as np

from ..errors import ParameterError
from ..printable import shown
from ..steps.arrays import Array
from ..steps.trees import Path, dotted
from .experience import Experience, Leaves, same_rows
from .findings import Finding, Lack, Looked, Verdict, found

__all__ = [
    "actions_as_floats",
    "bytes_as_floats",
    "constant_fields",
    "envs_apart",
    "not_finite",
    "odd_flags",
    "outside_space",
    "priorities",
]


def _of_all_rows(rule: Callable[[Experience], Iterator[Finding]]) -> Callable[[Experience], Verdict]:
    """A rule that looks at every row of every source."""

    @wraps(rule)
    def verdict(steps: Experience) -> Verdict:
        return Looked(len(steps), rule(steps))

    return verdict


def _named(steps: Experience) -> Leaves:
    """All leaves by the path that a report names."""
    groups = {"obs": steps.obs, "next_obs": steps.next_obs or {}, "action": steps.action}
    leaves: Leaves = {(name, *path): leaf for name, group in groups.items() for path, leaf in group.items()}
    return {**leaves, ("reward",): steps.reward, **steps.others}


@_of_all_rows
def not_finite(steps: Experience) -> Iterator[Finding]:
    """NaN and infinities."""
    for path, leaf in _named(steps).items():
        if leaf.dtype.kind not in "fc" or path[0] in MAY_BE_INFINITE:
            continue
        flat = leaf.reshape(len(leaf), -1)
        if np.isfinite(np.sum(flat, dtype=np.float64)):  # a sum is finite only if all numbers are
            continue
        bad = ~np.isfinite(flat).all(1)
        if path[0] == "next_obs" and steps.next_obs is not None:
            bad &= ~steps.still
        if bad.any():
            yield found("not-finite", "certain", f"'{dotted(path)}' holds NaN or infinite numbers",
                        "mend the env or the policy; debug=True refuses such steps when they are added",
                        bad, len(leaf), place=steps.place, field=dotted(path))  # fmt: skip


MAY_BE_INFINITE = frozenset(("final_value", "log_prob", "mask"))


def constant_fields(steps: Experience) -> Verdict:
    """Observations or actions that never change."""
    return Lack("fewer than 20 steps are stored") if len(steps) < 20 else Looked(len(steps), _constant(steps))


def _constant(steps: Experience) -> Iterator[Finding]:
    for name, group in (("obs", steps.obs), ("action", steps.action)):
        for path, leaf in group.items():
            few = leaf[: len(leaf) // 20 + 2]
            if not (leaf.size and _never_changes(steps, few) and _never_changes(steps, leaf)):
                continue
            where = dotted((name, *path))
            # a policy may always do the same, one of several observations may be fixed, and a bandit has no state
            meant = name == "action" or len(group) > 1 or leaf[0].size == 1 or not steps.inner.any()
            yield found("constant-field", "possible" if meant else "likely",
                        f"'{where}' is the same in all rows of an env",
                        "check that the loop stores what the env and the policy give at each step",
                        np.arange(len(leaf)), len(leaf), place=steps.place, field=where)  # fmt: skip


def _never_changes(steps: Experience, leaf: Array) -> bool:
    """Whether the first rows of a leaf are the same in each env."""
    rows = steps.env[1 : len(leaf)] == steps.env[: len(leaf) - 1]
    return bool(same_rows(leaf[1:], leaf[:-1])[rows].all())


def envs_apart(steps: Experience) -> Verdict:
    """One env whose observations or rewards never change while those of the others do."""
    kinds, first, counts = np.unique(steps.env, return_index=True, return_counts=True)
    if len(kinds) < 2:
        return Lack("it has one env, or does not say which rows are of which", absent=True)
    if counts.min() < ENOUGH or not bool((np.diff(first) > 0).all()) or counts.sum() != len(steps):
        return Lack(f"an env has fewer than {ENOUGH} rows")
    return Looked(len(steps), _apart(steps, kinds))


ENOUGH = 50
"""The fewest rows of an env that its figures are compared for."""


def _apart(steps: Experience, kinds: Array) -> Iterator[Finding]:
    rows = {int(kind): np.flatnonzero(steps.env == kind) for kind in kinds}
    frozen = {env: _longest_still(steps, of_env) for env, of_env in rows.items()}
    moves = np.sort([1 - share for share in frozen.values()])
    dead = [env for env, share in frozen.items() if share > 0.8]
    if dead and len(dead) < len(kinds) / 2 and np.median(list(frozen.values())) < 0.2 and moves[-1] > 0.5:
        bad = np.isin(steps.env, dead)
        yield found("env-stands-still", "likely",
                    f"observations of env {', '.join(map(str, dead))} do not change, while those of the others do",
                    "look at that env: it may have crashed, or its slot is never written",
                    bad, len(steps), place=steps.place)  # fmt: skip
        return
    quiet = [env for env, of_env in rows.items() if np.ptp(steps.reward[of_env]) == 0]
    if not quiet or len(quiet) >= len(kinds) / 2:
        return
    # how often the others earn something else than what they mostly earn: each earns it in many of its steps
    shares = [float((steps.reward[of_env] != _mostly(steps.reward[of_env])).mean())
              for env, of_env in rows.items() if env not in quiet]  # fmt: skip
    if min(shares) > 0.3:
        bad = np.isin(steps.env, quiet)
        yield found("env-earns-the-same", "likely",
                    f"rewards of env {', '.join(map(str, quiet))} never change, while those of the others often do",
                    "look at that env: it may have crashed, or its slot is never written",
                    bad, len(steps), place=steps.place)  # fmt: skip


def _mostly(numbers: Array) -> Any:
    """The number that comes most often."""
    kinds, counts = np.unique(numbers, return_counts=True)
    return kinds[np.argmax(counts)]


def _longest_still(steps: Experience, rows: Array) -> float:
    """The longest run of rows of one env with the same observation, as a share of its rows; 0 if actions are the same.

    An agent that stands still by its own choice gives one action again and again.
    """
    same = np.logical_and.reduce([same_rows(leaf[rows[:-1]], leaf[rows[1:]]) for leaf in steps.obs.values()])
    edges = np.flatnonzero(np.concatenate([[True], ~same, [True]]))
    lengths = np.diff(edges)
    longest = int(np.argmax(lengths))
    run = rows[edges[longest] : edges[longest] + lengths[longest]]
    varied = all(bool((leaf[run] != leaf[run[:1]]).any()) for leaf in steps.action.values())
    return float(len(run) / len(rows)) if varied and len(run) >= ENOUGH else 0.0


@_of_all_rows
def bytes_as_floats(steps: Experience) -> Iterator[Finding]:
    """Float observations that hold the whole numbers 0 to 255: images at four times their size."""
    for path, leaf in steps.obs.items():
        if leaf.dtype.kind != "f" or leaf.ndim < 3 or not len(leaf):
            continue
        sample = leaf[:: max(len(leaf) // 64, 1)]
        if np.array_equal(sample, np.round(sample)) and sample.min() >= 0 and 16 <= sample.max() <= 255:
            where = dotted(("obs", *path))
            sizes = sorted(leaf.shape[1:])[-2:]  # counts of a few things are no image
            yield found("bytes-as-floats", "likely" if len(sizes) == 2 and sizes[0] >= 8 else "possible",
                        f"'{where}' holds whole numbers from 0 to 255 as {leaf.dtype}: bytes at "
                        f"{leaf.dtype.itemsize} times their size",
                        "store uint8, and divide by 255 in the network",
                        np.arange(len(leaf)), len(leaf), place=steps.place, field=where)  # fmt: skip


def actions_as_floats(steps: Experience) -> Verdict:
    """Float actions that hold a few whole numbers: discrete actions. float32 loses whole numbers beyond 2 ** 24."""
    if not steps.action:
        return Lack("it keeps no actions")
    return Lack("fewer than 20 steps are stored") if len(steps) < 20 else Looked(len(steps), _whole_actions(steps))


def _whole_actions(steps: Experience) -> Iterator[Finding]:
    for path, leaf in steps.action.items():
        if leaf.dtype.kind != "f":
            continue
        sample = leaf[:: max(len(leaf) // 1000, 1)]
        kinds = np.unique(sample)
        if 1 < len(kinds) <= len(sample) / 10 and np.array_equal(kinds, np.round(kinds)) and kinds.min() >= 0:
            where = dotted(("action", *path))
            yield found("actions-as-floats", "possible", f"'{where}' holds whole numbers as {leaf.dtype}",
                        "store discrete actions as integers",
                        np.arange(len(leaf)), len(leaf), place=steps.place, field=where)  # fmt: skip


@_of_all_rows
def odd_flags(steps: Experience) -> Iterator[Finding]:
    """Flags that are neither 0 nor 1, such as sums of the flags of a window."""
    if steps.odd_flags is not None:
        yield found("flag-not-binary", "certain", "flags of ends are neither 0 nor 1: 1 - done is then no mask",
                    "store whether any step of a window ended, not how many did",
                    steps.odd_flags, len(steps), place=steps.place)  # fmt: skip


def outside_space(steps: Experience, spaces: dict[str, Any]) -> Verdict:
    """Observations and actions outside the Gymnasium spaces that are given.

    Raises:
        ParameterError: ``spaces`` has an entry for something else.
    """
    other = sorted(str(name) for name in spaces if name not in ("obs", "action"))
    if other:
        raise ParameterError(f"spaces: expected the spaces of 'obs' and 'action', got one for {', '.join(other)}")
    if not spaces:
        return Lack("pass spaces, the spaces of 'obs' and 'action'", absent=True)
    if "action" in spaces and not steps.action:
        return Lack("spaces has one for 'action', but no actions are stored")
    return Looked(len(steps), _outside_spaces(steps, spaces))


def _outside_spaces(steps: Experience, spaces: dict[str, Any]) -> Iterator[Finding]:
    for name, group in (("obs", steps.obs), ("action", steps.action), ("next_obs", steps.next_obs or {})):
        space = spaces.get("obs" if name == "next_obs" else name)
        if space is None:
            continue
        for path, leaf in group.items():
            bad = _outside(_inner(space, path), leaf, dotted((name, *path)))
            if name == "next_obs":
                bad &= ~steps.still
            if bad.any():
                where = dotted((name, *path))
                yield found("outside-space", "certain", f"'{where}' lies outside {_inner(space, path)}",
                            "check scaling, clipping and the order of wrappers; store what the env was given",
                            bad, len(leaf), place=steps.place, field=where)  # fmt: skip


def _inner(space: Any, path: Path) -> Any:
    """The space of a leaf of nested Dict and Tuple spaces.

    Raises:
        ParameterError: the spaces have no such leaf.
    """
    try:
        for key in path:
            space = space.spaces[int(key) if isinstance(space.spaces, tuple) else key]
    except (AttributeError, LookupError, ValueError, TypeError) as error:
        raise ParameterError(f"spaces: no space for the stored leaf '{dotted(path)}' in {shown(space, 200)}") from error
    return space


def _outside(space: Any, leaf: Array, where: str) -> Array:
    """Which rows lie outside a Box, Discrete, MultiDiscrete or MultiBinary space, bool ``[S]``.

    Raises:
        ParameterError: this is no space, or one of another size than the field ``where``.
    """
    if not callable(getattr(space, "contains", None)) or isinstance(space, type):
        raise ParameterError(f"spaces: expected a Gymnasium space for '{where}', got {shown(space, 200)}")
    flat, kind = leaf.reshape(len(leaf), -1), type(space).__name__
    low: Any
    high: Any
    if kind == "Box":
        low, high = space.low.reshape(-1), space.high.reshape(-1)
    elif kind == "Discrete":
        low, high = space.start, space.start + space.n - 1
    elif kind == "MultiDiscrete":
        low, high = space.start.reshape(-1), (space.start + space.nvec - 1).reshape(-1)
    elif kind == "MultiBinary":
        low, high = 0, 1
    else:
        return np.zeros(len(leaf), np.bool_)
    if np.size(low) not in (1, flat.shape[1]):
        raise ParameterError(f"spaces: '{where}' has {flat.shape[1]} numbers a step, the space has {np.size(low)}")
    whole = kind != "Box" and flat.dtype.kind == "f"
    with np.errstate(invalid="ignore"):
        bad = (flat < low) | (flat > high)  # another rule reports NaN
        return (bad | (flat != np.round(flat)) if whole else bad).any(1)


def priorities(steps: Experience) -> Verdict:
    """Priorities that are not finite, that belong to rows without a transition, or that are 0."""
    if steps.priorities is None or not len(steps.priorities):
        return Lack("it has no priorities", absent=True)
    return Looked(len(steps.priorities), _priorities(steps.priorities, steps.live))


def _priorities(weight: Array, live: Array | None) -> Iterator[Finding]:
    bad = ~np.isfinite(weight) | (weight < 0)
    if bad.any():
        yield found("priority-not-finite", "certain", "priorities are NaN, infinite or negative",
                    "refuse TD errors that are not finite before they reach the sampler", bad, len(weight))  # fmt: skip
    if live is None:
        return
    dead = ~live & (weight > 0) & ~bad
    if dead.any():
        yield found("priority-of-dead-row", "certain", "rows that hold no transition have a priority, and are drawn",
                    "set the priorities of rows that were cleared, or not yet written, to 0",
                    dead, len(weight))  # fmt: skip
    never = live & (weight == 0)
    if never.any():
        yield found("priority-zero", "likely", "stored transitions have priority 0, and are never drawn",
                    "add a small eps to every TD error", never, int(live.sum()))  # fmt: skip
