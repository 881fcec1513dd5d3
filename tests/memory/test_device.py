"""Replays on a device: whatever a buffer in RAM hands out, they hand out, to the bit, and where it should be.

Each test runs on the CPU with the rows kept as on a device, on a stand-in for a device whose tensors refuse to meet
the CPU's, and on a GPU where there is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from pathlib import Path as File
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor

import relive.replay.buffer
from relive import (
    Collector,
    Field,
    FrameStack,
    Hindsight,
    Mixture,
    NStep,
    Prioritized,
    ReplayBuffer,
    Schema,
    Transition,
)
from relive import files as persist
from relive.batches import leaves_by_path
from relive.errors import DeviceError, FieldError, FileFormatError, ParameterError, SchemaError
from relive.memory.device import DeviceRows
from relive.memory.ram import ALWAYS_IN_RAM, ReplayRows
from relive.steps.arrays import numpy_view
from relive.views.sequences import Sequence as SequenceView
from support import internals, twins
from support.cases import covering
from support.effort import often
from support.other_device import ELSEWHERE, PLACES, far_device

PLAYS = ("..", ".T", "..", "U.", "B.", "..", "TT", ".U", "..", "|", "..", "..", ".T", "..", "..", "T.", "..")
FLAGS = {"reward", "terminated", "truncated"}

DTYPES = Schema({
    "obs": {"x": Field((2,), torch.bfloat16), "depth": Field((40, 16), torch.bfloat16), "on": Field((3,), torch.bool)},
    "action": Field((), torch.int8),
    "phase": Field((1,), torch.complex128),
    "half": Field((3,), torch.float16),
    "count": Field((2,), torch.uint16),
    "none": Field((0,), torch.float32),
    "reward": (),
    "terminated": Field((), torch.bool),
    "truncated": Field((), torch.bool),
})  # fmt: skip


class Place:
    """Where a device buffer is made, and how its tensors get there."""

    def __init__(self, device: torch.device, traffic: Any = None) -> None:
        self.device, self.traffic = device, traffic

    def rows(self) -> AbstractContextManager[None]:
        """Inside, buffers keep their rows as on a device even if it is the CPU."""
        patch = pytest.MonkeyPatch()
        if self.device.type == "cpu":
            patch.setattr(relive.replay.buffer, "ReplayRows", lambda leaves, n: DeviceRows(leaves, n, self.device))
        return patched(patch)

    def buffer(self, *args: Any, **options: Any) -> ReplayBuffer:
        """A buffer on the device."""
        with self.rows():
            made = ReplayBuffer(*args, device=self.device, **options)
        assert isinstance(internals.ring(made).store, DeviceRows)
        return made

    def load(self, path: Any, **options: Any) -> ReplayBuffer:
        """A saved buffer, on the device."""
        with self.rows():
            return ReplayBuffer.load(path, device=self.device, **options)

    def tensors(self, step: Any) -> Any:
        """A step's arrays as tensors of the device."""
        return twins.mapped(lambda x: torch.as_tensor(x).to(self.device), step)


class patched:  # noqa: N801
    """Undoes a patch at the end."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "stand-in":
        with far_device() as traffic:
            yield Place(ELSEWHERE, traffic)
    else:
        yield Place(torch.empty(0, device=request.param).device)


def mixed(place: Place, step: Mapping[str, Any], turn: int) -> dict[str, Any]:
    """A step as arrays, as tensors of the device, or as both."""
    if turn % 3 == 0:
        return dict(step)
    far = place.tensors(step)
    return far if turn % 3 == 1 else {name: far[name] if name in ("obs", "reward") else step[name] for name in step}


class Pair:
    """A buffer in RAM and one on the device that are told the same."""

    def __init__(self, place: Place, rows: int = 9, *, sampler: Any = None, view: Any = None, **options: Any) -> None:
        parts = lambda: {"sampler": sampler and sampler(), "view": view and view()}  # noqa: E731
        self.place, self.turn = place, 0
        self.twin = twins.Twin(2, rows, **options, **parts())
        self.ram = self.twin.buffer
        kept = {"seed": 0, "ordered": options.get("ordered", True), **parts()}
        self.there = place.buffer(self.twin.schema, rows * 2, 2, **kept)

    def play(self, *plays: str) -> Pair:
        for kinds in plays:
            if kinds == "|":
                self.there.interrupt()
                self.twin.interrupt()
            elif kinds == "x":
                self.there.clear()
                self.twin.clear()
            else:
                self.add(self.twin.step(kinds))
        return self

    def add(self, step: dict[str, Any], **options: Any) -> None:
        self.ram.add(step, **options)
        self.there.add(mixed(self.place, step, self.turn), **options)
        self.turn += 1

    def check(self) -> None:
        """Everything that can be read is the same."""
        self.there.check()
        assert len(self.there) == len(self.ram)
        self.assert_same(lambda buffer: buffer.data())
        for env in range(2):
            self.assert_same(lambda buffer, env=env: buffer.slice(env))
        if len(self.ram) > 6:
            self.assert_same(lambda buffer: buffer.sample(5))
            for ours, theirs in zip(self.ram.batches(3, 4), self.there.batches(3, 4), strict=True):
                assert_alike(ours, theirs, self.place.device)

    def assert_same(self, read: Callable[[ReplayBuffer], Any]) -> None:
        assert_alike(read(self.ram), read(self.there), self.place.device)


def assert_alike(ours: Any, theirs: Any, device: torch.device) -> None:
    """Two batches have the same fields in the same order, bit for bit; the second on the device."""
    one, other = (leaves_by_path(batch) for batch in (ours, theirs))
    assert list(one) == list(other)
    for name, tensor in one.items():
        there = other[name]
        assert there.device == device, name
        assert (there.dtype, there.shape) == (tensor.dtype, tensor.shape), name
        assert bits(there.cpu()) == bits(tensor), name


def bits(tensor: Tensor) -> bytes:
    return np.ascontiguousarray(numpy_view(tensor)).tobytes()


# Batches.


@pytest.mark.parametrize(
    ("view", "place", "dress"), covering(twins.VIEWS, PLACES, twins.DRESSES, full=2, quick=1), indirect=["place"]
)
def test_every_view_reads_the_same(place: Place, dress: str, view: str) -> None:
    pair = Pair(place, dress=dress, view=twins.VIEWS[view])
    pair.play(*PLAYS[:9]).check()
    pair.play(*PLAYS[9:]).check()


@pytest.mark.parametrize(("sampler", "place"), covering(twins.SAMPLERS, PLACES, full=2, quick=1), indirect=["place"])
def test_every_sampler_draws_the_same(place: Place, sampler: str) -> None:
    pair = Pair(place, 12, dress="mixed", sampler=twins.SAMPLERS[sampler], view=lambda: NStep(2, 0.5))
    for plays in (PLAYS, PLAYS[:5]):
        pair.play(*plays).check()
        if pair.ram.has_priorities:
            ours, theirs = pair.ram.sample(4), pair.there.sample(4)
            errors = np.linspace(0.1, 3, 4)
            assert pair.ram.update_priorities(ours["index"], errors) == 0
            assert pair.there.update_priorities(theirs["index"], place.tensors(errors)) == 0
        pair.check()


@pytest.mark.parametrize("dress", ["box", "image", "mixed"])
@pytest.mark.parametrize("sampler", ["uniform", "prioritized, stratified"])
def test_transitions_without_order(place: Place, dress: str, sampler: str) -> None:
    pair = Pair(place, 4, dress=dress, ordered=False, sampler=twins.SAMPLERS[sampler])
    pair.play(*(p for p in PLAYS if p != "|")).check()
    for buffer in (pair.ram, pair.there):
        buffer.view = FrameStack(2)
        with pytest.raises(SchemaError, match="order"):
            buffer.sample(2)


def test_masked_and_single_envs_interruptions_and_clearing(place: Place) -> None:
    pair = Pair(place, dress="mixed", view=lambda: FrameStack(3, pad="zeros"))
    for k in range(often(8, 12)):
        pair.add(pair.twin.step("..", mask=[k % 4 != 1, k % 5 != 2]))
        pair.add(pair.twin.step("T" if k % 3 else ".", envs=[k % 2]), envs=np.array([k % 2]))
        pair.check()
    pair.play("x").check()
    assert len(pair.there) == 0
    pair.play(*PLAYS).check()


@pytest.mark.parametrize("far", [False, True])
def test_many_steps_at_once(place: Place, far: bool) -> None:
    pair = Pair(place, 7, dress="mixed")
    for _ in range(2):
        masks = [[k % 5 != 3, k % 7 != 2] for k in range(20)]
        steps = twins.stacked([pair.twin.step("UT" if k % 4 == 3 else "..", mask=masks[k], final=True)
                               for k in range(20)])  # fmt: skip
        pair.ram.extend(steps)
        pair.there.extend(place.tensors(steps) if far else steps)
        pair.check()


def dtypes_step(generator: np.random.Generator) -> dict[str, Any]:
    """Random bits, but for flags and the reward; tensors of the CPU."""

    def leaf(path: tuple[str, ...]) -> Tensor:
        field = DTYPES.leaves[path]
        size = (2, *field.shape)
        if field.dtype is torch.bool:
            return torch.from_numpy(generator.random(size) < 0.3)
        if path == ("reward",):
            return torch.from_numpy(generator.random(size, np.float32))
        raw = torch.from_numpy(generator.integers(0, 255, 2 * field.nbytes, np.uint8))
        return raw.view(field.dtype).view(size) if field.nbytes else torch.empty(size, dtype=field.dtype)

    return {name: DTYPES.rebuild(name, leaf) for name in DTYPES.names}


def test_every_dtype_keeps_its_bits(place: Place) -> None:
    generator = np.random.default_rng(0)
    ram, there = ReplayBuffer(DTYPES, 20, 2, seed=3), place.buffer(DTYPES, 20, 2, seed=3)
    for _ in range(15):
        step = dtypes_step(generator)
        step["next_obs"] = step["obs"]
        ram.add(step)
        there.add(place.tensors(step))
    for view in (Transition(), FrameStack(3), FrameStack(2, NStep(3), pad="zeros")):
        ram.view, there.view = view, deepcopy(view)
        assert_alike(ram.sample(32), there.sample(32), place.device)
    ours, theirs = ram.slice(1), there.slice(1)
    assert_alike(ours["obs"], theirs["obs"], place.device)  # all that the row of a final observation has
    complete = ours["complete"]
    for name, tensor in leaves_by_path(ours).items():
        assert bits(tensor[complete]) == bits(theirs[name].cpu()[complete]), name


def test_tensors_that_are_strided_or_need_a_gradient_are_stored_like_others(place: Place) -> None:
    pair = Pair(place)
    for k in range(6):
        step = pair.twin.step("..")
        pair.ram.add(step)
        far = place.tensors(step)
        obs = torch.stack([far["obs"], far["obs"]], -1)[..., 1]
        assert not obs.is_contiguous()
        pair.there.add({**far, "obs": obs.requires_grad_() if k % 2 else obs})
    pair.check()


def test_a_batch_is_a_copy(place: Place) -> None:
    pair = Pair(place, dress="mixed", sampler=Prioritized).play(*PLAYS)
    before = pair.there.data()
    for batch in (pair.there.sample(6), pair.there.slice(0), pair.there.data()):
        for tensor in leaves_by_path(batch).values():
            tensor.zero_()
    assert_alike(pair.ram.data(), pair.there.data(), place.device)
    assert_alike(pair.ram.data(), before, place.device)


def test_what_was_handed_over_may_be_written_to_afterwards(place: Place) -> None:
    pair = Pair(place, dress="mixed")
    for k in range(9):
        step = pair.twin.step("..")
        pair.ram.add(step)
        given = mixed(place, twins.mapped(np.copy, step), k)
        pair.there.add(given)
        twins.mapped(lambda x: x.zero_() if isinstance(x, Tensor) else x.fill(0), given)
    pair.check()


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_collector_fills_the_same(place: Place, mode: AutoresetMode) -> None:
    envs = [SyncVectorEnv([lambda: gym.make("CartPole-v1", max_episode_steps=9)] * 3, autoreset_mode=mode)
            for _ in range(2)]  # fmt: skip
    schema = Schema.from_env(envs[0])
    buffers = ReplayBuffer(schema, 90, 3, seed=0), place.buffer(schema, 90, 3, seed=0)
    for env, buffer in zip(envs, buffers, strict=True):
        Collector(env, lambda obs: (obs[:, 2] > 0).long(), buffer, seed=0).collect(60)
    assert buffers[0].stats() == buffers[1].stats()
    assert_alike(buffers[0].data(), buffers[1].data(), place.device)
    assert_alike(buffers[0].sample(50), buffers[1].sample(50), place.device)


RECURRENT = Schema({
    "obs": {"x": (3,), "camera": Field((36, 32), torch.uint8)},
    "action": Field((), torch.int64),
    "action_mask": {"small": Field((5,), torch.bool), "large": Field((1100,), torch.bool)},
    "hidden": ((2, 4), Field((3,), torch.float16)),
    "extra": Field((300,), torch.float64),
    "reward": (),
    "terminated": Field((), torch.bool),
    "truncated": Field((), torch.bool),
})  # fmt: skip


def random_step(schema: Schema, generator: np.random.Generator) -> dict[str, Any]:
    """Fields ``[2, ...]`` of random numbers; one step in eight ends an episode."""

    def leaf(path: tuple[str, ...]) -> Any:
        field, odds = schema.leaves[path], 0.5 if path[0] == "action_mask" else 0.06
        numbers = torch.from_numpy(generator.random((2, *field.shape)))
        return (numbers < odds if field.dtype is torch.bool else (numbers * 100).to(field.dtype)).numpy()

    step = {name: schema.rebuild(name, leaf) for name in schema.names}
    return step | {"next_obs": schema.rebuild("obs", leaf)}


FIELDS = [
    RECURRENT.names,
    ("obs", "action", "reward", "terminated", "truncated", "hidden"),
    ("action", "action_mask", "reward", "terminated", "truncated"),
]


@pytest.mark.parametrize(
    ("fields", "place", "sampler"),
    covering(FIELDS, PLACES, ["uniform", "prioritized, stratified", "recent, uniform"], full=2, quick=1),
    indirect=["place"],
)
def test_sequences_are_the_same(place: Place, fields: tuple[str, ...], sampler: str) -> None:
    named = {name: RECURRENT[name] for name in fields}
    schema = Schema(named if "obs" in named else {"obs": (2,), **named})
    weigh = "episodes" if sampler == "uniform" else "windows"
    views = [
        SequenceView(4, 2, "half", 3),
        SequenceView(3, time_first=False, weigh=weigh),
        SequenceView(5, 1, last=("action", "reward")),
    ]
    build = twins.SAMPLERS[sampler]
    ram, there = (
        make(schema, 60, 2, seed=5, view=deepcopy(views[0]), sampler=build()) for make in (ReplayBuffer, place.buffer)
    )
    generator = np.random.default_rng(1)
    for turn in range(often(50, 90)):
        step = random_step(schema, generator)
        ram.add(step)
        there.add(mixed(place, step, turn))
        if turn in (40, 60, often(49, 89)):
            for view in views:
                ram.view, there.view = view, deepcopy(view)
                for ours, theirs in ((ram.sample(9), there.sample(9)), (ram.data(), there.data())):
                    alike_sequences(ours, theirs, place.device)
                if ram.has_priorities:
                    for buffer, batch in ((ram, ours), (there, theirs)):
                        mask = batch["mask"]
                        errors = np.linspace(0, 2, mask.numel()).reshape(mask.shape)
                        assert buffer.update_priorities(batch["index"], errors, mask) == 0


def alike_sequences(ours: Any, theirs: Any, device: torch.device) -> None:
    assert list(ours) == list(theirs)
    assert_alike(ours, theirs, device)
    assert (len(ours), ours.num_steps) == (len(theirs), theirs.num_steps)
    one, other = leaves_by_path(ours), leaves_by_path(theirs)
    assert one.keys() == other.keys()
    for path, tensor in one.items():
        assert (other[path].device, other[path].dtype, other[path].shape) == (device, tensor.dtype, tensor.shape), path
        assert bits(other[path].cpu()) == bits(tensor), path


# The store.


@pytest.mark.parametrize("dress", ["box", "mixed"])
def test_rows_are_gathered_at_places_of_any_shape_and_are_zeros_at_negative_ones(place: Place, dress: str) -> None:
    pair = Pair(place, dress=dress).play(*PLAYS)
    ram, there = internals.ring(pair.ram).store, internals.ring(pair.there).store
    for places in (np.array([[3, -1, 9], [17, 0, -5]]), np.array([4, -1]), np.zeros((2, 0), np.int64)):
        ours, theirs = ram.read(places), there.read(places)
        assert list(ours) == list(theirs) == list(ram.leaves)
        some = [("reward",), *ram.large, ("action",)]
        assert list(there.read(places, some)) == list(ram.read(places, some)) == some
        (where,), (known,) = there.places(places), ram.places(places)
        for path, tensor in ours.items():
            assert tensor.shape == (*places.shape, *ram.leaves[path].shape)
            assert not tensor[torch.from_numpy(places < 0)].any()
            others = [theirs[path], there.gather([path], where)[path], there.gather(ours, where)[path]]
            for other in others:
                assert other.device == place.device
                assert other.shape == tensor.shape
                assert bits(other.cpu()) == bits(tensor) == bits(ram.gather([path], known)[path])


def test_only_what_plans_windows_is_in_ram(place: Place) -> None:
    store = internals.ring(Pair(place, dress="mixed").there).store
    assert store.target.shape == (18, 32)
    assert {(name,) for name in FLAGS} == set(ALWAYS_IN_RAM)
    for part in internals.parts(store):
        assert internals.words(part).device == place.device
        assert not set(ALWAYS_IN_RAM) & part.layout.fields.keys()


def test_what_crosses_to_the_device_and_back() -> None:
    """Of a step and a batch on the device nothing at all. Where the host has to know of an end, flags and rewards."""
    with far_device() as traffic:
        place = Place(ELSEWHERE, traffic)
        for dress in ("box", "mixed"):
            pair = Pair(place, 30, dress=dress)
            pair.there.check_ends = False  # which reads what the first episodes end on
            for _ in range(3):
                step = place.tensors(pair.twin.step(".."))
                step.pop("next_obs", None)
                traffic.clear()
                pair.there.add(step)
                assert traffic.back == [2 * 16]
                assert sum(traffic.out) <= 3 * 16  # places
            arrays = pair.twin.step("..")
            traffic.clear()
            pair.there.add(arrays)
            assert traffic.back == []
            assert len(traffic.out) == len(internals.parts(internals.ring(pair.there).store)) + 1
            traffic.clear()
            pair.there.sample(16)
            assert traffic.back == []
            assert len(traffic.out) == 1
            for turn, kinds in enumerate(("..", "T.", "..", ".U", "..")):
                step = place.tensors(pair.twin.step(kinds))
                step["next_obs"] = step["obs"]
                traffic.clear()
                pair.there.add(step)
                pair.there.sample(16)
                assert traffic.back == []
                assert bool(traffic.out) == (turn == 0)  # the bookkeeping goes there once


# Refusals.


def test_a_step_of_another_device_is_refused_and_changes_nothing(place: Place) -> None:
    pair = Pair(place, dress="mixed").play(*PLAYS)
    other = torch.device("cpu") if place.device.type != "cpu" else ELSEWHERE
    for name in ("obs", "action", "reward"):
        step = pair.twin.step("..")
        strange = twins.mapped(lambda x: torch.as_tensor(x).to(other), step[name])
        with pytest.raises(DeviceError, match=re.escape(f"the buffer is on {place.device}")):
            pair.there.add({**step, name: strange})
        pair.twin.interrupt()  # the twin has seen it, and the buffers have not
        pair.there.interrupt()
        pair.check()


def dumped(buffer: ReplayBuffer, rows: int = 18) -> tuple[bytes, ...]:
    """All bytes of the first rows, as they are saved."""
    store = internals.ring(buffer).store
    large = [store.dump_large(path, np.arange(rows)) for path in store.large]
    return store.dump(np.arange(rows)).tobytes(), *(block.numpy().tobytes() for block in large)


def saved(path: File) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """The tensors of a save; segments have their number instead of their name, which is drawn at random."""
    tensors, content = persist.read(path)
    named = {name: str(number) for number, name in enumerate(content["segments"])}
    return {
        ".".join(named.get(part, part) for part in name.split(".")): (tuple(x.shape), x.numpy().tobytes())
        for name, x in tensors.items()
    }


@pytest.mark.parametrize("far", [False, True])
def test_an_end_without_its_observation_is_refused_and_changes_nothing(place: Place, far: bool) -> None:
    pair = Pair(place, dress="mixed").play(*PLAYS)
    before = dumped(pair.there)
    step = pair.twin.step("T.")
    del step["next_obs"]
    with pytest.raises(FieldError, match="final observation is missing"):
        pair.there.add(place.tensors(step) if far else step)
    assert dumped(pair.there) == before
    pair.twin.interrupt()
    pair.there.interrupt()
    pair.check()


def test_a_mixture_is_of_one_device(place: Place) -> None:
    one, other = (Pair(place).play(*PLAYS) for _ in range(2))
    shares = {"a": 0.5, "b": 0.5}
    batch = Mixture({"a": one.there, "b": other.there}, shares).sample(8)
    assert_alike(Mixture({"a": one.ram, "b": other.ram}, shares).sample(8), batch, place.device)
    if place.device.type != "cpu":
        with pytest.raises(DeviceError, match="one device"):
            Mixture({"a": one.there, "b": other.ram}, shares)


# Moving.


@pytest.mark.parametrize(
    ("place", "dress", "ordered"),
    covering(PLACES, ["box", "mixed"], [True, False], full=3, quick=1),
    indirect=["place"],
)
def test_a_save_is_the_same_and_loads_anywhere(place: Place, dress: str, ordered: bool, tmp_path: File) -> None:
    pair = Pair(place, dress=dress, ordered=ordered, sampler=Prioritized)
    pair.play(*(p for p in PLAYS if ordered or p != "|")).check()
    pair.ram.save(tmp_path / "ram")
    pair.there.save(tmp_path / "there")
    assert saved(tmp_path / "ram") == saved(tmp_path / "there")
    for name in ("ram", "there"):
        here, far = ReplayBuffer.load(tmp_path / name), place.load(tmp_path / name)
        assert isinstance(internals.ring(here).store, ReplayRows)
        assert isinstance(internals.ring(far).store, DeviceRows)
        assert far.device == place.device
        for made in (here, far):
            made.check()
        assert_alike(here.data(), far.data(), place.device)
        assert_alike(pair.ram.data(), far.data(), place.device)
        assert_alike(here.sample(7), far.sample(7), place.device)
    # they go on alike
    loaded = place.load(tmp_path / "ram")
    for k in range(8):
        step = pair.twin.step("..")
        pair.ram.add(step)
        loaded.add(mixed(place, step, k))
    assert_alike(pair.ram.data(), loaded.data(), place.device)
    assert_alike(pair.ram.sample(9), loaded.sample(9), place.device)


def test_a_save_is_moved_in_pieces(place: Place, tmp_path: File, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(place, dress="mixed").play(*PLAYS)
    pair.ram.save(tmp_path / "ram")
    monkeypatch.setattr("relive.memory.device.PIECE", 3 * 1300)
    monkeypatch.setattr("relive.replay.saving.PIECE", 1300)
    assert len(list(internals.pieces(internals.ring(pair.there).store)(np.arange(18)))) > 5
    assert dumped(pair.there) == dumped(pair.ram)
    pair.there.save(tmp_path / "there")
    assert saved(tmp_path / "ram") == saved(tmp_path / "there")
    assert_alike(pair.ram.data(), place.load(tmp_path / "ram").data(), place.device)


@pytest.mark.parametrize("dress", ["box", "mixed"])
def test_rows_that_are_no_dump_are_refused(place: Place, dress: str) -> None:
    pair = Pair(place, dress=dress).play(*PLAYS)
    for buffer in (pair.ram, pair.there):
        store = internals.ring(buffer).store
        rows = store.dump(np.arange(6))
        blocks = {path: store.dump_large(path, np.arange(6)) for path in store.large}
        for wrong in (rows[:1], rows[:, :-1], rows.astype(np.int16)):
            with pytest.raises(ValueError, match="rows: expected uint8"):
                store.restore(np.arange(6), wrong, blocks)
        for path, block in blocks.items():
            for wrong in (block[:1], block.long()):
                with pytest.raises(ValueError, match=r"camera.*expected"):
                    store.restore(np.arange(6), rows, {path: wrong})
    pair.check()


def test_a_torn_save_is_refused(place: Place, tmp_path: File) -> None:
    pair = Pair(place, dress="mixed").play(*PLAYS)
    pair.there.save(tmp_path / "save")
    for file in (tmp_path / "save").iterdir():
        if file.name != "manifest.json":
            file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(FileFormatError):
        place.load(tmp_path / "save")


@pytest.mark.parametrize("dress", ["box", "mixed"])
@pytest.mark.parametrize("ordered", [True, False])
def test_buffers_are_appended_from_and_to_anywhere(place: Place, dress: str, ordered: bool) -> None:
    pair = Pair(place, dress=dress, ordered=ordered).play(*(p for p in PLAYS if ordered or p != "|"))
    expected = ReplayBuffer(pair.ram.schema, 60, 2, seed=0, ordered=ordered)
    expected.append(pair.ram)
    for source in (pair.ram, pair.there):
        far = place.buffer(pair.ram.schema, 60, 2, seed=0, ordered=ordered)
        near = ReplayBuffer(pair.ram.schema, 60, 2, seed=0, ordered=ordered)
        for target in (far, near):
            target.append(source)
            target.check()
            assert_alike(expected.data(), target.data(), target.device)
            assert_alike(expected.slice(1), target.slice(1), target.device)


# Memory.


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("dress", twins.DRESSES)
def test_the_plan_is_what_the_buffer_takes_to_the_byte(dress: str, ordered: bool) -> None:
    with far_device() as traffic:
        pair = Pair(Place(ELSEWHERE, traffic), 7, dress=dress, ordered=ordered)
        store, schema = internals.ring(pair.there).store, pair.ram.schema
        plan = ReplayBuffer.plan(schema, 15, 2, ordered=ordered, device=ELSEWHERE)
        assert plan.rows == store.num_rows == 14
        assert plan.host_bytes == store.target.nbytes == 14 * 32
        rows = sum(internals.words(part).nbytes for part in internals.parts(store))
        assert plan.device_bytes == rows + internals.nbytes_on_device(pair.there)
        assert plan.total_bytes == plan.host_bytes + plan.device_bytes
        assert sum(plan.fields.values()) == plan.row_bytes
        for path, field in store.leaves.items():
            assert plan.fields[".".join(path)] == field.nbytes
        assert re.search(r"in RAM +32 B a row", str(plan))
        assert re.search(rf"on meta +{plan.row_bytes - 32:,} B a row", str(plan))
        assert re.search(rf"bookkeeping on meta +{plan.bookkeeping_bytes} B", str(plan))
        for spare, rows in ((0, 14), (-1, 12)):
            size = plan.device_bytes + spare
            sized = ReplayBuffer.plan(schema, None, 2, capacity_bytes=size, ordered=ordered, device=ELSEWHERE)
            assert sized.rows == rows


def test_the_plan_of_a_buffer_in_ram_has_nothing_elsewhere() -> None:
    plan = ReplayBuffer.plan(DTYPES, 100)
    assert plan.device_bytes == 0
    assert plan.host_bytes == plan.total_bytes == 100 * plan.row_bytes
    assert "in RAM" not in str(plan)


def test_what_does_not_fit_on_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = SimpleNamespace(
        mem_get_info=lambda _: (1_000, 10**6), memory_reserved=lambda _: 5_000, memory_allocated=lambda _: 2_000
    )
    monkeypatch.setattr(torch, "cuda", known)  # 1,000 free, and 3,000 that torch keeps to itself
    schema = Schema(
        {"obs": (16,), "reward": (), "terminated": Field((), torch.bool), "truncated": Field((), torch.bool)}
    )
    fits = ReplayBuffer.plan(schema, capacity_bytes=4_000, device="cuda")
    assert (fits.rows, fits.device_bytes) == (43, 45 * (64 + 22) + 8 * (6 + 6))
    fits.require_memory()
    with pytest.raises(
        ParameterError, match=r"would take 4,052 bytes on cuda and 4,000 are free; lower the capacity:\n44"
    ):
        ReplayBuffer.plan(schema, 44, device="cuda").require_memory()


# Hindsight.


def summed(goals: Any) -> Any:
    return goals.reshape(len(goals), -1)[:, :12].astype(np.float32).sum(1)


HINDSIGHTS = {
    "future": lambda: Hindsight(lambda a, d: summed(a) - summed(d), k=4, gamma=0.5),
    "final, 3-step, terminated": lambda: Hindsight(
        lambda a, d: summed(a) - 2 * summed(d), "final", terminated_fn=lambda a, d: summed(a) % 3 == 0, n=3, gamma=0.5
    ),
    "steps, 2-step": lambda: Hindsight(
        strategy="episode", n=2, gamma=0.5, relabel=lambda steps, initial, final, chosen: {
            "obs": {"desired_goal": chosen["achieved_goal"]}, "next_obs": {"desired_goal": final["achieved_goal"]},
            "reward": summed(steps["obs"]["achieved_goal"]) + summed(initial["observation"]),
            "action": steps["action"] * 0,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("view", "place", "dress"),
    covering(HINDSIGHTS, PLACES, ["goals", "image goals", "goals and images"], full=2, quick=1),
    indirect=["place"],
)
def test_hindsight_gives_the_same_goals_on_a_device(place: Place, view: str, dress: str) -> None:
    pair = Pair(place, dress=dress, view=HINDSIGHTS[view]).play(*PLAYS)
    for _ in range(3):
        batches = pair.ram.sample(12), pair.there.sample(12)
        assert batches[0]["relabelled"].any()
        assert_alike(*batches, place.device)
    pair.check()


# Rows where they lie.


@pytest.mark.parametrize("ordered", [True, False])
def test_the_block_shows_every_row_where_it_lies(place: Place, ordered: bool) -> None:
    schema = Schema(
        {"obs": {"x": (2,), "image": Field((40, 16), torch.float32)}, "action": Field((), torch.int64), "reward": ()}
        | {name: Field((), torch.bool) for name in ("terminated", "truncated")}
    )
    far, here = place.buffer(schema, 12, 2, ordered=ordered), ReplayBuffer(schema, 12, 2, ordered=ordered)
    rng = np.random.default_rng(0)
    assert not any(x.any() for x in leaves_by_path(here.block).values())
    for t in range(9):
        obs = {"x": rng.normal(size=(2, 2)), "image": rng.normal(size=(2, 40, 16))}
        step = {"obs": obs, "action": np.array([t, -t]), "reward": rng.normal(size=2)}
        step |= {"terminated": np.zeros(2, np.bool_), "truncated": np.zeros(2, np.bool_)}
        for buffer in (far, here):
            buffer.add(step | ({} if ordered else {"next_obs": obs}))
    block = here.block
    assert len(block) == 12
    assert block["action"].tolist() == [6, 7, 8, 3, 4, 5, -6, -7, -8, -3, -4, -5]
    for env in range(2):
        newest = here.slice(env)["obs", "image"]
        assert torch.equal(block["obs", "image"][6 * env : 6 * env + 3], newest[3:])
        assert torch.equal(block["obs", "image"][6 * env + 3 : 6 * env + 6], newest[:3])
    for key, x in leaves_by_path(block).items():
        assert torch.equal(far.block[key].cpu(), x), key
    block["action"][2] = 77
    assert here.slice(0)["action"].tolist() == [3, 4, 5, 6, 7, 77]
