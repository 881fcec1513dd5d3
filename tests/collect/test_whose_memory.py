"""Whose memory is it? Policies and envs may write to what they were handed; what is stored is what the env returned."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict
from torch import Tensor

from relive import Collector, Field, ReplayBuffer, RolloutBuffer, Schema
from support import tagged_envs
from support.tagged_collections import MASK, every_mode, make_buffer, policy, stored, truth

SCHEDULE = tagged_envs.cycle([(2, "truncated"), (3, "terminated")], [(1, "both"), (4, "truncated")])


def spoil(tree: Any) -> None:
    """Overwrite every array and tensor of a tree."""
    if isinstance(tree, dict | TensorDict):
        for part in tree.values():
            spoil(part)
    elif isinstance(tree, tuple | list):
        for part in tree:
            spoil(part)
    elif isinstance(tree, Tensor):
        tree.fill_(77)
    elif isinstance(tree, np.ndarray) and tree.dtype != object:
        tree[...] = 77


def spoiling(obs: Any, **inputs: Any) -> dict[str, Any]:
    """Acts, and then writes to all that it was handed."""
    answer = policy(obs, inputs.get("action_mask"))
    if "hidden" in inputs:
        answer["hidden"] = inputs["hidden"] + 1
    spoil(obs)
    spoil(inputs)
    return answer


@every_mode
@pytest.mark.parametrize("observations", ["box", "dict", "tuple"])
def test_a_policy_and_a_critic_that_write_to_their_inputs_change_nothing_that_is_stored(
    observations: tagged_envs.Observations, mode: AutoresetMode
) -> None:
    envs = tagged_envs.make_tagged(2, mode, SCHEDULE, observations=observations)
    buffer = make_buffer(envs, 9)

    def critic(obs: Any) -> Tensor:
        value = tagged_envs.tagged_value(obs)
        spoil(obs)
        return value

    collector = Collector(envs, spoiling, buffer, value_fn=critic, seed=0)
    rows: list[list[Any]] = [[], []]
    for _ in range(2):
        collector.collect()
        for mine, new in zip(rows, stored(buffer), strict=True):
            mine.extend(new)
    assert rows == truth(SCHEDULE, [len(mine) for mine in rows], seed=0, observations=observations)
    assert np.array_equal(buffer.last["value"], tagged_envs.tagged_value(buffer.last["obs"]))


KEYWORDS = {"hidden": (1, 3), "is_start": Field((), torch.bool), "last_reward": (), "action_mask": MASK}


@every_mode
@pytest.mark.parametrize("kind", ["rollout", "replay", "chunks"])
def test_every_keyword_of_a_policy_may_be_written_to(kind: str, mode: AutoresetMode) -> None:
    def play(acting: Any) -> Any:
        envs = tagged_envs.make_tagged(2, mode, SCHEDULE, action_mask=True)
        schema = Schema.from_env(envs, value=(), **KEYWORDS)
        if kind == "rollout":
            rollout = RolloutBuffer(schema, 12, 2)
            Collector(envs, acting, rollout, seed=0).collect()
            return {name: rollout[name] for name in (*schema.names, "final_value")} | {"last": rollout.last["value"]}
        replay = ReplayBuffer(schema, 100, 2, seed=0)
        if kind == "replay":
            Collector(envs, acting, replay, seed=0).collect(12)
        else:
            replay.extend(Collector(envs, acting, schema=schema, seed=0).steps(12))
        return dict(replay.data().items())

    def careful(obs: Any, **inputs: Any) -> Any:
        return spoiling(obs.clone(), **{name: x.clone() for name, x in inputs.items()})

    right, found = play(careful), play(spoiling)
    assert right["hidden"].any()
    for name, column in right.items():
        assert torch.equal(found[name].nan_to_num(), column.nan_to_num()), name


class Writing(gym.vector.VectorWrapper):
    """Writes to the actions that it was handed, and to all that the policy returned, before it plays."""

    def __init__(self, envs: Any) -> None:
        super().__init__(envs)
        self.owned: dict[str, Any] = {}

    def step(self, actions: Any) -> Any:
        played, kept = actions.copy(), torch.as_tensor(self.owned["action"]).clone()
        spoil(actions)
        assert torch.equal(torch.as_tensor(self.owned["action"]), kept)  # the policy's own actions are still its own
        spoil(self.owned)
        return self.env.step(played)


@every_mode
@pytest.mark.parametrize("form", ["tensor", "array", "of another dtype"])
def test_actions_and_all_that_a_policy_returns_may_be_overwritten_by_the_envs(form: str, mode: AutoresetMode) -> None:
    def returning(obs: Any) -> dict[str, Any]:
        answer = policy(obs) | {"extra": obs[:, :2].clone()}
        if form == "array":
            answer = {name: x.numpy().copy() for name, x in answer.items()}
        elif form == "of another dtype":
            answer["action"] = answer["action"].int()
        envs.owned = answer
        return answer

    envs = Writing(tagged_envs.make_tagged(2, mode, SCHEDULE))
    buffer = make_buffer(envs, 9, extra=(2,))
    Collector(envs, returning, buffer, seed=0).collect()
    rows = stored(buffer)
    assert rows == truth(SCHEDULE, [len(mine) for mine in rows], seed=0)
    assert torch.equal(buffer["extra"], buffer["obs"][..., :2])


class Inplace:
    """A simulator that fills one tensor of each kind, clips its actions in place, and shows what episodes ended on."""

    num_envs, device = 2, torch.device("cpu")

    def __init__(self) -> None:
        self.obs, self.final, self.reward = torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2)
        self.flags = torch.zeros(2, 2, dtype=torch.bool)
        self.count = 0

    def reset(self) -> Tensor:
        return self.obs

    def step(self, action: Tensor) -> Any:
        self.count += 1
        action.clamp_(-1, 1)
        self.reward[:] = self.count
        self.final[:] = self.count
        self.flags[1] = self.count % 3 == 0
        self.obs[:] = torch.where(self.flags[1, :, None], torch.full_like(self.obs, self.count + 0.5), self.final)
        return self.obs, self.reward, self.flags[0], self.flags[1], {"final_obs": self.final}


SIMULATED = Schema({
    "obs": (2,), "action": (1,), "reward": (), "terminated": Field((), torch.bool), "truncated": Field((), torch.bool),
    "value": (), "hidden": (3,),
})  # fmt: skip


@pytest.mark.parametrize("kind", ["rollout", "replay"])
def test_a_simulator_a_policy_and_a_critic_may_all_write_in_place(kind: str) -> None:
    def acting(obs: Tensor, hidden: Tensor) -> dict[str, Tensor]:
        answer = {"action": obs[:, :1] + 3, "value": obs[:, 0].clone(), "hidden": hidden.add_(1)}
        obs.zero_()
        return answer

    def critic(obs: Tensor, hidden: Tensor) -> Tensor:
        value = obs[:, 0].clone()
        obs.zero_()
        hidden.zero_()
        return value

    if kind == "rollout":
        rollout = RolloutBuffer(SIMULATED, 7, 2)
        Collector(Inplace(), acting, rollout, value_fn=critic).collect()
        rows: Any = {name: rollout[name][:, 0] for name in ("obs", "action", "reward", "hidden")}
        assert rollout["final_value"][[2, 5], 0].tolist() == [3, 6]
    else:
        replay = ReplayBuffer(SIMULATED, 100, 2, seed=0)
        Collector(Inplace(), acting, replay).collect(8)
        batch = replay.data()
        rows = batch.rows(batch["index"] % 2 == 0)
        assert rows["next_obs"][:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7]
    seen = [0, 1, 2, 3.5, 4, 5, 6.5]
    assert rows["obs"][:, 0].tolist() == seen
    assert rows["action"][:, 0].tolist() == [x + 3 for x in seen]
    assert rows["reward"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert rows["hidden"][:, 0].tolist() == [0, 1, 2, 0, 1, 2, 0]


# One env


class Own(gym.Env[Any, Any]):
    """Returns its own array, which every step and reset fills. Episodes of four steps start at 0, 100, 200, ..."""

    observation_space = gym.spaces.Box(-1e3, 1e3, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.state, self.episode, self.count = np.zeros(1, np.float32), -1, 0
        self.options: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.options.append(options)
        self.episode, self.count = self.episode + 1, 0
        self.state[0] = 100 * self.episode
        return self.state, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        self.state[0] += 1
        return self.state, 1.0, False, self.count == 4, {}


def valued(obs: Tensor) -> dict[str, Tensor]:
    return {"action": torch.zeros(len(obs), dtype=torch.int64), "value": obs[:, 0]}


@pytest.mark.parametrize("told", [None, *AutoresetMode], ids=str)
@pytest.mark.parametrize("factory", [False, True])
def test_a_single_env_may_return_its_own_array(factory: bool, told: Any) -> None:
    buffer = make_buffer(Own(), 8)
    Collector(partial(Own) if factory else Own(), valued, buffer, autoreset_mode=told).collect()
    assert buffer["obs"][:, 0, 0].tolist() == [0, 1, 2, 3, 100, 101, 102, 103]
    assert buffer["final_value"][buffer["truncated"]].tolist() == [4, 104]


def test_a_single_env_may_return_its_own_array_into_a_replay_a_chunk_and_a_warm_up() -> None:
    schema = Schema.from_env(Own())
    replay, chunk, warm = (ReplayBuffer(schema, 100, 1, seed=0) for _ in range(3))
    acting = lambda obs: valued(obs)["action"]  # noqa: E731
    Collector(Own(), acting, replay).collect(9)
    chunk.extend(Collector(Own(), acting).steps(9))
    Collector(Own(), acting, RolloutBuffer(schema, 4, 1)).warm(warm, 9, envs=Own())
    for filled in (replay, chunk, warm):
        assert filled.data()["next_obs"][:, 0].tolist() == [1, 2, 3, 4, 101, 102, 103, 104]


def test_a_single_env_is_reset_without_options() -> None:
    env = Own()
    Collector(env, valued, make_buffer(env, 20)).collect()
    assert env.options == [None] * 6
