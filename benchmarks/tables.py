"""Turns results/*.json into tables of markdown."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

Line = dict[str, Any]

RESULTS = Path(__file__).parent / "results"
ORDER = (
    "trainings",
    "gae",
    "add",
    "minibatches",
    "sequences",
    "replay_add",
    "replay_sample",
    "replay_sequences",
    "hindsight",
    "pixels",
    "capacity",
    "lanes",
    "saves",
    "mapped",
    "mapped_half",
    "import",
)
CALLS = "calls of one operation: functions written in Python + built-in functions"
AFTER = "in a loop → right after a learner's step"
MULTIPLES = "time of one operation, as a multiple of the floor"
DETAILS = "-details"  # ends the names of tables of multiples and calls
RANK = {"floor": 0, "ours": 1, "hand": 2, "peer": 3}
HAND = "hand-written: "  # begins the labels of what people write by hand


def reports(folder: Path = RESULTS, names: Collection[str] | None = None) -> list[dict[str, Any]]:
    """The named results in the folder, or all of them, the known ones first and in order."""
    paths = [path for path in sorted(folder.glob("*.json")) if names is None or path.stem in names]
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return sorted(found, key=lambda r: (ORDER.index(r["name"]) if r["name"] in ORDER else len(ORDER), r["name"]))


def three_digits(number: float) -> str:
    """Three significant digits without an exponent: 0.293, 2.93, 29.3, 293, 29300."""
    if number >= 100:
        return f"{round(number, 3 - len(str(int(number)))):.0f}"
    return f"{number:.{2 if number >= 1 else 3}f}" if number < 10 else f"{number:.1f}"


def quantity(seconds: float) -> str:
    """A time in the unit that suits it."""
    if seconds >= 1:
        return f"{three_digits(seconds)} s"
    if seconds >= 1e-3:
        return f"{three_digits(seconds * 1e3)} ms"
    return f"{three_digits(seconds * 1e6)} µs"


def time(line: Line, unit: str) -> str:
    """The time of one contender in one workload, or its count; the reason why it has none."""
    if line["status"] != "ok":
        return line["status"].split(":")[0]
    return f"{line['median']:.0f}" if unit == "count" else quantity(line["median"])


def multiple(line: Line, unit: str = "s") -> str:
    """How many times as long as the floor a contender takes; "" for the floor itself."""
    return f"{three_digits(line['times_floor'])} ×" if timed(line, unit) and "times_floor" in line else ""


def calls(line: Line, unit: str = "s") -> str:
    """How many functions a contender calls, those written in Python and the built-in ones."""
    return f"{line['calls']:.0f} + {line['builtins']:.0f}" if timed(line, unit) and "calls" in line else ""


def storage(line: Line, unit: str = "s") -> str:
    """The time that a training spent in the storage."""
    return quantity(line["storage"]) if timed(line, unit) and "storage" in line else ""


def timed(line: Line, unit: str) -> bool:
    """True if a contender ran, and what was measured is a time."""
    return line["status"] == "ok" and unit != "count" and line["role"] != "floor"


def floors_merged(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """A workload's lines with only the fastest of its floors."""
    floors = [line for line in workload["lines"] if line["role"] == "floor"]
    best = min(floors, key=lambda line: line.get("median", float("inf")), default=None)
    return [line for line in workload["lines"] if line["role"] != "floor" or line is best]


def typical(label: str, columns: list[dict[str, dict[str, Any]]]) -> float:
    """What orders the peers: the product of a line's medians; those that did not take part go last."""
    product = 1.0
    for column in columns:
        product *= column.get(label, {}).get("median", float("inf"))
    return product


def ratio(workload: dict[str, Any], role: str = "peer") -> str:
    """How many times faster than the best peer ours is, in a loop; or than the best hand-written way."""
    times = workload.get(f"best_{role}_over_ours")
    return f"{three_digits(times)} × ({workload[f'best_{role}'].removeprefix(HAND)})" if times else ""


def ratios(workload: dict[str, Any], role: str = "peer") -> str:
    """The same, and after a learner's step where that was measured; one peer is named once."""
    loop, later = ratio(workload, role), ratio(workload.get("after", {}), role)
    if not later:
        return loop
    same = workload[f"best_{role}"] == workload["after"][f"best_{role}"]
    return f"{loop.split(' (')[0] if same else loop} → {later}"


def side_by_side(figure: Callable[[Line, str], str]) -> Callable[[Line, str], str]:
    """The figure of a line in a loop, and beside it the one after a learner's step where that was measured."""

    def both(line: Line, unit: str = "s") -> str:
        loop = figure(line, unit)
        later = figure(line | line["after"], unit) if loop and "after" in line else ""
        return f"{loop} → {later}" if later else loop

    return both


def machine(environment: dict[str, Any]) -> str:
    """When and where the figures were measured, to follow "Measured on"."""
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    gpu = f"{environment['gpu']}, CUDA {environment['cuda']}, " if "gpu" in environment else ""
    others = environment.get("load", 0.0) > 2 * environment["cores"]
    load = f" that other work kept busy (load {environment['load']:.0f})" if others else ""
    return (
        f"{environment['date']} on {gpu}{environment['cpu']}, {environment['cores']} cores{load}"
        + (f", at commit {environment['commit']}" if environment.get("commit") else "")
        + f"; {environment['system']}, Python {environment['python']}, {packages}"
    )


def versions(report: dict[str, Any]) -> str:
    """The peers that took part, with their versions."""
    lines = [line for workload in report["workloads"] for line in workload["lines"]]
    peers = {line["package"]: line["version"] for line in lines if line["role"] == "peer" and "version" in line}
    return ", ".join(f"{name} {version}" for name, version in peers.items())


def remarks(report: dict[str, Any]) -> list[str]:
    """What to know about single lines: results that differ, peers that did not take part."""
    seen: dict[str, str] = {}
    for workload in report["workloads"]:
        for line in workload["lines"]:
            if line.get("check", "agrees") != "agrees":
                seen.setdefault(line["label"], f"{line['label']}: {line['check']}.")
            elif line["status"] != "ok" and line["role"] == "peer":
                seen.setdefault(line["label"], f"{line['label']} {line['status'].rstrip('.')}.")
    return list(seen.values())


def row(cells: Collection[str]) -> str:
    """One row of a table."""
    return "| " + " | ".join(cells) + " |"


def ordered(report: dict[str, Any]) -> dict[str, str]:
    """The role of each line by its label: the floor, ours, then the peers, the faster ones first."""
    lines = [floors_merged(workload) for workload in report["workloads"]]
    columns = [{line["label"]: line for line in column} for column in lines]
    roles = {line["label"]: line["role"] for column in lines for line in column}
    first = list(roles)
    rank = {label: (RANK[role], first.index(label) if role != "peer" else 0) for label, role in roles.items()}
    return {label: roles[label] for label in sorted(roles, key=lambda label: (*rank[label], typical(label, columns)))}


def grid(report: dict[str, Any], title: str, figure: Callable[[Line, str], str], *, leads: bool = False) -> list[str]:
    """A table of one figure a cell: a row for each line, a column for each workload; without what has no figures.

    ``leads`` are last rows, with how many times faster than the best peer, and the best hand-written way, ours is.
    """
    columns: dict[str, dict[str, str]] = {}
    for workload in report["workloads"]:
        unit = workload.get("unit", "s")
        shown = {line["label"]: figure(line, unit) for line in floors_merged(workload)}
        if any(shown.values()):
            columns[workload["name"]] = shown
    if not columns:
        return []
    roles = ordered(report)
    ours = next((label for label, role in roles.items() if role == "ours"), "")
    out = [row([title, *columns]), "|---|" + "---:|" * len(columns)]
    for label, role in roles.items():
        cells = [column.get(label, "") for column in columns.values()]
        if any(cells):
            name = f"floor: {label}" if role == "floor" else label
            out.append(row([f"**{text}**" if label == ours and text else text for text in (name, *cells)]))
    shown = [workload for workload in report["workloads"] if workload["name"] in columns]
    for role, lead in {"peer": "best peer", "hand": "hand-written"}.items() if leads else ():
        last = [ratios(workload, role) for workload in shown]
        out += [row([f"{lead} / {ours}", *last])] if any(last) else []
    return out


def headed(report: dict[str, Any], title: str) -> str:
    """The title of a table, which says what two times in a cell are."""
    return f"{title}: {AFTER}" if any("after" in workload for workload in report["workloads"]) else title


def table(report: dict[str, Any]) -> str:
    """The markdown of one report: the times, also those after a learner's step; of trainings those in the storage."""
    stored = grid(report, "its time in the storage", storage, leads=True)
    out = grid(report, headed(report, report["title"]), side_by_side(time), leads=not stored)
    out += ["", *stored] if stored else []
    peers = versions(report)
    foot = ["Medians of interleaved rounds in one run, one thread.", *remarks(report)]
    foot += [f"Peers: {peers}."] if peers else []
    command = report.get("command", f"python benchmarks/run.py --only {report['name']}")
    measured = f"Measured on {machine(report['environment'])}. Made by `{command}`."
    return "\n".join([*out, "", measured, "", " ".join(foot)])


def details(report: dict[str, Any]) -> str:
    """The markdown of what stands behind the times: multiples of the floor, and calls of functions; "" for none."""
    tables = [
        grid(report, headed(report, MULTIPLES), side_by_side(multiple)),
        grid(report, CALLS, calls),
    ]
    return "\n\n".join("\n".join(lines) for lines in tables if lines)
