"""Turns results/*.json into tables of markdown."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

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
CALLS = "After each time: how many functions written in Python one operation calls, + how many built-in ones."
RANK = {"floor": 0, "ours": 1, "peer": 2}


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


def cell(line: dict[str, Any] | None, unit: str) -> str:
    """One contender in one workload."""
    if line is None:
        return ""
    if line["status"] != "ok":
        return line["status"].split(":")[0]
    if unit == "count":
        return f"{line['median']:.0f}"
    text = quantity(line["median"])
    if line["role"] != "floor" and "times_floor" in line:
        text += f" ({three_digits(line['times_floor'])} ×)"
    if "storage" in line:
        text += f", storage {quantity(line['storage'])}"
    if "calls" in line:
        text += f" {line['calls']:.0f} + {line['builtins']:.0f}"
    return text


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


def ratio(workload: dict[str, Any]) -> str:
    """How many times faster than the best peer ours is."""
    times = workload.get("best_peer_over_ours")
    return f"{three_digits(times)} × ({workload['best_peer']})" if times else ""


def machine(environment: dict[str, Any]) -> str:
    """One sentence on where and when the figures were measured."""
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    return (
        f"{environment['cpu']}, {environment['cores']} cores, {environment['system']},"
        f" Python {environment['python']}, {packages}; {environment['date']}"
        + (f", commit {environment['commit']}" if environment.get("commit") else "")
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


def counted(report: dict[str, Any]) -> bool:
    """Whether function calls were counted."""
    return any("calls" in line for workload in report["workloads"] for line in workload["lines"])


def table(report: dict[str, Any]) -> str:
    """The markdown of one report."""
    workloads = report["workloads"]
    lines = [floors_merged(workload) for workload in workloads]
    columns = [{line["label"]: line for line in column} for column in lines]
    roles = {line["label"]: line["role"] for column in lines for line in column}
    first = list(roles)
    ours = next((label for label in first if roles[label] == "ours"), "")
    rank = {label: (RANK[role], first.index(label) if role != "peer" else 0) for label, role in roles.items()}
    labels = sorted(roles, key=lambda label: (*rank[label], typical(label, columns)))

    def row(cells: list[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    out = [row([report["title"], *(workload["name"] for workload in workloads)])]
    out.append("|---|" + "---:|" * len(workloads))
    for label in labels:
        shown = [cell(c.get(label), w.get("unit", "s")) for c, w in zip(columns, workloads, strict=True)]
        name = f"floor: {label}" if roles[label] == "floor" else label
        out.append(row([f"**{text}**" if label == ours and text else text for text in (name, *shown)]))
    ratios = [ratio(workload) for workload in workloads]
    if any(ratios):
        what = "in storage, " if any("storage" in line for column in lines for line in column) else ""
        out.append(row([f"{what}best peer / {ours}", *ratios]))
    foot = "Medians of interleaved rounds in one run, one thread"
    foot += "; in brackets, multiples of the floor." if "floor" in roles.values() else "."
    foot += f" {CALLS}" if counted(report) else ""
    peers = versions(report)
    foot = " ".join([foot, *remarks(report), *([f"Peers: {peers}."] if peers else [])])
    command = f"python benchmarks/run.py --only {report['name']}"
    return "\n".join([*out, "", f"{foot} Made by `{command}` on {machine(report['environment'])}."])
