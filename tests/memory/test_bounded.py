"""Bounded: what it keeps, and when it forgets."""

from __future__ import annotations

from relive.memory.copier import LIMIT, Bounded


def test_a_kept_value_is_returned_and_found_again():
    made = Bounded[int, list[int]]()
    value = made.keep(3, [1])
    assert made[3] is value
    assert made.get(4) is None


def test_a_full_dictionary_starts_anew_with_the_newest():
    made = Bounded[int, int]()
    for key in range(LIMIT):
        made.keep(key, key)
    assert len(made) == LIMIT
    made.keep(LIMIT, 7)
    assert made == {LIMIT: 7}
