"""The devices on which replays are tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from elsewhere import ELSEWHERE, far_device

PLACES = ["cpu", "stand-in", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=PLACES)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Each device on which a replay has its rows; the CPU is made one."""
    if request.param == "stand-in":
        with far_device():
            yield ELSEWHERE
        return
    yield torch.empty(0, device=request.param).device
