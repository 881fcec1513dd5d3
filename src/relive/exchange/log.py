"""Log: the steps of a data set in the order of time, and a list of what the data set does not keep.

In order: the log, and one of any source that an audit reads; episodes, into a log and out of a replay; and the files
that all formats open.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path as FilePath
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from ..batches import Batch
from ..collect.progress import progress_bar
from ..errors import FieldError, FileFormatError, NoSaveError, ParameterError, ReliveError, ShapeError
from ..files.disk import open_file, usable
from ..files.format import MOST_BYTES, excess
from ..look.experience import ArrayTree, Experience, Leaves, concatenated, leaves_of, same_rows, tree_of
from ..look.experience import episodes_of as table_of_episodes
from ..look.readers import experience_of
from ..memory.estimate import require_free
from ..printable import printable, shown
from ..replay.arrays import STEP
from ..replay.buffer import ReplayBuffer
from ..replay.checks import stored_fields
from ..steps.arrays import Array, Bools, as_host
from ..steps.schema import STEP_FIELDS, Field, Node, Path, Schema, dotted, map_leaves, nest


@dataclass(frozen=True, repr=False)
class Log:
    """Steps of one env in the order of time.

    Args:
        source: the name of the source, for messages.
        fields: name -> arrays ``[S, ...]``, nested as the field is: ``obs``, ``action``, ``reward``, ``terminated`` and
            ``truncated``, ``next_obs`` if the source has the observations after its steps, and further fields.
        lacks: sentences on what the source does not keep. Those on further fields that no replay can hold are added.
        schema: the fields as the source declares them, if it is a buffer of relive or a save of one.
        left_out: further fields that stay out of a replay, such as those that only number the steps. Those that no
            replay can hold are added.
        whole: bool ``[S]``, True for the steps of episodes that are known to be there from the first step to an end;
            None if all are, as in a data set of episodes.
    """

    source: str
    fields: dict[str, Any]
    lacks: tuple[str, ...] = ()
    schema: Schema | None = None
    left_out: tuple[str, ...] = ()
    whole: Bools | None = None

    def __post_init__(self) -> None:
        checked = self._further() if "reward" in self.fields and len(self) else []
        unfit = {name: why for name in checked if (why := self._refusal(name, _require_storable))}
        lacks = *self.lacks, *(f"'{name}' stays out of a replay: {why}" for name, why in unfit.items())
        object.__setattr__(self, "source", printable(self.source))  # names in files come into both, and are printed
        object.__setattr__(self, "lacks", tuple(map(printable, lacks)))
        object.__setattr__(self, "left_out", (*self.left_out, *unfit))

    def __len__(self) -> int:
        return len(self.fields["reward"])

    def __repr__(self) -> str:
        names = ", ".join(map(printable, self.fields))
        return f"Log({'; '.join([f'{self.source!r}: {len(self)} steps of {names}', *self.lacks])})"

    def replay(self, schema: Schema | None = None, **options: Any) -> ReplayBuffer:
        """A replay of one env with these steps: see :meth:`relive.ReplayBuffer.from_arrays`.

        Args:
            schema: the fields to store; None takes all but ``left_out``, with the dtypes of the data set.
            options: of the buffer. Without a capacity, the rows that are needed are counted.
        """
        return ReplayBuffer.from_arrays(self.fields, self._stored() if schema is None else schema, **options)

    def experience(self) -> Experience:
        """These steps as an audit reads them."""
        steps = experience_of({name: field for name, field in self.fields.items() if name not in self.left_out})
        steps.source, steps.begins, steps.schema = self.source, True, self.schema
        steps.lacks += self.lacks
        return steps

    def fitting(self, fits: Callable[[Schema], object], target: str) -> Log:
        """This log without the further fields that a target cannot hold; ``lacks`` names them.

        Args:
            fits: raises an error of relive for a schema that the target cannot hold.
            target: its name, for the sentences.
        """
        refused = {name: why for name in self._further() if (why := self._refusal(name, fits))}
        lacks = *self.lacks, *(f"'{name}' does not go into {target}: {why}" for name, why in refused.items())
        return replace(self, lacks=lacks, left_out=(*self.left_out, *refused))

    def without_incomplete(self) -> Log:
        """This log without the steps of episodes that are not :attr:`whole`.

        Raises:
            FieldError: no step is left.
        """
        whole = self.whole
        if whole is None or whole.all():
            return self
        if not whole.any():
            raise FieldError(f"{self.source}: {NO_WHOLE_EPISODE}")
        fields = {name: map_leaves(itemgetter(whole), field) for name, field in self.fields.items()}
        return replace(self, fields=fields, whole=None)

    def _refusal(self, name: str, fits: Callable[[Schema], object]) -> str:
        """The error that ``fits`` raises for a step with this further field; empty if it raises none."""
        try:
            fits(Schema({**STEP_SCHEMA, name: self._node(name)}))
        except ReliveError as error:
            return str(error)
        return ""

    def _further(self) -> list[str]:
        """The names of the further fields that go into a replay."""
        return [name for name in self.fields if name not in (*STEP, "next_obs", "done", *self.left_out)]

    def _stored(self) -> Schema | None:
        """All fields of a replay; None where some of a step are missing, or there is no step."""
        known = [name for name in STEP if name in self.fields]
        if not {"obs", *STEP_FIELDS} <= set(known) or not ("action" in known or self.schema) or not len(self):
            return None
        limit = None if self.schema is None else self.schema.max_episode_steps
        return Schema({name: self._node(name) for name in (*known, *self._further())}, max_episode_steps=limit)

    def _node(self, name: str) -> Node:
        """A field as the source declares it, or else as its first row shows it."""
        if name in STEP_FIELDS:
            return Field((), STEP_FIELDS[name])
        if self.schema is not None and name in self.schema.names:
            return self.schema[name]

        def first_row(leaf: object) -> Array:
            rows = as_host(leaf, f"field '{name}'")
            return rows[:1] if rows.ndim else rows

        return Schema.from_example({name: map_leaves(first_row, self.fields[name])}, num_envs=1)[name]


STEP_SCHEMA = Schema({"obs": (), "action": ()} | {name: Field((), dtype) for name, dtype in STEP_FIELDS.items()})
"""The least step, to which a further field is added."""


def _require_storable(schema: Schema) -> None:
    """Require a schema that a replay can have.

    Raises:
        SchemaError: it has a name that batches use.
    """
    stored_fields(schema, own_next_obs=False)


def log_of(source: object) -> Log:
    """The steps of any source that :func:`relive.audit` reads, such as a live buffer of another library.

    Observations after steps are kept if the source has them. Rows are env by env, each env in the order of time. If the
    source has only the one after each env's last step, the others are those of the following rows, and after an end the
    step's own observation stands for it.

    Args:
        source: a buffer of relive, the path of a save, a dict of arrays, or a live buffer of another library.

    Raises:
        FieldError, ShapeError: the source cannot be read.
    """
    steps = experience_of(source)
    fields: dict[str, Any] = nest(steps.others)
    fields |= {"reward": steps.reward, "terminated": steps.terminated, "obs": tree_of(steps.obs)}
    if steps.action:
        fields["action"] = tree_of(steps.action)
    after = _next_obs(steps)
    if after is not None:
        fields["next_obs"] = tree_of(after)
    fields["truncated"] = _truncated(steps, after)
    table = table_of_episodes(steps)
    whole = np.repeat(table["complete"], table["length"]) if steps.ordered else np.zeros(len(steps), np.bool_)
    return Log(steps.source, fields, steps.lacks, steps.schema, whole=whole)


def _next_obs(steps: Experience) -> Leaves | None:
    """The observations after steps ``[S, ...]``, as :func:`log_of` says; None if they are not known."""
    if steps.next_obs is not None or steps.last_obs is None:
        return steps.next_obs
    row, last = np.arange(len(steps)), ~steps.follows
    following = row + (steps.follows & ~steps.ended)
    after = {path: leaf[following] for path, leaf in steps.obs.items()}
    for path, leaf in after.items():
        leaf[last] = steps.last_obs[path][steps.env[last]]
    return after


def _truncated(steps: Experience, after: Leaves | None) -> Array:
    """Which steps were truncated, bool ``[S]``.

    A running episode counts as truncated, too, if the observation after it is not known, or is by chance that of the
    following row, which is of another env or episode.
    """
    truncated = np.zeros(len(steps), np.bool_) if steps.truncated is None else steps.truncated.copy()
    running = ~steps.follows & ~steps.ended
    if after is not None:
        for path, leaf in steps.obs.items():
            running[:-1] &= same_rows(after[path][:-1], leaf[1:])
        running[-1:] = False
    return truncated | running


# -- episodes ----------------------------------------------------------------------------------------------------------


class EpisodeArrays(NamedTuple):
    """An episode of k steps, or the known part of one, with the observation after its last step."""

    obs: ArrayTree
    """Arrays ``[k + 1, ...]``, nested as the observations are."""
    action: ArrayTree | None
    """Arrays ``[k, ...]``."""
    reward: Array
    """``[k]``."""
    terminated: Array
    """bool ``[k]``."""
    truncated: Array
    """bool ``[k]``."""
    others: dict[str, ArrayTree] = {}  # noqa: RUF012 - never written
    """Further fields ``[k, ...]``."""

    @property
    def fields(self) -> dict[str, ArrayTree | None]:
        """All fields by name."""
        own = self._asdict()
        others = own.pop("others")
        return own | others


def log_of_episodes(episodes: Iterable[EpisodeArrays], source: str, lacks: Iterable[str] = ()) -> Log:
    """Episodes one after another.

    Raises:
        FieldError: there is no episode, or they have different fields.
        ShapeError: an episode has more or fewer rows of a field than steps; the message names both.
    """
    parts: list[Mapping[str, ArrayTree | None]] = []
    for number, episode in enumerate(with_progress(episodes, "reading", "episodes")):
        _require_lengths(episode, f"episode {number} of {source}")
        if not len(episode.reward):
            continue
        shifted = {"obs": map_leaves(BUT_LAST, episode.obs), "next_obs": map_leaves(BUT_FIRST, episode.obs)}
        parts.append(episode.fields | {"reward": np.asarray(episode.reward, np.float32), **shifted})
    if not parts:
        raise FieldError(f"{source} has no steps")
    if any(part.keys() != parts[0].keys() for part in parts):
        raise FieldError(f"the episodes of {source} differ in their fields; leave out those that only some have")
    fields = {name: map_leaves(concatenated, *(part[name] for part in parts)) for name in parts[0]}
    return Log(source, fields, tuple(lacks))


def _require_lengths(episode: EpisodeArrays, where: str) -> None:
    """Require one row for each reward of an episode, and of observations one more.

    Raises:
        ShapeError: a field has another number of rows.
    """
    steps = len(episode.reward)
    for name, field in episode.fields.items():
        for path, leaf in leaves_of(field, name=f"{where}: field '{name}'").items() if field is not None else ():
            wanted = steps + (name == "obs")
            if leaf.shape[:1] != (wanted,):
                more = ", one more than rewards" if name == "obs" else ", as many as rewards"
                raise ShapeError(
                    f"{where}: expected {wanted} rows of '{dotted((name, *path))}'{more}, got "
                    f"{len(leaf) if leaf.ndim else 'a single value'}; leave the episode out, or complete it"
                )


BUT_LAST, BUT_FIRST = itemgetter(slice(None, -1)), itemgetter(slice(1, None))


def episodes_of(replay: ReplayBuffer, caller: str, *, drop_incomplete: bool) -> Iterator[EpisodeArrays]:
    """The episodes of a replay, env by env, as arrays; all, or those that are there from the first step to an end.

    Raises:
        SchemaError: its transitions have no order.
        FieldError: a step has a next observation of its own, which is not the observation of the step after it.
        ParameterError: there is none.
    """
    lack, wanted = "the replay has no complete transition; collect some first", False
    for episode in replay.episodes():
        if drop_incomplete and not episode.whole:
            lack = f"drop_incomplete=True: {NO_WHOLE_EPISODE}"
            continue
        wanted = True
        yield _arrays_of(replay.schema, episode.steps, replay.own_next_obs)
    if not wanted:
        raise ParameterError(f"{caller}: {lack}")


NO_WHOLE_EPISODE = "no episode is there from its first step to an end; collect more, or write all of them"


def _arrays_of(schema: Schema, steps: Batch, own: bool) -> EpisodeArrays:
    """The steps of an episode, a batch ``[k]``, as arrays; ``own`` if each step has its own next observation."""

    def hosted(path: Path) -> Array:
        return as_host(steps[path])

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
    return EpisodeArrays(
        schema.rebuild("obs", with_last), rest.pop("action", None), reward, terminated, truncated, rest
    )


Item = TypeVar("Item")


def with_progress(items: Iterable[Item], doing: str, unit: str) -> Iterator[Item]:
    """The items, with a bar on the terminal that shows how many have come if they take long."""
    with progress_bar(None, None, doing, unit) as counted:
        yield from counted(items)


# -- files -------------------------------------------------------------------------------------------------------------


def directory(path: str | os.PathLike[str], what: str) -> FilePath:
    """``path`` as the Path of a directory that exists.

    Raises:
        NoSaveError: nothing is there.
        FileFormatError: a file is there.
    """
    folder = usable(path)
    if not folder.exists():
        raise NoSaveError(f"'{folder}': expected {what}, got nothing; give the path of one")
    if not folder.is_dir():
        raise FileFormatError(f"'{folder}': expected {what}, got a file; give the path of the directory")
    return folder


Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
"""A value of a JSON file."""


def json_object(path: FilePath, what: str) -> dict[str, Json]:
    """The JSON object in a file. Its size and structure are limited before it is parsed.

    Raises:
        NoSaveError: there is no such file.
        FileFormatError: it is not a regular file, is too large, or does not hold a JSON object.
    """
    try:
        with open_file(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            raw = stream.readall() if size <= MOST_BYTES else b""
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoSaveError(f"'{path}': expected {what}, got nothing; give the path of a complete copy") from error
    over = excess(raw) if size <= MOST_BYTES else (f"at most {MOST_BYTES} bytes", size)
    if over:
        raise FileFormatError(f"'{path}': expected {what} of {over[0]}, got {over[1]}; use another copy")
    try:
        content: Json = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"'{path}': expected {what}, got no JSON ({error}); use another copy") from error
    if not isinstance(content, dict):
        raise FileFormatError(f"'{path}': expected {what}, a JSON object, got a {type(content).__name__}")
    return content


def count(content: Mapping[str, Json], name: str, path: FilePath, *, most: int = 2**48) -> int:
    """The whole number from 0 to ``most`` in a member of a JSON object.

    Raises:
        FileFormatError: the member is missing, or is something else.
    """
    value = content.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise FileFormatError(f"'{path}', '{name}': expected a whole number from 0 to {most}, got {shown(value)}")
    return value


def sizes_in(value: Json, *, least: int, axes: int) -> tuple[int, ...] | None:
    """A list of at most ``axes`` sizes from ``least`` on; None if it is something else."""
    if not isinstance(value, list):
        return None
    sizes = tuple(size for size in value if type(size) is int and least <= size < 2**48)
    return sizes if len(sizes) == len(value) <= axes else None


def require_memory(size: int, path: FilePath) -> None:
    """Require that ``size`` bytes of memory are free before a file is read that needs them.

    Raises:
        ParameterError: fewer are free.
    """
    require_free(size, torch.device("cpu"), f"reading '{path}'", "read it on a larger machine, or a part of it")
