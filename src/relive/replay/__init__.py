"""ReplayBuffer: the newest steps of each env, drawn by a sampler and read through a view."""

from .buffer import ReplayBuffer
from .mixture import Mixture

__all__ = ["Mixture", "ReplayBuffer"]
