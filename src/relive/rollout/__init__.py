"""RolloutBuffer: a block of steps by one policy, filled once and read as permutations or sequences."""

from .buffer import RolloutBuffer

__all__ = ["RolloutBuffer"]
