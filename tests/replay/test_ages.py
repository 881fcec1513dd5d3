"""What stats say of ages and priorities, against a walk over all rows, after anything that may change them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from former_files import ENVS, SCHEMA, step
from relive import FrameStack, Lanes, NStep, Prioritized, Recent, ReplayBuffer, Sequence, Transition, Uniform
from support import internals
from support.cases import covering
from support.twins import Twin

SAMPLERS = {"uniform": Uniform, "prioritized": Prioritized, "recent": lambda: Recent(0.9, 2, inner=Prioritized())}
VIEWS: dict[str, Any] = {
    "plain": lambda: Transition(0.5),
    "stack": lambda: FrameStack(3, NStep(2, 0.5)),
    "sequences": lambda: Sequence(3, 1),
    "tails": lambda: Sequence(4, 0, "half", drop_tail=False),
}


def walked(buffer: Any) -> dict[str, float]:
    """The figures that follow from all rows."""
    size, ring = len(buffer), internals.ring(buffer)
    places = ring.anchors()
    ages = ring.completed - 1 - ring.stamp[places]
    found = {
        "size": float(size),
        "age_mean": float(ages.mean()) if size else 0.0,
        "age_max": float(ages.max(initial=0)),
    }
    if buffer.has_priorities and size:
        sampler: Any = buffer.sampler
        p = getattr(sampler, "inner", sampler).priorities()
        found |= {"priority_min": p.min(), "priority_mean": p.mean(), "priority_max": p.max()}
        found["effective_size"] = p.sum() ** 2 / ((p**2).sum() or np.inf)
    return found


def check(buffer: Any) -> None:
    stats, want = buffer.stats(), walked(buffer)
    for name in ("size", "age_mean", "age_max", "priority_min", "priority_max"):
        assert stats.get(name) == want.get(name), name
    for name in ("priority_mean", "effective_size"):
        assert stats.get(name) == (pytest.approx(want[name], rel=1e-12) if name in want else None), name


@pytest.mark.parametrize("view", [*VIEWS])
@pytest.mark.parametrize("sampler", [*SAMPLERS])
@given(data=st.data())
@settings(max_examples=settings.default.max_examples // 4)
def test_the_figures_are_those_of_a_walk_over_all_rows_whatever_happened(sampler: str, view: str, data: Any) -> None:
    envs, rows = data.draw(st.integers(1, 3)), data.draw(st.integers(5, 12))
    twin = Twin(envs, rows, sampler=SAMPLERS[sampler](), view=VIEWS[view]())
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    for _ in range(data.draw(st.integers(1, 6))):
        kind = data.draw(st.sampled_from(["play", "play", "some", "interrupt", "clear", "rate", "view", "copy"]))
        if kind == "play":
            twin.play(*("".join(rng.choice([*"....TU"], envs)) for _ in range(rng.integers(1, 9))))
        elif kind == "some":
            twin.add(".", [int(rng.integers(envs))])
        elif kind == "interrupt":
            twin.interrupt([int(rng.integers(envs))])
        elif kind == "clear" and rng.random() < 0.3:
            twin.clear()
        elif kind == "view":
            twin.buffer.view = VIEWS[str(rng.choice([*VIEWS]))]()
        elif kind == "copy":
            twin.buffer = copy.deepcopy(twin.buffer) if rng.random() < 0.5 else pickle.loads(pickle.dumps(twin.buffer))
        elif kind == "rate" and twin.buffer.has_priorities and len(twin.buffer):
            batch = twin.buffer.sample(3)
            mask = batch.get("mask")
            errors = rng.random(batch["index"].shape if mask is None else tuple(mask.shape)) * (rng.random() < 0.7)
            twin.buffer.update_priorities(batch["index"], errors, mask)
        if rng.random() < 0.6:
            check(twin.buffer)
    check(twin.buffer)


@pytest.mark.parametrize(("ordered", "view"), covering([True, False], ["plain", "stack"]))
def test_masked_rows_and_transitions_without_an_order_age_alike(ordered: bool, view: str) -> None:
    if ordered or view == "plain":
        twin = Twin(3, 6, ordered=ordered, view=VIEWS[view](), sampler=Prioritized())
        for t in range(14):
            twin.add("." + ".T"[t % 2] + "U.."[t % 3], mask=[t % 4 != 1, True, t % 3 > 0])
            check(twin.buffer)


def test_ages_go_on_after_a_save_a_load_and_a_replay_in_files_that_was_opened_again(tmp_path: Path) -> None:
    for name in ("plain", "sequences"):
        source = Twin(2, 6, view=VIEWS[name]())
        with ReplayBuffer.open(tmp_path / name, source.schema, 12, 2, view=VIEWS[name](), check_ends=False) as replay:
            for t in range(9):
                both = source.step(".T" if t % 3 else "..")
                source.buffer.add(both)
                replay.add(both)
                check(replay)
        source.buffer.save(tmp_path / f"save {name}")
        with ReplayBuffer.open(tmp_path / name) as replay:
            loaded = ReplayBuffer.load(tmp_path / f"save {name}")
            smaller = ReplayBuffer.load(tmp_path / f"save {name}", capacity=8)
            for _ in range(7):
                for one in (replay, loaded, smaller):
                    check(one)
                    one.add(source.step("U."))


def test_ages_of_what_lanes_bring_and_of_what_another_replay_appends() -> None:
    made = [ReplayBuffer(SCHEMA, 12, ENVS, check_ends=False) for _ in range(2)]
    lanes = Lanes(SCHEMA, 1, ENVS)
    with lanes.writer(0) as writer:
        for number in range(11):
            writer.add(step(number))
            lanes.drain(made[0])
            made[1].add(step(number))
            check(made[0])
    made[1].append(made[0])
    check(made[1])
    made[1].append(made[0], envs={0: 1})
    check(made[1])
    check(made[0])


def test_stats_do_not_read_all_rows_again(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin(2, 50, sampler=Prioritized())
    twin.play(*[".T"] * 40)
    twin.buffer.stats()
    twin.play(*[".."] * 40)
    want = walked(twin.buffer)
    ring = internals.ring(twin.buffer)
    monkeypatch.setattr(type(ring), "anchors", lambda ring: pytest.fail("all rows were read"))
    drawn = ring.stamp.copy()
    ring.stamp[ring.live_places(0)[8:]] += 1000  # a walk would see these
    assert twin.buffer.stats()["age_mean"] == want["age_mean"]
    ring.stamp[:] = drawn
    assert twin.buffer.stats()["age_max"] == want["age_max"]
