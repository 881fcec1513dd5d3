"""Minibatches. A run is a whole pass, all epochs and all that comes before them; times are per minibatch."""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

import after
from harness import Contender, Effort, Workload, aligned, measure, write
from rollout_data import BATCHES, EPOCHS, READ_BY_PPO, SIZES, Rollout, box, relive_buffer
from tables import HAND

Tensors = tuple[torch.Tensor, ...]


class Passes:
    """A contender over minibatches: `batches()` makes one pass and yields what PPO reads, as tensors."""

    batches: Callable[[], Iterator[Tensors]]
    data: Rollout

    def run(self) -> None:
        for _ in after.batches(self.batches()):
            pass

    def check(self) -> str:
        """The first epoch holds every row once, each with its own observation."""
        obs, value = [], []
        for batch, _ in zip(self.batches(), range(BATCHES), strict=False):
            if len(batch) != len(READ_BY_PPO):
                return f"{len(batch)} fields"
            obs.append(torch.as_tensor(batch[0])[:, 0].clone())  # the batch itself may go
            value.append(torch.as_tensor(batch[3]).reshape(-1).clone())
        values = torch.cat(value)
        if not torch.equal(values.sort().values, torch.arange(self.data.rows, dtype=torch.float32)):
            return "rows missing or repeated"
        return "" if torch.equal(torch.cat(obs), values) else "rows mixed up"


class GatherFloor:
    """A gather of packed rows, a row's six fields side by side, at ready indices into a ready output."""

    package, role = "", "floor"

    def __init__(self, with_torch: bool) -> None:
        self.with_torch = with_torch
        self.label = "gather of packed random rows"
        self.note = "torch.index_select with out=" if with_torch else "numpy.take with out= and mode='clip'"

    def setup(self, data: Rollout) -> None:
        width = data.obs_dim + data.action_dim + 4
        self.packed = aligned(data.rows * width * 4).view(np.float32).reshape(data.rows, width)
        self.packed[:] = 1
        self.out = aligned(data.batch_size * width * 4).view(np.float32).reshape(data.batch_size, width)
        rng = np.random.default_rng(0)
        permutations = np.concatenate([rng.permutation(data.rows) for _ in range(EPOCHS)])
        self.indices = list(permutations.reshape(-1, data.batch_size))
        self.torch_indices = [torch.from_numpy(index) for index in self.indices]
        self.torch_packed, self.torch_out = torch.from_numpy(self.packed), torch.from_numpy(self.out)

    def run(self) -> None:
        if self.with_torch:
            for t in after.steps(len(self.torch_indices)):
                torch.index_select(self.torch_packed, 0, self.torch_indices[t], out=self.torch_out)
        else:
            for t in after.steps(len(self.indices)):
                np.take(self.packed, self.indices[t], axis=0, out=self.out, mode="clip")

    def check(self) -> str:
        return ""


class ReliveMinibatches(Passes):
    package, role = "relive", "ours"

    def __init__(self, every_field: bool = False, reuse: bool = False) -> None:
        self.fields, self.reuse = None if every_field else READ_BY_PPO, reuse
        self.label = "relive" + ", every field" * every_field + ", reuse=True" * reuse
        asked = ", fields=(the six)" * (not every_field) + ", reuse=True" * reuse
        self.note = f"RolloutBuffer.minibatches(num_batches=4, epochs=5{asked}) after finish(GAE())"

    def setup(self, data: Rollout) -> None:
        relive = importlib.import_module("relive")
        self.buffer = relive_buffer(relive, data)
        T, N = data.shape
        last = np.zeros(N, np.float32)
        for t in range(T):
            self.buffer.add(final_value=last, **data.step(t))
        self.buffer.set_last(obs=data.columns["obs"][-1], value=last)
        self.buffer.finish(relive.GAE())
        self.data = data

    def batches(self) -> Iterator[Tensors]:
        given = {"num_batches": BATCHES, "epochs": EPOCHS, "fields": self.fields, "reuse": self.reuse}
        for batch in self.buffer.minibatches(**given):
            yield tuple(batch[name] for name in READ_BY_PPO)


class HandWrittenMinibatches(Passes):
    package, role = "torch", "hand"

    def __init__(self, way: str) -> None:
        self.by_index = way == "x[i]"
        self.label = HAND + way
        self.note = f"{way} of each of the six fields, flattened once a pass, torch.randperm once an epoch"

    def setup(self, data: Rollout) -> None:
        self.columns, self.data = list(data.tensors().values()), data

    def batches(self) -> Iterator[Tensors]:
        flat = [column.flatten(0, 1) for column in self.columns]
        for _ in range(EPOCHS):
            for rows in torch.randperm(self.data.rows).split(self.data.batch_size):
                if self.by_index:
                    yield tuple([column[rows] for column in flat])
                else:
                    yield tuple([column.index_select(0, rows) for column in flat])


class StableBaselines3Minibatches(Passes):
    label, package, role = "stable-baselines3", "stable-baselines3", "peer"
    note = "RolloutBuffer.get(batch_size) once an epoch, the flattening of the first call in each pass included"

    def setup(self, data: Rollout) -> None:
        buffer_class = importlib.import_module("stable_baselines3.common.buffers").RolloutBuffer
        T, N = data.shape
        self.buffer = buffer_class(T, box(data.obs_dim), box(data.action_dim), "cpu", n_envs=N)
        self.buffer.pos, self.buffer.full = T, True
        names = ("observations", "actions", "log_probs", "values", "advantages", "returns")
        columns = (data.columns[name].copy() for name in READ_BY_PPO)
        self.unflattened = dict(zip(names, columns, strict=True))
        self.data = data

    def batches(self) -> Iterator[Tensors]:
        self.buffer.__dict__.update(self.unflattened)  # as a new rollout leaves them: get() flattens them once
        self.buffer.generator_ready = False
        for _ in range(EPOCHS):
            for batch in self.buffer.get(self.data.batch_size):
                yield (
                    batch.observations,
                    batch.actions,
                    batch.old_log_prob,
                    batch.old_values,
                    batch.advantages,
                    batch.returns,
                )


class RslRlMinibatches(Passes):
    label, package, role = "rsl-rl", "rsl-rl-lib", "peer"
    note = (
        "RolloutStorage.mini_batch_generator(4, 5), which makes one permutation for all epochs;"
        " no distribution parameters stored"
    )

    def setup(self, data: Rollout) -> None:
        storage_class = importlib.import_module("rsl_rl.storage").RolloutStorage
        tensordict = importlib.import_module("tensordict")
        T, N = data.shape
        columns = data.tensors()
        obs = tensordict.TensorDict({"policy": columns["obs"][0]}, batch_size=[N])
        self.storage = storage_class("rl", N, T, obs, [data.action_dim], "cpu")
        self.storage.observations["policy"].copy_(columns["obs"])
        self.storage.actions.copy_(columns["action"])
        self.storage.actions_log_prob.copy_(columns["log_prob"][..., None])
        self.storage.values.copy_(columns["value"][..., None])
        self.storage.advantages.copy_(columns["advantage"][..., None])
        self.storage.returns.copy_(columns["return"][..., None])
        self.storage.distribution_params = ()
        self.storage.step = T
        self.data = data

    def batches(self) -> Iterator[Tensors]:
        for batch in self.storage.mini_batch_generator(BATCHES, EPOCHS):
            yield (
                batch.observations["policy"],
                batch.actions,
                batch.old_actions_log_prob,
                batch.values,
                batch.advantages,
                batch.returns,
            )


class AgileRlMinibatches(Passes):
    label, package, role = "agilerl", "agilerl", "peer"
    note = (
        "RolloutBuffer.get_tensor_batch() once, then RolloutMinibatch[indices] over shuffled indices,"
        " the calls that PPO's learn makes; without its normalisation of advantages"
    )

    def setup(self, data: Rollout) -> None:
        buffer_class = importlib.import_module("agilerl.components.rollout_buffer").RolloutBuffer
        self.minibatch = importlib.import_module("agilerl.typing").RolloutMinibatch
        T, N = data.shape
        self.buffer = buffer_class(T, box(data.obs_dim), box(data.action_dim), num_envs=N)
        names = ("observations", "actions", "log_probs", "values", "advantages", "returns")
        for name, column in zip(names, data.tensors().values(), strict=True):
            self.buffer.buffer[name].copy_(column)
        self.buffer.pos, self.buffer.full = T, True
        self.rng = np.random.default_rng(0)
        self.data = data

    def batches(self) -> Iterator[Tensors]:
        flat = self.buffer.get_tensor_batch(device="cpu")
        flat = flat.select("observations", "actions", "log_probs", "advantages", "returns", "values")
        rows = self.minibatch.from_tensordict(flat.rename_key_("values", "value_preds"))
        indices, size = np.arange(self.data.rows), self.data.batch_size
        for _ in range(EPOCHS):
            self.rng.shuffle(indices)
            for start in range(0, self.data.rows, size):
                batch = rows[torch.from_numpy(indices[start : start + size])]
                yield (
                    batch.observations,
                    batch.actions,
                    batch.log_probs,
                    batch.value_preds,
                    batch.advantages,
                    batch.returns,
                )


class TorchRlMinibatches(Passes):
    label, package, role = "torchrl", "torchrl", "peer"
    note = (
        "ReplayBuffer(LazyTensorStorage, SamplerWithoutReplacement).extend(rollout) once a pass,"
        " then sample() for each minibatch"
    )

    def setup(self, data: Rollout) -> None:
        collection = importlib.import_module("torchrl.data")
        samplers = importlib.import_module("torchrl.data.replay_buffers.samplers")
        tensordict = importlib.import_module("tensordict")
        self.rollout = tensordict.TensorDict(data.tensors(), batch_size=list(data.shape)).reshape(-1)
        self.buffer = collection.ReplayBuffer(
            storage=collection.LazyTensorStorage(data.rows),
            sampler=samplers.SamplerWithoutReplacement(),
            batch_size=data.batch_size,
        )
        self.data = data

    def batches(self) -> Iterator[Tensors]:
        self.buffer.extend(self.rollout)
        for _ in range(EPOCHS * BATCHES):
            batch = self.buffer.sample()
            yield tuple(batch[name] for name in READ_BY_PPO)


class TensorDictMinibatches(Passes):
    label, package, role = "tensordict", "tensordict", "peer"
    note = "flat[indices] on a TensorDict of the six fields, torch.randperm once an epoch"

    def setup(self, data: Rollout) -> None:
        tensordict = importlib.import_module("tensordict")
        self.rollout = tensordict.TensorDict(data.tensors(), batch_size=list(data.shape))
        self.data = data

    def batches(self) -> Iterator[Tensors]:
        flat = self.rollout.reshape(-1)
        for _ in range(EPOCHS):
            for index in torch.randperm(self.data.rows).split(self.data.batch_size):
                batch = flat[index]
                yield tuple(batch[name] for name in READ_BY_PPO)


class TianshouMinibatches(Passes):
    package, role = "tianshou", "peer"

    def __init__(self, all_numpy: bool) -> None:
        self.all_numpy = all_numpy
        self.label = "tianshou, all numpy" if all_numpy else "tianshou"
        kinds = (
            "numpy fields, handed on by torch.from_numpy"
            if all_numpy
            else "numpy obs and torch fields as PPO holds them"
        )
        self.note = f"Batch.split(size, merge_last=True) once an epoch on a Batch of the six fields: {kinds}"

    def setup(self, data: Rollout) -> None:
        make = importlib.import_module("tianshou.data").Batch
        flat = {name: column.flatten(0, 1) for name, column in data.tensors().items()}
        if self.all_numpy:
            fields = {name: column.numpy() for name, column in flat.items()}
        else:
            fields = flat | {"obs": flat["obs"].numpy()}
        names = ("obs", "act", "logp_old", "v_s", "adv", "returns")
        self.batch = make(**dict(zip(names, fields.values(), strict=True)))
        self.data = data

    def batches(self) -> Iterator[Tensors]:
        for _ in range(EPOCHS):
            for batch in self.batch.split(self.data.batch_size, merge_last=True):
                fields = batch.act, batch.logp_old, batch.v_s, batch.adv, batch.returns
                if self.all_numpy:
                    fields = tuple(map(torch.from_numpy, fields))
                yield torch.from_numpy(batch.obs), *fields


def contenders() -> list[Contender]:
    return [
        GatherFloor(with_torch=False),
        GatherFloor(with_torch=True),
        ReliveMinibatches(),
        ReliveMinibatches(reuse=True),
        ReliveMinibatches(every_field=True),
        HandWrittenMinibatches("index_select"),
        HandWrittenMinibatches("x[i]"),
        StableBaselines3Minibatches(),
        TianshouMinibatches(all_numpy=False),
        TianshouMinibatches(all_numpy=True),
        TensorDictMinibatches(),
        RslRlMinibatches(),
        AgileRlMinibatches(),
        TorchRlMinibatches(),
    ]


def run(effort: Effort, folder: Path) -> None:
    """Measures minibatches and writes `minibatches.json`."""
    workloads = []
    for T, N, obs_dim, action_dim in SIZES:
        data = Rollout.make(T, N, obs_dim, action_dim)
        workload = Workload(f"({T}, {N}), obs {obs_dim}", data, units=BATCHES * EPOCHS, after=True)
        workloads.append(measure(workload, contenders(), effort))
    write("minibatches", "one minibatch, all that a pass needs included", workloads, folder)
