"""Named arrays <-> a directory, saved whole or not at all. Reading checks everything and runs nothing.

A save is a ``manifest.json`` and the data files that it names. Data files get new names and never change, so a new save
may name files of the old one. One rename puts the new manifest in place of the old one. Data files that the new
manifest does not name are removed after that. So if the writer dies, the directory holds the old save or the new one.
Files that no manifest names may remain. The next save removes them.
``docs/files.md`` has the format.

First come saves, written and read; then the directory that a save replaces; saves in another thread; and last the
nested values of a learner as JSON and tensors.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import shutil
import stat
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import TIMEOUT_MAX, Thread
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from ..errors import FileFormatError, LifecycleError
from ..parameters import TIMEOUT_RULE, require
from ..printable import add_note, shown
from . import disk, format
from .disk import is_at, make_directory, read_manifest
from .format import MANIFEST, OWN_NAME, Array, Contents, Streamed, damaged, filled, parse, parse_kind, pieces, plan

PathLike = str | os.PathLike[str]


class NewSave(NamedTuple):
    """The content of a new save: what it keeps of the save in place, and what is new."""

    groups: Sequence[Mapping[str, Array]]
    """New tensors by name. Each group has data files of its own, so that a later save can keep a group as a whole."""
    content: Mapping[str, object]
    """The JSON."""
    kept: Contents = Contents({}, {})
    """Tensors of the save in place that stay, each with its whole data file."""


def write(path: PathLike, tensors: Mapping[str, Array], content: Mapping[str, object]) -> None:
    """Save named tensors or arrays, and some JSON, in the directory ``path``. A save that is there is replaced.

    See :func:`update`, which can also keep parts of it.
    """
    update(path, lambda present: NewSave([tensors], content))


def update(
    path: PathLike,
    change: Callable[[Contents], NewSave],
    *,
    on_read: Callable[[], object] | None = None,
) -> Contents:
    """Replace the save in the directory ``path``. Data files that are kept are not written again.

    ``change`` gets the intact part of the save that is there, which is empty if there is none. It returns the content
    of the new save. The result is what the new save holds.

    When this call returns, the new save is on the disk. If the call raises or is killed, the old save is unchanged. In
    rare cases the new one is already in place, and the error's last note says so. Saves into one directory take turns.
    The trap: if you change the tensors before ``on_read`` is called, ``read`` will refuse the save.

    Raises:
        FileFormatError: ``path`` is a file or a directory with foreign files, or the content is not JSON.
        NotFiniteError: the content holds NaN or infinity.
        DTypeError, FieldError: the format lacks a dtype, or cannot hold a name.
        OSError: the disk is full or fails.
    """
    path, generation = disk.target(path), os.urandom(8).hex()
    with locked_directory(path) as (descriptor, created):
        present, manifest, size = replaceable(path), b"", 0
        try:
            groups, content, kept = change(present)
            text, tensors = format.encode(content), {name: x for group in groups for name, x in group.items()}
            planned, sources = _planned(groups, generation), dict[Path, tuple[Iterator[memoryview], int]]()
            for file, group in planned.items():
                header = format.header(group)
                parts = itertools.chain([memoryview(header)], *(pieces(tensors[name]) for name in group))
                sources[path / file] = parts, len(header) + sum(spec.nbytes for spec in group.values())
                size += sources[path / file][1]
            files = kept.files | dict(zip(planned, disk.write_files(sources, on_read), strict=True))
            specs = kept.specs | {name: spec for group in planned.values() for name, spec in group.items()}
            # the manifest is written beside the old one: it names only files that are whole on the disk by now
            manifest, temporary = format.compose(text, files, specs), path / format.new_name(generation)
            disk.write_file(temporary, [memoryview(manifest)], len(manifest))
            # first the names of all new files: a manifest must never name a file that a power cut can take away
            sync(descriptor)
            os.replace(temporary, path / MANIFEST)
            sync(descriptor)  # remove the old files only once the new manifest is safe on the disk
            _remove(path, lambda name: OWN_NAME.fullmatch(name) is not None and name not in files)
            if descriptor is not None and not is_at(path, descriptor):
                what = "the directory was removed while a save was written into it"
                raise FileNotFoundError(errno.ENOENT, what, str(path))
        except BaseException as error:
            outcome = _roll_back(path, descriptor, generation, manifest, created)
            if advice := _disk_full_advice(path, error, size):
                add_note(error, advice)
            add_note(error, f"the save into '{path}' failed; {outcome}")
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

    content: dict[str, Any]
    contents: Contents
    specs: dict[str, format.Spec]

    def __init__(self, path: PathLike) -> None:
        self.path: Path = disk.usable(path)
        with ExitStack() as resources:
            raw = disk.read_manifest(self.path)
            while True:  # all files are open before anything is read: a save that replaces this one cannot take them
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
            self.close: Callable[[], None] = resources.pop_all().close

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
        readers = {file: disk.FileReader(self._streams[file], self.path / file) for file in groups}
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
                # a bool of another byte means something else to NumPy, to torch and to compiled code
                if spec.code == "BOOL" and spec.nbytes and result[name].view(torch.uint8).max() > 1:
                    raise damaged(self.path / file, "bools of 0 and 1", "other bytes")
            reader.check_crc32(self._files[file].crc32)
        return result


# -- the directory of a save ----------------------------------------------------------------------------------


@contextmanager
def locked_directory(path: Path) -> Generator[tuple[int | None, bool]]:
    """Wait for the exclusive right to save into a directory, which is created if missing.

    Yields its descriptor, for :func:`sync`, and whether it is new. A failed first save removes its directory. So after
    the wait, the path may be gone or name another directory; then the directory is created and locked once more.
    """
    created = make_directory(path)
    if sys.platform == "win32":  # directories have no descriptors there
        yield None, created
        return
    import fcntl

    while True:
        descriptor = os.open(path, os.O_RDONLY)
        _locked.add(descriptor)
        try:
            with suppress(OSError):  # some file systems have no locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if is_at(path, descriptor):  # not removed or replaced meanwhile
                yield descriptor, created
                return
        finally:
            _locked.discard(descriptor)
            with suppress(OSError):  # to close is not enough while a forked child has the descriptor, too
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)
        created = make_directory(path)


_locked: set[int] = set()
"""Descriptors of the directories whose lock this process holds or waits for."""


def _close_in_child() -> None:
    """In a forked child, close the inherited descriptors. They would keep the lock of a killed parent."""
    while _locked:
        with suppress(OSError):
            os.close(_locked.pop())


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_close_in_child)


def sync(directory: int | None) -> None:
    """Write the directory's list of names to the disk."""
    if directory is not None:
        os.fsync(directory)


def replaceable(path: Path) -> Contents:
    """The intact part of the save in a directory that may be replaced; empty contents if there is no save.

    A tensor counts as intact if its file has the size that the manifest states.

    Raises:
        FileFormatError: the directory holds files that do not belong to a save; names one of them.
    """
    names = os.listdir(path)
    if MANIFEST in names:
        raw = read_manifest(path)
        parse_kind(path / MANIFEST, raw)
        with suppress(FileFormatError):  # a save that contradicts itself may be replaced; no part of it is kept
            _, present = parse(path / MANIFEST, raw)
            whole = {file for file, note in present.files.items() if _has_size(path / file, note.nbytes)}
            return present.of_tensors([name for name, spec in present.specs.items() if spec.file in whole])
    elif foreign := [name for name in names if not OWN_NAME.fullmatch(name)]:
        raise FileFormatError(
            f"'{path}': expected an empty directory or a save, got one with {min(foreign)!r} in it; "
            "give another path, or empty it yourself"
        )
    return Contents({}, {})


def _has_size(path: Path, size: int) -> bool:
    """True if a regular file of this size is at the path."""
    try:
        status = os.lstat(path)  # not stat: a link may lead to a file that somebody else changes
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == size


def _disk_full_advice(path: Path, error: BaseException, size: int) -> str | None:
    """Advice for an error if the disk has no room for ``size`` more bytes; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return None
    free = "an unknown number"
    with suppress(OSError):
        free = f"{shutil.disk_usage(path if path.exists() else path.parent).free:,}"
    return (
        f"the save needs {size:,} bytes besides those of the save in place, and the disk of '{path}' has {free} free, "
        "or allows no more; make room, or save to another disk"
    )


def _roll_back(path: Path, directory: int | None, generation: str, manifest: bytes, created: bool) -> str:
    """Remove the files of a failed save, unless its manifest is in place. Returns the outcome as a sentence.

    ``directory`` is the descriptor of the directory, and ``manifest`` is empty if it was not yet made.
    """
    if directory is not None and not is_at(path, directory):
        with suppress(OSError):  # another directory may be in its place, and half a save there is of no use
            if manifest and manifest == (path / MANIFEST).read_bytes():
                os.unlink(path / MANIFEST)
        _remove(path, lambda name: generation in name)
        return "the directory was removed meanwhile, and any save in it; save again"
    try:
        # its data files are on the disk, so they must stay: the manifest in place names them
        if manifest and manifest == (path / MANIFEST).read_bytes():
            return "the new save is in place nevertheless, but a loss of power may destroy it; save again"
    except FileNotFoundError:
        pass
    except OSError as error:  # the next save removes them
        return f"the new save may or may not be in place ({error})"
    _remove(path, lambda name: generation in name)
    if created:
        with suppress(OSError):
            path.rmdir()
    return "the previous save is unchanged"


def _remove(path: Path, is_unwanted: Callable[[str], bool]) -> None:
    """Remove the files of these names."""
    with suppress(OSError):
        for name in filter(is_unwanted, os.listdir(path)):
            with suppress(OSError):  # a leftover file is harmless, and the next save tries again
                os.unlink(path / name)


# -- saves in another thread ----------------------------------------------------------------------------------


class SaveHandle:
    """A save: done, or under way in another thread. ``save`` returns it.

    The thread is not a daemon, so the interpreter does not end before the save is done. If a save failed and its error
    was not raised by :meth:`wait` when the handle is dropped, Python prints it.
    """

    def __init__(self, path: str | os.PathLike[str], work: Callable[[], object] | None = None) -> None:
        self.path: str = os.fspath(path)
        """The directory."""
        self._error: BaseException | None = None
        self._seen, self._process = False, os.getpid()
        self._thread = None if work is None else Thread(target=self._run, args=(work,), name=f"save into {self.path}")

    @property
    def done(self) -> bool:
        """True once the save is over: on the disk, or failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the save is on the disk.

        Args:
            timeout: seconds to wait at most; None waits as long as it takes.

        Raises:
            FileFormatError, OSError: the save failed. Without ``background``, ``save`` would have raised this error.
            TimeoutError: the save is not done yet. It goes on.
            ParameterError: the timeout is negative or NaN.
            LifecycleError: this process is a fork of the one that saves.
        """
        require("wait", TIMEOUT_RULE, timeout=timeout)
        if self.elsewhere:
            raise LifecycleError(f"the save into '{self.path}' was begun by another process; wait for it there")
        if self._thread is not None:
            self._thread.join(None if timeout is None else min(timeout, TIMEOUT_MAX))  # more would overflow
            if self._thread.is_alive():
                raise TimeoutError(f"the save into '{self.path}' is not done after {timeout} seconds; wait again")
        if self._error is not None:
            self._seen = True
            raise self._error

    @property
    def elsewhere(self) -> bool:
        """True if the parent of this forked process saves. A fork does not have the threads of its parent."""
        return self._thread is not None and self._process != os.getpid()

    @property
    def unseen(self) -> bool:
        """True if the save has failed, and :meth:`wait` has not raised the error yet."""
        return self._error is not None and not self._seen

    def start(self) -> None:
        """Begin the save, if it is to go on in another thread.

        Raises:
            MemoryError, RuntimeError: no thread can be started. Nothing was saved.
        """
        if self._thread is not None:
            disk.start_thread(self._thread, "save without background=True")

    def drop(self) -> None:
        """Do not print the error if the save fails."""
        self._seen = True

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    def __repr__(self) -> str:
        state = "elsewhere" if self.elsewhere else "under way" if not self.done else "failed" if self._error else "done"
        return f"<save into {self.path!r}: {state}>"

    def __del__(self) -> None:
        error = self.__dict__.get("_error")
        if error is not None and not self._seen:
            raise error  # no caller can catch it here, so Python prints it


# An error that nobody waited for is raised by the next save: a loop that never waits loses no save silently.
class Saves:
    """The saves of one buffer. A new one waits for the one before."""

    def __init__(self) -> None:
        self._last: SaveHandle | None = None

    def wait(self) -> None:
        """Wait for the save under way, if there is one.

        Raises:
            FileFormatError, OSError: the save before failed, and no call has raised its error yet. It is raised once.
        """
        last = self._last
        if last is None or last.elsewhere:
            self._last = None
            return
        # a save that is over and whose error was raised before has nothing more to say
        fresh = last.unseen or not last.done
        try:
            last.wait()
        except Exception as error:
            if not fresh:
                return
            add_note(error, "this is the error of the save before, in the background; now nothing was saved")
            raise
        finally:
            if last.done:
                self._last = None

    def begin(self, handle: SaveHandle) -> SaveHandle:
        """Start a save. Call :meth:`wait` before."""
        handle.start()
        self._last = handle
        return handle

    def forget(self, handle: SaveHandle) -> None:
        """Forget a save that is not needed any more, and its error."""
        handle.drop()
        self._last = None

    def __reduce__(self) -> tuple[type[Saves], tuple[()]]:
        """For pickle and deepcopy: a copy of a buffer has no save under way."""
        return Saves, ()


def detached(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Copies in RAM of the tensors that a save writes, so that the originals may change.

    Raises:
        DTypeError, FieldError: a tensor cannot be saved; names it.
    """
    plan(tensors, "")
    return {name: _copied(value) for name, value in tensors.items()}


def _copied(value: Array) -> Array:
    if isinstance(value, Streamed):
        return value.whole()
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return np.array(value)


# -- nested values --------------------------------------------------------------------------------------------

EXTRA = ".extra."
"""The beginning of the names of these tensors. No field of a schema has such a name."""


STORABLE = (
    "dicts, lists, tuples, tensors, NumPy arrays and scalars, numbers, bools, text, bytes and None; the keys of dicts "
    "are text or whole numbers"
)


_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_json(value: object) -> tuple[object, dict[str, Array]]:
    """A value as JSON, and its tensors by name. The names follow from the keys.

    Raises:
        FileFormatError: a value has a type that cannot be stored; names its keys.
    """
    tensors: dict[str, Array] = {}
    try:
        return _to_json(value, (), tensors), tensors
    except RecursionError:
        raise FileFormatError("extra: it is nested too deep, or contains itself; flatten it") from None


def _to_json(value: Any, keys: tuple[object, ...], tensors: dict[str, Array]) -> object:
    kind = cast("type[object]", type(value))
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if kind in (list, tuple):
        members = [_to_json(member, (*keys, i), tensors) for i, member in enumerate(value)]
        return members if kind is list else {"tuple": members}
    if kind in (dict, OrderedDict, defaultdict):
        return {"dict": _pairs(value, keys, tensors)}
    if kind in (Tensor, torch.nn.Parameter):
        return {"tensor": _named(value.detach(), keys, tensors)}
    if kind is np.ndarray:
        return {"array": _named(value, keys, tensors)}
    if issubclass(kind, np.generic):
        return {"scalar": _named(np.asarray(value), keys, tensors)}
    if kind is bytes:
        return {"bytes": _named(np.frombuffer(value, np.uint8), keys, tensors)}
    raise FileFormatError(f"{_place(keys)}: expected {STORABLE}; got {kind.__name__}; convert it, or leave it out")


def _pairs(value: Mapping[object, object], keys: tuple[object, ...], tensors: dict[str, Array]) -> list[object]:
    for key in value:
        if type(key) not in (str, int):
            raise FileFormatError(
                f"{_place(keys)}: expected keys that are text or whole numbers, got {shown(key)}; convert it"
            )
    return [[key, _to_json(member, (*keys, key), tensors)] for key, member in value.items()]


def _place(keys: tuple[object, ...]) -> str:
    """The place of a value as Python code: extra['optimizer']['state'][0]."""
    return "extra" + "".join(f"[{shown(key)}]" for key in keys)


def _named(value: Array, keys: tuple[object, ...], tensors: dict[str, Array]) -> str:
    """The name under which a tensor is saved: its keys, joined by dots. If that name is taken, a number follows."""
    # keys with dots in them can give two tensors one name
    plain = EXTRA + ".".join(map(str, keys))
    name, number = plain, 1
    while name in tensors:
        number += 1
        name = f"{plain}#{number}"
    tensors[name] = value
    return name


def read_extra(save: Save, most: int | None) -> Any:
    """The ``extra`` of a save, which :func:`to_json` took apart; None if there is none.

    ``most`` is the most bytes of memory that its tensors may take.

    Raises:
        FileFormatError: the save is damaged.
    """
    names = [name for name in save.specs if name.startswith(EXTRA)]
    tensors = save.read(names=names, most=most) if names else {}
    return from_json(save.content.get("extra"), {name: tensors[name] for name in names})


def from_json(node: object, tensors: Mapping[str, Tensor]) -> Any:
    """The value that :func:`to_json` described. The value owns the tensors.

    Raises:
        FileFormatError: the JSON does not describe a value, or does not name each tensor once.
    """
    left = dict(tensors)
    try:
        value = _from_json(node, left)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FileFormatError(f"the save's entry 'extra' is not as relive writes it: {shown(error, 200)}") from error
    if left:
        raise FileFormatError(f"the save's entry 'extra' does not name the tensor {shown(next(iter(left)))}")
    return value


def _from_json(node: object, left: dict[str, Tensor]) -> Any:
    if format.is_list(node):
        return [_from_json(member, left) for member in node]
    if not format.is_object(node):
        return node
    ((kind, given),) = node.items()
    if kind == "dict":
        found = {_key(key): _from_json(member, left) for key, member in given}
        if len(found) != len(given):
            raise ValueError("a dict has a key twice")
        return found
    if kind == "tuple":
        return tuple(_from_json(member, left) for member in given)
    if kind == "float":
        return _SPECIAL[given]
    tensor = left.pop(given)  # popped: no two values may share a tensor
    if kind == "tensor":
        return tensor
    array = tensor.numpy()
    if kind == "array":
        return array
    if kind == "scalar" and not array.ndim:
        return array[()]
    if kind == "bytes" and array.ndim == 1 and array.dtype == np.uint8:
        return array.tobytes()
    raise ValueError(f"{shown(kind)} is no kind of value")


def _key(key: object) -> object:
    if type(key) not in (str, int):
        raise ValueError(f"{shown(key)} as a key")
    return key
