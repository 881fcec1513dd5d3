"""Named arrays to a directory and back: saved whole or not at all, checked when read. Knows no RL."""

from .format import Spec, Streamed
from .save import Save, read, write

__all__ = ["Save", "Spec", "Streamed", "read", "write"]
