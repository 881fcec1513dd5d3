"""With ``drop_incomplete``, only episodes that are there from the first step to an end are written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from relive import ReplayBuffer
from relive.cli import app
from relive.errors import FieldError, ParameterError
from relive.exchange import Log, from_lerobot, from_minari, log_of, to_lerobot, to_minari
from relive.exchange.convert import WRITERS, convert
from support.twins import Twin

pytest.importorskip("minari")
pytest.importorskip("pyarrow")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of Minari, about what it is not told


def played() -> ReplayBuffer:
    """Two envs whose rings have wrapped: episodes without their first steps, an interrupted one, and running ones."""
    plays = ("..", ".T", "..", "U.", "..", ".U", "..", "T.", "..", "..", "|", "..", ".T", "T.", "..", ".U", "..", "..")
    return Twin(2, 14).play(*plays).buffer


def rewards(replay: ReplayBuffer, whole: bool) -> list[list[float]]:
    """Those of each episode."""
    return [episode.steps["reward"].tolist() for episode in replay.episodes() if episode.whole or not whole]


def of(log: Log) -> list[list[float]]:
    """The rewards of a log, cut where an episode ended."""
    ends = np.flatnonzero(log.fields["terminated"] | log.fields["truncated"])
    return [part.tolist() for part in np.split(log.fields["reward"], ends + 1) if len(part)]


def through_minari(replay: ReplayBuffer, folder: Path, **options: Any) -> Log:
    to_minari(replay, "some/steps-v0", **options)
    return from_minari("some/steps-v0")


def through_lerobot(replay: ReplayBuffer, folder: Path, **options: Any) -> Log:
    return from_lerobot(to_lerobot(replay, folder / "set", **options))


def converted(target: str) -> Callable[..., Log]:
    def through(replay: ReplayBuffer, folder: Path, **options: Any) -> Log:
        replay.save(folder / "save")
        where = "other/steps-v0" if target == "minari" else str(folder / target)
        convert(str(folder / "save"), where, target_format=target, **options)
        return {"minari": from_minari, "lerobot": from_lerobot, "relive": log_of}[target](where)

    return through


EXPORTERS: dict[str, Callable[..., Log]] = {
    "to_minari": through_minari, "to_lerobot": through_lerobot,
    **{f"convert to {name}": converted(name) for name in WRITERS},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


@pytest.mark.parametrize("name", EXPORTERS)
def test_episodes_that_run_were_interrupted_or_lost_their_first_steps_are_left_out(name: str, tmp_path: Path) -> None:
    replay = played()
    kinds = {(episode.begins, episode.ended) for episode in replay.episodes()}
    assert kinds == {(True, True), (False, True), (True, False)}
    log = EXPORTERS[name](replay, tmp_path, drop_incomplete=True)
    assert of(log) == rewards(replay, whole=True)
    back = log.replay()
    back.check()
    assert all(episode.whole for episode in back.episodes())


@pytest.mark.parametrize("name", EXPORTERS)
def test_all_steps_are_written_unless_it_is_said(name: str, tmp_path: Path) -> None:
    replay = played()
    log = EXPORTERS[name](replay, tmp_path)
    assert sorted(log.fields["reward"].tolist()) == sorted(sum(rewards(replay, whole=False), []))


@pytest.mark.parametrize("name", EXPORTERS)
def test_where_no_episode_is_whole_nothing_is_written(name: str, tmp_path: Path) -> None:
    replay = Twin(1, 12).play(".", ".", "|", ".", ".").buffer
    with pytest.raises((ParameterError, FieldError), match="no episode is there from its first step to an end"):
        EXPORTERS[name](replay, tmp_path, drop_incomplete=True)
    assert {path.name for path in tmp_path.iterdir()} <= {"save", "minari"}


def test_a_ring_of_another_library_says_which_of_its_episodes_are_whole() -> None:
    """It keeps no numbers of steps: the first episode of a full ring has lost some."""
    ends = np.array([False, True, False, False, True, False])
    arrays: dict[str, Any] = {
        "obs": np.arange(6.0), "action": np.zeros(6), "reward": np.arange(6.0), "terminated": ends,
        "truncated": np.zeros(6, bool),
    }  # fmt: skip
    log = log_of(arrays)
    assert log.whole is not None
    assert log.whole.tolist() == [True] * 5 + [False]
    assert log.without_incomplete().fields["reward"].tolist() == [0, 1, 2, 3, 4]
    assert log.without_incomplete().without_incomplete().whole is None
    log = log_of(arrays | {"index": np.arange(6)})
    assert log.without_incomplete().fields["reward"].tolist() == [2, 3, 4]


def test_the_command_line_has_it_too(tmp_path: Path) -> None:
    replay = played()
    replay.save(tmp_path / "save")
    words = ["convert", str(tmp_path / "save"), str(tmp_path / "whole"), "--drop-incomplete"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert f"{sum(map(len, rewards(replay, whole=True)))} steps of" in result.output
    assert rewards(ReplayBuffer.load(tmp_path / "whole"), whole=False) == rewards(replay, whole=True)
