"""Data sets from the hub: a stand-in serves them, and Hugging Face's and Minari's own libraries download them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from relive import ReplayBuffer
from relive.cli import app
from relive.errors import NoSaveError, ParameterError
from relive.exchange import from_lerobot, from_minari, to_minari
from relive.exchange.hub import downloaded
from support import loops
from support.hubs import Hub, serving
from support.twins import Twin

FILES = Path(__file__).parents[1] / "fixtures" / "exchange" / "lerobot"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    pytest.importorskip("pyarrow")
    shutil.copytree(FILES, tmp_path / "hub" / "me" / "set")
    (tmp_path / "hub" / "me" / "set" / "videos").mkdir()
    (tmp_path / "hub" / "me" / "set" / "videos" / "large.mp4").write_bytes(b"a video")
    (tmp_path / "hub" / "me" / "set" / "README.md").write_text("a card")
    (tmp_path / "hub" / "me" / "empty").mkdir()
    with serving(tmp_path / "hub", tmp_path / "cache", monkeypatch) as hub:
        yield hub


@pytest.mark.parametrize("address", ["hf://me/set", "hf://datasets/me/set", "hf://me/set@v3.0", Path("hf://me/set")])
def test_a_lerobot_data_set_comes_from_the_hub_without_its_videos(hub: Hub, address: str | Path) -> None:
    log = from_lerobot(address)
    assert log.source == f"'{address}', LeRobot data set"
    here = from_lerobot(FILES)
    assert log.lacks == here.lacks
    for name in ("action", "reward", "terminated", "truncated"):
        np.testing.assert_array_equal(log.fields[name], here.fields[name])
    assert {Path(name).parts[0] for name in hub.asked} == {"meta", "data"}
    del hub.asked[:]
    from_lerobot(address)
    assert not hub.asked  # it is in the cache
    from_lerobot(address, images=True)
    assert set(hub.asked) == {"videos/large.mp4"}


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        ("hf://me/nothing", NoSaveError, r"'hf://me/nothing': expected a data set on the hub, got .*: .*hf auth login"),
        ("hf://me/set@v9", NoSaveError, "'hf://me/set@v9': expected a data set"),
        ("hf://me/empty", NoSaveError, r"info\.json|the directory of a LeRobot"),
        ("hf://set", ParameterError, "'hf://set': expected 'hf://user/set'"),
        ("hf://me/set/data", ParameterError, "expected 'hf://user/set'"),
        ("hf://me/../set", ParameterError, "expected 'hf://user/set'"),
        ("hf://me/--set--", NoSaveError, "expected a data set"),
    ],
)
def test_an_address_of_nothing_is_named(hub: Hub, address: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        from_lerobot(address)


def test_a_hub_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")

    def unreachable(**_: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=unreachable))
    with pytest.raises(NoSaveError, match="got ConnectionError: no network; check the name and the network"):
        from_lerobot("hf://me/set")


def test_the_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    message = r"hf:// needs huggingface_hub: pip install 'relive\[hub\]'"
    with pytest.raises(ModuleNotFoundError, match=message):
        from_lerobot("hf://me/set")
    for command in (["audit"], ["inspect"], ["convert", "x"]):
        result = CliRunner().invoke(app, [command[0], "hf://me/set", *command[1:]])
        assert result.exit_code == 2
        assert "hf:// needs huggingface_hub" in result.output


def test_an_address_asks_the_hub_for_these_files_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def snapshot_download(**options: object) -> str:
        asked.append(options)
        return "folder"

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    assert downloaded("hf://me/set@main", ["meta/*"]) == "folder"
    assert asked == [{"repo_id": "me/set", "repo_type": "dataset", "revision": "main", "allow_patterns": ["meta/*"]}]


# -- on the command line --------------------------------------------------------------------------------------------


def test_commands_take_an_address_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["audit", "--json", "hf://me/set"])
    assert result.exit_code in (0, 1), result.output
    report = json.loads(result.stdout)
    assert (report["source"], report["rows"]) == ("'hf://me/set', LeRobot data set", 16)
    result = CliRunner().invoke(app, ["inspect", "hf://me/set"])
    assert result.exit_code == 0, result.output
    assert "4 episodes" in result.output or "episodes   4" in result.output
    result = CliRunner().invoke(app, ["convert", "hf://me/set", str(tmp_path / "save"), "--images"])
    assert result.exit_code == 0, result.output
    assert ReplayBuffer.load(tmp_path / "save").schema["obs"]["picture"].shape == (2, 2, 3)
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "save"), f"lerobot:{tmp_path / 'copy'}", "--images"])
    assert result.exit_code == 0, result.output
    assert "'observation.picture' has the dtype image" in str(from_lerobot(tmp_path / "copy").lacks)


@pytest.mark.parametrize("source", ["lerobot", "lerobot:", "torchrl", "velora:", "stable_baselines3:plain.pkl", "npz:"])
def test_data_sets_of_other_libraries_are_audited_and_inspected(source: str, tmp_path: Path) -> None:
    if source.startswith("lerobot"):
        pytest.importorskip("pyarrow")
    name, colon, file = source.partition(":")
    place = FILES.parent / name / file
    if name == "npz":
        place = tmp_path / "steps.npz"
        np.savez(place, **loops.stored(loops.walk(3)))
    text = f"{name}:{place}" if colon else str(place)
    for command, statuses in (("audit", (0, 1)), ("inspect", (0,))):
        result = CliRunner().invoke(app, [command, text, "--json"])
        assert result.exit_code in statuses, result.output
        assert json.loads(result.stdout)


def test_images_is_for_data_sets_of_lerobot_alone(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["convert", str(FILES.parent / "velora"), str(tmp_path / "save"), "--images"])
    assert result.exit_code == 2
    assert "images is for data sets of lerobot alone" in result.output


# -- Minari ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A data set of Minari on the hub, and an empty folder of Minari on this machine."""
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "theirs"))
    to_minari(Twin(2, 40).play("..", ".T", "..", "U.", "..").buffer, "toy/steps-v0")
    hub = tmp_path / "hub" / "farama-minari"
    shutil.copytree(tmp_path / "theirs" / "toy", hub / "toy")
    (hub / "toy" / "namespace_metadata.json").write_text(json.dumps({"datasets": ["toy/steps-v0"]}))
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "mine"))
    monkeypatch.delenv("MINARI_REMOTE", raising=False)
    with serving(tmp_path / "hub", tmp_path / "cache", monkeypatch) as hub:
        yield hub


def test_a_minari_data_set_is_downloaded_once(published: Hub, tmp_path: Path) -> None:
    log = from_minari("toy/steps-v0")
    assert (tmp_path / "mine" / "toy" / "steps-v0" / "data").is_dir()
    assert len(log) == 8
    del published.asked[:]
    assert len(from_minari("toy/steps-v0")) == 8
    assert not published.asked
    result = CliRunner().invoke(app, ["audit", "--json", "minari:toy/steps-v0"])
    assert result.exit_code in (0, 1), result.output
    assert json.loads(result.stdout)["rows"] == 8


@pytest.mark.parametrize("name", ["toy/others-v0", "toy/steps-v1", "nothing/at-v0", "no id"])
def test_a_minari_data_set_that_is_nowhere_is_named(published: Hub, name: str) -> None:
    with pytest.raises(NoSaveError, match=rf"from_minari\(dataset='{name}'\): expected the id .*minari list remote"):
        from_minari(name)


def test_what_minari_needs_for_downloads_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "minari.storage.remotes.huggingface", raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    message = r"Minari needs huggingface_hub for downloads: pip install 'relive\[hub\]'"
    with pytest.raises(ModuleNotFoundError, match=message):
        from_minari("toy/steps-v0")
