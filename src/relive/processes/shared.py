"""SharedBlock: zeroed memory that several processes read and write, with places that a process can claim."""

from __future__ import annotations

import mmap
import os
import secrets
from typing import Any
from weakref import WeakSet, finalize

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import LifecycleError, ParameterError
from ..memory.estimate import require_free
from ..parameters import COUNT_RULE, require
from . import backing

__all__ = ["Claim", "SharedBlock"]


class SharedBlock:
    """Zeroed memory that processes share. The memory is free again when the last of them ends, however it ends.

    Make one with :meth:`create`. A forked child has the block, too. A pickle of a block holds only its name, so a
    spawned process, or the reader of a queue, must load the pickle while the sender lives. A copy of a block is the
    same memory.

    On Linux the memory has no path: the size of ``/dev/shm`` does not matter, and a kill leaves nothing behind.
    Elsewhere the memory is a file in the folder for temporary files. The process that made the file removes it at its
    end. If that process is killed, the next one that makes a block removes it. Windows has neither.
    """

    array: NDArray[np.uint8]
    """The memory, uint8 ``[nbytes]``. It is valid for as long as an array over it exists."""

    def __init__(self, descriptor: int, token: str) -> None:
        """Map an open file. Use :meth:`create` and :meth:`attach`, which call this."""
        self._descriptor, self._token = descriptor, token
        self.array = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
        finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, nbytes: int) -> SharedBlock:
        """A new block of zeros.

        Raises:
            ParameterError: ``nbytes`` is not a number of bytes, or more than the free memory.
            OSError: the system has no room, or no such memory.
        """
        require("SharedBlock.create", COUNT_RULE, nbytes=nbytes)
        require_free(nbytes, torch.device("cpu"), "the shared memory", "make it smaller")
        token = secrets.token_hex(8)
        descriptor = backing.new_file(token)
        try:
            backing.reserve(descriptor, nbytes)
            block = cls(descriptor, token)
        except BaseException:
            os.close(descriptor)
            raise
        if not backing.IN_MEMORY:
            finalize(block, _remove, token, os.getpid())
        return block

    @classmethod
    def attach(cls, name: str) -> SharedBlock:
        """The block of this name. A process that has the block must still be alive.

        Raises:
            ParameterError: this is not the name of a block.
            LifecycleError: the process that gave the name has ended, or has dropped the block.
        """
        gone = f"shared memory {name!r}: it is gone; send it while a process that has it is alive"
        try:
            source, _, token = name.rpartition("-")
            path = backing.path_of(source, token)
        except (AttributeError, ValueError) as error:
            raise ParameterError(f"SharedBlock.attach(name={name!r}): expected the name of a block") from error
        try:
            descriptor = os.open(path, backing.FLAGS)
        except OSError as error:
            raise LifecycleError(gone) from error
        if not backing.is_that(descriptor, token):
            os.close(descriptor)
            raise LifecycleError(gone)
        return cls(descriptor, token)

    @property
    def token(self) -> str:
        """Sixteen random hexadecimal digits, which no other block has."""
        return self._token

    @property
    def nbytes(self) -> int:
        """The size of the memory."""
        return self.array.nbytes

    @property
    def name(self) -> str:
        """What :meth:`attach` takes in another process, while this process lives and has the block."""
        return f"{backing.source(self._descriptor, self._token)}-{self._token}"

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedBlock.attach, (self.name,)

    def claim(self, place: int) -> Claim | None:
        """Claim a place for this process, until the claim is dropped or the process ends; None if it is taken.

        Args:
            place: any whole number of at least 0; what it stands for is up to the caller.
        """
        claim = Claim(backing.path_of(backing.source(self._descriptor, self._token), self._token), place)
        return claim if claim.holds else None

    def is_claimed(self, place: int) -> bool:
        """Whether a process that is alive has claimed a place."""
        return backing.is_locked(self._descriptor, place)


class Claim:
    """A place of a block that one process has. A child that is forked does not have it."""

    def __init__(self, path: str, place: int) -> None:
        files = list[int]()
        self.drop = finalize(self, _close_all, files)
        """Lets others claim the place."""
        _claims.add(self)
        # on one line: an exception such as Ctrl-C finds the file either not open, or in the list that is closed
        files.append(os.open(path, backing.FLAGS))
        if not backing.lock(files[0], place):
            self.drop()

    @property
    def holds(self) -> bool:
        """Whether this process has the place."""
        return self.drop.alive


def _close_all(files: list[int]) -> None:
    while files:
        os.close(files.pop())


_claims = WeakSet[Claim]()


def _drop_claims() -> None:
    """In a forked child, close the inherited files. They would keep the parent's claims after the parent's end."""
    for claim in list(_claims):
        claim.drop()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_drop_claims)


def _remove(token: str, maker: int) -> None:
    """Remove the file of a block, in the process that made it."""
    if os.getpid() == maker:
        backing.remove(token)
