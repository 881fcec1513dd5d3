"""Named tensors as a TensorDict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..steps.trees import Path

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["Members", "as_tensordict"]


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


class Members:
    """The dicts of a nested TensorDict, which compiled code fills: the first has the fields, the others its branches.

    Args:
        paths: the fields in their order, each a name, or a branch and a name.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        places = [*paths]
        self._branches = tuple(dict.fromkeys(path[0] for path in places if len(path) > 1))
        self._fields: dict[str, Any] = dict.fromkeys(path[0] for path in places)
        inner = [[path[1] for path in places if len(path) > 1 and path[0] == name] for name in self._branches]
        self._members: list[dict[str, Any]] = [dict.fromkeys(names) for names in inner]
        self.into = {path: self._branches.index(path[0]) + 1 if len(path) > 1 else 0 for path in places}
        """Which dict has a field. There its name is the last of its path."""

    @staticmethod
    def suit(paths: Iterable[Path]) -> bool:
        """Whether no field is nested more deeply."""
        return all(len(path) <= 2 for path in paths)

    def empty(self) -> tuple[dict[str, Any], ...]:
        """New dicts. They have their names already, so that these stay in order."""
        return self._fields.copy(), *map(dict, self._members)

    def batch(self, found: tuple[dict[str, Any], ...], count: int) -> TensorDict:
        """The TensorDict of these dicts, which are full."""
        size, (make, options) = torch.Size((count,)), _tensordict()
        fields = found[0]
        for name, members in zip(self._branches, found[1:], strict=True):
            fields[name] = make(members, size, None, **options)
        return make(fields, size, None, **options)


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
