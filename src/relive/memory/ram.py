"""The rows of a replay in RAM. The small fields of a step lie side by side, so a step is read as one run of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .. import core
from ..errors import DTypeError, ParameterError, ShapeError
from ..steps.arrays import Array, Ints, numpy_dtype, numpy_view
from ..steps.schema import FINITE, Field, Path, dotted
from .allocator import RAM, Allocator, Recycled
from .copier import BoundedCache, StepCopier
from .layout import BatchLayout, RowLayout, field_groups, row_layout, typed
from .store import Remainder, Staging, Store, Where, as_places, require_rows

ALWAYS_IN_RAM: tuple[Path, ...] = (("reward",), ("terminated",), ("truncated",))
"""The fields that stay in RAM, where n-step sums are planned and computed."""


STAGED: dict[str, tuple[str, ...]] = {"step": ("step",), "final": ("final",), "both": ("step", "final")}
"""Role -> the rows that are staged for it."""


class ReplayRows(Store):
    """The rows of a replay in RAM: packed small fields, a block for each large one, and the bookkeeping of the ring.

    Args:
        leaves: the fields of a step, including ``reward``, ``terminated`` and ``truncated``.
        num_rows: the number of rows.
        own_next: True if each row has a next observation of its own, even if that is stored elsewhere.
        allocator: gives the memory of the rows.
    """

    leaves: dict[Path, Field]
    num_rows: int
    allocator: Allocator
    layout: RowLayout
    large: tuple[Path, ...]
    gathered: tuple[Path, ...]
    groups: tuple[dict[Path, Field], ...]

    def __init__(
        self, leaves: Mapping[Path, Field], num_rows: int, *, own_next: bool = False, allocator: Allocator = RAM
    ) -> None:
        self.device: torch.device = torch.device("cpu")
        self.leaves, self.num_rows, self.allocator = dict(leaves), num_rows, allocator
        self.layout, large = row_layout(leaves)
        self.large = self.gathered = tuple(path for path in leaves if path in large)
        self.target: Array = allocator.take("rows", (num_rows, self.layout.nbytes), np.uint8)
        self.blocks: dict[Path, Array] = {
            path: allocator.take(
                f"block.{dotted(path)}", (num_rows, *leaves[path].shape), numpy_dtype(leaves[path].dtype)
            )
            for path in self.large
        }
        self._large_at = {role: _positions(staged_leaves(leaves, role), large) for role in ("step", "final")}
        """Role -> its large fields, and where each is among the values of that role."""
        self.arrays: dict[Path, Array] = self.layout.arrays(self.target)
        self._sources = {path: self._source_of(path, field) for path, field in self.leaves.items()}
        """Of each field: its rows as bytes, and what a NumPy array of it holds."""
        self.apart: Mapping[Path, Array] | None = {path: self._sources[path][0] for path in self.large}
        self._batches = Recycled()
        self._staged = BoundedCache[tuple[str, int], Staging]()
        self.groups = groups = field_groups(leaves, large)
        has_next_obs = own_next or any(path[0] == "next_obs" for path in leaves)
        self.batch: BatchLayout = BatchLayout(groups, self.layout, has_next_obs)
        self.packed: bool = not large

    @property
    def memory(self) -> list[Array | Tensor]:
        """The packed rows and the blocks."""
        return [self.target, *self.blocks.values()]

    def stage(self, role: str, count: int, values: Sequence[Array | Tensor]) -> tuple[Array, Remainder]:
        """Copy checked rows into staged memory; large fields stay as they are until :meth:`write`."""
        staging = self._staged.get((role, count)) or self.staging(role, count)
        staging.copier.write(0, values)
        return staging.rows, self._remainder(role, values) if self.large else []

    def stage_both(
        self, count: int, steps: Sequence[Array | Tensor], final: Sequence[Array | Tensor]
    ) -> tuple[tuple[Array, Remainder], tuple[Array, Remainder]]:
        """Copy steps and final observations in one call."""
        staging = self._staged.get(("both", count)) or self.staging("both", count)
        staging.copier.write(0, steps if len(steps) > len(self.leaves) else (*steps, *final))
        if not self.large:
            return (staging.rows, []), (staging.final, [])
        return (staging.rows, self._remainder("step", steps)), (staging.final, self._remainder("final", final))

    def _remainder(self, role: str, values: Sequence[Array | Tensor]) -> Remainder:
        """The values of large fields among those of a role."""
        return [(path, values[i]) for path, i in self._large_at[role]]

    def staging(self, role: str, count: int) -> Staging:
        """The staged memory for so many rows of a role, made once for each number of rows."""
        key = role, count
        return self._staged.get(key) or self._staged.keep(key, self._staging(role, count))

    def _staging(self, role: str, count: int) -> Staging:
        """New memory for so many rows of a role and, if it has both, of final observations; and what copies there."""
        some = {name: np.zeros((count, self.layout.nbytes), np.uint8) for name in STAGED[role]}
        leaves, targets, large = dict[Path, Field](), list[Array | None](), list[tuple[int, Array, bool]]()
        for name, rows in some.items():
            arrays, is_final = self.layout.arrays(rows), name == "final"
            for path in staged_leaves(self.leaves, name):
                if path in self.blocks:
                    large.append((len(leaves), self._sources[path][0], is_final))
                # beside a step, final observations have another name
                leaves[("next_obs", *path[1:]) if is_final and role == "both" else path] = self.leaves[path]
                targets.append(arrays[path][None] if path in arrays else None)  # one row of ``count`` items
        first, *_, last = *some.values(), *some.values()  # the same memory if the role has no final observations
        finite = [path for path in leaves if path[0] in FINITE]
        return Staging(first, last, StepCopier(leaves, targets, count, finite), large)

    def write(self, remainder: Remainder, places: Ints) -> None:
        """Copy large fields into their blocks."""
        for path, value in remainder:
            array, block = numpy_view(value.detach()) if type(value) is Tensor else value, self.blocks[path]
            # as bytes: a row moves whole, whatever its dtype
            rows = np.ascontiguousarray(array, block.dtype).reshape(len(places), -1).view(np.uint8)
            core.scatter_rows(rows, places, self._sources[path][0], rows.shape[1])

    def gather(self, paths: Iterable[Path], where: Where) -> dict[Path, Tensor]:
        """Copy fields out of the packed rows, or out of their blocks."""
        places = as_places(where)
        return {path: self._gather(path, places) for path in paths}

    def _gather(self, path: Path, where: Ints) -> Tensor:
        source, target, rows = self._batch_of(path, where)
        flat = where.reshape(-1)
        require_rows(flat, core.gather_rows(source, flat, rows, 0, rows.shape[1]), self.num_rows)
        return typed(target, self.leaves[path].dtype)

    def _batch_of(self, path: Path, where: Ints) -> tuple[Array, Array, Array]:
        """The rows of a field as bytes, an empty field of a batch, and its rows as bytes."""
        (source, dtype), shape = self._sources[path], self.leaves[path].shape
        width = source.shape[1]
        memory = self._batches.take(where.size * width)  # in use for as long as a tensor of the batch refers to it
        return source, memory.view(dtype).reshape(*where.shape, *shape), memory.reshape(where.size, width)

    def _source_of(self, path: Path, field: Field) -> tuple[Array, np.dtype]:
        block = self.blocks.get(path)
        if block is not None:
            return _bytes_of(block), block.dtype
        start = self.layout.offsets[path]
        return self.target[:, start : start + field.nbytes], numpy_dtype(field.dtype)

    def read(self, places: Ints, paths: Iterable[Path] | None = None) -> dict[Path, Tensor]:
        """Copy whole packed rows, and large fields out of their blocks."""
        places = as_places(places)
        rows, flat = np.empty((places.size, self.layout.nbytes), np.uint8), places.reshape(-1)
        bad = core.gather_rows(self.target, flat, rows, 0, self.layout.nbytes)
        require_rows(flat, bad, self.num_rows)
        packed = self.layout.arrays(rows.reshape(*places.shape, self.layout.nbytes))
        return {
            path: self._gather(path, places) if path in self.blocks else typed(packed[path], self.leaves[path].dtype)
            for path in (self.leaves if paths is None else paths)
        }

    def views(self) -> dict[Path, Tensor]:
        """Tensors over the packed rows and the blocks."""
        arrays = self.arrays | self.blocks
        return {path: typed(arrays[path], field.dtype) for path, field in self.leaves.items()}

    def dump(self, places: Ints) -> Array:
        """Packed rows; no copy if the places follow one another."""
        self.allocator.expect_scan()
        return self.target[_run(places)]

    def dump_large(self, path: Path, places: Ints) -> Tensor:
        """A large field of the rows; no copy if the places follow one another."""
        self.allocator.expect_scan()
        return typed(self.blocks[path][_run(places)], self.leaves[path].dtype)

    def restore(self, places: Ints, rows: Array, large: Mapping[Path, Tensor]) -> None:
        """Write packed rows and large fields back."""
        require_dump(self.leaves, len(places), rows, self.layout.nbytes, large)
        for here, there in _runs(places):  # `here` in the dump, `there` in memory
            self.target[there] = rows[here]
            for path, block in self.blocks.items():
                block[there] = numpy_view(large[path][here])


def _bytes_of(block: Array) -> Array:
    """A block as rows of bytes."""
    return block.reshape(len(block), -1).view(np.uint8)


def first_beyond(places: Ints, rows: int) -> int:
    """The index in flattened ``places`` of the first place beyond the last row, or -1."""
    return -1 if places.max(initial=-1) < rows else int((places.reshape(-1) >= rows).argmax())


def _run(places: Ints) -> slice | Ints:
    """Consecutive places as a slice, so that reading them copies nothing; other places unchanged."""
    follow = len(places) and places[-1] - places[0] == len(places) - 1 and (np.diff(places) == 1).all()
    return slice(int(places[0]), int(places[-1]) + 1) if follow else places


def _runs(places: Ints) -> Iterator[tuple[slice, slice | Ints]]:
    """The positions of parts of ``places``, and these places: runs of consecutive ones, if these are long.

    NumPy copies a run many times as fast as rows at places that it looks up one by one.
    """
    # run i begins at ends[i - 1], or at 0, and ends before ends[i]
    ends = np.append(np.flatnonzero(np.diff(places) != 1) + 1, len(places)) if len(places) else places
    if 16 * len(ends) > len(places):
        yield slice(len(places)), places
        return
    begin = 0
    for end in ends.tolist():
        first = int(places[begin])
        yield slice(begin, end), slice(first, first + end - begin)
        begin = end


def staged_leaves(leaves: Iterable[Path], role: str) -> list[Path]:
    """The fields of staged rows of a role, in order."""
    return [path for path in leaves if role == "step" or path[0] == "obs"]


def _positions(leaves: Sequence[Path], wanted: set[Path]) -> list[tuple[Path, int]]:
    """The wanted ones among some fields, and where each is among them."""
    return [(path, i) for i, path in enumerate(leaves) if path in wanted]


def require_dump(
    leaves: Mapping[Path, Field], count: int, rows: Array, width: int, large: Mapping[Path, Tensor]
) -> None:
    """Require rows as :meth:`Store.dump` and :meth:`Store.dump_large` give them.

    Raises:
        ValueError: the rows or a large field have another shape or dtype.
    """
    if rows.shape != (count, width) or rows.dtype != np.uint8:
        raise ValueError(f"rows: expected uint8 {(count, width)}, got {rows.dtype} {rows.shape}")
    for path, block in large.items():
        shape, dtype = (count, *leaves[path].shape), leaves[path].dtype
        if tuple(block.shape) != shape or block.dtype is not dtype:
            raise ValueError(f"{dotted(path)}: expected {dtype} {shape}, got {block.dtype} {tuple(block.shape)}")


class UserStore(Protocol):
    """Keeps the fields of rows somewhere. Any object with these two methods is one.

    A field is named by its path, such as ``("obs",)`` or ``("obs", "camera")``. Rows are counted from 0. Rewards, flags
    and bookkeeping stay with the replay, in RAM, and are never asked for here.
    """

    def write(self, path: Path, rows: Ints, values: Array) -> None:
        """Store one field of some rows.

        Args:
            path: the field.
            rows: int64 ``[K]``, each at most once.
            values: ``[K, *shape]`` of the field's dtype. Copy them: the memory may be the caller's.
        """
        ...

    def read(self, path: Path, rows: Ints) -> Array:
        """One field of ``rows`` (int64 ``[K]``, any number of times each), copied: ``[K, *shape]`` of its dtype.

        A row that was never written may hold anything.
        """
        ...


MakeStore = Callable[[Mapping[Path, Field], int], UserStore]
"""Makes a user's store for a number of rows, given the fields to keep: path -> shape and dtype."""


class HostedRows(Store):
    """Rows of which rewards, flags and bookkeeping are in RAM, 32 bytes a row, and all other fields elsewhere.

    In RAM the ring's kernels draw and plan batches.

    Args:
        leaves: the fields of a step, including ``reward``, ``terminated`` and ``truncated``.
        num_rows: the number of rows.
        device: where batches are.
    """

    device: torch.device
    leaves: dict[Path, Field]
    num_rows: int
    layout: RowLayout
    groups: tuple[dict[Path, Field], ...]
    batch: BatchLayout
    target: Array
    arrays: dict[Path, Array]

    def __init__(self, leaves: Mapping[Path, Field], num_rows: int, device: torch.device) -> None:
        self.device, self.leaves, self.num_rows = device, dict(leaves), num_rows
        self._saved, large = row_layout(leaves)
        self.large: tuple[Path, ...] = tuple(path for path in leaves if path in large)
        self._own_next = any(path[0] == "next_obs" for path in leaves)
        self._host = ReplayRows(in_ram(leaves), num_rows, own_next=self._own_next)
        self.layout, self.groups, self.batch = self._host.layout, self._host.groups, self._host.batch
        self.target, self.arrays = self._host.target, self._host.arrays

    def _restore_hosted(self, places: Ints, rows: Array, large: Mapping[Path, Tensor]) -> dict[Path, Array]:
        """Write the fields in RAM back, as :meth:`restore`; returns all fields that were saved."""
        require_dump(self.leaves, len(places), rows, self._saved.nbytes, large)
        arrays = self._saved.arrays(rows) | {path: numpy_view(block) for path, block in large.items()}
        for path, array in self.arrays.items():
            array[places] = arrays[path]
        return arrays


# A user's store has two methods, and never sees rewards, flags or negative rows: those stay in RAM, for the core. To
# subclass Store would make every rule about staging and planning public. The price is one read a field instead of one a
# row, which does not matter for a store that is slower than RAM.
class UserRows(HostedRows):
    """The rows of a replay in a user's store. All fields that are there are read into RAM, one by one.

    Args:
        leaves: the fields of a step.
        num_rows: the number of rows.
        user_store: where they are, but for rewards and flags.
    """

    gathered: tuple[Path, ...]

    read_aside = False  # a user's store need not bear two threads

    def __init__(self, leaves: Mapping[Path, Field], num_rows: int, user_store: UserStore) -> None:
        super().__init__(leaves, num_rows, torch.device("cpu"))
        self._user_store, self.gathered = user_store, tuple(away(leaves))

    def stage(self, role: str, count: int, values: Sequence[Array | Tensor]) -> tuple[Array, Remainder]:
        """Stage rewards and flags in RAM; all other fields go to the user's store as they are."""
        given = dict(zip(staged_leaves(self.leaves, role), values, strict=True))
        near = [given.pop(path) for path in ALWAYS_IN_RAM] if role == "step" else []
        rows, _ = self._host.stage(role, count, near)
        return rows, list(given.items())

    def write(self, remainder: Remainder, places: Ints) -> None:
        """Give the user's store the fields of rows whose place is not negative."""
        real = places >= 0
        rows = places[real]
        for path, value in remainder if len(rows) else ():
            array = numpy_view(value.detach()) if isinstance(value, Tensor) else value
            self._user_store.write(path, rows, np.asarray(array, numpy_dtype(self.leaves[path].dtype))[real])

    def gather(self, paths: Iterable[Path], where: Where) -> dict[Path, Tensor]:
        """Rewards and flags from RAM, all other fields from the user's store, one by one."""
        places, wanted = as_places(where), list(paths)
        require_rows(places.reshape(-1), first_beyond(places, self.num_rows), self.num_rows)
        near = self._host.read(places, [path for path in wanted if path in ALWAYS_IN_RAM])
        return {path: near[path] if path in near else self._get(path, places) for path in wanted}

    def _get(self, path: Path, places: Ints) -> Tensor:
        """One field of rows ``[...]`` of the user's store; zeros where a place is negative.

        Raises:
            ShapeError, DTypeError: the user's store gave something else.
        """
        field, rows = self.leaves[path], places.reshape(-1)
        shape, dtype = (len(rows), *field.shape), numpy_dtype(field.dtype)
        # negative places read row 0, and are blanked below
        found = np.asarray(self._user_store.read(path, np.maximum(rows, 0)))
        whose = f"field '{dotted(path)}': the store's read gave"
        if found.shape != shape:
            raise ShapeError(f"{whose} shape {found.shape} for {len(rows)} rows; return {shape}, [K, *shape]")
        if found.dtype != dtype:
            raise DTypeError(f"{whose} {found.dtype}; return {dtype}, as it was written")
        if not (found.flags.writeable and found.flags.c_contiguous):
            found = found.copy()
        found[rows < 0] = 0
        return typed(found.reshape(*places.shape, *field.shape), field.dtype)

    def restore(self, places: Ints, rows: Array, large: Mapping[Path, Tensor]) -> None:
        """Write rewards, flags and bookkeeping back into RAM, and give the user's store the rest."""
        arrays = self._restore_hosted(places, rows, large)
        for path in self.gathered:
            self._user_store.write(path, places, arrays[path] if path in large else arrays[path].copy())


def in_ram(leaves: Mapping[Path, Field]) -> dict[Path, Field]:
    """The fields that a replay over a user's store keeps in RAM."""
    return {path: leaves[path] for path in ALWAYS_IN_RAM}


def away(leaves: Mapping[Path, Field]) -> dict[Path, Field]:
    """The fields that a user's store keeps."""
    return {path: field for path, field in leaves.items() if path not in ALWAYS_IN_RAM}


def user_rows(make: MakeStore, leaves: Mapping[Path, Field], num_rows: int, device: torch.device) -> UserRows:
    """The rows of a replay in the user's store that ``make`` gives for them.

    Raises:
        ParameterError: ``make`` gives no such store, or the replay is not in RAM.
    """
    if device.type != "cpu":
        raise ParameterError(f"store: batches of a store of your own are in RAM, got device={device}; leave device out")
    user_store = make(away(leaves), num_rows) if callable(make) else make
    if not all(callable(getattr(user_store, name, None)) for name in ("write", "read")) or isinstance(user_store, type):
        raise ParameterError(
            f"store: expected a function or class that makes an object with write and read, given the fields and the "
            f"number of rows; got {user_store!r:.80}"
        )
    return UserRows(leaves, num_rows, user_store)
