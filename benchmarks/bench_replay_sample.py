"""`sample` from a million transitions: uniform, 3-step windows, and prioritized with the update of its priorities."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness import Contender, Effort, Workload, measure, write
from replay_data import (
    BATCH,
    BETA,
    GAMMA,
    GatherFloor,
    Line,
    Made,
    Transitions,
    agilerl_replay,
    cpprb_replay,
    relive_replay,
    sb3_replay,
    td_errors,
    tianshou_replay,
    torchrl_replay,
    torchrl_step,
)

ROWS = 1_000_000
OWN_ENVS = 64


def made(data: Transitions, sample: Any, read: Any) -> Made:
    """`run` and `check` of a contender, given its call and how to read obs, reward and next_obs from the result."""
    return sample, lambda: data.wrong(*read(sample()))


# relive


def relive_read(batch: Any) -> tuple[Any, ...]:
    return batch["obs"], batch["reward"], batch["next_obs"]


def relive_uniform(data: Transitions) -> Made:
    replay = relive_replay(data)
    return made(data, lambda: replay.sample(BATCH), relive_read)


def relive_many_envs(data: Transitions) -> Made:
    return relive_uniform(Transitions(data.rows // OWN_ENVS * OWN_ENVS, OWN_ENVS, n=data.n))


def relive_prioritized(data: Transitions) -> Made:
    replay = relive_replay(data)
    errors = torch.from_numpy(td_errors())

    def sample() -> Any:
        batch = replay.sample(BATCH)
        replay.update_priorities(batch["index"], errors)
        return batch

    return made(data, sample, relive_read)


# stable-baselines3


def sb3_uniform(data: Transitions) -> Made:
    buffer = sb3_replay(data)
    return made(data, lambda: buffer.sample(BATCH), lambda b: (b.observations, b.rewards, b.next_observations))


# cpprb


def cpprb_read(batch: Any) -> tuple[Any, ...]:
    return batch["obs"], batch["rew"], batch["next_obs"]


def cpprb_uniform(data: Transitions) -> Made:
    buffer = cpprb_replay(data)
    return made(data, lambda: buffer.sample(BATCH), cpprb_read)


def cpprb_prioritized(data: Transitions) -> Made:
    buffer = cpprb_replay(data)
    errors = td_errors()

    def sample() -> Any:
        batch = buffer.sample(BATCH, BETA)
        buffer.update_priorities(batch["indexes"], errors)
        return batch

    return made(data, sample, cpprb_read)


# tianshou


def tianshou_read(batch: Any) -> tuple[Any, ...]:
    return batch.obs, batch.rew, batch.obs_next


def tianshou_uniform(data: Transitions) -> Made:
    buffer = tianshou_replay(data)
    return made(data, lambda: buffer.sample(BATCH)[0], tianshou_read)


def tianshou_windows(data: Transitions) -> Made:
    base = importlib.import_module("tianshou.algorithm.algorithm_base")
    buffer = tianshou_replay(data)
    zero, read = torch.zeros(BATCH, 1), {}

    def target(of: Any, indices: np.ndarray) -> torch.Tensor:
        read["next_obs"] = of[indices].obs_next  # as its `_target_q` reads them
        return zero

    def sample() -> Any:
        batch, indices = buffer.sample(BATCH)
        return base.Algorithm.compute_nstep_return(batch, buffer, indices, target, GAMMA, data.n)

    return made(data, sample, lambda b: (b.obs, b.returns, read["next_obs"]))


def tianshou_prioritized(data: Transitions) -> Made:
    buffer = tianshou_replay(data)
    errors = torch.from_numpy(td_errors())

    def sample() -> Any:
        batch, indices = buffer.sample(BATCH)
        buffer.update_weight(indices, errors)
        return batch

    return made(data, sample, tianshou_read)


# torchrl


def torchrl_read(batch: Any) -> tuple[Any, ...]:
    return batch["obs"], batch["next", "reward"], batch["next", "obs"]


def torchrl_uniform(data: Transitions) -> Made:
    buffer = torchrl_replay(data)
    return made(data, buffer.sample, torchrl_read)


def torchrl_windows(data: Transitions) -> Made:
    collection = importlib.import_module("torchrl.data")
    columns = data.windows()
    steps = torchrl_step(columns)
    used = torch.from_numpy(columns["used"])
    steps["steps_to_next_obs"], steps["nonterminal"] = used, torch.ones(data.rows, dtype=torch.bool)
    steps["gamma"] = GAMMA ** used.to(torch.float32)
    steps["next", "original_reward"] = steps["next", "reward"].clone()
    buffer = collection.TensorDictReplayBuffer(storage=collection.LazyTensorStorage(data.rows), batch_size=BATCH)
    buffer.extend(steps)
    return made(data, buffer.sample, torchrl_read)


def torchrl_prioritized(data: Transitions) -> Made:
    buffer = torchrl_replay(data)
    errors = torch.from_numpy(td_errors())

    def sample() -> Any:
        batch = buffer.sample()
        buffer.update_priority(batch["index"], errors)
        return batch

    return made(data, sample, torchrl_read)


# agilerl


def agilerl_read(batch: Any) -> tuple[Any, ...]:
    return batch["obs"], batch["reward"], batch["next_obs"]


def agilerl_uniform(data: Transitions) -> Made:
    buffer = agilerl_replay(data)
    return made(data, lambda: buffer.sample(BATCH), agilerl_read)


def agilerl_prioritized(data: Transitions) -> Made:
    buffer = agilerl_replay(data)
    errors = torch.from_numpy(td_errors())

    def sample() -> Any:
        try:
            batch = buffer.sample(BATCH, beta=BETA)
        except IndexError:  # once in a while its draw is beyond the last row
            batch = buffer.sample(BATCH, beta=BETA)
        buffer.update_priorities(batch["idxs"], errors)
        return batch

    return made(data, sample, agilerl_read)


STORED = "windows made when the steps are added, here stored ready-made in bulk"
SB3, AGILE = "stable-baselines3", "agilerl"


def floor() -> Contender:
    return GatherFloor(128, 72)


def uniform() -> list[Contender]:
    return [
        floor(),
        Line("relive", "relive", "ReplayBuffer(view=NStep(1)).sample(256), 1 env", relive_uniform, "ours"),
        Line("relive, 64 envs", "relive", "the same, from 64 envs", relive_many_envs, "ours"),
        Line(SB3, SB3, "ReplayBuffer.sample; arrays set in bulk", sb3_uniform),
        Line("cpprb", "cpprb", "ReplayBuffer.sample, numpy; filled by one add", cpprb_uniform),
        Line("tianshou", "tianshou", "VectorReplayBuffer(_, 1).sample, numpy; filled by set_batch", tianshou_uniform),
        Line("torchrl", "torchrl", "TensorDictReplayBuffer.sample, LazyTensorStorage", torchrl_uniform),
        Line(AGILE, AGILE, "ReplayBuffer.sample", agilerl_uniform),
    ]


def windows() -> list[Contender]:
    nstep = (
        "VectorReplayBuffer(_, 1).sample, then Algorithm.compute_nstep_return with a target_q_fn that reads obs_next"
    )
    return [
        floor(),
        Line("relive", "relive", "ReplayBuffer(view=NStep(3)).sample(256), 1 env", relive_uniform, "ours"),
        Line("relive, 64 envs", "relive", "the same, from 64 envs", relive_many_envs, "ours"),
        Line(SB3, SB3, "NStepReplayBuffer.sample; arrays set in bulk", sb3_uniform),
        Line("cpprb", "cpprb", "ReplayBuffer(Nstep=...).sample, numpy; windows made by add", cpprb_uniform),
        Line("tianshou", "tianshou", nstep, tianshou_windows),
        Line(
            "torchrl", "torchrl", f"TensorDictReplayBuffer.sample; {STORED} as MultiStepTransform does", torchrl_windows
        ),
        Line(AGILE, AGILE, f"MultiStepReplayBuffer.sample; {STORED}", agilerl_uniform),
    ]


def prioritized() -> list[Contender]:
    return [
        floor(),
        Line(
            "relive",
            "relive",
            "ReplayBuffer(sampler=Prioritized()).sample, update_priorities",
            relive_prioritized,
            "ours",
        ),
        Line("cpprb", "cpprb", "PrioritizedReplayBuffer.sample, update_priorities, numpy", cpprb_prioritized),
        Line("tianshou", "tianshou", "PrioritizedVectorReplayBuffer(_, 1).sample, update_weight", tianshou_prioritized),
        Line("torchrl", "torchrl", "TensorDictPrioritizedReplayBuffer.sample, update_priority", torchrl_prioritized),
        Line(
            AGILE,
            AGILE,
            "PrioritizedReplayBuffer.sample, update_priorities; sampled again where it raises IndexError",
            agilerl_prioritized,
        ),
    ]


def run(effort: Effort, folder: Path) -> None:
    """Measures `sample` and writes `replay_sample.json`."""
    one, three = Transitions(ROWS), Transitions(ROWS, n=3)
    workloads = [
        measure(Workload("uniform", one, after=True), uniform(), effort),
        measure(Workload("3-step", three, after=True), windows(), effort),
        measure(
            Workload("prioritized, with update", Transitions(ROWS, prioritized=True), after=True), prioritized(), effort
        ),
    ]
    write("replay_sample", "256 of 1 M transitions, obs 17, action 6", workloads, folder)
