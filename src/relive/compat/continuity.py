"""Whether what an env shows is what its last step led to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..replay.buffer import ReplayBuffer
from .trees import mapped

__all__ = ["Continuity", "alike", "breaks"]

SMALL = 4096
"""Bytes of arrays that are copied without a thought."""


class Continuity:
    """Interrupts the episodes of a replay whose envs were reset without a word.

    For libraries whose ``add`` takes an observation and the next one: where an episode goes on, the observation is the
    next one of the step before.
    """

    def __init__(self) -> None:
        self.next_obs: Any = None
        """What the newest step of each env led to; None if there was none."""
        self._done: Any = None

    def follow(self, replay: ReplayBuffer, obs: Any) -> None:
        """These observations ``[N, ...]`` come next; the envs that did not lead to theirs start new episodes."""
        if self.next_obs is None or _identical(obs, self.next_obs):
            return
        cut = ~self._done & ~alike(obs, self.next_obs)
        if cut.any():
            replay.interrupt(np.flatnonzero(cut))

    def note(self, next_obs: Any, done: NDArray[np.bool_]) -> None:
        """A step led to these observations, arrays or dictionaries of them, or ended its episode."""
        self.next_obs, self._done = next_obs, done

    def forget(self) -> None:
        """Nothing is known of the envs."""
        self.next_obs = None


def breaks(obs: Any, next_obs: Any, done: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which steps ``[T, N, ...]`` are not followed by the next one, though no episode ended: bool ``[T - 1, N]``."""
    shown, expected = mapped(lambda value: value[1:], obs), mapped(lambda value: value[:-1], next_obs)
    return ~done[:-1] & ~alike(shown, expected, 2)


def _identical(one: Any, other: Any) -> bool:
    """Whether small arrays have the same bytes: most often they do, and this is told in a fraction of the time."""
    if type(one) is np.ndarray:  # telling a mapping takes longer than all the rest
        return one.nbytes < SMALL and one.tobytes() == other.tobytes()
    if isinstance(one, Mapping):
        members = cast("Mapping[str, Any]", one)
        return all(_identical(members[key], other[key]) for key in members)
    return False


def alike(one: Any, other: Any, front: int = 1) -> NDArray[np.bool_]:
    """Which rows of two arrays, or of all arrays in two dictionaries, are equal; rows have ``front`` axes."""
    if isinstance(one, Mapping):
        members = cast("Mapping[str, Any]", one)
        return np.logical_and.reduce(np.stack([alike(members[key], other[key], front) for key in members]))
    same: NDArray[np.bool_] = np.asarray(one) == np.asarray(other)
    return np.logical_and.reduce(same, tuple(range(front, same.ndim)))
