"""Replay and rollouts over torch.distributed: each rank owns its ring, its rollout and its environments."""

from .minibatches import minibatches
from .replay import ShardedReplay
from .sequences import sequences

__all__ = ["ShardedReplay", "minibatches", "sequences"]
