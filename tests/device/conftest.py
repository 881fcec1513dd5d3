"""The devices on which replays are tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from support.other_device import place, places
from support.tapes import TAPED, with_tapes


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Each device on which a replay has its rows; the CPU is made one, with and without graphs of its calls."""
    if request.param == TAPED:
        with with_tapes():
            yield torch.device("cpu")
    else:
        with place(request.param) as chosen:
            yield chosen


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with a device on each that it does not name itself."""
    named = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "device" in metafunc.fixturenames and "device" not in named:
        metafunc.parametrize("device", places(), indirect=True)
