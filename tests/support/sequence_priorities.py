"""Views of windows, and worlds that they are read from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from relive import (
    Prioritized,
    ReplayBuffer,
    SequenceBatch,
)
from support import internals


def check_priorities(sampler: Prioritized, batch: SequenceBatch, errors: torch.Tensor, buffer: ReplayBuffer) -> None:
    """The last error of each sequence, reduced over its real steps, is what its priority is made of."""
    by_sequence, mask = (x if not batch.time_first else x.T for x in (errors, batch["mask"]))
    want: dict[int, float] = {}
    for index, row, real in zip(batch["index"].tolist(), by_sequence, mask, strict=True):
        sizes = row[real].abs().double()
        error = sampler.eta * sizes.max() + (1 - sampler.eta) * sizes.mean()
        want[index] = float((error + sampler.eps) ** sampler.alpha)
    places, _ = internals.ring(buffer).find(np.array(list(want)))
    assert internals.tree(sampler).get(places).tolist() == pytest.approx(list(want.values()), rel=1e-5)
