"""MappedCopy: the arrays of a directory as private memory. The directory may be open in another process."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import disk
from .format import MANIFEST
from .journal import Record, last_record
from .mapped import JOURNAL
from .mapped_manifest import parse
from .mapping import MappedArray, MappedSpec, map_to_read
from .sealed import damaged

__all__ = ["MappedCopy"]


class MappedCopy:
    """The arrays of a directory that :class:`relive.files.mapped.MappedDirectory` wrote. Nothing there is changed.

    :meth:`take` gives memory that this process may change for itself. :meth:`live` gives the files as they are now.

    Args:
        path: the directory.

    Raises:
        NoSaveError: the directory has no manifest.
        FileFormatError: the directory holds something else, or is damaged or of another version.
        OSError: a file may not be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = disk.usable(path).absolute()
        self.run, self.content, self._known = parse(self.path / MANIFEST, disk.read_manifest(self.path))
        self._arrays: dict[str, tuple[MappedSpec, MappedArray]] = {}
        self._live: dict[str, MappedArray] = {}
        self.last: Record | None = self.record()
        """The last record of the journal when the manifest was read."""

    def record(self) -> Record:
        """The last record of the journal, now.

        Raises:
            FileFormatError: the journal is missing, altered or damaged.
        """
        return last_record(self.path / JOURNAL, self.run)

    def has(self, name: str) -> bool:
        """Whether the manifest names this array."""
        return name in self._known

    @property
    def names(self) -> list[str]:
        """The arrays that the manifest names."""
        return list(self._known)

    def spec(self, name: str) -> MappedSpec | None:
        """The description of an array that the manifest names; None if there is none."""
        return self._known.get(name)

    def check(self) -> None:
        """Map every array that the manifest names.

        Raises:
            FileFormatError: a file is missing, or is not as the manifest says.
        """
        for name, spec in self._known.items():
            self.take(name, spec.shape, spec.dtype)

    def take(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """The array of this name in private memory; zeros if the manifest names none.

        Raises:
            FileFormatError: the array has another shape or dtype, or its file is not as the manifest says.
        """
        spec, wanted = self._known.get(name), (str(np.dtype(dtype)), tuple(shape))
        if spec is None:
            return np.zeros(math.prod(shape), dtype).reshape(shape)
        if (spec.dtype, spec.shape) != wanted:
            raise damaged(self.path / MANIFEST, f"the array {name!r} as {wanted[0]} {wanted[1]}",
                          f"{spec.dtype} {spec.shape}")  # fmt: skip
        if name not in self._arrays:
            self._arrays[name] = spec, map_to_read(self.path, spec, self.run, copy=True)
        return self._arrays[name][1].array

    def live(self, name: str) -> NDArray[Any]:
        """The array of this name in its file, which another process may be changing. It cannot be written to."""
        if name not in self._live:
            self._live[name] = map_to_read(self.path, self._known[name], self.run, copy=False)
        return self._live[name].array

    def memory(self, name: str) -> MappedArray:
        """The mapping of an array that was taken."""
        return self._arrays[name][1]

    def release(self) -> None:
        """Close the files. The arrays stay mapped for as long as something refers to them."""
        for mapped in (*(mapped for _, mapped in self._arrays.values()), *self._live.values()):
            with suppress(OSError):
                os.close(mapped.descriptor)
        self._arrays, self._live = {}, {}
