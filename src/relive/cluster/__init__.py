"""Several rings that draw and learn as one: shards of a replay, and rollouts of several ranks."""

from typing import TYPE_CHECKING

from ..names import lazy_modules
from .replay import Replay, load_extra
from .rollouts import Rollouts

if TYPE_CHECKING:
    from . import distributed as distributed
    from . import plan as plan
    from . import ray as ray
else:  # Ray may not be installed
    __getattr__, __dir__ = lazy_modules(__name__, ("distributed", "plan", "ray"))

__all__ = ["Replay", "Rollouts", "load_extra"]
