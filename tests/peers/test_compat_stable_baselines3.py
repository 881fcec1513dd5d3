"""relive.compat.stable_baselines3 beside the real classes: fed the same random steps, everything is compared."""

from __future__ import annotations

import pickle
from importlib import import_module
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from relive.errors import DTypeError, EmptyError, FullError, NotFiniteError

ours: Any = import_module("relive.compat.stable_baselines3")
theirs: Any = import_module("stable_baselines3.common.buffers")
sb3: Any = import_module("stable_baselines3")
vec_env: Any = import_module("stable_baselines3.common.vec_env")

BOX = spaces.Box(-10, 10, (3,), np.float32)
OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "box": BOX,
    "double": spaces.Box(-10, 10, (2, 2), np.float64),
    "pixels": spaces.Box(0, 255, (1, 6, 6), np.uint8),
    "large pixels": spaces.Box(0, 255, (3, 40, 40), np.uint8),
    "discrete": spaces.Discrete(50),
    "binary": spaces.MultiBinary(4),
    "dict": spaces.Dict({"a": BOX, "b": spaces.Discrete(7), "c": spaces.Box(0, 255, (2, 4), np.uint8)}),
}
ACTIONS: dict[str, spaces.Space[Any]] = {
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "double": spaces.Box(-1, 1, (2,), np.float64),
    "discrete": spaces.Discrete(5),
    "many": spaces.MultiDiscrete([3, 4]),
}


def drawn(space: spaces.Space[Any], count: int) -> Any:
    samples = [space.sample() for _ in range(count)]
    if isinstance(space, spaces.Dict):
        return {key: np.stack([np.asarray(sample[key]) for sample in samples]) for key in space.spaces}
    return np.stack([np.asarray(sample) for sample in samples])


def chosen(tree: Any, mask: Any, other: Any) -> Any:
    """``tree`` where the mask is set, else ``other``; env by env."""
    if isinstance(tree, dict):
        return {key: chosen(tree[key], mask, other[key]) for key in tree}
    return np.where(mask.reshape(-1, *[1] * (tree.ndim - 1)), tree, other)


def play(obs_space: Any, action_space: Any, steps: int, num_envs: int, seed: int = 0) -> list[tuple[Any, ...]]:
    """The arguments of ``add`` as the host's collector passes them."""
    obs_space.seed(seed)
    action_space.seed(seed)
    rng = np.random.default_rng(seed)
    obs, found = drawn(obs_space, num_envs), []
    for _ in range(steps):
        done, timeout = rng.random(num_envs) < 0.25, rng.random(num_envs) < 0.5
        next_obs, first = drawn(obs_space, num_envs), drawn(obs_space, num_envs)
        infos = [{"TimeLimit.truncated": bool(t)} if d else {} for d, t in zip(done, timeout, strict=True)]
        reward = rng.standard_normal(num_envs).astype(np.float32)
        found.append((obs, next_obs, drawn(action_space, num_envs), reward, done, infos))
        obs = chosen(first, done, next_obs)
    return found


def copied(step: tuple[Any, ...]) -> tuple[Any, ...]:
    """The host reshapes dictionaries in place."""
    return tuple(dict(part) if isinstance(part, dict) else part for part in step)


def fed(buffer: Any, steps: list[tuple[Any, ...]]) -> Any:
    for step in steps:
        buffer.add(*copied(step))
    return buffer


def assert_same(one: Any, other: Any) -> None:
    if isinstance(other, dict):
        assert set(one) == set(other)
        for key in other:
            assert_same(one[key], other[key])
        return
    assert isinstance(one, type(other))
    assert (one.dtype, tuple(one.shape)) == (other.dtype, tuple(other.shape))
    np.testing.assert_array_equal(one, other)


def same_arrays(a: Any, b: Any) -> None:
    for name in ("observations", "next_observations", "actions", "rewards"):
        assert_same(getattr(a, name), getattr(b, name))
    for name in ("dones", "timeouts"):  # the storage, which is bool
        assert_same(getattr(a, name).astype(np.float32), getattr(b, name))


def rows(samples: Any) -> list[bytes]:
    """Each row of a batch, all its fields, as bytes."""
    parts = [list(part.values()) if isinstance(part, dict) else [part] for part in samples if part is not None]
    leaves = [np.ascontiguousarray(leaf.numpy()) for part in parts for leaf in part]
    return [b"|".join(leaf[i].tobytes() for leaf in leaves) for i in range(len(leaves[0]))]


def kinds(samples: Any) -> Any:
    def kind(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: kind(leaf) for key, leaf in part.items()}
        return None if part is None else (part.dtype, tuple(part.shape), part.device.type)

    return type(samples), [kind(part) for part in samples]


def pair(name: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return getattr(ours, name)(*args, **kwargs), getattr(theirs, name)(*args, **kwargs)


def named(obs: str, base: str = "ReplayBuffer") -> str:
    return ("Dict" if obs == "dict" else "") + base


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("obs", OBSERVATIONS)
def test_a_replay_stores_and_serves_the_same(obs: str, action: str, num_envs: int) -> None:
    spaces_ = OBSERVATIONS[obs], ACTIONS[action]
    a, b = pair(named(obs), 8 * num_envs + 1, *spaces_, device="cpu", n_envs=num_envs)
    for count, step in enumerate(play(*spaces_, 21, num_envs)):
        a.add(*copied(step))
        b.add(*copied(step))
        assert (a.size(), a.pos, a.full, a.buffer_size) == (b.size(), b.pos, b.full, b.buffer_size)
        if count in (3, 7, 8, 20):
            same_arrays(a, b)
            drew = a.sample(400)
            assert kinds(drew) == kinds(b.sample(400))
            assert set(rows(drew)) == set(rows(b.sample(4000)))
    a.reset()
    assert (a.size(), a.pos, a.full) == (0, 0, False)
    with pytest.raises(EmptyError):
        a.sample(1)


def test_flags_of_any_form_are_taken_and_the_callers_array_may_be_used_again() -> None:
    obs, action = np.zeros((1, 3), np.float32), np.zeros((1, 2), np.float32)
    for form in (bool, np.bool_, lambda x: np.array([x]), lambda x: np.array([x], np.float32)):
        a, b = pair("ReplayBuffer", 5, BOX, ACTIONS["box"], device="cpu")
        for end in (False, True):
            done = form(end)
            for buffer in (a, b):
                buffer.add(obs, obs + 1, action, np.ones(1), done, [{"TimeLimit.truncated": end}])
            if isinstance(done, np.ndarray):
                done[:] = not end
        same_arrays(a, b)


@pytest.mark.parametrize("timeouts", [True, False])
@pytest.mark.parametrize("n_steps", [1, 2, 3, 5, 20])
def test_n_step_windows_are_the_same(n_steps: int, timeouts: bool) -> None:
    options: dict[str, Any] = {"n_steps": n_steps, "gamma": 0.9, "handle_timeout_termination": timeouts}
    steps = play(BOX, ACTIONS["box"], 45, 2)
    a = ours.NStepReplayBuffer(24, BOX, ACTIONS["box"], "cpu", 2, **options)
    alone = [theirs.NStepReplayBuffer(12, BOX, ACTIONS["box"], "cpu", 1, **options) for _ in range(2)]
    for count, step in enumerate(steps):
        a.add(*step)
        for env, host in enumerate(alone):
            host.add(*(part[env : env + 1] for part in step))
        if count in (4, 11, 12, 30, 44):
            found = a.sample(600)
            want = [host._get_samples(np.arange(host.size())) for host in alone]
            assert kinds(found)[0] is kinds(want[0])[0]
            by_obs = {row.observations.numpy().tobytes(): row for w in want for row in split(w)}
            seen = set()
            for row in split(found):
                expected = by_obs[row.observations.numpy().tobytes()]
                seen.add(row.observations.numpy().tobytes())
                for got, host in zip(row, expected, strict=True):
                    assert got.dtype == host.dtype
                    torch.testing.assert_close(got, host, rtol=1e-6, atol=1e-6)
            assert seen == set(by_obs)


def split(samples: Any) -> list[Any]:
    return [
        type(samples)(*(None if part is None else part[i : i + 1] for part in samples))
        for i in range(len(samples.rewards))
    ]


def test_a_host_window_runs_over_a_reset_between_two_calls_of_learn_and_ours_does_not() -> None:
    steps = play(BOX, ACTIONS["box"], 4, 1, seed=1)
    one, two = ([*step[:4], np.array([False]), [{}]] for step in (steps[0], steps[1]))
    two[0] = two[0] + 1  # the env was reset: this is not what the first step ended on
    buffers_ = pair("NStepReplayBuffer", 10, BOX, ACTIONS["box"], device="cpu", n_steps=2, gamma=1.0)
    for buffer in buffers_:
        buffer.add(*one)
        buffer.add(*two)

    def first(batch: Any) -> float:
        return {row.observations.numpy().tobytes(): row for row in split(batch)}[one[0].tobytes()].rewards.item()

    assert first(buffers_[1].sample(50)) == pytest.approx(float(one[3][0] + two[3][0]))
    assert first(buffers_[0].sample(50)) == pytest.approx(float(one[3][0]))


def test_saving_memory_keeps_the_observation_an_episode_ended_on() -> None:
    steps = play(BOX, ACTIONS["box"], 45, 1, seed=1)
    truth = {step[0].tobytes(): step[1] for step in steps}
    a, b = pair(
        "ReplayBuffer", 100, BOX, ACTIONS["box"], device="cpu", optimize_memory_usage=True,
        handle_timeout_termination=False,
    )  # fmt: skip
    wrong = [row for row in split(fed(b, steps).sample(500)) if not right(row, truth)]
    assert wrong
    assert all(row.dones.item() == 1 for row in wrong)
    found = split(fed(a, steps).sample(500))
    assert all(right(row, truth) for row in found)
    assert {row.observations.numpy().tobytes() for row in found} >= {step[0].tobytes() for step in steps[:-1]}
    with pytest.raises(ValueError, match="simultaneously"):
        theirs.ReplayBuffer(100, BOX, ACTIONS["box"], "cpu", optimize_memory_usage=True)
    both = fed(ours.ReplayBuffer(100, BOX, ACTIONS["box"], "cpu", optimize_memory_usage=True), steps)
    cut = {step[0].tobytes() for step in steps if step[5][0].get("TimeLimit.truncated")}
    assert cut
    assert all(row.dones.item() == 0 for row in split(both.sample(500)) if row.observations.numpy().tobytes() in cut)


def right(row: Any, truth: dict[bytes, Any]) -> bool:
    return bool((row.next_observations.numpy() == truth[row.observations.numpy().tobytes()]).all())


class Still(gym.Env[Any, Any]):
    observation_space, action_space = BOX, ACTIONS["box"]

    def reset(self, **options: Any) -> Any:
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(3, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize("n_steps", [1, 3])
def test_vec_normalize_sees_each_observation_and_each_reward(n_steps: int) -> None:
    env = vec_env.VecNormalize(vec_env.DummyVecEnv([Still]), clip_reward=0.5)
    env.obs_rms.mean, env.obs_rms.var, env.ret_rms.var = np.arange(3.0), np.array([1.0, 4.0, 9.0]), np.array(2.25)
    a, b = pair("NStepReplayBuffer", 30, BOX, ACTIONS["box"], device="cpu", n_steps=n_steps, gamma=0.9)
    steps = play(BOX, ACTIONS["box"], 25, 1)
    fed(a, steps)
    fed(b, steps)
    want = {row.observations.numpy().tobytes(): row for row in split(b._get_samples(np.arange(25), env))}
    for row in split(a.sample(200, env)):
        for got, host in zip(row, want[row.observations.numpy().tobytes()], strict=True):
            assert got.dtype == host.dtype
            torch.testing.assert_close(got, host, rtol=1e-5, atol=1e-6)
    assert {row.rewards.item() for row in split(a.sample(200))} != {
        row.rewards.item() for row in split(a.sample(200, env))
    }


@pytest.mark.parametrize("batch_size", [None, 7, 100])
@pytest.mark.parametrize("action", ["box", "discrete"])
@pytest.mark.parametrize("obs", OBSERVATIONS)
def test_a_rollout_stores_computes_and_serves_the_same(obs: str, action: str, batch_size: int | None) -> None:
    spaces_, shape = (OBSERVATIONS[obs], ACTIONS[action]), (11, 3)
    a, b = pair(named(obs, "RolloutBuffer"), 11, *spaces_, device="cpu", gae_lambda=0.9, gamma=0.97, n_envs=3)
    torch.manual_seed(0)
    for _ in range(2):
        start = np.ones(3, bool)
        for buffer in (a, b):
            buffer.reset()
        for step in play(*spaces_, *shape):
            value, log_prob = torch.randn(3, 1), torch.randn(3)
            for buffer in (a, b):
                buffer.add(copied(step)[0], step[2], step[3], start, value, log_prob)
            start = step[4]
        last = torch.randn(3, 1)
        for buffer in (a, b):
            buffer.compute_returns_and_advantage(last, start)
        assert (a.full, a.pos, a.size()) == (b.full, b.pos, b.size())
        for name in ("observations", "actions", "rewards", "episode_starts", "values", "log_probs"):
            assert_same(getattr(a, name), getattr(b, name))
        for name in ("advantages", "returns"):
            np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=1e-4, atol=1e-5)
        b.advantages, b.returns = a.advantages.copy(), a.returns.copy()  # they differ in the last bit
        batches, want = list(a.get(batch_size)), list(b.get(batch_size))
        assert [kinds(batch) for batch in batches] == [kinds(batch) for batch in want]
        flat = [row for batch in batches for row in rows(batch)]
        assert sorted(flat) == sorted(row for batch in want for row in rows(batch))
        assert [row for batch in a.get(batch_size) for row in rows(batch)] != flat
    with pytest.raises(FullError):
        a.add(copied(step)[0], step[2], step[3], start, value, log_prob)
    a.returns = a.returns + 1.0
    assert a.returns.flatten()[0] == pytest.approx(float(b.returns.flatten()[0]) + 1.0)


@pytest.mark.parametrize("together", [1, 2, 100])
def test_a_rollouts_batches_are_the_same_however_many_are_gathered_at_once(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, found = OBSERVATIONS["dict"], []
    for bytes_ in (0, together * 7 * 52):
        monkeypatch.setattr("relive.compat.stable_baselines3.GATHERED", bytes_)
        buffer = ours.DictRolloutBuffer(11, space, ACTIONS["box"], "cpu", n_envs=3, seed=0)
        assert buffer._row_bytes == 52
        for step in play(space, ACTIONS["box"], 11, 3):
            buffer.add(copied(step)[0], step[2], step[3], step[4], torch.zeros(3, 1), torch.zeros(3))
        buffer.compute_returns_and_advantage(torch.zeros(3, 1), np.zeros(3, bool))
        found.append([rows(batch) for batch in buffer.get(7)])
    assert found[0] == found[1]
    assert [len(batch) for batch in found[0]] == [7, 7, 7, 7, 5]


def test_values_may_carry_gradients_or_be_of_one_env_without_an_axis() -> None:
    stored = []
    for buffer in pair("RolloutBuffer", 2, BOX, ACTIONS["discrete"], device="cpu"):
        for step in play(BOX, ACTIONS["discrete"], 2, 1):
            value, log_prob = torch.full((1, 1), 2.0), torch.tensor(-1.0)
            if type(buffer) is ours.RolloutBuffer:
                value.requires_grad_()
            buffer.add(step[0], step[2], step[3], step[4], value, log_prob)
        stored.append((buffer.values, buffer.log_probs))
    for one, other in zip(*stored, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("wrong", ["shape", "dtype", "missing"])
def test_a_rollout_refuses_what_does_not_fit_and_stays_as_it_is(wrong: str) -> None:
    space = OBSERVATIONS["dict"]
    buffer = ours.DictRolloutBuffer(3, space, ACTIONS["box"], "cpu", n_envs=2)
    step = copied(play(space, ACTIONS["box"], 1, 2)[0])
    if wrong == "missing":
        del step[0]["b"]
    else:
        step[0]["c"] = np.zeros((2, 3), np.uint8) if wrong == "shape" else step[0]["c"].astype(np.float32)
    error = {"shape": ValueError, "dtype": DTypeError, "missing": KeyError}[wrong]
    with pytest.raises(error):
        buffer.add(step[0], step[2], step[3], step[4], torch.zeros(2, 1), torch.zeros(2))
    assert buffer.pos == 0
    assert not buffer.actions.any()


def test_a_rollout_that_is_not_full_is_not_served() -> None:
    for buffer in pair("RolloutBuffer", 3, BOX, ACTIONS["box"], device="cpu"):
        with pytest.raises(AssertionError):
            next(iter(buffer.get()))


def test_a_pickled_replay_goes_on_with_the_same_batches() -> None:
    steps = play(BOX, ACTIONS["box"], 40, 2)
    for kind, options in (("ReplayBuffer", {}), ("NStepReplayBuffer", {"n_steps": 2}), ("PrioritizedReplayBuffer", {})):
        buffer = fed(getattr(ours, kind)(32, BOX, ACTIONS["box"], "cpu", 2, seed=0, **options), steps)
        other = pickle.loads(pickle.dumps(buffer))
        for one in (buffer, other):
            fed(one, steps[:3])
        for mine, its in zip(buffer.sample(32), other.sample(32), strict=True):
            np.testing.assert_array_equal(mine, its) if mine is not None else None
        assert (other.pos, other.full, other.size()) == (buffer.pos, buffer.full, buffer.size())


def drawn_from() -> str:
    return str(np.random.get_state())  # noqa: NPY002 - NumPy's global generator is looked at, not drawn from


def test_batches_are_a_function_of_the_seed_and_leave_the_generators_of_others_alone() -> None:
    steps, before = play(BOX, ACTIONS["box"], 20, 1), (drawn_from(), torch.get_rng_state())
    one, two, three = (
        fed(ours.ReplayBuffer(50, BOX, ACTIONS["box"], "cpu", seed=seed), steps).sample(8) for seed in (1, 1, 2)
    )
    assert rows(one) == rows(two) != rows(three)
    assert drawn_from() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


class Point(gym.Env[Any, Any]):
    """Something to act in."""

    observation_space, action_space = BOX, ACTIONS["box"]

    def reset(self, **options: Any) -> Any:
        super().reset(**options)
        self.t = 0
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        seen = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return seen, float(np.abs(action).sum()), False, self.t == 9, {}


@pytest.mark.parametrize("algorithm", ["DDPG", "SAC", "TD3", "A2C", "PPO"])
def test_two_trainings_of_one_seed_are_equal(algorithm: str) -> None:
    """With ``seed`` of the algorithm, and with ``set_random_seed`` once it is there."""
    kind, options = "replay", {"learning_starts": 20, "batch_size": 16}
    if algorithm in ("A2C", "PPO"):
        kind, options = "rollout", {"n_steps": 16}
        options |= {"batch_size": 8, "n_epochs": 2} if algorithm == "PPO" else {}
    options |= {f"{kind}_buffer_class": getattr(ours, f"{kind.capitalize()}Buffer"), "device": "cpu"}

    def trained(seed: int, later: bool) -> list[Any]:
        start = {"seed": 5} if later else {"seed": seed}
        model = getattr(sb3, algorithm)("MlpPolicy", Point(), policy_kwargs={"net_arch": [8]}, **start, **options)
        if later:
            model.set_random_seed(seed)
        model.learn(64)
        return [value.tolist() for value in model.policy.state_dict().values()]

    for later in (False, True):
        assert trained(1, later) == trained(1, later) != trained(2, later)


def test_a_time_limit_without_a_done_ends_a_window_as_in_the_host() -> None:
    found = []
    for buffer in pair("NStepReplayBuffer", 10, BOX, ACTIONS["box"], device="cpu", n_steps=3, gamma=0.9):
        for t in range(8):
            obs = np.full((1, 3), t, np.float32)
            info = {"TimeLimit.truncated": t == 2}
            buffer.add(obs, obs + 1, np.zeros((1, 2)), np.ones(1), np.array([0.0]), [info])
        found.append((buffer, set(rows(buffer.sample(200)))))
    assert found[0][1] == found[1][1]
    same_arrays(found[0][0], found[1][0])


def test_what_is_written_to_arrays_is_sampled_as_in_the_host() -> None:
    steps, found = play(BOX, ACTIONS["box"], 8, 2), []
    for buffer in pair("NStepReplayBuffer", 16, BOX, ACTIONS["box"], device="cpu", n_envs=2, n_steps=2, gamma=1.0):
        fed(buffer, steps)
        buffer.rewards[3] = 7.0
        buffer.dones[4, :] = True
        buffer.timeouts[6, 1] = True
        buffer.observations[2, 0] = -1.0
        buffer.next_observations[7] = -2.0
        buffer.actions[5] *= 0
        found.append((buffer, set(rows(buffer.sample(900)))))
    assert found[0][1] == found[1][1]
    same_arrays(found[0][0], found[1][0])


def test_a_rollout_serves_zeros_until_the_returns_are_computed_as_the_host_does() -> None:
    found = []
    for buffer in pair("RolloutBuffer", 4, BOX, ACTIONS["box"], device="cpu", n_envs=2):
        for step in play(BOX, ACTIONS["box"], 4, 2):
            buffer.add(step[0], step[2], step[3], step[4], torch.ones(2, 1), torch.zeros(2))
        found.append(sorted(row for batch in buffer.get(3) for row in rows(batch)))
    assert found[0] == found[1]


def test_priorities_decide_what_is_drawn_and_weights_correct_for_it() -> None:
    buffer = ours.PrioritizedReplayBuffer(64, BOX, ACTIONS["box"], "cpu", alpha=1.0, beta=1.0, seed=0)
    fed(buffer, play(BOX, ACTIONS["box"], 64, 1))
    batch = buffer.sample(64)
    assert batch.weights.shape == batch.rewards.shape == batch.discounts.shape == (64, 1)
    errors = np.where(batch.indices == batch.indices[0], 63.0, 1.0)
    assert buffer.update_priorities(batch.indices, torch.as_tensor(errors).unsqueeze(1)) == 0
    again = buffer.sample(2000)
    often = again.indices == batch.indices[0]
    assert 0.4 < often.mean() < 0.6
    np.testing.assert_allclose(again.weights[often].numpy(), 1 / 63, rtol=1e-3)
    with pytest.raises(NotFiniteError):
        buffer.update_priorities(batch.indices, torch.full((64, 1), torch.nan))


def test_dictionaries_can_be_read_with_n_steps_priorities_and_little_memory() -> None:
    space = OBSERVATIONS["dict"]
    options: dict[str, Any] = {"n_steps": 3, "optimize_memory_usage": True}
    buffer = fed(
        ours.PrioritizedReplayBuffer(60, space, ACTIONS["box"], "cpu", 2, **options), play(space, ACTIONS["box"], 20, 2)
    )
    batch = buffer.sample(9)
    assert {key: tuple(x.shape) for key, x in batch.next_observations.items()} == {
        "a": (9, 3),
        "b": (9, 1),
        "c": (9, 2, 4),
    }


@pytest.mark.parametrize("options", [{}, {"optimize_memory_usage": True, "handle_timeout_termination": False}])
@pytest.mark.parametrize("count", [11, 50])
def test_a_replay_of_the_host_is_converted_with_every_row_that_it_samples(options: Any, count: int) -> None:
    steps = play(BOX, ACTIONS["box"], count, 2)
    host = fed(theirs.ReplayBuffer(40, BOX, ACTIONS["box"], "cpu", 2, **options), steps)
    for kind in (ours.ReplayBuffer, ours.PrioritizedReplayBuffer):
        made = kind.from_original(host, optimize_memory_usage=False)
        drawn = made.sample(3000)
        wanted = set(rows(host.sample(3000)))
        if options:  # the newest next observation of the host lies where the oldest observation was
            wanted |= set(rows(host._get_samples(np.full(50, host.pos - 1))))
        assert set(rows(drawn[:5])) == wanted
        made.add(*steps[0])


@pytest.mark.parametrize("space", [BOX, OBSERVATIONS["dict"]], ids=["box", "dict"])
@pytest.mark.parametrize("read", [False, True])
def test_a_rollout_of_the_host_is_converted_with_its_advantages(space: Any, read: bool) -> None:
    name, rng = "RolloutBuffer" if space is BOX else "DictRolloutBuffer", np.random.default_rng(0)
    host = getattr(theirs, name)(11, space, ACTIONS["box"], "cpu", 0.9, 0.97, n_envs=3)
    for obs, _, action, reward, done, _ in play(space, ACTIONS["box"], 11, 3):
        values, log_probs = (torch.from_numpy(rng.standard_normal(3).astype(np.float32)) for _ in range(2))
        host.add(obs, action, reward, done, values, log_probs)
    host.compute_returns_and_advantage(torch.ones(3), np.zeros(3))
    if read:
        next(host.get(4))
    made = getattr(ours, name).from_original(host, seed=0)
    assert (made.pos, made.full, made.gamma, made.gae_lambda) == (11, True, 0.97, 0.9)
    found, wanted = (torch.stack([*next(buffer.get(None))[2:]], 1).tolist() for buffer in (made, host))
    assert sorted(found) == sorted(wanted)
    made.compute_returns_and_advantage(torch.ones(3), np.zeros(3))
    again = torch.stack([*next(made.get(None))[2:]], 1)
    np.testing.assert_allclose(sorted(again.tolist()), sorted(wanted), atol=1e-5)


def test_a_pickle_of_the_host_loaded_into_a_model_becomes_ours_and_the_model_learns_on(tmp_path: Any) -> None:
    class DQN(ours.ConvertsReplays, sb3.DQN):
        pass

    options = {"learning_starts": 20, "buffer_size": 300, "device": "cpu", "seed": 0}
    host = sb3.DQN("MlpPolicy", "CartPole-v1", **options).learn(60)
    host.save_replay_buffer(tmp_path / "replay.pkl")
    kind = {"replay_buffer_class": ours.NStepReplayBuffer, "replay_buffer_kwargs": {"n_steps": 3}}
    plain, model = (algorithm("MlpPolicy", "CartPole-v1", **kind, **options) for algorithm in (sb3.DQN, DQN))
    plain.load_replay_buffer(tmp_path / "replay.pkl")
    assert type(plain.replay_buffer) is theirs.ReplayBuffer  # which nothing of ours can prevent
    plain.replay_buffer = plain.replay_buffer_class.from_original(plain.replay_buffer, n_steps=3)
    model.load_replay_buffer(tmp_path / "replay.pkl")
    for one in (plain, model):
        assert type(one.replay_buffer) is ours.NStepReplayBuffer
        assert one.replay_buffer.n_steps == 3
        np.testing.assert_array_equal(one.replay_buffer.observations[:60], host.replay_buffer.observations[:60])
        one.learn(32)
        assert one.replay_buffer.size() == 92


def test_the_hosts_checks_of_class_pass() -> None:
    for name in ("ReplayBuffer", "DictReplayBuffer", "NStepReplayBuffer", "RolloutBuffer", "DictRolloutBuffer"):
        assert issubclass(getattr(ours, name), getattr(theirs, name))
    assert issubclass(ours.PrioritizedReplayBuffer, theirs.ReplayBuffer)


@pytest.mark.parametrize("options", [{}, {"optimize_memory_usage": True}])
def test_dqn_stores_every_step_goes_on_after_a_reset_and_saves_its_replay(options: Any, tmp_path: Any) -> None:
    kwargs = {"n_steps": 3, "gamma": 0.99}
    model = sb3.DQN(
        "MlpPolicy", "CartPole-v1", replay_buffer_class=ours.NStepReplayBuffer, replay_buffer_kwargs=kwargs,
        learning_starts=50, buffer_size=500, seed=0, device="cpu", **options,
    )  # fmt: skip
    model.learn(200)
    model.learn(152)
    assert model.replay_buffer.pos == 352
    model.save_replay_buffer(tmp_path / "replay.pkl")
    stored = model.replay_buffer.observations
    model.load_replay_buffer(tmp_path / "replay.pkl")
    np.testing.assert_array_equal(model.replay_buffer.observations, stored)
    model.learn(100)
    assert model.replay_buffer.pos == 452


class Walk(gym.Env[Any, Any]):
    """Every achieved goal is another number; the desired goal is 0, and reaching one ends the task."""

    observation_space = spaces.Dict(
        {key: spaces.Box(-1e6, 1e6, (1,), np.float32) for key in ("observation", "achieved_goal", "desired_goal")}
    )
    action_space = ACTIONS["box"]

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        return np.where((achieved == desired).all(-1), 0.0, -1.0)


class Ending(Walk):
    def compute_terminated(self, achieved: Any, desired: Any, info: Any) -> Any:
        return (achieved == desired).all(-1)


def walked(buffer: Any, lengths: list[int], num_envs: int = 1) -> Any:
    """Episodes of these lengths in every env; what is achieved is 1000 env + 100 episode + the number of the step."""

    def seen(episode: int, t: int) -> dict[str, Any]:
        tag = (1000.0 * np.arange(num_envs) + 100.0 * (episode + 1) + t).astype(np.float32)[:, None]
        return {"observation": tag, "achieved_goal": tag.copy(), "desired_goal": np.zeros((num_envs, 1), np.float32)}

    for episode, length in enumerate(lengths):
        for t in range(length):
            done = np.full(num_envs, t == length - 1)
            infos = [{"TimeLimit.truncated": True} if d else {} for d in done]
            action = np.zeros((num_envs, 2), np.float32)
            buffer.add(seen(episode, t), seen(episode, t + 1), action, np.full(num_envs, -1.0), done, infos)
    return buffer


def her_pair(size: int, env: type[Walk] = Walk, num_envs: int = 1, **options: Any) -> list[Any]:
    envs = vec_env.DummyVecEnv([env] * num_envs)
    classes = ours.HerReplayBuffer, sb3.HerReplayBuffer
    return [cls(size, Walk.observation_space, Walk.action_space, envs, "cpu", num_envs, **options) for cls in classes]


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_goals_are_chosen_the_same(strategy: str, num_envs: int) -> None:
    lengths, found, shapes = [4, 1, 6], [], []
    for buffer in her_pair(40 * num_envs, num_envs=num_envs, goal_selection_strategy=strategy):
        batch = walked(buffer, lengths, num_envs).sample(4000)
        obs, _, next_obs, dones, rewards = list(batch)[:5]
        assert torch.equal(obs["desired_goal"], next_obs["desired_goal"])
        assert not dones.any()  # all were cut off
        new = obs["desired_goal"] != 0
        assert 0.77 < new.float().mean() < 0.83
        rows_ = zip(obs["observation"], obs["desired_goal"], rewards, strict=True)
        found.append({tuple(float(x) for x in row) for row in rows_})
        shapes.append(kinds(batch))
    assert found[0] == found[1]
    assert shapes[0] == shapes[1]


def test_next_observations_are_those_of_the_host() -> None:
    for buffers_ in (her_pair(60), her_pair(60, num_envs=2)):
        for buffer in buffers_:
            walked(buffer, [4, 1, 6], buffer.n_envs)
        assert_same(*(buffer.next_observations for buffer in buffers_))
        assert_same(*(buffer.observations for buffer in buffers_))


def test_rewards_are_asked_with_the_infos_of_their_steps_as_in_the_host() -> None:
    asked: list[Any] = []

    class Telling(Walk):
        def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
            asked.append([(float(goal[0]), one.get("at")) for goal, one in zip(achieved, info, strict=True)])
            return super().compute_reward(achieved, desired, info)

    for copy_info_dict in (True, False):
        found = []
        for buffer in her_pair(60, Telling, copy_info_dict=copy_info_dict):
            for t in range(10):
                seen = {key: np.full((1, 1), t, np.float32) for key in Walk.observation_space.spaces}
                after = {key: member + 1 for key, member in seen.items()}
                info = {"at": t, "TimeLimit.truncated": t % 5 == 4}
                buffer.add(seen, after, np.zeros((1, 2)), np.zeros(1), np.array([t % 5 == 4]), [info])
            asked.clear()
            buffer.sample(400)
            found.append(set(asked[-1]))
        assert found[0] == found[1] == {(t + 1.0, t if copy_info_dict else None) for t in range(10)}


def test_a_hindsight_replay_of_the_host_is_converted() -> None:
    _, host = her_pair(40, Ending, goal_selection_strategy="final", n_sampled_goal=2, copy_info_dict=True)
    walked(host, [5, 3])
    made = ours.HerReplayBuffer.from_original(host)
    assert made.env is host.env
    goals = [set(buffer.sample(300).observations["desired_goal"][:, 0].tolist()) for buffer in (made, host)]
    assert goals[0] == goals[1] == {0.0, 105.0, 203.0}


def test_a_goal_that_is_reached_ends_the_task_where_the_env_says_so() -> None:
    for buffer, ends in zip(her_pair(40, Ending, goal_selection_strategy="future"), (True, False), strict=True):
        obs, _, next_obs, dones, _ = list(walked(buffer, [5, 5]).sample(500))[:5]
        hit = next_obs["achieved_goal"] == obs["desired_goal"]
        assert hit.any()
        assert torch.equal(dones.bool(), hit) == ends


def test_an_episode_as_long_as_the_buffer_can_be_drawn() -> None:
    mine, its = her_pair(10)
    one = {key: np.ones((1, 1), np.float32) for key in Walk.observation_space.spaces}
    for buffer in (mine, its):
        walked(buffer, [10]).add(one, one, np.zeros((1, 2), np.float32), np.zeros(1), np.array([False]), [{}])
    with pytest.raises(RuntimeError, match="Unable to sample"):
        its.sample(4)
    assert len({float(x) for x in mine.sample(300).observations["observation"]}) == 8


def test_episodes_under_way_are_served_and_a_pickled_buffer_asks_for_its_env() -> None:
    mine, its = her_pair(20)
    for buffer in (mine, its):
        step = {key: np.ones((1, 1), np.float32) for key in Walk.observation_space.spaces}
        walked(buffer, [3])
        for _ in range(2):
            buffer.add(step, step, np.zeros((1, 2), np.float32), np.zeros(1), np.array([False]), [{}])
        other = pickle.loads(pickle.dumps(buffer))
        with pytest.raises(AssertionError, match="VecEnv"):
            other.sample(64)
        other.set_env(buffer.env)
        other.sample(64)
        with pytest.raises(ValueError, match="already"):
            other.set_env(buffer.env)
        with pytest.warns(UserWarning, match="truncated"):
            other.truncate_last_trajectory()
        other.sample(64)
    assert 1.0 in mine.sample(300).observations["observation"]
    assert 1.0 not in its.sample(300).observations["observation"]


@pytest.mark.parametrize("strategy", ["future", "final"])
def test_the_hosts_dqn_learns_to_flip_bits(strategy: str) -> None:
    envs = import_module("stable_baselines3.common.envs")
    env = envs.BitFlippingEnv(n_bits=5, continuous=False, max_steps=5)
    model = sb3.DQN(
        "MultiInputPolicy", env, replay_buffer_class=ours.HerReplayBuffer, learning_starts=100, buffer_size=5000,
        replay_buffer_kwargs={"goal_selection_strategy": strategy, "seed": 0}, gradient_steps=2, gamma=0.9, seed=0,
        exploration_fraction=0.5, target_update_interval=200, learning_rate=1e-3, device="cpu",
    )  # fmt: skip
    model.learn(2000)
    wins = 0
    for _ in range(50):
        obs, over = env.reset()[0], False
        while not over:
            obs, _, terminated, truncated, info = env.step(model.predict(obs, deterministic=True)[0])
            over = terminated or truncated
        wins += bool(info["is_success"])
    assert wins >= 40
