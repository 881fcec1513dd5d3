"""What type checkers see of relive: a user's program in their strict modes, and every public name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import typed_program
from support.effort import CI

PROGRAM = Path(typed_program.__file__)
PYRIGHT = [sys.executable, "-m", "pyright"]

HOSTED = tuple(f"relive.compat.{name}." for name in ("rsl_rl", "sb3_contrib", "skrl", "stable_baselines3"))
"""Drop-ins that are subclasses of a library's own classes: without the library, these are unknown."""


def test_the_program_does_what_it_says(tmp_path: Path) -> None:
    assert isinstance(typed_program.on_policy(tmp_path), float)
    assert typed_program.off_policy() > 0
    assert "-1" in typed_program.refused()


@pytest.mark.slow
def test_the_program_is_right_in_strict_modes(tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    copy = tmp_path / "program.py"
    copy.write_text(PROGRAM.read_text(encoding="utf-8"), encoding="utf-8")
    command = [*PYRIGHT, "--pythonpath", sys.executable, copy.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("package", [pytest.param("relive", marks=CI)])
def test_the_type_of_every_public_name_is_known(package: str, tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    command = [*PYRIGHT, "--verifytypes", package, "--ignoreexternal", "--outputjson"]
    bin_first = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PATH": bin_first}, capture_output=True, text=True, check=False
    )
    symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    exported = {symbol["name"]: symbol["isTypeKnown"] for symbol in symbols if symbol["isExported"]}
    assert "relive.replay.buffer.ReplayBuffer.sample" in exported
    assert [name for name, known in exported.items() if not known and not name.startswith(HOSTED)] == []
