"""Homes: the directories of a shard's commits, and a shard made from saved ones, of other numbers, too."""

from __future__ import annotations

import os
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import FileFormatError, LifecycleError
from ..replay.buffer import ReplayBuffer
from ..replay.extra import load_extra

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


def slot(home: str | os.PathLike[str], shard: int, cut: int | None) -> Path:
    """Where a shard saves its part of checkpoint ``cut``, or, for None, a commit of its own.

    Checkpoints take turns in two directories: all shards write the new one before the old one stops to count.
    """
    return Path(home) / f"shard-{shard}" / ("latest" if cut is None else str(cut % 2))


class Home:
    """The commits of one shard.

    Args:
        plan: of the shard.
    """

    def __init__(self, plan: ShardPlan) -> None:
        self._plan = plan

    def save(self, replay: ReplayBuffer, ledger: dict[str, Any], commit: int, cut: int | None) -> None:
        """Commit number ``commit``, as part of checkpoint ``cut`` or, for None, of none."""
        plan = self._plan
        if plan.home is None:
            raise LifecycleError("commit(): this shard has no directory")
        path = slot(plan.home, plan.number, cut)
        path.parent.mkdir(parents=True, exist_ok=True)
        note = {"run": plan.run, "commit": commit, "shard": plan.number, "ledger": ledger}
        replay.save(path, extra=note)

    def restored(self) -> tuple[ReplayBuffer, dict[str, Any] | None, int]:
        """The shard's ring, its ledger and the number of its last commit.

        They are those of the newest commit of this run. Without one, the ring comes from the saved shards that the
        plan names, or is empty; then there is no ledger, and the number is 0.
        """
        found: list[tuple[int, Path, dict[str, Any]]] = []
        plan = self._plan
        # Numbers grow with each commit in all three directories, so the largest is the newest.
        slots = () if plan.home is None else [slot(plan.home, plan.number, turn) for turn in (0, 1, None)]
        for path in slots:
            with suppress(FileFormatError, OSError):
                note: Any = load_extra(path)
                if note is not None and (note["run"], note["shard"]) == (plan.run, plan.number):
                    found.append((note["commit"], path, note["ledger"]))
        for commit, path, ledger in sorted(found, key=lambda candidate: -candidate[0]):
            with suppress(FileFormatError):  # a damaged commit; the one before it may be whole
                return self._loaded(path), ledger, commit
        return self._begun(), None, 0

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
