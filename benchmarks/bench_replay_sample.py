"""`sample` from a million transitions: uniform, 3-step windows, and prioritized with the update of its priorities."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hand_written
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
    drawing,
    relive_replay,
    sb3_replay,
    td_errors,
    tianshou_replay,
    torchrl_replay,
    torchrl_step,
)

ROWS = 1_000_000
OWN_ENVS = 64
Read = tuple[Any, ...]
"""Obs, action, reward, next_obs and what ends a bootstrap, as torch tensors: what a learner reads of a batch."""


def made(data: Transitions, sample: Callable[[], Any], read: Callable[[Any], Read]) -> Made:
    """`run` and `check` of a contender, given its call, and what reads the result."""
    return lambda: read(sample()), lambda: wrong(data, read(sample()))


def wrong(data: Transitions, fields: Read) -> str:
    """What is wrong with what was read of a batch, if anything."""
    return data.wrong(fields[0], fields[2], fields[3])


def updating(
    data: Transitions, sample: Callable[[], Any], read: Callable[[Any], Read], update: Callable[[Any], Any]
) -> Made:
    """The same with priorities, which are updated after each batch."""

    def run() -> Read:
        batch = sample()
        fields = read(batch)
        update(batch)
        return fields

    return run, lambda: wrong(data, run())


# relive


def relive_read(batch: Any) -> Read:
    return batch["obs"], batch["action"], batch["reward"], batch["next_obs"], batch["discount"]


def relive_line(reuse: bool = False, envs: int = 1) -> Callable[[Transitions], Made]:
    """A line of ours, uniform or in windows."""

    def make(data: Transitions) -> Made:
        data = replace(data, rows=data.rows // envs * envs, envs=envs)
        return made(data, drawing(relive_replay(data), BATCH, reuse), relive_read)

    return make


def relive_prioritized(reuse: bool) -> Callable[[Transitions], Made]:
    def make(data: Transitions) -> Made:
        replay = relive_replay(data)
        errors = torch.from_numpy(td_errors())

        def read(batch: Any) -> Read:
            return *relive_read(batch), batch["weight"]

        def update(batch: Any) -> None:
            replay.update_priorities(batch["index"], errors)

        return updating(data, drawing(replay, BATCH, reuse), read, update)

    return make


# stable-baselines3


def sb3_read(batch: Any) -> Read:
    return batch.observations, batch.actions, batch.rewards, batch.next_observations, batch.dones


def sb3_uniform(data: Transitions) -> Made:
    buffer = sb3_replay(data)
    return made(data, lambda: buffer.sample(BATCH), sb3_read)


# cpprb


def cpprb_read(batch: Any) -> Read:
    tensor = torch.from_numpy
    obs, action, reward = tensor(batch["obs"]), tensor(batch["act"]), tensor(batch["rew"])
    return obs, action, reward, tensor(batch["next_obs"]), tensor(batch["done"])


def cpprb_uniform(data: Transitions) -> Made:
    buffer = cpprb_replay(data)
    return made(data, lambda: buffer.sample(BATCH), cpprb_read)


def cpprb_prioritized(data: Transitions) -> Made:
    buffer = cpprb_replay(data)
    errors = td_errors()

    def read(batch: Any) -> Read:
        return *cpprb_read(batch), torch.from_numpy(batch["weights"])

    def update(batch: Any) -> None:
        buffer.update_priorities(batch["indexes"], errors)

    return updating(data, lambda: buffer.sample(BATCH, BETA), read, update)


# tianshou


def tianshou_read(batch: Any) -> Read:
    tensor = torch.from_numpy
    obs, action, reward = tensor(batch.obs), tensor(batch.act), tensor(batch.rew)
    return obs, action, reward, tensor(batch.obs_next), tensor(batch.terminated)


def tianshou_uniform(data: Transitions) -> Made:
    buffer = tianshou_replay(data)
    return made(data, lambda: buffer.sample(BATCH)[0], tianshou_read)


def tianshou_windows(data: Transitions) -> Made:
    base = importlib.import_module("tianshou.algorithm.algorithm_base")
    buffer = tianshou_replay(data)
    zero, ahead = torch.zeros(BATCH, 1), {}

    def target(of: Any, indices: np.ndarray) -> torch.Tensor:
        ahead["next_obs"] = torch.from_numpy(of[indices].obs_next)  # as its `_target_q` reads them
        return zero

    def sample() -> Any:
        batch, indices = buffer.sample(BATCH)
        return base.Algorithm.compute_nstep_return(batch, buffer, indices, target, GAMMA, data.n)

    def read(batch: Any) -> Read:  # of the last: in the returns is what follows
        tensor = torch.from_numpy
        return tensor(batch.obs), tensor(batch.act), batch.returns, ahead["next_obs"], tensor(batch.terminated)

    return made(data, sample, read)


def tianshou_prioritized(data: Transitions) -> Made:
    buffer = tianshou_replay(data)
    errors = torch.from_numpy(td_errors())

    def read(drawn: Any) -> Read:
        return *tianshou_read(drawn[0]), torch.from_numpy(drawn[0].weight)

    def update(drawn: Any) -> None:
        buffer.update_weight(drawn[1], errors)

    return updating(data, lambda: buffer.sample(BATCH), read, update)


# torchrl


def torchrl_read(batch: Any) -> Read:
    following = batch["next"]
    return batch["obs"], batch["action"], following["reward"], following["obs"], following["terminated"]


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

    def read(batch: Any) -> Read:
        return *torchrl_read(batch), batch["priority_weight"]

    def update(batch: Any) -> None:
        buffer.update_priority(batch["index"], errors)

    return updating(data, buffer.sample, read, update)


# agilerl


def agilerl_read(batch: Any) -> Read:
    return batch["obs"], batch["action"], batch["reward"], batch["next_obs"], batch["done"]


def agilerl_uniform(data: Transitions) -> Made:
    buffer = agilerl_replay(data)
    return made(data, lambda: buffer.sample(BATCH), agilerl_read)


def agilerl_prioritized(data: Transitions) -> Made:
    buffer = agilerl_replay(data)
    errors = torch.from_numpy(td_errors())

    def sample() -> Any:
        try:
            return buffer.sample(BATCH, beta=BETA)
        except IndexError:  # once in a while its draw is beyond the last row
            return buffer.sample(BATCH, beta=BETA)

    def read(batch: Any) -> Read:
        return *agilerl_read(batch), batch["weights"]

    def update(batch: Any) -> None:
        buffer.update_priorities(batch["idxs"], errors)

    return updating(data, sample, read, update)


STORED = "windows made when the steps are added, here stored ready-made in bulk"
SB3, AGILE = "stable-baselines3", "agilerl"
REUSE, REUSED = "relive, reuse=True", "next(batches(_, 256, reuse=True)), which writes to the same memory in turn"
EACH = "of each preallocated field, at random rows"


def floor() -> Contender:
    return GatherFloor(128, 72)


def uniform() -> list[Contender]:
    return [
        floor(),
        Line("relive", "relive", "ReplayBuffer(view=NStep(1)).sample(256), 1 env", relive_line(), "ours"),
        Line(REUSE, "relive", REUSED, relive_line(reuse=True), "ours"),
        Line("relive, 64 envs", "relive", "as the first, from 64 envs", relive_line(envs=OWN_ENVS), "ours"),
        hand_written.line("index_select", f"index_select {EACH}", hand_written.by_index_select),
        hand_written.line("x[i]", f"x[i] {EACH}", hand_written.by_index),
        hand_written.line(
            "one table", "one index_select of a table, whose columns they are", hand_written.from_one_table
        ),
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
        Line("relive", "relive", "ReplayBuffer(view=NStep(3)).sample(256), 1 env", relive_line(), "ours"),
        Line(REUSE, "relive", REUSED, relive_line(reuse=True), "ours"),
        Line("relive, 64 envs", "relive", "as the first, from 64 envs", relive_line(envs=OWN_ENVS), "ours"),
        hand_written.line("index_select", f"index_select {EACH}, and masked sums of 3 rewards", hand_written.windows),
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
            relive_prioritized(reuse=False),
            "ours",
        ),
        Line(REUSE, "relive", REUSED, relive_prioritized(reuse=True), "ours"),
        hand_written.line("index_select", f"a sum tree in NumPy, index_select {EACH}", hand_written.prioritized),
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
