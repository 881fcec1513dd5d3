"""relive.compat.pytorchrl beside the real classes: fed the same random steps, everything is compared."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from peers.pytorchrl_host import host
from relive.compat import pytorchrl as ours
from relive.compat.pytorchrl.keys import ACT, DONE, DONE2, OBS, OBS2, REW, RHS, RHS2
from relive.errors import DTypeError, LifecycleError

NAMES = {"replay": "ReplayBuffer", "nstep": "NStepReplayBuffer", "per": "PERBuffer", "ere": "EREBuffer"}
GAMMA = 0.9


def parts(recurrent: bool = False, overlap: float = 0.0, length: int = 4) -> tuple[Any, ...]:
    algorithm = SimpleNamespace(gamma=GAMMA, update_every=length, _update_every=length)
    return "cpu", SimpleNamespace(is_recurrent=recurrent, sequence_overlap=overlap), algorithm, None


def pair(name: str, size: int, *args: Any, recurrent: bool = False, overlap: float = 0.0, **options: Any) -> Any:
    given = parts(recurrent, overlap)
    mine = getattr(ours, NAMES[name]).create_factory(size, *args, **options, seed=0)(*given)
    return mine, host(name).create_factory(size, *args, **options)(*given)


def play(steps: int, num_envs: int, seed: int = 0, nested: bool = False, end: float = 0.2) -> list[dict[str, Any]]:
    """Transitions as the collector passes them: the env resets itself, and ``Done`` is the flag of the step before."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Any:
        return torch.randn(num_envs, *shape, generator=generator)

    def observed() -> Any:
        return {"a": drawn(3), "b": drawn(2, 2)} if nested else drawn(3)

    obs, state, done, found = observed(), drawn(5), torch.ones(num_envs, 1), []
    for _ in range(steps):
        obs2, state2 = observed(), drawn(5)
        done2 = (torch.rand(num_envs, 1, generator=generator) < end).float()
        found.append(
            {
                OBS: obs, RHS: {"rhs_act": state}, DONE: done, ACT: drawn(2), REW: drawn(1), OBS2: obs2,
                RHS2: {"rhs_act": state2}, DONE2: done2, "EnvironmentInformation": [],
            }
        )  # fmt: skip
        obs, state, done = obs2, state2, done2
    return found


def fed(buffer: Any, steps: list[dict[str, Any]]) -> Any:
    for step in steps:
        buffer.insert_transition(dict(step))
    return buffer


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(other, dict):
        assert set(one) == set(other)
        for key in other:
            same(one[key], other[key])
    elif other is not None:
        assert (one.dtype, tuple(one.shape)) == (other.dtype, tuple(other.shape))
        np.testing.assert_array_equal(one, other)


def kinds(batch: dict[str, Any]) -> Any:
    def kind(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: kind(member) for key, member in value.items()}
        return (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else value

    return {key: kind(value) for key, value in batch.items() if key not in ("idxs", "priority")}


def rows(batch: dict[str, Any], per: int = 1) -> list[bytes]:
    """Each row of a batch, or each ``per`` of them, as bytes."""
    leaves: list[Any] = []
    for key in (OBS, DONE, ACT, REW, OBS2, DONE2):
        leaves += list(batch[key].values()) if isinstance(batch[key], dict) else [batch[key]]
    arrays = [leaf.reshape(len(leaf) // per, -1).numpy() for leaf in leaves]
    return [b"|".join(array[i].tobytes() for array in arrays) for i in range(len(arrays[0]))]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("name", ["replay", "nstep", "per"])
def test_steps_are_stored_and_served_the_same(name: str, num_envs: int, nested: bool) -> None:
    mine, its = pair(name, 12)
    for count, step in enumerate(play(31, num_envs, nested=nested)):
        mine.insert_transition(dict(step))
        its.insert_transition(dict(step))
        assert (mine.size, mine.step, mine.max_size) == (its.size, its.step, its.max_size)
        if count in (3, 11, 12, 30):
            its_data = {key: value for key, value in its.data.items() if key != "priority"}
            same(mine.data, its_data)
            start = 2 if count == 3 else 5
            its_slice = {key: value for key, value in its.get_data_slice(start, 9).items() if key != "priority"}
            same(mine.get_data_slice(start, 9), its_slice)
            negative = {key: value for key, value in its.get_data_slice(-7, -2).items() if key not in ("priority", RHS)}
            same({key: mine.get_data_slice(-7, -2)[key] for key in negative}, negative)
            for key in (OBS, REW, DONE2, RHS):
                same(mine.copy_single_tensor(key, its.step - 1), host("her").copy_single_tensor(its, key, its.step - 1))
            its.before_gradients()
            mine.before_gradients()
            (a,), (b,) = (list(buffer.generate_batches(1, 2000)) for buffer in (mine, its))
            assert kinds(a) == kinds(b)
            same(a[RHS], b[RHS])
            assert set(rows(a)) == set(rows(b))


def test_collected_steps_go_into_a_learners_buffer_alike() -> None:
    collectors, learners = pair("replay", 10), pair("replay", 40)
    for first in range(0, 60, 6):
        for collector, learner in zip(collectors, learners, strict=True):
            fed(collector, play(60, 2)[first : first + 6])
            if first == 0:
                learner.init_tensors(play(1, 2)[0])
            data = collector.get_all_buffer_data(data_to_cpu=True)
            collector.reset()
            learner.insert_data_slice(data)
        same(*(learner.get_data_slice(0, 40) for learner in learners))
        assert len({(b.size, b.step) for b in collectors}) == len({(b.size, b.step) for b in learners}) == 1
    for learner in learners:
        with pytest.raises(AssertionError):
            learner.insert_data_slice({**data, REW: data[REW][1:]})


@pytest.mark.parametrize("name", ["replay", "per"])
def test_a_learner_that_collects_by_itself_puts_its_steps_back_where_they_were(name: str) -> None:
    """One process: what is taken out of the buffer goes into the same buffer again, round after round."""
    steps, buffers = play(80, 2), pair(name, 20, **({"alpha": 0.6, "default_error": 1.0} if name == "per" else {}))
    for first in range(0, 80, 8):
        for buffer in buffers:
            fed(buffer, steps[first : first + 8])
            data = buffer.get_all_buffer_data()
            buffer.reset()
            buffer.insert_data_slice(data)
            buffer.before_gradients()
        mine, its = buffers
        assert (mine.size, mine.step) == (its.size, its.step)
        its_slice = {key: value for key, value in its.get_data_slice(0, 20).items() if key != "priority"}
        same(mine.get_data_slice(0, 20), its_slice)


def test_priorities_outlive_the_round_that_a_learner_takes_its_steps_through() -> None:
    steps, shares = play(30, 2), []
    for buffer in pair("per", 30, 1, 0.1, 1.0, 1.0, 1.0):
        fed(buffer, steps[:20]).before_gradients()
        for batch in buffer.generate_batches(20, 100):
            buffer.after_gradients(batch, {"Algorithm": {"errors": errors_of(batch, steps[7][OBS][1])}})
        fed(buffer, steps[20:22])
        data = buffer.get_all_buffer_data()
        buffer.reset()
        buffer.insert_data_slice(data)
        (batch,) = buffer.generate_batches(1, 1000)
        shares.append((batch[OBS] == steps[7][OBS][1]).all(1).float().mean().item())
    assert shares[0] == pytest.approx(shares[1], abs=0.1)
    assert shares[0] > 0.5


def test_collected_steps_are_those_of_the_call_and_may_be_changed() -> None:
    steps = play(30, 2)
    mine, _ = pair("replay", 20)
    fed(mine, steps[:25])
    expected = torch.stack([step[OBS] for step in steps[5:25]]).numpy()
    data = mine.get_all_buffer_data()
    fed(mine, steps[25:])
    np.testing.assert_array_equal(data[OBS], expected)  # not those that came since
    data = mine.get_all_buffer_data()
    mine.reset()
    assert (mine.size, mine.step) == (0, 0)
    assert not mine.get_data_slice(0, 20)[OBS].any()
    fed(mine, steps[:3])
    assert (mine.size, mine.step) == (3, 3)
    assert len(data[OBS]) == 20
    mine.insert_data_slice(data)  # it looked at them, so that these are others
    assert mine.size == 20
    data = mine.get_all_buffer_data()
    data[REW][:] = 7.0
    mine.reset()
    mine.insert_data_slice(data)
    (batch,) = mine.generate_batches(1, 50)
    assert (batch[REW] == 7).all()
    mine.get_all_buffer_data()  # nobody has it any more
    mine.reset()
    assert mine.size == 0


@pytest.mark.parametrize("way", ["copied", "pickled"])
@pytest.mark.parametrize(("name", "recurrent"), [("nstep", False), ("per", False), ("ere", False), ("per", True)])
def test_a_copy_of_a_buffer_goes_on_by_itself(name: str, recurrent: bool, way: str) -> None:
    """Asynchronous training begins with one."""
    options = {"nstep": {}, "per": {"alpha": 0.6}, "ere": {"alpha": 0.6, "eta": 0.99}}[name]
    buffer = getattr(ours, NAMES[name]).create_factory(40, 2, seed=3, **options)(*parts(recurrent, 0.5))
    fed(buffer, play(30, 2))
    copied = copy.deepcopy(buffer) if way == "copied" else pickle.loads(pickle.dumps(buffer))
    more = play(20, 2, seed=1)
    (one,), (other,) = (list(fed(b, more).generate_batches(1, 12)) for b in (buffer, copied))
    for key in (OBS, ACT, REW, DONE2):
        same(one[key], other[key])
    copied.n_step = 1
    assert buffer.n_step == 2
    if not recurrent:
        assert next(copied.generate_batches(1, 12))["n_step"] == 1
    if name == "ere":
        copied.eta = 0.5
        copied.cmin = 1
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
    buffers = [ours.ReplayBuffer.create_factory(32)(*parts(recurrent)) for _ in range(2)]
    steps = [{**step, ACT: torch.randint(5, (2, 1))} for step in play(16, 2)]
    for buffer in buffers:
        fed(buffer, steps)
    data = buffers[0].get_all_buffer_data()
    buffers[1].insert_data_slice(data)
    np.testing.assert_array_equal(buffers[1].get_all_buffer_data()[ACT], np.concatenate([data[ACT], data[ACT]]))
    with pytest.raises(DTypeError, match="'action'"):
        buffers[1].insert_data_slice({**data, ACT: data[ACT] + 0.5})
    assert buffers[1].size == 32


@pytest.mark.parametrize("overlap", [0.0, 0.5])
def test_sequences_are_stored_and_served_the_same(overlap: float) -> None:
    mine, its = pair("replay", 16, recurrent=True, overlap=overlap)
    steps = play(14 if overlap else 16, 2)  # both hold whole sequences then
    fed(mine, steps)
    fed(its, steps)
    assert (mine.size, mine.max_size) == (its.size, its.max_size) == ((24 if overlap else 16), 32)
    for key in (OBS, DONE, ACT, REW, OBS2, DONE2):
        same(mine.get_all_buffer_data()[key], its.get_all_buffer_data()[key])
    same(mine.get_all_buffer_data()[RHS]["rhs_act"][::4], its.get_all_buffer_data()[RHS]["rhs_act"][::4])
    (a,), (b,) = (list(buffer.generate_batches(1, size)) for buffer, size in ((mine, 400), (its, 396)))
    assert kinds(a) == kinds(b)
    assert set(rows(a, per=4)) == set(rows(b, per=4))
    starts = {
        row.numpy().tobytes(): state.numpy().tobytes()
        for row, state in zip(b[OBS][::4], b[RHS]["rhs_act"], strict=True)
    }
    assert {
        row.numpy().tobytes(): s.numpy().tobytes() for row, s in zip(a[OBS][::4], a[RHS]["rhs_act"], strict=True)
    } == starts


@pytest.mark.parametrize(("overlap", "counts"), [(0.0, (8, 12, 12, 16)), (0.5, (8, 6))])
def test_slices_of_sequences_are_the_same(overlap: float, counts: tuple[int, ...]) -> None:
    """Also once the memory has come round, though there the host begins a sequence without overlap."""
    mine, its = pair("replay", 16, recurrent=True, overlap=overlap)
    for count in counts:
        for buffer in (mine, its):
            fed(buffer, play(count, 2, seed=count))
        assert (mine.size, mine.step) == (its.size, its.step)
        for start, end in ((0, 32), (2, 11), (4, 5), (-9, -1), (7, 7), (30, 40)):
            one, other = mine.get_data_slice(start, end), its.get_data_slice(start, end)
            for key in (OBS, DONE, ACT, REW, OBS2, DONE2):
                same(one[key], other[key])
            begin = -start % 4  # of states those count that a sequence begins with
            same(one[RHS]["rhs_act"][begin::4], other[RHS]["rhs_act"][begin::4])


def truth(steps: list[dict[str, Any]], env: int, t: int, n: int) -> tuple[float, float, Any, int]:
    """reward, terminal, next observation and length of a window."""
    reward, k = 0.0, 0
    while True:
        reward += GAMMA**k * float(steps[t + k][REW][env])
        k += 1
        if steps[t + k - 1][DONE2][env] or k == n or t + k == len(steps):
            return reward, float(steps[t + k - 1][DONE2][env]), steps[t + k - 1][OBS2][env], k


@pytest.mark.parametrize("n", [2, 3, 7])
def test_trap_n3_n4_n5_n_step_windows_end_with_their_episode_and_none_is_lost(n: int) -> None:
    steps, wrong = play(40, 2), 0
    mine, its = pair("nstep", 60, n)
    (found,) = fed(mine, steps).generate_batches(1, 3000)
    (host_found,) = fed(its, steps).generate_batches(1, 3000)
    at = {steps[t][OBS][env].numpy().tobytes(): (env, t) for env in range(2) for t in range(40)}
    seen = set()
    for i in range(3000):
        env, t = at[found[OBS][i].numpy().tobytes()]
        reward, terminal, obs2, k = truth(steps, env, t, n)
        assert found[REW][i].item() == pytest.approx(reward, abs=1e-5)
        assert (found[DONE2][i].item(), found["n_step"][i].item()) == (terminal, k)
        assert torch.equal(found[OBS2][i], obs2)
        assert found[DONE][i].item() == steps[t][DONE][env].item()
        seen.add((env, t))
        env, t = at[host_found[OBS][i].numpy().tobytes()]
        reward, terminal, _, _ = truth(steps, env, t, n)
        assert t <= 40 - n  # the newest steps are missing
        assert host_found[REW][i].item() == pytest.approx(reward, abs=1e-5)
        wrong += host_found[DONE2][i].item() != terminal
    assert len(seen) == 80
    assert wrong  # its target goes on with the next episode
    assert host_found[DONE].max() > 1


def test_n_step_buffers_leave_the_algorithm_as_it_was() -> None:
    for cls, grows in ((ours.NStepReplayBuffer, 0), (host("nstep"), 4)):
        given = parts()
        cls.create_factory(10, 3)(*given)
        cls.create_factory(10, 3)(*given)
        assert given[2]._update_every == 4 + grows


def errors_of(batch: dict[str, Any], special: Any) -> Any:
    return torch.where((batch[OBS] == special).all(1, keepdim=True), 100.0, 1.0)


def test_priorities_give_the_same_weights_and_frequencies() -> None:
    steps = play(50, 2)
    special, share, weights = steps[7][OBS][1], [], []
    for buffer in pair("per", 50, 1, 0.1, 0.7, 0.4, 1.0):
        fed(buffer, steps).before_gradients()
        for batch in buffer.generate_batches(4, 500):  # until each has been drawn
            buffer.after_gradients(batch, {"Algorithm": {"errors": errors_of(batch, special)}})
        (batch,) = buffer.generate_batches(1, 4000)
        chosen = (batch[OBS] == special).all(1)
        share.append(chosen.float().mean().item())
        weights.append((batch["per_weights"][chosen][0].item(), batch["per_weights"][~chosen][0].item()))
    assert share[0] == pytest.approx(share[1], abs=0.03)
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-3)


def test_new_steps_in_the_place_of_old_ones_do_not_inherit_their_priority() -> None:
    steps = play(60, 1)
    shares = []
    for buffer in pair("per", 20, 1, 0.1, 1.0, 1.0, 1.0):
        fed(buffer, steps[:20]).before_gradients()
        for batch in buffer.generate_batches(10, 100):
            errors = torch.where((batch[OBS] == steps[3][OBS]).all(1, keepdim=True), 1000.0, 1.0)
            buffer.after_gradients(batch, {"Algorithm": {"errors": errors}})
        fed(buffer, steps[20:40])
        (batch,) = buffer.generate_batches(1, 1000)
        shares.append((batch[OBS] == steps[23][OBS]).all(1).float().mean().item())
    assert shares[0] < 0.15
    assert shares[1] > 0.8


@pytest.mark.parametrize("overlap", [0.0, 0.5])
def test_priorities_of_sequences_are_updated_with_several_envs(overlap: float) -> None:
    buffer = ours.PERBuffer.create_factory(64, 1, 0.1, 1.0, 1.0, 1.0, seed=0)(*parts(True, overlap))
    fed(buffer, play(40, 3))
    for batch in buffer.generate_batches(10, 40):
        count, each = len(batch["idxs"]), buffer.non_overlap_length
        errors = np.where(batch["idxs"] == 1, 200.0, 1.0).repeat(each)
        assert batch["per_weights"].shape == (count * 4, 1)
        buffer.after_gradients(batch, {"Algorithm": {"errors": torch.as_tensor(errors).reshape(-1, 1)}})
    (batch,) = buffer.generate_batches(1, 4000)
    assert (batch["idxs"] == 1).mean() > 0.5


def test_trap_r1_recent_is_in_the_order_of_time_also_after_the_ring_has_come_round() -> None:
    steps = play(50, 2)
    at = {steps[t][OBS][env].numpy().tobytes(): t for env in range(2) for t in range(50)}
    mine, its = pair("ere", 40, eta=0.9, cmin=10)
    fed(mine, steps)
    fed(its, steps)
    its.before_gradients()
    batches = list(mine.generate_batches(5, 200))
    assert [batch["ck"] for batch in batches][-3:] == [10, 10, 10]
    times = {at[row.numpy().tobytes()] for row in batches[-1][OBS]}
    assert times == set(range(45, 50))
    with pytest.raises(IndexError):  # of the one row of recurrent states it takes the rows from N - ck on
        list(its.generate_batches(5, 200))


def test_eta_follows_the_returns_as_there() -> None:
    mine, its = pair("ere", 40, eta=0.99, cmin=10)
    rng = np.random.default_rng(0)
    for k in range(80):
        value = float(k % 40 + rng.random())
        told: list[dict[str, Any]] = [{"Episodes": {"TrainReward": value}, "Algorithm": {}} for _ in range(2)]
        for buffer, info in zip((mine, its), told, strict=True):
            buffer.update_eta(info)
        assert set(told[0]["Algorithm"]) == set(told[1]["Algorithm"])
        for key, number in told[1]["Algorithm"].items():
            assert told[0]["Algorithm"][key] == pytest.approx(number, abs=2e-5)
        assert mine.eta == pytest.approx(its.eta, abs=2e-5)  # it rounds to a thousandth of the way


def test_parameters_can_be_changed_and_the_newest_steps_stay() -> None:
    mine, its = pair("per", 30, 1, 0.0, 0.5)
    steps = play(30, 2)
    for buffer in (mine, its):
        fed(buffer, steps)
        for name, value in (("beta", 0.5), ("n_step", 3), ("epsilon", 0.2), ("error", 9.0), ("unknown", 1)):
            buffer.update_storage_parameter(name, value)
        assert (buffer.beta, buffer.n_step, hasattr(buffer, "unknown")) == (0.5, 3, False)
        assert (buffer.epsilon, buffer.error) == (0.2, 9.0)
    mine.update_storage_parameter("max_size", 10)
    assert (mine.size, mine.max_size) == (10, 10)
    expected = torch.stack([s[OBS] for s in steps[20:]]).numpy()
    np.testing.assert_array_equal(mine.get_all_buffer_data()[OBS], expected)
    np.testing.assert_array_equal(mine.get_data_slice(3, 7)[OBS], expected[3:7])
    mine.update_storage_parameter("max_size", 25)
    fed(mine, play(3, 2, seed=1))
    assert (mine.size, mine.step) == (13, 13)
    np.testing.assert_array_equal(mine.data[OBS][:10], expected)


def test_changed_parameters_of_priorities_take_effect() -> None:
    mine, _ = pair("per", 30, 1, 0.0, 0.5)
    fed(mine, play(10, 2)).update_storage_parameter("epsilon", 0.2)
    mine.update_storage_parameter("error", 9.0)
    sampler = mine.__dict__["_rows"].replay.sampler
    np.testing.assert_allclose(sampler.priorities(), (1e6 + 0.2) ** 0.5)
    fed(mine, play(1, 2, seed=1))
    assert sampler.priorities().min() == pytest.approx(9.2**0.5)


def reached(obs: Any, rhs: Any, obs2: Any, rhs2: Any, rew: Any, initial_state: Any, final_state: Any) -> Any:
    """The goal, which is the last number of an observation, becomes the first number of the final one."""
    for seen in (obs, obs2):
        seen[:, 2] = final_state[:, 0]
    return obs, rhs, obs2, rhs2, (obs2[:, :1] == final_state[:, :1]).astype(np.float32)


@pytest.mark.parametrize("sliced", [0, 5])
@pytest.mark.parametrize("n", [1, 3])
def test_trap_h2_hindsight_takes_episodes_of_any_length_in_any_number_of_envs(n: int, sliced: int) -> None:
    buffer = ours.HERBuffer.create_factory(200, reached, n, seed=0)(*parts())
    steps, num_envs = play(60, 3), 3
    if sliced:
        collector = ours.HERBuffer.create_factory(20, reached, n)(*parts())
        for low in range(0, 60, sliced):
            fed(collector, steps[low : low + sliced])
            buffer.insert_data_slice(collector.get_all_buffer_data())
            collector.reset()
    else:
        fed(buffer, steps)
    want: dict[bytes, tuple[float, float]] = {}
    for env in range(num_envs):
        begin = 0
        for t in range(60):
            window = truth(steps, env, t, n)
            want[steps[t][OBS][env].numpy().tobytes()] = window[0], window[1]
            if not steps[t][DONE2][env]:
                continue
            goal = steps[t][OBS][env, 0]
            for at in range(begin, t):
                obs = steps[at][OBS][env].clone()
                obs[2] = goal
                k = t - 1 - at
                want[obs.numpy().tobytes()] = (GAMMA**k if k < n else 0.0), 0.0
            begin = t + 1
    assert buffer.size == 60
    stored = len(buffer.__dict__["_rows"].replay)
    data = buffer.get_all_buffer_data()
    buffer.reset()
    buffer.insert_data_slice(data)  # as a learner that collects by itself does; no copy is made twice
    assert (buffer.size, len(buffer.__dict__["_rows"].replay)) == (60, stored)
    (batch,) = buffer.generate_batches(1, 8000)
    found = {row.numpy().tobytes() for row in batch[OBS]}
    assert found == set(want)
    for row, reward, done in zip(batch[OBS], batch[REW], batch[DONE2], strict=True):
        expected = want[row.numpy().tobytes()]
        assert reward.item() == pytest.approx(expected[0], abs=1e-5)
        assert done.item() == expected[1]
    with pytest.raises(TypeError):  # the host's factory forgets `envs`, so that every argument shifts
        fed(host("her").create_factory(200, reached)(*parts()), steps)


def test_hindsight_for_recurrent_actors_is_refused_and_does_not_run_in_the_host() -> None:
    with pytest.raises(LifecycleError, match=r"recurrent.*EREBuffer"):
        ours.HERBuffer.create_factory(40, reached)(*parts(True))
    steps = play(8, 1, end=0.0)
    its = fed(host("her")(40, *parts(True), reached), steps)  # not by its factory, which shifts the arguments
    over = {**steps[-1], DONE: torch.ones(1, 1)}
    with pytest.raises(TypeError, match="DataTransition"):  # the first episode's end
        its.insert_transition(over)
