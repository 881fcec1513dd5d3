"""Random numbers and powers in torch operations, with the bits of the compiled core.

Every function takes tensors of any shape and gives new ones on their device; none waits for it. The comments of
``src/core/random.hpp`` and ``src/core/power.hpp`` say what the numbers are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def signed(word: int) -> int:
    """A word of 64 bits as int64 has it."""
    return word - 2**64 if word >= 2**63 else word


GOLDEN = signed(0x9E3779B97F4A7C15)
"""The distance between two states of splitmix64."""

FIRST, SECOND = signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)


def _right(z: Tensor, bits: int) -> Tensor:
    """z shifted to the right as an unsigned number."""
    return (z >> bits) & (2 ** (64 - bits) - 1)


def mix(z: Tensor) -> Tensor:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014) of int64; products count modulo 2**64."""
    z = (z ^ _right(z, 30)) * FIRST
    z = (z ^ _right(z, 27)) * SECOND
    return z ^ _right(z, 31)


def stream_of(mixed: Tensor, counter: Tensor) -> Tensor:
    """The stream of random numbers that belongs to draw number ``counter`` of a seed, of which ``mixed`` is the mix."""
    return mix(mixed + GOLDEN * counter)


def uniform(stream: Tensor, nth: Tensor, golden: Tensor) -> Tensor:
    """Number ``nth`` of a stream, float64 in [0, 1).

    ``golden`` is a tensor of :data:`GOLDEN`. Compilers take a plain number times a position for the computation of an
    index, which may never overflow and may be done with 32 bits; this one overflows on purpose.
    """
    return _right(mix(stream + golden * nth), 11).to(torch.float64) * 2.0**-53


FARTHEST = 1100.0
TERMS = tuple(1.0 / k for k in range(19, 2, -2))
FACTORIALS = tuple(float(math.factorial(k)) for k in range(12, -1, -1))


def power(x: Tensor, a: Tensor) -> Tensor:
    """x**a of float64, as ``raise`` of ``src/core/power.hpp``: the same operations in the same order."""
    subnormal = x < torch.finfo(torch.float64).tiny
    bits = torch.where(subnormal, x * 2.0**54, x).view(torch.int64)
    e = ((bits >> 52) - torch.where(subnormal, 1077, 1023)).to(torch.float64)
    m = ((bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000).view(torch.float64)
    large = m > math.sqrt(2.0)
    m, e = torch.where(large, m * 0.5, m), torch.where(large, e + 1.0, e)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    total = torch.full_like(s, 1.0 / 21.0)
    for term in TERMS:
        total = total * z + term
    log = (s + s * z * total) * (2.0 / math.log(2.0))
    upper = (a.view(torch.int64) & ~0x7FFFFFF).view(torch.float64)
    n = torch.round(torch.clamp(a * e + a * log, -FARTHEST, FARTHEST))
    rest = torch.clamp((upper * e - n) + ((a - upper) * e + a * log), -1.0, 1.0)
    t = rest * math.log(2.0)
    value = torch.full_like(t, 1.0 / math.factorial(13))
    for factorial in FACTORIALS:
        value = value * t + 1.0 / factorial
    whole = n.to(torch.int64)
    half = whole >> 1
    value = value * _two_to(half) * _two_to(whole - half)
    plain = (x > 0.0) & (x < math.inf)
    return torch.where(plain, torch.where(a == 1.0, x, value), torch.pow(x, a))


def _two_to(k: Tensor) -> Tensor:
    return ((k + 1023) << 52).view(torch.float64)
