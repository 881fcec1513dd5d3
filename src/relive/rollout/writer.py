"""Writer: what writes the steps of a rollout, so that a call that is broken off leaves it as before or as after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..batches.tensordicts import as_tensordict
from ..errors import FieldError, FullError, LifecycleError, NotFiniteError, ParameterError, SchemaError, ShapeError
from ..steps.arrays import as_tensor, check_castable
from ..steps.checker import refuse_sparse
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


class Writer:
    """Writes into a rollout: step by step, in place, the bootstrap row, and where episodes break off.

    A call may be broken off at any line (Ctrl-C). What it writes becomes part of the rollout in one line, after all
    else; what it overwrites is given up in one line before.

    Args:
        fields: of the rollout.
        columns: of the rollout.
        named: the same by name.
        episodes: of the rollout.
        states: of the rollout.
        debug: refuse rewards that are not finite.
        preset: whether the masks of all rows are written beforehand, which takes memory for each.
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
        """How many rows after the newest are handed out."""
        self._handed: list[tuple[Path, Tensor, int]] = []
        """Their columns, and the addresses of those."""
        if preset:
            self._write_apart(slice(None), {})
        self._apart_used = not preset
        """Whether rows to come may hold other bookkeeping than the defaults."""

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: everything but the reserved rows that somebody else may hold."""
        return {**self.__dict__, "_handed": []}

    # -- step by step -------------------------------------------------------------------------------------------

    def add(self, values: dict[str, Any]) -> None:
        """Append one vector step; ``values`` is used up."""
        apart: dict[str, Any] = {}
        for name in KEPT_APART:
            if name in values:
                (apart[name],) = self._fields.checked(name, values.pop(name)).values()
        columns, states = self._columns, self._states.rows
        try:
            checked = self._fields.check(values, None if states else columns.copier)
        except (RuntimeError, TypeError):
            refuse_sparse(values)
            raise
        row = columns.next_row
        if self.debug and "reward" in values:
            reward = values["reward"]
            self._refuse_nonfinite(reward if isinstance(reward, Tensor) else as_tensor(reward, "reward"), 1)
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
        """The next rows are written, and are part of the rollout from the last line on."""
        columns, episodes = self._columns, self._episodes
        self._apart_used |= columns.wrap and columns.is_full
        self._handed = []
        columns.detach()
        columns.count, episodes.interrupted, self._reserved, self.has_last = columns.count + rows, False, 0, last

    def _give_up(self, rows: slice) -> None:
        """The oldest rows, at these places, leave the rollout; what they say of the next ones stays."""
        columns, count = self._columns, rows.stop - rows.start
        ended = self._episodes.ended_after(rows)
        columns.detach()
        start = (columns.start + count) % columns.num_steps
        self._episodes.ended, columns.start, columns.count = ended, start, columns.count - count  # at once

    def _write_apart(self, rows: int | slice, given: Mapping[str, Any]) -> None:
        """Mask and final values of rows that are, or will be, written: as given, else True and NaN."""
        self._apart_used = True  # rows to come may hold something else than the defaults
        for (name,) in self._fields.apart:
            default = True if name == "mask" else float("nan")
            self._columns.put((name,), rows, given.get(name, default))

    def _refuse_nonfinite(self, reward: Tensor, steps: int) -> None:
        """Look at the rewards of the next ``steps`` steps, checked already."""
        finite = reward.isfinite()
        if not bool(finite.all()):
            position, envs = int((~finite).flatten().nonzero()[0]), self._columns.num_envs
            step, env = divmod(position * steps * envs // reward.numel(), envs)
            raise NotFiniteError(
                f"field 'reward': step {self._columns.count + step} of env {env} is "
                f"{float(reward.flatten()[position])}; mend the env"
            )

    def add_fields(self, fields: Mapping[str, Spec]) -> None:
        """From now on a step has these fields as well."""
        schema = self._fields.schema
        wider = schema.extend(**fields)
        taken = [name for name in fields if name in KEPT_APART or (name in self._named and name not in schema)]
        taken += [dotted(path) for path, field in schema.leaves.items() if wider.leaves.get(path) != field]
        if taken or wider.leaves == schema.leaves:
            name = (taken or list(fields))[0]
            raise SchemaError(f"field '{name}': this rollout has such a column already; give it another name")
        if self._reserved or self._states.rows is not None:
            raise LifecycleError("add_fields() finds rows reserved, or hidden_every above 1; call it before reserve()")
        self._fields.require_memory({path: leaf for path, leaf in wider.leaves.items() if path not in schema.leaves})
        self._fields.follow(wider)
        self._columns.include(self._fields.own)

    # -- in place -----------------------------------------------------------------------------------------------

    def reserve(self, steps: int | None) -> TensorDict:
        """Hand out the next rows as views ``[steps, N]``."""
        if self._states.rows is not None:
            raise LifecycleError("reserve() hands out every row; create the buffer with hidden_every=1, or use add()")
        columns = self._columns
        row = columns.next_row
        left = columns.num_steps - row
        count = left if steps is None else steps
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
        """The first ``steps`` reserved rows are written."""
        count = self._reserved if steps is None else steps
        if not 1 <= count <= self._reserved:
            raise LifecycleError(
                f"commit({'' if steps is None else steps}): reserved are {self._reserved} rows; reserve rows and fill "
                "them before they are committed"
            )
        columns = self._columns
        rows = slice(columns.next_row, columns.next_row + count)
        for path, tensor, place in self._handed:
            if tensor.data_ptr() != place:  # it was shared or sent meanwhile, and written elsewhere than here
                columns.put(path, rows, tensor[:count])
        if self.debug and ("reward",) in columns.own:
            self._refuse_nonfinite(columns.view(("reward",), rows), count)
        self._advance(count, last)

    # -- beside the steps ---------------------------------------------------------------------------------------

    def set_last(self, fields: Mapping[str, Any]) -> None:
        """Write fields of the bootstrap row."""
        for name in KEPT_APART:
            if name in fields:
                raise FieldError(f"field '{name}': it belongs to a step, and the bootstrap row is none")
        checked = [self._fields.checked(name, value) for name, value in fields.items()]
        had, self.has_last = self.has_last, False  # half of it is none
        for leaves in checked:
            for path, value in leaves.items():
                self._columns.put(path, self._columns.last_row, value)
        self.has_last = had or "value" in fields

    def set_final_value(self, steps: Any, envs: Any, values: Any) -> None:
        """Write V(true final observation) of some steps: three vectors ``[K]``."""
        if ("final_value",) not in self._fields.apart:
            raise FieldError("field 'final_value': the schema has no 'value'; add value=() to it")
        target = self._columns.view(("final_value",))
        rows, columns = torch.as_tensor(steps), torch.as_tensor(envs)
        for name, index in (("steps", rows), ("envs", columns)):
            check_castable(index if index.numel() else index.long(), torch.int64, name)
        rows, columns = rows.long(), columns.long()
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
            raise ParameterError(f"set_final_value: steps are below {count}, envs below {num_envs}")
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
        self._write_apart(slice(None), {})  # always: masks may also have been written through a view
        self._apart_used = False
        self._handed = []

    def interrupt(self) -> None:
        """The episodes under way will not go on."""
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
