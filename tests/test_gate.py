"""The benchmarks' gate names what became slower, and lets noise pass; the history keeps each recorded run."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
TIMES = {"memcpy": ("floor", 1e-6), "relive": ("ours", 3e-6), "relive, more": ("ours", 4e-6), "fast": ("peer", 9e-6)}
PACKAGES = {"torch": "2"}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gate  # pyright: ignore[reportMissingImports]

    return gate


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import history  # pyright: ignore[reportMissingImports]

    return history


def line(label: str, role: str, seconds: float, calls: float = 80.0) -> dict[str, Any]:
    found: dict[str, Any] = {"label": label, "role": role, "package": label, "status": "ok", "median": seconds * 1.1}
    found |= {"q1": seconds * 1.02, "least": seconds, "q3": seconds * 1.3}
    return found if role == "floor" else found | {"calls": calls, "builtins": calls / 2}


def report(*, name: str = "add", works: Collection[str] = ("8 envs",), **environment: Any) -> dict[str, Any]:
    """A report as the harness writes it, with times after a learner's step that are three times as long."""
    workloads = []
    for work in works:
        lines = [line(label, role, seconds) for label, (role, seconds) in TIMES.items()]
        for each in lines:
            each["after"] = {key: 3 * each[key] for key in ("median", "q1", "least", "q3")}
        workloads.append({"name": work, "lines": lines, "best_peer": "fast", "best_peer_over_ours": 3.0})
    known = {"cpu": "c", "cores": 2, "python": "3.11.7", "packages": PACKAGES, "date": "2026-01-01", "commit": "abc"}
    return {"name": name, "title": name, "environment": known | environment, "workloads": workloads}


def scaled(given: dict[str, Any], factors: dict[str, float], kind: str = "both") -> dict[str, Any]:
    """The same report with the times of some lines multiplied."""
    new = copy.deepcopy(given)
    for work in new["workloads"]:
        for each in work["lines"]:
            for times in (each if kind != "after" else {}, each["after"] if kind != "loop" else {}):
                for key in ("median", "q1", "least", "q3"):
                    if key in times:
                        times[key] *= factors.get(each["label"], 1.0)
    return new


def noisy(given: dict[str, Any], rng: np.random.Generator, spread: float) -> dict[str, Any]:
    """The same on a busy machine: all takes several times as long, and each line some more or less."""
    load = rng.uniform(1.0, 5.0)
    return scaled(given, {label: load * float(np.exp(rng.normal(0, spread))) for label in TIMES})


def never(name: str, works: Collection[str]) -> list[dict[str, Any]]:
    raise AssertionError(f"{name} was measured again: {works}")


def same(*reports: dict[str, Any]) -> Any:
    """What measures the same again."""
    return lambda name, works: [each for each in reports if each["name"] == name]


def slow_rows(gate: Any, before: dict[str, Any], now: dict[str, Any]) -> list[Any]:
    return gate.slower(gate.compare([before], [now]).timings, [before], same(now))


def test_the_same_figures_pass(gate: Any) -> None:
    seen = gate.compare([report()], [report()])
    assert len(seen.timings) == 4
    assert {each.slowdown for each in seen.timings} == {1.0}
    assert (seen.calls, seen.left) == ([], {})
    assert gate.slower(seen.timings, [report()], never) == []


def test_twice_the_time_is_named_with_what_was_expected_and_what_came(gate: Any) -> None:
    found = slow_rows(gate, report(), scaled(report(), {"relive": 2.0}, "loop"))
    assert [str(each) for each in found] == [
        "add: 8 envs: relive, in a loop: expected at most 4.50 × the floor and 0.500 × the fastest other library, for"
        " 3.00 × the floor and 0.333 × the fastest other library were recorded, came 6.00 × the floor and 0.667 × the"
        " fastest other library"
    ]
    told = gate.told(found, {"why": ["a", "b"]}, 1)
    assert "gate: not compared: why: a, b" in told
    assert "gate: SLOWER: add: 8 envs: relive, in a loop" in told
    assert told.endswith("gate: 1 figures are worse than the committed tables; times compared: 1")


def test_twice_the_time_after_a_learners_step_is_named_too(gate: Any) -> None:
    found = slow_rows(gate, report(), scaled(report(), {"relive, more": 2.0}, "after"))
    assert [each.key for each in found] == [("add", "8 envs", "relive, more", "after a learner's step")]


def test_a_slow_machine_a_slow_floor_and_a_faster_peer_pass(gate: Any) -> None:
    for factors in (dict.fromkeys(TIMES, 7.0), {"memcpy": 0.3}, {"fast": 0.3}, {"memcpy": 3.0, "fast": 4.0}):
        assert gate.slower(gate.compare([report()], [scaled(report(), factors)]).timings, [report()], never) == []


def test_without_a_peer_the_floor_alone_counts_and_without_both_nothing_does(gate: Any) -> None:
    for kept, worse in ({"memcpy", "relive"}, 2), ({"relive", "fast"}, 2), ({"relive"}, 0):
        new = scaled(report(), {"relive": 2.0})
        new["workloads"][0]["lines"] = [each for each in new["workloads"][0]["lines"] if each["label"] in kept]
        assert len(slow_rows(gate, report(), new)) == worse


@pytest.mark.parametrize(
    ("spread", "slowed", "least", "most"),
    [(0.25, 1.0, 0.0, 0.0), (0.1, 2.0, 1.0, 1.0), (0.2, 2.0, 0.8, 1.0)],
    ids=["the same code, very busy", "twice the time", "twice the time, busy"],
)
def test_noise_passes_and_twice_the_time_does_not(
    spread: float, slowed: float, least: float, most: float, gate: Any
) -> None:
    """With a spread of 0.25 one figure in eight looks too slow by the floor alone, as on a very busy machine."""
    rng = np.random.default_rng(0)
    before, verdicts, alone = [report()], [], []

    def again(name: str, works: Collection[str]) -> list[dict[str, Any]]:
        return [noisy(scaled(report(name=name, works=works), {"relive": slowed}), rng, spread)]

    for _ in range(100):
        timings = gate.compare(before, again("add", ["8 envs"])).timings
        alone.append(timings[0].now["the floor"] / slowed > gate.TOLERANCE * timings[0].before["the floor"])
        verdicts.append(bool(gate.slower(timings, before, again)))
    assert spread < 0.25 or 0.08 < np.mean(alone) < 0.2
    assert least <= np.mean(verdicts) <= most


def test_only_what_stays_slow_is_reported_and_only_that_is_measured_again(
    gate: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [report(works=("a", "b", "c"))]
    slow = scaled(before[0], {"relive": 2.0}, "loop")
    slow["workloads"][2] = before[0]["workloads"][2]
    asked = []

    def again(name: str, works: Collection[str]) -> list[dict[str, Any]]:
        asked.append(sorted(works))
        new = scaled(report(name=name, works=sorted(works)), {"relive": 2.0}, "loop")
        new["workloads"][1:] = report(works=sorted(works))["workloads"][1:]  # b is as quick as before
        return [new]

    found = gate.slower(gate.compare(before, [slow]).timings, before, again)
    assert [each.key[1] for each in found] == ["a"]
    assert asked == [["a", "b"], ["a", "b"], ["a"], ["a"]]  # the median of 2.0, 1.0 and 1.0 is no longer suspect
    assert "add is measured again: a, b" in capsys.readouterr().out


def test_one_more_call_is_named(gate: Any) -> None:
    new = report()
    new["workloads"][0]["lines"][1]["calls"] += 1
    assert [str(each) for each in gate.compare([report()], [new]).calls] == [
        "add: 8 envs: relive, calls: expected 80 functions in Python and 40 built-in ones, came 81 functions in Python"
        " and 40 built-in ones"
    ]
    assert gate.compare([new], [report()]).calls == [], "fewer calls are no fault"
    waiting = [{**each, "name": "lanes"} for each in (report(), new)]
    assert gate.compare(waiting[:1], waiting[1:]).calls == [], "they depend on another process"
    peers = report()
    peers["workloads"][0]["lines"][3]["calls"] += 1
    assert gate.compare([report()], [peers]).calls == [], "another library's calls are its own"


def test_what_cannot_be_compared_is_said(gate: Any) -> None:
    slow = scaled(report(), {"relive": 9.0})
    other = gate.compare([report(cpu="other")], [slow])
    assert (other.timings, other.left) == ([], {"times were recorded on another machine, other, of": ["add"]})
    more = report()
    more["workloads"][0]["lines"][1]["calls"] += 1
    for environment in {"python": "3.12.1"}, {"packages": {"torch": "3"}}:
        seen = gate.compare([report(**environment)], [more])
        assert seen.calls == []
        assert seen.left == {"calls were recorded with other versions of Python or packages, of": ["add"]}
    assert gate.compare([report(python="3.11.2")], [more]).calls, "a patch of Python calls the same functions"
    assert gate.compare([], [slow]).left == {"nothing is recorded of": ["add"]}
    saves = report(name="saves")
    assert gate.compare([saves], [saves], quick=True).left == {"a quick run measures smaller sizes of": ["saves"]}
    assert gate.compare([saves], [saves]).timings


def test_counts_and_new_workloads_are_left_alone(gate: Any) -> None:
    new = scaled(report(works=("8 envs", "new")), {"relive": 9.0})
    new["workloads"][0]["unit"] = "count"
    assert gate.compare([report()], [new]).timings == []


def test_the_committed_tables_count_not_those_that_were_just_written(gate: Any, tmp_path: Path) -> None:
    file = tmp_path / "add.json"
    file.write_text(json.dumps(report()))
    assert gate.committed(tmp_path) == [report()], "outside a repository the files count"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for command in ["init", "-q"], ["add", "."], ["commit", "-qm", "tables"]:
        subprocess.run([*git, *command], check=True, capture_output=True)
    file.write_text(json.dumps(scaled(report(), {"relive": 9.0})))
    assert gate.committed(tmp_path) == [report()]


def test_the_recorded_results_pass_their_own_gate(gate: Any) -> None:
    recorded = gate.tables.reports()
    seen = gate.compare(recorded, recorded)
    assert len(seen.timings) > 100
    assert gate.slower(seen.timings, recorded, never) == seen.calls == []


def test_the_history_keeps_each_run_once(history: Any, tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    first, second = report(), report(commit="def")
    for each in first, second:
        each["workloads"][0]["lines"][1]["times_floor"] = 3.14159
        each["workloads"][0]["lines"][1]["after"]["times_floor"] = 2.0
    assert history.record([first], file) == 1
    assert history.record([first, second], file) == 1
    kept = history.entries(file)
    assert [entry["commit"] for entry in kept] == ["abc", "def"]
    assert kept[0]["rows"] == {
        "8 envs": {
            "floor": 3.142, "peer": 3.0, "best_peer": "fast", "after_floor": 2.0, "calls": 80.0, "builtins": 40.0,
        }
    }  # fmt: skip


def test_the_table_has_the_last_run_of_each_day_and_the_chart_all_of_them(history: Any) -> None:
    row = history.MAIN[0]

    def run(date: str, floor: float, cpu: str = "c") -> dict[str, Any]:
        rows = {row.workload: {"floor": floor, "peer": 2.0}}
        return {"report": row.report, "date": date, "commit": None, "cpu": cpu, "cores": 2, "rows": rows}

    past = [run("2026-01-01", 9.0), run("2026-01-01", 8.0), run("2026-01-02", 7.0), run("2026-01-02", 3.0, "d")]
    lines = history.table(past).splitlines()
    assert [entry.split(" | ")[:3] for entry in lines[2:]] == [
        ["| 2026-01-02", "d", "3.00 × · 2.00 ×"],
        ["| 2026-01-02", "c", "7.00 × · 2.00 ×"],
        ["| 2026-01-01", "c", "8.00 × · 2.00 ×"],
    ]
    chart = history.chart(past)
    assert chart.count("<circle") == 2 * 4
    assert "filled: c, hollow: d" in chart
    assert history.chart([]).count("<circle") == 0


def test_every_main_row_of_the_history_was_recorded(history: Any) -> None:
    past = history.entries()
    assert [row.title for row in history.MAIN if len(history.series(past, row)) < 2] == []
    newest = {entry["report"]: entry for entry in past}
    shown = [history.entry(report) for report in history.tables.reports()]
    assert [entry["report"] for entry in shown if entry["rows"] and newest.get(entry["report"]) != entry] == []


def test_the_readmes_rows_stand_beside_those_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import readme  # pyright: ignore[reportMissingImports]

    quoted = readme.tables.reports()
    now = copy.deepcopy(quoted)
    for each in now:
        each["environment"]["cpu"] = "another machine"
    for work in next(each for each in now if each["name"] == "minibatches")["workloads"]:
        work["lines"] = [each for each in work["lines"] if each["role"] != "peer"]
    shown = readme.beside(quoted, now).splitlines()
    page = (BENCHMARKS.parent / "README.md").read_text(encoding="utf-8")
    for start, row in zip((0, 5, 10), readme.headline.HEADLINES, strict=True):
        title, columns, before, after, gap = shown[start : start + 5]
        assert (title, gap) == (row.title, "")
        said = next(line for line in page.splitlines() if line.startswith(f"| {title} |"))
        cells = [cell for cell in said.replace("*", "").strip("| ").split(" | ")[1:] if cell]
        assert [cell.strip() for cell in re.split(r" {2,}", before.strip())] == ["README", *cells]
        assert after.split()[0] == "now"
        assert columns.index("relive") == before.index(cells[0]), "the columns are aligned"
    assert "none is installed" in shown[3]
    assert "another machine" in shown[-1]
