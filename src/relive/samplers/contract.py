"""Sampler: the interface for drawing transitions from a ring."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol, cast

import numpy as np

from ..core import Draw
from ..device.contract import DeviceSampler
from ..device.ring import DeviceRing
from ..errors import LifecycleError, ParameterError
from ..parameters import is_own, refuse_class
from ..ring.ring import DeviceIsNewer, Opens, Ring
from ..steps.arrays import Array, Ints

Extras = dict[str, Array]
"""Further fields of a batch, ``[B]``: weight, probability."""

State = dict[str, Any]
"""The values that a sampler needs to continue, as files hold it: arrays, numbers, names."""


Drawn = Draw | tuple[Ints, Extras]
"""The result of a draw: places and further fields, or a draw of compiled code that is not made yet.

Both unpack to places and further fields.
"""


class AnySampler(Protocol):
    """An object that a replay takes as a sampler: two methods, documented in :class:`Sampler`."""

    def attach(self, ring: Ring) -> None:
        """Prepare to draw from ``ring``; arguments are those of :meth:`Sampler.attach`."""
        ...

    def draw(self, count: int, key: int, update: int, of: int) -> Drawn:
        """Places of anchors and further fields; arguments are those of :meth:`Sampler.draw`."""
        ...


class Sampler(ABC):
    """Draws anchors of a ring: rows that can be drawn. Write :meth:`attach` and :meth:`draw`; the rest has defaults.

    A sampler need not inherit from this class. A plain object with the two methods has the same defaults.
    """

    @abstractmethod
    def attach(self, ring: Ring) -> None:
        """Prepare to draw from ``ring``; called before all else, and again when the ring's rule has changed.

        Also called after an exception, such as Ctrl-C, interrupted a write. Calls of :meth:`changed` may then be
        missing, so a sampler starts again from ``ring.anchors()``.
        """

    @abstractmethod
    def draw(self, count: int, key: int, update: int, of: int) -> Drawn:
        """Places of anchors, int64 ``[count]``, and further fields of the batch ``[count]`` by name.

        Args:
            count: B.
            key: the batch's stream of random numbers; equal keys give equal draws.
            update: the number of this batch in its round of updates, from 1.
            of: how many batches the round has.

        Raises:
            EmptyError: there is nothing to draw.
        """

    def changed(self, places: Ints, drawable: Opens) -> None:  # noqa: B027 - a default, not an omission
        """Note that the rows at ``places``, int64 ``[K]``, can be drawn from now on (1) or no more (0), in order.

        ``drawable`` is uint8 ``[K]``. Only samplers that write this method are told.
        """

    def state_dict(self) -> State:
        """A copy of the state that another sampler needs to continue exactly like this one."""
        return {}

    def load_state_dict(self, state: State) -> None:  # noqa: B027
        """Continue exactly like the sampler that gave this state."""


class OwnSampler(Sampler):
    """A sampler of relive: what a replay asks of these besides, with what holds of most of them."""

    watches: bool = False
    """True if :meth:`changed` must be called."""

    extras: tuple[str, ...] = ()
    """The names of the further fields that every :meth:`draw` returns."""

    draws_late: bool = True
    """True if :meth:`draw` may leave the draw to the call that reads the rows: it returns a Draw."""

    state_in_files: bool = False
    """True if a replay in files needs no other file for the state of this sampler."""

    can_be_shared: bool = False
    """True if shards can divide its draws among them."""

    per_row: tuple[str, ...] = ()
    """The arrays of :meth:`state_dict` with an entry for each row; only entries of live rows are saved."""

    @property
    def waiting(self) -> int:
        """How many rows come before all that are drawn by chance, each once: :meth:`take_new` gives them."""
        return 0

    @property
    def served(self) -> int:
        """How many had their turn."""
        return 0

    @property
    def lost(self) -> int:
        """How many were overwritten before their turn."""
        return 0

    @property
    def prioritized(self) -> Any:
        """The sampler that keeps TD errors: this one, or the one inside of it; None if neither does."""
        return None

    @property
    def by_chance(self) -> OwnSampler:
        """The sampler that draws all rows but new ones: this one, or the one inside of it."""
        return self

    def take_new(self, count: int) -> Ints:
        """The places of those that wait, at most ``count``, the first completed first; they wait no more."""
        return np.empty(0, np.int64)

    def take_over(self, other: OwnSampler, env: int, to: int) -> None:
        """The newest transitions of env ``to`` were copied from env ``env`` of another ring: take what ``other``, its
        sampler, knows of them.
        """
        if self.prioritized is not None and other.prioritized is not None:
            self.prioritized.take_over_errors(other.prioritized, env, to)

    def likely(self, ring: Ring, count: int, key: int, update: int, of: int, newest: int = 0) -> Ints | None:
        """The places of rows, at most ``count``, that :meth:`draw` will most likely draw; int64 ``[K]``.

        They are a prediction: a draw tries rows until it finds one that can be drawn, and only its first try counts.
        None if a prediction would have to read rows. If files were altered, a place may be beyond the last row.

        Args:
            ring: the rows; some can be drawn.
            count: as for :meth:`draw`, and so are ``key``, ``update`` and ``of``.
            key: see there.
            update: see there.
            of: see there.
            newest: the transitions to draw among; 0 is all.
        """
        return None

    def nbytes(self, rows: int) -> int:
        """Bytes that the sampler keeps for a full ring of ``rows`` rows over all envs."""
        return 0

    def bytes_on_device(self, rows: int, num_envs: int) -> int | None:
        """Bytes that :meth:`on_device` takes for so many rows over all envs; None if the host alone draws."""
        return None

    def on_device(self, rows: DeviceRing) -> DeviceSampler:
        """The part that draws the same rows on a device; asked for only if :meth:`bytes_on_device` gives a number."""
        raise NotImplementedError

    def draw_state(self) -> Any:
        """The state that draws change, for :meth:`set_draw_state`; None if a draw changes nothing."""
        return None

    def set_draw_state(self, draw_state: Any) -> None:
        """Go back, or on, to a state that :meth:`draw_state` gave. What was added or rated since then stays."""

    def batch_failed(self) -> None:
        """The batch that was just drawn could not be read. It counts as drawn, but nobody has its rows."""

    def check(self) -> None:
        """Check what the sampler knows of the ring; :meth:`relive.ReplayBuffer.check` calls it.

        Raises:
            InvariantError: it is wrong.
        """


class _Adapted(OwnSampler):
    """A user's sampler in the place of one of relive's. What it lacks has the defaults.

    The names of its further fields are known from its first draw on.
    """

    def __init__(self, sampler: AnySampler) -> None:
        self._sampler = self.inner = sampler
        self.watches = getattr(type(sampler), "changed", Sampler.changed) is not Sampler.changed
        for name in ("changed", "state_dict", "load_state_dict", "check", "nbytes"):
            given = getattr(sampler, name, None)
            if given is not None:
                setattr(self, name, given)

    def attach(self, ring: Ring) -> None:
        self._sampler.attach(ring)

    def draw(self, count: int, key: int, update: int, of: int) -> Drawn:
        drawn = self._sampler.draw(count, key, update, of)
        if isinstance(drawn, Draw):
            self.extras = ("weight", "probability") if drawn.weighed else ()
        elif isinstance(cast("Any", drawn), tuple) and len(drawn) == 2 and hasattr(drawn[1], "keys"):
            self.extras = tuple(drawn[1])
        return drawn

    def __repr__(self) -> str:
        return repr(self._sampler)


# Only None stands for the default: `sampler or Uniform()` would replace a user's sampler whose length is 0.
def with_defaults(sampler: AnySampler) -> OwnSampler:
    """The sampler itself if it is one of relive's, or inherits from one; else one in its place, with all members.

    Raises:
        ParameterError: it is a class, or lacks one of the two methods.
    """
    refuse_class("sampler", sampler)
    if isinstance(sampler, OwnSampler):
        return sampler
    missing = [name for name in ("attach", "draw") if not callable(getattr(sampler, name, None))]
    if missing:
        raise ParameterError(
            f"sampler={sampler!r}: expected a sampler such as Prioritized(), or an object with the methods "
            f"attach(ring) and draw(count, key, update, of); it lacks {' and '.join(missing)}"
        )
    return _Adapted(sampler)


def likely_places(sampler: OwnSampler, ring: Ring, count: int, key: int, update: int, of: int) -> Ints | None:
    """The places that ``sampler.draw(count, key, update, of)`` will most likely draw: :meth:`OwnSampler.likely`.

    None also where nothing can be drawn, and for samplers of the user.
    """
    return sampler.likely(ring, count, key, update, of) if ring.drawable and is_own(sampler) else None


def require_own_ring(mine: Ring | None, ring: Ring, sampler: object) -> Ring:
    """The ring to draw from. A sampler keeps one ring for life, as places of two rings look the same.

    Raises:
        LifecycleError: the sampler already has another ring.
    """
    if mine is not None and mine is not ring:
        raise LifecycleError(f"{sampler!r} draws from another buffer already; give each buffer a sampler of its own")
    return ring


def bring_up_to_date(ring: Ring | None) -> None:
    """Have the ring in RAM, and its sampler, know all that a device knows."""
    if ring is not None and isinstance(ring.pending, DeviceIsNewer):
        ring.repair()


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
