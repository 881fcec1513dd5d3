"""Saves that keep files of the one before: killed at any call, and forged with right checksums."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attacks import forger
from attacks.machine import AFTERMATHS, Died, Machine
from attacks.tally import record
from relive import ReplayBuffer, load_extra
from relive import files as persist
from relive.errors import FileFormatError
from support.cases import covering
from support.effort import often
from support.saves import many_segments

Tried = Callable[..., None]
KIND = "prioritized, transition, shared"


@pytest.fixture(autouse=True)
def few_rows_are_several_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    many_segments(monkeypatch, small=12, large=3)


def grown(steps: int) -> ReplayBuffer:
    """A buffer after so many steps more than a good one has; its rows are functions of their number."""
    buffer = forger.KINDS[KIND]()
    for t in range(steps):
        buffer.add(forger.step(forger.STEPS + t, t % 7 == 6))
    return buffer


def facts(buffer: ReplayBuffer) -> tuple[Any, ...]:
    """What is stored, and the sampler's state."""
    data = buffer.data()
    return data["index"].tolist(), data["obs", "camera"].sum().item(), buffer.sampler.state_dict()["errors"].tolist()


@cache
def expected(steps: int) -> tuple[Any, ...]:
    """What a save holds that was made after so many steps."""
    return facts(grown(steps))


BEFORE, AFTER = 3, 9


class Saver:
    """A buffer with a save at ``path``, to which it has added since; the files of that save are mostly kept."""

    def __init__(self, path: Path) -> None:
        self.path, self.buffer = path, grown(0)
        for t in range(BEFORE):
            self.buffer.add(forger.step(forger.STEPS + t, t % 7 == 6))
        self.buffer.save(path, extra={"steps": BEFORE})
        self.old = set(os.listdir(path))
        for t in range(BEFORE, AFTER):
            self.buffer.add(forger.step(forger.STEPS + t, t % 7 == 6))

    def save(self) -> None:
        self.buffer.save(self.path, extra={"steps": AFTER})

    def outcome(self) -> int:
        """How many steps the save at the path holds, after a look at all of it, and at the learner's state."""
        loaded = ReplayBuffer.load(self.path)
        loaded.check()
        steps = loaded.extra["steps"]
        assert load_extra(self.path) == {"steps": steps}
        assert facts(loaded) == expected(steps)
        return steps


def calls(path: Path) -> int:
    """How many calls such a save makes that change a disk."""
    saver = Saver(path)
    with Machine(10**9) as machine:
        saver.save()
    assert len(saver.old & set(os.listdir(path))) > 2, "some data files are kept, and the manifest"
    return machine.count


@pytest.mark.parametrize("every", [often(17, 4), pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("aftermath", AFTERMATHS)
def test_dying_before_any_call_leaves_the_old_save_or_the_new_with_its_learner(
    aftermath: str, every: int, tmp_path: Path, tried: Tried
) -> None:
    count, outcomes = calls(tmp_path / "counted"), list[int]()
    first = 2 + list(AFTERMATHS).index(aftermath) % every  # each aftermath has calls of its own
    for step in (1, *range(first, count + 1, every), count + 1):
        saver = Saver(tmp_path / "save")
        with Machine(step) as machine, suppress(Died):
            saver.save()
        tried("a save that keeps files and dies, or loses power, before one of its calls")
        AFTERMATHS[aftermath](machine, step)
        outcomes.append(saver.outcome())
        saver.save()
        assert saver.outcome() == AFTER
        with persist.Save(saver.path) as save:
            assert {"manifest.json", *save.contents.files} == set(os.listdir(saver.path))
        shutil.rmtree(saver.path)
    assert outcomes[0] == BEFORE
    assert outcomes[-1] == AFTER


FAULTS: dict[str, BaseException] = {"error": OSError(errno.EIO, "I/O error"), "interrupt": KeyboardInterrupt()}


@pytest.mark.parametrize("every", [often(9, 2), pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("fault", "late"), covering(FAULTS, ["before", "after"]))
def test_a_failure_at_any_call_leaves_a_whole_save_that_the_same_buffer_can_replace(
    fault: str, late: str, every: int, tmp_path: Path, tried: Tried
) -> None:
    raised = FAULTS[fault]
    for step in range(1 + (late == "after") % every, calls(tmp_path / "counted") + 1, every):
        saver = Saver(tmp_path / "save")
        raised.__notes__ = []
        tried("a save that keeps files, and one of whose calls fails or is interrupted")
        with Machine(step, raised, late == "after"), suppress(type(raised)):
            saver.save()
        assert saver.outcome() in (BEFORE, AFTER)
        for t in range(AFTER, AFTER + 2):  # what it knows of the directory is still right
            saver.buffer.add(forger.step(forger.STEPS + t, t % 7 == 6))
        saver.buffer.save(saver.path, extra={"steps": AFTER + 2})
        assert saver.outcome() == AFTER + 2
        shutil.rmtree(saver.path)


# Forged segments, with right checksums.


class Parts:
    """A save with several segments, to be changed and sealed again."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        saver = Saver(path)
        for t in range(seed):
            saver.buffer.add(forger.step(100 + t, False))
        saver.save()
        self.path = path
        self.tensors, self.content = persist.read(path)
        self.names: list[str] = self.content["segments"]

    def tensor(self, at: int, name: str) -> torch.Tensor:
        return self.tensors[f"segment.{self.names[at]}.{name}"]

    def write(self, path: Path) -> None:
        forger.write(path, self.tensors, json.dumps(self.content))


def swap(parts: Parts, one: int, other: int, *names: str) -> None:
    """Two segments exchange these tensors."""
    for name in names:
        a, b = (f"segment.{parts.names[k]}.{name}" for k in (one, other))
        parts.tensors[a], parts.tensors[b] = parts.tensors[b], parts.tensors[a]


def shift(parts: Parts, at: int, by: int) -> None:
    parts.tensor(at, "span").add_(by)


def another_run(parts: Parts, at: int) -> None:
    """A segment of a buffer with other experience, for the same rows."""
    other = Parts(parts.path.with_name("another"), 8)
    for name in ("rows", "block.obs.camera"):
        found, mine = other.tensor(at, name), parts.tensor(at, name)
        count = min(len(found), len(mine))
        mine[:count] = found.flip(0)[:count]


ALL = ("span", "rows", "block.obs.camera")
FORGED: dict[str, Callable[[Parts], object]] = {
    "segments listed in another order": lambda p: p.content.update(segments=[p.names[1], p.names[0], *p.names[2:]]),
    "segments listed backwards": lambda p: p.content.update(segments=p.names[::-1]),
    "a segment listed twice": lambda p: p.content.update(segments=[p.names[0], *p.names]),
    "a segment listed in place of another": lambda p: p.content.update(segments=[p.names[1], *p.names[1:]]),
    "a segment that is not listed": lambda p: p.content.update(segments=p.names[1:]),
    "a segment that is not there": lambda p: p.content.update(segments=[*p.names, "0" * 16]),
    "a segment with a path for a name": lambda p: p.content.update(segments=["../../../etc/pa", *p.names]),
    "a segment with a number for a name": lambda p: p.content.update(segments=[3, *p.names]),
    "no list of segments": lambda p: p.content.update(segments="abc"),
    "no entry for segments": lambda p: p.content.pop("segments"),
    "no segments": lambda p: p.content.update(segments=[]),
    "segments of other names": lambda p: swap(p, 0, 1, *ALL),
    "spans exchanged": lambda p: swap(p, 0, 1, "span"),
    "rows exchanged": lambda p: swap(p, 0, 1, "rows", "block.obs.camera"),
    "rows of the future": lambda p: shift(p, -2, 1000),
    "rows of the far future": lambda p: shift(p, -2, 2**61),
    "rows before the first": lambda p: shift(p, 0, -1000),
    "rows of numbers that overflow": lambda p: p.tensor(0, "span").fill_(-(2**63)),
    "a span that ends before it begins": lambda p: p.tensor(0, "span").copy_(p.tensor(0, "span").flip(0)),
    "a span of other envs": lambda p: p.tensor(0, "span").copy_(p.tensor(0, "span").flip(1) + torch.tensor([0, 1])),
    "a span that claims more rows": lambda p: p.tensor(1, "span")[1].add_(1),
    "a span without rows": lambda p: p.tensor(0, "span").zero_(),
    "a span of floats": lambda p: p.tensors.update({f"segment.{p.names[0]}.span": torch.zeros(2, 2)}),
    "a span of three": lambda p: p.tensors.update({f"segment.{p.names[0]}.span": torch.zeros(3, 2).long()}),
    "rows of another width": lambda p: p.tensors.update(
        {f"segment.{p.names[0]}.rows": p.tensor(0, "rows")[:, :-1].contiguous()}
    ),
    "fewer rows": lambda p: p.tensors.update({f"segment.{p.names[0]}.rows": p.tensor(0, "rows")[:-1].clone()}),
    "images of another dtype": lambda p: p.tensors.update(
        {f"segment.{p.names[0]}.block.obs.camera": p.tensor(0, "block.obs.camera").to(torch.int8)}
    ),
    "fewer images": lambda p: p.tensors.update(
        {f"segment.{p.names[0]}.block.obs.camera": p.tensor(0, "block.obs.camera")[:-1].clone()}
    ),
    "no images": lambda p: p.tensors.pop(f"segment.{p.names[0]}.block.obs.camera"),
    "a further field": lambda p: p.tensors.update({f"segment.{p.names[0]}.block.more": torch.zeros(3)}),
    "a further segment of no rows": lambda p: p.tensors.update({"segment." + "0" * 16 + ".rows": torch.zeros(0, 9)}),
    "rows as in version 1 besides": lambda p: p.tensors.update(rows=p.tensor(0, "rows")),
    "rows of another run": lambda p: another_run(p, 1),
    "errors of fewer rows": lambda p: p.tensors.update({"sampler.errors": p.tensors["sampler.errors"][1:].clone()}),
}


@pytest.mark.parametrize("forged", FORGED)
def test_forged_segments_are_refused(forged: str, tmp_path: Path, tried: Tried) -> None:
    parts = Parts(tmp_path / "good")
    assert len(parts.names) > 3
    FORGED[forged](parts)
    parts.write(tmp_path / "forged")
    tried("forged segments")
    with pytest.raises(FileFormatError) as caught:
        ReplayBuffer.load(tmp_path / "forged")
    assert str(tmp_path / "forged") in str(caught.value)


def test_a_data_file_of_another_save_of_the_same_buffer_is_refused(tmp_path: Path) -> None:
    """The old file and the new one of the same rows: only the one that the manifest states is read."""
    saver = Saver(tmp_path / "save")
    shutil.copytree(saver.path, tmp_path / "before")
    saver.save()
    older = [file for file in (tmp_path / "before").glob("data-*") if not (saver.path / file.name).exists()]
    assert older
    for file in older:
        shutil.copy(file, saver.path / file.name)  # left over, and never read
    assert saver.outcome() == AFTER
    newer = sorted(set(os.listdir(saver.path)) - saver.old)
    for name in newer:
        genuine = (saver.path / name).read_bytes()
        (saver.path / name).write_bytes(older[0].read_bytes())
        with pytest.raises(FileFormatError, match=name):
            ReplayBuffer.load(saver.path)
        (saver.path / name).write_bytes(genuine)
    shutil.copy(tmp_path / "before" / "manifest.json", saver.path / "manifest.json")
    assert saver.outcome() == BEFORE  # a manifest of before, with all of its files


def test_any_changed_byte_of_a_kept_file_is_noticed(tmp_path: Path, tried: Tried) -> None:
    saver, random = Saver(tmp_path / "save"), np.random.default_rng(0)
    saver.save()
    for file in sorted(saver.path.glob("data-*")):
        raw = file.read_bytes()
        for position in random.integers(len(raw), size=often(8, 20)):
            file.write_bytes(raw[:position] + bytes([raw[position] ^ 1]) + raw[position + 1 :])
            tried("a changed byte in a save that keeps files")
            with pytest.raises(FileFormatError):
                ReplayBuffer.load(saver.path)
        file.write_bytes(raw)
    assert saver.outcome() == AFTER


def test_segments_forged_at_random_are_refused_or_harmless(tmp_path: Path) -> None:
    """Spans, rows and lists of segments, changed at random and sealed again."""
    wrong, tries = list[str](), often(40, 120)
    parts = Parts(tmp_path / "good")
    for number in range(tries):
        rng = np.random.default_rng(number)
        tensors = {name: tensor.clone() for name, tensor in parts.tensors.items()}
        forged = forger.Forged(tensors, {**parts.content, "segments": list(parts.names)}, rng)
        if number % 2:
            name = forged.pick([name for name in tensors if name.endswith(".span")])
            at = tuple(int(rng.integers(2)) for _ in range(2))
            tensors[name][at] = forged.pick((*forger.NUMBERS[:-1], int(tensors[name][at]) + 1))
        else:
            forged.change_tensor()
        forger.write(tmp_path / str(number), tensors, json.dumps(forged.content))
        try:
            buffer = ReplayBuffer.load(tmp_path / str(number))
            buffer.check()
            buffer.sample(4)
            buffer.add(forger.step(99, True))
            buffer.check()
        except FileFormatError:
            pass
        except Exception as error:
            wrong.append(f"{number} {forged.said} {error!r}")
    record("segments forged at random", tries, len(wrong))
    assert wrong == []
