"""What all tests of files share."""

from __future__ import annotations

import os

import pytest

from relive.files import format
from relive.files import format as tensors


@pytest.fixture(autouse=True)
def quick_and_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk, and limits so small that little data has many chunks and several files."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(tensors, "CHUNK", 64)
    monkeypatch.setattr(format, "FILE_BYTES", 256)
