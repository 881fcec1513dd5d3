"""Replay buffers of other libraries, filled by their own training loops; each function yields runs to audit."""

import contextlib
import importlib
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from audit_envs import ENVS, SHORT, Run, vector

STEPS = 3000


def load(name: str) -> Any:
    return importlib.import_module(name)


def shell(package: str, *parts: str) -> None:
    """Lets modules be imported without the ``__init__`` of these packages, which import far more."""
    spec = importlib.util.find_spec(package)
    assert spec
    assert spec.submodule_search_locations
    for part in parts:
        full, folder = f"{package}.{part}", Path(spec.submodule_search_locations[0])
        if full not in sys.modules:
            module = ModuleType(full)
            module.__path__ = [str(folder.joinpath(*part.split(".")))]
            sys.modules[full] = module


def stable_baselines3() -> Iterator[Run]:
    """``DQN.learn`` and ``SAC.learn`` with two environments, and DQN with the option to save memory."""
    sb3, util = load("stable_baselines3"), load("stable_baselines3.common.env_util")
    common: Any = {"buffer_size": 10_000, "learning_starts": 500, "seed": 0, "device": "cpu"}
    for env in ENVS:
        name = "SAC" if env.startswith("Pendulum") else "DQN"
        model = getattr(sb3, name)("MlpPolicy", util.make_vec_env(env, 2, seed=0), train_freq=8, **common)
        model.learn(STEPS)
        yield Run(f"`{name}.learn`, 2 environments", env, model.replay_buffer)
    options = {"optimize_memory_usage": True, "replay_buffer_kwargs": {"handle_timeout_termination": False}}
    common["learning_starts"] = STEPS  # at random, for a trained policy seldom reaches the limit so early
    model = sb3.DQN("MlpPolicy", util.make_vec_env(SHORT, 1, seed=0), **options, **common)
    model.learn(STEPS)
    yield Run("`DQN.learn`, `optimize_memory_usage=True`", SHORT, model.replay_buffer)


def tianshou() -> Iterator[Run]:
    """``Collector.collect`` into a ``VectorReplayBuffer``, with and without the option to save memory."""
    data, envs_of = load("tianshou.data"), load("tianshou.env")
    dqn, nets = load("tianshou.algorithm.modelfree.dqn"), load("tianshou.utils.net.common")
    for env, saves in [*((env, False) for env in ENVS), (SHORT, True)]:
        envs = envs_of.DummyVectorEnv([lambda env=env: gym.make(env)] * 2)
        envs.seed(0)
        space = gym.make(env).action_space
        space.seed(0)
        net = nets.Net(state_shape=gym.make(env).observation_space.shape, action_shape=2)
        discrete = space if isinstance(space, gym.spaces.Discrete) else gym.spaces.Discrete(2)
        policy = dqn.DiscreteQLearningPolicy(model=net, action_space=discrete)
        policy.action_space = space  # of random actions
        buffer = data.VectorReplayBuffer(10_000, 2, ignore_obs_next=saves)
        data.Collector(policy, envs, buffer).collect(n_step=STEPS, random=True, reset_before_collect=True)
        option = ", `ignore_obs_next=True`" if saves else ""
        yield Run(f"`Collector.collect`, 2 environments{option}", env, buffer)


def torchrl() -> Iterator[Run]:
    """``Collector`` into a ``TensorDictReplayBuffer``, and the same with its ``MultiStep`` of 3."""
    collectors, envs_of, data = load("torchrl.collectors"), load("torchrl.envs"), load("torchrl.data")
    modules = load("torchrl.envs.utils")
    for env, n in [*((env, 1) for env in ENVS), ("CartPole-v1", 3), (SHORT, 3)]:
        torch.manual_seed(0)
        made = envs_of.GymEnv(env) if n > 1 else envs_of.SerialEnv(2, lambda env=env: envs_of.GymEnv(env))
        made.set_seed(0)
        step = data.MultiStep(gamma=0.99, n_steps=n) if n > 1 else None
        collector = collectors.Collector(
            made, modules.RandomPolicy(made.action_spec), frames_per_batch=200, total_frames=STEPS, postproc=step
        )
        buffer = data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(10_000))
        for block in collector:
            buffer.extend(block.reshape(-1))
        option = ", `MultiStep(n_steps=3)`" if n > 1 else ", 2 environments"
        yield Run(f"`Collector` and `ReplayBuffer.extend`{option}", env, buffer)


def cpprb() -> Iterator[Run]:
    """The loop of its documentation, with ``done`` a terminal; and ``next_of`` with ``on_episode_end()``."""
    module = load("cpprb")
    for env, once in [*((env, False) for env in ENVS), (SHORT, True)]:
        game = gym.make(env)
        game.action_space.seed(0)
        shapes: Any = {"obs": {"shape": game.observation_space.shape}, "act": {"shape": game.action_space.shape or 1}}
        shapes |= {"rew": {}, "done": {}} | ({} if once else {"next_obs": shapes["obs"]})
        buffer = module.ReplayBuffer(10_000, shapes, **({"next_of": "obs"} if once else {}))
        obs, _ = game.reset(seed=0)
        for _ in range(STEPS):
            action = game.action_space.sample()
            next_obs, reward, terminated, truncated, _ = game.step(action)
            buffer.add(obs=obs, act=action, rew=reward, next_obs=next_obs, done=terminated)
            obs = next_obs
            if terminated or truncated:
                buffer.on_episode_end()
                obs, _ = game.reset()
        option = ', `next_of="obs"`' if once else ""
        yield Run(f"the loop of its documentation{option}", env, buffer)


def agilerl() -> Iterator[Run]:
    """``train_off_policy`` with DQN, TD3 or RainbowDQN, on environments of its ``make_vect_envs``."""
    shell("agilerl", "training")
    train = load("agilerl.training.train_off_policy").train_off_policy
    replays, utils = load("agilerl.components.replay_buffer"), load("agilerl.utils.utils")
    for env, n in [*((env, 1) for env in ENVS), (SHORT, 3)]:
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002 - AgileRL's exploration reads it
        envs = utils.make_vect_envs(env, num_envs=2, should_async_vector=False)
        name = "RainbowDQN" if n > 1 else "TD3" if env.startswith("Pendulum") else "DQN"
        kind = getattr(load("agilerl.algorithms"), name)
        noise: Any = {"vect_noise_dim": 2} if name == "TD3" else {}
        agent = kind(envs.single_observation_space, envs.single_action_space, batch_size=64, learn_step=64, **noise)
        memory = replays.ReplayBuffer(10_000)
        chain = replays.MultiStepReplayBuffer(10_000, n_step=n) if n > 1 else None
        train(envs, env, name, [agent], memory, max_steps=2000, evo_steps=1000, eval_steps=20, verbose=False,
              n_step_memory=chain)  # fmt: skip
        option = ", `MultiStepReplayBuffer(n_step=3)`" if n > 1 else ""
        yield Run(f"`train_off_policy` with {name}, 2 environments{option}", env, chain or memory)


def velora() -> Iterator[Run]:
    """``ReplayBuffer.warm`` with eight environments, and then the agent's own training."""
    load("velora.models")
    agents = load("velora.models.nf.agent")
    for env, kind in (("CartPole-v1", "NeuroFlow"), ("Pendulum-v1", "NeuroFlowCT"), (SHORT, "NeuroFlow")):
        torch.manual_seed(0)
        agent = getattr(agents, kind)(env, 20, 32, buffer_size=10_000, seed=0)
        agent.buffer.warm(agent, STEPS, 8)
        yield Run("`ReplayBuffer.warm`, 8 environments", env, agent.buffer)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # its figures go to the working directory
        agent = agents.NeuroFlow(SHORT, 20, 32, buffer_size=10_000, seed=0)
        agent.train(32, n_episodes=60, display_count=1000, log_freq=1000, window_size=10, warmup_steps=64)
    yield Run("`NeuroFlow.train` after 64 steps of `warm`", SHORT, agent.buffer)


def lerobot() -> Iterator[Run]:
    """``ReplayBuffer.add`` of all that its actor sends, with and without the option that its learner sets."""
    spec = importlib.util.find_spec("lerobot")
    assert spec
    assert spec.submodule_search_locations
    for name in ("lerobot", *(f"lerobot.{x}" for x in ("datasets", "utils", "utils.constants", "utils.transition"))):
        sys.modules[name] = MagicMock()  # data sets and robots, of which the buffer needs nothing here
    module = _of_file("lerobot_buffer", Path(spec.submodule_search_locations[0]) / "rl")
    for env, saves in [*((env, False) for env in ENVS), (SHORT, True)]:
        game = gym.make(env)
        game.action_space.seed(0)
        buffer = module.ReplayBuffer(10_000, "cpu", ["x"], lambda x: x, use_drq=False, optimize_memory=saves)
        obs, _ = game.reset(seed=0)
        for _ in range(STEPS):
            action = game.action_space.sample()
            next_obs, reward, terminated, truncated, _ = game.step(action)
            state, after = ({"x": torch.as_tensor(x).float()[None]} for x in (obs, next_obs))
            given = torch.as_tensor(action).float().reshape(1, -1)
            buffer.add(state, given, float(reward), after, done=terminated, truncated=truncated)
            obs = game.reset()[0] if terminated or truncated else next_obs
        option = ", `optimize_memory=True`" if saves else ""
        yield Run(f"`ReplayBuffer.add` of each step{option}", env, buffer)


def _of_file(name: str, folder: Path, file: str = "buffer.py") -> Any:
    """A module from its file alone."""
    spec = importlib.util.spec_from_file_location(name, folder / file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cleanrl(checkout: Path) -> Iterator[Run]:
    """What ``dqn.py`` and ``sac_continuous_action.py`` store, in CleanRL's buffer, on Gymnasium 0.29's autoreset."""
    sys.path.insert(0, str(checkout))
    replay = load("cleanrl_utils.buffers").ReplayBuffer
    for env in ENVS:
        envs = vector(env, AutoresetMode.SAME_STEP, 1)
        space: Any = envs.single_observation_space
        buffer = replay(10_000, space, envs.single_action_space, "cpu", handle_timeout_termination=False)
        obs, _ = envs.reset(seed=0)
        for _ in range(STEPS):
            actions = envs.action_space.sample()
            next_obs, rewards, terminations, truncations, infos = envs.step(actions)
            real = next_obs.copy()
            for i in np.flatnonzero(truncations):  # `infos["final_observation"]` in Gymnasium 0.29
                real[i] = infos["final_obs"][i]
            buffer.add(obs, real, actions, rewards, terminations, [{}])
            obs = next_obs
        yield Run("what `dqn.py` and `sac_continuous_action.py` store", env, buffer)


def fast_td3(checkout: Path) -> Iterator[Run]:
    """What ``train.py`` stores, in FastTD3's ``SimpleReplayBuffer``; and with what its wrapper of Isaac Lab returns."""
    module = _of_file("fast_td3_utils", checkout / "fast_td3", "fast_td3_utils.py")
    tensordict = load("tensordict")
    for env, hides in [*((env, False) for env in ENVS), ("Pendulum-v1", True)]:
        envs = vector(env, AutoresetMode.SAME_STEP, 2)
        width = int(np.prod(envs.single_observation_space.shape or (1,)))
        buffer: Any = module.SimpleReplayBuffer(2, STEPS // 2, width, 1, width, device="cpu")
        obs, _ = envs.reset(seed=0)
        for _ in range(STEPS // 2):
            actions = envs.action_space.sample()
            next_obs, rewards, terminated, time_outs, infos = envs.step(actions)
            dones = terminated | time_outs
            true = next_obs.copy()
            for i in np.flatnonzero(dones) if not hides else ():  # `infos["observations"]["raw"]["obs"]` in its envs
                true[i] = infos["final_obs"][i]
            after = {"observations": true, "rewards": rewards, "truncations": time_outs, "dones": dones}
            step = {"observations": obs, "actions": actions.reshape(2, 1), "next": after}
            buffer.extend(tensordict.TensorDict(step, [2]))
            obs = next_obs
        wrapper = ", final observations as its wrapper of Isaac Lab gives them" if hides else ""
        yield Run(f"what `train.py` stores, 2 environments{wrapper}", env, buffer)
