"""Reader: makes the batches of a replay, from the draw to the tensors; and Prefetch, for rows in files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from .. import kernels
from ..batches import Members, SequenceBatch, SequenceMembers, as_tensordict, swap_layers
from ..errors import LifecycleError, ParameterError, ReliveError, SchemaError, ShapeError
from ..kernels.reference.priorities import key as stream
from ..kernels.reference.rows import FIELD_DICT
from ..kernels.reference.sample import FIELD
from ..kernels.tables import DirectBatch
from ..kernels.tensor_calls import tensor_calls
from ..memory.layout import BatchLayout, RowLayout
from ..memory.mapped import LookAhead, MappedAllocator, can_look_ahead
from ..memory.ram import ReplayRows, with_next
from ..parameters import is_count, is_own, refuse_class
from ..ring.ring import Change, Ring, Rule
from ..ring.sequences import FACT_FIELDS, FACTS, Sequences
from ..samplers.contract import Sampler
from ..samplers.prioritized import Binding, Prioritized
from ..samplers.recent import Recent
from ..samplers.sumtree import SumTree
from ..samplers.uniform import Uniform, WithoutReplacement
from ..steps.arrays import Array, Ints, as_host
from ..steps.schema import Field, Path, Schema
from ..views.contract import View, require_readable, rule_of, time_first_of
from ..views.frames import FrameStack
from ..views.hindsight import Hindsight
from ..views.returns_to_go import ReturnsToGo
from ..views.sequences import Sequence
from ..views.transitions import NStep
from .serving import Progress, stream_of

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["Prefetch", "Reader", "parts_of"]


LONG = 2**18
"""A batch of more bytes is drawn and read in several calls, which let other threads of Python run.

Only what each item has once counts: stacks, the rows of sequences and their states are copied without the GIL anyway.
"""

OWN_SAMPLERS = frozenset((Uniform, WithoutReplacement, Prioritized, Recent))
"""Samplers whose draws need no check. A class that inherits from one of them is a user's own."""

READ_LARGE_FIELDS = frozenset((FrameStack, Sequence))
"""Views that read large fields, or recurrent states, in the fused call."""
FUSED_VIEWS = READ_LARGE_FIELDS | {NStep, Hindsight}
"""Each is a :class:`relive.views.contract.FusedView`."""

WEIGHT: Path = ("weight",)
PROBABILITY: Path = ("probability",)
WEIGHED: dict[Path, Field] = {WEIGHT: Field((), torch.float32), PROBABILITY: Field((), torch.float64)}
"""The fields that draws by priority add to a batch."""

_from_numpy: Any = cast("Any", torch).from_numpy  # code that is not in the caches makes memory sooner so


class Reader:
    """Makes batches: draws transitions with the sampler and reads them through the view.

    The caller of each method holds the replay's lock.

    Args:
        ring: the rows.
        sampler: draws; attached again when the view changes what can be drawn.
        schema: the fields of a step, as the user named them.
        view: see :meth:`read_through`.
        progress: the seed, and the number of the next batch.
    """

    def __init__(self, ring: Ring, sampler: Sampler, schema: Schema, view: View, progress: Progress) -> None:
        self.ring, self.sampler, self.schema, self.view, self.progress = ring, sampler, schema, view, progress
        self.replaced: Callable[[], object] = bool
        """Called when the view was replaced. A replay in files keeps it."""
        self.prefetch: Prefetch | None = None
        """Asks for the rows of the next batch of a replay in files; None for any other replay."""
        self._own_sampler = all(type(part) in OWN_SAMPLERS for part in parts_of(sampler))
        in_ram = type(ring.store) is ReplayRows and ring.undo is None
        self._calls = tensor_calls() if in_ram and self._own_sampler else None
        """torch's functions for the fused call; None if no batch can be made by it."""
        extras = sampler.extras if self._own_sampler else ()
        self._weighed = {path: field for path, field in WEIGHED.items() if path[0] in extras}
        self._fused: _FusedCall | None = None
        """The tables of the last fused call."""
        self.read_through(view)

    def read_through(self, view: View) -> None:
        """Use this view from now on.

        Raises:
            ParameterError: ``view`` is not a view.
            SchemaError: the view cannot read what is stored.
            LifecycleError: it is the view of another buffer.
        """
        refuse_class("view", view)
        if not hasattr(view, "read"):
            raise ParameterError(f"view={view!r}: expected a view, such as NStep(3, gamma=0.99) or Transition()")
        for part in parts_of(view):
            reader = _READERS.get(id(part))
            if reader is not None and reader is not self and any(part is other for other in parts_of(reader.view)):
                raise LifecycleError(
                    f"{part!r} is the view of another buffer, so a change would affect both; make a new view for each "
                    "buffer"
                )
        require_readable(view, self.ring)
        before, self.view = self.view, view
        try:
            self.keep_rule()
        except ReliveError:
            self.view = before
            raise
        _READERS.update(dict.fromkeys(map(id, parts_of(view)), self))
        self.replaced()

    def keep_rule(self) -> None:
        """Apply the view's rule of what can be drawn to the ring, if it has changed."""
        ring, rule = self.ring, rule_of(self.view)
        before = ring.rule
        if rule == before:
            return
        ring.pending = Change(rule=before)
        try:
            ring.rule = rule
            self.sampler.attach(ring)
        except ReliveError:
            ring.rule = before
            ring.settle()
            raise
        ring.settle()

    def sample(self, count: int, update: int, of: int) -> Any:
        """The next batch ``[count]``, number ``update`` of the ``of`` batches of its round.

        A batch of relive's own samplers and views, with its rows in RAM and of at most ``LONG`` bytes, is drawn and
        read by one compiled call. All others take the long way: the sampler draws places, and the view reads them. It
        makes the same batch with more Python calls, and in a large one it lets other threads run.

        Raises:
            ReliveError: nothing can be drawn; or the view cannot read it, and then the batch counts as drawn.
        """
        view, worker, store = self.view, get_worker_info(), self.ring.store
        kind = type(view)
        reads_all = kind in FUSED_VIEWS and (not store.gathered or kind in READ_LARGE_FIELDS)
        if reads_all and self._calls is not None and worker is None:
            batch = self._sample_fused(view, count, update, of)
            if batch is not None:
                return batch
        self.keep_rule()
        progress = self.progress
        key = stream(progress.seed if worker is None else stream_of(progress.seed), progress.draws - progress.first)
        drawn = self.sampler.draw(count, key, update, of)
        places, extras = drawn if self._own_sampler else self._checked_draw(drawn, count)
        progress.draws += 1  # before the read: a batch that the view fails to read is used up
        progress.sampled += count
        if progress.slots is not None:
            progress.keep()
        batch = self.read(places, extras, key)
        if self.prefetch is not None:
            self.prefetch.after_batch(self, count, update, of)
        return batch

    def _sample_fused(self, view: View, count: int, update: int, of: int) -> TensorDict | SequenceBatch | None:
        """The next batch, drawn and read in one compiled call, or in two with functions of goals in between.

        Returns:
            None if that takes more than compiled code can do, or if there is nothing to draw. Then nothing has changed.

        Raises:
            ReliveError: as the view says. The batch counts as drawn then.
        """
        ring, sampler, progress = self.ring, self.sampler, self.progress
        reader: Any = view  # a FusedView
        layout, terms = reader.batch_of(ring), sampler.terms(update, of)
        if layout is None or terms is None:
            return None
        weights, how = terms
        known, fused = (layout, weights, progress.seed, ring.rule, reader.history), self._fused
        if fused is None or fused.known != known:
            fused = self._fused = self._fused_call(view, *known)
        parts = fused.parts
        if parts is None or count * parts.rows.nbytes > LONG:
            return None
        rows, dicts = _from_numpy(np.empty((count, parts.rows.nbytes), np.uint8)), parts.members.empty()
        number, before = progress.draws - progress.first, None
        progress.draws += 1  # before the draw, as functions of goals may look, or draw another batch
        progress.sampled += count
        if self._weighed:
            before = sampler.draw_state()
            sampler.count_draw()
        if reader.sample(fused.handle, ring, (number, *how), count, rows, dicts):
            return parts.members.batch(dicts, count)
        progress.draws -= 1  # nothing to draw: the long way raises the error, and counts nothing
        progress.sampled -= count
        if self._weighed:
            sampler.undo_draws(before)
        return None

    def _checked_draw(self, drawn: Any, count: int) -> tuple[Ints, dict[str, Any]]:
        """The places and fields that a user's sampler drew, once checked.

        Raises:
            ParameterError, SchemaError: the draw has another form, or a place cannot be drawn.
        """
        who = f"{self.sampler!r}.draw({count})"
        parts: list[Any] = [*cast("tuple[Any, ...]", drawn)] if isinstance(drawn, tuple) else []
        if len(parts) != 2 or not isinstance(parts[1], Mapping):
            raise ShapeError(f"{who}: expected a tuple of places [{count}] and a dict of further fields, got {drawn!r}")
        chosen, further = parts
        try:
            places = self.ring.require_anchors(chosen)
        except (ParameterError, SchemaError) as error:
            raise type(error)(f"{who}: {error}") from error
        extras = {name: as_host(value) for name, value in cast("Mapping[str, Any]", further).items()}
        for name, array in {"places": places, **extras}.items():
            if array.shape[:1] != (count,) or array.dtype.kind not in "biufc":
                raise ShapeError(f"{who}: expected {count} {name}, got {array.dtype} {array.shape}")
        return places, extras

    def read(self, places: Ints, extras: Mapping[str, Any], key: int | None) -> Any:
        """The batch of the transitions at ``places``, with the sampler's ``extras``."""
        try:
            batch = self.view.read(self.ring, places, key)
        except (ParameterError, SchemaError) as error:
            if is_own(self.view):
                raise
            raise type(error)(f"{self.view!r}: {error}") from error
        if extras:
            tensors = self.ring.store.tensors(*extras.values())
            for name, tensor in zip(extras, tensors, strict=True):
                batch[name,] = tensor
        time_first = time_first_of(self.view)
        if time_first is None:
            return as_tensordict(batch, (len(places),))
        return self._sequence_batch(batch, (*FACTS, *extras), time_first)

    def _sequence_batch(self, batch: dict[Path, Tensor], known: tuple[str, ...], time_first: bool) -> SequenceBatch:
        """The batch of sequences of these fields. Those named in ``known`` are facts about each sequence."""
        facts: dict[str, Tensor] = {}
        states: dict[Path, Tensor] = {}
        for name in known:
            facts[name] = batch.pop((name,))
        for path in list(batch):
            if path[0] == "hidden":
                states[path] = swap_layers(batch.pop(path)).contiguous()
        hidden = self.schema.rebuild("hidden", states.__getitem__) if states else None
        return SequenceBatch(batch, facts, hidden, time_first=time_first)

    def _fused_call(
        self, view: View, layout: BatchLayout | Sequences, weights: Binding | SumTree | None, seed: int, rule: Rule,
        history: int,
    ) -> _FusedCall:  # fmt: skip
        """The tables for batches of this layout, drawn by these weights."""
        known, calls, none = (layout, weights, seed, rule, history), cast("Any", self._calls), np.zeros(0, np.int64)
        parts = self._sequence_parts(layout) if isinstance(layout, Sequences) else self._transition_parts(layout)
        if parts is None or rule != rule_of(view):  # the long way has the ring follow the view first
            return _FusedCall(known, None)
        tree = weights.tree if isinstance(weights, Binding) else weights
        tops, until = (none, np.zeros(0)) if tree is None else tree.whole
        nodes, offsets = weights.arrays if isinstance(weights, SumTree) else (np.zeros(0), np.zeros(0, np.uint64))
        at = parts.rows.offsets
        batch = DirectBatch(
            calls.describe, calls.lend, calls.adopt, self.ring.handle, np.array([seed % 2**64], np.uint64),
            weights.handle if isinstance(weights, Binding) else none, tops, until, at.get(WEIGHT, 0),
            at.get(PROBABILITY, 0), layout.handle, parts.table, id(parts.names), parts.large, id(parts.large_names),
            nodes, offsets, parts.steps, id(parts.step_names), parts.blank,
        )  # fmt: skip
        return _FusedCall(known, parts, batch, kernels.fast().handle_of(batch))

    def _transition_parts(self, layout: BatchLayout) -> _FusedParts | None:
        """The parts of a batch of transitions. If there are large fields, all of them are read as stacks."""
        store: Any = self.ring.store
        whole, stacked, stacks = (
            RowLayout(*layout.groups, self._weighed),
            with_next(store.gathered),
            store.stack_table(),
        )
        if whole.table is None or stacks is None or not Members.suit((*whole.fields, *stacked)):
            return None
        members, (large, frames) = Members([*layout.fields, *stacked, *self._weighed]), stacks
        whole.table[:, FIELD_DICT], frames[:, FIELD + FIELD_DICT] = (
            [members.into[path] for path in paths] for paths in (whole.fields, large)
        )
        names, large_names = (tuple(path[-1] for path in paths) for paths in (whole.fields, large))
        return _FusedParts(members, whole, whole.table, names, frames, large_names)

    def _sequence_parts(self, sequences: Sequences) -> _FusedParts | None:
        """The parts of a batch of sequences: columns in the first dict, then facts, then recurrent states."""
        store: Any = self.ring.store
        whole, steps, states = RowLayout(FACT_FIELDS, self._weighed), sequences.layout, sequences.states
        states_table, hidden = store.state_table(states), partial(self.schema.rebuild, "hidden")
        if whole.table is None or steps.table is None or states_table is None:
            return None
        paths, lines = states_table
        whole.table[:, FIELD_DICT], lines[:, FIELD + FIELD_DICT] = 1, 2
        names, known = tuple(path[-1] for path in whole.fields), [*FACTS, *(path[-1] for path in self._weighed)]
        leaves = [path for path in sequences.order if path not in FACT_FIELDS and path not in states]
        members = SequenceMembers(leaves, known, states, hidden, sequences.cut.time_first)
        rows = whole, whole.table, names
        return _FusedParts(members, *rows, lines, tuple(paths), steps.table, tuple(steps.fields), sequences.blank)


class _FusedParts(NamedTuple):
    """The parts of a batch of one layout."""

    members: Members | SequenceMembers
    """The dicts of a batch."""
    rows: RowLayout
    """The fields of the row of each of its items."""
    table: Ints
    """These fields, as :func:`relive.kernels.reference.rows.split_rows` takes them."""
    names: tuple[str, ...]
    """Their names."""
    large: Ints
    """Large fields: the stacks or the recurrent states, as :mod:`relive.kernels.reference.sample` says."""
    large_names: tuple[Any, ...]
    """Their names."""
    steps: Ints = np.zeros((0, 0), np.int64)
    """The fields of each row of a sequence, as :attr:`table`."""
    step_names: tuple[Path, ...] = ()
    """Their names."""
    blank: Array = np.zeros(0, np.uint8)
    """The row of padding of a sequence."""


class _FusedCall(NamedTuple):
    """The tables of a fused call, as long as nothing of ``known`` changes."""

    known: tuple[BatchLayout | Sequences, Binding | SumTree | None, int, Rule, int]
    """The layout that the view reads, the weights of the draw, the seed, the ring's rule, and the view's history."""
    parts: _FusedParts | None
    """The parts of a batch; None if such batches take the long way."""
    batch: DirectBatch | None = None
    """The table that :attr:`handle` points to, which this keeps alive."""
    handle: Any = None
    """The addresses of :attr:`batch`, for compiled kernels."""


def parts_of(part: Any) -> list[Any]:
    """A sampler or a view, and the one inside of it, if there is one, and so on."""
    if isinstance(part, Recent):
        return [part, part.inner]
    return [part, *parts_of(part.window)] if isinstance(part, FrameStack | ReturnsToGo) else [part]


_READERS: WeakValueDictionary[int, Reader] = WeakValueDictionary()
"""Readers by the id of their view, because some views can be neither hashed nor weakly referenced."""


WRITTEN = 2**16
"""Bytes of each env, after its newest row, that are asked for before they are overwritten."""


FARTHEST = 4096
"""The most rows that are asked for before and after a predicted row."""


class Prefetch:
    """Asks the system for the rows of the next batch, which is a function of the seed and its number.

    The rows are a prediction: no draw depends on it. The caller holds the replay's lock.

    Args:
        ring: the rows, in files.
        ahead: asks the system for rows.
    """

    def __init__(self, ring: Ring, ahead: LookAhead) -> None:
        self._ring, self.ahead = ring, ahead
        self._last = 0, 1, 1
        """The last batch: its size, its number in its round, and the number of batches in the round."""
        self._updated = self._waits = False
        self._heads: Ints = ring.heads.copy()
        self._looked = -1
        """The number of batches at the last look, when the heads were these."""
        self._parts: Ints = np.full(ring.num_envs, -1, np.int64)
        """The number of the part of its ring that each env was in at the last look."""
        self._part_rows = max(WRITTEN // max(1, ahead.row_bytes), 1)

    @classmethod
    def of(cls, ring: Ring) -> Prefetch | None:
        """One for a ring in files; None for any other ring, or if this system takes no advice."""
        store = ring.store
        if not (isinstance(store, ReplayRows) and isinstance(store.allocator, MappedAllocator) and can_look_ahead()):
            return None
        return cls(ring, LookAhead(store.allocator, [store.target, *cast("Any", store).blocks.values()]))

    def after_batch(self, reader: Reader, batch_size: int, update: int, of: int) -> None:
        """Note that a batch was drawn, and look ahead.

        If priorities come after each batch, the next batch depends on them. Then the look waits for
        :meth:`after_update`.
        """
        self._last, self._waits, self._updated = (batch_size, update, of), self._updated, False
        if not self._waits and self.ahead.is_wanted():
            self._look(reader)

    def after_update(self, reader: Reader) -> None:
        """Note that priorities were updated, and look ahead if a look waits for them."""
        self._updated = True
        if self._waits and self.ahead.is_wanted():
            self._waits = False
            self._look(reader)

    def _look(self, reader: Reader) -> None:
        """Ask for the rows of the next batch, and for those that will be overwritten next."""
        ring, progress, (batch_size, update, of) = self._ring, reader.progress, self._last
        key = stream(stream_of(progress.seed), progress.draws - progress.first)
        try:
            places = likely_places(reader.sampler, ring, batch_size, key, update % of + 1, of)
        except ReliveError:  # if it is a real error, the next draw raises it
            places = None
        before, after = self._reach(reader)
        begins, ends = self._written()
        if places is not None:
            places = places[(places >= 0) & (places < ring.store.num_rows)]  # an altered file can name others
            env_begins = places // ring.rows * ring.rows  # the rows on both sides of an env's are those of other envs
            begins = np.concatenate([np.maximum(places - before, env_begins), begins])
            ends = np.concatenate([np.minimum(places + after, env_begins + ring.rows), ends])
        if len(begins):
            self.ahead.ask(begins, ends)

    def _reach(self, reader: Reader) -> tuple[int, int]:
        """The numbers of rows before and after a predicted row to ask for.

        As steps come, the rows that can be drawn move on. The rows are expected to move on as far before the next batch
        as they did before the last one, if there was a look then.
        """
        ring, draws = self._ring, reader.progress.draws
        added = int((ring.heads - self._heads).sum()) if draws == self._looked + 1 else 0
        moved = -(-added // ring.num_envs)
        self._heads, self._looked = ring.heads.copy(), draws
        back = 0 if not reader.sampler.watches else 2 * added
        n = getattr(getattr(reader.view, "window", reader.view), "n", 1)  # in a user's own view, n may mean anything
        ahead = (n if is_count(n) else 1) + 1 + moved + back
        return min(rule_of(reader.view).history + back, FARTHEST), min(ahead, FARTHEST)

    def _written(self) -> tuple[Ints, Ints]:
        """The rows that will be overwritten next, in each env that has reached a new part of its ring: begins, ends."""
        ring, part = self._ring, self._part_rows
        envs = np.flatnonzero(ring.heads // part != self._parts)
        self._parts[envs] = ring.heads[envs] // part
        first = ring.heads[envs] % ring.rows  # the next step goes there; the ring's seam ends the range
        begins = envs * ring.rows + first
        return begins, envs * ring.rows + np.minimum(first + 2 * part, ring.rows)


def likely_places(sampler: Any, ring: Ring, count: int, key: int, update: int, of: int) -> Ints | None:
    """The places of rows, at most ``count``, that ``sampler.draw(count, key, update, of)`` will most likely draw.

    A draw tries rows until it finds one that can be drawn. Only its first try is predicted. If the files were altered,
    a place may be beyond the last row.

    Returns:
        int64 ``[K]``, or None if a prediction would have to read rows: for windows weighed by episodes, for windows or
        priorities inside :class:`Recent`, and for samplers of the user.
    """
    if not ring.drawable:
        return None
    if type(sampler) is Recent:
        newest = sampler.window(update, of)
        if newest >= ring.transitions:
            return likely_places(sampler.inner, ring, count, key, update, of)
        return _first_tries(ring, count, key, newest) if _draws_rows(sampler.inner, ring) else None
    if type(sampler) is WithoutReplacement:
        number, env = np.divmod(sampler.draw_state()[:count], ring.num_envs)
        return env * ring.rows + number % ring.rows
    if type(sampler) is Prioritized:
        total = sampler.mass
        if not 0 < total < math.inf:
            return None
        return sampler.draw_at(_masses(count, key, sampler.stratified, total))[0]
    if _draws_rows(sampler, ring):
        return _first_tries(ring, count, key, 0)
    if type(sampler) is Uniform and ring.rule.weigh != "episodes":
        return sampler.draw(count, key, update, of)[0]  # reads the tree of weights alone
    return None


def _draws_rows(sampler: Any, ring: Ring) -> bool:
    """True if a sampler draws rows until one can be drawn."""
    return type(sampler) is Uniform and not ring.rule.sparse


def _first_tries(ring: Ring, count: int, key: int, newest: int) -> Ints | None:
    """The first attempt of each draw of :func:`relive.kernels.reference.priorities.draw`."""
    first, until = np.empty(ring.num_envs, np.int64), np.empty(ring.num_envs, np.int64)
    total = kernels.fast().window(ring.handle, newest, first, until)
    if total <= 0:
        return None
    # positions among the rows of all envs, one env after another; until[e] is where the rows of env e end
    at = _masses(count, key, False, float(total)).astype(np.int64)
    env: Ints = np.asarray(np.searchsorted(until, at, side="right"), np.int64)
    number = first[env] + at - np.where(env > 0, until[env - 1], 0)
    return env * ring.rows + number % ring.rows


def _masses(count: int, key: int, stratified: bool, total: float) -> Any:
    """The numbers of a draw in [0, total), float64 ``[count]``."""
    out = np.empty(count)
    kernels.fast().masses(np.uint64(key), stratified, total, math.nextafter(total, 0.0), out)
    return out
