"""Which byte of a packed row holds which field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..steps.arrays import numpy_dtype
from ..steps.schema import Field
from ..steps.trees import Path

__all__ = ["BOOKKEEPING", "LARGE_FIELD", "RowLayout", "batch_layout", "field_groups", "row_layout", "typed"]


BOOKKEEPING: dict[Path, Field] = {
    ("_stamp",): Field((), torch.int64),
    ("_step",): Field((), torch.int32),
    ("_order",): Field((), torch.int32),
}
"""What the ring notes with every row; its docstring says what they mean."""


RESULTS: dict[Path, Field] = {
    ("index",): Field((), torch.int64),
    ("next_index",): Field((), torch.int64),
    ("discount",): Field((), torch.float32),
    ("steps",): Field((), torch.int32),
}
"""What a batch says of its windows, besides the fields of a step."""


LARGE_FIELD = 1024
"""Bytes of a row's field from which packing it with the others gains nothing: it is a block of its own."""


Array = NDArray[Any]


class RowLayout:
    """Where each field lies inside a row of bytes.

    Groups of fields follow one another; each begins at a multiple of 16 and has its wide dtypes first, so that every
    field is aligned, and a group looks the same wherever it lies.
    """

    def __init__(self, *groups: Mapping[Path, Field]) -> None:
        self.fields: dict[Path, Field] = {}
        self.offsets: dict[Path, int] = {}
        self.starts: list[int] = []
        """Where each group begins, and where the row ends: it has that many bytes."""
        end = 0
        for group in groups:
            self.starts.append(end)
            for path, field in sorted(group.items(), key=lambda leaf: -leaf[1].dtype.itemsize):
                self.fields[path], self.offsets[path] = field, end
                end += field.nbytes
            end = -(-end // 16) * 16
        end = max(end, 16)  # rows without bytes have no views
        self.starts.append(end)
        self.nbytes = end
        self._names = {path: str(i) for i, path in enumerate(self.fields)}
        self._foreign = {
            path: field.dtype
            for path, field in self.fields.items()
            if torch.from_numpy(np.empty(0, numpy_dtype(field.dtype))).dtype is not field.dtype
        }
        self._dtype = np.dtype(
            {
                "names": list(self._names.values()),
                "formats": [(numpy_dtype(field.dtype), field.shape) for field in self.fields.values()],
                "offsets": list(self.offsets.values()),
                "itemsize": max(end, 1),
            }
        )

    def arrays(self, rows: Array) -> dict[Path, Array]:
        """The fields of ``rows`` (uint8, ``[..., nbytes]``) as strided NumPy views ``[..., *shape]`` of their bits."""
        if not self.fields:
            return {}
        records = rows.view(self._dtype)[..., 0]
        return {path: records[name] for path, name in self._names.items()}

    def tensors(self, rows: Array) -> dict[Path, Tensor]:
        """The same as tensors of the fields' dtypes, which NumPy may lack."""
        found = {path: torch.from_numpy(array) for path, array in self.arrays(rows).items()}
        for path, dtype in self._foreign.items():
            found[path] = found[path].view(dtype)
        return found

    def views(self, rows: Tensor) -> dict[Path, Tensor]:
        """The fields of ``rows`` (uint8, ``[..., nbytes]``) as typed views ``[..., *shape]`` into the same memory."""
        if rows.is_cpu:  # a view by way of NumPy costs a third of one by way of torch
            return self.tensors(rows.numpy())
        return {path: self.view(rows, path) for path in self.fields}  # elsewhere than in RAM

    def view(self, rows: Tensor, path: Path, start: int = 0) -> Tensor:
        """One field of ``rows`` (uint8, ``[..., bytes]``) that hold a row from byte ``start`` on, as a typed view."""
        field = self.fields[path]
        item, count = field.dtype.itemsize, field.nbytes // field.dtype.itemsize
        values: Any = rows.view(field.dtype).narrow(-1, (self.offsets[path] - start) // item, count)
        return values.unflatten(-1, field.shape) if field.shape else values.squeeze(-1)


def typed(array: Array, dtype: torch.dtype) -> Tensor:
    """An array as a tensor of the same memory; the dtype is one of the same size where NumPy lacks it."""
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype is dtype else tensor.view(dtype)


def row_layout(leaves: Mapping[Path, Field]) -> tuple[RowLayout, set[Path]]:
    """How the rows of a replay are packed, and which fields are blocks of their own: large ones, and hidden states.

    Of those a sequence needs the first alone, so that all others would be read in vain.
    """
    limits = {path: 0 if path[0] == "hidden" else LARGE_FIELD for path in leaves}
    large = {path for path, field in leaves.items() if field.nbytes > limits[path]}
    return RowLayout(*field_groups(leaves, large), BOOKKEEPING), large


def field_groups(leaves: Mapping[Path, Field], large: Iterable[Path]) -> tuple[dict[Path, Field], ...]:
    """The small fields: what an observation is made of, what else a step has, the next observation where given."""
    groups: tuple[dict[Path, Field], ...] = ({}, {}, {})
    for path, field in leaves.items():
        if path not in large:
            groups[{"obs": 0, "next_obs": 2}.get(path[0], 1)][path] = field
    return groups


def batch_layout(groups: Sequence[Mapping[Path, Field]]) -> RowLayout:
    """The rows of a batch: the small fields of a step, the next observation, and what the window came to."""
    obs, others, given = groups
    following = {("next_obs", *path[1:]): field for path, field in obs.items()}
    return RowLayout(obs, others, given or following, RESULTS)
