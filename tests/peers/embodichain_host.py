"""EmbodiChain's learning modules without its simulator, and without a logger of the web."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["host"]


def host(name: str) -> Any:
    """A module of its reinforcement learning: buffer, algo, collector, models."""
    spec = find_spec("embodichain")
    assert spec is not None, "install embodichain without dependencies: benchmarks/requirements-nodeps.txt"
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    for part in ("learning", "learning.rl"):  # packages whose __init__ would import the rest
        full = f"embodichain.{part}"
        if full not in sys.modules:
            package = ModuleType(full)
            package.__path__ = [str(folder.joinpath(*part.split(".")))]
            sys.modules[full] = package
    return import_module(f"embodichain.learning.rl.{name}")
