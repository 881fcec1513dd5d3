"""PyTorchRL's off-policy buffers on relive's core. PyTorchRL need not be installed."""

from __future__ import annotations

from .ere import EREBuffer
from .her import HERBuffer
from .keys import OffPolicyDataKeys
from .per import PERBuffer
from .replay import NStepReplayBuffer, ReplayBuffer

__all__ = ["EREBuffer", "HERBuffer", "NStepReplayBuffer", "OffPolicyDataKeys", "PERBuffer", "ReplayBuffer"]
