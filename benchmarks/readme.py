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
    blocks = []
    for row in headline.HEADLINES:
        lines = [["", *headline.COLUMNS[1:]]]
        lines += [[name, *headline.cells(row, by)] for name, by in (("README", before), ("now", after))]
        blocks.append((row.title, [[cell.replace("*", "") for cell in line] for line in lines]))
    widths = [max(map(len, column)) for column in zip(*(line for _, lines in blocks for line in lines), strict=True)]
    out: list[str] = []
    for title, lines in blocks:
        padded = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        out += [title, *(f"  {line.rstrip()}" for line in padded), ""]
    name = headline.HEADLINES[0].report
    out += [f"README: measured on {tables.machine(before[name]['environment'])}."]
    out.append(f"now: measured on {tables.machine(after[name]['environment'])}.")
    return "\n".join(out)


def main() -> None:
    """Measures and prints."""
    now = measured(headline.HEADLINES)
    print(f"\n{beside(tables.reports(), now)}")


if __name__ == "__main__":
    main()
