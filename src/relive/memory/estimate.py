"""The memory that a replay will take: bytes per field and row, and whether they fit."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from ..errors import ParameterError
from ..parameters import Rule, is_count, require
from ..steps.arrays import Array
from ..steps.schema import Field, Path, dotted
from .device import device_row_bytes
from .layout import BOOKKEEPING, row_layout

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


LARGEST_SIZE = 2**62
"""The largest size accepted, in rows or bytes; more than any machine has."""


SIZE_RULE: Rule = (
    lambda size: is_count(size, 1) and size <= LARGEST_SIZE,
    "expected a whole number from 1 to 2**62; pass int(...) if that is meant",
)


LIMIT_V2 = "memory.max", "memory.current", "inactive_file"


LIMIT_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
"""Files of a control group for its limit and its use, and the entry for cached files, which can be dropped."""


@dataclass(frozen=True, slots=True)
class StoragePlan:
    """The memory of a replay; ``print`` shows it as a table.

    ``fields`` is field -> bytes in a row, including the ring's bookkeeping and the padding between fields.
    ``host_row_bytes`` of a row are in RAM, the rest on ``device``, which also holds two further rows, and
    ``bookkeeping_bytes`` of what it has to know. ``sampler_bytes`` is the memory of the sampler in RAM once the buffer
    is full.
    """

    rows: int
    num_envs: int
    fields: dict[str, int]
    host_row_bytes: int
    device: torch.device
    sampler_bytes: int
    bookkeeping_bytes: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row with all fields."""
        return sum(self.fields.values())

    @property
    def host_bytes(self) -> int:
        """Bytes in RAM, including the sampler's."""
        return self.rows * self.host_row_bytes + self.sampler_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes on the device; 0 for the CPU."""
        if self.device.type == "cpu":
            return 0
        return (self.rows + 2) * (self.row_bytes - self.host_row_bytes) + self.bookkeeping_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all rows and of the sampler."""
        return self.host_bytes + self.device_bytes

    def require_memory(self) -> None:
        """Require enough free memory in RAM and on the device, as :func:`require_free` does."""
        for device, size in ((torch.device("cpu"), self.host_bytes), (self.device, self.device_bytes)):
            require_free(size, device, "the replay", f"lower the capacity:\n{self}")

    def __str__(self) -> str:
        lines = [f"{self.rows:,} rows, {self.rows // self.num_envs:,} for each of {self.num_envs} envs"]
        there = [f"bookkeeping on {self.device}"] if self.bookkeeping_bytes else []
        width = max(map(len, [*self.fields, *there]))

        def add(name: str, size: int) -> None:
            add_whole(name, size * self.rows, f"{size:,} B a row")

        def add_whole(name: str, size: int, each: str = "") -> None:
            lines.append(f"  {name:<{width}}  {each:>17}  {readable(size):>10}")

        for name, size in self.fields.items():
            add(name, size)
        add("together", self.row_bytes)
        if self.device_bytes:
            add("in RAM", self.host_row_bytes)
            add(f"on {self.device}", self.row_bytes - self.host_row_bytes)
        for name in there:
            add_whole(name, self.bookkeeping_bytes)
        if self.sampler_bytes:
            add_whole("sampler", self.sampler_bytes)
        if self.bookkeeping_bytes or self.sampler_bytes:
            add_whole("in all", self.total_bytes)
        return "\n".join(lines)


def storage_plan(
    leaves: Mapping[Path, Field],
    num_envs: int,
    capacity: int | None,
    capacity_bytes: int | None,
    device: torch.device,
    sampler_bytes: Callable[[int], int],
    bookkeeping_bytes: Callable[[int], int],
) -> StoragePlan:
    """The plan for ``capacity`` rows, or for as many as fit into ``capacity_bytes`` of the device.

    ``sampler_bytes(rows)`` is the sampler's memory in RAM, and ``bookkeeping_bytes(rows)`` all that a device has
    besides the rows.

    Raises:
        ParameterError: neither or both are given, a size is not a whole number, or an env gets less than 2 rows.
    """
    if (capacity is None) == (capacity_bytes is None):
        raise ParameterError("pass either capacity, in rows, or capacity_bytes")
    size = {"capacity": capacity} if capacity_bytes is None else {"capacity_bytes": capacity_bytes}
    require("ReplayBuffer", SIZE_RULE, **size, num_envs=num_envs)
    known = {dotted(path): field.nbytes for path, field in leaves.items()}
    known["bookkeeping"] = sum(field.nbytes for field in BOOKKEEPING.values())
    if device.type == "cpu":
        layout, blocks = row_layout(leaves)
        host, there = layout.nbytes + sum(leaves[path].nbytes for path in blocks), 0
    else:
        host, there = device_row_bytes(leaves)
    row = host + there

    def bytes_of(rows: int) -> int:
        """The bytes of so many rows where ``capacity_bytes`` counts."""
        if device.type == "cpu":
            return rows * row + sampler_bytes(rows)
        return (rows + 2) * there + bookkeeping_bytes(rows // num_envs * num_envs)

    most = capacity_bytes or 0
    # the bytes grow with the rows, so the first number of rows that is too large is found by halving
    fit = bisect_right(range(most // max(there or row, 1) + 1), most, key=bytes_of) - 1
    fields = known | {"padding": row - sum(known.values())}
    wanted = capacity if capacity is not None else fit
    if wanted < 2 * num_envs:
        raise ParameterError(
            f"a capacity of {wanted} rows ({row} bytes each): each of the {num_envs} envs needs at least 2"
        )
    rows = int(wanted // num_envs * num_envs)
    known_there = 0 if device.type == "cpu" else bookkeeping_bytes(rows)
    return StoragePlan(rows, int(num_envs), fields, host, device, sampler_bytes(rows), known_there)


def require_free(size: int, device: torch.device, what: str, advice: str) -> None:
    """Check that memory is free in RAM or on a device before it is taken.

    Raises:
        ParameterError: less than ``size`` bytes are free.
    """
    if not size:
        return
    free, where = (free_memory(), "") if device.type == "cpu" else (_free_on(device), f" on {device}")
    if free is not None and size > free:
        raise ParameterError(f"{what} would take {size:,} bytes{where} and {free:,} are free; {advice}")


def require_whole(fields: Mapping[str, object]) -> None:
    """Check that arrays which repeat their numbers fit into RAM as a whole, since copies and flags take that much.

    Such an array has any shape and takes no memory: it is made by ``numpy.broadcast_to`` or ``Tensor.expand``.

    Args:
        fields: name -> arrays or tensors, nested or not. Others are passed over.

    Raises:
        ParameterError: less memory is free.
    """
    sizes = {str(name): _repeated(value) for name, value in fields.items()}
    largest = max(sizes, key=lambda name: sizes[name], default="")
    what = f"field '{largest}' repeats its numbers, as a broadcast or expanded array does; such arrays"
    require_free(sum(sizes.values()), torch.device("cpu"), what, "check their shapes, or pass fewer rows")


def _repeated(value: Any) -> int:
    """The bytes of all arrays in a nested field that repeat their numbers along an axis."""
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided and not value.is_nested else ()
    elif isinstance(value, np.ndarray):
        value = cast("Array", value)
        strides = value.strides
    elif isinstance(value, tuple):
        return sum(map(_repeated, cast("tuple[Any, ...]", value)))
    elif hasattr(value, "items"):
        return sum(_repeated(part) for _, part in value.items())
    else:
        return 0
    repeats = any(stride == 0 and size > 1 for stride, size in zip(strides, value.shape, strict=False))
    return value.nbytes if repeats else 0


def free_memory() -> int | None:
    """Bytes free without swapping and within a container's limits; None if the system does not say."""
    known = [size for size in (_free_of_all(), _free_in_groups()) if size is not None]
    return min(known, default=None)


def _free_of_all() -> int | None:
    """Bytes that the whole machine has free; None if it does not say."""
    try:
        for line in _text("/proc/meminfo").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    names: Mapping[str, int] = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" in names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _free_in_groups(mine: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int | None:
    """Bytes free within the limits of this process's control groups; None without limits.

    A limit also holds for all groups below it. Inside a container, the group's own path may be missing, and the root
    is the group's directory.
    """
    try:
        groups = control_groups(_text(mine), "memory", root)
    except (OSError, ValueError):
        return None
    free = (_free_in(folder, *(LIMIT_V1 if is_v1 else LIMIT_V2)) for folder, is_v1 in groups)
    return min((size for size in free if size is not None), default=None)


def control_groups(memberships: str, controller: str, root: str) -> Iterator[tuple[str, bool]]:
    """The folders of the control groups that limit a process, each with whether it is of version 1.

    The limits of all groups above its own hold as well.

    Args:
        memberships: the text of ``/proc/self/cgroup``.
        controller: of the limits, such as "memory".
        root: the folder of all groups.
    """
    for line in memberships.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = f"{root}/{controller}" if controllers else root
        parts = [part for part in group.split("/") if part]
        for length in range(len(parts), -1, -1):
            yield "/".join([top, *parts[:length]]), bool(controllers)


def _free_in(group: str, limit: str, usage: str, files: str) -> int | None:
    """Bytes free within one control group; None if it has no limit."""
    try:
        most = int(_text(f"{group}/{limit}"))  # "max" raises ValueError: no limit
        if most > LARGEST_SIZE:  # how version 1 writes that there is no limit
            return None
        used = int(_text(f"{group}/{usage}"))
        stat = dict(line.split() for line in _text(f"{group}/memory.stat").splitlines())
        return max(most - used + int(stat.get(files, 0)), 0)  # cached files count as used, and can be dropped
    except (OSError, ValueError):
        return None


def _text(path: str) -> str:
    """A file of the system, in few system calls: each new buffer asks for several."""
    with open(path, "rb", buffering=0) as file:
        return file.read().decode()


def _free_on(device: torch.device) -> int | None:
    """Bytes free on a device, including those that torch holds in reserve; None if it is not CUDA."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def readable(size: float) -> str:
    """A number of bytes in a readable unit."""
    unit = 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:,.1f} {UNITS[unit]}" if unit else f"{size:.0f} B"
