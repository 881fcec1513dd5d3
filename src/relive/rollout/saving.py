"""How a rollout is saved and loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, cast

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
from ..steps.schema import Field, Path, Schema, dotted
from .columns import Columns, Fields
from .minibatches import Permutations
from .writer import Episodes, KeptStates, Writer

__all__ = ["KIND", "arguments", "read", "restore", "save"]


KIND = "relive.RolloutBuffer"


def save(
    path: str | os.PathLike[str],
    fields: Fields,
    columns: Columns,
    episodes: Episodes,
    states: KeptStates,
    writer: Writer,
    permutations: Permutations,
    extra: Any,
    background: bool,
) -> persist.SaveHandle:
    """Write a rollout to a directory: its rows in the order of time, each column with its bootstrap row.

    ``extra`` is the learner's state. In the ``background`` copies are written, once the caller starts the save.
    """
    described, learner = to_json(extra)
    facts = {
        "kind": KIND,
        "schema": json.loads(fields.schema.to_json()),
        "num_steps": columns.num_steps,
        "num_envs": columns.num_envs,
        "wrap": columns.wrap,
        "debug": writer.debug,
        "seed": permutations.seed,
        "draws": permutations.draws,
        "has_last": writer.has_last,
        "hidden_every": fields.every,
        "columns": json.loads(Schema(fields.further_by_name).to_json()) if fields.further else None,
        "interrupted": episodes.interrupted,
        "steps": columns.count,
        "attached": [list(name) for name in columns.live if name not in columns.own],
        "extra": described,
    }
    tensors = {dotted(name): columns.with_last(name) for name in columns.live}
    tensors[".ended"] = torch.from_numpy(episodes.ended)
    tensors |= states.tensors()
    require("save", FLAG_RULE, background=background)
    groups = [learner, tensors]
    if background:
        groups = list(map(persist.detached, groups))
        there = disk.usable(path).absolute()  # the process may change its directory meanwhile
        return persist.SaveHandle(path, lambda: persist.update(there, lambda _: persist.Change(groups, facts)))
    persist.update(path, lambda present: persist.Change(groups, facts))
    return persist.SaveHandle(path)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any], Any]:
    """The tensors and the facts of a rollout's save, and the learner's state in it.

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


def arguments(tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> dict[str, Any]:
    """What to create the buffer of a save with.

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
        "hidden_every": whole(content, "hidden_every"),
        "columns": _further(content),
        "seed": entry(content, "seed", int),
    }


def _further(content: Mapping[str, Any]) -> dict[str, Field] | None:
    """The further columns of a save; older saves have none."""
    saved = content.get("columns")
    if saved is None:
        return None
    return {name: field for (name,), field in Schema.from_json(json.dumps(saved)).leaves.items()}


def restore(
    tensors: Mapping[str, Tensor],
    content: Mapping[str, Any],
    columns: Columns,
    episodes: Episodes,
    states: KeptStates,
    writer: Writer,
    permutations: Permutations,
) -> None:
    """Put what :func:`save` wrote into a new rollout of the same size.

    Raises:
        FileFormatError, ValueError, KeyError, RuntimeError: it does not fit.
    """
    _restore_columns(columns, tensors, content)
    episodes.ended[:] = fitting(tensors, ".ended", episodes.ended.shape, torch.bool).numpy()
    episodes.interrupted = entry(content, "interrupted", bool)
    states.restore(tensors)
    permutations.draws, writer.has_last = whole(content, "draws"), entry(content, "has_last", bool)


def _restore_columns(columns: Columns, tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> None:
    steps = whole(content, "steps")
    if steps > columns.num_steps:
        raise FileFormatError(f"{steps} steps are saved of a rollout of {columns.num_steps}")
    attached = _names(entry(content, "attached", list), columns)
    front = steps + 1, columns.num_envs
    for name in columns.own:
        target = columns.view(name)
        column = fitting(tensors, dotted(name), (*front, *target.shape[2:]), target.dtype)
        target[: steps + 1] = column.to(target.device)
    columns.count = steps
    for name in attached:
        column = fitting(tensors, dotted(name), front)
        columns.attach({name: column[:steps].to(columns.device)})


def _names(names: list[Any], columns: Columns) -> list[Path]:
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
