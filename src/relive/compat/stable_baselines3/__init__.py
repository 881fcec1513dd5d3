"""Stable-Baselines3's buffers on relive's core, for ``replay_buffer_class=`` and ``rollout_buffer_class=``.

The algorithms require subclasses of Stable-Baselines3's own classes, so Stable-Baselines3 must be installed.
"""

from __future__ import annotations

from .buffers import (
    DictReplayBuffer,
    DictRolloutBuffer,
    HerReplayBuffer,
    NStepReplayBuffer,
    PrioritizedDictReplayBufferSamples,
    PrioritizedReplayBuffer,
    PrioritizedReplayBufferSamples,
    ReplayBuffer,
    RolloutBuffer,
)
from .originals import ConvertsReplays

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
