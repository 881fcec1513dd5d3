"""PyTorchRL's HERBuffer (release 3.2), built on :class:`relive.Hindsight`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import numpy as np

from ...errors import LifecycleError
from ...steps.arrays import as_host
from ...views.hindsight import Hindsight
from ..continuity import breaks
from ..trees import mapped
from .ere import EREBuffer
from .keys import DONE2, REW, RHS, RHS2
from .replay import Data, Factory
from .steps import arrays_of

__all__ = ["HERBuffer", "HerFunction"]

HerFunction = Callable[..., tuple[Any, Any, Any, Any, Any]]


def unchanged(obs: Any, rhs: Any, obs2: Any, rhs2: Any, rew: Any, initial_state: Any, final_state: Any) -> Any:
    """The default ``her_function``: the transitions unchanged."""
    return obs, rhs, obs2, rhs2, rew


class HERBuffer(EREBuffer):
    """``pytorchrl.agent.storages.HERBuffer``: when an episode ends, a copy relabelled by ``her_function`` is appended.

    ``her_function(obs, rhs, obs2, rhs2, rew, initial_state, final_state) -> (obs, rhs, obs2, rhs2, rew)`` gets float32
    arrays ``[K, ...]``, or dictionaries of them: K steps of one env's episode. (The host passes one step of K envs.)
    ``initial_state`` is the first stored observation of the episode and ``final_state`` the last one, repeated for each
    step; recurrent states are zeros. Episodes may have any length, in any number of envs, and may wrap around the end
    of the memory. PyTorchRL's envs reset themselves and lose the final observation. So ``final_state`` is the
    observation before the last step, and the copy leaves out the last step. Flags are copied. ``size`` and slices
    ignore copies; a buffer that a slice is inserted into makes its own. Copies use part of the ``size`` steps of
    memory. Feed-forward actors only.

    Args:
        size: this and the others as in :class:`EREBuffer`.
        her_function: see above.

    Raises:
        LifecycleError: the actor is recurrent.
    """

    _copies = True

    def __init__(
        self, size: int, device: Any, actor: Any, algorithm: Any, envs: Any, her_function: HerFunction = unchanged,
        n_step: int = 1, epsilon: float = 0.0, alpha: float = 0.0, beta: float = 1.0, default_error: float = 1000000,
        eta: float = 1.0, cmin: int = 5000, *, seed: int | None = None,
    ) -> None:  # fmt: skip
        options = n_step, epsilon, alpha, beta, default_error, eta, cmin
        super().__init__(size, device, actor, algorithm, envs, *options, seed=seed)
        if self.recurrent_actor:
            raise LifecycleError(
                "HERBuffer: the actor is recurrent, but its states come from the original observations, not from "
                "relabelled ones; use a feed-forward actor, or EREBuffer, which has everything else that HERBuffer has"
            )
        self.her_function = her_function
        self._lengths = np.zeros(0, np.int64)

    @classmethod
    def create_factory(  # pyright: ignore[reportIncompatibleMethodOverride] - as there
        cls, size: int, her_function: HerFunction = unchanged, n_step: int = 1, epsilon: float = 0.0,
        alpha: float = 0.0, beta: float = 1.0, default_error: float = 1000000, eta: float = 1.0, cmin: int = 5000, *,
        seed: int | None = None,
    ) -> Factory:  # fmt: skip
        """A function ``(device, actor, algorithm, envs)`` that creates such buffers."""
        options = her_function, n_step, epsilon, alpha, beta, default_error, eta, cmin
        return lambda device, actor, algorithm, envs: cls(size, device, actor, algorithm, envs, *options, seed=seed)

    def insert_transition(self, sample: Mapping[str, Any]) -> None:
        """As in :class:`ReplayBuffer`; then append copies of the episodes that ended."""
        super().insert_transition(sample)
        self._count(as_host(sample[DONE2]).reshape(1, -1) != 0)

    def _extend(self, steps: Data) -> None:
        """As in :class:`ReplayBuffer`. The copy of an episode is added right after its end."""
        done = as_host(steps[DONE2])
        done = done.reshape(*done.shape[:2]) != 0
        cuts = [0, *(np.flatnonzero(done.any(1)) + 1).tolist(), len(done)]
        for low, high in itertools.pairwise(dict.fromkeys(cuts)):
            part = itemgetter(slice(low, high))
            super()._extend({key: mapped(part, value) for key, value in steps.items()})
            self._count(done[low:high])

    def _count(self, done: Any) -> None:
        """Count stored steps, bool ``[T, N]``. Only the last one may end episodes."""
        if not len(self._lengths):
            self._lengths = np.zeros(done.shape[1], np.int64)
        self._lengths += len(done)
        ended = np.flatnonzero(done[-1])
        if len(ended):
            self.handle_end_of_episode(ended)
            self._lengths[ended] = 0

    def _forget(self) -> None:
        """As in :class:`ReplayBuffer`. Unfinished episodes are counted from here."""
        super()._forget()
        self._lengths[:] = 0

    def handle_end_of_episode(self, envs: Any = None) -> None:
        """Append relabelled copies of the episodes that these envs (default: all) just ended."""
        replay = self._stored.replay
        hindsight = Hindsight(relabel=self._relabel, strategy="final", k=1)
        for env in range(replay.num_envs) if envs is None else envs:
            count = int(self._lengths[env])
            episode = _episode(replay.slice(int(env), -count).exclude("index", "complete")) if count else {}
            if not len(episode.get("reward", ())):
                continue
            copy = hindsight.copies(episode, 1, seed=0)
            copy["copied"] = np.ones_like(copy["terminated"])
            replay.extend(copy, envs=[int(env)])
            replay.interrupt([int(env)])

    def _relabel(self, steps: Data, initial: Any, final: Any, chosen: Any) -> Data:
        """Call ``her_function`` for :class:`relive.Hindsight`."""
        count, states = len(steps["reward"]), self._stored.states
        zeros = [
            mapped(lambda x: np.repeat(x[0, :1], count, 0), states.get(key, np.zeros((1, 1)))) for key in (RHS, RHS2)
        ]
        given = [
            mapped(lambda x: np.array(x, np.float32), x) for x in (steps["obs"], steps["next_obs"], initial, final)
        ]
        reward = np.array(steps["reward"], np.float32).reshape(count, *self._stored.shapes[REW])
        obs, _, obs2, _, reward = self.her_function(given[0], zeros[0], given[1], zeros[1], reward, *given[2:])
        changed = {"obs": _like(obs, steps["obs"]), "next_obs": _like(obs2, steps["next_obs"])}
        return {**changed, "reward": np.asarray(reward, np.float32).reshape(-1)}


def _episode(steps: Any) -> Data:
    """The newest steps in which each leads to the next, without the last step; arrays ``[T, 1, ...]``.

    An episode is cut where steps of another collector were stored between its own.
    """
    fields: Data = {name: arrays_of(steps[name]) for name in steps.keys()}
    cuts = np.flatnonzero(breaks(fields["obs"], fields["next_obs"], fields["terminated"]))
    part = itemgetter(slice(cuts[-1] + 1 if len(cuts) else 0, -1))
    return {name: mapped(part, value) for name, value in fields.items()}


def _like(value: Any, stored: Any) -> Any:
    """``value`` with the dtypes of ``stored``."""
    return mapped(lambda had, new: np.asarray(new).astype(had.dtype), stored, value)
