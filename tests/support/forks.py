"""Work in forked processes, which are killed together with all that they started when they end or take too long."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import IO, Any

SECONDS = 60.0
"""How long forked work may take: far more than it does."""


def in_fork(work: Callable[..., Any], *args: Any, seconds: float = SECONDS, name: str = "the child") -> Any:
    """What ``work(*args)`` returns in a forked process, through pickle.

    If it raises, dies or is not done in time, the test fails with what it wrote. A fork has loaded what this process
    has; a new interpreter would need two seconds of the processor to import as much.
    """
    load()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as result:
        process = multiprocessing.get_context("fork").Process(target=_do, args=(output, result, work, args))
        process.start()
        try:
            process.join(seconds)
            code = process.exitcode
            if code is None:  # faulthandler writes where its threads are
                os.kill(process.pid, signal.SIGABRT)
                process.join(5)
        finally:
            _end(process)
        output.seek(0)
        wrote = output.read().decode(errors="replace")
        assert code is not None, f"{name} was not done in {seconds:g} s, and was killed; it wrote:\n{wrote}"
        assert code == 0, f"{name} ended with {code}; it wrote:\n{wrote}"
        result.seek(0)
        return pickle.load(result)


@cache
def load() -> None:
    """Import here, once, what the first batch of a process imports, and not in each fork: that takes a second or so."""
    for module in ("relive", "gymnasium", "tensordict"):
        importlib.import_module(module)
    # At its first use the engine of gradients starts a thread for each device, without which a fork cannot use it. In
    # torch for CUDA it finds one once something was compiled, where there is none.
    torch = importlib.import_module("torch")
    torch.ones(1, requires_grad=True).sum().backward()
    gc.collect()
    gc.freeze()  # no later garbage collection looks at them


def _do(output: IO[bytes], result: IO[bytes], work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """The forked process: it leads a group of its own, to which all processes belong that it starts."""
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))
    faulthandler.enable(sys.stderr)
    pickle.dump(work(*args), result)
    result.flush()


def _end(process: Any) -> None:
    """Kill the process, if it is alive, and what is left of its group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # in case it had no time to make its group
    process.join()
