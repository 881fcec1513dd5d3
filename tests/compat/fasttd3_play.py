"""Plays for FastTD3's buffer, what a batch of them has to hold, and what FastTD3's own class makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

__all__ = ["CRITIC", "OBS", "Host", "Play", "by_start", "same_row"]

OBS, CRITIC, ACTIONS = 3, 5, 2
FEWEST = 4
"""Rows an env has at least."""

Row = dict[str, Any]
Key = tuple[int, int]
"""An env and the number of a step, which the first two numbers of its observation say."""


@dataclass(frozen=True)
class Chances:
    """Of what may happen in a step."""

    terminal: float = 0.1
    truncated: float = 0.1
    reset: float = 0.0
    """The env is reset although the step did not end its episode."""
    limit: float = 0.0
    """A truncation that is not done."""


class Play:
    """Steps of N envs. A step's next observation is the next step's observation, but for ends and resets."""

    def __init__(self, envs: int, steps: int, seed: int = 0, whole: bool = True, **chances: float) -> None:
        rng, odds = np.random.default_rng(seed), Chances(**chances)
        self.envs, self.steps = envs, steps
        shape = steps, envs
        reward = rng.integers(-8, 9, shape) if whole else rng.normal(size=shape)
        self.reward = torch.from_numpy(reward.astype(np.float32))
        self.action = torch.from_numpy(rng.normal(size=(*shape, ACTIONS)).astype(np.float32))
        terminal, cut, reset, limit = (
            torch.from_numpy(rng.random(shape) < x) for x in (odds.terminal, odds.truncated, odds.reset, odds.limit)
        )
        self.truncations, self.dones = cut | limit, terminal | cut
        self.resets = reset & ~self.dones & ~limit

        def seen(count: int, later: float) -> Tensor:
            numbers = torch.from_numpy(rng.normal(size=(count, envs, CRITIC)).astype(np.float32))
            numbers[..., 0], numbers[..., 1] = torch.arange(envs), torch.arange(count)[:, None] + later
            return numbers

        self.critic, apart = seen(steps + 1, 0.0), seen(steps, 0.5)
        self.next_critic = torch.where((self.dones | self.resets)[..., None], apart, self.critic[1:])

    @property
    def ends(self) -> Tensor:
        """Which steps end an episode, those after which the env was reset included."""
        return self.dones | self.truncations | self.resets

    def step(self, t: int) -> TensorDict:
        """What FastTD3's training passes."""
        following = {
            "observations": self.next_critic[t][:, :OBS], "rewards": self.reward[t],
            "truncations": self.truncations[t].long(), "dones": self.dones[t].long(),
            "critic_observations": self.next_critic[t],
        }  # fmt: skip
        step = {"observations": self.critic[t][:, :OBS], "actions": self.action[t], "next": following}
        return TensorDict(step | {"critic_observations": self.critic[t]}, [self.envs])

    # -- what is right ------------------------------------------------------------------------------------------

    def complete(self, env: int, t: int) -> bool:
        """True if a step's next observation is stored: the newest step is kept apart, the one before waits for it."""
        return t < self.steps - 2 or (t == self.steps - 2 and bool(self.ends[t, env]))

    def starts(self, size: int) -> set[Key]:
        """The steps that can be drawn of buffers of ``size`` steps an env. A final observation takes a row."""
        found: set[Key] = set()
        for env in range(self.envs):
            rows: list[int | None] = []
            for t in range(self.steps - 1):
                rows += [t, None] if self.ends[t, env] else [t]
            live = [t for t in rows[-max(size + 1, FEWEST) :] if t is not None]
            found |= {(env, t) for t in live if self.complete(env, t)}
        return found

    def row(self, env: int, t: int, n: int, gamma: float) -> Row:
        """The transition of up to ``n`` steps from step ``t`` on, summed in float64."""
        reward, discount, k = 0.0, 1.0, 0
        while True:
            reward += discount * float(self.reward[t + k, env])
            discount *= gamma
            k += 1
            last = t + k - 1
            if k == n or self.ends[last, env] or not self.complete(env, last + 1):
                break
        return {
            "observations": self.critic[t, env, :OBS], "actions": self.action[t, env],
            "critic_observations": self.critic[t, env], "rewards": np.float32(reward),
            "dones": int(self.ends[last, env]), "effective_n_steps": k,
            "truncations": int(self.truncations[last, env] | self.resets[last, env]),
            "next_observations": self.next_critic[last, env, :OBS],
            "next_critic_observations": self.next_critic[last, env],
        }  # fmt: skip


class Host:
    """What FastTD3's class gives for each row that it may draw, in the words of its own rules.

    Only ``dones`` stop a sum. The next observation is that of the first done, truncated or last step of the window.
    Once the ring is full, its newest step counts as truncated if it is not done.
    """

    def __init__(self, play: Play, size: int, n: int, gamma: float) -> None:
        self.play, self.size, self.n, self.gamma = play, size, n, gamma
        self.full = play.steps >= size
        self.held = [max(t for t in range(play.steps) if t % size == row) for row in range(min(size, play.steps))]
        """The number of the step in each row."""

    def rows(self) -> dict[Key, Row]:
        """Every row that it may draw."""
        count = len(self.held)
        starts = count if self.full or self.n == 1 else max(1, count - self.n + 1)
        return {(env, self.held[row]): self._row(env, row) for env in range(self.play.envs) for row in range(starts)}

    def _row(self, env: int, row: int) -> Row:
        play = self.play
        steps = [self.held[(row + k) % self.size] for k in range(self.n)]
        done = [bool(play.dones[t, env]) for t in steps]
        cut = [bool(play.truncations[t, env]) for t in steps]
        if self.full and self.n > 1:
            cut = [not d if t == play.steps - 1 else c for t, d, c in zip(steps, done, cut, strict=True)]
        summed = next((k + 1 for k in range(self.n) if done[k]), self.n)
        last = next((k for k in range(self.n) if done[k] or cut[k]), self.n - 1)
        reward = sum(self.gamma**k * float(play.reward[steps[k], env]) for k in range(summed))
        return {
            "observations": play.critic[steps[0], env, :OBS], "actions": play.action[steps[0], env],
            "critic_observations": play.critic[steps[0], env], "rewards": np.float32(reward), "dones": int(done[last]),
            "truncations": int(cut[last]), "effective_n_steps": summed,
            "next_observations": play.next_critic[steps[last], env, :OBS],
            "next_critic_observations": play.next_critic[steps[last], env],
        }  # fmt: skip

    def is_right(self, env: int, t: int) -> bool:
        """True if the window from step ``t`` on stays before the two newest steps, or ends before."""
        window = range(t, min(t + self.n, self.play.steps))
        return t + self.n <= self.play.steps - 2 or any(bool(self.play.dones[k, env]) for k in window[:-1])


def by_start(batch: TensorDict) -> dict[Key, Row]:
    """The rows of a batch by the step that each begins with."""
    flat = {name: batch[name] for name in batch.keys() if name != "next"}
    flat |= {
        f"next_{name}" if name.endswith("observations") else name: batch["next", name] for name in batch["next"].keys()
    }
    keys = [(int(env), int(t)) for env, t in batch["observations"][:, :2].tolist()]
    return {key: {name: x[i] for name, x in flat.items()} for i, key in enumerate(keys)}


def same_row(found: Row, expected: Row, *, loose: bool = False) -> bool:
    """Whether a row has the same bits as the ``expected`` one; with ``loose``, rewards may be rounded differently."""
    for name, value in found.items():
        wanted = torch.as_tensor(expected[name]).to(value.dtype)
        if loose and name == "rewards":
            if not torch.allclose(value, wanted, rtol=1e-5, atol=1e-6):
                return False
        elif not torch.equal(value, wanted):
            return False
    return True
