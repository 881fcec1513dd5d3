"""Hindsight: every goal comes from an allowed step of the row's own episode, and all that depends on it is told anew."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from relive import (
    Field,
    Hindsight,
    Mixture,
    NStep,
    Prioritized,
    Recent,
    ReplayBuffer,
    Schema,
    Transition,
    Uniform,
    WithoutReplacement,
)
from relive.errors import DTypeError, FieldError, FileFormatError, NotFiniteError, SchemaError, ShapeError
from relive.kernels import cpu, reference
from twins import SAMPLERS, Twin, batch_leaves, same_batches

STRATEGIES = ("future", "final", "episode", "past", "random")


def plays(alphabet: str, longest: int) -> Iterator[tuple[str, ...]]:
    for length in range(2, longest + 1):
        yield from itertools.product(alphabet, repeat=length)


# What steps come to with a goal. Goals are tags (env, episode, step, seed), or images of them: each names its row.


def numbers(goals: Any) -> Any:
    """Goals ``[M, ...]`` as numbers ``[M]`` that tell them apart; exact in float32."""
    flat = np.asarray(goals).reshape(len(goals), -1)
    tag = flat[:, :16].reshape(len(goals), 4, -1)[..., 0] if flat.dtype == np.uint8 else flat
    return (tag[:, 0] * 64 + tag[:, 1] * 16 + tag[:, 2]).astype(np.float32)


def worth(achieved: Any, desired: Any) -> Any:
    """No two arguments that are mixed up, or of another row, give the same."""
    return (numbers(achieved) * 3 - numbers(desired)) / 8


def reached(achieved: Any, desired: Any) -> Any:
    """Of some steps of every goal: those that are 0 or 3 steps away from it."""
    return (numbers(achieved) - numbers(desired)) % 3 == 0


def stopped(achieved: Any, desired: Any) -> Any:
    return (numbers(achieved) + 2 * numbers(desired)) % 5 == 1


FUNCTIONS: dict[str, dict[str, Any]] = {
    "reward": {},
    "terminated": {"terminated_fn": reached},
    "both flags": {"terminated_fn": reached, "truncated_fn": stopped},
}


class HerTwin(Twin):
    """A twin that knows what hindsight may make of a row: one of several things, one for each goal."""

    def check_drawn(self, batch: Any, view: Hindsight) -> Counter[tuple[int, int | None]]:
        """Every item is as recorded, or as the list of episodes gives it for an allowed goal: which, by index."""
        found = batch_leaves(batch)
        rows = {self.truth.index(row): row for row in self.anchors()}
        drawn: Counter[tuple[int, int | None]] = Counter()
        plain = NStep(view.n, view.gamma)
        for b, index in enumerate(found["index",].tolist()):
            row = rows[index]
            item = {path: array[b] for path, array in found.items()}
            relabelled = bool(item.pop(("relabelled",)))
            want, goal = self.item(row, plain), None
            if relabelled:
                allowed = self.truth.goal_rows(row, view.strategy, view.finished_only)
                matches = [g for g in allowed if oracle.same(g.obs["achieved_goal"], item["obs", "desired_goal"])]
                assert len(matches) == 1, f"{index}: goal {item['obs', 'desired_goal']} is not of {allowed}"
                goal = self.truth.index(matches[0])
                want = self.relabelled_item(row, matches[0], view, want)
            assert item.keys() - {("weight",), ("probability",)} == want.keys()
            for path, value in want.items():
                assert item[path].dtype == value.dtype, path
                assert np.array_equal(item[path], value), f"{path} of {index} for goal {goal}: {item[path]}, not {value}"
            drawn[index, goal] += 1
        return drawn

    def relabelled_item(self, row: Any, goal: Any, view: Hindsight, plain: dict[Any, Any]) -> dict[Any, Any]:
        """What a view makes of a transition with another goal, by hand."""
        desired = goal.obs["achieved_goal"]

        def judge(step: oracle.Step, after: Any) -> tuple[float, bool, bool]:
            pair = after["achieved_goal"][None], desired[None]
            flags = [
                bool(function(*pair)[0]) if function else recorded
                for function, recorded in ((view.terminated_fn, step.terminated), (view.truncated_fn, step.truncated))
            ]
            return float(view.reward_fn(*pair)[0]), *flags

        window = self.truth.hindsight(row, view.n, view.gamma, judge)
        after = row.episode.next_obs(window.last.at - 1)
        found = {path: value for path, value in plain.items() if path[0] != "next_obs"}
        found |= {("next_obs", name): member for name, member in after.items()}
        found |= {(name, "desired_goal"): desired for name in ("obs", "next_obs")}
        results = {
            "reward": np.float32(window.reward),
            "discount": np.float32(window.discount),
            "terminated": np.bool_(window.terminated),
            "truncated": np.bool_(window.truncated),
            "steps": np.int32(window.steps),
            "next_index": np.int64(self.truth.index(window.last)),
        }
        return found | {(name,): np.asarray(value) for name, value in results.items()}


def view_of(strategy: str = "future", n: int = 1, functions: str = "terminated", **more: Any) -> Hindsight:
    return Hindsight(worth, strategy, n=n, gamma=0.5, ratio=0.8, **{**FUNCTIONS[functions], **more})


def check_play(num_envs: int, rows: int, play: tuple[str, ...], views: list[Hindsight], dress: str = "goals") -> None:
    """After a play, through every view: what is drawn, what is read without a draw, the invariants."""
    twin = HerTwin(num_envs, rows, dress=dress).play(*play)
    for view in views:
        twin.buffer.view = view
        data = twin.buffer.data()
        assert not data["relabelled"].any()
        assert not twin.check_drawn(data, view) - Counter((i, None) for i in data["index"].tolist())
        if len(twin.buffer):
            twin.check_drawn(twin.buffer.sample(24), view)
        twin.buffer.check()


VIEWS = [view_of(strategy, n, functions) for strategy in STRATEGIES for n, functions in ((1, "reward"), (3, "both flags"))]


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_every_short_play_gives_goals_of_the_list_of_episodes(rows: int) -> None:
    for play in itertools.chain(plays(".TU", 4), plays(".T|", 4)):
        check_play(1, rows, play, VIEWS)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 3, 4, 6])
def test_every_longer_play_does_so_as_well(rows: int) -> None:
    views = [view_of(s, n, f) for s in STRATEGIES for n in (1, 2, 4) for f in FUNCTIONS]
    for play in itertools.chain(plays(".U", 7), plays(".T|x", 5)):
        check_play(1, rows, play, views)


@pytest.mark.parametrize("dress", ["goals", "image goals"])
@pytest.mark.parametrize("seed", range(4))
def test_several_envs_that_wrap_at_different_times_keep_their_goals_apart(dress: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    twin = HerTwin(3, 7, dress=dress)
    views = [view_of(s, n, f, finished_only=only) for s, (n, f), only in zip(
        STRATEGIES * 2, itertools.cycle([(1, "terminated"), (3, "both flags"), (2, "reward")]), [False, True] * 5,
        strict=False)]  # fmt: skip
    for t in range(60):
        chosen = rng.permutation(3)[: rng.integers(1, 4)].tolist()
        twin.add("".join(rng.choice(list(".....TUB"), len(chosen))), envs=chosen)
        if rng.random() < 0.05:
            twin.interrupt([int(rng.integers(3))])
        if t % 5 == 4 and len(twin.buffer):
            view = twin.buffer.view = views[int(rng.integers(len(views)))]
            twin.check_drawn(twin.buffer.sample(16), view)
            twin.buffer.check()


@given(st.data())
@settings(max_examples=30)
def test_any_play_of_any_envs_gives_goals_of_the_list_of_episodes(data: st.DataObject) -> None:
    num_envs, rows = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 12))
    view = view_of(
        data.draw(st.sampled_from(STRATEGIES)), data.draw(st.integers(1, 6)), data.draw(st.sampled_from(list(FUNCTIONS))),
        finished_only=data.draw(st.booleans()),
    )  # fmt: skip
    twin = HerTwin(num_envs, rows, dress="goals", view=view)
    for _ in range(data.draw(st.integers(1, 6))):
        plays = data.draw(st.lists(st.text("...TU", min_size=num_envs, max_size=num_envs), min_size=1, max_size=8))
        twin.extend(plays)
        if data.draw(st.booleans()):
            twin.interrupt()
        if len(twin.buffer):
            twin.check_drawn(twin.buffer.sample(12), view)
    twin.buffer.check()


# Which goals, how often. A statistic is a chi-square over the goals of one anchor, as standard deviations of it.


def z_of(counts: list[int]) -> float:
    """How far equal shares are off, in standard deviations of chi-square."""
    expected, df = sum(counts) / len(counts), len(counts) - 1
    chi2 = sum((count - expected) ** 2 / expected for count in counts)
    return (chi2 - df) / math.sqrt(2 * df)


def many(view: Hindsight, play: str, rows: int, batches: int) -> tuple[HerTwin, Counter[tuple[int, int | None]]]:
    """How often each anchor of one env got each goal."""
    twin = HerTwin(1, rows, dress="goals", view=view).play(*play)
    index_of = {tuple(r.obs["achieved_goal"]): twin.truth.index(r) for r in twin.truth.live(0)}
    drawn: Counter[tuple[int, int | None]] = Counter()
    for _ in range(batches):
        batch = twin.buffer.sample(4096)
        goals = batch["obs", "desired_goal"].numpy()
        for index, goal, new in zip(batch["index"].tolist(), map(tuple, goals), batch["relabelled"].tolist(), strict=True):
            drawn[index, index_of[goal] if new else None] += 1
    return twin, drawn


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_allowed_goal_comes_equally_often_and_a_bias_of_one_percent_would_show(strategy: str) -> None:
    view = Hindsight(worth, strategy, ratio=0.8)
    twin, drawn = many(view, "...T" + "." * 9 + "U" + ".....", 17, 60)
    total = sum(drawn.values())
    kept = sum(count for (_, goal), count in drawn.items() if goal is None)
    aims = {twin.truth.index(row): [twin.truth.index(goal) for goal in twin.truth.goal_rows(row, strategy)]
            for row in twin.anchors()}  # fmt: skip
    free = sum(count for (index, _), count in drawn.items() if aims[index])
    new = total - kept
    assert abs(new - 0.8 * free) < 5 * math.sqrt(0.16 * free)  # 1 % of bias is 0.008 * 245,760, or 10 of these
    assert 0.008 * free > 8 * math.sqrt(0.16 * free)
    scores = []
    for index, allowed in aims.items():
        assert {goal for i, goal in drawn if i == index and goal is not None} == set(allowed)
        counts = [drawn[index, goal] for goal in allowed]
        if len(counts) > 1:
            scores.append(z_of(counts))
    assert all(z < 6 for z in scores), scores  # chance exceeds it in less than one anchor of 10,000
    if not scores:
        return
    assert sum(scores) / math.sqrt(len(scores)) < 5
    biased = []  # 1 % of an anchor's goals are the first of those allowed instead: all anchors together show it
    for index, allowed in aims.items():
        counts = [drawn[index, goal] for goal in allowed]
        if len(counts) > 1:
            moved = [round(0.01 * count) for count in counts]
            counts = [count - lost for count, lost in zip(counts, moved, strict=True)]
            biased.append(z_of([counts[0] + sum(moved), *counts[1:]]))
    assert sum(biased) / math.sqrt(len(biased)) > 5


def test_which_rows_are_relabelled_is_drawn_for_each_row_by_itself() -> None:
    _, drawn = many(Hindsight(worth, k=4), "...........", 12, 20)
    for index in range(10):
        total = sum(count for (i, _), count in drawn.items() if i == index)
        assert abs(drawn[index, None] - total / 5) < 5 * math.sqrt(0.16 * total)


@pytest.mark.parametrize(("ratio", "share"), [(0.0, 0), (1.0, 1)])
def test_a_ratio_of_nothing_or_all_relabels_nothing_or_all(ratio: float, share: int) -> None:
    twin = HerTwin(2, 20, dress="goals", view=Hindsight(worth, ratio=ratio)).play(*[".."] * 15)
    assert twin.buffer.sample(200)["relabelled"].float().mean() == share


# Traps, by the names of those that others fell into.


def test_goals_never_come_from_another_episode_after_the_ring_has_wrapped() -> None:
    for strategy in ("final", "episode", "future", "past"):
        view = view_of(strategy)
        twin = HerTwin(2, 23, dress="goals", view=view)
        for t in range(120):
            twin.add("".join("U" if t % length == length - 1 else "." for length in (7, 11)))
            if t > 20 and t % 7 == 0:
                twin.check_drawn(twin.buffer.sample(32), view)


def test_episodes_of_any_length_in_any_number_of_envs_give_goals_of_their_own() -> None:
    view = view_of("future", 3)
    twin = HerTwin(4, 40, dress="goals", view=view)
    rng = np.random.default_rng(0)
    for _ in range(100):
        twin.add("".join(rng.choice(list("....TU"), 4)))
    drawn = twin.check_drawn(twin.buffer.sample(400), view)
    assert len({len(row.episode) for env in range(4) for row in twin.truth.live(env)}) > 3
    assert {index % 4 for index, goal in drawn if goal is not None} == {0, 1, 2, 3}


def test_terminated_and_discount_follow_the_new_goal_like_the_reward() -> None:
    view = Hindsight(worth, "final", ratio=1.0, terminated_fn=lambda a, d: numbers(a) == numbers(d), gamma=0.5)
    twin = HerTwin(1, 20, dress="goals", view=view).play(*"....U....T..")
    batch = twin.buffer.sample(100)
    twin.check_drawn(batch, view)
    at_goal = (batch["next_obs", "achieved_goal"] == batch["next_obs", "desired_goal"]).all(-1)
    assert at_goal.any()
    assert not at_goal.all()
    assert torch.equal(batch["terminated"], at_goal)
    assert torch.equal(batch["discount"], torch.where(at_goal, 0.0, 0.5))


@pytest.mark.parametrize("length", [4, 5, 6, 7, 30])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_episode_as_long_as_the_ring_or_longer_is_sampled_as_far_as_it_is_there(length: int, strategy: str) -> None:
    view = view_of(strategy, 2)
    twin = HerTwin(1, 6, dress="goals", view=view).play(*"." * length)
    assert len(twin.buffer) == min(length, 6) - 1
    twin.check_drawn(twin.buffer.sample(60), view)
    twin.play("U")
    twin.check_drawn(twin.buffer.sample(60), view)


def test_goals_are_a_function_of_the_seed_alone() -> None:
    def batches(seed: int) -> list[Any]:
        twin = HerTwin(2, 20, dress="goals", view=view_of(), seed=seed).play(*[".U", "..", "T.", "..", ".."] * 3)
        torch.rand(3), np.random.rand(3)  # noqa: NPY002 - what others draw from global generators changes nothing
        return [twin.buffer.sample(16) for _ in range(3)]

    one, again, other = batches(0), batches(0), batches(1)
    assert all(map(same_batches, one, again))
    assert not any(map(same_batches, one, other))
    assert not same_batches(one[0], one[1])
