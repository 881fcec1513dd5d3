"""Seeds for drop-ins without one: drawn from the generator that the host reads, whenever the host reads it."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["drawn_by_numpy", "renew"]


def renew(buffer: Any, seed: int | None) -> None:
    """Draw a new seed for a buffer from torch's default generator, unless the drop-in was given a ``seed``.

    So ``torch.manual_seed`` makes two runs equal, as it does with the host.
    """
    if seed is None:
        buffer.seed = None


def drawn_by_numpy() -> int:
    """A seed from NumPy's global generator: the 53 bits of one number in [0, 1)."""
    return int(np.random.random_sample() * 2**53)
