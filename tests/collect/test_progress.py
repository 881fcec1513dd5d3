"""The progress bar."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from gymnasium.vector import AutoresetMode

from relive import Collector
from support import tagged_envs
from support.tagged_collections import make_buffer, policy

# Progress


@pytest.fixture
def shown(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a collection shows; nothing of it may be on stdout."""

    def collect(progress: bool | None) -> str:
        envs = tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.always(3))
        Collector(envs, policy, make_buffer(envs, 37)).collect(progress=progress)
        out, err = capfd.readouterr()
        assert out == ""
        return err

    return collect


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_stderr_when_asked_for_and_not_when_not(
    shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1" if terminal else "")
    text = shown(progress=True)
    assert "collecting" in text
    assert "37" in text
    assert shown(progress=False) == ""
    assert shown(progress=None) == ""  # it took no two seconds
