"""Hostile directories: forged with right checksums, mutated, mixed, linked elsewhere. Each is refused with the file and
the reason, or opened; and whatever the rows of one that is opened hold, no call reads or writes outside its memory."""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
import pytest
import torch

import relive
from attacks.tally import attempt
from relive import Field, FrameStack, NStep, Prioritized, Recent, ReplayBuffer, Schema, Sequence, Uniform
from relive.errors import FileFormatError, ReliveError
from relive.files import format as sealed
from relive.files.mapped import HEAD, TAIL
from relive.memory.mapped import LookAhead
from support.effort import often
from support.forks import in_fork

FLAGS = {name: Field((), torch.bool) for name in ("terminated", "truncated")}
SCHEMA = Schema({"obs": {"state": (3,), "camera": Field((40, 40), torch.uint8)}, "reward": (), **FLAGS})
ENVS, ROWS = 2, 40
FORGED = "a forged directory of a replay in files"
LOOKED_AT = "a forged directory of a replay in files, inspected"
ONLY_WRITERS = "a hard link for a file", "a symbolic link for the lock"
"""What does no harm to a reader."""

MAKES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "uniform, 3-step": (Uniform, lambda: NStep(3, gamma=0.5)),
    "prioritized": (lambda: Prioritized(normalize="buffer"), lambda: NStep(1, gamma=0.5)),
    "recent, prioritized, stacked": (lambda: Recent(0.9, 5, inner=Prioritized()), lambda: FrameStack(3)),
    "sequences": (Uniform, lambda: Sequence(4, burn_in=2)),
}


def step(number: int) -> dict[str, Any]:
    ends = np.arange(ENVS) == number % 7
    obs = {"state": np.full((ENVS, 3), number), "camera": np.full((ENVS, 40, 40), number % 251, np.uint8)}
    facts = {"terminated": ends & (number % 2 == 0), "truncated": ends & (number % 2 == 1)}
    return {"obs": obs, "next_obs": obs, "reward": np.full(ENVS, number), **facts}


def made(path: Path, name: str = "prioritized", count: int = 70, close: bool = True) -> Path:
    sampler, view = MAKES[name]
    replay = ReplayBuffer.open(
        path, SCHEMA, ENVS * ROWS, ENVS, sampler=sampler(), view=view(), seed=1, check_ends=False
    )
    for number in range(count):
        replay.add(step(number))
    if close:
        replay.close()
    return path


def manifest(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest and seal it again."""
    found = json.loads((path / "manifest.json").read_bytes())
    del found["checksum"]
    change(found)
    (path / "manifest.json").write_bytes(sealed.seal({key: json.dumps(value) for key, value in found.items()}))


def journal(path: Path, change: Callable[[list[list[Any]]], Any]) -> None:
    """Change the records of the journal (mark, run, number, payload) and seal them again."""
    raw, records, at = (path / "journal").read_bytes(), list[list[Any]](), 0
    while raw[at : at + 1].strip(b"\0"):  # zeros follow the last record
        mark, run, number, length = HEAD.unpack_from(raw, at)
        records.append([mark, run, number, raw[at + HEAD.size : at + HEAD.size + length]])
        at += HEAD.size + length + TAIL.size
    change(records)
    bodies = [HEAD.pack(*record[:3], len(record[3])) + record[3] for record in records]
    (path / "journal").write_bytes(b"".join(body + TAIL.pack(zlib.crc32(body)) for body in bodies))


def array(path: Path, name: str) -> Path:
    """The file of an array."""
    (found,) = path.glob(f"[0-9][0-9][0-9]-{name}.safetensors")
    return found


def poke(file: Path, at: int, raw: bytes) -> None:
    """Overwrite bytes of a file's numbers."""
    with file.open("r+b") as stream:
        stream.seek(at + 8 + struct.unpack("<Q", stream.read(8))[0])
        stream.write(raw)


def words(*numbers: int) -> bytes:
    return np.array(numbers, np.int64).tobytes()


def content(**facts: Any) -> Callable[[Path], None]:
    return lambda path: manifest(path, lambda found: found["content"].update(facts))


def swapped(one: str, other: str) -> Callable[[Path], None]:
    def swap(path: Path) -> None:
        first, second = array(path, one), array(path, other)
        raw = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(raw)

    return swap


def elsewhere(name: str, link: Callable[[Path, Path], None]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        file = path / name if name in ("lock", "journal", "manifest.json") else array(path, name)
        shutil.move(file, path.parent / "elsewhere")
        link(path.parent / "elsewhere", file)

    return replace


def older(name: str) -> Callable[[Path], None]:
    """One file as it was when the replay was closed before."""

    def replace(path: Path) -> None:
        shutil.copytree(path, path.parent / "before")
        with ReplayBuffer.open(path, check_ends=False) as replay:
            for number in range(70, 100):
                replay.add(step(number))
        file = path / name if name == "journal" else array(path, name)
        shutil.copy(path.parent / "before" / file.name, file)

    return replace


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a manifest of a later version": (
        lambda path: manifest(path, lambda found: found.update(version=2)), "expected version 1, got 2"),
    "a manifest of another run": (
        lambda path: manifest(path, lambda found: found.update(run="0" * 16)), "belongs to another replay"),
    "a manifest without an array": (
        lambda path: manifest(path, lambda found: found["arrays"].pop(0)), "expected 80 rows, got None"),
    "a manifest with a path": (
        lambda path: manifest(path, lambda found: found["arrays"][0].update(file="../rows.safetensors")), "consistent"),
    "a manifest with one file for two arrays": (
        lambda path: manifest(path, lambda found: found["arrays"][1].update(file=found["arrays"][0]["file"])), "one f"),
    "a manifest with a huge array": (
        lambda path: manifest(path, lambda found: found["arrays"][0].update(shape=[2**40, 2**25])), "a consistent"),
    "a manifest with rows that are not there": (content(rows_per_env=2**40), "rows"),
    "a manifest with envs that are not there": (content(num_envs=2**40), "expected 43980465111040 rows"),
    "a manifest of another kind": (content(kind="relive.RolloutBuffer"), "kind"),
    "a manifest with a view that reads everything": (
        content(view={"part": "FrameStack", "depth": 10**9, "window": {"part": "NStep", "n": 1, "gamma": 0.9},
                      "pad": "zeros", "keys": None}), "spans more rows"),
    "a manifest cut short": (lambda path: os.truncate(path / "manifest.json", 100), "manifest.json"),
    "a journal of another run": (
        lambda path: journal(path, lambda records: [record.__setitem__(1, b"0" * 16) for record in records]),
        "belongs to another replay"),
    "a journal with a record left out": (lambda path: journal(path, lambda records: records.pop(1)), "record"),
    "a journal with its records shuffled": (lambda path: journal(path, lambda records: records.reverse()), "record"),
    "a journal with a record twice": (
        lambda path: journal(path, lambda records: records.append(records[-1])), "expected record"),
    "a journal with a record of nonsense": (
        lambda path: journal(path, lambda records: records[-1].__setitem__(3, b"\x05\0\0\0[[[[[")), "makes no sense"),
    "no journal": (lambda path: (path / "journal").unlink(), "a journal"),
    "an empty journal": (lambda path: os.truncate(path / "journal", 0), "journal"),
    "an older journal": (older("journal"), "files of another time"),
    "an older file of cursors": (older("state"), "files of another time"),
    "older rows": (older("rows"), "files of several times"),
    "arrays in each other's files": (swapped("errors", "rows"), "safetensors"),
    "a file that is longer": (lambda path: os.truncate(array(path, "errors"), 9000), "expected 4416 bytes, got 9000"),
    "a file that is missing": (lambda path: array(path, "nodes").unlink(), "got nothing"),
    "cursors beyond all numbers": (lambda path: poke(array(path, "state"), 0, words(2**62)), "another time"),
    "a symbolic link for a file": (elsewhere("rows", lambda old, new: new.symlink_to(old)), "a symbolic link"),
    "a hard link for a file": (elsewhere("rows", lambda old, new: new.hardlink_to(old)), "hard links"),
    "a pipe for a file": (elsewhere("rows", lambda old, new: os.mkfifo(new)), "expected a regular file"),
    "a symbolic link for the journal": (elsewhere("journal", lambda old, new: new.symlink_to(old)), "a symbolic link"),
    "a symbolic link for the lock": (elsewhere("lock", lambda old, new: new.symlink_to(old)), "a symbolic link"),
    "a symbolic link for the manifest": (
        elsewhere("manifest.json", lambda old, new: new.symlink_to(old)), "a symbolic link"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_forged_directory_is_refused_with_the_reason_and_left_alone(name: str, tmp_path: Path) -> None:
    forge, reason = REFUSED[name]
    path = made(tmp_path / "r")
    forge(path)
    before = {file.name: file.stat().st_size for file in path.iterdir()}
    with attempt(FORGED), pytest.raises(FileFormatError, match=reason) as caught:
        ReplayBuffer.open(path)
    assert str(path) in str(caught.value)
    if name not in ONLY_WRITERS:
        with attempt(LOOKED_AT), pytest.raises(FileFormatError, match=reason):
            relive.inspect(path)
    assert {file.name: file.stat().st_size for file in path.iterdir()} == before


@pytest.mark.parametrize(
    ("file", "at", "raw"),
    [
        ("state", 0, words(-1)),
        ("state", 8, words(2**61)),
        ("counters", 0, words(7)),
        ("counters", 8, words(-5)),
        ("counters", 24, words(2**40)),
        ("counters", 64, words(3)),
        ("undo", 0, words(9)),
        ("undo", 0, words(1, 2**40)),
        ("undo", 0, words(1, 1, 2**40)),
        ("undo", 0, words(1, 1, 1, *range(9), 77)),
        ("progress", 0, words(5, -1, 2, 3, 5)),
        ("facts", 0, np.array([np.nan]).tobytes()),
        ("facts", 24, np.array([-1.0]).tobytes()),
        ("errors-undo", 0, np.array([1e9]).tobytes()),
        ("errors-undo", 0, np.array([1.0, 1.0, 1e9]).tobytes()),
    ],
)
def test_forged_numbers_of_a_process_that_died_are_refused(
    file: str, at: int, raw: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relive.replay.durable.PAUSE_SECONDS", 0.02)
    path = made(tmp_path / "r", close=False)
    poke(array(path, file), at, raw)
    with attempt(LOOKED_AT), suppress(FileFormatError):  # what only draws may be read as it is
        relive.inspect(path)
    with attempt(FORGED), pytest.raises(FileFormatError, match="contradicts itself"):
        ReplayBuffer.open(path)


def use(path: Path) -> None:
    """Call everything that reads or writes rows; errors of relive are right answers."""
    with suppress(ReliveError), catch_warnings():
        simplefilter("ignore")
        relive.audit(path)
        relive.inspect(path)
    with suppress(ReliveError):
        replay = ReplayBuffer.open(path, check_ends=False)
        for number in range(30):
            for call in (
                lambda number=number: replay.add(step(number)),
                lambda: replay.sample(16),
                lambda: replay.update_priorities(replay.sample(4)["index"], np.zeros(4)),
                replay.interrupt,
            ):
                with suppress(ReliveError, IndexError, ValueError, RuntimeWarning):
                    call()
        for call in (replay.data, replay.stats, lambda: replay.slice(0), lambda: list(replay.episodes()), replay.check):
            with suppress(ReliveError, IndexError, ValueError, RuntimeWarning):
                call()
        with suppress(ReliveError):
            replay.close()


@pytest.mark.parametrize("times", [often(2, 4), pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MAKES)
def test_whatever_rows_and_trees_hold_no_call_leaves_its_memory(
    name: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(times)
    monkeypatch.setattr(LookAhead, "is_wanted", lambda self: True)  # so that guesses rest on what was altered, too

    def attack() -> None:
        for turn in range(times):
            path = made(tmp_path / f"forged-{turn}", name, close=False)  # a copy would go back to its last flush
            for file in (array(path, "rows"), *path.glob("*-errors.*"), *path.glob("*-nodes.*")):
                raw = np.fromfile(file, np.uint8)
                hit = rng.random(len(raw) - 4096) < rng.choice([0.001, 0.05, 1.0])
                raw[4096:][hit] = rng.integers(0, 256, int(hit.sum()))
                poke(file, 0, raw[4096:].tobytes())
            use(path)
            shutil.rmtree(path)

    with attempt("a replay in files with rows and trees of random bytes", times):
        in_fork(attack, seconds=60 + times)  # which fails if the child comes to the end of its memory
