"""Named tensors as a TensorDict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..steps.trees import Path

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["as_tensordict"]


@cache
def _tensordict() -> tuple[Any, dict[str, Any]]:
    """What makes a TensorDict, and its options."""
    # importing tensordict takes as long as importing torch, so the first batch does it
    from tensordict import TensorDict

    # The shapes are known to fit. Checking them again takes eight times as long as the rest, and a fifth of the time
    # of a small batch. The constructor without checks has no public name. It need not look for dicts among the members.
    make: Any = getattr(TensorDict, "_new_unsafe", TensorDict)
    return make, {"nested": False} if "nested" in signature(make).parameters else {}


def as_tensordict(
    leaves: Mapping[Path, Tensor], batch_size: Sequence[int], device: torch.device | None = None
) -> TensorDict:
    """Tensors whose first axes are ``batch_size``, as a nested TensorDict.

    With a ``device``, tensors that are elsewhere are copied to it; the others are shared.
    """
    if device is not None:
        leaves = {path: leaf.to(device) for path, leaf in leaves.items()}
    size, (make, options) = torch.Size(batch_size), _tensordict()
    tree: dict[str, Any] = {}
    try:
        for (name,), leaf in leaves.items():  # as most often; takes a third of ``dict(zip(...))``
            tree[name] = leaf
    except ValueError:  # some are nested
        tree = _tree(leaves, size, device)
    return make(tree, size, device, **options)


def _tree(leaves: Mapping[Path, Tensor], size: torch.Size, device: torch.device | None) -> dict[str, Any]:
    """The members of the TensorDict of some leaves, in the order of the first leaf of each."""
    tree, branches = dict[str, Any](), dict[str, dict[Path, Tensor]]()
    for path, leaf in leaves.items():
        name, inner = path[0], path[1:]
        if not inner:
            tree[name] = leaf
        elif name in branches:
            branches[name][inner] = leaf
        else:
            tree[name] = branches[name] = {inner: leaf}
    for name, members in branches.items():
        tree[name] = as_tensordict(members, size, device)
    return tree
