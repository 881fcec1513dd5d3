"""The layout of packed rows: every field aligned, apart from the others, and read back bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relive import Field
from relive.memory.layout import RowLayout
from relive.steps.schema import Path
from support.fields import LEAVES, bits, noise

# RowLayout


@given(LEAVES)
def test_every_field_of_a_row_is_aligned_inside_it_and_apart_from_the_others(leaves: dict[Path, Field]) -> None:
    layout = RowLayout(leaves)
    rows = torch.zeros((2, layout.nbytes), dtype=torch.uint8)
    base, taken = rows.data_ptr(), set()
    assert layout.nbytes % 16 == 0
    assert layout.nbytes <= max(16, 15 + sum(field.nbytes for field in leaves.values()))
    for path, view in layout.views(rows).items():
        field = leaves[path]
        assert (tuple(view.shape), view.dtype) == ((2, *field.shape), field.dtype)
        if field.nbytes:
            start = view.data_ptr() - base
            assert start % field.dtype.itemsize == 0
            own = set(range(start, start + field.nbytes))
            assert own <= set(range(layout.nbytes))
            assert not own & taken
            taken |= own


@given(LEAVES, st.integers(1, 5))
def test_what_is_written_through_the_views_of_rows_is_read_back_bit_for_bit(leaves: dict[Path, Field], n: int) -> None:
    layout = RowLayout(leaves)
    rows = torch.full((n, layout.nbytes), 0xAA, dtype=torch.uint8)
    given_ = {path: noise((n, *field.shape), field.dtype, seed) for seed, (path, field) in enumerate(leaves.items())}
    for path, view in layout.views(rows).items():
        view.copy_(given_[path])
    for path, view in layout.views(rows.clone()).items():
        assert bits(view) == bits(given_[path])


def test_views_of_rows_alias_their_memory_both_ways() -> None:
    layout = RowLayout(
        {("flag",): Field((), torch.bool), ("x",): Field((2,), torch.float64), ("i",): Field((), torch.int16)}
    )
    rows = torch.zeros((3, layout.nbytes), dtype=torch.uint8)
    views = layout.views(rows)
    views["x",][1] = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert rows.view(torch.float64)[1, :2].tolist() == [1.0, 2.0]
    assert rows[[0, 2]].count_nonzero() == 0
    rows.zero_()
    assert views["x",].count_nonzero() == 0
    views["flag",].fill_(True)
    assert rows.count_nonzero() == 3


@pytest.mark.parametrize(("floats", "nbytes"), [(28, 128), (16, 64), (44, 192), (20, 80), (1, 16)])
def test_rows_become_whole_cache_lines_if_they_grow_by_a_quarter_at_most(floats: int, nbytes: int) -> None:
    fields = {("x",): Field((floats,))}
    assert RowLayout(fields).nbytes == -(-4 * floats // 16) * 16
    assert RowLayout(fields, lines=True).nbytes == nbytes
