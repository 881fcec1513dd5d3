"""The columns of a rollout under AgileRL's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from ...batches.tensordicts import as_tensordict
from ...rollout.buffer import RolloutBuffer as Rollout
from ...steps.schema import Field, Schema
from ...steps.trees import Path
from ..attributes import write_column
from ..errors import StepError
from ..trees import leaves_of
from .steps import FLAG, Fields, numbered, vector

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["NAMES", "TARGETS", "Columns", "columns_of", "paths_of", "schema_of"]

NAMES = {
    "observations": "obs",
    "next_observations": "next_obs",
    "actions": "action",
    "rewards": "reward",
    "dones": "terminated",
    "values": "value",
    "log_probs": "log_prob",
    "advantages": "advantage",
    "returns": "return",
    "hidden_states": "hidden",
    "action_masks": "action_mask",
    "episode_starts": "episode_start",
}
"""AgileRL's name of a column -> relive's. AgileRL's done, true for either kind of end, is stored as ``terminated``."""

TARGETS = ("log_probs", "advantages", "values", "returns")
"""The columns that minibatches of sequences have without padding."""


def schema_of(obs: Fields, action: Field, hidden: Fields) -> Schema:
    """The fields of a step, without those that AgileRL allocates when a step first has them."""
    fields: dict[str, Any] = {"obs": numbered(obs), "next_obs": numbered(obs), "action": action, "reward": ()}
    fields |= {"terminated": FLAG, "truncated": FLAG, "value": (), "log_prob": (), "advantage": (), "return": ()}
    return Schema(fields | ({"hidden": numbered(hidden)} if hidden else {}))


def paths_of(names: Iterable[str], obs: Fields, hidden: Fields) -> dict[Path, Path]:
    """AgileRL's path -> relive's path, for each leaf of these columns."""
    nested = {"observations": obs, "next_observations": obs, "hidden_states": hidden}
    found: dict[Path, Path] = {}
    for name in names:
        for i, path in enumerate(nested.get(name, [()])):
            found[name, *path] = (NAMES[name], str(i)) if path else (NAMES[name],)
    return found


def columns_of(paths: Mapping[Path, Path]) -> tuple[str, ...]:
    """relive's names of the columns that these leaves are in."""
    return tuple(dict.fromkeys(inner[0] for inner in paths.values()))


class Columns:
    """The columns of a rollout under AgileRL's names.

    ``data`` is AgileRL's ``buffer``: a TensorDict ``[capacity, num_envs]`` of views into the rollout. Users replace its
    columns (``buffer[name] = ...``), or all of ``data``. :meth:`adopt` copies the replacements into the storage.

    Args:
        rollout: the storage.
        obs: the fields of an observation.
        hidden: the fields of the recurrent states.
    """

    def __init__(self, rollout: Rollout, obs: Fields, hidden: Fields) -> None:
        self._rollout, self._obs, self._hidden = rollout, obs, hidden
        block = rollout.block[: rollout.num_steps]
        leaves = {path: block[inner] for path, inner in self.paths().items()}
        self.data: Any = as_tensordict(leaves, (rollout.num_steps, rollout.num_envs), torch.device("cpu"))
        self._own = leaves_of(self.data)

    def paths(self, names: Iterable[str] = NAMES) -> dict[Path, Path]:
        """AgileRL's path -> relive's path, for each leaf of those of these columns that exist."""
        known = self._rollout.schema.names
        return paths_of([name for name in names if NAMES[name] in known], self._obs, self._hidden)

    def adopt(self) -> None:
        """Copy tensors that replaced a column into the storage, and put the column back.

        Raises:
            StepShapeError: such a tensor has another shape.
        """
        given = leaves_of(self.data)
        for path, column in self._own.items():
            other = given.get(path)
            if other is column:
                continue
            if other is not None:
                write_column(_written(path), column, other)
            self.data[path] = column

    def read(self, batch_size: int | None, device: torch.device, *, copy: bool) -> TensorDict:
        """All steps ``[T * N]``, oldest first, or ``batch_size`` drawn without replacement.

        ``copy=False`` returns views where the stored rows are in the order of time and none is left out.
        """
        rollout, paths = self._rollout, self.paths()
        if batch_size is None and not copy and len(rollout) == rollout.steps * rollout.num_envs:
            leaves = {path: rollout[inner].flatten(0, 1) for path, inner in paths.items()}
            return as_tensordict(leaves, (len(rollout),), device)
        columns = columns_of(paths)
        batch = rollout.flat(columns) if batch_size is None else rollout.sample(batch_size, columns)
        leaves = {path: batch[inner] for path, inner in paths.items()}
        return as_tensordict(leaves, batch.batch_size, device)

    def add_optional(self, step: dict[str, Any], episode_start: Any, action_mask: Any) -> None:
        """Add to a step the fields that AgileRL allocates when a step first has them.

        Raises:
            StepShapeError: a shape does not fit.
        """
        n, known = self._rollout.num_envs, self._rollout.schema
        like = cast("Field", known["action_mask"]) if "action_mask" in known else None
        if action_mask is not None:
            field = like or Field((torch.as_tensor(action_mask).numel() // n,), torch.bool)
            step["action_mask"] = vector("action_mask", action_mask, n, field)
            if like is None:
                self._allocate("action_masks", field)
                self.data["action_masks"].fill_(True)
        elif like is not None:
            step["action_mask"] = np.ones((n, *like.shape), np.bool_)
        none = np.zeros(n, np.bool_)
        step["episode_start"] = none if episode_start is None else vector("episode_start", episode_start, n, FLAG)
        if "episode_start" not in known:
            self._allocate("episode_starts", FLAG)

    def _allocate(self, name: str, field: Field) -> None:
        self._rollout.add_fields(**{NAMES[name]: field})
        self.data[name] = self._own[name,] = self._rollout.block[NAMES[name]][: self._rollout.num_steps]

    def load(self, given: Any) -> None:
        """Copy the columns of another TensorDict.

        Raises:
            StepError: ``given`` is no TensorDict, or one of its columns has another shape.
        """
        if not isinstance(given, type(self.data)):
            raise StepError(f"buffer: expected a TensorDict, got {type(given).__name__}")
        columns = leaves_of(given)
        for path in self._own.keys() & columns.keys():
            write_column(_written(path), self._own[path], columns[path])


def _written(path: Path) -> str:
    """A column as a user writes it, for errors."""
    return f"buffer[{', '.join(map(repr, path))}]"
