"""What a replay will take before it takes it: bytes per field and row, rows, and whether they fit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import SchemaError
from .rows import BOOKKEEPING, row_layout
from .schema import Field, Path, dotted

__all__ = ["StoragePlan", "free_memory", "storage_plan"]

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class StoragePlan:
    """The memory of a replay; ``print`` shows it as a table.

    ``fields`` is field -> bytes in a row, with the bookkeeping of the ring and the padding between fields among them.
    """

    rows: int
    num_envs: int
    fields: dict[str, int]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, all fields included."""
        return sum(self.fields.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes

    def __str__(self) -> str:
        lines = [f"{self.rows:,} rows, {self.rows // self.num_envs:,} for each of {self.num_envs} envs"]
        width = max(map(len, self.fields))
        for name, size in self.fields.items():
            lines.append(f"  {name:<{width}}  {size:>9,} B a row  {_readable(size * self.rows):>10}")
        lines.append(f"  {'together':<{width}}  {self.row_bytes:>9,} B a row  {_readable(self.total_bytes):>10}")
        return "\n".join(lines)


def storage_plan(
    leaves: Mapping[Path, Field], num_envs: int, capacity: int | None, capacity_bytes: int | None
) -> StoragePlan:
    """The plan for so many rows, or for as many as fit into so many bytes.

    Raises:
        SchemaError: neither or both are given, or less than 2 rows per env come out.
    """
    layout, blocks = row_layout(leaves)
    known = {dotted(path): field.nbytes for path, field in leaves.items()}
    known["bookkeeping"] = sum(field.nbytes for field in BOOKKEEPING.values())
    row = layout.nbytes + sum(leaves[path].nbytes for path in blocks)
    fields = known | {"padding": row - sum(known.values())}
    if (capacity is None) == (capacity_bytes is None):
        raise SchemaError("pass either capacity, in rows, or capacity_bytes")
    wanted = capacity if capacity is not None else (capacity_bytes or 0) // row
    if num_envs < 1 or wanted < 2 * num_envs:
        raise SchemaError(
            f"a capacity of {wanted} rows ({row} bytes each): every one of the {num_envs} envs needs at least 2"
        )
    return StoragePlan(wanted // num_envs * num_envs, num_envs, fields)


def free_memory() -> int | None:
    """Bytes that can be had without swapping, as far as the system tells."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    names: Mapping[str, int] = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" in names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _readable(size: float) -> str:
    unit = 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:,.1f} {UNITS[unit]}" if unit else f"{size:.0f} B"
