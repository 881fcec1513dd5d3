"""Views: what a batch makes of the anchors that a sampler drew."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from . import kernels
from .errors import SchemaError
from .ring import Ints, Ring, Rule
from .rows import ReplayRows, RowLayout, typed
from .schema import Field, Path

__all__ = ["FrameStack", "NStep", "Transition", "View", "rule_of", "time_first_of"]

RESULTS = {
    ("index",): Field((), torch.int64),
    ("next_index",): Field((), torch.int64),
    ("discount",): Field((), torch.float32),
    ("steps",): Field((), torch.int32),
}


class View(Protocol):
    """Turns the places of anchors into the fields of a batch.

    One that reads sequences has two more members: ``rule`` (:class:`relive.ring.Rule`), what can be drawn, and
    ``time_first`` (bool), whether time is the first axis of what it reads or the second.
    """

    @property
    def history(self) -> int:
        """How many rows before an anchor it reads, as far as the episode has them."""
        ...

    def read(self, ring: Ring, places: Ints) -> dict[Path, Tensor]:
        """The fields ``[B, ...]`` of a batch."""
        ...


def rule_of(view: View) -> Rule:
    """What can be drawn through a view: single transitions, unless it says more."""
    rule: Rule | None = getattr(view, "rule", None)
    return Rule(view.history) if rule is None else rule


def time_first_of(view: View) -> bool | None:
    """Whether time is the first axis of a batch of sequences; None for a view of transitions."""
    return getattr(view, "time_first", None)


READ = ("reward", "terminated", "truncated", "_stamp")
"""What the kernel reads of a step, in its order."""

WRITTEN = ("index", "next_index", "discount", "steps", "reward", "terminated", "truncated")
"""What the kernel notes with a window, in its order."""


def _ints(values: Iterable[int]) -> Ints:
    return np.array(list(values), np.int64)


def _bytes_of(layout: RowLayout, names: tuple[str, ...]) -> Ints:
    return _ints(layout.offsets[name,] for name in names)


class _Batch:
    """The packed rows of a batch: the fields of a step, the next observation, and what the window came to."""

    def __init__(self, store: ReplayRows) -> None:
        obs, others, given = store.groups
        following = {("next_obs", *path[1:]): leaf for path, leaf in obs.items()}
        self.layout = RowLayout(obs, others, given or following, RESULTS)
        self.given = bool(given) or ("next_obs",) in store.blocks or any(p[0] == "next_obs" for p in store.blocks)
        stored, following_at = self.layout.starts[3 if given else 2], self.layout.starts[2]
        sizes = stored, following_at, -1 if self.given else self.layout.starts[1]
        self.at, self.to, self.sizes = _bytes_of(store.layout, READ), _bytes_of(self.layout, WRITTEN), _ints(sizes)


@dataclass(slots=True)
class NStep:
    """n-step transitions (Sutton and Barto 2018, section 7.1): windows of up to ``n`` rewards from the anchor on.

    A window stops at a done and at the newest complete step. The batch holds the step's own fields and:
    ``reward`` rₜ + γrₜ₊₁ + ... over the k steps used, ``discount`` γᵏ(1 - terminated), ``next_obs`` after them, so that
    the target is always ``reward + discount * V(next_obs)``; ``terminated`` and ``truncated`` of the last of them,
    ``steps`` k (int32), and the int64 ``index`` and ``next_index`` of the first step and of the row that holds
    ``next_obs``.

    Args:
        n: rewards per window.
        gamma: discount per step. Both may be changed at any time.
    """

    n: int = 1
    gamma: float = 0.99
    _layouts: WeakKeyDictionary[ReplayRows, _Batch] = field(
        default_factory=WeakKeyDictionary["ReplayRows", "_Batch"], init=False, repr=False, compare=False
    )

    @property
    def history(self) -> int:
        """Nothing before the anchor is read."""
        return 0

    def read(self, ring: Ring, places: Ints) -> dict[Path, Tensor]:
        """The fields ``[B, ...]`` of the windows that start at ``places``."""
        fields, last = self.windows(ring, places)
        for path in ring.store.blocks:
            fields[path] = ring.store.gather_block(path, places)
            if path[0] == "obs" and last is not None:
                fields["next_obs", *path[1:]] = ring.store.gather_block(path, last)
        return fields

    def windows(self, ring: Ring, places: Ints) -> tuple[dict[Path, Tensor], Ints | None]:
        """All but the large fields, and the places of the next observations, unless those are stored as given.

        Raises:
            SchemaError: n is not at least 1, or above 1 where steps have no order.
        """
        store = ring.store
        batch = self._layouts.get(store)
        if batch is None:
            batch = self._layouts[store] = _Batch(store)
        if self.n < 1 or (batch.given and self.n > 1):
            raise SchemaError(f"NStep(n={self.n}): n is at least 1, and exactly 1 where steps are stored without order")
        out, last = np.empty((len(places), batch.layout.nbytes), np.uint8), np.empty(len(places), np.int64)
        kernels.fast().windows(
            places, ring.rows, self.n, self.gamma, ring.state, store.target, batch.at, out, batch.to, batch.sizes, last
        )
        arrays = batch.layout.arrays(out)
        fields = {path: typed(arrays[path], leaf.dtype) for path, leaf in batch.layout.fields.items()}
        return fields, None if batch.given else last


def Transition(gamma: float = 0.99) -> NStep:  # noqa: N802 - it reads as the view that it returns
    """Single transitions: :class:`NStep` with n = 1."""
    return NStep(1, gamma)


@dataclass(slots=True)
class FrameStack:
    """Observations stacked from single frames, for replays that store each frame once (Mnih et al. 2015).

    ``obs`` and ``next_obs`` come as ``[B, depth, ...]``, oldest frame first; no stack reaches into another episode.

    Args:
        depth: frames per stack.
        window: the view that decides where ``next_obs`` is.
        pad: what stands for the frames before an episode's first: "repeat" that one, or "zeros".
        keys: the members of a nested observation to stack, e.g. ("camera",); default all.
    """

    depth: int = 4
    window: NStep = field(default_factory=NStep)
    pad: Literal["repeat", "zeros"] = "repeat"
    keys: tuple[str, ...] | None = None

    @property
    def history(self) -> int:
        """The frames before the anchor's."""
        return max(self.depth - 1, 0)

    def read(self, ring: Ring, places: Ints) -> dict[Path, Tensor]:
        """The fields ``[B, ...]`` of the windows that start at ``places``, with stacked observations.

        Raises:
            SchemaError: depth or pad make no sense, or steps are stored without order.
        """
        if self.depth < 1 or self.pad not in ("repeat", "zeros"):
            raise SchemaError(f"FrameStack: depth is at least 1 and pad 'repeat' or 'zeros', got {self!r}")
        fields, last = self.window.windows(ring, places)
        if last is None:
            raise SchemaError("FrameStack needs steps in order; this replay stores them as they are given")
        store = ring.store
        members = {path[1:2] for path in store.leaves if path[0] == "obs"}
        unknown = [key for key in self.keys or () if (key,) not in members]
        if unknown:
            raise SchemaError(f"FrameStack(keys={self.keys}): the observation has no member {unknown[0]!r}")
        now, then = self._frames(ring, places), self._frames(ring, last)
        for path in store.leaves:
            large = path in store.blocks
            if path[0] == "obs":
                stacked = self.keys is None or (len(path) > 1 and path[1] in self.keys)
                for name, frames, at in (("obs", now, places), ("next_obs", then, last)):
                    if stacked:
                        fields[name, *path[1:]] = (
                            store.gather_block(path, frames) if large else _pick(store, path, frames)
                        )
                    elif large:
                        fields[name, *path[1:]] = store.gather_block(path, at)
            elif large:
                fields[path] = store.gather_block(path, places)
        return fields

    def _frames(self, ring: Ring, places: Ints) -> Ints:
        frames = np.empty((len(places), self.depth), np.int64)
        kernels.fast().stack_places(places, ring.rows, self.depth, self.pad == "repeat", ring.step, frames)
        return frames


def _pick(store: ReplayRows, path: Path, places: Ints) -> Tensor:
    """A small field at places ``[B, depth]``; zeros at negative ones."""
    picked: Any = store.arrays[path][places]
    picked[places < 0] = 0
    return typed(picked, store.leaves[path].dtype)
