"""The n-step windows of a ring on a device, with single frames stacked, as a batch has them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..memory.device import DeviceRows
from ..steps.schema import Path
from .ring import DeviceRing, Spots


class Stack(NamedTuple):
    """How frames are stacked."""

    fields: tuple[Path, ...]
    depth: int
    repeat: bool
    """True if an episode's first frame stands for those before it, and zeros otherwise."""


class WindowForm(NamedTuple):
    """How batches of n-step windows are read."""

    n: int
    gamma: float
    stack: Stack | None = None


def read_windows(
    store: DeviceRows, ring: DeviceRing, goals: object, spots: Spots, stream: Tensor, form: WindowForm
) -> dict[Path, Tensor]:
    """The fields ``[B, ...]`` of the windows that start at ``spots``."""
    windows = ring.windows(spots, form.n, form.gamma)
    stacks: dict[Path, tuple[Tensor, Tensor]] = {}
    if form.stack is not None:
        fields, depth, repeat = form.stack
        frames = ring.frames(spots.places, depth, repeat), ring.frames(windows.last, depth, repeat)
        stacks = dict.fromkeys(fields, frames)
    return store.read_planned(spots.places, windows.last, windows.fields, stacks)
