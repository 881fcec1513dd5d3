"""Names of saves: a save is a directory, so a new one gets no name of a file."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from relive import Field, ReplayBuffer, RolloutBuffer, Schema, errors

FLAG = Field((), torch.bool)
SCHEMA = Schema({"obs": (), "reward": (), "terminated": FLAG, "truncated": FLAG})
WAYS: dict[str, Callable[[Path], Any]] = {
    "replay": lambda path: ReplayBuffer(SCHEMA, 8, seed=0).save(path),
    "replay, background": lambda path: ReplayBuffer(SCHEMA, 8, seed=0).save(path, background=True).wait(),
    "rollout": lambda path: RolloutBuffer(SCHEMA, 4, 1).save(path),
    "rollout, background": lambda path: RolloutBuffer(SCHEMA, 4, 1).save(path, background=True).wait(),
    "durable": lambda path: ReplayBuffer.open(path, SCHEMA, 8).close(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ending", [".pt", ".pth", ".pkl", ".npz", ".safetensors", ".PT"])
def test_a_new_save_with_the_name_of_a_file_is_refused_and_makes_nothing(way: str, ending: str, tmp_path: Path):
    better = re.escape(str(tmp_path / "replay"))
    with pytest.raises(errors.ParameterError, match=f"a save is a directory, .*'{ending}'.*; pass '{better}'"):
        WAYS[way](tmp_path / f"replay{ending}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("way", "load"), [("replay", ReplayBuffer.load), ("rollout", RolloutBuffer.load)])
def test_a_save_that_has_such_a_name_already_is_loaded_and_saved_to(
    way: str, load: Callable[[Path], Any], tmp_path: Path
):
    WAYS[way](tmp_path / "replay")
    there = (tmp_path / "replay").rename(tmp_path / "replay.pt")
    load(there).save(there)
    load(there)
    WAYS[way](tmp_path / "run.v2")  # another ending is no file's
