"""The ends of truncated episodes: found in every form, valued once, and never those of a reset."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

import relive
from relive import GAE, Collector, RolloutBuffer, Schema, errors
from support import tagged_envs
from support.effort import every_nth
from support.tagged_collections import (
    OBSERVATIONS,
    Edited,
    check_against_oracle,
    every_mode,
    gather,
    hide,
    make_buffer,
    policy,
    rekeyed,
    truth,
)
from support.tagged_envs import Tag

# The traps at an episode's end


@every_mode
def test_a_truncation_is_valued_by_its_final_observation_never_by_the_reset_one(mode: AutoresetMode) -> None:
    schedule = tagged_envs.cycle([(2, "truncated")], [(3, "truncated")])
    envs = tagged_envs.make_tagged(2, mode, schedule)
    buffer = make_buffer(envs, 7)
    seen: list[Tag] = []

    def value_fn(obs: Tensor) -> Tensor:
        tag = tagged_envs.decode(obs)
        seen.extend(Tag(*map(int, one)) for one in zip(*tag, strict=True))
        return tagged_envs.tagged_value(obs)

    Collector(envs, policy, buffer, value_fn=value_fn, seed=0).collect()
    tags = tagged_envs.decode(buffer["obs"])
    cut = buffer["truncated"].nonzero().tolist()
    assert len(cut) >= 4
    for t, n in cut:
        last = Tag(*(int(x[t, n]) for x in tags))
        final, reset = last._replace(step=last.step + 1), last._replace(episode=last.episode + 1, step=0)
        assert float(buffer["final_value"][t, n]) == tagged_envs.value_of(final) != tagged_envs.value_of(reset)
    if mode is not AutoresetMode.NEXT_STEP:
        assert {(tag.env, tag.step) for tag in seen if tag.step} >= {(0, 2), (1, 3)}


@every_mode
def test_final_values_are_those_of_the_value_function_that_was_given_not_of_the_policy(mode: AutoresetMode) -> None:
    envs = tagged_envs.make_tagged(2, mode, tagged_envs.cycle([(2, "truncated")], [(3, "truncated")]))
    buffer = make_buffer(envs, 8)
    Collector(envs, policy, buffer, value_fn=lambda obs: 1 + tagged_envs.tagged_value(obs), seed=0).collect()
    tag = tagged_envs.decode(buffer["obs"])
    cut = buffer["truncated"]
    expected = 1 + tagged_envs.value_of(tag._replace(step=tag.step + 1))
    np.testing.assert_allclose(buffer["final_value"][cut], expected[cut.numpy()], rtol=1e-6)
    assert np.array_equal(buffer.last["value"], 1 + tagged_envs.tagged_value(buffer.last["obs"]))


def test_the_ignored_step_of_next_step_is_in_no_batch_no_count_and_no_statistic() -> None:
    envs = tagged_envs.make_tagged(2, AutoresetMode.NEXT_STEP, tagged_envs.always(10, "truncated"))
    buffer = make_buffer(envs, 110)
    collector = Collector(envs, policy, buffer, seed=0)
    stats = collector.collect()
    buffer.finish(GAE())
    assert len(buffer) == stats.num_steps == collector.total_steps == 200  # 9 % of the 220 rows are resets
    assert stats.episode_lengths == [10] * 20
    ignored = ~buffer["mask"]
    assert ignored.sum() == 20
    assert (buffer["reward"][ignored] == 0).all()
    tags = [tagged_envs.decode(batch["obs"]) for batch in buffer.minibatches(64)]
    served = sorted(one for tag in tags for one in zip(*(x.tolist() for x in tag), strict=True))
    assert served == sorted((n, e, s, n) for n in range(2) for e in range(10) for s in range(10))
    for batch in buffer.minibatches(64):
        tagged_envs.decode_reward(batch["reward"])


@every_mode
def test_the_next_episodes_first_observation_has_no_say_in_an_advantage(mode: AutoresetMode) -> None:
    """The values of first observations are enormous: wherever one leaks over an end, it shows."""
    schedule = tagged_envs.cycle([(3, "terminated"), (2, "truncated"), (4, "both")])

    def value_fn(obs: Tensor) -> Tensor:
        step = torch.as_tensor(tagged_envs.decode(obs).step)
        return torch.where(step == 0, torch.tensor(1e6), step.float())

    envs = tagged_envs.make_tagged(1, mode, schedule)
    buffer = make_buffer(envs, 20)
    Collector(envs, lambda obs: policy(obs) | {"value": value_fn(obs)}, buffer).collect()
    buffer.finish(GAE(gamma=1.0, lam=1.0))
    tag = tagged_envs.decode(buffer["obs"][:, 0])
    columns = (tag.episode, tag.step, buffer["return"][:, 0], buffer["mask"][:, 0])
    returns = {(int(e), int(s)): float(r) for e, s, r, real in zip(*columns, strict=True) if real}
    ended = [e for e in range(8) if (e, schedule(0, e)[0] - 1) in returns]
    assert len(ended) >= 4
    for e in ended:
        length, kind = schedule(0, e)
        for step in range(1, length):
            rewards = sum(float(tagged_envs.reward_of(0, e, s)) for s in range(step, length))
            assert returns[e, step] == pytest.approx(rewards + (length if kind == "truncated" else 0), rel=1e-5)


@pytest.mark.parametrize(
    ("observations", "name", "masked", "batched"),
    every_nth(3, OBSERVATIONS, ["final_obs", "final_observation"], [True, False], [True, False]),
)
def test_final_observations_are_found_under_every_name_and_in_every_form(
    observations: tagged_envs.Observations, name: str, masked: bool, batched: bool
) -> None:
    schedule = tagged_envs.cycle(
        [(2, "truncated"), (1, "terminated")], [(3, "truncated")], [(4, "both"), (2, "truncated")]
    )
    inner = tagged_envs.make_tagged(3, AutoresetMode.SAME_STEP, schedule, observations=observations)
    envs = Edited(inner, partial(rekeyed, name, masked, batched))
    buffer = make_buffer(envs, 9)
    rows, _ = gather(Collector(envs, policy, buffer, seed=1), [9, 8])
    assert rows == truth(schedule, [17] * 3, seed=1, observations=observations)


def withdraw(obs: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The final observation of env 1 is said not to be there, though something is in its place."""
    if "_final_obs" in info:
        info = info | {"_final_obs": info["_final_obs"] & np.array([True, False])}
    return obs, info


def test_a_final_observation_whose_mask_says_no_is_not_used() -> None:
    envs = Edited(tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.always(2, "truncated")), withdraw)
    with pytest.raises(relive.ReliveError, match=r"env 1 was truncated .*final_obs='mask'") as caught:
        Collector(envs, policy, make_buffer(envs, 4)).collect()
    assert isinstance(caught.value, errors.EnvError)


def test_a_vector_env_that_hides_its_final_observations_is_refused_where_they_are_needed() -> None:
    inner = tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.cycle([(9, "truncated")], [(3, "both")]))
    envs = Edited(inner, hide)
    with pytest.raises(errors.EnvError, match="env 0 was truncated and its final observation is hidden"):
        Collector(envs, policy, make_buffer(envs, 20)).collect()
    assert inner.get_attr("num_checked") == (9, 9)  # the ends before it, those of env 1, need no value


@pytest.mark.parametrize("edit", [hide, withdraw])
def test_with_final_obs_mask_the_truncated_steps_are_masked_and_nothing_else_changes(edit: Any) -> None:
    schedule = tagged_envs.cycle([(4, "truncated"), (3, "terminated")], [(5, "both"), (2, "truncated")])
    kept, masked = (
        Collector(envs, policy, make_buffer(envs, 17), seed=0, final_obs="mask")
        for envs in (
            tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, schedule),
            Edited(tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, schedule), edit),
        )
    )
    for collector in (kept, masked):
        collector.collect()
        collector.buffer.finish(GAE(gamma=0.9, lam=0.8))
        check_against_oracle(collector.buffer)
    for name in ("obs", "action", "reward", "terminated", "truncated", "value"):
        assert torch.equal(kept.buffer[name], masked.buffer[name])
    hidden = kept.buffer["truncated"] & ~kept.buffer["terminated"]
    hidden[:, 0] &= edit is hide
    assert hidden.any()
    assert kept.buffer["mask"].all()
    assert torch.equal(masked.buffer["mask"], ~hidden)
    assert list(kept.returns) == list(masked.returns)
    assert kept.total_steps == masked.total_steps == 34
    assert len(masked.buffer) == 34 - int(hidden.sum())


def test_without_values_nothing_is_asked_of_final_observations() -> None:
    envs = Edited(tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.always(2, "truncated")), hide)
    buffer = RolloutBuffer(Schema.from_env(envs), 5, 2)
    Collector(envs, tagged_envs.tagged_policy, buffer).collect()
    assert buffer.is_full
    assert "final_value" not in buffer
