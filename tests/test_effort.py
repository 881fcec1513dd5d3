"""What a run of the quick tests leaves out when it collects is slow, and a run that takes slow ones leaves out none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support import effort, internals

SLOW = [pytest.mark.slow.mark]


def collected(params: list[Any], marks: list[list[Any]], markexpr: str = "not slow", *args: str) -> list[Any]:
    """The params of the cases that are left of a test's; it is decorated with one ``parametrize`` each."""
    calls = [SimpleNamespace(params=of, marks=[*own]) for of, own in zip(params, marks, strict=True)]
    names = [pytest.mark.parametrize(name, []).mark for name in params[0]]
    definition = SimpleNamespace(get_closest_marker=lambda name: None, iter_markers=lambda name: iter(names))
    config = SimpleNamespace(option=SimpleNamespace(markexpr=markexpr), args=["tests", *args])
    metafunc: Any = SimpleNamespace(_calls=calls, definition=definition, config=config)
    effort.leave_cases_to_ci(metafunc)
    return [(tuple(call.params.values()), bool(call.marks)) for call in internals.calls(metafunc)]


def test_slow_cases_are_made_only_where_they_are_taken_or_one_is_named() -> None:
    params, marks = [{"x": 1}, {"x": 2}, {"x": 3}], [[], SLOW, []]
    every = [((1,), False), ((2,), True), ((3,), False)]
    assert collected(params, marks) == [every[0], every[2]]
    assert collected(params, marks, "") == collected(params, marks, "slow or ci") == every
    assert collected(params, marks, "not slow", "tests/test_x.py::test_x[2]") == every
    assert collected(params[:2], [SLOW, SLOW]) == [((1,), True)]  # or pytest made one that has no parameters


@pytest.mark.parametrize("quick", [False, True])
def test_a_wide_product_has_each_value_in_make_test_and_all_combinations_elsewhere(
    quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(effort, "QUICK", quick)
    product = [{"x": x, "y": y} for x in "abc" for y in "de"]
    taken = collected(product, [[]] * 6)
    assert not any(marked for _, marked in taken)
    assert len(taken) == (3 if quick else 6)
    assert {value for case, _ in taken for value in case} == {*"abcde"}
    assert sum(not marked for _, marked in collected(product, [[]] * 6, "slow or ci")) == len(taken)
