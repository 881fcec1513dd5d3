"""Views: what a batch makes of the anchors that a sampler drew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

import numpy as np
from torch import Tensor

from . import kernels
from .errors import SchemaError
from .parameters import GAMMA_RULE, checked, is_count, is_names
from .ring import Ints, Ring, Rule
from .schema import Path
from .storage import as_host
from .store import Amend, Windows, require_rows, vector

__all__ = [
    "FrameStack",
    "NStep",
    "SequenceReader",
    "Transition",
    "View",
    "read_windows",
    "rule_of",
    "time_first_of",
]


class View(Protocol):
    """Turns the places of anchors into the fields of a batch.

    One that reads sequences has two more members: ``rule`` (:class:`relive.ring.Rule`), what can be drawn, and
    ``time_first`` (bool), whether time is the first axis of what it reads or the second. One that cannot read every
    ring may have ``require(ring)``, which is called when it is set, and raises.
    """

    @property
    def history(self) -> int:
        """How many rows before an anchor it reads, as far as the episode has them."""
        ...

    def read(self, ring: Ring, places: Ints, key: int | None = None) -> dict[Path, Tensor]:
        """The fields ``[B, ...]`` of a batch.

        ``key`` is the stream of random numbers of the batch, for views that draw; None where nothing is drawn, as by
        :meth:`relive.ReplayBuffer.data`. One that reads through another hands it on.
        """
        ...


class SequenceReader(View, Protocol):
    """A view that reads sequences, as far as type checkers have to know it."""

    @property
    def time_first(self) -> bool:
        """Whether time is the first axis of a batch, or the second."""
        ...


def rule_of(view: View) -> Rule:
    """What can be drawn through a view: single transitions, unless it says more."""
    rule: Rule | None = getattr(view, "rule", None)
    return Rule(int(view.history)) if rule is None else rule


def time_first_of(view: View) -> bool | None:
    """Whether time is the first axis of a batch of sequences; None for a view of transitions."""
    return getattr(view, "time_first", None)


WINDOW_RULE = "n is at least 1, and exactly 1 where steps are stored without order"


@checked(
    n=(lambda n: is_count(n, 1), WINDOW_RULE),
    gamma=GAMMA_RULE,
)
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
        gamma: discount per step, from 0 to 1.
        each_reward: what each reward counts as, before they are summed: float32 ``[B, n]`` -> ``[B, n]``, such as a
            normalization with running statistics. A save does not hold it: pass ``load(..., view=...)``. All may be
            changed at any time.

    Raises:
        SchemaError: n or gamma is out of range, here or when it is set later.
    """

    n: int = 1
    gamma: float = 0.99
    each_reward: Callable[[Any], Any] | None = field(default=None, repr=False, compare=False)

    @property
    def history(self) -> int:
        """Nothing before the anchor is read."""
        return 0

    def read(self, ring: Ring, places: Ints, key: int | None = None) -> dict[Path, Tensor]:
        """The fields ``[B, ...]`` of the windows that start at ``places``."""
        return read_windows(ring, self.windows(ring, places))

    def windows(self, ring: Ring, places: Ints, amend: Amend | None = None) -> Windows:
        """All but the large fields, and the places of the next observations, unless those are stored as given.

        Raises:
            SchemaError: n is above 1 where steps have no order.
        """
        if ring.alone and not ring.linked and self.n > 1:
            raise SchemaError(f"NStep(n={self.n}): {WINDOW_RULE}")
        found = ring.store.windows(places, ring.rows, self.n, self.gamma, ring.state, amend)
        if self.each_reward is not None:
            found.fields["reward",] = self._summed(ring, places, found.fields["steps",])
        return found

    def _summed(self, ring: Ring, places: Ints, steps: Tensor) -> Tensor:
        """The sum of the rewards of each window, once each has gone through ``each_reward``."""
        within = np.arange(self.n)
        window = places[:, None] // ring.rows * ring.rows + (places[:, None] + within) % ring.rows
        worth = np.where(within < as_host(steps)[:, None], self.gamma**within, 0.0)
        rewards = np.asarray(cast("Any", self.each_reward)(ring.store.meta("reward")[window]))
        (total,) = ring.store.tensors((rewards * worth).sum(1).astype(np.float32))
        return total


def read_windows(ring: Ring, found: Windows) -> dict[Path, Tensor]:
    """All fields ``[B, ...]`` of windows."""
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


def Transition(gamma: float = 0.99) -> NStep:  # noqa: N802 - it reads as the view that it returns
    """Single transitions: :class:`NStep` with n = 1."""
    return NStep(1, gamma)


STACK_RULE = "depth is at least 1 and pad 'repeat' or 'zeros'"


@checked(
    depth=(lambda depth: is_count(depth, 1), STACK_RULE),
    pad=(lambda pad: pad in ("repeat", "zeros"), STACK_RULE),
    window=(lambda window: isinstance(window, NStep), "window is NStep(...) or Transition(...)"),
    keys=(lambda keys: keys is None or is_names(keys), "keys is a tuple of names, such as ('camera',), or None"),
)
@dataclass(slots=True)
class FrameStack:
    """Observations stacked from single frames, for replays that store each frame once (Mnih et al. 2015).

    ``obs`` and ``next_obs`` come as ``[B, depth, ...]``, oldest frame first; no stack reaches into another episode.

    Args:
        depth: frames per stack.
        window: the view that decides where ``next_obs`` is.
        pad: what stands for the frames before an episode's first: "repeat" that one, or "zeros".
        keys: the members of a nested observation to stack, e.g. ("camera",); default all.

    Raises:
        SchemaError: one of them makes no sense, here or when it is set later.
    """

    depth: int = 4
    window: NStep = field(default_factory=NStep)
    pad: Literal["repeat", "zeros"] = "repeat"
    keys: tuple[str, ...] | None = None

    @property
    def history(self) -> int:
        """The frames before the anchor's."""
        return self.depth - 1

    def read(self, ring: Ring, places: Ints, key: int | None = None) -> dict[Path, Tensor]:
        """The fields ``[B, ...]`` of the windows that start at ``places``, with stacked observations.

        Raises:
            SchemaError: the observation has no such member, or steps are stored without order.
        """
        if ring.alone:
            raise SchemaError("FrameStack needs steps in order that share observations; here each has its own")
        places = vector(places)
        store, found = ring.store, self.window.windows(ring, places)
        members = {path[1:2] for path in store.leaves if path[0] == "obs"}
        unknown = [key for key in self.keys or () if (key,) not in members]
        if unknown:
            raise SchemaError(f"FrameStack(keys={self.keys}): the observation has no member {unknown[0]!r}")
        fields = found.fields
        now, then = store.places(self._frames(ring, places), self._frames(ring, found.last))
        for path in store.leaves:
            large = path in store.large
            if path[0] == "obs":
                if self.keys is None or (len(path) > 1 and path[1] in self.keys):
                    fields[path], fields["next_obs", *path[1:]] = store.gather_stacks(path, now, then)
                elif large:
                    fields[path] = store.gather([path], found.now)[path]
                    fields["next_obs", *path[1:]] = store.gather([path], found.then)[path]
            elif large:
                fields |= store.gather([path], found.now)
        return fields

    def _frames(self, ring: Ring, places: Ints) -> Ints:
        frames = np.empty((len(places), self.depth), np.int64)
        bad = kernels.fast().stack_places(places, ring.rows, self.depth, self.pad == "repeat", ring.step, frames)
        require_rows(places, bad, ring.store.num_rows)
        return frames
