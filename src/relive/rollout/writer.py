"""Writer: writes the steps of a rollout; an interrupted call leaves the rollout as before or as after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..batches.tensordicts import as_tensordict
from ..errors import (
    DTypeError,
    FieldError,
    FullError,
    LifecycleError,
    NotFiniteError,
    ParameterError,
    SchemaError,
    ShapeError,
)  # fmt: skip
from ..memory.copier import StepCopier
from ..parameters import FLAG_RULE, Rule, is_whole, require
from ..steps.arrays import as_host, as_tensor, check_castable
from ..steps.checker import refuse_unreadable
from ..steps.schema import Spec
from ..steps.trees import Path, dotted
from .columns import Columns
from .episodes import Episodes
from .fields import KEPT_APART, Fields
from .named import NamedColumns
from .states import KeptStates

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["Writer"]


WATCHED = {"reward": "env", "value": "policy"}
"""The fields that have to be finite in debug mode, and what gives them."""


WHOLE_RULE: Rule = (lambda steps: steps is None or is_whole(steps), "expected a whole number of steps, or None")


class Writer:
    """Writes into a rollout: step by step, in place, the bootstrap row, and where episodes break off.

    Ctrl-C may interrupt a call at any line. So what it writes becomes part of the rollout in one line, the last one.
    What it overwrites leaves the rollout in one line, before the first write.

    Args:
        fields: of the rollout.
        columns: of the rollout.
        named: the columns by name.
        episodes: of the rollout.
        states: of the rollout.
        debug: refuse rewards and values that are not finite.
        preset: whether the masks of all rows are written at once, which takes memory for every row.
    """

    def __init__(
        self,
        fields: Fields,
        columns: Columns,
        named: NamedColumns,
        episodes: Episodes,
        states: KeptStates,
        *,
        debug: bool,
        preset: bool,
    ) -> None:
        self._fields, self._columns, self._named = fields, columns, named
        self._episodes, self._states, self.debug = episodes, states, debug
        self.has_last = False
        """Whether the value of the bootstrap row is written."""
        self._reserved = 0
        """How many rows after the newest are reserved."""
        self._handed: list[tuple[Path, Tensor, int]] = []
        """The path, the view and the address of each reserved column."""
        if preset:
            self._write_apart(slice(None), {})
        self._apart_used = not preset
        """Whether a row that is not written yet may hold another mask or final value than the defaults."""

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: everything but the views that :meth:`reserve` handed out."""
        return {**self.__dict__, "_handed": []}

    # -- step by step -------------------------------------------------------------------------------------------

    def add(self, values: dict[str, Any]) -> None:
        """Append one vector step; ``values`` is used up."""
        columns, check, copier = self._columns, self._fields.check, self._columns.copier
        # the next row is free, unless it has an old step or the bootstrap values
        if columns.count < columns.num_steps and not self.has_last and copier is not None and self._states.rows is None:
            row, plain = columns.next_row, len(values) == check.size and not self._apart_used
            if copier.take(row, values, check.pick) if plain else self._take_whole(row, values, copier):
                if self.debug:
                    self._refuse_nonfinite(values)
                self._advance(1)
                return
        self._add(values)

    def _take_whole(self, row: int, values: dict[str, Any], copier: StepCopier) -> bool:
        """Copy a step to a free row with its mask and final values, if all of it can be copied as it is."""
        check, defaults = self._fields.whole
        step = {**defaults, **values}
        if len(step) != check.size:
            return False
        self._apart_used = True  # before the write, in case it is interrupted
        if copier.take(row, step, check.pick):
            return True
        try:
            copier.learn(check.pick(step))
        except Exception:  # the caller finds out what is wrong
            return False
        return copier.take(row, step, check.pick)

    def _add(self, values: dict[str, Any]) -> None:
        """Check each part of a step, then write it."""
        apart: dict[str, Any] = {}
        for name in KEPT_APART:
            if name in values:
                (apart[name],) = self._fields.checked(name, values.pop(name)).values()
        columns, states = self._columns, self._states.rows
        try:
            checked = self._fields.check(values, None if states else columns.copier)
        except (RuntimeError, TypeError):
            refuse_unreadable(values)
            raise
        row = columns.next_row
        if self.debug:
            self._refuse_nonfinite(values)
        self.has_last = False  # the bootstrap row may be the one that is written
        if states is not None:
            checked = self._states.write(states, row, checked)
        if columns.wrap and columns.is_full:
            self._give_up(slice(row, row + 1))
        columns.write(row, checked)
        if apart or self._apart_used:
            self._write_apart(row, apart)
        self._advance(1)

    def _advance(self, rows: int, last: bool = False) -> None:
        """Take in the next rows, which are written; they belong to the rollout from the last line on."""
        columns, episodes = self._columns, self._episodes
        self._apart_used |= columns.wrap and columns.is_full
        self._handed = []
        columns.detach()
        columns.count, episodes.interrupted, self._reserved, self.has_last = columns.count + rows, False, 0, last

    def _give_up(self, rows: slice) -> None:
        """Drop the oldest rows, at these places; whether their episodes ended is still known."""
        columns, count = self._columns, rows.stop - rows.start
        ended = self._episodes.ended_after(rows)
        columns.detach()
        start = (columns.start + count) % columns.num_steps
        self._episodes.ended, columns.start, columns.count = ended, start, columns.count - count  # at once

    def _write_apart(self, rows: int | slice, given: Mapping[str, Any]) -> None:
        """Write the mask and the final values of rows: as given, or their defaults."""
        self._apart_used = True  # before the write, in case it is interrupted
        for (name,) in self._fields.apart:
            self._columns.put((name,), rows, given.get(name, KEPT_APART[name]))

    def _refuse_nonfinite(self, values: Mapping[str, Any], steps: int = 1) -> None:
        """Refuse rewards and values of the next ``steps`` steps that are not finite; they fit otherwise."""
        for name, mend in WATCHED.items():
            if name not in values or (name,) not in self._columns.own:  # it may be nested
                continue
            given = values[name]
            if isinstance(given, Tensor):
                finite = bool(given.isfinite().all())
            else:
                finite = bool(
                    np.logical_and.reduce(np.isfinite(as_host(given, name)), None)
                )  # as all(), which is slower
            if not finite:
                numbers, envs = as_host(given, name).reshape(-1), self._columns.num_envs
                position = int(np.argmin(np.isfinite(numbers)))
                step, env = divmod(position * steps * envs // numbers.size, envs)
                raise NotFiniteError(
                    f"field '{name}': step {self._columns.count + step} of env {env} is {float(numbers[position])}; "
                    f"fix the {mend}"
                )

    def add_fields(self, fields: Mapping[str, Spec]) -> None:
        """Add fields to the steps from now on."""
        schema = self._fields.schema
        wider = schema.extend(**fields)
        taken = [name for name in fields if name in KEPT_APART or (name in self._named and name not in schema)]
        taken += [dotted(path) for path, field in schema.leaves.items() if wider.leaves.get(path) != field]
        if taken or wider.leaves == schema.leaves:
            name = (taken or list(fields))[0]
            raise SchemaError(f"field '{name}': this rollout has such a column already; give it another name")
        if self._reserved or self._states.rows is not None:
            raise LifecycleError(
                "add_fields(): rows are reserved, or hidden_every > 1; call it before reserve(), with hidden_every=1"
            )
        self._fields.require_memory({path: leaf for path, leaf in wider.leaves.items() if path not in schema.leaves})
        known, columns = self._fields, self._columns
        following, including = known.following(wider), columns.including(known.own_of(wider))
        known.__dict__, columns.__dict__ = following, including  # at once, as values are told by their position

    # -- in place -----------------------------------------------------------------------------------------------

    def reserve(self, steps: int | None) -> TensorDict:
        """Hand out the next rows as views ``[steps, N]``."""
        if self._states.rows is not None:
            raise LifecycleError("reserve() hands out every row; create the buffer with hidden_every=1, or use add()")
        require("reserve", WHOLE_RULE, steps=steps)
        columns = self._columns
        row = columns.next_row
        left = columns.num_steps - row
        count = left if steps is None else int(steps)
        if not 1 <= count <= left:
            raise FullError(f"reserve({count}): {left} rows are left in one piece; reserve 1 to {left}")
        rows, leaving = slice(row, row + count), columns.count + count - columns.num_steps
        self.has_last = False
        if leaving > 0:
            self._give_up(slice(row + count - leaving, row + count))
        self._write_apart(rows, {})
        self._reserved = count
        tensors = {path: columns.view(path, rows) for path in columns.own}
        if columns.device.type == "cpu":
            self._handed = [(path, tensor, tensor.data_ptr()) for path, tensor in tensors.items()]
        return as_tensordict(tensors, (count, columns.num_envs))

    def commit(self, steps: int | None, last: bool) -> None:
        """Take in the first ``steps`` reserved rows."""
        require("commit", WHOLE_RULE, steps=steps)
        require("commit", FLAG_RULE, last=last)
        count = self._reserved if steps is None else int(steps)
        if not 1 <= count <= self._reserved:
            raise LifecycleError(
                f"commit({'' if steps is None else steps}): {self._reserved} rows are reserved; call reserve() "
                "and fill the rows before you commit them"
            )
        columns = self._columns
        rows = slice(columns.next_row, columns.next_row + count)
        for path, tensor, place in self._handed:
            if tensor.data_ptr() != place:  # the view was shared or sent, so it was written elsewhere
                columns.put(path, rows, tensor[:count])
        if self.debug:
            watched = {path[0]: columns.view(path, rows) for path in columns.own if path[0] in WATCHED}
            self._refuse_nonfinite(watched, count)
        self._advance(count, last)

    # -- besides the steps --------------------------------------------------------------------------------------

    def set_last(self, fields: Mapping[str, Any]) -> None:
        """Write fields of the bootstrap row."""
        for name in KEPT_APART:
            if name in fields:
                raise FieldError(f"field '{name}': the bootstrap row is not a step and has none; pass it to add()")
        checked = [self._fields.checked(name, value) for name, value in fields.items()]
        had, self.has_last = self.has_last, False  # a row that is half written does not count
        for leaves in checked:
            for path, value in leaves.items():
                self._columns.put(path, self._columns.last_row, value)
        self.has_last = had or "value" in fields

    def set_final_value(self, steps: Any, envs: Any, values: Any) -> None:
        """Write V(true final observation) of some steps: three vectors ``[K]``."""
        if ("final_value",) not in self._fields.apart:
            raise FieldError("field 'final_value': the schema has no 'value'; add value=() to it")
        target = self._columns.view(("final_value",))
        rows, columns = _numbers(steps, "steps"), _numbers(envs, "envs")
        given = values.detach() if isinstance(values, Tensor) else as_tensor(values, "final_value")
        vectors = rows.dim() == 1 and rows.shape == columns.shape == given.shape[:1]
        if not vectors or given.shape[1:] != target.shape[2:]:
            raise ShapeError(
                f"set_final_value: expected three vectors of one length, got {tuple(rows.shape)}, "
                f"{tuple(columns.shape)}, {tuple(given.shape)}"
            )
        count, num_envs = self._columns.count, self._columns.num_envs
        beyond = (rows < 0) | (rows >= count) | (columns < 0) | (columns >= num_envs)
        if bool(beyond.any()):
            step, env = (int(vector[beyond][0]) for vector in (rows, columns))
            raise ParameterError(
                f"set_final_value: got step {step} of env {env}; steps are 0 to {count - 1}, envs 0 to {num_envs - 1}"
            )
        check_castable(given, target.dtype, "final_value")
        rows = self._columns.place(rows).to(target.device)
        target[rows, columns.to(target.device)] = given.to(device=target.device, dtype=target.dtype)

    def clear(self) -> None:
        """Forget the rollout; the memory stays."""
        columns, episodes = self._columns, self._episodes
        ended = episodes.ended_by_now()
        self._apart_used, self.has_last, self._reserved = True, False, 0
        columns.detach()
        episodes.ended, episodes.interrupted, columns.start, columns.count = ended, False, 0, 0  # at once
        self._write_apart(slice(None), {})  # always, since masks may have been written through a view
        self._apart_used = False
        self._handed = []

    def interrupt(self) -> None:
        """Break off the episodes under way."""
        columns, named = self._columns, self._named
        if not columns.count:
            self._episodes.ended = np.ones(columns.num_envs, np.bool_)
        if not columns.count or (columns.is_full and not columns.wrap):
            self._episodes.interrupted = bool(columns.count)
            return
        truncated = named["truncated"].clone()
        going_on = ~(named["terminated"][-1] | truncated[-1])
        truncated[-1] |= going_on
        envs = (going_on & named["mask"][-1]).nonzero().squeeze(1)
        if "value" in self._fields.schema and self.has_last and len(envs):  # first: it is read where truncated is set
            self.set_final_value(torch.full_like(envs, columns.count - 1), envs, named.last()["value"][envs])
        named.attach({"truncated": truncated})


def _numbers(values: Any, name: str) -> Tensor:
    """Numbers of steps or envs, int64 ``[K]``.

    Raises:
        ShapeError: this is no array.
        DTypeError: it has no whole numbers.
    """
    given = values if isinstance(values, Tensor) else as_tensor(values, name)
    if given.dtype is torch.bool or given.is_quantized or given.layout is not torch.strided:
        raise DTypeError(f"field '{name}': expected whole numbers, got {given.dtype} of layout {given.layout}")
    if given.numel():
        check_castable(given, torch.int64, name)
    return given.long()
