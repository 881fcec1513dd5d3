"""RingFiles: a shard's ring that lives in files, with its ledger beside it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FileFormatError, LifecycleError
from ..files.holder import Holder
from ..replay.buffer import ReplayBuffer
from ..replay.intake import Intake
from ..steps.arrays import as_host
from ..steps.trees import map_leaves
from .ledger import Ledger, Origin
from .ledger_log import LedgerLog

__all__ = ["RingFiles"]


PATIENCE = 30.0
"""Seconds to wait until the process that had the files before is gone."""

LINES = 10_000
"""The number of lines after which the whole ledger is written anew."""


class RingFiles:
    """The files of one shard in one run: ``ring-<run>``, and ``ledger-<run>`` beside it.

    Args:
        folder: the directory of the shard.
        run: the name of the run.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._ring = folder, folder / f"ring-{run}"
        self._log = LedgerLog(folder / f"ledger-{run}")
        self._replay: ReplayBuffer | None = None

    def restored(self, options: Mapping[str, Any]) -> tuple[ReplayBuffer, Ledger] | None:
        """The ring and the ledger as the last process of this run left them; None if there are none.

        Args:
            options: arguments of :meth:`relive.ReplayBuffer.open`.
        """
        if not self._log.exists:
            return None
        replay = _opened(lambda: ReplayBuffer.open(self._ring, **options))
        self._replay = replay
        replay.flush()  # before the ledger, which must not be ahead of the ring after a power cut
        return replay, self._log.restored(_heads(replay))

    def begun(self, saved: ReplayBuffer | None, options: Mapping[str, Any], seed: int) -> ReplayBuffer:
        """A new ring in files with the steps of ``saved``, if it is given. The rings of other runs are removed."""
        shutil.rmtree(self._ring, ignore_errors=True)  # what a process left that died before it was done
        self._folder.mkdir(parents=True, exist_ok=True)
        replay = ReplayBuffer.open(self._ring, **options, seed=seed)
        if saved is not None:
            replay.append(saved, envs={env: env for env in range(saved.num_envs)})
        replay.flush()
        self._log.rewrite(Ledger())
        self._replay = replay
        self._remove_others()
        return replay

    def flush(self, ledger: Ledger) -> None:
        """Write everything through to the disk."""
        assert self._replay is not None
        self._log.sync()  # first: the lines say which steps the ring has
        self._replay.flush()
        self._log.rewrite(ledger)

    def store(self, steps: Mapping[str, Any], origin: Origin, ledger: Ledger) -> None:
        """Store the steps of a chunk piece by piece, each with its line in the ledger."""
        replay = self._replay
        assert replay is not None
        intake = Intake(replay, np.array(origin.envs))
        for begin, end in _pieces(steps, origin.steps, intake.most):
            part = origin._replace(start=origin.start + begin, steps=end - begin)
            before = _heads(replay)
            self._log.append(part, ledger.counts_after(part), before)
            try:
                intake.add(map_leaves(itemgetter(slice(begin, end)), steps))
            except BaseException:
                if _heads(replay) > before:
                    ledger.confirm(part)
                self.flush(ledger)  # a new file drops the line, which would seem true once other steps are in
                raise
            ledger.confirm(part)
        if self._log.lines > LINES:
            self.flush(ledger)

    def _remove_others(self) -> None:
        """Remove the rings of other runs, unless a process has them open."""
        for path in self._folder.glob("ring-*"):
            if path == self._ring:
                continue
            with suppress(LifecycleError, FileFormatError, OSError):
                holder = Holder(path)
                try:
                    shutil.rmtree(path)
                    shutil.rmtree(path.with_name(path.name.replace("ring-", "ledger-")), ignore_errors=True)
                finally:
                    holder.release()


def _heads(replay: ReplayBuffer) -> int:
    """The sum of the heads of a ring."""
    return Intake(replay, np.arange(replay.num_envs)).mark()


def _opened(open_it: Callable[[], ReplayBuffer]) -> ReplayBuffer:
    """Open a ring in files, once the process that had it before is gone.

    Raises:
        LifecycleError: that process still has the ring after :data:`PATIENCE` seconds.
    """
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return open_it()
        except LifecycleError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def _pieces(steps: Mapping[str, Any], count: int, most: int) -> Iterator[tuple[int, int]]:
    """Divide ``count`` vector steps into pieces (begin, end). Each piece is stored as a whole or not at all.

    A row that is left out in the middle of an episode interrupts the episode, which takes a call of its own.
    """
    if "mask" in steps:
        kept = as_host(steps["mask"])
        done = as_host(steps["terminated"]) | as_host(steps["truncated"])
        goes_on = np.ones_like(kept)  # before the first step, nobody here knows
        goes_on[1:] = kept[:-1] & ~done[:-1]
        most = 1 if (goes_on & ~kept).any() else most
    return ((begin, min(begin + most, count)) for begin in range(0, count, most))
