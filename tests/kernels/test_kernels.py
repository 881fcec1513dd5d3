"""Which twin is called when."""

from __future__ import annotations

import pytest
import torch

from relive import kernels
from relive.kernels import cpu, reference


def test_float32_on_the_cpu_goes_to_the_fast_twin_and_all_else_to_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    names = ["gae", "discounted_return", "vtrace"]
    for twin, label in ((cpu, "fast"), (reference, "plain")):
        for name in names:
            monkeypatch.setattr(twin, name, lambda *_args, label=label, name=name: called.append(f"{label} {name}"))
    for x in (torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2, device="meta")):
        grid = kernels.Grid(x, x, x, x, x, x)
        kernels.gae(grid)
        kernels.discounted_return(grid, 1.0)
        kernels.vtrace(x, grid)
    want = [f"{label} {name}" for label in ("fast", "plain", "plain") for name in names]
    assert called == want


def test_permutations_are_made_on_the_cpu_by_the_fast_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "permutation", None)
    assert kernels.permutation(5, 1, 2).device.type == "cpu"
