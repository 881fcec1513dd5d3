"""What the host's own replay buffers hold, to be stored in ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..arrays import Array
from ..continuity import alike
from ..trees import mapped

__all__ = ["ConvertsReplays", "steps_of"]

PIECE = 1024
"""Steps of all envs that are copied at once."""


class ConvertsReplays:
    """Mixed into one of the host's algorithms, before its class: loaded replays are of ``replay_buffer_class``.

    The host's ``load_replay_buffer`` puts whatever class a pickle holds in place of the buffer that there was.
    """

    replay_buffer: Any
    replay_buffer_class: Any
    replay_buffer_kwargs: dict[str, Any]

    def load_replay_buffer(self, path: Any, truncate_last_traj: bool = True) -> None:
        """As the host's, and then ``replay_buffer_class.from_original`` with the ``replay_buffer_kwargs``."""
        host: Any = super()
        host.load_replay_buffer(path, truncate_last_traj)
        self.replay_buffer = self.replay_buffer_class.from_original(self.replay_buffer, **self.replay_buffer_kwargs)


def steps_of(original: Any) -> Iterator[tuple[Array, dict[str, Any]]]:
    """Where steps are in one of the host's replays, oldest first, and their fields ``[K, N, ...]``.

    A step after which the env was reset without an end is a time-out: its next observation is known, and is not that
    of the step that follows.
    """
    size, pos, once = int(original.buffer_size), int(original.pos), bool(original.optimize_memory_usage)
    rows = np.arange(pos)
    if original.full:  # with `once`, the newest step's next observation lies where the oldest step was
        rows = np.arange(pos + once, pos + size) % size

    def taken(name: str, at: Array) -> Any:
        return mapped(lambda column: column[at], getattr(original, name))

    for low in range(0, len(rows), PIECE):
        at = rows[low : low + PIECE]
        after = rows[np.minimum(np.arange(low, low + len(at)) + 1, len(rows) - 1)]
        next_obs = taken("observations", (at + 1) % size) if once else taken("next_observations", at)
        done, timeout = taken("dones", at) != 0, taken("timeouts", at) != 0
        reset = ~alike(next_obs, taken("observations", after), 2)
        reset[after == at] = False  # of the newest step it is not known
        steps = {"obs": taken("observations", at), "action": taken("actions", at), "reward": taken("rewards", at)}
        yield at, steps | {"next_obs": next_obs, "done": done, "timeout": timeout | (reset & ~done)}
