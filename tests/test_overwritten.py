"""After a call has returned, all that was handed in or out may be overwritten, and nothing changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from relive import (
    GAE,
    Chunks,
    Collector,
    Field,
    Hindsight,
    Lanes,
    ReplayBuffer,
    ReturnsToGo,
    RolloutBuffer,
    Schema,
    returns,
)
from support import overwrites, tagged_envs
from support.cases import covering
from support.effort import CI
from support.overwrites import Hands, play_twice
from support.point_masses import PointMasses
from support.simulators import push, worth
from support.twins import SAMPLERS, SEQUENCES, mapped
from support.twins import VIEWS as TWINS

N, STEPS = 2, 9
ENDINGS = tagged_envs.cycle([(3, "truncated"), (2, "terminated")], [(2, "truncated"), (4, "both")])
EXTRAS: dict[str, Any] = {"value": (), "hidden": (1, 3)}


def gymnasiums(hands: Hands, mode: AutoresetMode, wrap: Callable[..., Any]) -> Any:
    return overwrites.HoldingEnvs(wrap(mode), hands)


def in_turn(mode: AutoresetMode) -> Any:
    return tagged_envs.make_tagged(N, mode, ENDINGS, action_mask=True)


def in_processes(mode: AutoresetMode, shared: bool) -> Any:
    make = [partial(tagged_envs.TaggedEnv, n, ENDINGS, action_mask=True) for n in range(N)]
    return AsyncVectorEnv(make, shared_memory=shared, autoreset_mode=mode)


def single(hands: Hands, mode: AutoresetMode) -> Any:
    return overwrites.HoldingEnv(tagged_envs.TaggedEnv(0, ENDINGS, action_mask=True), hands)


def simulator(hands: Hands, mode: AutoresetMode, **options: Any) -> Any:
    return overwrites.HoldingSimulator(PointMasses(N, time_limit=4, **options), hands)


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
    for name in rollout.keys():
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


def collected(
    hands: Hands, kind: str, envs: str, mode: AutoresetMode, path: Path, sub: type[Any] | None = None
) -> None:
    made = ENVS[envs](hands, mode)
    simulated = envs in ("simulator", "rsl_rl")
    masks = {} if simulated else {"action_mask": Field((tagged_envs.NUM_ACTIONS,), torch.int8)}
    schema = Schema.from_env(made, **EXTRAS, **masks)
    num_envs = 1 if envs == "single" else N
    policy = (
        overwrites.HoldingModelFree(hands, driven) if simulated else overwrites.HoldingPolicy(hands, overwrites.act)
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
        values = {name: x if name in self.names else copy.deepcopy(x) for name, x in values.items()}
        if self.held is not None:
            super().add(self.held)
        self.held = values


def test_a_buffer_that_keeps_what_an_env_returned_is_found(tmp_path: Path) -> None:
    sub = type("Planted", (Late,), {"names": ("reward",)})  # of all else a Collector gives a buffer its own copy
    with pytest.raises(AssertionError, match="has changed"):
        play_twice(lambda hands: collected(hands, "shared", "sync", AutoresetMode.SAME_STEP, tmp_path, sub))


# -- direct calls -----------------------------------------------------------------------------------------------------

FORMS: dict[str, Callable[[Any], Any]] = {"arrays": np.asarray, "tensors": torch.as_tensor, "wide arrays": np.float64}
BOOL = Field((), torch.bool)
USERS = Schema({
    "obs": {"x": (3,), "camera": Field((40, 40), torch.uint8)}, "action": Field((), torch.int64), "reward": (),
    "terminated": BOOL, "truncated": BOOL, "value": (), "hidden": (1, 2), "action_mask": Field((3,), torch.bool),
})  # fmt: skip


def user_step(t: int, own: bool = False) -> dict[str, Any]:
    rng = np.random.default_rng(t)

    def observed() -> dict[str, Any]:
        return {"x": rng.normal(size=(N, 3)).astype(np.float32), "camera": rng.integers(0, 99, (N, 40, 40), np.uint8)}

    ended = rng.random((2, N)) < 0.15
    step = {
        "obs": observed(), "action": rng.integers(0, 3, N), "reward": rng.normal(size=N).astype(np.float32),
        "terminated": ended[0], "truncated": ended[1], "value": rng.normal(size=N).astype(np.float32),
        "hidden": rng.normal(size=(N, 1, 2)).astype(np.float32), "action_mask": rng.random((N, 3)) < 0.9,
    }  # fmt: skip
    return step | ({"next_obs": observed()} if own or ended.any() else {}) | ({"mask": rng.random(N) < 0.8})


def formed(form: str, step: dict[str, Any]) -> dict[str, Any]:
    def convert(x: Any) -> Any:
        return x if form == "wide arrays" and x.dtype != np.float32 else FORMS[form](x)

    return mapped(convert, step)


def fill(hands: Hands, target: Any, form: str, own: bool = False, count: int = 12, extend: bool = False) -> None:
    for t in range(count):
        step = formed(form, user_step(t, own or extend))
        if extend:
            target.extend(hands.hold(mapped(lambda x: x[None], step)))
        else:
            target.add(hands.hold(step))
        hands.spoil()


def added(hands: Hands, form: str, sub: type[Any] = ReplayBuffer, extend: bool = False, **options: Any) -> None:
    replay = sub(USERS, 60, N, seed=0, **options)
    fill(hands, replay, form, replay.own_next_obs, extend=extend)
    note_replay(hands, replay)


@pytest.mark.parametrize(("form", "extend", "kind"), covering(FORMS, (False, True), ("shared", "own", "unordered")))
def test_what_a_user_adds_is_the_users_to_overwrite(form: str, extend: bool, kind: str) -> None:
    options = {"shared": {}, "own": {"own_next_obs": True}, "unordered": {"ordered": False}}[kind]
    play_twice(lambda hands: added(hands, form, extend=extend, **options))


VIEWS: dict[str, Callable[[], Any]] = {**TWINS, "returns to go": ReturnsToGo, "chunks": lambda: Chunks(4)}


def read(hands: Hands, sampler: str, view: str) -> None:
    """Batches, priorities, slices, episodes and served batches."""
    made = {**VIEWS, **SEQUENCES}[view]()
    replay = ReplayBuffer(USERS, 160, N, sampler=SAMPLERS[sampler](), view=made, seed=0)
    fill(hands, replay, "arrays", count=90)
    for _ in range(2):
        for batch in [replay.sample(5), *replay.batches(2, 4)]:
            hands.take("batch", batch)
            if replay.has_priorities:
                errors = hands.hold(torch.arange(batch["index"].numel(), dtype=torch.float32).view_as(batch["index"]))
                replay.update_priorities(batch["index"], errors)
            hands.spoil()
        hands.take("data", replay.data())
        hands.take("slice", replay.slice(0))
        hands.spoil()
        with replay.serve(3, depth=2) as served:
            for _ in range(3):
                hands.take("served", next(served))
                hands.spoil()
        hands.take("episodes", list(replay.episodes()))
        hands.spoil()


@pytest.mark.parametrize(("view", "sampler"), covering([*VIEWS, *SEQUENCES], SAMPLERS))
def test_what_a_learner_reads_is_the_learners_to_overwrite(sampler: str, view: str) -> None:
    play_twice(lambda hands: read(hands, sampler, view))


def relabelled(hands: Hands, sampler: str) -> None:
    """The function of rewards writes to the goals that it gets, and to its last answer."""
    answers: list[Any] = []

    def reward(achieved: Any, desired: Any, *_: Any) -> Any:
        hands.spoil(*answers)
        answers[:] = [-np.abs(achieved - desired).sum(-1).astype(np.float32)]
        hands.spoil(achieved, desired)
        return answers[0]

    goal = (2,)
    schema = Schema({"obs": {"observation": (3,), "achieved_goal": goal, "desired_goal": goal}, "action": (1,),
                     "reward": (), "terminated": BOOL, "truncated": BOOL})  # fmt: skip
    replay = ReplayBuffer(schema, 60, N, sampler=SAMPLERS[sampler](), view=Hindsight(reward), seed=0)
    for t in range(20):
        rng = np.random.default_rng(t)

        def seen(rng: Any = rng) -> dict[str, Any]:
            return {name: rng.normal(size=(N, *field.shape)).astype(np.float32)
                    for name, field in schema["obs"].items()}  # fmt: skip

        step = {"obs": seen(), "next_obs": seen(), "action": np.ones((N, 1), np.float32), "reward": np.ones(N)}
        replay.add(hands.hold(step | {"terminated": np.full(N, t % 5 == 4), "truncated": np.zeros(N, np.bool_)}))
        hands.spoil()
    note_replay(hands, replay)


@pytest.mark.parametrize("sampler", ["uniform", "prioritized, stratified"])
def test_what_a_function_of_rewards_holds_is_its_own_to_overwrite(sampler: str) -> None:
    play_twice(lambda hands: relabelled(hands, sampler))


class SameBatch(ReplayBuffer):
    """Planted: it hands out the same batch again."""

    kept: Any = None

    def sample(self, batch_size: int) -> Any:
        self.kept = super().sample(batch_size) if self.kept is None else self.kept
        return self.kept


def test_a_buffer_that_keeps_what_it_gave_a_learner_is_found() -> None:
    with pytest.raises(AssertionError, match="has changed"):
        play_twice(lambda hands: added(hands, "arrays", SameBatch))


@pytest.mark.parametrize("names", [("action",), ("value",), ("hidden",)], ids=lambda names: names[0])
def test_a_buffer_that_keeps_what_a_policy_or_a_user_gave_is_found(names: tuple[str, ...]) -> None:
    sub = type("Planted", (Late,), {"names": names})
    with pytest.raises(AssertionError, match="has changed"):
        play_twice(lambda hands: added(hands, "arrays", sub))


def rolled(hands: Hands, form: str) -> None:
    """All calls of a rollout."""
    rollout = RolloutBuffer(USERS, 8, N, seed=0)
    for _ in range(2):
        rollout.clear()
        for t in range(8):
            step = formed(form, user_step(t))
            step.pop("next_obs", None)
            rollout.add(hands.hold(step), final_value=hands.hold(np.full(N, 0.5, np.float32)))
            hands.spoil()
        rollout.set_last(obs=hands.hold(user_step(99)["obs"]), value=hands.hold(torch.ones(N)))
        hands.spoil()
        rollout.set_final_value(*map(hands.hold, (np.arange(3), np.zeros(3, np.int64), torch.arange(3.0))))
        hands.spoil()
        rollout["weight"] = hands.hold(torch.arange(8.0 * N).view(8, N))
        hands.spoil()
        rollout.finish(GAE(), last_value=hands.hold(torch.full((N,), 2.0)))
        hands.spoil()
        for name in rollout.keys():
            hands.note(name, rollout[name])
        for name, read_all in {
            "minibatches": partial(rollout.minibatches, 5, epochs=2),
            "sequences": partial(rollout.sequences, 3, batch_size=2),
        }.items():
            for batch in read_all():
                hands.take(name, batch)
                hands.spoil()
        for name, batch in {"flat": rollout.flat(), "sample": rollout.sample(4)}.items():
            hands.take(name, batch)
            hands.spoil()
        hands.note("all", rollout.data())


@pytest.mark.parametrize("form", FORMS)
def test_what_a_rollout_is_given_or_gives_is_anybodys_to_overwrite(form: str) -> None:
    play_twice(lambda hands: rolled(hands, form))


class LateRollout(RolloutBuffer):
    """Planted: a value is kept as it was given until the next step."""

    held: Any = None

    def set_last(self, **given: Any) -> None:
        if self.held is not None:
            super().set_last(value=self.held)
        self.held = given["value"]


def test_a_rollout_that_keeps_a_value_is_found() -> None:
    def run(hands: Hands) -> None:
        rollout = LateRollout(USERS, 3, N)
        fill(hands, rollout, "arrays", count=0)
        for number in (1.0, 2.0):
            rollout.set_last(value=hands.hold(torch.full((N,), number)))
            hands.spoil()
        hands.note("last", rollout.block["value"])

    with pytest.raises(AssertionError, match="has changed"):
        play_twice(run)


def saved(hands: Hands, path: Path) -> None:
    """Saves, in the background too, and what another buffer is made of."""
    replay = ReplayBuffer(USERS, 60, N, seed=0)
    fill(hands, replay, "arrays")
    extra = {"numbers": [1, 2]}
    handle = replay.save(path / "background", extra=extra, background=True)
    extra["numbers"][0] = 9
    fill(hands, replay, "tensors", count=40)
    handle.wait()
    found = ReplayBuffer.load(path / "background")
    assert found.extra == {"numbers": [1, 2]}
    note_replay(hands, found)
    other = ReplayBuffer(USERS, 200, N, seed=0)
    other.append(replay)
    hands.spoil(replay.block)
    note_replay(hands, other)
    rng = np.random.default_rng(0)
    log = {
        "observations": rng.normal(size=(20, 3)),
        "actions": rng.normal(size=(20, 2)),
        "rewards": rng.normal(size=20),
    }
    log |= {"next_observations": rng.normal(size=(20, 3)), "terminals": rng.random(20) < 0.2}
    made = ReplayBuffer.from_arrays(hands.hold(log), seed=0)
    hands.spoil()
    note_replay(hands, made)


def test_what_is_saved_or_copied_is_anybodys_to_overwrite(tmp_path: Path) -> None:
    play_twice(lambda hands: saved(hands, tmp_path / str(hands.overwriting)))


def test_what_returns_are_computed_of_is_anybodys_to_overwrite() -> None:
    def run(hands: Hands) -> None:
        given = {name: torch.arange(6.0).view(3, 2) + k for k, name in enumerate(("reward", "value", "final_value"))}
        given |= {name: torch.tensor([[False, True]] * 3) for name in ("terminated", "truncated")}
        given["value"] = torch.arange(8.0).view(4, 2)
        hands.hold(given)
        found = returns.gae(**given, gamma=0.9, lam=0.8)
        found = (*found, returns.lambda_returns(**given, gamma=0.9, lam=0.8), returns.normalize(given["reward"]))
        hands.spoil()
        hands.note("returns", list(found))

    play_twice(run)


def test_what_a_lanes_writer_is_given_is_the_writers_to_overwrite() -> None:
    def run(hands: Hands) -> None:
        replay, lanes = ReplayBuffer(USERS, 60, N, seed=0), Lanes(USERS, 1, N, steps=20)
        fill(hands, lanes.writer(0), "tensors", count=9)
        fill(hands, lanes.writer(0), "arrays", count=9, extend=True)
        lanes.drain(replay)
        note_replay(hands, replay)

    play_twice(run)


# -- views on purpose -------------------------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[1] / "docs" / "concepts.md"


def some_rollout() -> RolloutBuffer:
    rollout = RolloutBuffer(USERS, 8, N, seed=0)
    for t in range(4):
        rollout.add({name: x for name, x in user_step(t).items() if name != "next_obs"})
    return rollout


SHARED: dict[str, Callable[[Any], Any]] = {
    'r["obs"]': lambda r: r["obs"],
    "r.data()": lambda r: r.data()["obs"],
    "r.last": lambda r: r.last["obs"],
    "r.block": lambda r: r.block["obs"],
    "r.env_major": lambda r: r.env_major["obs"],
    "r.reserve(k)": lambda r: r.reserve(2)["obs"],
    "r.chunks(k)": lambda r: next(iter(r.chunks(2)))["obs"],
    "r.env_batches(b, shuffle=False)": lambda r: next(
        iter(r.env_batches(1, shuffle=False, sequences=("value",)))
    ).steps["obs"],
    "replay.block": lambda r: r.block["obs"],
}


def test_the_page_lists_what_is_a_view_on_purpose() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## What shares memory and what copies")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    shared = [row[1].strip().strip("`") for row in rows if len(row) > 4 and row[3].strip().startswith("shared")]
    assert shared == list(SHARED)


@pytest.mark.parametrize("name", SHARED)
def test_what_is_listed_as_shared_is_the_storage(name: str) -> None:
    buffer: Any = some_rollout()
    if name == "replay.block":
        buffer = ReplayBuffer(USERS, 60, N, seed=0)
        fill(Hands(False), buffer, "arrays", count=4)
    view = SHARED[name](buffer)["x"]
    view[...] = 77.0
    assert (buffer.block["obs"]["x"] == 77.0).sum() == view.numel()
