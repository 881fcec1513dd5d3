"""Minari: data sets of whole episodes, in and out."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from importlib import import_module
from inspect import signature
from typing import Any

import numpy as np
import torch

from ..errors import DTypeError, NoSaveError, ParameterError, ShapeError
from ..look.experience import Leaves
from ..names import needed
from ..parameters import FLAG_RULE, Rule, require
from ..replay.arrays import STEP
from ..replay.buffer import ReplayBuffer
from ..steps.arrays import Array, numpy_dtype
from ..steps.schema import Node, Path, Schema, descend, dotted, flatten, nest
from .log import EpisodeArrays, Log, episodes_of, log_of_episodes

ID_RULE: Rule = (
    lambda text: re.fullmatch(r"([\w-]+/)*[\w-]+-v\d+", text) is not None,
    "expected the id of a data set with its version, such as 'cartpole/random-v0'",
)
"""The rule for the id of a new data set."""


def _are_spaces(spaces: Sequence[object]) -> bool:
    from gymnasium import Space  # takes a tenth of a second to import

    return len(spaces) == 2 and all(isinstance(space, Space) for space in spaces)


SPACES_RULE: Rule = (
    lambda spaces: spaces is None or _are_spaces(spaces),
    "expected the observation space and the action space, or None",
)
"""The rule for the spaces of a new data set."""


def _minari() -> Any:
    with needed("Minari needs its package: pip install 'relive[minari]'"):
        return import_module("minari")


@contextmanager
def _needed(what: str = "the files of this data set", extra: str = "minari") -> Generator[None]:
    """Say how to install a package that Minari needs for a format of files, such as h5py for its default one.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        yield
    except ImportError as error:
        cause = error if error.name else error.__context__  # Minari raises its own error for that of the import
        name = cause.name if isinstance(cause, ImportError) else None
        raise ModuleNotFoundError(
            f"Minari needs {name or 'a package'} for {what}: pip install 'relive[{extra}]'",
            name=name,
        ) from error


def from_minari(dataset: Any) -> Log:
    """The episodes of a Minari data set.

    Infos of numbers that all episodes have become further fields; ``lacks`` names the others. Minari keeps the final
    observation of every episode, terminated or truncated.

    Args:
        dataset: a ``minari.MinariDataset``, or the id of one. If it is not on this machine, Minari downloads it into
            its own folder; ``HF_HUB_OFFLINE=1`` in the environment forbids it.

    Raises:
        ModuleNotFoundError: minari is not installed, or a package that it needs for the files of this data set, or to
            download it.
        NoSaveError: no data set of this id is on this machine or where Minari downloads from.
        FieldError: it has no steps.
        ShapeError: an array of an episode has more or fewer rows than the episode has steps.
    """
    if isinstance(dataset, str):
        dataset = _loaded(dataset)
    known: Rule = lambda dataset: hasattr(dataset, "iterate_episodes"), "expected a MinariDataset or the id of one"
    require("from_minari", known, dataset=dataset)

    source = f"the Minari data set {dataset.id}"
    infos: list[Leaves] = []

    def episodes() -> Iterator[EpisodeArrays]:
        for number, episode in enumerate(dataset.iterate_episodes()):
            terminated, truncated = episode.terminations.astype(np.bool_), episode.truncations.astype(np.bool_)
            infos.append(_infos(episode.infos, len(episode.rewards), f"episode {number} of {source}"))
            yield EpisodeArrays(episode.observations, episode.actions, episode.rewards, terminated, truncated)

    log = log_of_episodes(episodes(), source)
    fields, lacks = _joined(infos)
    return replace(log, fields=log.fields | fields, lacks=lacks)


def _loaded(dataset: str) -> Any:
    """The data set of an id, which Minari downloads if it is not on this machine.

    Raises:
        ModuleNotFoundError: a package is missing.
        NoSaveError: there is no such data set.
    """
    minari = _minari()
    try:
        with _needed():
            return minari.load_dataset(dataset)
    except FileNotFoundError:
        pass
    try:
        with _needed("downloads", "hub"), redirect_stdout(sys.stderr):
            minari.load_dataset(dataset, download=True)
    except (OSError, ValueError) as error:  # all errors of the hub are one of them
        raise NoSaveError(
            f"from_minari(dataset={dataset!r:.200}): expected the id of a data set on this machine, or of one that "
            f"Minari downloads, got {type(error).__name__}: {error!s:.300}; see the ids with: minari list remote"
        ) from error
    with _needed():
        return minari.load_dataset(dataset)


def _infos(infos: Mapping[str, object] | None, steps: int, where: str) -> Leaves:
    """The infos of an episode by path, of its steps alone: Minari may put that of the reset before them.

    Raises:
        ShapeError: there are more or fewer.
    """
    found: Leaves = {}
    for inner, values in flatten(infos or {}).items():
        path, array = tuple(key for part in inner for key in str(part).split(".")), np.asarray(values)
        if len(array.shape) < 1 or len(array) not in (steps, steps + 1):
            raise ShapeError(
                f"{where}: its info '{dotted(path)}' has the shape {array.shape}; expected {steps} rows, one for each "
                f"reward, or {steps + 1} with that of the reset"
            )
        found[path] = array[len(array) - steps :]
    return found


def _joined(infos: list[Leaves]) -> tuple[dict[str, object], tuple[str, ...]]:
    """The infos of all episodes as fields of steps, and sentences on those that were not read."""
    paths = list(dict.fromkeys(path for episode in infos for path in episode))
    fields: Leaves = {}
    lacks: list[str] = []
    for path in paths:
        parts = [episode[path] for episode in infos if path in episode]
        if len(parts) < len(infos) or len({part.shape[1:] for part in parts}) > 1:
            why = "not all episodes have it, or in other shapes"
        elif any(part.dtype.kind not in "biufc" for part in parts):
            why = "it holds no numbers"
        elif path[0] in (*STEP, "next_obs", "done") or any(path[:at] in paths for at in range(1, len(path))):
            why = "another field has its name"
        else:
            fields[path] = np.concatenate(parts)
            continue
        lacks.append(f"the info '{dotted(path)}' was not read: {why}")
    return nest(fields), tuple(lacks)


def to_minari(
    replay: ReplayBuffer,
    dataset_id: str,
    *,
    env: Any = None,
    spaces: tuple[Any, Any] | None = None,
    drop_incomplete: bool = False,
    **about: Any,
) -> Any:
    """Write the episodes of a replay as a new Minari data set, into Minari's own folder; returns the data set.

    Minari wants every episode to have an end. If an episode was still running or was interrupted, its last step is
    marked as truncated, with the observation that followed it. So targets are the same, and returns-to-go count as
    those of episodes that ended: ``drop_incomplete`` leaves such episodes out. Fields other than those of a step become
    ``infos``, under their paths with dots. As in Minari's own data sets, an episode of k steps has k + 1 of them: the
    first one, of zeros, stands for the reset. Priorities and indices are not written.

    Args:
        replay: the replay. Its transitions must be in the order of time.
        dataset_id: such as ``"cartpole/random-v0"``.
        env: the env that was played, or its id, so that others can make the env again.
        spaces: the observation space and the action space, if ``env`` is None. By default they are unbounded boxes of
            the schema's shapes and dtypes, and ``Discrete`` for whole numbers.
        drop_incomplete: True to leave out episodes that still run, were interrupted, or whose first steps were
            overwritten: those of :meth:`relive.ReplayBuffer.episodes` that are not ``whole``.
        about: further arguments of ``minari.create_dataset_from_buffers``, such as ``author`` and ``description``. The
            ``data_format`` is "arrow" without one; Minari's own default is "hdf5".

    Raises:
        ModuleNotFoundError: minari is not installed, or a package that it needs for ``data_format``.
        SchemaError: the transitions have no order.
        DTypeError, ShapeError: a further field has complex numbers, or none.
        ParameterError: there is no step, or no complete episode; the id or the spaces are of another kind; or this
            release of Minari, 0.5.3, would change the pixels of images.
    """
    minari = _minari()
    require("to_minari", (lambda replay: isinstance(replay, ReplayBuffer), "expected a ReplayBuffer"), replay=replay)
    require("to_minari", ID_RULE, dataset_id=dataset_id)
    require("to_minari", SPACES_RULE, spaces=spaces)
    require("to_minari", FLAG_RULE, drop_incomplete=drop_incomplete)
    further = infos_of(replay.schema)
    buffer_class = import_module("minari.data_collector").EpisodeBuffer
    episodes = episodes_of(replay, "to_minari", drop_incomplete=drop_incomplete)
    buffers = [_buffer(buffer_class, number, episode, further) for number, episode in enumerate(episodes)]
    if env is None:
        most = max((int(np.max(b.actions)) for b in buffers if hasattr(b.actions, "shape")), default=0)
        observation, action = spaces or (_space(replay.schema["obs"]), _space(replay.schema["action"], most))
        about |= {"observation_space": observation, "action_space": action}
    about.setdefault("data_format", "arrow")
    # JPEG would change the pixels of images. Releases before 0.5.3 do not use it, and later ones have an option.
    if "jpeg_encoding" in signature(minari.create_dataset_from_buffers).parameters:
        about.setdefault("jpeg_encoding", False)
    elif minari.__version__ == "0.5.3" and about["data_format"] != "hdf5":
        raise ParameterError(
            f"to_minari(data_format={about['data_format']!r}): Minari 0.5.3 writes images as JPEG, which changes their "
            "pixels; pass data_format='hdf5', or install another release"
        )
    with _needed():
        return minari.create_dataset_from_buffers(dataset_id, buffers, env=env, **about)


def infos_of(schema: Schema) -> list[Path]:
    """The fields of a schema that become infos.

    Raises:
        DTypeError, ShapeError: Minari cannot store one of them.
    """
    further = {path: field for path, field in schema.leaves.items() if path[0] not in STEP}
    for path, field in further.items():
        if field.dtype.is_complex:
            raise DTypeError(f"field '{dotted(path)}': Minari has no {field.dtype}; store its parts as two fields")
        if 0 in field.shape:
            raise ShapeError(f"field '{dotted(path)}': Minari stores no infos without numbers, got {field.shape}")
    return list(further)


def _buffer(make: Callable[..., Any], number: int, episode: EpisodeArrays, further: list[Path]) -> Any:
    """An episode as Minari takes it. It cannot read nested infos, nor arrays of single numbers, in all its formats."""
    truncated = episode.truncated.copy()
    truncated[-1] |= not episode.terminated[-1]
    infos: dict[str, Array | list[Array]] = {}
    for path in further:
        array = descend(episode.others, path)
        rows = np.concatenate([np.zeros_like(array[:1]), array])
        infos[dotted(path)] = rows if rows.ndim > 1 else list(rows)
    return make(
        id=number, observations=episode.obs, actions=episode.action, rewards=episode.reward,
        terminations=episode.terminated, truncations=truncated, infos=infos or None,
    )  # fmt: skip


def _space(node: Node, most: int = 0) -> Any:
    """A Gymnasium space for a field; ``most`` is the largest action that was taken."""
    import gymnasium as gym  # takes a while

    if isinstance(node, dict):
        return gym.spaces.Dict({name: _space(part) for name, part in node.items()})
    if isinstance(node, tuple):
        return gym.spaces.Tuple([_space(part) for part in node])
    dtype = numpy_dtype(node.dtype)
    if not node.shape and dtype.kind in "iu":
        return gym.spaces.Discrete(max(most + 1, 2), dtype=dtype.type)
    if node.dtype is torch.bool:
        return gym.spaces.MultiBinary(node.shape)
    low, high = (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return gym.spaces.Box(low, high, node.shape, dtype.type)
