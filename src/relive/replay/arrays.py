"""A replay from the flat arrays of a data set, and back: as episodes, and as columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..batches import Batch, as_batch
from ..errors import FieldError, ParameterError, SchemaError, ShapeError
from ..memory.estimate import require_whole
from ..parameters import an_instance, require
from ..ring.ring import Ring
from ..steps.arrays import Array, Bools, Ints, as_host, numpy_view
from ..steps.schema import Path, Schema, descend, dotted, map_leaves
from ..views.transitions import NStep

ALIASES = {
    "observations": "obs", "actions": "action", "rewards": "reward", "terminals": "terminated",
    "terminations": "terminated", "timeouts": "truncated", "truncations": "truncated",
    "next_observations": "next_obs", "dones": "done",
}  # fmt: skip
"""The names of a data set -> those of a step."""

STEP = "obs", "action", "reward", "terminated", "truncated"
"""The fields from which a schema is inferred. Other fields need a schema."""

CUTS_UNKNOWN = (
    ". 'truncated' is also called 'timeouts' or 'truncations': without it and without next observations, nothing shows "
    "where episodes were cut off. Pass zeros if none was"
)
"""Advice for an error if the array of truncations is missing."""

PIECE = 2**16
"""Rows that are prepared and added at once."""


def filled(
    make: Callable[..., Any], arrays: Mapping[str, object], schema: Schema | None, options: dict[str, object]
) -> Any:
    """A replay of one env that holds the transitions of flat arrays: :meth:`relive.ReplayBuffer.from_arrays`.

    With ``next_obs``, every row becomes a transition. If the next row does not go on from a row, the episode is
    interrupted there. Without ``next_obs``, the observation after a row is the observation of the next row. Then a
    truncated row, and a last row that has not ended, are left out, since it is not known what came after them. After a
    terminal, the row's own observation stands for the next one: the discount is 0, so no target reads it, but hindsight
    goals would.

    Args:
        make: the class of the buffer.
        arrays: in the order of time, NumPy or torch, nested where observations are: ``obs`` (or ``observations``),
            ``action`` (``actions``), ``reward`` (``rewards``, ``[S]`` or ``[S, 1]``), ``terminated`` (``terminals`` or
            ``terminations``) and ``truncated`` (``timeouts`` or ``truncations``), bools or 0 and 1. Also read, if
            given: ``next_obs`` (``next_observations``) and ``done`` (``dones``), which must agree with the other
            flags. With ``next_obs``, ``truncated`` may be missing. Other arrays are read only if the schema has
            fields of their names.
        schema: the fields to store; None infers the fields of a step, with the dtypes of the arrays.
        options: of the buffer. Without a capacity, the rows that are needed are counted.

    Raises:
        FieldError: an array is missing, or comes under two names.
        ShapeError: an array has another number of rows than ``reward``, or there are none.
        ParameterError: flags are not 0 and 1, ``done`` contradicts them, ``num_envs`` is not 1, or arrays that repeat
            their numbers would not fit into memory as a whole.
        SchemaError: as the constructor's.
    """
    require("from_arrays", an_instance(Schema, "a relive.Schema"), schema=schema)
    log = _Log(_named(arrays), schema)
    if options.get("num_envs", 1) != 1:
        raise ParameterError(f"from_arrays(num_envs={options['num_envs']}): flat arrays are of one env; leave it out")
    own = bool(options.get("own_next_obs")) or not options.get("ordered", True)
    if options.get("capacity") is None and options.get("capacity_bytes") is None:
        options = options | {"capacity": max(log.capacity(own), 2)}
    buffer = make(log.schema, **options)
    for low in range(0, log.size, PIECE):
        steps = log.rows(low, min(low + PIECE, log.size), own)
        with_env = itemgetter((slice(None), None))  # [T, ...] as [T, 1, ...]
        buffer.extend({name: map_leaves(with_env, value) for name, value in steps.items()})
    buffer.interrupt()  # what is added later does not follow the last row
    return buffer


class _Log:
    """Checked arrays ``[S, ...]``, and what is known about the end of each row.

    Args:
        fields: arrays by the names of a step.
        schema: the fields to store; None infers those of a step.
    """

    def __init__(self, fields: dict[str, object], schema: Schema | None) -> None:
        wanted = STEP if schema is None else schema.names
        require_whole({name: fields[name] for name in (*wanted, "next_obs", "done") if name in fields})
        if "next_obs" in fields and "reward" in fields and "truncated" not in fields:
            fields["truncated"] = np.zeros(_row_count(fields["reward"]), np.bool_)  # next_obs shows where it goes on
        missing = [name for name in wanted if name not in fields]
        if missing:
            hint = CUTS_UNKNOWN if "truncated" in missing else "; pass them, under these names or those of D4RL"
            raise FieldError(
                f"from_arrays: the arrays lack {', '.join(missing)}; they have {', '.join(map(dotted, fields))}{hint}"
            )
        self.size = _row_count(fields["reward"])
        if not self.size:
            raise ShapeError("from_arrays: the arrays have no rows; create an empty buffer with ReplayBuffer(schema)")
        fields["reward"] = _column(fields["reward"], "reward", self.size)
        self.terminated = fields["terminated"] = _flags(fields["terminated"], "terminated", self.size)
        self.truncated = fields["truncated"] = _flags(fields["truncated"], "truncated", self.size)
        if schema is None:
            hosts = {name: partial(as_host, name=f"from_arrays: field '{name}'") for name in STEP}
            example = {name: map_leaves(host, fields[name]) for name, host in hosts.items()}
            schema = Schema.from_example(example, num_envs=self.size)
        self.schema, self.fields = schema, fields
        self.leaves = {path: self._leaf(path) for path in schema.leaves}
        self.after: dict[Path, Array] | None = None
        if "next_obs" in fields:
            self.after = {path: self._leaf(("next_obs", *path[1:])) for path in self.leaves if path[0] == "obs"}
        self.ended = self.terminated | self.truncated
        if "done" in fields:
            wrong = np.flatnonzero(_flags(fields["done"], "done", self.size) != self.ended)
            if len(wrong):
                raise ParameterError(
                    f"from_arrays: 'done' contradicts terminated | truncated first in row {wrong[0]}; leave it out, or "
                    "pass the right flags"
                )
        self.cut = self._cut()

    def _leaf(self, path: Path) -> Array:
        """A leaf ``[S, ...]``.

        Raises:
            FieldError, ShapeError: it is missing, or does not have S rows of the schema's shape.
        """
        try:
            leaf = as_host(descend(self.fields[path[0]], path[1:]), f"from_arrays: field '{dotted(path)}'")
        except (KeyError, IndexError, TypeError) as error:
            raise FieldError(f"from_arrays: the arrays lack '{dotted(path)}', which the schema has") from error
        field = self.schema.leaves[("obs" if path[0] == "next_obs" else path[0], *path[1:])]
        if leaf.shape != (self.size, *field.shape):
            raise ShapeError(
                f"from_arrays: field '{dotted(path)}': expected {(self.size, *field.shape)}, as reward has {self.size} "
                f"rows, got {leaf.shape}"
            )
        return leaf

    def _cut(self) -> Bools:
        """True for rows that have not ended and from which the next row does not go on, bool ``[S]``."""
        cut = np.zeros(self.size, np.bool_)
        cut[-1:] = True
        for path, leaf in (self.after or {}).items():
            flat = self.size, math.prod(leaf.shape[1:])
            here, there = leaf.reshape(flat)[:-1], self.leaves[path].reshape(flat)[1:]
            differs = (here != there) & ~((here != here) & (there != there))  # NaN follows NaN
            cut[:-1] |= differs.any(1)
        return cut & ~self.ended

    @property
    def unknown(self) -> Bools:
        """Rows that cannot be drawn, bool ``[S]``: training needs their next observation, which is not known."""
        return (self.truncated & ~self.terminated) | self.cut if self.after is None else np.zeros(self.size, np.bool_)

    def capacity(self, own: bool) -> int:
        """The number of rows of memory that keep every transition whose next observation is known."""
        if own:
            return self.size - int(self.unknown.sum())
        finals = self.ended & ~self.unknown
        return self.size + int(finals.sum()) + (int(self.cut.sum()) if self.after is not None else 0)

    def rows(self, low: int, high: int, own: bool) -> dict[str, object]:
        """Rows from ``low`` up to ``high``, as :meth:`relive.ReplayBuffer.extend` takes them, of one env.

        If the next row does not go on from a row, an extra row is put between the two. Its observation is the one that
        the row before led to. Its mask leaves it out, which interrupts the episode.
        """
        span = slice(low, high)
        again = self.cut[span] if self.after is not None else np.zeros(high - low, np.bool_)
        take = low + np.repeat(np.arange(high - low), 1 + again)
        extra = np.append(False, take[1:] == take[:-1])
        leaves = {path: leaf[take] for path, leaf in self.leaves.items()}
        following = self._following(take)
        for path in following:
            leaves[path][extra] = following[path][extra]
        leaves["terminated",] &= ~extra
        left_out = extra | self.unknown[take]
        leaves["truncated",] |= left_out
        steps: dict[str, object] = {name: self.schema.rebuild(name, leaves.__getitem__) for name in self.schema.names}
        steps["mask"] = ~left_out
        if own or self.ended[span].any():
            steps["next_obs"] = self.schema.rebuild("obs", following.__getitem__)
        return steps

    def _following(self, take: Ints) -> dict[Path, Array]:
        """The observations after the rows ``take``. If none is known after a terminal, the row's own one is taken."""
        if self.after is not None:
            return {path: leaf[take] for path, leaf in self.after.items()}
        rows = np.minimum(take + ~self.ended[take], self.size - 1)
        return {path: leaf[rows] for path, leaf in self.leaves.items() if path[0] == "obs"}


def _named(arrays: Mapping[str, object]) -> dict[str, object]:
    """The arrays by the names of a step.

    Raises:
        FieldError: they are no mapping, or one field comes under two names.
    """
    if not hasattr(arrays, "keys"):
        raise FieldError(f"from_arrays: expected a mapping of names to arrays, got {type(arrays).__name__}")
    named: dict[str, object] = {}
    for name in arrays.keys():
        ours = ALIASES.get(name, name)
        if ours in named:
            both = " and ".join(f"'{given}'" for given in arrays if ALIASES.get(given, given) == ours)
            raise FieldError(f"from_arrays: {both} are two names of one field; leave one out")
        named[ours] = arrays[name]
    return named


def _row_count(reward: object) -> int:
    """The number of rows, which is that of ``reward``.

    Raises:
        ShapeError: it has no rows.
    """
    column = as_host(reward, "from_arrays: field 'reward'")
    if not column.ndim:
        raise ShapeError("from_arrays: field 'reward': expected an array [S], got a single value")
    return len(column)


def _column(values: object, name: str, size: int) -> Array:
    """Numbers ``[S]``, given as ``[S]`` or ``[S, 1]``."""
    column = as_host(values, f"from_arrays: field '{name}'")
    if column.shape not in ((size,), (size, 1)):
        raise ShapeError(
            f"from_arrays: field '{name}': expected ({size},), as reward has {size} rows, got {column.shape}"
        )
    return column.reshape(size)


def _flags(values: object, name: str, size: int) -> Bools:
    """Flags ``[S]`` of any dtype as bools.

    Raises:
        ParameterError: one is neither 0 nor 1.
    """
    column = _column(values, name, size)
    wrong = np.flatnonzero((column != 0) & (column != 1))
    if len(wrong):
        raise ParameterError(f"from_arrays: {name}[{wrong[0]}] is {column[wrong[0]]}; expected 0 or 1, or bools")
    return column.astype(np.bool_)


class Episode(NamedTuple):
    """The stored transitions of one episode."""

    env: int
    """The env that played it."""
    steps: Batch
    """The transitions ``[k]`` in the order of time: the fields of a step, ``next_obs`` and ``index``."""
    begins: bool
    """True if the first of them is the first step of the episode. A full ring overwrites the oldest steps."""
    ended: bool
    """True if the last of them terminated or was truncated. A running or interrupted episode has not ended."""

    @property
    def whole(self) -> bool:
        """True if all of the episode is here."""
        return self.begins and self.ended

    @property
    def final_obs(self) -> Any:
        """The observation after the last step, ``[...]``, as the schema nests it."""
        return self.steps.rows(-1)["next_obs"]


class EpisodeRows(NamedTuple):
    """Successive transitions of one episode: the rows ``first`` up to ``until`` of an env."""

    env: int
    first: int
    until: int

    def places(self, ring: Ring) -> Ints:
        """Where these rows lie, int64 ``[k]``: row k of env e is at ``e * R + k % R``."""
        return self.env * ring.rows + np.arange(self.first, self.until, dtype=np.int64) % ring.rows


def episodes_of(ring: Ring) -> list[EpisodeRows]:
    """The episodes of the live rows, env by env in the order of time.

    Raises:
        SchemaError: the transitions have no order.
    """
    if not ring.ordered:
        raise SchemaError("episodes: the transitions of this replay have no order; read data() instead")
    episodes: list[EpisodeRows] = []
    for env in range(ring.num_envs):
        places = ring.live_places(env)
        step, complete = ring.step[places], ring.stamp[places] >= 0
        # a row that is not complete ends an episode, and so does one whose successor starts again at step 0
        goes_on = np.zeros(len(places), np.bool_)
        goes_on[1:] = complete[1:] & complete[:-1] & (step[1:] == step[:-1] + 1)
        oldest = int(ring.oldest[env])
        starts, ends = complete & ~goes_on, complete & ~np.append(goes_on[1:], False)
        for low, high in zip(np.flatnonzero(starts).tolist(), np.flatnonzero(ends).tolist(), strict=True):
            episodes.append(EpisodeRows(env, oldest + low, oldest + high + 1))
    return episodes


def episode_at(ring: Ring, rows: EpisodeRows) -> Episode | None:
    """The part of an episode that is still stored; None if no step is."""
    first = max(rows.first, int(ring.oldest[rows.env]))  # older rows were overwritten, or forgotten
    if first >= rows.until:
        return None
    places = rows._replace(first=first).places(ring)
    fields = _transitions(ring, places)
    ended = bool(fields["terminated",][-1] | fields["truncated",][-1])
    return Episode(rows.env, as_batch(fields), int(ring.step[places[0]]) == 0, ended)


def columns_of(ring: Ring, next_obs: bool) -> dict[Path, Array]:
    """All complete transitions as columns ``[S, ...]``, env by env in the order of time.

    ``env``, ``episode``, ``step`` and ``index`` come first. ``episode`` is the number of the episode in this table, and
    ``step`` counts within the episode. Transitions without an order come in the order of completion, and have neither.
    """
    if not ring.ordered:
        anchors = ring.anchors()
        places = anchors[np.argsort(ring.stamp[anchors], kind="stable")]
        order: dict[Path, Array] = {("env",): places // ring.rows}
    else:
        places_of = [rows.places(ring) for rows in episodes_of(ring)]
        places = np.concatenate([np.zeros(0, np.int64), *places_of])
        episode = np.repeat(np.arange(len(places_of)), np.array([len(each) for each in places_of], np.int64))
        order = {("env",): places // ring.rows, ("episode",): episode, ("step",): ring.step[places]}
    fields = {path: numpy_view(field.cpu()) for path, field in _transitions(ring, places).items()}
    order["index",] = fields.pop(("index",))
    return order | {path: field for path, field in fields.items() if next_obs or path[0] != "next_obs"}


def _transitions(ring: Ring, places: Ints) -> dict[Path, Tensor]:
    """The fields of the steps at these places, their next observations and indices."""
    fields = NStep(1, 1.0).read(ring, places)
    return {path: fields[path] for path in fields if path[0] not in ("discount", "steps", "next_index")}
