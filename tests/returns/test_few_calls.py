"""Arguments that fit as they are are checked in few calls; all others are refused or converted as one by one."""

from __future__ import annotations

import cProfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from relive import errors, returns
from relive import returns as functions
from support.return_blocks import ESTIMATORS, drawn, tensor

NAMES = [*ESTIMATORS, "group_advantage"]
FIELDS = ("reward", "value", "terminated", "truncated", "final_value", "mask")
PRIVATE: Any = torch


class Foreign(Tensor):
    """A tensor of a class that may do anything."""


ODD: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda x: None,
    "list": lambda x: x.tolist(),
    "array": lambda x: x.numpy(),
    "float64": lambda x: x.double(),
    "bool": lambda x: x.bool(),
    "a row more": lambda x: torch.cat([x, x[:1]]),
    "no rows": lambda x: x[:0],
    "an env less": lambda x: x[:, 1:],
    "one axis": lambda x: x.flatten(),
    "gaps": lambda x: x.mT.contiguous().mT,
    "negated": lambda x: PRIVATE._neg_view(x) if x.is_floating_point() else x,
    "zeros without memory": lambda x: PRIVATE._efficientzerotensor(x.shape, dtype=x.dtype),
    "with a graph": lambda x: x.clone().requires_grad_() if x.is_floating_point() else x,
    "a subclass": lambda x: x.as_subclass(Foreign),
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "sparse": lambda x: x.to_sparse(),
    "compressed": lambda x: x.to_sparse_csr(),
    "nested": lambda x: torch.nested.nested_tensor([*x]),
    "meta": lambda x: x.to("meta"),
}


def arguments(name: str) -> dict[str, Any]:
    """Good ones."""
    block = drawn(3, 4, 6, ends=0.2, unreal=0.2)
    fields = FIELDS if name != "group_advantage" else ("reward", "terminated", "truncated", "mask")
    given = {field: tensor(block[field]) for field in fields}
    return given | {"vtrace": {"log_rho": tensor(block["log_rho"])}, "group_advantage": {"group_size": 2}}.get(name, {})


def answer(name: str, given: dict[str, Any]) -> Any:
    """What a function returns, or its error."""
    try:
        found = getattr(returns, name)(**given)
    except errors.ReliveError as error:
        return type(error), str(error)
    found = (found,) if isinstance(found, Tensor) else found
    return [(x.dtype, x.requires_grad, type(x), x.numpy().tobytes()) for x in found]


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("how", ODD)
@pytest.mark.parametrize("name", NAMES)
def test_odd_arguments_are_treated_as_if_each_was_checked_by_itself(
    name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = arguments(name)
    found = {}
    for _ in range(2):
        for field in FIELDS:
            if field in good:
                found.setdefault(field, []).append(answer(name, good | {field: ODD[how](good[field].clone())}))
        monkeypatch.setattr(functions, "is_known_grid", lambda *_: False)
    assert [one for one, other in found.values() if one != other] == []


def test_tensors_of_a_transform_have_no_address_and_are_refused() -> None:
    given = arguments("gae")

    def ask(reward: Tensor) -> Tensor:
        return returns.gae(**(given | {"reward": reward}))[0]

    with pytest.raises(errors.DTypeError, match="reward"):
        torch.func.vmap(ask)(given["reward"][None])


@pytest.mark.parametrize("name", ["gae", "monte_carlo"])
def test_a_function_of_plain_tensors_takes_at_most_twenty_calls(name: str) -> None:
    given, function = arguments(name), getattr(returns, name)
    function(**given)
    profile = cProfile.Profile()
    profile.enable()
    function(**given)
    profile.disable()
    assert sum(entry.callcount for entry in profile.getstats() if not isinstance(entry.code, str)) <= 20
