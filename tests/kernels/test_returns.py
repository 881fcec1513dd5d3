"""The kernels of returns, fast and plain, to the bit and beside the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from covering import covering
from relive.kernels import cpu, reference
from returned import COEFFICIENTS, ESTIMATORS, Numbers, agree, drawn, envs_of, kernel, library, patterns, truth

# The two implementations


@pytest.mark.parametrize(
    ("num_envs", "name", "length"),
    covering([1, 2, 3, 7, 8, 9, 16, 64, 300], ESTIMATORS, [1, 2, 3, 17, 64], full=3, quick=2),
)
def test_numba_agrees_with_torch_to_the_bit_at_every_shape(name: str, length: int, num_envs: int) -> None:
    for numbers, ends, unreal in zip(
        COEFFICIENTS, (0.0, 0.02, 0.15, 0.5, 1.0), (None, 0.01, None, 0.3, 1.0), strict=True
    ):
        block = drawn(1, length, num_envs, ends, unreal)
        ours = kernel(cpu, name, block, **numbers)
        assert all(torch.equal(a, b) for a, b in zip(ours, kernel(reference, name, block, **numbers), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(ours, library(name, block, **numbers), strict=True))


@pytest.mark.parametrize(
    ("num_envs", "name", "length"),
    covering([1, 2, 3, 7, 8, 9, 16, 64, 300], ESTIMATORS, [1, 2, 3, 17, 64], full=3, quick=2),
)
def test_narrow_and_wide_blocks_agree_with_the_oracle(name: str, length: int, num_envs: int) -> None:
    numbers, block = COEFFICIENTS[0], drawn(2, length, num_envs, ends=0.1)
    some = np.random.default_rng(num_envs).permutation(num_envs)[:5]
    got = tuple(out[:, some] for out in library(name, block, **numbers))
    part = envs_of(block, some)
    agree(got, truth(name, part, **numbers), part, numbers)


def test_without_values_monte_carlo_agrees_with_the_oracle_and_numba_with_torch() -> None:
    for length in (1, 2, 3, 4):
        block = patterns(length, masked=True) | {"value": None, "final_value": None}
        for gamma in (0.0, 0.9, 1.0):
            numbers: Numbers = {"gamma": gamma, "lam": 1.0}
            (got,) = library("monte_carlo", block, **numbers)
            (expected,) = truth("monte_carlo", block, **numbers)
            np.testing.assert_allclose(got.numpy(), expected, rtol=0, atol=1e-5)
            for module in (cpu, reference):
                assert torch.equal(got, kernel(module, "monte_carlo", block, **numbers)[0])
