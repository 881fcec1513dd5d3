"""Compiled kernels on disk, and the one line that says that kernels are being compiled.

Compiling all kernels takes many seconds, once; loading them again takes milliseconds. Cached code is executed, so it is
read only from folders that nobody else can write to, and only if its checksum is right.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, cast

import numba
from numba.core import caching, compiler_lock, event, registry

__all__ = ["PROGRESS", "KernelCache", "load_target", "private_directory", "warn_once"]

_FunctionCache: Any = cast("Any", caching).FunctionCache
_CacheFiles: Any = cast("Any", caching).IndexDataCacheFile
_Listener: Any = cast("Any", event).Listener

LONG = 1.0
"""Seconds of compiling after which the line is written."""

COMPILING = (
    "relive compiles its kernels for the first use on this machine, which can take half a minute; they are kept on "
    "disk. `python -m relive.compile` does all of it ahead of time."
)


def _sources() -> tuple[float, int]:
    """When a kernel was changed last, and how long all of them are."""
    files = [path.stat() for path in Path(__file__).parent.parent.rglob("*.py")]
    return max(file.st_mtime for file in files), sum(file.st_size for file in files)


SOURCES = _sources()


class Progress(_Listener):
    """Counts the kernels that this process compiled, and logs one line when that begins to take long.

    The line is a warning of the logger ``relive.compile``, so Python writes it to stderr unless logging is set up
    otherwise.
    """

    def __init__(self) -> None:
        self.compiled = 0
        """How many functions were compiled rather than loaded."""
        self._seconds = 0.0  # of the compilations that ended
        self._depth = 0  # compiling a kernel compiles the functions that it calls
        self._began = 0.0  # when the outermost compilation began
        self._said = False

    def on_start(self, event: Any) -> None:
        """A compilation begins; numba holds its lock until the end, so there is one thread."""
        if _is_kernel(event):
            self._depth += 1
            if self._depth == 1:
                self._began = time.perf_counter()
            self._say_if_long()

    def on_end(self, event: Any) -> None:
        """It ended, well or not."""
        if _is_kernel(event):
            self._say_if_long()
            self._depth, self.compiled = self._depth - 1, self.compiled + 1
            if self._depth == 0:
                self._seconds += time.perf_counter() - self._began

    def _say_if_long(self) -> None:
        if not self._said and self._seconds + time.perf_counter() - self._began > LONG:
            self._said = True
            logging.getLogger("relive.compile").warning(COMPILING)


def _is_kernel(event: Any) -> bool:
    """Whether an event is about a function of ours, and not one that the user compiles with numba."""
    return event.data["dispatcher"].py_func.__module__.startswith("relive.")


PROGRESS = Progress()
cast("Any", event).register("numba:compile", PROGRESS)


def load_target() -> None:
    """Let numba load the types and functions that it knows, which the first kernel would do otherwise.

    As numba does, this takes its lock: two threads that load at once would fail, or compile with half of the types.
    """
    with cast("Any", compiler_lock).global_compiler_lock:
        cast("Any", registry).cpu_target.target_context.refresh()


class KernelCache(_FunctionCache):
    """numba's cache of a function, which takes no harm from files that are damaged and directories that are not there.

    Where neither the package's directory nor the user's own can be written, it is in one for temporary files. What is
    read from a cache is run, so that has to be the user's and closed to all others.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        try:
            super().__init__(function)
        except RuntimeError:
            with _numba_caches_in(private_directory()):
                super().__init__(function)
            warn_once(f"numba can write neither beside the package nor in your home, and caches kernels in "
                      f"'{private_directory()}'; NUMBA_CACHE_DIR names another place")  # fmt: skip
        # numba looks at the function's own file alone, and would go on with what it compiled of others before they
        # changed
        file: Any = _Files(self._cache_path, self._impl.filename_base, SOURCES)
        self._cache_file = file

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What was compiled, or None; files that cannot be read are thrown away."""
        numbas: Any = super()
        try:
            return numbas.load_overload(sig, target_context)
        except Exception:
            with suppress(Exception):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled, where that can be done."""
        with suppress(OSError):
            super().save_overload(sig, data)


class _Files(_CacheFiles):
    """The files of a cache, with a checksum at the end of compiled code: a flipped bit of it could do anything."""

    def _save_data(self, name: str, data: Any) -> None:
        raw = self._dump(data)
        with self._open_for_write(self._data_path(name)) as file:
            file.write(raw + zlib.crc32(raw).to_bytes(4, "little"))

    def _load_data(self, name: str) -> Any:
        raw = Path(self._data_path(name)).read_bytes()
        if zlib.crc32(raw[:-4]).to_bytes(4, "little") != raw[-4:]:
            raise ValueError("damaged")
        numbas: Any = super()
        return numbas._load_data(name)


@contextmanager
def _numba_caches_in(folder: Path) -> Generator[None]:
    config: Any = cast("Any", numba).config
    before, config.CACHE_DIR = config.CACHE_DIR, str(folder)
    try:
        yield
    finally:
        config.CACHE_DIR = before


@cache
def private_directory() -> Path:
    """A directory for temporary files that nobody but this user can read or write.

    Raises:
        RuntimeError: there is none; somebody else has made what has its name, say.
    """
    user = os.getuid() if hasattr(os, "getuid") else None
    folder = Path(tempfile.gettempdir(), "relive-kernels" if user is None else f"relive-kernels-{user}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()  # a link would be followed to wherever its owner wants
    if not stat.S_ISDIR(found.st_mode) or (user is not None and (found.st_uid != user or found.st_mode & 0o077)):
        raise RuntimeError(f"'{folder}' is not a directory of yours alone")
    return folder


@cache
def warn_once(message: str) -> None:
    """Tell the user something that holds for all kernels."""
    warnings.warn(f"relive: {message}", RuntimeWarning, stacklevel=2)
