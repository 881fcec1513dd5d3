"""Collections from tagged envs, and what they should have stored."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from torch import Tensor

import relive
from relive import GAE, Collector, Field, RolloutBuffer, Schema
from support import oracle, tagged_envs
from support.tagged_envs import Tag

MODES = tuple(AutoresetMode)
OBSERVATIONS: tuple[tagged_envs.Observations, ...] = ("box", "dict", "tuple")

MASK = Field((tagged_envs.NUM_ACTIONS,), torch.int8)

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


def policy(obs: Any, action_mask: Any = None, *, actions: tagged_envs.Actions = "discrete") -> dict[str, Any]:
    return {
        "action": tagged_envs.tagged_policy(obs, action_mask, actions=actions),
        "value": tagged_envs.tagged_value(obs),
    }


def stored(buffer: RolloutBuffer) -> list[list[Row]]:
    """The real steps of each env, in the order of time."""
    tags = tagged_envs.decode(buffer["obs"])
    rows: list[list[Row]] = [[] for _ in range(buffer.num_envs)]
    columns = [buffer[name].tolist() for name in ("reward", "terminated", "truncated", "value", "final_value")]
    actions = buffer["action"].reshape(buffer.steps, buffer.num_envs, -1).tolist()
    for t, n in buffer["mask"].nonzero().tolist():
        reward, terminated, truncated, value, final_value = (column[t][n] for column in columns)
        tag = Tag(*(int(numbers[t, n]) for numbers in tags))
        final = final_value if truncated and not terminated else None
        rows[n].append(Row(tag, tuple(actions[t][n]), reward, terminated, truncated, value, final))
    return rows


def truth(endings: tagged_envs.Endings, counts: list[int], **options: Any) -> list[list[Row]]:
    """The first ``counts[n]`` steps of each env n, as the schedule says."""
    played = tagged_envs.played(endings, range(len(counts)), counts, **options)
    return [
        [
            Row(
                Tag(*map(int, tagged_envs.decode(step.obs))),
                tuple(np.reshape(step.action, -1).tolist()),
                step.reward,
                step.terminated,
                step.truncated,
                step.extras["value"],
                float(tagged_envs.value_of(tagged_envs.decode(step.next_obs)))
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
        tags = tagged_envs.decode(buffer["obs"])
        for t, n in np.argwhere(buffer["mask"].numpy() & ended):
            advantages[Tag(*(int(x[t, n]) for x in tags))] = float(buffer["advantage"][t, n])
    return rows, advantages


def check_against_oracle(buffer: RolloutBuffer) -> None:
    names = ("reward", "terminated", "truncated", "final_value", "mask")
    block = {name: buffer[name].numpy() for name in names}
    value = torch.cat([buffer["value"], buffer.last["value"].unsqueeze(0)]).numpy()
    advantage, ret = oracle.gae(value=value, **block, gamma=0.9, lam=0.8)
    assert np.array_equal(buffer.last["value"], tagged_envs.tagged_value(buffer.last["obs"]))
    np.testing.assert_allclose(buffer["advantage"], advantage, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(buffer["return"], ret, rtol=1e-5, atol=1e-6)


def check_unbroken(buffer: RolloutBuffer) -> None:
    """Obs and reward of a row are of one step, and the row after it goes on with the play."""
    tags = tagged_envs.decode(buffer["obs"])
    for n in range(buffer.num_envs):
        before: Tag | None = None
        for t in range(buffer.steps):
            tag = Tag(*(int(x[t, n]) for x in tags))
            if not buffer["mask"][t, n]:
                before = None  # every trace stops at it
                continue
            assert float(buffer["reward"][t, n]) == tagged_envs.reward_of(*tag[:3]), f"step {t} of env {n}: {tag}"
            assert before is None or tag == before._replace(step=before.step + 1), f"step {t} of env {n}: {tag}"
            before = None if buffer["terminated"][t, n] or buffer["truncated"][t, n] else tag


class Control(NamedTuple):
    """A real env, a policy and a value that are functions of each observation alone, row by row."""

    name: str
    limit: int
    act: Callable[[Tensor], Tensor]

    def __call__(self, obs: Tensor) -> dict[str, Tensor]:
        return {"action": self.act(obs), "value": obs[..., 0] * 0.25 - obs[..., 1] * 3 + obs[..., 2]}


CARTPOLE = Control("CartPole-v1", 40, lambda obs: (obs[..., 2] + 0.1 * obs[..., 3] > 0).long() * (obs[..., 0] < 0.04))


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
        rows = [given[n] if present[n] else tagged_envs.row(obs, n) for n in range(len(present))]
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


def hide(obs: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return obs, {key: x for key, x in info.items() if "final" not in key}


def followed(replay: relive.ReplayBuffer) -> list[tuple[Tag, Tag, float, bool, bool]]:
    """The transitions that can be drawn: where each is from, where it led, its reward and flags; sorted."""
    batch = replay.data()
    tags, after = tagged_envs.decode(batch["obs"]), tagged_envs.decode(batch["next_obs"])
    columns = [batch[name].tolist() for name in ("reward", "terminated", "truncated")]
    return sorted(
        (Tag(*(int(x[i]) for x in tags)), Tag(*(int(x[i]) for x in after)), *(column[i] for column in columns))
        for i in range(len(batch))
    )


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


def ends(buffer: RolloutBuffer) -> tuple[Tensor, Tensor]:
    return buffer["terminated"], buffer["truncated"]


def counting(obs: Any, hidden: Any) -> dict[str, Any]:
    """Its hidden state counts the steps of the episode."""
    return policy(obs) | {"hidden": hidden + 1}


# Warming up


def cartpoles(mode: AutoresetMode, num_envs: int = 2) -> SyncVectorEnv:
    return SyncVectorEnv([partial(gym.make, "CartPole-v1", max_episode_steps=15)] * num_envs, autoreset_mode=mode)
