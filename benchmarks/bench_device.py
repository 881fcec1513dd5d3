"""Steps, batches and returns where a simulator has its tensors: beside FastTD3, TorchRL and RSL-RL.

python benchmarks/bench_device.py --device cuda    on a GPU; writes results/gpu-<name>.json

`run.py` has the times of the CPU, where a replay of ours is in RAM. What a call asks of a device, which is how many
operations it launches and how often it waits for them, is counted there as well: the same code runs on a stand-in.
FastTD3 is in no index: `make checkouts` gets its sources.
"""

import argparse
import importlib
import importlib.util
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from harness import (
    RESULTS,
    Contender,
    Effort,
    PiecewiseCopyFloor,
    Workload,
    failure,
    measure,
    version_of,
    write,
)
from replay_data import Line, Made

N, STEPS, OBS, ACTIONS, BATCH = 4096, 100, 48, 12, 32_768
T, MINIBATCHES, EPOCHS = 24, 4, 5
GAMMA, LAMBDA = 0.99, 0.95
CHAIN = 16
"""So many steps are added again and again; their rewards number them."""
AT_ONCE = 20
"""Calls on a GPU before the host waits for all of them."""
ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "build/checkouts/FastTD3/fast_td3/fast_td3_utils.py"


CPU, GPU = torch.device("cpu"), "cuda"


@dataclass(frozen=True)
class Work:
    """One column: what is done, and where."""

    name: str
    bytes_moved: int
    n: int = 1
    units: int = 1
    device: torch.device = CPU
    counted: bool = False
    """True where launches are counted without a GPU: then ours has its rows as on a device."""

    @property
    def in_rollouts(self) -> bool:
        return self.name in ROLLOUTS

    def repeated(self, call: Callable[[], Any]) -> Callable[[], None]:
        """One run: on a GPU several calls, and a wait for the last."""
        if self.device.type != GPU or self.counted:
            return call

        def run() -> None:
            for _ in range(AT_ONCE):
                call()
            torch.cuda.synchronize(self.device)

        return run


STORED = 4 * (OBS + ACTIONS + 1) + 2
READ = 4 * (2 * OBS + ACTIONS + 2) + 2
READ_BY_PPO = 4 * (OBS + ACTIONS + 4)
ROLLOUT = 4 * (OBS + ACTIONS + 3) + 2
REPLAYS = {
    "a step into a replay": Work("a step into a replay", 2 * N * STORED),
    **{f"{BATCH} of {n} steps": Work(f"{BATCH} of {n} steps", 2 * BATCH * READ, n) for n in (1, 3, 8)},
}
ROLLOUTS = {
    "a step into a rollout": Work("a step into a rollout", 2 * N * ROLLOUT),
    "GAE": Work("GAE", T * N * (4 * 4 + 2)),
    "a minibatch": Work(
        "a minibatch", 2 * (T * N // MINIBATCHES) * 4 * (OBS + ACTIONS + 4), units=MINIBATCHES * EPOCHS
    ),
}
"""The bytes are those that have to be read and written."""


# What is stored


def steps(device: torch.device) -> list[dict[str, Tensor]]:
    """Steps of all envs; each ends a few episodes. The first number of an observation, and the reward, number them."""
    rng = torch.Generator().manual_seed(0)
    obs = torch.rand(CHAIN, N, OBS, generator=rng)
    obs[..., 0] = torch.arange(CHAIN)[:, None]
    done = torch.rand(CHAIN, N, generator=rng) < 1 / 200
    after = torch.where(done[..., None], torch.rand(N, OBS, generator=rng), obs.roll(-1, 0))
    columns = {
        "obs": obs, "action": torch.rand(CHAIN, N, ACTIONS, generator=rng), "next_obs": after,
        "reward": torch.arange(CHAIN, dtype=torch.float32)[:, None].expand(CHAIN, N),
        "terminated": torch.zeros(CHAIN, N, dtype=torch.bool), "truncated": done,
    }  # fmt: skip
    return [{name: column[t].contiguous().to(device) for name, column in columns.items()} for t in range(CHAIN)]


def sums_differ(first: Tensor, count: Tensor, sums: Tensor, n: int) -> str:
    """What is wrong with the n-step sums of a batch, by the first number of obs."""
    whole = count == n
    each = torch.arange(n, device=first.device)
    expected = ((first[whole, None] + each) % CHAIN * GAMMA**each).sum(1)
    # some sums of FastTD3's go on over the seam of its ring
    agree = torch.isclose(sums[whole], expected, rtol=1e-4).float().mean()
    return "" if whole.any() and agree > 0.9 else "sums differ"


def filling(add: Callable[[Any], Any], given: list[Any]) -> Callable[[], None]:
    """Adds the next step of the chain; the replay is full, and has wrapped, before it is measured."""
    chain = itertools.cycle(given)

    def step() -> None:
        add(next(chain))

    for _ in range(STEPS + CHAIN):
        step()
    return step


# relive


def relive_replay(work: Work) -> Any:
    relive = importlib.import_module("relive")
    flag = relive.Field((), torch.bool)
    schema = {"obs": (OBS,), "action": (ACTIONS,), "reward": (), "terminated": flag, "truncated": flag}
    make = importlib.import_module("launching").as_on_device if work.counted else made_there
    return make(
        work.device, relive.Schema(schema), N * STEPS, N, view=relive.NStep(work.n, GAMMA), check_ends=False, seed=0
    )


def made_there(device: torch.device, *args: Any, **options: Any) -> Any:
    return importlib.import_module("relive").ReplayBuffer(*args, device=device, **options)


def relive_add(work: Work) -> Made:
    replay = relive_replay(work)
    add = filling(replay.add, steps(work.device))
    return work.repeated(add), lambda: relive_wrong(replay, work)


def relive_sample(work: Work) -> Made:
    replay = relive_replay(work)
    filling(replay.add, steps(work.device))
    return work.repeated(lambda: replay.sample(BATCH)), lambda: relive_wrong(replay, work)


def relive_wrong(replay: Any, work: Work) -> str:
    batch = replay.sample(BATCH)
    return sums_differ(batch["obs"][:, 0], batch["steps"], batch["reward"], work.n)


def relive_compiled(work: Work) -> Made:
    """Only where there is a GPU: on the CPU there is nothing to launch."""
    replay = relive_replay(work).compile()
    add = filling(replay.add, steps(work.device))
    call = add if work.name.startswith("a step") else lambda: replay.sample(BATCH)
    return work.repeated(call), lambda: relive_wrong(replay, work)


def relive_graph(work: Work) -> Made:
    """Batches of a CUDA graph of the caller's, each written over the one before."""
    replay = relive_replay(work).compile()
    filling(replay.add, steps(work.device))
    graph, batch = captured(lambda: replay.sample(BATCH))

    def check() -> str:
        assert len(replay)  # a graph does not keep the replay that it reads
        return sums_differ(batch["obs"][:, 0], batch["steps"], batch["reward"], work.n)

    return work.repeated(graph.replay), check


def captured(call: Callable[[], Any]) -> tuple[Any, Any]:
    """A CUDA graph of a call, after some calls on a stream of their own; and what the call returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    graph.replay()
    torch.cuda.synchronize()
    return graph, result


def relive_rollout(work: Work) -> tuple[Any, list[dict[str, Tensor]]]:
    relive = importlib.import_module("relive")
    flag = relive.Field((), torch.bool)
    schema = {"obs": (OBS,), "action": (ACTIONS,), "reward": (), "terminated": flag, "truncated": flag,
              "value": (), "log_prob": ()}  # fmt: skip
    rollout = relive.RolloutBuffer(relive.Schema(schema), T, N, device=work.device, seed=0)
    given = [{name: step[name] for name in step if name != "next_obs"} for step in steps(work.device)]
    more = {name: torch.zeros(N).to(work.device) for name in ("value", "log_prob", "final_value")}
    return rollout, [step | more for step in given]


def relive_rollout_add(work: Work) -> Made:
    rollout, given = relive_rollout(work)
    chain = itertools.cycle(given)

    def add() -> None:
        if rollout.is_full:
            rollout.clear()
        rollout.add(next(chain))

    return work.repeated(add), lambda: ""


def relive_full(work: Work) -> Any:
    rollout, given = relive_rollout(work)
    for step in itertools.islice(itertools.cycle(given), T):
        rollout.add(step)
    rollout.set_last(value=torch.zeros(N).to(work.device))
    return rollout.finish(importlib.import_module("relive").GAE(GAMMA, LAMBDA))


def relive_gae(work: Work) -> Made:
    rollout = relive_full(work)
    estimator = importlib.import_module("relive").GAE(GAMMA, LAMBDA)

    def check() -> str:
        flags = rollout["terminated"] | rollout["truncated"]
        return gae_differs(rollout["advantage"], rollout["reward"], flags)

    return work.repeated(lambda: rollout.finish(estimator)), check


def relive_minibatches(work: Work, reuse: bool = False) -> Made:
    rollout = relive_full(work)
    fields = ("obs", "action", "value", "log_prob", "advantage", "return")

    def passes() -> Iterator[Any]:
        return rollout.minibatches(num_batches=MINIBATCHES, epochs=EPOCHS, fields=fields, reuse=reuse)

    return whole_passes(work, passes, lambda batch: (batch["obs"], batch["return"]))


def gae_differs(advantage: Tensor, reward: Tensor, done: Tensor) -> str:
    """What is wrong with advantages of rewards with values of 0."""
    expected, following = torch.zeros_like(reward), torch.zeros_like(reward[0])
    for t in range(T - 1, -1, -1):
        following = reward[t] + GAMMA * LAMBDA * torch.where(done[t], 0.0, following)
        expected[t] = following
    return "" if torch.allclose(advantage, expected, rtol=1e-3) else "advantages differ"


def whole_passes(work: Work, passes: Callable[[], Iterator[Any]], read: Callable[[Any], tuple[Tensor, Tensor]]) -> Made:
    """Runs all minibatches of all epochs, and checks that the first epoch has every row."""

    def run() -> None:
        for _ in passes():
            pass
        if work.device.type == GPU and not work.counted:
            torch.cuda.synchronize(work.device)

    def check() -> str:
        seen = torch.cat([read(batch)[0][:, 0].clone() for batch in itertools.islice(passes(), MINIBATCHES)])
        expected = torch.arange(T, device=seen.device).remainder(CHAIN).repeat_interleave(N)
        return "" if torch.equal(seen.sort().values, expected.sort().values.float()) else "rows missing or repeated"

    return run, check


# FastTD3


def fasttd3_replay(work: Work) -> tuple[Any, list[Any]]:
    spec = importlib.util.spec_from_file_location("fast_td3_utils", SOURCES) if SOURCES.is_file() else None
    if spec is None or spec.loader is None:
        raise ImportError("FastTD3: call `make checkouts`", name="FastTD3")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    replay = module.SimpleReplayBuffer(N, STEPS, OBS, ACTIONS, OBS, n_steps=work.n, gamma=GAMMA, device=work.device)
    tensordict = importlib.import_module("tensordict").TensorDict
    given = []
    for step in steps(work.device):
        following = {
            "observations": step["next_obs"], "rewards": step["reward"],
            "truncations": step["truncated"].long(), "dones": step["truncated"].long(),
        }  # fmt: skip
        given.append(tensordict({"observations": step["obs"], "actions": step["action"], "next": following}, [N]))
    return replay, given


def fasttd3_add(work: Work) -> Made:
    replay, given = fasttd3_replay(work)
    return work.repeated(filling(replay.extend, given)), lambda: fasttd3_wrong(replay, work)


def fasttd3_sample(work: Work) -> Made:
    replay, given = fasttd3_replay(work)
    filling(replay.extend, given)
    return work.repeated(lambda: replay.sample(BATCH // N)), lambda: fasttd3_wrong(replay, work)


def fasttd3_graph(work: Work) -> Made:
    """Batches of a CUDA graph of the caller's, each written over the one before."""
    replay, given = fasttd3_replay(work)
    filling(replay.extend, given)
    graph, _ = captured(lambda: replay.sample(BATCH // N))
    return work.repeated(graph.replay), lambda: fasttd3_wrong(replay, work)


def fasttd3_wrong(replay: Any, work: Work) -> str:
    batch = replay.sample(BATCH // N)
    following = batch["next"]
    return sums_differ(batch["observations"][:, 0], following["effective_n_steps"], following["rewards"], work.n)


# TorchRL


def torchrl_replay(work: Work) -> tuple[Any, list[Any]]:
    data, tensordict = importlib.import_module("torchrl.data"), importlib.import_module("tensordict").TensorDict
    storage = data.LazyTensorStorage(N * STEPS, device=work.device)
    sampler = importlib.import_module("torchrl.data.replay_buffers.samplers").RandomSampler()
    replay = data.TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=BATCH)
    given = []
    for step in steps(work.device):
        flags = {name: step[name][:, None] for name in ("terminated", "truncated")}
        done = flags["terminated"] | flags["truncated"]
        following = {"obs": step["next_obs"], "reward": step["reward"][:, None], "done": done, **flags}
        given.append(tensordict({"obs": step["obs"], "action": step["action"], "next": following}, [N]))
    return replay, given


def torchrl_add(work: Work) -> Made:
    replay, given = torchrl_replay(work)
    return work.repeated(filling(replay.extend, given)), lambda: torchrl_wrong(replay)


def torchrl_sample(work: Work) -> Made:
    replay, given = torchrl_replay(work)
    filling(replay.extend, given)
    return work.repeated(replay.sample), lambda: torchrl_wrong(replay)


def torchrl_wrong(replay: Any) -> str:
    batch = replay.sample()
    reward = batch["next", "reward"].reshape(-1)
    return sums_differ(batch["obs"][:, 0], torch.ones_like(reward), reward, 1)


# RSL-RL


def rsl_rl_storage(work: Work) -> tuple[Any, list[Any]]:
    storage_class = importlib.import_module("rsl_rl.storage").RolloutStorage
    tensordict = importlib.import_module("tensordict").TensorDict
    given = []
    for step in steps(work.device):
        transition, nothing = storage_class.Transition(), torch.zeros(N, device=work.device)
        transition.observations = tensordict({"policy": step["obs"]}, [N], device=work.device)
        transition.actions, transition.rewards, transition.dones = step["action"], step["reward"], step["truncated"]
        transition.values, transition.actions_log_prob = nothing[:, None], nothing
        transition.distribution_params = ()
        given.append(transition)
    return storage_class("rl", N, T, given[0].observations, [ACTIONS], str(work.device)), given


def rsl_rl_add(work: Work) -> Made:
    storage, given = rsl_rl_storage(work)
    chain = itertools.cycle(given)

    @torch.inference_mode()
    def add() -> None:
        if storage.step >= T:
            storage.clear()
        storage.add_transition(next(chain))

    return work.repeated(add), lambda: ""


def rsl_rl_full(work: Work) -> tuple[Any, Callable[[], None]]:
    compute_returns = importlib.import_module("rsl_rl.algorithms.ppo").PPO.compute_returns
    storage, given = rsl_rl_storage(work)
    for transition in itertools.islice(itertools.cycle(given), T):
        storage.add_transition(transition)
    last = torch.zeros(N, 1, device=work.device)

    class ReadyCritic:
        def get_hidden_state(self) -> None:
            return None

        def reset(self, hidden_state: Any = None) -> None: ...

        def __call__(self, obs: Any) -> Tensor:
            return last

    stand_in = SimpleNamespace(
        storage=storage, critic=ReadyCritic(), gamma=GAMMA, lam=LAMBDA, normalize_advantage_per_mini_batch=True
    )
    return storage, torch.inference_mode()(lambda: compute_returns(stand_in, given[0].observations))


def rsl_rl_gae(work: Work) -> Made:
    storage, call = rsl_rl_full(work)

    def check() -> str:
        call()
        return gae_differs(storage.advantages[..., 0], storage.rewards[..., 0], storage.dones[..., 0] > 0)

    return work.repeated(call), check


def rsl_rl_minibatches(work: Work) -> Made:
    storage, call = rsl_rl_full(work)
    call()
    return whole_passes(
        work,
        lambda: storage.mini_batch_generator(MINIBATCHES, EPOCHS),
        lambda batch: (batch.observations["policy"], batch.returns),
    )


# All of them


class CopyFloor(PiecewiseCopyFloor):
    PIECE = 2**18
    note = "numpy.copyto of those bytes, 256 KB at a time"


class DeviceCopyFloor:
    """Copies as many bytes on the device; half of them are read, half written."""

    package, role, note = "", "floor", "Tensor.copy_ between two tensors of the device"
    label = "a copy of the bytes that are moved"

    def setup(self, data: Work) -> None:
        size = -(-data.bytes_moved // 2)
        source, target = (torch.ones(size, dtype=torch.uint8, device=data.device) for _ in range(2))

        def run() -> None:
            for _ in range(data.units if data.units > 1 else AT_ONCE):
                target.copy_(source)
            torch.cuda.synchronize(data.device)

        self.run = run

    def check(self) -> str:
        return ""


COMPILED = "relive, compiled"
"""A line of a GPU alone."""

REUSED = "relive, reuse=True"
"""Minibatches that are written to the same memory in turn."""

OWN_GRAPH = ", own graph"
"""After the name of a column: the call is in a graph of the caller's, which writes each batch over the one before."""


def contenders(work: Work) -> list[Contender]:
    """Those of one column."""
    there = work.device.type == GPU
    if there:
        floor: Contender = DeviceCopyFloor()
    else:
        floor = CopyFloor(lambda data: data.bytes_moved // 2 * data.units, "what is stored or read")

    def ours(label: str, note: str, make: Callable[[Any], Made]) -> Contender:
        return Line(label, "relive", note, make, "ours")

    if work.name.endswith(OWN_GRAPH):
        return [
            floor,
            ours(COMPILED, "compile(), and sample in a graph", relive_graph),
            Line("FastTD3", "FastTD3", "SimpleReplayBuffer.sample in a graph", fasttd3_graph),
        ]
    if work.name == "a step into a replay":
        lines = [
            ours("relive", "ReplayBuffer.add", relive_add),
            Line("FastTD3", "FastTD3", "SimpleReplayBuffer.extend", fasttd3_add),
            Line("torchrl", "torchrl", "TensorDictReplayBuffer.extend, LazyTensorStorage", torchrl_add),
        ]
        more = [ours(COMPILED, "the same after compile()", relive_compiled)]
    elif not work.in_rollouts:
        lines = [
            ours("relive", f"ReplayBuffer(view=NStep({work.n})).sample", relive_sample),
            Line("FastTD3", "FastTD3", f"SimpleReplayBuffer(n_steps={work.n}).sample", fasttd3_sample),
        ]
        if work.n == 1:
            lines += [Line("torchrl", "torchrl", "TensorDictReplayBuffer.sample, RandomSampler", torchrl_sample)]
        more = [ours(COMPILED, "the same after compile()", relive_compiled)]
    else:
        made: dict[str, tuple[str, Callable[[Any], Made], str, Callable[[Any], Made]]] = {
            "a step into a rollout": (
                "RolloutBuffer.add", relive_rollout_add, "RolloutStorage.add_transition", rsl_rl_add,
            ),
            "GAE": ("RolloutBuffer.finish(GAE())", relive_gae, "PPO.compute_returns, a ready critic", rsl_rl_gae),
            "a minibatch": (
                "RolloutBuffer.minibatches(4, 5 epochs)", relive_minibatches, "mini_batch_generator(4, 5)",
                rsl_rl_minibatches,
            ),
        }  # fmt: skip
        our_note, our_make, note, make = made[work.name]
        lines, more = [ours("relive", our_note, our_make), Line("rsl-rl", "rsl-rl-lib", note, make)], []
        if work.name == "a minibatch":
            reused = partial(relive_minibatches, reuse=True)
            more = [ours(REUSED, "RolloutBuffer.minibatches(4, 5 epochs, reuse=True)", reused)]
    return [floor, *(more if there else []), *lines]


# What a call asks of a device

UNRATED = {"rounds": 1, "floor": None, "best_peer": None, "best_peer_over_ours": None, "unit": "count"}


def elsewhere() -> Any:
    """The tests' stand-in for a device, and what watches the operations of one."""
    folder = str(ROOT / "tests")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("elsewhere")


def counted(work: Work) -> list[dict[str, Any]]:
    """How many operations a call launches, and how often it waits for the device."""
    launches, waits = [], []
    for contender in contenders(work):
        if contender.role == "floor":
            continue
        line: dict[str, Any] = {"label": contender.label, "role": contender.role, "package": contender.package}
        line["note"] = contender.note
        try:
            watch = watched(contender, work)
        except Exception as error:
            gone = isinstance(error, ImportError) and contender.role != "ours"
            line["status"] = f"not installed: {error}" if gone else failure(contender, error)
            launches.append(line)
            waits.append(line)
            continue
        line |= {"status": "ok", "version": version_of(contender.package)}
        launches.append(line | {"median": len(watch.launches) / work.units})
        waits.append(line | {"median": float(len(watch.waits))})
    found = [(work.name, launches), *([(f"waits: {work.name}", waits)] if any_waits(waits) else [])]
    for name, lines in found:
        print(name, {line["label"]: line.get("median", line["status"]) for line in lines})
    return [UNRATED | {"name": name, "lines": lines} for name, lines in found]


def any_waits(lines: list[dict[str, Any]]) -> bool:
    return any(line.get("median") for line in lines)


def watched(contender: Contender, work: Work) -> Any:
    """One run, watched; ours runs on the stand-in where it would call the core on the CPU."""
    tools = elsewhere()
    stands_in = contender.role == "ours" and work.in_rollouts and work.device.type == "cpu"
    place: AbstractContextManager[Any] = tools.far_device() if stands_in else nullcontext()
    with place:
        contender.setup(replace(work, counted=True, device=tools.ELSEWHERE if stands_in else work.device))
        contender.run()
        with tools.no_waiting(allow=True) as watch:
            contender.run()
    return watch


def memory(device: torch.device) -> dict[str, Any]:
    """Bytes of a transition in a full replay."""
    work, lines = replace(REPLAYS["a step into a replay"], device=device), []
    held: dict[str, tuple[str, Callable[[], float]]] = {
        "relive": ("relive", lambda: relive_bytes(work)),
        "FastTD3": ("FastTD3", lambda: sum(x.nbytes for x in vars(fasttd3_replay(work)[0]).values()
                                           if isinstance(x, Tensor)) / (N * STEPS)),
        "torchrl": ("torchrl", lambda: torchrl_bytes(work)),
    }  # fmt: skip
    for label, (package, count) in held.items():
        role = "ours" if label == "relive" else "peer"
        line: dict[str, Any] = {"label": label, "role": role, "package": package, "note": "bytes over transitions"}
        try:
            line |= {"median": count(), "status": "ok", "version": version_of(package)}
        except ImportError as error:
            line |= {"status": f"not installed: {error}"}
        lines.append(line)
    return UNRATED | {"name": "bytes a transition", "lines": lines}


def relive_bytes(work: Work) -> float:
    replay = relive_replay(work)
    filling(replay.add, steps(work.device))
    return replay.nbytes / len(replay)


def torchrl_bytes(work: Work) -> float:
    replay, given = torchrl_replay(work)
    filling(replay.extend, given)
    return replay[:].bytes() / len(replay)


# Reports


def columns(device: torch.device) -> list[Work]:
    """All that is measured there; on a GPU, batches of a graph as well."""
    found = [*REPLAYS.values(), *ROLLOUTS.values()]
    if device.type == GPU:
        batches = [work for work in REPLAYS.values() if work.name.startswith(str(BATCH))]
        found += [replace(work, name=work.name + OWN_GRAPH) for work in batches]
    return [replace(work, device=device) for work in found]


def times(device: torch.device, effort: Effort) -> list[dict[str, Any]]:
    found = []
    for work in columns(device):
        once = AT_ONCE if device.type == GPU and work.name != "a minibatch" else 1
        found.append(measure(Workload(work.name, work, units=work.units * once), contenders(work), effort))
    return found


def counts(device: torch.device) -> list[dict[str, Any]]:
    return [each for work in columns(device) for each in counted(work)] + [memory(device)]


TITLE = f"{N} envs, obs {OBS}, action {ACTIONS}"


def run(effort: Effort, folder: Path) -> None:
    """Measures on the CPU, and writes `device.json` and `device_launches.json`."""
    device = torch.device("cpu")
    write("device", f"{TITLE}, on the CPU", times(device, effort), folder)
    write("device_launches", f"{TITLE}: operations launched by one call", counts(device), folder)


def on_gpu(effort: Effort, folder: Path) -> None:
    """Measures on the GPU, and writes `gpu-<name>.json`."""
    device = torch.device("cuda", torch.cuda.current_device())
    card = torch.cuda.get_device_name(device)
    name = "gpu-" + re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    where = {"gpu": card, "cuda": torch.version.cuda or str(torch.version.hip)}
    command = "python benchmarks/bench_device.py --device cuda"
    write(name, f"{TITLE}, on a GPU", [*times(device, effort), memory(device)], folder, where=where, command=command)
    print(
        f"\n{folder / name}.json is written; a page shows it between <!-- bench:{name} --> and <!-- /bench:{name} -->"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure relive and its peers where a simulator has its tensors.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="few rounds; nothing of record is rewritten")
    arguments = parser.parse_args()
    effort, folder = (Effort.quick(), RESULTS / "quick") if arguments.quick else (Effort(), RESULTS)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use")
    (on_gpu if arguments.device == "cuda" else run)(effort, folder)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
