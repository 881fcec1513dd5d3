"""`python -m relive.compile` leaves nothing to compile to the trainings that come after it."""

from __future__ import annotations

import gc
import io
import subprocess
import sys
from contextlib import redirect_stdout

import pytest

from effort import in_ci
from forked import in_fork
from relive import kernels

TRAININGS = """
import contextlib, io
import numpy as np, torch
import relive, relive.compile
from relive.kernels import fast

with contextlib.redirect_stdout(io.StringIO()):
    relive.compile.main()
compiled = fast().PROGRESS.compiled
flags = {"terminated": relive.Field((), torch.bool), "truncated": relive.Field((), torch.bool)}
schema = relive.Schema({"obs": (17,), "action": relive.Field((), torch.int64), "reward": (), **flags})
step = {"obs": torch.zeros(8, 17), "action": np.zeros(8, np.int64), "reward": np.zeros(8), "terminated": [False] * 8,
        "truncated": torch.zeros(8, dtype=torch.bool)}

rollout = relive.RolloutBuffer(schema.extend(value=(), log_prob=()), 32, 8, seed=1)
for _ in range(32):
    rollout.add(**step, value=torch.zeros(8), log_prob=torch.zeros(8))
rollout.finish(relive.GAE(), last_value=torch.zeros(8))
list(rollout.minibatches(64, epochs=2))
list(rollout.sequences(8, num_batches=4))

for view in (relive.NStep(3), relive.Sequence(16)):
    replay = relive.ReplayBuffer(schema, 1000, num_envs=8, sampler=relive.Prioritized(), view=view, seed=0)
    for _ in range(50):
        replay.add(**step)
    for batch in replay.batches(4, 32):
        replay.update_priorities(batch["index"], torch.ones(batch["index"].shape), getattr(batch, "mask", None))
print(fast().PROGRESS.compiled - compiled)
"""


def compiled_in_training() -> str:
    """What the program prints."""
    with redirect_stdout(io.StringIO()) as printed:
        exec(TRAININGS, {})
    return printed.getvalue()


def test_after_it_a_ppo_and_a_dqn_compile_nothing() -> None:
    assert in_fork(compiled_in_training).split() == ["0"]


@pytest.mark.parametrize("program", [in_ci(TRAININGS)], ids=["trainings"])
def test_nor_do_they_in_a_new_process(program: str) -> None:
    """Which has loaded nothing for another test."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0"]


def test_loading_the_kernels_leaves_the_garbage_collector_as_it_was() -> None:
    for enabled in (True, False):
        try:
            (gc.enable if enabled else gc.disable)()
            kernels.fast.__wrapped__()
            assert gc.isenabled() == enabled
        finally:
            gc.enable()
