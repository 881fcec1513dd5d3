"""Stacks of small frames: one compiled call reads them into the rows of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from relive import FrameStack, NStep, Prioritized, Recent, Uniform, WithoutReplacement, core
from relive.batches import leaves_by_path
from relive.errors import LifecycleError, ParameterError
from support import internals
from support.cases import covering
from support.twins import Twin, same_batches

SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": Uniform,
    "prioritized": Prioritized,
    "recent": lambda: Recent(0.5, 2, inner=Prioritized()),
    "epochs": WithoutReplacement,
}
STACKS = [(1, "repeat", 1), (2, "zeros", 1), (4, "repeat", 1), (4, "zeros", 3), (9, "repeat", 2), (30, "zeros", 1)]


def twin(sampler: str, stack: tuple[int, Any, int], dress: str = "box", *, apart: bool = False) -> Any:
    """A replay with a view of stacks; ``apart`` has a function of rewards, so that each field is read by itself."""
    depth, pad, n = stack
    view = FrameStack(depth, NStep(n, 0.5, (lambda rewards: rewards) if apart else None), pad)
    made = Twin(2, 40, dress=dress, sampler=SAMPLERS[sampler](), view=view)
    return made.play(*("".join("T" if (t + 3 * e) % 11 == 9 else "." for e in range(2)) for t in range(70)))


@pytest.mark.parametrize(("sampler", "stack"), covering([*SAMPLERS], STACKS, full=2))
@pytest.mark.parametrize("dress", ["box", "dict"])
def test_stacks_of_one_call_are_those_that_are_read_field_by_field(sampler: str, stack: Any, dress: str) -> None:
    whole, apart = twin(sampler, stack, dress).buffer, twin(sampler, stack, dress, apart=True).buffer
    for size in (1, 5, 300 if sampler != "epochs" else 20):  # more than are read between two looks at their stacks
        batch, other = whole.sample(size), apart.sample(size)
        assert list(leaves_by_path(batch)) == list(leaves_by_path(other))
        assert same_batches(batch, other)
    assert same_batches(whole.data(), apart.data())


@pytest.mark.parametrize("named", [True, False])
def test_only_the_members_that_are_named_are_stacked(named: bool) -> None:
    def replay(view: Any) -> Any:
        return Twin(2, 40, dress="dict", view=view).play(*[".."] * 50).buffer

    single = leaves_by_path(replay(NStep(1, 0.5)).sample(7))
    first = next(path[1] for path in single if path[0] == "obs")
    view = FrameStack(3, NStep(1, 0.5), "zeros", (first,) if named else None)
    batch = leaves_by_path(replay(view).sample(7))
    assert list(batch) == list(single)
    for path, leaf in batch.items():
        stacked = path[0] in ("obs", "next_obs") and (path[1] == first or not named)
        assert leaf.shape == (7, *([3] if stacked else []), *single[path].shape[1:])


def test_all_fields_of_a_batch_lie_side_by_side_and_may_stand() -> None:
    made = twin("prioritized", (4, "repeat", 1)).buffer
    leaves = leaves_by_path(made.sample(6)).values()
    strides = {leaf.stride(0) * leaf.element_size() for leaf in leaves}
    begins = [leaf.data_ptr() for leaf in leaves]
    assert len(strides) == 1
    assert max(begins) - min(begins) < max(strides)
    again = twin("prioritized", (4, "repeat", 1)).buffer
    again.sample(6)
    first = list[Any]()
    for batch, fresh in zip(again.batches(5, 6, reuse=True), made.batches(5, 6), strict=True):
        assert same_batches(batch, fresh)
        first.append(batch)
    with pytest.raises(LifecycleError, match="given back"):
        first[0]["obs"]


def test_a_view_that_changes_is_followed() -> None:
    made = twin("uniform", (2, "zeros", 1))
    for depth, pad, n in (*STACKS, *STACKS):
        made.buffer.view.depth, made.buffer.view.pad, made.buffer.view.window.n = depth, pad, n
        assert made.buffer.sample(3)["obs"].shape == (3, depth, 4)


def test_layouts_that_reach_beyond_a_row_and_places_that_are_none_are_refused() -> None:
    ring: Any = internals.ring(twin("uniform", (2, "zeros", 1)).buffer)
    batch, fields = ring.store.batch, ring.store.batch.described([("reward",)])
    wide = ring.store.target.shape[1]
    for stacked, depth in (
        ((0, 16, batch.nbytes, 0), 1),
        ((0, 16, 0, batch.nbytes - 15), 1),
        ((0, 16, 0, -1), 1),
        ((-1, 16, 0, 0), 1),
        ((wide - 8, 16, 0, 0), 1),
        ((0, -1, 0, 0), 1),
        ((0, 16, 0, 0), 2**60),
        ((0, 16, 0, 0), -1),
    ):
        with pytest.raises(ValueError, match="layout"):
            core.Windows(ring.core, batch.core, fields, stacked=[stacked], depth=depth)
    with pytest.raises(ParameterError, match="places"):
        FrameStack(2, NStep(1, 0.5)).read(ring, torch.tensor([3, 80]).numpy())
