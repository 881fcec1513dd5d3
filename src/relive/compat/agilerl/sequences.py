"""Sequences of a rollout as AgileRL's learner takes them: end to end, with their initial recurrent states."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from ...batches.sequences import stride_of
from ...batches.tensordicts import as_tensordict
from ...rollout.buffer import RolloutBuffer as Rollout
from ...steps.trees import Path
from ..trees import leaves_of
from .columns import NAMES, TARGETS, columns_of

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = [
    "BPTTSequenceType",
    "complete",
    "minibatches",
    "overlap_of",
    "padded",
    "prepared",
    "slices",
    "targets",
    "windows_of",
]

STATES = "initial_hidden_states"


class BPTTSequenceType(Enum):
    """How episodes are cut into sequences of ``max_seq_len`` steps. AgileRL's own enum is accepted, too."""

    CHUNKED = "chunked"
    MAXIMUM = "maximum"
    FIFTY_PERCENT_OVERLAP = "fifty_percent_overlap"
    FIFTY_PERCENT_OVERLAPPING = FIFTY_PERCENT_OVERLAP  # the name in AgileRL's documents


OVERLAPS: dict[Any, Literal["none", "half", "max"]] = {
    "chunked": "none",
    "maximum": "max",
    "fifty_percent_overlap": "half",
}


def overlap_of(sequence_type: Any) -> Literal["none", "half", "max"]:
    """relive's name for a sequence type of either library.

    Raises:
        NotImplementedError: an unknown type.
    """
    overlap = OVERLAPS.get(getattr(sequence_type, "value", sequence_type))
    if overlap is None:
        raise NotImplementedError(f"Received unrecognized sequence type: {sequence_type}")
    return overlap


def windows_of(episode: Any, length: int, overlap: Literal["none", "half", "max"]) -> list[Any]:
    """The windows of an episode ``[K, ...]``, as a rollout cuts it. The last one may be shorter."""
    stride = stride_of(length, overlap)
    starts = range(0, max(len(episode) - length, 0) + stride, stride)
    return [episode[start : start + length] for start in starts]


def padded(sequences: Sequence[Any], target_length: int | None = None) -> Any:
    """Pad sequences with zeros to one length, ``[B, longest, ...]``.

    Args:
        sequences: tensors or TensorDicts ``[k, ...]``.
        target_length: use this length; longer sequences are cut off. None is the length of the longest.
    """
    if not isinstance(sequences[0], Tensor):
        members = {key: padded([seq[key] for seq in sequences], target_length) for key in sequences[0].keys()}
        return as_tensordict({(key,): member for key, member in members.items()}, ())
    longest = max(map(len, sequences)) if target_length is None else target_length
    out = sequences[0].new_zeros(len(sequences), longest, *sequences[0].shape[1:])
    for row, sequence in zip(out, sequences, strict=True):
        row[: len(sequence)] = sequence[:longest]
    return out


def complete(
    data: Any, ends: Iterable[Sequence[int]], length: int | None, cut: Callable[[Any, int], list[Any]]
) -> tuple[list[Any], int]:
    """The sequences of the episodes in steps ``[T, N, ...]``, env by env, and the length of the longest episode.

    Args:
        data: a tensor or a TensorDict.
        ends: for each env, the last step of each of its episodes.
        length: steps of a sequence; None is whole episodes.
        cut: ``(episode, length)`` -> the sequences of one episode.
    """
    sequences: list[Any] = []
    longest = 1
    for env, lasts in enumerate(ends):
        for first, last in zip([0, *(end + 1 for end in lasts)], lasts, strict=False):
            episode = data[first : last + 1, env]
            longest = max(longest, len(episode))
            size = length or len(episode)
            sequences += cut(episode, size) if len(episode) >= size else [episode]
    return sequences, longest


def prepared(
    rollout: Rollout,
    paths: Mapping[Path, Path],
    keys: Iterable[str],
    length: int | None,
    overlap: Literal["none", "half", "max"],
    device: torch.device,
) -> tuple[TensorDict, Tensor]:
    """All sequences of a rollout end to end, and the row ``t * N + n`` of each step.

    Args:
        rollout: the steps.
        paths: AgileRL's path of each leaf -> relive's.
        keys: AgileRL's names of the recurrent states.
        length: steps of a sequence; None is whole episodes.
        overlap: of successive sequences.
        device: of both results.

    Returns:
        the sequences ``[B * longest, ...]``, and the rows, int64 ``[B, longest]``. Rows of padding mean nothing.
    """
    (seq,) = rollout.sequences(
        length,
        overlap="none" if length is None else overlap,
        fields=columns_of(paths),
        shuffle=False,
        time_first=False,
    )
    longest = int(seq["lengths"].max())
    leaves = {path: seq.data[inner] for path, inner in paths.items()} | {("pad_mask",): seq["mask"]}
    flat = {path: leaf[:, :longest].flatten(0, 1).to(device) for path, leaf in leaves.items()}
    pairs = zip(keys, seq["hidden"], strict=True)
    states = {key: state.transpose(0, 1).contiguous().to(device) for key, state in pairs}
    time = seq["start"].unsqueeze(1) + torch.arange(longest)
    rows = (time * rollout.num_envs + seq["env"].unsqueeze(1)).to(device)
    return _with_states(flat, seq.num_sequences * longest, states, device), rows


def targets(rollout: Rollout, device: torch.device) -> TensorDict:
    """The columns in :data:`TARGETS` of all steps, ``[T * N]``, oldest first, copied to ``device``."""
    columns = {(name,): rollout[NAMES[name]].flatten().to(device, copy=True) for name in TARGETS}
    return as_tensordict(columns, (rollout.steps * rollout.num_envs,), device)


def slices(mask: Tensor, index: Tensor) -> list[Tensor]:
    """The rows of :func:`targets` that belong to each sequence.

    Args:
        mask: bool ``[B * longest]``, False in padding.
        index: int64 ``[B, longest]``, as :func:`prepared` returns it.
    """
    real: Any = mask.view(index.shape)
    rows: Any = index[real].cpu()
    return list(rows.split(real.sum(1).tolist()))


def minibatches(
    padded: TensorDict, unpadded: TensorDict, index: Tensor, split: Iterable[Tensor]
) -> Generator[tuple[TensorDict, TensorDict], None, None]:
    """For each part of ``split``: its sequences, and the targets of their steps."""
    total, longest = index.shape
    states = cast("dict[str, Tensor]", padded.get_non_tensor(STATES))
    leaves = {path: leaf.view(total, longest, *leaf.shape[1:]) for path, leaf in _tensors(padded).items()}
    columns = _tensors(unpadded)
    for chosen in split:
        batch = {path: leaf.index_select(0, chosen) for path, leaf in leaves.items()}
        rows = index.index_select(0, chosen)[batch["pad_mask",]]
        flat = {path: leaf.flatten(0, 1) for path, leaf in batch.items()}
        first = {key: state.index_select(0, chosen) for key, state in states.items()}
        steps = {path: column.index_select(0, rows) for path, column in columns.items()}
        data = _with_states(flat, len(chosen) * longest, first, index.device)
        yield data, as_tensordict(steps, (len(rows),), index.device)


def _tensors(data: TensorDict) -> dict[Path, Tensor]:
    """The tensors of a TensorDict, by their paths."""
    return {path: leaf for path, leaf in leaves_of(data).items() if isinstance(leaf, Tensor)}


def _with_states(
    leaves: Mapping[Path, Tensor], rows: int, states: dict[str, Tensor], device: torch.device
) -> TensorDict:
    """Padded steps, with the initial states of their sequences attached as AgileRL does it."""
    data = as_tensordict(leaves, (rows,), device)
    data.set_non_tensor(STATES, states)
    return data
