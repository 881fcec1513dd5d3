"""The settings of torch that whole programs make: what has a device or dtype of its own keeps it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive
from relive import GAE, Field, Mixture, ReplayBuffer, RolloutBuffer, Schema
from support import twins
from support.twins import SAMPLERS, Twin

STEP = {"obs": np.zeros(3, np.float32), "action": 0, "reward": 0.0, "terminated": False, "truncated": False}


@pytest.fixture(params=["device", "dtype"])
def _other_defaults(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    if request.param == "device":
        torch.set_default_device("meta")
    else:
        torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("_other_defaults")
@pytest.mark.parametrize("view", [*twins.VIEWS.values(), *twins.SEQUENCES.values()])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_replay_plays_saves_and_loads_under_other_defaults(
    sampler: str, view: Callable[[], Any], tmp_path: Path
) -> None:
    twin = Twin(2, 30, view=view(), sampler=SAMPLERS[sampler]())
    for kinds in ("..", ".T", "U.", "..", "..", "..", "..", "BU"):
        twin.add(kinds)
    for _ in range(2):
        twin.check_batch(twin.buffer.sample(2))
    twin.buffer.save(tmp_path / "save", extra={"weights": np.ones(3)})
    loaded = ReplayBuffer.load(tmp_path / "save")
    twin.check_batch(loaded.sample(2))
    assert loaded.sample(2)["index"].device.type == "cpu"
    mixture = Mixture({"one": twin.buffer, "other": loaded}, {"one": 0.5, "other": 0.5})
    if not isinstance(batch := mixture.sample(4), relive.SequenceBatch):
        assert batch["source"].tolist() == [0, 0, 1, 1]


@pytest.mark.usefixtures("_other_defaults")
def test_a_rollout_is_filled_finished_saved_and_loaded_under_other_defaults(tmp_path: Path) -> None:
    rollout = RolloutBuffer(Schema.from_example({**STEP, "value": 0.0, "log_prob": 0.0}), 4, 2)
    for t in range(4):
        rollout.add(
            {name: np.stack([np.asarray(x)] * 2) for name, x in STEP.items()} | {"value": [t, t], "log_prob": [0, 0]}
        )
    rollout.set_last(obs=np.zeros((2, 3), np.float32), value=[0.0, 1.0])
    rollout.save(tmp_path / "save")
    for one in (rollout, RolloutBuffer.load(tmp_path / "save")):
        one.finish(GAE(0.9, 0.9))
        assert one["advantage"].dtype is torch.float32
        batches = list(one.minibatches(4, epochs=2))
        assert all(batch["advantage"].device.type == "cpu" for batch in batches)


@pytest.mark.usefixtures("_other_defaults")
def test_large_fields_of_a_dtype_that_numpy_lacks_are_copied_and_saved_under_other_defaults(tmp_path: Path) -> None:
    fields = {**dict.fromkeys(("terminated", "truncated"), Field((), torch.bool)), "reward": Field()}
    replay = ReplayBuffer(Schema({"obs": Field((40, 40), torch.bfloat16), "action": (), **fields}), 20, seed=0)
    for t in range(9):
        image = torch.full((1, 40, 40), t, dtype=torch.bfloat16, device="cpu")
        replay.add({"obs": image, "action": [0], "reward": [0], "terminated": [False], "truncated": [False]})
    replay.save(tmp_path / "save", background=True).wait()
    copies = copy.deepcopy(replay), pickle.loads(pickle.dumps(replay)), ReplayBuffer.load(tmp_path / "save")
    for one in copies:
        assert torch.equal(one.data()["obs"], replay.data()["obs"])
        assert one.data()["obs"].is_cpu
