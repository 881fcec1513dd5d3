"""FrameStack: stacks single frames into observations when a batch is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from ..core import Draw
from ..core.words import FINALS
from ..device.contract import LONGEST_WINDOW, DeviceRead
from ..device.ring import DeviceRing
from ..device.transitions import Stack
from ..errors import SchemaError
from ..parameters import checked, is_names, is_own, is_steps
from ..ring.ring import Ring, Stacks, WindowRule, drawn_or_given
from ..steps.arrays import Ints
from ..steps.schema import Path
from .contract import rule_of_transitions
from .transitions import NStep

STACK_RULE = "depth is at least 1 and below 2**30, and pad 'repeat' or 'zeros'"


@checked(
    depth=(is_steps, f"{STACK_RULE}; the other view is window=, as in FrameStack(window=NStep(3))"),
    pad=(lambda pad: pad in ("repeat", "zeros"), STACK_RULE),
    window=(lambda window: isinstance(window, NStep), "window is NStep(...) or Transition(...)"),
    keys=(lambda keys: keys is None or is_names(keys), "keys is a tuple of names, such as ('camera',), or None"),
)
# A stack of vectors costs what its rows cost: FrameStack(4) reads five rows where a plain batch reads two, in 2.3 to
# 3.4 times its time.
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

    reads_draws: ClassVar[bool] = True

    @property
    def inner(self) -> NStep:
        """The view that computes the transitions."""
        return self.window

    @property
    def history(self) -> int:
        """The number of frames before the anchor's."""
        return self.depth - 1

    @property
    def rule(self) -> WindowRule:
        """Every transition whose history is stored is an anchor."""
        return rule_of_transitions(self.depth - 1)

    def stacks_of(self, ring: Ring) -> Stacks:
        """How the fields of the observation are stacked.

        Raises:
            SchemaError: the observation has no member of that name.
        """
        keys = None if self.keys is None else tuple(self.keys)
        return _stacks(tuple(ring.leaves), keys, self.depth, self.pad == "repeat")

    def read(self, ring: Ring, places: Ints | Draw, key: int | None = None) -> dict[Path, Tensor]:
        """The fields ``[B, ...]`` of the windows that start at ``places``, or at those of a draw, with its weights.

        Raises:
            SchemaError: the observation lacks a member of ``keys``, or steps are stored without order.
        """
        if ring.own_next:
            raise SchemaError("FrameStack needs steps in order that share observations; here each has its own")
        stacks, window = self.stacks_of(ring), self.window
        if ring.store.apart is not None:
            sums = None if window.each_reward is None else partial(window.sums, ring)
            return ring.windows(places, window.n, window.gamma, None, sums, stacks)
        chosen, extras = drawn_or_given(places)
        plan = window.plan(ring, chosen)
        count = len(plan.places)
        ends = np.empty(2 * count, np.int64)  # of the stacks before the steps, then of those after them
        ends[:count], ends[count:] = plan.places, plan.last
        plan.stacks = list(stacks.paths), ring.frames(ends, stacks.depth, stacks.repeat)
        return ring.read(plan) | ring.extras(extras)

    def on_device(self, ring: Ring, rows: DeviceRing) -> DeviceRead | None:
        """How a device reads these stacks; None if the host has to."""
        plain = self.window.on_device(ring, rows) if is_own(self.window) else None
        # with fewer rows than that an env may have no row with its history
        if plain is None or rows.mode != FINALS or self.history >= LONGEST_WINDOW or self.history + 2 > rows.rows:
            return None
        try:
            stacks = self.stacks_of(ring)
        except SchemaError:  # the host raises it, when it reads
            return None
        stack = Stack(*stacks)
        return plain._replace(kind="stacks", form=plain.form._replace(stack=stack))


@lru_cache(maxsize=64)
def _stacks(leaves: tuple[Path, ...], keys: tuple[str, ...] | None, depth: int, repeat: bool) -> Stacks:
    fields = [path for path in leaves if path[0] == "obs"]
    members = {path[1] for path in fields if len(path) > 1}
    unknown = [key for key in keys or () if key not in members]
    if unknown:
        raise SchemaError(f"FrameStack(keys={keys}): the observation has no member {unknown[0]!r}")
    chosen = tuple(path for path in fields if keys is None or (len(path) > 1 and path[1] in keys))
    return Stacks(chosen, int(depth), repeat)
