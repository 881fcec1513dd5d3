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
from elsewhere import ELSEWHERE, far_device
from paired import Twins, assert_same
from relive import NStep, Prioritized
from relive.memory.graphs import MOST_FORMS, Graphed, capture
from relive.rollout.minibatches import Permutations
from taped import Tape, with_tapes

CPU = torch.device("cpu")


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
