"""What only a new interpreter shows: what comes with relive, and that the end of a program waits for its saves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from relive import ReplayBuffer
from relive.files import read

PROGRAM = """
import atexit, json, os, sys, time
import numpy as np, torch

before = set(sys.modules)
import relive
print(json.dumps(sorted(set(sys.modules) - before)))
print(json.dumps([relive.compat.embodichain.__name__, relive.cluster.plan.__name__]))

from relive import ReplayBuffer, Schema, files

tensors = {"rows": torch.arange(1 << 18), "flags": torch.ones(3)}
atexit.register(lambda: files.write(sys.argv[2], tensors, {"k": 1}))

schema = Schema.from_example({"obs": np.zeros(2, np.float32), "action": 0, "reward": 0.0,
                              "terminated": False, "truncated": False})
replay = ReplayBuffer(schema, 40000, seed=0)
steps = {"obs": np.zeros((40000, 1, 2)), "action": np.arange(40000)[:, None], "reward": np.zeros((40000, 1)),
         "terminated": np.zeros((40000, 1), bool), "truncated": np.zeros((40000, 1), bool)}
replay.extend(steps)
genuine = os.write

def slow(descriptor, data):
    time.sleep(0.03)
    return genuine(descriptor, data)

os.write = slow
replay.save(sys.argv[1], background=True)
"""

HEAVY = {"gymnasium", "matplotlib", "numba", "pandas", "ray", "rich", "scipy", "tensordict", "triton"}
"""Packages that cost time to import and that `import relive` therefore leaves alone."""

MOST_NEW_MODULES = 8 if sys.version_info >= (3, 11) else 12
"""How many modules of others, all of them small, `import relive` may add to `import torch`."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Where the program saved, and what it wrote; one run for all tests, since it imports torch."""
    folder = tmp_path_factory.mktemp("program")
    command = [sys.executable, "-c", PROGRAM, str(folder / "save"), str(folder / "at exit")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return folder, done.stdout.splitlines()


def test_importing_relive_is_cheap(ended: tuple[Path, list[str]]) -> None:
    added: list[str] = json.loads(ended[1][0])
    assert "relive" in added
    others = [module for module in added if module.partition(".")[0] != "relive"]
    assert HEAVY & {module.partition(".")[0] for module in others} == set()
    assert len(others) <= MOST_NEW_MODULES, others
    assert not {"relive.cluster", "relive.compat", "relive.exchange"} & {*added}


def test_modules_are_there_by_their_path_without_an_import_of_their_own(ended: tuple[Path, list[str]]) -> None:
    assert json.loads(ended[1][1]) == ["relive.compat.embodichain", "relive.cluster.plan"]


def test_a_program_that_ends_finishes_its_save_and_can_make_another_though_it_starts_no_threads(
    ended: tuple[Path, list[str]],
) -> None:
    folder, _ = ended
    assert len(ReplayBuffer.load(folder / "save")) == 39_999
    tensors, _ = read(folder / "at exit")
    assert torch.equal(tensors["rows"], torch.arange(1 << 18))
