"""Batches of a mixture whose rows all buffers write to one memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from relive import FrameStack, Mixture, NStep, Prioritized, Recent, Uniform, WithoutReplacement, core
from relive.batches import leaves_by_path
from relive.errors import EmptyError, LifecycleError, ParameterError
from support import internals
from support.cases import covering
from support.twins import Twin, same_batches

PAIRS: dict[str, tuple[Any, Any]] = {
    "uniform": (Uniform, Uniform),
    "prioritized": (Prioritized, lambda: Recent(0.9, 2, inner=Prioritized())),
    "uniform first": (Uniform, Prioritized),
    "prioritized first": (Prioritized, lambda: Recent(0.5, 3)),
    "epochs": (WithoutReplacement, Uniform),
}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shared": ({}, {}),
    "unordered": ({"ordered": False}, {}),
    "nested": ({"dress": "dict"}, {"dress": "dict", "ordered": False}),
}


def changed(rewards: Any) -> Any:
    return np.asarray(rewards) * 2


def views(name: str) -> tuple[Any, Any]:
    if name == "stacks":
        return FrameStack(2, NStep(1, 0.5)), FrameStack(2, NStep(1, 0.5))
    return NStep(1, 0.5, changed if name == "a function of rewards" else None), NStep(1, 0.9)


def made(pair: str, kind: str, view: str = "plain") -> list[Any]:
    twins = [
        Twin(2, 60, sampler=sampler(), view=given, seed=i, **options)
        for i, (sampler, given, options) in enumerate(zip(PAIRS[pair], views(view), KINDS[kind], strict=True))
    ]
    for i, one in enumerate(twins):
        one.play(*[("..", ".T", "U.")[(t + i) % 5 % 3] for t in range(15 + 6 * i)])
    return [one.buffer for one in twins]


def mixture_of(buffers: list[Any]) -> Mixture:
    return Mixture(dict(zip("ab", buffers, strict=True)), {"a": 1, "b": 2})


def addresses(batch: Any) -> list[int]:
    return [leaf.data_ptr() for leaf in leaves_by_path(batch).values()]


def packed(batch: Any) -> bool:
    """True if the fields of a row lie side by side."""
    leaves = leaves_by_path(batch).values()
    strides = {leaf.stride(0) * leaf.element_size() for leaf in leaves}
    return len(strides) == 1 and max(addresses(batch)) - min(addresses(batch)) < max(strides)


@pytest.mark.parametrize(("pair", "kind"), covering([*PAIRS], [*KINDS], full=2))
def test_each_part_of_a_batch_is_the_batch_that_its_buffer_draws_alone(pair: str, kind: str) -> None:
    mixture = mixture_of(made(pair, kind))
    for k, batch in enumerate(mixture.batches(4, 9)):
        parts = [list(one.batches(4, rows))[k] for one, rows in zip(made(pair, kind), (3, 6), strict=True)]
        assert batch["source"].tolist() == [0] * 3 + [1] * 6
        for i, part in enumerate(parts):
            rows = batch.rows(batch["source"] == i)
            del rows["source"]
            assert set(rows) == set(parts[0]) & set(parts[1])
            assert list(leaves_by_path(rows)) == [path for path in leaves_by_path(parts[0]) if path[0] in rows]
            assert same_batches(rows, {name: part[name] for name in rows})


@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair != "epochs"])
def test_all_fields_of_a_batch_are_in_one_memory(pair: str, kind: str) -> None:
    assert packed(mixture_of(made(pair, kind)).sample(9))


@pytest.mark.parametrize("view", ["a function of rewards", "stacks"])
def test_a_view_that_reads_otherwise_is_mixed_as_well_and_may_be_changed_at_any_time(view: str) -> None:
    buffers = made("uniform", "shared", view)
    mixture, alone = mixture_of(buffers), made("uniform", "shared", view)
    for k in range(4):
        batch = mixture.sample(9)
        for i, (one, rows) in enumerate(zip(alone, (3, 6), strict=True)):
            part, mine = one.sample(rows), batch.rows(batch["source"] == i)
            assert same_batches({name: mine[name] for name in part}, part)
        assert packed(batch) == (k >= 2)
        if k == 1:
            for one in (*buffers, *alone):
                one.view = NStep(2, 0.5)


@pytest.mark.parametrize("pair", [*PAIRS])
def test_memory_that_is_reused_holds_the_same_batches(pair: str) -> None:
    fresh, reused = mixture_of(made(pair, "shared")), mixture_of(made(pair, "shared"))
    seen, given = list[list[int]](), list[Any]()
    for batch, again in zip(fresh.batches(7, 9), reused.batches(7, 9, reuse=True), strict=True):
        assert same_batches(batch, again)
        seen.append(addresses(again))
        given.append(again)
    if pair != "epochs":
        assert seen[:3] == seen[3:6]
        assert seen[6] == seen[0]
    with pytest.raises(LifecycleError, match="given back"):
        given[0]["obs"]
    with pytest.raises(ParameterError, match="reuse"):
        fresh.batches(7, 9, reuse=1)  # pyright: ignore[reportArgumentType]


def test_what_autograd_saved_of_a_batch_is_void_once_its_memory_is_written_again() -> None:
    batches = mixture_of(made("uniform", "shared")).batches(9, 9, reuse=True)
    weight = torch.ones((), requires_grad=True)
    loss = (next(batches)["reward"] * weight).sum()
    for _ in range(2):
        next(batches)
    loss.backward(retain_graph=True)
    next(batches)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_size_of_a_batch_may_be_a_small_integer_of_numpy() -> None:
    mixture = mixture_of(made("uniform", "shared"))
    for size in (np.uint8(200), np.int8(100), np.uint8(200)):
        assert len(mixture.sample(size)) == size  # pyright: ignore[reportArgumentType]
    assert mixture.state_dict()["rows"] == 500


def test_a_buffer_that_is_emptied_between_two_batches_is_named_and_the_rows_are_not_counted() -> None:
    buffers = made("prioritized", "shared")
    mixture = mixture_of(buffers)
    batches = mixture.batches(3, 9)
    next(batches)
    buffers[1].clear()
    with pytest.raises(EmptyError, match="the buffer 'b' has nothing to draw"):
        next(batches)
    assert mixture.state_dict()["rows"] == 9


def test_joined_rows_are_all_written_or_refused() -> None:
    fields = core.Fields([("x", torch.float32, (), 0), ("source", torch.int64, (), 16)], 32)
    joined = core.JoinedRows(fields, 16, 3, None, core.Pool())
    with pytest.raises(ValueError, match="no part yet"):
        joined.tensors()
    for at, count in ((25, 3), (-1, 3), (16, -1)):
        with pytest.raises(ValueError, match="joined rows"):
            core.JoinedRows(fields, at, count, None, core.Pool())
    with pytest.raises(TypeError, match="standing memory"):
        core.JoinedRows(fields, 16, 3, 5, core.Pool())
    assert core.JoinedRows(fields, 16, 0, None, core.Pool()).tensors()["source"].tolist() == []


def test_a_part_with_too_many_rows_or_wider_ones_is_refused() -> None:
    buffer: Any = made("prioritized", "shared")[0]
    ring, narrow = internals.ring(buffer), core.Fields([("source", torch.int64, (), 8)], 16)
    wide = core.Fields([("source", torch.int64, (), 1024)], 1040)
    for fields, at, count in ((narrow, 8, 9), (wide, 1024, 3)):
        joined = core.JoinedRows(fields, at, count, None, core.Pool())
        drawn = core.draw_by_chance(ring.core, 5, 7)
        drawn.standing = joined
        with pytest.raises(ValueError, match="too many rows, or wider ones"):
            ring.windows(drawn, 1, 0.9)
