"""The manifest of mapped arrays: JSON that names the run, the arrays and their files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

from ..printable import shown
from . import sealed
from .format import AXES
from .mapping import CODES, MappedSpec
from .sealed import damaged

__all__ = ["FILE", "FORMAT", "VERSION", "is_of_mapped", "parse"]


FORMAT, VERSION = "relive mapped arrays", 1


FILE = re.compile(r"[0-9]{3}-[a-z0-9-]{1,40}\.safetensors")
"""The name of an array's file."""


ARRAYS = 512
"""The most arrays of a directory."""


def is_of_mapped(raw: bytes) -> bool:
    """Whether a manifest says that it is one of mapped arrays. Nothing else in it is looked at."""
    return re.match(rb'\s*{\s*"format":\s*"%s"' % FORMAT.encode(), raw) is not None


def parse(path: Path, raw: bytes) -> tuple[str, dict[str, Any], dict[str, MappedSpec]]:
    """The run, the content and the arrays, by name, of a manifest.

    Raises:
        FileFormatError: it is of another format or version, or damaged.
    """
    advice = "give the directory of a replay in files; a save is opened by load"
    found = sealed.parse(path, raw, FORMAT, (VERSION,), advice)
    try:
        return _parsed(found)
    except ValueError as error:
        raise damaged(path, "a consistent manifest", error) from error


def _parsed(found: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, MappedSpec]]:
    """The run, the content and the arrays of a manifest.

    Raises:
        ValueError: something in it makes no sense.
    """
    if set(found) != {"format", "version", "run", "arrays", "content", "checksum"}:
        raise ValueError(f"the keys {shown(list(found))}")
    run, arrays, content = found["run"], found["arrays"], found["content"]
    if not isinstance(run, str) or not re.fullmatch("[0-9a-f]{16}", run):
        raise ValueError(f"the run {shown(run)}")
    if not isinstance(arrays, list) or not isinstance(content, dict) or len(cast("list[Any]", arrays)) > ARRAYS:
        raise ValueError("arrays or content of another kind")
    sealed.require_shallow(content)
    specs = [_spec(note) for note in cast("list[Any]", arrays)]
    if len({spec.name for spec in specs}) != len(specs) or len({spec.file for spec in specs}) != len(specs):
        raise ValueError("two arrays of one name or in one file")
    return run, cast("dict[str, Any]", content), {spec.name: spec for spec in specs}


def _spec(note: Any) -> MappedSpec:
    if isinstance(note, dict) and set(cast("dict[str, Any]", note)) == {"name", "file", "dtype", "shape"}:
        name, file, dtype, shape = (cast("dict[str, Any]", note)[key] for key in ("name", "file", "dtype", "shape"))
        texts = all(isinstance(text, str) for text in (name, file, dtype))
        if texts and FILE.fullmatch(file) and dtype in CODES and isinstance(shape, list):
            sizes = cast("list[Any]", shape)
            if len(sizes) <= AXES and all(type(size) is int and 0 < size < 2**48 for size in sizes):
                spec = MappedSpec(name, file, dtype, tuple(sizes))
                if spec.nbytes < 2**60:
                    return spec
    raise ValueError(f"{shown(note)} for an array")
