"""Builds what is published, and tries it: the sdist, and a wheel for each Python of this machine. ``make package``.

A wheel is built from the sdist, in an environment of its own that is tried afterwards. That of Python 3.12 has the
stable ABI, so later Pythons try it, too, unless there is no 3.12.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from smoke import try_out

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")

STABLE = (3, 12)
"""The Python whose wheel later ones take."""

VERSION = "import ensurepip, sys, venv; print(*sys.version_info[:2])"


def pythons() -> dict[tuple[int, int], str]:
    """Version -> executable, of the Pythons on PATH and of pyenv that the package is for; oldest first."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^requires-python = ">=3\.(\d+)"', project, re.MULTILINE)
    assert found
    known = {int(minor) for minor in re.findall(r'"cp3(\d+)-\*"', project)}
    executables: dict[tuple[int, int], str] = {}
    for name in (sys.executable, *(f"python3.{minor}" for minor in sorted(known)), *PYENV.glob("*/bin/python3")):
        executable = shutil.which(str(name))
        if executable is None:
            continue
        answer = subprocess.run([executable, "-c", VERSION], capture_output=True, text=True, check=False)
        if answer.returncode == 0:  # else it is a name that starts nothing here, or lacks what makes environments
            major, minor = map(int, answer.stdout.split())
            if minor >= int(found[1]):
                executables.setdefault((major, minor), executable)
    return dict(sorted(executables.items()))


def try_wheel(executable: str, version: tuple[int, int], sdist: Path, torch: str) -> str:
    """Try a wheel in a new environment of that Python, built there unless one for it is in ``dist``; its name."""
    stable = sorted(DIST.glob(f"*-cp3{STABLE[1]}-abi3-*.whl")) if version > STABLE else []
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([executable, "-m", "venv", folder], check=True)
        python = str(Path(folder, "Scripts" if sys.platform == "win32" else "bin", "python"))
        pip = [python, "-m", "pip"]
        if not stable:
            before = {*DIST.glob("*.whl")}
            subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(DIST), str(sdist)], check=True)
            stable = sorted({*DIST.glob("*.whl")} - before)
        subprocess.run([*pip, "install", "--quiet", torch], check=True)
        subprocess.run([*pip, "install", "--quiet", str(stable[0])], check=True)
        subprocess.run([*pip, "check"], check=True)
        try_out(python)
    return stable[0].name


def main(torch: str) -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--sdist", "--outdir", str(DIST), str(ROOT)], check=True)
    (sdist,) = DIST.glob("*.tar.gz")
    tried = {version: try_wheel(python, version, sdist, torch) for version, python in pythons().items()}
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, DIST.iterdir())], check=True)
    for (major, minor), wheel in tried.items():
        print(f"Python {major}.{minor}: {wheel}")


if __name__ == "__main__":
    main(*sys.argv[1:])
