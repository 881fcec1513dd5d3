"""Windows and random orders of a rollout, on any device: compiled code on the CPU, torch elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._core import copy_windows, key, permute
from ._core import mark_windows as marks_of
from .numbers import GOLDEN, signed, uniform


def episodes_on_device(done: Tensor, real: Tensor, ended: Tensor) -> tuple[Tensor, Tensor]:
    """``episode_starts`` in torch: the first step of each episode, ``[T, N]``, and where the newest has ended, ``[N]``.

    A step that is not real and ends no episode changes nothing, so each step is after the newest one of the others.
    """
    time = torch.arange(1, len(done) + 1, device=done.device)[:, None]
    newest = torch.where(done | real, time, 0).cummax(0).values
    states = torch.cat([ended[None], torch.cat([ended[None], done]).gather(0, newest)])
    return real & states[:-1], states[-1]


def gather_windows(source: Tensor, first: Tensor, step: int, lengths: Tensor, pad: Tensor, length: int) -> Tensor:
    """Copy windows out of rows, and fill each up with padding.

    Args:
        source: uint8 ``[R, W]``; on the CPU, each row in one piece.
        first: int64 ``[B]``, the first row of each window; its next rows are ``first + step``, ``first + 2 step``, ...
        step: the distance in rows from one step of a window to the next.
        lengths: int64 ``[B]``, how many rows each window has.
        pad: uint8 ``[W]``, the row that fills a window up.
        length: rows of every window with its padding.

    Returns:
        uint8 ``[B, length, W]``.
    """
    if source.is_cpu:
        # NumPy asks for huge pages and torch does not; mapping pages of 4 kB would take as long as the copy
        out = np.empty((len(first), length, source.shape[1]), np.uint8)
        copy_windows(source.numpy(), first.numpy(), step, lengths.numpy(), pad.numpy(), out)
        return torch.from_numpy(out)
    return gather_on_device(source, first, step, lengths, pad, length)


def gather_on_device(source: Tensor, first: Tensor, step: int, lengths: Tensor, pad: Tensor, length: int) -> Tensor:
    """:func:`gather_windows` in torch."""
    time = torch.arange(length, device=source.device)
    inside = time < lengths[:, None]
    index = torch.where(inside, first[:, None] + time * step, 0)
    rows = source.index_select(0, index.view(-1)).view(*index.shape, -1)
    return torch.where(inside[..., None], rows, pad)


def mark_windows(lengths: Any, is_start: Any, length: int) -> tuple[Tensor, Tensor]:
    """Mark the rows of windows that begin an episode (only first rows can), and those that are steps to learn from.

    Args:
        lengths: int64 ``[B]``, how many rows each window has; the rest is padding. An array, or a tensor of any device.
        is_start: the same, 1 where the first row begins an episode.
        length: rows of the batch.

    Returns:
        Both, bool ``[B, length]``.
    """
    if isinstance(lengths, Tensor) and not lengths.is_cpu:
        return mark_on_device(lengths, is_start, length)
    marks = marks_of(np.asarray(lengths), np.asarray(is_start), length)
    starts, mask = torch.from_numpy(marks).unbind()
    return starts, mask


def mark_on_device(lengths: Tensor, is_start: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """:func:`mark_windows` in torch."""
    time = torch.arange(length, device=lengths.device)
    return (time == 0) & (is_start[:, None] == 1), time < lengths[:, None]


def permutation(
    n: int, seed: int, counter: int, device: torch.device | None = None, by: Callable[..., Tensor] | None = None
) -> Tensor:
    """0..n-1 (int64 ``[n]``) in an order that depends on (seed, counter) alone, alike on every device; in RAM if None.

    It is made where it is wanted, without waiting, ``by`` :func:`permute_on_device` or something that does the same.
    """
    if device is None or device.type in ("cpu", "mps"):  # the latter has no float64
        order = np.empty(n, np.int64)
        permute(seed, counter, order)
        made = torch.from_numpy(order)
        return made if device is None else made.to(device)
    stream, golden = (torch.full((1,), word, device=device) for word in (signed(key(seed, counter)), GOLDEN))
    return (by or permute_on_device)(n, stream, golden)


def permute_on_device(n: int, stream: Tensor, golden: Tensor) -> Tensor:
    """:func:`permutation` of a stream of random numbers in torch operations of fixed shapes.

    ``stream`` and ``golden`` are int64 ``[1]``, as :func:`relive.core.numbers.uniform` takes them.

    Fisher-Yates swaps one place after another. Here all swaps are known at once, and each place looks back for what was
    put there. Swap s is of place n - 1 - s, which is final then, with place ``other[s]``, which is not above it. So a
    place was last written by the latest earlier swap that had it as ``other``, which put there what the final place of
    that swap had held.
    """
    swap = torch.arange(n, device=stream.device)
    place = n - 1 - swap
    other = (uniform(stream, swap + 1, golden) * (place + 1)).to(torch.int64)
    grouped, order = other.sort(stable=True)
    before = torch.where(grouped[1:] == grouped[:-1], order[:-1], -1)
    earlier = torch.full_like(swap, -1).scatter_(0, order[1:], before)  # the latest swap before with the same ``other``
    latest = torch.full_like(swap, -1).scatter_reduce_(0, other, swap, "amax").flip(0)  # that had this final place
    source = torch.where(latest < 0, swap, latest)  # or itself, whose place holds its own number or is never asked for
    for _ in range((n - 1).bit_length()):  # each time twice as many swaps back
        source = source.index_select(0, source)
    held = place.index_select(0, source.index_select(0, earlier.clamp(min=0)))
    return torch.where(earlier < 0, other, held).flip(0)
