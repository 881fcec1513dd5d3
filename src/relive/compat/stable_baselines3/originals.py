"""Converting the host's own replay buffers, such as those in pickles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...steps.arrays import Array
from ..base import equal_rows, mapped

__all__ = ["ConvertsReplays", "steps_of"]

PIECE = 1024
"""Steps of all envs that are copied at a time."""


class ConvertsReplays:
    """A mixin for the host's algorithms, listed before the algorithm: loaded replays become ``replay_buffer_class``.

    Without it, the host's ``load_replay_buffer`` replaces the buffer by one of the class in the pickle.
    """

    replay_buffer: Any
    replay_buffer_class: Any
    replay_buffer_kwargs: dict[str, Any]

    def load_replay_buffer(self, path: Any, truncate_last_traj: bool = True) -> None:
        """Load as the host does, then convert by ``replay_buffer_class.from_original`` and ``replay_buffer_kwargs``."""
        host: Any = super()
        host.load_replay_buffer(path, truncate_last_traj)
        self.replay_buffer = self.replay_buffer_class.from_original(self.replay_buffer, **self.replay_buffer_kwargs)


def steps_of(original: Any) -> Iterator[tuple[Array, dict[str, Any]]]:
    """The rows of the steps in one of the host's replays, oldest first, and their fields ``[K, N, ...]``.

    A step counts as truncated if its env was reset after it without an end: its next observation then differs from the
    observation of the following step.
    """
    size, pos, once = int(original.buffer_size), int(original.pos), bool(original.optimize_memory_usage)
    rows = np.arange(pos)
    if original.full:  # with `once`, the newest next observation overwrote the oldest step
        rows = np.arange(pos + once, pos + size) % size

    def taken(name: str, at: Array) -> Any:
        return mapped(lambda column: column[at], getattr(original, name))

    for low in range(0, len(rows), PIECE):
        at = rows[low : low + PIECE]
        after = rows[np.minimum(np.arange(low, low + len(at)) + 1, len(rows) - 1)]
        next_obs = taken("observations", (at + 1) % size) if once else taken("next_observations", at)
        done, timeout = taken("dones", at) != 0, taken("timeouts", at) != 0
        reset = ~equal_rows(next_obs, taken("observations", after), 2)
        reset[after == at] = False  # nothing follows the newest step
        steps = {"obs": taken("observations", at), "action": taken("actions", at), "reward": taken("rewards", at)}
        yield at, steps | {"next_obs": next_obs, "done": done, "timeout": timeout | (reset & ~done)}
