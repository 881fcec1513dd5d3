"""The writer's side of a chunk: it checks steps as a replay does, and packs only the bytes that a shard needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..replay.arguments import flattened, row_mask
from ..replay.fields import stored_fields
from ..ring.adding import missing_final
from ..steps.arrays import Ints, as_host
from ..steps.checker import StepChecker
from ..steps.schema import Schema
from ..steps.trees import Path
from .blocks import Block, packed

__all__ = ["Checked", "Steps"]


class Checked(NamedTuple):
    """T steps of N envs that fit the schema."""

    steps: int
    """T."""
    leaves: dict[Path, Any]
    """The fields of the schema, ``[T * N, ...]``; with ``next_obs`` if every row has one."""
    finals: dict[Path, Any]
    """``next_obs`` ``[T * N, ...]`` if only the ends of episodes have one; empty if none was given."""
    mask: NDArray[np.bool_] | None
    """bool ``[T * N]``, or None for all True."""

    def part(self, begin: int, end: int) -> Checked:
        """The steps from ``begin`` up to ``end``."""
        width = next(iter(self.leaves.values())).shape[0] // self.steps
        rows = slice(begin * width, end * width)
        leaves, finals = ({path: leaf[rows] for path, leaf in group.items()} for group in (self.leaves, self.finals))
        return Checked(end - begin, leaves, finals, None if self.mask is None else self.mask[rows])


class Steps:
    """Checks steps ``[T, N, ...]`` as :meth:`relive.ReplayBuffer.extend` does, and packs those of some envs.

    Args:
        schema: the fields of a step.
        num_envs: N.
        own_next_obs: whether every row has a ``next_obs`` of its own.
    """

    def __init__(self, schema: Schema, num_envs: int, own_next_obs: bool) -> None:
        self._stored = stored_fields(schema, own_next_obs)
        self._both = stored_fields(schema, True)
        self._num_envs, self._own = num_envs, own_next_obs

    def checked(self, steps: Mapping[str, Any]) -> Checked:
        """The steps, once all of them fit.

        Raises:
            FieldError, ShapeError, DTypeError: they do not fit, or a final observation is missing.
        """
        values, count = flattened(steps, (self._num_envs,))
        rows = count * self._num_envs
        mask = row_mask(values.pop("mask"), rows) if "mask" in values else None
        schema = self._both if "next_obs" in values else self._stored
        checker = StepChecker(schema, rows, torch.device("cpu"), upload=False)
        leaves = dict(zip(schema.leaves, map(_on_host, checker(values)), strict=True))
        finals = {}
        if not self._own:
            finals = {path: leaves.pop(path) for path in list(leaves) if path[0] == "next_obs"}
            ended = _ended(leaves, mask)
            if ended.any() and not finals:
                raise missing_final(int(np.argmax(ended)) % self._num_envs)
        return Checked(count, leaves, finals, mask)

    def packed(self, checked: Checked, columns: Ints) -> Block:
        """The steps of the envs in ``columns``, int64 ``[K]``, as :class:`relive.cluster.shard.Chunk` describes."""
        count, width = checked.steps, len(columns)
        whole = width == self._num_envs

        def of_these(rows: Any) -> Any:
            by_env = rows.reshape(count, self._num_envs, *rows.shape[1:])
            return by_env if whole else by_env[:, columns]

        leaves = {path: of_these(leaf) for path, leaf in checked.leaves.items()}
        if checked.mask is not None:
            leaves["mask",] = of_these(checked.mask)
        if checked.finals:
            ended = np.flatnonzero(_ended(leaves, leaves.get(("mask",))).reshape(-1))
            at = ended // width * self._num_envs + columns[ended % width]
            leaves["ended",] = ended
            leaves |= {path: final[at] for path, final in checked.finals.items()}
        return packed(leaves)


def _on_host(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf


def _ended(leaves: Mapping[Path, Any], mask: Any) -> NDArray[np.bool_]:
    """Which rows end an episode and are stored, bool. Each of them needs a final observation."""
    done = as_host(leaves["terminated",]) | as_host(leaves["truncated",])
    return done if mask is None else done & mask
