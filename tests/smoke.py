"""Tries the package as a user gets it: installed, away from the checkout, with the code of README and quickstart.

It is what this Python has: cibuildwheel calls it so. ``tests/package.py`` calls it for environments of its own.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

WHERE = """
import sys
import torch
import relive
from relive import core

for module in (relive, core._core):
    assert module.__file__.startswith(sys.prefix), f"{module.__file__} is not of the environment {sys.prefix}"
print(f"relive {relive.__version__}, Python {sys.version.split()[0]}, torch {torch.__version__}")
"""

FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

SHORTER = (
    (r"^(for \w+ in range\(.*)0\):$", r"\1):"),
    (r"^for update in range\(1, 41\):$", "for update in range(19, 21):"),
    (r"^assert sum\(collector\.returns\).* > 100$", ""),
)
"""What is changed in pages that train: the loops are short, and the agent need not have learned."""


def code_of(page: Path) -> str:
    """The Python code of a page, short."""
    code = "\n".join(FENCE.findall(page.read_text(encoding="utf-8")))
    assert code, f"{page} has no code"
    for long, shorter in SHORTER:
        code = re.sub(long, shorter, code, flags=re.MULTILINE)
    return code


def try_out(python: str) -> None:
    """Run the programs by a Python that has the package installed, in an empty folder."""
    pages = {page: code_of(ROOT / page) for page in ("README.md", "docs/quickstart.md")}
    for name, program in {"the installed package": WHERE, **pages}.items():
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "program.py")
            script.write_text(program, encoding="utf-8")
            subprocess.run([python, "-I", str(script)], check=True, cwd=folder)
        print(f"passed: {name}", flush=True)


if __name__ == "__main__":
    try_out(sys.executable)
