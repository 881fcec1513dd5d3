"""Mixture: batches with fixed shares from several replays, such as offline and online data."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from fractions import Fraction
from itertools import accumulate, repeat
from typing import Any, cast

import numpy as np
import torch

from .. import core
from ..batches import Batch, SequenceBatch, as_batch
from ..errors import DeviceError, EmptyError, FieldError, ParameterError, SchemaError, ShapeError
from ..memory.layout import WEIGHED, BatchLayout, RowLayout
from ..parameters import COUNT_RULE, Rule, is_count, is_number, require
from ..printable import printable, shown
from ..samplers.prioritized import doubles, require_float32
from ..steps.arrays import ArrayLike, Ints, as_host, whole_numbers
from ..steps.schema import Field, Path, dotted
from ..steps.summary import Summary, html, text
from ..turns import Reuse, Spare, in_turn, require_reuse, standing_memory
from ..views.contract import time_first_of
from .buffer import ReplayBuffer
from .checks import require_rows

SOURCE: dict[Path, Field] = {("source",): Field((), torch.int64)}
"""The field that a mixture adds to a batch."""


class Mixture:
    """Batches in which every buffer has a fixed share (Ball et al. 2023 mix offline and online data half and half).

    Each buffer draws with its own sampler and view. A batch of B rows has share · B rows of each buffer, one buffer
    after another. What rounding leaves over goes to later batches: at any time each buffer has had its share of all
    rows, to within one row, however small the share and the batches are. ``source`` (int64) is the number of the buffer
    that a row comes from. A batch has the fields that the batches of all buffers have in common, even if a buffer has
    no rows in this batch.

    Args:
        buffers: name -> buffer, of one schema.
        shares: name -> share; they are normalised to sum to 1.

    Raises:
        SchemaError: the buffers have different schemas.
        ParameterError: there is no buffer, one is not a :class:`relive.ReplayBuffer`, or the shares do not fit.
        DeviceError: the buffers are on different devices.
    """

    def __init__(self, buffers: Mapping[str, ReplayBuffer], shares: Mapping[str, float]) -> None:
        require("Mixture", BUFFERS_RULE, buffers=buffers)
        wanted = _normalised(shares, list(buffers))
        _require_one_schema(buffers)
        devices = {buffer.device for buffer in buffers.values()}
        if len(devices) > 1:
            raise DeviceError(f"Mixture: expected buffers on one device, got {sorted(map(str, devices))}")
        self.device: torch.device = devices.pop()
        self.buffers: dict[str, ReplayBuffer] = dict(buffers)
        self._shares, self._ends = wanted, _running(wanted)
        self._drawn = 0  # the rows of all batches so far
        self._rows, self._memory = _rows_of([*self.buffers.values()]), core.Pool()
        self._spare = Spare()

    @property
    def shares(self) -> dict[str, float]:
        """Name -> share; they sum to 1. To change them, make another mixture of the same buffers."""
        return dict(self._shares)

    def __len__(self) -> int:
        """The number of transitions that can be drawn from all buffers together."""
        return sum(len(buffer) for buffer in self.buffers.values())

    def sample(self, batch_size: int) -> Batch:
        """One batch ``[batch_size]``.

        Raises:
            ParameterError: ``batch_size`` is not positive.
            EmptyError: a buffer with a share above 0 holds no complete transition. The message names it.
            SchemaError: some views read transitions and others sequences, or sequences of different shapes.
        """
        return next(self.batches(1, batch_size))

    def batches(self, count: int, batch_size: int, *, reuse: Reuse = False) -> Iterator[Batch]:
        """``count`` batches ``[batch_size]``, one round of updates for every buffer.

        This call raises the errors of :meth:`sample`.

        Args:
            count: how many.
            batch_size: B.
            reuse: write them to the same memory in turn, as :meth:`relive.ReplayBuffer.batches` does.
        """
        require("batches", COUNT_RULE, count=count)
        require_reuse("batches", reuse)
        require_rows(batch_size)
        batch_size = int(batch_size)  # a small NumPy integer could overflow
        views = [buffer.view for buffer in self.buffers.values()]
        if len({(time_first_of(view), getattr(view, "rows", None)) for view in views}) > 1:
            raise SchemaError(
                "Mixture: the buffers' views give transitions and sequences, or sequences of different shapes: "
                f"{views}; let all of them agree"
            )
        for name, share in self._shares.items():
            if share:
                inside: Any = self.buffers[name]
                try:
                    inside._require_some()
                except EmptyError as error:
                    raise _nothing_in(name, error) from error
        fields: dict[str, tuple[str, ...]] = {}
        rounds = repeat(batch_size), range(1, count + 1), repeat(count), repeat(fields)

        def made(memory: core.Standing | None = None) -> Any:
            return map(self._batch, *rounds, repeat(memory))

        return in_turn(lambda: (made, self._spare, standing_memory), count, reuse) if reuse else made()

    def _batch(
        self, batch_size: int, update: int, of: int, fields: dict[str, tuple[str, ...]], standing: core.Standing | None
    ) -> Batch:
        """The next batch, number ``update`` of the ``of`` batches of its round.

        ``fields`` keeps the names of the fields of buffers without rows, from one batch of the round to the next.
        """
        rows, parts, without = self._count(batch_size), dict[int, Batch](), list[tuple[str, ...]]()
        try:
            joined = self._joined_rows(batch_size, standing)
            for i, (name, count) in enumerate(rows.items()):
                if count:
                    inside: Any = self.buffers[name]
                    if joined is not None:
                        joined.part = i
                    try:
                        parts[i] = inside._batch(count, update, of, joined)
                    except EmptyError as error:
                        raise _nothing_in(name, error) from error
                elif joined is None:
                    fields[name] = fields.get(name) or self.buffers[name].batch_fields
                    without.append(fields[name])
            if joined is not None:
                return as_batch(joined.tensors())
            return _joined(list(parts.values()), without, list(parts), self.device)
        except BaseException:
            self._count(-batch_size)
            raise

    def _joined_rows(self, batch_size: int, standing: core.Standing | None) -> core.JoinedRows | None:
        """The memory that each buffer writes its rows of the next batch to; None if one has to read them otherwise."""
        for buffer in self.buffers.values() if self._rows is not None else ():
            inside: Any = buffer
            if not inside._reader.writes_rows:
                return None
        return None if self._rows is None else core.JoinedRows(*self._rows, batch_size, standing, self._memory)

    def _count(self, batch_size: int) -> dict[str, int]:
        """Count a batch, or one less if ``batch_size`` is negative; returns the rows of each buffer in it.

        Running shares end at row floor(D · S) of the first D rows, so the rest is carried to the next batch.
        """
        with next(iter(self.buffers.values())).lock:  # held while rows are counted, never while others are waited for
            begin = self._drawn
            self._drawn += batch_size
        ends = [(begin + batch_size) * end // of - begin * end // of for end, of in self._ends]
        return {name: end - before for name, before, end in zip(self._shares, [0, *ends], ends, strict=False)}

    def update_priorities(self, batch: Batch, td_error: ArrayLike, mask: ArrayLike | None = None) -> int:
        """Pass TD errors to the buffers of the rows; returns how many transitions were overwritten meanwhile.

        Buffers whose sampler has no priorities are skipped. Errors as :meth:`relive.ReplayBuffer.update_priorities`.

        Args:
            batch: a batch of this mixture, with ``source`` and ``index``.
            td_error: target - value, one for each row, of either sign; of sequences ``[L, B]``.
            mask: bool of the same shape, True for the errors that count.

        Raises:
            FieldError: the batch has no ``source`` or no ``index``.
        """
        (source, index), late = _origins(batch, len(self.buffers)), 0
        errors = doubles(td_error)
        axis = 1 if errors.ndim == 2 and isinstance(batch, SequenceBatch) and batch.time_first else 0
        if errors.shape[axis : axis + 1] != source.shape:
            raise ShapeError(f"update_priorities: expected {len(source)} errors, one per row, got {errors.shape}")
        real = None if mask is None else as_host(mask, "mask")
        if real is not None and (real.shape != errors.shape or real.dtype != np.bool_):
            raise ShapeError(f"mask: expected bool {errors.shape}, got {real.dtype} {real.shape}")
        counted = errors if real is None else np.where(real, errors, 0.0)
        require_float32(np.moveaxis(counted, axis, 0))  # raises before any buffer is changed
        for i, buffer in enumerate(self.buffers.values()):
            rows = np.flatnonzero(source == i)
            if len(rows) and buffer.has_priorities:
                inner = None if real is None else real.take(rows, axis)
                late += buffer.update_priorities(index[rows], errors.take(rows, axis), inner)
        return late

    def state_dict(self) -> dict[str, Any]:
        """The shares, and ``rows``, how many were drawn so far, if any. Each buffer keeps and saves everything else."""
        return {"shares": dict(self._shares)} | ({"rows": self._drawn} if self._drawn else {})

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue with the shares of ``state``, which :meth:`state_dict` gave, and after its rows.

        Without ``rows``, as in states of earlier releases, the mixture begins to count anew.

        Raises:
            ParameterError: they do not fit the buffers; nothing is changed.
        """
        known = state if isinstance(cast("object", state), Mapping) else dict[str, object]()
        shares = known.get("shares")
        rows: Any = known.get("rows", 0)
        if not isinstance(shares, Mapping):
            raise ParameterError(
                f"Mixture: expected what state_dict() gave, with its 'shares', got {shown(state, 200)}"
            )
        if not is_count(rows) or rows >= 2**63:
            raise ParameterError(f"Mixture: expected in 'rows' the number of rows drawn so far, got {shown(rows)}")
        wanted = _normalised(cast("Mapping[str, float]", shares), list(self.buffers))
        self._shares, self._ends, self._drawn = wanted, _running(wanted), int(rows)

    def __repr__(self) -> str:
        return f"Mixture({self.buffers!r}, {self._shares!r})"

    def __str__(self) -> str:
        return text(self._summary())

    def _repr_html_(self) -> str:
        return html(self._summary())

    def _summary(self) -> Summary:
        buffers = {name: str(buffer).partition("\n")[0] for name, buffer in self.buffers.items()}
        facts = {name: f"{self._shares[name]:.3g} from {line}" for name, line in buffers.items()}
        return f"Mixture: of {len(self.buffers)} buffers", facts


def _nothing_in(name: str, error: EmptyError) -> EmptyError:
    """The error of a buffer that has nothing to draw, with its name."""
    return EmptyError(f"Mixture: the buffer '{printable(name)}' has nothing to draw: {error}")


def _rows_of(buffers: list[Any]) -> tuple[core.Fields, int] | None:
    """The fields that rows of all these buffers have, with ``source``, and its first byte; None if rows differ.

    Rows of draws by priority have room for their weights, behind all else. So a mixture's rows have it if one draws so.
    """
    stores = [buffer._ring.store for buffer in buffers]
    first: BatchLayout = stores[0].batch
    if not all(store.packed and store.batch.offsets == first.offsets for store in stores):
        return None
    weighed = [buffer.has_priorities for buffer in buffers]
    layout = RowLayout(*first.groups, WEIGHED if any(weighed) else {}, SOURCE)
    paths = [*first.fields, *(WEIGHED if all(weighed) else ()), *SOURCE]
    return layout.described(paths), layout.starts[-2]


def _are_buffers(value: object) -> bool:
    """True if this is a mapping to replays."""
    named = cast("Mapping[str, object]", value)
    return isinstance(value, Mapping) and all(isinstance(buffer, ReplayBuffer) for buffer in named.values())


BUFFERS_RULE: Rule = _are_buffers, "expected a mapping from names to ReplayBuffers"


def _origins(batch: Mapping[str, object], buffers: int) -> tuple[Ints, Ints]:
    """The number of each row's buffer, and its index there, int64 ``[B]`` each.

    Raises:
        FieldError: the batch lacks one of them.
        DTypeError, ShapeError, ParameterError: they are not what a batch has.
    """
    try:
        columns = [batch[name] for name in ("source", "index")] if hasattr(batch, "keys") else None
    except (LookupError, ValueError):  # a FieldError is a ValueError
        columns = None
    if columns is None:
        kind = type(batch).__name__
        raise FieldError(f"update_priorities: expected a batch with 'source' and 'index', got a {kind}; pass it whole")
    source, index = whole_numbers(columns[0], "source"), whole_numbers(columns[1], "index")
    if source.ndim != 1 or index.shape != source.shape:
        raise ShapeError(f"update_priorities: expected source and index [B], got {source.shape}, {index.shape}")
    if len(source) and not (source.min() >= 0 and source.max() < buffers):
        raise ParameterError(f"source: expected numbers of {buffers} buffers, got {source.min()} to {source.max()}")
    return source, index


def _require_one_schema(buffers: Mapping[str, ReplayBuffer]) -> None:
    """Refuse buffers of different schemas.

    Raises:
        SchemaError: two of them differ; it names their first field that does.
    """
    (first, one), *others = ((name, buffer.schema) for name, buffer in buffers.items())
    for name, other in others:
        if other != one:
            paths = [path for path in one.leaves | other.leaves if one.leaves.get(path) != other.leaves.get(path)]
            mine, theirs = (has.leaves.get(paths[0], "no field") if paths else has for has in (one, other))
            raise SchemaError(
                f"Mixture: expected buffers of one schema, got {dotted(paths[0]) if paths else 'fields'} as {mine} in "
                f"{first!r} and as {theirs} in {name!r}; make one with the schema of the other; "
                "as_float32() of a schema makes float64 fields float32"
            )


def _normalised(shares: Mapping[str, float], names: list[str]) -> dict[str, float]:
    """The shares in the order of the names, scaled to sum to 1.

    Raises:
        ParameterError: a share is missing, unknown, negative or infinite, or none is positive.
    """
    is_mapping = isinstance(cast("object", shares), Mapping)
    fits = is_mapping and names and set(names) == set(shares) and all(is_number(share, 0) for share in shares.values())
    total = sum(shares.values()) if fits else 0.0
    if not 0 < total < np.inf:
        raise ParameterError(
            f"Mixture: expected a share of at least 0 for each of {names}, one of them positive, got "
            f"{shown(shares, 200)}"
        )
    total = 1.0 if math.isclose(total, 1.0, rel_tol=CLOSE) else total  # so shares of a state come back to the bit
    return {name: float(shares[name] / total) for name in names}


CLOSE = 2.0**-50
"""How far rounding moves a share that was divided by the sum of all, as a part of it."""


def _running(shares: Mapping[str, float]) -> list[tuple[int, int]]:
    """The running sums of the shares, exactly: numerator and denominator of each; the last is 1.

    A share that is a simple fraction but for its rounding, such as 1/3, counts as that. Whole rows then stay whole.
    """

    def exact(share: float) -> Fraction:
        near, given = Fraction(share).limit_denominator(10**6), Fraction(share)
        return near if abs(near - given) <= given * Fraction(CLOSE) else given

    ends = list(accumulate(map(exact, shares.values())))
    return [(end / ends[-1]).as_integer_ratio() for end in ends]


def _joined(parts: list[Batch], without: list[tuple[str, ...]], sources: list[int], device: torch.device) -> Batch:
    """One batch of several, with the number of the buffer that each row, or sequence, comes from.

    ``without`` has the fields of the buffers that have no rows in it.
    """
    source = torch.from_numpy(np.repeat(sources, [*map(len, parts)])).to(device)
    return parts[0].joined(parts, _shared([*map(tuple, parts), *without]), {"source": source})


def _shared(fields: list[Collection[str]]) -> list[str]:
    """The names that all of these have, in the order of the first."""
    first, *others = fields
    for known in others:
        first = [name for name in first if name in known]
    return list(first)
