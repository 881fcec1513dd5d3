"""The attacks of the matrix of pairs: they break off calls of the other feature, or end its process.

What such a call did is then asked of the replay. Nothing that had returned before may be lost.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from attacks.features import Feature
from support.interrupts import PACKAGE, broken_off

__all__ = ["Attack", "Clock", "CtrlC", "CtrlCInCore", "FullDisk", "Kill", "LittleMemory", "SmallDisk"]


class Attack(Feature):
    """Breaks calls of the other feature off."""

    may_raise: tuple[type[BaseException], ...] = ()

    def guard(self, call: Callable[[], Any]) -> bool:
        """Make a call in spite of it; True if it was broken off."""
        try:
            with self.under_attack():
                call()
        except self.may_raise as error:
            self.world.broken.append(f"{type(error).__name__}: {error!s:.60}")
            return True
        return False

    @contextmanager
    def under_attack(self) -> Iterator[None]:
        """Within this context it may come."""
        yield

    def apart(self) -> Any:
        """A context in which it does not come."""
        return nullcontext()


class CtrlC(Attack):
    """Ctrl-C at a line."""

    def apart(self) -> Any:
        return untraced()

    def guard(self, call: Callable[[], Any]) -> bool:
        off = broken_off(call, int(self.random.integers(0, self.random.choice([20, 100, 400]))))
        self.world.broken += ["Ctrl-C"] * off
        return off


@contextmanager
def untraced() -> Iterator[None]:
    """A context in which no line is counted."""
    before = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def limited(kind: int, size: int) -> Iterator[None]:
    """A context in which a resource has a limit."""
    limits = resource.getrlimit(kind)
    resource.setrlimit(kind, (limits[1] if size < 0 else size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, limits)


class CtrlCInCore(Attack):
    """Ctrl-C at an instant, as in long calls of the core: a chunk of many steps is added, too."""

    may_raise = (KeyboardInterrupt,)

    def act(self, turn: int) -> None:
        self.world.extend(300)

    @contextmanager
    def under_attack(self) -> Iterator[None]:
        over = False

        def interrupt(number: int, frame: FrameType | None) -> None:
            while frame is not None:
                if frame.f_code.co_filename.startswith(PACKAGE):
                    raise KeyboardInterrupt
                frame = frame.f_back
            signal.setitimer(signal.ITIMER_REAL, 0 if over else 2e-5)  # not yet, or not any more, in a call of relive

        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, float(self.random.uniform(1e-5, 2e-3)))
        try:
            yield
        finally:
            over = True
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


class FullDisk(Attack):
    """No file may grow beyond a size."""

    needs = ("durable",)
    may_raise = (OSError,)

    def apart(self) -> Any:
        return limited(resource.RLIMIT_FSIZE, -1)

    def under_attack(self) -> Any:
        return limited(resource.RLIMIT_FSIZE, int(self.random.choice([0, 100, 1000, 5000])))


class SmallDisk(Attack):
    """A small file system, which others fill."""

    needs = ("durable",)
    may_raise = (OSError,)

    @contextmanager
    def under_attack(self) -> Iterator[None]:
        ballast, left = self.world.folder / "ballast", int(self.random.choice([0, 4096, 16384]))
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        with ballast.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 12))
        os.truncate(ballast, max(ballast.stat().st_size - left, 0))
        try:
            yield
        finally:
            ballast.unlink()


class LittleMemory(Attack):
    """No more address space than there is, or a little more."""

    may_raise = (MemoryError, OSError, RuntimeError)

    def apart(self) -> Any:
        return limited(resource.RLIMIT_AS, -1)

    def under_attack(self) -> Any:
        size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        return limited(resource.RLIMIT_AS, size + int(self.random.choice([1 << 17, 1 << 20, 1 << 22])))


class Kill(Feature):
    """The process dies at a line, or at an instant; another one goes on with the files."""

    needs = ("durable",)

    def arm(self) -> None:
        """Die soon."""
        if self.random.random() < 0.3:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, float(self.random.uniform(0, 0.05)))
            return
        left = int(self.random.integers(0, self.random.choice([100, 1000, 8000])))

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal left
            if not frame.f_code.co_filename.startswith(PACKAGE):
                return None
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return trace

        sys.settrace(trace)


class Clock(Feature):
    """The clock jumps by a day, back and forth; the one that only goes forward does that, too."""

    ahead = 0.0

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        wall, steady = time.time, time.monotonic
        self.other = 0.0
        time.time = lambda: wall() + self.other
        time.monotonic = lambda: steady() + self.ahead

    def act(self, turn: int) -> None:
        self.other += 86_400.0 * float(self.random.choice([-1, 1]))
        self.ahead += float(self.random.choice([0, 1, 86_400]))
