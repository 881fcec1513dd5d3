"""Velora's files: what its own ``save`` wrote comes in, and a file that lies is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
