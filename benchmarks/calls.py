"""Counts the function calls that Python makes for one operation, which no load on the machine changes."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

HERE = str(Path(__file__).parent)


def count(run: Callable[[], None]) -> dict[str, int]:
    """How many functions written in Python one `run` calls, and how many built-in ones.

    The frames of the benchmarks themselves do not count, and neither do the built-in functions that they call. Compiled
    functions of Cython, nanobind and numba are no built-in functions: Python does not see what they call.
    """
    calls, builtins = 0, 0

    def trace(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal calls, builtins
        if frame.f_code.co_filename.startswith(HERE):
            return
        if event == "call":
            calls += 1
        elif event == "c_call":
            builtins += 1

    before = sys.getprofile()
    sys.setprofile(trace)
    try:
        run()
    finally:
        sys.setprofile(before)
    return {"calls": calls, "builtins": builtins}
