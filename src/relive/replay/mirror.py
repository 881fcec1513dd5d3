"""DeviceMirror: adds, batches and priorities of a replay without a word from the host.

The replay's ring, in RAM, and its mirror on the device know the same rows, and one of the two may be ahead. Steps and
batches that are all of tensors on the device are dealt with here; then the ring is out of date, and its ``pending``
says so. Whatever needs it, such as ``save`` or a step of some envs, brings it up to date first, which waits for the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, cast
from warnings import warn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from .. import core
from ..core.numbers import signed
from ..core.words import COMPLETED, COUNT, DRAWABLE, EPISODES, FINALS, HEAD, NEXT, NOT_FINITE, TAIL
from ..device.contract import DeviceRead, DeviceSampler
from ..device.goals import DeviceGoals
from ..device.ring import DeviceRing
from ..errors import ParameterError
from ..memory.device import DeviceRows
from ..memory.graphs import Graphed, has_graphs
from ..parameters import is_own
from ..ring.ring import Change, DeviceIsNewer, Ring
from ..samplers.contract import OwnSampler
from ..steps.arrays import Array, Ints
from ..steps.schema import Path
from ..views.contract import View, rule_of
from .serving import Progress
from .writer import Writer

COUNTED = COMPLETED, EPISODES, NOT_FINITE
"""The words of a ring's counters that the device counts, in its order."""


FEWEST_ROWS = 4
"""Rows an env needs so that a step, its final observation and the step before have different places."""


DeviceCall = Callable[..., Any]
"""Runs operations on the device: a method, what torch made of it, or a graph of that."""


GRAPHS_OF_TORCH = "reduce-overhead", "max-autotune"
"""Modes of torch.compile that make CUDA graphs."""


class State(Enum):
    """How much the device knows of the ring."""

    STALE = "the ring in RAM is newer"
    CURRENT = "all that the ring knows, or more: then the ring's pending is the mirror's"
    BROKEN_OFF = "a call that changes the device is under way, or an exception such as Ctrl-C broke it off"


class Filling:
    """Tells, without waiting for the device, when so many rows can be drawn there that a draw finds some.

    The rows that can be drawn are a matter of the steps stored since the ring was sent, since all envs step at once.
    """

    def __init__(self, ring: Ring, lifetime: int | None) -> None:
        """``lifetime``: for so many steps a window can be drawn whatever comes; None for draws of single rows."""
        rule, live = ring.rule, ring.rows_live
        self.steps = 0
        """Steps stored since."""
        if lifetime is not None:
            self._enough_until, self._enough_after = lifetime, rule.history + rule.length + 1
            return
        # A third of the rows or more must be ones that can be drawn. Each env of a ring that was empty has
        # transitions, with their history, from its second step on; in any other, those that are added are many enough
        # after some time.
        waits = 1 + rule.history
        few = not live or 3 * ring.drawable < live
        self._enough_until = -1
        self._enough_after = -1 if not few else waits if not live else 3 * waits + live // ring.num_envs

    @property
    def is_enough(self) -> bool:
        """True if a draw finds rows."""
        return self.steps <= self._enough_until or self.steps > self._enough_after


class DeviceMirror:
    """A replay's ring on its device, with what draws from it and reads it there.

    Args:
        writer: checks steps; it has the ring in RAM, whose rows are on the device, and its sampler.
        progress: the counts of its draws.
        lock: of the replay.
    """

    def __init__(self, writer: Writer, progress: Progress, lock: AbstractContextManager[object]) -> None:
        ring, sampler = writer.ring, writer.sampler
        store = cast("DeviceRows", ring.store)
        self._ring, self._sampler, self._store, self._progress, self._lock = ring, sampler, store, progress, lock
        self._writer = writer
        self._rows = DeviceRing(ring.num_envs, ring.rows, ring.mode, store.device)
        self._draws: DeviceSampler = sampler.on_device(self._rows)
        self._goals: DeviceGoals | None = None
        """Where episodes end; noted from the first batch on that gives other goals."""
        self._ahead = DeviceIsNewer(self.bring_back)
        """The ring's ``pending`` while the device knows more."""
        self._state = State.STALE
        self._filling = Filling(ring, None)
        self._kept: object = None
        """The sampler's arrays when the ring was sent."""
        self._seeded: tuple[int, int, int] | None = None
        """The seed, the batches before it, and the number of the next one, that the device has."""
        self._use(lambda call: call)

    @classmethod
    def of(cls, writer: Writer, progress: Progress, lock: AbstractContextManager[object]) -> DeviceMirror | None:
        """One for a ring whose rows are on a device; None if this ring, sampler or device is for the host alone."""
        ring, store = writer.ring, writer.ring.store
        if not isinstance(store, DeviceRows):
            return None
        there = _sampler_bytes(store.device, writer.sampler, ring.num_envs, ring.rows)
        return None if there is None else cls(writer, progress, lock)

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

    def _use(self, made: Callable[[DeviceCall], DeviceCall]) -> None:
        """Do what calls do by what is ``made`` of the functions below; on a GPU, by graphs of that."""

        def by_graphs(call: DeviceCall) -> DeviceCall:
            made_of_it, device = made(call), self._store.device
            return Graphed(made_of_it, device, self._relied_on) if has_graphs(device) else made_of_it

        self._store_step = by_graphs(self._add)
        self._read_batch = by_graphs(self._read)
        self._read_goals = made(self._read)  # functions of the user may do more than a graph holds
        self._set_errors = self._draws.set_errors and by_graphs(self._draws.set_errors)

    def _relied_on(self) -> tuple[object, ...]:
        """The objects and numbers that decide, beside its arguments, which operations a call has."""
        return self._rows.rule, self._goals, *self._draws.relied_on()

    # -- calls --------------------------------------------------------------------------------------------------

    def reads(self, view: View) -> DeviceRead | None:
        """How batches of a view are read here; None if steps are better stored where the host knows of them."""
        # a view that only the host can read has no such method
        on_device = getattr(view, "on_device", None) if is_own(view) else None
        read: DeviceRead | None = on_device(self._ring, self._rows) if on_device is not None else None
        known = read is not None and self._draws.draws_for(read.kind) and self._ring.rule == rule_of(view)
        return read if known else None

    def prepare(self) -> None:
        """There is nothing to do before other calls."""

    def add(self, values: Mapping[str, object], envs: Ints, view: View) -> bool:
        """Check and store a step of all envs; or change nothing and return False if the host has to."""
        device, whole = self._store.device, None
        if self.reads(view) is not None:
            whole = self._writer.whole_step(values, envs)
        if whole is None:
            return False
        leaves, final = whole
        if not all(isinstance(x, Tensor) and x.device == device for x in (*leaves, *(final or ()))):
            return False
        if final is None and self._rows.mode == FINALS:
            return False  # whether an episode ended is known on the device alone
        self._prepare()
        self._filling.steps += 1
        self._state = State.BROKEN_OFF
        self._store_step(list(leaves), None if final is None else list(final))
        self._state = State.CURRENT
        return True

    def sample(self, count: int, view: View, update: int, of: int) -> dict[Path, Tensor] | None:
        """The fields ``[count]`` of the next batch as a view reads them; None if the host has to.

        It is number ``update`` of the ``of`` batches of its round.
        """
        read = self.reads(view) if self.maybe_drawable else None
        if read is None or get_worker_info() is not None:
            return None
        self._prepare()
        progress = self._progress
        seed, first, number = progress.seed, progress.first, progress.draws - progress.first
        if (seed, first, number) != self._seeded:
            # the device counts its batches itself, so it is told only when somebody else drew one
            self._rows.mixed.fill_(signed(core.mix(seed)))
            self._rows.draws.fill_(number)
        self._seeded = seed, first, number + 1
        progress.draws += 1
        progress.sampled += count
        self._draws.before_batch(count, self._filling.steps, update, of)
        try:
            if read.kind != "goals":
                return self._read_batch(count, read)
            if self._goals is None:
                self._goals = DeviceGoals(self._rows, self._store.device)
                self._goals.note_all()
            return self._read_goals(count, read)
        except BaseException:
            self._seeded = None  # the batch is used up, and it is not known how far the device came
            self._draws.batch_failed()
            raise

    def set_errors(self, index: object, errors: object, mask: object) -> Tensor | None:
        """Set the errors of a batch; how many of its rows are gone. None if the host has to."""
        if not (isinstance(index, Tensor) and isinstance(errors, Tensor) and self._is_current):
            return None
        floats = errors.dtype in (torch.float32, torch.float64) and errors.ndim == 1
        whole = index.dtype is torch.int64 and index.shape == errors.shape
        if not (floats and whole and index.device == errors.device == self._store.device):
            return None
        if self._set_errors is None or mask is not None or not len(index):
            return None
        self._prepare()
        self._state = State.BROKEN_OFF
        late = self._set_errors(index, errors.detach())
        self._state = State.CURRENT
        return late

    @property
    def maybe_drawable(self) -> bool:
        """True if a good part of the rows can be drawn, as far as the host knows without waiting."""
        return self._is_current and self._filling.is_enough

    def drawable(self, view: View) -> int | None:
        """How many rows can be drawn; None if the ring in RAM knows it. It waits for the device."""
        if self._ring.pending is not self._ahead or self._ring.rule != rule_of(view):
            return None
        if self._state is State.BROKEN_OFF:
            self.bring_back()
            return self._ring.drawable
        return int(self._rows.count_drawable())

    def invalidate(self) -> None:
        """The ring in RAM, which is up to date, is about to change, or has."""
        if self._state is State.CURRENT:
            self._state = State.STALE

    # -- what they do on the device -----------------------------------------------------------------------------

    def _add(self, leaves: list[Tensor], final: list[Tensor] | None) -> None:
        given = dict(zip(self._store.leaves, leaves, strict=True))
        facts = given["reward",], given["terminated",], given["truncated",]
        added = self._rows.plan(*facts)  # changes nothing: the rows are written before the cursors say that they are
        ended = {} if final is None else dict(zip([path for path in given if path[0] == "obs"], final, strict=True))
        # final observations are written as whole rows, and for all envs: those of episodes that go on have no place
        for part in self._store.parts:
            paths = part.layout.fields
            part.put(added.places, part.packed({path: given[path] for path in paths}))
            last = {path: ended[path] for path in paths if path in ended}
            if last:
                part.put(added.finals, part.packed(last))
        self._rows.write(added, *facts)
        self._draws.added(added)
        if self._goals is not None:
            self._goals.added(added)

    def _read(self, count: int, read: DeviceRead) -> dict[Path, Tensor]:
        stream = self._rows.next_stream()
        spots, weighed = self._draws.draw(count, stream)
        return read.read(self._store, self._rows, self._goals, spots, stream, read.form) | weighed

    # -- between the ring in RAM and the device -----------------------------------------------------------------

    @property
    def _is_current(self) -> bool:
        """True if the device is at least as new as the ring, its rule and the sampler."""
        known = self._state is State.CURRENT and self._rows.rule == self._ring.rule
        return known and self._draws.kept is self._kept

    def _prepare(self) -> None:
        """Make the device as new as the ring, with the sampler's parameters; from now on it is ahead."""
        if self._state is State.BROKEN_OFF:
            self.bring_back()
        if not self._is_current:
            self._send()
        self._draws.send_parameters()
        self._ring.pending = self._ahead

    def _send(self) -> None:
        """Give the device what the ring in RAM knows."""
        self._state = State.STALE  # first: what is broken off here is sent again
        ring, draws = self._ring, self._draws
        draws.send(ring)
        for array, tensor in self._arrays():
            tensor[: len(array)].copy_(torch.from_numpy(np.ascontiguousarray(array)))
        self._rows.counters.copy_(torch.from_numpy(ring.counters[list(COUNTED)]))
        self._rows.rule = ring.rule
        if self._goals is not None:
            self._goals.note_all()
        self._kept = draws.kept
        self._seeded = None
        self._filling = Filling(ring, draws.window_lifetime(ring))
        self._state = State.CURRENT

    def bring_back(self) -> None:
        """Give the ring in RAM, and the sampler, what the device knows; waits for it."""
        with self._lock:  # a parameter of the sampler may be set while another thread adds a step
            if self._ring.pending is self._ahead:
                self._bring_back()

    def _bring_back(self) -> None:
        ring, progress = self._ring, self._progress
        for array, tensor in self._arrays():
            array[:] = tensor[: len(array)].cpu().numpy()
        ring.counters[list(COUNTED)] = self._rows.counters.cpu().numpy()
        ring.counters[DRAWABLE] = int(self._rows.count_drawable())  # the device does not count them
        ring.core.changed()
        if self._seeded is not None:  # a graph that was captured draws batches of which the host knows nothing
            seed, first, number = self._seeded
            drawn, alone = int(self._rows.draws), progress.draws == first + number
            progress.draws = first + drawn if alone else max(progress.draws, first + drawn)
            self._seeded = seed, first, drawn
        warnings = list[str]()
        if self._goals is not None:
            not_finite = int(self._goals.not_finite)
            self._goals.not_finite.zero_()
            if not_finite:
                warnings.append(f"Hindsight: {not_finite} rewards of new goals were NaN or infinite; check reward_fn")
        report = self._draws.bring_back()
        progress.late += report.late
        if self._state is State.BROKEN_OFF:
            self._repair()
        else:
            ring.pending = None
        for message in (*warnings, *report.warnings):
            warn(message, stacklevel=2)

    def _repair(self) -> None:
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
        ring.repair()
        self._sampler.attach(ring)
        self._state = State.STALE
        ring.commit()

    def _arrays(self) -> list[tuple[Array, Tensor]]:
        """Each array of envs or rows in RAM, and the tensor on the device that holds the same."""
        ring, mine = self._ring, self._rows
        columns = (HEAD, mine.head), (TAIL, mine.tail), (NEXT, mine.following), (COUNT, mine.count)
        pairs = [(ring.state[:, column], tensor) for column, tensor in columns]
        pairs += [(ring.step, mine.step), (ring.stamp, mine.stamp), (ring.order, mine.order)]
        hosted = ("reward", mine.reward), ("terminated", mine.terminated), ("truncated", mine.truncated)
        pairs += [(self._store.meta(name), tensor) for name, tensor in hosted]
        return pairs + self._draws.arrays()

    def __reduce__(self) -> tuple[object, ...]:
        """For pickle and deepcopy: None. A copy of a replay makes one of its own."""
        return type(None), ()


def bookkeeping_bytes(device: torch.device, sampler: OwnSampler, num_envs: int) -> Callable[[int], int]:
    """A function that gives the bytes on a device besides those of the rows, for so many rows."""

    def of(rows: int) -> int:
        there = _sampler_bytes(device, sampler, num_envs, rows // num_envs)
        return 0 if there is None else DeviceRing.count_bytes(num_envs, rows) + there

    return of


def _sampler_bytes(device: torch.device, sampler: OwnSampler, num_envs: int, rows: int) -> int | None:
    """The bytes of a sampler on a device, for so many rows of each env; None if the host alone draws.

    MPS has no float64, so the bookkeeping cannot be there. A class that inherits from one of relive's may draw others.
    """
    if device.type == "mps" or rows < FEWEST_ROWS or not is_own(sampler):
        return None
    return sampler.bytes_on_device(num_envs * rows, num_envs)
