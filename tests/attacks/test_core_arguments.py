"""No argument of the compiled core ends a process: every name of it, called rightly and with parts that are wrong.

Each batch of calls runs in a fork, which says what it calls before it does. So a process that ends, or hangs, is shown
with the call. Of a ring's own bookkeeping (``state``, ``counters``, stamps) only zeros are given, or what the core
itself wrote: Python checks what files hold of it before it binds a ring.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from attacks import core_calls
from attacks.core_calls import World
from attacks.tally import attempt
from relive import core
from relive.core import _core
from support.effort import often
from support.forks import in_fork

BATCHES, CALLS = often(2, 6), often(1500, 5000)
KEPT = 12
"""So many calls are of one world: what one of them left behind meets the next."""

NUMBERS: list[Any] = [
    -(2**63),
    -(2**62),
    -(2**31),
    -16,
    -8,
    -3,
    -2,
    -1,
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    9,
    15,
    16,
    17,
    64,
    96,
    4096,
    2**41,
    2**53,
    2**56,
    2**60,
    2**61,
    2**61 + 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    2**70,
    0.0,
    -0.0,
    0.5,
    -1.5,
    1e300,
    5e-324,
    float("inf"),
    float("-inf"),
    float("nan"),
    True,
    False,
    np.int64(3),
    np.float32(0.5),
]
"""None of them is a size that a machine has, and takes long to fill."""
THINGS: list[Any] = [
    None,
    "",
    "obs",
    "\ud800",
    b"bytes",
    (),
    [],
    {},
    object(),
    int,
    torch,
    torch.float32,
    torch.complex32,
    np.dtype("f4"),
    np.dtype("V0"),
    np.dtype([("a", "f4")]),
    Ellipsis,
    slice(None),
    range(5),
    1j,
    {"obs": {"obs": {}}},
    [[1], [1, 2]],
    ("a",) * 100_000,
    float,
    lambda *given: given,
]
DTYPES = ("i8", "i4", "u1", "?", "f4", "f8", "f2", "u8", "c8", ">i8", "O", "V3", "S2", "M8[s]")
SHAPES = (
    (),
    (0,),
    (1,),
    (2,),
    (3,),
    (4,),
    (16,),
    (48,),
    (0, 4),
    (2, 4),
    (3, 96),
    (16, 64),
    (5, 2),
    (6, 2),
    (2, 0),
    (3, 3, 64),
)


def array(rng: np.random.Generator, any_numbers: bool) -> Any:
    """An array or a tensor of some kind; its numbers are 0 unless they may be any."""
    dtype, shape = np.dtype(DTYPES[rng.integers(len(DTYPES))]), SHAPES[rng.integers(len(SHAPES))]
    made = np.zeros(shape, dtype)
    if any_numbers and dtype.kind in "iuf":
        with np.errstate(all="ignore"):
            made[...] = rng.choice([-1, 0, 1, 2, 7, 15, 16, 17, 2**31, 2**53, -(2**62), 2**62], shape).astype(dtype)
    way = rng.integers(12)
    if way == 0 and made.ndim:
        return np.concatenate([made, made])[::2]
    if way == 1 and made.ndim:
        return made[::-1]
    if way == 2:
        return made.T
    if way == 3:
        made.flags.writeable = False
    if way == 4 and dtype.itemsize and dtype.kind != "O":  # across words
        memory = np.zeros(made.nbytes + 1, np.uint8)
        return memory[1:].view(dtype).reshape(shape) if made.nbytes else made
    if way == 5:
        return np.broadcast_to(np.zeros((), dtype), shape)
    if way in (6, 7, 8) and dtype.kind in "iuf?" and dtype.isnative:
        tensor = torch.from_numpy(np.ascontiguousarray(made))
        return tensor if way < 8 else tensor.transpose(0, -1) if tensor.ndim else tensor
    return made


TENSORS: list[Callable[[], Any]] = [
    lambda: torch.zeros(3, device="meta"),
    lambda: torch.eye(2).to_sparse(),
    lambda: torch.ones(2, requires_grad=True),
    lambda: torch.zeros(1).expand(2**12),
    lambda: torch.zeros(3, dtype=torch.bfloat16),
    lambda: torch.zeros(0, 4),
    lambda: torch.ones(5, 2, dtype=torch.complex64).conj(),
    lambda: torch.nn.Parameter(torch.ones(5, 2)),
    lambda: torch.zeros(1, 1).expand(0, 2**62),
    lambda: torch.zeros(5, 1).expand(5, 2),
]


def wrong(rng: np.random.Generator, world: World, any_numbers: bool = True) -> Any:
    """A value that most arguments may not have, or a part of another right call."""
    kind = rng.integers(11)
    if kind < 3:
        return NUMBERS[rng.integers(len(NUMBERS))]
    if kind < 4:
        return THINGS[rng.integers(len(THINGS))]
    if kind < 7:
        return array(rng, any_numbers)
    if kind < 8:
        try:
            return TENSORS[rng.integers(len(TENSORS))]()
        except RuntimeError:  # torch itself refuses such a size
            return None
    if kind < 9:
        return world.objects[rng.integers(len(world.objects))]
    if kind < 10:  # one that was never initialised
        of = type(world.objects[rng.integers(len(world.objects))])
        return of.__new__(of)
    other = [
        core_calls.ring_arrays(3, 3, 5),
        core_calls.ring_arrays(1, 1, 16),
        core_calls.staged_arrays(5),
        world.lane_arrays,
    ]
    return other[rng.integers(len(other))]


def changed(rng: np.random.Generator, world: World, value: Any, depth: int = 0) -> Any:
    """A right argument, or a part of it, made wrong."""
    if depth < 3 and isinstance(value, (tuple, list)) and len(value) and rng.random() < 0.8:
        items = list(value)
        at = int(rng.integers(len(items)))
        fields = getattr(value, "_fields", None)
        if fields is not None:  # of a ring, of staged rows, of a lane
            items[at] = wrong(rng, world, any_numbers=False)
            return type(value)(*items)
        if (way := rng.random()) < 0.15:
            items.pop(at)
        elif way < 0.3:
            items.append(items[at])
        else:
            items[at] = changed(rng, world, items[at], depth + 1)
        return type(value)(items)
    if depth < 3 and isinstance(value, dict) and value and rng.random() < 0.8:
        name = list(value)[rng.integers(len(value))]
        return value | {name: changed(rng, world, value[name], depth + 1)}
    if isinstance(value, np.ndarray) and value.ndim and rng.random() < 0.4:
        copy = value.copy()
        if (way := rng.integers(4)) == 0:
            return copy[:-1]
        if way == 1:
            return np.concatenate([copy, copy])
        if copy.size and copy.dtype.kind in "if":
            odd = np.array([-1, 0, 3, 16, 17, 2**31, 2**53, 2**62, -(2**62)]).astype(copy.dtype)
            copy.reshape(-1)[rng.integers(copy.size)] = rng.choice(odd)
        return copy
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.8:
        return NUMBERS[rng.integers(len(NUMBERS))]
    return wrong(rng, world)


def say(text: str) -> None:
    """Write this, in place of what was written before."""
    os.ftruncate(1, 0)
    os.lseek(1, 0, os.SEEK_SET)
    os.write(1, text.encode(errors="replace"))


def shown(arguments: dict[str, Any]) -> str:
    lines = (f"    {name} = {repr(value)[:300]}  # {type(value).__name__}" for name, value in arguments.items())
    return "\n".join(lines) + "\n"


def called(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """What a call returns; a method is called on its object."""
    given = dict(arguments)
    return function(*[given.pop("self")] if "self" in given else [], **given)


def torment(seed: int, count: int) -> dict[str, int]:
    """Make so many wrong calls, each name in turn; how often each kind of error was raised."""
    np.seterr(all="ignore")
    for package in (np, torch):  # most of the time would be for numbers that `shown` cuts off
        package.set_printoptions(threshold=20)
    rng = np.random.default_rng(seed)
    outcomes: dict[str, int] = {}
    world = World(seed)
    all_names = sorted(world.calls())
    for k in range(count):
        if k % KEPT == 0:
            world = World(seed + k)
        name = all_names[int(rng.integers(len(all_names)))]
        function, arguments = world.calls()[name]
        for _ in range(int(rng.integers(0, 3))):
            if arguments:
                which = list(arguments)[rng.integers(len(arguments))]
                arguments |= {which: changed(rng, world, arguments[which])}
        say(f"seed {seed}, call {k}: {name}\n{shown(arguments)}")
        try:
            called(function, arguments)
            outcome = "returned"
        except SystemError:  # of a function that returned without a value or an error
            raise
        except Exception as error:
            outcome = type(error).__name__
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return outcomes


def test_a_right_call_of_every_name_is_known_and_raises_nothing() -> None:
    for seed in (5, 6):
        world = World(seed)
        calls = world.calls()
        assert set(calls) == core_calls.names()
        for name, (function, arguments) in calls.items():
            if not (name.startswith("GoalBatch.") and not core_calls.is_ready(world.goal_batch)):
                called(function, arguments)


@pytest.mark.parametrize("seed", [1000 * k for k in range(1, BATCHES + 1)])
def test_no_argument_of_any_name_ends_the_process(seed: int) -> None:
    with attempt("wrong arguments of the compiled core", CALLS):
        outcomes = in_fork(torment, seed, CALLS, seconds=300)
        assert outcomes["returned"] > CALLS // 10  # the calls are near right ones
        assert outcomes["TypeError"] > CALLS // 20
        assert outcomes["ValueError"] > CALLS // 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", [10**6 + 10**5 * k for k in range(12)])
def test_no_argument_of_any_name_ends_the_process_in_many_more_calls(seed: int) -> None:
    with attempt("wrong arguments of the compiled core", 20_000):
        in_fork(torment, seed, 20_000, seconds=600)


def raises(function: Callable[..., Any], *given: Any) -> str:
    """What a call raises."""
    try:
        function(*given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("name", ["StagedRows", "Lane", "Ring"])
def test_an_object_without_the_arrays_is_refused(name: str) -> None:
    assert in_fork(raises, getattr(core, name), 1).startswith("AttributeError: 'int' object has no attribute")


@pytest.mark.parametrize(
    ("count", "shape"), [(1, (2**61,)), (2, (2**31, 2**31)), (2**62, ()), (1, (2**62, 0, 4)), (1, (2**60, 2, 2**3))]
)
def test_a_field_with_more_bytes_than_any_memory_is_refused(count: int, shape: tuple[int, ...]) -> None:
    found = in_fork(raises, core.StepFields, [("obs",)], [torch.float64], [shape], count, [None])
    assert re.match("ValueError: .* too many bytes", found)


def test_fields_that_together_have_more_bytes_than_any_memory_are_refused() -> None:
    shapes = [(2**59,), (2**59,)]
    found = in_fork(raises, core.StepFields, [("a",), ("b",)], [torch.float64] * 2, shapes, 1, [None, None])
    assert re.match("ValueError: .* too many bytes", found)


def test_a_path_of_very_many_names_is_refused() -> None:
    path = ("a",) * 1_000_000
    found = in_fork(raises, core.StepFields, [path], [torch.float32], [()], 1, [None])
    assert re.match("ValueError: .* too many names", found)


@pytest.mark.parametrize("path", [7, None, 0.5])
def test_a_path_that_is_no_sequence_of_names_is_refused(path: Any) -> None:
    given = [path], [torch.float32], [()], 1, [None]
    assert in_fork(raises, core.StepFields, *given).endswith("is not iterable")


def test_rows_times_envs_beyond_an_int64_are_no_ring() -> None:
    arrays = core_calls.ring_arrays(envs=4)
    empty = {
        name: value[:0]
        for name, value in arrays._asdict().items()
        if name not in ("state", "counters") and isinstance(value, np.ndarray)
    }
    huge = arrays._replace(**empty, rows=2**62)
    assert in_fork(raises, core.Ring, huge) == "ValueError: the arrays of a ring do not fit each other"


def test_a_batch_that_was_never_drawn_has_no_columns() -> None:
    batch = core.GoalBatch.__new__(core.GoalBatch)
    columns = [vars(core.GoalBatch)[name].fget for name in ("which", "now", "last", "rows")]
    calls = [(column, thing) for column in columns for thing in (batch, 5, torch.zeros(3))]
    said = in_fork(lambda: [raises(column, thing) for column, thing in calls])
    assert said == ["TypeError: expected a batch that was drawn"] * 12


def test_a_step_is_not_added_to_a_ring_that_was_bound_to_other_rows() -> None:
    world = World(3)
    _, arguments = world.calls()["StepAdder.add"]
    world.ring.rebind(core_calls.ring_arrays(envs=2, rows=5000))
    assert in_fork(raises, world.adder.add, arguments["step"]).endswith("the ring was bound to other rows")


def test_what_python_runs_within_a_step_cannot_take_the_ring_away() -> None:
    """A mode of torch is asked about each tensor, between the checks and the change."""
    world = World(3)
    _, arguments = world.calls()["StepAdder.add"]

    class Rebinds(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            world.ring.rebind(core_calls.ring_arrays(envs=1, rows=16))
            return func(*args, **(kwargs or {}))

    def added() -> None:
        with Rebinds():
            world.adder.add(arguments["step"])

    assert in_fork(raises, added) == "IndexError: staged rows: there is no such env"


def test_sequences_are_not_longer_than_any_memory() -> None:
    world = World(3)
    long = world.of_sequences | {"total": 2**61}
    assert "does not fit" in in_fork(raises, lambda: core.SequenceWindows(**long))


@pytest.mark.parametrize("shape", [(2**40,), (2**31, 2**31), (2**20, 2**40), (2**62,), (0, 2**62)])
@pytest.mark.parametrize("name", ["scale", "fill_returns", "StepFields.leaves"])
def test_one_number_that_stands_for_more_than_any_memory_is_refused(name: str, shape: tuple[int, ...]) -> None:
    world = World(3)
    function, arguments = world.calls()[name]
    huge = torch.zeros((1,) * len(shape)).expand(shape)
    for key in ("x", "reward"):
        arguments |= {key: huge} if key in arguments else {}
    if name == "scale":
        arguments["mask"] = None
    if name == "StepFields.leaves":
        arguments["step"]["obs"] = huge
    in_fork(raises, lambda: called(function, arguments))


def test_the_number_of_a_lanes_step_is_bounded() -> None:
    assert in_fork(raises, World(3).lane.commit, 2**63 - 1, 0).endswith("below 2**53")


def test_a_stride_of_zero_divides_nothing() -> None:
    """A file may hold one."""

    def counted() -> int:
        world = World(9)
        world.long.counters[core_calls.STRIDE] = 0
        world.windows_ring.changed()
        return core.anchors(world.windows_ring, np.zeros(16, np.int64))

    assert in_fork(counted) >= 0


def test_names_of_the_core_are_all_of_its_types() -> None:
    public = {name for name in vars(_core) if not name.startswith("_") and callable(getattr(_core, name))}
    assert public <= {name.partition(".")[0] for name in core_calls.names()} | {"Draw", "EmptyDraw", "GoalBatch"}
