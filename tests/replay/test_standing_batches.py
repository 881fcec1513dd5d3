"""Batches in memory that stands equal fresh ones with every sampler, view, schema and store. They take few calls."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relive import (
    Batch,
    Chunks,
    Field,
    FrameStack,
    Hindsight,
    NStep,
    Prioritized,
    Recent,
    ReplayBuffer,
    ReturnsToGo,
    Schema,
    Sequence,
    Uniform,
    WithoutReplacement,
    core,
    errors,
)
from relive.batches import leaves_by_path
from support import internals
from support.effort import every_nth

FLAG = Field((), torch.bool)
ENDS = {"reward": (), "terminated": FLAG, "truncated": FLAG}
SCHEMAS: dict[str, dict[str, Any]] = {
    "plain": {"obs": (3,), "action": Field((2,), torch.bfloat16)},
    "nested": {"action": {"a": (2,), "b": {"c": Field((), torch.int64)}}, "obs": {"x": (3,), "y": {"z": ()}}},
    "states": {"obs": (3,), "action": (1,), "hidden": {"h": (2, 4), "c": (4,)}},
    "large": {"obs": {"x": (3,), "image": Field((70, 70), torch.uint8)}, "action": (1,)},
}  # fmt: skip
SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": Uniform, "prioritized": Prioritized, "recent": lambda: Recent(0.9, 5),
    "recent, prioritized": lambda: Recent(0.9, 5, inner=Prioritized(normalize="buffer", beta=(0.4, 1.0, 10))),
    "without replacement": WithoutReplacement,
}  # fmt: skip
VIEWS: dict[str, Callable[[], Any]] = {
    "n-step": lambda: NStep(3), "each reward": lambda: NStep(2, each_reward=lambda reward: reward * 2),
    "stacks": lambda: FrameStack(2), "sequences": lambda: Sequence(4, n=2),
    "batch first": lambda: Sequence(3, 1, time_first=False, last=("action",)),
    "returns": lambda: ReturnsToGo(window=Sequence(3)), "chunks": lambda: Chunks(4, last=("action",)),
    "hindsight": lambda: Hindsight(lambda achieved, desired: -np.abs(achieved - desired).sum(1), n=2),
}  # fmt: skip


def standing(schema: str, sampler: str, view: str, paths: set[Any]) -> set[Any]:
    """The fields that stand. One compiled call reads them, to which the sampler leaves the draw; others are fresh."""
    if sampler == "without replacement" or view == "returns":
        return set()
    copied = paths if view in ("sequences", "batch first", "chunks") else set[Any]()
    return paths - {path for path in copied if path == ("hidden", "h")}  # whose layers come first


def replay_of(schema: str, sampler: str = "uniform", view: str = "n-step", folder: Path | None = None) -> ReplayBuffer:
    given = {**SCHEMAS[schema], **ENDS}
    if view == "hindsight":
        given["obs"] = {"achieved_goal": (3,), "desired_goal": (3,), "seen": given["obs"]}
    fields = Schema(given)
    options: dict[str, Any] = {"seed": 0, "sampler": SAMPLERS[sampler](), "view": VIEWS[view](), "check_ends": False}
    if folder is None:
        replay = ReplayBuffer(fields, 200, 2, **options)
    else:
        replay = ReplayBuffer.open(folder, fields, capacity=200, num_envs=2, **options)
    random = torch.Generator().manual_seed(0)

    def rows(path: Any) -> Any:
        leaf = fields.leaves[path]
        return torch.randint(0, 100, (2, *leaf.shape), generator=random).to(leaf.dtype)

    for t in range(60):
        step = {name: fields.rebuild(name, rows) for name in fields.names}
        step |= {"terminated": np.array([t % 9 == 8, t % 7 == 6]), "truncated": np.zeros(2, np.bool_)}
        replay.add(step | {"next_obs": step["obs"]})
    return replay


def assert_same(batch: Batch, expected: Batch) -> None:
    found, wanted = leaves_by_path(batch), leaves_by_path(expected)
    assert [*found] == [*wanted]
    for path, leaf in found.items():
        assert leaf.dtype == wanted[path].dtype, path
        assert torch.equal(leaf, wanted[path]), path


@pytest.mark.parametrize(
    ("schema", "sampler", "view", "durable"), every_nth(9, SCHEMAS, SAMPLERS, VIEWS, [False, True])
)
def test_each_sampler_view_schema_and_store_gives_the_same_batches_in_memory_that_stands(
    schema: str, sampler: str, view: str, durable: bool, tmp_path: Path
) -> None:
    one, two = (replay_of(schema, sampler, view, tmp_path / name if durable else None) for name in "ab")
    fresh, given, leaves = [batch.clone() for batch in one.batches(7, 5)], list[Batch](), list[Any]()
    for k, batch in enumerate(two.batches(7, 5, reuse=True)):
        given.append(batch)
        leaves.append(leaves_by_path(batch))
        for back in range(min(k + 1, 3)):
            assert_same(given[k - back], fresh[k - back])
    with pytest.raises(errors.LifecycleError, match="given back"):
        _ = given[3]["reward"]
    again = {path for path, leaf in leaves[0].items() if leaves[3][path] is leaf is leaves[6][path]}
    assert again == standing(schema, sampler, view, set(leaves[0]))
    for replay in (one, two) if durable else ():
        replay.close()


@pytest.mark.parametrize("schema", ["plain", "nested"])
def test_a_batch_that_is_nested_where_it_is_read_has_the_order_that_paths_give(schema: str) -> None:
    replay = replay_of(schema, "prioritized")
    for batch in (replay.sample(5), next(replay.batches(1, 5, reuse=True))):
        again = core.nested(leaves_by_path(batch), Batch)
        assert repr(again) == repr(batch)
        assert type(batch) is Batch
        assert all(type(x) in (Batch, torch.Tensor) for x in batch.values())
    assert {"weight", "probability"} <= {*replay.sample(3)}


def test_memory_whose_tensors_cannot_show_that_it_changed_is_not_written_again() -> None:
    """As with versions of torch that make no tensors of foreign memory: what autograd saved stays as it was."""
    replay, weight = replay_of("plain"), torch.ones((), requires_grad=True)
    before = internals.use_exchange(False)
    try:
        batches = replay.batches(9, 5, reuse=True)
        reward = next(batches)["reward"]
        loss, kept = (weight * reward).sum(), reward.clone()
        for _ in batches:
            pass
        assert torch.equal(reward, kept)
        loss.backward()
    finally:
        internals.use_exchange(before)
    assert weight.grad is not None
    assert weight.grad == kept.sum()


# calls of Python


def calls_of(call: Callable[[], Any]) -> list[str]:
    """The functions of Python and C that a call enters, itself left out."""
    found: list[str] = []

    def note(frame: Any, event: str, what: Any) -> None:
        if event in ("call", "c_call"):
            found.append(frame.f_code.co_name if event == "call" else repr(what))

    for _ in range(5):
        call()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found[1:-1]  # without the end of the profile


FEW: dict[str, tuple[int, Callable[[], Any]]] = {
    "uniform": (12, lambda: replay_of("plain")), "prioritized": (13, lambda: replay_of("plain", "prioritized")),
    "sequences": (17, lambda: replay_of("plain", view="sequences")),
    "recent": (18, lambda: replay_of("plain", "recent")),
    "large": (12, lambda: replay_of("large")), "states": (12, lambda: replay_of("states")),
    "chunks": (16, lambda: replay_of("plain", view="chunks")),
    "large chunks": (16, lambda: replay_of("large", view="chunks")),
    "large sequences": (17, lambda: replay_of("large", view="sequences")),
    "sequences with states": (40, lambda: replay_of("states", view="sequences")),
    "each reward": (20, lambda: replay_of("plain", view="each reward")),
    "hindsight": (16, lambda: replay_of("plain", view="hindsight")),
    "hindsight of large fields": (16, lambda: replay_of("large", view="hindsight")),
    "large stacks": (14, lambda: replay_of("large", view="stacks")),
}  # fmt: skip


@pytest.mark.parametrize("name", FEW)
def test_a_batch_is_made_in_few_calls_of_python(name: str) -> None:
    most, make = FEW[name]
    replay = make()
    batches = replay.batches(100, 5, reuse=True)
    fields = [name for name in ("obs", "action", "reward", "discount", "terminated") if name in replay.batch_fields]

    def read(batch: Any) -> None:
        for field in fields:
            _ = batch[field]

    assert len(calls_of(lambda: read(replay.sample(5)))) - 1 <= most  # `read` is the test's
    assert len(calls_of(lambda: next(batches))) <= most + 1
    if replay.has_priorities:
        index, errors_ = replay.sample(5)["index"], torch.ones(5)
        assert len(calls_of(lambda: replay.update_priorities(index, errors_))) <= 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_asks_again_whether_it_is_a_worker_of_a_loader() -> None:
    from relive.replay.serving import Process

    replay_of("plain").sample(1)
    assert Process.is_first
    child = os.fork()
    if child == 0:
        os._exit(1 if Process.is_first else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
