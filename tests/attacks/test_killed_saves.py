"""Savers killed by SIGKILL again and again: what is found is the old save or the new one, to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attacks.tally import record

KILLER = Path(__file__).with_name("killer.py")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("first", "count"), [(0, 50), *(pytest.param(k, 250, marks=pytest.mark.slow) for k in range(50, 1050, 250))]
)
def test_a_saver_killed_at_any_call_or_instant_leaves_the_old_save_or_the_new(
    first: int, count: int, tmp_path: Path
) -> None:
    command = [sys.executable, str(KILLER), str(tmp_path / "save"), str(first), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60 + 2 * count)
    record("a saver killed by SIGKILL, also in the background", count, int(done.returncode != 0))
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert sum(outcomes.values()) == count
    assert min(outcomes.get(name, 0) for name in ("none", "old", "new")) >= count // 50, outcomes
