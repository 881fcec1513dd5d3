"""Velora's files of a buffer: six tensors in a safetensors file, and sizes and cursors in JSON."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from ...errors import FileFormatError, NoSaveError
from ...persist import disk, format
from ...persist.tensors import pieces

__all__ = ["checked", "load", "save"]

ENDING = ".safetensors"
SIZES = ("capacity", "state_dim", "action_dim", "hidden_dim", "position", "size")


def save(path: str | os.PathLike[str], prefix: str, metadata: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """Write both files beside their places, and then put them there; tensors of any strides, on any device."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(sorted(state.items()))  # as safetensors orders those of one dtype
    specs = format.plan(tensors, "")
    header, size = format.header(specs), sum(spec.nbytes for spec in specs.values())
    parts = itertools.chain.from_iterable(map(pieces, tensors.values()))
    _replace(folder / f"{prefix}state{ENDING}", itertools.chain([memoryview(header)], parts), len(header) + size)
    text = json.dumps(dict(metadata), indent=2).encode()
    _replace(folder / f"{prefix}metadata.json", [memoryview(text)], len(text))


def _replace(path: Path, parts: Iterable[memoryview], size: int) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)  # of a process that was killed
    try:
        disk.write_file(beside, parts, size)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def checked(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata, if a buffer can be of such sizes.

    Raises:
        FileFormatError: an entry is missing or makes no sense.
    """
    for name in SIZES:
        value = metadata.get(name)
        if type(value) is not int or value < 0:
            raise FileFormatError(f"metadata '{name}': expected a whole number of at least 0, got {value!r}")
    capacity, size, position = (metadata[name] for name in ("capacity", "size", "position"))
    if size > capacity or not (position == size if size < capacity else position < max(capacity, 1)):
        raise FileFormatError(
            f"metadata: size={size} and position={position} cannot be those of a buffer of capacity={capacity}"
        )
    if not isinstance(metadata.get("device"), str | None):
        raise FileFormatError(f"metadata 'device': expected a string or null, got {metadata['device']!r}")
    return {name: metadata[name] for name in SIZES} | {"device": metadata.get("device")}


def load(path: str | os.PathLike[str], metadata: Mapping[str, Any], names: Iterable[str]) -> dict[str, Tensor]:
    """The rows that were written, of each tensor, once their sizes are those of the metadata.

    Raises:
        NoSaveError: no such file.
        FileFormatError: it has other tensors than the metadata say.
    """
    file = _found(Path(path))
    widths = {"states": "state_dim", "actions": "action_dim", "next_states": "state_dim", "hiddens": "hidden_dim"}
    found: dict[str, Tensor] = {}
    reader: Any = safetensors
    try:
        with reader.safe_open(file, framework="pt") as content:
            known = set(content.keys())
            for name in names:
                if name not in known:
                    raise FileFormatError(f"'{file}' has no tensor '{name}'; it is no buffer of Velora's")
                part: Any = content.get_slice(name)
                expected = [metadata["capacity"], metadata[widths[name]] if name in widths else 1]
                if part.get_shape() != expected or part.get_dtype() != "F32":
                    got = f"{part.get_dtype()} {part.get_shape()}"
                    raise FileFormatError(f"'{file}', tensor '{name}': the metadata say F32 {expected}, it is {got}")
                found[name] = part[: metadata["size"]].to(torch.float32)
    except safetensors.SafetensorError as error:
        raise FileFormatError(f"'{file}' is no safetensors file, or damaged: {error}") from error
    return found


def _found(path: Path) -> Path:
    """The file that is meant: as it is, with the ending, or where Velora puts a name with a dot in it."""
    for file in (path, path.with_name(path.name + ENDING), path.with_suffix(ENDING)):
        if file.name.endswith(ENDING) and file.is_file():
            return file
    raise NoSaveError(f"no file '{path}', with or without '{ENDING}'; give the one that save() wrote")
