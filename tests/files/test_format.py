"""The format of saves: what it cannot hold, and manifests that are forged, damaged or too long."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relive import files as persist
from relive.errors import (
    DTypeError,
    FieldError,
    FileFormatError,
    NoSaveError,
    NotFiniteError,
    ReliveError,
)
from relive.files import format
from relive.files import format as sealed
from support.effort import in_ci
from support.saves import assert_refused, example, first, forge, holds, listing, save, seal_text

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
    monkeypatch.setattr(sealed, "MOST_BYTES", 1000)
    with pytest.raises(FileFormatError, match="put long lists into a tensor"):
        persist.write(tmp_path / "save", example(2), {"x": "x" * 1000})
    assert listing(tmp_path / "save") == before


def test_the_manifest_of_the_document_is_the_manifest_written(tmp_path: Path):
    save(tmp_path / "save", 3)
    forge(tmp_path / "save", lambda m: None)
    assert holds(tmp_path / "save") == 3


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
    monkeypatch.setattr(sealed, "_unique", None)
    with pytest.raises(FileFormatError, match="CRC-32"):
        persist.read(path.parent)
    with pytest.raises(FileFormatError, match="CRC-32"):
        save(path.parent)


@pytest.mark.parametrize(("many", "count"), [(b"{}", 2**16 + 2), (b"[]", 2**20 + 2), in_ci(b"0", 2**22 + 2)])
def test_a_manifest_of_very_many_parts_is_refused_before_it_is_parsed(
    many: bytes, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = forged(tmp_path / "save", b'{"content": [' + b",".join([many] * count) + b"]")
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
    os.truncate(save(tmp_path / "save") / "manifest.json", sealed.MOST_BYTES + 1)
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
