"""Simulators that step all envs at once in tensors: their ends are stored right, and nothing waits for their device."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

import relive.replay.buffer
from relive import GAE, Collector, Field, Prioritized, ReplayBuffer, RolloutBuffer, Schema
from relive.collect import CollectStats
from relive.collect.envs import final_observations
from relive.collect.episodes import FOLDED, EpisodeSums
from relive.errors import EnvError, FieldError, ShapeError
from relive.memory.device import DeviceRows
from support import internals
from support.cases import covering
from support.effort import often
from support.other_device import ELSEWHERE, PLACES, far_device, no_waiting, place, places
from support.point_masses import FINAL, PointMasses
from support.simulators import Again, Edited, InArrays, Step, by_env, ended, plain, played, push, rows, worth

N, LIMIT = 5, 8
SHOWN = [final for final in FINAL if final]
FORMS = [(False, False), (True, False), (False, True), (True, True)]
"""Whether a simulator returns what rsl_rl's do; whether the replay stores a next observation with each step."""

every_shown = pytest.mark.parametrize("final", SHOWN)


@pytest.fixture(params=places())
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    with place(request.param) as chosen:
        yield chosen


def simulator(device: Any = "cpu", **options: Any) -> PointMasses:
    return PointMasses(N, device, **{"time_limit": LIMIT, **options})


def replay_of(envs: Any, device: Any = "cpu", *, on_device: bool = False, **options: Any) -> ReplayBuffer:
    """A replay for a simulator; ``on_device`` keeps its rows as on a device even if that is the CPU."""
    patch = pytest.MonkeyPatch()
    if on_device and torch.device(device).type == "cpu":
        patch.setattr(relive.replay.buffer, "ReplayRows", lambda leaves, n: DeviceRows(leaves, n, torch.device("cpu")))
    made = ReplayBuffer(Schema.from_env(envs), N * 200, N, device=device, seed=0, **options)
    patch.undo()
    return made


def steps_of(count: int, **options: Any) -> list[list[Step]]:
    """By env, the steps that a simulator plays."""
    return [[step for episode in mine for step in episode] for mine in played(count, N, time_limit=LIMIT, **options)]


# Replays.


@pytest.mark.parametrize(
    ("final", "device", "form"),
    covering(SHOWN, PLACES, FORMS, full=2, quick=1),
    indirect=["device"],
)
def test_a_replay_has_the_true_final_observations_under_every_name(
    device: torch.device, final: str, form: tuple[bool, bool]
) -> None:
    as_rsl_rl, own = form
    envs = simulator(device, final=final, as_rsl_rl=as_rsl_rl)
    replay = replay_of(envs, device, own_next_obs=own)
    Collector(envs, push, replay).collect(40)
    expected = steps_of(40)
    assert any(step.terminated for step in sum(expected, []))
    if not own:  # the next observation of the newest step is not there yet, unless it ended its episode
        expected = [mine if mine[-1].terminated or mine[-1].truncated else mine[:-1] for mine in expected]
    if as_rsl_rl:  # which has one flag for both ends: a step is one or the other
        expected = [[step._replace(truncated=step.truncated and not step.terminated) for step in m] for m in expected]
    assert sorted(rows(replay.data())) == sorted(sum(expected, []))


@every_shown
def test_a_collector_of_gymnasium_finds_them_under_every_name_too(final: str) -> None:
    replay = replay_of(simulator())
    Collector(InArrays(simulator(final=final)), lambda obs: push(obs).numpy(), replay).collect(30)
    ours = replay_of(simulator())
    Collector(simulator(final=final), push, ours).collect(30)
    assert rows(ours.data()) == rows(replay.data())
    assert torch.equal(ours.data()["index"], replay.data()["index"])


def test_final_observations_may_be_arrays_or_one_object_an_env() -> None:
    def in_one(answer: Any, _: int) -> Any:
        *rest, info = answer
        return (*rest, {"final_obs": info["AutoResetWrapper_final_obs"].numpy()})

    def in_objects(answer: Any, _: int) -> Any:
        *rest, info = answer
        return (*rest, {"final_obs": by_env(info["AutoResetWrapper_final_obs"], rest[2] | rest[3])})

    for edit in (in_one, in_objects):
        replay = replay_of(simulator(), own_next_obs=True)
        Collector(Edited(simulator(), edit), push, replay).collect(30)
        assert sorted(rows(replay.data())) == sorted(sum(steps_of(30), []))


def test_the_one_function_finds_each_form_and_no_other() -> None:
    x = torch.arange(8.0).reshape(4, 2)
    assert final_observations({}, 4) is None
    assert final_observations({"final_obs": None, "terminal": {"pose": x}}, 4) is None
    for name in ("final_obs", "final_observation", "AutoResetWrapper_final_obs"):
        found = final_observations({name: x}, 4)
        assert found is not None
        assert found.given is x
        assert found.where(4).all()
        found = final_observations({name: x, f"_{name}": torch.tensor([True, False, False, True])}, 4)
        assert found is not None
        assert found.where(4).tolist() == [True, False, False, True]
    found = final_observations({"terminal": {"env_ids": torch.tensor([2, 0]), "observations": x[:2]}}, 4)
    assert found is not None
    assert found.where(4).tolist() == [True, False, True, False]


def test_a_simulator_elsewhere_fills_a_replay_in_ram() -> None:
    with far_device():
        envs = simulator(ELSEWHERE)
        replay = replay_of(envs)
        collector = Collector(envs, push, replay)
        stats = collector.collect(30)
        assert stats.num_episodes == collector.total_episodes == len(ended(played(30, N, time_limit=LIMIT)))
    expected = [mine if mine[-1].terminated or mine[-1].truncated else mine[:-1] for mine in steps_of(30)]
    assert sorted(rows(replay.data())) == sorted(sum(expected, []))


def test_a_chunk_has_them_too() -> None:
    collector = Collector(simulator(), push)
    chunk = collector.steps(20)
    expected = steps_of(20)
    for t in range(20):
        assert rows({name: torch.as_tensor(chunk[name][t]) for name in Step._fields}) == [mine[t] for mine in expected]
    assert chunk["mask"].all()


# Rollouts.


@pytest.mark.parametrize("as_rsl_rl", [False, True], ids=["plain", "rsl_rl"])
@every_shown
def test_a_rollout_has_the_values_of_true_final_observations_and_nan_elsewhere(final: str, as_rsl_rl: bool) -> None:
    envs = simulator(final=final, as_rsl_rl=as_rsl_rl)
    rollout = RolloutBuffer(Schema.from_env(envs, value=()), 30, N)
    Collector(envs, lambda obs: {"action": push(obs), "value": worth(obs)}, rollout).collect()
    expected, cuts = steps_of(30), 0
    for n, mine in enumerate(expected):
        for t, step in enumerate(mine):
            assert plain(rollout["obs"])[t, n].tolist() == step.obs
            assert float(rollout["reward"][t, n]) == step.reward
            assert bool(rollout["terminated"][t, n]) == step.terminated
            value = float(rollout["final_value"][t, n])
            if step.truncated and not step.terminated:
                cuts += 1
                assert value == pytest.approx(float(worth(torch.tensor([step.next_obs]))), rel=1e-6)
            else:
                assert np.isnan(value)
    assert cuts > N
    rollout.finish(GAE(gamma=0.9, lam=0.8))
    other = RolloutBuffer(Schema.from_env(simulator(), value=()), 30, N)
    arrays = InArrays(simulator())
    Collector(arrays, lambda obs: {"action": push(obs), "value": worth(obs)}, other).collect()
    torch.testing.assert_close(rollout["advantage"], other.finish(GAE(gamma=0.9, lam=0.8))["advantage"])


def test_a_recurrent_policy_is_told_the_same_as_by_a_vector_env() -> None:
    extras: dict[str, Any] = {
        "value": (), "hidden": (3,), "is_start": Field((), torch.bool), "last_action": (2,), "last_reward": (),
    }  # fmt: skip

    def policy(obs: Tensor, hidden: Tensor, is_start: Tensor, last_action: Tensor, last_reward: Tensor) -> Any:
        after = 0.5 * hidden + obs[:, :3] + last_action.sum(1, keepdim=True) + last_reward[:, None]
        value = after.sum(1) + 100.0 * is_start
        return {"action": push(obs), "value": value, "hidden": after}

    rollouts = []
    for envs in (simulator(final="terminal"), InArrays(simulator(final="terminal"))):
        rollout = RolloutBuffer(Schema.from_env(simulator(), **extras), 30, N)
        collector = Collector(envs, policy, rollout, initial_hidden=lambda: torch.ones(3))
        collector.collect(20)
        collector.collect(10)
        rollouts.append(rollout)
    for name in (*extras, "obs", "final_value", "mask"):
        torch.testing.assert_close(rollouts[0][name], rollouts[1][name], equal_nan=True)
    torch.testing.assert_close(rollouts[0].last["value"], rollouts[1].last["value"])


def test_without_values_a_rollout_asks_nothing_of_final_observations() -> None:
    envs = simulator(final=None)
    rollout = RolloutBuffer(Schema.from_env(envs), 30, N)
    Collector(envs, push, rollout).collect()
    assert rollout["truncated"].any()


# Hidden final observations.


def test_a_simulator_that_hides_them_is_refused_at_the_first_truncation_and_told_the_switch(
    device: torch.device,
) -> None:
    envs = simulator(device, final=None)
    replay = replay_of(envs, device, own_next_obs=True)
    with pytest.raises(EnvError, match=r"env \d was truncated .* compute_final_obs .* capture_terminal_observations"):
        Collector(envs, push, replay).collect(30)
    kept = rows(replay.data())
    first = next(t for t in range(30) if any(mine[t].truncated and not mine[t].terminated for mine in steps_of(30)))
    assert len(kept) == N * first
    assert not any(step.truncated and not step.terminated for step in kept)


def test_a_rollout_refuses_it_as_well() -> None:
    envs = simulator(final=None)
    rollout = RolloutBuffer(Schema.from_env(envs, value=()), 30, N)
    with pytest.raises(EnvError, match="compute_final_obs"):
        Collector(envs, lambda obs: {"action": push(obs), "value": worth(obs)}, rollout).collect()


def test_a_terminal_needs_none() -> None:
    def silent(answer: Any, _: int) -> Any:
        obs, reward, terminated, truncated, _info = answer
        return obs, reward, terminated | truncated, truncated & ~truncated, {}

    replay = replay_of(simulator(), own_next_obs=True)
    Collector(Edited(simulator(), silent), push, replay).collect(30)
    got = sorted((step.obs, step.terminated, step.reward) for step in rows(replay.data()))
    assert got == sorted((s.obs, s.terminated or s.truncated, s.reward) for s in sum(steps_of(30), []))
    assert any(flag for _, flag, _ in got)


@pytest.mark.parametrize("buffer", ["replay", "rollout"])
def test_with_final_obs_mask_truncated_steps_are_left_out_and_nothing_else(device: torch.device, buffer: str) -> None:
    envs, expected = simulator(device, final=None), sum(steps_of(30), [])
    kept = [step for step in expected if step.terminated or not step.truncated]
    if buffer == "replay":
        replay = replay_of(envs, device, own_next_obs=True)
        Collector(envs, push, replay, final_obs="mask").collect(30)
        found = [(step.obs, step.reward) for step in rows(replay.data())]
        assert sorted(found) == sorted((step.obs, step.reward) for step in kept)
        return
    rollout = RolloutBuffer(Schema.from_env(envs, value=()), 30, N, device=device)
    collector = Collector(envs, lambda obs: {"action": push(obs), "value": worth(obs)}, rollout, final_obs="mask")
    collector.collect()
    assert torch.equal(rollout["mask"], ~(rollout["truncated"] & ~rollout["terminated"]))
    assert int(rollout["mask"].sum()) == len(kept) < len(expected)
    assert collector.total_steps == len(expected)


def test_one_that_shows_some_and_hides_others_is_refused_when_the_episodes_are_read() -> None:
    def some(answer: Any, count: int) -> Any:
        *rest, info = answer
        return (*rest, info if count < 10 else {})

    envs = Edited(simulator(final="final_obs"), some)
    collector = Collector(envs, push, replay_of(simulator()))
    stats = collector.collect(9)
    assert stats.num_episodes > 0
    stats = collector.collect(10)
    for look in (lambda: stats.num_episodes, lambda: collector.returns, lambda: collector.total_episodes):
        with pytest.raises(EnvError, match="an env was truncated and its final observation is hidden"):
            look()
    assert "Collector: " in str(collector)
    collector.reset()
    assert collector.total_episodes > 0


def test_a_mask_that_says_no_is_believed() -> None:
    def withdraw(answer: Any, _: int) -> Any:
        *rest, info = answer
        return (*rest, info | {name: x & (torch.arange(N) != 1) for name, x in info.items() if name[0] == "_"})

    collector = Collector(
        Edited(simulator(final="final_observation"), withdraw), push, replay_of(simulator(), own_next_obs=True)
    )
    collector.collect(20)
    with pytest.raises(EnvError, match="hidden"):
        _ = collector.returns
    replay = replay_of(simulator(), own_next_obs=True)
    Collector(Edited(simulator(final="final_observation"), withdraw), push, replay, final_obs="mask").collect(20)
    expected = [[s for s in m if n != 1 or s.terminated or not s.truncated] for n, m in enumerate(steps_of(20))]
    assert sorted((s.obs, s.reward) for s in rows(replay.data())) == sorted(
        (s.obs, s.reward) for s in sum(expected, [])
    )


# What the host has to wait for: nothing.


@pytest.mark.parametrize(
    ("final", "device", "form", "sampler"),
    covering(SHOWN, PLACES, FORMS, [None, Prioritized], full=2, quick=1),
    indirect=["device"],
)
def test_no_vector_step_into_a_replay_waits_for_the_device(
    device: torch.device, final: str, form: tuple[bool, bool], sampler: Any
) -> None:
    as_rsl_rl, own = form
    made = simulator(device, final=final, as_rsl_rl=as_rsl_rl)
    replay = replay_of(made, device, on_device=True, own_next_obs=own, sampler=sampler and sampler())
    collector = Collector(Again(made, LIMIT + 24), push, replay)
    collector.collect(LIMIT)  # the first steps send what the host knew, and show the first final observations
    with no_waiting():
        for _ in range(often(6, 12)):
            collector.collect()
            replay.sample(8)
        stats = collector.collect(12)
    assert len(stats.episode_returns) > 0
    assert len(replay) > 0


def with_costs(answer: Any, count: int) -> Any:
    """A step whose info has costs; where an episode ended, that of the reset, and beside it that of the step."""
    obs, reward, terminated, truncated, info = answer
    costs = {"cost": torch.where(terminated | truncated, -99.0, 2 * reward), "final_info": {"cost": 2 * reward}}
    return obs, reward, terminated, truncated, info | (costs if count % 3 else {"cost": 2 * reward})


def test_no_vector_step_into_a_rollout_waits_for_the_device(device: torch.device) -> None:
    made = Edited(simulator(device), with_costs)
    extras: dict[str, Any] = {"value": (), "hidden": (6,), "is_start": Field((), torch.bool), "last_reward": ()}
    schema = Schema.from_env(simulator(device), **extras, cost=())
    rollout = RolloutBuffer(schema, 40, N, device=device)

    def policy(obs: Tensor, hidden: Tensor, is_start: Tensor, last_reward: Tensor) -> Any:
        return {"action": push(obs), "value": obs.sum(1) + last_reward, "hidden": hidden + obs}

    collector = Collector(Again(made, 60), policy, rollout, from_step_info=("cost",))
    collector.collect(LIMIT)
    with no_waiting():
        for _ in range(20):
            collector.collect(1)
    assert rollout["final_value"].isfinite().any()
    assert torch.equal(rollout["cost"], 2 * rollout["reward"])


# Episodes.


@pytest.mark.parametrize("counts", [[30], [1] * 30, [FOLDED + 3, 5, 1], [2 * FOLDED]])
def test_statistics_are_those_of_the_episodes_played(counts: list[int]) -> None:
    collector = Collector(simulator(), push, replay_of(simulator()))
    found: list[tuple[float, int, int]] = []
    for count in counts:
        stats = collector.collect(count)
        assert stats.num_steps == N * count
        again = pickle.loads(pickle.dumps(stats))
        assert isinstance(again, CollectStats)
        assert (again.episode_returns, again.episode_envs) == (stats.episode_returns, stats.episode_envs)
        found += zip(stats.episode_returns, stats.episode_lengths, stats.episode_envs, strict=True)
    expected = ended(played(sum(counts), N, time_limit=LIMIT))
    assert found == expected
    assert list(zip(collector.returns, collector.lengths, strict=True)) == [x[:2] for x in expected][-100:]
    assert collector.total_episodes == len(expected)
    assert collector.total_steps == N * sum(counts)
    assert f"{len(expected):,} ended" in str(collector)


def test_episodes_are_summed_without_waiting(device: torch.device) -> None:
    rng, sums, expected = np.random.default_rng(0), EpisodeSums(3, device, 4), list[tuple[float, int]]()
    now = [(0.0, 0)] * 3
    for k in range(3 * FOLDED):
        reward, done = rng.standard_normal(3).astype(np.float32), rng.random(3) < (0.02 if k < FOLDED else 0.3)
        given = torch.from_numpy(reward).to(device), torch.from_numpy(done).to(device)
        with no_waiting():
            sums.add(*given)
        for n in range(3):
            now[n] = now[n][0] + float(reward[n]), now[n][1] + 1
            if done[n]:
                expected.append(now[n])
                now[n] = 0.0, 0
        if k % 50 == 7:
            returns, lengths, total = sums.read()
            assert list(zip(returns, lengths, strict=True)) == expected[-4:]
            assert total == len(expected)


def test_a_reset_forgets_the_episodes_under_way() -> None:
    collector = Collector(simulator(), push, replay_of(simulator()))
    collector.collect(4)
    before = collector.total_episodes
    collector.reset()
    collector.collect(1)
    fresh = [length for length in collector.lengths if length == 1]
    assert collector.total_episodes >= before
    assert len(collector.lengths) == collector.total_episodes
    assert all(length == 1 for length in list(collector.lengths)[before:]), fresh


# Protocols.


def test_an_extra_without_time_outs_says_that_nothing_was_truncated() -> None:
    def finite(answer: Any, _: int) -> Any:
        obs, reward, dones, extras = answer
        return obs, reward, dones.float(), {name: x for name, x in extras.items() if name != "time_outs"}

    envs = Edited(simulator(final=None, as_rsl_rl=True), finite)
    replay = replay_of(simulator(as_rsl_rl=True))
    Collector(envs, push, replay).collect(30)
    data = replay.data()
    assert data["terminated"].any()
    assert not data["truncated"].any()


def test_a_simulator_that_never_truncates_may_say_none() -> None:
    envs = Edited(simulator(), lambda answer, _: (*answer[:2], answer[2] | answer[3], None, {}))
    replay = replay_of(simulator(), on_device=True)
    collector = Collector(envs, push, replay)
    collector.collect(2)
    with no_waiting():
        collector.collect(20)
    assert replay.data()["terminated"].any()
    assert not replay.data()["truncated"].any()


class Streaming:
    """rsl_rl's protocol without a reset, as its ``VecEnv`` is declared."""

    def __init__(self) -> None:
        self._simulator = simulator(as_rsl_rl=True)
        self.num_envs, self.device = N, "cpu"
        self.get_observations, self.step = self._simulator.get_observations, self._simulator.step


def test_one_without_reset_goes_on_from_its_observations() -> None:
    replay = replay_of(simulator(as_rsl_rl=True), own_next_obs=True)
    collector = Collector(Streaming(), push, replay)
    collector.collect(10)
    with pytest.raises(EnvError, match=r"reset\(seed=3\): this simulator's reset\(\) does not take it"):
        collector.reset(seed=3)


def test_a_seed_that_a_simulator_does_not_take_is_refused() -> None:
    with pytest.raises(EnvError, match=r"reset\(seed=1\).*give it to the simulator itself"):
        Collector(simulator(), push, replay_of(simulator()), seed=1).collect()


def test_one_that_returns_arrays_is_refused() -> None:
    class Arrays(InArrays):
        device = "cpu"

        def reset(self) -> Any:  # type: ignore[override]
            return super().reset()

    with pytest.raises(EnvError, match="have a device, cpu, and return observations of type ndarray"):
        Collector(Arrays(simulator()), push, replay_of(simulator())).collect()


def test_final_observations_that_do_not_fit_are_refused() -> None:
    def nested(answer: Any, _: int) -> Any:
        return (*answer[:4], {"final_obs": {"policy": answer[0]}})

    def short(answer: Any, _: int) -> Any:
        return (*answer[:4], {"final_obs": answer[0][:, :5]})

    replay = replay_of(simulator())
    with pytest.raises(EnvError, match=r"field 'obs': missing from the final observations .* of type dict"):
        Collector(Edited(simulator(), nested), push, replay).collect()
    with pytest.raises(ShapeError, match=r"field 'obs': expected final observations \(5, 6\), .* got \(5, 5\)"):
        Collector(Edited(simulator(), short), push, replay).collect()


class Wrapped(gym.Env[Any, Any]):
    """A simulator that is a single env to Gymnasium, as Isaac Lab's are."""

    def __init__(self) -> None:
        self._simulator = simulator()
        self.num_envs, self.device = N, self._simulator.device
        self.single_observation_space = self._simulator.single_observation_space
        self.single_action_space = self._simulator.single_action_space
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (N, 6), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (N, 2), np.float32)
        self.seeds: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.seeds.append(seed)
        return self._simulator.reset()

    def step(self, action: Tensor) -> Any:
        return self._simulator.step(action)


def test_one_in_wrappers_of_a_single_env_is_a_simulator() -> None:
    envs = Wrapped()
    replay = replay_of(simulator(), own_next_obs=True)
    Collector(gym.Wrapper(gym.Wrapper(envs)), push, replay, seed=4).collect(20)
    assert envs.seeds == [4]
    assert sorted(rows(replay.data())) == sorted(sum(steps_of(20), []))
    assert Collector(gym.Wrapper(Wrapped()), push).steps(2)["obs"].shape == (2, N, 6)
    warmed = Collector(lambda: gym.Wrapper(Wrapped()), push, replay).warm(replay, 3)
    assert warmed.num_steps == 3 * N


def test_an_action_mask_of_the_info_reaches_the_policy() -> None:
    def masked(answer: Any, count: int) -> Any:
        *rest, info = answer
        return (*rest, info | {"action_mask": torch.full((N, 2), count % 2 == 0)})

    class Masked(Edited):
        def reset(self) -> Any:
            obs, info = super().reset()
            return obs, info | {"action_mask": torch.ones(N, 2, dtype=torch.bool)}

    replay = ReplayBuffer(Schema.from_env(simulator(), action_mask=Field((2,), torch.bool)), N * 50, N)
    seen: list[bool] = []

    def policy(obs: Tensor, action_mask: Tensor) -> Tensor:
        seen.append(bool(action_mask.all()))
        return push(obs)

    Collector(Masked(simulator(), masked), policy, replay).collect(6)
    assert seen == [True, False, True, False, True, False]
    with pytest.raises(EnvError, match=r"info\['action_mask'\] is missing for env 0"):
        Collector(simulator(), policy, replay).collect(1)


def test_warm_plays_random_actions_in_simulators_of_its_own() -> None:
    replay = replay_of(simulator())
    collector = Collector(simulator, push, replay)
    stats = collector.warm(replay, 30, seed=5)
    assert stats.num_steps == 30 * N
    assert stats.num_episodes > 0
    assert collector.total_steps == 0


def test_warm_needs_a_space_or_a_policy() -> None:
    replay = replay_of(simulator(as_rsl_rl=True))
    collector = Collector(Streaming, push, replay)
    with pytest.raises(EnvError, match=r"single_action_space.* pass warm\(..., policy=...\)"):
        collector.warm(replay, 3)
    assert collector.warm(replay, 3, policy=push).num_steps == 3 * N


def test_a_policy_that_does_not_fit_is_told_before_the_simulator_steps() -> None:
    envs = simulator()
    before = envs.age.clone()
    with pytest.raises(ShapeError, match="the policy's answer does not fit"):
        Collector(envs, lambda obs: obs, replay_of(simulator())).collect()
    assert torch.equal(envs.age, before)
    with pytest.raises(FieldError, match="lacks 'action'"):
        Collector(simulator(), lambda obs: {"force": obs}, replay_of(simulator())).collect()


def test_the_ring_checks_out_after_many_ends(device: torch.device) -> None:
    envs = simulator(device)
    replay = ReplayBuffer(Schema.from_env(envs), N * 16, N, device=device, seed=0)
    Collector(envs, push, replay).collect(60)
    replay.check()
    assert internals.ring(replay).num_envs == N


# The point masses.


def test_the_point_masses_reward_a_policy_that_goes_to_the_goal() -> None:
    totals = []
    for policy in (lambda obs: torch.zeros(len(obs), 2), lambda obs: 2 * (obs[:, 4:] - obs[:, :2]) - obs[:, 2:4]):
        envs = PointMasses(64)
        collector = Collector(envs, policy, ReplayBuffer(Schema.from_env(envs), 64 * 8, 64))
        collector.collect(200)
        totals.append(sum(collector.returns) / len(collector.returns))
    assert totals[0] < 40 < 70 < totals[1]


@pytest.mark.parametrize("final", FINAL)
def test_all_stand_ins_play_the_same(final: str | None) -> None:
    one, other = PointMasses(N, final=final, as_rsl_rl=True), PointMasses(N)
    for _ in range(120):
        action = push(other.state)
        obs, reward, done, extras = one.step(action)
        after, expected, terminated, truncated, _ = other.step(action)
        assert torch.equal(obs["policy"], after)
        assert torch.equal(reward, expected)
        assert torch.equal(done.bool(), terminated | truncated)
        assert torch.equal(extras["time_outs"], truncated & ~terminated)
