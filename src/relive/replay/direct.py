"""DirectAdd and DirectSample: a step that is added, and a batch that is drawn and read, in one compiled call."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import numpy as np
import torch
from torch.utils.data import get_worker_info

from .. import kernels
from ..batches.sequences import SequenceBatch, SequenceMembers
from ..batches.tensordicts import Members
from ..kernels.reference.fields import INTO
from ..kernels.reference.sample import LINE
from ..kernels.ring_state import ALONE, COMPLETED, FINALS, LINKED, NO_FINALS, DirectBatch, DirectStep
from ..kernels.tensor_calls import TensorCalls, tensor_calls
from ..memory.copier import SHORT, Plan
from ..memory.layout import BatchLayout, RowLayout
from ..memory.ram import ReplayRows, with_next
from ..memory.store import Staging
from ..ring.ring import Ring
from ..ring.rule import Rule
from ..ring.sequences import FACT_FIELDS, FACTS, Sequences
from ..samplers.contract import Sampler
from ..samplers.sumtree import SumTree
from ..samplers.weighing import Binding
from ..steps.arrays import Array, Ints
from ..steps.checker import StepChecker
from ..steps.schema import Field, Schema
from ..steps.trees import Path
from ..views.contract import View, rule_of
from ..views.frames import FrameStack
from ..views.hindsight import Hindsight
from ..views.sequences import Sequence
from ..views.transitions import NStep
from .progress import Progress

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["DirectAdd", "DirectSample"]


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
        self._rule: Rule | None = None
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
    """These fields, as :func:`relive.kernels.reference.fields.split_rows` takes them."""
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

    known: tuple[BatchLayout | Sequences, Binding | SumTree | None, int, Rule, int]
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
        self, view: View, layout: BatchLayout | Sequences, weights: Binding | SumTree | None, seed: int, rule: Rule,
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
        whole.table[:, INTO], frames[:, LINE + INTO] = (
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
        whole.table[:, INTO], lines[:, LINE + INTO] = 1, 2
        names, known = tuple(path[-1] for path in whole.fields), [*FACTS, *(path[-1] for path in self._weighed)]
        leaves = [path for path in sequences.order if path not in FACT_FIELDS and path not in states]
        members = SequenceMembers(leaves, known, states, hidden, sequences.cut.time_first)
        rows = whole, whole.table, names
        return _Parts(members, *rows, lines, tuple(paths), steps.table, tuple(steps.fields), sequences.blank)
