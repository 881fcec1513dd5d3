"""Layouts of packed rows: the bytes at which each field lies."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import core
from ..steps.arrays import NUMPY_DTYPES, Array, numpy_dtype
from ..steps.schema import Field, Path

BOOKKEEPING: dict[Path, Field] = {
    ("_stamp",): Field((), torch.int64),
    ("_step",): Field((), torch.int32),
    ("_order",): Field((), torch.int32),
}
"""The ring's own fields of every row; :class:`relive.ring.Ring` explains them."""


RESULTS: dict[Path, Field] = {
    ("index",): Field((), torch.int64),
    ("next_index",): Field((), torch.int64),
    ("discount",): Field((), torch.float32),
    ("steps",): Field((), torch.int32),
}
"""The fields of an n-step transition in a batch, besides those of a step."""


WEIGHED: dict[Path, Field] = {("weight",): Field((), torch.float32), ("probability",): Field((), torch.float64)}
"""The fields that draws by priority add to a batch."""


NOTHING: dict[Path, Field] = {}


WRITTEN = ("index", "next_index", "discount", "steps", "reward", "terminated", "truncated")
"""The fields of a batch's row that the n-step kernel writes, in its order."""


COPIED = ("step_bytes", "next_at", "next_bytes", "own_at", "own_bytes")
"""The numbers that tell it what to copy of a row, in bytes, in its order."""


LINE = 64
"""Bytes of a cache line."""


LARGE_FIELD = 1024
"""A field of more bytes than this is a block of its own, as packing it gains nothing."""


class RowLayout:
    """The byte offset of each field in a row.

    Groups of fields follow one another. Each begins at a multiple of 16 bytes and has its widest dtypes first. So
    every field is aligned, and a group has the same layout in every row.

    Args:
        groups: path -> field.
        lines: make rows whole cache lines if they grow by a quarter at most.
    """

    def __init__(self, *groups: Mapping[Path, Field], lines: bool = False) -> None:
        self.groups = groups
        self.fields: dict[Path, Field] = {}
        self.offsets: dict[Path, int] = {}
        self.starts: list[int] = []
        """The byte at which each group begins, and at last the number of bytes of a row."""
        end = 0
        for group in groups:
            self.starts.append(end)
            # widest first: every field begins at a multiple of its width
            for path, field in sorted(group.items(), key=lambda leaf: -leaf[1].dtype.itemsize):
                self.fields[path], self.offsets[path] = field, end
                end += field.nbytes
            end = -(-end // 16) * 16  # kernels copy groups by 16 bytes at a time
        end = max(end, 16)  # no array can be made over rows without bytes
        if lines and -end % LINE <= end // 4:
            end += -end % LINE
        self.starts.append(end)
        self.nbytes = end
        self._paths = tuple(self.fields)
        self._names = tuple(map(str, range(len(self._paths))))
        self._whole = self.described(self.fields)
        self._dtype = np.dtype(
            {
                "names": list(self._names),
                "formats": [(numpy_dtype(field.dtype), field.shape) for field in self.fields.values()],
                "offsets": list(self.offsets.values()),
                "itemsize": max(end, 1),
            }
        )

    def described(
        self,
        paths: Iterable[Path],
        name: Callable[[Path], Hashable] = lambda path: path,
        width: int | None = None,
        apart: Mapping[Path, Any] = NOTHING,
    ) -> core.Fields:
        """Fields of these rows, in this order, as compiled code takes them.

        ``name`` gives the key of each tensor, and ``width`` the bytes of rows that have others behind the last field.
        Those of ``apart`` lie apart, and are described already.
        """
        facts: list[Any] = []
        for path in paths:
            fact = apart.get(path)
            if fact is None:
                field = self.fields[path]
                fact = name(path), field.dtype, field.shape, self.offsets[path]
            facts.append(fact)
        return core.Fields(facts, self.nbytes if width is None else width)

    def arrays(self, rows: Array) -> dict[Path, Array]:
        """The fields of ``rows`` (uint8, ``[..., nbytes]``) as arrays ``[..., *shape]`` over the same memory."""
        if not self.fields:
            return {}
        if rows.flags.c_contiguous:  # NumPy checks a view of records in Python, which takes longer than making it
            records: Array = np.ndarray(rows.shape[:-1], self._dtype, rows)
        else:
            records = rows.view(self._dtype)[..., 0]
        columns = map(records.__getitem__, self._names)
        return dict(zip(self._paths, columns, strict=True))

    def tensors(self, rows: Array) -> dict[Path, Tensor]:
        """The fields of ``rows`` as tensors over the same memory, of dtypes that NumPy may lack."""
        if not self.fields:
            return {}
        return self._whole.tensors(rows)

    def pack(self, columns: Mapping[Path, Array | Tensor], rows: Array, steps: int = 1) -> None:
        """Copy columns in RAM, ``[T * N, ...]`` each and in one piece, side by side into rows.

        Args:
            columns: path -> array or tensor; row ``t * N + n`` is step ``t`` of env ``n``.
            rows: uint8 ``[N * T, nbytes]``, written: row ``n * T + t`` becomes step ``t`` of env ``n``.
            steps: T. With 1, every row keeps its place.
        """
        self._whole.pack([columns[path] for path in self._paths], rows, steps)

    def views(self, rows: Tensor) -> dict[Path, Tensor]:
        """The fields of ``rows`` (uint8, ``[..., nbytes]``) as tensors ``[..., *shape]`` over the same memory."""
        if rows.is_cpu:  # by way of NumPy costs a third of torch's own calls
            return self.tensors(rows.numpy())
        return {path: self.view(rows, path) for path in self.fields}

    def view(self, rows: Tensor, path: Path, start: int = 0) -> Tensor:
        """One field as a tensor over ``rows`` (uint8, ``[..., bytes]``), which hold each row from byte ``start`` on."""
        field = self.fields[path]
        item, count = field.dtype.itemsize, field.nbytes // field.dtype.itemsize
        # offsets are multiples of the item, and `start` of 16: so the bytes before a field are whole items
        values = rows.view(field.dtype).narrow(-1, (self.offsets[path] - start) // item, count)
        return torch.unflatten(values, -1, field.shape) if field.shape else values.squeeze(-1)


def typed(array: Array, dtype: torch.dtype) -> Tensor:
    """An array as a tensor of ``dtype`` over the same memory. NumPy may lack the dtype and hold only its bits."""
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype is dtype else tensor.view(dtype)


def host_leaf(array: Array, dtype: torch.dtype) -> Array | Tensor:
    """An array as a replay takes it: as it is, or as a tensor if NumPy lacks the dtype and the array holds its bits."""
    if dtype in NUMPY_DTYPES:
        return array
    return typed(array if array.flags.writeable else array.copy(), dtype)  # torch warns of read-only memory


def row_layout(leaves: Mapping[Path, Field]) -> tuple[RowLayout, set[Path]]:
    """The layout of a replay's packed rows, and the fields that are blocks of their own.

    These are large fields and hidden states. A sequence reads only its first state, so packing them would slow reads.
    """
    # The observation comes first: that of the next row is what a step led to, so a step and its next observation are
    # one run of bytes. The bookkeeping comes last.
    limits = {path: 0 if path[0] == "hidden" else LARGE_FIELD for path in leaves}
    large = {path for path, field in leaves.items() if field.nbytes > limits[path]}
    return RowLayout(*field_groups(leaves, large), BOOKKEEPING), large


def field_groups(leaves: Mapping[Path, Field], large: Iterable[Path]) -> tuple[dict[Path, Field], ...]:
    """The small fields in three groups: the observation, the step's other fields, and a given next observation."""
    groups: tuple[dict[Path, Field], ...] = ({}, {}, {})
    for path, field in leaves.items():
        if path not in large:
            groups[{"obs": 0, "next_obs": 2}.get(path[0], 1)][path] = field
    return groups


class BatchLayout(RowLayout):
    """The layout of a row of a batch of n-step transitions: a step's small fields, the next observation, the results.

    Args:
        groups: the fields of a ring's row, as :func:`field_groups` gives them.
        source: the layout of that row.
        own: True if each row has a next observation of its own, here or elsewhere.
        more: further fields, which a view writes.
    """

    def __init__(
        self, groups: Sequence[Mapping[Path, Field]], source: RowLayout, own: bool, more: Mapping[Path, Field] = NOTHING
    ) -> None:
        obs, others, given = groups
        following = {("next_obs", *path[1:]): field for path, field in obs.items()}
        super().__init__(obs, others, given or following, {**RESULTS, **more})
        # -1: the next observation lies in the row itself, from byte `begin` up to `end`, not in the row after it
        starts, (begin, end) = self.starts, source.starts[2:4]
        copied = starts[3 if given else 2], starts[2], -1 if own else starts[1], begin, end - begin
        self.core: core.WindowLayout = core.WindowLayout(
            **{name: self.offsets[name,] for name in WRITTEN}, **dict(zip(COPIED, copied, strict=True))
        )
        """Where compiled code writes what it knows of a window, and what it copies."""
