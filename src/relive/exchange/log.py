"""Log: the steps of a data set in the order of time, and a list of what the data set does not keep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from ..collect.progress import progress_bar
from ..errors import FieldError
from ..look.experience import same_rows
from ..printable import printable
from ..replay.buffer import ReplayBuffer
from ..steps.arrays import Array, numpy_view
from ..steps.schema import Schema
from ..steps.trees import Path, dotted, map_leaves

__all__ = ["Log", "Played", "joined", "played", "tracked"]


Item = TypeVar("Item")


class Played(NamedTuple):
    """An episode of k steps, or the known part of one, with the observation after its last step."""

    obs: Any
    """Arrays ``[k + 1, ...]``, nested as the observations are."""
    action: Any
    """Arrays ``[k, ...]``."""
    reward: Array
    """``[k]``."""
    terminated: Array
    """bool ``[k]``."""
    truncated: Array
    """bool ``[k]``."""
    others: dict[str, Any] = {}  # noqa: RUF012 - never written
    """Further fields ``[k, ...]``."""


@dataclass(frozen=True)
class Log:
    """Steps of one env in the order of time.

    Args:
        source: what was read.
        fields: name -> arrays ``[S, ...]``, nested as the field is: ``obs``, ``action``, ``reward``, ``terminated`` and
            ``truncated``, ``next_obs`` if the source has the observations after its steps, and further fields.
        lacks: sentences on what the source does not keep.
    """

    source: str
    fields: dict[str, Any]
    lacks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", printable(self.source))  # names in files come into both, and are printed
        object.__setattr__(self, "lacks", tuple(map(printable, self.lacks)))

    def __len__(self) -> int:
        return len(self.fields["reward"])

    def replay(self, schema: Schema | None = None, **options: Any) -> ReplayBuffer:
        """A replay of one env with these steps: see :meth:`relive.ReplayBuffer.from_arrays`.

        Args:
            schema: the fields to store; None takes those of a step, with the dtypes of the data set.
            options: of the buffer. Without a capacity, the rows that are needed are counted.
        """
        return ReplayBuffer.from_arrays(self.fields, schema, **options)


def joined(episodes: Iterable[Played], source: str, lacks: Iterable[str] = ()) -> Log:
    """Episodes one after another.

    Raises:
        FieldError: there is no episode, or they have different fields.
    """
    parts: list[dict[str, Any]] = []
    for episode in tracked(episodes, "reading", "episodes"):
        if not len(episode.reward):
            continue
        step = {"obs": map_leaves(_but_last, episode.obs), "action": episode.action,
                "reward": np.asarray(episode.reward, np.float32), "terminated": episode.terminated,
                "truncated": episode.truncated, "next_obs": map_leaves(_but_first, episode.obs)}  # fmt: skip
        parts.append(step | episode.others)
    if not parts:
        raise FieldError(f"{source} has no steps")
    if any(part.keys() != parts[0].keys() for part in parts):
        raise FieldError(f"the episodes of {source} differ in their fields; leave out those that only some have")
    fields = {name: map_leaves(_concatenated, *(part[name] for part in parts)) for name in parts[0]}
    return Log(source, fields, tuple(lacks))


def tracked(items: Iterable[Item], doing: str, unit: str) -> Iterator[Item]:
    """The same items. If they take long, a bar on the terminal shows how many have come."""
    with progress_bar(None, None, doing, unit) as tick:
        for item in items:
            yield item
            tick()


def _but_last(array: Array) -> Array:
    return array[:-1]


def _but_first(array: Array) -> Array:
    return array[1:]


def _concatenated(*arrays: Array) -> Array:
    return np.concatenate(arrays)


def played(replay: ReplayBuffer) -> Iterator[Played]:
    """The episodes of a replay, env by env, as arrays.

    Raises:
        SchemaError: its transitions have no order.
        FieldError: a step has a next observation of its own, which is not the observation of the step after it.
    """
    for episode in replay.episodes():
        yield _arrays_of(replay.schema, cast("Any", episode.steps), replay.own_next_obs)


def _arrays_of(schema: Schema, steps: Any, own: bool) -> Played:
    """The steps of an episode, a TensorDict ``[k]``, as arrays; ``own`` if each step has its own next observation."""

    def hosted(path: Path) -> Array:
        return numpy_view(steps[path].cpu())

    def with_last(path: Path) -> Array:
        now, after = hosted(path), hosted(("next_obs", *path[1:]))
        if own and not (same := same_rows(after[:-1], now[1:])).all():
            raise FieldError(
                f"field '{dotted(path)}': the observation after step {int(np.argmin(same))} of an episode is not that "
                "of the next step; data sets of episodes keep one of them. Write the replay with save()"
            )
        return np.concatenate([now, after[-1:]])

    rest = {name: schema.rebuild(name, hosted) for name in schema.names if name != "obs"}
    reward, terminated, truncated = (rest.pop(name) for name in ("reward", "terminated", "truncated"))
    return Played(schema.rebuild("obs", with_last), rest.pop("action", None), reward, terminated, truncated, rest)
