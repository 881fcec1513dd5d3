"""A part that is given first, where a number is expected: the error says by which name to pass it."""

from collections.abc import Callable
from typing import Any

import pytest

from relive import FrameStack, NStep, Prioritized, Recent, ReturnsToGo, Sequence, errors


@pytest.mark.parametrize(
    ("make", "part", "name"),
    [
        (ReturnsToGo, Sequence(8), r"window=, as in ReturnsToGo\(window=Sequence\(8\)\)"),
        (FrameStack, NStep(3), r"window=, as in FrameStack\(window=NStep\(3\)\)"),
        (Recent, Prioritized(), r"inner=, as in Recent\(inner=Prioritized\(\)\)"),
    ],
)
def test_a_view_or_a_sampler_given_first_is_told_its_name(make: Callable[..., Any], part: Any, name: str):
    with pytest.raises(errors.ParameterError, match=f"; the other (view|sampler) is {name}"):
        make(part)
