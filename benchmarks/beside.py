"""The table of one library beside relive: all workloads in which both were measured, from results/*.json.

A page has a place for it between `<!-- bench:beside_NAME -->` and `<!-- /bench:beside_NAME -->`.
"""

from collections.abc import Iterable
from typing import Any

import tables

PREFIX = "beside_"
LIBRARIES = ("tianshou", "torchrl")
"""Those whose pages have such a table."""


def rows(reports: Iterable[dict[str, Any]], library: str) -> list[list[str]]:
    """What was timed, our time, the library's fastest way, and how many times faster ours is."""
    found = []
    for report in reports:
        if report["name"].startswith(("compat_", "device", "import")):
            continue
        for work in report["workloads"]:
            if work.get("unit", report["unit"]) != "s":
                continue
            timed = [line for line in work["lines"] if line["status"] == "ok" and "median" in line]
            ours = [line for line in timed if line["role"] == "ours"]
            theirs = [line for line in timed if line["role"] == "peer" and line["label"].split(",")[0] == library]
            if ours and theirs:
                mine, other = (min(lines, key=lambda line: line["median"]) for lines in (ours, theirs))
                times = f"{tables.three_digits(other['median'] / mine['median'])} ×"
                what = f"{report['title']}: {work['name']}"
                found.append([what, f"**{tables.quantity(mine['median'])}**", tables.quantity(other["median"]), times])
    return found


def table(reports: Iterable[dict[str, Any]], library: str) -> str:
    """The table, and where its figures come from."""
    reports = list(reports)
    head = [["what is timed", "relive", library, "faster by"], ["---", "---:", "---:", "---:"]]
    used = [report for report in reports if rows([report], library)]
    commits = sorted({report["environment"].get("commit", "") for report in used} - {""})
    note = (
        f"Times are medians; where {library} has several ways, of the fastest. Made by `python benchmarks/run.py --only"
        f" {' '.join(report['name'] for report in used)}`, at commit{'s' * (len(commits) > 1)} {', '.join(commits)}."
    )
    return "\n".join([*(tables.row(cells) for cells in head + rows(reports, library)), "", note])
