"""Saves in the background: one instant, whatever happens to the buffer meanwhile."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attacks import forger
from relive import Prioritized, ReplayBuffer, RolloutBuffer, load_extra
from relive.errors import DTypeError, FileFormatError, LifecycleError, ParameterError
from relive.files import SaveHandle, disk
from relive.memory.device import DeviceRows
from relive.replay import saving as saved_ring
from relive.replay import saving as snapshot
from support import internals
from support.children import done, started
from support.effort import in_ci, often
from support.interrupts import broken_off
from support.replays import PLAIN
from support.saves import many_segments
from support.twins import SAMPLERS, Twin

from .test_saves_of_changes import act, assert_saved, kept_by


@pytest.fixture(autouse=True)
def many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk, and limits so small that few rows are many segments in many pieces."""
    many_segments(monkeypatch)
    monkeypatch.setattr(disk, "SMALL", 0)
    monkeypatch.setattr(saved_ring, "PIECE", 100)
    monkeypatch.setattr(snapshot, "AHEAD", 100)


@contextmanager
def between_writes(act: Callable[[], object], patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Do something in the thread that saves, before each of its writes."""
    genuine, main = os.write, threading.get_ident()

    def write(descriptor: int, data: Any) -> int:
        if threading.get_ident() != main:
            act()
        return genuine(descriptor, data)

    with patch.context() as inner:
        inner.setattr(os, "write", write)
        yield


class Gate:
    """A disk that takes nothing until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened, self.error = threading.Event(), threading.Event(), None
        genuine, main = os.write, threading.get_ident()

        def write(descriptor: int, data: Any) -> int:
            if threading.get_ident() != main:
                self.reached.set()
                assert self.opened.wait(20)
                if self.error:
                    raise self.error
            return genuine(descriptor, data)

        patch.setattr(os, "write", write)


def fail(patch: pytest.MonkeyPatch, path: Path, buffer: Any, **options: Any) -> SaveHandle:
    """A save in the background to a disk that is full."""
    with patch.context() as inner:
        gate = Gate(inner)
        gate.error = OSError(errno.ENOSPC, "No space left on device")
        gate.opened.set()
        handle = buffer.save(path, background=True, **options)
        while not handle.done:
            time.sleep(0.001)
    return handle


# One instant.


CELLS = [(sampler, seed) for seed in range(40) for sampler in SAMPLERS]
QUICK = [("prioritized, stratified", 0), ("recent, uniform", 1)]


@pytest.mark.parametrize(
    ("sampler", "seed"), [pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.slow) for cell in CELLS]
)
def test_a_save_is_of_the_instant_of_its_call_whatever_is_done_between_its_writes(
    sampler: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng([seed, 7])
    twin = Twin(int(random.integers(1, 5)), int(random.integers(4, 40)), dress="mixed", sampler=SAMPLERS[sampler]())
    torch.manual_seed(seed)

    def fast() -> int:
        return int(random.integers(4)) if random.integers(4) == 0 else 0

    for turn in range(often(3, 4)):
        for _ in range(int(random.integers(40))):
            act(twin, random)
        before, turns = copy.deepcopy(twin.buffer), iter(range(25))
        with between_writes(lambda turns=turns: [act(twin, random) for _ in islice(turns, fast())], monkeypatch):
            twin.buffer.save(tmp_path / "save", extra=turn, background=True).wait()
        loaded = assert_saved(before, tmp_path / "save")
        assert loaded.extra == turn
        assert kept_draws(before) == kept_draws(loaded)
    twin.check()


def kept_draws(buffer: ReplayBuffer) -> list[int]:
    """The next batches of a buffer."""
    return [index for _ in range(3) for index in buffer.sample(2)["index"].tolist()] if len(buffer) > 1 else []


@pytest.mark.parametrize("mode", ["own", "alone"])
def test_rows_of_every_kind_are_those_of_the_instant(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, t = forger.replay("prioritized", "transition", mode), 0

    def go_on() -> None:
        nonlocal t
        t += 1
        buffer.add(forger.step(t, t % 5 == 4))
        if t % 37 == 36:
            buffer.clear()

    for _ in range(often(5, 12)):
        before = copy.deepcopy(buffer)
        with between_writes(go_on, monkeypatch):
            buffer.save(tmp_path / "save", background=True).wait()
        assert_saved(before, tmp_path / "save")
        go_on()


def test_rows_on_a_device_are_those_of_the_instant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.empty(0).device
    with monkeypatch.context() as patch:
        patch.setattr("relive.replay.buffer.ReplayRows", lambda leaves, n: DeviceRows(leaves, n, cpu))
        twin = Twin(2, 20, dress="mixed").play(*[".."] * 30)
    before = copy.deepcopy(twin.buffer)
    with between_writes(lambda: twin.add(".."), monkeypatch):
        twin.buffer.save(tmp_path / "save", background=True).wait()
    assert_saved(before, tmp_path / "save")
    twin.check()


@pytest.mark.parametrize("num_envs", [in_ci(1), 3])
def test_threads_that_add_and_draw_at_full_speed_wait_rather_than_tear_a_save(
    num_envs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "ASIDE", 3000)
    monkeypatch.setattr(saved_ring, "PIECE", 1000)
    buffer = ReplayBuffer(PLAIN, 600, num_envs, sampler=Prioritized(), seed=0)
    over, t, most = threading.Event(), 0, 0
    flags = np.zeros(num_envs, np.bool_)

    def step() -> dict[str, Any]:
        nonlocal t
        t += 1
        return {"obs": np.full((num_envs, 2), t), "action": np.full(num_envs, t), "reward": np.full(num_envs, t),
                "terminated": flags, "truncated": flags}  # fmt: skip

    def draw() -> None:
        while not over.is_set():
            batch = buffer.sample(8)
            buffer.update_priorities(batch["index"], batch["reward"] / 10**6)

    def add() -> None:
        nonlocal most
        while not over.is_set():
            buffer.add(step())
            under = internals.snapshot(internals.saver(buffer))
            most = max(most, sum(aside.nbytes for aside in internals.aside(under)) if under else 0)

    for _ in range(700):
        buffer.add(step())
    threads = [threading.Thread(target=work) for work in (draw, add)]
    for thread in threads:
        thread.start()
    try:
        for turn in range(often(2, 4)):
            with between_writes(lambda: time.sleep(0.001), monkeypatch):
                with buffer.lock:
                    before = copy.deepcopy(buffer)
                    handle = buffer.save(tmp_path / str(turn % 2), extra={"turn": turn}, background=True)
                handle.wait()
            assert assert_saved(before, tmp_path / str(turn % 2)).extra == {"turn": turn}
    finally:
        over.set()
        for thread in threads:
            thread.join()
    buffer.check()
    assert 0 < most <= 3000


def test_the_state_of_the_learner_is_that_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twin, gate = Twin(1, 9).play(*"....."), Gate(monkeypatch)
    weights, moments = torch.ones(3), np.ones(3)
    extra = {"model": weights, "list": [moments, {"steps": 5}], "turned": torch.arange(6).reshape(2, 3).T}
    handle = twin.buffer.save(tmp_path / "save", extra=extra, background=True)
    weights.zero_()
    moments[:] = 0
    extra["list"][1]["steps"] = 6
    gate.opened.set()
    handle.wait()
    found = load_extra(tmp_path / "save")
    assert found["model"].tolist() == found["list"][0].tolist() == [1, 1, 1]
    assert found["list"][1] == {"steps": 5}
    assert found["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_what_cannot_be_saved_is_refused_by_the_call(tmp_path: Path) -> None:
    buffer = Twin(1, 9).play(*"...").buffer
    with pytest.raises(FileFormatError, match=r"extra\['hook'\]"):
        buffer.save(tmp_path / "save", extra={"hook": print}, background=True)
    with pytest.raises(DTypeError, match="dense"):
        buffer.save(tmp_path / "save", extra=torch.eye(2).to_sparse(), background=True)
    assert not (tmp_path / "save").exists()
    buffer.save(tmp_path / "save", background=True).wait()


# What has to wait.


@pytest.mark.parametrize("what", ["block", "append", "rewind"])
def test_rows_that_change_otherwise_wait_until_they_were_read(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = forger.replay("uniform", "transition", "alone")
    before, gate = copy.deepcopy(buffer), Gate(monkeypatch)
    handle = buffer.save(tmp_path / "save", background=True)
    assert gate.reached.wait(10)

    def change() -> None:
        if what == "block":
            buffer.block["reward"].zero_()
        elif what == "append":
            buffer.append(before)
        else:
            buffer.clear(rewind=True)
            buffer.add(forger.step(50, True))

    other = threading.Thread(target=change)
    other.start()
    time.sleep(0.02)
    assert other.is_alive()
    gate.opened.set()
    handle.wait()
    other.join()
    assert_saved(before, tmp_path / "save")
    buffer.save(tmp_path / "save", background=True).wait()
    assert_saved(buffer, tmp_path / "save")


def test_rows_that_anybody_may_change_are_read_before_save_returns(tmp_path: Path) -> None:
    buffer = Twin(2, 9).play(*[".."] * 9).buffer
    rewards = buffer.block["reward"]
    before = copy.deepcopy(buffer)
    for _ in range(6):
        handle = buffer.save(tmp_path / "save", background=True)
        rewards.add_(1)
        handle.wait()
        assert_saved(before, tmp_path / "save")
        before = copy.deepcopy(buffer)


class Shelf:
    """A home that is in use by one thread at a time, or notes that it was not."""

    def __init__(self, fields: Any, rows: int) -> None:
        self.arrays = {
            path: np.zeros((rows, *f.shape), str(f.dtype).removeprefix("torch.")) for path, f in fields.items()
        }
        self.busy, self.clashes = threading.Lock(), 0

    def write(self, path: Any, rows: Any, values: Any) -> None:
        with self._alone():
            self.arrays[path][rows] = values

    def read(self, path: Any, rows: Any) -> Any:
        with self._alone():
            return self.arrays[path][rows]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        free = self.busy.acquire(blocking=False)
        self.clashes += not free
        yield
        if free:
            self.busy.release()


def test_a_store_of_the_user_is_read_by_one_thread_at_a_time(tmp_path: Path) -> None:
    made = list[Shelf]()

    def make(fields: Any, rows: int) -> Shelf:
        made.append(Shelf(fields, rows))
        return made[-1]

    buffer = ReplayBuffer(PLAIN, 40, 2, store=make, seed=0)
    step = {"obs": np.zeros((2, 2)), "action": [1, 2], "reward": [1.0, 2.0], "terminated": [False] * 2,
            "truncated": [False] * 2}  # fmt: skip
    buffer.add(step)
    for _ in range(8):
        for _ in range(30):
            buffer.add(step)
            buffer.sample(4)
        handle = buffer.save(tmp_path / "save", background=True)
        buffer.sample(4)
        handle.wait()
    assert ReplayBuffer.load(tmp_path / "save").data()["index"].tolist() == buffer.data()["index"].tolist()
    assert made[0].clashes == 0


# The handle, and errors.


def test_a_handle_says_when_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin(1, 9).play(*"....")
    done = twin.buffer.save(tmp_path / "before")
    done.wait()
    assert done.done
    gate = Gate(monkeypatch)
    handle = twin.buffer.save(tmp_path / "save", background=True)
    assert not handle.done
    assert repr(handle) == f"<save into '{tmp_path}/save': under way>"
    with pytest.raises(TimeoutError, match="wait again"):
        handle.wait(0.01)
    with pytest.raises(ParameterError, match="timeout"):
        handle.wait(-1)
    twin.add(".")
    gate.opened.set()
    handle.wait(20)
    assert handle.done
    assert "done" in repr(handle)


def test_an_error_is_raised_by_wait_and_else_by_the_next_save_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = Twin(2, 9).play(*[".."] * 20)
    twin.buffer.save(tmp_path / "save")
    before = copy.deepcopy(twin.buffer)
    twin.add("..")
    handle = fail(monkeypatch, tmp_path / "save", twin.buffer)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left") as caught:
            handle.wait()
    assert "failed" in repr(handle)
    assert caught.value.__notes__[-1] == f"the save into '{tmp_path}/save' failed; the previous save is unchanged"
    assert_saved(before, tmp_path / "save")
    twin.buffer.save(tmp_path / "save")  # the error was seen
    before = copy.deepcopy(twin.buffer)
    for background in (False, True):
        twin.add("..")
        handle = fail(monkeypatch, tmp_path / "save", twin.buffer)
        with pytest.raises(OSError, match="No space left") as caught:
            twin.buffer.save(tmp_path / "save", background=background)
        assert "nothing was saved" in caught.value.__notes__[-1]
        assert_saved(before, tmp_path / "save")
    twin.buffer.save(tmp_path / "save", background=True).wait()
    assert_saved(twin.buffer, tmp_path / "save")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_error_that_nobody_asked_for_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = list[Any]()
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: printed.append(unraisable.exc_value))
    buffer = Twin(1, 9).play(*"...").buffer
    fail(monkeypatch, tmp_path / "save", buffer)
    del buffer
    gc.collect()
    assert [error.errno for error in printed] == [errno.ENOSPC]


def test_a_new_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twin, gate = Twin(2, 9).play(*[".."] * 12), Gate(monkeypatch)
    first = twin.buffer.save(tmp_path / "save", extra=1, background=True)
    threading.Timer(0.02, gate.opened.set).start()
    twin.add("..")
    second = twin.buffer.save(tmp_path / "save", extra=2, background=True)
    assert first.done
    second.wait()
    assert assert_saved(twin.buffer, tmp_path / "save").extra == 2


def test_copies_of_a_buffer_that_is_being_saved_know_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, gate = forger.replay("prioritized", "transition", "shared"), Gate(monkeypatch)
    handle = buffer.save(tmp_path / "save", background=True)
    assert gate.reached.wait(10)
    for other in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        for t in range(40):
            other.add(forger.step(t, False))
        other.check()
    gate.opened.set()
    handle.wait()
    assert_saved(buffer, tmp_path / "save")


@pytest.mark.parametrize("every", [often(307, 61), pytest.param(1, marks=pytest.mark.slow)])
def test_a_call_broken_off_at_any_line_leaves_a_buffer_that_saves(every: int, tmp_path: Path) -> None:
    """Ctrl-C while the call of ``save`` runs: the old save stays, or the new one comes; the buffer goes on."""
    buffer, tried = forger.replay("prioritized", "transition", "shared"), 0
    buffer.save(tmp_path / "save")
    for at in range(0, 10**6, every):
        before = kept_by(buffer)
        buffer.add(forger.step(at, at % 3 == 0))
        held = kept_by(buffer)
        off = broken_off(lambda: buffer.save(tmp_path / "save", background=True), at)
        tried += off
        for t in range(30):  # more than a ring full: nobody waits for a save that is not there
            buffer.add(forger.step(1000 + t, False))
        while any(thread.name.startswith("save into") for thread in threading.enumerate()):
            time.sleep(0.001)
        assert kept_by(ReplayBuffer.load(tmp_path / "save")) in (before, held)
        buffer.save(tmp_path / "save")
        assert_saved(buffer, tmp_path / "save")
        if not off:
            break
    assert tried > 500 // every


# Other processes.


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_while_a_buffer_is_saved_goes_on_without_that_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "ASIDE", 1)
    buffer = forger.replay("prioritized", "transition", "shared")
    before, gate = copy.deepcopy(buffer), Gate(monkeypatch)
    handle = buffer.save(tmp_path / "save", background=True)
    assert gate.reached.wait(10)

    def in_child() -> None:
        for t in range(40):  # does not wait for a thread that is not there
            buffer.add(forger.step(t, False))
        with pytest.raises(LifecycleError, match="another process"):
            handle.wait()
        buffer.save(tmp_path / "child")
        assert_saved(buffer, tmp_path / "child")
        time.sleep(0.2)

    child = started("fork", in_child)
    gate.opened.set()
    handle.wait()
    buffer.save(tmp_path / "save")  # the child does not hold the directory's lock
    done(child)
    assert_saved(before, tmp_path / "save")


# Rollouts.


def test_a_rollout_is_saved_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = RolloutBuffer(PLAIN, 4, 2, seed=0)

    def fill(first: int) -> None:
        for t in range(first, first + 4):
            rollout.add(obs=np.full((2, 2), t), action=[t, t], reward=[t, t], terminated=[False] * 2,
                        truncated=[False] * 2)  # fmt: skip
        rollout.set_last(obs=np.full((2, 2), first + 4))

    fill(0)
    weights, gate = torch.ones(2), Gate(monkeypatch)
    handle = rollout.save(tmp_path / "save", extra=weights, background=True)
    assert gate.reached.wait(10)
    rollout.clear()
    fill(10)
    weights.zero_()
    pickle.loads(pickle.dumps(rollout))
    gate.opened.set()
    handle.wait()
    loaded = RolloutBuffer.load(tmp_path / "save")
    assert loaded["reward"].tolist() == [[float(t)] * 2 for t in range(4)]
    assert loaded.extra.tolist() == [1, 1]
    handle = fail(monkeypatch, tmp_path / "save", rollout)
    with pytest.raises(OSError, match="No space left"):
        rollout.save(tmp_path / "save")
    rollout.save(tmp_path / "save")
    assert RolloutBuffer.load(tmp_path / "save")["reward"][0].tolist() == [10.0, 10.0]


@pytest.mark.parametrize("kind", [ReplayBuffer, RolloutBuffer])
def test_a_relative_path_is_that_of_the_call(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    begin = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (os.chdir(tmp_path / "other"), begin(thread)))
    kind(PLAIN, 10, 1).save("save", background=True).wait()
    assert sorted(os.listdir(tmp_path)) == ["other", "save"]
