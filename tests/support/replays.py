"""Replays of small plays, and the schemas they have."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from relive import (
    Field,
    Prioritized,
    ReplayBuffer,
    Schema,
)
from support import internals
from support.twins import Twin

FLAGS = {name: Field((), torch.bool) for name in ("terminated", "truncated")}
PLAIN = Schema({"obs": (2,), "action": Field((), torch.int64), "reward": (), **FLAGS})


def random_plays(seed: int, num_envs: int, count: int, letters: str = ".....TUB") -> list[str]:
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list(letters), num_envs)) for _ in range(count)]


# What is refused: the error says what and where, and nothing has changed.


def three(dress: str = "dict", **options: Any) -> Twin:
    return Twin(3, 8, dress=dress, sampler=Prioritized(), **options).play("...", ".T.", "..U")


def kept(sampler: Any) -> int:
    """Bytes of all arrays that a sampler holds."""
    inner = getattr(sampler, "inner", sampler)
    tree = getattr(inner, "_tree", None)
    arrays = [getattr(inner, name) for name in ("_errors", "_rest") if hasattr(inner, name)]
    arrays += [] if tree is None else [internals.nodes(tree).base, internals.minima(tree)]
    return sum((array if array.base is None else array.base).nbytes for array in arrays)


def rate(replay: ReplayBuffer, batch: Any) -> None:
    """Each row's error is its reward."""
    if replay.has_priorities:
        mask = batch["mask"] if "lengths" in batch.keys() else None
        replay.update_priorities(batch["index"], batch["reward"], mask)


def assert_equal(one: Any, other: Any) -> None:
    """Nested batches have the same fields, in order, with the same numbers."""
    assert list(one.keys()) == list(other.keys())
    for name in one.keys():
        same = torch.equal if isinstance(one[name], torch.Tensor) else assert_equal
        assert same(one[name], other[name]) in (True, None), name


def numbers() -> dict[str, Any]:
    """A step of two envs, the second of which ended, of float fields; what is not read is NaN."""
    obs = {"x": np.zeros((2, 3), np.float32), "half": torch.zeros(2, 1, dtype=torch.bfloat16)}
    after = {"x": np.full((2, 3), np.nan, np.float32), "half": torch.full((2, 1), torch.nan, dtype=torch.bfloat16)}
    after["x"][1], after["half"][1] = 0.0, 0.0
    flags = np.array([False, True])
    return {"obs": obs, "action": np.zeros(2), "reward": np.zeros(2, np.float32), "terminated": flags,
            "truncated": ~flags & False, "log_prob": np.full(2, -np.inf), "next_obs": after}  # fmt: skip
