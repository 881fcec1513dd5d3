"""Saves: what was saved comes back bit for bit, or a clear error does; and no instant of dying loses anything."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relive import files as persist
from relive.errors import (
    FileFormatError,
)
from relive.files import disk, format
from relive.files import format as tensors
from relive.files.save import SaveHandle, Saves, from_json, to_json
from support.effort import often
from support.saves import Tensors, Tried, assert_refused, assert_same, bits, data_files, example, holds, save

DTYPES = [getattr(torch, name) for name in format.NAMES.values() if hasattr(torch, name)]


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


@settings(max_examples=often(6, settings.default.max_examples))
@given(values=st.dictionaries(NAMES, any_tensor(), max_size=5), content=st.dictionaries(st.text(), JSON, max_size=3))
def test_what_is_saved_comes_back_bit_for_bit(values: Tensors, content: dict[str, Any], tmp_path_factory: Any):
    path = tmp_path_factory.mktemp("saves") / "save"
    persist.write(path, values, content)
    found, told = persist.read(path)
    assert_same(found, values)
    assert told == content
    assert json.dumps(told) == json.dumps(content)


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


def test_lazily_conjugated_and_negated_tensors_are_saved_as_their_values(tmp_path: Path):
    value = torch.tensor([1 + 2j, 3 - 4j] * 20, dtype=torch.complex64)
    values = {"conjugate": value.conj(), "negative": value.conj().imag, "plain": value[:1].conj().imag}
    persist.write(tmp_path / "save", values, {})
    found, _ = persist.read(tmp_path / "save")
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
    path, seen, stop, last = save(tmp_path / "save"), set[int](), threading.Event(), often(12, 50)

    def write_some(first: int) -> None:
        for k in range(first, last, 2):
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
    assert holds(path) in (last - 2, last - 1)
    assert len(os.listdir(path)) == 1 + len(list(path.glob("data-*")))


def test_what_comes_in_parts_is_saved_as_one_and_may_change_once_it_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, order = np.arange(300, dtype=np.int32).reshape(100, 3), list[str]()
    parts = persist.Streamed((100, 3), rows.dtype, lambda: (rows[low : low + 7] for low in range(0, 100, 7)))
    monkeypatch.setattr(os, "fsync", lambda descriptor: order.append("synced"))

    def taken() -> None:
        order.append("taken")
        rows.fill(-1)

    tensors = {"rows": parts, "more": np.zeros(500)}
    persist.update(tmp_path / "save", lambda present: persist.NewSave([tensors], {}), on_read=taken)
    found = persist.read(tmp_path / "save")[0]["rows"].numpy()
    assert found.tolist() == np.arange(300).reshape(100, 3).tolist()
    assert order.index("taken") < len(order) - 3  # before the wait for the last file
    assert parts.whole().tolist() == rows.tolist()


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
        sampled = random.integers(start, len(genuine), often(50, 150)).tolist() if start < len(genuine) else []
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


def test_damage_of_several_bytes_is_noticed(tmp_path: Path, tried: Tried):
    path, random = save(tmp_path / "save", 3), np.random.default_rng(1)
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


# Saves in the background: one after another, and an error is raised once, wherever it comes from

SECONDS = 30


def test_an_error_that_comes_while_the_next_save_waits_is_raised_there_and_once() -> None:
    goes_on = threading.Event()

    def fail() -> None:
        assert goes_on.wait(SECONDS)
        raise OSError("the disk is full")

    saves = Saves()
    handle = saves.begin(SaveHandle("somewhere", fail))
    threading.Timer(0.05, goes_on.set).start()
    assert not handle.done
    with pytest.raises(OSError, match="the disk is full") as caught:
        saves.wait()
    assert any("the save before" in note for note in caught.value.__notes__)
    saves.wait()


def test_an_error_that_was_seen_is_not_raised_again() -> None:
    def fail() -> None:
        raise OSError("the disk is full")

    saves = Saves()
    handle = saves.begin(SaveHandle("somewhere", fail))
    with pytest.raises(OSError, match="the disk is full"):
        handle.wait(SECONDS)
    saves.wait()


# Nested values beside a save: each tensor has a name of its own, whatever its keys are


def back(value: Any) -> Any:
    described, tensors = to_json(value)
    return from_json(described, {name: torch.from_numpy(np.array(tensor)) for name, tensor in tensors.items()})


def test_keys_that_would_give_two_tensors_one_name_do_not() -> None:
    ones = {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}, "a.b#2": torch.full((2,), 2.0),
            "1": [torch.full((2,), 3.0)],
            1: (torch.full((2,), 4.0),)}  # fmt: skip
    _, tensors = to_json(ones)
    assert len(tensors) == 5
    found = back(ones)
    assert found["a.b"].tolist() == [1.0, 1.0]
    assert found["a"]["b"].tolist() == [0.0, 0.0]
    assert found["a.b#2"].tolist() == [2.0, 2.0]
    assert found["1"][0].tolist() == [3.0, 3.0]
    assert found[1][0].tolist() == [4.0, 4.0]


def test_values_of_every_kind_come_back_as_they_were() -> None:
    value = {"none": None, "flag": True, "number": 3, "text": "x", "nan": float("nan"), "low": float("-inf"),
             "bytes": b"ab", "scalar": np.float32(0.5), "list": [1, (2, [3])]}  # fmt: skip
    found = back(value)
    assert np.isnan(found.pop("nan"))
    value.pop("nan")
    assert found == value
    assert type(found["scalar"]) is np.float32
