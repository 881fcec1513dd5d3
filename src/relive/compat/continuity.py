"""Detecting resets: whether an observation is the one that the step before led to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..replay.buffer import ReplayBuffer
from .trees import mapped

__all__ = ["Continuity", "breaks", "equal_rows"]

SMALL = 4096
"""Arrays of fewer bytes are compared by their bytes: the copies that this takes are cheap."""


class Continuity:
    """Ends the episodes of a replay whose environments were reset without an end being recorded.

    It serves libraries whose ``add`` takes an observation and the next one. While an episode goes on, each observation
    equals the next observation of the step before.
    """

    def __init__(self) -> None:
        self.next_obs: Any = None
        """The next observations ``[N, ...]`` of the newest step; None if no step is known."""
        self._done: Any = None

    def follow(self, replay: ReplayBuffer, obs: Any) -> None:
        """Interrupt the episodes of the envs whose observations ``[N, ...]`` do not follow from their newest step."""
        if self.next_obs is None or _identical(obs, self.next_obs):
            return
        cut = ~self._done & ~equal_rows(obs, self.next_obs)
        if cut.any():
            replay.interrupt(np.flatnonzero(cut))

    def note(self, next_obs: Any, done: NDArray[np.bool_]) -> None:
        """Remember what the newest step led to, arrays or dictionaries of them, and which episodes it ended."""
        self.next_obs, self._done = next_obs, done

    def forget(self) -> None:
        """Forget the newest step: whatever comes next counts as its continuation."""
        self.next_obs = None


def breaks(obs: Any, next_obs: Any, done: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which steps ``[T, N, ...]`` neither end an episode nor lead to the step after them: bool ``[T - 1, N]``."""
    shown, expected = mapped(lambda value: value[1:], obs), mapped(lambda value: value[:-1], next_obs)
    return ~done[:-1] & ~equal_rows(shown, expected, 2)


def _identical(one: Any, other: Any) -> bool:
    """Whether small arrays have the same bytes. Most often they do, and this is faster than :func:`equal_rows`."""
    if type(one) is np.ndarray:  # the check for a mapping takes longer than the comparison
        return one.nbytes < SMALL and one.tobytes() == other.tobytes()
    if isinstance(one, Mapping):
        members = cast("Mapping[str, Any]", one)
        return all(_identical(members[key], other[key]) for key in members)
    return False


def equal_rows(one: Any, other: Any, front: int = 1) -> NDArray[np.bool_]:
    """Which rows are equal in two arrays, or in all arrays of two dictionaries. The first ``front`` axes count rows."""
    if isinstance(one, Mapping):
        members = cast("Mapping[str, Any]", one)
        return np.logical_and.reduce(np.stack([equal_rows(members[key], other[key], front) for key in members]))
    same: NDArray[np.bool_] = np.asarray(one) == np.asarray(other)
    return np.logical_and.reduce(same, tuple(range(front, same.ndim)))
