"""The columns of a rollout to a save and back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from .. import files as persist
from ..errors import FileFormatError
from ..files.entries import entry, fitting, whole
from ..parameters import is_names
from ..steps.trees import Path, dotted
from .columns import Columns

__all__ = ["restore_columns", "save_columns"]


def save_columns(
    path: str | os.PathLike[str], columns: Columns, facts: Mapping[str, Any], apart: Mapping[str, Tensor]
) -> None:
    """Write the rows of a rollout in the order of time, each column with its bootstrap row, to a directory.

    ``apart`` are further tensors, by names that no column has.
    """
    tensors = {dotted(name): columns.with_last(name) for name in columns.live} | dict(apart)
    attached = [list(name) for name in columns.live if name not in columns.own]
    persist.write(path, tensors, {**facts, "steps": columns.count, "attached": attached})


def restore_columns(columns: Columns, tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> None:
    """Put what :func:`save_columns` wrote into new columns of the same size.

    Raises:
        FileFormatError, ValueError, KeyError, RuntimeError: it does not fit.
    """
    steps = whole(content, "steps")
    if steps > columns.num_steps:
        raise FileFormatError(f"{steps} steps are saved of a rollout of {columns.num_steps}")
    attached = _names(entry(content, "attached", list), columns)
    front = steps + 1, columns.num_envs
    for name in columns.own:
        target = columns.view(name)
        column = fitting(tensors, dotted(name), (*front, *target.shape[2:]), target.dtype)
        target[: steps + 1] = column.to(target.device)
    columns.advance(steps)
    for name in attached:
        column = fitting(tensors, dotted(name), front)
        columns.attach({name: column[:steps].to(columns.device)})


def _names(names: list[Any], columns: Columns) -> list[Path]:
    """The names of attached columns; what is nested has no values of its own.

    Raises:
        FileFormatError: they are no names, or contradict each other or the columns that are there.
    """
    paths = list(columns.own)
    for name in names:
        path: Path = tuple(cast("list[str]", name)) if is_names(name) else ()
        if not all(path) or not path or any(path[: len(x)] == x or x[: len(path)] == path for x in paths):
            raise FileFormatError(f"an attached column is named {name!r:.80}; expected a name that no other has")
        paths.append(path)
    return paths[len(columns.own) :]
