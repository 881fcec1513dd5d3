"""Several rings that draw and learn as one: shards of a replay, and rollouts of several ranks."""

from .replay import Replay, load_extra
from .rollouts import Rollouts

__all__ = ["Replay", "Rollouts", "load_extra"]
