"""Forked work comes back, and nothing of it stays: neither the process nor what it started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.forks import in_fork

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is not one that only waits for its parent to ask."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_its_result_comes_back_and_what_it_writes_is_kept_apart(capfd: pytest.CaptureFixture[str]) -> None:
    assert in_fork(os.getpid) != os.getpid()
    assert in_fork(lambda *args: (print("loud"), args), 1, "two")[1] == (1, "two")
    assert capfd.readouterr() == ("", "")


def fail() -> None:
    os.write(1, b"by the way\n")
    raise ValueError("so it goes")


@pytest.mark.parametrize(
    ("work", "told"),
    [
        (fail, r"the page ended with 1; it wrote:\nby the way\n(.*\n)*ValueError: so it goes"),
        (lambda: os._exit(7), "the page ended with 7"),
        (os.abort, r"the page ended with -6; it wrote:\nFatal Python error: Aborted"),
    ],
    ids=["raises", "exits", "aborts"],
)
def test_what_it_wrote_is_the_message_if_it_fails(work: object, told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        in_fork(work, name="the page")


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux knows of a process")
def test_work_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    def hang() -> None:
        started = subprocess.Popen(["sleep", "1000"])
        print("begun", flush=True)
        (tmp_path / "pids").write_text(f"{os.getpid()} {started.pid}")
        started.wait()

    for seconds in (0.2, 2.0, 20.0):  # on a busy machine, it has not begun after the first
        with pytest.raises(AssertionError, match=rf"the page was not done in {seconds:g} s, and was killed") as caught:
            in_fork(hang, seconds=seconds, name="the page")
        if (tmp_path / "pids").exists():
            break
    assert "it wrote:\nbegun" in str(caught.value)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text(encoding="ascii").split()]
    end = time.monotonic() + 60
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    assert [is_running(pid) for pid in pids] == [False, False]
