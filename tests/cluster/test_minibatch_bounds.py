"""Blocks of a rollout are divided into equally many minibatches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relive.cluster.distributed import bounds_of_parts, number_of_batches
from relive.errors import EmptyError, ParameterError

ROWS = st.lists(st.integers(0, 60), min_size=1, max_size=5).filter(any).map(np.array)


def sizes(rows: np.ndarray, batches: int) -> np.ndarray:
    """How many rows each block has in each minibatch; together all of its rows, one after another."""
    bounds = bounds_of_parts(rows, batches)
    assert (bounds[:, 0] == 0).all()
    assert (bounds[:, -1] == rows).all()
    return np.diff(bounds)


@given(rows=ROWS, more=st.integers(0, 100))
def test_no_minibatch_has_too_many_rows_or_none_and_there_are_as_few_as_possible(rows: np.ndarray, more: int):
    batch_size = np.count_nonzero(rows) + more
    number = number_of_batches(rows, batch_size, None)
    found = sizes(rows, number)
    assert (found >= 0).all()
    assert found.max(1).tolist() == [-(-count // number) for count in rows.tolist()]
    assert (found.max(1) - found.min(1) <= 1).all()
    assert found.sum(0).min() >= 1
    assert found.sum(0).max() <= batch_size
    assert number == 1 or sizes(rows, number - 1).sum(0).max() > batch_size


@given(rows=ROWS, share=st.floats(0.01, 1))
def test_any_number_of_minibatches_up_to_the_rows_of_the_largest_block_has_rows_in_each(rows: np.ndarray, share: float):
    number = number_of_batches(rows, None, int(np.ceil(share * rows.max())))
    assert sizes(rows, number).sum(0).min() >= 1


def test_blocks_of_equally_many_rows_have_equal_parts_in_every_minibatch():
    assert sizes(np.array([10, 10, 10]), 4).tolist() == [[3, 3, 2, 2]] * 3


def test_what_cannot_be_divided_is_refused():
    rows = np.array([5, 0, 7])
    with pytest.raises(EmptyError, match="no rank has a real transition"):
        number_of_batches(np.zeros(2, np.int64), 4, None)
    for given_ in ({"batch_size": None, "num_batches": None}, {"batch_size": 4, "num_batches": 2}):
        with pytest.raises(ParameterError, match="either batch_size or num_batches"):
            number_of_batches(rows, **given_)
    for wrong in (0, 8):
        with pytest.raises(ParameterError, match=f"num_batches={wrong}"):
            number_of_batches(rows, None, wrong)
    with pytest.raises(ParameterError, match=r"batch_size=1: .* 2 blocks"):
        number_of_batches(rows, 1, None)
