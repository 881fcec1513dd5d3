"""relive on a Linux that looks like macOS or Windows: what Linux alone has is gone. See other_systems/sitecustomize.py.

Each test runs other tests in a new process, which then see that system.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.effort import CI

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="this is another system")

RUNS = {
    "darwin": (
        *("tests/files/test_disk.py", "tests/memory/test_mapped.py", "tests/processes/test_bells.py"),
        *("tests/processes/test_shared.py", "tests/processes/test_wire.py", "tests/replay/test_opening.py"),
    ),
    "win32": (
        *("tests/core/test_windows.py", "tests/memory/test_ram.py", "tests/ring", "tests/replay/test_buffer.py"),
        *("tests/rollout/test_buffer.py",),
    ),
}
"""System -> the tests that use what it lacks: shared memory, files, advice for pages; and the most used parts."""

CHECK = """
import os, sys, relive
from relive.processes import shared
assert sys.platform == {system!r} and not hasattr(os, "posix_fallocate") and not shared.IN_MEMORY
"""


def looking_like(system: str) -> dict[str, str]:
    """The environment of a process that sees the other system."""
    path = [str(ROOT / "tests" / "other_systems"), *filter(None, [os.environ.get("PYTHONPATH")])]
    named = {"USERNAME": "user"} if system == "win32" else {}
    return {**os.environ, **named, "RELIVE_SYSTEM": system, "PYTHONPATH": os.pathsep.join(path)}


@pytest.mark.slow
@pytest.mark.parametrize("system", RUNS)
def test_the_disguise_is_on(system: str) -> None:
    subprocess.run([sys.executable, "-c", CHECK.format(system=system)], env=looking_like(system), check=True)


@pytest.mark.parametrize("system", [pytest.param(system, marks=CI) for system in RUNS])
def test_tests_pass_without_what_linux_alone_has(system: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow"]
    done = subprocess.run(
        [*command, "--hypothesis-profile", "quick", *RUNS[system]],
        cwd=ROOT, env=looking_like(system), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout[-2000:]
    assert int(passed[1]) > 20
