"""The benchmarks' harness reports what fails and goes on; the pages show what was measured."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.effort import first_of

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import pages  # pyright: ignore[reportMissingImports]

    return pages


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
        Line("in the first round", "peer", 8),
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
    assert lines[-1].runs == 2 + 5 * 10  # one to warm up, one to count its calls
    assert lines[-2].runs == 35  # and never again
    assert result["best_peer"] == "steady"
    assert capsys.readouterr().err.count("IndexError: index 8 is out of bounds") == 3


def test_a_workload_in_which_all_fail_is_reported_as_well(harness: Any) -> None:
    effort = harness.Effort(rounds=2, sample_seconds=1e-5, budget_seconds=5.0)
    result = harness.measure(harness.Workload("work", None), [Line("ours", "ours", 0)], effort)
    assert result["best_peer_over_ours"] is None


def test_only_the_wanted_workloads_are_measured_and_written(harness: Any, tmp_path: Path) -> None:
    effort = harness.Effort(rounds=5, sample_seconds=1e-5, budget_seconds=5.0, only=frozenset({"b"}))
    works = [harness.measure(harness.Workload(name, None), [Line("ours", "ours", None)], effort) for name in "abc"]
    assert [bool(work) for work in works] == [False, True, False]
    harness.write("one", "title", works, tmp_path)
    written = json.loads((tmp_path / "one.json").read_text())
    assert [work["name"] for work in written["workloads"]] == ["b"]
    (line,) = written["workloads"][0]["lines"]
    assert line["least"] <= line["q1"] <= line["median"]


def test_a_line_says_how_many_functions_one_operation_calls(harness: Any) -> None:
    class Counted(Line):
        def run(self) -> None:
            for _ in range(3):
                textwrap.fill("")  # a function of another package, written in Python
                len("")  # of the benchmark's own, so it does not count

    Counted.run.__code__ = Counted.run.__code__.replace(co_filename=str(ROOT / "benchmarks" / "bench_one.py"))
    effort = harness.Effort(rounds=1, sample_seconds=1e-9, budget_seconds=5.0)
    lines = [Counted("ours", "ours", None), Line("floor", "floor", None)]
    ours, floor = harness.measure(harness.Workload("work", None, units=3), lines, effort)["lines"]
    assert ours["calls"] == harness.calls.count(lambda: textwrap.fill("") and None)["calls"] - 1  # the lambda's
    assert ours["builtins"] > 0
    assert "calls" not in floor


@pytest.mark.parametrize("kind", ["one operation", "steps", "batches"])
def test_an_operation_is_timed_alone_right_after_a_step_of_the_learner(
    kind: str, harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    after, told = harness.after, []
    clock = iter(range(0, 10**6, 1000))  # a microsecond from one look to the next
    monkeypatch.setattr(after.time, "perf_counter_ns", lambda: told.append("look") or next(clock))
    monkeypatch.setattr(after.Learner, "step", lambda self: told.append("learn"))

    def work() -> bool:
        return told.append("work") is None

    def several() -> None:
        for _ in after.steps(2) if kind == "steps" else after.batches(work() for _ in range(2)):
            if kind == "steps":
                work()

    run = work if kind == "one operation" else several
    seconds = after.sample(run, after.Learner(), 4, 2 if kind == "batches" else 1)
    assert seconds == pytest.approx({"one operation": [1e-6] * 4, "steps": [1e-6] * 4, "batches": [1.5e-6] * 2}[kind])
    assert told.count("work") == 4
    timed = [(a, b, c) for a, b, c in zip(told, told[1:], told[2:], strict=False) if b == "work"]
    assert set(timed) == {("look", "work", "look")}, "something else was timed"
    assert told.count("learn") >= 4
    assert after.pace is None
    assert list(after.steps(2)) == [0, 1]


def test_what_was_timed_after_a_learners_step_has_its_own_medians_and_best_peer(harness: Any, pages: Any) -> None:
    effort = harness.Effort(rounds=2, sample_seconds=1e-5, budget_seconds=5.0, after=2)
    lines = [Line("floor", "floor", None), Line("ours", "ours", None), Line("a", "peer", None), Line("b", "peer", 0)]
    work = harness.measure(harness.Workload("one", None, after=True), lines, effort)
    for line, median in zip(work["lines"], (1e-6, 2e-6, 8e-6), strict=False):
        line["after"]["median"] = median
    work |= harness.summarize(work["lines"])
    assert (work["after"]["best_peer"], work["after"]["best_peer_over_ours"]) == ("a", 4.0)
    tables = pages.tables
    for line, median in zip(work["lines"], (0.5e-6, 1e-6, 3e-6), strict=False):
        line["median"] = median
    work["best_peer"], work["best_peer_over_ours"] = "a", 3.0
    shown = tables.grid({"title": "", "workloads": [work]}, "t", tables.side_by_side(tables.time), leads=True)
    assert shown[2:] == [
        "| floor: floor | 0.500 µs → 1.00 µs |",
        "| **ours** | **1.00 µs → 2.00 µs** |",
        "| a | 3.00 µs → 8.00 µs |",
        "| b | failed |",
        "| best peer / ours | 3.00 × → 4.00 × (a) |",
    ]
    work["best_peer"] = "c"
    assert tables.ratios(work) == "3.00 × (c) → 4.00 × (a)"
    assert tables.headed({"workloads": [work]}, "t") == "t: in a loop → right after a learner's step"
    assert tables.headed({"workloads": [{}]}, "t") == "t"


def test_a_cell_shows_one_figure_the_time_the_multiple_or_the_calls(pages: Any) -> None:
    line = {"status": "ok", "median": 35e-6, "role": "ours", "times_floor": 3.67, "calls": 43.0, "builtins": 12.4}
    shown = [figure(line, "s") for figure in (pages.tables.time, pages.tables.multiple, pages.tables.calls)]
    assert shown == ["35.0 µs", "3.67 ×", "43 + 12"]
    assert pages.tables.multiple({**line, "role": "floor"}, "s") == ""


def test_a_table_says_if_other_work_kept_the_machine_busy(pages: Any) -> None:
    quiet = {"cpu": "c", "cores": 2, "system": "s", "python": "3", "packages": {}, "date": "today", "load": 1.9}
    assert "busy" not in pages.tables.machine(quiet)
    assert "2 cores that other work kept busy (load 20); s" in pages.tables.machine({**quiet, "load": 20.3})


def test_one_library_beside_relive_has_its_fastest_way_in_each_workload(pages: Any) -> None:
    lines = ("relive", "ours", 1e-3), ("a, slow", "peer", 9e-3), ("a", "peer", 3e-3), ("ab", "peer", 2e-3)
    both = {**report("gae", *lines), "title": "GAE", "unit": "s"}
    counts = {**report("bytes", *lines), "title": "bytes", "unit": "count"}
    drop_in = {**report("compat_a", *lines), "title": "drop-in", "unit": "s"}
    rows = pages.beside.rows([both, counts, drop_in], "a")
    assert rows == [["GAE: one", "**1.00 ms**", "3.00 ms", "3.00 ×"]]


def test_the_pages_and_the_chart_show_the_recorded_results(pages: Any) -> None:
    differing = [path.name for path, text in pages.written().items() if path.read_text(encoding="utf-8") != text]
    assert differing == [], "run: python benchmarks/pages.py"


def test_every_recorded_result_has_a_place_on_a_page(pages: Any) -> None:
    shown = "".join(path.read_text(encoding="utf-8") for path in pages.PAGES)
    names = [path.stem for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))]
    assert [name for name in ["headline", *names] if f"<!-- bench:{name} -->" not in shown] == []
    details = {report["name"]: pages.tables.details(report) for report in pages.tables.reports()}
    assert [name for name, text in details.items() if text and f"<!-- bench:{name}-details -->" not in shown] == []


def test_the_audit_of_libraries_shows_the_recorded_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import audit_libraries  # pyright: ignore[reportMissingImports]

    written = audit_libraries.PAGE.read_text(encoding="utf-8")
    assert written == audit_libraries.page(), "run: python benchmarks/audit_libraries.py --pages"


def report(name: str, *medians: tuple[str, str, float]) -> dict[str, Any]:
    """A report of one workload with lines (label, role, median)."""
    lines = [
        {"label": label, "role": role, "package": label.split(",")[0], "status": "ok", "median": median}
        for label, role, median in medians
    ]
    best = min((line for line in lines if line["role"] == "peer"), key=lambda line: line["median"])
    ours = next(line for line in lines if line["role"] == "ours")
    ratio = best["median"] / ours["median"]
    work = {"name": "one", "lines": lines, "best_peer": best["label"], "best_peer_over_ours": ratio}
    return {"name": name, "workloads": [work]}


def test_the_headline_says_where_another_library_is_faster(pages: Any) -> None:
    headline = pages.headline
    faster = report("gae", ("relive", "ours", 1.0), ("a", "peer", 2.0))
    slower = report("add", ("relive", "ours", 1.0), ("a", "peer", 0.5))
    assert headline.slower([faster]) == ["No other library is faster in any of the 1 workloads of the main tables."]
    said = headline.slower([faster, slower])
    assert said == ["Another library is faster in 1 of the 2 workloads of the main tables: `add`."]
    for each, median in ((faster, 3.0), (slower, 0.25)):
        each["workloads"][0] |= {"best_hand": "loop", "best_hand_over_ours": median}
    assert headline.slower([faster]) == [
        "No other library is faster in any of the 1 workloads of the main tables.",
        "No hand-written way is faster in any of the 1 workloads of the main tables.",
    ]
    assert headline.slower([faster, slower])[1] == (
        "A hand-written way is faster in 1 of the 2 workloads of the main tables: `add`."
    )


def test_a_hand_written_way_has_a_line_and_a_lead_of_its_own_and_is_no_library(harness: Any, pages: Any) -> None:
    effort = harness.Effort(rounds=2, sample_seconds=1e-5, budget_seconds=5.0, after=2)
    lines = [
        Line("relive", "ours", None),
        Line("relive, reuse=True", "ours", None),
        Line("a", "peer", None),
        Line(f"{pages.tables.HAND}loop", "hand", None),
    ]
    work = harness.measure(harness.Workload("uniform", None, after=True), lines, effort)
    for line, median in zip(work["lines"], (2e-6, 1e-6, 8e-6, 1e-6), strict=True):
        line["median"] = line["after"]["median"] = median
    work |= harness.summarize(work["lines"])
    assert (work["best_peer"], work["best_hand"]) == ("a", "hand-written: loop")
    assert (work["best_peer_over_ours"], work["after"]["best_hand_over_ours"]) == (4.0, 0.5)
    assert "calls" not in work["lines"][-1], "its functions are the benchmark's own"
    report = {"title": "", "workloads": [work]}
    shown = pages.tables.grid(report, "t", pages.tables.time, leads=True)[3:]
    assert [line.split(" | ")[0] for line in shown] == [
        "| relive, reuse=True",
        "| hand-written: loop",
        "| a",
        "| best peer / relive",
        "| hand-written / relive",
    ]
    assert shown[-1] == "| hand-written / relive | 0.500 × → 0.500 × (loop) |"
    row = pages.headline.Headline("replay_sample", "uniform", "a batch")
    cells = pages.headline.cells(row, {"replay_sample": report})
    assert cells == ["**2.00 µs**", "1.00 µs", "1.00 µs (loop), 0.500 ×", "8.00 µs (a), 4.00 ×"]
    assert [line["label"] for line in pages.headline.fastest(work)] == ["relive", "hand-written: loop", "a"]


def test_the_chart_has_one_bar_for_each_library_its_fastest_line(pages: Any) -> None:
    lines = ("floor", "floor", 1.0), ("relive", "ours", 2.0), ("a, slow", "peer", 9.0), ("a", "peer", 3.0)
    work = report("gae", *lines, ("b", "peer", 2.5))["workloads"][0]
    assert [line["label"] for line in pages.headline.fastest(work)] == ["floor", "relive", "b", "a"]


def test_the_leads_on_a_busy_machine_stand_beside_those_on_an_idle_one(pages: Any) -> None:
    idle = report("gae", ("relive", "ours", 1e-6), ("a", "peer", 4e-6)) | {"title": "gae"}
    busy = report("gae", ("relive", "ours", 2e-6), ("b", "peer", 6e-6)) | {"title": "gae"}
    busy["environment"] = {"neighbours": 2, "cpu": "c", "cores": 2, "system": "s", "python": "3", "packages": {}}
    busy["environment"]["date"] = "today"
    idle["environment"] = {"cpu": "c"}
    assert "| gae: one | 4.00 × (a) | 3.00 × (b) | 2.00 × |" in pages.busy.table([idle], [busy]).splitlines()
    assert "`python benchmarks/run.py --busy --only gae`" in pages.busy.table([idle], [busy])
    assert pages.busy.table([idle], []) == "Not measured yet."
    idle["environment"] = {"cpu": "another"}
    assert "| gae: one | 3.00 × (b) |" in pages.busy.table([idle], [busy]).splitlines()


def test_neighbours_keep_a_core_busy_and_end_with_the_run_or_its_process(harness: Any) -> None:
    with harness.neighbours.neighbours(1):
        process = harness.neighbours.running[0]
        assert process.poll() is None
        assert harness.environment()["neighbours"] == 1
    assert process.poll() is not None
    assert harness.environment()["neighbours"] == 0
    command = [sys.executable, harness.neighbours.__file__, "0"]  # no process has the number 0
    alone = subprocess.run(command, capture_output=True, check=True, timeout=300)
    assert alone.stdout == b".", "it goes on without its parent"


TRAININGS = {
    "training_ppo": ("Ppo", 8, 32, 5, 2, 1),
    "training_recurrent": ("RecurrentPpo", 8, 32, 5, 2, 1),
    "training_dqn": ("Dqn", 4, 40),
    "training_sac": ("Sac", 202),
    "training_r2d2": ("R2d2", 4, 105),
}


@pytest.mark.parametrize("name", first_of(2, TRAININGS))
def test_the_trainings_learn_from_what_they_stored(name: str, harness: Any) -> None:
    module, (kind, *sizes) = importlib.import_module(name), TRAININGS[name]
    work, clock = getattr(module, kind)(*sizes), importlib.import_module("training_play").Clock()
    assert work.learn(module.Relive(work), clock) == ""
    assert clock.seconds > 0
    assert work.learn(module.Ready(work), clock) != "", "a check that lets anything pass"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux puts pages out when asked")
def test_a_replay_in_files_is_measured_in_seconds_where_half_of_its_rows_are_in_memory(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_mapped_half.py"), "--short"]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "failed" not in done.stdout
    assert done.stdout.count("in memory, all of it") == 7
