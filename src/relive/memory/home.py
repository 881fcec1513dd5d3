"""Home: what a user's own storage of rows does for a replay, and how a replay keeps its rows there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import DTypeError, ParameterError, ShapeError
from ..steps.arrays import Array, Ints, numpy_dtype, numpy_view
from ..steps.schema import Field
from ..steps.trees import Path, dotted
from .layout import row_layout, typed
from .ram import HOSTED, ReplayRows, first_beyond, require_dump, staged_leaves
from .store import Apart, Store, Where, as_places, require_rows

__all__ = ["Home", "HomeRows", "MakeHome", "in_ram", "made_home"]


class Home(Protocol):
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


MakeHome = Callable[[Mapping[Path, Field], int], Home]
"""Makes a home for a number of rows, given the fields to keep: path -> shape and dtype."""


class HomeRows(Store):
    """The rows of a replay in a home; rewards, flags and bookkeeping are in RAM, 32 bytes a row.

    There the ring's kernels draw and plan batches. All other fields are read from the home, one by one, into RAM.

    Args:
        leaves: the fields of a step, including ``reward``, ``terminated`` and ``truncated``.
        num_rows: the number of rows.
        home: where the others are.
    """

    read_aside = False  # nobody has asked of a home that threads may share it

    def __init__(self, leaves: Mapping[Path, Field], num_rows: int, home: Home) -> None:
        self.device, self.leaves, self.num_rows, self._home = torch.device("cpu"), dict(leaves), num_rows, home
        self._saved, large = row_layout(leaves)
        self.large = tuple(path for path in leaves if path in large)
        self.apart = tuple(away(leaves))
        alone = any(path[0] == "next_obs" for path in leaves)
        self._near = ReplayRows(in_ram(leaves), num_rows, alone=alone)
        self.layout, self.groups, self.batch = self._near.layout, self._near.groups, self._near.batch
        self.target, self.arrays = self._near.target, self._near.arrays

    def stage(self, role: str, count: int, values: Sequence[Any]) -> tuple[Array, Apart]:
        """See :class:`relive.memory.store.Store`."""
        given = dict(zip(staged_leaves(self.leaves, role), values, strict=True))
        near = [given.pop(path) for path in HOSTED] if role == "step" else []
        rows, _ = self._near.stage(role, count, near)
        return rows, list(given.items())

    def write(self, apart: Apart, places: Ints) -> None:
        """See :class:`relive.memory.store.Store`."""
        kept = places >= 0
        rows = places[kept]
        for path, value in apart if len(rows) else ():
            array = numpy_view(value.detach()) if isinstance(value, Tensor) else value
            self._home.write(path, rows, np.asarray(array, numpy_dtype(self.leaves[path].dtype))[kept])

    def gather(self, paths: Iterable[Path], where: Where) -> dict[Path, Tensor]:
        """See :class:`relive.memory.store.Store`."""
        places, wanted = as_places(where), list(paths)
        require_rows(places.reshape(-1), first_beyond(places, self.num_rows), self.num_rows)
        near = self._near.read(places, [path for path in wanted if path in HOSTED])
        return {path: near[path] if path in near else self._get(path, places) for path in wanted}

    def _get(self, path: Path, places: Ints) -> Tensor:
        """One field of rows ``[...]`` of the home; zeros where a place is negative.

        Raises:
            ShapeError, DTypeError: the home gave something else.
        """
        field, rows = self.leaves[path], places.reshape(-1)
        shape, dtype = (len(rows), *field.shape), numpy_dtype(field.dtype)
        found = np.asarray(self._home.read(path, np.maximum(rows, 0)))
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
        """See :class:`relive.memory.store.Store`."""
        require_dump(self.leaves, len(places), rows, self._saved.nbytes, large)
        arrays = self._saved.arrays(rows)
        for path, array in self.arrays.items():
            array[places] = arrays[path]
        for path in self.apart:
            self._home.write(path, places, numpy_view(large[path]) if path in large else arrays[path].copy())


def in_ram(leaves: Mapping[Path, Field]) -> dict[Path, Field]:
    """The fields that a replay over a home keeps in RAM."""
    return {path: leaves[path] for path in HOSTED}


def away(leaves: Mapping[Path, Field]) -> dict[Path, Field]:
    """The fields that a home keeps."""
    return {path: field for path, field in leaves.items() if path not in HOSTED}


def made_home(make: MakeHome, leaves: Mapping[Path, Field], num_rows: int, device: torch.device) -> HomeRows:
    """The rows of a replay in the home that ``make`` gives for them.

    Raises:
        ParameterError: ``make`` gives no home, or the replay is not in RAM.
    """
    if device.type != "cpu":
        raise ParameterError(f"store: batches of a store of your own are in RAM, got device={device}; leave device out")
    home = make(away(leaves), num_rows) if callable(make) else make
    if not all(callable(getattr(home, name, None)) for name in ("write", "read")) or isinstance(home, type):
        raise ParameterError(
            f"store: expected a function or class that makes an object with write and read, given the fields and the "
            f"number of rows; got {home!r:.80}"
        )
    return HomeRows(leaves, num_rows, home)
