"""The collector: what is stored is what really happened, in every autoreset mode, and nothing else."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor, nn

import oracle
import relive
import tagged
from relive import GAE, Collector, Field, RolloutBuffer, Schema, errors
from tagged import Tag

MODES = tuple(AutoresetMode)
OBSERVATIONS: tuple[tagged.Observations, ...] = ("box", "dict", "tuple")
KINDS: tuple[tagged.Kind, ...] = ("terminated", "truncated", "both")
ENDS = tuple(itertools.product((1, 2, 3), KINDS))
MASK = Field((tagged.NUM_ACTIONS,), torch.int8)

every_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())


# What is stored, as plain lists; what should be, likewise.


class Row(NamedTuple):
    """One real step: everything in it but ``final_value`` must be of one place in the play."""

    tag: Tag
    action: tuple[float, ...]
    reward: float
    terminated: bool
    truncated: bool
    value: float
    final_value: float | None


def policy(obs: Any, action_mask: Any = None, *, actions: tagged.Actions = "discrete") -> dict[str, Any]:
    return {"action": tagged.tagged_policy(obs, action_mask, actions=actions), "value": tagged.tagged_value(obs)}


def stored(buffer: RolloutBuffer) -> list[list[Row]]:
    """The real steps of each env, in the order of time."""
    tags = tagged.decode(buffer["obs"])
    rows: list[list[Row]] = [[] for _ in range(buffer.num_envs)]
    columns = [buffer[name].tolist() for name in ("reward", "terminated", "truncated", "value", "final_value")]
    actions = buffer["action"].reshape(buffer.steps, buffer.num_envs, -1).tolist()
    for t, n in buffer["mask"].nonzero().tolist():
        reward, terminated, truncated, value, final_value = (column[t][n] for column in columns)
        tag = Tag(*(int(numbers[t, n]) for numbers in tags))
        final = final_value if truncated and not terminated else None
        rows[n].append(Row(tag, tuple(actions[t][n]), reward, terminated, truncated, value, final))
    return rows


def truth(endings: tagged.Endings, counts: list[int], **options: Any) -> list[list[Row]]:
    """The first ``counts[n]`` steps of each env n, as the schedule says."""
    played = tagged.played(endings, range(len(counts)), counts, **options)
    return [
        [
            Row(
                Tag(*map(int, tagged.decode(step.obs))),
                tuple(np.reshape(step.action, -1).tolist()),
                step.reward,
                step.terminated,
                step.truncated,
                step.extras["value"],
                float(tagged.value_of(tagged.decode(step.next_obs)))
                if step.truncated and not step.terminated
                else None,
            )
            for step in played.transitions(n)
        ]
        for n in range(len(counts))
    ]


def make_buffer(envs: Any, num_steps: int, **extras: Any) -> RolloutBuffer:
    wrap = extras.pop("wrap", False)
    num_envs = getattr(envs, "num_envs", 1)
    return RolloutBuffer(Schema.from_env(envs, **{"value": (), **extras}), num_steps, num_envs, wrap=wrap, seed=0)


def gather(collector: Collector, lengths: list[int]) -> tuple[list[list[Row]], dict[Tag, float]]:
    """Several rollouts, one after another: their real steps, and the advantages of episodes that ended in them.

    Each is checked on the way: the bootstrap row, and the advantages against the oracle's.
    """
    buffer = collector.buffer
    rows: list[list[Row]] = [[] for _ in range(buffer.num_envs)]
    advantages: dict[Tag, float] = {}
    for length in lengths:
        buffer.clear()
        collector.collect(length)
        buffer.finish(GAE(gamma=0.9, lam=0.8), partial=True)
        check_against_oracle(buffer)
        for mine, new in zip(rows, stored(buffer), strict=True):
            mine.extend(new)
        done = (buffer["terminated"] | buffer["truncated"]).numpy()
        ended = np.flip(np.logical_or.accumulate(np.flip(done, 0)), 0)
        tags = tagged.decode(buffer["obs"])
        for t, n in np.argwhere(buffer["mask"].numpy() & ended):
            advantages[Tag(*(int(x[t, n]) for x in tags))] = float(buffer["advantage"][t, n])
    return rows, advantages


def check_against_oracle(buffer: RolloutBuffer) -> None:
    names = ("reward", "terminated", "truncated", "final_value", "mask")
    block = {name: buffer[name].numpy() for name in names}
    value = torch.cat([buffer["value"], buffer.last["value"].unsqueeze(0)]).numpy()
    advantage, ret = oracle.gae(value=value, **block, gamma=0.9, lam=0.8)
    assert np.array_equal(buffer.last["value"], tagged.tagged_value(buffer.last["obs"]))
    np.testing.assert_allclose(buffer["advantage"], advantage, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(buffer["return"], ret, rtol=1e-5, atol=1e-6)


def check_unbroken(buffer: RolloutBuffer) -> None:
    """Obs and reward of a row are of one step, and the row after it goes on with the play."""
    tags = tagged.decode(buffer["obs"])
    for n in range(buffer.num_envs):
        before: Tag | None = None
        for t in range(buffer.steps):
            tag = Tag(*(int(x[t, n]) for x in tags))
            if not buffer["mask"][t, n]:
                before = None  # every trace stops at it
                continue
            assert float(buffer["reward"][t, n]) == tagged.reward_of(*tag[:3]), f"step {t} of env {n}: {tag}"
            assert before is None or tag == before._replace(step=before.step + 1), f"step {t} of env {n}: {tag}"
            before = None if buffer["terminated"][t, n] or buffer["truncated"][t, n] else tag


# The same play through the three autoreset modes


@pytest.mark.parametrize("num_envs", [1, 2, 3])
def test_every_small_schedule_gives_the_same_experience_in_every_mode(num_envs: int) -> None:
    """One env goes through every pair of endings, two through every two, three through every unordered three."""
    if num_envs == 1:
        schedules = [tagged.cycle(pair) for pair in itertools.product(ENDS, ENDS)]
    elif num_envs == 2:
        schedules = [tagged.cycle([a], [b]) for a, b in itertools.product(ENDS, ENDS)]
    else:
        schedules = [tagged.cycle([a], [b], [c]) for a, b, c in itertools.combinations_with_replacement(ENDS, 3)]
    some = tagged.make_tagged(num_envs, AutoresetMode.DISABLED, schedules[0])
    buffer = make_buffer(some, 5)
    for schedule in schedules:
        seen: dict[AutoresetMode, dict[Tag, float]] = {}
        for mode in MODES:
            collector = Collector(tagged.make_tagged(num_envs, mode, schedule), policy, buffer, seed=3)
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
def test_any_schedule_gives_the_same_experience_in_every_mode(
    num_envs: int,
    longest: int,
    seed: int,
    lengths: list[int],
    observations: tagged.Observations,
    actions: tagged.Actions,
) -> None:
    schedule = tagged.drawn(seed, longest)
    for mode in MODES:
        envs = tagged.make_tagged(num_envs, mode, schedule, observations=observations, actions=actions)
        collector = Collector(envs, partial(policy, actions=actions), make_buffer(envs, max(lengths)), seed=seed)
        rows, _ = gather(collector, lengths)
        counts = [len(mine) for mine in rows]
        assert rows == truth(schedule, counts, seed=seed, observations=observations, actions=actions)
        assert collector.total_steps == sum(counts)
        assert sum(envs.get_attr("num_checked")) == sum(counts)
        if mode is not AutoresetMode.NEXT_STEP:
            assert counts == [sum(lengths)] * num_envs


class Control(NamedTuple):
    """A real env, a policy and a value that are functions of each observation alone, row by row."""

    name: str
    limit: int
    act: Callable[[Tensor], Tensor]

    def __call__(self, obs: Tensor) -> dict[str, Tensor]:
        return {"action": self.act(obs), "value": obs[..., 0] * 0.25 - obs[..., 1] * 3 + obs[..., 2]}


CARTPOLE = Control("CartPole-v1", 40, lambda obs: (obs[..., 2] + 0.1 * obs[..., 3] > 0).long() * (obs[..., 0] < 0.04))
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


# The traps at an episode's end


@every_mode
def test_a_truncation_is_valued_by_its_final_observation_never_by_the_reset_one(mode: AutoresetMode) -> None:
    schedule = tagged.cycle([(2, "truncated")], [(3, "truncated")])
    envs = tagged.make_tagged(2, mode, schedule)
    buffer = make_buffer(envs, 7)
    seen: list[Tag] = []

    def value_fn(obs: Tensor) -> Tensor:
        tag = tagged.decode(obs)
        seen.extend(Tag(*map(int, one)) for one in zip(*tag, strict=True))
        return tagged.tagged_value(obs)

    Collector(envs, policy, buffer, value_fn=value_fn, seed=0).collect()
    tags = tagged.decode(buffer["obs"])
    cut = buffer["truncated"].nonzero().tolist()
    assert len(cut) >= 4
    for t, n in cut:
        last = Tag(*(int(x[t, n]) for x in tags))
        final, reset = last._replace(step=last.step + 1), last._replace(episode=last.episode + 1, step=0)
        assert float(buffer["final_value"][t, n]) == tagged.value_of(final) != tagged.value_of(reset)
    if mode is not AutoresetMode.NEXT_STEP:
        assert {(tag.env, tag.step) for tag in seen if tag.step} >= {(0, 2), (1, 3)}


@every_mode
def test_final_values_are_those_of_the_value_function_that_was_given_not_of_the_policy(mode: AutoresetMode) -> None:
    envs = tagged.make_tagged(2, mode, tagged.cycle([(2, "truncated")], [(3, "truncated")]))
    buffer = make_buffer(envs, 8)
    Collector(envs, policy, buffer, value_fn=lambda obs: 1 + tagged.tagged_value(obs), seed=0).collect()
    tag = tagged.decode(buffer["obs"])
    cut = buffer["truncated"]
    expected = 1 + tagged.value_of(tag._replace(step=tag.step + 1))
    np.testing.assert_allclose(buffer["final_value"][cut], expected[cut.numpy()], rtol=1e-6)
    assert np.array_equal(buffer.last["value"], 1 + tagged.tagged_value(buffer.last["obs"]))


def test_the_ignored_step_of_next_step_is_in_no_batch_no_count_and_no_statistic() -> None:
    envs = tagged.make_tagged(2, AutoresetMode.NEXT_STEP, tagged.always(10, "truncated"))
    buffer = make_buffer(envs, 110)
    collector = Collector(envs, policy, buffer, seed=0)
    stats = collector.collect()
    buffer.finish(GAE())
    assert len(buffer) == stats.num_steps == collector.total_steps == 200  # 9 % of the 220 rows are resets
    assert stats.episode_lengths == [10] * 20
    ignored = ~buffer["mask"]
    assert ignored.sum() == 20
    assert (buffer["reward"][ignored] == 0).all()
    tags = [tagged.decode(batch["obs"]) for batch in buffer.minibatches(64)]
    served = sorted(one for tag in tags for one in zip(*(x.tolist() for x in tag), strict=True))
    assert served == sorted((n, e, s, n) for n in range(2) for e in range(10) for s in range(10))
    for batch in buffer.minibatches(64):
        tagged.decode_reward(batch["reward"])


@every_mode
def test_the_next_episodes_first_observation_has_no_say_in_an_advantage(mode: AutoresetMode) -> None:
    """The values of first observations are enormous: wherever one leaks over an end, it shows."""
    schedule = tagged.cycle([(3, "terminated"), (2, "truncated"), (4, "both")])

    def value_fn(obs: Tensor) -> Tensor:
        step = torch.as_tensor(tagged.decode(obs).step)
        return torch.where(step == 0, torch.tensor(1e6), step.float())

    envs = tagged.make_tagged(1, mode, schedule)
    buffer = make_buffer(envs, 20)
    Collector(envs, lambda obs: policy(obs) | {"value": value_fn(obs)}, buffer).collect()
    buffer.finish(GAE(gamma=1.0, lam=1.0))
    tag = tagged.decode(buffer["obs"][:, 0])
    columns = (tag.episode, tag.step, buffer["return"][:, 0], buffer["mask"][:, 0])
    returns = {(int(e), int(s)): float(r) for e, s, r, real in zip(*columns, strict=True) if real}
    ended = [e for e in range(8) if (e, schedule(0, e)[0] - 1) in returns]
    assert len(ended) >= 4
    for e in ended:
        length, kind = schedule(0, e)
        for step in range(1, length):
            rewards = sum(float(tagged.reward_of(0, e, s)) for s in range(step, length))
            assert returns[e, step] == pytest.approx(rewards + (length if kind == "truncated" else 0), rel=1e-5)


class Edited(VectorWrapper):
    """A vector env whose answers go through ``edit(envs, obs, info)`` after every step."""

    def __init__(self, envs: VectorEnv, edit: Callable[[Any, dict[str, Any]], tuple[Any, dict[str, Any]]]) -> None:
        super().__init__(envs)
        self._edit = edit

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(actions)
        obs, info = self._edit(obs, info)
        return obs, reward, terminated, truncated, info


def rekeyed(name: str, masked: bool, batched: bool, obs: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Final observations under another name, with or without a mask, by env or as a batch."""
    info = dict(info)
    given, present = info.pop("final_obs", None), info.pop("_final_obs", None)
    if given is None or present is None:
        return obs, info
    if batched:
        rows = [given[n] if present[n] else tagged.row(obs, n) for n in range(len(present))]
        given = batch(rows)
    info[name] = given
    if masked:
        info[f"_{name}"] = present
    return obs, info


def batch(rows: list[Any]) -> Any:
    if isinstance(rows[0], dict):
        return {key: batch([row[key] for row in rows]) for key in rows[0]}
    if isinstance(rows[0], tuple):
        return tuple(batch(list(column)) for column in zip(*rows, strict=True))
    return np.stack(rows)


@pytest.mark.parametrize("observations", OBSERVATIONS)
@pytest.mark.parametrize("name", ["final_obs", "final_observation"])
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "unmasked"])
@pytest.mark.parametrize("batched", [True, False], ids=["batch", "objects"])
def test_final_observations_are_found_under_every_name_and_in_every_form(
    observations: tagged.Observations, name: str, masked: bool, batched: bool
) -> None:
    schedule = tagged.cycle([(2, "truncated"), (1, "terminated")], [(3, "truncated")], [(4, "both"), (2, "truncated")])
    inner = tagged.make_tagged(3, AutoresetMode.SAME_STEP, schedule, observations=observations)
    envs = Edited(inner, partial(rekeyed, name, masked, batched))
    buffer = make_buffer(envs, 9)
    rows, _ = gather(Collector(envs, policy, buffer, seed=1), [9, 8])
    assert rows == truth(schedule, [17] * 3, seed=1, observations=observations)


def hide(obs: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return obs, {key: x for key, x in info.items() if "final" not in key}


def withdraw(obs: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The final observation of env 1 is said not to be there, though something is in its place."""
    if "_final_obs" in info:
        info = info | {"_final_obs": info["_final_obs"] & np.array([True, False])}
    return obs, info


def test_a_final_observation_whose_mask_says_no_is_not_used() -> None:
    envs = Edited(tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.always(2, "truncated")), withdraw)
    with pytest.raises(relive.ReliveError, match=r"env 1 was truncated .*final_obs='mask'") as caught:
        Collector(envs, policy, make_buffer(envs, 4)).collect()
    assert isinstance(caught.value, errors.EnvError)


def test_a_vector_env_that_hides_its_final_observations_is_refused_where_they_are_needed() -> None:
    inner = tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.cycle([(9, "truncated")], [(3, "both")]))
    envs = Edited(inner, hide)
    with pytest.raises(errors.EnvError, match="env 0 was truncated and its final observation is hidden"):
        Collector(envs, policy, make_buffer(envs, 20)).collect()
    assert inner.get_attr("num_checked") == (9, 9)  # the ends before it, those of env 1, need no value


@pytest.mark.parametrize("edit", [hide, withdraw])
def test_with_final_obs_mask_the_truncated_steps_are_masked_and_nothing_else_changes(edit: Any) -> None:
    schedule = tagged.cycle([(4, "truncated"), (3, "terminated")], [(5, "both"), (2, "truncated")])
    kept, masked = (
        Collector(envs, policy, make_buffer(envs, 17), seed=0, final_obs="mask")
        for envs in (
            tagged.make_tagged(2, AutoresetMode.SAME_STEP, schedule),
            Edited(tagged.make_tagged(2, AutoresetMode.SAME_STEP, schedule), edit),
        )
    )
    for collector in (kept, masked):
        collector.collect()
        collector.buffer.finish(GAE(gamma=0.9, lam=0.8))
        check_against_oracle(collector.buffer)
    for name in ("obs", "action", "reward", "terminated", "truncated", "value"):
        assert torch.equal(kept.buffer[name], masked.buffer[name])
    hidden = kept.buffer["truncated"] & ~kept.buffer["terminated"]
    hidden[:, 0] &= edit is hide
    assert hidden.any()
    assert kept.buffer["mask"].all()
    assert torch.equal(masked.buffer["mask"], ~hidden)
    assert list(kept.returns) == list(masked.returns)
    assert kept.total_steps == masked.total_steps == 34
    assert len(masked.buffer) == 34 - int(hidden.sum())


def test_without_values_nothing_is_asked_of_final_observations() -> None:
    envs = Edited(tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.always(2, "truncated")), hide)
    buffer = RolloutBuffer(Schema.from_env(envs), 5, 2)
    Collector(envs, tagged.tagged_policy, buffer).collect()
    assert buffer.is_full
    assert "final_value" not in buffer


# Replays that hold a next observation with every step


APART: dict[str, dict[str, Any]] = {"own": {"own_next_obs": True}, "unordered": {"ordered": False}}


def followed(replay: relive.ReplayBuffer) -> list[tuple[Tag, Tag, float, bool, bool]]:
    """The transitions that can be drawn: where each is from, where it led, its reward and flags; sorted."""
    batch = replay.data()
    tags, after = tagged.decode(batch["obs"]), tagged.decode(batch["next_obs"])
    columns = [batch[name].tolist() for name in ("reward", "terminated", "truncated")]
    return sorted(
        (Tag(*(int(x[i]) for x in tags)), Tag(*(int(x[i]) for x in after)), *(column[i] for column in columns))
        for i in range(len(batch))
    )


@every_mode
@pytest.mark.parametrize("kind", APART)
@pytest.mark.parametrize("observations", OBSERVATIONS)
def test_a_replay_with_next_observations_of_its_own_holds_those_that_episodes_ended_on(
    observations: tagged.Observations, kind: str, mode: AutoresetMode
) -> None:
    schedule = tagged.cycle([(3, "truncated"), (1, "terminated")], [(2, "both"), (4, "truncated")])
    envs = tagged.make_tagged(2, mode, schedule, observations=observations)
    replay = relive.ReplayBuffer(Schema.from_env(envs), 200, 2, seed=0, **APART[kind])
    collector = Collector(envs, lambda obs: policy(obs)["action"], replay, seed=3)
    stats = collector.collect(17)
    collector.collect(4)
    assert len(replay) == collector.total_steps >= stats.num_steps  # the newest steps, too
    counts = [sum(int(tag.env) == n for tag, *_ in followed(replay)) for n in range(2)]
    expected = []
    for n, count in enumerate(counts):
        for step in tagged.played(schedule, n, count, seed=3, observations=observations).transitions(n):
            here, there = (Tag(*map(int, tagged.decode(x))) for x in (step.obs, step.next_obs))
            expected.append((here, there, step.reward, step.terminated, step.truncated))
    assert followed(replay) == sorted(expected)
    replay.check()


@pytest.mark.parametrize("kind", APART)
def test_where_final_observations_are_hidden_the_truncated_steps_alone_are_left_out_of_such_a_replay(
    kind: str,
) -> None:
    schedule = tagged.cycle([(3, "truncated"), (2, "terminated")], [(4, "truncated")])
    envs = Edited(tagged.make_tagged(2, AutoresetMode.SAME_STEP, schedule), hide)
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


# What the policy is given, and what it answers


class Doubles(VectorWrapper):
    """A vector env that observes in float64, as MuJoCo does; counts the steps that it is asked for."""

    steps = 0

    def reset(self, **options: Any) -> Any:
        obs, info = self.env.reset(**options)
        return obs.astype(np.float64), info

    def step(self, actions: Any) -> Any:
        self.steps += 1
        obs, *rest, info = self.env.step(actions)
        if "final_obs" in info:
            final = [None if x is None else np.asarray(x, np.float64) for x in info["final_obs"]]
            info = info | {"final_obs": np.array([*final, None], object)[:-1]}
        return obs.astype(np.float64), *rest, info


@every_mode
def test_the_policy_gets_observations_in_the_dtype_of_the_schema(mode: AutoresetMode) -> None:
    schedule = tagged.cycle([(3, "truncated")], [(2, "terminated"), (5, "truncated")])
    envs = Doubles(tagged.make_tagged(2, mode, schedule))
    network, seen = nn.Linear(4, 1), set[torch.dtype]()

    def act(obs: Tensor) -> dict[str, Any]:
        seen.add(obs.dtype)
        network(obs)  # "mat1 and mat2 must have the same dtype"
        return policy(obs)

    buffer = make_buffer(envs, 12)
    rows, _ = gather(Collector(envs, act, buffer, seed=0), [12, 5])
    assert seen == {torch.float32}
    assert rows == truth(schedule, [len(mine) for mine in rows], seed=0)
    replay = relive.ReplayBuffer(Schema.from_env(envs), 100, 2, own_next_obs=True, seed=0)
    Collector(envs, lambda obs: act(obs)["action"], replay, seed=0).collect(12)
    assert seen == {torch.float32}
    assert all(there == here._replace(step=here.step + 1) for here, there, *_ in followed(replay))


def test_an_observation_that_the_schema_cannot_hold_is_refused_before_the_policy_sees_it() -> None:
    envs = Doubles(tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.always(3)))
    schema = Schema.from_env(envs).extend(obs=Field((4,), torch.int64), value=())
    with pytest.raises(errors.DTypeError, match=r"'obs': expected torch\.int64, got torch\.float64"):
        Collector(envs, policy, RolloutBuffer(schema, 4, 2)).collect()
    assert envs.steps == 0


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "a number": (0, errors.ShapeError, r"'action': expected shape \(2, 1\).*got \(\)"),
    "nothing": (None, errors.ShapeError, r"'action': expected an array.*got NoneType"),
    "no axis for the action": (torch.zeros(2), errors.ShapeError, r"expected shape \(2, 1\).*got \(2,\)"),
    "an action and its probability": ((torch.zeros(2, 1), torch.zeros(2)), errors.ShapeError, r"'action'"),
    "a distribution": (torch.distributions.Normal(0.0, 1.0), errors.ShapeError, r"'action'.*got Normal"),
    "complex numbers": (torch.zeros(2, 1, dtype=torch.complex64), errors.DTypeError, r"'action'.*complex64"),
    "a mapping without actions": ({"value": torch.zeros(2)}, errors.FieldError, "no 'action'; it has 'value'"),
}


@pytest.mark.parametrize("answer", WRONG)
def test_an_answer_that_does_not_fit_is_refused_with_what_is_expected_before_the_env_sees_it(answer: str) -> None:
    given, error, says = WRONG[answer]
    envs = Doubles(gym.make_vec("Pendulum-v1", num_envs=2, vectorization_mode="sync"))
    buffer = RolloutBuffer(Schema.from_env(envs).extend(obs=(3,)), 4, 2)
    with pytest.raises(error, match=says) as caught:
        Collector(envs, lambda obs: given, buffer).collect()
    assert "the policy's answer" in str(caught.value)
    assert envs.steps == 0
    assert buffer.steps == 0


def test_the_action_of_a_single_env_may_come_without_its_axis() -> None:
    played = RolloutBuffer(Schema.from_env(gym.make("Pendulum-v1")), 3, 1)
    for answer in (torch.zeros(1), torch.zeros(1, 1), np.zeros(1), [0.0], [[0.0]]):
        played.clear()
        Collector(gym.make("Pendulum-v1"), lambda obs, answer=answer: answer, played).collect()
        assert played["action"].tolist() == [[[0.0]]] * 3


@pytest.mark.parametrize("as_module", [False, True])
def test_a_policy_that_takes_a_state_and_a_schema_without_one_is_an_error_that_says_what_to_add(
    as_module: bool,
) -> None:
    envs = tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.always(3))

    def takes(obs: Any, hidden: Any) -> dict[str, Any]:
        return policy(obs) | {"hidden": hidden}

    def stateless(obs: Any) -> dict[str, Any]:
        return policy(obs)

    class Module(nn.Module):
        def forward(self, obs: Any, hidden: Any) -> dict[str, Any]:
            return takes(obs, hidden)

    acting = Module() if as_module else takes
    with pytest.raises(errors.FieldError, match=r"policy\(obs\).*missing a required argument: 'hidden'.*add it to the"):
        Collector(envs, acting, make_buffer(envs, 4)).collect()
    with pytest.raises(errors.FieldError, match=r"policy\(obs, hidden=...\).*unexpected keyword argument 'hidden'"):
        Collector(envs, stateless, make_buffer(envs, 4, hidden=(3,))).collect()
    with pytest.raises(errors.FieldError, match="returns 'hidden', and the schema has no such field"):
        Collector(envs, lambda obs, hidden=None: policy(obs) | {"hidden": 1}, make_buffer(envs, 4)).collect()


def test_a_value_function_that_takes_a_state_the_schema_lacks_is_such_an_error_too() -> None:
    envs = tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.always(3))

    def value_fn(obs: Any, hidden: Any) -> Any:
        return tagged.tagged_value(obs)

    with pytest.raises(errors.FieldError, match="missing a required argument: 'hidden'"):
        Collector(envs, policy, make_buffer(envs, 4), value_fn=value_fn).collect()


def test_a_type_error_of_the_policy_itself_stays_what_it_is() -> None:
    envs = tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.always(3))

    def wrong(obs: Any) -> Any:
        return len(cast(Any, 3))

    with pytest.raises(TypeError, match=r"len\(\)"):
        Collector(envs, wrong, make_buffer(envs, 4)).collect()


# Two collectors


def test_a_collector_does_not_go_on_in_envs_that_another_one_has_played_in() -> None:
    envs = tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.always(5, "truncated"), check_actions=False)
    one, other = (Collector(envs, policy, make_buffer(envs, 4), seed=k) for k in range(2))
    one.collect(2)
    other.collect(4)  # it resets them first, so all is well with this one
    check_unbroken(other.buffer)
    with pytest.raises(errors.LifecycleError, match=r"another Collector.*its own envs, or call reset\(\)"):
        one.collect(2)
    assert one.buffer.steps == 2
    other.collect(4)
    one.reset()  # takes them back
    one.buffer.clear()
    one.collect()
    check_unbroken(one.buffer)
    with pytest.raises(errors.LifecycleError, match="another Collector"):
        other.collect()


@pytest.mark.parametrize("shared", ["a wrapper around it", "a single env", "a function that gives the same"])
def test_envs_are_known_again_behind_wrappers_and_functions(shared: str) -> None:
    inner = tagged.make_tagged(1, AutoresetMode.SAME_STEP, tagged.always(5), check_actions=False)
    single = tagged.TaggedEnv(0, tagged.always(5), check_actions=False)
    first, second = {
        "a wrapper around it": (inner, Edited(inner, lambda obs, info: (obs, info))),
        "a single env": (single, single),
        "a function that gives the same": (lambda: inner, lambda: inner),
    }[shared]
    one, other = (Collector(envs, policy, make_buffer(inner, 4)) for envs in (first, second))
    one.collect(2)
    other.collect(2)
    with pytest.raises(errors.LifecycleError, match="another Collector"):
        one.collect(2)


def test_warming_up_in_the_envs_of_the_training_is_noticed() -> None:
    envs = tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.always(5), check_actions=False)
    collector = Collector(envs, policy, make_buffer(envs, 4))
    collector.collect(2)
    collector.warm(make_buffer(envs, 4), 4, policy=policy, envs=envs)
    with pytest.raises(errors.LifecycleError, match="another Collector"):
        collector.collect(2)


def test_envs_and_collectors_are_forgotten_with_the_last_reference() -> None:
    envs = tagged.make_tagged(1, AutoresetMode.SAME_STEP, tagged.always(5))
    collector = Collector(envs, policy, make_buffer(envs, 4))
    collector.collect(2)
    gone = weakref.ref(collector), weakref.ref(envs)
    del collector
    gc.collect()
    assert gone[0]() is None
    Collector(envs, policy, make_buffer(envs, 4)).collect(2)
    del envs
    gc.collect()
    assert gone[1]() is None


def test_envs_that_cannot_be_referred_to_weakly_are_played_all_the_same() -> None:
    class Slotted(VectorWrapper):
        def __hash__(self) -> int:
            raise TypeError("no hash")

        @property
        def unwrapped(self) -> Any:
            return self

    envs = Slotted(tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.always(5)))
    collector = Collector(envs, policy, make_buffer(envs, 4), seed=0)
    collector.collect(2)
    collector.collect(2)
    check_unbroken(collector.buffer)


# The action and the reward before


NESTED = gym.spaces.Dict({"move": gym.spaces.Discrete(5), "aim": gym.spaces.Box(-1, 1, (2,), np.float32)})


class Recalling(gym.Env[Any, Any]):
    """Observes (env, episode, step); what it was told last, and paid for it, comes with every observation's info."""

    observation_space = gym.spaces.Box(0, 1e4, (3,), np.float32)
    action_space = NESTED

    def __init__(self, number: int, endings: tagged.Endings) -> None:
        self.number, self.endings, self.episode, self.count = number, endings, -1, 0

    def _obs(self) -> np.ndarray:
        return np.array([self.number, self.episode, self.count], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.episode, self.count = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        length, kind = self.endings(self.number, self.episode)
        reward = paid(self._obs())
        self.count += 1
        over = self.count == length
        return self._obs(), reward, over and kind != "truncated", over and kind != "terminated", {}


def paid(obs: Any) -> float:
    return float(1 + obs[0] + 10 * obs[1] + 100 * obs[2])


def chosen(obs: Tensor) -> dict[str, Tensor]:
    code = obs[:, 0] + 2 * obs[:, 1] + 3 * obs[:, 2]
    return {"aim": torch.stack([code / 64, -code / 64], 1), "move": code.long() % 5}


def before(obs: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The action and reward before each observation, which says by itself what they were."""
    earlier = obs - torch.tensor([0.0, 0.0, 1.0])
    first = obs[:, 2] == 0
    action = {name: torch.where(_rows(first, x), 0, x) for name, x in chosen(earlier).items()}
    return action, torch.where(first, 0.0, torch.tensor([paid(x) for x in earlier]))


def _rows(which: Tensor, like: Tensor) -> Tensor:
    return which.view(-1, *[1] * (like.dim() - 1))


def remembering(obs: Tensor, last_action: Any, last_reward: Tensor) -> dict[str, Any]:
    action, reward = before(obs)
    assert all(torch.equal(last_action[name], action[name]) for name in ("move", "aim"))
    assert torch.equal(last_reward, reward)
    return {"action": chosen(obs), "value": obs.sum(1)}


@every_mode
def test_the_action_and_the_reward_before_come_with_every_observation_that_is_acted_on_or_valued(
    mode: AutoresetMode,
) -> None:
    schedule = tagged.cycle([(3, "truncated"), (1, "truncated")], [(2, "terminated"), (4, "truncated")])
    envs = SyncVectorEnv([partial(Recalling, n, schedule) for n in range(2)], autoreset_mode=mode)
    schema = Schema.from_env(envs, value=())
    schema = schema.extend(last_action=schema["action"], last_reward=schema["reward"])
    rollout, valued = RolloutBuffer(schema, 9, 2), []

    def value_fn(obs: Tensor, last_action: Any, last_reward: Tensor) -> Tensor:
        valued.append(len(obs))
        return remembering(obs, last_action, last_reward)["value"]

    collector = Collector(envs, remembering, rollout, value_fn=value_fn, seed=0)
    for _ in range(3):
        collector.collect()
        rows = rollout.flat()
        action, reward = before(rows["obs"])
        assert torch.equal(rows["last_reward"], reward)
        assert all(torch.equal(rows["last_action", name], action[name]) for name in ("move", "aim"))
    assert max(valued) > 2
    collector.reset()
    collector.collect()
    replay = relive.ReplayBuffer(schema.extend(value=()), 200, 2, seed=0)
    Collector(envs, remembering, replay, seed=0).collect(20)
    batch = replay.data()
    assert torch.equal(batch["last_reward"], before(batch["obs"])[1])


def test_fields_of_those_names_are_as_the_action_and_the_reward_are_or_from_the_info() -> None:
    envs = tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.always(3))
    with pytest.raises(errors.DTypeError, match=r"'last_action'.*declare it as Field\(\(\), torch.int64\)"):
        Collector(envs, policy, make_buffer(envs, 4, last_action=(3,)))
    with pytest.raises(errors.DTypeError, match=r"'last_reward'.*rename your own"):
        Collector(envs, policy, make_buffer(envs, 4, last_reward=Field((), torch.float64)))
    Collector(envs, policy, make_buffer(envs, 4, last_reward=(2,)), from_info=("last_reward",))


# Spaces and kinds of envs


@every_mode
@pytest.mark.parametrize("observations", ["dict", "tuple"])
def test_nested_observations_are_stored_bit_for_bit_and_reach_the_policy_with_their_names(
    observations: tagged.Observations, mode: AutoresetMode
) -> None:
    schedule = tagged.cycle([(2, "truncated"), (3, "terminated")], [(1, "both"), (4, "truncated")])
    envs = tagged.make_tagged(2, mode, schedule, observations=observations)
    buffer = make_buffer(envs, 9)
    given: list[TensorDict] = []

    def recording(obs: TensorDict) -> dict[str, Any]:
        given.append(obs.clone())
        return policy(obs)

    collector = Collector(envs, recording, buffer, seed=2, value_fn=tagged.tagged_value)
    rows, _ = gather(collector, [9])
    assert rows == truth(schedule, [len(mine) for mine in rows], seed=2, observations=observations)
    assert all(isinstance(obs, TensorDict) and obs.batch_size == (2,) for obs in given)
    for t, obs in enumerate(given):
        for key in buffer["obs"].keys(include_nested=True, leaves_only=True):
            assert obs[key].dtype is buffer["obs"][key].dtype
            assert torch.equal(obs[key], buffer["obs"][key][t])
    keys = {"dict": {"state", "camera", "count", "phase"}, "tuple": {"0", "1", "2"}}
    assert set(given[0].keys()) == keys[observations]


class Echo(gym.Env[Any, Any]):
    """Observes how often it was stepped, and keeps the actions it was given."""

    def __init__(self, action_space: gym.Space[Any]) -> None:
        self.observation_space = gym.spaces.Box(0, 1e4, (1,), np.float32)
        self.action_space = action_space
        self.given: list[Any] = []
        self.count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.given.append(action)
        self.count += 1
        return np.full(1, self.count, np.float32), 0.0, False, self.count == 3, {}


def discrete(obs: Tensor, n: int) -> Tensor:
    return obs[:, 0].long() % n


ACTION_SPACES: dict[str, tuple[gym.Space[Any], Callable[[Tensor], Any]]] = {
    "multi_discrete": (
        gym.spaces.MultiDiscrete([3, 4]),
        lambda obs: torch.stack([discrete(obs, 3), discrete(obs + 1, 4)], 1),
    ),
    "multi_binary": (gym.spaces.MultiBinary(3), lambda obs: (obs.long() + torch.arange(3)).remainder(2).to(torch.int8)),
    "tuple": (
        gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (2,), np.float32))),
        lambda obs: (discrete(obs, 3), torch.cat([obs, -obs], 1) / 8),
    ),
    "dict": (
        gym.spaces.Dict({"move": gym.spaces.Discrete(5), "aim": gym.spaces.Dict({"at": gym.spaces.Box(-1, 1, (1,))})}),
        lambda obs: {"aim": {"at": obs / 8}, "move": discrete(obs, 5)},
    ),
}


@every_mode
@pytest.mark.parametrize("kind", ACTION_SPACES)
def test_every_action_space_gets_the_actions_that_are_stored(kind: str, mode: AutoresetMode) -> None:
    space, act = ACTION_SPACES[kind]
    envs = SyncVectorEnv([partial(Echo, space)] * 2, autoreset_mode=mode)
    buffer = RolloutBuffer(Schema.from_env(envs), 7, 2)
    Collector(envs, lambda obs: {"action": act(obs)}, buffer).collect()
    for n, env in enumerate(envs.envs):
        real = [t for t in range(7) if buffer["mask"][t, n]]
        for t, action in zip(real, env.get_wrapper_attr("given"), strict=True):
            leaves = buffer["action"]
            kept = leaves[t, n] if isinstance(leaves, Tensor) else leaves[t, n].to_dict()
            assert_same_action(kept, action)
    flat = RolloutBuffer(Schema.from_env(envs), 4, 2)
    Collector(envs, lambda obs: {"action": act(obs)}, flat).warm(flat, 4, seed=0)  # random ones fit as well
    assert flat.is_full


def assert_same_action(kept: Any, action: Any) -> None:
    if isinstance(action, dict | tuple):
        for key, part in action.items() if isinstance(action, dict) else enumerate(action):
            assert_same_action(kept[key if isinstance(key, str) else str(key)], part)
    else:
        assert kept.numpy().dtype == np.asarray(action).dtype
        assert np.array_equal(kept, action)


@every_mode
def test_an_async_vector_env_gives_the_same_as_a_synchronous_one(mode: AutoresetMode) -> None:
    schedule = tagged.cycle([(2, "truncated"), (3, "terminated")], [(4, "both"), (1, "truncated")])
    makers = [partial(tagged.TaggedEnv, n, schedule, observations="dict", action_mask=True) for n in range(2)]
    envs = AsyncVectorEnv(makers, autoreset_mode=mode, copy=False)
    try:
        collector = Collector(envs, policy, make_buffer(envs, 8, action_mask=MASK), seed=4)
        rows, _ = gather(collector, [8, 5])
    finally:
        envs.close()
    expected = truth(schedule, [len(mine) for mine in rows], seed=4, observations="dict", action_mask=True)
    assert rows == expected


def test_a_single_env_is_played_as_a_vector_of_one() -> None:
    schedule = tagged.cycle([(2, "truncated"), (3, "terminated")])
    env = tagged.TaggedEnv(0, schedule)
    collector = Collector(env, policy, make_buffer(env, 6), seed=7)
    rows, _ = gather(collector, [6, 4])
    assert rows == truth(schedule, [10], seed=7)
    assert env.num_checked == 10  # it is played itself, not a copy of it


@pytest.mark.parametrize("single", [True, False])
def test_a_function_that_makes_envs_is_as_good_as_envs(single: bool) -> None:
    schedule = tagged.cycle([(2, "truncated"), (3, "terminated")])
    count = 1 if single else 3
    vector = partial(tagged.make_tagged, count, AutoresetMode.DISABLED, schedule)
    make: Callable[[], Any] = partial(tagged.TaggedEnv, 0, schedule) if single else vector
    collector = Collector(make, policy, make_buffer(vector(), 6), seed=7)
    rows, _ = gather(collector, [6, 4])
    assert rows == truth(schedule, [10] * count, seed=7)


def tensors(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: tensors(part) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map(tensors, tree))
    return torch.as_tensor(tree)


class Torched(VectorWrapper):
    """A torch-native vector env: it takes tensors only, gives tensors only, and final observations as a batch.

    With ``reuse`` everything it gives lies in the same memory from the first reset on, or from the first step on.
    ``fresh`` names what it gives afresh all the same.
    """

    def __init__(self, envs: VectorEnv, reuse: str = "never", fresh: tuple[str, ...] = ()) -> None:
        super().__init__(envs)
        self._reuse = reuse
        self._fresh = fresh
        self._memory: dict[str, Tensor] = {}
        self._given_afresh: list[Any] = []  # kept, or the next one might lie in the same place by chance

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if options and isinstance(options["reset_mask"], Tensor):
            options = {"reset_mask": options["reset_mask"].numpy()}
        obs, info = self.env.reset(seed=seed, options=options)
        info = {key: x for key, x in info.items() if not key.startswith("_")} if options is None else info
        return self._given("from the first reset", (tensors(obs), tensors(info)))

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        assert isinstance(actions, Tensor), f"the env takes tensors, got {type(actions)}"
        obs, reward, terminated, truncated, info = self.env.step(actions.numpy())
        obs, info = rekeyed(
            "final_obs", True, True, obs, {key: x for key, x in info.items() if "final_info" not in key}
        )
        return self._given("from the first step", tensors((obs, np.float32(reward), terminated, truncated, info)))

    def _given(self, since: str, answer: Any) -> Any:
        if self._reuse == "never" or (self._reuse == "from the first step" and since != self._reuse):
            self._given_afresh.append(answer)
            return answer
        return self._placed(answer, since if self._reuse == "from the first step" else "", ())

    def _placed(self, tree: Any, path: str, keys: tuple[str, ...]) -> Any:
        if isinstance(tree, dict):
            return {key: self._placed(part, f"{path}/{key}", (*keys, key)) for key, part in tree.items()}
        if isinstance(tree, tuple):
            # a reset's (obs, info) and a step's (obs, ..., info) share the memory of obs and info
            names = [str(i) for i in range(len(tree))]
            names = names if keys else [*names[:-1], "info"]
            parts = zip(names, tree, strict=True)
            return tuple(self._placed(part, f"{path}/{name}", (*keys, name)) for name, part in parts)
        if set(keys) & set(self._fresh):
            self._given_afresh.append(tree)
            return tree
        memory = self._memory.setdefault(path, torch.empty_like(tree))
        return memory.copy_(tree)


@every_mode
@pytest.mark.parametrize("observations", OBSERVATIONS)
def test_a_torch_native_vector_env_is_given_tensors_and_read_rightly(
    observations: tagged.Observations, mode: AutoresetMode
) -> None:
    schedule = tagged.cycle([(2, "truncated"), (3, "terminated")], [(4, "both"), (1, "truncated")])
    envs = Torched(tagged.make_tagged(2, mode, schedule, observations=observations, action_mask=True))
    collector = Collector(envs, policy, make_buffer(envs, 8, action_mask=MASK), seed=4)
    rows, _ = gather(collector, [8, 5])
    counts = [len(mine) for mine in rows]
    assert rows == truth(schedule, counts, seed=4, observations=observations, action_mask=True)


@every_mode
@pytest.mark.parametrize("observations", OBSERVATIONS)
def test_a_vector_env_that_reuses_the_memory_of_its_observations_is_stored_rightly(
    observations: tagged.Observations, mode: AutoresetMode
) -> None:
    schedule = tagged.cycle([(2, "truncated"), (3, "terminated")], [(4, "both"), (1, "truncated")])
    makers = [partial(tagged.TaggedEnv, n, schedule, observations=observations) for n in range(2)]
    envs = SyncVectorEnv(makers, autoreset_mode=mode, copy=False)
    rows, _ = gather(Collector(envs, policy, make_buffer(envs, 8), seed=4), [8, 5])
    assert rows == truth(schedule, [len(mine) for mine in rows], seed=4, observations=observations)


@every_mode
@pytest.mark.parametrize(
    ("reuse", "fresh"),
    [
        ("from the first reset", ()),
        ("from the first step", ()),
        ("from the first reset", ("state",)),
        ("from the first reset", ("camera", "count")),
    ],
    ids=["all", "all but what reset gives", "all but one leaf", "all but two leaves"],
)
def test_a_simulator_that_gives_out_its_own_memory_is_stored_rightly(
    reuse: str, fresh: tuple[str, ...], mode: AutoresetMode
) -> None:
    schedule = tagged.cycle([(5, "truncated"), (3, "terminated")], [(4, "both"), (2, "truncated")])
    inner = tagged.make_tagged(2, mode, schedule, observations="dict", action_mask=True)
    envs = Torched(inner, reuse, fresh)
    collector = Collector(envs, policy, make_buffer(envs, 8, action_mask=MASK), seed=4)
    rows, _ = gather(collector, [8, 5])
    counts = [len(mine) for mine in rows]
    assert rows == truth(schedule, counts, seed=4, observations="dict", action_mask=True)


@pytest.mark.filterwarnings("error")
def test_observations_that_must_not_be_written_to_are_taken_without_a_warning() -> None:
    def lock(obs: np.ndarray, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        obs = obs.copy()
        obs.flags.writeable = False
        return obs, info

    schedule = tagged.always(3, "truncated")
    envs = Edited(tagged.make_tagged(2, AutoresetMode.SAME_STEP, schedule), lock)
    rows, _ = gather(Collector(envs, policy, make_buffer(envs, 8), seed=4), [8])
    assert rows == truth(schedule, [8, 8], seed=4)


# Action masks, and what else comes with an observation


@every_mode
def test_action_masks_reach_the_policy_and_the_buffer_with_the_observation_they_belong_to(mode: AutoresetMode) -> None:
    schedule = tagged.drawn(3, longest=4)
    envs = tagged.make_tagged(3, mode, schedule, action_mask=True)
    buffer = make_buffer(envs, 25, action_mask=MASK)
    rows, _ = gather(Collector(envs, policy, buffer, seed=0), [25])
    assert rows == truth(schedule, [len(mine) for mine in rows], seed=0, action_mask=True)
    real = buffer["mask"]
    assert buffer["action_mask"].dtype is torch.int8
    expected = torch.as_tensor(tagged.mask_of(tagged.decode(buffer["obs"])))
    assert torch.equal(buffer["action_mask"][real], expected[real])
    assert buffer["action_mask"].gather(2, buffer["action"].unsqueeze(2))[real].all()


@every_mode
def test_the_value_of_a_final_observation_is_asked_for_with_the_mask_that_came_with_it(mode: AutoresetMode) -> None:
    envs = tagged.make_tagged(2, mode, tagged.cycle([(2, "truncated")], [(3, "truncated")]), action_mask=True)
    buffer = make_buffer(envs, 8, action_mask=MASK)

    def strict(obs: Tensor, action_mask: Tensor) -> dict[str, Tensor]:
        expected = torch.as_tensor(tagged.mask_of(tagged.decode(obs)))
        assert torch.equal(action_mask, expected)
        return policy(obs, action_mask)

    rows, _ = gather(Collector(envs, strict, buffer, seed=0), [8, 3])
    assert [len(mine) for mine in rows] != [0, 0]


class Privileged(tagged.TaggedEnv):
    """Tells the critic more than it shows."""

    def _info(self) -> dict[str, Any]:
        return {"privileged": np.array([self.tag.episode, self.tag.step + 0.5], np.float32), "label": "of no use"}


@every_mode
def test_other_fields_of_info_are_stored_with_their_observation_and_value_the_final_one(mode: AutoresetMode) -> None:
    makers = [partial(Privileged, n, tagged.cycle([(2, "truncated")], [(3, "truncated")])) for n in range(2)]
    envs = SyncVectorEnv(makers, autoreset_mode=mode)
    buffer = make_buffer(envs, 10, privileged=(2,))

    def critic(obs: Tensor, privileged: Tensor) -> dict[str, Any]:
        return {"action": tagged.tagged_policy(obs), "value": privileged[:, 0] * 100 + privileged[:, 1]}

    Collector(envs, critic, buffer, from_info=("privileged",)).collect()
    tag = tagged.decode(buffer["obs"])
    code = tag.episode * 100 + tag.step + 0.5
    real, cut = buffer["mask"].numpy(), buffer["truncated"].numpy()
    assert np.array_equal(buffer["value"][real], code[real])
    assert np.array_equal(buffer["final_value"][cut], code[cut] + 1)
    assert cut.sum() >= 5


@every_mode
def test_an_action_mask_that_the_env_does_not_report_is_an_error_that_names_the_env(mode: AutoresetMode) -> None:
    envs = tagged.make_tagged(2, mode, tagged.always(2))
    with pytest.raises(errors.EnvError, match=r"'action_mask'.* missing for env 0"):
        Collector(envs, policy, make_buffer(envs, 4, action_mask=MASK)).collect()
    makers = [partial(tagged.TaggedEnv, n, tagged.always(2), action_mask=n == 0) for n in range(2)]
    envs = SyncVectorEnv(makers, autoreset_mode=mode)
    with pytest.raises(errors.EnvError, match=r"'action_mask'.* missing for env 1"):
        Collector(envs, policy, make_buffer(envs, 4, action_mask=MASK)).collect()


# Where an episode starts


START = Field((), torch.bool)


def knowing(obs: Any, is_start: Tensor) -> dict[str, Any]:
    """A policy that checks what it is told: an observation says by itself whether it is the first of its episode."""
    assert is_start.dtype is torch.bool
    assert is_start.tolist() == (tagged.decode(obs).step == 0).tolist()
    return policy(obs)


@every_mode
def test_the_policy_and_the_buffer_are_told_where_episodes_start_in_every_mode(mode: AutoresetMode) -> None:
    schedule = tagged.drawn(5, longest=4)
    envs = tagged.make_tagged(3, mode, schedule)
    buffer = make_buffer(envs, 25, is_start=START)
    asked: list[int] = []

    def value_fn(obs: Any, is_start: Tensor) -> Tensor:
        asked.append(len(obs))
        return knowing(obs, is_start)["value"]

    collector = Collector(envs, knowing, buffer, value_fn=value_fn, seed=0)
    for length in (25, 1, 2, 25):
        buffer.clear()
        collector.collect(length)
        real = buffer["mask"].numpy()
        assert np.array_equal(buffer["is_start"].numpy()[real], (tagged.decode(buffer["obs"]).step == 0)[real])
    assert len(asked) == 4
    assert max(asked) > 3  # final observations were valued, too, and none of them is a start
    rows, _ = gather(collector, [10])
    assert [len(mine) for mine in rows] != [0, 0, 0]


@every_mode
def test_every_episode_starts_anew_after_a_reset_and_after_a_collection_that_failed(mode: AutoresetMode) -> None:
    envs = tagged.make_tagged(2, mode, tagged.cycle([(3, "truncated")], [(5, "terminated")]))
    buffer = make_buffer(envs, 40, is_start=START)
    calls = itertools.count()

    def failing(obs: Any, is_start: Tensor) -> dict[str, Any]:
        answer = knowing(obs, is_start)
        if next(calls) == 6:
            raise RuntimeError("out of order")
        return answer

    collector = Collector(envs, failing, buffer, value_fn=lambda *args, **inputs: knowing(*args, **inputs)["value"])
    collector.collect(4)
    collector.reset()
    collector.collect(1)
    assert buffer["is_start"][-1].tolist() == [True, True]
    with pytest.raises(RuntimeError, match="out of order"):
        collector.collect(5)
    collector.collect(12)
    assert buffer["is_start"][0].tolist() == [True, True]
    assert int(buffer["is_start"].sum()) > 4


@every_mode
def test_a_replay_holds_the_starts_and_what_warms_up_and_plays_at_random_is_told_them_as_well(
    mode: AutoresetMode,
) -> None:
    def make() -> Any:
        return tagged.make_tagged(2, mode, tagged.drawn(7, longest=3))

    replay = relive.ReplayBuffer(Schema.from_env(make(), is_start=START), 400, 2, seed=0)
    collector = Collector(make, knowing, replay, seed=0)
    collector.collect(20)
    collector.warm(replay, 10, policy=knowing, seed=1)
    batch = replay.data()
    assert batch["is_start"].dtype is torch.bool
    assert batch["is_start"].tolist() == (tagged.decode(batch["obs"]).step == 0).tolist()
    assert 0 < int(batch["is_start"].sum()) < len(batch)
    poles = relive.ReplayBuffer(Schema.from_env(cartpoles(mode), is_start=START), 4_000, 2, seed=0)
    Collector(partial(cartpoles, mode), lambda obs: None, poles).warm(poles, 100, seed=0)
    rows = poles.slice(0)
    after_a_boundary = torch.cat([torch.tensor([True]), ~rows["complete"][:-1]])
    assert torch.equal(rows["is_start"][rows["complete"]], after_a_boundary[rows["complete"]])
    assert int(after_a_boundary.sum()) > 2


def test_a_field_of_that_name_that_the_env_reports_or_of_another_dtype_is_not_the_collectors() -> None:
    class Reporting(tagged.TaggedEnv):
        def _info(self) -> dict[str, Any]:
            return {"is_start": np.float32(7)}

    envs = SyncVectorEnv([partial(Reporting, 0, tagged.always(3))])
    buffer = make_buffer(envs, 6, is_start=())
    seen: list[float] = []

    def listening(obs: Any, is_start: Tensor) -> dict[str, Any]:
        seen.extend(is_start.tolist())
        return policy(obs)

    Collector(envs, listening, buffer, from_info=("is_start",)).collect()
    assert set(seen) <= {0.0, 7.0}
    assert 7.0 in seen
    for wrong in (Field((), torch.float32), Field((1,), torch.bool), {"a": START}):
        with pytest.raises(errors.DTypeError, match=r"'is_start'.*declare it as Field\(\(\), torch.bool\)"):
            Collector(envs, policy, make_buffer(envs, 6, is_start=wrong))


# Hidden states


class Recurrent(nn.Module):
    """An actor and critic over an LSTM, a GRU or a cell; its actions are those that tagged envs want."""

    def __init__(self, kind: str, layers: int = 2, size: int = 5) -> None:
        super().__init__()
        self.kind = kind
        weights = torch.Generator().manual_seed(0)
        cell = kind == "cell"
        self.core = nn.GRUCell(4, size) if cell else getattr(nn, kind)(4, size, layers)
        self.head = nn.Linear(size, 1)
        for weight in self.parameters():
            weight.data = torch.randn(weight.shape, generator=weights) * 0.4
        state = Field((size,) if cell else (layers, size))
        self.spec = {"h": state, "c": state} if kind == "LSTM" else state
        self.calls: list[Any] = []

    def unroll(self, obs: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        """Values ``[T, N]`` and the state after the last step."""
        x = obs / 8
        if self.kind == "cell":
            states = [hidden := self.core(row, hidden) for row in x]
            return self.head(torch.stack(states)).squeeze(-1), hidden
        out, hidden = self.core(x, (hidden["h"], hidden["c"]) if self.kind == "LSTM" else hidden)
        hidden = dict(zip("hc", hidden, strict=True)) if self.kind == "LSTM" else hidden
        return self.head(out).squeeze(-1), hidden

    def forward(self, obs: Tensor, hidden: Any) -> dict[str, Any]:
        value, after = self.unroll(obs.unsqueeze(0), hidden)
        return {"action": tagged.tagged_policy(obs), "value": value[0], "hidden": after}


def leaves_of(hidden: Any) -> list[Tensor]:
    if isinstance(hidden, Tensor):
        return [hidden]
    return [hidden[key] for key in sorted(hidden.keys())]


@every_mode
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "cell"])
def test_unrolling_from_a_stored_state_gives_the_stored_outputs(kind: str, mode: AutoresetMode) -> None:
    net = Recurrent(kind)
    schedule = tagged.cycle([(5, "truncated"), (1, "terminated")], [(3, "terminated"), (7, "truncated")], [(4, "both")])
    envs = tagged.make_tagged(3, mode, schedule)
    buffer = make_buffer(envs, 11, hidden=net.spec)
    collector = Collector(envs, net, buffer, seed=0)
    unrolled = 0
    for _ in range(3):
        collector.collect()
        for run in (run for runs in oracle.split(*ends(buffer), buffer["mask"]) for run in runs):
            n, steps = slice(run.env, run.env + 1), slice(run.t0, run.t1)
            tag = tagged.decode(buffer["obs"][run.t0, run.env])
            start = [x[run.t0, n] for x in leaves_of(buffer["hidden"])]
            assert tag.step > 0 or all((x == 0).all() for x in start)
            if kind == "LSTM":
                state: Any = {name: x.transpose(0, 1) for name, x in zip("ch", start, strict=True)}
            else:
                state = start[0] if kind == "cell" else start[0].transpose(0, 1)
            with torch.no_grad():
                value, after = net.unroll(buffer["obs"][steps, n], state)
                torch.testing.assert_close(value[:, 0], buffer["value"][steps, run.env], rtol=1e-5, atol=1e-6)
                if run.end == "truncated":
                    final = np.add(np.asarray(tagged.decode(buffer["obs"][run.t1 - 1, n])).T, [0, 0, 1, 0])
                    value, _ = net.unroll(torch.as_tensor(final, dtype=torch.float32).unsqueeze(0), after)
                    stored_final = buffer["final_value"][run.t1 - 1, run.env]
                    torch.testing.assert_close(value[0, 0], stored_final, rtol=1e-5, atol=1e-6)
                elif run.end == "unfinished":
                    value, _ = net.unroll(buffer.last["obs"][n].unsqueeze(0), after)
                    torch.testing.assert_close(value[0, 0], buffer.last["value"][run.env], rtol=1e-5, atol=1e-6)
            unrolled += run.t1 - run.t0
    assert unrolled == collector.total_steps


def ends(buffer: RolloutBuffer) -> tuple[Tensor, Tensor]:
    return buffer["terminated"], buffer["truncated"]


def counting(obs: Any, hidden: Any) -> dict[str, Any]:
    """Its hidden state counts the steps of the episode."""
    return policy(obs) | {"hidden": hidden + 1}


@every_mode
def test_the_stored_state_is_the_one_before_the_step_and_zero_where_an_episode_starts(mode: AutoresetMode) -> None:
    envs = tagged.make_tagged(4, mode, tagged.drawn(1, longest=5))
    buffer = make_buffer(envs, 9, hidden=(2, 3))
    collector = Collector(envs, counting, buffer, seed=0)
    for _ in range(4):
        collector.collect()
        real = buffer["mask"]
        step = torch.as_tensor(tagged.decode(buffer["obs"]).step)
        assert torch.equal(buffer["hidden"][real], step[real].float()[:, None, None].expand(-1, 2, 3))


@every_mode
def test_a_policy_that_keeps_its_state_in_one_place_does_not_change_what_is_stored(mode: AutoresetMode) -> None:
    """Captured graphs give out the same memory at every call."""
    envs = tagged.make_tagged(2, mode, tagged.cycle([(4, "terminated")], [(3, "truncated")]))
    buffer = make_buffer(envs, 12, hidden=(3,))
    place = torch.zeros(2, 3)

    def in_place(obs: Any, hidden: Tensor) -> dict[str, Any]:
        if len(hidden) != 2:
            return counting(obs, hidden)
        place.copy_(hidden + 1)
        return policy(obs) | {"hidden": place}

    Collector(envs, in_place, buffer, seed=0).collect()
    real = buffer["mask"]
    step = torch.as_tensor(tagged.decode(buffer["obs"]).step)
    assert torch.equal(buffer["hidden"][real], step[real].float()[:, None].expand(-1, 3))


@pytest.mark.parametrize(
    ("answer", "error", "match"),
    [
        (lambda z: {"h": z, "c": z[:, :1]}, errors.ShapeError, r"'hidden\.c'.*expected \(2, 3, 4\).*got \(2, 1, 4\)"),
        (lambda z: {"h": z.transpose(0, 1), "c": z}, errors.ShapeError, r"'hidden\.h'.*expected \(2, 3, 4\)"),
        (lambda z: {"h": z}, errors.FieldError, r"hidden\.c"),
        (lambda z: (z, z), errors.FieldError, r"hidden\.h"),
        (lambda z: None, errors.FieldError, "'hidden'"),
    ],
    ids=["a batch of one", "batch first", "a member missing", "a tuple for a dict", "nothing"],
)
def test_a_wrong_hidden_state_is_an_error_that_says_what_was_expected(
    answer: Callable[[Tensor], Any], error: type[Exception], match: str
) -> None:
    envs = tagged.make_tagged(3, AutoresetMode.SAME_STEP, tagged.always(3))
    buffer = make_buffer(envs, 4, hidden={"h": (2, 4), "c": (2, 4)})
    wrong = answer(torch.zeros(2, 3, 4))
    with pytest.raises(error, match=match):
        Collector(envs, lambda obs, hidden: policy(obs) | {"hidden": wrong}, buffer).collect()
    assert buffer.steps == 0


# Statistics


@every_mode
def test_returns_and_lengths_are_those_of_whole_episodes_in_the_order_they_ended(mode: AutoresetMode) -> None:
    envs = tagged.make_tagged(3, mode, tagged.drawn(8, longest=6))
    buffer = make_buffer(envs, 7)
    collector = Collector(envs, policy, buffer, seed=0)
    running, real = np.zeros((3, 2)), 0
    all_returns: list[float] = []
    for _ in range(6):
        stats = collector.collect()
        expected: list[tuple[float, int]] = []
        for t, n in itertools.product(range(7), range(3)):
            if buffer["mask"][t, n]:
                real += 1
                running[n] += (float(buffer["reward"][t, n]), 1)
                if buffer["terminated"][t, n] or buffer["truncated"][t, n]:
                    expected.append((running[n, 0], int(running[n, 1])))
                    running[n] = 0
        assert list(zip(stats.episode_returns, stats.episode_lengths, strict=True)) == expected
        assert stats.num_episodes == len(expected)
        assert stats.num_steps == int(buffer["mask"].sum())
        assert stats.seconds > 0
        all_returns += stats.episode_returns
    assert collector.total_steps == real
    assert collector.total_episodes == len(all_returns) > 10
    assert list(collector.returns) == all_returns
    assert real < 126 if mode is AutoresetMode.NEXT_STEP else real == 126


def test_the_collector_remembers_the_last_hundred_episodes() -> None:
    envs = tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.cycle([(1, "terminated")], [(2, "truncated")]))
    collector = Collector(envs, policy, make_buffer(envs, 90))
    stats = collector.collect()
    assert stats.num_episodes == 135
    assert list(collector.returns) == stats.episode_returns[-100:]
    assert list(collector.lengths) == stats.episode_lengths[-100:]
    again = collector.collect()
    assert list(collector.returns) == again.episode_returns[-100:]
    assert collector.total_episodes == 270


def test_rewards_of_float64_are_summed_without_loss() -> None:
    class Tiny(Echo):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            obs, _, terminated, _, info = super().step(action)
            return obs, 1e8 + 0.25, terminated, self.count == 8, info

    envs = SyncVectorEnv([partial(Tiny, gym.spaces.Discrete(2))], autoreset_mode=AutoresetMode.SAME_STEP)
    buffer = RolloutBuffer(Schema.from_env(envs), 16, 1)
    stats = Collector(envs, lambda obs: discrete(obs, 2), buffer).collect()
    assert stats.episode_returns == [8e8 + 2] * 2


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
    envs = tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.always(3), action_mask=True, check_actions=False)
    buffer = make_buffer(envs, 6, action_mask=MASK)
    collector = Collector(envs, policy, buffer, seed=1)
    numpy_generator: Any = np.random.mtrand._rand
    before = torch.get_rng_state(), repr(numpy_generator.get_state(legacy=False))
    collector.collect()
    collector.warm(make_buffer(envs, 6, action_mask=MASK), 6, seed=1)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == repr(numpy_generator.get_state(legacy=False))


# Warming up


def cartpoles(mode: AutoresetMode, num_envs: int = 2) -> SyncVectorEnv:
    return SyncVectorEnv([partial(gym.make, "CartPole-v1", max_episode_steps=15)] * num_envs, autoreset_mode=mode)


@every_mode
@pytest.mark.parametrize("given", ["nothing", "policy", "envs"])
def test_warming_up_leaves_the_training_untouched(given: str, mode: AutoresetMode) -> None:
    collectors = []
    for warmed in (True, False):
        envs = cartpoles(mode)
        collector = Collector(envs, CARTPOLE, make_buffer(envs, 20), seed=3)
        for _ in range(2):
            collector.collect(13)
            if warmed:
                counters = collector.total_steps, collector.total_episodes, list(collector.returns)
                extra = make_buffer(envs, 25)
                options: dict[str, Any] = {"policy": {"policy": CARTPOLE}, "envs": {"envs": cartpoles(mode)}}.get(
                    given, {}
                )
                stats = collector.warm(extra, 25, seed=8, **options)
                assert extra.is_full
                assert stats.num_steps == len(extra)
                assert stats.num_episodes > 0
                assert counters == (collector.total_steps, collector.total_episodes, list(collector.returns))
                assert collector.buffer.steps == 13
            collector.buffer.clear()
        stats = collector.collect()
        collectors.append(collector)
    a, b = collectors
    for name in ("obs", "action", "reward", "terminated", "truncated", "value", "mask"):
        assert torch.equal(a.buffer[name], b.buffer[name]), name
    cut = a.buffer["truncated"] & ~a.buffer["terminated"]
    assert torch.equal(a.buffer["final_value"][cut], b.buffer["final_value"][cut])
    assert list(a.returns) == list(b.returns)
    assert a.total_steps == b.total_steps


@every_mode
def test_a_warm_buffer_holds_real_steps_in_the_training_envs_own_mode(mode: AutoresetMode) -> None:
    schedule = tagged.cycle([(3, "truncated")], [(2, "terminated")])
    envs = tagged.make_tagged(2, mode, schedule)
    collector = Collector(envs, policy, make_buffer(envs, 4), seed=0)
    extra = make_buffer(envs, 12)
    collector.warm(extra, 9, policy=policy, seed=6)
    assert extra.steps == 9
    rows = stored(extra)
    assert rows == truth(schedule, [len(mine) for mine in rows], seed=6)
    assert (~extra["mask"]).any() == (mode is AutoresetMode.NEXT_STEP)


@every_mode
def test_warming_up_again_adds_to_the_buffer_and_joins_no_two_episodes(mode: AutoresetMode) -> None:
    envs = tagged.make_tagged(2, mode, tagged.cycle([(7, "truncated")], [(5, "terminated")]))
    collector = Collector(envs, policy, make_buffer(envs, 4), seed=0)
    extra = make_buffer(envs, 12)
    collector.warm(extra, 9, policy=policy, seed=6)
    before = extra["obs"].clone()
    collector.warm(extra, 3, policy=policy, seed=7)
    assert extra.is_full
    assert torch.equal(extra["obs"][:9], before)
    check_unbroken(extra)
    extra.finish(GAE(gamma=0.9, lam=0.8))
    check_against_oracle(extra)


@every_mode
def test_random_actions_are_legal_under_the_mask_and_evenly_spread(mode: AutoresetMode) -> None:
    envs = tagged.make_tagged(4, mode, tagged.always(6), action_mask=True, check_actions=False)
    collector = Collector(envs, policy, make_buffer(envs, 5, action_mask=MASK), seed=0)
    extra = make_buffer(envs, 300, action_mask=MASK)
    collector.warm(extra, 300, seed=1)
    legal = extra["action_mask"].gather(2, extra["action"].unsqueeze(2)).squeeze(2)
    assert legal[extra["mask"]].all()
    rank = (extra["action_mask"].cumsum(2).gather(2, extra["action"].unsqueeze(2)).squeeze(2))[extra["mask"]]
    shares = torch.bincount(rank, minlength=4)[1:].float() / len(rank)
    # 1,028 draws or more out of three: five standard deviations are 0.074
    assert (shares - 1 / 3).abs().max() < 0.074
    assert not extra["value"].any()


def test_random_actions_start_where_their_space_does() -> None:
    class Masked(Echo):
        def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
            return super().reset(**kwargs)[0], {"action_mask": np.array([0, 1, 1], np.int8)}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return (*super().step(action)[:4], {"action_mask": np.array([0, 1, 1], np.int8)})

    def acting(obs: Tensor, action_mask: Tensor | None = None) -> dict[str, Tensor]:
        return {"action": discrete(obs, 2) + 11, "value": obs[:, 0]}

    make = partial(Masked, gym.spaces.Discrete(3, start=10))
    collector = Collector(make, acting, make_buffer(make(), 3))
    for extras in ({}, {"action_mask": Field((3,), torch.int8)}):
        extra = make_buffer(make(), 60, **extras)
        collector.warm(extra, 60, seed=0)
        assert set(extra["action"].flatten().tolist()) == ({11, 12} if extras else {10, 11, 12})


def test_warming_up_is_a_function_of_its_seed() -> None:
    envs = cartpoles(AutoresetMode.SAME_STEP)
    collector = Collector(envs, CARTPOLE, make_buffer(envs, 5), seed=3)

    def warm(seed: int | None) -> tuple[Tensor, Tensor]:
        extra = make_buffer(envs, 40)
        collector.warm(extra, 40, seed=seed)
        return extra["obs"], extra["action"]

    one, same, other = warm(1), warm(1), warm(2)
    assert torch.equal(one[0], same[0])
    assert torch.equal(one[1], same[1])
    assert not torch.equal(one[0][0], other[0][0])
    assert not torch.equal(one[1], other[1])
    assert not torch.equal(warm(None)[1], warm(None)[1])
    assert 0.3 < one[1].float().mean() < 0.7


def test_a_given_policy_warms_up_and_its_own_values_are_stored() -> None:
    envs = tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.always(3, "truncated"))
    collector = Collector(envs, policy, make_buffer(envs, 5), seed=0)
    extra = make_buffer(envs, 8)
    collector.warm(extra, 8, policy=lambda obs: policy(obs) | {"value": 5 + tagged.tagged_value(obs)}, seed=0)
    assert torch.equal(extra["value"], 5 + tagged.tagged_value(extra["obs"]))
    tag = tagged.decode(extra["obs"])
    final = torch.as_tensor(5 + tagged.value_of(tag._replace(step=tag.step + 1)), dtype=torch.float32)
    assert torch.equal(extra["final_value"][extra["truncated"]], final[extra["truncated"]])


@pytest.mark.parametrize("kind", ["env", "vector"])
def test_warming_up_keeps_wrappers_and_arguments_of_the_envs(kind: str) -> None:
    def make() -> gym.Env[Any, Any]:
        env = gym.make("CartPole-v1", max_episode_steps=6, sutton_barto_reward=True)
        return gym.wrappers.ClipReward(gym.wrappers.TimeLimit(env, 4), 0.25, 0.5)

    envs: Any = make() if kind == "env" else SyncVectorEnv([make, make], autoreset_mode=AutoresetMode.SAME_STEP)
    collector = Collector(envs, lambda obs: {"action": discrete(obs, 1), "value": obs[:, 0]}, make_buffer(envs, 8))
    extra = make_buffer(envs, 40)
    stats = collector.warm(extra, 40, seed=0)
    assert stats.episode_lengths == [4] * (10 if kind == "env" else 20)  # without the outer limit, 6
    assert (extra["reward"] == 0.25).all()  # without the argument 0.5, without the wrapper 0, without both 1


class Bare(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper that does not say how it was made."""


def shared_envs(wrap: Callable[[Any], Any]) -> tuple[list[tagged.TaggedEnv], SyncVectorEnv]:
    inner = [tagged.TaggedEnv(n, tagged.always(3), check_actions=False) for n in range(2)]
    return inner, SyncVectorEnv([lambda env=env: wrap(env) for env in inner], autoreset_mode=AutoresetMode.SAME_STEP)


@pytest.mark.parametrize(
    "envs",
    [
        tagged.TaggedEnv(0, tagged.always(3)),
        Bare(gym.make("CartPole-v1")),
        Edited(tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.always(3)), hide),
        Torched(tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.always(3))),
    ],
    ids=["no spec", "a wrapper without arguments", "a vector wrapper", "a torch-native env"],
)
def test_envs_that_cannot_be_made_again_are_refused_with_the_way_out(envs: Any) -> None:
    collector = Collector(envs, policy, make_buffer(envs, 4))
    with pytest.raises(errors.EnvError, match=r"warm\(\.\.\., envs="):
        collector.warm(make_buffer(envs, 4), 4)


@pytest.mark.parametrize("wrap", [lambda env: env, Bare], ids=["as they are", "under a new wrapper"])
def test_envs_whose_makers_hand_out_the_training_envs_again_are_refused(wrap: Callable[[Any], Any]) -> None:
    inner, envs = shared_envs(wrap)
    collector = Collector(envs, policy, make_buffer(envs, 4), seed=0)
    collector.collect()
    before = [env.tag for env in inner]
    with pytest.raises(errors.EnvError, match=r"warm\(\.\.\., envs="):
        collector.warm(make_buffer(envs, 4), 4)
    assert [env.tag for env in inner] == before


class Closing(tagged.TaggedEnv):
    """Keeps a list of the envs that are open."""

    open: list[Closing]

    def __init__(self, opened: list[Closing], env: int) -> None:
        super().__init__(env, tagged.always(3), check_actions=False)
        opened.append(self)
        self.open = opened

    def close(self) -> None:
        self.open.remove(self)


def closing(opened: list[Closing], num_envs: int = 2) -> SyncVectorEnv:
    makers = [partial(Closing, opened, n) for n in range(num_envs)]
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


def fail(obs: Any) -> Any:
    raise RuntimeError("the policy failed")


def test_warming_up_closes_the_envs_it_made_and_not_those_it_was_given() -> None:
    opened: list[Closing] = []
    make = partial(closing, opened)
    collector = Collector(make, policy, make_buffer(make(), 4))
    training = list(opened)
    extra = make_buffer(collector.envs, 4)
    collector.warm(extra, 4)
    assert opened == training
    collector.warm(extra, 4, envs=make)
    assert opened == training
    own = make()
    collector.warm(extra, 4, envs=own)
    assert len(opened) == len(training) + 2
    with pytest.raises(RuntimeError, match="the policy failed"):
        collector.warm(extra, 4, policy=fail)
    assert len(opened) == len(training) + 2


def test_warming_up_closes_the_envs_it_made_though_they_are_of_no_use() -> None:
    opened: list[Closing] = []
    envs = closing(opened)
    collector = Collector(envs, policy, make_buffer(envs, 4))
    with pytest.raises(errors.EnvError, match="made for 2 envs, the vector env has 3"):
        collector.warm(make_buffer(envs, 4), 4, envs=partial(closing, opened, 3))
    assert len(opened) == 2


# Pieces, wrapping, going on


@every_mode
@pytest.mark.parametrize("pieces", [(1,) * 12, (5, 7), (2, 1, 6, 3)])
def test_collecting_in_pieces_is_collecting_at_once(pieces: tuple[int, ...], mode: AutoresetMode) -> None:
    schedule = tagged.drawn(5, longest=4)
    whole, pieced = (
        Collector(envs, counting, make_buffer(envs, 12, hidden=(3,)), seed=0)
        for envs in (tagged.make_tagged(3, mode, schedule) for _ in range(2))
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
    schedule = tagged.drawn(6, longest=4)
    ring_envs, all_envs = (tagged.make_tagged(2, mode, schedule) for _ in range(2))
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
    schedule = tagged.always(7, "truncated")
    envs = tagged.make_tagged(1, AutoresetMode.SAME_STEP, schedule)
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
    envs = tagged.make_tagged(2, mode, tagged.cycle([(4, "truncated")], [(3, "terminated")]), check_actions=False)
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
    envs = tagged.make_tagged(2, mode, tagged.always(9, "truncated"))
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


def test_a_field_that_the_policy_leaves_out_is_named() -> None:
    envs = tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.always(3))
    buffer = make_buffer(envs, 4, log_prob=())
    with pytest.raises(errors.FieldError, match="lacks 'log_prob'"):
        Collector(envs, policy, buffer).collect()
    assert buffer.steps == 0
    with pytest.raises(errors.FieldError, match="no 'action'; it has 'value', 'log_prob'"):
        Collector(envs, lambda obs: {"value": obs[:, 0], "log_prob": obs[:, 0]}, buffer).collect()
    with pytest.raises(errors.FieldError, match="lacks 'value', 'log_prob'"):
        Collector(envs, tagged.tagged_policy, buffer).collect()


def test_fields_that_the_schema_does_not_have_are_left_out() -> None:
    envs = tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.always(3))
    buffer = make_buffer(envs, 4)
    Collector(envs, lambda obs: policy(obs) | {"entropy": obs.sum(), "reward": obs[:, 0]}, buffer, seed=0).collect()
    assert "entropy" not in buffer
    check_unbroken(buffer)


def test_a_tensordict_is_as_good_an_answer_as_a_dict() -> None:
    envs = tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.always(3, "truncated"))
    rows, _ = gather(
        Collector(envs, lambda obs: TensorDict(policy(obs), [len(obs)]), make_buffer(envs, 8), seed=0), [8]
    )
    assert rows == truth(tagged.always(3, "truncated"), [8, 8], seed=0)


def test_answers_that_carry_gradients_are_stored_without_them() -> None:
    envs = tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.always(3, "truncated"))
    buffer = make_buffer(envs, 8, hidden=(3,))
    weight = nn.Parameter(torch.ones(3))

    def with_gradient(obs: Any, hidden: Tensor) -> dict[str, Any]:
        with torch.enable_grad():
            return policy(obs) | {"hidden": hidden * weight + 1, "value": tagged.tagged_value(obs) * weight[0]}

    Collector(envs, with_gradient, buffer, seed=0).collect()
    names = buffer.keys()
    assert not any(buffer[name].requires_grad for name in names)
    step = torch.as_tensor(tagged.decode(buffer["obs"]).step).float()
    assert torch.equal(buffer["hidden"], step[..., None].expand(-1, -1, 3))


def test_a_buffer_for_another_number_of_envs_is_refused() -> None:
    envs = tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.always(3))
    buffer = RolloutBuffer(Schema.from_env(envs, value=()), 4, 3)
    with pytest.raises(errors.EnvError, match="made for 3 envs, the vector env has 2"):
        Collector(envs, policy, buffer)


@pytest.mark.parametrize("mode", [None, "SometimesStep"])
def test_a_vector_env_that_does_not_tell_its_autoreset_mode_is_refused_and_may_be_told(mode: str | None) -> None:
    schedule = tagged.always(3, "truncated")
    envs = tagged.make_tagged(2, AutoresetMode.DISABLED, schedule)
    envs.metadata = {} if mode is None else {"autoreset_mode": mode}
    buffer = make_buffer(envs, 8)
    with pytest.raises(errors.EnvError, match=r"autoreset_mode'\] is " + repr(mode)):
        Collector(envs, policy, buffer)
    for told in (AutoresetMode.DISABLED, "Disabled"):
        rows, _ = gather(Collector(envs, policy, buffer, seed=0, autoreset_mode=told), [8])
        assert rows == truth(schedule, [8, 8], seed=0)


def test_envs_that_are_made_again_are_told_the_mode_again() -> None:
    schedule = tagged.cycle([(3, "truncated")], [(2, "terminated")])

    def make() -> SyncVectorEnv:
        envs = tagged.make_tagged(2, AutoresetMode.NEXT_STEP, schedule)
        envs.metadata = {}
        return envs

    collector = Collector(make, policy, make_buffer(make(), 4), autoreset_mode=AutoresetMode.NEXT_STEP)
    extra = make_buffer(make(), 9)
    collector.warm(extra, 9, policy=policy, seed=1)
    rows = stored(extra)
    assert rows == truth(schedule, [len(mine) for mine in rows], seed=1)


def test_more_steps_than_there_is_room_for_are_refused_before_any_is_made() -> None:
    envs = tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.always(3))
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
    envs = tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.always(3))
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

    envs = Noting(tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.always(3)))
    collector = Collector(envs, failing, make_buffer(envs, 8), seed=7)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of order"):
            collector.collect()
    collector.collect()
    assert seeds == [7, None, None]


def test_an_unknown_wish_for_final_observations_is_refused() -> None:
    envs = tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.always(3))
    with pytest.raises(errors.ParameterError, match=r"final_obs='ignore'\): expected 'require' or 'mask'"):
        Collector(envs, policy, make_buffer(envs, 4), final_obs=cast("Any", "ignore"))


# Progress


@pytest.fixture
def shown(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a collection shows; nothing of it may be on stdout."""

    def collect(progress: bool | None) -> str:
        envs = tagged.make_tagged(2, AutoresetMode.SAME_STEP, tagged.always(3))
        Collector(envs, policy, make_buffer(envs, 37)).collect(progress=progress)
        out, err = capfd.readouterr()
        assert out == ""
        return err

    return collect


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_stderr_when_asked_for_and_not_when_not(
    shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1" if terminal else "")
    text = shown(progress=True)
    assert "collecting" in text
    assert "37" in text
    assert shown(progress=False) == ""
    assert shown(progress=None) == ""  # it took no two seconds
