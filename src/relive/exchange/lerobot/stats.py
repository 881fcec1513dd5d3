"""Statistics of features, as LeRobot keeps them by episode and for the whole data set."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...steps.arrays import Array

__all__ = ["episode_stats", "joined_stats"]

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}

LARGEST = 512
"""A feature with more numbers in a frame than this has no statistics, such as an image stored as numbers."""

Stats = dict[str, Array]
"""min, max, mean, std and quantiles ``[*shape]`` in float64, and count ``[1]``."""


def episode_stats(frames: Array) -> Stats | None:
    """The statistics of frames ``[k, *shape]``; None for images, and if a number is not finite."""
    numbers = frames.astype(np.float64)
    if frames[0].size > LARGEST or not np.isfinite(numbers).all():
        return None
    found = {"min": numbers.min(0), "max": numbers.max(0), "mean": numbers.mean(0), "std": numbers.std(0),
             "count": np.array([len(frames)])}  # fmt: skip
    return found | dict(zip(QUANTILES, np.quantile(numbers, list(QUANTILES.values()), 0), strict=True))


def joined_stats(one: Stats | None, other: Stats | None) -> Stats | None:
    """The statistics of two sets of frames together. Quantiles are weighted means, as LeRobot's own are."""
    if one is None or other is None:
        return None
    counts = one["count"][0], other["count"][0]
    share: Any = counts[1] / sum(counts)

    def mixed(name: str) -> Array:
        return one[name] + (other[name] - one[name]) * share

    mean = mixed("mean")
    spread = [stats["std"] ** 2 + (stats["mean"] - mean) ** 2 for stats in (one, other)]
    found = {
        "min": np.minimum(one["min"], other["min"]), "max": np.maximum(one["max"], other["max"]), "mean": mean,
        "std": np.sqrt(spread[0] + (spread[1] - spread[0]) * share), "count": one["count"] + other["count"],
    }  # fmt: skip
    return found | {name: mixed(name) for name in QUANTILES}
