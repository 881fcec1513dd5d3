"""EmbodiChain's learning modules, which do without its simulator."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = ["host"]


def host(name: str) -> Any:
    """A module of its reinforcement learning: buffer, algo, collector, policies."""
    assert find_spec("embodichain"), "install embodichain without dependencies: benchmarks/requirements-nodeps.txt"
    return import_module(f"embodichain.learning.rl.{name}")
