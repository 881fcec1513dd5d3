"""A run that is played under torch's own defaults and under others, which a program may set for all that it does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import relive
from support.overwrites import Hands

RELIVE, TORCH = (str(Path(package.__file__).parent) for package in (relive, torch))
OTHERS = "device", "dtype"
"""A default device that the buffers are not on, and float64 as the default dtype."""


class _Elsewhere(TorchFunctionMode):
    """What is not called by relive keeps torch's own defaults, as env, policy and user make tensors too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, frame = kwargs or {}, sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(TORCH):
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename.startswith(RELIVE):
            return func(*args, **kwargs)
        if func in _device_constructors() and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "cpu"}
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            return func(*args, **kwargs)
        finally:
            torch.set_default_dtype(default)


@contextmanager
def other_default(kind: str) -> Iterator[None]:
    """One of OTHERS, for what relive itself calls."""
    if kind == "device":
        torch.set_default_device("meta")
    else:
        torch.set_default_dtype(torch.float64)
    try:
        with _Elsewhere():
            yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def play_under(kind: str, run: Callable[[Hands], None]) -> None:
    """Play a run plainly and under one of OTHERS, and require that both come to the same, to the bit."""
    plain, other = Hands(False), Hands(False)
    run(plain)
    with other_default(kind):
        run(other)
    assert plain.facts, "nothing was noted"
    assert [name for name, _ in plain.facts] == [name for name, _ in other.facts]
    changed = [name for (name, one), (_, two) in zip(plain.facts, other.facts, strict=True) if one != two]
    assert not changed, f"the default {kind} has changed {changed}"
