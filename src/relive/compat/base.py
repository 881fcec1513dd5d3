"""The base of the drop-ins: tables of a host's fields, conversions of what it passes, and ends that it does not record.

A drop-in describes its host's fields as :class:`Column`. It converts a step with :func:`array_of` and its like, and
gives it to the ``add`` of a relive buffer, which checks and copies it. The contents of an original come over by
:class:`DropIn`. Nothing of a host is patched: importing relive changes nothing there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from inspect import Parameter, Signature, signature
from operator import attrgetter, itemgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, TypeVar, cast, overload

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from ..batches import Batch, as_batch
from ..errors import FieldError, SchemaError, ShapeError
from ..names import needed
from ..replay.buffer import ReplayBuffer
from ..rollout.buffer import RolloutBuffer
from ..steps.arrays import NUMPY_DTYPES, Array, Bools, Ints, as_tensor, to_tensor
from ..steps.schema import Field, Path, map_leaves

if TYPE_CHECKING:
    from typing import Self

    from tensordict import TensorDict

T = TypeVar("T")
U = TypeVar("U")
R = TypeVar("R")
Made = TypeVar("Made", bound=Callable[..., object])

Nested: TypeAlias = T | Mapping[str, T]
"""One value, or those of a dictionary's members by name."""

NUMBER, FLAG = Field(), Field((), torch.bool)
"""The fields of one number, float32, and of one flag."""

Obs: TypeAlias = Nested[Array]
"""Observations, or a dictionary of them."""

Shape: TypeAlias = Nested[tuple[int, ...]]

Device: TypeAlias = torch.device | str

Values: TypeAlias = Tensor | ArrayLike
"""The values of a field, as a host passes them: a tensor on any device, an array, a list or a number."""


def as_tensordict(
    leaves: Mapping[Path, Tensor], batch_size: Sequence[int], device: torch.device | None = None
) -> TensorDict:
    """Tensors whose first axes are ``batch_size``, as a nested TensorDict, for hosts whose classes use it.

    With a ``device``, tensors that are elsewhere are copied to it; the others are shared.
    """
    leaves = {path: leaf if device is None else leaf.to(device) for path, leaf in leaves.items()}
    return tensordict_of(as_batch(leaves), torch.Size(batch_size), device)


def tensordict_of(batch: Batch, size: torch.Size, device: torch.device | None = None) -> TensorDict:
    """A batch as a TensorDict of the same tensors, whose first axes are ``size``. All are on ``device``, if given."""
    make, options = _tensordict()
    tree = {name: tensordict_of(x, size, device) if isinstance(x, Batch) else x for name, x in batch.items()}
    return make(tree, size, device, **options)


@cache
def _tensordict() -> tuple[Callable[..., TensorDict], dict[str, bool]]:
    """The function that makes a TensorDict, and its options."""
    # importing tensordict takes as long as importing torch, so the first use does it
    # and computes numbers meanwhile, which the default device need not have
    with needed("the classes of this library use tensordict: pip install 'relive[tensordict]'"), torch.device("cpu"):
        kind: type[TensorDict] = import_module("tensordict").TensorDict
    # The shapes are known to fit. Checking them again takes eight times as long as the rest. The constructor without
    # checks has no public name. It need not look for dicts among the members.
    make: Callable[..., TensorDict] = getattr(kind, "_new_unsafe", kind)
    return make, {"nested": False} if "nested" in signature(make).parameters else {}


PLAIN = (float, int, bool)
"""The types of numbers that are not in an array."""
SMALL = 4096
"""Arrays of fewer bytes are compared by their bytes: the copies that this takes are cheap."""


class StepError(SchemaError, RuntimeError):
    """A step or a column does not fit the storage. Also a RuntimeError, which torch raises inside the libraries."""


class StepFieldError(StepError, FieldError):
    """A field of a step is missing or unknown."""


class StepShapeError(StepError, ShapeError):
    """The shape of a step or of a column is not the expected one."""


class HasColumns(Protocol):
    """A buffer that shows its storage by relive's names."""

    def column(self, name: str) -> Any:
        """A column in the host's order of axes: an array, a tensor, or a dictionary of these."""
        ...


class Column:
    """One field of a host: relive's name of it, and the form that the host gives it.

    In the body of a buffer's class it is also an attribute that shows the column. Assigning to it writes into the
    column. The buffer returns its columns from ``column(name)`` in the host's order of axes: an array, a tensor, or a
    dictionary of these. They share the storage's memory, so a column can also be written in place.

    Args:
        name: relive's name of the field.
        single: True if the host has one number per env as an axis of 1, which relive leaves out.
        dtype: the host's, of the same size; None is relive's.

    Raises:
        StepShapeError: from an assignment to a tensor, if the shapes differ. An array broadcasts, as NumPy does.
    """

    name: str
    single: bool
    dtype: torch.dtype | None

    def __init__(self, name: str, *, single: bool = False, dtype: torch.dtype | None = None) -> None:
        self.name, self.single, self.dtype = name, single, dtype

    def __set_name__(self, owner: type, attribute: str) -> None:
        self.attribute = attribute

    def __get__(self, buffer: HasColumns | None, owner: type | None = None) -> Any:
        return self if buffer is None else self.shown(buffer.column(self.name))

    def __set__(self, buffer: HasColumns, values: Nested[Values]) -> None:
        write_column(self.attribute, self.shown(buffer.column(self.name)), values)

    def shown(self, column: Any) -> Any:
        """A column of the storage or of a batch, in the host's form."""
        if self.dtype is not None:  # the same bits: a copy could not be written through
            column = column.view(self.dtype)
        return column.unsqueeze(-1) if self.single else column


def table_of(owner: type) -> dict[str, Column]:
    """The fields of a host, by its names: the columns in the body of a buffer's class."""
    return {name: column for name, column in vars(owner).items() if isinstance(column, Column)}


OWN = frozenset(("self", "seed", "sampler", "view", "further", "reshuffle_each_epoch", "keep_dtypes", "autoreset_mode"))
"""Arguments of relive's own. No original was made with one, whatever it calls its attributes."""


class DropIn:
    """A class that takes the place of a host's class, and takes over what an original of that class holds.

    Such a buffer is made with the arguments of the original. Then :meth:`_take_over` copies the contents.
    """

    _own_attribute: str
    """An attribute that every state of this class has, and that no state of an original has."""

    _renamed: ClassVar[dict[str, str]] = {}
    """Arguments of the constructor -> the attributes of an original that hold them, where the names differ."""

    _lacking: tuple[str, ...] = ()
    """Attributes that an original need not have."""

    @classmethod
    def from_original(cls, original: object, **options: object) -> Self:
        """Convert a buffer of the host and all that it holds. A buffer of this class is returned unchanged.

        Args:
            original: of the host's class, or any object with its attributes.
            options: arguments of the constructor that replace those of the original, such as ``seed``.
        """
        if isinstance(original, cls):
            return original
        made = cls.__new__(cls)
        made._replace(original, **options)
        return made

    def _replace(self, original: object, **options: object) -> None:
        """Become what an original is."""
        arguments = self._arguments_of(original) | options
        # by position: a subclass of a user may call these otherwise
        required = [arguments.pop(name) for name, one in self._parameters().items() if one.default is Parameter.empty]
        self.__class__.__init__(self, *required, **arguments)
        self._take_over(original)

    @classmethod
    def _parameters(cls) -> dict[str, Parameter]:
        """The host's arguments of the constructor by name. One constructor may pass on those of another."""
        own = (kind for kind in cls.__mro__ if issubclass(kind, DropIn) and kind.__module__.startswith("relive."))
        makers = [signature(kind.__init__) for kind in own]
        found: dict[str, Parameter] = {}
        for name, one in (pair for maker in makers for pair in maker.parameters.items()):
            if one.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) and name not in OWN:
                found.setdefault(name, one)
        return found

    @classmethod
    def _arguments_of(cls, original: Any) -> dict[str, object]:
        """The arguments of the constructor that an original was made with: its attributes of these names."""
        held = {name: cls._renamed.get(name, name) for name in cls._parameters()}
        missing = {name for name, at in held.items() if at in cls._lacking and not hasattr(original, at)}
        return {name: getattr(original, at) for name, at in held.items() if name not in missing}

    def _take_over(self, original: Any) -> None:
        """Copy the contents of an original into this buffer, which is empty."""
        raise NotImplementedError

    def __setstate__(self, state: dict[str, object]) -> None:
        """Restore a pickled state, of this class or of the host's."""
        if self._own_attribute in state:
            self._restore(state)
        else:
            self._replace(SimpleNamespace(**state))

    def _restore(self, state: dict[str, object]) -> None:
        """Restore a state of this class."""
        self.__dict__.update(state)


def contents_of(columns: Any, names: Iterable[str], rows: slice | Ints = slice(None)) -> dict[str, Any]:
    """Rows of the columns of an original, by the host's names. Columns that are missing or None are left out.

    Args:
        columns: the object that has them as attributes, or a mapping or a TensorDict of them.
        names: the host's names, such as a table of :class:`Column`.
        rows: an index of the first axis, such as :func:`oldest_first`.
    """
    nested = hasattr(columns, "keys")
    found = {name: columns.get(name) if nested else getattr(columns, name, None) for name in names}
    return {name: map_leaves(itemgetter(rows), x) for name, x in found.items() if x is not None}


def oldest_first(capacity: int, position: int, full: bool) -> Ints:
    """The rows of a host's ring in the order of time; ``position`` is the row that is written next."""
    return (np.arange(capacity) + position) % capacity if full else np.arange(position)


def write_column(name: str, column: Nested[Tensor | Array], values: Any) -> None:
    """Copy values into a column: an array, a tensor, or a dictionary of these.

    Args:
        name: what the host calls the column, for the error.
        column: the memory to write to.
        values: for a tensor, of the same shape. For an array, whatever broadcasts to it.

    Raises:
        StepShapeError: a tensor's shape differs.
    """
    if isinstance(column, np.ndarray):
        column[...] = values
    elif isinstance(column, Mapping):
        for key, member in column.items():
            write_column(f"{name}[{key!r}]", member, values[key])
    else:
        source: Tensor = to_tensor(values)
        if source.shape != column.shape:  # copy_ would broadcast it
            raise StepShapeError(
                f"{name}: expected {tuple(column.shape)}, got {tuple(source.shape)}; assign a whole column, or write "
                "to a part of it in place"
            )
        column.copy_(source.detach())


def alias(path: str, doc: str) -> Any:
    """A property that reads and sets an attribute of a part, such as ``alias("_view.gamma", "Discount per step.")``.

    Args:
        path: the attribute that holds the part, a dot, and the part's attribute.
        doc: the property's docstring.
    """
    read, (part, _, name) = attrgetter(path), path.rpartition(".")
    part_of = attrgetter(part)

    def write(self: object, value: object) -> None:
        setattr(part_of(self), name, value)

    return property(read, write, doc=doc)


def array_of(name: str, value: Values, dtype: torch.dtype = torch.float32) -> Array:
    """A tensor on any device, an array, a list or a number as an array of ``dtype``.

    It is copied only if it has another dtype or is on another device.

    Args:
        name: the field, for the error.
        value: see above.
        dtype: one that NumPy has, too.

    Raises:
        ShapeError: it is none of these, or a list whose rows differ in length.
    """
    if type(value) is np.ndarray:  # the most frequent first: each question takes time
        return value if value.dtype == NUMPY_DTYPES[dtype] else value.astype(NUMPY_DTYPES[dtype])
    if isinstance(value, Tensor):
        if value.dtype is not dtype or not value.is_cpu or value.requires_grad:
            value = value.detach().to("cpu", dtype)
        return value.numpy()
    if type(value) in PLAIN:
        return np.array(value, NUMPY_DTYPES[dtype])
    return as_tensor(value, name).numpy().astype(NUMPY_DTYPES[dtype], copy=False)


def placed(name: str, value: Values, device: torch.device | None, dtype: torch.dtype = torch.float32) -> Array | Tensor:
    """Whatever a host passes, with ``dtype``: an array in RAM, where ``device`` is None, or a tensor on it.

    Raises:
        ShapeError: see :func:`array_of`.
    """
    if device is None:
        return array_of(name, value, dtype)
    return torch.as_tensor(value, dtype=dtype, device=device).detach()


def sent(value: Tensor | Array, device: torch.device) -> Tensor:
    """A tensor or an array as a tensor on ``device``, copied only if it is elsewhere."""
    if type(value) is Tensor and value.device == device:
        return value
    return to_tensor(value).to(device)


@overload
def mapped(function: Callable[[T], R], value: Nested[T]) -> R | dict[str, R]: ...
@overload
def mapped(function: Callable[[T, U], R], value: Nested[T], other: Nested[U], /) -> R | dict[str, R]: ...
@overload
def mapped(function: Callable[..., R], value: Nested[T], *others: Nested[U]) -> R | dict[str, R]: ...
def mapped(function: Callable[..., R], value: Any, *others: Any) -> R | dict[str, R]:
    """``function(value, *others)``; if ``value`` is a dictionary, that of each member with those of the same name."""
    if type(value) in (Tensor, np.ndarray) or not isinstance(value, Mapping):
        return function(value, *others)
    members = cast("Mapping[str, Any]", value).items()
    if not others:
        return {key: function(member) for key, member in members}
    return {key: function(member, *[other[key] for other in others]) for key, member in members}


def leaves_of(data: TensorDict) -> dict[Path, Any]:
    """Everything that a TensorDict holds at its leaves, by path."""
    leaves: Any = data.items(include_nested=True, leaves_only=True)
    return {path if path.__class__ is tuple else (path,): leaf for path, leaf in leaves}


class Continuity:
    """Ends the episodes of a replay whose environments were reset without an end being recorded.

    It serves libraries whose ``add`` takes an observation and the next one. While an episode goes on, each observation
    equals the next observation of the step before.
    """

    def __init__(self) -> None:
        self.next_obs: Obs | None = None
        """The next observations ``[N, ...]`` of the newest step; None if no step is known."""
        self._done: Bools = np.zeros(0, np.bool_)

    def follow(self, replay: ReplayBuffer, obs: Obs) -> None:
        """Interrupt the episodes of the envs whose observations ``[N, ...]`` do not follow from their newest step."""
        if self.next_obs is None or _identical(obs, self.next_obs):
            return
        cut = ~self._done & ~equal_rows(obs, self.next_obs)
        if cut.any():
            replay.interrupt(np.flatnonzero(cut))

    def note(self, next_obs: Obs, done: Bools) -> None:
        """Remember what the newest step led to, arrays or dictionaries of them, and which episodes it ended."""
        self.next_obs, self._done = next_obs, done

    def forget(self) -> None:
        """Forget the newest step: whatever comes next counts as its continuation."""
        self.next_obs = None


def breaks(obs: Obs, next_obs: Obs, done: Bools) -> Bools:
    """Which steps ``[T, N, ...]`` neither end an episode nor lead to the step after them: bool ``[T - 1, N]``."""
    shown, expected = mapped(lambda value: value[1:], obs), mapped(lambda value: value[:-1], next_obs)
    return ~done[:-1] & ~equal_rows(shown, expected, 2)


def equal_rows(one: Nested[Array], other: Any, front: int = 1) -> Bools:
    """Which rows are equal in two arrays, or in all arrays of two dictionaries. The first ``front`` axes count rows."""
    if isinstance(one, Mapping):
        return np.logical_and.reduce([equal_rows(member, other[key], front) for key, member in one.items()])
    same = np.asarray(one) == np.asarray(other)
    return np.logical_and.reduce(same, tuple(range(front, same.ndim)))


def _identical(one: Nested[Array], other: Any) -> bool:
    """Whether small arrays have the same bytes. Most often they do, and this is faster than :func:`equal_rows`."""
    if type(one) is np.ndarray:  # the check for a mapping takes longer than the comparison
        return one.nbytes < SMALL and one.tobytes() == other.tobytes()
    if isinstance(one, Mapping):
        return all(_identical(member, other[key]) for key, member in one.items())
    return False


def passes_on(to: Callable[..., object], *without: str) -> Callable[[Made], Made]:
    """A decorator for a function that passes its ``*args`` and ``**kwargs`` on: it shows what they are.

    ``inspect.signature``, ``help`` and editors that ask a running program then see the arguments of ``to`` in their
    place, but for those that the function has itself and those in ``without``, which it gives.
    """

    def decorate(function: Made) -> Made:
        own = list(signature(function).parameters.values())
        named = {one.name for one in own}.union(without)
        further = [one for one in signature(to).parameters.values() if one.name not in named]
        shown = [one for one in (*own, *further) if one.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
        shown.sort(key=lambda one: one.kind)  # is stable: those by name alone come last
        returns = signature(function).return_annotation
        vars(function)["__signature__"] = Signature(shown, return_annotation=returns)
        return function

    return decorate


def renew(buffer: ReplayBuffer | RolloutBuffer, seed: int | None) -> None:
    """Draw a new seed for a buffer from torch's default generator, unless the drop-in was given a ``seed``.

    So ``torch.manual_seed`` makes two runs equal, as it does with the host. A seed that is drawn only once would miss
    every later seeding.
    """
    if seed is None:
        buffer.seed = None


def drawn_by_numpy(below: int | None = None) -> int:
    """A number from NumPy's global generator, as its ``randint`` gives it; None: a seed, 53 bits of one in [0, 1)."""
    return int(np.random.random_sample() * 2**53) if below is None else int(np.random.randint(below))
