"""How much a test tries: a little in ``make test``, more in ``.ci/run``, which runs with the profile ``ci``."""

from __future__ import annotations

import itertools
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


def first_of(quick: int, values: Iterable[Any]) -> list[Any]:
    """Cases for ``parametrize``, of which ``make test`` takes the first so many."""
    return [value if k < quick else in_ci(value) for k, value in enumerate(values)]


def every_nth(step: int, *axes: Iterable[Any]) -> list[Any]:
    """All combinations of the axes, for ``parametrize``, of which ``make test`` takes each so many-th.

    With a step that shares no factor with their lengths, the combinations have every value of every axis.
    """
    found = [list(axis) for axis in axes]
    cases = list(itertools.product(*found))
    for k, axis in enumerate(found):
        assert {id(case[k]) for case in cases[::step]} == {id(x) for x in axis}, f"axis {k} lacks a value: another step"
    return [pytest.param(*case, marks=() if k % step == 0 else CI) for k, case in enumerate(cases)]
