"""TorchRL: the files that ``TensorDictReplayBuffer.dumps`` writes, read without TorchRL."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..batches import as_batch
from ..errors import FileFormatError, NoSaveError
from ..files.disk import open_file
from ..look.readers import steps_with_next
from ..printable import shown
from ..steps.arrays import NUMPY_DTYPES, Array
from ..steps.schema import Path as Keys
from ..steps.schema import dotted
from .log import Json, Log, count, directory, json_object, log_of, require_memory, sizes_in

DTYPES = {str(dtype): found for dtype, found in NUMPY_DTYPES.items()}
"""The names of dtypes in TorchRL's files, such as "torch.float32"."""

OWN = ("shape", "device", "_type")
"""Members of a ``meta.json`` that describe the TensorDict itself. All others are its entries."""

DEEPEST = 16
"""How deep TensorDicts may be nested."""


class Stored(NamedTuple):
    """A tensor in a file: raw numbers, without a header."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size that the file must have."""
        return prod(self.shape) * self.dtype.itemsize


def from_torchrl(path: str | os.PathLike[str]) -> Log:
    """The steps of a TorchRL replay buffer with a tensor storage, from the directory that ``dumps`` wrote.

    Steps are TensorDicts with a "next", as TorchRL's collectors make them. All entries that both the step and its
    "next" have become observations. The first axis of a storage is time. If the storage counts more axes as its own,
    they are envs. Only JSON and raw numbers are read; the pickle in the directory is not.

    Args:
        path: the directory.

    Raises:
        NoSaveError: a file is missing.
        FileFormatError: a file is damaged or contradicts another one, or the storage is of another kind.
        FieldError: steps have no "next", no observation that their "next" has, too, or no reward.
        ParameterError: there is too little memory for the steps.
    """
    folder = directory(path, "the directory of a TorchRL dump")
    about = folder / "storage" / "storage_metadata.json"
    content = json_object(about, "the metadata of a TorchRL storage")
    if content.get("is_pytree") is not False:
        raise FileFormatError(f"'{about}': expected TensorDicts, got a storage of tuples or dicts; pass its arrays")
    stored, left_out = _entries(folder / "storage", ())
    top = json_object(folder / "storage" / "meta.json", "the metadata of a TensorDict")
    batch = _shape(top, folder / "storage" / "meta.json")
    wide, size = prod(batch[1:]), count(content, "len", about, most=prod(batch))
    writer: dict[str, Json] = {}
    if batch and (wide > 1 or size == batch[0]):
        writer = json_object(folder / "writer" / "metadata.json", "a TorchRL writer")
    written = count(writer, "write_count", folder) if "write_count" in writer else 0
    # where the storage counts rows, not steps, more axes are no envs
    counts_rows = wide > 1 and size == min(written, batch[0])
    # a capacity that N does not divide is rounded up to whole rows
    rows = size if counts_rows else -(-size // max(wide, 1))
    if not batch or not size or (rows < batch[0] and not counts_rows and size % wide):
        raise FileFormatError(f"'{about}': expected rows of a storage of shape {batch}, got len={size}")
    for entry in stored.values():
        if entry.shape[: len(batch)] != batch:
            raise FileFormatError(f"'{entry.file}': expected the shape {batch} in front, got {entry.shape}")
    require_memory(sum(entry.nbytes for entry in stored.values()), folder)
    full = rows == batch[0]
    first = count(writer, "cursor", folder) if full else 0
    leaves = {keys: _read(entry, rows, first % batch[0]) for keys, entry in stored.items()}
    steps = as_batch({keys: leaf.flatten(0, len(batch) - 1) for keys, leaf in leaves.items()})
    envs = None if counts_rows or len(batch) == 1 else wide
    experience = steps_with_next(steps, f"'{folder}', torchrl ReplayBuffer", full=full, envs=envs)
    experience.lacks += tuple(f"'{name}' is no tensor of numbers and was not read" for name in left_out)
    return log_of(experience)


def _entries(folder: Path, keys: Keys) -> tuple[dict[Keys, Stored], list[str]]:
    """The tensors of a TensorDict and of the TensorDicts in it, and the names of all other entries."""
    about = folder / "meta.json"
    content = json_object(about, "the metadata of a TensorDict")
    if len(keys) > DEEPEST:
        raise FileFormatError(f"'{about}': expected TensorDicts nested up to {DEEPEST} deep, got more")
    _shape(content, about)
    stored: dict[Keys, Stored] = {}
    left_out: list[str] = []
    for name, note in content.items():
        if name in OWN and not isinstance(note, dict):
            continue
        _require_name(name, about)
        known = note if isinstance(note, dict) else {}
        dtype = known.get("dtype")
        if known.get("type") == "TensorDict":
            if (folder / name).is_symlink():
                raise FileFormatError(f"'{folder / name}': expected a directory, got a link; copy what it leads to")
            inner, others = _entries(folder / name, (*keys, name))
            stored |= inner
            left_out += others
        elif isinstance(dtype, str) and dtype in DTYPES and known.get("is_nested") is False:
            stored[(*keys, name)] = Stored(folder / f"{name}.memmap", DTYPES[dtype], _shape(known, about))
        else:
            left_out.append(dotted((*keys, name)))
    return stored, left_out


def _require_name(name: str, about: Path) -> None:
    """Refuse names of entries that would lead out of the directory.

    Raises:
        FileFormatError: ``name`` would lead out of the directory.
    """
    if not name or name in (".", "..") or any(mark in name for mark in "/\\\0:"):
        raise FileFormatError(f"'{about}': expected names of files, got {shown(name)}; use another copy")


def _shape(content: dict[str, Json], about: Path) -> tuple[int, ...]:
    """The shape that a JSON object states.

    Raises:
        FileFormatError: it states none.
    """
    shape = sizes_in(content.get("shape"), least=0, axes=DEEPEST)
    if shape is None:
        raise FileFormatError(f"'{about}', 'shape': expected a list of sizes, got {shown(content.get('shape'))}")
    return shape


def _read(entry: Stored, rows: int, first: int) -> Tensor:
    """The first ``rows`` rows of a tensor. They begin with row ``first`` and go on after the end with row 0.

    Raises:
        NoSaveError: the file is missing.
        FileFormatError: the file does not have the size that follows from its shape and dtype.
    """
    try:
        with open_file(entry.file) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != entry.nbytes:
                raise FileFormatError(
                    f"'{entry.file}': expected {entry.nbytes} bytes, as {entry.dtype} {entry.shape} takes, got {size}; "
                    "use another copy"
                )
            numbers = np.fromfile(stream, entry.dtype, rows * prod(entry.shape[1:]))
    except FileNotFoundError as error:
        raise NoSaveError(
            f"'{entry.file}': expected a tensor, got nothing; give a complete copy of the dump"
        ) from error
    if entry.dtype == np.bool_ and numbers.view(np.uint8).max(initial=0) > 1:
        raise FileFormatError(f"'{entry.file}': expected bools, bytes of 0 and 1, got others; use another copy")
    array: Array = numbers.reshape(rows, *entry.shape[1:])
    return torch.from_numpy(np.concatenate([array[first:], array[:first]]) if first else array)
