"""Damage to the files of other libraries: bytes that are changed, lost and added."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from relive.errors import ReliveError


def damaged(content: bytes, rng: Any) -> bytes:
    """Up to three bytes or short runs changed."""
    found = bytearray(content)
    for _ in range(rng.integers(1, 4)):
        at, size = int(rng.integers(len(found) + 1)), int(rng.integers(1, 9))
        kind = rng.integers(4)
        if kind == 0:
            del found[at : at + size]
        elif kind == 1:
            found[at:at] = rng.bytes(size)
        else:
            found[at : at + 1] = (
                rng.bytes(1) if kind == 2 else bytes([found[at] ^ 1 << size - 1]) if at < len(found) else b""
            )
    return bytes(found)


def assert_read_or_refused(folder: Path, read: Callable[[Path], Any], count: int, seed: int) -> None:
    """No damage raises another error than ours, some of it is noticed, and the whole file is read before and after."""
    rng, whole, refused = np.random.default_rng(seed), len(read(folder).replay()), 0
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    for _ in range(count):
        file = files[rng.integers(len(files))]
        content = file.read_bytes()
        file.write_bytes(damaged(content, rng))
        try:
            read(folder).replay()
        except ReliveError:
            refused += 1
        file.write_bytes(content)
    assert refused > 0
    assert len(read(folder).replay()) == whole
