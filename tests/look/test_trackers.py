"""The three trackers of the recipe, each called for real and read back: what the page logs is what they kept.

They are no requirement of the tests: `pip install 'relive[trackers]'`, then `pytest tests/look/test_trackers.py`.
Nothing here needs a network.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test_docs import ROOT, program

PAGE = ROOT / "docs" / "recipes" / "trackers.md"
SHOW = "\nimport json\nprint(json.dumps([folder, logged]))\n"

Logged = list[tuple[int, dict[str, float]]]

pytestmark = pytest.mark.slow


def needs(module: str) -> pytest.MarkDecorator:
    """Skip a test, and the page before it, where the tracker is not installed."""
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Logged]:
    """What the page's program wrote into its folder, and the steps and figures that it logged."""
    home = tmp_path_factory.mktemp("trackers")
    script = home / "page.py"
    script.write_text(program(PAGE.read_text(encoding="utf-8"), PAGE.name) + SHOW, encoding="utf-8")
    quiet = {"HOME": str(home), "TMPDIR": str(home), "WANDB_SILENT": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    env = {**os.environ, **quiet, "PYTHONPATH": str(ROOT / "src")}
    said = subprocess.run([sys.executable, script], cwd=home, env=env, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    folder, logged = json.loads(said.stdout.splitlines()[-1])
    return Path(folder), logged


def assert_kept(name: str, kept: list[tuple[int, float]], logged: Logged) -> None:
    """One figure, at the steps and with the values that were logged, to float32."""
    expected = [(step, figures[name]) for step, figures in logged if name in figures]
    np.testing.assert_allclose(kept, expected, rtol=1e-6, err_msg=name)


@needs("tensorboard")
def test_tensorboard_keeps_every_figure_at_its_step(played: tuple[Path, Logged]) -> None:
    accumulator = import_module("tensorboard.backend.event_processing.event_accumulator")
    folder, logged = played
    found = accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    for name in logged[-1][1]:
        assert_kept(name, [(event.step, event.value) for event in found.Scalars(name)], logged)


@needs("mlflow")
def test_mlflow_keeps_every_figure_at_its_step(played: tuple[Path, Logged]) -> None:
    folder, logged = played
    client = import_module("mlflow").MlflowClient(f"sqlite:///{folder}/mlflow.db")
    run = client.search_runs(["0"])[0].info.run_id
    for name in logged[-1][1]:
        history = client.get_metric_history(run, name)
        assert_kept(name, [(metric.step, metric.value) for metric in history], logged)


@needs("wandb")
def test_wandb_keeps_every_figure_at_its_step_for_a_later_sync(played: tuple[Path, Logged]) -> None:
    proto = import_module("wandb.proto.wandb_internal_pb2")
    folder, logged = played
    file = next((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    found: list[dict[str, Any]] = []
    for data in records(file.read_bytes()):
        record = proto.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            found.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item})
    for name in logged[-1][1]:
        assert_kept(name, [(row["_step"], row[name]) for row in found if name in row], logged)


def records(data: bytes, begin: int = 7, block: int = 32_768) -> Iterator[bytes]:
    """The records of a W&B file: LevelDB's log format behind seven bytes. A record may lie in several pieces."""
    record = b""
    while begin < len(data):
        if block - begin % block < 7:  # no piece begins so close to a block's end
            begin += block - begin % block
            continue
        _, size, kind = struct.unpack_from("<IHB", data, begin)
        record += data[begin + 7 : begin + 7 + size]
        begin += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""
