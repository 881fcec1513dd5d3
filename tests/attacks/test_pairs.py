"""Two features of a replay at once: everything that had returned is there, whole, whatever the other one does."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from attacks.pairs import APART, FEATURES, PAIRS, can_mount, played
from attacks.tally import attempt
from relive import Collector, Mixture, NStep, ReplayBuffer
from relive.cluster.replay import Replay
from relive.processes.lanes import Lane
from relive.processes.server import Learner
from relive.replay.serving import DrawAhead, Served
from support import internals
from support.effort import in_ci

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, limits resources and mounts file systems")


def first_few(chosen: list[tuple[str, str]]) -> list[Any]:
    """Cases for ``parametrize``, of which ``make test`` takes so few that nearly each feature is in one."""
    seen, cases = set[str](), list[Any]()
    for pair in chosen:
        cases.append(in_ci(*pair) if seen & set(pair) else pytest.param(*pair))
        seen |= set() if seen & set(pair) else set(pair)
    return cases


def play(pair: tuple[str, ...], seed: int, turns: int, plant: Callable[[], None] | None = None) -> list[str]:
    if "small file system" in pair and not can_mount():
        pytest.skip("this user may not mount a file system")
    return played(pair, seed, turns, plant)


@pytest.mark.parametrize(("one", "other"), first_few(PAIRS))
def test_two_features_leave_each_other_alone(one: str, other: str) -> None:
    with attempt("two features of a replay at once"):
        play((one, other), PAIRS.index((one, other)), 6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_two_features_leave_each_other_alone_for_longer(one: str, other: str, seed: int) -> None:
    with attempt("two features of a replay at once"):
        play((one, other), 1000 + seed, 40)


def test_there_are_many_pairs_and_each_feature_is_in_some() -> None:
    assert len(PAIRS) >= 60
    for name in FEATURES:
        assert sum(name in pair for pair in PAIRS) >= 8, name
    for name, others in APART.items():
        assert {name, *others} <= FEATURES.keys()


# A fault in each feature, which its row must find. It is planted in the process in which the pair is played.


def instead(owner: Any, name: str, change: Callable[..., Any]) -> Callable[[], None]:
    """A plant: ``change(genuine, self, ...)`` in place of a method."""

    def plant() -> None:
        genuine = getattr(owner, name)
        setattr(owner, name, lambda self, *args, **named: change(genuine, self, *args, **named))

    return plant


def wrong_if(wrong: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Batches whose rewards are too large, if they are so and so."""

    def change(genuine: Any, self: Any, *args: Any, **named: Any) -> Any:
        batch = genuine(self, *args, **named)
        batch["reward"] += wrong(self, batch) * 1.0
        return batch

    return change


WRONG = wrong_if(lambda self, batch: True)


def forgets_after(*errors: type[BaseException]) -> Callable[..., Any]:
    """A call that loses everything when it is broken off."""

    def change(genuine: Any, self: Any, *args: Any, **named: Any) -> Any:
        try:
            return genuine(self, *args, **named)
        except errors:
            self.clear()
            raise

    return change


def with_result(owner: Any, name: str, change: Callable[..., Any]) -> Callable[[], None]:
    """A plant: ``change(replay, arguments)`` follows on a class method that gives a replay."""

    def plant() -> None:
        genuine = getattr(owner, name)

        def changed(*args: Any, **named: Any) -> Any:
            replay = genuine(*args, **named)
            change(replay, named)
            return replay

        setattr(owner, name, changed)

    return plant


def reset_cost(replay: ReplayBuffer, named: Any) -> None:
    if named.get("changes") is not None:
        replay.block["cost"][:] = 0


def forget_what_was_there(replay: ReplayBuffer, named: Any) -> None:
    if "schema" not in named:  # it was opened again
        replay.clear()


def save_once(genuine: Any, self: Any, path: Any, **named: Any) -> Any:
    self.saved = getattr(self, "saved", None) or genuine(self, path, **named)
    return self.saved


def serve_twice(genuine: Any, self: Any, *args: Any, **named: Any) -> Any:
    self._way = None
    return genuine(self, *args, **named)


def believe_the_clock(genuine: Any, self: Any, *args: Any) -> Any:
    self.begun = getattr(self, "begun", time.monotonic())
    assert time.monotonic() < self.begun + 3600, "too late"
    return genuine(self, *args)


def drain_wrongly(genuine: Any, self: Any, *args: Any) -> Any:
    steps = genuine(self, *args)
    return {**steps, "reward": steps["reward"] + 1}


def spoil(genuine: Any, self: Any, *args: Any, **named: Any) -> Any:
    try:
        return genuine(self, *args, **named)
    except KeyboardInterrupt:
        self.block["reward"].add_(1)
        raise


BROKEN_OFF = (KeyboardInterrupt, OSError, MemoryError, RuntimeError)
HERE = os.getpid()
FAULTS: dict[str, tuple[str, Callable[[], None]]] = {
    "durable": ("lanes", with_result(ReplayBuffer, "open", forget_what_was_there)),
    "device": ("priorities under way", instead(ReplayBuffer, "sample", wrong_if(
        lambda self, batch: internals.on_device(self) is not None))),
    "shards": ("a clock that jumps", instead(Replay, "sample", WRONG)),
    "server": ("lanes", instead(Learner, "__next__", WRONG)),
    "lanes": ("serve", instead(Lane, "read", drain_wrongly)),
    "serve": ("view changes", instead(Served, "__next__", WRONG)),
    "mixture": ("priorities under way", instead(Mixture, "sample", WRONG)),
    "warm-up": ("deepcopy", instead(Collector, "warm", lambda genuine, self, buffer, count, **named: genuine(
        self, buffer, count - 1, **named))),
    "priorities under way": ("background save", instead(ReplayBuffer, "update_priorities", lambda genuine, self, index,
        error: genuine(self, index, 2 * error))),
    "hindsight in mid-episode": ("lanes", instead(ReplayBuffer, "sample", wrong_if(
        lambda self, batch: batch["relabelled"]))),
    "view changes": ("deepcopy", instead(ReplayBuffer, "sample", wrong_if(
        lambda self, batch: isinstance(self.view, NStep) and self.view.n > 1))),
    "deepcopy": ("background save", with_result(ReplayBuffer, "_unpickled", lambda replay, named: replay.clear())),
    "pickle": ("background save", with_result(ReplayBuffer, "_unpickled", lambda replay, named: replay.clear())),
    "background save": ("serve", instead(ReplayBuffer, "save", save_once)),
    "load with changes": ("serve", with_result(ReplayBuffer, "load", reset_cost)),
    "threads": ("serve", instead(ReplayBuffer, "sample", wrong_if(
        lambda self, batch: threading.current_thread() is not threading.main_thread()))),
    "fork": ("serve", instead(ReplayBuffer, "sample", wrong_if(lambda self, batch: os.getppid() != HERE))),
    "two owners": ("serve", instead(ReplayBuffer, "serve", serve_twice)),
    "Ctrl-C at a line": ("durable", instead(ReplayBuffer, "add", forgets_after(*BROKEN_OFF))),
    "Ctrl-C within a call of the core": ("durable", instead(ReplayBuffer, "extend", spoil)),
    "full disk": ("priorities under way", instead(ReplayBuffer, "flush", forgets_after(*BROKEN_OFF))),
    "small file system": ("load with changes", instead(ReplayBuffer, "save", forgets_after(*BROKEN_OFF))),
    "memory limit": ("background save", instead(ReplayBuffer, "save", forgets_after(*BROKEN_OFF))),
    "SIGKILL": ("lanes", with_result(ReplayBuffer, "open", forget_what_was_there)),
    "a clock that jumps": ("serve", instead(DrawAhead, "take", believe_the_clock)),
}  # fmt: skip


def test_there_is_a_fault_for_each_feature() -> None:
    assert FAULTS.keys() == FEATURES.keys()


@pytest.mark.parametrize("name", [name if name in ("lanes", "serve", "durable") else in_ci(name) for name in FAULTS])
def test_a_fault_in_a_feature_is_found(name: str) -> None:
    other, plant = FAULTS[name]

    def play_often() -> None:
        for seed in range(6):
            play((name, other), seed, 10, plant)

    with pytest.raises(AssertionError, match="Error"):
        play_often()
