"""LaneWriter: writes the steps of one process into its lane."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Never

import numpy as np
import torch

from ..errors import FieldError, LifecycleError, ReliveError, WaitTimeoutError
from ..kernels.lane_state import CUT, FOLLOWED, MASKED
from ..parameters import TIMEOUT_RULE, require
from ..replay.arguments import flattened, refuse_not_finite, row_mask
from ..ring.adding import missing_final
from ..steps.arrays import as_host
from ..steps.checker import refuse_unreadable
from ..steps.schema import Schema, not_named
from ..steps.trees import map_leaves
from .lane import Lane
from .shared import Claim
from .waiting import Bell

__all__ = ["LaneWriter"]


class LaneWriter:
    """Writes the steps of one process into its lane; made by :meth:`relive.Lanes.writer`.

    :meth:`add` takes what :meth:`relive.ReplayBuffer.add` takes, and makes the same checks. When it returns, the step
    is acknowledged: the owner of the replay gets the step, even if this process is killed at once. The first step
    starts new episodes. A :class:`relive.Collector` takes a writer as its buffer.

    One thread at a time may use it, in the process that made it.

    Args:
        schema: the fields of a step.
        lane: where steps go.
        place: the number of the lane.
        claim: keeps other writers out.
        owner_ended: returns whether there was an owner and is none any more.
        timeout: seconds that :meth:`add` waits while the lane is full.
        debug: whether to refuse NaN and infinity.
    """

    def __init__(
        self,
        schema: Schema,
        lane: Lane,
        place: int,
        claim: Claim,
        owner_ended: Callable[[], bool],
        timeout: float | None,
        debug: bool,
    ) -> None:
        self.schema, self.num_envs, self.device = schema, lane.layout.num_envs, torch.device("cpu")
        self.own_next_obs = lane.layout.own_next_obs
        self.timeout, self.debug = timeout, debug
        self._lane, self._place, self._claim, self._owner_ended = lane, place, claim, owner_ended
        self._filled, self._drained = Bell(lane.filled[:1]), Bell(lane.drained_bell)
        self._checks = lane.check()
        self._leaves, self._steps = len(lane.layout.stored.leaves), lane.layout.steps
        self._limit = 0
        """The number of the first step that has no room, as far as this end knows."""
        self._cut = True
        """Whether the next step starts new episodes."""

    def add(self, step: Mapping[str, Any] | None = None, /, *more: Never, **fields: Any) -> None:
        """Append one step of every env. The call waits while the lane is full.

        Args:
            step: field -> ``[N, ...]``, with ``next_obs`` and ``mask`` as :meth:`relive.ReplayBuffer.add` takes them.
            fields: like ``step``.

        Raises:
            FieldError, ShapeError, DTypeError, DeviceError: the step does not fit the schema, or the final observation
                of an episode that ended is missing. Nothing is written.
            NotFiniteError: in debug mode, a number is NaN or infinite. Nothing is written.
            WaitTimeoutError: the lane was full for ``timeout`` seconds. Nothing is written, and the same step can be
                added again.
            LifecycleError: the writer is closed, or belongs to another process; or the lane is full, and the process
                that drained it has ended.
        """
        cut, self._cut = self._cut, True  # if anything breaks this off, the next step does not follow the last one
        try:
            if more or not (step is None or hasattr(step, "keys")):
                raise FieldError(not_named(step))
            if not self._claim.holds:
                raise LifecycleError(
                    f"this writer of lane {self._place} is closed, or was made before a fork; call lanes.writer("
                    f"{self._place}) in the process that plays"
                )
            self._write(fields if step is None else {**step, **fields}, cut)
        except ReliveError:  # nothing was written, and the caller knows
            self._cut = cut
            raise
        self._cut = False

    def extend(self, steps: Mapping[str, Any]) -> None:
        """Append many steps ``[T, N, ...]`` in the order of time, such as those of :meth:`relive.Collector.steps`.

        Each step is committed by itself. After an error, the steps before the one that failed are in the lane.

        Raises:
            ShapeError: the fields differ in their number of steps. Nothing is written.
            FieldError, DTypeError, DeviceError, NotFiniteError, WaitTimeoutError, LifecycleError: as :meth:`add`.
        """
        n = self.num_envs
        rows, count = flattened(steps, (n,))
        for t in range(count):
            self.add(map_leaves(itemgetter(slice(t * n, t * n + n)), rows))

    def interrupt(self) -> None:
        """Let the next step start new episodes: the running ones do not go on. Call it after a reset in mid-episode."""
        self._cut = True

    def close(self) -> None:
        """Let another process write to the lane. The steps in it stay."""
        self._claim.drop()

    def __enter__(self) -> LaneWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise LifecycleError("a writer belongs to its process: send the Lanes, and call lanes.writer(k) over there")

    # -- inside -------------------------------------------------------------------------------------------------

    def _write(self, values: dict[str, Any], cut: bool) -> None:
        """Check a step, wait for room, copy it, and commit it last.

        Args:
            values: the step.
            cut: whether it starts new episodes.
        """
        step, both, copy_step, copy_both = self._checks
        mask = values.pop("mask") if "mask" in values else None
        follows = self.own_next_obs or "next_obs" in values
        check, copier = (both, copy_both) if follows else (step, copy_step)
        try:
            leaves = check(values, copier)
        except (RuntimeError, TypeError):
            refuse_unreadable(values)
            raise
        kept = None if mask is None else row_mask(mask, self.num_envs)
        if self.debug:
            self._refuse_not_finite(leaves, kept)
        number = self._lane.committed
        if number >= self._limit:
            self._wait_for_room(number)
        row = number % self._steps
        copier.write(row, leaves)
        if kept is not None:
            self._lane.mask[row] = kept
        found = self._lane.commit(number, CUT * cut + FOLLOWED * follows + MASKED * (kept is not None))
        if found > 0:
            self._filled.wake()
        if found < 0:
            raise missing_final(-1 - found)

    def _refuse_not_finite(self, leaves: Sequence[Any], kept: Any) -> None:
        """Raise NotFiniteError if a number that is learned from is NaN or infinite."""
        fields, final = self._lane.layout.stored.leaves, leaves[self._leaves :]
        envs = np.arange(self.num_envs)
        rows = np.ones(self.num_envs, np.bool_) if kept is None else as_host(kept)
        refuse_not_finite(fields, leaves[: self._leaves], final or None, envs, rows)

    def _wait_for_room(self, number: int) -> None:
        """Sleep until the owner has taken a step.

        Raises:
            WaitTimeoutError: it takes longer than the timeout.
            LifecycleError: the owner has ended.
        """
        require("add", TIMEOUT_RULE, timeout=self.timeout)

        def ready() -> bool:
            self._limit = self._lane.drained + self._steps
            if number < self._limit:
                return True
            if self._owner_ended():
                raise LifecycleError(
                    f"lane {self._place} is full, and the process that drained it has ended: drain it in another one, "
                    "or end this one"
                )
            return False

        if not self._drained.wait(ready, self.timeout):
            raise WaitTimeoutError(
                f"lane {self._place} is full: {self._steps} steps wait for the owner to call drain(), for more than "
                f"{self.timeout} s; call it more often, or make the lanes longer"
            )
