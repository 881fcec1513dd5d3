"""Stacks of frames: of one episode, in order, and drawn only while all of them are there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from relive import Field, FrameStack, NStep, ReplayBuffer, Schema
from relive.errors import ParameterError, SchemaError
from support import internals
from support.twins import Twin

# Frame stacks.


def stacks(depth: int, pad: Any, letters: str, rows: int = 30) -> tuple[list[list[float]], list[list[float]]]:
    """The steps whose frames make up obs and next_obs of each transition of one env."""
    twin = Twin(1, rows, view=FrameStack(depth, NStep(1, 0.5), pad)).play(*letters)
    twin.check()
    batch = twin.buffer.data()
    return batch["obs"][..., 2].tolist(), batch["next_obs"][..., 2].tolist()


def test_stacks_repeat_the_first_frame_of_an_episode_and_reach_into_no_other() -> None:
    obs, following = stacks(3, "repeat", "..T.U")
    assert obs == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [0, 0, 0], [0, 0, 1]]
    assert following == [[0, 0, 1], [0, 1, 2], [1, 2, 3], [0, 0, 1], [0, 1, 2]]


def test_the_depth_can_be_changed_on_a_living_buffer() -> None:
    for question in ("data", "sample", "len", "stats"):
        view = FrameStack(2, NStep(1, 0.5))
        twin = Twin(2, 10, view=view)
        for t in range(30):
            twin.add(".T" if t % 7 == 6 else "..")
        for depth in (5, 1, 9, 3):
            view.depth = depth
            if question == "data":
                assert len(twin.buffer.data()) == len(twin.anchors())
            elif question == "sample":
                twin.check_batch(twin.buffer.sample(50))
            elif question == "len":
                assert len(twin.buffer) == len(twin.anchors())
            else:
                assert twin.buffer.stats()["size"] == len(twin.anchors())
            twin.check()


def test_some_members_of_an_observation_are_stacked_and_the_others_not() -> None:
    for dress, keys in (
        ("mixed", ("camera",)),
        ("mixed", ("state",)),
        ("dict", ("camera", "count")),
        ("tuple", ("1",)),
    ):
        twin = Twin(2, 9, dress=dress, view=FrameStack(3, NStep(2, 0.5), "zeros", keys))
        twin.play("..", "..", ".T", "..", "U.", "..", "..")
        twin.check()
    batch = Twin(1, 9, dress="mixed", view=FrameStack(3, keys=("camera",))).play(".", ".").buffer.data()
    assert batch["obs", "camera"].shape == (1, 3, 36, 32)
    assert batch["obs", "state"].shape == (1, 4)


@pytest.mark.parametrize(("dress", "keys"), [("box", ("camera",)), ("mixed", ("camra",)), ("mixed", ("state", "x"))])
def test_a_member_that_is_not_there_cannot_be_stacked(dress: str, keys: tuple[str, ...]) -> None:
    twin = Twin(1, 5, dress=dress, view=FrameStack(2, keys=keys)).play(".", ".")
    with pytest.raises(SchemaError, match="no member"):
        twin.buffer.sample(1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"depth": 0},
        {"depth": -3},
        {"depth": 1.5},
        {"depth": 2**63},
        {"pad": "mirror"},
        {"window": 3},
        {"keys": "camera"},
    ],
)
def test_stacks_that_make_no_sense_are_refused_when_they_are_made_and_when_they_are_set(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    rule = rf"FrameStack\({name}={value!r}\): .*(depth is at least 1 .*, and pad 'repeat' or 'zeros'|window is|keys is)"
    with pytest.raises(ParameterError, match=rule):
        FrameStack(**wrong)
    twin = Twin(1, 5, view=FrameStack(2)).play(".", ".", "T")
    with pytest.raises(ParameterError, match=rule):
        setattr(twin.buffer.view, name, value)
    assert twin.buffer.view == FrameStack(2)
    twin.check()


def test_stacks_are_refused_where_steps_have_no_order() -> None:
    twin = Twin(1, 5, ordered=False, view=FrameStack(2)).play(".", "T")
    with pytest.raises(SchemaError, match="needs steps in order"):
        twin.buffer.sample(1)


def test_an_atari_transition_takes_at_most_7300_bytes_with_all_its_fields() -> None:
    schema = Schema(
        {
            "obs": Field((84, 84), torch.uint8),
            "action": Field((), torch.int64),
            "reward": Field(),
            "terminated": Field((), torch.bool),
            "truncated": Field((), torch.bool),
        }
    )
    buffer = ReplayBuffer(schema, 1000, view=FrameStack(4, NStep(3)), seed=0)
    ring = internals.ring(buffer)
    stored = ring.store.target.nbytes + sum(block.nbytes for block in ring.store.blocks.values())
    assert stored / 1000 <= 7300
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (50, 1, 84, 84), np.uint8)
    for frame in frames:
        buffer.add(obs=frame, action=[3], reward=[0.5], terminated=[False], truncated=[False])
    batch = buffer.sample(8)
    assert batch["obs"].shape == batch["next_obs"].shape == (8, 4, 84, 84)
    assert batch["obs"].dtype is torch.uint8
    for item in map(batch.rows, range(len(batch))):
        t = int(item["index"])
        want = frames[np.maximum(np.arange(t - 3, t + 1), 0), 0]
        assert np.array_equal(item["obs"].numpy(), want)
