"""Whether a new run is slower than the tables of the last commit: what `run.py` asks at its end.

Machines are noisy, and are noisy for all contenders alike. So no time is compared with a recorded time. A line of ours
is compared with the two *yardsticks* that were measured in the same rounds: the floor, and the fastest other library.
It counts as slower by what both of them say, and only beyond `TOLERANCE`. Each figure is the least of its samples: work
of other programs can only add to a time. What still looks slower is measured again, up to `TRIES` times in all.

Calls of functions do not depend on the machine. One more call than recorded is one too many.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tables

TOLERANCE = 1.5
"""How many times as long as recorded a line may take."""
TRIES = 3
SMALLER = ("trainings", "saves", "mapped", "mapped_half")
"""What `--quick` measures in smaller sizes, so that nothing recorded can be compared with it."""

Report = dict[str, Any]
Line = dict[str, Any]


@dataclass(frozen=True)
class Slower:
    """A row that is slower than recorded, or calls more functions: what was expected of it, and what came."""

    report: str
    workload: str
    line: str
    kind: str  # "in a loop", "after a learner's step" or "calls"
    expected: str
    came: str

    def __str__(self) -> str:
        return f"{self.report}: {self.workload}: {self.line}, {self.kind}: expected {self.expected}, came {self.came}"


def committed(folder: Path = tables.RESULTS) -> list[Report]:
    """The reports in a folder as the last commit has them; as the files are, outside a repository."""
    git = ["git", "-C", str(folder)]
    found: list[Report] = []
    for report in tables.reports(folder):
        command = [*git, "show", f"HEAD:./{report['name']}.json"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found.append(json.loads(done.stdout))
        except (OSError, subprocess.CalledProcessError):
            found.append(report)
    return found


def machine(report: Report) -> tuple[Any, ...]:
    """What has to be equal before times are compared."""
    return tuple(report["environment"].get(name) for name in ("cpu", "cores"))


def program(report: Report) -> tuple[Any, ...]:
    """What has to be equal before calls are compared: the functions of these are counted, too."""
    environment = report["environment"]
    return environment["python"].rsplit(".", 1)[0], environment["packages"]


def kinds(work: Report) -> Iterator[tuple[str, dict[str, Line]]]:
    """The lines that were measured, by label, in a loop and after a learner's step."""
    lines = [line for line in tables.floors_merged(work) if line["status"] == "ok"]
    yield "in a loop", {line["label"]: line for line in lines}
    yield (
        "after a learner's step",
        {line["label"]: line["after"] | {"role": line["role"]} for line in lines if "after" in line},
    )


def least(line: Line) -> float:
    """The time that other work on the machine has touched least."""
    return line.get("least", line.get("q1", line["median"]))


def fastest(lines: dict[str, Line], role: str) -> str | None:
    """The label of the fastest line of that role."""
    return min(
        (label for label in lines if lines[label]["role"] == role), key=lambda label: least(lines[label]), default=None
    )


def yardsticks(before: dict[str, Line], now: dict[str, Line]) -> dict[str, tuple[Line, Line]]:
    """The floor of each run, and in both the peer that was the fastest when the table was recorded."""
    floor, peer = (fastest(before, "floor"), fastest(now, "floor")), (fastest(before, "peer"),) * 2
    labels = {"the floor": floor, "the fastest other library": peer}
    return {name: (before[a], now[b]) for name, (a, b) in labels.items() if a and b and b in now}


def slowdown(before: dict[str, float], now: dict[str, float]) -> float:
    """How many times as long as recorded a line takes, by the yardstick that is the mildest; 0 without any."""
    return min((now[name] / before[name] for name in before), default=0.0)


def said(ratios: dict[str, float], allowed: float = 1.0) -> str:
    """The ratios of a line in words."""
    return " and ".join(f"{tables.three_digits(ratio * allowed)} × {name}" for name, ratio in ratios.items())


def timed(name: str, before: Report, now: Report) -> Iterator[Slower]:
    """Our lines of one workload that take too long by all yardsticks."""
    for (kind, old), (_, new) in zip(kinds(before), kinds(now), strict=True):
        by = yardsticks(old, new)
        for label in old:
            if old[label]["role"] == "ours" and label in new:
                expected = {stick: least(old[label]) / least(a) for stick, (a, _) in by.items()}
                came = {stick: least(new[label]) / least(b) for stick, (_, b) in by.items()}
                if slowdown(expected, came) > TOLERANCE:
                    most = f"at most {said(expected, TOLERANCE)}, for {said(expected)} were recorded"
                    yield Slower(name, now["name"], label, kind, most, said(came))


def called(name: str, before: Report, now: Report) -> Iterator[Slower]:
    """Our lines of one workload that call more functions than recorded."""
    (_, old), (_, new) = next(kinds(before)), next(kinds(now))
    for label, line in old.items():
        if line["role"] == "ours" and "calls" in line and "calls" in new.get(label, ()):
            counts = [{key: round(each[key], 2) for key in ("calls", "builtins")} for each in (line, new[label])]
            if any(counts[1][key] > counts[0][key] for key in counts[0]):
                words = [
                    f"{count['calls']:g} functions in Python and {count['builtins']:g} built-in ones"
                    for count in counts
                ]
                yield Slower(name, now["name"], label, "calls", *words)


def slower(before: Iterable[Report], now: Iterable[Report], *, quick: bool = False) -> tuple[list[Slower], list[str]]:
    """What is slower than recorded, and sentences on what could not be compared."""
    recorded = {report["name"]: report for report in before}
    found: list[Slower] = []
    left: dict[str, list[str]] = {}
    for new in now:
        name, old = new["name"], recorded.get(new["name"])
        if old is None:
            left.setdefault("nothing is recorded of", []).append(name)
            continue
        if quick and name in SMALLER:
            left.setdefault("a quick run measures smaller sizes of", []).append(name)
            continue
        works = {work["name"]: work for work in old["workloads"]}
        pairs = [(works[work["name"]], work) for work in new["workloads"] if work["name"] in works]
        pairs = [(a, b) for a, b in pairs if "count" not in (a.get("unit"), b.get("unit"))]
        if machine(old) == machine(new):
            found += [each for a, b in pairs for each in timed(name, a, b)]
        else:
            left.setdefault(f"times were recorded on another machine, {old['environment']['cpu']}, of", []).append(name)
        if program(old) == program(new):
            found += [each for a, b in pairs for each in called(name, a, b)]
        else:
            left.setdefault("calls were recorded with other versions of Python or packages, of", []).append(name)
    return found, [f"{why}: {', '.join(names)}" for why, names in left.items()]


Again = Callable[[str, Collection[str]], Sequence[Report]]
"""Measures workloads of a report once more."""


def confirmed(found: Sequence[Slower], before: Sequence[Report], again: Again, *, quick: bool = False) -> list[Slower]:
    """What is slower each time that it is measured again."""
    for _ in range(TRIES - 1):
        names = list(dict.fromkeys(each.report for each in found if each.kind != "calls"))
        if not names:
            break
        rows = {(each.report, each.workload, each.line, each.kind) for each in found}
        still = [each for each in found if each.kind == "calls"]
        for name in names:
            works = {each.workload for each in found if each.report == name}
            print(f"\ngate: {name} is measured again: {', '.join(sorted(works))}")
            seen, _ = slower(before, [report for report in again(name, works) if report["name"] == name], quick=quick)
            still += [s for s in seen if s.kind != "calls" and (s.report, s.workload, s.line, s.kind) in rows]
        found = still
    return list(found)


def told(found: Sequence[Slower], left: Sequence[str], compared: int) -> str:
    """The verdict, as it is printed."""
    lines = [f"gate: not compared: {why}" for why in left]
    lines += [f"gate: SLOWER: {each}" for each in found]
    verdict = f"{len(found)} figures are worse than the committed tables" if found else "no figure is worse"
    return "\n".join(["", *lines, f"gate: {verdict}, of {compared} reports compared"])
