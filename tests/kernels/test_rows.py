"""Rows of bytes: the twins copy, pack and pick the same ones, and the tensors over them are those of plain torch."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fields import LEAVES, bits
from forked import in_fork
from relive import Field, kernels
from relive.kernels import cpu, reference
from relive.kernels.reference.rows import FIELD_DICT
from relive.kernels.tensor_calls import SHARED, TensorCalls, made_code, tensor_calls
from relive.memory.layout import RowLayout
from relive.steps.schema import Path


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=6), st.integers(0, 3), st.integers(0, 2**32))
def test_the_twins_copy_the_same_rows_and_nothing_else(sizes: list[tuple[int, bool]], row: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sources = [rng.integers(0, 256, size, np.uint8) for size, _ in sizes]
    given_ = np.array([x.ctypes.data if used else 0 for x, (_, used) in zip(sources, sizes, strict=True)], np.uint64)
    nbytes = np.array([size for size, _ in sizes], np.int64)
    results = []
    for twin in (cpu, reference):
        targets = [np.full((4, size), 7, np.uint8) for size, _ in sizes]
        twin.copy_row(given_, np.array([x.ctypes.data for x in targets], np.uint64), nbytes, row)
        results.append(targets)
    for source, fast, plain, (_, used) in zip(sources, *results, sizes, strict=True):
        want = np.full_like(fast, 7)
        if used:
            want[row] = source
        assert np.array_equal(fast, want)
        assert np.array_equal(plain, want)


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 300])
def test_both_twins_pack_columns_next_to_each_other(count: int) -> None:
    rng = np.random.default_rng(count)
    sizes = np.array([4, 0, 17, 1, 8, 48, 68, 127, 511, 512, 513])
    columns = [rng.integers(0, 256, (count, size), np.uint8) for size in sizes]
    offsets = np.array([16, 20, 24, 0, 48, 64, 113, 192, 320, 832, 1400])
    want = np.full((count, 1920), 7, np.uint8)
    for column, size, offset in zip(columns, sizes, offsets, strict=True):
        want[:, offset : offset + size] = column
    for module in (cpu, reference):
        rows = np.full((count, 1920), 7, np.uint8)
        module.pack_rows(np.array([column.ctypes.data for column in columns]), sizes, offsets, rows, 1)
        assert np.array_equal(rows, want)


@pytest.mark.parametrize(("steps", "envs"), [(1, 5), (2, 9), (65, 7), (130, 17)])
def test_both_twins_pack_env_by_env(steps: int, envs: int) -> None:
    rng = np.random.default_rng(steps)
    columns = [rng.integers(0, 256, (steps, envs, size), np.uint8) for size in (4, 11, 53)]
    want = np.concatenate(columns, 2).swapaxes(0, 1).reshape(steps * envs, 68)
    for module in (cpu, reference):
        rows = np.zeros((steps * envs, 68), np.uint8)
        addresses = np.array([column.ctypes.data for column in columns])
        module.pack_rows(addresses, np.array([4, 11, 53]), np.array([0, 4, 15]), rows, steps)
        assert np.array_equal(rows, want)


@pytest.mark.parametrize("module", [cpu, reference])
@pytest.mark.parametrize("width", [0, 1, 16, 100, 3000])
def test_rows_are_picked_in_any_order_and_several_times(module: Any, width: int) -> None:
    rng = np.random.default_rng(width)
    source = rng.integers(0, 256, (50, width), np.uint8)
    for index in (np.arange(0), rng.integers(0, 50, 1), rng.integers(0, 50, 120)):
        out = np.zeros((len(index), width), np.uint8)
        assert module.take_rows(source, index, out) == -1
        assert np.array_equal(out, source[index])


@pytest.mark.parametrize("module", [cpu, reference])
@pytest.mark.parametrize("bad", [-1, 50, 2**62, -(2**62)])
def test_a_row_that_does_not_exist_is_not_read(module: Any, bad: int) -> None:
    source, out = np.ones((50, 8), np.uint8), np.zeros((40, 8), np.uint8)
    index = np.zeros(40, np.int64)
    index[[33, 35]] = bad
    assert module.take_rows(source, index, out) == 33
    assert not out[33:].any()


pytestmark = pytest.mark.skipif(
    not hasattr(Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no functions for compiled code"
)

LEADS = st.lists(st.integers(1, 3), max_size=3).map(tuple)
MIXED: dict[Path, Field] = {
    ("x",): Field((3, 2), torch.float32), ("n",): Field((), torch.int64), ("b",): Field((5,), torch.bfloat16),
    ("flag",): Field((), torch.bool), ("byte",): Field((2,), torch.uint8), ("none",): Field((0, 4), torch.float64),
}  # fmt: skip


def split(hot: Any, layout: RowLayout, rows: Tensor) -> dict[Path, Tensor] | None:
    """The fields of rows, made by the functions of a module of kernels; None if it refuses."""
    found: dict[Path, Tensor] = {}
    other: dict[Path, Tensor] = {}
    paths, calls, into = tuple(layout.fields), known(), (other, found)
    table = None if layout.table is None else layout.table.copy()
    if table is not None:
        table[:, FIELD_DICT] = 1
    there = hot.split_rows(calls.describe, calls.lend, calls.adopt, id(rows), id(paths), table, id(into))
    assert not other
    assert there or not found
    return found if there else None


def known() -> TensorCalls:
    calls = tensor_calls()
    assert calls is not None
    return calls


def facts(fields: dict[Path, Tensor]) -> dict[Path, tuple[Any, ...]]:
    """All that can be seen of tensors, but their numbers."""
    return {
        path: (field.dtype, field.shape, field.stride(), field.data_ptr() if field.numel() else 0, field.device)
        for path, field in fields.items()
    }


# the same tensors


@given(LEAVES, LEADS)
def test_both_kernels_and_numpy_make_the_same_tensors(leaves: dict[Path, Field], lead: tuple[int, ...]) -> None:
    layout = RowLayout(leaves)
    rows = np.random.default_rng(0).integers(0, 2, (*lead, layout.nbytes), np.uint8)
    whole = torch.from_numpy(rows)
    fast, plain = split(kernels.fast(), layout, whole), split(kernels.reference, layout, whole)
    assert fast is not None
    assert plain is not None
    assert list(fast) == list(plain) == list(layout.fields)
    assert facts(fast) == facts(plain)
    layout.table = None
    assert facts(layout.tensors(rows)) == facts(fast)
    assert [bits(field) for field in fast.values()] == [bits(field) for field in plain.values()]


@pytest.mark.parametrize("hot", [kernels.fast(), kernels.reference], ids=["fast", "plain"])
def test_rows_that_lie_apart_are_split_and_rows_with_gaps_are_not(hot: Any) -> None:
    layout = RowLayout(MIXED)
    rows = torch.arange(7 * 5 * layout.nbytes).to(torch.uint8).view(7, 5, layout.nbytes)
    for some in (rows.transpose(0, 1), rows[1::3], rows[2, 1:4], rows[3, 3]):
        found = split(hot, layout, some)
        assert found is not None
        assert [bits(field) for field in found.values()] == [bits(field) for field in layout.views(some).values()]
        assert found["x",].data_ptr() == some.data_ptr() + layout.offsets["x",]
    wide = torch.zeros(3, layout.nbytes * 2 + 8, dtype=torch.uint8)
    wrong = (
        rows[:0], rows[..., ::2], rows[..., 1:], wide, wide[:, : layout.nbytes], rows.to(torch.int8),
        torch.zeros(2, layout.nbytes, dtype=torch.uint8, device="meta"), torch.tensor(3, dtype=torch.uint8),
    )  # fmt: skip
    wide = torch.zeros(3, layout.nbytes + 4, dtype=torch.uint8)[:, : layout.nbytes]  # no multiple of an int64
    assert [split(hot, layout, some) for some in (*wrong[:4], wide, *wrong[5:])] == [None] * len(wrong)


def test_tensors_without_memory_are_not_split() -> None:
    layout, mode = RowLayout(MIXED), FakeTensorMode()
    with mode:  # a sample inside of torch's own tracing
        found = layout.tensors(np.zeros((4, layout.nbytes), np.uint8))
    assert {type(field) for field in found.values()} == {FakeTensor}
    fake = mode.from_tensor(torch.zeros(4, layout.nbytes, dtype=torch.uint8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: its address was asked for
        assert [split(hot, layout, fake) for hot in (kernels.fast(), kernels.reference)] == [None, None]


def test_where_torch_has_no_such_functions_numpy_makes_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = RowLayout(MIXED)
    rows = np.zeros((4, layout.nbytes), np.uint8)
    made = facts(layout.tensors(rows))
    monkeypatch.setattr("relive.memory.layout.tensor_calls", lambda: None)
    monkeypatch.setattr(kernels.fast(), "split_rows", None)
    assert facts(layout.tensors(rows)) == made


@pytest.mark.parametrize("dtype", [*SHARED, torch.bool, torch.bfloat16, torch.complex128, torch.uint64])
def test_a_dtype_that_is_made_is_the_one_that_was_asked_for(dtype: torch.dtype) -> None:
    assert made_code(dtype) != 0
    assert (
        RowLayout({("x",): Field((32 // dtype.itemsize,), dtype)}).tensors(np.zeros((3, 32), np.uint8))["x",].dtype
        is dtype
    )


def test_a_dtype_that_torch_would_not_give_back_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made_code.cache_clear()
    monkeypatch.setattr(TensorCalls, "adopted", lambda *_: torch.zeros(2, dtype=torch.int16))
    assert made_code(torch.float32) == 0
    assert RowLayout(MIXED).table is None
    made_code.cache_clear()


# the memory


def batch() -> tuple[dict[Path, Tensor], Any]:
    """The fields of rows that nobody else holds, and what becomes None with their memory."""
    layout = RowLayout(MIXED)
    rows = np.full((4, layout.nbytes), 1, np.uint8)
    return layout.tensors(rows), weakref.ref(rows)


def test_the_memory_lives_as_long_as_the_last_tensor_or_view_of_it() -> None:
    fields, rows = batch()
    last = fields["n",][1:]
    for path in list(fields):
        assert rows() is not None
        del fields[path]
    gc.collect()
    assert last.tolist() == [0x0101010101010101] * 3
    del last
    assert rows() is None


def test_threads_may_drop_the_last_tensor() -> None:
    with ThreadPoolExecutor(4) as pool:
        for _ in range(50):
            fields, rows = batch()
            for future in [pool.submit(fields.pop, path) for path in list(fields)]:
                future.result()
            del future
            assert not fields
            assert rows() is None


def test_many_batches_take_no_more_memory_than_few() -> None:
    layout, sizes = RowLayout({("x",): Field((1000,), torch.float32), ("n",): Field((), torch.int64)}), list[int]()
    for _ in range(3):
        for _ in range(2000):  # 8 MB if a batch in a thousand stayed, 8 GB if all did
            layout.tensors(np.ones((1, layout.nbytes), np.uint8))
        with open("/proc/self/statm") as statm:
            sizes.append(int(statm.read().split()[1]) * 4096)
    assert sizes[-1] - sizes[0] < 2**21


def test_tensors_are_as_free_as_any_other() -> None:
    fields, _ = batch()
    x = fields["x",]
    pickled = pickle.loads(pickle.dumps(fields))
    assert all(bits(pickled[path]) == bits(field) for path, field in fields.items())
    x.requires_grad_()
    (x * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.unique().tolist() == [2.0]
    numbers = fields["n",].clone()
    assert fields["n",].share_memory_().is_shared()
    assert torch.equal(fields["n",], numbers)
    fields["flag",].zero_()
    assert fields["byte",].unique().tolist() == [1]
    with pytest.raises(RuntimeError, match="resizable"):  # nor can those over arrays be
        fields["byte",].resize_(10**6)


def test_a_forked_child_reads_and_drops_them() -> None:
    fields, rows = batch()

    def child() -> list[int]:
        numbers = fields["n",].tolist()
        fields.clear()
        assert rows() is None
        return numbers

    assert in_fork(child) == [0x0101010101010101] * 4
    assert fields["n",].tolist() == [0x0101010101010101] * 4


@pytest.mark.slow
def test_an_interpreter_ends_while_tensors_are_alive() -> None:
    code = (
        "import logging, sys, numpy as np, torch, relive\n"
        "logging.disable()\n"  # else the line about kernels that are compiled is there, too
        "from relive.memory.layout import RowLayout\n"
        "layout = RowLayout({('x',): relive.Field((3,), torch.float32), ('n',): relive.Field((), torch.int64)})\n"
        "def fresh(): return layout.tensors(np.ones((1000, layout.nbytes), np.uint8))\n"
        "sys.kept = fresh(); kept = [fresh()]; kept.append(kept)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
