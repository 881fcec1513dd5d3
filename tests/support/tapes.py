"""A stand-in for a CUDA graph on any device: it notes the operations of a call, undoes them, and runs them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from relive.memory import graphs
from relive.replay import mirror
from relive.rollout import buffer, minibatches

__all__ = ["TAPED", "Tape", "with_tapes"]

TAPED = "cpu, on tape"
"""The place of a replay whose calls are captured on tapes."""


class Tape(TorchDispatchMode):
    """Inside, operations are noted; afterwards their writes are undone, as a capture makes none.

    :meth:`replay` runs them on the same memory, and puts what they return where the first results are.
    """

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[tuple[Any, Any, dict[str, Any], Any]] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for k in written(func):
            if k < len(args) and isinstance(args[k], Tensor):
                self._before.append((args[k], args[k].detach().clone()))
        result = func(*args, **kwargs)
        self._noted.append((func, args, kwargs, result))
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for tensor, before in reversed(self._before):
            tensor.copy_(before)
        self._before.clear()

    def replay(self) -> None:
        """Run the operations again."""
        for func, args, kwargs, result in self._noted:
            again = func(*args, **kwargs)
            if returns_new_memory(func):
                for tensor, new in zip(leaves(result), leaves(again), strict=True):
                    tensor.copy_(new)


def leaves(result: Any) -> list[Any]:
    """The tensors that an operation returns, mostly one: torch's own trees take longer than the operation."""
    return [result] if isinstance(result, Tensor) else tree_leaves(result)


@cache  # torch makes new objects of a schema each time that it is read
def written(func: Any) -> list[int]:
    """At which places an operation takes a tensor that it writes to."""
    aliases = [argument.alias_info for argument in func._schema.arguments]
    return [k for k, alias in enumerate(aliases) if alias is not None and alias.is_write]


@cache
def returns_new_memory(func: Any) -> bool:
    """Whether what an operation returns is no memory of its arguments."""
    return all(found.alias_info is None for found in func._schema.returns)


@contextmanager
def with_tapes() -> Iterator[list[Tape]]:
    """Inside, calls on a device are captured whatever that device is: on these tapes."""
    made: list[Tape] = []

    def capture(call: Callable[[], Any], device: torch.device, pool: Any) -> tuple[Callable[[], None], Any, Any]:
        with Tape() as tape:
            result = call()
        made.append(tape)
        return tape.replay, result, pool

    with (
        mock.patch.object(graphs, "capture", capture),
        mock.patch.object(mirror, "has_graphs", return_value=True),
        mock.patch.object(minibatches, "has_graphs", return_value=True),
        mock.patch.object(buffer, "has_graphs", return_value=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),  # an error without CUDA
    ):
        yield made
