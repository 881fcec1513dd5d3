"""The audit of other libraries' live buffers: what is stored rightly passes, and their known mistakes are named."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import planted
import relive

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
    right = relive.audit(sb3(planted.stored(planted.walk()), size))
    assert not right.findings, str(right)
    assert right.rows == min(size, len(planted.stored(planted.walk())["reward"]))
    assert rules(relive.audit(sb3(planted.reset_as_final(planted.walk()), size))) == {"reset-as-final-observation"}
    assert rules(relive.audit(sb3(planted.ignored_steps(planted.walk()), size))) == {"autoreset-step-stored"}


def test_stable_baselines3_that_saves_memory_loses_final_observations() -> None:
    arrays = planted.stored(planted.walk())
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
    arrays = planted.stored(planted.walk())
    right = relive.audit(a_tianshou(arrays))
    assert not right.findings, str(right)
    assert right.rows == len(arrays["reward"])
    assert "truncation-without-final-observation" in rules(relive.audit(a_tianshou(arrays, ignore_obs_next=True)))


def test_cpprb() -> None:
    arrays = planted.stored(planted.walk())
    env_dict = {"obs": {"shape": 3}, "act": {"shape": 2}, "rew": {}, "next_obs": {"shape": 3}, "done": {}}

    def filled(rows: Any) -> Any:
        buffer = cpprb.ReplayBuffer(4000, env_dict)
        buffer.add(obs=rows["obs"], act=rows["action"], rew=rows["reward"], next_obs=rows["next_obs"],
                   done=rows["terminated"] | rows["truncated"])  # fmt: skip
        return buffer

    report = relive.audit(filled(arrays))
    assert rules(report) <= {"time-limit-as-terminal"}, str(report)  # it does not know truncations
    assert "reset-as-final-observation" in rules(relive.audit(filled(planted.reset_as_final(planted.walk()))))


def a_torchrl(rows: Any) -> Any:
    count = len(rows["reward"])
    column = {name: torch.as_tensor(rows[name]).reshape(count, -1) for name in rows}
    after = {"observation": column["next_obs"], "reward": column["reward"], "terminated": column["terminated"],
             "truncated": column["truncated"], "done": column["terminated"] | column["truncated"]}  # fmt: skip
    data = TensorDict({"observation": column["obs"], "action": column["action"], "next": after}, batch_size=[count])
    buffer = torchrl.TensorDictReplayBuffer(storage=torchrl.LazyTensorStorage(4000))
    buffer.extend(data)
    return buffer


def test_torchrl_and_its_multi_step_flags() -> None:
    arrays = planted.stored(planted.walk())
    right = relive.audit(a_torchrl(arrays))
    assert not right.findings, str(right)
    assert "n-step-flag-of-first-step" in rules(relive.audit(a_torchrl(planted.n_step(planted.walk(), own_flags=True))))
