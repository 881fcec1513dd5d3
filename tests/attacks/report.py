"""Run all attacks, the slow ones too, and put what came of them into docs/security.md.

python tests/attacks/report.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import tally

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "security.md"
SUITES = (
    "tests/attacks",
    "tests/files",
    "tests/replay/test_saving.py",
    "tests/test_processes.py",
    "tests/test_copies.py",
)
MARKS = "<!-- attacks: written by tests/attacks/report.py -->", "<!-- end of attacks -->"


def put(page: str, table: str) -> str:
    """The page with this table in place of the former."""
    begin, end = MARKS
    return re.sub(f"{re.escape(begin)}.*{re.escape(end)}", lambda _: f"{begin}\n{table}\n{end}", page, flags=re.DOTALL)


def main() -> int:
    """What pytest says; the page is left alone if it says anything."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "tally"
        place.touch()
        suites = [suite for suite in SUITES if (ROOT / suite).exists()]
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--hypothesis-profile", "ci", *suites]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, tally.PLACE: str(place)}, check=False)
        if not done.returncode:
            page = PAGE.read_text(encoding="utf-8")
            PAGE.write_text(put(page, tally.table(tally.totals(place))), encoding="utf-8")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
