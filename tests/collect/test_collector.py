"""The collector: what is stored is what really happened, in every autoreset mode, and nothing else."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, cast

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor, nn

import relive
from relive import GAE, Collector, RolloutBuffer, Schema, errors
from support import tagged_envs
from support.effort import often
from support.tagged_collections import (
    CARTPOLE,
    MASK,
    MODES,
    OBSERVATIONS,
    Control,
    Echo,
    Edited,
    Row,
    cartpoles,
    check_against_oracle,
    check_unbroken,
    counting,
    every_mode,
    followed,
    gather,
    hide,
    make_buffer,
    policy,
    stored,
    truth,
)
from support.tagged_envs import Tag

KINDS: tuple[tagged_envs.Kind, ...] = ("terminated", "truncated", "both")
ENDS = tuple(itertools.product((1, 2, 3), KINDS))

# The same play through the three autoreset modes


@pytest.mark.parametrize(
    ("num_envs", "of"),
    [(1, often(19, 5)), (2, often(19, 5)), *(pytest.param(n, 1, marks=pytest.mark.slow) for n in (1, 2, 3))],
)
def test_every_small_schedule_gives_the_same_experience_in_every_mode(num_envs: int, of: int) -> None:
    """One env goes through every pair of endings, two through every two, three through every unordered three.

    Quick is a part of what one and two go through.
    """
    if num_envs == 1:
        schedules = [tagged_envs.cycle(pair) for pair in itertools.product(ENDS, ENDS)]
    elif num_envs == 2:
        schedules = [tagged_envs.cycle([a], [b]) for a, b in itertools.product(ENDS, ENDS)]
    else:
        schedules = [tagged_envs.cycle([a], [b], [c]) for a, b, c in itertools.combinations_with_replacement(ENDS, 3)]
    some = tagged_envs.make_tagged(num_envs, AutoresetMode.DISABLED, schedules[0])
    buffer = make_buffer(some, 5)
    for schedule in schedules[::of]:
        seen: dict[AutoresetMode, dict[Tag, float]] = {}
        for mode in MODES:
            collector = Collector(tagged_envs.make_tagged(num_envs, mode, schedule), policy, buffer, seed=3)
            rows, seen[mode] = gather(collector, [5, 1, 4])
            counts = [len(mine) for mine in rows]
            assert rows == truth(schedule, counts, seed=3)
            if mode is not AutoresetMode.NEXT_STEP:
                assert counts == [10] * num_envs
            else:
                assert min(counts) >= 5  # with one-step episodes every other vector step is a reset
        assert seen[AutoresetMode.SAME_STEP] == seen[AutoresetMode.DISABLED]
        one, other = seen[AutoresetMode.SAME_STEP], seen[AutoresetMode.NEXT_STEP]
        shared = sorted(one.keys() & other.keys())
        assert shared
        np.testing.assert_allclose([one[tag] for tag in shared], [other[tag] for tag in shared], rtol=1e-5, atol=1e-6)


@given(
    num_envs=st.integers(1, 6),
    longest=st.integers(1, 12),
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(1, 13), min_size=1, max_size=4),
    observations=st.sampled_from(OBSERVATIONS),
    actions=st.sampled_from(["discrete", "box"]),
)
@settings(max_examples=settings.default.max_examples // 3)
def test_any_schedule_gives_the_same_experience_in_every_mode(
    num_envs: int,
    longest: int,
    seed: int,
    lengths: list[int],
    observations: tagged_envs.Observations,
    actions: tagged_envs.Actions,
) -> None:
    schedule = tagged_envs.drawn(seed, longest)
    for mode in MODES:
        envs = tagged_envs.make_tagged(num_envs, mode, schedule, observations=observations, actions=actions)
        collector = Collector(envs, partial(policy, actions=actions), make_buffer(envs, max(lengths)), seed=seed)
        rows, _ = gather(collector, lengths)
        counts = [len(mine) for mine in rows]
        assert rows == truth(schedule, counts, seed=seed, observations=observations, actions=actions)
        assert collector.total_steps == sum(counts)
        assert sum(envs.get_attr("num_checked")) == sum(counts)
        if mode is not AutoresetMode.NEXT_STEP:
            assert counts == [sum(lengths)] * num_envs


PENDULUM = Control("Pendulum-v1", 17, lambda obs: (obs[..., 1:2] - obs[..., 2:3] * 0.25).clamp(-2, 2))


def plain_loop(control: Control, seed: int, num_steps: int) -> list[tuple[Any, ...]]:
    """One env played without any vector env: obs, action, reward, terminated, truncated, value, final value."""
    env = gym.make(control.name, max_episode_steps=control.limit)
    obs, _ = env.reset(seed=seed)
    rows: list[tuple[Any, ...]] = []
    for _ in range(num_steps):
        answer = control(torch.as_tensor(obs))
        after, reward, terminated, truncated, _ = env.step(answer["action"].numpy())
        final = float(control(torch.as_tensor(after))["value"]) if truncated and not terminated else None
        action = answer["action"].tolist()
        rows.append((obs.tolist(), action, np.float32(reward), terminated, truncated, float(answer["value"]), final))
        obs = env.reset()[0] if terminated or truncated else after
    return rows


@every_mode
@pytest.mark.parametrize("control", [CARTPOLE, PENDULUM], ids=lambda control: control.name)
def test_a_real_env_gives_what_a_plain_loop_over_one_env_gives(control: Control, mode: AutoresetMode) -> None:
    makers = [partial(gym.make, control.name, max_episode_steps=control.limit)] * 3
    envs = SyncVectorEnv(makers, autoreset_mode=mode)
    buffer = make_buffer(envs, 31)
    collector = Collector(envs, control, buffer, seed=5)
    rows: list[list[tuple[Any, ...]]] = [[] for _ in makers]
    names = ("obs", "action", "reward", "terminated", "truncated", "value", "final_value")
    for length in (31, 7, 24, 1, 31, 31):
        buffer.clear()
        collector.collect(length)
        for t, n in buffer["mask"].nonzero().tolist():
            *step, final = (buffer[name][t, n].tolist() for name in names)
            rows[n].append((*step, final if step[4] and not step[3] else None))
    expected = [plain_loop(control, 5 + n, len(mine)) for n, mine in enumerate(rows)]
    assert rows == expected
    assert min(map(len, rows)) >= 115
    kinds = {(row[3], row[4]) for mine in rows for row in mine}
    assert kinds == {(False, False), (False, True)} | ({(True, False)} if control is CARTPOLE else set())


# Replays that hold a next observation with every step


APART: dict[str, dict[str, Any]] = {"own": {"own_next_obs": True}, "unordered": {"ordered": False}}


@every_mode
@pytest.mark.parametrize("kind", APART)
@pytest.mark.parametrize("observations", OBSERVATIONS)
def test_a_replay_with_next_observations_of_its_own_holds_those_that_episodes_ended_on(
    observations: tagged_envs.Observations, kind: str, mode: AutoresetMode
) -> None:
    schedule = tagged_envs.cycle([(3, "truncated"), (1, "terminated")], [(2, "both"), (4, "truncated")])
    envs = tagged_envs.make_tagged(2, mode, schedule, observations=observations)
    replay = relive.ReplayBuffer(Schema.from_env(envs), 200, 2, seed=0, **APART[kind])
    collector = Collector(envs, lambda obs: policy(obs)["action"], replay, seed=3)
    stats = collector.collect(17)
    collector.collect(4)
    assert len(replay) == collector.total_steps >= stats.num_steps  # the newest steps, too
    counts = [sum(int(tag.env) == n for tag, *_ in followed(replay)) for n in range(2)]
    expected = []
    for n, count in enumerate(counts):
        for step in tagged_envs.played(schedule, n, count, seed=3, observations=observations).transitions(n):
            here, there = (Tag(*map(int, tagged_envs.decode(x))) for x in (step.obs, step.next_obs))
            expected.append((here, there, step.reward, step.terminated, step.truncated))
    assert followed(replay) == sorted(expected)
    replay.check()


@pytest.mark.parametrize("kind", APART)
def test_where_final_observations_are_hidden_the_truncated_steps_alone_are_left_out_of_such_a_replay(
    kind: str,
) -> None:
    schedule = tagged_envs.cycle([(3, "truncated"), (2, "terminated")], [(4, "truncated")])
    envs = Edited(tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, schedule), hide)
    replay = relive.ReplayBuffer(Schema.from_env(envs), 200, 2, seed=0, **APART[kind])
    with pytest.raises(errors.EnvError, match="final_obs='mask'"):
        Collector(envs, lambda obs: policy(obs)["action"], replay).collect(5)
    replay.clear()
    Collector(envs, lambda obs: policy(obs)["action"], replay, seed=0, final_obs="mask").collect(12)
    rows = followed(replay)
    cut = {(tag.env, tag.episode, tag.step) for tag, *_, truncated in rows if truncated}
    assert not cut
    ends = [(here, there) for here, there, _, terminated, _ in rows if terminated]
    assert [here == there for here, there in ends] == [True] * 2  # nothing is bootstrapped there
    assert all(there == here._replace(step=here.step + 1) for here, there, _, terminated, _ in rows if not terminated)
    assert len(rows) == 24 - 2 - 3


@pytest.mark.parametrize("final_obs", ["require", "mask"])
@pytest.mark.parametrize("kind", APART)
def test_a_hidden_final_observation_does_not_matter_where_a_truncated_step_is_terminal_too(
    kind: str, final_obs: Any
) -> None:
    schedule = tagged_envs.cycle([(3, "both"), (2, "terminated")], [(4, "both")])
    envs = Edited(tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, schedule), hide)
    replay = relive.ReplayBuffer(Schema.from_env(envs), 200, 2, seed=0, **APART[kind])
    Collector(envs, lambda obs: policy(obs)["action"], replay, seed=0, final_obs=final_obs).collect(12)
    rows = followed(replay)
    assert len(rows) == 24
    ends = [(here, there, truncated) for here, there, _, terminated, truncated in rows if terminated]
    assert [here == there for here, there, _ in ends] == [True] * 7
    assert sum(truncated for *_, truncated in ends) == 5


@every_mode
@pytest.mark.parametrize("kind", APART)
def test_such_a_replay_is_warmed_up_and_reset_like_any_other(kind: str, mode: AutoresetMode) -> None:
    make = partial(cartpoles, mode)
    replay = relive.ReplayBuffer(Schema.from_env(make()), 2_000, 2, seed=0, **APART[kind])
    collector = Collector(make, lambda obs: (obs[:, 2] > 0).long(), replay, seed=0)
    collector.warm(replay, 50, seed=0)
    collector.collect(60)
    collector.reset()
    collector.collect(30)
    batch = replay.data()
    step = batch["next_obs"] - batch["obs"]
    torch.testing.assert_close(step[:, 0], 0.02 * batch["obs"][:, 1], rtol=1e-4, atol=1e-5)  # x' = x + τ v
    assert batch["terminated"].any()
    assert collector.total_steps < len(replay) <= collector.total_steps + 100


# Seeds


@every_mode
def test_the_same_seed_gives_the_same_experience_and_another_one_another(mode: AutoresetMode) -> None:
    def columns(seed: int | None, reset: int | None = None) -> dict[str, Tensor]:
        makers = [partial(gym.make, "CartPole-v1", max_episode_steps=12)] * 2
        envs = SyncVectorEnv(makers, autoreset_mode=mode)
        collector = Collector(envs, CARTPOLE, make_buffer(envs, 30), seed=seed)
        assert collector.seed == seed
        if reset is not None:
            collector.reset(seed=reset)
        collector.collect()
        return {
            name: collector.buffer[name] for name in ("obs", "action", "reward", "terminated", "truncated", "value")
        }

    one, same, other = columns(11), columns(11), columns(12)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["obs"], other["obs"])
    assert not torch.equal(one["obs"][:, 0], one["obs"][:, 1])
    assert torch.equal(columns(None, reset=11)["obs"], one["obs"])
    assert not torch.equal(columns(None)["obs"], columns(None)["obs"])


def test_the_global_generators_are_neither_read_nor_seeded() -> None:
    envs = tagged_envs.make_tagged(
        2, AutoresetMode.SAME_STEP, tagged_envs.always(3), action_mask=True, check_actions=False
    )
    buffer = make_buffer(envs, 6, action_mask=MASK)
    collector = Collector(envs, policy, buffer, seed=1)
    numpy_generator: Any = np.random.mtrand._rand
    before = torch.get_rng_state(), repr(numpy_generator.get_state(legacy=False))
    collector.collect()
    collector.warm(make_buffer(envs, 6, action_mask=MASK), 6, seed=1)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == repr(numpy_generator.get_state(legacy=False))


# Pieces, wrapping, going on


@every_mode
@pytest.mark.parametrize("pieces", [(1,) * 12, (5, 7), (2, 1, 6, 3)])
def test_collecting_in_pieces_is_collecting_at_once(pieces: tuple[int, ...], mode: AutoresetMode) -> None:
    schedule = tagged_envs.drawn(5, longest=4)
    whole, pieced = (
        Collector(envs, counting, make_buffer(envs, 12, hidden=(3,)), seed=0)
        for envs in (tagged_envs.make_tagged(3, mode, schedule) for _ in range(2))
    )
    for _ in range(3):
        stats = [whole.collect(), *(pieced.collect(piece) for piece in pieces)]
        assert stats[0].num_steps == sum(part.num_steps for part in stats[1:])
        assert stats[0].episode_returns == [x for part in stats[1:] for x in part.episode_returns]
        for collector in (whole, pieced):
            collector.buffer.finish(GAE(gamma=0.9, lam=0.8))
            check_against_oracle(collector.buffer)
        names = whole.buffer.keys()
        assert names == pieced.buffer.keys()
        for name in names:
            torch.testing.assert_close(whole.buffer[name], pieced.buffer[name], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(whole.buffer.last["value"], pieced.buffer.last["value"])
    assert list(whole.returns) == list(pieced.returns)


@every_mode
def test_a_buffer_that_wraps_holds_the_newest_steps_with_their_own_final_values(mode: AutoresetMode) -> None:
    schedule = tagged_envs.drawn(6, longest=4)
    ring_envs, all_envs = (tagged_envs.make_tagged(2, mode, schedule) for _ in range(2))
    ring = Collector(ring_envs, policy, make_buffer(ring_envs, 7, wrap=True), seed=0)
    everything = Collector(all_envs, policy, make_buffer(all_envs, 60), seed=0)
    made = 0
    for count in (7, 3, 1, 7, 12, 20, 2):
        ring.collect(count)
        everything.collect(count)
        made += count
        newest = slice(made - 7, made)
        for name in ("obs", "action", "reward", "terminated", "truncated", "value", "mask"):
            assert torch.equal(ring.buffer[name], everything.buffer[name][newest]), name
        cut = ring.buffer["truncated"] & ~ring.buffer["terminated"]
        assert torch.equal(ring.buffer["final_value"][cut], everything.buffer["final_value"][newest][cut])
        ring.buffer.finish(GAE(gamma=0.9, lam=0.8))
        check_against_oracle(ring.buffer)
    ring.collect()
    assert ring.total_steps > everything.total_steps


def test_a_full_buffer_is_cleared_by_the_next_collection_and_the_play_goes_on() -> None:
    schedule = tagged_envs.always(7, "truncated")
    envs = tagged_envs.make_tagged(1, AutoresetMode.SAME_STEP, schedule)
    collector = Collector(envs, policy, make_buffer(envs, 5), seed=0)
    rows: list[Row] = []
    for _ in range(4):
        collector.collect()
        rows += stored(collector.buffer)[0]
    assert rows == truth(schedule, [20], seed=0)[0]


@every_mode
@pytest.mark.parametrize("when", ["before the step", "after the step"])
def test_a_collection_that_failed_leaves_no_false_step_to_the_next_one(when: str, mode: AutoresetMode) -> None:
    """In a notebook the policy is mended, and collect() called again."""
    envs = tagged_envs.make_tagged(
        2, mode, tagged_envs.cycle([(4, "truncated")], [(3, "terminated")]), check_actions=False
    )
    buffer = make_buffer(envs, 12)
    calls = itertools.count()

    def failing(obs: Any) -> dict[str, Any]:
        answer = policy(obs)
        if next(calls) == 3:
            if when == "before the step":
                raise KeyboardInterrupt
            del answer["value"]
        return answer

    collector = Collector(envs, failing, buffer, seed=0)
    with pytest.raises((KeyboardInterrupt, errors.FieldError)):
        collector.collect()
    for _ in range(2):
        collector.collect()
        check_unbroken(buffer)
        buffer.finish(GAE(gamma=0.9, lam=0.8))
        check_against_oracle(buffer)


@every_mode
def test_a_reset_in_the_middle_of_a_rollout_joins_no_two_episodes(mode: AutoresetMode) -> None:
    envs = tagged_envs.make_tagged(2, mode, tagged_envs.always(9, "truncated"))
    buffer = make_buffer(envs, 12)
    collector = Collector(envs, policy, buffer, seed=0)
    collector.collect(5)
    try:
        collector.reset()
    except errors.LifecycleError:  # as good as clearing it
        buffer.clear()
        collector.reset()
    collector.collect()
    check_unbroken(buffer)
    buffer.finish(GAE(gamma=0.9, lam=0.8))
    check_against_oracle(buffer)


# Errors


def test_a_field_that_the_policy_leaves_out_is_named_before_the_envs_are_stepped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    envs = tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.always(3))
    monkeypatch.setattr(envs, "step", lambda actions: pytest.fail(f"stepped with {actions}"))
    buffer = make_buffer(envs, 4, log_prob=())
    with pytest.raises(errors.FieldError, match="policy's answer lacks 'log_prob'; it has 'action', 'value'"):
        Collector(envs, policy, buffer).collect()
    assert buffer.steps == 0
    with pytest.raises(errors.FieldError, match="lacks 'action'; it has 'value', 'log_prob'"):
        Collector(envs, lambda obs: {"value": obs[:, 0], "log_prob": obs[:, 0]}, buffer).collect()
    with pytest.raises(errors.FieldError, match="lacks 'value', 'log_prob'"):
        Collector(envs, tagged_envs.tagged_policy, buffer).collect()


def test_fields_that_the_schema_does_not_have_are_left_out() -> None:
    envs = tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.always(3))
    buffer = make_buffer(envs, 4)
    Collector(envs, lambda obs: policy(obs) | {"entropy": obs.sum(), "reward": obs[:, 0]}, buffer, seed=0).collect()
    assert "entropy" not in buffer
    check_unbroken(buffer)


def test_a_tensordict_is_as_good_an_answer_as_a_dict() -> None:
    envs = tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.always(3, "truncated"))
    rows, _ = gather(
        Collector(envs, lambda obs: TensorDict(policy(obs), [len(obs)]), make_buffer(envs, 8), seed=0), [8]
    )
    assert rows == truth(tagged_envs.always(3, "truncated"), [8, 8], seed=0)


def test_answers_that_carry_gradients_are_stored_without_them() -> None:
    envs = tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.always(3, "truncated"))
    buffer = make_buffer(envs, 8, hidden=(3,))
    weight = nn.Parameter(torch.ones(3))

    def with_gradient(obs: Any, hidden: Tensor) -> dict[str, Any]:
        with torch.enable_grad():
            return policy(obs) | {"hidden": hidden * weight + 1, "value": tagged_envs.tagged_value(obs) * weight[0]}

    Collector(envs, with_gradient, buffer, seed=0).collect()
    names = buffer.keys()
    assert not any(buffer[name].requires_grad for name in names)
    step = torch.as_tensor(tagged_envs.decode(buffer["obs"]).step).float()
    assert torch.equal(buffer["hidden"], step[..., None].expand(-1, -1, 3))


@pytest.mark.parametrize("given", [Schema({"action": ()}), 100, "replay"])
def test_what_is_no_buffer_is_refused(given: Any) -> None:
    envs = tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.always(3))
    with pytest.raises(
        errors.ParameterError, match=r"Collector\(buffer=.*expected a RolloutBuffer, a ReplayBuffer, a "
    ):
        Collector(envs, policy, given)


def test_a_buffer_for_another_number_of_envs_is_refused() -> None:
    envs = tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.always(3))
    buffer = RolloutBuffer(Schema.from_env(envs, value=()), 4, 3)
    with pytest.raises(errors.EnvError, match="made for 3 envs, the vector env has 2"):
        Collector(envs, policy, buffer)


def test_more_steps_than_there_is_room_for_are_refused_before_any_is_made() -> None:
    envs = tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.always(3))
    buffer = make_buffer(envs, 8)
    collector = Collector(envs, policy, buffer, seed=0)
    collector.collect(5)
    checked = envs.get_attr("num_checked")
    with pytest.raises(errors.FullError, match="room for 3 more steps"):
        collector.collect(4)
    assert envs.get_attr("num_checked") == checked
    collector.collect(3)
    check_unbroken(buffer)


@pytest.mark.parametrize("count", [0, -3, 2.5, "2", True], ids=repr)
def test_what_is_no_number_of_steps_is_refused_before_the_envs_are_reset(count: Any) -> None:
    envs = tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.always(3))
    for buffer in (relive.ReplayBuffer(Schema.from_env(envs), 20, 2), make_buffer(envs, 8)):
        resets: list[Any] = []
        counted = VectorWrapper(envs)
        counted.reset = lambda resets=resets, **_: resets.append(1)  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(errors.ParameterError, match=r"collect\(num_steps="):
            Collector(counted, policy, buffer).collect(count)
        assert not resets


def test_the_seed_is_that_of_the_first_reset_and_not_of_one_after_a_failure() -> None:
    """Else the same episodes would be played again each time."""
    seeds: list[Any] = []

    class Noting(VectorWrapper):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            seeds.append(seed)
            return super().reset(seed=seed, options=options)

    def failing(obs: Any) -> Any:
        if len(seeds) < 3:
            raise RuntimeError("out of order")
        return policy(obs)

    envs = Noting(tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.always(3)))
    collector = Collector(envs, failing, make_buffer(envs, 8), seed=7)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of order"):
            collector.collect()
    collector.collect()
    assert seeds == [7, None, None]


@pytest.mark.parametrize(
    ("space", "action", "said"),
    [
        (gym.spaces.Discrete(3), [1, 7], r"env 1 is 7, outside Discrete\(3\).*\(AssertionError"),
        (gym.spaces.Discrete(3, start=2), [1, 3], r"env 0 is 1, outside Discrete\(3, start=2\)"),
        (gym.spaces.MultiDiscrete([2, 3]), [[1, 2], [1, 3]], r"env 1 is \[1 3\], outside MultiDiscrete\(\[2 3\]\)"),
        (gym.spaces.Dict(a=gym.spaces.Discrete(2)), {"a": [0, -1]}, r"env 1 is \{'a': .*-1.*\}, outside Dict\("),
    ],
)
def test_an_action_that_the_envs_fail_on_is_named_with_its_env_and_its_space(
    space: gym.Space[Any], action: Any, said: str
) -> None:
    envs = SyncVectorEnv([partial(Echo, space)] * 2)
    given = {"a": torch.tensor(action["a"])} if isinstance(action, dict) else torch.tensor(action)
    collector = Collector(envs, lambda obs: {"action": given, "value": obs[:, 0]}, make_buffer(envs, 4))
    with pytest.raises(errors.NotFiniteError, match=f"field 'action': the policy's action for {said}") as caught:
        collector.collect()
    assert isinstance(caught.value.__cause__, AssertionError)


@pytest.mark.parametrize(
    ("space", "action", "kind"),
    [
        (gym.spaces.Discrete(2), torch.zeros(2, dtype=torch.int64), AssertionError),
        (gym.spaces.Discrete(2), torch.full((2,), 7), RuntimeError),
        (gym.spaces.Box(-1, 1, (1,)), torch.full((2, 1), 1.5), AssertionError),  # policies leave boxes, and envs clip
        (gym.spaces.Box(-1, 1, (1,)), torch.full((2, 1), 0.5, dtype=torch.float64), AssertionError),
    ],
)
def test_other_errors_of_the_envs_stay_theirs(space: gym.Space[Any], action: Any, kind: type[Exception]) -> None:
    class Failing(Echo):
        def step(self, action: Any) -> Any:
            raise kind("the robot fell")

    envs = SyncVectorEnv([partial(Failing, space)] * 2)
    acting = {"action": action, "value": torch.zeros(2)}
    with pytest.raises(kind, match="the robot fell"):
        Collector(envs, lambda obs: acting, make_buffer(envs, 4)).collect()


def test_an_unknown_wish_for_final_observations_is_refused() -> None:
    envs = tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.always(3))
    with pytest.raises(errors.ParameterError, match=r"final_obs='ignore'\): expected 'require' or 'mask'"):
        Collector(envs, policy, make_buffer(envs, 4), final_obs=cast("Any", "ignore"))
