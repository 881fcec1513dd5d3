"""SchemaChanges: how the fields of a save become other fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from ..errors import DTypeError, FieldError, ParameterError
from ..parameters import Rule, an_instance, require
from .arrays import as_tensor, check_castable
from .schema import Field, Path, Schema, Spec, dotted, unknown_field


class DoesNotFitError(ParameterError):
    """A stored number does not fit into the dtype that it is cast to. The save is not to blame for it."""


class Origin(NamedTuple):
    """Where a field of the new schema comes from."""

    field: Field
    """The new field."""
    source: Path
    """The saved field with its values; empty for a field that is added."""
    value: Tensor | None = None
    """The value in every step of a field that is added."""

    def values(self, saved: Mapping[Path, Tensor], count: int, used: Tensor, name: str) -> Tensor:
        """The new field of ``count`` saved steps, ``[count, *shape]``.

        ``used`` (bool ``[count]``) is False in rows where the saved field means nothing, and is not checked.

        Raises:
            DoesNotFitError: a saved number does not fit into the new dtype.
        """
        if self.value is not None:
            return self.value.expand(count, *self.field.shape)
        old = saved[self.source]
        if old.dtype is self.field.dtype:
            return old
        new = old.to(self.field.dtype)
        _require_unchanged(old[used], new[used], name)
        return new


Tree: TypeAlias = "Origin | Branch | tuple[Tree, ...]"
Branch: TypeAlias = "dict[str, Tree]"
"""Origins in the dicts and tuples of their fields."""


NAMES_RULE: Rule = (
    lambda names: isinstance(names, Iterable) and not isinstance(names, bytes | Mapping | np.ndarray | Tensor),
    "expected a list of names of fields",
)


class SchemaChanges:
    """The changes that :meth:`relive.ReplayBuffer.load` makes to the fields of a save, to get those of the new buffer.

    Fields are first dropped, then renamed, then cast, then added. A name is that of a field, or of one inside it, with
    dots: ``"obs.camera"``. A name of several fields, such as ``"obs"``, stands for all fields inside it.

    Args:
        drop: names of fields to leave out.
        rename: old name -> new name. Nothing moves into ``obs`` or out of it: final observations have no other fields.
        cast: name, after renaming -> the new dtype. Floats are rounded. Every other change of a number is an error.
        add: new name -> the value in every stored step, a number, an array or a tensor. Its shape and dtype are those
            of the field; Python numbers are float32 or int64, and bools are bool.

    Example:
        ``SchemaChanges(drop=["info"], rename={"act": "action"}, cast={"obs": torch.float16}, add={"log_prob": 0.0})``

    Raises:
        ParameterError: ``drop`` is not a list of names, or one of the others is not a mapping.
    """

    def __init__(
        self,
        *,
        drop: Iterable[str] = (),
        rename: Mapping[str, str] | None = None,
        cast: Mapping[str, torch.dtype] | None = None,
        add: Mapping[str, object] | None = None,
    ) -> None:
        drop = (drop,) if isinstance(drop, str) else drop
        require("SchemaChanges", NAMES_RULE, drop=drop)
        require("SchemaChanges", an_instance(Mapping, "a mapping from names"), rename=rename, cast=cast, add=add)
        self.drop: tuple[str, ...] = tuple(drop)
        self.rename: dict[str, str] = dict(rename or {})
        self.cast: dict[str, torch.dtype] = dict(cast or {})
        self.add: dict[str, object] = dict(add or {})

    def __repr__(self) -> str:
        return f"SchemaChanges(drop={self.drop!r}, rename={self.rename!r}, cast={self.cast!r}, add={self.add!r})"

    def applied(self, schema: Schema) -> tuple[Schema, dict[Path, Origin]]:
        """The new schema, and where each of its leaves comes from.

        Raises:
            ParameterError: ``schema`` is not a :class:`relive.Schema`.
            FieldError: a name that is not there, or a new one that is; or a change to a member of a tuple.
            DTypeError: a dtype is not a torch.dtype, or values of the old one cannot be cast to it.
        """
        require("applied", (lambda schema: isinstance(schema, Schema), "expected a relive.Schema"), schema=schema)
        tree: Branch = {name: schema.rebuild(name, lambda p: Origin(schema.leaves[p], p)) for name in schema.names}
        for name in self.drop:
            _take(tree, name)
        moved = [(new, old, _take(tree, old)) for old, new in self.rename.items()]  # all first: names may be exchanged
        for new, old, node in moved:
            if (_path(old)[0] == "obs") != (_path(new)[0] == "obs"):
                raise FieldError(
                    f"rename {old!r} to {new!r}: final observations consist of 'obs' alone, so no field can move into "
                    "it or out of it; drop the one and add the other"
                )
            _put(tree, new, node)
        for name, dtype in self.cast.items():
            holder, key = _holder(tree, name)
            holder[key] = _cast(holder[key], dtype, name)
        for name, value in self.add.items():
            constant = _constant(value, name)
            _put(tree, name, Origin(Field(tuple(constant.shape), constant.dtype), (), constant))
        leaves: dict[Path, Origin] = {}
        fields = {name: _fields(node, (name,), leaves) for name, node in tree.items()}
        return Schema(fields, max_episode_steps=schema.max_episode_steps), leaves


def _path(name: object) -> Path:
    if not isinstance(name, str) or not all(name.split(".")):
        raise FieldError(f"a field's name is text such as 'obs' or 'obs.camera', got {name!r}")
    return tuple(name.split("."))


def _holder(tree: Branch, name: str) -> tuple[Branch, str]:
    """The dict with a field, and the field's key in it."""
    *front, key = _path(name)
    node: Tree | None = tree
    for k in front:
        node = node.get(k) if isinstance(node, dict) else None
    if isinstance(node, tuple) and not isinstance(node, Origin):
        raise FieldError(f"field {name!r} is a member of a tuple; drop, rename, cast or add the whole tuple")
    if not isinstance(node, dict) or key not in node:
        raise FieldError(unknown_field(name, [dotted(path) for path in _names(tree, ())], "the save"))
    return node, key


def _names(node: Tree, path: Path) -> list[Path]:
    """The paths of all fields; a tuple counts as one."""
    if not isinstance(node, dict):
        return [path]
    return [leaf for key, member in node.items() for leaf in _names(member, (*path, key))]


def _take(tree: Branch, name: str) -> Tree:
    """Take a field out. A dict that has no others goes, too."""
    holder, key = _holder(tree, name)
    node = holder.pop(key)
    if not holder and "." in name:
        _take(tree, name.rpartition(".")[0])
    return node


def _put(tree: Branch, name: str, node: Tree) -> None:
    """Put a field in, with the dicts around it."""
    *front, key = _path(name)
    holder = tree
    for k in front:
        member = holder.setdefault(k, {})
        if not isinstance(member, dict):
            raise FieldError(f"field {name!r}: {k!r} is a field, or a tuple, and has no further fields; rename one")
        holder = member
    if key in holder:
        raise FieldError(f"field {name!r} is there already; drop or rename the saved one")
    holder[key] = node


def _cast(node: Tree, dtype: torch.dtype, name: str) -> Tree:
    if isinstance(node, Origin):
        if not isinstance(cast("object", dtype), torch.dtype):
            raise DTypeError(f"field {name!r}: expected a torch.dtype such as torch.float16, got {dtype!r}")
        if node.field.dtype.is_complex and not dtype.is_complex:
            raise DTypeError(f"field {name!r}: {node.field.dtype} cannot be cast to {dtype}, which is not complex")
        return node._replace(field=Field(node.field.shape, dtype))
    if isinstance(node, dict):
        return {key: _cast(member, dtype, name) for key, member in node.items()}
    return tuple(_cast(member, dtype, name) for member in node)


def _constant(value: object, name: str) -> Tensor:
    """The value of a field that is added, in RAM."""
    if isinstance(value, Tensor):
        if value.is_meta or value.layout is not torch.strided:
            raise DTypeError(f"field {name!r}: expected a dense tensor with data, got {value!r:.200}")
        return value.detach().cpu()
    tensor = as_tensor(value, name)
    plain = not isinstance(value, np.ndarray | np.generic) and tensor.dtype is torch.float64
    return tensor.to(torch.float32) if plain else tensor


def _fields(node: Tree, path: Path, leaves: dict[Path, Origin]) -> Spec:
    """The fields of a tree of origins, which are noted in ``leaves``."""
    if isinstance(node, Origin):
        leaves[path] = node
        return node.field
    members = node if isinstance(node, dict) else {str(i): x for i, x in enumerate(node)}
    fields = {key: _fields(member, (*path, key), leaves) for key, member in members.items()}
    return fields if isinstance(node, dict) else tuple(fields.values())


def _require_unchanged(old: Tensor, new: Tensor, name: str) -> None:
    """Require numbers that a cast rounded at most; to anything but floats, numbers that it did not change.

    Raises:
        DoesNotFitError: names the field and the first number that changed otherwise.
    """
    if new.dtype.is_floating_point or new.dtype.is_complex:
        try:
            check_castable(old, new.dtype, name)
        except DTypeError as error:
            raise DoesNotFitError(f"{error}; or leave the cast out") from None
        return
    wide = old.to(torch.float64) if old.dtype.is_floating_point else old
    lost = (new.to(wide.dtype) != wide).reshape(-1)
    if new.dtype is not torch.bool and not old.dtype.is_floating_point and old.dtype is not torch.bool:
        lost |= ((new < 0) != (old < 0)).reshape(-1)
    if bool(lost.any()):
        first = old.reshape(-1)[int(lost.to(torch.uint8).argmax())].item()
        raise DoesNotFitError(f"field '{name}': {first} is not a {new.dtype}; cast to another dtype, or drop the field")
