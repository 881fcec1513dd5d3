"""Other defaults of torch change nothing that a host gets from a drop-in."""

from __future__ import annotations

from functools import partial

import pytest

from compat import stable_baselines3_stand_in as stand_in
from compat import test_overwritten as plays
from support.defaults import OTHERS, play_under


@pytest.mark.usefixtures("no_hosts")
@pytest.mark.parametrize("default", OTHERS)
@pytest.mark.parametrize("host", plays.PLAYS)
def test_a_drop_in_gives_the_same(host: str, default: str) -> None:
    play_under(default, plays.PLAYS[host])


@pytest.mark.parametrize("default", OTHERS)
@pytest.mark.parametrize("name", ["ReplayBuffer", "NStepReplayBuffer", "PrioritizedReplayBuffer", "RolloutBuffer"])
def test_stable_baselines3_gets_the_same(name: str, default: str) -> None:
    with stand_in.installed() as ours:
        play_under(default, partial(plays.play_stable_baselines3, ours, name=name))
