"""Turning PyTorchRL's transitions into relive's steps."""

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
"""Keys with one number per env: ``[N, 1]`` in PyTorchRL, ``[N]`` in relive."""


def arrays_of(steps: Any) -> Any:
    """Steps of one env ``[T, ...]``, nested, as arrays ``[T, 1, ...]``."""
    return mapped_leaves(lambda value: as_host(value)[:, None], steps)


def step_of(sample: Mapping[str, Any], keys: tuple[str, ...], axes: int = 1) -> dict[str, Any]:
    """A transition as relive's fields ``[N, ...]``; with ``axes=2``, several as ``[T, N, ...]``.

    Raises:
        FieldError: a key is missing.
        ShapeError: Reward or NextDone have more than one number per env, or are a dictionary.
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
    """Turns transitions into steps. Transitions like the first one are copied into arrays that are used again.

    Args:
        sample: the first transition, or one like it.
        keys: the keys to store.
        integers: the fields that are not stored as floats; see :func:`integers_of`.
        constant: further fields, the same in every step.
    """

    def __init__(
        self, sample: Mapping[str, Any], keys: tuple[str, ...], integers: Mapping[str, Any], constant: dict[str, Any]
    ) -> None:
        self._keys, self._integers, self._constant = keys, integers, constant
        self._members = [(key, list(sample[key]) if isinstance(sample[key], Mapping) else None) for key in keys]
        self._form = {key: mapped(_zeros_like, sample[key]) for key in keys}
        self._step = step_of(self._form, keys) | constant  # shares the arrays of the form, apart from the flag
        shared = self._form[REW].dtype == np.float32
        self._inbox = Inbox(self._leaves(self._form) or ()) if shared else None

    def _leaves(self, sample: Mapping[str, Any]) -> list[Any] | None:
        """All tensors of a transition in the first one's order; None if the keys differ."""
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
        """The step of a transition. The next call overwrites it.

        Raises:
            FieldError, ShapeError: see :func:`step_of`.
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
    """The fields that are not floats, by name; for a dictionary, the fields of its members."""
    found: dict[str, Any] = {}
    for name in schema.names:
        fields: Any = schema[name]
        if name not in ("terminated", "truncated") and any(not dtype.is_floating_point for dtype in dtypes_of(fields)):
            found[name] = fields
    return found | ({NAMES[OBS2]: found["obs"]} if "obs" in found else {})


def dtypes_of(fields: Any) -> list[torch.dtype]:
    """The dtypes of a field, or of the members of a dictionary."""
    members = cast("Mapping[str, Any]", fields).values() if isinstance(fields, Mapping) else [fields]
    return [field.dtype for field in members]


def as_stored(steps: dict[str, Any], integers: Mapping[str, Any]) -> dict[str, Any]:
    """Cast whole numbers that arrive as floats, as in slices, to the stored integer dtypes."""
    for name, fields in integers.items():
        steps[name] = mapped(_whole, fields, steps[name])
    return steps


def _whole(field: Field, value: Any) -> Any:
    dtype = numpy_dtype(field.dtype)
    if value.dtype.kind != "f" or dtype.kind == "f":
        return value
    cast = value.astype(dtype)
    return cast if (cast == value).all() else value  # the replay refuses fractions


def schema_of(sample: Mapping[str, Any], keys: tuple[str, ...]) -> Schema:
    """The fields of these keys, with the dtypes of the first transition."""
    step = step_of(sample, keys)
    fields = {name: mapped(_field, value) for name, value in step.items() if name != NAMES[OBS2]}
    return Schema(fields)


def _field(value: Any) -> Field:
    dtype = torch_dtype(value.dtype)
    return Field(tuple(value.shape[1:]), torch.float32 if dtype is torch.float64 else dtype)


def stored_keys(sample: Mapping[str, Any], known: tuple[str, ...]) -> tuple[str, ...]:
    """The known keys that a transition has, without recurrent states."""
    return tuple(key for key in known if key not in STATES and sample.get(key) is not None)
