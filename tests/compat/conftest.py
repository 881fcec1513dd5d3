"""The drop-in modules by themselves: their tests run where the libraries that they stand in for are not installed."""

from __future__ import annotations

import sys

import pytest

HOSTS = (
    "agilerl", "embodichain", "fast_td3_utils", "holosoma", "pytorchrl", "rsl_rl", "sb3_contrib", "skrl",
    "stable_baselines3", "velora",
)  # fmt: skip


@pytest.fixture
def no_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing any of the libraries raises, even where it is installed."""
    for name in [*HOSTS, *(name for name in sys.modules if name.partition(".")[0] in HOSTS)]:
        monkeypatch.setitem(sys.modules, name, None)
