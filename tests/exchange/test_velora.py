"""Velora's files: what its own ``save`` wrote comes in, and a file that lies is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relive.compat import velora
from relive.errors import FileFormatError, NoSaveError
from relive.exchange import from_velora

FILES = Path(__file__).parents[1] / "fixtures" / "exchange" / "velora"


def test_a_full_ring_of_two_envs_comes_in_thread_by_thread() -> None:
    log = from_velora(FILES)
    obs, after = log.fields["obs"], log.fields["next_obs"]
    assert len(log) == 12  # the newest of 18
    assert sorted(log.fields["reward"]) == list(range(6, 18))
    np.testing.assert_array_equal(log.fields["action"][:, 0], log.fields["reward"])
    np.testing.assert_array_equal(log.fields["terminated"], obs[:, 2] == 3)
    assert not log.fields["truncated"].any()
    np.testing.assert_array_equal(after - obs, np.broadcast_to([0, 0, 1], obs.shape))
    assert [len(e.steps) for e in log.replay().episodes()] == [1, 1, 4, 4, 1, 1]
    assert "it does not tell truncation from termination" in log.lacks
    assert "its hidden states were not read" in log.lacks
    np.testing.assert_array_equal(from_velora(FILES / "buffer_state.safetensors").fields["obs"], obs)


def test_files_of_another_name_are_found_by_their_prefix_or_by_the_name_of_one(tmp_path: Path) -> None:
    for file in FILES.glob("buffer_*"):
        shutil.copy(file, tmp_path / file.name.replace("buffer_", "mine-"))
    assert len(from_velora(tmp_path, prefix="mine-")) == len(from_velora(tmp_path / "mine-state.safetensors")) == 12


def spoiled(folder: Path, **metadata: Any) -> Path:
    shutil.copytree(FILES, folder)
    file = folder / "buffer_metadata.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | metadata))
    return folder


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"capacity": 13}, "contradict"),
        ({"capacity": 2**40, "size": 12, "position": 12}, r"expected F32 \[1099511627776, 3\]"),
        ({"size": -1}, "expected a whole number"),
        ({"state_dim": 4}, r"tensor 'states': expected F32 \[12, 4\], got F32 \[12, 3\]"),
        ({"size": 0, "position": 0}, "holds no step"),
    ],
)
def test_metadata_that_lie_are_refused(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        from_velora(spoiled(tmp_path / "v", **metadata))


def test_a_file_that_is_missing_or_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoSaveError, match=r"buffer_metadata\.json"):
        from_velora(tmp_path)
    folder = spoiled(tmp_path / "v")
    (folder / "buffer_state.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(FileFormatError, match="not a safetensors file"):
        from_velora(folder)
    (folder / "buffer_metadata.json").write_text("[" * 10**6)
    with pytest.raises(FileFormatError, match="no JSON"):
        from_velora(folder)
    with pytest.raises(FileFormatError, match="name that ends in"):
        from_velora(folder / "other.safetensors")


@pytest.mark.parametrize("hidden_dim", [0, 4])
@pytest.mark.parametrize("steps", [5, 13])
def test_what_the_drop_in_saved_comes_in_exactly_and_a_changed_byte_is_refused(
    tmp_path: Path, hidden_dim: int, steps: int
) -> None:
    rng = np.random.default_rng(0)
    states, actions, hiddens = (
        torch.from_numpy(rng.normal(size=(steps + 1, size)).astype(np.float32)) for size in (3, 2, hidden_dim)
    )
    dones = torch.arange(steps) % 4 == 3
    buffer = velora.ReplayBuffer(8, 3, 2, hidden_dim)
    buffer.add_multi(states[:-1], actions[:-1], torch.arange(float(steps)), states[1:], dones, hiddens[:-1])
    buffer.save(tmp_path)
    log = from_velora(tmp_path)
    kept = slice(max(steps - 8, 0), steps)
    for name, wanted in (("obs", states[:-1]), ("next_obs", states[1:]), ("action", actions[:-1]),
                         ("reward", torch.arange(float(steps))), ("terminated", dones)):  # fmt: skip
        np.testing.assert_array_equal(log.fields[name], wanted[kept])
    assert ("its hidden states were not read" in log.lacks) == (hidden_dim > 0)
    file = tmp_path / "buffer_state.safetensors"
    content = bytearray(file.read_bytes())
    columns = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    for name in ("states", "dones", *(["hiddens"] if hidden_dim else [])):
        at = len(content) - max(c["data_offsets"][1] for n, c in columns.items() if n != "__metadata__")
        at += columns[name]["data_offsets"][0]
        content[at] ^= 1
        file.write_bytes(content)
        with pytest.raises(FileFormatError, match="is damaged: expected the checksum"):
            from_velora(tmp_path)
        content[at] ^= 1
