"""Runs the programs of ``benchmarks/faults`` and writes what they find into docs/audit-of-libraries.md.

python benchmarks/audit_faults.py          in an environment that has the libraries; `make audit-libraries` makes it

Each program asks one library for one mistake. Its docstring says which, it prints one line ``LIBRARY VERSION: what was
found``, and its exit status is 0 if the mistake is still made, 1 if it is not, and 77 if the library, or the part in
question, is not there. Such a program's line on the page stays. If the page did not say what was found, the difference
is printed, and the exit status is 1; the page is then right.
"""

import ast
import datetime
import difflib
import importlib.metadata
import platform
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "faults"
PAGE = HERE.parent / "docs" / "audit-of-libraries.md"
BEGIN, END = "<!-- faults -->", "<!-- /faults -->"
HEAD = ("| library | what goes wrong | found | still so |", "|---|---|---|---|")
STILL, MENDED, ABSENT = 0, 1, 77

LIBRARIES = {
    "stable_baselines3": "Stable-Baselines3",
    "tianshou": "Tianshou",
    "torchrl": "TorchRL",
    "cpprb": "cpprb",
    "agilerl": "AgileRL",
    "rsl_rl": "rsl_rl",
    "pytorchrl": "PyTorchRL",
    "embodichain": "EmbodiChain",
    "velora": "Velora",
    "skrl": "skrl",
    "lerobot": "LeRobot",
    "trl": "TRL",
    "gymnasium": "Gymnasium",
    "cleanrl": "CleanRL",
    "fasttd3": "FastTD3",
}
"""How the names of programs begin -> the heading on the page."""


def library_of(program: Path) -> str:
    """The key of ``LIBRARIES`` that a program's name begins with."""
    (found,) = (key for key in LIBRARIES if program.name.startswith(f"{key}_"))
    return found


def programs() -> list[Path]:
    """All programs, in the order of the page."""
    order = list(LIBRARIES)
    return sorted(PROGRAMS.glob("*.py"), key=lambda path: (order.index(library_of(path)), path.name))


def claim(program: Path) -> str:
    """What a program says goes wrong: its docstring, and a link to it."""
    said = ast.get_docstring(ast.parse(program.read_text(encoding="utf-8"))) or ""
    return f"[{said.rstrip('.')}](../benchmarks/faults/{program.name})".replace("\n", " ")


def row(program: Path, line: str, status: int) -> str:
    """The line of the table for what a program printed."""
    name, _, found = line.partition(": ")
    title = LIBRARIES[library_of(program)]
    still = "yes" if status == STILL else "no"
    return f"| [{title}](#{title.lower()}) {name.rpartition(' ')[2]} | {claim(program)} | {found} | {still} |"


def run(program: Path, before: dict[str, str]) -> str | None:
    """A program's line of the table: the new one, or the one before where its library is not there."""
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=300, check=False)
    lines = done.stdout.splitlines()
    if done.returncode == ABSENT:
        print(f"  {program.name}: passed over, its library is not there")
        return before.get(program.name)
    if done.returncode not in (STILL, MENDED) or not re.match(r"\S+ \S+: .", lines[-1] if lines else ""):
        sys.exit(f"{program.name} failed with status {done.returncode}:\n{done.stderr}")
    print(f"  {program.name}: {lines[-1]}{'' if done.returncode == STILL else ' (MENDED)'}")
    return row(program, lines[-1], done.returncode)


def rows_of(page: str) -> dict[str, str]:
    """Program -> its line in the table of a page."""
    lines = page.partition(BEGIN)[2].partition(END)[0].splitlines()
    found = {line: re.search(r"faults/(\w+\.py)\)", line) for line in lines if line.startswith("| [")}
    return {match[1]: line for line, match in found.items() if match}


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    before = rows_of(page)
    found = {program.name: run(program, before) for program in programs()}
    after = {name: line for name, line in found.items() if line}
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy"))
    when = f"Last run on {datetime.date.today()}, by Python {platform.python_version()}, {versions}."
    head, _, rest = page.partition(BEGIN)
    table = "\n".join([*HEAD, *after.values()])
    PAGE.write_text(f"{head}{BEGIN}\n\n{table}\n\n{when}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    changed = list(difflib.unified_diff(list(before.values()), list(after.values()), "page", "found", lineterm="", n=0))
    if changed:
        sys.exit("\n".join(["the page said something else, and now has what was found:", *changed]))


if __name__ == "__main__":
    main()
