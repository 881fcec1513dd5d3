"""The programs that show other libraries' mistakes: each is short, needs no relive, and is on the page as it is."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = sorted((ROOT / "benchmarks" / "faults").glob("*.py"))
each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import audit_faults  # pyright: ignore[reportMissingImports]

    return audit_faults


def imported(program: Path) -> set[str]:
    """The packages that a program imports."""
    nodes = list(ast.walk(ast.parse(program.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


@each_program
def test_a_program_is_short_and_needs_nothing_of_this_project(program: Path) -> None:
    assert len(program.read_text(encoding="utf-8").splitlines()) <= 40
    here = {path.stem for path in (ROOT / "benchmarks").iterdir()} | {path.stem for path in (ROOT / "tests").iterdir()}
    assert not imported(program) & ({"relive", ""} | here)


@each_program
def test_a_program_says_what_goes_wrong_and_can_answer_in_three_ways(program: Path) -> None:
    text = program.read_text(encoding="utf-8")
    said = ast.get_docstring(ast.parse(text))
    assert said
    assert re.fullmatch(r"[^\n]+\.", said)
    assert "sys.exit(77)" in text
    assert re.search(r"^sys\.exit\(0 if .+ else 1\)$", text, re.MULTILINE)


def test_the_page_has_a_row_of_each_program_and_no_other(faults: Any) -> None:
    rows = faults.rows_of(faults.PAGE.read_text(encoding="utf-8"))
    assert list(rows) == [program.name for program in faults.programs()]
    assert {program.name for program in PROGRAMS} == set(rows)
    for program in PROGRAMS:
        cells = [cell.strip() for cell in rows[program.name].strip("|").split(" | ")]
        title = faults.LIBRARIES[faults.library_of(program)]
        assert re.fullmatch(rf"\[{re.escape(title)}\]\(#{re.escape(title.lower())}\) \w[\w.]*", cells[0])
        assert cells[1] == faults.claim(program), "run: make audit-libraries"
        assert cells[3] in ("yes", "no")


def test_versions_on_the_page_are_those_that_are_installed_or_checked_out(faults: Any) -> None:
    folder = faults.PROGRAMS
    pinned = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("requirements*.txt"))
    versions = set(re.findall(r"^[\w-]+==([\w.]+)$", pinned, re.MULTILINE))
    commits = re.findall(r"[0-9a-f]{40}", (ROOT / "Makefile").read_text(encoding="utf-8"))
    for name, row in faults.rows_of(faults.PAGE.read_text(encoding="utf-8")).items():
        commit = re.search(r'^COMMIT = "(\w+)"$', (folder / name).read_text(encoding="utf-8"), re.MULTILINE)
        version = row.split(" | ")[0].rpartition(" ")[2]
        assert version in ({commit[1]} if commit else versions)
        assert commit is None or any(each.startswith(commit[1]) for each in commits)


FAULT = "import sys\nprint('some {}: 3 of 4')\nsys.exit({})\n"


@pytest.mark.parametrize(("status", "still"), [(0, "yes"), (1, "no")])
def test_a_row_says_whether_the_mistake_is_still_made(faults: Any, tmp_path: Path, status: int, still: str) -> None:
    program = tmp_path / "skrl_some.py"
    program.write_text(f'"""It goes wrong."""\n{FAULT.format("1.2", status)}', encoding="utf-8")
    wanted = f"| [skrl](#skrl) 1.2 | [It goes wrong](../benchmarks/faults/skrl_some.py) | 3 of 4 | {still} |"
    assert faults.run(program, {}) == wanted


def test_a_program_whose_library_is_missing_keeps_its_row_and_one_that_fails_is_no_answer(
    faults: Any, tmp_path: Path
) -> None:
    program = tmp_path / "skrl_some.py"
    program.write_text("import sys\nsys.exit(77)\n", encoding="utf-8")
    assert faults.run(program, {"skrl_some.py": "| as before |"}) == "| as before |"
    program.write_text("raise ValueError('a new release')\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="a new release"):  # its status is 1, but it has not answered
        faults.run(program, {})
