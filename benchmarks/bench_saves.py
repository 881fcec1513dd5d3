"""Saving and loading a million transitions, beside what other libraries offer and the disk itself.

relive returns when the save is on the disk, and a crash leaves the old save or the new one. The others promise neither:
what they wrote may still be in memory. So there are two columns: what the call takes, and how long it takes until the
bytes are on the disk, for which the others' files are synced after the call. The floor writes the same bytes as relive
to one new file, and syncs it in the second column; that of a load reads them from the system's cache. cpprb compresses,
and these numbers are easy to compress.
"""

import importlib
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from harness import Effort, Workload, measure, write
from replay_data import (
    Line,
    Made,
    Transitions,
    cpprb_replay,
    relive_replay,
    sb3_replay,
    tianshou_replay,
    torchrl_replay,
)

ROWS = 1_000_000
NEW = ROWS // 100
MB = 10**6
WRITTEN, SYNCED, READ = "write", "write and fsync", "read"
Actions = tuple[Callable[[Path], Any], Callable[[Path], Any]]
"""Saves to a path, and loads from it."""


def relive_actions(data: Transitions, replay: Any) -> Actions:
    return replay.save, type(replay).load


def sb3_actions(data: Transitions, buffer: Any) -> Actions:
    util = importlib.import_module("stable_baselines3.common.save_util")
    return lambda path: util.save_to_pkl(path, buffer), util.load_from_pkl


def tianshou_actions(data: Transitions, buffer: Any) -> Actions:
    return buffer.save_hdf5, type(buffer).load_hdf5


def cpprb_actions(data: Transitions, buffer: Any) -> Actions:
    def load(path: Path) -> Any:
        fresh = cpprb_replay(data, fill=False)
        fresh.load_transitions(f"{path}.npz")
        return fresh

    return lambda path: buffer.save_transitions(f"{path}.npz"), load


def torchrl_actions(data: Transitions, buffer: Any) -> Actions:
    def load(path: Path) -> Any:
        fresh = torchrl_replay(data, fill=False)
        fresh.loads(path)
        return fresh

    return buffer.dumps, load


KINDS: dict[str, tuple[str, str, str, Callable[..., Any], Callable[..., Actions]]] = {
    "relive": ("relive", "ReplayBuffer.save and load", "ours", relive_replay, relive_actions),
    "stable-baselines3 pickle": ("stable-baselines3", "save_to_pkl, load_from_pkl", "peer", sb3_replay, sb3_actions),
    "tianshou HDF5": ("tianshou", "save_hdf5, load_hdf5", "peer", tianshou_replay, tianshou_actions),
    "cpprb npz": ("cpprb", "save_transitions, load_transitions", "peer", cpprb_replay, cpprb_actions),
    "torchrl memory maps": ("torchrl", "dumps, loads", "peer", torchrl_replay, torchrl_actions),
}


class Bench:
    """The buffers of all libraries, made once, and a folder for their saves."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made = folder, dict[str, Any]()

    def actions(self, label: str, data: Transitions) -> tuple[Actions, Path]:
        """What saves and loads a full buffer, and a path that nobody else uses."""
        _, _, _, make, actions = KINDS[label]
        if label not in self.made:
            self.made[label] = make(data)
        return actions(data, self.made[label]), self.folder / label.replace(" ", "-")

    def saving(self, label: str, synced: bool) -> Callable[[Transitions], Made]:
        """A save in a new place, after the one before is removed; ``synced`` syncs the files of the others."""

        def make(data: Transitions) -> Made:
            (save, _), path = self.actions(label, data)
            number, ours = 0, KINDS[label][2] == "ours"

            def run() -> None:
                nonlocal number
                remove(path.with_name(f"{path.name}-{number}"))
                number += 1
                target = path.with_name(f"{path.name}-{number}")
                save(target)
                if synced and not ours:
                    sync(target)

            return run, lambda: ""

        return make

    def loading(self, label: str) -> Callable[[Transitions], Made]:
        def make(data: Transitions) -> Made:
            (save, load), path = self.actions(label, data)
            save(path)
            return lambda: load(path) and None, lambda: ""

        return make

    def again(self, background: bool) -> Callable[[Transitions], Made]:
        """A save to the same place after one per cent of new transitions; in the background, what its call takes."""

        def make(data: Transitions) -> Made:
            _, path = self.actions("relive", data)
            replay, columns = self.made["relive"], data.all()
            new = {name: array[:NEW, None] for name, array in columns.items()}
            replay.save(path)

            def run() -> None:
                replay.extend(new)
                replay.save(path, background=background)

            return run, lambda: ""

        return make

    def lines(self, how: Callable[[str], Callable[[Any], Made]]) -> list[Line]:
        return [Line(label, kind[0], kind[1], how(label), kind[2]) for label, kind in KINDS.items()]


def remove(path: Path) -> None:
    """Remove a save, whatever its form."""
    shutil.rmtree(path, ignore_errors=True)
    for file in path.parent.glob(f"{path.name}.*"):
        file.unlink()
    path.unlink(missing_ok=True)


def files_of(path: Path) -> list[Path]:
    """The files of a save, whatever its form."""
    return [file for file in (*path.rglob("*"), *path.parent.glob(f"{path.name}.*"), path) if file.is_file()]


def size(path: Path) -> int:
    """Bytes of a save on the disk."""
    return sum(file.stat().st_size for file in files_of(path))


def sync(path: Path) -> None:
    """Wait until a save is on the disk."""
    for file in files_of(path):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())


def disk_floor(bench: Bench, what: str, share: float = 1.0) -> Line:
    """Does to the disk what it says, with as many bytes as relive's save has."""

    def make(data: Transitions) -> Made:
        (save, _), path = bench.actions("relive", data)
        save(path)
        block, file = bytearray(b"1") * int(size(path) * share), bench.folder / "floor"
        file.write_bytes(block)

        def write_all() -> None:
            file.unlink()
            with file.open("wb", buffering=0) as stream:
                view = memoryview(block)
                for start in range(0, len(view), 1 << 20):
                    stream.write(view[start : start + (1 << 20)])
                if what == SYNCED:
                    os.fsync(stream.fileno())

        def read_all() -> None:
            with file.open("rb", buffering=0) as stream:
                target: Any = np.empty(len(block), np.uint8)  # fresh memory, as a loaded buffer has
                stream.readinto(target)

        return (read_all if what == READ else write_all), lambda: ""

    return Line(f"{what} of the same bytes", "", "in pieces of a MiB, one file", make, "floor")


def most_memory(run: Callable[[], object]) -> int:
    """The most memory in bytes that a call takes on top, in a forked child; Linux has the high-water mark."""
    read, write_end = os.pipe()
    if not os.fork():
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        run()
        os.write(write_end, str(status("VmHWM") - before).encode())
        os._exit(0)
    os.close(write_end)
    os.wait()
    with os.fdopen(read) as answer:
        return int(answer.read() or 0)


def status(name: str) -> int:
    """A figure of this process, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def amounts(bench: Bench, data: Transitions) -> list[dict[str, Any]]:
    """Megabytes on the disk, and of memory on top of the buffer while it is saved."""
    lines: dict[str, list[dict[str, Any]]] = {"MB on the disk": [], "MB of memory while saving": []}
    for label, (package, note, role, *_) in KINDS.items():
        line = {"label": label, "role": role, "note": note, "package": package}
        try:
            (save, _), path = bench.actions(label, data)
            remove(path)
            memory = most_memory(lambda save=save, path=path: save(path))
            found = {"MB on the disk": size(path) / MB, "MB of memory while saving": memory / MB}
        except ImportError as error:
            found = {}
            line["status"] = f"not installed: {error}"
        for name, workload in lines.items():
            workload.append(line | ({"status": "ok", "median": found[name]} if found else {}))
    nothing = {"rounds": 1, "floor": None, "best_peer": None, "best_peer_over_ours": None, "unit": "count"}
    return [{"name": name, **nothing, "lines": found} for name, found in lines.items()]


def run(effort: Effort, folder: Path) -> None:
    """Measures saves and loads and writes `saves.json`."""
    data = Transitions(ROWS if effort.rounds > 5 else ROWS // 20)
    with tempfile.TemporaryDirectory() as place:
        bench = Bench(Path(place))
        workloads = amounts(bench, data)
        behind = "relive, save(background=True)"
        again = [
            Line("relive", "relive", "save", bench.again(False), "ours"),
            Line(behind, "relive", "the call alone", bench.again(True), "ours"),
        ]
        for name, lines in {
            "the call of save": [disk_floor(bench, WRITTEN), *bench.lines(partial(bench.saving, synced=False))],
            "until it is on the disk": [disk_floor(bench, SYNCED), *bench.lines(partial(bench.saving, synced=True))],
            "again, 1 % new": [disk_floor(bench, SYNCED, 0.01), *again],
            "load": [disk_floor(bench, READ), *bench.lines(bench.loading)],
        }.items():
            workloads.append(measure(Workload(name, data), lines, effort))
    write("saves", "1 M transitions, obs 17, action 6", workloads, folder)
