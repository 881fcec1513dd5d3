"""The format of a save: file names, dtypes, the header of a data file, the manifest. ``docs/files.md`` describes it.

First comes what a save holds, and where; then the bytes of arrays, the manifest, and last JSON with a checksum.
"""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeGuard

import numpy as np
import torch
from torch import Tensor

from ..errors import DTypeError, FieldError, FileFormatError, NotFiniteError
from ..printable import shown

# -- what a save holds ----------------------------------------------------------------------------------------

Solid = Tensor | np.ndarray


@dataclass(frozen=True)
class Streamed:
    """An array that is saved piece by piece, never whole in memory. ``parts`` yields it in pieces along axis 0."""

    shape: tuple[int, ...]
    dtype: torch.dtype | np.dtype
    parts: Callable[[], Iterator[Solid]]

    def whole(self) -> Solid:
        """The whole array in memory."""
        none = (0, *self.shape[1:])
        if isinstance(self.dtype, torch.dtype):
            parts = (torch.as_tensor(part, device="cpu") for part in self.parts())
            return torch.cat([torch.zeros(none, dtype=self.dtype, device="cpu"), *parts])
        return np.concatenate([np.zeros(none, self.dtype), *map(np.asarray, self.parts())])


Array = Solid | Streamed


AXES = 32
"""The most axes of a tensor; NumPy before 2.0 allows no more."""


NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""A dtype's name in safetensors -> its name in torch and, if it has it, in NumPy."""


_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, name in NAMES.items() if hasattr(torch, name)}


_CODES = {NAMES[code]: code for code in _DTYPES}


_MAX_BYTES = 2**63 - 1


@dataclass(frozen=True)
class Spec:
    """A manifest's entry for one tensor: its safetensors dtype, its shape and its file."""

    code: str
    shape: tuple[int, ...]
    file: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in torch."""
        return _DTYPES[self.code]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileNote:
    """A manifest's entry for one data file: its size, and its CRC-32 in hexadecimal."""

    nbytes: int
    crc32: str


class Contents(NamedTuple):
    """The data files and tensors of a save."""

    files: dict[str, FileNote]
    """Its data files by name."""
    specs: dict[str, Spec]
    """Its tensors by name."""

    def of_tensors(self, names: Iterable[str]) -> Contents:
        """The named tensors, and the files that hold them."""
        specs = {name: self.specs[name] for name in names}
        return Contents({spec.file: self.files[spec.file] for spec in specs.values()}, specs)


MANIFEST = "manifest.json"


OWN_NAME = re.compile(r"data-[0-9a-f]{16}-[0-9]{5}\.safetensors|manifest-[0-9a-f]{16}\.tmp")
"""The names of all other files of a save. No name contains a directory, and no other program is likely to use one."""


FILE_BYTES = 1 << 28
"""A data file of this many bytes or more takes no further tensor."""


def new_name(generation: str, number: int | None = None) -> str:
    """The name of data file ``number`` of a generation; without a number, that of a manifest being written."""
    return f"manifest-{generation}.tmp" if number is None else f"data-{generation}-{number:05d}.safetensors"


def plan(tensors: Mapping[str, Array], generation: str, first: int = 0) -> dict[str, Spec]:
    """The place of each tensor, in the order of writing, in files numbered from ``first`` on.

    The widest dtypes come first, so all are aligned.

    Raises:
        DTypeError, FieldError: a tensor cannot be saved.
    """
    codes = {name: _code_of(name, value) for name, value in tensors.items()}
    specs: dict[str, Spec] = {}
    number, size = first, 0
    # widest dtypes first: each tensor begins at a multiple of its width, without padding
    for name in sorted(codes, key=lambda name: -_DTYPES[codes[name]].itemsize):
        if size >= FILE_BYTES:
            number, size = number + 1, 0
        shape = tuple(int(length) for length in tensors[name].shape)
        specs[name] = Spec(codes[name], shape, new_name(generation, number))
        size += specs[name].nbytes
    return specs


_SURROGATE = re.compile("[\ud800-\udfff]")


def _code_of(name: object, value: Array) -> str:
    if not isinstance(name, str) or name == "__metadata__" or _SURROGATE.search(name):
        raise FieldError(f"tensor {name!r}: expected a name that is Unicode text other than '__metadata__'; rename it")
    if len(value.shape) > AXES:
        raise FieldError(f"tensor '{name}': expected at most {AXES} axes, got {len(value.shape)}; flatten some")
    if isinstance(value, Tensor) and (value.layout is not torch.strided or value.is_meta):
        raise DTypeError(f"tensor '{name}': expected a dense tensor with data, got {value.layout} on {value.device}")
    code = _CODES.get(str(value.dtype).removeprefix("torch."))
    if code is None:
        known = ", ".join(_CODES)
        raise DTypeError(f"tensor '{name}': expected one of {known}, got {value.dtype}; convert it, or view its bytes")
    return code


def by_file(specs: Mapping[str, Spec]) -> dict[str, dict[str, Spec]]:
    """The tensors of each file, in order."""
    files: dict[str, dict[str, Spec]] = {}
    for name, spec in specs.items():
        files.setdefault(spec.file, {})[name] = spec
    return files


def header(specs: Mapping[str, Spec], notes: Mapping[str, str] | None = None, multiple: int = 8) -> bytes:
    """The header of the safetensors file of these tensors. Its bytes are always the same, so reading needs no parser.

    ``notes`` are the metadata of safetensors. relive's saves have none. The tensors begin at a ``multiple`` of bytes.
    """
    entries: dict[str, object] = {} if notes is None else {"__metadata__": dict(notes)}
    end = 0
    for name, spec in specs.items():
        start, end = end, end + spec.nbytes  # without gaps: the file's size follows from its tensors
        entries[name] = {"dtype": spec.code, "shape": spec.shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % multiple)  # 8: the bytes of its length, which come first
    return struct.pack("<Q", len(text)) + text


# -- the bytes of arrays --------------------------------------------------------------------------------------

CHUNK = 1 << 20
"""Bytes moved at a time. They are checksummed while in the cache, and copies are never larger."""


def pieces(value: Array) -> Iterator[memoryview]:
    """The bytes of a tensor in row-major order, without a copy if it is plain."""
    for part in value.parts() if isinstance(value, Streamed) else (value,):
        for slab in _slabs(part):
            yield from _chunks(_raw(slab))


def filled(spec: Spec, read_into: Callable[[memoryview], None]) -> Tensor:
    """A new tensor, filled by passing its pieces, in the order of :func:`pieces`, to ``read_into``."""
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
    # NumPy asks the system for huge pages; the first write to each small page costs more than the copy itself
    raw = np.empty(spec.nbytes, np.uint8)
    for piece in _chunks(raw.data):
        read_into(piece)
    return torch.from_numpy(raw).view(spec.dtype).reshape(spec.shape)


def _slabs(value: Solid) -> Iterator[Solid]:
    """Parts of ``value`` in row-major order, each plain or at most a chunk."""
    if _is_plain(value) or value.nbytes <= CHUNK:
        yield value
        return
    # a part that is not plain is copied, so its size is limited: rows of it, or parts of a single row
    rows = max(1, CHUNK // (value.nbytes // len(value)))
    for start in range(0, len(value), rows):
        yield from _slabs(value[start] if rows == 1 else value[start : start + rows])


def _is_plain(value: Solid) -> bool:
    """True if a value's bytes lie in RAM in row-major order."""
    if isinstance(value, Tensor):
        return value.is_cpu and value.is_contiguous() and not value.is_conj() and not value.is_neg()
    return value.flags.c_contiguous


def _raw(slab: Solid) -> memoryview:
    """The bytes of a slab, copied unless it is plain."""
    if isinstance(slab, Tensor):
        plain = slab.detach().cpu().resolve_conj().resolve_neg().contiguous()
        flat = plain.as_strided((plain.numel(),), (1,))  # not reshape: a single element may have any stride
        return flat.view(torch.uint8).numpy().data
    return np.ascontiguousarray(slab).reshape(-1).view(np.uint8).data


def _chunks(raw: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(raw), CHUNK):
        yield raw[start : start + CHUNK]


# -- the manifest ---------------------------------------------------------------------------------------------

FORMAT, VERSION = "relive arrays", 2


READABLE = (1, VERSION)
"""The versions that this release reads: every version that a release ever wrote."""


def encode(content: Mapping[str, object]) -> str:
    """JSON text that reads back as exactly ``content``.

    Raises:
        NotFiniteError: ``content`` holds NaN or infinity.
        FileFormatError: ``content`` is not JSON, or would read back differently.
    """
    try:
        text = json.dumps(dict(content), allow_nan=False)
        parsed: object = json.loads(text)
        require_shallow(parsed)
    except (TypeError, ValueError, RecursionError) as error:
        kind = NotFiniteError if "Out of range float" in str(error) else FileFormatError
        raise kind(f"the JSON to save: {error}; give dicts, lists, text, finite numbers, bools and None") from error
    if parsed != dict(content):  # tuples and numbers as keys come back as something else
        raise FileFormatError("the JSON to save would come back changed; give lists for tuples, and text as keys")
    return text


def compose(content: str, files: Mapping[str, FileNote], specs: Mapping[str, Spec]) -> bytes:
    """The manifest, with its checksum at the end.

    Raises:
        FileFormatError: it would be larger than a reader takes.
    """
    notes = {file: {"bytes": note.nbytes, "crc32": note.crc32} for file, note in files.items()}
    tensors = {name: {"file": s.file, "dtype": s.code, "shape": s.shape} for name, s in specs.items()}
    parts = {"format": FORMAT, "version": VERSION, "files": notes, "tensors": tensors}
    return seal({**{key: json.dumps(value) for key, value in parts.items()}, "content": content})


def parse_kind(path: Path, raw: bytes) -> dict[str, Any]:
    """The manifest as JSON. Only its format and version are checked.

    Raises:
        FileFormatError: the format or version is another, or the manifest is damaged.
    """
    advice = "give the directory of a save; a replay in files is opened by ReplayBuffer.open"
    return parse_sealed(path, raw, FORMAT, READABLE, advice)


def parse(path: Path, raw: bytes) -> tuple[dict[str, Any], Contents]:
    """The JSON of a manifest, its files and its tensors, checked one by one and against each other.

    Raises:
        FileFormatError: the manifest is foreign, of another version, or damaged.
    """
    manifest = parse_kind(path, raw)
    try:
        if set(manifest) != {"format", "version", "files", "tensors", "content", "checksum"}:
            raise ValueError(f"the keys {shown(list(manifest))}")
        files = {file: _file_note(file, note) for file, note in _object(manifest["files"]).items()}
        specs = {name: _spec(name, note) for name, note in _object(manifest["tensors"]).items()}
        groups = by_file(specs)
        # each file has a tensor and each tensor a file, so that nothing is read that was not checked
        if set(groups) != set(files):
            raise ValueError("tensors in files that it does not list, or files without tensors")
        for file, group in groups.items():
            # the size follows from the tensors, so nothing in a file can lie outside of them
            size = len(header(group)) + sum(spec.nbytes for spec in group.values())
            if files[file].nbytes != size:
                raise ValueError(f"{files[file].nbytes} bytes for {file}, whose tensors take {size}")
        content = _object(manifest["content"])
        require_shallow(content)
        return content, Contents(files, specs)
    except (ValueError, RecursionError) as error:
        raise damaged(path, "a consistent manifest", error) from error


def _object(value: object) -> dict[str, Any]:
    if not is_object(value):
        raise ValueError(f"{shown(value)} where an object belongs")
    return value


def _file_note(file: str, value: object) -> FileNote:
    note = _object(value)
    size, crc = note.get("bytes"), note.get("crc32")
    named = set(note) == {"bytes", "crc32"} and OWN_NAME.fullmatch(file) and file.startswith("data-")
    # type(), not isinstance: True is no size
    if named and type(size) is int and isinstance(crc, str) and re.fullmatch("[0-9a-f]{8}", crc):
        return FileNote(size, crc)
    raise ValueError(f"{shown(note)} on a file named {shown(file)}")


def _spec(name: str, value: object) -> Spec:
    note = _object(value)
    file, code, shape = note.get("file"), note.get("dtype"), note.get("shape")
    if set(note) == {"file", "dtype", "shape"} and isinstance(file, str) and isinstance(code, str) and code in _DTYPES:
        sizes: list[Any] = shape if is_list(shape) else [None]
        plain = len(sizes) <= AXES and all(type(size) is int and 0 <= size <= _MAX_BYTES for size in sizes)
        # max(size, 1): the other axes of an empty tensor must not overflow either
        if plain and math.prod(max(size, 1) for size in sizes) * _DTYPES[code].itemsize <= _MAX_BYTES:
            return Spec(code, tuple(sizes), file)
    raise ValueError(f"{shown(note)} on a tensor named {shown(name)}")


# -- JSON with a checksum -------------------------------------------------------------------------------------

MOST_BYTES = 1 << 26
"""The largest manifest. Larger content belongs in a tensor."""


STRUCTURE = {b"{": 2**16, b"[": 2**20, b",": 2**22}
"""How often each character may occur. Parsed JSON takes up to a hundred times the memory of its text."""


DEPTH = 100
"""The deepest nesting of objects and lists."""


_TAIL = re.compile(rb',\n"checksum": "([0-9a-f]{8})"\n}\n\Z')


TAIL_BYTES = len(',\n"checksum": "01234567"\n}\n')


def seal(parts: Mapping[str, str]) -> bytes:
    """The JSON object with these members, each given as JSON text, and its checksum as the last one.

    Raises:
        FileFormatError: the result would be larger than a reader takes.
    """
    lines = [f'"{key}": {value}' for key, value in parts.items()]
    body = ("{\n" + ",\n".join(lines)).encode()
    # the checksum is of all bytes before its own line; `_TAIL` finds that line, which has a fixed length
    sealed = body + b',\n"checksum": "%08x"\n}\n' % zlib.crc32(body)
    if over := excess(sealed):
        raise FileFormatError(
            f"the JSON to save: expected a manifest of {over[0]}, got {over[1]}; put long lists into a tensor"
        )
    return sealed


def parse_sealed(path: Path, raw: bytes, name: str, versions: Sequence[int], advice: str) -> dict[str, Any]:
    """The object whose member "format" is ``name`` and whose "version" is one of ``versions``.

    Raises:
        FileFormatError: the format or version is another, or the text is damaged.
    """
    _require_own(path, raw)
    try:
        parsed: object = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        raise damaged(path, "the JSON of a save", f"something else ({error})") from error
    manifest = parsed if is_object(parsed) else {}
    if (got := manifest.get("format")) != name:
        raise FileFormatError(f"'{path}': expected the format {name!r}, got {shown(got)}; {advice}")
    version = manifest.get("version")
    if type(version) is not int or version not in versions:
        raise FileFormatError(
            f"'{path}': expected version {' or '.join(map(str, versions))}, got {shown(version)}; use the release "
            "of relive that wrote it"
        )
    return manifest


def _require_own(path: Path, raw: bytes) -> None:
    """Check, before parsing, the checksum and the limits on the time and memory that parsing takes.

    Raises:
        FileFormatError: the file is foreign or damaged.
    """
    # the checksum first: a reader parses only bytes that relive wrote, or that somebody forged with care
    tail = _TAIL.search(raw[-TAIL_BYTES:])
    if tail is None or int(tail[1], 16) != zlib.crc32(raw[: len(raw) - len(tail[0])]):
        raise damaged(path, "a save's manifest, which ends with the CRC-32 of all before it", "another file or ending")
    if over := excess(raw):
        raise damaged(path, *over)


def excess(raw: bytes) -> tuple[str, int] | None:
    """The limit on JSON that ``raw`` exceeds, and the count that it has; None if it keeps all limits."""
    counts = {f"at most {most} times {mark.decode()!r}": (raw.count(mark), most) for mark, most in STRUCTURE.items()}
    counts[f"at most {MOST_BYTES} bytes"] = len(raw), MOST_BYTES
    return next(((rule, count) for rule, (count, most) in counts.items() if count > most), None)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice in one object")
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is not finite")
    return value


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """True for an object of JSON."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """True for a list of JSON."""
    return isinstance(value, list)


def require_shallow(content: Any) -> None:
    """Refuse JSON, as it was parsed, that is nested too deep for common parsers.

    Raises:
        ValueError: the nesting is deeper than ``DEPTH``.
    """
    level = [content]
    for _ in range(DEPTH):
        # the classes of json, without a call for each value
        inner = (x.values() if x.__class__ is dict else x for x in level if x.__class__ is dict or x.__class__ is list)
        level = [*chain.from_iterable(inner)]
        if not level:
            return
    raise ValueError(f"objects and lists nested more than {DEPTH} deep")


def damaged(path: Path, expected: str, got: object) -> FileFormatError:
    """The error for a save that changed after it was written."""
    return FileFormatError(
        f"'{path}': expected {expected}, got {got}; it was altered or damaged since it was saved: "
        "restore it from a copy, or save again in another directory"
    )
