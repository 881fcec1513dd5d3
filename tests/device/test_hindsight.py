"""Goals that were reached later, given on a device: the batches are those of a replay in RAM, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from relive import Field, Hindsight, NStep, Prioritized, Recent, Schema, Uniform
from relive.errors import DTypeError, ShapeError
from support import internals
from support.device_twins import Twins, assert_same
from support.effort import first_of, in_ci, often
from support.other_device import no_waiting, places
from support.tapes import TAPED

GOALS = Schema({
    "obs": {"x": (5,), "achieved_goal": (2,), "desired_goal": (2,), "camera": Field((3, 400), torch.uint8)},
    "action": (2,),
    "extra": {"a": (2,), "b": Field((), torch.float64)},
    "reward": (),
    "terminated": Field((), torch.bool),
    "truncated": Field((), torch.bool),
})  # fmt: skip


def near(achieved: Tensor, desired: Tensor) -> Tensor:
    return ((achieved - desired).abs() < 60.0)[:, 0]


def reward(achieved: Tensor, desired: Tensor) -> Tensor:
    assert isinstance(achieved, Tensor)
    return near(achieved, desired).to(torch.float64) - 0.1 * (achieved[:, 1] - desired[:, 1])


def informed(achieved: Tensor, desired: Tensor, info: Any) -> Tensor:
    return achieved[:, 0] - desired[:, 1] + info["b"] * 2.0 - info["a"][:, 1]


def view_of(strategy: Any, n: int, **options: Any) -> Any:
    return lambda: Hindsight(options.get("reward_fn", reward), strategy, n=n, tensors=True, **{
        name: value for name, value in options.items() if name != "reward_fn"
    })  # fmt: skip


VIEWS: list[Any] = [
    view_of("future", 1),
    view_of("random", 3, truncated_fn=near, ratio=0.5),
    view_of("final", 3, terminated_fn=near, finished_only=True),
    view_of("episode", 4, gamma=0.9, reward_fn=informed, info="extra"),
    view_of("past", 2, ratio=1.0),
]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("sampler", first_of(1, [Uniform, Prioritized, lambda: Recent(0.998, 10)]))
@pytest.mark.parametrize("world", first_of(1, [(4, 13, 0.2), (1, 30, 0.15), (5, 64, 0.02)]))
def test_batches_are_those_of_a_replay_in_ram(device: torch.device, world: Any, sampler: Any, view: Any) -> None:
    envs, size, odds = world
    twins = Twins(device, envs, size, seed=size, schema=GOALS, sampler=sampler, view=view)
    relabelled = 0
    for t in range(often(2, 4) * size):
        twins.add(odds)
        if t > 8 and t % often(5, 3) == 0:
            with no_waiting() as watch:
                watch.allow = t < 14
                theirs = twins.there.sample(30)
            ours = twins.ram.sample(30)
            assert_same(ours, theirs)
            relabelled += int(ours["relabelled"].sum())
            assert internals.is_ahead(twins.there)
    assert relabelled > 30
    twins.check()


@pytest.mark.parametrize("device", places(in_ci(TAPED)), indirect=True)
def test_the_host_takes_its_turns_between(device: torch.device) -> None:
    twins = Twins(device, 4, 20, seed=3, schema=GOALS, view=view_of("future", 2))
    turns: list[Any] = [
        lambda buffer: buffer.interrupt([1, 3]),
        lambda buffer: setattr(buffer.view, "n", 4),
        lambda buffer: setattr(buffer.view, "strategy", "episode"),
        lambda buffer: setattr(buffer, "view", NStep(2)),
        lambda buffer: setattr(buffer, "view", view_of("final", 2, finished_only=True)()),
        lambda buffer: buffer.clear(),
        lambda buffer: setattr(buffer.view, "ratio", 0.3),
    ]
    for change in turns:
        for _ in range(12):
            twins.add(0.15)
        for _ in range(3):
            twins.add(0.15)
            twins.batches(16)
        assert internals.is_ahead(twins.there)
        for buffer in (twins.ram, twins.there):
            change(buffer)
        twins.add_to_some([0, 2])
        twins.check()


def test_functions_of_tensors_serve_copies_too() -> None:
    steps: dict[str, Any] = {"reward": torch.zeros(6, 1), "terminated": torch.zeros(6, 1, dtype=torch.bool)}
    steps |= {"obs": {}, "next_obs": {}, "extra": {"a": torch.rand(6, 1, 2), "b": torch.rand(6, 1)}}
    for name in ("obs", "next_obs"):
        steps[name] = {goal: torch.rand(6, 1, 2) for goal in ("achieved_goal", "desired_goal")}
    steps["truncated"] = steps["terminated"]
    view = Hindsight(informed, info="extra", tensors=True)
    copies = view.copies(steps, 2, seed=1)
    told = informed(
        *(torch.from_numpy(copies["next_obs"][goal][:, 0]) for goal in ("achieved_goal", "desired_goal")),
        {name: torch.from_numpy(copies["extra"][name][:, 0]) for name in "ab"},
    )
    assert torch.equal(torch.from_numpy(copies["reward"][:, 0]), told.float())


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda a, d: (a - d)[:5, 0], ShapeError, "one result for each"),
        (lambda a, d: (a - d).cfloat()[:, 0], DTypeError, "expected numbers"),
        (lambda a, d: 3.0, DTypeError, "tensors=False"),
    ],
)
def test_wrong_results_are_refused(device: torch.device, function: Any, error: Any, message: str) -> None:
    twins = Twins(device, 4, 20, seed=3, schema=GOALS, view=lambda: Hindsight(function, tensors=True))
    for _ in range(12):
        twins.add(0.1)
    with pytest.raises(error, match=message):
        twins.there.sample(20)
    with pytest.raises((ShapeError, DTypeError)):
        twins.ram.sample(20)
    for buffer in (twins.ram, twins.there):
        buffer.view.reward_fn = reward
    with no_waiting():
        theirs = twins.there.sample(20)
    assert_same(twins.ram.sample(20), theirs)


def test_rewards_that_are_not_finite_are_told_of_later(device: torch.device) -> None:
    view = lambda: Hindsight(lambda a, _: a[:, 0] / 0.0, ratio=1.0, tensors=True)  # noqa: E731
    twins = Twins(device, 4, 20, seed=3, schema=GOALS, view=view)
    for _ in range(12):
        twins.add(0.1)
    twins.there.sample(20)
    with pytest.warns(UserWarning, match="20 rewards of new goals were NaN"):
        twins.there.stats()
    twins.there.check()


@pytest.mark.parametrize("view", [in_ci(VIEWS[2])])
def test_compiled_batches_are_those_of_a_replay_in_ram(view: Any) -> None:
    twins = Twins(torch.device("cpu"), 4, 20, seed=3, schema=GOALS, view=view)
    twins.hold_compiled(20, adds=30, first=10)


def test_each_step_of_a_window_whose_reward_is_not_finite_is_counted_once(device: torch.device) -> None:
    """Windows are shorter than n at the ends of episodes, and so near the newest step."""
    twins = Twins(
        device, 4, 20, seed=3, schema=GOALS, view=view_of("future", 4, reward_fn=lambda a, d: a[:, 0] * torch.nan)
    )
    for _ in range(16):
        twins.add(0.3)
    batch = twins.there.sample(30)
    steps = batch["steps"][batch["relabelled"]]
    assert 1 in steps
    assert 4 in steps
    with pytest.warns(UserWarning, match=f"{int(steps.sum())} rewards of new goals were NaN"):
        twins.there.stats()
