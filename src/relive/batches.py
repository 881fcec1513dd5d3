"""The forms of a batch: a dict of tensors, padded sequences, and tables of pandas."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from opcode import opname
from operator import itemgetter, methodcaller
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, cast, overload

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils import _pytree as pytree

from . import core
from .errors import DTypeError, FieldError, LifecycleError, ParameterError, ShapeError
from .names import needed
from .parameters import COUNT_RULE, is_count, is_names, require, torch_device
from .printable import shown
from .steps.arrays import Array, ArrayLike
from .steps.schema import BATCH, Path, descend, dotted, map_leaves, nest, unknown_field

if TYPE_CHECKING:
    from typing import Self

    from tensordict import TensorDict


B = TypeVar("B", bound="Batch")
T = TypeVar("T")

Plain = Literal[
    "mask", "is_start", "lengths", "burn_in", "env", "start", "index", "reward", "terminated", "truncated", "next",
    "discount", "steps", "weight", "probability", "source",
]  # fmt: skip
"""Fields that are always one tensor. Other fields may be nested, as in the schema."""


class Batch(dict[str, Any]):
    """Rows of experience: a dict of tensors whose first axis counts the rows, nested as the schema is.

    ``batch["obs"]`` is a tensor, or a batch of the members of a nested field: ``batch["obs"]["camera"]``, or
    ``batch["obs", "camera"]``. Members of a tuple are named ``"0"``, ``"1"``, and so on. ``len(batch)`` is the number
    of rows. In all else it is a dict: fields are added, replaced and removed as in any other, and torch's trees,
    compiler and function transforms take it for one.
    """

    __slots__ = ()

    if TYPE_CHECKING:

        @overload
        def __getitem__(self, name: Plain) -> Tensor: ...
        @overload
        def __getitem__(self, name: str | Path) -> Any: ...
        def __getitem__(self, name: str | Path) -> Any: ...

    # dict looks a name up by itself and calls this only for what it lacks, so a path costs plain names nothing
    def __missing__(self, name: object) -> Any:
        if isinstance(name, str):
            raise FieldError(unknown_field(name, tuple(self), BATCH))
        if not is_names(name) or not isinstance(name, tuple) or not name:
            raise FieldError(
                f"a field's name is text or a path such as ('obs', 'camera'), got {shown(name, 200)}; for some of the "
                "rows write batch.rows(index)"
            )
        path = cast("Path", name)
        try:
            return descend(self[path[0]], path[1:])
        except (LookupError, ValueError, TypeError) as error:  # of a dict, or of the tuple of a recurrent state
            names = tuple(dict.fromkeys([*map(dotted, leaves_by_path(self)), *self]))
            raise FieldError(unknown_field(path, names, BATCH)) from error

    def __setitem__(self, name: str | Path, value: object) -> None:
        if isinstance(name, tuple):
            branch: MutableMapping[str, object] = self if len(name) == 1 else self[name[:-1]]
            branch[name[-1]] = value
        else:
            dict.__setitem__(self, name, value)

    def __contains__(self, name: object) -> bool:
        if isinstance(name, tuple):
            return self.get(cast("Path", name), self) is not self
        return dict.__contains__(self, name)

    def get(self, name: str | Path, default: object = None) -> Any:
        """``batch[name]``, or ``default`` if there is no such field."""
        if isinstance(name, str):
            return super().get(name, default)
        try:
            return self[name]
        except FieldError:
            return default

    def __iter__(self) -> Iterator[str]:
        if not torch.compiler.is_compiling():
            frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
            if opname[frame.f_code.co_code[frame.f_lasti]].startswith("UNPACK"):
                raise FieldError(
                    "a batch cannot be unpacked; read it by name: obs, action = batch['obs'], batch['action']. It has: "
                    f"{', '.join(self.keys())}"
                )
        return super().__iter__()

    def __len__(self) -> int:
        for value in self.values():
            return len(value)
        return 0

    def __getattr__(self, name: str) -> NoReturn:
        if name in self.keys():
            raise AttributeError(f"a batch is read by name: write batch[{name!r}]", name=name, obj=None)
        hint = HINTS.get(name)
        raise AttributeError(f"a batch has no attribute {name!r}{f'; {hint}' if hint else ''}", name=name, obj=None)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self), (dict(self.items()),)

    def __repr__(self) -> str:
        return _described(f"{type(self).__name__} of {len(self)} rows", self)

    def copy(self) -> Self:
        """Another batch of the same tensors."""
        return self.apply(_same)

    def apply(self, function: Callable[..., object], *others: Mapping[str, Any]) -> Self:
        """The batch of ``function`` of each tensor, and of the tensors beside it in ``others``."""
        return type(self)(_applied(function, self, *others))

    def to(self, device: str | torch.device, *, non_blocking: bool = False) -> Self:
        """This batch on another device.

        Args:
            device: where to.
            non_blocking: go on while a GPU copies from page-locked memory, as ``torch.Tensor.to`` does.

        Raises:
            ParameterError: there is no such device, or it cannot be used here.
        """
        return self.apply(methodcaller("to", torch_device("to", device), non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """A copy in page-locked memory, from which a GPU copies while the learner goes on."""
        return self.apply(methodcaller("pin_memory"))

    def clone(self) -> Self:
        """A copy in memory of its own."""
        return self.apply(torch.clone)

    def rows(self, index: slice | ArrayLike) -> Self:
        """The rows of an index: a slice, places (int64 ``[K]``) or a mask (bool ``[B]``). A slice shares memory."""
        return self.apply(itemgetter(index))

    def split(self, size: int) -> list[Self]:
        """Parts of ``size`` rows each, in order, which share memory; the last one has what is left.

        Raises:
            ParameterError: ``size`` is not positive.
        """
        require("split", COUNT_RULE, size=size)
        return [self.rows(slice(low, low + size)) for low in range(0, len(self), size)]

    def blank(self, count: int) -> Batch:
        """``count`` rows of these fields that hold zeros; action masks allow every action."""
        leaves = {path: leaf.new_zeros((count, *leaf.shape[1:])) for path, leaf in leaves_by_path(self).items()}
        for path, leaf in leaves.items():
            leaf.fill_(padding(path))
        return as_batch(leaves)

    @staticmethod
    def joined(batches: Sequence[Any], names: Container[str], facts: Mapping[str, Tensor]) -> Batch:
        """The rows of several batches, one after another: the fields ``names``, and further ``facts`` ``[B]``."""
        parts = [leaves_by_path(batch) for batch in batches]
        leaves = {path: torch.cat([part[path] for part in parts]) for path in parts[0] if path[0] in names}
        return as_batch({**leaves, **{(name,): fact for name, fact in facts.items()}})

    def to_tensordict(self, batch_dims: int = 1) -> TensorDict:
        """The tensors of the batch as a ``tensordict.TensorDict``.

        Args:
            batch_dims: the number of leading axes that all fields share: 1 for rows, 2 for blocks ``[T, N, ...]``.

        Raises:
            ModuleNotFoundError: tensordict is not installed.
        """
        # takes as long to import as torch, and computes numbers meanwhile, which the default device need not have
        with needed("to_tensordict needs tensordict: pip install 'relive[tensordict]'"), torch.device("cpu"):
            kind = import_module("tensordict").TensorDict
        leaves = leaves_by_path(self)
        size = next(iter(leaves.values())).shape[:batch_dims] if leaves else ()
        return kind(nest(leaves), size)


HINTS: dict[str, str] = {
    "batch_size": "len(batch) is the number of rows",
    "shape": "len(batch) is the number of rows",
    "num_sequences": "len(batch) is the number of sequences",
    "data": "read columns by their names, or call batch.to_tensordict()",
    "device": "ask a tensor of it: batch['obs'].device",
    "to_dict": "it is one",
    "share_memory_": "write batch.apply(torch.Tensor.share_memory_)",
    "select": "write {name: batch[name] for name in names}",
    "exclude": "write batch.pop(name)",
}
"""Hints for names that other libraries' batches have."""


def _same(value: T) -> T:
    return value


def _applied(function: Callable[..., object], batch: Mapping[str, Any], *others: Mapping[str, Any]) -> Batch:
    """The batch of ``function`` of each tensor, in fields, batches and tuples."""
    applied = Batch()
    for name, value in batch.items():
        beside = [other[name] for other in others]
        if isinstance(value, Mapping):
            made: object = _applied(function, cast("Mapping[str, Any]", value), *beside)
        else:
            made = map_leaves(function, value, *beside)
        dict.__setitem__(applied, name, made)
    return applied


def _described(title: str, batch: Mapping[str, Any]) -> str:
    """The title, and a line for each tensor with its dtype, shape and device."""
    leaves = leaves_by_path(batch)
    width = max((len(dotted(path)) for path in leaves), default=0)
    lines = [title]
    for path, leaf in leaves.items():
        if isinstance(cast("object", leaf), Tensor):
            dtype, where = str(leaf.dtype).removeprefix("torch."), "" if leaf.is_cpu else f" on {leaf.device}"
            lines.append(f"  {dotted(path):{width}}  {dtype} {list(leaf.shape)}{where}")
        else:
            lines.append(f"  {dotted(path):{width}}  {leaf!r:.60}")
    return "\n".join(lines)


def leaves_by_path(batch: Mapping[str, Any], at: Path = ()) -> dict[Path, Tensor]:
    """The tensors of a batch by path; members of tuples are named "0", "1", ...."""
    leaves: dict[Path, Tensor] = {}
    for name, value in batch.items():
        path = (*at, name)
        if isinstance(value, tuple):
            members = {str(i): member for i, member in enumerate(cast("tuple[object, ...]", value))}
            leaves |= leaves_by_path(members, path)
        elif isinstance(value, Mapping):
            leaves |= leaves_by_path(cast("Mapping[str, object]", value), path)
        else:
            leaves[path] = value
    return leaves


def as_batch(leaves: dict[Path, Tensor]) -> Batch:
    """The batch of tensors by path, nested in the order of their first leaves."""
    return core.nested(leaves, Batch)


class Members:
    """The nested batches that compiled code fills: the first has the fields, the others are its branches.

    Args:
        paths: the fields in their order.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        places = [*paths]
        # a branch comes after the one that it is in, and its name stands among that one's in the order of first fields
        branches = list(dict.fromkeys([(), *(path[:i] for path in places for i in range(1, len(path)))]))
        names: dict[Path, dict[str, None]] = {branch: {} for branch in branches}
        for path in places:
            for i, name in enumerate(path):
                names[path[:i]][name] = None
        self._names = [names[branch] for branch in branches]
        self._links = [(k, branches.index(path[:-1]), path[-1]) for k, path in enumerate(branches) if path]
        self.into: dict[Path, int] = {path: branches.index(path[:-1]) for path in places}
        """The number of the batch that has each field; its name there is the last of its path."""

    def empty(self) -> tuple[Batch, ...]:
        """New batches, linked. They have their names already, so that these stay in order."""
        made = tuple(map(Batch, self._names))
        for k, branch, name in self._links:
            dict.__setitem__(made[branch], name, made[k])
        return made


Overlap = Literal["none", "half", "max"] | int


WHOLE = 2**31
"""The length of a window over a whole trajectory: more steps than any rollout has."""


def stride_of(length: int | None, overlap: Overlap) -> int:
    """The number of steps between the starts of successive windows.

    Raises:
        ParameterError: ``length`` is below 1, or ``overlap`` is not below ``length``.
    """
    if length is None:
        if overlap != "none":
            raise ParameterError(f"overlap={overlap!r} needs a length; whole trajectories do not overlap")
        return WHOLE
    if not is_count(length, 1):
        raise ParameterError(f"length={length!r}: a sequence has at least 1 step")
    strides = {"none": length, "half": max(length // 2, 1), "max": 1}
    if isinstance(overlap, str) and overlap in strides:
        return strides[overlap]
    if isinstance(overlap, str) or not is_count(overlap, -WHOLE):
        raise ParameterError(f"overlap={overlap!r}: expected 'none', 'half', 'max' or a number of steps")
    if not 0 <= overlap < length:
        raise ParameterError(
            f"overlap={overlap}: successive sequences of {length} steps share 0 to {length - 1} of them"
        )
    return length - overlap


def padding(path: Path) -> bool:
    """The padding value of a field: True for action masks, as a distribution without a legal action gives NaN."""
    return path[0] == "action_mask"


class SequenceBatch(Batch):
    """B sequences of up to L rows: padded tensors, and facts about each sequence, in one dict.

    ======================== ==========================================================================================
    ``seq["obs"]``, ...      ``[L, B, ...]``, or ``[B, L, ...]`` unless ``time_first``. Padding is 0, and True in
                             ``action_mask``. A nested field is a :class:`Batch`: ``seq["obs", "camera"]`` is a member.
    ``seq["mask"]``          bool ``[L, B]``: the steps to learn from, neither padding nor burn-in.
    ``seq["hidden"]``        the recurrent state before the first row, nested as in the schema and contiguous. A field
                             of shape ``(layers, size)`` gives ``[layers, B, size]``, one of ``(size,)`` ``[B, size]``.
    ``seq["lengths"]``       int64 ``[B]``: rows that are not padding. They come first.
    ``seq["burn_in"]``       int64 ``[B]``: rows before the first step to learn from, unrolled only for the state.
    ``seq["is_start"]``      bool ``[L, B]``: rows that begin an episode; the state before them is an initial one. Only
                             first rows can begin one, except in chunks (:meth:`relive.RolloutBuffer.chunks`), which
                             continue over the ends of episodes.
    ``seq["env"]``           int64 ``[B]``
    ``seq["start"]``         int64 ``[B]``: the time of the first step to learn from; in a replay, its row number.
    ======================== ==========================================================================================

    Batches of a replay also have ``index`` (int64 ``[B]``). Each row has the ``reward``, ``discount``, ``steps`` and
    ``next`` of its n-step sum: see :class:`relive.Sequence`. Chunks of a replay have ``is_first``, ``is_last`` and
    ``is_terminal`` instead of these and ``is_start``: see :class:`relive.Chunks`.

    ``len(seq)`` is B, and ``rows`` and ``split`` take sequences: this class knows which axis of a field counts them.
    """

    __slots__ = ("_facts", "time_first")

    time_first: bool
    """True for columns ``[L, B, ...]``, False for ``[B, L, ...]``."""

    def __init__(self, fields: Mapping[str, object], facts: Iterable[str], time_first: bool) -> None:
        super().__init__(fields)
        self._facts, self.time_first = tuple(facts), time_first

    @staticmethod
    def of(
        leaves: dict[Path, Tensor], facts: Mapping[str, Tensor], hidden: object = None, *, time_first: bool
    ) -> SequenceBatch:
        """The batch of columns, the ``leaves`` by path, ``facts`` by name, and ``hidden``; see ``time_first``."""
        fields: dict[str, object] = {**as_batch(leaves), **facts}
        if hidden is not None:
            fields["hidden"] = hidden
        return SequenceBatch(fields, facts, time_first)

    @property
    def parts(self) -> tuple[dict[Path, Tensor], dict[str, Tensor], object]:
        """The arguments of :meth:`of`, uncopied: the columns by path, the facts by name and the states."""
        apart = {*self._facts, "hidden"}
        columns = leaves_by_path({name: value for name, value in self.items() if name not in apart})
        return columns, {name: self[name] for name in self._facts if name in self}, self.get("hidden")

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return SequenceBatch, (dict(self.items()), self._facts, self.time_first)

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        axes = "L, B" if self.time_first else "B, L"
        return _described(f"SequenceBatch [{axes}] = [{shape}]", self)

    # -- sizes --------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """(L, B), or (B, L)."""
        return self["mask"].shape

    def __len__(self) -> int:
        return self.shape[1 if self.time_first else 0]

    @property
    def num_steps(self) -> int:
        """The number of steps to learn from: ``mask.sum()``."""
        return int(self["mask"].sum())

    # -- other forms --------------------------------------------------------------------------------------------

    def apply(self, function: Callable[..., object], *others: Mapping[str, Any]) -> SequenceBatch:
        """The batch of ``function`` of each tensor, and of the tensors beside it in ``others``."""
        return SequenceBatch(_applied(function, self, *others), self._facts, self.time_first)

    def rows(self, index: slice | ArrayLike) -> SequenceBatch:
        """The sequences of an index: a slice, places (int64 ``[K]``) or a mask (bool ``[B]``).

        A slice shares memory, except for states of several layers, which are contiguous.
        """
        columns, facts, hidden = self.parts
        at: Any = index  # torch's types lack what indexes a tensor as NumPy's arrays do

        def states(state: Tensor) -> Tensor:
            return state[:, at].contiguous() if state.dim() > 2 else state[at]

        chosen = {path: leaf[:, at] if self.time_first else leaf[at] for path, leaf in columns.items()}
        facts = {name: fact[at] for name, fact in facts.items()}
        return SequenceBatch.of(chosen, facts, map_leaves(states, hidden), time_first=self.time_first)

    def to_tensordict(self, batch_dims: int = 2) -> TensorDict:
        """The columns as a ``tensordict.TensorDict``, without the facts and the states, as :meth:`Batch.to_tensordict`.

        Args:
            batch_dims: the number of leading axes that all columns share.
        """
        return as_batch(self.parts[0]).to_tensordict(batch_dims)

    @overload
    def flat(self, values: None = None) -> Batch: ...
    @overload
    def flat(self, values: Tensor) -> Tensor: ...
    def flat(self, values: Tensor | None = None) -> Batch | Tensor:
        """The steps to learn from, ``[S, ...]``, one sequence after another.

        Args:
            values: a tensor ``[L, B, ...]``, such as a network's output; default: all columns, as a :class:`Batch`.
        """
        if values is None:
            return as_batch({path: self.flat(leaf) for path, leaf in self.parts[0].items() if path != ("mask",)})
        self._require_rows(values)
        return self._by_sequence(values)[self._by_sequence(self["mask"])]

    def pad(self, values: Tensor) -> Tensor:
        """The inverse of :meth:`flat`: ``values`` ``[S, ...]`` as ``[L, B, ...]``, zero in all other rows."""
        shape = _shape_of(values)
        if shape[:1] != (self.num_steps,):
            raise ShapeError(f"pad: expected the {self.num_steps} steps of this batch, got {shape}")
        mask = self._by_sequence(self["mask"])
        padded = values.new_zeros((*mask.shape, *values.shape[1:]))
        return self._by_sequence(padded.index_put((mask,), values))

    def packed(self, name: str) -> PackedSequence:
        """The field ``name`` without padding, burn-in included, for torch.nn's recurrent modules."""
        values = self[name]
        self._require_rows(values)
        lengths = self["lengths"].cpu()
        return pack_padded_sequence(values, lengths, batch_first=not self.time_first, enforce_sorted=False)

    def bootstrap(self, values: Tensor) -> Tensor:
        """``values`` ``[L, B, ...]`` taken at the rows ``next`` of a replay's batch; 0 where there is none.

        The target is ``seq["reward"] + seq["discount"] * seq.bootstrap(value)``, ``[L, B]``.
        """
        self._require_rows(values)
        after = self["next"]
        time = 0 if self.time_first else 1
        index = after.clamp(min=0).view(*after.shape, *[1] * (values.dim() - 2)).expand_as(values)
        has_next = (after >= 0).view(*after.shape, *[1] * (values.dim() - 2))
        return torch.where(has_next, values.gather(time, index), 0)

    def changed(self, leaves: Mapping[Path, Tensor], facts: Mapping[str, Tensor]) -> SequenceBatch:
        """This batch with other or further columns, the ``leaves`` ``[L, B, ...]``, and ``facts`` ``[B]``."""
        columns, own, hidden = self.parts
        return SequenceBatch.of({**columns, **leaves}, {**own, **facts}, hidden, time_first=self.time_first)

    def blank(self, count: int) -> SequenceBatch:
        """``count`` sequences of these fields and this length that hold zeros.

        All steps are to learn from, so that a mean over the mask is a number. They stand where there is no sequence.
        """
        rows = (self.shape[0], count) if self.time_first else (count, self.shape[1])
        columns, own, hidden = self.parts
        leaves = {path: leaf.new_zeros((*rows, *leaf.shape[2:])) for path, leaf in columns.items()}
        for path, leaf in leaves.items():
            leaf.fill_(path[0] == "mask" or padding(path))
        facts = {name: fact.new_zeros(count) for name, fact in own.items()}
        facts["lengths"].fill_(rows[0 if self.time_first else 1])
        states = map_leaves(partial(blank_state, count=count), hidden)
        return SequenceBatch.of(leaves, facts, states, time_first=self.time_first)

    @staticmethod
    def joined(batches: Sequence[SequenceBatch], names: Container[str], facts: Mapping[str, Tensor]) -> SequenceBatch:
        """The sequences of several batches, one after another: the fields ``names``, and further ``facts`` ``[B]``.

        Raises:
            ShapeError: the batches differ in their number of rows or in ``time_first``.
        """
        rows = {(batch.time_first, batch.shape[0 if batch.time_first else 1]) for batch in batches}
        if len(rows) > 1:
            shapes = [tuple(batch.shape) for batch in batches]
            raise ShapeError(f"batches of sequences of {shapes} do not fit together; use the same view for all")
        axis, parts = (1 if batches[0].time_first else 0), [batch.parts for batch in batches]
        columns, own, _ = parts[0]
        leaves = {path: torch.cat([part[0][path] for part in parts], axis) for path in columns if path[0] in names}
        shared = {name: torch.cat([part[1][name] for part in parts]) for name in own if name in names}
        hidden = map_leaves(joined_states, *[part[2] for part in parts])
        return SequenceBatch.of(leaves, {**shared, **facts}, hidden, time_first=batches[0].time_first)

    # -- inside -------------------------------------------------------------------------------------------------

    def _by_sequence(self, values: Tensor) -> Tensor:
        return values.transpose(0, 1) if self.time_first else values

    def _require_rows(self, values: object) -> None:
        expected = tuple(self.shape)
        shape = _shape_of(values)
        if shape[:2] != expected:
            axes = "[L, B, ...]" if self.time_first else "[B, L, ...]"
            raise ShapeError(f"expected {axes} with {expected} in front, got {shape}")


def _shape_of(values: object) -> tuple[int, ...]:
    """The shape of a tensor.

    Raises:
        DTypeError: it is no tensor.
    """
    if not isinstance(values, Tensor):
        raise DTypeError(f"expected a torch.Tensor, got a {type(values).__name__}; pass torch.as_tensor(...)")
    return tuple(values.shape)


class _Refusing:
    """A batch whose memory may hold another one by now."""

    __slots__ = ()

    def _refuse(self, *_: object) -> NoReturn:
        raise LifecycleError(
            "this batch was given back: its memory is that of later ones by now; keep batch.clone() to use it longer"
        )

    __getitem__ = __setitem__ = __iter__ = __len__ = __contains__ = __reduce__ = _refuse
    get = keys = values = items = copy = apply = _refuse

    def __repr__(self) -> str:
        return "<a batch that was given back>"


class _GivenBack(_Refusing, Batch):  # pyright: ignore[reportIncompatibleMethodOverride]
    __slots__ = ()


class _SequencesGivenBack(_Refusing, SequenceBatch):  # pyright: ignore[reportIncompatibleMethodOverride]
    __slots__ = ()


take_back: Callable[[Batch | None], None] = partial(
    core.give_back, {Batch: _GivenBack, SequenceBatch: _SequencesGivenBack}
)
"""Have a batch, and those nested in it, refuse all use from now on."""


def _flat(batch: Batch) -> tuple[list[object], object]:
    return [*batch.values()], (tuple(batch.keys()), *batch.__reduce__()[1][1:])


def _flat_with_keys(batch: Batch) -> tuple[list[Any], object]:
    return [(pytree.MappingKey(name), value) for name, value in batch.items()], _flat(batch)[1]


def _rebuilt(values: Iterable[object], about: tuple[Any, ...]) -> Batch:
    names, *rest = about
    fields = dict(zip(names, values, strict=True))
    return SequenceBatch(fields, *rest) if rest else Batch(fields)


for _kind in (Batch, SequenceBatch):  # torch's trees see their tensors, and torch.load takes them for data alone
    pytree.register_pytree_node(
        _kind, _flat, _rebuilt, serialized_type_name=f"relive.{_kind.__name__}", flatten_with_keys_fn=_flat_with_keys
    )
torch.serialization.add_safe_globals([Batch, SequenceBatch])


@dataclass(slots=True)
class EnvBatch:
    """All steps of some envs of a rollout, both as stored and cut into padded trajectories.

    If all steps are real, row ``t`` of env ``b`` in ``steps`` is ``sequences.flat(...)[b * T + t]``.
    """

    envs: Tensor
    """int64 ``[B]``."""
    steps: Batch
    """``[T, B, ...]``."""
    sequences: SequenceBatch
    """``[T, K, ...]``: the trajectories of the first env in order of time, then those of the next."""


def swap_layers(state: Tensor) -> Tensor:
    """Swap ``[N, layers, ...]``, as stored, and ``[layers, N, ...]``, as torch expects; ``[N, size]`` is unchanged."""
    return state.transpose(0, 1) if state.dim() > 2 else state


def joined_states(*states: Tensor) -> Tensor:
    """States ``[layers, B, size]`` or ``[B, size]`` of several batches, one after another along B."""
    return torch.cat(states, 1 if states[0].dim() > 2 else 0)


def blank_state(state: Tensor, count: int) -> Tensor:
    """Zeros for the states of ``count`` sequences, with the layers and sizes of these."""
    return state.new_zeros((state.shape[0], count, *state.shape[2:]) if state.dim() > 2 else (count, *state.shape[1:]))


WIDE = 64
"""A field of more numbers than this is one column of arrays, rather than a column for each number."""


def as_dataframe(columns: Mapping[Path, Array]) -> Any:
    """Columns ``[S, ...]`` by path as a ``pandas.DataFrame`` of S rows.

    A field of numbers is a column with its path, joined by dots. One of several numbers, up to 64, is a column for each
    of them: ``obs.0``, ``obs.1``, and ``image.2.5`` if there are more axes. A larger one is a column of arrays.

    Raises:
        ModuleNotFoundError: pandas is not installed.
    """
    with needed("to_pandas needs pandas: pip install 'relive[pandas]'"):
        pandas = import_module("pandas")  # takes half a second, and has no types of its own
    table: dict[str, object] = {}
    for path, column in columns.items():
        name, shape = dotted(path), column.shape[1:]
        if not shape:
            table[name] = column
        elif np.prod(shape) <= WIDE:
            table |= {".".join([name, *map(str, at)]): column[(slice(None), *at)] for at in np.ndindex(shape)}
        else:
            table[name] = list(column)
    return pandas.DataFrame(table)
