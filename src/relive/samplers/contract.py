"""Sampler: the interface for drawing transitions from a ring."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import LifecycleError, ParameterError
from ..ring.ring import Ints, Ring

__all__ = ["Doubles", "Extras", "Sampler", "refuse_weights", "require_own_ring"]


Doubles = NDArray[np.float64]


Extras = dict[str, NDArray[Any]]
"""Further fields of a batch, ``[B]``: weight, probability."""


class Sampler(Protocol):
    """Draws anchors of a ring.

    A sampler that keeps facts about the ring may have ``check()``, which raises an InvariantError if they are wrong.
    :meth:`relive.ReplayBuffer.check` calls it.
    """

    def attach(self, ring: Ring) -> None:
        """Prepare to draw from ``ring``; called before all else, and again when the ring's rule has changed.

        Also called after an exception, such as Ctrl-C, interrupted a write. Calls of :meth:`changed` may then be
        missing, so a sampler starts again from ``ring.anchors()``.
        """
        ...

    @property
    def watches(self) -> bool:
        """Whether :meth:`changed` must be called."""
        ...

    @property
    def extras(self) -> tuple[str, ...]:
        """The names of the further fields that every :meth:`draw` returns."""
        ...

    def changed(self, places: Ints, drawable: Any) -> None:
        """Note that the rows at ``places`` can be drawn from now on (1) or no more (0), in order."""
        ...

    def draw(self, count: int, key: int, update: int, of: int) -> tuple[Ints, Extras]:
        """Places of anchors ``[count]`` and further fields of the batch, for update ``update`` of ``of`` in a round.

        Draws are functions of ``key``, the batch's stream of random numbers.

        Raises:
            EmptyError: there is nothing to draw.
        """
        ...

    def nbytes(self, rows: int) -> int:
        """Bytes that the sampler keeps for a full ring of ``rows`` rows over all envs."""
        ...

    @property
    def per_row(self) -> tuple[str, ...]:
        """The arrays of :meth:`state_dict` with an entry for each row; only entries of live rows are saved."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state that another sampler needs to continue exactly like this one."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly like the sampler that gave this state."""
        ...


def require_own_ring(mine: Ring | None, ring: Ring, sampler: object) -> Ring:
    """The ring to draw from. A sampler keeps one ring for life, as places of two rings look the same.

    Raises:
        LifecycleError: the sampler already has another ring.
    """
    if mine is not None and mine is not ring:
        raise LifecycleError(f"{sampler!r} draws from another buffer already; give each buffer a sampler of its own")
    return ring


def refuse_weights(ring: Ring, sampler: object) -> None:
    """Refuse a ring whose view weighs its sequences; only uniform draws use such weights.

    Raises:
        ParameterError: the rule's ``weigh`` is not "windows".
    """
    if ring.rule.weigh != "windows":
        raise ParameterError(
            f"weigh={ring.rule.weigh!r} is for Uniform() alone, and {sampler!r} has weights of its own; "
            "leave weigh at 'windows'"
        )
