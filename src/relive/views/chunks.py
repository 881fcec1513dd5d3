"""Chunks: consecutive rows of one env, whatever ends in between, read from a replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, partial
from inspect import signature
from typing import Any, NamedTuple, cast
from weakref import ref

import numpy as np
from torch import Tensor

from ..batches import padding
from ..core.words import FINALS
from ..errors import ParameterError, SchemaError
from ..memory.store import Store, require_rows
from ..parameters import checked, is_flag, is_names, is_steps
from ..ring.ring import Ring, WindowRule
from ..ring.sequences import FACTS, TIMESTEP, lasts_of, steps_of
from ..steps.arrays import Ints
from ..steps.schema import Path

FLAGS = ("is_first", "is_last", "is_terminal", "mask")
"""The flags of each row that batches get."""


@cache
def _rule(length: int) -> WindowRule:
    """The rows of a chunk up to its last transition, and the one before them, if it is of the first row's episode."""
    return WindowRule(int(length) - 1, across=True)


def _nothing() -> None:
    """The ring of a view that has read none."""


@checked(
    length=(lambda length: is_steps(length, 2), "length is a number of rows, at least 2 and below 2**30"),
    last=(is_names, "last is a tuple of names of fields, such as ('action', 'reward')"),
    timestep=(is_flag, "timestep is True or False"),
    time_first=(is_flag, "time_first is True or False"),
)
@dataclass(slots=True)
class Chunks:
    """Consecutive rows of one env, over the ends of its episodes, for world models (Hafner et al. 2023, DreamerV3).

    An episode of k steps has k + 1 rows: one for each observation. The first k have the fields of the step that was
    taken there. The last has the final observation, and 0 in these fields. After it comes the first row of the env's
    next episode. Every chunk has ``length`` rows, so there is no padding. All rows of a chunk are stored, and so is the
    row before it if that is of the same episode. A chunk ends with the observation after a step, so it never ends with
    the first row of an episode. All such chunks are drawn equally often by :class:`relive.Uniform`.

    A batch is a :class:`relive.SequenceBatch` ``[L, B, ...]`` with the fields of a step as they are stored, and:

    ==================== ==============================================================================================
    ``is_first``         bool ``[L, B]``: rows that begin an episode; reset the recurrent state before them.
    ``is_last``          bool ``[L, B]``: rows with the last observation of an episode, which ended or was interrupted.
    ``is_terminal``      bool ``[L, B]``: those after a step that terminated; nothing is worth anything after them.
    ``last_reward``, ... with ``last=("action", "reward")``: what led to each observation; 0 where ``is_first``.
    ``mask``             bool ``[L, B]``: all True.
    ``hidden``           the state stored with the first row; 0 where that is the last of its episode.
    ``index``            int64 ``[B]``: of the chunk's last step, for ``update_priorities``.
    ``env``, ``start``   int64 ``[B]``: the env, and the number in it of the step of the first row; of a final
                         observation that is stored with its step (``own_next_obs=True``), of that step.
    ==================== ==============================================================================================

    ``reward`` is that of the step out of a row, and Dreamer's reward is the one that came with the observation:
    ``last_reward``.

    Args:
        length: L, rows of a chunk, at least 2.
        last: fields of the step before each row, such as ("action", "reward"), which batches get as ``last_action`` and
            ``last_reward``. If steps have a field ``last_action`` declared like ``action``, the stored field is read,
            and the last row of an episode gets the right one, even if ``last`` does not name it.
        timestep: add ``timestep``, int64 ``[L, B]``: the number of each row in its episode, from 0.
        time_first: rows as ``[L, B, ...]``, or else as ``[B, L, ...]``. All parameters may be changed at any time.

    Raises:
        ParameterError: a parameter is out of range, here or when it is set later.
    """

    length: int
    _: KW_ONLY
    last: tuple[str, ...] = ()
    timestep: bool = False
    time_first: bool = True
    _plan: tuple[Any, Any] = field(default=(_nothing, None), init=False, repr=False, compare=False)
    """The ring that was read last, weakly, and what is read of it; kept until a parameter changes."""

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copies: the parameters. What is kept of rings stays with this view."""
        return partial(Chunks, **{name: getattr(self, name) for name in signature(Chunks).parameters}), ()

    @property
    def rows(self) -> int:
        """L, the number of rows of every chunk."""
        return self.length

    @property
    def history(self) -> int:
        """The number of rows before a chunk's last step."""
        return self.length - 1

    @property
    def rule(self) -> WindowRule:
        """The rule that says which steps are the last of a chunk."""
        return _rule(self.length)

    def require(self, ring: Ring) -> None:
        """Refuse steps without an order.

        Raises:
            SchemaError: the steps have no order; or the schema has a field with a name that batches use, or lacks a
                field that ``last`` names.
        """
        if not ring.ordered:
            raise SchemaError("Chunks needs steps in the order of time; here they are stored without order")
        self._fields(ring)

    def read(self, ring: Ring, places: Ints, key: int | None = None) -> dict[Path, Tensor]:
        """The fields ``[L, B, ...]`` of the chunks whose last steps are at ``places``, and facts ``[B]`` about each.

        Raises:
            ParameterError: the ring has the rule of another view, or a place is not that of an anchor.
            SchemaError: as :meth:`require`.
        """
        if ring.rule is not (rule := self.rule) and ring.rule != rule:
            raise ParameterError(f"a view that reads through {self!r} must also have its `rule` and `time_first`")
        wanted, store = self._fields(ring), ring.store
        index = ring.index_of(places)
        wrong = np.flatnonzero(ring.find(index)[0] != places)
        require_rows(places, int(wrong[0]) if len(wrong) else -1, store.num_rows)
        number, env = np.divmod(index, ring.num_envs)
        rows_of: Callable[..., Rows] = _shared if ring.mode == FINALS else _own
        found = rows_of(ring, self.length, env, number)
        rows = found if self.time_first else Rows(*map(_transposed, found))
        fields = self._stored(wanted, store, found.step[0], rows)
        opening = cast("Ints", np.where(found.final[0], found.before[0], found.seen[0]))  # places of the first rows
        starts = number - (places - opening) % ring.rows
        facts = index, np.full(len(index), self.length), np.zeros(len(index), np.int64), env, starts
        flags = rows.first, rows.over, rows.terminal, np.ones(rows.first.shape, np.bool_)
        names = [*FLAGS, *FACTS] + list(TIMESTEP) * self.timestep
        tensors = store.tensors(*flags, *facts, *([rows.timestep.astype(np.int64)] if self.timestep else []))
        return fields | {(name,): tensor for name, tensor in zip(names, tensors, strict=True)}

    def _stored(self, wanted: Wanted, store: Store, begin: Ints, rows: Rows) -> dict[Path, Tensor]:
        """The fields of the schema, and those of the steps before."""
        shown, steps, first, before = store.places(rows.seen, rows.step, begin, rows.before)
        fields = store.gather(wanted.obs, shown) | store.gather(wanted.states, first)
        fields |= store.gather(wanted.others, steps) | _renamed(store, wanted.derived, before)
        if wanted.next_obs and rows.final.any():
            (where,) = store.tensors(rows.final)
            for path, tensor in store.gather(wanted.next_obs, *store.places(rows.before[rows.final])).items():
                fields[("obs", *path[1:])][where] = tensor
        without = rows.step < 0
        if (wanted.masks or wanted.stored) and without.any():
            (where,) = store.tensors(without)
            for path in wanted.masks:
                fields[path][where] = True
            for path, tensor in steps_of(store, wanted.stored, rows.before[without]).items():
                fields[path][where] = tensor
        return {path: fields[path] for path in (*wanted.order, *wanted.derived)}

    def _fields(self, ring: Ring) -> Wanted:
        of, wanted = self._plan
        if wanted is None or of() is not ring or wanted.asked != (self.last, self.timestep):
            wanted = Wanted.of(ring, self.last, self.timestep)
            self._plan = ref(ring), wanted
        return wanted


class Wanted(NamedTuple):
    """The fields that are read of a ring's rows, by the place they are read from."""

    asked: tuple[tuple[str, ...], bool]
    """``last`` and ``timestep`` of the view."""
    obs: list[Path]
    next_obs: list[Path]
    states: list[Path]
    others: list[Path]
    masks: list[Path]
    """Those of ``others`` whose padding is True."""
    stored: dict[Path, Path]
    """Fields of the step before that each step has: its name, and that of the field itself."""
    derived: dict[Path, Path]
    """Those that are read from the step before."""
    order: list[Path]
    """The fields of the schema in a batch."""

    @classmethod
    def of(cls, ring: Ring, last: tuple[str, ...], timestep: bool) -> Wanted:
        """The fields that ``Chunks`` reads with these arguments.

        Raises:
            SchemaError: a field has a name that batches use, or there is none that ``last`` names.
        """
        leaves = ring.leaves
        clash = {path[0] for path in leaves} & {*FLAGS, *FACTS, *(TIMESTEP if timestep else ())}
        if clash:
            raise SchemaError(f"field {min(clash)!r}: Chunks gives batches a field of that name; give yours another")
        named = {path: field for path, field in leaves.items() if path[0] != "next_obs"}
        stored, derived = lasts_of(named, tuple(last), "Chunks")
        obs, states = ([path for path in named if path[0] == name] for name in ("obs", "hidden"))
        others = [path for path in named if path[0] not in ("obs", "hidden")]
        own = [path for path in leaves if path[0] == "next_obs"]
        return cls((last, timestep), obs, own, states, others, [*filter(padding, others)], stored, derived, list(named))


class Rows(NamedTuple):
    """The rows ``[L, B]`` of chunks. A place is -1 where there is none."""

    seen: Any
    """The places that have the observations."""
    step: Any
    """The places of the steps that were taken there."""
    before: Any
    """The places of the steps that led there."""
    first: Any
    """True where an episode begins."""
    over: Any
    """True where an episode ended or was interrupted."""
    terminal: Any
    """True where its last step terminated."""
    final: Any
    """True where the observation is stored with the step before."""
    timestep: Any
    """The number of each row in its episode."""


def _shared(ring: Ring, length: int, env: Ints, number: Ints) -> Rows:
    """The rows of chunks up to the one after row ``number`` of ``env``, ``[B]`` each, where each row is stored."""
    numbers = number + np.arange(1 - length, 3)[:, None]  # from the row before the chunk to the one after it
    place = env * ring.rows + numbers % ring.rows
    index = ring.step[place]
    first = index == 0
    over = first[2:].copy()
    # what comes after the newest row is not known from a row
    over[-1] = np.where(number + 2 == ring.heads[env], ~ring.under_way[env], over[-1])
    seen, first = place[1:-1], first[1:-1]
    before = np.where(first, -1, place[:-2])
    terminal = over & ~first
    terminal[terminal] = ring.arrays.terminated[before[terminal]]
    return Rows(seen, np.where(over, -1, seen), before, first, over, terminal, np.zeros_like(over), index[1:-1])


def _own(ring: Ring, length: int, env: Ints, number: Ints) -> Rows:
    """The rows of chunks up to the one after row ``number``, where each step is stored with what came after."""
    numbers = number + np.arange(1 - length, 2)[:, None]  # from the row before the first step to the one after the last
    place = env * ring.rows + numbers % ring.rows
    index = ring.step[place]
    ends = index[2:] == 0  # of each step [L - 1, B]: the next row is of another episode
    newest = number + 1 == ring.heads[env]
    ends[-1] = np.where(newest, ~ring.under_way[env], ends[-1])
    # each row's position from the chunk's last, which is the observation after the last step
    inserted = ends[:-1][::-1].cumsum(0)[::-1]
    back = np.arange(length - 1, 0, -1)[:, None] + np.concatenate([inserted, np.zeros_like(newest[None], np.int64)])
    shape = length, len(number)
    seen, before, timestep = np.full(shape, -1), np.full(shape, -1), np.zeros(shape, np.int32)
    over = np.zeros(shape, np.bool_)
    steps, column = place[1:-1], np.broadcast_to(np.arange(len(number)), back.shape)
    there = back <= length - 1
    at = length - 1 - back[there], column[there]
    seen[at] = steps[there]
    timestep[at] = index[1:-1][there]
    before[at] = np.where(index[1:-1] == 0, -1, place[:-2])[there]
    first = (seen >= 0) & (timestep == 0)
    # the observation after an episode's last step, and the chunk's last one if its step is not there yet
    after = ends.copy()
    after[-1] |= newest
    there = after & (back <= length)
    at = length - back[there], column[there]
    before[at] = steps[there]
    timestep[at] = index[1:-1][there] + 1
    over[at] = ends[there]
    final = seen < 0
    final[-1] &= after[-1]
    # else the last row is the next step of the episode
    goes_on = ~after[-1]
    seen[-1, goes_on], before[-1, goes_on] = place[-1, goes_on], steps[-1, goes_on]
    timestep[-1, goes_on] = index[-1, goes_on]
    terminal = over.copy()
    terminal[over] = ring.arrays.terminated[before[over]]
    return Rows(seen, seen, before, first, over, terminal, final, timestep)


def _transposed(rows: Any) -> Any:
    return np.ascontiguousarray(rows.T)


def _renamed(store: Store, wanted: dict[Path, Path], where: Any) -> dict[Path, Tensor]:
    """Fields of the rows ``where``, in the form that the store takes, under new names."""
    if not wanted:
        return {}
    fields = store.gather(wanted.values(), where)
    return {name: fields[path] for name, path in wanted.items()}
