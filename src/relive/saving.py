"""Buffers to files and back: the rows that are live, the cursors, and the parts by name and parameters.

Nothing of a save is code: a sampler or view is one of relive's own, named, or it is passed by whoever loads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast, get_args

import numpy as np
from torch import Tensor

from . import persist
from .errors import FileFormatError
from .layout import row_layout
from .memory import zeroed
from .parameters import is_names
from .ring import LARGEST, RULE, Ring, Rule, Weigh
from .samplers import Prioritized, Recent, Sampler, Uniform, WithoutReplacement
from .schema import Path, dotted
from .sequence_view import Sequence
from .storage import Columns
from .validate import STEPS, entry, fitting, integers, require_bools, require_sampler_state, require_tensors, whole
from .views import FrameStack, NStep

__all__ = [
    "describe",
    "rebuild",
    "restore_columns",
    "restore_ring",
    "ring_state",
    "save_columns",
]

PARAMETERS: dict[type[Any], tuple[str, ...]] = {
    Uniform: (),
    WithoutReplacement: (),
    Prioritized: ("alpha", "beta", "eps", "stratified", "normalize", "default_error", "eta"),
    Recent: ("sharpest", "c_min", "inner", "adapt"),
    NStep: ("n", "gamma"),
    FrameStack: ("depth", "window", "pad", "keys"),
    Sequence: ("length", "burn_in", "overlap", "n", "gamma", "drop_tail", "time_first", "weigh", "last"),
}
POSITIONAL = {"sharpest": "eta"}
"""Where the constructor has another name for an attribute."""
PIECE = 1 << 22
"""Bytes of rows that are copied at a time on their way to a file."""
LARGEST_PARAMETER = 2**53
"""Whole numbers up to here are floats as well."""

SAMPLERS = {part.__name__: part for part in (Uniform, WithoutReplacement, Prioritized, Recent)}
VIEWS = {part.__name__: part for part in (NStep, FrameStack, Sequence)}
PARTS: dict[str, dict[str, type[Any]]] = {"sampler": SAMPLERS, "inner": SAMPLERS, "view": VIEWS, "window": VIEWS}
"""Which parts there are, by what they are used as."""


def describe(part: Any) -> dict[str, Any] | None:
    """A sampler or view of relive's own as JSON; None for one that a user wrote, or that has a function of theirs.

    Such a one has to be passed to ``load``.
    """
    names = PARAMETERS.get(cast("type[Any]", type(part)))
    if names is None or getattr(part, "each_reward", None) is not None:  # a function of the user's
        return None
    values = {POSITIONAL.get(name, name): getattr(part, name) for name in names}
    inner = {name: describe(value) for name, value in values.items() if isinstance(value, tuple(PARAMETERS))}
    if None in inner.values():
        return None
    return {"part": type(part).__name__, **{name: _plain(value) for name, value in (values | inner).items()}}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(member) for member in cast("tuple[Any, ...]", value)]
    return cast("Any", value).item() if isinstance(value, np.generic) else value  # a number as JSON takes it


def rebuild(data: Any, what: str) -> Any:
    """The part that :func:`describe` described, which is used as ``what``.

    Raises:
        FileFormatError: there is no such part, or its parameters are not right.
    """
    given: dict[str, Any] = dict(cast("dict[str, Any]", data)) if isinstance(data, dict) else {}
    name = given.pop("part", None)
    part = PARTS.get(what, {}).get(name) if isinstance(name, str) else None
    if part is None:
        raise FileFormatError(
            f"the saved {what} is not one of relive's own, or has functions of yours, which no save holds "
            f"({data!r:.200}); pass load(..., {what}=...)"
        )
    known = {POSITIONAL.get(name, name) for name in PARAMETERS[part]}
    try:
        if given.keys() - known:
            raise ValueError(f"it has no {min(given.keys() - known)!r:.80}")
        return part(**{name: _value(value, name) for name, value in given.items()})
    except (TypeError, ValueError, OverflowError) as error:
        raise FileFormatError(
            f"the saved {what} has parameters that make no sense: {given!r:.200} ({error})"
        ) from error


def _value(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return rebuild(cast("dict[str, Any]", value), name)
    if isinstance(value, list):
        return tuple(_value(member, name) for member in cast("list[Any]", value))
    if type(value) is int and abs(value) > LARGEST_PARAMETER:
        raise ValueError(f"{name} is {value!r:.80}")
    return value


def ring_state(ring: Ring, sampler: Sampler, facts: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The live rows, the cursors and the sampler's state, with ``facts``: arrays by name, and what is JSON.

    Rows are copied, if at all, piece by piece while they are written, and have to stay as they are so long. Arrays of
    the sampler with an entry for each row are saved for the live rows alone.
    """
    store, state = ring.store, sampler.state_dict()
    arrays: dict[str, Any] = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    by_row = list(sampler.per_row)
    layout, _ = row_layout(store.leaves)
    tensors: dict[str, Any] = {"rows": _streamed(ring, (layout.nbytes,), np.dtype(np.uint8), store.dump)}
    for name in store.large:
        field = store.leaves[name]
        tensors[f"block.{dotted(name)}"] = _streamed(ring, field.shape, field.dtype, partial(store.dump_large, name))
    for name, value in arrays.items():
        by_place = _streamed(ring, value.shape[1:], value.dtype, value.__getitem__) if name in by_row else None
        tensors[f"sampler.{name}"] = value if by_place is None else by_place.whole()
    content = {
        **facts,
        "rows_per_env": ring.rows,
        "num_envs": ring.num_envs,
        "state": ring.state.tolist(),
        "counters": ring.counters[:RULE].tolist(),
        "rule": list(ring.rule),
        "sampler": describe(sampler),
        "sampler_state": {name: _plain(value) for name, value in state.items() if name not in arrays},
        "sampler_rows": by_row,
    }
    return tensors, content


def _streamed(ring: Ring, shape: tuple[int, ...], dtype: Any, dump: Callable[[Any], Any]) -> persist.Streamed:
    """What ``dump`` gives of the places of live rows, a few MiB at a time."""
    rows, count = max(PIECE // max(math.prod(shape) * dtype.itemsize, 1), 1), ring.rows_live
    starts = range(0, count, rows)
    return persist.Streamed((count, *shape), dtype, lambda: (dump(ring.places(low, low + rows)) for low in starts))


def restore_ring(ring: Ring, sampler: Sampler, tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> None:
    """Put what :func:`ring_state` gave into a new ring of the same size, and check that it makes sense.

    Raises:
        FileFormatError, InvariantError, ValueError, KeyError: it does not.
    """
    store, wanted = ring.store, ring.rule
    ring.state[:] = integers(content, "state", *ring.state.shape)
    ring.counters[:RULE] = integers(content, "counters", RULE)
    ring.check_cursors(LARGEST // 2)  # what comes next has to fit as well
    by_row: set[str] = set(entry(content, "sampler_rows", list))
    blocks, live = {name: f"block.{dotted(name)}" for name in store.large}, ring.rows_live
    arrays = {name.removeprefix("sampler."): name for name in tensors if name.startswith("sampler.")}
    per_row = ["rows", *blocks.values(), *(f"sampler.{name}" for name in by_row)]
    require_tensors(tensors, dict.fromkeys(arrays.values(), ()) | dict.fromkeys(per_row, (live,)))
    rows, places = tensors["rows"].numpy(), ring.places()
    store.restore(places, rows, {name: tensors[block] for name, block in blocks.items()})
    require_bools(store.leaves, rows)
    ring.rule = _rule(entry(content, "rule", list))
    ring.check()
    parts: dict[str, Any] = dict(entry(content, "sampler_state", dict))
    parts |= {name: tensors[array].numpy() for name, array in arrays.items()}
    saved, given = _kinds(content.get("sampler")), _kinds(describe(sampler))
    alike = saved == given or not (saved and given)  # what a user wrote knows by itself what it can go on from
    if alike and type(sampler) in PARAMETERS:
        require_sampler_state(parts, by_row, ring)
    for name in by_row:
        full = zeroed(store.num_rows * parts[name].itemsize).view(parts[name].dtype)
        full[places] = parts[name]
        parts[name] = full
    if not alike:  # what could be drawn by the saved one, through its view, may not be for this one
        ring.rule = wanted
    sampler.attach(ring)
    if alike:
        sampler.load_state_dict(parts)
    elif saved[0] == given[0]:  # around another inner sampler, which starts anew
        inner = {name: value for name, value in sampler.state_dict().items() if name.startswith("inner.")}
        sampler.load_state_dict({**parts, **inner})


def _kinds(part: Any) -> tuple[Any, ...]:
    """What kind a described sampler is of, and the one inside it; nothing for one that a user wrote."""
    return () if part is None else (part["part"], *_kinds(part.get("inner")))


def _rule(parts: list[Any]) -> Rule:
    """What could be drawn of a saved ring.

    Raises:
        FileFormatError: it makes no sense.
    """
    if list(map(type, parts)) == [int, int, int, bool, str]:
        rule = Rule(*parts)
        fits = STEPS >= rule.history >= rule.length - 1 and 1 <= rule.stride <= rule.length
        if fits and rule.weigh in get_args(Weigh):
            return rule
    raise FileFormatError(f"the save's entry 'rule' is {parts!r}; expected {list(Rule._fields)}, as relive writes them")


def save_columns(
    path: str | os.PathLike[str], columns: Columns, facts: Mapping[str, Any], apart: Mapping[str, Tensor]
) -> None:
    """Write the rows of a rollout in the order of time, each column with its bootstrap row, to a directory.

    ``apart`` are further tensors, by names that no column has.
    """
    tensors = {dotted(name): columns.with_last(name) for name in columns.live} | dict(apart)
    attached = [list(name) for name in columns.live if name not in columns.own]
    persist.write(path, tensors, {**facts, "steps": columns.count, "attached": attached})


def restore_columns(columns: Columns, tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> None:
    """Put what :func:`save_columns` wrote into new columns of the same size.

    Raises:
        FileFormatError, ValueError, KeyError, RuntimeError: it does not fit.
    """
    steps = whole(content, "steps")
    if steps > columns.num_steps:
        raise FileFormatError(f"{steps} steps are saved of a rollout of {columns.num_steps}")
    attached = _names(entry(content, "attached", list), columns)
    front = steps + 1, columns.num_envs
    for name in columns.own:
        target = columns.view(name)
        column = fitting(tensors, dotted(name), (*front, *target.shape[2:]), target.dtype)
        target[: steps + 1] = column.to(target.device)
    columns.advance(steps)
    for name in attached:
        column = fitting(tensors, dotted(name), front)
        columns.attach({name: column[:steps].to(columns.device)})


def _names(names: list[Any], columns: Columns) -> list[Path]:
    """The names of attached columns; what is nested has no values of its own.

    Raises:
        FileFormatError: they are no names, or contradict each other or the columns that are there.
    """
    paths = list(columns.own)
    for name in names:
        path: Path = tuple(cast("list[str]", name)) if is_names(name) else ()
        if not all(path) or not path or any(path[: len(x)] == x or x[: len(path)] == path for x in paths):
            raise FileFormatError(f"an attached column is named {name!r:.80}; expected a name that no other has")
        paths.append(path)
    return paths[len(columns.own) :]
