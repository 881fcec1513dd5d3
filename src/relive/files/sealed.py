"""JSON that states its format and ends with its own checksum, written by relive and read from anyone.

The limits on its size and structure are checked before it is parsed, because parsed JSON takes up to a hundred times
the memory of its text.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from ..errors import FileFormatError
from ..printable import shown

__all__ = ["MOST_BYTES", "damaged", "excess", "parse", "require_shallow", "seal"]


MOST_BYTES = 1 << 26
"""The largest manifest. Larger content belongs in a tensor."""


STRUCTURE = {b"{": 2**16, b"[": 2**20, b",": 2**22}
"""How often each character may occur. Parsed JSON takes up to a hundred times the memory of its text."""


DEPTH = 100
"""The deepest nesting of objects and lists."""


_TAIL = re.compile(rb',\n"checksum": "([0-9a-f]{8})"\n}\n\Z')


TAIL_BYTES = len(',\n"checksum": "01234567"\n}\n')


def damaged(path: Path, expected: str, got: object) -> FileFormatError:
    """The error for a save that changed after it was written."""
    return FileFormatError(
        f"'{path}': expected {expected}, got {got}; it was altered or damaged since it was saved: "
        "restore it from a copy, or save again in another directory"
    )


def seal(parts: Mapping[str, str]) -> bytes:
    """The JSON object with these members, each given as JSON text, and its checksum as the last one.

    Raises:
        FileFormatError: the result would be larger than a reader takes.
    """
    lines = [f'"{key}": {value}' for key, value in parts.items()]
    body = ("{\n" + ",\n".join(lines)).encode()
    sealed = body + b',\n"checksum": "%08x"\n}\n' % zlib.crc32(body)
    if over := excess(sealed):
        raise FileFormatError(
            f"the JSON to save: expected a manifest of {over[0]}, got {over[1]}; put long lists into a tensor"
        )
    return sealed


def parse(path: Path, raw: bytes, name: str, versions: Sequence[int], advice: str) -> dict[str, Any]:
    """The object whose member "format" is ``name`` and whose "version" is one of ``versions``.

    Raises:
        FileFormatError: the format or version is another, or the text is damaged.
    """
    _require_own(path, raw)
    try:
        found: Any = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        raise damaged(path, "the JSON of a save", f"something else ({error})") from error
    manifest = cast("dict[str, Any]", found if isinstance(found, dict) else {})
    if (given := manifest.get("format")) != name:
        raise FileFormatError(f"'{path}': expected the format {name!r}, got {shown(given)}; {advice}")
    version: Any = manifest.get("version")
    if type(version) is not int or version not in versions:
        raise FileFormatError(
            f"'{path}': expected version {' or '.join(map(str, versions))}, got {shown(version)}; use the release "
            "of relive that wrote it"
        )
    return manifest


def _require_own(path: Path, raw: bytes) -> None:
    """Check, before parsing, the checksum and the limits on the time and memory that parsing takes.

    Raises:
        FileFormatError: the file is foreign or damaged.
    """
    tail = _TAIL.search(raw[-TAIL_BYTES:])
    if tail is None or int(tail[1], 16) != zlib.crc32(raw[: len(raw) - len(tail[0])]):
        raise damaged(path, "a save's manifest, which ends with the CRC-32 of all before it", "another file or ending")
    if over := excess(raw):
        raise damaged(path, *over)


def excess(raw: bytes) -> tuple[str, int] | None:
    """The limit on JSON that ``raw`` exceeds, and the count that it has; None if it keeps all limits."""
    counts = {f"at most {most} times {mark.decode()!r}": (raw.count(mark), most) for mark, most in STRUCTURE.items()}
    counts[f"at most {MOST_BYTES} bytes"] = len(raw), MOST_BYTES
    return next(((rule, count) for rule, (count, most) in counts.items() if count > most), None)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice in one object")
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is not finite")
    return value


def require_shallow(content: Any) -> None:
    """Refuse JSON nested too deep for common parsers.

    Raises:
        ValueError: the nesting is deeper than ``DEPTH``.
    """
    level = [content]
    for _ in range(DEPTH):
        level = [inner for value in level if isinstance(value, dict | list)
                 for inner in (value.values() if isinstance(value, dict) else value)]  # fmt: skip
        if not level:
            return
    raise ValueError(f"objects and lists nested more than {DEPTH} deep")
