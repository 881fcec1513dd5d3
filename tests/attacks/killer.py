"""Savers that are killed by SIGKILL: at every call that changes a disk, or at any instant, also in the background.

``main`` forks one child after another that adds steps and saves, and kills each. After each it loads the save, which
has to be the old one or the new one, to the bit, with the state of its learner. The case of a number is the same in
every run.
"""

from __future__ import annotations

import copy
import itertools
import os
import shutil
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attacks import forger
from relive import ReplayBuffer, files
from relive.errors import NoSaveError
from relive.files import disk
from relive.replay import saving as saved_ring
from relive.replay import saving as segments
from relive.replay import saving as snapshot
from support import internals

__all__ = ["main"]

CALLS = ("open", "write", "fsync", "replace", "unlink", "mkdir", "posix_fallocate", "posix_fadvise", "close")
"""What a save does to a disk, or is close to it."""

HEAD, TAIL = 60, 20
"""How many calls from the first on, and how many from the first of the manifest on, are each the last of a saver."""

Facts = tuple[Any, ...]


def facts(buffer: ReplayBuffer) -> Facts:
    """Every live byte of a buffer, its sampler's state, and the next batch."""
    arrays, content = internals.saver(buffer).whole_state()
    state = {name: np.asarray(value).tobytes() for name, value in sorted(arrays.items())}
    return state, {name: content[name] for name in ("state", "counters", "rule", "sampler_state", "counts", "seed")}


def grow(buffer: ReplayBuffer, first: int, count: int) -> None:
    """Steps ``first`` and on; each is a function of its number."""
    for t in range(first, first + count):
        buffer.add(forger.step(t, t % 7 == 6))


def fatal(at: int, how: int, tail: bool) -> None:
    """From now on this process dies at its call number ``at``: before it, after it, or in the middle of a write.

    With ``tail`` the calls are counted from the first that is about a manifest.
    """
    numbers, counts = itertools.count(), not tail

    def wrapped(name: str) -> Callable[..., Any]:
        genuine = getattr(os, name)

        def call(*args: Any, **named: Any) -> Any:
            nonlocal counts
            counts = counts or (name == "open" and "manifest-" in str(args[0]))
            number = next(numbers) if counts else -1  # one step of the interpreter: threads never share a number
            if number == at and how != 1:
                if how == 2 and name == "write":
                    genuine(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            result = genuine(*args, **named)
            if number == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in CALLS:
        if hasattr(os, name):
            setattr(os, name, wrapped(name))


def save(buffer: ReplayBuffer, path: Path, steps: int, background: bool) -> None:
    """Save the first ``steps`` steps. In the background further ones are added meanwhile."""
    handle = buffer.save(path, extra={"steps": steps, "model": torch.full((300,), steps)}, background=background)
    more = steps
    while not handle.done:
        grow(buffer, more, 1)
        more += 1
    handle.wait()


def attack(path: Path, number: int, buffer: ReplayBuffer, steps: int) -> tuple[str, ReplayBuffer, int]:
    """Fork a saver, kill it, and look. Returns the outcome, and the buffer and its steps to go on with."""
    random = np.random.default_rng(number)
    added, background, timed = int(random.integers(1, 30)), number % 2 == 1, number % 5 >= 3
    tail, how = number % 2 == number // 5 % 2, int(random.integers(3))
    at = number * 7 % (TAIL if tail else HEAD)
    first = not (path / "manifest.json").exists()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(read)
            grow(buffer, steps, added)
            if not timed:
                fatal(at, how, tail)
            os.write(write, b"begun ")
            save(buffer, path, steps + added, background)
            os.write(write, b"done")
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(write)
    if timed:
        os.read(read, 5)
        time.sleep(random.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or status == 0, f"the saver failed: {status}"
    with os.fdopen(read, "rb") as told:
        done = told.read().endswith(b"done")
    new = copy.deepcopy(buffer)
    grow(new, steps, added)
    try:
        loaded = ReplayBuffer.load(path)
    except NoSaveError:
        assert first, "the save is gone"
        assert not done, "the save never was there"
        save(buffer, path, steps, False)
        return "none", buffer, steps
    loaded.check()
    found = loaded.extra["steps"]
    assert loaded.extra["model"].tolist() == [found] * 300
    assert found in ((steps + added,) if done or first else (steps, steps + added)), f"done: {done}, found {found}"
    assert facts(loaded) == facts(new if found == steps + added else buffer), "the save is torn"
    outcome = "done" if done else "new" if found == steps + added else "old"
    return outcome, loaded, found


def main(path: Path, first: int, count: int) -> Counter[str]:
    """Kill savers number ``first`` and on; how often each save was found. It changes this process: fork one for it."""
    segments.SMALL_BYTES, segments.SMALL_SHARE, segments.LARGE_SHARE = 1, 12, 3
    saved_ring.PIECE, snapshot.AHEAD, disk.SMALL = 1 << 13, 1, 1 << 10
    os.fsync = lambda descriptor: None  # a kill takes nothing from what the system has, and a disk makes it wait
    outcomes, steps = Counter[str](), forger.STEPS
    buffer = forger.KINDS["prioritized, transition, shared"]()
    for number in range(first, first + count):
        if number % 13 == 0:  # a first save
            shutil.rmtree(path, ignore_errors=True)
            buffer, steps = forger.KINDS["prioritized, transition, shared"](), forger.STEPS
        outcome, buffer, steps = attack(path, number, buffer, steps)
        outcomes[outcome] += 1
        assert threading.active_count() == 1  # a fork of threads would prove nothing
    buffer.save(path)
    with files.Save(path) as saved:
        assert {"manifest.json", *saved.contents.files} == set(os.listdir(path)), "rubbish stays"
    return outcomes
