"""LeRobotDataset v3: Parquet files of frames, and pictures, in and out.

In order: the layout of a data set; reading (features, frames, steps and ends, final observations); writing (columns,
files, statistics); and columns of Parquet as arrays.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..errors import DTypeError, FieldError, FileFormatError, NoSaveError, ParameterError, ShapeError
from ..files.disk import make_directory, sync_path, usable
from ..look.experience import ArrayTree
from ..names import needed
from ..parameters import FLAG_RULE, is_count, require
from ..printable import shown
from ..replay.buffer import ReplayBuffer
from ..steps.arrays import Array, Ints, numpy_dtype
from ..steps.schema import Path as Keys
from ..steps.schema import Schema, descend
from .hub import downloaded, is_address
from .log import (
    EpisodeArrays,
    Json,
    Log,
    count,
    directory,
    episodes_of,
    json_object,
    require_memory,
    sizes_in,
    with_progress,
)
from .pictures import (
    VIDEO_PATH,
    VIDEOS,
    Picture,
    Places,
    VideoWriter,
    fill_images,
    fill_videos,
    pngs,
    sample_of,
    to_read,
    to_write,
)

# -- the layout of a data set ------------------------------------------------------------------------------------------

VERSION = "v3.0"

INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"

EPISODES, DATA = "meta/episodes", "data"

DEFAULTS = {
    "timestamp": "float32",
    **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64"),
}
"""The columns that every data set has, with their dtypes."""

FINAL = "final/"
"""The prefix of the columns with an episode's final observation, in the table of episodes. LeRobot ignores them."""

NUMBERS = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
"""The dtypes of features that are numbers. Others are "image", "video", "string" and "language"."""

FLAGS = ("next.reward", "next.done", "next.terminated", "next.truncated")
"""Columns with a meaning of their own."""

NUMBERS_OF_EPISODES = ("episode_index", "length")
"""The columns that are read of a table of episodes, besides final observations."""


class Feature(NamedTuple):
    """One column of frames.

    Args:
        name: the name of the column.
        dtype: the dtype of its numbers.
        shape: the shape of a frame's numbers; a single number has (1,).
        path: where the column belongs in a step; a whole number is a place in a tuple.
        own_shape: the shape in a step; () for a single number without an axis.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    path: tuple[str | int, ...]
    own_shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Numbers in a frame."""
        return prod(self.shape)

    def note(self) -> dict[str, object]:
        """The entry of ``info.json``. LeRobot keeps ``info``, and does not read what relive puts there."""
        ours = {"relive.path": list(self.path), "relive.shape": list(self.own_shape)}
        return {"dtype": self.dtype.name, "shape": list(self.shape), "names": None, "info": ours}


# -- reading -----------------------------------------------------------------------------------------------------------

COPIES = 3
"""How often numbers are in memory while they are read: as Arrow's, as those of a file, and as those of all files."""


Content = TypeVar("Content")


class Table(NamedTuple):
    """Columns ``[S, ...]`` of all files, and the first row of each episode with S at the end, ``[E + 1]``."""

    columns: dict[str, Array]
    bounds: Ints

    @property
    def last(self) -> Array:
        """True where a frame is its episode's last, bool ``[S]``."""
        is_last = np.zeros(self.bounds[-1], np.bool_)
        is_last[self.bounds[1:] - 1] = True
        return is_last


def from_lerobot(path: str | os.PathLike[str], *, images: bool = False) -> Log:
    """The frames of a LeRobotDataset v3 that is on this machine, or on the hub.

    A frame is a step: ``observation.…`` is the observation that ``action`` was chosen on. ``next.reward`` and
    ``next.done`` came after it. Data sets that :func:`to_lerobot` wrote come back with every end and final observation.
    In others, a done episode counts as terminated unless ``next.truncated`` or ``next.terminated`` says more. An
    episode that was not done was cut off after its last frame. ``lacks`` names all that is missing. Columns that only
    number the frames are fields, but stay out of a replay.

    Args:
        path: the directory with ``meta`` and ``data`` in it; or ``"hf://user/set"``, which huggingface_hub downloads
            into its cache.
        images: True to decode videos and compressed images, as uint8 fields of the shape that the data set says. All
            of them have to fit into memory, twice with final observations. By default they are left where they are,
            and videos are not downloaded.

    Raises:
        ModuleNotFoundError: pyarrow, or another package that is needed, is not installed.
        NoSaveError: a file is missing, or the hub has no such data set.
        FileFormatError: a file is damaged or contradicts ``info.json``, or the data set has another version.
        FieldError: no observation is read.
        ParameterError: there is too little memory for the frames; or the address is wrong.
    """
    arrow()
    require("from_lerobot", FLAG_RULE, images=images)
    wanted = (f"{DATA}/*", "meta/*", *((f"{VIDEOS}/*",) if images else ()))
    where = downloaded(path, wanted) if is_address(path) else path
    folder = directory(where, "the directory of a LeRobot data set")
    info = json_object(Path(os.path.realpath(folder / INFO)), "the description of a LeRobot data set")
    version = info.get("codebase_version")
    if not isinstance(version, str) or not version.startswith("v3."):
        raise FileFormatError(
            f"'{folder / INFO}': expected codebase_version {VERSION}, got {shown(version)}; convert it with LeRobot"
        )
    features, pictures, lacks = _features(info, folder / INFO, images)
    table = _frames(folder, info, features)
    finals = _finals(folder, table, features)
    if pictures:
        shown_in, after = _pictures(folder, info, pictures, table)
        table.columns.update(shown_in)
        finals = None if finals is None or after is None else finals | after
        features |= {p.name: Feature(p.name, np.dtype(np.uint8), p.own_shape, p.path, p.own_shape) for p in pictures}
    fields = _step(table, features, lacks)
    many = count(info, "total_tasks", folder / INFO) > 1
    if many:
        lacks.append("it names its tasks in words, which were not read; 'task_index' was")
    if finals is None:
        lacks.append("it keeps no final observations")
    else:
        fields["next_obs"] = _tree({f.path[1:]: finals[name] for name, f in features.items() if f.path[0] == "obs"})
    numbering = [name for name in DEFAULTS if name != "task_index" or not many]
    name = f"'{path if is_address(path) else folder}', LeRobot data set"
    return Log(name, fields, tuple(lacks), left_out=tuple(numbering))


def _features(
    info: Mapping[str, Json], where: Path, images: bool
) -> tuple[dict[str, Feature], list[Picture], list[str]]:
    """The columns of numbers and of pictures to read, and sentences on what is not read.

    Raises:
        FileFormatError: an entry is something else than a feature.
        FieldError: no observation is read.
    """
    entries = info.get("features")
    if not isinstance(entries, dict):
        raise FileFormatError(f"'{where}', 'features': expected an object, got {shown(entries)}; use another copy")
    features: dict[str, Feature] = {}
    pictures: list[Picture] = []
    lacks: list[str] = []
    for name, note in entries.items():
        known = note if isinstance(note, dict) else {}
        dtype, shape = known.get("dtype"), sizes_in(known.get("shape"), least=1, axes=5)
        if isinstance(dtype, str) and dtype in NUMBERS and shape:
            features[name] = _feature(name, dtype, shape, known, where)
        elif (
            images
            and dtype in ("video", "image")
            and (picture := to_read(name, known, _keys(name, known, where), where))
        ):
            pictures.append(picture)
        elif dtype in ("video", "image", "string", "language"):
            fate = "stays in its files" if dtype == "video" else "was not read"
            fate += "; images=True reads it" if dtype in ("video", "image") and not images else ""
            lacks.append(f"'{name}' has the dtype {dtype} and {fate}")
        else:
            raise FileFormatError(f"'{where}', feature '{name:.80}': expected a dtype and a shape, got {shown(note)}")
    for name, dtype in DEFAULTS.items():
        features.setdefault(name, Feature(name, np.dtype(dtype), (1,), (name,), ()))
    if not any(column.path[0] == "obs" for column in (*features.values(), *pictures)):
        more = "" if images else "; from_lerobot(..., images=True) reads pictures"
        raise FieldError(
            f"'{where}' has no observations that are numbers; it has {', '.join(entries) or 'nothing'}{more}"
        )
    return features, pictures, lacks


def _feature(name: str, dtype: str, shape: tuple[int, ...], note: Mapping[str, Json], where: Path) -> Feature:
    """A column of numbers, and where it belongs in a step."""
    info = note.get("info")
    own = (info if isinstance(info, dict) else {}).get("relive.shape", list(shape))
    if own != list(shape) and (own != [] or prod(shape) != 1):
        raise FileFormatError(f"'{where}', feature '{name:.80}': 'relive.shape' {shown(own)} contradicts {shape}")
    keys = _keys(name, note, where)
    if name in FLAGS and shape != (1,):
        raise FileFormatError(f"'{where}', feature '{name}': expected the shape (1,), got {shape}")
    return Feature(name, np.dtype(dtype), shape, keys, () if own == [] or name in DEFAULTS else shape)


def _keys(name: str, note: Mapping[str, Json], where: Path) -> tuple[str | int, ...]:
    """Where a column belongs in a step: where relive has noted it, or else where its name says."""
    info = note.get("info")
    path = (info if isinstance(info, dict) else {}).get("relive.path", _path(name))
    parts = path if isinstance(path, list) else []
    keys = tuple(part for part in parts if type(part) is str or type(part) is int)
    if not 0 < len(keys) == len(parts) <= 16 or type(keys[0]) is not str:
        raise FileFormatError(f"'{where}', feature '{name:.80}': expected 'relive.path', a list, got {shown(path)}")
    return keys


def _path(name: str) -> list[Json]:
    """The path of a column that relive did not write: ``observation.a.b`` is ``obs``, ``a``, ``b``."""
    kind, _, rest = name.partition(".")
    if kind in ("observation", "action"):
        return ["obs" if kind == "observation" else kind, *(rest.split(".") if rest else [])]
    return [name.replace(".", "_")]


def _frames(folder: Path, info: Mapping[str, Json], features: Mapping[str, Feature]) -> Table:
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
        rows = sum(size.rows for size in sizes)
        if rows != stated or not stated:
            raise FileFormatError(f"'{where}': expected {name} of {rows}, as the files have, got {stated}")
    require_memory(COPIES * sum(size.nbytes for size in (*frames, *finals)), folder)
    parts = [
        _opened(file, lambda parquet, file=file: _columns(parquet, features, file))
        for file in with_progress(files, "reading", "files")
    ]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in features}
    episode, frame = (columns[name].reshape(-1) for name in ("episode_index", "frame_index"))
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(episode)) + 1, [total]]).astype(np.int64)
    if (np.diff(episode) < 0).any() or len(bounds) != episodes + 1:
        raise FileFormatError(f"'{folder / DATA}': expected {episodes} episodes in order, got others")
    wrong = np.flatnonzero(frame != np.arange(total) - np.repeat(bounds[:-1], np.diff(bounds)))
    if len(wrong):
        raise FileFormatError(
            f"'{folder / DATA}': expected frame_index to count from 0 in each episode; row {wrong[0]}, of episode "
            f"{episode[wrong[0]]}, has {frame[wrong[0]]}"
        )
    return Table(columns, bounds)


def _files(folder: Path, kind: str) -> list[Path]:
    """The Parquet files of a kind, in order. They may be links, as in the cache of a hub.

    Raises:
        NoSaveError: there is no such file.
        FileFormatError: one of them is not a regular file.
    """
    paths = sorted((folder / kind).glob("*/*.parquet"), key=_in_order)
    if not paths:
        raise NoSaveError(f"'{folder / kind}': expected Parquet files in folders, got none; give a complete copy")
    for file in paths:
        if not file.is_file():
            raise FileFormatError(f"'{file}': expected a regular file, got something else; use another copy")
    return paths


def _in_order(file: Path) -> tuple[int, str, int, str]:
    """The key to sort by: the numbers of folder and file. They have three digits up to 999, and more after that."""
    return len(file.parent.name), file.parent.name, len(file.name), file.name


def _opened(file: Path, read: Callable[[Any], Content]) -> Content:
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


class Size(NamedTuple):
    """The rows of a Parquet file, by its own metadata, and the bytes that its columns of features take in memory."""

    rows: int
    nbytes: int


def _size(parquet: Any, features: Mapping[str, Feature], file: Path, *, nulls: bool = False) -> Size:
    """The size of a file, whose columns hold numbers, and as many as the features say.

    Args:
        parquet: the open file.
        features: the columns that will be read.
        file: the path of the file, for errors.
        nulls: True if rows may lack the numbers of a list.

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


def _step(table: Table, features: Mapping[str, Feature], lacks: list[str]) -> dict[str, ArrayTree]:
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
    """The frames that terminated and those that were truncated, bool ``[S]`` each.

    ``next.done`` alone counts as terminated, as in LeRobot's own buffer. Without a flag an episode counts as cut off:
    a wrong terminal would teach a value of 0.

    Raises:
        FileFormatError: the flags contradict each other.
    """
    flags = {name: table.columns[name].reshape(-1) != 0 for name in FLAGS[1:] if name in table.columns}
    done, terminated, truncated = (flags.get(name) for name in FLAGS[1:])
    if done is None and terminated is None:
        lacks.append("it does not say how episodes ended; each counts as cut off after its last frame")
    elif terminated is None and truncated is None:
        lacks.append("it does not tell truncation from termination; a done episode counts as terminated")
    if terminated is None:
        terminated = np.zeros_like(table.last) if done is None else done & (True if truncated is None else ~truncated)
    if truncated is None:
        truncated = np.zeros_like(terminated) if done is None else done & ~terminated
    if done is not None and len(wrong := np.flatnonzero(done != (terminated | truncated))):
        episode, frame = (table.columns[name].reshape(-1)[wrong[0]] for name in ("episode_index", "frame_index"))
        raise FileFormatError(
            f"episode {episode}, frame {frame}: next.done contradicts next.terminated | next.truncated; use another "
            "copy"
        )
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
    frames = np.diff(table.bounds)
    wrong = np.flatnonzero((numbers != first) | (lengths != frames))
    if len(wrong):
        at = wrong[0]
        raise FileFormatError(
            f"'{folder / EPISODES}': expected the episodes that the frames have, got others: row {at} is of episode "
            f"{numbers[at]} with {lengths[at]} frames, and the frames are {frames[at]} of episode {first[at]}"
        )
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


def _pictures(
    folder: Path, info: Mapping[str, Json], pictures: list[Picture], table: Table
) -> tuple[dict[str, Array], dict[str, Array] | None]:
    """All pictures by column, ``[S, *own_shape]``, and those of observations after each frame.

    Returns:
        both; None for the second if final observations are not kept.

    Raises:
        NoSaveError, FileFormatError: a file is missing, is damaged, or lacks a frame.
        ParameterError: there is too little memory for them.
    """
    size, files, episodes = len(table.last), _files(folder, DATA), _files(folder, EPISODES)
    observed = [picture for picture in pictures if picture.path[0] == "obs"]
    kept = all(FINAL + p.name in _opened(file, _names) for file in episodes for p in observed)
    times = {id(picture): 2 if kept and picture in observed else 1 for picture in pictures}
    require_memory(sum(times[id(p)] * size * prod(p.own_shape) for p in pictures), folder)
    found, after = dict[str, Array](), dict[str, Array]()
    for picture in pictures:
        found[picture.name] = array = np.empty((size, *picture.own_shape), np.uint8)
        stored = picture.as_stored(array)
        if picture.kind == "image":
            _fill(files, picture.name, picture, stored)
        else:
            fill_videos(folder, picture, _places(episodes, picture.name), table.bounds,
                        max(count(info, "fps", folder / INFO), 1), stored)  # fmt: skip
        if kept and picture in observed:
            after[picture.name] = np.concatenate([array[1:], array[-1:]])
            last = np.empty((len(table.bounds) - 1, *picture.own_shape), np.uint8)
            _fill(episodes, FINAL + picture.name, picture, picture.as_stored(last))
            after[picture.name][table.bounds[1:] - 1] = last
    return found, after if kept else None


def _names(parquet: Any) -> list[str]:
    return parquet.schema_arrow.names


def _fill(files: list[Path], name: str, picture: Picture, out: Array) -> None:
    """Decode a column of compressed images, a few rows at a time.

    Raises:
        FileFormatError: it is missing, or holds something else.
    """
    at = 0

    def decode(parquet: Any, file: Path) -> int:
        if name not in _names(parquet):
            raise FileFormatError(f"'{file}': expected a column '{name}', as {INFO} says, got none; use another copy")
        rows = 0
        for batch in parquet.iter_batches(batch_size=TOGETHER_PICTURES, columns=[name]):
            column = batch.column(0)
            if arrow().types.is_struct(column.type):
                column = column.field("bytes")
            fill_images(column.to_pylist(), picture, out[at + rows : at + rows + len(column)], str(file))
            rows += len(column)
        return rows

    for file in with_progress(files, "decoding", "files"):
        at += _opened(file, lambda parquet, file=file: decode(parquet, file))


TOGETHER_PICTURES = 64
"""Compressed images that are in memory at once."""


def _places(episodes: list[Path], name: str) -> Places:
    """Where the episodes lie in the videos of a column.

    Raises:
        FileFormatError: the table of episodes does not say it.
    """
    columns = {f"{VIDEOS}/{name}/chunk_index": np.int64, f"{VIDEOS}/{name}/file_index": np.int64,
               f"{VIDEOS}/{name}/from_timestamp": np.float64}  # fmt: skip
    wanted = {column: Feature(column, np.dtype(dtype), (1,), (column,), ()) for column, dtype in columns.items()}

    def read(parquet: Any, file: Path) -> dict[str, Array]:
        _size(parquet, wanted, file)
        return _columns(parquet, wanted, file)

    parts = [_opened(file, lambda parquet, file=file: read(parquet, file)) for file in episodes]
    places = Places(*(np.concatenate([part[column].reshape(-1) for part in parts]) for column in columns))
    if not np.isfinite(places.start).all():
        raise FileFormatError(
            f"'{episodes[0].parent}': expected finite numbers in '{[*columns][-1]}'; use another copy"
        )
    return places


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
    columns: dict[str, Any] = {name: table[name] for name in wanted if not table[name].null_count}
    return columns | {name: dense(table[name], wanted[name], EPISODES).reshape(-1) for name in NUMBERS_OF_EPISODES}


def _tree(leaves: Mapping[tuple[str | int, ...], Array]) -> ArrayTree:
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
    members = {key: _tree(inner) for key, inner in groups.items()}
    if any(type(key) is int for key in members):
        if set(members) != set(range(len(members))):
            raise FileFormatError(f"features with the places {shown(list(members))} in a tuple; expected 0, 1, ...")
        return tuple(members[at] for at in range(len(members)))
    return {str(key): part for key, part in members.items()}


# -- writing -----------------------------------------------------------------------------------------------------------

FILE_BYTES = 100 * 2**20
"""Bytes of frames in a file before the next one is begun: LeRobot's own limit."""

FILES = 1000
"""Files in a folder: LeRobot's own limit."""

PIECE = 2**26
"""Numbers of one column that are written at once; lists count their members in 32 bits."""

RESERVED = {*DEFAULTS, "next.done", "task"}
"""Columns that no field may be named after."""

TOGETHER = 1000
"""Episodes whose rows are written at once."""

FLAG_COLUMNS = {"reward": "next.reward", "terminated": "next.terminated", "truncated": "next.truncated"}


def to_lerobot(
    replay: ReplayBuffer,
    path: str | os.PathLike[str],
    *,
    fps: int = 30,
    task: str = "",
    robot_type: str | None = None,
    images: str = "numbers",
    drop_incomplete: bool = False,
) -> Path:
    """Write the episodes of a replay as a new LeRobotDataset v3; returns its directory.

    Observations become ``observation.…``, actions ``action``, rewards ``next.reward``, and the ends of episodes
    ``next.terminated``, ``next.truncated`` and ``next.done``. The final observation of each episode is kept beside its
    length, where LeRobot does not look: a further frame would need an action that was never taken, and imitation would
    learn it. An episode that was still running, or was interrupted, ends there without a flag, unless
    ``drop_incomplete`` leaves it out. Priorities and indices are not written.

    Args:
        replay: the replay. Its transitions must be in the order of time.
        path: a path where nothing is, or an empty directory. It gets the whole data set or nothing. If the process is
            killed meanwhile, a directory whose name begins with a dot is left beside it.
        fps: steps per second; ``timestamp`` follows from it.
        task: the task that was to be done, in words.
        robot_type: the kind of robot that did it.
        images: how to write pictures, which are uint8 fields ``[H, W, 3]`` or ``[3, H, W]``. "numbers" and "image", PNG
            files in the Parquet files, lose nothing. "video" loses what H.264 loses, and takes the least space; height
            and width have to be even. LeRobot's policies take the last two for images. Final observations are PNG
            files with both. Other fields are numbers.
        drop_incomplete: True to leave out episodes that still run, were interrupted, or whose first steps were
            overwritten: those of :meth:`relive.ReplayBuffer.episodes` that are not ``whole``.

    Raises:
        ModuleNotFoundError: pyarrow is not installed; or Pillow or PyAV, where ``images`` needs them.
        SchemaError: the transitions have no order, or a field has a dtype or shape that LeRobot does not know.
        ParameterError: there is no step, or no complete episode, ``fps`` is not a positive whole number, ``task`` is
            not a text, or there is no picture for ``images``.
        ShapeError: a picture cannot be a video.
        FileFormatError: something is at the path.
    """
    arrow()
    if not is_count(fps, 1):
        raise ParameterError(f"to_lerobot(fps={fps!r}): expected a whole number of at least 1")
    words: dict[str, object] = {"task": task} if robot_type is None else {"task": task, "robot_type": robot_type}
    for name, text in words.items():
        if not isinstance(text, str):
            raise ParameterError(f"to_lerobot({name}={text!r:.80}): expected words")
    require("to_lerobot", (lambda replay: isinstance(replay, ReplayBuffer), "expected a ReplayBuffer"), replay=replay)
    require("to_lerobot", FLAG_RULE, drop_incomplete=drop_incomplete)
    features = features_of(replay.schema)
    pictures = to_write({name: (f.dtype, f.own_shape, f.path) for name, f in features.items()}, images)
    numbers = {name: feature for name, feature in features.items() if name not in pictures}
    target = usable(path).absolute()
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise FileFormatError(f"'{target}': expected nothing or an empty directory; give another path")
    make_directory(target.parent)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    beside.mkdir()
    try:
        episodes = episodes_of(replay, "to_lerobot", drop_incomplete=drop_incomplete)
        _write(beside, episodes, numbers, pictures, fps, robot_type, task)
        _put(beside, target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    sync_path(target.parent)
    return target


def _put(beside: Path, target: Path) -> None:
    """Give the written directory its name.

    Raises:
        FileFormatError: something else has appeared at the path meanwhile.
    """
    try:
        with suppress(FileNotFoundError):
            target.rmdir()
        beside.rename(target)
    except OSError as error:
        if not os.path.lexists(target):
            raise
        raise FileFormatError(f"'{target}': something was put there meanwhile ({error}); give another path") from error


def features_of(schema: Schema) -> dict[str, Feature]:
    """The columns of the fields of a step.

    Raises:
        DTypeError, ShapeError: a field cannot be stored.
        FieldError: two fields would have one name.
    """
    found: dict[str, Feature] = {}
    for keys, field in schema.leaves.items():
        name, dtype = _column(keys), numpy_dtype(field.dtype)
        if str(field.dtype).removeprefix("torch.") not in NUMBERS:
            raise DTypeError(f"field '{'.'.join(keys)}': LeRobot has no {field.dtype}; store it as another dtype")
        if len(field.shape) > 5 or 0 in field.shape:
            raise ShapeError(
                f"field '{'.'.join(keys)}': LeRobot stores 1 to 5 axes, none of them empty, got {field.shape}"
            )
        if name in found or name in RESERVED or "/" in name:
            raise FieldError(f"field '{'.'.join(keys)}' cannot be the column '{name}' of a data set; rename it")
        found[name] = Feature(name, dtype, field.shape or (1,), _path_of_field(schema, keys), field.shape)
    return found


def _column(keys: Keys) -> str:
    """The name of a field's column."""
    if keys[0] == "obs":
        return ".".join(("observation", *(keys[1:] or ("state",))))
    return FLAG_COLUMNS.get(keys[0]) or ".".join(keys)


def _path_of_field(schema: Schema, keys: Keys) -> tuple[str | int, ...]:
    """The path of a field, with numbers for places in tuples."""
    inner = (int(keys[at]) if isinstance(schema[keys[:at]], tuple) else keys[at] for at in range(1, len(keys)))
    return keys[0], *inner


def _write(
    folder: Path,
    given: Iterable[EpisodeArrays],
    features: dict[str, Feature],
    pictures: dict[str, Picture],
    fps: int,
    robot_type: str | None,
    task: str,
) -> None:
    """Write all files into an empty directory."""
    tables, totals = _Tables(folder), dict[str, Stats | None]()
    videos = {name: VideoWriter(folder, p, fps, FILES) for name, p in pictures.items() if p.kind == "video"}
    episodes = index = 0
    with tables, ExitStack() as stack:
        for video in videos.values():
            stack.callback(video.close)
        for episode in with_progress(given, "writing", "episodes"):
            size = len(episode.reward)
            frames = _columns_of(episode, features) | _counters(size, episodes, index, fps)
            stats = {name: episode_stats(array) for name, array in frames.items()}
            seen = {name: p.as_stored(_leaf(episode, p.path)) for name, p in pictures.items()}
            stats |= {name: picture_stats(array[:size]) for name, array in seen.items()}
            frames |= {name: pngs(array[:size]) for name, array in seen.items() if name not in videos}
            place = tables.add(frames)
            row = {"episode_index": episodes, "tasks": [task], "length": size, **place,
                   "dataset_from_index": index, "dataset_to_index": index + size,
                   "meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}  # fmt: skip
            for name, video in videos.items():
                row |= video.add(seen[name][:size])
            row |= {FINAL + name: pngs(seen[name][-1:])[0] for name, p in pictures.items() if p.path[0] == "obs"}
            tables.add_episode(row | _final_of(episode, features) | _flat(stats))
            totals = {name: joined_stats(totals[name], x) if name in totals else x for name, x in stats.items()}
            episodes, index = episodes + 1, index + size
    _write_task(folder / TASKS, task)
    done = Feature("next.done", np.dtype(np.bool_), (1,), ("done",), ())
    notes = {feature.name: feature.note() for feature in (*features.values(), done)}
    notes |= {name: picture.note(fps) for name, picture in pictures.items()}
    notes |= {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in DEFAULTS.items()}
    info = {
        "codebase_version": VERSION, "fps": fps, "robot_type": robot_type,
        "total_episodes": episodes, "total_frames": index, "total_tasks": 1,
        "chunks_size": FILES, "data_files_size_in_mb": FILE_BYTES >> 20, "video_files_size_in_mb": 200,
        "splits": {"train": f"0:{episodes}"}, "features": notes, "video_path": VIDEO_PATH if videos else None,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    }  # fmt: skip
    known = {name: {key: x.tolist() for key, x in stats.items()} for name, stats in totals.items() if stats}
    for name, content in ((INFO, info), (STATS, known)):
        (folder / name).write_text(json.dumps(content, indent=4), encoding="utf-8")
    for file in [*folder.rglob("*"), folder]:
        _sync(file)


def _sync(path: Path) -> None:
    """Write a file or a directory to the disk."""
    if path.is_dir():
        sync_path(path)
        return
    with open(path, "rb+") as stream:
        os.fsync(stream.fileno())


def _columns_of(episode: EpisodeArrays, features: dict[str, Feature]) -> dict[str, Array]:
    """The columns of an episode ``[k, *shape]``, without the final observation."""
    size = len(episode.reward)
    found = {name: _leaf(episode, f.path)[:size].reshape(size, *f.shape) for name, f in features.items()}
    return found | {"next.done": (episode.terminated | episode.truncated).reshape(size, 1)}


def _leaf(episode: EpisodeArrays, path: tuple[str | int, ...]) -> Array:
    """The array of a field, ``[k, ...]``; of an observation ``[k + 1, ...]``."""
    return descend(episode.fields[str(path[0])], tuple(map(str, path[1:])))


def _counters(size: int, episode: int, first: int, fps: int) -> dict[str, Array]:
    """The columns that every data set has, ``[k, 1]``."""
    frame = np.arange(size)
    columns = {"timestamp": frame / fps, "frame_index": frame, "episode_index": np.full(size, episode),
               "index": frame + first, "task_index": np.zeros(size)}  # fmt: skip
    return {name: columns[name].astype(dtype).reshape(size, 1) for name, dtype in DEFAULTS.items()}


def _final_of(episode: EpisodeArrays, features: dict[str, Feature]) -> dict[str, Array]:
    """The final observation of an episode, as flat numbers."""
    observed = [feature for feature in features.values() if feature.path[0] == "obs"]
    return {FINAL + f.name: _leaf(episode, f.path)[-1].reshape(-1).astype(f.dtype) for f in observed}


def _flat(stats: dict[str, Stats | None]) -> dict[str, object]:
    """Statistics as columns of the table of episodes."""
    return {
        f"stats/{name}/{key}": value.tolist()
        for name, part in stats.items()
        if part is not None
        for key, value in part.items()
    }


def _write_task(file: Path, task: str) -> None:
    """The table of the one task, whose words are the index when pandas reads it."""
    pa = arrow()
    words = {"pandas_type": "unicode", "numpy_type": "object", "metadata": None}
    numbers = {"pandas_type": "int64", "numpy_type": "int64", "metadata": None}
    index = {
        "index_columns": ["task"],
        "column_indexes": [{"name": None, "field_name": None, **words}],
        "columns": [
            {"name": "task_index", "field_name": "task_index", **numbers},
            {"name": "task", "field_name": "task", **words},
        ],
        "pandas_version": "2.0.0",
    }
    table = pa.table({"task_index": pa.array([0], pa.int64()), "task": pa.array([task], pa.string())})
    pa.parquet.write_table(table.replace_schema_metadata({"pandas": json.dumps(index)}), file)


class _Tables:
    """The Parquet files of frames, which follow each other, and that of episodes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._frames: Any = None
        self._episodes: Any = None
        self._number, self._bytes = -1, FILE_BYTES
        self._rows: list[dict[str, object]] = []

    def add(self, frames: dict[str, Array]) -> dict[str, int]:
        """Write an episode's frames; returns the numbers of the folder and the file they are in."""
        size = len(frames["index"])
        step = max(min(PIECE // array[:1].size for array in frames.values()), 1)
        for low in range(0, size, step):
            part = {name: array[low : low + step] for name, array in frames.items()}
            table = arrow().table({name: column_of(array, array.shape[1:]) for name, array in part.items()})
            if not low and self._bytes >= FILE_BYTES:
                if self._frames is not None:
                    self._frames.close()
                self._number, self._bytes = self._number + 1, 0
                self._frames = self._writer(DATA, self._number, table.schema)
            self._frames.write_table(table)
            self._bytes += table.nbytes
        return {"data/chunk_index": self._number // FILES, "data/file_index": self._number % FILES}

    def add_episode(self, row: dict[str, object]) -> None:
        """Write an episode's row, together with those after it."""
        self._rows.append(row)
        if len(self._rows) >= TOGETHER:
            self._flush()

    def _flush(self) -> None:
        """Write the rows of episodes. Their columns are those of the first one; a missing statistic is null."""
        pa = arrow()
        if not self._rows:
            return
        if self._episodes is None:
            schema = pa.schema([(name, pa.array([value]).type) for name, value in self._rows[0].items()])
            self._episodes = self._writer(EPISODES, 0, schema)
        self._episodes.write_table(pa.Table.from_pylist(self._rows, self._episodes.schema))
        self._rows.clear()

    def _writer(self, kind: str, number: int, schema: Any) -> Any:
        """The writer of a new file."""
        file = self._folder / kind / f"chunk-{number // FILES:03d}" / f"file-{number % FILES:03d}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        return arrow().parquet.ParquetWriter(file, schema, compression="snappy")

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        """End all files."""
        if error[0] is None:
            self._flush()
        for writer in (self._frames, self._episodes):
            if writer is not None:
                writer.close()


# -- statistics --------------------------------------------------------------------------------------------------------

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}

MOST_NUMBERS = 512
"""A feature with more numbers in a frame than this has no statistics, such as an image stored as numbers."""

Stats = dict[str, Array]
"""min, max, mean, std and quantiles ``[*shape]`` in float64, and count ``[1]``."""


def episode_stats(frames: Array) -> Stats | None:
    """The statistics of frames ``[k, *shape]``; None for images, and if a number is not finite."""
    numbers = frames.astype(np.float64)
    if frames[0].size > MOST_NUMBERS or not np.isfinite(numbers).all():
        return None
    found = {"min": numbers.min(0), "max": numbers.max(0), "mean": numbers.mean(0), "std": numbers.std(0),
             "count": np.array([len(frames)])}  # fmt: skip
    return found | dict(zip(QUANTILES, np.quantile(numbers, list(QUANTILES.values()), 0), strict=True))


def picture_stats(frames: Array) -> Stats | None:
    """The statistics of pictures ``[k, height, width, 3]`` by channel, ``[3, 1, 1]``, from 0 to 1: LeRobot's form."""
    found = episode_stats(sample_of(frames))
    return found and {name: x if name == "count" else x.reshape(3, 1, 1) for name, x in found.items()}


def joined_stats(one: Stats | None, other: Stats | None) -> Stats | None:
    """The statistics of two sets of frames together. Quantiles are weighted means, as LeRobot's own are."""
    if one is None or other is None:
        return None
    counts = one["count"][0], other["count"][0]
    share = float(counts[1] / sum(counts))

    def mixed(name: str) -> Array:
        return one[name] + (other[name] - one[name]) * share

    mean = mixed("mean")
    spread = [stats["std"] ** 2 + (stats["mean"] - mean) ** 2 for stats in (one, other)]
    found = {
        "min": np.minimum(one["min"], other["min"]), "max": np.maximum(one["max"], other["max"]), "mean": mean,
        "std": np.sqrt(spread[0] + (spread[1] - spread[0]) * share), "count": one["count"] + other["count"],
    }  # fmt: skip
    return found | {name: mixed(name) for name in QUANTILES}


# -- columns of Parquet ------------------------------------------------------------------------------------------------


def arrow() -> Any:
    """The package pyarrow, with ``parquet`` and ``compute``.

    Raises:
        ModuleNotFoundError: pyarrow is not installed.
    """
    with needed("LeRobot data sets need pyarrow: pip install 'relive[lerobot]'"):
        import_module("pyarrow.parquet")
        import_module("pyarrow.compute")
    return import_module("pyarrow")


def column_of(array: Array, shape: tuple[int, ...]) -> Any:
    """Frames ``[k, *shape]`` as a column: numbers, lists of one length, or lists of lists; or PNG files, object."""
    pa = arrow()
    if array.dtype == np.object_:
        files, names = pa.array(list(array), pa.binary()), pa.nulls(len(array), pa.string())
        return pa.StructArray.from_arrays([files, names], ["bytes", "path"])
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    if shape == (1,):
        return flat
    if len(shape) == 1:
        return pa.FixedSizeListArray.from_arrays(flat, shape[0])
    for size in reversed(shape):
        flat = pa.ListArray.from_arrays(pa.array(np.arange(0, len(flat) + 1, size, dtype=np.int32)), flat)
    return flat


def widths(kind: Any, feature: Feature, where: str) -> tuple[int, int]:
    """The bytes in memory of a number of a column of this type, and of the offsets of the lists in a row.

    Raises:
        FileFormatError: the column does not hold numbers in as many lists as the feature has axes.
    """
    types: Any = arrow().types
    inner, lists, offsets = getattr(kind, "storage_type", kind), 1, 0
    for size in () if feature.shape == (1,) and not _is_list(inner) else feature.shape:
        if not _is_list(inner):
            raise _wrong(feature, where, f"{inner} where a list is due")
        offsets += 0 if types.is_fixed_size_list(inner) else 8 * lists
        inner, lists = inner.value_type, lists * size
    if not (types.is_integer(inner) or types.is_floating(inner) or types.is_boolean(inner)):
        raise _wrong(feature, where, str(kind))
    return max(feature.dtype.itemsize, inner.bit_width // 8), offsets


def dense(column: Any, feature: Feature, where: str) -> Array:
    """A column whose type :func:`widths` knows, as frames ``[k, *shape]``.

    Raises:
        FileFormatError: a value is missing, a list has another length than the shape says, or the dtype is wrong.
    """
    parts = [_dense(chunk, feature, where) for chunk in getattr(column, "chunks", [column])]
    return np.concatenate([np.empty((0, *feature.shape), feature.dtype), *parts])


def _dense(chunk: Any, feature: Feature, where: str) -> Array:
    """One chunk of a column; see :func:`dense`."""
    rows, values = len(chunk), getattr(chunk, "storage", chunk)
    for size in feature.shape if _is_list(values.type) else ():
        lengths = np.asarray(arrow().compute.list_value_length(values))
        if values.null_count or (lengths != size).any():
            raise _wrong(feature, where, "lists of other lengths")
        values = values.flatten()
    if values.null_count:
        raise _wrong(feature, where, "missing values")
    found: Array = values.to_numpy(zero_copy_only=False)
    if found.size != rows * feature.size or not np.can_cast(found.dtype, feature.dtype, "same_kind"):
        raise _wrong(feature, where, f"{found.size} numbers of {found.dtype} in {rows} frames")
    return found.astype(feature.dtype, copy=False).reshape(rows, *feature.shape)


def _is_list(kind: Any) -> bool:
    """True for the type of lists of any kind."""
    types: Any = arrow().types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _wrong(feature: Feature, where: str, got: str) -> FileFormatError:
    """The error for a column that differs from its feature."""
    return FileFormatError(
        f"'{where}', column '{feature.name}': expected {feature.dtype} {feature.shape} in every frame, as {INFO} says, "
        f"got {got}; use another copy"
    )
