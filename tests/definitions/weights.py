"""How often :mod:`relive.core` draws each window of a ring: by the list of the windows that can be drawn."""

from __future__ import annotations

from typing import Any

from relive.core.words import LENGTH, STRIDE, WEIGH

from . import draws
from .places import row_at

WINDOWS, STEPS, EPISODES = range(3)
"""What COUNTERS say is drawn equally often."""


def episode_of(place: int, ring: Any) -> tuple[int, int]:
    """The env of a row, and the number of the first step of its episode."""
    env, number = row_at(place, ring)
    return env, number - int(ring.step[place])


def steps_of(place: int, ring: Any) -> int:
    """The steps of the window that ends at a place: windows start at steps 0, stride, ... of an episode."""
    length, stride, at = int(ring.counters[LENGTH]), int(ring.counters[STRIDE]), int(ring.step[place])
    start = 0 if at < length else -(-(at + 1 - length) // stride) * stride
    return at + 1 - start


def weights(ring: Any) -> dict[int, float]:
    """The weight of each window, at the place where it ends."""
    anchors = draws.anchors(ring)
    if ring.counters[WEIGH] == STEPS:
        return {place: float(steps_of(place, ring)) for place in anchors}
    if ring.counters[WEIGH] == WINDOWS:
        return dict.fromkeys(anchors, 1.0)
    newest = {episode_of(place, ring): place for place in anchors}  # the last one of each episode stays
    return dict.fromkeys(newest.values(), 1.0)


def window_of_episode(newest: int, oldest: int, random: float, ring: Any) -> int:
    """A window that ends at row ``oldest`` of the env or later, of the episode whose newest ends at a place."""
    episode = episode_of(newest, ring)
    windows = [
        place
        for place in draws.anchors(ring)
        if episode_of(place, ring) == episode and row_at(place, ring)[1] >= oldest
    ]
    return windows[::-1][int(random * len(windows))]
