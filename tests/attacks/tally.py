"""How often each kind of attack was tried and what came of it: a line for each test, added up at the end of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["PLACE", "Totals", "attempt", "record", "table", "totals"]

PLACE = "RELIVE_TALLY"
"""The environment's name for the file that the tests of one run, in all their processes, write to."""

Totals = dict[str, tuple[int, int]]


def record(class_name: str, tried: int, failed: int) -> None:
    """Note that ``tried`` attacks of a class were made and ``failed`` of them had their way; before any assertion."""
    place = os.environ.get(PLACE)
    if place is not None:
        line = json.dumps([class_name, tried, failed]) + "\n"
        with Path(place).open("a", encoding="utf-8") as file:  # one short write, which processes do not mix
            file.write(line)


@contextmanager
def attempt(class_name: str, tried: int = 1) -> Generator[None]:
    """Note that ``tried`` attacks of a class are made within this context; one has failed if the context raises."""
    try:
        yield
    except BaseException:
        record(class_name, tried, 1)
        raise
    record(class_name, tried, 0)


def totals(place: Path) -> Totals:
    """What was noted in a file, by class and in their order."""
    found: Totals = {}
    for line in place.read_text(encoding="utf-8").splitlines():
        name, tried, failed = json.loads(line)
        before = found.get(name, (0, 0))
        found[name] = before[0] + tried, before[1] + failed
    return dict(sorted(found.items()))


def table(found: Totals) -> str:
    """The totals as a table of Markdown."""
    lines = ["| attack | tried | failed |", "|---|---:|---:|"]
    lines += [f"| {name} | {tried:,} | {failed:,} |" for name, (tried, failed) in found.items()]
    return "\n".join(lines)
