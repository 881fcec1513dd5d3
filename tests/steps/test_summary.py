"""What buffers and collectors say of themselves when they are printed."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
import torch

import relive
from relive import GAE, Collector, Field, Mixture, NStep, Prioritized, ReplayBuffer, RolloutBuffer, Schema
from relive.steps import summary
from relive.steps.schema import described


def policy(obs: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"action": (obs[:, 2] > 0).long(), "value": obs[:, 0]}


def played(rollout: bool) -> Collector:
    envs = gym.make_vec("CartPole-v1", num_envs=2)
    if rollout:
        return Collector(envs, policy, RolloutBuffer(Schema.from_env(envs, value=()), 1200, 2, seed=5), seed=0)
    replay = ReplayBuffer(Schema.from_env(envs), 3000, 2, seed=5, sampler=Prioritized(), view=NStep(3))
    return Collector(envs, lambda obs: policy(obs)["action"], replay, seed=0)


def test_a_printed_rollout_says_what_it_holds_how_full_it_is_and_where() -> None:
    collector = played(rollout=True)
    rollout = collector.buffer
    assert isinstance(rollout, RolloutBuffer)
    assert str(rollout).splitlines()[0] == "RolloutBuffer: 0 of 1,200 steps, 2 envs"
    assert "obs float32[4], action int64, reward float32" in str(rollout)
    assert "KiB in RAM" in str(rollout)
    assert "finish(...)" in str(rollout)
    collector.collect()
    rollout.finish(GAE())
    assert str(rollout).splitlines()[0] == "RolloutBuffer: 1,200 of 1,200 steps, 2 envs, full"
    assert "attached  advantage, return" in str(rollout)
    next(rollout.minibatches(8))
    assert "5, 1 permutations drawn" in str(rollout)


def test_a_printed_replay_names_its_view_and_sampler_too_and_changes_nothing() -> None:
    collector = played(rollout=False)
    replay: Any = collector.buffer
    collector.collect(100)
    replay.view.n = 2
    drawn = replay.stats()
    lines = str(replay).splitlines()
    assert replay.stats() == drawn
    assert lines[0] == "ReplayBuffer: 200 of 3,000 rows, 2 envs"
    for words in ("obs float32[4]", "KiB in RAM", "Prioritized(0.6, 0.4", "NStep(n=2", "5, 0 batches drawn"):
        assert words in str(replay)
    assert f"{int(drawn['size']):,} of {int(drawn['completed']):,} ever completed" in str(replay)
    assert len(lines) < 10


def test_the_repr_of_a_replay_is_the_call_that_rebuilds_it() -> None:
    replay = played(rollout=False).buffer
    again = eval(repr(replay), vars(relive) | {"torch": torch})
    assert repr(again) == repr(replay)


def test_collectors_and_mixtures_are_printed_in_a_few_lines() -> None:
    collector = played(rollout=False)
    collector.collect(60)
    text = str(collector)
    assert text.splitlines()[0].startswith("Collector: ")
    for words in ("CartPole", "NextStep", "ReplayBuffer: 120 of 3,000 rows", "ended, mean return of the last"):
        assert words in text
    buffers: dict[str, Any] = {"old": collector.buffer, "new": played(rollout=False).buffer}
    both = Mixture(buffers, {"old": 1, "new": 3})
    assert "old  0.25 from ReplayBuffer: 120 of" in str(both)


def test_notebooks_get_a_table_in_which_nothing_is_taken_for_html() -> None:
    for thing in (played(rollout=True).buffer, played(rollout=False)):
        table: Any = thing._repr_html_()
        assert table.startswith("<table>")
        assert table.endswith("</table>")
    assert "&lt;b&gt;" in summary.html(("<b>", {"<b>": "<b>"}))
    assert "<b>" not in summary.html(("<b>", {"<b>": "<b>"}))


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_fields_are_named_with_dtype_and_shape(shape: tuple[int, ...]) -> None:
    schema = Schema({"obs": {"x": Field(shape, torch.bfloat16)}})
    assert described(schema.leaves) == f"obs.x bfloat16{list(shape) if shape else ''}"
