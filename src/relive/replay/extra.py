"""load_extra: the learner's state in a save, without the experience."""

from __future__ import annotations

import os
from typing import Any

from .. import files as persist
from ..files.nested import read_extra
from ..memory.estimate import free_memory

__all__ = ["load_extra"]


def load_extra(path: str | os.PathLike[str]) -> Any:
    """The value that was passed as ``extra`` to the ``save`` of a replay or rollout; None if none was. Reads no row.

    Tensors are on the CPU, and dicts of all kinds are plain dicts.

    Raises:
        FileFormatError: there is no save, or it is damaged, foreign or of another version; nothing is ever run.
    """
    with persist.Save(path) as save:
        return read_extra(save, free_memory())
