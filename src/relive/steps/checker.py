"""StepChecker: checks that a step fits the schema before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DeviceError, DTypeError, FieldError, ShapeError
from .arrays import NO_DTYPE, NUMPY_DTYPES, SQUARES, as_tensor, check_castable, fits, numpy_view
from .schema import Schema, unknown_field
from .trees import Path, descend, dotted

__all__ = ["StepChecker", "refuse_sparse"]


class StepChecker:
    """Turns one vector step into a list of storable arrays, one per leaf, or raises without side effects.

    In the common case, arrays have the stored shape and dtype and cost a few attribute reads per field. The result
    holds NumPy arrays and contiguous tensors for the CPU, and tensors on the device otherwise. Only arrays that must
    move to the device are copied; with ``upload=False`` they stay where they are.
    """

    __slots__ = ("_arrays", "_branches", "_device", "_host", "_names", "_num_envs", "_plan", "_schema")

    def __init__(self, schema: Schema, num_envs: int, device: torch.device, *, upload: bool = True) -> None:
        self._schema = schema
        self._num_envs = num_envs
        self._device = device
        self._host = device.type == "cpu"
        self._arrays = self._host or not upload
        self._names = frozenset(schema.names)
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

    def __call__(self, step: Mapping[str, Any]) -> list[Any]:
        """The leaves of ``step`` in schema order, each ``[N, ...]``."""
        names: Any = step.keys()
        if names != self._names:
            raise FieldError(self._name_mismatch(step))
        values: list[Any] = []
        host, arrays = self._host, self._arrays
        for name, inner, shape, dtype, np_dtype, square, path in self._plan:
            value = step[name]
            if inner:
                direct = len(inner) == 1 and value.__class__ is dict and inner[0] in value
                value = value[inner[0]] if direct else _inner(value, path)
            kind: Any = value.__class__  # not type(value): the type checker does not know what that is
            if kind is np.ndarray:
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
            elif kind is Tensor and value.dtype is dtype and value.shape == shape:
                if host and value.is_cpu:
                    plain = value.is_contiguous() and not dtype.is_complex  # complex ones may be conjugated lazily
                    values.append(value if plain else numpy_view(value.detach()))
                    continue
                if value.device == self._device:
                    values.append(value.detach())
                    continue
            values.append(self._coerce(value, shape, dtype, path))
        if self._branches:
            self._refuse_extra(step)
        return values

    def _refuse_extra(self, step: Mapping[str, Any]) -> None:
        """Refuse unknown members of nested values. All leaves were found, so a wrong count means an extra one."""
        for path, names in self._branches:
            given: Any = descend(step[path[0]], path[1:])
            if given.__class__ is dict and len(given) == len(names):
                continue
            keys = list(given.keys()) if hasattr(given, "keys") else [str(i) for i in range(len(given))]
            if len(keys) != len(names):
                extra = next(key for key in keys if key not in names)
                raise FieldError(unknown_field((*path, str(extra)), [dotted((*path, n)) for n in names], "the schema"))

    def _name_mismatch(self, step: Mapping[str, Any]) -> str:
        known = self._schema.names
        for name in step:
            if name not in self._names:
                return unknown_field(name, known, "this buffer's schema")
        missing = ", ".join(repr(name) for name in known if name not in step)
        return f"the step lacks {missing}; a step has exactly the fields {', '.join(known)}"

    def _coerce(self, value: Any, shape: tuple[int, ...], dtype: torch.dtype, path: Path) -> Any:
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
            return numpy_view(tensor)
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
        elif given[:1] != shape[:1]:
            message += f"; pass one row for each of the {shape[0]} envs"
        elif given == (*shape, 1):
            message += "; drop the last axis with .squeeze(-1)"
        else:
            message += f"; the schema says {shape[1:]} per env"
        raise ShapeError(message)


def refuse_sparse(tree: Any, path: Path = ()) -> None:
    """Refuse nested and sparse tensors. Called after a failure, because torch's own errors name no field.

    Raises:
        DTypeError: ``tree`` holds a nested or sparse tensor.
    """
    if isinstance(tree, Tensor):
        if tree.is_nested or tree.layout is not torch.strided:
            kind, call = ("nested", "to_padded_tensor(...)") if tree.is_nested else ("sparse", "to_dense()")
            raise DTypeError(f"field '{dotted(path)}': expected a dense tensor, got a {kind} one; pass its .{call}")
        return
    branches: Any = tree
    members = branches.items() if hasattr(tree, "items") else enumerate(branches) if isinstance(tree, tuple) else ()
    for name, member in members:
        refuse_sparse(member, (*path, str(name)))


def _inner(value: Any, path: Path) -> Any:
    try:
        return descend(value, path[1:])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise FieldError(
            f"field '{dotted(path)}': missing from the {type(value).__name__} given ({error!r})"
        ) from error
