"""No call enters more files of the source than the table of walks says."""

from __future__ import annotations

import re

import walks
from relive.parameters import require
from relive.steps.schema import dotted

PAGE = walks.PAGE.read_text(encoding="utf-8")


def test_no_walk_enters_more_files_than_the_table_says():
    limits, found = walks.limits(PAGE), walks.walked()
    assert limits.keys() == found.keys(), "write the table again: make walks"
    longer = [
        f"{name}: {len(walk.files)} files, at most {limit}: {' '.join(walk.files)}"
        for name, pair in found.items()
        for walk, limit in zip(pair, limits[name], strict=True)
        if len(walk.files) > limit
    ]
    assert longer == []


def test_a_walk_counts_files_calls_and_returns():
    def call() -> None:
        require("call", (callable, "expected a function"))
        dotted(("obs",))
        dotted(("obs",))
        require("call", (callable, "expected a function"))

    assert walks.traced(call) == walks.Walk(("parameters.py", "steps/schema.py"), 4, 1)
    assert walks.traced(lambda: None) == walks.Walk((), 0, 0)


def test_the_table_is_read_as_it_was_written():
    short, long = walks.Walk(("a.py",), 3, 0), walks.Walk(("a.py", "b.py"), 1234, 5)
    page = walks.put(PAGE, walks.table({"`add`": (long, short)}))
    assert walks.limits(page) == {"`add`": (2, 1)}
    assert re.findall(r"^\| `add`.*", page, re.MULTILINE) == ["| `add` | 2 | 1 | 1,234 | 3 | 5 | 0 |"]
