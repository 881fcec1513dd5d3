"""Recurrent rollouts: all that a pass of 5 epochs of 4 batches of sequences costs, from the filled buffer on."""

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import after
from harness import Contender, Effort, Workload, aligned, measure, write
from rollout_data import BATCHES, EPOCHS, READ_BY_PPO, SIZES, Rollout, box, relive_buffer

HIDDEN = 256
LENGTH = 16
DONE = 1 / 200
STRIDES = {"whole": 0, "16s": LENGTH, "16s, half": LENGTH // 2, "16s, max": 1}


@dataclass(frozen=True)
class Recurrent:
    """A rollout with the state of one GRU layer for each step, and how its sequences are cut.

    All numbers of a state are that of its step, as `value` and `obs[..., 0]` are.
    """

    rollout: Rollout
    mode: str

    @property
    def length(self) -> int | None:
        """Steps of a window; None where whole trajectories are wanted."""
        return LENGTH if STRIDES[self.mode] else None

    def hidden(self, *shape: int) -> torch.Tensor:
        """The states of all steps, `[T, *shape]` with `[N]` and `[HIDDEN]` among its axes, N first."""
        T, N = self.rollout.shape
        number = torch.arange(T * N, dtype=torch.float32).view(T, *(N if size == N else 1 for size in shape))
        return number.expand(T, *shape).clone()

    def done(self) -> np.ndarray:
        return self.rollout.columns["terminated"] | self.rollout.columns["truncated"]

    def sizes(self) -> tuple[int, int]:
        """The sequences of an epoch, and their steps, tails included."""
        last = self.done()
        last[-1] = True
        runs = np.diff(np.flatnonzero(last.T), prepend=-1)
        if self.length is None:
            return len(runs), int(runs.sum())
        stride = STRIDES[self.mode]
        windows = 1 + np.maximum(0, -(-(runs - LENGTH) // stride))
        tails = runs - stride * (windows - 1)
        return int(windows.sum()), int(((windows - 1) * LENGTH + tails).sum())

    def batch_bytes(self) -> int:
        """What a batch has to hold on average: the six fields of its steps, no padding, and a state per sequence."""
        sequences, steps = self.sizes()
        row = self.rollout.obs_dim + self.rollout.action_dim + 4
        return 4 * (steps * row + sequences * HIDDEN) // BATCHES

    def wrong(self, found: "list[Read]") -> str:
        """What is wrong with an epoch's batches, if anything; all numbers are of steps t * N + env."""
        N, done = self.rollout.shape[1], self.done().reshape(-1)
        obs, value, lengths, hidden = (np.concatenate([np.asarray(read[i]) for read in found]) for i in range(4))
        number = value.astype(np.int64)
        if (obs != value).any():
            return "rows mixed up"
        ends = np.cumsum(lengths)
        if ends[-1] != len(number) or (hidden != value[ends - lengths]).any():
            return "states are those of other steps"
        inside = np.ones(len(number), np.bool_)
        inside[ends - 1] = False
        if (np.diff(number)[inside[:-1]] != N).any() or done[number[inside]].any():
            return "sequences run over the end of an episode"
        times = np.bincount(number, minlength=self.rollout.rows)
        if STRIDES[self.mode] in (0, LENGTH) and times.max() > 1:
            return "steps repeated"
        return f"{(times == 0).mean():.1%} of the steps missing, {self.mode}" if (times == 0).any() else ""


Read = tuple[Any, Any, Any, Any]
"""Of a batch: `obs[..., 0]` and `value` of its steps, sequence after sequence; and the lengths and a number of the
states of its sequences."""


class Passes:
    """A contender: `batches()` makes one pass, `read(batch)` says what is in one of them."""

    batches: Callable[[], Iterator[Any]]
    read: Callable[[Any], Read]
    data: Recurrent

    def run(self) -> None:
        for _ in after.batches(self.batches()):
            pass

    def check(self) -> str:
        first_epoch = zip(self.batches(), range(BATCHES), strict=False)
        return self.data.wrong([self.read(batch) for batch, _ in first_epoch])


class CopyFloor:
    """Copies the bytes that the batches of a pass must hold, batch by batch, from an epoch's worth of them."""

    label, package, role = "memcpy of the batches' bytes", "", "floor"
    note = "numpy.copyto of an epoch's bytes to a block as large as a batch, part by part: steps, no padding, states"

    def setup(self, data: Recurrent) -> None:
        size = data.batch_bytes()
        self.source, self.target = aligned(size * BATCHES).reshape(BATCHES, size), aligned(size)
        self.source[:], self.target[:] = 1, 0

    def run(self) -> None:
        for _ in after.batches(self.batches()):
            pass

    def batches(self) -> Iterator[np.ndarray]:
        for _ in range(EPOCHS):
            for part in self.source:
                np.copyto(self.target, part)
                yield self.target

    def check(self) -> str:
        return ""


class ReliveSequences(Passes):
    label, package, role = "relive", "relive", "ours"
    note = "RolloutBuffer.sequences(None or 16, overlap=..., num_batches=4, epochs=5, fields=(the six))"

    def setup(self, data: Recurrent) -> None:
        relive = importlib.import_module("relive")
        columns = data.rollout.columns
        self.buffer = relive_buffer(relive, data.rollout, hidden=(1, HIDDEN))
        rows = self.buffer.reserve()
        for name in ("obs", "action", "reward", "terminated", "truncated", "value", "log_prob"):
            rows[name].copy_(torch.from_numpy(columns[name]))
        rows["hidden"].copy_(data.hidden(data.rollout.shape[1], 1, HIDDEN))
        self.buffer.commit()
        self.buffer["advantage"], self.buffer["return"] = columns["advantage"], columns["return"]
        self.overlap = LENGTH - STRIDES[data.mode] if data.length else "none"
        self.data = data

    def batches(self) -> Iterator[Any]:
        return self.buffer.sequences(
            self.data.length, overlap=self.overlap, num_batches=BATCHES, epochs=EPOCHS, fields=READ_BY_PPO
        )

    def read(self, batch: Any) -> Read:
        return batch.flat(batch["obs"])[:, 0], batch.flat(batch["value"]), batch["lengths"], batch["hidden"][0, :, 7]


class ReliveEnvs(ReliveSequences):
    """Batches as rsl_rl gives them: all steps of some envs, and their observations as trajectories."""

    def __init__(self, shuffle: bool) -> None:
        self.shuffle = shuffle
        self.label = "relive, env_batches" if shuffle else "relive, env_batches, stored order"
        self.note = f"RolloutBuffer.env_batches(num_batches=4, epochs=5, shuffle={shuffle}, fields=(the other five))"

    def batches(self) -> Iterator[Any]:
        fields = tuple(name for name in READ_BY_PPO if name != "obs")
        return self.buffer.env_batches(num_batches=BATCHES, epochs=EPOCHS, shuffle=self.shuffle, fields=fields)

    def read(self, batch: Any) -> Read:
        obs, value = batch.sequences.flat(batch.sequences["obs"])[:, 0], batch.steps["value"].T.reshape(-1)
        return obs, value, batch.sequences["lengths"], batch.sequences["hidden"][0, :, 7]


class RslRlSequences(Passes):
    label, package, role = "rsl-rl", "rsl-rl-lib", "peer"
    note = (
        "RolloutStorage.recurrent_mini_batch_generator(4, 5), for an actor's state: whole trajectories of the same 4"
        " groups of envs in every epoch"
    )

    def setup(self, data: Recurrent) -> None:
        storage_class = importlib.import_module("rsl_rl.storage").RolloutStorage
        tensordict = importlib.import_module("tensordict")
        T, N = data.rollout.shape
        columns = data.rollout.tensors()
        obs = tensordict.TensorDict({"policy": columns["obs"][0]}, batch_size=[N])
        self.storage = storage_class("rl", N, T, obs, [data.rollout.action_dim], "cpu")
        self.storage.observations["policy"].copy_(columns["obs"])
        self.storage.actions.copy_(columns["action"])
        self.storage.dones.copy_(torch.from_numpy(data.done())[..., None])
        names = {"actions_log_prob": "log_prob", "values": "value", "advantages": "advantage", "returns": "return"}
        for name, column in names.items():
            getattr(self.storage, name).copy_(columns[column][..., None])
        self.storage.saved_hidden_state_a = [data.hidden(1, N, HIDDEN)]
        self.storage.distribution_params, self.storage.step = (), T
        self.data = data

    def batches(self) -> Iterator[Any]:
        return self.storage.recurrent_mini_batch_generator(BATCHES, EPOCHS)

    def read(self, batch: Any) -> Read:
        obs = batch.observations["policy"][..., 0].T[batch.masks.T]
        return obs, batch.values[..., 0].T.reshape(-1), batch.masks.sum(0), batch.hidden_states[0][0, :, 7]


class AgileRlSequences(Passes):
    label, package, role = "agilerl", "agilerl", "peer"
    note = (
        "RolloutBuffer.prepare_sequence_tensors() once, then get_minibatch_sequences(a quarter of them) once an epoch;"
        " CHUNKED, FIFTY_PERCENT_OVERLAP or MAXIMUM"
    )

    def setup(self, data: Recurrent) -> None:
        buffer_class = importlib.import_module("agilerl.components.rollout_buffer").RolloutBuffer
        kinds = importlib.import_module("agilerl.typing").BPTTSequenceType
        kind = {"16s, half": kinds.FIFTY_PERCENT_OVERLAP, "16s, max": kinds.MAXIMUM}.get(data.mode, kinds.CHUNKED)
        T, N = data.rollout.shape
        spaces = box(data.rollout.obs_dim), box(data.rollout.action_dim)
        state = {"recurrent": True, "hidden_state_architecture": {"actor": (1, N, HIDDEN)}}
        self.buffer = buffer_class(T, *spaces, num_envs=N, max_seq_len=data.length, bptt_sequence_type=kind, **state)
        names = ("observations", "actions", "log_probs", "values", "advantages", "returns")
        for name, column in zip(names, data.rollout.tensors().values(), strict=True):
            self.buffer.buffer[name].copy_(column)
        self.buffer.buffer["dones"].copy_(torch.from_numpy(data.done()))
        self.buffer.buffer["hidden_states", "actor"].copy_(data.hidden(N, 1, HIDDEN))
        self.buffer.pos, self.buffer.full = T, True
        self.data = data

    def batches(self) -> Iterator[Any]:
        self.buffer.prepare_sequence_tensors()
        for _ in range(EPOCHS):
            yield from self.buffer.get_minibatch_sequences(math.ceil(self.buffer.num_sequences / BATCHES))

    def read(self, batch: Any) -> Read:
        padded, unpadded = batch
        hidden = padded.get_non_tensor("initial_hidden_states")["actor"][:, 0, 7]
        mask = padded["pad_mask"].view(len(hidden), -1)
        return padded["observations"][mask.flatten(), 0], unpadded["values"], mask.sum(1), hidden


class TorchRlSequences(Passes):
    label, package, role = "torchrl", "torchrl", "peer"
    note = (
        "split_trajectories of the rollout [N, T] once, by done or, for 16s, by ids that count 16 steps of an episode,"
        " with the states of all steps, where its recurrent modules read the first one; then padded[indices],"
        " torch.randperm once an epoch"
    )

    def setup(self, data: Recurrent) -> None:
        self.split = importlib.import_module("torchrl.collectors.utils").split_trajectories
        tensordict = importlib.import_module("tensordict")
        T, N = data.rollout.shape
        columns = data.rollout.tensors() | {"hidden": data.hidden(N, HIDDEN)}
        by_env = {name: column.transpose(0, 1).contiguous() for name, column in columns.items()}
        done = torch.from_numpy(data.done()).T.contiguous()
        self.rollout = tensordict.TensorDict(by_env | {"next": {"done": done}}, batch_size=[N, T])
        self.data = data

    def batches(self) -> Iterator[Any]:
        if self.data.length is None:
            padded = self.split(self.rollout)
        else:
            padded = self.split(self.rollout.copy().set("window", self.window_ids()), trajectory_key="window")
        for _ in range(EPOCHS):
            for index in torch.randperm(len(padded)).tensor_split(BATCHES):
                yield padded[index]

    def window_ids(self) -> torch.Tensor:
        """An id for every 16 steps of an episode, `[N, T]`."""
        done = self.rollout["next", "done"]
        time = torch.arange(done.shape[1])
        starts = torch.ones_like(done)
        starts[:, 1:] = done[:, :-1]
        since = time - torch.where(starts, time, 0).cummax(1).values
        return (since % LENGTH == 0).flatten().cumsum(0).view(done.shape)

    def read(self, batch: Any) -> Read:
        mask = batch["mask"]
        return batch["obs"][mask][:, 0], batch["value"][mask], mask.sum(1), batch["hidden"][:, 0, 7]


def contenders(mode: str) -> list[Contender]:
    found: list[Contender] = [CopyFloor(), ReliveSequences()]
    if mode == "whole":
        found += [ReliveEnvs(shuffle=True), ReliveEnvs(shuffle=False), RslRlSequences()]
    found.append(AgileRlSequences())
    if mode in ("whole", "16s"):
        found.append(TorchRlSequences())
    return found


def run(effort: Effort, folder: Path) -> None:
    """Measures the sequences of rollouts and writes `sequences.json`."""
    workloads = []
    for T, N, obs_dim, action_dim in reversed(SIZES):
        rollout = Rollout.make(T, N, obs_dim, action_dim, done=DONE)
        for mode in STRIDES:
            workload = Workload(f"({T}, {N}), {mode}", Recurrent(rollout, mode), after=True)
            workloads.append(measure(workload, contenders(mode), effort))
    write("sequences", "a pass over recurrent sequences, 5 epochs of 4 batches", workloads, folder)
