"""Replays in files that an earlier release wrote: what was promised of them holds, and they go on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from former_files import ENVS, FILES, step
from relive import NStep, Prioritized, ReplayBuffer, WithoutReplacement
from relive.replay import durable


def opened(name: str, path: Path) -> ReplayBuffer:
    """A copy of one of them, opened."""
    shutil.copytree(FILES / name, path / name)
    return ReplayBuffer.open(path / name, verify=True)


def require_true(batch: Any) -> None:
    """Every field of a batch is what the number of its step says."""
    for row in map(batch.rows, range(len(batch))):
        number, env = int(row["action"]) % 100, int(row["action"]) // 100
        then = step(number + int(row["steps"]) - 1)
        ended = bool(then["terminated"][env] | then["truncated"][env])
        after = then["next_obs"] if ended else step(number + int(row["steps"]))["obs"]
        for name in ("camera", "half"):
            for side, known in (("obs", step(number)["obs"]), ("next_obs", after)):
                assert torch.equal(row[side, name], torch.as_tensor(known[name][env])), (name, number, env)
        assert bool(row["terminated"]) == bool(then["terminated"][env])


def goes_on(replay: ReplayBuffer, newest: list[int]) -> None:
    """Further steps are stored, and the whole is as it should be afterwards."""
    replay.add(step(17))
    replay.add(step(18))
    replay.check()
    assert replay.data()["action"].tolist()[-len(newest) :] == newest
    require_true(replay.data())


def test_one_that_was_closed_has_everything_and_its_episodes_go_on(tmp_path: Path) -> None:
    with opened("closed", tmp_path) as replay:
        assert isinstance(replay.sampler, WithoutReplacement)
        data = replay.data()
        assert data["index"].tolist() == [*range(16, 20), 21, 20, 22, 25, 24, 27, 26, 28, 29, 31, 33, 32, 34, 37]
        assert data["action"].tolist() == [7, 107, 8, 108, 109, 9, 10, 110, 11, 111, 12, 13, 112, 113, 114, 14, 15, 115]
        assert replay.seed == 3
        assert replay.stats()["batches"] == 1
        require_true(data)
        assert replay.sample(4)["index"].tolist() == [24, 33, 28, 21]
        goes_on(replay, [14, 15, 115, 16, 116, 17, 117])


def test_one_that_was_killed_has_every_step_that_was_added_and_nothing_of_the_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "is_same_boot", lambda *_: True)  # as on the machine where it was killed
    with opened("killed", tmp_path) as replay:
        assert replay.sampler.alpha == 0.5  # set after the flush
        assert isinstance(replay.view, NStep)
        data = replay.data()
        assert data["action"].tolist() == [7, 107, 8, 108, 109, 9, 10, 110, 11, 111, 12, 13, 112, 113, 114, 14]
        assert [int(row["action"]) for env in range(ENVS) for row in [replay.slice(env).rows(-1)]] == [15, 115]
        rated = replay.priorities(data["index"])
        assert rated.tolist() == pytest.approx([1, 1, 12.5**0.5, 1, 3, 1, 1, 15.5**0.5, 1, 1, 1, 1, 1, 1, 1, 15.5**0.5])
        require_true(data)
        goes_on(replay, [113, 114, 14, 17, 117])


def test_one_that_was_killed_and_copied_is_as_of_its_last_flush_without_the_rows_in_reserve(tmp_path: Path) -> None:
    with opened("killed", tmp_path) as replay:
        assert isinstance(replay.sampler, Prioritized)
        assert replay.sampler.alpha == 0.6
        data = replay.data()
        assert data["action"].tolist() == [10, 110, 11, 111, 12, 13, 112, 113, 114]
        assert replay.stats()["batches"] == 1
        require_true(data)
        goes_on(replay, [113, 114, 17, 117])
