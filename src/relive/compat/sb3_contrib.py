"""sb3-contrib's rollout buffers on relive's core, compared with sb3-contrib 2.9, and ``RecurrentPPO`` over them.

sb3-contrib must be installed: ``MaskablePPO`` and ``RecurrentPPO`` require subclasses of its own classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from ..core import key as stream
from ..rollout.minibatches import rows_of
from ..steps.arrays import Array, Bools, Ints
from ..steps.schema import Field, Path
from .base import Column, drawn_by_numpy, passes_on, sent
from .stable_baselines3 import SERVED, RolloutBuffer, require_dict

__all__ = [
    "MaskableDictRolloutBuffer",
    "MaskableRolloutBuffer",
    "RecurrentDictRolloutBuffer",
    "RecurrentPPO",
    "RecurrentRolloutBuffer",
]

maskable: Any = import_module("sb3_contrib.common.maskable.buffers")
recurrent: Any = import_module("sb3_contrib.common.recurrent.buffers")
samples: Any = import_module("sb3_contrib.common.recurrent.type_aliases")
host_ppo: Any = import_module("sb3_contrib.ppo_recurrent.ppo_recurrent")


class MaskableRolloutBuffer(RolloutBuffer, maskable.MaskableRolloutBuffer):
    """``sb3_contrib.common.maskable.buffers.MaskableRolloutBuffer`` with its arguments, and ``seed``.

    ``action_masks``, float32 ``[buffer_size, n_envs, mask_dims]``, is the storage, like the other columns.

    Args:
        args: see :class:`relive.compat.stable_baselines3.RolloutBuffer`.
        kwargs: see :class:`relive.compat.stable_baselines3.RolloutBuffer`.

    Raises:
        ValueError: an action space without masks.
    """

    action_masks: Column = Column("action_mask")

    _served = (*SERVED, "action_mask")
    _kinds = (maskable.MaskableRolloutBufferSamples, maskable.MaskableDictRolloutBufferSamples)
    _float_actions = False

    @passes_on(RolloutBuffer.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def _further_fields(self) -> dict[str, Field]:
        self.mask_dims = mask_dims(self.action_space)
        return {"action_mask": Field((self.mask_dims,))}

    def reset(self) -> None:
        """Forget the rollout and keep the memory. Masks allow every action until they are written."""
        super().reset()
        self.action_masks = 1

    def add(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        episode_start: Any,
        value: Any,
        log_prob: Any,
        *,
        action_masks: Any = None,
    ) -> None:
        """Append one step of every env, as ``RolloutBuffer.add`` does.

        Args:
            obs: before the step.
            action: of the step.
            reward: of the step.
            episode_start: whether ``obs`` is the first of an episode.
            value: V(obs).
            log_prob: of the action.
            action_masks: which actions were allowed, ``[N, mask_dims]``; all, if None.

        Raises:
            FullError: the buffer is full; call :meth:`reset`.
        """
        size = self.n_envs, self.mask_dims
        masks = np.ones(size) if action_masks is None else np.asarray(action_masks).reshape(size)
        self._further = {"action_mask": masks.astype(np.float32)}
        super().add(obs, action, reward, episode_start, value, log_prob)


class MaskableDictRolloutBuffer(MaskableRolloutBuffer, maskable.MaskableDictRolloutBuffer):
    """``sb3_contrib.common.maskable.buffers.MaskableDictRolloutBuffer``, for a Dict space.

    Args:
        buffer_size: steps of each env.
        observation_space: of one env, a Dict.
        args: see :class:`MaskableRolloutBuffer`.
        kwargs: see :class:`MaskableRolloutBuffer`.
    """

    @passes_on(RolloutBuffer.__init__)
    def __init__(self, buffer_size: int, observation_space: spaces.Dict, *args: Any, **kwargs: Any) -> None:
        require_dict(observation_space, "MaskableDictRolloutBuffer")
        super().__init__(buffer_size, observation_space, *args, **kwargs)


def mask_dims(space: object) -> int:
    """How many numbers the mask of an action has: one for each choice.

    Raises:
        ValueError: actions of this space have no masks.
    """
    if isinstance(space, spaces.Discrete):
        return int(cast("spaces.Discrete[Any]", space).n)
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.sum())
    if isinstance(space, spaces.MultiBinary):
        assert isinstance(space.n, int), (
            f"Multi-dimensional MultiBinary({space.n}) action space is not supported. You can flatten it instead."
        )
        return 2 * space.n
    raise ValueError(f"Unsupported action space {type(space)}")


class StateColumn(Column):
    """A recurrent state: relive has the layers after the envs, the host before them."""

    def shown(self, column: Array) -> Array:
        """The state as ``[T, layers, N, size]``."""
        return column.swapaxes(1, 2)


STATES = ("hidden_pi", "cell_pi", "hidden_vf", "cell_vf")
Gather: TypeAlias = Callable[[Tensor], dict[Path, Tensor]]
"""Reads the rows of an index, each field as a tensor."""
PADDED = (*SERVED, "episode_start")
"""The columns of a batch of sequences."""


class RecurrentRolloutBuffer(RolloutBuffer, recurrent.RecurrentRolloutBuffer):
    """``sb3_contrib.common.recurrent.buffers.RecurrentRolloutBuffer`` with its arguments, and ``seed``.

    ``hidden_states_pi``, ``cell_states_pi``, ``hidden_states_vf`` and ``cell_states_vf`` are views of the storage,
    ``[buffer_size, layers, n_envs, size]``, before and after :meth:`get`.

    Args:
        buffer_size: T, steps per env.
        observation_space: of one env.
        action_space: of one env.
        hidden_state_shape: ``(T, layers, N, size)`` of each of the four states.
        args: see :class:`relive.compat.stable_baselines3.RolloutBuffer`.
        kwargs: see :class:`relive.compat.stable_baselines3.RolloutBuffer`.
    """

    hidden_states_pi: Column = StateColumn("hidden_pi")
    cell_states_pi: Column = StateColumn("cell_pi")
    hidden_states_vf: Column = StateColumn("hidden_vf")
    cell_states_vf: Column = StateColumn("cell_vf")

    _kinds = (samples.RecurrentRolloutBufferSamples, samples.RecurrentDictRolloutBufferSamples)
    _step_only = ("rewards",)

    @passes_on(RolloutBuffer.__init__)
    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        hidden_state_shape: tuple[int, int, int, int],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.hidden_state_shape = hidden_state_shape
        self._gets = 0
        super().__init__(buffer_size, observation_space, action_space, *args, **kwargs)
        stored = [path for path in self._rollout.schema.leaves if path[0] in PADDED]
        self._columns: list[Path] = [*stored, ("advantage",), ("return",)]

    def _further_fields(self) -> dict[str, Field]:
        _, layers, _, size = self.hidden_state_shape
        return {name: Field((layers, size)) for name in STATES}

    def add(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        episode_start: Any,
        value: Any,
        log_prob: Any,
        *,
        lstm_states: Any = None,
    ) -> None:
        """Append one step of every env, as ``RolloutBuffer.add`` does.

        Args:
            obs: before the step.
            action: of the step.
            reward: of the step.
            episode_start: whether ``obs`` is the first of an episode.
            value: V(obs).
            log_prob: of the action.
            lstm_states: the host's ``RNNStates`` before the step, ``[layers, N, size]`` each.

        Raises:
            TypeError: there are no ``lstm_states``.
            FullError: the buffer is full; call :meth:`reset`.
        """
        if lstm_states is None:
            raise TypeError("add() needs lstm_states=RNNStates(pi, vf), the states before the step")
        states = [x.numpy(force=True).swapaxes(0, 1) for x in (*lstm_states.pi, *lstm_states.vf)]
        self._further = dict(zip(STATES, states, strict=True))
        super().add(obs, action, reward, episode_start, value, log_prob)

    def get(self, batch_size: int | None = None) -> Iterator[Any]:
        """All transitions once as the host's named tuples: sequences, padded with zeros to the longest of a batch.

        Transitions are in the order of time, env by env, from a random one on. A batch has the next ``batch_size`` of
        them; its sequences end where an episode, an env or the batch ends. Its ``lstm_states`` are those before the
        first step of each sequence, and its other tensors have a row for each step of each, padding included.

        Args:
            batch_size: B; None is one batch of all. The last batch may be smaller.

        Raises:
            AssertionError: the rollout is not full.
        """
        assert self.full, "the rollout is not full; add the remaining steps first"
        self.generator_ready: bool = True
        steps, envs = int(self.buffer_size), int(self.n_envs)
        total = steps * envs
        first = drawn_by_numpy(total) if self._seed is None else stream(self._seed, self._gets) % total
        self._gets += 1
        order: Ints = np.roll(np.arange(total), -first)  # counted env by env
        starts = np.ascontiguousarray(self.episode_starts.T).ravel() != 0
        starts[::steps] = True
        rows: Ints = order % steps * envs + order // steps
        size = batch_size or total
        columns, states = (
            rows_of({path: self._rollout[path] for path in paths}, pack=False).gather
            for paths in (self._columns, [(name,) for name in STATES])
        )
        return (
            self._padded(columns, states, rows[low : low + size], starts[order[low : low + size]])
            for low in range(0, total, size)
        )

    def _padded(self, columns: Gather, states: Gather, rows: Ints, starts: Bools) -> Any:
        """The sequences of a batch, given its flat rows ``t * N + n`` and where sequences start."""
        starts[0] = True  # a copy
        first = np.flatnonzero(starts)
        lengths = np.diff(first, append=len(rows))
        time: Ints = np.arange(int(lengths.max()))
        real: Bools = time < lengths[:, None]
        places = torch.from_numpy(rows[np.where(real, first[:, None] + time, 0)].ravel())
        self.seq_start_indices: Any = first
        batch = columns(places)
        if not real.all():
            padding = torch.from_numpy(~real.ravel())
            for column in batch.values():
                column[padding] = 0
        before = states(torch.from_numpy(rows[first]))
        hidden_pi, cell_pi, hidden_vf, cell_vf = (
            sent(before[name,].transpose(0, 1).contiguous(), self.device) for name in STATES
        )
        obs = {path[1:]: self._observed(x) for path, x in batch.items() if path[0] == "obs"}
        nested = isinstance(self.observation_space, spaces.Dict)
        rest = [sent(batch[name,], self.device) for name in SERVED[1:]]
        return self._kinds[nested](
            {key: obs[key,] for key in self.observation_space.spaces} if nested else obs[()],
            *rest,
            samples.RNNStates((hidden_pi, cell_pi), (hidden_vf, cell_vf)),
            sent(batch["episode_start",], self.device),
            sent(torch.from_numpy(real.ravel().astype(np.float32)), self.device),
        )


class RecurrentDictRolloutBuffer(RecurrentRolloutBuffer, recurrent.RecurrentDictRolloutBuffer):
    """``sb3_contrib.common.recurrent.buffers.RecurrentDictRolloutBuffer``, for a Dict space.

    Args:
        buffer_size: steps of each env.
        observation_space: of one env, a Dict.
        args: see :class:`RecurrentRolloutBuffer`.
        kwargs: see :class:`RecurrentRolloutBuffer`.
    """

    @passes_on(RecurrentRolloutBuffer.__init__)
    def __init__(self, buffer_size: int, observation_space: spaces.Dict, *args: Any, **kwargs: Any) -> None:
        require_dict(observation_space, "RecurrentDictRolloutBuffer")
        super().__init__(buffer_size, observation_space, *args, **kwargs)


Base: Any = host_ppo.RecurrentPPO


class RecurrentPPO(Base):
    """``sb3_contrib.RecurrentPPO`` with a rollout buffer of this module; it has no argument for the class of one."""

    def _setup_model(self) -> None:
        super()._setup_model()
        nested = isinstance(self.observation_space, spaces.Dict)
        kind = RecurrentDictRolloutBuffer if nested else RecurrentRolloutBuffer
        self.rollout_buffer: Any = kind.from_original(self.rollout_buffer)
