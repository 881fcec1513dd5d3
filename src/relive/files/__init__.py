"""Named arrays to a directory and back, saved whole or not at all and checked when read. Nothing here is about RL."""

from .format import Spec, Streamed
from .save import Save, read, write

__all__ = ["Save", "Spec", "Streamed", "read", "write"]
