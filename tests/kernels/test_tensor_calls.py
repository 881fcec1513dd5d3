"""Compiled code calls torch's functions only where they are those that it knows."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Generator
from typing import Any, cast

import pytest
import torch

from relive.kernels import tensor_calls
from relive.kernels.tensor_calls import dtype_code, made_code

find = tensor_calls.tensor_calls
NEGATED: Any = cast("Any", torch)._neg_view  # has no public name
offered = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no functions for compiled code"
)


@pytest.fixture(autouse=True)
def found_anew() -> Generator[None]:
    """Nothing that another test found, or that one of these does, is known."""
    for cached in (find, dtype_code, made_code):
        cached.cache_clear()
    yield
    for cached in (find, dtype_code, made_code):
        cached.cache_clear()


@offered
def test_this_torch_has_functions_that_compiled_code_can_call() -> None:
    calls = find()
    assert calls is not None
    assert calls.description(torch.zeros(3, 2)) is not None


@offered
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_what_torch_cannot_describe_is_none() -> None:
    calls = find()
    assert calls is not None
    wrong = torch.zeros(2).to_sparse(), torch.nested.nested_tensor([torch.zeros(2)]), torch.zeros(2).to_mkldnn()
    assert [calls.description(tensor) for tensor in wrong] == [None] * 3


@offered
@pytest.mark.filterwarnings("ignore")
def test_no_two_dtypes_have_the_same_code() -> None:
    assert [dtype_code(dtype) for dtype in tensor_calls.SHARED] == [0, 0]
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    dtypes -= {value for value in dtypes if re.search(r"int[1-7]$", str(value))}
    codes = [code for code in map(dtype_code, dtypes) if code]
    assert len(set(codes)) == len(codes) >= 15
    assert dtype_code(torch.float32) == 1 << 16 | 32 << 8 | 2  # one number, of 32 bits, kDLFloat


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("relive.kernels.tensor_calls.MAJOR", 2),
        ("torch.Tensor.__dlpack_c_exchange_api__", None),
        ("torch.Tensor.__dlpack_c_exchange_api__", "no capsule"),
        ("torch.Tensor.is_neg", lambda tensor: False),
        ("relive.kernels.tensor_calls.first_item", lambda: 0),
        ("relive.kernels.tensor_calls.CPU", 2),
        ("relive.kernels.tensor_calls.LOAN", 3),
        ("relive.kernels.tensor_calls.TensorCalls.adopted", lambda calls, loan: torch.zeros(1)),
        ("relive.kernels.tensor_calls.NO_ARGUMENTS", 1),
    ],
)
def test_other_functions_are_not_called(place: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, value, raising=False)
    assert find() is None
    assert dtype_code(torch.float32) == made_code(torch.float32) == 0


@offered
def test_the_method_that_is_called_is_the_one_that_was_named() -> None:
    calls = find()
    assert calls is not None
    is_negated = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.c_void_p)(calls.is_negated)
    assert is_negated(torch.ones(2), None) is False
    assert is_negated(NEGATED(torch.ones(2)), None) is True
