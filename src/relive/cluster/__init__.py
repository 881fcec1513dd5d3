"""Several rings that draw and learn as one: shards of a replay, and rollouts of several ranks."""

from .replay import Replay, load_extra

__all__ = ["Replay", "load_extra"]
