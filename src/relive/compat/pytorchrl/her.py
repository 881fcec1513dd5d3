"""HERBuffer of PyTorchRL 3.2 over :class:`relive.Hindsight`."""

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
    """The ``her_function`` that is the default: transitions as they were."""
    return obs, rhs, obs2, rhs2, rew


class HERBuffer(EREBuffer):
    """``pytorchrl.agent.storages.HERBuffer``: at an episode's end a copy of it is appended, as ``her_function`` says.

    ``her_function(obs, rhs, obs2, rhs2, rew, initial_state, final_state) -> (obs, rhs, obs2, rhs2, rew)`` gets float32
    arrays ``[K, ...]``, or dictionaries of them: K steps of one env's episode, where the host has its envs.
    ``initial_state`` is the episode's first observation, as far as it is stored, ``final_state`` the last one, for each
    of them alike; recurrent states are the buffer's zeros. Episodes may have any length, in any number of envs, and may
    lie across the place where the memory comes round. PyTorchRL's envs reset themselves and lose the observation that
    an episode ended on; so the last one is that before the last step, and the copy has all steps but that one. Flags
    are copied. ``size`` and slices know of steps alone, and who inserts a slice makes copies of its own. Copies take
    part of the ``size`` steps of memory. Feed-forward actors only.

    Args:
        size: as :class:`EREBuffer`, and so the others.
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
                "HERBuffer: the actor is recurrent, but its states were made of observations as they were, not of "
                "relabelled ones; use a feed-forward actor, or EREBuffer, which has all that HERBuffer has besides"
            )
        self.her_function = her_function
        self._lengths = np.zeros(0, np.int64)

    @classmethod
    def create_factory(  # pyright: ignore[reportIncompatibleMethodOverride] - as there
        cls, size: int, her_function: HerFunction = unchanged, n_step: int = 1, epsilon: float = 0.0,
        alpha: float = 0.0, beta: float = 1.0, default_error: float = 1000000, eta: float = 1.0, cmin: int = 5000, *,
        seed: int | None = None,
    ) -> Factory:  # fmt: skip
        """A function ``(device, actor, algorithm, envs)`` that makes such buffers."""
        options = her_function, n_step, epsilon, alpha, beta, default_error, eta, cmin
        return lambda device, actor, algorithm, envs: cls(size, device, actor, algorithm, envs, *options, seed=seed)

    def insert_transition(self, sample: Mapping[str, Any]) -> None:
        """As :class:`ReplayBuffer`; then copies of the episodes that ended."""
        super().insert_transition(sample)
        self._count(as_host(sample[DONE2]).reshape(1, -1) != 0)

    def _extend(self, steps: Data) -> None:
        """As :class:`ReplayBuffer`; an episode's copy comes right after its end."""
        done = as_host(steps[DONE2])
        done = done.reshape(*done.shape[:2]) != 0
        cuts = [0, *(np.flatnonzero(done.any(1)) + 1).tolist(), len(done)]
        for low, high in itertools.pairwise(dict.fromkeys(cuts)):
            part = itemgetter(slice(low, high))
            super()._extend({key: mapped(part, value) for key, value in steps.items()})
            self._count(done[low:high])

    def _count(self, done: Any) -> None:
        """Steps were stored, of which only the last may have ended episodes."""
        if not len(self._lengths):
            self._lengths = np.zeros(done.shape[1], np.int64)
        self._lengths += len(done)
        ended = np.flatnonzero(done[-1])
        if len(ended):
            self.handle_end_of_episode(ended)
            self._lengths[ended] = 0

    def _forget(self) -> None:
        """As :class:`ReplayBuffer`; of the episodes under way what comes next counts."""
        super()._forget()
        self._lengths[:] = 0

    def handle_end_of_episode(self, envs: Any = None) -> None:
        """Append what ``her_function`` makes of the episodes that these envs (default: all) just ended."""
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
        """``her_function`` as a function of :class:`relive.Hindsight`."""
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
    """The newest steps that went on from one another, but for the last one; arrays ``[T, 1, ...]``.

    A collector's episode under way is cut off where those of another one lie between its steps.
    """
    fields: Data = {name: arrays_of(steps[name]) for name in steps.keys()}
    cuts = np.flatnonzero(breaks(fields["obs"], fields["next_obs"], fields["terminated"]))
    part = itemgetter(slice(cuts[-1] + 1 if len(cuts) else 0, -1))
    return {name: mapped(part, value) for name, value in fields.items()}


def _like(value: Any, stored: Any) -> Any:
    """In the dtypes that are stored."""
    return mapped(lambda had, new: np.asarray(new).astype(had.dtype), stored, value)
