"""Arrays in mapped files, the journal beside them, and the right to write to both."""

from __future__ import annotations

import errno
import os
import re
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from relive.errors import FileFormatError, LifecycleError, NoSaveError
from relive.files import mapped as journals
from relive.files.mapped import Journal, MappedDirectory
from relive.memory.mapped import MappedAllocator
from support import internals
from support.forks import in_fork
from support.interrupts import broken_off

RUN = "0123456789abcdef"


def records(path: Path) -> tuple[int, bytes] | None:
    journal = Journal(path, RUN)
    journal.close()
    return journal.last


def test_a_journal_has_its_last_record_wherever_it_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, RUN, create=True)
    assert journal.last is None
    payloads, ends = [b"", b"one", b"relive/j" * 9, bytes(300)], list[int]()
    for number, payload in enumerate(payloads):
        assert journal.append(payload) == number
        ends.append(internals.end(journal))
    journal.close()
    raw = path.read_bytes()[: ends[-1] + 9]  # and some of the zeros after it
    for size in range(ends[0], len(raw) + 1):
        for rest in (b"", b"\0" * 7, b"relive/j"):
            path.write_bytes(raw[:size] + rest)
            whole = sum(end <= size for end in ends) - 1
            assert records(path) == (whole, payloads[whole])
            only_room = not (raw[:size] + rest)[ends[whole] :].strip(b"\0")
            assert path.stat().st_size == (size + len(rest) if only_room else ends[whole])
    journal = Journal(path, RUN)
    assert journal.append(b"next") == 4
    journal.close()
    assert records(path) == (4, b"next")


def test_a_record_is_written_into_room_that_the_disk_has_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "journal", list[str]()
    journal = Journal(path, RUN, create=True)
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append("grown"))
    monkeypatch.setattr(journals, "_sync_data", lambda descriptor: synced.append("written"))
    for _ in range(20):
        journal.append(bytes(20_000))
        assert path.stat().st_size >= internals.end(journal)
        assert path.stat().st_size == internals.size(journal)
    assert synced == ["grown"] + ["written"] * 12 + ["grown"] + ["written"] * 6
    journal.close()
    journal = Journal(path, RUN)
    journal.append(b"next")
    assert synced[-1] == "written"
    journal.close()


@pytest.mark.parametrize("name", ["pwrite", "sync"])
def test_a_record_that_the_disk_refuses_was_never_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = tmp_path / "journal"
    journal = Journal(path, RUN, create=True)
    journal.append(b"one")
    with monkeypatch.context() as patch:
        patch.setattr(*((os, "pwrite", fails) if name == "pwrite" else (journals, "_sync_data", fails)))
        with pytest.raises(OSError, match="error"):
            journal.append(b"two")
    assert records(path) == (0, b"one")
    assert journal.append(b"three") == 1
    journal.close()
    assert records(path) == (1, b"three")


def test_a_damaged_record_before_a_whole_one_is_no_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, RUN, create=True)
    for payload in (b"one", b"two", b"three"):
        journal.append(payload)
    journal.close()
    raw = bytearray(path.read_bytes())
    raw[internals.end(journal) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(FileFormatError, match="a damaged one, and a whole one"):
        Journal(path, RUN)


def test_a_long_journal_makes_way_for_one_that_begins_with_its_last_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "ROTATED", 1000)
    journal = Journal(tmp_path / "journal", RUN, create=True)
    for number in range(200):
        assert journal.append(b"%d" % number * 20) == number
        assert (tmp_path / "journal").stat().st_size < 2200
    journal.close()
    assert records(tmp_path / "journal") == (199, b"199" * 20)
    assert os.listdir(tmp_path) == ["journal"]
    monkeypatch.setattr(journals, "LONGEST", 10)
    journal = Journal(tmp_path / "new", RUN, create=True)
    with pytest.raises(FileFormatError, match="at most 10 fit"):
        journal.append(bytes(11))
    journal.close()


@pytest.mark.parametrize("rotated", [1000, 1 << 24])
def test_a_record_broken_off_at_any_line_is_in_the_journal_or_not_and_the_next_one_follows(
    rotated: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "ROTATED", rotated)
    monkeypatch.setattr(journals, "ROOM", 300)
    path, at, tried = tmp_path / "journal", 0, 0
    journal = Journal(path, RUN, create=True)
    journal.append(b"first")
    while at < 400:
        payload = b"%d" % at * 30
        off = broken_off(partial(journal.append, payload), at)
        assert journals.last_record(path, RUN).payload in (payload, journal.last.payload)
        tried, at = tried + off, at + 1 if off else 1000
        number = journal.append(payload + b"again")
        assert journals.last_record(path, RUN) == (number, payload + b"again")
    assert tried > 20
    journal.close()


def test_arrays_are_there_again_and_only_those_that_were_committed(tmp_path: Path) -> None:
    directory = MappedDirectory(tmp_path / "d")
    one, two = directory.take("one", (3, 2), np.float32), directory.take("two.2", (5,), np.int64)
    one[:], two[:] = 7, 8
    directory.journal.append(b"")
    directory.commit({"kind": "test"})
    directory.take("three", (5000,), np.uint8)
    directory.flush()
    directory.release()
    directory = MappedDirectory(tmp_path / "d")
    assert directory.content == {"kind": "test"}
    assert [name in directory.known for name in ("one", "two.2", "three")] == [True, True, False]
    assert np.array_equal(directory.take("one", (3, 2), np.float32), one)
    with pytest.raises(FileFormatError, match=r"the array 'two\.2' as int32"):
        directory.take("two.2", (5,), np.int32)
    directory.commit({"kind": "other"})
    directory.release()
    (file,) = (tmp_path / "d").glob("*.safetensors")
    found = load_file(file)
    assert list(found) == ["one"]
    assert np.array_equal(found["one"], one)
    assert file.stat().st_size == 4096 + one.nbytes


def test_a_directory_has_one_holder_and_a_dead_one_is_none(tmp_path: Path) -> None:
    def hold_and_die() -> None:
        directory = MappedDirectory(tmp_path / "d")
        directory.journal.append(b"")
        directory.commit({})
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(AssertionError, match="ended with -9"):
        in_fork(hold_and_die)
    first = MappedAllocator(tmp_path / "d")
    with pytest.raises(LifecycleError, match="in this process already"):
        MappedAllocator(tmp_path / "d")
    (tmp_path / "d" / "lock").write_text("12345\n")
    with pytest.raises(LifecycleError, match="open in process 12345"):
        MappedAllocator(tmp_path / "d")
    del first
    MappedAllocator(tmp_path / "d").directory.release()


def test_a_file_that_took_the_place_of_a_mapped_one_is_found_by_the_next_flush(tmp_path: Path) -> None:
    directory = MappedDirectory(tmp_path / "d")
    directory.take("one", (3,), np.float32)
    directory.commit({})
    (file,) = (tmp_path / "d").glob("*.safetensors")
    raw = file.read_bytes()
    file.unlink()
    file.write_bytes(raw)
    with pytest.raises(FileFormatError, match="another file has taken the place"):
        directory.flush()
    file.unlink()
    with pytest.raises(NoSaveError, match=f"'{re.escape(str(file))}' was removed or moved while it was open"):
        directory.flush()
    directory.release()
