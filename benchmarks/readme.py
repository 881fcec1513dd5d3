"""Measures the README's three figures again, in about a minute, and prints them beside what it says.

python benchmarks/readme.py    or `make bench-readme`; it changes no recorded result
"""

import importlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import headline
import run
import tables

SECONDS = 8.0
"""How long each row may take in a loop, and again after learner's steps; setting up comes before."""


def measured(rows: Sequence[headline.Headline]) -> list[dict[str, Any]]:
    """Reports of these rows alone."""
    os.environ.update(dict.fromkeys(run.THREAD_SETTINGS, "1"))  # before anything that reads them is imported
    harness = importlib.import_module("harness")
    with tempfile.TemporaryDirectory() as place:
        for row in rows:
            effort = harness.Effort(budget_seconds=SECONDS, only=frozenset({row.workload}))
            importlib.import_module(run.BENCHMARKS[row.report]).run(effort, Path(place))
        return tables.reports(Path(place))


def beside(quoted: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> str:
    """The README's figures and those of now, row by row."""
    before, after = ({report["name"]: report for report in reports} for reports in (quoted, now))
    first, *others = headline.COLUMNS
    out = [tables.row([first, "", *others])]
    for row in headline.HEADLINES:
        out.append(tables.row([row.title, "README", *headline.cells(row, before)]))
        out.append(tables.row(["", "now", *headline.cells(row, after)]))
    name = headline.HEADLINES[0].report
    out += ["", f"README: measured on {tables.machine(before[name]['environment'])}."]
    out.append(f"now: measured on {tables.machine(after[name]['environment'])}.")
    return "\n".join(out)


def main() -> None:
    """Measures and prints."""
    now = measured(headline.HEADLINES)
    print(f"\n{beside(tables.reports(), now)}")


if __name__ == "__main__":
    main()
