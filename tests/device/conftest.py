"""The devices on which replays are tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from effort import in_ci
from elsewhere import PLACES, place


@pytest.fixture(params=[in_ci(name) if name == "stand-in" else name for name in PLACES])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Each device on which a replay has its rows; the CPU is made one.

    The stand-in takes three times as long, and finds what ``no_waiting`` does not, which is little.
    """
    with place(request.param) as chosen:
        yield chosen
