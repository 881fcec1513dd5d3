"""Batches of more rows than are drawn before they are read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from relive import FrameStack, NStep, core
from support import internals
from support.twins import Twin


@pytest.mark.parametrize("depth", [1, 30])
@pytest.mark.parametrize("newest", [0, 40])
def test_a_large_batch_that_is_drawn_part_by_part_is_that_of_the_whole_draw(depth: int, newest: int) -> None:
    made = Twin(2, 50, view=FrameStack(depth, NStep(2, 0.5)))
    made.play(*("".join("T" if (t + 3 * e) % 37 == 36 else "." for e in range(2)) for t in range(90)))
    ring: Any = internals.ring(made.buffer)  # with histories of 29 rows, most draws miss, and rows are counted out
    for count in (1, 255, 256, 257, 1000):
        places = np.empty(count, np.int64)
        assert core.draw(ring.core, 11, newest, places)
        fields = ring.windows(core.draw_by_chance(ring.core, count, 11, newest), 2, 0.5)
        assert fields["index",].tolist() == ring.index_of(places).tolist()
