"""Columns as a pandas DataFrame: one row a step."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np

from ..steps.arrays import Array
from ..steps.trees import Path, dotted

__all__ = ["as_dataframe"]


WIDE = 64
"""A field of more numbers than this is one column of arrays, rather than a column for each number."""


def as_dataframe(columns: Mapping[Path, Array]) -> Any:
    """Columns ``[S, ...]`` by path as a ``pandas.DataFrame`` of S rows.

    A field of numbers is a column with its path, joined by dots. One of several numbers, up to 64, is a column for each
    of them: ``obs.0``, ``obs.1``, and ``image.2.5`` if there are more axes. A larger one is a column of arrays.

    Raises:
        ModuleNotFoundError: pandas is not installed.
    """
    try:
        pandas: Any = import_module("pandas")  # takes half a second, and has no types of its own
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("to_pandas needs pandas: pip install 'relive[pandas]'", name=error.name) from error
    table: dict[str, Any] = {}
    for path, column in columns.items():
        name, shape = dotted(path), column.shape[1:]
        if not shape:
            table[name] = column
        elif np.prod(shape) <= WIDE:
            table |= {".".join([name, *map(str, at)]): column[:, *at] for at in np.ndindex(shape)}
        else:
            table[name] = list(column)
    return pandas.DataFrame(table)
