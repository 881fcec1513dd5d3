"""Recent: draws that favour recent experience."""

from __future__ import annotations

import math
from collections import deque
from operator import attrgetter
from typing import Any, cast

import numpy as np

from ..device.recent import DeviceRecent
from ..device.ring import DeviceRing
from ..errors import NotFiniteError, ParameterError
from ..parameters import Rule, checked, is_count, is_flag, is_number
from ..ring.ring import Ring
from ..steps.arrays import Ints
from .contract import Drawn, OwnSampler, State, require_own_ring
from .prioritized import Prioritized
from .uniform import Uniform

_ETA: Rule = (lambda eta: is_number(eta, 0, 1) and eta > 0, "eta is a number above 0, up to 1")


def of_inner(name: str) -> Any:
    """The member ``name`` of a sampler's inner sampler, as a property."""
    return property(attrgetter(f"_inner.{name}"))


@checked(
    eta=(_ETA[0], f"{_ETA[1]}; the other sampler is inner=, as in Recent(inner=Prioritized())"),
    sharpest=_ETA,
    c_min=(lambda c_min: is_count(c_min, 1), "c_min is a whole number of at least 1"),
    adapt=(is_flag, "adapt is True or False"),
)
class Recent(OwnSampler):
    """Emphasising recent experience (Wang and Ross 2019): update k of K draws from the newest cₖ transitions.

    cₖ = max(N · eta^(1000 k / K), c_min). The N transitions that can be drawn are ordered by completion over all envs.
    ``replay.batches(K, B)`` is a round of K updates, ``replay.sample(B)`` a round of 1. A sequence can be drawn if it
    ends among the newest cₖ of the N complete transitions stored; if none does, among the newest 2 cₖ, and so on.

    Args:
        eta: how sharply cₖ shrinks within a round; 1 is no emphasis. 0.996 in the paper.
        c_min: the smallest cₖ.
        inner: how to draw from the newest cₖ: :class:`Uniform` (default) or :class:`Prioritized`.
        adapt: let eta follow the progress of learning: pass each episode's return to :meth:`observe`.

    Raises:
        ParameterError: a parameter is out of range, here or when it is set later.
    """

    progress: float | None = None
    """The last slope of the returns as a fraction of the steepest, from -1 to 1; None before the first."""

    # members of the inner sampler, without a call in between
    watches: Any = of_inner("watches")
    extras: Any = of_inner("extras")
    nbytes: Any = of_inner("nbytes")
    changed: Any = of_inner("changed")
    draws_late: Any = of_inner("draws_late")
    draw_state: Any = of_inner("draw_state")
    set_draw_state: Any = of_inner("set_draw_state")
    check: Any = of_inner("check")

    def __init__(
        self,
        eta: float = 0.996,
        c_min: int = 5000,
        *,
        inner: Uniform | Prioritized | None = None,
        adapt: bool = False,
    ) -> None:
        self.eta: float = eta
        self.sharpest = eta
        self.c_min = c_min
        self.adapt = adapt
        self._inner: Uniform | Prioritized = Uniform() if inner is None else inner
        if not isinstance(cast("object", self._inner), Uniform | Prioritized):
            raise ParameterError(f"Recent: inner is Uniform() or Prioritized(), got {inner!r:.200}")
        self.per_row: tuple[str, ...] = tuple(f"inner.{name}" for name in self._inner.per_row)
        self._ring: Ring | None = None
        self._returns: deque[float] = deque(maxlen=20)
        self._steepest = np.zeros(2)  # rise, fall

    @property
    def inner(self) -> Uniform | Prioritized:
        """The sampler for the newest transitions; it cannot be replaced."""
        return self._inner

    @property
    def prioritized(self) -> Any:
        """The inner sampler, if it keeps TD errors."""
        return self._inner.prioritized

    def likely(self, ring: Ring, count: int, key: int, update: int, of: int, newest: int = 0) -> Ints | None:
        """See :class:`OwnSampler`."""
        newest = self.window(update, of)
        return self._inner.likely(ring, count, key, update, of, newest if newest < ring.transitions else 0)

    def bytes_on_device(self, rows: int, num_envs: int) -> int | None:
        """Bytes of what finds the newest rows; None if the inner sampler is not :class:`Uniform`."""
        return DeviceRecent.count_bytes(rows) if type(self._inner) is Uniform else None

    def on_device(self, rows: DeviceRing) -> DeviceRecent:
        """See :class:`OwnSampler`."""
        return DeviceRecent(rows, self)

    def attach(self, ring: Ring) -> None:
        """See :class:`Sampler`."""
        self._ring = require_own_ring(self._ring, ring, self)
        self._inner.attach(ring)

    def window(self, update: int, of: int) -> int:
        """cₖ, the number of newest transitions that update ``update`` of ``of`` may draw from now."""
        return self._newest(self._ring.transitions if self._ring is not None else 0, update, of)

    def _newest(self, stored: int, update: int, of: int) -> int:
        return int(max(stored * self.share(update, of), self.c_min))

    def share(self, update: int, of: int) -> float:
        """cₖ as a part of N, where c_min is not larger."""
        return self.eta ** (1000 * update / of)

    def draw(self, count: int, key: int, update: int, of: int) -> Drawn:
        """Places of anchors ``[count]`` among the newest cₖ, and the inner sampler's fields."""
        inner, ring = self._inner, self._ring
        stored = 0 if ring is None else ring.transitions
        newest = self._newest(stored, update, of)
        return inner.draw(count, key, update, of) if newest >= stored else inner.draw_recent(count, key, newest)

    def observe(self, episode_return: float) -> None:
        """Report the ``episode_return`` of an ended episode. With ``adapt``, eta follows the last 20 returns.

        It follows their trend: their mean slope as a fraction of the steepest rise or fall so far, which decay by
        0.9999 each time. As it goes from -1 to 1, eta goes from 1 to its sharpest value.

        Raises:
            NotFiniteError: the return is NaN or infinite; it is ignored.
            ParameterError: it is not a number.
        """
        try:
            value = math.nan if isinstance(cast("object", episode_return), str | bytes) else float(episode_return)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # torch raises a RuntimeError
            raise ParameterError(f"observe(episode_return={episode_return!r:.200}): expected a number") from error
        if not math.isfinite(value):
            raise NotFiniteError(f"episode_return: expected a finite number, got {episode_return}; check the rewards")
        self._returns.append(value)
        if self.adapt and len(self._returns) == 20:
            slope = float(np.gradient(np.array(self._returns)).mean())
            steepest = self._steepest
            steepest[:] = np.maximum(steepest * 0.9999, [slope, -slope])
            fraction = slope / steepest[0] if slope > 0 else slope / steepest[1] if slope < 0 else 0.0
            self.progress = fraction
            self.eta = 1.0 + (self.sharpest - 1.0) * (fraction + 1.0) / 2.0

    def state_dict(self) -> State:
        """eta, the returns that it follows, and the inner sampler's state."""
        returns = np.array(self._returns, np.float64)
        inner = {f"inner.{name}": value for name, value in self.inner.state_dict().items()}
        return {"eta": self.eta, "steepest": self._steepest.copy(), "returns": returns, **inner}

    def load_state_dict(self, state: State) -> None:
        """Continue with the state of another sampler."""
        self.eta, self._steepest = float(state["eta"]), np.array(state["steepest"], np.float64)
        self._returns = deque(np.asarray(state["returns"], np.float64).tolist(), maxlen=20)
        marked = {name: value for name, value in state.items() if name.startswith("inner.")}
        if marked:  # else the inner sampler has its state in files
            self.inner.load_state_dict({name.removeprefix("inner."): value for name, value in marked.items()})

    def __repr__(self) -> str:
        return f"Recent({self.sharpest}, {self.c_min}, inner={self.inner!r}, adapt={self.adapt})"
