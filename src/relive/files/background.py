"""Saves in the background: the handle of a save, and the saves of a buffer, which come one after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from threading import TIMEOUT_MAX, Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import LifecycleError
from ..parameters import TIMEOUT_RULE, require
from .format import Array, Streamed, plan

__all__ = ["SaveHandle", "Saves", "detached"]


class SaveHandle:
    """A save: done, or under way in another thread. ``save`` returns it.

    The thread is not a daemon, so the interpreter does not end before the save is done. If a save failed and nobody has
    seen its error when the handle is dropped, Python prints the error.
    """

    def __init__(self, path: str | os.PathLike[str], work: Callable[[], object] | None = None) -> None:
        self.path = os.fspath(path)
        """The directory."""
        self._error: BaseException | None = None
        self._seen, self._process = False, os.getpid()
        self._thread = None if work is None else Thread(target=self._run, args=(work,), name=f"save into {self.path}")

    @property
    def done(self) -> bool:
        """Whether the save is over: on the disk, or failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the save is on the disk.

        Args:
            timeout: seconds to wait at most; None waits as long as it takes.

        Raises:
            FileFormatError, OSError: the save failed. Without ``background``, ``save`` would have raised this error.
            TimeoutError: the save is not done yet. It goes on.
            ParameterError: the timeout is negative or NaN.
            LifecycleError: this process is a fork of the one that saves.
        """
        require("wait", TIMEOUT_RULE, timeout=timeout)
        if self.elsewhere:
            raise LifecycleError(f"the save into '{self.path}' was begun by another process; wait for it there")
        if self._thread is not None:
            self._thread.join(None if timeout is None else min(timeout, TIMEOUT_MAX))  # more would overflow
            if self._thread.is_alive():
                raise TimeoutError(f"the save into '{self.path}' is not done after {timeout} seconds; wait again")
        if self._error is not None:
            self._seen = True
            raise self._error

    @property
    def elsewhere(self) -> bool:
        """Whether the parent of this forked process saves. A fork does not have the threads of its parent."""
        return self._thread is not None and self._process != os.getpid()

    @property
    def unseen(self) -> bool:
        """Whether the save has failed, and :meth:`wait` has not raised the error yet."""
        return self._error is not None and not self._seen

    def start(self) -> None:
        """Begin the save, if it is to go on in another thread."""
        if self._thread is not None:
            self._thread.start()

    def drop(self) -> None:
        """Do not print the error if the save fails: nobody needs it."""
        self._seen = True

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    def __repr__(self) -> str:
        state = "elsewhere" if self.elsewhere else "under way" if not self.done else "failed" if self._error else "done"
        return f"<save into {self.path!r}: {state}>"

    def __del__(self) -> None:
        error = self.__dict__.get("_error")
        if error is not None and not self._seen:
            raise error  # nobody can catch it here, so Python prints it


class Saves:
    """The saves of one buffer. A new one waits for the one before."""

    def __init__(self) -> None:
        self._last: SaveHandle | None = None

    def settle(self) -> None:
        """Wait for the save under way, if there is one.

        Raises:
            FileFormatError, OSError: the save before failed, and nobody has seen its error yet. It is raised once.
        """
        last = self._last
        if last is None or last.elsewhere:
            self._last = None
            return
        fresh = last.unseen or not last.done
        try:
            last.wait()
        except Exception as error:
            if not fresh:
                return
            error.add_note("this is the error of the save before, in the background; now nothing was saved")
            raise
        finally:
            if last.done:
                self._last = None

    def begin(self, handle: SaveHandle) -> SaveHandle:
        """Start a save. Call :meth:`settle` before."""
        handle.start()
        self._last = handle
        return handle

    def forget(self, handle: SaveHandle) -> None:
        """Forget a save that nobody needs any more, and its error."""
        handle.drop()
        self._last = None

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and deepcopy: a copy of a buffer has no save under way."""
        return Saves, ()


def detached(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Copies in RAM of the tensors that a save writes, so that the originals may change.

    Raises:
        DTypeError, FieldError: a tensor cannot be saved; names it.
    """
    plan(tensors, "")
    return {name: _copied(value) for name, value in tensors.items()}


def _copied(value: Array) -> Array:
    if isinstance(value, Streamed):
        return value.whole()
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return np.array(value)
