"""Savers killed by SIGKILL again and again: what is found is the old save or the new one, to the bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from attacks import killer
from support.effort import often
from support.forks import in_fork


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("first", "count"),
    [(0, often(5, 26)), *(pytest.param(k, 250, marks=pytest.mark.slow) for k in range(26, 1026, 250))],
)
def test_a_saver_killed_at_any_call_or_instant_leaves_the_old_save_or_the_new(
    first: int, count: int, tmp_path: Path, tried: Callable[..., None]
) -> None:
    tried("a saver killed by SIGKILL, also in the background", count)
    outcomes = in_fork(killer.main, tmp_path / "save", first, count, seconds=60 + 2 * count)
    assert outcomes.total() == count
    assert min(outcomes[name] for name in ("none", "old", "new")) >= count // 50, outcomes
