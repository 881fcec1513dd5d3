"""A kill at any instant: the replay that opens what it left has the old state or the new one, whole.

What a kill leaves of a change is some of its stores, in an order that only the compiler knows. So the first tests take
any of them: each word of memory is as it was before the change, or as it is after it. The last ones kill processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attacks import map_killer
from attacks.tally import attempt
from relive.core.words import RATED
from relive.samplers.prioritized import DurablePriorities, Prioritized
from support import internals, twins
from support.cases import covering
from support.effort import often
from support.forks import in_fork
from support.interrupts import KINDS
from support.kept_memory import HeldTwin, copied, during, torn

BROKEN_OFF = "a change of a replay in files that is broken off between any of its stores"

HERE = {name: facts for name, facts in KINDS.items() if not {"device", "files"} & facts.keys()}
RINGS = {name: make for name, make in twins.SAMPLERS.items() if name != "without replacement"}


def world(kind: str, sampler: str, rows: int = 9) -> HeldTwin:
    facts = {name: fact for name, fact in KINDS[kind].items() if name != "linked"}
    return HeldTwin(rows, RINGS[sampler], **facts)


def prioritized(twin: HeldTwin) -> Prioritized | None:
    return internals.prioritized(twin.buffer)


def errors_of(twin: HeldTwin) -> dict[int, float]:
    """The error of each transition that can be drawn, by its index."""
    sampler, places = prioritized(twin), internals.ring(twin.buffer).anchors()
    if sampler is None:
        return {}
    return dict(
        zip(
            internals.ring(twin.buffer).index_of(places).tolist(),
            internals.errors(sampler)[places].tolist(),
            strict=True,
        )
    )


def kill_in_adding(twin: HeldTwin, play: str, rng: np.random.Generator, monkeypatch: Any) -> None:
    """Break a step off, in any state between before and after."""
    truth, lives, known = copy.deepcopy(twin.truth), copy.deepcopy(twin.lives), errors_of(twin)
    before = copied(twin.allocator.arrays)
    after = during(twin, lambda: twin.add(play), monkeypatch)
    assert len(after) == 1
    twin.truth, twin.lives = truth, lives
    twin.revive(torn(before, after[0], rng, ("undo",)))
    twin.check()
    kept = errors_of(twin)
    new = {index: error for index, error in kept.items() if index not in known}
    assert (kept.items() - new.items()) <= known.items()
    # the kill ends episodes, so a last window that is shorter than the others may be drawn for the first time
    assert not new or internals.ring(twin.buffer).rule.length > 1
    assert set(new.values()) <= {1.0}, "the error of new transitions, as these tests rate no sequences"


def test_a_window_that_ends_with_its_process_has_the_error_of_new_transitions() -> None:
    """Sequences of 3 steps. The episode has 5 complete steps when the process dies, so its last window has 2."""
    twin = world("sequences", "prioritized, stratified")
    for _ in range(6):
        twin.add("..")
    assert errors_of(twin).keys() == {4, 5}
    errors = internals.errors(prioritized(twin))
    errors[:] = 0.0  # what is there of rows that were never drawn means nothing
    errors[internals.ring(twin.buffer).anchors()] = 0.25
    twin.revive(copied(twin.allocator.arrays))
    twin.check()
    kept = errors_of(twin)
    assert kept == {4: 0.25, 5: 0.25, 8: 1.0, 9: 1.0}
    ring, tree = internals.ring(twin.buffer), internals.tree(prioritized(twin))
    assert (tree.get(ring.anchors()) > 0.0).all()


@pytest.mark.parametrize("times", [3, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "sampler"), covering(HERE, RINGS))
def test_a_step_that_a_kill_breaks_off_is_gone_and_nothing_else(
    kind: str, sampler: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, twin = np.random.default_rng([times, *map(ord, kind + sampler)]), world(kind, sampler)
    letters = list("...TUB")
    for _ in range(times):
        for _ in range(int(rng.integers(0, 12))):
            twin.add("".join(rng.choice(letters, 2)))
        if prioritized(twin) is not None and len(twin.buffer) and "sequences" not in kind:
            index = internals.ring(twin.buffer).index_of(internals.ring(twin.buffer).anchors())
            twin.buffer.update_priorities(index, rng.gamma(1.0, 3.0, len(index)))
        with attempt(BROKEN_OFF):
            kill_in_adding(twin, "".join(rng.choice(letters, 2)), rng, monkeypatch)
        if len(twin.buffer):
            twin.check_batch(twin.buffer.sample(4))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 60))])
@pytest.mark.parametrize("room", ["noted", "too many to note"])
def test_priorities_that_a_kill_breaks_off_are_the_old_ones(
    room: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relive.samplers.prioritized.MOST", 2**16 if room == "noted" else 2)
    rng, twin = np.random.default_rng(seed), world("small", "prioritized, stratified", 30)
    for _ in range(40):
        twin.add("".join(rng.choice(list("....T"), 2)))
    index = internals.ring(twin.buffer).index_of(internals.ring(twin.buffer).anchors())
    twin.buffer.update_priorities(index, rng.gamma(1.0, 3.0, len(index)))
    for _ in range(5):
        known, before = errors_of(twin), copied(twin.allocator.arrays)
        chosen = rng.choice(index, int(rng.integers(3, 20)))
        twin.buffer.update_priorities(chosen, rng.gamma(1.0, 9.0, len(chosen)))
        after, wanted = copied(twin.allocator.arrays), errors_of(twin)
        assert after["errors.undo"][RATED] == 0
        after["errors.undo"][RATED] = len(chosen) if room == "noted" else -1  # as while it was done
        mixed = torn(before, after, rng, ("errors.undo",))
        with attempt(BROKEN_OFF):
            twin.hold(copied(mixed))
            twin.check()
        found = errors_of(twin)
        if room == "noted":
            assert found == known
            assert internals.largest(prioritized(twin)) == before["facts"][2]
        assert all(found[i] in (known[i], wanted[i]) for i in found)


def changes(twin: HeldTwin) -> dict[str, Callable[[], Any]]:
    """Calls that change what can be drawn as a whole."""
    sampler = prioritized(twin)
    made: dict[str, Callable[[], Any]] = {
        "clear": twin.buffer.clear,
        "view": lambda: setattr(twin.buffer.view, "n", 3),
    }
    if sampler is not None:
        made["alpha"] = lambda: setattr(sampler, "alpha", 0.9)
    return made


@pytest.mark.parametrize("name", ["clear", "view", "alpha"])
def test_a_change_of_all_that_a_kill_breaks_off_is_found_anew(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, twin = np.random.default_rng(3), world("small, 3-step", "prioritized, independent")
    for _ in range(30):
        twin.add("".join(rng.choice(list("....T"), 2)))
    for _ in range(8):
        before, known = copied(twin.allocator.arrays), errors_of(twin)
        call = changes(twin)[name]

        def done(call: Callable[[], Any] = call) -> None:
            call()
            len(twin.buffer)

        for after in during(twin, done, monkeypatch):
            with attempt(BROKEN_OFF):
                twin.revive(torn(before, after, rng, ("undo",)))
                twin.check()
                assert errors_of(twin) == known
        for _ in range(3):
            twin.add("..")


def test_a_kill_while_it_is_taken_back_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, twin = np.random.default_rng(4), world("small", "prioritized, stratified")
    for _ in range(30):
        twin.add("".join(rng.choice(list("....T"), 2)))
    before, truth = copied(twin.allocator.arrays), copy.deepcopy(twin.truth)
    (after,) = during(twin, lambda: twin.add(".T"), monkeypatch)
    left = torn(before, after, rng, ("undo",))
    for _ in range(5):
        twin.truth = copy.deepcopy(truth)
        found = copied(left)
        with monkeypatch.context() as patch:
            patch.setattr(DurablePriorities, "end", lambda self: None)
            patch.setattr("relive.ring.ring.Undo.end", lambda self: None)
            twin.revive(found)
        left = torn(left, found, rng, ("undo",))
    twin.truth = copy.deepcopy(truth)
    twin.revive(left)
    twin.check()


# Processes that are killed.


@pytest.mark.parametrize(
    ("seed", "times"), [(0, often(5, 24)), *(pytest.param(seed, 250, marks=pytest.mark.slow) for seed in range(1, 5))]
)
def test_a_killed_writer_leaves_every_step_that_it_was_told_of(seed: int, times: int, tmp_path: Path) -> None:
    with attempt("a process killed while it writes to a replay in files", times):
        assert in_fork(map_killer.main, tmp_path, times, seed, seconds=60 + times) > times
