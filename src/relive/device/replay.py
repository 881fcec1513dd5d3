"""OnDevice: adds, batches and priorities of a replay without a word from the host.

The replay's ring, in RAM, and this part hold the same rows in turns. Steps and batches that are all of tensors on the
device go here, and from then on the ring in RAM is out of date. Whatever needs it, such as ``save``, ``len`` or a step
of some envs, brings the bookkeeping back first, which waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast
from warnings import warn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from ..core.numbers import signed
from ..core.words import ALONE, COMPLETED, COUNT, EPISODES, FINALS, HEAD, LINKED, NEXT, NOT_FINITE, TAIL
from ..memory.device import DeviceRows
from ..ring.ring import EVERY_ROW, NO_ENVS, Ring
from ..samplers.prioritized import Prioritized
from ..samplers.uniform import Uniform
from ..steps.schema import Path
from ..views.transitions import NStep
from .priorities import DevicePriorities
from .ring import DeviceRing

__all__ = ["Ahead", "OnDevice"]


LONGEST_WINDOW = 64
"""The most steps of a window that is read here: each takes an operation of its own."""


FEWEST_ROWS = 4
"""Rows an env needs so that a step, its final observation and the step before have different places."""


class Ahead:
    """Takes the place of a pending change in a ring that is out of date: every call on a replay looks for one first."""

    cut = NO_ENVS
    since = 2**63 - 1

    def __init__(self, device: OnDevice) -> None:
        self.device = device


class Progress(Protocol):
    """What a replay has drawn: its seed, the batches drawn, in all and before this seed, rows, and late priorities."""

    seed: int
    first: int
    draws: int
    sampled: int
    late: int


class OnDevice:
    """The bookkeeping of a replay on its device.

    Args:
        ring: the same in RAM, of rows that are on the device.
        sampler: its sampler, :class:`relive.Uniform` or :class:`relive.Prioritized`.
        progress: the counts of its draws.
    """

    def __init__(self, ring: Ring, sampler: Uniform | Prioritized, progress: Progress) -> None:
        store = cast("DeviceRows", ring.store)
        mode = LINKED if ring.ordered_own_next else ALONE if ring.own_next else FINALS
        self._host, self._sampler, self._store, self._progress = ring, sampler, store, progress
        self._rows = DeviceRing(ring.num_envs, ring.rows, mode, 0, store.device)
        self._priorities = DevicePriorities(self._rows, store.device) if isinstance(sampler, Prioritized) else None
        self._obs = [path for path in store.leaves if path[0] == "obs"]
        self._pending = Ahead(self)
        self._ready = False
        """True if the tensors are at least as new as the ring."""
        self._adds = 0
        """Steps since the ring was up to date."""
        self._dense: bool | None = False
        """True if a third of the rows or more can be drawn; None if there were none at first."""
        self._seeded: tuple[int, int] | None = None
        self._parameters: tuple[Any, ...] | None = None
        self._store_step: Any = self._add  # these three are replaced by compiled ones
        self._read_batch: Any = self._batch
        self._set_errors: Any = None if self._priorities is None else self._priorities.rate

    @classmethod
    def of(cls, ring: Ring, sampler: Any, progress: Progress) -> OnDevice | None:
        """One for a ring whose rows are on a device; None if this ring, sampler or device is for the host alone."""
        store = ring.store
        known = isinstance(store, DeviceRows) and store.device.type != "mps" and ring.rows >= FEWEST_ROWS
        return cls(ring, sampler, progress) if known and type(sampler) in (Uniform, Prioritized) else None

    def compile(self, **options: Any) -> None:
        """Compile all functions, each as a whole; see ``torch.compile`` for the options."""
        self._store_step = torch.compile(self._add, fullgraph=True, **options)
        self._read_batch = torch.compile(self._batch, fullgraph=True, **options)
        if self._priorities is not None:
            self._set_errors = torch.compile(self._priorities.rate, fullgraph=True, **options)

    # -- the three calls ----------------------------------------------------------------------------------------

    def add(self, leaves: Sequence[Any], final: Sequence[Any] | None) -> bool:
        """Store a checked step of each env; or change nothing and return False if the host has to."""
        ring = self._host
        if ring.rule != EVERY_ROW or not all(isinstance(x, Tensor) and x.device == self.device for x in leaves):
            return False
        if final is None and self._rows.mode == FINALS:
            return False  # whether an episode ended is known on the device alone
        if not self._ready:
            self._send()
        self._keep_parameters()
        self._adds += 1
        ring.pending = self._pending  # first: an exception on the way leaves what the device has done
        self._store_step(list(leaves), None if final is None else list(final))
        return True

    def sample(self, count: int, view: Any) -> dict[Path, Tensor] | None:
        """The fields ``[count]`` of the next batch as a view reads them; None if the host has to."""
        if type(view) is not NStep or view.each_reward is not None or view.n > LONGEST_WINDOW:
            return None
        ordered = self._rows.mode != ALONE or view.n == 1
        normal = self._priorities is None or cast("Prioritized", self._sampler).normalize == "batch"
        if not (self._ready and self._is_dense and ordered and normal and get_worker_info() is None):
            return None
        self._keep_parameters()
        progress = self._progress
        seed, number = progress.seed, progress.draws - progress.first
        if (seed, number) != self._seeded:
            self._rows.seed.fill_(signed(seed))
            self._rows.draws.fill_(number)
        self._seeded = seed, number + 1
        self._host.pending = self._pending  # the counts of draws are there
        progress.draws += 1
        progress.sampled += count
        return self._read_batch(count, view.n, float(view.gamma))

    def rate(self, index: Any, errors: Any) -> Tensor | None:
        """Set the errors of a batch; how many of its rows are gone. None if the host has to."""
        floats = isinstance(errors, Tensor) and errors.dtype in (torch.float32, torch.float64) and errors.ndim == 1
        whole = isinstance(index, Tensor) and index.dtype is torch.int64 and index.shape == errors.shape
        if not (self._ready and floats and whole and index.device == errors.device == self.device and len(index)):
            return None
        self._keep_parameters()
        self._host.pending = self._pending
        return self._set_errors(index, errors.detach())

    @property
    def device(self) -> torch.device:
        """Of all tensors."""
        return self._store.device

    @property
    def _is_dense(self) -> bool:
        """True if draws find a row soon: each env of a ring that was empty has a transition from its second step on."""
        return self._adds >= 2 if self._dense is None else self._dense

    # -- what they do on the device -----------------------------------------------------------------------------

    def _add(self, leaves: list[Tensor], final: list[Tensor] | None) -> None:
        given = dict(zip(self._store.leaves, leaves, strict=True))
        added = self._rows.add(given["reward",], given["terminated",], given["truncated",])
        for part in self._store.parts:
            part.put(added.places, part.packed({path: given[path] for path in part.layout.fields}))
        if final is not None:
            ended = dict(zip(self._obs, final, strict=True))
            for part in self._store.parts:
                chosen = {path: ended[path] for path in part.layout.fields if path in ended}
                if chosen:
                    part.put(added.finals, part.packed(chosen))
        if self._priorities is not None:
            self._priorities.added(added)

    def _batch(self, count: int, n: int, gamma: float) -> dict[Path, Tensor]:
        stream, weighed = self._rows.next_stream(), {}
        if self._priorities is None:
            spots = self._rows.draw(count, stream)
        else:
            drawn = self._priorities.draw(count, stream, bool(self._sampler.stratified))
            spots, weighed = drawn.spots, {("weight",): drawn.weight, ("probability",): drawn.probability}
        windows = self._rows.windows(spots, n, gamma)
        found = {(name,): field for name, field in windows._asdict().items() if name != "last"}
        return self._store.read_planned(spots.places, windows.last, found) | weighed

    def _columns(self) -> list[tuple[Any, Tensor]]:
        """What is known of each row: in RAM, and on the device."""
        ring, mine = self._host, self._rows
        names = ("step", "stamp", "order")
        pairs = [(getattr(ring, name), getattr(mine, name)) for name in names]
        hosted = ("reward", "terminated", "truncated")
        return pairs + [(self._store.meta(name), getattr(mine, name)) for name in hosted]

    def _counters(self) -> list[tuple[int, Tensor]]:
        mine = self._rows
        return [(COMPLETED, mine.completed), (EPISODES, mine.episodes), (NOT_FINITE, mine.not_finite)]

    @staticmethod
    def _copy(array: Any, tensor: Tensor) -> None:
        """The first entries of a tensor become those of an array."""
        tensor[: len(array)].copy_(torch.from_numpy(np.ascontiguousarray(array)))

    # -- the host's turn ----------------------------------------------------------------------------------------

    def _keep_parameters(self) -> None:
        """Send the sampler's parameters, if one was set."""
        sampler, mine = self._sampler, self._priorities
        if mine is None or not isinstance(sampler, Prioritized):
            return
        now = sampler.alpha, sampler.eps, sampler.beta, sampler.default_error
        if now == self._parameters:
            return
        first, last, until = sampler.beta if isinstance(sampler.beta, tuple) else (sampler.beta, 0.0, 0)
        default = torch.nan if sampler.default_error is None else float(np.float32(sampler.default_error))
        for tensor, value in ((mine.alpha, sampler.alpha), (mine.eps, sampler.eps), (mine.default, default)):
            tensor.fill_(float(value))
        for k, value in enumerate((first, last, until)):
            mine.beta[k].fill_(float(value))
        self._parameters = now

    def _send(self) -> None:
        """Give the device what the ring in RAM knows."""
        ring, mine = self._host, self._rows
        for column, tensor in ((HEAD, mine.head), (TAIL, mine.tail), (NEXT, mine.following), (COUNT, mine.count)):
            self._copy(ring.state[:, column], tensor)
        for word, tensor in self._counters():
            tensor.fill_(int(ring.counters[word]))
        for array, tensor in self._columns():
            self._copy(array, tensor)
        live = ring.rows_live
        self._dense, self._adds = None if not live else 3 * ring.drawable >= live, 0
        self._seeded = self._parameters = None
        priorities, sampler = self._priorities, self._sampler
        if priorities is not None and isinstance(sampler, Prioritized):
            errors, nodes = sampler.arrays
            self._copy(nodes, priorities.nodes)
            self._copy(errors, priorities.errors)
            priorities.largest.fill_(sampler.largest_error)
            priorities.draws.fill_(sampler.draw_state())
            priorities.late.zero_()
            priorities.refused.zero_()
        self._ready = True

    def bring_back(self) -> None:
        """Give the ring in RAM, and the sampler, what the device knows; waits for it."""
        ring, mine, progress = self._host, self._rows, self._progress
        for column, tensor in ((HEAD, mine.head), (TAIL, mine.tail), (NEXT, mine.following), (COUNT, mine.count)):
            ring.state[:, column] = tensor.cpu().numpy()
        for word, tensor in self._counters():
            ring.counters[word] = int(tensor)
        for array, tensor in self._columns():
            array[:] = tensor[: len(array)].cpu().numpy()
        priorities, sampler = self._priorities, self._sampler
        if priorities is not None and isinstance(sampler, Prioritized):
            errors, nodes = sampler.arrays
            nodes[:] = priorities.nodes[: len(nodes)].cpu().numpy()
            errors[:] = priorities.errors[: len(errors)].cpu().numpy()
            sampler.largest_error = float(priorities.largest)
            sampler.undo_draws(int(priorities.draws))
            progress.late += int(priorities.late)
            if int(priorities.refused):
                warn_of_refused(int(priorities.refused))
        if self._seeded is not None:  # a captured graph draws batches of which the host knows nothing
            progress.draws = progress.first + int(mine.draws)
        self._ready = False
        ring.recount()
        ring.pending = None


def warn_of_refused(count: int) -> None:
    """Tell of TD errors that the device passed over; it could not raise an error without waiting."""
    warn(
        f"update_priorities: {count} TD errors were NaN, infinite or too large for a sum, or had an index that was never "
        "issued; they were passed over. Check the loss, and pass batch['index']",
        stacklevel=2,
    )
