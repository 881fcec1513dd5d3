"""Minari: what goes out comes back, with every end and final observation."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from relive.cli import app
from relive.errors import ParameterError
from relive.exchange import from_minari, minari, to_minari
from relive.steps.schema import Field
from support import internals
from support.twins import Twin

pytest.importorskip("minari")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return tmp_path


def columns(replay: Any) -> dict[str, Any]:
    table = replay.to_pandas(next_obs=True)
    return {name: np.stack(list(table[name])) for name in table.columns if name not in ("env", "index", "episode")}


@pytest.mark.parametrize(
    ("dress", "kind"), [("box", "hdf5"), ("box", "arrow"), ("dict", "arrow"), ("tuple", "arrow"), ("image", "arrow")]
)
def test_episodes_go_out_and_come_back(dress: str, kind: str) -> None:
    twin = Twin(2, 40, dress=dress).play("..", ".T", "..", "U.", "..", ".B", "..")
    to_minari(twin.buffer, "test/episodes-v0", data_format=kind)
    log = from_minari("test/episodes-v0")
    back = log.replay()
    back.check()
    want, got = columns(twin.buffer), columns(back)
    last = want.pop("truncated"), got.pop("truncated")
    assert want.keys() == got.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    added = np.flatnonzero(last[0] != last[1])
    assert len(added) == 1  # the episode that was still running
    assert last[1][added].all()
    assert [e.whole for e in back.episodes()] == [True] * 4
    assert log.lacks == ()  # it has no infos


def test_the_space_of_discrete_actions_has_the_largest_that_was_taken() -> None:
    assert internals.space(minari)(Field((), torch.int64), 3).n == 4
    assert internals.space(minari)(Field((), torch.int64), 0).n == 2


@pytest.mark.parametrize("kind", [{}, {"data_format": "arrow"}])
def test_the_release_that_always_writes_jpeg_is_refused(kind: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def without_an_option(dataset_id: str, buffers: Any, env: Any, data_format: str, **about: Any) -> str:
        return data_format

    monkeypatch.setattr("minari.create_dataset_from_buffers", without_an_option)
    monkeypatch.setattr("minari.__version__", "0.5.3")
    replay = Twin(2, 40).play("..", ".T", "..").buffer
    with pytest.raises(ParameterError, match=r"data_format='arrow'\): Minari 0\.5\.3 writes images as JPEG.*'hdf5'"):
        to_minari(replay, "test/episodes-v0", **kind)
    assert to_minari(replay, "test/episodes-v0", data_format="hdf5") == "hdf5"
    monkeypatch.setattr("minari.__version__", "0.5.2")
    assert to_minari(replay, "test/episodes-v0", **kind) == "arrow"


def test_a_package_that_is_missing_for_a_format_of_files_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_minari(Twin(2, 40).play("..", ".T", "..").buffer, "test/episodes-v0")
    about = folder / "test" / "episodes-v0" / "data" / "metadata.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"data_format": "hdf5"}))  # as on Minari's hub
    monkeypatch.delitem(sys.modules, "minari.dataset._storages.hdf5_storage", raising=False)
    monkeypatch.setitem(sys.modules, "h5py", None)
    message = r"Minari needs h5py for the files of this data set: pip install 'relive\[minari\]'"
    with pytest.raises(ModuleNotFoundError, match=message) as raised:
        from_minari("test/episodes-v0")
    assert raised.value.name == "h5py"
    with pytest.raises(ModuleNotFoundError, match=message):
        to_minari(Twin(2, 40).play("..", ".T", "..").buffer, "test/others-v0", data_format="hdf5")
    result = CliRunner().invoke(app, ["convert", "minari:test/episodes-v0", str(folder / "save")])
    assert result.exit_code == 2
    assert result.output == f"relive convert: {raised.value}\n"


def test_the_extra_brings_what_both_formats_of_files_need() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = " ".join(project["optional-dependencies"]["minari"])
    assert "arrow" in needed
    assert "hdf5" in needed
    assert "pillow" in needed
