"""OnDevice: adds, batches and priorities of a replay without a word from the host.

The replay's ring, in RAM, and this part know the same rows, and one of the two may be ahead. Steps and batches that are
all of tensors on the device are dealt with here; then the ring is out of date, and its ``pending`` says so. Whatever
needs it, such as ``save`` or a step of some envs, brings it up to date first, which waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast
from warnings import warn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from .. import core
from ..core.numbers import signed
from ..core.words import ALONE, COMPLETED, COUNT, DRAWABLE, EPISODES, FINALS, HEAD, NEXT, NOT_FINITE, TAIL
from ..errors import ParameterError
from ..memory.device import DeviceRows
from ..memory.graphs import Graphed, has_graphs
from ..memory.ram import HOSTED
from ..ring.ring import Ahead, Change, Ring
from ..samplers.prioritized import Prioritized
from ..samplers.recent import Recent
from ..samplers.uniform import Uniform
from ..steps.schema import Path
from ..views.contract import rule_of
from ..views.frames import FrameStack
from ..views.hindsight import Hindsight, facts
from ..views.sequences import Sequence as Sequences
from ..views.transitions import NStep
from .goals import DeviceGoals, GoalForm
from .priorities import DevicePriorities
from .recent import DeviceRecent
from .ring import DeviceRing, Spots
from .sequences import Form, read_sequences
from .windows import DeviceWindows

__all__ = ["FEWEST_ROWS", "OnDevice", "bookkeeping_bytes"]


LONGEST_WINDOW = 64
"""The most steps of a window that is read here: each takes operations of its own."""


COUNTED = COMPLETED, EPISODES, NOT_FINITE
"""The words of a ring's counters that the device counts, in its order."""


FEWEST_ROWS = 4
"""Rows an env needs so that a step, its final observation and the step before have different places."""


FEWEST_NEWEST = 2
"""Newest transitions for each env, so that a third of the rows among them or more can be drawn: an env's newest row is
not complete, and neither is the final observation that may follow each of the others."""


GRAPHS_OF_TORCH = "reduce-overhead", "max-autotune"
"""Modes of torch.compile that make CUDA graphs."""


MOST = 2**62
"""More transitions than any ring has; a larger ``c_min`` may be no int64."""


class Progress(Protocol):
    """The counts of a replay: its seed, batches drawn before this seed and in all, rows drawn, late priorities."""

    seed: int
    first: int
    draws: int
    sampled: int
    late: int


class OnDevice:
    """The bookkeeping of a replay on its device.

    Args:
        ring: the same in RAM, of rows that are on the device.
        sampler: its sampler, one that is drawn by here.
        progress: the counts of its draws.
        lock: of the replay.
    """

    def __init__(self, ring: Ring, sampler: Uniform | Prioritized | Recent, progress: Progress, lock: Any) -> None:
        store = cast("DeviceRows", ring.store)
        self._ring, self._store, self._progress, self._lock = ring, store, progress, lock
        self._rows = DeviceRing(ring.num_envs, ring.rows, ring.mode, store.device)
        self._sampler = sampler if isinstance(sampler, Prioritized) else None
        self._priorities = None if self._sampler is None else DevicePriorities(self._rows, store.device)
        self._uniform = sampler if isinstance(sampler, Uniform) else None
        self._windows: DeviceWindows | None = None
        """The weights of windows, where draws need them."""
        self._goals: DeviceGoals | None = None
        """Where episodes end, for goals that were reached later."""
        self._goal_form: tuple[Any, GoalForm] | None = None
        """The parameters of the view that such a batch was read by, and what they say."""
        self._emphasis = sampler if isinstance(sampler, Recent) else None
        self._recent = None if self._emphasis is None else DeviceRecent(self._rows, store.device)
        self._source = self._rows if self._recent is None else self._recent
        """The part that knows the first row of each env that is drawn from."""
        self._ahead = Ahead(self.bring_back)
        self._ready = False
        """True if this is at least as new as the ring."""
        self._changing = False
        """True within a call that changes the device. A call that finds it set was preceded by one that an exception,
        such as Ctrl-C, broke off."""
        self._adds = 0
        """Steps since this was made from the ring."""
        self._sparse_until = 0
        """After more steps than these a third of the ring's rows or more can be drawn."""
        self._lasting = -1
        """The steps for which one of its windows can be drawn, from then on."""
        self._seeded: tuple[int, int, int] | None = None
        """The seed, the batches before it, and the number of the next one, that the device has."""
        self._parameters: tuple[Any, ...] | None = None
        """The sampler's parameters that the device has."""
        self._newest: tuple[float, int] | None = None
        """The share of the transitions that are the newest, and at least how many, as the device has it."""
        self._stored: Any = None
        """The sampler's arrays that the device had its own from."""
        self._use(lambda call: call)

    @classmethod
    def of(cls, ring: Ring, sampler: Any, progress: Progress, lock: Any) -> OnDevice | None:
        """One for a ring whose rows are on a device; None if this ring, sampler or device is for the host alone."""
        store = ring.store
        known = isinstance(store, DeviceRows) and _suits(store.device, sampler, ring.rows)
        return cls(ring, sampler, progress, lock) if known else None

    def compile(self, **options: Any) -> None:
        """Compile what the calls do, each as a whole, when it is next needed; options of ``torch.compile``.

        On a GPU, a multiplication and an addition are not fused, which would round once, unless ``mode`` or
        ``backend`` is given.

        Raises:
            ParameterError: the options ask for CUDA graphs of torch's.
        """
        mode = options.get("mode")
        if mode in GRAPHS_OF_TORCH or options.get("options", {}).get("triton.cudagraphs"):
            given = ", ".join(f"{name}={value!r}" for name, value in options.items())
            raise ParameterError(
                f"compile({given}): a replay makes CUDA graphs of its own, and torch's cannot be within them; "
                "use mode='default' or 'max-autotune-no-cudagraphs'"
            )
        if not options.keys() & {"mode", "backend"}:
            options["options"] = {"emulate_precision_casts": True, **options.get("options", {})}
        self._use(lambda call: torch.compile(call, fullgraph=True, **options))

    def _use(self, made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Have calls run what is ``made`` of the functions below; on a GPU, as graphs of that."""

        def by_graphs(call: Callable[..., Any]) -> Callable[..., Any]:
            made_of_it, device = made(call), self._store.device
            return Graphed(made_of_it, device, self._relied_on) if has_graphs(device) else made_of_it

        self._store_step = by_graphs(self._add)
        self._read_batch = by_graphs(self._batch)
        self._read_sequences = by_graphs(self._sequences)
        self._read_relabelled = made(self._relabelled)  # functions of the user may do more than a graph holds
        self._set_errors = None if self._priorities is None else by_graphs(self._priorities.rate)

    def _relied_on(self) -> tuple[Any, ...]:
        """The objects and numbers that decide, beside its arguments, which operations a call runs."""
        recent, sampler = self._recent, self._sampler
        parameters = () if sampler is None else (sampler.stratified,)
        rounds = () if recent is None else (recent.rounds, recent.bits)
        return self._rows.rule, self._windows, self._goals, *parameters, *rounds

    # -- calls --------------------------------------------------------------------------------------------------

    def suits(self, view: Any) -> bool:
        """True if batches can be read here; if not, steps are better stored where the host knows of them."""
        if type(view) is Sequences:
            return self._suits_sequences(view)
        stacks = type(view) is FrameStack
        window = view.window if stacks else view
        if type(window) is Hindsight:
            if not (window.tensors and window.relabel is None and self._rows.mode == FINALS and not stacks):
                return False
            if (window.info,) in HOSTED:
                return False
        elif type(window) is not NStep or window.each_reward is not None:
            return False
        if window.n > LONGEST_WINDOW:
            return False
        if stacks and (self._rows.mode != FINALS or self._sampler is not None or view.history >= LONGEST_WINDOW):
            return False
        if stacks and view.history + 2 > self._rows.rows:
            return False  # an env may have no row with its history
        if window.n > 1 and self._rows.mode == ALONE:
            return False
        if self._emphasis is not None and self._emphasis.c_min < FEWEST_NEWEST * self._rows.num_envs:
            return False
        return self._ring.rule == rule_of(view) and (self._sampler is None or self._sampler.normalize == "batch")

    def _suits_sequences(self, view: Sequences) -> bool:
        rule, rows = view.rule, self._rows
        if self._uniform is None or rows.mode != FINALS or view.n > LONGEST_WINDOW or self._ring.rule != rule:
            return False
        # with these, an env that has got some rows has a window: it ends in its episode that goes on, or with the last
        return not rule.sparse or (rule.tails and rows.rows >= rule.history + rule.length + rule.stride + 4)

    def add(self, leaves: Sequence[Any], final: Sequence[Any] | None) -> bool:
        """Store a checked step of each env; or change nothing and return False if the host has to."""
        device = self._store.device
        if not all(isinstance(x, Tensor) and x.device == device for x in (*leaves, *(final or ()))):
            return False
        if final is None and self._rows.mode == FINALS:
            return False  # whether an episode ended is known on the device alone
        self._prepare()
        self._adds += 1
        self._changing = True
        self._store_step(list(leaves), None if final is None else list(final))
        self._changing = False
        return True

    def sample(self, count: int, view: Any, update: int, of: int) -> dict[Path, Tensor] | None:
        """The fields ``[count]`` of the next batch as a view reads them; None if the host has to.

        It is number ``update`` of the ``of`` batches of its round.
        """
        if not (self.has_some and self.suits(view) and get_worker_info() is None):
            return None
        self._prepare()
        progress, sampler = self._progress, self._sampler
        seed, first, number = progress.seed, progress.first, progress.draws - progress.first
        if (seed, first, number) != self._seeded:
            # the device counts its batches itself, so it is told only when somebody else drew or set the seed
            self._rows.mixed.fill_(signed(core.mix(seed)))
            self._rows.draws.fill_(number)
        self._seeded = seed, first, number + 1
        progress.draws += 1
        progress.sampled += count
        if sampler is not None:
            sampler.count_draw()  # as the device does
            self._parameters = (*cast("Any", self._parameters)[:3], sampler.draw_state())
        if self._emphasis is not None and self._recent is not None:
            newest = self._emphasis.share(update, of), min(self._emphasis.c_min, MOST)
            if newest != self._newest:
                self._recent.share.fill_(newest[0])
                self._recent.least.fill_(newest[1])
            self._newest = newest
        try:
            return self._read(count, view)
        except BaseException:
            self._seeded = self._parameters = None  # the batch is used up, and it is not known how far the device came
            raise

    def _read(self, count: int, view: Any) -> dict[Path, Tensor]:
        """The next batch, as a view reads it."""
        if isinstance(view, Sequences):
            return self._read_sequences(count, Form.of(view, self._ring))
        if isinstance(view, Hindsight):
            now = facts(view), view.n, view.gamma, view.ratio
            if self._goal_form is None or self._goal_form[0] != now:
                self._goal_form = now, GoalForm.of(view, self._store)
            if self._goals is None:
                self._goals = DeviceGoals(self._rows, self._store.device)
                self._goals.note_all()
            return self._read_relabelled(count, self._goal_form[1])
        window, stack = view, None
        if isinstance(view, FrameStack):
            window, stack = view.window, (view.stacked_of(self._ring), view.depth, view.pad == "repeat")
        return self._read_batch(count, window.n, float(window.gamma), stack)

    def rate(self, index: Any, errors: Any) -> Tensor | None:
        """Set the errors of a batch; how many of its rows are gone. None if the host has to."""
        floats = isinstance(errors, Tensor) and errors.dtype in (torch.float32, torch.float64) and errors.ndim == 1
        whole = floats and isinstance(index, Tensor) and index.dtype is torch.int64 and index.shape == errors.shape
        if not (self._is_ready and whole and index.device == errors.device == self._store.device):
            return None
        if self._set_errors is None or not len(index):
            return None
        self._prepare()
        self._changing = True
        late = self._set_errors(index, errors.detach())
        self._changing = False
        return late

    @property
    def has_some(self) -> bool:
        """True if a good part of the rows can be drawn, as far as the host knows without waiting."""
        if self._windows is not None:
            # either a window from before the steps is still whole, or the steps have made some of their own
            rule = self._rows.rule
            return self._is_ready and (self._adds <= self._lasting or self._adds > rule.history + rule.length + 1)
        return self._is_ready and self._adds > self._sparse_until

    def count(self) -> int:
        """How many rows can be drawn. It waits for the device."""
        if self._changing:
            self.bring_back()
            return self._ring.drawable
        return int(self._rows.count_drawable())

    def forget(self) -> None:
        """The ring in RAM, which is up to date, is about to change, or has."""
        self._ready = False

    # -- what they do on the device -----------------------------------------------------------------------------

    def _add(self, leaves: list[Tensor], final: list[Tensor] | None) -> None:
        given = dict(zip(self._store.leaves, leaves, strict=True))
        facts = given["reward",], given["terminated",], given["truncated",]
        added = self._rows.plan(*facts)  # changes nothing: the rows are written before the cursors count them
        ended = {} if final is None else dict(zip([path for path in given if path[0] == "obs"], final, strict=True))
        # final observations are written as whole rows, and for all envs: those of episodes that go on go to a row that
        # nobody reads. For a write into a view of rows, a compiler copies all rows
        for part in self._store.parts:
            paths = part.layout.fields
            part.put(added.places, part.packed({path: given[path] for path in paths}))
            last = {path: ended[path] for path in paths if path in ended}
            if last:
                part.put(added.finals, part.packed(last))
        self._rows.write(added, *facts)
        if self._priorities is not None:
            self._priorities.added(added)
        if self._windows is not None:
            self._windows.added(added)
        if self._goals is not None:
            self._goals.added(added)

    def _batch(
        self, count: int, n: int, gamma: float, stack: tuple[Sequence[Path], int, bool] | None = None
    ) -> dict[Path, Tensor]:
        spots, weighed = self._drawn(count, self._rows.next_stream())
        windows = self._rows.windows(spots, n, gamma)
        found = windows.facts
        stacks: dict[Path, tuple[Tensor, Tensor]] = {}
        if stack is not None:
            paths, depth, repeat = stack
            frames = self._rows.frames(spots.places, depth, repeat), self._rows.frames(windows.last, depth, repeat)
            stacks = dict.fromkeys(paths, frames)
        return self._store.read_planned(spots.places, windows.last, found, stacks) | weighed

    def _relabelled(self, count: int, form: GoalForm) -> dict[Path, Tensor]:
        assert self._goals is not None
        stream = self._rows.next_stream()
        spots, weighed = self._drawn(count, stream)
        return self._goals.read(self._store, spots, stream, form) | weighed

    def _drawn(self, count: int, stream: Tensor) -> tuple[Spots, dict[Path, Tensor]]:
        """Rows, and the fields that the sampler adds to a batch."""
        if self._windows is not None:
            return self._windows.draw(count, stream), {}
        if self._priorities is None or self._sampler is None:
            return self._rows.draw(count, stream, self._source.first()), {}
        drawn = self._priorities.draw(count, stream, self._sampler.stratified)
        return drawn.spots, {("weight",): drawn.weight, ("probability",): drawn.probability}

    def _sequences(self, count: int, form: Form) -> dict[Path, Tensor]:
        spots, _ = self._drawn(count, self._rows.next_stream())
        return read_sequences(self._store, self._rows, spots, form)

    # -- between the ring in RAM and the device -----------------------------------------------------------------

    @property
    def _is_ready(self) -> bool:
        """True if this is at least as new as the ring, its rule and the sampler."""
        known = self._ready and not self._changing
        return known and self._rows.rule == self._ring.rule and self._kept is self._stored

    @property
    def _kept(self) -> Any:
        """The sampler's own arrays of all rows; None if it has none."""
        if self._sampler is not None:
            return self._sampler.stored
        return None if self._uniform is None else self._uniform.windows

    def _prepare(self) -> None:
        """Make this as new as the ring, with the sampler's parameters; from now on it is ahead."""
        if self._changing:
            self.bring_back()
        if not self._is_ready:
            self._send()
        sampler, mine = self._sampler, self._priorities
        if sampler is not None and mine is not None:
            now = sampler.beta, sampler.default_error, sampler.noted_largest, sampler.draw_state()
            if now != self._parameters:
                self._send_parameters(sampler, mine)
            self._parameters = now
        self._ring.pending = self._ahead

    def _send_parameters(self, sampler: Prioritized, mine: DevicePriorities) -> None:
        first, last, until = sampler.beta if isinstance(sampler.beta, tuple) else (sampler.beta, 0.0, 0)
        default = torch.nan if sampler.default_error is None else float(np.float32(sampler.default_error))
        for k, value in enumerate((first, last, until)):
            mine.beta[k].fill_(float(value))
        mine.default.fill_(default)
        mine.alpha.fill_(float(sampler.alpha))
        mine.eps.fill_(float(sampler.eps))
        mine.draws.fill_(sampler.draw_state())
        # the device may have seen a larger error than the host knows of, so neither replaces the other
        mine.largest.copy_(torch.clamp(mine.largest, min=sampler.noted_largest))

    def _send(self) -> None:
        """Give the device what the ring in RAM knows."""
        self._ready = False  # first: what is broken off here is sent again
        ring, mine, sampler = self._ring, self._priorities, self._sampler
        if not ring.rule.sparse:
            self._windows = None
        elif self._windows is None:
            self._windows = DeviceWindows(self._rows, self._store.device)
        for array, tensor in self._arrays():
            tensor[: len(array)].copy_(torch.from_numpy(np.ascontiguousarray(array)))
        words = torch.from_numpy(ring.counters[list(COUNTED)])
        self._rows.counters.copy_(words)
        if mine is not None and sampler is not None:
            mine.largest.fill_(sampler.noted_largest)
            mine.counts.zero_()
        self._rows.rule = ring.rule
        if self._goals is not None:
            self._goals.note_all()
        self._stored = self._kept
        live = ring.rows_live
        self._adds, self._sparse_until = 0, -1
        if not live or 3 * ring.drawable < live:
            # each env of a ring that was empty has transitions, with their history, from its second step on; in any
            # other, those that are added are many enough after some time
            waits = 1 + ring.rule.history
            self._sparse_until = waits if not live else 3 * waits + live // ring.num_envs
        self._seeded = self._parameters = self._newest = None
        if self._windows is not None:
            ends = ring.index_of(ring.anchors())
            number, env = ends // ring.num_envs, ends % ring.num_envs
            # a step overwrites two rows of an env at most, and a window goes with the first row of its history
            lasting = (number - ring.rule.history + ring.rows - ring.heads[env]) // 2
            self._lasting = int(lasting.max(initial=-1))
        if self._recent is not None and live:
            # the oldest stamp of all live rows; a row that is not complete has -1 - the number completed before it
            some = np.flatnonzero(ring.heads > ring.oldest)
            stamps = ring.stamp[some * ring.rows + ring.oldest[some] % ring.rows]
            self._recent.expect(ring.completed - int(np.where(stamps < 0, -1 - stamps, stamps).min()))
        self._ready, self._changing = True, False

    def bring_back(self) -> None:
        """Give the ring in RAM, and the sampler, what the device knows; waits for it."""
        with self._lock:  # a parameter of the sampler may be set while another thread adds a step
            if self._ring.pending is self._ahead:
                self._bring_back()

    def _bring_back(self) -> None:
        ring, mine, progress, sampler = self._ring, self._priorities, self._progress, self._sampler
        for array, tensor in self._arrays():
            array[:] = tensor[: len(array)].cpu().numpy()
        ring.counters[list(COUNTED)] = self._rows.counters.cpu().numpy()
        ring.counters[DRAWABLE] = int(self._rows.count_drawable())  # the device does not keep it
        ring.core.changed()
        if self._seeded is not None:  # a graph that was captured draws batches of which the host knows nothing
            seed, first, number = self._seeded
            drawn, alone = int(self._rows.draws), progress.draws == first + number
            progress.draws = first + drawn if alone else max(progress.draws, first + drawn)
            self._seeded = seed, first, drawn
        goals, not_finite = self._goals, 0
        if goals is not None:
            not_finite = int(goals.not_finite)
            goals.not_finite.zero_()
        refused = empty = 0
        if mine is not None and sampler is not None:
            if len(sampler.stored.tree.minima):  # the device has no tree of minima
                sampler.stored.tree.core.build()
            largest, draws = float(mine.largest), int(mine.draws)
            sampler.largest_error = largest
            sampler.undo_draws(draws)
            late, refused, empty = cast("list[int]", mine.counts.cpu().tolist())
            progress.late += late
            mine.counts.zero_()
            if self._parameters is not None:  # those that were set meanwhile have still to be sent
                self._parameters = (*self._parameters[:2], largest, draws)
        if self._changing:
            self._mend()
        else:
            ring.pending = None
        if not_finite:
            warn(f"Hindsight: {not_finite} rewards of new goals were NaN or infinite; check reward_fn", stacklevel=2)
        if empty:
            warn(
                f"sample: {empty} batches were drawn while all priorities were 0, and mean nothing; choose a larger "
                "eps, or a smaller alpha",
                stacklevel=2,
            )
        if refused:
            warn(
                f"update_priorities: {refused} TD errors were NaN, infinite or too large for a sum, or had an index "
                "that was never issued. They were passed over; check the loss, and pass batch['index']",
                stacklevel=2,
            )

    def _mend(self) -> None:
        """Give up what a call that was broken off may have left half done; the ring in RAM has all else.

        Its cursors are those from before or after the step. Rows that it was to overwrite are given up, and no episode
        goes on, since nobody knows whether the step is in. Until the ring has noted the change, a call that this one is
        broken off by brings all back once more.
        """
        ring, every = self._ring, np.arange(self._ring.num_envs)
        newest = every * ring.rows + (ring.heads - 1) % ring.rows
        waits = ring.under_way & (not ring.own_next)
        ring.stamp[newest[waits]] = -1 - ring.completed  # it may have been noted as complete already
        ring.pending = Change(every, every, np.maximum(ring.heads + 2 - ring.rows, 0))
        ring.mend()
        for sampler in (self._sampler, self._uniform):
            if sampler is not None:
                sampler.attach(ring)
        self._ready = False
        ring.settle()

    def _arrays(self) -> list[tuple[Any, Tensor]]:
        """Each array of envs or rows in RAM, and the tensor on the device that holds the same."""
        ring, mine = self._ring, self._rows
        columns = (HEAD, mine.head), (TAIL, mine.tail), (NEXT, mine.following), (COUNT, mine.count)
        pairs = [(ring.state[:, column], tensor) for column, tensor in columns]
        pairs += [(ring.step, mine.step), (ring.stamp, mine.stamp), (ring.order, mine.order)]
        hosted = ("reward", mine.reward), ("terminated", mine.terminated), ("truncated", mine.truncated)
        pairs += [(self._store.meta(name), tensor) for name, tensor in hosted]
        if self._priorities is not None and self._sampler is not None:
            stored = self._sampler.stored
            pairs += [(stored.errors, self._priorities.errors), (stored.tree.nodes, self._priorities.tree.nodes)]
        if self._windows is not None:
            pairs.append((self._kept.tree.nodes, self._windows.tree.nodes))
        return pairs

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and deepcopy: None. A copy of a replay makes one of its own."""
        return type(None), ()


def bookkeeping_bytes(device: torch.device, sampler: Any, num_envs: int) -> Callable[[int], int]:
    """A function that gives the bytes on a device besides those of the rows, for so many rows."""

    def of(rows: int) -> int:
        if not _suits(device, sampler, rows // num_envs):
            return 0
        priorities = DevicePriorities.count_bytes(rows) if type(sampler) is Prioritized else 0
        recent = DeviceRecent.count_bytes() if type(sampler) is Recent else 0
        return DeviceRing.count_bytes(num_envs, rows) + priorities + recent

    return of


def _suits(device: torch.device, sampler: Any, rows: int) -> bool:
    """True if the bookkeeping of such a ring can be on the device: MPS has no float64."""
    known = type(sampler) in (Uniform, Prioritized) or (type(sampler) is Recent and type(sampler.inner) is Uniform)
    return device.type != "mps" and rows >= FEWEST_ROWS and known
