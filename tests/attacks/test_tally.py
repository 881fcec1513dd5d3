"""The count of attacks: what tests note in several processes comes to one table."""

from __future__ import annotations

from pathlib import Path

import pytest

from attacks import tally


def test_what_is_noted_of_one_class_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tally.PLACE, str(tmp_path / "tally"))
    tally.record("b", 1000, 0)
    tally.record("a", 2, 1)
    tally.record("b", 500, 3)
    found = tally.totals(tmp_path / "tally")
    assert found == {"a": (2, 1), "b": (1500, 3)}
    assert tally.table(found).splitlines()[2:] == ["| a | 2 | 1 |", "| b | 1,500 | 3 |"]


def test_an_attempt_that_raises_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tally.PLACE, str(tmp_path / "tally"))
    with tally.attempt("a", 5):
        pass
    with pytest.raises(AssertionError, match="it broke"), tally.attempt("a", 7):
        raise AssertionError("it broke")
    assert tally.totals(tmp_path / "tally") == {"a": (12, 1)}


def test_nothing_is_noted_where_nobody_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(tally.PLACE, raising=False)
    monkeypatch.chdir(tmp_path)
    tally.record("a", 1, 1)
    assert not list(tmp_path.iterdir())
