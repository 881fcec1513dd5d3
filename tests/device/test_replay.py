"""Replays on a device give the batches of replays in RAM, to the bit, and ask the host for nothing on the way."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from relive import FrameStack, NStep, Prioritized, ReplayBuffer, ReturnsToGo, Sequence, Uniform
from relive.errors import EmptyError, LifecycleError, ParameterError, ReliveError
from support import internals
from support.cases import covering
from support.device_twins import SCHEMA, WORLDS, Twins, assert_same, bits
from support.effort import in_ci, often
from support.other_device import no_waiting, places
from support.tapes import TAPED

STACKS = [(2, "repeat", None), (3, "zeros", ("camera",))]


@pytest.mark.parametrize(("world", "stack"), covering(WORLDS, STACKS, full=2, quick=1))
def test_stacks_are_those_of_a_replay_in_ram(device: torch.device, world: Any, stack: Any) -> None:
    (envs, rows, n, odds), (depth, pad, keys) = world, stack
    twins = Twins(device, envs, rows, seed=rows, view=lambda: FrameStack(depth, NStep(n, 0.9), pad, keys))
    for t in range(often(2, 4) * rows):
        twins.add(odds)
        if t > 2 and t % often(3, 1) == 0 and len(twins.ram) * 3 > envs * min(t, rows):
            with no_waiting() as watch:
                watch.allow = not internals.is_ahead(twins.there)
                theirs = twins.there.sample(20)
            assert_same(twins.ram.sample(20), theirs)
    twins.check()


SAMPLERS = [Uniform, Prioritized, lambda: Prioritized(0.7, (0.3, 1.0, 9), stratified=False)]
FORMS = ["shared", "own", "unordered"]


@pytest.mark.parametrize(("world", "sampler", "form"), covering(WORLDS, SAMPLERS, FORMS, full=2, quick=1))
def test_batches_are_those_of_a_replay_in_ram(device: torch.device, world: Any, sampler: Any, form: str) -> None:
    envs, rows, n, odds = world
    options: dict[str, Any] = {"own": {"own_next_obs": True}, "unordered": {"ordered": False}}.get(form, {})
    n = 1 if form == "unordered" else n
    twins = Twins(device, envs, rows, seed=envs * rows, sampler=sampler, view=lambda: NStep(n, 0.97), **options)
    for t in range(often(3, 9) * rows // 2 if rows > 9 else 5 * rows):
        twins.add(odds)
        if t < 2 or t % often(5, 3):
            continue
        with no_waiting() if t > 5 else no_waiting(allow=True):
            theirs = twins.there.sample(70)
        assert t < 6 or internals.is_ahead(twins.there)
        ours = twins.ram.sample(70)
        assert_same(ours, theirs)
        if twins.ram.has_priorities:
            twins.update(ours, theirs)
    twins.check()
    assert_same(*twins.batches(33))


@pytest.mark.parametrize("device", places(TAPED), indirect=True)
def test_the_host_takes_its_turns_between(device: torch.device, tmp_path: Any) -> None:
    """Whatever needs the ring in RAM has it up to date, and what it changes is known on the device afterwards."""
    twins = Twins(device, 4, 12, seed=3, sampler=Prioritized, view=lambda: NStep(3))
    both = twins.ram, twins.there
    turns = [
        lambda buffer: buffer.interrupt([1]),
        lambda buffer: buffer.clear(),
        lambda buffer: setattr(buffer.sampler, "alpha", 0.9),
        lambda buffer: setattr(buffer.sampler, "eps", 1e-3),
        lambda buffer: setattr(buffer.sampler, "beta", (0.1, 0.7, 20)),
        lambda buffer: setattr(buffer.sampler, "default_error", 2.5),
        lambda buffer: setattr(buffer.sampler, "default_error", None),
        lambda buffer: setattr(buffer.sampler, "largest_error", 50.0),
        lambda buffer: setattr(buffer, "view", NStep(2, 0.5)),
        lambda buffer: setattr(buffer.view, "n", 4),
        lambda buffer: setattr(buffer, "seed", 2**64 - 3),
        lambda buffer: setattr(buffer.sampler, "normalize", "buffer"),
        lambda buffer: setattr(buffer.sampler, "normalize", "batch"),
        lambda buffer: setattr(buffer.sampler, "stratified", False),
        lambda buffer: buffer.stats(),
        str,
        lambda buffer: buffer.update_priorities(buffer.data()["index"], np.linspace(0, 9, len(buffer))),
    ]
    for turn, change in enumerate([*turns, *turns[:: often(-4, -1)]]):
        for _ in range(often(5, 7)):
            twins.add(0.15)
        for _ in range(3):
            twins.update(*twins.batches(16))
        assert len(twins.there) == len(twins.ram)
        assert internals.is_ahead(twins.there) or twins.there.sampler.normalize == "buffer", turn
        for buffer in both:
            change(buffer)
        if turn % 3 == 0:
            twins.add_to_some([0, 2])
        twins.check()
    twins.add(0.1)
    for name, buffer in zip(("ram", "there"), both, strict=True):
        buffer.save(tmp_path / name)
    loaded = [ReplayBuffer.load(tmp_path / name) for name in ("ram", "there")]
    assert_same(*(buffer.data() for buffer in loaded))
    assert_same(*(buffer.sample(20) for buffer in loaded))


def test_errors_that_cannot_be_stored_are_passed_over_and_told_of_later(device: torch.device) -> None:
    twins = Twins(device, 4, 12, seed=3, sampler=Prioritized)
    for _ in range(9):
        twins.add()
    ours, _ = twins.batches(8)
    errors = torch.rand(8, generator=torch.Generator().manual_seed(0))
    keep = torch.tensor([True, False, True, True, False, True, True, False])
    bad = torch.where(keep, errors, torch.tensor([0, torch.nan, 0, 0, torch.inf, 0, 0, 0]))
    index = torch.where(torch.arange(8) == 7, 10**9, ours["index"])
    bad[7] = errors[7]
    twins.ram.update_priorities(ours["index"][keep], errors[keep])
    far = twins.far(index), twins.far(bad)
    with no_waiting():
        late = twins.there.update_priorities(*far)
    assert int(late) == 0
    with pytest.warns(UserWarning, match="3 TD errors were NaN"):
        twins.there.stats()
    twins.check()


def test_errors_that_come_too_late_are_counted_and_change_nothing(device: torch.device) -> None:
    """The rows were overwritten meanwhile. What is wrong with an error goes before that: only right ones are late."""
    twins = Twins(device, 2, 6, seed=3, sampler=Prioritized)
    for _ in range(6):
        twins.add(0.2)
    ours, theirs = twins.batches(12)
    for _ in range(3):
        twins.add(0.2)
    alive = torch.isin(ours["index"], twins.ram.data()["index"])
    assert 0 < int(alive.sum()) < 12
    errors = torch.where(alive, torch.linspace(1.0, 2.0, 12), 700.0)
    late = twins.ram.update_priorities(ours["index"], errors)
    assert late == int((~alive).sum())
    assert int(twins.there.update_priorities(theirs["index"], twins.far(errors))) == late
    assert internals.is_ahead(twins.there)
    for buffer in (twins.ram, twins.there):
        assert 1.0 <= buffer.sampler.largest_error <= 2.0
    twins.check()
    twins.batches(8)
    wrong = torch.where(alive, errors, torch.nan)  # late and NaN, which a replay in RAM refuses
    index = torch.where(alive, ours["index"], 10**9)  # never issued
    assert int(twins.there.update_priorities(theirs["index"], twins.far(wrong))) == 0
    assert int(twins.there.update_priorities(twins.far(index), twins.far(errors))) == 0
    with pytest.warns(UserWarning, match=f"{2 * late} TD errors were NaN"):
        assert twins.there.sampler.largest_error <= 2.0


def test_rewards_that_are_not_finite_are_counted_whichever_they_are(device: torch.device) -> None:
    twins = Twins(device, 3, 9, seed=3)
    for t in range(12):
        step = twins.step(0.1)
        if t % 3 == 2:
            step["reward"] = torch.tensor([torch.nan, torch.inf, -torch.inf]).roll(t)
        twins.ram.add(step)
        twins.there.add(twins.far(step))
        if t > 3:
            twins.batches(4)
    assert internals.is_ahead(twins.there)
    stats = twins.there.stats()
    assert stats == twins.ram.stats()
    assert stats["not_finite_rewards"] == 12


def test_batches_of_a_captured_graph_count(device: torch.device) -> None:
    """A graph draws batches of which the host does not know: they are counted when the bookkeeping comes back."""
    twins = Twins(device, 4, 12, seed=3)
    for _ in range(9):
        twins.add()
    drawn = [twins.ram.sample(8) for _ in range(4)]
    twins.there.sample(8)
    part = internals.on_device(twins.there)
    for _ in range(2):
        internals.read_batch(part)(8, part.reads(twins.there.view))  # what a graph replays
    assert twins.there.stats()["batches"] == 3
    assert_same(drawn[3], twins.there.sample(8))


@pytest.mark.parametrize("options", [{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}])
def test_graphs_of_the_compiler_are_refused(options: dict[str, Any]) -> None:
    there = Twins(torch.device("cpu"), 2, 8, seed=0).there
    with pytest.raises(ParameterError, match=r"a replay makes CUDA graphs of its own, .* use mode='default'"):
        there.compile(**options)


def test_a_replay_in_ram_alone_cannot_be_compiled() -> None:
    with pytest.raises(LifecycleError, match="in RAM"):
        ReplayBuffer(SCHEMA, 20).compile()


@pytest.mark.parametrize("sampler", [in_ci(Uniform), pytest.param(Prioritized, marks=pytest.mark.slow)])
def test_compiled_batches_are_those_of_a_replay_in_ram(sampler: Any) -> None:
    """All three calls compile as a whole, and give the same bits."""
    twins = Twins(torch.device("cpu"), 8, 12, seed=3, sampler=sampler, view=lambda: NStep(3))
    twins.hold_compiled(40, adds=30, first=3)


def test_another_view_is_followed(device: torch.device) -> None:
    twins = Twins(device, 4, 12, seed=3)
    for _ in range(3):
        twins.add(0.0)
    for view in (NStep(3), FrameStack(3), FrameStack(2, NStep(2), "zeros"), NStep(1), FrameStack(4)):
        for buffer in (twins.ram, twins.there):
            buffer.view = deepcopy(view)
        for _ in range(5):
            twins.add()
            twins.batches(12)
    twins.check()


class Breaking(TorchDispatchMode):
    """Ctrl-C before so many operations."""

    def __init__(self, operations: int) -> None:
        super().__init__()
        self.left = operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", places(in_ci(TAPED)), indirect=True)
@pytest.mark.parametrize("call", ["add", "update"])
def test_a_call_that_is_broken_off_leaves_only_whole_rows(device: torch.device, call: str) -> None:
    broken = 0
    for operations in range(0, 400, often(83, 3)):
        twins = Twins(device, 3, 8, seed=operations, sampler=Prioritized, view=lambda: NStep(2))
        for _ in range(17):
            twins.add(0.2)
        for _ in range(2):
            twins.update(*twins.batches(9))
        known = {int(row["index"]): row for row in map(twins.ram.data().rows, range(len(twins.ram)))}
        step, batch = twins.far(twins.step(0.3)), twins.there.sample(9)
        errors = twins.far(torch.rand(9))
        try:
            with Breaking(operations):
                twins.there.add(step) if call == "add" else twins.there.update_priorities(batch["index"], errors)
            break
        except KeyboardInterrupt:
            broken += 1
        if operations % 2:  # either the host or the device comes next
            twins.there.add(twins.far(twins.step(0.3)))
        twins.there.check()
        data = twins.there.data()
        rows = {int(row["index"]): row for row in map(data.rows, range(len(data)))}
        old = [i for i in rows if i in known]
        assert len(old) >= 3
        for i in old:
            one, other = known[i], rows[i]
            assert bits(one["obs", "x"]) == bits(other["obs", "x"].cpu())
            assert bits(one["action"]) == bits(other["action"].cpu())
        for _ in range(9):
            twins.there.add(twins.far(twins.step(0.2)))
            twins.there.update_priorities(twins.there.sample(9)["index"], errors)
        twins.there.check()
    assert broken > 1


def test_what_a_sampler_says_and_takes_while_the_device_is_ahead(device: torch.device) -> None:
    twins = Twins(device, 3, 12, seed=5, sampler=Prioritized)
    other = Prioritized()
    source = ReplayBuffer(SCHEMA, 36, 3, sampler=other, seed=1, check_ends=False)
    for _ in range(12):
        step = twins.step(0.2)
        for buffer in (twins.ram, source):
            buffer.add(step)
        twins.there.add(twins.far(step))
    source.update_priorities(source.data()["index"], torch.linspace(1, 9, len(source)))
    for read in (
        lambda sampler: sampler.mass,
        lambda sampler: sampler.smallest,
        lambda sampler: sampler.largest_error,
        lambda sampler: sampler.priorities().sum(),
        lambda sampler: sampler.state_dict()["largest"],
    ):
        twins.update(*twins.batches(9))
        assert internals.is_ahead(twins.there)
        assert read(twins.there.sampler) == read(twins.ram.sampler)
    twins.update(*twins.batches(9))
    for buffer in (twins.ram, twins.there):
        buffer.sampler.load_state_dict(other.state_dict())
    twins.check()
    twins.batches(9)


def test_a_single_row_is_stored_whatever_its_strides(device: torch.device) -> None:
    twins = Twins(device, 1, 9, seed=5)
    for _ in range(12):
        step = twins.step(0.3)
        strided = {**step, "reward": torch.stack([step["reward"], step["reward"]], 1)[:, 1]}
        twins.ram.add(step)
        twins.there.add(twins.far(strided))
    twins.check()
    for buffer in (twins.ram, twins.there):  # runs of one row
        buffer.append(deepcopy(twins.ram))
    twins.check()


@pytest.mark.parametrize("window", [NStep(2, 0.9), FrameStack(2), Sequence(3)])
def test_views_that_a_device_does_not_read_are_left_to_the_host(device: torch.device, window: Any) -> None:
    twins = Twins(device, 4, 12, seed=3, view=lambda: ReturnsToGo(0.9, deepcopy(window)))
    for t in range(20):
        twins.add()
        if t > 6:
            assert_same(twins.ram.sample(12), twins.there.sample(12))
    twins.check()


def test_stacks_too_deep_for_the_ring_are_left_to_the_host(device: torch.device) -> None:
    twins = Twins(device, 2, 4, seed=5, view=lambda: FrameStack(4))
    for _ in range(9):
        twins.add(0.0)
    for buffer in (twins.ram, twins.there):
        assert len(buffer) == 0
        with pytest.raises(EmptyError):
            buffer.sample(3)


def test_wrong_errors_are_refused_as_in_ram(device: torch.device) -> None:
    twins = Twins(device, 3, 9, seed=5, sampler=Prioritized)
    for _ in range(9):
        twins.add(0.2)
    ours, theirs = twins.batches(2)
    assert twins.ram.update_priorities(ours["index"], [1.0, 2.0]) == 0
    assert twins.there.update_priorities(theirs["index"], [1.0, 2.0]) == 0
    for errors in (1.0, [1.0], "x"):
        kinds = []
        for buffer, batch in ((twins.ram, ours), (twins.there, theirs)):
            with pytest.raises(ReliveError) as caught:
                buffer.update_priorities(batch["index"], errors)
            kinds.append(type(caught.value))
        assert kinds[0] is kinds[1]
    twins.check()


def test_a_view_whose_depth_was_changed_is_counted_anew(device: torch.device) -> None:
    twins = Twins(device, 2, 12, seed=5, view=lambda: FrameStack(2))
    for _ in range(15):
        twins.add(0.1)
    for buffer in (twins.ram, twins.there):
        buffer.view.depth = 6
    assert len(twins.there) == len(twins.ram)


def test_batches_without_any_priority_are_told_of_later(device: torch.device) -> None:
    twins = Twins(device, 3, 9, seed=5, sampler=lambda: Prioritized(2.0, eps=1e-200, default_error=0.0))
    for _ in range(6):
        twins.there.add(twins.far(twins.step(0.2)))
    for _ in range(2):
        twins.there.sample(4)
    with pytest.warns(UserWarning, match="2 batches were drawn while all priorities were 0"):
        twins.there.stats()


def test_a_parameter_that_is_set_by_another_thread_waits_for_the_step_under_way() -> None:
    twins = Twins(torch.device("cpu"), 3, 9, seed=5, sampler=Prioritized)
    for _ in range(8):
        twins.add(0.2)
    done = Event()

    def change() -> None:
        twins.there.sampler.alpha = 0.9
        done.set()

    other = Thread(target=change)
    with twins.there.lock:  # as in the middle of a step
        other.start()
        assert not done.wait(0.2)
    other.join(60)
    assert done.is_set()
    twins.ram.sampler.alpha = 0.9
    twins.check()


def test_bringing_back_may_be_broken_off_as_well(device: torch.device) -> None:
    """Ctrl-C in a step, and again while the next call learns of it: a third call finds whole rows."""
    broken = 0
    for operations in range(0, 200, often(41, 3)):
        twins = Twins(device, 3, 8, seed=operations, sampler=Prioritized, view=lambda: NStep(2))
        for _ in range(12):
            twins.add(0.2)
        step = twins.far(twins.step(0.3))
        with suppress(KeyboardInterrupt), Breaking(40):
            twins.there.add(step)
        try:
            with Breaking(operations):
                twins.there.stats()
        except KeyboardInterrupt:
            broken += 1
        twins.there.check()
        for _ in range(9):
            twins.there.add(twins.far(twins.step(0.2)))
            twins.there.sample(9)
        assert internals.is_ahead(twins.there)
        twins.there.check()
    assert broken
