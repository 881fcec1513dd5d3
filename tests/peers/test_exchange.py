"""Files of other libraries, beside the live buffers they were saved from: both come in as the same steps."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relive.exchange import from_stable_baselines3, from_torchrl, log_of
from relive.steps.schema import map_leaves


def assert_same(one: Any, other: Any) -> None:
    """Two logs with the same fields, bit by bit."""
    assert one.fields.keys() == other.fields.keys()
    for name in one.fields:
        map_leaves(np.testing.assert_array_equal, one.fields[name], other.fields[name])


@pytest.mark.parametrize("kind", ["ReplayBuffer", "DictReplayBuffer", "NStepReplayBuffer"])
@pytest.mark.parametrize("steps", [5, 23])
def test_stable_baselines3(tmp_path: Path, kind: str, steps: int) -> None:
    gym = import_module("gymnasium")
    buffers = import_module("stable_baselines3.common.buffers")
    save = import_module("stable_baselines3.common.save_util").save_to_pkl
    if not hasattr(buffers, kind):
        pytest.skip("this release has no such buffer")
    rng, box = np.random.default_rng(0), gym.spaces.Box(-9, 9, (3,))
    nested = kind == "DictReplayBuffer"
    space = gym.spaces.Dict({"a": box, "b": gym.spaces.Box(0, 255, (4, 4, 1), np.uint8)}) if nested else box
    buffer = getattr(buffers, kind)(20, space, gym.spaces.Discrete(3), n_envs=2)
    space.seed(0)

    def observed() -> Any:
        drawn = [space.sample() for _ in range(2)]
        return {name: np.stack([one[name] for one in drawn]) for name in space} if nested else np.stack(drawn)

    for _ in range(steps):
        done, cut = rng.random(2) < 0.3, rng.random(2) < 0.5
        infos = [{"TimeLimit.truncated": bool(flag)} for flag in cut]
        buffer.add(observed(), observed(), rng.integers(3, size=(2, 1)), rng.normal(size=2), done, infos)
    save(tmp_path / "buffer.pkl", buffer)
    assert_same(from_stable_baselines3(tmp_path / "buffer.pkl"), log_of(buffer))


@pytest.mark.parametrize("storage", ["LazyTensorStorage", "LazyMemmapStorage"])
@pytest.mark.parametrize("steps", [5, 23])
def test_torchrl(tmp_path: Path, storage: str, steps: int) -> None:
    data = import_module("torchrl.data")
    torch, tensordict = import_module("torch"), import_module("tensordict")
    buffer = data.TensorDictReplayBuffer(storage=getattr(data, storage)(20), batch_size=4)
    at = torch.arange(steps)
    for t in at:
        flags = {"terminated": t[None] % 7 == 6, "truncated": t[None] % 5 == 4}
        following = {"pixels": torch.full((2, 2), int(t) + 1, dtype=torch.uint8), "reward": t[None] / 3, **flags}
        now = {"pixels": torch.full((2, 2), int(t), dtype=torch.uint8), "action": t[None] % 3}
        buffer.add(tensordict.TensorDict(now | {"next": tensordict.TensorDict(following)}))
    buffer.dumps(tmp_path / "dump")
    assert_same(from_torchrl(tmp_path / "dump"), log_of(buffer))
