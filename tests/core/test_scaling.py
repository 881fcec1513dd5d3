"""Numbers scaled to mean 0 and deviation 1: compiled code beside the definition, to the bit, wherever they lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from definitions.scaling import scaled
from relive import core, returns

EPS = 1e-8
SHAPES = [(0,), (1,), (2,), (7,), (8,), (9,), (1000,), (3, 5), (1, 8), (24, 17), (5, 0), (2, 3, 4)]


def drawn(shape: tuple[int, ...], kept: float | None, seed: int) -> tuple[Tensor, Tensor | None]:
    rng = np.random.default_rng(seed)
    x = torch.from_numpy((rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4, shape) + 5).astype(np.float32))
    return x, None if kept is None else torch.from_numpy(np.asarray(rng.random(shape) < kept))


def in_rows(x: Tensor, width: int) -> Tensor:
    """The same numbers, each within a row of others."""
    rows = (
        torch.full((*x.shape, width), -7.0, dtype=x.dtype) if x.dtype is torch.float32 else x.new_ones(*x.shape, width)
    )
    rows[..., 2] = x
    return rows[..., 2]


@pytest.mark.parametrize("kept", [None, 0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_scaled_numbers_are_the_definitions_to_the_bit(shape: tuple[int, ...], kept: float | None) -> None:
    for seed in range(5):
        x, mask = drawn(shape, kept, seed)
        want = scaled(x.numpy(), None if mask is None else mask.numpy(), EPS)
        assert core.scale(x, mask, EPS)
        assert x.numpy().tobytes() == want.tobytes()


@pytest.mark.parametrize("kept", [None, 0.5])
@pytest.mark.parametrize("shape", [(1,), (9,), (300,), (3, 5), (24, 17)])
def test_numbers_in_packed_rows_are_scaled_where_they_lie_and_nothing_else_changes(
    shape: tuple[int, ...], kept: float | None
) -> None:
    x, mask = drawn(shape, kept, 3)
    want = scaled(x.numpy(), None if mask is None else mask.numpy(), EPS)
    packed = in_rows(x, 6)
    around = torch.as_strided(packed, (x.numel() * 6,), (1,), 0)
    before = around.clone()
    assert core.scale(packed, None if mask is None else in_rows(mask, 3), EPS)
    assert packed.numpy().tobytes() == want.tobytes()
    others = torch.arange(len(around)) % 6 != 2
    assert torch.equal(around[others], before[others])


@pytest.mark.parametrize("kept", [None, 0.5])
def test_numbers_are_added_in_the_order_of_memory_however_their_axes_are_turned(kept: float | None) -> None:
    x, mask = drawn((24, 17), kept, 4)
    turned, turned_mask = in_rows(x, 4).T, None if mask is None else mask.T
    assert core.scale(turned, turned_mask, EPS)
    assert (
        np.ascontiguousarray(turned.T.numpy()).tobytes()
        == scaled(x.numpy(), None if mask is None else mask.numpy(), EPS).tobytes()
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_counts_only_where_its_mask_is_true(bad: float) -> None:
    x, mask = torch.tensor([1.0, bad, 2.0, 4.0]), torch.tensor([True, False, True, True])
    spoilt = x.clone()
    assert core.scale(x, mask, EPS)
    assert x[1] == 0
    assert torch.equal(x, torch.from_numpy(scaled(np.array([1, 0, 2, 4], np.float32), mask.numpy(), EPS)))
    assert core.scale(spoilt, None, EPS)
    assert spoilt[1].isnan()


def test_what_is_not_float32_in_ram_is_left_to_torch_and_comes_to_the_same() -> None:
    x, mask = drawn((24, 17), 0.5, 5)
    assert mask is not None
    for other in (x.double(), x.half(), x.bfloat16(), x.to("meta")):
        before = other.clone()
        assert not core.scale(other, None, EPS)
        assert other.is_meta or torch.equal(other, before)
    for wrong in (mask[:, :16], mask.int(), mask[0]):
        assert not core.scale(x, wrong, EPS)
    assert not core.scale(x[None, :, ::2], None, EPS)
    for given in (None, mask):
        double = returns.scaled(x.double(), given)
        np.testing.assert_allclose(returns.scaled(x, given), double, rtol=1e-6, atol=1e-7)
        in_place = x.double()
        returns.scale(in_place, given)
        assert torch.equal(in_place, double)


def test_normalizing_changes_nothing_that_was_given_and_keeps_gradients() -> None:
    x, _ = drawn((9,), None, 6)
    before = x.clone()
    got = returns.normalize(x)
    assert torch.equal(x, before)
    parameter = x.clone().requires_grad_()
    learned = returns.normalize(parameter)
    learned.square().sum().backward()
    assert parameter.grad is not None
    torch.testing.assert_close(learned.detach(), got)


def test_a_rollout_without_a_critic_scales_its_advantage_and_not_its_return() -> None:
    columns = {"reward": torch.ones(4, 2), "terminated": torch.zeros(4, 2, dtype=torch.bool)}
    columns["truncated"] = columns["terminated"].clone()
    found = returns.MonteCarlo(gamma=1.0, normalize=True, critic=False)(**columns, mask=None)
    assert found["return"][:, 0].tolist() == [4, 3, 2, 1]
    assert found["advantage"].mean().abs() < 1e-6
