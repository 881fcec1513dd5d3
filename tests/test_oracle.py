"""The oracle against numbers worked out by hand, and the tagged envs against the oracle."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from support import oracle
from support.oracle import Experience, Run, same, split


def column(*numbers: float) -> np.ndarray:
    """One env's numbers as a block [T, 1]."""
    return np.array(numbers, np.float64)[:, None]


def flags(*places: int, length: int) -> np.ndarray:
    """One env's flags [T, 1], set at these places."""
    return np.isin(np.arange(length), places)[:, None]


# Experience


def numbers(rows: list[oracle.Row]) -> list[int]:
    return [row.number for row in rows]


def test_episodes_are_cut_where_they_ended_and_nowhere_else() -> None:
    experience = Experience()
    experience.record(0, obs=1, action=0, reward=1.0, terminated=False, truncated=False, next_obs=2)
    experience.record(0, obs=2, action=0, reward=2.0, terminated=False, truncated=True, next_obs=3)
    experience.record(0, obs=7, action=0, reward=3.0, terminated=True, truncated=False, next_obs=8)
    experience.record(0, obs=9, action=1, reward=4.0, terminated=False, truncated=False)
    assert [len(episode) for episode in experience.episodes(0)] == [2, 1, 1]
    assert [episode.final_obs for episode in experience.episodes(0)] == [3, 8, None]
    assert [episode.done for episode in experience.episodes(0)] == [True, True, False]
    assert [transition.next_obs for transition in experience.transitions()] == [2, 3, 8, None]
    assert [(t.id, t.episode, t.index) for t in experience.transitions()] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 2, 0),
    ]


def test_envs_are_kept_apart_however_their_steps_are_recorded() -> None:
    experience = Experience()
    for t in range(3):
        for env in (4, 1):
            experience.record(
                env, obs=10 * env + t, action=0, reward=t, terminated=env == 1, truncated=False, next_obs=0
            )
            if env == 4:
                experience.episodes(4)[-1].newest_obs = None
    assert experience.envs == [1, 4]
    assert len(experience) == 6
    assert [len(episode) for episode in experience.episodes(1)] == [1, 1, 1]
    assert [len(episode) for episode in experience.episodes(4)] == [3]
    assert experience.episodes(2) == []
    assert [transition.obs for transition in experience.transitions(4)] == [40, 41, 42]


def test_a_hole_in_the_play_is_refused() -> None:
    experience = Experience()
    experience.record(0, obs=1, action=0, reward=0.0, terminated=False, truncated=False, next_obs=2)
    with pytest.raises(AssertionError, match="led to 2, not to 3"):
        experience.record(0, obs=3, action=0, reward=0.0, terminated=False, truncated=False)


def test_an_ended_episode_needs_its_final_observation() -> None:
    with pytest.raises(AssertionError, match="final observation"):
        Experience().record(0, obs=1, action=0, reward=0.0, terminated=True, truncated=False)


def test_observations_are_the_same_only_in_structure_dtype_shape_and_bits() -> None:
    a: dict[str, Any] = {"x": np.array([1, 2]), "y": (np.float32(1.5), np.zeros((2, 2), np.uint8))}
    assert same(a, {"x": np.array([1, 2]), "y": (np.float32(1.5), np.zeros((2, 2), np.uint8))})
    assert not same(a, {"x": np.array([1, 3]), "y": a["y"]})
    assert not same(a, {"x": a["x"].astype(np.float64), "y": a["y"]})
    assert not same(a, {"x": a["x"], "y": (a["y"][0],)})
    assert not same(a, {"x": a["x"]})
    assert not same(np.zeros((2, 1)), np.zeros(2))
    assert not same(a, None)
    assert same(None, None)


# A replay


def replay(rows: int, *plays: str, num_envs: int = 1) -> oracle.Replay:
    """Plays of one letter per env: "." goes on, "T" terminates, "U" is truncated; observations count the rows."""
    twin = oracle.Replay(num_envs, rows)
    for kinds in plays:
        for env, kind in enumerate(kinds):
            obs = len(twin.all_rows(env))
            twin.add(
                env, obs, action=0, reward=2.0**obs, terminated=kind == "T", truncated=kind == "U", next_obs=obs + 1
            )
    return twin


def test_an_episode_of_k_steps_takes_k_plus_1_rows_of_which_the_newest_are_live() -> None:
    twin = replay(4, *".T.U.")
    assert [(row.at, row.obs) for row in twin.all_rows(0)] == [(0, 0), (1, 1), (2, 2), (0, 3), (1, 4), (2, 5), (0, 6)]
    assert [row.complete for row in twin.all_rows(0)] == [True, True, False, True, True, False, False]
    assert numbers(twin.live(0)) == [3, 4, 5, 6]
    assert numbers(twin.anchors()) == [3, 4]
    assert twin.completed == [(0, 0), (0, 1), (0, 3), (0, 4)]
    twin.add(0, 7, 0, 0.0, False, False)
    assert numbers(twin.anchors()) == [4, 6]
    assert numbers(replay(6, *".......").anchors(history=2)) == [3, 4, 5]
    assert numbers(replay(6, *"....T..").anchors(history=2)) == [4, 6]


def test_what_was_interrupted_or_cleared_is_never_complete_and_numbers_go_on() -> None:
    twin = replay(9, *"..")
    twin.interrupt(0)
    twin.add(0, 50, 0, 0.0, False, False)
    assert numbers(twin.anchors()) == [0]
    assert [row.at for row in twin.live(0)] == [0, 1, 0]
    twin.clear()
    assert twin.live(0) == twin.anchors() == []
    twin.add(0, 60, 0, 0.0, True, False, next_obs=61)
    assert [(row.number, row.at) for row in twin.live(0)] == [(3, 0), (4, 1)]
    assert numbers(twin.anchors()) == [3]
    assert twin.completed == [(0, 0), (0, 3)]


def test_transitions_are_in_the_order_of_completion_over_all_envs() -> None:
    twin = replay(9, "..", ".T", "..", num_envs=2)
    assert twin.completed == [(0, 0), (1, 0), (1, 1), (0, 1)]
    assert [twin.index(row) for row in twin.anchors()] == [0, 1, 3, 2]
    assert oracle.recent_count(1000, 0.996, 5, 1, 2) == int(1000 * 0.996**500)
    assert oracle.recent_count(1000, 0.5, 5, 1, 2) == 5
    assert oracle.recent_count(3, 0.5, 5, 1, 2) == 3


def test_windows_and_stacks_stay_within_their_episode_and_what_is_known() -> None:
    twin = replay(20, *"..U...")
    rows = twin.anchors()
    windows = [twin.window(row, 2, 0.5) for row in rows]
    assert [w.reward for w in windows] == [1 + 1, 2 + 2, 4, 16 + 16, 32]
    assert [(w.steps, w.discount, w.last.number) for w in windows] == [
        (2, 0.25, 2),
        (2, 0.25, 3),
        (1, 0.5, 3),
        (2, 0.25, 6),
        (1, 0.5, 6),
    ]
    assert [w.truncated for w in windows] == [False, True, True, False, False]
    assert replay(20, *".T").window(replay(20, *".T").anchors()[0], 5, 0.5).discount == 0.0
    assert [twin.stack(row, 3) for row in rows] == [
        [None, None, 0],
        [None, 0, 1],
        [0, 1, 2],
        [None, None, 4],
        [None, 4, 5],
    ]


def test_rows_that_stand_alone_are_complete_at_once() -> None:
    twin = oracle.Replay(1, 2, alone=True)
    for t in range(3):
        twin.add(0, t, 0, 1.0, t == 1, False, next_obs=t + 10)
    assert numbers(twin.anchors()) == [1, 2]
    assert [twin.window(row, 1, 0.5).discount for row in twin.anchors()] == [0.0, 0.5]
    assert [row.episode.next_obs(0) for row in twin.anchors()] == [11, 12]


def test_priorities_start_at_the_largest_error_so_far_and_end_with_what_can_be_drawn() -> None:
    known = oracle.Priorities()
    known.see([0, 1])
    assert known.update([1, 1, 7], [5.0, -3.0, 100.0]) == 1
    assert known.errors == {0: 1.0, 1: 3.0}
    known.see([1, 2])
    assert known.errors == {1: 3.0, 2: 5.0}
    assert known.probabilities(1.0, 1.0) == {1: 0.4, 2: 0.6}
    assert known.probabilities(0.0, 1.0, among=[2]) == {2: 1.0}
    known.see([])
    known.see([1])
    assert known.errors == {1: 5.0}


# Splitting a block


def test_split_names_what_ended_each_run() -> None:
    terminated = flags(1, 7, length=10)
    truncated = flags(3, 7, length=10)
    mask = ~flags(2, 5, length=10)
    assert split(terminated, truncated, mask) == [
        [
            Run(0, 0, 2, "terminated"),
            Run(0, 3, 4, "truncated"),
            Run(0, 4, 5, "masked"),
            Run(0, 6, 8, "terminated"),
            Run(0, 8, 10, "unfinished"),
        ]
    ]


def test_split_reads_no_flag_of_a_masked_step() -> None:
    everywhere = np.ones((4, 2), bool)
    mask = np.array([[True, False], [False, False], [False, True], [False, False]])
    assert split(everywhere, everywhere, mask) == [[Run(0, 0, 1, "terminated")], [Run(1, 2, 3, "terminated")]]
    nowhere = np.zeros((4, 2), bool)
    assert split(nowhere, nowhere, mask) == [[Run(0, 0, 1, "masked")], [Run(1, 2, 3, "masked")]]


def test_runs_cover_every_real_step_exactly_once() -> None:
    rng = np.random.default_rng(0)
    terminated, truncated, mask = rng.random((3, 40, 20)) < [[[0.2]], [[0.2]], [[0.7]]]
    covered = np.zeros((40, 20), int)
    for env, runs in enumerate(split(terminated, truncated, mask)):
        for run in runs:
            assert run.env == env
            covered[run.t0 : run.t1, env] += 1
            assert not (terminated | truncated)[run.t0 : run.t1 - 1, env].any()
        assert all(one.t1 <= other.t0 for one, other in pairwise(runs))
    assert np.array_equal(covered, mask.astype(int))


# Estimators, by hand


def test_gae_is_right_around_a_terminal_in_the_middle() -> None:
    reward, terminated = column(0, 0, 1, 0, 0), flags(2, length=5)
    value = column(0, 0, 0, 5, 0, 0)
    advantage, ret = oracle.gae(reward, value, terminated, flags(length=5), gamma=0.99, lam=0.95)
    np.testing.assert_allclose(advantage[:, 0], [0.9405**2, 0.9405, 1, -5, 0], rtol=1e-15)
    np.testing.assert_allclose(ret[:, 0], [0.9405**2, 0.9405, 1, 0, 0], rtol=1e-15)


def test_gae_after_a_truncation_values_the_true_final_observation() -> None:
    final_value = column(np.nan, 10, np.nan)
    advantage, ret = oracle.gae(
        column(1, 2, 4),
        column(100, 50, 7, 20),
        flags(length=3),
        flags(1, length=3),
        final_value=final_value,
        gamma=0.5,
        lam=0.5,
    )
    # δ = 1 + 25 - 100, 2 + 5 - 50, 4 + 10 - 7
    np.testing.assert_allclose(advantage[:, 0], [-74 + 0.25 * -43, -43, 7], rtol=1e-15)
    np.testing.assert_allclose(ret[:, 0], [15.25, 7, 14], rtol=1e-15)


def test_gae_at_a_masked_step_stops_at_the_value_of_its_observation() -> None:
    advantage, ret = oracle.gae(
        column(1, 999, 4),
        column(2, 8, 16, 32),
        flags(1, length=3),
        flags(1, length=3),
        mask=~flags(1, length=3),
        gamma=0.5,
        lam=1.0,
    )
    np.testing.assert_allclose(advantage[:, 0], [1 + 4 - 2, 0, 4 + 16 - 16])
    np.testing.assert_allclose(ret[:, 0], [5, 8, 20])


def test_monte_carlo_goes_on_with_the_bootstrap_only_where_the_play_went_on() -> None:
    reward, value = column(1, 1, 1, 1, 1), column(0, 0, 0, 0, 0, 64)
    terminated, truncated, final_value = flags(1, length=5), flags(3, length=5), column(0, 0, 0, 16, 0)
    ret = oracle.monte_carlo(reward, terminated, truncated, value=value, final_value=final_value, gamma=0.5)
    assert ret[:, 0].tolist() == [1.5, 1, 1 + 0.5 + 4, 1 + 8, 1 + 32]
    assert oracle.monte_carlo(reward, terminated, truncated, gamma=0.5)[:, 0].tolist() == [1.5, 1, 1.5, 1, 1]


def test_lambda_return_mixes_the_n_step_returns() -> None:
    reward, value = column(1, 2, 4), column(0, 10, 20, 40)
    ret = oracle.lambda_returns(reward, value, flags(length=3), flags(length=3), gamma=0.5, lam=0.25)
    one, two, three = 1 + 5, 1 + 1 + 5, 1 + 1 + 1 + 5
    assert ret[0, 0] == 0.75 * one + 0.75 * 0.25 * two + 0.0625 * three
    assert ret[2, 0] == 4 + 20


def test_vtrace_multiplies_the_traces_between() -> None:
    log_rho = np.log(column(0.5, 4, 0.25))
    reward, value = column(1, 2, 4), column(0, 10, 20, 40)
    advantage, ret = oracle.vtrace(log_rho, reward, value, flags(length=3), flags(length=3), gamma=0.5)
    # δ = 6, 2, 4;  ρ = c = 0.5, 1, 0.25
    targets = [0.5 * 6 + 0.5 * 0.5 * 2 + 0.25 * 0.5 * 0.25 * 4, 10 + 2 + 0.5 * 0.25 * 4, 20 + 0.25 * 4, 40]
    np.testing.assert_allclose(ret[:, 0], targets[:3], rtol=1e-15)
    expected = [0.5 * (1 + 0.5 * targets[1] - 0), 2 + 0.5 * targets[2] - 10, 0.25 * (4 + 20 - 20)]
    np.testing.assert_allclose(advantage[:, 0], expected, rtol=1e-15)


def test_group_advantage_per_step_compares_envs_at_one_time() -> None:
    reward = np.array([[1.0, 2.0, 0, 0], [1.0, 0, 3.0, 1.0]])
    terminated = np.array([[False, True, False, False], [False, False, True, True]])
    advantage, ret, mask = oracle.group_advantage(reward, terminated, np.zeros((2, 4), bool), group_size=2, gamma=1.0)
    assert mask.tolist() == [[True, True, True, True], [True, False, True, True]]
    assert ret.tolist() == [[2, 2, 3, 1], [1, 0, 3, 1]]
    # The first pair ties at t = 0; at t = 1 one of it is left, and is its own mean.
    np.testing.assert_allclose(advantage, [[0, 0, 1, -1], [0, 0, 1, -1]], atol=1e-7)


def test_group_advantage_per_episode_counts_each_episode_once() -> None:
    reward = np.array([[1.0, 3.0], [1.0, 0.0], [1.0, 0.0]])
    terminated = np.array([[False, True], [False, False], [True, True]])
    truncated = np.zeros((3, 2), bool)
    advantage, ret, mask = oracle.group_advantage(
        reward, terminated, truncated, group_size=2, per="episode", until_first_done=False
    )
    # Three episodes: 3 (three steps), 3 (one step), 0 (two steps); mean 2, std √2.
    assert mask.all()
    assert ret.tolist() == [[3, 3], [3, 0], [3, 0]]
    np.testing.assert_allclose(advantage, [[0.5**0.5, 0.5**0.5], [0.5**0.5, -(2**0.5)], [0.5**0.5, -(2**0.5)]])


def test_group_advantage_of_equals_is_zero() -> None:
    reward = np.ones((3, 4))
    no = np.zeros((3, 4), bool)
    for per in ("step", "episode"):
        advantage, _, mask = oracle.group_advantage(reward, no, no, group_size=4, per=per)
        assert mask.all()
        assert not advantage.any()


def test_normalize_uses_the_unbiased_deviation_of_the_kept_entries() -> None:
    x = np.array([[1.0, 3.0], [100.0, 5.0]])
    mask = np.array([[True, True], [False, True]])
    np.testing.assert_allclose(oracle.normalize(x, mask, eps=0.0), [[-1, 0], [0, 1]])
    assert oracle.normalize(np.array([[4.0]])).tolist() == [[0]]
    assert oracle.normalize(x, np.zeros((2, 2), bool)).tolist() == [[0, 0], [0, 0]]


# Estimators, by each other


@pytest.fixture(scope="module")
def block() -> dict[str, Any]:
    """A block with everything in it: both kinds of end, both at once, unreal steps."""
    rng = np.random.default_rng(1)
    shape = (12, 40)
    return {
        "reward": rng.normal(size=shape),
        "value": rng.normal(size=(13, 40)),
        "terminated": rng.random(shape) < 0.15,
        "truncated": rng.random(shape) < 0.15,
        "final_value": rng.normal(size=shape),
        "mask": rng.random(shape) < 0.85,
    }


def test_gae_and_the_lambda_return_are_one_thing_said_twice(block: dict[str, Any]) -> None:
    for gamma, lam in [(0.9, 0.8), (1.0, 1.0), (0.99, 0.0), (0.0, 0.5)]:
        _, ret = oracle.gae(**block, gamma=gamma, lam=lam)
        np.testing.assert_allclose(ret, oracle.lambda_returns(**block, gamma=gamma, lam=lam), rtol=1e-12, atol=1e-12)


def test_lambda_one_is_monte_carlo_and_lambda_zero_looks_one_step_ahead(block: dict[str, Any]) -> None:
    np.testing.assert_allclose(
        oracle.lambda_returns(**block, gamma=0.9, lam=1.0), oracle.monte_carlo(**block, gamma=0.9), rtol=1e-12
    )
    value, terminated, truncated = block["value"], block["terminated"], block["truncated"]
    following = np.where(terminated, 0, np.where(truncated, block["final_value"], value[1:]))
    expected = np.where(block["mask"], block["reward"] + 0.9 * following, value[:-1])
    np.testing.assert_allclose(oracle.lambda_returns(**block, gamma=0.9, lam=0.0), expected, rtol=1e-12)


def test_on_policy_vtrace_is_the_lambda_return(block: dict[str, Any]) -> None:
    on_policy = np.zeros_like(block["reward"])
    for lam in (1.0, 0.7):
        _, ret = oracle.vtrace(on_policy, **block, gamma=0.9, lam=lam)
        np.testing.assert_allclose(ret, oracle.lambda_returns(**block, gamma=0.9, lam=lam), rtol=1e-11, atol=1e-12)
    advantage, ret = oracle.vtrace(on_policy, **block, gamma=0.9, lam=1.0)
    np.testing.assert_allclose(ret, oracle.monte_carlo(**block, gamma=0.9), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(advantage, ret - block["value"][:-1], rtol=1e-10, atol=1e-12)


def test_vtrace_that_distrusts_every_step_keeps_the_values(block: dict[str, Any]) -> None:
    advantage, ret = oracle.vtrace(np.full((12, 40), -800.0), **block)
    assert np.array_equal(ret, block["value"][:-1])
    assert not advantage.any()
