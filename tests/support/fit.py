"""Whether draws have the chances that they should have, tested so that a bias of one percent would show."""

from __future__ import annotations

import math

import numpy as np

from support import internals
from support.twins import Twin


def deviation(drawn: np.ndarray, chances: dict[int, float]) -> float:
    """How many standard deviations the chi-square of these draws is off what these chances give."""
    return spread(counted(drawn, chances), chances)


def counted(drawn: np.ndarray, chances: dict[int, float]) -> np.ndarray:
    """How often each index was drawn, in their order."""
    index = sorted(chances)
    counts = np.bincount(drawn, minlength=index[-1] + 1)[index]
    assert counts.sum() == len(drawn), "something else was drawn"
    return counts


def spread(counts: np.ndarray, chances: dict[int, float]) -> float:
    """How many standard deviations the chi-square of these counts is off what these chances give."""
    expected = counts.sum() * np.array([chances[i] for i in sorted(chances)])
    assert expected.min() > 20, "too few draws for a chi-square"
    df = len(expected) - 1
    return (float(((counts - expected) ** 2 / expected).sum()) - df) / math.sqrt(2 * df)


def check_fit(drawn: np.ndarray, chances: dict[int, float]) -> None:
    """These draws have these chances, and the test would see a bias of 1 %."""
    counts = counted(drawn, chances)
    assert counts.all()
    assert spread(counts, chances) < 5
    rng = np.random.default_rng(0)
    gone = rng.binomial(counts, 0.01)  # draws that came out otherwise
    newest = counts - gone
    newest[-1] += gone.sum()
    assert spread(newest, chances) > 5
    half = np.arange(len(counts)) >= len(counts) // 2
    assert spread(np.where(half, counts, counts - rng.binomial(counts, 0.01)), chances) > 5


def equal(rows: list[int]) -> dict[int, float]:
    return dict.fromkeys(rows, 1 / len(rows))


def many(twin: Twin, count: int, update: int = 1, of: int = 1, key: int = 12345) -> np.ndarray:
    """The indices of this many draws at once."""
    places, _ = twin.buffer.sampler.draw(count, key, update, of)
    return internals.ring(twin.buffer).index_of(places)
