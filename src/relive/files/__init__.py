"""Named arrays to a directory and back, saved whole or not at all and checked when read. Nothing here is about RL."""

from .format import Contents, Spec, Streamed
from .save import NewSave, Save, SaveHandle, Saves, detached, read, update, write

__all__ = [
    "Contents",
    "NewSave",
    "Save",
    "SaveHandle",
    "Saves",
    "Spec",
    "Streamed",
    "detached",
    "read",
    "update",
    "write",
]
