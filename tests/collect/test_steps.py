"""Steps as values: chunks from a collector give a replay what the collector itself would have stored in it."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, VectorWrapper

import relive
from relive import Batch, Collector, Field, Prioritized, ReplayBuffer, RolloutBuffer, Schema, errors
from relive.steps.arrays import NUMPY_DTYPES
from support import internals, tagged_envs
from support.cases import covering
from support.effort import often
from support.tagged_envs import Tag
from support.twins import assert_alike, mapped, same_batches

MODES = tuple(AutoresetMode)
KINDS: dict[str, dict[str, Any]] = {"ordered": {}, "own": {"own_next_obs": True}, "unordered": {"ordered": False}}
SCHEDULE = tagged_envs.cycle(
    [(3, "truncated"), (1, "terminated")], [(2, "both"), (4, "truncated")], [(1, "truncated"), (1, "both"), (9, "both")]
)
COUNT = 13

every_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
every_kind = pytest.mark.parametrize("kind", KINDS)


def hidden_policy(obs: Any, hidden: Any, **inputs: Any) -> dict[str, Any]:
    """Acts as the tagged envs want, and returns a state that depends on all observations of the episode."""
    after = {"h": hidden["h"] * 0.5 + 1, "c": (hidden["c"][0] + torch.arange(3), hidden["c"][1] - 1)}
    return {"action": tagged_envs.tagged_policy(obs, inputs.get("action_mask")), "hidden": after}


class Blind(VectorWrapper):
    """Envs that hide the observation that an episode ended on."""

    def step(self, actions: Any) -> Any:
        *answer, info = self.env.step(actions)
        return *answer, {key: value for key, value in info.items() if "final" not in key}


def world(mode: AutoresetMode, case: str) -> tuple[Any, Any, Schema, dict[str, Any]]:
    """Envs, a policy for them, their schema, and options of the collector."""
    if case == "recurrent":  # with everything that the policy may be passed
        envs = tagged_envs.make_tagged(3, mode, SCHEDULE, action_mask=True)
        hidden = {"h": (2, 4), "c": ((1, 3), Field((5,), torch.bfloat16))}
        schema = Schema.from_env(
            envs, hidden=hidden, action_mask=Field((tagged_envs.NUM_ACTIONS,), torch.int8),
            is_start=Field((), torch.bool),
            last_reward=(), last_action=Field((), torch.int64),
        )  # fmt: skip
        return envs, hidden_policy, schema, {}
    if case == "hidden ends":
        envs = Blind(tagged_envs.make_tagged(3, mode, SCHEDULE))
        return envs, tagged_envs.tagged_policy, Schema.from_env(envs), {"final_obs": "mask"}
    envs = tagged_envs.make_tagged(3, mode, SCHEDULE, observations=case)  # pyright: ignore[reportArgumentType]
    return envs, tagged_envs.tagged_policy, Schema.from_env(envs), {}


def actor(mode: AutoresetMode, case: str) -> Collector:
    envs, policy, schema, options = world(mode, case)
    return Collector(envs, policy, schema=schema, seed=3, **options)


def replay_for(schema: Schema, kind: str, rows: int, num_envs: int = 3) -> ReplayBuffer[Any, Any]:
    options = KINDS[kind]
    return ReplayBuffer(
        schema, rows * num_envs, num_envs, sampler=Prioritized(), check_ends=False, debug=True, seed=0, **options
    )


def rows_of(steps: Any, first: int, until: int) -> Any:
    """Some vector steps of a chunk."""
    return mapped(lambda x: x[first:until], steps)


def rated(replay: ReplayBuffer[Any, Any]) -> None:
    """Give all transitions so far priorities that differ."""
    if len(replay):
        replay.update_priorities(replay.data()["index"], torch.linspace(0.5, 3, len(replay)))


CASES = [
    (mode, case)
    for mode in MODES
    for case in ("box", "dict", "tuple", "recurrent", "hidden ends")
    if case != "hidden ends" or mode is AutoresetMode.SAME_STEP
]


@pytest.mark.parametrize(("played", "kind", "rows"), covering(CASES, KINDS, [4, 60]))
def test_at_every_seam_two_chunks_store_what_one_stores_and_what_the_collector_stores(
    played: tuple[AutoresetMode, str], kind: str, rows: int
) -> None:
    """In rings that have come round, and in roomy ones."""
    mode, case = played
    envs, policy, schema, options = world(mode, case)
    collected = replay_for(schema, kind, rows)
    collector = Collector(envs, policy, collected, seed=3, **options)
    collector.collect(3)
    rated(collected)
    collector.collect(COUNT - 3)
    chunk = actor(mode, case).steps(COUNT)
    for seam in (*range(3 + len(case) % 3, COUNT + 1, often(9, 3)), None):  # None: one vector step after another
        replay = replay_for(schema, kind, rows)
        replay.extend(rows_of(chunk, 0, 3))
        rated(replay)
        if seam is None:
            for t in range(3, COUNT):
                replay.add(mapped(lambda x, t=t: x[t], chunk))
        else:
            replay.extend(rows_of(chunk, 3, seam))
            replay.extend(rows_of(chunk, seam, COUNT))
        assert_alike(replay, collected)


@every_mode
@pytest.mark.parametrize("case", ["box", "dict", "recurrent"])
def test_chunks_of_any_lengths_are_parts_of_one_long_chunk(mode: AutoresetMode, case: str) -> None:
    whole = actor(mode, case).steps(COUNT)
    for lengths in ((1,) * COUNT, (2, 3, 1, 7), (4, 9), (12, 1))[:: often(2, 1)]:
        one, first = actor(mode, case), 0
        for length in lengths:
            chunk = pickle.loads(pickle.dumps(one.steps(length)))
            mapped(
                np.testing.assert_array_equal, mapped(bits, chunk), rows_of(mapped(bits, whole), first, first + length)
            )
            first += length
        assert one.total_steps == int(whole["mask"].sum())


def bits(x: Any) -> np.ndarray:
    """An array, or a tensor of a dtype that NumPy lacks, as an array."""
    return x.view(torch.int16).numpy() if isinstance(x, torch.Tensor) else x


@every_mode
@every_kind
def test_a_learner_holds_every_transition_that_truly_happened(mode: AutoresetMode, kind: str) -> None:
    one = actor(mode, "dict")
    replay = replay_for(internals.inputs(one).schema, kind, 200)
    for length in (1, 4, 2, 7, 3):
        replay.extend(one.steps(length))
    batch = replay.data()
    found = [
        (Tag(*map(int, here)), Tag(*map(int, there)), *rest)
        for here, there, *rest in zip(
            np.stack(tagged_envs.decode(batch["obs"]), -1),
            np.stack(tagged_envs.decode(batch["next_obs"]), -1),
            *(batch[name].tolist() for name in ("reward", "terminated", "truncated")),
            strict=True,
        )
    ]
    expected = []
    for n in range(3):
        newest = max(step.episode * 100 + step.step for step, *_ in found if step.env == n)
        for step in tagged_envs.played(SCHEDULE, n, 17, seed=3, observations="dict").transitions(n):
            if step.episode * 100 + step.index <= newest:
                tags = (Tag(*map(int, tagged_envs.decode(x))) for x in (step.obs, step.next_obs))
                expected.append((*tags, step.reward, step.terminated, step.truncated))
    assert sorted(found) == sorted(expected)
    under_way = 0 if kind != "ordered" else int(internals.ring(replay).under_way.sum())
    assert len(replay) == one.total_steps - under_way  # only the newest steps have no next observation yet


@every_mode
def test_two_actors_share_a_replay_by_the_numbers_of_its_envs(mode: AutoresetMode) -> None:
    chunks = [[one.steps(k) for k in (5, 1, 4)] for one in (actor(mode, "box"), actor(mode, "box"))]
    schema = internals.inputs(actor(mode, "box")).schema
    shared = replay_for(schema, "ordered", 60, num_envs=6)
    for first, second in zip(*chunks, strict=True):
        shared.extend(second, envs=[5, 1, 3])
        shared.extend(first, envs=[0, 2, 4])
    alone = replay_for(schema, "ordered", 60)
    for chunk in chunks[0]:
        alone.extend(chunk)
    shared.check()
    for env, places in enumerate(([0, 5], [2, 1], [4, 3])):
        for place in places:
            mine, theirs = shared.slice(place), alone.slice(env)
            del mine["index"], theirs["index"]
            assert same_batches(mine, theirs)
    assert len(shared) == 2 * len(alone)


@every_mode
@pytest.mark.parametrize("broken_by", ["reset", "exception"])
def test_a_chunk_after_a_reset_says_so_and_joins_no_two_episodes(mode: AutoresetMode, broken_by: str) -> None:
    envs = tagged_envs.make_tagged(2, mode, tagged_envs.always(6, "truncated"))
    fails = False

    def policy(obs: Any) -> Any:
        if fails:
            raise RuntimeError("broken")
        return tagged_envs.tagged_policy(obs)

    one = Collector(envs, policy, seed=0)
    replay = ReplayBuffer(Schema.from_env(envs), 200, 2, seed=0)
    one.reset(seed=0)  # nothing was returned before, so there is nothing to cut
    first = one.steps(4)
    assert first["mask"].shape == (4, 2)
    if broken_by == "reset":
        one.reset()
        one.reset()
    else:
        fails = True
        with pytest.raises(RuntimeError, match="broken"):
            one.steps(2)
        fails = False
    after = one.steps(4)
    assert after["mask"].shape == (5, 2)
    assert not after["mask"][0].any()
    assert after["mask"][1:].all()
    assert one.steps(1)["mask"].shape == (1, 2)
    replay.extend(first)
    replay.extend(after)
    batch = replay.data()
    assert len(batch) == 2 * (3 + 3)
    here, there = tagged_envs.decode(batch["obs"]), tagged_envs.decode(batch["next_obs"])
    assert np.array_equal(here.step + 1, there.step)
    assert np.array_equal(here.episode, there.episode)


def test_a_chunk_is_plain_arrays_in_the_dtypes_and_nesting_of_the_schema() -> None:
    one = actor(AutoresetMode.NEXT_STEP, "recurrent")
    chunk, schema = one.steps(4), internals.inputs(one).schema
    assert set(chunk) == {*schema.names, "next_obs", "mask"}
    for path, field in schema.leaves.items():
        value = chunk[path[0]]
        for name in path[1:]:
            value = value[int(name)] if isinstance(value, tuple) else value[name]
        assert value.shape == (4, 3, *field.shape)
        known = NUMPY_DTYPES.get(field.dtype)
        assert value.dtype == (known or field.dtype)
        assert isinstance(value, np.ndarray if known else torch.Tensor)
    assert chunk["mask"].dtype == np.bool_
    kept = pickle.dumps(chunk)
    one.steps(4)
    assert pickle.dumps(chunk) == kept  # the arrays are the caller's


def test_without_a_schema_the_fields_are_those_of_the_envs() -> None:
    envs = tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, SCHEDULE, observations="dict")
    chunk = Collector(envs, tagged_envs.tagged_policy).steps()
    assert set(chunk) == {"obs", "action", "reward", "terminated", "truncated", "next_obs", "mask"}
    replay = ReplayBuffer(Schema.from_env(envs), 20, 2)
    replay.extend(chunk)
    assert replay.slice(0)["obs", "state"].shape[1:] == (4,)
    assert isinstance(replay.slice(0), Batch)


def test_a_collector_fills_its_buffer_or_returns_steps_and_says_which() -> None:
    make = partial(tagged_envs.make_tagged, 2, AutoresetMode.SAME_STEP, SCHEDULE)
    schema = Schema.from_env(make())
    with pytest.raises(errors.LifecycleError, match=r"call steps\(k\)"):
        Collector(make, tagged_envs.tagged_policy).collect()
    for buffer in (ReplayBuffer(schema, 20, 2), RolloutBuffer(schema, 4, 2)):
        with pytest.raises(errors.LifecycleError, match=r"call collect\(k\)"):
            Collector(make, tagged_envs.tagged_policy, buffer).steps()
    with pytest.raises(errors.ParameterError, match="a buffer or a schema"):
        Collector(make, tagged_envs.tagged_policy, ReplayBuffer(schema, 20, 2), schema=schema)
    with pytest.raises(errors.SchemaError, match="reward"):
        Collector(make, tagged_envs.tagged_policy, schema=Schema({"obs": (4,), "action": Field((), torch.int64)}))
    assert "steps() returns the steps" in str(Collector(make, tagged_envs.tagged_policy))


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "3", None])
def test_what_is_no_number_of_steps_is_refused(count: Any) -> None:
    one = actor(AutoresetMode.SAME_STEP, "box")
    with pytest.raises(errors.ParameterError, match=r"steps"):
        one.steps(count)
    assert one.envs.get_attr("num_checked") == (0, 0, 0)


def test_an_answer_that_does_not_fit_is_refused_where_it_is_made() -> None:
    envs = tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, SCHEDULE)
    schema = Schema.from_env(envs, log_prob=())
    with pytest.raises(errors.FieldError, match="log_prob"):
        Collector(envs, tagged_envs.tagged_policy, schema=schema).steps(2)
    wrong = {"log_prob": torch.zeros(2, 1)}
    with pytest.raises(errors.ShapeError, match="log_prob"):
        Collector(envs, lambda obs: {"action": tagged_envs.tagged_policy(obs), **wrong}, schema=schema).steps(2)


def test_an_actor_warms_up_another_buffer_as_every_collector_does() -> None:
    make = partial(tagged_envs.make_tagged, 2, AutoresetMode.NEXT_STEP, SCHEDULE, check_actions=False)
    one = Collector(make, tagged_envs.tagged_policy, seed=0)
    first = one.steps(3)
    scale = relive.RolloutBuffer(Schema.from_env(one.envs), 10, 2)
    one.warm(scale, 10, seed=0)
    second = one.steps(3)
    whole = Collector(make, tagged_envs.tagged_policy, seed=0).steps(6)
    mapped(lambda a, b, c: np.testing.assert_array_equal(np.concatenate([a, b]), c), first, second, whole)
