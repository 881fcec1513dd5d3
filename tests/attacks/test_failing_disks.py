"""Disks that are full, read-only or gone: the error says what to do, and the old save is there if its disk is."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relive import Prioritized, ReplayBuffer, Schema, Uniform
from relive.errors import NoSaveError
from support.effort import often

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mounts file systems, or limits the size of files")

STEP = {"obs": np.zeros(64, np.float32), "action": 0, "reward": 0.0, "terminated": False, "truncated": False}
SCHEMA = Schema.from_example(STEP)
WAYS = pytest.mark.parametrize("background", [False, True])


def filled(rows: int) -> ReplayBuffer:
    """A buffer of about 300 bytes a row, with so many of them."""
    buffer, flags = ReplayBuffer(SCHEMA, 20_000, seed=0), np.zeros((rows, 1), np.bool_)
    tags = np.arange(rows)[:, None]
    buffer.extend({"obs": np.repeat(tags[..., None], 64, 2), "action": tags, "reward": tags,
                   "terminated": flags, "truncated": flags})  # fmt: skip
    return buffer


def failing(buffer: ReplayBuffer, path: Path, background: bool, number: int) -> OSError:
    """The error of a save that cannot be made."""
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        buffer.save(path, background=background).wait()
    assert caught.value.errno == number
    return caught.value


def assert_old(path: Path, rows: int, error: OSError) -> None:
    """The save is that of so many rows, no file of a failed one remains, and the error says so."""
    loaded = ReplayBuffer.load(path)
    assert loaded.data()["action"].tolist() == list(range(rows - 1))
    assert error.__notes__[-1] == f"the save into '{path}' failed; the previous save is unchanged"


@contextmanager
def mounted(path: Path, options: str) -> Iterator[Path]:
    """A file system of its own, in memory."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@WAYS
def test_a_file_system_without_room_for_a_save_keeps_the_one_that_it_has(background: bool, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=1m") as disk:
        filled(100).save(disk / "save")
        before = sorted(os.listdir(disk / "save"))
        error = failing(filled(9000), disk / "save", background, errno.ENOSPC)
        assert "bytes besides those of the save in place" in error.__notes__[0]
        assert "make room, or save to another disk" in error.__notes__[0]
        assert_old(disk / "save", 100, error)
        assert sorted(os.listdir(disk / "save")) == before
        failing(filled(9000), disk / "first", background, errno.ENOSPC)
        assert not (disk / "first").exists()
        filled(200).save(disk / "save", background=background).wait()
        assert len(ReplayBuffer.load(disk / "save")) == 199


@WAYS
def test_a_file_system_that_became_read_only_keeps_its_save(background: bool, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=4m") as disk:
        filled(100).save(disk / "save")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        error = failing(filled(200), disk / "save", background, errno.EROFS)
        assert str(disk / "save") in str(error)
        assert_old(disk / "save", 100, error)


@WAYS
def test_a_directory_that_may_not_be_written_keeps_its_save(background: bool, tmp_path: Path) -> None:
    filled(100).save(tmp_path / "save")
    (tmp_path / "save").chmod(0o500)
    try:
        if os.access(tmp_path / "save", os.W_OK):
            pytest.skip("this user may write anywhere")
        error = failing(filled(200), tmp_path / "save", background, errno.EACCES)
        assert str(tmp_path / "save") in str(error)
        assert_old(tmp_path / "save", 100, error)
    finally:
        (tmp_path / "save").chmod(0o700)


@WAYS
def test_files_that_may_not_grow_are_an_error(background: bool, tmp_path: Path) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    filled(100).save(tmp_path / "save")
    large = filled(9000)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, limits[1]))
        error = failing(large, tmp_path / "save", background, errno.EFBIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "or allows no more" in error.__notes__[0]
    assert_old(tmp_path / "save", 100, error)
    large.save(tmp_path / "save")
    assert len(ReplayBuffer.load(tmp_path / "save")) == 8999


class Remover:
    """Removes a directory before call number ``at`` of a function of ``os``, and may make it anew."""

    def __init__(self, path: Path, name: str, at: int, again: bool) -> None:
        self.path, self.left, self.again = path, at, again
        self.reads, self.genuine = name == "open", getattr(os, name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        if not (self.reads and not args[1] & os.O_CREAT):
            self.left -= 1
            if self.left == -1:
                shutil.rmtree(self.path)
                if self.again:
                    self.path.mkdir()
        return self.genuine(*args, **named)


@pytest.mark.parametrize("name", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize(("background", "again"), [(False, False), (True, True)])
def test_a_directory_that_disappears_while_a_save_is_written_is_an_error(
    name: str, background: bool, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large, path = filled(100), filled(200), tmp_path / "save"
    for at in range(0, 100, often(3, 1)):
        small.save(path)
        remover, said = Remover(path, name, at, again), None
        with monkeypatch.context() as patch:
            patch.setattr(os, name, remover)
            try:
                large.save(path, background=background).wait()
            except OSError as error:
                said = error
        if said is None:
            break
        assert said.errno == errno.ENOENT
        assert str(path) in str(said)
        assert "the directory was removed meanwhile" in said.__notes__[-1]
        with pytest.raises(NoSaveError):
            ReplayBuffer.load(path)
        large.save(path, background=background).wait()  # it knows that nothing is there to be kept
        assert len(ReplayBuffer.load(path)) == 199
        shutil.rmtree(path)
    assert at > 0
    assert remover.left >= 0, "a save is said to be there, and is not"


class Filling:
    """A disk that has no room left at call number ``at`` of a function of ``os``, and after it."""

    def __init__(self, name: str, at: int) -> None:
        self.left, self.genuine = at, getattr(os, name)

    def __call__(self, *args: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.genuine(*args)


@pytest.mark.parametrize("name", ["posix_fallocate", "write", "pwrite", "replace", "fsync"])
def test_a_replay_in_files_that_a_full_disk_refuses_leaves_nothing_behind(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, opened = 0, False
    while not opened:
        with monkeypatch.context() as patch:
            patch.setattr(os, name, Filling(name, at))
            try:
                replay = ReplayBuffer.open(tmp_path / "made" / "replay", SCHEMA, 100)
                opened = True
                replay.close()
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
        if not opened:
            assert not (tmp_path / "made" / "replay").exists(), (at, os.listdir(tmp_path / "made" / "replay"))
        at += 1
    assert at > 1


@pytest.mark.parametrize("name", ["posix_fallocate", "write", "replace", "fsync"])
def test_a_replay_in_files_that_a_full_disk_refuses_new_arrays_opens_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, at, opened = tmp_path / "replay", 0, False
    with ReplayBuffer.open(path, SCHEMA, 100) as replay:
        replay.add(STEP)
        replay.add(STEP)
    while not opened:
        with monkeypatch.context() as patch:
            patch.setattr(os, name, Filling(name, at))
            try:
                replay = ReplayBuffer.open(path, sampler=Prioritized())  # which keeps arrays of its own
                opened = True
                replay.close()
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
        if not opened:
            with ReplayBuffer.open(path, sampler=Uniform()) as replay:
                assert len(replay) == 1
                replay.check()
            assert not [left for left in os.listdir(path) if left.endswith(".tmp")]
        at += 1
    assert at > 1
