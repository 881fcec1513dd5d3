"""The blocks of the migration page that need Stable-Baselines3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from test_docs import blocks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migration" / "stable_baselines3.md"


def test_every_block_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # one block saves a replay
    names: dict[str, Any] = {}
    code = [block.code for block in blocks(PAGE.read_text(encoding="utf-8")) if block.language == "python"]
    assert len(code) >= 4
    for block in code:
        exec(block, names)
