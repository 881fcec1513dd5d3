"""ResetCheck: finds environments that were reset in mid-episode, in the first steps that a replay stores."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..errors import EpisodeEndWarning
from ..kernels.ring_state import COLUMNS, HEAD, NEXT
from ..ring.ring import Ring
from ..steps.arrays import Array, Ints, as_host, numpy_dtype, numpy_view
from ..steps.schema import Field
from ..steps.trees import Path

__all__ = ["ResetCheck"]


Bytes = NDArray[np.uint8]
Taken = tuple[bytes, np.dtype[Any]]
"""The numbers of a field, and their dtype."""


ENOUGH = 8
"""So many steps must have begun where the step before led, and moved on, before one that does not counts."""


MOST = 4096
"""The check stops after this many calls that add steps."""


NUMBERS = 64
"""At most this many numbers of each field of an observation are compared."""


class ResetCheck:
    """Checks that a step begins with the ``next_obs`` of the step before, where that did not end its episode.

    If a loop resets an env in mid-episode and stores no end, as at a time limit of its own, the replay takes the reset
    observation for the next one. This shows if the loop passes ``next_obs`` with every step. But the replay reads
    ``next_obs`` only at ends, so elsewhere it may hold anything. If one of the first steps begins with another
    observation, the check therefore stops without a word.

    Args:
        leaves: the stored fields of a step, in order.
        all_envs: int64 ``[N]``, which most steps are of.
    """

    def __init__(self, leaves: Mapping[Path, Field], all_envs: Ints) -> None:
        paths, num_envs = list(leaves), len(all_envs)
        self._all = all_envs
        self._obs = [i for i, path in enumerate(paths) if path[0] == "obs"]
        self._flags = [paths.index((name,)) for name in ("terminated", "truncated")]
        fields = [leaves[paths[i]] for i in self._obs]
        self._dtypes = [numpy_dtype(field.dtype) for field in fields]
        numbers = [field.nbytes // field.dtype.itemsize for field in fields]
        self._every = [max(number // NUMBERS, 1) for number in numbers]
        self._counts = [-(-number // every) for number, every in zip(numbers, self._every, strict=True)]
        self._left, self._alike = MOST, 0
        self._led_to: list[Bytes] = []
        """What the newest step of each env led to, as far as it is compared: ``[N, M]`` for each field."""
        self._newest: list[Taken] = []
        """The same, not yet converted, if the newest step was one of all envs; else empty."""
        self._moved = np.zeros(num_envs, np.bool_)
        """Whether that differs from what the step began with."""
        self._state = np.zeros((num_envs, COLUMNS), np.int64)
        """The ring's state after that step."""
        self.broken = -1
        """The first env that was reset in mid-episode, or -1."""

    def go_on(
        self, ring: Ring, envs: Ints, leaves: Sequence[Any], final: Sequence[Any] | None, kept: Array | None
    ) -> bool:
        """Check steps that were just stored, in the order of time. Returns whether to check the next ones, too.

        Args:
            ring: where they were stored.
            envs: int64 ``[K]``, the env of each step; where envs come again, all come again in the same order.
            leaves: the checked leaves ``[K, ...]``.
            final: the leaves of ``next_obs``; None if there are none. A loop that leaves it out once is not checked.
            kept: bool ``[K]``, False for steps that were left out.
        """
        self._left -= 1
        if final is None or not self._left:
            return False
        before, self._newest = self._newest, []
        if envs is self._all and kept is None and self._alike >= ENOUGH:
            self._newest = self._taken(final)
            if before == self._taken([leaves[i] for i in self._obs]):  # as most often, and much quicker
                self._state[:] = ring.state
                return True
        if before:
            self._led_to = self._bytes(before, len(self._all))
        return self._look(ring, envs, leaves, final, kept)

    def _look(self, ring: Ring, envs: Ints, leaves: Sequence[Any], final: Sequence[Any], kept: Array | None) -> bool:
        """:meth:`go_on`, env by env."""
        count, again = len(envs), np.flatnonzero(envs[1:] == envs[:1])
        width = int(again[0]) + 1 if len(again) else count  # of one vector step
        newest = envs[count - width :]
        obs, led_to = (self._bytes(self._taken(x), len(envs)) for x in ([leaves[i] for i in self._obs], final))
        moved = self._moved[:0] if self._alike >= ENOUGH else _differ(obs, led_to)
        state = ring.state[newest]
        if width < count:
            follows = self._follow(leaves, kept, width)
            agrees = self._agree(envs[width:], [x[:-width] for x in led_to], [x[width:] for x in obs], moved, follows)
        elif self._led_to:
            before = self._state[envs]
            follows = (before[:, NEXT] > 0) & (state[:, [HEAD, NEXT]] == before[:, [HEAD, NEXT]] + 1).all(1)
            agrees = self._agree(envs, [x[envs] for x in self._led_to], obs, self._moved[envs], follows)
        else:
            agrees, self._led_to = True, [np.zeros((len(self._state), x.shape[1]), x.dtype) for x in led_to]
        for led, x in zip(self._led_to, led_to, strict=False):
            led[newest] = x[count - width :]
        self._state[newest] = state
        if len(moved):
            self._moved[newest] = moved[count - width :]
        return agrees

    def _follow(self, leaves: Sequence[Any], kept: Array | None, width: int) -> Array:
        """Of several vector steps, which rows from the second one on follow from the row before in their env."""
        terminated, truncated = (as_host(leaves[i]) for i in self._flags)
        follows = ~(terminated | truncated)[:-width]
        return follows if kept is None else follows & kept[:-width] & kept[width:]

    def _agree(self, envs: Ints, before: list[Bytes], obs: list[Bytes], moved: Array, follows: Array) -> bool:
        """Whether the rows that follow begin with what the rows before led to."""
        wrong = np.flatnonzero(follows & _differ(before, obs))
        if self._alike < ENOUGH:
            until = int(wrong[0]) if len(wrong) else len(envs)
            self._alike += int(np.count_nonzero(follows[:until] & moved[:until]))
        if len(wrong) and self._alike >= ENOUGH:
            self.broken = int(envs[wrong[0]])
        return not len(wrong)

    def _taken(self, values: Sequence[Any]) -> list[Taken]:
        """Some numbers of each field of observations."""
        found: list[Taken] = []
        for x, every in zip(values, self._every, strict=True):
            array = numpy_view(x.detach()) if isinstance(x, Tensor) else x
            if every > 1:
                array = array.reshape(len(array), math.prod(array.shape[1:]))[:, ::every]
            found.append((array.tobytes(), array.dtype))
        return found

    def _bytes(self, taken: list[Taken], rows: int) -> list[Bytes]:
        """The numbers of so many rows as the replay stores them: ``[K, M]`` for each field."""
        found: list[Bytes] = []
        for (numbers, given), dtype, count in zip(taken, self._dtypes, self._counts, strict=True):
            found.append(np.ndarray((rows, count), given, numbers).astype(dtype).view(np.uint8))
        return found

    def warn(self) -> None:
        """Warn if an env was reset in mid-episode."""
        if self.broken < 0:
            return
        warnings.warn(
            f"env {self.broken} went on with another observation than the next_obs of the step before, although that "
            "step did not end its episode. The replay takes the observation that follows for the next one, so it now "
            "holds a transition that never happened. Most often the env was reset in mid-episode: store its last step "
            "with truncated=True, or call interrupt() before you add the next one. Or several threads add steps of one "
            "env: give each its own env with add(..., envs=[k]), or a lane of relive.Lanes. If next_obs and the next "
            "obs do differ, create the buffer with own_next_obs=True. check_ends=False turns the check off. See "
            "docs/episode-ends.md",
            EpisodeEndWarning,
            stacklevel=5,
        )


def _differ(these: list[Bytes], those: list[Bytes]) -> Array:
    """Which rows of two observations ``[K, M]`` differ, bool ``[K]``."""
    differs = (these[0] != those[0]).any(1)
    for a, b in zip(these[1:], those[1:], strict=True):
        differs |= (a != b).any(1)
    return differs
