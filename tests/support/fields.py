"""Fields of every dtype, and columns of noise for them."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from relive import Field

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip
FIELDS = st.builds(Field, st.lists(st.integers(0, 4), max_size=3).map(tuple), st.sampled_from(DTYPES))
LEAVES = st.lists(FIELDS, min_size=1, max_size=9).map(lambda fields: {(f"f{i}",): x for i, x in enumerate(fields)})


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Random bits; bools are 0 or 1."""
    rng = np.random.default_rng(seed)
    if dtype is torch.bool:
        return torch.from_numpy(rng.integers(0, 2, shape).astype(bool))
    raw = rng.integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape) if len(raw) else torch.empty(shape, dtype=dtype)


def bits(x: Tensor) -> bytes:
    """The bytes of a tensor in the order of its elements, so that NaN equals itself."""
    packed = torch.empty(x.shape, dtype=x.dtype).copy_(x)
    return packed.flatten().view(torch.uint8).numpy().tobytes() if x.numel() else b""
