"""The drop-in for AgileRL's rollout buffer, by itself: its surface, and where it is right and AgileRL 2.58 is not."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from relive.compat.agilerl import RolloutBuffer, StepError
from relive.errors import FieldError, ShapeError
from support.agilerl_buffers import BOX, MOVES, STATES, filled, steps

pytestmark = pytest.mark.usefixtures("no_hosts")


def single(reward: Any, done: Any, value: Any, last_value: float, last_done: bool, **options: Any) -> RolloutBuffer:
    """One env, the flags as AgileRL's collector passes them."""
    add = options.pop("add", [{}] * len(reward))
    buffer = RolloutBuffer(len(reward), BOX, MOVES, 1, **options)
    for r, d, v, more in zip(reward, done, value, add, strict=True):
        buffer.add(np.zeros((1, 2)), [0], [r], [d], [v], [0.0], **more)
    buffer.compute_returns_and_advantages(np.array([last_value]), np.array([last_done]))
    return buffer


def column(buffer: RolloutBuffer, name: str) -> list[float]:
    return buffer.buffer[name].flatten().tolist()


# -- the surface ----------------------------------------------------------------------------------------------------


def test_a_new_buffer_has_agilerls_columns_shapes_and_dtypes() -> None:
    buffer = RolloutBuffer(5, BOX, MOVES, 3, recurrent=True, hidden_state_architecture=STATES)
    shapes = {key: (tuple(x.shape), x.dtype) for key, x in buffer.buffer.items(True, True)}
    assert shapes == {
        "observations": ((5, 3, 2), torch.float32),
        "next_observations": ((5, 3, 2), torch.float32),
        "actions": ((5, 3, 1), torch.float32),
        "rewards": ((5, 3), torch.float32),
        "dones": ((5, 3), torch.bool),
        "values": ((5, 3), torch.float32),
        "log_probs": ((5, 3), torch.float32),
        "advantages": ((5, 3), torch.float32),
        "returns": ((5, 3), torch.float32),
        ("hidden_states", "actor.encoder_h"): ((5, 3, 2, 4), torch.float32),
        ("hidden_states", "actor.encoder_c"): ((5, 3, 2, 4), torch.float32),
    }
    assert buffer.buffer.batch_size == (5, 3)
    assert buffer.buffer.device == torch.device("cpu")
    assert (buffer.pos, buffer.full, buffer.size()) == (0, False, 0)
    for name in ("padded_data", "unpadded_data", "unpadded_slices", "num_sequences", "max_sequence_length"):
        assert getattr(buffer, name) is None


@pytest.mark.parametrize(
    ("space", "shape"),
    [(BOX, (2,)), (MOVES, (1,)), (spaces.MultiDiscrete([2, 5]), (2,)), (spaces.MultiBinary((2, 3)), (2, 3))],
)
def test_every_space_that_agilerl_stores_is_stored_in_its_shape(space: Any, shape: tuple[int, ...]) -> None:
    buffer = RolloutBuffer(2, space, space, 2)
    assert buffer.buffer["observations"].shape == (2, 2, *shape)
    assert buffer.buffer["actions"].shape == (2, 2, int(np.prod(shape)))
    obs = np.stack([space.sample(), space.sample()])
    buffer.add(obs, obs, [1, 2], [False, True], [0.5, 0.5], [0, 0], next_obs=obs)
    expected = torch.as_tensor(obs).float().reshape(2, *shape)
    assert torch.equal(buffer.buffer["observations"][0], expected)
    assert torch.equal(buffer.buffer["next_observations"][0], expected)
    assert torch.equal(buffer.buffer["actions"][0], expected.reshape(2, -1))


def test_dict_observations_are_nested() -> None:
    space = spaces.Dict({"a.b": BOX, "id": spaces.Discrete(7)})
    buffer = RolloutBuffer(2, space, MOVES, 2)
    obs = {"id": np.array([3, 5]), "a.b": np.ones((2, 2))}
    buffer.add(obs, [0, 1], [0, 0], [False, False], [0, 0], [0, 0], next_obs=obs)
    for name in ("observations", "next_observations"):
        assert torch.equal(buffer.buffer[name]["id"][0], torch.tensor([[3.0], [5.0]]))
        assert torch.equal(buffer.buffer[name, "a.b"][0], torch.ones(2, 2))
    assert set(buffer.get()["observations"]) == {"a.b", "id"}
    with pytest.raises(AssertionError, match="Expected a dict observation"):
        buffer.add(np.ones((2, 2)), [0, 1], [0, 0], [False, False], [0, 0], [0, 0])
    with pytest.raises(KeyError, match="else"):
        buffer.add(obs | {"else": 1}, [0, 1], [0, 0], [False, False], [0, 0], [0, 0])
    with pytest.raises(KeyError, match="id"):
        buffer.add({"a.b": np.ones((2, 2))}, [0, 1], [0, 0], [False, False], [0, 0], [0, 0])
    assert buffer.size() == 2


def test_constructing_refuses_what_agilerl_refuses() -> None:
    with pytest.raises(ValueError, match="hidden_state_architecture must be provided if recurrent=True"):
        RolloutBuffer(2, BOX, MOVES, recurrent=True)
    with pytest.raises(AssertionError, match="Tuple observation spaces are not supported"):
        RolloutBuffer(2, spaces.Tuple((BOX,)), MOVES)
    with pytest.raises(NotImplementedError, match="observation space is not supported"):
        RolloutBuffer(2, spaces.Text(4), MOVES)
    with pytest.raises(NotImplementedError, match="action space is not supported by AgileRL"):
        RolloutBuffer(2, BOX, spaces.Dict({"a": BOX}))
    with pytest.raises(ValueError, match="autoreset_mode='same_step': expected 'next_step'"):
        RolloutBuffer(2, BOX, MOVES, autoreset_mode="same_step")


def test_add_takes_numbers_lists_arrays_and_tensors_of_any_dtype() -> None:
    buffer = RolloutBuffer(3, BOX, MOVES, 1)
    buffer.add([1, 2], 2, 1, True, 0.5, -1)
    buffer.add(torch.tensor([[1, 2]]), torch.tensor([2]), torch.tensor(1.0), torch.tensor([1]), 0.5, -1)
    leaf = torch.tensor([[1.0, 2.0]], requires_grad=True)
    buffer.add(leaf, np.array([[2]]), np.float64(1), np.array([1.0]), leaf[:, :1].sum() / 2, np.array([[-1]]))
    for name, x in buffer.buffer.items(True, True):
        assert torch.equal(x[0], x[1]), name
        assert torch.equal(x[0], x[2]), name
        assert not x.requires_grad
    assert buffer.buffer["dones"].all()


def test_pos_full_and_size_count_like_agilerls() -> None:
    buffer = RolloutBuffer(3, BOX, MOVES, 2)
    seen = []
    for step in steps(3, 2):
        buffer.add(**step)
        seen.append((buffer.pos, buffer.full, buffer.size()))
    assert seen == [(1, False, 2), (2, False, 4), (3, True, 6)]
    with pytest.raises(ValueError, match=re.escape("Buffer has reached capacity (3 transitions)")):
        buffer.add(**steps(1, 2)[0])
    buffer.reset()
    assert (buffer.pos, buffer.full, buffer.size()) == (0, False, 0)
    wrapping = RolloutBuffer(3, BOX, MOVES, 2, wrap_at_capacity=True)
    positions = []
    for step in steps(7, 2):
        wrapping.add(**step)
        positions.append((wrapping.pos, wrapping.full))
    assert positions == [(1, False), (2, False), (3, True), (1, True), (2, True), (3, True), (1, True)]
    assert wrapping.size() == 6


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"obs": np.zeros((3, 2))}, "obs"),
        ({"obs": np.zeros((2, 3))}, "obs"),
        ({"next_obs": np.zeros((3, 2))}, "next_obs"),
        ({"reward": [0.0]}, "reward"),
        ({"done": [False] * 3}, "done"),
        ({"action": [1, 2, 3]}, "action"),
        ({"action_mask": [[True], [True], [True]]}, "action_mask"),
        ({"hidden_state": {}}, "hidden_state"),
        ({"hidden_state": dict.fromkeys(STATES, torch.zeros(2, 2, 5))}, "hidden_state"),
        ({"hidden_state": dict.fromkeys(STATES, torch.zeros(2, 4))}, "hidden_state"),
        ({"final_value": [0.0]}, "final_value"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_by_name_and_nothing_is_stored(change: dict[str, Any], field: str) -> None:
    buffer = RolloutBuffer(4, BOX, MOVES, 2, recurrent=True, hidden_state_architecture=STATES)
    good, bad = steps(2, 2, recurrent=True)
    buffer.add(**good)
    before = buffer.buffer.clone()
    cause = FieldError if change == {"hidden_state": {}} else ShapeError
    for kind in (RuntimeError, StepError, cause):  # torch raises the first inside AgileRL
        with pytest.raises(kind, match=field):
            buffer.add(**bad | change)
    assert (buffer.pos, buffer.size()) == (1, 2)
    assert bool((buffer.buffer == before).all())


def test_action_masks_and_episode_starts_appear_with_the_first_step_that_has_them() -> None:
    buffer = RolloutBuffer(4, BOX, MOVES, 2)
    outer = buffer.buffer
    assert "episode_starts" not in outer.keys()
    plain, masked, later = steps(3, 2, masks=3)
    mask = masked["action_mask"]
    buffer.add(**{name: x for name, x in plain.items() if name != "action_mask"}, episode_start=[True, False])
    assert "action_masks" not in outer.keys()
    assert outer["episode_starts"].tolist() == [[True, False]] + [[False, False]] * 3
    buffer.add(**masked)
    buffer.add(**{name: x for name, x in later.items() if name != "action_mask"})
    assert buffer.buffer is outer
    assert outer["action_masks"].dtype is torch.bool
    assert outer["action_masks"][0].all()
    assert torch.equal(outer["action_masks"][1], torch.from_numpy(mask))
    assert outer["action_masks"][2].all()
    assert torch.equal(outer["rewards"][0], torch.as_tensor(plain["reward"]).float())  # kept through the growth


def test_the_buffer_is_a_view_that_others_may_write_to() -> None:
    buffer = filled(max_seq_len=4)
    buffer.compute_returns_and_advantages(np.zeros(3), np.zeros(3))
    advantages = buffer.buffer.get("advantages")[:12]  # as PPO normalises them
    buffer.buffer["advantages"][:12] = (advantages - advantages.mean()) / advantages.std()
    part = buffer.buffer[:12]  # as RSNorm does
    part["observations"] = part["observations"] * 2 + 1
    buffer.buffer[:12] = part
    assert torch.equal(buffer.get_tensor_batch()["advantages"], buffer.buffer["advantages"].flatten())
    assert torch.equal(buffer.get_tensor_batch()["observations"], buffer.buffer["observations"].flatten(0, 1))
    buffer.prepare_sequence_tensors()
    assert torch.equal(buffer.unpadded_data["advantages"], buffer.buffer["advantages"].flatten())
    first = buffer.padded_data["observations"][0]
    assert torch.equal(first, buffer.buffer["observations"][0, 0])


def test_a_column_that_is_put_into_the_buffer_in_place_of_another_is_what_is_read_and_added_to() -> None:
    buffer = filled(5, capacity=6, max_seq_len=4)
    buffer.compute_returns_and_advantages(np.zeros(3), np.zeros(3))
    for name in ("returns", "advantages"):
        buffer.buffer[name] = torch.arange(18.0).view(6, 3)
    buffer.buffer["hidden_states", "actor.encoder_c"] = torch.full((6, 3, 2, 4), 7.0)
    assert buffer.get_tensor_batch()["returns"].tolist() == list(range(15))
    buffer.prepare_sequence_tensors()
    assert buffer.unpadded_data["advantages"].tolist() == list(range(15))
    assert bool((buffer.padded_data.get_non_tensor("initial_hidden_states")["actor.encoder_c"] == 7).all())
    buffer.buffer["rewards"] = torch.ones(6, 3)
    assert pickle.loads(pickle.dumps(buffer)).buffer["rewards"].sum() == 18
    buffer.buffer["rewards"] = torch.full((6, 3), 2.0)
    buffer.add(**steps(1, 3, recurrent=True)[0] | {"reward": np.full(3, 9)})
    assert buffer.buffer["rewards"].tolist() == [[2.0] * 3] * 5 + [[9.0] * 3]
    buffer.buffer["actions"] = torch.zeros(6, 3, 5)
    with pytest.raises(StepError, match=r"buffer\['actions'\]: expected \(6, 3, 1\), got \(6, 3, 5\)"):
        buffer.get(2)


def test_get_and_get_tensor_batch_give_all_time_first_or_a_sample_without_replacement() -> None:
    buffer = filled()
    everything, arrays = buffer.get_tensor_batch(), buffer.get()
    assert everything.batch_size == (36,)
    assert everything.device == torch.device("cpu")
    assert set(everything.keys()) == set(buffer.buffer.keys()) == set(arrays)
    for name in everything.keys():
        assert torch.equal(everything[name], buffer.buffer[name].flatten(0, 1))
        np.testing.assert_array_equal(arrays[name], everything[name].numpy())
    rewards = sorted(everything["rewards"].tolist())
    for sample in (buffer.get_tensor_batch(36)["rewards"], buffer.get(36)["rewards"]):
        assert sorted(sample.tolist()) == rewards
        assert sample.tolist() != everything["rewards"].tolist()
    assert len(set(buffer.get_tensor_batch(10)["rewards"].tolist())) == 10
    with pytest.warns(UserWarning, match="Batch size 37 is larger than buffer_size 36. Returning all data"):
        assert len(buffer.get_tensor_batch(37)) == 36
    with pytest.warns(UserWarning, match="Batch size 37 is larger than buffer size 36. Returning all data"):
        assert len(buffer.get(37)["dones"]) == 36


def test_an_empty_buffer_gives_empty_batches() -> None:
    buffer = RolloutBuffer(3, BOX, MOVES)
    assert buffer.get() == {}
    assert buffer.get_tensor_batch().is_empty()
    buffer.compute_returns_and_advantages(np.zeros(1), np.zeros(1))


@pytest.mark.parametrize("wrap", [False, True])
def test_a_pickled_or_copied_buffer_goes_on_as_the_original_does(wrap: bool) -> None:
    played = steps(20, 3, recurrent=True, masks=3)
    buffer = filled(capacity=8, wrap_at_capacity=wrap, max_seq_len=3, steps=played[: 13 if wrap else 5])
    buffer.compute_returns_and_advantages(np.ones(3), np.zeros(3))
    buffer.prepare_sequence_tensors()
    buffer.get_tensor_batch(2)
    for again in (pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer)):
        original = copy.deepcopy(buffer)
        assert bool((again.buffer == original.buffer).all())
        for step in played[13:16]:
            again.add(**step)
            original.add(**step)
        for x in (again, original):
            x.compute_returns_and_advantages(np.ones(3), np.zeros(3))
        assert bool((again.buffer == original.buffer).all())
        assert not bool((again.buffer["rewards"] == buffer.buffer["rewards"]).all())  # apart from what it is a copy of
        assert (again.pos, again.full, again.num_sequences) == (original.pos, original.full, original.num_sequences)
        assert bool((again.get_tensor_batch(7) == original.get_tensor_batch(7)).all())
        orders = [[batch["actions"].tolist() for batch, _ in x.get_minibatch_sequences(4)] for x in (again, original)]
        assert orders[0] == orders[1]


def test_keep_dtypes_stores_pixels_as_bytes_and_actions_as_integers() -> None:
    pixels = spaces.Box(0, 255, (4, 4), np.uint8)
    buffer = RolloutBuffer(2, pixels, MOVES, 2, keep_dtypes=True)
    assert buffer.buffer["observations"].dtype is torch.uint8
    assert buffer.buffer["actions"].dtype is torch.int64
    obs = np.stack([pixels.sample(), pixels.sample()])
    buffer.add(obs, np.array([2**25 + 1, 1]), [0, 0], [False, False], [0, 0], [0, 0])
    assert torch.equal(buffer.get_tensor_batch()["observations"], torch.from_numpy(obs))
    assert buffer.buffer["actions"][0, 0].item() == 2**25 + 1


# -- returns --------------------------------------------------------------------------------------------------------


def test_gae_is_cut_at_the_done_of_the_step_itself() -> None:
    """AgileRL reads the flag of the following row: [0, 0, 1.247, -5, 0]."""
    buffer = single([0, 0, 1, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 5, 0], 0.0, False)
    np.testing.assert_allclose(column(buffer, "advantages"), [0.9405**2, 0.9405, 1, -5, 0], rtol=1e-6)
    np.testing.assert_allclose(column(buffer, "returns"), [0.9405**2, 0.9405, 1, 0, 0], rtol=1e-6, atol=1e-6)


def test_gae_and_monte_carlo_read_done_alike() -> None:
    """In AgileRL the flag of this step cuts the one, that of the next step the other."""
    arguments = [1, 2, 3, 4], [0, 1, 0, 0], [0.0] * 4, 10.0, False
    gae = single(*arguments, gae_lambda=1.0, gamma=0.5)
    monte_carlo = single(*arguments, use_gae=False, gamma=0.5)
    assert column(gae, "returns") == column(monte_carlo, "returns") == [2, 2, 7.5, 9]
    assert column(monte_carlo, "advantages") == [2, 2, 7.5, 9]


def test_the_newest_step_is_valued_as_last_done_says() -> None:
    options: dict[str, Any] = {"gamma": 0.5, "gae_lambda": 1.0}
    assert column(single([1], [0], [0], 10.0, False, **options), "returns") == [6]
    assert column(single([1], [1], [0], 10.0, True, **options), "returns") == [1]
    assert column(single([1], [0], [0], 10.0, True, **options), "returns") == [1]
    # what AgileRL's collector passes when the newest step was truncated
    assert column(single([1], [1], [0], 10.0, False, **options), "returns") == [6]
    assert column(single([1], [1], [0], 10.0, False, use_gae=False, **options), "returns") == [6]


def test_a_truncated_step_is_valued_by_its_final_value_wherever_it_is() -> None:
    """In AgileRL a time limit is a terminal inside a rollout, and is not at its end."""
    add = [{}, {"truncated": [True], "final_value": [8.0]}, {}, {}]
    buffer = single([1, 1, 1, 1], [0, 1, 0, 0], [0] * 4, 4.0, False, add=add, gamma=0.5, gae_lambda=1.0)
    assert column(buffer, "returns") == [3.5, 5, 2.5, 3]
    with pytest.raises(FieldError, match="final_value"):
        single([1, 1], [1, 0], [0] * 2, 0.0, False, add=[{"truncated": [True]}, {}])


@pytest.mark.parametrize("envs", [1, 4])
def test_gae_is_the_oracles_for_random_flags(envs: int) -> None:
    played = steps(40, envs, seed=3)
    rng = np.random.default_rng(4)
    buffer = RolloutBuffer(40, BOX, MOVES, envs)
    for step in played:
        step |= {"truncated": rng.random(envs) < 0.5, "final_value": rng.normal(size=envs)}
        buffer.add(**step)
    last_value, last_done = rng.normal(size=envs), played[-1]["done"] & ~played[-1]["truncated"]
    buffer.compute_returns_and_advantages(last_value, last_done)
    for n in range(envs):
        done = np.array([step["done"][n] for step in played])
        truncated = np.array([step["truncated"][n] for step in played]) & done
        expected = plain_gae(
            [step["reward"][n] for step in played],
            [*(step["value"][n] for step in played), last_value[n]],
            done & ~truncated,
            truncated,
            [step["final_value"][n] for step in played],
        )
        np.testing.assert_allclose(buffer.buffer["advantages"][:, n].numpy(), expected, rtol=1e-4, atol=1e-5)


def plain_gae(reward: Any, value: Any, terminated: Any, truncated: Any, final: Any) -> list[float]:
    advantage, out = 0.0, []
    for t in reversed(range(len(reward))):
        after = 0.0 if terminated[t] else final[t] if truncated[t] else value[t + 1]
        delta = reward[t] + 0.99 * after - value[t]
        advantage = delta + (0.0 if terminated[t] or truncated[t] else 0.99 * 0.95 * advantage)
        out.append(advantage)
    return out[::-1]


def test_after_a_wrap_returns_are_computed_in_the_order_of_time() -> None:
    """AgileRL computes them in the order of the rows: the newest gets what belongs to the oldest."""
    played = steps(19, 2, seed=5)
    wrapped, plain = RolloutBuffer(8, BOX, MOVES, 2, wrap_at_capacity=True), RolloutBuffer(8, BOX, MOVES, 2)
    for step in played:
        wrapped.add(**step)
    for step in played[-8:]:
        plain.add(**step)
    for use_gae in (True, False):
        for buffer in (wrapped, plain):
            buffer.use_gae = use_gae
            buffer.compute_returns_and_advantages(np.ones(2), np.zeros(2))
        rows = [(11 + t) % 8 for t in range(8)]
        for name in ("rewards", "advantages", "returns"):
            assert torch.equal(wrapped.buffer[name][rows], plain.buffer[name])
        assert torch.equal(wrapped.get_tensor_batch()["returns"], plain.get_tensor_batch()["returns"])


def test_next_step_autoreset_leaves_reset_steps_out_and_knows_final_values() -> None:
    """AgileRL stores the step whose action was ignored, and trains on it."""
    buffer = RolloutBuffer(5, BOX, MOVES, 1, gamma=0.5, gae_lambda=1.0, autoreset_mode="next_step", seed=0)
    flags = [(0, 0), (1, 1), (0, 0), (1, 0), (0, 0)]  # done, truncated; the third and the last are resets
    for t, (done, truncated) in enumerate(flags):
        buffer.add(np.full((1, 2), t), [0], [1], [done], [float(t)], [0], truncated=[truncated])
    buffer.compute_returns_and_advantages([7.0], [False])
    assert buffer.size() == 3
    batch = buffer.get_tensor_batch()
    assert batch["observations"][:, 0].tolist() == [0, 1, 3]
    assert batch["returns"].tolist() == [1 + 0.5 * (1 + 0.5 * 2), 1 + 0.5 * 2, 1]  # 2 is V of the reset step's obs
    assert sorted(buffer.get(3)["values"].tolist()) == [0, 1, 3]
    buffer.reset()
    buffer.add(np.full((1, 2), 9), [0], [1], [0], [0], [0])
    assert buffer.size() == 1  # the last step of before was a reset already


def test_the_flag_of_a_reset_step_ends_nothing() -> None:
    buffer = RolloutBuffer(4, BOX, MOVES, 1, autoreset_mode="next_step")
    for t, done in enumerate([1, 1, 0, 0]):  # the second step is a reset
        buffer.add(np.full((1, 2), t), [0], [1], [done], [0], [0])
    assert buffer.get_tensor_batch()["observations"][:, 0].tolist() == [0, 2, 3]


# -- what is not served -----------------------------------------------------------------------------------------------


def test_what_a_step_leaves_out_is_blank_and_not_what_the_last_rollout_had_there() -> None:
    """AgileRL's reset keeps the rows, and optional fields that are left out keep theirs."""
    buffer = filled(3, 2, recurrent=True, steps=steps(3, 2, recurrent=True, masks=3))
    buffer.compute_returns_and_advantages(np.ones(2), np.zeros(2))
    buffer.reset()
    for step in steps(3, 2, seed=1):
        step.pop("next_obs")
        buffer.add(**step)
    batch = buffer.get_tensor_batch()
    assert not batch["next_observations"].any()
    assert batch["action_masks"].all()
    assert not batch["hidden_states", "actor.encoder_h"].any()
    assert not batch["advantages"].any()
    assert not batch["returns"].any()


def test_a_batch_of_everything_is_a_copy() -> None:
    """AgileRL's is a view on the CPU: zeroing the batch zeroes the buffer."""
    buffer = filled()
    before = buffer.buffer.clone()
    buffer.get_tensor_batch().zero_()
    for array in buffer.get().values():
        array[...] = 0
    assert bool((buffer.buffer == before).all())


def test_a_batch_of_everything_has_views_only_if_they_are_asked_for_and_rows_lie_in_the_order_of_time() -> None:
    for options, aliases in (
        ({}, True),
        ({"count": 11, "capacity": 8, "wrap_at_capacity": True}, False),
        ({"autoreset_mode": "next_step"}, False),
    ):
        buffer = filled(**options)
        views, copies = buffer.get_tensor_batch(copy=False), buffer.get_tensor_batch()
        assert bool((views == copies).all())
        assert views.batch_size == copies.batch_size == (buffer.size(),)
        views.zero_()
        assert bool(buffer.buffer["values"].any()) is not aliases


def test_shuffles_and_samples_follow_the_seed_and_no_global_generator() -> None:
    def draws(seed: int) -> list[Any]:
        buffer = RolloutBuffer(
            6, BOX, MOVES, 2, recurrent=True, hidden_state_architecture=STATES, max_seq_len=1, seed=seed
        )
        for step in steps(6, 2, recurrent=True):
            buffer.add(**step)
        buffer.prepare_sequence_tensors()
        epochs = [[part["log_probs"].tolist() for _, part in buffer.get_minibatch_sequences(5)] for _ in range(3)]
        return [buffer.get_tensor_batch(4)["rewards"].tolist(), buffer.get(4)["rewards"].tolist(), *epochs]

    np_state, torch_state = np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    first = draws(1)
    assert first == draws(1)
    assert first != draws(2)
    assert len({str(draw) for draw in first}) == len(first)
    assert np.random.get_state()[1].tolist() == np_state  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_without_a_seed_each_draw_follows_the_generator_that_agilerl_reads_there() -> None:
    made = []
    for _ in range(2):
        buffer = RolloutBuffer(6, BOX, MOVES, 2, recurrent=True, hidden_state_architecture=STATES, max_seq_len=1)
        for step in steps(6, 2, recurrent=True):
            buffer.add(**step)
        buffer.prepare_sequence_tensors()
        made.append(buffer)
    numpys: Any = np.random.mtrand._rand

    def by_torch(buffer: RolloutBuffer) -> list[Any]:
        epochs = [[part["log_probs"].tolist() for _, part in buffer.get_minibatch_sequences(5)] for _ in range(2)]
        return [buffer.get_tensor_batch(4)["rewards"].tolist(), *epochs]

    found = []
    for buffer in (*made, made[0]):
        numpys.seed(42)
        torch.manual_seed(7)
        rewards = buffer.get(4)["rewards"].tolist()
        numpys.seed(43)
        found.append([rewards, *by_torch(buffer)])
        assert by_torch(buffer) != found[0][1:]
        assert buffer.get(4)["rewards"].tolist() != rewards
    assert found[0] == found[1] == found[2]
    numpys.seed(42)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    made[1].get_tensor_batch()  # draws nothing
    assert torch.equal(torch.get_rng_state(), before)
