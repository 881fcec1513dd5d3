"""Steps of PyTorchRL as steps of relive and back, one by one (feed-forward actors)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch

from ...errors import FieldError, ShapeError
from ...steps.arrays import as_host, numpy_dtype, torch_dtype
from ...steps.schema import Field, Schema
from ..inbox import Inbox
from ..trees import mapped, mapped_leaves
from .keys import DONE2, NAMES, OBS2, REW, STATES

__all__ = [
    "NUMBERS", "Steps", "arrays_of", "as_stored", "dtypes_of", "integers_of", "schema_of", "step_of", "stored_keys",
]  # fmt: skip

NUMBERS = (REW, DONE2)
"""What has one number per env, and no axis for it in relive."""


def arrays_of(steps: Any) -> Any:
    """Steps of one env ``[T, ...]``, nested, as arrays ``[T, 1, ...]``."""
    return mapped_leaves(lambda value: as_host(value)[:, None], steps)


def step_of(sample: Mapping[str, Any], keys: tuple[str, ...], axes: int = 1) -> dict[str, Any]:
    """Relive's fields ``[N, ...]``, or ``[T, N, ...]`` with ``axes`` 2, of a transition's arrays.

    Raises:
        FieldError: a key is missing.
        ShapeError: rewards or NextDone have more than one number per env, or are a dictionary.
    """
    step: dict[str, Any] = {}
    for key in keys:
        if sample.get(key) is None:
            raise FieldError(f"{key!r} is missing; the first transition had {', '.join(keys)}")
        value: Any = mapped(as_host, sample[key])
        if key in NUMBERS:
            if isinstance(value, dict) or value.shape[axes:] not in ((1,), ()):
                given = f"a dictionary of {', '.join(sample[key])}" if isinstance(value, dict) else value.shape
                raise ShapeError(f"{key!r}: expected one number per env, as [N, 1], got {given}")
            value = value.reshape(value.shape[:axes])
            value = value.astype(np.float32, copy=False) if key == REW else value != 0
        step[NAMES.get(key, key)] = value
    step["truncated"] = np.zeros_like(step["terminated"])
    return step


class Steps:
    """Turns transitions into steps. Those of the form of the first one share arrays that they are copied into.

    Args:
        sample: the first transition, or one like it.
        keys: what of it is stored.
        integers: what is stored as no float, as :func:`integers_of` finds it.
        constant: fields that every step has besides.
    """

    def __init__(
        self, sample: Mapping[str, Any], keys: tuple[str, ...], integers: Mapping[str, Any], constant: dict[str, Any]
    ) -> None:
        self._keys, self._integers, self._constant = keys, integers, constant
        self._members = [(key, list(sample[key]) if isinstance(sample[key], Mapping) else None) for key in keys]
        self._form = {key: mapped(_zeros_like, sample[key]) for key in keys}
        self._step = step_of(self._form, keys) | constant  # of the same arrays, but for the flag
        shared = self._form[REW].dtype == np.float32
        self._inbox = Inbox(self._leaves(self._form) or ()) if shared else None

    def _leaves(self, sample: Mapping[str, Any]) -> list[Any] | None:
        """All tensors of a transition in one order; None if they are not those of the first."""
        found: list[Any] = []
        try:
            for key, members in self._members:
                value = sample[key]
                if members is None:
                    found.append(value)
                elif len(value) == len(members):
                    found += [value[member] for member in members]
        except (KeyError, TypeError, IndexError):
            return None
        return found

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """The step of a transition, good until the next call.

        Raises:
            FieldError, ShapeError: as :func:`step_of`.
        """
        leaves = self._leaves(sample)
        if self._inbox is None or leaves is None or not self._inbox.take(leaves):
            return as_stored(step_of(sample, self._keys), self._integers) | self._constant
        self._step["terminated"][...] = self._form[DONE2].reshape(-1)
        return self._step

    def __reduce__(self) -> tuple[Any, ...]:
        return Steps, (self._form, self._keys, self._integers, self._constant)


def _zeros_like(value: Any) -> Any:
    array = as_host(value)
    return np.zeros(array.shape, array.dtype)


def integers_of(schema: Schema) -> dict[str, Any]:
    """What steps of this schema hold that are no floats, by name: the field, or those of a dictionary's members."""
    found: dict[str, Any] = {}
    for name in schema.names:
        fields: Any = schema[name]
        if name not in ("terminated", "truncated") and any(not dtype.is_floating_point for dtype in dtypes_of(fields)):
            found[name] = fields
    return found | ({NAMES[OBS2]: found["obs"]} if "obs" in found else {})


def dtypes_of(fields: Any) -> list[torch.dtype]:
    """Of a field, or of the members of a dictionary."""
    members = cast("Mapping[str, Any]", fields).values() if isinstance(fields, Mapping) else [fields]
    return [field.dtype for field in members]


def as_stored(steps: dict[str, Any], integers: Mapping[str, Any]) -> dict[str, Any]:
    """Whole numbers that come as floats, as they do in slices, in the integer dtypes that are stored."""
    for name, fields in integers.items():
        steps[name] = mapped(_whole, fields, steps[name])
    return steps


def _whole(field: Field, value: Any) -> Any:
    dtype = numpy_dtype(field.dtype)
    if value.dtype.kind != "f" or dtype.kind == "f":
        return value
    cast = value.astype(dtype)
    return cast if (cast == value).all() else value  # the replay refuses what would be cut off


def schema_of(sample: Mapping[str, Any], keys: tuple[str, ...]) -> Schema:
    """The fields of such steps, each with the dtype that the first transition has."""
    step = step_of(sample, keys)
    fields = {name: mapped(_field, value) for name, value in step.items() if name != NAMES[OBS2]}
    return Schema(fields)


def _field(value: Any) -> Field:
    dtype = torch_dtype(value.dtype)
    return Field(tuple(value.shape[1:]), torch.float32 if dtype is torch.float64 else dtype)


def stored_keys(sample: Mapping[str, Any], known: tuple[str, ...]) -> tuple[str, ...]:
    """Of the keys that buffers store those that a transition has, apart from recurrent states."""
    return tuple(key for key in known if key not in STATES and sample.get(key) is not None)
