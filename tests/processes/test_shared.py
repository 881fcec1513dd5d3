"""Memory that processes share: who sees it, how long it lasts, and who has a place of it."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relive.errors import LifecycleError, ParameterError
from relive.processes import shared as backing
from relive.processes.shared import Bell, SharedBlock
from support import internals
from support.children import (
    METHODS,
    SECONDS,
    add_one,
    claim_and_stay,
    done,
    is_open_anywhere,
    kill,
    share_and_stay,
    started,
)
from support.forks import in_fork

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs memory that processes share")
LINUX = pytest.mark.skipif(not backing.IN_MEMORY, reason="files without a path are Linux's")


@pytest.fixture(params=[pytest.param(True, marks=LINUX), False], ids=["memory", "file"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SharedBlock:
    """A block of each kind."""
    monkeypatch.setattr(backing, "IN_MEMORY", request.param)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return SharedBlock.create(4096)


def test_a_block_is_zeroed_and_a_copy_is_the_same_memory(block: SharedBlock) -> None:
    assert block.array.shape == (4096,)
    assert block.nbytes == 4096
    assert not block.array.any()
    block.array[5] = 7
    for other in (SharedBlock.attach(block.name), pickle.loads(pickle.dumps(block)), copy.deepcopy(block)):
        assert other.array[5] == 7
        other.array[6] += 1
    assert block.array[6] == 3


@LINUX
@pytest.mark.parametrize("method", METHODS)
def test_another_process_writes_to_the_same_memory(method: str) -> None:
    block = SharedBlock.create(64)
    done(started(method, add_one, block))
    assert (block.array[8:] == 1).all()


def test_a_child_that_is_forked_shares_a_file_too(block: SharedBlock) -> None:
    done(started("fork", add_one, block))
    assert (block.array[8:] == 1).all()


def test_the_memory_outlives_its_block_while_an_array_uses_it() -> None:
    block = SharedBlock.create(64)
    part, name = block.array[10:20], block.name
    del block
    gc.collect()
    part[:] = 3
    assert part.sum() == 30
    with pytest.raises(LifecycleError, match="it is gone"):
        SharedBlock.attach(name)


@LINUX
def test_memory_is_gone_with_the_last_process_even_if_all_are_killed() -> None:
    before, (read, write) = set(os.listdir("/dev/shm")), os.pipe()
    process = started("fork", share_and_stay, write)
    os.close(write)
    with open(read, encoding="ascii") as lines:
        names = [lines.readline().strip() for _ in range(2)]
    token = names[0].rpartition("-")[2]
    assert len({*names}) == 2
    assert len(is_open_anywhere(token)) == 2
    other = SharedBlock.attach(names[1])  # of the child's
    os.killpg(process.pid, 9)
    process.join(SECONDS)
    other.array[0] = 1  # this process has it still
    del other
    gc.collect()
    assert not is_open_anywhere(token)
    assert set(os.listdir("/dev/shm")) <= before
    with pytest.raises(LifecycleError, match="it is gone"):
        SharedBlock.attach(names[0])


def test_a_file_goes_with_its_process_or_with_the_next_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(backing, "IN_MEMORY", False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = SharedBlock.create(10)
    assert len(list(tmp_path.iterdir())) == 1
    del first
    gc.collect()
    assert not list(tmp_path.iterdir())
    left = tmp_path / f"relive-{dead_process()}-{'0' * 16}"
    other = tmp_path / "relive-notes-of-mine"
    left.touch()
    other.touch()
    second = SharedBlock.create(10)
    assert not left.exists()
    assert other.exists()
    assert len(list(tmp_path.iterdir())) == 2

    def child() -> None:
        nonlocal second
        del second
        gc.collect()

    name = second.name
    in_fork(child)
    assert SharedBlock.attach(name).nbytes == 10  # a child's end removes nothing


def dead_process() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_name_of_another_file_is_refused(block: SharedBlock, tmp_path: Path) -> None:
    with (tmp_path / "own").open("wb") as own:
        for name in (f"{os.getpid()}-{own.fileno()}-{'0' * 16}", f"{os.getpid()}-9999-{'0' * 16}"):
            with pytest.raises(LifecycleError, match="it is gone"):
                SharedBlock.attach(name)
    for name in ("", "relive", "1-2", "a-b-c", None, 7):
        with pytest.raises((ParameterError, LifecycleError)):
            SharedBlock.attach(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, True, None, 2**62])
def test_an_impossible_size_is_refused(nbytes: Any) -> None:
    with pytest.raises(ParameterError, match=r"nbytes|would take"):
        SharedBlock.create(nbytes)


@LINUX
def test_nobody_can_take_the_memory_away() -> None:
    block = SharedBlock.create(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(internals.descriptor(block), 10)


# Claims


@pytest.mark.skipif(not hasattr(getattr(backing, "fcntl", None), "F_OFD_SETLK"), reason="its locks belong to processes")
def test_a_place_is_claimed_once_until_it_is_dropped(block: SharedBlock) -> None:
    first = block.claim(0)
    assert first is not None
    assert first.holds
    assert block.is_claimed(0)
    if hasattr(__import__("fcntl"), "F_OFD_SETLK"):
        assert block.claim(0) is None
        assert SharedBlock.attach(block.name).claim(0) is None
    assert not block.is_claimed(1)
    assert block.claim(1) is not None
    first.drop()
    assert not first.holds
    assert not block.is_claimed(0)
    assert block.claim(0) is not None  # and dropped at once, as nobody keeps it
    assert not block.is_claimed(0)


@pytest.mark.skipif(not hasattr(getattr(backing, "fcntl", None), "F_OFD_SETLK"), reason="its locks belong to processes")
def test_a_forked_child_does_not_have_its_parents_places(block: SharedBlock) -> None:
    claim = block.claim(2)
    assert claim is not None
    assert in_fork(lambda: (claim.holds, block.claim(2))) == (False, None)
    assert claim.holds
    assert block.is_claimed(2)


@LINUX
@pytest.mark.parametrize("method", METHODS)
def test_the_place_of_a_process_that_is_killed_is_free(method: str) -> None:
    block = SharedBlock.create(4096)
    words = block.array.view(np.int32)
    process = started(method, claim_and_stay, block, 3)
    assert Bell(words[:1]).wait(lambda: words[1] != 0, SECONDS)
    assert words[1] == 1
    assert block.is_claimed(3)
    assert block.claim(3) is None
    kill(process)
    assert not block.is_claimed(3)
    assert block.claim(3) is not None
