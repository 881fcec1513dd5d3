"""Compiles every kernel ahead of its first use: ``python -m relive.compile``.

A kernel is compiled when it is first called, which takes many seconds for all of them, and kept on disk. This module
calls each of them once, through small buffers of every kind, so that trainings which start later only load them: in the
build of a container, or before a machine starts many workers. It compiles for the processor that it runs on.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from . import kernels
from .batches import SequenceBatch
from .processes.lanes import Lanes
from .processes.limits import SamplesPerInsert
from .processes.weights import Weights
from .replay.buffer import ReplayBuffer
from .returns import GAE, GroupAdvantage, MonteCarlo, TDLambda, VTrace
from .rollout.buffer import RolloutBuffer
from .samplers.prioritized import Prioritized
from .samplers.recent import Recent
from .samplers.uniform import Uniform, WithoutReplacement
from .steps.schema import Field, Path, Schema
from .views.frames import FrameStack
from .views.hindsight import Hindsight
from .views.sequences import Sequence
from .views.transitions import NStep, Transition

__all__ = ["compile_kernels"]

Part = Callable[[], Any]
"""Makes a sampler or a view: each buffer has its own."""

ENVS, STEPS = 2, 12  # of each buffer; episodes end in its middle

FLAGS = {"terminated": Field((), torch.bool), "truncated": Field((), torch.bool)}
SMALL = Schema({"obs": (3,), "reward": (), **FLAGS})
IMAGES = Schema({"obs": Field((64, 64), torch.uint8), "reward": (), **FLAGS})
GOALS = Schema({"obs": dict.fromkeys(("observation", "achieved_goal", "desired_goal"), (3,)), "reward": (), **FLAGS})
VALUES: dict[str, Any] = dict.fromkeys(("value", "log_prob", "target_log_prob"), ())

SAMPLERS: tuple[Part, ...] = (
    Uniform, WithoutReplacement, Prioritized, Recent, partial(Prioritized, normalize="buffer"),
    lambda: Recent(inner=Prioritized()),
)  # fmt: skip


def compile_kernels() -> int:
    """Compile the kernels that are not on disk yet.

    Returns:
        The number of functions that were compiled: 0 if all of them were loaded.
    """
    progress = kernels.fast().PROGRESS
    before = progress.compiled
    _play_rollout()
    for sampler in SAMPLERS:
        _play_replays(SMALL, sampler, Transition)
        _play_replays(SMALL, sampler, partial(Sequence, 4, burn_in=2, overlap="half"))
    _play_replays(IMAGES, Prioritized, partial(NStep, 3))
    _play_replays(IMAGES, Uniform, partial(FrameStack, 2))
    _play_replays(IMAGES, Uniform, partial(Sequence, 3))
    _play_replays(GOALS, Uniform, partial(Hindsight, _reward))
    _play_replays(SMALL, Prioritized, Transition, ordered=False)
    if sys.platform != "win32":
        _play_lanes()
    _look_ahead()
    return progress.compiled - before


def _play_rollout() -> None:
    """Every estimator, then minibatches and sequences of every overlap."""
    rollout = RolloutBuffer(IMAGES.extend(**VALUES, action=(2,)), STEPS, ENVS, seed=0)
    for estimator in (GAE(), TDLambda(), MonteCarlo(), VTrace(), GroupAdvantage(group_size=ENVS)):
        rollout.clear()
        for number in range(STEPS):
            rollout.add(**_step(rollout.schema, number))
        rollout.set_last(value=np.zeros(ENVS, np.float32))
        rollout.set_final_value([STEPS // 2], [1], [0.0])
        rollout.finish(estimator)
    for batches in (
        rollout.minibatches(ENVS, epochs=2, normalize_advantage=True),  # packed, from the second epoch on
        rollout.sequences(4, num_batches=2),
        rollout.sequences(4, overlap="half", num_batches=2),
        rollout.sequences(num_batches=2),
    ):
        list(batches)


def _play_replays(schema: Schema, sampler: Part, view: Part, ordered: bool = True) -> None:
    """A replay of one environment and one of several: rows, batches, priorities."""
    for num_envs in (1, ENVS):
        size: dict[str, Any] = {"capacity": STEPS * num_envs, "num_envs": num_envs, "ordered": ordered}
        size["check_ends"] = False  # the checks add the first steps part by part
        replay = ReplayBuffer(schema, **size, sampler=sampler(), view=view(), seed=0)
        for number in range(2 * STEPS):  # two rounds, so that rows are overwritten
            replay.add(**_step(schema, number, num_envs), next_obs=_zeros(schema, "obs", num_envs))
        batch = replay.sample(2)
        if replay.has_priorities:
            mask = batch["mask"] if isinstance(batch, SequenceBatch) else None
            replay.update_priorities(batch["index"], batch["reward"], mask)
            newest = int(replay.slice(0, -1)["index"][0])  # it cannot be drawn yet, so another kernel looks at it
            replay.update_priorities([newest], [0.0])
        for _ in replay.batches(2, 1):
            pass
        replay.check()


def _play_lanes() -> None:
    """A lane that is written and drained, and weights."""
    lanes, replay = Lanes(SMALL, 1, ENVS), ReplayBuffer(SMALL, STEPS * ENVS, ENVS)
    with lanes.writer(0) as writer:
        for number in range(STEPS):
            writer.add(_step(SMALL, number), next_obs=_zeros(SMALL, "obs", ENVS))
    limit = SamplesPerInsert(1.0, ENVS, ENVS)
    lanes.drain(replay, limit=limit)
    limit.try_to_sample(1)
    limit.uncount(samples=1)
    lanes.wait(0)
    lanes.drain(replay)
    weights = Weights({"weight": torch.zeros(2)})
    weights.wait(0)
    weights.publish({"weight": torch.ones(2)})


def _look_ahead() -> None:
    """Asks the system for no rows."""
    nothing = np.zeros(0, np.int64)
    kernels.fast().ask_for(np.zeros(2, np.int64), np.zeros((0, 2), np.int64), 1, nothing, nothing)


def _step(schema: Schema, number: int, num_envs: int = ENVS) -> dict[str, Any]:
    """A step of zeros. In the middle of the buffer the first environment terminates, and the others are cut off."""
    middle, first = number % STEPS == STEPS // 2, np.arange(num_envs) == 0
    step = {name: _zeros(schema, name, num_envs) for name in schema.names}
    return step | {"terminated": first & middle, "truncated": ~first & middle}


def _zeros(schema: Schema, name: str, num_envs: int) -> Any:
    def zeros(path: Path) -> NDArray[Any]:
        field = schema.leaves[path]
        return torch.zeros((num_envs, *field.shape), dtype=field.dtype).numpy()

    return schema.rebuild(name, zeros)


def _reward(achieved: NDArray[np.float32], desired: NDArray[np.float32], _info: Any) -> NDArray[np.float32]:
    return -np.linalg.norm(achieved - desired, axis=-1).astype(np.float32)


def main() -> None:
    """Compile, and say how much there was to do."""
    print("relive: loading every kernel; to compile those that are missing takes up to half a minute ...", flush=True)
    logging.getLogger("relive.compile").setLevel(logging.ERROR)  # its line would say the same
    start = time.perf_counter()
    count, folder = compile_kernels(), kernels.fast().cache_folder()
    seconds = time.perf_counter() - start
    if folder is None:
        print(f"relive: compiled {count} functions in {seconds:.0f} s, but found no folder to keep them in")
    elif count:
        print(f"relive: compiled {count} functions in {seconds:.0f} s; they are kept in {folder}")
    else:
        print(f"relive: every kernel was compiled already, in {folder}; loading them took {seconds:.1f} s")


if __name__ == "__main__":
    main()
