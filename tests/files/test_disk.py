"""Saves on a disk: foreign files, missing and hostile ones, and writers that fail or die."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import re
import signal
import socket
import threading
import time
import zlib
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attacks.machine import AFTERMATHS, Died, Machine
from relive import files as persist
from relive.errors import (
    FileFormatError,
    NoSaveError,
)
from relive.files import disk
from relive.files import save as directory
from relive.files.disk import MOST, integers, whole
from support.cases import covering
from support.effort import in_ci_alone, often
from support.forks import in_fork
from support.saves import Tried, assert_refused, data_files, example, forge, holds, listing, save


@pytest.mark.parametrize("name", ["thesis.tex", ".git", "data-.safetensors", "model.safetensors"])
def test_a_directory_with_foreign_files_is_not_written_to(name: str, tmp_path: Path):
    (tmp_path / name).write_text("years of work")
    with pytest.raises(FileFormatError, match=re.escape(f"'{name}'")):
        persist.write(tmp_path, example(), {})
    assert listing(tmp_path) == {name: b"years of work"}


@pytest.mark.parametrize(
    "manifest", [b"", b"{}", b'{"format": "web app"}', b'{"format": "relive arrays", "version": 3}']
)
def test_a_directory_with_a_foreign_newer_or_damaged_manifest_is_not_written_to(manifest: bytes, tmp_path: Path):
    (tmp_path / "manifest.json").write_bytes(manifest)
    with pytest.raises(FileFormatError, match=r"manifest\.json"):
        persist.write(tmp_path, example(), {})
    assert listing(tmp_path) == {"manifest.json": manifest}


def test_a_file_is_not_overwritten_by_a_save(tmp_path: Path):
    (tmp_path / "model.pt").write_text("years of work")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    for name in ("model.pt", "nowhere"):
        with pytest.raises(FileFormatError, match="expected a directory or nothing"):
            persist.write(tmp_path / name, example(), {})
    assert (tmp_path / "model.pt").read_text() == "years of work"


def test_a_directory_that_somebody_else_makes_meanwhile_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, make = tmp_path / "deep" / "save", Path.mkdir

    def made_twice(self: Path, *args: Any, **kwargs: Any) -> None:
        make(self)  # by another saver, since this one looked
        make(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", made_twice)
        assert disk.make_directory(path) is False
    assert path.is_dir()
    assert disk.make_directory(path / "new") is True


def test_the_directory_itself_may_be_a_link(tmp_path: Path):
    save(tmp_path / "there", 1)
    (tmp_path / "here").symlink_to(tmp_path / "there")
    save(tmp_path / "here", 2)
    assert holds(tmp_path / "here") == holds(tmp_path / "there") == 2


@pytest.mark.parametrize("number", range(3))
def test_a_missing_piece_is_refused(number: int, tmp_path: Path):
    file = data_files(save(tmp_path / "save"))[number]
    file.unlink()
    error = assert_refused(tmp_path / "save", "nothing")
    assert file.name in str(error)
    assert not isinstance(error, NoSaveError)


def test_bytes_that_no_tensor_has_are_refused_though_size_and_checksum_are_right(tmp_path: Path):
    file = data_files(save(tmp_path / "save"))[0]
    file.write_bytes(file.read_bytes() + b"MZ and more")
    note = {"bytes": file.stat().st_size, "crc32": f"{zlib.crc32(file.read_bytes()):08x}"}
    forge(tmp_path / "save", lambda m: m["files"].update({file.name: note}))
    assert_refused(tmp_path / "save", "whose tensors take")


def test_a_file_of_another_save_is_refused(tmp_path: Path):
    """The half-finished save of other libraries: new rows, old cursor."""
    mine, other = data_files(save(tmp_path / "mine", 1)), data_files(save(tmp_path / "other", 2))
    for file, its in zip(mine, other, strict=True):
        genuine = file.read_bytes()
        file.write_bytes(its.read_bytes())
        assert_refused(tmp_path / "mine", "CRC-32")
        file.write_bytes(genuine)
    assert holds(tmp_path / "mine") == 1


def test_a_link_a_pipe_or_a_directory_in_place_of_a_file_is_refused(tmp_path: Path):
    for number, name in enumerate(["manifest.json", "data"]):
        for kind in ("link", "pipe", "directory"):
            path = save(tmp_path / f"{kind}{number}")
            file = path / name if number == 0 else data_files(path)[0]
            file.rename(tmp_path / "aside")
            if kind == "link":
                file.symlink_to(tmp_path / "aside")
            elif kind == "pipe":
                os.mkfifo(file)
            else:
                file.mkdir()
            assert_refused(path, "regular file")


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("place", ["the directory", "the manifest", "a data file"])
@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_a_hostile_pickle_is_refused_and_never_run(place: str, kind: str, tmp_path: Path):
    marker = tmp_path / "boom"
    target = tmp_path / "save"
    if place != "the directory":
        save(target)
        target = target / "manifest.json" if place == "the manifest" else data_files(target)[0]
    if kind == "torch":
        torch.save({"x": Bomb(marker)}, target)
    else:
        target.write_bytes(pickle.dumps(Bomb(marker)))
    assert_refused(tmp_path / "save")
    assert not marker.exists()
    pickle.loads(pickle.dumps(Bomb(marker)))
    assert marker.exists(), "the bomb is real"


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="needs sockets that are files")
@pytest.mark.parametrize("place", ["manifest.json", "data"])
@pytest.mark.parametrize("kind", ["socket", "circle", "hole"])
def test_a_socket_a_circle_of_links_or_a_file_of_holes_is_refused(
    kind: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "save")
    name = place if place == "manifest.json" else data_files(path)[0].name
    monkeypatch.chdir(path)  # a socket's path has to be short
    (path / name).rename(tmp_path / "aside")
    if kind == "socket":
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(name))
        server.close()
    elif kind == "circle":
        (path / name).symlink_to(name)
    else:
        with (path / name).open("wb") as file:
            file.truncate(2**26 if place == "manifest.json" else 2**40)
    with pytest.raises(FileFormatError):
        persist.read(path)
    if place == "manifest.json":
        with pytest.raises(FileFormatError):
            save(path)


def test_a_path_that_leads_in_a_circle_or_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "circle", tmp_path / "circle" / "save", tmp_path / "file" / "save", tmp_path / "a\0b"):
        with pytest.raises(FileFormatError):
            save(path)
        with pytest.raises(FileFormatError):
            persist.read(path)


def test_tensors_larger_than_memory_are_refused_before_any_is_taken(tmp_path: Path) -> None:
    path = save(tmp_path / "save")
    with pytest.raises(FileFormatError, match=r"its tensors take [\d,]+ bytes of memory, and 1,000 are free"):
        persist.read(path, most=1000)
    assert persist.read(path, most=10_000)[1]["k"] == 0


# Dying


def steps(tmp_path: Path, former: bool) -> int:
    """How many calls a save makes that change a disk."""
    path = tmp_path / f"counted{former}"
    if former:
        save(path, 1)
    with Machine(10**9) as machine:
        save(path, 2)
    return machine.count


@pytest.mark.parametrize(("aftermath", "former"), covering(AFTERMATHS, [True, False], full=2))
def test_dying_before_any_step_leaves_the_old_save_or_the_new(
    former: bool, aftermath: str, tmp_path: Path, tried: Tried
):
    count, outcomes = steps(tmp_path, former), list[int]()
    assert count >= 15
    stride = often(3, 1)
    first = 2 + list(AFTERMATHS).index(aftermath) % stride  # each aftermath has steps of its own
    for step in (1, *range(first, count, stride), count, count + 1):
        path = tmp_path / f"save{step}"
        if former:
            save(path, 1)
        with Machine(step) as machine:
            try:
                save(path, 2)
                finished = True
            except Died:
                finished = False
        tried("a save that dies, or loses power, before one of its calls")
        assert finished == (step == count + 1)
        AFTERMATHS[aftermath](machine, step)
        try:
            outcomes.append(holds(path))
        except NoSaveError:
            assert not former
            outcomes.append(0)
        save(path, 3)  # and what is left does not stand in the way, nor stay
        assert holds(path) == 3
        assert len(os.listdir(path)) == 1 + len(data_files(path))
    assert outcomes[0] == (1 if former else 0)
    assert outcomes[-1] == 2
    assert set(outcomes) == {outcomes[0], 2}


@pytest.mark.parametrize("former", [True, False])
def test_a_manifest_is_never_on_the_disk_before_the_names_of_its_files(former: bool, tmp_path: Path, tried: Tried):
    for step in range(2, steps(tmp_path, former) + 1):
        path, newest_kept = tmp_path / f"save{step}", itertools.chain([False], itertools.repeat(True))
        if former:
            save(path, 1)
        with Machine(step) as machine, suppress(Died):
            save(path, 2)
        tried("a save that dies, or loses power, before one of its calls")
        machine.lose_power(newest_kept.__next__)  # a disk may write names in any order
        with suppress(NoSaveError) if not former else nullcontext():
            assert holds(path) in {1, 2}


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("fault", [OSError(errno.EIO, "I/O error"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_failure_at_any_step_leaves_a_whole_save_and_no_rubbish(
    fault: BaseException, late: bool, tmp_path: Path, tried: Tried
):
    for former in (True, False):
        for step in range(often(1 + former, 1), steps(tmp_path, former) + 1, often(4, 1)):
            path = tmp_path / f"save{former}{step}"
            before = listing(save(path, 1)) if former else None
            fault.__notes__ = []
            tried("a save one of whose calls fails, or is interrupted")
            with Machine(step, fault, late):
                try:
                    save(path, 2)
                    failed, told = False, ""
                except type(fault) as error:
                    failed, told = True, "".join(error.__notes__)
            outcome = holds(path) if (path / "manifest.json").exists() else 0
            assert failed or outcome == 2
            if told:
                assert ("the new save is in place" in told) == (outcome == 2)
                assert ("is unchanged" in told) == (outcome != 2)
            if outcome != 2:
                assert outcome == (1 if former else 0)
                assert (listing(path) if path.exists() else None) in (before, {})
            save(path, 3)
            assert holds(path) == 3
            assert len(os.listdir(path)) == 1 + len(data_files(path))


def test_a_first_save_that_fails_leaves_the_directory_to_the_saver_that_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    path, waits, genuine, lock = tmp_path / "save", threading.Event(), disk.write_file, fcntl.flock
    first = threading.current_thread()

    def write_file(*args: Any) -> Any:
        if threading.current_thread() is first:
            assert waits.wait(10)
            raise OSError("the disk fails")
        return genuine(*args)

    def flock(descriptor: int, how: int) -> None:
        if threading.current_thread() is not first:
            waits.set()  # the directory is open, and about to be removed
        lock(descriptor, how)

    monkeypatch.setattr(disk, "write_file", write_file)
    monkeypatch.setattr(fcntl, "flock", flock)
    second = threading.Thread(target=save, args=(path, 2))

    replaceable = directory.replaceable

    def check(found: Path) -> persist.Contents:
        if not second.ident:  # the first saver has its turn
            second.start()
        return replaceable(found)

    monkeypatch.setattr(directory, "replaceable", check)
    with pytest.raises(OSError, match="the disk fails"):
        save(path, 1)
    second.join()
    assert holds(path) == 2


def test_a_full_disk_is_told_and_leaves_the_old_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = save(tmp_path / "save", 1)
    before, room = listing(path), [500]
    genuine = os.write

    def write(descriptor: int, data: Any) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = genuine(descriptor, data[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space left") as caught:
        save(path, 2)
    assert "besides those of the save in place" in caught.value.__notes__[0]
    assert caught.value.__notes__[1] == f"the save into '{path}' failed; the previous save is unchanged"
    assert listing(path) == before
    room[0] = 500
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "first", 2)
    assert not (tmp_path / "first").exists()
    room[0] = 10**9
    save(path, 2)
    assert holds(path) == 2


def test_a_disk_that_takes_a_few_bytes_at_a_time_gets_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    genuine = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: genuine(descriptor, data[:7]))
    assert holds(save(tmp_path / "save", 4)) == 4


def test_a_file_system_without_locks_or_allocation_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(os, "posix_fallocate", refuse, raising=False)  # macOS has none
    assert holds(save(save(tmp_path / "save", 4), 5)) == 5


def numbered(k: int) -> dict[str, torch.Tensor]:
    return {"rows": torch.full((1 << 17,), k), "turned": torch.full((300, 500), k, dtype=torch.float32).T}


def kill_savers(path: Path, times: int) -> list[int]:
    """Kill so many processes that save one number after another; how many each of them saved."""
    random, last, progress = np.random.default_rng(0), 0, list[int]()
    persist.write(path, numbered(0), {"k": 0})
    for _ in range(times):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                for k in itertools.count(last + 1):
                    persist.write(path, numbered(k), {"k": k})
                    os.write(write, b"%d " % k)
            finally:
                os._exit(1)
        os.close(write)
        os.read(read, 4)  # until it has saved once
        time.sleep(random.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        told = max(map(int, os.read(read, 1 << 16).split()), default=last)
        os.close(read)
        found, content = persist.read(path)
        k = content["k"]
        assert k >= told, f"save {told} was done, and {k} came back"
        assert all((tensor == k).all() for tensor in found.values()), f"save {k} is torn"
        progress.append(k - last)
        last = k
    return progress


@in_ci_alone  # attacks/test_killed_saves.py kills savers in `make test`, too
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_killed_again_and_again_while_it_saves_loses_nothing(tmp_path: Path, tried: Tried):
    tried("a process killed while it saves", 12)
    path = tmp_path / "save"
    assert min(in_fork(kill_savers, path, 12)) > 0
    persist.write(path, numbered(1), {"k": 1})
    with persist.Save(path) as saved:
        assert set(os.listdir(path)) == {"manifest.json", *saved.contents.files}


# Entries of a save's JSON: each has its type and range, or the save is refused by the entry's name


def test_counts_up_to_the_largest_are_taken() -> None:
    assert whole({"n": MOST}, "n") == MOST
    assert integers({"n": [[0, MOST]]}, "n", 1, 2).tolist() == [[0, MOST]]


@pytest.mark.parametrize("wrong", [[[0, MOST + 1]], [[0, -1]], [[0, 2**63]], [[0, 2**70]], [[0, 1.0]], [[True, False]],
                                   [0, 1], [[0, 1], [2, 3]], [], [[0], [1, 2]], [["0", "1"]], None, 3])  # fmt: skip
def test_lists_with_other_members_or_of_another_shape_are_refused(wrong: Any) -> None:
    with pytest.raises((FileFormatError, ValueError)):
        integers({"n": wrong}, "n", 1, 2)


@pytest.mark.parametrize("wrong", [MOST + 1, -1, 1.0, True, "1", None])
def test_other_values_than_counts_are_refused_by_name(wrong: Any) -> None:
    with pytest.raises(FileFormatError, match="entry 'n' is"):
        whole({"n": wrong}, "n")
