"""A replay in a process of its own: the batches of sample, in order; errors arrive, and nobody's death is missed."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from relive import Lanes, Prioritized, Recent, ReplayBuffer, ReplayServer, SamplesPerInsert, Uniform
from relive.errors import EmptyError, LifecycleError, ParameterError, WaitTimeoutError
from relive.processes import server as serving_process
from relive.processes.server import Owner, ServerOptions
from relive.processes.shared import SharedBlock
from relive.processes.wire import Address, Line, listen
from support import internals, twins
from support.cases import covering
from support.children import SECONDS, done, kill, started
from support.effort import in_ci
from support.forks import in_fork
from support.interrupts import broken_off
from support.served_batches import (
    DEPTHS,
    PlainAhead,
    draw_alike,
    errors_of,
    learn_in_rank,
    play_and_wait,
    replay_that_breaks,
    write_steps,
)
from support.shared_buffers import IMAGES, replay_of, written
from support.twins import SAMPLERS, SEQUENCES, VIEWS, Twin, batch_leaves, same_batches

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs memory that processes share")


@pytest.fixture(scope="module", autouse=True)
def _a_batch_was_made() -> None:
    """Children that are forked have all that the first batch of a process imports."""
    replay_of(4).sample(1)


def serve(make: Any, batch_size: int = 4, depth: int = 2, **options: Any) -> ReplayServer:
    return ReplayServer(make, batch_size, depth, context="fork", **options)


class Unreadable:
    """Can be pickled, and not unpickled."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise AttributeError("not over there")


@pytest.fixture(scope="module")
def server() -> Iterator[ReplayServer]:
    """One for a single learner at a time, that nobody changes."""
    with serve(partial(replay_of, 20), 4, 3) as server:
        yield server


def ends(pid: int) -> bool:
    """Whether a process ends within seconds."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z":
                return True
            os.kill(pid, 0)
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("missing", ["AF_UNIX", "SCM_RIGHTS"])
def test_a_system_without_unix_sockets_is_refused_with_another_way(missing: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(socket, missing)
    with pytest.raises(LifecycleError, match=r"Unix sockets.*use replay\.serve\(batch_size\)"):
        serve(partial(replay_of, 20))


# Batches


def world(sampler: Any, view: Any) -> Twin:
    extras = {"extras": twins.recurrent} if view in SEQUENCES.values() else {}
    plays = ("...", ".T.", "..U", "...", "...", "B..", "...")
    return Twin(3, 12, sampler=sampler(), view=view(), **extras).play(*plays)


CELLS = covering([*VIEWS, *SEQUENCES], SAMPLERS, DEPTHS)[::7]


@pytest.mark.parametrize(("view", "sampler", "depth"), CELLS)
def test_served_batches_are_those_of_a_plain_loop_that_draws_as_far_ahead(view: str, sampler: str, depth: int):
    plain = world(SAMPLERS[sampler], (VIEWS | SEQUENCES)[view])
    stream = PlainAhead(plain.buffer, 2, depth)
    with serve(lambda: world(SAMPLERS[sampler], (VIEWS | SEQUENCES)[view]).buffer, 2, depth) as server:
        learner = server.learner()
        for turn in range(12):
            batch, other = next(learner), next(stream)
            assert same_batches(batch, other), f"batch {turn}"
            if plain.buffer.has_priorities:
                learner.update_priorities(*errors_of(batch))
                plain.buffer.update_priorities(*errors_of(other))
            step = plain.step((".T.", "...", "..U")[turn % 3])
            learner.add(step)
            plain.buffer.add(step)
        assert learner.call("stats")["completed"] == plain.buffer.stats()["completed"]
        learner.call("check")


def test_learners_share_the_batches_out_in_turn():
    plain, server = replay_of(20), serve(partial(replay_of, 20), 4, 3, learners=2)
    with server, server.learner(0) as first, server.learner(1) as second:
        for turn in range(8):
            learner = (first, second)[turn % 2]
            assert same_batches(next(learner), plain.sample(4)), turn


def test_what_waits_counts_as_not_drawn(tmp_path: Path):
    plain = replay_of(20, sampler=Prioritized(beta=(0.4, 1.0, 9)))
    with serve(lambda: replay_of(20, sampler=Prioritized(beta=(0.4, 1.0, 9))), 4, 3) as server:
        learner = server.learner()
        for _ in range(5):
            assert same_batches(next(learner), plain.sample(4))
        assert learner.call("stats") == plain.stats()
        server.call("save", tmp_path / "save")
    assert draw_alike(ReplayBuffer.load(tmp_path / "save"), plain)


def test_a_batch_that_was_given_back_refuses_all_use_and_its_clone_does_not(server: ReplayServer):
    with server.learner(0) as learner:
        batch = next(learner)
        clone, weight = batch.clone(), torch.ones(4, requires_grad=True)
        loss = (weight * batch["reward"]).sum()
        next(learner)
        for use in (lambda: batch["reward"], lambda: list(batch.keys()), batch.clone, lambda: batch[0]):
            with pytest.raises(LifecycleError, match=r"given back.*keep batch.clone\(\)"):
                use()
        assert batch_leaves(clone)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_batch_of_sequences_refuses_use_too():
    with serve(lambda: world(Uniform, SEQUENCES["pairs"]).buffer) as server, server.learner() as learner:
        batch = next(learner)
        assert batch["hidden"] is not None
        assert len(batch["reward"])
        next(learner)
        for use in (lambda: batch["reward"], lambda: batch["mask"], lambda: batch.num_steps, lambda: list(batch)):
            with pytest.raises(LifecycleError, match="given back"):
                use()


def test_batches_may_change_their_form():
    with serve(lambda: world(Uniform, VIEWS["transition"]).buffer) as server, server.learner() as learner:
        assert len(next(learner)) == 4
        learner.call("check")
    plain = replay_of(20)
    with serve(partial(replay_of, 20), 4, 1) as server, server.learner() as learner:
        for _ in range(2):
            assert same_batches(next(learner), plain.sample(4))


# Errors


def test_errors_of_draws_come_in_their_turn_with_the_traceback_of_the_owner():
    with serve(replay_that_breaks, 4, 2) as server, server.learner() as learner:
        next(learner)
        learner.call("clear")
        next(learner)
        for _ in range(2):
            with pytest.raises(EmptyError, match="complete transition") as caught:
                next(learner)
        assert "serving.py" in str(caught.value.__cause__)
        for t in range(3):
            learner.add(written(IMAGES, 2, t))
        assert len(next(learner)["reward"]) == 4
        for t in range(3, 30):
            learner.add(written(IMAGES, 2, t))
        next(learner)
        with pytest.raises(ZeroDivisionError) as defect:
            next(learner)
        assert "breaks_after" in str(defect.value.__cause__)


def test_a_batch_without_memory_for_its_slot_is_an_error_and_comes_when_there_is_some(monkeypatch: pytest.MonkeyPatch):
    create, calls = SharedBlock.create, iter([True, False, True])

    def sometimes(nbytes: int) -> SharedBlock:
        if next(calls, False):
            raise OSError(24, "Too many open files")
        return create(nbytes)

    monkeypatch.setattr(SharedBlock, "create", sometimes)
    plain = replay_of(20)
    with serve(partial(replay_of, 20), 4, 2) as server, server.learner(timeout=SECONDS) as learner:
        for _ in range(2):
            with pytest.raises(OSError, match="Too many open files"):
                next(learner)
            assert same_batches(next(learner), plain.sample(4))
        assert same_batches(next(learner), plain.sample(4))
        assert learner.call("stats")["batches"] == 3


def test_errors_of_calls_come_back():
    with serve(partial(replay_of, 20), 4, 2) as server, server.learner() as learner:
        with pytest.raises(ParameterError, match="name of a method"):
            learner.call("__class__")
        with pytest.raises(ParameterError, match="name of a method"):
            server.call("nothing")
        assert same_batches(server.call("sample", 4), replay_of(20).sample(4))
        server.call("clear")
        with pytest.raises(EmptyError):
            server.call("sample", 4)
        learner.update_priorities([1], [1.0])
        learner.call("stats")
        with pytest.raises(LifecycleError, match="priorities"):
            learner.call("stats")


def test_what_cannot_pass_between_processes_is_an_error_of_that_call_alone():
    with serve(partial(replay_of, 20), 4, 2) as server, server.learner() as learner:
        for end in (server, learner):
            with pytest.raises(ParameterError, match=r"call\(name='episodes'\): its result cannot be pickled"):
                end.call("episodes")
            with pytest.raises(ParameterError, match=r"call\(name='sample'\): an argument cannot be pickled"):
                end.call("sample", lambda: 4)
            with pytest.raises(ParameterError, match=r"an argument cannot be unpickled.*not over there"):
                end.call("add", Unreadable())
            assert end.call("stats")["batches"] == 0
        with pytest.raises(ParameterError, match="add: a field cannot be pickled"):
            learner.add(obs=lambda: 0)
        with pytest.raises(ParameterError, match="update_priorities: an argument cannot be pickled"):
            learner.update_priorities(lambda: 0, [1.0])
        assert same_batches(next(learner), replay_of(20).sample(4))


def test_a_function_that_makes_no_replay_is_an_error_of_the_constructor():
    with pytest.raises(ZeroDivisionError) as caught:
        serve(lambda: 1 // 0)
    assert "run_owner" in str(caught.value.__cause__)
    with pytest.raises(LifecycleError, match="expected a function that makes a ReplayBuffer"):
        serve(lambda: 3)
    with pytest.raises(LifecycleError, match="exit code 3"):
        serve(lambda: os._exit(3))


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"depth": 0},
        {"depth": 10**9},
        {"learners": 0},
        {"learners": 1.5},
        {"context": "thread"},
        {"make": 3},
        {"lanes": 3},
        {"limit": 3},
    ],
)
def test_what_cannot_be_served_is_refused_before_a_process_starts(options: dict[str, Any]):
    with pytest.raises(ParameterError, match=next(iter(options))):
        ReplayServer(**{"make": replay_of, "batch_size": 4, "context": "fork"} | options)


def test_a_limit_that_allows_no_batch_or_no_step_of_the_lanes_is_refused_before_a_process_starts():
    with pytest.raises(ParameterError, match="64 rows at a time"):
        serve(replay_of, 64, limit=SamplesPerInsert(1, 1, error_buffer=32))
    lanes = Lanes(replay_of(0).schema, 1, num_envs=8, steps=2)
    with pytest.raises(ParameterError, match="8 steps at a time"):
        serve(replay_of, 4, lanes=lanes, limit=SamplesPerInsert(8, 1, error_buffer=32))


def test_a_rank_is_for_one_process_and_free_once_that_is_gone(server: ReplayServer):
    with pytest.raises(ParameterError, match=r"learner\(rank=1\)"):
        server.learner(1)
    with server.learner(0), pytest.raises(LifecycleError, match="learner 0 is taken"):
        server.learner(0)
    with server.learner(0) as learner:
        assert len(next(learner)["reward"]) == 4


def test_strangers_get_nothing_and_hold_nobody_back():
    with serve(partial(replay_of, 20)) as server, server.learner(timeout=SECONDS) as learner:
        token = internals.address(server).token.encode()
        for words in (b"", b"\0\0\0\5hello", b"\xff" * 40, b"\0\0\0\x22" + token + b" 7", b"\0\0"):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(internals.address(server).name)
                stranger.sendall(words)
                assert len(next(learner)["reward"]) == 4


def test_a_stranger_with_another_token_gets_no_rank():
    with serve(partial(replay_of, 20)) as server:
        name, token = internals.address(server).name, internals.address(server).token
        for wrong in (token[::-1], token[:-1], "", f"0 {token}"):
            line = Address(name, wrong).connect("0")
            with pytest.raises((EOFError, ConnectionError)):
                line.receive()
            line.close()
        assert internals.address(server).connect("0").receive()[0] == "welcome"


def test_a_stranger_who_sends_half_a_message_holds_nobody_back_for_long():
    server, stranger = serve(partial(replay_of, 20)), socket.socket(socket.AF_UNIX)
    with server, server.learner(timeout=SECONDS) as learner, stranger:
        stranger.connect(internals.address(server).name)
        stranger.sendall(b"\0\0")
        began = time.monotonic()
        for _ in range(6):  # more than were drawn before
            next(learner)
        assert time.monotonic() - began < SECONDS / 2


def test_a_stranger_who_sends_a_byte_now_and_then_holds_nobody_back_and_has_one_deadline(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(serving_process, "HELLO_TIMEOUT", 0.5)
    monkeypatch.setattr(serving_process, "TICK", 0.05)
    server, stranger, hung_up = serve(partial(replay_of, 20)), socket.socket(socket.AF_UNIX), threading.Event()

    def trickle() -> None:
        with suppress(OSError):
            for byte in b"\0\0\0\x22" + internals.address(server).token.encode():
                stranger.sendall(bytes([byte]))
                time.sleep(0.2)  # 7 s in all
            return
        hung_up.set()

    with server, server.learner(timeout=SECONDS) as learner, stranger:
        stranger.connect(internals.address(server).name)
        began, thread = time.monotonic(), threading.Thread(target=trickle)
        thread.start()
        for _ in range(6):  # more than were drawn before
            next(learner)
        assert time.monotonic() - began < 3.0
        thread.join(SECONDS)
        assert hung_up.is_set()


def rate_wrongly(server: ReplayServer, stop: bool) -> int:
    """Send errors for a transition that never was, more than a socket holds; how many came back as errors."""
    learner, refused = server.learner(0, timeout=SECONDS), 0
    if stop:  # so that the owner finds a full socket
        os.kill(server.pid, signal.SIGSTOP)
        threading.Timer(0.2, os.kill, (server.pid, signal.SIGCONT)).start()
    for _ in range(600):
        try:
            learner.update_priorities([10**9], [1.0])
        except ParameterError:
            refused += 1
    for _ in range(600):
        try:
            learner.take(SECONDS)
            break
        except ParameterError:
            refused += 1
    return refused


@pytest.mark.parametrize("stop", [in_ci(False), True])
def test_a_learner_whose_calls_all_fail_holds_up_neither_itself_nor_others(stop: bool):
    make = partial(replay_of, 20, sampler=Prioritized())
    with serve(make, 4, 2, learners=2) as server:
        assert in_fork(rate_wrongly, server, stop) > 4
        with server.learner(1, timeout=SECONDS) as second:
            assert len(next(second)["reward"]) == 4


NEXT = pickle.dumps(("next",))


@pytest.mark.parametrize("sent", [b"\0\0\0\7garbage", b"\0\0\4\0half a message", len(NEXT).to_bytes(4, "big") + NEXT])
def test_a_learner_that_sends_no_whole_message_loses_its_place_and_the_others_go_on(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(serving_process, "STALLED", 0.3)
    with serve(partial(replay_of, 20), 4, 2, learners=2) as server:
        first, second = server.learner(0, timeout=SECONDS), server.learner(1, timeout=SECONDS)
        assert [len(next(learner)["reward"]) for learner in (first, second)] == [4, 4]
        os.write(internals.line(second).fileno(), sent)
        for _ in range(20):
            assert len(next(first)["reward"]) == 4
        with pytest.raises(LifecycleError):
            take_all(second)
        with server.learner(1, timeout=SECONDS) as again:
            assert [len(next(learner)["reward"]) for learner in (first, again)] == [4, 4]


def test_an_owner_that_ends_closes_what_it_opened():
    listener, address = listen()
    control, owner_end = multiprocessing.Pipe()
    owner = Owner(replay_of(20), ServerOptions(4, 2, 1), listener, address, Line(owner_end))
    control.close()
    owner.run()
    assert [end.fileno() for end in (internals.waker(owner), internals.woken(owner), listener)] == [-1, -1, -1]


# Deaths


def take_all(learner: Any) -> None:
    for _ in learner:
        pass


def test_a_learner_hears_at_once_that_the_owner_was_killed():
    server = serve(partial(replay_of, 20))
    learner = server.learner()
    batch = next(learner)
    os.kill(server.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(LifecycleError, match="has ended"):
        take_all(learner)  # perhaps one that waits in its slot
    assert time.monotonic() - began < SECONDS / 2  # and not only when its own wait is over
    assert batch is not None
    with pytest.raises(LifecycleError, match="exit code -9"):
        server.call("stats")
    with pytest.raises(LifecycleError):
        server.learner()
    server.close()


def test_a_learner_that_is_killed_frees_its_place_and_holds_nobody_back():
    with serve(partial(replay_of, 20), 4, 2, learners=2) as server:
        child = started("fork", play_and_wait, server, 1)
        first = server.learner(0, timeout=SECONDS)
        for _ in range(3):
            next(first)
        kill(child)
        for _ in range(20):
            next(first)
        with server.learner(1, timeout=SECONDS) as second:
            for _ in range(6):
                assert [len(next(learner)["reward"]) for learner in (first, second)] == [4, 4]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_owner_ends_with_the_process_that_started_it(how: signal.Signals):
    out, into = os.pipe()
    starter = os.fork()
    if not starter:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            server = serve(partial(replay_of, 20))
            learner = server.learner()
            next(learner)
            os.write(into, f"{server.pid}\n".encode())
            while True:
                next(learner)
        except BaseException:
            os._exit(1)
    os.close(into)
    pid = int(os.read(out, 100))  # nothing comes, and this fails, if the starter has ended
    os.kill(starter, how)
    os.waitpid(starter, 0)
    assert ends(pid)
    os.close(out)


def test_close_and_drop_end_the_process():
    server = serve(partial(replay_of, 20))
    server.close()
    assert ends(server.pid)
    server = serve(partial(replay_of, 20))
    pid = server.pid
    del server
    assert ends(pid)


def shared_maps() -> int:
    """How much shared memory of relive this process has."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:relive-")


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux knows of a process")
def test_no_memory_and_no_open_file_is_left():
    gc.collect()
    before, files, shm = shared_maps(), len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    with serve(partial(replay_of, 20), 4, 3) as server, server.learner() as learner:
        for _ in range(8):
            next(learner)
        assert shared_maps() == before + 3
        assert set(os.listdir("/dev/shm")) <= shm
    del learner, server
    gc.collect()
    assert shared_maps() == before
    assert len(os.listdir("/proc/self/fd")) <= files


def test_a_forked_child_needs_a_learner_of_its_own(server: ReplayServer):
    learner = server.learner(0)
    next(learner)

    def child() -> None:
        with pytest.raises(LifecycleError, match="another process"):
            next(learner)

    in_fork(child)
    next(learner)
    learner.close()


def test_a_call_that_is_broken_off_leaves_a_learner_that_goes_on_or_says_that_it_cannot():
    with serve(partial(replay_of, 20), 4, 2) as server:
        learner, at, tried = server.learner(timeout=SECONDS), 0, True
        while tried:
            tried = broken_off(partial(next, learner), at)
            try:
                assert len(next(learner)["reward"]) == 4
            except LifecycleError:
                learner.close()
                learner = _again(server)
                assert len(next(learner)["reward"]) == 4
            at += 3


def _again(server: ReplayServer) -> Any:
    """A new learner, once the owner has seen that the old one is gone."""
    until = time.monotonic() + SECONDS
    while True:
        try:
            return server.learner(timeout=SECONDS)
        except LifecycleError:
            assert time.monotonic() < until
            time.sleep(0.01)


# With lanes and limits


def test_steps_come_through_lanes_and_a_limit_holds_the_draws_back():
    lanes, limit = Lanes(IMAGES, writers=2, num_envs=1, steps=8), SamplesPerInsert(2, 10, 40)
    with serve(partial(replay_of, 0, 200), 4, 2, lanes=lanes, limit=limit) as server:
        learner = server.learner(timeout=0.2)
        with pytest.raises(WaitTimeoutError, match=r"no batch came within 0.2 s"):
            next(learner)
        writers = [started("fork", write_steps, lanes, k, 100) for k in range(2)]
        for _ in range(100):
            assert len(learner.take(SECONDS)["reward"]) == 4
            stats = limit.stats()
            assert -40 <= (max(stats["inserts"], 10) - 10) * 2 - stats["samples"] <= 40
        for child in writers:
            done(child)
        stats = limit.stats()
        assert stats["insert_waits"] + stats["sample_waits"] > 0
        assert learner.call("stats")["completed"] + 2 <= stats["inserts"] <= 200


def test_a_function_that_a_spawned_owner_could_not_get_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"by pickle, which fails: .*lambda.*; define make in a module.*'fork'"):
        ReplayServer(lambda: replay_of(4), 4)


@pytest.mark.slow
def test_a_spawned_owner_and_spawned_learners_serve_the_same_batches(tmp_path: Path):
    with ReplayServer(partial(replay_of, 20, sampler=Recent(0.9, 2)), 4, 2, learners=2) as server:
        children = [started("spawn", learn_in_rank, server, rank, tmp_path) for rank in range(2)]
        for child in children:
            child.join(2 * SECONDS)  # each imports torch
            done(child)
    plain, found = replay_of(20, sampler=Recent(0.9, 2)), [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for turn in range(20):
        assert torch.equal(found[turn % 2][turn // 2], plain.sample(4)["index"])
