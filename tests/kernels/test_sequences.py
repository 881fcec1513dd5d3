"""The kernels of sequences, fast and plain, to the bit."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import inside
import oracle
from relive import (
    Sequence,
)
from relive.kernels import cpu, reference
from twins import Twin

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
