"""Windows of rings: the twins relabel goals and read sequences to the bit; and where episodes end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import inside
import oracle
from covering import covering
from relabelling import HerTwin, view_of
from relive import (
    Sequence,
)
from relive.kernels import cpu, reference
from relive.views.hindsight import GoalBytes
from twins import Twin

# The kernels.


@pytest.mark.parametrize(("seed", "strategy"), covering(range(10), range(5)))
def test_the_twins_agree_bit_for_bit(seed: int, strategy: int) -> None:
    rng = np.random.default_rng(seed)
    num_envs, rows, n = int(rng.integers(1, 4)), int(rng.integers(3, 12)), int(rng.integers(1, 5))
    twin = HerTwin(num_envs, rows, dress="goals")
    for t in range(40):
        twin.add("".join(rng.choice(list("....TU"), num_envs)))
        if rng.random() < 0.05:
            twin.interrupt([int(rng.integers(num_envs))])
        if t % 4 or not len(twin.buffer):
            continue
        ring = inside.ring(twin.buffer)
        ring.ends()
        fit = GoalBytes(ring, ("obs", "achieved_goal"), ("obs", "desired_goal"), strategy, bool(seed % 2))
        places, others = ring.draw(16, t), ring.draw(16, t + 1)
        results, plan = [], ring.store.plan(places, fit.batch)
        for kernels, taken in ((cpu, ring.handle), (reference, ring.arrays)):
            out, last = np.zeros_like(plan.rows), plan.last.copy()
            _, steps, handle, _ = fit.scratch(16, n)
            for array in steps:
                array[...] = 0
            key, noted = (77 + t, steps) if kernels is reference else (np.uint64(77 + t), handle)
            batch = fit.batch.handle
            pairs = np.zeros((2, 16 * n, fit.nbytes), np.uint8)
            found = kernels.plan_goals(taken, batch, places, n, 0.7, key, 0.7, others, out, last, noted, pairs)
            total = int(steps.begin[found])
            chosen = [x.copy() for x in (steps.which[:found], steps.begin[: found + 1], steps.spans[:, :found])]
            chosen += [x[..., :total].copy() for x in (steps.now, steps.after, steps.rewards, steps.flags)]
            chosen += [pairs[:, :total], out.copy(), last.copy()]
            judge = np.random.default_rng(t)
            rewards, steps.flags[:] = judge.random(16 * n, np.float32), judge.random((2, 16 * n)) < 0.2
            assert kernels.relabel_windows(taken, batch, 0.7, found, True, out, last, noted, rewards) == -1
            results.append([found, *chosen, out.copy(), last.copy(), steps.used[:found].copy()])
            if total:
                rewards[total - 1] = [np.nan, np.inf][t % 2]
                given = taken, batch, 0.7, found
                assert kernels.relabel_windows(*given, True, out, last, noted, rewards) == total - 1
                assert np.array_equal(out, results[-1][-3])
                assert kernels.relabel_windows(*given, False, out, last, noted, rewards) == -1
        for fast, plain in zip(*results, strict=True):
            assert np.array_equal(np.asarray(fast), np.asarray(plain), equal_nan=True)


@pytest.mark.parametrize("seed", range(5))
def test_ends_of_episodes_are_known_however_seldom_they_are_asked_for(seed: int) -> None:
    rng = np.random.default_rng(seed)
    twin = HerTwin(2, 11, dress="goals", view=view_of("final"))
    for _ in range(12):
        for _ in range(int(rng.integers(1, 60))):
            twin.add("".join(rng.choice(list("......TU"), 2)))
        if rng.random() < 0.3:
            twin.clear() if rng.random() < 0.5 else twin.interrupt()
            twin.add("..")
            twin.add("..")
        twin.check_drawn(twin.buffer.sample(16), twin.buffer.view)
        twin.buffer.check()


def test_check_finds_an_episode_that_ends_elsewhere() -> None:
    from relive.errors import InvariantError

    twin = HerTwin(1, 11, dress="goals", view=view_of()).play(*"..T.....")
    twin.buffer.sample(4)
    twin.buffer.check()
    ends, _ = inside.ring(twin.buffer).ends()
    ends[1] += 1
    with pytest.raises(InvariantError, match=r"8: the episode of row \d+ of env 0 ends elsewhere"):
        twin.buffer.check()
    ends[1] -= 1
    inside.ring(twin.buffer).step[1] = 0
    with pytest.raises(InvariantError):
        twin.buffer.check()


def test_a_number_of_transitions_beyond_32_bits_does_no_harm() -> None:
    play, rows = "..T.....U..", 9
    plain, late = (HerTwin(1, rows, dress="goals", view=view_of("future", 2)) for _ in range(2))
    ring = inside.ring(late.buffer)
    ring.state[:, :2] = rows * 2**30  # rows that were written, at the same places, and cleared
    ring.state[:, 3] = ring.counters[0] = 2**32 - 3  # transitions completed: the play goes beyond
    for twin in (plain, late):
        twin.play(*play)
        twin.buffer.check()
    for _ in range(5):
        one, other = plain.buffer.sample(30), late.buffer.sample(30)
        assert torch.equal(other["index"], one["index"] + rows * 2**30)
        for name in ("obs", "next_obs"):
            assert torch.equal(one[name, "desired_goal"], other[name, "desired_goal"])
        late.buffer.check()


# The kernels against each other, bit for bit.


@given(st.integers(0, 2**32))
def test_the_twins_read_the_same_bytes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_envs, rows = int(rng.integers(1, 4)), int(rng.integers(2, 30))
    length = int(rng.integers(1, 9))
    view = Sequence(length, int(rng.integers(0, 5)), int(rng.integers(0, length)), int(rng.integers(1, 6)))
    twin = Twin(num_envs, rows, dress="mixed" if seed % 2 else "dict", view=view)
    for _ in range(int(rng.integers(1, 70))):
        twin.add("".join(rng.choice(list("." * 9 + "TUB"), num_envs)))
        if rng.random() < 0.05:
            twin.interrupt([0])
    buffer, ring = twin.buffer, inside.ring(twin.buffer)
    buffer.data()
    places, batch = ring.anchors(), inside.readers(view)[ring]
    total, answers, handle = view.rows, [], batch.handle.copy()
    handle[-1] = rng.integers(2)  # time first, or not
    for kernel, taken in ((cpu, ring.handle), (reference, ring.arrays)):
        out = np.full((total * len(places), batch.layout.nbytes), 7, np.uint8)
        facts, table = np.full((6, len(places)), -9, np.int64), np.full(len(out) if seed % 3 else 0, -9, np.int64)
        kernel.read_sequences(taken, handle, 0.97, places, out, batch.blank, facts, table)
        answers.append((out, facts, table))
    for fast, plain in zip(*answers, strict=True):
        assert fast.tobytes() == plain.tobytes()


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 60))
def test_the_twins_find_the_same_windows(length: int, stride: int, steps: int) -> None:
    stride = min(stride, length)
    starts = oracle.window_starts(steps, length, stride)
    for at in range(steps):
        full = bool(reference.ends_full(at, length, stride))
        assert cpu.ends_full(at, length, stride) == full == any(start + length == at + 1 for start in starts)
        assert cpu.window_start(at, length, stride) == reference.window_start(at, length, stride)
    if steps:
        assert reference.window_start(steps - 1, length, stride) == starts[-1]
