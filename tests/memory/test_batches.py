"""The memory of batches of large fields is used again, but never while somebody still holds it."""

from __future__ import annotations

import numpy as np
import torch

from relive import Field, FrameStack, ReplayBuffer, Schema
from relive.memory.keeper import SMALL

FLAGS = {"terminated": Field((), torch.bool), "truncated": Field((), torch.bool)}


def test_a_batch_keeps_its_frames_while_others_are_drawn_and_gives_its_memory_back() -> None:
    schema = Schema({"obs": Field((84, 84), torch.uint8), "reward": (), **FLAGS})
    replay = ReplayBuffer(schema, 100, view=FrameStack(4), seed=0)
    ended = np.zeros(1, np.bool_)
    for number in range(100):
        obs = np.full((1, 84, 84), number, np.uint8)
        replay.add(obs=obs, reward=np.full(1, number, np.float32), terminated=ended, truncated=ended)
    held = [replay.sample(32) for _ in range(3)]
    assert held[0]["obs"].nbytes > SMALL
    for batch in held:
        assert torch.equal(batch["obs"][:, -1, 0, 0].float(), batch["reward"])
        assert torch.equal(batch["next_obs"][:, -1, 0, 0].float(), batch["reward"] + 1)
    places = {batch[name].data_ptr() for batch in held for name in ("obs", "next_obs")}
    assert len(places) == 6
    del held, batch
    again = replay.sample(32)
    assert {again[name].data_ptr() for name in ("obs", "next_obs")} <= places
