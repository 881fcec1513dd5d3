"""Writers of lanes that are killed at random instants: no step is torn, none comes twice, none that was acknowledged
is missing."""

from __future__ import annotations

import gc
import os
import sys
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from attacks.tally import record
from relive import Lanes, Prioritized, ReplayBuffer
from relive.processes.shared import SharedBlock
from support.children import kill, started
from support.effort import in_ci
from support.lane_plays import TAGGED, Inspector, write_for_ever

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs memory that processes share")

WRITERS, LIVES = 4, 40_000
LONG = 600.0 if settings.get_current_profile_name() == "thorough" else 120.0
"""Seconds of the slow test."""


class Trial:
    """Four writers that are killed and started again while this process drains.

    Args:
        steps: of a lane. In a short one a writer mostly waits for room, in a long one it mostly writes.
        seed: of the instants.
        spawns: the share of processes that are spawned; the others fork, which is quicker.
    """

    def __init__(self, steps: int, seed: int, spawns: float) -> None:
        self.rng, self.spawns = np.random.default_rng(seed), spawns
        self.lanes = Lanes(TAGGED, WRITERS, steps=steps)
        self.replay = ReplayBuffer(TAGGED, 4 * steps * WRITERS, WRITERS, sampler=Prioritized(), seed=0)
        self.acknowledged = SharedBlock.create(8 * WRITERS * LIVES)
        self.inspector, self.kills = Inspector(self.replay, self.lanes), 0
        self.lives = [0] * WRITERS
        self.processes = [self._start(lane) for lane in range(WRITERS)]

    def _start(self, lane: int) -> Any:
        method = "spawn" if self.rng.random() < self.spawns else "fork"
        return started(method, write_for_ever, self.lanes, lane, self.lives[lane], self.acknowledged)

    def run(self, seconds: float, kills: int) -> list[str]:
        """Drain, look, kill and start again for so long, and at least so often; what was wrong."""
        end, due = time.monotonic() + seconds, 0.0
        while time.monotonic() < end or self.kills < kills:
            self.lanes.wait(0.01)
            self.lanes.drain(self.replay)
            wrong = self.inspector.look()
            if wrong:
                return wrong
            if time.monotonic() >= due:
                lane = int(self.rng.integers(WRITERS))
                kill(self.processes[lane])
                self.kills += 1
                self.lives[lane] += 1
                self.processes[lane] = self._start(lane)
                due = time.monotonic() + float(self.rng.exponential(0.02))
        return []

    def finish(self) -> list[str]:
        """Kill all, take what is left, and compare it with what was acknowledged."""
        for process in self.processes:
            kill(process)
        assert self.lanes.alive == [False] * WRITERS
        self.lanes.drain(self.replay)
        wrong = self.inspector.look()
        self.replay.check()
        noted = self.acknowledged.array.view(np.int64).reshape(WRITERS, LIVES)
        for lane, found in enumerate(self.inspector.found):
            for life in range(self.lives[lane] + 1):
                come, known = found.get(life, 0), int(noted[lane, life])
                if not known <= come <= known + 1:
                    wrong.append(f"lane {lane}, life {life}: {known} steps were acknowledged, {come} came")
        return wrong


@pytest.mark.parametrize(
    ("steps", "seconds"),
    [(8, 0.0), in_ci(256, 0.0), *(pytest.param(steps, LONG / 2, marks=pytest.mark.slow) for steps in (16, 1024))],
)
def test_writers_killed_at_any_instant_tear_lose_and_double_nothing(steps: int, seconds: float) -> None:
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    trial = Trial(steps, steps, 0.02 if seconds else 0.0)
    wrong = trial.run(seconds, 8) + trial.finish()
    record("SIGKILL of a process that writes to a lane, at a random instant", trial.kills + WRITERS, len(wrong))
    assert not wrong, f"after {trial.kills} kills and {trial.inspector.rows} rows: {wrong[:5]}"
    assert trial.inspector.rows > 100
    del trial
    gc.collect()
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) <= before + 1  # nothing is left open
