"""Slots: batches in shared memory. One process fills a slot, and another one reads it in place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Never, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import increment_version

from ..batches.sequences import SequenceBatch, replace_parts
from ..batches.tensordicts import as_tensordict
from ..errors import LifecycleError
from ..steps.trees import Path, map_leaves
from .shared import SharedBlock

__all__ = ["BatchForm", "Packed", "Slot", "form_of", "is_batch"]

LINE = 64
"""Bytes of a cache line; every field begins on one."""


@dataclass(frozen=True)
class BatchForm:
    """Which tensors a batch consists of: all that a reader needs besides their bytes."""

    fields: tuple[tuple[Path, torch.dtype, tuple[int, ...]], ...]
    """Path, dtype and shape of each tensor, in the order of memory."""
    facts: int
    """How many of the last fields are facts about sequences."""
    states: int
    """How many fields, before the facts, are recurrent states."""
    hidden: Any
    """The nesting of the states, each as its number; None where there are none."""
    time_first: bool | None
    """Whether time is the first axis of a batch of sequences; None for a batch of transitions."""

    @cached_property
    def offsets(self) -> list[int]:
        """Where each field begins, in bytes, and where the last one ends."""
        found = [0]
        for _, dtype, shape in self.fields:
            found.append(found[-1] + -(-math.prod(shape) * dtype.itemsize // LINE) * LINE)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of such a batch."""
        return self.offsets[-1]


def form_of(batch: Any) -> tuple[BatchForm, list[Tensor]]:
    """The form of a batch of a replay, and its tensors in the form's order."""
    if not isinstance(batch, SequenceBatch):
        items: Any = batch.items(include_nested=True, leaves_only=True)
        named: dict[Path, Tensor] = {key if isinstance(key, tuple) else (key,): value for key, value in items}
        return BatchForm(_fields(named), 0, 0, None, None), list(named.values())
    leaves, facts, hidden = batch.parts
    states = list[Tensor]()

    def number(state: Tensor) -> int:
        states.append(state)
        return len(states) - 1

    numbers = map_leaves(number, hidden)
    numbered = {("hidden", str(i)): state for i, state in enumerate(states)}
    known = {(name,): fact for name, fact in facts.items()}
    fields = _fields(leaves) + _fields(numbered) + _fields(known)
    return BatchForm(fields, len(facts), len(states), numbers, batch.time_first), [
        *leaves.values(),
        *states,
        *known.values(),
    ]


def _fields(leaves: Mapping[Path, Tensor]) -> tuple[tuple[Path, torch.dtype, tuple[int, ...]], ...]:
    return tuple((path, leaf.dtype, tuple(leaf.shape)) for path, leaf in leaves.items())


class Slot:
    """Room for one batch, and the tensors over it.

    Args:
        memory: uint8, at least as large as the batch; a tensor may be on a device.
        form: the form of the batch that the slot holds now.
        block: the shared memory that ``memory`` belongs to, if it is shared.
    """

    def __init__(self, memory: NDArray[np.uint8] | Tensor, form: BatchForm, block: SharedBlock | None = None) -> None:
        self.form, self.block = form, block
        self.memory = memory if isinstance(memory, Tensor) else torch.from_numpy(memory)
        self._tensors = [
            self.memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for (_, dtype, shape), start in zip(form.fields, form.offsets, strict=False)
        ]
        self._leaves = dict(zip([path for path, _, _ in form.fields], self._tensors, strict=True))
        self._handed: Any = None

    def write(self, tensors: list[Tensor]) -> None:
        """Copy the tensors of a batch of this form."""
        for target, tensor in zip(self._tensors, tensors, strict=True):
            target.copy_(tensor)

    def batch(self) -> Any:
        """The batch, without a copy. It is valid until :meth:`expire`."""
        form, tensors = self.form, self._tensors
        if form.time_first is None:
            self._handed = as_tensordict(self._leaves, tensors[0].shape[:1])
            return self._handed
        count = len(tensors) - form.facts
        paths = [path for path, _, _ in form.fields]
        middle = count - form.states
        facts = {path[0]: tensor for path, tensor in zip(paths[count:], tensors[count:], strict=True)}
        hidden = map_leaves(tensors[middle:count].__getitem__, form.hidden)
        leaves = dict(zip(paths[:middle], tensors, strict=False))
        self._handed = SequenceBatch(leaves, facts, hidden, time_first=form.time_first)
        return self._handed

    def expire(self) -> None:
        """Make the batch that was handed out refuse all use, and let autograd see that its tensors change.

        Tensors that were taken out of the batch can still be read, but what they show is undefined.
        """
        batch, self._handed = self._handed, None
        if isinstance(batch, SequenceBatch):
            replace_parts(batch, _EXPIRED)
        elif batch is not None:
            batch._tensordict = _EXPIRED
        increment_version(self.memory)


@dataclass(frozen=True)
class Packed:
    """A batch as bytes, to send to another process. Tensors would be sent as open files."""

    form: BatchForm
    memory: NDArray[np.uint8]

    @classmethod
    def of(cls, batch: Any) -> Packed:
        """The bytes of a batch."""
        form, tensors = form_of(batch)
        packed = cls(form, np.empty(form.nbytes, np.uint8))
        Slot(packed.memory, form).write(tensors)
        return packed

    def batch(self) -> Any:
        """The batch, over these bytes."""
        return Slot(self.memory, self.form).batch()


def is_batch(value: Any) -> bool:
    """Whether this is a batch of a replay, of transitions or of sequences."""
    return isinstance(value, SequenceBatch) or type(value).__name__ == "TensorDict"


class _Expired(dict[Any, Any]):
    """The fields of a batch that was given back: its slot may hold another batch by now."""

    def _refuse(self, *_: Any) -> Never:
        raise LifecycleError(
            "this batch was given back: a batch of a server is valid until its learner asks for the next one; keep "
            "batch.clone() to use it longer"
        )

    __getitem__ = __iter__ = __len__ = __contains__ = get = keys = values = items = cast("Any", _refuse)


_EXPIRED = _Expired()
