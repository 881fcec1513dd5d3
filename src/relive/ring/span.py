"""Span: for each env, a range of row numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..steps.arrays import Ints

__all__ = ["Span"]


class Span(NamedTuple):
    """For each env e, the rows with numbers from ``first[e]`` up to, not including, ``until[e]``.

    Its rows are counted env by env in the order of time; "row k" below is the k-th in that order.
    """

    first: Ints
    """int64 ``[N]``."""
    until: Ints
    """int64 ``[N]``, at least ``first``."""

    @property
    def size(self) -> int:
        """How many rows there are, over all envs."""
        return int((self.until - self.first).sum())

    def rows(self, low: int = 0, high: int | None = None) -> tuple[Ints, Ints]:
        """The envs and numbers of all rows, or of the rows from ``low`` up to ``high``."""
        ends = np.cumsum(self.until - self.first)
        row = np.arange(low, int(ends[-1]) if high is None else min(high, int(ends[-1])))
        env = np.searchsorted(ends, row, side="right")
        return env, row + (self.until - ends)[env]

    def places(self, per_env: int, low: int = 0, high: int | None = None) -> Ints:
        """The places of the same rows in a ring of ``per_env`` rows per env."""
        ends = np.cumsum(self.until - self.first)
        high = int(ends[-1]) if high is None else min(high, int(ends[-1]))
        env = int(np.searchsorted(ends, low, side="right"))
        if low < high <= ends[env]:  # all in one env, as most often: one run of places, or two
            begin = int(low + (self.until - ends)[env]) % per_env
            run = np.arange(begin, begin + high - low)
            return env * per_env + (run if run[-1] < per_env else run % per_env)
        envs, numbers = self.rows(low, high)
        return envs * per_env + numbers % per_env

    def runs(self, per_env: int) -> Iterator[slice]:
        """The same places as slices, in the same order: one or two for each env."""
        for env, (first, until) in enumerate(zip(self.first.tolist(), self.until.tolist(), strict=True)):
            base, seam = env * per_env, until - until % per_env  # row `seam` lies at the first place of the env again
            if first < seam < until:
                yield slice(base + first % per_env, base + per_env)
            begin = seam if first < seam < until else first
            if begin < until:
                yield slice(base + begin % per_env, base + begin % per_env + until - begin)

    def meet(self, other: Span) -> Span:
        """The rows that both have."""
        first = np.maximum(self.first, other.first)
        return Span(first, np.maximum(np.minimum(self.until, other.until), first))

    def where(self, part: Span) -> slice | Ints:
        """Where the rows of ``part`` lie among these rows, which have all of them: a slice, or their positions."""
        if part.size == self.size:
            return slice(None)
        begin = np.cumsum(self.until - self.first) - (self.until - self.first) + (part.first - self.first)
        runs: list[Ints] = [np.arange(a, a + n) for a, n in zip(begin, part.until - part.first, strict=True)]
        return np.concatenate(runs)
