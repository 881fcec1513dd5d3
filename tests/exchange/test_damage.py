"""Files of other libraries with bytes changed, lost and added: they are read, or refused with an error of ours."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relive.exchange import from_lerobot, from_torchrl, from_velora
from support.damaging import assert_read_or_refused
from support.effort import often

FILES = Path(__file__).parents[1] / "fixtures" / "exchange"


CASES = [
    (from_lerobot, "lerobot"),
    (from_torchrl, "torchrl"),
    (from_torchrl, "torchrl-blocks"),
    (from_velora, "velora"),
]


@pytest.mark.parametrize(("read", "name"), CASES)
@pytest.mark.parametrize("count", [often(9, 40), pytest.param(2000, marks=pytest.mark.slow)])
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, read: Callable[[Path], Any], name: str, count: int) -> None:
    if name == "lerobot":
        pytest.importorskip("pyarrow")
    assert_read_or_refused(shutil.copytree(FILES / name, tmp_path / name), read, count, seed=count)
