"""LedgerLog: the ledger of a shard whose ring is in files, kept so that the two agree after any kill.

The log is a file of lines, each with its checksum. The first line is a whole ledger. Each other line says which steps
come next, and is written before they are stored. It also has the sum of the ring's heads at that time. Heads only grow,
and a piece of steps is stored as a whole or not at all. So the steps of a line are in the ring if the sum of the ring's
heads is larger than the sum in the line. This holds after a kill, and also after a power cut, when the ring is as it
was at the last flush.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

from ..errors import FileFormatError
from .ledger import Ledger, Origin, Rank

__all__ = ["LedgerLog"]


class LedgerLog:
    """Writes a ledger to numbered files in a directory. The file with the highest number counts.

    Args:
        folder: the directory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._descriptor = folder, -1
        self.lines = 0
        """How many lines were written since the last whole ledger."""

    @property
    def exists(self) -> bool:
        """Whether there is a ledger."""
        return bool(self._numbers())

    def restored(self, heads: int) -> Ledger:
        """The ledger of a ring that is on the disk and has this sum of heads. Further lines go to a new file.

        Raises:
            FileFormatError: no file begins with a whole ledger.
        """
        for number in sorted(self._numbers(), reverse=True):
            lines = list(_lines(self._path(number)))
            if not lines or "ledger" not in lines[0]:
                continue
            ledger = Ledger.restored(lines[0]["ledger"])
            for line in lines[1:]:
                if line["before"] >= heads:
                    break
                rank = Rank(*line["rank"])
                ledger.adopt(Origin(rank, tuple(line["envs"]), line["start"], line["steps"], 0), line["counts"])
            self.rewrite(ledger)  # without the lines whose steps are not in the ring
            return ledger
        raise FileFormatError(f"'{self._folder}': expected the ledger of a shard, found none; remove the directory")

    def append(self, origin: Origin, counts: list[int], heads: int) -> None:
        """Note that these steps come next.

        Args:
            origin: the steps.
            counts: those of the ledger after these steps.
            heads: the sum of the ring's heads before them.
        """
        line = {"rank": list(origin.rank), "envs": list(origin.envs), "start": origin.start, "steps": origin.steps}
        os.write(self._descriptor, _encoded(line | {"counts": counts, "before": heads}))
        self.lines += 1

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        os.fsync(self._descriptor)

    def rewrite(self, ledger: Ledger) -> None:
        """Begin a new file with a whole ledger. The caller has already flushed the ring to the disk."""
        old = self._numbers()
        number = 1 + max(old, default=0)
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = self._folder / "draft"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        descriptor = os.open(draft, flags, 0o600)
        try:
            os.write(descriptor, _encoded({"ledger": ledger.state()}))
            os.fsync(descriptor)
            os.replace(draft, self._path(number))
        except BaseException:
            os.close(descriptor)
            raise
        before, self._descriptor, self.lines = self._descriptor, descriptor, 0
        if before >= 0:
            os.close(before)
        for stale in old:
            with suppress(OSError):
                self._path(stale).unlink()

    def __del__(self) -> None:
        if self.__dict__.get("_descriptor", -1) >= 0:
            os.close(self._descriptor)

    def _numbers(self) -> list[int]:
        return [int(path.suffix[1:]) for path in self._folder.glob("ledger.*") if path.suffix[1:].isdecimal()]

    def _path(self, number: int) -> Path:
        return self._folder / f"ledger.{number}"


def _encoded(line: Any) -> bytes:
    text = json.dumps(line, separators=(",", ":")).encode()
    return b"%08x %s\n" % (crc32(text), text)


def _lines(path: Path) -> Iterator[Any]:
    """The lines of a file, up to the first that is torn."""
    for raw in path.read_bytes().split(b"\n"):
        checksum, _, text = raw.partition(b" ")
        if len(checksum) != 8 or checksum != b"%08x" % crc32(text):
            return
        yield json.loads(text)
