"""Episodes that never end: what counts their steps comes to its end, and everything stays as the oracle has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attacks.tally import record
from relive import FrameStack, Hindsight, NStep, Prioritized, Recent, ReplayBuffer, Transition, Uniform
from relive import Sequence as SequenceView
from relive.core.words import LONGEST, NEXT
from support import internals, twins
from support.cases import covering
from support.interrupts import Watcher
from support.twins import Twin

ROWS = 9
STRIDES = 12
"""A multiple of every stride here: the windows of an episode stay where they are if it is older by so much."""

VIEWS = {
    "transition": lambda: Transition(0.5),
    "3-step": lambda: NStep(3, 0.5),
    "stack": lambda: FrameStack(3, NStep(2, 0.5), "zeros"),
    "sequences": lambda: SequenceView(3, 2, "none", 2, 0.5),
    "sequences that overlap": lambda: SequenceView(4, 0, "max", 1, 0.5),
    "whole sequences": lambda: SequenceView(2, 1, "none", 1, 0.5, drop_tail=True),
    "weighed by episodes": lambda: SequenceView(2, 0, "max", weigh="episodes"),
}
SAMPLERS = {
    "uniform": Uniform,
    "prioritized": Prioritized,
    "recent": lambda: Recent(0.9, 2, inner=Prioritized()),
    "a user's": Watcher,
}


def aged(twin: Twin, left: int) -> None:
    """The episodes under way, which fill their rings, are so old that ``left`` steps are left, give or take a few."""
    ring = internals.ring(twin.buffer)
    for env in range(twin.num_envs):
        more = (LONGEST - left - int(ring.state[env, NEXT])) // STRIDES * STRIDES
        ring.state[env, NEXT] += more
        ring.step[ring.live_places(env)] += more
    ring.rule = ring.rule
    twin.buffer.sampler.attach(ring)


def follow(twin: Twin, kinds: str) -> int:
    """One step; the oracle is told where that cut an episode. How many were."""
    twin.add(kinds)
    cut = [
        env for env in range(twin.num_envs) if kinds[env] == "." and not internals.ring(twin.buffer).state[env, NEXT]
    ]
    for env in cut:
        twin.truth.interrupt(env)
    return len(cut)


def wrong_after(view: str, sampler: str, left: int, every: int) -> tuple[int, list[Any]]:
    """Play past the end of the counter: how many steps were looked at, and what was wrong after them."""
    rng, tried, failed, cuts = np.random.default_rng(len(view)), 0, list[Any](), 0
    twin = Twin(2, ROWS, view=VIEWS[view](), sampler=SAMPLERS[sampler]())
    twin.play(*[".."] * (ROWS + 6))
    aged(twin, left)
    for t in range(2 * ROWS + left + STRIDES):
        ends = t > left + STRIDES and rng.random() < 0.3
        now = follow(twin, "".join(rng.choice(list(".T"), 2)) if ends else "..")
        cuts += now
        if not now and t % every:
            continue
        tried += 1
        try:
            twin.check()
            if len(twin.buffer):
                twin.check_batch(twin.buffer.sample(4))
        except Exception as error:  # whatever comes of it is what this looks for
            failed.append((left, t, error))
    assert cuts == 2, "each env's episode is cut once"
    return tried, failed


WEIGHED = "weighed by episodes"  # it says how to draw uniformly, and goes with no other sampler
CELLS = [*covering([view for view in VIEWS if view != WEIGHED], SAMPLERS), (WEIGHED, "uniform")]


@pytest.mark.parametrize(("view", "sampler"), CELLS)
def test_an_episode_that_never_ends_is_cut_after_two_billion_steps_and_goes_on(view: str, sampler: str) -> None:
    tried, failed = wrong_after(view, sampler, 1, 11)
    record("a counter of steps at its end", tried, len(failed))
    assert not failed, failed[:3]


@pytest.mark.slow
@pytest.mark.parametrize(("view", "sampler"), CELLS)
def test_it_is_so_wherever_the_windows_begin(view: str, sampler: str) -> None:
    results = [wrong_after(view, sampler, left, 1) for left in range(2, 2 + STRIDES)]
    failed = [error for _, errors in results for error in errors]
    record("a counter of steps at its end", sum(tried for tried, _ in results), len(failed))
    assert not failed, failed[:3]


@pytest.mark.parametrize("beyond", [2**31 - 1, 2**31, 2**31 + 7, 2**32 - 3, 2**32, 2**40])
def test_a_counter_that_is_beyond_its_end_starts_the_next_episode(beyond: int) -> None:
    twin = Twin(2, ROWS, view=FrameStack(3, NStep(2, 0.5)), sampler=Prioritized())
    twin.play("..", "..", "..")
    internals.ring(twin.buffer).state[:, NEXT] = beyond
    for env in (0, 1):
        twin.truth.interrupt(env)
    for kinds in ("..", "..", ".T", *[".."] * 9):
        twin.add(kinds)
        twin.check()
        twin.check_batch(twin.buffer.sample(4))


def test_goals_are_of_the_part_of_an_endless_episode_that_a_step_is_in() -> None:
    judge = lambda achieved, desired: -np.abs(achieved - desired).sum(-1)  # noqa: E731
    twin = Twin(1, 20, dress="goals", view=Hindsight(judge, "future", ratio=1.0))
    twin.play(*["."] * 24)
    aged(twin, 13)
    twin.play(*["."] * 28)
    ring, batch = internals.ring(twin.buffer), twin.buffer.sample(200)
    (begin,) = np.flatnonzero(ring.step[ring.live_places(0)] == 0) + ring.oldest[0]
    rows = twin.truth.live(0)
    steps = {tuple(np.asarray(row.obs["achieved_goal"]).tolist()): row.number for row in rows}
    goals = [steps[tuple(goal)] for goal in batch["obs", "desired_goal"][batch["relabelled"]].tolist()]
    own = batch["index"][batch["relabelled"]].tolist()
    assert len(own) > 50
    assert all((goal >= begin) == (number >= begin) and goal > number for goal, number in zip(goals, own, strict=True))


def test_steps_with_next_observations_of_their_own_lose_nothing_there() -> None:
    twin = Twin(1, ROWS, ordered=False)
    twin.buffer = ReplayBuffer(twin.schema, ROWS, own_next_obs=True, view=NStep(1, 0.5), seed=0)
    twin.play(*["."] * 12)
    ring = internals.ring(twin.buffer)
    ring.state[0, NEXT] += LONGEST - 5 - 12
    ring.step[ring.live_places(0)] += LONGEST - 5 - 12
    for _ in range(12):
        twin.add(".")
        twin.check()
    assert ring.step[ring.live_places(0)].tolist() == [LONGEST - 2, LONGEST - 1, *range(7)]


def test_a_save_from_the_end_of_the_counter_goes_on_alike(tmp_path: Path) -> None:
    twin = Twin(2, ROWS, view=NStep(2, 0.5)).play(*[".."] * 15)
    aged(twin, 13)
    twin.buffer.save(tmp_path / "replay")
    again = ReplayBuffer.load(tmp_path / "replay")
    for _ in range(26):
        step = twin.step("..", final=True)
        for buffer in (twin.buffer, again):
            buffer.add(step)
            buffer.check()
        assert twins.same_batches(twin.buffer.sample(5), again.sample(5))
