"""Lets relive believe that it runs on macOS or Windows: what only Linux has is gone, and so is the system's name.

Python imports this file at its start, in every process, if ``PYTHONPATH`` names the folder. ``RELIVE_SYSTEM`` is
"darwin" or "win32". Only relive and its tests see that system: before it is put on, all that they use is imported.
Files stay Linux's: an open file can be removed and renamed, which Windows refuses.
"""

from __future__ import annotations

import sys
from importlib import import_module
from os import environ
from typing import Any

USED = (
    *("asyncio", "concurrent.futures", "ctypes", "fcntl", "mmap", "multiprocessing.connection", "multiprocessing.pool"),
    *("multiprocessing.popen_fork", "multiprocessing.popen_spawn_posix", "multiprocessing.queues", "platform", "pty"),
    *("multiprocessing.resource_tracker", "multiprocessing.shared_memory", "multiprocessing.synchronize", "pathlib"),
    *("resource", "select", "selectors", "shutil", "signal", "socket", "subprocess", "tempfile"),
    *("gymnasium.vector", "numpy.testing", "safetensors.torch", "tensordict", "torch.multiprocessing"),
    *("torch._dynamo", "torch.utils.data"),
)
"""Modules that have to see the system that is there."""

LINUX = {
    "os": (
        *("copy_file_range", "eventfd", "fdatasync", "getrandom", "memfd_create", "pidfd_open", "posix_fadvise"),
        *("posix_fallocate", "sched_getaffinity", "sched_setaffinity", "setns", "splice", "unshare"),
    ),
    "fcntl": ("F_ADD_SEALS", "F_GET_SEALS", "F_OFD_GETLK", "F_OFD_SETLK", "F_OFD_SETLKW", "F_SETPIPE_SZ"),
    "mmap": ("MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "MADV_DONTFORK", "MADV_POPULATE_WRITE", "MAP_POPULATE"),
    "resource": ("RUSAGE_THREAD",),
    "socket": ("SO_PEERCRED",),
}
"""What macOS lacks."""

POSIX = {
    **LINUX,
    "os": (*LINUX["os"], "fork", "forkpty", "getuid", "mkfifo", "pread", "pwrite", "register_at_fork", "statvfs"),
    "mmap": (*LINUX["mmap"], "MADV_NORMAL", "MADV_RANDOM", "MADV_WILLNEED", "MAP_PRIVATE", "MAP_ANONYMOUS"),
    "socket": (*LINUX["socket"], "AF_UNIX"),
}
"""What Windows lacks."""

NO_MODULES = ("fcntl", "resource", "pty", "termios")
"""Modules that Windows lacks."""


def disguise(system: str) -> None:
    """Put the other system on."""
    for name in USED:
        import_module(name)
    for module, names in (LINUX if system == "darwin" else POSIX).items():
        for name in names:
            if hasattr(sys.modules[module], name):
                delattr(sys.modules[module], name)
    if system == "win32":
        sys.modules.update(dict.fromkeys(NO_MODULES))  # pyright: ignore[reportArgumentType, reportCallIssue]
    sys.platform = system  # pyright: ignore[reportAttributeAccessIssue]


class AtImport:
    """Stands before all finders of modules, and waits for relive."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Nothing is found here."""
        if name == "relive":
            sys.meta_path.remove(self)
            disguise(environ["RELIVE_SYSTEM"])


if environ.get("RELIVE_SYSTEM") in ("darwin", "win32"):
    sys.meta_path.insert(0, AtImport())
