"""Steps are read by compiled code if they can be, as the definition says, and otherwise not at all."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from definitions import steps as plain
from relive import Field, Schema, core
from relive.core.words import FINALS, NO_FINALS, UNFIT, RingArrays, StagedRows
from relive.steps.arrays import numpy_dtype
from relive.steps.checker import StepChecker


class Foreign(torch.Tensor):
    """A tensor of a class that may do anything."""


N = 3
PRIVATE: Any = torch  # some ways to make a tensor have no public name
FIELDS = {
    ("obs", "state"): Field((4,)),
    ("obs", "image"): Field((2, 2), torch.uint8),
    ("reward",): Field(),
    ("done",): Field((), torch.bool),
    ("half",): Field((), torch.bfloat16),
    ("none",): Field((0,)),
    ("wave",): Field((), torch.complex64),
}
NAMES = [path[-1] for path in FIELDS]


def arrays(rows: int, packed: bool = False) -> list[np.ndarray]:
    """Where FIELDS are stored: columns ``[rows, N, ...]``, or fields of packed rows, ``[rows, N, ...]`` too."""
    formats = [(numpy_dtype(field.dtype), field.shape) for field in FIELDS.values()]
    if packed:
        record = np.dtype([(name, *kind) for name, kind in zip(NAMES, formats, strict=True)], align=True)
        block = np.zeros((rows, N), record)
        return [block[name] for name in NAMES]
    return [np.zeros((rows, N, *shape), dtype) for dtype, shape in formats]


def fields_of(
    targets: list[Any], leaves: dict[Any, Field] = FIELDS, count: int = N, finite: Any = (), defaults: Any = ()
) -> Any:
    """The compiled fields."""
    of = leaves.values()
    return core.StepFields(list(leaves), [x.dtype for x in of], [x.shape for x in of], count, targets, finite, defaults)


def bits_of(leaf: Any) -> bytes:
    """The bytes of a leaf that compiled code returned."""
    return plain.bits(leaf.detach()) if isinstance(leaf, torch.Tensor) else leaf.tobytes()


def assert_read(made: Any, values: tuple[Any, ...], fields: dict[Any, Field] = FIELDS, count: int = N) -> bool:
    """Assert that compiled code reads a step, or does not, as the definition says; returns which."""
    want, got = plain.leaves(values, fields, count), made.leaves(values)
    assert (want is None) == (got is None)
    if want is not None:
        assert [bits_of(leaf) for leaf in got] == [plain.bits(leaf) for leaf in want]
        assert [tuple(leaf.shape) for leaf in got] == [tuple(leaf.shape) for leaf in want]
        assert [numpy_dtype(leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf.dtype for leaf in got] == [
            numpy_dtype(field.dtype) for field in fields.values()
        ]
    return got is not None


def step(seed: int = 0, tensors: tuple[str, ...] = ("half",), double: tuple[str, ...] = ()) -> dict[str, Any]:
    """The leaves of a step of FIELDS; these as tensors, those as float64."""
    rng = np.random.default_rng(seed)
    leaves: dict[str, Any] = {
        "state": rng.normal(size=(N, 4)).astype(np.float32),
        "image": rng.integers(0, 256, (N, 2, 2), np.uint8),
        "reward": rng.normal(size=N).astype(np.float32),
        "done": rng.random(N) < 0.5,
        "none": np.zeros((N, 0), np.float32),
        "wave": rng.normal(size=N).astype(np.complex64),
    }
    leaves |= {name: leaves[name].astype(np.float64) for name in double}
    leaves |= {name: torch.from_numpy(leaves[name]) for name in tensors if name != "half"}
    leaves["half"] = torch.arange(N).to(torch.bfloat16) + seed
    return {name: leaves[name] for name in NAMES}


def nested(leaves: dict[str, Any]) -> dict[str, Any]:
    """A step as users give it."""
    rest = {name: value for name, value in leaves.items() if name not in ("state", "image")}
    return {"obs": {"image": leaves["image"], "state": leaves["state"]}, **rest}


def stored(targets: list[np.ndarray], row: int | None = None) -> list[bytes]:
    """The bytes of all targets, or of a row of each."""
    return [(target if row is None else target[row]).tobytes() for target in targets]


def wanted(leaves: dict[str, Any]) -> list[bytes]:
    """The bytes of a row that a step was copied to."""
    read = plain.leaves(tuple(leaves.values()), FIELDS, N)
    assert read is not None
    return [plain.bits(leaf) for leaf in read]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("double", [(), ("state",), ("reward", "state")])
@pytest.mark.parametrize("tensors", [("half",), ("half", "reward"), tuple(NAMES[:-1])])
def test_a_step_is_stored_bit_by_bit_as_a_dict_and_as_a_tuple(
    tensors: tuple[str, ...], double: tuple[str, ...], packed: bool
) -> None:
    targets = arrays(3, packed)
    made, before = fields_of(targets), stored(targets, 0)
    for row, form in ((1, nested), (2, lambda leaves: tuple(leaves.values()))):
        leaves = step(row, tuple(name for name in tensors if name not in double), double)
        given_: Any = form(leaves)
        assert assert_read(made, tuple(leaves.values()))
        assert made.take(row, given_)
        assert stored(targets, row) == wanted(leaves)
    assert stored(targets, 0) == before


CHANGES: dict[str, tuple[bool, Callable[[Any], Any]]] = {
    "a list": (True, lambda x: x.tolist()),
    "a list of rows": (True, list),
    "a tuple": (True, tuple),
    "a list of whole numbers": (True, lambda x: x.astype(np.int64).tolist()),
    "a list of rows of two lengths": (False, lambda x: [*x.tolist(), [1.0] * 7]),
    "a list of texts": (False, lambda x: x.astype(str).tolist()),
    "nothing": (False, lambda x: None),
    "a scalar": (False, lambda x: x.reshape(-1)[0]),
    "fewer envs": (False, lambda x: x[:2]),
    "one axis more": (False, lambda x: x[..., None]),
    "every other": (True, lambda x: x.repeat(2, 0)[::2]),
    "backwards": (True, lambda x: x[::-1]),
    "columns first": (True, np.asfortranarray),
    "the same number": (True, lambda x: np.broadcast_to(x.reshape(-1)[0], x.shape)),
    "read only": (True, lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape)),
    "much larger": (False, lambda x: x.astype(np.float64) + 1e300),
    "narrower": (True, lambda x: x.astype(np.float16)),
    "whole numbers": (True, lambda x: x.astype(np.int32)),
    "whole numbers that would be rounded": (False, lambda x: x.astype(np.int32) + 2**24 + 1),
    "longer": (False, lambda x: x.astype(np.longdouble)),
    "bytes the other way round": (True, lambda x: x.astype(x.dtype.newbyteorder())),
    "a subclass": (False, lambda x: x.view(np.recarray)),
    "a masked array": (False, np.ma.masked_array),
    "unaligned": (
        True, lambda x: np.frombuffer(bytearray(b"\0" + x.tobytes()), np.uint8)[1:].view(x.dtype).reshape(x.shape)
    ),
    "objects": (False, lambda x: x.astype(object)),
    "bytes": (False, lambda x: x.tobytes()),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["state", "reward"])
def test_an_array_is_read_as_the_definition_says_or_nothing_is_written(change: str, name: str) -> None:
    targets = arrays(2)
    made, leaves = fields_of(targets), step(1)
    fits, way = CHANGES[change]
    leaves[name] = way(leaves[name])
    before, values = stored(targets), tuple(leaves.values())
    assert assert_read(made, values) == made.take(1, values) == made.take(1, nested(leaves)) == fits
    assert (stored(targets, 1) == wanted(leaves)) if fits else (stored(targets) == before)


WRONG = [
    torch.ones(N, dtype=torch.complex64), torch.full((N,), 2**24 + 1), torch.ones(N + 1), torch.ones(N, 1),
    torch.ones(N, device="meta"), torch.nn.Parameter(torch.ones(N)),
    PRIVATE._neg_view(torch.ones(N)), PRIVATE._efficientzerotensor(N),
    torch.ones(N).to_sparse(), torch.ones(N).to_mkldnn(), torch.ones(N).as_subclass(Foreign), torch.tensor(1.0),
    [torch.nn.Parameter(torch.ones(()))] * N, [None] * N, {}, None,
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda x: type(x).__name__)
def test_a_tensor_that_does_not_fit_is_refused(wrong: Any) -> None:
    values = tuple((step(1, ("half", "reward")) | {"reward": wrong}).values())
    assert not assert_read(fields_of(arrays(1)), values)


RIGHT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "with a gradient": lambda x: x.clone().requires_grad_(),
    "a result": lambda x: x.clone().requires_grad_() * 2,
    "in shared memory": lambda x: x.clone().share_memory_(),
    "a view": lambda x: torch.stack([x, x])[1],
    "turned round twice": lambda x: x.mT.contiguous().mT.mT.contiguous().mT.contiguous(),
    "made in inference mode": torch.inference_mode()(torch.clone),
    "wide steps between single items": lambda x: x.clone().as_strided((N, 4), (4, 1)),
    "transposed": lambda x: x.mT.contiguous().mT,
    "with gaps": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "one row for all": lambda x: x[:1].expand(N, 4),
    "float64": lambda x: x.double(),
    "bfloat16": lambda x: x.bfloat16(),
    "whole numbers": lambda x: x.long(),
}


@pytest.mark.parametrize("change", RIGHT)
def test_a_tensor_of_the_same_numbers_is_copied_as_it_is(change: str) -> None:
    targets, leaves = arrays(2), step(1, ("half", "state"))
    leaves["state"] = RIGHT[change](leaves["state"])
    assert fields_of(targets).take(1, nested(leaves))
    assert stored(targets, 1) == wanted(leaves)


ALL = (*plain.WHOLE, torch.uint64, *plain.REAL, torch.complex64, torch.complex128)


def edges(dtype: torch.dtype) -> torch.Tensor:
    """Numbers of a dtype that others may not hold, ``[K]``."""
    whole = [s * (2**k + d) for k in (0, 7, 8, 15, 16, 24, 31, 32, 53, 62, 63, 64) for d in (-1, 0, 1) for s in (1, -1)]
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if dtype.is_floating_point or dtype.is_complex:
        real = [0.1, -0.0, 1e-45, 3.4028235e38, 3.4028236e38, -1e39, 1e300, float("inf"), float("-inf")]
        return torch.tensor([*map(float, whole), *real], dtype=torch.float64).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.tensor([x for x in whole if limits.min <= x <= limits.max], dtype=dtype)


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("given_", ALL, ids=str)
def test_a_number_of_any_dtype_is_read_if_it_keeps_its_meaning(dtype: torch.dtype, given_: torch.dtype) -> None:
    leaves, check = {("x",): Field((), dtype)}, StepChecker(Schema({"x": Field((), dtype)}), 1, torch.device("cpu"))
    made = fields_of([np.zeros((1, 1), numpy_dtype(dtype))], leaves, 1)
    for number in edges(given_).reshape(-1, 1):
        forms = [number] if given_ is torch.bfloat16 else [number, number.numpy()]
        for form in forms:
            if assert_read(made, (form,), leaves, 1):  # the longer way stores the same
                (slow,) = check({"x": form})
                slow = slow if isinstance(slow, torch.Tensor) else np.asarray(slow, numpy_dtype(dtype))
                assert bits_of(slow) == bits_of(made.leaves((form,))[0])


@given(st.integers(0, 2**32))
@settings(max_examples=settings.default.max_examples // 2)
def test_numbers_are_read_wherever_they_lie(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = rng.integers(rng.random() > 0.1, 5, rng.integers(1, 5))
    shape[rng.integers(len(shape))] *= rng.choice([1, 1, 1, 90])
    dtype = (torch.float32, torch.int16, torch.bool, torch.complex128)[rng.integers(4)]
    source = (torch.float32, torch.float64, torch.uint8, torch.bool, dtype)[rng.integers(5)]
    leaves: dict[Any, Field] = {("x",): Field(tuple(shape[1:].tolist()), dtype)}
    order, steps = rng.permutation(len(shape)), rng.choice([-2, -1, 1, 2, 3], len(shape))
    wide = rng.integers(0, 2, [shape[axis] * abs(steps[axis]) for axis in order]).astype(numpy_dtype(source))
    array = wide.transpose(np.argsort(order))[tuple(slice(None, None, k) for k in steps)]
    forms = [array] if (steps < 0).any() else [array, torch.from_numpy(array)]
    made = fields_of([np.zeros((1, *shape), numpy_dtype(dtype))], leaves, shape[0])
    for form in forms:
        assert_read(made, (form,), leaves, shape[0])


def test_the_axis_of_a_single_env_may_be_left_out() -> None:
    leaves: dict[Any, Field] = {("x",): Field((2,)), ("y",): Field(), ("z",): Field((), torch.bool)}
    targets = [np.zeros((1, 1, 2), np.float32), np.zeros((1, 1), np.float32), np.zeros((1, 1), np.bool_)]
    made = fields_of(targets, leaves, 1)
    for values in (
        (np.ones(2), 2.5, True),
        (torch.ones(2), np.float64(2.5), np.True_),
        ([1, 1], torch.tensor(2.5), [1 > 0]),
    ):
        assert assert_read(made, values, leaves, 1)
        assert made.take(0, values)
        assert [target.ravel().tolist() for target in targets] == [[1, 1], [2.5], [True]]
    assert not assert_read(fields_of([None] * 3, leaves, 2), (np.ones(2), 2.5, True), leaves, 2)


def test_what_is_stored_as_it_is_is_returned_itself_and_nothing_else_is() -> None:
    made, leaves = fields_of(arrays(1)), step(1, ("half", "reward"), ("state",))
    found = made.leaves(tuple(leaves.values()))
    assert [a is b for a, b in zip(found, leaves.values(), strict=True)] == [name != "state" for name in NAMES]
    leaves["state"][:] = 7
    assert not (found[0] == 7).any()


def test_numbers_have_to_be_finite_where_that_is_asked() -> None:
    targets = arrays(1)
    made = fields_of(targets, FIELDS, N, [("obs", "state"), ("half",), ("wave",)])
    for name in NAMES:
        leaves = step(1)
        for bad in (float("nan"), float("inf"), float("-inf")):
            leaves[name].reshape(-1)[-1:] = bad if name not in ("image", "done") else 1
            before = stored(targets)
            assert made.take(0, tuple(leaves.values()), False)
            assert stored(targets) == wanted(leaves)
            before = stored(targets)
            assert made.take(0, nested(leaves), True) == (name not in ("state", "half", "wave"))
            assert stored(targets) == before


def test_axes_of_one_item_may_have_any_stride_and_empty_tensors_any() -> None:
    for size in (1, 0):
        target = np.zeros((2, size, 1, 3), np.float32)
        made = fields_of([target], {("x",): Field((1, 3))}, size)
        strange = torch.arange(9.0).as_strided((size, 1, 3), (7, 5, 1))
        assert made.take(0, (strange,))
        assert target[0].ravel().tolist() == [0.0, 1.0, 2.0] * size
        gaps = torch.arange(9.0).as_strided((size, 1, 3), (7, 5, 2))
        assert made.take(0, (gaps,))
        assert target[0].ravel().tolist() == [0.0, 2.0, 4.0] * size


@given(st.lists(st.floats(width=64), min_size=N, max_size=N))
def test_numbers_beyond_float32_are_found(numbers: list[float]) -> None:
    made, values = fields_of(arrays(1)), tuple((step() | {"reward": np.array(numbers)}).values())
    with np.errstate(over="ignore"):
        lost = np.isinf(np.float32(numbers)) & ~np.isinf(numbers)
    assert not (assert_read(made, values) and lost.any())


@given(st.integers(0, 2**32))
@settings(max_examples=settings.default.max_examples // 2)
def test_of_many_numbers_the_one_too_large_is_found_wherever_it_is(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 40))
    target, numbers = np.zeros((1, 1, size), np.float32), rng.normal(size=(1, size)) * 10.0 ** rng.integers(-50, 38)
    made = fields_of([target], {("x",): Field((size,))}, 1)
    numbers[0, rng.integers(0, size, 2)] = np.inf, np.nan
    assert made.take(0, (numbers,))
    assert target.tobytes() == numbers.astype(np.float32).tobytes()
    numbers[0, rng.integers(size)] = rng.choice([-1, 1]) * 3.5e38
    assert not made.take(0, (numbers,))


def test_a_field_that_is_only_checked_is_not_written() -> None:
    leaves: dict[Any, Field] = {("x",): Field((2,)), ("y",): Field((2,))}
    target = np.zeros((1, N, 2), np.float32)
    made, single, double = fields_of([None, target], leaves), np.ones((N, 2), np.float32), np.ones((N, 2))
    for values in ((single, double), (double, single), (single.T.copy().T, single)):
        target[:] = 0
        assert made.take(0, values)
        assert target.all()


SHAPES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a field is missing": lambda x: {name: value for name, value in x.items() if name != "reward"},
    "another name": lambda x: {("rewards" if name == "reward" else name): value for name, value in x.items()},
    "a field too many": lambda x: x | {"extra": np.zeros(N)},
    "a member is missing": lambda x: x | {"obs": {"state": x["obs"]["state"]}},
    "a member too many": lambda x: x | {"obs": x["obs"] | {"extra": np.zeros(N)}},
    "another member": lambda x: x | {"obs": {"state": x["obs"]["state"], "other": x["obs"]["image"]}},
    "no mapping": lambda x: x | {"obs": x["obs"]["state"]},
    "a tuple for members with names": lambda x: x | {"obs": tuple(x["obs"].values())},
    "a mapping that is no dict": type("Mapping", (dict,), {}),
    "nothing": lambda x: None,
    "a list": lambda x: list(x.values()),
    "a short tuple": lambda x: tuple(step().values())[:-1],
    "a long tuple": lambda x: (*step().values(), 1),
    "an empty tuple": lambda x: (),
}


@pytest.mark.parametrize("change", SHAPES)
def test_a_step_of_other_fields_is_refused(change: str) -> None:
    targets = arrays(1)
    made, before = fields_of(targets), stored(targets)
    given_ = SHAPES[change](nested(step()))
    assert made.leaves(given_) is None
    assert not made.take(0, given_)
    assert stored(targets) == before


def test_members_that_are_numbered_may_come_as_a_tuple() -> None:
    leaves: dict[Any, Field] = {("obs", "0"): Field(), ("obs", "1", "a"): Field(), ("x",): Field()}
    targets = [np.zeros((1, N), np.float32) for _ in leaves]
    made, parts = fields_of(targets, leaves), [np.full(N, k, np.float32) for k in range(3)]
    assert made.take(0, {"x": parts[2], "obs": (parts[0], {"a": parts[1]})})
    assert [target[0, 0] for target in targets] == [0, 1, 2]
    assert not made.take(0, {"x": parts[2], "obs": (parts[0],)})


def test_fields_come_in_any_order_of_their_paths() -> None:
    leaves: dict[Any, Field] = {("a", "x"): Field(), ("b",): Field(), ("a", "y"): Field()}
    targets = [np.zeros((1, N), np.float32) for _ in leaves]
    parts = [np.full(N, k, np.float32) for k in range(3)]
    assert fields_of(targets, leaves).take(0, {"a": {"y": parts[2], "x": parts[0]}, "b": parts[1]})
    assert [target[0, 0] for target in targets] == [0, 1, 2]


@pytest.mark.parametrize(
    "target",
    [
        np.zeros((2, N), np.float32), np.zeros((2, N, 5), np.float32), np.zeros((2, 2, 4), np.float32),
        np.zeros((2, N, 4)), np.zeros((2, N, 8), np.float32)[..., ::2], np.broadcast_to(np.float32(0), (2, N, 4)), [0],
    ],
    ids=str,
)  # fmt: skip
def test_a_target_that_is_none_is_refused(target: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        fields_of([target], {("x",): Field((4,))})


def test_the_last_fields_may_be_left_out_where_they_have_defaults() -> None:
    leaves = {("obs",): Field((2,)), ("mask",): Field((), torch.bool), ("final",): Field()}
    obs, mask, final = np.ones((N, 2), np.float32), np.arange(N) % 2 > 0, np.arange(N, dtype=np.float32)
    defaults = [np.ones(N, bool), np.full(N, np.nan, np.float32)]
    targets = [np.zeros((2, N, *field.shape), numpy_dtype(field.dtype)) for field in leaves.values()]
    made = fields_of(targets, leaves, N, (), defaults)
    for more in ({}, {"mask": mask}, {"final": final}, {"mask": mask, "final": final}):
        expected = [obs, more.get("mask", defaults[0]), more.get("final", defaults[1])]
        in_order = [] if [*more] == ["final"] else [(obs, *more.values())]
        for whole in ({"obs": obs, **more}, {**more, "obs": obs}, *in_order):
            for target in targets:
                target[1] = 7
            assert made.take(1, whole)
            assert [target[1].tobytes() for target in targets] == [x.tobytes() for x in expected]
            assert [x.tobytes() for x in made.leaves(whole)] == [x.tobytes() for x in expected]
    before = [target.tobytes() for target in targets]
    for wrong in (
        {},
        {"mask": mask},
        {"mask": mask, "final": final},
        {"obs": obs, "other": mask},
        (),
        (obs, mask, final, mask),
    ):
        assert not made.take(0, wrong)
        assert made.leaves(wrong) is None
    assert [target.tobytes() for target in targets] == before


def test_defaults_that_are_not_the_last_fields_are_refused() -> None:
    leaves = {("obs",): Field((2,)), ("mask",): Field((), torch.bool)}
    for default in (np.ones(N + 1, bool), np.ones(N, np.uint8), np.ones(2 * N, bool)[::2], 5, None):
        with pytest.raises(ValueError, match="a default is not"):
            fields_of([None] * 2, leaves, N, (), [default])
    with pytest.raises(ValueError, match="as many"):
        fields_of([None] * 2, leaves, N, (), [np.ones(N, bool)] * 3)


def test_rows_that_do_not_exist_and_paths_that_make_no_sense_are_refused() -> None:
    made = fields_of(arrays(2))
    for row in (-1, 2, 2**40):
        with pytest.raises(IndexError):
            made.take(row, nested(step()))
    for paths in ([()], [("a",), ("a", "b")], [("a", "b"), ("a",)]):
        with pytest.raises(ValueError, match="path"):
            fields_of([None] * len(paths), {path: Field() for path in paths})
    with pytest.raises(ValueError, match="as many"):
        fields_of([None], {})


class Interrupted(TorchFunctionMode):
    """Something is raised while torch is asked something."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise self.error


def test_an_interrupt_while_a_tensor_is_asked_reaches_the_caller_and_an_error_does_not() -> None:
    made, values = fields_of(arrays(1)), tuple(step(1).values())
    with pytest.raises(KeyboardInterrupt), Interrupted(KeyboardInterrupt):
        made.take(0, values)
    with Interrupted(RuntimeError):
        assert not made.take(0, values)
    assert made.take(0, values)


def test_checking_and_copying_keeps_no_reference() -> None:
    made, leaves = fields_of(arrays(1)), step(1, tuple(NAMES[:-1]))
    values, wrong = tuple(leaves.values()), torch.ones(N).to_sparse()
    counted = [*values, wrong, True, False]
    before = [sys.getrefcount(x) for x in counted]
    for _ in range(200):
        assert made.take(0, nested(leaves))
        assert not made.take(0, (*values[:-1], wrong))
    assert max(abs(sys.getrefcount(x) - y) for x, y in zip(counted, before, strict=True)) < 100


def test_other_threads_run_while_a_long_step_is_copied() -> None:
    source, target = np.ones((1, 2**24), np.uint8), np.zeros((1, 1, 2**24), np.uint8)
    made, seen, ended = fields_of([target], {("x",): Field((2**24,), torch.uint8)}, 1), list[float](), Event()

    def look() -> None:
        while not ended.is_set():
            seen.append(time.perf_counter())
            time.sleep(0)

    thread = Thread(target=look)
    thread.start()
    try:
        assert any(_ran_meanwhile(seen, made, source) for _ in range(500))
    finally:
        ended.set()
        thread.join()


def _ran_meanwhile(seen: list[float], made: Any, source: np.ndarray) -> bool:
    """Whether another thread has seen a time in the second quarter of a copy, or in the third."""
    since = time.perf_counter()
    assert made.take(0, {"x": source})
    quarter = (time.perf_counter() - since) / 4
    return any(since + quarter < at < since + 3 * quarter for at in [*seen])


@pytest.mark.parametrize("shift", [0, 1, 63])
@pytest.mark.parametrize("size", [2**17 - 1, 2**17, 2**17 + 1, 2**20 + 8191])
def test_a_long_row_is_copied_whole_and_nothing_else_wherever_it_lies(size: int, shift: int) -> None:
    source = np.random.default_rng(0).integers(0, 256, size + shift, np.uint8)[shift:].reshape(1, size)
    # the second field makes all targets together too large for a cache
    memory, wide = np.full(3 * size + 200, 7, np.uint8), np.zeros((3, 1, 2**24), np.uint8)
    target = memory[shift : shift + 3 * size].reshape(3, 1, size)
    leaves: dict[Any, Field] = {("x",): Field((size,), torch.uint8), ("y",): Field((2**24,), torch.uint8)}
    assert fields_of([target, wide], leaves, 1).take(1, (source, wide[0]))
    want = np.full_like(memory, 7)
    want[shift + size : shift + 2 * size] = source
    assert np.array_equal(memory, want)


# Steps that are added to a ring in one call

ROWS, WIDTH, BYTES = 4, 48, 5


class World:
    """A ring, and a step of a packed field ``[32]`` and a large one ``[BYTES]``, each for its last observation, too.

    A packed row begins with its reward and flags, and ends with its bookkeeping.
    """

    def __init__(self, mode: int, count: int = N) -> None:
        places, none, self.count, self.mode = count * ROWS, np.zeros(0, np.int64), count, mode
        self.memory, self.block = np.zeros((places, WIDTH), np.uint8), np.zeros((places, BYTES), np.uint8)
        self.state, counters = np.zeros((count, 4), np.int64), np.zeros(9, np.int64)
        counters[4:6] = 1

        def column(rows: Any, byte: int, dtype: Any) -> Any:
            return rows[:, byte : byte + np.dtype(dtype).itemsize].view(dtype)[:, 0]

        def flags(rows: Any) -> tuple[Any, Any, Any]:
            return column(rows, 0, np.float32), column(rows, 4, np.uint8), column(rows, 5, np.uint8)

        book = column(self.memory, 40, np.int32), column(self.memory, 32, np.int64), column(self.memory, 44, np.int32)
        self.arrays = RingArrays(ROWS, 32, 32, self.state, counters, self.memory, *book, *flags(self.memory),
                                 none.astype(np.int32), none)  # fmt: skip
        staged, final = np.zeros((2, count, WIDTH), np.uint8)
        room = count * 4
        self.given = StagedRows(np.arange(count), staged, final, *flags(staged), *np.zeros((3, count), np.int64),
                                np.zeros(room, np.int64), np.zeros(room, np.uint8))  # fmt: skip
        leaves: dict[Any, Field] = {
            (name,): Field((size,), torch.uint8)
            for name, size in {"row": 32, "large": BYTES, "final": 32, "last": BYTES}.items()
        }
        self.fields = fields_of([staged[None, :, :32], None, final[None, :, :32], None], leaves, count)
        self.ring, self.rows = core.Ring(self.arrays), core.StagedRows(self.given)
        self.large = [(1, self.block, False), (3, self.block, True)]

    def adder(self) -> Any:
        return core.StepAdder(self.ring, self.rows, self.fields, self.large, self.mode)

    def add_apart(self, values: Any) -> int:
        """Add a step by the calls for each of its parts."""
        if not self.fields.take(0, values):
            return UNFIT
        events = core.add_rows(self.ring, self.rows, self.mode)
        if events >= 0:
            core.scatter_rows(values[1], self.given.places, self.block, BYTES)
            core.scatter_rows(values[3], self.given.finals, self.block, BYTES)
        return events

    def bytes(self) -> list[bytes]:
        """All that is stored or noted."""
        return [np.asarray(x).tobytes() for x in (*self.arrays, self.block, *self.given[6:])]


def ring_step(seed: int, end: float = 0.3, count: int = N) -> tuple[Any, ...]:
    """A step of a World."""
    rng = np.random.default_rng(seed)
    row, large, final, last = (rng.integers(0, 256, (count, size), np.uint8) for size in (32, BYTES) * 2)
    row[:, :4] = rng.normal(size=(count, 1)).astype(np.float32).view(np.uint8)
    row[:, 4:6] = rng.random((count, 2)) < end
    return row, large, final, last


@pytest.mark.parametrize("count", [1, 3, 150])
@pytest.mark.parametrize("mode", range(4))
def test_one_call_does_what_the_calls_for_each_part_do(mode: int, count: int) -> None:
    one, apart = World(mode, count), World(mode, count)
    add = one.adder().add
    for seed in range(40):
        values = ring_step(seed, 0.3 if mode else 0.2 / count, count)
        given_ = dict(zip(("row", "large", "final", "last"), values, strict=True)) if seed % 2 else values
        assert add(given_) == apart.add_apart(values)
        assert one.bytes() == apart.bytes()


@pytest.mark.parametrize("change", range(4))
def test_a_step_that_does_not_fit_changes_nothing(change: int) -> None:
    world, values = World(FINALS), ring_step(1)
    adder = world.adder()
    assert adder.add(ring_step(0)) >= 0
    before = world.bytes()
    wrong = values[change].astype(np.int8)
    assert adder.add((*values[:change], wrong, *values[change + 1 :])) == UNFIT
    assert adder.add(values[:3]) == UNFIT
    assert adder.add({"row": values[0]}) == UNFIT
    assert world.bytes() == before
    world.mode, values[0][:, 4] = NO_FINALS, 1
    assert world.adder().add(values) == -1
    assert world.bytes() == before


def test_rows_of_the_ring_itself_are_not_read_while_others_are_written() -> None:
    world = World(FINALS, 1)
    add = world.adder().add
    row, large, final, last = ring_step(3, 1.0, 1)
    assert add((row, large, final, last)) >= 0
    for place in range(ROWS):
        view = world.memory[place : place + 1, :32]
        assert world.fields.leaves((row, large, view, last))[2] is view  # a single row has no gaps
        assert add((row, large, view, last)) == add((view, large, final, last)) == UNFIT


@pytest.mark.parametrize("count", [N, 150])
def test_numbers_are_narrowed_on_their_way_into_the_ring(count: int) -> None:
    world = World(FINALS, count)
    staged, final = world.given.staged, world.given.final
    leaves: dict[Any, Field] = {
        ("reward",): Field(), ("terminated",): Field((), torch.uint8), ("truncated",): Field((), torch.uint8),
        ("obs",): Field((5,)), ("next_obs",): Field((5,)),
    }  # fmt: skip
    targets = [*world.given[3:6], *(rows[:, 8:28].view(np.float32) for rows in (staged, final))]
    fields = fields_of([target[None] for target in targets], leaves, count)
    add = core.StepAdder(world.ring, world.rows, fields, [], FINALS).add
    rng = np.random.default_rng(0)
    reward, (obs, after) = rng.normal(size=count), rng.normal(size=(2, count, 5))
    terminated, truncated = np.zeros((2, count), np.uint8)
    terminated[1], truncated[2] = 1, 1
    assert add((reward, terminated, truncated, obs, after)) == 2
    stored_ = world.memory.reshape(count, ROWS, WIDTH)
    assert stored_[:, 0, :4].tobytes() == reward.astype(np.float32).tobytes()
    assert stored_[:, 0, 8:28].tobytes() == obs.astype(np.float32).tobytes()
    assert stored_[1:3, 1, 8:28].tobytes() == after[1:3].astype(np.float32).tobytes()
    assert not np.delete(stored_, [1, 2], 0)[:, 1:, :32].any()


def test_parts_that_do_not_fit_each_other_are_refused() -> None:
    world, other = World(FINALS), World(FINALS, 2)
    wide = np.zeros((N * ROWS, BYTES + 1), np.uint8)
    target = [np.zeros((1, N, 32), np.uint8), None, np.zeros((1, N, 32), np.uint8), None]
    names = {(name,): Field((size,), torch.uint8) for name, size in (("a", 32), ("b", BYTES), ("c", 32), ("d", BYTES))}
    good = [world.ring, world.rows, world.fields, world.large, FINALS]
    wrong: list[tuple[int, Any]] = [
        (1, other.rows), (2, other.fields), (2, fields_of(target, names)), (3, []), (3, world.large[:1]),
        (3, [(1, wide, False), world.large[1]]), (3, [(0, world.block, False), *world.large]),
        (3, [(4, world.block, False), *world.large]), (3, [(1, world.block[:-1], False), world.large[1]]),
        (4, 4), (4, -1),
    ]  # fmt: skip
    core.StepAdder(*good)
    for i, part in wrong:
        with pytest.raises((TypeError, ValueError)):
            core.StepAdder(*good[:i], part, *good[i + 1 :])
