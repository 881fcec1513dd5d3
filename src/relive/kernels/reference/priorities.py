"""Drawing transitions by priority, and changing priorities, spelt out.

The priority of a row that can be drawn is (error + eps)^alpha, the weight of its leaf in a sum tree
(:mod:`relive.kernels.reference.tree`); every other row has weight 0. The error is the size of a TD error. It is kept as
float32, and everything computed from it is float64.
"""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..ring_state import HEAD, RingArrays
from .places import Ints, oldest, place_of
from .random import masses
from .tree import Doubles, Offsets, heaviest, tree_find, tree_set, tree_shares

__all__ = [
    "ALL_RATED",
    "ALPHA",
    "DRAWS",
    "EPS",
    "FACTS",
    "LARGEST",
    "LARGEST_ERROR",
    "MANY",
    "RATED",
    "RATED_LARGEST",
    "RATED_START",
    "UNUSUAL",
    "Priorities",
    "draw_weighted",
    "note_drawable",
    "powers",
    "rate",
    "rate_sequences",
    "rate_tensors",
    "reduce_errors",
    "set_errors",
]

Floats = NDArray[np.float32]

LARGEST_ERROR = float(np.finfo(np.float32).max)
"""The largest TD error, as errors are stored in float32."""

ALPHA = 0
"""The exponent of priorities, an entry of ``facts``."""
EPS = 1
"""What is added to every error, an entry of ``facts``."""
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
"""What :func:`rate` returns for a batch that it does not take."""


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
        key: the stream of random numbers; the masses are those of :func:`relive.kernels.reference.random.masses`.
        stratified: one draw from each of B equal parts of the total.
        beta: the exponent of importance weights, (N P)^-beta over the largest one: (P / Pmin)^-beta for every N.
        lowest: the priority that gives Pmin; 0 is the smallest priority of the batch.
        tops: the nodes whose leaves count, with the running sum ``until`` of their weights, as
            :func:`relive.kernels.reference.tree.tree_cover` gives them; the root for all leaves.
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
        memory: see :func:`rate_tensors`, as for the next two.
        describe: likewise.
        index: likewise.
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
