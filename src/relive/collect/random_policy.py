"""The policy that fills a buffer before training: uniformly random legal actions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..batches.states import swap_layers
from ..errors import EnvError
from ..parameters import seed_or_drawn
from ..steps.arrays import Bools, as_host
from ..steps.schema import Schema
from ..steps.trees import Path, descend
from .envs import require_start

__all__ = ["RandomPolicy"]


class RandomPolicy:
    """Uniformly random actions among those that ``action_mask`` allows. All other fields of a policy are 0."""

    def __init__(self, space: Any, schema: Schema, num_envs: int, device: torch.device, seed: int | None) -> None:
        self._space, self._schema, self._num_envs, self._device = space, schema, num_envs, device
        self._rng = np.random.default_rng(seed_or_drawn(require_start("warm", 1, seed)))
        space.seed(int(self._rng.integers(2**31)))

    def __call__(self, obs: Any, **inputs: Any) -> dict[str, Any]:
        """Every field of the schema that comes neither from the env nor from ``inputs``."""
        given = {"obs", "action", "reward", "terminated", "truncated", *inputs} - {"hidden"}
        answer = {name: self._schema.rebuild(name, self._zeros) for name in self._schema.names if name not in given}
        return answer | {"action": self._actions(inputs.get("action_mask"))}

    def _zeros(self, path: Path) -> Tensor:
        leaf = self._schema.leaves[path]
        zeros = torch.zeros((self._num_envs, *leaf.shape), dtype=leaf.dtype, device=self._device)
        return swap_layers(zeros) if path[0] == "hidden" else zeros

    def _actions(self, mask: Any) -> Any:
        if mask is None:
            rows = [self._space.sample() for _ in range(self._num_envs)]
            return self._schema.rebuild("action", lambda path: np.stack([descend(row, path[1:]) for row in rows]))
        legal: Bools = as_host(mask).astype(np.bool_)
        if legal.ndim != 2 or not hasattr(self._space, "start"):
            raise EnvError("random actions under an action mask need one Discrete action; pass warm(..., policy=...)")
        return np.where(legal, self._rng.random(legal.shape), -1.0).argmax(1) + int(self._space.start)
