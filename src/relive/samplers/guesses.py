"""Guessing what a sampler will draw, without reading rows and without a draw. A wrong guess does no harm."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import kernels
from ..ring.ring import Ring
from ..steps.arrays import Ints
from .prioritized import Prioritized
from .recent import Recent
from .uniform import Uniform, WithoutReplacement

__all__ = ["guess"]


def guess(sampler: Any, ring: Ring, count: int, key: int, update: int, of: int) -> Ints | None:
    """The places of rows, at most ``count``, that ``sampler.draw(count, key, update, of)`` will most likely draw.

    A draw tries rows until it finds one that can be drawn. Only its first try is guessed. If the files were altered,
    a place may be beyond the last row.

    Returns:
        int64 ``[K]``, or None if a guess would have to read rows: for windows weighed by episodes, for windows or
        priorities inside :class:`Recent`, and for samplers of the user.
    """
    if not ring.drawable:
        return None
    if type(sampler) is Recent:
        newest = sampler.window(update, of)
        if newest >= ring.transitions:
            return guess(sampler.inner, ring, count, key, update, of)
        return _of_rows(ring, count, key, newest) if _draws_rows(sampler.inner, ring) else None
    if type(sampler) is WithoutReplacement:
        number, env = np.divmod(sampler.draw_state()[:count], ring.num_envs)
        return env * ring.rows + number % ring.rows
    if type(sampler) is Prioritized:
        total = sampler.mass
        if not 0 < total < math.inf:
            return None
        return sampler.draw_at(_masses(count, key, sampler.stratified, total))[0]
    if _draws_rows(sampler, ring):
        return _of_rows(ring, count, key, 0)
    if type(sampler) is Uniform and ring.rule.weigh != "episodes":
        return sampler.draw(count, key, update, of)[0]  # reads the tree of weights alone
    return None


def _draws_rows(sampler: Any, ring: Ring) -> bool:
    """Whether a sampler draws rows until one can be drawn."""
    return type(sampler) is Uniform and not ring.rule.sparse


def _of_rows(ring: Ring, count: int, key: int, newest: int) -> Ints | None:
    """The first attempt of each draw of :func:`relive.kernels.reference.draw.draw`."""
    first, until = np.empty(ring.num_envs, np.int64), np.empty(ring.num_envs, np.int64)
    total = kernels.fast().window(ring.handle, newest, first, until)
    if total <= 0:
        return None
    at = _masses(count, key, False, float(total)).astype(np.int64)
    env: Ints = np.asarray(np.searchsorted(until, at, side="right"), np.int64)
    number = first[env] + at - np.where(env > 0, until[env - 1], 0)
    return env * ring.rows + number % ring.rows


def _masses(count: int, key: int, stratified: bool, total: float) -> Any:
    """The numbers of a draw in [0, total), float64 ``[count]``."""
    out = np.empty(count)
    kernels.fast().masses(np.uint64(key), stratified, total, math.nextafter(total, 0.0), out)
    return out
