"""The forms of a batch: TensorDicts, padded sequences and tables of pandas."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import import_module
from inspect import signature
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from .errors import DTypeError, FieldError, ParameterError, ShapeError
from .names import needed
from .parameters import is_count, torch_device
from .steps.arrays import Array
from .steps.schema import Path, descend, dotted, map_leaves, unknown_field

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = [
    "WHOLE",
    "EnvBatch",
    "Members",
    "Overlap",
    "SequenceBatch",
    "as_dataframe",
    "as_tensordict",
    "padding",
    "replace_parts",
    "stride_of",
    "swap_layers",
]


def as_tensordict(
    leaves: Mapping[Path, Tensor], batch_size: Sequence[int], device: torch.device | None = None
) -> TensorDict:
    """Tensors whose first axes are ``batch_size``, as a nested TensorDict.

    With a ``device``, tensors that are elsewhere are copied to it; the others are shared.
    """
    if device is not None:
        leaves = {path: leaf.to(device) for path, leaf in leaves.items()}
    size, (make, options) = torch.Size(batch_size), _tensordict()
    tree: dict[str, Any] = {}
    try:
        for (name,), leaf in leaves.items():  # as most often; takes a third of ``dict(zip(...))``
            tree[name] = leaf
    except ValueError:  # some are nested
        tree = _tree(leaves, size, device)
    return make(tree, size, device, **options)


@cache
def _tensordict() -> tuple[Any, dict[str, Any]]:
    """The function that makes a TensorDict, and its options."""
    # importing tensordict takes as long as importing torch, so the first batch does it
    with torch.device("cpu"):  # it computes numbers meanwhile, which the default device need not have
        from tensordict import TensorDict

    # The shapes are known to fit. Checking them again takes eight times as long as the rest, and a fifth of the time
    # of a small batch. The constructor without checks has no public name. It need not look for dicts among the members.
    make: Any = getattr(TensorDict, "_new_unsafe", TensorDict)
    return make, {"nested": False} if "nested" in signature(make).parameters else {}


def _tree(leaves: Mapping[Path, Tensor], size: torch.Size, device: torch.device | None) -> dict[str, Any]:
    """The members of the TensorDict of some leaves, in the order of the first leaf of each."""
    tree, branches = dict[str, Any](), dict[str, dict[Path, Tensor]]()
    for path, leaf in leaves.items():
        name = path[0]
        if len(path) == 1:
            tree[name] = leaf
        elif name in branches:
            branches[name][path[1:]] = leaf
        else:
            tree[name] = branches[name] = {path[1:]: leaf}
    for name, members in branches.items():
        tree[name] = as_tensordict(members, size, device)
    return tree


class Members:
    """The dicts of a nested TensorDict, which compiled code fills: the first has the fields, the others its branches.

    Args:
        paths: the fields in their order.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        places = [*paths]
        # a branch comes after the one that it is in, and its name stands among that one's in the order of first fields
        branches = (path[:i] for path in places for i in range(1, len(path)))
        self._branches: list[Path] = list(dict.fromkeys([(), *branches]))
        names: dict[Path, dict[str, Any]] = {branch: {} for branch in self._branches}
        for path in places:
            for i, name in enumerate(path):
                names[path[:i]][name] = None
        self._names = [names[branch] for branch in self._branches]
        self.into: dict[Path, int] = {path: self._branches.index(path[:-1]) for path in places}
        """The number of the dict that has each field; its name there is the last of its path."""

    def empty(self) -> tuple[dict[str, Any], ...]:
        """New dicts. They have their names already, so that these stay in order."""
        return tuple(map(dict, self._names))

    def batch(self, dicts: tuple[dict[str, Any], ...], count: int) -> TensorDict:
        """The TensorDict of these dicts, which are full."""
        size, (make, options) = torch.Size((count,)), _tensordict()
        for k in range(len(dicts) - 1, 0, -1):
            path = self._branches[k]
            dicts[self._branches.index(path[:-1])][path[-1]] = make(dicts[k], size, None, **options)
        return make(dicts[0], size, None, **options)


Overlap = Literal["none", "half", "max"] | int


Plain = Literal[
    "mask", "is_start", "lengths", "burn_in", "env", "start", "index", "reward", "terminated", "truncated", "next",
    "discount", "steps", "weight", "probability", "source",
]  # fmt: skip
"""Fields that are always one tensor. Other fields may be nested, as in the schema."""


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
    if not is_count(overlap, -WHOLE):
        raise ParameterError(f"overlap={overlap!r}: expected 'none', 'half', 'max' or a number of steps")
    if not 0 <= cast("int", overlap) < length:
        raise ParameterError(
            f"overlap={overlap}: successive sequences of {length} steps share 0 to {length - 1} of them"
        )
    return length - cast("int", overlap)


def padding(path: Path) -> bool:
    """The padding value of a field: True for action masks, as a distribution without a legal action gives NaN."""
    return path[0] == "action_mask"


class SequenceBatch(Mapping[str, Any]):
    """B sequences of up to L rows: a mapping from names to padded tensors, with facts about each sequence.

    ======================== ==========================================================================================
    ``seq["obs"]``, ...      ``[L, B, ...]``, or ``[B, L, ...]`` unless ``time_first``. Padding is 0, and True in
                             ``action_mask``. A nested field is a TensorDict: ``seq["obs", "camera"]`` is a member.
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
    ``next`` of its n-step sum: see :class:`relive.Sequence`.
    """

    def __init__(
        self, leaves: Mapping[Path, Tensor], facts: Mapping[str, Tensor], hidden: Any = None, *, time_first: bool
    ) -> None:
        self._leaves, self._facts, self._hidden = leaves, facts, hidden
        self.time_first = time_first
        self.shape: torch.Size = self._leaves["mask",].shape
        """(L, B), or (B, L)."""

    @cached_property
    def data(self) -> TensorDict:
        """The columns as one TensorDict."""
        return as_tensordict(self._leaves, self.shape)  # made on request: it takes longer than reading a small batch

    @property
    def parts(self) -> tuple[Mapping[Path, Tensor], Mapping[str, Tensor], Any]:
        """The arguments of the constructor, uncopied: the columns by path, the facts by name and the states."""
        return self._leaves, self._facts, self._hidden

    # -- a mapping ----------------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, name: Plain) -> Tensor: ...
    @overload
    def __getitem__(self, name: str | Path) -> Any: ...
    def __getitem__(self, name: Any) -> Any:
        try:
            if name in self._facts:
                return self._facts[name]
            if name == "hidden" and self._hidden is not None:
                return self._hidden
            if (name,) in self._leaves and "data" not in self.__dict__:
                return self._leaves[name,]
            if isinstance(name, tuple):
                return self._member(cast("Path", name))
            if name not in self.data.keys():
                raise FieldError(unknown_field(name, tuple(self), "this batch of sequences"))
            return self.data[name]
        except TypeError as error:
            if isinstance(name, str):
                raise
            raise FieldError(f"a field's name is text, such as 'obs', got {name!r:.200}") from error

    def _member(self, path: Path) -> Any:
        """The member at a path such as ``("obs", "camera")``; those of a tuple are named "0", "1", ... as in a schema.

        Raises:
            FieldError: there is none.
        """
        if not path or not all(isinstance(cast("object", key), str) for key in path):
            raise FieldError(f"a member's path is names, such as ('obs', 'camera'), got {path!r:.200}")
        if path in self._leaves and "data" not in self.__dict__:
            return self._leaves[path]
        try:
            return descend(self[path[0]], path[1:])
        except (KeyError, IndexError, ValueError, TypeError) as error:
            names = tuple(dict.fromkeys([*map(dotted, self._leaves), *self]))
            raise FieldError(unknown_field(path, names, "this batch of sequences")) from error

    def __contains__(self, name: object) -> bool:
        if isinstance(name, tuple):
            return self.get(cast("Path", name), self) is not self
        return any(name == key for key in self)  # Mapping's own version expects a KeyError

    def get(self, name: str | Path, default: Any = None) -> Any:
        """``seq[name]``, or ``default`` if there is no such field."""
        try:
            return self[name]
        except FieldError:
            return default

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys(path[0] for path in self._leaves)
        yield from self._facts
        if self._hidden is not None:
            yield "hidden"

    def __len__(self) -> int:
        return sum(1 for _ in self)  # tuple(self) would call this method

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        axes = "L, B" if self.time_first else "B, L"
        return f"SequenceBatch([{axes}] = [{shape}], {', '.join(self)})"

    # -- sizes --------------------------------------------------------------------------------------------------

    @property
    def num_sequences(self) -> int:
        """B, the number of sequences."""
        return self.shape[1 if self.time_first else 0]

    @cached_property
    def num_steps(self) -> int:
        """The number of steps to learn from: ``mask.sum()``."""
        return int(self["mask"].sum())

    # -- other forms --------------------------------------------------------------------------------------------

    def flat(self, values: Any = None) -> Any:
        """The steps to learn from, ``[S, ...]``, one sequence after another.

        Args:
            values: a tensor ``[L, B, ...]``, such as a network's output; default: all fields, as a TensorDict.
        """
        if values is None:
            columns = {path: self.flat(leaf) for path, leaf in self._leaves.items() if path != ("mask",)}
            return as_tensordict(columns, (self.num_steps,))
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

    def to(self, device: str | torch.device) -> SequenceBatch:
        """This batch on another device.

        Raises:
            ParameterError: there is no such device, or it cannot be used here.
        """
        device = torch_device("to", device)
        facts = {name: fact.to(device) for name, fact in self._facts.items()}
        hidden = map_leaves(methodcaller("to", device), self._hidden)
        leaves = {path: leaf.to(device) for path, leaf in self._leaves.items()}
        return SequenceBatch(leaves, facts, hidden, time_first=self.time_first)

    def part(self, low: int, high: int) -> SequenceBatch:
        """The sequences ``low`` to ``high - 1``. They share memory, except for states of several layers."""
        rows = (slice(None), slice(low, high)) if self.time_first else (slice(low, high),)
        leaves = {path: leaf[rows] for path, leaf in self._leaves.items()}
        facts = {name: fact[low:high] for name, fact in self._facts.items()}
        hidden = map_leaves(partial(state_part, low=low, high=high), self._hidden)
        return SequenceBatch(leaves, facts, hidden, time_first=self.time_first)

    def changed(self, leaves: Mapping[Path, Tensor], facts: Mapping[str, Tensor]) -> SequenceBatch:
        """This batch with other or further ``leaves`` ``[L, B, ...]`` and ``facts`` ``[B]``."""
        all_leaves, all_facts = {**self._leaves, **leaves}, {**self._facts, **facts}
        return SequenceBatch(all_leaves, all_facts, self._hidden, time_first=self.time_first)

    def blank(self, count: int) -> SequenceBatch:
        """``count`` sequences of these fields and this length that hold zeros.

        All steps are to learn from, so that a mean over the mask is a number. They stand where there is no sequence.
        """
        rows = (self.shape[0], count) if self.time_first else (count, self.shape[1])
        leaves = {path: leaf.new_zeros((*rows, *leaf.shape[2:])) for path, leaf in self._leaves.items()}
        for path, leaf in leaves.items():
            leaf.fill_(path[0] == "mask" or padding(path))
        facts = {name: fact.new_zeros(count) for name, fact in self._facts.items()}
        facts["lengths"].fill_(rows[0 if self.time_first else 1])
        hidden = map_leaves(partial(blank_state, count=count), self._hidden)
        return SequenceBatch(leaves, facts, hidden, time_first=self.time_first)

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
        some, axis = batches[0], 1 if batches[0].time_first else 0
        paths = [path for path in some._leaves if path[0] in names]
        leaves = {path: torch.cat([batch._leaves[path] for batch in batches], axis) for path in paths}
        wanted = [name for name in some._facts if name in names]
        shared = {name: torch.cat([batch._facts[name] for batch in batches]) for name in wanted}
        hidden = map_leaves(joined_states, *[batch._hidden for batch in batches])
        return SequenceBatch(leaves, {**shared, **facts}, hidden, time_first=some.time_first)

    # -- inside -------------------------------------------------------------------------------------------------

    def _by_sequence(self, values: Tensor) -> Tensor:
        return values.transpose(0, 1) if self.time_first else values

    def _require_rows(self, values: Any) -> None:
        expected = tuple(self.shape)
        shape = _shape_of(values)
        if shape[:2] != expected:
            axes = "[L, B, ...]" if self.time_first else "[B, L, ...]"
            raise ShapeError(f"expected {axes} with {expected} in front, got {shape}")


def _shape_of(values: Any) -> tuple[int, ...]:
    """The shape of a tensor.

    Raises:
        DTypeError: it is no tensor.
    """
    if not isinstance(values, Tensor):
        raise DTypeError(f"expected a torch.Tensor, got a {type(values).__name__}; pass torch.as_tensor(...)")
    return tuple(values.shape)


def replace_parts(batch: SequenceBatch, parts: Any) -> None:
    """Have a batch of sequences look everything up in another mapping, such as one that refuses."""
    batch.__dict__.pop("data", None)
    batch._leaves = batch._facts = parts  # pyright: ignore[reportPrivateUsage]


@dataclass(slots=True)
class EnvBatch:
    """All steps of some envs of a rollout, both as stored and cut into padded trajectories.

    If all steps are real, row ``t`` of env ``b`` in ``steps`` is ``sequences.flat(...)[b * T + t]``.
    """

    envs: Tensor
    """int64 ``[B]``."""
    steps: TensorDict
    """``[T, B, ...]``."""
    sequences: SequenceBatch
    """``[T, K, ...]``: the trajectories of the first env in order of time, then those of the next."""


def swap_layers(state: Tensor) -> Tensor:
    """Swap ``[N, layers, ...]``, as stored, and ``[layers, N, ...]``, as torch expects; ``[N, size]`` is unchanged."""
    return state.transpose(0, 1) if state.dim() > 2 else state


def state_part(state: Tensor, low: int, high: int) -> Tensor:
    """The states of sequences ``low`` to ``high - 1`` of a batch; a copy if there are layers, as torch expects."""
    return state[:, low:high].contiguous() if state.dim() > 2 else state[low:high]


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
        pandas: Any = import_module("pandas")  # takes half a second, and has no types of its own
    table: dict[str, Any] = {}
    for path, column in columns.items():
        name, shape = dotted(path), column.shape[1:]
        if not shape:
            table[name] = column
        elif np.prod(shape) <= WIDE:
            table |= {".".join([name, *map(str, at)]): column[(slice(None), *at)] for at in np.ndindex(shape)}
        else:
            table[name] = list(column)
    return pandas.DataFrame(table)
