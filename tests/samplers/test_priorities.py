"""The kernels of priorities: the fast twins agree with the plain ones bit for bit, and a bad batch changes nothing."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import inside
from effort import first_of
from rating import Pair, lazily_negated
from relive import FrameStack, Prioritized
from relive.kernels import cpu, reference
from relive.kernels.reference.priorities import ALPHA, LARGEST, MANY, UNUSUAL
from relive.kernels.tensor_calls import tensor_calls
from twins import Twin, contents


@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([0.0, 0.4, 1.0]), st.booleans(), st.integers(1, 40))
@settings(max_examples=settings.default.max_examples // 2)
def test_the_twins_draw_the_same_with_the_same_weights(
    seed: int, stratified: bool, beta: float, some: bool, count: int
) -> None:
    pair = Pair(seed)
    tops, until = np.array([len(pair.plain.nodes) - 1]), pair.plain.nodes[-1:].copy()
    if some:  # a part of the leaves, perhaps none
        ends = np.sort(pair.rng.integers(0, len(pair.plain.errors) + 1, 2))
        tops, until = np.empty(99, np.int64), np.empty(99)
        many = reference.tree_cover(pair.plain.nodes, pair.plain.offsets, ends[:1], ends[1:], tops, until)
        tops, until = tops[:many], until[:many]
    positive = pair.plain.nodes[: len(pair.plain.errors)]
    lowest = float(positive[positive > 0].min()) if positive.any() and pair.rng.integers(2) else 0.0
    results = []
    for twin, memory, key in ((reference, pair.plain, seed), (cpu, pair.handle, np.uint64(seed))):
        out = np.zeros(count, np.int64), np.zeros(count), np.zeros(count, np.float32)
        found = twin.draw_weighted(memory, key, stratified, beta, lowest, tops, until, *out)
        assert bool(found) == bool(len(until) and until[-1] > 0)
        results.append([array.tobytes() for array in out])
    assert results[0] == results[1]
    pair.agree()


@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.6, 1.3]), st.booleans(), st.booleans())
@settings(max_examples=settings.default.max_examples)
def test_the_twins_rate_the_same_and_leave_alone_what_is_gone(
    seed: int, alpha: float, minima: bool, wide: bool
) -> None:
    pair = Pair(seed, alpha, minima)
    index = pair.index()
    if len(index):
        index = pair.rng.choice(index, int(pair.rng.integers(0, 40)))  # some twice
    gone = np.arange(min(pair.num_envs, int(pair.ring.oldest.min()) * pair.num_envs))
    index = pair.rng.permutation(np.concatenate([index, gone]))
    errors = pair.rng.normal(0, 3, len(index)).astype(np.float64 if wide else np.float32)
    assert pair.rate(index, errors) == len(gone)
    known = dict(zip(index.tolist(), np.abs(errors).astype(np.float32), strict=True))
    for given_, error in known.items():
        place = int(pair.ring.find(np.array([given_]))[0][0])
        if place >= 0:
            assert pair.plain.errors[place] == error
            assert math.isclose(pair.plain.nodes[place], (float(error) + 1e-6) ** alpha, rel_tol=1e-15)
    assert pair.plain.facts[LARGEST] >= max((error for i, error in known.items() if i not in gone), default=0.0)


@pytest.mark.parametrize("seed", first_of(1, range(5)))
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("wrong", ["negative", "never issued", "nan", "inf", "too large", "no proof"])
def test_a_batch_with_something_unusual_changes_nothing(seed: int, wide: bool, wrong: str) -> None:
    pair = Pair(seed + 100)
    while not len(pair.index()):
        pair = Pair(int(pair.rng.integers(2**32)))
    index = pair.rng.choice(pair.index(), 6)
    errors = pair.rng.normal(0, 3, 6).astype(np.float64 if wide else np.float32)
    at = int(pair.rng.integers(6))
    if wrong in ("negative", "never issued"):
        index[at] = -1 if wrong == "negative" else int(pair.ring.heads.max()) * pair.num_envs + pair.num_envs
    elif wrong == "no proof":
        place = pair.ring.find(index[at : at + 1])[0]
        for memory in (pair.plain, pair.memory):
            reference.tree_set(memory.nodes, memory.offsets, memory.minima, len(memory.errors), place, np.zeros(1))
    elif wrong == "too large":
        for memory in (pair.plain, pair.memory):
            memory.facts[ALPHA], errors[at] = 10.0, 1e35
    else:
        errors[at] = math.nan if wrong == "nan" else -math.inf
    before = [x.tobytes() for x in pair.plain[:5]]
    assert pair.rate(index, errors) == UNUSUAL
    assert [x.tobytes() for x in pair.plain[:5]] == before


@given(st.integers(0, 2**32), st.booleans(), st.booleans())
@settings(max_examples=settings.default.max_examples // 2)
def test_the_twins_note_the_same_changes_and_set_the_same_errors(seed: int, minima: bool, heavy: bool) -> None:
    pair = Pair(seed, minima=minima)
    places = pair.rng.integers(0, len(pair.plain.errors), int(pair.rng.integers(0, 20)))
    drawable = pair.rng.integers(0, 2, len(places)).astype(np.uint8)
    for twin, memory in ((reference, pair.plain), (cpu, pair.handle)):
        twin.note_drawable(memory, places, drawable, 0.7, 0.3)
    pair.agree()
    sizes = pair.rng.gamma(1.0, 3.0, len(places)).astype(np.float32)
    if heavy and len(sizes):
        pair.plain.facts[ALPHA] = pair.memory.facts[ALPHA] = 10.0
        sizes[-1] = 1e35
    before = [x.tobytes() for x in pair.plain[:5]]
    bad = [twin.set_errors(memory, places, sizes) for twin, memory in ((reference, pair.plain), (cpu, pair.handle))]
    assert bad == [len(sizes) - 1 if heavy and len(sizes) else -1] * 2
    assert bad[0] < 0 or before == [x.tobytes() for x in pair.plain[:5]]
    pair.agree()


@given(st.lists(st.floats(0, width=32), min_size=1, max_size=20), st.floats(0, 3), st.floats(1e-12, 1.0))
@settings(max_examples=settings.default.max_examples // 2)
def test_the_twins_take_the_same_powers(errors: list[float], alpha: float, eps: float) -> None:
    sizes, results = np.array(errors, np.float32), []
    for twin in (cpu, reference):
        out = np.empty(len(sizes))
        twin.powers(sizes, alpha, eps, out)
        results.append(out.tobytes())
    assert results[0] == results[1]


def test_a_row_whose_priority_came_to_0_can_still_be_rated() -> None:
    twin = Twin(1, 10, sampler=Prioritized(alpha=2.0, eps=1e-200, default_error=1.0)).play(*".....")
    assert twin.buffer.update_priorities([1], [0.0]) == 0
    assert twin.buffer.sampler.priorities().tolist() == [1.0, 0.0, 1.0, 1.0]
    assert twin.buffer.update_priorities([1], [2.0]) == 0
    assert twin.buffer.sampler.priorities().tolist() == [1.0, 4.0, 1.0, 1.0]
    twin.buffer.check()


@pytest.mark.parametrize("kind", ["float32", "float64", "float16", "strided", "expanded", "gradient", "list", "int32"])
def test_indices_and_errors_of_every_kind_mean_the_same(kind: str) -> None:
    twin = Twin(1, 20, sampler=Prioritized(1.0, eps=1e-9)).play(*"........")
    index: Any = torch.tensor([5, 0, 5, 3])
    errors: Any = torch.tensor([-1.0, 2.0, -3.0, 4.0])
    want = {0: 2.0, 3: 4.0, 5: 3.0}
    if kind in ("float64", "float16"):
        errors = errors.to(getattr(torch, kind))
    elif kind == "strided":
        index, errors = torch.stack([index, index], 1)[:, 1], torch.stack([errors, errors], 1)[:, 0]
    elif kind == "expanded":
        errors, want = torch.tensor([2.0]).expand(4), {0: 2.0, 3: 2.0, 5: 2.0}
    elif kind == "gradient":
        errors = errors.requires_grad_() * 1.0
    elif kind == "list":
        index, errors = index.tolist(), errors.tolist()
    elif kind == "int32":
        index = index.int()
    assert twin.buffer.update_priorities(index, errors) == 0
    assert {i: inside.errors(twin.buffer.sampler)[i] for i in want} == want
    twin.buffer.check()


# TD errors in tensors, which one compiled call reads where they are


PRIVATE: Any = torch
"""Its stubs lack what is not public."""


ERRORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "float32": lambda x: x,
    "float64": lambda x: x.double(),
    "strided": lambda x: torch.stack([x, x + 1], 1)[:, 0],
    "offset": lambda x: torch.cat([x.new_ones(3), x])[3:],
    "expanded": lambda x: x[:1].expand(len(x)),
    "gradient": lambda x: x.clone().requires_grad_() * 1.0,
    "a leaf with a gradient": lambda x: x.clone().requires_grad_(),
    "lazily negated": lazily_negated,
    "imaginary": lambda x: torch.complex(x, x).conj().imag,
    "inference": lambda x: torch.inference_mode()(x.clone)(),
}
OTHER_ERRORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "float16": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "int64": lambda x: x.long(),
    "bool": lambda x: x > 2,
    "complex": lambda x: x + 0j,
    "a parameter": lambda x: torch.nn.Parameter(x.clone()),
    "zeros without memory": lambda x: PRIVATE._efficientzerotensor(len(x)),
    "meta": lambda x: x.to("meta"),
    "fake": lambda x: FakeTensorMode().from_tensor(x),
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor([x], layout=torch.jagged),
    "a column": lambda x: x[:, None],
    "a square": lambda x: x[:, None] - x,
    "one too few": lambda x: x[1:],
    "one too many": lambda x: torch.cat([x, x[:1]]),
    "none": lambda x: x[:0],
    "one number": lambda x: x[0],
    "nan": lambda x: torch.where(x == x.max(), torch.nan, x),
    "infinite": lambda x: torch.where(x == x.max(), -torch.inf, x),
    "an array": lambda x: x.numpy(),
}
INDICES: dict[str, Callable[[torch.Tensor], Any]] = {
    "strided": lambda x: torch.stack([x, x + 1], 1)[:, 0],
    "offset": lambda x: torch.cat([x, x])[len(x) :],
    "expanded": lambda x: x[:1].expand(len(x)),
}
OTHER_INDICES: dict[str, Callable[[torch.Tensor], Any]] = {
    **{
        name: lambda x, name=name: x.to(getattr(torch, name)) for name in ("int32", "int16", "uint8", "float32", "bool")
    },
    "a column": lambda x: x[:, None],
    "meta": lambda x: x.to("meta"),
    "fake": lambda x: FakeTensorMode().from_tensor(x),
    "sparse": lambda x: x.to_sparse(),
    "negative": lambda x: -x - 1,
    "never issued": lambda x: x + 2**40,
    "the newest": lambda x: x.clone().fill_(59),
    "none": lambda x: x[:0],
}


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have no tensor read by compiled code from now on."""
    return lambda: monkeypatch.setattr("relive.samplers.prioritized.tensor_calls", lambda: None)


def rated(index: Callable[[Any], Any], errors: Callable[[Any], Any], count: int = 12) -> Any:
    """What an update did: what it returned or raised, and all that a replay keeps."""
    twin = Twin(2, 20, sampler=Prioritized()).play(*(".." if t % 9 else "TU" for t in range(30)))
    rng = np.random.default_rng(count)
    gone = np.arange(5)
    which = torch.from_numpy(rng.choice([*twin.buffer.data()["index"].tolist(), *gone], count))  # some come twice
    sizes = torch.from_numpy(rng.normal(0, 3, count).astype(np.float32))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: tensors of this kind are in beta
            found: Any = twin.buffer.update_priorities(index(which), errors(sizes))
    except Exception as error:
        found = type(error), str(error)
    twin.buffer.check()
    return found, contents(twin.buffer), twin.buffer.stats(), twin.buffer.sampler.largest_error


def same(x: Any) -> Any:
    return x


@pytest.mark.parametrize("kind", [*ERRORS, *OTHER_ERRORS])
def test_errors_in_tensors_of_every_kind_do_what_the_long_way_does(kind: str, unread: Callable[[], None]) -> None:
    given_ = {**ERRORS, **OTHER_ERRORS}[kind]
    found = rated(same, given_)
    unread()
    assert found == rated(same, given_)


@pytest.mark.parametrize("kind", [*INDICES, *OTHER_INDICES])
def test_indices_in_tensors_of_every_kind_do_what_the_long_way_does(kind: str, unread: Callable[[], None]) -> None:
    given_ = {**INDICES, **OTHER_INDICES}[kind]
    found = rated(given_, same)
    unread()
    assert found == rated(given_, same)


@pytest.mark.skipif(tensor_calls() is None, reason="this torch has no functions for compiled code")
@pytest.mark.parametrize(("index", "errors"), [*(("", kind) for kind in ERRORS),
                                               *((kind, "float64") for kind in INDICES)])  # fmt: skip
def test_plain_tensors_are_read_where_they_are(index: str, errors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prioritized, "_rate_checked", None)
    found, *_ = rated(INDICES.get(index, same), ERRORS[errors])
    assert isinstance(found, int)


class Mine(torch.Tensor):
    """A tensor whose numbers are what its own methods say."""


@pytest.mark.parametrize("kind", [Mine, torch.nn.Parameter])
def test_tensors_of_another_class_are_asked_for_their_numbers(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(x: torch.Tensor) -> torch.Tensor:
        return x.as_subclass(kind)

    monkeypatch.setattr(cpu, "rate_tensors", None)
    assert [type(rated(*which)[0]) for which in ((same, other), (other, same))] == [int, int]


@pytest.mark.parametrize("count", [1, MANY, MANY + 1])
def test_many_errors_are_set_without_the_lock_of_python(
    count: int, unread: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    called, checked = list[int](), Prioritized._rate_checked
    monkeypatch.setattr(Prioritized, "_rate_checked", lambda *given: called.append(1) or checked(*given))
    found = rated(same, same, count)
    assert tensor_calls() is None or bool(called) == (count > MANY)
    unread()
    assert found == rated(same, same, count)


def test_inside_of_torchs_transforms_errors_are_refused_as_by_the_long_way(unread: Callable[[], None]) -> None:
    found = list[Any]()
    for _ in range(2):

        def inside(x: torch.Tensor) -> torch.Tensor:
            found.append(rated(lambda index: index, lambda sizes: sizes * x))
            return x.sum()

        torch.func.vmap(inside)(torch.ones(3))
        torch.func.grad(inside)(torch.ones(()))
        unread()
    assert found[:2] == found[2:]


@pytest.mark.skipif(tensor_calls() is None, reason="this torch has no functions for compiled code")
@pytest.mark.parametrize("kind", [*ERRORS, "int64", "zeros without memory", "meta", "a column", "one too few", "nan"])
def test_both_twins_read_the_same_tensors(kind: str) -> None:
    pair, calls = Pair(7), tensor_calls()
    assert calls is not None
    index = torch.from_numpy(pair.rng.choice(pair.index(), 9))
    errors = {**ERRORS, **OTHER_ERRORS}[kind](torch.from_numpy(pair.rng.normal(0, 3, 9).astype(np.float32)))
    given_ = calls.describe, id(index), id(errors)
    found = cpu.rate_tensors(pair.handle, *given_)
    assert found == reference.rate_tensors(pair.plain, *given_)
    assert (found == UNUSUAL) == (kind not in ERRORS)
    pair.agree()


def test_a_view_with_a_history_may_hide_rows_that_are_live_and_their_errors_come_late() -> None:
    twin = Twin(1, 8, sampler=Prioritized(), view=FrameStack(3)).play(*"..........")
    oldest = int(inside.ring(twin.buffer).oldest[0])
    assert twin.buffer.update_priorities([oldest, oldest + 2], [1.0, 2.0]) == 1
    assert twin.buffer.stats()["late_updates"] == 1
    twin.buffer.check()


def test_a_copy_of_a_sampler_has_no_addresses_of_the_other() -> None:
    twin = Twin(1, 20, sampler=Prioritized()).play(*"........")
    twin.buffer.sample(4)
    other = copy.deepcopy(twin.buffer.sampler)
    assert inside.binding(other) is None
    assert other.alpha == twin.buffer.sampler.alpha
    again = Twin(1, 20, sampler=other).play(*"......")
    again.buffer.sample(4)
    again.buffer.check()
