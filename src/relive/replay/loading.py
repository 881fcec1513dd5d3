"""A replay from a save: what the files state is checked, then turned into rows of a new ring.

Nothing in a save is trusted: each number is tested before it is used as an index or as a size, and the ring's
invariants are tested in the end. A save can be loaded with other fields, a smaller or larger capacity, another sampler
or view and, if its steps have no order, another number of envs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeGuard, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import files
from ..core.words import COLUMNS, COMPLETED, COUNT, HEAD, LARGEST_ERROR, RULE, TAIL
from ..errors import FileFormatError, InvariantError, ParameterError
from ..files.disk import MOST, entry, fitting, integers, whole
from ..files.save import EXTRA, read_extra
from ..memory.allocator import zeroed
from ..memory.estimate import free_memory, storage_plan
from ..memory.layout import BOOKKEEPING, row_layout
from ..memory.ram import MakeStore, in_ram
from ..parameters import is_count, is_number, parts_of
from ..printable import shown
from ..ring.ring import LARGEST_NUMBER, Ring, Span, WindowRule
from ..samplers.contract import AnySampler, OwnSampler, with_defaults
from ..steps.arrays import Array, Bools, Leaf, as_host, to_tensor
from ..steps.changes import Origin, SchemaChanges
from ..steps.schema import Field, Path, Schema, dotted
from ..views.contract import View
from .checks import stored_fields
from .mirror import bookkeeping_bytes
from .saving import KIND, PARAMETERS, Segment, describe, is_segment, kinds, rebuild, segment_prefix
from .serving import Progress

if TYPE_CHECKING:
    from typing import NotRequired


def open_save(path: str | os.PathLike[str]) -> files.Save:
    """Open the save in the directory ``path``.

    Raises:
        FileFormatError: there is no save of a replay, or it is damaged.
    """
    save = files.Save(path)
    kind = save.content.get("kind")
    if kind != KIND:
        save.close()
        raise FileFormatError(f"'{path}' is a save of {shown(kind)}, not of a {KIND}")
    return save


class ReplayArguments(TypedDict):
    """The constructor's arguments of a replay that is in files. A save has those that need not be here, too."""

    schema: Schema
    capacity: int
    num_envs: int
    sampler: Any  # of the kinds that the caller knows
    view: Any
    ordered: bool
    own_next_obs: bool
    seed: int | None
    device: NotRequired[str | torch.device]
    check_ends: NotRequired[bool]
    debug: NotRequired[bool]


def saved_arguments(
    source: Source, device: str | torch.device, sampler: AnySampler | None, view: View | None
) -> ReplayArguments:
    """The constructor's arguments for a replay with this state; ``sampler`` and ``view`` where they are not None.

    Raises:
        FileFormatError, ParameterError, SchemaError, KeyError: the state makes no sense.
    """
    content = source.content
    integers(content, "state", whole(content, "num_envs"), 4)  # before any memory is taken for as many envs
    arguments = ring_arguments(content, source.row_count, sampler, view)
    stored_fields(arguments["schema"], False)
    return {
        **arguments,
        "device": device,
        "check_ends": entry({"check_ends": True, **content}, "check_ends", bool),
        "debug": entry({"debug": False, **content}, "debug", bool),
    }


def ring_arguments(
    content: Mapping[str, object], row_count: int | None, sampler: AnySampler | None, view: View | None
) -> ReplayArguments:
    """The constructor's arguments that are noted with every ring in files; ``row_count`` rows are there, or may be.

    Raises:
        FileFormatError, ParameterError, SchemaError, KeyError: they make no sense.
    """
    if entry(content, "kind", str) != KIND:
        raise InvariantError(f"its kind is {shown(content['kind'])}")
    rows, num_envs = whole(content, "rows_per_env"), whole(content, "num_envs")
    if num_envs < 1 or rows < 2:
        raise FileFormatError(f"the save has {num_envs} envs of {rows} rows; expected at least 1 env and 2 rows")
    schema = Schema.from_json(json.dumps(content.get("schema")))
    if view is None:
        view = _saved_view(content, rows * num_envs if row_count is None else row_count)
    return {
        "schema": schema,
        "capacity": rows * num_envs,
        "num_envs": num_envs,
        "sampler": sampler if sampler is not None else rebuild(content.get("sampler"), "sampler"),
        "view": view,
        "ordered": entry(content, "ordered", bool),
        "own_next_obs": entry({"own_next_obs": False, **content}, "own_next_obs", bool),
        "seed": entry(content, "seed", int),
    }


def changed_arguments(
    arguments: ReplayArguments,
    device: str | torch.device,
    capacity: int | None,
    changes: SchemaChanges | None,
    store: MakeStore | None,
) -> dict[Path, Origin] | None:
    """Change the arguments of :func:`saved_arguments` as the caller of ``load`` asks.

    Returns:
        where each field of the new schema comes from; None if the schema stays.

    Raises:
        SchemaError: an argument is out of range, or the save has no such fields.
    """
    origins = None
    if changes is not None:
        arguments["schema"], origins = changes.applied(arguments["schema"])
        stored_fields(arguments["schema"], False)
    if capacity is not None:
        own, num_envs = arguments["own_next_obs"] or not arguments["ordered"], arguments["num_envs"]
        leaves, there = stored_fields(arguments["schema"], own).leaves, torch.device(device)
        leaves = leaves if store is None else in_ram(leaves)
        # a larger capacity is the caller's wish, so it is tested against the memory; that of the save is not
        sampler = with_defaults(arguments["sampler"])
        known_there = bookkeeping_bytes(there, sampler, num_envs)
        storage_plan(leaves, num_envs, capacity, None, there, sampler.nbytes, known_there).require_memory()
        arguments["capacity"] = capacity
    return origins


def load_extra(path: str | os.PathLike[str]) -> Any:
    """The value that was passed as ``extra`` to the ``save`` of a replay or rollout; None if none was. Reads no row.

    Tensors are on the CPU, and dicts of all kinds are plain dicts.

    Args:
        path: the directory of the save.

    Raises:
        FileFormatError: there is no save, or it is damaged, foreign or of another version; nothing is ever run.
    """
    with files.Save(path) as save:
        return read_extra(save, free_memory())


def restore(
    ring: Ring,
    sampler: OwnSampler,
    progress: Progress,
    source: Source,
    origins: Mapping[Path, Origin] | None = None,
) -> None:
    """Put a saved state into the parts of a new replay, and check that the state makes sense.

    If the new ring has fewer rows per env than the saved one, it gets the newest rows of each env.

    Args:
        ring: the new ring, of as many envs.
        sampler: its sampler.
        progress: the counts of its draws.
        source: the saved state.
        origins: the origins of the fields, if the schema was changed.

    Raises:
        FileFormatError, InvariantError, ValueError, KeyError: the state makes no sense.
        DoesNotFitError: a saved number does not fit into its new dtype.
    """
    content, new_rule = source.content, ring.rule
    progress.draws, progress.sampled, progress.late = integers(content, "counts", 3).tolist()
    progress.first = whole({"first": 0, **content}, "first")
    saved_fields = stored_fields(Schema.from_json(json.dumps(content.get("schema"))), ring.own_next)
    conversion = Conversion(saved_fields.leaves, ring.store.leaves, origins)
    saved = _restore_rows(ring, source, whole(content, "rows_per_env"), conversion)
    ring.rule = WindowRule(*entry(content, "rule", list))  # tests it, and counts what can be drawn
    ring.check(recount=False)  # before any compiled code draws from these rows
    _restore_sampler(ring, sampler, source, saved, new_rule)
    ring.not_finite = whole({"not_finite_rewards": 0, **content}, "not_finite_rewards")


def _restore_rows(ring: Ring, source: Source, saved_rows: int, conversion: Conversion) -> Span:
    """Write the cursors and the newest rows into a new ring. Returns the rows that were live in the saved one."""
    content = source.content
    ring.state[:] = integers(content, "state", *ring.state.shape)
    ring.counters[:RULE] = integers(content, "counters", RULE)
    oldest = np.maximum(ring.state[:, TAIL], ring.state[:, HEAD] - saved_rows)
    if ring.rows > saved_rows:  # there is room for older rows, but no save has them
        ring.state[:, TAIL] = oldest
    ring.check_cursors(
        LARGEST_NUMBER // 2
    )  # before rows are found by them; half, since what comes next has to fit as well
    saved = Span(oldest, ring.heads.copy())
    for part in source.parts(saved, conversion.large):
        _restore_part(ring, part, conversion)
    return saved


def _restore_part(ring: Ring, part: RowPart, conversion: Conversion) -> None:
    """Write those rows of a part that are live."""
    rows = part.rows.numpy()
    _require_bools(conversion.saved, rows)
    live = part.span.meet(ring.span)
    chosen = part.span.where(live)
    large = {path: block[chosen] for path, block in part.large.items()}

    def under_way() -> Bools:
        """Bool ``[K]``: True for the newest rows of running episodes."""
        env, number = live.rows()
        return (number == ring.heads[env] - 1) & ring.under_way[env]

    packed, large = conversion(rows[chosen], large, under_way)
    ring.store.restore(live.places(ring.rows), packed, large)


def _restore_sampler(ring: Ring, sampler: OwnSampler, source: Source, saved: Span, new_rule: WindowRule) -> None:
    """Give the sampler the ring and, if it is of the saved kind, its state."""
    was, now = kinds(source.content.get("sampler")), kinds(describe(sampler))
    alike = was == now or not (was and now)  # a user's own sampler decides by itself what it can go on from
    checked = alike and type(sampler) in PARAMETERS
    parts = sampler_state(ring, source.content, source.sampler_tensors(), saved, checked=checked)
    if not alike:  # what could be drawn by the saved one, through its view, may not be for this one
        ring.rule = new_rule
    sampler.attach(ring)
    if alike:
        sampler.load_state_dict(parts)
    elif was[0] == now[0]:  # around another inner sampler, which starts again
        inner = {name: value for name, value in sampler.state_dict().items() if name.startswith("inner.")}
        sampler.load_state_dict({**parts, **inner})


def sampler_state(
    ring: Ring, content: Mapping[str, object], tensors: Mapping[str, Tensor], saved: Span, *, checked: bool
) -> dict[str, Any]:
    """The state of a saved sampler. Arrays of the ``saved`` rows get an entry for each row of the ring, 0 if new.

    ``checked`` refuses what none of relive's own samplers would save.

    Raises:
        FileFormatError: an array is missing, or has another length; or a value cannot be.
    """
    by_row: set[str] = set(entry(content, "sampler_rows", list))
    state: dict[str, Any] = dict(entry(content, "sampler_state", dict))
    for name in by_row:
        fitting(tensors, f"sampler.{name}", (saved.size,))
    state |= {name.removeprefix("sampler."): x.numpy() for name, x in tensors.items() if name.startswith("sampler.")}
    if checked:
        require_sampler_state(state, by_row, ring)
    live = saved.meet(ring.span)
    for name in by_row:  # saved for live rows alone, one env after another
        values: Array = state[name]
        shape = (ring.store.num_rows, *values.shape[1:])
        state[name] = zeroed(math.prod(shape) * values.itemsize).view(values.dtype).reshape(shape)
        state[name][live.places(ring.rows)] = values[saved.where(live)]
    return state


# -- the tensors of a save -------------------------------------------------------------------------------------------


class RowPart(NamedTuple):
    """Some rows of a saved ring."""

    span: Span
    rows: Tensor
    """The packed rows, uint8 ``[K, W]``."""
    large: dict[Path, Tensor]
    """The large fields, ``[K, *shape]``."""


class Source:
    """The state of a replay: its JSON, and its tensors, which are read when they are needed.

    The rows are in one part, or in segments if the JSON has an entry of that name.

    Args:
        content: the JSON.
        shapes: the shape of each tensor.
        read: returns tensors by name, at least those asked for.
        where: the file that holds a tensor, for messages.
    """

    def __init__(
        self,
        content: Mapping[str, object],
        shapes: Mapping[str, tuple[int, ...]],
        read: Callable[[Iterable[str]], Mapping[str, Tensor]],
        where: Callable[[str], str] = lambda name: "the state",
    ) -> None:
        self.content = content
        self._shapes, self._read, self._where = shapes, read, where
        self.segments: list[Segment] = []
        """The segments that were read."""

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], content: Mapping[str, object]) -> Source:
        """A state in memory."""
        return cls(content, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, lambda names: tensors)

    @classmethod
    def of_save(cls, save: files.Save) -> Source:
        """A save that is open for reading."""
        specs = save.specs
        return cls(
            save.content,
            {name: spec.shape for name, spec in specs.items()},
            lambda names: save.read(names=names, most=free_memory()),
            lambda name: specs[name].file,
        )

    @property
    def row_count(self) -> int:
        """How many rows the source has."""
        rows = [self._shapes.get(f"{prefix}rows") for prefix in self._prefixes()]
        return sum(shape[0] for shape in rows if shape)

    def parts(self, saved: Span, large: Iterable[Path]) -> Iterator[RowPart]:
        """All rows, part by part, the oldest part first. ``saved`` are the live rows.

        Raises:
            FileFormatError: a tensor is missing or foreign; or the segments are not in order, or lack a row.
        """
        blocks, prefixes = {path: f"block.{dotted(path)}" for path in large}, self._prefixes()
        segmented = "segments" in self.content
        self._require_names(prefixes, ["rows", *blocks.values(), *(["span"] if segmented else [])])
        count, before = 0, np.zeros_like(saved.first)
        for prefix in prefixes:
            names = [f"{prefix}rows", *(f"{prefix}{block}" for block in blocks.values())]
            span_name = f"{prefix}span"
            tensors = self._read([*names, span_name] if segmented else names)
            span = _span(tensors, span_name, saved) if segmented else saved
            for name in names:
                fitting(tensors, name, (span.size,))  # an entry for each row, before any is used
            if (span.first < before).any() and span.size:
                raise FileFormatError(
                    f"'{self._where(span_name)}': the rows of this segment come before those of the one listed before "
                    "it; restore the manifest and the data files from one copy"
                )
            # the spans do not overlap, so if their live rows are as many as there are live rows, none is missing
            count, before = count + span.meet(saved).size, np.maximum(before, span.until)
            if segmented:
                self.segments.append(Segment(prefix.split(".")[1], span))
            yield RowPart(span, tensors[names[0]], {path: tensors[f"{prefix}{b}"] for path, b in blocks.items()})
        if count != saved.size:
            raise FileFormatError(
                f"the segments hold {count} of the {saved.size} rows that the cursors state; restore the manifest and "
                "the data files from one copy"
            )

    def sampler_tensors(self) -> Mapping[str, Tensor]:
        """The arrays of the sampler, and maybe others."""
        names = [name for name in self._shapes if name.startswith("sampler.")]
        return self._read(names) if names else {}

    def _prefixes(self) -> list[str]:
        """The beginning of the tensors' names in each part.

        Raises:
            FileFormatError: the entry for the segments is not a list of their names.
        """
        if "segments" not in self.content:
            return [""]
        names = entry(self.content, "segments", list)
        if not all(map(is_segment, names)):
            raise FileFormatError(
                f"the save's entry 'segments' is {shown(names)}; expected names of 16 hexadecimal digits"
            )
        return [segment_prefix(name) for name in names]

    def _require_names(self, prefixes: Iterable[str], names: Iterable[str]) -> None:
        """Require these tensors of each part, and besides them only the sampler's and the learner's."""
        wanted = {f"{prefix}{name}" for prefix in prefixes for name in names}
        others = {name for name in self._shapes if name.startswith(("sampler.", EXTRA))}
        if wrong := sorted((self._shapes.keys() - others) ^ wanted):  # in one of the two only
            raise FileFormatError(
                f"the save has the tensors {shown(list(self._shapes), 200)}; {shown(wrong[0])} is missing or foreign"
            )


def _span(tensors: Mapping[str, Tensor], name: str, saved: Span) -> Span:
    """The rows of a segment.

    Raises:
        FileFormatError: these are not ranges of rows that were ever stored.
    """
    # every number is tested: the span says where the rows go
    first, until = fitting(tensors, name, (2, len(saved.first)), torch.int64).numpy()
    if (first < 0).any() or (until < first).any() or (until > saved.until).any():
        raise FileFormatError(
            f"tensor {shown(name)}: expected ranges of rows of this buffer, got {shown([first, until], 200)}"
        )
    return Span(first, until)


# -- other fields ----------------------------------------------------------------------------------------------------


# A field cannot move into or out of `obs`, because the row of a final observation has no other fields.
class Conversion:
    """Turns packed rows and large fields into those of other fields; without changes, it returns them as they are.

    Args:
        saved: the saved leaves, with ``next_obs`` if each row has its own.
        leaves: the leaves of the new buffer.
        origins: where each leaf of the new schema comes from; None if nothing changes.
    """

    def __init__(
        self, saved: Mapping[Path, Field], leaves: Mapping[Path, Field], origins: Mapping[Path, Origin] | None
    ) -> None:
        self.saved = saved
        self._origins = None if origins is None else {path: _origin(origins, path) for path in leaves}
        self._old, large = row_layout(saved)
        self._new, _ = row_layout(leaves)
        self.large: tuple[Path, ...] = tuple(path for path in saved if path in large)
        """The saved fields that are not in the packed rows."""

    def __call__(
        self, rows: Array, large: Mapping[Path, Tensor], under_way: Callable[[], Bools]
    ) -> tuple[Array, dict[Path, Tensor]]:
        """The rows (uint8 ``[K, W]``) and large fields ``[K, *shape]`` for the new buffer.

        ``under_way`` is called if needed. It returns flags ``[K]``, True for the newest rows of running episodes. These
        rows and complete transitions have all fields. Other rows are final observations; their other fields hold
        arbitrary bytes.

        Raises:
            DoesNotFitError: a saved number does not fit into its new dtype.
        """
        if self._origins is None:
            return rows, dict(large)
        packed = np.zeros((len(rows), self._new.nbytes), np.uint8)
        old, new = self._old.tensors(np.ascontiguousarray(rows)), self._new.tensors(packed)
        for path in BOOKKEEPING:  # the ring's own numbers stay, whatever the fields are
            new[path].copy_(old[path])
        every = torch.ones(len(rows), dtype=torch.bool, device="cpu")
        # a final observation has only its observation: whatever else its bytes are need not fit
        steps = (old["_stamp",] >= 0) | torch.from_numpy(under_way())
        saved, blocks = {**old, **large}, dict[Path, Tensor]()
        for path, origin in self._origins.items():
            used = every if path[0] in ("obs", "next_obs") else steps
            values = origin.values(saved, len(rows), used, dotted(path))
            if path in new:
                new[path].copy_(values)
            else:
                blocks[path] = values.contiguous()
        return packed, blocks


def _origin(origins: Mapping[Path, Origin], path: Path) -> Origin:
    """The origin of a stored leaf; a next observation comes from where the observation does."""
    if path[0] != "next_obs":
        return origins[path]
    origin = origins[("obs", *path[1:])]
    return origin if origin.value is not None else origin._replace(source=("next_obs", *origin.source[1:]))


# -- another number of envs ------------------------------------------------------------------------------------------

INDICES = ("sampler.order", "sampler.inner.order")
"""Arrays of samplers that name transitions by index. An index means something else with another number of envs."""


# An ordered episode belongs to its env; dealing it out would give new indices and another order of completion. To use
# both, draw from a Mixture.
def require_unordered(content: Mapping[str, object], num_envs: object, store: object) -> None:
    """Refuse another number of envs if it would tear episodes, or a value that is not such a number.

    Raises:
        ParameterError: the steps of the saved replay have an order; or ``num_envs`` is not a positive whole number; or
            there is a ``store``, too.
    """
    if not is_count(num_envs, 1):
        raise ParameterError(f"num_envs: expected a whole number of at least 1, got {num_envs!r}")
    if store is not None:
        raise ParameterError("num_envs: a store of your own cannot be given with it; load without, then append")
    if num_envs != content.get("num_envs") and content.get("ordered") is not False:
        raise ParameterError(
            f"num_envs: expected {content.get('num_envs')}, as it was saved, got {num_envs}; steps in order belong to "
            "the episodes of their env, and only a replay with ordered=False can change its number of envs. Load it as "
            "it is, and draw from it and from a new buffer with a Mixture"
        )


def redistribute_envs(
    arrays: Mapping[str, Leaf], content: Mapping[str, Any], num_envs: int, capacity: int | None
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The state of a replay without an order, dealt to ``num_envs`` envs like cards, from the oldest transition on.

    Their order and their priorities stay. Indices are new, and count from 0. ``capacity`` is the number of rows
    over all envs (default: about as many as before); if it is smaller, the newest transitions are kept.
    """
    layout, _ = row_layout(stored_fields(Schema.from_json(json.dumps(content["schema"])), True).leaves)
    rows = (capacity or content["rows_per_env"] * content["num_envs"]) // num_envs
    if rows < 2:
        raise ParameterError(f"capacity: expected at least 2 rows for each of {num_envs} envs, got {rows}")
    # stamps number the transitions in order; the newest are dealt, as many as there is room for
    by_age = np.argsort(layout.arrays(as_host(arrays["rows"]))["_stamp",])[-rows * num_envs :]
    hands = [by_age[env::num_envs] for env in range(num_envs)]
    order = np.concatenate(hands)
    per_row = {f"sampler.{name}" for name in content["sampler_rows"]}
    moved = {
        name: value[order] if name == "rows" or name.startswith("block.") or name in per_row else value
        for name, value in arrays.items()
    }
    moved |= {name: moved[name][:0] for name in INDICES if name in moved}  # a new epoch begins
    notes = layout.arrays(as_host(moved["rows"]))
    # transition k is card k // N of env k % N: its order there, and its stamp
    notes["_order",][:] = np.concatenate([np.arange(len(hand)) for hand in hands])
    notes["_stamp",][:] = np.concatenate([np.arange(env, len(by_age), num_envs) for env in range(num_envs)])
    state = np.zeros((num_envs, COLUMNS), np.int64)
    # every row is a complete transition, so an env has as many rows as transitions
    state[:, HEAD] = state[:, COUNT] = [len(hand) for hand in hands]
    counters = [*content["counters"]]
    counters[COMPLETED] = len(by_age)
    changed = {"num_envs": num_envs, "rows_per_env": rows, "state": state.tolist(), "counters": counters}
    return {name: to_tensor(value) for name, value in moved.items()}, {**content, **changed}


# -- values that no replay would save --------------------------------------------------------------------------------

REACH = 2**16
"""The most rows that one item of a saved view may span. A save with more rows may have longer items."""


STEPS = 2**31 - 1
"""The most rewards of an n-step window: their number is stored as an int32."""


def _require_bools(leaves: Mapping[Path, Field], rows: NDArray[np.uint8]) -> None:
    """Refuse packed rows with flags other than 0 and 1. Compiled code could take another byte for True or for False.

    Raises:
        FileFormatError: names the field.
    """
    layout, _ = row_layout(leaves)
    for path, array in layout.arrays(rows).items():
        if array.dtype == np.bool_ and array.view(np.uint8).max(initial=0) > 1:
            raise FileFormatError(f"field '{dotted(path)}' is bool and has bytes other than 0 and 1")


def _saved_view(content: Mapping[str, object], rows: int) -> View:
    """The saved view. One whose items are larger than the whole save is refused: a batch could take all memory.

    Raises:
        FileFormatError: names the view and the limit.
    """
    view: View = rebuild(content.get("view"), "view")
    parts = parts_of(view)
    reach = max(getattr(part, "rows", getattr(part, "depth", 1)) for part in parts)
    if reach > max(REACH, rows) or getattr(parts[-1], "n", 1) > STEPS:
        raise FileFormatError(
            f"the saved view {view!s:.200} spans more rows than the {rows} of the save; if you want that, pass "
            "load(..., view=...)"
        )
    return view


def require_sampler_state(state: Mapping[str, object], by_row: Iterable[str], ring: Ring) -> None:
    """Refuse values that none of relive's own samplers would save. Entries with unknown names are not checked.

    ``by_row`` names the arrays with an entry for each live row.

    Raises:
        FileFormatError: names the entry.
    """
    for name, value in state.items():
        known = name.rpartition("inner.")[2]
        if known in _STATE and not ((name in by_row) == (known == "errors") and _STATE[known](value, ring)):
            raise FileFormatError(f"the sampler's {shown(name)} is {shown(value)}, which it cannot be")


def _are_numbers(values: object, dtype: type[np.generic], least: float = -math.inf) -> TypeGuard[Array]:
    if not isinstance(values, np.ndarray):
        return False
    array = cast("Array", values)
    return array.ndim == 1 and array.dtype == dtype and bool((np.isfinite(array) & (array >= least)).all())


def _is_order(values: object, ring: Ring) -> bool:
    if not _are_numbers(values, np.int64, 0):
        return False
    sorted_values = np.sort(values)
    # an index is number * N + env
    issued = values // ring.num_envs < ring.heads[values % ring.num_envs]
    return bool(issued.all() and (sorted_values[1:] != sorted_values[:-1]).all())


_STATE: dict[str, Callable[[Any, Ring], bool]] = {
    "errors": lambda values, ring: _are_numbers(values, np.float32, 0),
    "largest": lambda value, ring: is_number(value, 0, LARGEST_ERROR),
    "draws": lambda value, ring: is_count(value) and value <= MOST,
    "order": _is_order,
    "next": lambda values, ring: _are_numbers(values, np.int64) and not (values < 0).any(),
    "served": lambda value, ring: is_count(value) and value <= MOST,
    "waiting": lambda value, ring: is_count(value) and value <= MOST,
    "came": lambda value, ring: is_count(value) and value <= MOST,
    "completed": lambda value, ring: is_count(value) and value <= MOST,
    "eta": lambda value, ring: is_number(value, 0, 1),
    "steepest": lambda values, ring: _are_numbers(values, np.float64, 0) and len(values) == 2,
    "returns": lambda values, ring: _are_numbers(values, np.float64) and len(values) <= 20,
}
"""The check of each entry of a sampler's saved state."""
