"""Buffers of AgileRL's kind, and steps for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from relive.compat.agilerl import RolloutBuffer

BOX = spaces.Box(-10, 10, (2,), np.float32)
MOVES = spaces.Discrete(3)
STATES = {"actor.encoder_h": (2, 1, 4), "actor.encoder_c": (2, 1, 4)}


def steps(
    count: int, envs: int, seed: int = 0, done: float = 0.2, masks: int = 0, recurrent: bool = False
) -> list[Any]:
    """Random steps as AgileRL's collector hands them to ``add``."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        step: dict[str, Any] = {
            "obs": rng.normal(size=(envs, 2)).astype(np.float32),
            "action": rng.integers(0, 3, envs),
            "reward": rng.normal(size=envs),
            "done": rng.random(envs) < done,
            "value": rng.normal(size=envs).astype(np.float32),
            "log_prob": rng.normal(size=envs).astype(np.float32),
            "next_obs": rng.normal(size=(envs, 2)).astype(np.float32),
        }
        if masks:
            step["action_mask"] = rng.random((envs, masks)) < 0.5
        if recurrent:
            state = rng.normal(size=(2, 2, envs, 4)).astype(np.float32)
            step["hidden_state"] = {name: torch.from_numpy(state[i]) for i, name in enumerate(STATES)}
        made.append(step)
    return made


def filled(count: int = 12, envs: int = 3, capacity: int | None = None, **options: Any) -> Any:
    recurrent = "max_seq_len" in options or options.get("recurrent", False)
    if recurrent:
        options |= {"recurrent": True, "hidden_state_architecture": STATES}
    played = options.pop("steps", None) or steps(count, envs, recurrent=recurrent)
    buffer = RolloutBuffer(capacity or count, BOX, MOVES, envs, seed=0, **options)
    for step in played:
        buffer.add(**step)
    return buffer
