"""FrameStack: stacks single frames into observations when a batch is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from torch import Tensor

from .. import kernels
from ..errors import SchemaError
from ..kernels.reference.sample import Draw
from ..memory.layout import BatchLayout
from ..parameters import GAMMA_RULE, checked, is_names, is_steps
from ..ring.ring import Ring, Rule
from ..steps.arrays import Ints, numpy_view
from ..steps.schema import Path
from .contract import rule_of, time_first_of
from .sequences import Sequence
from .transitions import NStep

__all__ = ["FrameStack", "ReturnsToGo"]


STACK_RULE = "depth is at least 1 and below 2**30, and pad 'repeat' or 'zeros'"


@checked(
    depth=(is_steps, STACK_RULE),
    pad=(lambda pad: pad in ("repeat", "zeros"), STACK_RULE),
    window=(lambda window: isinstance(window, NStep), "window is NStep(...) or Transition(...)"),
    keys=(lambda keys: keys is None or is_names(keys), "keys is a tuple of names, such as ('camera',), or None"),
)
@dataclass(slots=True)
class FrameStack:
    """Observations stacked from single frames, for replays that store each frame once (Mnih et al. 2015).

    ``obs`` and ``next_obs`` come as ``[B, depth, ...]``, oldest frame first. No stack reaches into another episode.

    Args:
        depth: frames per stack.
        window: the view that computes the n-step transitions and so chooses ``next_obs``.
        pad: the frames before an episode's first: "repeat" the first, or "zeros".
        keys: the members of a nested observation to stack, e.g. ("camera",); default: all.

    Raises:
        ParameterError: a parameter is out of range, here or when it is set later.
    """

    depth: int = 4
    window: NStep = field(default_factory=NStep)
    pad: Literal["repeat", "zeros"] = "repeat"
    keys: tuple[str, ...] | None = None

    @property
    def history(self) -> int:
        """The number of frames before the anchor's."""
        return self.depth - 1

    def batch_of(self, ring: Ring) -> BatchLayout | None:
        """See :class:`relive.views.contract.DirectReader`; only large observations, all of them stacked, are direct."""
        try:
            alone = ring.alone or ring.store.apart != self._stacked(ring)
        except SchemaError:  # read() raises it, once something was drawn
            return None
        return None if alone else self.window.batch_of(ring)

    def sample(self, direct: Ints, ring: Ring, draw: Draw, count: int, rows: Tensor, found: Any) -> bool:
        """See :class:`relive.views.contract.DirectReader`."""
        store: Any = ring.store  # in RAM: no other has such batches
        window, depth, repeat = self.window, self.depth, self.pad == "repeat"
        memory = store.stack_memory(2 * count * depth)
        return kernels.fast().sample_stacks(
            direct, draw, window.n, float(window.gamma), depth, repeat, id(rows), id(memory), id(found)
        )

    def _stacked(self, ring: Ring) -> tuple[Path, ...]:
        """The fields of the observation that are stacked.

        Raises:
            SchemaError: the observation has no member of that name.
        """
        return _stacked(tuple(ring.leaves), None if self.keys is None else tuple(self.keys))

    def read(self, ring: Ring, places: Ints, key: int | None = None) -> dict[Path, Tensor]:
        """The fields ``[B, ...]`` of the windows that start at ``places``, with stacked observations.

        Raises:
            SchemaError: the observation lacks a member of ``keys``, or steps are stored without order.
        """
        if ring.alone:
            raise SchemaError("FrameStack needs steps in order that share observations; here each has its own")
        stacked = list(self._stacked(ring))
        plan = self.window.plan(ring, places)
        count = len(plan.places)
        ends = np.empty(2 * count, np.int64)  # of the stacks before the steps, then of those after them
        ends[:count], ends[count:] = plan.places, plan.last
        plan.stacks = stacked, ring.frames(ends, self.depth, self.pad == "repeat")
        return ring.read(plan)


@lru_cache(maxsize=64)
def _stacked(leaves: tuple[Path, ...], keys: tuple[str, ...] | None) -> tuple[Path, ...]:
    fields = [path for path in leaves if path[0] == "obs"]
    members = {path[1] for path in fields if len(path) > 1}
    unknown = [key for key in keys or () if key not in members]
    if unknown:
        raise SchemaError(f"FrameStack(keys={keys}): the observation has no member {unknown[0]!r}")
    return tuple(path for path in fields if keys is None or (len(path) > 1 and path[1] in keys))


ADDED: tuple[Path, ...] = (("return_to_go",), ("ended",))
"""The fields that batches get."""


@checked(
    gamma=GAMMA_RULE,
    window=(
        lambda window: isinstance(window, (NStep, FrameStack, Sequence)),
        "window is NStep(...), Transition(...), FrameStack(...) or Sequence(...)",
    ),
)
@dataclass(slots=True)
class ReturnsToGo:
    """The batches of another view, with returns-to-go, for policies that are conditioned on them (Chen et al. 2021).

    Two fields come on top: ``return_to_go``, float32, is rₜ + γrₜ₊₁ + ... up to the last step of the episode that is
    complete; ``ended``, bool, says whether that step ended the episode. Where it is False, the episode goes on, or was
    interrupted, and more reward may have followed. What an episode would have paid after a truncation is not in the
    sum. Both are ``[B]``, or of the shape of ``mask`` in batches of sequences, where they are 0 in padding and in rows
    beyond the window.

    A batch of transitions takes as long as the episodes from the anchors to their ends.

    Args:
        gamma: discount per step. Returns-to-go are most often not discounted.
        window: the view that reads everything else.

    Raises:
        ParameterError: a parameter is out of range, here or when it is set later.
    """

    gamma: float = 1.0
    window: NStep | FrameStack | Sequence = field(default_factory=NStep)

    @property
    def rule(self) -> Rule:
        """The rule of the other view."""
        return rule_of(self.window)

    @property
    def time_first(self) -> bool | None:
        """Whether time is the first axis of a batch of sequences; None for transitions."""
        return time_first_of(self.window)

    def require(self, ring: Ring) -> None:
        """Refuse steps without an order.

        Raises:
            SchemaError: the steps have no order, or a field with a name that this view adds.
        """
        if ring.alone and not ring.linked:
            raise SchemaError("ReturnsToGo needs steps in the order of time; here they are stored without order")
        taken = [path for path in ADDED if any(leaf[0] == path[0] for leaf in ring.leaves)]
        if taken:
            name = taken[0][0]
            raise SchemaError(f"field {name!r}: ReturnsToGo gives batches a field of that name; give yours another")

    def read(self, ring: Ring, places: Ints, key: int | None = None) -> dict[Path, Tensor]:
        """The fields of the other view's batch, and those that this view adds."""
        fields = self.window.read(ring, places, key)
        plan = ring.plan(places, ring.rows, self.gamma)
        returns = plan.column("reward").astype(np.float64)
        ended = (plan.column("terminated") | plan.column("truncated")).astype(np.bool_)
        if self.time_first is not None:
            returns, ended = self._spread(ring, fields, returns, ended)
        added = ring.tensors(returns.astype(np.float32), np.ascontiguousarray(ended))
        return fields | dict(zip(ADDED, added, strict=True))

    def _spread(self, ring: Ring, fields: dict[Path, Tensor], returns: Any, ended: Any) -> tuple[Any, Any]:
        """The same of every row up to the last of each window, given those of that last row, ``[B]``."""
        env, start, burn_in = (numpy_view(fields[name,].cpu()) for name in ("env", "start", "burn_in"))
        steps = numpy_view(fields["steps",].cpu())  # 0 in padding and beyond the window
        known = (steps if self.time_first else steps.T) > 0
        numbers = start - burn_in + np.arange(len(known))[:, None]
        rewards = np.where(known, ring.arrays.reward[env * ring.rows + numbers % ring.rows], 0.0)
        found: Any = np.zeros((len(known) + 1, *returns.shape))
        for t in range(len(known) - 1, -1, -1):
            goes_on = t + 1 < len(known) and known[t + 1]  # else this is the last row of its window
            found[t] = known[t] * np.where(goes_on, rewards[t] + self.gamma * found[t + 1], returns)
        found = found[:-1]
        flags = known & ended
        return (found, flags) if self.time_first else (np.ascontiguousarray(found.T), flags.T)
