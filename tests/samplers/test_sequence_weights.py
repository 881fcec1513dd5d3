"""Windows are drawn as they weigh, by every sampler, as rows come and go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relive import (
    FrameStack,
    NStep,
    Prioritized,
    Recent,
    Sequence,
    Uniform,
    WithoutReplacement,
)
from relive.errors import EmptyError
from relive.samplers.sumtree import SumTree
from support import internals, oracle
from support.cases import covering
from support.effort import often
from support.fit import check_fit, deviation, equal, many
from support.sequence_priorities import check_priorities
from support.twins import SAMPLERS, SEQUENCES, Twin

# Every sampler, as the rows come and go.

ENDINGS = [(num_envs, ending) for ending in ".TUB" for num_envs in (1, 3)]


@pytest.mark.parametrize(("sampler", "view", "world"), covering(SAMPLERS, SEQUENCES, ENDINGS, full=2))
def test_every_sampler_draws_windows_that_are_there(sampler: str, view: str, world: tuple[int, str]) -> None:
    num_envs, ending = world
    twin = Twin(num_envs, 13, sampler=SAMPLERS[sampler](), view=SEQUENCES[view]())
    for t in range(34):
        twin.add("".join(ending if (t + env) % (5 + env) == 4 else "." for env in range(num_envs)))
        if t % 11 == 10:
            twin.interrupt([0])
        if t % often(12, 3) == 0 or t == 33:
            check_draws(twin)


@pytest.mark.parametrize("rows", range(6, 13))
def test_the_windows_of_an_episode_weigh_one_in_all_whatever_made_way_for_its_end(rows: int) -> None:
    """An episode's last row ends its newest window, and may lie where the same step closed an older window."""
    twin = Twin(1, rows, view=Sequence(1, weigh="episodes"))
    for t in range(5 * rows):
        twin.add("T" if t % 11 in (4, 6, 7) else ".")
        twin.buffer.check()


def check_draws(twin: Twin) -> None:
    """Batches are of windows that can be drawn, and priorities are those of the definition."""
    buffer, anchors = twin.buffer, twin.anchors()
    buffer.check()
    assert len(buffer) == len(anchors)
    if not anchors:
        with pytest.raises(EmptyError, match="no complete sequence of"):
            buffer.sample(1)
        return
    sampler = buffer.sampler
    inner = getattr(sampler, "inner", sampler)
    for k, batch in enumerate(buffer.batches(2, min(6, len(anchors))), start=1):
        among = recent(twin, k, 2) if isinstance(sampler, Recent) else anchors
        twin.check_batch(batch, among=among)
        if isinstance(inner, Prioritized):
            errors = torch.randn(batch["mask"].shape, generator=torch.Generator().manual_seed(k)) * 3
            assert buffer.update_priorities(batch["index"], errors, batch["mask"]) == 0
            check_priorities(inner, batch, errors, buffer)


def recent(twin: Twin, k: int, of: int) -> list[oracle.Row]:
    """The windows that end among the newest transitions, or among the fewest of twice as many, 4 times, ..."""
    sampler, truth = twin.buffer.sampler, twin.truth
    assert isinstance(sampler, Recent)
    transitions, anchors = truth.anchors(), twin.anchors()
    if internals.ring(twin.buffer).rule.length == 1:
        transitions = anchors
    count = oracle.recent_count(len(transitions), sampler.eta, sampler.c_min, k, of)
    while True:
        newest = {truth.index(row) for row in transitions[-count:]}
        found = [row for row in anchors if truth.index(row) in newest]
        if found:
            return found
        count *= 2


@given(st.sampled_from(sorted(SAMPLERS)), st.sampled_from(sorted(SEQUENCES)), st.integers(1, 4), st.data())
@settings(max_examples=settings.default.max_examples // 2)
def test_every_sampler_draws_right_from_larger_worlds(
    sampler: str, view: str, num_envs: int, data: st.DataObject
) -> None:
    twin = Twin(num_envs, data.draw(st.integers(2, 60)), sampler=SAMPLERS[sampler](), view=SEQUENCES[view]())
    for kinds in data.draw(st.lists(st.text("..........TUB", min_size=num_envs, max_size=num_envs), max_size=110)):
        twin.add(kinds)
        if not data.draw(st.integers(0, 20)):
            twin.interrupt([data.draw(st.integers(0, num_envs - 1))])
    check_draws(twin)


# Distributions: each test must see a bias of 1 %.


def uneven(**options: Any) -> Twin:
    """Three envs with episodes of 1, 4 and 23 steps, of rings that came round within an episode."""
    twin = Twin(3, 33, **options)
    for t in range(80):
        twin.add("".join("TUB"[e] if (t + 1) % length == 0 else "." for e, length in enumerate((1, 4, 23))))
        if t == 60:
            twin.interrupt([2])
    return twin


def weights(twin: Twin, among: list[oracle.Row] | None = None) -> dict[int, float]:
    """How often each window is to be drawn."""
    view, truth = twin.buffer.view, twin.truth
    assert isinstance(view, Sequence)
    rows = twin.anchors() if among is None else among
    _, length, stride, _, weigh, _ = view.rule
    sizes = {truth.index(row): truth.excerpt(row, length, stride, 0, 1).length for row in rows}
    if weigh == "windows":
        return equal(list(sizes))
    if weigh == "steps":
        return {index: size / sum(sizes.values()) for index, size in sizes.items()}
    by_episode: dict[int, list[int]] = {}
    for row in rows:
        by_episode.setdefault(id(row.episode), []).append(truth.index(row))
    return {i: 1 / len(by_episode) / len(them) for them in by_episode.values() for i in them}


@pytest.mark.parametrize(
    ("shape", "weigh"), covering([(3, "none"), (5, 3), (4, "max"), (1, "max")], ["windows", "steps", "episodes"])
)
def test_windows_are_drawn_in_proportion_to_what_the_view_weighs(shape: tuple[int, Any], weigh: Any) -> None:
    length, overlap = shape
    twin = uneven(view=Sequence(length, 2, overlap, weigh=weigh))
    twin.check()
    chances = weights(twin)
    drawn = many(twin, 4_000_000 if weigh == "windows" else 1_000_000)  # check_fit needs the more
    assert set(np.flatnonzero(np.bincount(drawn)).tolist()) == set(chances)
    assert deviation(drawn, chances) < 5
    rng = np.random.default_rng(0)
    biased = drawn.copy()
    biased[rng.random(len(drawn)) < 0.01] = min(chances)
    assert deviation(biased, chances) > 5
    if weigh == "windows":
        check_fit(drawn, chances)


@pytest.mark.parametrize("weigh", ["windows", "steps", "episodes"])
def test_recent_draws_windows_of_its_window_alone_and_in_proportion(weigh: Any) -> None:
    twin = uneven(view=Sequence(4, 1, "half", weigh=weigh), sampler=Recent(0.9999, 5))
    for update in (1, 5, 10):
        chances = weights(twin, recent(twin, update, 10))
        drawn = many(twin, 500_000, update, 10)
        assert set(np.flatnonzero(np.bincount(drawn)).tolist()) == set(chances)
        assert len(chances) == 1 or deviation(drawn, chances) < 5


def test_a_short_episode_beside_a_long_one_gets_its_share_of_windows_and_no_more() -> None:
    twin = Twin(1, 1200, view=Sequence(5, overlap="none"))
    twin.play(*("." * 9 + "T"), *("." * 999 + "T"))
    drawn = many(twin, 400_000)
    short = float((drawn < 11).mean())
    assert abs(short - 2 / 202) < 0.001
    twin.buffer.view.weigh = "episodes"  # what others give, for those who want it
    twin.buffer.sample(1)
    assert abs(float((many(twin, 400_000) < 11).mean()) - 0.5) < 0.01


def test_the_last_steps_of_an_episode_that_fill_no_window_are_learned_from() -> None:
    twin = Twin(1, 40, view=Sequence(4, overlap="none")).play(*("." * 9 + "U"))
    data = twin.buffer.data()
    assert data.flat()["obs"][:, 2].tolist() == list(range(10))
    assert data["lengths"].tolist() == [5, 5, 3]
    twin.buffer.view = Sequence(4, overlap="none", drop_tail=True)
    assert twin.buffer.data().flat()["obs"][:, 2].tolist() == list(range(8))


def test_batches_are_shuffled_and_no_env_is_dropped() -> None:
    twin = Twin(5, 30, view=Sequence(4, overlap="none"), sampler=WithoutReplacement())
    for t in range(25):
        twin.add("".join("T" if (t + env) % 9 == 8 else "." for env in range(5)))
    count = len(twin.buffer)
    epochs = [twin.buffer.sample(count)["index"].tolist() for _ in range(3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert {index % 5 for index in epochs[0]} == set(range(5))


# The weights follow what happens.


def _leaves(tree: SumTree) -> Any:
    return tree.get(np.arange(len(tree)))


@given(st.sampled_from(["windows", "steps", "episodes"]), st.integers(1, 3), st.integers(2, 25), st.data())
def test_weights_kept_step_by_step_are_those_made_anew(
    weigh: Any, num_envs: int, rows: int, data: st.DataObject
) -> None:
    length = data.draw(st.integers(2, 6))
    view = Sequence(length, data.draw(st.integers(0, 3)), data.draw(st.integers(0, length - 1)), weigh=weigh)
    twin = Twin(num_envs, rows, view=view)
    for _ in range(data.draw(st.integers(1, 12))):
        what = data.draw(st.sampled_from(["add", "add", "many", "interrupt", "clear"]))
        kinds = st.text("......TU", min_size=num_envs, max_size=num_envs)
        if what == "add":
            twin.add(data.draw(kinds))
        elif what == "many":
            twin.extend(data.draw(st.lists(kinds, min_size=1, max_size=30)))
        elif what == "interrupt":
            twin.interrupt([0])
        elif not data.draw(st.integers(0, 3)):
            twin.clear()
        sampler = twin.buffer.sampler
        assert isinstance(sampler, Uniform)
        assert internals.windows(sampler) is not None
        leaves = _leaves(internals.tree(internals.windows(sampler)))
        fresh = Uniform()
        fresh.attach(internals.ring(twin.buffer))
        assert internals.windows(fresh) is not None
        assert np.array_equal(leaves, _leaves(internals.tree(internals.windows(fresh))))
        twin.buffer.check()


def test_an_interruption_makes_what_came_before_it_a_window() -> None:
    twin = Twin(2, 20, view=Sequence(4, overlap="none", n=3, gamma=0.5)).play("..", "..", "..")
    assert len(twin.buffer) == 0
    twin.interrupt([1])
    assert len(twin.buffer) == 1
    batch = twin.buffer.sample(3)
    twin.check_batch(batch)
    assert batch["env"].tolist() == [1, 1, 1]
    assert batch["mask"].sum(0).tolist() == [2, 2, 2]
    twin.interrupt()
    twin.interrupt()  # again: nothing is under way
    twin.check()
    assert len(twin.buffer) == 2
    twin.add("..", mask=[False, True])
    twin.check()


def test_parameters_can_be_changed_on_a_living_buffer() -> None:
    view = Sequence(3, gamma=0.5)
    twin = Twin(2, 20, view=view, sampler=Prioritized())
    for t in range(25):
        twin.add("T." if t % 8 == 7 else "..")
    changes = {"length": 5, "burn_in": 2, "overlap": "none", "n": 4, "drop_tail": True, "time_first": False}
    for name, value in changes.items():
        setattr(view, name, value)
        twin.check()
        twin.check_batch(twin.buffer.sample(10))
    twin.buffer.view = NStep(2, 0.5)
    twin.check()
    twin.buffer.view = FrameStack(3, NStep(1, 0.5))
    twin.check()
    twin.check_batch(twin.buffer.sample(10))
