"""The kernels of batches, fast and plain, to the bit; and the memory of batches."""

from __future__ import annotations

import gc
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import inside
from covering import covering
from drawing import GOALS, World, facts, filled
from forked import in_fork
from relive import NStep, Prioritized, Recent, Uniform
from relive.kernels import cpu, reference
from relive.kernels.tables import UNFIT
from relive.kernels.tensor_calls import tensor_calls

pytestmark = pytest.mark.skipif(tensor_calls() is None, reason="this torch has no functions for compiled code")

SAMPLERS = {"uniform": Uniform, "prioritized": Prioritized, "recent": lambda: Recent(0.9, 2)}


class Twins:
    """What both twins need for batches of a replay that was played at random, and their batches."""

    def __init__(self, kind: str, seed: int, **options: Any) -> None:
        self.world = World(kind, seed, False, **options)
        for _ in range(4 + 9 * seed):
            self.world.add()
        self.buffer, self.rng = self.world.buffer, np.random.default_rng(seed)
        self.buffer.sample(3)
        self.buffer.sample(3)  # the first one of hindsight took the long way
        sampler = self.buffer.sampler
        self.weighed = isinstance(sampler, Prioritized)
        self.ready: Any = inside.fused(inside.reader(self.buffer))
        memory = {"weights": inside.bound(sampler)().memory} if self.weighed else {}
        self.fast = self.ready.handle
        self.plain = self.ready.batch._replace(ring=inside.ring(self.buffer).arrays, **memory)

    def terms(self) -> tuple[Any, ...]:
        """What is drawn."""
        rng, low = self.rng, 0.0
        if self.weighed and len(self.buffer) and rng.integers(2):
            low = inside.tree(self.buffer.sampler).minimum_positive()
        return int(rng.integers(99)), int(rng.integers(0, 6)), bool(rng.integers(2)), float(rng.random()), low

    def rows(self, count: int) -> Any:
        return torch.zeros(count, self.ready.parts.rows.nbytes, dtype=torch.uint8)

    def empty(self) -> Any:
        return self.ready.parts.members.empty()


@pytest.mark.parametrize(("kind", "seed", "sampler"), covering(["flat", "nested", "odd", "goals"], range(4), SAMPLERS))
def test_both_twins_draw_and_read_the_same_windows(kind: str, seed: int, sampler: str) -> None:
    twins = Twins(kind, seed, sampler=SAMPLERS[sampler]())
    for count in (1, 2, 7, 30):
        terms, found = (twins.terms(), int(twins.rng.integers(1, 5)), 0.9), []
        for kernels, batch in ((cpu, twins.fast), (reference, twins.plain)):
            rows, into = twins.rows(count), twins.empty()
            assert kernels.sample_windows(batch, *terms, id(rows), id(into))
            found.append((rows.numpy().tobytes(), facts(twins.ready.parts.members.batch(into, count))))
        assert found[0] == found[1]


@pytest.mark.parametrize(("goals", "seed", "sampler"), covering([g for g in GOALS if g not in ("none", "steps")],
                                                                range(4), SAMPLERS))  # fmt: skip
def test_both_twins_draw_and_relabel_the_same_windows(goals: str, seed: int, sampler: str) -> None:
    twins = Twins("goals", seed + 1, sampler=SAMPLERS[sampler](), view=GOALS[goals]())
    fit = inside.fitted(twins.buffer.view)[2]
    for count in (1, 9, 30):
        terms, n = twins.terms(), int(twins.rng.integers(1, 4))
        ratio, judged, found = float(twins.rng.random()), int(twins.rng.integers(99)), []
        for kernels, batch in ((cpu, twins.fast), (reference, twins.plain)):
            rows, into = twins.rows(count), twins.empty()
            _, steps, handle, _ = fit.scratch(count, n)
            for array in steps:
                array[...] = 0
            noted, pairs = handle if kernels is cpu else steps, np.zeros((2, count * n, fit.nbytes), np.uint8)
            chosen = kernels.sample_goals(batch, terms, n, 0.9, ratio, id(rows), noted, pairs)
            seen = [chosen, rows.numpy().tobytes(), pairs.tobytes(), *(np.array(x[..., :chosen]) for x in steps[:1])]
            judge, total = np.random.default_rng(judged), int(steps.begin[chosen])
            steps.flags[:, :total] = judge.random((2, total)) < 0.2
            rewards = judge.random(count * n, np.float32)
            if total:
                rewards[total - 1] = np.nan
                finish = batch, 0.9, chosen, True, id(rows), noted, rewards, id(into)
                assert kernels.finish_goals(*finish) == total - 1
                assert [list(members.values()) for members in into] == [list(x.values()) for x in twins.empty()]
                rewards[total - 1] = 1.0
            assert kernels.finish_goals(batch, 0.9, chosen, True, id(rows), noted, rewards, id(into)) == -1
            seen += [rows.numpy().tobytes(), facts(twins.ready.parts.members.batch(into, count)), steps.last.tobytes()]
            found.append(seen)
        assert all(map(np.array_equal, *(map(str, seen) for seen in found)))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("why", ["nothing to draw", "meta", "fake", "none"])
def test_both_twins_refuse_rows_without_memory_and_a_ring_without_anchors(sampler: str, why: str) -> None:
    twins = Twins("goals", 2, sampler=SAMPLERS[sampler](), view=GOALS["future"]())
    rows, fit = twins.rows(5), inside.fitted(twins.buffer.view)[2]
    if why == "nothing to draw":
        twins.buffer.clear()
    elif why == "meta":
        rows = rows.to("meta")
    elif why == "fake":
        rows = FakeTensorMode().from_tensor(rows)
    else:
        rows = rows[:0]
    _, steps, handle, _ = fit.scratch(5, 1)
    for kernels, batch, noted in ((cpu, twins.fast, handle), (reference, twins.plain, steps)):
        into, pairs = twins.empty(), np.zeros((2, 5, fit.nbytes), np.uint8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: the address of a fake tensor was asked for
            assert not kernels.sample_windows(batch, twins.terms(), 1, 0.9, id(rows), id(into))
            goals = kernels.sample_goals(batch, twins.terms(), 1, 0.9, 0.8, id(rows), noted, pairs)
        assert goals == UNFIT
        assert [list(members.values()) for members in into] == [list(x.values()) for x in twins.empty()]


# the memory


def test_a_batch_outlives_its_replay() -> None:
    buffer = filled("nested", sampler=Prioritized())
    batch, gone = buffer.sample(50), weakref.ref(buffer)
    wanted = facts(batch)
    del buffer
    gc.collect()
    assert gone() is None
    filler = [np.full(n, 255, np.uint8) for n in range(1000, 9000, 8)]
    assert facts(batch) == wanted
    del filler


@pytest.mark.parametrize("goals", [None, "future"])
def test_many_batches_take_no_more_memory_than_few(goals: str | None) -> None:
    buffer, sizes = filled("goals", view=GOALS[goals]() if goals else NStep(2), sampler=Prioritized()), list[int]()
    for _ in range(3):
        for _ in range(1000):  # 9 MB if a batch in ten stayed
            batch = buffer.sample(400)
            buffer.update_priorities(batch["index"], batch["reward"])
        with open("/proc/self/statm") as statm:
            sizes.append(int(statm.read().split()[1]) * 4096)
    assert sizes[-1] - sizes[0] < 2**21


def test_functions_that_fail_leave_no_memory_behind() -> None:
    def failing(achieved: Any, desired: Any) -> Any:
        seen.append(weakref.ref(desired))
        raise ZeroDivisionError

    seen, buffer = list[Any](), filled("goals", view=GOALS["future"]())
    buffer.view.reward_fn = failing
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            buffer.sample(9)
    gc.collect()
    assert [ref() for ref in seen] == [None] * 3


def test_threads_draw_and_drop_batches() -> None:
    buffer = filled("goals", view=GOALS["episode, 2-step"](), sampler=Prioritized())

    def work(_: int) -> int:
        batches = [buffer.sample(20) for _ in range(20)]
        return sum(bool(torch.isfinite(batch["reward"]).all()) for batch in batches)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(8))) == [20] * 8
    assert buffer.stats()["batches"] == 161
    buffer.check()


def test_a_forked_child_draws_the_same_batches() -> None:
    buffer = filled("goals", view=GOALS["final, 3-step, both flags"](), sampler=Prioritized())

    def child() -> Any:
        return facts(buffer.sample(9))

    assert in_fork(child) == child()
