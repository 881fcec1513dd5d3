"""What the columns are called in AgileRL, and what in relive."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...schema import Field, Path, Schema
from .steps import FLAG, Fields, numbered

__all__ = ["NAMES", "TARGETS", "paths_of", "schema_of"]

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
