"""MappedDirectory: named arrays in files of one directory, mapped into memory, and a manifest that lists them.

The manifest is replaced by a rename, so a process that dies leaves the old manifest or the new one. Files that the
manifest does not name were left by a process that died. They are never read. ``docs/durable.md`` has the format.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FileFormatError, NoSaveError
from . import disk, sealed
from .format import MANIFEST, encode
from .holder import LOCK, Holder
from .journal import Journal, Record
from .mapped_manifest import FILE, FORMAT, VERSION, parse
from .mapping import MappedArray, MappedSpec, create, map_file
from .sealed import damaged

__all__ = ["JOURNAL", "MappedDirectory"]


JOURNAL = "journal"
"""The file that says what was flushed, and when."""


_OWN = re.compile(rf"{FILE.pattern}|{LOCK}|{JOURNAL}|{JOURNAL}\.tmp|{re.escape(MANIFEST)}\.tmp")


class MappedDirectory:
    """The arrays of a directory, held by this process alone.

    :meth:`take` gives an array as it is in its file. If there is no such array, it makes a new one, with all of its
    space on the disk. :meth:`commit` then makes the manifest name the arrays that were taken. Until then the directory
    counts as unchanged.

    Args:
        path: the directory, which is made if missing.

    Raises:
        LifecycleError: another process holds the directory.
        FileFormatError: the directory holds something else, or is damaged or of another version.
        OSError: the directory may not be written to.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = disk.usable(path).absolute()  # the process may change its directory while this is open
        self._created = disk.make_directory(self.path)
        self._known: dict[str, MappedSpec] = {}
        self._arrays: dict[str, tuple[MappedSpec, MappedArray]] = {}
        self._made: list[str] = []
        self._ready: dict[str, MappedArray] = {}
        """Arrays that were mapped to check them, and not yet taken."""
        self.content: dict[str, Any] | None = None
        """What was committed with the arrays; None if nothing ever was."""
        with ExitStack() as undo:
            undo.callback(self._remove_if_new)
            self._holder = Holder(self.path)
            undo.callback(self._holder.release)
            self._find()
            undo.pop_all()

    def _find(self) -> None:
        """Read the manifest, if there is one, and open the journal."""
        try:
            raw = disk.read_manifest(self.path)
        except NoSaveError:
            names = os.listdir(self.path)
            if foreign := sorted(name for name in names if not _OWN.fullmatch(name)):
                raise FileFormatError(
                    f"'{self.path}': expected an empty directory or a replay in files, got one with {foreign[0]!r} in "
                    "it; give another path"
                ) from None
            self._remove([name for name in names if name != LOCK])  # left by a process that died before it was done
            self.run = os.urandom(8).hex()
            self.journal = Journal(self.path / JOURNAL, self.run, create=True)
            return
        self.run, self.content, self._known = parse(self.path / MANIFEST, raw)
        self.journal = Journal(self.path / JOURNAL, self.run)

    def has(self, name: str) -> bool:
        """Whether the manifest names this array."""
        return name in self._known

    def check(self) -> None:
        """Map every array that the manifest names.

        Raises:
            FileFormatError: a file is missing, or is not as the manifest says.
            OSError: a file may not be written, or the disk is full.
        """
        for name, spec in self._known.items():
            if name not in self._arrays and name not in self._ready:
                self._ready[name] = map_file(self.path, spec, self.run)

    @property
    def last(self) -> Record | None:
        """The last record of the journal; None in a new one."""
        return self.journal.last

    @property
    def names(self) -> list[str]:
        """The arrays that the manifest names."""
        return list(self._known)

    @property
    def mapped(self) -> list[str]:
        """The arrays that were taken."""
        return list(self._arrays)

    def spec(self, name: str) -> MappedSpec | None:
        """The description of an array that was taken or that the manifest names; None if there is none."""
        return self._arrays[name][0] if name in self._arrays else self._known.get(name)

    def take(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """The array of this name, as it is in its file. If the manifest does not name it, zeros in a new file.

        Raises:
            FileFormatError: the array has another shape or dtype, or its file is not as the manifest says.
            OSError: the disk is full, or fails.
        """
        if name not in self._arrays:
            spec = self._known.get(name)
            wanted = str(np.dtype(dtype)), tuple(shape)
            if spec is None:
                spec = MappedSpec(name, self._new_name(name), *wanted)
                self._made.append(spec.file)
                create(self.path, spec, self.run)
            elif (spec.dtype, spec.shape) != wanted:
                got = f"{spec.dtype} {spec.shape}"
                raise damaged(self.path / MANIFEST, f"the array {name!r} as {wanted[0]} {wanted[1]}", got)
            mapped = self._ready.pop(name, None) or map_file(self.path, spec, self.run)
            self._arrays[name] = spec, mapped
        return self._arrays[name][1].array

    def memory(self, name: str) -> MappedArray:
        """The mapping of an array that was taken."""
        return self._arrays[name][1]

    def _new_name(self, name: str) -> str:
        taken = [int(found[:3]) for found in os.listdir(self.path) if FILE.fullmatch(found)]
        text = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "array"
        return f"{max(taken, default=-1) + 1:03d}-{text}.safetensors"

    def commit(self, content: Mapping[str, Any]) -> None:
        """Write a manifest that names the arrays that were taken and has ``content``. Remove all other arrays' files.

        Raises:
            FileFormatError: the content is not JSON.
            LifecycleError: this process does not hold the directory any more.
            OSError: the disk is full, or fails. Then the old manifest stays in place.
        """
        self.require_held()
        arrays = [
            {"name": s.name, "file": s.file, "dtype": s.dtype, "shape": s.shape} for s, _ in self._arrays.values()
        ]
        parts = {"format": FORMAT, "version": VERSION, "run": self.run, "arrays": arrays}
        text = sealed.seal({**{key: json.dumps(value) for key, value in parts.items()}, "content": encode(content)})
        temporary = self.path / f"{MANIFEST}.tmp"
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        disk.write_file(temporary, [memoryview(text)], len(text))
        os.replace(temporary, self.path / MANIFEST)
        disk.sync_path(self.path)
        self.content, self._known, self._made = dict(content), {n: s for n, (s, _) in self._arrays.items()}, []
        kept = {spec.file for spec in self._known.values()}
        self._remove([name for name in os.listdir(self.path) if FILE.fullmatch(name) and name not in kept])

    def require_held(self) -> None:
        """Refuse to write into a directory that was released, or into another one that has taken its place.

        Raises:
            LifecycleError: the directory was released.
            FileFormatError: another directory is at the path.
            NoSaveError: nothing is at the path.
        """
        self._holder.require()

    def flush(self) -> None:
        """Write all changed pages of all arrays through to the disk.

        Raises:
            FileFormatError: another file is at the path of one of them, or none (NoSaveError).
            OSError: the disk fails.
        """
        for spec, mapped in self._arrays.values():
            path = self.path / spec.file
            if not disk.is_at(path, mapped.descriptor):
                raise FileFormatError(f"'{path}': another file has taken the place of the one that is mapped; nothing "
                                      "that is written now would be found again")  # fmt: skip
            mapped.flush()

    def discard(self) -> None:
        """Take back what was made since the last commit, and release the directory."""
        self._remove(self._made)
        self.release()
        self._remove_if_new()

    def release(self) -> None:
        """Release the directory. The arrays stay mapped for as long as something refers to them."""
        for mapped in (*(mapped for _, mapped in self._arrays.values()), *self._ready.values()):
            with suppress(OSError):
                os.close(mapped.descriptor)
        self._arrays, self._ready = {}, {}
        self.journal.close()
        self._holder.release()

    def _remove_if_new(self) -> None:
        """Remove the directory if it was made here and nothing was committed."""
        if self._created and self.content is None:
            self._remove([LOCK, JOURNAL])
            with suppress(OSError):
                self.path.rmdir()

    def _remove(self, names: list[str]) -> None:
        for name in names:
            with suppress(OSError):
                os.unlink(self.path / name)
