"""Tries a wheel as a user gets it: in an environment with nothing else, away from the checkout. For `make wheel`.

The arguments are the wheel and what is installed before it, torch of some version.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

PROGRAM = """
import sys
import torch
import relive
from relive import core

assert relive.__file__.startswith(sys.prefix), relive.__file__
assert core._core.__file__.startswith(sys.prefix), core._core.__file__
flags = {"terminated": relive.Field((), torch.bool), "truncated": relive.Field((), torch.bool)}
schema = relive.Schema({"obs": (3,), "action": relive.Field((), torch.int64), "reward": (), **flags})
replay = relive.ReplayBuffer(schema, 100, num_envs=2, seed=0)
for t in range(20):
    replay.add(obs=torch.full((2, 3), t), action=[0, 1], reward=[t, t], terminated=[False] * 2, truncated=[False] * 2)
batch = replay.sample(32)
assert batch["obs"].shape == (32, 3)
assert torch.equal(batch["obs"][:, 0] + 1, batch["next_obs"][:, 0])
print(f"a batch of {len(replay)} transitions is right: Python {sys.version.split()[0]}, torch {torch.__version__}")
"""


def main(wheel: str, *before: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder, "bin", "python"))
        for what in ([*before], [str(Path(wheel).resolve())]):
            subprocess.run([python, "-m", "pip", "install", *what], check=True)
        subprocess.run([python, "-I", "-c", PROGRAM], check=True, cwd=folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
