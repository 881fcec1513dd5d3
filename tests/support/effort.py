"""How much a test tries: a little in ``make test``, more in ``.ci/run``, which runs with the profile ``ci``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

from support import internals

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


def makes_slow_ones(config: pytest.Config) -> bool:
    """Whether items are made of slow cases, too. ``make test`` would only leave them out again: most of all cases."""
    return config.option.markexpr != "not slow" or any("[" in arg for arg in config.args)  # or one is asked for by name


def is_slow(collector: pytest.Collector, test: Any) -> bool:
    """Whether a test, or a class of tests, is slow in all its cases."""
    marks = [*getattr(test, "pytestmark", ()), *collector.iter_markers()]
    return any(mark.name == "slow" for mark in marks)


def leave_cases_to_ci(metafunc: pytest.Metafunc) -> None:
    """Mark cases of a test that runs once for each combination of several parameters: ``make test`` takes a few.

    They have every value of each ``parametrize`` and of each fixture. ``.ci/run`` takes all combinations.
    """
    made = internals.calls(metafunc)
    quick = [case for case in made if all(mark.name != "slow" for mark in case.marks)]
    if QUICK and len(quick) >= WIDE and metafunc.definition.get_closest_marker("slow") is None:
        cases = {at: values_of(metafunc, case.params) for at, case in enumerate(quick)}
        missing = set[Any]().union(*cases.values())
        while missing:  # take the case that has most of what none had yet
            missing -= cases.pop(max(cases, key=lambda at: len(cases[at] & missing)))
        for at in cases:
            quick[at].marks.extend(mark.mark for mark in CI)
        quick = [case for at, case in enumerate(quick) if at not in cases]
    if not makes_slow_ones(metafunc.config):  # pytest makes an item without parameters where there is no case at all
        made[:] = quick or made[:1]


def values_of(metafunc: pytest.Metafunc, params: dict[str, Any]) -> set[Any]:
    """The values that a case has of each ``parametrize`` and each fixture, told apart by what they are."""
    left = {name: id(value) for name, value in params.items()}
    values = set[Any]()
    for mark in metafunc.definition.iter_markers("parametrize"):
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
