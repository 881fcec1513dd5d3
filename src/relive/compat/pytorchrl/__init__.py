"""PyTorchRL's off-policy buffers over relive's core; PyTorchRL need not be installed."""

from __future__ import annotations

from .ere import EREBuffer
from .keys import OffPolicyDataKeys
from .per import PERBuffer
from .replay import NStepReplayBuffer, ReplayBuffer

__all__ = ["EREBuffer", "NStepReplayBuffer", "OffPolicyDataKeys", "PERBuffer", "ReplayBuffer"]
