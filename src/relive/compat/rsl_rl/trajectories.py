"""rsl_rl's two conversions between steps ``[T, N]`` and padded trajectories ``[T, K]``."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...batches.sequences import WHOLE
from ...errors import ShapeError
from ...rollout.episodes import ENV, LENGTH, START, Flags, cut
from ...steps.arrays import as_host

__all__ = ["split_and_pad_trajectories", "unpad_trajectories"]


def split_and_pad_trajectories(tensor: Any, dones: Tensor) -> tuple[Any, Tensor]:
    """Cut steps at dones into trajectories that are padded with zeros to T.

    Args:
        tensor: a tensor or TensorDict ``[T, N, ...]``; gradients go through.
        dones: ``[T, N]`` or ``[T, N, 1]``.

    Returns:
        the trajectories ``[T, K, ...]``, env by env and in the order of time; and masks, bool ``[T, K]``, False in
            padding.

    Raises:
        ShapeError: ``tensor`` and ``dones`` have other numbers of steps or envs.
    """
    steps, envs = (int(size) for size in tensor.shape[:2])
    if tuple(dones.shape) not in ((steps, envs), (steps, envs, 1)):
        raise ShapeError(f"dones: expected {(steps, envs)}, with or without a last axis of 1, got {tuple(dones.shape)}")
    done = as_host(dones.reshape(steps, envs)) != 0
    flags = Flags(done, np.ones_like(done), np.ones(envs, np.bool_))
    windows = torch.from_numpy(cut(flags, None, WHOLE, drop_tail=False, complete=False)).to(dones.device)
    time = torch.arange(steps, device=dones.device).unsqueeze(1)
    masks = time < windows[:, LENGTH]
    rows = ((windows[:, START] + time) * envs + windows[:, ENV]).where(masks, 0)
    padded = tensor.flatten(0, 1)[rows]
    if isinstance(padded, Tensor):
        return _blank(padded, masks), masks
    return padded.apply(partial(_blank, masks=masks)), masks


def _blank(padded: Tensor, masks: Tensor) -> Tensor:
    return padded.masked_fill(~masks.view(*masks.shape, *[1] * (padded.dim() - 2)), 0)


def unpad_trajectories(trajectories: Any, masks: Tensor) -> Any:
    """The inverse: trajectories ``[T, K, ...]``, a tensor or TensorDict, as steps ``[T, N, ...]``."""
    steps = trajectories.transpose(0, 1)[masks.transpose(0, 1)]
    rows = trajectories.shape[0]
    return steps.unflatten(0, (len(steps) // rows, rows)).transpose(0, 1)
