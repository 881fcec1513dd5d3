"""The drop-in for Velora's replay buffer, and the rollout buffer it removed: by themselves, without Velora."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from relive.compat.velora import BatchExperience, ReplayBuffer, RolloutBatch, RolloutBuffer
from relive.errors import FieldError, FileFormatError, NoSaveError, ParameterError, ShapeError

pytestmark = pytest.mark.usefixtures("no_hosts")

NAMES = ("states", "actions", "rewards", "next_states", "dones", "hiddens")
SIZES = (3, 2, 1, 3, 1, 4)
"""Of states, actions, rewards, next_states, dones, hiddens."""


def block(count: int, seed: int = 0) -> list[Tensor]:
    """Random rows in the order of ``add_multi``."""
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.normal(size=(count, size)).astype(np.float32)) for size in SIZES]


def filled(count: int = 7, capacity: int = 10, **options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(capacity, 3, 2, 4, **options)
    buffer.add_multi(*block(count))
    return buffer


class Naive:
    """A ring of rows as six plain tensors."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.added = capacity, 0
        self.columns = [torch.zeros(capacity, size) for size in SIZES]

    def add(self, rows: list[Tensor]) -> None:
        for i in range(len(rows[0])):
            for column, values in zip(self.columns, rows, strict=True):
                column[self.added % self.capacity] = values[i]
            self.added += 1


# -- the replay -------------------------------------------------------------------------------------------------------


def test_a_new_buffer_has_veloras_tensors_and_metadata() -> None:
    buffer = ReplayBuffer(5, 3, 2, 4)
    assert {name: tuple(getattr(buffer, name).shape) for name in NAMES} == dict(
        zip(NAMES, [(5, size) for size in SIZES], strict=True)
    )
    assert all(getattr(buffer, name).dtype is torch.float32 for name in NAMES)
    assert (buffer.position, buffer.size, len(buffer), buffer.device) == (0, 0, 0, None)
    expected = {
        "capacity": 5,
        "state_dim": 3,
        "action_dim": 2,
        "hidden_dim": 4,
        "position": 0,
        "size": 0,
        "device": None,
    }
    assert list(buffer.metadata().items()) == list(expected.items())
    assert ReplayBuffer(5, 3, 2, 4, device=torch.device("cpu")).metadata()["device"] == "cpu"
    with pytest.raises(ParameterError, match="at least 2"):
        ReplayBuffer(1, 3, 2, 4)


@pytest.mark.parametrize("capacity", [2, 5, 8])
def test_rows_lie_where_a_plain_ring_has_them_whatever_is_added(capacity: int) -> None:
    rng = np.random.default_rng(1)
    buffer, naive = ReplayBuffer(capacity, 3, 2, 4), Naive(capacity)
    for seed in range(30):
        count = int(rng.integers(1, 3 * capacity))
        rows = block(count, seed)
        if count == 1:
            buffer.add(*(values[0] for values in rows))
        else:
            buffer.add_multi(*rows)
        naive.add(rows)
        assert (buffer.position, buffer.size) == (naive.added % capacity, min(naive.added, capacity))
        for name, column in zip(NAMES, naive.columns, strict=True):
            assert torch.equal(getattr(buffer, name), column), name
            state = buffer.state_dict()[name]
            assert torch.equal(state, column)
            assert state.is_contiguous()


def test_add_takes_what_veloras_agent_hands_over() -> None:
    buffer = ReplayBuffer(4, 3, 2, 4)
    action, hidden = torch.tensor([[1.0, 2.0]], requires_grad=True), torch.ones(1, 4)
    buffer.add(torch.arange(3.0, dtype=torch.float64), action, torch.tensor(2.5), torch.ones(3), True, hidden)
    buffer.add(np.arange(3), [1, 2], 2.5, np.ones((1, 3)), np.bool_(True), 1.0)  # a number stands for all of it
    for name in NAMES:
        assert torch.equal(getattr(buffer, name)[0], getattr(buffer, name)[1]), name
    assert buffer.actions[0].tolist() == [1, 2]
    assert buffer.dones[0].tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_one_step_after_another_is_stored_whatever_its_form(dtype: torch.dtype) -> None:
    """Tensors of known forms are copied by address, the others are not."""
    buffer, naive = ReplayBuffer(8, 3, 2, 4), Naive(8)
    for seed in range(20):
        rows = block(1 + seed % 4, seed)
        rows[0], rows[3] = rows[0].to(dtype), rows[3].to(dtype)
        rows[4] = (rows[4] > 0).float()
        if seed % 4:
            hiddens = rows[5].T.contiguous().T if seed % 3 else rows[5]  # not contiguous
            buffer.add_multi(rows[0], rows[1], rows[2][:, 0] if seed % 2 else rows[2], *rows[3:5], hiddens)
        else:
            state, action, reward, following, done, hidden = rows
            first = state[0] if seed % 8 else state
            buffer.add(first, action.requires_grad_(), np.float64(reward.item()), following[0], done.item() > 0, hidden)
            rows[1].requires_grad_(False)
        naive.add(rows)
        for name, column in zip(NAMES, naive.columns, strict=True):
            assert torch.equal(getattr(buffer, name), column), name
        with pytest.raises(ShapeError, match="'hidden'"):
            buffer.add(torch.zeros(3, dtype=dtype), torch.zeros(2), 1.0, torch.zeros(3), True, torch.zeros(3))
        again = copy.deepcopy(buffer)
        again.add(torch.ones(3, dtype=dtype), torch.ones(2), 1.0, torch.ones(3, dtype=dtype), True, torch.ones(4))
        assert all(getattr(again, name)[buffer.position].eq(1).all() for name in NAMES)
        assert torch.equal(buffer.states, naive.columns[0])


def test_add_multi_takes_rewards_dones_and_single_actions_without_their_last_axis() -> None:
    buffer, other = ReplayBuffer(4, 3, 1, 4), ReplayBuffer(4, 3, 1, 4)
    states, actions, rewards, following, _, hiddens = block(3)
    dones = torch.tensor([True, False, True])
    buffer.add_multi(states, actions[:, 0], rewards[:, 0].double(), following, dones, hiddens)
    other.add_multi(states, actions[:, :1], rewards, following, dones.unsqueeze(1), hiddens)
    for name in NAMES:
        assert torch.equal(getattr(buffer, name), getattr(other, name)), name
    assert buffer.dones[:, 0].tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("place", range(6))
def test_a_row_that_does_not_fit_is_refused_by_name_and_nothing_is_stored(place: int) -> None:
    buffer = filled()
    before = buffer.state_dict()
    good = block(2, 1)
    for kind in (RuntimeError, ShapeError):  # torch raises the first inside Velora
        wrong = [torch.zeros(2, SIZES[i] + 1) if i == place else rows for i, rows in enumerate(good)]
        with pytest.raises(kind, match=NAMES[place] if place else "states|actions"):
            buffer.add_multi(*wrong)
        with pytest.raises(kind, match=NAMES[place][:-1]):
            buffer.add(*(rows[0] for rows in wrong))
    with pytest.raises(ShapeError, match="expected"):
        buffer.add_multi(*[rows[:1] if i == place else rows for i, rows in enumerate(good)])
    assert buffer.size == 7
    assert all(torch.equal(buffer.state_dict()[name], before[name]) for name in NAMES)


def test_sample_gives_whole_stored_rows_with_replacement() -> None:
    buffer = filled()
    batch = buffer.sample(7)
    assert isinstance(batch, BatchExperience)
    stored = torch.cat([getattr(buffer, name)[:7] for name in NAMES], 1).tolist()
    drawn: list[int] = []
    for _ in range(40):
        batch = buffer.sample(7)
        for name, size in zip(NAMES, SIZES, strict=True):
            column = getattr(batch, name)
            assert column.shape == (7, size)
            assert column.dtype is torch.float32
            assert column.is_contiguous()
        drawn += [stored.index(row) for row in torch.cat([getattr(batch, name) for name in NAMES], 1).tolist()]
    assert set(drawn) == set(range(7))
    assert any(len(set(drawn[i : i + 7])) < 7 for i in range(0, len(drawn), 7))
    with pytest.raises(ValueError, match=r"does not contain enough experiences\. Available: 7, Requested: 8"):
        buffer.sample(8)


def test_sampling_is_uniform_over_the_rows_also_after_the_ring_came_round() -> None:
    buffer = ReplayBuffer(5, 3, 2, 4, seed=0)
    buffer.add_multi(*block(13))
    counts = np.zeros(5)
    rewards = buffer.rewards[:, 0].tolist()
    for _ in range(400):
        for reward in buffer.sample(5).rewards[:, 0].tolist():
            counts[rewards.index(reward)] += 1
    expected = counts.sum() / 5
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # χ², 4 degrees of freedom: one run in a thousand


def test_draws_follow_the_seed_and_no_global_generator() -> None:
    def draws(seed: int) -> list[Any]:
        buffer = filled(seed=seed)
        return [buffer.sample(7).rewards.tolist() for _ in range(3)]

    before = torch.get_rng_state()
    first = draws(1)
    assert first == draws(1)
    assert first != draws(2)
    assert first[0] != first[1]
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_seed_draws_follow_torchs_as_in_velora() -> None:
    one, other = filled(), filled()
    torch.manual_seed(42)
    drawn = [one.sample(7).rewards.tolist() for _ in range(2)]
    assert drawn[0] != drawn[1]
    for buffer in (one, other):
        torch.manual_seed(42)
        assert [buffer.sample(7).rewards.tolist() for _ in range(2)] == drawn


def test_a_batch_is_a_copy() -> None:
    buffer = filled()
    before = buffer.state_dict()
    for name in NAMES:
        getattr(buffer.sample(3), name).zero_()
        buffer.state_dict()[name].zero_()
        assert torch.equal(getattr(buffer, name), before[name])


def test_config_asks_for_velora() -> None:
    with pytest.raises(ImportError, match="velora"):
        filled().config()


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 7, 10, 13, 20])
def test_a_loaded_buffer_is_the_saved_one_and_goes_on_like_it(tmp_path: Path, count: int) -> None:
    buffer = ReplayBuffer(10, 3, 2, 4)
    if count:
        buffer.add_multi(*block(count))
    buffer.save(tmp_path / "a" / "b")
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == [
        "buffer_metadata.json",
        "buffer_state.safetensors",
    ]
    metadata = json.loads((tmp_path / "a" / "b" / "buffer_metadata.json").read_text())
    assert metadata == buffer.metadata()
    tensors = load_file(tmp_path / "a" / "b" / "buffer_state.safetensors")
    assert {name: tuple(x.shape) for name, x in tensors.items()} == {
        name: (10, size) for name, size in zip(NAMES, SIZES, strict=True)
    }
    for name in ("buffer_state", "buffer_state.safetensors"):
        again = ReplayBuffer.load(tmp_path / "a" / "b" / name, metadata)
        for extra in (block(4, 1), block(9, 2)):
            assert again.metadata() | {"device": None} == buffer.metadata()
            for column in NAMES:
                assert torch.equal(getattr(again, column), getattr(buffer, column)), column
            if name.endswith("safetensors"):
                buffer.add_multi(*extra)
                again.add_multi(*extra)
        assert len(again) == len(buffer)


def test_a_prefix_may_have_a_dot_in_it(tmp_path: Path) -> None:
    """Velora cuts it off there, and both files lose their names."""
    buffer = filled()
    buffer.save(tmp_path, "v1.2_")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v1.2_metadata.json", "v1.2_state.safetensors"]
    again = ReplayBuffer.load(tmp_path / "v1.2_state", buffer.metadata())
    assert torch.equal(again.states, buffer.states)


@pytest.mark.parametrize("position", range(5))
def test_a_full_buffer_goes_on_at_its_position(tmp_path: Path, position: int) -> None:
    buffer = filled(5 + position, capacity=5)
    assert (buffer.position, buffer.size) == (position, 5)
    buffer.save(tmp_path)
    again = ReplayBuffer.load(tmp_path / "buffer_state", buffer.metadata())
    for target in (buffer, again):
        target.add_multi(*block(2, seed=1))
    assert (again.position, again.size) == (buffer.position, 5)
    for name in NAMES:
        assert torch.equal(getattr(again, name), getattr(buffer, name)), name


def test_a_file_that_velora_wrote_under_a_cut_name_is_found(tmp_path: Path) -> None:
    buffer = filled()
    save_file(buffer.state_dict(), tmp_path / "v1.safetensors")
    assert len(ReplayBuffer.load(tmp_path / "v1.2_state", buffer.metadata())) == 7


def test_a_save_of_another_device_can_be_loaded_here(tmp_path: Path) -> None:
    """In Velora only by editing the dict."""
    filled().save(tmp_path)
    metadata = filled().metadata() | {"device": "cuda:7"}
    assert len(ReplayBuffer.load(tmp_path / "buffer_state", metadata, device="cpu")) == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capacity": 5}, "size=7"),
        ({"capacity": 11}, "'states': expected F32 .11, 3., got F32 .10, 3."),
        ({"state_dim": 4}, "'states'"),
        ({"action_dim": 1}, "'actions'"),
        ({"hidden_dim": 9}, "'hiddens'"),
        ({"size": 11}, "size=11"),
        ({"position": 3}, "position=3"),
        ({"position": -1}, "'position'"),
        ({"capacity": "10"}, "'capacity'"),
        ({"size": None}, "'size'"),
        ({"device": 3}, "'device'"),
        ({"device": "x"}, "'device'.*device='cpu'"),
        ({"device": "meta"}, "'device'.*device='cpu'"),
    ],
)
def test_metadata_that_contradict_the_tensors_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """Velora takes any: a capacity of 5 with tensors of 1000 rows."""
    buffer = filled()
    buffer.save(tmp_path)
    with pytest.raises(FileFormatError, match=message):
        ReplayBuffer.load(tmp_path / "buffer_state", buffer.metadata() | change)


def test_files_that_are_none_of_veloras_are_refused(tmp_path: Path) -> None:
    metadata = filled().metadata()
    with pytest.raises(NoSaveError, match="no file"):
        ReplayBuffer.load(tmp_path / "nothing", metadata)
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(FileFormatError, match="is not a safetensors file"):
        ReplayBuffer.load(tmp_path / "text", metadata)
    state = filled().state_dict()
    save_file({name: x for name, x in state.items() if name != "hiddens"}, tmp_path / "less.safetensors")
    with pytest.raises(FileFormatError, match="no tensor 'hiddens'"):
        ReplayBuffer.load(tmp_path / "less", metadata)
    save_file({name: x.double() for name, x in state.items()}, tmp_path / "wide.safetensors")
    with pytest.raises(FileFormatError, match="F64"):
        ReplayBuffer.load(tmp_path / "wide", metadata)


def test_a_flipped_bit_is_noticed_wherever_it_is(tmp_path: Path) -> None:
    buffer = filled()
    buffer.save(tmp_path)
    path = tmp_path / "buffer_state.safetensors"
    whole = path.read_bytes()
    size = 4 * 10 * sum(SIZES)
    for place in range(len(whole) - size, len(whole), 37):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(FileFormatError, match="is damaged: expected the checksum"):
            ReplayBuffer.load(path, buffer.metadata())
    path.write_bytes(whole)
    assert len(ReplayBuffer.load(path, buffer.metadata())) == 7


def test_threads_that_save_to_one_path_take_turns(tmp_path: Path) -> None:
    buffers, errors = [filled(count) for count in (3, 5, 7)], list[BaseException]()

    def save(buffer: ReplayBuffer) -> None:
        try:
            for _ in range(10):
                buffer.save(tmp_path / "here")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(buffer,)) for buffer in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    metadata = json.loads((tmp_path / "here" / "buffer_metadata.json").read_text())
    assert len(ReplayBuffer.load(tmp_path / "here" / "buffer_state", metadata)) in (3, 5, 7)
    assert len(list((tmp_path / "here").iterdir())) == 2


def test_a_save_that_fails_leaves_the_one_before_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = filled()
    buffer.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fails(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(OSError, match="disk full"):
        filled(3).save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# -- warming up -------------------------------------------------------------------------------------------------------


class Counting(gym.Env[Any, Any]):
    """Observation: (episode, step, number of resets so far); ends after ``length`` steps, cut off if ``cut``."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, length: int = 3, cut: bool = False) -> None:
        self.length, self.cut, self.episode, self.t = length, cut, -1, 0

    def observe(self) -> Any:
        return np.array([self.episode, self.t, 7], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        over = self.t == self.length
        return self.observe(), float(self.t), over and not self.cut, over and self.cut, {}


gym.register("Counting-v0", entry_point=Counting)


class Agent:
    """Its state counts the steps since it was None or zeros."""

    device = None
    seed = 3

    def __init__(self, env: Any) -> None:
        self.env = env
        self.seen: list[tuple[Tensor, Tensor]] = []

    def predict(self, states: Tensor, hidden: Tensor | None, *, train_mode: bool) -> tuple[Tensor, Tensor]:
        assert train_mode
        before = torch.zeros(len(states), 4) if hidden is None else hidden
        self.seen.append((states, before))
        return torch.full((len(states), 2), 0.5), before + 1


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("count", [1, 10, 50])
def test_warm_stores_as_many_transitions_as_asked_and_each_leads_where_it_says(count: int, cut: bool) -> None:
    """Velora's overshoots, stores the steps that reset, carries states over, and drops the env's arguments."""
    agent = Agent(gym.make("Counting-v0", length=4, cut=cut))
    buffer = ReplayBuffer(60, 3, 2, 4)
    buffer.warm(agent, count, num_envs=3)
    assert len(buffer) == count
    states, following = buffer.states[:count], buffer.next_states[:count]
    assert torch.equal(states[:, 0], following[:, 0])  # none leads from one episode to the next
    assert torch.equal(states[:, 1] + 1, following[:, 1])
    assert torch.equal(buffer.rewards[:count, 0], following[:, 1])
    over = following[:, 1] == 4
    assert torch.equal(buffer.dones[:count, 0].bool(), over & (not cut))  # a time limit is not a terminal
    assert torch.equal(buffer.hiddens[:count, 0], following[:, 1])  # the state after the step, from zeros each episode
    buffer.warm(agent, 5, num_envs=2)
    assert len(buffer) == count + 5


def test_warm_refuses_what_would_never_end() -> None:
    """Velora's loops for ever if there is no room."""
    agent = Agent(gym.make("Counting-v0"))
    with pytest.raises(ValueError, match="n_samples=61"):
        ReplayBuffer(60, 3, 2, 4).warm(agent, 61)
    with pytest.raises(ValueError, match="num_envs=1"):
        ReplayBuffer(60, 3, 2, 4).warm(agent, 10, num_envs=1)


def test_warm_plays_in_environments_that_are_given_and_leaves_them_open() -> None:
    envs = gym.vector.SyncVectorEnv([Counting] * 2)
    buffer = ReplayBuffer(60, 3, 2, 4)
    buffer.warm(SimpleNamespace(device=None, predict=Agent(None).predict), 7, envs=envs)
    assert len(buffer) == 7
    envs.reset()


# -- the rollout ------------------------------------------------------------------------------------------------------


def played(steps: int, envs: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)

    def some(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=shape).astype(np.float32))

    return [
        {
            "states": some(envs, 3),
            "actions": some(envs, 2),
            "rewards": some(envs),
            "dones": torch.from_numpy(rng.random(envs) < 0.2),
            "hiddens": some(envs, 4),
            "log_probs": some(envs, 1),
            "values": some(envs),
        }
        for _ in range(steps)
    ]


def test_advantages_are_those_of_the_steps_in_the_order_of_time() -> None:
    """Velora's computed them inside each shuffled minibatch, over rows of different environments."""
    steps = played(12, 3)
    buffer = RolloutBuffer(36, 3, 2, 4, num_envs=3, gamma=0.9, gae_lambda=0.8, seed=0)
    for step in steps:
        buffer.add(**step)
    last = torch.tensor([1.0, 2.0, 3.0])
    buffer.finish(last)
    expected: dict[tuple[float, ...], float] = {}
    for n in range(3):
        advantage, after = 0.0, last[n].item()
        for step in reversed(steps):
            going_on = 1.0 - float(step["dones"][n])
            delta = step["rewards"][n].item() + 0.9 * after * going_on - step["values"][n].item()
            advantage = delta + 0.9 * 0.8 * going_on * advantage
            expected[tuple(step["states"][n].tolist())] = advantage
            after = step["values"][n].item()
    batches = list(buffer.sample(10))
    assert [len(batch.states) for batch in batches] == [10, 10, 10, 6]
    assert isinstance(batches[0], RolloutBatch)
    flat = {name: torch.cat([step[name].reshape(3, -1) for step in steps]) for name in steps[0]}
    seen: list[int] = []
    for batch in batches:
        for i, state in enumerate(batch.states):
            at = (flat["states"] == state).all(1).nonzero().item()
            seen.append(at)
            for name in flat:  # what was stored together comes together
                assert torch.equal(getattr(batch, name)[i], flat[name][at].float()), name
            assert batch.advantages[i].item() == pytest.approx(expected[tuple(state.tolist())], abs=1e-5)
            assert batch.returns[i].item() == pytest.approx((batch.advantages[i] + batch.values[i]).item(), abs=1e-5)
    assert sorted(seen) == list(range(36))
    again = [at for batch in buffer.sample(10) for at in batch.states[:, 0].tolist()]
    assert again != torch.cat([batch.states for batch in batches])[:, 0].tolist()


def test_without_a_seed_the_order_of_a_rollouts_batches_follows_torchs() -> None:
    buffer = RolloutBuffer(36, 3, 2, 4, num_envs=3)
    for step in played(12, 3):
        buffer.add(**step)
    buffer.finish(torch.zeros(3))
    found = []
    for seed in (42, 42, 43):
        torch.manual_seed(seed)
        found.append([at for batch in buffer.sample(10) for at in batch.states[:, 0].tolist()])
    assert found[0] == found[1] != found[2]


def test_the_rollout_keeps_veloras_rules_of_being_full_and_empty() -> None:
    buffer = RolloutBuffer(4, 3, 2, 4, num_envs=2)
    with pytest.raises(BufferError, match="Buffer is empty!"):
        buffer.sample(2)
    first, second = played(2, 2)
    buffer.add(**first)
    with pytest.raises(BufferError, match="not full! 2 of 4"):
        buffer.sample(2)
    with pytest.raises(BufferError, match="not full"):
        buffer.finish(torch.zeros(2))
    with pytest.raises(RuntimeError, match="'action'"):
        buffer.add(**second | {"actions": torch.zeros(2, 3)})
    buffer.add(**second)
    assert len(buffer) == buffer.size == 4
    with pytest.raises(BufferError, match="Buffer full!"):
        buffer.add(**second)
    with pytest.raises(BufferError, match="finish"):
        buffer.sample(2)
    buffer.finish(torch.zeros(2))
    assert len(list(buffer.sample(3))) == 2
    buffer.empty()
    assert len(buffer) == 0
    with pytest.raises(ValueError, match="capacity=5"):
        RolloutBuffer(5, 3, 2, 4, num_envs=2)


def test_a_truncated_step_is_valued_by_its_final_value() -> None:
    """Velora's took a time limit for a terminal."""
    (step,) = played(1, 1)
    step |= {"dones": [True], "rewards": [1.0], "values": [0.0]}
    for options, expected in (
        ({}, 1.0),
        ({"truncated": [True], "final_values": [10.0]}, 1 + 0.99 * 10),
    ):
        buffer = RolloutBuffer(1, 3, 2, 4)
        buffer.add(**step, **options)
        buffer.finish([5.0])
        assert next(buffer.sample(1)).returns.item() == pytest.approx(expected)
    buffer = RolloutBuffer(1, 3, 2, 4)
    buffer.add(**step, truncated=[True])
    with pytest.raises(FieldError, match="final_value"):
        buffer.finish([5.0])


def test_a_liquid_network_is_trained_through_time_from_the_states_that_were_stored() -> None:
    steps = played(8, 2)
    buffer = RolloutBuffer(16, 3, 2, 4, num_envs=2)
    for step in steps:
        buffer.add(**step)
    buffer.finish(torch.zeros(2))
    for seq in buffer.rollout.sequences(4, batch_size=2):
        for b in range(len(seq)):
            t, n = int(seq["start"][b]), int(seq["env"][b])
            assert torch.equal(seq["hidden"][b], steps[t]["hiddens"][n])
