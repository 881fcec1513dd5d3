"""Forged saves whose checksums are right: refused, or harmless, whatever was changed in them."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from attacks import forger
from attacks.tally import record

PATIENCE = 60
"""Seconds that a case may take before it counts as hanging; most take a hundredth of one."""


def pass_on(source: Any, lines: queue.Queue[str | None]) -> None:
    """The lines of a pipe, and None at its end."""
    for line in source:
        lines.put(line)
    lines.put(None)


def attacked(folder: Path, first: int, count: int) -> list[str]:
    """What went wrong in cases ``first`` to ``first + count``, which run in other processes and may kill those."""
    wrong: list[str] = []
    number, until = first, first + count
    while number < until:
        command = [sys.executable, forger.__file__, str(folder), str(number), str(until - number)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=pass_on, args=(child.stdout, lines), daemon=True).start()
        begun = None
        try:
            while (line := lines.get(timeout=PATIENCE)) is not None:
                begun = json.loads(line)
                outcome = begun[3]
                if outcome is not None:
                    number = begun[0] + 1
                    if outcome not in ("refused", "harmless"):
                        wrong.append(f"{begun}")
        except queue.Empty:
            wrong.append(f"HANG {begun}")
        hung = child.poll() is None and number < until
        child.kill()
        _, errors = child.communicate()
        if number < until:
            if not hung:
                wrong.append(f"DIED ({child.returncode}) {begun} {errors[-500:]}")
            number = (begun[0] if begun else number) + 1
    record("forged saves", count, len(wrong))
    return wrong


def test_forged_saves_are_refused_or_harmless(tmp_path: Path) -> None:
    assert attacked(tmp_path, 0, 40) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_thousands_of_forged_saves_are_refused_or_harmless(part: int, tmp_path: Path) -> None:
    assert attacked(tmp_path, 100_000 * (1 + part), 1500) == []


def test_forged_shares_of_a_mixture_are_refused_or_harmless() -> None:
    outcomes = [forger.attack_shares(number) for number in range(40)]
    wrong = [outcome for outcome in outcomes if outcome not in ("refused", "harmless")]
    record("forged states of a mixture", 40, len(wrong))
    assert wrong == []
