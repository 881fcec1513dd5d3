"""Graphed: a call on a GPU that is captured in CUDA graphs, so that the host queues all of it at once.

The host takes about 20 µs to queue one operation of torch, and a GPU less than 3 µs to do a small one. A CUDA graph
holds the operations of a call and the memory that they read and write, and is queued as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from ..memory.copier import BoundedCache

__all__ = ["Graphed", "capture", "has_graphs"]


TRIALS = 2
"""Calls of a form before it is captured: by then a compiler has compiled it, and all constants are on the GPU."""


def has_graphs(device: torch.device) -> bool:
    """True if operations on this device can be captured."""
    return device.type == "cuda"


class Graphed:
    """Calls of a function of fixed shapes, with a CUDA graph for each form of its arguments.

    A graph reads and writes memory of its own. So tensors are copied into it, and what it returns is copied as well:
    results are the caller's, as those of a plain call.

    Args:
        call: the function: of tensors, lists of them, None and values that can be hashed. It returns a tensor, a dict
            of them or None, and keeps no tensor that it is given. It neither waits for the GPU nor changes anything but
            the memory of tensors.
        device: the GPU.
        relied_on: all else that decides on the operations of a call, as values that can be hashed. A graph keeps them,
            so that their memory stays.
    """

    def __init__(
        self, call: Callable[..., Any], device: torch.device, relied_on: Callable[[], tuple[Any, ...]]
    ) -> None:
        self._call, self._device, self._relied_on = call, device, relied_on
        self._known = BoundedCache[tuple[Any, ...], "_Graph | int"]()
        """By form: its graph, or after how many more calls there is one; -1 if it cannot be captured."""
        self._pool: Any = None
        """The memory of all graphs. What one of them needs only while it runs, the others use as well."""

    def __call__(self, *given: Any) -> Any:
        """What the function returns for these arguments."""
        if torch.cuda.is_current_stream_capturing():
            return self._call(*given)  # it becomes a part of the caller's graph
        form = *map(_form_of, given), *self._relied_on()
        known = self._known.get(form, TRIALS)
        if known == 0:
            known = self._known.keep(form, self._captured(given))
        if not isinstance(known, int):
            return known(given)
        if known > 0:
            self._known.keep(form, known - 1)
        return self._call(*given)

    def _captured(self, given: tuple[Any, ...]) -> _Graph | int:
        try:
            graph = _Graph(self._call, self._device, self._pool, given)
        except RuntimeError as error:
            warn(f"no CUDA graph could be made of a call, so calls like it stay slow: {error}", stacklevel=2)
            return -1
        self._pool = graph.pool
        return graph


class _Graph:
    """One call: its operations, and the memory that they read and write."""

    def __init__(self, call: Callable[..., Any], device: torch.device, pool: Any, given: tuple[Any, ...]) -> None:
        with torch.inference_mode(False), torch.no_grad():  # its tensors are used with and without these modes
            arguments = [_copied(value) for value in given]
            self._inputs = _tensors(arguments)
            self._replay, self._result, self.pool = capture(lambda: call(*arguments), device, pool)

    def __call__(self, given: tuple[Any, ...]) -> Any:
        if self._inputs:
            with torch.no_grad():
                torch._foreach_copy_(self._inputs, _tensors(given))
        self._replay()
        result = self._result
        if isinstance(result, dict):
            return {name: tensor.clone() for name, tensor in result.items()}
        return None if result is None else result.clone()


def capture(call: Callable[[], Any], device: torch.device, pool: Any) -> tuple[Callable[[], None], Any, Any]:
    """What runs the operations of a call, the results that it then writes, and the memory that it takes them from.

    The call is made once, and runs none of its operations.

    Args:
        pool: the memory of earlier graphs, to be used again; None for memory of its own.

    Raises:
        RuntimeError: an operation cannot be captured.
    """
    graph, pools = torch.cuda.CUDAGraph(), () if pool is None else (pool,)
    with torch.cuda.device(device):
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            graph.capture_begin(*pools, capture_error_mode="thread_local")  # other threads go on using the GPU
            try:
                result = call()
            except BaseException:
                with suppress(RuntimeError):  # it says once more that the capture failed
                    graph.capture_end()
                raise
            graph.capture_end()
        here.wait_stream(side)
    return graph.replay, result, graph.pool()


def _form_of(value: Any) -> Any:
    """All of an argument that decides on operations: of a tensor, its shape and dtype."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return tuple(map(_form_of, value)) if isinstance(value, list) else value


def _copied(value: Any) -> Any:
    """An argument in memory of its own."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device=value.device).copy_(value)
    return [_copied(member) for member in value] if isinstance(value, list) else value


def _tensors(arguments: Any) -> list[Tensor]:
    """The tensors among arguments, and in lists of them."""
    found = list[Tensor]()
    for value in arguments:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list):
            found += value
    return found
