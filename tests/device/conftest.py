"""The devices on which replays are tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from elsewhere import PLACES, place


@pytest.fixture(params=PLACES)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Each device on which a replay has its rows; the CPU is made one."""
    with place(request.param) as chosen:
        yield chosen
