"""A copy in memory of a replay in files, as inspect and audit take it: whole, whoever else has the files open."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive
from relive import Field, FrameStack, NStep, Prioritized, Recent, ReplayBuffer, Schema, errors
from relive.replay import durable as copying
from relive.replay.durable import copied
from relive.ring.ring import Undo
from support import internals
from support.cases import covering
from support.forks import in_fork

FLAGS = {name: Field((), torch.bool) for name in ("terminated", "truncated")}
SCHEMA = Schema({"obs": (2,), "camera": Field((40, 40), torch.uint8), "reward": (), **FLAGS})
ENVS, ROWS = 3, 40


def steps(first: int, count: int) -> dict[str, Any]:
    """Vector steps ``[count, ENVS]``; all that is in them follows from the number of the step and the env."""
    t = np.arange(first, first + count)[:, None].repeat(ENVS, 1)
    tag = (10 * t + np.arange(ENVS)).astype(np.float32)
    ends, camera = t % 7 == 6, np.broadcast_to((t % 251).astype(np.uint8)[..., None, None], (count, ENVS, 40, 40))
    return {"obs": tag[..., None].repeat(2, -1), "camera": camera, "reward": tag, "terminated": ends,
            "truncated": ends & False, "next_obs": tag[..., None].repeat(2, -1) + 10}  # fmt: skip


def opened(path: Path, **options: Any) -> ReplayBuffer:
    return ReplayBuffer.open(path, SCHEMA, ENVS * ROWS, ENVS, check_ends=False, **options)


def numbers_of(path: Path) -> dict[int, list[int]]:
    """The numbers of the steps of each env that an inspection finds, which are whole and in order."""
    found = relive.inspect(path).experience
    tag, cameras, own = found.reward, found.others["camera",], {}
    np.testing.assert_array_equal(found.obs[()], tag[:, None].repeat(2, 1))
    assert found.next_obs is not None
    np.testing.assert_array_equal(found.next_obs[()], tag[:, None].repeat(2, 1) + 10)
    for env in range(ENVS):
        mine = found.env == env
        number = (tag[mine].astype(int) - env) // 10
        assert (np.diff(number) == 1).all()
        np.testing.assert_array_equal(found.terminated[mine], number % 7 == 6)
        np.testing.assert_array_equal(cameras[mine], (number % 251)[:, None, None] * np.ones((40, 40), np.uint8))
        own[env] = number.tolist()
    return own


def files_of(path: Path) -> dict[str, tuple[bytes, int]]:
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir() if file.is_file()}


def same(one: Any, other: Any) -> None:
    """Require that two experiences are equal in all but the name of their source."""
    for name, value in vars(one).items():
        if name != "source":
            np.testing.assert_equal(getattr(other, name), value, err_msg=name)


@pytest.mark.parametrize(
    ("count", "sampler"),
    covering(
        [0, 1, 25, 130],
        [relive.Uniform, Prioritized, lambda: Recent(0.9, 5, inner=Prioritized())],
        full=2,
        quick=1,
    ),
)
def test_an_open_a_closed_and_a_dropped_replay_are_read_as_they_are(count: int, sampler: Any, tmp_path: Path) -> None:
    replay = opened(tmp_path / "r", sampler=sampler(), view=NStep(2, gamma=0.9), seed=0)
    replay.extend(steps(0, count))
    if count > 1 and replay.has_priorities:
        batch = replay.sample(16)
        replay.update_priorities(batch["index"], batch["reward"])
    truth, before = relive.inspect(replay).experience, files_of(tmp_path / "r")
    same(truth, relive.inspect(tmp_path / "r").experience)
    assert files_of(tmp_path / "r") == before
    replay.close()
    before = files_of(tmp_path / "r")
    same(truth, relive.inspect(str(tmp_path / "r")).experience)
    assert relive.audit(tmp_path / "r").rows == len(truth)
    assert files_of(tmp_path / "r") == before
    again = opened(tmp_path / "r")
    again.extend(steps(count, 5))
    truth = relive.inspect(again).experience
    del again, replay  # not closed: as after a kill
    same(truth, relive.inspect(tmp_path / "r").experience)


def test_a_copied_directory_is_read_as_of_its_last_flush(tmp_path: Path) -> None:
    replay = opened(tmp_path / "r")
    replay.extend(steps(0, 20))
    replay.flush()
    replay.extend(steps(20, 5))
    shutil.copytree(tmp_path / "r", tmp_path / "copy")
    found = numbers_of(tmp_path / "copy")
    assert found == {env: list(range(2, 19)) for env in range(ENVS)}  # the first two rows were in reserve
    assert found == numbers_of(tmp_path / "copy")  # it was not opened, so not repaired either


@pytest.mark.parametrize("count", [10, 60])
def test_rows_that_were_copied_before_the_journal_and_a_flush_between_are_refused(count: int, tmp_path: Path) -> None:
    replay, copy = opened(tmp_path / "r"), tmp_path / "copy"
    replay.extend(steps(0, 20))
    replay.flush()
    copy.mkdir()
    for file in (tmp_path / "r").glob("*-rows.*"):
        shutil.copy(file, copy)
    replay.extend(steps(20, count))
    replay.flush()
    for file in (tmp_path / "r").iterdir():
        if not (copy / file.name).exists():
            shutil.copy(file, copy)
    for read in (relive.inspect, ReplayBuffer.open):
        with pytest.raises(errors.FileFormatError, match="files of several times are mixed"):
            read(copy)


@pytest.mark.parametrize("turns", [1, 9])
def test_what_is_overwritten_during_the_copy_is_left_out(
    turns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay, take_rows = opened(tmp_path / "r"), internals.take_rows(copying)
    replay.extend(steps(0, 100))

    def writing(*args: Any) -> None:
        first = replay.stats()["completed"] // ENVS + 1
        replay.extend(steps(first, turns))
        take_rows(*args)
        replay.extend(steps(first + turns, 1))

    monkeypatch.setattr(copying, "_take_rows", writing)
    for env, found in numbers_of(tmp_path / "r").items():
        assert found[-1] == 98, f"env {env}"  # the newest was one that waits for its next observation
        assert 34 - turns - 5 - 2 <= len(found) <= 34 - turns - 1


def test_files_that_change_too_fast_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay, take_rows = opened(tmp_path / "r"), internals.take_rows(copying)
    replay.extend(steps(0, 100))

    def writing(*args: Any) -> None:
        take_rows(*args)
        replay.extend(steps(200, 100))

    monkeypatch.setattr(copying, "_take_rows", writing)
    with pytest.raises(errors.LifecycleError, match="too fast to copy"):
        relive.inspect(tmp_path / "r")


def test_a_replay_that_is_opened_or_closed_during_the_copy_is_copied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path / "r").close()
    take_rows, turns = internals.take_rows(copying), iter((True,))

    def writing(*args: Any) -> None:
        if next(turns, False):
            with opened(tmp_path / "r") as replay:
                replay.extend(steps(0, 10))
        take_rows(*args)

    monkeypatch.setattr(copying, "_take_rows", writing)
    assert numbers_of(tmp_path / "r") == {env: list(range(9)) for env in range(ENVS)}


def die_in_a_change(path: Path) -> None:
    """Add steps in a child that ends while its last change is under way."""

    def work() -> None:
        replay = opened(path)
        replay.extend(steps(0, 60))
        Undo.end = lambda self: os._exit(0) if self.active else None  # type: ignore[method-assign]
        replay.extend(steps(60, 9))

    if (child := os.fork()) == 0:
        work()
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_change_that_a_kill_broke_off_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_fork(die_in_a_change, tmp_path / "r")
    monkeypatch.setattr(copying, "PAUSE_SECONDS", 0.05)
    before = files_of(tmp_path / "r")
    found = numbers_of(tmp_path / "r")
    assert files_of(tmp_path / "r") == before
    same(relive.inspect(tmp_path / "r").experience, relive.inspect(opened(tmp_path / "r")).experience)
    assert all(58 <= number[-1] < 68 for number in found.values())


def test_settings_are_those_that_were_set_last(tmp_path: Path) -> None:
    replay = opened(tmp_path / "r", sampler=Prioritized(), view=relive.NStep(2))
    replay.extend(steps(0, 10))
    replay.sampler.alpha, replay.view.n = 0.3, 4
    found = copied(ReplayBuffer, tmp_path / "r")
    assert (repr(found.sampler), repr(found.view)) == (repr(replay.sampler), repr(replay.view))


def test_a_sampler_and_a_view_of_a_user_are_not_needed(tmp_path: Path) -> None:
    class Own(relive.Uniform):
        pass

    replay = opened(tmp_path / "r", sampler=Own(), view=FrameStack(2, window=relive.NStep(1, gamma=0.9)))
    replay.extend(steps(0, 10))
    assert copied(ReplayBuffer, tmp_path / "r").num_envs == ENVS
    assert len(relive.inspect(tmp_path / "r").experience) == 9 * ENVS


def test_memory_is_asked_for_before_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = opened(tmp_path / "r")
    replay.extend(steps(0, 10))
    monkeypatch.setattr("relive.memory.estimate.free_memory", lambda: 1000)
    with pytest.raises(errors.ParameterError, match=r"a copy of .* would take .* and 1,000 are free"):
        relive.inspect(tmp_path / "r")
