"""Whether a new run is slower than the tables of the last commit: what `run.py` asks at its end.

Machines are noisy, and are noisy for all contenders alike. So no time is compared with a recorded time. A line of ours
is compared with the two *yardsticks* that were measured in the same rounds: the floor, and the fastest other library.
It counts as slower by what both of them say. Each figure is the least of its samples: work of other programs can only
add to a time. What takes more than `SUSPECT` times as long as recorded is measured again, up to `TRIES` times in all.
It is reported if the median of all tries is beyond `TOLERANCE`.

Calls of functions do not depend on the machine. One more call than recorded is one too many.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tables

TOLERANCE = 1.5
"""How many times as long as recorded a line may take."""
SUSPECT = 1.25
"""How many times as long it may take before it is measured again."""
TRIES = 5
SMALLER = ("trainings", "saves", "mapped", "mapped_half")
"""What `--quick` measures in smaller sizes, so that nothing recorded can be compared with it."""

WAITING = ("lanes", "slots", "apex")
"""What calls more or fewer functions each time, because it waits for another process or thread."""

Report = dict[str, Any]
Line = dict[str, Any]


Key = tuple[str, str, str, str]
"""A report, a workload, a line, and "in a loop", "after a learner's step" or "calls"."""


@dataclass(frozen=True)
class Slower:
    """A row that is slower than recorded, or calls more functions: what was expected of it, and what came."""

    key: Key
    expected: str
    came: str

    def __str__(self) -> str:
        report, workload, line, kind = self.key
        return f"{report}: {workload}: {line}, {kind}: expected {self.expected}, came {self.came}"


@dataclass(frozen=True)
class Timing:
    """How many times the time of each yardstick a line of ours took when it was recorded, and how many it takes now."""

    key: Key
    before: dict[str, float]
    now: dict[str, float]

    @property
    def slowdown(self) -> float:
        """How many times as long as recorded it takes, by the yardstick that is the mildest; 0 without any."""
        return min((self.now[name] / self.before[name] for name in self.now), default=0.0)


def middle(tries: Sequence[Timing]) -> Timing:
    """The median of several tries, by each yardstick that all of them have."""
    names = [name for name in tries[0].before if all(name in each.now for each in tries)]
    return replace(tries[0], now={name: statistics.median(each.now[name] for each in tries) for name in names})


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


def said(ratios: dict[str, float], allowed: float = 1.0) -> str:
    """The ratios of a line in words."""
    return " and ".join(f"{tables.three_digits(ratio * allowed)} × {name}" for name, ratio in ratios.items())


def timed(name: str, before: Report, now: Report) -> Iterator[Timing]:
    """Our lines of one workload."""
    for (kind, old), (_, new) in zip(kinds(before), kinds(now), strict=True):
        by = yardsticks(old, new)
        for label in old:
            if old[label]["role"] == "ours" and label in new:
                recorded = {stick: least(old[label]) / least(a) for stick, (a, _) in by.items()}
                came = {stick: least(new[label]) / least(b) for stick, (_, b) in by.items()}
                yield Timing((name, now["name"], label, kind), recorded, came)


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
                yield Slower((name, now["name"], label, "calls"), *words)


@dataclass
class Comparison:
    """A new run beside the recorded one."""

    timings: list[Timing] = field(default_factory=list)
    calls: list[Slower] = field(default_factory=list)
    left: dict[str, list[str]] = field(default_factory=dict)  # why not -> the reports that could not be compared


def compare(before: Iterable[Report], now: Iterable[Report], *, quick: bool = False) -> Comparison:
    """All that can be compared of two runs."""
    recorded, found = {report["name"]: report for report in before}, Comparison()

    def leave(why: str, name: str) -> None:
        found.left.setdefault(why, []).append(name)

    for new in now:
        name, old = new["name"], recorded.get(new["name"])
        if old is None:
            leave("nothing is recorded of", name)
            continue
        if quick and name in SMALLER:
            leave("a quick run measures smaller sizes of", name)
            continue
        works = {work["name"]: work for work in old["workloads"]}
        pairs = [(works[work["name"]], work) for work in new["workloads"] if work["name"] in works]
        pairs = [(a, b) for a, b in pairs if "count" not in (a.get("unit"), b.get("unit"))]
        if machine(old) == machine(new):
            found.timings += [each for a, b in pairs for each in timed(name, a, b)]
        else:
            leave(f"times were recorded on another machine, {old['environment']['cpu']}, of", name)
        if name in WAITING:
            continue
        if program(old) == program(new):
            found.calls += [each for a, b in pairs for each in called(name, a, b)]
        else:
            leave("calls were recorded with other versions of Python or packages, of", name)
    return found


Again = Callable[[str, Collection[str]], Sequence[Report]]
"""Measures workloads of a report once more."""


def slower(timings: Iterable[Timing], before: Sequence[Report], again: Again) -> list[Slower]:
    """The lines that are slower than recorded, also when they are measured again."""
    tries = {each.key: [each] for each in timings if each.slowdown > SUSPECT}
    for _ in range(TRIES - 1):
        for name in dict.fromkeys(report for report, *_ in tries):
            works = {work for report, work, *_ in tries if report == name}
            print(f"\ngate: {name} is measured again: {', '.join(sorted(works))}")
            for each in compare(before, again(name, works)).timings:
                if each.key in tries:
                    tries[each.key].append(each)
        tries = {key: found for key, found in tries.items() if middle(found).slowdown > SUSPECT}
    worse = [each for each in map(middle, tries.values()) if each.slowdown > TOLERANCE]
    return [
        Slower(
            each.key,
            f"at most {said({name: each.before[name] for name in each.now}, TOLERANCE)},"
            f" for {said({name: each.before[name] for name in each.now})} were recorded",
            said(each.now),
        )
        for each in worse
    ]


def told(found: Sequence[Slower], left: Mapping[str, Sequence[str]], times: int) -> str:
    """The verdict, as it is printed."""
    lines = [f"gate: not compared: {why}: {', '.join(names)}" for why, names in left.items()]
    lines += [f"gate: SLOWER: {each}" for each in found]
    verdict = f"{len(found)} figures are worse than the committed tables" if found else "no figure is worse"
    return "\n".join(["", *lines, f"gate: {verdict}; times compared: {times}"])
