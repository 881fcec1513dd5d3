"""Stacks of four 84 x 84 frames: batches of 32 and 256, and the memory that a transition takes.

relive stores single frames and stacks them when a batch is read; so do some peers if they are told to.
"""

import importlib
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench_replay_sample import agilerl_read, relive_read, sb3_read, tianshou_read, torchrl_read
from harness import Contender, CopyFloor, Effort, Workload, measure, summarize, write
from replay_data import Line, Made, agilerl_step, drawing, tianshou_step, torchrl_step
from tables import HAND

ROWS = 20_000
EPISODE = 1000
DEPTH, SIDE = 4, 84


@dataclass(frozen=True)
class Frames:
    """Transitions of one env with stacked observations; every pixel of frame t of the play is t modulo 256.

    The reward is the transition's number; episodes of 1000 end in a terminal. A stack begins with copies of the
    episode's first frame where that has no four before.
    """

    batch: int
    rows: int = ROWS
    nbytes: dict[str, float] = field(default_factory=dict)
    """Bytes per transition, by label."""

    def stacks(self, number: np.ndarray, ahead: int) -> np.ndarray:
        """The frames `[B, 4]` seen `ahead` steps after these transitions' own, as their pixels' values."""
        within = number % EPISODE
        back = np.arange(DEPTH - 1, -1, -1)
        frames = number[:, None] + np.maximum(ahead - back, -within[:, None])
        return frames.astype(np.uint8)

    def columns(self, start: int, end: int) -> dict[str, np.ndarray]:
        """Transitions of these numbers, every field `[end - start, ...]`."""
        number = np.arange(start, end)
        shape = (len(number), DEPTH, SIDE, SIDE)
        obs, following = (
            np.broadcast_to(self.stacks(number, ahead)[..., None, None], shape).copy() for ahead in (0, 1)
        )
        terminated = number % EPISODE == EPISODE - 1
        return {
            "obs": obs,
            "action": np.zeros((len(number), 1), np.int64),
            "reward": number.astype(np.float32),
            "next_obs": following,
            "terminated": terminated,
            "truncated": np.zeros_like(terminated),
        }

    def chunks(self) -> Iterator[dict[str, np.ndarray]]:
        """All transitions, an episode at a time."""
        return (self.columns(start, start + EPISODE) for start in range(0, self.rows, EPISODE))

    def wrong(self, obs: Any, reward: Any, next_obs: Any) -> str:
        """What is wrong with a batch, if anything."""
        number = np.asarray(reward).reshape(-1).astype(np.int64)
        for name, given, ahead in (("obs", obs, 0), ("next_obs", next_obs, 1)):
            wanted = self.stacks(number, ahead)[..., None, None]
            if np.shape(given) != (self.batch, DEPTH, SIDE, SIDE):
                return f"{name} has the shape {np.shape(given)}"
            bad = (np.asarray(given) != wanted).any(axis=(1, 2, 3))
            if bad.any():
                return f"some of {name} are wrong"
        return ""

    def made(self, label: str, nbytes: float, sample: Callable[[], Any], read: Callable[[Any], Any]) -> Made:
        """`run` and `check`; `read` gives the five fields of a batch that a learner uses, as torch tensors."""
        self.nbytes[label] = nbytes

        def check() -> str:
            obs, _, reward, next_obs, _ = read(sample())
            return self.wrong(obs, reward, next_obs)

        return lambda: read(sample()), check


NO_DATA = ("builtins", "types", "inspect")
"""Packages whose objects hold no experience."""


def allocated(*roots: Any) -> int:
    """The bytes of all arrays and tensors that can be reached from these objects, each byte once."""
    spans: set[tuple[int, int]] = set()
    seen: set[int] = set()
    waiting: list[Any] = list(roots)
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, type) or (callable(value) and not hasattr(value, "__dict__")):
            continue
        seen.add(id(value))
        if isinstance(value, np.ndarray):
            spans.add(np.lib.array_utils.byte_bounds(value))
            waiting.extend(value.flat if value.dtype == object else ())
        elif isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            spans.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple | set):
            waiting.extend(value)
        elif not isinstance(value, str | bytes) and type(value).__module__.partition(".")[0] not in NO_DATA:
            waiting.extend(getattr(value, "__dict__", {}).values())
            waiting.extend(getattr(value, name, None) for name in getattr(type(value), "__slots__", ()))
    total = end = 0
    for low, high in sorted(spans):
        total += max(0, high - max(low, end))
        end = max(end, high)
    return total


def relive_frames(reuse: bool) -> Callable[[Frames], Made]:
    def make(data: Frames) -> Made:
        relive = importlib.import_module("relive")
        flag = relive.Field((), torch.bool)
        fields = {"obs": relive.Field((SIDE, SIDE), torch.uint8), "action": relive.Field((1,), torch.int64)}
        schema = relive.Schema(fields | {"reward": relive.Field(()), "terminated": flag, "truncated": flag})
        rows = data.rows + data.rows // EPISODE + 1
        replay = relive.ReplayBuffer(schema, rows, view=relive.FrameStack(DEPTH), seed=0)
        for steps in data.chunks():
            for t in range(EPISODE):
                step = {name: array[t : t + 1] for name, array in steps.items()}
                replay.add(step, obs=step["obs"][:, -1], next_obs=step["next_obs"][:, -1])
        label = REUSE if reuse else "relive"
        return data.made(label, allocated(replay) / len(replay), drawing(replay, data.batch, reuse), relive_read)

    return make


def whole_stacks(data: Frames) -> Made:
    tensors: dict[str, torch.Tensor] = {}
    for at, steps in enumerate(data.chunks()):
        for name, array in steps.items():
            if at == 0:
                tensors[name] = torch.from_numpy(np.empty((data.rows, *array.shape[1:]), array.dtype))
            tensors[name][at * EPISODE : (at + 1) * EPISODE] = torch.from_numpy(array)
    fields = [tensors[name] for name in ("obs", "action", "reward", "next_obs", "terminated")]

    def sample() -> Any:
        rows = torch.randint(data.rows, (data.batch,))
        return [field.index_select(0, rows) for field in fields]

    return data.made(WHOLE, sum(field.nbytes for field in fields) / data.rows, sample, lambda fields: fields)


def single_frames(data: Frames) -> Made:
    """Frames of all observations, an episode's last one included, and the place of the first one of each episode."""
    rows, long = data.rows, EPISODE + 1
    frames = torch.empty(rows // EPISODE * long, SIDE, SIDE, dtype=torch.uint8)
    rest = {
        "action": torch.empty(rows, 1, dtype=torch.int64),
        "reward": torch.empty(rows),
        "terminated": torch.empty(rows),
    }
    for at, steps in enumerate(data.chunks()):
        frames[at * long : at * long + EPISODE] = torch.from_numpy(steps["obs"][:, -1])
        frames[at * long + EPISODE] = torch.from_numpy(steps["next_obs"][-1, -1])
        for name, column in rest.items():
            column[at * EPISODE : (at + 1) * EPISODE] = torch.from_numpy(steps[name])
    back, starts = torch.arange(1 - DEPTH, 1), torch.arange(rows) // EPISODE * long
    shape = data.batch, DEPTH, SIDE, SIDE

    def sample() -> Any:
        row = torch.randint(rows, (data.batch,))
        first = starts.index_select(0, row)[:, None]
        place = first + (row % EPISODE)[:, None] + back
        obs, after = (frames.index_select(0, (torch.maximum(place + k, first)).view(-1)).view(shape) for k in (0, 1))
        action, reward, terminated = (field.index_select(0, row) for field in rest.values())
        return obs, action, reward, after, terminated

    nbytes = frames.nbytes + starts.nbytes + sum(field.nbytes for field in rest.values())
    return data.made(SINGLE, nbytes / rows, sample, lambda fields: fields)


def sb3_frames(lean: bool) -> Callable[[Frames], Made]:
    def make(data: Frames) -> Made:
        buffers = importlib.import_module("stable_baselines3.common.buffers")
        spaces = importlib.import_module("gymnasium.spaces")
        space, actions = spaces.Box(0, 255, (DEPTH, SIDE, SIDE), np.uint8), spaces.Discrete(6)
        options = {"optimize_memory_usage": True, "handle_timeout_termination": False} if lean else {}
        buffer = buffers.ReplayBuffer(data.rows, space, actions, "cpu", **options)
        for steps in data.chunks():
            for t in range(EPISODE):
                step = {name: array[t : t + 1] for name, array in steps.items()}
                buffer.add(step["obs"], step["next_obs"], step["action"], step["reward"], step["terminated"], [{}])
        label = SB3_LEAN if lean else SB3
        return data.made(label, allocated(buffer) / data.rows, lambda: buffer.sample(data.batch), sb3_read)

    return make


def cpprb_frames(lean: bool) -> Callable[[Frames], Made]:
    def make(data: Frames) -> Made:
        cpprb = importlib.import_module("cpprb")
        shape = (SIDE, SIDE, DEPTH) if lean else (DEPTH, SIDE, SIDE)
        obs = {"shape": shape, "dtype": np.uint8}
        fields = {"obs": obs, "act": {"dtype": np.int64}, "rew": {}, "done": {}}
        tracemalloc.start()
        if lean:
            buffer = cpprb.ReplayBuffer(data.rows, fields, next_of="obs", stack_compress="obs")
        else:
            buffer = cpprb.ReplayBuffer(data.rows, fields | {"next_obs": obs})
        nbytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        for steps in data.chunks():
            names = {"obs": "obs", "next_obs": "next_obs", "act": "action", "rew": "reward", "done": "terminated"}
            step = {name: steps[key] for name, key in names.items()}
            if lean:
                step |= {name: np.moveaxis(step[name], 1, -1) for name in ("obs", "next_obs")}
            buffer.add(**step)
            buffer.on_episode_end()
        last = (0, 3, 1, 2) if lean else (0, 1, 2, 3)

        def read(b: Any) -> Any:
            obs, after = (torch.from_numpy(b[name].transpose(last)) for name in ("obs", "next_obs"))
            action, reward, done = (torch.from_numpy(b[name]) for name in ("act", "rew", "done"))
            return obs, action, reward, after, done

        label = CPPRB_LEAN if lean else "cpprb"
        return data.made(label, nbytes / data.rows, lambda: buffer.sample(data.batch), read)

    return make


def tianshou_frames(lean: bool) -> Callable[[Frames], Made]:
    def make(data: Frames) -> Made:
        collection = importlib.import_module("tianshou.data")
        options = {"stack_num": DEPTH, "ignore_obs_next": True, "save_only_last_obs": True} if lean else {}
        buffer = collection.VectorReplayBuffer(data.rows, 1, **options)
        for steps in data.chunks():
            for t in range(EPISODE):
                buffer.add(collection.Batch(tianshou_step({name: array[t : t + 1] for name, array in steps.items()})))
        label = TIANSHOU_LEAN if lean else "tianshou"
        return data.made(label, allocated(buffer) / data.rows, lambda: buffer.sample(data.batch)[0], tianshou_read)

    return make


def torchrl_frames(data: Frames) -> Made:
    collection = importlib.import_module("torchrl.data")
    storage = collection.LazyTensorStorage(data.rows)
    buffer = collection.TensorDictReplayBuffer(storage=storage, batch_size=data.batch)
    for steps in data.chunks():
        buffer.extend(torchrl_step(steps))
    return data.made("torchrl", allocated(buffer) / data.rows, buffer.sample, torchrl_read)


def agilerl_frames(data: Frames) -> Made:
    buffer = importlib.import_module("agilerl.components.replay_buffer").ReplayBuffer(data.rows)
    for steps in data.chunks():
        buffer.add(agilerl_step(steps))
    return data.made("agilerl", allocated(buffer) / data.rows, lambda: buffer.sample(data.batch), agilerl_read)


SB3, SB3_LEAN = "stable-baselines3", "stable-baselines3, optimize_memory_usage"
REUSE = "relive, reuse=True"
WHOLE, SINGLE = f"{HAND}whole stacks", f"{HAND}single frames"
CPPRB_LEAN, TIANSHOU_LEAN = "cpprb, stack_compress", "tianshou, save_only_last_obs"


def contenders() -> list[Contender]:
    lean = "VectorReplayBuffer(stack_num=4, save_only_last_obs=True, ignore_obs_next=True).sample, numpy"
    stacks = "ReplayBuffer(view=FrameStack(4))"
    return [
        CopyFloor(lambda data: 2 * data.batch * DEPTH * SIDE * SIDE, "a batch's obs and next_obs"),
        Line("relive", "relive", f"{stacks}.sample; single frames added", relive_frames(reuse=False), "ours"),
        Line(REUSE, "relive", f"next({stacks}.batches(_, _, reuse=True))", relive_frames(reuse=True), "ours"),
        Line(WHOLE, "torch", "index_select of preallocated stacks, next stacks and three fields", whole_stacks, "hand"),
        Line(SINGLE, "torch", "index_select of preallocated single frames at eight places", single_frames, "hand"),
        Line(SB3, SB3, "ReplayBuffer.sample", sb3_frames(False)),
        Line(SB3_LEAN, SB3, "the same with optimize_memory_usage=True", sb3_frames(True)),
        Line("cpprb", "cpprb", "ReplayBuffer.sample, numpy", cpprb_frames(False)),
        Line(
            CPPRB_LEAN, "cpprb", "the same with next_of and stack_compress, the stack as last axis", cpprb_frames(True)
        ),
        Line("tianshou", "tianshou", "VectorReplayBuffer.sample, numpy", tianshou_frames(False)),
        Line(TIANSHOU_LEAN, "tianshou", lean, tianshou_frames(True)),
        Line("torchrl", "torchrl", "TensorDictReplayBuffer.sample, LazyTensorStorage", torchrl_frames),
        Line("agilerl", "agilerl", "ReplayBuffer.sample", agilerl_frames),
    ]


def memory(nbytes: dict[str, float], measured: dict[str, Any]) -> dict[str, Any]:
    """The bytes per transition as one more workload."""
    lines = []
    for line in measured.get("lines", ()):
        if line["label"] in nbytes:
            kept = {name: line[name] for name in ("label", "role", "package", "version", "status") if name in line}
            note = "bytes of all arrays over the transitions stored"
            lines.append(kept | {"note": note, "median": nbytes[line["label"]]})
    return {"name": "bytes per transition", "rounds": 1, "unit": "count"} | summarize(lines) | {"lines": lines}


def run(effort: Effort, folder: Path) -> None:
    """Measures batches of stacked frames and writes `pixels.json`."""
    workloads = []
    for batch in (32, 256):
        data = Frames(batch)
        workloads.append(measure(Workload(f"batch of {batch}", data, after=True), contenders(), effort))
    workloads.append(memory(data.nbytes, workloads[-1]))
    write("pixels", "stacks of 4 frames of 84 x 84", workloads, folder)
