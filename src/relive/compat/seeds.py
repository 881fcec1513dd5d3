"""Seeds of drop-ins that were given none: from the generator that the host reads, each time that the host would."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["drawn_by_numpy", "renew"]


def renew(buffer: Any, seed: int | None) -> None:
    """Unless a drop-in was given a ``seed``, let torch's default generator give its buffer a new one.

    So whatever seeds that generator, at whatever time, makes two runs equal, as it does in the host.
    """
    if seed is None:
        buffer.seed = None


def drawn_by_numpy() -> int:
    """A seed from NumPy's global generator: all the bits of one number in [0, 1)."""
    return int(np.random.random_sample() * 2**53)
