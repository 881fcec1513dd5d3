"""A device for tests on machines that have none: tensors that refuse to meet those of the CPU, as a GPU's do.

It goes by the name of torch's "meta" device, whose tensors hold nothing; here they hold everything, out of reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import tensordict  # noqa: F401  # here, because its first import waits for results
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ELSEWHERE = torch.device("meta")
aten = torch.ops.aten
CROSSING = (aten._to_copy.default, aten.copy_.default)
MIXING = (*CROSSING, aten.index.Tensor)  # an index may be of the CPU anywhere in torch


class Traffic:
    """What has crossed from one side to the other: bytes of each copy."""

    def __init__(self) -> None:
        self.out: list[int] = []
        self.back: list[int] = []

    def clear(self) -> None:
        """Nothing yet."""
        self.out.clear()
        self.back.clear()


class Far(Tensor):
    """A tensor on that device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Far:
        far = Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device=ELSEWHERE,
        )  # fmt: skip
        far.inner = inner
        return far

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Far({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, None)


class _Mode(TorchDispatchMode):
    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, self.traffic)


def _run(func: Any, args: Any, kwargs: dict[str, Any], traffic: Traffic | None) -> Any:
    tensors = list(_tensors((args, kwargs)))
    far = [tensor for tensor in tensors if isinstance(tensor, Far)]
    device = kwargs.get("device")
    if far and len(far) < len(tensors) and func not in MIXING:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device")
    lands = ELSEWHERE if device == ELSEWHERE or (far and device is None) else torch.device("cpu")
    if func is aten.copy_.default:
        lands = tensors[0].device
    if traffic is not None and func in CROSSING:
        moved = tensors[-1]
        if isinstance(moved, Far) and lands != ELSEWHERE:
            traffic.back.append(moved.numel() * moved.itemsize)
        elif not isinstance(moved, Far) and lands == ELSEWHERE:
            traffic.out.append(moved.numel() * moved.itemsize)
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    near = _mapped(lambda x: x.inner if isinstance(x, Far) else x, (args, kwargs))
    result = func(*near[0], **near[1])
    if tensors and is_in_place(func):
        return args[0] if result is not None else None
    return _mapped(lambda x: Far(x) if isinstance(x, Tensor) and lands == ELSEWHERE else x, result)


@cache  # torch makes new objects of a schema each time that it is read
def is_in_place(func: Any) -> bool:
    """Whether an operation changes its first tensor, and returns it or nothing."""
    return func._schema.is_mutable and func._schema.name.endswith("_")


@cache
def returns_a_view(func: Any) -> bool:
    """Whether what an operation returns is memory of its arguments, which it does not write."""
    returns = func._schema.returns
    return any(found.alias_info is not None and not found.alias_info.is_write for found in returns)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors among the arguments of an operation. torch's own trees take several times as long."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for member in tree:
            yield from _tensors(member)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


def _mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """``function`` of each argument of an operation, in a tree like them."""
    if type(tree) in (tuple, list):
        return type(tree)(_mapped(function, member) for member in tree)
    if isinstance(tree, tuple):  # several results with names
        return type(tree)(*(_mapped(function, member) for member in tree))
    if isinstance(tree, dict):
        return {name: _mapped(function, member) for name, member in tree.items()}
    return function(tree)


PLACES = ["cpu", "stand-in", *(["cuda"] if torch.cuda.is_available() else [])]
"""The devices on which tests of devices run; a test has the CPU stand in for one, too."""


def places(*more: Any) -> list[Any]:
    """These and more, for ``parametrize``. `make test` leaves the stand-in to `.ci/run`.

    It takes three times as long, and finds what ``no_waiting`` does not, which is little.
    """
    from support.effort import in_ci  # asks for the profile, which is not known when conftest.py is read

    return [*(in_ci(name) if name == "stand-in" else name for name in PLACES), *more]


@contextmanager
def place(name: str) -> Iterator[torch.device]:
    """One of PLACES."""
    if name == "stand-in":
        with far_device():
            yield ELSEWHERE
    else:
        yield torch.empty(0, device=name).device


@contextmanager
def far_device() -> Iterator[Traffic]:
    """Inside, ``torch.device("meta")`` is such a device."""
    traffic = Traffic()
    with _Mode(traffic):
        yield traffic


WAITS = {
    aten._local_scalar_dense.default, aten.equal.default, aten.masked_select.default, aten.nonzero.default,
    aten.repeat_interleave.Tensor, aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default,
}  # fmt: skip
"""Operations whose result the host has to know: a number, or how large a tensor is."""

INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}

UNCOUNTED = {aten.empty.memory_format, aten.empty_strided.default, aten.detach.default, aten.lift_fresh.default}


class Watch(TorchDispatchMode):
    """Raises where an operation would make the host wait for a device, or send it something; counts the others.

    Args:
        allow: only count.
    """

    def __init__(self, allow: bool = False) -> None:
        super().__init__()
        self.allow, self.launches, self.waits = allow, list[str](), list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reason = self._reason(func, args, kwargs)
        if reason:
            self.waits.append(f"{func}: {reason}")
            if not self.allow:
                raise AssertionError(f"{func}: {reason}")
        result = func(*args, **kwargs)
        if func not in UNCOUNTED and not returns_a_view(func):
            self.launches.append(str(func))
        return result

    @staticmethod
    def _reason(func: Any, args: Any, kwargs: dict[str, Any]) -> str:
        if func in WAITS:
            return "the host has to know the result"
        if func in INDEXED:
            flags = (torch.bool, torch.uint8)
            if any(isinstance(index, Tensor) and index.dtype in flags for index in args[1]):
                return "a mask gives a tensor of unknown size"
        if func in CROSSING:
            source = args[1] if func is aten.copy_.default else args[0]
            target = args[0].device if func is aten.copy_.default else kwargs.get("device") or source.device
            if source.device != target:
                return f"a copy from {source.device} to {target}"
        return ""


@contextmanager
def no_waiting(allow: bool = False) -> Iterator[Watch]:
    """Inside, whatever would wait for a device raises an AssertionError, on the CPU as well; or is only noted."""
    watch = Watch(allow)
    with watch:
        yield watch
