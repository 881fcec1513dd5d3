"""Rollouts of other libraries, filled by their own collectors; each function yields runs to audit."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import nn

from audit_envs import ENVS, SHORT, Run, critic, vector
from audit_replays import load, shell


def stable_baselines3() -> Iterator[Run]:
    """``PPO.learn``, whose last rollout stays in its buffer."""
    sb3, util = load("stable_baselines3"), load("stable_baselines3.common.env_util")
    for env in ENVS:
        model = sb3.PPO("MlpPolicy", util.make_vec_env(env, 2, seed=0), n_steps=500, seed=0, device="cpu")
        model.learn(5000)
        yield Run("`PPO.learn`, 2 environments", env, model.rollout_buffer)


class Simulated:
    """Gymnasium environments as simulators on a GPU offer them: reset at once, with flags of time-outs."""

    def __init__(self, env: str, count: int = 8) -> None:
        self._envs = vector(env, AutoresetMode.SAME_STEP, count)
        self.num_envs, self.num_actions, self.device = count, 1, "cpu"
        self.cfg: dict[str, Any] = {}
        self.max_episode_length = gym.make(env).spec.max_episode_steps or 0  # type: ignore[union-attr]
        self.episode_length_buf = torch.zeros(count, dtype=torch.int64)
        self._obs, _ = self._envs.reset(seed=0)

    def observed(self) -> Any:
        return load("tensordict").TensorDict({"policy": torch.as_tensor(self._obs).float()}, [self.num_envs])

    def played(self, actions: torch.Tensor) -> tuple[Any, ...]:
        """Rewards, terminals and time-outs after one step."""
        space = self._envs.single_action_space
        given = actions.detach().numpy()
        chosen = (given[:, 0] > 0).astype(np.int64) if isinstance(space, gym.spaces.Discrete) else given.clip(-2, 2)
        self._obs, reward, terminated, truncated, _ = self._envs.step(chosen)
        return torch.as_tensor(reward).float(), torch.as_tensor(terminated), torch.as_tensor(truncated)


class RslRlEnv(Simulated):
    """As rsl_rl asks for it."""

    def get_observations(self) -> Any:
        return self.observed()

    def step(self, actions: torch.Tensor) -> tuple[Any, ...]:
        reward, terminated, truncated = self.played(actions)
        return self.observed(), reward, (terminated | truncated).long(), {"time_outs": truncated}


def rsl_rl() -> Iterator[Run]:
    """``OnPolicyRunner.learn`` with PPO; the storage is read after ``compute_returns``, before it is cleared."""
    runners = load("rsl_rl.runners")
    model = {"class_name": "MLPModel", "hidden_dims": [32], "activation": "elu"}
    noise = {"class_name": "GaussianDistribution", "init_std": 1.0}
    config = {
        "num_steps_per_env": 250, "save_interval": 1000, "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "algorithm": {"class_name": "PPO", "gamma": 0.99, "lam": 0.95}, "critic": dict(model),
        "actor": model | {"distribution_cfg": noise},
    }  # fmt: skip
    for env in ENVS:
        torch.manual_seed(0)
        runner = runners.OnPolicyRunner(RslRlEnv(env), config)
        found: list[Any] = []
        update = runner.alg.update

        def kept(update: Any = update, found: list[Any] = found, runner: Any = runner) -> Any:
            found[:] = [load("copy").deepcopy(runner.alg.storage)]
            return update()

        runner.alg.update = kept
        runner.learn(3)
        yield Run("`OnPolicyRunner.learn` with PPO, 8 environments", env, found[0])


class EmbodiChainEnv(Simulated):
    """As EmbodiChain's collector asks for it."""

    def reset(self) -> tuple[Any, dict[str, Any]]:
        return self.observed(), {}

    def step(self, actions: torch.Tensor) -> tuple[Any, ...]:
        reward, terminated, truncated = self.played(actions)
        return self.observed(), reward, terminated, truncated, {}


def embodichain() -> Iterator[Run]:
    """``SyncCollector`` and ``compute_gae``."""
    root = "embodichain.learning.rl"
    collector, buffers, policies, common = (
        load(f"{root}.{x}") for x in ("collector", "buffer", "policies", "algo.common")
    )
    for env in ENVS:
        torch.manual_seed(0)
        game, cpu = EmbodiChainEnv(env), torch.device("cpu")
        width = game.observed()["policy"].shape[1]
        nets = [nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, 1)) for _ in range(2)]
        with torch.no_grad():
            nn.init.constant_(nets[1][2].bias, 5.0)  # pyright: ignore[reportArgumentType]
        agent = policies.ActorCritic(width, 1, cpu, *nets)
        buffer = buffers.RolloutBuffer(game.num_envs, 300, width, 1, cpu)
        rollout = collector.SyncCollector(game, agent, cpu).collect(300, buffer.start_rollout())
        common.compute_gae(rollout, 0.99, 0.95)
        buffer.add(rollout)
        yield Run("`SyncCollector.collect` and `compute_gae`, 8 environments", env, buffer)


def agilerl() -> Iterator[Run]:
    """``collect_rollouts`` of its PPO, on environments of its ``make_vect_envs``."""
    ppo, rollouts = load("agilerl.algorithms.ppo"), load("agilerl.rollouts.on_policy")
    utils = load("agilerl.utils.utils")
    for env in ENVS:
        torch.manual_seed(0)
        envs = utils.make_vect_envs(env, num_envs=4, should_async_vector=False)
        agent = ppo.PPO(envs.single_observation_space, envs.single_action_space, num_envs=4, learn_step=2000)
        rollouts.collect_rollouts(agent, envs)
        yield Run("`collect_rollouts` of its PPO, 4 environments", env, agent.rollout_buffer)


class OldEnv:
    """A Gymnasium environment with the four results that PyTorchRL was written for."""

    def __init__(self, env: str, seed: int) -> None:
        self._env, self._seed = gym.make(env), seed
        self.observation_space, self.action_space = self._env.observation_space, self._env.action_space
        self.spec, self.metadata = self._env.spec, self._env.metadata

    def reset(self) -> Any:
        seed, self._seed = self._seed, None
        return self._env.reset(seed=seed)[0]

    def step(self, action: Any) -> tuple[Any, ...]:
        obs, reward, terminated, truncated, info = self._env.step(action)
        return obs, reward, terminated or truncated, info


def pytorchrl() -> Iterator[Run]:
    """Its ``SequentialVecEnv`` and its off-policy buffers, by the loop of its collection worker."""
    shell("pytorchrl", "agent", "agent.storages", "agent.storages.off_policy", "agent.env", "agent.env.vec_envs")
    sys.modules.setdefault("gym", ModuleType("gym")).__dict__.setdefault("spaces", gym.spaces)
    envs_of = load("pytorchrl.agent.env.vec_envs.sequential_vec_env")
    storages = {n: load(f"pytorchrl.agent.storages.off_policy.{name}_buffer")
                for n, name in ((1, "replay"), (3, "nstep"))}  # fmt: skip

    class Parts:
        is_recurrent, gamma, _update_every = False, 0.99, 50

    for env, n in [*((env, 1) for env in ENVS), (SHORT, 3)]:
        envs = envs_of.SequentialVecEnv([lambda env=env, i=i: OldEnv(env, i) for i in range(2)])
        make = storages[n].ReplayBuffer if n == 1 else storages[n].NStepReplayBuffer
        further = {} if n == 1 else {"n_step": n}
        storage = make(size=1500, device="cpu", actor=Parts(), algorithm=Parts(), envs=envs, **further)
        envs.action_space.seed(0)
        obs, done = envs.reset(), np.zeros(2, bool)

        def given(x: Any) -> torch.Tensor:
            return torch.as_tensor(np.asarray(x), dtype=torch.float32).reshape(2, -1)

        for _ in range(1500):
            act = np.stack([envs.action_space.sample() for _ in range(2)])
            obs2, reward, done2, infos = envs.step(act)
            storage.insert_transition({
                "Observation": given(obs), "RecurrentHiddenStates": given([0, 0]), "Done": given(done),
                "Action": given(act), "Reward": given(reward), "NextObservation": given(obs2),
                "NextRecurrentHiddenStates": given([0, 0]), "NextDone": given(done2), "EnvironmentInformation": infos,
            })  # fmt: skip
            obs, done = obs2, done2
        option = "" if n == 1 else ", `NStepReplayBuffer(n_step=3)`"
        yield Run(f"its vector environment and buffer, 2 environments{option}", env, storage)


def cleanrl(checkout: Path) -> Iterator[Run]:
    """The arrays of ``ppo.py``, on the autoreset of Gymnasium 0.29 and on the default since 1.0."""
    assert (checkout / "cleanrl" / "ppo.py").exists()
    names = {AutoresetMode.SAME_STEP: "Gymnasium 0.29's autoreset", AutoresetMode.NEXT_STEP: "Gymnasium 1's default"}
    for env, mode in [*((env, AutoresetMode.SAME_STEP) for env in ENVS), (SHORT, AutoresetMode.NEXT_STEP)]:
        envs, value, size = vector(env, mode, 4), critic(), 500
        obs, _ = envs.reset(seed=0)
        done, rows = np.zeros(4), []
        for _ in range(size):
            action = envs.action_space.sample()
            row = {"obs": obs, "dones": done, "actions": action, "values": value(obs).numpy()}
            obs, reward, terminated, truncated, _ = envs.step(action)
            done = np.logical_or(terminated, truncated).astype(np.float64)
            rows.append(row | {"rewards": reward, "logprobs": np.zeros(4)})
        arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        arrays["advantages"] = _gae_of_cleanrl(arrays, value(obs).numpy(), done)
        yield Run(f"the arrays of `ppo.py`, 4 environments, {names[mode]}", env, {**arrays, "next_done": done})


def _gae_of_cleanrl(arrays: dict[str, Any], next_value: Any, next_done: Any, gamma: float = 0.99) -> Any:
    """Advantages by the recursion of ``ppo.py``: the flags of row t + 1 cut row t."""
    after = np.append(arrays["values"][1:], next_value[None], 0)
    open_ = 1 - np.append(arrays["dones"][1:], next_done[None], 0)
    delta = arrays["rewards"] + gamma * after * open_ - arrays["values"]
    advantages, last = np.zeros_like(delta), np.zeros(delta.shape[1])
    for t in reversed(range(len(delta))):
        advantages[t] = last = delta[t] + gamma * 0.95 * open_[t] * last
    return advantages


def gymnasium() -> Iterator[Run]:
    """The arrays of the tutorial on A2C in vector environments, with the flags that its loop gets and does not keep."""
    for env in ENVS:
        envs, value = vector(env, AutoresetMode.NEXT_STEP, 4), critic()
        states, _ = envs.reset(seed=0)
        rows = []
        for _ in range(500):
            actions = envs.action_space.sample()
            row = {"obs": states, "action": actions, "value": value(states).numpy()}
            states, rewards, terminated, truncated, _ = envs.step(actions)
            rows.append(row | {"reward": rewards, "terminated": terminated, "truncated": truncated})
        arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        arrays["advantage"] = _gae_of_tutorial(arrays)
        yield Run("the arrays of the A2C tutorial, 4 environments", env, arrays)


def _gae_of_tutorial(arrays: dict[str, Any], gamma: float = 0.99, lam: float = 0.95) -> Any:
    """Advantages by the tutorial's recursion: masks are 0 where terminated, and the last row has none."""
    value, mask = arrays["value"], 1.0 - arrays["terminated"]
    advantages, last = np.zeros_like(value), np.zeros(value.shape[1])
    for t in reversed(range(len(value) - 1)):
        error = arrays["reward"][t] + gamma * mask[t] * value[t + 1] - value[t]
        advantages[t] = last = error + gamma * lam * mask[t] * last
    return advantages
