"""The history of the figures: a line of `history.jsonl` for each report of each recorded run, and what shows them.

A line has the machine, the date, the commit, and for each workload how many times the floor our line took, how many
times faster than the fastest other library it was, and how many functions it called. `run.py` adds lines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import ink
import tables

FILE = Path(__file__).parent / "history.jsonl"
CHART = Path(__file__).parent.parent / "docs" / "assets" / "benchmarks-history.svg"

Entry = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A workload whose history is shown, and what it is called there."""

    report: str
    workload: str
    title: str


MAIN = (
    Row("gae", "(2048, 8)", "GAE, 8 envs"),
    Row("add", "8 envs, obs 17", "add a step, 8 envs"),
    Row("minibatches", "(24, 4096), obs 48", "PPO minibatch, 4096 envs"),
    Row("replay_sample", "uniform", "256 of 1 M transitions"),
    Row("replay_sample", "prioritized, with update", "the same, prioritized"),
    Row("replay_sequences", "1 M", "64 sequences of 80"),
)


def figures(work: dict[str, Any]) -> dict[str, Any]:
    """What is kept of one workload; empty if ours was compared with nothing."""
    ours = next((line for line in work["lines"] if line["role"] == "ours" and line["status"] == "ok"), None)
    if ours is None or work.get("unit") == "count":
        return {}
    later = ours.get("after") or {}
    found = {
        "floor": ours.get("times_floor"),
        "peer": work.get("best_peer_over_ours"),
        "best_peer": work.get("best_peer"),
        "after_floor": later.get("times_floor"),
        "after_peer": work.get("after", {}).get("best_peer_over_ours"),
        "calls": ours.get("calls"),
        "builtins": ours.get("builtins"),
    }
    if found["floor"] is None and found["peer"] is None:
        return {}
    rounded = {name: float(f"{x:.4g}") if isinstance(x, float) else x for name, x in found.items()}
    return {name: x for name, x in rounded.items() if x is not None}


def entry(report: dict[str, Any]) -> Entry:
    """The line of one report."""
    environment = report["environment"]
    rows = {work["name"]: figures(work) for work in report["workloads"]}
    kept = {name: environment.get(name) for name in ("date", "commit", "cpu", "cores")}
    return {"report": report["name"], **kept, "rows": {name: row for name, row in rows.items() if row}}


def entries(file: Path = FILE) -> list[Entry]:
    """All lines, the oldest first."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def record(reports: Iterable[dict[str, Any]], file: Path = FILE) -> int:
    """Adds a line for each report that has rows and is not there yet; returns how many."""
    known = entries(file)
    new = [line for line in map(entry, reports) if line["rows"] and line not in known]
    with file.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in new)
    return len(new)


def series(history: Sequence[Entry], row: Row) -> list[tuple[Entry, dict[str, Any]]]:
    """The runs that measured a row, the oldest first, with its figures."""
    found = ((line, line["rows"].get(row.workload)) for line in history if line["report"] == row.report)
    return [(line, figures) for line, figures in found if figures]


def cell(figures: dict[str, Any] | None) -> str:
    """The multiple of the floor, and the lead over the fastest other library."""
    return (
        " · ".join(f"{tables.three_digits(figures[name])} ×" for name in ("floor", "peer") if name in figures or ())
        if figures
        else ""
    )


def table(history: Sequence[Entry]) -> str:
    """The markdown of the main rows: one line for each day and machine, the newest first, the last figures of it."""
    days: dict[tuple[str, str], dict[Row, dict[str, Any]]] = {}
    for row in MAIN:
        for line, found in series(history, row):
            days.setdefault((line["date"], line["cpu"]), {})[row] = found
    out = [tables.row(["recorded", "machine", *(row.title for row in MAIN)]), "|---|---|" + "---:|" * len(MAIN)]
    for (date, cpu), found in sorted(days.items(), reverse=True):
        out.append(tables.row([date, cpu, *(cell(found.get(row)) for row in MAIN)]))
    return "\n".join(out)


WIDTH, HEIGHT, ACROSS, LEFT, TOP, GAP = 216, 108, 3, 44, 52, 62  # in pixels, of a panel and around it
OURS, PEER = ink.ink("ours"), ink.ink("peer")


def panel(found: Sequence[tuple[Entry, dict[str, Any]]], title: str, left: int, top: int) -> list[str]:
    """One row's history: multiples of the floor of relive, and of the fastest other library, on a scale of powers."""
    both = [(line, f) for line, f in found if "floor" in f and "peer" in f]
    runs = [line for line, _ in both]
    ours, peer = [f["floor"] for _, f in both], [f["floor"] * f["peer"] for _, f in both]
    lowest, highest = min([1.0, *ours, *peer]), max([10.0, *ours, *peer])

    def at(number: int, times: float) -> tuple[float, float]:
        x = left + 8 + (WIDTH - 16) * number / max(len(runs) - 1, 1)
        return x, top + HEIGHT * (1 - math.log(times / lowest) / math.log(highest / lowest))

    parts = [f'<text x="{left}" y="{top - 10}" font-weight="bold">{escape(title)}</text>']
    for power in range(math.ceil(math.log10(lowest)), math.floor(math.log10(highest)) + 1):
        y = at(0, 10.0**power)[1]
        parts.append(
            f'<line x1="{left}" x2="{left + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="{ink.GREY}" stroke-width="0.5"/>'
        )
        parts.append(f'<text x="{left - 4}" y="{y + 4:.1f}" text-anchor="end">{10**power:g} ×</text>')
    for color, line in ((PEER, peer), (OURS, ours)):
        points = [at(number, times) for number, times in enumerate(line)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        for (x, y), run in zip(points, runs, strict=True):
            fill = color if run["cpu"] == runs[0]["cpu"] else ink.ink("paper")
            told = f"<title>{escape(' '.join(filter(None, (run['date'], run['commit'], run['cpu']))))}</title>"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{fill}" stroke="{color}">{told}</circle>')
    if runs:
        y = top + HEIGHT + 16
        parts.append(f'<text x="{left}" y="{y}">{runs[0]["date"]}</text>')
        parts.append(f'<text x="{left + WIDTH}" y="{y}" text-anchor="end">{runs[-1]["date"]}</text>')
    return parts


def chart(history: Sequence[Entry]) -> str:
    """The history of the main rows as an SVG: a panel for each, a point for each recorded run."""
    cpus = list(dict.fromkeys(line["cpu"] for row in MAIN for line, _ in series(history, row)))
    parts: list[str] = []
    for k, row in enumerate(MAIN):
        left, top = LEFT + k % ACROSS * (WIDTH + GAP), TOP + k // ACROSS * (HEIGHT + GAP)
        parts += panel(series(history, row), row.title, left, top)
    width, height = LEFT + ACROSS * (WIDTH + GAP) - GAP + 16, TOP + -(-len(MAIN) // ACROSS) * (HEIGHT + GAP)
    names = {OURS: "relive", PEER: "the fastest other library"}
    bold = [f'<tspan fill="{color}" font-weight="bold">{name}</tspan>' for color, name in names.items()]
    legend = f"{' and '.join(bold)}, as multiples of the floor"
    if len(cpus) > 1:
        legend += escape(f"; filled: {cpus[0]}, hollow: {', '.join(cpus[1:])}")
    return (
        "\n".join([*ink.head(width, height, 12), f'<text x="{LEFT}" y="20">{legend}</text>', *parts, "</svg>"]) + "\n"
    )
