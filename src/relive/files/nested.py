"""Nested Python values, such as the ``state_dict`` of a model, beside the other content of a save.

Each value that JSON lacks is an object with one key, which names its kind: ``{"dict": [[key, value], ...]}``,
``{"tuple": [...]}``, ``{"tensor": name}``, ``{"array": name}`` and ``{"scalar": name}`` for NumPy, ``{"bytes": name}``,
and ``{"float": "nan" | "inf" | "-inf"}``. Nothing is ever executed to rebuild a value.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..errors import FileFormatError
from ..printable import shown
from .format import Array
from .save import Save

__all__ = ["EXTRA", "from_json", "read_extra", "to_json"]


EXTRA = ".extra."
"""What the names of these tensors begin with. No field of a schema has such a name."""


STORABLE = (
    "dicts, lists, tuples, tensors, NumPy arrays and scalars, numbers, bools, text, bytes and None; the keys of dicts "
    "are text or whole numbers"
)


_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_json(value: Any) -> tuple[Any, dict[str, Array]]:
    """A value as JSON, and its tensors by name. The names follow from the keys.

    Raises:
        FileFormatError: a value has a type that cannot be stored; names its keys.
    """
    tensors: dict[str, Array] = {}
    try:
        return _to_json(value, (), tensors), tensors
    except RecursionError:
        raise FileFormatError("extra: it is nested too deep, or contains itself; flatten it") from None


def _to_json(value: Any, keys: tuple[Any, ...], tensors: dict[str, Array]) -> Any:
    kind = cast("type[Any]", type(value))
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if kind in (list, tuple):
        members = [_to_json(member, (*keys, i), tensors) for i, member in enumerate(value)]
        return members if kind is list else {"tuple": members}
    if kind in (dict, OrderedDict, defaultdict):
        return {"dict": _pairs(value, keys, tensors)}
    if kind in (Tensor, torch.nn.Parameter):
        return {"tensor": _named(value.detach(), keys, tensors)}
    if kind is np.ndarray:
        return {"array": _named(value, keys, tensors)}
    if issubclass(kind, np.generic):
        return {"scalar": _named(np.asarray(value), keys, tensors)}
    if kind is bytes:
        return {"bytes": _named(np.frombuffer(value, np.uint8), keys, tensors)}
    raise FileFormatError(f"{_place(keys)}: expected {STORABLE}; got {kind.__name__}; convert it, or leave it out")


def _pairs(value: Mapping[Any, Any], keys: tuple[Any, ...], tensors: dict[str, Array]) -> list[Any]:
    for key in value:
        if type(key) not in (str, int):
            raise FileFormatError(
                f"{_place(keys)}: expected keys that are text or whole numbers, got {shown(key)}; convert it"
            )
    return [[key, _to_json(member, (*keys, key), tensors)] for key, member in value.items()]


def _place(keys: tuple[Any, ...]) -> str:
    """Where a value lies, as Python code: extra['optimizer']['state'][0]."""
    return "extra" + "".join(f"[{shown(key)}]" for key in keys)


def _named(value: Array, keys: tuple[Any, ...], tensors: dict[str, Array]) -> str:
    """The name under which a tensor is saved: its keys, joined by dots. If that name is taken, a number follows."""
    plain = EXTRA + ".".join(map(str, keys))
    name, number = plain, 1
    while name in tensors:
        number += 1
        name = f"{plain}#{number}"
    tensors[name] = value
    return name


def read_extra(save: Save, most: int | None) -> Any:
    """The ``extra`` of a save, which :func:`to_json` took apart; None if there is none.

    ``most`` is the most bytes of memory that its tensors may take.

    Raises:
        FileFormatError: the save is damaged.
    """
    names = [name for name in save.specs if name.startswith(EXTRA)]
    tensors = save.read(names=names, most=most) if names else {}
    return from_json(save.content.get("extra"), {name: tensors[name] for name in names})


def from_json(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that :func:`to_json` described. The value owns the tensors.

    Raises:
        FileFormatError: the JSON does not describe a value, or does not name each tensor once.
    """
    left = dict(tensors)
    try:
        value = _from_json(node, left)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FileFormatError(f"the save's entry 'extra' is not as relive writes it: {shown(error, 200)}") from error
    if left:
        raise FileFormatError(f"the save's entry 'extra' does not name the tensor {shown(next(iter(left)))}")
    return value


def _from_json(node: Any, left: dict[str, Tensor]) -> Any:
    if isinstance(node, list):
        return [_from_json(member, left) for member in cast("list[Any]", node)]
    if not isinstance(node, dict):
        return node
    ((kind, given),) = cast("dict[str, Any]", node).items()
    if kind == "dict":
        found = {_key(key): _from_json(member, left) for key, member in given}
        if len(found) != len(given):
            raise ValueError("a dict has a key twice")
        return found
    if kind == "tuple":
        return tuple(_from_json(member, left) for member in given)
    if kind == "float":
        return _SPECIAL[given]
    tensor = left.pop(given)
    if kind == "tensor":
        return tensor
    array = tensor.numpy()
    if kind == "array":
        return array
    if kind == "scalar" and not array.ndim:
        return array[()]
    if kind == "bytes" and array.ndim == 1 and array.dtype == np.uint8:
        return array.tobytes()
    raise ValueError(f"{shown(kind)} is no kind of value")


def _key(key: Any) -> Any:
    if type(key) not in (str, int):
        raise ValueError(f"{shown(key)} as a key")
    return key
