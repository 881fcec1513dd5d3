"""The index of the migration pages has all of them, and pages without a drop-in have the same parts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = {path.stem: path for path in (ROOT / "docs" / "migration").glob("*.md")}
ROW = re.compile(r"^\| \[[^\]]+\]\((\w+)\.md\) \| (page|drop-in, `relive\.compat\.(\w+)`) \| .+ \|$", re.MULTILINE)
ROWS = {page: module for page, _, module in ROW.findall(PAGES.pop("index").read_text(encoding="utf-8"))}
PARTS = ["## Words", "## What gets right", "## What gets faster", "## What is different, or missing"]


def test_the_index_has_each_page_and_each_drop_in_once() -> None:
    assert ROWS.keys() == PAGES.keys()
    found = {path.stem for path in (ROOT / "src" / "relive" / "compat").iterdir() if not path.name.startswith("_")}
    assert {module for module in ROWS.values() if module} == found - {"base"}


@pytest.mark.parametrize("name", sorted(name for name, module in ROWS.items() if not module))
def test_a_page_shows_their_code_and_ours_and_has_all_parts(name: str) -> None:
    text = PAGES[name].read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line in PARTS] == PARTS
    assert "<!-- no-run: needs" in text
    assert "\n```python\nimport " in text
