"""relive.compat.pytorchrl by itself: steps as PyTorchRL's collector passes them, against plain lists of them."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from compat.pytorchrl_play import (
    STEP,
    assert_same,
    check_hindsight,
    check_windows,
    errors_of,
    fed,
    hindsight_truth,
    parts,
    play,
    reached,
    rows,
)
from relive.compat import pytorchrl as ours
from relive.compat.base import mapped
from relive.compat.pytorchrl import ACT, DONE, DONE2, OBS, OBS2, REW, RHS, RHS2
from relive.errors import DTypeError, EmptyError, LifecycleError, NotFiniteError, ShapeError
from support import internals
from support.effort import in_ci
from support.pytorchrl_buffers import made, memory, one_by_one, part, stacked

pytestmark = pytest.mark.usefixtures("no_hosts")

WAYS: dict[str, Callable[[Any], Any]] = {
    "unread": lambda data: data,
    "looked at": lambda data: data if data[REW].size else {},
    "copied": dict,
    "pickled": lambda data: pickle.loads(pickle.dumps(data)),
}
"""How collected steps come back from whoever had them."""


def without_states(data: Any) -> dict[str, Any]:
    return {key: value for key, value in data.items() if value is not None and key not in (RHS, RHS2)}


def round_trip(buffer: Any, way: Callable[[Any], Any] = WAYS["unread"]) -> None:
    """What a learner that collects by itself does with its own buffer in each round."""
    data = way(buffer.get_all_buffer_data())
    buffer.reset()
    buffer.insert_data_slice(data)


def share(buffer: Any, obs: Any) -> float:
    """How much of a large batch is the step with that observation."""
    (batch,) = buffer.generate_batches(1, 1000)
    return (batch[OBS] == obs).all(1).float().mean().item()


# What is stored, and what comes back


def test_it_imports_and_works_without_pytorchrl(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("relive.compat.pytorchrl")]:
        monkeypatch.delitem(sys.modules, name)
    fresh = importlib.import_module("relive.compat.pytorchrl")
    buffer = fed(fresh.PERBuffer.create_factory(10, 3, alpha=0.6)(*parts()), play(5, 2))
    (batch,) = buffer.generate_batches(1, 8)
    assert batch[REW].shape == (8, 1)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("name", ["replay", "nstep", "per"])
def test_steps_are_stored_and_served_as_they_came(name: str, num_envs: int, nested: bool) -> None:
    buffer, steps = made(name, 12), play(31, num_envs, nested=nested)
    for count, step in enumerate(steps, 1):
        buffer.insert_transition(dict(step))
        assert (buffer.size, buffer.step, buffer.max_size) == (min(count, 12), count % 12, 12)
        if count not in (4, 12, 13, 31):
            continue
        expected = memory(steps[:count], 12)
        assert_same(without_states(buffer.data), expected)
        for start, end in ((2, 9), (-7, -2), (5, 5)):
            assert_same(without_states(buffer.get_data_slice(start, end)), part(expected, start, end))
        for key in (OBS, REW, DONE2):
            last = mapped(lambda value, at=count - 1: value[at % 12], expected[key])
            assert_same(buffer.copy_single_tensor(key, buffer.step - 1), last)
        (batch,) = buffer.generate_batches(1, 2000)
        assert set(rows(batch)) == set(rows(one_by_one(steps[max(count - 12, 0) : count])))
        assert {value.dtype for key in (ACT, REW, DONE, DONE2) for value in (batch[key],)} == {torch.float32}
        assert (batch[REW].shape, batch[RHS]["rhs_act"].shape) == ((2000, 1), (1, 5))
        assert not batch[RHS]["rhs_act"].any()


def test_collected_steps_go_into_a_learners_buffer() -> None:
    collector, learner, steps = made("replay", 10), made("replay", 40), play(60, 2)
    learner.init_tensors(steps[0])
    for first in range(0, 60, 6):
        data = fed(collector, steps[first : first + 6]).get_all_buffer_data(data_to_cpu=True)
        collector.reset()
        assert collector.size == collector.step == 0
        learner.insert_data_slice(data)
        assert_same(without_states(learner.data), memory(steps[: first + 6], 40))
    with pytest.raises(AssertionError, match="one number of steps"):
        learner.insert_data_slice({**data, REW: data[REW][1:]})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["replay", "per"])
def test_a_learner_that_collects_by_itself_puts_its_steps_back_where_they_were(name: str, way: str) -> None:
    """One process: what is taken out of the buffer goes into the same buffer again, round after round."""
    steps, buffer = play(80, 2), made(name, 20)
    for first in range(0, 80, 8):
        round_trip(fed(buffer, steps[first : first + 8]), WAYS[way])
        assert_same(without_states(buffer.data), memory(steps[: first + 8], 20))
        assert (buffer.size, buffer.step) == (min(first + 8, 20), (first + 8) % 20)


@pytest.mark.parametrize("way", WAYS)
def test_priorities_outlive_the_round_that_a_learner_takes_its_steps_through(way: str) -> None:
    """Also with ``col_compress_data=True``, which pickles what is collected."""
    steps, buffer = play(30, 2), made("per", 30, 1, 0.1, 1.0, 1.0, 1.0)
    special = steps[7][OBS][1]
    for batch in fed(buffer, steps[:20]).generate_batches(20, 100):
        buffer.after_gradients(batch, {"Algorithm": {"errors": errors_of(batch, special)}})
    for first in (20, 22, 24):
        round_trip(fed(buffer, steps[first : first + 2]), WAYS[way])
        # 100.1 for the special one, 1.1 for each of the others, also for new ones
        assert share(buffer, special) == pytest.approx(100.1 / (100.1 + (2 * (first + 2) - 1) * 1.1), abs=0.08)


@pytest.mark.parametrize("way", WAYS)
def test_priorities_of_sequences_outlive_that_round_too(way: str) -> None:
    buffer = made("per", 64, 1, 0.1, 1.0, 1.0, 1.0, recurrent=True, overlap=0.5)
    steps = play(42, 3)
    fed(buffer, steps[:30])
    for batch in buffer.generate_batches(20, 40):
        errors = np.where(batch["idxs"] == 1, 200.0, 1.0).repeat(buffer.non_overlap_length)
        buffer.after_gradients(batch, {"Algorithm": {"errors": torch.as_tensor(errors).reshape(-1, 1)}})
    round_trip(fed(buffer, steps[30:]), WAYS[way])
    (batch,) = buffer.generate_batches(1, 4000)
    assert (batch["idxs"] == 1).mean() > 0.5


def test_collected_steps_are_those_of_the_call_and_may_be_changed() -> None:
    steps = play(30, 2)
    buffer = fed(made("replay", 20), steps[:25])
    expected = stacked(steps[5:25], OBS)
    data = buffer.get_all_buffer_data()
    fed(buffer, steps[25:])
    np.testing.assert_array_equal(data[OBS], expected)  # not those that came since
    data = buffer.get_all_buffer_data()
    buffer.reset()
    assert (buffer.size, buffer.step) == (0, 0)
    assert not buffer.get_data_slice(0, 20)[OBS].any()
    fed(buffer, steps[:3])
    assert (buffer.size, buffer.step) == (3, 3)
    assert len(data[OBS]) == 20
    buffer.insert_data_slice(data)  # something else came in between, so that these are others
    assert buffer.size == 20
    data = buffer.get_all_buffer_data()
    data[REW][:] = 7.0
    buffer.reset()
    buffer.insert_data_slice(data)
    (batch,) = buffer.generate_batches(1, 50)
    assert (batch[REW] == 7).all()
    buffer.get_all_buffer_data()  # nobody has it any more
    buffer.reset()
    assert buffer.size == 0
    with pytest.raises(EmptyError):
        next(buffer.generate_batches(1, 1))
    assert buffer.size == 0


def test_a_buffer_that_is_copied_between_reset_and_return_keeps_its_steps_and_so_does_the_copy() -> None:
    steps = play(8, 2)
    buffer = fed(made("replay", 20), steps)
    data = buffer.get_all_buffer_data()
    buffer.reset()
    copied = copy.deepcopy(buffer)
    for one in (buffer, copied):
        one.insert_data_slice(data)
        assert_same(without_states(one.get_all_buffer_data()), {key: stacked(steps, key) for key in STEP})


@pytest.mark.parametrize("way", ["copied", "pickled"])
@pytest.mark.parametrize(("name", "recurrent"), [("nstep", False), ("per", False), ("ere", False), ("per", True)])
def test_a_copy_of_a_buffer_goes_on_by_itself(name: str, recurrent: bool, way: str) -> None:
    """Asynchronous training begins with one."""
    options = {"nstep": {}, "per": {"alpha": 0.6}, "ere": {"alpha": 0.6, "eta": 0.99}}[name]
    steps = play(60, 2)
    buffer = fed(made(name, 40, 2, recurrent=recurrent, overlap=0.5, seed=3, **options), steps)
    copied = copy.deepcopy(buffer) if way == "copied" else pickle.loads(pickle.dumps(buffer))
    assert_same(copied.data, buffer.data)
    more = play(20, 2, seed=1)
    (one,), (other,) = (list(fed(b, more).generate_batches(1, 12)) for b in (buffer, copied))
    for key in (OBS, ACT, REW, DONE2):
        assert_same(one[key], other[key])
    if not recurrent:
        copied.n_step = 1
        assert buffer.n_step == 2
        alone = next(copied.generate_batches(1, 100))
        assert alone["n_step"] == 1
        assert np.isin(alone[REW], stacked(steps + more, REW)).all()
    if name == "ere":
        copied.cmin = 10**6  # more than there is
        assert recurrent or next(copied.generate_batches(1, 4))["ck"] == 2 * copied.size
        copied.eta, copied.cmin = 0.5, 1
        assert next(copied.generate_batches(1, 4))["ck"] < next(buffer.generate_batches(1, 4))["ck"]
    if name == "per":
        batch = next(copied.generate_batches(1, 12))
        index = batch["idxs"]
        shape = len(index), (copied.non_overlap_length if recurrent else 1)
        copied.after_gradients(batch, {"Algorithm": {"errors": torch.full(shape, 1e9)}})
        assert np.isin(next(copied.generate_batches(1, 400))["idxs"], index).mean() > 0.7
        assert np.isin(next(buffer.generate_batches(1, 400))["idxs"], index).mean() < 0.6
    copied.update_storage_parameter("max_size", 8)
    assert (copied.size, buffer.size > 16) == (16 if recurrent else 8, True)


@pytest.mark.parametrize("recurrent", [False, True])
def test_discrete_actions_come_back_from_slices_as_they_were(recurrent: bool) -> None:
    """Slices are float32, whatever is stored."""
    buffers = [made("replay", 32, recurrent=recurrent) for _ in range(2)]
    steps = [{**step, ACT: torch.randint(5, (2, 1))} for step in play(16, 2)]
    for buffer in buffers:
        fed(buffer, steps)
    data = buffers[0].get_all_buffer_data()
    buffers[1].insert_data_slice(data)
    np.testing.assert_array_equal(buffers[1].get_all_buffer_data()[ACT], np.concatenate([data[ACT], data[ACT]]))
    with pytest.raises(DTypeError, match="'action'"):
        buffers[1].insert_data_slice({**data, ACT: data[ACT] + 0.5})
    assert buffers[1].size == 32


@pytest.mark.parametrize("recurrent", [False, True])
def test_actions_that_began_as_integers_may_come_as_whole_floats_and_as_no_others(recurrent: bool) -> None:
    buffer = made("replay", 32, recurrent=recurrent)
    steps = [{**step, ACT: torch.full((2, 1), t)} for t, step in enumerate(play(8, 2))]
    fed(buffer, [steps[0], *({**step, ACT: step[ACT].float()} for step in steps[1:])])
    np.testing.assert_array_equal(buffer.get_all_buffer_data()[ACT][:, 0, 0], np.arange(8))
    with pytest.raises(DTypeError, match="'action'"):
        buffer.insert_transition({**steps[0], ACT: torch.full((2, 1), 0.5)})
    assert buffer.size == 8


@pytest.mark.parametrize("key", [REW, DONE2])
def test_a_dictionary_of_rewards_is_refused_by_name(key: str) -> None:
    (step,) = play(1, 2)
    for cls in (ours.ReplayBuffer, ours.NStepReplayBuffer):
        buffer = cls.create_factory(10)(*parts())
        with pytest.raises(ShapeError, match=f"'{key}'.*dictionary of extrinsic, curiosity"):
            buffer.insert_transition({**step, key: {"extrinsic": step[REW], "curiosity": step[REW]}})
        assert buffer.size == 0


def test_every_flag_but_0_is_an_end() -> None:
    (step,) = play(1, 2)
    buffer = fed(made("replay", 10), [{**step, DONE2: torch.tensor([[0.5], [0.0]])}])
    np.testing.assert_array_equal(buffer.get_all_buffer_data()[DONE2][0, :, 0], [1.0, 0.0])


@pytest.mark.parametrize("recurrent", [False, True])
def test_the_default_seed_is_drawn_from_torchs_default_generator_when_the_buffer_is_made(recurrent: bool) -> None:
    steps, found = play(20, 2), []
    for seed in (42, 42, 43):
        torch.manual_seed(seed)
        buffer = made("per", 40, alpha=0.6, recurrent=recurrent, seed=None)
        torch.manual_seed(7)  # what is drawn later does not count
        found.append(next(fed(buffer, steps).generate_batches(1, 64))[OBS])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


# Windows of several steps


@pytest.mark.parametrize("n", [2, 3, 7])
def test_n_step_windows_end_with_their_episode_and_none_is_lost(n: int) -> None:
    steps, buffer = play(40, 2), made("nstep", 60, n)
    (batch,) = fed(buffer, steps).generate_batches(1, 3000)
    check_windows(batch, [steps], n)
    for cls in (ours.NStepReplayBuffer, ours.PERBuffer):
        given = parts()
        cls.create_factory(10, 3)(*given)
        assert (internals.update_every(given[2]), given[2].update_every) == (4, 4)


@pytest.mark.parametrize("together", [False, True])
def test_no_window_crosses_from_one_collector_into_another(together: bool) -> None:
    """Also where one slice has the steps of both."""
    plays = [play(12, 2, seed=seed, end=0.1) for seed in (0, 1)]
    learner, slices = made("nstep", 60, 3), []
    for low, high in ((0, 5), (5, 12)):
        for steps in plays:
            collector = fed(made("nstep", 20, 3), steps[low:high])
            slices.append(dict(collector.get_all_buffer_data()))
    if together:
        slices = [{key: joined(slices, key) for key in STEP}]
    for data in slices:
        learner.insert_data_slice(data)
    (batch,) = learner.generate_batches(1, 3000)
    check_windows(batch, [steps[low:high] for low, high in ((0, 5), (5, 12)) for steps in plays], 3)


def joined(slices: list[dict[str, Any]], key: str) -> Any:
    return np.concatenate([data[key] for data in slices])


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("sliced", [False, True])
def test_windows_cross_no_earlier_insert_where_n_step_is_raised_later(sliced: bool, nested: bool) -> None:
    plays = [play(7, 2, seed=seed, end=0.1, nested=nested) for seed in range(5)]
    buffer = made("per", 30, 1, alpha=0.6, default_error=1.0)
    for steps in plays[:-1]:
        if sliced:
            buffer.insert_data_slice({key: stacked(steps, key) for key in STEP})
        else:
            fed(buffer, steps)
    (batch,) = buffer.generate_batches(1, 64)
    buffer.after_gradients(batch, {"Algorithm": {"errors": 0.5 + torch.rand(64, 1)}})
    kept = buffer.__dict__["_rows"].replay.sampler.priorities()
    buffer.update_storage_parameter("n_step", 3)
    np.testing.assert_array_equal(buffer.__dict__["_rows"].replay.sampler.priorities(), kept)
    (batch,) = fed(buffer, plays[-1]).generate_batches(1, 4000)
    plays[0] = plays[0][5:]  # 35 steps, and room for 30
    if nested:
        plays = [[{**step, OBS: step[OBS]["a"], OBS2: step[OBS2]["a"]} for step in steps] for steps in plays]
        batch = {**batch, OBS: batch[OBS]["a"], OBS2: batch[OBS2]["a"]}
    check_windows(batch, plays, 3)


# Parameters


@pytest.mark.parametrize(("name", "n"), [("replay", ()), ("nstep", (3,)), ("per", (1,))])
def test_a_collector_whose_memory_shrinks_hands_over_the_steps_of_its_own_round(name: str, n: tuple[int, ...]) -> None:
    """Asynchronous training: the learner has a copy of the buffer, the collector keeps room for two rounds."""
    steps, collector = play(60, 2), made(name, 40, *n)
    learner = copy.deepcopy(fed(collector, steps[:20]))
    collector.update_storage_parameter("max_size", 8)
    for first in range(20, 60, 4):
        data = fed(collector, steps[first : first + 4]).get_all_buffer_data()
        low = first if first > 20 else 16  # at first what was there already is there still
        assert_same({key: data[key] for key in STEP}, {key: stacked(steps[low : first + 4], key) for key in STEP})
        collector.reset()
        learner.insert_data_slice(data)
    assert_same(learner.get_all_buffer_data()[OBS], stacked(steps[20:], OBS))


def test_so_does_one_of_sequences() -> None:
    steps, collector = play(60, 2), made("replay", 40, recurrent=True)
    fed(collector, steps[:20]).update_storage_parameter("max_size", 4)
    for first in range(20, 60, 4):
        data = fed(collector, steps[first : first + 4]).get_all_buffer_data()
        low = first if first > 20 else 16
        assert_same({key: data[key] for key in STEP}, {key: stacked(steps[low : first + 4], key) for key in STEP})
        assert_same(mapped(lambda x: x[::4], data[RHS]), stacked(steps[low : first + 4 : 4], RHS))
        collector.reset()


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize(("old", "new"), [(12, 8), (12, 20), (28, 4), (28, 12)])
def test_any_change_of_size_keeps_the_newest_steps_in_their_order(recurrent: bool, old: int, new: int) -> None:
    for count in (8, 28, 44):
        steps, buffer = play(count + 8, 2), made("per", old, alpha=0.6, recurrent=recurrent)
        fed(buffer, steps[:count]).update_storage_parameter("max_size", new)
        room = 2 * new if recurrent else new
        kept = min(count, 2 * old if recurrent else old, room)
        assert (buffer.max_size, buffer.size, buffer.step) == (room, kept, kept % room)
        assert_same(buffer.get_all_buffer_data()[OBS], stacked(steps[count - kept : count], OBS))
        assert_same(buffer.data[OBS], memory(steps[count - kept : count], room)[OBS])
        fed(buffer, steps[count:])
        assert_same(buffer.data[OBS], memory(steps[count - kept :], room)[OBS])
        assert_same(buffer.get_data_slice(3, 7)[OBS], buffer.data[OBS][3:7])


def test_parameters_can_be_changed() -> None:
    buffer = fed(made("per", 30, 1, 0.0, 0.5), play(30, 2))
    for name, value in (("beta", 0.5), ("n_step", 3), ("epsilon", 0.2), ("error", 9.0), ("unknown", 1)):
        buffer.update_storage_parameter(name, value)
    assert (buffer.beta, buffer.n_step, hasattr(buffer, "unknown")) == (0.5, 3, False)
    assert (buffer.epsilon, buffer.error) == (0.2, 9.0)


def test_changed_parameters_of_priorities_take_effect() -> None:
    buffer = fed(made("per", 30, 1, 0.0, 0.5), play(10, 2))
    buffer.update_storage_parameter("epsilon", 0.2)
    buffer.update_storage_parameter("error", 9.0)
    sampler = buffer.__dict__["_rows"].replay.sampler
    np.testing.assert_allclose(sampler.priorities(), (1e6 + 0.2) ** 0.5)
    fed(buffer, play(1, 2, seed=1))
    assert sampler.priorities().min() == pytest.approx(9.2**0.5)


# Priorities and recent experience


def test_shares_and_weights_are_those_of_the_priorities() -> None:
    steps, buffer = play(50, 2), made("per", 50, 1, 0.1, 0.7, 0.4, 1.0)
    special = steps[7][OBS][1]
    for batch in fed(buffer, steps).generate_batches(4, 500):  # until each has been drawn
        buffer.after_gradients(batch, {"Algorithm": {"errors": errors_of(batch, special)}})
    (batch,) = buffer.generate_batches(1, 4000)
    chosen = (batch[OBS] == special).all(1)
    high, low = 100.1**0.7, 1.1**0.7
    assert chosen.float().mean().item() == pytest.approx(high / (high + 99 * low), abs=0.03)
    np.testing.assert_allclose(batch["per_weights"][~chosen], 1.0, rtol=1e-5)
    np.testing.assert_allclose(batch["per_weights"][chosen], (high / low) ** -0.4, rtol=1e-5)
    (batch,) = made_uniform(steps).generate_batches(1, 10)
    assert batch["per_weights"] == 1.0


def made_uniform(steps: list[dict[str, Any]]) -> Any:
    return fed(made("per", 50), steps)


def test_new_steps_in_the_place_of_old_ones_do_not_inherit_their_priority() -> None:
    steps, buffer = play(60, 1), made("per", 20, 1, 0.1, 1.0, 1.0, 1.0)
    for batch in fed(buffer, steps[:20]).generate_batches(10, 100):
        buffer.after_gradients(batch, {"Algorithm": {"errors": errors_of(batch, steps[3][OBS][0], 1000.0)}})
    assert share(buffer, steps[3][OBS][0]) > 0.8
    assert share(fed(buffer, steps[20:40]), steps[23][OBS][0]) < 0.15


@pytest.mark.parametrize("overlap", [0.0, 0.5])
def test_priorities_of_sequences_are_updated_with_several_envs(overlap: float) -> None:
    buffer = made("per", 64, 1, 0.1, 1.0, 1.0, 1.0, recurrent=True, overlap=overlap)
    fed(buffer, play(40, 3))
    for batch in buffer.generate_batches(10, 40):
        count, each = len(batch["idxs"]), buffer.non_overlap_length
        errors = np.where(batch["idxs"] == 1, 200.0, 1.0).repeat(each)
        assert batch["per_weights"].shape == (count * 4, 1)
        buffer.after_gradients(batch, {"Algorithm": {"errors": torch.as_tensor(errors).reshape(-1, 1)}})
    (batch,) = buffer.generate_batches(1, 4000)
    assert (batch["idxs"] == 1).mean() > 0.5


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_a_sequences_priority_mixes_the_priorities_of_its_steps(epsilon: float) -> None:
    buffer = fed(made("per", 16, 1, epsilon, 0.6, recurrent=True), play(16, 2))
    (batch,) = buffer.generate_batches(1, 4)
    errors = torch.tensor([[0.0], [16.0], [1.0], [-3.0]])
    buffer.after_gradients(batch, {"Algorithm": {"errors": errors}})
    steps = (errors.abs().numpy() + epsilon) ** 0.6
    sampler = buffer.__dict__["_rows"].replay.sampler
    assert sampler.priorities().min() == pytest.approx(0.9 * steps.max() + 0.1 * steps.mean(), rel=1e-5)


@pytest.mark.parametrize("recurrent", [False, True])
def test_errors_that_do_not_fit_the_batch_or_are_not_finite_change_nothing(recurrent: bool) -> None:
    buffer = fed(made("per", 20, alpha=0.6, recurrent=recurrent), play(20, 2))
    (batch,) = buffer.generate_batches(1, 8)
    sampler = buffer.__dict__["_rows"].replay.sampler
    before = sampler.priorities().copy()
    with pytest.raises(NotFiniteError):
        buffer.after_gradients(dict(batch), {"Algorithm": {"errors": torch.full((8, 1), torch.nan)}})
    if not recurrent:
        with pytest.raises(ShapeError):
            buffer.after_gradients(dict(batch), {"Algorithm": {"errors": torch.ones(8, 2)}})
    with pytest.raises(AssertionError, match="errors missing"):
        buffer.after_gradients(dict(batch), {"Algorithm": {}})
    np.testing.assert_array_equal(sampler.priorities(), before)


def newest_times(buffer: Any, steps: list[dict[str, Any]]) -> dict[int, set[int]]:
    """Which steps of which env the last of five batches is drawn from."""
    at = {steps[t][OBS][env].numpy().tobytes(): (env, t) for env in range(3) for t in range(len(steps))}
    found: dict[int, set[int]] = {env: set() for env in range(3)}
    *_, last = buffer.generate_batches(5, 400)
    for row in last[OBS]:
        env, t = at[row.numpy().tobytes()]
        found[env].add(t)
    return found


@pytest.mark.parametrize("alpha", [0.0, 0.6])
@pytest.mark.parametrize("changes", [(), (20,), (60,), (20, 40)])
def test_recent_is_in_the_order_of_time_after_a_round_and_any_change_of_size(
    changes: tuple[int, ...], alpha: float
) -> None:
    steps, buffer = play(50, 3), made("ere", 40, alpha=alpha, eta=0.9, cmin=12)
    fed(buffer, steps[:45])
    for size in changes:
        buffer.update_storage_parameter("max_size", size)
    assert newest_times(buffer, steps) == {env: set(range(41, 45)) for env in range(3)}
    fed(buffer, steps[45:])
    assert newest_times(buffer, steps) == {env: set(range(46, 50)) for env in range(3)}
    assert [batch["ck"] for batch in buffer.generate_batches(5, 8)][-3:] == [12, 12, 12]


def test_recent_sequences_are_so_too() -> None:
    steps, buffer = play(40, 3), made("ere", 40, eta=0.9, cmin=12, recurrent=True)
    fed(buffer, steps).update_storage_parameter("max_size", 12)
    assert newest_times(buffer, steps) == {env: set(range(36, 40)) for env in range(3)}


def test_eta_follows_the_returns() -> None:
    buffer = made("ere", 40, eta=0.99, cmin=10)
    info: dict[str, Any] = {}
    for k in range(19):
        info = buffer.update_eta({"Episodes": {"TrainReward": float(k)}, "Algorithm": {}})
    assert (info["Algorithm"], buffer.eta) == ({}, 0.99)
    info = buffer.update_eta({"Episodes": {"TrainReward": 19.0}, "Algorithm": {}})
    assert info["Algorithm"] == {"RewardGradient": 1.0, "eta": pytest.approx(0.99)}
    for k in range(25):
        info = buffer.update_eta({"Episodes": {"TrainReward": 18.0 - k}, "Algorithm": {}})
    assert buffer.eta == pytest.approx(1.0)
    flat = made("ere", 40, eta=0.99, cmin=10)
    for _ in range(25):
        info = flat.update_eta({"Episodes": {"TrainReward": 3.0}, "Algorithm": {}})
    assert info["Algorithm"] == {"RewardGradient": 0.0, "eta": pytest.approx(0.995)}  # halfway


# Hindsight


@pytest.mark.parametrize(("n", "sliced"), [(1, 5), (3, 0), in_ci(1, 0), in_ci(3, 5)])
def test_hindsight_takes_episodes_of_any_length_in_any_number_of_envs(n: int, sliced: int) -> None:
    buffer, steps = made("HERBuffer", 200, reached, n), play(60, 3)
    if sliced:
        collector = made("HERBuffer", 20, reached, n)
        for low in range(0, 60, sliced):
            fed(collector, steps[low : low + sliced])
            buffer.insert_data_slice(collector.get_all_buffer_data())
            collector.reset()
    else:
        fed(buffer, steps)
    assert buffer.size == 60
    stored = len(buffer.__dict__["_rows"].replay)
    for way in WAYS.values():  # as a learner that collects by itself does; no copy is made twice
        round_trip(buffer, way)
        assert (buffer.size, len(buffer.__dict__["_rows"].replay)) == (60, stored)
    check_hindsight(buffer, hindsight_truth(steps, n))


@pytest.mark.parametrize("n", [1, 3])
def test_hindsight_takes_no_step_of_one_collector_for_the_episode_of_another(n: int) -> None:
    plays = [play(30, 2, seed=seed, end=0.1) for seed in (0, 1)]
    buffer, want = made("HERBuffer", 400, reached, n), {}
    for low in range(0, 30, 6):
        for steps in plays:
            seen = steps[low : low + 6]
            collector = fed(made("replay", 20), seen)
            buffer.insert_data_slice(dict(collector.get_all_buffer_data()))
            want |= hindsight_truth(seen, n)
    check_hindsight(buffer, want)


@pytest.mark.parametrize("way", ["copied", "pickled"])
def test_a_copied_hindsight_buffer_relabels_through_its_own_function(way: str) -> None:
    steps, buffer = play(30, 2), made("HERBuffer", 200, reached)
    copied = copy.deepcopy(buffer) if way == "copied" else pickle.loads(pickle.dumps(buffer))
    copied.her_function = other_rewards
    for one in (buffer, copied):
        fed(one, steps)
    check_hindsight(buffer, hindsight_truth(steps, 1))
    (batch,) = copied.generate_batches(1, 4000)
    relabelled = batch[REW] == -7.0
    assert 0.2 < relabelled.float().mean() < 0.5
    del buffer  # nothing of the copy is in it
    fed(copied, play(10, 2, seed=1))


def other_rewards(obs: Any, rhs: Any, obs2: Any, rhs2: Any, rew: Any, initial_state: Any, final_state: Any) -> Any:
    return obs, rhs, obs2, rhs2, np.full_like(rew, -7.0)


def test_hindsight_for_recurrent_actors_is_refused() -> None:
    with pytest.raises(LifecycleError, match=r"recurrent.*EREBuffer"):
        made("HERBuffer", 40, reached, recurrent=True)


@pytest.mark.parametrize(("name", "recurrent"), [("replay", False), ("replay", True), ("per", False)])
def test_a_position_is_read_without_reading_all_steps(
    name: str, recurrent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = fed(made(name, 16, recurrent=recurrent), play(24, 2))
    whole, read, most = buffer.data, ours.KeyedRows.read, list[int]()

    def counted(self: Any, keys: Any = None, low: int = 0, high: int | None = None) -> Any:
        most.append((self.size if high is None else high) - low)
        return read(self, keys, low, high)

    monkeypatch.setattr(ours.KeyedRows, "read", counted)
    for at in range(16):
        for key in (OBS, REW, DONE2):
            assert_same(buffer.copy_single_tensor(key, at), mapped(lambda value, at=at: value[at], whole[key]))
    assert max(most) == 1
    assert_same(without_states(buffer.get_data_slice(3, 7)), part(without_states(whole), 3, 7))
