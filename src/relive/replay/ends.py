"""EndCheck: finds two common mistakes at episode ends, in the first episodes that a replay stores."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import EpisodeEndWarning
from ..steps.arrays import Array, Ints, as_host, numpy_dtype, numpy_view
from ..steps.schema import Field
from ..steps.trees import Path

__all__ = ["EndCheck"]


ENOUGH = 3
"""The warning comes after this many episodes, if each began with the final observation of the one before."""


MOST = 16
"""The check stops after this many ends. If they have shown nothing, more would only cost time."""


class EndCheck:
    """Checks that an episode does not begin with the final observation of the one before it in its env.

    Two mistakes make every episode begin so. Under ``NEXT_STEP`` autoreset the env ignores the step after an end; if
    that step is stored, the next episode seems to begin with the final observation. Under ``SAME_STEP`` autoreset
    ``step()`` returns the next episode's first observation; if that is passed as ``next_obs``, it becomes the final
    observation. One episode that begins with another observation rules both mistakes out, and the check stops. Episodes
    whose last step did not change the observation are skipped, such as those of a bandit.

    Args:
        leaves: the stored fields of a step, in order.
    """

    def __init__(self, leaves: Mapping[Path, Field]) -> None:
        paths = list(leaves)
        self._flags = [paths.index((name,)) for name in ("terminated", "truncated")]
        self._obs, self._own = ([i for i, path in enumerate(paths) if path[0] == name] for name in ("obs", "next_obs"))
        self._dtypes = [numpy_dtype(leaves[paths[i]].dtype) for i in self._obs]
        self.ended_on: dict[int, bytes] = {}
        """What an env's last episode ended on, where its next one has not begun."""
        self.episodes = 0
        """How many episodes had ended at the last look."""
        self._looked = self._alike = 0

    def go_on(
        self, episodes: int, envs: Ints, leaves: Sequence[Any], final: Sequence[Any] | None, kept: Array | None
    ) -> bool:
        """Check steps that were just stored, in the order of time. Returns whether to check the next ones, too.

        There is nothing to check if :attr:`episodes` have ended as before and :attr:`ended_on` is empty.

        Args:
            episodes: how many episodes have ended so far.
            envs: int64 ``[K]``, the env of each step.
            leaves: the checked leaves ``[K, ...]``.
            final: the leaves of the final observations; None if no episode ended, or if each step has a next
                observation of its own.
            kept: bool ``[K]``, False for steps that were left out.
        """
        self.episodes = episodes
        terminated, truncated = (as_host(leaves[i]) for i in self._flags)
        ends = terminated | truncated if kept is None else (terminated | truncated) & kept
        obs = [leaves[i] for i in self._obs]
        after = [leaves[i] for i in self._own] if final is None else final

        def next_step(env: int, since: int) -> int | None:
            mine = np.flatnonzero(envs[since:] == env if kept is None else (envs[since:] == env) & kept[since:])
            return since + int(mine[0]) if len(mine) else None

        waiting = [(env, 0, ended_on) for env, ended_on in self.ended_on.items()]
        for row in np.flatnonzero(ends)[: MOST - self._looked].tolist():
            ended_on = self._bytes(after, row)
            self._looked += 1
            if ended_on != self._bytes(obs, row):
                waiting.append((int(envs[row]), row + 1, ended_on))
        for env, since, ended_on in waiting:
            row = next_step(env, since)
            if row is None:
                self.ended_on[env] = ended_on
                continue
            self.ended_on.pop(env, None)
            if self._bytes(obs, row) != ended_on:
                return False
            self._alike += 1
            if self._alike == ENOUGH:
                return False
        return self._looked < MOST or bool(self.ended_on)

    def _bytes(self, values: Sequence[Any], row: int) -> bytes:
        """The bytes of an observation, as the replay stores them."""
        rows = (numpy_view(x[row].detach().cpu()) if isinstance(x, Tensor) else x[row] for x in values)
        return b"".join(np.asarray(x, dtype).tobytes() for x, dtype in zip(rows, self._dtypes, strict=True))

    def warn(self) -> None:
        """Warn if enough episodes began with the final observation before them."""
        if self._alike < ENOUGH:
            return
        warnings.warn(
            f"the first {ENOUGH} episodes all began on the very observation that the last one of their env had ended "
            "on. Two mistakes do that. Under NEXT_STEP autoreset, Gymnasium's default, the env ignores the step after "
            "an end: leave it out with add(..., mask=~ended), ended being terminated | truncated of the step before. "
            "Under SAME_STEP autoreset, step() returns the next episode's first observation: pass next_obs with "
            "info['final_obs'] where an episode ended. If these episodes do end where they start, create the buffer "
            "with check_ends=False. See docs/episode-ends.md",
            EpisodeEndWarning,
            stacklevel=4,
        )
