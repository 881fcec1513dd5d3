"""The README's headline figures and their chart, from results/*.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import ink
import tables

CHART = Path(__file__).parent.parent / "docs" / "assets" / "benchmarks.svg"


@dataclass(frozen=True)
class Headline:
    """One figure of the README: a workload of a report, and what it is called there."""

    report: str
    workload: str
    title: str


HEADLINES = (
    Headline("minibatches", "(24, 4096), obs 48", "PPO: one of 4 minibatches of 24 steps in 4096 environments"),
    Headline("replay_sample", "uniform", "DQN, SAC: a batch of 256 out of 1 M transitions"),
    Headline("replay_sequences", "1 M", "R2D2: a batch of 64 sequences of 80 steps, out of 1 M steps"),
)

Report = dict[str, Any]
Line = dict[str, Any]


def workload(headline: Headline, reports: Mapping[str, Report]) -> Report:
    """The workload that a headline is about."""
    return next(work for work in reports[headline.report]["workloads"] if work["name"] == headline.workload)


def fastest(work: Report) -> list[Line]:
    """The floor, our line, the fastest hand-written one, then that of each peer, the faster ones first."""
    measured = [line for line in tables.floors_merged(work) if "median" in line]
    floor = [line for line in measured if line["role"] == "floor"]
    ours = [line for line in measured if line["role"] == "ours"]
    hand = sorted((line for line in measured if line["role"] == "hand"), key=lambda line: line["median"])
    peers = sorted((line for line in measured if line["role"] == "peer"), key=lambda line: line["median"])
    first = {line["package"]: line for line in reversed(peers)}  # so the fastest of a package stays
    return [*floor, *ours[:1], *hand[:1], *sorted(first.values(), key=lambda line: line["median"])]


ROLES = {"peer": ("Another library", "No other library"), "hand": ("A hand-written way", "No hand-written way")}


def slower(reports: Sequence[Report]) -> list[str]:
    """Sentences that say in how many workloads a peer, or a hand-written way, is faster than we are, and where."""
    works = [(report, work) for report in reports if report["name"] in tables.ORDER for work in report["workloads"]]
    said: list[str] = []
    for role, (one, none) in ROLES.items():
        ratio = f"best_{role}_over_ours"
        compared = [(r, work) for r, work in works if work.get(ratio) and work.get("unit") != "count"]
        lost = [report["name"] for report, work in compared if work[ratio] < 1]
        where = ", ".join(f"`{name}`" for name in dict.fromkeys(lost))
        if lost:
            said.append(f"{one} is faster in {len(lost)} of the {len(compared)} workloads of the main tables: {where}.")
        elif compared:
            said.append(f"{none} is faster in any of the {len(compared)} workloads of the main tables.")
    return said


COLUMNS = ("right after a learner's step", "relive", "`reuse=True`", "hand-written torch", "fastest other library")
REUSE = ", reuse=True"


def later(line: Line) -> Line:
    """The figures of a line right after a learner's step, or in a loop where that was not measured."""
    return line | line.get("after", {})


def cells(headline: Headline, reports: Mapping[str, Report]) -> list[str]:
    """The figures of one row, and how many times as long as ours others take; empty where nothing was measured."""
    work = workload(headline, reports)
    lines = [later(line) for line in work["lines"] if "median" in line]
    ours = next((line for line in lines if line["role"] == "ours"), None)
    again = next((line for line in lines if line["role"] == "ours" and line["label"].endswith(REUSE)), None)

    def best(role: str) -> str:
        others = [line for line in lines if line["role"] == role]
        if not others:
            return "" if role == "hand" else "none is installed"
        line = min(others, key=lambda line: line["median"])
        times = f", {tables.three_digits(line['median'] / ours['median'])} ×" if ours else ""
        return f"{tables.time(line, 's')} ({line['label'].removeprefix(tables.HAND)}){times}"

    found = [f"**{tables.time(ours, 's')}**" if ours else "failed", tables.time(again, "s") if again else ""]
    return [*found, best("hand"), best("peer")]


def figures(reports: Sequence[Report]) -> str:
    """The markdown of the headline figures."""
    by_name = {report["name"]: report for report in reports}
    out = [tables.row(COLUMNS), "|---|---:|---:|---:|---:|"]
    out += [tables.row([headline.title, *cells(headline, by_name)]) for headline in HEADLINES]
    first = by_name[HEADLINES[0].report]
    loop = [tables.ratio(workload(headline, by_name)) for headline in HEADLINES]
    foot = [
        "Times are medians, the reading of a batch's fields as torch tensors included; × is how many times as long as"
        " relive's default. Each call follows an update of a small network, as in a training: then neither code nor"
        " data is in the processor's caches.",
        " ".join(
            [
                f"In a loop of nothing else the fastest other library takes {', '.join(filter(None, loop))}.",
                *slower(reports),
                LAST_OF_CPPRB,
            ]
        ),
        f"Measured on {tables.machine(first['environment'])}. `make bench-readme` measures the three rows again.",
    ]
    return "\n".join([*out, "", *foot])


LAST_OF_CPPRB = "cpprb's last release is of June 2024, its last commit of December 2024."


LABELS, BARS, ROW, TITLE, MARGIN, WIDTH = 190, 430, 20, 34, 16, 720  # in pixels; labels end where bars begin
COLORS = {"floor": ink.GREY, **{role: ink.ink(role) for role in ("ours", "hand", "peer")}}


def bar(line: Line, y: int, scale: float) -> list[str]:
    """One line of a panel: its name, its bar, its time."""
    length = max(1.0, line["median"] * scale)
    known = {"floor": "memory floor", "ours": "relive", "hand": "hand-written torch"}
    name: str = known.get(line["role"]) or line["label"]
    weight = ' font-weight="bold"' if line["role"] == "ours" else ""
    middle = y + ROW // 2 + 4
    return [
        f'<text x="{LABELS - 8}" y="{middle}" text-anchor="end"{weight}>{escape(name)}</text>',
        f'<rect x="{LABELS}" y="{y + 3}" width="{length:.1f}" height="{ROW - 6}" fill="{COLORS[line["role"]]}"/>',
        f'<text x="{LABELS + length + 6:.1f}" y="{middle}"{weight}>{tables.quantity(line["median"])}</text>',
    ]


def chart(reports: Sequence[Report]) -> str:
    """The headline figures as an SVG: a panel for each, a bar for each library, each panel with a scale of its own."""
    by_name = {report["name"]: report for report in reports}
    parts: list[str] = []
    y = MARGIN
    for headline in HEADLINES:
        lines = fastest(workload(headline, by_name))
        parts.append(f'<text x="{MARGIN}" y="{y + 18}" font-weight="bold">{escape(headline.title)}</text>')
        y += TITLE - 6
        scale = BARS / max(line["median"] for line in lines)
        for line in lines:
            parts += bar(line, y, scale)
            y += ROW
        y += MARGIN
    return "\n".join([*ink.head(WIDTH, y, 13), *parts, "</svg>"]) + "\n"
