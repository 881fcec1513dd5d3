"""Velora's file format for buffers: six tensors in a safetensors file, sizes and cursors in a JSON file."""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from ...errors import FileFormatError, NoSaveError
from ...files import directory, disk, format
from ...files.tensors import pieces
from ...printable import shown

__all__ = ["checked", "load", "save"]

ENDING = ".safetensors"
CHECKSUM = "relive.crc32"
"""The entry in the safetensors header that holds the CRC-32 of the tensors."""
SIZES = ("capacity", "state_dim", "action_dim", "hidden_dim", "position", "size")


def save(path: str | os.PathLike[str], prefix: str, metadata: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """Write both files under temporary names, then rename them. Tensors may have any strides and device.

    Saves into one directory take turns. The checksum of the tensors is in the header, which Velora ignores.
    """
    folder = disk.usable(path)
    tensors = dict(sorted(state.items()))  # the order of safetensors for tensors of one dtype
    specs = format.plan(tensors, "")
    header, size = format.header(specs, {CHECKSUM: "0" * 8}), sum(spec.nbytes for spec in specs.values())
    data = _Hashed(itertools.chain.from_iterable(map(pieces, tensors.values())))

    def checksum() -> tuple[int, bytes]:
        return header.index(b"0" * 8), data.crc32.encode()

    text = json.dumps(dict(metadata), indent=2).encode()
    parts = itertools.chain([memoryview(header)], data)
    names = f"{prefix}state{ENDING}", f"{prefix}metadata.json"
    with directory.turn(folder):
        beside = [folder / f".{name}.beside" for name in names]
        try:
            for file in beside:
                file.unlink(missing_ok=True)  # left behind by a process that was killed
            disk.write_file(beside[0], parts, len(header) + size, last=checksum)
            disk.write_file(beside[1], [memoryview(text)], len(text))
            for file, name in zip(beside, names, strict=True):
                file.replace(folder / name)
        finally:
            for file in beside:
                file.unlink(missing_ok=True)


class _Hashed:
    """Pieces of bytes that are hashed while they are read."""

    def __init__(self, pieces: Iterable[memoryview]) -> None:
        self._pieces, self._crc = pieces, 0

    def __iter__(self) -> Iterator[memoryview]:
        for piece in self._pieces:
            self._crc = zlib.crc32(piece, self._crc)
            yield piece

    @property
    def crc32(self) -> str:
        """The checksum of the pieces read so far, in hexadecimal."""
        return f"{self._crc:08x}"


def checked(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata, checked.

    Raises:
        FileFormatError: an entry is missing, of the wrong type, or contradicts another.
    """
    for name in SIZES:
        value = metadata.get(name)
        if type(value) is not int or value < 0:
            raise FileFormatError(f"metadata '{name}': expected a whole number of at least 0, got {shown(value)}")
    capacity, size, position = (metadata[name] for name in ("capacity", "size", "position"))
    if size > capacity or not (position == size if size < capacity else position < max(capacity, 1)):
        raise FileFormatError(
            f"metadata: size={size} and position={position} contradict capacity={capacity}; use another copy"
        )
    if not isinstance(metadata.get("device"), str | None):
        raise FileFormatError(f"metadata 'device': expected a string or null, got {shown(metadata['device'])}")
    return {name: metadata[name] for name in SIZES} | {"device": metadata.get("device")}


def load(path: str | os.PathLike[str], metadata: Mapping[str, Any], names: Iterable[str]) -> dict[str, Tensor]:
    """The first ``size`` rows of each tensor.

    Raises:
        NoSaveError: no such file.
        FileFormatError: the file is damaged, or its tensors differ from the metadata.
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
                    raise FileFormatError(f"'{file}' has no tensor '{name}'; give the file of a Velora buffer")
                part: Any = content.get_slice(name)
                expected = [metadata["capacity"], metadata[widths[name]] if name in widths else 1]
                if part.get_shape() != expected or part.get_dtype() != "F32":
                    got = f"{part.get_dtype()} {part.get_shape()}"
                    raise FileFormatError(f"'{file}', tensor '{name}': expected F32 {expected}, got {got}")
                found[name] = part[: metadata["size"]].to(torch.float32)
            _require_checksum(content, sorted(known), file)  # it is that of all tensors, whichever are asked for
    except safetensors.SafetensorError as error:
        raise FileFormatError(f"'{file}' is damaged, or is not a safetensors file: {error}") from error
    return found


def _require_checksum(content: Any, names: Iterable[str], file: Path) -> None:
    """Refuse tensors that changed since they were saved. Files of Velora have no checksum and pass.

    Raises:
        FileFormatError: the checksum differs.
    """
    notes: dict[str, str] = content.metadata() or {}
    if CHECKSUM not in notes:
        return
    data = _Hashed(piece for name in names for piece in pieces(content.get_tensor(name)))
    for _ in data:
        pass
    if data.crc32 != notes[CHECKSUM]:
        raise FileFormatError(
            f"'{file}' is damaged: expected the checksum {notes[CHECKSUM]:.8}, got {data.crc32}; use another copy"
        )


def _found(path: Path) -> Path:
    """The file at ``path``, or with the ending added, or with the last suffix replaced, as Velora does."""
    for file in (path, path.with_name(path.name + ENDING), path.with_suffix(ENDING)):
        if file.name.endswith(ENDING) and file.is_file():
            return file
    raise NoSaveError(f"no file '{path}', with or without '{ENDING}'; give the one that save() wrote")
