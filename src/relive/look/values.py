"""Rules on single fields: numbers that are not finite, constant, out of their space, or of the wrong kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import ParameterError
from ..printable import shown
from ..steps.arrays import Array
from ..steps.trees import Path, dotted
from .experience import Experience, Leaves
from .findings import Finding, found

__all__ = [
    "actions_as_floats",
    "bytes_as_floats",
    "constant_fields",
    "not_finite",
    "odd_flags",
    "outside_space",
    "priorities",
]


def _named(steps: Experience) -> Leaves:
    """All leaves by the path that a report names."""
    groups = {"obs": steps.obs, "next_obs": steps.next_obs or {}, "action": steps.action}
    leaves: Leaves = {(name, *path): leaf for name, group in groups.items() for path, leaf in group.items()}
    return {**leaves, ("reward",): steps.reward, **steps.others}


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


def constant_fields(steps: Experience) -> Iterator[Finding]:
    """Observations or actions that never change."""
    if len(steps) < 20:
        return
    for name, group in (("obs", steps.obs), ("action", steps.action)):
        for path, leaf in group.items():
            if not (
                leaf.size and bool((leaf[: len(leaf) // 20 + 2] == leaf[0]).all()) and bool((leaf == leaf[0]).all())
            ):
                continue
            where = dotted((name, *path))
            meant = name == "obs" and (len(group) > 1 or bool(steps.still.all()))  # as in a bandit without a state
            yield found("constant-field", "possible" if meant else "likely",
                        f"'{where}' is the same in all rows",
                        "check that the loop stores what the env and the policy give at each step",
                        np.arange(len(leaf)), len(leaf), place=steps.place, field=where)  # fmt: skip


def bytes_as_floats(steps: Experience) -> Iterator[Finding]:
    """Float observations that hold the whole numbers 0 to 255: images at four times their size."""
    for path, leaf in steps.obs.items():
        if leaf.dtype.kind != "f" or leaf.ndim < 3 or not len(leaf):
            continue
        sample = leaf[:: max(len(leaf) // 64, 1)]
        if np.array_equal(sample, np.round(sample)) and sample.min() >= 0 and 16 <= sample.max() <= 255:
            where = dotted(("obs", *path))
            yield found("bytes-as-floats", "likely",
                        f"'{where}' holds whole numbers from 0 to 255 as {leaf.dtype}: bytes at "
                        f"{leaf.dtype.itemsize} times their size",
                        "store uint8, and divide by 255 in the network",
                        np.arange(len(leaf)), len(leaf), place=steps.place, field=where)  # fmt: skip


def actions_as_floats(steps: Experience) -> Iterator[Finding]:
    """Float actions that hold a few whole numbers: discrete actions. float32 loses whole numbers beyond 2 ** 24."""
    for path, leaf in steps.action.items():
        if leaf.dtype.kind != "f" or len(leaf) < 20:
            continue
        sample = leaf[:: max(len(leaf) // 1000, 1)]
        kinds = np.unique(sample)
        if 1 < len(kinds) <= len(sample) / 10 and np.array_equal(kinds, np.round(kinds)) and kinds.min() >= 0:
            where = dotted(("action", *path))
            yield found("actions-as-floats", "possible", f"'{where}' holds whole numbers as {leaf.dtype}",
                        "store discrete actions as integers",
                        np.arange(len(leaf)), len(leaf), place=steps.place, field=where)  # fmt: skip


def odd_flags(steps: Experience) -> Iterator[Finding]:
    """Flags that are neither 0 nor 1, such as sums of the flags of a window."""
    if steps.odd_flags is not None:
        yield found("flag-not-binary", "certain", "flags of ends are neither 0 nor 1: 1 - done is then no mask",
                    "store whether any step of a window ended, not how many did",
                    steps.odd_flags, len(steps), place=steps.place)  # fmt: skip


def outside_space(steps: Experience, spaces: dict[str, Any]) -> Iterator[Finding]:
    """Observations and actions outside the Gymnasium spaces that are given."""
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


def priorities(steps: Experience) -> Iterator[Finding]:
    """Priorities that are not finite, that belong to rows without a transition, or that are 0."""
    weight, live = steps.priorities, steps.live
    if weight is None:
        return
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
