"""The layout of a LeRobotDataset v3: the names of its files and features, and how arrays lie in its tables.

Source: ``src/lerobot/datasets`` of LeRobot 0.4.4, ``codebase_version`` v3.0.
"""

from __future__ import annotations

from importlib import import_module
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np

from ...errors import FileFormatError
from ...steps.arrays import Array

__all__ = [
    "DATA", "DEFAULTS", "EPISODES", "FINAL", "INFO", "NUMBERS", "STATS", "TASKS", "VERSION", "Feature", "arrow",
    "column_of", "dense", "widths",
]  # fmt: skip

VERSION = "v3.0"
INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
EPISODES, DATA = "meta/episodes", "data"

DEFAULTS = {"timestamp": "float32", "frame_index": "int64", "episode_index": "int64", "index": "int64",
            "task_index": "int64"}  # fmt: skip
"""The columns that every data set has, with their dtypes."""

FINAL = "final/"
"""The prefix of the columns with an episode's final observation, in the table of episodes. LeRobot ignores them."""

NUMBERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
           "float64")  # fmt: skip
"""The dtypes of features that are numbers. Others are "image", "video", "string" and "language"."""


class Feature(NamedTuple):
    """One column of frames.

    Args:
        name: the name of the column.
        dtype: the dtype of its numbers.
        shape: the shape of a frame's numbers; a single number has (1,).
        path: where the column belongs in a step; a whole number is a place in a tuple.
        own_shape: the shape in a step; () for a single number without an axis.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    path: tuple[str | int, ...]
    own_shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Numbers in a frame."""
        return prod(self.shape)

    def note(self) -> dict[str, Any]:
        """The entry of ``info.json``. LeRobot keeps ``info``, and does not read what relive puts there."""
        ours = {"relive.path": list(self.path), "relive.shape": list(self.own_shape)}
        return {"dtype": self.dtype.name, "shape": list(self.shape), "names": None, "info": ours}


def arrow() -> Any:
    """The package pyarrow, with ``parquet``.

    Raises:
        ModuleNotFoundError: pyarrow is not installed.
    """
    try:
        import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "LeRobot data sets need pyarrow: pip install 'relive[lerobot]'", name=error.name
        ) from error
    return import_module("pyarrow")


def column_of(array: Array, shape: tuple[int, ...]) -> Any:
    """Frames ``[k, *shape]`` as a column: numbers, lists of one length, or lists of lists."""
    pa = arrow()
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    if shape == (1,):
        return flat
    if len(shape) == 1:
        return pa.FixedSizeListArray.from_arrays(flat, shape[0])
    for size in reversed(shape):
        flat = pa.ListArray.from_arrays(pa.array(np.arange(0, len(flat) + 1, size, dtype=np.int32)), flat)
    return flat


def widths(kind: Any, feature: Feature, where: str) -> tuple[int, int]:
    """The bytes in memory of a number of a column of this type, and of the offsets of the lists in a row.

    Raises:
        FileFormatError: the column does not hold numbers in as many lists as the feature has axes.
    """
    types: Any = arrow().types
    inner, lists, offsets = getattr(kind, "storage_type", kind), 1, 0
    for size in () if feature.shape == (1,) and not _is_list(inner) else feature.shape:
        if not _is_list(inner):
            raise _wrong(feature, where, f"{inner} where a list is due")
        offsets += 0 if types.is_fixed_size_list(inner) else 8 * lists
        inner, lists = inner.value_type, lists * size
    if not _is_number(inner):
        raise _wrong(feature, where, str(kind))
    return max(feature.dtype.itemsize, inner.bit_width // 8), offsets


def dense(column: Any, feature: Feature, where: str) -> Array:
    """A column as frames ``[k, *shape]``.

    Raises:
        FileFormatError: a value is missing, a list has another length than the shape says, or the dtype is wrong.
    """
    parts = [_dense(chunk, feature, where) for chunk in getattr(column, "chunks", [column])]
    return np.concatenate([np.empty((0, *feature.shape), feature.dtype), *parts])


def _dense(chunk: Any, feature: Feature, where: str) -> Array:
    """One chunk of a column; see :func:`dense`."""
    rows, values = len(chunk), getattr(chunk, "storage", chunk)
    for size in () if feature.shape == (1,) and not _is_list(values.type) else feature.shape:
        if not _is_list(values.type):
            raise _wrong(feature, where, f"{values.type} where a list is due")
        if values.null_count or not _all_of(values, size):
            raise _wrong(feature, where, "lists of other lengths")
        values = values.flatten()
    number = _is_number(values.type)
    if values.null_count or not number:
        raise _wrong(feature, where, "missing values" if number else str(values.type))
    found: Array = values.to_numpy(zero_copy_only=False)
    if found.size != rows * feature.size or not np.can_cast(found.dtype, feature.dtype, "same_kind"):
        raise _wrong(feature, where, f"{found.size} numbers of {found.dtype} in {rows} frames")
    return found.astype(feature.dtype, copy=False).reshape(rows, *feature.shape)


def _is_list(kind: Any) -> bool:
    """Whether this is the type of lists of any kind."""
    types: Any = arrow().types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _is_number(kind: Any) -> bool:
    """Whether this is the type of whole numbers, floats or bools."""
    types: Any = arrow().types
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def _all_of(values: Any, size: int) -> bool:
    """Whether all lists have ``size`` members."""
    if arrow().types.is_fixed_size_list(values.type):
        return values.type.list_size == size
    lengths = np.diff(cast("Array", values.offsets.to_numpy(zero_copy_only=False)))
    return bool((lengths == size).all())


def _wrong(feature: Feature, where: str, got: str) -> FileFormatError:
    """The error for a column that differs from its feature."""
    return FileFormatError(
        f"'{where}', column '{feature.name}': expected {feature.dtype} {feature.shape} in every frame, as {INFO} says, "
        f"got {got}; use another copy"
    )
