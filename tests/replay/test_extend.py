"""Seams of extend: chunks that follow each other join, wherever one ends and for whichever envs they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from relive import FrameStack, NStep, Prioritized, ReplayBuffer
from relive import Sequence as SequenceView
from relive.errors import NotFiniteError
from support.effort import often
from support.twins import Twin, assert_alike, mapped, same_batches, stacked

VIEWS: dict[str, Any] = {
    "3-step": lambda: NStep(3, 0.5),
    "stack": lambda: FrameStack(2, NStep(2, 0.5)),
    "sequence": lambda: SequenceView(3, 1, "half", 2, 0.5),
}
ENVS = [3, 0, 2]


def random_plays(seed: int, count: int, masked: bool) -> tuple[list[str], list[list[bool]] | None]:
    """How the steps of ENVS end, and which of them count."""
    rng = np.random.default_rng(seed)
    plays = ["".join(rng.choice(list("...TUB"), len(ENVS))) for _ in range(count)]
    return plays, (rng.random((count, len(ENVS))) < 0.7).tolist() if masked else None


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("rows", [3, 40], ids=["wraps", "roomy"])
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_two_chunks_of_some_envs_store_what_one_chunk_and_single_steps_store(
    view: str, rows: int, masked: bool
) -> None:
    plays, masks = random_plays(rows, 10, masked)
    twin = Twin(4, rows, sampler=Prioritized(), view=VIEWS[view]())
    steps = [twin.step(kinds, ENVS, None if masks is None else masks[t], final=True) for t, kinds in enumerate(plays)]
    for step in steps:
        twin.buffer.add(step, envs=ENVS)
    twin.check()  # against the oracle
    chunk = stacked(steps)
    for seam in range(0, len(plays) + 1, often(4, 1) + masked):
        replay = ReplayBuffer(twin.schema, 4 * rows, 4, sampler=Prioritized(), view=VIEWS[view](), seed=0)
        replay.extend(mapped(lambda x, seam=seam: x[:seam], chunk), envs=ENVS)
        replay.extend(mapped(lambda x, seam=seam: x[seam:], chunk), envs=ENVS)
        assert_alike(replay, twin.buffer)


@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_chunks_of_other_envs_in_between_change_nothing(masked: bool) -> None:
    plays, masks = random_plays(1, 12, masked)
    twin = Twin(4, 30, sampler=Prioritized())
    steps = [twin.step(kinds, ENVS, None if masks is None else masks[t], final=True) for t, kinds in enumerate(plays)]
    others = [twin.step("." if t % 3 else "U", [1], final=True) for t in range(len(plays))]
    alone, mixed = (ReplayBuffer(twin.schema, 120, 4, seed=0) for _ in range(2))
    alone.extend(stacked(steps), envs=ENVS)
    alone.extend(stacked(others), envs=[1])
    for first in range(0, len(plays), 4):
        mixed.extend(stacked(steps[first : first + 4]), envs=ENVS)
        mixed.extend(stacked(others[first : first + 4]), envs=[1])
    mixed.check()
    for env in range(4):
        assert same_batches(alone.slice(env), mixed.slice(env))


def test_a_row_that_is_left_out_but_stored_for_its_observation_is_checked_in_debug_mode() -> None:
    twin = Twin(1, 9, debug=True)
    chunk = stacked([twin.step(".", mask=[True]), twin.step("U", mask=[False])])
    chunk["obs"][1] = np.nan
    before = len(twin.buffer)
    with pytest.raises(NotFiniteError, match="row 1, of env 0"):
        twin.buffer.extend(chunk)
    assert len(twin.buffer) == before
    chunk["truncated"][1] = False  # nobody will read it
    twin.buffer.extend(chunk)
    twin.buffer.check()
