"""Weights: what is fetched is a whole version, the newest, whoever is killed."""

from __future__ import annotations

import pickle
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from relive import Weights, errors
from support import internals
from support.children import METHODS, SECONDS, done, kill, publish_for_ever, started
from support.effort import often

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs memory that processes share")


def network() -> nn.Module:
    """A network with buffers, and of several dtypes."""
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2).to(torch.bfloat16))


def test_what_was_published_is_fetched_once() -> None:
    learner, actor = network(), network()
    weights = Weights(learner)
    assert repr(weights) == "<Weights: version 0 of 9 tensors>"
    other = pickle.loads(pickle.dumps(weights))
    assert not other.fetch(actor)
    assert not other.wait(0)
    weights.publish(learner)
    assert other.wait()
    parameter = actor[0].weight
    assert other.fetch(actor)
    assert actor[0].weight is parameter
    for name, tensor in learner.state_dict().items():
        assert torch.equal(actor.state_dict()[name], tensor)
    assert not other.fetch(actor)
    for _ in range(3):
        with torch.no_grad():
            learner[0].weight += 1
        weights.publish(learner.state_dict())
    assert other.fetch(actor)
    assert torch.equal(actor[0].weight, learner[0].weight)
    assert weights.version == other.version == 4


def test_other_networks_and_a_second_publisher_are_refused() -> None:
    weights = Weights(network())
    for other in (nn.Linear(3, 5), network().double(), {"0.weight": torch.zeros(5, 3)}):
        for call in (weights.publish, weights.fetch):
            with pytest.raises(errors.SchemaError, match="pass a network like the one"):
                call(other)
    for wrong in (None, 3, {"a": 1}, {}):
        with pytest.raises(errors.ParameterError, match="network"):
            Weights(wrong)
    weights.publish(network())
    with pytest.raises(errors.LifecycleError, match="another process publishes these weights"):
        pickle.loads(pickle.dumps(weights)).publish(network())
    with pytest.raises(errors.ParameterError, match="timeout"):
        weights.wait(-1)


def test_a_version_that_is_overwritten_while_it_is_copied_is_fetched_again() -> None:
    state = {"a": torch.zeros(8)}
    weights = Weights(state)
    weights.publish({"a": torch.ones(8)})
    copies = internals.copies(weights)

    class Overwritten:
        """The two versions in memory. While the first reader copies one, two newer ones are published."""

        def __getitem__(self, number: int) -> Any:
            weights._copies, self.row = copies, copies[number]
            return self

        def copy(self) -> Any:
            first = self.row[:16].copy()
            for value in (2.0, 3.0):
                weights.publish({"a": torch.full((8,), value)})
            return np.concatenate([first, self.row[16:]])

    weights._copies = Overwritten()
    assert weights.fetch(state)
    assert state["a"].tolist() == [3.0] * 8


@pytest.mark.parametrize("method", METHODS)
def test_every_version_is_whole_although_its_publisher_is_killed(method: str) -> None:
    state = {"a": torch.zeros(40_000), "b": torch.zeros((3, 5), dtype=torch.int64)}
    weights, fetched = Weights(state), 0
    for _ in range(often(2, 4) if method == "fork" else 1):
        process = started(method, publish_for_ever, weights, state)
        end = time.monotonic() + 0.1
        while time.monotonic() < end or not fetched:
            assert weights.wait(SECONDS)
            fetched += weights.fetch(state)
            assert (state["a"] == state["a"][0]).all()
            assert (state["b"] == int(state["a"][0])).all()
        kill(process)
        before = weights.version
        assert weights.fetch(state) or not weights.wait(0)
        assert int(state["a"][0]) == before
    done(started("fork", weights.publish, state))
