"""Which cases of a wide matrix are quick: few that together have every value of every axis."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from effort import CI


def covering(*axes: Iterable[Any], full: int = 1, quick: int | None = None) -> list[Any]:
    """All combinations of the axes, for ``parametrize``; all are slow but a few that cover every value.

    Args:
        axes: the values of each parameter.
        full: the first so many axes are there in all their combinations. Each of these comes with one value of every
            further axis, and neighbours have different ones.
        quick: the same for ``make test``, which takes these of the cases that ``full`` keeps; ``.ci/run`` takes all
            that ``full`` keeps. By default there is no difference.
    """
    lists = [list(axis) for axis in axes]
    sizes = [len(values) for values in lists]
    quick = full if quick is None else quick
    cases, covered = list[Any](), list[set[int]](set() for _ in lists)
    for at in itertools.product(*map(range, sizes)):
        kept = follows(at, sizes, full)
        now = kept and follows(at[:full], sizes, quick)
        values = [axis[i] for axis, i in zip(lists, at, strict=True)]
        cases.append(pytest.param(*values, marks=() if now else CI if kept else pytest.mark.slow))
        if now:
            for seen, i in zip(covered, at, strict=True):
                seen.add(i)
    missing = [k for k, (seen, size) in enumerate(zip(covered, sizes, strict=True)) if len(seen) < size]
    assert not missing, f"the quick cases lack values of axes {missing}: take the longest axes first"
    return cases


def follows(at: Sequence[int], sizes: Sequence[int], first: int) -> bool:
    """Whether the further values of a case are those that come with its first ones."""
    turn = sum((2 * k + 1) * i for k, i in enumerate(at[:first]))
    return all(i == turn % size for i, size in zip(at[first:], sizes[first:], strict=False))
