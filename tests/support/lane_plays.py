"""Steps that come to a replay through lanes: plays that an oracle follows, and the processes that write them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from relive import Field, Lanes, ReplayBuffer, Schema
from relive.processes.shared import SharedBlock
from support.twins import Twin, stacked

FLAGS = {name: Field((), torch.bool) for name in ("terminated", "truncated")}
COUNTED = Schema({"obs": (2,), "reward": (), **FLAGS})


def counted(number: int, num_envs: int = 1, end: bool = False) -> dict[str, Any]:
    """A step of which every value says its number; each env adds 1000."""
    values = np.arange(num_envs, dtype=np.float32) * 1000 + number
    flags = np.full(num_envs, end)
    step = {"obs": np.stack([values, -values], 1), "reward": values, "terminated": flags, "truncated": flags & False}
    return step | ({"next_obs": np.stack([values + 0.5, -values], 1)} if end else {})


def numbers(replay: ReplayBuffer, env: int = 0) -> list[float]:
    """The rewards of an env's rows, in the order of time; final observations are left out."""
    rows = replay.slice(env)
    kept = rows["obs"][:, 0] == rows["reward"]
    return rows["reward"][kept].tolist()


class LanedTwin(Twin):
    """A twin whose steps take a lane; ``check`` drains it first, and any other call may."""

    def __init__(self, *args: Any, steps: int = 5, drains: Sequence[bool] = (True,), **options: Any) -> None:
        super().__init__(*args, **options)
        self.lanes = Lanes(self.schema, 1, self.num_envs, steps=steps, own_next_obs=not self.ordered)
        self.writer, self.drains, self.turn = self.lanes.writer(0, timeout=0), list(drains), 0

    def add(self, kinds: str, envs: Sequence[int] | None = None, mask: Sequence[bool] | None = None) -> None:
        if self.lanes.waiting[0] == self.lanes.steps:
            self.drain()
        self.writer.add(self.step(kinds, envs, mask))
        self.turn += 1
        if self.drains[self.turn % len(self.drains)]:
            self.drain()

    def extend(self, plays: Sequence[str], masks: Sequence[Sequence[bool]] | None = None) -> None:
        self.drain()
        which = [None] * len(plays) if masks is None else masks
        self.writer.extend(stacked([self.step(k, mask=m, final=True) for k, m in zip(plays, which, strict=True)]))

    def interrupt(self, envs: Sequence[int] | None = None) -> None:
        for env in range(self.num_envs):
            self.truth.interrupt(env)
            self.lives[env].restart()
        self.writer.interrupt()

    def clear(self) -> None:
        self.drain()
        super().clear()

    def drain(self) -> None:
        self.lanes.drain(self.buffer)
        assert self.lanes.waiting == [0]

    def check(self) -> None:
        self.drain()
        super().check()


# What other processes do


def write_some(lanes: Lanes, lane: int, first: int, count: int) -> None:
    """Write so many numbered steps."""
    with lanes.writer(lane, timeout=30) as writer:
        for number in range(first, first + count):
            writer.add(counted(number, lanes.num_envs))


def own_and_end(lanes: Lanes) -> None:
    """Drain once, as the process with the replay, and end."""
    replay = ReplayBuffer(lanes.schema, 100, lanes.writers * lanes.num_envs)
    lanes.drain(replay)


# Steps that prove by themselves that they are whole

BASE = np.arange(1500).astype(np.uint8)
TAGGED = Schema({
    "obs": {"tag": Field((3,), torch.int64), "image": Field((1500,), torch.uint8)},
    "checksum": Field((), torch.int64), "reward": (), **FLAGS,
})  # fmt: skip
"""``tag`` is lane, life of its writer, and number of the step in that life; the image is a block of its own."""

EPISODE = 7
"""Steps of an episode."""


def image_of(lane: Any, life: Any, number: Any) -> Any:
    """The image of a step, ``[..., 1500]``: another one for each."""
    shade = np.asarray(lane * 101 + life * 17 + number * 31, np.int64) % 256
    return BASE + shade.astype(np.uint8)[..., None]


def checksum_of(tag: np.ndarray, image: np.ndarray) -> int:
    """The checksum of a step."""
    return zlib.crc32(image.tobytes(), zlib.crc32(tag.astype(np.int64).tobytes()))


def tagged_step(lane: int, life: int, number: int) -> dict[str, Any]:
    """A step of one env that names itself. The observation that an episode ends on has the number -1 - number."""

    def obs(at: int) -> dict[str, Any]:
        return {"tag": np.array([[lane, life, at]]), "image": image_of(lane, life, np.array([at]))}

    now, ends = obs(number), number % EPISODE == EPISODE - 1
    step = {
        "obs": now, "checksum": np.array([checksum_of(now["tag"], now["image"])]),
        "reward": np.array([number % 1000], np.float32), "terminated": np.array([ends]), "truncated": np.zeros(1, bool),
    }  # fmt: skip
    return step | ({"next_obs": obs(-1 - number)} if ends else {})


def write_for_ever(lanes: Lanes, lane: int, life: int, acknowledged: SharedBlock) -> None:
    """Write steps until a kill, and note after each ``add`` how many have returned."""
    noted = acknowledged.array.view(np.int64).reshape(lanes.writers, -1)
    writer, number = lanes.writer(lane), 0
    while True:
        writer.add(tagged_step(lane, life, number))
        number += 1
        noted[lane, life] = number


class Inspector:
    """Looks once at every row of a replay that lanes fill: it is whole, in order, and joined to its own life only."""

    def __init__(self, replay: ReplayBuffer, lanes: Lanes) -> None:
        self.replay = replay
        self.found: list[dict[int, int]] = [{} for _ in range(lanes.writers)]
        """Of each lane, how many steps each life of its writer brought."""
        self.seen, self.rows = [-1] * lanes.writers, 0

    def look(self) -> list[str]:
        """What is wrong with the rows that are new."""
        return [error for lane in range(len(self.found)) for error in self._look(lane)]

    def _look(self, lane: int) -> list[str]:
        rows = self.replay.slice(lane)
        index = rows["index"].numpy()
        fresh = int(np.searchsorted(index, self.seen[lane], side="right"))
        if fresh == 0 < self.seen[lane] + 1 and len(index):
            return [f"lane {lane}: rows were overwritten before anybody looked"]
        tag, image = rows["obs", "tag"].numpy()[fresh:], rows["obs", "image"].numpy()[fresh:]
        sums, complete = rows["checksum"].numpy()[fresh:], rows["complete"].numpy()[max(fresh - 1, 0) :]
        wrong = list[str]()
        for i in range(len(tag)):
            wrong += self._count(lane, tag[i], image[i], int(sums[i]))
        all_tags = rows["obs", "tag"].numpy()[max(fresh - 1, 0) :]
        for here, after, joined in zip(all_tags[:-1], all_tags[1:], complete[:-1], strict=True):
            ends = here[2] % EPISODE == EPISODE - 1
            follows = after[1] == here[1] and after[2] == (-1 - here[2] if ends else here[2] + 1)
            if bool(joined) != bool(follows and here[2] >= 0):
                wrong.append(f"lane {lane}: {here} was {'' if joined else 'not '}joined to {after}")
        if len(index):
            self.seen[lane] = int(index[-1])
        return wrong

    def _count(self, lane: int, tag: np.ndarray, image: np.ndarray, checksum: int) -> list[str]:
        """Count one row; what is wrong with it."""
        _, life, number = (int(x) for x in tag)
        self.rows += 1
        if tag[0] != lane or not np.array_equal(image, image_of(lane, life, np.array(number))):
            return [f"lane {lane}: a row is torn: {tag}"]
        if number < 0:  # a final observation
            return []
        lives = self.found[lane]
        expected = lives.get(life, 0)
        lives[life] = number + 1
        if checksum != checksum_of(tag, image):
            return [f"lane {lane}: the checksum of {tag} is wrong"]
        if number != expected or life != max(lives):
            return [f"lane {lane}: {tag} came where step {expected} was due"]
        return []
