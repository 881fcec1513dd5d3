"""Minibatches of any size come from the same rows, packed or not, and small ones at few calls."""

from __future__ import annotations

import cProfile

import numpy as np
import pytest
import torch

import relive
from relive import RolloutBuffer
from relive.rollout import minibatches

FIELDS = ("obs", "action", "reward", "value")


def filled(steps: int, envs: int) -> RolloutBuffer:
    flag = relive.Field((), torch.bool)
    schema = {"obs": (5,), "action": (2,), "reward": (), "terminated": flag, "truncated": flag, "value": ()}
    rollout, rng = RolloutBuffer(relive.Schema(schema), steps, envs, seed=1), np.random.default_rng(0)
    for _ in range(steps):
        numbers = {name: rng.standard_normal((envs, *schema[name])).astype(np.float32) for name in FIELDS}
        rollout.add(numbers, terminated=np.zeros(envs, bool), truncated=np.zeros(envs, bool))
    return rollout


@pytest.mark.parametrize("many", [1, 10**9])
def test_packing_does_not_change_a_batch(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = filled(40, 3)
    expected = [rollout.flat()[order] for order in torch.from_numpy(rollout._permutations.next(120).numpy()).split(7)]
    rollout.seed = 1
    monkeypatch.setattr(minibatches, "MANY", many)
    for batch, want in zip(rollout.minibatches(7), expected, strict=True):
        assert all(torch.equal(batch[name], want[name]) for name in FIELDS)


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_small_minibatch_takes_at_most_forty_calls(epochs: int) -> None:
    rollout = filled(512, 8)
    run = lambda: sum(1 for _ in rollout.minibatches(64, epochs=epochs, fields=FIELDS))  # noqa: E731
    run()
    profile = cProfile.Profile()
    profile.enable()
    count = run()
    profile.disable()
    assert count == 64 * epochs
    assert sum(entry.callcount for entry in profile.getstats()) <= 40 * count
