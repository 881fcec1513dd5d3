"""The list of mutations is up to date: ``make mutations``, which runs them, takes too long for every change."""

from __future__ import annotations

import mutations


def test_every_mutation_changes_a_line_that_is_there_and_names_tests_that_are_there() -> None:
    assert mutations.stale() == []


def test_no_two_mutations_have_one_name() -> None:
    names = [mutation.name for mutation in mutations.MUTATIONS]
    assert len(set(names)) == len(names)
