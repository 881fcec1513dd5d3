"""A robot's recorder that is killed at any instant: every acknowledged step is there, and in the exported data set."""

from __future__ import annotations

from pathlib import Path

import pytest

from attacks import recorder
from attacks.tally import attempt
from support.effort import often
from support.forks import in_fork

pytest.importorskip("pyarrow")
pytest.importorskip("PIL")


@pytest.mark.parametrize(("seed", "times"), [(0, often(4, 24)), pytest.param(1, 200, marks=pytest.mark.slow)])
def test_a_killed_recorder_loses_no_step_that_was_acknowledged(seed: int, times: int, tmp_path: Path) -> None:
    with attempt("a recorder killed while it writes to a replay in files", times):
        steps, episodes = in_fork(recorder.main, tmp_path, times, seed, seconds=60 + times)
    assert steps > times
    assert episodes > times / 2
