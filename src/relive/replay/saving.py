"""A replay as arrays and JSON, for saves and for pickle, and a new one with that state."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import pairwise
from pathlib import Path as FilePath
from threading import Condition, Event, Lock
from typing import Any, NamedTuple, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import files
from .. import files as persist
from ..errors import FileFormatError, LifecycleError, NoSaveError, ParameterError
from ..files import disk
from ..files.disk import MOST, entry, fitting, integers, whole
from ..files.mapped import MappedCopy, MappedDirectory
from ..files.save import EXTRA, read_extra, to_json
from ..kernels.reference.priorities import LARGEST_ERROR
from ..kernels.tables import COLUMNS, COMPLETED, COUNT, HEAD, NEXT, RULE, TAIL
from ..memory.estimate import free_memory, storage_plan
from ..memory.keeper import zeroed
from ..memory.layout import BOOKKEEPING, row_layout, typed
from ..memory.ram import in_ram
from ..memory.store import Store
from ..parameters import is_count, is_number
from ..printable import shown
from ..ring.ring import LARGEST, Ring, Rule, Span, Weigh, check, check_cursors
from ..samplers.contract import Sampler
from ..samplers.prioritized import Prioritized
from ..samplers.recent import Recent
from ..samplers.uniform import Uniform, WithoutReplacement
from ..steps.arrays import Ints, numpy_view
from ..steps.changes import Origin, SchemaChanges
from ..steps.schema import Field, Path, Schema, dotted
from ..views.frames import FrameStack
from ..views.returns_to_go import ReturnsToGo
from ..views.sequences import Sequence as SequenceView
from ..views.transitions import NStep
from .checks import stored_fields
from .durable import Progress
from .reader import Reader
from .writer import Writer

__all__ = [
    "KIND",
    "SAMPLER",
    "STEPS",
    "Conversion",
    "ReplaySave",
    "RowField",
    "RowPart",
    "Saver",
    "Segment",
    "SegmentPlan",
    "Segments",
    "Snapshot",
    "Source",
    "changed_arguments",
    "complete_rows",
    "dealt",
    "describe",
    "is_segment",
    "load_extra",
    "new_segment",
    "open_save",
    "plan_segments",
    "read_sampler",
    "rebuild",
    "require_bools",
    "require_reach",
    "require_sampler_state",
    "require_unordered",
    "restore_ring",
    "ring_state",
    "row_arrays",
    "row_fields",
    "saved_arguments",
    "segment_prefix",
    "typed_tensors",
    "write_sampler",
]


LARGE_SHARE = 16
"""New rows are cut into segments of at most this share of the capacity. So the disk holds few rows that are gone."""


SMALL_SHARE = 128
"""Segments of up to this share of the capacity are joined with later ones, to keep their number low."""


SMALL_BYTES = 1 << 20
"""Segments of fewer bytes than this are joined, and rows of fewer bytes are not cut, whatever their share is."""


KNOWN = 4
"""For how many directories a buffer remembers its segments."""


_NAME = re.compile("[0-9a-f]{16}")


class Segment(NamedTuple):
    """Rows in a file of their own."""

    name: str
    """16 hexadecimal digits, drawn at random. No two segments share a name, so equal names mean equal rows."""
    span: Span
    """Which rows. Some may have left the buffer since."""


class SegmentPlan(NamedTuple):
    """The complete rows of a save."""

    kept: list[Segment]
    """Segments of the save in place that the new one keeps."""
    new: list[Segment]
    """Segments to write, which follow the kept ones."""


class Segments:
    """Which segments of a buffer lie in which directories."""

    def __init__(self) -> None:
        self._known: dict[str, list[Segment]] = {}
        self.frozen = True
        """Whether rows stay as they are once they are complete."""
        self.era = 0
        """How often :meth:`forget` was called."""

    def at(self, path: str | os.PathLike[str]) -> list[Segment]:
        """The segments in a directory, the oldest first, as far as they are known."""
        return self._known.get(os.path.realpath(path), []) if self.frozen else []

    def note(self, path: str | os.PathLike[str], segments: list[Segment], era: int | None = None) -> None:
        """Remember the segments that are in a directory now. They hold the rows as they were in ``era``, or are now."""
        where, known = os.path.realpath(path), self._known  # taken first: a thread may call `forget` at any time
        if era not in (None, self.era):
            return
        known.pop(where, None)
        known[where] = segments
        while len(known) > KNOWN:
            known.pop(next(iter(known)))

    def forget(self) -> None:
        """Forget all segments, because rows that were stored before have changed."""
        self.era += 1
        self._known = {}

    def give_up(self) -> None:
        """Never keep a segment again, because rows may change at any time from now on."""
        self.frozen = False


def is_segment(name: object) -> bool:
    """Whether this can be the name of a segment."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def new_segment(span: Span) -> Segment:
    """A segment of these rows, with a name of its own."""
    return Segment(os.urandom(8).hex(), span)


def complete_rows(ring: Ring) -> Span:
    """The live rows, without the newest row of each running episode, which the next step will complete."""
    live = ring.span
    return Span(live.first, np.maximum(live.until - ring.under_way, live.first))


def plan_segments(live: Span, stable: Span, known: Iterable[Segment], capacity: int, row_bytes: int) -> SegmentPlan:
    """How to save rows into a directory that holds the segments ``known``, the oldest first.

    Args:
        live: the rows to save.
        stable: the complete ones among these rows; see :func:`complete_rows`.
        known: the segments.
        capacity: rows of all envs together.
        row_bytes: bytes of a row in a file.
    """
    kept = [segment for segment in known if segment.span.meet(live).size]
    stored = sum(segment.span.size for segment in kept)
    if stored - _shared(kept, live) > live.size:  # envs that stand still keep rows of the others on the disk
        kept = []
    new = Span(np.maximum(kept[-1].span.until, live.first) if kept else live.first, stable.until)
    least = max(SMALL_BYTES // row_bytes, 1)
    small, large = max(capacity // SMALL_SHARE, least), max(capacity // LARGE_SHARE, least)
    while kept and new.size:  # so segments below `small` at least halve in size from each to the next
        last = kept[-1].span.meet(live)
        if last.size > new.size or last.size + new.size > small:
            break
        new = Span(last.first, new.until)
        kept.pop()
    return SegmentPlan(kept, [new_segment(part) for part in _cut(new, large)])


def _shared(segments: Iterable[Segment], live: Span) -> int:
    """How many rows of the segments are live."""
    return sum(segment.span.meet(live).size for segment in segments)


def _cut(span: Span, most: int) -> Sequence[Span]:
    """About equal parts of at most about ``most`` rows; none if there are no rows."""
    parts, length = -(-span.size // most), span.until - span.first
    cuts = [span.first + length * k // max(parts, 1) for k in range(parts + 1)]
    return [Span(low, high) for low, high in pairwise(cuts)]


def segment_prefix(name: str) -> str:
    """What the names of a segment's tensors begin with."""
    return f"segment.{name}."


class RowPart(NamedTuple):
    """Some rows of a saved ring."""

    span: Span
    rows: Tensor
    """The packed rows, uint8 ``[K, W]``."""
    large: dict[Path, Tensor]
    """The large fields, ``[K, *shape]``."""


class Source:
    """The state of a replay: its JSON, and its tensors, which are read when they are needed.

    The rows are in one part, or in segments if the JSON has an entry of that name.

    Args:
        content: the JSON.
        shapes: the shape of each tensor.
        read: returns tensors by name, at least those asked for.
        where: the file that holds a tensor, for messages.
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        read: Callable[[Iterable[str]], Mapping[str, Tensor]],
        where: Callable[[str], str] = lambda name: "the state",
    ) -> None:
        self.content, self._shapes, self._read, self._where = content, shapes, read, where
        self.segments: list[Segment] = []
        """The segments that were read."""

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> Source:
        """A state in memory."""
        return cls(content, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, lambda names: tensors)

    @classmethod
    def of_save(cls, save: persist.Save) -> Source:
        """A save that is open for reading."""
        specs = save.specs
        return cls(
            save.content,
            {name: spec.shape for name, spec in specs.items()},
            lambda names: save.read(names=names, most=free_memory()),
            lambda name: specs[name].file,
        )

    @property
    def row_count(self) -> int:
        """How many rows the source has."""
        rows = [self._shapes.get(f"{prefix}rows") for prefix in self._prefixes()]
        return sum(shape[0] for shape in rows if shape)

    def parts(self, saved: Span, large: Iterable[Path]) -> Iterator[RowPart]:
        """All rows, part by part, the oldest part first. ``saved`` are the live rows.

        Raises:
            FileFormatError: a tensor is missing or foreign; or the segments are not in order, or lack a row.
        """
        blocks, prefixes = {path: f"block.{dotted(path)}" for path in large}, self._prefixes()
        apart = "segments" in self.content
        self._require_names(prefixes, ["rows", *blocks.values(), *(["span"] if apart else [])])
        found, before = 0, np.zeros_like(saved.first)
        for prefix in prefixes:
            names = [f"{prefix}rows", *(f"{prefix}{block}" for block in blocks.values())]
            span_name = f"{prefix}span"
            tensors = self._read([*names, span_name] if apart else names)
            span = _span(tensors, span_name, saved) if apart else saved
            for name in names:
                fitting(tensors, name, (span.size,))
            if (span.first < before).any() and span.size:
                raise FileFormatError(
                    f"'{self._where(span_name)}': the rows of this segment come before those of the one listed before "
                    "it; restore the manifest and the data files from one copy"
                )
            found, before = found + span.meet(saved).size, np.maximum(before, span.until)
            if apart:
                self.segments.append(Segment(prefix.split(".")[1], span))
            yield RowPart(span, tensors[names[0]], {path: tensors[f"{prefix}{b}"] for path, b in blocks.items()})
        if found != saved.size:
            raise FileFormatError(
                f"the segments hold {found} of the {saved.size} rows that the cursors state; restore the manifest and "
                "the data files from one copy"
            )

    def sampler_tensors(self, by_row: Iterable[str], count: int) -> dict[str, Tensor]:
        """The arrays of the sampler; those named in ``by_row`` have an entry for each of ``count`` rows.

        Raises:
            FileFormatError: one is missing, or has another length.
        """
        full = [name for name in self._shapes if name.startswith("sampler.")]
        tensors: Mapping[str, Tensor] = self._read(full) if full else {}
        for name in by_row:
            fitting(tensors, f"sampler.{name}", (count,))
        return {name.removeprefix("sampler."): tensors[name] for name in full}

    def _prefixes(self) -> list[str]:
        """The beginning of the tensors' names in each part.

        Raises:
            FileFormatError: the entry for the segments is not a list of their names.
        """
        if "segments" not in self.content:
            return [""]
        names = entry(self.content, "segments", list)
        if not all(map(is_segment, names)):
            raise FileFormatError(
                f"the save's entry 'segments' is {shown(names)}; expected names of 16 hexadecimal digits"
            )
        return [segment_prefix(name) for name in names]

    def _require_names(self, prefixes: Iterable[str], names: Iterable[str]) -> None:
        """Require these tensors of each part, and besides them only the sampler's and the learner's."""
        wanted = {f"{prefix}{name}" for prefix in prefixes for name in names}
        others = {name for name in self._shapes if name.startswith(("sampler.", EXTRA))}
        if wrong := sorted((self._shapes.keys() - others) ^ wanted):
            raise FileFormatError(
                f"the save has the tensors {shown(list(self._shapes), 200)}; {shown(wrong[0])} is missing or foreign"
            )


def _span(tensors: Mapping[str, Tensor], name: str, saved: Span) -> Span:
    """The rows of a segment.

    Raises:
        FileFormatError: these are not ranges of rows that were ever stored.
    """
    first, until = fitting(tensors, name, (2, len(saved.first)), torch.int64).numpy()
    if (first < 0).any() or (until < first).any() or (until > saved.until).any():
        raise FileFormatError(
            f"tensor {shown(name)}: expected ranges of rows of this buffer, got {shown([first, until], 200)}"
        )
    return Span(first, until)


class Conversion:
    """Turns packed rows and large fields into those of other fields; without changes, it returns them as they are.

    Args:
        saved: the saved leaves, with ``next_obs`` if each row has its own.
        leaves: the leaves of the new buffer.
        origins: where each leaf of the new schema comes from; None if nothing changes.
    """

    def __init__(
        self, saved: Mapping[Path, Field], leaves: Mapping[Path, Field], origins: Mapping[Path, Origin] | None
    ) -> None:
        self.saved, self._leaves = saved, leaves
        self._origins = None if origins is None else {path: _origin(origins, path) for path in leaves}
        self._old, large = row_layout(saved)
        self._new, _ = row_layout(leaves)
        self.large = tuple(path for path in saved if path in large)
        """The saved fields that are not in the packed rows."""

    def __call__(
        self, rows: Any, large: Mapping[Path, Tensor], under_way: Callable[[], Any]
    ) -> tuple[Any, dict[Path, Tensor]]:
        """The rows (uint8 ``[K, W]``) and large fields ``[K, *shape]`` for the new buffer.

        ``under_way`` is called if needed. It returns flags ``[K]``, True for the newest rows of running episodes. These
        rows and complete transitions have all fields. Other rows are final observations; their other fields hold
        arbitrary bytes.

        Raises:
            DoesNotFitError: a saved number does not fit into its new dtype.
        """
        if self._origins is None:
            return rows, dict(large)
        packed = np.zeros((len(rows), self._new.nbytes), np.uint8)
        old, new = self._old.tensors(np.ascontiguousarray(rows)), self._new.tensors(packed)
        for path in BOOKKEEPING:
            new[path].copy_(old[path])
        whole = torch.ones(len(rows), dtype=torch.bool)
        steps = (old["_stamp",] >= 0) | torch.from_numpy(under_way())
        saved, blocks = {**old, **large}, dict[Path, Tensor]()
        for path, origin in self._origins.items():
            used = whole if path[0] in ("obs", "next_obs") else steps
            values = origin.values(saved, len(rows), used, dotted(path))
            if path in new:
                new[path].copy_(values)
            else:
                blocks[path] = values.contiguous()
        return packed, blocks


def _origin(origins: Mapping[Path, Origin], path: Path) -> Origin:
    """Where a stored leaf comes from; a next observation comes from where the observation does."""
    if path[0] != "next_obs":
        return origins[path]
    origin = origins["obs", *path[1:]]
    return origin if origin.value is not None else origin._replace(source=("next_obs", *origin.source[1:]))


REACH = 2**16
"""The most rows that one item of a saved view may span. A save with more rows may have longer items."""


STEPS = 2**31 - 1
"""The most rewards of an n-step window: their number is stored as an int32."""


def require_bools(leaves: Mapping[Path, Field], rows: NDArray[np.uint8]) -> None:
    """Refuse packed rows with flags other than 0 and 1. Compiled code could take another byte for True or for False.

    Raises:
        FileFormatError: names the field.
    """
    layout, _ = row_layout(leaves)
    for path, array in layout.arrays(rows).items():
        if array.dtype == np.bool_ and array.view(np.uint8).max(initial=0) > 1:
            raise FileFormatError(f"field '{dotted(path)}' is bool and has bytes other than 0 and 1")


def require_reach(view: Any, rows: int) -> None:
    """Refuse a saved view whose items would be larger than the whole save, since a batch could take all memory.

    Raises:
        FileFormatError: names the view and the limit.
    """
    parts = [view]
    while hasattr(parts[-1], "window"):
        parts.append(parts[-1].window)
    reach = max(getattr(part, "rows", getattr(part, "depth", 1)) for part in parts)
    if reach > max(REACH, rows) or parts[-1].n > STEPS:
        raise FileFormatError(
            f"the saved view {view!s:.200} spans more rows than the {rows} of the save; if you want that, pass "
            "load(..., view=...)"
        )


def require_sampler_state(state: Mapping[str, Any], by_row: Iterable[str], ring: Ring) -> None:
    """Refuse values that none of relive's own samplers would save. Entries with unknown names are not checked.

    ``by_row`` names the arrays with an entry for each live row.

    Raises:
        FileFormatError: names the entry.
    """
    for name, value in state.items():
        known = name.removeprefix("inner.")
        if known in _STATE and not ((name in by_row) == (known == "errors") and _STATE[known](value, ring)):
            raise FileFormatError(f"the sampler's {shown(name)} is {shown(value)}, which it cannot be")


def _are_numbers(values: Any, dtype: type[Any]) -> bool:
    if not isinstance(values, np.ndarray):
        return False
    array = cast("NDArray[Any]", values)
    return array.ndim == 1 and array.dtype == dtype and not (~np.isfinite(array)).any()


def _are_errors(values: Any, ring: Ring) -> bool:
    return _are_numbers(values, np.float32) and not (values < 0).any()


def _is_order(values: Any, ring: Ring) -> bool:
    if not _are_numbers(values, np.int64) or (values < 0).any():
        return False
    sorted_values = np.sort(values)
    issued = values // ring.num_envs < ring.heads[values % ring.num_envs]
    return bool(issued.all() and (sorted_values[1:] != sorted_values[:-1]).all())


def _is_count(value: Any, ring: Ring) -> bool:
    return is_count(value) and value <= MOST


def _is_error(value: Any, ring: Ring) -> bool:
    return is_number(value, 0, LARGEST_ERROR)


def _is_share(value: Any, ring: Ring) -> bool:
    return is_number(value, 0, 1)


def _are_slopes(values: Any, ring: Ring) -> bool:
    return _are_numbers(values, np.float64) and len(values) == 2 and bool((values >= 0).all())


def _are_returns(values: Any, ring: Ring) -> bool:
    return _are_numbers(values, np.float64) and len(values) <= 20


_STATE: dict[str, Callable[[Any, Ring], bool]] = {
    "errors": _are_errors,
    "largest": _is_error,
    "draws": _is_count,
    "order": _is_order,
    "eta": _is_share,
    "steepest": _are_slopes,
    "returns": _are_returns,
}
"""The check of each entry of a sampler's saved state."""


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


Rows = Callable[[Span, str], Mapping[str, Any]]
"""Gives the fields of the rows of a span by name, with a prefix."""


class ReplaySave:
    """What one save of a replay writes. The caller holds the replay's lock while it makes this.

    Args:
        ring: the ring.
        known: the segments that the directory is known to hold, the oldest first.
        arrays: everything in arrays but rows and ``extra``, by name.
        content: what of that is JSON.
        extra: the learner's state.

    Raises:
        FileFormatError, DTypeError, FieldError: ``extra`` has a value that cannot be stored.
    """

    def __init__(
        self, ring: Ring, known: Iterable[Segment], arrays: Mapping[str, Any], content: Mapping[str, Any], extra: Any
    ) -> None:
        described, self._learner = to_json(extra)
        self._arrays, self._content = arrays, {**content, "extra": described}
        self._known, self._live, self.stable = list(known), ring.span, complete_rows(ring)
        self._last = new_segment(Span(self.stable.until, self._live.until))
        self._newest: Mapping[str, Any] = row_arrays(ring, self._last.span, segment_prefix(self._last.name))
        fields = row_fields(ring.store)
        self._parts = ["span", *fields]
        self._sizes = ring.rows * ring.num_envs, sum(field.nbytes for field in fields.values())
        self._rows: Rows = partial(row_arrays, ring)
        self._planned: Callable[[SegmentPlan], object] | None = None
        self.segments: list[Segment] = []
        """The segments that later saves can keep, once :meth:`change` was called."""

    def detach(self, rows: Rows, planned: Callable[[SegmentPlan], object]) -> None:
        """Copy everything but the complete rows. ``rows`` gives those, and is preceded by a call of ``planned``."""
        self._arrays, self._learner = files.detached(self._arrays), files.detached(self._learner)
        self._newest = files.detached(self._newest)
        self._rows, self._planned = rows, planned

    def change(self, present: files.Contents) -> files.Change:
        """The content that replaces the save which is present."""
        planned = plan_segments(self._live, self.stable, self._still_there(present), *self._sizes)
        if self._planned is not None:
            self._planned(planned)
        self.segments = [*planned.kept, *planned.new]
        kept = {segment.name for segment in planned.kept}
        return files.Change(
            [
                *(
                    _with_span(segment, self._rows(segment.span, segment_prefix(segment.name)))
                    for segment in planned.new
                ),
                self._learner,
                {**self._arrays, **_with_span(self._last, self._newest)},
            ],
            {**self._content, "segments": [segment.name for segment in (*self.segments, self._last)]},
            present.of_tensors([name for name in present.specs if _segment_of(name) in kept]),
        )

    def _still_there(self, present: files.Contents) -> list[Segment]:
        """The first segments of a directory, up to the first one that is not there as it was written."""
        for i, segment in enumerate(self._known):
            prefix = segment_prefix(segment.name)
            if not all(f"{prefix}{part}" in present.specs for part in self._parts):
                return self._known[:i]
        return self._known


def _segment_of(name: str) -> str | None:
    """The name of the segment that a tensor belongs to; None if it belongs to none."""
    return name.split(".")[1] if name.startswith("segment.") else None


def _with_span(segment: Segment, rows: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors in the files of a segment."""
    return {f"{segment_prefix(segment.name)}span": np.stack(segment.span), **rows}


ASIDE = 1 << 25
"""The most bytes of rows that are set aside. At this limit, a thread that adds waits until the save has read more."""


AHEAD = 1 << 20
"""How many bytes of rows are set aside at once; more if one step overwrites more."""


class Aside(NamedTuple):
    """Rows that were copied before others took their places."""

    span: Span
    fields: dict[str, Any]
    """Each field of these rows as an array ``[K, *shape]``."""
    nbytes: int


class Snapshot:
    """The complete rows of a ring at the instant when this was made. They are read once, segment by segment.

    A complete row does not change until another row takes its place. Before that happens, the ring calls
    :meth:`make_way`, which copies the rows that the save has yet to read. Copies and reads exclude each other by a lock
    of their own. So neither waits for the replay's lock, nor for the disk.

    The caller holds the replay's lock while it makes and opens the snapshot, and calls :meth:`close` in the end.

    Args:
        ring: the rows.
        stable: the complete ones.
    """

    def __init__(self, ring: Ring, stable: Span) -> None:
        self._ring, self._stable, self._fields = ring, stable, row_fields(ring.store)
        self._row_bytes = sum(field.nbytes for field in self._fields.values())
        self._safe = stable.first.copy()
        """For each env, rows below this number may be overwritten: they were read, set aside, or are not needed."""
        self._aside: list[Aside] = []
        self._changed, self._process = Condition(Lock()), os.getpid()
        self.over = Event()
        """Set when no row is needed any more."""

    def open(self) -> None:
        """Let the ring call :meth:`make_way` from now on. After this, the ring may go on."""
        self._ring.before_overwriting = self.make_way

    # -- the thread that saves ----------------------------------------------------------------------------------

    def plan(self, plan: SegmentPlan) -> None:
        """Let go of all rows but those of new segments: only these will be read."""
        with self._changed:
            self._let_go(plan.new[0].span.first if plan.new else self._stable.until)

    def arrays(self, span: Span, prefix: str) -> dict[str, files.Streamed]:
        """The fields of a new segment's rows, as :func:`relive.replay.saving.row_arrays` gives them."""
        left, size = set(self._fields), span.size
        return {
            f"{prefix}{name}": files.Streamed(
                (size, *field.shape), field.dtype, partial(self._parts, span, name, field, left)
            )
            for name, field in self._fields.items()
        }

    def close(self) -> None:
        """Let go of all rows: the save needs no more of them, or it failed."""
        with self._changed:
            self._ring.before_overwriting = None
            self._aside = []
            self.over.set()
            self._changed.notify_all()

    def _parts(self, span: Span, name: str, field: RowField, left: set[str]) -> Iterator[Any]:
        """One field of a segment, piece by piece. After the last field, the segment's rows are let go."""
        for low, high in field.pieces(span.size):
            with self._changed:
                if self.over.is_set():
                    raise LifecycleError(
                        "the call that began this save was interrupted, so there is no save; save again"
                    )
                part = self._read(span, low, high, name, field)
            yield part
        left.discard(name)
        if not left:
            with self._changed:
                self._let_go(span.until)

    def _read(self, span: Span, low: int, high: int, name: str, field: RowField) -> Any:
        """A copy of rows ``low`` to ``high`` of a span. Rows that were set aside are taken from there."""
        found = _copied(field.dump(span.places(self._ring.rows, low, high)))
        if (self._safe <= span.first).all():
            return found
        env, number = span.rows(low, high)
        late = np.flatnonzero(number < self._safe[env])  # overwritten, or about to be
        for aside in self._aside if len(late) else ():
            first, until = aside.span
            mine = late[(number[late] >= first[env[late]]) & (number[late] < until[env[late]])]
            begin = np.cumsum(until - first) - (until - first)
            _bits(found)[mine] = aside.fields[name][begin[env[mine]] + number[mine] - first[env[mine]]]
        return found

    def _let_go(self, until: Ints) -> None:
        """Let rows below these numbers be overwritten. The lock is held."""
        self._safe = np.maximum(self._safe, until)
        self._aside = [aside for aside in self._aside if (aside.span.until > np.maximum(until, aside.span.first)).any()]
        self._changed.notify_all()

    # -- threads that change the ring ---------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until no row is needed any more."""
        if self._process == os.getpid():
            self.over.wait()

    def make_way(self, envs: Ints) -> None:
        """Copy the rows that the next steps of ``envs`` overwrite, if the save has yet to read them.

        Each entry of ``envs`` stands for a step, which takes at most two rows.
        """
        if self._process != os.getpid():  # a fork has no thread that saves
            self._ring.before_overwriting = None
            return
        ring = self._ring
        upto = ring.heads - ring.rows + 2 * np.bincount(envs, minlength=ring.num_envs)
        if (np.minimum(upto, self._stable.until) > self._safe).any():
            with self._changed:
                self._set_aside(upto)

    def _set_aside(self, upto: Ints) -> None:
        """Copy rows below the numbers ``upto``, and some more. Wait while too many are set aside. The lock is held."""
        while True:
            span = self._due(upto)
            nbytes, held = span.size * self._row_bytes, sum(aside.nbytes for aside in self._aside)
            if self.over.is_set() or not nbytes:
                return
            if not held or held + nbytes <= ASIDE:
                break
            self._changed.wait()
        places = span.places(self._ring.rows)
        fields = {name: _bits(_copied(field.dump(places))) for name, field in self._fields.items()}
        self._aside.append(Aside(span, fields, nbytes))
        self._safe = np.maximum(self._safe, span.until)  # last: after an exception the next add copies them again

    def _due(self, upto: Ints) -> Span:
        """The rows to copy so that the rows before ``upto`` may be overwritten, and up to ``AHEAD`` bytes more."""
        first, end = self._safe, self._stable.until
        behind = np.minimum(upto, end) > first
        more = AHEAD // (self._row_bytes * max(np.count_nonzero(behind), 1))
        return Span(first, np.where(behind, np.minimum(np.maximum(upto, first + more), end), first))


def _copied(values: Any) -> Any:
    """A copy that shares no memory with the ring."""
    return values.clone() if isinstance(values, Tensor) else np.array(values)


def _bits(values: Any) -> Any:
    """An array over the memory of an array or a tensor."""
    return numpy_view(values) if isinstance(values, Tensor) else values


KIND = "relive.ReplayBuffer"


State = tuple[dict[str, Any], dict[str, Any]]
"""Arrays by name, and what is JSON."""


class Saver:
    """The saving side of a replay: its state for files and for pickle. Its caller holds the replay's lock.

    Args:
        writer: stores the replay's steps.
        reader: reads its batches.
        progress: the counts of its draws.
        device: where its rows live.
    """

    def __init__(self, writer: Writer, reader: Reader, progress: Progress, device: torch.device) -> None:
        self._writer, self._reader, self._progress, self._device = writer, reader, progress, device
        self.segments = Segments()
        """Which rows lie in which directories already."""
        self.saves = files.Saves()
        """The save under way."""
        self._snapshot: Snapshot | None = None

    def state(self) -> State:
        """The whole state of the replay, without its rows."""
        writer, progress = self._writer, self._progress
        facts = {
            "kind": KIND,
            "schema": json.loads(writer.schema.to_json()),
            "ordered": writer.ordered,
            "own_next_obs": writer.own_next_obs,
            "check_ends": writer.check_ends,
            "debug": writer.debug,
            "seed": progress.seed,
            "counts": progress.counts,
            "first": progress.first,
            "not_finite_rewards": writer.ring.not_finite,
            "view": describe(self._reader.view),
        }
        with progress.undone(writer.sampler):  # a loaded replay draws again what the learner had not taken
            return ring_state(writer.ring, writer.sampler, facts)

    def whole_state(self) -> State:
        """The whole state of the replay, with all rows in memory."""
        ring, (arrays, content) = self._writer.ring, self.state()
        arrays = row_arrays(ring, ring.span) | arrays
        return {name: x.whole() if isinstance(x, files.Streamed) else x for name, x in arrays.items()}, content

    def write(self, path: str | os.PathLike[str], extra: Any, taken: Callable[[], object]) -> files.SaveHandle:
        """Write everything to the directory ``path``. Segments that are there already are kept.

        ``extra`` is the learner's state. ``taken`` is called once nothing in memory is needed any more.
        """
        save = self._save(path, extra)
        files.update(path, save.change, taken=taken)
        self.segments.note(path, save.segments)
        return files.SaveHandle(path)

    def start(self, path: str | os.PathLike[str], extra: Any) -> files.SaveHandle:
        """As :meth:`write`, in another thread: it writes the present state while the caller's thread goes on.

        If rows may change unseen, or if two threads must not read them at once, all rows are read before this returns.
        """
        ring, era, save = self._writer.ring, self.segments.era, self._save(path, extra)
        there = disk.usable(path).absolute()  # the process may change its directory meanwhile
        snapshot = Snapshot(ring, save.stable)
        save.detach(snapshot.arrays, snapshot.plan)

        def work() -> None:
            try:
                files.update(there, save.change, taken=snapshot.close)
                self.segments.note(there, save.segments, era)
            finally:
                snapshot.close()

        handle = files.SaveHandle(path, work)
        try:
            self._snapshot = snapshot
            snapshot.open()
            self.saves.begin(handle)
            if not (ring.store.read_aside and self.segments.frozen):
                snapshot.wait()
        except BaseException:
            snapshot.close()  # the thread, if it runs, then gives up at the next row that it wants to read
            self.saves.forget(handle)
            raise
        return handle

    def _save(self, path: str | os.PathLike[str], extra: Any) -> ReplaySave:
        return ReplaySave(self._writer.ring, self.segments.at(path), *self.state(), extra)

    def await_rows(self) -> None:
        """Wait until the save under way, if there is one, has read all rows. Then rows may change in any way."""
        if self._snapshot is not None:
            self._snapshot.wait()
            self._snapshot = None

    def pickled(self, sampler: Any) -> tuple[Any, ...]:
        """The arguments of the function that unpickles: the state, the device, and parts that are not relive's own.

        ``sampler`` is the one that the user gave.
        """
        arrays, content = self.whole_state()
        # a copy, since copy.copy would have both buffers read through one view
        view = copy(self._reader.view) if content["view"] is None else None
        own = sampler if content["sampler"] is None else None
        return bare_arrays(arrays), content, str(self._device), own, view

    def restore(self, source: Source, origins: Mapping[Path, Origin] | None = None) -> None:
        """Put a state into a new replay that was made with its constructor's arguments.

        ``origins`` are the origins of the fields, if the schema was changed.

        Raises:
            FileFormatError, InvariantError, ValueError, KeyError: the state makes no sense.
            DoesNotFitError: a saved number does not fit into its new dtype.
        """
        ring, progress, content = self._writer.ring, self._progress, source.content
        progress.draws, progress.sampled, progress.late = integers(content, "counts", 3).tolist()
        progress.first = whole({"first": 0, **content}, "first")
        own = entry({"own_next_obs": False, **content}, "own_next_obs", bool) or not entry(content, "ordered", bool)
        saved = stored_fields(Schema.from_json(json.dumps(content.get("schema"))), own)
        conversion = Conversion(saved.leaves, ring.store.leaves, origins)
        restore_ring(ring, self._writer.sampler, source, whole(content, "rows_per_env"), conversion)
        ring.not_finite = whole({"not_finite_rewards": 0, **content}, "not_finite_rewards")


def bare_arrays(state: Mapping[str, Any]) -> dict[str, tuple[Any, torch.dtype]]:
    """Arrays and their dtypes for pickle; no tensors, which multiprocessing would send as open files."""
    tensors = {name: torch.as_tensor(value) for name, value in state.items()}
    return {name: (numpy_view(x), x.dtype) for name, x in tensors.items()}


def typed_tensors(arrays: Mapping[str, tuple[Any, torch.dtype]]) -> dict[str, Tensor]:
    """The tensors that :func:`bare_arrays` took apart."""
    return {name: typed(array, dtype) for name, (array, dtype) in arrays.items()}


SAMPLER = "sampler"
"""The directory with the save of a sampler's state, inside that of the replay."""


IN_FILES = Uniform, Prioritized
"""Samplers that have no state outside the replay's files."""


def write_sampler(directory: MappedDirectory, ring: Ring, sampler: Any) -> None:
    """Save the state of a sampler, if it has any that is not in the replay's files.

    Raises:
        OSError: the disk is full, or fails. Then the save before is still there.
    """
    if type(sampler) in IN_FILES:
        return
    arrays, content = ring_state(ring, sampler, {"run": directory.run})
    if isinstance(sampler, Recent):  # the priorities of the one inside are in files
        arrays = {name: array for name, array in arrays.items() if not name.startswith("sampler.inner.")}
        state = {name: value for name, value in content["sampler_state"].items() if not name.startswith("inner.")}
        content |= {"sampler_state": state, "sampler_rows": []}
    _refuse_link(directory.path / SAMPLER)
    files.write(directory.path / SAMPLER, arrays | {"span": np.stack(ring.span)}, content)


def read_sampler(directory: MappedDirectory | MappedCopy, ring: Ring, sampler: Any) -> None:
    """Give a sampler the state that was saved last, if the sampler is of the same kind.

    Rows may have been added and overwritten since that save.

    Raises:
        FileFormatError: the save is damaged.
    """
    if type(sampler) in IN_FILES:
        return
    _refuse_link(directory.path / SAMPLER)
    try:
        save = files.Save(directory.path / SAMPLER)
    except NoSaveError:
        return
    with save:
        content = save.content
        if content.get("run") != directory.run or kinds(content.get("sampler")) != kinds(describe(sampler)):
            return
        tensors = save.read()
        span = fitting(tensors, "span", (2, ring.num_envs), torch.int64).numpy()
    saved, by_row = Span(span[0], np.maximum(span[0], span[1])), set[str](entry(content, "sampler_rows", list))
    live = saved.meet(ring.span)
    parts: dict[str, Any] = dict(entry(content, "sampler_state", dict))
    parts |= {n.removeprefix("sampler."): x.numpy() for n, x in tensors.items() if n.startswith("sampler.")}
    if type(sampler) in PARAMETERS:
        require_sampler_state(parts, by_row, ring)
    for name in by_row:
        part = fitting(tensors, f"sampler.{name}", (saved.size,)).numpy()
        full = np.zeros((ring.store.num_rows, *part.shape[1:]), part.dtype)
        full[live.places(ring.rows)] = part[saved.where(live)]
        parts[name] = full
    sampler.load_state_dict(parts)


def _refuse_link(path: FilePath) -> None:
    """Refuse a symbolic link, which could lead to a save elsewhere.

    Raises:
        FileFormatError: the path is a symbolic link.
    """
    if path.is_symlink():
        raise FileFormatError(f"'{path}': expected a directory, got a symbolic link; copy the replay with its files")


def open_save(path: str | os.PathLike[str]) -> files.Save:
    """Open the save in the directory ``path``.

    Raises:
        FileFormatError: there is no save of a replay, or it is damaged.
    """
    save = files.Save(path)
    kind = save.content.get("kind")
    if kind != KIND:
        save.close()
        raise FileFormatError(f"'{path}' is a save of {shown(kind)}, not of a {KIND}")
    return save


def saved_arguments(source: Source, device: Any, sampler: Any, view: Any) -> dict[str, Any]:
    """The constructor's arguments for a replay with this state; ``sampler`` and ``view`` where they are not None.

    Raises:
        FileFormatError, ParameterError, SchemaError, KeyError: the state makes no sense.
    """
    content = source.content
    rows, num_envs = whole(content, "rows_per_env"), whole(content, "num_envs")
    integers(content, "state", num_envs, 4)  # before any memory is taken for as many envs
    if num_envs < 1 or rows < 2:
        raise FileFormatError(f"the save has {num_envs} envs of {rows} rows; expected at least 1 env and 2 rows")
    schema = Schema.from_json(json.dumps(content.get("schema")))
    stored_fields(schema, False)
    if view is None:
        view = rebuild(content.get("view"), "view")
        require_reach(view, source.row_count)
    return {
        "schema": schema,
        "device": device,
        "capacity": rows * num_envs,
        "num_envs": num_envs,
        "sampler": sampler if sampler is not None else rebuild(content.get("sampler"), "sampler"),
        "view": view,
        "ordered": entry(content, "ordered", bool),
        "own_next_obs": entry({"own_next_obs": False, **content}, "own_next_obs", bool),
        "check_ends": entry({"check_ends": True, **content}, "check_ends", bool),
        "debug": entry({"debug": False, **content}, "debug", bool),
        "seed": entry(content, "seed", int),
    }


def changed_arguments(
    arguments: dict[str, Any], capacity: int | None, changes: SchemaChanges | None
) -> dict[Path, Origin] | None:
    """Change the arguments of :func:`saved_arguments` as the caller of ``load`` asks.

    Returns:
        where each field of the new schema comes from; None if the schema stays.

    Raises:
        SchemaError: an argument is out of range, or the save has no such fields.
    """
    origins = None
    if changes is not None:
        arguments["schema"], origins = changes.applied(arguments["schema"])
        stored_fields(arguments["schema"], False)
    if capacity is not None:
        own, num_envs = arguments["own_next_obs"] or not arguments["ordered"], arguments["num_envs"]
        leaves, kept = stored_fields(arguments["schema"], own).leaves, arguments["sampler"].nbytes
        device = torch.device(arguments["device"])
        leaves = in_ram(leaves) if "store" in arguments else leaves
        storage_plan(leaves, num_envs, capacity, None, device, kept).require_memory()
        arguments["capacity"] = capacity
    return origins


INDICES = ("sampler.order", "sampler.inner.order")
"""Arrays of samplers that name transitions by index. An index means something else with another number of envs."""


def require_unordered(content: Mapping[str, Any], num_envs: Any, store: Any) -> None:
    """Refuse another number of envs if it would tear episodes, or a value that is not such a number.

    Raises:
        ParameterError: the steps of the saved replay have an order; or ``num_envs`` is not a positive whole number; or
            there is a ``store``, too.
    """
    if not is_count(num_envs, 1):
        raise ParameterError(f"num_envs: expected a whole number of at least 1, got {num_envs!r}")
    if store is not None:
        raise ParameterError("num_envs: a store of your own cannot be given with it; load without, then append")
    if num_envs != content.get("num_envs") and content.get("ordered") is not False:
        raise ParameterError(
            f"num_envs: expected {content.get('num_envs')}, as it was saved, got {num_envs}; steps in order belong to "
            "the episodes of their env, and only a replay with ordered=False can change its number of envs. Load it as "
            "it is, and draw from it and from a new buffer with a Mixture"
        )


def dealt(
    arrays: Mapping[str, Any], content: Mapping[str, Any], num_envs: int, capacity: int | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of a replay without an order, dealt to ``num_envs`` envs like cards, from the oldest transition on.

    Their order and their priorities stay. Indices are new, and count from 0. ``capacity`` is the number of rows
    over all envs (default: about as many as before); if it is smaller, the newest transitions are kept.
    """
    layout, _ = row_layout(stored_fields(Schema.from_json(json.dumps(content["schema"])), True).leaves)
    rows = (capacity or content["rows_per_env"] * content["num_envs"]) // num_envs
    if rows < 2:
        raise ParameterError(f"capacity: expected at least 2 rows for each of {num_envs} envs, got {rows}")
    by_age = np.argsort(layout.arrays(arrays["rows"])["_stamp",])[-rows * num_envs :]
    hands = [by_age[env::num_envs] for env in range(num_envs)]
    order = np.concatenate(hands)
    per_row = {f"sampler.{name}" for name in content["sampler_rows"]}
    moved = {
        name: value[order] if name == "rows" or name.startswith("block.") or name in per_row else value
        for name, value in arrays.items()
    }
    moved |= {name: moved[name][:0] for name in INDICES if name in moved}  # a new epoch begins
    notes = layout.arrays(moved["rows"])
    notes["_order",][:] = np.concatenate([np.arange(len(hand)) for hand in hands])
    notes["_stamp",][:] = np.concatenate([np.arange(env, len(by_age), num_envs) for env in range(num_envs)])
    state = np.zeros((num_envs, COLUMNS), np.int64)
    state[:, HEAD] = state[:, COUNT] = [len(hand) for hand in hands]
    counters = [*content["counters"]]
    counters[COMPLETED] = len(by_age)
    changed = {"num_envs": num_envs, "rows_per_env": rows, "state": state.tolist(), "counters": counters}
    return {name: torch.as_tensor(value) for name, value in moved.items()}, {**content, **changed}


def load_extra(path: str | os.PathLike[str]) -> Any:
    """The value that was passed as ``extra`` to the ``save`` of a replay or rollout; None if none was. Reads no row.

    Tensors are on the CPU, and dicts of all kinds are plain dicts.

    Raises:
        FileFormatError: there is no save, or it is damaged, foreign or of another version; nothing is ever run.
    """
    with persist.Save(path) as save:
        return read_extra(save, free_memory())


PARAMETERS: dict[type[Any], tuple[str, ...]] = {
    Uniform: (),
    WithoutReplacement: (),
    Prioritized: ("alpha", "beta", "eps", "stratified", "normalize", "default_error", "eta"),
    Recent: ("sharpest", "c_min", "inner", "adapt"),
    NStep: ("n", "gamma"),
    FrameStack: ("depth", "window", "pad", "keys"),
    ReturnsToGo: ("gamma", "window"),
    SequenceView: ("length", "burn_in", "overlap", "n", "gamma", "drop_tail", "time_first", "weigh", "last"),
}


POSITIONAL = {"sharpest": "eta"}
"""Attributes whose constructor argument has another name."""


LARGEST_PARAMETER = 2**53
"""Every whole number up to here is exactly a float."""


SAMPLERS = {part.__name__: part for part in (Uniform, WithoutReplacement, Prioritized, Recent)}


VIEWS = {part.__name__: part for part in (NStep, FrameStack, ReturnsToGo, SequenceView)}


PARTS: dict[str, dict[str, type[Any]]] = {"sampler": SAMPLERS, "inner": SAMPLERS, "view": VIEWS, "window": VIEWS}
"""The classes that a save may name, by their use."""


def describe(part: Any) -> dict[str, Any] | None:
    """One of relive's own samplers or views as JSON. None for a user's own part, or one that holds a user's function.

    The user passes such a part to ``load``.
    """
    names = PARAMETERS.get(cast("type[Any]", type(part)))
    if names is None or getattr(part, "each_reward", None) is not None:  # a user's function
        return None
    values = {POSITIONAL.get(name, name): getattr(part, name) for name in names}
    inner = {name: describe(value) for name, value in values.items() if isinstance(value, tuple(PARAMETERS))}
    if None in inner.values():
        return None
    return {"part": type(part).__name__, **{name: plain(value) for name, value in (values | inner).items()}}


def plain(value: Any) -> Any:
    """A parameter as JSON."""
    if isinstance(value, tuple):
        return [plain(member) for member in cast("tuple[Any, ...]", value)]
    return cast("Any", value).item() if isinstance(value, np.generic) else value


def rebuild(data: Any, what: str) -> Any:
    """The part that :func:`describe` described. ``what`` is its use: "sampler" or "view".

    Raises:
        FileFormatError: there is no such part, or its parameters are invalid.
    """
    given: dict[str, Any] = dict(cast("dict[str, Any]", data)) if isinstance(data, dict) else {}
    name = given.pop("part", None)
    part = PARTS.get(what, {}).get(name) if isinstance(name, str) else None
    if part is None:
        raise FileFormatError(
            f"the saved {what} is your own, or holds your own functions, which saves do not contain "
            f"({shown(data, 200)}); pass {what}=... to load or open"
        )
    known = {POSITIONAL.get(name, name) for name in PARAMETERS[part]}
    try:
        if given.keys() - known:
            raise ValueError(f"it has no {shown(min(given.keys() - known))}")
        return part(**{name: _value(value, name) for name, value in given.items()})
    except (TypeError, ValueError, OverflowError) as error:
        raise FileFormatError(f"the saved {what} has invalid parameters: {shown(given, 200)} ({error})") from error


def _value(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return rebuild(cast("dict[str, Any]", value), name)
    if isinstance(value, list):
        return tuple(_value(member, name) for member in cast("list[Any]", value))
    if type(value) is int and abs(value) > LARGEST_PARAMETER:
        raise ValueError(f"{name} is {shown(value)}")
    return value


def kinds(part: Any) -> tuple[Any, ...]:
    """The class names of a described sampler and of its inner one; () for a user's own sampler."""
    return () if part is None else (part["part"], *kinds(part.get("inner")))
