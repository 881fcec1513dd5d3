"""Where steps lie: the layout of packed rows, and columns that are a ring in time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from relive import Field, errors
from relive.batches import tensordicts
from relive.batches.tensordicts import as_tensordict
from relive.memory.layout import LARGE_FIELD, RowLayout
from relive.rollout.columns import Columns
from relive.rollout.packed import PackedRows
from relive.steps.trees import Path

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip
FIELDS = st.builds(Field, st.lists(st.integers(0, 4), max_size=3).map(tuple), st.sampled_from(DTYPES))
LEAVES = st.lists(FIELDS, min_size=1, max_size=9).map(lambda fields: {(f"f{i}",): x for i, x in enumerate(fields)})


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Random bits; bools are 0 or 1."""
    rng = np.random.default_rng(seed)
    if dtype is torch.bool:
        return torch.from_numpy(rng.integers(0, 2, shape).astype(bool))
    raw = rng.integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape) if len(raw) else torch.empty(shape, dtype=dtype)


def bits(x: Tensor) -> bytes:
    """The bytes of a tensor in the order of its elements, so that NaN equals itself."""
    packed = torch.empty(x.shape, dtype=x.dtype).copy_(x)
    return packed.flatten().view(torch.uint8).numpy().tobytes() if x.numel() else b""


def columns_of(leaves: dict[Path, Field], steps: int, envs: int) -> dict[Path, Tensor]:
    """A column ``[T, N, ...]`` of noise for each leaf."""
    return {
        path: noise((steps, envs, *field.shape), field.dtype, seed) for seed, (path, field) in enumerate(leaves.items())
    }


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


# PackedRows


@given(LEAVES, st.integers(1, 4), st.integers(1, 3), st.data())
def test_gathered_rows_equal_the_columns_at_their_index(
    leaves: dict[Path, Field], steps: int, envs: int, data: st.DataObject
) -> None:
    columns = columns_of(leaves, steps, envs)
    index = torch.tensor(data.draw(st.lists(st.integers(0, steps * envs - 1), max_size=8)), dtype=torch.int64)
    batch = PackedRows(columns).gather(index)
    assert list(batch) == list(columns)
    for path, column in columns.items():
        want = column.flatten(0, 1)[index]
        assert (batch[path].shape, batch[path].dtype) == (want.shape, want.dtype)
        assert bits(batch[path]) == bits(want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_fields_at_the_limit_of_packing_are_gathered_exactly(dtype: torch.dtype, over: int) -> None:
    length = LARGE_FIELD // dtype.itemsize + over
    columns = columns_of({("a",): Field((3,), torch.uint8), ("large",): Field((length,), dtype), ("b",): Field()}, 3, 2)
    index = torch.tensor([5, 0, 0, 3])
    batch = PackedRows(columns).gather(index)
    assert list(batch) == list(columns)
    for path, column in columns.items():
        assert bits(batch[path]) == bits(column.flatten(0, 1)[index])


def test_large_fields_alone_are_gathered_too() -> None:
    columns = columns_of({("image",): Field((84, 84, 4), torch.uint8), ("scan",): Field((300,))}, 2, 2)
    batch = PackedRows(columns).gather(torch.tensor([3, 1]))
    for path, column in columns.items():
        assert bits(batch[path]) == bits(column.flatten(0, 1)[[3, 1]])


@pytest.mark.parametrize("length", [2, LARGE_FIELD])
def test_gathered_rows_are_a_copy(length: int) -> None:
    columns = {("x",): torch.ones(2, 2, length)}
    packed = PackedRows(columns)
    packed.gather(torch.arange(4))["x",].zero_()
    assert packed.gather(torch.arange(4))["x",].min() == 1
    assert columns["x",].min() == 1


# Columns


def ring(num_steps: int = 3, wrap: bool = True, **leaves: Field) -> Columns:
    """Columns of two envs."""
    fields = {(name,): field for name, field in (leaves or {"x": Field()}).items()}
    return Columns(fields, num_steps, 2, torch.device("cpu"), wrap)


def write(columns: Columns, *values: Any) -> None:
    """Write one row and go on."""
    columns.write(columns.next_row, values)
    columns.advance(1)


@pytest.mark.parametrize("total", range(9))
def test_rows_are_read_in_the_order_of_time_however_often_the_ring_came_round(total: int) -> None:
    columns = ring()
    for t in range(total):
        write(columns, np.full(2, t, np.float32))
    newest = list(range(max(0, total - 3), total))
    assert columns.count == len(newest)
    assert columns.is_full == (total >= 3)
    assert columns.ordered(("x",)).tolist() == [[t, t] for t in newest]
    columns.put(("x",), columns.last_row, torch.tensor([-1.0, -2.0]))
    assert columns.with_last(("x",)).tolist() == [*([t, t] for t in newest), [-1, -2]]
    assert columns.ordered(("x",)).tolist() == [[t, t] for t in newest]
    for i, t in enumerate(newest):
        assert columns.view(("x",))[columns.place(torch.tensor(i))].tolist() == [t, t]


def test_columns_that_do_not_wrap_refuse_what_is_too_much() -> None:
    columns = ring(num_steps=1, wrap=False)
    write(columns, np.ones(2, np.float32))
    with pytest.raises(errors.FullError, match=r"already has its 1 steps.*clear\(\).*wrap=True"):
        _ = columns.next_row


def test_arrays_and_tensors_may_be_mixed_in_a_row() -> None:
    columns = ring(
        a=Field((2,)), b=Field((), torch.int64), c=Field((), torch.bfloat16), d=Field((0,)), e=Field((3,), torch.uint8)
    )
    for t in range(2):
        row: list[Any] = [
            torch.full((2, 2), t + 0.5),
            np.full(2, t),
            torch.full((2,), t + 1.5, dtype=torch.bfloat16),
            torch.empty(2, 0),
            np.full((2, 3), t, np.uint8),
        ]
        write(columns, *row)
    assert columns.ordered(("a",))[:, :, 0].tolist() == [[0.5, 0.5], [1.5, 1.5]]
    assert columns.ordered(("b",)).tolist() == [[0, 0], [1, 1]]
    assert columns.ordered(("c",)).tolist() == [[1.5, 1.5], [2.5, 2.5]]
    assert columns.ordered(("e",))[:, :, 2].tolist() == [[0, 0], [1, 1]]


def test_a_row_of_arrays_after_one_of_tensors_does_not_copy_the_tensors_again() -> None:
    columns = ring(a=Field(), b=Field())
    write(columns, torch.ones(2), torch.ones(2))
    write(columns, np.full(2, 2, np.float32), torch.full((2,), 2.0))
    write(columns, np.full(2, 3, np.float32), np.full(2, 3, np.float32))
    for name in "ab":
        assert columns.ordered((name,)).tolist() == [[1, 1], [2, 2], [3, 3]]


@pytest.mark.parametrize("total", [2, 3, 4, 5])
def test_an_attached_column_is_in_the_order_of_time_and_goes_with_the_next_row(total: int) -> None:
    columns = ring()
    for t in range(total):
        write(columns, np.full(2, t, np.float32))
    column = columns.ordered(("x",)) * 10
    columns.attach({("y",): column})
    assert torch.equal(columns.ordered(("y",)), column)
    assert columns.live == [("x",), ("y",)]
    columns.advance(1)
    assert columns.live == [("x",)]


def test_an_attached_column_of_another_shape_or_dtype_replaces_the_old_one() -> None:
    columns = ring()
    write(columns, np.zeros(2, np.float32))
    for column in (torch.ones(1, 2), torch.ones(1, 2, 3), torch.ones(1, 2, dtype=torch.int64), torch.zeros(1, 2)):
        columns.attach({("y",): column})
        assert columns.ordered(("y",)).dtype is column.dtype
        assert torch.equal(columns.ordered(("y",)), column)


@pytest.mark.parametrize("checked", [False, True])
def test_nested_leaves_become_a_nested_tensordict_of_the_same_memory(
    checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.zeros(2, 3)
    if checked:  # where TensorDict has no other way to be made
        monkeypatch.setattr(tensordicts, "_tensordict", lambda: TensorDict)
    tree = as_tensordict({("a", "b", "0"): x, ("a", "c"): torch.ones(2), ("d",): torch.ones(2, 1)}, (2,))
    assert tree["a", "b", "0"].data_ptr() == x.data_ptr()
    assert tree["a"].batch_size == torch.Size([2])
    assert set(tree.keys()) == {"a", "d"}
    assert type(tree) is type(tree["a"]) is TensorDict
    assert tree[1]["a", "c"] == 1
