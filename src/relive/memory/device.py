"""The rows of a replay on a device; rewards, flags and bookkeeping stay in RAM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from ..steps.arrays import Array, Ints, numpy_dtype, numpy_view
from ..steps.schema import Field, Path
from .layout import BatchLayout, RowLayout, field_groups, row_layout
from .ram import ALWAYS_IN_RAM, HostedRows, first_beyond, in_ram, staged_leaves
from .store import Plan, Remainder, Where, as_places, require_rows

PIECE = 2**26
"""Bytes of rows moved at once by a save or a restore."""


ALIGNED = 16
"""The alignment in bytes of rows and of copied runs, which suits a field of any dtype."""


WORD = 8
"""Bytes of an int64. Rows move as int64, which is faster than bytes and keeps the bits of every dtype."""


class DeviceRows(HostedRows):
    """The rows of a replay on a device.

    Rewards, flags and bookkeeping are in RAM, 32 bytes a row. There the same kernels draw anchors and plan n-step
    transitions. All other fields stay on the device: the plan of a batch goes to it in one copy, and the rows are
    gathered there. Steps given as arrays are sent in one copy. :class:`relive.replay.mirror.DeviceMirror` has the same
    bookkeeping on the device as well, for steps and batches that are there.

    Args:
        leaves: the fields of a step, including ``reward``, ``terminated`` and ``truncated``.
        num_rows: the number of rows.
        device: the device of the rows; calls run on its current stream.
    """

    sends = True

    def __init__(self, leaves: Mapping[Path, Field], num_rows: int, device: torch.device) -> None:
        super().__init__(leaves, num_rows, device)
        self.gathered: tuple[Path, ...] = self.large  # the others are read with the plan
        self._order = tuple(BatchLayout(field_groups(leaves, self.large), self._saved, self._own_next).fields)
        self.parts: list[Part] = [Part(layout, num_rows, device) for layout in _layouts(leaves)]
        """The rows themselves: one part for all small fields, one for each large one."""
        self._packed = [part for part in self.parts if not any(path in self.large for path in part.layout.fields)]
        small = [path for path in leaves if path not in self.large]
        self._now = [path for path in small if path[0] != "next_obs"]
        self._then = [path for path in small if path[0] == ("next_obs" if self._own_next else "obs")]
        """The small fields that are read of a window's first row, and of the row of its next observation."""
        self._ended: Array = np.zeros(0, np.bool_)

    # -- writing ------------------------------------------------------------------------------------------------

    @property
    def memory(self) -> list[Array | Tensor]:
        """The rows in RAM, and those of each part."""
        return [self.target, *(part.words for part in self.parts)]

    def stage(self, role: str, count: int, values: Sequence[Array | Tensor]) -> tuple[Array, Remainder]:
        """Stage rewards and flags in RAM, and pack the rest on the device. Its errors come before any change."""
        given = dict(zip(staged_leaves(self.leaves, role), values, strict=True))
        if role == "step":
            rows, _ = self._host.stage(role, count, self._on_host([given[path] for path in ALWAYS_IN_RAM]))
            flags = self.layout.arrays(rows)
            self._ended = flags["terminated",] | flags["truncated",]
            return rows, [(part, part.staged(given)) for part in self.parts]
        rows, _ = self._host.stage(role, count, [])
        # of the steps staged just before: only these need their final observations on the device
        ended = np.flatnonzero(self._ended)
        if not len(ended):
            return rows, []
        (where,) = self.places(ended)
        chosen = {path: value[where if isinstance(value, Tensor) else ended] for path, value in given.items()}
        parts = [part for part in self.parts if any(path in chosen for path in part.layout.fields)]
        return rows, [(part, part.staged(chosen, part.obs_bytes)) for part in parts]

    def _on_host(self, values: Sequence[Array | Tensor]) -> list[Array | Tensor]:
        """Rewards and flags in RAM; those on the device come in one copy."""
        given = dict(zip(ALWAYS_IN_RAM, values, strict=True))
        far = {path: value for path, value in given.items() if isinstance(value, Tensor)}
        if not far:
            return list(values)
        # packed on the device and sent once: each wait for the device costs more than the bytes
        layout = RowLayout({path: self.leaves[path] for path in far})
        rows = torch.empty((len(values[0]), layout.nbytes), dtype=torch.uint8, device=self.device)
        for path, value in far.items():
            layout.view(rows, path).copy_(value)
        arrays = layout.arrays(rows.cpu().numpy())
        return [arrays.get(path, value) for path, value in given.items()]

    def write(self, remainder: Remainder, places: Ints) -> None:
        """Copy staged rows into those of the device."""
        # staged finals are those of ended episodes, in order, and so are the places that are not negative
        (where,) = self.places(places[places >= 0])
        for part, words in remainder:
            part.put(where, words)

    # -- reading ------------------------------------------------------------------------------------------------

    def plan(self, places: Ints, batch: BatchLayout | None = None) -> Plan:
        """Memory for the plan of a batch, in RAM, to be sent in one copy."""
        count, batch = len(places), self.batch if batch is None else batch
        packet = _Packet(self.device, ((count, batch.nbytes), np.uint8), ((count,), np.int64), ((count,), np.int64))
        rows, last, now = packet.arrays
        now[:] = places
        return Plan(batch, now, rows, last, packet)

    def fields(self, plan: Plan) -> dict[Path, Tensor]:
        """Send a plan in one copy, and read its rows on the device."""
        for places in (plan.places, plan.last):  # a view may have changed them, and no device refuses them in time
            require_rows(places, first_beyond(places, self.num_rows), self.num_rows)
            places[places < 0] = self.num_rows  # the row of zeros after the last
        planned, then, now = plan.memory.sent()
        found = plan.batch.views(planned)
        found |= self.read_rows(now, self._now) | _as_next(self.read_rows(then, self._then))
        found = {path: found[path] for path in self._order} | found  # a view's own fields come last
        if self.gathered or plan.stacks is not None:
            self.add_gathered(plan, found, now, then)
        return found

    def read_planned(
        self, now: Tensor, then: Tensor, found: dict[Path, Tensor], stacks: Mapping[Path, tuple[Tensor, Tensor]]
    ) -> dict[Path, Tensor]:
        """The fields of windows in the order of a batch; ``found`` has those that are not read of rows.

        The windows begin at the rows ``now`` and have their next observation in the rows ``then``, int64 ``[B]``.
        ``stacks`` are fields of the observation and the rows ``[B, depth]`` of their frames, now and then. No operation
        waits for the device.
        """
        following = "next_obs" if self._own_next else "obs"
        paths = [path for path in self.leaves if path not in stacks]
        found |= self.read_rows(now, [path for path in paths if path[0] != "next_obs"])
        found |= _as_next(self.read_rows(then, [path for path in paths if path[0] == following]))
        for path, (before, after) in stacks.items():
            found |= self.read_rows(before, [path]) | _as_next(self.read_rows(after, [path]))
        return {path: found[path] for path in (*self._order, *self._order_of_large())}

    def read_rows(self, where: Tensor, paths: Iterable[Path]) -> dict[Path, Tensor]:
        """Fields that are on the device of rows ``where`` (int64 of any shape). No operation waits for the device.

        Those that are packed in one row are read at once.
        """
        wanted, flat = set(paths), where.reshape(-1)
        found: dict[Path, Tensor] = {}  # as torch.compile understands it
        for part in self.parts:
            found |= part.fields(flat, [path for path in part.layout.fields if path in wanted])
        return found if where.dim() == 1 else {path: field.unflatten(0, where.shape) for path, field in found.items()}

    def order_with(self, more: Mapping[Path, Field]) -> tuple[Path, ...]:
        """The fields of a batch with ``more`` fields, in the order of :meth:`fields`."""
        layout = BatchLayout(field_groups(self.leaves, self.large), self._saved, self._own_next, more)
        return *layout.fields, *self._order_of_large()

    def _order_of_large(self) -> list[Path]:
        """The large fields of a batch, in the order in which :meth:`add_gathered` adds them."""
        order: list[Path] = []
        for path in self.large:
            order += [path] if path[0] != "next_obs" else []
            if path[0] == ("next_obs" if self._own_next else "obs"):
                order.append(("next_obs", *path[1:]))
        return order

    def places(self, *arrays: Ints) -> tuple[Where, ...]:
        """Send places in one copy. Negative ones become the row of zeros after the last."""
        arrays = tuple(map(as_places, arrays))
        for array in arrays:
            require_rows(array.reshape(-1), first_beyond(array, self.num_rows), self.num_rows)
        return tuple(self.tensors(*(np.where(array < 0, self.num_rows, array) for array in arrays)))

    def gather(self, paths: Iterable[Path], where: Where) -> dict[Path, Tensor]:
        """Gather fields on the device."""
        wanted = list(paths)
        found, hosted = self.read_rows(where, wanted), [path for path in wanted if path in ALWAYS_IN_RAM]
        if hosted:
            places = where.cpu().numpy()
            # the row of zeros is on the device alone: in RAM, a negative place stands for it
            found |= self.read(np.where(places == self.num_rows, -1, places), hosted)
        return {path: found[path] for path in wanted}

    def read(self, places: Ints, paths: Iterable[Path] | None = None) -> dict[Path, Tensor]:
        """Rewards and flags from RAM, all other fields from the device."""
        wanted = list(self.leaves if paths is None else paths)
        hosted = [path for path in wanted if path in ALWAYS_IN_RAM]
        near = list(map(numpy_view, self._host.read(places, hosted).values()))
        found = dict(zip(hosted, self.tensors(*near), strict=True))
        if len(hosted) < len(wanted):
            (where,) = self.places(places)
            found |= self.gather([path for path in wanted if path not in ALWAYS_IN_RAM], where)
        return {path: found[path] for path in wanted}

    def views(self) -> dict[Path, Tensor]:
        """Tensors over the storage; rewards and flags are in RAM."""
        found = self._host.views()
        for part in self.parts:
            found |= part.views()
        return {path: found[path] for path in self.leaves}

    def tensors(self, *arrays: Array) -> list[Tensor]:
        """Send arrays in one copy."""
        packet = _Packet(self.device, *((array.shape, array.dtype) for array in arrays))
        for target, array in zip(packet.arrays, arrays, strict=True):
            target[...] = array
        return packet.sent()

    # -- saving -------------------------------------------------------------------------------------------------

    def dump(self, places: Ints) -> Array:
        """Bring rows into RAM, packed as those of a replay in RAM."""
        rows = np.zeros((len(places), self._saved.nbytes), np.uint8)
        arrays, (where,) = self._saved.arrays(rows), self.places(places)
        for path, array in self._host.arrays.items():
            arrays[path][:] = array[places]
        for part in self._packed:
            for path, array in part.layout.arrays(part.take(where, 0, part.layout.nbytes).cpu().numpy()).items():
                arrays[path][:] = array
        return rows

    def restore(self, places: Ints, rows: Array, large: Mapping[Path, Tensor]) -> None:
        """Send packed rows and large fields back, a few at a time."""
        arrays = self._restore_hosted(places, rows, large)
        for piece in self._pieces(places):
            (where,) = self.places(places[piece])
            for part in self.parts:
                part.put(where, part.staged({path: arrays[path][piece] for path in part.layout.fields}))

    def _pieces(self, places: Ints) -> Iterator[slice]:
        """Slices of ``places`` whose rows take little of the device's memory."""
        rows = max(PIECE // max(sum(part.layout.nbytes for part in self.parts), 1), 1)
        return (slice(low, low + rows) for low in range(0, len(places), rows))


class Part:
    """Rows of some fields on the device, then a row of zeros, then one that takes what nobody wants."""

    layout: RowLayout

    def __init__(self, layout: RowLayout, num_rows: int, device: torch.device) -> None:
        self.layout, self._device, self._num_rows = layout, device, num_rows
        self.obs_bytes: int = layout.starts[1]
        """Bytes of the observation, which comes first in a row."""
        # negative places read the row of zeros
        self.words: Tensor = torch.zeros((num_rows + 2, layout.nbytes // WORD), dtype=torch.int64, device=device)
        """The rows, int64 ``[R + 2, W]``."""

    def staged(self, given: Mapping[Path, Array | Tensor], nbytes: int | None = None) -> Tensor:
        """The first ``nbytes`` (default: all) of rows to store, packed on the device: int64 ``[K, nbytes / 8]``.

        Arrays are sent in one copy. Tensors are already on the device.
        """
        values = {path: given[path] for path in self.layout.fields if path in given}
        tensors = {path: value for path, value in values.items() if isinstance(value, Tensor)}
        arrays = {path: value for path, value in values.items() if not isinstance(value, Tensor)}
        if arrays:
            # in the order of memory and of the field's dtype, so that a copy of bytes is one of numbers
            fields = [self.layout.fields[path] for path in arrays]
            shapes = [(len(array), *field.shape) for array, field in zip(arrays.values(), fields, strict=True)]
            packet = _Packet(self._device, *zip(shapes, [numpy_dtype(field.dtype) for field in fields], strict=True))
            for target, array in zip(packet.arrays, arrays.values(), strict=True):
                target[...] = array
            for path, field, sent in zip(arrays, fields, packet.sent(), strict=True):
                tensors[path] = sent.view(field.dtype)
        return self.packed(tensors, nbytes)

    def packed(self, values: Mapping[Path, Tensor], nbytes: int | None = None) -> Tensor:
        """Fields ``[K, ...]`` side by side in rows, with zeros between them and for those that are missing."""
        end = self.layout.nbytes if nbytes is None else nbytes
        count, at = len(next(iter(values.values()))), 0
        columns: list[Tensor] = []
        for path, offset in [*self.layout.offsets.items(), (None, end)]:
            if path is not None and (path not in values or not self.layout.fields[path].nbytes):
                continue
            if offset > at:
                columns.append(torch.zeros((count, offset - at), dtype=torch.uint8, device=self._device))
            at = offset
            if path is not None:
                column = values[path].reshape(count, -1).contiguous()
                if column.stride(-1) != 1:  # one number counts as contiguous whatever its strides
                    column = column.clone(memory_format=torch.contiguous_format)
                columns.append(column.view(torch.uint8))
                at += self.layout.fields[path].nbytes
        if not columns:  # fields of no bytes alone
            return torch.zeros((count, 0), dtype=torch.int64, device=self._device)
        return torch.cat(columns, 1).view(torch.int64)

    def put(self, where: Tensor, words: Tensor) -> None:
        """Store rows at ``where`` (int64 ``[K]``): whole ones, or the beginnings of some."""
        if words.shape[1] == self.words.shape[1]:
            self.words.index_put_((where,), words)
        else:
            self.words[:, : words.shape[1]].index_copy_(0, where, words)

    def views(self) -> dict[Path, Tensor]:
        """The fields of all rows, as tensors over the storage."""
        return self.layout.views(self.words[: self._num_rows].view(torch.uint8))

    def fields(self, where: Tensor, paths: Iterable[Path]) -> dict[Path, Tensor]:
        """Fields of the rows ``where`` (int64 ``[K]``), as ``[K, ...]``; one copy of the bytes that hold them all."""
        wanted, offsets = list(paths), self.layout.offsets
        if not wanted:
            return {}
        begin = min(offsets[path] for path in wanted)
        end = max(offsets[path] + self.layout.fields[path].nbytes for path in wanted)
        start = begin // ALIGNED * ALIGNED  # whole words, and the fields within stay aligned
        rows = self.take(where, start, -(-end // ALIGNED) * ALIGNED)
        return {path: self.layout.view(rows, path, start) for path in wanted}

    def take(self, where: Tensor, start: int, end: int) -> Tensor:
        """Bytes ``start`` to ``end``, multiples of 16, of the rows ``where``, copied: uint8 ``[K, end - start]``."""
        return self.words[:, start // WORD : end // WORD].index_select(0, where).view(torch.uint8)


class _Packet:
    """Arrays in one piece of memory, sent to a device in one copy. For CUDA the memory is page-locked."""

    def __init__(self, device: torch.device, *arrays: tuple[tuple[int, ...], DTypeLike]) -> None:
        self._device, self._pinned = device, device.type == "cuda"
        self._spans: list[tuple[int, int]] = []
        end = 0
        for shape, dtype in arrays:
            nbytes = prod(shape) * np.dtype(dtype).itemsize
            self._spans.append((end, end + nbytes))
            end += -(-nbytes // ALIGNED) * ALIGNED  # so the next array is aligned for any dtype
        self._bytes = torch.empty(end, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
        memory = self._bytes.numpy()
        self.arrays: list[Array] = [
            memory[begin:stop].view(dtype).reshape(shape)
            for (begin, stop), (shape, dtype) in zip(self._spans, arrays, strict=True)
        ]

    def sent(self) -> list[Tensor]:
        """The arrays on the device. Do not write to them from now on."""
        # page-locked memory may be sent while the caller goes on; torch gives it back only after the copy
        moved = self._bytes.to(self._device, non_blocking=self._pinned)
        return [
            moved[begin:stop].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
            for (begin, stop), array in zip(self._spans, self.arrays, strict=True)
        ]


def _as_next(fields: Mapping[Path, Tensor]) -> dict[Path, Tensor]:
    """Fields of an observation as those of the next one."""
    return {("next_obs", *path[1:]): field for path, field in fields.items()}


def device_row_bytes(leaves: Mapping[Path, Field]) -> tuple[int, int]:
    """Bytes of a row in RAM, and on the device."""
    host, _ = row_layout(in_ram(leaves))
    return host.nbytes, sum(layout.nbytes for layout in _layouts(leaves))


def _layouts(leaves: Mapping[Path, Field]) -> list[RowLayout]:
    """The layouts of rows on the device: one for all small fields, one for each large field."""
    _, large = row_layout(leaves)
    groups = field_groups({path: field for path, field in leaves.items() if path not in ALWAYS_IN_RAM}, large)
    packed = [RowLayout(*groups)] if any(groups) else []
    return packed + [RowLayout({path: leaves[path]}) for path in leaves if path in large]
