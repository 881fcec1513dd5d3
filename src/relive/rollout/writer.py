"""Writer: writes the steps of a rollout; an interrupted call leaves the rollout as before or as after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels
from ..batches import WHOLE, as_tensordict, swap_layers
from ..errors import (
    DTypeError,
    FieldError,
    FullError,
    LifecycleError,
    NotFiniteError,
    ParameterError,
    SchemaError,
    ShapeError,
)
from ..files.disk import fitting
from ..memory.copier import StepCopier
from ..parameters import FLAG_RULE, Rule, is_count, is_whole, require
from ..steps.arrays import Ints, as_host, as_tensor, check_castable
from ..steps.checker import refuse_unreadable
from ..steps.schema import Path, Schema, Spec, descend, dotted
from .columns import KEPT_APART, Columns, Fields, NamedColumns

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = [
    "BEGINS",
    "ENV",
    "LENGTH",
    "ORIGIN",
    "START",
    "Empty",
    "Episodes",
    "Flags",
    "KeptStates",
    "States",
    "Writer",
    "cut",
    "kept_every",
]


ENV, START, LENGTH, ORIGIN, BEGINS = range(5)
"""The columns of a table of windows: the env, the first step, how many steps, the episode's first step in this rollout
or 0, and 1 if the episode begins there."""

_CUTS = ("terminated", "truncated", "mask")
"""The columns that say where episodes end, and which steps are real."""


class Episodes:
    """The episodes of a rollout.

    Args:
        columns: of the rollout.
        named: the same by name.
    """

    def __init__(self, columns: Columns, named: NamedColumns) -> None:
        self._columns, self._named = columns, named
        self.ended: NDArray[np.bool_] = np.ones(columns.num_envs, np.bool_)
        """Whether the episode before the first row had ended, bool ``[N]``."""
        self.interrupted = False
        """Whether the episodes of the newest row were broken off, although its flags do not say so."""

    def flags(self) -> Flags:
        """Where the episodes of the present steps start and end."""
        leaves = [leaf for name in _CUTS for leaf in self._named.leaves((name,))]
        return self._flags([self._columns.ordered(leaf) for leaf in leaves])

    def _flags(self, columns: list[Tensor]) -> Flags:
        if columns[0].is_cpu:
            terminated, truncated, real = (as_host(column) for column in columns)
        else:  # in one copy: each one waits for the device
            terminated, truncated, real = as_host(torch.stack(columns))
        return Flags(terminated | truncated, real, self.ended)

    @property
    def are_known(self) -> bool:
        """Whether the steps say where episodes end."""
        return {("terminated",), ("truncated",)} <= self._columns.own

    def ended_by_now(self) -> NDArray[np.bool_]:
        """Whether the next step of each env starts an episode, bool ``[N]``."""
        if self.interrupted:
            return np.ones(self._columns.num_envs, np.bool_)
        return self.flags().ended.view(np.bool_) if self._columns.count and self.are_known else self.ended

    def ended_after(self, rows: slice) -> NDArray[np.bool_]:
        """Whether the episodes have ended after the oldest rows, which lie at these places, bool ``[N]``."""
        if not self.are_known:
            return self.ended
        return self._flags([self._columns.view((name,), rows) for name in _CUTS]).ended.view(np.bool_)


class Flags:
    """Where the episodes of a rollout start and end: ``done``, ``real`` and ``starts``, uint8 ``[T, N]``.

    Args:
        done: bool ``[T, N]``, ``terminated | truncated``.
        real: bool ``[T, N]``, the rollout's mask.
        ended: bool ``[N]``, whether the episode before the first row had ended.
    """

    def __init__(self, done: NDArray[Any], real: NDArray[Any], ended: NDArray[Any]) -> None:
        self.done, self.real = (np.ascontiguousarray(x).view(np.uint8) for x in (done, real))
        self.starts, self.ended = np.empty_like(self.done), ended.astype(np.uint8)
        """1 at the first step of an episode, ``[T, N]``; and 1 where the newest episode has ended, ``[N]``."""
        kernels.fast().episode_starts(self.done, self.real, self.ended, self.starts)


def cut(flags: Flags, length: int | None, stride: int, drop_tail: bool, complete: bool) -> Ints:
    """The windows of ``length`` steps, or of whole episodes if it is None, as a table ``[K, 5]``."""
    size, stride = WHOLE if length is None else min(length, WHOLE), min(stride, WHOLE)
    arguments = flags.done, flags.real, flags.starts, size, stride, not drop_tail or length is None, complete
    room = np.empty((flags.done.size // min(stride, size) + flags.done.size // 8 + 8, 5), np.int64)
    found = kernels.fast().plan_windows(*arguments, room)
    if found > len(room):
        room = np.empty((found, 5), np.int64)
        kernels.fast().plan_windows(*arguments, room)
    return room[:found]


Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Makes a tensor of a shape and dtype, with arbitrary contents."""


class States:
    """The recurrent states of a rollout: columns ``[T, N, ...]``, or every k-th row of them.

    Args:
        columns: path -> ``[ceil(T / every), N, ...]``.
        every: k.
        initial: the state that episodes start in, path -> ``[...]``; used where an episode's first state is not kept.
    """

    def __init__(self, columns: Mapping[Path, Tensor], every: int, initial: Mapping[Path, Tensor]) -> None:
        self._columns = {path: column.flatten(0, 1) for path, column in columns.items()}
        self._bits = {path: x.reshape(len(x), -1).view(torch.uint8) for path, x in self._columns.items()}
        self.every, self._initial = every, initial

    def first_rows(self, windows: Ints) -> Ints:
        """Where to start to unroll: at the window, at the last state kept before it, or at the episode's start."""
        start = windows[:, START]
        return start if self.every == 1 else np.maximum(start // self.every * self.every, windows[:, ORIGIN])

    def at(self, index: Any, kept: Any, empty: Empty) -> dict[Path, Tensor]:
        """The states before rows that :meth:`first_rows` gave, ``[layers, B, size]`` or ``[B, size]``.

        Args:
            index: ``[B]``, the flat place of each state: number k * N + n is that of env n at step k * every.
            kept: ``[B]``, 0 where that step is not the row itself, which then begins an episode.
            empty: makes the results.

        ``index`` and ``kept`` are arrays if the states are in RAM, and tensors if they are on a device.
        """
        found: dict[Path, Tensor] = {}
        for path, column in self._columns.items():
            state = empty((len(index), *column.shape[1:]), column.dtype)
            if column.is_cpu:
                bits = state.view(len(index), -1).view(torch.uint8).numpy()
                bad = kernels.fast().take_rows(self._bits[path].numpy(), index, bits)
                assert bad < 0, "a window begins outside the rollout"
            else:
                torch.index_select(column, 0, index, out=state)
            if self.every > 1:
                state[torch.as_tensor(kept == 0)] = self._initial[path]
            swapped = swap_layers(state)
            if not swapped.is_contiguous():
                swapped = empty(tuple(swapped.shape), column.dtype).copy_(swapped)
            found[path] = swapped
        return found


def kept_every(every: int, schema: Schema, wrap: bool) -> int:
    """How many steps lie between two recurrent states that are kept.

    Raises:
        ParameterError: not a positive number, or above 1 where there are no states, or where the rollout wraps.
    """
    if not is_count(every, 1) or (every > 1 and (wrap or "hidden" not in schema)):
        raise ParameterError(
            f"hidden_every={every!r}: expected at least 1; more than that needs a field 'hidden', and no wrap"
        )
    return int(every)


class KeptStates:
    """Where the recurrent states of a rollout are kept: in columns like all others, or in ``rows`` of their own.

    Args:
        fields: of the rollout; where ``fields.every`` is k > 1, only the states of steps 0, k, 2k, ... are kept.
        columns: of the rollout.
    """

    def __init__(self, fields: Fields, columns: Columns) -> None:
        self._fields, self._columns = fields, columns
        self.initial: Any = None
        """The state that episodes start in, nested as ``hidden`` without the env axis; None is zeros."""
        self.rows: Columns | None = None
        """One row for every k steps, if k is above 1."""
        if fields.every > 1:
            hidden = {path: field for path, field in fields.schema.leaves.items() if path[0] == "hidden"}
            self.rows = Columns(hidden, -(-fields.num_steps // fields.every), fields.num_envs, fields.device, False)

    def write(self, rows: Columns, row: int, checked: Sequence[Any]) -> list[Any]:
        """Keep the states of a step if it is a k-th one; returns the other values of the step."""
        sparse = [path[0] == "hidden" for path in self._fields.schema.leaves]
        if row % self._fields.every == 0:
            states = [value for value, apart in zip(checked, sparse, strict=True) if apart]
            rows.write(row // self._fields.every, states)
        return [value for value, apart in zip(checked, sparse, strict=True) if not apart]

    def reader(self) -> States | None:
        """What reads the states; None if the schema has no ``hidden``."""
        hidden = [path for path in self._fields.schema.leaves if path[0] == "hidden"]
        if not hidden:
            return None
        if self.rows is None:
            return States({path: self._columns.ordered(path) for path in hidden}, 1, {})
        initial = {path: self._initial_of(path) for path in hidden}
        return States({path: self.rows.view(path) for path in hidden}, self._fields.every, initial)

    def _initial_of(self, path: Path) -> Tensor:
        leaf, device = self._fields.schema.leaves[path], self._fields.device
        if self.initial is None:
            return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
        return torch.as_tensor(descend(self.initial, path[1:])).detach().to(device, leaf.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """What a save holds of them besides the columns, by name."""
        if self.rows is None:
            return {}
        states = {f".states.{dotted(path)}": self.rows.view(path) for path in self.rows.own}
        return states | {f".initial.{dotted(path)}": self._initial_of(path) for path in self.rows.own}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put what :meth:`tensors` gave back.

        Raises:
            FileFormatError, ValueError, KeyError, RuntimeError: it does not fit.
        """
        if self.rows is None:
            return
        initial: dict[Path, Tensor] = {}
        for path in self.rows.own:
            state, leaf = self.rows.view(path), self._fields.schema.leaves[path]
            state.copy_(fitting(tensors, f".states.{dotted(path)}", tuple(state.shape), state.dtype))
            initial[path] = fitting(tensors, f".initial.{dotted(path)}", leaf.shape, leaf.dtype)
        self.initial = self._fields.schema.rebuild("hidden", initial.__getitem__)


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
