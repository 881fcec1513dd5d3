"""SequenceBatch and EnvBatch: padded sequences with their masks, lengths and first hidden states."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from ..errors import FieldError, ShapeError
from ..parameters import is_count
from ..steps.schema import unknown_field
from ..steps.trees import Path
from .tensordicts import as_tensordict

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["WHOLE", "EnvBatch", "Overlap", "SequenceBatch", "padding", "stride_of"]


Overlap = Literal["none", "half", "max"] | int


Plain = Literal[
    "mask", "is_start", "lengths", "burn_in", "env", "start", "index", "reward", "terminated", "truncated", "next",
    "discount", "steps", "weight", "probability", "source",
]  # fmt: skip
"""Fields that are a tensor whatever the schema says; the others are nested where it says so."""


WHOLE = 2**31
"""A window longer than any rollout."""


def stride_of(length: int | None, overlap: Overlap) -> int:
    """How many steps lie between the starts of successive windows.

    Raises:
        ShapeError: a length below 1, or an overlap that is not less than it.
    """
    if length is None:
        if overlap != "none":
            raise ShapeError(f"overlap={overlap!r} needs a length; whole trajectories do not overlap")
        return WHOLE
    if not is_count(length, 1):
        raise ShapeError(f"length={length!r}: a sequence has at least 1 step")
    strides = {"none": length, "half": max(length // 2, 1), "max": 1}
    if isinstance(overlap, str) and overlap in strides:
        return strides[overlap]
    if not is_count(overlap, -WHOLE):
        raise ShapeError(f"overlap={overlap!r}: expected 'none', 'half', 'max' or a number of steps")
    if not 0 <= cast("int", overlap) < length:
        raise ShapeError(f"overlap={overlap}: successive sequences of {length} steps share 0 to {length - 1} of them")
    return length - cast("int", overlap)


def together(states: Sequence[Any]) -> Any:
    """Recurrent states ``[layers, B, size]`` or ``[B, size]``, nested alike, one after another."""
    some = states[0]
    if some is None:
        return None
    if isinstance(some, dict):
        return {name: together([state[name] for state in states]) for name in cast("dict[str, Any]", some)}
    if isinstance(some, tuple):
        return tuple(together(members) for members in zip(*states, strict=True))
    return torch.cat(list(states), 1 if some.dim() > 2 else 0)


def padding(path: Path) -> bool:
    """What stands in a row that is none: a distribution without any legal action would be NaN."""
    return path[0] == "action_mask"


class SequenceBatch(Mapping[str, Any]):
    """B sequences of up to L rows: a mapping from names to padded tensors, and to what is known of each sequence.

    ======================== ==========================================================================================
    ``seq["obs"]``, ...      ``[L, B, ...]``, or ``[B, L, ...]`` unless ``time_first``; zeros where a sequence has no
                             row, but ``action_mask`` True. A TensorDict where the field is nested.
    ``seq["mask"]``          bool ``[L, B]``: the steps to learn from, neither padding nor burn-in.
    ``seq["hidden"]``        the recurrent state before the first row, nested as in the schema: ``[layers, B, size]`` of
                             a field of shape ``(layers, size)``, ``[B, size]`` of one of shape ``(size,)``; contiguous.
    ``seq["lengths"]``       int64 ``[B]``: rows that are not padding, which are the first ones.
    ``seq["burn_in"]``       int64 ``[B]``: rows before the first step to learn from, unrolled for their state alone.
    ``seq["is_start"]``      bool ``[L, B]``: rows that begin an episode, before which the state is an initial one. Only
                             first rows can; in chunks (:meth:`relive.RolloutBuffer.chunks`), which run on over the ends
                             of episodes, any.
    ``seq["env"]``           int64 ``[B]``
    ``seq["start"]``         int64 ``[B]``: the time of the first step to learn from; the number of its row in a replay.
    ======================== ==========================================================================================

    Batches of a replay also have ``index`` (int64 ``[B]``) and, row by row, ``reward``, ``discount``, ``steps`` and
    ``next`` of n-step windows: see :class:`relive.Sequence`.
    """

    def __init__(
        self, leaves: Mapping[Path, Tensor], facts: Mapping[str, Tensor], hidden: Any = None, *, time_first: bool
    ) -> None:
        self._leaves, self._facts, self._hidden = leaves, facts, hidden
        self.time_first = time_first
        self.shape = self._leaves["mask",].shape
        """(L, B), or (B, L)."""

    @cached_property
    def data(self) -> TensorDict:
        """The columns as one TensorDict."""
        return as_tensordict(self._leaves, self.shape)  # which takes longer than to gather a small batch

    # -- a mapping ----------------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, name: Plain) -> Tensor: ...
    @overload
    def __getitem__(self, name: str) -> Any: ...
    def __getitem__(self, name: str) -> Any:
        if name in self._facts:
            return self._facts[name]
        if name == "hidden" and self._hidden is not None:
            return self._hidden
        if (name,) in self._leaves and "data" not in self.__dict__:
            return self._leaves[name,]
        if name not in self.data.keys():
            raise FieldError(unknown_field(name, tuple(self), "this batch of sequences"))
        return self.data[name]

    def __contains__(self, name: object) -> bool:
        return any(name == known for known in self)  # Mapping's own looks for a KeyError

    def get(self, name: str, default: Any = None) -> Any:
        """``seq[name]`` if there is one."""
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
        return sum(1 for _ in self)  # tuple(self) would ask for this length

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        axes = "L, B" if self.time_first else "B, L"
        return f"SequenceBatch([{axes}] = [{shape}], {', '.join(self)})"

    # -- sizes --------------------------------------------------------------------------------------------------

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.shape[1 if self.time_first else 0]

    @cached_property
    def num_steps(self) -> int:
        """Steps to learn from: ``mask.sum()``."""
        return int(self["mask"].sum())

    # -- other forms --------------------------------------------------------------------------------------------

    def flat(self, values: Any = None) -> Any:
        """The steps to learn from, ``[S, ...]``, sequence after sequence.

        Args:
            values: a tensor ``[L, B, ...]``, such as a network's output; default: all fields, as a TensorDict.
        """
        if values is None:
            columns = {path: self.flat(leaf) for path, leaf in self._leaves.items() if path != ("mask",)}
            return as_tensordict(columns, (self.num_steps,))
        self._require_rows(values)
        return self._by_sequence(values)[self._by_sequence(self["mask"])]

    def pad(self, values: Tensor) -> Tensor:
        """The inverse of :meth:`flat`: ``[S, ...]`` as ``[L, B, ...]``, zero in all other rows."""
        if values.shape[:1] != (self.num_steps,):
            raise ShapeError(f"pad: expected the {self.num_steps} steps of this batch, got {tuple(values.shape)}")
        mask = self._by_sequence(self["mask"])
        padded = values.new_zeros((*mask.shape, *values.shape[1:]))
        return self._by_sequence(padded.index_put((mask,), values))

    def packed(self, name: str) -> PackedSequence:
        """A field as torch.nn's recurrent modules take it without padding, burn-in included."""
        values = self[name]
        self._require_rows(values)
        lengths = self["lengths"].cpu()
        return pack_padded_sequence(values, lengths, batch_first=not self.time_first, enforce_sorted=False)

    def bootstrap(self, values: Tensor) -> Tensor:
        """``values`` ``[L, B, ...]`` of the rows that the n-step windows of a replay end before; 0 on padding.

        The target is ``seq["reward"] + seq["discount"] * seq.bootstrap(value)``, ``[L, B]``.
        """
        self._require_rows(values)
        after = self["next"]
        time = 0 if self.time_first else 1
        index = after.clamp(min=0).view(*after.shape, *[1] * (values.dim() - 2)).expand_as(values)
        known = (after >= 0).view(*after.shape, *[1] * (values.dim() - 2))
        return torch.where(known, values.gather(time, index), 0)

    def to(self, device: str | torch.device) -> SequenceBatch:
        """The same batch on another device."""
        facts = {name: fact.to(device) for name, fact in self._facts.items()}
        hidden = mapped(self._hidden, lambda state: state.to(device))
        leaves = {path: leaf.to(device) for path, leaf in self._leaves.items()}
        return SequenceBatch(leaves, facts, hidden, time_first=self.time_first)

    def part(self, low: int, high: int) -> SequenceBatch:
        """The sequences ``low`` up to, not including, ``high``: views, but for states of several layers."""
        rows = (slice(None), slice(low, high)) if self.time_first else (slice(low, high),)
        leaves = {path: leaf[rows] for path, leaf in self._leaves.items()}
        facts = {name: fact[low:high] for name, fact in self._facts.items()}
        hidden = mapped(self._hidden, lambda x: x[:, low:high].contiguous() if x.dim() > 2 else x[low:high])
        return SequenceBatch(leaves, facts, hidden, time_first=self.time_first)

    @staticmethod
    def joined(batches: Sequence[SequenceBatch], names: Container[str], facts: Mapping[str, Tensor]) -> SequenceBatch:
        """The sequences of several batches, one after another: the fields ``names``, and further ``facts`` ``[B]``.

        Raises:
            ShapeError: they have not as many rows, or not all of them time first.
        """
        rows = {(batch.time_first, batch.shape[0 if batch.time_first else 1]) for batch in batches}
        if len(rows) > 1:
            shapes = [tuple(batch.shape) for batch in batches]
            raise ShapeError(f"batches of sequences of {shapes} do not fit together; let all views be the same")
        some, axis = batches[0], 1 if batches[0].time_first else 0
        paths = [path for path in some._leaves if path[0] in names]
        leaves = {path: torch.cat([batch._leaves[path] for batch in batches], axis) for path in paths}
        shared = [name for name in some._facts if name in names]
        known = {name: torch.cat([batch._facts[name] for batch in batches]) for name in shared}
        hidden = together([batch._hidden for batch in batches])
        return SequenceBatch(leaves, {**known, **facts}, hidden, time_first=some.time_first)

    # -- inside -------------------------------------------------------------------------------------------------

    def _by_sequence(self, values: Tensor) -> Tensor:
        return values.transpose(0, 1) if self.time_first else values

    def _require_rows(self, values: Any) -> None:
        expected = tuple(self.shape)
        if tuple(values.shape[:2]) != expected:
            axes = "[L, B, ...]" if self.time_first else "[B, L, ...]"
            raise ShapeError(f"expected {axes} with {expected} in front, got {tuple(values.shape)}")


@dataclass(slots=True)
class EnvBatch:
    """Some envs of a rollout with all their steps: as they are, and cut into padded trajectories.

    Row ``t`` of env ``b`` in ``steps`` is the same step as ``sequences.flat(...)[b * T + t]`` where all steps are real.
    """

    envs: Tensor
    """int64 ``[B]``."""
    steps: TensorDict
    """``[T, B, ...]``."""
    sequences: SequenceBatch
    """``[T, K, ...]``: the trajectories of the first env in the order of time, then those of the next."""


def mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Nested dicts and tuples with ``function`` of every leaf."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {name: mapped(member, function) for name, member in cast("dict[str, Any]", tree).items()}
    if isinstance(tree, tuple):
        return tuple(mapped(member, function) for member in cast("tuple[Any, ...]", tree))
    return function(tree)
