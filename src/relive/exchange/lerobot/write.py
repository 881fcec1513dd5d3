"""A replay as a LeRobotDataset v3."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np

from ...errors import DTypeError, FieldError, FileFormatError, ParameterError, ShapeError
from ...files.disk import make_directory, sync_path, usable
from ...parameters import is_count, require
from ...replay.buffer import ReplayBuffer
from ...steps.arrays import Array, numpy_dtype
from ...steps.schema import Schema
from ...steps.trees import Path as Keys
from ...steps.trees import descend
from ..log import Played, played, tracked
from .layout import DATA, DEFAULTS, EPISODES, FINAL, INFO, NUMBERS, STATS, TASKS, VERSION, Feature, arrow, column_of
from .stats import Stats, episode_stats, joined_stats

__all__ = ["to_lerobot"]

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

FLAGS = {"reward": "next.reward", "terminated": "next.terminated", "truncated": "next.truncated"}


def to_lerobot(
    replay: ReplayBuffer, path: str | os.PathLike[str], *, fps: int = 30, task: str = "", robot_type: str | None = None
) -> Path:
    """Write the episodes of a replay as a new LeRobotDataset v3; returns its directory.

    Observations become ``observation.…``, actions ``action``, rewards ``next.reward``, and the ends of episodes
    ``next.terminated``, ``next.truncated`` and ``next.done``. The final observation of each episode is kept beside its
    length, where LeRobot does not look. Images are stored as numbers, not as pictures or videos. An episode that was
    still running, or was interrupted, ends there without a flag. Priorities and indices are not written.

    Args:
        replay: the replay. Its transitions must be in the order of time.
        path: a path where nothing is, or an empty directory. It gets the whole data set or nothing. If the process is
            killed meanwhile, a directory whose name begins with a dot is left beside it.
        fps: steps per second; ``timestamp`` follows from it.
        task: the task that was to be done, in words.
        robot_type: the kind of robot that did it.

    Raises:
        ModuleNotFoundError: pyarrow is not installed.
        SchemaError: the transitions have no order, or a field has a dtype or shape that LeRobot does not know.
        ParameterError: there is no step, ``fps`` is not a positive whole number, or ``task`` is not a text.
        FileFormatError: something is at the path.
    """
    arrow()
    if not is_count(fps, 1):
        raise ParameterError(f"to_lerobot(fps={fps!r}): expected a whole number of at least 1")
    for name, text in (("task", task), ("robot_type", robot_type)):
        if not isinstance(cast("object", text), str) and (name == "task" or text is not None):
            raise ParameterError(f"to_lerobot({name}={text!r:.80}): expected words")
    require("to_lerobot", (lambda replay: isinstance(replay, ReplayBuffer), "expected a ReplayBuffer"), replay=replay)
    features = _features(replay.schema)
    target = usable(path).absolute()
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise FileFormatError(f"'{target}': expected nothing or an empty directory; give another path")
    make_directory(target.parent)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    beside.mkdir()
    try:
        _write(beside, replay, features, {"fps": fps, "robot_type": robot_type}, task)
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


# -- features -------------------------------------------------------------------------------------------------------


def _features(schema: Schema) -> dict[str, Feature]:
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
        found[name] = Feature(name, dtype, field.shape or (1,), _path(schema, keys), field.shape)
    return found


def _column(keys: Keys) -> str:
    """The name of a field's column."""
    if keys[0] == "obs":
        return ".".join(("observation", *(keys[1:] or ("state",))))
    return FLAGS.get(keys[0]) or ".".join(keys)


def _path(schema: Schema, keys: Keys) -> tuple[str | int, ...]:
    """The path of a field, with numbers for places in tuples."""
    path: list[str | int] = [keys[0]]
    for at in range(1, len(keys)):
        node: Any = schema[keys[:at]]
        path.append(int(keys[at]) if isinstance(node, tuple) else keys[at])
    return tuple(path)


# -- files ----------------------------------------------------------------------------------------------------------


def _write(folder: Path, replay: ReplayBuffer, features: dict[str, Feature], about: dict[str, Any], task: str) -> None:
    """Write all files into an empty directory."""
    tables, totals = _Tables(folder), dict[str, Stats | None]()
    episodes = index = 0
    with tables:
        for episode in tracked(played(replay), "writing", "episodes"):
            frames = _frames(episode, features) | _counters(len(episode.reward), episodes, index, about["fps"])
            stats = {name: episode_stats(array) for name, array in frames.items()}
            place = tables.add(frames)
            row = {"episode_index": episodes, "tasks": [task], "length": len(episode.reward), **place,
                   "dataset_from_index": index, "dataset_to_index": index + len(episode.reward),
                   "meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}  # fmt: skip
            tables.add_episode(row | _finals(episode, features) | _flat(stats))
            totals = {name: joined_stats(totals[name], x) if name in totals else x for name, x in stats.items()}
            episodes, index = episodes + 1, index + len(episode.reward)
    if not episodes:
        raise ParameterError("to_lerobot: the replay has no complete transition; collect some first")
    _write_task(folder / TASKS, task)
    done = Feature("next.done", np.dtype(np.bool_), (1,), ("done",), ())
    notes = {feature.name: feature.note() for feature in (*features.values(), done)}
    notes |= {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in DEFAULTS.items()}
    info = {
        "codebase_version": VERSION, **about, "total_episodes": episodes, "total_frames": index, "total_tasks": 1,
        "chunks_size": FILES, "data_files_size_in_mb": FILE_BYTES >> 20, "video_files_size_in_mb": 200,
        "splits": {"train": f"0:{episodes}"}, "features": notes, "video_path": None,
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


def _frames(episode: Played, features: dict[str, Feature]) -> dict[str, Array]:
    """The columns of an episode ``[k, *shape]``, without the final observation."""
    size = len(episode.reward)
    known = {"action": episode.action, "reward": episode.reward, "terminated": episode.terminated,
             "truncated": episode.truncated, "obs": episode.obs, **episode.others}  # fmt: skip
    found = {
        name: descend(known[str(f.path[0])], tuple(map(str, f.path[1:])))[:size].reshape(size, *f.shape)
        for name, f in features.items()
    }
    return found | {"next.done": (episode.terminated | episode.truncated).reshape(size, 1)}


def _counters(size: int, episode: int, first: int, fps: int) -> dict[str, Array]:
    """The columns that every data set has, ``[k, 1]``."""
    frame = np.arange(size)
    columns = {"timestamp": frame / fps, "frame_index": frame, "episode_index": np.full(size, episode),
               "index": frame + first, "task_index": np.zeros(size)}  # fmt: skip
    return {name: columns[name].astype(dtype).reshape(size, 1) for name, dtype in DEFAULTS.items()}


def _finals(episode: Played, features: dict[str, Feature]) -> dict[str, Array]:
    """The final observation of an episode, as flat numbers."""
    observed = [feature for feature in features.values() if feature.path[0] == "obs"]
    return {
        FINAL + f.name: descend(episode.obs, tuple(map(str, f.path[1:])))[-1].reshape(-1).astype(f.dtype)
        for f in observed
    }


def _flat(stats: dict[str, Stats | None]) -> dict[str, Any]:
    """Statistics as columns of the table of episodes."""
    return {
        f"stats/{name}/{key}": value.tolist()
        for name, part in stats.items() if part is not None
        for key, value in part.items()
    }  # fmt: skip


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
        self._rows: list[dict[str, Any]] = []

    def add(self, frames: dict[str, Array]) -> dict[str, int]:
        """Write an episode's frames; returns the numbers of the folder and the file they are in."""
        size = len(frames["index"])
        step = max(min(PIECE // array[0].size for array in frames.values()), 1)
        for low in range(0, size, step):
            part = {name: array[low : low + step] for name, array in frames.items()}
            table = arrow().table({name: column_of(array, array.shape[1:]) for name, array in part.items()})
            if not low and self._bytes >= FILE_BYTES:
                self._begin(table.schema)
            self._frames.write_table(table)
            self._bytes += table.nbytes
        return {"data/chunk_index": self._number // FILES, "data/file_index": self._number % FILES}

    def _begin(self, schema: Any) -> None:
        """Begin the next file of frames."""
        if self._frames is not None:
            self._frames.close()
        self._number, self._bytes = self._number + 1, 0
        self._frames = self._writer(DATA, self._number, schema)

    def add_episode(self, row: dict[str, Any]) -> None:
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
        fields: Any = self._episodes.schema
        columns = [pa.array([row.get(field.name) for row in self._rows], field.type) for field in fields]
        self._episodes.write_table(pa.table(columns, schema=fields))
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
