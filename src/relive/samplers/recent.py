"""Recent: draws that favour recent experience."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, cast

import numpy as np

from .. import kernels
from ..errors import NotFiniteError, ParameterError
from ..parameters import Rule, checked, is_count, is_flag, is_number
from ..ring.ring import Ring
from ..steps.arrays import Ints
from .contract import Extras, Sampler, Terms, require_own_ring
from .prioritized import Prioritized
from .uniform import Uniform, WithoutReplacement

__all__ = ["Recent", "guess"]


_ETA: Rule = (lambda eta: is_number(eta, 0, 1) and eta > 0, "eta is a number above 0, up to 1")


@checked(
    eta=_ETA,
    sharpest=_ETA,
    c_min=(lambda c_min: is_count(c_min, 1), "c_min is a whole number of at least 1"),
    adapt=(is_flag, "adapt is True or False"),
)
class Recent(Sampler):
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

    def __init__(
        self,
        eta: float = 0.996,
        c_min: int = 5000,
        *,
        inner: Uniform | Prioritized | None = None,
        adapt: bool = False,
    ) -> None:
        self.eta = self.sharpest = eta
        self.c_min, self.adapt = c_min, adapt
        self._inner: Uniform | Prioritized = Uniform() if inner is None else inner
        if not isinstance(cast("object", self._inner), Uniform | Prioritized):
            raise ParameterError(f"Recent: inner is Uniform() or Prioritized(), got {inner!r:.200}")
        self._take_over()
        self._ring: Ring | None = None
        self._returns: deque[float] = deque(maxlen=20)
        self._steepest = np.zeros(2)  # rise, fall

    @property
    def inner(self) -> Uniform | Prioritized:
        """The sampler for the newest transitions; it cannot be replaced."""
        return self._inner

    def attach(self, ring: Ring) -> None:
        """See :class:`Sampler`."""
        self._ring = require_own_ring(self._ring, ring, self)
        self.inner.attach(ring)
        self._take_over()

    def _take_over(self) -> None:
        """Have the members of the inner sampler; its arrays' names get the prefix ``inner.``."""
        self.watches, self.extras = self._inner.watches, self._inner.extras
        self.per_row = tuple(f"inner.{name}" for name in self._inner.per_row)

    def nbytes(self, rows: int) -> int:
        """The inner sampler's bytes."""
        return self.inner.nbytes(rows)

    def changed(self, places: Ints, drawable: Any) -> None:
        """Pass the change to the inner sampler."""
        self.inner.changed(places, drawable)

    def window(self, update: int, of: int) -> int:
        """cₖ, the number of newest transitions that update ``update`` of ``of`` may draw from now."""
        stored = self._ring.transitions if self._ring is not None else 0
        return int(max(stored * self.eta ** (1000 * update / of), self.c_min))

    def draw(self, count: int, key: int, update: int, of: int) -> tuple[Ints, Extras]:
        """Places of anchors ``[count]`` among the newest cₖ, and the inner sampler's fields."""
        newest, ring = self.window(update, of), self._ring
        if ring is None or newest >= ring.transitions:
            return self.inner.draw(count, key, update, of)
        return self.inner.draw_recent(count, key, newest)

    def terms(self, update: int, of: int) -> Terms | None:
        """See :class:`Sampler`."""
        newest, ring, inner = self.window(update, of), self._ring, self._inner.terms(update, of)
        if ring is None or newest >= ring.transitions or inner is None:
            return inner
        weights, how = inner
        return (None, (newest, *how[1:])) if weights is None else None

    def count_draw(self) -> None:
        """See :class:`Sampler`."""
        self._inner.count_draw()

    def observe(self, episode_return: float) -> None:
        """Report the return of an ended episode. With ``adapt``, eta follows the trend of the last 20 returns.

        The trend is their mean slope as a fraction of the steepest rise or fall so far, which decay by 0.9999 each
        time. As it goes from -1 to 1, eta goes from 1 to its sharpest value.

        Raises:
            NotFiniteError: the return is NaN or infinite; it is ignored.
            ParameterError: it is not a number.
        """
        try:
            found = math.nan if isinstance(cast("object", episode_return), str | bytes) else float(episode_return)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # torch raises a RuntimeError
            raise ParameterError(f"observe(episode_return={episode_return!r:.200}): expected a number") from error
        if not math.isfinite(found):
            raise NotFiniteError(f"episode_return: expected a finite number, got {episode_return}; check the rewards")
        self._returns.append(found)
        if self.adapt and len(self._returns) == 20:
            slope = float(np.gradient(np.array(self._returns)).mean())
            steepest = self._steepest
            steepest[:] = np.maximum(steepest * 0.9999, [slope, -slope])
            fraction = slope / steepest[0] if slope > 0 else slope / steepest[1] if slope < 0 else 0.0
            self.progress = fraction
            self.eta = 1.0 + (self.sharpest - 1.0) * (fraction + 1.0) / 2.0

    def draw_state(self) -> Any:
        """The inner sampler's."""
        return self.inner.draw_state()

    def undo_draws(self, draw_state: Any) -> None:
        """See :class:`Sampler`."""
        self.inner.undo_draws(draw_state)

    def check(self) -> None:
        """Check the inner sampler."""
        self.inner.check()

    def state_dict(self) -> dict[str, Any]:
        """eta, the returns that it follows, and the inner sampler's state."""
        returns = np.array(self._returns, np.float64)
        inner = {f"inner.{name}": value for name, value in self.inner.state_dict().items()}
        return {"eta": self.eta, "steepest": self._steepest.copy(), "returns": returns, **inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the state of another sampler."""
        self.eta, self._steepest = float(state["eta"]), np.array(state["steepest"], np.float64)
        self._returns = deque(np.asarray(state["returns"], np.float64).tolist(), maxlen=20)
        marked = {name: value for name, value in state.items() if name.startswith("inner.")}
        if marked:  # else the inner sampler has its state in files
            self.inner.load_state_dict({name.removeprefix("inner."): value for name, value in marked.items()})

    def __repr__(self) -> str:
        return f"Recent({self.sharpest}, {self.c_min}, inner={self.inner!r}, adapt={self.adapt})"


def guess(sampler: Any, ring: Ring, count: int, key: int, update: int, of: int) -> Ints | None:
    """The places of rows, at most ``count``, that ``sampler.draw(count, key, update, of)`` will most likely draw.

    A draw tries rows until it finds one that can be drawn. Only its first try is guessed. If the files were altered,
    a place may be beyond the last row.

    Returns:
        int64 ``[K]``, or None if a guess would have to read rows: for windows weighed by episodes, for windows or
        priorities inside :class:`Recent`, and for samplers of the user.
    """
    if not ring.drawable:
        return None
    if type(sampler) is Recent:
        newest = sampler.window(update, of)
        if newest >= ring.transitions:
            return guess(sampler.inner, ring, count, key, update, of)
        return _of_rows(ring, count, key, newest) if _draws_rows(sampler.inner, ring) else None
    if type(sampler) is WithoutReplacement:
        number, env = np.divmod(sampler.draw_state()[:count], ring.num_envs)
        return env * ring.rows + number % ring.rows
    if type(sampler) is Prioritized:
        total = sampler.mass
        if not 0 < total < math.inf:
            return None
        return sampler.draw_at(_masses(count, key, sampler.stratified, total))[0]
    if _draws_rows(sampler, ring):
        return _of_rows(ring, count, key, 0)
    if type(sampler) is Uniform and ring.rule.weigh != "episodes":
        return sampler.draw(count, key, update, of)[0]  # reads the tree of weights alone
    return None


def _draws_rows(sampler: Any, ring: Ring) -> bool:
    """Whether a sampler draws rows until one can be drawn."""
    return type(sampler) is Uniform and not ring.rule.sparse


def _of_rows(ring: Ring, count: int, key: int, newest: int) -> Ints | None:
    """The first attempt of each draw of :func:`relive.kernels.reference.priorities.draw`."""
    first, until = np.empty(ring.num_envs, np.int64), np.empty(ring.num_envs, np.int64)
    total = kernels.fast().window(ring.handle, newest, first, until)
    if total <= 0:
        return None
    at = _masses(count, key, False, float(total)).astype(np.int64)
    env: Ints = np.asarray(np.searchsorted(until, at, side="right"), np.int64)
    number = first[env] + at - np.where(env > 0, until[env - 1], 0)
    return env * ring.rows + number % ring.rows


def _masses(count: int, key: int, stratified: bool, total: float) -> Any:
    """The numbers of a draw in [0, total), float64 ``[count]``."""
    out = np.empty(count)
    kernels.fast().masses(np.uint64(key), stratified, total, math.nextafter(total, 0.0), out)
    return out
