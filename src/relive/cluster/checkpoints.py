"""Checkpoints: all of a replay but its shards, in one save that is replaced as a whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .. import files
from ..errors import FileFormatError
from ..files.disk import usable
from ..files.entries import entry, integers
from ..printable import shown
from ..replay.parts import describe, rebuild
from ..steps.schema import Schema
from .division import Division
from .homes import SavedShard, slot

__all__ = ["Checkpoint", "manifest_of", "read_checkpoint", "saved_shards", "write_checkpoint"]


KIND = "relive.cluster.Replay"


class Checkpoint(NamedTuple):
    """The state of the learner's side."""

    schema: Schema
    capacity: int
    num_envs: int
    shards: int
    ordered: bool
    own_next_obs: bool
    seed: int
    draws: int
    """Batches drawn."""
    sampled: int
    """Rows drawn."""
    cut: int
    """The number of the shards' commits that belong to it."""
    sampler: Any
    view: Any
    counted: tuple[int, int] | None = None
    """Steps and rows that its limit of samples per insert has counted; None without one."""


def manifest_of(path: str | os.PathLike[str]) -> Path:
    """The directory of the learner's side of a checkpoint."""
    return usable(path) / "replay"


def write_checkpoint(path: str | os.PathLike[str], state: Checkpoint, extra: tuple[Any, Mapping[str, Any]]) -> None:
    """Replace the checkpoint. The shards' commits of its number are on the disk already. Until this is done, the old
    checkpoint counts.

    Args:
        path: the directory.
        state: the learner's side.
        extra: what the user added, as :func:`relive.files.nested.to_json` gives it.

    Raises:
        OSError: the disk is full, or fails.
    """
    described, tensors = extra
    content = {
        "kind": KIND,
        "schema": json.loads(state.schema.to_json()),
        "sizes": [state.capacity, state.num_envs, state.shards],
        "ordered": state.ordered,
        "own_next_obs": state.own_next_obs,
        "seed": state.seed,
        "counts": [state.draws, state.sampled, state.cut],
        "sampler": describe(state.sampler),
        "view": describe(state.view),
        "extra": described,
        "limit": None if state.counted is None else list(state.counted),
    }
    files.write(manifest_of(path), tensors, content)


def read_checkpoint(path: str | os.PathLike[str], sampler: Any, view: Any) -> Checkpoint:
    """The checkpoint in a directory, with this sampler and view where they are not None.

    Raises:
        FileFormatError: there is no checkpoint, or it is damaged or foreign; or its sampler or view was the user's own
            and is not given.
    """
    with files.Save(manifest_of(path)) as save:
        content = save.content
    if content.get("kind") != KIND:
        raise FileFormatError(f"'{path}' is a save of {shown(content.get('kind'))}, not of a {KIND}")
    capacity, num_envs, shards = integers(content, "sizes", 3).tolist()
    draws, sampled, cut = integers(content, "counts", 3).tolist()
    counted: Any = None
    if content.get("limit") is not None:  # saves of earlier versions have none
        counted = tuple(integers(content, "limit", 2).tolist())
    return Checkpoint(
        Schema.from_json(json.dumps(content.get("schema"))),
        capacity,
        num_envs,
        shards,
        entry(content, "ordered", bool),
        entry(content, "own_next_obs", bool),
        entry(content, "seed", int),
        draws,
        sampled,
        cut,
        rebuild(content.get("sampler"), "sampler") if sampler is None else sampler,
        rebuild(content.get("view"), "view") if view is None else view,
        counted,
    )


def saved_shards(path: str | os.PathLike[str], state: Checkpoint) -> tuple[SavedShard, ...]:
    """Where the shards of a checkpoint lie."""
    division = Division(state.num_envs, state.shards)
    starts, rows = division.starts.tolist(), division.rows(state.capacity).tolist()
    return tuple(
        SavedShard(str(slot(path, k, state.cut)), starts[k], starts[k + 1] - starts[k], rows[k])
        for k in range(state.shards)
    )
