"""NStep and Transition: single transitions and n-step windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..core import Draw, nested
from ..core.words import ALONE
from ..device.contract import LONGEST_WINDOW, DeviceRead
from ..device.ring import DeviceRing
from ..device.transitions import WindowForm, read_windows
from ..errors import DTypeError, SchemaError, ShapeError
from ..memory.store import Plan
from ..parameters import GAMMA_RULE, checked, is_steps
from ..printable import add_note
from ..ring.ring import EVERY_ROW, Ring, WindowRule, drawn_or_given
from ..steps.arrays import Array, Ints, as_host

WINDOW_RULE = "n is a whole number of at least 1 and below 2**30, and exactly 1 where steps are stored without order"


@checked(
    n=(is_steps, WINDOW_RULE),
    gamma=GAMMA_RULE,
    each_reward=(lambda call: call is None or callable(call), "each_reward is a function of rewards [B, n], or None"),
)
@dataclass(slots=True)
class NStep:
    """n-step transitions (Sutton and Barto 2018, section 7.1): windows of up to ``n`` steps from the anchor on.

    A window of k steps stops at a done and at the newest complete step. The target is always
    ``reward + discount * V(next_obs)``. The batch holds the fields of the first step, and:

    - ``reward``: rₜ + γrₜ₊₁ + ... over the k steps; ``discount``: γᵏ(1 - terminated);
    - ``next_obs``: the observation after the last step; ``terminated`` and ``truncated``: those of the last step;
    - ``steps``: k (int32);
    - ``index`` and ``next_index`` (int64): the indices of the first step and of the row that holds ``next_obs``.

    Args:
        n: rewards per window.
        gamma: discount per step, from 0 to 1.
        each_reward: changes each reward before they are summed: float32 ``[B, n]`` -> ``[B, n]``, such as a
            normalization with running statistics. Saves do not hold it: pass ``load(..., view=...)``. All parameters
            may be changed at any time.

    Raises:
        ParameterError: n or gamma is out of range, here or when it is set later.
        ShapeError, DTypeError: ``each_reward`` returned something else; raised when a batch is drawn.
    """

    n: int = 1
    gamma: float = 0.99
    each_reward: Callable[[Array], object] | None = field(default=None, repr=False, compare=False)
    reads_draws: ClassVar[bool] = True
    nests: ClassVar[bool] = True
    history: ClassVar[int] = 0
    """No row before the anchor is read."""
    rule: ClassVar[WindowRule] = EVERY_ROW
    """Every complete transition is an anchor."""

    def read(
        self, ring: Ring, places: Ints | Draw, key: int | None = None, kind: type[dict[str, Any]] | None = None
    ) -> Any:
        """The fields ``[B, ...]`` of the windows that start at ``places``, or at those of a draw, with its weights.

        They come by path, or nested as this kind of dict.
        """
        if ring.store.apart is not None:
            if self.n > 1 and not ring.ordered:
                self._require_order(ring)
            sums = None if self.each_reward is None else partial(self.sums, ring)
            return ring.windows(places, self.n, self.gamma, kind, sums)
        chosen, extras = drawn_or_given(places)
        fields = ring.read(self.plan(ring, chosen)) | ring.extras(extras)
        return fields if kind is None else nested(fields, kind)

    def plan(self, ring: Ring, places: Ints) -> Plan:
        """The windows that start at ``places``, before they are read.

        Raises:
            SchemaError: n is above 1 and steps are stored without order.
        """
        self._require_order(ring)
        plan = ring.plan(places, self.n, self.gamma)
        if self.each_reward is not None:
            plan.column("reward")[...] = self.sums(ring, plan.places, plan.column("steps"))
        return plan

    def on_device(self, ring: Ring, rows: DeviceRing) -> DeviceRead | None:
        """How a device reads these windows; None if the host has to."""
        if self.each_reward is not None or self.n > LONGEST_WINDOW or (self.n > 1 and rows.mode == ALONE):
            return None
        return DeviceRead("windows", read_windows, WindowForm(self.n, float(self.gamma)))

    def _require_order(self, ring: Ring) -> None:
        if self.n > 1 and not ring.ordered:
            raise SchemaError(f"NStep(n={self.n}): {WINDOW_RULE}")

    # The core has read how far each window goes, so no rule of ends is here. Only the sum is another one than the
    # core's: rewards of a user come all at once, of any dtype, and NumPy adds them in its order, with powers of gamma.
    def sums(self, ring: Ring, places: Ints, steps: Array) -> NDArray[np.float32]:
        """The discounted sums of the rewards of windows of so many steps, after ``each_reward``."""
        function: Any = self.each_reward
        within = np.arange(self.n)
        window = places[:, None] // ring.rows * ring.rows + (places[:, None] + within) % ring.rows
        inside, worth = within < steps[:, None], self.gamma**within
        try:
            rewards = as_host(function(ring.arrays.reward[window]), "each_reward")
        except Exception as error:
            given = f"float32 rewards [B, n] = {window.shape}"
            add_note(error, f"in each_reward of {self!r}, which was called with {given}")
            raise
        if rewards.shape != window.shape:
            raise ShapeError(f"each_reward: expected rewards {window.shape}, as it was given, got {rewards.shape}")
        if rewards.dtype.kind not in "fiub":
            raise DTypeError(f"each_reward: expected real numbers, got {rewards.dtype}")
        # rows after the window may hold anything: 0 times an infinity would be NaN
        return np.where(inside, rewards * worth, 0.0).sum(1).astype(np.float32)


def Transition(gamma: float = 0.99) -> NStep:  # noqa: N802 - named like the view it returns
    """Single transitions: :class:`NStep` with n = 1, so ``discount`` is ``gamma``, and 0 after a terminal.

    Args:
        gamma: discount per step, from 0 to 1.
    """
    return NStep(1, gamma)
