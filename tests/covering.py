"""Which cases of a wide matrix are quick: few that together have every value of every axis."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def covering(*axes: Iterable[Any], full: int = 1) -> list[Any]:
    """All combinations of the axes, for ``parametrize``; all are slow but a few that cover every value.

    Args:
        axes: the values of each parameter.
        full: the first so many axes are quick in all their combinations. Each of these comes with one value of every
            further axis, and neighbours have different ones.
    """
    lists = [list(axis) for axis in axes]
    sizes = [range(len(values)) for values in lists]
    cases, quick = list[Any](), list[set[int]](set() for _ in lists)
    for at in itertools.product(*sizes):
        turn = sum((2 * k + 1) * i for k, i in enumerate(at[:full]))
        kept = all(i == turn % len(size) for i, size in zip(at[full:], sizes[full:], strict=True))
        values = [axis[i] for axis, i in zip(lists, at, strict=True)]
        cases.append(pytest.param(*values, marks=() if kept else pytest.mark.slow))
        if kept:
            for seen, i in zip(quick, at, strict=True):
                seen.add(i)
    missing = [k for k, (seen, size) in enumerate(zip(quick, sizes, strict=True)) if len(seen) < len(size)]
    assert not missing, f"the quick cases lack values of axes {missing}: take the longest axes first"
    return cases
