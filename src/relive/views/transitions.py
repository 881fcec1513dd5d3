"""NStep and Transition: single transitions and n-step windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from torch import Tensor

from ..errors import SchemaError
from ..memory.store import Amend, Windows
from ..parameters import GAMMA_RULE, checked, is_count
from ..ring.ring import Ints, Ring
from ..steps.arrays import as_host
from ..steps.trees import Path

__all__ = ["NStep", "Transition", "read_windows"]


WINDOW_RULE = "n is at least 1, and exactly 1 where steps are stored without order"


@checked(
    n=(lambda n: is_count(n, 1), WINDOW_RULE),
    gamma=GAMMA_RULE,
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
    """

    n: int = 1
    gamma: float = 0.99
    each_reward: Callable[[Any], Any] | None = field(default=None, repr=False, compare=False)

    @property
    def history(self) -> int:
        """0: no row before the anchor is read."""
        return 0

    def read(self, ring: Ring, places: Ints, key: int | None = None) -> dict[Path, Tensor]:
        """The fields ``[B, ...]`` of the windows that start at ``places``."""
        return read_windows(ring, self.windows(ring, places))

    def windows(self, ring: Ring, places: Ints, amend: Amend | None = None) -> Windows:
        """The windows that start at ``places``, without their large fields.

        Raises:
            SchemaError: n is above 1 and steps are stored without order.
        """
        if ring.alone and not ring.linked and self.n > 1:
            raise SchemaError(f"NStep(n={self.n}): {WINDOW_RULE}")
        found = ring.store.windows(places, ring.rows, self.n, self.gamma, ring.state, amend)
        if self.each_reward is not None:
            found.fields["reward",] = self._summed(ring, places, found.fields["steps",])
        return found

    def _summed(self, ring: Ring, places: Ints, steps: Tensor) -> Tensor:
        """The discounted sum ``[B]`` of each window's rewards after ``each_reward``."""
        within = np.arange(self.n)
        window = places[:, None] // ring.rows * ring.rows + (places[:, None] + within) % ring.rows
        worth = np.where(within < as_host(steps)[:, None], self.gamma**within, 0.0)
        rewards = np.asarray(cast("Any", self.each_reward)(ring.store.meta("reward")[window]))
        (total,) = ring.store.tensors((rewards * worth).sum(1).astype(np.float32))
        return total


def read_windows(ring: Ring, found: Windows) -> dict[Path, Tensor]:
    """All fields ``[B, ...]`` of windows, including the large ones."""
    store = ring.store
    if not store.large:
        return found.fields
    following = [path for path in store.large if path[0] == ("next_obs" if ring.alone else "obs")]
    now = store.gather([path for path in store.large if path[0] != "next_obs"], found.now)
    then = store.gather(following, found.then)
    for path in store.large:
        if path in now:
            found.fields[path] = now[path]
        if path in then:
            found.fields["next_obs", *path[1:]] = then[path]
    return found.fields


def Transition(gamma: float = 0.99) -> NStep:  # noqa: N802 - named like the view it returns
    """Single transitions: :class:`NStep` with n = 1."""
    return NStep(1, gamma)
