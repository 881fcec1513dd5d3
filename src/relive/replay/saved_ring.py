"""A replay's ring in a save: the live rows, the cursors and the sampler's state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_args

import numpy as np
from torch import Tensor

from .. import files as persist
from ..errors import FileFormatError
from ..files.entries import entry, integers, require_tensors
from ..memory.blocks import zeroed
from ..memory.layout import row_layout
from ..ring.ring import LARGEST, RULE, Ring
from ..ring.rule import Rule, Weigh
from ..samplers.contract import Sampler
from ..steps.trees import dotted
from .parts import PARAMETERS, describe, kinds, plain
from .validate import STEPS, require_bools, require_sampler_state

__all__ = ["restore_ring", "ring_state"]


PIECE = 1 << 22
"""Bytes of rows copied at a time while a file is written."""


def ring_state(ring: Ring, sampler: Sampler, facts: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The live rows, the cursors and the sampler's state, together with ``facts``: arrays by name, and JSON.

    Rows are copied piece by piece while they are written, and must not change until then. The sampler's arrays with an
    entry for each row are saved for live rows only.
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
        "sampler_state": {name: plain(value) for name, value in state.items() if name not in arrays},
        "sampler_rows": by_row,
    }
    return tensors, content


def _streamed(ring: Ring, shape: tuple[int, ...], dtype: Any, dump: Callable[[Any], Any]) -> persist.Streamed:
    """``dump(places)`` of all live rows, a few MiB at a time."""
    rows, count = max(PIECE // max(math.prod(shape) * dtype.itemsize, 1), 1), ring.rows_live
    starts = range(0, count, rows)
    return persist.Streamed((count, *shape), dtype, lambda: (dump(ring.places(low, low + rows)) for low in starts))


def restore_ring(ring: Ring, sampler: Sampler, tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> None:
    """Put the state that :func:`ring_state` returned into a new ring of the same size, and check it.

    Raises:
        FileFormatError, InvariantError, ValueError, KeyError: the state contradicts itself or the ring.
    """
    store, wanted = ring.store, ring.rule
    ring.state[:] = integers(content, "state", *ring.state.shape)
    ring.counters[:RULE] = integers(content, "counters", RULE)
    ring.check_cursors(LARGEST // 2)  # later steps must fit as well
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
    saved, given = kinds(content.get("sampler")), kinds(describe(sampler))
    same = saved == given or not (saved and given)  # a user's own sampler decides itself what state it accepts
    if same and type(sampler) in PARAMETERS:
        require_sampler_state(parts, by_row, ring)
    for name in by_row:
        full = zeroed(store.num_rows * parts[name].itemsize).view(parts[name].dtype)
        full[places] = parts[name]
        parts[name] = full
    if not same:  # it may not be able to draw what the saved sampler could
        ring.rule = wanted
    sampler.attach(ring)
    if same:
        sampler.load_state_dict(parts)
    elif saved[0] == given[0]:  # the inner sampler is another one and starts empty
        inner = {name: value for name, value in sampler.state_dict().items() if name.startswith("inner.")}
        sampler.load_state_dict({**parts, **inner})


def _rule(parts: list[Any]) -> Rule:
    """The saved rule of what can be drawn.

    Raises:
        FileFormatError: it is not a rule that relive writes.
    """
    if list(map(type, parts)) == [int, int, int, bool, str]:
        rule = Rule(*parts)
        fits = STEPS >= rule.history >= rule.length - 1 and 1 <= rule.stride <= rule.length
        if fits and rule.weigh in get_args(Weigh):
            return rule
    raise FileFormatError(f"the save's entry 'rule' is {parts!r}; expected {list(Rule._fields)}, as relive writes them")
