"""Homes: the directories of a shard's commits; and how a shard begins from saved shards, also with another division."""

from __future__ import annotations

import os
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import FileFormatError, LifecycleError
from ..files import SaveHandle
from ..replay.buffer import ReplayBuffer
from ..replay.extra import load_extra
from .ledger import Ledger
from .ring_files import RingFiles

__all__ = ["Home", "SavedShard", "ShardPlan", "slot"]


class SavedShard(NamedTuple):
    """A shard of a checkpoint."""

    path: str
    """The directory of its commit."""
    first_env: int
    """The number of its first env in the whole replay."""
    num_envs: int
    rows: int
    """Its capacity."""


class ShardPlan(NamedTuple):
    """What a shard is made from, in this life and in every later one."""

    number: int
    """k."""
    shards: int
    """K."""
    first_env: int
    """The number that the shard's first env has in the whole replay."""
    num_envs: int
    rows: int
    """Its capacity."""
    seed: int
    run: str
    """Names the run, so that a shard never comes back with the rows of another one."""
    options: dict[str, Any]
    """Further arguments of its ring: schema, sampler, view and so on."""
    home: str | None = None
    """The directory of its commits."""
    sources: tuple[SavedShard, ...] = ()
    """The saved shards that it begins with."""
    most: int | None = None
    """The most steps of a chunk, under a limit of samples per insert; None without one."""
    durable: bool = False
    """Whether the ring lives in files."""


def slot(home: str | os.PathLike[str], shard: int, cut: int | None) -> Path:
    """Where a shard saves its part of checkpoint ``cut``, or, for None, a commit of its own.

    Checkpoints take turns in two directories, because the old one still counts while the shards write the new one.
    """
    return Path(home) / f"shard-{shard}" / ("latest" if cut is None else str(cut % 2))


class Home:
    """The commits of one shard.

    Args:
        plan: the plan of the shard.
    """

    def __init__(self, plan: ShardPlan) -> None:
        self._plan = plan
        self.files = None if not plan.durable or plan.home is None else RingFiles(self._folder, plan.run)
        """The files of the ring, if it lives in files."""

    @property
    def _folder(self) -> Path:
        return slot(str(self._plan.home), self._plan.number, None).parent

    def save(
        self, replay: ReplayBuffer, ledger: Ledger, commit: int, cut: int | None, background: bool = False
    ) -> SaveHandle | None:
        """Make commit number ``commit``, as a part of checkpoint ``cut``, or of no checkpoint if that is None.

        Returns:
            the save, which is done unless it goes on in the ``background``. None if there was no save: a ring in files
            is only flushed, unless the commit is for a checkpoint.
        """
        plan = self._plan
        if plan.home is None:
            raise LifecycleError("commit(): this shard has no directory")
        if self.files is not None:
            self.files.flush(ledger)
            if cut is None:
                return None
        path = slot(plan.home, plan.number, cut)
        path.parent.mkdir(parents=True, exist_ok=True)
        note = {"run": plan.run, "commit": commit, "shard": plan.number, "ledger": ledger.state()}
        return replay.save(path, extra=note, background=background)

    def restored(self) -> tuple[ReplayBuffer, Ledger, int]:
        """The shard's ring, its ledger and the number of its last commit.

        A ring in files is as its process left it. Any other ring comes from the newest commit of this run. Without a
        commit, it comes from the saved shards that the plan names, or is empty, and the ledger is new.
        """
        if self.files is None:
            return self._saved()
        plan, numbers = self._plan, [note["commit"] for _, note in self._commits()]
        options = {**deepcopy(plan.options), "capacity": plan.rows, "num_envs": plan.num_envs, "check_ends": False}
        found = self.files.restored(options)
        if found is None:
            saved = self._begun() if plan.sources else None
            found = self.files.begun(saved, options, plan.seed), Ledger()
        return *found, max(numbers, default=0)

    def _commits(self) -> list[tuple[Path, dict[str, Any]]]:
        """The commits of this run, and what was noted with each."""
        found: list[tuple[Path, dict[str, Any]]] = []
        plan = self._plan
        # Numbers grow with each commit in all three directories, so the largest is the newest.
        slots = () if plan.home is None else [slot(plan.home, plan.number, turn) for turn in (0, 1, None)]
        for path in slots:
            with suppress(FileFormatError, OSError):
                note: Any = load_extra(path)
                if note is not None and (note["run"], note["shard"]) == (plan.run, plan.number):
                    found.append((path, note))
        return found

    def _saved(self) -> tuple[ReplayBuffer, Ledger, int]:
        """What :meth:`restored` gives: from the newest whole commit of this run, or else what the shard begins with."""
        for path, note in sorted(self._commits(), key=lambda candidate: -candidate[1]["commit"]):
            with suppress(FileFormatError):  # a damaged commit; the one before it may be whole
                return self._loaded(path), Ledger.restored(note["ledger"]), note["commit"]
        return self._begun(), Ledger(), 0

    def _begun(self) -> ReplayBuffer:
        """The ring that the shard begins with: a saved one as it was, or one with the envs of several saved ones."""
        plan, until = self._plan, self._plan.first_env + self._plan.num_envs
        sources: list[SavedShard] = [
            s for s in plan.sources if s.first_env < until and plan.first_env < s.first_env + s.num_envs
        ]
        if len(plan.sources) == plan.shards and len(sources) == 1 and sources[0][1:] == plan[2:5]:
            return self._loaded(sources[0].path)
        replay = ReplayBuffer(
            capacity=plan.rows, num_envs=plan.num_envs, seed=plan.seed, check_ends=False, **deepcopy(plan.options)
        )
        for source in sources:
            saved, shift = self._loaded(source.path), source.first_env - plan.first_env
            there = range(max(0, -shift), min(source.num_envs, plan.num_envs - shift))
            replay.append(saved, envs={env: env + shift for env in there})
        return replay

    def _loaded(self, path: str | os.PathLike[str]) -> ReplayBuffer:
        sampler, view = deepcopy((self._plan.options["sampler"], self._plan.options["view"]))
        return ReplayBuffer.load(path, sampler=sampler, view=view)
