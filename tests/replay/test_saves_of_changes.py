"""Saves that keep what did not change: what comes back is what was saved, and little is written."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attacks import forger
from relive import ReplayBuffer, SchemaChanges
from relive import files as persist
from relive.files import format
from relive.replay import saving as segments
from relive.ring.ring import Span
from support import internals
from support.effort import in_ci, often
from support.saves import many_segments
from support.twins import SAMPLERS, Twin


@pytest.fixture(autouse=True)
def few_rows_are_many_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    many_segments(monkeypatch)


def kept_by(buffer: ReplayBuffer) -> list[bytes]:
    """Every live byte that a replay keeps, and the cursors, counters and the sampler's state."""
    ring, come = internals.ring(buffer), internals.progress(buffer)
    places = ring.places()
    rows = [ring.store.dump(places), *(ring.store.dump_large(name, places).numpy() for name in ring.store.large)]
    state = buffer.sampler.state_dict()
    own = [
        np.asarray(state[name])[places] if name in buffer.sampler.per_row else np.asarray(state[name]) for name in state
    ]
    counts = np.array([come.draws, come.sampled, come.late, *ring.rule[:4]])
    return [np.ascontiguousarray(part).tobytes() for part in (*rows, ring.oldest, ring.heads, ring.state[:, 2:],
            ring.counters, counts, *own)]  # fmt: skip


def data_files(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in path.glob("data-*")}


def assert_saved(buffer: ReplayBuffer, path: Path) -> ReplayBuffer:
    """The save at the path is this buffer, and no file lies there in vain."""
    loaded = ReplayBuffer.load(path)
    loaded.check()
    assert kept_by(loaded) == kept_by(buffer)
    with persist.Save(path) as save:
        assert set(save.contents.files) == set(data_files(path))
    return loaded


# What comes back.


def act(twin: Twin, random: np.random.Generator) -> None:
    """Something that changes a buffer, drawn at random."""
    kind = random.integers(12)
    letters = "".join(random.choice(list("....TUB"), twin.num_envs))
    if kind < 7:
        for _ in range(random.integers(1, 6)):
            twin.add(letters)
    elif kind == 7:
        twin.interrupt([int(random.integers(twin.num_envs))])
    elif kind == 8 and random.integers(4) == 0:
        twin.clear()
    elif kind == 9:
        some = [env for env in range(twin.num_envs) if random.integers(2)]
        twin.add("." * len(some), some)
    elif len(twin.buffer) > 1:
        batch = twin.buffer.sample(2)
        if twin.buffer.has_priorities:
            twin.buffer.update_priorities(batch["index"], torch.rand(2))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_what_was_saved_step_by_step_comes_back_whole(sampler: str, seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    twin = Twin(int(random.integers(1, 5)), int(random.integers(2, 40)), dress="mixed", sampler=SAMPLERS[sampler]())
    places = [tmp_path / name for name in "ab"]
    torch.manual_seed(seed)
    for _ in range(often(11, 36)):
        act(twin, random)
        path = places[int(random.integers(4) == 0)]
        if random.integers(2):
            twin.buffer.save(path)
            loaded = assert_saved(twin.buffer, path)
            if random.integers(3) == 0:  # as after a crash
                twin.buffer = loaded
    twin.check()


@pytest.mark.parametrize("mode", ["own", "alone"])
def test_rows_with_next_observations_of_their_own_come_back_too(mode: str, tmp_path: Path) -> None:
    buffer = forger.replay("prioritized", "transition", mode)
    for t in range(often(36, 60)):
        buffer.add(forger.step(t, t % 5 == 4))
        if t % 17 == 16:
            buffer.clear(rewind=True)
        if t % 3 == 0:
            buffer.save(tmp_path / "save")
            buffer = assert_saved(buffer, tmp_path / "save") if t % 4 else buffer
    buffer.check()


def test_two_buffers_that_were_one_do_not_take_each_others_rows(tmp_path: Path) -> None:
    """Their rows have the same numbers, but not the same content."""
    twin = Twin(2, 30).play(*[".."] * 20)
    twin.buffer.save(tmp_path / "save")
    others = [ReplayBuffer.load(tmp_path / "save"), copy.deepcopy(twin.buffer), twin.buffer]
    for turn in range(4):
        for k, buffer in enumerate(others):
            step = {**twin.step(".."), "reward": np.full(2, 100.0 * k + turn, np.float32)}
            for _ in range(3):
                buffer.add(step)
            buffer.save(tmp_path / "save")
            assert_saved(buffer, tmp_path / "save")


def test_rows_that_were_changed_in_place_are_saved(tmp_path: Path) -> None:
    twin = Twin(2, 30).play(*[".."] * 20)
    block = twin.buffer.block
    twin.buffer.save(tmp_path / "save")
    block["reward"][3] = 77.0
    twin.buffer.save(tmp_path / "save")
    assert_saved(twin.buffer, tmp_path / "save")
    other = Twin(2, 30).play(*[".T"] * 9)
    fresh = Twin(2, 30).play(*[".."] * 20).buffer
    for _ in range(4):
        fresh.save(tmp_path / "other")
        fresh.append(other.buffer)  # older rows get new stamps
        fresh.save(tmp_path / "other")
        assert_saved(fresh, tmp_path / "other")


@pytest.mark.parametrize("split", [False, True])
def test_a_data_file_that_is_gone_or_cut_is_written_again(
    split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a segment has several files, of which the others are intact."""
    if split:
        monkeypatch.setattr(format, "FILE_BYTES", 1)
    twin = Twin(2, 40, dress="mixed").play(*[".."] * 30)
    twin.buffer.save(tmp_path / "save")
    count = len(data_files(tmp_path / "save"))
    for number in range(0, count, often(3, 1)):
        for harm in (Path.unlink, lambda file: os.truncate(file, 50), lambda file: (file.unlink(), file.mkdir())):
            file = sorted((tmp_path / "save").glob("data-*"))[number]
            harm(file)
            twin.buffer.save(tmp_path / "save")
            if file.is_dir():
                file.rmdir()
            assert_saved(twin.buffer, tmp_path / "save")


def test_a_save_that_somebody_replaced_or_damaged_is_replaced(tmp_path: Path) -> None:
    one, other = Twin(2, 40).play(*[".."] * 30), Twin(2, 40).play(*["T."] * 25)
    one.buffer.save(tmp_path / "save")
    other.buffer.save(tmp_path / "save")
    one.play("..").buffer.save(tmp_path / "save")
    assert_saved(one.buffer, tmp_path / "save")
    persist.write(tmp_path / "save", {"x": torch.ones(3)}, {"kind": "another"})
    one.play("..").buffer.save(tmp_path / "save")
    assert_saved(one.buffer, tmp_path / "save")


def test_a_save_into_a_place_of_version_1_replaces_it(tmp_path: Path) -> None:
    buffer = Twin(2, 40).play(*[".."] * 30).buffer
    persist.write(tmp_path / "save", *internals.saver(buffer).whole_state())
    again = ReplayBuffer.load(tmp_path / "save")
    assert kept_by(again) == kept_by(buffer)
    again.save(tmp_path / "save")
    assert_saved(buffer, tmp_path / "save")


def test_a_buffer_loaded_with_other_fields_or_capacity_saves_what_it_is(tmp_path: Path) -> None:
    twin = Twin(2, 40).play(*[".."] * 60)
    twin.buffer.save(tmp_path / "save")
    for options in ({"capacity": 30}, {"capacity": 100}, {"changes": SchemaChanges(cast={"obs": torch.float64})}):
        loaded = ReplayBuffer.load(tmp_path / "save", **options)
        loaded.save(tmp_path / "save")
        assert_saved(loaded, tmp_path / "save")


# How little is written.


class Written:
    """Bytes written to files since the last time it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes, genuine = 0, os.write

        def write(descriptor: int, data: Any) -> int:
            done = genuine(descriptor, data)
            self.bytes += done
            return done

        monkeypatch.setattr(os, "write", write)

    def take(self) -> int:
        found, self.bytes = self.bytes, 0
        return found


STEP: Callable[[int], dict[str, Any]] = lambda n: {  # noqa: E731
    "obs": np.random.default_rng(0).random((n, 17), np.float32), "action": np.zeros((n, 6), np.float32),
    "reward": np.zeros(n, np.float32), "terminated": np.zeros(n, np.bool_), "truncated": np.zeros(n, np.bool_),
}  # fmt: skip


def big(rows: int, num_envs: int, **options: Any) -> ReplayBuffer:
    from replay.test_saving import FLAT

    return ReplayBuffer(FLAT, rows, num_envs, seed=0, **options)


def grow(buffer: ReplayBuffer, steps: int) -> None:
    """So many steps of all envs."""
    fields = STEP(buffer.num_envs)
    buffer.extend({name: np.broadcast_to(value, (steps, *value.shape)) for name, value in fields.items()})


@pytest.mark.parametrize("num_envs", [1, pytest.param(8, marks=pytest.mark.slow), in_ci(500)])
def test_a_save_writes_in_proportion_to_what_is_new(
    num_envs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("SMALL_SHARE", 256), ("LARGE_SHARE", 16)):
        monkeypatch.setattr(segments, name, value)
    written, rows = Written(monkeypatch), 100_000
    buffer = big(rows, num_envs)
    grow(buffer, rows // num_envs + 7)
    buffer.save(tmp_path / "save")
    whole, new = written.take(), rows // num_envs // 50
    for _ in range(55):  # round the ring and on
        grow(buffer, new)
        buffer.save(tmp_path / "save")
        share = new * num_envs / rows
        assert written.take() < (1.6 * share + 0.01) * whole
        assert sum(data_files(tmp_path / "save").values()) < 1.2 * whole
    assert_saved(buffer, tmp_path / "save")
    written.take()
    buffer.save(tmp_path / "save")
    assert written.take() < 0.02 * whole


def test_many_small_saves_leave_few_files_and_write_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is written again as often as its segment doubles, up to a share of the capacity."""
    monkeypatch.setattr(segments, "SMALL_SHARE", 64)
    monkeypatch.setattr(segments, "LARGE_SHARE", 16)
    written, buffer = Written(monkeypatch), big(32_000, 4)
    grow(buffer, 8_000)
    buffer.save(tmp_path / "save")
    whole = written.take()
    most, saves = 0, often(50, 100)
    for _ in range(saves):
        grow(buffer, 5)
        buffer.save(tmp_path / "save")
        most = max(most, len(data_files(tmp_path / "save")))
    assert most < 16 + 2 * 64 + 12
    manifests = saves * (tmp_path / "save" / "manifest.json").stat().st_size
    assert written.take() - manifests < saves * 20 / 32_000 * whole * 7
    assert_saved(buffer, tmp_path / "save")


def test_an_env_that_stands_still_does_not_keep_the_rows_of_others_for_ever(tmp_path: Path) -> None:
    twin = Twin(4, 20)
    for env in range(4):
        for t in range(120):
            twin.add(".", [env])
            if t % 10 == 0:
                twin.buffer.save(tmp_path / "save")
        twin.buffer.save(tmp_path / "save")
        assert_saved(twin.buffer, tmp_path / "save")
        assert stored_rows(tmp_path / "save") <= 2 * internals.ring(twin.buffer).rows_live


def test_an_env_that_moves_slowly_does_not_keep_the_rows_of_others_for_ever(tmp_path: Path) -> None:
    """Each of its rows lies in a segment of its own, whose other rows soon leave the buffer."""
    twin, most = Twin(2, 20), 0
    for _ in range(30):
        twin.add("..")
        for _ in range(11):
            twin.add(".", [1])
        twin.buffer.save(tmp_path / "save")
        stored, live = stored_rows(tmp_path / "save"), internals.ring(twin.buffer).rows_live
        assert stored <= 2 * live
        most = max(most, stored - live)
    assert most > 20  # rows that are gone do stay for a while
    assert_saved(twin.buffer, tmp_path / "save")


def stored_rows(path: Path) -> int:
    """How many rows the files of a save hold."""
    with persist.Save(path) as save:
        return sum(spec.shape[0] for name, spec in save.specs.items() if name.endswith(".rows"))


def test_spans_are_ranges_of_rows() -> None:
    span = Span(np.array([3, 0, 7]), np.array([6, 0, 9]))
    assert span.size == 5
    assert [x.tolist() for x in span.rows()] == [[0, 0, 0, 2, 2], [3, 4, 5, 7, 8]]
    assert [x.tolist() for x in span.rows(1, 4)] == [[0, 0, 2], [4, 5, 7]]
    assert span.places(4).tolist() == [3, 0, 1, 11, 8]
    part = span.meet(Span(np.array([4, 2, 0]), np.array([9, 5, 8])))
    assert (part.first.tolist(), part.until.tolist()) == ([4, 2, 7], [6, 2, 8])
    assert part.size == 3
    assert np.arange(5)[span.where(part)].tolist() == [1, 2, 3]
    assert not span.meet(Span(np.array([9, 9, 9]), np.array([10, 10, 10]))).size
