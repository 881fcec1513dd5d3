"""Steps on their way to shards: checked as a replay checks them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from relive.cluster.writer import StepPacker
from relive.errors import FieldError, ShapeError
from support.clusters import SCHEMA, local, steps


def played() -> dict[str, Any]:
    """Three steps of two envs. The episode of env 1 ends with the second one, without a final observation."""
    ended = np.zeros((3, 2), np.bool_)
    ended[1, 1] = True
    return {"obs": np.zeros((3, 2, 3), np.float32), "action": np.zeros((3, 2), np.int64),
            "reward": np.zeros((3, 2), np.float32), "terminated": ended, "truncated": ended & False}  # fmt: skip


def test_an_end_needs_its_final_observation_unless_the_mask_leaves_it_out() -> None:
    packer, values = StepPacker(SCHEMA, 2, own_next_obs=False), played()
    with pytest.raises(FieldError, match="the episode of env 1 ended and its final observation is missing"):
        packer.checked(values)
    with pytest.raises(FieldError, match="env 1"):
        packer.checked(values | {"mask": np.ones((3, 2), np.bool_)})
    checked = packer.checked(values | {"mask": ~values["terminated"]})
    assert not checked.finals
    assert checked.mask is not None
    assert checked.mask.tolist() == [True, True, True, False, True, True]


@pytest.mark.parametrize("lost", [False, True])
def test_an_interruption_says_what_the_newest_steps_led_to(lost: bool) -> None:
    replay, link = local()
    writer = replay.writer()
    writer.interrupt(next_obs=np.full((4, 3), 7, np.float32))  # no episode is under way
    writer.extend(steps(3, length=100))
    with pytest.raises(ShapeError, match="'next_obs': expected shape"):
        writer.interrupt(next_obs=np.zeros((4, 2), np.float32))
    last = np.stack([np.arange(4), np.full(4, 3), np.ones(4)], 1).astype(np.float32)
    call = link.call

    def unheard(shard: int, method: str, *given: Any) -> Any:
        link.call = call
        call(shard, method, *given)
        return "failure", None

    if lost:  # the first shard interrupts, its answer is lost, and the writer asks again
        link.call = unheard
    writer.interrupt(next_obs=last)
    writer.extend(steps(3, start=10, length=100))
    writer.flush()
    found = {(int(env), int(time)): (cut, after) for env, time, cut, after in rows_of(replay)}
    assert found.keys() == {(env, time) for env in range(4) for time in (0, 1, 2, 10, 11)}
    for (env, time), (cut, after) in found.items():
        assert cut == (time == 2)
        assert after == [env, time + 1, float(time == 2)]


def rows_of(replay: Any) -> list[tuple[float, float, bool, list[float]]]:
    batch = replay.sample(400)
    parts = (batch["obs"].tolist(), batch["truncated"].tolist(), batch["next_obs"].tolist())
    return [(obs[0], obs[1], cut, after) for obs, cut, after in zip(*parts, strict=True)]
