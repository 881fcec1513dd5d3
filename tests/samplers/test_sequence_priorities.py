"""TD errors of sequences, step by step: what they amount to, and one compiled call for plain tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from relive import Prioritized, Sequence
from relive.core.words import LARGEST_ERROR
from support.effort import in_ci
from support.ratings import lazily_negated, long_way
from support.twins import Twin, contents

Change = Callable[[Tensor, Tensor], Any]
"""Makes the errors, or the mask, of plain errors and a plain mask, both ``[T, B]``."""

ERRORS: dict[str, Change] = {
    "float32": lambda x, mask: x,
    "float64": lambda x, mask: x.double(),
    "transposed": lambda x, mask: x.T.contiguous().T,
    "strided": lambda x, mask: torch.stack([x, x + 1], 2)[..., 0],
    "expanded": lambda x, mask: x[:1].expand(x.shape),
    "gradient": lambda x, mask: x.clone().requires_grad_() * 1.0,
    "float16": lambda x, mask: x.half(),
    "an array": lambda x, mask: x.numpy(),
    "nan in padding": lambda x, mask: torch.where(mask, x, torch.nan),
    "infinite in padding": lambda x, mask: torch.where(mask, x, -torch.inf),
    "the largest": lambda x, mask: torch.where(x == x.max(), LARGEST_ERROR, 0.0).double(),
}
OTHER_ERRORS: dict[str, Change] = {
    "lazily negated": lambda x, mask: lazily_negated(x),
    "int64": lambda x, mask: x.long(),
    "bool": lambda x, mask: x > 0,
    "a parameter": lambda x, mask: torch.nn.Parameter(x.clone()),
    "meta": lambda x, mask: x.to("meta"),
    "fake": lambda x, mask: FakeTensorMode().from_tensor(x),
    "sparse": lambda x, mask: x.to_sparse(),
    "a list": lambda x, mask: x.tolist(),
    "one axis": lambda x, mask: x[0],
    "three axes": lambda x, mask: x[..., None],
    "a step too few": lambda x, mask: x[1:],
    "a sequence too few": lambda x, mask: x[:, 1:],
    "the other axis first": lambda x, mask: x.T,
    "no steps": lambda x, mask: x[:0],
    "nan": lambda x, mask: torch.where(mask & (x == x[mask].max()), torch.nan, x),
    "infinite": lambda x, mask: torch.where(mask & (x == x[mask].max()), -torch.inf, x),
    "too large": lambda x, mask: torch.where(mask & (x == x[mask].max()), 1e39, x.double()),
}
MASKS: dict[str, Change] = {
    "transposed": lambda x, mask: mask.T.contiguous().T,
    "strided": lambda x, mask: torch.stack([mask, ~mask], 2)[..., 0],
    "expanded": lambda x, mask: mask[:, :1].expand(mask.shape),
    "no step counts": lambda x, mask: mask & False,
    "an array": lambda x, mask: mask.numpy(),
}
OTHER_MASKS: dict[str, Change] = {
    "uint8": lambda x, mask: mask.to(torch.uint8),
    "float32": lambda x, mask: mask.float(),
    "a step too few": lambda x, mask: mask[1:],
    "the other axis first": lambda x, mask: mask.T,
    "one axis": lambda x, mask: mask[0],
    "meta": lambda x, mask: mask.to("meta"),
    "fake": lambda x, mask: FakeTensorMode().from_tensor(mask),
}


def plain(x: Tensor, mask: Tensor) -> Tensor:
    return x


def plain_mask(x: Tensor, mask: Tensor) -> Tensor:
    return mask


def rated(errors: Change, mask: Change = plain_mask, time_first: bool = True, count: int = 12, later: int = 4) -> Any:
    """What an update so many steps later did: what it returned or raised, and all that a replay keeps."""
    view = Sequence(4, 2, "half", n=2, time_first=time_first)
    twin = Twin(2, 20, sampler=Prioritized(eta=0.7), view=view).play(*(".." if t % 9 else "TU" for t in range(40)))
    twin.buffer.seed = 3
    batch = twin.buffer.sample(count)
    twin.play(*[".."] * later)  # some of the sequences go
    drawn = torch.from_numpy(np.random.default_rng(count).normal(0, 3, batch["mask"].shape).astype(np.float32))
    steps = (drawn, batch["mask"]) if time_first else (drawn.T, batch["mask"].T)
    given = errors(*steps), mask(*steps)
    if not time_first:
        given = tuple(x.T if isinstance(x, Tensor | np.ndarray) and x.ndim == 2 else x for x in given)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: tensors of this kind are in beta
            found: Any = twin.buffer.update_priorities(batch["index"], given[0], mask=given[1])
    except Exception as error:
        found = type(error), str(error)
    twin.buffer.check()
    return found, contents(twin.buffer), twin.buffer.stats(), twin.buffer.sampler.largest_error


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have no tensor read by compiled code from now on."""
    return lambda: monkeypatch.setattr(Prioritized, "rate", long_way)


@pytest.mark.parametrize("time_first", [True, in_ci(False)])
@pytest.mark.parametrize("kind", [*ERRORS, *OTHER_ERRORS])
def test_errors_of_steps_do_what_the_long_way_does(kind: str, time_first: bool, unread: Callable[[], None]) -> None:
    change = {**ERRORS, **OTHER_ERRORS}[kind]
    found = rated(change, time_first=time_first)
    assert kind in OTHER_ERRORS or isinstance(found[0], int)
    unread()
    assert found == rated(change, time_first=time_first)


@pytest.mark.parametrize("time_first", [True, in_ci(False)])
@pytest.mark.parametrize("kind", [*MASKS, *OTHER_MASKS])
def test_masks_of_steps_do_what_the_long_way_does(kind: str, time_first: bool, unread: Callable[[], None]) -> None:
    change = {**MASKS, **OTHER_MASKS}[kind]
    found = rated(plain, change, time_first)
    unread()
    assert found == rated(plain, change, time_first)


@pytest.mark.parametrize("time_first", [True, in_ci(False)])
@pytest.mark.parametrize(
    ("errors", "mask"), [*((kind, "") for kind in ERRORS if "16" not in kind), *(("float32", kind) for kind in MASKS)]
)
def test_plain_tensors_of_steps_are_read_where_they_are(
    errors: str, mask: str, time_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Prioritized, "_rate_checked", None)
    found, *_ = rated(ERRORS[errors], MASKS.get(mask, plain_mask), time_first, later=0)
    assert isinstance(found, int)
