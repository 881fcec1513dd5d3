"""Returns-to-go: what followed each step in its episode, as far as it is known, and whether the episode ended."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from relive import FrameStack, Hindsight, NStep, ReplayBuffer, ReturnsToGo, Schema, Sequence, Uniform
from relive.errors import LifecycleError, ParameterError, SchemaError
from support.cases import covering
from support.replays import FLAGS, PLAIN
from support.twins import Twin

ENDLESS = 10**6
"""More steps than an episode of these tests has."""

WINDOWS = {
    "transitions": lambda: NStep(1, 0.5),
    "3-step": lambda: NStep(3, 0.5),
    "stacks": lambda: FrameStack(3, NStep(2, 0.5)),
    "sequences": lambda: Sequence(4, 2, "half", 2, 0.5),
    "batch first": lambda: Sequence(3, 0, "none", 1, 0.5, time_first=False),
}

PLAYS = {
    "ends of all kinds": ("....", "..T.", ".U..", "...B", "....", "T...", "....", "..U.", "....", "...."),
    "interrupted": ("....", "....", "|", "....", "..T.", "....", "|", "....", "...."),
    "round the ring": ("....", "...T", "....", "..U.", *["...."] * 9, ".T..", *["...."] * 3),
}


def played(play: str, window: Any, gamma: float) -> Twin:
    twin = Twin(4, 9, view=ReturnsToGo(gamma, window))
    return twin.play(*PLAYS[play])


def wanted(twin: Twin, row: Any, gamma: float) -> tuple[float, bool]:
    found = twin.truth.window(row, ENDLESS, gamma)
    return float(np.float32(found.reward)), found.terminated or found.truncated


@pytest.mark.parametrize(("window", "play", "gamma"), covering(WINDOWS, PLAYS, (1.0, 0.5)))
def test_a_batch_has_what_the_episodes_paid_from_each_step_on(window: str, play: str, gamma: float) -> None:
    inner = WINDOWS[window]()
    twin = played(play, inner, gamma)
    batch = twin.buffer.data()
    index = batch["index"].tolist()
    rows = {twin.truth.index(row): row for row in twin.anchors()}
    assert index == [twin.truth.index(row) for row in twin.anchors()]
    returns, ended = batch["return_to_go"], batch["ended"]
    assert returns.dtype is torch.float32
    assert ended.dtype is torch.bool
    if isinstance(inner, Sequence):
        if not inner.time_first:
            returns, ended = returns.T, ended.T
        check_sequences(twin, inner, gamma, [rows[i] for i in index], returns.numpy(), ended.numpy())
        return
    assert list(zip(returns.tolist(), ended.tolist(), strict=True)) == [wanted(twin, rows[i], gamma) for i in index]


def check_sequences(twin: Twin, view: Sequence, gamma: float, rows: list[Any], returns: Any, ended: Any) -> None:
    _, length, stride, *_ = view.rule
    assert returns.shape == ended.shape == (view.rows, len(rows))
    for b, row in enumerate(rows):
        excerpt = twin.truth.excerpt(row, length, stride, view.burn_in, view.n)
        for t in range(view.rows):
            inside = t < excerpt.burn_in + excerpt.length
            want = wanted(twin, excerpt.rows[t], gamma) if inside else (0.0, False)
            assert (returns[t, b], ended[t, b]) == (pytest.approx(want[0], rel=3e-7), want[1]), f"row {t} of {row}"


@pytest.mark.parametrize("window", WINDOWS)
def test_the_rest_of_a_batch_is_that_of_the_inner_view(window: str) -> None:
    twin = played("round the ring", WINDOWS[window](), 1.0)
    plain = Twin(4, 9, view=WINDOWS[window]()).play(*PLAYS["round the ring"])
    batch, want = twin.buffer.sample(16), plain.buffer.sample(16)
    assert set(batch.keys()) == set(want.keys()) | {"return_to_go", "ended"}
    for name in want.keys():
        assert torch.equal(batch[name], want[name]), name


def test_any_discount_is_followed() -> None:
    twin = played("ends of all kinds", NStep(), 0.9)
    batch = twin.buffer.data()
    want = [wanted(twin, row, 0.9)[0] for row in twin.anchors()]
    np.testing.assert_allclose(batch["return_to_go"].numpy(), want, rtol=1e-6)
    twin.buffer.view.gamma = 0.0
    assert twin.buffer.data()["return_to_go"].tolist() == [row.episode.steps[row.at].reward for row in twin.anchors()]


def test_a_step_with_a_next_observation_of_its_own_has_its_return_too() -> None:
    replay = ReplayBuffer(PLAIN, 20, own_next_obs=True, view=ReturnsToGo(), seed=0)
    for t in range(5):
        replay.add(obs=np.zeros(2), action=0, reward=2.0**t, terminated=t == 2, truncated=False, next_obs=np.ones(2))
    assert replay.data()["return_to_go"].tolist() == [7, 6, 4, 24, 16]
    assert replay.data()["ended"].tolist() == [True, True, True, False, False]


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ParameterError, match="gamma"):
        ReturnsToGo(1.5)
    with pytest.raises(ParameterError, match="window is NStep"):
        ReturnsToGo(1.0, Hindsight(lambda achieved, desired: 0.0))  # pyright: ignore[reportArgumentType]
    with pytest.raises(SchemaError, match="order of time"):
        ReplayBuffer(PLAIN, 20, ordered=False, view=ReturnsToGo())
    with pytest.raises(SchemaError, match="'ended'"):
        ReplayBuffer(Schema({"obs": (2,), "reward": (), "ended": (), **FLAGS}), 20, view=ReturnsToGo())
    inner = NStep()
    first = ReplayBuffer(PLAIN, 20, view=ReturnsToGo(1.0, FrameStack(2, inner)))
    with pytest.raises(LifecycleError, match="another buffer"):
        ReplayBuffer(PLAIN, 20, view=inner)
    assert first.view.window.depth == 2


def test_a_save_keeps_the_view(tmp_path: Any) -> None:
    twin = played("ends of all kinds", FrameStack(2, NStep(3, 0.5)), 0.5)
    twin.buffer.save(tmp_path / "save")
    loaded: ReplayBuffer[Uniform, Any] = ReplayBuffer.load(tmp_path / "save")
    assert loaded.view == twin.buffer.view
    want, got = twin.buffer.sample(8), loaded.sample(8)
    assert all(torch.equal(got[name], want[name]) for name in want.keys())
