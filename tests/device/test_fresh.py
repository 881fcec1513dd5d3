"""New transitions once on a device: the batches are those of a replay in RAM, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from relive import (
    Field,
    FrameStack,
    Fresh,
    Hindsight,
    NStep,
    Prioritized,
    Recent,
    Schema,
    Sequence,
    WithoutReplacement,
)
from support import internals
from support.device_twins import WORLDS, Twins, assert_same
from support.effort import first_of, in_ci, often
from support.other_device import no_waiting

INNER: dict[str, Any] = {
    "uniform": Fresh,
    "prioritized": lambda: Fresh(Prioritized(beta=(0.4, 1.0, 9))),
    "prioritized, independent": lambda: Fresh(Prioritized(stratified=False)),
    "recent": lambda: Fresh(Recent(0.99, 200)),
}
FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "shared": (lambda: NStep(2), {}),
    "frames": (lambda: FrameStack(3, NStep(2)), {}),
    "own": (lambda: NStep(2), {"own_next_obs": True}),
    "unordered": (lambda: NStep(1), {"ordered": False}),
    "sequences": (lambda: Sequence(4, 1, "half"), {}),
    "sequences by episodes": (lambda: Sequence(3, weigh="episodes"), {}),
}
CELLS = [
    *[(inner, form) for inner in INNER for form in ("shared", "own", "unordered")],
    *[("uniform", form) for form in [*FORMS][3:]],
    ("recent", "frames"),
    ("uniform", "frames"),
]


def assert_counts_alike(twins: Twins) -> None:
    ours, theirs = twins.ram.sampler, twins.there.sampler
    assert (ours.served, ours.waiting, ours.lost) == (theirs.served, theirs.waiting, theirs.lost)


@pytest.mark.parametrize("world", first_of(2, WORLDS[1:]))
@pytest.mark.parametrize(("inner", "form"), CELLS)
def test_batches_are_those_of_a_replay_in_ram(device: torch.device, inner: str, form: str, world: Any) -> None:
    """Now more wait than a batch holds, now fewer; in the small rings some are overwritten before their turn."""
    envs, rows, _, odds = world
    view, options = FORMS[form]
    twins = Twins(device, envs, rows, seed=rows, sampler=INNER[inner], view=view, **options)
    ahead = 0
    for t in range(often(24, 30)):
        for _ in range(1 + t % 3 * (t % 5)):
            twins.add(odds)
        if t < 4 or not len(twins.ram):
            continue
        for count in (2, 3 * envs, 40)[: 1 + t % 3]:
            ours = twins.ram.sample(count)
            with no_waiting() as watch:
                watch.allow = not internals.is_ahead(twins.there)
                theirs = twins.there.sample(count)
            assert_same(ours, theirs)
            if twins.ram.has_priorities and t % 2:
                twins.update(ours, theirs)
        ahead += internals.is_ahead(twins.there)
        if t % 7 == 6:
            assert_counts_alike(twins)
    assert ahead > 3 or rows < 20 or inner == "recent"
    twins.check()
    assert_counts_alike(twins)
    assert twins.ram.sampler.served > 10


@pytest.mark.parametrize("form", ["shared", "own", "sequences"])
@pytest.mark.parametrize("rows", [12, 30])
def test_what_is_overwritten_before_its_turn_is_passed_over(device: torch.device, form: str, rows: int) -> None:
    """Envs whose episodes end often write more rows: what is lost is not what came first of all."""
    view, options = FORMS[form]
    twins = Twins(device, 3, rows, seed=1, sampler=Fresh, view=view, **options)
    for t in range(150):
        step = twins.step(0.0)
        step["terminated"] = torch.tensor([t % 3 == 0, t % 11 == 0, False])
        twins.ram.add(step)
        twins.there.add(twins.far(step))
        if t > 6 and t % 2 and t % 10 > 4 and len(twins.ram):
            twins.batches((1 if form == "sequences" else 3) if t % 50 else 100)
    assert twins.ram.sampler.lost > 5
    twins.check()
    assert_counts_alike(twins)


def test_turns_of_the_host_come_in_between(device: torch.device) -> None:
    twins = Twins(device, 4, 40, seed=3, sampler=lambda: Fresh(Prioritized()), view=lambda: NStep(2))
    for turn in range(often(14, 40)):
        for _ in range(turn % 5 + 3):
            twins.add(0.1)
        twins.update(*twins.batches(9))
        twins.batches(5)
        if turn % 3 == 0:
            twins.add_to_some([0, 2])
        for buffer in (twins.ram, twins.there):
            if turn % 4 == 1:
                buffer.interrupt([1])
            if turn % 6 == 3:
                buffer.sampler.skip()
            if turn == 8:
                buffer.clear()
            if turn % 5 == 2:
                buffer.sampler.inner.beta = 0.4 + turn / 100
        if turn % 3 == 1:
            assert_counts_alike(twins)
        if turn % 4 == 2:  # by way of the host: the device is told of what was served meanwhile
            with twins.ram.serve(6) as ours, twins.there.serve(6) as theirs:
                assert_same(next(ours), next(theirs))
    twins.check()
    assert_counts_alike(twins)


def test_a_view_with_other_windows_goes_on_with_what_was_not_served(device: torch.device) -> None:
    twins = Twins(device, 2, 40, seed=3, sampler=Fresh, view=lambda: NStep(1))
    makers: list[Any] = [lambda: Sequence(3), lambda: NStep(2), lambda: FrameStack(2), lambda: Sequence(4, 1, "half")]
    for make in makers:
        for buffer in (twins.ram, twins.there):
            buffer.view = make()
        for _ in range(8):
            twins.add(0.2)
        twins.batches(5)
        assert_counts_alike(twins)
        for _ in range(4):
            twins.add(0.2)
        twins.batches(30)
        assert_counts_alike(twins)
    twins.check()


GOALS = Schema({
    "obs": {"x": (2,), "achieved_goal": (2,), "desired_goal": (2,)},
    "reward": (),
    "terminated": Field((), torch.bool),
    "truncated": Field((), torch.bool),
})  # fmt: skip


def reward(achieved: Any, desired: Any) -> Any:
    return (achieved - desired)[:, 0]


@pytest.mark.parametrize("strategy", ["future", "random"])
def test_goals_are_chosen_as_in_ram(device: torch.device, strategy: Any) -> None:
    view = lambda: Hindsight(reward, strategy, n=2, tensors=True)  # noqa: E731
    twins = Twins(device, 3, 20, seed=1, schema=GOALS, sampler=INNER["prioritized"], view=view)
    for t in range(40):
        twins.add(0.2)
        if t > 8:
            twins.batches(2 if t % 3 else 30)
    twins.check()
    assert_counts_alike(twins)


def test_it_counts_its_bytes_and_leaves_what_its_inner_sampler_leaves_to_the_host(device: torch.device) -> None:
    for inner in (None, Prioritized(), Recent()):
        alone = 0 if inner is None else inner.bytes_on_device(1000, 10)
        assert Fresh(inner).bytes_on_device(1000, 10) == (alone or 0) + 8 * 2011 + 8 * 13
    assert Fresh(WithoutReplacement()).bytes_on_device(1000, 10) is None
    twins = Twins(device, 3, 20, seed=1, sampler=lambda: Fresh(WithoutReplacement()))
    for t in range(12):
        twins.add(0.1)
        if t > 3:
            twins.batches(4)
    twins.check()


def test_the_host_knows_when_rows_may_be_lost(device: torch.device) -> None:
    """A graph for each of the two ways: a batch looks at the queue's front, or at all of it."""
    twins = Twins(device, 2, 60, seed=1, sampler=Fresh, view=lambda: NStep(1))
    draws, looks = internals.draws_on_device(twins.there), list[bool]()
    for t in range(200):
        twins.add(0.05)
        if t > 2 and (t < 60 or t % 50 == 0):
            twins.batches(8)
            looks.append(draws.relied_on()[0])
    assert looks[:50] == [False] * 50  # all that waits is served each time
    assert looks[-1]  # 50 steps may write 100 rows
    twins.check()


@pytest.mark.parametrize("inner", [*INNER][:2])
@pytest.mark.parametrize("envs", [in_ci(8)])
def test_compiled_batches_are_those_of_a_replay_in_ram(envs: int, inner: str) -> None:
    twins = Twins(torch.device("cpu"), envs, 12, seed=3, sampler=INNER[inner], view=lambda: NStep(3))
    twins.hold_compiled(40, 30, 3)


def test_a_draw_that_fails_serves_nothing_twice(device: torch.device) -> None:
    twins = Twins(device, 2, 30, seed=1, sampler=Fresh, view=lambda: NStep(1))
    for _ in range(12):
        twins.add(0.1)
    twins.batches(5)
    draws = internals.draws_on_device(twins.there)
    inner, served = draws.inner.draw, twins.there.sampler.served

    def fails(*_: Any) -> Any:
        raise KeyboardInterrupt

    draws.inner.draw = fails
    with pytest.raises(KeyboardInterrupt):
        twins.there.sample(5)
    draws.inner.draw = inner
    assert twins.there.sampler.served == served
    waiting = twins.there.sampler.waiting
    assert twins.there.sample(waiting)["index"].cpu().tolist() == twins.ram.sample(waiting)["index"].tolist()


@pytest.mark.parametrize("form", ["shared", "own"])
def test_rows_that_envs_stored_in_unlike_numbers_are_served_while_they_are_stored(
    device: torch.device, form: str
) -> None:
    """The queue begins in the order of completion, all of one env first, and envs are overwritten at their own time."""
    for steps in range(1, 7):
        twins = Twins(device, 2, 8, seed=1, sampler=Fresh, view=lambda: NStep(1), **FORMS[form][1])
        for env in (0, 1):
            for _ in range(8):
                twins.add_to_some([env], odds=0.0)
        for _ in range(steps):
            twins.add(0.0)
        assert_counts_alike(twins)
        for _ in range(2):
            twins.batches(9)
            assert_counts_alike(twins)
