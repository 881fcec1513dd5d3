"""relive.compat.rsl_rl by itself: what goes in comes out, in rsl_rl's shapes, and right where rsl_rl is not."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from relive.compat.rsl_rl import RolloutStorage, split_and_pad_trajectories, unpad_trajectories
from relive.errors import EmptyError, FieldError, ParameterError, ShapeError, UnfinishedError

T, N, OBS, ACTIONS = 6, 5, 3, 2


def observations(step: int = 0, num_envs: int = N) -> TensorDict:
    """Each number says which step and env it is of."""
    number = torch.arange(num_envs, dtype=torch.float32) + 100 * step
    image = (torch.arange(num_envs) + 10 * step).byte()
    groups = {"policy": number[:, None].expand(-1, OBS).clone(), "image": image[:, None, None].expand(-1, 2, 2).clone()}
    return TensorDict(groups, [num_envs])


def storage(kind: str = "rl", num_envs: int = N, **options: Any) -> RolloutStorage:
    return RolloutStorage(kind, num_envs, T, observations(0, num_envs), (ACTIONS,), seed=0, **options)


def transition(step: int, dones: Any = None, num_envs: int = N, hidden: Any = (None, None)) -> Any:
    number = torch.arange(num_envs, dtype=torch.float32) + 100 * step
    made = RolloutStorage.Transition()
    made.observations = observations(step, num_envs)
    made.actions = number[:, None] + torch.arange(ACTIONS)
    made.rewards, made.values, made.actions_log_prob = number + 1, number[:, None] + 2, number + 3
    made.dones = torch.zeros(num_envs, dtype=torch.bool) if dones is None else torch.as_tensor(dones)
    made.distribution_params = (made.actions + 4, made.actions + 5)
    made.privileged_actions = made.actions + 6
    made.hidden_states = hidden
    return made


def fill(target: RolloutStorage, dones: Tensor | None = None, **options: Any) -> RolloutStorage:
    for t in range(T):
        target.add_transition(transition(t, None if dones is None else dones[t], target.num_envs, **options))
    return target


def some_dones() -> Tensor:
    dones = torch.zeros(T, N, dtype=torch.bool)
    dones[1, 0] = dones[3, 0] = dones[T - 1, 1] = dones[0, 2] = True
    return dones


@pytest.mark.usefixtures("no_hosts")
def test_it_imports_and_works_without_rsl_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("relive.compat.rsl_rl")]:
        monkeypatch.delitem(sys.modules, name)
    fresh = importlib.import_module("relive.compat.rsl_rl")
    assert len(list(fill(fresh.RolloutStorage("rl", N, T, observations(), [ACTIONS])).mini_batch_generator(3, 1))) == 3
    with pytest.raises(ImportError):
        _ = fresh.PPO


def test_attributes_have_the_shapes_and_dtypes_of_rsl_rl_and_hold_what_was_added() -> None:
    made = fill(storage(), some_dones())
    number = (torch.arange(N)[None] + 100 * torch.arange(T)[:, None]).float()[..., None]
    assert made.observations.batch_size == (T, N)
    assert made.observations["image"].dtype is torch.uint8
    torch.testing.assert_close(made.observations["policy"], number.expand(-1, -1, OBS))
    torch.testing.assert_close(made.rewards, number + 1)
    torch.testing.assert_close(made.values, number + 2)
    torch.testing.assert_close(made.actions_log_prob, number + 3)
    torch.testing.assert_close(made.actions, number + torch.arange(ACTIONS))
    torch.testing.assert_close(made.dones, some_dones().byte()[..., None])
    assert [tuple(p.shape) for p in made.distribution_params or ()] == [(T, N, ACTIONS)] * 2
    assert made.returns.shape == made.advantages.shape == (T, N, 1)
    assert made.step == T


def test_tensors_are_written_in_place_and_by_assignment_as_ppo_does_it() -> None:
    made = fill(storage())
    for t in reversed(range(T)):
        made.returns[t] = made.values[t] + t
    made.advantages = made.returns - made.values
    made.advantages = (made.advantages - made.advantages.mean()) / made.advantages.std()
    rows = torch.cat([batch.returns - batch.values for batch in made.mini_batch_generator(2, 1)])
    assert rows.flatten().sort().values.tolist() == sorted([float(t) for t in range(T)] * N)
    with pytest.raises(ShapeError, match=r"advantages: expected \(6, 5, 1\), got \(6, 5\)"):
        made.advantages = torch.zeros(T, N)
    made.observations = made.observations + 1
    made.observations["policy"][0] = 7
    (batch,) = made.mini_batch_generator(1, 1)
    assert sorted(batch.observations["policy"][:, 0].tolist())[:6] == [7.0] * N + [101.0]
    with pytest.raises(RuntimeError, match="locked"):  # it would not be what is read
        made.observations["policy"] = torch.zeros(T, N, OBS)


def test_rows_written_in_place_count_once_step_is_set() -> None:
    made = storage()
    made.observations["policy"].copy_(torch.rand(T, N, OBS))
    made.dones.copy_(some_dones()[..., None])
    made.distribution_params = ()
    made.saved_hidden_state_a = [torch.rand(T, 1, N, 4)]
    made.step = T
    (batch,) = made.recurrent_mini_batch_generator(1, 1)
    assert batch.masks is not None
    assert batch.masks.sum() == T * N
    assert batch.hidden_states[0].shape == (1, batch.masks.shape[1], 4)
    assert batch.hidden_states[1] is None
    assert batch.old_distribution_params == ()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_the_tensors_of_a_pickled_or_copied_storage_are_views_of_its_rows(copied: Any) -> None:
    made = fill(storage())
    made.advantages[0] = 1
    again = copied(made)
    assert torch.equal(again.advantages, made.advantages)
    assert torch.equal(again.observations["policy"], made.observations["policy"])
    again.advantages.fill_(5)
    again.observations["policy"].fill_(6)
    (batch,) = again.mini_batch_generator(1, 1)
    assert (batch.advantages == 5).all()
    assert (batch.observations["policy"] == 6).all()
    assert not (made.advantages == 5).any()


def test_a_full_storage_overflows_and_is_empty_again_when_cleared() -> None:
    made = fill(storage())
    with pytest.raises(OverflowError, match="Rollout buffer overflow"):
        made.add_transition(transition(T))
    made.clear()
    assert made.step == 0
    fill(made)
    assert made.step == T


def test_a_refused_transition_changes_nothing() -> None:
    made = storage()
    made.add_transition(transition(0))
    before = made.values.clone()
    wrong = transition(1)
    wrong.values = torch.zeros(N + 1, 1)
    with pytest.raises(ShapeError, match=r"values: expected \[5\] or \[5, 1\]"):
        made.add_transition(wrong)
    missing = transition(1)
    missing.rewards = None
    with pytest.raises(FieldError, match=r"transition\.rewards is None"):
        made.add_transition(missing)
    assert made.step == 1
    torch.testing.assert_close(made.values, before)


def test_the_kind_of_training_is_checked_which_rsl_rl_does_not() -> None:
    with pytest.raises(ValueError, match=r"training_type='bc'\): expected 'rl' or 'distillation'"):
        storage("bc")
    with pytest.raises(ValueError, match="only available for distillation"):
        storage().generator()
    for name in ("mini_batch_generator", "recurrent_mini_batch_generator"):
        with pytest.raises(ValueError, match="only available for reinforcement learning"):
            list(getattr(fill(storage("distillation")), name)(1, 1))
    with pytest.raises(AttributeError, match="'values'"):
        _ = storage("distillation").values


# -- minibatches ------------------------------------------------------------------------------------------------------


def test_each_epoch_has_every_transition_once_in_a_new_order_where_rsl_rl_repeats_and_drops() -> None:
    made = fill(storage())
    epochs = [[int(x) for batch in found for x in batch.values.flatten()] for found in split(made, 7, 3)]
    everything = sorted(int(x) for x in made.values.flatten())
    for epoch in epochs:
        assert sorted(epoch) == everything
    assert epochs[0] != epochs[1] != epochs[2]
    sizes = [len(batch.values) for batch in made.mini_batch_generator(7, 1)]
    assert sorted(set(sizes)) == [4, 5]  # 30 into 7: rsl_rl makes 7 of 4, and never reads two transitions


def split(made: RolloutStorage, batches: int, epochs: int) -> list[list[Any]]:
    found = list(made.mini_batch_generator(batches, epochs))
    return [found[i * batches : (i + 1) * batches] for i in range(epochs)]


def test_rsl_rls_fixed_permutation_is_there_if_it_is_asked_for() -> None:
    made = fill(storage(reshuffle_each_epoch=False))
    first, second = (torch.cat([batch.values for batch in epoch]) for epoch in split(made, 3, 2))
    torch.testing.assert_close(first, second)
    again = fill(storage(reshuffle_each_epoch=False))
    torch.testing.assert_close(torch.cat([batch.values for batch in again.mini_batch_generator(3, 1)]), first)


def test_a_minibatch_keeps_the_fields_of_a_transition_together_and_is_a_copy() -> None:
    made = fill(storage())
    for batch in made.mini_batch_generator(4, 2):
        number = batch.values - 2
        torch.testing.assert_close(batch.observations["policy"], number.expand(-1, OBS))
        torch.testing.assert_close(batch.actions, number + torch.arange(ACTIONS))
        torch.testing.assert_close(batch.old_actions_log_prob, number + 3)
        torch.testing.assert_close(batch.old_distribution_params[1], batch.actions + 5)
        assert batch.hidden_states == (None, None)
        batch.values.zero_()
    assert (made.values != 0).all()


def test_a_storage_with_a_seed_leaves_the_global_generator_alone() -> None:
    made = fill(storage())
    before = torch.random.get_rng_state()
    list(made.mini_batch_generator(2, 2))
    list(made.recurrent_mini_batch_generator(2, 2))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_without_a_seed_whatever_seeds_torch_makes_minibatches_equal_as_in_rsl_rl() -> None:
    made = [RolloutStorage("rl", N, T, observations(), (ACTIONS,)) for _ in range(2)]

    def epochs(storage: RolloutStorage, seed: int) -> list[list[Any]]:
        torch.manual_seed(seed)
        calls = storage.mini_batch_generator(2, 2), storage.recurrent_mini_batch_generator(2, 2)
        return [[batch.actions.tolist() for batch in batches] for batches in calls]

    first, second = fill(made[0]), fill(made[1])
    assert epochs(first, 42) == epochs(second, 42) == epochs(first, 42)
    assert epochs(first, 42) != epochs(first, 43)
    batches = [[batch.actions.tolist() for batch in first.mini_batch_generator(2, 1)] for _ in range(2)]
    assert batches[0] != batches[1]


def test_more_minibatches_than_there_is_to_split_are_an_error_and_not_empty_batches() -> None:
    made = fill(storage())
    with pytest.raises(ParameterError, match="1 to 30"):
        made.mini_batch_generator(31)
    with pytest.raises(ParameterError, match="5 envs make 1 to 5"):
        next(made.recurrent_mini_batch_generator(6))


def test_only_rows_of_this_rollout_are_served() -> None:
    made = fill(storage())
    made.clear()
    with pytest.raises(EmptyError):
        made.mini_batch_generator(2)
    made.add_transition(transition(7))
    (batch,) = made.mini_batch_generator(1, 1)
    assert batch.values.flatten().sort().values.tolist() == [702 + n for n in range(N)]


# -- trajectories -----------------------------------------------------------------------------------------------------


def states(step: int, num_envs: int = N) -> Any:
    """A two-layer LSTM's pair for the actor, a GRU's state for the critic; numbered by step and env."""
    number = torch.arange(num_envs, dtype=torch.float32) + 100 * step
    return (
        (number[None, :, None].expand(2, -1, 4).clone(), 1 + number[None, :, None].expand(2, -1, 4).clone()),
        2 + number[None, :, None].expand(1, -1, 3).clone(),
    )


def recurrent(dones: Tensor | None = None, **options: Any) -> RolloutStorage:
    made = storage(**options)
    for t in range(T):
        made.add_transition(transition(t, None if dones is None else dones[t], hidden=states(t) if t else (None, None)))
    return made


def test_a_recurrent_batch_has_whole_envs_and_their_trajectories_begin_in_the_stored_states() -> None:
    made, seen = recurrent(some_dones()), []
    for batch in made.recurrent_mini_batch_generator(2, 3):
        envs = [int(x) % 100 for x in (batch.values[0, :, 0] - 2)]
        seen += envs
        assert batch.masks.dtype is torch.bool
        flat = batch.observations["policy"].transpose(0, 1)[batch.masks.T]  # as rsl_rl's models put it back
        torch.testing.assert_close(flat.view(-1, T, OBS).transpose(0, 1), (batch.values - 2).expand(-1, -1, OBS))
        assert not batch.observations["policy"].transpose(0, 1)[~batch.masks.T].any()
        starts = batch.observations["policy"][0, :, 0]
        lstm, gru = batch.hidden_states
        begun = torch.where(starts < 100, 0.0, starts)  # there was no state before the very first step
        torch.testing.assert_close(lstm[0], begun[None, :, None].expand(2, -1, 4).contiguous())
        torch.testing.assert_close(gru[0, :, 0], torch.where(starts < 100, 0.0, starts + 2))
        assert isinstance(lstm, tuple)
        assert lstm[0].is_contiguous()
        assert gru.shape == (1, len(starts), 3)
    assert sorted(seen) == sorted(list(range(N)) * 3)  # rsl_rl leaves out the last env
    assert len({tuple(seen[i * N : (i + 1) * N]) for i in range(3)}) > 1  # and never shuffles


def test_recurrent_batches_have_the_envs_in_order_in_every_epoch_if_that_is_asked_for() -> None:
    made = recurrent(some_dones(), reshuffle_each_epoch=False)
    envs = [int(x) % 100 for batch in made.recurrent_mini_batch_generator(2, 3) for x in batch.values[0, :, 0] - 2]
    assert envs == list(range(N)) * 3


def test_saved_hidden_states_are_views_that_can_be_written_in_place() -> None:
    made = recurrent()
    assert made.saved_hidden_state_a is not None
    assert made.saved_hidden_state_c is not None
    assert [tuple(s.shape) for s in made.saved_hidden_state_a] == [(T, 2, N, 4)] * 2
    assert [tuple(s.shape) for s in made.saved_hidden_state_c] == [(T, 1, N, 3)]
    made.saved_hidden_state_a[0][0].fill_(7)
    (batch,) = made.recurrent_mini_batch_generator(1, 1)
    assert (batch.hidden_states[0][0] == 7).all()


def test_a_state_that_is_missing_later_is_zeros_and_not_that_of_the_rollout_before() -> None:
    made = recurrent()
    made.clear()
    made.add_transition(transition(0))
    (batch,) = made.recurrent_mini_batch_generator(1, 1)
    assert not batch.hidden_states[0][0].any()


def test_tensors_made_in_inference_mode_can_be_written_to_outside_of_it() -> None:
    made = storage()
    with torch.inference_mode():
        for t in range(T):
            made.add_transition(transition(t, hidden=states(t)))
        made.advantages = made.returns - made.values
    made.advantages[0] += 1
    assert made.distribution_params is not None
    made.distribution_params[0][0] += 1
    weight = torch.ones((), requires_grad=True)
    for batch in made.recurrent_mini_batch_generator(2, 1):
        (
            batch.advantages * weight * batch.old_distribution_params[0].sum() * batch.hidden_states[1].sum()
        ).sum().backward()
    assert weight.grad is not None


def test_a_batch_that_is_kept_is_not_overwritten_by_the_next_ones() -> None:
    made = recurrent(some_dones())
    kept = [(batch, batch.observations["policy"].clone(), batch.actions.clone(), batch.hidden_states[1].clone())
            for batch in made.recurrent_mini_batch_generator(2, 4)]  # fmt: skip
    for batch, obs, actions, hidden in kept:
        assert torch.equal(batch.observations["policy"], obs)
        assert torch.equal(batch.actions, actions)
        assert torch.equal(batch.hidden_states[1], hidden)


def test_steps_are_split_into_padded_trajectories_and_put_back_with_their_gradients() -> None:
    steps = torch.arange(1.0, T * N + 1).view(T, N, 1).expand(-1, -1, 2).clone().requires_grad_()
    for dones in (some_dones(), some_dones()[..., None].byte()):
        padded, masks = split_and_pad_trajectories(steps, dones)
        assert masks.sum(0).tolist() == [2, 2, 2, 6, 1, 5, 6, 6]  # the first env's three trajectories, then the next's
        assert padded.shape == (T, 8, 2)
        assert not padded[~masks].any()
        assert torch.equal(padded[:2, 1, 0], steps[2:4, 0, 0])
        assert torch.equal(unpad_trajectories(padded, masks), steps)
    unpad_trajectories(padded * 3, masks).sum().backward()
    assert steps.grad is not None
    assert (steps.grad == 3).all()
    with pytest.raises(ShapeError, match=r"dones: expected \(6, 5\)"):
        split_and_pad_trajectories(steps, dones[1:])


# -- distillation -----------------------------------------------------------------------------------------------------


def test_distillation_gets_the_steps_in_the_order_of_time() -> None:
    made = fill(storage("distillation"), some_dones())
    batches = list(made.generator())
    assert len(batches) == T
    for t, batch in enumerate(batches):
        torch.testing.assert_close(batch.observations["policy"], observations(t)["policy"])
        torch.testing.assert_close(batch.privileged_actions, transition(t).privileged_actions)
        torch.testing.assert_close(batch.dones, some_dones()[t].byte()[:, None])
        assert batch.actions is None


# -- returns ----------------------------------------------------------------------------------------------------------


def test_a_time_out_is_valued_by_the_observation_it_ended_on_and_not_by_the_one_before() -> None:
    """Rewards 1; V is 10, 20, 30 along the episode, which is cut off before 40; the next one begins at 10."""
    made = RolloutStorage("rl", 1, 4, observations(0, 1), (ACTIONS,))
    for t, value in enumerate([10.0, 20.0, 30.0, 10.0]):
        step = transition(t, [t == 2], 1)
        step.rewards, step.values = torch.ones(1), torch.full((1, 1), value)
        step.time_outs, step.final_values = step.dones.clone(), torch.tensor([40.0])
        made.add_transition(step)
    made.compute_returns(torch.tensor([[20.0]]), gamma=0.9, lam=0.0, normalize_advantage=False)
    expected = torch.tensor([1 + 0.9 * 20 - 10, 1 + 0.9 * 30 - 20, 1 + 0.9 * 40 - 30, 1 + 0.9 * 20 - 10])
    torch.testing.assert_close(made.advantages.flatten(), expected)
    torch.testing.assert_close(made.returns, made.advantages + made.values)
    assert (made.rewards == 1).all()  # and rewards stay as the env gave them


def test_a_done_that_is_no_time_out_is_worth_nothing_and_a_time_out_without_a_value_is_an_error() -> None:
    made = RolloutStorage("rl", 1, 2, observations(0, 1), (ACTIONS,))
    for t in range(2):
        made.add_transition(transition(t, [t == 0], 1))
    made.compute_returns(torch.zeros(1), 0.9, 1.0, normalize_advantage=False)
    assert made.returns[0].item() == 1
    made.time_outs[0] = True
    with pytest.raises(FieldError, match="final"):
        made.compute_returns(torch.zeros(1), 0.9, 1.0)


def test_a_time_out_that_is_no_done_cuts_nothing_off() -> None:
    """A simulator may go on marking an env whose limit has passed: the episode goes on, and needs no final value."""
    made, plain = (RolloutStorage("rl", 1, 3, observations(0, 1), (ACTIONS,)) for _ in range(2))
    for t in range(3):
        for target in (made, plain):
            step = transition(t, [False], 1)
            if target is made:
                step.time_outs = torch.ones(1, dtype=torch.bool)
            target.add_transition(step)
    for target in (made, plain):
        target.compute_returns(torch.ones(1), 0.9, 0.8)
    assert not made.time_outs.any()
    assert torch.equal(made.returns, plain.returns)


def test_advantages_are_normalised_as_ppo_does_and_unfinished_rollouts_are_refused() -> None:
    made = storage()
    made.add_transition(transition(0))
    with pytest.raises(UnfinishedError, match="1 of 6 steps"):
        made.compute_returns(torch.zeros(N), 0.99, 0.95)
    made.clear()
    fill(made).compute_returns(torch.zeros(N), 0.99, 0.95)
    raw = made.returns - made.values
    torch.testing.assert_close(made.advantages, (raw - raw.mean()) / (raw.std() + 1e-8))


def test_nested_groups_work_which_rsl_rl_takes_and_then_fails_on() -> None:
    nested = TensorDict({"policy": TensorDict({"joint": torch.rand(N, 2)}, [N])}, [N])
    made = RolloutStorage("rl", N, 1, nested, (ACTIONS,))
    step = transition(0)
    step.observations = nested
    made.add_transition(step)
    (batch,) = made.mini_batch_generator(1, 1)
    assert batch.observations["policy", "joint"].shape == (N, 2)


def test_what_is_not_there_is_named_and_no_steps_have_no_trajectories() -> None:
    with pytest.raises(AttributeError, match="a storage for 'rl' has no 'nope'"):
        storage().column("nope")
    padded, masks = split_and_pad_trajectories(torch.zeros(0, 2, 3), torch.zeros(0, 2))
    assert (padded.numel(), masks.numel()) == (0, 0)
