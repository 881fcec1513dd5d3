"""Steps on their way to shards: checked as a replay checks them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clusters import SCHEMA
from relive.cluster.writer import StepPacker
from relive.errors import FieldError


def played() -> dict[str, Any]:
    """Three steps of two envs. The episode of env 1 ends with the second one, without a final observation."""
    ended = np.zeros((3, 2), np.bool_)
    ended[1, 1] = True
    return {"obs": np.zeros((3, 2, 3), np.float32), "action": np.zeros((3, 2), np.int64),
            "reward": np.zeros((3, 2), np.float32), "terminated": ended, "truncated": ended & False}  # fmt: skip


def test_an_end_needs_its_final_observation_unless_the_mask_leaves_it_out() -> None:
    packer, values = StepPacker(SCHEMA, 2, own_next_obs=False), played()
    with pytest.raises(FieldError, match="the episode of env 1 ended and its final observation is missing"):
        packer.checked(values)
    with pytest.raises(FieldError, match="env 1"):
        packer.checked(values | {"mask": np.ones((3, 2), np.bool_)})
    checked = packer.checked(values | {"mask": ~values["terminated"]})
    assert not checked.finals
    assert checked.mask is not None
    assert checked.mask.tolist() == [True, True, True, False, True, True]
