"""Minari: what goes out comes back, with every end and final observation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relive.exchange import from_minari, minari, to_minari
from relive.steps.schema import Field
from twins import Twin

pytest.importorskip("minari")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return tmp_path


def columns(replay: Any) -> dict[str, Any]:
    table = replay.to_pandas(next_obs=True)
    return {name: np.stack(list(table[name])) for name in table.columns if name not in ("env", "index", "episode")}


@pytest.mark.parametrize("dress", ["box", "dict", "tuple"])
def test_episodes_go_out_and_come_back(dress: str) -> None:
    twin = Twin(2, 40, dress=dress).play("..", ".T", "..", "U.", "..", ".B", "..")
    to_minari(twin.buffer, "test/episodes-v0")
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
    assert log.lacks == ("the infos of its steps were not read",)


def test_the_space_of_discrete_actions_has_the_largest_that_was_taken() -> None:
    assert minari._space(Field((), torch.int64), 3).n == 4
    assert minari._space(Field((), torch.int64), 0).n == 2
