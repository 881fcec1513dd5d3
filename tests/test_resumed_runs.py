"""Runs that are killed at random and go on from their last save: the same curve and the same networks, to the bit."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.effort import in_ci

EXAMPLE = Path(__file__).parents[1] / "examples" / "resume.py"


@pytest.fixture(scope="module")
def resume() -> Any:
    spec = importlib.util.spec_from_file_location("resume_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["resume_example"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(sys.platform != "linux", reason="its processes are forks")
@pytest.mark.parametrize(
    ("algorithm", "seed", "steps"),
    [
        in_ci("dqn", 0, 1100),  # replay/test_buffer.py is quick: what was saved goes on with the same batches
        pytest.param("ppo", 0, 1100, marks=pytest.mark.slow),  # `.ci/run` runs the example with both
        *(pytest.param(name, seed, 4000, marks=pytest.mark.slow) for seed in range(1, 11) for name in ("dqn", "ppo")),
    ],
)
def test_a_run_killed_at_random_steps_has_the_curve_of_one_that_is_not(
    algorithm: str, seed: int, steps: int, resume: Any, tmp_path: Path
) -> None:
    resume.compare(algorithm, tmp_path, seed, steps)  # fails if the run was never killed
    undisturbed, killed = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("undisturbed", "killed"))
    assert killed == undisturbed
    assert len(killed["curve"]) > 1
