"""Machine: a process that dies, or whose disk fails or loses power, at any call that changes a disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

__all__ = ["AFTERMATHS", "Died", "Machine"]


class Died(BaseException):
    """The process is gone: from here on, nothing that it calls does anything."""


class Machine:
    """A machine that dies, or fails once, before its ``last`` call that changes a disk; after it if ``late``.

    It remembers what a disk may still forget: the bytes of files before their fsync, names before their directory's.
    """

    CALLS = ("open", "write", "fsync", "replace", "unlink", "mkdir", "rmdir", "posix_fallocate")

    def __init__(self, last: int, fault: BaseException | None = None, late: bool = False) -> None:
        self.last, self.fault, self.late, self.count = last, fault, late, 0
        self.turn = RLock()  # files are synced by several threads
        self.genuine = {name: getattr(os, name) for name in self.CALLS if hasattr(os, name)}
        self.paths: dict[int, Path] = {}
        self.loose_data: set[Path] = set()
        self.loose_names: list[tuple[Path, Callable[[], object]]] = []

    def __enter__(self) -> Machine:
        for name in self.genuine:
            setattr(os, name, lambda *args, _name=name, **named: self.call(_name, *args, **named))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self.genuine.items():
            setattr(os, name, function)

    def call(self, name: str, *args: Any, **named: Any) -> Any:
        with self.turn:
            return self.make(name, *args, **named)

    def make(self, name: str, *args: Any, **named: Any) -> Any:
        reading = name == "open" and not args[1] & os.O_CREAT
        if not reading:
            self.count += 1
            if self.count == self.last and self.fault is not None:
                if self.late:
                    self.genuine[name](*args, **named)
                raise self.fault
            if self.count >= self.last and self.fault is None:
                if name == "write" and self.count == self.last:
                    self.genuine["write"](args[0], args[1][: len(args[1]) // 2])
                raise Died
        undo = self.undo_of(name, *args)
        result = self.genuine[name](*args, **named)
        if name == "open":
            self.paths[result] = Path(args[0])
        if name == "fsync":
            self.settle(self.paths[args[0]])
        if undo:
            self.loose_names.append((Path(args[0]).parent, undo))
        if name == "open" and not reading:
            self.loose_data.add(Path(args[0]))
        return result

    def undo_of(self, name: str, *args: Any) -> Callable[[], object] | None:
        if name == "open" and args[1] & os.O_CREAT:
            return lambda: Path(args[0]).unlink(missing_ok=True)
        if name == "unlink":
            data = Path(args[0]).read_bytes()
            return lambda: Path(args[0]).write_bytes(data)
        if name == "replace":
            before = Path(args[1]).read_bytes() if Path(args[1]).exists() else None
            return lambda: Path(args[1]).unlink() if before is None else Path(args[1]).write_bytes(before)
        return None

    def settle(self, path: Path) -> None:
        self.loose_data.discard(path)
        self.loose_names = [(folder, undo) for folder, undo in self.loose_names if folder != path]

    def lose_power(self, forget: Callable[[], bool]) -> None:
        """Bytes never synced are garbage, and so are those names that ``forget`` picks, the newest first."""
        for path in self.loose_data:
            if path.exists():
                path.write_bytes(b"\0" * (path.stat().st_size // 2))
        for _, undo in reversed(self.loose_names):
            if forget():
                undo()


def coin(seed: int) -> Callable[[], bool]:
    random = np.random.default_rng(seed)
    return lambda: bool(random.integers(2))


AFTERMATHS: dict[str, Callable[[Machine, int], object]] = {
    "killed": lambda machine, step: None,
    "power lost, names kept": lambda machine, step: machine.lose_power(lambda: False),
    "power lost, names forgotten": lambda machine, step: machine.lose_power(lambda: True),
    "power lost, some names forgotten": lambda machine, step: machine.lose_power(coin(step)),
}
