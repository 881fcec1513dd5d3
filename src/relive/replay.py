"""ReplayBuffer: the newest steps of each env, kept over many policies, drawn by a sampler, read through a view."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from threading import RLock
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import kernels, persist
from .checks import StepChecker
from .device_rows import DeviceRows
from .errors import DTypeError, FileFormatError, LifecycleError, NotFiniteError, ReliveError, SchemaError, ShapeError
from .kernels.reference.random import key as stream
from .parameters import is_count, is_own, refuse_class, seed_or_drawn
from .plan import StoragePlan, storage_plan
from .ring import Change, Ints, Ring, missing_final
from .rows import ReplayRows
from .samplers import LARGEST_ERROR, Prioritized, Recent, Sampler, Uniform
from .saving import contradictions, describe, entry, rebuild, restore_ring, ring_state
from .schema import Field, Schema, dotted
from .sequence_view import FACTS
from .sequences import SequenceBatch
from .storage import as_host, as_tensordict
from .store import Store
from .vectors import swap_layers
from .views import Transition, View, rule_of, time_first_of
from .weights import nothing_to_draw

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["ReplayBuffer"]

KIND = "relive.ReplayBuffer"
PIECE = 4096
"""Rows stored at once, of many; the memory they are packed in is kept."""
CHECKERS = 64
"""Numbers of rows for which the check of a step is kept."""
RESERVED = frozenset(
    ("next_obs", "mask", "index", "next_index", "discount", "steps", "weight", "probability", "complete", "source")
)
"""What a step is added with, and what batches hold, besides the fields of the schema."""
FINITE = frozenset(("reward", "action", "obs", "next_obs"))
"""What is looked at in debug mode; in other fields infinities may be meant."""
NEEDED = {"reward": torch.float32, "terminated": torch.bool, "truncated": torch.bool}

RATING = Change()
"""Neither rows nor what can be drawn changes: only the sampler may have to begin again."""

P = ParamSpec("P")
R = TypeVar("R")


def _one_at_a_time(method: Callable[Concatenate[ReplayBuffer, P], R]) -> Callable[Concatenate[ReplayBuffer, P], R]:
    """Mend what an earlier call left half done, and let other threads wait.

    Kernels run without Python's own lock, and a row could be written while it is read.
    """

    @wraps(method)
    def alone(self: ReplayBuffer, *args: P.args, **kwargs: P.kwargs) -> R:
        mine: Any = self
        with mine.lock:
            if mine._ring.pending is not None:
                mine._mend()
            return method(self, *args, **kwargs)

    return alone


class ReplayBuffer:
    """A replay: for each env a ring of its newest steps.

    ``add`` stores what an env did, in the order it happened; ``sample`` draws transitions with a ``sampler`` and reads
    them through a ``view``. A transition can be drawn once its next observation is known: when the next step of its env
    comes, or at once if it ended its episode.

    Several threads may call it: each call is done before the next begins; ``with replay.lock`` makes one of several.

    Args:
        schema: the fields of a step, ``obs``, ``reward``, ``terminated`` and ``truncated`` among them.
        capacity: rows over all envs; an episode of k transitions takes k + 1.
        num_envs: N.
        capacity_bytes: instead of ``capacity``, the memory of ``device`` to use; :meth:`plan` tells what comes of it.
        sampler: default :class:`relive.Uniform`.
        view: default :func:`relive.Transition`.
        ordered: False stores transitions that come in no order, each with a ``next_obs`` of its own.
        own_next_obs: store a ``next_obs`` with every step, although steps come in order. That takes twice the memory of
            observations; in return a step can be drawn as soon as it is added, and ``capacity`` is that of transitions.
            Views of single transitions and n-step windows read it, sequences and frame stacks cannot.
        device: where rows and batches live. Off the CPU rewards, flags and bookkeeping stay in RAM, 32 bytes a row,
            and so do samplers; the batches are the same.
        debug: refuse steps in which a reward, an action or an observation is NaN or infinite.
        seed: batch number t is a function of (seed, t) and of what is stored. None draws a seed, which
            ``buffer.seed`` then tells.

    Raises:
        SchemaError: a schema without these fields, a capacity of less than 2 rows per env, or of more than the memory.
    """

    def __init__(
        self,
        schema: Schema,
        capacity: int | None = None,
        num_envs: int = 1,
        *,
        capacity_bytes: int | None = None,
        sampler: Sampler | None = None,
        view: View | None = None,
        ordered: bool = True,
        own_next_obs: bool = False,
        device: str | torch.device = "cpu",
        debug: bool = False,
        seed: int | None = None,
    ) -> None:
        self.schema, self.ordered, self.debug = schema, ordered, debug
        self.own_next_obs = own_next_obs or not ordered
        self.device = torch.empty(0, device=device).device
        self.seed = seed_or_drawn(seed)
        self._stored = _stored(schema, self.own_next_obs)
        refuse_class("sampler", sampler)
        self._sampler: Sampler = sampler or Uniform()
        self._own_sampler = is_own(self._sampler)
        plan = storage_plan(self._stored.leaves, num_envs, capacity, capacity_bytes, self.device, self._sampler.nbytes)
        plan.require_memory()
        self._plan, self.num_envs = plan, plan.num_envs
        on_host = self.device.type == "cpu"
        leaves = self._stored.leaves
        store: Store = ReplayRows(leaves, plan.rows) if on_host else DeviceRows(leaves, plan.rows, self.device)
        self._ring = Ring(self.num_envs, plan.rows // self.num_envs, store, ordered)
        self._checkers: dict[int, tuple[StepChecker, StepChecker]] = {}
        self._all = np.arange(self.num_envs, dtype=np.int64)
        self._rounds_of: dict[int, Ints] = {}
        self._draws = self._sampled = self._late = 0
        self.lock = RLock()
        self._sampler.attach(self._ring)
        self.view = view or Transition()

    @staticmethod
    def plan(
        schema: Schema,
        capacity: int | None = None,
        num_envs: int = 1,
        *,
        capacity_bytes: int | None = None,
        sampler: Sampler | None = None,
        ordered: bool = True,
        own_next_obs: bool = False,
        device: str | torch.device = "cpu",
    ) -> StoragePlan:
        """What such a buffer will take, per field, without taking it: ``print(ReplayBuffer.plan(schema, 10**6))``.

        ``sampler`` is only asked how much it would keep, and can be given to a buffer afterwards.

        Raises:
            SchemaError: as the constructor's.
        """
        leaves, kept = _stored(schema, own_next_obs or not ordered).leaves, (sampler or Uniform()).nbytes
        return storage_plan(leaves, num_envs, capacity, capacity_bytes, torch.device(device), kept)

    # -- writing ------------------------------------------------------------------------------------------------

    def add(self, step: Mapping[str, Any] | None = None, /, *, envs: Any = None, **fields: Any) -> None:
        """Append one step of every env, or of some; NumPy or torch, given as a mapping, as keywords, or both.

        Args:
            step: field -> ``[N, ...]`` for every field of the schema; with one env the leading axis may be left out.
                ``next_obs`` is read where the episode ended: the true final observation, ``[N, ...]``. With
                ``ordered=False`` or ``own_next_obs=True`` every row needs it. ``mask`` (bool ``[N]``) False leaves a
                row out, such as the reset step of ``NEXT_STEP`` autoreset.
            envs: int64 ``[K]``, which envs stepped, each at most once; all fields are then ``[K, ...]``.
            fields: like ``step``.

        Raises:
            FieldError, ShapeError, DTypeError, DeviceError: the step does not fit the schema, or the final observation
                of an episode that ended is missing. Nothing is written.
            NotFiniteError: in debug mode, a number is NaN or infinite. Nothing is written.
        """
        values, chosen = fields if step is None else {**step, **fields}, self._all if envs is None else self._envs(envs)
        with self.lock:  # as _one_at_a_time, which takes longer
            if self._ring.pending is not None:
                self._mend()
            self._add(values, chosen)

    @_one_at_a_time
    def extend(self, steps: Mapping[str, Any], *, envs: Any = None) -> None:
        """Append many steps in the order of time: every field ``[T, N, ...]``, as :meth:`add` takes ``[N, ...]``.

        Raises:
            ShapeError: the fields do not have one number of steps.
            FieldError, ShapeError, DTypeError, DeviceError, NotFiniteError: as :meth:`add`. Nothing is written.
        """
        chosen = self._all if envs is None else self._envs(envs)
        fronts: set[tuple[int, ...]] = set()
        try:
            values = {name: _flattened(value, fronts) for name, value in steps.items()}
        except ValueError as error:
            raise ShapeError(f"extend: expected arrays, got lists of several lengths ({error})") from error
        if len(fronts) != 1 or any(front[1:] != chosen.shape for front in fronts):
            raise ShapeError(f"extend: expected (steps, {len(chosen)}) in front of every field, got {sorted(fronts)}")
        ((count, _),) = fronts
        if count:
            rounds = self._rounds(count) if envs is None else np.tile(chosen, count)
            self._add(values, rounds, successive=count > 1)

    def _rounds(self, count: int) -> Ints:
        """All envs, ``count`` times over: whoever adds several steps most often adds as many each time."""
        known = self._rounds_of.get(count)
        if known is None:
            if len(self._rounds_of) >= CHECKERS:
                self._rounds_of.clear()
            known = self._rounds_of[count] = np.tile(self._all, count)
        return known

    @_one_at_a_time
    def interrupt(self, envs: Any = None) -> None:
        """The episodes under way, in all envs or in ``envs``, will not go on: what comes next starts new ones.

        Their newest steps, whose next observation never became known, are never drawn.
        """
        self._interrupt(self._all if envs is None else self._envs(envs))
        self._ring.pending = None

    @_one_at_a_time
    def clear(self) -> None:
        """Forget everything stored. Indices go on, so that an old one is never mistaken for a new one."""
        places = self._ring.anchors() if self._sampler.watches else None
        self._ring.clear()
        if places is not None:
            self._sampler.changed(places, np.zeros(len(places), np.uint8))
        self._ring.pending = None

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """How batches are read; may be replaced, or changed (``replay.view.n = 5``), at any time."""
        return self._view

    @view.setter
    @_one_at_a_time
    def view(self, view: View) -> None:
        refuse_class("view", view)
        require = getattr(view, "require", None)
        if require is not None:
            require(self._ring)
        before, self._view = getattr(self, "_view", view), view
        try:
            self._keep_rule(view)
        except ReliveError:
            self._view = before
            raise

    @property
    def sampler(self) -> Sampler:
        """What draws; its parameters may be changed at any time."""
        return self._sampler

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and of what the sampler keeps, once the buffer is full: those of :meth:`plan`."""
        return replace(self._plan, sampler_bytes=self._sampler.nbytes(self._plan.rows)).total_bytes

    @property
    def has_priorities(self) -> bool:
        """Whether :meth:`update_priorities` can be called."""
        return self._priorities is not None

    @property
    def _priorities(self) -> Prioritized | None:
        sampler = self._sampler.inner if isinstance(self._sampler, Recent) else self._sampler
        return sampler if isinstance(sampler, Prioritized) else None

    @_one_at_a_time
    def __len__(self) -> int:
        """The number of transitions that can be drawn; of sequences, through a view that reads such."""
        self._keep_rule(self._view)
        return self._ring.drawable

    def sample(self, batch_size: int) -> TensorDict:
        """One batch ``[batch_size]``, as :attr:`view` reads it, with what the sampler adds (weight, probability).

        Raises:
            EmptyError: there is no complete transition.
            ShapeError: ``batch_size`` is not positive.
        """
        return self._batch(batch_size, 1, 1)

    def batches(self, count: int, batch_size: int) -> Iterator[TensorDict]:
        """``count`` batches; a sampler that emphasises recent experience takes them as one round of updates.

        Raises:
            EmptyError: there is no complete transition; from this call, not from the first batch.
            ShapeError: ``count`` or ``batch_size`` is not positive; likewise.
        """
        if not is_count(count, 1):
            raise ShapeError(f"batches({count!r}, ...): ask for a whole number of batches, at least 1")
        _require_rows(batch_size)
        if not len(self):
            raise nothing_to_draw(self._ring)
        return (self._batch(batch_size, k, count) for k in range(1, count + 1))

    @_one_at_a_time
    def update_priorities(self, index: Any, td_error: Any, mask: Any = None) -> int:
        """Tell a prioritizing sampler the TD errors of a batch; returns how many of them came too late.

        Args:
            index: int64 ``[B]``, ``batch["index"]``. Of a transition named twice the last error counts; one that was
                overwritten meanwhile is left alone, and counted.
            td_error: ``[B]``; their size counts, not their sign. For sequences ``[T, B]`` or ``[B, T]``, as the batch
                that :attr:`view` reads, which the sampler reduces to one error each.
            mask: bool, of the same shape: ``batch["mask"]``, the steps whose errors count; sequences need it.

        Raises:
            LifecycleError: the sampler knows no priorities.
            ShapeError: the shapes differ, or are not of the batch's layout, or an index was never issued.
            NotFiniteError: a TD error is NaN or infinite. Nothing is changed in either case.
        """
        self._keep_rule(self._view)
        sampler = self._priorities
        if sampler is None:
            raise LifecycleError(f"{self._sampler!r} knows no priorities; create the buffer with sampler=Prioritized()")
        where = _integers(index, "index")
        errors, real = self._by_item(where.size, _doubles(td_error), None if mask is None else as_host(mask))
        if where.ndim != 1 or errors.shape[:1] != where.shape or errors.ndim > 2:
            raise ShapeError(
                f"update_priorities: expected an index [B] and errors [B], got {where.shape}, {errors.shape}"
            )
        sizes = np.empty(errors.size, np.float32)
        bad = kernels.fast().magnitudes(errors.reshape(-1), LARGEST_ERROR, sizes)
        if bad >= 0:
            entry = bad // errors[0].size
            raise NotFiniteError(
                f"td_error: entry {entry} is {errors[entry]}, not a finite float32; mend the loss before it spreads"
            )
        if real is not None and (errors.ndim != 2 or real.shape != errors.shape or real.dtype != np.bool_):
            raise ShapeError(f"mask: expected bool {errors.shape} for errors [B, L], got {real.dtype} {real.shape}")
        places, unknown = self._ring.find(where)
        if unknown >= 0:
            raise ShapeError(f"index: entry {unknown}, {where[unknown]}, was never issued; pass batch['index']")
        if errors.ndim == 2:
            sizes = sampler.reduced(errors, real).astype(np.float32)
        alive = places >= 0
        late = len(places) - int(np.count_nonzero(alive))
        if late:
            places, sizes = places[alive], sizes[alive]
        self._ring.pending = RATING
        try:
            sampler.update(places, sizes)
        except NotFiniteError:  # before anything was changed
            self._ring.pending = None
            raise
        self._late += late
        self._ring.pending = None
        return late

    @_one_at_a_time
    def stats(self) -> dict[str, float]:
        """Figures on what is stored and how it is used; changes nothing.

        ``size`` transitions that can be drawn of ``completed`` ever; ``episodes`` ended; ``age_mean``, ``age_max`` in
        transitions completed since; ``batches`` and ``sampled`` rows drawn; ``replay_ratio`` rows drawn per transition
        completed, which is also how often each was drawn on average; ``late_updates`` of priorities that came after
        their transition was overwritten; ``not_finite_rewards`` ever added, NaN or infinite. With priorities also their
        ``priority_min``, ``_mean``, ``_max`` and ``effective_size``, (Σp)² / Σp²: of how many equal ones the buffer is
        worth.
        """
        ring, places = self._ring, self._ring.anchors()
        ages = ring.completed - 1 - ring.stamp[places]
        figures = {
            "size": float(len(self)),
            "completed": float(ring.completed),
            "episodes": float(ring.episodes),
            "age_mean": float(ages.mean()) if len(ages) else 0.0,
            "age_max": float(ages.max(initial=0)),
            "batches": float(self._draws),
            "sampled": float(self._sampled),
            "replay_ratio": self._sampled / max(ring.completed, 1),
            "late_updates": float(self._late),
            "not_finite_rewards": float(ring.not_finite),
        }
        if self._priorities is not None and len(places):
            p = self._priorities.priorities()
            figures |= {
                "priority_min": float(p.min()),
                "priority_mean": float(p.mean()),
                "priority_max": float(p.max()),
            }
            figures["effective_size"] = float(p.sum() ** 2 / (p**2).sum())
        return figures

    @_one_at_a_time
    def data(self) -> TensorDict:
        """Every transition that can be drawn, in the order of completion, as :attr:`view` reads it."""
        self._keep_rule(self._view)
        places = self._ring.anchors()
        return self._read(places[np.argsort(self._ring.stamp[places], kind="stable")], {}, None)

    @_one_at_a_time
    def slice(self, env: int, start: int = 0, stop: int | None = None) -> TensorDict:
        """Rows of one env in the order of time, ``[K]``, as they are stored; 0 is the oldest, -1 the newest.

        Besides the fields of a step there is ``index``, and ``complete`` (bool): False for the newest step, whose next
        observation is not known, and for the final observation after an episode, of which only ``obs`` means anything.

        Raises:
            ShapeError: there is no such env.
        """
        if not (is_count(env) and env < self.num_envs):
            raise ShapeError(f"slice: env is a whole number from 0 up to, not including, {self.num_envs}, got {env}")
        places = self._ring.live_places(env)[slice(start, stop)]
        fields = self._ring.store.read(places)
        facts = self._ring.store.tensors(self._ring.stamp[places] >= 0, self._ring.index_of(places))
        fields["complete",], fields["index",] = facts
        return as_tensordict(fields, (len(places),))

    @property
    def block(self) -> TensorDict:
        """The schema's fields of all rows as views ``[rows]``, in memory's order, whatever was written of them.

        Row k of env e is at ``e * R + k % R``, where R rows belong to each env. With ``ordered`` these are also the
        rows that hold the observation an episode ended on. Off the CPU, reward and flags are in RAM nevertheless.
        """
        return as_tensordict(self._ring.store.views(), (self._plan.rows,))

    @_one_at_a_time
    def append(self, other: ReplayBuffer) -> None:
        """Add all transitions of another buffer, env by env in the order of time.

        Episodes under way here are interrupted, and what has no known next observation there stays out.

        Raises:
            SchemaError: the buffers do not have the same schema, number of envs and order.
        """
        for name in ("schema", "num_envs", "ordered", "own_next_obs"):
            if getattr(other, name) != getattr(self, name):
                raise SchemaError(
                    f"append: expected a buffer of {name}={getattr(self, name)!r}, got {getattr(other, name)!r}"
                )
        with other.lock:
            other._mend()
            for env in range(other.num_envs):
                self._append_env(other._ring, env)
                self._ring.pending = None

    def _append_env(self, ring: Ring, env: int) -> None:
        """Add all transitions of one env of another ring."""
        self._interrupt(np.array([env]))
        store, places = ring.store, ring.live_places(env)
        complete, done = ring.stamp[places] >= 0, store.meta("terminated")[places] | store.meta("truncated")[places]
        # a row without a known successor still is the next observation of the one before
        wanted = complete.copy()
        cuts = np.flatnonzero(~complete) + 1
        if self.own_next_obs:
            cuts = np.flatnonzero(ring.step[places] == 0) if ring.linked else cuts
        else:
            wanted[1:] |= complete[:-1] & (done[:-1] == 0)
        for rows in np.split(np.arange(len(places)), cuts):
            chosen = rows[wanted[rows]]
            if len(chosen):
                self._copy(store, places[chosen], places[np.minimum(chosen + 1, len(places) - 1)], env)
                self._interrupt(np.array([env]))

    def _copy(self, store: Store, places: Ints, following: Ints, env: int) -> None:
        """Add rows of another store as successive steps of one env; the last of them need not be complete."""
        piece = self._piece
        for low in range(0, len(places), piece):
            part = places[low : low + piece]
            fields: dict[Any, Any] = {path: x.to(self.device) for path, x in store.read(part).items()}
            final = None
            if not self.own_next_obs:
                obs = [path for path in store.leaves if path[0] == "obs"]
                after = store.read(following[low : low + piece], obs)
                final = [after[path].to(self.device) for path in obs]
                for name in ("terminated", "truncated"):
                    fields[name,] = (store.meta(name)[part] != 0) & (store.meta("_stamp")[part] >= 0)
            self._store(np.full(len(part), env, np.int64), [fields[path] for path in store.leaves], final)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all that is stored, and how far the draws have come, to the directory ``path``.

        A save that is there already is replaced, whole or not at all; ``docs/files.md`` has the format.

        Raises:
            FileFormatError: ``path`` holds something else.
            OSError: the disk is full, or fails.
        """
        persist.write(path, *self._state())

    @_one_at_a_time
    def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Everything stored: arrays by name, and what is JSON."""
        facts = {
            "kind": KIND,
            "schema": json.loads(self.schema.to_json()),
            "ordered": self.ordered,
            "own_next_obs": self.own_next_obs,
            "seed": self.seed,
            "counts": [self._draws, self._sampled, self._late],
            "not_finite_rewards": self._ring.not_finite,
            "debug": self.debug,
            "view": describe(self._view),
        }
        return ring_state(self._ring, self._sampler, facts)

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle: what :meth:`save` writes, and parts that are not relive's own."""
        tensors, content = self._state()
        sampler = self._sampler if content["sampler"] is None else None
        view = self._view if content["view"] is None else None
        arrays = {name: torch.as_tensor(value) for name, value in tensors.items()}
        return type(self)._restored, (arrays, content, str(self.device), sampler, view)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        device: str | torch.device = "cpu",
        sampler: Sampler | None = None,
        view: View | None = None,
    ) -> ReplayBuffer:
        """The buffer that was saved; it goes on with the batches that the saved one would have drawn next.

        Args:
            path: the directory.
            device: where its rows are to live, wherever the saved ones did.
            sampler: needed if the saved one was not relive's own. One of another kind than the saved one starts anew.
            view: needed likewise.

        Raises:
            FileFormatError: there is no save, or it is damaged, foreign or of another version; nothing is ever run.
        """
        tensors, content = persist.read(path)
        if content.get("kind") != KIND:
            raise FileFormatError(f"'{path}' is a save of {content.get('kind')!r}, not of a {KIND}")
        with contradictions(path):
            return cls._restored(tensors, content, device, sampler, view)

    @classmethod
    def _restored(
        cls,
        tensors: Mapping[str, Tensor],
        content: Mapping[str, Any],
        device: str | torch.device,
        sampler: Sampler | None,
        view: View | None,
    ) -> ReplayBuffer:
        """The buffer whose state this is."""
        rows, num_envs = entry(content, "rows_per_env", int), entry(content, "num_envs", int)
        buffer = cls(
            Schema.from_json(json.dumps(content.get("schema"))),
            rows * num_envs,
            num_envs,
            sampler=sampler or rebuild(content.get("sampler"), "sampler"),
            view=view or rebuild(content.get("view"), "view"),
            ordered=entry(content, "ordered", bool),
            own_next_obs=entry({"own_next_obs": False, **content}, "own_next_obs", bool),
            device=device,
            debug=entry({"debug": False, **content}, "debug", bool),
            seed=entry(content, "seed", int),
        )
        buffer._draws, buffer._sampled, buffer._late = entry(content, "counts", list)
        restore_ring(buffer._ring, buffer._sampler, tensors, content)
        buffer._ring.not_finite = entry({"not_finite_rewards": 0, **content}, "not_finite_rewards", int)
        return buffer

    @_one_at_a_time
    def check(self) -> None:
        """Test the invariants of the ring (:class:`relive.ring.Ring`), and that the sampler knows what can be drawn.

        Raises:
            InvariantError: naming the first that does not hold.
        """
        self._ring.check()
        check = getattr(self._sampler, "check", None)
        if check is not None:
            check()

    # -- inside -------------------------------------------------------------------------------------------------

    def _add(self, values: dict[str, Any], envs: Ints, successive: bool = False) -> None:
        """Check and store a step of each of ``envs``; where ``successive``, one after another, envs come repeatedly."""
        count, final, mask = len(envs), None, values.pop("mask", None)
        check = self._checkers.get(count) or self._new_checkers(count)
        if not self.own_next_obs and "next_obs" in values:
            given = {"next_obs": values.pop("next_obs")}
            leaves = check[0](values)
            final = check[1](given)
        else:
            leaves = check[0](values)
        kept = None if mask is None else self._mask(mask, count)
        if self.debug:
            self._refuse_not_finite(leaves, final, envs, np.ones(count, np.bool_) if kept is None else kept)
        if successive and not (kept is None and count <= self._piece):
            self._add_many(envs, leaves, final, np.ones(count, np.bool_) if kept is None else kept)
        elif kept is None:
            if count:
                self._store(envs, leaves, final)
        else:
            if kept.any():
                rows = [_kept(value, kept) for value in leaves]
                self._store(envs[kept], rows, None if final is None else [_kept(value, kept) for value in final], envs)
            self._interrupt(envs[~kept])  # what comes next there does not follow what came before
        self._ring.pending = None

    @property
    def _piece(self) -> int:
        """Steps stored at once: no more than what cannot come round and meet itself, each taking up to two rows."""
        return max(min(self._ring.rows // 2, PIECE), 1)

    def _add_many(self, envs: Ints, leaves: Sequence[Any], final: Sequence[Any] | None, kept: Any) -> None:
        """Store several steps, piece by piece; a row left out comes between those before and those after it."""
        if final is None and not self.own_next_obs:
            self._require_final(leaves, envs, kept)
        piece, low = self._piece, 0
        for end in [*np.flatnonzero(~kept).tolist(), len(envs)]:
            for start in range(low, end, piece):
                part = slice(start, min(start + piece, end))
                ends = None if final is None else [x[part] for x in final]
                self._store(envs[part], [x[part] for x in leaves], ends, envs)
            self._interrupt(envs[end : end + 1])
            low = end + 1

    def _store(self, envs: Ints, leaves: Sequence[Any], final: Sequence[Any] | None, cut: Ints | None = None) -> None:
        """Store checked steps. Until whoever calls says that all is done (``pending``), the next call would mend it."""
        watches = self._sampler.watches
        where, opens = self._ring.add(envs, leaves, final, watches, cut)
        if watches and len(where):
            self._sampler.changed(where, opens)

    def _interrupt(self, envs: Ints) -> None:
        where, opens = self._ring.interrupt(envs)
        if self._sampler.watches and len(where):
            self._sampler.changed(where, opens)

    def _mend(self) -> None:
        """Bring rows, counters and sampler together again after a call that an exception broke off."""
        if self._ring.pending is not None:
            self._ring.mend()
            self._sampler.attach(self._ring)
            self._ring.pending = None

    def _refuse_not_finite(
        self, leaves: Sequence[Any], final: Sequence[Any] | None, envs: Ints, kept: NDArray[np.bool_]
    ) -> None:
        """Look at rewards, actions and observations, of which final ones are read where an episode ended."""
        by_path = dict(zip(self._stored.leaves, leaves, strict=True))
        done = as_host(by_path["terminated",]) | as_host(by_path["truncated",])
        looked = [(path, value, kept) for path, value in by_path.items() if path[0] in FINITE]
        if final is not None:
            obs = [path for path in by_path if path[0] == "obs"]
            looked += [(("next_obs", *path[1:]), x, kept & done) for path, x in zip(obs, final, strict=True)]
        for path, value, rows in looked:
            dtype = self._stored.leaves[("obs", *path[1:]) if path[0] == "next_obs" else path].dtype
            bad = np.flatnonzero(rows & ~_finite_rows(value, dtype))
            if len(bad):
                raise NotFiniteError(
                    f"field '{dotted(path)}': row {bad[0]}, of env {envs[bad[0]]}, is {value[bad[0]]}, not finite as "
                    f"{dtype}; mend the env, or the policy, before it spreads"
                )

    def _require_final(self, leaves: Sequence[Any], envs: Ints, kept: Any) -> None:
        """Several steps are stored piece by piece, so that a missing observation must be found before the first."""
        by_path = dict(zip(self._stored.leaves, leaves, strict=True))
        done = (as_host(by_path["terminated",]) | as_host(by_path["truncated",])) & kept
        if done.any():
            raise missing_final(int(envs[np.argmax(done)]))

    def _new_checkers(self, count: int) -> tuple[StepChecker, StepChecker]:
        final = Schema({"next_obs": self.schema["obs"]})
        step = StepChecker(self._stored, count, self.device, upload=False)
        pair = step, StepChecker(final, count, self.device, upload=False)
        if len(self._checkers) >= CHECKERS:
            self._checkers.clear()
        self._checkers[count] = pair
        return pair

    def _batch(self, batch_size: int, update: int, of: int) -> TensorDict:
        _require_rows(batch_size)
        with self.lock:
            if self._ring.pending is not None:
                self._mend()
            self._keep_rule(self._view)
            key = stream(self.seed, self._draws)
            drawn = self._sampler.draw(batch_size, key, update, of)
            places, extras = drawn if self._own_sampler else self._looked_at(drawn, batch_size)
            self._draws += 1
            self._sampled += batch_size
            return self._read(places, extras, key)

    def _looked_at(self, drawn: Any, count: int) -> tuple[Ints, dict[str, Any]]:
        """What a user's sampler drew, once it is clear that it can be read."""
        who, given = (
            f"{self._sampler!r}.draw({count})",
            [*cast("tuple[Any, ...]", drawn)] if isinstance(drawn, tuple) else [],
        )
        if len(given) != 2 or not isinstance(given[1], Mapping):
            raise ShapeError(f"{who}: expected a tuple of places [{count}] and a dict of further fields, got {drawn!r}")
        chosen, further = given
        try:
            places = self._ring.require_anchors(chosen)
        except SchemaError as error:
            raise type(error)(f"{who}: {error}") from error
        extras = {name: as_host(value) for name, value in cast("Mapping[str, Any]", further).items()}
        for name, array in {"places": places, **extras}.items():
            if array.shape[:1] != (count,) or array.dtype.kind not in "biufc":
                raise ShapeError(f"{who}: expected {count} {name}, got {array.dtype} {array.shape}")
        return places, extras

    def _read(self, places: Ints, extras: Mapping[str, Any], key: int | None) -> Any:
        try:
            batch = self._view.read(self._ring, places, key)
        except SchemaError as error:
            if is_own(self._view):
                raise
            raise type(error)(f"{self._view!r}: {error}") from error
        if extras:
            tensors = self._ring.store.tensors(*extras.values())
            batch |= {(name,): tensor for name, tensor in zip(extras, tensors, strict=True)}
        time_first = time_first_of(self._view)
        if time_first is None:
            return as_tensordict(batch, (len(places),))
        facts = {name: batch.pop((name,)) for name in (*FACTS, *extras)}
        states = {path: swap_layers(batch.pop(path)).contiguous() for path in list(batch) if path[0] == "hidden"}
        hidden = self.schema.rebuild("hidden", states.__getitem__) if states else None
        return SequenceBatch(batch, facts, hidden, time_first=time_first)

    def _keep_rule(self, view: View) -> None:
        """Another view, or other parameters of it, may change what can be drawn."""
        rule, before = rule_of(view), self._ring.rule
        if rule == before:
            return
        self._ring.pending = Change(rule=before)
        try:
            self._ring.rule = rule
            self._sampler.attach(self._ring)
        except ReliveError:
            self._ring.rule = before
            self._ring.pending = None
            raise
        self._ring.pending = None

    def _by_item(self, count: int, errors: Any, mask: Any) -> tuple[Any, Any]:
        """Errors of sequences, and their mask, item by item: ``[B, T]``."""
        time_first = time_first_of(self._view)
        if errors.ndim != 2 or time_first is None:
            return errors, mask
        axes = "[T, B]" if time_first else "[B, T]"
        if errors.shape[1 if time_first else 0] != count:
            raise ShapeError(
                f"td_error: expected {axes} of {count} sequences, as the view has time "
                f"{'first' if time_first else 'second'}, got {errors.shape}"
            )
        if mask is None:
            raise ShapeError("mask: errors of sequences need one to tell which of them count; pass mask=seq['mask']")
        if mask.shape != errors.shape:
            raise ShapeError(f"mask: expected bool {errors.shape} for errors {axes}, got {mask.dtype} {mask.shape}")
        return (errors.T, mask.T) if time_first else (errors, mask)

    def _envs(self, envs: Any) -> Ints:
        chosen = _integers(envs, "envs").copy()  # which a call that is broken off leaves behind
        if chosen.ndim != 1 or len(set(chosen.tolist())) != len(chosen):
            raise ShapeError(f"envs: expected a vector of different envs, got {chosen.tolist()}")
        if len(chosen) and not (chosen.min() >= 0 and chosen.max() < self.num_envs):
            raise ShapeError(f"envs: expected numbers from 0 to {self.num_envs - 1}, got {chosen.tolist()}")
        return chosen

    def _mask(self, mask: Any, count: int) -> Any:
        kept = as_host(mask)
        if kept.shape != (count,) or kept.dtype != np.bool_:
            raise ShapeError(f"mask: expected bool ({count},), got {kept.dtype} {kept.shape}")
        return kept


def _stored(schema: Schema, own_next_obs: bool) -> Schema:
    """The fields that are stored, once it is clear that they make a replay."""
    for name, dtype in NEEDED.items():
        if schema.leaves.get((name,)) != Field((), dtype):
            raise SchemaError(f"a replay's schema needs '{name}' as Field((), {dtype}), got {schema!r}")
    if "obs" not in schema:
        raise SchemaError(f"a replay's schema needs 'obs', got {schema!r}")
    for name in schema.names:
        if name in RESERVED or name.startswith("_"):
            raise SchemaError(
                f"field {name!r}: a replay's schema has no name that starts with '_', and none of what the buffer adds "
                f"by itself ({', '.join(sorted(RESERVED))}); give it another name"
            )
    return schema.extend(next_obs=schema["obs"]) if own_next_obs else schema


def _flattened(tree: Any, fronts: set[tuple[int, ...]]) -> Any:
    """Arrays ``[T, N, ...]`` as ``[T * N, ...]``; adds the (T, N) of each, nested or not, to ``fronts``."""
    # the most common first, since to tell whether something is a tensor, or a mapping, takes long
    if type(tree) is not np.ndarray and not isinstance(tree, np.ndarray | Tensor):
        if isinstance(tree, Mapping) or hasattr(tree, "items"):
            return {name: _flattened(member, fronts) for name, member in cast("Any", tree).items()}
        if isinstance(tree, tuple):
            return tuple(_flattened(member, fronts) for member in cast("tuple[Any, ...]", tree))
        tree = np.asarray(tree)
    shape: tuple[int, ...] = cast("Any", tree).shape
    front = tuple(shape[:2])
    fronts.add(front)
    return cast("Any", tree).reshape((math.prod(front), *shape[2:]))


def _require_rows(batch_size: int) -> None:
    if not is_count(batch_size, 1):
        raise ShapeError(f"batch_size={batch_size!r}: ask for a whole number of rows, at least 1")


def _kept(value: Any, kept: Any) -> Any:
    return value[torch.from_numpy(kept)] if isinstance(value, Tensor) else value[kept]


def _finite_rows(value: Any, dtype: torch.dtype) -> NDArray[np.bool_]:
    """Which rows of a checked leaf have nothing but finite numbers, once they are stored: bool ``[K]``."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return np.ones(len(value), np.bool_)
    given = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    stored = given.to(dtype) if given.is_floating_point() or given.is_complex() else given.view(dtype)  # its bits
    return as_host(stored.isfinite().reshape(len(given), -1).all(1))


def _integers(values: Any, name: str) -> Ints:
    """A vector of whole numbers; bools and floats are mistakes."""
    given = as_host(values)
    if given.size and given.dtype.kind not in "iu":
        raise DTypeError(f"{name}: expected integers, got {given.dtype}")
    return np.ascontiguousarray(given, np.int64)


def _doubles(values: Any) -> Any:
    """Numbers of any dtype, on any device, as float64; NumPy does not know all of torch's."""
    return values.detach().double().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values, np.float64)
