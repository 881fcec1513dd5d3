"""Sampler: what draws transitions from a ring."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import LifecycleError, SchemaError
from ..ring.ring import Ints, Ring

__all__ = ["Doubles", "Extras", "Sampler", "only", "refuse_weights"]


Doubles = NDArray[np.float64]


Extras = dict[str, NDArray[Any]]
"""Further fields of a batch, ``[B]``: weight, probability."""


class Sampler(Protocol):
    """Draws anchors of a ring.

    One that keeps something of the ring may have ``check()``, which raises an InvariantError where that contradicts
    what can be drawn; :meth:`relive.ReplayBuffer.check` calls it.
    """

    def attach(self, ring: Ring) -> None:
        """Get to know the ring it draws from; called before anything else, and again when its rule has changed.

        It is also called after an exception, such as Ctrl-C, has broken off a call that writes. What :meth:`changed`
        said may then be only half of what happened: it starts from ``ring.anchors()``.
        """
        ...

    @property
    def watches(self) -> bool:
        """Whether :meth:`changed` has to be called."""
        ...

    @property
    def extras(self) -> tuple[str, ...]:
        """The names of the further fields that :meth:`draw` gives, always."""
        ...

    def changed(self, places: Ints, opens: Any) -> None:
        """Rows that can be drawn from now on (1) or no more (0), in order."""
        ...

    def draw(self, count: int, key: int, update: int, of: int) -> tuple[Ints, Extras]:
        """Places of anchors ``[count]``, and further fields of the batch, for update number ``update`` of ``of``.

        Raises:
            EmptyError: there is nothing to draw.
        """
        ...

    def nbytes(self, rows: int) -> int:
        """Bytes it keeps for a ring of so many rows, over all envs, once that is full."""
        ...

    @property
    def per_row(self) -> tuple[str, ...]:
        """The arrays of :meth:`state_dict` that have an entry for each row; only those of live rows are saved."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a later sampler needs to go on just like this one; copies."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on like the sampler whose :meth:`state_dict` this is."""
        ...


def only(mine: Ring | None, ring: Ring, sampler: object) -> Ring:
    """The ring to draw from; a sampler has one for life, since it could not tell the places of two apart.

    Raises:
        LifecycleError: it has another one.
    """
    if mine is not None and mine is not ring:
        raise LifecycleError(f"{sampler!r} draws from another buffer already; give each buffer a sampler of its own")
    return ring


def refuse_weights(ring: Ring, sampler: object) -> None:
    """Weights of sequences are for drawing uniformly.

    Raises:
        SchemaError: the ring's rule has some.
    """
    if ring.rule.weigh != "windows":
        raise SchemaError(
            f"weigh={ring.rule.weigh!r} says how Uniform() weighs sequences, and {sampler!r} draws in its own way; "
            "leave weigh at 'windows'"
        )
