"""Weighing and Binding: the parts of priorities that must agree, and how compiled code takes them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from .. import kernels
from ..errors import NotFiniteError
from ..kernels.reference.priorities import ALPHA, EPS, FACTS, LARGEST, Priorities
from ..parameters import is_count, is_number
from ..ring.ring import Ring
from ..steps.arrays import Doubles, Ints
from .sumtree import SumTree

__all__ = ["Binding", "Weighing", "is_beta", "powers_of", "require_errors"]


def is_beta(beta: Any) -> bool:
    """Whether this is an exponent or a schedule (first, last, draws) for it, which does not fall.

    The weights have to correct most where learning ends (Schaul et al. 2015), so beta only grows.
    """
    if not isinstance(beta, tuple):
        return is_number(beta, 0)
    if len(cast("tuple[Any, ...]", beta)) != 3:
        return False
    first, last, draws = cast("tuple[Any, Any, Any]", beta)
    return is_number(first, 0) and is_number(last, 0) and first <= last and is_count(draws, 1)


class Weighing(NamedTuple):
    """The parts of the priorities that must agree, so that one assignment changes them all."""

    alpha: float
    eps: float
    errors: NDArray[np.float32]
    """The TD error of each row; meaningless for rows that cannot be drawn."""
    tree: SumTree
    """(error + eps)^alpha of each row that can be drawn, 0 for the others."""


class Kept(Protocol):
    """Memory of priorities that outlives the process."""

    facts: Doubles
    undo: Doubles


class Binding:
    """The memory of the priorities, as compiled code takes it; for as long as it consists of the same arrays."""

    def __init__(self, weighing: Weighing, ring: Ring, largest: float, kept: Kept | None) -> None:
        tree = self.tree = weighing.tree
        self.weighing, self.minima, self.whole = weighing, tree.minima, tree.whole
        self.facts, undo = (np.empty(FACTS), np.empty(0)) if kept is None else (kept.facts, kept.undo)
        self.facts[[ALPHA, EPS, LARGEST]] = weighing.alpha, weighing.eps, largest
        self.memory = Priorities(*tree.arrays, self.minima, weighing.errors, self.facts, ring.arrays, undo)
        self._bound_to = self.memory._replace(ring=cast("Any", ring.handle))
        self.handle: Ints = kernels.fast().handle_of(self._bound_to)
        """Addresses only; the attributes above keep alive what they point to."""

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and deepcopy: None. A copy of a sampler has arrays at other addresses."""
        return type(None), ()


def require_errors(errors: NDArray[np.float32]) -> None:
    """Require errors as priorities are made of.

    Raises:
        NotFiniteError: one is NaN, infinite or negative.
    """
    if not (np.isfinite(errors).all() and (errors >= 0).all()):
        raise NotFiniteError("errors: a TD error in the saved state is negative or not finite")


def powers_of(errors: Any, alpha: float, eps: float) -> Doubles:
    """(error + eps)^alpha ``[B]`` of float32 errors ``[B]``, or of one; the tree refuses infinite ones."""
    sizes = np.atleast_1d(np.asarray(errors, np.float32))
    out = np.empty(len(sizes))
    kernels.fast().powers(sizes, float(alpha), float(eps), out)
    return out
