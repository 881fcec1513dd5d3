"""rsl_rl's ``RolloutStorage`` on relive's core, compared with rsl_rl 5.5.1.

``RolloutStorage`` and the two functions for trajectories do not need rsl_rl. ``PPO`` and ``Distillation`` are rsl_rl's
own with this storage. They are created on first use: ``class_name="relive.compat.rsl_rl:PPO"`` in a runner's
configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .storage import RolloutStorage, split_and_pad_trajectories, unpad_trajectories

if TYPE_CHECKING:
    from .algorithms import PPO as PPO
    from .algorithms import Distillation as Distillation

__all__ = ["PPO", "Distillation", "RolloutStorage", "split_and_pad_trajectories", "unpad_trajectories"]


def __getattr__(name: str) -> Any:
    if name in ("PPO", "Distillation"):
        from . import algorithms

        return getattr(algorithms, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
