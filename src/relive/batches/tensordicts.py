"""Named tensors as a TensorDict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..steps.trees import Path, nest

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["as_tensordict"]


@cache
def _tensordict() -> Any:
    # importing tensordict takes as long as importing torch, so it waits for the first batch
    from tensordict import TensorDict

    # What is made here fits together. To check that again takes eight times as long as all the rest, a fifth of what
    # a small batch costs; the way around it has no public name.
    return getattr(TensorDict, "_new_unsafe", TensorDict)


def as_tensordict(
    leaves: Mapping[Path, Tensor], batch_size: Sequence[int], device: torch.device | None = None
) -> TensorDict:
    """The tensors, each of which begins with ``batch_size``, as a nested TensorDict.

    Nothing is copied but what is not on ``device``, if one is given.
    """
    if device is not None:
        leaves = {path: leaf.to(device) for path, leaf in leaves.items()}
    return _tensordict()(nest(leaves), batch_size=torch.Size(batch_size), device=device)
