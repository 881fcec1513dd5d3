"""Emphasis on recent experience on a device: the batches are those of a replay in RAM, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import relive.device.recent
from relive import FrameStack, NStep, Prioritized, Recent
from support import internals
from support.device_twins import WORLDS, Twins, assert_same
from support.effort import first_of, in_ci, often
from support.other_device import no_waiting


@pytest.mark.parametrize("world", first_of(3, WORLDS))
@pytest.mark.parametrize("form", first_of(2, ["shared", "frames", "own", "unordered"]))
def test_batches_are_those_of_a_replay_in_ram(
    device: torch.device, world: Any, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs, rows, n, odds = world
    options: dict[str, Any] = {"own": {"own_next_obs": True}, "unordered": {"ordered": False}}.get(form, {})
    window = lambda: NStep(1 if form == "unordered" else n, 0.97)  # noqa: E731
    if rows % 2:  # several rounds of few searches
        monkeypatch.setattr(relive.device.recent, "AT_ONCE", 1)
    twins = Twins(
        device, envs, rows, seed=rows, sampler=lambda: Recent(0.998, 2 * envs),
        view=lambda: FrameStack(2, window()) if form == "frames" else window(), **options,
    )  # fmt: skip
    for t in range(min(4 * rows, often(30, 90))):
        twins.add(odds)
        if t < 3 or len(twins.ram) * 3 < envs * min(t, rows) or t % 4:
            continue
        theirs = twins.there.batches(3, 50)
        for ours in twins.ram.batches(3, 50):
            with no_waiting() as watch:
                watch.allow = not internals.is_ahead(twins.there)
                batch = next(theirs)
            assert_same(ours, batch)
        assert internals.is_ahead(twins.there) or not internals.on_device(twins.there).has_some
    twins.check()


def test_envs_may_have_got_their_rows_at_any_time(device: torch.device) -> None:
    """Some envs have rows of long ago, and others wrote many since: stamps lie far apart."""
    twins = Twins(device, 4, 12, seed=3, sampler=lambda: Recent(0.999, 8), view=lambda: NStep(3))
    for turn in range(9):
        for _ in range(turn):
            twins.add(0.1)
            if len(twins.ram):
                twins.batches(30)
        for _ in range([3, 40, 2, often(150, 300)][turn % 4]):
            twins.add_to_some([0, 2])
        for buffer in (twins.ram, twins.there):
            if turn == 5:
                buffer.sampler.eta = 0.9995
            if turn == 7:
                buffer.clear()
    for share in (0.9, 0.997, 1.0):
        for buffer in (twins.ram, twins.there):
            buffer.sampler.eta = share
        twins.add(0.1)
        twins.batches(30)
        assert internals.is_ahead(twins.there)
    twins.check()


@pytest.mark.parametrize("sampler", [lambda: Recent(0.99, 7), lambda: Recent(0.99, 100, inner=Prioritized())])
def test_the_host_draws_where_few_of_the_newest_rows_can_be_drawn(device: torch.device, sampler: Any) -> None:
    twins = Twins(device, 4, 12, seed=3, sampler=sampler)
    for _ in range(20):
        twins.add(0.3)
        if len(twins.ram):
            twins.batches(30)
    twins.check()


@pytest.mark.parametrize("envs", [in_ci(8)])
def test_compiled_batches_are_those_of_a_replay_in_ram(envs: int) -> None:
    twins = Twins(torch.device("cpu"), envs, 12, seed=3, sampler=lambda: Recent(0.998, 2 * envs), view=lambda: NStep(3))
    twins.there.compile()
    for t in range(30):
        twins.add(0.1)
        if t > 3 and t % 4 == 0:
            for ours, theirs in zip(twins.ram.batches(3, 40), twins.there.batches(3, 40), strict=True):
                assert_same(ours, theirs)
    twins.check()
