"""Steps are copied by address where they can be, and the fast kernels agree with the plain ones about which can."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from operator import itemgetter
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

import inside
from relive import Field, ReplayBuffer, RolloutBuffer, Schema
from relive.errors import DTypeError, EpisodeEndWarning
from relive.kernels import cpu, reference, step_table
from relive.kernels.step_table import PAST, SOURCE, first_item
from relive.memory.copier import LIMIT, BoundedCache, StepCopier
from relive.steps.arrays import numpy_dtype
from relive.steps.checker import StepChecker


class Foreign(torch.Tensor):
    """A tensor of a class that may do anything."""


N = 3
PRIVATE: Any = torch  # some ways to make a tensor have no public name
FIELDS = {
    "obs": Field((4,)),
    "image": Field((2, 2), torch.uint8),
    "reward": Field(),
    "done": Field((), torch.bool),
    "half": Field((), torch.bfloat16),
    "none": Field((0,)),
}


def arrays(rows: int, packed: bool) -> list[np.ndarray]:
    """Where FIELDS are stored: columns ``[rows, N, ...]``, or fields of packed rows, ``[rows, N, ...]`` too."""
    formats = [(numpy_dtype(field.dtype), field.shape) for field in FIELDS.values()]
    if packed:
        record = np.dtype([(name, *kind) for name, kind in zip(FIELDS, formats, strict=True)], align=True)
        block = np.zeros((rows, N), record)
        return [block[name] for name in FIELDS]
    return [np.zeros((rows, N, *shape), dtype) for dtype, shape in formats]


def copier(targets: list[np.ndarray], **options: bool) -> StepCopier:
    """A copier of FIELDS."""
    dtypes, shapes = [f.dtype for f in FIELDS.values()], [f.shape for f in FIELDS.values()]
    return StepCopier(dtypes, list(targets), N, shapes, **options)


def step(seed: int = 0, tensors: tuple[str, ...] = ("half",), double: tuple[str, ...] = ()) -> dict[str, Any]:
    """A step of FIELDS; these as tensors, those as float64."""
    rng = np.random.default_rng(seed)
    fields: dict[str, Any] = {
        "obs": rng.normal(size=(N, 4)).astype(np.float32),
        "image": rng.integers(0, 256, (N, 2, 2), np.uint8),
        "reward": rng.normal(size=N).astype(np.float32),
        "done": rng.random(N) < 0.5,
        "none": np.zeros((N, 0), np.float32),
    }
    fields |= {name: fields[name].astype(np.float64) for name in double}
    fields |= {name: torch.from_numpy(fields[name]) for name in tensors if name != "half"}
    fields["half"] = torch.arange(N).to(torch.bfloat16) + seed
    return {name: fields[name] for name in FIELDS}


def stored(targets: list[np.ndarray]) -> list[bytes]:
    """The bytes of all targets."""
    return [target.tobytes() for target in targets]


def plainly(targets: list[np.ndarray], row: int, values: dict[str, Any]) -> None:
    """Store a step by assignment."""
    for target, value, field in zip(targets, values.values(), FIELDS.values(), strict=True):
        tensor = torch.as_tensor(value).to(field.dtype)
        target[row] = tensor.view(torch.int16).numpy() if field.dtype is torch.bfloat16 else tensor.numpy()


@pytest.fixture(params=["this torch", "an older torch"])
def torch_version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compiled code reads tensors itself, or Python asks them, as where torch has no functions for that."""
    if request.param == "an older torch":
        monkeypatch.setattr("relive.memory.copier.dtype_code", lambda dtype: 0)
    return request.param


def test_this_python_lays_out_arrays_as_the_kernels_expect() -> None:
    assert first_item() > 0


@pytest.mark.usefixtures("torch_version")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("double", [(), ("obs",), ("reward", "obs")])
@pytest.mark.parametrize("tensors", [("half",), ("half", "reward"), tuple(FIELDS)])
def test_both_twins_store_what_an_assignment_stores(
    tensors: tuple[str, ...], double: tuple[str, ...], packed: bool
) -> None:
    tensors = tuple(name for name in tensors if name not in double)
    want, results = arrays(2, packed), []
    plainly(want, 1, step(5, tensors, double))
    for twin in (cpu, reference):
        targets = arrays(2, packed)
        made = copier(targets)
        made.learn(tuple(step(0, tensors, double).values()))
        made.plan.accept, made.plan.copy = twin.accept_step, twin.copy_step
        values = tuple(step(5, tensors, double).values())
        assert made.accept(values)
        made.write(1, values)
        results.append(stored(targets))
    assert results == [stored(want)] * 2


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a list": lambda x: x.tolist(),
    "nothing": lambda x: None,
    "fewer envs": lambda x: x[:2],
    "one axis more": lambda x: x[..., None],
    "every other": lambda x: x.repeat(2, 0)[::2],
    "backwards": lambda x: x[::-1],
    "wider": lambda x: x.astype(np.float64),
    "narrower": lambda x: x.astype(np.float16),
    "whole numbers": lambda x: x.astype(np.int32),
    "bytes the other way round": lambda x: x.astype(x.dtype.newbyteorder()),
    "a subclass": lambda x: x.view(np.recarray),
    "a masked array": np.ma.masked_array,
    "unaligned": lambda x: np.frombuffer(bytearray(b"\0" + x.tobytes()), np.uint8)[1:].view(x.dtype).reshape(x.shape),
    "a tensor": torch.from_numpy,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["obs", "reward"])
def test_both_twins_refuse_an_array_that_is_not_as_before_and_write_nothing(change: str, name: str) -> None:
    made = copier(arrays(2, False))
    made.learn(tuple(step().values()))
    table, values = made.plan.table, step(1)
    values[name] = CHANGES[change](values[name])
    given_values = tuple(values.values())
    place = list(FIELDS).index(name)
    assert cpu.accept_step(id(given_values), table) == place
    assert reference.accept_step(id(given_values), table) == place
    assert not made.accept(given_values)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.ones(N, dtype=torch.float64),
        torch.ones(N, dtype=torch.int32),
        torch.ones(N + 1),
        torch.ones(N, 1),
        torch.ones(2 * N)[::2],
        torch.ones(N, device="meta"),
        torch.nn.Parameter(torch.ones(N)),
        PRIVATE._neg_view(torch.ones(N)),
        PRIVATE._efficientzerotensor(N),
        torch.ones(1).expand(N),
        torch.ones(N).to_sparse(),
        torch.ones(N).to_mkldnn(),
        torch.ones(N).as_subclass(Foreign),
        np.ones(N, np.float32),
        [1.0] * N,
        None,
    ],
    ids=lambda x: type(x).__name__,
)
@pytest.mark.usefixtures("torch_version")
def test_a_tensor_that_is_not_as_before_is_refused(wrong: Any) -> None:
    made = copier(arrays(2, False))
    made.learn(tuple(step(0, ("half", "reward")).values()))
    values = step(1, ("half", "reward"))
    assert made.accept(tuple(values.values()))
    refused = tuple((values | {"reward": wrong}).values())
    assert not made.accept(refused)
    if made.plan.tensor_check is None:
        place = list(FIELDS).index("reward")
        assert cpu.accept_step(id(refused), made.plan.table) == place
        assert reference.accept_step(id(refused), made.plan.table) == place


RIGHT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "with a gradient": lambda x: x.clone().requires_grad_(),
    "a result": lambda x: x.clone().requires_grad_() * 2,
    "in shared memory": lambda x: x.clone().share_memory_(),
    "a view": lambda x: torch.stack([x, x])[1],
    "turned round twice": lambda x: x.mT.contiguous().mT.mT.contiguous().mT.contiguous(),
    "made in inference mode": torch.inference_mode()(torch.clone),
    "wide steps between single items": lambda x: x.clone().as_strided((N, 4), (4, 1)),
}


@pytest.mark.usefixtures("torch_version")
@pytest.mark.parametrize("change", RIGHT)
def test_a_tensor_of_the_same_numbers_is_copied_as_it_is(change: str) -> None:
    for twin in (cpu, reference):
        targets, want = arrays(2, False), arrays(2, False)
        made = copier(targets)
        made.learn(tuple(step(0, ("half", "obs")).values()))
        made.plan.accept, made.plan.copy = twin.accept_step, twin.copy_step
        values = step(1, ("half", "obs"))
        values["obs"] = RIGHT[change](values["obs"])
        assert made.accept(tuple(values.values()))
        made.write(1, inside.accepted(made))
        plainly(want, 1, values | {"obs": values["obs"].detach()})
        assert stored(targets) == stored(want)


def test_axes_of_one_item_may_have_any_stride_and_empty_tensors_any() -> None:
    for size in (1, 0):
        made = StepCopier([torch.float32], [np.zeros((2, size, 1, 3), np.float32)], size, [(1, 3)])
        made.learn((torch.ones(size, 1, 3),))
        strange = (torch.arange(9.0).as_strided((size, 1, 3), (7, 5, 1)),)
        assert made.accept(strange)
        made.write(0, strange)
        assert inside.targets(made)[0][0].ravel().tolist() == [0.0, 1.0, 2.0] * size
        gaps = (torch.arange(9.0).as_strided((size, 1, 3), (7, 5, 2)),)
        assert made.accept(gaps) == (size == 0)
        for twin in (cpu, reference):
            assert twin.accept_step(id(gaps), made.plan.table) == (-1 if size == 0 else 0)


@given(st.lists(st.floats(width=64), min_size=N, max_size=N))
def test_both_twins_find_the_same_numbers_too_large(numbers: list[float]) -> None:
    made = copier(arrays(2, False))
    made.learn(tuple(step(0, double=("reward",)).values()))
    values = tuple((step() | {"reward": np.array(numbers)}).values())
    fast = cpu.accept_step(id(values), made.plan.table)
    assert fast == reference.accept_step(id(values), made.plan.table)
    with np.errstate(over="ignore"):
        lost = np.isinf(np.float32(numbers)) & ~np.isinf(numbers)
    assert fast >= 0 or not lost.any()
    assert fast < 0 or (np.abs(numbers) > np.finfo(np.float32).max).any()


def test_a_step_is_stored_only_once_and_only_as_it_was_accepted() -> None:
    targets = arrays(2, False)
    made = copier(targets)
    made.learn(tuple(step().values()))
    first, second = tuple(step(1).values()), tuple(step(2).values())
    assert made.accept(first)
    assert made.accept(second)
    made.write(0, second)
    want = arrays(2, False)
    plainly(want, 0, step(2))
    assert stored(targets) == stored(want)
    made.write(1, first)  # no longer the accepted one: assigned one by one
    plainly(want, 1, step(1))
    assert stored(targets) == stored(want)


@pytest.mark.usefixtures("torch_version")
@pytest.mark.parametrize("short", [True, False])
def test_a_step_is_taken_at_once_only_if_it_is_accepted(short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relive.memory.copier.SHORT", 10**6 if short else 0)
    pick = itemgetter(*FIELDS)
    for twin in (cpu, reference):
        targets = arrays(3, False)
        made = copier(targets)
        assert not made.take(2, step(), pick)
        made.learn(tuple(step(0, double=("reward",)).values()))
        assert made.plan is not None
        made.plan.accept, made.plan.copy, made.plan.take = twin.accept_step, twin.copy_step, twin.take_step
        before = stored(targets)
        for wrong in (step(1), step(1, double=("reward",)) | {"reward": np.full(N, 1e300)}, {"obs": np.zeros(N)}):
            assert not made.take(2, wrong, pick)
            assert stored(targets) == before
        values, want = step(1, double=("reward",)), arrays(3, False)
        assert made.take(2, values, pick)
        plainly(want, 2, values)
        assert stored(targets) == stored(want)


def test_other_threads_run_while_a_long_step_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = np.ones((1, 2**24), np.uint8), np.zeros((1, 1, 2**24), np.uint8)
    seen, ended = list[float](), Event()

    def look() -> None:
        while not ended.is_set():
            seen.append(time.perf_counter())
            time.sleep(0)

    thread = Thread(target=look)
    thread.start()
    try:
        for short, tries in ((2**30, 3), (0, 500)):
            monkeypatch.setattr("relive.memory.copier.SHORT", short)
            made = StepCopier([torch.uint8], [target], 1, [(2**24,)])
            made.learn((source,))
            assert any(_ran_meanwhile(seen, made, source) for _ in range(tries)) == (short == 0)
    finally:
        ended.set()
        thread.join()


def _ran_meanwhile(seen: list[float], made: StepCopier, source: np.ndarray) -> bool:
    """Whether another thread has seen a time in the second quarter of a copy, or in the third."""
    since = time.perf_counter()
    assert made.take(0, {"x": source}, lambda step: (step["x"],))
    quarter = (time.perf_counter() - since) / 4
    return any(since + quarter < at < since + 3 * quarter for at in [*seen])


@pytest.mark.parametrize("short", [True, False])
def test_a_scratch_row_has_the_step_as_soon_as_it_is_accepted(short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relive.memory.copier.SHORT", 10**6 if short else 0)
    targets, want = arrays(1, True), arrays(1, True)
    made = copier(targets, scratch=True)
    made.learn(tuple(step().values()))
    before, values = stored(targets), tuple(step(1).values())
    assert not made.accept(tuple(step(1, double=("obs",)).values()))
    assert stored(targets) == before
    assert made.accept(values)
    plainly(want, 0, step(1))
    made.write(0, values)
    assert stored(targets) == stored(want)
    made.write(0, tuple(step(2).values()))  # no longer the accepted one
    plainly(want, 0, step(2))
    assert stored(targets) == stored(want)


def test_a_step_that_was_stored_is_let_go() -> None:
    made = copier(arrays(2, False))
    made.learn(tuple(step().values()))
    values = tuple(step(1).values())
    assert made.accept(values)
    made.write(0, values)
    assert inside.accepted(made) is None


def test_where_objects_are_laid_out_in_another_way_arrays_take_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relive.memory.copier.first_item", lambda: 0)
    rollout = RolloutBuffer(Schema({"x": (), "y": ()}), 3, N)
    for t in range(3):
        rollout.add(x=np.full(N, t, np.float32), y=torch.full((N,), -t))
    assert rollout["x"].tolist() == [[t] * N for t in range(3)]
    assert inside.columns(rollout).copier.plan is None


def test_another_layout_of_objects_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"TYPE_OF": 0, "DATA": 4, "RANK": 4, "DESCR": 6, "FLAGS": 7, "SHAPE": step_table.DATA}
    for name, word in other.items():
        with monkeypatch.context() as patch:
            patch.setattr(step_table, name, word)
            first_item.cache_clear()
            assert first_item() == 0, name
    first_item.cache_clear()


class Interrupted(TorchFunctionMode):
    """Ctrl-C comes while torch is asked something."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise KeyboardInterrupt


def test_what_is_raised_while_a_tensor_is_asked_reaches_the_caller() -> None:
    made, values = copier(arrays(2, False)), tuple(step(1).values())
    made.learn(tuple(step(0).values()))
    with pytest.raises(KeyboardInterrupt), Interrupted():
        made.accept(values)
    assert made.accept(values)


def test_checking_tensors_keeps_no_reference() -> None:
    made, values = copier(arrays(2, False)), tuple(step(1, tuple(FIELDS)).values())
    made.learn(values)
    wrong = (*values[:-1], torch.ones(N).to_sparse())
    counted = [*values, wrong[-1], True, False]
    before = [sys.getrefcount(x) for x in counted]
    for _ in range(200):
        assert made.accept(values)
        assert not made.accept(wrong)
    made._accepted = None
    assert max(abs(sys.getrefcount(x) - y) for x, y in zip(counted, before, strict=True)) < 100


def test_steps_of_alternating_kinds_each_keep_their_table() -> None:
    rollout = RolloutBuffer(Schema({"x": (), "y": Field((), torch.int64)}), 64, N)
    for t in range(32):
        x = np.full(N, t, [np.float32, np.float64][t % 2])
        rollout.add(x=x, y=torch.full((N,), t) if t % 3 else np.full(N, t))
    assert rollout["x"].tolist() == [[t] * N for t in range(32)]
    assert rollout["y"].tolist() == [[t] * N for t in range(32)]
    assert len(inside.plans(inside.columns(rollout).copier)) == 4


def test_the_second_step_of_a_kind_is_not_checked_field_by_field() -> None:
    schema = Schema(FIELDS)
    made, check = copier(arrays(2, False)), StepChecker(schema, N, torch.device("cpu"))
    assert type(check(step(0), made)) is list
    assert type(check(step(1), made)) is tuple
    assert made.plan.table[SOURCE].all()


def test_both_twins_refuse_a_tuple_of_another_length() -> None:
    made = copier(arrays(2, False))
    made.learn(tuple(step().values()))
    values = tuple(step().values())
    for given_values in (values[:-1], (*values, values[0]), ()):
        for twin in (cpu, reference):
            assert twin.accept_step(id(given_values), made.plan.table) == 0


@pytest.mark.parametrize("shift", [0, 1, 63])
@pytest.mark.parametrize("size", [2**17 - 1, 2**17, 2**17 + 1, 2**20 + 8191])
def test_a_long_row_is_copied_whole_and_nothing_else_wherever_it_lies(
    size: int, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relive.memory.copier.CACHES", 0)  # so that all long rows are written past them
    source = np.random.default_rng(0).integers(0, 256, size + shift, np.uint8)[shift:].reshape(1, size)
    memory = np.full(3 * size + 200, 7, np.uint8)
    target = memory[shift : shift + 3 * size].reshape(3, 1, size)
    made, values = StepCopier([torch.uint8], [target], 1, [(size,)]), (source,)
    made.learn(values)
    assert made.accept(values)
    assert made.plan.table[PAST].tolist() == [size >= 2**17]
    made.write(1, values)
    want = np.full_like(memory, 7)
    want[shift + size : shift + 2 * size] = source
    assert np.array_equal(memory, want)


def test_steps_of_a_single_env_without_its_axis_are_stored_and_looked_at_as_with_it() -> None:
    schema = Schema(
        {"obs": (2,), "reward": (), "terminated": Field((), torch.bool), "truncated": Field((), torch.bool)}
    )

    def filled(given_: Callable[[Any], Any]) -> ReplayBuffer:
        replay = ReplayBuffer(schema, 64, seed=0)
        for t in range(20):
            step = {"obs": np.full((1, 2), t), "reward": np.full(1, t), "next_obs": np.full((1, 2), t + 1)}
            step = {name: value.astype(np.float32) for name, value in step.items()}
            step |= {"terminated": np.array([t % 3 == 2]), "truncated": np.array([False])}
            replay.add({name: given_(value) for name, value in step.items()})
        return replay

    with pytest.warns(EpisodeEndWarning):  # each episode begins on what the last one ended on
        whole = filled(lambda x: x)
    with pytest.warns(EpisodeEndWarning):
        bare = filled(lambda x: x[0] if x.ndim == 2 else x.reshape(()))
    assert len(whole) == len(bare) == 19
    other = bare.sample(32)
    for name, column in whole.sample(32).items():
        assert torch.equal(column, other[name]), name


def test_a_float64_image_too_large_to_pack_takes_the_long_way_and_is_checked() -> None:
    schema = Schema(
        {"obs": (400,), "reward": (), "terminated": Field((), torch.bool), "truncated": Field((), torch.bool)}
    )
    replay = ReplayBuffer(schema, 16, 2, seed=0)
    rest = {"reward": np.zeros(2), "terminated": np.zeros(2, np.bool_), "truncated": np.zeros(2, np.bool_)}
    for t in range(4):
        replay.add(obs=np.full((2, 400), float(t)), **rest)
    with pytest.raises(DTypeError, match="'obs'"):
        replay.add(obs=np.full((2, 400), 1e300), **rest)
    with pytest.raises(DTypeError, match="'reward'"):
        replay.add(obs=np.ones((2, 400), np.float32), **(rest | {"reward": np.full(2, -1e300)}))
    assert len(replay) == 6
    assert set(replay.sample(64)["obs"][:, 0].tolist()) == {0.0, 1.0, 2.0}


def test_a_step_is_taken_at_once_only_to_a_row_that_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = RolloutBuffer(Schema({"obs": (), "reward": (), "value": ()}), 4, N, wrap=True, seed=0)
    step, taken = {name: np.zeros(N, np.float32) for name in ("obs", "reward", "value")}, list[tuple[int, int]]()
    take = StepCopier.take

    def noted(self: StepCopier, row: int, *given_: Any) -> bool:
        done = take(self, row, *given_)
        taken.extend([(t, row)] * done)
        return done

    monkeypatch.setattr(StepCopier, "take", noted)
    for t in range(6):
        if t == 3:
            rollout.set_last(value=np.ones(N, np.float32))
        rollout.add(step | {"obs": np.full(N, t, np.float32)})
    assert taken == [(1, 1), (2, 2)]  # the first teaches; then come bootstrap values, and a full rollout
    assert rollout["obs"].tolist() == [[t] * N for t in (2, 3, 4, 5)]


# The cache of plans: what it keeps, and when it forgets


def test_a_kept_value_is_returned_and_found_again():
    made = BoundedCache[int, list[int]]()
    value = made.keep(3, [1])
    assert made[3] is value
    assert made.get(4) is None


def test_a_full_dictionary_starts_anew_with_the_newest():
    made = BoundedCache[int, int]()
    for key in range(LIMIT):
        made.keep(key, key)
    assert len(made) == LIMIT
    made.keep(LIMIT, 7)
    assert made == {LIMIT: 7}
