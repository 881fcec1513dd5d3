"""Arrays and tensors are read where they lie, and made over rows of bytes: as plain NumPy and torch do it."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import warnings
import weakref
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path as File
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from definitions import tensors as definition
from relive import Field, core
from relive.memory.layout import RowLayout
from relive.steps.arrays import numpy_view
from relive.steps.schema import Path
from support import internals
from support.effort import QUICK
from support.fields import LEAVES, bits, noise
from support.forks import in_fork

HUGE = 2**21
NEGATED: Any = cast("Any", torch)._neg_view  # has no public name
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.fixture(params=[True, False], ids=["exchange", "plain"], autouse=True)
def exchange(request: pytest.FixtureRequest) -> Generator[bool]:
    """Whether tensors go by torch's exchange, if it has one."""
    before = internals.use_exchange(request.param)
    yield request.param and before
    internals.use_exchange(before)


def test_this_torch_has_an_exchange_if_it_offers_one(exchange: bool) -> None:
    assert internals.use_exchange(True) == exchange
    assert internals.use_exchange(exchange) == hasattr(Tensor, "__dlpack_c_exchange_api__")


# reading


def described(thing: Any) -> tuple[Any, ...] | None:
    """What :func:`support.internals.described` has to say of something."""
    if not definition.can_be_read(thing):
        return None
    tensor = torch.from_numpy(np.empty(0, thing.dtype)) if type(thing) is np.ndarray else thing
    code, bits = definition.DLPACK[tensor.dtype], 8 * tensor.element_size()
    if thing is not tensor:
        return thing.ctypes.data, code, bits, thing.shape, thing.strides
    strides = tuple(step * tensor.element_size() for step in tensor.stride())
    return tensor.data_ptr(), code, bits, tuple(tensor.shape), strides


def seen(facts_: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """The facts that say something; the place and the strides of no numbers do not."""
    return facts_ if facts_ is None or 0 not in facts_[3] else facts_[1:4]


def views_of(whole: Tensor) -> list[Tensor]:
    """A tensor ``[3, 4, 2]`` and parts of it."""
    return [whole, whole[:, 1:], whole.mT, whole[0, 0, 0], whole[:0], whole[1, ::2], whole[:, None], whole.flatten()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_and_arrays_are_read_where_they_lie(dtype: torch.dtype) -> None:
    for tensor in views_of(torch.zeros(3, 4, 2, dtype=dtype)):
        assert seen(internals.described(tensor)) == seen(described(tensor)) != None  # noqa: E711
        if dtype is not torch.bfloat16:
            array = tensor.numpy()
            assert seen(internals.described(array)) == seen(described(array)) != None  # noqa: E711


def test_a_tensor_that_needs_a_gradient_is_read_like_others() -> None:
    leaf = torch.ones(3, requires_grad=True)
    for tensor in (leaf, leaf * 2):
        assert internals.described(tensor) == described(tensor)


class Foreign(Tensor):
    """A tensor of another class."""


def freed() -> Tensor:
    """A tensor whose memory was given back."""
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def quantized() -> Tensor:
    """A tensor whose numbers stand for others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is on its way out
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


UNREADABLE = [
    NEGATED(torch.ones(2)), torch.ones(2, dtype=torch.complex64).conj(), torch.nn.Parameter(torch.ones(2)), freed(),
    torch.ones(2).as_subclass(Foreign), torch.ones(2, device="meta"), torch.ones(2).to_sparse(),
    torch.ones(2).to_mkldnn(), quantized(),
    np.ones(2, ">f4"), np.ones(9, np.uint8)[1:].view(np.float32), np.ones(2, np.longdouble), np.array(["a"]),
    np.array([None]), np.zeros(2, "f4,i4"), np.ones(2).view(np.recarray), np.float32(1), 1, [1.0], None, "x", Tensor,
]  # fmt: skip


@pytest.mark.parametrize("wrong", UNREADABLE, ids=map(str, range(len(UNREADABLE))))
def test_nothing_else_is_read(wrong: Any) -> None:
    assert internals.described(wrong) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_nested_and_traced_tensors_are_not_read() -> None:
    assert internals.described(torch.nested.nested_tensor([torch.zeros(2)])) is None
    seen = list[Any]()
    cast("Any", torch).vmap(lambda x: seen.append(internals.described(x)) or x)(torch.ones(3, 2))
    assert seen == [None]
    with FakeTensorMode():
        assert internals.described(torch.ones(2)) is None


def test_a_tensor_that_is_not_aligned_is_not_read() -> None:
    some = torch.frombuffer(bytearray(17), dtype=torch.float32, offset=1, count=4)
    assert (internals.described(some) is None) == (some.data_ptr() % 4 != 0)


class Interrupted(TorchFunctionMode):
    """Something that comes while torch is asked."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise KeyboardInterrupt


def test_what_is_raised_while_a_tensor_is_asked_reaches_the_caller() -> None:
    tensor = torch.ones(2)
    with Interrupted(), pytest.raises(KeyboardInterrupt):
        internals.described(tensor)


def test_reading_keeps_no_reference() -> None:
    things = [torch.ones(2), torch.ones(2, dtype=torch.uint8), np.ones(2), freed(), NEGATED(torch.ones(2))]

    def counts() -> list[int]:
        return [*map(sys.getrefcount, things), sys.getrefcount(torch.uint8), sys.getrefcount(torch.float32)]

    before = counts()
    for _ in range(100):
        list(map(internals.described, things))
    assert counts() == before


def test_torch_is_found_at_the_first_use_and_not_before(exchange: bool, tmp_path: File) -> None:
    if not exchange:
        pytest.skip("it is found in the same way")
    if QUICK:  # torch itself would take two seconds
        (tmp_path / "torch.py").write_text("import time\ntime.sleep(0.2)\nclass Tensor: ...\n_C = None\n")
    code = (
        "import importlib.util, pathlib, sys, numpy as np\n"
        "spec = importlib.util.spec_from_file_location('_core', sys.argv[1])\n"
        "core = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(core)\n"
        "assert core._tests.described(np.ones(2)) is not None\n"
        "assert 'torch' not in sys.modules\n"
        "import threading\n"
        "found = []\n"
        "threads = [threading.Thread(target=lambda: found.append(core._tests.use_exchange(True))) for _ in range(8)]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n"
        "assert len(found) == 8 and len(set(found)) == 1 and 'torch' in sys.modules\n"
    )
    path = cast("Any", sys.modules["relive.core._core"]).__file__
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code, path], env=environment, check=False, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")


# tensors over rows

LEADS = st.lists(st.integers(0, 3), max_size=3).map(tuple)
MIXED: dict[Path, Field] = {
    ("x",): Field((3, 2), torch.float32), ("n",): Field((), torch.int64), ("b",): Field((5,), torch.bfloat16),
    ("flag",): Field((), torch.bool), ("byte",): Field((2,), torch.uint8), ("none",): Field((0, 4), torch.float64),
}  # fmt: skip


def facts(fields: dict[Any, Tensor]) -> dict[Any, tuple[Any, ...]]:
    """All that can be seen of tensors, but their numbers; the stride of an axis of one item says nothing."""
    return {
        name: (field.dtype, field.shape, *(places(field) if field.numel() else ())) for name, field in fields.items()
    }


def places(field: Tensor) -> tuple[Any, ...]:
    """Where the numbers of a tensor lie."""
    return field.data_ptr(), [step for step, size in zip(field.stride(), field.shape, strict=True) if size > 1]


def listed(layout: RowLayout) -> list[tuple[Any, torch.dtype, tuple[int, ...], int]]:
    """The fields of a layout as the definition takes them."""
    return [(path, field.dtype, field.shape, layout.offsets[path]) for path, field in layout.fields.items()]


@given(LEAVES, LEADS)
def test_tensors_over_rows_are_those_of_plain_torch(leaves: dict[Path, Field], lead: tuple[int, ...]) -> None:
    layout = RowLayout(leaves)
    rows = np.random.default_rng(0).integers(0, 2, (*lead, layout.nbytes), np.uint8)
    made, wanted = layout.tensors(rows), definition.tensors(rows, listed(layout))
    assert list(made) == list(layout.fields)
    assert facts(made) == facts(wanted)
    assert [bits(field) for field in made.values()] == [bits(field) for field in wanted.values()]


@given(LEAVES, st.integers(1, 200), st.integers(0, 150))
def test_rows_of_columns_that_are_packed_on_the_way_are_those_of_each(
    leaves: dict[Path, Field], rows: int, count: int
) -> None:
    layout = RowLayout(leaves)
    columns = {path: noise((rows, *field.shape), field.dtype, k) for k, (path, field) in enumerate(leaves.items())}
    index = np.random.default_rng(0).integers(0, rows, count)
    fields, found = layout.described(layout.fields), dict[Any, Tensor]()
    arrays = tuple(numpy_view(columns[path]) for path in layout.fields)
    assert core.take_columns(arrays, fields, index, (fields,), (found,), core.Pool()) == -1
    assert list(found) == list(layout.fields)
    for path, leaf in found.items():
        assert (leaf.dtype, leaf.shape) == (leaves[path].dtype, (count, *leaves[path].shape))
        assert numpy_view(leaf.contiguous()).tobytes() == numpy_view(columns[path])[index].tobytes()


def test_columns_that_do_not_fit_are_refused_and_rows_that_are_none_are_told() -> None:
    fields, columns = core.Fields([("x", torch.int64, (), 0)], 16), (np.arange(5),)

    def taken(given: Any, index: Any) -> int:
        return core.take_columns(given, fields, np.array(index, np.int64), (fields,), ({},), core.Pool())

    assert taken(columns, [0, 4]) == -1
    assert taken(columns, [0] * 100 + [5]) == 100
    assert taken(columns, [-1]) == 0
    wrong: list[Any] = [(), (np.arange(5), np.arange(5)), (np.arange(5)[::2],), (np.arange(5.0, dtype=np.float32),),
                        (np.int64(3),), (np.array(3),), (np.ones((5, 2), np.int64),), ([1, 2],)]  # fmt: skip
    for given_columns in wrong:
        with pytest.raises(ValueError, match="columns: expected"):
            taken(given_columns, [0])


def test_rows_may_lie_apart_but_have_no_gaps() -> None:
    layout = RowLayout(MIXED)
    rows = np.arange(7 * 5 * layout.nbytes).astype(np.uint8).reshape(7, 5, layout.nbytes)
    fields = layout.described(layout.fields)
    for some in (rows.swapaxes(0, 1), rows[1::3], rows[2, 1:4], rows[3, 3], rows[:0]):
        found, wanted = fields.tensors(some), definition.tensors(some, listed(layout))
        assert facts(found) == facts(wanted)
        assert [bits(field) for field in found.values()] == [bits(field) for field in wanted.values()]
    odd = np.zeros((3, layout.nbytes + 4), np.uint8)[:, : layout.nbytes]  # no multiple of an int64
    wide = np.zeros((3, 2 * layout.nbytes), np.uint8)
    wrong: list[Any] = [
        rows[..., ::2], rows[..., 1:], wide, wide[:, ::2], odd, rows[::-1], rows.view(np.int8), np.uint8(3),
        np.array(3, np.uint8), torch.from_numpy(rows), [rows], rows.view(np.recarray),
    ]  # fmt: skip
    for some in wrong:
        with pytest.raises(ValueError, match="without gaps"):
            fields.tensors(some)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e5m2, torch.complex32])
def test_a_dtype_that_is_made_is_the_one_that_was_asked_for(dtype: torch.dtype) -> None:
    fields = core.Fields([("x", dtype, (32 // dtype.itemsize,), 0)], 32)
    rows = np.arange(96, dtype=np.uint8).reshape(3, 32)
    found = fields.tensors(rows)["x"]
    assert found.dtype is dtype
    assert bits(found) == bits(definition.view(torch.from_numpy(rows), dtype, (32 // dtype.itemsize,), 0))


@pytest.mark.parametrize(
    "wrong",
    [
        ("x", torch.float32, (3,), 24), ("x", torch.float32, (3,), 2), ("x", torch.float32, (2**62,), 0),
        ("x", torch.float32, (2**40, 2**40), 0), ("x", torch.float32, (-1,), 0), ("x", torch.float32, (), 64),
        ("x", torch.float32, (1,) * 40, 0), ("x", torch.float32, ()), ("x", "float32", (), 0), ["x"], None,
    ],
)  # fmt: skip
def test_fields_that_lie_beyond_their_row_are_refused(wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError)):
        core.Fields([wrong], 32)


def test_copies_of_fields_are_fields() -> None:
    fields = core.Fields([("x", torch.float32, (), 0), (("y", 1), torch.int32, (2,), 8)], 16)
    for one in (fields, copy.deepcopy(fields), pickle.loads(pickle.dumps(fields))):
        assert list(one.tensors(np.zeros((3, 16), np.uint8))) == ["x", ("y", 1)]


def test_while_torch_traces_the_tensors_are_traced_ones() -> None:
    layout = RowLayout(MIXED)
    with FakeTensorMode():  # a sample inside of torch's own tracing
        found = layout.tensors(np.zeros((4, layout.nbytes), np.uint8))
    assert {type(field) for field in found.values()} == {FakeTensor}


# packing and taking rows


@pytest.mark.parametrize(("steps", "envs"), [(1, 1), (1, 63), (1, 65), (1, 300), (2, 9), (65, 7), (130, 17), (1, 0)])
def test_columns_are_packed_env_by_env(steps: int, envs: int) -> None:
    rng = np.random.default_rng(steps)
    sizes = [4, 0, 17, 1, 8, 48, 68, 127, 511, 512, 513]
    offsets = [16, 20, 24, 0, 48, 64, 113, 192, 320, 832, 1400]
    columns = [rng.integers(0, 256, (steps * envs, size), np.uint8) for size in sizes]
    facts_ = [(i, torch.uint8, (size,), at) for i, (size, at) in enumerate(zip(sizes, offsets, strict=True))]
    fields, rows = core.Fields(facts_, 1920), np.full((steps * envs, 1920), 7, np.uint8)
    given_: list[Any] = [torch.from_numpy(column) if i % 2 else column for i, column in enumerate(columns)]
    fields.pack(given_, rows, steps)
    assert np.array_equal(rows, definition.packed(columns, offsets, 1920, steps))


def test_columns_that_do_not_fit_are_refused_before_anything_is_written() -> None:
    fields = core.Fields([("x", torch.float32, (2,), 0), ("b", torch.bfloat16, (), 8)], 16)
    x, b = np.ones((6, 2), np.float32), torch.ones(6, dtype=torch.bfloat16)
    rows = np.full((6, 16), 7, np.uint8)
    wrong: list[tuple[Any, ...]] = [
        (x,), (x, b, b), (x[:5], b), (x[:, :1], b), (x.astype(np.float64), b), (x[:, ::-1], b), (x, b[::2]), (x, None),
        (np.ones((6, 4), np.float32)[:, ::2], b),
    ]  # fmt: skip
    for columns in wrong:
        with pytest.raises(ValueError, match="columns"):
            fields.pack(columns, rows)
    for steps in (0, -1, 4, 7):
        with pytest.raises(ValueError, match="rows"):
            fields.pack((x, b), rows, steps)
    with pytest.raises(ValueError, match="rows"):
        fields.pack((x, b), np.full((6, 32), 7, np.uint8))
    assert (rows == 7).all()
    fields.pack((x, b), rows, 3)
    fields.pack((x, b.view(torch.int16).numpy()), rows)  # an array that holds bits
    assert fields.tensors(rows)["b"].tolist() == [1.0] * 6


@pytest.mark.parametrize("width", [0, 1, 16, 100, 512, 528, 3000, 80_000])
def test_rows_are_taken_in_any_order_and_several_times(width: int) -> None:
    rng = np.random.default_rng(width)
    source = rng.integers(0, 256, (50, width), np.uint8)
    for index in (np.arange(0), rng.integers(0, 50, 1), rng.integers(0, 50, 120)):
        out = np.zeros((len(index), width), np.uint8)
        assert core.take_rows(source, index, out) == -1
        assert np.array_equal(out, source[index])


@pytest.mark.parametrize("bad", [-1, 50, 2**62, -(2**62)])
def test_a_row_that_does_not_exist_is_not_read(bad: int) -> None:
    source, out = np.ones((50, 8), np.uint8), np.zeros((40, 8), np.uint8)
    index = np.zeros(40, np.int64)
    index[[33, 35]] = bad
    assert core.take_rows(source, index, out) == 33
    assert not out[33:].any()
    for wrong in (np.zeros((39, 8), np.uint8), np.zeros((40, 9), np.uint8)):
        with pytest.raises(ValueError, match="out"):
            core.take_rows(source, index, wrong)


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


def taken(layout: RowLayout, count: int, pool: core.Pool) -> dict[Path, Tensor]:
    """The fields of rows in memory of a pool, all bytes of which are 1."""
    rows = pool.take(count * layout.nbytes).reshape(count, layout.nbytes)
    rows[:] = 1
    return layout.tensors(rows)


def test_many_batches_take_no_more_memory_than_few() -> None:
    layout, sizes = RowLayout({("x",): Field((1000,), torch.float32), ("n",): Field((), torch.int64)}), list[int]()
    pool = core.Pool()
    for _ in range(3):
        for _ in range(2000):  # 8 MB if a batch in a thousand stayed, 8 GB if all did
            layout.tensors(np.ones((1, layout.nbytes), np.uint8))
            taken(layout, 1, pool)
        with open("/proc/self/statm") as statm:
            sizes.append(int(statm.read().split()[1]) * 4096)
    assert sizes[-1] - sizes[0] < 2**21


@pytest.mark.parametrize("pooled", [False, True])
def test_tensors_are_as_free_as_any_other(pooled: bool) -> None:
    fields = taken(RowLayout(MIXED), 4, core.Pool()) if pooled else batch()[0]
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
    pool = core.Pool()
    del (some := [pool.take(HUGE), pool.take(HUGE)])[0]

    def child() -> tuple[list[int], int]:
        numbers = fields["n",].tolist()
        fields.clear()
        assert rows() is None
        some.clear()
        return numbers, len(pool.kept)

    assert in_fork(child) == ([0x0101010101010101] * 4, 2)
    assert fields["n",].tolist() == [0x0101010101010101] * 4
    assert len(pool.kept) == 1


@pytest.mark.slow
def test_an_interpreter_ends_while_tensors_are_alive() -> None:
    code = (
        "import sys, numpy as np, torch, relive\n"
        "from relive import core\n"
        "from relive.memory.layout import RowLayout\n"
        "layout = RowLayout({('x',): relive.Field((3,), torch.float32), ('n',): relive.Field((), torch.int64)})\n"
        "def taken(count): return layout.tensors(pool.take(count * layout.nbytes).reshape(count, -1))\n"
        "pool = core.Pool()\n"
        "def fresh(): return [layout.tensors(np.ones((1000, layout.nbytes), np.uint8)), taken(10), taken(10**5)]\n"
        "sys.kept = fresh(); kept = [fresh()]; kept.append(kept)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


# the pool


def test_a_block_is_used_again_once_nothing_looks_into_it() -> None:
    pool = core.Pool()
    first = pool.take(HUGE)
    place, part = first.ctypes.data, torch.from_numpy(first)[3:5]
    del first
    other = pool.take(HUGE)
    assert other.ctypes.data != place
    del part
    assert pool.take(HUGE).ctypes.data == place


def test_a_block_outlives_its_pool_with_the_tensors_over_it() -> None:
    pool = core.Pool()
    found = taken(RowLayout(MIXED), 10**4, pool)
    del pool
    gc.collect()
    assert found["n",].unique().tolist() == [0x0101010101010101]


def test_tensors_over_an_array_of_a_pool_keep_its_block() -> None:
    pool, fields = core.Pool(), core.Fields([("x", torch.int64, (), 0)], 8)
    rows = pool.take(HUGE).reshape(-1, 8)
    place, found = rows.ctypes.data, fields.tensors(rows[:5])
    del rows
    assert pool.kept == []
    assert found["x"].data_ptr() == place
    found.clear()
    assert len(pool.kept) == 1


def test_most_of_a_huge_page_is_all_of_it() -> None:
    def size(nbytes: int) -> int:
        pool = core.Pool()
        assert pool.take(nbytes).shape == (nbytes,)
        return pool.kept[0]

    sizes = [size(nbytes) for nbytes in (HUGE * 3 // 8, HUGE // 2, HUGE - 10**6, HUGE)]
    assert sizes == [HUGE * 3 // 8 * 9 // 8, HUGE, HUGE, 2 * HUGE]


@pytest.mark.parametrize("order", ["rising", "falling", "mixed"])
def test_sixteen_blocks_are_kept_and_the_smallest_makes_way(order: str) -> None:
    pool, sizes = core.Pool(), [2**19 + k * 4096 for k in range(20)]
    some = {nbytes: pool.take(nbytes) for nbytes in sizes}
    assert pool.kept == []
    dropped = {"rising": sizes, "falling": sizes[::-1], "mixed": np.random.default_rng(0).permutation(sizes).tolist()}
    for nbytes in dropped[order]:
        del some[nbytes]
    kept = sorted(pool.kept)
    assert kept == [-(-(nbytes + nbytes // 8) // 64) * 64 for nbytes in sizes[4:]]  # an eighth more than was asked for
    for wanted in (kept[5] - 10, kept[5]):  # the smallest that is large enough
        again = pool.take(wanted)
        assert sorted(pool.kept) == kept[:5] + kept[6:]
        del again
        assert sorted(pool.kept) == kept
    small = pool.take(1000)
    del small
    assert sorted(pool.kept) == kept  # malloc has the small ones
    assert copy.deepcopy(pool).kept == pickle.loads(pickle.dumps(pool)).kept == []


def test_threads_share_a_pool_and_no_block() -> None:
    pool, size = core.Pool(), 2**19

    def work(mark: int) -> bool:
        whole = True
        for k in range(100):
            block = pool.take(size + k)
            block[:] = mark
            whole &= bool((block[::4096] == mark).all())
            whole &= bool((block == mark).all()) if k % 10 == 0 else True
        return whole

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(work, range(6)))
    assert 1 <= len(pool.kept) <= 16


def test_memory_that_nobody_has_is_refused() -> None:
    with pytest.raises((MemoryError, TypeError)):
        core.Pool().take(2**60)
    with pytest.raises(TypeError):
        core.Pool().take(-1)
