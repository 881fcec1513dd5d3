"""An independent judge of the audit: real plays stored wrongly, and others stored rightly.

Whoever wrote this had not read the audit's rules. Each of ``BUGS`` has one mistake of a loop in it, and each of
``RIGHT`` has none. ``case.make()`` returns (source, keyword arguments) for ``relive.audit``, new copies each time and
the same in every run. ``case.twin()`` of a bug is the same play stored rightly, so there are more right sets than
those of ``RIGHT``. Sets that need MuJoCo are left out where it is not installed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import relive

Arrays = dict[str, Any]
Policy = Callable[[np.random.Generator, Any], Any]
Made = tuple[Any, dict[str, Any]]

GAMMA, LAMBDA = 0.99, 0.95
MUJOCO = find_spec("mujoco") is not None


class Case(NamedTuple):
    """A set for the audit: ``about`` says in one line what is wrong, or why it is right.

    A bug also has a ``twin``, the same stored rightly, and ``rows``: which rows of the wrong log are meant, bool.
    """

    name: str
    about: str
    make: Callable[[], Made]
    twin: Callable[[], Made] | None = None
    rows: Callable[[], Any] | None = None


class Planted(NamedTuple):
    """A log with a mistake, the right one, and which rows of the wrong one are meant, bool ``[T]`` or ``[T, N]``.

    ``share`` is how many of these rows have to differ at least: a wrong action may be the right one by chance.
    Where the wrong log is longer, the rows meant are those that should not be there.
    """

    wrong: Arrays
    right: Arrays
    rows: Any
    kwargs: dict[str, Any] = {}  # noqa: RUF012
    share: float = 1.0

    def check(self) -> Planted:
        """Raise AssertionError unless the wrong log differs from the right one in the rows meant and nowhere else."""
        rows = np.asarray(self.rows)
        assert rows.any()
        if len(self.wrong["reward"]) == len(self.right["reward"]):
            differs = _differs(self.wrong, self.right, rows.shape)
            assert not differs[~rows].any(), f"{(differs & ~rows).sum()} rows differ that are not meant"
            assert differs[rows].mean() >= self.share, differs[rows].mean()
            return self
        N = rows.shape[1] if rows.ndim == 2 else None
        for n in [slice(None)] if N is None else range(N):
            part = (slice(None), n) if N is not None else (slice(None),)
            kept, right = _map(lambda a: a[part][~rows[part]], self.wrong), _map(lambda a: a[part], self.right)  # noqa: B023
            T = min(len(kept["reward"]), len(right["reward"]))
            assert T > 50
            kept, right = (_map(lambda a: a[:T], log) for log in (kept, right))  # noqa: B023
            assert not _differs(kept, right, (T,)).any()
        return self


# Nested arrays


def _map(f: Callable[..., Any], *trees: Any) -> Any:
    """Apply f to the arrays of a nested dict, or of several of the same keys."""
    if isinstance(trees[0], dict):
        return {key: _map(f, *(tree[key] for tree in trees)) for key in trees[0]}
    return f(*trees)


def _stack(values: Sequence[Any]) -> Any:
    return _map(lambda *arrays: np.stack(arrays), *values)


def _leaves(tree: Any) -> Iterable[Any]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _leaves(value)
    else:
        yield tree


def _differs(a: Arrays, b: Arrays, shape: tuple[int, ...]) -> Any:
    """Bool of the rows' shape: True if any field of the row differs."""
    assert a.keys() == b.keys()
    found = np.zeros(shape, bool)
    for x, y in zip(_leaves(a), _leaves(b), strict=True):
        same = (x == y) | ((x != x) & (y != y))
        found |= ~same.reshape(*shape, -1).all(-1)
    return found


def log_of(play: Arrays, *, without: Sequence[str] = (), **changes: Any) -> Arrays:
    """What a loop stores of a play: all but what the vector env returned; new copies."""
    kept = {k: v for k, v in play.items() if k != "returned" and k not in without} | changes
    return _map(np.array, kept)


def ended(play: Arrays) -> Any:
    """Bool: an episode ended with this row."""
    return play["terminated"] | play["truncated"]


def steps_in_episode(play: Arrays) -> Any:
    """The number of each row in its episode, from 0."""
    done = ended(play)
    found = np.zeros(done.shape, int)
    for t in range(1, len(done)):
        found[t] = np.where(done[t - 1], 0, found[t - 1] + 1)
    return found


def one(play: Arrays, n: int = 0) -> Arrays:
    """One env of a play, ``[T, ...]``."""
    return _map(lambda a: a[:, n], play)


def everywhere(play: Arrays, value: bool = True) -> Any:
    """A mask of all rows."""
    return np.full(play["reward"].shape, value)


# Environments of our own


class Ball(gym.Env[Any, Any]):
    """A ball bounces off three walls and a paddle; images [16, 16, 1] uint8."""

    observation_space = spaces.Box(0, 255, (16, 16, 1), np.uint8)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.x, self.y, self.paddle = self.np_random.uniform(2, 13), 2.0, 7
        self.dx, self.dy = self.np_random.uniform(-1.5, 1.5), self.np_random.uniform(0.7, 1.6)
        return self._frame(), {}

    def step(self, action: Any) -> Any:
        self.paddle = int(np.clip(self.paddle + (int(action) - 1) * 2, 2, 13))
        self.x, self.y = self.x + self.dx, self.y + self.dy
        if not 1 <= self.x <= 14:
            self.dx, self.x = -self.dx, float(np.clip(self.x, 1, 14))
        if self.y < 1:
            self.dy, self.y = -self.dy, 1.0
        missed, reward = False, 0.0
        if self.y >= 14:
            missed = abs(self.x - self.paddle) > 3
            reward, self.y, self.dy = (-1.0 if missed else 1.0), 14.0, -self.dy
        return self._frame(), reward, missed, False, {}

    def _frame(self) -> Any:
        frame = np.full((16, 16, 1), 20, np.uint8)
        frame[15, self.paddle - 2 : self.paddle + 3] = 150
        frame[round(self.y), round(self.x)] = 255
        return frame


class Reach(gym.Env[Any, Any]):
    """A point is pushed towards a goal; observations are a Dict with goals, and no episode terminates."""

    action_space = spaces.Box(-1, 1, (2,), np.float32)
    observation_space = spaces.Dict({
        "observation": spaces.Box(-np.inf, np.inf, (4,), np.float32),
        "achieved_goal": spaces.Box(-np.inf, np.inf, (2,), np.float32),
        "desired_goal": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    })  # fmt: skip

    def __init__(self, reward: Callable[..., Any]) -> None:
        self.reward = reward

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at, self.speed = self.np_random.uniform(-1, 1, 2), np.zeros(2)
        self.goal = self.np_random.uniform(-1, 1, 2)
        return self._look(), {}

    def step(self, action: Any) -> Any:
        self.speed = 0.8 * self.speed + 0.08 * np.clip(action, -1, 1)
        self.at = self.at + self.speed
        obs = self._look()
        return obs, float(self.reward(obs["achieved_goal"], obs["desired_goal"])), False, False, {}

    def _look(self) -> Any:
        at = self.at.astype(np.float32)
        state = np.concatenate([at, self.speed]).astype(np.float32)
        return {"observation": state, "achieved_goal": at, "desired_goal": self.goal.astype(np.float32)}


def sparse(achieved: Any, desired: Any, info: Any = None) -> Any:
    """The reward of a goal: 0 near it and -1 elsewhere, ``[...]``."""
    return -(np.linalg.norm(achieved - desired, axis=-1) > 0.25).astype(np.float32)


def dense(achieved: Any, desired: Any, info: Any = None) -> Any:
    """The reward of a goal: minus the distance, ``[...]``."""
    return -np.linalg.norm(achieved - desired, axis=-1).astype(np.float32)


class Rooms(gym.Env[Any, Any]):
    """A grid of 6 x 6 with a wall; a step into a wall changes nothing. Each episode starts in the same corner."""

    observation_space = spaces.Box(0, 1, (2,), np.float32)
    action_space = spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at = (0, 0)
        return self._look(), {}

    def step(self, action: Any) -> Any:
        dx, dy = ((1, 0), (-1, 0), (0, 1), (0, -1))[int(action)]
        x, y = self.at[0] + dx, self.at[1] + dy
        if 0 <= x < 6 and 0 <= y < 6 and not (x == 3 and y != 2):
            self.at = (x, y)
        found = self.at == (5, 5)
        return self._look(), (1.0 if found else -0.01), found, False, {}

    def _look(self) -> Any:
        return np.array(self.at, np.float32) / 5


class Bandit(gym.Env[Any, Any]):
    """Every episode has one step."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.context = self.np_random.normal(size=3).astype(np.float32)
        return self.context, {}

    def step(self, action: Any) -> Any:
        return np.zeros(3, np.float32), float(self.context[int(action)]), True, False, {}


class RandomSkip(gym.Wrapper[Any, Any, Any, Any]):
    """Repeats each action two to five times and sums the rewards."""

    def step(self, action: Any) -> Any:
        total = 0.0
        for _ in range(int(self.unwrapped.np_random.integers(2, 6))):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info


class Extra(gym.ObservationWrapper[Any, Any, Any]):
    """Adds two numbers to the observation that never change."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.observation_space = spaces.Box(-np.inf, np.inf, (env.observation_space.shape[0] + 2,), np.float32)

    def observation(self, observation: Any) -> Any:
        return np.concatenate([observation, [9.8, 0.0]]).astype(np.float32)


class Noisy(gym.RewardWrapper[Any, Any]):
    """Adds noise to each reward."""

    def reward(self, reward: Any) -> Any:
        return float(reward) + float(self.unwrapped.np_random.normal(0, 0.5))


class Signs(gym.RewardWrapper[Any, Any]):
    """Clips rewards to their signs, as DQN does."""

    def reward(self, reward: Any) -> Any:
        return float(np.sign(reward))


# Policies


def uniform(space: Any) -> Policy:
    """Actions of one env's space, uniformly."""
    if isinstance(space, spaces.Discrete):
        return lambda rng, obs: rng.integers(space.n, size=len(next(iter(_leaves(obs)))))
    return lambda rng, obs: rng.uniform(
        np.maximum(space.low, -2), np.minimum(space.high, 2), (len(next(iter(_leaves(obs)))), *space.shape)
    ).astype(np.float32)


def _often(choose: Callable[[Any], Any], other: Callable[[np.random.Generator, int], Any], share: float) -> Policy:
    """A simple rule, with some random actions."""

    def act(rng: np.random.Generator, obs: Any) -> Any:
        chosen, random = choose(obs), other(rng, len(obs))
        pick = (rng.random(len(obs)) < share).reshape(-1, *[1] * (chosen.ndim - 1))
        return np.where(pick, random, chosen)

    return act


def balance(noise: float) -> Policy:
    """CartPole: push to where the pole falls."""
    return _often(lambda o: (o[:, 2] + 0.3 * o[:, 3] > 0).astype(int), lambda rng, n: rng.integers(2, size=n), noise)


def pump(noise: float) -> Policy:
    """MountainCar: push in the direction of the speed."""
    return _often(lambda o: np.where(o[:, 1] >= 0, 2, 0), lambda rng, n: rng.integers(3, size=n), noise)


def pump_gently(noise: float) -> Policy:
    """MountainCarContinuous: the same with forces that vary."""

    def act(rng: np.random.Generator, obs: Any) -> Any:
        force = np.where(obs[:, 1] >= 0, 1.0, -1.0) * rng.uniform(0.7, 1.0, len(obs))
        return np.where(rng.random(len(obs)) < noise, rng.uniform(-1, 1, len(obs)), force)[:, None].astype(np.float32)

    return act


def swing(noise: float) -> Policy:
    """Acrobot: torque against the speed of the first link."""
    return _often(lambda o: np.where(o[:, 4] > 0, 0, 2), lambda rng, n: rng.integers(3, size=n), noise)


class Softmax:
    """CartPole: a softmax policy. Called with (obs ``[..., 4]``, action ``[...]``) it returns log_prob ``[...]``."""

    weights = np.array([[0.0, 0.0], [-0.1, 0.1], [-1.0, 1.0], [-0.3, 0.3]])

    def act(self, rng: np.random.Generator, obs: Any) -> Any:
        logits = obs.astype(np.float64) @ self.weights
        return (logits + rng.gumbel(size=logits.shape)).argmax(-1)

    def __call__(self, obs: Any, action: Any) -> Any:
        logits = np.asarray(obs, np.float64) @ self.weights
        logits = logits - logits.max(-1, keepdims=True)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        index = np.asarray(action).astype(int).reshape(log_probs.shape[:-1])[..., None]
        return np.take_along_axis(log_probs, index, -1)[..., 0].astype(np.float32)


class Gaussian:
    """A Gaussian policy of fixed width around tanh of a linear map; the env clips its actions, the log does not."""

    def __init__(self, dims: int, actions: int, width: float, scale: float) -> None:
        rng = np.random.default_rng(dims)
        self.weights, self.width, self.scale = rng.normal(0, 0.5, (dims, actions)), width, scale

    def act(self, rng: np.random.Generator, obs: Any) -> Any:
        mean = self.scale * np.tanh(obs @ self.weights)
        return (mean + self.width * rng.normal(size=mean.shape)).astype(np.float32)

    def __call__(self, obs: Any, action: Any) -> Any:
        z = (action - self.scale * np.tanh(np.asarray(obs, np.float64) @ self.weights)) / self.width
        return (-0.5 * z**2 - np.log(self.width) - 0.5 * np.log(2 * np.pi)).sum(-1).astype(np.float32)


class Critic:
    """A small fixed network: obs ``[..., D]`` -> value ``[...]`` float32."""

    def __init__(self, dims: int, scale: float = 4.0) -> None:
        rng = np.random.default_rng(dims + 100)
        self.first, self.bias, self.second = rng.normal(0, 0.6, (dims, 16)), rng.normal(0, 0.3, 16), rng.normal(size=16)
        self.scale = scale

    def __call__(self, obs: Any) -> Any:
        hidden = np.tanh(np.asarray(obs, np.float64) @ self.first + self.bias)
        return (self.scale * (hidden @ self.second) / 4 + self.scale).astype(np.float32)


# Plays


def made(name: str, limit: int | None = None, wrap: Callable[[Any], Any] | None = None, **kwargs: Any) -> Any:
    """A function that makes one env."""

    def make() -> Any:
        env = gym.make(name, max_episode_steps=limit, **kwargs)
        return env if wrap is None else wrap(env)

    return make


def limited(make: Callable[[], Any], limit: int) -> Any:
    """A function that makes an env of our own with a time limit."""
    return lambda: gym.wrappers.TimeLimit(make(), limit)


def play_same_step(makes: Sequence[Any], policy: Policy | None, T: int, seed: int = 0) -> Arrays:
    """A play under ``SAME_STEP``, stored rightly ``[T, N, ...]``; ``returned`` is what step() returned as obs."""
    envs = SyncVectorEnv(makes, autoreset_mode=AutoresetMode.SAME_STEP)
    rng = np.random.default_rng(seed)
    policy = policy or uniform(envs.single_action_space)
    steps: list[Arrays] = []
    obs, _ = envs.reset(seed=seed)
    for _ in range(T):
        action = policy(rng, obs)
        returned, reward, terminated, truncated, info = envs.step(action)
        next_obs = _map(np.array, returned)
        for n in np.flatnonzero(terminated | truncated):
            _put(next_obs, n, info["final_obs"][n])
        steps.append({"obs": obs, "action": action, "reward": reward, "terminated": terminated,
                      "truncated": truncated, "next_obs": next_obs, "returned": returned})  # fmt: skip
        obs = returned
    envs.close()
    return _stack(steps)


def _put(rows: Any, n: int, row: Any) -> None:
    if isinstance(rows, dict):
        for key, value in rows.items():
            _put(value, n, row[key])
    else:
        rows[n] = row


def play_next_step(makes: Sequence[Any], policy: Policy | None, T: int, seed: int = 0) -> tuple[Arrays, Any]:
    """All T steps of a play under ``NEXT_STEP``, and which of them the envs ignored, bool ``[T, N]``."""
    envs = SyncVectorEnv(makes, autoreset_mode=AutoresetMode.NEXT_STEP)
    rng = np.random.default_rng(seed)
    policy = policy or uniform(envs.single_action_space)
    steps, ignored, done = [], [], np.zeros(len(makes), bool)
    obs, _ = envs.reset(seed=seed)
    for _ in range(T):
        action = policy(rng, obs)
        next_obs, reward, terminated, truncated, _ = envs.step(action)
        steps.append({"obs": obs, "action": action, "reward": reward, "terminated": terminated,
                      "truncated": truncated, "next_obs": next_obs})  # fmt: skip
        ignored.append(done)
        obs, done = next_obs, terminated | truncated
    envs.close()
    return _stack(steps), np.stack(ignored)


def without_ignored(log: Arrays, ignored: Any) -> Arrays:
    """The steps that the envs did not ignore: each env's own, cut to the shortest."""
    T = int((~ignored).sum(0).min())
    return _map(lambda a: np.stack([a[:, n][~ignored[:, n]][:T] for n in range(a.shape[1])], 1), log)


def play_disabled(makes: Sequence[Any], policy: Policy | None, T: int, seed: int = 0) -> Arrays:
    """A play without autoreset: the loop resets the envs that ended, by a mask."""
    envs = SyncVectorEnv(makes, autoreset_mode=AutoresetMode.DISABLED)
    rng = np.random.default_rng(seed)
    policy = policy or uniform(envs.single_action_space)
    steps: list[Arrays] = []
    obs, _ = envs.reset(seed=seed)
    for _ in range(T):
        action = policy(rng, obs)
        next_obs, reward, terminated, truncated, _ = envs.step(action)
        steps.append({"obs": obs, "action": action, "reward": reward, "terminated": terminated,
                      "truncated": truncated, "next_obs": next_obs})  # fmt: skip
        done, obs = terminated | truncated, next_obs
        if done.any():
            obs, _ = envs.reset(options={"reset_mask": done})
    envs.close()
    return _stack(steps)


def play_reusing(makes: Sequence[Any], T: int, *, copied_late: bool, seed: int = 0) -> Arrays:
    """A play whose vector env returns its own buffer each time, without copies.

    The loop keeps the buffer itself, or copies it after the step: then obs already holds the next observation.
    """
    envs = SyncVectorEnv(makes, autoreset_mode=AutoresetMode.SAME_STEP, copy=False)
    rng = np.random.default_rng(seed)
    policy = uniform(envs.single_action_space)
    steps: list[Arrays] = []
    obs, _ = envs.reset(seed=seed)
    for _ in range(T):
        action = policy(rng, obs)
        next_obs, reward, terminated, truncated, _ = envs.step(action)
        stored = (obs.copy(), next_obs.copy()) if copied_late else (obs, next_obs)
        steps.append({"obs": stored[0], "action": action, "reward": reward, "terminated": terminated,
                      "truncated": truncated, "next_obs": stored[1]})  # fmt: skip
        obs = next_obs
    envs.close()
    return _stack(steps)


SOFTMAX = Softmax()
TORQUE = Gaussian(3, 1, 0.7, 1.5)
GAIT = Gaussian(17, 6, 0.4, 0.5)
HOPS = Gaussian(11, 3, 0.6, 0.3)

_PLAYS: dict[str, Callable[[], Arrays]] = {
    "cartpole": lambda: play_same_step([made("CartPole-v1")] * 4, None, 400),
    "cartpole-one": lambda: one(play_same_step([made("CartPole-v1")], None, 800, 1)),
    "cartpole-eight": lambda: play_same_step([made("CartPole-v1")] * 8, balance(0.5), 400, 2),
    "cartpole-limit": lambda: play_same_step([made("CartPole-v1", 30)] * 4, SOFTMAX.act, 600, 3),
    "cartpole-ppo": lambda: play_same_step([made("CartPole-v1")] * 4, SOFTMAX.act, 512, 4),
    "pendulum": lambda: play_same_step([made("Pendulum-v1")] * 2, None, 1000),
    "pendulum-one": lambda: one(play_same_step([made("Pendulum-v1")], None, 1200, 1)),
    "pendulum-eight": lambda: play_same_step([made("Pendulum-v1")] * 8, None, 450, 2),
    "pendulum-ppo": lambda: play_same_step([made("Pendulum-v1")] * 4, TORQUE.act, 600, 3),
    "acrobot": lambda: play_same_step([made("Acrobot-v1")] * 4, swing(0.2), 400),
    "mountaincar": lambda: play_same_step([made("MountainCar-v0")] * 4, pump(0.4), 800),
    "mountaincar-limit": lambda: play_same_step([made("MountainCar-v0")] * 2, None, 900, 1),
    "mountaincar-continuous": lambda: play_same_step([made("MountainCarContinuous-v0")] * 4, pump_gently(0.1), 600),
    "frozenlake": lambda: play_same_step([made("FrozenLake-v1", is_slippery=False)] * 4, None, 500),
    "taxi": lambda: play_same_step([made("Taxi-v4")] * 4, None, 500),
    "ball": lambda: play_same_step([limited(Ball, 300)] * 4, None, 400),
    "reach": lambda: play_same_step([limited(lambda: Reach(sparse), 25)] * 4, None, 400),
    "reach-dense": lambda: play_same_step([limited(lambda: Reach(dense), 25)] * 4, None, 400, 1),
    "rooms": lambda: play_same_step([limited(Rooms, 200)] * 4, None, 500),
    "hopper": lambda: play_same_step([made("Hopper-v5")] * 2, None, 500),
    "hopper-ppo": lambda: play_same_step([made("Hopper-v5")] * 2, HOPS.act, 400, 1),
    "cheetah": lambda: play_same_step([made("HalfCheetah-v5", 100)] * 4, None, 450),
    "cheetah-ppo": lambda: play_same_step([made("HalfCheetah-v5", 100)] * 2, GAIT.act, 512, 1),
    "inverted-pendulum": lambda: play_same_step([made("InvertedPendulum-v5")] * 4, None, 400),
    "reacher": lambda: play_same_step([made("Reacher-v5")] * 4, None, 400),
}
_MUJOCO = {"hopper", "hopper-ppo", "cheetah", "cheetah-ppo", "inverted-pendulum", "reacher"}
_SPACES = {
    "cartpole": "CartPole-v1", "pendulum": "Pendulum-v1", "cheetah": "HalfCheetah-v5", "acrobot": "Acrobot-v1"
}  # fmt: skip


@cache
def _play(name: str) -> Arrays:
    return _PLAYS[name]()


def play(name: str) -> Arrays:
    """A copy of a play; it is made once."""
    return _map(np.array, _play(name))


def spaces_of(name: str) -> dict[str, Any]:
    """The spaces of one env of this play."""
    env = gym.make(_SPACES[name])
    return {"obs": env.observation_space, "action": env.action_space}


# What PPO stores


def gae(log: Arrays, value: Any, next_value: Any, *, flows: bool = False, bootstraps: bool = True) -> Any:
    """Advantages ``[T, ...]``: A[t] = δ[t] + γλ (1 - done[t]) A[t+1], δ[t] = r[t] + γ (1 - terminated[t]) V' - V.

    ``flows``: nobody looks at the ends, and V' is the value of the next row. ``bootstraps`` False: V' is 0 at a time
    limit too.
    """
    done = log["terminated"] | log["truncated"]
    alive = np.ones(done.shape) if flows else ~log["terminated"] if bootstraps else ~done
    if flows:
        next_value = np.concatenate([value[1:], next_value[-1:]])
    delta = log["reward"] + GAMMA * next_value * alive - value
    found, running = np.zeros(delta.shape), np.zeros(delta.shape[1:])
    for t in reversed(range(len(delta))):
        running = delta[t] + GAMMA * LAMBDA * running * (1.0 if flows else ~done[t])
        found[t] = running
    return found.astype(np.float32)


def rollout(played: Arrays, policy: Any, critic: Any, **kwargs: Any) -> Arrays:
    """A rollout of PPO, with its log-probabilities, values, advantages and returns."""
    value, next_value = critic(played["obs"]), critic(played["next_obs"])
    advantage = gae(played, value, next_value, **kwargs)
    log_prob = policy(played["obs"], played["action"])
    return log_of(played, value=value, log_prob=log_prob, advantage=advantage, **{"return": advantage + value})


_PPO: dict[str, tuple[Any, Any]] = {
    "cartpole-ppo": (SOFTMAX, Critic(4, 10.0)),
    "pendulum-ppo": (TORQUE, Critic(3, 10.0)),
    "cheetah-ppo": (GAIT, Critic(17)),
    "cartpole-limit": (SOFTMAX, Critic(4, 10.0)),
    "hopper-ppo": (HOPS, Critic(11)),
}


def told(what: str) -> dict[str, dict[str, bool]]:
    """Two variants: the audit is told something, or has to do without."""
    return {f"{what}_known": {"known": True}, f"{what}_unknown": {"known": False}}


# The bugs

BUGS: list[Case] = []
"""Sets with one mistake each."""


def bug(about: str, *plays: str, **variants: Any) -> Callable[[Callable[..., Planted]], Callable[..., Planted]]:
    """Add the mistake that a function plants to ``BUGS``, once for each of these plays and variants."""

    def add(plant: Callable[..., Planted]) -> Callable[..., Planted]:
        def case(suffix: str, arguments: tuple[Any, ...], known: dict[str, Any]) -> None:
            @cache
            def planted() -> Planted:
                return plant(*arguments, **known).check()

            def make(field: int) -> Made:
                return _map(np.array, planted()[field]), dict(planted().kwargs)

            name = "-".join([plant.__name__.replace("_", "-"), *([suffix] if suffix else [])])
            BUGS.append(Case(name, about, lambda: make(0), lambda: make(1), lambda: np.array(planted().rows)))

        for name in plays or ("",):
            if name in _MUJOCO and not MUJOCO:
                continue
            for variant, known in (variants or {"": {}}).items():
                suffix = "-".join(part for part in (name, variant.replace("_", "-")) if part)
                case(suffix, (name,) if name else (), known)
        return plant

    return add


@bug("under SAME_STEP the reset observation is stored as the final one", "cartpole", "pendulum", "hopper", "ball")
def reset_as_final(name: str) -> Planted:
    played = play(name)
    return Planted(log_of(played, next_obs=played["returned"]), log_of(played), ended(played))


@bug(
    "under NEXT_STEP the step that the env ignores is stored",
    cartpole={"makes": [made("CartPole-v1")] * 4},
    pendulum={"makes": [made("Pendulum-v1")] * 2, "T": 900},
    acrobot={"makes": [made("Acrobot-v1", 60)] * 4},
)
def ignored_step_stored(makes: Any, T: int = 400) -> Planted:
    log, ignored = play_next_step(makes, None, T, 5)
    return Planted(log, without_ignored(log, ignored), ignored)


def _some_next_obs_is_obs(name: str, share: float) -> Planted:
    played = play(name)
    shape = played["reward"].shape
    rows = np.zeros(shape, bool)
    rows.flat[np.random.default_rng(6).permutation(rows.size)[: max(1, int(share * rows.size))]] = True
    wrong = log_of(played)
    _map(lambda obs, next_obs: next_obs.__setitem__(rows, obs[rows]), wrong["obs"], wrong["next_obs"])
    return Planted(wrong, log_of(played), rows)


@bug("next_obs is obs in 2 % of the rows", "pendulum", "hopper")
def next_obs_is_obs_in_2_percent(name: str) -> Planted:
    return _some_next_obs_is_obs(name, 0.02)


@bug("next_obs is obs in 10 % of the rows", "cartpole", "acrobot")
def next_obs_is_obs_in_10_percent(name: str) -> Planted:
    return _some_next_obs_is_obs(name, 0.1)


@bug("next_obs is obs in 60 % of the rows", "mountaincar", "reacher")
def next_obs_is_obs_in_60_percent(name: str) -> Planted:
    return _some_next_obs_is_obs(name, 0.6)


@bug("next_obs is obs in all rows", "acrobot", "cheetah")
def next_obs_is_obs_in_all_rows(name: str) -> Planted:
    return _some_next_obs_is_obs(name, 1.0)


@bug("obs is normalised by running moments, next_obs is raw", "pendulum", "cheetah")
def only_obs_normalised(name: str) -> Planted:
    played = play(name)
    obs, next_obs = played["obs"].astype(np.float64), played["next_obs"].astype(np.float64)
    mean, scale = obs.mean((0, 1)), obs.std((0, 1)) + 1e-4

    def normalised(x: Any) -> Any:
        return np.clip((x - mean) / scale, -10, 10).astype(np.float32)

    right = log_of(played, obs=normalised(obs), next_obs=normalised(next_obs))
    return Planted(right | {"next_obs": next_obs.astype(np.float32)}, right, everywhere(played))


@bug("obs is divided by 255, next_obs is not", "ball")
def only_obs_divided(name: str) -> Planted:
    played = play(name)
    right = log_of(played, obs=played["obs"] / np.float32(255), next_obs=played["next_obs"] / np.float32(255))
    return Planted(right | {"next_obs": played["next_obs"].astype(np.float32)}, right, everywhere(played))


@bug("rows in random order are stored as if they were in time order, and advantages computed on them",
     "cartpole-ppo", "pendulum-ppo", with_next_obs={"keep": True}, without_next_obs={"keep": False})  # fmt: skip
def rows_shuffled(name: str, keep: bool) -> Planted:
    played = play(name)
    policy, critic = _PPO[name]
    order = np.random.default_rng(7).permutation(played["reward"].size)
    shuffled = _map(lambda a: a.reshape(-1, *a.shape[2:])[order].reshape(a.shape), played)
    value = critic(shuffled["obs"])
    following = np.concatenate([value[1:], critic(shuffled["next_obs"])[-1:]])
    advantage = gae(shuffled, value, following)
    wrong = rollout(shuffled, policy, critic) | {"advantage": advantage, "return": advantage + value}
    right = rollout(played, policy, critic)
    if not keep:
        wrong, right = (log_of(log, without=["next_obs"]) for log in (wrong, right))
    return Planted(wrong, right, everywhere(played), share=0.95)


@bug("whole transitions in random order, presented in time order", "acrobot", "cheetah")
def transitions_shuffled(name: str) -> Planted:
    played = play(name)
    order = np.random.default_rng(8).permutation(len(played["reward"]))
    return Planted(_map(lambda a: a[order], log_of(played)), log_of(played), everywhere(played), share=0.95)


@bug("obs and next_obs were shuffled with different orders", "cartpole-one", "cheetah", "reacher")
def shuffled_apart(name: str) -> Planted:
    played, rng = play(name), np.random.default_rng(9)
    first, second = (rng.permutation(len(played["reward"])) for _ in range(2))
    wrong = _map(lambda a: a[first], log_of(played)) | {"next_obs": played["next_obs"][second]}
    return Planted(wrong, log_of(played), everywhere(played), share=0.95)


_NONLINEAR = ("pendulum", "acrobot", "mountaincar-continuous")


def _late(values: Any, first: Any = 0) -> Any:
    return np.concatenate([np.full_like(values[:1], first), values[:-1]])


def _early(values: Any, last: Any = 0) -> Any:
    return np.concatenate([values[1:], np.full_like(values[:1], last)])


@bug("each reward is stored with the next row", *_NONLINEAR, "cheetah")
def rewards_late(name: str) -> Planted:
    played = play(name)
    reward = _late(played["reward"])
    return Planted(log_of(played, reward=reward), log_of(played), reward != played["reward"])


@bug("each reward is stored with the row before", *_NONLINEAR, "ball")
def rewards_early(name: str) -> Planted:
    played = play(name)
    reward = _early(played["reward"])
    return Planted(log_of(played, reward=reward), log_of(played), reward != played["reward"])


_REUSED: dict[str, Any] = {
    "cartpole": {"makes": [made("CartPole-v1")] * 4},
    "acrobot": {"makes": [made("Acrobot-v1", 60)] * 4},
    **({"cheetah": {"makes": [made("HalfCheetah-v5", 100)] * 2}} if MUJOCO else {}),
}


def _reused(makes: Any, copied_late: bool) -> Planted:
    played = play_same_step(makes, None, 400, 10)
    wrong = play_reusing(makes, 400, copied_late=copied_late, seed=10)
    return Planted(wrong, log_of(played), everywhere(played), share=0.95)


@bug("obs is stored after the step from a buffer that the env reuses: it is next_obs", **_REUSED)
def obs_stored_after_the_step(makes: Any) -> Planted:
    return _reused(makes, True)


@bug("all rows hold the one array that the env reuses, with its last content", **_REUSED)
def all_rows_are_the_last(makes: Any) -> Planted:
    return _reused(makes, False)


@bug("the episode's return so far is stored as the reward", "cartpole-one", "pendulum", "cheetah")
def running_sums(name: str) -> Planted:
    played = play(name)
    reward, done = played["reward"].copy(), ended(played)
    for t in range(1, len(reward)):
        reward[t] += np.where(done[t - 1], 0, reward[t - 1])
    return Planted(log_of(played, reward=reward), log_of(played), steps_in_episode(played) > 0)


@bug("one env of eight hangs: its rows never change", "cartpole-eight", "pendulum-eight",
     from_the_start={"start": 0}, halfway={"start": 200})  # fmt: skip
def dead_env(name: str, start: int) -> Planted:
    played, n = play(name), 3
    wrong = log_of(played)
    for key in ("obs", "next_obs", "reward"):
        wrong[key][start:, n] = wrong["obs" if key == "next_obs" else key][start, n]
    for key in ("terminated", "truncated"):
        wrong[key][start:, n] = False
    rows = everywhere(played, False)
    rows[start:, n] = True
    return Planted(wrong, log_of(played), rows, share=0.95)


@bug("all rewards of one env of eight are zero", "cartpole-eight", "pendulum-eight")
def one_env_without_rewards(name: str) -> Planted:
    played = play(name)
    wrong, rows = log_of(played), everywhere(played, False)
    wrong["reward"][:, 5], rows[:, 5] = 0, True
    return Planted(wrong, log_of(played), rows)


def _episode_ends(played: Arrays) -> Any:
    """The last row of each row's episode, as far as the log goes, int ``[T, N]``."""
    done = ended(played)
    found = np.zeros(done.shape, int)
    last = np.full(done.shape[1:], len(done) - 1)
    for t in reversed(range(len(done))):
        last = np.where(done[t], t, last)
        found[t] = last
    return found


def relabelled(played: Arrays, reward: Any, choose: Callable[[np.random.Generator, Any, Any], Any]) -> Arrays:
    """Hindsight: most rows get the goal achieved after row ``choose(rng, t, end of the episode)``, and its reward."""
    rng, log = np.random.default_rng(11), log_of(played)
    T, N = played["reward"].shape
    t, n = np.meshgrid(np.arange(T), np.arange(N), indexing="ij")
    future = np.minimum(choose(rng, t, _episode_ends(played)), T - 1)
    take = rng.random((T, N)) < 0.8
    goal = np.where(take[..., None], played["next_obs"]["achieved_goal"][future, n], played["obs"]["desired_goal"])
    log["obs"]["desired_goal"], log["next_obs"]["desired_goal"] = goal, goal.copy()
    log["reward"] = reward(log["next_obs"]["achieved_goal"], goal).astype(played["reward"].dtype)
    return log


def later_in_episode(rng: np.random.Generator, t: Any, end: Any) -> Any:
    """The strategy "future"."""
    return rng.integers(t, end + 1)


_REWARDS = {"reach": sparse, "reach-dense": dense}


@bug("rows got other goals and kept the rewards of the old ones", "reach", "reach-dense",
     **told("function"))  # fmt: skip
def old_rewards_of_new_goals(name: str, known: bool) -> Planted:
    played, reward = play(name), _REWARDS[name]
    right = relabelled(played, reward, later_in_episode)
    rows = right["reward"] != played["reward"]
    return Planted(right | {"reward": played["reward"]}, right, rows, {"reward_fn": reward} if known else {})


@bug("hindsight takes its goals from the rows that follow, also those of the next episode", "reach", "reach-dense")
def goals_of_the_next_episode(name: str) -> Planted:
    played, reward = play(name), _REWARDS[name]
    wrong = relabelled(played, reward, lambda rng, t, end: t + rng.integers(1, 25, t.shape))
    right = relabelled(played, reward, lambda rng, t, end: np.minimum(t + rng.integers(1, 25, t.shape), end))
    rows = (wrong["obs"]["desired_goal"] != right["obs"]["desired_goal"]).any(-1)
    assert rows.mean() > 0.2
    return Planted(wrong, right, rows, {"reward_fn": reward})


@bug("each row stores the goal of the episode before, because the loop reads the goal too early", "reach-dense")
def goal_of_the_last_episode(name: str) -> Planted:
    played = play(name)
    wrong, right = log_of(played), log_of(played)
    for n in range(played["reward"].shape[1]):
        goal = played["obs"]["desired_goal"][0, n]
        for t in range(len(played["reward"])):
            for key in ("obs", "next_obs"):
                wrong[key]["desired_goal"][t, n] = goal
            if ended(played)[t, n]:
                goal = played["obs"]["desired_goal"][t, n]
    rows = (wrong["obs"]["desired_goal"] != right["obs"]["desired_goal"]).any(-1)
    return Planted(wrong, right, rows, {"reward_fn": dense})


@bug("the env reset itself at time limits and nobody kept the flag, nor next_obs", "pendulum", "mountaincar-limit")
def unflagged_resets(name: str) -> Planted:
    played = play(name)
    right = log_of(played, without=["next_obs"])
    return Planted(right | {"truncated": everywhere(played, False)}, right, played["truncated"])


@bug("the env reset itself at terminals, and all flags are False", "cartpole-one", "hopper")
def unflagged_terminals(name: str) -> Planted:
    played = play(name)
    right = log_of(played, without=["next_obs"])
    never = everywhere(played, False)
    return Planted(right | {"terminated": never, "truncated": never.copy()}, right, ended(played))


@bug("each action is stored with the next row", "cartpole", "pendulum", "cheetah", "mountaincar-continuous")
def actions_late(name: str) -> Planted:
    played = play(name)
    return Planted(log_of(played, action=_late(played["action"])), log_of(played), everywhere(played), share=0.4)


@bug("each action is stored with the row before", "cartpole", "pendulum", "cheetah", "taxi")
def actions_early(name: str) -> Planted:
    played = play(name)
    return Planted(log_of(played, action=_early(played["action"])), log_of(played), everywhere(played), share=0.4)


@bug("each action is stored with the next row, its log_prob is not", "cartpole-ppo", "pendulum-ppo")
def actions_late_with_policy(name: str) -> Planted:
    played, (policy, critic) = play(name), _PPO[name]
    right = rollout(played, policy, critic)
    wrong = right | {"action": _late(played["action"])}
    return Planted(wrong, right, everywhere(played), {"policy": policy}, share=0.2)


@bug("log_prob is that of an action drawn a second time", "cartpole-ppo", "pendulum-ppo",
     **told("policy"))  # fmt: skip
def log_prob_of_another_action(name: str, known: bool) -> Planted:
    played, (policy, critic) = play(name), _PPO[name]
    right = rollout(played, policy, critic)
    again = policy.act(np.random.default_rng(12), played["obs"])
    log_prob = policy(played["obs"], again)
    rows = log_prob != right["log_prob"]
    assert rows.mean() > 0.2
    return Planted(right | {"log_prob": log_prob}, right, rows, {"policy": policy} if known else {})


@bug("each value is that of the observation after the step", "cartpole-ppo", "pendulum-ppo",
     **told("critic"))  # fmt: skip
def values_early(name: str, known: bool) -> Planted:
    played, (policy, critic) = play(name), _PPO[name]
    right = rollout(played, policy, critic)
    value = critic(played["returned"])
    wrong = right | {"value": value}
    return Planted(wrong, right, value != right["value"], {"critic": critic} if known else {})


def stacked(played: Arrays, size: int, cleared: bool) -> Arrays:
    """Stacks of the last observations, ``[T, N, size, ...]``: filled with the reset's one, or running over ends."""
    steps, obs = steps_in_episode(played), played["obs"]
    T, n = len(obs), np.arange(obs.shape[1])
    t = np.arange(T)[:, None]

    def back(k: int) -> Any:
        return obs[np.maximum(t - np.minimum(k, steps) if cleared else t - k, 0), n]

    frames = [back(k) for k in reversed(range(size))]
    following = [*(back(k) for k in reversed(range(size - 1))), played["next_obs"]]
    return log_of(played, obs=np.stack(frames, 2), next_obs=np.stack(following, 2))


@bug("the stack of frames is not cleared at a reset", "ball", "cartpole", "hopper")
def stacks_over_ends(name: str) -> Planted:
    played = play(name)
    wrong, right = stacked(played, 4, cleared=False), stacked(played, 4, cleared=True)
    started = np.arange(len(played["reward"]))[:, None] > steps_in_episode(played)  # not the first episode
    rows = (steps_in_episode(played) < 3) & started
    return Planted(wrong, right, rows, share=0.9)


@bug("time limits are stored as terminals", "pendulum", "mountaincar-limit",
     **told("limit"))  # fmt: skip
def limits_as_terminals(name: str, known: bool) -> Planted:
    played = play(name)
    wrong = log_of(played, terminated=ended(played), truncated=everywhere(played, False))
    return Planted(wrong, log_of(played), played["truncated"], {"max_episode_steps": 200} if known else {})


@bug("one flag for both ends: done at the time limit is stored as terminated", "cheetah", "reach",
     **told("limit"))  # fmt: skip
def done_as_terminated(name: str, known: bool) -> Planted:
    played = play(name)
    wrong = log_of(played, terminated=ended(played), truncated=everywhere(played, False))
    limit = {"cheetah": 100, "reach": 25}[name]
    return Planted(wrong, log_of(played), played["truncated"], {"max_episode_steps": limit} if known else {})


@bug("time limits are stored as terminals beside real terminals", "cartpole-limit",
     **told("limit"))  # fmt: skip
def limits_among_terminals(name: str, known: bool) -> Planted:
    played = play(name)
    wrong = log_of(played, terminated=ended(played), truncated=everywhere(played, False))
    return Planted(wrong, log_of(played), played["truncated"], {"max_episode_steps": 30} if known else {})


def _flags(name: str, move: Callable[[Any], Any], keep: bool) -> Planted:
    played = play(name)
    right = log_of(played, without=[] if keep else ["next_obs"])
    wrong = right | {key: move(played[key]) for key in ("terminated", "truncated")}
    rows = (wrong["terminated"] != right["terminated"]) | (wrong["truncated"] != right["truncated"])
    return Planted(wrong, right, rows)


_FLAGS: dict[str, Any] = {"with_next_obs": {"keep": True}, "without_next_obs": {"keep": False}}


@bug("the flags of an end are stored with the next row", "cartpole", "pendulum", "hopper", **_FLAGS)
def flags_late(name: str, keep: bool) -> Planted:
    return _flags(name, _late, keep)


@bug("the flags of an end are stored with the row before", "cartpole", "acrobot", **_FLAGS)
def flags_early(name: str, keep: bool) -> Planted:
    return _flags(name, _early, keep)


@bug("terminated and truncated are swapped", "cartpole-limit", "cartpole-one", "mountaincar",
     **told("limit"))  # fmt: skip
def flags_swapped(name: str, known: bool) -> Planted:
    played = play(name)
    wrong = log_of(played, terminated=played["truncated"], truncated=played["terminated"])
    limit = {"cartpole-limit": 30, "cartpole-one": 500, "mountaincar": 200}[name]
    return Planted(
        wrong,
        log_of(played),
        played["terminated"] != played["truncated"],
        {"max_episode_steps": limit} if known else {},
    )


@bug("advantages flow over the ends of episodes", "cartpole-ppo", "cartpole-limit", "hopper-ppo",
     **told("critic"))  # fmt: skip
def advantages_over_ends(name: str, known: bool) -> Planted:
    played, (policy, critic) = play(name), _PPO[name]
    right, wrong = rollout(played, policy, critic), rollout(played, policy, critic, flows=True)
    rows = wrong["advantage"] != right["advantage"]
    assert rows[ended(played)].all()
    return Planted(wrong, right, rows, {"critic": critic, "gamma": GAMMA} if known else {"gamma": GAMMA})


@bug("GAE takes a time limit for a terminal", "pendulum-ppo", "cheetah-ppo",
     **told("critic"))  # fmt: skip
def no_bootstrap_at_limits(name: str, known: bool) -> Planted:
    played, (policy, critic) = play(name), _PPO[name]
    right, wrong = rollout(played, policy, critic), rollout(played, policy, critic, bootstraps=False)
    rows = wrong["advantage"] != right["advantage"]
    assert rows[played["truncated"]].all()
    return Planted(wrong, right, rows, {"critic": critic, "gamma": GAMMA} if known else {"gamma": GAMMA})


@bug("every twentieth row is written twice", "pendulum-one", "cheetah", "cartpole-one")
def rows_written_twice(name: str) -> Planted:
    right = log_of(play(name))
    T = len(right["reward"])
    index = np.sort(np.concatenate([np.arange(T), np.arange(10, T, 20)]))
    second = np.concatenate([[False], index[1:] == index[:-1]])
    rows = np.broadcast_to(
        second.reshape(-1, *[1] * (right["reward"].ndim - 1)), (len(index), *right["reward"].shape[1:])
    )
    return Planted(_map(lambda a: a[index], right), right, rows)


@bug("a worker sends its last 64 steps twice", "mountaincar", "hopper")
def chunk_written_twice(name: str) -> Planted:
    right = log_of(play(name))
    T, N = right["reward"].shape
    index = np.concatenate([np.arange(264), np.arange(200, T)])
    rows = np.zeros((len(index), N), bool)
    rows[264:328] = True
    return Planted(_map(lambda a: a[index], right), right, rows)


@bug("one row has a NaN", "cartpole-one", "pendulum", "acrobot",
     obs={"field": "obs"}, reward={"field": "reward"}, action={"field": "action"})  # fmt: skip
def one_nan(name: str, field: str) -> Planted:
    played = play(name)
    wrong, right, rows = log_of(played), log_of(played), everywhere(played, False)
    if wrong[field].dtype.kind == "i":
        wrong[field], right[field] = wrong[field].astype(np.float32), right[field].astype(np.float32)
    rows[137] = rows.ndim == 1
    if rows.ndim == 2:
        rows[137, 1] = True
    wrong[field][rows] = np.nan
    return Planted(wrong, right, rows)


@bug("frames of -1 to 1 are cast to uint8 without being scaled back: negative numbers wrap around", "ball")
def frames_wrapped(name: str) -> Planted:
    played = play(name)

    def cast(frames: Any) -> Any:
        return np.round((frames / 127.5 - 1) * 127).astype(np.int64).astype(np.uint8)

    wrong = log_of(played, obs=cast(played["obs"]), next_obs=cast(played["next_obs"]))
    return Planted(wrong, log_of(played), everywhere(played))


@bug("float observations are written into a uint8 array: negative numbers wrap around", "cartpole", "pendulum",
     **told("spaces"))  # fmt: skip
def floats_in_bytes(name: str, known: bool) -> Planted:
    played = play(name)

    def cast(obs: Any) -> Any:
        return np.trunc(obs).astype(np.int64).astype(np.uint8)

    wrong = log_of(played, obs=cast(played["obs"]), next_obs=cast(played["next_obs"]))
    return Planted(wrong, log_of(played), everywhere(played), {"spaces": spaces_of(name)} if known else {})


@bug("each env's row has the action of the next env", "pendulum-eight", "cartpole", "cheetah")
def actions_of_the_next_env(name: str) -> Planted:
    played = play(name)
    action = np.roll(played["action"], -1, axis=1)
    return Planted(log_of(played, action=action), log_of(played), everywhere(played), share=0.4)


@bug("each reward was multiplied by gamma to the power of its step", "cartpole-eight", "pendulum", "inverted-pendulum")
def rewards_discounted(name: str) -> Planted:
    played = play(name)
    steps = steps_in_episode(played)
    reward = played["reward"] * GAMMA**steps
    return Planted(log_of(played, reward=reward), log_of(played), steps > 0, share=0.8)


@bug("two envs append to one list, so their episodes alternate row by row", "cartpole", "pendulum", "cheetah",
     **_FLAGS)  # fmt: skip
def two_envs_in_one_stream(name: str, keep: bool) -> Planted:
    right = log_of(play(name), without=[] if keep else ["next_obs"])
    T = len(right["reward"])
    wrong = _map(lambda a: a[:, :2].reshape(2 * T, *a.shape[2:]), right)
    right = _map(lambda a: np.concatenate([a[:, 0], a[:, 1]]), right)
    right["truncated"][T - 1] = True  # where the second env's rows begin
    return Planted(wrong, right, np.ones(2 * T, bool), share=0.9)


# Right sets

RIGHT: list[Case] = []
"""Sets without a mistake."""


def right(about: str, *plays: str, **variants: Any) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """Add what a function makes to ``RIGHT``, once for each of these plays and variants."""

    def add(make: Callable[..., Made]) -> Callable[..., Made]:
        def case(suffix: str, arguments: tuple[Any, ...], known: dict[str, Any]) -> None:
            name = "-".join([make.__name__.replace("_", "-"), *([suffix] if suffix else [])])
            made_once = cache(lambda: make(*arguments, **known))

            def copied() -> Made:
                source, kwargs = made_once()
                return (_map(np.array, source) if isinstance(source, dict) else source), dict(kwargs)

            RIGHT.append(Case(name, about, copied))

        for name in plays or ("",):
            if name in _MUJOCO and not MUJOCO:
                continue
            for variant, known in (variants or {"": {}}).items():
                suffix = "-".join(part for part in (name, variant.replace("_", "-")) if part)
                case(suffix, (name,) if name else (), known)
        return make

    return add


def made_env(makes: Sequence[Any], T: int = 400, policy: Policy | None = None, seed: int = 20) -> Arrays:
    """What a right loop stores of these envs."""
    return log_of(play_same_step(makes, policy, T, seed))


@right("final observations stored under SAME_STEP", *(name for name in _PLAYS if not name.endswith("-ppo")))
def same_step(name: str) -> Made:
    return log_of(play(name)), {}


@right("without next_obs, and final_obs at ends only", "cartpole", "pendulum", "acrobot")
def final_obs(name: str) -> Made:
    played = play(name)
    final = np.where(ended(played)[..., None], played["next_obs"], 0)
    return log_of(played, without=["next_obs"], final_obs=final), {}


@right("no observation after a step is stored, and every end has its flag", "cartpole-limit", "pendulum", "taxi")
def no_next_obs(name: str) -> Made:
    return log_of(play(name), without=["next_obs"]), {}


@right("the limit of the env is known, and kept", pendulum={"name": "pendulum", "limit": 200},
       cartpole={"name": "cartpole-limit", "limit": 30}, mountaincar={"name": "mountaincar", "limit": 200})  # fmt: skip
def limit_known(name: str, limit: int) -> Made:
    return log_of(play(name)), {"max_episode_steps": limit}


@right("the spaces are known, and kept", "cartpole", "pendulum", "acrobot")
def spaces_known(name: str) -> Made:
    return log_of(play(name)), {"spaces": spaces_of(name)}


_MODES: dict[str, Any] = {
    "cartpole": {"makes": [made("CartPole-v1")] * 4, "T": 400},
    "pendulum": {"makes": [made("Pendulum-v1")] * 2, "T": 900},
    "frozenlake": {"makes": [made("FrozenLake-v1")] * 4, "T": 400},
    **({"hopper": {"makes": [made("Hopper-v5")] * 2, "T": 400}} if MUJOCO else {}),
}


@right("the steps that NEXT_STEP ignores are left out", **_MODES)
def next_step(makes: Any, T: int) -> Made:
    return without_ignored(*play_next_step(makes, None, T, 21)), {}


@right("the loop resets the envs itself", **_MODES)
def disabled(makes: Any, T: int) -> Made:
    return play_disabled(makes, None, T, 22), {}


@right("one env, in a loop of its own", cartpole={"make": made("CartPole-v1")}, taxi={"make": made("Taxi-v4")},
       rooms={"make": limited(Rooms, 100)}, pendulum={"make": made("Pendulum-v1")})  # fmt: skip
def one_env(make: Any) -> Made:
    env, steps = make(), []
    act, rng = uniform(env.action_space), np.random.default_rng(23)
    obs, _ = env.reset(seed=23)
    for _ in range(700):
        action = act(rng, np.asarray(obs)[None])[0]
        next_obs, reward, terminated, truncated, _ = env.step(action)
        steps.append({"obs": obs, "action": action, "reward": reward, "terminated": terminated,
                      "truncated": truncated, "next_obs": next_obs})  # fmt: skip
        obs = env.reset()[0] if terminated or truncated else next_obs
    return _stack(steps), {}


@right("some numbers of the observation never change", cartpole={"make": made("CartPole-v1", wrap=Extra)},
       pendulum={"make": made("Pendulum-v1", wrap=Extra)})  # fmt: skip
def constant_dimensions(make: Any) -> Made:
    return made_env([make] * 4), {}


@right("states repeat, and steps into walls or of no effect change nothing",
       frozenlake={"makes": [made("FrozenLake-v1")] * 8}, rooms={"makes": [limited(Rooms, 60)] * 2},
       taxi={"makes": [made("Taxi-v4", 50)] * 8})  # fmt: skip
def repeated_states(makes: Any) -> Made:
    return made_env(makes), {}


@right("an agent that mostly stands still at a wall", one={"N": 1}, eight={"N": 8})
def bumping(N: int) -> Made:
    act = _often(lambda o: np.full(len(o), 1), lambda rng, n: rng.integers(4, size=n), 0.4)
    log = made_env([limited(Rooms, 100)] * N, 400, act)
    return (one(log) if N == 1 else log), {}


@right("episodes of one step")
def one_step_episodes() -> Made:
    return made_env([Bandit] * 4), {}


@right("a good policy, whose episodes all reach the limit", cartpole={"noise": 0.0})
def solved(noise: float) -> Made:
    return made_env([made("CartPole-v1", 200)] * 4, 900, balance(noise)), {"max_episode_steps": 200}


@right("one or two episodes", cartpole={"name": "cartpole-one", "episodes": 1}, two={"name": "cartpole-one",
       "episodes": 2}, pendulum={"name": "pendulum-one", "episodes": 1}, limits={"name": "pendulum-one",
       "episodes": 2})  # fmt: skip
def short(name: str, episodes: int) -> Made:
    played = play(name)
    T = int(np.flatnonzero(ended(played))[episodes - 1]) + 1
    return _map(lambda a: a[:T], log_of(played)), {}


@right("a play that was cut off in the middle of its only episode", "pendulum-one", "mountaincar")
def unfinished(name: str) -> Made:
    return _map(lambda a: a[:100], log_of(play(name))), {}


@right("noise in every reward", cartpole={"make": made("CartPole-v1", wrap=Noisy)},
       pendulum={"make": made("Pendulum-v1", wrap=Noisy)},
       rooms={"make": lambda: Noisy(limited(Rooms, 80)())})  # fmt: skip
def noisy_rewards(make: Any) -> Made:
    return made_env([make] * 4), {}


@right("rewards clipped to their signs", taxi={"make": made("Taxi-v4", wrap=Signs)},
       pendulum={"make": made("Pendulum-v1", wrap=Signs)},
       ball={"make": lambda: Signs(limited(Ball, 200)())})  # fmt: skip
def signs_of_rewards(make: Any) -> Made:
    return made_env([make] * 4), {}


@right("each action is repeated a random number of times", pendulum={"make": made("Pendulum-v1", wrap=RandomSkip)},
       cartpole={"make": made("CartPole-v1", wrap=RandomSkip)})  # fmt: skip
def random_frame_skips(make: Any) -> Made:
    return made_env([make] * 4), {}


@right("sometimes the env repeats the last action instead", acrobot={"name": "Acrobot-v1"}, cartpole={
       "name": "CartPole-v1"})  # fmt: skip
def sticky_actions(name: str) -> Made:
    return made_env([made(name, 100, lambda env: gym.wrappers.StickyAction(env, 0.25))] * 4), {}


@right("envs with limits of their own, so that they end at different times",
       pendulum={"name": "Pendulum-v1", "limits": (31, 47, 59, 71, 83, 97, 101, 113)},
       cartpole={"name": "CartPole-v1", "limits": (10, 15, 20, 25, 30, 35, 40, 45)})  # fmt: skip
def asynchronous_ends(name: str, limits: Any) -> Made:
    return made_env([made(name, limit) for limit in limits], 250), {}


@right("the observation has the time in it", cartpole={"name": "CartPole-v1", "limit": 40}, pendulum={
       "name": "Pendulum-v1", "limit": 100})  # fmt: skip
def time_aware(name: str, limit: int) -> Made:
    return made_env([made(name, limit, gym.wrappers.TimeAwareObservation)] * 4), {"max_episode_steps": limit}


@right("stacks of frames that are cleared at each reset", "ball", "cartpole", "pendulum")
def cleared_stacks(name: str) -> Made:
    return stacked(play(name), 4, cleared=True), {}


@right("gymnasium's own stacks of frames")
def wrapped_stacks() -> Made:
    return made_env([lambda: gym.wrappers.FrameStackObservation(limited(Ball, 200)(), 4)] * 4), {}


@right("obs and next_obs normalised by the same numbers", "pendulum", "cheetah")
def both_normalised(name: str) -> Made:
    played = play(name)
    mean, scale = played["obs"].mean((0, 1)), played["obs"].std((0, 1))
    new = {key: ((played[key] - mean) / scale).astype(np.float32) for key in ("obs", "next_obs")}
    return log_of(played, **new), {}


@right("goals and rewards relabelled, by each row's own later goal", "reach", "reach-dense",
       **told("function"))  # fmt: skip
def hindsight(name: str, known: bool) -> Made:
    reward = _REWARDS[name]
    return relabelled(play(name), reward, later_in_episode), {"reward_fn": reward} if known else {}


@right("each episode relabelled by its last goal", "reach", "reach-dense")
def hindsight_of_whole_episodes(name: str) -> Made:
    played, reward = play(name), _REWARDS[name]
    T = len(played["reward"]) // 25 * 25
    played = _map(lambda a: a[:T], played)
    goal = played["next_obs"]["achieved_goal"][_episode_ends(played), np.arange(4)]
    log = log_of(played)
    log["obs"]["desired_goal"], log["next_obs"]["desired_goal"] = goal, goal.copy()
    return log | {"reward": reward(log["next_obs"]["achieved_goal"], goal)}, {"reward_fn": reward}


@right("the reward function of the env is known", "reach", "reach-dense")
def reward_known(name: str) -> Made:
    return log_of(play(name)), {"reward_fn": _REWARDS[name]}


def n_step(played: Arrays, n: int) -> Arrays:
    """Ready-made n-step transitions of one env: the discounted sum of the rewards, and the observation after them."""
    done, rows = ended(played), []
    for t in range(len(done)):
        last, total = t, 0.0
        while True:
            total += GAMMA ** (last - t) * played["reward"][last]
            if done[last] or last - t == n - 1 or last == len(done) - 1:
                break
            last += 1
        if last - t < n - 1 and not done[last]:
            break  # the window is not full yet
        rows.append({"obs": played["obs"][t], "action": played["action"][t], "reward": np.float32(total),
                     "terminated": played["terminated"][last], "truncated": played["truncated"][last],
                     "next_obs": played["next_obs"][last]})  # fmt: skip
    return _stack(rows)


@right("ready-made transitions of three steps", "cartpole-one", "pendulum-one",
       **told("n"))  # fmt: skip
def three_steps(name: str, known: bool) -> Made:
    return n_step(play(name), 3), {"n": 3, "gamma": GAMMA} if known else {}


@right("a rollout of PPO with right log-probabilities, values and advantages",
       "cartpole-ppo", "pendulum-ppo", "cheetah-ppo",
       **told("networks"))  # fmt: skip
def ppo(name: str, known: bool) -> Made:
    policy, critic = _PPO[name]
    log = rollout(play(name), policy, critic)
    return log, {"policy": policy, "critic": critic, "gamma": GAMMA} if known else {}


@right("the same without next_obs, as most rollouts are", "cartpole-ppo", "pendulum-ppo")
def ppo_without_next_obs(name: str) -> Made:
    log = rollout(play(name), *_PPO[name])
    return log_of(log, without=["next_obs"]), {"gamma": GAMMA}


@right("advantages normalised over the rollout, returns not", "cartpole-ppo")
def ppo_normalised(name: str) -> Made:
    log = rollout(play(name), *_PPO[name])
    advantage = log["advantage"]
    return log | {"advantage": (advantage - advantage.mean()) / (advantage.std() + 1e-8)}, {"gamma": GAMMA}


@right("the env gets tanh of the action; stored is the one before or after it", before={"after": False}, after={
       "after": True})  # fmt: skip
def squashed(after: bool) -> Made:
    def squash(action: Any) -> Any:
        return (2 * np.tanh(action)).astype(np.float32)

    box = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    make = made("Pendulum-v1", 120, lambda env: gym.wrappers.TransformAction(env, squash, box))
    log = made_env([make] * 4, 400, TORQUE.act)
    return log | ({"action": squash(log["action"])} if after else {}), {}


@right("a policy without any randomness", cartpole={"name": "CartPole-v1", "policy": balance(0.0), "limit": 50},
       mountaincar={"name": "MountainCar-v0", "policy": pump(0.0), "limit": 200})  # fmt: skip
def deterministic_policy(name: str, policy: Any, limit: int) -> Made:
    return made_env([made(name, limit)] * 4, 500, policy), {}


@right("an agent that always does the same", pendulum={"name": "Pendulum-v1", "action": [[0.0]], "T": 450},
       cartpole={"name": "CartPole-v1", "action": 1, "T": 400})  # fmt: skip
def constant_actions(name: str, action: Any, T: int) -> Made:
    act = np.array(action)
    return made_env([made(name)] * 2, T, lambda rng, obs: np.broadcast_to(act, (2, *act.shape[1:])).copy()), {}


@right("a terminal at the very step of the time limit has both flags")
def both_flags() -> Made:
    log = made_env([made("CartPole-v1", 9)] * 4, 600, lambda rng, obs: np.zeros(4, int))
    assert (log["terminated"] & log["truncated"]).any()
    return log, {"max_episode_steps": 9}


@right("numbers of other dtypes: float16 observations, integer rewards", "cartpole", "frozenlake")
def other_dtypes(name: str) -> Made:
    log = log_of(play(name))
    if log["obs"].dtype.kind == "f":
        log = log | {key: log[key].astype(np.float16) for key in ("obs", "next_obs")}
    return log | {"reward": log["reward"].astype(np.int32)}, {}


@right("large observations with an offset, as positions in metres", "pendulum")
def offset_observations(name: str) -> Made:
    log = log_of(play(name))
    return log | {key: log[key].astype(np.float64) * 1000 + 5e5 for key in ("obs", "next_obs")}, {}


_FOLDER = tempfile.TemporaryDirectory()


def _replay(name: str, plain: Any) -> Any:
    """A replay that got a play step by step."""
    log = log_of(play(name))
    T, N = log["reward"].shape
    schema = relive.Schema.from_spaces(plain.observation_space, plain.action_space)
    replay = relive.ReplayBuffer(schema, 2 * T * N, num_envs=N, seed=0)
    for t in range(T):
        replay.add(_map(lambda a: a[t], log))  # noqa: B023
    return replay


@right("a round trip through a replay", "cartpole", "pendulum", "ball", live={"saved": False}, saved={"saved": True})
def through_replay(name: str, saved: bool) -> Made:
    replay = _replay(name, Ball() if name == "ball" else gym.make(_SPACES[name]))
    if not saved:
        return replay, {}
    path = Path(_FOLDER.name) / f"{name}-replay"
    if not path.exists():
        replay.save(path)
    return str(path), {}


@right("a round trip through an npz file", "cartpole", "pendulum", "taxi")
def through_npz(name: str) -> Made:
    path = Path(_FOLDER.name) / f"{name}.npz"
    if not path.exists():
        np.savez(path, **log_of(play(name)))
    with np.load(path) as file:
        assert all((file[key] == value).all() for key, value in log_of(play(name)).items())
    return str(path), {}


assert len({case.name for case in [*BUGS, *RIGHT]}) == len(BUGS) + len(RIGHT)
