"""Buffers to files and back: the rows that are live, the cursors, and the parts by name and parameters.

Nothing of a save is code: a sampler or view is one of relive's own, named, or it is passed by whoever loads.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast, get_args

import numpy as np
import torch
from torch import Tensor

from . import persist
from .errors import FileFormatError, LifecycleError, ReliveError
from .ring import RULE, Ring, Rule, Weigh
from .samplers import Prioritized, Recent, Sampler, Uniform, WithoutReplacement
from .schema import dotted
from .sequence_view import Sequence
from .storage import Columns
from .store import Array
from .views import FrameStack, NStep

__all__ = [
    "contradictions",
    "describe",
    "entry",
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

NAMES = {part.__name__: part for part in PARAMETERS}


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
    """The part that :func:`describe` described.

    Raises:
        FileFormatError: there is no such part, or its parameters are not right.
    """
    given: dict[str, Any] = dict(cast("dict[str, Any]", data)) if isinstance(data, dict) else {}
    if given.get("part") not in NAMES:
        raise FileFormatError(
            f"the saved {what} is not one of relive's own, or has functions of yours, which no save holds ({data!r}); "
            f"pass load(..., {what}=...)"
        )
    part = NAMES[given.pop("part")]
    try:
        return part(**{name: _value(value, what) for name, value in given.items()})
    except (TypeError, ValueError) as error:
        raise FileFormatError(f"the saved {what} has parameters that make no sense: {given!r} ({error})") from error


def _value(value: Any, what: str) -> Any:
    if isinstance(value, dict):
        return rebuild(cast("dict[str, Any]", value), what)
    return tuple(cast("list[Any]", value)) if isinstance(value, list) else value


def entry(content: Any, name: str, kind: type[Any]) -> Any:
    """One entry of a save's JSON, of the kind that belongs there.

    Raises:
        FileFormatError: it is missing, or of another kind.
    """
    value = content.get(name)
    if type(value) is not kind:
        raise FileFormatError(
            f"the save's entry {name!r} is {value!r}; expected a {kind.__name__}, as relive writes it"
        )
    return value


def ring_state(
    ring: Ring, sampler: Sampler, facts: Mapping[str, Any]
) -> tuple[dict[str, Array | Tensor], dict[str, Any]]:
    """The live rows, the cursors and the sampler's state, with ``facts``: arrays by name, and what is JSON.

    Arrays of the sampler with an entry for each row are saved for the live rows alone.
    """
    store, places = ring.store, _live(ring)
    state = sampler.state_dict()
    arrays: dict[str, Any] = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    by_row = list(sampler.per_row)
    rows, large = store.dump(places)
    tensors: dict[str, Array | Tensor] = {"rows": rows}
    tensors |= {f"block.{dotted(name)}": block for name, block in large.items()}
    tensors |= {f"sampler.{name}": value[places] if name in by_row else value for name, value in arrays.items()}
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


def restore_ring(ring: Ring, sampler: Sampler, tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> None:
    """Put what :func:`ring_state` gave into a new ring of the same size, and check that it makes sense.

    Raises:
        FileFormatError, InvariantError, ValueError, KeyError: it does not.
    """
    store, wanted = ring.store, ring.rule
    state = np.array(entry(content, "state", list), np.int64).reshape(ring.state.shape)
    if (state < 0).any() or (state[:, 1] > state[:, 0]).any():
        raise FileFormatError("the saved cursors are not numbers of rows")
    ring.state[:] = state
    ring.counters[:RULE] = np.array(entry(content, "counters", list), np.int64)
    places = _live(ring)
    blocks = {name: tensors[f"block.{dotted(name)}"] for name in store.large}
    store.restore(places, tensors["rows"].numpy(), blocks)
    ring.rule = _rule(entry(content, "rule", list))
    ring.check()
    parts: dict[str, Any] = dict(entry(content, "sampler_state", dict))
    for name, tensor in tensors.items():
        key = name.removeprefix("sampler.")
        if key in entry(content, "sampler_rows", list):
            full = torch.zeros(store.num_rows, dtype=tensor.dtype)
            full[torch.from_numpy(places)] = tensor
            parts[key] = full.numpy()
        elif key != name:
            parts[key] = tensor.numpy()
    saved, given = _kinds(content.get("sampler")), _kinds(describe(sampler))
    alike = saved == given or not (saved and given)  # what a user wrote knows by itself what it can go on from
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
        if rule.history >= rule.length - 1 and 1 <= rule.stride <= rule.length and rule.weigh in get_args(Weigh):
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
    steps = entry(content, "steps", int)
    if not 0 <= steps <= columns.num_steps:
        raise FileFormatError(f"{steps} steps are saved of a rollout of {columns.num_steps}")
    attached = [tuple(name) for name in entry(content, "attached", list)]
    for name in columns.own:
        column, target = tensors[dotted(name)], columns.view(name)
        if column.dtype is not target.dtype or column.shape != (steps + 1, *target.shape[1:]):
            raise FileFormatError(f"column '{dotted(name)}' is saved as {column.dtype} {tuple(column.shape)}")
        target[: steps + 1] = column.to(target.device)
    columns.advance(steps)
    for name in attached:
        columns.attach({name: tensors[dotted(name)][:steps].to(columns.device)})


def _live(ring: Ring) -> Any:
    return np.concatenate([ring.live_places(env) for env in range(ring.num_envs)])


@contextmanager
def contradictions(path: str | os.PathLike[str]) -> Generator[None]:
    """Whatever goes wrong while a save is taken in, the save is at fault.

    Raises:
        FileFormatError: in place of the error.
        LifecycleError: a sampler or view to load it with is another buffer's, which is not the save's fault.
    """
    try:
        yield
    except FileFormatError:
        raise
    except (ReliveError, ValueError, TypeError, KeyError, IndexError, OverflowError, RuntimeError) as error:
        if type(error) is LifecycleError:
            raise
        raise FileFormatError(f"the save in '{path}' contradicts itself: {error}") from error
