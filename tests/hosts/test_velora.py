"""Velora's replay buffer and ours side by side, and Velora's own agent on ours."""

from __future__ import annotations

import json
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from relive.compat.velora import BatchExperience, ReplayBuffer

import_module("velora.models")  # Velora's buffer cannot be imported before its models
agents: Any = import_module("velora.models.nf.agent")
theirs: Any = import_module("velora.buffer")

pytestmark = pytest.mark.filterwarnings("ignore")

NAMES = ("states", "actions", "rewards", "next_states", "dones", "hiddens")
SIZES = (3, 2, 1, 3, 1, 4)


def rows(count: int, seed: int) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    made = [torch.from_numpy(rng.normal(size=(count, size)).astype(np.float32)) for size in SIZES]
    made[4] = made[4] > 0
    return made


def pair(capacity: int = 10, count: int = 0, **options: Any) -> tuple[Any, Any]:
    buffers = theirs.ReplayBuffer(capacity, 3, 2, 4, **options), ReplayBuffer(capacity, 3, 2, 4, **options)
    for buffer in buffers if count else ():
        buffer.add_multi(*rows(count, 0))
    return buffers


def assert_same(one: Any, other: Any) -> None:
    assert one.metadata() == other.metadata()
    assert (one.position, one.size, len(one)) == (other.position, other.size, len(other))
    state, ours = one.state_dict(), other.state_dict()
    assert list(state) == list(ours) == list(NAMES)
    for name, x in state.items():
        for column in (ours[name], getattr(other, name)):
            assert (x.shape, x.dtype, x.device) == (column.shape, column.dtype, column.device)
            assert torch.equal(x, column), name


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
@pytest.mark.parametrize("capacity", [2, 7, 10])
def test_every_row_and_cursor_is_equal_after_any_steps(capacity: int, device: Any) -> None:
    one, other = pair(capacity, device=device)
    rng = np.random.default_rng(0)
    assert_same(one, other)
    for seed in range(25):
        count = int(rng.integers(1, 2 * capacity + 1))
        if seed % 2:
            state, action, reward, following, done, hidden = (column[0] for column in rows(count, seed))
            for buffer in (one, other):  # shaped as Velora's agent hands them over
                arguments = state.double(), action[None], float(reward), following, bool(done), hidden[None]
                buffer.add(*arguments)
        else:
            states, actions, rewards, following, dones, hiddens = rows(count, seed)
            for buffer in (one, other):
                buffer.add_multi(states.double(), actions, rewards[:, 0], following, dones[:, 0], hiddens)
        assert_same(one, other)


@pytest.mark.parametrize("count", [0, 4, 10, 17])
def test_a_buffer_of_velora_becomes_ours_with_its_rows_in_their_places(count: int) -> None:
    one, _ = pair(10)
    if count:
        one.add_multi(*rows(count, 0)) if count <= 10 else [one.add_multi(*rows(9, seed)) for seed in (0, 1)]
    made = ReplayBuffer.from_original(one, seed=0)
    assert_same(one, made)
    for buffer in (one, made):
        buffer.add_multi(*rows(3, 5))
    assert_same(one, made)


def test_batches_are_of_the_same_form_and_of_the_same_rows() -> None:
    one, other = pair(10, 7)
    stored = set(one.rewards[:7, 0].tolist())
    for buffer in (one, other):
        batch = buffer.sample(7)
        assert set(batch.rewards[:, 0].tolist()) <= stored
        for name, size in zip(NAMES, SIZES, strict=True):
            x = getattr(batch, name)
            assert (tuple(x.shape), x.dtype, x.is_contiguous()) == ((7, size), torch.float32, True)
        seen = {reward for _ in range(60) for reward in buffer.sample(7).rewards[:, 0].tolist()}
        assert seen == stored
        assert any(len(set(buffer.sample(7).rewards[:, 0].tolist())) < 7 for _ in range(60))
    fields = [list(kind.__dataclass_fields__) for kind in (theirs.BatchExperience, BatchExperience)]
    assert fields[0] == fields[1]


def test_what_veloras_refuses_ours_refuses_with_an_error_of_the_same_type_and_words() -> None:
    messages = []
    for buffer in pair(10, 3):
        with pytest.raises(ValueError, match="enough experiences") as caught:
            buffer.sample(4)
        messages.append(str(caught.value))
        with pytest.raises(ValueError, match="cannot be smaller than 2") as caught:
            buffer.warm(None, 5, num_envs=1)
        messages.append(str(caught.value))
        state, action, reward, following, done, hidden = (column[0] for column in rows(1, 0))
        with pytest.raises(RuntimeError):
            buffer.add(state[:2], action, reward, following, done, hidden)
        with pytest.raises(RuntimeError):
            buffer.add_multi(*[torch.zeros(2, 5)] * 6)
    assert messages[:2] == messages[2:]


def test_both_describe_themselves_alike_and_take_the_same_arguments() -> None:
    one, other = pair(10, 3)
    assert one.config() == other.config()
    assert type(one.config()) is type(other.config())
    for name in ("__init__", "add", "add_multi", "sample", "warm", "metadata", "state_dict", "save", "load", "config"):
        host, ours = (signature(getattr(kind, name)).parameters for kind in (type(one), type(other)))
        assert list(ours)[: len(host)] == list(host), name
        assert all(ours[key].default == parameter.default for key, parameter in host.items()), name
        assert all(p.kind is Parameter.KEYWORD_ONLY for p in list(ours.values())[len(host) :]), name


@pytest.mark.parametrize("count", [0, 4, 10, 17])
def test_files_are_the_same_but_for_a_checksum_and_each_reads_those_of_the_other(tmp_path: Path, count: int) -> None:
    buffers = pair(10, count)
    for name, buffer in zip(("one", "other"), buffers, strict=True):
        buffer.save(tmp_path / name)
    one, other = ((tmp_path / name / "buffer_metadata.json").read_bytes() for name in ("one", "other"))
    assert one == other
    one, other = ((tmp_path / name / "buffer_state.safetensors").read_bytes() for name in ("one", "other"))
    data = 4 * 10 * sum(x.shape[1] for x in buffers[0].state_dict().values())
    assert one[-data:] == other[-data:]
    for written, kind in (("one", ReplayBuffer), ("other", theirs.ReplayBuffer)):
        metadata = json.loads((tmp_path / written / "buffer_metadata.json").read_text())
        again = kind.load(tmp_path / written / "buffer_state", metadata)
        one, other = (again, buffers[1]) if kind is theirs.ReplayBuffer else (buffers[0], again)
        assert one.metadata() | {"device": None} == other.metadata() | {"device": None}
        for extra in (3, 12):
            for name in NAMES:
                assert torch.equal(getattr(one, name), getattr(other, name)), name
            if kind is theirs.ReplayBuffer:
                one.add_multi(*rows(extra, extra))
                other.add_multi(*rows(extra, extra))


class Follow(gym.Env[Any, Any]):
    """The action is to be the number that is shown; ten numbers an episode."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 1}  # noqa: RUF012 - Gymnasium's own form

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        self.shown = self.np_random.uniform(-0.8, 0.8, 2).astype(np.float32)
        return self.shown, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = -abs(float(np.asarray(action).reshape(-1)[0]) - float(self.shown[0]))
        self.t += 1
        self.shown = self.np_random.uniform(-0.8, 0.8, 2).astype(np.float32)
        return self.shown, reward, False, self.t == 10, {}

    def render(self) -> Any:
        return np.zeros((4, 4, 3), np.uint8)


gym.register("Follow-v0", entry_point=Follow)


def distance(agent: Any, steps: int = 200) -> float:
    """The mean distance of the agent's best guess from what is shown."""
    env = Follow()
    state, _ = env.reset(seed=9)
    total, hidden = 0.0, None
    for t in range(steps):
        action, hidden = agent.predict(torch.from_numpy(state), hidden)
        state, reward, _, over, _ = env.step(action.numpy())
        total -= reward
        if over:
            state, _ = env.reset(seed=t)
            hidden = None
    return total / steps


@pytest.mark.parametrize("seed", range(3))
def test_veloras_agent_learns_on_our_buffer_and_comes_back_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.chdir(tmp_path)  # Velora keeps its figures in the working directory
    reached = []
    for kind in (theirs.ReplayBuffer, ReplayBuffer):
        monkeypatch.setattr(agents, "ReplayBuffer", kind)
        torch.manual_seed(seed)
        agent = agents.NeuroFlowCT(
            "Follow-v0", 20, 64, buffer_size=5000, actor_lr=3e-3, critic_lr=3e-3, alpha_lr=3e-3, gamma=0.5, seed=seed
        )
        assert type(agent.buffer) is kind
        before = distance(agent)
        agent.train(64, n_episodes=60, display_count=1000, log_freq=1000, window_size=10, warmup_steps=300)
        reached.append(distance(agent))
        assert reached[-1] < before / 2, (before, reached)
    assert reached[1] < max(1.5 * reached[0], 0.15), reached
    agent.save(tmp_path / "saved", buffer=True)
    again = agents.NeuroFlowCT.load(tmp_path / "saved", buffer=True)
    assert type(again.buffer) is ReplayBuffer
    assert torch.equal(again.buffer.states, agent.buffer.states)
    assert again.buffer.position == agent.buffer.position
