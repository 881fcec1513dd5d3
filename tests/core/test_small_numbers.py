"""Numbers that only a narrow dtype calls subnormal keep their value where the processor flushes subnormal numbers.

``torch.set_flush_denormal(True)`` is a usual setting. It takes what is subnormal in an operation for 0. The smallest
float16 numbers are normal float32 ones, so their conversions may not go by way of an operation on their bits. What is
subnormal as float32 itself, such as a bfloat16 number below 1.2e-38, is flushed, as NumPy and torch do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import relive
from relive import Field, core
from relive.returns import gae
from relive.steps.arrays import numpy_dtype
from support.forks import in_fork

SMALL = 2.0**-24
"""The smallest float16 number."""


def flushed(work: Callable[..., Any], *args: Any) -> Any:
    """What is returned where subnormal numbers are flushed, and asked of a processor that can do so."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    torch.set_flush_denormal(False)
    return in_fork(_flushed, work, *args)


def _flushed(work: Callable[..., Any], *args: Any) -> Any:
    assert torch.set_flush_denormal(True)
    assert np.float64(5e-324) * 2 == 0
    return work(*args)


def read(numbers: Any, dtype: torch.dtype) -> bytes:
    """The bytes of numbers as a field of a dtype stores them."""
    shape, target = numbers.shape[1:], np.zeros((1, *numbers.shape), numpy_dtype(dtype))
    assert core.StepFields([("x",)], [dtype], [shape], len(numbers), [target]).take(0, {"x": numbers})
    return target.tobytes()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_every_half_is_read_as_numpy_converts_it(dtype: torch.dtype) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    every = every[~np.isnan(every)][None]  # bits of a NaN may differ
    want = every.astype(numpy_dtype(dtype)).tobytes()
    for numbers in (every, torch.from_numpy(every.copy()), every.repeat(2, axis=1)[:, ::2]):
        assert read(numbers, dtype) == want
        assert flushed(read, numbers, dtype) == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_small_numbers_of_any_dtype_are_read_as_torch_converts_them(given: torch.dtype, dtype: torch.dtype) -> None:
    powers = 2.0 ** torch.arange(-126, 3, dtype=torch.float64)
    numbers = torch.cat([powers, -powers, powers * 1.5]).to(given)[None]
    want = numbers.to(dtype).numpy().tobytes()
    assert read(numbers, dtype) == want
    assert flushed(read, numbers, dtype) == want


def learned() -> list[float]:
    """What the smallest halves become on their way through a replay, a rating, and an advantage."""
    schema = {"obs": Field((), torch.float32), "wide": Field((), torch.float64), "same": Field((), torch.float16)}
    schema |= {"action": Field((), torch.int64), "reward": Field((), torch.float32)}
    schema |= {name: Field((), torch.bool) for name in ("terminated", "truncated")}
    sampler = relive.Prioritized(eps=1e-12)
    replay = relive.ReplayBuffer(relive.Schema(schema), 8, seed=0, sampler=sampler, check_ends=False)
    half = np.full((), SMALL, np.float16)
    for _ in range(3):
        step = {"obs": half, "wide": torch.tensor(half), "same": half, "reward": half}
        replay.add(step, action=0, terminated=False, truncated=False)
    batch = replay.sample(1)
    replay.update_priorities(batch["index"], torch.full((1,), SMALL).half())
    grid: Any = {"reward": torch.full((1, 1), SMALL).half(), "value": torch.zeros(2, 1).half()}
    ends = {"terminated": torch.ones(1, 1, dtype=torch.bool), "truncated": torch.zeros(1, 1, dtype=torch.bool)}
    advantage = gae(**grid, **ends)[0]
    found = [batch[name].double() for name in ("obs", "wide", "reward")] + [advantage.double()]
    bits = batch["same"].view(torch.int16)
    return [float(x) for x in found] + [int(bits), float(replay.sample(1)["probability"].double() > 0)]


def test_the_smallest_half_comes_out_of_a_replay_as_it_went_in() -> None:
    assert flushed(learned) == [SMALL] * 4 + [1, 1.0]


def powers_of(errors: Any, alpha: float, eps: float) -> bytes:
    out = np.zeros(len(errors))
    core.powers(errors, alpha, eps, out)
    return out.tobytes()


def test_priorities_of_small_errors_are_those_of_no_flag() -> None:
    errors = (2.0 ** np.arange(-126, 10)).astype(np.float32)
    for alpha, eps in ((0.6, 1e-6), (1.0, 0.0), (0.5, 0.0), (2.0, 0.0)):
        assert flushed(powers_of, errors, alpha, eps) == powers_of(errors, alpha, eps)
