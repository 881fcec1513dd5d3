"""Writer: checks steps, stores them in the replay's ring, and informs its sampler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import core
from ..core.words import COMPLETED, EPISODES, FINALS, LINKED, NO_FINALS
from ..errors import ParameterError, ShapeError
from ..memory.copier import BoundedCache, StepCopier
from ..memory.store import Staging, Store
from ..parameters import FLAG_RULE, require
from ..ring.ring import PIECE, DeviceIsNewer, Ring, WindowRule, missing_final, piece_of
from ..samplers.contract import OwnSampler
from ..steps.arrays import Bools, Ints, Leaf, apart, as_host, whole_numbers
from ..steps.checker import StepChecker, refuse_unreadable
from ..steps.schema import Path, Schema
from .checks import FirstSteps, flattened, refuse_not_finite, row_mask

Leaves = Sequence[Leaf]
Intake = tuple[StepChecker, StepCopier | None]
"""The check and the copier for steps of one number of rows. Without a copier, each field is copied by itself."""


class Writer:
    """The writing side of a replay. The caller holds the replay's lock.

    A method that changes rows keeps the ring's ``pending`` set until all is done. If an exception interrupts it, the
    next call sees ``pending`` and repairs ring and sampler.

    Args:
        ring: the rows.
        sampler: informed of each row that becomes drawable or stops being so.
        schema: the fields of a step, as the user named them.
        stored: the fields that are stored.
        device: where rows live.
        debug: True to refuse numbers that are NaN or infinite.
    """

    def __init__(
        self,
        ring: Ring,
        sampler: OwnSampler,
        schema: Schema,
        stored: Schema,
        device: torch.device,
        debug: bool,
    ) -> None:
        self.ring = ring
        self.sampler = sampler
        self.schema = schema
        self.stored = stored
        self.device = device
        self.debug = debug
        self.check_ends: bool = False
        self.added: Callable[[int], object] | None = None
        """Called with the number of rows after each call that added some. It is None most often."""
        self.first: FirstSteps | None = None
        """Checks the first steps and ends of episodes; None once it has seen enough."""
        self.all_envs: Ints = np.arange(ring.num_envs, dtype=np.int64)
        paths = list(stored.leaves)
        self._leaves = len(paths)
        """The number of leaves of a step. Those of the final observations may follow them."""
        self._flags_at = [paths.index((name,)) for name in ("terminated", "truncated")]
        self._intakes = BoundedCache[tuple[int, bool], Intake]()
        self.adders: list[StepAdder | None] = [None, None]
        """Adds steps of all envs without ``next_obs``, and with it; None until there are some, or always. A step that
        was added so needs nothing more, unless :attr:`first` is set."""
        self._repeated = BoundedCache[int, Ints]()
        self.invalidate_device: Callable[[], None] | None = None
        """Called when the ring in RAM is about to change, or has: what a device knows of it is out of date."""

    def watch_ends(self, check: bool) -> None:
        """Start or stop checking the first steps and ends of episodes."""
        require("ReplayBuffer", FLAG_RULE, check_ends=check)
        self.check_ends, ring = check, self.ring
        shares = not ring.own_next and self.device.type == "cpu"  # elsewhere it would wait for the device
        self.first = FirstSteps(ring, self.all_envs, shares) if check else None

    # -- steps --------------------------------------------------------------------------------------------------

    def add(self, values: Mapping[str, object], envs: Ints, successive: bool = False) -> None:
        """Check and store a step of each of ``envs``. ``successive`` steps are in time order and may repeat envs."""
        first, adder = self.first, self.adders["next_obs" in values]
        checked = None
        whole = envs is self.all_envs and (first is None or first.reuse is None)
        if adder is None or not whole or not adder.add(values, self.debug):
            checked = self._add(values, envs, successive)
        if self.added is not None:
            self.added(len(envs))
        if first is None or not first.waits:
            return
        leaves, final, kept = checked or self._checked(values, len(envs))
        try:
            first.after(envs, leaves, final, kept)
        finally:  # a warning may be an error
            if first.is_done:
                self.first = None

    def whole_step(self, values: Mapping[str, object], envs: Ints) -> tuple[Leaves, Leaves | None] | None:
        """The leaves of a step of all envs and those of its final observations, checked; None if RAM has to know it."""
        ring = self.ring
        if envs is not self.all_envs or self.debug or "mask" in values or ring.before_overwriting is not None:
            return None
        if not (ring.pending is None or isinstance(ring.pending, DeviceIsNewer)):
            return None
        checked = self._checked(values, len(envs))
        return checked.leaves[: self._leaves], checked.final

    def _checked(self, values: Mapping[str, object], count: int) -> _Checked:
        """Check each part of a step: its leaves, those of its final observations, and which rows are kept."""
        has_finals, mask = "next_obs" in values and not self.ring.own_next, None
        if "mask" in values:
            mask, values = values["mask"], {name: value for name, value in values.items() if name != "mask"}
        check, copier = self._intakes.get((count, has_finals)) or self._intake(count, has_finals)
        try:
            leaves = None if copier is None else copier.leaves(values)
            if leaves is None:
                leaves = check(values, copier)
        except (RuntimeError, TypeError):
            refuse_unreadable(values)
            raise
        kept = None if mask is None else row_mask(mask, count).copy()  # it may lie in the rows that are stored
        if kept is not None and kept.all():  # quicker without
            kept = None
        return _Checked(leaves, leaves[self._leaves :] if has_finals else None, kept)

    def _add(self, values: Mapping[str, object], envs: Ints, successive: bool) -> _Checked:
        """Check each part of a step and store it; returns what was checked."""
        count = len(envs)
        checked = self._checked(values, count)
        if self.ring.store.large or successive:  # else all fields are staged before any is stored
            leaves = apart(checked.leaves, self.ring.store.memory)
            final = None if checked.final is None else leaves[self._leaves :]
            checked = checked._replace(leaves=leaves, final=final)
        leaves, final, kept = checked
        if self.first is not None:
            self.first.before(values, envs, leaves, final, kept)
        if kept is None and successive and count > piece_of(self.ring.rows):
            kept = np.ones(count, np.bool_)
        stored = kept
        if kept is not None:
            leaves, stored = self._with_last(envs, leaves, kept)
        if self.debug:
            rows = np.ones(count, np.bool_) if stored is None else stored
            refuse_not_finite(self.stored.leaves, leaves[: self._leaves], final, envs, rows)
        if kept is None or stored is None:  # both, or neither
            if count:
                self._store(envs, leaves, final)
        elif successive:
            self._add_many(envs, leaves, final, kept, stored)
        else:
            if stored.any():
                rows = [_rows_where(value, stored) for value in leaves]
                ends = None if final is None else [_rows_where(value, stored) for value in final]
                self._store(envs[stored], rows, ends, envs)
            self._interrupt(envs[~kept])  # the next steps there do not follow the last ones
        ring = self.ring
        if ring.undo is not None:
            ring.undo.end()
        ring.pending = None  # as commit, which takes longer
        return checked

    def extend(self, steps: Mapping[str, object], envs: object) -> None:
        """Check and store many steps ``[T, N, ...]``, in the order of time."""
        chosen = self.all_envs if envs is None else self.chosen(envs)
        values, count = flattened(steps, chosen.shape)
        if count:
            rounds = self._repeat(count) if envs is None else np.tile(chosen, count)
            self.add(values, rounds, successive=count > 1)

    def chosen(self, envs: object) -> Ints:
        """The envs that an argument names, int64 ``[K]``.

        Raises:
            DTypeError, ShapeError: they are not a vector of whole numbers.
            ParameterError: one comes twice, or there is no such env.
        """
        chosen = whole_numbers(envs, "envs").copy()  # a copy: an interrupted call keeps it for the repair
        if chosen.ndim != 1:
            raise ShapeError(f"envs: expected one axis, got shape {chosen.shape}; pass a list such as [0, 2]")
        if len(set(chosen.tolist())) != len(chosen):
            raise ParameterError(f"envs: expected each env once, got {chosen.tolist()}; add one step after another")
        if len(chosen) and not (chosen.min() >= 0 and chosen.max() < self.ring.num_envs):
            raise ParameterError(f"envs: expected numbers from 0 to {self.ring.num_envs - 1}, got {chosen.tolist()}")
        return chosen

    def interrupt(self, envs: object, next_obs: object = None) -> None:
        """Cut the running episodes of ``envs``, or of all; with ``next_obs``, their newest steps become truncated."""
        chosen = self.all_envs if envs is None else self.chosen(envs)
        if next_obs is not None:
            self._truncate(chosen, next_obs)
        self._interrupt(chosen)
        self.ring.commit()

    def _truncate(self, envs: Ints, next_obs: object) -> None:
        """Complete the newest step of each episode under way, as truncated.

        What it led to is stored as a row that the caller interrupts: a row without an end, like that of a step left
        out, which completes the one before it and never becomes a transition itself.
        """
        ring, stored = self.ring, self.stored.leaves
        check = StepChecker(Schema({"next_obs": self.stored["obs"]}), len(envs), self.device, upload=False)
        given = check({"next_obs": next_obs})
        under_way = ring.under_way[envs]
        newest, count = envs[under_way], int(under_way.sum())
        if not count:
            return
        leaves: list[Leaf] = [
            torch.zeros((count, *x.shape), dtype=x.dtype, device=self.device) for x in stored.values()
        ]
        observed = [i for i, path in enumerate(stored) if path[0] == "obs"]
        for at, value in zip(observed, given, strict=True):
            leaves[at] = _rows_where(value, under_way)
        for at in self._flags_at:
            leaves[at] = np.zeros(count, np.bool_)
        if self.debug:
            refuse_not_finite(stored, leaves, None, newest, np.ones(count, np.bool_))
        places = newest * ring.rows + (ring.heads[newest] - 1) % ring.rows
        if not ring.own_next:  # else they are complete
            self._store(newest, leaves, None)
        # last: if something breaks this off, the steps are whole, and their episodes were interrupted
        ring.store.meta("truncated")[places] = 1
        ring.counters[EPISODES] += count

    def clear(self, rewind: bool) -> None:
        """Forget everything stored."""
        self._invalidate()
        places = self.ring.anchors() if self.sampler.watches else None
        self.ring.clear(rewind)
        if places is not None:
            self.sampler.changed(places, np.zeros(len(places), np.uint8))
        self.ring.commit()

    def repair(self) -> None:
        """Repair what a call left half done that an exception interrupted; or learn what a device knows."""
        pending = self.ring.pending
        if pending is not None:
            self.ring.repair()
        if pending is not None and not isinstance(pending, DeviceIsNewer):
            self.sampler.attach(self.ring)
            self.ring.commit()
            self._invalidate()

    # -- another buffer's transitions ---------------------------------------------------------------------------

    def append(self, other: Ring) -> None:
        """Add all transitions of another ring, in the order in which they were completed there."""
        completed = self.ring.completed
        for env in range(other.num_envs):
            self.append_env(other, env, env)
        self.ring.order_as(other, completed)
        self._invalidate()

    def append_env(self, ring: Ring, env: int, to: int) -> None:
        """Add all transitions of env ``env`` of another ring to env ``to`` of this one, in the order of time."""
        self._interrupt(np.array([to]))
        store, places = ring.store, ring.live_places(env)
        complete, done = ring.stamp[places] >= 0, store.meta("terminated")[places] | store.meta("truncated")[places]
        # a row that is not complete can still hold the next observation of the row before it
        wanted = complete.copy()
        cuts = np.flatnonzero(~complete) + 1
        if ring.mode == LINKED:
            cuts = np.flatnonzero(ring.step[places] == 0)
        elif ring.mode == FINALS:
            wanted[1:] |= complete[:-1] & (done[:-1] == 0)
        for rows in np.split(np.arange(len(places)), cuts):
            chosen = rows[wanted[rows]]
            if len(chosen):
                self._copy(store, places[chosen], places[np.minimum(chosen + 1, len(places) - 1)], to)
                self._interrupt(np.array([to]))
        self.ring.commit()

    def _copy(self, store: Store, places: Ints, following: Ints, env: int) -> None:
        """Add rows of another store as successive steps of one env. The last one need not be complete."""
        piece = piece_of(self.ring.rows)
        for low in range(0, len(places), piece):
            part = places[low : low + piece]
            fields: dict[Path, Leaf] = {path: x.to(self.device) for path, x in store.read(part).items()}
            final = None
            if not self.ring.own_next:
                obs = [path for path in store.leaves if path[0] == "obs"]
                after = store.read(following[low : low + piece], obs)
                final = [after[path].to(self.device) for path in obs]
                for name in ("terminated", "truncated"):
                    fields[name,] = (store.meta(name)[part] != 0) & (store.meta("_stamp")[part] >= 0)
            self._store(np.full(len(part), env, np.int64), [fields[path] for path in store.leaves], final)

    # -- inside -------------------------------------------------------------------------------------------------

    def _store(self, envs: Ints, leaves: Leaves, final: Leaves | None, cut: Ints | None = None) -> None:
        """Store checked steps. The caller clears ``pending`` once all is done; until then the next call repairs."""
        self._invalidate()
        watches = self.sampler.watches
        places, drawable = self.ring.add(envs, leaves, final, watches, cut)
        if watches and len(places):
            self.sampler.changed(places, drawable)

    def _invalidate(self) -> None:
        if self.invalidate_device is not None:
            self.invalidate_device()

    def _interrupt(self, envs: Ints) -> None:
        self._invalidate()
        places, drawable = self.ring.interrupt(envs)
        if self.sampler.watches and len(places):
            self.sampler.changed(places, drawable)

    def _with_last(self, envs: Ints, leaves: Leaves, kept: Bools) -> tuple[Leaves, Bools]:
        """The leaves, and which rows of them to store, if some are left out.

        A truncated row that is left out is a step whose final observation is hidden. It starts no transition, but the
        transition before it needs its observation. So the row is stored as a step without an end, then interrupted.
        """
        terminal_at, truncated_at = self._flags_at
        truncated = as_host(leaves[truncated_at])
        cut = truncated > kept
        if self.ring.own_next or not np.count_nonzero(cut):  # quicker than any()
            return leaves, kept
        goes_on = self._goes_on(envs, leaves, kept)
        leaves = list(leaves)
        leaves[terminal_at], leaves[truncated_at] = as_host(leaves[terminal_at]) & kept, truncated & kept
        return leaves, kept | (cut & goes_on)

    def _goes_on(self, envs: Ints, leaves: Leaves, kept: Bools) -> Bools:
        """True for rows of successive vector steps that go on with an episode of their env, bool ``[K]``."""
        again = np.flatnonzero(envs[1:] == envs[0])
        width = int(again[0]) + 1 if len(again) else len(envs)  # of one vector step
        return np.concatenate([self.ring.under_way[envs[:width]], (kept & ~self._done(leaves))[:-width]])

    def _done(self, leaves: Leaves) -> Bools:
        """Which rows end their episode, bool ``[K]``."""
        terminated, truncated = (as_host(leaves[i]) for i in self._flags_at)
        return terminated | truncated

    def _add_many(self, envs: Ints, leaves: Leaves, final: Leaves | None, kept: Bools, stored: Bools) -> None:
        """Store several steps piece by piece. A row that is left out interrupts its env before the rows after it."""
        if final is None and not self.ring.own_next:  # refused before the first of several pieces is stored
            done = self._done(leaves) & kept
            if done.any():
                raise missing_final(int(envs[np.argmax(done)]))
        # the reset steps of NEXT_STEP autoreset come after an end, so they interrupt nothing and cost no piece
        cuts = np.flatnonzero(~kept & self._goes_on(envs, leaves, kept))
        ends, cut_envs, every = np.cumsum(stored)[cuts], envs[cuts], envs
        if not stored.all():
            leaves, envs = [_rows_where(value, stored) for value in leaves], envs[stored]
            final = None if final is None else [_rows_where(value, stored) for value in final]
        piece, low = piece_of(self.ring.rows), 0
        for i, end in enumerate([*ends.tolist(), len(envs)]):  # after ``end`` rows comes the i-th interruption
            for start in range(low, end, piece):
                part = slice(start, min(start + piece, end))
                finals = None if final is None else [x[part] for x in final]
                self._store(envs[part], [x[part] for x in leaves], finals, every)
            self._interrupt(cut_envs[i : i + 1])
            low = end

    def _intake(self, count: int, has_finals: bool) -> Intake:
        """The check and the copier for so many rows, with or without final observations; kept for the next ones."""
        both = self.stored.extend(next_obs=self.stored["obs"]) if has_finals else self.stored
        check, store = StepChecker(both, count, self.device, upload=False), self.ring.store
        # what copies whole steps takes memory for them; long runs of steps, which are stored in pieces, go without
        staging = store.staging("both" if has_finals else "step", count) if 0 < count <= PIECE else None
        # rows in files may have to come from the disk first, so those are added by more calls than one
        if staging is not None and count == len(self.all_envs) and self.ring.undo is None:
            adder = StepAdder(self.ring, self.sampler, staging, self.all_envs, has_finals)
            self.adders[has_finals or self.ring.own_next] = adder
        return self._intakes.keep((count, has_finals), (check, None if staging is None else staging.copier))

    def _repeat(self, count: int) -> Ints:
        """All envs, repeated ``count`` times; kept, since the next call usually adds as many steps."""
        known = self._repeated.get(count)
        return self._repeated.keep(count, np.tile(self.all_envs, count)) if known is None else known


# With one env an `add` takes 1.4 µs instead of 2.9. Anything that cannot be copied as it is takes more calls, which
# raise the errors: other dtypes, devices, stores of your own, files, saves in the background.
class StepAdder:
    """Adds steps of the same envs that compiled code can read: one call of it checks, stages and adds them.

    It is for rings in RAM: rows in files may have to come from the disk first, and the call keeps all other threads of
    Python waiting if the step is short.

    Args:
        ring: gets the rows.
        sampler: informed of each row that becomes drawable or stops being so.
        staging: where they are staged.
        envs: int64 ``[K]``, their envs.
        has_finals: True if they come with final observations.
    """

    __slots__ = ("_add", "_adding", "_envs", "_mode", "_ring", "_rule", "_sampler", "_staging", "_watches")

    def __init__(self, ring: Ring, sampler: OwnSampler, staging: Staging, envs: Ints, has_finals: bool) -> None:
        self._ring, self._sampler, self._staging, self._envs = ring, sampler, staging, envs
        self._mode = NO_FINALS if ring.mode == FINALS and not has_finals else ring.mode
        self._rule: WindowRule | None = None
        self._watches: bool | None = None

    def add(self, step: Mapping[str, object], debug: bool) -> bool:
        """Add a step; or change nothing and return False, if one call cannot add it. A step with an error is one."""
        ring, watches = self._ring, self._sampler.watches
        if ring.pending is not None:  # repaired first
            return False
        if ring.before_overwriting is not None:
            return False
        if watches is not self._watches or (watches and ring.rule is not self._rule):
            self._prepare(watches)
        if not watches:  # the compiled call is all there is, and nothing breaks it off
            return self._add(step, debug) >= 0
        adding = self._adding
        adding.since = ring.counters.item(COMPLETED)
        ring.pending = adding  # before the call: after an interrupt, the next call repairs these rows
        events = self._add(step, debug)
        if events > 0:
            self._sampler.changed(adding.arrays.where[:events], adding.arrays.opens[:events])
        ring.pending = None  # last: until the sampler knows of all events, it has to attach again
        return events >= 0

    def _prepare(self, watches: bool) -> None:
        """Make room for the events of the ring's rule, as the sampler watches now."""
        ring, (rows, final, copier, large) = self._ring, self._staging
        self._watches = None  # first: after an interrupt on the way, the next call prepares again
        self._adding = adding = ring.new_adding(self._envs, rows, final, watches)
        self._add: Callable[[Mapping[str, object], bool], int] = core.StepAdder(
            ring.core, adding.core, copier.fields, large, self._mode
        ).add
        self._rule, self._watches = ring.rule, watches


class _Checked(NamedTuple):
    """A step that was checked."""

    leaves: Leaves
    """Of the step; those of its final observations may follow."""
    final: Leaves | None
    """Of its final observations; None if there are none, or if each row has a next observation of its own."""
    kept: Bools | None
    """bool ``[K]``, False for rows that are left out; None if there are none."""


def _rows_where(value: Leaf, kept: Bools) -> Leaf:
    return value[torch.from_numpy(kept)] if isinstance(value, Tensor) else value[kept]
