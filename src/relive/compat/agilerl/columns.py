"""What the columns are called in AgileRL, and what in relive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...steps.schema import Field, Schema
from ...steps.trees import Path
from ..errors import StepError
from .steps import FLAG, Fields, numbered

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["NAMES", "TARGETS", "adopt", "columns_of", "leaves_of", "paths_of", "schema_of", "write"]

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
"""AgileRL's names of the columns, and relive's. What both done bits make is stored as ``terminated``."""

TARGETS = ("log_probs", "advantages", "values", "returns")
"""What minibatches of sequences have without padding."""


def schema_of(obs: Fields, action: Field, hidden: Fields) -> Schema:
    """The fields of a step, but those that AgileRL allocates with the first step that has them."""
    fields: dict[str, Any] = {"obs": numbered(obs), "next_obs": numbered(obs), "action": action, "reward": ()}
    fields |= {"terminated": FLAG, "truncated": FLAG, "value": (), "log_prob": (), "advantage": (), "return": ()}
    return Schema(fields | ({"hidden": numbered(hidden)} if hidden else {}))


def paths_of(names: Iterable[str], obs: Fields, hidden: Fields) -> dict[Path, Path]:
    """Of each leaf of these columns: its path in AgileRL, and in relive."""
    nested = {"observations": obs, "next_observations": obs, "hidden_states": hidden}
    found: dict[Path, Path] = {}
    for name in names:
        for i, path in enumerate(nested.get(name, [()])):
            found[name, *path] = (NAMES[name], str(i)) if path else (NAMES[name],)
    return found


def columns_of(paths: Mapping[Path, Path]) -> tuple[str, ...]:
    """relive's names of the columns that have these leaves."""
    return tuple(dict.fromkeys(inner[0] for inner in paths.values()))


def leaves_of(data: TensorDict) -> dict[Any, Any]:
    """What a TensorDict holds at the leaves, by the names that it has there: strings, or tuples of them."""
    items: Any = data.items(include_nested=True, leaves_only=True)
    return dict(items)


def adopt(buffer: TensorDict, columns: Mapping[Any, Tensor]) -> None:
    """Copy what was put into ``buffer`` in place of the ``columns``, by ``buffer[name] = ...``, and put these back.

    Raises:
        StepError: it has another shape.
    """
    given = leaves_of(buffer)
    for name, column in columns.items():
        other = given.get(name)
        if other is column:
            continue
        write(name, column, other)
        buffer[name] = column


def write(name: Any, column: Tensor, given: Tensor | None) -> None:
    """Copy what was given for a column, if anything was.

    Raises:
        StepError: it has another shape.
    """
    if given is None:
        return
    if given.shape != column.shape:
        raise StepError(f"buffer[{name!r}]: expected {tuple(column.shape)}, got {tuple(given.shape)}")
    column.copy_(given)
