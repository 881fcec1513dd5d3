"""Entries of a save's JSON: each has its type and range, or the save is refused by the entry's name."""

from __future__ import annotations

from typing import Any

import pytest

from relive.errors import FileFormatError
from relive.files.disk import MOST, integers, whole


def test_counts_up_to_the_largest_are_taken() -> None:
    assert whole({"n": MOST}, "n") == MOST
    assert integers({"n": [[0, MOST]]}, "n", 1, 2).tolist() == [[0, MOST]]


@pytest.mark.parametrize("wrong", [[[0, MOST + 1]], [[0, -1]], [[0, 2**63]], [[0, 2**70]], [[0, 1.0]], [[True, False]],
                                   [0, 1], [[0, 1], [2, 3]], [], [[0], [1, 2]], [["0", "1"]], None, 3])  # fmt: skip
def test_lists_with_other_members_or_of_another_shape_are_refused(wrong: Any) -> None:
    with pytest.raises((FileFormatError, ValueError)):
        integers({"n": wrong}, "n", 1, 2)


@pytest.mark.parametrize("wrong", [MOST + 1, -1, 1.0, True, "1", None])
def test_other_values_than_counts_are_refused_by_name(wrong: Any) -> None:
    with pytest.raises(FileFormatError, match="entry 'n' is"):
        whole({"n": wrong}, "n")
