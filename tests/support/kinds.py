"""Every kind of buffer that can be made, filled with one play: a right one, or the same with a mistake.

A kind is a home, which says where the steps are kept, and a dress, which says of what their observations are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from relive import (
    GAE,
    Field,
    FrameStack,
    Mixture,
    Monitor,
    NStep,
    Prioritized,
    Recent,
    ReplayBuffer,
    ReturnsToGo,
    RolloutBuffer,
    Schema,
    Sequence,
    ValueHeads,
    WithoutReplacement,
)  # fmt: skip
from support import loops
from support.loops import Arrays
from support.other_device import ELSEWHERE, far_device

ENVS = 3


class Dress(NamedTuple):
    """How the three numbers of an observation are stored.

    Args:
        field: the schema of it.
        of: ``[..., 3]`` -> the observations.
        metric: near observations have near numbers, so that a reset shows as a jump.
        numbers: there are numbers to learn from.
    """

    field: Any
    of: Callable[[Any], Any]
    metric: bool = True
    numbers: bool = True


def bits(x: Any) -> Any:
    """Whole numbers of ten bits, as flags."""
    return (np.round(x[..., :1] * 40).astype(int) + 40 >> np.arange(10) & 1).astype(bool)


def image(x: Any) -> Any:
    """Three bytes in an image of many."""
    found = np.zeros((*x.shape[:-1], 1, 24, 24), np.uint8)
    found[..., 0, :3, 0] = bytes_of(x)
    found[..., 0, 5, :] = 77
    return found


def bytes_of(x: Any) -> Any:
    return np.clip(np.round(x * 8) + 5, 0, 255).astype(np.uint8)


def parts(x: Any) -> Any:
    """Nested dicts and tuples of several dtypes."""
    whole, half = np.round(x[..., :2] * 20).astype(np.int64), x[..., 2].astype(np.float16)
    return {"a": {"x": x[..., :1], "y": x[..., 1]}, "b": (half, whole)}


def as_type(dtype: torch.dtype) -> Callable[[Any], Any]:
    return lambda x: torch.as_tensor(x).to(dtype)


FLOATS = {str(dtype).removeprefix("torch."): Dress(Field((3,), dtype), as_type(dtype))
          for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)}  # fmt: skip
DRESSES: dict[str, Dress] = FLOATS | {
    "int64": Dress(Field((3,), torch.int64), lambda x: np.round(x * 20).astype(np.int64)),
    "bytes": Dress(Field((3,), torch.uint8), bytes_of),
    "flags": Dress(Field((10,), torch.bool), bits, metric=False),
    "complex": Dress(Field((2,), torch.complex64), lambda x: (x[..., :2] + 1j * x[..., 1:]).astype(np.complex64)),
    "one number": Dress(Field(()), lambda x: x[..., 0]),
    "nested": Dress({"a": {"x": (1,), "y": ()}, "b": (Field((), torch.float16), Field((2,), torch.int64))}, parts),
    "images": Dress(Field((1, 24, 24), torch.uint8), image, metric=False, numbers=False),
    "nothing": Dress(Field((0,)), lambda x: x[..., :0], metric=False, numbers=False),
}  # fmt: skip


# -- plays ----------------------------------------------------------------------------------------------------------


@cache
def _play(envs: int) -> Arrays:
    rows = loops.blocks(envs=envs, episodes=12 // envs)
    rows["truncated"][-1] |= ~rows["terminated"][-1]  # or the newest steps are no transitions yet
    return rows


def play(mistake: str = "", envs: int = ENVS) -> Arrays:
    """Steps ``[T, N, ...]`` with next observations; ``mistake`` is one of MISTAKES, or none."""
    rows = {name: x.copy() for name, x in _play(envs).items()}
    ended = rows["terminated"] | rows["truncated"]
    if mistake == "resets":
        rows["next_obs"][:-1][ended[:-1]] = rows["obs"][1:][ended[:-1]]
    elif mistake == "flags late":
        for name in ("terminated", "truncated"):
            rows[name] = np.roll(rows[name], 1, 0)
    elif mistake == "rewards late":
        rows["reward"] = np.roll(rows["reward"], 1, 0)
    elif mistake == "not finite":
        rows["action"][-2, 0] = np.nan
    return rows


MISTAKES = {"resets": "reset-as-final-observation", "flags late": "ends-one-row-off",
            "rewards late": "reward-one-step-off", "not finite": "not-finite"}  # fmt: skip


def extras(rows: Arrays) -> dict[str, Any]:
    """Further fields ``[T, N, ...]``: recurrent states, a mask of actions, a cost, a log-probability."""
    rng, size = np.random.default_rng(0), rows["reward"].shape
    hidden = rng.normal(size=(*size, 4)).astype(np.float32), rng.normal(size=(*size, 2, 2)).astype(np.float16)
    return {"hidden": hidden, "action_mask": rng.random((*size, 5)) < 0.5,
            "cost": rows["reward"] * 2, "log_prob": rng.normal(size=size).astype(np.float32)}  # fmt: skip


def schema_of(dress: Dress, **more: Any) -> Schema:
    flags = {name: Field((), torch.bool) for name in ("terminated", "truncated")}
    further = {"hidden": (Field((4,)), Field((2, 2), torch.float16)), "action_mask": Field((5,), torch.bool),
               "cost": (), "log_prob": ()}  # fmt: skip
    return Schema({"obs": dress.field, "action": (2,), "reward": Field(()), **flags, **further, **more})


# -- homes ----------------------------------------------------------------------------------------------------------


class Home(NamedTuple):
    """Where steps are kept.

    Args:
        make: (rows, dress, a folder) -> a source for ``look``, which holds these rows.
        envs: of how many envs.
        after: next observations are stored.
        own: each row has one of its own, which need not be the observation of the following row.
        whole: all rows are there, and so all ends.
        ordered: rows are in the order of time.
        far: the steps lie on a device.
    """

    make: Callable[[Arrays, Dress, Path], Any]
    envs: int = ENVS
    after: bool = True
    own: bool = False
    whole: bool = True
    ordered: bool = True
    far: bool = False


def columns(rows: Arrays, dress: Dress) -> dict[str, Any]:
    """Rows in their dress, with further fields."""
    worn = {name: dress.of(rows[name]) for name in ("obs", "next_obs")}
    return {**rows, **worn, **extras(rows)}


def on(device: Any, tree: Any) -> Any:
    """Tensors on a device; arrays are copied over by the buffer."""
    if isinstance(tree, dict):
        return {name: on(device, member) for name, member in tree.items()}
    if isinstance(tree, tuple):
        return tuple(on(device, member) for member in tree)
    return tree.to(device) if isinstance(tree, torch.Tensor) else tree


def replay(rows: Arrays, dress: Dress, **options: Any) -> ReplayBuffer:
    """A replay of these rows."""
    options = {"capacity": 2000, "num_envs": rows["reward"].shape[1], "seed": 0, "check_ends": False} | options
    made = ReplayBuffer(schema_of(dress), **options)
    made.extend(on(made.device, columns(rows, dress)))
    return made


def saved(made: Any, folder: Path, **options: Any) -> Path:
    made.save(folder / "save", **options)
    return folder / "save"


def in_files(rows: Arrays, dress: Dress, folder: Path, closed: bool = False) -> Any:
    """A replay in files, or the path of one that is closed."""
    envs = rows["reward"].shape[1]
    made = ReplayBuffer.open(folder / "files", schema_of(dress), 2000, num_envs=envs, seed=0, check_ends=False)
    made.extend(columns(rows, dress))
    if not closed:
        return made
    made.close()
    return folder / "files"


def counted(rows: Arrays, dress: Dress, **options: Any) -> Monitor:
    """A monitor that has counted some batches."""
    monitor = Monitor(replay(rows, dress, **options), counts=True)
    for _ in range(4):
        monitor.update(monitor.replay.sample(16))
    return monitor


def saved_with_counts(rows: Arrays, dress: Dress, folder: Path) -> Path:
    monitor = counted(rows, dress, sampler=Prioritized())
    return saved(monitor.replay, folder, extra={"monitor": monitor.state_dict()})


HEADS = {1: GAE(0.99, 0.9), 2: ValueHeads({"reward": GAE(0.99, 0.9), "cost": GAE(0.95, 0.8)})}


def rollout(rows: Arrays, dress: Dress, heads: int = 1, finish: bool = True, masked: bool = False, more: int = 0,
            **options: Any) -> RolloutBuffer:  # fmt: skip
    """A rollout of these rows, with one value or several, and place for ``more``."""
    size, envs = rows["reward"].shape
    shape = () if heads == 1 else (heads,)
    made = RolloutBuffer(schema_of(dress, value=shape), size + masked + more, envs, seed=0, **options)
    given = columns(rows, dress)
    after = given.pop("next_obs")
    value, final = (np.stack([k + (k + 1) * loops.value_of(rows[name] + k) for k in range(heads)], -1)
                    .reshape(size, envs, *shape).astype(np.float32) for name in ("obs", "next_obs"))  # fmt: skip
    given = on(made.device, given | {"value": value, "final_value": final})
    for t in range(size):
        if masked and t == size // 2:  # a step that is not real, as after an end
            made.add(at(given, t) | {"mask": np.zeros(envs, bool)})
        made.add(at(given, t))
    if finish:
        made.set_last(value=final[-1], obs=at(on(made.device, {"obs": after}), -1)["obs"])
        made.finish(HEADS[heads])
    return made


def at(tree: Any, t: int) -> Any:
    """Step t of nested columns."""
    if isinstance(tree, dict):
        return {name: at(member, t) for name, member in tree.items()}
    return tuple(at(member, t) for member in tree) if isinstance(tree, tuple) else tree[t]


def arrays(rows: Arrays, dress: Dress) -> Arrays:
    return columns(rows, dress)


def npz(rows: Arrays, dress: Dress, folder: Path) -> Path:
    """A file of arrays; nested ones come as the first of their parts, as such a file has no others."""
    found = {name: first(x) for name, x in columns(rows, dress).items()}
    np.savez(folder / "log.npz", **found)
    return folder / "log.npz"


def first(tree: Any) -> Any:
    while isinstance(tree, dict | tuple):
        tree = next(iter(tree.values())) if isinstance(tree, dict) else tree[0]
    return tree.float().numpy() if isinstance(tree, torch.Tensor) and tree.dtype is torch.bfloat16 else np.asarray(tree)


HOMES: dict[str, Home] = {
    "replay": Home(lambda rows, dress, _: replay(rows, dress)),
    "one env": Home(lambda rows, dress, _: replay(rows, dress, view=NStep(3)), envs=1),
    "own next_obs": Home(
        lambda rows, dress, _: replay(rows, dress, own_next_obs=True, sampler=WithoutReplacement()), own=True),
    "unordered": Home(lambda rows, dress, _: replay(rows, dress, ordered=False), ordered=False),
    "wrapped ring": Home(
        lambda rows, dress, _: replay(rows, dress, capacity=ENVS * 40, view=Sequence(8)), whole=False),
    "wrapped, own next_obs": Home(
        lambda rows, dress, _: replay(rows, dress, capacity=ENVS * 40, own_next_obs=True), whole=False),
    "prioritized": Home(lambda rows, dress, _: replay(rows, dress, sampler=Recent(0.99, inner=Prioritized()))),
    "monitor": Home(lambda rows, dress, _: counted(rows, dress, view=ReturnsToGo(0.9))),
    "member of a mixture": Home(
        lambda rows, dress, _: Mixture({"a": replay(rows, dress)}, {"a": 1}).buffers["a"]),
    "save of a replay": Home(lambda rows, dress, folder: saved(replay(rows, dress), folder)),
    "save with counts": Home(saved_with_counts),
    "replay in files": Home(in_files),
    "files that are closed": Home(lambda rows, dress, folder: in_files(rows, dress, folder, closed=True)),
    "device": Home(lambda rows, dress, _: replay(rows, dress, device=ELSEWHERE), far=True),
    "device, prioritized": Home(
        lambda rows, dress, _: counted(rows, dress, device=ELSEWHERE, sampler=Prioritized()), far=True),
    "rollout": Home(lambda rows, dress, _: rollout(rows, dress), after=False),
    "rollout, not finished": Home(lambda rows, dress, _: rollout(rows, dress, finish=False), after=False),
    "rollout, half filled": Home(
        lambda rows, dress, _: rollout(rows, dress, 2, finish=False, more=30), after=False),
    "rollout, heads": Home(lambda rows, dress, _: rollout(rows, dress, 2), after=False),
    "rollout, heads, masked": Home(
        lambda rows, dress, _: rollout(rows, dress, 2, masked=True), after=False),
    "rollout, wrapped": Home(
        lambda rows, dress, _: rollout(rows, dress, 2, more=-30, wrap=True), after=False, whole=False),
    "save of a rollout": Home(lambda rows, dress, folder: saved(rollout(rows, dress, 2), folder), after=False),
    "rollout on a device": Home(
        lambda rows, dress, _: rollout(rows, dress, 2, device=ELSEWHERE), after=False, far=True),
    "arrays": Home(lambda rows, dress, _: arrays(rows, dress), own=True),
    "npz": Home(npz, own=True),
}  # fmt: skip


@contextmanager
def kind(home: str, dress: str, folder: Path, mistake: str = "") -> Iterator[tuple[Any, Arrays]]:
    """A source of a kind, and the rows that it was made from."""
    here = HOMES[home]
    rows = play(mistake, here.envs)
    with far_device() if here.far else nullcontext():
        yield here.make(rows, DRESSES[dress], folder), rows


def seen(home: str, dress: str, mistake: str) -> bool:
    """Whether the steps of a kind say that there is this mistake, by what it keeps of them."""
    here, worn = HOMES[home], DRESSES[dress]
    if home == "npz" and dress == "nested":
        worn = DRESSES["one number"]
    known = {
        "resets": here.after and here.ordered and here.whole and worn.metric,
        "flags late": here.ordered
        and here.whole
        and (dress != "nothing" if here.own else not here.after and worn.metric),
        "rewards late": here.ordered and here.whole and worn.numbers,
        "not finite": True,
    }
    return known[mistake]


def stacked(folder: Path, saved_there: bool = False) -> Any:
    """A replay whose view stacks frames, for images alone."""
    made = replay(play(), DRESSES["images"], view=FrameStack(4))
    return saved(made, folder) if saved_there else made
