"""Saving: how a rollout is written to a directory, and read back."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .. import files as persist
from ..errors import FileFormatError
from ..files import disk
from ..files.disk import entry, fitting, whole
from ..files.save import EXTRA, read_extra, to_json
from ..memory.estimate import free_memory
from ..parameters import FLAG_RULE, is_names, require
from ..printable import shown
from ..steps.arrays import Bools
from ..steps.schema import Field, Path, Schema, dotted
from .columns import Columns

KIND = "relive.RolloutBuffer"


class RolloutState(NamedTuple):
    """The state of a rollout besides its columns."""

    debug: bool
    """True if numbers that are not finite are refused."""
    seed: int
    """Of the permutations."""
    draws: int
    """How many permutations were drawn."""
    has_last: bool
    """True if the value of the bootstrap row is written."""
    interrupted: bool
    """True if the episodes of the newest row were broken off."""
    ended: Bools
    """True where the episode before the first row had ended, ``[N]``."""


def save(
    path: str | os.PathLike[str], columns: Columns, progress: RolloutState, *, extra: object, background: bool
) -> persist.SaveHandle:
    """Write a rollout to a directory: its rows in the order of time, each column with its bootstrap row.

    ``extra`` is the learner's state. In the ``background`` copies are written, once the caller starts the save.
    """
    described, learner = to_json(extra)
    further = {name: field for (name,), field in columns.further.items()}
    content = {
        "kind": KIND,
        "schema": json.loads(columns.schema.to_json()),
        "num_steps": columns.num_steps,
        "num_envs": columns.num_envs,
        "wrap": columns.wrap,
        "debug": progress.debug,
        "seed": progress.seed,
        "draws": progress.draws,
        "has_last": progress.has_last,
        "columns": json.loads(Schema(further).to_json()) if further else None,
        "interrupted": progress.interrupted,
        "steps": columns.count,
        "attached": [list(name) for name in columns.present if name not in columns.own],
        "extra": described,
    }
    tensors = {dotted(name): columns.with_last(name) for name in columns.present}
    tensors[".ended"] = torch.from_numpy(progress.ended)
    require("save", FLAG_RULE, background=background)
    groups = [learner, tensors]
    if background:
        groups = list(map(persist.detached, groups))
        target = disk.target(path).absolute()  # the process may change its directory meanwhile
        return persist.SaveHandle(path, lambda: persist.update(target, lambda _: persist.NewSave(groups, content)))
    persist.update(path, lambda present: persist.NewSave(groups, content))
    return persist.SaveHandle(path)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], Mapping[str, object], Any]:
    """The tensors and the content of a rollout's save, and the learner's state in it.

    Raises:
        FileFormatError: there is no save, or it is damaged, or of something else.
    """
    with persist.Save(path) as opened:
        content = opened.content
        if content.get("kind") != KIND:
            raise FileFormatError(f"'{path}' is a save of {shown(content.get('kind'))}, not of a {KIND}")
        names = [name for name in opened.specs if not name.startswith(EXTRA)]
        tensors = opened.read(names=names, most=free_memory())
        return {name: tensors[name] for name in names}, content, read_extra(opened, free_memory())


def arguments(tensors: Mapping[str, Tensor], content: Mapping[str, object]) -> dict[str, Any]:
    """The arguments to create the buffer of a save with.

    Raises:
        FileFormatError, ValueError, KeyError: the save contradicts itself.
    """
    num_envs = whole(content, "num_envs")
    fitting(tensors, ".ended", (num_envs,), torch.bool)  # before memory is taken for as many
    return {
        "schema": Schema.from_json(json.dumps(content.get("schema"))),
        "num_steps": whole(content, "num_steps"),
        "num_envs": num_envs,
        "wrap": entry(content, "wrap", bool),
        "debug": entry(content, "debug", bool),
        "columns": _further(content),
        "seed": entry(content, "seed", int),
    }


def _further(content: Mapping[str, object]) -> dict[str, Field] | None:
    """The further columns of a save; older saves have none."""
    saved = content.get("columns")
    if saved is None:
        return None
    return {name: field for (name,), field in Schema.from_json(json.dumps(saved)).leaves.items()}


def restore(columns: Columns, tensors: Mapping[str, Tensor], content: Mapping[str, object]) -> RolloutState:
    """Put what :func:`save` wrote into new columns of the same size; returns the other state.

    Raises:
        FileFormatError, ValueError, KeyError, RuntimeError: it does not fit.
    """
    _restore_columns(columns, tensors, content)
    return RolloutState(
        debug=entry(content, "debug", bool),
        seed=entry(content, "seed", int),
        draws=whole(content, "draws"),
        has_last=entry(content, "has_last", bool),
        interrupted=entry(content, "interrupted", bool),
        ended=fitting(tensors, ".ended", (columns.num_envs,), torch.bool).numpy().copy(),
    )


def _restore_columns(columns: Columns, tensors: Mapping[str, Tensor], content: Mapping[str, object]) -> None:
    steps = whole(content, "steps")
    if steps > columns.num_steps:
        raise FileFormatError(f"{steps} steps are saved of a rollout of {columns.num_steps}")
    attached = _names(entry(content, "attached", list), columns)
    front, every = (steps + 1, columns.num_envs), _hidden_every(content)
    for name in columns.own:
        target = columns.view(name)
        if every > 1 and name[0] == "hidden":
            _restore_states(target, steps, every, tensors, name)
            continue
        column = fitting(tensors, dotted(name), (*front, *target.shape[2:]), target.dtype)
        target[: steps + 1] = column.to(target.device)  # the bootstrap row lies right after the newest
    columns.count = steps
    for name in attached:
        column = fitting(tensors, dotted(name), front)
        columns.attach({name: column[:steps].to(columns.device)})


def _hidden_every(content: Mapping[str, object]) -> int:
    """k of an older save, which may hold the recurrent states of steps 0, k, 2k, ... alone."""
    every = whole(content, "hidden_every") if "hidden_every" in content else 1
    if every < 1:
        raise FileFormatError(f"'hidden_every' is {every}; expected at least 1")
    return every


def _restore_states(target: Tensor, steps: int, every: int, tensors: Mapping[str, Tensor], name: Path) -> None:
    """Put the recurrent states of steps 0, k, 2k, ... back. The others are NaN: nobody knows them."""
    (rows, *shape), kept = target.shape, steps // every + 1
    saved = fitting(tensors, f".states.{dotted(name)}", (-(-(rows - 1) // every) + 1, *shape), target.dtype)
    if target.dtype.is_floating_point:
        target[: steps + 1] = math.nan
    target[: steps + 1 : every] = saved[:kept].to(target.device)


def _names(names: list[object], columns: Columns) -> list[Path]:
    """The paths of attached columns; a nested field has no values besides those of its members.

    Raises:
        FileFormatError: an entry is not a path, or clashes with another one or with an own column.
    """
    paths = list(columns.own)
    for name in names:
        path: Path = tuple(cast("list[str]", name)) if is_names(name) else ()
        if not all(path) or not path or any(path[: len(x)] == x or x[: len(path)] == path for x in paths):
            raise FileFormatError(f"an attached column is named {shown(name)}; expected a name that no other has")
        paths.append(path)
    return paths[len(columns.own) :]
