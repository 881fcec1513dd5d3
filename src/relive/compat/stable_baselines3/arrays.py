"""The host's arrays, for a replay that stores each observation once: copies in the host's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from gymnasium import spaces
from torch import Tensor

from ...replay.buffer import ReplayBuffer as Core
from ...steps.arrays import Array, numpy_view
from ..trees import mapped
from .common import joined

__all__ = ["Copied", "arranged", "copied"]


class Copied(np.ndarray[Any, Any]):
    """A read-only copy of what is stored in another form.

    One write is accepted: ``dones[i] = True`` for the newest step i. The host ends episodes by it before a reset.
    """

    newest: int | None = None
    cut_off: Callable[[], None] | None = None

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.flags.writeable:  # a copy of this copy, or a result computed from it
            super().__setitem__(key, value)
        elif self.cut_off is not None and isinstance(key, int | np.integer) and key == self.newest and np.all(value):
            self.cut_off()
        else:
            raise ValueError(
                "this array is a copy, because observations are stored once here, and writing to it changes nothing; "
                "use ReplayBuffer without optimize_memory_usage, whose arrays are the storage"
            )


def copied(array: Array) -> Any:
    """A fresh array as one that cannot be written to."""
    shown = array.view(Copied)
    shown.flags.writeable = False
    return shown


def arranged(
    replay: Core, name: str, space: spaces.Space[Any], pos: int, under_way: Array, next_obs: Any, rows: int
) -> Any:
    """A field of all steps in the host's rows, ``[rows, N, ...]``, or a dictionary of these. Empty rows are zero.

    Args:
        replay: the storage.
        name: of the field; "next_obs" is the observation after each step.
        space: one env's observation space.
        pos: the host's row of the next step.
        under_way: bool ``[N]``, whether the episode goes on after the env's newest step.
        next_obs: the observations ``[N, ...]`` after the newest steps; None without steps.
        rows: the host's ``buffer_size``.
    """
    envs = [_steps(replay, name, space, env, bool(going), next_obs) for env, going in enumerate(under_way)]

    def arrange(*columns: Array) -> Array:
        out = np.zeros((rows, len(columns), *columns[0].shape[1:]), columns[0].dtype)
        for env, column in enumerate(columns):
            out[(pos - len(column) + np.arange(len(column))) % rows, env] = column
        return out

    return mapped(arrange, *envs)


def _steps(replay: Core, name: str, space: spaces.Space[Any], env: int, under_way: bool, next_obs: Any) -> Any:
    """A field of an env's steps, oldest first. Rows that hold only a final observation are left out."""
    rows = replay.slice(env)
    steps = numpy_view(cast("Tensor", rows["complete"])).copy()
    steps[-1:] |= under_way

    def following(obs: Tensor, newest: Any = None) -> Array:
        after = np.roll(numpy_view(obs), -1, 0)
        if under_way and len(after):
            after[-1] = newest[env]
        return after[steps]

    if name == "next_obs":
        return mapped(following, joined(space, rows["obs"]), *([] if next_obs is None else [next_obs]))
    return mapped(lambda x: numpy_view(x)[steps], joined(space, rows[name], name))
