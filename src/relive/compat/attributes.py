"""Attributes under a host's names: columns of the storage, and settings of relive's parts."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from .errors import StepShapeError

__all__ = ["Column", "alias", "write_column"]


class Column:
    """An attribute that shows one column of a buffer. Assigning to it writes into the column.

    The buffer returns its columns from ``column(name)`` in the host's shapes: an array, a tensor, or a dictionary of
    these. They share the storage's memory, so a column can also be written in place.

    Args:
        name: relive's name of the column.

    Raises:
        StepShapeError: from an assignment to a tensor, if the shapes differ. An array broadcasts, as NumPy does.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __set_name__(self, owner: type, attribute: str) -> None:
        self.attribute = attribute

    def __get__(self, buffer: Any, owner: type | None = None) -> Any:
        return self if buffer is None else buffer.column(self.name)

    def __set__(self, buffer: Any, values: Any) -> None:
        write_column(self.attribute, buffer.column(self.name), values)


def write_column(name: str, column: Any, values: Any) -> None:
    """Copy values into a column: an array, a tensor, or a dictionary of these.

    Args:
        name: what the host calls the column, for the error.
        column: the memory to write to.
        values: for a tensor, of the same shape. For an array, whatever broadcasts to it.

    Raises:
        StepShapeError: a tensor's shape differs.
    """
    if isinstance(column, np.ndarray):
        column[...] = values
    elif isinstance(column, Mapping):
        for key, member in cast("Mapping[str, Any]", column).items():
            write_column(f"{name}[{key!r}]", member, values[key])
    else:
        given: Tensor = torch.as_tensor(values)
        if given.shape != column.shape:
            raise StepShapeError(
                f"{name}: expected {tuple(column.shape)}, got {tuple(given.shape)}; assign a whole column, or write to "
                "a part of it in place"
            )
        column.copy_(given.detach())


def alias(path: str, doc: str) -> Any:
    """A property that reads and sets an attribute of a part, such as ``alias("_view.gamma", "Discount per step.")``.

    Args:
        path: the attribute that holds the part, a dot, and the part's attribute.
        doc: the property's docstring.
    """
    read, (part, _, name) = attrgetter(path), path.rpartition(".")
    part_of = attrgetter(part)

    def write(self: Any, value: Any) -> None:
        setattr(part_of(self), name, value)

    return property(read, write, doc=doc)
