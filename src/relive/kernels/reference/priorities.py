"""Drawing, in plain Python: the sum tree, random numbers, priorities, and uniform draws of rows that can be drawn.

The priority of a row that can be drawn is (error + eps)^alpha, the weight of its leaf in a sum tree;
every other row has weight 0. The error is the size of a TD error. It is kept as float32, and everything computed from
it is float64.
"""

from __future__ import annotations

import ctypes
import math
import sys
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..tables import HEAD, HISTORY, LENGTH, RingArrays
from .ring import all_anchors, oldest, place_of, row_at

__all__ = [
    "ALL_RATED",
    "ALPHA",
    "DRAWS",
    "EPS",
    "FACTS",
    "FANOUT",
    "LARGEST",
    "LARGEST_ERROR",
    "MANY",
    "MASK",
    "PATIENCE",
    "RATED",
    "RATED_LARGEST",
    "RATED_START",
    "UNUSUAL",
    "Priorities",
    "anchors",
    "draw",
    "draw_weighted",
    "heaviest",
    "ids_of",
    "key",
    "live",
    "magnitudes",
    "masses",
    "mix",
    "note_drawable",
    "permutation",
    "powers",
    "rate",
    "rate_sequences",
    "rate_tensors",
    "reduce_errors",
    "set_errors",
    "tree_build",
    "tree_cover",
    "tree_find",
    "tree_get",
    "tree_lowest",
    "tree_offsets",
    "tree_set",
    "tree_shares",
    "uniform",
    "window",
]


Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]
Offsets = NDArray[np.uint64]

FANOUT = 8
"""Children per node: one cache line of float64."""

_LARGEST = sys.float_info.max


def heaviest(size: int) -> float:
    """The largest weight that ``size`` leaves can all have without an infinite sum anywhere."""
    return _LARGEST / (2.0 * size)


def tree_offsets(size: int) -> Offsets:
    """Where each level of a tree of ``size`` leaves starts, ``[levels + 1]``; the last is the place of the root."""
    starts, nodes = [0], size
    while nodes > 1 or len(starts) == 1:
        nodes = -(-nodes // FANOUT)
        starts.append(starts[-1] + nodes * FANOUT)
    return np.array(starts, np.uint64)


def tree_build(nodes: Doubles, offsets: Offsets, minima: Doubles) -> None:
    """Sum every node anew from the leaves; the minima too, if there are any."""
    starts = [int(start) for start in offsets]
    for level, (below, above) in enumerate(pairwise(starts)):
        blocks = nodes[below:above].reshape(-1, FANOUT)
        sums = np.zeros(len(blocks))
        for k in range(FANOUT):
            sums += blocks[:, k]
        nodes[above : above + len(sums)] = sums
        if minima.size:
            lows = np.where(blocks > 0, blocks, np.inf)
            if level:
                lows = minima[below - starts[1] : above - starts[1]].reshape(-1, FANOUT)
            minima[above - starts[1] : above - starts[1] + len(sums)] = lows.min(1)


def tree_set(nodes: Doubles, offsets: Offsets, minima: Doubles, size: int, positions: Ints, values: Doubles) -> int:
    """Give leaves their weights, in order, so that the last of several for one leaf stays, and sum all parents anew.

    ``values`` has one entry per position, or one for all. Returns -1, or the index in ``positions`` of the first entry
    that is no leaf or has a weight that is not in [0, heaviest(size)]; then nothing is written.
    """
    weights = np.broadcast_to(values, positions.shape).tolist()
    for i, (position, weight) in enumerate(zip(positions.tolist(), weights, strict=True)):
        if not (0 <= position < size and 0.0 <= weight <= heaviest(size)):
            return i
    for position, weight in zip(positions.tolist(), weights, strict=True):
        nodes[position] = weight + 0.0  # -0.0 becomes 0.0
    tree_build(nodes, offsets, minima)
    return -1


def tree_get(nodes: Doubles, size: int, positions: Ints, out: Doubles) -> int:
    """The weights of leaves; returns -1, or the index of the first position that is none."""
    for i, position in enumerate(positions.tolist()):
        if not 0 <= position < size:
            return i
        out[i] = nodes[position]
    return -1


def tree_shares(nodes: Doubles, size: int, positions: Ints, total: float, out: Doubles) -> float:
    """The weights of leaves, which exist, as parts of ``total``; returns the smallest."""
    tree_get(nodes, size, positions, out)
    out /= total
    return float(out.min(initial=np.inf))


def tree_lowest(nodes: Doubles, offsets: Offsets, minima: Doubles, begins: Ints, ends: Ints) -> float:
    """The smallest positive weight among the leaves of some ranges, which exist, each from begin up to end; or inf."""
    assert minima.size == len(nodes) - int(offsets[1])  # read by the fast twin alone
    lows = [float("inf")]
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        lows += [weight for weight in nodes[begin:end].tolist() if weight > 0]
    return min(lows)


def magnitudes(values: Doubles, limit: float, out: NDArray[np.float32]) -> int:
    """|values|; returns -1, or the index of the first that is above ``limit`` or no number."""
    for i, value in enumerate(values.tolist()):
        if not abs(value) <= limit:
            return i
        out[i] = abs(value)
    return -1


def tree_cover(nodes: Doubles, offsets: Offsets, begins: Ints, ends: Ints, places: Ints, until: Doubles) -> int:
    """Cut ranges of leaves into as few nodes as possible, from left to right; returns how many.

    A range goes from ``begin`` up to, not including, ``end``; it takes at most 2 (FANOUT - 1) nodes of each level.
    ``places`` says where the nodes lie and ``until`` sums their weights up, so its last entry is that of all ranges.
    """
    count, total = 0, 0.0
    for at, end in zip(begins.tolist(), ends.tolist(), strict=True):
        begin = at
        while begin < end:
            level = max(
                level for level in range(len(offsets)) if begin % FANOUT**level == 0 and begin + FANOUT**level <= end
            )
            place = int(offsets[level]) + begin // FANOUT**level
            total += float(nodes[place])
            places[count], until[count] = place, total
            count, begin = count + 1, begin + FANOUT**level
    return count


def tree_find(nodes: Doubles, offsets: Offsets, places: Ints, until: Doubles, masses: Doubles, out: Ints) -> int:
    """The leaf whose interval holds each mass, among those below some nodes, as :func:`tree_cover` lists them.

    The intervals of these nodes lie side by side and start at 0: node i's ends at ``until[i]``. So the masses of a
    range go from 0 up to its own weight, and what lies outside it does not matter. Returns -1, or the index of the
    first mass that is not in [0, until[-1]).
    """
    starts = [0.0, *until.tolist()]
    for i, mass in enumerate(masses.tolist()):
        if not 0.0 <= mass < starts[-1]:
            return i
        which = next(which for which in range(len(until)) if mass < until[which])
        place, start = int(places[which]), starts[which]
        top = max(level for level in range(len(offsets)) if offsets[level] <= place)
        node = place - int(offsets[top])
        for level in range(top - 1, -1, -1):
            first = int(offsets[level]) + node * FANOUT
            weights = nodes[first : first + FANOUT].tolist()
            child, last = 0, max(k for k in range(FANOUT) if weights[k] > 0)
            while child < last and start + weights[child] <= mass:
                start += weights[child]
                child += 1
            node = node * FANOUT + child
        out[i] = node
    return -1


MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014)."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def key(seed: int, counter: int) -> int:
    """The stream of random numbers that belongs to draw number ``counter`` of a seed."""
    return mix((_first(seed) + counter * GOLDEN) & MASK)


@lru_cache(maxsize=64)
def _first(seed: int) -> int:
    """The stream of draw number 0, from which the others follow; kept, as every draw needs it."""
    return mix(seed & MASK)


def uniform(stream: int, number: int) -> float:
    """Number ``number`` of a stream, in [0, 1), with 53 random bits."""
    return (mix((stream + number * GOLDEN) & MASK) >> 11) * 2.0**-53


def masses(stream: int, stratified: bool, total: float, below: float, out: NDArray[np.float64]) -> None:
    """Numbers 1, 2, ... of a stream as masses in [0, total), one from each of B equal parts if ``stratified``.

    ``below`` is the largest number below ``total``, which rounding must not pass.
    """
    for i in range(len(out)):
        u = uniform(stream, i + 1)
        out[i] = min(((i + u) / len(out) if stratified else u) * total, below)


def permutation(n: int, seed: int, counter: int) -> Tensor:
    """Fisher-Yates over 0..n-1 (int64) by splitmix64: a function of (seed, counter) alone, alike on every device."""
    order = list(range(n))
    stream = key(seed, counter)
    for number, i in enumerate(range(n - 1, 0, -1)):
        j = int(uniform(stream, number + 1) * (i + 1))
        order[i], order[j] = order[j], order[i]
    return torch.tensor(order, dtype=torch.int64)


Floats = NDArray[np.float32]

LARGEST_ERROR = float(np.finfo(np.float32).max)
"""The largest TD error, as errors are stored in float32."""

ALPHA = 0
"""The exponent of priorities, an entry of ``facts``."""
EPS = 1
"""The number that is added to every error, an entry of ``facts``."""
LARGEST = 2
"""The largest error that was ever set, an entry of ``facts``."""
DRAWS = 3
"""How many batches were drawn, an entry of ``facts``. Kernels do not read it."""
FACTS = 4
"""The length of ``facts``."""

RATED = 0
"""How many errors of ``undo`` have to be put back, if a kill comes now; 0 for none, or ALL_RATED."""
RATED_LARGEST = 1
"""The largest error before, an entry of ``undo``. Pairs of a place and its error before follow."""
RATED_START = 2
"""Where these pairs begin in ``undo``."""
ALL_RATED = -1.0
"""In RATED: there were more errors than ``undo`` has room for, and none was noted."""

MANY = 4096
"""More errors than this are set without the GIL."""

UNUSUAL = -1
"""Returned by :func:`rate` for a batch that it does not take."""


class Priorities(NamedTuple):
    """The memory of the priorities of a ring's rows. The fast twins take it as one handle of addresses."""

    nodes: Doubles
    """The sum tree, with one leaf for each row."""
    offsets: Offsets
    minima: Doubles
    errors: Floats
    """The error of each row, ``[N * R]``; it means nothing where the leaf is 0."""
    facts: Doubles
    """``[FACTS]``: alpha, eps and the largest error."""
    ring: RingArrays
    """The ring; in a handle, the ring's own handle. Draws by the fast twin ask for the rows that they drew."""
    undo: Doubles = np.empty(0)
    """``[2 + 2 K]`` of priorities in files, else empty: what :func:`note_rated` notes of K errors at most."""


def powers(errors: Floats, alpha: float, eps: float, out: Doubles) -> None:
    """(error + eps)^alpha of each error; infinite where that is too large for float64."""
    with np.errstate(over="ignore"):
        for i, error in enumerate(errors):  # one by one: NumPy's powers of arrays may round otherwise
            out[i] = (np.float64(error) + eps) ** alpha


def draw_weighted(
    memory: Priorities, key: int, stratified: bool, beta: float, lowest: float, tops: Ints, until: Doubles,
    places: Ints, probability: Doubles, weight: Floats,
) -> bool:  # fmt: skip
    """Draw leaves by weight, with their probabilities and importance weights; False if no leaf has weight.

    Args:
        memory: the priorities.
        key: the stream of random numbers; the masses are those of :func:`relive.kernels.reference.priorities.masses`.
        stratified: one draw from each of B equal parts of the total.
        beta: the exponent of importance weights, (N P)^-beta over the largest one: (P / Pmin)^-beta for every N.
        lowest: the priority that gives Pmin; 0 is the smallest priority of the batch.
        tops: the nodes whose leaves count, with the running sum ``until`` of their weights, as
            :func:`relive.kernels.reference.priorities.tree_cover` gives them; the root for all leaves.
        until: float64 ``[len(tops)]``.
        places: the rows drawn, ``[B]``.
        probability: their probabilities, ``[B]``.
        weight: their importance weights, ``[B]``.
    """
    total = float(until[-1]) if len(until) else 0.0
    if not total > 0.0:
        return False
    wanted = np.empty(len(places))
    masses(key, stratified, total, math.nextafter(total, 0.0), wanted)
    tree_find(memory.nodes, memory.offsets, tops, until, wanted, places)
    least = tree_shares(memory.nodes, len(memory.errors), places, total, probability)
    if lowest > 0.0:
        least = lowest / total
    with np.errstate(all="ignore"):  # shares of subnormal weights may be 0
        for i, share in enumerate(probability):
            weight[i] = (share / np.float64(least)) ** -beta
    return True


def set_errors(memory: Priorities, places: Ints, sizes: Floats) -> int:
    """Give rows that can be drawn their errors ``[B]``, at least 0; of several for one row the last counts.

    Returns -1, or the entry of the first error whose priority is too large for a sum; then nothing changes.
    """
    weights, facts = np.empty(len(places)), memory.facts
    powers(sizes, facts[ALPHA], facts[EPS], weights)
    for i, weight in enumerate(weights.tolist()):
        if not weight <= heaviest(len(memory.errors)):
            return i
    if len(memory.undo):
        note_rated(memory, places)
    tree_set(memory.nodes, memory.offsets, memory.minima, len(memory.errors), places, weights)
    for place, size in zip(places.tolist(), sizes, strict=True):
        memory.errors[place] = size
    facts[LARGEST] = max(float(facts[LARGEST]), float(sizes.max(initial=0.0)))
    if len(memory.undo):
        memory.undo[RATED] = 0.0
    return -1


def note_rated(memory: Priorities, places: Ints) -> None:
    """Note the errors of rows before they change, so that a change that a kill breaks off can be taken back.

    The number of notes is written last, and set to 0 once the change is done. Places are below 2**53, so a float64
    holds them.
    """
    undo = memory.undo
    undo[RATED_LARGEST] = memory.facts[LARGEST]
    fits = RATED_START + 2 * len(places) <= len(undo)
    for i, place in enumerate(places.tolist() if fits else ()):
        undo[RATED_START + 2 * i], undo[RATED_START + 2 * i + 1] = place, memory.errors[place]
    undo[RATED] = len(places) if fits else ALL_RATED


def rate(memory: Priorities, index: Ints, errors: Doubles | Floats) -> int:
    """Set the errors ``[B]``, of either sign, of the rows with these public indices; returns how many are gone.

    A row whose number is no longer live is left alone. A leaf above 0 proves that a live row can be drawn, so the row
    itself is not read. Where there is no such proof, or something is wrong, the result is :data:`UNUSUAL`, and nothing
    changes: an index that was never issued, an error that float32 cannot hold, a priority that is too large, and a row
    whose leaf is 0.
    """
    places, sizes, late, ring = list[int](), list[float](), 0, memory.ring
    for given, error in zip(index.tolist(), errors.tolist(), strict=True):
        number, e = divmod(given, len(ring.state))
        if given < 0 or number >= ring.state[e, HEAD] or not abs(error) <= LARGEST_ERROR:
            return UNUSUAL
        if number < oldest(e, ring):
            late += 1
        else:
            places.append(place_of(number, e, ring.rows))
            sizes.append(abs(error))
    where = np.array(places, np.int64)
    if not (memory.nodes[where] > 0.0).all():
        return UNUSUAL
    return UNUSUAL if set_errors(memory, where, np.array(sizes, np.float32)) >= 0 else late


def rate_tensors(memory: Priorities, describe: int, index: int, errors: int) -> int:
    """:func:`rate` of two tensors, which this reads where they are. The GIL is held all the time.

    Args:
        memory: the priorities.
        describe: the address of torch's function of that name: :class:`relive.kernels.tensor_calls.TensorCalls`.
        index: the address (``id``) of a tensor, int64 ``[B]``. torch negates only floats lazily.
        errors: that of another, float32 or float64 ``[B]``. Signs do not matter.

    Returns:
        what :func:`rate` returns; UNUSUAL, too, if they are other tensors, not in RAM, or more than ``MANY``.
    """
    given: list[Tensor] = [ctypes.cast(address, ctypes.py_object).value for address in (index, errors)]
    known = given[0].dtype is torch.int64 and given[1].dtype in (torch.float32, torch.float64)
    in_ram = all(x.dim() == 1 and x.is_cpu and x.data_ptr() and len(x) <= MANY for x in given)
    if not known or not in_ram or len(given[0]) != len(given[1]):
        return UNUSUAL
    return rate(memory, *(x.detach().resolve_neg().numpy() for x in given))


def rate_sequences(
    memory: Priorities, describe: int, index: int, errors: int, mask: int, time_first: bool, eta: float
) -> int:
    """:func:`rate` of sequences by the TD errors of their steps: :func:`rate_tensors` after :func:`reduce_errors`.

    Args:
        memory: the priorities.
        describe: as in :func:`rate_tensors`.
        index: as in :func:`rate_tensors`.
        errors: the address of a tensor, float32 or float64 ``[T, B]`` if ``time_first``, else ``[B, T]``.
        mask: that of another, bool of the same shape.
        time_first: which axis is time.
        eta: see :func:`reduce_errors`.
    """
    given: list[Tensor] = [ctypes.cast(address, ctypes.py_object).value for address in (index, errors, mask)]
    known = [x.dtype for x in given[::2]] == [torch.int64, torch.bool]
    known = known and given[1].dtype in (torch.float32, torch.float64) and [x.dim() for x in given] == [1, 2, 2]
    if not known or not all(x.is_cpu and x.data_ptr() for x in given) or given[1].shape != given[2].shape:
        return UNUSUAL
    indices, *steps = (x.detach().resolve_neg().numpy() for x in given)
    values, real = (x.T for x in steps) if time_first else steps
    if len(indices) != len(values) or len(indices) > MANY or not (np.abs(values[real]) <= LARGEST_ERROR).all():
        return UNUSUAL
    sizes = np.empty(len(indices), np.float32)
    reduce_errors(values.astype(np.float64), real, eta, sizes)
    return rate(memory, indices, sizes)


def reduce_errors(errors: Doubles, mask: NDArray[np.bool_], eta: float, out: Floats) -> None:
    """The TD error of each sequence, float32 ``[B]``, from those of its steps, ``[B, L]``, that ``mask`` counts.

    It is ``eta`` times the largest, plus 1 - ``eta`` times their mean, summed from left to right; 0 if none counts
    (Kapturowski et al. 2019, section 2.3).
    """
    for b in range(len(errors)):
        largest, total, count = 0.0, 0.0, 0
        for error, real in zip(errors[b].tolist(), mask[b].tolist(), strict=True):
            if real:
                largest, total, count = max(largest, abs(error)), total + abs(error), count + 1
        out[b] = eta * largest + (1 - eta) * (total / max(count, 1))


def note_drawable(memory: Priorities, places: Ints, drawable: NDArray[np.uint8], error: float, weight: float) -> None:
    """Give rows that can be drawn from now on (1) this error and its weight, and all others (0) no weight, in order."""
    tree, size = (memory.nodes, memory.offsets, memory.minima), len(memory.errors)
    for place, opened in zip(places.tolist(), drawable.tolist(), strict=True):
        memory.errors[place] = error
        tree_set(*tree, size, np.array([place]), np.array([opened * weight]))


PATIENCE = 100
"""Draws that may miss before the anchors are counted out one by one."""


def draw(ring: RingArrays, key: int, newest: int, places: Ints) -> bool:
    """Places of anchors drawn uniformly, with replacement, from the ``newest`` completed ones (0: from all).

    Draw i, attempt a, is number 1 + i + a * B of the stream ``key``, and points at a row of the window; rows that are
    no anchors are drawn again. False if the window has none.
    """
    first, until = (np.zeros(len(ring.state), np.int64) for _ in range(2))
    window(ring, newest, first, until)
    inside = [(e, n) for e in range(len(ring.state)) for n in range(int(first[e]), int(ring.state[e, HEAD]))]
    anchors = set(all_anchors(ring))
    drawable = [row for row in inside if row in anchors]
    if not drawable:
        return False
    for i in range(len(places)):
        for attempt in range(PATIENCE):
            e, number = inside[int(uniform(key, 1 + i + len(places) * attempt) * len(inside))]
            if (e, number) in anchors:
                break
        else:
            z = mix((mix(key) + i) & MASK)
            e, number = drawable[int((z >> 11) * 2.0**-53 * len(drawable))]
        places[i] = place_of(number, e, ring.rows)
    return True


def window(ring: RingArrays, newest: int, first: Ints, until: Ints) -> int:
    """The rows from the ``newest`` transitions on (0: from all): the first number in each env.

    Of transitions those count that can be drawn; where windows are longer, every complete one. Newest is in the order
    of completion, over all envs. ``until`` is the running sum over the envs of the number of rows from there to the
    head; the whole sum is returned. Some of them cannot be drawn: boundary rows, the newest.
    """
    counted, history = ring, int(ring.counters[HISTORY])
    if ring.counters[LENGTH] > 1:
        counted, history = ring._replace(counters=np.array([*ring.counters[:HISTORY], 0, 1, 1, 1])), 0
    stamps = sorted((int(ring.stamp[place_of(n, e, ring.rows)]) for e, n in all_anchors(counted)), reverse=True)
    threshold = stamps[newest - 1] if 0 < newest < len(stamps) else 0
    total = 0
    for e in range(len(ring.state)):
        least, head = oldest(e, ring), int(ring.state[e, HEAD])
        number = least
        while number < head:
            place = place_of(number, e, ring.rows)
            s = int(ring.stamp[place])
            if (s if s >= 0 else -1 - s) >= threshold and number - min(int(ring.step[place]), history) >= least:
                break
            number += 1
        first[e] = number
        total += head - number
        until[e] = total
    return total


def ids_of(ring: RingArrays, places: Ints, index: Ints) -> int:
    """The public index, number * N + env, of the rows at live places; the first that is no place of a row, or -1."""
    envs = len(ring.state)
    for i, place in enumerate(places.tolist()):
        if not 0 <= place < envs * ring.rows:
            return i
        e, _, number = row_at(place, ring)
        index[i] = number * envs + e
    return -1


def live(ring: RingArrays, index: Ints, places: Ints) -> int:
    """Places of the given indices, -1 for those that can no longer be drawn; the first that was never issued, or -1.

    From that one on all places are -1.
    """
    anchors = set(all_anchors(ring))
    for i, given in enumerate(index.tolist()):
        number, e = divmod(given, len(ring.state))
        if given < 0 or number >= ring.state[e, HEAD]:
            places[i:] = -1
            return i
        places[i] = place_of(number, e, ring.rows) if (e, number) in anchors else -1
    return -1


def anchors(ring: RingArrays, out: Ints) -> int:
    """The places of all rows that can be drawn, env by env in the order of time; how many there are."""
    found = [place_of(number, e, ring.rows) for e, number in all_anchors(ring)]
    out[: len(found)] = found
    return len(found)
