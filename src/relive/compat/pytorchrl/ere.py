"""PyTorchRL's EREBuffer (release 3.2), built on :class:`relive.Recent`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...samplers.contract import Sampler
from ...samplers.recent import Recent
from ..attributes import alias
from .keys import ALGORITHM, EPISODES
from .per import PERBuffer
from .replay import Data, Factory

__all__ = ["EREBuffer"]


class EREBuffer(PERBuffer):
    """``pytorchrl.agent.storages.EREBuffer``: batch k of K is drawn from the newest c_k transitions of all envs.

    c_k = max(M η^(1000 k / K), cmin) for k = 1 .. K and M stored transitions; batches have ``ck``. "Newest" means the
    order of time, also after the ring has wrapped or was resized. With ``alpha`` above 0, the draw among them is
    prioritized. ``eta`` follows the returns in ``info["Episodes"]["TrainReward"]``; see :meth:`update_eta`.

    Args:
        size: this and the others as in :class:`PERBuffer`.
        eta: η, how sharply the window shrinks; 1 draws from all transitions.
        cmin: the least number of transitions in the window.
    """

    def __init__(
        self, size: int, device: Any, actor: Any, algorithm: Any, envs: Any, n_step: int = 1, epsilon: float = 0.0,
        alpha: float = 0.0, beta: float = 1.0, default_error: float = 1000000, eta: float = 1.0, cmin: int = 5000, *,
        seed: int | None = None,
    ) -> None:  # fmt: skip
        self._cmin, self._recent = cmin, Recent(eta, cmin, adapt=True)
        options = n_step, epsilon, alpha, beta, default_error
        super().__init__(size, device, actor, algorithm, envs, *options, seed=seed)

    @classmethod
    def create_factory(
        cls, size: int, n_step: int = 1, epsilon: float = 0.0, alpha: float = 0.0, beta: float = 1.0,
        default_error: float = 1000000, eta: float = 1.0, cmin: int = 5000, *, seed: int | None = None,
    ) -> Factory:  # fmt: skip
        """A function ``(device, actor, algorithm, envs)`` that creates such buffers."""
        options = n_step, epsilon, alpha, beta, default_error, eta, cmin
        return lambda device, actor, algorithm, envs: cls(size, device, actor, algorithm, envs, *options, seed=seed)

    def _new_sampler(self) -> Sampler:
        inner: Any = super()._new_sampler()
        recent = Recent(self.initial_eta, self._least(), inner=inner, adapt=True)
        recent.eta = self.eta
        return recent

    def _adopt(self, sampler: Any) -> None:
        super()._adopt(sampler)
        self._recent = sampler

    def _least(self) -> int:
        """``cmin`` in items of the replay: transitions, or sequences."""
        return max(self._cmin // (int(self.algo.update_every) if self.recurrent_actor else 1), 1)

    initial_eta = alias("_recent.sharpest", "η while returns rise.")
    eta = alias("_recent.eta", "η now.")

    @property
    def cmin(self) -> int:
        """The least number of transitions in the window."""
        return self._cmin

    @cmin.setter
    def cmin(self, cmin: int) -> None:
        self._cmin = cmin
        self._recent.c_min = self._least()

    def _extras(self, extras: Data, number: int, of: int) -> Data:
        found = super()._extras(extras, number, of)
        if self.alpha == 0.0 and not self.recurrent_actor:
            del found["per_weights"]
        rows = self._stored.replay
        window = min(self._recent.window(number, of), len(rows))
        return {**found, "ck": max(window // rows.num_envs, 1) if self.recurrent_actor else window}

    def after_gradients(self, batch: Data, info: Data) -> Data:
        """As in :class:`PERBuffer`; then :meth:`update_eta`."""
        return self.update_eta(super().after_gradients(batch, info))

    def update_eta(self, info: Data) -> Data:
        """Adapt ``eta`` to the returns of the last 20 episodes: ``initial_eta`` while they rise, 1 while they fall.

        After 20 episodes, ``info["Algorithm"]`` gets ``eta`` and ``RewardGradient``, from -1 to 1.
        """
        returns = info.get(EPISODES, {}).get("TrainReward", ())
        for value in np.atleast_1d(np.asarray(returns, np.float64)):
            self._recent.observe(float(value))
        if self._recent.progress is not None:
            info.setdefault(ALGORITHM, {}).update(RewardGradient=self._recent.progress, eta=self.eta)
        return info
