"""PyTorchRL's storage modules without its environments, which need an old gym."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

__all__ = ["host"]


def host(name: str) -> Any:
    """The class of a buffer, by the name of its module: replay, nstep, per, ere, her."""
    spec = find_spec("pytorchrl")
    assert spec is not None, "pytorchrl is not installed; see benchmarks/requirements-nodeps.txt"
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    for package in ("agent", "agent.storages", "agent.storages.off_policy"):
        full = f"pytorchrl.{package}"
        if full not in sys.modules:
            module = ModuleType(full)
            module.__path__ = [str(folder.joinpath(*package.split(".")))]
            sys.modules[full] = module
    if not hasattr(np, "Inf"):
        setattr(np, "Inf", np.inf)  # noqa: B010 - EREBuffer and HERBuffer fail on NumPy 2 without it
    found = import_module(f"pytorchrl.agent.storages.off_policy.{name}_buffer")
    names = {"replay": "ReplayBuffer", "nstep": "NStepReplayBuffer", "per": "PERBuffer", "ere": "EREBuffer"}
    return getattr(found, names.get(name, "HERBuffer"))
