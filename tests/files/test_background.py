"""Saves in the background: one after another, and an error is raised once, wherever it comes from."""

from __future__ import annotations

import threading

import pytest

from relive.files.save import SaveHandle, Saves

SECONDS = 30


def test_an_error_that_comes_while_the_next_save_waits_is_raised_there_and_once() -> None:
    goes_on = threading.Event()

    def fail() -> None:
        assert goes_on.wait(SECONDS)
        raise OSError("the disk is full")

    saves = Saves()
    handle = saves.begin(SaveHandle("somewhere", fail))
    threading.Timer(0.05, goes_on.set).start()
    assert not handle.done
    with pytest.raises(OSError, match="the disk is full") as caught:
        saves.settle()
    assert any("the save before" in note for note in caught.value.__notes__)
    saves.settle()


def test_an_error_that_was_seen_is_not_raised_again() -> None:
    def fail() -> None:
        raise OSError("the disk is full")

    saves = Saves()
    handle = saves.begin(SaveHandle("somewhere", fail))
    with pytest.raises(OSError, match="the disk is full"):
        handle.wait(SECONDS)
    saves.settle()
