"""After a call has returned, all that was handed in or out may be overwritten, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

import overwritten
import tagged
from covering import covering
from effort import CI
from overwritten import Hands, play_twice
from relive import GAE, Collector, Field, Lanes, ReplayBuffer, RolloutBuffer, Schema
from simulated import push, worth
from support.point_masses import PointMasses

N, STEPS = 2, 9
ENDINGS = tagged.cycle([(3, "truncated"), (2, "terminated")], [(2, "truncated"), (4, "both")])
EXTRAS: dict[str, Any] = {"value": (), "hidden": (1, 3)}


def gymnasiums(hands: Hands, mode: AutoresetMode, wrap: Callable[..., Any]) -> Any:
    return overwritten.HoldingEnvs(wrap(mode), hands)


def in_turn(mode: AutoresetMode) -> Any:
    return tagged.make_tagged(N, mode, ENDINGS, action_mask=True)


def in_processes(mode: AutoresetMode, shared: bool) -> Any:
    make = [partial(tagged.TaggedEnv, n, ENDINGS, action_mask=True) for n in range(N)]
    return AsyncVectorEnv(make, shared_memory=shared, autoreset_mode=mode)


def single(hands: Hands, mode: AutoresetMode) -> Any:
    return overwritten.HoldingEnv(tagged.TaggedEnv(0, ENDINGS, action_mask=True), hands)


def simulator(hands: Hands, mode: AutoresetMode, **options: Any) -> Any:
    return overwritten.HoldingSimulator(PointMasses(N, time_limit=4, **options), hands)


ENVS: dict[str, Callable[[Hands, AutoresetMode], Any]] = {
    "sync": partial(gymnasiums, wrap=in_turn),
    "async, shared memory": partial(gymnasiums, wrap=partial(in_processes, shared=True)),
    "async": partial(gymnasiums, wrap=partial(in_processes, shared=False)),
    "single": single,
    "simulator": simulator,
    "rsl_rl": partial(simulator, as_rsl_rl=True),
}
OWN_MODE = "single", "simulator", "rsl_rl"
"""Envs that know one mode: they are played in one of the three cells."""


def driven(obs: Any, hidden: Any) -> dict[str, Any]:
    """A policy for the simulators."""
    return {"action": push(obs), "value": worth(obs), "hidden": hidden + 1}


def note_rollout(hands: Hands, rollout: RolloutBuffer) -> None:
    for name in rollout.keys():  # noqa: SIM118 - not a mapping
        hands.note(name, rollout[name])
    hands.note("last", rollout.last)
    rollout.finish(GAE())
    hands.note("advantage", rollout["advantage"])
    for batch in rollout.minibatches(5, epochs=2):
        hands.take("minibatch", batch)
        hands.spoil()


def note_replay(hands: Hands, replay: ReplayBuffer) -> None:
    hands.spoil()
    for _ in range(2):
        hands.take("data", replay.data())
        hands.spoil()
        hands.take("batch", replay.sample(6))
        hands.spoil()


class Into:
    """What a collector plays into, and how it is read."""

    def __init__(self, kind: str, schema: Schema, num_envs: int, path: Path) -> None:
        self.kind, options = kind, {"seed": 0, "check_ends": False}
        self.lanes = self.writer = None
        self.buffer: Any
        if kind == "rollout":
            self.buffer = RolloutBuffer(schema, STEPS, num_envs, seed=0)
        elif kind == "durable":
            self.buffer = ReplayBuffer.open(path, schema, 80, num_envs, **options)
        else:
            kinds = {"own next_obs": {"own_next_obs": True}, "unordered": {"ordered": False}}
            self.buffer = ReplayBuffer(schema, 80, num_envs, **kinds.get(kind, {}), **options)
        if kind == "lanes":
            self.lanes = Lanes(schema, 1, num_envs)
            self.writer = self.lanes.writer(0)

    def play(self, collector: Collector, hands: Hands) -> None:
        for _ in range(3):
            if self.kind in ("lanes", "steps"):
                chunk = collector.steps(STEPS)
                (self.writer or self.buffer).extend(hands.take("chunk", chunk))
                hands.spoil()
                if self.lanes is not None:
                    self.lanes.drain(self.buffer)
            else:
                stats = collector.collect(STEPS)
                hands.spoil()
                hands.note("returns", np.array(stats.episode_returns))
                hands.note("lengths", np.array(stats.episode_lengths))
            if self.kind == "rollout":
                note_rollout(hands, self.buffer)
        if self.kind != "rollout":
            note_replay(hands, self.buffer)


KINDS = "rollout", "shared", "own next_obs", "unordered", "durable", "lanes", "steps"


def cells() -> list[Any]:
    """Processes take long to start, so all but one of their cells are left to ``.ci/run``."""
    found = []
    for cell in covering(KINDS, ENVS, AutoresetMode, full=2, quick=0):
        kind, envs, mode = cell.values
        if envs in OWN_MODE and mode is not list(AutoresetMode)[(KINDS.index(kind) + list(ENVS).index(envs)) % 3]:
            continue
        slow = envs.startswith("async") and (kind, mode) != ("shared", AutoresetMode.SAME_STEP)
        marks = CI if slow else () if not envs.startswith("async") else cell.marks
        found.append(pytest.param(kind, envs, mode, marks=marks, id=f"{kind}-{envs}-{mode.name.lower()}"))
    return found


def collected(hands: Hands, kind: str, envs: str, mode: AutoresetMode, path: Path, sub: type[Any] | None = None) -> None:
    made = ENVS[envs](hands, mode)
    simulated = envs in ("simulator", "rsl_rl")
    masks = {} if simulated else {"action_mask": Field((tagged.NUM_ACTIONS,), torch.int8)}
    schema = Schema.from_env(made, **EXTRAS, **masks)
    num_envs = 1 if envs == "single" else N
    policy = (
        overwritten.HoldingModelFree(hands, driven) if simulated else overwritten.HoldingPolicy(hands, overwritten.act)
    )
    into = Into(kind, schema, num_envs, path)
    if sub is not None:
        into.buffer = sub(schema, 80, num_envs, seed=0, check_ends=False)

    def start() -> torch.Tensor:  # a tensor itself is read anew by each collect, as it may be one that is learned
        return hands.hold(torch.full((1, 3), 0.25))

    buffer = {} if kind in ("lanes", "steps") else {"buffer": into.buffer}
    options = {} if buffer else {"schema": schema}
    collector = Collector(made, policy, **buffer, **options, initial_hidden=start, **({} if simulated else {"seed": 3}))
    into.play(collector, hands)
    if hasattr(made, "close"):
        made.close()


@pytest.mark.parametrize(("kind", "envs", "mode"), cells())
def test_what_envs_and_policy_hold_is_theirs_to_overwrite(
    kind: str, envs: str, mode: AutoresetMode, tmp_path: Path
) -> None:
    play_twice(lambda hands: collected(hands, kind, envs, mode, tmp_path / str(hands.overwriting)))


class Late(ReplayBuffer):
    """Planted: it stores a step with the next one, and keeps some of its fields as they were given until then."""

    names: tuple[str, ...] = ()
    held: Any = None

    def add(self, step: Any = None, /, *more: Any, **given: Any) -> None:
        values = {**(step or {}), **given}
        values = {name: x if name in self.names else x.clone() if isinstance(x, torch.Tensor) else np.array(x)
                  for name, x in values.items()}  # fmt: skip
        if self.held is not None:
            super().add(self.held)
        self.held = values


@pytest.mark.parametrize("names", [("reward",), ("truncated",), ("obs",)], ids=lambda names: names[0])
def test_a_buffer_that_keeps_what_an_env_returned_is_found(names: tuple[str, ...], tmp_path: Path) -> None:
    sub = type("Planted", (Late,), {"names": names})
    if names == ("obs",):  # a collector copies it, so it is the user's to find
        with pytest.raises((AssertionError, ValueError)):
            play_twice(lambda hands: added(hands, "arrays", sub))
        return
    with pytest.raises(AssertionError, match="has changed"):
        play_twice(lambda hands: collected(hands, "shared", "sync", AutoresetMode.SAME_STEP, tmp_path, sub))
