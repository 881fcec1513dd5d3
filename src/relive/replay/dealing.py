"""Dealing: gives transitions without an order to another number of envs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..errors import ParameterError
from ..kernels.ring_state import COLUMNS, COMPLETED, COUNT, HEAD
from ..memory.layout import row_layout
from ..parameters import is_count
from ..steps.schema import Schema
from .fields import stored_fields

__all__ = ["dealt", "require_unordered"]


INDICES = ("sampler.order", "sampler.inner.order")
"""Arrays of samplers that name transitions by index. An index means something else with another number of envs."""


def require_unordered(content: Mapping[str, Any], num_envs: Any, store: Any) -> None:
    """Refuse another number of envs if it would tear episodes, or a value that is not such a number.

    Raises:
        ParameterError: the steps of the saved replay have an order; or ``num_envs`` is not a positive whole number; or
            there is a ``store``, too.
    """
    if not is_count(num_envs, 1):
        raise ParameterError(f"num_envs: expected a whole number of at least 1, got {num_envs!r}")
    if store is not None:
        raise ParameterError("num_envs: a store of your own cannot be given with it; load without, then append")
    if num_envs != content.get("num_envs") and content.get("ordered") is not False:
        raise ParameterError(
            f"num_envs: expected {content.get('num_envs')}, as it was saved, got {num_envs}; steps in order belong to "
            "the episodes of their env, and only a replay with ordered=False can change its number of envs. Load it as "
            "it is, and draw from it and from a new buffer with a Mixture"
        )


def dealt(
    arrays: Mapping[str, Any], content: Mapping[str, Any], num_envs: int, capacity: int | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of a replay without an order, dealt to ``num_envs`` envs like cards, from the oldest transition on.

    Their order and their priorities stay. Indices are new, and count from 0. ``capacity`` is the number of rows
    over all envs (default: about as many as before); if it is smaller, the newest transitions are kept.
    """
    layout, _ = row_layout(stored_fields(Schema.from_json(json.dumps(content["schema"])), True).leaves)
    rows = (capacity or content["rows_per_env"] * content["num_envs"]) // num_envs
    if rows < 2:
        raise ParameterError(f"capacity: expected at least 2 rows for each of {num_envs} envs, got {rows}")
    by_age = np.argsort(layout.arrays(arrays["rows"])["_stamp",])[-rows * num_envs :]
    hands = [by_age[env::num_envs] for env in range(num_envs)]
    order = np.concatenate(hands)
    per_row = {f"sampler.{name}" for name in content["sampler_rows"]}
    moved = {
        name: value[order] if name == "rows" or name.startswith("block.") or name in per_row else value
        for name, value in arrays.items()
    }
    moved |= {name: moved[name][:0] for name in INDICES if name in moved}  # a new epoch begins
    notes = layout.arrays(moved["rows"])
    notes["_order",][:] = np.concatenate([np.arange(len(hand)) for hand in hands])
    notes["_stamp",][:] = np.concatenate([np.arange(env, len(by_age), num_envs) for env in range(num_envs)])
    state = np.zeros((num_envs, COLUMNS), np.int64)
    state[:, HEAD] = state[:, COUNT] = [len(hand) for hand in hands]
    counters = [*content["counters"]]
    counters[COMPLETED] = len(by_age)
    changed = {"num_envs": num_envs, "rows_per_env": rows, "state": state.tolist(), "counters": counters}
    return {name: torch.as_tensor(value) for name, value in moved.items()}, {**content, **changed}
