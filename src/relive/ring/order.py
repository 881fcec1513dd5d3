"""The order of transitions that were copied from another ring."""

from __future__ import annotations

import numpy as np

from ..steps.arrays import Ints
from .ring import Ring

__all__ = ["order_as"]


def order_as(ring: Ring, other: Ring, since: int) -> None:
    """The transitions completed from number ``since`` on, copies of the newest of ``other``, get its order."""
    of_env = [ring.live_places(env) for env in range(ring.num_envs)]
    copies, stamps = list[Ints](), list[Ints]()
    for env, places in enumerate(of_env):
        found, copied = other.stamp[other.live_places(env)], places[ring.stamp[places] >= since]
        copies.append(copied)
        stamps.append(found[found >= 0][-len(copied) :] if len(copied) else found[:0])
    order, new = np.argsort(np.concatenate(stamps)), ring.stamp.copy()
    new[np.concatenate(copies)[order]] = np.arange(ring.completed - len(order), ring.completed)
    for places in of_env:  # what is no transition comes before the next one
        stamp = new[places]
        following = np.minimum.accumulate(np.where(stamp < 0, ring.completed, stamp)[::-1])[::-1]
        new[places] = np.where(stamp < 0, -1 - following, stamp)
    ring.stamp[...] = new  # at once: an exception comes before it or after it
