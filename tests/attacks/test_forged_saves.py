"""Forged saves whose checksums are right: refused, or harmless, whatever was changed in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attacks import forger
from attacks.tally import record
from support.effort import often
from support.forks import in_fork

PATIENCE = 60
"""Seconds that cases may take, and one more for each, before the last of them hangs; most take a hundredth of one."""


def attacked(folder: Path, first: int, count: int) -> list[str]:
    """What went wrong in cases ``first`` to ``first + count``, which run in other processes and may kill those."""
    wrong, log = list[str](), folder / "log"
    number, until = first, first + count
    while number < until:
        log.write_text("")
        died = None
        try:
            in_fork(forger.main, folder, number, until - number, log, seconds=PATIENCE + until - number)
        except AssertionError as error:
            died = str(error)
        cases = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        wrong += [f"{case}" for case in cases if case[3] not in (None, "refused", "harmless")]
        if died is not None:
            wrong.append(f"{cases[-1:]} {died}")
        number = (cases[-1][0] if cases else number) + 1
    record("forged saves", count, len(wrong))
    return wrong


def test_forged_saves_are_refused_or_harmless(tmp_path: Path) -> None:
    assert attacked(tmp_path, 0, often(15, 40)) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_thousands_of_forged_saves_are_refused_or_harmless(part: int, tmp_path: Path) -> None:
    assert attacked(tmp_path, 100_000 * (1 + part), 1500) == []


def test_forged_shares_of_a_mixture_are_refused_or_harmless() -> None:
    outcomes = [forger.attack_shares(number) for number in range(40)]
    wrong = [outcome for outcome in outcomes if outcome not in ("refused", "harmless")]
    record("forged states of a mixture", 40, len(wrong))
    assert wrong == []
