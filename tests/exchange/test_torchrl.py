"""TorchRL's dumps: what its own ``dumps`` wrote comes in, and a dump that lies is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensordict import TensorDict

from relive.errors import FieldError, FileFormatError, NoSaveError, ParameterError
from relive.exchange import from_torchrl
from support.loops import ring_of

FILES = Path(__file__).parents[1] / "fixtures" / "exchange"
STORAGE, META = "storage/storage_metadata.json", "storage/meta.json"


@pytest.mark.parametrize(("name", "lengths"), [("torchrl", [1, 1, 4, 4, 1, 1]), ("torchrl-blocks", [1, 4, 1, 1, 4, 1])])
def test_a_full_ring_of_two_envs_comes_in_thread_by_thread(name: str, lengths: list[int]) -> None:
    log = from_torchrl(FILES / name)
    obs, after = log.fields["obs"], log.fields["next_obs"]
    assert sorted(log.fields["reward"]) == list(range(6, 18))  # the newest of 18
    np.testing.assert_array_equal(log.fields["action"][:, 0], log.fields["reward"])
    np.testing.assert_array_equal(after["state"] - obs["state"], np.broadcast_to([0, 0, 1], obs["state"].shape))
    assert obs["pixels"].dtype == np.uint8
    np.testing.assert_array_equal(after["pixels"], obs["pixels"] + 1)
    env, episode, step = (obs["state"] / [50, 1, 1]).T.astype(int)
    np.testing.assert_array_equal(log.fields["terminated"], (step == 3) & ((episode + env) % 2 == 0))
    np.testing.assert_array_equal(log.fields["truncated"], (step == 3) & ((episode + env) % 2 == 1))
    assert [len(e.steps) for e in log.replay().episodes()] == lengths  # two axes say which rows are of one env
    assert log.lacks == ()


def dumped(folder: Path, steps: TensorDict, size: int, written: int) -> Path:
    """The rows of a storage as a dump: ``size`` is what it calls its length, ``written`` how many rows it was given."""
    steps.memmap(folder / "storage")
    (folder / STORAGE).write_text(json.dumps({"metadata": {}, "is_pytree": False, "len": size}))
    (folder / "writer").mkdir()
    about = {"cursor": written % len(steps), "write_count": written}
    (folder / "writer" / "metadata.json").write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize("values", [2, 10**6])
@pytest.mark.parametrize(("rows", "size"), [(20, 60), (20, 59), (40, 90)])
def test_the_first_axis_of_a_storage_of_two_is_time_whatever_the_observations_are(
    tmp_path: Path, values: int, rows: int, size: int
) -> None:
    ring = ring_of(30, 3, values, rows)  # 59: a capacity that 3 does not divide
    log = from_torchrl(dumped(tmp_path / "dump", ring, size, 30))
    kept = np.arange(30)[-rows:]
    np.testing.assert_array_equal(log.fields["reward"], np.concatenate([kept, 100 + kept, 200 + kept]))
    assert [len(e.steps) for e in log.replay().episodes()] == [len(kept)] * 3


def test_a_storage_that_counts_rows_of_two_axes_is_read_in_full(tmp_path: Path) -> None:
    log = from_torchrl(dumped(tmp_path / "dump", ring_of(30, 3, 10**6, 20), 20, 30))
    assert sorted(log.fields["reward"]) == [100 * env + t for env in range(3) for t in range(10, 30)]


def test_steps_without_an_observation_or_a_next_are_named(tmp_path: Path) -> None:
    shutil.copytree(FILES / "torchrl", tmp_path / "dump")
    meta = json.loads((tmp_path / "dump" / META).read_text())
    for left_out, message in ((("state", "pixels"), "an observation that a step and its"), (("next",), 'a "next"')):
        less = {name: note for name, note in meta.items() if name not in left_out}
        (tmp_path / "dump" / META).write_text(json.dumps(less))
        with pytest.raises(FieldError, match=message):
            from_torchrl(tmp_path / "dump")


def edited(file: str, **members: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        content = json.loads((folder / file).read_text()) | members
        (folder / file).write_text(json.dumps(content))

    return spoil


def entry(**note: Any) -> dict[str, Any]:
    return {"device": "cpu", "shape": [12, 3], "dtype": "torch.float32", "is_nested": False} | note


def linked(folder: Path) -> None:
    file = folder / "storage" / "state.memmap"
    file.rename(folder / "elsewhere")
    file.symlink_to(folder / "elsewhere")


def linked_folder(folder: Path) -> None:
    (folder / "storage" / "next").rename(folder / "elsewhere")
    (folder / "storage" / "next").symlink_to(folder / "elsewhere")


def sparse(folder: Path) -> None:
    """A file that has the size it says, and takes no room on the disk."""
    edited("storage/meta.json", big=entry(shape=[12, 2**38], dtype="torch.uint8"))(folder)
    with open(folder / "storage" / "big.memmap", "wb") as stream:
        os.truncate(stream.fileno(), 12 * 2**38)


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (edited(STORAGE, len=13), FileFormatError, "'len': expected a whole number from 0 to 12"),
        (edited(STORAGE, len=0), FileFormatError, "got len=0"),
        (edited(STORAGE, is_pytree=True), FileFormatError, "tuples or dicts"),
        (edited("writer/metadata.json", cursor=-1), FileFormatError, "'cursor'"),
        (edited(META, shape=[10**9]), FileFormatError, r"expected the shape \(1000000000,\) in front"),
        (edited(META, shape=12), FileFormatError, "'shape': expected a list of sizes"),
        (edited(META, state=entry(shape=[12, 4])), FileFormatError, "expected 192 bytes.*got 144"),
        (edited(META, state=entry(shape=[12, -3])), FileFormatError, "'shape': expected a list of sizes"),
        (edited(META, **{"../../secret": entry()}), FileFormatError, "expected names of files"),
        (edited(META, **{"..": {"type": "TensorDict"}}), FileFormatError, "expected names of files"),
        (edited(META, other={"type": "TensorDict"}), NoSaveError, "other/meta.json"),
        (edited(META, other=entry()), NoSaveError, "other.memmap"),
        (edited("storage/next/meta.json", done=entry(shape=[12, 1])), FileFormatError, "expected 48 bytes"),
        (linked, FileFormatError, "symbolic link"),
        (linked_folder, FileFormatError, "got a link"),
        (sparse, (ParameterError, FileFormatError), "are free"),
        (lambda folder: os.truncate(folder / "storage" / "action.memmap", 4), FileFormatError, "got 4;"),
        (lambda folder: shutil.rmtree(folder / "storage" / "next"), NoSaveError, "next/meta.json"),
        (lambda folder: (folder / META).write_text("[" * 10**6), FileFormatError, "at most|no JSON"),
        (lambda folder: (folder / "storage/next/done.memmap").write_bytes(b"\2" * 12), FileFormatError, "bools"),
    ],
)
def test_a_dump_that_lies_is_refused(
    tmp_path: Path, spoil: Callable[[Path], object], error: type[Exception], message: str
) -> None:
    shutil.copytree(FILES / "torchrl", tmp_path / "dump")
    spoil(tmp_path / "dump")
    with pytest.raises(error, match=message):
        from_torchrl(tmp_path / "dump")


def test_what_is_no_tensor_is_named_and_never_opened(tmp_path: Path) -> None:
    shutil.copytree(FILES / "torchrl", tmp_path / "dump")
    edited(META, text={"type": "NonTensorStack"}, half=entry(dtype="torch.bfloat16"))(tmp_path / "dump")
    (tmp_path / "dump" / "storage" / "text").mkdir()
    (tmp_path / "dump" / "storage" / "text" / "other.pickle").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    log = from_torchrl(tmp_path / "dump")
    assert [lack.split("'")[1] for lack in log.lacks] == ["text", "half"]
    with pytest.raises(NoSaveError, match="expected the directory of a TorchRL dump, got nothing"):
        from_torchrl(tmp_path / "nowhere")


@pytest.mark.parametrize("dtype", [[], {}, [1], None, 5])
def test_an_entry_whose_dtype_is_no_text_is_not_read(tmp_path: Path, dtype: Any) -> None:
    shutil.copytree(FILES / "torchrl", tmp_path / "dump")
    edited(META, odd=entry(dtype=dtype))(tmp_path / "dump")
    assert [lack.split("'")[1] for lack in from_torchrl(tmp_path / "dump").lacks] == ["odd"]
