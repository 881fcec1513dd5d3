"""The experience as a plain list of episodes, answering every question the slow, obvious way.

Nothing here knows relive. Everything is float64 and plain Python, and each estimator is computed from its
definition, episode by episode, by explicit sums: the library walks backwards through a recursion, so it means
something when the two agree.

Arrays are time first, env second: ``reward``, ``terminated``, ``truncated``, ``final_value`` and ``mask`` are
``[T, N]``; ``value`` is ``[T + 1, N]``, its last row being the value of the observation after the block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

Ending = Literal["terminated", "truncated", "unfinished", "masked"]


# What happened: steps, episodes, experience.


@dataclass
class Step:
    """What one env produced at one time; both flags describe the transition out of ``obs``."""

    obs: Any
    action: Any
    reward: float
    terminated: bool
    truncated: bool
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether the episode ended with this step."""
        return self.terminated or self.truncated


@dataclass
class Episode:
    """The steps of one env from a reset on; ``final_obs`` is None while the episode is under way.

    ``newest_obs`` is the one after the newest step, if it was seen; the same as ``final_obs`` at an end. An episode
    that was ``cut`` neither ended nor goes on.
    """

    env: int
    number: int
    steps: list[Step] = field(default_factory=list)
    final_obs: Any = None
    newest_obs: Any = None
    cut: bool = False

    @property
    def done(self) -> bool:
        """Whether the episode has ended."""
        return bool(self.steps) and self.steps[-1].done

    @property
    def known(self) -> int:
        """How many of its steps have a known next observation: all, or all but the newest."""
        return sum(self.next_obs(at) is not None for at in range(len(self)))

    def next_obs(self, index: int) -> Any:
        """The true observation after step ``index``; None after a newest step whose next one was not seen."""
        return self.steps[index + 1].obs if index + 1 < len(self.steps) else self.newest_obs

    def __len__(self) -> int:
        return len(self.steps)


@dataclass
class Transition:
    """One step and where it is from: ``id`` counts the steps of its env, ``index`` those of its episode."""

    env: int
    id: int
    episode: int
    index: int
    obs: Any
    action: Any
    reward: float
    terminated: bool
    truncated: bool
    next_obs: Any
    extras: dict[str, Any]


class Experience:
    """All that happened, as one list of episodes per env."""

    def __init__(self) -> None:
        self._episodes: dict[int, list[Episode]] = {}

    def record(
        self,
        env: int,
        obs: Any,
        action: Any,
        reward: float,
        terminated: bool,
        truncated: bool,
        next_obs: Any = None,
        **extras: Any,
    ) -> Step:
        """Append one real step of ``env``; ``next_obs`` is the true one, needed where the episode ends.

        Raises AssertionError if ``obs`` is not the one that the step before led to: the play has a hole.
        """
        step = Step(obs, action, float(reward), bool(terminated), bool(truncated), dict(extras))
        history = self._episodes.setdefault(env, [])
        if not history or history[-1].done or history[-1].cut:
            history.append(Episode(env, len(history)))
        episode = history[-1]
        seen = episode.newest_obs
        assert seen is None or same(seen, obs), f"env {env}: the last step led to {seen}, not to {obs}"
        assert next_obs is not None or not step.done, f"env {env}: an ended episode needs its final observation"
        episode.steps.append(step)
        episode.newest_obs = next_obs
        episode.final_obs = next_obs if step.done else None
        return step

    def interrupt(self, env: int) -> None:
        """The episode under way in ``env``, if there is one, does not go on."""
        for episode in self.episodes(env)[-1:]:
            episode.cut = not episode.done

    @property
    def envs(self) -> list[int]:
        """The envs that have played, in order."""
        return sorted(self._episodes)

    def episodes(self, env: int) -> list[Episode]:
        """The episodes of ``env`` in the order they were played, the last one maybe still under way."""
        return self._episodes.get(env, [])

    def transitions(self, env: int | None = None) -> Iterator[Transition]:
        """Every step with its true next observation, in order, env by env or of one ``env`` alone."""
        for which in self.envs if env is None else [env]:
            count = 0
            for episode in self.episodes(which):
                for index, step in enumerate(episode.steps):
                    yield Transition(
                        env=which,
                        id=count,
                        episode=episode.number,
                        index=index,
                        obs=step.obs,
                        action=step.action,
                        reward=step.reward,
                        terminated=step.terminated,
                        truncated=step.truncated,
                        next_obs=episode.next_obs(index),
                        extras=step.extras,
                    )
                    count += 1

    def __len__(self) -> int:
        """The number of steps of all envs together."""
        return sum(len(episode) for history in self._episodes.values() for episode in history)


def same(a: Any, b: Any) -> bool:
    """Whether two observations are equal in structure, dtype, shape and every bit of their numbers."""
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    if a is None or b is None:
        return a is b
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and bool(np.array_equal(a, b))


# A replay of the newest rows of each env.


class Row(NamedTuple):
    """A row of a replay: step ``at`` of an episode, or the observation it ended on, then ``at`` is its length.

    ``number`` counts the rows of its env from the beginning of time.
    """

    env: int
    number: int
    episode: Episode
    at: int

    @property
    def obs(self) -> Any:
        """The observation the row holds."""
        return self.episode.steps[self.at].obs if self.at < len(self.episode) else self.episode.final_obs

    @property
    def complete(self) -> bool:
        """Whether it is a step whose next observation is known."""
        return self.at < len(self.episode) and self.episode.next_obs(self.at) is not None

    def back(self, steps: int) -> Row | None:
        """The row ``steps`` earlier, if the episode was under way then."""
        return None if self.at < steps else self._replace(number=self.number - steps, at=self.at - steps)


class Window(NamedTuple):
    """An n-step window: what its ``steps`` rewards come to, how it ended, and the row it bootstraps from."""

    reward: float
    discount: float
    steps: int
    terminated: bool
    truncated: bool
    last: Row


class Excerpt(NamedTuple):
    """The rows of a sequence: ``burn_in`` first, the ``length`` steps of its window, and what is looked ahead to."""

    rows: list[Row]
    burn_in: int
    length: int


def window_starts(steps: int, length: int, stride: int) -> list[int]:
    """Where the windows of an episode of so many steps start: each brings a step that none before it has."""
    starts: list[int] = []
    for start in range(0, steps, stride):
        before = range(0) if not starts else range(starts[-1] + length)
        if any(step not in before for step in range(start, min(start + length, steps))):
            starts.append(start)
    return starts


class Replay:
    """What a replay of ``rows`` rows per env holds, found anew for each question from the list of episodes.

    An episode of k steps takes k + 1 rows once it has ended; with ``alone`` each step is an episode of one row.
    """

    def __init__(self, num_envs: int, rows: int, alone: bool = False) -> None:
        self.num_envs, self.rows, self.own_next = num_envs, rows, alone
        self.experience = Experience()
        self.completed: list[tuple[int, int]] = []
        """(env, number) of every transition that was ever completed, in that order."""
        self._known = set[tuple[int, int]]()
        self._over: list[tuple[int, list[Row]]] = [(0, [])] * num_envs
        """How many episodes of each env are over, and all their rows; neither ever changes again."""
        self._cleared = [0] * num_envs

    def add(
        self,
        env: int,
        obs: Any,
        action: Any,
        reward: float,
        terminated: bool,
        truncated: bool,
        next_obs: Any = None,
        **extras: Any,
    ) -> None:
        """One more step of an env; ``next_obs`` counts where an episode ends, and for every step that is ``alone``."""
        known = next_obs if terminated or truncated or self.own_next else None
        self.experience.record(env, obs, action, reward, terminated, truncated, known, **extras)
        if self.own_next:
            self.interrupt(env)
        for row in self.all_rows(env)[-3:]:  # a step completes the one before it, or itself and maybe its final row
            if row.complete and (env, row.number) not in self._known:
                self.completed.append((env, row.number))
                self._known.add((env, row.number))

    def goes_on(self, env: int) -> bool:
        """Whether an episode is under way in ``env``."""
        return any(not (episode.done or episode.cut) for episode in self.experience.episodes(env)[-1:])

    def interrupt(self, env: int) -> None:
        """The episode under way in ``env`` does not go on."""
        self.experience.interrupt(env)

    def clear(self) -> None:
        """Nothing is stored any more."""
        for env in range(self.num_envs):
            self.interrupt(env)
            self._cleared[env] = len(self.all_rows(env))

    def all_rows(self, env: int) -> list[Row]:
        """Every row an env ever had, in the order of time."""
        over, rows = self._over[env]
        for episode in self.experience.episodes(env)[over:]:
            count = len(episode) + (episode.done and not self.own_next)
            rows = rows + [Row(env, len(rows) + at, episode, at) for at in range(count)]
            if episode.done or episode.cut:
                self._over[env] = episode.number + 1, rows
        return rows

    def live(self, env: int) -> list[Row]:
        """The rows of an env that are still there, oldest first."""
        return [row for row in self.all_rows(env)[-self.rows :] if row.number >= self._cleared[env]]

    def anchors(
        self, history: int = 0, length: int = 1, stride: int = 1, tails: bool = True, across: bool = False
    ) -> list[Row]:
        """The steps that can be drawn, in the order of completion.

        Each is the last of one of its episode's windows, and live and complete, as are the ``history`` rows before it,
        or as many as its episode has. With ``across`` these are of any episode, and the earliest of them does not count
        where the row after it begins an episode.
        """
        found: dict[tuple[int, int], Row] = {}
        cuts: dict[int, set[int]] = {}
        for env in range(self.num_envs):
            live = self.live(env)
            numbers = {row.number for row in live}
            for row in live:
                needed = range(row.number - min(row.at, history), row.number)
                if across:
                    second = next((other for other in live if other.number == row.number - history + 1), None)
                    begins = second is not None and second.at == 0
                    needed = range(row.number - history + begins, row.number)
                if id(row.episode) not in cuts:
                    episode, ends = row.episode, set[int]()
                    for start in window_starts(episode.known, length, stride):
                        end = min(start + length, episode.known)
                        if end - start == length or (tails and (episode.done or episode.cut)):
                            ends.add(end - 1)
                    cuts[id(episode)] = ends
                if row.complete and numbers.issuperset(needed) and row.at in cuts[id(row.episode)]:
                    found[row.env, row.number] = row
        return [found[key] for key in self.completed if key in found]

    def index(self, row: Row) -> int:
        """The number by which users know a row."""
        return row.number * self.num_envs + row.env

    def window(self, row: Row, n: int, gamma: float) -> Window:
        """Up to ``n`` rewards from a transition on, as far as its episode goes and next observations are known."""
        known = [step for at, step in enumerate(row.episode.steps) if row.episode.next_obs(at) is not None]
        steps = known[row.at : row.at + n]
        last = steps[-1]
        return Window(
            reward=_discounted([step.reward for step in steps], gamma),
            discount=0.0 if last.terminated else gamma ** len(steps),
            steps=len(steps),
            terminated=last.terminated,
            truncated=last.truncated,
            last=row._replace(number=row.number + len(steps), at=row.at + len(steps)),
        )

    def goal_rows(self, row: Row, strategy: str, finished_only: bool = False) -> list[Row]:
        """The live rows from which a step's new goal may come, each following one of the steps that may be chosen.

        Andrychowicz et al. 2017, section 4.5: the steps of the row's own episode from it on ("future"), the last of
        them ("final"), all of them ("episode"), those before it ("past"); any complete step at all ("random").
        """
        if finished_only and not (row.episode.done or row.episode.cut):
            return []
        live = {(other.env, other.number): other for env in range(self.num_envs) for other in self.live(env)}
        steps = [
            other
            for other in live.values()
            if other.complete and (strategy == "random" or other.episode is row.episode)
        ]
        if strategy == "future":
            steps = [other for other in steps if other.at >= row.at]
        elif strategy == "past":
            steps = [other for other in steps if other.at < row.at]
        elif strategy == "final":
            steps = steps[-1:]
        return [live[other.env, other.number + 1] for other in steps]

    def hindsight(
        self, row: Row, n: int, gamma: float, judge: Callable[[Step, Any], tuple[float, bool, bool]]
    ) -> Window:
        """The n-step window of a row under another goal: ``judge`` says of a step and the observation after it what it
        is worth then, and whether it terminates or is truncated, which ends the window."""
        judged: list[tuple[float, bool, bool]] = []
        for at in range(row.at, min(row.at + n, row.episode.known)):
            judged.append(judge(row.episode.steps[at], row.episode.next_obs(at)))
            if judged[-1][1] or judged[-1][2]:
                break
        _, terminated, truncated = judged[-1]
        return Window(
            reward=_discounted([reward for reward, _, _ in judged], gamma),
            discount=0.0 if terminated else gamma ** len(judged),
            steps=len(judged),
            terminated=terminated,
            truncated=truncated,
            last=row._replace(number=row.number + len(judged), at=row.at + len(judged)),
        )

    def excerpt(self, row: Row, length: int, stride: int, burn_in: int, n: int) -> Excerpt:
        """The window that ends with a step, what comes before it, and what its n-step windows reach beyond it."""
        starts = window_starts(row.episode.known, length, stride)
        start = next(start for start in starts if min(start + length, row.episode.known) == row.at + 1)
        first, last = max(start - burn_in, 0), min(row.at + n, row.episode.known)
        rows = [row._replace(number=row.number - row.at + at, at=at) for at in range(first, last + 1)]
        return Excerpt(rows, start - first, row.at + 1 - start)

    def stack(self, row: Row, depth: int) -> list[Any]:
        """The newest ``depth`` observations of the row's episode up to it, oldest first; None before its first."""
        frames = [row.back(steps) for steps in reversed(range(depth))]
        return [None if frame is None else frame.obs for frame in frames]


def recent_count(stored: int, eta: float, c_min: int, update: int, of: int) -> int:
    """max(N eta^(1000 k / K), c_min) of N stored transitions, or all of them  (Wang & Ross 2019, sec. 3.3)."""
    return min(int(max(stored * eta ** (1000 * update / of), c_min)), stored)


class Priorities:
    """TD errors of the transitions that can be drawn: what prioritized replay makes of them  (Schaul et al. 2016).

    A transition that can be drawn anew gets ``default`` or, without it, the largest error seen so far, 1 at first.
    """

    def __init__(self, default: float | None = None) -> None:
        self.default, self.largest = default, 1.0
        self.errors: dict[int, float] = {}

    def see(self, drawable: Sequence[int]) -> None:
        """These are the indices of all that can be drawn now."""
        new = self.largest if self.default is None else self.default
        self.errors = {index: self.errors.get(index, new) for index in drawable}

    def update(self, index: Sequence[int], errors: Sequence[float]) -> int:
        """Note errors, the last for an index that comes twice; returns how many belong to nothing that can be drawn."""
        alive = [(i, abs(error)) for i, error in zip(index, errors, strict=True) if i in self.errors]
        self.errors |= dict(alive)
        self.largest = max([self.largest, *(error for _, error in alive)])
        return len(index) - len(alive)

    def probabilities(self, alpha: float, eps: float, among: Sequence[int] | None = None) -> dict[int, float]:
        """P(i) = p / sum of p over those ``among`` which is drawn (default all), p = (error + eps)^alpha."""
        weights = {i: (error + eps) ** alpha for i, error in self.errors.items() if among is None or i in set(among)}
        total = math.fsum(weights.values())
        return {i: weight / total for i, weight in weights.items()}


# A block of [T, N] flags, cut into runs of real steps of one episode.


class Run(NamedTuple):
    """The steps ``t0 <= t < t1`` of one env: real, of one episode, and what stopped them."""

    env: int
    t0: int
    t1: int
    end: Ending


def split(terminated: Any, truncated: Any, mask: Any = None) -> list[list[Run]]:
    """Cut a block into per-env lists of runs; a step that is both terminated and truncated ends "terminated".

    "unfinished": the block ended first. "masked": a step that is not real came first.
    """
    terminated, truncated = np.asarray(terminated, bool), np.asarray(truncated, bool)
    mask = np.ones(terminated.shape, bool) if mask is None else np.asarray(mask, bool)
    length, num_envs = terminated.shape
    runs: list[list[Run]] = [[] for _ in range(num_envs)]
    for env in range(num_envs):
        t0: int | None = None
        for t in range(length):
            if not mask[t, env]:
                continue
            t0 = t if t0 is None else t0
            end: Ending | None = None
            if terminated[t, env]:
                end = "terminated"
            elif truncated[t, env]:
                end = "truncated"
            elif t + 1 == length:
                end = "unfinished"
            elif not mask[t + 1, env]:
                end = "masked"
            if end is not None:
                runs[env].append(Run(env, t0, t + 1, end))
                t0 = None
    return runs


class _Play(NamedTuple):
    """A run with its numbers: ``k`` rewards and ``k + 1`` values, the last being that of where it stopped."""

    run: Run
    rewards: list[float]
    values: list[float]


def _plays(reward: Any, value: Any, terminated: Any, truncated: Any, final_value: Any, mask: Any) -> list[_Play]:
    """Every run of the block with its numbers; all values are 0 without ``value``."""
    reward = np.asarray(reward, np.float64)
    plays: list[_Play] = []
    for run in (run for runs in split(terminated, truncated, mask) for run in runs):
        env, t0, t1, end = run
        values = [0.0] * (t1 - t0) if value is None else [float(row[env]) for row in value[t0:t1]]
        if end == "terminated" or value is None:
            after = 0.0
        elif end == "truncated":
            assert final_value is not None, "a truncated step needs the value of its true final observation"
            after = float(final_value[t1 - 1][env])
        else:
            after = float(value[t1][env])
        plays.append(_Play(run, [float(r) for r in reward[t0:t1, env]], [*values, after]))
    return plays


def _write(out: np.ndarray, run: Run, numbers: Sequence[float]) -> None:
    out[run.t0 : run.t1, run.env] = numbers


# The estimators, each from its definition.


def n_step_return(rewards: Sequence[float], values: Sequence[float], t: int, n: int, gamma: float) -> float:
    """G^(n)[t] = Σ_{i<n} γ^i r[t+i] + γ^n V[t+n]  (Sutton & Barto 2018, eq. 12.1)."""
    return _discounted([*rewards[t : t + n], values[t + n]], gamma)


def _discounted(numbers: Sequence[float], rate: float) -> float:
    return math.fsum(rate**k * number for k, number in enumerate(numbers))


def gae(
    reward: Any,
    value: Any,
    terminated: Any,
    truncated: Any,
    *,
    final_value: Any = None,
    mask: Any = None,
    gamma: float = 0.99,
    lam: float = 0.95,
) -> tuple[np.ndarray, np.ndarray]:
    """A[t] = Σ_k (γλ)^k δ[t+k] over the rest of the run, δ = r + γ V' - V  (Schulman et al. 2016, eq. 16)."""
    returns = np.array(value, np.float64)[:-1]
    advantages = np.zeros_like(returns)
    for run, rewards, values in _plays(reward, value, terminated, truncated, final_value, mask):
        deltas = [r + gamma * values[k + 1] - values[k] for k, r in enumerate(rewards)]
        starts = range(len(deltas))
        _write(advantages, run, [_discounted(deltas[t:], gamma * lam) for t in starts])
    return advantages, returns + advantages


def monte_carlo(
    reward: Any,
    terminated: Any,
    truncated: Any,
    *,
    value: Any = None,
    final_value: Any = None,
    mask: Any = None,
    gamma: float = 0.99,
) -> np.ndarray:
    """R[t] = Σ_k γ^k r[t+k] over the rest of the run, and γ^K V of where it stopped: 0 without ``value``."""
    returns = np.zeros(np.shape(reward)) if value is None else np.array(value, np.float64)[:-1]
    for run, rewards, values in _plays(reward, value, terminated, truncated, final_value, mask):
        count = len(rewards)
        _write(returns, run, [n_step_return(rewards, values, t, count - t, gamma) for t in range(count)])
    return returns


def lambda_returns(
    reward: Any,
    value: Any,
    terminated: Any,
    truncated: Any,
    *,
    final_value: Any = None,
    mask: Any = None,
    gamma: float = 0.99,
    lam: float = 0.95,
) -> np.ndarray:
    """(1 - λ) Σ_{n<K} λ^(n-1) G^(n)[t] + λ^(K-1) G^(K)[t], K steps left in the run  (ibid., eq. 12.3)."""
    returns = np.array(value, np.float64)[:-1]
    for run, rewards, values in _plays(reward, value, terminated, truncated, final_value, mask):
        numbers = []
        for t in range(len(rewards)):
            left = len(rewards) - t
            weights = [(1 - lam) * lam ** (n - 1) for n in range(1, left)] + [lam ** (left - 1)]
            terms = (w * n_step_return(rewards, values, t, n, gamma) for n, w in enumerate(weights, start=1))
            numbers.append(math.fsum(terms))
        _write(returns, run, numbers)
    return returns


def vtrace(
    log_rho: Any,
    reward: Any,
    value: Any,
    terminated: Any,
    truncated: Any,
    *,
    final_value: Any = None,
    mask: Any = None,
    gamma: float = 0.99,
    lam: float = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """v[t] = V[t] + Σ_k γ^k (Π_{i<k} c[t+i]) ρ[t+k] δ[t+k]  (Espeholt et al. 2018, eq. 1).

    ρ = min(ρ̄, π/μ), c = λ min(c̄, π/μ). The advantage is ρ (r + γ v' - V): v' is the next target, or V
    of where the run stopped.
    """
    ratios = np.asarray(log_rho, np.float64)
    returns = np.array(value, np.float64)[:-1]
    advantages = np.zeros_like(returns)
    for run, rewards, values in _plays(reward, value, terminated, truncated, final_value, mask):
        count = len(rewards)
        ratio = [math.exp(x) for x in ratios[run.t0 : run.t1, run.env]]
        rho = [min(rho_clip, x) for x in ratio]
        c = [lam * min(c_clip, x) for x in ratio]
        delta = [rewards[k] + gamma * values[k + 1] - values[k] for k in range(count)]
        targets = []
        for t in range(count):
            terms = (gamma ** (k - t) * math.prod(c[t:k]) * rho[k] * delta[k] for k in range(t, count))
            targets.append(values[t] + math.fsum(terms))
        targets.append(values[count])
        _write(returns, run, targets[:count])
        errors = [rewards[t] + gamma * targets[t + 1] - values[t] for t in range(count)]
        _write(advantages, run, [rho[t] * errors[t] for t in range(count)])
    return advantages, returns


def group_advantage(
    reward: Any,
    terminated: Any,
    truncated: Any,
    *,
    group_size: int,
    per: Literal["step", "episode"] = "step",
    gamma: float = 1.0,
    mask: Any = None,
    until_first_done: bool = True,
    eps: float = 1e-8,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns relative to the group's: (advantage, return, mask), both numbers 0 where the mask is False.

    "step": the reward to go, against those of the group's envs at the same time. "episode": the return of the
    episode, the same at each of its steps, against those of the group's episodes, each counted once.
    After GRPO (Shao et al. 2024, sec. 4.1).
    """
    shape = np.shape(reward)
    runs = split(terminated, truncated, mask)
    kept = np.zeros(shape, bool)
    returns = np.zeros(shape)
    advantages = np.zeros(shape)
    ends = [[run.t1 for run in rows if run.end in ("terminated", "truncated")] for rows in runs]
    first_end = [rows[0] if rows else shape[0] for rows in ends]
    plays = [
        play
        for play in _plays(reward, None, terminated, truncated, None, mask)
        if not until_first_done or play.run.t0 < first_end[play.run.env]
    ]
    for run, rewards, values in plays:
        count = len(rewards)
        to_go = [n_step_return(rewards, values, t, count - t, gamma) for t in range(count)]
        kept[run.t0 : run.t1, run.env] = True
        _write(returns, run, to_go if per == "step" else [to_go[0]] * count)
    for first in range(0, shape[1], group_size):
        group = range(first, first + group_size)
        if per == "step":
            entries = [[(t, env, t + 1) for env in group if kept[t, env]] for t in range(shape[0])]
        else:
            entries = [[(play.run.t0, play.run.env, play.run.t1) for play in plays if play.run.env in group]]
        for peers in entries:
            scores = [float(returns[t0, env]) for t0, env, _ in peers]
            for (t0, env, t1), score in zip(peers, standardise(scores, eps, ddof=0), strict=True):
                advantages[t0:t1, env] = score
    return advantages, returns, kept


def standardise(scores: Sequence[float], eps: float, ddof: int) -> list[float]:
    """(x - mean) / (std + eps); the std is 0 where there are too few entries to have one."""
    if not scores:
        return []
    mean = math.fsum(scores) / len(scores)
    spread = math.fsum((x - mean) ** 2 for x in scores)
    std = math.sqrt(spread / (len(scores) - ddof)) if len(scores) > ddof else 0.0
    return [(x - mean) / (std + eps) for x in scores]


def normalize(x: Any, mask: Any = None, eps: float = 1e-8) -> np.ndarray:
    """(x - mean) / (std + eps) over the entries the mask keeps, with the unbiased std; 0 at the others."""
    x = np.asarray(x, np.float64)
    keep = np.ones(x.shape, bool) if mask is None else np.asarray(mask, bool)
    out = np.zeros_like(x)
    out[keep] = standardise([float(entry) for entry in x[keep]], eps, ddof=1)
    return out


ESTIMATORS: dict[str, Callable[..., Any]] = {
    "gae": gae,
    "monte_carlo": monte_carlo,
    "lambda_returns": lambda_returns,
    "vtrace": vtrace,
}


# Episodes cut into windows: what recurrent networks are trained on.


class Stretch(NamedTuple):
    """The steps ``start <= t < start + length`` of one env; ``is_start`` where an episode begins with them."""

    env: int
    start: int
    length: int
    is_start: bool


def windows(count: int, length: int | None, stride: int, drop_tail: bool = False) -> list[tuple[int, int]]:
    """(first step, number of steps) of the windows of ``count`` steps, in the order of time; None is one of them all.

    They begin at 0, stride, 2 stride, ...; one that brings nothing new does not exist.
    """
    length = count if length is None else length
    found: list[tuple[int, int]] = []
    seen: set[int] = set()
    for first in range(0, count, stride):
        steps = range(first, min(first + length, count))
        if not seen.issuperset(steps) and (len(steps) == length or not drop_tail):
            found.append((first, len(steps)))
        seen.update(steps)
    return found


def starts_episode(done: Any, mask: Any, ended: Any, t: int, env: int) -> bool:
    """Whether step ``t`` is the first of its episode: since the last one's end nothing real has happened.

    ``ended`` says of each env whether the episode before the block had ended.
    """
    for before in reversed(range(t)):
        if done[before][env]:
            return bool(mask[t][env])
        if mask[before][env]:
            return False
    return bool(mask[t][env] and ended[env])


def stretches(
    terminated: Any,
    truncated: Any,
    mask: Any = None,
    *,
    length: int | None = None,
    stride: int = 1,
    complete: bool = False,
    drop_tail: bool = False,
    ended: Any = None,
) -> list[Stretch]:
    """The windows of a whole block, env by env in the order of time; ``complete`` keeps those of whole episodes."""
    terminated, truncated = np.asarray(terminated, bool), np.asarray(truncated, bool)
    done = terminated | truncated
    mask = np.ones(done.shape, bool) if mask is None else np.asarray(mask, bool)
    ended = np.ones(done.shape[1], bool) if ended is None else ended
    found: list[Stretch] = []
    for run in (run for runs in split(terminated, truncated, mask) for run in runs):
        begins = starts_episode(done, mask, ended, run.t0, run.env)
        if complete and not (begins and run.end in ("terminated", "truncated")):
            continue
        for first, count in windows(run.t1 - run.t0, length, stride, drop_tail):
            found.append(Stretch(run.env, run.t0 + first, count, begins and first == 0))
    return found
