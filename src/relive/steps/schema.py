"""Schema: the named fields of a step, with the shape and dtype of each."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from ..errors import EnvError, FieldError, SchemaError, ShapeError, SpaceError
from ..parameters import COUNT_RULE, is_whole, require
from ..printable import HIDDEN, shown
from .arrays import as_tensor, torch_dtype
from .summary import html

Path: TypeAlias = tuple[str, ...]
"""The keys that lead to a leaf: ("obs",), ("obs", "camera"), ("hidden", "0")."""


FORMAT = 1


STEP_FIELDS: dict[str, torch.dtype] = {
    "reward": torch.float32,
    "terminated": torch.bool,
    "truncated": torch.bool,
}
"""The fields of every step besides observation and action, with their dtypes."""


FINITE = frozenset(("reward", "action", "obs", "next_obs"))
"""The fields that a replay checks in debug mode. Other fields may contain infinities on purpose."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a step: its shape per environment, without any batch axis, and its dtype.

    Args:
        shape: such as ``()`` for one number, ``(17,)``, or ``(84, 84)``.
        dtype: such as ``torch.uint8`` for images or ``torch.int64`` for discrete actions.

    Raises:
        SchemaError: the shape is not a tuple of ints, or the dtype not a ``torch.dtype``.
    """

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        given: tuple[Any, Any] = self.shape, self.dtype
        shape, dtype = given
        if not isinstance(shape, tuple | list) or any(not is_whole(n) or n < 0 for n in self.shape):
            raise SchemaError(f"a field's shape is a tuple of non-negative ints, got {shown(shape, 200)}")
        if not isinstance(dtype, torch.dtype):
            raise SchemaError(f"a field's dtype is a torch.dtype such as torch.float32, got {shown(dtype, 200)}")
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of one environment's value."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"Field({self.shape}, {self.dtype})"


Node: TypeAlias = "Field | dict[str, Node] | tuple[Node, ...]"


Spec: TypeAlias = "Field | tuple[int, ...] | Mapping[str, Spec] | tuple[Spec, ...] | list[Spec] | Node"


class Schema(Mapping[str, Node]):
    """The named fields of a step, a mapping. Observations, actions and hidden states may be nested.

    ``schema["obs"]`` is a :class:`Field`, or the dict or tuple of a nested field. A path such as ``("obs", "camera")``
    names a member at any depth, and a member of a tuple by its place: ``("hidden", "0")``.

    Args:
        fields: name -> :class:`Field`, or a bare shape such as ``(17,)`` for float32, or a dict or tuple of those,
            to any depth. Members of a tuple are named "0", "1", ....
        max_episode_steps: the time limit of the environment in steps, if it has one. :func:`relive.audit` looks for it.
            It is saved with the schema, but schemas that differ in nothing else are equal.

    Raises:
        SchemaError: a field is none of these; or a name is empty, or contains a dot, a control character or another
            invisible one.
        ParameterError: ``max_episode_steps`` is neither None nor a positive whole number.

    Example:
        ``Schema({"obs": (17,), "action": Field((), torch.int64), "hidden": {"h": (1, 64), "c": (1, 64)}})``
    """

    __slots__ = ("_leaves", "_tree", "max_episode_steps")

    def __init__(self, fields: Mapping[str, Spec], *, max_episode_steps: int | None = None) -> None:
        if not hasattr(fields, "items"):
            kind = type(fields).__name__
            raise SchemaError(f"Schema: expected a mapping of fields, got {kind}; pass {{'obs': (4,), ...}}")
        if not fields:
            raise SchemaError("a schema needs at least one field, got none")
        self._tree: dict[str, Node] = {name: _node(spec, (name,)) for name, spec in fields.items()}
        self._leaves: dict[Path, Field] = flatten(self._tree)
        if max_episode_steps is None and isinstance(fields, Schema):
            max_episode_steps = fields.max_episode_steps
        if max_episode_steps is not None:
            require("Schema", COUNT_RULE, max_episode_steps=max_episode_steps)
        self.max_episode_steps: int | None = None if max_episode_steps is None else int(max_episode_steps)

    @classmethod
    def from_spaces(cls, observation_space: object, action_space: object, **extras: Spec) -> Schema:
        """The schema of a Gymnasium environment: obs, action, reward, terminated, truncated, and the extras.

        Args:
            observation_space: the space of one environment (``single_observation_space`` of a vector env).
            action_space: the action space of one environment. Both may be Box of any dtype and shape, Discrete,
                MultiDiscrete, MultiBinary, and Dict and Tuple of those to any depth. dtypes are kept.
            extras: further fields of every step: a :class:`Field`, a bare shape for float32, or a dict or tuple of
                those, e.g. ``value=(), log_prob=(), hidden={"h": (1, 64), "c": (1, 64)}``.

        Raises:
            SpaceError: a space has no fixed shape and dtype (Text, Graph, Sequence, OneOf).
        """
        fields: dict[str, Spec] = {
            "obs": _from_space(observation_space, "observation_space"),
            "action": _from_space(action_space, "action_space"),
        }
        fields |= {name: Field((), dtype) for name, dtype in STEP_FIELDS.items()}
        return cls(fields | extras)

    @classmethod
    def from_env(cls, env: object, **extras: Spec) -> Schema:
        """:meth:`from_spaces` for a ``gymnasium.Env`` or a ``gymnasium.vector.VectorEnv``, with its time limit.

        The limit is ``max_episode_steps`` of the env's spec, if it has one, and if it is that of all its envs.

        Args:
            env: the environment; its spaces are those of one env.
            extras: further fields, as in :meth:`from_spaces`.

        Raises:
            EnvError: ``env`` is neither, such as the name of an env or a function that makes one.
        """
        spaces: list[object] = []
        for name in ("observation_space", "action_space"):
            of_one = getattr(env, f"single_{name}", None)
            spaces.append(getattr(env, name, None) if of_one is None else of_one)
            if spaces[-1] is None:
                raise EnvError(
                    f"from_env: expected a gymnasium.Env or a gymnasium.vector.VectorEnv, got {shown(env, 200)}; make "
                    "one first, such as gymnasium.make_vec('CartPole-v1', num_envs=8)"
                )
        found = cls.from_spaces(*spaces, **extras)
        found.max_episode_steps = _limit_of(env)
        return found

    @classmethod
    def from_example(cls, step: Mapping[str, object], num_envs: int | None = None) -> Schema:
        """The schema of an example step.

        Args:
            step: field -> array, tensor, number or bool, nested in dicts and tuples. Arrays and tensors keep their
                dtype; Python numbers become float32 or int64. ``reward`` is always float32, as the float64 of many
                environments gains nothing. The done bits are always bool.
            num_envs: the leading axis of every array, which is not part of a field. None means that the example is
                the step of one environment, without this axis.

        Raises:
            ShapeError: the leading axis of an array is not ``num_envs``.
            SchemaError: ``step`` is not a mapping of named fields.
            ParameterError: ``num_envs`` is not a whole number.
        """
        if not hasattr(step, "items"):
            raise SchemaError(f"from_example: expected a mapping of fields, got {type(step).__name__}")
        if num_envs is not None:
            require("from_example", COUNT_RULE, num_envs=num_envs)
        fields: dict[str, Spec] = {name: _from_example(value, (name,), num_envs) for name, value in step.items()}
        for name, dtype in STEP_FIELDS.items():
            node = fields.get(name)
            if isinstance(node, Field):
                fields[name] = Field(node.shape, dtype)
        return cls(fields)

    def extend(self, **extras: Spec) -> Schema:
        """This schema with further fields, ``extras``, which replace fields of the same name."""
        return Schema({**self._tree, **extras}, max_episode_steps=self.max_episode_steps)

    def as_float32(self) -> Schema:
        """This schema with float32 for every field of float64, such as the observations of MuJoCo's environments.

        Steps are then rounded as they are stored, and policies get float32.
        """

        def rounded(path: Path) -> Field:
            field = self._leaves[path]
            return Field(field.shape, torch.float32) if field.dtype is torch.float64 else field

        fields = {name: self.rebuild(name, rounded) for name in self.names}
        return Schema(fields, max_episode_steps=self.max_episode_steps)

    @property
    def leaves(self) -> dict[Path, Field]:
        """Path -> field of every leaf, in the order of declaration."""
        return dict(self._leaves)

    @property
    def branches(self) -> list[tuple[Path, tuple[str, ...]]]:
        """Path and member names of every dict and tuple."""
        names: dict[Path, dict[str, None]] = {}
        for path in self._leaves:
            for i in range(1, len(path)):
                names.setdefault(path[:i], {})[path[i]] = None
        return [(path, tuple(members)) for path, members in names.items()]

    @property
    def names(self) -> tuple[str, ...]:
        """The top-level names, in the order of declaration."""
        return tuple(self._tree)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tree)

    def __len__(self) -> int:
        return len(self._tree)

    def __contains__(self, name: object) -> bool:
        return _lookup(self._tree, name) is not None

    def __getitem__(self, name: str | Path) -> Node:
        node = _lookup(self._tree, name)
        if node is None:
            raise FieldError(unknown_field(name, self.names, "the schema"))
        return node

    def get(self, name: str | Path, default: object = None) -> Any:
        """``schema[name]``, or ``default`` if there is no such field."""
        node = _lookup(self._tree, name)
        return default if node is None else node

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self._tree == other._tree

    def __hash__(self) -> int:
        return hash(frozenset(self._leaves.items()))  # the order does not count, as with ==

    def __repr__(self) -> str:
        limit = "" if self.max_episode_steps is None else f", max_episode_steps={self.max_episode_steps}"
        return f"Schema({self._tree!r}{limit})"

    def _repr_html_(self) -> str:
        limit = "" if self.max_episode_steps is None else f", episodes of up to {self.max_episode_steps:,} steps"
        facts = {dotted(path): f"{_kind(field)}, {field.nbytes:,} bytes" for path, field in self._leaves.items()}
        return html((f"Schema: {self.nbytes:,} bytes a step{limit}", facts))

    @property
    def nbytes(self) -> int:
        """Bytes of one step of one environment."""
        return sum(field.nbytes for field in self._leaves.values())

    def to_json(self) -> str:
        """The schema as JSON text; :meth:`from_json` reads it back."""
        limit = {} if self.max_episode_steps is None else {"max_episode_steps": self.max_episode_steps}
        return json.dumps({"format": FORMAT, "fields": _to_json(self._tree)["fields"], **limit})

    @classmethod
    def from_json(cls, text: str) -> Schema:
        """The schema that :meth:`to_json` wrote.

        Raises:
            SchemaError: the text is not a schema, or has another format version.
        """
        try:
            data = json.loads(text)
            version = data["format"]
            if type(version) is not int or version != FORMAT:
                raise SchemaError(
                    f"schema format {shown(version)} is unknown: this version reads {FORMAT}; update relive"
                )
            fields = {name: _from_json(member) for name, member in data["fields"].items()}
            limit = data.get("max_episode_steps")
            if limit is not None and not (is_whole(limit) and limit > 0):
                raise SchemaError(f"schema: expected a positive whole number as max_episode_steps, got {shown(limit)}")
            return cls(fields, max_episode_steps=limit)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            if isinstance(error, SchemaError):
                raise
            raise SchemaError(
                f"expected a schema as Schema.to_json writes it, got another text: {shown(error, 200)}"
            ) from error

    def rebuild(self, name: str, get: Callable[[Path], object]) -> Any:
        """Field ``name`` in its dicts and tuples, with ``get(path)`` in place of every leaf."""
        return _rebuild(self._tree[name], (name,), get)


def dotted(path: Path | str) -> str:
    """A path joined by dots: obs.camera. A name that is not text, which a message has to show, comes as its repr."""
    if not isinstance(cast("object", path), tuple | list):
        return path if isinstance(path, str) else repr(path)
    return ".".join(key if isinstance(cast("object", key), str) else repr(key) for key in path)


def described(leaves: Mapping[Path, Field]) -> str:
    """Fields with their dtypes and shapes, in one line."""
    return ", ".join(f"{dotted(path)} {_kind(field)}" for path, field in leaves.items())


def _kind(field: Field) -> str:
    return f"{str(field.dtype).removeprefix('torch.')}{list(field.shape) if field.shape else ''}"


def descend(tree: Any, inner: Path) -> Any:
    """The leaf at a path of nested mappings and tuples."""
    for key in inner:
        if tree.__class__ is Tensor:  # torch takes text for a sequence of indices, with a warning
            raise KeyError(key)
        branch: object = tree
        by_place = tree.__class__ is not dict and isinstance(branch, tuple | list)
        tree = tree[int(key) if by_place else key]
    return tree


def nest(leaves: Mapping[Path, object]) -> dict[str, Any]:
    """Path -> value as nested dicts."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


def flatten(tree: Any, at: Path = ()) -> dict[Path, Any]:
    """The leaves of nested mappings and tuples, by path."""
    branch: Any = tree
    if isinstance(tree, tuple):
        branch = {str(i): member for i, member in enumerate(branch)}
    elif not isinstance(tree, Mapping):
        return {at: tree}
    return {path: leaf for name, member in branch.items() for path, leaf in flatten(member, (*at, name)).items()}


def map_leaves(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """``function`` of each leaf of mappings and tuples at any depth, with that leaf of ``others``; None stays None."""
    if tree is None:
        return None
    branch: Any = tree
    if isinstance(tree, Mapping):
        members = branch.items()
        return {name: map_leaves(function, member, *[other[name] for other in others]) for name, member in members}
    if isinstance(tree, tuple):
        return tuple(map_leaves(function, *members) for members in zip(branch, *others, strict=True))
    return function(tree, *others)


ATTACHED = ("advantage", "return")
"""The columns that estimators attach to a rollout."""


DONE = ("done", "dones", "is_done")
"""Names that other libraries give to one flag for both ways to end."""

ELSEWHERE = dict.fromkeys(("observation", "observations", "state", "states"), "obs") | {"timeouts": "truncated"}
"""Names of fields in other libraries, and those here."""


def not_named(given: object) -> str:
    """The message for a step that does not name its fields."""
    return (
        f"a step is given by the names of its fields, got {type(given).__name__}; pass add(obs=..., action=...) or "
        "add({'obs': ..., 'action': ...})"
    )


BATCH = "this batch"
"""Where a name is looked for that a view may give."""


def _view_gives(name: str) -> str:
    """How a view gives batches a field of this name; or an empty string."""
    if name == "next_obs":
        return "in windows of rows, the next observation is in the next row"
    if name == "timestep":
        return "a Sequence or Chunks with timestep=True gives it"
    if name in ("is_start", "is_first"):
        return "it is 'is_start' in a Sequence and 'is_first' in Chunks"
    return f"a Sequence or Chunks with last=({name[5:]!r},) gives it" if name.startswith("last_") else ""


def unknown_field(name: str | Path, known: Sequence[str], where: str) -> str:
    """The message for an unknown name, with the closest known one."""
    text = dotted(name)
    close = difflib.get_close_matches(text, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    if text in ATTACHED:
        hint = "; call finish(...) first, such as finish(relive.GAE())."
    elif text in DONE and "terminated" in known:
        hint = "; an end is one of two kinds here, 'terminated' or 'truncated'."
    elif where == BATCH and (made := _view_gives(text)):
        hint = f"; {made}."
    elif text == "next_obs":
        hint = "; leave it out: the next observation is in the next row, and 'final_value' is for episodes' ends."
    elif ELSEWHERE.get(text) in known:
        hint = f"; its name here is {ELSEWHERE[text]!r}."
    return f"unknown field {text!r} in {where}{hint} It has: {', '.join(known)}"


def _node(spec: Spec, path: Path) -> Node:
    name = path[-1]
    if not isinstance(cast("object", name), str) or not name or "." in name or HIDDEN.search(name):
        raise SchemaError(
            f"a field's name is a non-empty string without dots and invisible characters, got {shown(name, 200)}"
        )
    if isinstance(spec, Field):
        return spec
    if isinstance(spec, Mapping) and spec:
        return {name: _node(member, (*path, name)) for name, member in spec.items()}
    if isinstance(spec, tuple | list):
        items = cast("Sequence[Any]", spec)
        if all(is_whole(n) for n in items):
            return Field(tuple(items))
        return tuple(_node(member, (*path, str(i))) for i, member in enumerate(items))
    raise SchemaError(
        f"field '{'.'.join(map(str, path))}': expected a Field, a shape, or a dict or tuple of them, got "
        f"{shown(spec, 200)}; a shape is a tuple, such as () or (3,); pass a dtype as relive.Field((3,), torch.int64)"
    )


def _members(node: dict[str, Node] | tuple[Node, ...]) -> list[tuple[str, Node]]:
    return list(node.items()) if isinstance(node, dict) else [(str(i), n) for i, n in enumerate(node)]


def _lookup(tree: Node, name: object) -> Node | None:
    """The node of a name or path; None if there is none, or if it is neither."""
    node: Node | None = tree
    path = cast("tuple[object, ...]", name if isinstance(name, tuple | list) and name else (name,))
    for key in path:
        if not isinstance(key, str) or node is None or isinstance(node, Field):
            return None
        node = dict(_members(node)).get(key)
    return node


def _rebuild(node: Node, path: Path, get: Callable[[Path], object]) -> object:
    if isinstance(node, Field):
        return get(path)
    built = {name: _rebuild(member, (*path, name), get) for name, member in _members(node)}
    return built if isinstance(node, dict) else tuple(built.values())


def _to_json(node: Node) -> dict[str, object]:
    if isinstance(node, Field):
        return {"shape": list(node.shape), "dtype": str(node.dtype).removeprefix("torch.")}
    if isinstance(node, dict):
        return {"fields": {name: _to_json(member) for name, member in node.items()}}
    return {"items": [_to_json(member) for member in node]}


def _from_json(data: Mapping[str, Any]) -> Node:
    if "fields" in data:
        return {name: _from_json(member) for name, member in data["fields"].items()}
    members = data["items"] if "items" in data else data["shape"]
    if not isinstance(members, list) or ("items" in data and not members):
        raise TypeError(f"expected a list, got {shown(members)}")
    if "items" in data:
        return tuple(_from_json(member) for member in cast("list[Any]", members))
    return Field(tuple(cast("list[int]", members)), getattr(torch, data["dtype"]))


def _limit_of(env: object) -> int | None:
    """The time limit of an env, or of all envs of a vector env; None if there is none, or if it is not known."""
    inner = getattr(env, "envs", None)
    members = cast("Sequence[object]", inner) if isinstance(inner, list | tuple) and inner else (env,)
    limits = {getattr(getattr(member, "spec", None), "max_episode_steps", None) for member in members}
    limit: Any = limits.pop() if len(limits) == 1 else None
    return int(limit) if is_whole(limit) and limit > 0 else None


def _from_space(space: object, where: str) -> Node:
    from gymnasium import spaces

    known: Any = space  # gymnasium leaves the types of members and dtypes open
    if isinstance(space, spaces.Dict | spaces.Tuple) and not len(known.spaces):
        raise SpaceError(f"{where}: {type(known).__name__} has no members; leave it out in a wrapper")
    if isinstance(space, spaces.Dict):
        return {name: _from_space(member, f"{where}[{name!r}]") for name, member in known.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_from_space(member, f"{where}[{i}]") for i, member in enumerate(known.spaces))
    if isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        try:
            dtype = torch_dtype(known.dtype)
        except TypeError as error:
            raise SpaceError(f"{where}: torch has no dtype like {known.dtype}; cast it in a wrapper") from error
        return Field(tuple(known.shape), dtype)
    raise SpaceError(
        f"{where}: {type(space).__name__} has no fixed shape and dtype to store; use Box, Discrete, MultiDiscrete, "
        "MultiBinary, or Dict and Tuple of them, or flatten it in an observation wrapper"
    )


def _from_example(value: object, path: Path, num_envs: int | None) -> Node:
    branch: Any = value
    if isinstance(value, Mapping):
        return {name: _from_example(member, (*path, name), num_envs) for name, member in branch.items()}
    if isinstance(value, tuple):
        return tuple(_from_example(member, (*path, str(i)), num_envs) for i, member in enumerate(branch))
    plain_float = not isinstance(value, torch.Tensor | np.ndarray | np.generic)
    tensor = value if isinstance(value, torch.Tensor) else as_tensor(value, dotted(path))
    dtype = torch.float32 if plain_float and tensor.dtype is torch.float64 else tensor.dtype
    shape = tuple(tensor.shape)
    if num_envs is not None:
        if shape[:1] != (num_envs,):
            raise ShapeError(f"field '{dotted(path)}': expected a leading axis of {num_envs} (num_envs), got {shape}")
        shape = shape[1:]
    return Field(shape, dtype)
