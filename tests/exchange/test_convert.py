"""Conversion: live buffers and files of one format as another, with every end as it was."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import relive
from relive import ReplayBuffer, exchange
from relive.cli import app
from relive.exchange import from_lerobot, log_of
from support import loops
from support.twins import Twin


def columns(replay: Any, *names: str) -> list[Any]:
    table = replay.to_pandas(next_obs=True)
    return [table[name].to_numpy() for name in names or [n for n in table.columns if n not in ("env", "index")]]


@pytest.mark.parametrize("next_obs", [True, False])
def test_arrays_are_the_replay_that_was_filled_from_them(next_obs: bool) -> None:
    arrays = loops.stored(loops.walk(12))
    given = {name: x for name, x in arrays.items() if next_obs or name != "next_obs"}
    back = log_of(given).replay()
    want = ReplayBuffer.from_arrays(given)
    assert len(back) == len(want) > 0
    for one, other in zip(columns(back), columns(want), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_log_prints_what_it_has_and_lacks_and_no_array() -> None:
    zeros = np.zeros(1_000)
    log = exchange.Log("mine", {"obs": zeros, "reward": zeros}, ("what ended is not known",))
    assert repr(log) == "Log('mine': 1000 steps of obs, reward; what ended is not known)"


def test_steps_of_two_envs_stay_apart_where_one_begins_on_what_the_other_led_to() -> None:
    obs = np.arange(5.0)[:, None] + [0, 4]  # env 0 gets from 0 to 4, env 1 from 4 to 8
    never = np.zeros((4, 2), bool)
    log = log_of({"obs": obs[:-1], "next_obs": obs[1:], "action": never, "reward": obs[:-1], "terminated": never,
                  "truncated": never})  # fmt: skip
    assert log.fields["truncated"].tolist() == [False] * 3 + [True] + [False] * 4
    assert [len(episode.steps) for episode in log.replay().episodes()] == [4, 4]


def test_a_replay_of_several_envs_becomes_one_env_and_keeps_its_episodes(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    twin = Twin(3, 30, dress="dict").play("...", ".T.", "..U", "...", "B..", "...", "...")
    twin.buffer.save(tmp_path / "save")
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "save"), f"relive:{tmp_path / 'copy'}"])
    assert result.exit_code == 0, result.output
    assert f"{len(twin.buffer)} steps" in result.output
    back = ReplayBuffer.load(tmp_path / "copy")
    assert len(back) == len(twin.buffer)
    for name in ("reward", "terminated", "truncated", "step", "obs.state.2", "next_obs.state.2", "obs.state.0"):
        np.testing.assert_array_equal(*columns(back, name), *columns(twin.buffer, name), err_msg=name)
    assert [len(e.steps) for e in back.episodes()] == [len(e.steps) for e in twin.buffer.episodes()]
    assert relive.audit(back)


def test_what_cannot_be_converted_says_why(tmp_path: Path) -> None:
    for arguments, message in (
        (["nowhere", "x"], "nowhere"),
        (["parquet:x", "y"], "expected one of lerobot, minari, npz, relive"),
        ([str(tmp_path), "hdf5:y"], "'hdf5'"),
    ):
        result = CliRunner().invoke(app, ["convert", *arguments])
        assert result.exit_code == 2
        assert message in result.output


FILES = Path(__file__).parents[1] / "fixtures" / "exchange"


@pytest.mark.parametrize(
    ("source", "steps", "lacks"),
    [("velora", 12, 2), ("torchrl", 12, 0), ("stable_baselines3/plain.pkl", 12, 0), ("lerobot", 14, 4)],
)
def test_the_format_of_a_path_is_found_out(tmp_path: Path, source: str, steps: int, lacks: int) -> None:
    if source == "lerobot":
        pytest.importorskip("pyarrow")
    result = CliRunner().invoke(app, ["convert", str(FILES / source), str(tmp_path / "save")])
    assert result.exit_code == 0, result.output
    assert result.output.count("not there:") == lacks
    assert len(ReplayBuffer.load(tmp_path / "save")) == steps


def test_formats_are_named_before_the_path_or_by_options(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    arrays = loops.stored(loops.walk(3))
    np.savez(tmp_path / "steps.npz", **arrays)
    shutil.copy(tmp_path / "steps.npz", tmp_path / "steps")
    for arguments in (
        [str(tmp_path / "steps.npz"), f"lerobot:{tmp_path / 'one'}"],
        [str(tmp_path / "steps"), str(tmp_path / "two"), "--from", "npz", "--to", "lerobot"],
        [f"npz:{tmp_path / 'steps'}", str(tmp_path / "three")],
        [str(tmp_path / "two"), str(tmp_path / "four")],
    ):
        result = CliRunner().invoke(app, ["convert", *arguments])
        assert result.exit_code == 0, result.output
        assert f"{len(arrays['reward'])} steps" in result.output
    want, got = (columns(ReplayBuffer.load(tmp_path / name), "reward", "terminated") for name in ("three", "four"))
    for one, other in zip(want, got, strict=True):
        np.testing.assert_array_equal(one, other)
    result = CliRunner().invoke(app, ["convert", f"npz:{tmp_path / 'steps'}", str(tmp_path / "five"), "--to", "velora"])
    assert result.exit_code == 2
    assert "'velora' is no format of a target here" in result.output


def test_a_name_of_half_a_character_is_shown_and_ends_in_no_traceback(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    folder = shutil.copytree(FILES / "lerobot", tmp_path / "set")
    info = folder / "meta" / "info.json"
    video = r""""observation.\ud800\u001b[2J\n": {"dtype": "video", "shape": [1]}, """
    info.write_text(info.read_text().replace('"features": {', '"features": {' + video, 1))
    result = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "save")])
    assert result.exit_code == 0, result.output
    assert r"not there: 'observation.\ud800\x1b[2J\n' has the dtype video" in result.output
    assert "\x1b" not in "".join(from_lerobot(folder).lacks)
    info.write_text(info.read_text().replace("video", "oops"))
    result = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "save")])
    assert result.exit_code == 2
    assert r"feature 'observation.\ud800\x1b[2J\n'" in result.output
