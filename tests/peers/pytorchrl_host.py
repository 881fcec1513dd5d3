"""PyTorchRL's storage modules without its environments, which need an old gym."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

__all__ = ["algorithm", "host"]


def host(name: str) -> Any:
    """The class of a buffer, by the name of its module: replay, nstep, per, ere, her."""
    found = _module(f"agent.storages.off_policy.{name}_buffer")
    names = {"replay": "ReplayBuffer", "nstep": "NStepReplayBuffer", "per": "PERBuffer", "ere": "EREBuffer"}
    return getattr(found, names.get(name, "HERBuffer"))


def algorithm(name: str) -> Any:
    """The class of an off-policy algorithm: DDPG, TD3, SAC."""
    return getattr(_module(f"agent.algorithms.off_policy.{name.lower()}"), name)


def _module(name: str) -> Any:
    """A module, without what its packages would import."""
    spec = find_spec("pytorchrl")
    assert spec is not None, "pytorchrl is not installed; see benchmarks/requirements-nodeps.txt"
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    parents = name.split(".")[:-1]
    for package in (parents[: end + 1] for end in range(len(parents))):
        full = f"pytorchrl.{'.'.join(package)}"
        if full not in sys.modules:
            module = ModuleType(full)
            module.__path__ = [str(folder.joinpath(*package))]
            sys.modules[full] = module
    if not hasattr(np, "Inf"):
        setattr(np, "Inf", np.inf)  # noqa: B010 - EREBuffer and HERBuffer fail on NumPy 2 without it
    return import_module(f"pytorchrl.{name}")
