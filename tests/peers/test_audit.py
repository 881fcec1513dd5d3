"""The audit of other libraries' live buffers: what is stored rightly passes, and their known mistakes are named."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import relive
from peers.embodichain_host import host
from support import loops

buffers: Any = import_module("stable_baselines3.common.buffers")
tianshou: Any = import_module("tianshou.data")
cpprb: Any = import_module("cpprb")
torchrl: Any = import_module("torchrl.data")

OBS = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
BOX = gym.spaces.Box(-1, 1, (2,), np.float32)


def rules(report: Any) -> set[str]:
    return {finding.rule for finding in report.findings}


def sb3(arrays: Any, size: int = 2000, **options: Any) -> Any:
    buffer = buffers.ReplayBuffer(size, OBS, BOX, **options)
    for t in range(len(arrays["reward"])):
        row = {name: x[t : t + 1] for name, x in arrays.items()}
        done = row["terminated"] | row["truncated"]
        infos = [{"TimeLimit.truncated": bool(row["truncated"][0])}]
        buffer.add(row["obs"], row["next_obs"], row["action"], row["reward"], done, infos)
    return buffer


@pytest.mark.parametrize("size", [2000, 400])
def test_stable_baselines3(size: int) -> None:
    right = relive.audit(sb3(loops.stored(loops.walk()), size))
    assert not right.findings, str(right)
    assert right.rows == min(size, len(loops.stored(loops.walk())["reward"]))
    assert rules(relive.audit(sb3(loops.reset_as_final(loops.walk()), size))) == {"reset-as-final-observation"}
    assert rules(relive.audit(sb3(loops.ignored_steps(loops.walk()), size))) == {"autoreset-step-stored"}


def test_stable_baselines3_that_saves_memory_loses_final_observations() -> None:
    arrays = loops.stored(loops.walk())
    report = relive.audit(sb3(arrays, optimize_memory_usage=True, handle_timeout_termination=False))
    assert any("following row" in lack for lack in report.lacks)
    assert any("truncation" in lack for lack in report.lacks)


def a_tianshou(arrays: Any, **options: Any) -> Any:
    buffer = tianshou.VectorReplayBuffer(4000, 2, **options)
    for t in range(len(arrays["reward"])):
        row = {name: x[t] for name, x in arrays.items()}
        batch = tianshou.Batch(
            obs=row["obs"][None], act=row["action"][None], rew=row["reward"][None],
            terminated=row["terminated"][None], truncated=row["truncated"][None], obs_next=row["next_obs"][None],
        )  # fmt: skip
        buffer.add(batch, buffer_ids=[t % 1])
    return buffer


def test_tianshou_and_its_missing_final_observations() -> None:
    arrays = loops.stored(loops.walk())
    right = relive.audit(a_tianshou(arrays))
    assert not right.findings, str(right)
    assert right.rows == len(arrays["reward"])
    assert "truncation-without-final-observation" in rules(relive.audit(a_tianshou(arrays, ignore_obs_next=True)))


def test_cpprb() -> None:
    arrays = loops.stored(loops.walk())
    env_dict = {"obs": {"shape": 3}, "act": {"shape": 2}, "rew": {}, "next_obs": {"shape": 3}, "done": {}}

    def filled(rows: Any) -> Any:
        buffer = cpprb.ReplayBuffer(4000, env_dict)
        buffer.add(obs=rows["obs"], act=rows["action"], rew=rows["reward"], next_obs=rows["next_obs"],
                   done=rows["terminated"] | rows["truncated"])  # fmt: skip
        return buffer

    report = relive.audit(filled(arrays))
    assert rules(report) <= {"time-limit-as-terminal"}, str(report)  # it does not know truncations
    assert "reset-as-final-observation" in rules(relive.audit(filled(loops.reset_as_final(loops.walk()))))


def a_torchrl(rows: Any, size: int = 4000) -> Any:
    count = len(rows["reward"])
    column = {name: torch.as_tensor(rows[name]).reshape(count, -1) for name in rows}
    after = {"observation": column["next_obs"], "reward": column["reward"], "terminated": column["terminated"],
             "truncated": column["truncated"], "done": column["terminated"] | column["truncated"]}  # fmt: skip
    data = TensorDict({"observation": column["obs"], "action": column["action"], "next": after}, batch_size=[count])
    if "episode" in rows:
        data["collector", "traj_ids"] = torch.as_tensor(rows["episode"])
    buffer = torchrl.TensorDictReplayBuffer(storage=torchrl.LazyTensorStorage(size))
    for part in data.split(100):
        buffer.extend(part)
    return buffer


def test_torchrl_and_its_multi_step_flags() -> None:
    arrays = loops.stored(loops.walk())
    for size in (4000, 450):  # in the smaller one the ring comes round
        right = relive.audit(a_torchrl(arrays, size))
        assert not right.findings, str(right)
    assert "n-step-flag-of-first-step" in rules(relive.audit(a_torchrl(loops.n_step(loops.walk(), own_flags=True))))


def in_blocks(loop: Any = loops.stored, envs: int = 3) -> Any:
    """Steps ``[T, N, ...]``."""
    parts = [loop(loops.walk(20, seed=seed)) for seed in range(envs)]
    size = min(len(part["reward"]) for part in parts)
    return {name: np.stack([part[name][:size] for part in parts], 1) for name in parts[0]}


def test_flat_rows_of_several_envs_in_cpprb_and_torchrl() -> None:
    for loop, expected in ((loops.stored, set[str]()), (loops.reset_as_final, {"reset-as-final-observation"})):
        rows = in_blocks(loop)
        flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in rows.items()}
        env_dict = {"obs": {"shape": 3}, "act": {"shape": 2}, "rew": {}, "next_obs": {"shape": 3}, "done": {}}
        buffer = cpprb.ReplayBuffer(4000, env_dict)
        buffer.add(obs=flat["obs"], act=flat["action"], rew=flat["reward"], next_obs=flat["next_obs"],
                   done=flat["terminated"] | flat["truncated"])  # fmt: skip
        assert rules(relive.audit(buffer)) - {"time-limit-as-terminal"} == expected
        env_major = {name: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]) for name, x in rows.items()}
        assert rules(relive.audit(a_torchrl(flat))) == expected
        env_major["episode"] = np.repeat(np.arange(3), len(rows["reward"]))
        assert rules(relive.audit(a_torchrl(env_major))) == expected


def test_agilerls_buffers() -> None:
    replays: Any = import_module("agilerl.components.replay_buffer")
    rollouts: Any = import_module("agilerl.components.rollout_buffer")
    for loop, expected in ((loops.stored, set[str]()), (loops.ignored_steps, {"autoreset-step-stored"})):
        rows, size = in_blocks(loop), 900
        replay = replays.ReplayBuffer(size)
        rollout = rollouts.RolloutBuffer(len(rows["reward"]), OBS, BOX, 3)
        for t in range(len(rows["reward"])):
            step = {name: torch.as_tensor(x[t]).float() for name, x in rows.items()}
            names = {"obs": "obs", "next_obs": "next_obs", "action": "action", "reward": "reward"}
            steps = {ours: step[theirs] for ours, theirs in names.items()} | {"done": step["terminated"]}
            replay.add(TensorDict(steps, [3]))
            done = rows["terminated"][t] | rows["truncated"][t]
            rollout.add(rows["obs"][t], rows["action"][t], rows["reward"][t], done, np.zeros(3), np.zeros(3),
                        next_obs=rows["next_obs"][t])  # fmt: skip
        report = relive.audit(replay)
        assert report.rows == size
        assert rules(report) == expected, str(report)
        assert rules(relive.audit(rollout)) - {"time-limit-as-terminal"} == expected


def test_rsl_rls_and_embodichains_rollouts() -> None:
    rsl_rl: Any = import_module("rsl_rl.storage")
    embodichain = host("buffer")
    rows = in_blocks()
    size = len(rows["reward"])
    obs = [TensorDict({"policy": torch.from_numpy(x)}, [3]) for x in rows["obs"]]
    storage = rsl_rl.RolloutStorage("rl", 3, size, obs[0], (2,))
    buffer = embodichain.RolloutBuffer(3, size, 3, 2, torch.device("cpu"))
    for t in range(size):
        step = rsl_rl.RolloutStorage.Transition()
        step.observations, step.actions = obs[t], torch.from_numpy(rows["action"][t])
        step.rewards = torch.from_numpy(rows["reward"][t])
        step.dones = torch.from_numpy(rows["terminated"][t] | rows["truncated"][t])
        step.values, step.actions_log_prob = torch.zeros(3, 1), torch.zeros(3)
        step.distribution_params = (torch.zeros(3, 2),)
        storage.add_transition(step)
    shared = buffer.start_rollout()
    for name in ("obs", "action", "reward", "terminated", "truncated"):
        shared[name][:, :-1] = torch.from_numpy(rows[name].swapaxes(0, 1))
    shared["value"].zero_()  # new memory, which may hold anything
    assert not relive.audit(storage).findings
    assert rules(relive.audit(buffer)) == {"truncation-without-final-observation"}
    assert relive.audit(storage).rows == relive.audit(buffer).rows == 3 * size
