"""Lists of numbers, arrays and tensors in a step: read as NumPy reads them, and quicker."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relive import core

DTYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.float16]
DTYPES += [torch.bfloat16]
LEAVES: dict[str, Any] = {
    "floats": st.floats(width=64),
    "whole": st.integers(-5, 300),
    "flags": st.booleans(),
    "mixed": st.one_of(st.floats(width=32), st.integers(-(2**65), 2**65), st.booleans()),
    "scalars": st.one_of(st.floats(width=32), st.just(np.float32(3)), st.just(np.int64(4)), st.just(np.bool_(1))),
}


def read(value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """The numbers of a field ``[len(value), *shape]`` as they would be stored; None if they have to be refused."""
    return read_array(value, len(value), shape, dtype)


def same(found: Any, want: Any) -> bool:
    if found is None or want is None:
        return found is want
    return found.dtype == want.dtype and found.shape == want.shape and found.tobytes() == want.tobytes()


def array_of(value: Any) -> Any:
    try:
        return np.asarray(value)
    except (ValueError, TypeError, OverflowError, RuntimeError):
        return np.asarray("none")


@pytest.mark.parametrize("kind", [*LEAVES])
@given(data=st.data())
def test_lists_are_read_as_the_arrays_that_numpy_makes_of_them(kind: str, data: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 3), max_size=2)))
    count, dtype = data.draw(st.integers(1, 3)), data.draw(st.sampled_from(DTYPES))

    def nested(sizes: tuple[int, ...]) -> Any:
        if not sizes:
            return data.draw(LEAVES[kind])
        size = sizes[0] if data.draw(st.integers(0, 15)) else sizes[0] + 1  # seldom ragged
        kind_of = list if data.draw(st.integers(0, 3)) else tuple
        return kind_of(nested(sizes[1:]) for _ in range(size))

    value = list(nested((count, *shape)))
    assert same(read(value, shape, dtype), read_array(array_of(value), len(value), shape, dtype))


def read_array(array: Any, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    leaves = core.StepFields([("x",)], [dtype], [shape], count, [None]).leaves((array,))
    return None if leaves is None else np.asarray(leaves[0])


ROWS: dict[str, Any] = {
    "arrays": lambda rows: [*rows],
    "parts of arrays": lambda rows: [row[::-1][::-1] for row in rows],
    "strided arrays": lambda rows: [np.repeat(row, 2)[::2] for row in rows],
    "swapped arrays": lambda rows: [row.astype(row.dtype.newbyteorder()) for row in rows],
    "one swapped": lambda rows: [rows[0], *(row.astype(row.dtype.newbyteorder()) for row in rows[1:])],
    "tensors": lambda rows: [torch.from_numpy(row.copy()) for row in rows],
    "tensors and arrays": lambda rows: [torch.from_numpy(rows[0].copy()), *rows[1:]],
    "lists of arrays": lambda rows: [list(row.reshape(-1, 1)) for row in rows],
    "lists of numbers": lambda rows: [list(row) for row in rows],
    "two dtypes": lambda rows: [rows[0], *(row.astype(np.result_type(row, np.float64)) for row in rows[1:])],
    "two shapes": lambda rows: [rows[0][:2], *rows[1:]],
    "an array and numbers": lambda rows: [rows[0], *(row.tolist() for row in rows[1:])],
    "numbers and an array": lambda rows: [rows[0].tolist(), *rows[1:]],
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint8, np.bool_, np.float16, np.complex64])
@pytest.mark.parametrize("kind", [*ROWS])
def test_lists_of_rows_are_read_as_the_arrays_that_numpy_makes_of_them(kind: str, dtype: Any) -> None:
    rows = np.arange(12).reshape(4, 3).astype(dtype)
    value = ROWS[kind](rows)
    for shape in ((3,), (3, 1)):
        for into in (torch.float32, torch.int64, torch.bool):
            assert same(read(value, shape, into), read_array(array_of(value), 4, shape, into))
    if kind in ("arrays", "tensors") and dtype in (np.float32, np.uint8):
        assert read(value, (3,), torch.float32).tolist() == rows.tolist()


def test_a_list_that_holds_itself_and_one_that_changes_while_it_is_read_are_refused() -> None:
    own: list[Any] = []
    own.append(own)
    assert read(own, (), torch.float32) is None

    class Clears(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            rows.clear()
            return function(*args, **(kwargs or {}))

    rows = [torch.ones(3) for _ in range(4)]
    with Clears():
        assert core.StepFields([("x",)], [torch.float32], [(3,)], 4, [None]).leaves((rows,)) is None


def test_rows_that_need_a_gradient_are_read_as_a_whole_tensor_of_them_is() -> None:
    rows = [torch.full((3,), float(i), requires_grad=True) for i in range(4)]
    assert read(rows, (3,), torch.float32).tolist() == torch.stack(rows).tolist()


def test_reading_a_list_takes_less_time_than_numpy_takes_to_make_an_array_of_it() -> None:
    value = np.random.default_rng(0).random((64, 17)).tolist()

    def least(call: Any) -> float:
        times = list[float]()
        for _ in range(20):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return min(times)

    fields = core.StepFields([("x",)], [torch.float32], [(17,)], 64, [None])
    assert least(lambda: fields.leaves((value,))) < least(lambda: np.asarray(value))
