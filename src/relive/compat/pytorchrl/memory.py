"""Reading the rows of a replay in the order of time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from ...replay.buffer import ReplayBuffer
from ...steps.arrays import as_host
from ..trees import mapped

__all__ = ["Memory"]

Data = dict[str, Any]


class Memory:
    """The rows of a replay whose N envs get one step each at a time, counted since the last :meth:`forget`.

    Args:
        replay: the storage.
        names: PyTorchRL's key -> relive's field.
        added: rows per env that count, the newest ones.
        before: rows per env that were added before those.
    """

    def __init__(self, replay: ReplayBuffer, names: Mapping[str, str], added: int = 0, before: int = 0) -> None:
        self._replay, self._names, self._begin, self.added = replay, names, before, added

    def forget(self) -> None:
        """Let the next row be row 0."""
        self._begin, self.added = self._begin + self.added, 0

    @cached_property
    def _columns(self) -> Data:
        """Views of all rows ``[N, R, ...]``."""
        block, num_envs = self._replay.block, self._replay.num_envs

        def by_env(column: Any) -> Any:
            array = as_host(column)
            return array.reshape(num_envs, len(array) // num_envs, *array.shape[1:])

        fields = {key: block[name] for key, name in self._names.items()}
        nested = {key: dict(value.items()) if hasattr(value, "items") else value for key, value in fields.items()}
        return {key: mapped(by_env, value) for key, value in nested.items()}

    def read(self, key: str, first: int, count: int) -> Any:
        """Rows ``first`` to ``first + count`` of a field, float32 ``[count, N, ...]``, or a dictionary of these.

        The trap: older rows than the R that are stored are not noticed; newer rows are returned for them.
        """
        return mapped(lambda column: _rows(column, self._begin + first, count), self._columns[key])

    def __getstate__(self) -> Data:
        return {name: value for name, value in self.__dict__.items() if name != "_columns"}


def _rows(column: Any, first: int, count: int) -> Any:
    """Rows of a ring ``[N, R, ...]``, time first: ``[count, N, ...]``."""
    out = np.empty((count, len(column), *column.shape[2:]), np.float32)
    done, rows = 0, column.shape[1]
    while done < count:
        at = (first + done) % rows
        some = min(rows - at, count - done)
        out[done : done + some] = column[:, at : at + some].swapaxes(0, 1)
        done += some
    return out
