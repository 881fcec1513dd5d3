"""Copies of buffers and views go on alike and apart."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relive import (
    FrameStack,
    NStep,
    ReplayBuffer,
    RolloutBuffer,
    Schema,
    Sequence,
    errors,
)
from support.cases import covering
from support.shared_buffers import IMAGES, LARGE, SAMPLERS, fill, holds, replay_of, sent, written
from support.twins import contents, same_batches


def doubled(rewards: Any) -> Any:
    return 2 * rewards


VIEWS: dict[str, Callable[[], Any]] = {
    "NStep": lambda: NStep(3),
    "NStep with a function": lambda: NStep(2, each_reward=doubled),
    "FrameStack with a function": lambda: FrameStack(2, NStep(2, each_reward=doubled)),
    "Sequence": lambda: Sequence(4),
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "multiprocessing": sent,
}


@pytest.mark.parametrize(("view", "sampler", "how"), covering(VIEWS, SAMPLERS, COPIES, full=3, quick=2))
def test_a_copy_of_a_replay_goes_on_alike_and_apart(view: str, sampler: str, how: str) -> None:
    replay = replay_of(30, view=VIEWS[view](), sampler=SAMPLERS[sampler]())
    replay.sample(8)
    again = COPIES[how](replay)
    assert type(again.sampler) is type(replay.sampler)
    assert again.sampler is not replay.sampler
    assert again.view == replay.view
    assert again.view is not replay.view
    for t in range(30, 45):
        for each in (replay, again):
            each.add(written(IMAGES, 2, t))
    again.check()
    for _ in range(3):
        assert same_batches(replay.sample(8), again.sample(8))
    before = contents(replay)
    for t in range(60):
        again.add(written(IMAGES, 2, t))
    assert contents(replay) == before
    if "function" in view:
        view_of = again.view.window if view.startswith("Frame") else again.view
        assert view_of.each_reward is doubled


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_a_rollout_has_memory_of_its_own(how: str) -> None:
    rollout = RolloutBuffer(LARGE, 4, 3, seed=0)
    fill(rollout, "add", 0)
    again = COPIES[how](rollout)
    assert holds(again, 0)
    again.clear()
    fill(again, "add", 50)
    assert holds(again, 50)
    assert holds(rollout, 0)


def test_a_copy_made_while_rows_are_reserved_leaves_them_to_the_original() -> None:
    rollout = RolloutBuffer(Schema({"x": ()}), 2, 1)
    rows = rollout.reserve()
    again = sent(rollout)
    rows["x"][:] = 3
    for each in (rollout, again):
        each.commit()
    assert rollout["x"].flatten().tolist() == [3, 3]
    assert again["x"].flatten().tolist() == [0, 0]


def test_a_view_with_a_function_is_not_saved_without_it(tmp_path: Path) -> None:
    for number, view in enumerate((NStep(2, each_reward=doubled), FrameStack(2, NStep(2, each_reward=doubled)))):
        replay = replay_of(30, view=view)
        replay.save(tmp_path / str(number))
        with pytest.raises(errors.FileFormatError, match=r"your own functions.*view="):
            ReplayBuffer.load(tmp_path / str(number))
        again = ReplayBuffer.load(tmp_path / str(number), view=copy.deepcopy(view))
        assert same_batches(replay.sample(8), again.sample(8))
