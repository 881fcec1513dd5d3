"""Packing columns and picking rows: numba and plain Python do the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from relive.kernels import cpu, reference


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 300])
def test_both_twins_pack_columns_next_to_each_other(count: int) -> None:
    rng = np.random.default_rng(count)
    sizes = np.array([4, 0, 17, 1, 8, 48, 68, 127, 511, 512, 513])
    columns = [rng.integers(0, 256, (count, size), np.uint8) for size in sizes]
    offsets = np.array([16, 20, 24, 0, 48, 64, 113, 192, 320, 832, 1400])
    want = np.full((count, 1920), 7, np.uint8)
    for column, size, offset in zip(columns, sizes, offsets, strict=True):
        want[:, offset : offset + size] = column
    for module in (cpu, reference):
        rows = np.full((count, 1920), 7, np.uint8)
        module.pack_rows(np.array([column.ctypes.data for column in columns]), sizes, offsets, rows, 1)
        assert np.array_equal(rows, want)


@pytest.mark.parametrize(("steps", "envs"), [(1, 5), (2, 9), (65, 7), (130, 17)])
def test_both_twins_pack_env_by_env(steps: int, envs: int) -> None:
    rng = np.random.default_rng(steps)
    columns = [rng.integers(0, 256, (steps, envs, size), np.uint8) for size in (4, 11, 53)]
    want = np.concatenate(columns, 2).swapaxes(0, 1).reshape(steps * envs, 68)
    for module in (cpu, reference):
        rows = np.zeros((steps * envs, 68), np.uint8)
        addresses = np.array([column.ctypes.data for column in columns])
        module.pack_rows(addresses, np.array([4, 11, 53]), np.array([0, 4, 15]), rows, steps)
        assert np.array_equal(rows, want)


@pytest.mark.parametrize("module", [cpu, reference])
@pytest.mark.parametrize("width", [0, 1, 16, 100, 3000])
def test_rows_are_picked_in_any_order_and_several_times(module: Any, width: int) -> None:
    rng = np.random.default_rng(width)
    source = rng.integers(0, 256, (50, width), np.uint8)
    for index in (np.arange(0), rng.integers(0, 50, 1), rng.integers(0, 50, 120)):
        out = np.zeros((len(index), width), np.uint8)
        assert module.take_rows(source, index, out) == -1
        assert np.array_equal(out, source[index])


@pytest.mark.parametrize("module", [cpu, reference])
@pytest.mark.parametrize("bad", [-1, 50, 2**62, -(2**62)])
def test_a_row_that_does_not_exist_is_not_read(module: Any, bad: int) -> None:
    source, out = np.ones((50, 8), np.uint8), np.zeros((40, 8), np.uint8)
    index = np.zeros(40, np.int64)
    index[[33, 35]] = bad
    assert module.take_rows(source, index, out) == 33
    assert not out[33:].any()
