"""Lane: a ring of vector steps in shared memory, which one process writes and another one reads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import kernels
from ..errors import InvariantError
from ..kernels.lane_state import COMMITTED, COUNTERS, DRAINED, FOLLOWED, MASKED, LaneArrays
from ..memory.copier import StepCopier
from ..memory.layout import typed
from ..replay.fields import stored_fields
from ..steps.arrays import NUMPY_DTYPES, Array, numpy_dtype
from ..steps.checker import StepChecker
from ..steps.schema import Schema
from ..steps.trees import Path

__all__ = ["HEADER", "LINE", "Lane", "LaneLayout"]

LINE = 64
"""Bytes of a cache line. Parts begin at multiples of it, so that two processes never write to the same line."""

HEADER = 2 * LINE
"""Bytes before the first lane: a cache line for the owner's bell, and one that notes whether an owner ever came."""

Bytes = NDArray[np.uint8]


class LaneLayout:
    """Where the parts of a lane lie in its memory: its counters, the marks of its steps, and a column for each field.

    Args:
        schema: the fields of a step, as a replay has them.
        num_envs: N, the envs of a writer.
        steps: S, how many vector steps a lane holds.
        own_next_obs: whether every step comes with its next observations.

    Raises:
        SchemaError: a replay cannot have this schema.
    """

    def __init__(self, schema: Schema, num_envs: int, steps: int, own_next_obs: bool) -> None:
        self.num_envs, self.steps, self.own_next_obs = num_envs, steps, own_next_obs
        self.stored = stored_fields(schema, own_next_obs)
        self.fields = self.stored if own_next_obs else self.stored.extend(next_obs=self.stored["obs"])
        """All fields that a step may have. The leaves of the stored fields come first."""
        self.shapes: dict[Path, tuple[int, ...]] = {
            path: (steps, num_envs, *field.shape) for path, field in self.fields.leaves.items()
        }
        self._offsets: dict[Path, int] = {}
        self._bell, self._marks = _up(8 * COUNTERS), _up(8 * COUNTERS) + LINE
        self._mask = end = self._marks + _up(steps)
        end += _up(steps * num_envs)
        for path, field in self.fields.leaves.items():
            self._offsets[path] = end
            end += _up(math.prod(self.shapes[path]) * field.dtype.itemsize)
        self.nbytes = end

    def part(self, memory: Bytes, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array over the memory of a lane, from byte ``offset`` on."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return memory[offset : offset + size].view(dtype).reshape(shape)

    def columns(self, memory: Bytes) -> dict[Path, Array]:
        """The fields ``[S, N, ...]`` of a lane, of the dtypes that NumPy has for them."""
        return {
            path: self.part(memory, self._offsets[path], self.shapes[path], numpy_dtype(field.dtype))
            for path, field in self.fields.leaves.items()
        }

    def counters(self, memory: Bytes) -> tuple[Any, Any, Any, Any]:
        """The counters, the bell that rings when there is room, the marks ``[S]`` and the mask ``[S, N]``."""
        rows = self.steps, self.num_envs
        return (
            self.part(memory, 0, (COUNTERS,), np.int64),
            self.part(memory, self._bell, (1,), np.int32),
            self.part(memory, self._marks, rows[:1], np.uint8),
            self.part(memory, self._mask, rows, np.uint8),
        )


class Lane:
    """One lane: what its writer writes and its owner reads.

    The writer first copies a step, and then raises the counter of committed steps. The owner reads only committed
    steps. So it never reads half a step, and a killed writer leaves at most one unfinished step, which is never read.

    Args:
        layout: where the parts lie.
        memory: uint8 ``[layout.nbytes]``.
        filled: int32 ``[2]``: the owner's bell, and the number of steps that must wait in a lane before it rings.
    """

    def __init__(self, layout: LaneLayout, memory: Bytes, filled: NDArray[np.int32]) -> None:
        self.layout, self.filled = layout, filled
        self.columns = layout.columns(memory)
        self._counters, self.drained_bell, self._marks, self.mask = layout.counters(memory)
        terminated, truncated = (self.columns[name,].view(np.uint8) for name in ("terminated", "truncated"))
        arrays = LaneArrays(self._counters, filled, self._marks, terminated, truncated, self.mask)
        fast = kernels.fast()
        self._handle, self._commit = fast.handle_of(arrays), fast.commit_step
        self._published, self._publish = fast.published, fast.publish

    # -- the writer's side --------------------------------------------------------------------------------------

    def check(self) -> tuple[StepChecker, StepChecker, StepCopier, StepCopier]:
        """Two checkers and two copiers: for a step without next observations, and for a step with them."""
        cpu, layout = torch.device("cpu"), self.layout
        checkers = [StepChecker(s, layout.num_envs, cpu, upload=False) for s in (layout.stored, layout.fields)]
        copiers = [self._copier(len(s.leaves)) for s in (layout.stored, layout.fields)]
        return checkers[0], checkers[1], copiers[0], copiers[1]

    def _copier(self, count: int) -> StepCopier:
        """The copier of the first ``count`` leaves into a row of the lane."""
        fields = list(self.layout.fields.leaves.values())[:count]
        targets = list(self.columns.values())[:count]
        return StepCopier(
            [field.dtype for field in fields], targets, self.layout.num_envs, [field.shape for field in fields]
        )

    def commit(self, number: int, marks: int) -> int:
        """See :func:`relive.kernels.reference.counters.commit_step`."""
        return self._commit(self._handle, number, marks)

    # -- the owner's side ---------------------------------------------------------------------------------------

    def require_sound(self) -> None:
        """Test the counters before rows are looked up with them.

        Raises:
            InvariantError: a process has overwritten them.
        """
        committed, drained = self.committed, self.drained
        if not 0 <= drained <= committed <= drained + self.layout.steps:
            raise InvariantError(
                f"a lane of {self.layout.steps} steps: {committed} committed and {drained} drained; another process "
                "wrote to its memory"
            )

    @property
    def committed(self) -> int:
        """How many steps were ever committed."""
        return self._published(self._counters, COMMITTED)

    @property
    def drained(self) -> int:
        """How many steps the owner has taken."""
        return self._published(self._counters, DRAINED)

    def give_back(self, number: int) -> bool:
        """Free the rows of all steps before ``number``; returns whether the writer sleeps and must be woken."""
        return bool(self._publish(self._counters, DRAINED, number, self.drained_bell, 0))

    def marks(self, low: int, high: int) -> Bytes:
        """The marks of the steps from number ``low`` up to ``high``, or up to the lane's last row."""
        row = low % self.layout.steps
        return self._marks[row : row + high - low]

    def read(self, number: int, count: int, marks: int) -> dict[str, Any]:
        """Steps as :meth:`relive.ReplayBuffer.extend` takes them, ``[T, N, ...]``, over the lane's own memory.

        Args:
            number: the number of the first step.
            count: T, the number of steps. Their rows lie in one piece of memory.
            marks: the marks that any of the steps has.
        """
        row, layout = number % self.layout.steps, self.layout
        rows = slice(row, row + count)

        def leaf(path: Path) -> Any:
            part, dtype = self.columns[path][rows], layout.fields.leaves[path].dtype
            return part if dtype in NUMPY_DTYPES else typed(part, dtype)

        known = layout.fields if marks & FOLLOWED else layout.stored
        steps = {name: known.rebuild(name, leaf) for name in known.names}
        if marks & MASKED:
            steps["mask"] = self._mask(rows)
        return steps

    def rows(self, number: int, count: int, marks: int) -> int:
        """How many steps :meth:`read` gives, counted over all envs, without those that are masked out."""
        if not marks & MASKED:
            return count * self.layout.num_envs
        row = number % self.layout.steps
        return int(np.count_nonzero(self._mask(slice(row, row + count))))

    def _mask(self, rows: slice) -> NDArray[np.bool_]:
        """Which steps are kept, bool ``[T, N]``. A vector step without a mask keeps those of all envs."""
        unmasked = self._marks[rows] & MASKED == 0
        return (self.mask[rows] | unmasked[:, None]).view(np.bool_)


def _up(nbytes: int) -> int:
    """Round up to whole cache lines."""
    return -(-nbytes // LINE) * LINE
