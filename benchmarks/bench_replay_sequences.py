"""`sample` of 64 sequences of 80 steps from a replay: uniform over windows, at three capacities."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hand_written
from harness import Effort, Workload, measure, write
from replay_data import (
    EPISODE,
    GatherFloor,
    Line,
    Made,
    Transitions,
    drawing,
    relive_schema,
    tianshou_replay,
    torchrl_replay,
)

SIZES = {"100 k": 100_000, "1 M": 1_000_000, "10 M": 10_000_000}
ENVS = 10
SEQUENCES, LENGTH = 64, 80
ROW = 128  # bytes of a packed row
Read = tuple[Any, ...]
"""Obs, action, reward and terminated of the steps, and the mask if there is one: what a learner reads of a batch."""


def wrong(data: Transitions, obs: Any, reward: Any, inside: Any = None) -> str:
    """What is wrong with windows `[64, 80]`, if anything: numbers run on, and none crosses the end of an episode."""
    number = np.asarray(obs, np.float64).reshape(-1, LENGTH, 17)[..., 0]
    if len(number) != SEQUENCES or (np.asarray(reward).reshape(number.shape) != number)[inside].any():
        return "rows mixed up"
    within = number % data.steps % EPISODE
    crossing = ((np.diff(number) != 1) | (np.diff(within) != 1)).any(1)
    if inside is not None:
        crossing &= inside.all(1)
    return f"{crossing.mean():.0%} of the sequences run over an episode's end" if crossing.any() else ""


def relive(reuse: bool) -> Callable[[Transitions], Made]:
    def make(data: Transitions) -> Made:
        package = importlib.import_module("relive")
        rows = data.steps + data.steps // EPISODE + 1
        view = package.Sequence(LENGTH)
        replay = package.ReplayBuffer(relive_schema(package, data), rows * data.envs, data.envs, view=view, seed=0)
        everything = data.all()
        by_env = {name: array.reshape(data.envs, data.steps, *array.shape[1:]) for name, array in everything.items()}
        for t in range(data.steps):
            replay.add({name: array[:, t] for name, array in by_env.items()})
        draw = drawing(replay, SEQUENCES, reuse)

        def sample() -> Read:
            batch = draw()
            return batch["obs"], batch["action"], batch["reward"], batch["terminated"], batch["mask"]

        def check() -> str:
            obs, _, reward, _, mask = sample()
            if not (mask.sum(0) == LENGTH).all():
                return "windows are short"
            return wrong(data, obs[:LENGTH].transpose(0, 1), reward[:LENGTH].T)

        return sample, check

    return make


def by_hand(data: Transitions) -> Made:
    fields = hand_written.columns(data)
    names = "obs", "action", "reward", "done"
    within = torch.arange(data.rows) % data.steps % EPISODE
    starts = (within <= EPISODE - LENGTH).nonzero().squeeze(1)
    ahead = torch.arange(LENGTH)[:, None]

    def sample() -> Read:
        first = starts[torch.randint(len(starts), (SEQUENCES,))]
        steps = (first + ahead).view(-1)
        return tuple(
            [fields[name].index_select(0, steps).view(LENGTH, SEQUENCES, *fields[name].shape[1:]) for name in names]
        )

    def check() -> str:
        obs, _, reward, _ = sample()
        return wrong(data, obs.transpose(0, 1), reward.T)

    return sample, check


def torchrl(data: Transitions, cache_values: bool) -> Made:
    collection = importlib.import_module("torchrl.data")
    sampler = collection.SliceSampler(slice_len=LENGTH, end_key=("next", "done"), cache_values=cache_values)
    buffer = torchrl_replay(data, sampler=sampler, batch=SEQUENCES * LENGTH)

    def sample() -> Read:
        batch = buffer.sample()
        following = batch["next"]
        return batch["obs"], batch["action"], following["reward"], following["terminated"]

    def check() -> str:
        obs, _, reward, _ = sample()
        return wrong(data, obs, reward)

    return sample, check


def torchrl_rescanning(data: Transitions) -> Made:
    return torchrl(data, cache_values=False)


def torchrl_cached(data: Transitions) -> Made:
    return torchrl(data, cache_values=True)


def tianshou(data: Transitions) -> Made:
    buffer = tianshou_replay(data)
    names = ("obs", "act", "rew", "terminated")

    def sample() -> Read:
        last = buffer.sample_indices(SEQUENCES)
        return tuple([torch.from_numpy(buffer.get(last, name, stack_num=LENGTH)) for name in names])

    def check() -> str:
        obs, _, reward, _ = map(np.asarray, sample())
        first = np.diff(obs[..., 0], axis=1) == 0  # at an episode's start it repeats the first step
        inside = np.concatenate([~first, np.ones((SEQUENCES, 1), np.bool_)], 1)
        short = (~inside.all(1)).mean()
        return wrong(data, obs, reward, inside) or (
            f"{short:.0%} of the sequences are short, filled up with their first step" if short else ""
        )

    return sample, check


def contenders(data: Transitions) -> list[Any]:
    found = [
        GatherFloor(ROW, 0, SEQUENCES, LENGTH),
        Line("relive", "relive", "ReplayBuffer(view=Sequence(80)).sample(64)", relive(reuse=False), "ours"),
        Line("relive, reuse=True", "relive", "next(batches(_, 64, reuse=True))", relive(reuse=True), "ours"),
    ]
    if data.rows > SIZES["1 M"]:  # the peers' buffers would take the memory of many machines
        return found
    slices = "TensorDictReplayBuffer(SliceSampler(slice_len=80, end_key=('next', 'done'))).sample()"
    stacked = (
        "VectorReplayBuffer.sample_indices(64), then get(_, name, stack_num=80) of obs, act, rew and terminated, NumPy;"
        " it has no sequences, only stacks"
    )
    arithmetic = "index_select of each field at the steps of 64 windows, out of ready places where windows may begin"
    return [
        *found,
        hand_written.line("index_select", arithmetic, by_hand),
        Line("torchrl", "torchrl", f"{slices}, which looks for the ends of episodes each time", torchrl_rescanning),
        Line("torchrl, cache_values", "torchrl", f"{slices}, cache_values=True, between two adds only", torchrl_cached),
        Line("tianshou, stacked", "tianshou", stacked, tianshou),
    ]


def run(effort: Effort, folder: Path) -> None:
    """Measures `sample` of sequences and writes `replay_sequences.json`."""
    workloads = []
    for name, rows in SIZES.items():
        data = Transitions(rows, ENVS)
        workloads.append(measure(Workload(name, data, after=True), contenders(data), effort))
    write("replay_sequences", "64 sequences of 80 steps, obs 17, action 6, of", workloads, folder)
