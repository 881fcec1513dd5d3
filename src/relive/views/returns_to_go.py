"""ReturnsToGo: the batches of another view, with the return from each step on."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from ..errors import SchemaError
from ..parameters import GAMMA_RULE, checked
from ..ring.ring import Ring, WindowRule
from ..steps.arrays import Bools, Doubles, Ints, numpy_view
from ..steps.schema import Path
from .contract import rule_of, time_first_of
from .frames import FrameStack
from .sequences import Sequence
from .transitions import NStep

ADDED: tuple[Path, ...] = (("return_to_go",), ("ended",))
"""The fields that batches get."""


@checked(
    gamma=(GAMMA_RULE[0], f"{GAMMA_RULE[1]}; the other view is window=, as in ReturnsToGo(window=Sequence(8))"),
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
    def inner(self) -> NStep | FrameStack | Sequence:
        """The other view."""
        return self.window

    @property
    def rule(self) -> WindowRule:
        """The rule of the other view."""
        return rule_of(self.window)

    @property
    def time_first(self) -> bool | None:
        """True if time is the first axis of a batch of sequences; None for transitions."""
        return time_first_of(self.window)

    def require(self, ring: Ring) -> None:
        """Refuse steps without an order.

        Raises:
            SchemaError: the steps have no order, or a field with a name that this view adds.
        """
        if not ring.ordered:
            raise SchemaError("ReturnsToGo needs steps in the order of time; here they are stored without order")
        clashes = [path for path in ADDED if any(leaf[0] == path[0] for leaf in ring.leaves)]
        if clashes:
            name = clashes[0][0]
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

    def _spread(self, ring: Ring, fields: dict[Path, Tensor], returns: Doubles, ended: Bools) -> tuple[Doubles, Bools]:
        """The returns and flags of every row of each window, given those of its last row, ``[B]``."""
        env, start, burn_in = (numpy_view(fields[name,].cpu()) for name in ("env", "start", "burn_in"))
        steps = numpy_view(fields["steps",].cpu())  # 0 in padding and beyond the window
        known = (steps if self.time_first else steps.T) > 0
        numbers = start - burn_in + np.arange(len(known))[:, None]
        rewards = np.where(known, ring.arrays.reward[env * ring.rows + numbers % ring.rows], 0.0)
        to_go = np.zeros((len(known) + 1, *returns.shape))
        for t in range(len(known) - 1, -1, -1):
            goes_on = t + 1 < len(known) and known[t + 1]  # else this is the last row of its window
            to_go[t] = known[t] * np.where(goes_on, rewards[t] + self.gamma * to_go[t + 1], returns)
        to_go = to_go[:-1]
        flags = known & ended
        return (to_go, flags) if self.time_first else (np.ascontiguousarray(to_go.T), flags.T)
