"""What priorities are, in plain Python: (error + eps)^alpha of the rows that can be drawn, as weights of a sum tree."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from definitions import draws, powers, tree
from definitions.places import oldest, place_of
from relive.core.words import (
    ALL_RATED,
    ALPHA,
    EPS,
    HEAD,
    LARGEST,
    LARGEST_ERROR,
    RATED,
    RATED_LARGEST,
    RATED_START,
    UNUSUAL,
)


class Memory(NamedTuple):
    """The priorities of a ring's rows."""

    nodes: Any
    """float64, the sum tree, with one leaf for each row."""
    offsets: list[int]
    minima: Any
    errors: Any
    """float32 ``[N * R]``, the error of each row; it means nothing where the leaf is 0."""
    facts: Any
    """float64 ``[FACTS]``."""
    ring: Any
    undo: Any
    """float64 ``[2 + 2 K]`` of priorities in files, else empty: the errors before a change, of K rows at most."""


def power(error: Any, alpha: float, eps: float) -> Any:
    """(error + eps)^alpha; infinite where that is too large for float64."""
    return np.float64(powers.power(float(np.float64(error) + eps), alpha))


def draw_weighted(
    memory: Memory, stream: int, stratified: bool, beta: float, lowest: float, tops: Any, until: Any, count: int
) -> tuple[list[int], list[Any], list[Any]] | None:
    """Rows drawn by weight among the leaves of a cover, with their probabilities and importance weights.

    The weights are (N P)^-beta over the largest one: (P / Pmin)^-beta for every N. ``lowest`` is the priority that
    gives Pmin; 0 is the smallest priority of the batch. None if no leaf has weight.
    """
    total = float(until[-1]) if len(until) else 0.0
    if not total > 0.0:
        return None
    wanted = np.array(draws.masses(stream, stratified, total, count), np.float64)
    places, _ = tree.find(memory.nodes, memory.offsets, tops, until.tolist(), wanted)
    shares = [np.float64(memory.nodes[place]) / total for place in places]
    least = np.float64(lowest / total if lowest > 0.0 else min(shares, default=np.inf))
    with np.errstate(all="ignore"):  # shares of subnormal weights may be 0
        return places, shares, [np.float32(powers.power(share / least, -beta)) for share in shares]


def set_errors(memory: Memory, places: list[int], sizes: list[Any]) -> int:
    """Give rows that can be drawn their errors, at least 0; of several for one row the last counts.

    -1, or the entry of the first error whose priority is too large for a sum; then nothing changes.
    """
    facts, undo = memory.facts, memory.undo
    weights = [power(size, *facts[[ALPHA, EPS]]) for size in sizes]
    for i, weight in enumerate(weights):
        if not weight <= tree.heaviest(len(memory.errors)):
            return i
    if len(undo):  # what changes is noted first, so that a change that a kill breaks off can be taken back
        undo[RATED_LARGEST] = facts[LARGEST]
        if RATED_START + 2 * len(places) <= len(undo):
            for i, place in enumerate(places):
                undo[RATED_START + 2 * i], undo[RATED_START + 2 * i + 1] = place, memory.errors[place]
            undo[RATED] = len(places)
        else:
            undo[RATED] = ALL_RATED
    for place, size, weight in zip(places, sizes, weights, strict=True):
        memory.errors[place], memory.nodes[place] = size, weight
        facts[LARGEST] = max(facts[LARGEST], size)
    tree.build(memory.nodes, memory.offsets, memory.minima)
    if len(undo):
        undo[RATED] = 0.0
    return -1


def rate(memory: Memory, index: list[int], errors: list[Any]) -> int:
    """Set the errors, of either sign, of the rows with these public indices; how many are gone.

    A row that is no longer live, or can no longer be drawn, is left alone. A leaf above 0 proves that a live row can be
    drawn. If anything is wrong, the result is ``UNUSUAL``, and nothing changes: an index that was never issued, an
    error that float32 cannot hold, a priority that is too large.
    """
    places, sizes, late, ring = list[int](), list[Any](), 0, memory.ring
    for given, error in zip(index, errors, strict=True):
        number, e = divmod(given, len(ring.state))
        if given < 0 or number >= ring.state[e, HEAD] or not abs(float(error)) <= LARGEST_ERROR:
            return UNUSUAL
        place = place_of(number, e, ring.rows)
        if number < oldest(e, ring) or not (memory.nodes[place] > 0.0 or draws.live(ring, [given])[0][0] >= 0):
            late += 1
        else:
            places.append(place)
            sizes.append(np.float32(abs(error)))
    return UNUSUAL if set_errors(memory, places, sizes) >= 0 else late


def reduced(errors: list[float], mask: list[bool], eta: float) -> float:
    """The TD error of a sequence from those of its steps that ``mask`` counts.

    It is ``eta`` times the largest, plus 1 - ``eta`` times their mean, summed from left to right; 0 if none counts
    (Kapturowski et al. 2019, section 2.3). NaN if one that counts is no float32.
    """
    sizes = [abs(error) for error, real in zip(errors, mask, strict=True) if real]
    if not all(size <= LARGEST_ERROR for size in sizes):
        return float("nan")
    total = 0.0
    for size in sizes:
        total += size
    return eta * max(sizes, default=0.0) + (1 - eta) * (total / max(len(sizes), 1))


def rate_sequences(memory: Memory, index: list[int], errors: Any, mask: Any, eta: float) -> int:
    """:func:`rate` of sequences ``[B, T]`` by the TD errors of their steps."""
    sizes = [reduced(row.tolist(), real.tolist(), eta) for row, real in zip(errors, mask, strict=True)]
    if not all(size <= LARGEST_ERROR for size in sizes):
        return UNUSUAL
    return rate(memory, index, [np.float32(size) for size in sizes])


def note_drawable(memory: Memory, places: list[int], marks: list[int], error: float, weight: float) -> None:
    """Give rows that can be drawn from now on (1) this error and its weight, and all others (0) no weight, in order."""
    for place, opened in zip(places, marks, strict=True):
        memory.errors[place], memory.nodes[place] = error, opened * weight
    tree.build(memory.nodes, memory.offsets, memory.minima)
