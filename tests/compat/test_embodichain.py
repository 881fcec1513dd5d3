"""relive.compat.embodichain by itself: the shared rollout, its minibatches, and what algorithms attach to it."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from relive import Field
from relive.compat.embodichain import (
    RolloutBuffer,
    compute_gae,
    compute_group_advantage,
    iterate_minibatches,
    transition_view,
)

N, T, OBS, ACTIONS = 4, 5, 3, 2


def buffer(**options: Any) -> RolloutBuffer:
    return RolloutBuffer(**{"num_envs": N, "rollout_len": T, "obs_dim": OBS, "action_dim": ACTIONS} | options)


def collect(target: RolloutBuffer, seed: int = 0, done: float = 0.0) -> TensorDict:
    """As EmbodiChain's collector writes a rollout."""
    generator = torch.Generator().manual_seed(seed)
    rollout = target.start_rollout()
    rollout["obs"].copy_(torch.rand(rollout["obs"].shape, generator=generator))
    rollout["value"].copy_(torch.rand((N, T + 1), generator=generator))
    for t in range(T):
        for name in ("action", "sample_log_prob", "reward"):
            rollout[name][:, t] = torch.rand(rollout[name][:, t].shape, generator=generator)
        rollout["terminated"][:, t] = torch.rand(N, generator=generator) < done
        rollout["truncated"][:, t] = False
        rollout["done"][:, t] = rollout["terminated"][:, t]
    target.add(rollout)
    return rollout


@pytest.mark.usefixtures("no_hosts")
def test_it_imports_and_works_without_embodichain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "relive.compat.embodichain")
    fresh = importlib.import_module("relive.compat.embodichain")
    made = fresh.RolloutBuffer(N, T, OBS, ACTIONS, torch.device("cpu"))
    collect(made)
    assert made.get().batch_size == (N * T,)


def test_the_shared_rollout_has_embodichains_fields_and_is_always_the_same_object() -> None:
    made = buffer()
    rollout = made.start_rollout()
    assert rollout is made.buffer
    assert rollout.batch_size == (N, T + 1)
    assert rollout["obs"].shape == (N, T + 1, OBS)
    assert rollout["action"].shape == (N, T + 1, ACTIONS)
    for name in ("sample_log_prob", "value", "reward"):
        assert rollout[name].shape == (N, T + 1)
        assert rollout[name].dtype is torch.float32
    for name in ("done", "terminated", "truncated"):
        assert rollout[name].dtype is torch.bool


def test_the_critics_observations_and_the_distribution_are_stored_where_their_sizes_are_given() -> None:
    sizes = {"critic_obs": 7, "action_mean": ACTIONS, "action_std": ACTIONS}
    plain, made = buffer(), buffer(critic_obs_dim=7, distribution_param_dim=ACTIONS)
    assert not set(sizes) & set(plain.buffer.keys())
    assert (made.critic_obs_dim, made.distribution_param_dim) == (7, ACTIONS)
    for name, size in sizes.items():
        assert made.buffer[name].shape == (N, T + 1, size)
        assert made.buffer[name].dtype is torch.float32
    for name in sizes:
        made.buffer[name].fill_(3)
    collect(made)
    flat = made.get()
    assert all((flat[name] == 3).all() for name in sizes)
    rollout = made.start_rollout()
    assert (rollout["critic_obs"][:, -1] == 3).all()  # a bootstrap row, as that of obs
    assert not rollout["action_mean"][:, -1].any()
    assert not rollout["action_std"][:, -1].any()
    rollout["critic_obs"] = torch.zeros(N, T + 1, 6)
    with pytest.raises(ValueError, match=r"'critic_obs' shape mismatch: expected \(4, 6, 7\), got \(4, 6, 6\)"):
        made.add(rollout)


def test_what_the_critic_sees_may_be_structured_too() -> None:
    made = buffer(critic_obs_dim={"joint": 4, "camera": Field((2, 2), torch.uint8)})
    made.buffer["critic_obs", "camera"].fill_(200)
    collect(made)
    assert (made.get()["critic_obs", "camera"] == 200).all()


def test_the_life_of_a_rollout_is_guarded() -> None:
    made = buffer()
    assert not made.is_full()
    with pytest.raises(RuntimeError, match="RolloutBuffer is empty"):
        made.get()
    collect(made)
    assert made.is_full()
    with pytest.raises(RuntimeError, match="already contains a rollout"):
        made.start_rollout()
    assert made.get(flatten=False) is made.buffer
    assert not made.is_full()
    collect(made, seed=1)
    with pytest.raises(ValueError, match="only accepts its shared rollout"):
        made.add(made.buffer.clone())


def test_a_rollout_that_was_not_written_is_refused_which_embodichain_serves() -> None:
    made = buffer()
    with pytest.raises(RuntimeError, match="the reward of step 0 of env 0 is missing"):
        made.add(made.start_rollout())
    rollout = made.buffer
    rollout["reward"][:, : T - 1] = 1
    with pytest.raises(RuntimeError, match="the reward of step 4 of env 0 is missing"):
        made.add(rollout)
    assert not made.is_full()


def test_a_field_that_was_replaced_by_one_of_another_shape_is_refused() -> None:
    made = buffer()
    rollout = made.start_rollout()
    rollout["value"] = torch.zeros(N, T + 1, 1)
    with pytest.raises(ValueError, match=r"'value' shape mismatch: expected \(4, 6\), got \(4, 6, 1\)"):
        made.add(rollout)


def test_what_algorithms_attach_stays_until_the_next_rollout_and_other_fields_for_good() -> None:
    made = buffer()
    rollout = collect(made)
    compute_gae(rollout, 0.99, 0.95)
    rollout["camera"] = torch.zeros(N, T + 1, 2, 2, dtype=torch.uint8)
    taken = made.get(flatten=False)
    assert {"advantage", "return", "camera"} <= set(taken.keys())
    again = made.start_rollout()
    assert "advantage" not in again.keys()
    assert "camera" in again.keys()
    assert not again["action"][:, -1].any()
    assert not again["reward"][:, -1].any()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_pickled_or_copied_buffer_goes_on_as_the_original_does(copied: Any) -> None:
    made = buffer()
    collect(made)["final_value"].fill_(3)
    compute_gae(made.buffer, 0.9, 0.9)
    again = copied(made)
    for target in (made, again):
        rollout = target.get(flatten=False)
        assert rollout is target.buffer
        assert torch.equal(rollout["advantage"], made.buffer["advantage"])
        assert (rollout["final_value"] == 3).all()
    collect(again, seed=1)
    collect(made, seed=1)
    assert torch.equal(again.get()["obs"], made.get()["obs"])
    assert again.buffer["final_value"].isnan().all()
    assert "advantage" not in again.buffer.keys()


def test_views_and_flat_rollouts_are_on_the_rollouts_device_and_say_so() -> None:
    rollout = collect(buffer())
    assert transition_view(rollout).device == transition_view(rollout, flatten=True).device == rollout.device
    assert rollout.device == torch.device("cpu")


def test_a_flat_rollout_is_a_copy_env_by_env_and_has_every_field_where_embodichain_drops_unknown_ones() -> None:
    made = buffer()
    rollout = collect(made)
    rollout["goal"] = torch.rand(N, T + 1, 7)
    expected = {name: rollout[name][:, :-1].reshape(N * T, *rollout[name].shape[2:]).clone() for name in rollout.keys()}
    after = rollout["value"][:, 1:].reshape(-1).clone()
    flat = made.get()
    collect(made, seed=1)
    assert torch.equal(flat["next_value"], after)
    for name, column in expected.items():
        torch.testing.assert_close(flat[name], column, equal_nan=True)


@pytest.mark.parametrize("obs", [3, 4, 5, 64])
def test_flat_rows_are_env_by_env_whatever_their_width(obs: int) -> None:
    """Rows of 16 bytes or more are copied row by row."""
    made = buffer(obs_dim=obs)
    expected = collect(made)["obs"][:, :-1].reshape(N * T, obs).clone()
    assert torch.equal(made.get()["obs"], expected)


def test_the_padding_that_was_written_to_is_zero_again_in_the_next_rollout() -> None:
    made = buffer(critic_obs_dim=3, distribution_param_dim=ACTIONS)
    padded = ("action", "sample_log_prob", "reward", "done", "terminated", "truncated", "action_mean", "action_std")
    kept = ("obs", "critic_obs", "value")
    collect(made)
    for name in (*padded, *kept):
        made.buffer[name][:, -1] = 1
    made.get()
    rollout = made.start_rollout()
    assert not any(rollout[name][:, -1].any() for name in padded)
    assert all((rollout[name][:, -1] == 1).all() for name in kept)


def test_a_view_of_the_steps_is_a_view() -> None:
    made = buffer()
    rollout = collect(made)
    steps = transition_view(rollout)
    assert steps.batch_size == (N, T)
    steps["reward"].fill_(3)
    assert (rollout["reward"][:, :-1] == 3).all()


@pytest.mark.parametrize("envs", [1, 3])
def test_flattening_copies_also_with_one_env(envs: int) -> None:
    rollout = TensorDict({"value": torch.ones(envs, T + 1)}, [envs, T + 1])
    flat = transition_view(rollout, flatten=True)
    flat["value"].zero_()
    assert rollout["value"].all()


@pytest.mark.parametrize(
    "obs",
    [
        {"joint": 4, "camera": Field((2, 2), torch.uint8)},
        gym.spaces.Dict({"joint": gym.spaces.Box(-1, 1, (4,)), "camera": gym.spaces.Box(0, 255, (2, 2), np.uint8)}),
    ],
)
def test_observations_may_be_structured_and_keep_their_dtypes(obs: Any) -> None:
    made = buffer(obs_dim=obs)
    rollout = made.start_rollout()
    rollout["obs", "camera"][:, 0] = 200
    rollout["reward"][:, :-1] = 0
    made.add(rollout)
    flat = made.get()
    assert flat["obs", "joint"].shape == (N * T, 4)
    assert flat["obs", "camera"].dtype is torch.uint8
    assert (flat["obs", "camera"].view(N, T, 2, 2)[:, 0] == 200).all()
    (batch,) = iterate_minibatches(flat, N * T)
    assert batch["obs", "camera"].shape == (N * T, 2, 2)


# -- minibatches ------------------------------------------------------------------------------------------------------


def test_minibatches_serve_each_row_once_whole_and_in_another_order_each_time() -> None:
    flat = TensorDict({"row": torch.arange(10), "twice": torch.arange(10)[:, None] * 2.0}, [10])
    orders = []
    for seed in (0, 1, None):
        batches = list(iterate_minibatches(flat, 4, torch.device("cpu"), seed=seed))
        assert [len(batch["row"]) for batch in batches] == [4, 4, 2]
        orders.append([int(x) for batch in batches for x in batch["row"]])
        assert sorted(orders[-1]) == list(range(10))
        assert all(torch.equal(batch["twice"][:, 0], batch["row"] * 2.0) for batch in batches)
    assert orders[0] != orders[1]
    assert [int(x) for batch in iterate_minibatches(flat, 4, seed=0) for x in batch["row"]] == orders[0]
    (only,) = iterate_minibatches(flat, 10, fields=("row",))
    assert set(only.keys()) == {"row"}


def test_minibatches_follow_torchs_seed_as_in_embodichain_and_leave_it_alone_if_they_have_their_own() -> None:
    flat = TensorDict({"row": torch.arange(10)}, [10])

    def order(**options: Any) -> list[int]:
        return [int(x) for batch in iterate_minibatches(flat, 4, **options) for x in batch["row"]]

    torch.manual_seed(42)
    first, second = order(), order()
    assert first != second
    torch.manual_seed(42)
    assert [order(), order()] == [first, second]
    before = torch.random.get_rng_state()
    order(seed=0)
    assert torch.equal(torch.random.get_rng_state(), before)


# -- GAE --------------------------------------------------------------------------------------------------------------


def plain_gae(rollout: TensorDict, gamma: float, lam: float, after: torch.Tensor) -> torch.Tensor:
    """Advantages ``[N, T]``, one step at a time; ``after[n, t]`` is what the step's next state is worth."""
    advantage = torch.zeros(N, T + 1)
    for t in reversed(range(T)):
        done = rollout["terminated"][:, t] | rollout["truncated"][:, t]
        delta = rollout["reward"][:, t] + gamma * after[:, t] - rollout["value"][:, t]
        advantage[:, t] = delta + torch.where(done, 0.0, gamma * lam * advantage[:, t + 1])
    return advantage[:, :-1]


def test_gae_is_attached_with_a_last_row_of_zeros_and_comes_back_without_it() -> None:
    rollout = collect(buffer(), done=0.3)
    after = torch.where(rollout["terminated"], 0.0, rollout["value"].roll(-1, 1))
    advantage, ret = compute_gae(rollout, 0.9, 0.8)
    torch.testing.assert_close(advantage, plain_gae(rollout, 0.9, 0.8, after))
    torch.testing.assert_close(ret, advantage + rollout["value"][:, :-1])
    assert rollout["advantage"].shape == rollout["return"].shape == (N, T + 1)
    assert not rollout["advantage"][:, -1].any()
    assert not rollout["return"][:, -1].any()


def test_a_time_limit_is_no_failure_everything_is_worth_10_and_nothing_is_rewarded() -> None:
    rollout = collect(buffer())
    rollout["reward"].zero_()
    rollout["value"].fill_(10)
    rollout["truncated"][:, 1] = rollout["done"][:, 1] = True
    with pytest.raises(ValueError, match=r"step 1 of env 0 was truncated and has no final value"):
        compute_gae(rollout, 1.0, 1.0)
    rollout["final_value"][:, 1] = 10
    advantage, _ = compute_gae(rollout, 1.0, 1.0)
    assert not advantage.any()
    theirs, _ = compute_gae(rollout, 1.0, 1.0, truncation="terminal")
    assert (theirs[:, :2] == -10).all()


def test_every_choice_for_time_limits_adds_its_own_bootstrap_once_and_leaves_the_rewards_alone() -> None:
    """V(obs) is 2, V(final observation) 5, the reward 1: a target that had both would be 8."""
    rollout = collect(buffer())
    rollout["reward"][:, :-1], rollout["value"][:], rollout["final_value"][:] = 1, 2, 5
    rollout["truncated"][:, 1] = rollout["done"][:, 1] = True
    rollout["truncated"][:, 3] = rollout["terminated"][:, 3] = rollout["done"][:, 3] = True  # terminated wins
    for _ in range(2):  # nothing is left behind that a second call would add to
        for truncation, worth in (("own_value", 2), ("bootstrap", 5), ("terminal", 0)):
            _, ret = compute_gae(rollout, 1.0, 0.0, truncation=truncation)  # type: ignore[arg-type]
            assert (ret[:, 1] == 1 + worth).all()
            assert (ret[:, 3] == 1).all()
            assert (rollout["reward"][:, :-1] == 1).all()
    rollout["final_value"].fill_(torch.nan)
    assert (compute_gae(rollout, 1.0, 0.0, truncation="own_value")[1][:, 1] == 3).all()
    with pytest.raises(
        ValueError, match=r"truncation='time_limit'\): expected 'bootstrap' or 'own_value' or 'terminal'"
    ):
        compute_gae(rollout, 1.0, 0.0, truncation="time_limit")  # type: ignore[arg-type]


def test_final_values_survive_until_the_rollout_was_used_and_not_longer() -> None:
    made = buffer()
    rollout = made.start_rollout()
    rollout["reward"][:, :-1] = 0
    rollout["final_value"][:, 2] = 5
    made.add(rollout)
    assert (made.get(flatten=False)["final_value"][:, 2] == 5).all()
    assert made.start_rollout()["final_value"].isnan().all()


def test_shapes_that_are_none_of_a_rollouts_are_refused() -> None:
    rollout = TensorDict({"reward": torch.zeros(N, T + 1, 1), "done": torch.zeros(N, T + 1).bool()}, [N, T + 1])
    with pytest.raises(ValueError, match="'reward': expected"):
        compute_gae(rollout, 0.9, 0.9)


# -- GRPO -------------------------------------------------------------------------------------------------------------


def test_group_advantages_are_attached_and_leave_out_what_comes_after_the_first_done() -> None:
    rollout = collect(buffer(), done=0.4)
    advantage, mask = compute_group_advantage(rollout, 0.9, group_size=2)
    returns = rollout["seq_return"][:, :-1]
    done = rollout["done"][:, :-1]
    for n in range(N):
        ended = False
        for t in range(T):
            group = [k for k in range(n // 2 * 2, n // 2 * 2 + 2) if not done[k, :t].any()]
            assert mask[n, t] == float(not ended)
            if ended:
                assert advantage[n, t] == 0
            else:
                inside = returns[group, t]
                expected = (returns[n, t] - inside.mean()) / (inside.std(correction=0) + 1e-8)
                torch.testing.assert_close(advantage[n, t], expected, atol=1e-5, rtol=1e-5)
            ended |= bool(done[n, t])
    assert rollout["seq_mask"].dtype is torch.float32
    assert not rollout["seq_mask"][:, -1].any()
    everything = compute_group_advantage(rollout, 0.9, group_size=2, truncate_at_first_done=False)[1]
    assert everything.all()
    with pytest.raises(ValueError, match="group_size=3 does not divide"):
        compute_group_advantage(rollout, 0.9, group_size=3)
