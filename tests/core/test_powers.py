"""Powers: the compiled ones and those of tensors have the bits of the definition, which is near the true number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from definitions.powers import power, powers
from relive import core
from relive.core import numbers

EXPONENTS = (0.0, 0.3, 0.5, 0.6, 1.0, 2.0, 3.7, -0.4, -1.0, 40.0, 1e300, -1e300)


def bases() -> np.ndarray:
    """Positive numbers of all sizes, subnormal ones among them, and those at which the steps of the rule change."""
    rng = np.random.default_rng(0)
    edges = np.array([1.0, 2.0**0.5, 0.5, 2.0**-1022, 2.0**-1023, 5e-324, 1.7e308, 0.0, np.inf, np.nan])
    near = np.concatenate([np.nextafter(edges, 0), edges, np.nextafter(edges, np.inf)])
    return np.concatenate([near, rng.gamma(1.0, 2.0, 200), 10.0 ** rng.uniform(-320, 308, 200)])


@pytest.mark.parametrize("a", EXPONENTS)
def test_powers_of_tensors_have_the_bits_of_the_definition(a: float) -> None:
    x = bases()
    found = numbers.power(torch.from_numpy(x), torch.tensor(a, dtype=torch.float64)).numpy()
    wanted = np.array([power(base, a) for base in x])
    assert (np.isnan(found) == np.isnan(wanted)).all()  # no rule says which NaN it is
    assert np.nan_to_num(found).tobytes() == np.nan_to_num(wanted).tobytes()


@pytest.mark.parametrize("a", EXPONENTS)
@pytest.mark.parametrize("eps", [1e-6, 1.0, 1e-320])
def test_compiled_powers_have_the_bits_of_the_definition(a: float, eps: float) -> None:
    with np.errstate(over="ignore"):
        errors = np.nan_to_num(bases(), posinf=0.0).astype(np.float32)
    errors = errors[np.isfinite(errors)]
    found = np.empty(len(errors))
    core.powers(errors, a, eps, found)
    assert found.tobytes() == np.array(powers(errors, a, eps)).tobytes()


@pytest.mark.parametrize("a", [0.3, 0.5, 0.6, 2.0, 3.7, -0.4, -1.0])
def test_powers_are_near_the_true_ones(a: float) -> None:
    if np.finfo(np.longdouble).nmant < 63:
        pytest.skip("this machine has no wider numbers to compare with")
    x = bases()
    x = x[(x > 0) & (x < np.inf)]
    with np.errstate(all="ignore"):
        true = x.astype(np.longdouble) ** np.longdouble(a)
    plain = (true > 2.3e-308) & (true < 1.7e308)
    found = np.array([power(base, a) for base in x])
    assert np.abs(found[plain] / true[plain] - 1).max() < 4 * 2.0**-53


def test_random_numbers_of_tensors_are_those_of_the_core() -> None:
    seeds = [0, 1, 2**63, 2**64 - 1, 12345]
    for seed in seeds:
        for counter in (0, 1, 999):
            stream = core.key(seed, counter)
            mixed = torch.tensor([numbers.signed(core.mix(seed))])
            assert numbers.mix(torch.tensor([numbers.signed(seed)])).equal(mixed)
            mine = numbers.stream_of(mixed, torch.tensor([counter]))
            assert int(mine) % 2**64 == stream
            wanted = np.empty(50)
            core.masses(stream, False, 1.0, wanted)
            assert (
                numbers.uniform(mine, torch.arange(1, 51), torch.tensor([numbers.GOLDEN])).tolist() == wanted.tolist()
            )
