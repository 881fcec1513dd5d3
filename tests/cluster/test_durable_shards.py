"""Shards whose rings live in files: what was confirmed is there after any kill, once; and saves in the background."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relive import Prioritized
from relive.cluster.replay import Replay, load_extra
from relive.cluster.shard import Chunk, ChunkOrigin, Ledger, LedgerLog, Rank, Shard, ShardPlan
from relive.cluster.writer import StepPacker
from relive.errors import FileFormatError, LifecycleError, ParameterError, ShapeError
from support import internals
from support.children import SECONDS
from support.clusters import SCHEMA, LocalLink, check, local, steps


def durable(path: Path, **options: Any) -> tuple[Replay, LocalLink]:
    return local(path=path / "replay", durable=True, sampler=Prioritized(), **options)


def test_a_shard_comes_back_with_all_steps_and_errors_that_it_had_confirmed(tmp_path: Path):
    replay, link = durable(tmp_path)
    writer = replay.writer()
    writer.extend(steps(20))
    writer.flush()
    batch = replay.sample(100)
    replay.update_priorities(batch["index"], torch.rand(100))
    before = replay.stats()
    masses = [total.mass for total in internals.group(replay).totals]
    for shard in (0, 1):
        link.kill(shard)
        link.restart(shard)
    writer.extend(steps(10, start=20))
    writer.flush()
    stats = replay.stats()
    assert (stats["lost_steps"], stats["repeated_steps"], stats["restarts"]) == (0, 0, 2)
    assert stats["completed"] >= before["completed"] + 4 * 9 - 4  # the episodes under way were cut
    assert len(masses) == 2
    found = replay.sample(2000)
    check(found)
    assert set(found["obs"][:, 1].tolist()) >= {*range(18), *range(21, 28)}
    replay.close()


def test_masks_and_steps_that_are_refused_are_kept_apart(tmp_path: Path):
    replay, link = durable(tmp_path, shards=1)
    writer = replay.writer()
    mask = np.ones((6, 4), bool)
    mask[3, 1] = False  # in the middle of an episode
    writer.extend(steps(6) | {"mask": mask})
    writer.flush()
    shard: Any = link.shards[0]

    def refuse(*_: Any, **__: Any) -> None:
        raise ShapeError("no")

    shard.replay.extend = refuse
    writer.extend(steps(3, start=6))
    with pytest.raises(ShapeError):
        writer.flush()
    del shard.replay.extend
    other = replay.writer()
    other.extend(steps(4, start=50))
    other.flush()
    link.kill(0)
    del shard, writer
    gc.collect()  # the error has the old ring, and with it the files
    link.restart(0)
    stats = replay.stats()
    assert stats["lost_steps"] == 0
    check(replay.sample(400))
    assert not {6.0, 7.0, 8.0} & set(replay.sample(400)["obs"][:, 1].tolist())
    assert link.shards[0] is not None
    assert internals.ledger(link.shards[0]).stored == 40
    replay.close()


def test_it_is_loaded_from_a_checkpoint_into_new_files_and_the_old_ones_go(tmp_path: Path):
    replay, _ = durable(tmp_path)
    replay.extend(steps(30))
    replay.save(extra={"turn": 1})
    saved = len(replay)
    replay.extend(steps(5, start=30))
    replay.close()
    for shards in (2, 3):
        links = list[LocalLink]()

        def connect(plans: list[ShardPlan], links: list[LocalLink] = links) -> LocalLink:
            links.append(LocalLink(plans))
            return links[0]

        again = Replay.load(tmp_path / "replay", durable=True, shards=shards, connect=connect)
        assert len(again) == saved
        check(again.sample(100))
        rings = [path.name for path in (tmp_path / "replay" / "shard-0").glob("ring-*")]
        assert rings == [f"ring-{links[0].plans[0].run}"]
        again.close()


def test_a_ledger_leaves_out_the_lines_whose_steps_are_not_in_the_ring(tmp_path: Path):
    log, ledger = LedgerLog(tmp_path / "log"), Ledger()
    log.rewrite(ledger)
    rank = Rank(1, "token")
    for k in range(4):
        part = ChunkOrigin(rank, (0, 2), 5 * k, 5, 0)
        log.append(part, ledger.counts_after(part), 10 * k)
        ledger.confirm(part)
    path = next((tmp_path / "log").iterdir())
    whole = path.read_bytes()
    for heads, count in ((0, 0), (1, 1), (10, 1), (11, 2), (31, 4)):
        path.write_bytes(whole)
        for other in path.parent.iterdir():
            if other != path:
                other.unlink()
        assert LedgerLog(tmp_path / "log").restored(heads).stored == 10 * count
    path.write_bytes(whole[:-7])  # the last line is torn
    for other in path.parent.iterdir():
        if other != path:
            other.unlink()
    assert LedgerLog(tmp_path / "log").restored(99).stored == 30
    with pytest.raises(FileFormatError, match="expected the ledger"):
        LedgerLog(tmp_path / "none").restored(0)


def push_for_ever(plan: ShardPlan, acknowledged: Any) -> None:
    """Send chunks to a shard, beginning with the first that was not acknowledged."""
    shard, packer = Shard(plan), StepPacker(SCHEMA, 4, False)
    size = 6
    while True:
        start = acknowledged.value
        block = packer.packed(packer.checked(steps(size, start=start)), np.arange(4))
        origin = ChunkOrigin(Rank(1, "token"), (0, 1, 2, 3), start, size, start)
        acknowledged.value = shard.push(Chunk(origin, block))
        if acknowledged.value % 60 == 0:
            shard.commit(None)


@pytest.mark.parametrize("kills", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_a_shard_killed_at_any_instant_has_each_confirmed_step_once(kills: int, tmp_path: Path):
    options = {"schema": SCHEMA, "sampler": Prioritized(), "view": None, "ordered": True, "own_next_obs": False}
    plan = ShardPlan(0, 0, 4, 4_000_000 // 50, 1, 0, "run", options, str(tmp_path), durable=True)
    fork, rng = multiprocessing.get_context("fork"), np.random.default_rng(kills)
    acknowledged = fork.Value("q", 0, lock=False)
    for _ in range(kills):
        before = acknowledged.value
        child = fork.Process(target=push_for_ever, args=(plan, acknowledged), daemon=True)
        child.start()
        end = time.monotonic() + SECONDS
        while acknowledged.value == before and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(float(rng.exponential(0.01)))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    shard = Shard(plan)
    assert internals.ledger(shard).lost == 0
    received = internals.received(internals.ledger(shard))["token"]
    assert acknowledged.value <= received <= acknowledged.value + 6
    assert internals.ledger(shard).stored == 4 * received
    for env in range(4):
        rows = shard.replay.slice(env)
        times = rows["obs"][:, 1][rows["obs"][:, 2] == 0].tolist()  # final observations are left out
        firsts = [t for i, t in enumerate(times) if i == 0 or t != times[i - 1]]
        assert firsts == list(range(int(times[0]), received))
    shard.replay.close()


def test_a_save_in_the_background_counts_once_all_shards_have_written(tmp_path: Path):
    replay, link = local(path=tmp_path / "replay", sampler=Prioritized())
    replay.extend(steps(30))
    replay.save(extra={"turn": 0})
    weights = torch.zeros(3)
    link.silent = set()
    saving = replay.save(extra={"turn": 1, "weights": weights}, background=True)
    weights += 1.0  # it was copied
    replay.extend(steps(5, start=30))
    end = time.monotonic() + SECONDS
    while load_extra(tmp_path / "replay")["turn"] == 0 and time.monotonic() < end:
        check(replay.sample(16))  # sees to it
    assert saving.done
    saving.wait()
    assert "done" in repr(saving)
    extra = load_extra(tmp_path / "replay")
    assert extra["turn"] == 1
    assert extra["weights"].tolist() == [0.0, 0.0, 0.0]
    replay.save(extra={"turn": 2}, background=True)
    replay.close()  # waits for it
    assert load_extra(tmp_path / "replay")["turn"] == 2


def test_a_save_whose_shard_dies_fails_and_the_one_before_counts(tmp_path: Path):
    replay, link = local(path=tmp_path / "replay")
    replay.extend(steps(30))
    replay.save(extra={"turn": 0})
    saving = replay.save(extra={"turn": 1}, background=True)
    link.kill(1)
    link.restart(1)
    internals.calls(saving)[1] = internals.ask(saving)(1)  # as if it had been asked after the kill
    with pytest.raises(LifecycleError, match="was restarted while it wrote checkpoint 2; the one before still counts"):
        saving.wait(SECONDS)
    assert load_extra(tmp_path / "replay")["turn"] == 0
    replay.save(extra={"turn": 2})
    assert load_extra(tmp_path / "replay")["turn"] == 2
    replay.close()


def test_a_commit_of_a_shards_own_leaves_the_save_under_way_as_it_is(tmp_path: Path):
    replay, link = local(path=tmp_path / "replay")
    replay.extend(steps(30))
    (shard, _) = link.shards
    assert shard is not None
    shard.commit(1, True)
    shard.commit(None)
    end = time.monotonic() + SECONDS
    while not shard.committed(1) and time.monotonic() < end:
        time.sleep(0.001)
    assert shard.committed(1)
    with pytest.raises(LifecycleError, match="was restarted while it wrote checkpoint 2"):
        shard.committed(2)
    replay.close()


def test_a_full_disk_tears_no_line_of_a_ledger_and_the_steps_are_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    replay, link = durable(tmp_path, shards=1)
    writer = replay.writer(timeout=SECONDS)
    writer.extend(steps(5, length=100))
    writer.flush()
    write, full = os.write, [True]

    def short(descriptor: int, data: bytes) -> int:
        return write(descriptor, data[: len(data) // 2] if full and full.pop() else data)

    monkeypatch.setattr(os, "write", short)
    writer.extend(steps(5, start=5, length=100))
    with pytest.raises(OSError, match="No space left"):
        writer.flush()
    writer.extend(steps(5, start=10, length=100))
    writer.flush()
    del writer
    gc.collect()  # the error has the old ring, and with it the files
    link.kill(0)
    link.restart(0)
    stats = replay.stats()
    assert (stats["lost_steps"], stats["restarts"]) == (0, 1)
    assert link.shards[0] is not None
    assert internals.ledger(link.shards[0]).stored == 60
    assert len(replay) == 4 * 14
    replay.close()


def test_a_whole_ledger_is_replaced_by_a_whole_one_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log, ledger = LedgerLog(tmp_path / "log"), Ledger()
    ledger.stored = 7
    log.rewrite(ledger)
    write = os.write

    def full(descriptor: int, data: Any) -> int:
        if len(data) < 50:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:9])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        log.rewrite(Ledger())
    monkeypatch.undo()
    assert LedgerLog(tmp_path / "log").restored(0).stored == 7


def test_a_durable_replay_needs_a_directory():
    with pytest.raises(ParameterError, match="rings in files need a directory"):
        local(durable=True)
    with pytest.raises(ParameterError, match="durable"):
        local(durable=1)


@pytest.mark.parametrize("failing", ["the folder", "the file"])
def test_no_line_goes_to_the_file_before_although_a_new_one_could_not_be_opened_at_once(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, ledger, real = LedgerLog(tmp_path / "log"), Ledger(), os.open

    def too_many(path: Any, *args: Any, **options: Any) -> int:
        if (os.path.isdir(path) if failing == "the folder" else str(path).endswith("ledger")) and broken:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, *args, **options)

    monkeypatch.setattr("os.open", too_many)

    def rewritten() -> None:
        log.rewrite(ledger)
        log.sync()

    broken = False
    rewritten()
    broken = True
    with pytest.raises(OSError, match="open files"):
        rewritten()
    broken = False
    part = ChunkOrigin(Rank(1, "a"), (0,), 0, 7, 0)
    log.append(part, ledger.counts_after(part), 0)
    log.sync()
    assert LedgerLog(tmp_path / "log").restored(1).stored == 7
