"""Functions of goals, called between two compiled calls, may fail, and may use the replay that calls them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import inside
from drawing import EVERY_SAMPLER, GOALS, World, assert_same, both, facts, filled, state
from effort import often
from interrupting import broken_off
from relabelling import worth
from relive import Hindsight, NStep
from relive.errors import EmptyError, ReliveError

# errors


def raising(error: type[BaseException]) -> Callable[..., Any]:
    def function(achieved: Any, desired: Any) -> Any:
        raise error("on purpose")

    return function


WRONG: dict[str, tuple[dict[str, Any], type[BaseException]]] = {
    "raises": ({"reward_fn": raising(ZeroDivisionError)}, ZeroDivisionError),
    "is broken off": ({"reward_fn": raising(KeyboardInterrupt)}, KeyboardInterrupt),
    "raises later": ({"truncated_fn": raising(ReliveError)}, ReliveError),
    "one number": ({"reward_fn": lambda achieved, desired: 1.0}, ReliveError),
    "too few": ({"reward_fn": lambda achieved, desired: np.ones(len(achieved) - 1, np.float32)}, ReliveError),
    "complex": ({"reward_fn": lambda achieved, desired: np.ones(len(achieved), complex)}, ReliveError),
    "flags of numbers": ({"terminated_fn": lambda achieved, desired: np.ones(len(achieved))}, ReliveError),
    "nan": ({"reward_fn": lambda achieved, desired: np.full(len(achieved), np.nan, np.float32)}, ReliveError),
    "the last is infinite": ({"reward_fn": lambda achieved, desired: 1 / np.arange(len(achieved))[::-1]}, ReliveError),
    "no such goal": ({"achieved": "nothing"}, ReliveError),
    "none at all": ({"reward_fn": None}, ReliveError),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("wrong", WRONG)
def test_an_error_is_that_of_the_long_way_and_so_is_what_follows(wrong: str) -> None:
    change, error = WRONG[wrong]
    found = []
    for world in both("goals", sampler=EVERY_SAMPLER["beta by schedule"], view=lambda: Hindsight(worth, n=2)):
        for _ in range(30):
            world.add()
        world.look()
        before = {name: getattr(world.buffer.view, name) for name in change}
        for _ in range(2):
            for name, value in change.items():
                setattr(world.buffer.view, name, value)
            with pytest.raises(error) as raised:
                world.buffer.sample(9)
            world.seen += [raised.type, str(raised.value), state(world.buffer)]
            for name, value in before.items():
                setattr(world.buffer.view, name, value)
            world.look()
        found.append(world.seen)
    assert_same(*found)


@pytest.mark.parametrize("goals", [None, "future"])
@pytest.mark.parametrize("sampler", ["uniform", "beta by schedule", "prioritized, independent", "recent, uniform"])
def test_an_empty_replay_has_nothing_to_draw_and_nothing_is_counted(sampler: str, goals: str | None) -> None:
    found = []
    for world in both("goals", sampler=EVERY_SAMPLER[sampler], view=GOALS[goals] if goals else None):
        for full in (False, True, False):
            for _ in range(20 * full):
                world.add()
            if not full:
                world.buffer.clear()
            world.look()
        with pytest.raises(EmptyError):
            world.buffer.sample(3)
        assert world.buffer.stats()["batches"] == 1
        found.append(world.seen)
    assert_same(*found)


@pytest.mark.parametrize("goals", [None, "final, 3-step, both flags"])
def test_after_a_batch_that_is_broken_off_anywhere_the_next_ones_are_those_of_the_long_way(goals: str | None) -> None:
    view = GOALS[goals]() if goals else NStep(2)
    buffer, at = filled("goals", sampler=EVERY_SAMPLER["beta by schedule"](), view=view), 0
    while broken_off(lambda: buffer.sample(5), at):
        at += often(2, 1)
        other = copy.deepcopy(buffer)
        inside.take_the_long_way(other)
        if at % 3 == 0:
            buffer.sampler.alpha = other.sampler.alpha = at / 99  # new priorities: all is made ready again
        assert_same([facts(buffer.sample(5)), state(buffer)], [facts(other.sample(5)), state(other)])
    assert at > 20


# functions of goals that use the replay themselves


@pytest.mark.parametrize("within", ["batch", "other size", "seed", "view", "alpha", "add", "look"])
def test_a_function_of_goals_may_use_the_replay_and_draw_from_it(within: str) -> None:
    found = []
    for world in both("goals", sampler=EVERY_SAMPLER["beta by schedule"]):
        for _ in range(30):
            world.add()
        depth, buffer = 0, world.buffer

        def judge(achieved: Any, desired: Any, world: World = world) -> Any:
            nonlocal depth
            depth += 1
            buffer = world.buffer
            tables = inside.fused(inside.reader(buffer))
            before = tables and weakref.ref(tables.batch.table)
            del tables
            if depth < 3:
                if within == "seed":
                    buffer.seed = depth
                elif within == "view":
                    buffer.view = NStep(2)
                elif within == "alpha":
                    buffer.sampler.alpha = 0.1 * depth
                elif within == "add":
                    world.add()
                if within != "look":
                    world.look(5 if within == "other size" else 12)
                world.seen.append(state(buffer))
            assert not before or before() is not None  # the outer batch needs it
            depth -= 1
            return worth(achieved, desired)

        view = buffer.view = Hindsight(judge, n=2)
        for _ in range(4):
            plain = copy.deepcopy(buffer)
            plain.view.reward_fn = worth
            wanted = facts(plain.sample(12))
            world.look()
            assert within == "add" or world.seen[-2] == wanted  # the outer batch does not notice
            buffer.view = view
        found.append(world.seen)
    assert_same(*found)
