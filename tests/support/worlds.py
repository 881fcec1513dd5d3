"""Worlds to draw from, and what draws from them should be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from relive import (
    Prioritized,
    Recent,
)
from support import oracle
from support.fit import deviation
from support.twins import Twin

EPS = 1e-6
NAN, INF = float("nan"), float("inf")


def drawn_from(twin: Twin, k: int, of: int) -> list[oracle.Row] | None:
    """The newest transitions that update k may draw from, if the sampler emphasises them."""
    sampler, anchors = twin.buffer.sampler, twin.anchors()
    if not isinstance(sampler, Recent):
        return None
    return anchors[-oracle.recent_count(len(anchors), sampler.eta, sampler.c_min, k, of) :]


def check_weights(sampler: Prioritized, batch: Any, known: oracle.Priorities, among: list[int] | None = None) -> None:
    """probability and weight are exactly those of the oracle's priorities."""
    chances = known.probabilities(sampler.alpha, sampler.eps, among)
    index = batch["index"].tolist()
    assert batch["probability"].dtype is torch.float64
    assert batch["weight"].dtype is torch.float32
    assert batch["probability"].tolist() == pytest.approx([chances[i] for i in index], rel=1e-9)
    smallest = min(chances.values() if sampler.normalize == "buffer" else (chances[i] for i in index))
    assert isinstance(sampler.beta, float)
    want = [(chances[i] / smallest) ** -sampler.beta for i in index]
    assert batch["weight"].tolist() == pytest.approx(want, rel=1e-5)


# Distributions. A test of n draws is a chi-square over the anchors, as a number of standard deviations; it fails from
# 5 on, which chance exceeds in less than one seed of a thousand even with few anchors, and the seeds are fixed. Of
# two biases each test must show that it sees them: 1 % of the draws going to the newest anchor, which adds about
# n / 10,000 times the number of anchors to the chi-square, and one half of them being 1 % likelier than the other.


def uneven(**options: Any) -> Twin:
    """Three envs whose episodes have 1, 4 and 29 steps: boundary rows take half of the first one's ring."""
    twin = Twin(3, 12, **options)
    for t in range(31):
        twin.add("".join("TUB"[e] if (t + 1) % length == 0 else "." for e, length in enumerate((1, 4, 29))))
    return twin


def asynchronous(**options: Any) -> Twin:
    """Three envs of which one steps always, one sometimes, and one stopped long ago."""
    twin = Twin(3, 14, **options)
    for _ in range(9):
        twin.add("...")
    for t in range(51):
        envs = [0] if t % 4 else [0, 1]
        twin.add("".join("U" if (t + env) % 9 == 8 else "." for env in envs), envs)
    return twin


def rare(**options: Any) -> Twin:
    """Almost all rows are of episodes that were interrupted after their first step."""
    twin = Twin(2, 400, **options)
    for t in range(400):
        twin.add("T." if t % 90 == 40 else "..")
        if t % 57:
            twin.interrupt()
    return twin


WORLDS: dict[str, Callable[..., Twin]] = {
    "not yet full": lambda **options: Twin(2, 30, **options).play(*["..", "..", ".T", "..", "U.", "..", "..", ".."]),
    "of uneven episodes": uneven,
    "asynchronous": asynchronous,
    "almost without anchors": rare,
}


def check_fit_of_one_percent(drawn: np.ndarray, chances: dict[int, float]) -> None:
    """Like check_fit, for fewer draws: only the bias of 1 % towards the newest need be seen."""
    assert deviation(drawn, chances) < 5
    biased = drawn.copy()
    biased[np.random.default_rng(0).random(len(drawn)) < 0.01] = max(chances)
    assert deviation(biased, chances) > 5
