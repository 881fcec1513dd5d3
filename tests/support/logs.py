"""Logs of real and of small environments, stored rightly, and the same with one mistake each.

All logs are ``[T, N, ...]`` with the true next observations, unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import gymnasium as gym
import numpy as np

from support.effort import often

Arrays = dict[str, Any]
Policy = Callable[[Any, Any], Any]


class Arena(gym.Env[Any, Any]):
    """A point with velocity in a plane, pushed by the action. The reward is far from linear in the state."""

    observation_space: Any = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space: Any = gym.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, limit: int = 50, noise: float = 0.0, reward: str = "waves") -> None:
        self.limit, self.noise, self.kind = limit, noise, reward

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.hidden = 0, 0.0
        self.state = self.np_random.normal(0, 0.3, 4)
        return self.seen(), {}

    def seen(self) -> Any:
        return self.state.astype(np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        x, v = self.state[:2], self.state[2:]
        reward = self.reward(x, v, action)
        v = 0.9 * v + 0.3 * np.asarray(action) - 0.05 * np.sin(3 * x)
        x = x + 0.3 * v
        self.state = np.concatenate([x, v]) + self.noise * self.np_random.normal(size=4)
        self.t += 1
        return self.seen(), float(reward), bool(np.abs(self.state[:2]).max() > 3), self.t >= self.limit, {}

    def reward(self, x: Any, v: Any, action: Any) -> float:
        if self.kind == "constant":
            return 1.0
        if self.kind == "noise":
            return float(self.np_random.normal())
        if self.kind == "noisy":
            return float(np.sin(2 * x[0]) + self.np_random.normal(0, 1))
        if self.kind == "hidden":
            self.hidden = 0.95 * self.hidden + self.np_random.normal(0, 0.3)
            return self.hidden
        if self.kind == "sparse":
            return float(np.abs(x).max() > 2.5)
        if self.kind == "time":
            return 0.1 * self.t
        if self.kind == "steps":  # a plateau, and cliffs
            return float(np.floor(3 * np.sin(2 * x[0]) * np.cos(2 * x[1])) - (np.abs(action).max() > 0.7))
        return float(np.sin(4 * x[0]) * np.cos(3 * v[1]) + np.abs(action[0]) - 0.3 * action[1] ** 2)


class Positions(Arena):
    """The same without its velocity."""

    def seen(self) -> Any:
        return super().seen()[:2]


class Clocked(Arena):
    """The same with the time in the observation, and two numbers that never change."""

    def seen(self) -> Any:
        return np.append(super().seen(), np.float32([self.t / self.limit, 1.0, 0.0])).astype(np.float32)


class Market(gym.Env[Any, Any]):
    """Prices that no action moves; the position earns what the price gains."""

    observation_space: Any = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space: Any = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.price = 0, self.np_random.normal()
        return np.float32([self.price]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        before = self.price
        self.price = 0.9 * self.price + self.np_random.normal(0, 0.5)
        self.t += 1
        return np.float32([self.price]), float(action[0] * (self.price - before)), False, self.t >= 80, {}


class Grid(gym.Env[Any, Any]):
    """A deterministic 5x5 grid with a goal; ``portals`` never end and jump instead, as in Sutton and Barto."""

    observation_space: Any = gym.spaces.Box(0, 4, (2,), np.int64)
    action_space: Any = gym.spaces.Discrete(4)

    def __init__(self, portals: bool = False, limit: int = 60) -> None:
        self.portals, self.limit = portals, limit

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at, self.t = np.array([0, 0]), 0
        return self.at.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        if self.portals and tuple(self.at) in ((0, 1), (0, 3)):
            reward = 10.0 if self.at[1] == 1 else 5.0
            self.at = np.array([4, 1]) if self.at[1] == 1 else np.array([2, 3])
            return self.at.copy(), reward, False, False, {}
        self.at = np.clip(self.at + np.array([(0, 1), (0, -1), (1, 0), (-1, 0)][int(action)]), 0, 4)
        won = bool((self.at == 4).all()) and not self.portals
        return self.at.copy(), -1.0 + 10 * won, won, self.t >= self.limit and not self.portals, {}


class Target(Arena):
    """A target in the observation jumps elsewhere each time that it is reached; no end but a far time limit."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.target = np.zeros(2)
        return super().reset(seed=seed)

    def seen(self) -> Any:
        return np.append(super().seen(), self.target).astype(np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        _, _, _, truncated, info = super().step(action)
        near = float(np.abs(self.state[:2] - self.target).max())
        if near < 0.5:
            self.target = self.np_random.uniform(-1.5, 1.5, 2)
        self.state[:2] = np.clip(self.state[:2], -2, 2)
        return self.seen(), -near, False, truncated, info


class Images(Arena):
    """A dot of bytes in a picture."""

    observation_space: Any = gym.spaces.Box(0, 255, (12, 12), np.uint8)

    def seen(self) -> Any:
        picture = np.zeros((12, 12), np.uint8)
        i, j = np.clip(((self.state[:2] + 3) * 2).astype(int), 0, 11)
        picture[i, j] = 255
        return picture


class Contexts(gym.Env[Any, Any]):
    """A contextual bandit: each observation is drawn anew."""

    observation_space: Any = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space: Any = gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.context = 0, self.np_random.normal(size=3).astype(np.float32)
        return self.context, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward, self.t = float(self.context[int(action)]), self.t + 1
        self.context = self.np_random.normal(size=3).astype(np.float32)
        return self.context, reward, False, self.t == 20, {}


class Horizon(Arena):
    """All episodes terminate after 30 steps, and truly so."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, _, _, info = super().step(action)
        return obs, reward, self.t == 30, False, info


ENVS: dict[str, Callable[..., Any]] = {
    "CartPole": lambda **o: gym.make("CartPole-v1", **o),
    "Pendulum": lambda **o: gym.make("Pendulum-v1", **{"max_episode_steps": 100, **o}),
    "MountainCar": lambda **o: gym.make("MountainCar-v0", **o),
    "Acrobot": lambda **o: gym.make("Acrobot-v1", **{"max_episode_steps": 100, **o}),
    "CliffWalking": lambda **o: gym.make("CliffWalking-v1", **o),
    "FrozenLake": lambda **o: gym.make("FrozenLake-v1", **o),
    "Arena": Arena, "Positions": Positions, "Clocked": Clocked, "Market": Market, "Grid": Grid, "Target": Target,
    "Images": Images, "Contexts": Contexts, "Horizon": Horizon,
}  # fmt: skip


def anything(space: Any, obs: Any) -> Any:
    """Random actions."""
    return space.sample()


def steered(space: Any, obs: Any) -> Any:
    """Actions that follow from the observation alone."""
    push = np.tanh(np.asarray(obs, np.float64).reshape(-1)[: space.shape[0] if space.shape else 1] * -0.8)
    return push.astype(np.float32) if space.shape else int(push[0] > 0) * (int(space.n) - 1)


def explored(space: Any, obs: Any) -> Any:
    """The same, with noise."""
    if not space.shape:
        return steered(space, obs) if space.np_random.random() < 0.8 else space.sample()
    return np.clip(steered(space, obs) + space.np_random.normal(0, 0.3, space.shape), -1, 1).astype(np.float32)


@cache
def _played(env: str, steps: int, envs: int, policy: Policy, seed: int, skip: int, sticky: float, options: Any) -> Any:
    columns: list[Arrays] = []
    for i in range(envs):
        one = ENVS[env](**dict(options))
        one.action_space.seed(1000 * seed + i)
        rng = np.random.default_rng(seed)
        rows: dict[str, list[Any]] = {name: [] for name in (
            "obs", "action", "reward", "terminated", "truncated", "next_obs")}  # fmt: skip
        obs, _ = one.reset(seed=1000 * seed + i)
        played: Any = one.action_space.sample()
        for _ in range(steps):
            action = policy(one.action_space, obs)
            played = played if rng.random() < sticky else action
            total = 0.0
            for _ in range(skip):
                after, reward, terminated, truncated, _ = one.step(played)
                total += float(reward)
                if terminated or truncated:
                    break
            for name, x in zip(rows, (obs, action, total, terminated, truncated, after), strict=True):
                rows[name].append(np.copy(x))
            obs = one.reset()[0] if terminated or truncated else after
        columns.append({name: np.stack(x) for name, x in rows.items()})
    found = {name: np.stack([column[name] for column in columns], 1) for name in columns[0]}
    return found | {"reward": found["reward"].astype(np.float32)}


def played(env: str, steps: int = often(400, 600), envs: int = 2, policy: Policy = anything, seed: int = 0,
           skip: int = 1, sticky: float = 0.0, **options: Any) -> Arrays:  # fmt: skip
    """A log ``[T, N, ...]`` of an env, as a loop should store it; ``skip`` steps with each action."""
    found = _played(env, steps, envs, policy, seed, skip, sticky, tuple(options.items()))
    return {name: x.copy() for name, x in found.items()}


def flat(log: Arrays) -> Arrays:
    """``[T, N, ...]`` as ``[N * T, ...]``, env by env."""
    return {name: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]) for name, x in log.items()}


def one_env(log: Arrays) -> Arrays:
    """The steps ``[T, ...]`` of the first env."""
    return {name: x[:, 0] for name, x in log.items()}


def without_next(log: Arrays) -> Arrays:
    """The following row has to serve; so truncated episodes are taken for terminal ones, which is not looked at."""
    return {name: x for name, x in log.items() if name != "next_obs"}


def ended(log: Arrays) -> Any:
    return log["terminated"] | log["truncated"]


# -- right ---------------------------------------------------------------------------------------------------------


def n_step(log: Arrays, n: int = 3, gamma: float = 0.9) -> Arrays:
    """Ready-made n-step transitions that stop at ends."""
    size, done, out = len(log["reward"]) - n, ended(log), {name: x[: len(log["reward"]) - n].copy()
                                                          for name, x in log.items()}  # fmt: skip
    for t in range(size):
        for i in range(done.shape[1]):
            k = next((j for j in range(n) if done[t + j, i]), n - 1)
            out["reward"][t, i] = sum(gamma**j * log["reward"][t + j, i] for j in range(k + 1))
            for name in ("next_obs", "terminated", "truncated"):
                out[name][t, i] = log[name][t + k, i]
    return out


def stacked(log: Arrays, k: int = 4, padding: str = "repeat") -> Arrays:
    """Stacks of k frames ``[T, N, k, D]``. ``padding``: "repeat", "zeros", or "over" for none at all."""
    done, size = ended(log), len(log["reward"])
    stacks = np.zeros((size, done.shape[1], k, *log["obs"].shape[2:]), log["obs"].dtype)
    after = np.zeros_like(stacks)
    for i in range(done.shape[1]):
        frames = [log["obs"][0, i]] * k
        for t in range(size):
            stacks[t, i], after[t, i] = frames, [*frames[1:], log["next_obs"][t, i]]
            following = log["obs"][min(t + 1, size - 1), i]
            if not done[t, i]:
                frames = [*frames[1:], log["next_obs"][t, i]]
            elif padding == "over":
                frames = [*frames[1:], following]
            else:
                frames = [following if padding == "repeat" else 0 * following] * (k - 1) + [following]
    return {**log, "obs": stacks, "next_obs": after}


def goals(relabel: str = "", seed: int = 0, dense: bool = False, episodes: int = 40) -> Arrays:
    """Goals of a walk in one dimension ``[T, ...]``: each row also with a later position of its episode as its goal.

    ``relabel``: "" for neither, "right", or "old" for the reward of the goal it had.
    """
    rng, rows = np.random.default_rng(seed), dict[str, list[Any]]()

    def rewarded(achieved: Any, desired: Any) -> float:
        far = float(np.abs(achieved - desired).sum())
        return -far if dense else -float(far > 0.05)

    for _ in range(episodes):
        at, desired = rng.normal(size=2), rng.normal(size=2) * 3
        path = [at]
        actions = rng.uniform(-0.5, 0.5, (20, 2))
        for action in actions:
            path.append(path[-1] + action)
        for goal_at in [None] if not relabel else [None, 20, 12]:
            goal = desired if goal_at is None else path[goal_at]
            for t in range(20 if goal_at is None else goal_at):
                truth = rewarded(path[t + 1], goal)
                reward = rewarded(path[t + 1], desired) if relabel == "old" else truth
                for name, x in {
                    "obs.observation": path[t], "obs.achieved_goal": path[t], "obs.desired_goal": goal,
                    "next_obs.observation": path[t + 1], "next_obs.achieved_goal": path[t + 1],
                    "next_obs.desired_goal": goal, "action": actions[t], "reward": reward, "terminated": False,
                    "truncated": t == (20 if goal_at is None else goal_at) - 1,
                }.items():  # fmt: skip
                    rows.setdefault(name, []).append(x)
    found: Arrays = {name: np.array(x) for name, x in rows.items()}
    for part in ("obs", "next_obs"):
        names = [name for name in found if name.startswith(part + ".")]
        found[part] = {name.partition(".")[2]: found.pop(name).astype(np.float32) for name in names}
    return found


def interleaved(log: Arrays) -> Arrays:
    """``[T, N, ...]`` as ``[T * N, ...]``: the envs take turns."""
    return {name: x.reshape(-1, *x.shape[2:]) for name, x in log.items()}


def taught(env: str = "Arena", seed: int = 0, **options: Any) -> Arrays:
    """A log with values, and log-probabilities of a Gaussian policy."""
    log = played(env, policy=explored, seed=seed, **options)
    return log | {"value": critic(log["obs"]), "log_prob": policy(log["obs"], log["action"])}


def critic(obs: Any) -> Any:
    """V(obs), of ``[..., D]``."""
    wide = np.asarray(obs, np.float64)
    return (5 + 2 * np.sin(wide[..., 0]) + np.tanh(wide[..., 1:].sum(-1)) * 3).astype(np.float32)


def policy(obs: Any, action: Any) -> Any:
    """log π(action | obs)."""
    wide, played_ = np.asarray(obs, np.float64), np.asarray(action, np.float64)
    mean = np.tanh(wide[..., : played_.shape[-1]] * -0.8)
    return (-0.5 * ((played_ - mean) / 0.3) ** 2 - np.log(0.3 * np.sqrt(2 * np.pi))).sum(-1).astype(np.float32)


# -- wrong ---------------------------------------------------------------------------------------------------------


def mixed(log: Arrays, share: float, change: Callable[[Arrays], Any], seed: int = 0) -> Arrays:
    """``next_obs`` is what ``change`` makes of the log in a share of the rows."""
    rows = np.random.default_rng(seed).random(log["reward"].shape) < share
    wide = rows.reshape(*rows.shape, *[1] * (log["obs"].ndim - 2))
    return {**log, "next_obs": np.where(wide, change(log), log["next_obs"]).astype(log["obs"].dtype)}


def shuffled(log: Arrays, seed: int = 0) -> Arrays:
    """Rows in no order, each env for itself."""
    rng, size = np.random.default_rng(seed), len(log["reward"])
    orders = np.stack([rng.permutation(size) for _ in range(log["reward"].shape[1])], 1)
    return {name: np.take_along_axis(x, orders.reshape(*orders.shape, *[1] * (x.ndim - 2)), 0)
            for name, x in log.items()}  # fmt: skip


def rolled(log: Arrays, name: str, by: int) -> Arrays:
    """A field some rows late."""
    return {**log, name: np.roll(log[name], by, 0)}


def sums(log: Arrays) -> Arrays:
    """Rewards are the returns so far."""
    out, total = np.zeros_like(log["reward"]), np.zeros(log["reward"].shape[1])
    for t, done in enumerate(ended(log)):
        total = total + log["reward"][t]
        out[t] = total
        total = np.where(done, 0, total)
    return {**log, "reward": out}


def lagging(log: Arrays) -> Arrays:
    """Observations are those of the row before; the next ones are right."""
    return {**log, "obs": np.concatenate([log["obs"][:1], log["obs"][:-1]])}


def dead(log: Arrays, env: int = 3) -> Arrays:
    """One env hands out the same observation, and no reward, in every step."""
    log = {name: x.copy() for name, x in log.items()}
    log["obs"][:, env] = log["next_obs"][:, env] = log["obs"][0, env]
    for name in ("reward", "terminated", "truncated"):
        log[name][:, env] = 0
    return log


def unflagged(log: Arrays) -> Arrays:
    """No end is flagged, and no next observation is stored."""
    none = np.zeros_like(log["terminated"])
    return without_next({**log, "terminated": none, "truncated": none})


def limits_as_terminals(log: Arrays) -> Arrays:
    return {**log, "terminated": ended(log), "truncated": np.zeros_like(log["truncated"])}
