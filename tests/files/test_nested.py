"""Nested values beside a save: each tensor has a name of its own, whatever its keys are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from relive.files.save import from_json, to_json


def back(value: Any) -> Any:
    described, tensors = to_json(value)
    return from_json(described, {name: torch.from_numpy(np.array(tensor)) for name, tensor in tensors.items()})


def test_keys_that_would_give_two_tensors_one_name_do_not() -> None:
    ones = {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}, "a.b#2": torch.full((2,), 2.0),
            "1": [torch.full((2,), 3.0)],
            1: (torch.full((2,), 4.0),)}  # fmt: skip
    _, tensors = to_json(ones)
    assert len(tensors) == 5
    found = back(ones)
    assert found["a.b"].tolist() == [1.0, 1.0]
    assert found["a"]["b"].tolist() == [0.0, 0.0]
    assert found["a.b#2"].tolist() == [2.0, 2.0]
    assert found["1"][0].tolist() == [3.0, 3.0]
    assert found[1][0].tolist() == [4.0, 4.0]


def test_values_of_every_kind_come_back_as_they_were() -> None:
    value = {"none": None, "flag": True, "number": 3, "text": "x", "nan": float("nan"), "low": float("-inf"),
             "bytes": b"ab", "scalar": np.float32(0.5), "list": [1, (2, [3])]}  # fmt: skip
    found = back(value)
    assert np.isnan(found.pop("nan"))
    value.pop("nan")
    assert found == value
    assert type(found["scalar"]) is np.float32
