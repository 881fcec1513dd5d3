"""Every mistake of docs/traps.md that stored steps or draws can show, planted by a loop, and found by its name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import relive
from support import loops
from support.effort import first_of
from support.loops import Arrays

SEEDS = pytest.mark.parametrize("seed", first_of(1, range(2)))


def sure(report: Any) -> set[str]:
    return {finding.rule for finding in report.findings if finding.sure != "possible"}


def rules(report: Any) -> set[str]:
    return {finding.rule for finding in report.findings}


# -- episode ends: what advantages say of them ----------------------------------------------------------------------


@SEEDS
@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
def test_advantages_that_stop_at_ends_are_right(lam: float, seed: int) -> None:
    report = relive.audit(loops.rollout(lam=lam, seed=seed))
    assert not report.findings, str(report)


TARGETS = {
    "late": "advantage-over-an-end",  # GAE reads the flag of the following row
    "through": "advantage-over-an-end",  # the recursion runs through a truncation
    "before": "bootstrap-before-the-step",
    "terminal": "truncation-without-bootstrap",
    "next": "bootstrap-from-the-next-episode",
    "open": "rollout-end-without-bootstrap",
}


@SEEDS
@pytest.mark.parametrize("mistake", TARGETS)
def test_advantages_with_a_mistake_at_ends_are_found(mistake: str, seed: int) -> None:
    report = relive.audit(loops.rollout(mistake, lam=1 - 0.1 * seed, seed=seed))
    assert sure(report) == {TARGETS[mistake]}, str(report)


def test_returns_serve_as_well_as_advantages_and_normalised_advantages_say_nothing() -> None:
    for mistake in ("", "terminal"):
        rows = loops.rollout(mistake)
        total = rows["value"] + rows["advantage"]
        expected = {TARGETS[mistake]} if mistake else set[str]()
        assert sure(relive.audit({**rows, "return": total})) == expected
        advantage = (rows.pop("advantage") - 3) / 7
        assert sure(relive.audit({**rows, "return": total})) == expected
        assert sure(relive.audit({**rows, "advantage": advantage})) == set()


def test_with_one_flag_for_both_kinds_of_end_only_what_is_wrong_for_both_is_said() -> None:
    for mistake, expected in (("", set[str]()), ("terminal", set[str]()), ("late", {"advantage-over-an-end"})):
        rows = loops.rollout(mistake)
        rows["done"] = rows.pop("terminated") | rows.pop("truncated")
        del rows["final_value"]
        assert sure(relive.audit(rows)) - {"time-limit-as-terminal"} == expected


@SEEDS
def test_rewards_to_which_a_bootstrap_value_was_added_are_found_and_may_be_meant(seed: int) -> None:
    report = relive.audit(loops.rollout("edited", seed=seed))
    assert "reward-holds-a-value" in rules(report), str(report)
    assert "reward-holds-a-value" not in sure(report)


def test_rewards_that_end_an_episode_with_a_bonus_hold_no_value() -> None:
    rows = loops.rollout()
    for bonus in (100.0, -100.0):
        rows["reward"] = np.where(rows["terminated"], bonus, 0).astype(np.float32)
        assert "reward-holds-a-value" not in rules(relive.audit(rows))


# -- episode ends: what is stored of them ---------------------------------------------------------------------------


def test_final_observations_of_envs_that_did_not_end_are_found() -> None:
    report = relive.audit(loops.final_of_all())
    assert sure(report) == {"unmarked-end"}, str(report)


def test_a_ring_that_stores_each_observation_once_loses_final_ones() -> None:
    """As cpprb's ``next_of`` without ``on_episode_end()``, or LeRobot's and Tianshou's ways to save memory."""
    rows = loops.stored(loops.walk())
    once = {**rows, "next_obs": np.append(rows["obs"][1:], rows["next_obs"][-1:], 0)}
    assert sure(relive.audit(once)) == {"reset-as-final-observation"}
    assert sure(relive.audit(loops.without_next_obs(rows))) == {"truncation-without-final-observation"}


# -- n-step transitions that were stored ready made -----------------------------------------------------------------


def test_windows_that_stop_at_their_own_ends_are_right() -> None:
    report = relive.audit(loops.windows(""))
    assert not report.findings, str(report)


def test_a_sum_of_rewards_that_episodes_cut_short_is_no_reward_of_the_row_before() -> None:
    """With a reward of 1 for each step, as in CartPole, only the sums near ends differ, and an end foretells them."""
    rows = loops.windows("first")
    cut = rows["terminated"].astype(bool) | rows["truncated"]
    rows["reward"] = np.where(cut, 1.0, 2.9701).astype(np.float32)
    report = relive.audit(rows)
    assert "reward-one-step-off" not in sure(report), str(report)
    assert any("rows are n-step transitions" in lack for lack in report.lacks if "reward-one-step-off" in lack)


@pytest.mark.parametrize(("mistake", "rule"), [
    ("first", "n-step-over-an-end"), ("others", "n-step-cut-short"), ("tails", "n-step-tail-missing"),
    ("sums", "flag-not-binary"),
])  # fmt: skip
def test_windows_with_a_mistake_at_ends_are_found(mistake: str, rule: str) -> None:
    report = relive.audit(loops.windows(mistake))
    assert rule in sure(report), str(report)
    assert sure(report) <= {rule, "n-step-over-an-end", "n-step-flag-of-first-step"}, str(report)


@pytest.mark.parametrize("members", [("x",), ("x", "goal")])
def test_windows_over_the_ends_of_short_episodes_are_found_whatever_a_constant_goal_does(
    members: tuple[str, ...],
) -> None:
    size = 60
    obs = {"x": np.arange(size + 2, dtype=np.float32)[:, None] ** 1.3, "goal": np.ones((size + 2, 1), np.float32)}
    ended = np.isin(np.arange(size) % 6, (4, 5))  # every second episode has one step
    report = relive.audit({
        "obs": {name: obs[name][:size] for name in members}, "next_obs": {name: obs[name][2:] for name in members},
        "action": obs["x"][:size], "reward": obs["x"][:size, 0], "terminated": ended, "truncated": ended & False,
    })  # fmt: skip
    (found,) = (finding for finding in report.findings if finding.rule == "n-step-over-an-end")
    assert found.rows == 18


def three_step(rows: Arrays, start: int, gamma: float = 0.9) -> Arrays:
    """The 3-step window from a row of a ring, with nothing looked at but the place of the rows."""
    size = len(rows["reward"])
    at = (start + np.arange(3)) % size
    reward = (rows["reward"][at] * gamma ** np.arange(3)).sum()
    return {"index": start, "obs": rows["obs"][start], "reward": reward, "next_obs": rows["next_obs"][at[-1]],
            "terminated": rows["terminated"][at[-1]]}  # fmt: skip


def test_a_batch_whose_windows_run_over_the_rings_seam_is_found() -> None:
    rows = {name: x[:50] for name, x in loops.stored(loops.walk(5, stop=0.0)).items()}
    size = len(rows["reward"])

    def batch(starts: list[int]) -> Arrays:
        found = [three_step(rows, start) for start in starts]
        return {name: np.stack([window[name] for window in found]) for name in found[0]}

    assert not relive.audit(rows, batch=batch([0, 5, 20]), n=3, gamma=0.9).findings
    report = relive.audit(rows, batch=batch([0, 5, size - 2, size - 1]), n=3, gamma=0.9)
    (finding,) = report.findings
    assert (finding.rule, finding.rows) == ("n-step-over-an-end", 2)
    assert "seam" in finding.what


def test_a_batch_whose_rewards_alone_are_summed_over_the_seam_is_found() -> None:
    """As in FastTD3's full ring: windows stop at the newest step, but their rewards do not."""
    rows = {name: x[:50] for name, x in loops.stored(loops.walk(5, stop=0.0)).items()}
    size = len(rows["reward"])
    windows = [three_step(rows, start) for start in (5, size - 2, size - 1)]
    for window in windows[1:]:
        window["next_obs"] = rows["next_obs"][size - 1]
    batch = {name: np.stack([window[name] for window in windows]) for name in windows[0]}
    (finding,) = relive.audit(rows, batch=batch, n=3, gamma=0.9).findings
    assert (finding.rule, finding.rows, "seam" in finding.what) == ("n-step-over-an-end", 2, True)

    batch["reward"][1:] = [rows["reward"][-2] + 0.9 * rows["reward"][-1], rows["reward"][-1]]  # they stop as well
    assert not relive.audit(rows, batch=batch, n=3, gamma=0.9).findings


# -- goals ----------------------------------------------------------------------------------------------------------


def test_goals_drawn_as_if_all_episodes_had_one_length_are_found() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 15, 30)
    size, ends = int(lengths.sum()), np.zeros(int(lengths.sum()), bool)
    ends[np.cumsum(lengths) - 1] = True
    reached = rng.normal(size=(size, 1))
    before, goal = np.roll(reached, 1, 0), np.full((size, 1), 9.0)
    before[0], before[np.flatnonzero(ends)[:-1] + 1] = 0, rng.normal(size=(29, 1))

    def obs(at: Any, desired: Any) -> Arrays:
        return {"observation": at, "achieved_goal": at, "desired_goal": desired}

    rows = {"obs": obs(before, goal), "next_obs": obs(reached, goal), "reward": rng.normal(size=size),
            "action": rng.normal(size=(size, 1)), "terminated": ends}  # fmt: skip
    index = np.arange(0, size - 15, 3)
    for window, expected in ((15, {"goal-of-another-episode"}), (1, set[str]())):
        chosen = index // window * window + window - 1  # "the last step of the episode"
        batch = {"index": index, "obs": obs(before[index], reached[chosen]), "reward": rows["reward"][index],
                 "next_obs": obs(reached[index], reached[chosen]), "terminated": ends[index]}  # fmt: skip
        assert rules(relive.audit(rows, batch=batch)) - {"n-step-sum", "constant-field"} == expected


# -- draws ----------------------------------------------------------------------------------------------------------


def drawn(rows: Arrays, starts: Any, length: int = 1) -> Any:
    return relive.audit(rows, draws=np.asarray(starts)[..., None] + np.arange(length) if length > 1 else starts)


def test_episodes_that_cannot_be_drawn_are_found() -> None:
    """As an episode as long as the buffer, or the rows that do not fill a minibatch."""
    rows = loops.stored(loops.walk(10, stop=0.0))
    size, rng = len(rows["reward"]), np.random.default_rng(0)
    assert relive.audit(rows, draws=rng.integers(size, size=(500, 32))).ok
    assert "steps-never-drawn" in rules(relive.audit(rows, draws=rng.integers(80, size, size=(500, 32))))
    epochs = np.stack([rng.permutation(size - size % 64) for _ in range(20)])
    assert "steps-never-drawn" in rules(relive.audit(rows, draws=epochs))


def test_sequences_in_the_same_order_every_epoch_are_found() -> None:
    rows = loops.stored(loops.walk(16, stop=0.0))
    starts = np.arange(0, len(rows["reward"]), 8)
    rng = np.random.default_rng(0)
    assert "same-order-every-epoch" in rules(drawn(rows, np.tile(starts, (10, 1)), 8))
    shuffled = np.stack([rng.permutation(starts) for _ in range(10)])
    assert not rules(drawn(rows, shuffled, 8))


def test_draws_that_favour_short_episodes_are_found_and_may_be_meant() -> None:
    rows = loops.stored(loops.walk(20, stop=0.08))
    rng, ends = np.random.default_rng(0), np.flatnonzero(rows["terminated"] | rows["truncated"])
    begins = np.append(0, ends[:-1] + 1)
    episode = rng.integers(20, size=40_000)
    by_episode = begins[episode] + (rng.random(40_000) * (ends - begins + 1)[episode]).astype(int)
    report = relive.audit(rows, draws=by_episode.reshape(-1, 32))
    assert rules(report) == {"short-episodes-favoured"}
    assert report.ok
    assert not relive.audit(rows, draws=rng.integers(len(rows["reward"]), size=(1250, 32))).findings


# -- dtypes ---------------------------------------------------------------------------------------------------------


def test_discrete_actions_as_floats_are_found_and_may_be_meant() -> None:
    rows = loops.stored(loops.walk())
    rows["action"] = np.random.default_rng(0).integers(0, 4, len(rows["reward"])).astype(np.float32)
    report = relive.audit(rows)
    assert rules(report) == {"actions-as-floats"}
    assert report.ok
    assert not relive.audit({**rows, "action": rows["action"].astype(np.int64)}).findings
