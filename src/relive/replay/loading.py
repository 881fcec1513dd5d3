"""Loading a replay: the saved arguments of its constructor, and how the caller of ``load`` changes them."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from .. import files
from ..errors import FileFormatError
from ..files.entries import entry, integers, whole
from ..memory.estimate import storage_plan
from ..memory.home import in_ram
from ..printable import shown
from ..steps.changes import Origin, SchemaChanges
from ..steps.schema import Schema
from ..steps.trees import Path
from .fields import stored_fields
from .parts import rebuild
from .saving import KIND
from .sources import Source
from .validate import require_reach

__all__ = ["changed_arguments", "open_save", "saved_arguments"]


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


def saved_arguments(source: Source, device: Any, sampler: Any, view: Any) -> dict[str, Any]:
    """The constructor's arguments for a replay with this state; ``sampler`` and ``view`` where they are not None.

    Raises:
        FileFormatError, ParameterError, SchemaError, KeyError: the state makes no sense.
    """
    content = source.content
    rows, num_envs = whole(content, "rows_per_env"), whole(content, "num_envs")
    integers(content, "state", num_envs, 4)  # before any memory is taken for as many envs
    if num_envs < 1 or rows < 2:
        raise FileFormatError(f"the save has {num_envs} envs of {rows} rows; expected at least 1 env and 2 rows")
    schema = Schema.from_json(json.dumps(content.get("schema")))
    stored_fields(schema, False)
    if view is None:
        view = rebuild(content.get("view"), "view")
        require_reach(view, source.row_count)
    return {
        "schema": schema,
        "device": device,
        "capacity": rows * num_envs,
        "num_envs": num_envs,
        "sampler": sampler if sampler is not None else rebuild(content.get("sampler"), "sampler"),
        "view": view,
        "ordered": entry(content, "ordered", bool),
        "own_next_obs": entry({"own_next_obs": False, **content}, "own_next_obs", bool),
        "check_ends": entry({"check_ends": True, **content}, "check_ends", bool),
        "debug": entry({"debug": False, **content}, "debug", bool),
        "seed": entry(content, "seed", int),
    }


def changed_arguments(
    arguments: dict[str, Any], capacity: int | None, changes: SchemaChanges | None
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
        leaves, kept = stored_fields(arguments["schema"], own).leaves, arguments["sampler"].nbytes
        device = torch.device(arguments["device"])
        leaves = in_ram(leaves) if "store" in arguments else leaves
        storage_plan(leaves, num_envs, capacity, None, device, kept).require_memory()
        arguments["capacity"] = capacity
    return origins
