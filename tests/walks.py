"""Prints the files of relive that ten public calls enter, and writes their counts to docs/contributing/walks.md.

python tests/walks.py
"""

from __future__ import annotations

import gc
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import relive
from relive import GAE, Collector, Field, Lanes, NStep, Prioritized, ReplayBuffer, RolloutBuffer, Schema

PAGE = Path(__file__).resolve().parents[1] / "docs" / "contributing" / "walks.md"
SOURCE = str(Path(relive.__file__).parent) + "/"
MARKS = "<!-- walks: written by tests/walks.py -->", "<!-- end of walks -->"

T, N = 16, 8


class Walk(NamedTuple):
    """What one call enters."""

    files: tuple[str, ...]
    """Each file, in the order in which it was first entered."""
    calls: int
    """How many functions of relive were called."""
    returns: int
    """How often a file was entered that had been left before."""


def traced(call: Callable[[], Any]) -> Walk:
    """The walk of a call. Comprehensions are not counted: some versions of Python run them without a call."""
    entered: list[str] = []

    def enter(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE) and not code.co_name.endswith(("comp>", "expr>")):
            entered.append(code.co_filename.removeprefix(SOURCE))

    gc.disable()  # it would run finalizers of relive's objects at any time
    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    files = tuple(dict.fromkeys(entered))
    moves = sum(a != b for a, b in pairwise(entered))
    return Walk(files, len(entered), moves - max(len(files) - 1, 0))


# -- the calls: each generator makes a fresh buffer, and yields a call so many times

Calls = Iterator[Callable[[], Any]]
TIMES = 3  # some calls prepare more when they are made again


def cartpoles() -> SyncVectorEnv:
    """Envs whose episodes end within a rollout: one action for all makes poles fall, and two have a time limit."""
    limits = [5 if n < 2 else 500 for n in range(N)]
    makers = [partial(gym.make, "CartPole-v1", max_episode_steps=limit) for limit in limits]
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


def push(obs: Any) -> dict[str, Any]:
    return {"action": torch.ones(len(obs), dtype=torch.int64), "value": obs[:, 0]}


def on_policy() -> tuple[Collector, RolloutBuffer]:
    envs = cartpoles()
    rollout = RolloutBuffer(Schema.from_env(envs, value=()), T, N, seed=0)
    return Collector(envs, push, rollout, seed=0), rollout


def collect(folder: Path) -> Calls:
    collector, _ = on_policy()
    yield from [collector.collect] * TIMES


def finish(folder: Path) -> Calls:
    collector, rollout = on_policy()
    for _ in range(TIMES):
        collector.collect()
        yield lambda: (rollout.finish(GAE()), next(rollout.minibatches(32)))


def ppo(folder: Path) -> Calls:
    collector, rollout = on_policy()
    for _ in range(TIMES):
        yield lambda: (collector.collect(), rollout.finish(GAE()), next(rollout.minibatches(32)))


FLAGS = {name: Field((), torch.bool) for name in ("terminated", "truncated")}
SCHEMA = Schema({"obs": (4,), "action": Field((), torch.int64), "reward": (), **FLAGS})
GOALS = {"observation": (2,), "achieved_goal": (2,), "desired_goal": (2,)}
GOAL_SCHEMA = Schema({"obs": GOALS, "action": (1,), "reward": (), **FLAGS})


def step(schema: Schema, t: int) -> dict[str, Any]:
    """A vector step of numbers that say the time; every tenth ends all episodes."""

    def rows(path: Any) -> Any:
        return torch.full((N, *schema.leaves[path].shape), t % 2, dtype=schema.leaves[path].dtype)

    fields = {name: schema.rebuild(name, rows) for name in schema.names}
    ends = np.full(N, t % 10 == 9)
    fields |= {"terminated": ends & False, "truncated": ends}
    return fields | ({"next_obs": fields["obs"]} if ends.any() else {})


def filled(schema: Schema = SCHEMA, **options: Any) -> ReplayBuffer:
    replay = ReplayBuffer(schema, 1000, N, seed=0, check_ends=False, **options)
    for t in range(100):
        replay.add(step(schema, t))
    return replay


def sample(make: Callable[[], ReplayBuffer], folder: Path) -> Calls:
    replay = make()
    yield from [lambda: replay.sample(32)] * TIMES


def prioritized() -> ReplayBuffer:
    return filled(sampler=Prioritized(), view=NStep(3))


def update_priorities(folder: Path) -> Calls:
    replay = prioritized()
    for _ in range(TIMES):
        batch, errors = replay.sample(32), torch.ones(32)
        yield partial(replay.update_priorities, batch["index"], errors)


def goal_reward(achieved: Any, desired: Any) -> Any:
    return -(achieved != desired).any(-1).astype(np.float32)


def hindsight() -> ReplayBuffer:
    return filled(GOAL_SCHEMA, view=relive.Hindsight(goal_reward))


def sequences() -> ReplayBuffer:
    return filled(view=relive.Sequence(8))


def durable_add(folder: Path) -> Calls:
    with ReplayBuffer.open(folder / "replay", SCHEMA, capacity=1000, num_envs=N, seed=0, check_ends=False) as replay:
        for t in range(TIMES):
            yield partial(replay.add, step(SCHEMA, t))


def lane(_: Path) -> Calls:
    lanes, replay = Lanes(SCHEMA, 1, N, steps=8), ReplayBuffer(SCHEMA, 1000, N, seed=0, check_ends=False)
    with lanes.writer(0) as writer:
        for t in range(TIMES):
            fields = step(SCHEMA, t)
            yield lambda fields=fields: (writer.add(fields), lanes.drain(replay))


def save(folder: Path) -> Calls:
    replay = filled()
    for _ in range(TIMES):
        yield partial(replay.save, folder / "save")


WALKS: dict[str, Callable[[Path], Calls]] = {
    f"PPO: `collect` of {T} steps of {N} envs": collect,
    "PPO: `finish`, and the first of `minibatches`": finish,
    "PPO: the two above": ppo,
    "`sample`, uniform": partial(sample, filled),
    "`sample`, prioritized, 3-step": partial(sample, prioritized),
    "`sample`, hindsight": partial(sample, hindsight),
    "`sample`, sequences": partial(sample, sequences),
    "`update_priorities`": update_priorities,
    "`add` to a durable replay": durable_add,
    "`add` to a lane, and `drain`": lane,
    "`save`": save,
}


def walked() -> dict[str, tuple[Walk, Walk]]:
    """Name -> the walks of the first call of a fresh buffer and of the third.

    All is played once before, so that nothing that a process does once, such as to import a module, is counted.
    """
    found: dict[str, tuple[Walk, Walk]] = {}
    for name, make in WALKS.items():
        for _ in range(2):
            with tempfile.TemporaryDirectory() as folder:
                cold, *_, warm = (traced(call) for call in make(Path(folder)))
                found[name] = cold, warm
    return found


# -- the table


def table(walks: dict[str, tuple[Walk, Walk]]) -> str:
    lines = [
        "| call | files, cold | files, warm | calls, cold | calls, warm | returns, cold | returns, warm |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, (cold, warm) in walks.items():
        numbers = *(len(w.files) for w in (cold, warm)), cold.calls, warm.calls, cold.returns, warm.returns
        lines.append(f"| {name} | {' | '.join(f'{n:,}' for n in numbers)} |")
    return "\n".join(lines)


def put(page: str, lines: str) -> str:
    """The page with this table in place of the former."""
    begin, end = MARKS
    return re.sub(
        f"{re.escape(begin)}.*{re.escape(end)}", lambda _: f"{begin}\n\n{lines}\n\n{end}", page, flags=re.DOTALL
    )


def limits(page: str) -> dict[str, tuple[int, int]]:
    """Name -> how many files a walk may enter, cold and warm, as the table of a page says."""
    begin, end = MARKS
    rows = re.findall(r"^\| (.+?) \| (\d+) \| (\d+) \|", page.partition(begin)[2].partition(end)[0], re.MULTILINE)
    return {name: (int(cold), int(warm)) for name, cold, warm in rows}


def main() -> None:
    walks = walked()
    for name, (cold, warm) in walks.items():
        for when, walk in (("cold", cold), ("warm", warm)):
            print(f"{name}, {when}: {len(walk.files)} files, {walk.calls:,} calls, {walk.returns:,} returns")
            print(f"  {' '.join(walk.files)}")
    lines = table(walks)
    PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), lines), encoding="utf-8")
    print(f"\n{lines}")


if __name__ == "__main__":
    main()
