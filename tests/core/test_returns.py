"""Returns and advantages: compiled code and torch operations beside the definition, to the bit, and the oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._inductor import metrics

import relive
from definitions import returns as definition
from definitions.returns import Array, Grid
from relive import core
from relive.core import returns
from relive.errors import FieldError
from support.cases import covering
from support.other_device import ELSEWHERE, far_device, no_waiting
from support.return_blocks import (
    COEFFICIENTS,
    DTYPES,
    ESTIMATORS,
    Block,
    Numbers,
    _ask,
    agree,
    drawn,
    envs_of,
    in_torch,
    library,
    patterns,
    tensor,
    truth,
)

ENVS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 23, 24, 64, 300]
PASSES = ["gae", "discounted_return", "vtrace"]
ROUGH = np.array([0.0, -0.0, 1e-30, -1e-42, 3.0, -1e38, 3e38, np.inf, -np.inf, np.nan], np.float32)


def grid_of(block: Block) -> Grid:
    """The arrays of a block."""
    arrays = {name: block[name] for name in Grid._fields}
    return Grid(
        **{
            name: x if x is None else np.ascontiguousarray(x, bool if x.dtype == bool else np.float32)
            for name, x in arrays.items()
        }
    )


def ratio_of(block: Block) -> Array:
    """π/μ, as torch has it."""
    return tensor(block["log_rho"]).exp().numpy()


def defined(name: str, grid: Grid, ratio: Array, numbers: Numbers) -> tuple[Array, ...]:
    """What the definition says."""
    gamma, lam = numbers["gamma"], numbers["lam"]
    with np.errstate(all="ignore"):
        if name == "gae":
            return definition.gae(grid, gamma, lam)
        if name == "discounted_return":
            return (definition.discounted_return(grid, gamma),)
        return definition.vtrace(ratio, grid, gamma, lam, numbers["rho_clip"], numbers["c_clip"])


def filled(name: str, grid: Grid, ratio: Array, numbers: Numbers, *, widest: bool = True) -> tuple[int, list[Array]]:
    """What compiled code answers and writes."""
    gamma, lam, steps = numbers["gamma"], numbers["lam"], len(grid.reward)
    out = [np.full_like(grid.reward, 77) for _ in range(2)]
    if name == "gae":
        return core.fill_gae(*grid, *out, steps, gamma, lam, widest=widest), out
    if name == "discounted_return":
        return core.fill_returns(*grid, out[0], steps, gamma, widest=widest), out[:1]
    clips = numbers["rho_clip"], numbers["c_clip"]
    return core.fill_vtrace(*grid, ratio.copy(), *out, steps, gamma, lam, *clips, widest=widest), out


def bits(arrays: Any) -> list[bytes]:
    """Numbers bit for bit, but for the kind of a NaN."""
    plain = [np.asarray(x) for x in arrays]
    return [np.where(np.isnan(x), x.dtype.type(np.nan), x).tobytes() for x in plain]


def rough(rng: np.random.Generator, grid: Grid, share: float) -> Grid:
    """The grid with some numbers that are not finite, very large, or zeros of either sign."""

    def changed(x: Any) -> Any:
        if x is None or x.dtype == bool:
            return x
        return np.where(rng.random(x.shape) < share, rng.choice(ROUGH, x.shape), x)

    changes = [changed(x) for x in grid]
    return Grid(*changes)


# The definition


@pytest.mark.parametrize(("num_envs", "name", "length"), covering(ENVS, PASSES, [1, 2, 3, 17, 64], full=2))
def test_compiled_code_gives_what_the_definition_gives_to_the_bit_at_every_shape(
    name: str, length: int, num_envs: int
) -> None:
    for numbers, ends, unreal in zip(
        COEFFICIENTS, (0.0, 0.02, 0.15, 0.5, 1.0), (None, 0.01, None, 0.3, 1.0), strict=True
    ):
        block = drawn(1, length, num_envs, ends, unreal)
        grid, ratio = grid_of(block), ratio_of(block)
        expected = bits(defined(name, grid, ratio, numbers))
        for widest in (True, False):
            found, out = filled(name, grid, ratio, numbers, widest=widest)
            assert found == -1
            assert bits(out) == expected


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("seed", range(5))
def test_compiled_code_gives_what_the_definition_gives_of_random_and_rough_numbers(name: str, seed: int) -> None:
    rng = np.random.default_rng([seed, PASSES.index(name)])
    for play in range(60):
        T, N = int(rng.integers(1, 12)), int(rng.choice(ENVS[:-2]))
        block = drawn(1000 * seed + play, T, N, float(rng.choice([0, 0.1, 0.5, 1])), rng.choice([None, 0.0, 0.4]))
        grid, ratio = grid_of(block), ratio_of(block)
        if rng.random() < 0.5:
            grid = rough(rng, grid, float(rng.choice([0.02, 0.3])))
            ratio = np.where(rng.random(ratio.shape) < 0.1, rng.choice(ROUGH, ratio.shape), ratio)
        if rng.random() < 0.2:
            grid = grid._replace(final_value=None)
        if rng.random() < 0.3 and name == "discounted_return":
            grid = grid._replace(value=None)
        numbers = COEFFICIENTS[play % 5]
        missing = -1 if grid.value is None else definition.first_missing(grid)
        expected = defined(name, grid, ratio, numbers)
        spoilt = name == "gae" and not np.isfinite(expected[0]).all()
        for widest in (True, False):
            found, out = filled(name, grid, ratio, numbers, widest=widest)
            assert found == (missing if missing >= 0 else core.SPOILT if spoilt else -1)
            if missing >= 0:
                assert all((x == 77).all() for x in out)
            else:
                assert bits(out) == bits(expected)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_in_torch_a_number_that_is_not_finite_stays_in_its_episode(name: str, wrong: float) -> None:
    for seed in range(5):
        numbers = COEFFICIENTS[seed]
        block = drawn(seed, 40, 6, ends=0.2, unreal=None if seed % 2 else 0.1)
        good = in_torch(name, block, **numbers)
        done = block["terminated"] | block["truncated"]
        if block["mask"] is not None:
            done |= ~block["mask"]
        episode = np.cumsum(done, axis=0) - done
        spoilt = episode == episode[20]
        block["reward"][20, done[20] == 0] = wrong
        for one, other in zip(in_torch(name, block, **numbers), good, strict=True):
            assert one.isfinite()[torch.from_numpy(~spoilt)].all()
            assert torch.equal(one[torch.from_numpy(~spoilt)], other[torch.from_numpy(~spoilt)])


def test_what_follows_a_truncation_without_final_value_is_no_number_where_a_look_would_wait() -> None:
    flags, x = torch.zeros(3, 2, dtype=torch.bool), torch.ones(3, 2)
    cut = flags.clone()
    cut[1, 0] = True
    for final in (None, x * math.nan):
        with far_device():
            given = (x, torch.ones(4, 2), flags, cut, final, None)
            grid = returns.Grid(*(y if y is None else y.to(ELSEWHERE) for y in given))
            with no_waiting():
                found = [*returns.gae(grid, 0.9, 0.9), returns.discounted_return(grid, 0.9)]
                found += returns.vtrace(torch.zeros_like(grid.reward), grid, 0.9, 0.9, 1.0, 1.0)
            for out in found:
                assert out.cpu().isnan().tolist() == [[True, False], [True, False], [False, False]]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 24, 100])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_torch_compiles_each_function_as_a_whole(name: str, steps: int) -> None:
    block, numbers = drawn(7, steps, 16), COEFFICIENTS[0]
    given = {key: tensor(grid) for key, grid in block.items()}
    torch._dynamo.reset()
    metrics.reset()
    ask = torch.compile(lambda grids: _ask(relive.returns, name, grids, lambda x: x, numbers), fullgraph=True)
    agree(ask(given), truth(name, block, **numbers), block, numbers)
    passes = (steps - 1).bit_length() * (2 if name == "vtrace" else 1)
    assert metrics.generated_kernel_count <= 3 + passes  # one more than passes as a rule


# The oracle


@pytest.mark.parametrize(
    ("num_envs", "name", "length"),
    covering([1, 2, 3, 7, 8, 9, 16, 64, 300], ESTIMATORS, [1, 2, 3, 17, 33, 64, 200], full=3, quick=2),
)
def test_narrow_and_wide_blocks_agree_with_the_oracle(name: str, length: int, num_envs: int) -> None:
    numbers, block = COEFFICIENTS[0], drawn(2, length, num_envs, ends=0.1)
    some = np.random.default_rng(num_envs).permutation(num_envs)[:5]
    got = tuple(out[:, some] for out in library(name, block, **numbers))
    part = envs_of(block, some)
    expected = truth(name, part, **numbers)
    agree(got, expected, part, numbers)
    for dtype in DTYPES:
        agree(in_torch(name, part, dtype, **numbers), expected, part, numbers)


def test_without_values_monte_carlo_agrees_with_the_oracle() -> None:
    for length in (1, 2, 3, 4):
        block = patterns(length, masked=True) | {"value": None, "final_value": None}
        for gamma in (0.0, 0.9, 1.0):
            numbers: Numbers = {"gamma": gamma, "lam": 1.0}
            (expected,) = truth("monte_carlo", block, **numbers)
            for ask in (library, in_torch):
                (got,) = ask("monte_carlo", block, **numbers)
                np.testing.assert_allclose(got.numpy(), expected, rtol=0, atol=1e-5)


# What is missing or not finite


@pytest.mark.parametrize("widest", [True, False])
@pytest.mark.parametrize("name", PASSES)
def test_the_first_place_without_its_final_value_is_named_and_nothing_is_written(name: str, widest: bool) -> None:
    for T, N in ((1, 1), (5, 3), (40, 4), (3, 50)):
        block = drawn(3, T, N, ends=0, unreal=None)
        grid, ratio = grid_of(block), ratio_of(block)
        for place in range(0, T * N, 7):
            grid.truncated.flat[place:] = True
            grid.final_value.flat[:] = 0
            grid.final_value.flat[place] = np.nan
            found, out = filled(name, grid, ratio, COEFFICIENTS[0], widest=widest)
            assert found == place
            assert all((x == 77).all() for x in out)
            found, _ = filled(name, grid._replace(final_value=None), ratio, COEFFICIENTS[0], widest=widest)
            assert found == place
            grid.truncated[:] = False


def test_a_step_without_its_final_value_is_refused_by_every_estimator() -> None:
    x, flags = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    cut = flags.clone()
    cut[1, 2] = True
    for dtype in (torch.float32, torch.float64):
        grid = returns.Grid(x.to(dtype), torch.zeros(3, 3, dtype=dtype), flags, cut, None, None)
        for ask in (
            lambda grid=grid: returns.gae(grid, 0.9, 0.9),
            lambda grid=grid: returns.discounted_return(grid, 0.9),
            lambda grid=grid: returns.vtrace(grid.reward, grid, 0.9, 0.9, 1.0, 1.0),
        ):
            with pytest.raises(FieldError, match="step 1 of env 2 was truncated"):
                ask()


# Columns


@pytest.mark.parametrize("widest", [True, False])
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("num_envs", [1, 3, 8, 21])
def test_columns_may_have_more_rows_of_which_none_is_touched(name: str, num_envs: int, widest: bool) -> None:
    block, numbers = drawn(4, 9, num_envs), COEFFICIENTS[0]
    grid, ratio = grid_of(block), ratio_of(block)
    for steps in range(10):
        part = Grid(*(x[: steps + (name == "value")].copy() for name, x in grid._asdict().items()))
        out = [np.full_like(grid.reward, 77) for _ in range(3)]
        out[2][:] = ratio
        if name == "gae":
            core.fill_gae(*grid, *out[:2], steps, numbers["gamma"], numbers["lam"], widest=widest)
        elif name == "discounted_return":
            core.fill_returns(*grid, out[0], steps, numbers["gamma"], widest=widest)
        else:
            core.fill_vtrace(*grid, out[2], *out[:2], steps, *list(numbers.values()), widest=widest)
        expected = defined(name, part, ratio[:steps], numbers) if steps else ()
        assert bits(x[:steps] for x in out[: len(expected)]) == bits(expected)
        assert all((x[steps:] == 77).all() for x in out[:2])
        assert bits([out[2][steps:]]) == bits([ratio[steps:]])


def columns(T: int = 4, N: int = 6) -> dict[str, Any]:
    """Good arguments of ``fill_gae``."""
    grid = grid_of(drawn(5, T, N, ends=0.3, unreal=0.0))
    return grid._asdict() | {name: np.zeros((T, N), np.float32) for name in ("advantage", "ret")}


@pytest.mark.parametrize("name", list(columns()))
@pytest.mark.parametrize("how", ["row less", "env less", "axis", "dtype", "gaps", "swapped", "list", "number", "none"])
def test_a_column_that_does_not_fit_is_refused(name: str, how: str) -> None:
    given = columns()
    x = given[name]
    wide = np.zeros((len(x), 12), x.dtype)
    given[name] = {
        "row less": x[1:],
        "env less": np.ascontiguousarray(x[:, 1:]),
        "axis": x.ravel(),
        "dtype": x.astype(np.float64),
        "gaps": wide[:, ::2],
        "swapped": x.astype(x.dtype.newbyteorder()) if x.dtype != bool else x.astype(np.int8),
        "list": x.tolist(),
        "number": 3,
        "none": None,
    }[how]
    if how == "none" and name in ("final_value", "mask"):
        given["truncated"][:] = False
        assert core.fill_gae(*given.values(), 4, 0.9, 0.9) == -1
    else:
        with pytest.raises((ValueError, TypeError)):
            core.fill_gae(*given.values(), 4, 0.9, 0.9)


def test_other_numbers_of_steps_and_results_that_cannot_be_written_are_refused() -> None:
    for steps in (-1, 5, 2**62):
        with pytest.raises(ValueError, match="columns"):
            core.fill_gae(*columns().values(), steps, 0.9, 0.9)
    for name in ("advantage", "ret"):
        given = columns()
        given[name].flags.writeable = False
        with pytest.raises(ValueError, match="columns"):
            core.fill_gae(*given.values(), 4, 0.9, 0.9)


def test_a_grid_consists_of_plain_tensors_of_one_shape() -> None:
    block = drawn(6, 4, 6)
    good = returns.Grid(*(tensor(block[name]) for name in returns.Grid._fields))
    ratio = torch.ones(4, 6)
    assert core.is_grid(*good)
    assert core.is_grid(*good, ratio)
    assert core.is_grid(*good._replace(value=None, final_value=None, mask=None))
    for name in returns.Grid._fields:
        x: Tensor = getattr(good, name)
        for other in (x.numpy(), x[1:], torch.cat([x, x]), x[:, 1:], x.mT.contiguous().mT, x.double(), x.to("meta"), 3):
            assert not core.is_grid(*good._replace(**{name: other}))
        assert name in ("value", "final_value", "mask") or not core.is_grid(*good._replace(**{name: None}))
    assert not core.is_grid(*good, ratio.double())
    assert not core.is_grid(*good, ratio[1:])


def test_other_dtypes_devices_and_layouts_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for name in ("fill_gae", "fill_returns", "fill_vtrace"):
        monkeypatch.setattr(returns, name, lambda *_args, name=name: called.append(name) or -1)
    for name in ("_gae", "_discounted_return", "_vtrace"):
        monkeypatch.setattr(returns, name, lambda *_args, name=name: called.append(name))
    x, flags = torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.bool)
    for number, flag in (
        (x, flags),
        (x.double(), flags),
        (x.to("meta"), flags.to("meta")),
        (x, flags[:1].expand(2, 2)),
    ):
        value = torch.zeros(3, 2, dtype=number.dtype, device=number.device)
        grid = returns.Grid(number, value, flag, flag, None, None)
        returns.gae(grid, 0.9, 0.9)
        returns.discounted_return(grid, 0.9)
        returns.vtrace(number, grid, 0.9, 0.9, 1.0, 1.0)
    compiled, plain = ["fill_gae", "fill_returns", "fill_vtrace"], ["_gae", "_discounted_return", "_vtrace"]
    assert called == [*compiled, *plain, *plain, *plain]


def test_no_number_comes_back_along_a_trace_of_0_elsewhere() -> None:
    reward, value, flag = torch.zeros(5, 1), torch.zeros(6, 1), torch.zeros(5, 1, dtype=torch.bool)
    reward[3] = math.nan
    with far_device():
        columns = [x.to(ELSEWHERE) for x in (torch.ones(5, 1), reward, value, flag, flag)]
        _, target = relive.returns.vtrace(*columns, gamma=0.9, lam=0.0)
        assert target.cpu().isnan().flatten().tolist() == [False, False, False, True, False]
