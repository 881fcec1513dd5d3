"""Two features of a replay at once, and beside them a plain list of the steps that must be there afterwards.

python -m attacks.pairs [turns] [feature [other feature]]

``features.py`` and ``attacking.py`` say what each feature does, ``steps_of_pairs.py`` what follows of the list. Each
pair is played in a process of its own. The table has what was tried, and what failed.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attacks.attacking import Attack, Clock, CtrlC, CtrlCInCore, FullDisk, Kill, LittleMemory, SmallDisk
from attacks.features import (
    Copied,
    Device,
    Durable,
    Feature,
    Forks,
    GoalsReached,
    Laned,
    Loads,
    Mixed,
    Pickled,
    Priorities,
    Saves,
    Serve,
    Server,
    Shards,
    Threads,
    TwoOwners,
    ViewChanges,
    WarmUp,
)
from attacks.remote import Sharded
from attacks.steps_of_pairs import ENVS, GAMMA, ROWS, SCHEMA, Steps, shared, step
from relive import ReplayBuffer, Transition, Uniform
from relive import Sequence as SequenceView
from relive.errors import LifecycleError
from support.forks import in_fork

__all__ = ["APART", "FEATURES", "PAIRS", "can_mount", "played", "why_not"]

FEATURES: dict[str, type[Feature]] = {
    "durable": Durable, "device": Device, "shards": Shards, "server": Server, "lanes": Laned, "serve": Serve,
    "mixture": Mixed, "warm-up": WarmUp, "priorities under way": Priorities, "hindsight in mid-episode": GoalsReached,
    "view changes": ViewChanges, "deepcopy": Copied, "pickle": Pickled, "background save": Saves,
    "load with changes": Loads, "threads": Threads, "fork": Forks, "two owners": TwoOwners, "Ctrl-C at a line": CtrlC,
    "Ctrl-C within a call of the core": CtrlCInCore, "full disk": FullDisk, "small file system": SmallDisk,
    "memory limit": LittleMemory, "SIGKILL": Kill, "a clock that jumps": Clock,
}  # fmt: skip
"""All of them, by the name in the table. One that makes a replay comes before those that use it."""

ATTACKS = [name for name, feature in FEATURES.items() if issubclass(feature, Attack)]

APART: dict[str, Any] = {
    "device": {
        "durable": "files hold rows in RAM",
        "shards": "a shard has its rows in RAM",
        "SIGKILL": "nothing of a device outlives its process",
        "full disk": "a device has no disk",
        "small file system": "a device has no disk",
    },
    "shards": dict.fromkeys(
        ("server", "lanes", "serve", "mixture", "warm-up", "view changes", "deepcopy", "pickle", "load with changes",
         "threads", "fork", "two owners"), "a replay of shards has no such call",
    ) | {"SIGKILL": "tests/cluster/test_ray.py kills shards"},
    "server": dict.fromkeys(
        ("serve", "mixture", "view changes", "deepcopy", "pickle", "warm-up", "threads"), "a learner has no such call",
    ) | dict.fromkeys(("full disk", "small file system", "memory limit"), "a limit of this process is not the owner's"),
    "serve": {"memory limit": "the C library ends a process whose new thread has no room for its own variables"},
    "deepcopy": {"pickle": "one copy or the other"},
    "lanes": dict.fromkeys(("deepcopy", "pickle"), "a drain ends with its replay"),
    "view changes": {"hindsight in mid-episode": "that is a view"},
}  # fmt: skip
"""Which pairs mean nothing, and why."""


def why_not(one: str, other: str) -> str:
    """Why two features cannot be put together; empty if they can."""
    if {one, other} <= {*ATTACKS, "SIGKILL", "a clock that jumps"} and "a clock that jumps" not in (one, other):
        return "two attacks, and nothing that is attacked"
    return APART.get(one, {}).get(other, "") or APART.get(other, {}).get(one, "")


PAIRS = [pair for pair in itertools.combinations(FEATURES, 2) if not why_not(*pair)]


class World:
    """A replay, the features that are at work on it, and the list of its steps."""

    def __init__(self, folder: Path, names: tuple[str, ...], seed: int) -> None:
        self.folder, self.random = folder, np.random.default_rng(seed)
        self.steps, self.counts = Steps(), shared(2, np.int64)
        """The second: how many saves were begun, and how many were done."""
        wanted = {*names, *(need for name in names for need in FEATURES[name].needs)}
        self.names = [name for name in FEATURES if name in wanted]
        self.features: list[Feature] = []
        self.features += [FEATURES[name](self) for name in self.names]
        self.replay: Any = None
        self.writer: Any = None
        self.as_tensors = self.is_guarded = False
        self.broken = list[str]()
        """How calls were broken off."""

    def has(self, name: str) -> bool:
        """Whether a feature is there."""
        return name in self.names

    def parts(self) -> dict[str, Any]:
        """A new sampler and a new view."""
        made = {"sampler": Uniform, "view": lambda: Transition(GAMMA)}
        for feature in self.features:
            made |= feature.options
        return {name: make() for name, make in made.items()}

    def made(self) -> Any:
        """A new replay, or the one that is in the files."""
        make: Callable[[], Any] = lambda: ReplayBuffer(  # noqa: E731
            SCHEMA, ENVS * ROWS, ENVS, check_ends=False, seed=0, **self.parts()
        )
        for feature in self.features:
            make = feature.made(make)
        return make()

    def begin(self, replay: Any = None) -> None:
        """Have all features begin, with this replay."""
        self.replay = self.made() if replay is None else replay
        for feature in self.features:
            feature.begin()

    def leave(self) -> None:
        """Have all features let go of the replay."""
        for feature in self.features:
            feature.leave()

    @property
    def may_raise(self) -> tuple[type[BaseException], ...]:
        """What an attack may lead to, also a while after it."""
        return tuple(error for feature in self.features if isinstance(feature, Attack) for error in feature.may_raise)

    def own_view(self) -> dict[str, Any]:
        """The argument of ``load`` for a view that has a function of its user."""
        return {"view": self.parts()["view"]} if self.has("hindsight in mid-episode") else {}

    def loaded(self, path: Path) -> Any:
        """A save."""
        return Sharded(self, path, load=True) if self.has("shards") else ReplayBuffer.load(path, **self.own_view())

    def in_child(self, work: Callable[..., Any], *args: Any) -> None:
        """Do something in a forked child, which no attack reaches."""
        with ExitStack() as out:
            for feature in self.features:
                if isinstance(feature, Attack):
                    out.enter_context(feature.apart())
            in_fork(work, *args, seconds=30.0)

    def settle(self) -> None:
        """Have all steps in the replay that were added."""
        for feature in self.features:
            feature.settle()
        self.steps.came()

    # -- what happens ---------------------------------------------------------------------------------------------

    def do(self, call: Callable[[], Any]) -> bool:
        """Make a call under attack, if there is one; whether it was broken off."""
        attacks = [feature for feature in self.features if isinstance(feature, Attack)]
        # most calls are left alone: an attack on all of them would meet an empty replay
        if self.is_guarded or not attacks or self.random.random() < 0.6:
            call()
            return False
        self.is_guarded = True
        try:
            off = attacks[0].guard(call)
        finally:
            self.is_guarded = False
        if off:
            self.recover()
        return off

    def recover(self) -> None:
        """Go on after a call that was broken off, with what is in the replay."""
        self.steps.broken_off()
        for feature in self.features:
            feature.recover()
        for feature in self.features:
            feature.settle()
        self.steps.found(self.rows(self.replay))
        self.interrupt()
        self.check()

    def interrupt(self) -> None:
        """The episodes under way do not go on."""
        self.steps.interrupt()
        (self.writer or self.replay).interrupt()

    def add(self) -> None:
        """Add the next step."""
        (number,) = self.steps.take(1)
        self._store((self.writer or self.replay).add, self.dressed(step(number)))

    def extend(self, count: int) -> None:
        """Add so many at once; fewer if they have to fit into a lane."""
        count = min(count, 12) if self.writer is not None else count
        if self.writer is not None:
            self.do(self.settle)
        many = [self.dressed(step(number)) for number in self.steps.take(count)]
        self._store((self.writer or self.replay).extend, stacked(many))

    def _store(self, store: Callable[[Any], Any], fields: Any) -> None:
        if not self.do(lambda: store(fields)) and self.writer is None:
            self.steps.came()

    def dressed(self, tree: Any) -> Any:
        """A step, as tensors if the replay is on a device."""
        if isinstance(tree, Mapping):
            return {name: self.dressed(value) for name, value in tree.items()}
        return torch.as_tensor(tree) if self.as_tensors else tree

    def sampled(self, count: int) -> Any:
        """A batch that was looked at; None if there is nothing to draw."""
        if not len(self.replay):
            return None
        batch = self.replay.sample(count)
        self.look_at(batch)
        return batch

    def rate(self, batch: Any, update: Callable[[Any, Any], Any] | None = None) -> None:
        """Give the rows of a batch TD errors."""
        if batch is None:
            return
        errors = torch.from_numpy(self.random.integers(0, 100, len(batch)) / 8)
        tags = batch["obs"]["tag"].reshape(len(batch), -1, 2)[:, -1].long().tolist()
        for row, (env, number) in enumerate(tags):
            self.steps.errors[1, env, number] = errors[row]
        (self.replay.update_priorities if update is None else update)(batch["index"], errors)
        for env, number in tags:
            self.steps.errors[0, env, number] = self.steps.errors[1, env, number]

    def turn(self, number: int) -> None:
        """Some steps, and each feature once."""
        for _ in range(int(self.random.integers(1, 4))):
            self.add()
        if self.random.random() < 0.1:
            self.do(self.interrupt)
        for feature in self.features if number % 2 else reversed(self.features):
            self.do(lambda feature=feature: feature.act(number))
        if number % 3 == 2:
            self.check()

    def live(self, turns: int) -> None:
        """Everything, from the making of the replay to a last look."""
        self.begin()
        for number in range(turns):
            self.turn(number)
        self.settle()
        self.check()
        self.leave()
        for feature in self.features:
            feature.look()

    # -- what is there ----------------------------------------------------------------------------------------------

    def look_at(self, batch: Any) -> None:
        """Require that all rows of a batch happened."""
        self.steps.check_rows(batch)

    def rows(self, replay: Any) -> list[list[int]]:
        """The numbers of the steps in the rows of each env."""
        tags = [replay.slice(env)["obs"]["tag"][:, 1].cpu().numpy() for env in range(ENVS)]
        return [tag[tag % 1 == 0].astype(int).tolist() for tag in tags]

    def check(self, replay: Any = None, steps: Steps | None = None, capacity: int = ROWS) -> None:
        """Require that a replay holds what the list says."""
        if replay is None:
            self.settle()
        replay, steps = self.replay if replay is None else replay, self.steps if steps is None else steps
        replay.check()
        for env, rows in enumerate(self.rows(replay)):
            must, may = steps.live(env, capacity)
            assert rows == sorted(set(rows)), f"env {env}: {rows}"
            assert set(must) <= set(rows), f"env {env}: of {must}, only {rows} are there"
            assert set(rows) <= set(may), f"env {env}: {rows} are there, of {may}"
        if isinstance(replay.view, SequenceView):
            return
        data = replay.data()
        steps.check_all(data, capacity, getattr(replay.view, "history", 0))
        if replay.has_priorities:
            steps.check_priorities(steps.check_rows(data), replay.priorities(data["index"]), replay.sampler)
        if len(data):
            steps.check_rows(replay.sample(8))

    # -- death -------------------------------------------------------------------------------------------------------

    def live_and_die(self, life: int, turns: int) -> None:
        """Live in a child, which is killed, and look at what it left."""
        child = os.fork()
        if not child:
            try:
                self.random = np.random.default_rng([int(self.random.integers(1 << 30)), life])
                for feature in self.features:
                    feature.random = self.random
                    if isinstance(feature, Kill):
                        feature.arm()
                self.live(turns)
                sys.settrace(None)
                os._exit(0)
            except BaseException as error:
                sys.settrace(None)
                if self.has("server") and isinstance(error, LifecycleError) and "code -9" in str(error):
                    os._exit(0)  # the process that owns the replay was killed, not this one
                traceback.print_exc()
                os._exit(1)
        self.random.random()
        _, status = os.waitpid(child, 0)
        self.broken += ["SIGKILL"] * os.WIFSIGNALED(status)
        assert os.WIFSIGNALED(status) or status == 0, "it ended by itself"
        in_fork(self.look_back, seconds=30.0)

    def look_back(self) -> None:
        """Look at what a process left that is gone, and go no further."""
        self.steps.broken_off()
        if (self.folder / "replay" / "manifest.json").exists():
            end = time.perf_counter() + 20
            while self.replay is None:
                try:
                    self.replay = self.opened_alone()
                except LifecycleError:  # a server ends a moment after the process that started it
                    assert time.perf_counter() < end, "a dead process holds the files"
                    time.sleep(0.01)
            for feature in self.features:
                if hasattr(feature, "lanes"):
                    feature.lanes.drain(self.replay)
            self.steps.found(self.rows(self.replay))
            self.steps.interrupt()
            self.replay.interrupt()
            self.check(self.replay)
            self.replay.close()
        for feature in self.features:
            if hasattr(feature, "handle"):
                feature.look()

    def opened_alone(self) -> Any:
        """The replay in files, here and without a server."""
        durable = next(feature for feature in self.features if FEATURES["durable"] is type(feature))
        return durable.made(bool)()


def stacked(many: list[Any]) -> Any:
    """Steps ``[T, N]``."""
    if isinstance(many[0], Mapping):
        return {name: stacked([one[name] for one in many]) for name in many[0]}
    return torch.stack(many) if isinstance(many[0], torch.Tensor) else np.stack(many)


# -- runs ------------------------------------------------------------------------------------------------------------


@cache
def can_mount() -> bool:
    """Whether this user may mount a file system."""
    with tempfile.TemporaryDirectory() as folder, disk(Path(folder)) as mounted:
        return mounted


@contextmanager
def disk(path: Path) -> Iterator[bool]:
    """A small file system there; False if it may not be."""
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)]
    mounted = sys.platform == "linux" and not subprocess.run(command, capture_output=True, check=False).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(path)], check=True)


def played(names: tuple[str, ...], seed: int, turns: int, plant: Callable[[], Any] | None = None) -> list[str]:
    """Play features together in a process of its own; how calls were broken off. Fails as the features do.

    ``plant`` is called there first, and may put a fault into the package.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "small file system" not in names:
            return in_fork(_play, folder, names, seed, turns, plant, name=" and ".join(names))
        with disk(folder) as mounted:
            assert mounted, "this user may not mount a file system"
            return in_fork(_play, folder, names, seed, turns, plant, name=" and ".join(names))


def _play(folder: Path, names: tuple[str, ...], seed: int, turns: int, plant: Callable[[], Any] | None) -> list[str]:
    torch.set_num_threads(1)  # a fork has none of the others
    os.fsync = lambda descriptor: None  # nothing here is about a power cut
    if plant is not None:
        plant()
    world = World(folder, names, seed)
    if world.has("SIGKILL"):
        for life in range(1 + turns // 6):
            world.live_and_die(life, 8)
    else:
        world.live(turns)
    return world.broken


def main(turns: int, *chosen: str) -> int:
    """Play all pairs, or those with the chosen features, and print a table; how many failed."""
    pairs = [pair for pair in PAIRS if set(chosen) <= set(pair) and (can_mount() or "small file system" not in pair)]
    width, failed = max(len(name) for pair in pairs for name in pair), 0
    print(f"{'one':{width}}  {'other':{width}}  broken off  failed")
    for pair in pairs:
        try:
            said, error = str(len(played(pair, PAIRS.index(pair), turns))), ""
        except BaseException as wrong:
            if isinstance(wrong, KeyboardInterrupt):
                raise
            said, error = "", str(wrong)
            failed += 1
        print(f"{pair[0]:{width}}  {pair[1]:{width}}  {said:>10}  {'yes' if error else '':>6}", flush=True)
        if error:
            print(error, file=sys.stderr, flush=True)
    print(f"{len(pairs)} pairs of {len(FEATURES)} features, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(int(sys.argv[1]) if sys.argv[1:] else 12, *sys.argv[2:]), 1))
