"""Saves: what was saved comes back bit for bit, or a clear error does; and no instant of dying loses anything."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from attacks.machine import AFTERMATHS, Died, Machine
from relive import files as persist
from relive.errors import (
    DTypeError,
    FieldError,
    FileFormatError,
    NoSaveError,
    NotFiniteError,
    ReliveError,
    ShapeError,
)
from relive.files import disk, format, tensors

DTYPES = [getattr(torch, name) for name in format._NAMES.values() if hasattr(torch, name)]
Tensors = Mapping[str, Any]
Tried = Callable[..., None]


@pytest.fixture(autouse=True)
def quick_and_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk, and limits so small that little data has many chunks and several files."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(tensors, "CHUNK", 64)
    monkeypatch.setattr(format, "FILE_BYTES", 256)


def bits(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    flat = value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def dtype_of(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert dtype_of(found[name]) == dtype_of(value), name
        assert tuple(found[name].shape) == tuple(value.shape), name
        assert bits(found[name]) == bits(value), name


def example(k: int = 0) -> dict[str, torch.Tensor]:
    """Tensors in which every value tells ``k``; they take several files."""
    return {
        "rows": torch.full((40, 3), k, dtype=torch.int64),
        "flags": torch.full((5,), bool(k % 2)),
        "turned": torch.full((7, 11), k, dtype=torch.float32).T,
        "bytes": torch.full((300,), k, dtype=torch.uint8),
        "none": torch.zeros(0, 3, dtype=torch.bfloat16),
        "one": torch.tensor(k, dtype=torch.int16),
    }


def save(path: Path, k: int = 0) -> Path:
    persist.write(path, example(k), {"k": k, "note": "on k"})
    return path


def holds(path: Path) -> int:
    """Which example is saved there, after looking at every bit of it."""
    found, content = persist.read(path)
    assert_same(found, example(content["k"]))
    return content["k"]


def listing(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in sorted(os.listdir(path))}


# Round trips

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@st.composite
def any_tensor(draw: st.DrawFn) -> Any:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    generator = np.random.default_rng(draw(st.integers(0, 99)))
    raw = generator.integers(0, 2 if dtype is torch.bool else 256, math.prod(shape) * dtype.itemsize, np.uint8)
    whole = torch.from_numpy(raw).view(dtype) if raw.size else torch.empty(0, dtype=dtype)
    tensor = whole.reshape(shape)
    return draw(st.sampled_from(WAYS))(tensor)


def as_array(tensor: torch.Tensor) -> Any:
    try:
        array = tensor.resolve_conj().numpy()
    except TypeError:  # bfloat16 and float8
        return tensor
    array = array[::-2] if array.ndim else array
    array.flags.writeable = False
    return array


WAYS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x,
    lambda x: x.transpose(0, -1) if x.ndim else x,
    lambda x: x[::2] if x.ndim else x,
    lambda x: x.flatten()[1::2][:1],  # contiguous, with a stride of 2
    lambda x: x.expand(3, *x.shape),
    lambda x: x.conj() if x.is_complex() else x,
    lambda x: x.clone().requires_grad_() if x.dtype in (torch.float32, torch.float64) else x,
    as_array,
]


@given(values=st.dictionaries(NAMES, any_tensor(), max_size=5), content=st.dictionaries(st.text(), JSON, max_size=3))
def test_what_is_saved_comes_back_bit_for_bit(values: Tensors, content: dict[str, Any], tmp_path_factory: Any):
    path = tmp_path_factory.mktemp("saves") / "save"
    persist.write(path, values, content)
    found, told = persist.read(path)
    assert_same(found, values)
    assert told == content
    assert json.dumps(told) == json.dumps(content)


@given(values=st.dictionaries(NAMES, any_tensor(), max_size=4), data=st.data())
def test_tensors_are_read_into_given_ones_of_any_strides(values: Tensors, data: st.DataObject, tmp_path_factory: Any):
    path = tmp_path_factory.mktemp("saves") / "save"
    persist.write(path, values, {})
    with persist.Save(path) as opened:
        into = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in opened.specs.items()}
        for name, given_one in into.items():
            if data.draw(st.booleans()) and given_one.ndim > 1:
                turned = torch.empty(given_one.shape[::-1], dtype=given_one.dtype)
                into[name] = turned.permute(*reversed(range(turned.ndim)))
        found = opened.read(into)
    assert all(found[name] is into[name] for name in into)
    assert_same(found, values)


# Some dtypes of the format the library itself cannot read into torch.
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d in safetensors.torch._TYPES.values()], ids=str)
def test_the_safetensors_library_reads_every_data_file(dtype: torch.dtype, tmp_path: Path):
    raw = torch.arange(24 * dtype.itemsize).remainder(2).to(torch.uint8)
    values = {"x": raw.view(dtype).reshape(2, 3, 4), "empty": torch.empty(0, 2, dtype=dtype), "\u4e16\n\U0001f600": raw}
    persist.write(tmp_path / "save", values, {})
    found: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "save").glob("*.safetensors"):
        found |= safetensors.torch.load_file(file)
    assert_same(found, values)


def test_lazily_conjugated_and_negated_tensors_are_saved_and_read_into_as_their_values(tmp_path: Path):
    value = torch.tensor([1 + 2j, 3 - 4j] * 20, dtype=torch.complex64)
    values = {"conjugate": value.conj(), "negative": value.conj().imag, "plain": value[:1].conj().imag}
    persist.write(tmp_path / "save", values, {})
    found, _ = persist.read(tmp_path / "save", {"conjugate": torch.zeros_like(value).conj()})
    assert torch.equal(found["conjugate"], torch.tensor([1 - 2j, 3 + 4j] * 20, dtype=torch.complex64))
    assert torch.equal(found["negative"], torch.tensor([-2.0, 4.0] * 20))
    assert torch.equal(found["plain"], torch.tensor([-2.0]))


def test_each_tensor_lies_aligned_to_its_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(format, "FILE_BYTES", 1 << 20)
    values = {str(dtype): torch.zeros(3).to(dtype) for dtype in (torch.bool, torch.float64, torch.int16, torch.int32)}
    persist.write(tmp_path / "save", values, {})
    (file,) = (tmp_path / "save").glob("*.safetensors")
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        assert (8 + length + entry["data_offsets"][0]) % values[name].element_size() == 0


def test_large_data_is_split_into_files_and_copied_in_chunks_only():
    value = torch.arange(64 * 9 * 5, dtype=torch.int32).reshape(9, 5, 64).transpose(0, 2)
    parts = list(tensors.pieces(value))
    assert max(map(len, parts)) <= tensors.CHUNK
    assert b"".join(parts) == bits(value)
    one = torch.arange(1000)
    address = one.data_ptr()
    for part in tensors.pieces(one):  # of plain memory nothing is copied at all
        assert np.frombuffer(part, np.uint8).ctypes.data == address
        address += len(part)
    specs = format.plan({str(k): torch.zeros(100) for k in range(5)}, "0" * 16)
    assert len(format.by_file(specs)) == 5


def test_a_save_takes_the_place_of_the_former_and_leaves_nothing_behind(tmp_path: Path):
    path = save(tmp_path / "runs" / "deep" / "save", 1)
    (path / "notes.txt").write_text("mine")
    before = set(os.listdir(path))
    save(path, 2)
    assert holds(path) == 2
    assert (path / "notes.txt").read_text() == "mine"
    assert len(os.listdir(path)) == len(before)
    assert set(os.listdir(path)) & before == {"manifest.json", "notes.txt"}


def test_loading_twice_gives_the_same(tmp_path: Path):
    save(tmp_path / "save", 5)
    assert holds(tmp_path / "save") == holds(tmp_path / "save") == 5
    with persist.Save(tmp_path / "save") as opened:
        assert_same(opened.read(), opened.read())


def test_an_opened_save_is_read_to_its_end_though_another_takes_its_place(tmp_path: Path):
    with persist.Save(save(tmp_path / "save", 1)) as opened:
        save(tmp_path / "save", 2)
        assert_same(opened.read(), example(1))
    assert holds(tmp_path / "save") == 2


def test_a_save_replaced_while_it_is_being_opened_is_opened_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path / "save", 1)
    genuine, writes = disk.open_file, iter([2, 3])

    def slow(path: Path) -> Any:
        if path.name != "manifest.json" and (k := next(writes, None)):
            with monkeypatch.context() as patch:
                patch.setattr(disk, "open_file", genuine)
                save(tmp_path / "save", k)
        return genuine(path)

    monkeypatch.setattr(disk, "open_file", slow)
    assert holds(tmp_path / "save") == 3


def test_readers_and_writers_at_once_see_whole_saves_only(tmp_path: Path):
    path, seen, stop = save(tmp_path / "save"), set[int](), threading.Event()

    def write_some(first: int) -> None:
        for k in range(first, 50, 2):
            save(path, k)

    def read_on() -> None:
        while not stop.is_set():
            seen.add(holds(path))

    failures: list[Any] = []
    hook, threading.excepthook = threading.excepthook, failures.append
    try:
        writers = [threading.Thread(target=write_some, args=(first,)) for first in (1, 2)]
        reader = threading.Thread(target=read_on)
        for thread in (reader, *writers):
            thread.start()
        for thread in writers:
            thread.join()
        stop.set()
        reader.join()
    finally:
        threading.excepthook = hook
    assert not failures
    assert holds(path) in (48, 49)
    assert len(os.listdir(path)) == 1 + len(list(path.glob("data-*")))


# What cannot be saved

BAD_TENSORS = [
    ({"x": torch.zeros(2, dtype=torch.complex128)}, DTypeError, "'x'.*complex128.*view"),
    ({"x": np.zeros(2, "f4,i2")}, DTypeError, "'x'.*view its bytes"),
    ({"x": np.array(["a"])}, DTypeError, "'x'"),
    ({"x": np.array([object()])}, DTypeError, "'x'"),
    ({"x": np.zeros(2, ">f4")}, DTypeError, "'x'"),
    ({"x": torch.zeros(2).to_sparse()}, DTypeError, "dense"),
    ({"x": torch.zeros(2, device="meta")}, DTypeError, "meta"),
    ({"__metadata__": torch.zeros(2)}, FieldError, "rename"),
    ({"\ud800": torch.zeros(2)}, FieldError, "rename"),
    ({3: torch.zeros(2)}, FieldError, "tensor 3"),
]
BAD_CONTENT = [
    ({"x": math.nan}, NotFiniteError, "finite"),
    ({"x": [1.0, {"y": -math.inf}]}, NotFiniteError, "finite"),
    ({"x": (1, 2)}, FileFormatError, "lists for tuples"),
    ({1: 2}, FileFormatError, "text as keys"),
    ({"x": {1, 2}}, FileFormatError, "set"),
    ({"x": np.int64(3)}, FileFormatError, "int64"),
    ({"x": 10**5000}, FileFormatError, "digits"),
]


@pytest.mark.parametrize(("values", "kind", "words"), BAD_TENSORS)
def test_a_tensor_that_the_format_lacks_is_refused_before_anything_is_touched(
    values: Any, kind: type[ReliveError], words: str, tmp_path: Path
):
    with pytest.raises(kind, match=words):
        persist.write(tmp_path / "save", {"good": torch.zeros(3), **values}, {})
    assert not (tmp_path / "save").exists()


@pytest.mark.parametrize(("content", "kind", "words"), BAD_CONTENT)
def test_json_that_would_not_come_back_as_it_is_is_refused_before_anything_is_touched(
    content: Any, kind: type[ReliveError], words: str, tmp_path: Path
):
    with pytest.raises(kind, match=words):
        persist.write(tmp_path / "save", {}, content)
    assert not (tmp_path / "save").exists()


def test_json_that_never_ends_or_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    endless: dict[str, Any] = {}
    endless["x"] = endless
    with pytest.raises(FileFormatError, match="Circular"):
        persist.write(tmp_path / "save", {}, endless)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(FileFormatError, match="recursion"):
        persist.write(tmp_path / "save", {}, {"x": deep})
    save(tmp_path / "save", 1)
    before = listing(tmp_path / "save")
    monkeypatch.setattr(format, "MANIFEST_BYTES", 1000)
    with pytest.raises(FileFormatError, match="put long lists into a tensor"):
        persist.write(tmp_path / "save", example(2), {"x": "x" * 1000})
    assert listing(tmp_path / "save") == before


@pytest.mark.parametrize("name", ["thesis.tex", ".git", "data-.safetensors", "model.safetensors"])
def test_a_directory_with_foreign_files_is_not_written_to(name: str, tmp_path: Path):
    (tmp_path / name).write_text("years of work")
    with pytest.raises(FileFormatError, match=re.escape(f"'{name}'")):
        persist.write(tmp_path, example(), {})
    assert listing(tmp_path) == {name: b"years of work"}


@pytest.mark.parametrize(
    "manifest", [b"", b"{}", b'{"format": "web app"}', b'{"format": "relive arrays", "version": 3}']
)
def test_a_directory_with_a_foreign_newer_or_damaged_manifest_is_not_written_to(manifest: bytes, tmp_path: Path):
    (tmp_path / "manifest.json").write_bytes(manifest)
    with pytest.raises(FileFormatError, match=r"manifest\.json"):
        persist.write(tmp_path, example(), {})
    assert listing(tmp_path) == {"manifest.json": manifest}


def test_a_file_is_not_overwritten_by_a_save(tmp_path: Path):
    (tmp_path / "model.pt").write_text("years of work")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    for name in ("model.pt", "nowhere"):
        with pytest.raises(FileFormatError, match="expected a directory or nothing"):
            persist.write(tmp_path / name, example(), {})
    assert (tmp_path / "model.pt").read_text() == "years of work"


def test_the_directory_itself_may_be_a_link(tmp_path: Path):
    save(tmp_path / "there", 1)
    (tmp_path / "here").symlink_to(tmp_path / "there")
    save(tmp_path / "here", 2)
    assert holds(tmp_path / "here") == holds(tmp_path / "there") == 2


# What is refused when read


def seal(document: dict[str, Any]) -> bytes:
    """A manifest that says this, with the right checksum: what a forger would write."""
    body = json.dumps({key: value for key, value in document.items() if key != "checksum"}).encode()
    return seal_text(body)


def seal_text(body: bytes) -> bytes:
    assert body.endswith(b"}")
    body = body[:-1]
    return body + f',\n"checksum": "{zlib.crc32(body):08x}"\n}}\n'.encode()


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((path / "manifest.json").read_text())
    change(document)
    (path / "manifest.json").write_bytes(seal(document))


def assert_refused(path: Path, words: str | None = None) -> FileFormatError:
    with pytest.raises(FileFormatError, match=words) as caught:
        persist.read(path)
    assert str(path) in str(caught.value)
    return caught.value


def test_the_manifest_of_the_document_is_the_manifest_written(tmp_path: Path):
    save(tmp_path / "save", 3)
    forge(tmp_path / "save", lambda m: None)
    assert holds(tmp_path / "save") == 3


def first(mapping: dict[str, Any]) -> Any:
    return next(iter(mapping.values()))


def rename_file(m: dict[str, Any], name: str) -> None:
    old = next(iter(m["files"]))
    m["files"] = {name if file == old else file: note for file, note in m["files"].items()}
    for note in m["tensors"].values():
        note["file"] = name if note["file"] == old else note["file"]


def swap(m: dict[str, Any], one: str, other: str) -> None:
    t = m["tensors"]
    t[one], t[other] = t[other], t[one]


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another format": lambda m: m.update(format="zip"),
    "no format": lambda m: m.pop("format"),
    "a newer version": lambda m: m.update(version=3),
    "an older version": lambda m: m.update(version=0),
    "a version that is true": lambda m: m.update(version=True),
    "a version in quotes": lambda m: m.update(version="1"),
    "a missing part": lambda m: m.pop("files"),
    "missing content": lambda m: m.pop("content"),
    "a further part": lambda m: m.update(code="import os"),
    "content that is a list": lambda m: m.update(content=[]),
    "files that are a list": lambda m: m.update(files=[]),
    "tensors that are a number": lambda m: m.update(tensors=3),
    "an absolute path": lambda m: rename_file(m, "/etc/passwd"),
    "a path upwards": lambda m: rename_file(m, "../data-0123456789abcdef-00000.safetensors"),
    "a path downwards": lambda m: rename_file(m, "x/data-0123456789abcdef-00000.safetensors"),
    "the manifest as data": lambda m: rename_file(m, "manifest.json"),
    "another manifest as data": lambda m: rename_file(m, "manifest-0123456789abcdef.tmp"),
    "a line break after the name": lambda m: rename_file(m, "data-0123456789abcdef-00000.safetensors\n"),
    "a file that is missing": lambda m: rename_file(m, "data-0123456789abcdef-00000.safetensors"),
    "a file that is not listed": lambda m: m["files"].popitem(),
    "a file without tensors": lambda m: m["files"].update(
        {"data-0123456789abcdef-00000.safetensors": first(m["files"])}
    ),
    "a file without a note": lambda m: m["files"].update({next(iter(m["files"])): None}),
    "a larger file": lambda m: first(m["files"]).update(bytes=10**6),
    "a negative size": lambda m: first(m["files"]).update(bytes=-1),
    "a fractional size": lambda m: first(m["files"]).update(bytes=2.5),
    "a boundless size": lambda m: first(m["files"]).update(bytes=10**30),
    "another checksum": lambda m: first(m["files"]).update(crc32="00000000"),
    "a checksum that is none": lambda m: first(m["files"]).update(crc32="0x123456"),
    "a checksum that is a number": lambda m: first(m["files"]).update(crc32=12345678),
    "a further note on a file": lambda m: first(m["files"]).update(run="x"),
    "an unknown dtype": lambda m: first(m["tensors"]).update(dtype="OBJECT"),
    "a dtype that is a list": lambda m: first(m["tensors"]).update(dtype=["F32"]),
    "another dtype of the same size": lambda m: m["tensors"]["rows"].update(dtype="F64"),
    "a dtype of half the size": lambda m: m["tensors"]["rows"].update(dtype="F32"),
    "another shape of the same size": lambda m: m["tensors"]["rows"].update(shape=[3, 40]),
    "a flat shape": lambda m: m["tensors"]["rows"].update(shape=[120]),
    "a larger shape": lambda m: m["tensors"]["rows"].update(shape=[41, 3]),
    "a negative shape": lambda m: m["tensors"]["rows"].update(shape=[-40, -3]),
    "a fractional shape": lambda m: m["tensors"]["rows"].update(shape=[40.0, 3]),
    "a shape of truths": lambda m: m["tensors"]["one"].update(shape=[True]),
    "a shape that is a number": lambda m: m["tensors"]["one"].update(shape=1),
    "a boundless shape": lambda m: m["tensors"]["rows"].update(shape=[2**62, 2**62]),
    "a boundless empty shape": lambda m: m["tensors"]["none"].update(shape=[0, 2**62, 2**62]),
    "a shape of many axes": lambda m: m["tensors"]["one"].update(shape=[1] * 65),
    "another empty shape": lambda m: m["tensors"]["none"].update(shape=[0, 4]),
    "a tensor without a note": lambda m: m["tensors"].update(rows=[]),
    "a tensor in another file": lambda m: m["tensors"]["rows"].update(file=m["tensors"]["bytes"]["file"]),
    "a tensor in a file that is a number": lambda m: m["tensors"]["rows"].update(file=0),
    "a tensor that is missing": lambda m: m["tensors"].pop("flags"),
    "a further tensor": lambda m: m["tensors"].update(more=m["tensors"]["none"]),
    "a renamed tensor": lambda m: m["tensors"].update(sgalf=m["tensors"].pop("flags")),
    "a further note on a tensor": lambda m: first(m["tensors"]).update(run="x"),
    "two names exchanged": lambda m: swap(m, "turned", "flags"),
}


@pytest.mark.parametrize("case", FORGERIES)
def test_a_forged_manifest_with_a_right_checksum_is_refused(case: str, tmp_path: Path):
    forge(save(tmp_path / "save", 1), FORGERIES[case])
    assert_refused(tmp_path / "save")
    if case != "another checksum":
        with pytest.raises(FileFormatError):
            persist.read(tmp_path / "save", verify=False)


GARBAGE = {
    "nothing": b"",
    "zeros": bytes(1000),
    "noise": np.random.default_rng(0).bytes(1000),
    "text": b"hello",
    "a list": b"[]",
    "a number": b"1",
    "null": b"null",
    "half a letter": '{"format": "é'.encode()[:-1],
    "a byte order mark": b'\xef\xbb\xbf{"format": "relive arrays"}',
    "UTF-16": '{"format": "relive arrays"}'.encode("utf-16"),
    "endless nesting": b'{"format":' + b"[" * 1_000_000,
    "a number of a million digits": b'{"format": ' + b"9" * 1_000_000 + b"}",
    "HTML": b"<!doctype html><title>manifest</title>",
}


@pytest.mark.parametrize("case", GARBAGE)
def test_a_manifest_of_garbage_is_refused(case: str, tmp_path: Path):
    save(tmp_path / "save")
    (tmp_path / "save" / "manifest.json").write_bytes(GARBAGE[case])
    assert_refused(tmp_path / "save", "manifest.json")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"k": 1', '"k": NaN', "NaN"),
        ('"k": 1', '"k": -Infinity', "Infinity"),
        ('"k": 1', '"k": 1e999', "not finite"),
        ('"k": 1', '"k": 1, "k": 2', "twice"),
        ('"version": 2', '"version": 2, "version": 2', "twice"),
        ('"one": {', '"rows": {', "twice"),
        ('"crc32"', '"bytes"', "twice"),
    ],
)
def test_json_that_is_ambiguous_or_not_finite_is_refused(old: str, new: str, words: str, tmp_path: Path):
    manifest = save(tmp_path / "save", 1) / "manifest.json"
    body = manifest.read_text().replace(old, new, 1)
    body = body[: body.index(',\n"checksum"')] + "}"
    manifest.write_bytes(seal_text(body.encode()))
    assert_refused(tmp_path / "save", words)


def forged(path: Path, body: bytes) -> Path:
    """A manifest of any text, with the checksum of that."""
    path.mkdir()
    (path / "manifest.json").write_bytes(body + b',\n"checksum": "%08x"\n}\n' % zlib.crc32(body))
    return path


def test_nothing_is_parsed_before_its_checksum_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "save") / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"on k", b"on j"))
    monkeypatch.setattr(format, "_unique", None)
    with pytest.raises(FileFormatError, match="CRC-32"):
        persist.read(path.parent)
    with pytest.raises(FileFormatError, match="CRC-32"):
        save(path.parent)


@pytest.mark.parametrize("many", [b"{}", b"[]", b"0"])
def test_a_manifest_of_very_many_parts_is_refused_before_it_is_parsed(
    many: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = forged(tmp_path / "save", b'{"content": [' + b",".join([many] * (2**22 + 2)) + b"]")
    monkeypatch.setattr(format.json, "loads", None)
    with pytest.raises(FileFormatError, match="at most"):
        persist.read(path)


def test_a_manifest_of_as_many_parts_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"at most 65536 times '{'"):
        persist.write(tmp_path / "save", {}, {"x": [{}] * 2**16})
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(FileFormatError, match="100 deep"):
        persist.write(tmp_path / "save", {}, {"x": deep})
    with pytest.raises(FieldError, match="at most 32 axes"):
        persist.write(tmp_path / "save", {"x": torch.zeros([1] * 33)}, {})


@pytest.mark.parametrize("depth", [98, 500, 5000, 200_000])
def test_deeply_nested_json_is_refused_and_crashes_nothing(depth: int, tmp_path: Path) -> None:
    parts = b'{"format": "relive arrays", "version": 1, "files": {}, "tensors": {}, "content": {"x": '
    path = forged(tmp_path / "save", parts + b"[" * depth + b"]" * depth + b"}")
    if depth == 98:
        assert persist.read(path)[0] == {}
    else:
        with pytest.raises(FileFormatError):
            persist.read(path)


def test_bools_other_than_0_and_1_are_refused(tmp_path: Path) -> None:
    flags = torch.tensor([0, 1, 2], dtype=torch.uint8).view(torch.bool)
    persist.write(tmp_path / "save", {"flags": flags}, {})
    with pytest.raises(FileFormatError, match="bools of 0 and 1"):
        persist.read(tmp_path / "save")


def test_an_oversize_manifest_is_refused_unread(tmp_path: Path):
    os.truncate(save(tmp_path / "save") / "manifest.json", format.MANIFEST_BYTES + 1)
    assert_refused(tmp_path / "save", "at most")


def test_there_being_no_save_is_told_apart_from_a_bad_one(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "x").touch()
    for name in ("missing", "empty", "foreign"):
        error = assert_refused(tmp_path / name, "no save was ever completed")
        assert isinstance(error, NoSaveError)
        assert isinstance(error, FileNotFoundError)
    (tmp_path / "file").touch()
    assert not isinstance(assert_refused(tmp_path / "file", "expected the directory"), NoSaveError)


def data_files(path: Path) -> list[Path]:
    return sorted(path.glob("data-*.safetensors"))


@pytest.mark.parametrize("number", range(3))
def test_a_missing_piece_is_refused(number: int, tmp_path: Path):
    file = data_files(save(tmp_path / "save"))[number]
    file.unlink()
    error = assert_refused(tmp_path / "save", "nothing")
    assert file.name in str(error)
    assert not isinstance(error, NoSaveError)


def test_bytes_that_no_tensor_has_are_refused_though_size_and_checksum_are_right(tmp_path: Path):
    file = data_files(save(tmp_path / "save"))[0]
    file.write_bytes(file.read_bytes() + b"MZ and more")
    note = {"bytes": file.stat().st_size, "crc32": f"{zlib.crc32(file.read_bytes()):08x}"}
    forge(tmp_path / "save", lambda m: m["files"].update({file.name: note}))
    assert_refused(tmp_path / "save", "whose tensors take")


def test_a_file_of_another_save_is_refused(tmp_path: Path):
    """The half-finished save of other libraries: new rows, old cursor."""
    mine, other = data_files(save(tmp_path / "mine", 1)), data_files(save(tmp_path / "other", 2))
    for file, its in zip(mine, other, strict=True):
        genuine = file.read_bytes()
        file.write_bytes(its.read_bytes())
        assert_refused(tmp_path / "mine", "CRC-32")
        file.write_bytes(genuine)
    assert holds(tmp_path / "mine") == 1


def test_a_link_a_pipe_or_a_directory_in_place_of_a_file_is_refused(tmp_path: Path):
    for number, name in enumerate(["manifest.json", "data"]):
        for kind in ("link", "pipe", "directory"):
            path = save(tmp_path / f"{kind}{number}")
            file = path / name if number == 0 else data_files(path)[0]
            file.rename(tmp_path / "aside")
            if kind == "link":
                file.symlink_to(tmp_path / "aside")
            elif kind == "pipe":
                os.mkfifo(file)
            else:
                file.mkdir()
            assert_refused(path, "regular file")


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("place", ["the directory", "the manifest", "a data file"])
@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_a_hostile_pickle_is_refused_and_never_run(place: str, kind: str, tmp_path: Path):
    marker = tmp_path / "boom"
    target = tmp_path / "save"
    if place != "the directory":
        save(target)
        target = target / "manifest.json" if place == "the manifest" else data_files(target)[0]
    if kind == "torch":
        torch.save({"x": Bomb(marker)}, target)
    else:
        target.write_bytes(pickle.dumps(Bomb(marker)))
    assert_refused(tmp_path / "save")
    assert not marker.exists()
    pickle.loads(pickle.dumps(Bomb(marker)))
    assert marker.exists(), "the bomb is real"


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="needs sockets that are files")
@pytest.mark.parametrize("place", ["manifest.json", "data"])
@pytest.mark.parametrize("kind", ["socket", "circle", "hole"])
def test_a_socket_a_circle_of_links_or_a_file_of_holes_is_refused(
    kind: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "save")
    name = place if place == "manifest.json" else data_files(path)[0].name
    monkeypatch.chdir(path)  # a socket's path has to be short
    (path / name).rename(tmp_path / "aside")
    if kind == "socket":
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(name))
        server.close()
    elif kind == "circle":
        (path / name).symlink_to(name)
    else:
        with (path / name).open("wb") as file:
            file.truncate(2**26 if place == "manifest.json" else 2**40)
    with pytest.raises(FileFormatError):
        persist.read(path)
    if place == "manifest.json":
        with pytest.raises(FileFormatError):
            save(path)


def test_a_path_that_leads_in_a_circle_or_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "circle", tmp_path / "circle" / "save", tmp_path / "file" / "save", tmp_path / "a\0b"):
        with pytest.raises(FileFormatError):
            save(path)
        with pytest.raises(FileFormatError):
            persist.read(path)


def test_tensors_larger_than_memory_are_refused_before_any_is_taken(tmp_path: Path) -> None:
    path = save(tmp_path / "save")
    with pytest.raises(FileFormatError, match=r"its tensors take [\d,]+ bytes of memory, and 1,000 are free"):
        persist.read(path, most=1000)
    assert persist.read(path, most=10_000)[1]["k"] == 0


def test_what_comes_in_parts_is_saved_as_one_and_may_change_once_it_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, order = np.arange(300, dtype=np.int32).reshape(100, 3), list[str]()
    parts = persist.Streamed((100, 3), rows.dtype, lambda: (rows[low : low + 7] for low in range(0, 100, 7)))
    monkeypatch.setattr(os, "fsync", lambda descriptor: order.append("synced"))

    def taken() -> None:
        order.append("taken")
        rows.fill(-1)

    persist.write(tmp_path / "save", {"rows": parts, "more": np.zeros(500)}, {}, taken=taken)
    found = persist.read(tmp_path / "save")[0]["rows"].numpy()
    assert found.tolist() == np.arange(300).reshape(100, 3).tolist()
    assert order.index("taken") < len(order) - 3  # before the wait for the last file
    assert parts.whole().tolist() == rows.tolist()


def test_what_is_read_into_is_checked_before_anything_is_overwritten(tmp_path: Path):
    path, good = save(tmp_path / "save", 1), torch.full((40, 3), 7)
    cases: list[tuple[str, torch.Tensor, type[ReliveError]]] = [
        ("rwos", torch.zeros(3), FieldError),
        ("flags", torch.zeros(5), DTypeError),
        ("flags", torch.zeros(6, dtype=torch.bool), ShapeError),
    ]
    for name, tensor, kind in cases:
        with pytest.raises(kind, match=f"'{name}'"):
            persist.read(path, {"rows": good, name: tensor})
    os.truncate(data_files(path)[-1], 10)
    with pytest.raises(FileFormatError, match="bytes"):
        persist.read(path, {"rows": good})
    assert (good == 7).all()


def test_no_descriptor_stays_open_whatever_happens(tmp_path: Path):
    if not Path("/proc/self/fd").exists():
        pytest.skip("no list of open descriptors here")
    before = len(os.listdir("/proc/self/fd"))
    save(tmp_path / "save", 1)
    holds(tmp_path / "save")
    data_files(tmp_path / "save")[-1].unlink()
    assert_refused(tmp_path / "save")
    data_files(tmp_path / "save")[0].unlink()
    (tmp_path / "save" / next(iter(json.loads((tmp_path / "save" / "manifest.json").read_text())["files"]))).mkdir()
    assert_refused(tmp_path / "save", "regular file")
    (tmp_path / "save" / "manifest.json").write_text("{}")
    assert_refused(tmp_path / "save")
    with pytest.raises(FileFormatError):
        save(tmp_path / "save")
    assert len(os.listdir("/proc/self/fd")) == before


# Damage


def test_every_flipped_byte_of_manifest_and_headers_is_noticed_and_so_are_those_of_the_data(
    tmp_path: Path, tried: Tried
):
    path, random = save(tmp_path / "save", 3), np.random.default_rng(0)
    for file in (path / "manifest.json", *data_files(path)):
        genuine = file.read_bytes()
        start = len(genuine) if file.suffix == ".json" else 8 + int.from_bytes(genuine[:8], "little")
        sampled = random.integers(start, len(genuine), 150).tolist() if start < len(genuine) else []
        # the lowest bit makes digits and letters of others, so that it is JSON still
        flips = [(position, 1) for position in range(start)]
        flips += [(position, int(random.integers(2, 256))) for position in [*range(0, start, 3), *sampled]]
        tried("a changed byte in a save", len(flips))
        with file.open("r+b", buffering=0) as stream:  # in place: cutting a file and writing it anew takes far longer
            for position, mask in flips:
                os.pwrite(stream.fileno(), bytes([genuine[position] ^ mask]), position)
                assert_refused(path)
                os.pwrite(stream.fileno(), genuine[position : position + 1], position)
    assert holds(path) == 3


def test_damage_of_several_bytes_is_noticed_and_without_verification_does_no_harm(tmp_path: Path, tried: Tried):
    path, random = save(tmp_path / "save", 3), np.random.default_rng(1)
    layout = {name: (tensor.shape, tensor.dtype) for name, tensor in example().items()}
    files = [path / "manifest.json", *data_files(path)]
    tried("several changed bytes in a save", 200)
    for _ in range(200):
        file = files[random.integers(len(files))]
        genuine = file.read_bytes()
        damage = bytearray(genuine)
        start, length = int(random.integers(len(damage))), int(random.integers(1, 40))
        part = slice(start, start + length)
        damage[part] = [damage[part][::-1], bytes(length), random.bytes(length), b""][random.integers(4)]
        file.write_bytes(damage)
        if damage != genuine:
            assert_refused(path)
        with suppress(FileFormatError):
            found, _ = persist.read(path, verify=False)
            assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == layout
        file.write_bytes(genuine)
    assert holds(path) == 3


@pytest.mark.parametrize("number", range(4))
def test_truncation_and_appending_at_any_length_is_noticed(number: int, tmp_path: Path):
    path = save(tmp_path / "save", 3)
    file = (path / "manifest.json", *data_files(path))[number]
    size = file.stat().st_size
    for more in (b"\0", b" ", b"\n", b"}"):
        with file.open("ab") as stream:
            stream.write(more)
        assert_refused(path)
        os.truncate(file, size)
    assert holds(path) == 3
    for length in reversed(range(0, size, 1 if number == 0 else 5)):
        os.truncate(file, length)
        assert_refused(path)


# Dying


def steps(tmp_path: Path, former: bool) -> int:
    """How many calls a save makes that change a disk."""
    path = tmp_path / f"counted{former}"
    if former:
        save(path, 1)
    with Machine(10**9) as machine:
        save(path, 2)
    return machine.count


@pytest.mark.parametrize("aftermath", AFTERMATHS)
@pytest.mark.parametrize("former", [True, False], ids=["over a former save", "the first save"])
def test_dying_before_any_step_leaves_the_old_save_or_the_new(
    former: bool, aftermath: str, tmp_path: Path, tried: Tried
):
    count, outcomes = steps(tmp_path, former), list[int]()
    assert count > 20
    for step in range(1, count + 2):
        path = tmp_path / f"save{step}"
        if former:
            save(path, 1)
        with Machine(step) as machine:
            try:
                save(path, 2)
                finished = True
            except Died:
                finished = False
        tried("a save that dies, or loses power, before one of its calls")
        assert finished == (step == count + 1)
        AFTERMATHS[aftermath](machine, step)
        try:
            outcomes.append(holds(path))
        except NoSaveError:
            assert not former
            outcomes.append(0)
        save(path, 3)  # and what is left does not stand in the way, nor stay
        assert holds(path) == 3
        assert len(os.listdir(path)) == 1 + len(data_files(path))
    assert outcomes[0] == (1 if former else 0)
    assert outcomes[-1] == 2
    assert set(outcomes) == {outcomes[0], 2}


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("fault", [OSError(errno.EIO, "I/O error"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_failure_at_any_step_leaves_a_whole_save_and_no_rubbish(
    fault: BaseException, late: bool, tmp_path: Path, tried: Tried
):
    for former in (True, False):
        for step in range(1, steps(tmp_path, former) + 1):
            path = tmp_path / f"save{former}{step}"
            before = listing(save(path, 1)) if former else None
            fault.__notes__ = []
            tried("a save one of whose calls fails, or is interrupted")
            with Machine(step, fault, late):
                try:
                    save(path, 2)
                    failed, told = False, ""
                except type(fault) as error:
                    failed, told = True, "".join(error.__notes__)
            outcome = holds(path) if (path / "manifest.json").exists() else 0
            assert failed or outcome == 2
            if told:
                assert ("the new save is in place" in told) == (outcome == 2)
                assert ("is unchanged" in told) == (outcome != 2)
            if outcome != 2:
                assert outcome == (1 if former else 0)
                assert (listing(path) if path.exists() else None) in (before, {})
            save(path, 3)
            assert holds(path) == 3
            assert len(os.listdir(path)) == 1 + len(data_files(path))


def test_a_first_save_that_fails_leaves_the_directory_to_the_saver_that_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    path, waits, genuine, lock = tmp_path / "save", threading.Event(), disk.write_file, fcntl.flock
    first = threading.current_thread()

    def write_file(*args: Any) -> Any:
        if threading.current_thread() is first:
            assert waits.wait(10)
            raise OSError("the disk fails")
        return genuine(*args)

    def flock(descriptor: int, how: int) -> None:
        if threading.current_thread() is not first:
            waits.set()  # the directory is open, and about to be removed
        lock(descriptor, how)

    monkeypatch.setattr(disk, "write_file", write_file)
    monkeypatch.setattr(fcntl, "flock", flock)
    second = threading.Thread(target=save, args=(path, 2))

    replaceable = disk.replaceable

    def check(found: Path) -> persist.Contents:
        if not second.ident:  # the first saver has its turn
            second.start()
        return replaceable(found)

    monkeypatch.setattr(disk, "replaceable", check)
    with pytest.raises(OSError, match="the disk fails"):
        save(path, 1)
    second.join()
    assert holds(path) == 2


def test_a_full_disk_is_told_and_leaves_the_old_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = save(tmp_path / "save", 1)
    before, room = listing(path), [500]
    genuine = os.write

    def write(descriptor: int, data: Any) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = genuine(descriptor, data[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space left") as caught:
        save(path, 2)
    assert caught.value.__notes__ == [f"the save into '{path}' failed; the previous save is unchanged"]
    assert listing(path) == before
    room[0] = 500
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "first", 2)
    assert not (tmp_path / "first").exists()
    room[0] = 10**9
    save(path, 2)
    assert holds(path) == 2


def test_a_disk_that_takes_a_few_bytes_at_a_time_gets_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    genuine = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: genuine(descriptor, data[:7]))
    assert holds(save(tmp_path / "save", 4)) == 4


def test_a_file_system_without_locks_or_allocation_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert holds(save(save(tmp_path / "save", 4), 5)) == 5


KILLED = """
import os, random, signal, sys, time
import torch
from relive import files as persist

torch.set_num_threads(1)
path = sys.argv[1]
random.seed(0)

def values(k):
    return {"rows": torch.full((1 << 17,), k), "turned": torch.full((300, 500), k, dtype=torch.float32).T}

persist.write(path, values(0), {"k": 0})
last, progress = 0, []
for _ in range(12):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        k = last
        while True:
            k += 1
            persist.write(path, values(k), {"k": k})
            os.write(write, b"%d " % k)
    os.close(write)
    os.read(read, 4)  # until it has saved once
    time.sleep(random.uniform(0, 0.02))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    told = max(map(int, os.read(read, 1 << 16).split()), default=last)
    os.close(read)
    found, content = persist.read(path)
    k = content["k"]
    assert k >= told, f"save {told} was done, and {k} came back"
    assert all((tensor == k).all() for tensor in found.values()), f"save {k} is torn"
    progress.append(k - last)
    last = k
persist.write(path, values(1), {"k": 1})
assert len(os.listdir(path)) == 2, os.listdir(path)
assert min(progress) > 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_killed_again_and_again_while_it_saves_loses_nothing(tmp_path: Path, tried: Tried):
    tried("a process killed while it saves", 12)
    command = [sys.executable, "-c", KILLED, str(tmp_path / "save")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
