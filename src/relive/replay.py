"""ReplayBuffer: the newest steps of each env, kept over many policies, drawn by a sampler, read through a view."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from .checks import StepChecker
from .errors import LifecycleError, NotFiniteError, SchemaError, ShapeError
from .kernels.reference.random import key as stream
from .ring import Ints, Ring
from .rows import ReplayRows
from .samplers import Prioritized, Recent, Sampler, Uniform
from .schema import Field, Schema
from .storage import as_host, as_tensordict
from .views import Transition, View

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["ReplayBuffer"]

NEEDED = {"reward": torch.float32, "terminated": torch.bool, "truncated": torch.bool}


class ReplayBuffer:
    """A replay: for each env a ring of its newest steps.

    ``add`` stores what an env did, in the order it happened; ``sample`` draws transitions with a ``sampler`` and reads
    them through a ``view``. A transition can be drawn once its next observation is known: when the next step of its env
    comes, or at once if it ended its episode.

    Args:
        schema: the fields of a step, ``obs``, ``reward``, ``terminated`` and ``truncated`` among them.
        capacity: rows over all envs; an episode of k transitions takes k + 1.
        num_envs: N.
        sampler: default :class:`relive.Uniform`.
        view: default :func:`relive.Transition`.
        ordered: False stores transitions that come in no order, each with a ``next_obs`` of its own.
        seed: batch number t is a function of (seed, t) and of what is stored. None draws a seed, which
            ``buffer.seed`` then tells.

    Raises:
        SchemaError: a schema without these fields, or a capacity of less than 2 rows per env.
    """

    def __init__(
        self,
        schema: Schema,
        capacity: int,
        num_envs: int = 1,
        *,
        sampler: Sampler | None = None,
        view: View | None = None,
        ordered: bool = True,
        seed: int | None = None,
    ) -> None:
        for name, dtype in NEEDED.items():
            if schema.leaves.get((name,)) != Field((), dtype):
                raise SchemaError(f"a replay's schema needs '{name}' as Field((), {dtype}), got {schema!r}")
        if "obs" not in schema or "next_obs" in schema or any(name.startswith("_") for name in schema.names):
            raise SchemaError(
                "a replay's schema has 'obs', no 'next_obs' (the buffer knows it), and no name that starts with '_'"
            )
        if num_envs < 1 or capacity < 2 * num_envs:
            raise SchemaError(f"capacity={capacity}: every one of the {num_envs} envs needs at least 2 rows")
        self.schema, self.num_envs, self.ordered = schema, num_envs, ordered
        self.device = torch.device("cpu")
        self.seed = secrets.randbits(63) if seed is None else seed
        self._stored = schema if ordered else schema.extend(next_obs=schema["obs"])
        rows = capacity // num_envs
        store = ReplayRows(self._stored.leaves, rows * num_envs)
        self._ring = Ring(num_envs, rows, store)
        self._checkers: dict[int, tuple[StepChecker, StepChecker]] = {}
        self._all = np.arange(num_envs, dtype=np.int64)
        self._draws = self._sampled = self._late = 0
        self._sampler: Sampler = sampler or Uniform()
        self._sampler.attach(self._ring)
        self.view = view or Transition()

    # -- writing ------------------------------------------------------------------------------------------------

    def add(self, step: Mapping[str, Any] | None = None, /, *, envs: Any = None, **fields: Any) -> None:
        """Append one step of every env, or of some; NumPy or torch, given as a mapping, as keywords, or both.

        Args:
            step: field -> ``[N, ...]`` for every field of the schema; with one env the leading axis may be left out.
                ``next_obs`` is read where the episode ended: the true final observation, ``[N, ...]``. With
                ``ordered=False`` every row needs it. ``mask`` (bool ``[N]``) False leaves a row out, such as the reset
                step of ``NEXT_STEP`` autoreset.
            envs: int64 ``[K]``, which envs stepped, each at most once; all fields are then ``[K, ...]``.
            fields: like ``step``.

        Raises:
            FieldError, ShapeError, DTypeError, DeviceError: the step does not fit the schema, or the final observation
                of an episode that ended is missing. Nothing is written.
        """
        values = {**step, **fields} if step is not None else fields
        self._add(values, self._all if envs is None else self._envs(envs))

    def extend(self, steps: Mapping[str, Any], *, envs: Any = None) -> None:
        """Append many steps in the order of time: every field ``[T, N, ...]``, as :meth:`add` takes ``[N, ...]``.

        Raises:
            ShapeError: the fields do not have one number of steps.
            FieldError, ShapeError, DTypeError, DeviceError: as :meth:`add`; steps before the wrong one stay stored.
        """
        first = steps["reward"] if "reward" in steps else next(iter(steps.values()))
        for t in range(len(first)):
            try:
                one = {name: _at(value, t) for name, value in steps.items()}
            except (IndexError, KeyError) as error:
                raise ShapeError(f"extend: expected {len(first)} steps in every field, step {t} is missing") from error
            self.add(one, envs=envs)

    def interrupt(self, envs: Any = None) -> None:
        """The episodes under way, in all envs or in ``envs``, will not go on: what comes next starts new ones.

        Their newest steps, whose next observation never became known, are never drawn.
        """
        self._ring.interrupt(self._all if envs is None else self._envs(envs))

    def clear(self) -> None:
        """Forget everything stored. Indices go on, so that an old one is never mistaken for a new one."""
        if self._sampler.watches:
            places = self._ring.anchors()
            self._sampler.changed(places, np.zeros(len(places), np.uint8))
        self._ring.clear()

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """How batches are read; may be replaced, or changed (``replay.view.n = 5``), at any time."""
        return self._view

    @view.setter
    def view(self, view: View) -> None:
        self._view = view
        self._keep_history()

    @property
    def sampler(self) -> Sampler:
        """What draws; its parameters may be changed at any time."""
        return self._sampler

    def __len__(self) -> int:
        """The number of transitions that can be drawn."""
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
            EmptyError: there is no complete transition.
            ShapeError: ``count`` or ``batch_size`` is not positive.
        """
        if count < 1:
            raise ShapeError(f"batches({count}, ...): ask for at least 1")
        for k in range(1, count + 1):
            yield self._batch(batch_size, k, count)

    def update_priorities(self, index: Any, td_error: Any, mask: Any = None) -> int:
        """Tell a prioritizing sampler the TD errors of a batch; returns how many of them came too late.

        Args:
            index: int64 ``[B]``, ``batch["index"]``. Of a transition that is named twice the last error counts; one that
                was overwritten meanwhile is left alone, and counted.
            td_error: ``[B]``; their size counts, not their sign. ``[B, L]`` for sequences.
            mask: bool ``[B, L]``, the real steps of sequences.

        Raises:
            LifecycleError: the sampler knows no priorities.
            ShapeError: the lengths differ, or an index was never issued.
            NotFiniteError: a TD error is NaN or infinite. Nothing is changed in either case.
        """
        sampler = self._sampler.inner if isinstance(self._sampler, Recent) else self._sampler
        if not isinstance(sampler, Prioritized):
            raise LifecycleError(f"{self._sampler!r} knows no priorities; create the buffer with sampler=Prioritized()")
        where = np.ascontiguousarray(as_host(index), np.int64)
        errors = as_host(td_error).astype(np.float64)
        if where.ndim != 1 or errors.shape[:1] != where.shape or errors.ndim > 2:
            raise ShapeError(
                f"update_priorities: expected an index [B] and errors [B], got {where.shape}, {errors.shape}"
            )
        bad = np.flatnonzero(~np.isfinite(errors.reshape(len(where), -1)).all(1))
        if len(bad):
            raise NotFiniteError(f"td_error: entry {bad[0]} is {errors[bad[0]]}; mend the loss before it spreads")
        places, unknown = self._ring.find(where)
        if unknown >= 0:
            raise ShapeError(f"index: entry {unknown}, {where[unknown]}, was never issued; pass batch['index']")
        alive = places >= 0
        late = len(places) - int(alive.sum())
        reduced = sampler.reduced(errors, None if mask is None else as_host(mask))
        sampler.update(places[alive], reduced[alive])
        self._late += late
        return late

    def stats(self) -> dict[str, float]:
        """Figures on what is stored and how it is used; changes nothing.

        ``size`` transitions that can be drawn of ``completed`` ever; ``episodes`` ended; ``age_mean`` and ``age_max`` in
        transitions completed since; ``batches`` and ``sampled`` rows drawn; ``replay_ratio`` rows drawn per transition
        completed, which is also how often each was drawn on average; ``late_updates`` of priorities that came after
        their transition was overwritten. With priorities also their ``priority_min``, ``_mean``, ``_max`` and
        ``effective_size``, (Σp)² / Σp²: of how many equal ones the buffer is worth.
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
        }
        sampler = self._sampler.inner if isinstance(self._sampler, Recent) else self._sampler
        if isinstance(sampler, Prioritized) and len(places):
            p = sampler.priorities()
            figures |= {
                "priority_min": float(p.min()),
                "priority_mean": float(p.mean()),
                "priority_max": float(p.max()),
            }
            figures["effective_size"] = float(p.sum() ** 2 / (p**2).sum())
        return figures

    def data(self) -> TensorDict:
        """Every transition that can be drawn, in the order of completion, as :attr:`view` reads it."""
        places = self._ring.anchors()
        return self._read(places[np.argsort(self._ring.stamp[places], kind="stable")], {})

    def check(self) -> None:
        """Test the invariants of the ring (:class:`relive.ring.Ring`).

        Raises:
            InvariantError: naming the first that does not hold.
        """
        self._ring.check()

    # -- inside -------------------------------------------------------------------------------------------------

    def _add(self, values: dict[str, Any], envs: Ints) -> None:
        count, final, mask = len(envs), None, values.pop("mask", None)
        check = self._checkers.get(count) or self._new_checkers(count)
        if self.ordered and "next_obs" in values:
            given = {"next_obs": values.pop("next_obs")}
            leaves = check[0](values)
            final = check[1](given)
        else:
            leaves = check[0](values)
        if mask is not None:
            kept = self._mask(mask, count)
            envs = envs[kept]
            leaves = [as_host(value)[kept] for value in leaves]
            final = None if final is None else [as_host(value)[kept] for value in final]
        if len(envs):
            watches = self._sampler.watches
            where, opens = self._ring.add(envs, leaves, final, not self.ordered, watches)
            if watches and len(where):
                self._sampler.changed(where, opens)

    def _new_checkers(self, count: int) -> tuple[StepChecker, StepChecker]:
        final = Schema({"next_obs": self.schema["obs"]})
        pair = StepChecker(self._stored, count, self.device), StepChecker(final, count, self.device)
        self._checkers[count] = pair
        return pair

    def _batch(self, batch_size: int, update: int, of: int) -> TensorDict:
        if batch_size < 1:
            raise ShapeError(f"batch_size={batch_size}: ask for at least 1")
        self._keep_history()
        places, extras = self._sampler.draw(batch_size, stream(self.seed, self._draws), update, of)
        self._draws += 1
        self._sampled += batch_size
        return self._read(places, extras)

    def _read(self, places: Ints, extras: Mapping[str, Any]) -> TensorDict:
        batch = self._view.read(self._ring, places)
        for name, values in extras.items():
            batch[name,] = torch.from_numpy(values)
        return as_tensordict(batch, (len(places),))

    def _keep_history(self) -> None:
        """A view that reads more rows before the anchor than the last one makes some undrawable."""
        if self._ring.history != self._view.history:
            self._ring.history = self._view.history
            if self._sampler.watches:
                self._sampler.attach(self._ring)

    def _envs(self, envs: Any) -> Ints:
        chosen = np.ascontiguousarray(as_host(envs), np.int64)
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


def _at(value: Any, t: int) -> Any:
    if isinstance(value, Mapping):
        return {name: _at(member, t) for name, member in cast("Mapping[str, Any]", value).items()}
    return tuple(_at(member, t) for member in cast("Any", value)) if isinstance(value, tuple) else value[t]
