"""Batches that a thread draws ahead: exactly those of a plain loop, whatever the depth and whenever the thread runs."""

from __future__ import annotations

import gc
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from relive import Prioritized, Recent, ReplayBuffer, Uniform, WithoutReplacement
from relive.errors import EmptyError, LifecycleError, ParameterError, WaitTimeoutError
from support import internals, twins
from support.cases import covering
from support.forks import in_fork
from support.served_batches import DEPTHS, PlainAhead, draw_alike, errors_of
from support.shared_buffers import IMAGES, replay_of, written
from support.twins import SAMPLERS, SEQUENCES, VIEWS, Twin, same_batches

PLAYS = ("...", ".T.", "..U", "...", "...", "B..", "...")


def replay_step(t: int) -> Any:
    """What ``replay_of`` adds as step t."""
    return written(IMAGES, 2, t)


def twin(sampler: Any, view: Any, **options: Any) -> Twin:
    extras = {"extras": twins.recurrent} if view in SEQUENCES.values() else {}
    return Twin(3, 12, sampler=sampler(), view=view(), **extras, **options).play(*PLAYS)


def assert_served_as_by_a_plain_loop(served: Twin, plain: Twin, depth: int, turns: int) -> None:
    """Learn, rate and add in both; every batch is the same."""
    rows = 1 if isinstance(plain.buffer.sampler, WithoutReplacement) else 2  # there may be only one sequence
    stream, beside = served.buffer.serve(rows, depth), PlainAhead(plain.buffer, rows, depth)
    with stream:
        for turn in range(turns):
            batch, other = next(stream), next(beside)
            assert same_batches(batch, other), f"batch {turn} at depth {depth}"
            if turn % 3:
                time.sleep(0.001 * (turn % 2))  # the thread is sometimes first, sometimes the next call is
            for twin in (served, plain):
                if twin.buffer.has_priorities:
                    twin.buffer.update_priorities(*errors_of(batch))
                twin.add((".T.", "...", "..U")[turn % 3])
    served.check()


CELLS = covering([*VIEWS, *SEQUENCES], SAMPLERS, DEPTHS)


@pytest.mark.parametrize(("view", "sampler", "depth"), CELLS)
def test_served_batches_are_those_of_a_plain_loop_that_draws_as_far_ahead(view: str, sampler: str, depth: int):
    makers = SAMPLERS[sampler], (VIEWS | SEQUENCES)[view]
    assert_served_as_by_a_plain_loop(twin(*makers), twin(*makers), depth, 12)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("sampler", [Uniform, WithoutReplacement, lambda: Prioritized(beta=(0.4, 1.0, 9)), Recent])
def test_a_replay_that_stays_as_it_is_gives_the_batches_of_sample(sampler: Any, depth: int):
    served, plain = replay_of(20, sampler=sampler()), replay_of(20, sampler=sampler())
    with served.serve(4, depth) as stream:
        assert all(same_batches(next(stream), plain.sample(4)) for _ in range(10))
    assert draw_alike(served, plain)  # what nobody took counts as not drawn
    assert served.stats() == plain.stats()


def test_a_number_of_batches_is_one_round_of_updates():
    served, plain = (replay_of(25, sampler=Recent(0.6, c_min=2, adapt=False)) for _ in range(2))
    batches = list(served.serve(4, 3, count=7))
    assert len(batches) == 7
    assert all(same_batches(x, y) for x, y in zip(batches, plain.batches(7, 4), strict=True))
    assert draw_alike(served, plain)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("sampler", [Uniform, WithoutReplacement, lambda: Prioritized(beta=(0.4, 1.0, 9))])
def test_what_is_saved_or_copied_while_batches_wait_draws_them_again(sampler: Any, depth: int, tmp_path: Path):
    replay, plain = replay_of(20, sampler=sampler()), replay_of(20, sampler=sampler())
    with replay.serve(4, depth) as stream:
        for _ in range(3):
            assert same_batches(next(stream), plain.sample(4))
        replay.save(tmp_path / "save")
        loaded, copied = ReplayBuffer.load(tmp_path / "save"), pickle.loads(pickle.dumps(replay))
        ours = [next(stream) for _ in range(5)]
    for again in (loaded, copied):
        assert again.stats()["batches"] == 3
        assert all(same_batches(batch, again.sample(4)) for batch in ours)


def test_batches_drawn_directly_in_between_have_numbers_of_their_own():
    replay, plain = replay_of(20), replay_of(20)
    stream, numbers = replay.serve(4, 3), [plain.sample(4) for _ in range(9)]
    assert same_batches(next(stream), numbers[0])
    assert same_batches(replay.sample(4), numbers[3])
    assert [same_batches(next(stream), numbers[k]) for k in (1, 2, 4)] == [True] * 3
    stream.close()
    assert replay.stats()["batches"] == 5


def test_it_says_which_steps_a_batch_has_seen():
    replay = replay_of(10)
    with replay.serve(4, 2) as stream:
        next(stream)
        assert stream.completed == replay.stats()["completed"]
        before = stream.completed
        replay.add(replay_step(10))
        next(stream)
        assert stream.completed == before
        next(stream)
        assert stream.completed == before + 2


def test_the_error_of_a_draw_comes_in_its_turn_and_serving_goes_on():
    replay = replay_of(10)
    stream = replay.serve(4, 3)
    good = next(stream)
    len(replay)  # whatever is due has been drawn
    replay.clear()
    assert [len(next(stream)["reward"]) for _ in range(2)] == [4, 4]
    for _ in range(2):
        with pytest.raises(EmptyError, match="complete transition"):
            next(stream)
    replay.add(replay_step(0))
    replay.add(replay_step(1))
    assert len(next(stream)["reward"]) == len(good["reward"])


def test_a_defect_of_a_view_reaches_the_learner_with_its_traceback():
    replay = replay_of(10)
    stream = replay.serve(4, 2)
    next(stream)
    len(replay)

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("mine")

    internals.ring(replay).windows = broken
    next(stream)
    time.sleep(0.05)
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        next(stream)
    assert any(entry.name == "broken" for entry in caught.traceback)


def test_what_is_dropped_or_closed_leaves_no_thread_and_lets_others_serve():
    replay = replay_of(10)
    before = threading.active_count()
    for batch in replay.serve(4, 4):
        assert len(batch["reward"]) == 4
        break
    gc.collect()
    with replay.serve(4, 2) as stream:
        next(stream)
        with pytest.raises(LifecycleError, match="served already"):
            replay.serve(4)
    assert list(stream) == []
    assert replay.stats()["batches"] == 2
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_a_learner_may_hold_the_lock_of_the_replay():
    replay = replay_of(10)
    with replay.lock, replay.serve(4, 3) as stream:
        assert len([next(stream) for _ in range(5)]) == 5


def test_a_forked_child_serves_on_without_the_thread():
    replay = replay_of(20)
    stream = replay.serve(4, 3)
    next(stream)
    assert in_fork(lambda: [len(next(stream)["reward"]) for _ in range(6)]) == [4] * 6
    assert len(next(stream)["reward"]) == 4


def test_adding_from_another_thread_keeps_every_batch_whole():
    world = Twin(2, 40, sampler=Prioritized()).play(*[".."] * 30)
    stop = threading.Event()

    def add() -> None:
        while not stop.is_set():
            world.add("..")

    adder = threading.Thread(target=add)
    with world.buffer.serve(8, 3) as stream:
        adder.start()
        for _ in range(60):
            batch = next(stream)
            assert len(batch["reward"]) == 8
            world.buffer.update_priorities(*errors_of(batch))
        stop.set()
        adder.join()
    world.check()


def test_two_threads_that_take_from_one_stream_get_each_batch_once():
    replay, plain, taken = replay_of(20), replay_of(20), list[Any]()
    with replay.serve(4, 3) as stream:

        def take() -> None:
            taken.extend(next(stream) for _ in range(60))

        threads = [threading.Thread(target=take) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    wanted = {plain.sample(4)["index"].numpy().tobytes() for _ in range(120)}
    found = [batch["index"].numpy().tobytes() for batch in taken]
    assert len(found) == 120
    assert set(found) == wanted


@pytest.mark.parametrize(
    "arguments", [{"depth": 0}, {"batch_size": 0}, {"count": 0}, {"timeout": -1.0}, {"timeout": "1"}]
)
def test_what_cannot_be_served_is_refused_at_once(arguments: dict[str, Any]):
    replay = replay_of(10)
    with pytest.raises(ParameterError, match=next(iter(arguments))):
        replay.serve(**{"batch_size": 4} | arguments)
    replay.serve(4).close()


class Gate:
    """A limit that allows what it is told to."""

    def __init__(self) -> None:
        self.allowed, self.lock = 0, threading.Condition()

    def try_to_sample(self, count: int, timeout: float | None = 0.0) -> bool:
        with self.lock:
            if not self.lock.wait_for(lambda: self.allowed >= count, timeout):
                return False
            self.allowed -= count
            return True

    def uncount(self, *, inserts: int = 0, samples: int = 0) -> None:
        self.open(samples)

    def open(self, rows: int) -> None:
        with self.lock:
            self.allowed += rows
            self.lock.notify_all()


def test_a_limit_holds_batches_back_and_gets_back_what_nobody_took():
    replay, plain, gate = replay_of(20), replay_of(20), Gate()
    with replay.serve(4, 3, limit=gate, timeout=0.05) as stream:
        with pytest.raises(WaitTimeoutError, match="no batch of 4 within"):
            next(stream)
        gate.open(8)
        assert [same_batches(next(stream), plain.sample(4)) for _ in range(2)] == [True] * 2
        threading.Timer(0.02, gate.open, (400,)).start()
        stream._timeout = 5.0
        assert same_batches(next(stream), plain.sample(4))
    assert gate.allowed == 408 - 12
    assert draw_alike(replay, plain)
