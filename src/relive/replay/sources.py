"""Source: what a replay is restored from, a save on the disk or the state in a pickle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import files as persist
from ..errors import FileFormatError
from ..files.entries import entry, fitting
from ..files.nested import EXTRA
from ..memory.estimate import free_memory
from ..printable import shown
from ..ring.span import Span
from ..steps.trees import Path, dotted
from .segments import Segment, is_segment

__all__ = ["RowPart", "Source", "segment_prefix"]


def segment_prefix(name: str) -> str:
    """What the names of a segment's tensors begin with."""
    return f"segment.{name}."


class RowPart(NamedTuple):
    """Some rows of a saved ring."""

    span: Span
    rows: Tensor
    """The packed rows, uint8 ``[K, W]``."""
    large: dict[Path, Tensor]
    """The large fields, ``[K, *shape]``."""


class Source:
    """The state of a replay: its JSON, and its tensors, which are read when they are needed.

    The rows are in one part, or in segments if the JSON has an entry of that name.

    Args:
        content: the JSON.
        shapes: the shape of each tensor.
        read: returns tensors by name, at least those asked for.
        where: the file that holds a tensor, for messages.
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        read: Callable[[Iterable[str]], Mapping[str, Tensor]],
        where: Callable[[str], str] = lambda name: "the state",
    ) -> None:
        self.content, self._shapes, self._read, self._where = content, shapes, read, where
        self.segments: list[Segment] = []
        """The segments that were read."""

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> Source:
        """A state in memory."""
        return cls(content, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, lambda names: tensors)

    @classmethod
    def of_save(cls, save: persist.Save) -> Source:
        """A save that is open for reading."""
        specs = save.specs
        return cls(
            save.content,
            {name: spec.shape for name, spec in specs.items()},
            lambda names: save.read(names=names, most=free_memory()),
            lambda name: specs[name].file,
        )

    @property
    def row_count(self) -> int:
        """How many rows the source has."""
        rows = [self._shapes.get(f"{prefix}rows") for prefix in self._prefixes()]
        return sum(shape[0] for shape in rows if shape)

    def parts(self, saved: Span, large: Iterable[Path]) -> Iterator[RowPart]:
        """All rows, part by part, the oldest part first. ``saved`` are the live rows.

        Raises:
            FileFormatError: a tensor is missing or foreign; or the segments are not in order, or lack a row.
        """
        blocks, prefixes = {path: f"block.{dotted(path)}" for path in large}, self._prefixes()
        apart = "segments" in self.content
        self._require_names(prefixes, ["rows", *blocks.values(), *(["span"] if apart else [])])
        found, before = 0, np.zeros_like(saved.first)
        for prefix in prefixes:
            names = [f"{prefix}rows", *(f"{prefix}{block}" for block in blocks.values())]
            span_name = f"{prefix}span"
            tensors = self._read([*names, span_name] if apart else names)
            span = _span(tensors, span_name, saved) if apart else saved
            for name in names:
                fitting(tensors, name, (span.size,))
            if (span.first < before).any() and span.size:
                raise FileFormatError(
                    f"'{self._where(span_name)}': the rows of this segment come before those of the one listed before "
                    "it; restore the manifest and the data files from one copy"
                )
            found, before = found + span.meet(saved).size, np.maximum(before, span.until)
            if apart:
                self.segments.append(Segment(prefix.split(".")[1], span))
            yield RowPart(span, tensors[names[0]], {path: tensors[f"{prefix}{b}"] for path, b in blocks.items()})
        if found != saved.size:
            raise FileFormatError(
                f"the segments hold {found} of the {saved.size} rows that the cursors state; restore the manifest and "
                "the data files from one copy"
            )

    def sampler_tensors(self, by_row: Iterable[str], count: int) -> dict[str, Tensor]:
        """The arrays of the sampler; those named in ``by_row`` have an entry for each of ``count`` rows.

        Raises:
            FileFormatError: one is missing, or has another length.
        """
        full = [name for name in self._shapes if name.startswith("sampler.")]
        tensors: Mapping[str, Tensor] = self._read(full) if full else {}
        for name in by_row:
            fitting(tensors, f"sampler.{name}", (count,))
        return {name.removeprefix("sampler."): tensors[name] for name in full}

    def _prefixes(self) -> list[str]:
        """The beginning of the tensors' names in each part.

        Raises:
            FileFormatError: the entry for the segments is not a list of their names.
        """
        if "segments" not in self.content:
            return [""]
        names = entry(self.content, "segments", list)
        if not all(map(is_segment, names)):
            raise FileFormatError(
                f"the save's entry 'segments' is {shown(names)}; expected names of 16 hexadecimal digits"
            )
        return [segment_prefix(name) for name in names]

    def _require_names(self, prefixes: Iterable[str], names: Iterable[str]) -> None:
        """Require these tensors of each part, and besides them only the sampler's and the learner's."""
        wanted = {f"{prefix}{name}" for prefix in prefixes for name in names}
        others = {name for name in self._shapes if name.startswith(("sampler.", EXTRA))}
        if wrong := sorted((self._shapes.keys() - others) ^ wanted):
            raise FileFormatError(
                f"the save has the tensors {shown(list(self._shapes), 200)}; {shown(wrong[0])} is missing or foreign"
            )


def _span(tensors: Mapping[str, Tensor], name: str, saved: Span) -> Span:
    """The rows of a segment.

    Raises:
        FileFormatError: these are not ranges of rows that were ever stored.
    """
    first, until = fitting(tensors, name, (2, len(saved.first)), torch.int64).numpy()
    if (first < 0).any() or (until < first).any() or (until > saved.until).any():
        raise FileFormatError(
            f"tensor {shown(name)}: expected ranges of rows of this buffer, got {shown([first, until], 200)}"
        )
    return Span(first, until)
