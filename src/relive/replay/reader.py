"""Reader: makes the batches of a replay, from the draw to the tensors; and Prefetch, for rows in files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast
from weakref import WeakValueDictionary

import numpy as np
from torch import Tensor

from .. import core
from ..batches import Batch, SequenceBatch, as_batch, swap_layers
from ..core import Draw
from ..core import key as stream
from ..errors import DTypeError, FieldError, LifecycleError, ParameterError, ReliveError, SchemaError, ShapeError
from ..memory.mapped import LookAhead, MappedAllocator
from ..memory.ram import ReplayRows
from ..parameters import is_count, is_own, parts_of, refuse_class
from ..ring.ring import Change, Ring
from ..ring.sequences import FACTS
from ..samplers.contract import AnySampler, Extras, OwnSampler, likely_places, with_defaults
from ..samplers.uniform import emptied
from ..steps.arrays import Array, Ints, as_host
from ..steps.schema import Path, Schema, dotted
from ..views.contract import View, require_readable, rule_of, time_first_of
from .serving import Process, Progress, stream_of


class Reader:
    """Makes batches: draws transitions with the sampler and reads them through the view.

    The caller of each method holds the replay's lock.

    Args:
        ring: the rows.
        sampler: draws; attached again when the view changes what can be drawn.
        schema: the fields of a step, as the user named them.
        view: see :meth:`read_through`.
        progress: the seed, and the number of the next batch.
    """

    def __init__(self, ring: Ring, sampler: OwnSampler, schema: Schema, view: View, progress: Progress) -> None:
        self.ring = ring
        self.sampler = sampler
        self.schema = schema
        self.view: View = view
        self.progress = progress
        self.prefetch: Prefetch | None = None
        """Asks for the rows of the next batch of a replay in files; None for any other replay."""
        self._has_states = any(path[0] == "hidden" for path in ring.leaves)
        self._own_sampler = is_own(sampler)
        """True if draws need no check."""
        # What is known of the view is set with it in one line, so that Ctrl-C leaves no view with facts of another one.
        # All three are False for a view of the user, which is read by places, and whose batches are checked.
        self._reads_draws: bool = False
        """True if the view reads a draw that is not made yet."""
        self._nests: bool = False
        """True if the view makes the nested batch."""
        self._windows: bool = False
        """True if its batches are of sequences."""
        self.read_through(view)

    def read_through(self, view: View) -> None:
        """Use this view from now on.

        Raises:
            ParameterError: ``view`` is not a view.
            SchemaError: the view cannot read what is stored.
            LifecycleError: it is the view of another buffer.
        """
        require_view(view)
        for part in parts_of(view):
            reader = _READERS.get(id(part))
            if reader is not None and reader is not self and any(part is other for other in parts_of(reader.view)):
                raise LifecycleError(
                    f"{part!r} is the view of another buffer, so a change would affect both; make a new view for each "
                    "buffer"
                )
        require_readable(view, self.ring)
        own = is_own(view)  # a class that inherits from one of relive's is a user's own
        reads: bool = own and getattr(view, "reads_draws", False)
        nests: bool = own and getattr(view, "nests", False)
        windows = own and time_first_of(view) is not None
        before = self.view, self._reads_draws, self._nests, self._windows
        self.view, self._reads_draws, self._nests, self._windows = view, reads, nests, windows
        try:
            self.keep_rule()
        except ReliveError:
            self.view, self._reads_draws, self._nests, self._windows = before
            raise
        _READERS.update(dict.fromkeys(map(id, parts_of(view)), self))

    def keep_rule(self) -> None:
        """Apply the view's rule of what can be drawn to the ring, if it has changed."""
        ring, view = self.ring, self.view
        before, rule = ring.rule, rule_of(view)
        if rule == before:
            return
        ring.pending = Change(rule=before)
        try:
            ring.rule = rule
            self.sampler.attach(ring)
        except ReliveError:
            ring.rule = before
            ring.commit()
            raise
        ring.commit()

    def sample(
        self, count: int, update: int, of: int, standing: core.Standing | core.JoinedRows | None = None
    ) -> Batch:
        """The next batch ``[count]``, number ``update`` of the ``of`` batches of its round.

        Where one call of the core draws and reads it, it is written to ``standing`` memory, unless that is None.

        Raises:
            ReliveError: nothing can be drawn; or the view cannot read it, and then the batch counts as drawn.
        """
        view: Any = self.view
        if getattr(view, "rule", None) is not self.ring.rule:  # in place of a call that most often changes nothing
            self.keep_rule()
        progress = self.progress
        seed = progress.seed if Process.is_first else stream_of(progress.seed)
        key = stream(seed, progress.draws - progress.first)
        drawn = self.sampler.draw(count, key, update, of)
        try:
            progress.draws += 1  # before the read: a batch that the view fails to read is used up
            progress.sampled += count
            if progress.slots is not None:
                progress.keep()
            if self._own_sampler and self._reads_draws and type(drawn) is Draw:  # made by this read
                if standing is not None:
                    drawn.standing = standing
                if self._nests:
                    batch = view.read(self.ring, drawn, key, Batch)
                elif self._windows:
                    fields = view.read(self.ring, drawn, key)
                    batch = self._sequence_batch(fields, (*FACTS, *self.sampler.extras), view.time_first)
                else:
                    batch = core.nested(view.read(self.ring, drawn, key), Batch)
            else:
                places, extras = drawn if self._own_sampler else self._checked_draw(drawn, count)
                batch = self.read(places, extras, key)
            if self.prefetch is not None:
                self.prefetch.after_batch(self, count, update, of)
            return batch
        except BaseException as error:  # of the user's functions, of Ctrl-C, or of a draw that is made here
            if self._own_sampler:
                self.sampler.batch_failed()
            if isinstance(error, core.EmptyDraw):  # what it was checked for may be gone by now
                raise emptied() from error
            raise

    @property
    def writes_rows(self) -> bool:
        """True if one call of the core writes the next batch to packed rows, as :meth:`relive.ring.Ring.windows`."""
        view: Any = self.view
        late = self._own_sampler and self.sampler.draws_late
        summed = getattr(view, "each_reward", view) is None  # windows whose rows are as the core reads them
        return late and self._nests and summed and self.ring.store.packed

    def _checked_draw(self, drawn: object, count: int) -> tuple[Ints, Extras]:
        """The places and fields that a user's sampler drew, once checked.

        Raises:
            ParameterError, SchemaError: the draw has another form, or a place cannot be drawn.
        """
        who = f"{self.sampler!r}.draw({count})"
        drawn = tuple(drawn) if isinstance(drawn, Draw) else drawn
        parts = cast("tuple[object, ...]", drawn) if isinstance(drawn, tuple) else ()
        if len(parts) != 2 or not isinstance(parts[1], Mapping):
            raise ShapeError(f"{who}: expected a tuple of places [{count}] and a dict of further fields, got {drawn!r}")
        chosen, further = parts
        try:
            places = self.ring.require_anchors(chosen)
        except (ParameterError, SchemaError) as error:
            raise type(error)(f"{who}: {error}") from error
        extras = {name: as_host(value) for name, value in cast("Mapping[str, object]", further).items()}
        for name, array in {"places": places, **extras}.items():
            if array.shape[:1] != (count,) or array.dtype.kind not in "biufc":
                raise ShapeError(f"{who}: expected {count} {name}, got {array.dtype} {array.shape}")
        return places, extras

    def read(self, places: Ints, extras: Mapping[str, Array], key: int | None) -> Batch:
        """The batch of the transitions at ``places``, with the sampler's ``extras``."""
        try:
            batch = self.view.read(self.ring, places, key)
        except (ParameterError, SchemaError) as error:
            if is_own(self.view):
                raise
            raise type(error)(f"{self.view!r}: {error}") from error
        if not is_own(self.view):
            self._check_fields(batch, len(places))
        if extras:
            tensors = self.ring.tensors(*extras.values())
            for name, tensor in zip(extras, tensors, strict=True):
                if (name,) in batch and not self._own_sampler:
                    raise FieldError(
                        f"{self.sampler!r}.draw({len(places)}): its field {name!r} is one that the view reads, too; "
                        "give it another name"
                    )
                batch[name,] = tensor
        return self.assembled(batch, len(places), extras)

    def _check_fields(self, fields: object, count: int) -> None:
        """Refuse what a user's view read if it is no batch ``[count]``.

        Raises:
            FieldError, DTypeError, ShapeError: it is no dict, or one of its names or values is wrong.
        """
        who = f"{self.view!r}.read"
        if not isinstance(fields, dict):
            raise FieldError(f"{who}: expected a dict from paths to tensors, got {type(fields).__name__}")
        for path, value in cast("dict[object, object]", fields).items():
            if not isinstance(path, tuple):
                raise FieldError(f"{who}: expected paths, tuples of names such as ('obs',), got {path!r}")
            name = dotted(cast("Path", path))
            if not isinstance(value, Tensor):
                raise DTypeError(f"{who}: field '{name}': expected a tensor, got {type(value).__name__}")
            if value.shape[:1] != (count,) and time_first_of(self.view) is None:
                raise ShapeError(
                    f"{who}: field '{name}': expected {count} rows, one for each place, got shape {tuple(value.shape)}"
                )

    def assembled(self, batch: dict[Path, Tensor], count: int, extras: Iterable[str] = ()) -> Batch:
        """The batch ``[count]`` of these fields, which a sampler's ``extras`` are among."""
        time_first = time_first_of(self.view)
        if time_first is None:
            return as_batch(batch)
        return self._sequence_batch(batch, (*FACTS, *extras), time_first)

    def _sequence_batch(self, batch: dict[Path, Tensor], known: tuple[str, ...], time_first: bool) -> SequenceBatch:
        """The batch of sequences of these fields. Those named in ``known`` are facts about each sequence."""
        states: dict[Path, Tensor] = {}
        if self._has_states:
            for path in [path for path in batch if path[0] == "hidden"]:
                states[path] = swap_layers(batch.pop(path)).contiguous()
        fields = core.nested(batch, Batch, {}, known)
        if states:
            fields["hidden"] = self.schema.rebuild("hidden", states.__getitem__)
        return SequenceBatch(fields, known, time_first)


def require_view(view: object) -> None:
    """Require a view.

    Raises:
        ParameterError: it is a class, or has no ``read``.
    """
    refuse_class("view", view)
    if not hasattr(view, "read"):
        raise ParameterError(f"view={view!r}: expected a view, such as NStep(3, gamma=0.99) or Transition()")


def require_parts(sampler: AnySampler | None, view: View | None) -> None:
    """Require a sampler and a view, if there are any, before files are read: such an error is not one of theirs.

    Raises:
        ParameterError: names the part that is none.
    """
    if sampler is not None:
        with_defaults(sampler)
    if view is not None:
        require_view(view)


_READERS: WeakValueDictionary[int, Reader] = WeakValueDictionary()
"""Readers by the id of their view, because some views can be neither hashed nor weakly referenced."""


WRITTEN = 2**16
"""Bytes of each env, after its newest row, that are asked for before they are overwritten."""


FARTHEST = 4096
"""The most rows that are asked for before and after a predicted row."""


class Prefetch:
    """Asks the system for the rows of the next batch, which is a function of the seed and its number.

    The rows are a prediction: no draw depends on it. The caller holds the replay's lock.

    Args:
        ring: the rows, in files.
        allocator: their memory.
    """

    def __init__(self, ring: Ring, allocator: MappedAllocator) -> None:
        self._ring = ring
        self.ahead: LookAhead = LookAhead(
            allocator, [ring.store.target, *cast("ReplayRows", ring.store).blocks.values()]
        )
        """Asks the system for rows."""
        self._last = 0, 1, 1
        """The last batch: its size, its number in its round, and the number of batches in the round."""
        self._updated = self._waits = False
        self._heads: Ints = ring.heads.copy()
        self._looked = -1
        """The number of batches at the last look, when the heads were these."""
        self._parts: Ints = np.full(ring.num_envs, -1, np.int64)
        """The number of the part of its ring that each env was in at the last look."""
        self._part_rows = max(WRITTEN // max(1, self.ahead.row_bytes), 1)

    def after_batch(self, reader: Reader, batch_size: int, update: int, of: int) -> None:
        """Note that a batch was drawn, and look ahead.

        If priorities come after each batch, the next batch depends on them. Then the look waits for
        :meth:`after_update`.
        """
        self._last, self._waits, self._updated = (batch_size, update, of), self._updated, False
        if not self._waits and self.ahead.is_wanted():
            self._look(reader)

    def after_update(self, reader: Reader) -> None:
        """Note that priorities were updated, and look ahead if a look waits for them."""
        self._updated = True
        if self._waits and self.ahead.is_wanted():
            self._waits = False
            self._look(reader)

    def _look(self, reader: Reader) -> None:
        """Ask for the rows of the next batch, and for those that will be overwritten next."""
        ring, progress, (batch_size, update, of) = self._ring, reader.progress, self._last
        key = core.key(stream_of(progress.seed), progress.draws - progress.first)
        try:
            places = likely_places(reader.sampler, ring, batch_size, key, update % of + 1, of)
        except (ReliveError, core.EmptyDraw):  # if it is a real error, the next draw raises it
            places = None
        before, after = self._reach(reader)
        begins, ends = self._written()
        if places is not None:
            places = places[(places >= 0) & (places < ring.store.num_rows)]  # an altered file can name others
            env_begins = places // ring.rows * ring.rows  # the rows on both sides of an env's are those of other envs
            begins = np.concatenate([np.maximum(places - before, env_begins), begins])
            ends = np.concatenate([np.minimum(places + after, env_begins + ring.rows), ends])
        if len(begins):
            self.ahead.ask(begins, ends)

    def _reach(self, reader: Reader) -> tuple[int, int]:
        """The numbers of rows before and after a predicted row to ask for.

        As steps come, the rows that can be drawn move on. The rows are expected to move on as far before the next batch
        as they did before the last one, if there was a look then.
        """
        ring, draws = self._ring, reader.progress.draws
        added = int((ring.heads - self._heads).sum()) if draws == self._looked + 1 else 0
        moved = -(-added // ring.num_envs)
        self._heads, self._looked = ring.heads.copy(), draws
        back = 0 if not reader.sampler.watches else 2 * added
        n = getattr(parts_of(reader.view)[-1], "n", 1)  # in a user's own view, n may mean anything
        ahead = (n if is_count(n) else 1) + 1 + moved + back
        return min(rule_of(reader.view).history + back, FARTHEST), min(ahead, FARTHEST)

    def _written(self) -> tuple[Ints, Ints]:
        """The rows that will be overwritten next, in each env that has reached a new part of its ring: begins, ends."""
        ring, part = self._ring, self._part_rows
        envs = np.flatnonzero(ring.heads // part != self._parts)
        self._parts[envs] = ring.heads[envs] // part
        first = ring.heads[envs] % ring.rows  # the next step goes there; the ring's seam ends the range
        begins = envs * ring.rows + first
        return begins, envs * ring.rows + np.minimum(first + 2 * part, ring.rows)
