"""A LeRobotDataset v3 as a Log."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from ...errors import FieldError, FileFormatError, NoSaveError
from ...printable import shown
from ...steps.arrays import Array, Ints
from ..checked import count, directory, json_object, require_memory
from ..log import Log, tracked
from .layout import DATA, DEFAULTS, EPISODES, FINAL, INFO, NUMBERS, VERSION, Feature, arrow, dense, widths

__all__ = ["from_lerobot"]

FLAGS = ("next.reward", "next.done", "next.terminated", "next.truncated")
"""Columns with a meaning of their own."""

NUMBERS_OF_EPISODES = ("episode_index", "length")
"""The columns that are read of a table of episodes, besides final observations."""


COPIES = 3
"""How often numbers are in memory while they are read: as Arrow's, as those of a file, and as those of all files."""


class Table(NamedTuple):
    """Columns ``[S, ...]`` of all files, and the first row of each episode with S at the end, ``[E + 1]``."""

    columns: dict[str, Array]
    bounds: Ints

    @property
    def last(self) -> Array:
        """Whether a frame is its episode's last, bool ``[S]``."""
        found = np.zeros(self.bounds[-1], np.bool_)
        found[self.bounds[1:] - 1] = True
        return found


def from_lerobot(path: str | os.PathLike[str]) -> Log:
    """The frames of a LeRobotDataset v3 that is on this machine. Nothing is downloaded.

    A frame is a step: ``observation.…`` is what was seen before ``action``, and ``next.reward`` and ``next.done`` came
    after it. Data sets that :func:`to_lerobot` wrote come back with every end and final observation. In others, a done
    episode counts as terminated unless ``next.truncated`` or ``next.terminated`` says more; an episode that was not
    done was cut off after its last frame. Videos and compressed images are left where they are. ``lacks`` names all
    that is missing.

    Args:
        path: the directory with ``meta`` and ``data`` in it.

    Raises:
        ModuleNotFoundError: pyarrow is not installed.
        NoSaveError: a file is missing.
        FileFormatError: a file is damaged or contradicts ``info.json``, or the data set has another version.
        FieldError: no observation is stored as numbers.
        ParameterError: there is too little memory for the frames.
    """
    arrow()
    folder = directory(path, "the directory of a LeRobot data set")
    info = json_object(Path(os.path.realpath(folder / INFO)), "the description of a LeRobot data set")
    version: Any = info.get("codebase_version")
    if not isinstance(version, str) or not version.startswith("v3."):
        raise FileFormatError(
            f"'{folder / INFO}': expected codebase_version {VERSION}, got {shown(version)}; convert it with LeRobot"
        )
    features, lacks = _features(info, folder / INFO)
    table = _frames(folder, info, features)
    fields = _step(table, features, lacks)
    if count(info, "total_tasks", folder / INFO) > 1:
        lacks.append("it names its tasks in words, which were not read; 'task_index' was")
    finals = _finals(folder, table, features)
    if finals is None:
        lacks.append("it keeps no final observations")
    else:
        fields["next_obs"] = _tree({f.path[1:]: finals[name] for name, f in features.items() if f.path[0] == "obs"})
    return Log(f"'{folder}', LeRobot data set", fields, tuple(lacks))


# -- features -------------------------------------------------------------------------------------------------------


def _features(info: Mapping[str, Any], where: Path) -> tuple[dict[str, Feature], list[str]]:
    """The columns to read, and sentences on what is not read.

    Raises:
        FileFormatError: an entry is something else than a feature.
        FieldError: no observation is stored as numbers.
    """
    given: Any = info.get("features")
    if not isinstance(given, dict):
        raise FileFormatError(f"'{where}', 'features': expected an object, got {shown(given)}; use another copy")
    found: dict[str, Feature] = {}
    lacks: list[str] = []
    entries = cast("dict[str, Any]", given)
    for name, note in entries.items():
        known = cast("dict[str, Any]", note) if isinstance(note, dict) else {}
        dtype, shape = known.get("dtype"), _sizes(known.get("shape"))
        if dtype in NUMBERS and shape is not None:
            found[name] = _feature(name, dtype, shape, known, where)
        elif dtype in ("video", "image", "string", "language"):
            kept = "stays in its files" if dtype == "video" else "was not read"
            lacks.append(f"'{name}' has the dtype {dtype} and {kept}")
        else:
            raise FileFormatError(f"'{where}', feature '{name:.80}': expected a dtype and a shape, got {shown(note)}")
    for name, dtype in DEFAULTS.items():
        found.setdefault(name, Feature(name, np.dtype(dtype), (1,), (name,), ()))
    if not any(feature.path[0] == "obs" for feature in found.values()):
        raise FieldError(f"'{where}' has no observations that are numbers; it has {', '.join(entries) or 'nothing'}")
    return found, lacks


def _sizes(given: Any) -> tuple[int, ...] | None:
    """A shape of 1 to 5 axes; None if it is something else."""
    sizes = tuple(cast("list[Any]", given)) if isinstance(given, list) else ()
    return sizes if 0 < len(sizes) <= 5 and all(type(n) is int and 0 < n < 2**40 for n in sizes) else None


def _feature(name: str, dtype: str, shape: tuple[int, ...], note: Mapping[str, Any], where: Path) -> Feature:
    """A column of numbers, and where it belongs in a step."""
    info: Any = note.get("info")
    ours = cast("dict[str, Any]", info) if isinstance(info, dict) else {}
    own, path = ours.get("relive.shape", list(shape)), ours.get("relive.path", _path(name))
    if own not in ([], list(shape)) or prod(own) != prod(shape):
        raise FileFormatError(f"'{where}', feature '{name:.80}': 'relive.shape' {shown(own)} contradicts {shape}")
    parts = cast("list[Any]", path) if isinstance(path, list) else []
    if not 0 < len(parts) <= 16 or not all(type(part) in (str, int) for part in parts) or type(parts[0]) is not str:
        raise FileFormatError(f"'{where}', feature '{name:.80}': expected 'relive.path', a list, got {shown(path)}")
    if name in FLAGS and shape != (1,):
        raise FileFormatError(f"'{where}', feature '{name}': expected the shape (1,), got {shape}")
    return Feature(name, np.dtype(dtype), shape, tuple(parts), () if own == [] or name in DEFAULTS else shape)


def _path(name: str) -> list[str]:
    """The path of a column that relive did not write: ``observation.a.b`` is ``obs``, ``a``, ``b``."""
    kind, _, rest = name.partition(".")
    if kind in ("observation", "action"):
        return ["obs" if kind == "observation" else kind, *(rest.split(".") if rest else [])]
    return [name.replace(".", "_")]


# -- frames ---------------------------------------------------------------------------------------------------------


def _files(folder: Path, kind: str) -> list[Path]:
    """The Parquet files of a kind, in order. They may be links, as in the cache of a hub.

    Raises:
        NoSaveError: there is no such file.
        FileFormatError: one of them is not a regular file.
    """
    found = sorted((folder / kind).glob("*/*.parquet"), key=_in_order)
    if not found:
        raise NoSaveError(f"'{folder / kind}': expected Parquet files in folders, got none; give a complete copy")
    for file in found:
        if not file.is_file():
            raise FileFormatError(f"'{file}': expected a regular file, got something else; use another copy")
    return found


def _in_order(file: Path) -> tuple[int, str, int, str]:
    """The key to sort by: the numbers of folder and file. They have three digits up to 999, and more after that."""
    return len(file.parent.name), file.parent.name, len(file.name), file.name


def _opened(file: Path, read: Callable[[Any], Any]) -> Any:
    """Open a Parquet file, and return what ``read`` makes of it.

    Raises:
        FileFormatError: the file is damaged.
    """
    pa = arrow()
    try:
        with pa.parquet.ParquetFile(file) as parquet:
            return read(parquet)
    except (pa.ArrowException, OSError, KeyError, UnicodeError, RecursionError) as error:
        raise FileFormatError(f"'{file}' is damaged, or is not a Parquet file: {error!s:.300}") from error


def _frames(folder: Path, info: Mapping[str, Any], features: Mapping[str, Feature]) -> Table:
    """All columns of numbers, and where episodes begin.

    Raises:
        FileFormatError: they contradict ``info.json``, or frames are not in order.
    """
    where, files = folder / INFO, _files(folder, DATA)
    total, episodes = (count(info, name, where) for name in ("total_frames", "total_episodes"))
    observed = _observed(features)
    frames = [_opened(file, lambda parquet, file=file: _size(parquet, features, file)) for file in files]
    finals = [
        _opened(file, lambda parquet, file=file: _size(parquet, _wanted(parquet, observed), file, nulls=True))
        for file in _files(folder, EPISODES)
    ]
    for name, sizes, stated in (("total_frames", frames, total), ("total_episodes", finals, episodes)):
        found = sum(size.rows for size in sizes)
        if found != stated or not stated:
            raise FileFormatError(f"'{where}': expected {name} of {found}, as the files have, got {stated}")
    require_memory(COPIES * sum(size.nbytes for size in (*frames, *finals)), folder)
    parts = [
        _opened(file, lambda parquet, file=file: _columns(parquet, features, file))
        for file in tracked(files, "reading", "files")
    ]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in features}
    episode, frame = (columns[name].reshape(-1) for name in ("episode_index", "frame_index"))
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(episode)) + 1, [total]]).astype(np.int64)
    if (np.diff(episode) < 0).any() or len(bounds) != episodes + 1:
        raise FileFormatError(f"'{folder / DATA}': expected {episodes} episodes in order, got others")
    if (frame != np.arange(total) - np.repeat(bounds[:-1], np.diff(bounds))).any():
        raise FileFormatError(f"'{folder / DATA}': expected frame_index to count from 0 in each episode")
    return Table(columns, bounds)


class Size(NamedTuple):
    """What a Parquet file says of itself: its rows, and the bytes that its columns of features take in memory."""

    rows: int
    nbytes: int


def _size(parquet: Any, features: Mapping[str, Feature], file: Path, *, nulls: bool = False) -> Size:
    """The size of a file, whose columns hold numbers, and as many as the features say.

    Args:
        parquet: the open file.
        features: the columns that will be read.
        file: the path of the file, for errors.
        nulls: whether rows may lack the numbers of a list.

    Raises:
        FileFormatError: a column is missing, holds something else, or holds more or fewer numbers.
    """
    schema, groups = parquet.schema_arrow, [parquet.metadata.row_group(at) for at in range(parquet.num_row_groups)]
    leaf, nbytes, places = 0, 0, dict[str, int]()
    for field in schema:
        places[field.name] = leaf
        leaf += _leaves(field.type)
    for name, feature in features.items():
        if schema.names.count(name) != 1:
            got = schema.names.count(name) or "none"
            raise FileFormatError(f"'{file}': expected a column '{name}', as {INFO} says, got {got}; use another copy")
        of_number, of_row = widths(schema.field(name).type, feature, str(file))
        for group in groups:
            stored = group.column(places[name]).num_values
            wanted = group.num_rows * feature.size
            if stored > wanted or (stored < wanted and not nulls):
                raise FileFormatError(
                    f"'{file}', column '{name}': expected {feature.size} numbers in each of {group.num_rows} frames, "
                    f"got {stored} in all; use another copy"
                )
            nbytes += stored * of_number + group.num_rows * of_row
    return Size(sum(group.num_rows for group in groups), nbytes)


def _leaves(kind: Any) -> int:
    """How many columns of numbers or text a type takes in a file."""
    return sum(_leaves(kind.field(at).type) for at in range(kind.num_fields)) if kind.num_fields else 1


def _columns(parquet: Any, features: Mapping[str, Feature], file: Path) -> dict[str, Array]:
    """The columns of a file."""
    table = parquet.read(columns=list(features))
    return {name: dense(table[name], feature, str(file)) for name, feature in features.items()}


# -- steps ----------------------------------------------------------------------------------------------------------


def _step(table: Table, features: Mapping[str, Feature], lacks: list[str]) -> dict[str, Any]:
    """The fields of a step, without next observations. What the data set does not say is added to ``lacks``."""
    size = len(table.last)
    groups: dict[str, dict[tuple[str | int, ...], Array]] = {}
    for name, feature in features.items():
        if name not in FLAGS:
            array = table.columns[name].reshape(size, *feature.own_shape)
            groups.setdefault(str(feature.path[0]), {})[feature.path[1:]] = array
    fields = {name: _tree(leaves) for name, leaves in groups.items()}
    if "next.reward" in features:
        fields["reward"] = table.columns["next.reward"].reshape(-1)
    else:
        fields["reward"] = np.zeros(size, np.float32)
        lacks.append("it keeps no rewards; zeros stand for them")
    fields["terminated"], fields["truncated"] = _ends(table, lacks)
    return fields


def _ends(table: Table, lacks: list[str]) -> tuple[Array, Array]:
    """Which frames terminated and which were truncated, bool ``[S]`` each.

    Raises:
        FileFormatError: the flags contradict each other.
    """
    given = {name: table.columns[name].reshape(-1) != 0 for name in FLAGS[1:] if name in table.columns}
    done, terminated, truncated = (given.get(name) for name in FLAGS[1:])
    if done is None and terminated is None:
        lacks.append("it does not say how episodes ended; each counts as cut off after its last frame")
    elif terminated is None and truncated is None:
        lacks.append("it does not tell truncation from termination; a done episode counts as terminated")
    if terminated is None:
        terminated = np.zeros_like(table.last) if done is None else done & (True if truncated is None else ~truncated)
    if truncated is None:
        truncated = np.zeros_like(terminated) if done is None else done & ~terminated
    if done is not None and (done != (terminated | truncated)).any():
        raise FileFormatError("next.done contradicts next.terminated | next.truncated; use another copy")
    return terminated, truncated | (table.last & ~terminated)


def _finals(folder: Path, table: Table, features: Mapping[str, Feature]) -> dict[str, Array] | None:
    """The observation after each frame, by column; None if final observations are not kept.

    Raises:
        FileFormatError: the table of episodes contradicts the frames.
    """
    observed = _observed(features)
    parts = [_opened(file, lambda parquet: _rows(parquet, observed)) for file in _files(folder, EPISODES)]
    numbers, lengths = (np.concatenate([part[name] for part in parts]) for name in ("episode_index", "length"))
    first = table.columns["episode_index"].reshape(-1)[table.bounds[:-1]]
    if not np.array_equal(numbers, first) or not np.array_equal(lengths, np.diff(table.bounds)):
        raise FileFormatError(f"'{folder / EPISODES}': expected the episodes that the frames have, got others")
    if not all(name in part for part in parts for name in observed):
        return None
    after: dict[str, Array] = {}
    for name, feature in observed.items():
        last = np.concatenate([dense(part[name], feature, str(folder / EPISODES)) for part in parts])
        of = features[name.removeprefix(FINAL)]
        array = table.columns[of.name]
        after[of.name] = np.concatenate([array[1:], array[-1:]])
        after[of.name][table.bounds[1:] - 1] = last.reshape(-1, *array.shape[1:])
        after[of.name] = after[of.name].reshape(len(array), *of.own_shape)
    return after


def _observed(features: Mapping[str, Feature]) -> dict[str, Feature]:
    """The columns of final observations in a table of episodes, which are flat."""
    found = {FINAL + name: feature for name, feature in features.items() if feature.path[0] == "obs"}
    return {name: feature._replace(name=name, shape=(feature.size,)) for name, feature in found.items()}


def _wanted(parquet: Any, observed: Mapping[str, Feature]) -> dict[str, Feature]:
    """The columns to read of a table of episodes: two of whole numbers, and final observations if it has them all."""
    plain = {name: Feature(name, np.dtype(np.int64), (1,), (name,), ()) for name in NUMBERS_OF_EPISODES}
    return plain | (dict(observed) if observed.keys() <= set(parquet.schema_arrow.names) else {})


def _rows(parquet: Any, observed: Mapping[str, Feature]) -> dict[str, Any]:
    """The columns of a table of episodes: two of whole numbers, and final observations as they lie there."""
    wanted = _wanted(parquet, observed)
    table = parquet.read(columns=list(wanted))
    found: dict[str, Any] = {name: table[name] for name in wanted if not table[name].null_count}
    return found | {name: dense(table[name], wanted[name], EPISODES).reshape(-1) for name in NUMBERS_OF_EPISODES}


def _tree(leaves: Mapping[tuple[str | int, ...], Array]) -> Any:
    """Leaves by path as nested dicts, and as tuples if all keys are whole numbers.

    Raises:
        FileFormatError: one path is the beginning of another.
    """
    if () in leaves:
        if len(leaves) > 1:
            raise FileFormatError(f"features of one name and with more after it: {', '.join(map(str, leaves))}")
        return leaves[()]
    groups: dict[str | int, dict[tuple[str | int, ...], Array]] = {}
    for path, leaf in leaves.items():
        groups.setdefault(path[0], {})[path[1:]] = leaf
    found = {key: _tree(inner) for key, inner in groups.items()}
    if any(type(key) is int for key in found):
        if set(found) != set(range(len(found))):
            raise FileFormatError(f"features with the places {shown(list(found))} in a tuple; expected 0, 1, ...")
        return tuple(found[at] for at in range(len(found)))
    return {str(key): part for key, part in found.items()}
