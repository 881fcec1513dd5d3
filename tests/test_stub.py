"""The types of the compiled core are those that type checkers read."""

from __future__ import annotations

import pytest

import stub


def test_the_stub_is_that_of_the_core() -> None:
    pytest.importorskip("nanobind")
    assert stub.STUB.read_text(encoding="utf-8") == stub.stub(), "write it again: make stub"
