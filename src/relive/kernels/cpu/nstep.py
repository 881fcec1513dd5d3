"""The n-step rule: reference/nstep.py's names and, to the bit, results."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..reference import nstep as plain
from ..reference.nstep import CUT, DISCOUNT, INDEX, NEXT_INDEX, STEPS, SUM, TERMINAL, Results
from .handles import Ints
from .jit import inlined, jit, strided

__all__ = ["add_reward", "bootstrap", "results", "write_window"]

add_reward = jit(plain.add_reward)
bootstrap = jit(plain.bootstrap)
write_window = jit(plain.write_window)


@inlined
def results(rows: Any, batch: Ints) -> Results:
    """See :func:`relive.kernels.reference.nstep.results`.

    A row is ``wide`` bytes long, a multiple of 16, so the next one is ``wide`` // s elements of s bytes away.
    """
    count, wide, there = rows.shape[0], rows.shape[1], rows.ctypes.data
    return Results(
        strided(there + batch[INDEX], count, wide // 8, np.int64),
        strided(there + batch[NEXT_INDEX], count, wide // 8, np.int64),
        strided(there + batch[DISCOUNT], count, wide // 4, np.float32),
        strided(there + batch[STEPS], count, wide // 4, np.int32),
        strided(there + batch[SUM], count, wide // 4, np.float32),
        strided(there + batch[TERMINAL], count, wide, np.uint8),
        strided(there + batch[CUT], count, wide, np.uint8),
    )
