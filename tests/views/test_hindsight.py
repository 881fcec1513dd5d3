"""Hindsight: every goal comes from an allowed step of the row's own episode, and what depends on it is told anew."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relive import (
    Hindsight,
    Mixture,
    NStep,
    ReplayBuffer,
    Transition,
)
from relive.errors import (
    FieldError,
    FileFormatError,
    ParameterError,
    ShapeError,
)
from support.cases import covering
from support.effort import first_of, often
from support.goal_plays import FUNCTIONS, HerTwin, as_relabel, numbers, plays, stopped, view_of, worth
from support.twins import SAMPLERS, same_batches

STRATEGIES = ("future", "final", "episode", "past", "random")


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


VIEWS = [
    view_of(strategy, n, functions) for strategy in STRATEGIES for n, functions in ((1, "reward"), (3, "both flags"))
]


@pytest.mark.parametrize("of", [often(83, 9), pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", [*(pytest.param(rows, marks=pytest.mark.slow) for rows in (2, 3)), 4])
def test_every_short_play_gives_goals_of_the_list_of_episodes(rows: int, of: int) -> None:
    for turn, play in enumerate(itertools.chain(plays(".TU", 4), plays(".T|", 4))):
        check_play(1, rows, play, VIEWS[turn % of :: of])  # through all views, or through one or two


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 3, 4, 6])
def test_every_longer_play_does_so_as_well(rows: int) -> None:
    views = [view_of(s, n, f) for s in STRATEGIES for n in (1, 2, 4) for f in FUNCTIONS]
    for turn, play in enumerate(itertools.chain(plays(".U", 6), plays(".T|x", 4))):
        check_play(1, rows, play, views[(turn + rows) % 6 :: 6])  # one in six, others in other rings


@pytest.mark.parametrize(("seed", "dress"), covering(range(4), ["goals", "image goals", "goals and images"]))
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
@settings(max_examples=settings.default.max_examples // 2)
def test_any_play_of_any_envs_gives_goals_of_the_list_of_episodes(data: st.DataObject) -> None:
    num_envs, rows = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 12))
    view = view_of(
        data.draw(st.sampled_from(STRATEGIES)), data.draw(st.integers(1, 6)),
        data.draw(st.sampled_from(list(FUNCTIONS))),
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
    """How often each anchor of one env got each goal; None is its own."""
    twin = HerTwin(1, rows, dress="goals", view=view).play(*play)
    live = twin.truth.live(0)
    achieved = numbers([row.obs["achieved_goal"] for row in live]).tolist()
    index_of: dict[float, int | None] = {-1: None, **dict(zip(achieved, map(twin.truth.index, live), strict=True))}
    assert len(index_of) == len(live) + 1
    drawn: Counter[tuple[int, float]] = Counter()
    for _ in range(batches):
        batch = twin.buffer.sample(4096)
        goals = np.where(batch["relabelled"], numbers(batch["obs", "desired_goal"]), -1)
        drawn.update(zip(batch["index"].tolist(), goals.tolist(), strict=True))
    return twin, Counter({(index, index_of[goal]): count for (index, goal), count in drawn.items()})


@pytest.mark.parametrize("strategy", first_of(2, STRATEGIES))
def test_each_allowed_goal_comes_equally_often_and_a_bias_of_one_percent_would_show(strategy: str) -> None:
    view = Hindsight(worth, strategy, ratio=0.8)
    twin, drawn = many(view, "...T" + "." * 9 + "U" + ".....", 17, 150)
    total = sum(drawn.values())
    kept = sum(count for (_, goal), count in drawn.items() if goal is None)
    aims = {twin.truth.index(row): [twin.truth.index(goal) for goal in twin.truth.goal_rows(row, strategy)]
            for row in twin.anchors()}  # fmt: skip
    free = sum(count for (index, _), count in drawn.items() if aims[index])
    new = total - kept
    assert abs(new - 0.8 * free) < 5 * math.sqrt(0.16 * free)  # 1 % of bias is 0.008 * 614,400, or 16 of these
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


def test_goals_are_a_function_of_the_seed_alone() -> None:
    def batches(seed: int) -> list[Any]:
        twin = HerTwin(2, 20, dress="goals", view=view_of(), seed=seed).play(*[".U", "..", "T.", "..", ".."] * 3)
        torch.rand(3)  # what others draw from a global generator changes nothing
        return [twin.buffer.sample(16) for _ in range(3)]

    one, again, other = batches(0), batches(0), batches(1)
    assert all(map(same_batches, one, again))
    assert not any(map(same_batches, one, other))
    assert not same_batches(one[0], one[1])


# With every sampler, in mixtures, from files, with images.


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("n", [1, 3])
def test_every_sampler_draws_what_it_draws_without_hindsight(sampler: str, n: int) -> None:
    rounds = ["..", ".T", "..", "U.", "..", "..", "..", "T.", "..", "..", ".U", ".."]
    view = view_of("future", n)
    twin = HerTwin(2, 9, dress="goals", sampler=SAMPLERS[sampler](), view=view).play(*rounds)
    plain = HerTwin(2, 9, dress="goals", sampler=SAMPLERS[sampler](), view=NStep(n, 0.5)).play(*rounds)
    assert len(twin.buffer) == len(plain.buffer)
    for _ in range(4):
        batches = zip(twin.buffer.batches(2, 8), plain.buffer.batches(2, 8), strict=True)
        for batch, other in batches:
            assert torch.equal(batch["index"], other["index"])
            assert batch["relabelled"].any()
            twin.check_drawn(batch, view)
            for name in {"weight", "probability"} & set(other.keys()):
                assert torch.equal(batch[name], other[name])
            if twin.buffer.has_priorities:
                assert twin.buffer.update_priorities(batch["index"], batch["index"].float()) == 0
                plain.buffer.update_priorities(other["index"], other["index"].float())


def test_a_mixture_relabels_the_rows_of_each_buffer_by_its_own_view() -> None:
    own, plain = (
        HerTwin(2, 20, dress="goals", view=view).play(*["..", ".U", ".."] * 5) for view in (view_of(), Transition())
    )
    batch = Mixture({"own": own.buffer, "plain": plain.buffer}, {"own": 1, "plain": 1}).sample(40)
    assert "relabelled" not in batch.keys()
    changed = (batch["obs", "desired_goal"] != 99).any(-1)
    assert changed[:20].any()
    assert not changed[20:].any()


def test_a_loaded_replay_goes_on_with_the_goals_of_the_saved_one(tmp_path: Any) -> None:
    twin = HerTwin(2, 9, dress="goals", view=view_of("episode", 2)).play(*["..", ".T", "..", "U.", ".."] * 3)
    twin.buffer.sample(5)
    twin.buffer.save(tmp_path / "saved")
    with pytest.raises(FileFormatError, match=r"functions.*pass view=\.\.\. to load or open"):
        ReplayBuffer.load(tmp_path / "saved")
    loaded = ReplayBuffer.load(tmp_path / "saved", view=view_of("episode", 2))
    for _ in range(3):
        assert same_batches(loaded.sample(16), twin.buffer.sample(16))
    loaded.check()


def test_a_view_may_be_changed_at_any_time_and_take_effect_at_once() -> None:
    view = view_of("future")
    twin = HerTwin(1, 12, dress="goals", view=view).play(*".......U...")
    for strategy, n, ratio in (("final", 1, 1.0), ("past", 3, 0.5), ("future", 2, 1.0)):
        view.strategy, view.n, view.ratio = strategy, n, ratio
        twin.check_drawn(twin.buffer.sample(30), view)
        twin.play(".", ".")
    view.terminated_fn, view.truncated_fn = None, stopped
    twin.check_drawn(twin.buffer.sample(30), view)


def test_only_finished_episodes_give_goals_if_that_is_asked_for() -> None:
    view = view_of("future", finished_only=True)
    twin = HerTwin(2, 30, dress="goals", view=view).play(*["..", "..", "U.", "..", ".."])
    drawn = twin.check_drawn(twin.buffer.sample(200), view)
    assert {index for index, goal in drawn if goal is not None} == {0, 2, 4}  # the three steps that env 0 has finished
    twin.interrupt()
    drawn = twin.check_drawn(twin.buffer.sample(200), view)
    assert {index % 2 for index, goal in drawn if goal is not None} == {0, 1}


# Copies that are appended, where there is no order.


def whole(twin: HerTwin, length: int) -> dict[str, Any]:
    """The steps of an episode ``[length, 1, ...]``, each with its next observation."""
    from support.twins import stacked

    life = [twin._dressed(twin.lives[0].step("truncated" if t == length - 1 else None)) for t in range(length)]
    return stacked([stacked([step]) for step in life])


@pytest.mark.parametrize("strategy", ["future", "final", "episode", "past"])
@pytest.mark.parametrize("functions", FUNCTIONS)
def test_copies_of_an_episode_have_goals_of_allowed_steps_and_what_comes_of_them(strategy: str, functions: str) -> None:
    twin = HerTwin(1, 60, dress="goals", ordered=False)
    view, episode = view_of(strategy, 3, functions), whole(twin, 7)
    seen: set[tuple[int, int]] = set()
    for number in range(40):
        copies = view.copies(episode, 4, seed=1, number=number)
        assert len(copies["reward"]) == (24 if strategy == "past" else 28)
        at = copies["obs"]["achieved_goal"][:, 0, 2].astype(int)
        assert at.tolist() == sorted([*range(strategy == "past", 7)] * 4)
        desired = copies["obs"]["desired_goal"][:, 0]
        goal = desired[:, 2].astype(int)
        seen |= set(zip(at.tolist(), goal.tolist(), strict=True))
        achieved = copies["next_obs"]["achieved_goal"][:, 0]
        assert np.array_equal(copies["next_obs"]["desired_goal"][:, 0], desired)
        assert np.array_equal(achieved[:, 2], at + 1)
        assert np.array_equal(copies["reward"][:, 0], worth(achieved, desired))
        for name, function in (("terminated", view.terminated_fn), ("truncated", view.truncated_fn)):
            recorded = np.array([episode[name][t, 0] for t in at])
            assert np.array_equal(copies[name][:, 0], recorded if function is None else function(achieved, desired))
    low, high = {"future": (1, 7), "final": (7, 7), "episode": (1, 7), "past": (1, 6)}[strategy]
    assert seen == {
        (t, goal) for t in range(7) for goal in range(low, high + 1)
        if (strategy != "future" or goal > t) and (strategy != "past" or goal <= t)
    }  # fmt: skip


def test_copies_go_into_a_replay_without_order_and_depend_on_seed_and_number_alone() -> None:
    twin = HerTwin(1, 100, dress="goals", ordered=False)
    view, replay = view_of("future"), twin.buffer
    episode = whole(twin, 7)
    copies = view.copies(episode, 4, seed=3, number=5)
    replay.extend(episode)
    replay.extend(copies)
    assert len(replay) == 35
    data = replay.data()
    assert np.array_equal(data["reward"][7:], copies["reward"][:, 0])
    again, *others = (view.copies(episode, 4, seed=s, number=n)["reward"] for s, n in ((3, 5), (3, 6), (4, 5)))
    assert np.array_equal(again, copies["reward"])
    assert not any(np.array_equal(other, copies["reward"]) for other in others)


def test_copies_by_a_function_of_steps_are_those_by_goals() -> None:
    twin = HerTwin(1, 60, dress="goals", ordered=False)
    episode = whole(twin, 7)
    one = view_of("episode").copies(episode, seed=0)
    other = Hindsight(strategy="episode", relabel=as_relabel).copies(episode, seed=0)
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(
        batch_numbers(one), batch_numbers(other), strict=True))  # fmt: skip


def batch_numbers(tree: Any) -> list[np.ndarray]:
    from support.twins import leaves

    return [leaf for _, leaf in sorted(leaves(tree).items())]


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        ({}, {"k": 0}, ParameterError, "expected k of at least 1"),
        ({"next_obs": None}, {}, FieldError, "lacks next_obs"),
        ({"reward": np.zeros((7, 2), np.float32)}, {}, ShapeError, r"expected \(steps, 1\) in front of every field"),
        ({"reward": np.zeros((6, 1), np.float32)}, {}, ShapeError, r"expected \(steps, 1\) in front of every field"),
    ],
)
def test_an_episode_that_cannot_be_copied_is_refused(change: Any, options: Any, error: type, message: str) -> None:
    twin = HerTwin(1, 60, dress="goals", ordered=False)
    episode = {name: value for name, value in (whole(twin, 7) | change).items() if value is not None}
    with pytest.raises(error, match=message):
        view_of().copies(episode, **{"seed": 0, **options})


def test_random_goals_need_a_replay() -> None:
    with pytest.raises(ParameterError, match="a strategy of one episode, got k=4, 'random'"):
        view_of("random").copies({}, seed=0)


STANDING: dict[str, Any] = {
    **{strategy: lambda strategy=strategy: view_of(strategy) for strategy in STRATEGIES},
    "windows": lambda: view_of(n=3, functions="both flags"),
    "finished episodes": lambda: view_of(finished_only=True),
    "no other goals": lambda: Hindsight(worth, ratio=0.0),
    "tensors": lambda: Hindsight(lambda a, d: torch.from_numpy(worth(a.numpy(), d.numpy())), tensors=True),
    "relabel": lambda: Hindsight(relabel=as_relabel),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("which", STANDING)
def test_batches_in_standing_memory_have_the_goals_of_those_in_fresh_memory(which: str, sampler: str) -> None:
    play = [".."] * 4 + ["T.", ".U"] + [".."] * 5

    def replay() -> ReplayBuffer:
        return HerTwin(2, 20, dress="goals", view=STANDING[which](), sampler=SAMPLERS[sampler]()).play(*play).buffer

    fresh, given = [batch.clone() for batch in replay().batches(7, 5)], list[Any]()
    for batch, want in zip(replay().batches(7, 5, reuse=True), fresh, strict=True):
        assert same_batches(batch, want)
        given.append(batch["obs", "desired_goal"])
    for first, again in itertools.pairwise(given[k] for k in (0, 3, 6)):
        # places that are drawn before they are read give each batch memory of its own
        assert (first is again) == (sampler not in ("without replacement", "fresh"))
