"""Chunks: vector steps as plain arrays, which another process can add to its replay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..parameters import Rule, require
from ..replay.fields import stored_fields
from ..steps.arrays import NUMPY_DTYPES, numpy_dtype, numpy_view
from ..steps.checker import StepChecker
from ..steps.schema import Schema
from ..steps.trees import Path

__all__ = ["FILLED_RULE", "SINK_RULE", "Chunks", "StepSink"]


class StepSink(Protocol):
    """What takes steps as a replay does, such as a writer of :class:`relive.Lanes`."""

    schema: Schema
    """The fields of a step."""
    num_envs: int
    """N."""
    device: torch.device
    """Where the observations that the policy gets are."""
    own_next_obs: bool
    """Whether every step needs its next observation."""

    def add(self, step: Mapping[str, Any], /) -> None:
        """Store one step of every env, as :meth:`relive.ReplayBuffer.add` takes it."""
        ...

    def interrupt(self) -> None:
        """The next steps start new episodes."""
        ...


FILLED_RULE: Rule = (
    lambda sink: all(hasattr(sink, name) for name in ("schema", "num_envs", "device", "interrupt")),
    "expected a RolloutBuffer, a ReplayBuffer, or a writer of Lanes such as lanes.writer(0)",
)
"""The rule for a buffer that is filled once."""

SINK_RULE: Rule = (
    lambda sink: sink is None or FILLED_RULE[0](sink),
    "expected a RolloutBuffer, a ReplayBuffer, a writer of Lanes such as lanes.writer(0), or None",
)
"""The rule for what a collector fills."""


class Chunks:
    """Takes vector steps one by one, and returns them as :meth:`relive.ReplayBuffer.extend` takes them.

    Every step is checked as a replay would check it. Every row has a next observation, so a chunk fits every kind of
    replay.

    Args:
        schema: the fields of a step.
        num_envs: N.
        device: of the tensors in the steps. The arrays of a chunk are always in RAM.

    Raises:
        SchemaError: a replay cannot have this schema.
    """

    own_next_obs = True
    """Whether every step needs its next observation, as for a replay."""

    def __init__(self, schema: Schema, num_envs: int, device: torch.device) -> None:
        require("Collector", (lambda schema: isinstance(schema, Schema), "expected a relive.Schema"), schema=schema)
        self._fields = stored_fields(schema, own_next_obs=True)
        self._num_envs = num_envs
        self._check = StepChecker(self._fields, num_envs, device, upload=False)
        self._given = self._cut = False
        self.begin(0)

    def interrupt(self) -> None:
        """The next chunk does not follow the last one."""
        self._cut = self._given

    def begin(self, num_steps: int) -> None:
        """Forget the steps of an unfinished chunk, and start one of ``num_steps``."""
        self._count = int(self._cut)  # the rows so far; the one in front is left out, which interrupts all envs
        front = self._count + num_steps, self._num_envs
        self._rows: dict[Path, NDArray[Any]] = {
            path: np.zeros((*front, *field.shape), numpy_dtype(field.dtype))
            for path, field in self._fields.leaves.items()
        }
        self._mask = np.zeros(front, np.bool_)

    def add(self, step: dict[str, Any]) -> None:
        """Check and copy one vector step ``[N, ...]``, with ``next_obs``; ``mask`` is optional.

        Raises:
            FieldError, ShapeError, DTypeError, DeviceError: the step does not fit the schema.
        """
        mask = step.pop("mask", True)
        for rows, leaf in zip(self._rows.values(), self._check(step), strict=True):
            rows[self._count] = numpy_view(leaf.detach().cpu()) if isinstance(leaf, Tensor) else leaf
        self._mask[self._count] = mask
        self._count += 1

    def end(self) -> dict[str, Any]:
        """The chunk: the fields of the schema, nested as it is, ``next_obs`` and ``mask``."""
        self._given, self._cut = True, False
        steps = {name: self._fields.rebuild(name, self._leaf) for name in self._fields.names}
        steps["mask"] = self._mask
        self.begin(0)  # the arrays belong to the caller now
        return steps

    def _leaf(self, path: Path) -> Any:
        """One leaf as an array, or as a tensor if NumPy lacks its dtype."""
        rows, dtype = self._rows[path], self._fields.leaves[path].dtype
        return rows if dtype in NUMPY_DTYPES else torch.from_numpy(rows).view(dtype)
