"""The notebooks run from top to bottom, and are stored with what they show."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import notebooks
from notebooks import NOTEBOOKS, CellError, code_cells, read, run
from support.effort import in_ci
from support.forks import in_fork
from test_docs import broken, links

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
EACH = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def kinds(outputs: list[dict[str, Any]]) -> list[Any]:
    """What kinds of things a cell showed: texts and numbers may differ from machine to machine."""
    return [(output["output_type"], "image/png" in output.get("data", ())) for output in outputs]


@pytest.mark.parametrize("path", [in_ci(path) for path in PATHS], ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_is_stored_in_it(path: Path, tmp_path: Path) -> None:
    shown = in_fork(run_there, path, tmp_path, seconds=300.0, name=path.name)
    for number, (cell, outputs) in enumerate(zip(code_cells(read(path)), shown, strict=True), start=1):
        assert kinds(outputs) == kinds(cell["outputs"]), f"code cell {number} shows something else: make notebooks"


def run_there(path: Path, folder: Path) -> list[list[dict[str, Any]]]:
    os.chdir(folder)
    return run(path)


@EACH
def test_a_notebook_is_short_and_its_outputs_are_small(path: Path) -> None:
    notebook = read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert 10 <= len(notebook["cells"]) <= 15
    assert "".join(notebook["cells"][0]["source"]).startswith("# ")
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)], "run: make notebooks"
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert all(output.get("name") != "stderr" for output in outputs), "a warning is stored"
    assert all(sum(picture for _, picture in kinds(cell["outputs"])) <= 1 for cell in cells)
    assert path.stat().st_size < 60_000


@EACH
def test_a_notebook_leads_to_pages_that_exist(path: Path) -> None:
    notebook = read(path)
    text = "\n\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    found = links(text)
    assert any(link.endswith(".md") for link in found), "it leads to no page"
    assert [complaint for complaint in (broken(link, path) for link in found) if complaint] == []


def test_the_index_leads_to_every_notebook() -> None:
    index = (NOTEBOOKS.parent / "index.md").read_text(encoding="utf-8")
    assert [path.stem for path in PATHS if f"(notebooks/{path.name})" not in index] == []


def stored(folder: Path, *sources: str) -> Path:
    """A notebook of code cells, not run yet."""
    cells = [{"cell_type": "code", "source": [source], "outputs": []} for source in sources]
    path = folder / "one.ipynb"
    path.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    return path


def test_a_cell_shows_what_it_prints_its_last_value_and_its_figures(tmp_path: Path) -> None:
    drawn = "import matplotlib.pyplot as plt\nfigure = plt.figure()\nNone"
    asked = "class Shown:\n    def _repr_html_(self):\n        return '<b>x</b>'\nShown()"
    first, second, third, last = run(stored(tmp_path, "x = 1\nprint(x)", "x + 1", drawn, asked))
    assert first == [{"name": "stdout", "output_type": "stream", "text": ["1\n"]}]
    assert [output["data"]["text/plain"] for output in second] == [["2"]]
    assert kinds(third) == [("display_data", True)]
    assert last[0]["data"]["text/html"] == ["<b>x</b>"]


def test_a_cell_that_raises_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(CellError, match=r"^one.ipynb, code cell 2, line 2: AssertionError: two$"):
        run(stored(tmp_path, "x = 1", "x = 2\nassert x == 1, 'two'"))


def test_what_cells_show_is_written_as_jupyter_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored(tmp_path, "print('γ')")
    monkeypatch.setattr(notebooks, "NOTEBOOKS", tmp_path)
    notebooks.main(["another"])
    assert read(path)["cells"][0]["outputs"] == []
    notebooks.main(["one"])
    assert read(path)["cells"][0]["outputs"][0]["text"] == ["γ\n"]
    assert path.read_text(encoding="utf-8").startswith('{\n "cells": [\n  {\n   "cell_type"')
