"""The state of a sampler of a replay in files, all but its priorities. It is saved beside the files at each flush."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import files
from ..errors import FileFormatError, NoSaveError
from ..files.entries import entry, fitting
from ..files.mapped import MappedDirectory
from ..files.mapped_copy import MappedCopy
from ..ring.ring import Ring
from ..ring.span import Span
from ..samplers.prioritized import Prioritized
from ..samplers.recent import Recent
from ..samplers.uniform import Uniform
from .parts import PARAMETERS, describe, kinds
from .saved_ring import ring_state
from .validate import require_sampler_state

__all__ = ["SAMPLER", "read_sampler", "write_sampler"]


SAMPLER = "sampler"
"""The directory with the save of a sampler's state, inside that of the replay."""


IN_FILES = Uniform, Prioritized
"""Samplers that have no state outside the replay's files."""


def write_sampler(directory: MappedDirectory, ring: Ring, sampler: Any) -> None:
    """Save the state of a sampler, if it has any that is not in the replay's files.

    Raises:
        OSError: the disk is full, or fails. Then the save before is still there.
    """
    if type(sampler) in IN_FILES:
        return
    arrays, content = ring_state(ring, sampler, {"run": directory.run})
    if isinstance(sampler, Recent):  # the priorities of the one inside are in files
        arrays = {name: array for name, array in arrays.items() if not name.startswith("sampler.inner.")}
        state = {name: value for name, value in content["sampler_state"].items() if not name.startswith("inner.")}
        content |= {"sampler_state": state, "sampler_rows": []}
    _refuse_link(directory.path / SAMPLER)
    files.write(directory.path / SAMPLER, arrays | {"span": np.stack(ring.span)}, content)


def read_sampler(directory: MappedDirectory | MappedCopy, ring: Ring, sampler: Any) -> None:
    """Give a sampler the state that was saved last, if the sampler is of the same kind.

    Rows may have been added and overwritten since that save.

    Raises:
        FileFormatError: the save is damaged.
    """
    if type(sampler) in IN_FILES:
        return
    _refuse_link(directory.path / SAMPLER)
    try:
        save = files.Save(directory.path / SAMPLER)
    except NoSaveError:
        return
    with save:
        content = save.content
        if content.get("run") != directory.run or kinds(content.get("sampler")) != kinds(describe(sampler)):
            return
        tensors = save.read()
        span = fitting(tensors, "span", (2, ring.num_envs), torch.int64).numpy()
    saved, by_row = Span(span[0], np.maximum(span[0], span[1])), set[str](entry(content, "sampler_rows", list))
    live = saved.meet(ring.span)
    parts: dict[str, Any] = dict(entry(content, "sampler_state", dict))
    parts |= {n.removeprefix("sampler."): x.numpy() for n, x in tensors.items() if n.startswith("sampler.")}
    if type(sampler) in PARAMETERS:
        require_sampler_state(parts, by_row, ring)
    for name in by_row:
        part = fitting(tensors, f"sampler.{name}", (saved.size,)).numpy()
        full = np.zeros((ring.store.num_rows, *part.shape[1:]), part.dtype)
        full[live.places(ring.rows)] = part[saved.where(live)]
        parts[name] = full
    sampler.load_state_dict(parts)


def _refuse_link(path: Path) -> None:
    """Refuse a symbolic link, which could lead to a save elsewhere.

    Raises:
        FileFormatError: the path is a symbolic link.
    """
    if path.is_symlink():
        raise FileFormatError(f"'{path}': expected a directory, got a symbolic link; copy the replay with its files")
