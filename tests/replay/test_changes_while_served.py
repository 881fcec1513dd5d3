"""What a user changes while batches wait for their learner stays as it is when nobody takes them."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from relive import Fresh, NStep, Prioritized, Recent, ReplayBuffer, Sequence, Uniform
from support import internals
from support.twins import Twin, same_batches


def twin(sampler: Any, view: Any = None, steps: int = 20, rows: int = 60) -> Twin:
    return Twin(2, rows, sampler=sampler, view=NStep(1) if view is None else view).play(*[".."] * steps)


def test_what_was_skipped_stays_skipped_when_batches_that_nobody_took_are_put_back() -> None:
    one = twin(Fresh())
    sampler, served = one.buffer.sampler, one.buffer.serve(5, depth=3)
    next(served)
    sampler.skip()
    assert (sampler.served, sampler.waiting, sampler.lost) == (0, 0, 0)
    one.play("..", "..")
    served.close()
    assert (sampler.served, sampler.waiting, sampler.lost) == (0, 4, 0)
    assert one.buffer.sample(4)["index"].tolist() == [38, 39, 40, 41]


def test_what_came_after_a_skip_is_served_again_if_nobody_took_it() -> None:
    one = twin(Fresh())
    sampler, served = one.buffer.sampler, one.buffer.serve(4, depth=2)
    next(served)
    sampler.skip()
    one.play("..", "..")
    next(served)  # drawn before the skip, while the first was in use
    assert next(served)["index"].tolist() == [38, 39, 40, 41]
    one.play("..", "..")
    next(served)  # drawn before these came
    len(one.buffer)  # one more batch is drawn ahead, of four new ones
    assert (sampler.served, sampler.waiting) == (8, 0)
    served.close()
    assert (sampler.served, sampler.waiting, sampler.lost) == (4, 4, 0)


def test_batches_that_are_due_are_drawn_before_a_skip() -> None:
    """Else it would depend on when the thread runs whether they have new rows."""
    for _ in range(5):
        one, plain = twin(Fresh()), twin(Fresh())
        with one.buffer.serve(5, depth=3) as served:
            ahead = [plain.buffer.sample(5) for _ in range(3)]
            batches = [next(served)]
            one.buffer.sampler.skip()
            plain.buffer.sampler.skip()
            batches += [next(served) for _ in range(4)]
            ahead += [plain.buffer.sample(5) for _ in range(2)]
            assert all(same_batches(x, y) for x, y in zip(batches, ahead, strict=True))


def test_a_skip_waits_for_a_draw_of_another_thread() -> None:
    one = twin(Fresh())
    with one.buffer.lock:
        other = threading.Thread(target=one.buffer.sampler.skip)
        other.start()
        other.join(0.05)
        assert other.is_alive()
        assert one.buffer.sample(5)["index"].tolist() == [*range(5)]
    other.join()
    assert (one.buffer.sampler.served, one.buffer.sampler.waiting) == (0, 0)


def test_a_copy_that_draws_waiting_batches_again_has_skipped_what_was_skipped(tmp_path: Path) -> None:
    one = twin(Fresh())
    with one.buffer.serve(5, depth=3) as served:
        next(served)
        one.buffer.sampler.skip()
        one.play("..")
        one.buffer.save(tmp_path / "s")
        for again in (pickle.loads(pickle.dumps(one.buffer)), ReplayBuffer.load(tmp_path / "s")):
            assert (again.sampler.served, again.sampler.waiting, again.sampler.lost) == (0, 2, 0)
        assert (one.buffer.sampler.served, one.buffer.sampler.waiting) == (0, 2)


@pytest.mark.parametrize("views", [(NStep(1), Sequence(4)), (Sequence(4, overlap="none"), NStep(1))])
def test_no_row_counts_as_lost_if_a_view_with_other_windows_comes_while_batches_wait(views: Any) -> None:
    one = twin(Fresh(), views[0])
    sampler, served = one.buffer.sampler, one.buffer.serve(2, depth=4)
    behind = max(next(served)["index"].tolist()) // 2
    one.buffer.view = views[1]
    one.play("..", "..")
    served.close()
    assert sampler.served == 2
    assert sampler.lost == 0
    new = [index for index in one.buffer.data()["index"].tolist() if index // 2 > behind]
    assert one.buffer.sample(sampler.waiting)["index"].tolist() == new
    assert sampler.lost == sampler.waiting == 0
    one.play(*[".."] * 3)
    one.buffer.clear()
    assert sampler.lost > 0


@pytest.mark.parametrize("how", ["close", "save", "pickle"])
def test_a_seed_that_is_set_while_batches_wait_draws_from_its_number_0_on(how: str, tmp_path: Path) -> None:
    one, plain = twin(Uniform()), twin(Uniform())
    served = one.buffer.serve(4, depth=3)
    next(served)
    one.buffer.seed = plain.buffer.seed = 5
    again: Any = one.buffer
    if how == "close":
        served.close()
    elif how == "save":
        one.buffer.save(tmp_path / "s")
        again = ReplayBuffer.load(tmp_path / "s")
    else:
        again = pickle.loads(pickle.dumps(one.buffer))
    assert all(same_batches(again.sample(4), plain.buffer.sample(4)) for _ in range(3))


def test_a_seed_that_is_set_while_batches_wait_comes_after_those_that_are_due() -> None:
    for _ in range(5):
        one, plain = twin(Uniform()), twin(Uniform())
        with one.buffer.serve(4, depth=3) as served:
            ahead = [plain.buffer.sample(4) for _ in range(3)]
            batches = [next(served)]
            one.buffer.seed = plain.buffer.seed = 5
            batches += [next(served) for _ in range(4)]
            ahead += [plain.buffer.sample(4) for _ in range(2)]
            assert all(same_batches(x, y) for x, y in zip(batches, ahead, strict=True))


def test_parameters_that_are_set_while_batches_wait_stay() -> None:
    one = twin(Prioritized(beta=(0.4, 1.0, 10)))
    sampler, served = one.buffer.sampler, one.buffer.serve(4, depth=4)
    next(served)
    sampler.alpha, sampler.beta, sampler.largest_error = 0.9, (0.2, 0.8, 20), 7.0
    served.close()
    assert (sampler.alpha, sampler.beta, sampler.largest_error) == (0.9, (0.2, 0.8, 20), 7.0)
    assert sampler.current_beta == pytest.approx(0.2 + 0.6 / 20)  # one batch was taken

    recent = twin(Recent(0.9, 2, adapt=True))
    served = recent.buffer.serve(4, depth=4)
    next(served)
    for episode in range(30):
        recent.buffer.sampler.observe(float(episode % 7))
    eta = recent.buffer.sampler.eta
    served.close()
    assert recent.buffer.sampler.eta == eta != 0.9


def test_a_sampler_outlives_its_replay_and_refuses_a_skip_once_its_files_are_closed(tmp_path: Path) -> None:
    sampler = Fresh()
    one = twin(sampler)
    internals.ring(one.buffer)
    del one
    sampler.skip()
    assert sampler.waiting == 0
