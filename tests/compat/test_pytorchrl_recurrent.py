"""PyTorchRL's buffers for recurrent actors: sequences with their states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from compat.pytorchrl_play import (
    GAMMA,
    STEP,
    assert_same,
    fed,
    play,
    rows,
    truth,
)
from relive.compat.base import mapped
from relive.compat.pytorchrl import ACT, DONE, DONE2, OBS, OBS2, REW, RHS, RHS2
from relive.errors import LifecycleError, ParameterError
from support.pytorchrl_buffers import made, memory, one_by_one, part, stacked

pytestmark = pytest.mark.usefixtures("no_hosts")


# Sequences, for recurrent actors


@pytest.mark.parametrize("overlap", [0.0, 0.5])
def test_sequences_are_stored_and_served_with_the_states_before_their_first_steps(overlap: float) -> None:
    buffer, steps = made("replay", 16, recurrent=True, overlap=overlap), play(14, 2)
    fed(buffer, steps)
    begins = list(range(0, 11, 2)) if overlap else [0, 4, 8]
    assert (buffer.size, buffer.step, buffer.max_size) == (4 * len(begins), 4 * len(begins), 32)
    in_order = [steps[t] for begin in begins for t in range(begin, begin + 4)]
    data = buffer.get_all_buffer_data()
    for key in STEP:
        assert_same(data[key], stacked(in_order, key))
    for key in (RHS, RHS2):
        assert_same(mapped(lambda x: x[::4], data[key]), stacked([steps[begin] for begin in begins], key))
    for start, end in ((0, 32), (2, 11), (4, 5), (-9, -1), (7, 7)):
        expected = part(memory(in_order, 32), start, end)
        assert_same({key: buffer.get_data_slice(start, end)[key] for key in STEP}, expected)
    (batch,) = buffer.generate_batches(1, 399)
    windows = {(env, begin): one_by_one(steps[begin : begin + 4]) for begin in begins for env in (0, 1)}
    known = {rows(mapped_env(window, env), 4)[0]: at for at, window in windows.items() for env in (at[0],)}
    assert set(rows(batch, per=4)) == set(known)
    for row, *states in zip(rows(batch, per=4), batch[RHS]["rhs_act"], batch[RHS2]["rhs_act"], strict=True):
        env, begin = known[row]
        for state, key in zip(states, (RHS, RHS2), strict=True):
            assert torch.equal(state, steps[begin][key]["rhs_act"][env])


def mapped_env(window: dict[str, Any], env: int) -> dict[str, Any]:
    """One env's rows of a window of two envs, which :func:`one_by_one` laid out."""
    return {key: value[env::2] for key, value in window.items()}


@pytest.mark.parametrize("overlap", [0.0, 0.5])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_next_rows_of_n_step_sequences_miss_no_step_and_have_states_of_the_same_time(n: int, overlap: float) -> None:
    buffer, steps = made("nstep", 80, n, recurrent=True, overlap=overlap), play(40, 2)
    fed(buffer, steps)
    stride = 2 if overlap else 4
    begins = range(0, 40 - 4 - n + 2, stride)
    data = buffer.get_all_buffer_data()
    assert buffer.size == 4 * len(begins)
    firsts = [steps[t] for begin in begins for t in range(begin, begin + 4)]
    lasts = [steps[t + n - 1] for begin in begins for t in range(begin, begin + 4)]
    for key in (OBS, DONE, ACT):
        assert_same(data[key], stacked(firsts, key))
    for key in (OBS2, DONE2):
        assert_same(data[key], stacked(lasts, key))
    assert_same(mapped(lambda x: x[::4], data[RHS]), stacked(firsts[::4], RHS))
    assert_same(mapped(lambda x: x[::4], data[RHS2]), stacked(lasts[::4], RHS2))
    rewards = [[truth(steps, env, t, n)[0] for env in (0, 1)] for begin in begins for t in range(begin, begin + 4)]
    np.testing.assert_allclose(data[REW][..., 0], rewards, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("through_slices", [False, True])
@pytest.mark.parametrize("gamma", [GAMMA, 1.0])
def test_nothing_of_another_episode_gets_into_the_target_of_an_n_step_sequence(
    gamma: float, through_slices: bool
) -> None:
    n, steps = 3, play(60, 2)
    buffer = fed(made("nstep", 80, n, recurrent=True, gamma=gamma), steps)
    if through_slices:
        learner = made("nstep", 80, n, recurrent=True, gamma=gamma)
        learner.insert_data_slice(buffer.get_all_buffer_data())
        buffer = learner
    at = {steps[t][OBS][env].numpy().tobytes(): (env, t) for env in range(2) for t in range(60)}
    (batch,) = buffer.generate_batches(1, 4000)
    assert batch["n_step"].shape == batch[REW].shape == (4000, 1)
    kept = gamma ** batch["n_step"] * (1 - batch[DONE2])  # as the algorithms have it
    seen = set()
    for row, bootstrap in zip(batch[OBS], kept[:, 0], strict=True):
        env, t = at[row.numpy().tobytes()]
        over = any(steps[t + k][DONE2][env] for k in range(n))
        assert bootstrap.item() == pytest.approx(0.0 if over else gamma**n)
        seen.add((env, t))
    assert len(seen) == 2 * buffer.size


def test_the_number_of_steps_of_stored_sequences_is_fixed() -> None:
    buffer = made("nstep", 40, 2, recurrent=True)
    buffer.n_step = 3  # nothing is stored yet
    fed(buffer, play(20, 2))
    buffer.update_storage_parameter("n_step", 3)
    with pytest.raises(LifecycleError, match=r"windows of 3 rewards.*n_step=1"):
        buffer.update_storage_parameter("n_step", 1)
    assert buffer.n_step == 3
    with pytest.raises(ParameterError, match=r"n_step=5.*4 steps.*update_every"):
        fed(made("nstep", 40, 5, recurrent=True), play(1, 2))


@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_sequences_are_of_the_newest_steps(length: int) -> None:
    buffer, steps = made("replay", 10, recurrent=True, length=length), play(8, 2)
    assert_same(fed(buffer, steps).get_all_buffer_data()[OBS], stacked(steps, OBS))


def test_sequences_that_share_all_their_steps_are_refused() -> None:
    with pytest.raises(ParameterError, match=r"sequence_overlap=1\.0.*4 steps.*4 of them"):
        made("replay", 16, recurrent=True, overlap=1.0)
