"""Reader: makes batches through the replay's view."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from .. import kernels
from ..batches import Members, SequenceBatch, SequenceMembers, as_tensordict, swap_layers
from ..errors import (
    DTypeError,
    FileFormatError,
    LifecycleError,
    NotFiniteError,
    ParameterError,
    ReliveError,
    SchemaError,
    ShapeError,
)
from ..kernels.reference.priorities import LARGEST_ERROR, UNUSUAL
from ..kernels.reference.priorities import key as stream
from ..kernels.reference.rows import LINE_INTO
from ..kernels.reference.sample import LINE
from ..kernels.tables import ALONE, COMPLETED, FINALS, LINKED, NO_FINALS, DirectBatch, DirectStep
from ..kernels.tensor_calls import TensorCalls, tensor_calls
from ..memory.copier import SHORT, Plan
from ..memory.layout import BatchLayout, RowLayout
from ..memory.mapped import LookAhead, MappedKeeper, can_look_ahead
from ..memory.ram import ReplayRows, with_next
from ..memory.store import Staging
from ..parameters import Rule, is_count, is_own, is_whole, refuse_class, require
from ..printable import shown
from ..ring.ring import Change, Ring
from ..ring.ring import Rule as RingRule
from ..ring.sequences import FACT_FIELDS, FACTS, Sequences
from ..samplers.contract import Sampler
from ..samplers.prioritized import Binding, Prioritized
from ..samplers.recent import Recent, guess
from ..samplers.sumtree import SumTree
from ..samplers.uniform import Uniform, WithoutReplacement
from ..steps.arrays import Array, Ints, as_host, numpy_view
from ..steps.checker import StepChecker
from ..steps.schema import Field, Path, Schema
from ..views.contract import View, require_readable, rule_of, time_first_of
from ..views.frames import FrameStack, ReturnsToGo
from ..views.hindsight import Hindsight
from ..views.sequences import Sequence
from ..views.transitions import NStep
from .checks import whole_numbers
from .durable import Progress, stream_of

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = [
    "PARAMETERS",
    "Coming",
    "DirectAdd",
    "DirectSample",
    "Episode",
    "Ratings",
    "Reader",
    "Run",
    "by_item",
    "coming_of",
    "describe",
    "doubles",
    "kinds",
    "magnitudes",
    "parts_of",
    "plain",
    "read_run",
    "readable_draw",
    "rebuild",
    "runs_of",
    "table",
]


PARAMETERS: dict[type[Any], tuple[str, ...]] = {
    Uniform: (),
    WithoutReplacement: (),
    Prioritized: ("alpha", "beta", "eps", "stratified", "normalize", "default_error", "eta"),
    Recent: ("sharpest", "c_min", "inner", "adapt"),
    NStep: ("n", "gamma"),
    FrameStack: ("depth", "window", "pad", "keys"),
    ReturnsToGo: ("gamma", "window"),
    Sequence: ("length", "burn_in", "overlap", "n", "gamma", "drop_tail", "time_first", "weigh", "last"),
}


POSITIONAL = {"sharpest": "eta"}
"""Attributes whose constructor argument has another name."""


LARGEST_PARAMETER = 2**53
"""Every whole number up to here is exactly a float."""


SAMPLERS = {part.__name__: part for part in (Uniform, WithoutReplacement, Prioritized, Recent)}


VIEWS = {part.__name__: part for part in (NStep, FrameStack, ReturnsToGo, Sequence)}


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


def parts_of(part: Any) -> list[Any]:
    """A sampler or a view, and the one inside of it, if there is one, and so on."""
    if isinstance(part, Recent):
        return [part, part.inner]
    return [part, *parts_of(part.window)] if isinstance(part, FrameStack | ReturnsToGo) else [part]


def kinds(part: Any) -> tuple[Any, ...]:
    """The class names of a described sampler and of its inner one; () for a user's own sampler."""
    return () if part is None else (part["part"], *kinds(part.get("inner")))


WHOLE_RULE: Rule = (lambda number: number is None or is_whole(number), "expected a whole number, or None")


class Reader:
    """The reading side of a replay. All of its methods expect that the caller holds the replay's lock.

    Args:
        ring: the rows.
        sampler: attached anew when the view changes what can be drawn.
        schema: the fields of a step, as the user named them.
        view: see :meth:`read_through`.
    """

    def __init__(self, ring: Ring, sampler: Sampler, schema: Schema, view: View) -> None:
        self.ring, self.sampler, self.schema, self.view = ring, sampler, schema, view
        self.replaced: Callable[[], object] = bool
        """Called when the view was replaced. A replay in files keeps it."""
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
        return self._sequences(batch, (*FACTS, *extras), time_first)

    def _sequences(self, batch: dict[Path, Tensor], known: tuple[str, ...], time_first: bool) -> SequenceBatch:
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

    def data(self) -> Any:
        """Every transition that can be drawn, in the order of completion."""
        self.keep_rule()
        places = self.ring.anchors()
        return self.read(places[np.argsort(self.ring.stamp[places], kind="stable")], {}, None)

    def at(self, rows: Any) -> Any:
        """The transitions at ``rows`` of the ring's memory, int64 ``[B]``.

        Raises:
            ParameterError: a row out of range, or one that cannot be drawn.
        """
        self.keep_rule()
        places = whole_numbers(rows, "rows")
        good = (places >= 0) & (places < self.ring.store.num_rows)
        if good.all():
            good = self.ring.find(self.ring.index_of(places))[0] == places
        if not good.all():
            raise ParameterError(f"at: row {places[np.argmin(good)]} cannot be drawn; pass complete transitions")
        return self.read(places, {}, None)

    def slice(self, env: int, start: int, stop: int | None) -> TensorDict:
        """Stored rows of one env from ``start`` up to ``stop``, without the view; 0 is the oldest.

        Raises:
            ParameterError: there is no such env, or ``start`` or ``stop`` is not a whole number.
        """
        ring = self.ring
        if not (is_count(env) and env < ring.num_envs):
            raise ParameterError(
                f"slice: env is a whole number from 0 up to, not including, {ring.num_envs}, got {env}"
            )
        require("slice", WHOLE_RULE, start=start, stop=stop)
        places = ring.live_places(env)[slice(start, stop)]
        fields = ring.take(places)
        facts = ring.tensors(ring.stamp[places] >= 0, ring.index_of(places))
        fields["complete",], fields["index",] = facts
        return as_tensordict(fields, (len(places),))


_READERS: WeakValueDictionary[int, Reader] = WeakValueDictionary()
"""Readers by the id of their view, because some views can be neither hashed nor weakly referenced."""


def readable_draw(ring: Ring, sampler: Sampler, drawn: Any, count: int) -> tuple[Ints, dict[str, Any]]:
    """Check what a user's sampler drew, and return its places and fields.

    Raises:
        ParameterError, SchemaError: the draw has another form, or a place cannot be drawn.
    """
    who = f"{sampler!r}.draw({count})"
    given: list[Any] = [*cast("tuple[Any, ...]", drawn)] if isinstance(drawn, tuple) else []
    if len(given) != 2 or not isinstance(given[1], Mapping):
        raise ShapeError(f"{who}: expected a tuple of places [{count}] and a dict of further fields, got {drawn!r}")
    chosen, further = given
    try:
        places = ring.require_anchors(chosen)
    except (ParameterError, SchemaError) as error:
        raise type(error)(f"{who}: {error}") from error
    extras = {name: as_host(value) for name, value in cast("Mapping[str, Any]", further).items()}
    for name, array in {"places": places, **extras}.items():
        if array.shape[:1] != (count,) or array.dtype.kind not in "biufc":
            raise ShapeError(f"{who}: expected {count} {name}, got {array.dtype} {array.shape}")
    return places, extras


LONG = 2**18
"""A batch of more bytes is drawn and read without the GIL, which takes more calls.

Only what each item has once counts: stacks, the rows of sequences and their states are copied without the GIL anyway.
"""

WEIGHT: Path = ("weight",)
PROBABILITY: Path = ("probability",)
WEIGHED: dict[Path, Field] = {WEIGHT: Field((), torch.float32), PROBABILITY: Field((), torch.float64)}
"""The fields that draws by priority add to a batch."""

APART = frozenset((FrameStack, Sequence))
"""Views that read fields apart, large ones or recurrent states, without Python."""
READERS = APART | {NStep, Hindsight}
"""Each is a :class:`relive.views.contract.DirectReader`."""

_from_numpy: Any = cast("Any", torch).from_numpy  # code that is not in the caches makes memory sooner so


class DirectAdd:
    """Adds steps of the same envs that can be copied as they are: one compiled call checks, stages and adds them.

    Only steps like the one that the copier has learned from are added. It is for rings in RAM: rows in files may have
    to come from the disk first, and the call keeps all other threads of Python waiting if the step is short.

    Args:
        ring: gets the rows.
        sampler: informed of each row that becomes drawable or stops being so.
        check: what checks such steps field by field.
        staging: where they are staged.
        envs: int64 ``[K]``, their envs.
        follows: whether they have final observations.
    """

    def __init__(
        self, ring: Ring, sampler: Sampler, check: StepChecker, staging: Staging, envs: Ints, follows: bool
    ) -> None:
        self._ring, self._sampler, self._staging, self._envs = ring, sampler, staging, envs
        self._copier, self._pick, self._size = staging.copier, check.pick, check.size
        self._mode = LINKED if ring.linked else ALONE if ring.alone else FINALS if follows else NO_FINALS
        self._plan: Plan | None = None
        self._rule: RingRule | None = None
        self._watches = False
        self._add = kernels.fast().add_step

    @staticmethod
    def suits(ring: Ring, staging: Staging | None) -> bool:
        """Whether steps that are staged so can be added in one call."""
        return staging is not None and ring.undo is None

    def add(self, step: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Add a step and return its leaves; or change nothing and return None, if it takes more than that.

        A step with an error is one that takes more.
        """
        plan, ring, sampler = self._copier.plan, self._ring, self._sampler
        if plan is None or len(step) != self._size or ring.before_overwriting is not None:
            return None
        watches = sampler.watches
        if plan is not self._plan or watches is not self._watches or (watches and ring.rule is not self._rule):
            self._prepare(plan, watches)
        adding = self._adding
        try:
            leaves = self._pick(step)
            if plan.asked is not None and not plan.asked.fit(leaves):
                return None
            if watches:
                adding.since = ring.counters.item(COMPLETED)
            ring.pending = adding
            found = self._add(id(leaves), self._handle)
        except Exception:  # the caller finds out what is wrong
            ring.pending = None
            return None
        if found < 0:
            ring.pending = None
            return None
        if found:
            sampler.changed(adding.where[:found], adding.opens[:found])
        ring.pending = None
        return leaves

    def _prepare(self, plan: Plan, watches: bool) -> None:
        """Make ready for steps of this plan, for what the sampler watches, and for the ring's rule."""
        ring, (rows, final, _, large, nbytes) = self._ring, self._staging
        self._plan = None  # an interrupt on the way leaves the handle and what it points to apart
        self._adding = ring.new_adding(self._envs, rows, final, watches)
        self._step = DirectStep(plan.table, ring.handle, self._adding.handle, large, self._mode, int(nbytes <= SHORT))
        self._handle = kernels.fast().handle_of(self._step)
        self._rule, self._watches, self._plan = ring.rule, watches, plan


class _Parts(NamedTuple):
    """What the batches of a layout consist of."""

    members: Members | SequenceMembers
    """The dicts of a batch."""
    rows: RowLayout
    """What the row of each of its items has."""
    table: Ints
    """These fields, as :func:`relive.kernels.reference.rows.split_rows` takes them."""
    names: tuple[str, ...]
    """What they are called."""
    large: Ints
    """Fields apart: the stacks or the recurrent states, as :mod:`relive.kernels.reference.sample` says."""
    large_names: tuple[Any, ...]
    """What they are called."""
    steps: Ints = np.zeros((0, 0), np.int64)
    """What each row of a sequence has, as :attr:`table`."""
    step_names: tuple[Path, ...] = ()
    """What these fields are called."""
    blank: Array = np.zeros(0, np.uint8)
    """The row that stands where a sequence has none."""


class _Ready(NamedTuple):
    """What batches take, as long as nothing of ``known`` changes."""

    known: tuple[BatchLayout | Sequences, Binding | SumTree | None, int, RingRule, int]
    """The layout of what the view reads, what draws go by, the seed, what can be drawn, and the view's history."""
    parts: _Parts | None
    """What a batch consists of; None if such batches are not made directly."""
    batch: DirectBatch | None = None
    """What :attr:`handle` points to."""
    handle: Any = None
    """What compiled kernels take for :attr:`batch`."""


class DirectSample:
    """Draws and reads batches in RAM: one compiled call, or two with functions of goals in between.

    Args:
        ring: has the rows.
        sampler: one of relive's own.
        progress: says which batch is next.
        schema: the fields of a step, as the user named them.
        calls: torch's functions that make tensors.
    """

    def __init__(self, ring: Ring, sampler: Sampler, progress: Progress, schema: Schema, calls: TensorCalls) -> None:
        self._ring, self._sampler, self._progress, self._schema, self._calls = ring, sampler, progress, schema, calls
        self._weighed = {path: field for path, field in WEIGHED.items() if path[0] in sampler.extras}
        self._ready: _Ready | None = None

    @classmethod
    def of(cls, ring: Ring, sampler: Sampler, progress: Progress, schema: Schema) -> Self | None:
        """One for these, if they allow it: rows in RAM."""
        in_ram, calls = type(ring.store) is ReplayRows and ring.undo is None, tensor_calls()
        return cls(ring, sampler, progress, schema, calls) if in_ram and calls is not None else None

    def sample(self, view: View, count: int, update: int, of: int) -> TensorDict | SequenceBatch | None:
        """The next batch; or None, if that takes more than compiled code can do. Then nothing has changed.

        Raises:
            ReliveError: as the view says. The batch counts as drawn then.
        """
        kind, ring, sampler, come = type(view), self._ring, self._sampler, self._progress
        if kind not in READERS or get_worker_info() is not None or (ring.store.apart and kind not in APART):
            return None
        reader: Any = view  # a DirectReader
        layout, terms = reader.batch_of(ring), sampler.terms(update, of)
        if layout is None or terms is None:
            return None
        weights, how = terms
        known, ready = (layout, weights, come.seed, ring.rule, reader.history), self._ready
        if ready is None or ready.known != known:
            ready = self._ready = self._prepared(view, *known)
        parts = ready.parts
        if parts is None or count * parts.rows.nbytes > LONG:
            return None
        rows, found = _from_numpy(np.empty((count, parts.rows.nbytes), np.uint8)), parts.members.empty()
        number, before = come.draws - come.first, None
        come.draws += 1  # before the draw, as functions of goals may look, or draw another batch
        come.sampled += count
        if self._weighed:
            before = sampler.draw_state()
            sampler.count_draw()
        if reader.sample(ready.handle, ring, (number, *how), count, rows, found):
            return parts.members.batch(found, count)
        come.draws -= 1
        come.sampled -= count
        if self._weighed:
            sampler.undo_draws(before)
        return None

    def _prepared(
        self, view: View, layout: BatchLayout | Sequences, weights: Binding | SumTree | None, seed: int, rule: RingRule,
        history: int,
    ) -> _Ready:  # fmt: skip
        """What batches of this layout take."""
        known, calls, none = (layout, weights, seed, rule, history), self._calls, np.zeros(0, np.int64)
        parts = self._sequences(layout) if isinstance(layout, Sequences) else self._transitions(layout)
        if parts is None or rule != rule_of(view):
            return _Ready(known, None)
        tree = weights.tree if isinstance(weights, Binding) else weights
        tops, until = (none, np.zeros(0)) if tree is None else tree.whole
        nodes, offsets = weights.arrays if isinstance(weights, SumTree) else (np.zeros(0), np.zeros(0, np.uint64))
        at = parts.rows.offsets
        batch = DirectBatch(
            calls.describe, calls.lend, calls.adopt, self._ring.handle, np.array([seed % 2**64], np.uint64),
            weights.handle if isinstance(weights, Binding) else none, tops, until, at.get(WEIGHT, 0),
            at.get(PROBABILITY, 0), layout.handle, parts.table, id(parts.names), parts.large, id(parts.large_names),
            nodes, offsets, parts.steps, id(parts.step_names), parts.blank,
        )  # fmt: skip
        return _Ready(known, parts, batch, kernels.fast().handle_of(batch))

    def _transitions(self, layout: BatchLayout) -> _Parts | None:
        """The parts of a batch of transitions. If there are large fields, all of them are read as stacks."""
        store: Any = self._ring.store
        whole, stacked, stacks = RowLayout(*layout.groups, self._weighed), with_next(store.apart), store.stack_table()
        if whole.table is None or stacks is None or not Members.suit((*whole.fields, *stacked)):
            return None
        members, (large, frames) = Members([*layout.fields, *stacked, *self._weighed]), stacks
        whole.table[:, LINE_INTO], frames[:, LINE + LINE_INTO] = (
            [members.into[path] for path in paths] for paths in (whole.fields, large)
        )
        names, large_names = (tuple(path[-1] for path in paths) for paths in (whole.fields, large))
        return _Parts(members, whole, whole.table, names, frames, large_names)

    def _sequences(self, sequences: Sequences) -> _Parts | None:
        """The parts of a batch of sequences: columns in the first dict, then facts, then recurrent states."""
        store: Any = self._ring.store
        whole, steps, states = RowLayout(FACT_FIELDS, self._weighed), sequences.layout, sequences.states
        found, hidden = store.state_table(states), partial(self._schema.rebuild, "hidden")
        if whole.table is None or steps.table is None or found is None:
            return None
        paths, lines = found
        whole.table[:, LINE_INTO], lines[:, LINE + LINE_INTO] = 1, 2
        names, known = tuple(path[-1] for path in whole.fields), [*FACTS, *(path[-1] for path in self._weighed)]
        leaves = [path for path in sequences.order if path not in FACT_FIELDS and path not in states]
        members = SequenceMembers(leaves, known, states, hidden, sequences.cut.time_first)
        rows = whole, whole.table, names
        return _Parts(members, *rows, lines, tuple(paths), steps.table, tuple(steps.fields), sequences.blank)


WRITTEN = 2**16
"""How many bytes of each env, after its newest row, are asked for before they are overwritten."""


FARTHEST = 4096
"""The most rows that are asked for before and after the row of a guess."""


class Coming:
    """Guesses the next batch, which is a function of the seed and its number, and asks the system for its rows.

    A guess is only a hint: no draw depends on it. The caller holds the replay's lock.

    Args:
        ring: the rows.
        sampler: the sampler that draws.
        progress: the seed, and the number of the next batch.
        ahead: asks the system for rows.
    """

    def __init__(self, ring: Ring, sampler: Any, progress: Progress, ahead: LookAhead) -> None:
        self._ring, self._sampler, self._progress, self.ahead = ring, sampler, progress, ahead
        self._last = 0, 1, 1
        """The last batch: its size, its number in its round, and the number of batches in the round."""
        self._rated = self._waits = False
        self._heads: Ints = ring.heads.copy()
        self._looked = -1
        """How many batches there had been at the last look, when the heads were these."""
        self._asked: Ints = np.full(ring.num_envs, -1, np.int64)
        self._batch_rows = max(WRITTEN // max(1, ahead.row_bytes), 1)

    def after_batch(self, view: View, batch_size: int, update: int, of: int) -> None:
        """Note that a batch was drawn, and look ahead.

        If priorities come after each batch, the next batch depends on them. Then the look waits for
        :meth:`after_rating`.
        """
        self._last, self._waits, self._rated = (batch_size, update, of), self._rated, False
        if not self._waits and self.ahead.is_wanted():
            self._look(view)

    def after_rating(self, view: View) -> None:
        """Note that priorities were updated, and look ahead if a look waits for them."""
        self._rated = True
        if self._waits and self.ahead.is_wanted():
            self._waits = False
            self._look(view)

    def _look(self, view: View) -> None:
        """Ask for the rows of the next batch, and for those that will be overwritten next."""
        ring, come, (batch_size, update, of) = self._ring, self._progress, self._last
        key = stream(stream_of(come.seed), come.draws - come.first)
        try:
            places = guess(self._sampler, ring, batch_size, key, update % of + 1, of)
        except ReliveError:  # if it is a real error, the next draw raises it
            places = None
        before, after = self._reach(view)
        begins, ends = self._written()
        if places is not None:
            places = places[(places >= 0) & (places < ring.store.num_rows)]  # an altered file can name others
            env_begins = places // ring.rows * ring.rows
            begins = np.concatenate([np.maximum(places - before, env_begins), begins])
            ends = np.concatenate([np.minimum(places + after, env_begins + ring.rows), ends])
        if len(begins):
            self.ahead.ask(begins, ends)

    def _reach(self, view: View) -> tuple[int, int]:
        """How many rows before and after the row of a guess to ask for.

        As steps come, the rows that can be drawn move on. The rows are expected to move on as far before the next batch
        as they did before the last one, if there was a look then.
        """
        ring, inner, draws = self._ring, getattr(view, "window", view), self._progress.draws
        added = int((ring.heads - self._heads).sum()) if draws == self._looked + 1 else 0
        moved = -(-added // ring.num_envs)
        self._heads, self._looked = ring.heads.copy(), draws
        back = 0 if not self._sampler.watches else 2 * added
        n = getattr(inner, "n", 1)  # in a user's own view, n may mean anything
        ahead = (n if is_count(n) else 1) + 1 + moved + back
        return min(rule_of(view).history + back, FARTHEST), min(ahead, FARTHEST)

    def _written(self) -> tuple[Ints, Ints]:
        """The rows that will be overwritten next, in each env that has reached a new part of its ring: begins, ends."""
        ring, part = self._ring, self._batch_rows
        envs = np.flatnonzero(ring.heads // part != self._asked)
        self._asked[envs] = ring.heads[envs] // part
        first = ring.heads[envs] % ring.rows
        begins = envs * ring.rows + first
        return begins, envs * ring.rows + np.minimum(first + 2 * part, ring.rows)


def coming_of(ring: Ring, sampler: Any, progress: Progress) -> Coming | None:
    """The look-ahead of a replay; None if the replay is not in files, or if this system takes no advice."""
    store = ring.store
    if not (isinstance(store, ReplayRows) and isinstance(store.keeper, MappedKeeper) and can_look_ahead()):
        return None
    arrays = [store.target, *cast("Any", store).blocks.values()]
    return Coming(ring, sampler, progress, LookAhead(store.keeper, arrays))


class Ratings:
    """Passes TD errors to a sampler that can use them. The caller holds the replay's lock.

    Args:
        ring: knows which transitions are still stored.
        sampler: a :class:`relive.Prioritized`, a sampler around one, or a sampler without priorities.
        progress: counts the errors of transitions that were overwritten meanwhile.
    """

    def __init__(self, ring: Ring, sampler: Sampler, progress: Progress) -> None:
        self.ring, self.sampler, self.progress = ring, sampler, progress
        inner = sampler.inner if isinstance(sampler, Recent) else sampler
        self.prioritized = inner if isinstance(inner, Prioritized) else None
        """The sampler that has the priorities, or None."""
        self._calls = tensor_calls()

    def update(self, view: View, index: Any, td_error: Any, mask: Any) -> int:
        """Set the errors of the transitions ``index``. Returns how many of them were overwritten meanwhile."""
        sampler = self.prioritized or self._require_priorities()
        late, calls, kernel = UNUSUAL, self._calls, kernels.fast()
        if calls is not None and type(index) is Tensor and type(td_error) is Tensor:
            given = calls.describe, id(index), id(td_error)
            if mask is None:
                late = sampler.rate(kernel.rate_tensors, *given)
            elif type(mask) is Tensor and (time_first := time_first_of(view)) is not None:
                late = sampler.rate(kernel.rate_sequences, *given, id(mask), bool(time_first), float(sampler.eta))
        if late == UNUSUAL:
            late = self._update_checked(sampler, view, index, td_error, mask)
        come = self.progress
        come.late += late
        if late:
            come.keep()
        return late

    def take_over(self, other: Ratings, env: int, to: int) -> None:
        """Give the newest transitions of env ``to`` the TD errors of their originals, in env ``env`` of ``other``."""
        mine, its = self.prioritized, other.prioritized
        if mine is None or its is None:
            return
        here, there = (_complete(ring, e) for ring, e in ((self.ring, to), (other.ring, env)))
        count = min(len(here), len(there))
        mine.take_over(its, there[len(there) - count :], here[len(here) - count :])

    def of(self, index: Ints) -> Any:
        """The priorities of the transitions ``index``, float64 ``[B]``; 0 for those that can no longer be drawn."""
        sampler, places = self._require_priorities(), self._places(index)
        found = sampler.weights(np.maximum(places, 0))
        found[places < 0] = 0.0
        return found

    def _require_priorities(self) -> Prioritized:
        """The sampler with the priorities.

        Raises:
            LifecycleError: there is none.
        """
        if self.prioritized is None:
            raise LifecycleError(f"{self.sampler!r} has no priorities; create the buffer with sampler=Prioritized()")
        return self.prioritized

    def _places(self, index: Ints) -> Ints:
        """The places of these indices, -1 for those that can no longer be drawn.

        Raises:
            ParameterError: one was never issued.
        """
        places, unknown = self.ring.find(index)
        if unknown >= 0:
            raise ParameterError(f"index: entry {unknown}, {index[unknown]}, was never issued; pass batch['index']")
        return places

    def _update_checked(self, sampler: Prioritized, view: View, index: Any, td_error: Any, mask: Any) -> int:
        """As :meth:`update`, with checks that raise an error for what is wrong."""
        if hasattr(index, "keys"):
            raise ParameterError(f"index: expected integers [B], got a {type(index).__name__}; pass batch['index']")
        where = whole_numbers(index, "index")
        errors, real = by_item(view, where, doubles(td_error), None if mask is None else as_host(mask, "mask"))
        sizes = magnitudes(errors)
        if errors.ndim == 2:
            sizes = sampler.reduced(errors, real)
        late = sampler.rate(kernels.fast().rate, len(where), _address(where), 1, _address(sizes), 1, False)
        if late != UNUSUAL:
            return late
        places = self._places(where)
        alive = places >= 0
        sampler.update(places[alive], sizes[alive])
        return len(places) - int(np.count_nonzero(alive))


def _complete(ring: Ring, env: int) -> Ints:
    """The places of an env's complete transitions, in the order of time."""
    places = ring.live_places(env)
    return places[ring.stamp[places] >= 0]


def _address(array: Any) -> int:
    """The address of a NumPy array in one piece."""
    return array.__array_interface__["data"][0]


def magnitudes(errors: Any) -> Any:
    """The sizes of TD errors, item by item: float64 ``[B]`` or ``[B, L]`` -> float32 ``[B]`` or ``[B * L]``.

    Raises:
        NotFiniteError: one is NaN, infinite, or too large for float32. Names the first item with such an error.
    """
    sizes = np.empty(errors.size, np.float32)
    bad = kernels.fast().magnitudes(errors.reshape(-1), LARGEST_ERROR, sizes)
    if bad >= 0:
        entry = bad // errors[0].size
        raise NotFiniteError(f"td_error: entry {entry} is {errors[entry]}, not a finite float32; fix the loss")
    return sizes


def doubles(numbers: Any, name: str = "td_error") -> Any:
    """Numbers, one for each row of a batch, of any real dtype and on any device, as float64.

    Raises:
        DTypeError: they are not real numbers.
        ShapeError: a list with rows of different lengths.
    """
    given = as_host(numbers, name)
    if given.size and given.dtype.kind not in "fiub":
        raise DTypeError(f"{name}: expected real numbers, got {given.dtype}; pass one float for each row of the batch")
    return np.asarray(given, np.float64) if given.size else np.zeros(given.shape)


def by_item(view: View, index: Ints, errors: Any, mask: Any) -> tuple[Any, Any]:
    """TD errors and their mask, item by item. Errors of transitions are ``[B]`` and have no mask. Errors of sequences
    and their mask become ``[B, T]``, with 0 for errors that do not count.

    Raises:
        ShapeError: the errors do not fit the items ``index`` as ``view`` reads them.
        ParameterError: errors of sequences come without their mask.
    """
    time_first, count = time_first_of(view), index.size
    if errors.ndim != 2 or time_first is None:
        if index.ndim != 1 or errors.shape != index.shape:
            raise ShapeError(_not_by_item(index.shape, errors.shape))
        if mask is not None:
            raise ShapeError(
                f"mask: errors [B] have none, got {mask.dtype} {mask.shape}; leave out the errors that do not count"
            )
        return errors, None
    axes = "[T, B]" if time_first else "[B, T]"
    if index.ndim != 1 or errors.shape[1 if time_first else 0] != count:
        raise ShapeError(
            f"td_error: expected {axes} of {count} sequences, as the view has time "
            f"{'first' if time_first else 'second'}, got {errors.shape}"
        )
    if mask is None:
        raise ParameterError("mask: errors of sequences need one, for the steps that count; pass mask=seq['mask']")
    if mask.shape != errors.shape or mask.dtype != np.bool_:
        raise ShapeError(f"mask: expected bool {errors.shape} for errors {axes}, got {mask.dtype} {mask.shape}")
    errors = np.where(mask, errors, 0.0)  # a network's output for padding may be NaN
    return (errors.T, mask.T) if time_first else (errors, mask)


def _not_by_item(index: tuple[int, ...], errors: tuple[int, ...]) -> str:
    """The message for errors that are not one for each index."""
    message = f"update_priorities: expected an index [B] and errors [B], got {index}, {errors}"
    if len(index) == 1 and len(errors) == 2:
        message += (
            "; a target [B] minus a value [B, 1] is [B, B]: take value.squeeze(-1). "
            "Errors of two axes belong to a view that reads sequences, such as Sequence"
        )
    return message


class Episode(NamedTuple):
    """The stored transitions of one episode."""

    env: int
    """The env that played it."""
    steps: TensorDict
    """The transitions ``[k]`` in the order of time: the fields of a step, ``next_obs`` and ``index``."""
    begins: bool
    """Whether the first of them is the first step of the episode. A full ring overwrites the oldest steps."""
    ended: bool
    """Whether the last of them terminated or was truncated. A running or interrupted episode has not ended."""

    @property
    def whole(self) -> bool:
        """Whether all of the episode is here."""
        return self.begins and self.ended

    @property
    def final_obs(self) -> Any:
        """The observation after the last step, ``[...]``, as the schema nests it."""
        return cast("Any", self.steps)[-1]["next_obs"]


class Run(NamedTuple):
    """Successive transitions of one episode: the rows ``first`` up to ``until`` of an env."""

    env: int
    first: int
    until: int


def runs_of(ring: Ring) -> list[Run]:
    """The episodes of the live rows, env by env in the order of time.

    Raises:
        SchemaError: the transitions have no order.
    """
    if ring.alone and not ring.linked:
        raise SchemaError("episodes: the transitions of this replay have no order; read data() instead")
    found: list[Run] = []
    for env in range(ring.num_envs):
        places = ring.live_places(env)
        step, complete = ring.step[places], ring.stamp[places] >= 0
        goes_on = np.zeros(len(places), np.bool_)
        goes_on[1:] = complete[1:] & complete[:-1] & (step[1:] == step[:-1] + 1)
        oldest = int(ring.oldest[env])
        starts, ends = complete & ~goes_on, complete & ~np.append(goes_on[1:], False)
        for low, high in zip(np.flatnonzero(starts).tolist(), np.flatnonzero(ends).tolist(), strict=True):
            found.append(Run(env, oldest + low, oldest + high + 1))
    return found


def read_run(ring: Ring, run: Run) -> Episode | None:
    """The part of an episode that is still stored; None if no step is."""
    first = max(run.first, int(ring.oldest[run.env]))
    if first >= run.until:
        return None
    places: Ints = run.env * ring.rows + np.arange(first, run.until, dtype=np.int64) % ring.rows
    fields = _transitions(ring, places)
    ended = bool(fields["terminated",][-1] | fields["truncated",][-1])
    return Episode(run.env, as_tensordict(fields, (len(places),)), int(ring.step[places[0]]) == 0, ended)


def table(ring: Ring, next_obs: bool) -> dict[Path, Array]:
    """All complete transitions as columns ``[S, ...]``, env by env in the order of time.

    ``env``, ``episode``, ``step`` and ``index`` come first. ``episode`` is the number of the episode in this table, and
    ``step`` counts within the episode. Transitions without an order come in the order of completion, and have neither.
    """
    if ring.alone and not ring.linked:
        anchors = ring.anchors()
        places = anchors[np.argsort(ring.stamp[anchors], kind="stable")]
        order: dict[Path, Array] = {("env",): places // ring.rows}
    else:
        runs = runs_of(ring)
        sizes = np.array([run.until - run.first for run in runs], np.int64)
        parts = [run.env * ring.rows + np.arange(run.first, run.until, dtype=np.int64) % ring.rows for run in runs]
        places = np.concatenate([np.zeros(0, np.int64), *parts])
        episode = np.repeat(np.arange(len(runs)), sizes)
        order = {("env",): places // ring.rows, ("episode",): episode, ("step",): ring.step[places]}
    fields = {path: numpy_view(field.cpu()) for path, field in _transitions(ring, places).items()}
    order["index",] = fields.pop(("index",))
    return order | {path: field for path, field in fields.items() if next_obs or path[0] != "next_obs"}


def _transitions(ring: Ring, places: Ints) -> dict[Path, Any]:
    """The fields of the steps at these places, their next observations and indices."""
    fields = NStep(1, 1.0).read(ring, places)
    return {path: fields[path] for path in fields if path[0] not in ("discount", "steps", "next_index")}
