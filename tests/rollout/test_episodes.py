"""Where episodes start and end, over several rollouts, interruptions and rings that came round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from relive import Collector, RolloutBuffer, Schema
from support import tagged_envs
from support.effort import in_ci
from support.window_worlds import RICH, SMALL, World, add_all, begins, check_all, filled, found_in, strides, world_of

# Rollouts one after another


def test_a_partial_rollout_has_the_sequences_of_the_steps_so_far() -> None:
    world = world_of(["..T.....", ".U...T.."])
    rollout = RolloutBuffer(SMALL, 8, 2)
    for t in range(8):
        add_all(rollout, world, [t])
        so_far = World(SMALL, world.letters[: t + 1], {p: x[: t + 1] for p, x in world.columns.items()}, world.ended)
        for overlap, stride in strides(3):
            check_all(so_far, rollout, 3, overlap, stride)
        check_all(so_far, rollout, None, "none", 8)


@pytest.mark.parametrize("cuts", [(3, 3, 3), (1, 1, 7), (5, 2, 2), (9,)])
@pytest.mark.parametrize("partial", [False, True])
def test_an_episode_begins_where_the_last_one_ended_whatever_rollouts_they_lie_in(cuts: Any, partial: bool) -> None:
    """Every pattern of nine letters that a seed draws, cut into rollouts at these places."""
    rng = np.random.default_rng(0)
    letters = rng.choice(list("...TTUmM"), (9, 64))
    world = world_of(letters)
    whole = {(w.start, w.env): w.is_start for w in world.stretches(1, 1)}
    rollout = RolloutBuffer(SMALL, max(cuts) + partial, 64)
    at = 0
    for count in cuts:
        add_all(rollout, world, range(at, at + count))
        if world.mask[at : at + count].any():
            (seq,) = rollout.sequences(1)
            found = {(at + w.start, w.env): w.is_start for w in found_in([seq])}
            assert found == {(t, n): whole[t, n] for t, n in whole if at <= t < at + count}
        at += count
        rollout.clear()


@pytest.mark.parametrize(
    ("total", "schema"),
    [(total, SMALL) if total % 2 else in_ci(total, SMALL) for total in range(1, 15)]
    + [in_ci(total, RICH) if total % 2 else (total, RICH) for total in range(1, 15)],
)
def test_a_rollout_that_wraps_has_the_sequences_of_its_newest_steps_in_the_order_of_time(
    schema: Schema, total: int
) -> None:
    rng = np.random.default_rng(total)
    world = world_of(rng.choice(list("....TUmM"), (total, 6)), schema)
    rollout = RolloutBuffer(schema, 5, 6, wrap=True, seed=0)
    add_all(rollout, world)
    kept = world.newest(min(total, 5))
    if not kept.mask.any():
        return
    for length in (None, 1, 2, 3, 6):
        for overlap, stride in strides(length) if length else [("none", 5)]:
            check_all(kept, rollout, length, overlap, stride)
    check_all(kept, rollout, 2, "none", 2, complete=True)


def test_rows_written_in_place_have_sequences_like_added_ones() -> None:
    world = world_of(["..T.....", ".U...T..", "....m...", "T.......", "mM......"])
    for wrap in (False, True):
        rollout = RolloutBuffer(SMALL, 5, 5, wrap=wrap)
        for times in (range(5), range(3, 8)):
            views = rollout.reserve()
            for path, column in world.columns.items():
                views[path].copy_(column[times.start : times.stop])
            views["mask"].copy_(torch.from_numpy(world.mask[times.start : times.stop]))
            rollout.commit()
            now = World(
                SMALL,
                world.letters[times.start : times.stop],
                {path: column[times.start : times.stop] for path, column in world.columns.items()},
                world.ended if times.start == 0 else world.done[4],
            )
            check_all(now, rollout, 2, "half", 1)
            check_all(now, rollout, None, "none", 5)
            if not wrap:
                rollout.clear()


def test_columns_that_are_overwritten_cut_anew() -> None:
    world = world_of(["......", "......"])
    rollout = filled(world)
    truncated = torch.zeros(6, 2, dtype=torch.bool)
    truncated[3, 1] = True
    rollout["truncated"] = truncated
    assert sorted(found_in(rollout.sequences())) == [(0, 0, 6, True), (1, 0, 4, True), (1, 4, 2, True)]
    rollout.clear()
    add_all(rollout, world)
    assert [w.is_start for w in sorted(found_in(rollout.sequences()))] == [False, False]


def test_an_interrupted_episode_does_not_go_on() -> None:
    world = world_of(["...", "..T"])
    rollout = filled(world)
    rollout.interrupt()
    assert len(list(rollout.sequences(batch_size=1))) == 2
    rollout.clear()
    add_all(rollout, world)
    assert [w.is_start for w in found_in(rollout.sequences())] == [True, True]
    rollout.clear()
    rollout.interrupt()
    add_all(rollout, world)
    assert [w.is_start for w in found_in(rollout.sequences())] == [True, True]
    assert rollout.clear() is None
    add_all(rollout, world)
    assert [w.is_start for w in sorted(found_in(rollout.sequences()))] == [False, True]


@pytest.mark.parametrize("wrap", [False, True])
def test_an_episode_interrupted_within_a_rollout_ends_there(wrap: bool) -> None:
    """The last env's newest step is not real, but its episode is under way as well."""
    world = world_of(["......", "..U...", "..m..."])
    rollout = RolloutBuffer(SMALL, 6, 3, wrap=wrap)
    add_all(rollout, world, range(3))
    rollout.interrupt()
    add_all(rollout, world, range(3, 6))
    assert sorted(found_in(rollout.sequences())) == [
        (0, 0, 3, True),
        (0, 3, 3, True),
        (1, 0, 3, True),
        (1, 3, 3, True),
        (2, 0, 2, True),
        (2, 3, 3, True),
    ]


def counting(obs: Tensor, hidden: Tensor) -> dict[str, Any]:
    """A policy whose state counts the steps of the episode."""
    return {"action": tagged_envs.tagged_policy(obs), "value": tagged_envs.tagged_value(obs), "hidden": hidden + 1}


@pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name.lower())
def test_collected_episodes_begin_where_the_env_was_reset(mode: AutoresetMode) -> None:
    envs = tagged_envs.make_tagged(4, mode, tagged_envs.drawn(3, longest=6))
    rollout = RolloutBuffer(Schema.from_env(envs, value=(), hidden=(1, 2)), 7, 4, seed=0)
    collector = Collector(envs, counting, rollout, seed=5)
    begun = 0
    for i in range(8):
        if i == 4:
            collector.reset(seed=11)  # in the middle of episodes, with a full rollout
        if i == 6:
            rollout.clear()
            collector.reset()  # with an empty one
        collector.collect()
        (seq,) = rollout.sequences(3, overlap="half")
        step = torch.as_tensor(tagged_envs.decode(seq["obs"]).step)
        assert begins(seq).tolist() == (step[0] == 0).tolist()
        assert torch.equal(seq["hidden"][0, :, 0], step[0].float())
        for b in range(len(seq)):
            rows = step[:, b][seq["mask"][:, b]]
            assert torch.equal(rows, rows[0] + torch.arange(len(rows)))
        begun += int(begins(seq).sum())
    assert begun > 20
