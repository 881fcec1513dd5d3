"""The ring of a replay in a save: writes and restores the live rows, the cursors and the sampler's state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, get_args

import numpy as np

from .. import files
from ..errors import FileFormatError
from ..files.entries import entry, integers
from ..kernels.ring_state import HEAD, NEXT, RULE, TAIL
from ..memory.blocks import zeroed
from ..memory.layout import row_layout
from ..memory.store import Store
from ..printable import shown
from ..ring.invariants import LARGEST, check, check_cursors
from ..ring.ring import Ring
from ..ring.rule import Rule, Weigh
from ..ring.span import Span
from ..samplers.contract import Sampler
from ..steps.trees import dotted
from .conversion import Conversion
from .parts import PARAMETERS, describe, kinds, plain
from .sources import RowPart, Source
from .validate import STEPS, require_bools, require_sampler_state

__all__ = ["RowField", "restore_ring", "ring_state", "row_arrays", "row_fields"]


PIECE = 1 << 22
"""Bytes of rows that are copied at a time on their way to a file."""


def ring_state(ring: Ring, sampler: Sampler, facts: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The cursors and the sampler's state, with ``facts``: arrays by name, and what is JSON.

    Arrays of the sampler with an entry for each row are saved for the live rows alone.
    """
    state = sampler.state_dict()
    arrays: dict[str, Any] = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    by_row, span = list(sampler.per_row), ring.span
    tensors = {f"sampler.{name}": _by_row(ring, span, x) if name in by_row else x for name, x in arrays.items()}
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


def _by_row(ring: Ring, span: Span, value: Any) -> files.Streamed:
    """The entries for the rows of a span of an array with an entry for each row."""
    runs = partial(span.runs, ring.rows)
    return files.Streamed((span.size, *value.shape[1:]), value.dtype, lambda: (value[run] for run in runs()))


class RowField(NamedTuple):
    """A tensor of a save with an entry for each row: the packed fields, or a large one."""

    shape: tuple[int, ...]
    dtype: Any
    dump: Callable[[Any], Any]
    """Gives the entries ``[K, *shape]`` of the rows at places ``[K]``; they may lie in the ring's own memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of an entry."""
        return math.prod(self.shape) * self.dtype.itemsize

    def pieces(self, size: int) -> Iterator[tuple[int, int]]:
        """``size`` rows as ranges of a few MiB each."""
        rows = max(PIECE // max(self.nbytes, 1), 1)
        return ((low, min(low + rows, size)) for low in range(0, size, rows))


def row_fields(store: Store) -> dict[str, RowField]:
    """What a save has of each row, by name."""
    layout, _ = row_layout(store.leaves)
    found = {"rows": RowField((layout.nbytes,), np.dtype(np.uint8), store.dump)}
    for path in store.large:
        field = store.leaves[path]
        found[f"block.{dotted(path)}"] = RowField(field.shape, field.dtype, partial(store.dump_large, path))
    return found


def row_arrays(ring: Ring, span: Span, prefix: str = "") -> dict[str, Any]:
    """The rows of a span by name: the packed fields, and a block for each large one.

    If they are copied, then piece by piece while they are written. So they must not change before that.
    """
    return {f"{prefix}{name}": _streamed(ring, span, field) for name, field in row_fields(ring.store).items()}


def _streamed(ring: Ring, span: Span, field: RowField) -> files.Streamed:
    """One field of a span's rows, a few MiB at a time."""
    shape = (span.size, *field.shape)
    places = partial(span.places, ring.rows)
    return files.Streamed(shape, field.dtype, lambda: (field.dump(places(*p)) for p in field.pieces(shape[0])))


def restore_ring(ring: Ring, sampler: Sampler, source: Source, saved_rows: int, conversion: Conversion) -> None:
    """Put a saved state into a new ring, and check that the state makes sense.

    If the new ring has fewer rows per env than the saved one, it gets the newest rows of each env.

    Args:
        ring: the new ring, of as many envs.
        sampler: its sampler.
        source: the saved state.
        saved_rows: the rows per env of the saved ring.
        conversion: turns saved rows into rows of this ring.

    Raises:
        FileFormatError, InvariantError, ValueError, KeyError: the state does not make sense.
        DoesNotFitError: a saved number does not fit into its new dtype.
    """
    content, wanted = source.content, ring.rule
    ring.state[:] = integers(content, "state", *ring.state.shape)
    ring.counters[:RULE] = integers(content, "counters", RULE)
    oldest = np.maximum(ring.state[:, TAIL], ring.state[:, HEAD] - saved_rows)
    if ring.rows > saved_rows:  # there is room for older rows, but no save has them
        ring.state[:, TAIL] = oldest
    check_cursors(ring, LARGEST // 2)  # what comes next has to fit as well
    saved = Span(oldest, ring.heads.copy())
    for part in source.parts(saved, conversion.large):
        _restore_part(ring, part, conversion)
    ring.rule = _rule(entry(content, "rule", list))  # counts what can be drawn
    check(ring, recount=False)
    _restore_sampler(ring, sampler, source, saved, wanted)


def _restore_part(ring: Ring, part: RowPart, conversion: Conversion) -> None:
    """Write those rows of a part that are live."""
    rows: Any = part.rows.numpy()
    require_bools(conversion.saved, rows)
    live = part.span.meet(ring.span)
    chosen = part.span.where(live)
    large = {path: block[chosen] for path, block in part.large.items()}
    packed, large = conversion(rows[chosen], large, lambda: _under_way(ring, live))
    ring.store.restore(live.places(ring.rows), packed, large)


def _under_way(ring: Ring, live: Span) -> Any:
    """Whether each row is the newest row of a running episode, bool ``[K]``."""
    env, number = live.rows()
    return (number == ring.heads[env] - 1) & (ring.state[env, NEXT] > 0)


def _restore_sampler(ring: Ring, sampler: Sampler, source: Source, saved: Span, wanted: Rule) -> None:
    """Give the sampler the ring and, if it is of the saved kind, its state."""
    content, live = source.content, ring.span
    by_row: set[str] = set(entry(content, "sampler_rows", list))
    tensors = source.sampler_tensors(by_row, saved.size)
    parts: dict[str, Any] = dict(entry(content, "sampler_state", dict))
    parts |= {name: tensor.numpy() for name, tensor in tensors.items()}
    was, given = kinds(content.get("sampler")), kinds(describe(sampler))
    alike = was == given or not (was and given)  # a user's own sampler decides by itself what it can go on from
    if alike and type(sampler) in PARAMETERS:
        require_sampler_state(parts, by_row, ring)
    for name in by_row:
        full = zeroed(ring.store.num_rows * parts[name].itemsize).view(parts[name].dtype)
        full[live.places(ring.rows)] = parts[name][saved.where(live)]
        parts[name] = full
    if not alike:  # what could be drawn by the saved one, through its view, may not be for this one
        ring.rule = wanted
    sampler.attach(ring)
    if alike:
        sampler.load_state_dict(parts)
    elif was[0] == given[0]:  # around another inner sampler, which starts anew
        inner = {name: value for name, value in sampler.state_dict().items() if name.startswith("inner.")}
        sampler.load_state_dict({**parts, **inner})


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
    raise FileFormatError(
        f"the save's entry 'rule' is {shown(parts)}; expected {list(Rule._fields)}, as relive writes them"
    )
