"""The kernels of windows, fast and plain, to the bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from relive.kernels import cpu, reference

# The kernels


@pytest.mark.parametrize("seed", range(20))
def test_the_kernels_agree_to_the_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps, envs = (int(n) for n in rng.integers(1, 20, 2))
    done, real = (rng.random((steps, envs)) < share for share in (0.2, 0.9))
    flags = []
    for kernels in (reference, cpu):
        ended = (np.random.default_rng(seed).random(envs) < 0.5).astype(np.uint8)
        starts = np.full((steps, envs), 9, np.uint8)
        kernels.episode_starts(done.view(np.uint8), real.view(np.uint8), ended, starts)
        flags.append((starts.tolist(), ended.tolist()))
    assert flags[0] == flags[1]
    starts = np.array(flags[0][0], np.uint8)
    for length, tails, complete in itertools.product((1, 3, 2**31), (True, False), (True, False)):
        stride = min(int(rng.integers(1, length + 1)), 2**31)
        tables = []
        for kernels in (reference, cpu):
            table = np.full((steps * envs // 2, 5), -9, np.int64)  # room may be too small
            arguments = done.view(np.uint8), real.view(np.uint8), starts, length, stride, tails, complete
            tables.append((kernels.plan_windows(*arguments, table), table.tolist()))
        assert tables[0] == tables[1]
    width, rows = int(rng.integers(0, 40)), int(rng.integers(1, 9))
    source = torch.from_numpy(rng.integers(0, 256, (steps * envs, width), np.uint8))
    pad = torch.from_numpy(rng.integers(0, 256, width, np.uint8))
    for step in (1, envs):
        room = 1 + (steps * envs - 1) // step
        lengths = torch.from_numpy(rng.integers(0, min(rows, room) + 1, 6))
        last = steps * envs - 1 - (lengths - 1).clamp(min=0) * step
        first = (torch.rand(6, generator=torch.Generator().manual_seed(seed)) * (last + 1)).long()
        marks = [kernels.mark_windows(lengths, lengths // 2, first % 2, rows) for kernels in (reference, cpu)]
        assert all(a.dtype is torch.bool and torch.equal(a, b) for a, b in zip(*marks, strict=True))
        outs = [kernels.gather_windows(source, first, step, lengths, pad, rows) for kernels in (reference, cpu)]
        assert outs[0].shape == (6, rows, width)
        assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("pad", [[0] * 24, [7] * 24, [0] * 23 + [1], [1] + [0] * 23])
def test_much_padding_is_filled_and_nothing_else(pad: list[int]) -> None:
    source, blank = torch.arange(240, dtype=torch.uint8).view(10, 24), torch.tensor(pad, dtype=torch.uint8)
    first, lengths, outs = torch.tensor([0, 3, 9, 5]), torch.tensor([10, 0, 1, 5]), list[torch.Tensor]()
    for kernels in (reference, cpu):
        block = torch.full((6, 1000, 24), 99, dtype=torch.uint8)
        if kernels is cpu:
            cpu.gather_windows(source, first, 1, lengths, blank, 1000, block[1:5])
        else:
            block[1:5] = reference.gather_windows(source, first, 1, lengths, blank, 1000)
        outs.append(block)
    assert torch.equal(*outs)
