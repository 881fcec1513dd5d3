"""What n-step windows, gathered rows and stacks of frames are, in plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np

from definitions.places import place_after, place_of, row_at
from relive.core.words import HEAD

KINDS: dict[str, Any] = {
    "index": np.int64,
    "next_index": np.int64,
    "discount": np.float32,
    "steps": np.int32,
    "reward": np.float32,
    "terminated": np.uint8,
    "truncated": np.uint8,
}
"""What is known of a window, by the names of :class:`relive.core.WindowLayout`."""


def put(row: Any, byte: int, value: Any, dtype: Any) -> None:
    """Write a number into the bytes of a row."""
    row[byte : byte + np.dtype(dtype).itemsize] = np.array([value]).astype(dtype).view(np.uint8)


def get(row: Any, byte: int, dtype: Any) -> Any:
    """The number at a byte of a row."""
    return row[byte : byte + np.dtype(dtype).itemsize].view(dtype)[0]


def summed(rewards: list[Any], gamma: float) -> tuple[float, float]:
    """The discounted sum of a window's rewards, float32, and γᵏ, both in float64 and from the first reward on."""
    value, discount = 0.0, 1.0
    for reward in rewards:
        value, discount = value + discount * float(reward), discount * gamma
    return value, discount


def window_at(ring: Any, place: int, steps: int, own: bool) -> list[int]:
    """The places of the steps of the window that starts at a place."""
    e, _ = row_at(place, ring)
    newest = place_of(int(ring.state[e, HEAD]) - 1, e, ring.rows)
    window = [place]
    while True:
        here, after = window[-1], place_after(window[-1], ring.rows)
        ended = ring.terminated[here] or ring.truncated[here]
        if ended or len(window) == steps or here == newest or ring.stamp[after] < 0:
            return window
        if own and ring.step[after] == 0:
            return window
        window.append(after)


def read_windows(ring: Any, layout: Any, places: Any, steps: int, gamma: float, out: Any, last: Any) -> int:
    """The n-step windows that start at anchors, rₜ + γrₜ₊₁ + ... with up to ``steps`` rewards, as packed rows.

    A window stops at a done, at the newest row, and where the next row is not complete or does not go on from it.
    ``last`` is the place of the row that holds the observation it bootstraps from. If rows have next observations of
    their own, that is the row of the last transition; it is copied unless it is the anchor, whose bytes are there.

    Returns the first of ``places`` that is not a row's, or -1.
    """
    envs, own = len(ring.state), layout.next_bytes < 0
    for i, place in enumerate(places.tolist()):
        if not 0 <= place < len(ring.memory):
            return i
        window = window_at(ring, place, steps, own)
        end = window[-1]
        last[i] = end if own else place_after(end, ring.rows)
        value, discount = summed([ring.reward[step] for step in window], gamma)
        (e, number), (_, following) = row_at(place, ring), row_at(int(last[i]), ring)
        row, known = out[i], {
            "index": number * envs + e,
            "next_index": following * envs + e,
            "discount": 0.0 if ring.terminated[end] else discount,
            "steps": len(window),
            "reward": value,
            "terminated": ring.terminated[end],
            "truncated": ring.truncated[end],
        }  # fmt: skip
        row[: layout.step_bytes] = ring.memory[place, : layout.step_bytes]
        for name, dtype in KINDS.items():
            put(row, getattr(layout, name), known[name], dtype)
        at = layout.next_at
        if not own:
            row[at : at + layout.next_bytes] = ring.memory[last[i], : layout.next_bytes]
        elif end != place:
            source = ring.memory[end, layout.own_at : layout.own_at + layout.own_bytes]
            row[at : at + layout.own_bytes] = source
    return -1


def gather_rows(source: Any, places: Any, out: Any, start: int, nbytes: int) -> int:
    """The first ``nbytes`` bytes of rows of ``source`` (uint8 ``[R, W]``) to successive rows of ``out``, at ``start``.

    A negative place gives zeros. Returns the first place beyond the last row, or -1.
    """
    for i, place in enumerate(places.tolist()):
        if place >= len(source):
            return i
        out[i, start : start + nbytes] = source[place, :nbytes] if place >= 0 else 0
    return -1


def stack_places(ring: Any, places: Any, depth: int, repeat: bool, out: Any) -> int:
    """Places ``[B, depth]`` of the frames that end at ``places``, oldest first, within their episode.

    Frames from before the episode are its first one if ``repeat``, else -1. Returns the first of ``places`` that is
    not a row's, or -1.
    """
    for i, place in enumerate(places.tolist()):
        if not 0 <= place < len(ring.step):
            return i
        begin = place // ring.rows * ring.rows
        for j in range(depth):
            back = depth - 1 - j
            reach = min(back, int(ring.step[place]))
            out[i, j] = begin + (place - begin - reach) % ring.rows if reach == back or repeat else -1
    return -1
