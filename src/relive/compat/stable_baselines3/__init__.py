"""Stable-Baselines3's buffers over relive's core, for ``replay_buffer_class=`` and ``rollout_buffer_class=``.

Each is a subclass of the class that it stands in for, since the algorithms ask for that, so Stable-Baselines3 has to
be installed.
"""

from __future__ import annotations

from .her import HerReplayBuffer
from .originals import ConvertsReplays
from .replay import (
    DictReplayBuffer,
    NStepReplayBuffer,
    PrioritizedDictReplayBufferSamples,
    PrioritizedReplayBuffer,
    PrioritizedReplayBufferSamples,
    ReplayBuffer,
)
from .rollout import DictRolloutBuffer, RolloutBuffer

__all__ = [
    "ConvertsReplays",
    "DictReplayBuffer",
    "DictRolloutBuffer",
    "HerReplayBuffer",
    "NStepReplayBuffer",
    "PrioritizedDictReplayBufferSamples",
    "PrioritizedReplayBuffer",
    "PrioritizedReplayBufferSamples",
    "ReplayBuffer",
    "RolloutBuffer",
]
