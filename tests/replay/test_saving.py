"""Saves of buffers: those of former releases load, they take little memory and time of others, and forged ones fail."""

from __future__ import annotations

import json
import os
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attacks import forger
from relive import (
    Chunks,
    Field,
    FrameStack,
    Mixture,
    NStep,
    Prioritized,
    Recent,
    ReplayBuffer,
    RolloutBuffer,
    Schema,
    Sequence,
    Uniform,
    WithoutReplacement,
)
from relive import files as persist
from relive.errors import FileFormatError, InvariantError, ParameterError
from relive.memory.allocator import small_pages, zeroed
from support import internals
from support.replays import PLAIN
from support.twins import SAMPLERS, Twin, same_batches

FIXTURES = Path(__file__).parents[1] / "fixtures" / "saves-1"
FLAT = Schema(
    {
        "obs": (17,),
        "action": (6,),
        "reward": (),
        "terminated": Field((), torch.bool),
        "truncated": Field((), torch.bool),
    }
)


def filled(rows: int, num_envs: int = 1, **options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(FLAT, rows, num_envs, seed=0, **options)
    steps = rows // num_envs
    fields = {
        name: np.zeros((steps, num_envs, *field.shape), str(field.dtype).removeprefix("torch."))
        for (name,), field in FLAT.leaves.items()
    }
    buffer.extend(fields)
    return buffer


# Former releases.


def test_a_replay_saved_by_an_earlier_release_goes_on() -> None:
    buffer = ReplayBuffer.load(FIXTURES / "replay")
    buffer.check()
    assert buffer.data()["index"].tolist() == [22, 24, 23, 27, 28, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39]
    assert buffer.sample(4)["index"].tolist() == [38, 39, 39, 39]
    buffer.add(forger.step(20, True))
    buffer.check()


def test_a_rollout_saved_by_an_earlier_release_goes_on() -> None:
    rollout = RolloutBuffer.load(FIXTURES / "rollout")
    assert rollout["reward"].tolist() == [[float(t), 1000.0 + t] for t in range(6)]
    assert rollout["advantage"].tolist() == [[1.0, 1.0]] * 6
    assert [len(batch["reward"]) for batch in rollout.minibatches(5, epochs=1, fields=["reward"])] == [5, 5, 2]


def test_a_replay_of_version_2_in_segments_goes_on_with_the_state_of_its_learner() -> None:
    buffer = ReplayBuffer.load(FIXTURES.with_name("saves-2") / "replay")
    buffer.check()
    assert buffer.data()["index"].tolist() == [22, 24, 23, 27, 28, *range(30, 44)]
    assert buffer.sample(4)["index"].tolist() == [28, 22, 31, 41]
    assert buffer.extra["steps"] == 22
    assert buffer.extra["model"]["weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    buffer.add(forger.step(22, True))
    buffer.check()


def test_a_rollout_of_version_2_goes_on() -> None:
    rollout = RolloutBuffer.load(FIXTURES.with_name("saves-2") / "rollout")
    assert rollout.extra == ("epoch", 3)
    assert rollout["reward"].tolist() == [[float(t), 1000.0 + t] for t in range(6)]


@pytest.mark.parametrize("release", ["saves-1", "saves-2"])
def test_a_rollout_saved_with_every_second_state_has_these_and_no_others(release: str, tmp_path: Path) -> None:
    rollout = RolloutBuffer.load(FIXTURES.with_name(release) / "rollout")
    states = rollout["hidden", "h"]
    assert states.shape == (6, 2, 1, 4)
    assert [row.unique().tolist() for row in states[::2]] == [[0.0], [2.0], [4.0]]
    assert states[1::2].isnan().all()
    rollout.save(tmp_path / "save")
    again = RolloutBuffer.load(tmp_path / "save")["hidden", "h"]
    assert torch.equal(again.view(torch.int32), states.view(torch.int32))


# Memory and waiting.


def test_saving_takes_a_few_pieces_of_memory_on_top(tmp_path: Path) -> None:
    for num_envs in (1, 50):
        buffer = filled(200_000, num_envs)
        tracemalloc.start()
        buffer.save(tmp_path / "save")
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 12 * 2**20 < buffer.nbytes, f"{most:,} bytes on top of {buffer.nbytes:,}"


def test_others_may_go_on_while_the_disk_takes_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twin, added = Twin(2, 30, dress="mixed").play(*[".."] * 20), threading.Event()
    step = twin.step("..")
    other = threading.Thread(target=lambda: (twin.buffer.add(step), added.set()))

    first = threading.Lock()

    def slow(descriptor: int) -> None:
        if first.acquire(blocking=False):
            other.start()
        assert added.wait(10)

    monkeypatch.setattr("os.fsync", slow)
    before = twin.buffer.data()
    (tmp_path / "save").mkdir()
    twin.buffer.save(tmp_path / "save")
    other.join()
    loaded = ReplayBuffer.load(tmp_path / "save").data()
    assert loaded["index"].tolist() == before["index"].tolist()
    assert torch.equal(loaded["obs", "camera"], before["obs", "camera"])
    twin.check()


def test_a_small_save_of_a_buffer_that_promises_much_takes_little_memory(tmp_path: Path) -> None:
    envs, promised = 20, 2 * 10**5
    filled(20 * envs, envs, sampler=Prioritized()).save(tmp_path / "small")
    tensors, content = persist.read(tmp_path / "small")
    content["rows_per_env"] = promised
    persist.write(tmp_path / "save", tensors, content)
    ReplayBuffer.load(tmp_path / "small").sample(4)
    forger.memory()
    before = forger.memory()
    buffer = ReplayBuffer.load(tmp_path / "save")
    most = forger.memory() - before
    assert buffer.nbytes > 2**28
    assert most < 2**25, f"{most:,} bytes"
    buffer.check()


def test_a_small_save_of_a_rollout_that_promises_much_takes_little_memory(tmp_path: Path) -> None:
    rollout = RolloutBuffer(FLAT.extend(value=()), 4, 2, seed=0)
    rollout.save(tmp_path / "small")
    tensors, content = persist.read(tmp_path / "small")
    persist.write(tmp_path / "save", tensors, {**content, "num_steps": 10**7})
    forger.memory()
    before = forger.memory()
    loaded = RolloutBuffer.load(tmp_path / "save")
    assert forger.memory() - before < 2**25
    loaded.add(obs=np.zeros((2, 17)), action=np.zeros((2, 6)), reward=[0.0, 0.0], terminated=[False] * 2,
               truncated=[False] * 2, value=[0.0, 0.0])  # fmt: skip
    assert loaded["mask"].all()
    assert loaded["final_value"].isnan().all()


def test_memory_on_small_pages_is_zeroed_and_may_be_written_later() -> None:
    with small_pages():
        memory = zeroed(2**22)
        memory[5] = 1
    memory[2**21 :] = 2
    assert memory[:8].tolist() == [0, 0, 0, 0, 0, 1, 0, 0]
    assert memory[-1] == 2


@pytest.mark.slow
def test_saving_a_million_rows_takes_half_as_long_again_as_writing_them(tmp_path: Path) -> None:
    """A machine that does other things meanwhile measures anything: the best of several, and a wide margin."""
    buffer = filled(10**6)
    rows = memoryview(internals.ring(buffer).store.target.reshape(-1))
    ours, raw = list[float](), list[float]()
    for k in range(7):
        begun = time.perf_counter()
        with (tmp_path / f"raw{k}").open("wb", buffering=0) as file:
            for low in range(0, len(rows), 2**20):
                file.write(rows[low : low + 2**20])
            os.fsync(file.fileno())
        raw.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        buffer.save(tmp_path / f"save{k}")
        ours.append(time.perf_counter() - begun)
    assert min(ours) < 2.5 * min(raw), f"{min(ours):.3f} s, raw {min(raw):.3f} s"


# Forged: each in its own right what was found by chance. Thousands more are in attacks/test_forged_saves.py.

Change = Callable[[dict[str, Any], Any], object]


def shift(content: Any, column: int, by: int, env: int = 0) -> None:
    content["state"][env][column] += by


def later(content: Any, rows: int) -> None:
    """All rows of the first env, at the same places, have numbers so much higher."""
    by = rows // forger.ROWS * forger.ROWS
    shift(content, 0, by)
    shift(content, 1, by)


def meta(tensors: dict[str, Any], content: Any, name: str, place: int, value: int) -> None:
    array = forger.fields_of(tensors, content)[name,]
    (array.view(np.uint8) if array.dtype == np.bool_ else array)[place] = value


def shifted(tensors: dict[str, Any], content: Any, by: int) -> None:
    """The oldest episode of the first env begins at another step."""
    steps = forger.fields_of(tensors, content)["_step",]
    end = int(np.argmax(np.diff(steps) != 1)) + 1
    steps[:end] += by


def with_order(*order: int) -> Change:
    return lambda tensors, content: tensors.update({"sampler.order": torch.tensor(order)})


def few_states(tensors: Any, content: Any, every: int, states: torch.Tensor) -> None:
    """As saves of former versions were, with the states of every k-th step alone."""
    del tensors["hidden.h"]
    tensors[".states.hidden.h"] = states
    content["hidden_every"] = every


FORGED: dict[str, tuple[str, Change]] = {
    "an epoch of indices never issued": ("epochs, transition, shared", with_order(10**9, 3)),
    "an epoch of negative indices": ("epochs, transition, shared", with_order(-1)),
    "an epoch with an index twice": ("epochs, transition, shared", with_order(30, 30)),
    "an epoch of two axes": (
        "epochs, transition, shared",
        lambda tensors, content: tensors.update({"sampler.order": torch.tensor([[30, 31]])}),
    ),
    "a negative step": ("uniform, sequence, shared", lambda t, c: meta(t, c, "_step", 0, -5)),
    "negative steps in all of the oldest episode": ("uniform, sequence, shared", lambda t, c: shifted(t, c, -100)),
    "a step before the first": ("uniform, sequence, shared", lambda t, c: meta(t, c, "_step", 0, 10**6)),
    **{
        f"cursors at 2**{power}": ("uniform, transition, shared", lambda t, c, power=power: later(c, 2**power))
        for power in (52, 53, 60, 61)
    },
    "a next step far on": ("uniform, sequence, shared", lambda t, c: shift(c, 2, 2**61)),
    "a next step of another episode": ("uniform, sequence, shared", lambda t, c: shift(c, 2, 1)),
    "completed, far on": (
        "uniform, transition, shared",
        lambda t, c: c["counters"].__setitem__(0, c["counters"][0] + 2**61),
    ),
    "counted, far on": ("uniform, transition, shared", lambda t, c: shift(c, 3, 2**61)),
    "counts of text": ("uniform, transition, shared", lambda t, c: c.update(counts=["1", 2, 3])),
    "counts of floats": ("uniform, transition, shared", lambda t, c: c.update(counts=[0.5, 2, 3])),
    "two counts": ("uniform, transition, shared", lambda t, c: c.update(counts=[1, 2])),
    "a view as the sampler": ("uniform, transition, shared", lambda t, c: c.update(sampler=c["view"])),
    "a sampler as the view": ("uniform, transition, shared", lambda t, c: c.update(view=c["sampler"])),
    "a sampler within a view": (
        "uniform, stack, shared",
        lambda t, c: c["view"].update(window={"part": "Uniform"}),
    ),
    "a function within a view": ("uniform, 3-step, shared", lambda t, c: c["view"].update(each_reward=[1])),
    "sequences of 10**9": ("uniform, sequence, shared", lambda t, c: c["view"].update(length=10**9)),
    "a burn-in of 10**9": ("uniform, sequence, shared", lambda t, c: c["view"].update(burn_in=10**9)),
    "stacks of 10**9": ("uniform, stack, shared", lambda t, c: c["view"].update(depth=10**9)),
    "windows of 2**40": ("uniform, 3-step, shared", lambda t, c: c["view"].update(n=2**40)),
    "windows of 10**30": ("uniform, 3-step, shared", lambda t, c: c["view"].update(n=10**30)),
    "a million envs": ("uniform, transition, shared", lambda t, c: c.update(num_envs=10**6)),
    "rows beyond all memory": ("uniform, transition, shared", lambda t, c: c.update(rows_per_env=2**40)),
    "a flag of 2": ("uniform, transition, shared", lambda t, c: meta(t, c, "terminated", 3, 2)),
    "an error below 0": (
        "prioritized, transition, shared",
        lambda t, c: t["sampler.errors"].fill_(-1),
    ),
    "the largest error as text": (
        "prioritized, transition, shared",
        lambda t, c: c["sampler_state"].update(largest="1"),
    ),
    "returns without end": (
        "recent, transition, shared",
        lambda t, c: t.update({"sampler.returns": torch.zeros(10**5, dtype=torch.float64)}),
    ),
    "slopes of three": (
        "recent, transition, shared",
        lambda t, c: t.update({"sampler.steepest": torch.zeros(3, dtype=torch.float64)}),
    ),
    "a tensor that no save has": ("uniform, transition, shared", lambda t, c: t.update(more=torch.zeros(3))),
    "more ended envs than there are": ("rollout, plain", lambda t, c: t.update({".ended": torch.zeros(3) > 0})),
    "a column that spreads": ("rollout, plain", lambda t, c: t.update(advantage=torch.zeros(7, 1))),
    "a column within a column": ("rollout, plain", lambda t, c: c.update(attached=[["reward", "x"]])),
    "states that spread": ("rollout, states", lambda t, c: few_states(t, c, 2, torch.zeros(5, 1, 1, 4))),
    "states of no step": ("rollout, states", lambda t, c: few_states(t, c, 0, t["hidden.h"])),
    "states of every -2nd step": ("rollout, states", lambda t, c: few_states(t, c, -2, t["hidden.h"])),
    "states of fewer steps than the save says": (
        "rollout, states",
        lambda t, c: few_states(t, c, 3, torch.zeros(5, 2, 1, 4)),
    ),
    "columns of 10**9 envs": ("rollout, plain", lambda t, c: c.update(num_envs=10**9)),
    "columns of 2**60 steps": ("rollout, plain", lambda t, c: c.update(num_steps=2**60)),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_save_is_refused(forged: str, tmp_path: Path) -> None:
    kind, change = FORGED[forged]
    tensors, content = forger.good_save(kind, tmp_path / "good")
    change(tensors, content)
    forger.write(tmp_path / "forged", tensors, json.dumps(content))
    load: Any = RolloutBuffer.load if kind.startswith("rollout") else ReplayBuffer.load
    with pytest.raises(FileFormatError):
        load(tmp_path / "forged")


@pytest.mark.parametrize(
    "shares", [None, 3, {"a": "1", "b": 1}, {"a": float("nan"), "b": 1}, {"a": 1e308, "b": 1e308}, {"a": True, "b": 1}]
)
def test_forged_shares_are_refused_and_change_nothing(shares: Any) -> None:
    mixture = Mixture({name: filled(10) for name in ("a", "b")}, {"a": 0.25, "b": 0.75})
    with pytest.raises(ParameterError):
        mixture.load_state_dict({} if shares is None else {"shares": shares})
    assert mixture.shares == {"a": 0.25, "b": 0.75}


def test_check_sees_cursors_that_contradict_the_rows() -> None:
    for column, by in ((0, 2**60), (1, -1), (2, 1), (2, 2**61), (3, 2**32), (3, 2**61)):
        twin = Twin(2, 9).play(*[".."] * 5)
        internals.ring(twin.buffer).state[1, column] += by
        with pytest.raises(InvariantError):
            twin.buffer.check()
    for counter in (0, 1, 2):
        twin = Twin(2, 9).play(*[".."] * 5)
        internals.ring(twin.buffer).counters[counter] += 2**61
        with pytest.raises(InvariantError):
            twin.buffer.check()


def test_an_index_never_issued_leaves_no_place_unwritten() -> None:
    ring = internals.ring(Twin(2, 9).play(*[".."] * 5).buffer)
    places, bad = ring.find(np.array([2, 10**9, 3, 4]))
    assert bad == 1
    assert places[1:].tolist() == [-1, -1, -1]


PARTS_OF_NUMPY: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
    (
        lambda: Prioritized(np.float32(0.5), (np.float64(0.4), 1.0, np.int64(9))),
        lambda: NStep(np.int64(3), np.float32(1)),
    ),
    (lambda: Recent(np.float32(0.9), np.int64(3)), lambda: FrameStack(np.int32(2))),
    (Uniform, lambda: Sequence(np.int64(3), np.int32(1), np.int64(1), n=np.int8(2))),
    (Uniform, lambda: FrameStack(np.int16(3), NStep(np.int8(2)))),
    (Uniform, lambda: Chunks(np.int64(4))),
]


@pytest.mark.parametrize(("sampler", "view"), PARTS_OF_NUMPY)
def test_parameters_that_are_numbers_of_numpy_are_saved(sampler: Any, view: Any, tmp_path: Path) -> None:
    numbers: Any = {"capacity": np.int64(40), "num_envs": np.int32(2), "seed": np.int64(3)}
    buffer = ReplayBuffer(PLAIN, sampler=sampler(), view=view(), **numbers)
    for _ in range(9):
        flags = np.zeros(2, np.bool_)
        buffer.add(
            obs=np.ones((2, 2)), action=np.ones(2, np.int64), reward=np.ones(2), terminated=flags, truncated=flags
        )
    buffer.save(tmp_path / "replay")
    again = ReplayBuffer.load(tmp_path / "replay")
    assert again.view == buffer.view
    assert torch.equal(again.sample(5)["index"], buffer.sample(5)["index"])


ERRORS_SAVED = [5.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("saved", "given_", "rated"),
    [
        (lambda: Recent(0.9, 2), lambda: Recent(0.5, 3, inner=Prioritized()), False),
        (lambda: Recent(0.9, 2, inner=Prioritized()), lambda: Recent(0.5, 3), False),
        (lambda: Recent(0.9, 2, inner=Prioritized()), lambda: Recent(0.5, 3, inner=Prioritized(0.1)), True),
        (lambda: Recent(0.9, 2, inner=Prioritized()), Prioritized, False),
        (Prioritized, lambda: Recent(0.9, 2, inner=Prioritized()), False),
        (Uniform, Prioritized, False),
        (Prioritized, WithoutReplacement, False),
    ],
)
def test_a_save_is_loaded_with_another_sampler_which_goes_on_as_far_as_it_is_alike(
    saved: Any, given_: Any, rated: bool, tmp_path: Path
) -> None:
    twin = Twin(2, 12, sampler=saved(), seed=4).play("..", "..", ".T", "..", "..")
    if twin.buffer.has_priorities:
        twin.buffer.update_priorities([0, 1, 2, 3], ERRORS_SAVED)
    if isinstance(twin.buffer.sampler, Recent):
        twin.buffer.sampler.observe(3.0)
    twin.buffer.save(tmp_path / "replay")
    loaded = ReplayBuffer.load(tmp_path / "replay", sampler=given_())
    sampler, state = loaded.sampler, loaded.sampler.state_dict()
    if isinstance(sampler, Recent) and isinstance(twin.buffer.sampler, Recent):
        assert (sampler.eta, state["returns"].tolist()) == (0.9, [3.0])
    if loaded.has_priorities:
        inner = getattr(sampler, "inner", sampler)
        places, _ = internals.ring(loaded).find(np.arange(4))
        assert inner.state_dict()["errors"][places].tolist() == (ERRORS_SAVED if rated else [1.0] * 4)
        assert inner.state_dict()["largest"] == (5.0 if rated else 1.0)
        assert (inner.priorities() > 0).all()
        internals.tree(inner).check()
    assert same_batches(loaded.data(), twin.buffer.data())
    for _ in range(3):
        twin.check_batch(loaded.sample(3))


def test_batch_sizes_that_are_numbers_of_numpy_leave_a_replay_that_can_be_saved(tmp_path: Path) -> None:
    replay, three = filled(20), np.int64(3)
    for _ in (replay.sample(three), *replay.batches(np.int64(2), three)):
        pass
    with replay.serve(three, depth=np.int64(2)) as batches:
        next(batches)
        replay.save(tmp_path / "save")
    assert ReplayBuffer.load(tmp_path / "save").stats()["sampled"] == 12


def test_a_schedule_of_beta_goes_on_after_a_load(tmp_path: Path) -> None:
    twin = Twin(2, 12, sampler=Prioritized(alpha=1.0, beta=(0.1, 1.0, 10))).play("..", "..", ".T", "..", "..")
    index = twin.buffer.data()["index"]
    twin.buffer.update_priorities(index, 1 + index % 3)
    for _ in range(4):
        twin.buffer.sample(8)
    twin.buffer.save(tmp_path / "replay")
    loaded = ReplayBuffer.load(tmp_path / "replay")
    for draws in range(4, 8):
        batch = loaded.sample(8)
        assert same_batches(batch, twin.buffer.sample(8))
        probability = batch["probability"].numpy()
        want = (probability / probability.min()) ** -(0.1 + 0.9 * draws / 10)
        assert batch["weight"].tolist() == pytest.approx(want.tolist())
        assert want.min() < 0.9  # with equal priorities all weights are 1, whatever beta is


@pytest.mark.parametrize("sampler", ["prioritized, stratified", "recent, prioritized", "without replacement"])
@pytest.mark.parametrize("weigh", ["steps", "episodes"])
def test_a_save_of_weighed_sequences_is_loaded_with_a_sampler_and_a_view_that_know_no_weights(
    sampler: str, weigh: Any, tmp_path: Path
) -> None:
    for kind in (Uniform, lambda: Recent(0.9, 2)):
        twin = Twin(2, 12, sampler=kind(), view=Sequence(2, 1, weigh=weigh)).play("..", "..", ".T", "..", "..", "U.")
        twin.buffer.save(tmp_path / "replay")
        view = NStep(2, 0.5)
        loaded = ReplayBuffer.load(tmp_path / "replay", sampler=SAMPLERS[sampler](), view=view)
        loaded.check()
        for _ in range(3):
            twin.check_batch(loaded.sample(3), view, twin.truth.anchors())
        assert len(loaded) == len(twin.truth.anchors())
