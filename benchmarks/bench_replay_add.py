"""`add`: one step of 1, 64 and 4,096 envs into a replay, and into one that serves 3-step windows or has priorities.

A run adds an episode of 200 steps, the last of which ends in all envs; times are per step.
"""

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import after
import hand_written
from bench_replay_sample import (
    Read,
    agilerl_read,
    cpprb_read,
    relive_read,
    sb3_read,
    tianshou_read,
    torchrl_read,
    wrong,
)
from harness import Contender, Effort, Workload, aligned, measure, write
from replay_data import (
    BATCH,
    BETA,
    EPISODE,
    GAMMA,
    Line,
    Made,
    Transitions,
    agilerl_replay,
    agilerl_step,
    cpprb_replay,
    cpprb_step,
    relive_replay,
    sb3_replay,
    tianshou_replay,
    tianshou_step,
    torchrl_replay,
    torchrl_step,
)

ROWS = 64_000  # so few that every buffer has wrapped by the time it is measured
MANY = 4096  # envs, of 512 rows each: rows that lie a power of two apart share lines of the caches
Step = dict[str, np.ndarray]


class AddFloor:
    package, role = "", "floor"
    label = "memcpy of a transition's bytes"
    note = "numpy.copyto of all bytes of a step and its next observation at once, to the next place of a ring"

    def setup(self, data: Transitions) -> None:
        step = np.concatenate([array.reshape(-1).view(np.uint8) for array in data.step().values()])
        self.source = aligned(step.size)
        self.source[:] = step
        ring = aligned(step.size * data.steps).reshape(data.steps, -1)
        ring[:] = 0
        self.places, self.at = list(ring), 0

    def run(self) -> None:
        for t in after.steps(EPISODE):
            np.copyto(self.places[self.at + t], self.source)
        self.at = (self.at + EPISODE) % (len(self.places) - len(self.places) % EPISODE)

    def check(self) -> str:
        return ""


def adding(
    data: Transitions, add: Callable[..., Any], prepare: Callable[[Step], Any], sample: Callable[[], Read]
) -> Made:
    """`run` and `check` of a contender: its `add`, how it wants a step, and what is read of a batch.

    A step that is a tuple goes to `add` as its arguments, a dict as its keywords, anything else as its only one.
    """
    plain, last = prepare(data.step(0)), prepare(data.step(EPISODE - 1))

    def check() -> str:
        for t in range(2 * EPISODE):
            give(prepare(data.step(t)))
        return wrong(data, sample())

    def positional() -> None:
        for _ in after.steps(EPISODE - 1):
            add(*plain)
        add(*last)

    def keywords() -> None:
        for _ in after.steps(EPISODE - 1):
            add(**plain)
        add(**last)

    def single() -> None:
        for _ in after.steps(EPISODE - 1):
            add(plain)
        add(last)

    if isinstance(plain, tuple):
        give, run = (lambda step: add(*step)), positional
    elif isinstance(plain, dict):
        give, run = (lambda step: add(**step)), keywords
    else:
        give, run = add, single
    return run, check


def relive_add(data: Transitions) -> Made:
    """`next_obs` where it is read: with the last step of an episode."""
    replay = relive_replay(data, fill=False)

    def prepare(step: Step) -> Step:
        ended = (step["terminated"] | step["truncated"]).any()
        return step if ended else {name: array for name, array in step.items() if name != "next_obs"}

    return adding(data, replay.add, prepare, lambda: relive_read(replay.sample(BATCH)))


def relive_add_all(data: Transitions) -> Made:
    replay = relive_replay(data, fill=False)
    return adding(data, replay.add, dict, lambda: relive_read(replay.sample(BATCH)))


def sb3_add(data: Transitions) -> Made:
    buffer = sb3_replay(data, fill=False)

    def prepare(step: Step) -> tuple[Any, ...]:
        done = step["terminated"] | step["truncated"]
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": bool(cut)} if cut else {} for cut in step["truncated"]]
        return step["obs"], step["next_obs"], step["action"], step["reward"], done, infos

    return adding(data, buffer.add, prepare, lambda: sb3_read(buffer.sample(BATCH)))


def tianshou_add(data: Transitions) -> Made:
    data = replace(data, n=1)  # its windows are made when a batch is read
    buffer, batch = tianshou_replay(data, fill=False), importlib.import_module("tianshou.data").Batch

    def add(step: Step) -> None:
        buffer.add(batch(**step))

    return adding(data, add, lambda step: (tianshou_step(step),), lambda: tianshou_read(buffer.sample(BATCH)[0]))


def cpprb_add(data: Transitions) -> Made:
    buffer = cpprb_replay(data, fill=False)
    add, end = buffer.add, buffer.on_episode_end

    def add_step(ended: bool, step: Step) -> None:
        add(**step)
        if ended:
            end()

    def prepare(step: Step) -> tuple[bool, Step]:
        return bool((step["terminated"] | step["truncated"]).all()), cpprb_step(step)

    def sample() -> Read:
        return cpprb_read(buffer.sample(BATCH, BETA) if data.prioritized else buffer.sample(BATCH))

    return adding(data, add_step, prepare, sample)


def torchrl_add(data: Transitions) -> Made:
    options: dict[str, Any] = {}
    if data.n > 1:
        transforms = importlib.import_module("torchrl.envs.transforms")
        options["transform"] = transforms.MultiStepTransform(data.n, GAMMA)
    buffer = torchrl_replay(data, fill=False, **options)
    return adding(data, buffer.extend, torchrl_step, lambda: torchrl_read(buffer.sample()))


def agilerl_add(data: Transitions) -> Made:
    buffer = agilerl_replay(data, fill=False)
    return adding(data, buffer.add, agilerl_step, lambda: agilerl_read(buffer.sample(BATCH)))


def numpy_slices(data: Transitions) -> Made:
    store = hand_written.Store(data)
    return adding(data, store.adder({**store.arrays}, store.ended), hand_written.step, store.batch)


def torch_slices(data: Transitions) -> Made:
    store = hand_written.Store(data)
    tensors = {name: torch.from_numpy(array) for name, array in store.arrays.items()}
    add = store.adder(tensors, torch.from_numpy(store.ended))
    return adding(data, add, hand_written.torch_step, store.batch)


def contenders(data: Transitions) -> list[Contender]:
    three, first = data.n > 1, "TensorDictPrioritizedReplayBuffer" if data.prioritized else "TensorDictReplayBuffer"
    vector = "PrioritizedVectorReplayBuffer" if data.prioritized else "VectorReplayBuffer"
    prefix = "Prioritized" if data.prioritized else ""
    own = f"ReplayBuffer(sampler={prefix or 'Uniform'}, view=NStep({data.n})).add(obs=..., ...), numpy"
    end = "(Nstep=...).add, and on_episode_end at an episode's end" if three else ".add, and on_episode_end"
    transform = " with MultiStepTransform" if three else ""
    slices = f"of {'six' if three else 'five'} fields{', then a sum tree in NumPy' * data.prioritized}"
    lines: list[Contender] = [
        AddFloor(),
        Line("relive", "relive", f"{own}; next_obs with the steps that end an episode", relive_add, "ours"),
        Line("relive, next_obs always", "relive", f"{own}, next_obs with every step", relive_add_all, "ours"),
        hand_written.line("NumPy slices", f"x[t] = step, numpy, {slices}", numpy_slices),
        hand_written.line("torch slices", f"x[t] = step, tensors made beforehand, {slices}", torch_slices),
    ]
    if not data.prioritized:
        sb3 = f"{'NStep' if three else ''}ReplayBuffer.add, numpy, one info per env"
        lines.append(Line("stable-baselines3", "stable-baselines3", sb3, sb3_add))
    agile = "MultiStepReplayBuffer" if three else f"{prefix}ReplayBuffer"
    lines.append(Line("cpprb", "cpprb", f"{prefix}ReplayBuffer{end}, numpy", cpprb_add))
    if data.envs < MANY:  # it calls Python for each env
        lines.append(
            Line("tianshou", "tianshou", f"{vector}.add(Batch), numpy, the Batch built each step", tianshou_add)
        )
    return [
        *lines,
        Line("torchrl", "torchrl", f"{first}.extend(TensorDict [N]){transform}, built beforehand", torchrl_add),
        Line("agilerl", "agilerl", f"{agile}.add(TensorDict [N]), built beforehand", agilerl_add),
    ]


def run(effort: Effort, folder: Path) -> None:
    """Measures `add` and writes `replay_add.json`."""
    one, many = Transitions(ROWS), Transitions(ROWS, 64)
    sizes = {
        "1 env": one,
        "64 envs": many,
        "4,096 envs": Transitions(512 * MANY, MANY),
        "1 env, 3-step": replace(one, n=3),
        "1 env, prioritized": replace(one, prioritized=True),
        "64 envs, prioritized": replace(many, prioritized=True),
    }
    workloads = [
        measure(Workload(name, data, units=EPISODE, after=True), contenders(data), effort)
        for name, data in sizes.items()
    ]
    write("replay_add", "a step into a replay, obs 17, action 6", workloads, folder)
