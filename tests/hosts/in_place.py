"""A plugin for a host's own suite, ``pytest -p hosts.in_place``: puts our classes into the host's modules.

``RELIVE_IN_PLACE`` names the host; without it the suite runs on the host's own classes. ``RELIVE_OUTCOMES`` is a file:
the outcome of each test, the error of each that failed, and how many objects of the drop-in were made.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

from hosts.libraries import HOSTS

_outcomes: dict[str, str] = {}
_errors: dict[str, str] = {}
made = [0]


def _counting(kind: type) -> None:
    first: Any = kind.__init__

    @functools.wraps(first)
    def init(self: Any, *args: Any, **options: Any) -> None:
        made[0] += 1
        first(self, *args, **options)

    setattr(kind, "__init__", init)  # noqa: B010 - a class's constructor has no assignable type


def put_in_place(pairs: dict[str, tuple[Any, Any]]) -> None:
    """Every name of a module that is bound to the host's class or function is bound to ours, wherever it was read."""
    for theirs, ours in pairs.values():
        if inspect.isclass(ours):
            _counting(ours)
        for where, module in list(sys.modules.items()):
            if where.partition(".")[0] in ("relive", "hosts"):
                continue  # a drop-in may derive from the host's class
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if value is theirs:
                    setattr(module, name, ours)


def pytest_configure(config: Any) -> None:
    """Once the host's conftest is read, and before its tests are."""
    if name := os.environ.get("RELIVE_IN_PLACE"):
        put_in_place(HOSTS[name].both())


def pytest_runtest_logreport(report: Any) -> None:
    """A test passed if its call did, and nothing before or after it failed."""
    says = report.when == "call" or report.outcome != "passed"
    if says and _outcomes.get(report.nodeid) != "failed":
        _outcomes[report.nodeid] = report.outcome
        if report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            _errors[report.nodeid] = str(getattr(crash, "message", report.longrepr))


def pytest_collectreport(report: Any) -> None:
    """A file that cannot be imported counts as a test that failed."""
    if report.failed:
        _outcomes[report.nodeid] = "failed"


def pytest_sessionfinish() -> None:
    """Writes what was seen."""
    if path := os.environ.get("RELIVE_OUTCOMES"):
        Path(path).write_text(json.dumps({"outcomes": _outcomes, "errors": _errors, "made": made[0]}), encoding="utf-8")
