"""What the site of the documents is made of, as far as it can be checked without Sphinx."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from test_docs import DOCUMENTS, ROOT, blocks, complaints, short, without_blocks

CONF, PICTURES = ROOT / "docs" / "conf.py", ROOT / "docs" / "assets" / "pictures.py"


def navigation() -> dict[str, list[str]]:
    """The entries of the navigation, which is read without Sphinx."""
    for node in ast.parse(CONF.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NAVIGATION":
            return ast.literal_eval(node.value)
    raise AssertionError("docs/conf.py has no NAVIGATION")


def test_the_navigation_names_pages_that_exist_each_once():
    named = [name for pages in navigation().values() for name in pages if "*" not in name]
    assert len(named) == len({*named})
    assert [name for name in named if not (ROOT / f"{name}.md").exists()] == []


def test_every_page_has_a_place_in_the_navigation():
    patterns = [name for pages in navigation().values() for name in pages]
    folders = {name.rpartition("/")[0] for name in patterns if "*" in name}
    folders.add("docs/reference/compat")  # below an index
    names = [short(page).removesuffix(".md") for page in DOCUMENTS if page.name != "README.md"]
    assert [name for name in names if name not in patterns and name.rpartition("/")[0] not in folders] == []


def test_the_pictures_are_what_the_script_draws(tmp_path: Path):
    copy = tmp_path / PICTURES.name
    copy.write_text(PICTURES.read_text(encoding="utf-8"), encoding="utf-8")
    runpy.run_path(str(copy), run_name="__main__")
    drawn = sorted(tmp_path.glob("*.svg"))
    assert len(drawn) >= 4
    for picture in drawn:
        assert picture.read_bytes() == (PICTURES.parent / picture.name).read_bytes(), picture.name
        assert "prefers-color-scheme: dark" in picture.read_text(encoding="utf-8")


def test_every_picture_says_in_words_what_it_shows():
    def check(text: str, _: Path) -> Iterable[str]:
        text = without_blocks(text)
        said = re.findall(r"!\[([^\]]*)\]\(", text) + re.findall(r"<img\b[^>]*?alt=\"([^\"]*)\"", text)
        yield from (f"too few words: {words!r}" for words in said if len(words) < 10)
        if len(said) != len(re.findall(r"!\[|<img\b", text)):
            yield "a picture without words"

    assert complaints(check) == []


def test_a_notebook_leads_to_colab_once_the_repository_has_an_address():
    body = ast.parse(CONF.read_text(encoding="utf-8")).body
    function = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == "colab")
    names: dict[str, Any] = {}
    exec(ast.unparse(function), names)  # without Sphinx
    colab = names["colab"]
    page = "docs/notebooks/audit"
    assert colab(page, "", "1.2.3") == ""
    line = colab(page, "someone/relive", "1.2.3")
    assert "https://colab.research.google.com/github/someone/relive/blob/v1.2.3/docs/notebooks/audit.ipynb" in line
    assert "%pip install git+https://github.com/someone/relive@v1.2.3" in line
    assert (ROOT / f"{page}.ipynb").exists()


def test_every_drawn_picture_follows_light_and_dark():
    drawn = sorted(PICTURES.parent.glob("*.svg"))
    assert [x.name for x in drawn if "prefers-color-scheme: dark" not in x.read_text(encoding="utf-8")] == []


def test_the_first_page_has_a_program_an_install_line_reasons_and_the_chart_before_its_first_table():
    screen, _, tables = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").partition("\n|")
    program = next(block.code for block in blocks(screen) if block.language == "python")
    assert len(program.splitlines()) <= 15
    assert max(map(len, program.splitlines())) <= 90, "a line of the program does not fit into its box"
    assert "$ pip install" in screen
    assert "](assets/benchmarks.svg)" in screen
    reasons = re.findall(r"^- \*\*It .+?(?=^- |^$)", screen, re.MULTILINE | re.DOTALL)
    assert len(reasons) == 3
    assert all("](" in reason for reason in reasons), "a reason without its proof"
    assert tables
