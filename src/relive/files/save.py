"""Named arrays <-> a directory, saved whole or not at all. Reading checks everything and runs nothing.

A save is a ``manifest.json`` and the data files that it names. Data files get new names and never change, so a new save
may name files of the old one. One rename puts the new manifest in place of the old one. Data files that the new
manifest does not name are removed after that. So if the writer dies, the directory holds the old save or the new one.
Files that no manifest names may remain. The next save removes them.
``docs/files.md`` has the format.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import FileFormatError
from . import directory, disk, format
from .format import MANIFEST, Array, Contents
from .sealed import damaged
from .tensors import filled, pieces

__all__ = ["Change", "Save", "read", "update", "write"]


PathLike = str | os.PathLike[str]


class Change(NamedTuple):
    """The content of a new save: what it keeps of the save in place, and what is new."""

    groups: Sequence[Mapping[str, Array]]
    """New tensors by name. Each group has data files of its own, so that a later save can keep a group as a whole."""
    content: Mapping[str, Any]
    """The JSON."""
    kept: Contents = Contents({}, {})
    """Tensors of the save in place that stay, each with its whole data file."""


def write(
    path: PathLike,
    tensors: Mapping[str, Array],
    content: Mapping[str, Any],
    *,
    taken: Callable[[], object] | None = None,
) -> None:
    """Save named tensors or arrays, and some JSON, in the directory ``path``. A save that is there is replaced.

    See :func:`update`, which can also keep parts of it.
    """
    update(path, lambda present: Change([tensors], content), taken=taken)


def update(
    path: PathLike,
    change: Callable[[Contents], Change],
    *,
    taken: Callable[[], object] | None = None,
) -> Contents:
    """Replace the save in the directory ``path``. Data files that are kept are not written again.

    ``change`` gets the intact part of the save that is there, which is empty if there is none. It returns the content
    of the new save. The result is what the new save holds.

    When this call returns, the new save is on the disk. If the call raises or is killed, the old save is unchanged. In
    rare cases the new one is already in place, and the error's last note says so. Saves into one directory take turns.
    The trap: if you change the tensors before ``taken`` is called, ``read`` will refuse the save.

    Raises:
        FileFormatError: ``path`` is a file or a directory with foreign files, or the content is not JSON.
        NotFiniteError: the content holds NaN or infinity.
        DTypeError, FieldError: the format lacks a dtype, or cannot hold a name.
        OSError: the disk is full or fails.
    """
    path, generation = disk.usable(path), os.urandom(8).hex()
    with directory.turn(path) as (descriptor, created):
        present, manifest, size = directory.replaceable(path), b"", 0
        try:
            groups, content, kept = change(present)
            text, tensors = format.encode(content), {name: x for group in groups for name, x in group.items()}
            planned, sources = _planned(groups, generation), dict[Path, tuple[Iterator[memoryview], int]]()
            for file, group in planned.items():
                header = format.header(group)
                parts = itertools.chain([memoryview(header)], *(pieces(tensors[name]) for name in group))
                sources[path / file] = parts, len(header) + sum(spec.nbytes for spec in group.values())
                size += sources[path / file][1]
            files = kept.files | dict(zip(planned, disk.write_files(sources, taken), strict=True))
            specs = kept.specs | {name: spec for group in planned.values() for name, spec in group.items()}
            manifest, temporary = format.compose(text, files, specs), path / format.new_name(generation)
            disk.write_file(temporary, [memoryview(manifest)], len(manifest))
            directory.sync(descriptor)
            os.replace(temporary, path / MANIFEST)
            directory.sync(descriptor)  # remove the old files only once the new manifest is safe on the disk
            directory.remove_others(path, keep=files)
            directory.require_there(path, descriptor)
        except BaseException as error:
            outcome = directory.take_back(path, descriptor, generation, manifest, created)
            if advice := directory.advice(path, error, size):
                error.add_note(advice)
            error.add_note(f"the save into '{path}' failed; {outcome}")
            raise
    return Contents(files, specs)


def _planned(groups: Sequence[Mapping[str, Array]], generation: str) -> dict[str, dict[str, format.Spec]]:
    """The data files to write, each with its tensors."""
    planned: dict[str, dict[str, format.Spec]] = {}
    for group in groups:
        planned |= format.by_file(format.plan(group, generation, len(planned)))
    return planned


def read(path: PathLike, *, most: int | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors of the save at ``path``, as from :meth:`Save.read`, and its JSON."""
    with Save(path) as save:
        return save.read(most=most), save.content


class Save:
    """A save opened for reading: ``content`` is its JSON, ``specs`` describes its tensors, :meth:`read` reads them.

    It keeps reading the save that it opened, even if another one replaces it meanwhile.

    Raises:
        NoSaveError: nothing is at ``path``, or no save was ever completed there; also a FileNotFoundError.
        FileFormatError: the save is foreign, of another version, incomplete or damaged.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = disk.usable(path)
        with ExitStack() as resources:
            raw = disk.read_manifest(self.path)
            while True:
                self.content, self.contents = format.parse(self.path / MANIFEST, raw)
                self._files, self.specs = self.contents
                try:
                    self._streams = {f: resources.enter_context(disk.open_file(self.path / f)) for f in self._files}
                    break
                except FileNotFoundError as error:
                    # a writer may have replaced the manifest since, and removed the files that the old one named
                    before, raw = raw, disk.read_manifest(self.path)
                    if raw == before:
                        raise damaged(Path(error.filename), "a data file", "nothing") from error
            self.close = resources.pop_all().close

    def __enter__(self) -> Save:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, *, most: int | None = None, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The tensors by name, on the CPU.

        With ``names``, only the data files that hold one of these tensors are read, each with all of its tensors.
        ``most`` limits the bytes of memory for the tensors, because files with holes can be larger than their disk.

        Raises:
            FileFormatError: a file does not match the manifest, or the tensors take more memory.
        """
        groups = format.by_file(self.specs)
        if names is not None:
            files = {self.specs[name].file for name in names}
            groups = {file: group for file, group in groups.items() if file in files}
        readers = {file: disk.Reader(self._streams[file], self.path / file) for file in groups}
        for file, reader in readers.items():  # before anything is allocated
            reader.check_size(self._files[file].nbytes)
        wanted = sum(spec.nbytes for group in groups.values() for spec in group.values())
        if most is not None and wanted > most:
            raise FileFormatError(f"'{self.path}': its tensors take {wanted:,} bytes of memory, and {most:,} are free")
        result: dict[str, Tensor] = {}
        for file, reader in readers.items():
            reader.check_start(format.header(groups[file]))
            for name, spec in groups[file].items():
                result[name] = filled(spec, reader.read_into)
                if spec.code == "BOOL" and spec.nbytes and result[name].view(torch.uint8).max() > 1:
                    raise damaged(self.path / file, "bools of 0 and 1", "other bytes")
            reader.check_crc32(self._files[file].crc32)
        return result
