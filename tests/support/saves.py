"""Small saves, forged ones, and what they hold."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relive import files as persist
from relive.errors import FileFormatError
from relive.replay import saving as segments

Tensors = Mapping[str, Any]
Tried = Callable[..., None]


def bits(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    flat = value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def dtype_of(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert dtype_of(found[name]) == dtype_of(value), name
        assert tuple(found[name].shape) == tuple(value.shape), name
        assert bits(found[name]) == bits(value), name


def many_segments(patch: pytest.MonkeyPatch, small: int = 8, large: int = 4) -> None:
    """No waiting for the disk, and limits so small that few rows are many segments."""
    patch.setattr(os, "fsync", lambda descriptor: None)
    patch.setattr(segments, "SMALL_BYTES", 1)
    patch.setattr(segments, "SMALL_SHARE", small)
    patch.setattr(segments, "LARGE_SHARE", large)


def example(k: int = 0) -> dict[str, torch.Tensor]:
    """Tensors in which every value tells ``k``; they take several files."""
    return {
        "rows": torch.full((40, 3), k, dtype=torch.int64),
        "flags": torch.full((5,), bool(k % 2)),
        "turned": torch.full((7, 11), k, dtype=torch.float32).T,
        "bytes": torch.full((300,), k, dtype=torch.uint8),
        "none": torch.zeros(0, 3, dtype=torch.bfloat16),
        "one": torch.tensor(k, dtype=torch.int16),
    }


def save(path: Path, k: int = 0) -> Path:
    persist.write(path, example(k), {"k": k, "note": "on k"})
    return path


def holds(path: Path) -> int:
    """Which example is saved there, after looking at every bit of it."""
    found, content = persist.read(path)
    assert_same(found, example(content["k"]))
    return content["k"]


def listing(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in sorted(os.listdir(path))}


# What is refused when read


def seal(document: dict[str, Any]) -> bytes:
    """A manifest that says this, with the right checksum: what a forger would write."""
    body = json.dumps({key: value for key, value in document.items() if key != "checksum"}).encode()
    return seal_text(body)


def seal_text(body: bytes) -> bytes:
    assert body.endswith(b"}")
    body = body[:-1]
    return body + f',\n"checksum": "{zlib.crc32(body):08x}"\n}}\n'.encode()


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((path / "manifest.json").read_text())
    change(document)
    (path / "manifest.json").write_bytes(seal(document))


def assert_refused(path: Path, words: str | None = None) -> FileFormatError:
    with pytest.raises(FileFormatError, match=words) as caught:
        persist.read(path)
    assert str(path) in str(caught.value)
    return caught.value


def first(mapping: dict[str, Any]) -> Any:
    return next(iter(mapping.values()))


def data_files(path: Path) -> list[Path]:
    return sorted(path.glob("data-*.safetensors"))
