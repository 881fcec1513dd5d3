"""Reader: makes batches through the replay's view."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

import numpy as np
from torch import Tensor

from ..batches.sequences import SequenceBatch
from ..batches.states import swap_layers
from ..batches.tensordicts import as_tensordict
from ..errors import LifecycleError, ParameterError, ReliveError, SchemaError, ShapeError
from ..parameters import Rule, is_count, is_own, is_whole, refuse_class, require
from ..ring.adding import Change
from ..ring.ring import Ring
from ..ring.sequences import FACTS
from ..samplers.contract import Sampler
from ..steps.arrays import Ints, as_host
from ..steps.schema import Schema
from ..steps.trees import Path
from ..views.contract import View, require_readable, rule_of, time_first_of
from .arguments import whole_numbers
from .parts import parts_of

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["Reader", "readable_draw"]


WHOLE_RULE: Rule = (lambda number: number is None or is_whole(number), "expected a whole number, or None")


class Reader:
    """The reading side of a replay. All of its methods expect that the caller holds the replay's lock.

    Args:
        ring: the rows.
        sampler: attached anew when the view changes what can be drawn.
        schema: the fields of a step, as the user named them.
        view: see :meth:`read_through`.
    """

    def __init__(self, ring: Ring, sampler: Sampler, schema: Schema, view: View) -> None:
        self.ring, self.sampler, self.schema, self.view = ring, sampler, schema, view
        self.replaced: Callable[[], object] = bool
        """Called when the view was replaced. A replay in files keeps it."""
        self.read_through(view)

    def read_through(self, view: View) -> None:
        """Use this view from now on.

        Raises:
            ParameterError: ``view`` is not a view.
            SchemaError: the view cannot read what is stored.
            LifecycleError: it is the view of another buffer.
        """
        refuse_class("view", view)
        if not hasattr(view, "read"):
            raise ParameterError(f"view={view!r}: expected a view, such as NStep(3, gamma=0.99) or Transition()")
        for part in parts_of(view):
            reader = _READERS.get(id(part))
            if reader is not None and reader is not self and any(part is other for other in parts_of(reader.view)):
                raise LifecycleError(
                    f"{part!r} is the view of another buffer, so a change would affect both; make a new view for each "
                    "buffer"
                )
        require_readable(view, self.ring)
        before, self.view = self.view, view
        try:
            self.keep_rule()
        except ReliveError:
            self.view = before
            raise
        _READERS.update(dict.fromkeys(map(id, parts_of(view)), self))
        self.replaced()

    def keep_rule(self) -> None:
        """Apply the view's rule of what can be drawn to the ring, if it has changed."""
        ring, rule = self.ring, rule_of(self.view)
        before = ring.rule
        if rule == before:
            return
        ring.pending = Change(rule=before)
        try:
            ring.rule = rule
            self.sampler.attach(ring)
        except ReliveError:
            ring.rule = before
            ring.settle()
            raise
        ring.settle()

    def read(self, places: Ints, extras: Mapping[str, Any], key: int | None) -> Any:
        """The batch of the transitions at ``places``, with the sampler's ``extras``."""
        try:
            batch = self.view.read(self.ring, places, key)
        except (ParameterError, SchemaError) as error:
            if is_own(self.view):
                raise
            raise type(error)(f"{self.view!r}: {error}") from error
        if extras:
            tensors = self.ring.store.tensors(*extras.values())
            for name, tensor in zip(extras, tensors, strict=True):
                batch[name,] = tensor
        time_first = time_first_of(self.view)
        if time_first is None:
            return as_tensordict(batch, (len(places),))
        return self._sequences(batch, (*FACTS, *extras), time_first)

    def _sequences(self, batch: dict[Path, Tensor], known: tuple[str, ...], time_first: bool) -> SequenceBatch:
        """The batch of sequences of these fields. Those named in ``known`` are facts about each sequence."""
        facts: dict[str, Tensor] = {}
        states: dict[Path, Tensor] = {}
        for name in known:
            facts[name] = batch.pop((name,))
        for path in list(batch):
            if path[0] == "hidden":
                states[path] = swap_layers(batch.pop(path)).contiguous()
        hidden = self.schema.rebuild("hidden", states.__getitem__) if states else None
        return SequenceBatch(batch, facts, hidden, time_first=time_first)

    def data(self) -> Any:
        """Every transition that can be drawn, in the order of completion."""
        self.keep_rule()
        places = self.ring.anchors()
        return self.read(places[np.argsort(self.ring.stamp[places], kind="stable")], {}, None)

    def at(self, rows: Any) -> Any:
        """The transitions at ``rows`` of the ring's memory, int64 ``[B]``.

        Raises:
            ParameterError: a row out of range, or one that cannot be drawn.
        """
        self.keep_rule()
        places = whole_numbers(rows, "rows")
        good = (places >= 0) & (places < self.ring.store.num_rows)
        if good.all():
            good = self.ring.find(self.ring.index_of(places))[0] == places
        if not good.all():
            raise ParameterError(f"at: row {places[np.argmin(good)]} cannot be drawn; pass complete transitions")
        return self.read(places, {}, None)

    def slice(self, env: int, start: int, stop: int | None) -> TensorDict:
        """Stored rows of one env from ``start`` up to ``stop``, without the view; 0 is the oldest.

        Raises:
            ParameterError: there is no such env, or ``start`` or ``stop`` is not a whole number.
        """
        ring = self.ring
        if not (is_count(env) and env < ring.num_envs):
            raise ParameterError(
                f"slice: env is a whole number from 0 up to, not including, {ring.num_envs}, got {env}"
            )
        require("slice", WHOLE_RULE, start=start, stop=stop)
        places = ring.live_places(env)[slice(start, stop)]
        fields = ring.take(places)
        facts = ring.tensors(ring.stamp[places] >= 0, ring.index_of(places))
        fields["complete",], fields["index",] = facts
        return as_tensordict(fields, (len(places),))


_READERS: WeakValueDictionary[int, Reader] = WeakValueDictionary()
"""Readers by the id of their view, because some views can be neither hashed nor weakly referenced."""


def readable_draw(ring: Ring, sampler: Sampler, drawn: Any, count: int) -> tuple[Ints, dict[str, Any]]:
    """Check what a user's sampler drew, and return its places and fields.

    Raises:
        ParameterError, SchemaError: the draw has another form, or a place cannot be drawn.
    """
    who = f"{sampler!r}.draw({count})"
    given: list[Any] = [*cast("tuple[Any, ...]", drawn)] if isinstance(drawn, tuple) else []
    if len(given) != 2 or not isinstance(given[1], Mapping):
        raise ShapeError(f"{who}: expected a tuple of places [{count}] and a dict of further fields, got {drawn!r}")
    chosen, further = given
    try:
        places = ring.require_anchors(chosen)
    except (ParameterError, SchemaError) as error:
        raise type(error)(f"{who}: {error}") from error
    extras = {name: as_host(value) for name, value in cast("Mapping[str, Any]", further).items()}
    for name, array in {"places": places, **extras}.items():
        if array.shape[:1] != (count,) or array.dtype.kind not in "biufc":
            raise ShapeError(f"{who}: expected {count} {name}, got {array.dtype} {array.shape}")
    return places, extras
