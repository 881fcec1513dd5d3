"""Exchange: experience from and to the formats of other libraries."""

from .lerobot import from_lerobot, to_lerobot
from .log import Log, log_of
from .minari import from_minari, to_minari
from .rlds import from_rlds
from .stable_baselines3 import from_stable_baselines3
from .torchrl import from_torchrl
from .velora import from_velora

__all__ = [
    "Log",
    "from_lerobot",
    "from_minari",
    "from_rlds",
    "from_stable_baselines3",
    "from_torchrl",
    "from_velora",
    "log_of",
    "to_lerobot",
    "to_minari",
]
