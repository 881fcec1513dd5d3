"""Other defaults of torch change nothing that comes in from other libraries' files."""

from __future__ import annotations

from pathlib import Path

import pytest

from relive.exchange import from_velora
from support.defaults import OTHERS, play_under

FILES = Path(__file__).parents[1] / "fixtures" / "exchange" / "velora"


@pytest.mark.parametrize("default", OTHERS)
def test_a_velora_file_comes_in_the_same(default: str) -> None:
    play_under(default, lambda hands: hands.note("log", from_velora(FILES).fields))
