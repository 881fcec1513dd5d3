"""Whether draws have the chances that they should have, tested so that a bias of one percent would show."""

from __future__ import annotations

import math

import numpy as np

from twins import Twin


def deviation(drawn: np.ndarray, chances: dict[int, float]) -> float:
    """How many standard deviations the chi-square of these draws is off what these chances give."""
    index = np.array(sorted(chances))
    counts = np.bincount(np.searchsorted(index, drawn), minlength=len(index))
    expected = len(drawn) * np.array([chances[i] for i in index.tolist()])
    assert expected.min() > 20, "too few draws for a chi-square"
    df = len(index) - 1
    return (float(((counts - expected) ** 2 / expected).sum()) - df) / math.sqrt(2 * df)


def check_fit(drawn: np.ndarray, chances: dict[int, float]) -> None:
    """These draws have these chances, and the test would see a bias of 1 %."""
    assert set(np.unique(drawn).tolist()) == set(chances)
    assert deviation(drawn, chances) < 5
    rng = np.random.default_rng(0)
    newest = drawn.copy()
    newest[rng.random(len(drawn)) < 0.01] = max(chances)
    assert deviation(newest, chances) > 5
    order = np.array(sorted(chances))
    half = drawn >= order[len(order) // 2]
    assert deviation(drawn[half | (rng.random(len(drawn)) >= 0.01)], chances) > 5


def equal(rows: list[int]) -> dict[int, float]:
    return dict.fromkeys(rows, 1 / len(rows))


def many(twin: Twin, count: int, update: int = 1, of: int = 1, key: int = 12345) -> np.ndarray:
    """The indices of this many draws at once."""
    places, _ = twin.buffer.sampler.draw(count, key, update, of)
    return twin.buffer._ring.index_of(places)
