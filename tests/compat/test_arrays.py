"""The conversions and the walks that the drop-ins share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from relive.compat.base import array_of, leaves_of, mapped, sent
from relive.errors import ShapeError
from relive.steps.schema import map_leaves

GIVEN: list[Any] = [
    [1, 2],
    (1.0, 2.0),
    np.array([1, 2]),
    np.array([1.0, 2.0], ">f8"),
    np.array([1.0, 2.0], np.float32),
    torch.tensor([1, 2]),
    torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    torch.tensor([1.0, 2.0], requires_grad=True),
]


@pytest.mark.parametrize("given", GIVEN, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_anything_becomes_an_array_of_the_dtype_that_was_asked_for(given: Any, dtype: torch.dtype) -> None:
    found = array_of("x", given, dtype)
    assert found.tolist() == [1, 2]
    assert found.dtype == torch.zeros(0, dtype=dtype).numpy().dtype


@pytest.mark.parametrize("given", [True, 1, 1.0, np.float64(1), np.bool_(True)], ids=repr)
def test_a_number_becomes_an_array_without_axes(given: Any) -> None:
    found = array_of("x", given)
    assert (found.shape, found.dtype, float(found)) == ((), np.float32, 1.0)


def test_what_has_the_dtype_already_is_not_copied() -> None:
    array, tensor = np.zeros(2, np.float32), torch.zeros(2)
    assert array_of("x", array) is array
    array_of("x", tensor)[0] = 1.0
    assert tensor[0] == 1.0


def test_rows_of_different_lengths_are_refused_by_the_name_of_the_field() -> None:
    with pytest.raises(ShapeError, match=r"field 'reward'.*rows of different lengths"):
        array_of("reward", [[1.0], [1.0, 2.0]])


def test_what_is_on_the_device_already_is_sent_as_it_is() -> None:
    tensor = torch.zeros(2)
    assert sent(tensor, torch.device("cpu")) is tensor
    assert sent(np.ones(2), torch.device("cpu")).tolist() == [1.0, 1.0]


def test_a_function_is_mapped_over_an_array_or_over_the_members_of_dictionaries() -> None:
    assert mapped(lambda x: x + 1, 1) == 2
    assert mapped(lambda x: x + 1, {"a": 1, "b": 2}) == {"a": 2, "b": 3}
    assert mapped(lambda x, y: x + y, {"a": 1, "b": 2}, {"b": 20, "a": 10}) == {"a": 11, "b": 22}
    assert mapped(lambda *some: sum(some), {"a": 1}, {"a": 2}, {"a": 3}) == {"a": 6}


def test_leaves_are_found_at_any_depth() -> None:
    data = TensorDict({"a": torch.zeros(2), "b": {"c": {"d": torch.ones(2)}}}, [2])
    assert map_leaves(lambda x: float(x.sum()), data) == {"a": 0.0, "b": {"c": {"d": 2.0}}}
    assert map_leaves(len, [1, 2]) == 2
    assert {path: float(leaf.sum()) for path, leaf in leaves_of(data).items()} == {("a",): 0.0, ("b", "c", "d"): 2.0}
