"""What other processes do in the tests of shared memory: functions that a spawned process can import."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.process import BaseProcess
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
from torch import Tensor

from relive import Weights
from relive.processes.shared import Bell, SharedBlock

SECONDS = 120.0
"""How long to wait for another process: far more than it takes."""

METHODS = ["fork", pytest.param("spawn", marks=pytest.mark.slow)]
"""How a process may start. A spawned one imports torch, which takes two seconds."""


STARTED = WeakSet[Any]()
"""What `started` has started. `conftest.py` has `end_all` kill after each test what is left of it."""


def add_one(block: SharedBlock) -> None:
    """Add 1 to every byte, and ring the bell in the first four."""
    block.array[8:] += 1
    Bell(block.array[:4].view(np.int32)).ring()


def answer(block: SharedBlock) -> None:
    """Wait for word 1, then set word 2; the bells are words 3 and 4."""
    words = block.array.view(np.int32)
    assert Bell(words[3:4]).wait(lambda: words[1] == 1, SECONDS)
    words[2] = 1
    Bell(words[4:5]).ring()


def claim_and_stay(block: SharedBlock, place: int) -> None:
    """Claim a place, say so in byte 4, and wait to be killed."""
    claim = block.claim(place)
    words = block.array.view(np.int32)
    words[1] = 1 if claim is not None and claim.holds else 2
    Bell(words[:1]).ring()
    signal.pause()


def share_and_stay(pipe: int) -> None:
    """Fork, write the name of the block in both processes, and wait to be killed. This one leads a group of its own."""
    os.setsid()
    block = SharedBlock.create(4096)
    os.fork()
    os.write(pipe, (block.name + "\n").encode())  # at once: two processes write here
    signal.pause()


def ring_often(block: SharedBlock, times: int) -> None:
    """Count up to ``times`` in counter 1, and ring bell 0 at each."""
    from relive import core

    counters, bells = block.array.view(np.int64), block.array.view(np.int32)
    bell = Bell(bells[:1])
    for number in range(1, times + 1):
        if core.publish(counters, 1, number, bells, 0):
            bell.wake()


def started(method: str, target: Any, *args: Any) -> Any:
    """A process that forks or spawns, and ends with this one."""
    process: Any = multiprocessing.get_context(method)
    process = process.Process(target=target, args=args, daemon=True)
    process.start()
    STARTED.add(process)
    return process


def end_all() -> None:
    """Kill what tests have started and left."""
    for process in list(STARTED):
        STARTED.discard(process)
        process.kill()
        process.join()


def kill(process: BaseProcess) -> None:
    """End a process as a crash would."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(SECONDS)
    assert process.exitcode == -signal.SIGKILL


def is_open_anywhere(token: str) -> list[str]:
    """The processes that have the memory of this token open or mapped."""
    found = list[str]()
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/maps", encoding="utf-8") as lines:
                if token in lines.read():
                    found.append(process)
        except OSError:
            continue
    return found


def done(process: BaseProcess) -> Any:
    """Wait for a process that ends well; one that does not end is killed."""
    process.join(SECONDS)
    found = process.exitcode
    process.kill()
    process.join()
    assert found is not None, f"{process.name} had not ended after {SECONDS:g} s"
    assert found == 0


def publish_for_ever(weights: Weights, state: dict[str, Tensor]) -> None:
    """Publish weights of which every number is that of their version, until a kill."""
    # A tensor that is sent to a spawned process shares its memory: fill copies, or the parent's own change under it.
    state = {name: tensor.clone() for name, tensor in state.items()}
    while True:
        for tensor in state.values():
            tensor.fill_(weights.version + 1)
        weights.publish(state)
