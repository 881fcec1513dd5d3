"""The benchmarks' harness: what fails is told, and stops nothing."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.delitem(sys.modules, "harness", raising=False)
    import harness  # pyright: ignore[reportMissingImports]

    yield harness
    logging.disable(logging.NOTSET)  # it silences the packages that it measures


class Line:
    """A contender that raises in its run number ``fails``, or in ``setup`` if that is 0; None never does."""

    note, package = "", "torch"

    def __init__(self, label: str, role: str, fails: int | None) -> None:
        self.label, self.role, self._fails, self.runs = label, role, fails, 0

    def setup(self, data: Any) -> None:
        if self._fails == 0:
            raise RuntimeError("no room\nand more")

    def run(self) -> None:
        self.runs += 1
        if self._fails is not None and self.runs >= self._fails:
            raise IndexError("index 8 is out of bounds")

    def check(self) -> str:
        return ""


def test_a_contender_that_fails_is_named_wherever_that_was_and_the_others_are_measured(
    harness: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    effort = harness.Effort(rounds=5, sample_seconds=1e-5, budget_seconds=5.0)
    monkeypatch.setattr(harness, "warm", lambda run, _effort: run() or 10)  # ten runs per sample, after one to warm up
    lines = [
        Line("floor", "floor", None),
        Line("ours", "ours", None),
        Line("in setup", "peer", 0),
        Line("when warmed up", "peer", 1),
        Line("in the first round", "peer", 7),
        Line("in the fourth round", "peer", 35),
        Line("steady", "peer", None),
    ]
    result = harness.measure(harness.Workload("work", None), lines, effort)
    status = {line["label"]: line["status"] for line in result["lines"]}
    out_of_bounds = "failed: IndexError: index 8 is out of bounds"
    assert status == {
        "floor": "ok",
        "ours": "ok",
        "in setup": "failed: RuntimeError: no room",
        "when warmed up": out_of_bounds,
        "in the first round": out_of_bounds,
        "in the fourth round": out_of_bounds,
        "steady": "ok",
    }
    assert all("median" not in line for line in result["lines"] if line["status"] != "ok")
    assert result["rounds"] == 5
    assert lines[-1].runs == 1 + 5 * 10
    assert lines[-2].runs == 35  # and never again
    assert result["best_peer"] == "steady"
    assert capsys.readouterr().err.count("IndexError: index 8 is out of bounds") == 3


def test_a_workload_in_which_all_fail_is_reported_as_well(harness: Any) -> None:
    effort = harness.Effort(rounds=2, sample_seconds=1e-5, budget_seconds=5.0)
    result = harness.measure(harness.Workload("work", None), [Line("ours", "ours", 0)], effort)
    assert result["best_peer_over_ours"] is None
