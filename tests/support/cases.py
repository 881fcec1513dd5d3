"""Which cases of a wide matrix are quick: few that together have every value of every axis."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from support.effort import CI


def covering(*axes: Iterable[Any], full: int = 1, quick: int | None = None) -> list[Any]:
    """All combinations of the axes, for ``parametrize``; all are slow but a few that cover every value.

    Args:
        axes: the values of each parameter.
        full: the first so many axes are there in all their combinations. Each of these comes with one value of every
            further axis, and neighbours have different ones.
        quick: the same for ``make test``, which takes these of the cases that ``full`` keeps, and some more if they
            lack a value; ``.ci/run`` takes all that ``full`` keeps. By default there is no difference.
    """
    lists = [list(axis) for axis in axes]
    sizes = [len(values) for values in lists]
    kept = [at for at in itertools.product(*map(range, sizes)) if follows(at, sizes, full)]
    missing = {(k, i) for k, size in enumerate(sizes) for i in range(size)}
    lacking = missing.difference(*map(enumerate, kept))
    assert not lacking, f"the cases that are not slow lack (axis, value) {sorted(lacking)}: take the longest axes first"
    now = set[tuple[int, ...]]()

    def take(cases: list[tuple[int, ...]]) -> None:
        """The one that has most of what is missing."""
        best = max(cases, key=lambda at: len(missing.intersection(enumerate(at))))
        now.add(best)
        missing.difference_update(enumerate(best))

    for first in itertools.product(*map(range, sizes[: full if quick is None else quick])):
        take([at for at in kept if at[: len(first)] == first])  # of one, unless `quick` is less than `full`
    while missing:
        take(kept)
    everywhere = set(kept)
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(lists, at, strict=True)),
            marks=() if at in now else CI if at in everywhere else pytest.mark.slow,
        )
        for at in itertools.product(*map(range, sizes))
    ]


def follows(at: Sequence[int], sizes: Sequence[int], first: int) -> bool:
    """Whether the further values of a case are those that come with its first ones."""
    turn = sum((2 * k + 1) * i for k, i in enumerate(at[:first]))
    return all(i == turn % size for i, size in zip(at[first:], sizes[first:], strict=False))
