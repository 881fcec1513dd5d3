"""Episodes and windows of rollouts: as torch operations have them, and what does not fit is refused.

Which windows a rollout has is in rollout/test_windows.py.
"""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from relive import core
from relive.core.rollouts import (
    episodes_on_device,
    gather_on_device,
    gather_windows,
    mark_on_device,
    mark_windows,
)
from support.other_device import no_waiting

COMPILED: Any = importlib.import_module("relive.core._core")


@pytest.mark.parametrize("seed", range(30))
def test_episodes_start_where_torch_operations_have_them_start(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps, envs = (int(n) for n in rng.integers(0 if seed % 7 == 0 else 1, 20, 2))
    done, real = ((rng.random((steps, envs)) < share).view(np.uint8) for share in (0.2, 0.9))
    before = rng.random(envs) < 0.5
    starts, ended = np.full((steps, envs), 9, np.uint8), before.astype(np.uint8)
    core.episode_starts(done, real, ended, starts)
    with no_waiting():
        there = episodes_on_device(*(torch.from_numpy(flag.view(np.bool_)) for flag in (done, real, before)))
    assert [x.int().tolist() for x in there] == [starts.tolist(), ended.tolist()]


def test_a_table_of_windows_outlives_all_else() -> None:
    ones = np.ones((4000, 3), np.uint8)
    table = core.plan_windows(ones * 0, ones, ones * 0, 1, 1, True, False)
    del ones
    other = np.full(table.shape, 7)
    assert table[:, 1].tolist() == [*range(4000)] * 3
    assert other.min() == 7
    table[:] = 1
    assert table.sum() == 12_000 * 5


@pytest.mark.parametrize("seed", range(30))
def test_windows_are_copied_and_marked_as_torch_operations_do_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps, envs, width, rows = (int(rng.integers(low, high)) for low, high in ((1, 20), (1, 20), (0, 40), (1, 9)))
    wide, pad = rng.integers(0, 256, (steps * envs, width + 3), np.uint8), rng.integers(0, 256, width, np.uint8)
    whole = np.ascontiguousarray(wide[:, :width])
    for step, source in itertools.product((1, envs), (whole, wide[:, :width])):
        room = 1 + (steps * envs - 1) // step
        lengths = rng.integers(0, min(rows, room) + 1, 6)
        last = steps * envs - 1 - np.maximum(lengths - 1, 0) * step
        first = (rng.random(6) * (last + 1)).astype(np.int64)
        facts = lengths, first % 2
        marks = COMPILED.mark_windows(*facts, rows)
        assert marks.dtype == np.bool_
        tensors = [mark_windows(*map(given, facts), rows) for given in (torch.from_numpy, np.asarray)]
        tensors.append(mark_on_device(*map(torch.from_numpy, facts), rows))
        assert all(np.array_equal(a, b) for found in tensors for a, b in zip(found, marks, strict=True))
        out = np.full((6, rows, width), 99, np.uint8)
        core.copy_windows(source, first, step, lengths, pad, out)
        given_ = [torch.from_numpy(x) for x in (source, first, lengths, pad)]
        for gather in (gather_windows, gather_on_device):
            assert np.array_equal(gather(given_[0], given_[1], step, given_[2], given_[3], rows), out)


@pytest.mark.parametrize("pad", [[0] * 24, [7] * 24, [0] * 23 + [1], [1] + [0] * 23])
def test_much_padding_is_filled_and_nothing_else(pad: list[int]) -> None:
    source, blank = np.arange(240, dtype=np.uint8).reshape(10, 24), np.array(pad, np.uint8)
    block = np.full((6, 1000, 24), 99, np.uint8)
    wanted = block.copy()
    wanted[1:5] = blank
    wanted[1, :10], wanted[3, 0], wanted[4, :5] = source, source[9], source[5:]
    core.copy_windows(source, np.array([0, 3, 9, 5]), 1, np.array([10, 0, 1, 5]), blank, block[1:5])
    assert np.array_equal(block, wanted)


@pytest.mark.parametrize("time_first", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_windows_are_tensors_over_the_fields_of_their_rows(seed: int, time_first: bool) -> None:
    rng = np.random.default_rng(seed)
    facts = [("obs", torch.float32, (3,), 0), ("flag", torch.bool, (), 13), ("half", torch.bfloat16, (1, 1), 14)]
    fields, pool = core.Fields([*facts, ("none", torch.int32, (2, 0), 16)], 16), core.Pool()
    source, pad = rng.integers(0, 2, (40, 16), np.uint8), rng.integers(0, 2, 16, np.uint8)
    step, rows = int(rng.integers(1, 4)), int(rng.integers(1, 9))
    lengths = rng.integers(0, rows + 1, 5)
    first, into = rng.integers(0, 40 - 8 * step, 5), {"flag": None, "other": 7}
    core.take_windows(source, first, step, lengths, pad, rows, fields, time_first, pool, into)
    wanted = np.empty((5, rows, 16), np.uint8)
    core.copy_windows(source, first, step, lengths, pad, wanted)
    assert list(into) == ["flag", "other", "obs", "half", "none"]
    for name, dtype, shape, at in facts:
        found: Any = into[name]
        found = found.transpose(0, 1) if time_first else found
        assert (found.dtype, tuple(found.shape)) == (dtype, (5, rows, *shape))
        bits = found.contiguous().view(5, rows, -1).view(torch.uint8).numpy()
        assert np.array_equal(bits, wanted[..., at : at + bits.shape[-1]])
    assert tuple(into["none"].shape) == ((rows, 5, 2, 0) if time_first else (5, rows, 2, 0))


U8, I64 = np.zeros((4, 3), np.uint8), np.zeros(2, np.int64)
CUBE, PAD = np.zeros((2, 5, 3), np.uint8), np.zeros(3, np.uint8)


def copied(**changes: Any) -> Any:
    given = {"source": U8, "first": I64, "step": 1, "lengths": I64, "pad": PAD, "out": CUBE} | changes
    return lambda: core.copy_windows(*given.values())


def taken(width: int = 3, into: Any = None, **changes: Any) -> Any:
    given = {"source": U8, "first": I64, "step": 1, "lengths": I64, "pad": PAD, "length": 5} | changes
    fields, into = core.Fields([("x", torch.uint8, (2,), 0)], width), {} if into is None else into
    return lambda: core.take_windows(*given.values(), fields, True, core.Pool(), into)


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (ValueError, lambda: core.episode_starts(U8, U8, np.zeros(2, np.uint8), U8.copy())),
        (ValueError, lambda: core.episode_starts(U8, U8[:3], np.zeros(3, np.uint8), U8.copy())),
        (TypeError, lambda: core.episode_starts(U8, U8, np.zeros(3, np.uint8), U8 * 1.0)),
        (ValueError, lambda: core.plan_windows(U8, U8[1:], U8, 1, 1, True, False)),
        (ValueError, lambda: core.plan_windows(U8, U8, U8, 0, 1, True, False)),
        (ValueError, lambda: core.plan_windows(U8, U8, U8, 1, 0, True, False)),
        (ValueError, lambda: core.plan_windows(U8, U8, U8, 2**40, 1, True, False)),
        (IndexError, copied(lengths=np.array([0, 6]))),
        (IndexError, copied(lengths=np.array([0, -1]))),
        (IndexError, copied(lengths=np.array([0, 5]))),
        (IndexError, copied(lengths=np.array([0, 3]), step=2)),
        (IndexError, copied(lengths=np.array([0, 2]), step=2**62)),
        (IndexError, copied(lengths=np.array([0, 1]), first=np.array([0, 4]))),
        (IndexError, copied(lengths=np.array([1, 0]), first=np.array([-1, 0]))),
        (ValueError, copied(step=0)),
        (ValueError, copied(first=I64[:1])),
        (ValueError, copied(pad=PAD[:2])),
        (ValueError, copied(source=U8[:, :2])),
        (TypeError, copied(out=CUBE[:, ::2])),
        (TypeError, copied(out=U8)),
        (IndexError, taken(lengths=np.array([0, 6]))),
        (IndexError, taken(lengths=np.array([0, 1]), first=np.array([0, 4]))),
        (ValueError, taken(width=4)),
        (ValueError, taken(pad=PAD[:2])),
        (ValueError, taken(length=-1)),
        (ValueError, taken(length=2**62)),
        (ValueError, taken(length=2**62, first=I64[:0], lengths=I64[:0])),
        (TypeError, taken(source=U8[0])),
        (ValueError, lambda: COMPILED.mark_windows(I64, I64[:1], 3)),
        (ValueError, lambda: COMPILED.mark_windows(I64, I64, -1)),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(error: type[Exception], call: Any) -> None:
    with pytest.raises(error):
        call()
    assert not U8.any()
    assert not CUBE.any()


def test_empty_windows_may_lie_anywhere() -> None:
    out = np.full((2, 2, 3), 9, np.uint8)
    core.copy_windows(U8, np.array([-5, 2**62]), 1, np.array([0, 0]), PAD, out)
    assert not out.any()
    core.copy_windows(U8[:0], np.array([3]), 1, np.array([0]), PAD, out[:1])
