"""Conversion: saved rows as rows of a buffer with other fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..memory.layout import BOOKKEEPING, row_layout
from ..steps.changes import Origin
from ..steps.schema import Field
from ..steps.trees import Path, dotted

__all__ = ["Conversion"]


class Conversion:
    """Turns packed rows and large fields into those of other fields; without changes, it returns them as they are.

    Args:
        saved: the saved leaves, with ``next_obs`` if each row has its own.
        leaves: the leaves of the new buffer.
        origins: where each leaf of the new schema comes from; None if nothing changes.
    """

    def __init__(
        self, saved: Mapping[Path, Field], leaves: Mapping[Path, Field], origins: Mapping[Path, Origin] | None
    ) -> None:
        self.saved, self._leaves = saved, leaves
        self._origins = None if origins is None else {path: _origin(origins, path) for path in leaves}
        self._old, large = row_layout(saved)
        self._new, _ = row_layout(leaves)
        self.large = tuple(path for path in saved if path in large)
        """The saved fields that are not in the packed rows."""

    def __call__(
        self, rows: Any, large: Mapping[Path, Tensor], under_way: Callable[[], Any]
    ) -> tuple[Any, dict[Path, Tensor]]:
        """The rows (uint8 ``[K, W]``) and large fields ``[K, *shape]`` for the new buffer.

        ``under_way`` is called if needed. It returns flags ``[K]``, True for the newest rows of running episodes. These
        rows and complete transitions have all fields. Other rows are final observations; their other fields hold
        arbitrary bytes.

        Raises:
            DoesNotFitError: a saved number does not fit into its new dtype.
        """
        if self._origins is None:
            return rows, dict(large)
        packed = np.zeros((len(rows), self._new.nbytes), np.uint8)
        old, new = self._old.tensors(np.ascontiguousarray(rows)), self._new.tensors(packed)
        for path in BOOKKEEPING:
            new[path].copy_(old[path])
        whole = torch.ones(len(rows), dtype=torch.bool)
        steps = (old["_stamp",] >= 0) | torch.from_numpy(under_way())
        saved, blocks = {**old, **large}, dict[Path, Tensor]()
        for path, origin in self._origins.items():
            used = whole if path[0] in ("obs", "next_obs") else steps
            values = origin.values(saved, len(rows), used, dotted(path))
            if path in new:
                new[path].copy_(values)
            else:
                blocks[path] = values.contiguous()
        return packed, blocks


def _origin(origins: Mapping[Path, Origin], path: Path) -> Origin:
    """Where a stored leaf comes from; a next observation comes from where the observation does."""
    if path[0] != "next_obs":
        return origins[path]
    origin = origins["obs", *path[1:]]
    return origin if origin.value is not None else origin._replace(source=("next_obs", *origin.source[1:]))
