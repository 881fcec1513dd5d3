"""Checked reading of files that another library wrote, or that somebody made up."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from ..errors import FileFormatError, NoSaveError
from ..files.disk import open_file, usable
from ..files.sealed import MOST_BYTES, excess
from ..memory.estimate import require_free
from ..printable import shown

__all__ = ["count", "directory", "json_object", "require_memory"]


def directory(path: str | os.PathLike[str], what: str) -> Path:
    """``path`` as the Path of a directory that exists.

    Raises:
        NoSaveError: nothing is there.
        FileFormatError: a file is there.
    """
    found = usable(path)
    if not found.exists():
        raise NoSaveError(f"'{found}': expected {what}, got nothing; give the path of one")
    if not found.is_dir():
        raise FileFormatError(f"'{found}': expected {what}, got a file; give the path of the directory")
    return found


def json_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file. Its size and structure are limited before it is parsed.

    Raises:
        NoSaveError: there is no such file.
        FileFormatError: it is not a regular file, is too large, or does not hold a JSON object.
    """
    try:
        with open_file(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            raw = stream.readall() if size <= MOST_BYTES else b""
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoSaveError(f"'{path}': expected {what}, got nothing; give the path of a complete copy") from error
    over = excess(raw) if size <= MOST_BYTES else (f"at most {MOST_BYTES} bytes", size)
    if over:
        raise FileFormatError(f"'{path}': expected {what} of {over[0]}, got {over[1]}; use another copy")
    try:
        found: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"'{path}': expected {what}, got no JSON ({error}); use another copy") from error
    if not isinstance(found, dict):
        raise FileFormatError(f"'{path}': expected {what}, a JSON object, got a {type(found).__name__}")
    return cast("dict[str, Any]", found)


def count(content: Mapping[str, Any], name: str, path: Path, *, most: int = 2**48) -> int:
    """The whole number from 0 to ``most`` in a member of a JSON object.

    Raises:
        FileFormatError: the member is missing, or is something else.
    """
    value = content.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise FileFormatError(f"'{path}', '{name}': expected a whole number from 0 to {most}, got {shown(value)}")
    return value


def require_memory(size: int, path: Path) -> None:
    """Require that ``size`` bytes of memory are free before a file is read that needs them.

    Raises:
        ParameterError: fewer are free.
    """
    require_free(size, torch.device("cpu"), f"reading '{path}'", "read it on a larger machine, or a part of it")
