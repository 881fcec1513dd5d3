"""StepChecker: checks that a step fits the schema before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from ..errors import DeviceError, DTypeError, FieldError, ShapeError
from .arrays import (
    NO_DTYPE,
    NUMPY_DTYPES,
    SQUARES,
    Array,
    Leaf,
    as_tensor,
    check_castable,
    fits,
    in_memory,
    is_plain,
    numpy_view,
)
from .schema import Path, Schema, descend, dotted, unknown_field


class Copier(Protocol):
    """Checks whole steps, as :class:`relive.memory.copier.StepCopier` does."""

    @property
    def leaves(self) -> Callable[[object], tuple[Leaf, ...] | None]:
        """Gives the leaves of a step as they are stored; None if they have to be checked one by one."""
        ...


class StepChecker:
    """Turns one vector step into a list of storable arrays, one per leaf, or raises without side effects.

    In the common case, arrays have the stored shape and dtype and cost a few attribute reads per field. The result
    holds NumPy arrays and contiguous tensors for the CPU, and tensors on the device otherwise. Only arrays that must
    move to the device are copied; with ``upload=False`` they stay where they are.
    """

    __slots__ = (
        "_arrays",
        "_branches",
        "_device",
        "_host",
        "_names",
        "_num_envs",
        "_plan",
        "_schema",
    )

    def __init__(self, schema: Schema, num_envs: int, device: torch.device, *, upload: bool = True) -> None:
        self._schema = schema
        self._num_envs = num_envs
        self._device = device
        self._host = device.type == "cpu"
        self._arrays = self._host or not upload
        self._names: Set[str] = frozenset(schema.names)
        self._branches = schema.branches
        self._plan = [
            (
                path[0],
                path[1:],
                (num_envs, *field.shape),
                field.dtype,
                NUMPY_DTYPES.get(field.dtype, NO_DTYPE),
                SQUARES.get(field.dtype, 0.0),
                path,
            )
            for path, field in schema.leaves.items()
        ]

    def __setstate__(self, state: tuple[None, Mapping[str, Any]]) -> None:
        """Made again from what pickles of all versions hold."""
        _, slots = state
        upload = slots["_host"] or not slots["_arrays"]
        self.__init__(slots["_schema"], slots["_num_envs"], slots["_device"], upload=upload)

    def __call__(self, step: Mapping[str, object], copier: Copier | None = None) -> Sequence[Leaf]:
        """The leaves of ``step`` in schema order, each ``[N, ...]``.

        A ``copier`` may find at once that all of them fit, once they have their names: a mapping need not be a dict.
        """
        values = self._named(step)
        leaves = None if copier is None else copier.leaves(values)
        return self._each(values) if leaves is None else leaves

    def _named(self, step: Mapping[str, object]) -> tuple[object, ...]:
        """The leaves of a step that has exactly the fields of the schema, as they were given."""
        if step.keys() != self._names:
            raise FieldError(self._name_mismatch(step))
        values: list[object] = []
        for name, inner, *_, path in self._plan:
            value: Any = step[name]
            if inner:
                direct = len(inner) == 1 and value.__class__ is dict and inner[0] in value
                value = value[inner[0]] if direct else _inner(value, path)
            values.append(value)
        if self._branches:
            self._refuse_extra(step)
        return tuple(values)

    def _each(self, given_values: tuple[object, ...]) -> list[Leaf]:
        """Each leaf checked by itself."""
        values: list[Leaf] = []
        host, arrays = self._host, self._arrays
        for value, (_, _, shape, dtype, np_dtype, square, path) in zip(given_values, self._plan, strict=True):
            if type(value) is np.ndarray:
                # assignment to a float column converts any float array
                given = value.dtype
                if (
                    arrays
                    and value.shape == shape
                    and (
                        given is np_dtype
                        or (
                            given.kind == "f" == np_dtype.kind
                            and (given.itemsize <= np_dtype.itemsize or fits(value, square))
                        )
                    )
                ):
                    values.append(value)
                    continue
            elif type(value) is Tensor and value.dtype is dtype and value.shape == shape:
                if host and value.is_cpu:
                    values.append(value if is_plain(value) else _numbers(value, path))
                    continue
                if value.device == self._device:
                    values.append(value.detach())
                    continue
            values.append(self._coerce(value, shape, dtype, path))
        return values

    def _refuse_extra(self, step: Mapping[str, object]) -> None:
        """Refuse unknown members of nested values. All leaves were found, so a wrong count means an extra one."""
        for path, names in self._branches:
            given = descend(step[path[0]], path[1:])
            if given.__class__ is dict and len(given) == len(names):
                continue
            keys = list(given.keys()) if hasattr(given, "keys") else [str(i) for i in range(len(given))]
            if len(keys) != len(names):
                extra = next(key for key in keys if key not in names)
                raise FieldError(unknown_field((*path, str(extra)), [dotted((*path, n)) for n in names], "the schema"))

    def _name_mismatch(self, step: Mapping[str, object]) -> str:
        known = self._schema.names
        for name in step:
            if name not in self._names:
                return unknown_field(name, known, "this buffer's schema")
        missing = ", ".join(repr(name) for name in known if name not in step)
        return f"the step lacks {missing}; a step has exactly the fields {', '.join(known)}"

    def _coerce(self, value: object, shape: tuple[int, ...], dtype: torch.dtype, path: Path) -> Leaf:
        """The slow path: lists and numbers, a single env without its axis, safe dtype conversions, and errors."""
        name = dotted(path)
        if isinstance(value, Tensor):
            if value.device != self._device:
                raise DeviceError(
                    f"field '{name}': the buffer is on {self._device}, got a tensor on {value.device}; "
                    f"pass .to('{self._device}'), or a NumPy array, which is always copied over"
                )
            tensor = value.detach()
        else:
            tensor = as_tensor(value, name)
        tensor = self._fit_shape(tensor, shape, name)
        if tensor.dtype is not dtype:
            check_castable(tensor, dtype, name)
            tensor = tensor.to(dtype)
        if self._arrays and tensor.is_cpu:
            return _numbers(tensor, path)
        return tensor.to(self._device)

    def _fit_shape(self, tensor: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
        given = tuple(tensor.shape)
        if given == shape:
            return tensor
        if self._num_envs == 1 and given == shape[1:]:
            return tensor.unsqueeze(0)
        message = f"field '{name}': expected shape {shape} (num_envs first), got {given}"
        if given == shape[1:]:
            message += f"; the leading axis of {shape[0]} (num_envs) is missing: pass one row per env"
        elif len(shape) == 3 and given == (shape[1], shape[0], shape[2]):
            message += "; envs come first here, in recurrent states too: pass .transpose(0, 1)"
        elif given[:1] != shape[:1]:
            message += (
                f"; pass one row for each of the {shape[0]} envs"
                if shape[0] > 1
                else "; pass one row, as num_envs is 1"
            )
        elif given == (*shape, 1):
            message += "; drop the last axis with .squeeze(-1)"
        else:
            message += f"; the schema says {shape[1:]} per env"
        raise ShapeError(message)


def _numbers(tensor: Tensor, path: Path) -> Array:
    """The numbers of a tensor as NumPy.

    Raises:
        DTypeError: its numbers cannot be read.
    """
    return numpy_view(in_memory(tensor.detach(), f"field '{dotted(path)}'"))


def refuse_unreadable(tree: object, path: Path = ()) -> None:
    """Refuse tensors whose numbers cannot be read. Called after a failure, because torch's own errors name no field.

    Raises:
        DTypeError: ``tree`` holds a nested, sparse or quantized tensor, or one without memory.
    """
    if isinstance(tree, Tensor):
        name = f"field '{dotted(path)}'"
        kinds = [
            ("nested", "to_padded_tensor(...)", tree.is_nested),
            ("sparse", "to_dense()", tree.layout is not torch.strided),
            ("quantized", "dequantize()", tree.is_quantized),
        ]
        for kind, call, applies in kinds:
            if applies:
                raise DTypeError(f"{name}: expected a dense tensor, got a {kind} one; pass its .{call}")
        if tree.is_cpu:
            in_memory(tree.detach(), name)
        return
    branches: Any = tree
    members = branches.items() if hasattr(tree, "items") else enumerate(branches) if isinstance(tree, tuple) else ()
    for name, member in members:
        refuse_unreadable(member, (*path, str(name)))


def _inner(value: object, path: Path) -> object:
    try:
        return descend(value, path[1:])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        where = ""
        for depth in range(2, len(path)):  # what was given for the innermost field that is there
            try:
                value = descend(value, path[depth - 1 : depth])
            except (KeyError, IndexError, TypeError, ValueError):
                break
            where = f"'{dotted(path[:depth])}', the "
        raise FieldError(f"field '{dotted(path)}': missing from {where or 'the '}{_kind_of(value)}") from error


def _kind_of(value: Any) -> str:
    """The words of an error for the value of a nested field: its kind, and how to pass it."""
    kind, shape = type(value).__name__, getattr(value, "shape", None)
    if hasattr(value, "keys"):
        return f"{kind} given, which has {', '.join(map(repr, value.keys()))}"
    several = isinstance(value, list | tuple) or getattr(value, "dtype", None) == np.object_
    rows = cast("list[object]", value if several else [])
    if len(rows) and all(hasattr(row, "keys") for row in rows):
        return f"{kind} of {len(rows)} dicts given; pass one dict, whose members have one row per env"
    if isinstance(value, tuple):
        return f"tuple of {len(rows)} given"
    of = "" if shape is None else f" of shape {tuple(shape)}"
    return f"{kind}{of} given; pass a dict or tuple of its members, as the schema has, each with one row per env"
