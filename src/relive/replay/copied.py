"""A copy in memory of a replay in files, which another process may have open and be writing to."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch

from ..errors import FileFormatError, LifecycleError
from ..files.disk import contradictions
from ..files.mapped import MappedCopy
from ..kernels.tables import (
    COLUMNS,
    COUNTERS,
    HEAD,
    UNDO_AFTER,
    UNDO_ENVS,
    UNDO_KIND,
    UNDO_NONE,
    env_entries,
    first_row,
)
from ..memory.estimate import require_free
from ..memory.mapped import CopiedKeeper
from ..ring.ring import undo_words
from ..samplers.uniform import Uniform
from ..steps.arrays import Ints
from ..views.transitions import Transition
from .buffer import kept_arguments, newer
from .durable import SMALL, Mark, go_back, is_here, kept_settings, last_mark, newest_of, recover
from .saving import read_sampler

__all__ = ["copied"]


TRIES = 5
"""How often the copy is begun anew because the files changed in a way that spoiled it."""


PATIENCE = 1.0
"""Seconds to wait for a moment at which no change is under way. A process that died in a change leaves it for ever."""


class _SpoiledError(Exception):
    """The files have changed while they were copied, so that the copy is of no moment."""


def copied(cls: Any, path: str | os.PathLike[str]) -> Any:
    """A replay of the class ``cls`` with what the files of a directory hold now, in private memory.

    The files stay as they are, and no lock is taken: another process may open them, and write to them. Rows that it
    overwrites during the copy are left out. As after a kill, the episodes under way end.

    A sampler or view that a user wrote is not in the files. A uniform one of single transitions takes its place.

    Raises:
        NoSaveError: the directory holds no replay.
        FileFormatError: the directory holds something else, or the files are damaged or of several times.
        LifecycleError: another process changes the files so fast that no copy is whole.
        ParameterError: less memory is free than the rows take.
        OSError: a file may not be read.
    """
    for _ in range(TRIES):
        keeper = CopiedKeeper(path)
        try:
            return _copied(cls, keeper)
        except _SpoiledError:
            continue
        except (FileFormatError, OSError):
            if not _reopened(keeper.directory):
                raise
        finally:
            keeper.directory.release()
    raise LifecycleError(
        f"'{path}': another process changes the files too fast to copy them; try again, or look at the replay in that "
        "process"
    )


def _copied(cls: Any, keeper: CopiedKeeper) -> Any:
    directory, content = keeper.directory, keeper.directory.content
    with contradictions(directory.path):
        arguments = _arguments(content)
        num_envs = arguments["num_envs"]
        rows = arguments["capacity"] // num_envs
        _, kind, where = last_mark(keeper, num_envs, rows)
        arguments = _arguments(content | newer(kept_settings(keeper, kind, where)))
        state: Ints = keeper.take("state", (num_envs, COLUMNS), np.int64)
        keeper.take("counters", (COUNTERS,), np.int64)
        keeper.take("undo", (undo_words(num_envs, rows),), np.int64)
        now = _mark_now(directory, rows) if kind != "close" and is_here(keeper, where) else None
    _take_rows(directory, num_envs, rows, (state if now is None else now.state)[:, HEAD])
    with contradictions(directory.path):
        if now is None:
            _require_still(directory)
            recover(keeper, num_envs, rows)
        else:
            keeper.died = True
            go_back(keeper, now._replace(dead=_dead_now(directory, rows, now)), rows)
        buffer = cls(**arguments, store=keeper)
        read_sampler(directory, buffer._ring, buffer._sampler)
        buffer._ring.settle()
    return buffer


def _arguments(content: dict[str, Any]) -> dict[str, Any]:
    """The constructor's arguments, with a sampler and a view in the place of a user's own."""
    sampler = Uniform() if content.get("sampler") is None else None
    return kept_arguments(content, sampler, Transition() if content.get("view") is None else None)


def _mark_now(directory: MappedCopy, rows: int) -> Mark | None:
    """The mark of a replay as another process has it at this moment.

    Cursors only grow, so two looks that find the same numbers, and no change under way, saw one state.

    Returns:
        None if a change stays under way, as where the process died in it.
    """
    state, counters, undo = (directory.live(name) for name in ("state", "counters", "undo"))
    packed, until = directory.live("rows"), time.monotonic() + PATIENCE
    while time.monotonic() < until:
        idle, mine, counts = undo[UNDO_KIND] == UNDO_NONE, state.copy(), counters.copy()
        newest = newest_of(packed, rows, mine)
        small = {name: directory.live(name).tolist() for name in SMALL if directory.has(name)}
        if idle and undo[UNDO_KIND] == UNDO_NONE and (counters == counts).all() and (state == mine).all():
            return Mark(mine, counts, newest, np.zeros(len(mine), np.int64), small)
        time.sleep(1e-4)
    return None


def _take_rows(directory: MappedCopy, num_envs: int, rows: int, heads: Ints) -> None:
    """Copy into private memory all that the live rows hold, and every array of the ring and the sampler.

    Raises:
        ParameterError: less memory is free.
    """
    specs = [spec for name in directory.names if (spec := directory.spec(name)) is not None]
    pairs = {spec.name: (directory.take(spec.name, spec.shape, spec.dtype), directory.live(spec.name))
             for spec in specs}  # fmt: skip
    by_row = [pair for name, pair in pairs.items() if name in ("rows", "errors") or name.startswith("block.")]
    counts = np.clip(heads, 0, rows).tolist()
    size = sum(sum(counts) * (mine.nbytes // len(mine)) for mine, _ in by_row)
    require_free(size, torch.device("cpu"), f"a copy of '{directory.path}'", "look at it on a larger machine")
    for mine, live in by_row:
        for e, count in enumerate(counts):
            mine[e * rows : e * rows + count] = live[e * rows : e * rows + count]
    for name, (mine, live) in pairs.items():
        if name not in ("rows", "errors") and not name.startswith("block."):
            mine[...] = live


def _dead_now(directory: MappedCopy, rows: int, mark: Mark) -> Ints:
    """Rows of each env below these numbers ``[N]`` may have been overwritten since the mark.

    A change is noted before it overwrites anything, and counted before its note goes. So the note is read first.

    Raises:
        _SpoiledError: these are all rows, or the replay began anew meanwhile.
    """
    undo, before = directory.live("undo")[: first_row(len(mark.state))], None
    while before is None or (before != undo).any():
        before = undo.copy()
    heads = directory.live("state")[:, HEAD].copy()
    if (heads < mark.state[:, HEAD]).any():
        raise _SpoiledError
    if before[UNDO_KIND] != UNDO_NONE:
        entries = env_entries(before, min(max(int(before[UNDO_ENVS]), 0), len(heads)))
        known = entries[(entries[:, 0] >= 0) & (entries[:, 0] < len(heads))]
        np.maximum.at(heads, known[:, 0], known[:, UNDO_AFTER])
    dead = np.minimum(heads - rows, mark.state[:, HEAD])
    if (mark.state[:, HEAD] > 0).any() and (dead == mark.state[:, HEAD]).all():
        raise _SpoiledError
    return dead


def _require_still(directory: MappedCopy) -> None:
    """Require that nothing has changed since the files were opened, of a replay that no process seemed to have open.

    Raises:
        _SpoiledError: something has.
    """
    for name in ("undo", "counters", "state"):
        spec = directory.spec(name)
        if spec is not None and (directory.take(name, spec.shape, spec.dtype) != directory.live(name)).any():
            raise _SpoiledError
    if _reopened(directory):
        raise _SpoiledError


def _reopened(directory: MappedCopy) -> bool:
    """Whether the journal has another last record than when the files were opened here."""
    last = directory.last
    try:
        return last is None or directory.record().number != last.number
    except (FileFormatError, OSError):
        return False
