"""Velora's replay buffer, built on relive's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import ParameterError
from ...replay.buffer import ReplayBuffer as Replay
from ...steps.schema import Field, Schema
from ..attributes import Column
from ..inbox import Inbox
from ..seeds import renew
from . import files
from .experience import BatchExperience, row, rows
from .warm import generated

__all__ = ["ReplayBuffer"]

FIELDS = {
    "states": "obs",
    "actions": "action",
    "rewards": "reward",
    "next_states": "next_obs",
    "dones": "done",
    "hiddens": "memory",
}
"""Velora's names, in its order -> relive's."""

FORMS, SHARED = 16, 256
"""How many sizes of :meth:`ReplayBuffer.add_multi` have arrays kept for them, and the largest such size."""

UNKNOWN = np.zeros(1, np.bool_)
"""Velora does not distinguish terminals and truncations. relive's flags stay False; ``done`` is a further column."""


class ReplayBuffer:
    """The newest ``capacity`` transitions, in no particular order, under Velora's names.

    ``states``, ``actions``, ``rewards``, ``next_states``, ``dones`` and ``hiddens`` are views into the storage,
    float32 ``[capacity, size]``; rewards and dones have size 1. Assigning to one copies into it. Unused rows are zero.
    The views are not contiguous, because the fields of a transition are stored side by side. ``hiddens`` are what
    Velora's agent passes: its recurrent state after the step.

    Args:
        capacity: transitions, at least 2.
        state_dim: numbers of an observation.
        action_dim: numbers of an action.
        hidden_dim: numbers of the actor's recurrent state.
        device: of the storage; None is the CPU.
        seed: not in Velora; batch t is a function of (seed, t). None draws a seed for each batch from torch's
            default generator, as Velora does.

    Raises:
        ParameterError: a capacity below 2, or above what fits into memory.
    """

    states, actions, rewards = Column("obs"), Column("action"), Column("reward")
    next_states, dones, hiddens = Column("next_obs"), Column("done"), Column("memory")

    def __init__(
        self,
        capacity: int,
        state_dim: int,
        action_dim: int,
        hidden_dim: int,
        *,
        device: torch.device | str | None = None,
        seed: int | None = None,
    ) -> None:
        self.capacity, self.device = capacity, device
        self.state_dim, self.action_dim, self.hidden_dim = state_dim, action_dim, hidden_dim
        schema = Schema(
            {
                "obs": (state_dim,),
                "action": (action_dim,),
                "reward": (),
                "terminated": Field((), torch.bool),
                "truncated": Field((), torch.bool),
                "done": (),
                "memory": (hidden_dim,),
            }
        )
        self._replay = Replay(schema, capacity, ordered=False, device=device or "cpu", seed=seed or 0)
        self._seed = seed
        self._on, self._added = self._replay.device, 0
        self._sizes = {"obs": state_dim, "action": action_dim, "next_obs": state_dim, "memory": hidden_dim}
        self._forms: dict[tuple[int, Any], tuple[Inbox, dict[str, Any]] | None] = {}

    def _form(self, count: int, seen: Any) -> tuple[Inbox, dict[str, Any]] | None:
        """The arrays that the tensors of ``count`` transitions are copied into; with 0, of a single one.

        ``seen`` is the dtype of the observations. None unless it is float32 or float64 and the storage is in RAM.
        """
        if (count, seen) in self._forms:
            return self._forms[count, seen]
        if len(self._forms) >= FORMS:
            self._forms.clear()
        fits = seen in (torch.float32, torch.float64) and self._on.type == "cpu" and count <= SHARED
        self._forms[count, seen] = self._new_form(count, str(seen).removeprefix("torch.")) if fits else None
        return self._forms[count, seen]

    def _new_form(self, count: int, seen: str) -> tuple[Inbox, dict[str, Any]]:
        front = (count, 1) if count else (1,)
        step: dict[str, Any] = {name: np.zeros(front, np.float32) for name in ("reward", "done")}
        step |= {name: np.zeros(front, np.bool_) for name in ("terminated", "truncated")}
        for name, size in self._sizes.items():
            step[name] = np.zeros((*front, size), seen if name in ("obs", "next_obs") else np.float32)
        names = tuple(FIELDS.values()) if count else tuple(self._sizes)
        sizes = [self._sizes.get(name, 1) for name in names]
        shapes = [((count, size), (count,) if size == 1 else (count, size)) for size in sizes]
        alone = [((size,), (1, size)) for size in sizes]
        return Inbox([step[name] for name in names], shapes if count else alone), step

    @property
    def position(self) -> int:
        """The row of the next transition."""
        return self._added % self.capacity

    @property
    def size(self) -> int:
        """How many transitions are stored."""
        return min(self._added, self.capacity)

    def __len__(self) -> int:
        """How many transitions are stored."""
        return self.size

    def column(self, name: str) -> Tensor:
        """A column of the storage as a view ``[capacity, size]``; ``name`` is relive's."""
        column = self._replay.block[name]
        return column.unsqueeze(-1) if name in ("reward", "done") else column

    # -- writing ------------------------------------------------------------------------------------------------

    def add(self, state: Any, action: Any, reward: Any, next_state: Any, done: Any, hidden: Any) -> None:
        """Store one transition. Each value may have a leading axis of 1.

        Raises:
            StepShapeError: a value has the wrong size. Nothing is stored.
        """
        on, form = self._on, self._form(0, getattr(state, "dtype", None))
        if form is not None and isinstance(reward, float) and isinstance(done, bool | np.bool_):
            inbox, step = form
            if inbox.take((state, action, next_state, hidden)):
                step["reward"][0], step["done"][0] = reward, done
                self._replay.add(step)
                self._added += 1
                return
        step = {
            "obs": row("state", state, self.state_dim, on),
            "action": row("action", action, self.action_dim, on),
            "reward": row("reward", reward, 1, on)[0],
            "next_obs": row("next_state", next_state, self.state_dim, on),
            "done": row("done", done, 1, on)[0],
            "memory": row("hidden", hidden, self.hidden_dim, on),
            "terminated": UNKNOWN,
            "truncated": UNKNOWN,
        }
        self._replay.add(step)
        self._added += 1

    def add_multi(self, states: Any, actions: Any, rewards: Any, next_states: Any, dones: Any, hiddens: Any) -> None:
        """Store several transitions ``[B, ...]``; rewards and dones may be ``[B]``. The last ``capacity`` stay.

        Raises:
            StepShapeError: a shape does not fit. Nothing is stored.
        """
        count, on = len(states), self._on
        form = self._form(count, getattr(states, "dtype", None))
        if count and form is not None and form[0].take((states, actions, rewards, next_states, dones, hiddens)):
            self._replay.extend(form[1])
            self._added += count
            return
        flags = np.zeros((count, 1), np.bool_)
        columns = {
            "obs": rows("states", states, count, self.state_dim, on)[:, None],
            "action": rows("actions", actions, count, self.action_dim, on)[:, None],
            "reward": rows("rewards", rewards, count, 1, on),
            "next_obs": rows("next_states", next_states, count, self.state_dim, on)[:, None],
            "done": rows("dones", dones, count, 1, on),
            "memory": rows("hiddens", hiddens, count, self.hidden_dim, on)[:, None],
            "terminated": flags,
            "truncated": flags,
        }
        self._replay.extend(columns)
        self._added += count

    def warm(self, agent: Any, n_samples: int, num_envs: int = 8, *, envs: Any = None) -> None:
        """Play ``agent`` in new copies of its environment, and store ``n_samples`` transitions.

        ``dones`` are True for terminals only. Steps that reset an environment are left out. Each episode begins with
        the actor's initial recurrent state. The first reset uses ``agent.seed``, if there is one.

        Args:
            agent: Velora's, or any object with ``predict(states, hidden, train_mode=True)`` and ``env``.
            n_samples: transitions to add, at most ``capacity``.
            num_envs: parallel environments, at least 2.
            envs: not in Velora; a vector environment to play in, if ``agent.env`` cannot be made again from its spec.

        Raises:
            ParameterError: fewer than 2 environments, or more samples than there is room for.
        """
        if num_envs < 2:
            raise ParameterError(f"'{num_envs=}' cannot be smaller than 2.")
        if n_samples > self.capacity:
            raise ParameterError(
                f"'{n_samples=}' do not fit: the buffer's capacity is {self.capacity}; ask for that many"
            )
        for block in generated(agent, n_samples, num_envs, envs):
            self.add_multi(*block)

    # -- reading ------------------------------------------------------------------------------------------------

    def sample(self, batch_size: int) -> BatchExperience:
        """``batch_size`` transitions, drawn uniformly with replacement and copied.

        Raises:
            ParameterError: fewer are stored.
        """
        if len(self) < batch_size:
            raise ParameterError(
                f"Buffer does not contain enough experiences. Available: {len(self)}, Requested: {batch_size}"
            )
        renew(self._replay, self._seed)
        batch = self._replay.sample(batch_size)
        columns = {name: batch[inner].contiguous() for name, inner in FIELDS.items()}
        columns |= {name: columns[name].unsqueeze(-1) for name in ("rewards", "dones")}
        return BatchExperience(**columns)

    def metadata(self) -> dict[str, Any]:
        """Sizes and cursors, with the entries of Velora's ``metadata.json``."""
        return {
            "capacity": self.capacity,
            "state_dim": self.state_dim,
            "action_dim": self.action_dim,
            "hidden_dim": self.hidden_dim,
            "position": self.position,
            "size": self.size,
            "device": str(self.device) if self.device else None,
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Contiguous copies of the six tensors ``[capacity, ...]``, as Velora's ``save_model`` writes them."""
        return {name: self.column(inner).contiguous() for name, inner in FIELDS.items()}

    def config(self) -> Any:
        """Velora's ``BufferConfig`` for its agents' configurations. Velora must be installed."""
        config: Any = import_module("velora.models.config")
        return config.BufferConfig(
            type="ReplayBuffer",
            capacity=self.capacity,
            state_dim=self.state_dim,
            action_dim=self.action_dim,
            hidden_dim=self.hidden_dim,
        )

    # -- files --------------------------------------------------------------------------------------------------

    def save(self, dirpath: str | os.PathLike[str], prefix: str = "buffer_") -> None:
        """Write ``<prefix>metadata.json`` and ``<prefix>state.safetensors`` into a directory, as Velora does.

        Each file is replaced completely or not at all.
        """
        files.save(dirpath, prefix, self.metadata(), {name: self.column(inner) for name, inner in FIELDS.items()})

    @classmethod
    def load(
        cls,
        state_path: str | os.PathLike[str],
        metadata: Mapping[str, Any],
        *,
        device: torch.device | str | None = None,
        seed: int | None = None,
    ) -> ReplayBuffer:
        """Load a buffer that Velora or relive saved.

        Args:
            state_path: the ``.safetensors`` file, with or without that ending.
            metadata: the content of the ``.json`` file.
            device: not in Velora; replaces the device in the metadata.
            seed: not in Velora; see the class.

        Raises:
            NoSaveError: there is no such file. Also a FileNotFoundError.
            FileFormatError: the file is damaged, is not Velora's, or contradicts the metadata.
        """
        known = files.checked(metadata)
        where = device or known["device"] or "cpu"
        sizes = known["capacity"], known["state_dim"], known["action_dim"], known["hidden_dim"]
        state = files.load(state_path, known, FIELDS)
        buffer = cls(*sizes, device=torch.device(where), seed=seed)
        parts = [state[name] for name in FIELDS]
        if known["size"]:
            buffer.add_multi(*parts)
            if known["size"] == known["capacity"] and known["position"]:
                # added once more, so that the next transition goes to `position`
                buffer.add_multi(*(part[: known["position"]] for part in parts))
        return buffer

    def __repr__(self) -> str:
        sizes = f"{self.capacity}, {self.state_dim}, {self.action_dim}, {self.hidden_dim}"
        return f"ReplayBuffer({sizes}, device={self.device!r}, seed={self._seed})"
