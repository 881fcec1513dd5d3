"""Replays in files: opened, used, closed and opened again; what is refused, and what a power cut leaves."""

from __future__ import annotations

import atexit
import errno
import os
import pickle
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import relive
from relive import (
    Field,
    FrameStack,
    Fresh,
    NStep,
    Prioritized,
    Recent,
    ReplayBuffer,
    Schema,
    Sequence,
    Uniform,
    WithoutReplacement,
)
from relive.errors import FileFormatError, LifecycleError, NoSaveError, ParameterError, SchemaError
from relive.files import mapped as journals
from relive.files import mapped as mapping
from relive.replay.durable import Settings
from support import internals
from support.cases import covering
from support.forks import in_fork
from support.replays import assert_equal, rate
from support.shared_buffers import Wrapped, sent

FLAGS = {name: Field((), torch.bool) for name in ("terminated", "truncated")}
SCHEMA = Schema({"obs": (3,), "action": Field((), torch.int64), "reward": (), **FLAGS})
IMAGES = Schema(
    {"obs": {"camera": Field((40, 40), torch.uint8), "half": Field((3,), torch.bfloat16)}, "reward": (), **FLAGS}
)

SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": Uniform,
    "without replacement": WithoutReplacement,
    "prioritized": Prioritized,
    "prioritized, buffer": lambda: Prioritized(stratified=False, normalize="buffer", beta=(0.4, 1.0, 50)),
    "recent": lambda: Recent(0.9, 5, adapt=True),
    "recent, prioritized": lambda: Recent(0.9, 5, inner=Prioritized()),
    "fresh": Fresh,
    "fresh, recent, prioritized": lambda: Fresh(Recent(0.9, 5, inner=Prioritized())),
    "wrapped": lambda: Wrapped(Prioritized()),
}

VIEWS: dict[str, Callable[[], Any]] = {
    "transitions": relive.Transition,
    "3-step": lambda: NStep(3, gamma=0.5),
    "sequences": lambda: Sequence(3, burn_in=1),
}


def step(number: int, schema: Schema = SCHEMA, envs: int = 2) -> dict[str, Any]:
    ends = np.arange(envs) == number % 5
    given = {"reward": np.full(envs, number, np.float32), "terminated": ends & (number % 2 == 0)}
    given |= {"truncated": ends & (number % 2 == 1)}
    if schema is IMAGES:
        camera = np.full((envs, 40, 40), number % 251, np.uint8)
        obs: Any = {"camera": camera, "half": torch.full((envs, 3), number, dtype=torch.bfloat16)}
        return given | {"obs": obs, "next_obs": obs}
    obs = np.full((envs, 3), number, np.float32)
    return given | {"obs": obs, "action": np.full(envs, number), "next_obs": obs + 0.5}


def opened(path: Path, schema: Schema | None = SCHEMA, capacity: int | None = 60, **options: Any) -> ReplayBuffer:
    return ReplayBuffer.open(path, schema, capacity, 2 if capacity else None, check_ends=False, **options)


def filled(path: Path, count: int = 50, **options: Any) -> ReplayBuffer:
    replay = opened(path, seed=1, **options)
    for number in range(count):
        replay.add(step(number))
    return replay


@pytest.mark.parametrize(("sampler", "view"), covering(SAMPLERS, VIEWS))
def test_its_batches_are_those_of_a_replay_in_memory_also_after_it_was_closed(
    sampler: str, view: str, tmp_path: Path
) -> None:
    given = {"sampler": SAMPLERS[sampler](), "view": VIEWS[view]()}
    own = sampler == "wrapped"
    replay = opened(tmp_path / "r", seed=3, sampler=SAMPLERS[sampler](), view=VIEWS[view]())
    twin = ReplayBuffer(SCHEMA, 60, 2, seed=3, check_ends=False, **given)
    for number in range(130):
        for one in (replay, twin):
            one.add(step(number))
            if sampler == "recent":
                one.sampler.observe(float(number))
        if number > 8:
            batch, other = replay.sample(5), twin.sample(5)
            assert_equal(batch, other)
            rate(replay, batch)
            rate(twin, other)
        if number % 40 == 39:
            replay.close()
            replay = opened(tmp_path / "r", None, None, **({"sampler": SAMPLERS[sampler]()} if own else {}))
            assert own or repr(replay) == repr(twin)
            replay.check()
    assert_equal(replay.data(), twin.data())
    assert replay.stats() == twin.stats()


def test_priorities_that_were_closed_before_anything_could_be_drawn_go_on_as_they_began(tmp_path: Path) -> None:
    opened(tmp_path / "r", sampler=Prioritized(), seed=1).close()
    replay, twin = opened(tmp_path / "r"), ReplayBuffer(SCHEMA, 60, 2, sampler=Prioritized(), seed=1, check_ends=False)
    for number in range(9):
        for one in (replay, twin):
            one.add(step(number))
    assert replay.stats()["priority_max"] == twin.stats()["priority_max"] > 1
    assert_equal(replay.sample(5), twin.sample(5))


@pytest.mark.parametrize("facts", [{}, {"own_next_obs": True}, {"ordered": False}], ids=str)
def test_fields_of_all_kinds_lie_in_files_that_any_safetensors_reader_opens(
    facts: dict[str, Any], tmp_path: Path
) -> None:
    replay, twin = opened(tmp_path / "r", IMAGES, **facts), ReplayBuffer(IMAGES, 60, 2, check_ends=False, **facts)
    for number in range(70):
        replay.add(step(number, IMAGES))
        twin.add(step(number, IMAGES))
    assert "in files" in str(replay)
    assert "in RAM" in str(twin)
    replay.close()
    with opened(tmp_path / "r", None, None) as again:
        assert_equal(again.data(), twin.data())
    files = sorted((tmp_path / "r").glob("*.safetensors"))
    found = {name: x for file in files for name, x in load_file(file).items()}
    assert found["rows"].shape[0] == found["block.obs.camera"].shape[0] == 60
    assert np.array_equal(found["rows"].numpy(), internals.ring(twin).store.target)


def test_what_was_there_must_fit_what_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(relive.errors.FieldError, match="expected schema and capacity, as no replay is there yet"):
        ReplayBuffer.open(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    filled(tmp_path / "r").close()
    for options in ({"schema": IMAGES}, {"capacity": 10}, {"num_envs": 3}, {"ordered": False}, {"own_next_obs": True}):
        with pytest.raises((SchemaError, ParameterError), match=f"has {next(iter(options))}="):
            ReplayBuffer.open(tmp_path / "r", **options)
    with pytest.raises(ParameterError, match="flush: expected a number of rows, a timedelta, or None, got 0"):
        ReplayBuffer.open(tmp_path / "r", flush=0)
    opened(tmp_path / "r", SCHEMA, 61).close()


def test_a_sampler_of_another_kind_starts_anew_and_its_files_come_and_go(tmp_path: Path) -> None:
    filled(tmp_path / "r").close()
    replay = ReplayBuffer.open(tmp_path / "r", sampler=Prioritized())
    batch = replay.sample(9)
    replay.update_priorities(batch["index"], batch["reward"])
    replay.check()
    del replay
    replay = ReplayBuffer.open(tmp_path / "r")
    assert isinstance(replay.sampler, Prioritized)
    replay.check()
    replay.sampler.alpha = 0.9
    replay.close()
    with ReplayBuffer.open(tmp_path / "r", sampler=Prioritized(0.9, beta=1.0)) as again:
        assert sorted(set(again.sampler.priorities()))[-1] > 1.5
        again.check()
    ReplayBuffer.open(tmp_path / "r", sampler=Uniform(), view=NStep(4)).close()
    assert not list((tmp_path / "r").glob("*nodes*"))
    with ReplayBuffer.open(tmp_path / "r", verify=True) as again:
        assert again.view.n == 4


def test_seed_and_number_of_the_next_batch_are_kept(tmp_path: Path) -> None:
    replay, twin = filled(tmp_path / "r"), ReplayBuffer(SCHEMA, 60, 2, seed=1, check_ends=False)
    for number in range(50):
        twin.add(step(number))
    twin.interrupt()
    for turn in range(6):
        assert_equal(replay.sample(4), twin.sample(4))
        if turn == 3:
            replay.seed = twin.seed = 2**80
        del replay
        replay = ReplayBuffer.open(tmp_path / "r")
        assert replay.stats()["batches"] == turn + 1


# One writer, and none in a forked child.


def test_settings_are_kept_when_they_are_set_and_a_kill_does_not_take_them_back(tmp_path: Path) -> None:
    long = tuple(f"{'camera' * 30}{number}" for number in range(40))  # too long for the slot: the manifest has them
    wide = Schema({"obs": dict.fromkeys(("state", *long), (1,)), "reward": (), **FLAGS})
    settings = {
        "prioritized": lambda r: [setattr(r.sampler, *pair) for pair in PARAMETERS_SET.items()],
        "recent": lambda r: setattr(r.sampler, "c_min", 7) or setattr(r.sampler.inner, "alpha", 0.25),
        "n": lambda r: setattr(r.view, "n", 4) or setattr(r.view, "gamma", 0.125),
        "window": lambda r: setattr(r.view, "window", NStep(2, 0.5)) or setattr(r.view.window, "n", 3),
        "view": lambda r: setattr(r, "view", relive.ReturnsToGo(0.5)) or setattr(r.view, "gamma", 0.25),
        "keys": lambda r: setattr(r, "view", FrameStack(2, keys=long)),
        "and back": lambda r: setattr(r, "view", FrameStack(2, keys=long)) or setattr(r, "view", NStep(3)),
    }
    parts = {
        "recent": {"sampler": Recent(0.9, 5, inner=Prioritized())},
        "window": {"view": FrameStack(2)},
        "keys": {"schema": wide},
        "and back": {"schema": wide},
    }
    for name, change in settings.items():
        said = in_fork(set_and_die, tmp_path / name, change, {"sampler": Prioritized(), **parts.get(name, {})})
        with ReplayBuffer.open(tmp_path / name) as replay:
            assert [repr(replay.sampler), repr(replay.view)] == said, name
            change(replay)
            replay.view = relive.Transition()  # a clean end keeps what was set last, too
        with ReplayBuffer.open(tmp_path / name) as replay:
            assert [repr(replay.sampler), repr(replay.view)] == [said[0], repr(relive.Transition())], name


PARAMETERS_SET: dict[str, Any] = {
    "alpha": 0.3, "beta": (0.1, 0.9, 77), "eps": 0.25, "eta": 0.5, "default_error": 2.0, "stratified": False,
}  # fmt: skip


def set_and_die(path: Path, change: Callable[[Any], Any], options: dict[str, Any]) -> list[str]:
    """What a process says of a replay's parts after it changed them; then it ends without closing the replay."""
    replay = ReplayBuffer.open(path, capacity=60, **{"schema": SCHEMA, **options})
    change(replay)
    return [repr(replay.sampler), repr(replay.view)]


def test_settings_that_were_torn_or_forged_are_refused_or_ignored(tmp_path: Path) -> None:
    words = np.zeros((2, Settings.BYTES), np.uint8)
    settings, texts = Settings(words), [b'{"view": null}', b"x" * 4000, b"y"]
    for text in texts:
        assert settings.keep(text)
        assert Settings(words).text == text
    torn = words.copy()
    torn[0, 20] ^= 1  # the slot that was written last
    assert Settings(torn).text == texts[1]
    assert not settings.keep(b"z" * 5000)
    assert Settings(words).text == b""
    for number, text in enumerate((b"[]", b'{"seed": 3}', b"{", b"\xff", b'{"view": {"part": "NStep", "n": "many"}}')):
        path = tmp_path / str(number)
        in_fork(keep_and_die, path, text)
        with pytest.raises(FileFormatError):
            ReplayBuffer.open(path)


def keep_and_die(path: Path, text: bytes) -> None:
    internals.durable(ReplayBuffer.open(path, SCHEMA, 60)).settings.keep(text)


def test_a_second_writer_is_refused_and_told_who_the_first_is(tmp_path: Path) -> None:
    replay = filled(tmp_path / "r")
    with pytest.raises(LifecycleError, match="open in this process already"):
        ReplayBuffer.open(tmp_path / "r")

    def child() -> Iterator[str]:
        for call in (lambda: ReplayBuffer.open(tmp_path / "r"), lambda: replay.add(step(0)), lambda: len(replay)):
            with pytest.raises(LifecycleError) as error:
                call()
            yield str(error.value)

    first, second, third = in_fork(lambda: list(child()))
    assert f"is open in process {os.getpid()}, and only one may write" in first
    assert "a forked child may not use them" in second
    assert second == third
    replay.add(step(50))
    replay.close()
    for call in (lambda: replay.sample(1), lambda: replay.add(step(1)), lambda: len(replay), lambda: replay.block):
        with pytest.raises(LifecycleError, match="was closed; open its directory again"):
            call()
    replay.close()
    with ReplayBuffer.open(tmp_path / "r") as again:
        assert again.stats()["completed"] > 40


def test_neither_a_forked_child_nor_a_closed_replay_changes_priorities_or_the_manifest(tmp_path: Path) -> None:
    replay = filled(tmp_path / "r", sampler=Prioritized())
    kept, stored = (tmp_path / "r" / "manifest.json").read_bytes(), replay.data()

    def refused() -> bool:
        sampler = replay.sampler
        for call in (
            lambda: setattr(sampler, "alpha", 0.1),
            lambda: setattr(sampler, "eps", 0.1),
            lambda: setattr(sampler, "largest_error", 9.0),
            lambda: sampler.load_state_dict(sampler.state_dict()),
            lambda: setattr(replay, "seed", 7),
            replay.clear,
        ):
            with pytest.raises(LifecycleError, match=r"forked child may not|closed|does not hold it"):
                call()
        return True

    child = os.fork()
    if child == 0:
        os._exit(0 if refused() else 1)
    assert os.waitpid(child, 0)[1] == 0
    replay.check()
    assert_equal(replay.data(), stored)
    assert (replay.sampler.alpha, replay.sampler.largest_error) == (0.6, 1.0)
    replay.close()
    assert refused()
    assert (tmp_path / "r" / "manifest.json").read_bytes() == kept
    ReplayBuffer.open(tmp_path / "r", verify=True).close()


def test_the_process_may_change_its_directory_while_a_replay_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    replay = filled(Path("r"))
    monkeypatch.chdir(tmp_path / "other")
    replay.flush()
    replay.seed = 7
    replay.close()
    assert os.listdir(".") == []
    assert ReplayBuffer.open(tmp_path / "r").seed == 7


def test_a_directory_that_took_the_place_of_an_open_one_is_left_alone(tmp_path: Path) -> None:
    first = filled(tmp_path / "r")
    (tmp_path / "r").rename(tmp_path / "moved")
    filled(tmp_path / "r", 9).close()
    for call in (first.flush, first.close, partial(setattr, first, "seed", 7)):
        with pytest.raises(FileFormatError, match="another directory has taken the place"):
            call()
    del first, call
    assert ReplayBuffer.open(tmp_path / "r", verify=True).stats()["completed"] < 20
    assert ReplayBuffer.open(tmp_path / "moved").stats()["completed"] > 40


@pytest.mark.parametrize("gone", ["r", "r/lock", "."])
def test_a_directory_that_was_removed_is_an_error_that_says_so_and_the_replay_can_be_saved(
    tmp_path: Path, gone: str
) -> None:
    (tmp_path / "dir").mkdir()
    replay = filled(tmp_path / "dir" / "r")
    (tmp_path / "dir" / gone).resolve().rename(tmp_path / "moved")
    named = re.escape(str(tmp_path / "dir" / ("r/lock" if gone == "r/lock" else "r")))
    for call in (replay.flush, replay.close, partial(setattr, replay, "seed", 7)):
        with pytest.raises(NoSaveError, match=f"'{named}' was removed or moved while it was open.*save to another"):
            call()
    replay.save(tmp_path / "saved")
    assert_equal(ReplayBuffer.load(tmp_path / "saved").sample(9), replay.sample(9))


def test_steps_flushed_by_rows_find_that_the_directory_was_removed(tmp_path: Path) -> None:
    replay = opened(tmp_path / "r", flush=4)
    shutil.rmtree(tmp_path / "r")
    with pytest.raises(NoSaveError, match="was removed or moved while it was open"):
        replay.extend({name: np.stack([step(t)[name] for t in range(9)]) for name in step(0)})


def test_a_replay_that_is_dropped_lets_its_directory_go(tmp_path: Path) -> None:
    for _ in range(3):
        replay = opened(tmp_path / "r")
        replay.add(step(0))
        del replay
    assert len(os.listdir("/proc/self/fd")) < 200 if Path("/proc/self/fd").exists() else True


def leave_open(path: Path, pipe: int) -> None:
    """End with a replay that a thread still fills, and with an exit handler that closes it when all else is done."""
    replay = opened(path)
    stop = threading.Event()

    def fill() -> None:
        number = 0
        while not stop.is_set():
            replay.add(step(number))
            number += 1

    def last() -> None:
        os.write(
            pipe,
            b"1" if internals.close(internals.holder(internals.durable(replay).allocator.directory)).alive else b"0",
        )
        stop.set()
        replay.close()
        os.write(pipe, b"1")

    threading.Thread(target=fill, daemon=True).start()
    atexit.unregister(finalize._exitfunc)  # handlers that were there before the first finalizer come after it
    finalize._registered_with_atexit = False
    atexit.register(last)
    finalize(replay, bool).atexit = True
    atexit._run_exitfuncs()


def test_a_directory_is_held_until_the_last_exit_handler_has_run(tmp_path: Path) -> None:
    read, write = os.pipe()
    in_fork(leave_open, tmp_path / "r", write)
    assert os.read(read, 2) == b"11"
    with opened(tmp_path / "r") as replay:
        assert len(replay) > 0
    os.close(read)
    os.close(write)


def test_copies_and_saves_are_those_of_any_replay(tmp_path: Path) -> None:
    replay = filled(tmp_path / "r", sampler=Prioritized())
    replay.save(tmp_path / "save")
    copies = [deepcopy(replay), pickle.loads(pickle.dumps(replay)), sent(replay), ReplayBuffer.load(tmp_path / "save")]
    batch = replay.sample(9)
    for other in copies:
        assert internals.durable(other) is None
        assert_equal(other.sample(9), batch)
        other.add(step(50))
        with pytest.raises(LifecycleError, match="this replay is not in files"):
            other.flush()
        other.close()
        assert other.stats()["completed"] > replay.stats()["completed"]
    with pytest.raises(FileFormatError, match=r"expected the format 'relive arrays', got 'relive mapped.*open"):
        replay.save(tmp_path / "r")
    with pytest.raises(FileFormatError, match=r"expected the format 'relive mapped arrays', got 'relive.*load"):
        ReplayBuffer.open(tmp_path / "save")
    with pytest.raises(LifecycleError, match="append: a replay in files takes transitions env after env"):
        replay.append(copies[0])
    replay.append(copies[0], envs={0: 1})
    replay.check()
    copies[0].append(replay)


# Disks.


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the stand-in of a full disk needs it")
def test_a_full_disk_is_an_error_before_anything_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = os.posix_fallocate

    def full(descriptor: int, start: int, size: int) -> None:
        if size > 20_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(descriptor, start, size)

    monkeypatch.setattr(mapping.os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"takes [0-9,]+ bytes, and the disk has [0-9,]+ free; lower the capacity"):
        opened(tmp_path / "r", SCHEMA, 10_000)
    assert os.listdir(tmp_path) == []
    opened(tmp_path / "r").close()
    with pytest.raises(OSError, match="lower the capacity"):
        opened(tmp_path / "s", IMAGES)
    assert os.listdir(tmp_path) == ["r"]


def test_a_disk_that_was_full_for_one_add_or_flush_takes_every_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay, failed = filled(tmp_path / "r", 20), 0
    for number in range(20, 100):
        with monkeypatch.context() as patch:
            patch.setattr(journals, "_write_all", partial(fail, errno.ENOSPC))
            try:
                replay.add(step(number))
            except OSError:
                failed += 1
            else:
                continue
            if failed % 2 == 0:
                with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                    replay.flush()
        replay.add(step(number))
    assert failed > 2, "the reserve was never used up"
    obs = replay.slice(0)["obs"][:, 0].long()
    replay.check()
    replay.close()
    assert set(range(80, 100)) <= set(obs.tolist())
    with opened(tmp_path / "r", None, None, verify=True) as replay:
        assert torch.equal(replay.slice(0)["obs"][:, 0].long(), obs)


def fail(number: int, *_: Any) -> None:
    raise OSError(number, os.strerror(number))


def test_a_directory_that_is_gone_is_an_error_of_flush(tmp_path: Path) -> None:
    replay = filled(tmp_path / "r")
    shutil.rmtree(tmp_path / "r")
    replay.add(step(50))
    with pytest.raises(FileNotFoundError):
        replay.flush()
    assert len(replay) > 40


def test_the_remains_of_a_directory_that_was_never_finished_make_way(tmp_path: Path) -> None:
    filled(tmp_path / "r").close()
    (tmp_path / "r" / "manifest.json").unlink()
    with opened(tmp_path / "r") as replay:
        assert len(replay) == 0
    (tmp_path / "r" / "manifest.json").unlink()
    (tmp_path / "r" / "mine.txt").write_text("mine")
    with pytest.raises(FileFormatError, match=r"got one with 'mine\.txt' in it"):
        opened(tmp_path / "r")


@pytest.mark.parametrize("name", ["without replacement", "recent", "wrapped"])
def test_a_flush_that_comes_by_itself_keeps_what_the_sampler_knows(name: str, tmp_path: Path) -> None:
    replay = opened(tmp_path / "r", seed=1, sampler=SAMPLERS[name](), flush=20)

    def go_on(replay: ReplayBuffer, number: int) -> None:
        if name == "recent":
            replay.sampler.observe(float(number))
        if number > 8:
            replay.sample(4)

    for number in range(30):  # each step has two rows, so the last one is the third that flushes
        go_on(replay, number)
        replay.add(step(number))
    kept = {key: np.copy(value) for key, value in replay.sampler.state_dict().items()}
    go_on(replay, 10**6)
    del replay  # as a kill leaves it
    with opened(tmp_path / "r", None, None, sampler=SAMPLERS[name]()) as again:
        found = again.sampler.state_dict()
        assert found.keys() == kept.keys()
        assert all(np.array_equal(found[key], kept[key]) for key in kept)


# Power cuts: pages of the files are those of the flush or later ones, each by itself; the journal is as it was.


def cut(before: Path, after: Path, seed: int) -> None:
    """Make of ``after`` what a power cut leaves, if ``before`` is a copy from the time of the last flush."""
    rng = np.random.default_rng(seed)
    for old in sorted(before.glob("*.safetensors")):
        new = after / old.name
        pages, later = np.fromfile(old, np.uint8), np.fromfile(new, np.uint8)
        for at in range(0, len(pages), 512):
            if rng.random() < 0.5:
                later[at : at + 512] = pages[at : at + 512]
        later.tofile(new)


@pytest.mark.parametrize("laps", [0, 1, 100])
def test_a_power_cut_many_laps_after_the_last_flush_leaves_an_empty_replay(laps: int, tmp_path: Path) -> None:
    replay = filled(tmp_path / "r", 20, capacity=2 * 16)
    replay.flush()
    completed = replay.stats()["completed"]
    for number in range(20, 20 + 16 * laps):
        replay.add(step(number))
    shutil.copytree(tmp_path / "r", tmp_path / "cut")
    with ReplayBuffer.open(tmp_path / "cut", verify=True) as again:
        assert again.stats()["completed"] == completed
        assert (len(again) == 0) == (laps > 0)
        again.add(step(0))
        again.check()


@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
@pytest.mark.parametrize("flushes", ["never again", "by rows", "by time"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 25))])
def test_a_power_cut_leaves_what_was_flushed_but_for_the_reserve(
    sampler: str, flushes: str, seed: int, tmp_path: Path
) -> None:
    policy = {"never again": None, "by rows": 32, "by time": timedelta(milliseconds=40)}[flushes]
    rng = np.random.default_rng(seed)
    replay = opened(tmp_path / "r", SCHEMA, 2 * 64, sampler=SAMPLERS[sampler](), seed=1)
    count = int(rng.integers(10, 200))
    for number in range(count):
        replay.add(step(number))
    replay.close()
    replay = opened(tmp_path / "r", None, None, flush=policy)
    last, flush = count, internals.durable(replay).flush  # type: ignore[union-attr]
    shutil.copytree(tmp_path / "r", tmp_path / "flushed")

    def copying(kind: Any = "flush") -> None:
        nonlocal last
        flush(kind)
        last = internals.writer(replay).ring.completed
        shutil.copytree(tmp_path / "r", tmp_path / "flushed", dirs_exist_ok=True)

    internals.durable(replay).flush = copying  # type: ignore[union-attr, method-assign]
    before = replay.stats()["completed"]
    more = int(rng.integers(1, 60))
    for number in range(count, count + more):
        replay.add(step(number))
        batch = replay.sample(4)
        rate(replay, batch)
    shutil.copytree(tmp_path / "r", tmp_path / "cut")  # other files than those that the journal names: so a power cut
    cut(tmp_path / "flushed", tmp_path / "cut", seed)
    kept = last if last != count else before
    with ReplayBuffer.open(tmp_path / "cut", verify=True) as again:
        assert again.stats()["completed"] == kept
        data = again.data()
        now = data["obs"][:, 0]
        assert torch.equal(data["reward"], now)
        assert torch.equal(data["action"], now.long())
        ended = data["terminated"] | data["truncated"]
        assert torch.equal(data["next_obs"][:, 0], now + torch.where(ended, 0.5, 1.0))
        replaced = 2 * (more if flushes == "never again" else 16) + 4  # rows of an env since the flush, at most
        wanted = min(count, 64 - 32 - replaced)  # of each env
        assert len(data) >= wanted, f"{len(data)} of {wanted}"
        for number in range(300):
            again.add(step(number))
        again.check()
