"""Other defaults of torch change nothing in what is said of stored steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import relive
from relive import GAE, ReplayBuffer, RolloutBuffer
from support.defaults import OTHERS, other_default
from support.rollouts import SCHEMA, filled, play


def rollout() -> RolloutBuffer:
    return filled(play(12, 2, masked=True), seed=3).finish(GAE(), last_value=np.zeros(2, np.float32))


def replay() -> ReplayBuffer:
    made = ReplayBuffer(SCHEMA, 60, 2, seed=3, check_ends=False)
    for each in play(20, 2):
        made.add({name: each[name] for name in SCHEMA.names}, next_obs=each["obs"] + 1)
    return made


LOOKS: dict[str, Callable[[Any], str]] = {
    "audit": lambda buffer: str(relive.audit(buffer)),
    "inspect": lambda buffer: str(relive.inspect(buffer)),
}


@pytest.mark.parametrize("default", OTHERS)
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("make", [rollout, replay], ids=lambda make: make.__name__)
def test_an_audit_and_an_inspection_say_the_same(make: Callable[[], Any], look: str, default: str) -> None:
    plain = LOOKS[look](make())
    with other_default(default):
        assert LOOKS[look](make()) == plain
