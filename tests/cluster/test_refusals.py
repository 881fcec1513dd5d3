"""Arguments of a wrong kind for replays over shards: refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import relive
from relive.cluster import Replay, load_extra
from relive.errors import ParameterError, ReliveError
from support.clusters import local, steps

CALLS: dict[str, Callable[[Any], Any]] = {
    "schema": lambda v: local(schema=v),
    "num_envs": lambda v: local(num_envs=v),
    "ordered": lambda v: local(ordered=v),
    "path": lambda v: local(path=v),
    "timeout": lambda v: local(timeout=v),
    "limit": lambda v: local(limit=v),
    "limit_timeout": lambda v: local(limit_timeout=v),
    "writer.envs": local()[0].writer,
    "background": lambda v: local()[0].save(background=v),
    "path=": Replay.load,
    "path=.": load_extra,
}
"""What an error's message has to say -> a call with a wrong value of that argument."""


@pytest.mark.parametrize("words", CALLS)
def test_a_value_of_a_wrong_kind_is_refused_by_its_name(words: str):
    for value in (np.zeros((2, 3)), torch.eye(2).to_sparse(), object(), [[1], [1, 2]], -1.5, float("nan")):
        with pytest.raises(ReliveError, match=words):
            CALLS[words](value)


def test_numbers_of_envs_that_would_overflow_are_refused():
    with pytest.raises(ParameterError, match="num_envs"):
        local(num_envs=2**70)


def test_a_replay_waits_for_its_shards_some_time():
    with pytest.raises(ParameterError, match="timeout"):
        local(timeout=None)
    replay, _ = local(sampler=relive.Prioritized())
    replay.extend(steps(9))
    assert len(replay.sample(8)) == 8
