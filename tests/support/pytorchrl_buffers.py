"""Buffers of PyTorchRL's kinds, and steps for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from compat.pytorchrl_play import (
    GAMMA,
    NAMES,
    STEP,
    parts,
)
from relive.compat import pytorchrl as ours
from relive.compat.base import mapped


def made(
    name: str, size: int, *args: Any, recurrent: bool = False, overlap: float = 0.0, gamma: float = GAMMA,
    length: int = 4, **options: Any,
) -> Any:  # fmt: skip
    factory = getattr(ours, NAMES.get(name, name)).create_factory(size, *args, **{"seed": 0, **options})
    return factory(*parts(recurrent, overlap, length, gamma))


def stacked(steps: list[dict[str, Any]], key: str) -> Any:
    """One key of steps, ``[T, N, ...]``, or a dictionary."""
    first, *others = [step[key] for step in steps]
    return mapped(lambda *values: np.stack(values), first, *others)


def memory(steps: list[dict[str, Any]], size: int) -> dict[str, Any]:
    """All memory by key as the original lays it out: step t at t modulo ``size``, zeros where there is none."""
    blank = {key: mapped(torch.zeros_like, steps[0][key]) for key in STEP}
    at = {t % size: step for t, step in enumerate(steps)}
    return {key: stacked([at.get(place, blank) for place in range(size)], key) for key in STEP}


def part(data: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    return {key: mapped(lambda value: value[start:end], value) for key, value in data.items()}


def one_by_one(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Steps of all envs as a batch."""
    found = {key: stacked(steps, key) for key in STEP}
    return {key: mapped(lambda x: x.reshape(-1, *x.shape[2:]), value) for key, value in found.items()}
