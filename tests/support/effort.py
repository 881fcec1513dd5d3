"""How much a test tries: a little in ``make test``, more in ``.ci/run``, which runs with the profile ``ci``."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

QUICK = settings.get_current_profile_name() == "quick"

CI = (pytest.mark.ci, pytest.mark.slow) if QUICK else (pytest.mark.ci,)
"""Marks of a case that ``.ci/run`` takes, and ``make test`` leaves out with the slow ones."""


def often(quick: int, ci: int) -> int:
    """How often a test does what it repeats, or at each how many places it does it."""
    return quick if QUICK else ci


def in_ci(*values: Any) -> Any:
    """A case for ``parametrize`` that ``make test`` leaves out, and ``.ci/run`` does not."""
    return pytest.param(*values, marks=CI)


def in_ci_alone(test: Any) -> Any:
    """Decorates a test that ``make test`` leaves out, and ``.ci/run`` does not."""
    for mark in CI:
        test = mark(test)
    return test


def first_of(quick: int, values: Iterable[Any]) -> list[Any]:
    """Cases for ``parametrize``, of which ``make test`` takes the first so many."""
    return [value if k < quick else in_ci(value) for k, value in enumerate(values)]


WIDE = 6
"""So many combinations of a test's parameters are a product of which ``make test`` takes a few."""


def leave_products_to_ci(items: Iterable[pytest.Item]) -> None:
    """Mark tests that run once for each combination of several parameters: ``make test`` takes a few of these.

    They have every value of each ``parametrize`` and of each fixture. ``.ci/run`` takes all combinations.
    """
    tests = defaultdict[str, dict[pytest.Item, set[Any]]](dict)
    for item in items if QUICK else ():
        if hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            tests[item.nodeid.partition("[")[0]][item] = values_of(item)
    for cases in tests.values():
        if len(cases) < WIDE:
            continue
        missing = set[Any]().union(*cases.values())
        while missing:  # take the case that has most of what none had yet
            new = max(cases, key=lambda case: len(cases[case] & missing))
            missing -= cases.pop(new)
        for case in cases:
            for mark in CI:
                case.add_marker(mark)


def values_of(item: Any) -> set[Any]:
    """The values that a test has of each ``parametrize`` and each fixture, told apart by what they are."""
    left = {name: id(value) for name, value in item.callspec.params.items()}
    values = set[Any]()
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        values.add(tuple((name, left.pop(name)) for name in names if name in left))
    return values | set(left.items())


def every_nth(step: int, *axes: Iterable[Any]) -> list[Any]:
    """All combinations of the axes, for ``parametrize``, of which ``make test`` takes each so many-th.

    With a step that shares no factor with their lengths, the combinations have every value of every axis.
    """
    found = [list(axis) for axis in axes]
    cases = list(itertools.product(*found))
    for k, axis in enumerate(found):
        assert {id(case[k]) for case in cases[::step]} == {id(x) for x in axis}, f"axis {k} lacks a value: another step"
    return [pytest.param(*case, marks=() if k % step == 0 else CI) for k, case in enumerate(cases)]
