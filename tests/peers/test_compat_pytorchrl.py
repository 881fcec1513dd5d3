"""relive.compat.pytorchrl beside the real classes: fed the same random steps, everything is compared."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from compat.pytorchrl_play import (
    NAMES,
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
    truth,
)
from peers.pytorchrl_host import algorithm, host
from relive.compat import pytorchrl as ours
from relive.compat.pytorchrl import DONE, DONE2, OBS, REW, RHS, RHS2
from relive.errors import LifecycleError


def pair(name: str, size: int, *args: Any, recurrent: bool = False, overlap: float = 0.0, **options: Any) -> Any:
    mine = getattr(ours, NAMES[name]).create_factory(size, *args, **options, seed=0)(*parts(recurrent, overlap))
    return mine, host(name).create_factory(size, *args, **options)(*parts(recurrent, overlap))


def kinds(batch: dict[str, Any]) -> Any:
    def kind(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: kind(member) for key, member in value.items()}
        return (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else value

    return {key: kind(value) for key, value in batch.items() if key not in ("idxs", "priority")}


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
            assert_same(mine.data, its_data)
            start = 2 if count == 3 else 5
            its_slice = {key: value for key, value in its.get_data_slice(start, 9).items() if key != "priority"}
            assert_same(mine.get_data_slice(start, 9), its_slice)
            negative = {key: value for key, value in its.get_data_slice(-7, -2).items() if key not in ("priority", RHS)}
            assert_same({key: mine.get_data_slice(-7, -2)[key] for key in negative}, negative)
            for key in (OBS, REW, DONE2, RHS):
                last = host("her").copy_single_tensor(its, key, its.step - 1)
                assert_same(mine.copy_single_tensor(key, its.step - 1), last)
            its.before_gradients()
            mine.before_gradients()
            (a,), (b,) = (list(buffer.generate_batches(1, 2000)) for buffer in (mine, its))
            assert kinds(a) == kinds(b)
            assert_same(a[RHS], b[RHS])
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
        assert_same(*(learner.get_data_slice(0, 40) for learner in learners))
        assert len({(b.size, b.step) for b in collectors}) == len({(b.size, b.step) for b in learners}) == 1
    for learner in learners:
        with pytest.raises(AssertionError):
            learner.insert_data_slice({**data, REW: data[REW][1:]})


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("name", ["replay", "per"])
def test_a_learner_that_collects_by_itself_puts_its_steps_back_where_they_were(name: str, pickled: bool) -> None:
    """One process: what is taken out of the buffer goes into the same buffer again, round after round."""
    steps, buffers = play(80, 2), pair(name, 20, **({"alpha": 0.6, "default_error": 1.0} if name == "per" else {}))
    for first in range(0, 80, 8):
        for buffer in buffers:
            fed(buffer, steps[first : first + 8])
            round_trip(buffer, pickled)
            buffer.before_gradients()
        mine, its = buffers
        assert (mine.size, mine.step) == (its.size, its.step)
        its_slice = {key: value for key, value in its.get_data_slice(0, 20).items() if key != "priority"}
        assert_same(mine.get_data_slice(0, 20), its_slice)


def round_trip(buffer: Any, pickled: bool) -> None:
    data = buffer.get_all_buffer_data()
    data = pickle.loads(pickle.dumps(data)) if pickled else data
    buffer.reset()
    buffer.insert_data_slice(data)


@pytest.mark.parametrize("pickled", [False, True])
def test_priorities_outlive_the_round_that_a_learner_takes_its_steps_through(pickled: bool) -> None:
    steps, shares = play(30, 2), []
    for buffer in pair("per", 30, 1, 0.1, 1.0, 1.0, 1.0):
        fed(buffer, steps[:20]).before_gradients()
        for batch in buffer.generate_batches(20, 100):
            buffer.after_gradients(batch, {"Algorithm": {"errors": errors_of(batch, steps[7][OBS][1])}})
        round_trip(fed(buffer, steps[20:22]), pickled)
        (batch,) = buffer.generate_batches(1, 1000)
        shares.append((batch[OBS] == steps[7][OBS][1]).all(1).float().mean().item())
    assert shares[0] == pytest.approx(shares[1], abs=0.1)
    assert shares[0] > 0.5


@pytest.mark.parametrize("overlap", [0.0, 0.5])
def test_sequences_are_stored_and_served_the_same(overlap: float) -> None:
    mine, its = pair("replay", 16, recurrent=True, overlap=overlap)
    steps = play(14 if overlap else 16, 2)  # both hold whole sequences then
    fed(mine, steps)
    fed(its, steps)
    assert (mine.size, mine.max_size) == (its.size, its.max_size) == ((24 if overlap else 16), 32)
    for key in STEP:
        assert_same(mine.get_all_buffer_data()[key], its.get_all_buffer_data()[key])
    assert_same(mine.get_all_buffer_data()[RHS]["rhs_act"][::4], its.get_all_buffer_data()[RHS]["rhs_act"][::4])
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
            for key in STEP:
                assert_same(one[key], other[key])
            begin = -start % 4  # of states those count that a sequence begins with
            assert_same(one[RHS]["rhs_act"][begin::4], other[RHS]["rhs_act"][begin::4])


@pytest.mark.parametrize("overlap", [0.0, 0.5])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_n_step_sequences_are_the_same_but_for_the_sum_of_their_flags(n: int, overlap: float) -> None:
    mine, its = pair("nstep", 80, n, recurrent=True, overlap=overlap)
    steps = play((14 if overlap else 20) + n - 1, 2)
    fed(mine, steps)
    fed(its, steps)
    assert (mine.size, mine.step) == (its.size, its.step)
    one, other = mine.get_all_buffer_data(), its.get_all_buffer_data()
    for key in (key for key in STEP if key not in (DONE, REW)):
        assert_same(one[key], other[key])
    np.testing.assert_allclose(one[REW], other[REW], rtol=1e-5, atol=1e-6)
    for key in (RHS, RHS2):
        assert_same(one[key]["rhs_act"][::4], other[key]["rhs_act"][::4])
    assert other[DONE].max() > 1


@pytest.mark.parametrize("n", [2, 3, 7])
def test_n_step_windows_end_with_their_episode_and_none_is_lost(n: int) -> None:
    steps, wrong = play(40, 2), 0
    mine, its = pair("nstep", 60, n)
    (found,) = fed(mine, steps).generate_batches(1, 3000)
    check_windows(found, [steps], n)
    (host_found,) = fed(its, steps).generate_batches(1, 3000)
    at = {steps[t][OBS][env].numpy().tobytes(): (env, t) for env in range(2) for t in range(40)}
    for i in range(3000):
        env, t = at[host_found[OBS][i].numpy().tobytes()]
        reward, terminal, _, _ = truth(steps, env, t, n)
        assert t <= 40 - n  # the newest steps are missing
        assert host_found[REW][i].item() == pytest.approx(reward, abs=1e-5)
        wrong += host_found[DONE2][i].item() != terminal
    assert wrong  # its target goes on with the next episode
    assert host_found[DONE].max() > 1


def test_n_step_buffers_leave_the_algorithm_as_it_was() -> None:
    for cls, grows in ((ours.NStepReplayBuffer, 0), (host("nstep"), 4)):
        given = parts()
        for _ in range(2):
            cls.create_factory(10, 3)(*given)
        assert given[2]._update_every == 4 + grows


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


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_priorities_of_sequences_are_the_same_in_one_env(epsilon: float) -> None:
    """Of several envs, or where they overlap, the host updates others than those it drew."""
    mine, its = pair("per", 16, 1, epsilon, 0.6, recurrent=True)
    steps = play(16, 1)
    errors = torch.rand(16, generator=torch.Generator().manual_seed(0)).reshape(4, 4)
    of_row = {steps[4 * i][OBS][0].numpy().tobytes(): errors[i] for i in range(4)}
    for buffer in (mine, its):
        fed(buffer, steps).before_gradients()
        for batch in buffer.generate_batches(3, 40):
            found = torch.cat([of_row[row.numpy().tobytes()] for row in batch[OBS][::4]])
            buffer.after_gradients(batch, {"Algorithm": {"errors": found.reshape(-1, 1)}})
    priorities = mine.__dict__["_rows"].replay.sampler.priorities()
    np.testing.assert_allclose(priorities, its.data["priority"][:16:4, 0, 0], rtol=1e-4)


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


def test_recent_is_in_the_order_of_time_also_after_the_ring_has_come_round() -> None:
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


def test_hindsight_runs_here_and_not_in_the_host() -> None:
    steps = play(60, 3)
    check_hindsight(fed(ours.HERBuffer.create_factory(200, reached)(*parts()), steps), hindsight_truth(steps, 1))
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


@pytest.mark.parametrize("count", [5, 12, 31])
@pytest.mark.parametrize("name", ["replay", "nstep", "per"])
def test_a_buffer_of_pytorchrl_becomes_ours_with_its_steps(name: str, count: int) -> None:
    options: dict[str, Any] = {"alpha": 0.6, "epsilon": 0.01} if name == "per" else {}
    truth, its = pair(name, 12, **options)
    for buffer in (truth, its):
        fed(buffer, play(count, 2))
    made = getattr(ours, NAMES[name]).from_original(its, seed=0)
    assert (made.size, made.max_size) == (its.size, its.max_size)
    assert_same(dict(made.get_all_buffer_data()), dict(truth.get_all_buffer_data()))
    for buffer in (made, truth):
        fed(buffer, play(3, 2, seed=1))
    assert_same(dict(made.get_all_buffer_data()), dict(truth.get_all_buffer_data()))
    if name == "per":
        assert (made.alpha, made.epsilon, made.error) == (its.alpha, its.epsilon, its.error)


def test_priorities_of_pytorchrl_become_ours() -> None:
    _, its = pair("per", 12, alpha=0.5)
    fed(its, play(10, 2))
    its.data["priority"] = np.full((12, 2, 1), 1e-6)  # which the host allocates in its first update
    its.data["priority"][4, 1] = 100.0
    (batch,) = ours.PERBuffer.from_original(its, seed=0).generate_batches(1, 500)
    assert (batch[OBS] == torch.from_numpy(its.data[OBS][4, 1])).all(1).float().mean() > 0.95


@pytest.mark.parametrize(("count", "first", "last"), [(9, 0, 12), (11, 4, 16)])
def test_whole_sequences_of_pytorchrl_become_ours(count: int, first: int, last: int) -> None:
    """With a memory of four sequences. After 11 steps, the newest one has replaced a part of the oldest."""
    mine, its = pair("replay", 8, recurrent=True, overlap=0.5)
    for buffer in (mine, its):
        fed(buffer, play(count, 2))
    made = ours.ReplayBuffer.from_original(its, seed=0)
    assert made.max_size == its.max_size
    found, wanted = made.get_all_buffer_data(), mine.get_all_buffer_data()
    assert_same({key: found[key] for key in STEP}, {key: wanted[key][first:last] for key in STEP})


class Actor(torch.nn.Module):
    """What PyTorchRL's DDPG asks of one."""

    is_recurrent = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q1, self.policy_net = torch.nn.Linear(4, 1), torch.nn.Linear(3, 1)
        noise = SimpleNamespace(reset=lambda: None)
        self.policy_net.dist = SimpleNamespace(noise=noise)  # pyright: ignore[reportAttributeAccessIssue]

    def get_action(self, obs: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        return self.policy_net(obs).tanh(), None, None, None, None, None

    def get_q_scores(self, obs: torch.Tensor, _state: Any, _done: Any, action: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"q1": self.q1(torch.cat([obs, action], 1))}


@pytest.mark.parametrize("num_envs", [1, 3])
def test_pytorchrls_ddpg_on_the_same_draws_ends_with_the_same_weights(
    num_envs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First on ours, whose rows are looked up by what is in them; then on its own, which is told to draw them."""
    size, drawn = 20, list[Any]()
    rng = np.random.default_rng(0)
    seen = rng.normal(size=(61, num_envs, 3)).astype(np.float32)
    acts = rng.uniform(-1, 1, (60, num_envs, 1)).astype(np.float32)
    ends = rng.random((61, num_envs, 1)) < 0.2
    places = {seen[t, env].tobytes(): (t % size) * num_envs + env for t in range(60) for env in range(num_envs)}

    def step(t: int) -> dict[str, Any]:
        flags = torch.from_numpy(ends.astype(np.float32))
        obs, after = (torch.from_numpy(x) for x in seen[t : t + 2])
        state = {"rhs_act": torch.zeros(num_envs, 1)}
        act = torch.from_numpy(acts[t])
        reward = -(act - obs[:, :1]).square()
        return {
            "Observation": obs, "RecurrentHiddenStates": state, "Done": flags[t], "Action": act, "Reward": reward,
            "NextObservation": after, "NextRecurrentHiddenStates": state, "NextDone": flags[t + 1],
        }  # fmt: skip

    def trained(factory: Any, note: bool) -> dict[str, torch.Tensor]:
        actor = Actor()
        learner = algorithm("DDPG")("cpu", None, actor, lr_q=1e-2, lr_pi=1e-2, gamma=0.9, polyak=0.9)
        storage = factory("cpu", actor, learner, None)
        for t in range(60):
            storage.insert_transition(step(t))
            if t < 5:
                continue
            storage.before_gradients()
            for batch in storage.generate_batches(num_mini_batch=2, mini_batch_size=16):
                if note:
                    drawn.append([places[row.numpy().tobytes()] for row in batch["Observation"]])
                gradients, info = learner.compute_gradients(batch)
                learner.apply_gradients(gradients)
                storage.after_gradients(batch, info)
        return {name: value.clone() for name, value in actor.state_dict().items()}

    mine = trained(ours.ReplayBuffer.create_factory(size, seed=0), note=True)
    told = iter(drawn)
    monkeypatch.setattr(np.random, "randint", lambda *_, **__: np.array(next(told)))
    its = trained(host("replay").create_factory(size), note=False)
    assert next(told, None) is None
    assert not torch.equal(mine["policy_net.weight"], Actor().policy_net.weight)
    for name, value in mine.items():
        assert torch.equal(value, its[name]), name
