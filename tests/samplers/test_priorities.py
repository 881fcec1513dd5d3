"""TD errors that come back: of every kind of tensor and array, read by one compiled call or the long way."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from relive import FrameStack, Prioritized
from support import internals
from support.ratings import lazily_negated, long_way
from support.twins import Twin, contents


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
    assert {i: internals.errors(twin.buffer.sampler)[i] for i in want} == want
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
    "float16": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "an array": lambda x: x.numpy(),
    "inference": lambda x: torch.inference_mode()(x.clone)(),
}
OTHER_ERRORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "lazily negated": lazily_negated,
    "imaginary": lambda x: torch.complex(x, x).conj().imag,
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
}
INDICES: dict[str, Callable[[torch.Tensor], Any]] = {
    "strided": lambda x: torch.stack([x, x + 1], 1)[:, 0],
    "offset": lambda x: torch.cat([x, x])[len(x) :],
    "expanded": lambda x: x[:1].expand(len(x)),
    "an array": lambda x: x.numpy(),
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
    return lambda: monkeypatch.setattr(Prioritized, "rate", long_way)


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


@pytest.mark.parametrize(("index", "errors"), [*(("", kind) for kind in ERRORS if "16" not in kind),
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

    assert [type(rated(*which)[0]) for which in ((same, other), (other, same))] == [int, int]


@pytest.mark.parametrize("count", [1, 4096, 4097])
def test_many_errors_do_what_the_long_way_does(count: int, unread: Callable[[], None]) -> None:
    found = rated(same, same, count)  # more than 4,096 are set without the lock of Python
    unread()
    assert found == rated(same, same, count)


def test_inside_of_torchs_transforms_errors_are_refused_as_by_the_long_way(unread: Callable[[], None]) -> None:
    found = list[Any]()
    for _ in range(2):

        def asked(x: torch.Tensor) -> torch.Tensor:
            found.append(rated(lambda index: index, lambda sizes: sizes * x))
            return x.sum()

        torch.func.vmap(asked)(torch.ones(3))
        torch.func.grad(asked)(torch.ones(()))
        unread()
    assert found[:2] == found[2:]


def test_a_view_with_a_history_may_hide_rows_that_are_live_and_their_errors_come_late() -> None:
    twin = Twin(1, 8, sampler=Prioritized(), view=FrameStack(3)).play(*"..........")
    oldest = int(internals.ring(twin.buffer).oldest[0])
    assert twin.buffer.update_priorities([oldest, oldest + 2], [1.0, 2.0]) == 1
    assert twin.buffer.stats()["late_updates"] == 1
    twin.buffer.check()


def test_a_copy_of_a_sampler_has_no_addresses_of_the_other() -> None:
    twin = Twin(1, 20, sampler=Prioritized()).play(*"........")
    twin.buffer.sample(4)
    other = copy.deepcopy(twin.buffer.sampler)
    assert internals.binding(other) is None
    assert other.alpha == twin.buffer.sampler.alpha
    again = Twin(1, 20, sampler=other).play(*"......")
    again.buffer.sample(4)
    again.buffer.check()
