"""Functions of goals, called between two compiled calls, may fail, and may use the replay that calls them."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from relive import Hindsight, NStep
from relive.errors import ReliveError
from support.effort import often
from support.goal_plays import worth
from support.random_draws import EVERY_SAMPLER, GOALS, World, assert_same_in, facts, filled, state

WAYS = "places first", "without the exchange", "in files"

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


def some_ways(case: int) -> list[str]:
    """All ways, of which quick tests take some others in the next case."""
    return [*WAYS][case % often(3, 1) :: often(3, 1)]


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("wrong", WRONG)
def test_after_an_error_the_next_batches_are_as_they_should_be(wrong: str) -> None:
    change, error = WRONG[wrong]

    def play(world: World) -> None:
        world.fill()
        view = world.buffer.view
        before = {name: getattr(view, name) for name in change}
        for _ in range(2):
            plain = copy.deepcopy(world.buffer) if world.copied else None
            for name, value in change.items():
                setattr(view, name, value)
            with pytest.raises(error) as raised:
                world.buffer.sample(9)
            world.seen += [raised.type, str(raised.value), state(world.buffer)]
            for name, value in before.items():
                setattr(view, name, value)
            if plain is not None:  # the failed batch counts as drawn
                plain.sample(9)
                assert state(plain) == state(world.buffer)
            world.look()

    options = {"sampler": EVERY_SAMPLER["beta by schedule"], "view": lambda: Hindsight(worth, n=2)}
    assert_same_in(some_ways([*WRONG].index(wrong)), play, "goals", **options)


# functions of goals that use the replay themselves


WITHIN = ["batch", "other size", "seed", "view", "alpha", "add", "look"]


@pytest.mark.parametrize("within", WITHIN)
def test_a_function_of_goals_may_use_the_replay_and_draw_from_it(within: str) -> None:
    def play(world: World) -> None:
        for _ in range(30):
            world.add()
        depth, buffer = 0, world.buffer

        def judge(achieved: Any, desired: Any) -> Any:
            nonlocal depth
            depth += 1
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
            depth -= 1
            return worth(achieved, desired)

        view = buffer.view = Hindsight(judge, n=2)
        for _ in range(4):
            wanted = None
            if world.copied:
                plain = copy.deepcopy(buffer)
                plain.view.reward_fn = worth
                wanted = facts(plain.sample(12))
            world.look()
            assert within == "add" or not wanted or world.seen[-2] == wanted  # the outer batch does not notice
            buffer.view = view

    assert_same_in(some_ways(WITHIN.index(within)), play, "goals", sampler=EVERY_SAMPLER["beta by schedule"])


def test_functions_that_fail_leave_no_memory_behind() -> None:
    def failing(achieved: Any, desired: Any) -> Any:
        seen.append(weakref.ref(desired))
        raise ZeroDivisionError

    seen, buffer = list[Any](), filled("goals", view=GOALS["future"]())
    buffer.view.reward_fn = failing
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            buffer.sample(9)
    gc.collect()
    assert [ref() for ref in seen] == [None] * 3
