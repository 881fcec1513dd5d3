"""Uploads: copies batches from slots to a device, each in one copy, from memory that a GPU reads by itself."""

from __future__ import annotations

from typing import Any
from weakref import finalize

import torch

from .shared import SharedBlock
from .slots import Slot

__all__ = ["Uploads"]


class Uploads:
    """Copies batches of slots to a device. A slot may be given back once :meth:`wait` returns.

    For CUDA, the shared memory of each slot is page-locked in this process. So the GPU copies a batch while the learner
    goes on. If the system refuses to lock the memory, the learner waits for the copy.

    Args:
        device: where batches go.
        locks: whether to lock memory; by default for CUDA.
    """

    def __init__(self, device: torch.device, locks: bool | None = None) -> None:
        self.device = device
        self._locks = device.type == "cuda" if locks is None else locks
        self._locked: dict[int, finalize[Any, Any]] = {}
        """The call that unlocks the memory of each slot, by the address of the memory."""
        self._copied: Any = None
        """The event after the last copy."""

    @property
    def locked(self) -> int:
        """How many slots are locked."""
        return sum(unlock.alive for unlock in self._locked.values())

    def prepare(self, block: SharedBlock) -> None:
        """Lock the memory of a slot, until the block is dropped or :meth:`close` is called."""
        if not self._locks:
            return
        address, runtime = block.array.ctypes.data, _runtime()
        self._locked = {key: unlock for key, unlock in self._locked.items() if unlock.alive}
        if int(runtime.cudaHostRegister(address, block.nbytes, 0)) == 0:
            self._locked[address] = finalize(block, _unlock, runtime, address)

    def upload(self, slot: Slot) -> Any:
        """The batch of a slot on the device, in memory of its own."""
        locked = slot.memory.data_ptr() in self._locked
        moved = slot.memory[: slot.form.nbytes].to(self.device, non_blocking=locked, copy=True)
        if locked:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self.device))
        return Slot(moved, slot.form).batch()

    def wait(self) -> None:
        """Wait until the device has copied the last batch."""
        copied, self._copied = self._copied, None
        if copied is not None:
            copied.synchronize()

    def close(self) -> None:
        """Unlock all memory."""
        self.wait()
        for unlock in self._locked.values():
            unlock()


def _runtime() -> Any:
    """CUDA's runtime."""
    cuda: Any = torch.cuda  # its stubs leave the type open
    return cuda.cudart()


def _unlock(runtime: Any, address: int) -> None:
    runtime.cudaHostUnregister(address)
