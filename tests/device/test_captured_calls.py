"""Calls that are captured in graphs. Here a tape stands in for a CUDA graph; `tests/gpu` has the real ones."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import relive.memory.graphs
import relive.rollout.buffer
from relive import GAE, Field, NStep, Prioritized, RolloutBuffer, Schema
from relive.errors import FieldError
from relive.memory.graphs import MOST_FORMS, Graphed, capture
from relive.rollout.minibatches import Permutations
from support import internals
from support.device_twins import Twins, assert_same
from support.other_device import ELSEWHERE, far_device, no_waiting
from support.tapes import Tape, with_tapes

CPU = torch.device("cpu")

FLAGS: dict[str, Any] = {name: Field((), torch.bool) for name in ("terminated", "truncated")}


class Sums:
    """A function whose calls are counted: it adds what it is given to a total."""

    def __init__(self) -> None:
        self.total, self.calls = torch.zeros(3), 0

    def __call__(self, parts: list[Tensor], times: int) -> dict[str, Tensor]:
        self.calls += 1
        for part in parts:
            self.total += part * times
        return {"total": self.total * 1}


@pytest.fixture
def tapes() -> Iterator[list[Tape]]:
    """What was captured."""
    with with_tapes() as made:
        yield made


def test_the_second_call_of_a_form_is_captured_and_replayed_from_then_on(tapes: list[Tape]) -> None:
    sums = Sums()
    graphed = Graphed(sums, CPU, lambda: ())
    found = [graphed([torch.full((3,), float(k)), torch.ones(3)], 2)["total"] for k in range(6)]
    assert (len(tapes), sums.calls) == (1, 3)
    assert [x[0].item() for x in found] == [2, 6, 12, 20, 30, 42]  # each is the caller's


def test_each_form_has_a_graph_of_its_own(tapes: list[Tape]) -> None:
    sums, relied_on = Sums(), ["a"]
    graphed = Graphed(sums, CPU, lambda: tuple(relied_on))
    one = torch.ones(3)
    forms = [([one], 1), ([one], 2), ([one, one], 1), ([one.double()], 1), ([one[:1]], 1)]
    for parts, times in forms * 4:
        graphed(parts, times)
    assert len(tapes) == 5
    relied_on[0] = "b"
    before = sums.total.clone()
    for _ in range(4):
        graphed([one], 5)
    assert len(tapes) == 6
    assert torch.equal(sums.total, before + 20)


def test_arguments_are_copied_whatever_their_strides_and_modes(tapes: list[Tape]) -> None:
    sums = Sums()
    graphed = Graphed(sums, CPU, lambda: ())
    for k in range(6):
        with torch.inference_mode(k % 3 == 0):
            strided = torch.arange(6.0)[::2]
            if k % 3 == 1:
                strided.requires_grad_()
            found = graphed([strided], 1)["total"]
        assert not found.requires_grad
        assert found.tolist() == [0, 2 * (k + 1), 4 * (k + 1)]
    assert len(tapes) == 1


def test_without_memory_for_a_graph_a_call_is_made_as_it_is(tapes: list[Tape], monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(*given: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(relive.memory.graphs, "capture", capture)
    sums = Sums()
    graphed = Graphed(sums, CPU, lambda: ())
    graphed([torch.ones(3)], 1)
    with pytest.warns(UserWarning, match="there is no memory for a CUDA graph, .* CUDA out of memory"):
        assert graphed([torch.ones(3)], 1)["total"].tolist() == [2, 2, 2]
    assert graphed([torch.ones(3)], 1)["total"].tolist() == [3, 3, 3]
    assert sums.calls == 3


def test_a_call_within_a_graph_of_the_caller_is_a_part_of_that(
    tapes: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    sums = Sums()
    graphed = Graphed(sums, CPU, lambda: ())
    for _ in range(5):
        graphed([torch.ones(3)], 1)
    assert (len(tapes), sums.calls) == (0, 5)


@pytest.mark.parametrize("where", ["begin", "call"])
def test_a_capture_that_ctrl_c_breaks_off_is_ended(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Graph:
        def capture_begin(self, **options: Any) -> None:
            calls.append("begin")
            if where == "begin":
                raise KeyboardInterrupt

        def capture_end(self) -> None:
            calls.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda given: nullcontext())
    for name in ("current_stream", "Stream"):
        monkeypatch.setattr(torch.cuda, name, mock.Mock())
    with pytest.raises(KeyboardInterrupt):
        capture(mock.Mock(side_effect=KeyboardInterrupt), CPU, None)
    assert calls == ["begin", "end"]
    assert gc.isenabled()


def test_only_some_forms_are_kept(tapes: list[Tape]) -> None:
    sums = Sums()
    graphed = Graphed(sums, CPU, lambda: ())
    many = 2 * MOST_FORMS
    for times in [*range(many), 0]:
        for _ in range(3):
            graphed([torch.ones(3)], times)
    assert len(tapes) == many + 1  # the first was given up, and is made anew
    assert sums.total.tolist() == [3 * sum(range(many))] * 3


def test_a_replay_goes_on_with_its_graphs_after_a_turn_of_the_host(tapes: list[Tape]) -> None:
    """Only a change of what they rely on makes new ones."""
    twins = Twins(CPU, 4, 12, seed=3, sampler=Prioritized, view=lambda: NStep(3))
    kept: list[Any] = []

    def play() -> None:
        for _ in range(6):
            twins.add(0.15)
        for _ in range(4):
            ours, theirs = twins.batches(16)
            twins.update(ours, theirs)
            kept.append((ours, theirs))
        twins.check()  # a turn of the host

    play()
    assert len(tapes) == 3  # a step, a batch, its errors
    play()
    for buffer in (twins.ram, twins.there):
        buffer.sampler.alpha = 0.3
    play()
    assert len(tapes) == 3
    for buffer in (twins.ram, twins.there):
        buffer.view.n = 2
    play()
    assert len(tapes) == 4
    for buffer in (twins.ram, twins.there):
        buffer.sampler.stratified = not buffer.sampler.stratified
    play()
    assert len(tapes) == 7
    for ours, theirs in kept:
        assert_same(ours, theirs)  # no later call has written to a batch


def test_permutations_are_made_by_a_graph(tapes: list[Tape]) -> None:
    ram, there = Permutations(3), Permutations(3)
    with far_device():
        for count in [50] * 5 + [7] * 3:
            assert there.next(count, ELSEWHERE).cpu().tolist() == ram.next(count).tolist()
    assert len(tapes) == 2
    copied = deepcopy(there)
    assert copied.next(9).tolist() == ram.next(9).tolist()


def rollout_of(device: Any, **options: Any) -> RolloutBuffer:
    schema = Schema({"obs": (3,), "camera": Field((40, 40), torch.uint8), "reward": (), "value": (), **FLAGS})
    return RolloutBuffer(schema, 6, 4, seed=3, device=device, **options)


def fill(rollout: RolloutBuffer, seed: int, steps: int = 6, real: bool = True) -> None:
    """Put other steps into a rollout, without its mask unless some are not ``real``."""
    rng, device = torch.Generator().manual_seed(seed), rollout.device
    rollout.clear()
    for _ in range(steps):
        step = {name: torch.randn(4, generator=rng) for name in ("reward", "value", "final_value")}
        step |= {name: torch.rand(4, generator=rng) < 0.2 for name in FLAGS}
        step |= {} if real else {"mask": torch.rand(4, generator=rng) < 0.8}
        step |= {"obs": torch.randn(4, 3, generator=rng)}
        step |= {"camera": torch.randint(0, 256, (4, 40, 40), generator=rng).to(torch.uint8)}
        rollout.add({name: value.to(device) for name, value in step.items()})
    rollout.set_last(value=torch.ones(4).to(device))


def test_a_rollout_is_finished_by_one_graph_for_each_form_and_to_the_bit_as_without(tapes: list[Tape]) -> None:
    """Forms are other parameters, a rollout that is not full, and one with steps that are not real."""
    with far_device():
        taped, eager = rollout_of(ELSEWHERE), rollout_of(ELSEWHERE)
        forms = [(GAE(), 6, True), (GAE(0.9, 0.5), 6, True), (GAE(), 4, True), (GAE(), 6, False)]
        for turn, (estimator, steps, real) in enumerate(forms * 5):
            for rollout in (taped, eager):
                fill(rollout, turn, steps, real)
            taped.finish(estimator, partial=True)
            with mock.patch.object(relive.rollout.buffer, "has_graphs", return_value=False):
                eager.finish(estimator, partial=True)
            for name in ("advantage", "return"):
                one, other = taped[name].cpu(), eager[name].cpu()
                assert one.shape == (steps, 4)
                assert one.numpy().tobytes() == other.numpy().tobytes()
    assert len(tapes) == len(forms)


def test_what_is_captured_of_a_finish_waits_for_nothing_and_writes_where_the_columns_are() -> None:
    """Its operations, as a graph holds them, read the columns where they lie, and their results stay where they are."""
    with far_device():
        rollout = rollout_of(ELSEWHERE)
        fill(rollout, 0)
        rollout.finish(GAE())
        column = rollout["advantage"]
        fill(rollout, 1)
        with no_waiting() as watch:
            rollout.finish(GAE())
        assert torch.equal(column.cpu(), rollout["advantage"].cpu())
    assert len(watch.launches) <= 21
    assert [name for name in watch.launches if "copy" in name] == ["aten.copy_.default"] * 2  # into the two columns


def test_autograd_notices_that_a_graph_has_written_the_advantages(tapes: list[Tape]) -> None:
    with far_device():
        rollout = rollout_of(ELSEWHERE)
        for turn in range(5):
            fill(rollout, turn)
            before = internals.version(internals.columns(rollout).view(("advantage",))) if turn else -1
            with mock.patch.object(Tape, "replay"):  # a CUDA graph writes behind the back of torch
                rollout.finish(GAE())
            assert internals.version(internals.columns(rollout).view(("advantage",))) > before
        assert len(tapes) == 1


def test_a_rollout_with_a_graph_is_copied_and_has_other_columns_from_then_on(tapes: list[Tape]) -> None:
    with far_device():
        rollout, plain = rollout_of(ELSEWHERE), rollout_of(ELSEWHERE)
        for turn in range(4):
            fill(rollout, turn)
            rollout.finish(GAE())
        copied = deepcopy(rollout)
        before = rollout["advantage"].cpu().clone()
        for turn in range(4, 8):
            fill(copied, turn)
            copied.finish(GAE())
        fill(plain, 7)
        with mock.patch.object(relive.rollout.buffer, "has_graphs", return_value=False):
            plain.finish(GAE())
        assert torch.equal(copied["advantage"].cpu(), plain["advantage"].cpu())
        assert torch.equal(rollout["advantage"].cpu(), before)
        copied.debug = True  # then numbers are looked at, which waits
        fill(copied, 8)
        copied.block["final_value"][:] = torch.full((7, 4), float("nan")).to(ELSEWHERE)
        with pytest.raises(FieldError, match="final_value"):
            copied.finish(GAE())


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("normalize", [False, True])
def test_memory_of_a_device_is_reused_in_turn_and_holds_the_batches_of_ram(epochs: int, normalize: bool) -> None:
    options: dict[str, Any] = {"batch_size": 5, "epochs": epochs, "normalize_advantage": normalize}
    with far_device():
        ram, there = rollout_of("cpu"), rollout_of(ELSEWHERE)
        for rollout in (ram, there):
            fill(rollout, 1)
            rollout.finish(GAE())
        there["advantage"] = ram["advantage"].to(ELSEWHERE)  # there sums have another order
        there["return"] = ram["return"].to(ELSEWHERE)
        seen = list[Any]()
        passes = zip(ram.minibatches(**options), there.minibatches(**options, reuse=True), strict=True)
        for k, (ours, theirs) in enumerate(passes):
            assert [*ours] == [*theirs.keys()]
            seen.append({name: theirs[name] for name in theirs.keys()})
            for name in ours.keys():
                torch.testing.assert_close(theirs[name].cpu(), ours[name], rtol=1e-6 * normalize, atol=1e-6 * normalize)
            if k >= 3 and len(ours) == len(seen[k - 3]["obs"]):
                assert all(seen[k - 3][name] is seen[k][name] for name in seen[k])


def test_a_batch_of_reused_memory_of_a_device_is_one_launch_for_each_table() -> None:
    with far_device():
        rollout = rollout_of(ELSEWHERE)
        fill(rollout, 1)
        batches = rollout.finish(GAE()).minibatches(batch_size=4, epochs=3, reuse=True)
        kept = [next(batches) for _ in range(3)]
        with no_waiting() as watch:
            kept.append(next(batches))
    assert watch.launches == ["aten.index_select.out"] * 2  # the small fields, and the camera
