"""Readers of other libraries' live buffers. No library is imported: a buffer is known by class or by attributes."""

from .order import taking_turns
from .registry import read_host, readable_hosts
from .rollouts import cleanrl_arrays, is_cleanrl

__all__ = ["cleanrl_arrays", "is_cleanrl", "read_host", "readable_hosts", "taking_turns"]
