"""Rows in private memory."""

from __future__ import annotations

import numpy as np
import pytest

from relive.memory.ram import _runs


@pytest.mark.parametrize("places", [[], [3], [5, 4, 3], [*range(40, 60), *range(20), *range(90, 130)], [*range(32), 7]])
def test_rows_are_restored_in_runs_or_one_by_one_to_the_same_places(places: list[int]) -> None:
    wanted, target = np.array(places, np.int64), np.full(130, -1)
    for here, there in (runs := list(_runs(wanted))):
        target[there] = np.arange(len(places))[here]
    expected = np.full(130, -1)
    expected[wanted] = np.arange(len(places))
    assert np.array_equal(target, expected)
    assert all(isinstance(there, slice) for _, there in runs) == (len(places) != 1 and len(places) != 3)
