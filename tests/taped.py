"""A stand-in for a CUDA graph on any device: it notes the operations of a call, undoes them, and runs them again."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Tape"]


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
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(given, Tensor):
                self._before.append((given, given.detach().clone()))
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
            returns = func._schema.returns
            again = func(*args, **kwargs)
            if all(found.alias_info is None for found in returns):
                for tensor, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    tensor.copy_(new)
