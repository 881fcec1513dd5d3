"""Replays that are played, changed and drawn from at random, and all that can be seen of their batches."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from relive import (
    Field,
    FrameStack,
    Fresh,
    Hindsight,
    NStep,
    Prioritized,
    Recent,
    ReplayBuffer,
    Schema,
    Sequence,
    SequenceBatch,
    Uniform,
)
from relive.errors import ReliveError
from relive.memory.device import DeviceRows
from relive.steps.arrays import numpy_dtype
from support import internals
from support.fields import bits, noise
from support.goal_plays import as_relabel, reached, stopped, worth
from support.replays import FLAGS
from support.twins import SAMPLERS

GOAL = {"observation": (3,), "achieved_goal": (4,), "desired_goal": (4,)}
KINDS: dict[str, dict[str, Any]] = {
    "flat": {"obs": (3,), "action": Field((), torch.int64)},
    "nested": {"obs": {"x": (2,), "y": Field((5,), torch.uint8)}, "action": {"y": (), "x": Field((2,), torch.int8)}},
    "odd": {
        "obs": Field((3,), torch.uint8), "action": Field((2,), torch.bool), "half": Field((5,), torch.bfloat16),
        "none": Field((0, 2), torch.float64), "more": {"long": Field((), torch.int64), "nothing": (0,)},
    },
    "deep": {"obs": {"x": {"y": (2,), "z": (1,)}, "w": Field((), torch.float16)}, "action": ()},
    "goals": {"obs": GOAL, "action": (1,), "info": {"x": (), "y": Field((2,), torch.int64)}},
    "large": {"obs": Field((40, 40), torch.uint8), "action": ()},
    "cameras": {
        "obs": {"left": Field((40, 41), torch.uint8), "x": (3,), "depth": Field((300,), torch.float64)}, "action": ()
    },
    "recurrent": {"obs": (3,), "action": (), "action_mask": Field((2,), torch.bool), "hidden": (2, 5)},
    "states": {
        "obs": {"x": (2,), "y": Field((3,), torch.uint8)}, "action": (),
        "hidden": {"a": (Field((3, 2, 2), torch.bfloat16), Field((), torch.int8)), "b": Field((4,), torch.float64)},
    },
}  # fmt: skip
EVERY_SAMPLER: dict[str, Callable[[], Any]] = {
    **SAMPLERS,
    "beta by schedule": lambda: Prioritized(1.3, (0.2, 1.0, 7), default_error=0.5),
    "recent, adapting": lambda: Recent(0.9, 2, adapt=True, inner=Prioritized(beta=(0.2, 1.0, 7), normalize="buffer")),
}


def informed(achieved: Any, desired: Any, info: Any) -> Any:
    return worth(achieved, desired) + info["x"] + info["y"].sum(1) % 3


def as_doubles(achieved: Any, desired: Any) -> Any:
    desired += 1  # the goals are its own
    return np.abs(achieved - desired).sum(1, dtype=np.float64)


GOALS: dict[str, Callable[[], Hindsight]] = {
    "future": lambda: Hindsight(worth, "future"),
    "final, 3-step, both flags": lambda: Hindsight(worth, "final", n=3, terminated_fn=reached, truncated_fn=stopped),
    "episode, 2-step": lambda: Hindsight(as_doubles, "episode", n=2, ratio=0.5),
    "past, info": lambda: Hindsight(informed, "past", info="info", terminated_fn=reached),
    "random, finished": lambda: Hindsight(worth, "random", finished_only=True, truncated_fn=stopped),
    "all": lambda: Hindsight(as_doubles, "final", ratio=1.0),
    "none": lambda: Hindsight(worth, ratio=0.0),
    "steps": lambda: Hindsight(strategy="future", relabel=as_relabel),
}


PRECISE = (torch.float64, torch.float32, torch.float16)


Make = Callable[..., ReplayBuffer]


def in_ram(schema: Schema, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(schema, 40, 2, **options)


def with_draws_checked(schema: Schema, **options: Any) -> ReplayBuffer:
    return internals.check_draws(in_ram(schema, **options))


def with_rows_of_its_own(schema: Schema, **options: Any) -> ReplayBuffer:
    def rows(fields: Any, count: int) -> Any:
        arrays = {path: np.zeros((count, *field.shape), numpy_dtype(field.dtype)) for path, field in fields.items()}
        return SimpleNamespace(
            read=lambda path, at: arrays[path][at], write=lambda path, at, x: arrays[path].__setitem__(at, x)
        )

    return in_ram(schema, store=rows, **options)


@contextmanager
def on_a_device() -> Iterator[Make]:
    with pytest.MonkeyPatch.context() as patch:
        device = torch.device("cpu")  # stands for any
        patch.setattr("relive.replay.buffer.ReplayRows", lambda leaves, rows: DeviceRows(leaves, rows, device))
        yield in_ram


@contextmanager
def without_the_exchange() -> Iterator[Make]:
    before = internals.use_exchange(False)
    try:
        yield in_ram
    finally:
        internals.use_exchange(before)


@contextmanager
def in_files() -> Iterator[Make]:
    with tempfile.TemporaryDirectory() as folder:
        made = list[ReplayBuffer]()

        def make(schema: Schema, **options: Any) -> ReplayBuffer:
            made.append(ReplayBuffer.open(f"{folder}/{len(made)}", schema, 40, 2, **options))
            return made[-1]

        yield make
        for replay in made:
            replay.close()


WAYS: dict[str, Callable[[], AbstractContextManager[Make]]] = {
    "in one call": lambda: nullcontext(in_ram),
    "places first": lambda: nullcontext(with_draws_checked),
    "without the exchange": without_the_exchange,
    "on a device": on_a_device,
    "the user's rows": lambda: nullcontext(with_rows_of_its_own),
    "in files": in_files,
}
"""Ways to the same batches. The first draws, reads and makes tensors in one compiled call, where fields are small.

Draws of the second are made, and checked as those of a user's sampler, before the view reads.
"""
OTHER_WAYS = [way for way in WAYS if way != "in one call"]
SEEDED_WAYS = [(way, k % 3) for k, way in enumerate(OTHER_WAYS)]
"""Each with a seed of its own."""
UNCOPIED = "the user's rows", "in files"
"""Replays that cannot be copied or pickled."""


class World:
    """A replay that is played and drawn from at random, and all that is seen of it.

    Args:
        kind: of KINDS.
        seed: of all that happens.
        make: makes the replay.
        copied: whether it may be copied.
        options: of the replay.
    """

    def __init__(self, kind: str, seed: int, make: Make = in_ram, copied: bool = True, **options: Any) -> None:
        self.schema = Schema({**KINDS[kind], "reward": (), **FLAGS})
        self.rng, self.copied, self.seen = np.random.default_rng(seed), copied, list[Any]()
        self.options = {"seed": seed, "check_ends": False, **options}
        self.buffer: Any = make(self.schema, **self.options)

    def take(self, buffer: ReplayBuffer) -> None:
        """Go on with this replay."""
        if internals.draws_are_checked(self.buffer):
            internals.check_draws(buffer)
        self.buffer = buffer

    def noise(self, path: tuple[str, ...], field: Field) -> Tensor:
        if path == ("reward",) or path[-1].endswith("_goal") or path[0] == "info":
            return torch.from_numpy(self.rng.integers(0, 9, (2, *field.shape))).to(field.dtype)
        if path[0] in FLAGS:
            return torch.from_numpy(self.rng.random(2) < 0.1)
        return noise((2, *field.shape), field.dtype, int(self.rng.integers(99)))

    def add(self) -> World:
        leaves = {path: self.noise(path, field) for path, field in self.schema.leaves.items()}
        step = {name: self.schema.rebuild(name, leaves.__getitem__) for name in self.schema.names}
        after = {path: self.noise(path, self.schema.leaves[path]) for path in leaves if path[0] == "obs"}
        self.buffer.add(step, next_obs=self.schema.rebuild("obs", after.__getitem__))
        return self

    def look(self, count: int = 12) -> None:
        """Draw a batch, and note it and all that a draw may change."""
        try:
            self.seen.append(facts(self.buffer.sample(count)))
        except ReliveError as error:
            self.seen.append((type(error), str(error)))
        self.seen.append(state(self.buffer))

    def play(self, turns: int) -> World:
        """Steps, changes and batches."""
        for _ in range(turns):
            for _ in range(self.rng.integers(0, 4)):
                self.add()
            for name in self.rng.choice(list(CHANGES), 2):
                CHANGES[name](self)
            self.look(int(self.rng.integers(1, 20)))
        return self

    def rate(self) -> None:
        if self.buffer.has_priorities and len(self.buffer):
            index, mask = self.buffer.data()["index"][::2], None
            shape = (len(index),)
            if isinstance(self.buffer.view, Sequence) and self.rng.random() < 0.7:  # an error of each step
                shape = (5, *shape) if self.buffer.view.time_first else (*shape, 5)
                mask = torch.from_numpy(self.rng.random(shape) < 0.6)
            errors = torch.from_numpy(self.rng.gamma(1, 3, shape)).to(self.rng.choice(PRECISE))
            self.seen.append(self.buffer.update_priorities(index, errors, mask=mask))

    def fill(self) -> None:
        """Thirty steps, and a look."""
        for _ in range(30):
            self.add()
        self.look()

    def set(self, part: Any, **values: list[Any]) -> None:
        """Set a parameter of a part that has it."""
        name = str(self.rng.choice(list(values)))
        if hasattr(type(part), name) or name in getattr(part, "__dict__", {}):
            setattr(part, name, values[name][self.rng.integers(len(values[name]))])

    def set_view(self) -> None:
        if isinstance(self.buffer.view, (NStep, FrameStack)) and self.buffer.ordered:
            n, stacked = int(self.rng.integers(1, 4)), self.rng.random() < 0.2 and not self.buffer.own_next_obs
            self.buffer.view = FrameStack(2, NStep(n)) if stacked else NStep(n, 0.5)

    def set_sequence(self) -> None:
        view = self.buffer.view
        if isinstance(view, Sequence):
            self.set(
                view, burn_in=[0, 2], n=[1, 3], gamma=[0.5, 1.0], drop_tail=[True, False], time_first=[True, False],
                overlap=["none", "half", "max"], last=[(), (), ("action",)],
            )  # fmt: skip
            if type(self.buffer.sampler) is Uniform:
                self.set(view, weigh=["windows", "steps", "episodes"])

    def set_window(self) -> None:
        if isinstance(self.buffer.view, Sequence):
            return
        several = self.buffer.ordered and not isinstance(self.buffer.view, FrameStack)
        self.set(self.buffer.view, gamma=[0.5, 1.0, 0.9], **({"n": [1, 2, 3]} if several else {}))

    def set_sampler(self) -> None:
        sampler = self.buffer.sampler
        self.set(sampler, eta=[0.8, 1.0], c_min=[1, 10])
        self.set(
            getattr(sampler, "inner", sampler), alpha=[0.0, 0.6, 1.0], eps=[0.1], stratified=[True, False],
            beta=[0.5, (0.0, 1.0, 5)], normalize=["buffer", "batch"], default_error=[None, 2.0],
        )  # fmt: skip

    def draw_more(self) -> None:
        if len(self.buffer) > 4:  # the most that is drawn without replacement
            self.seen.extend(facts(batch) for batch in self.buffer.batches(3, 5))
            self.seen.extend(facts(batch) for batch in self.buffer.serve(4, count=3))

    def save(self, folder: Any) -> None:
        self.buffer.save(folder)
        self.take(ReplayBuffer.load(folder, view=copy.deepcopy(self.buffer.view)))


CHANGES: dict[str, Callable[[World], Any]] = {
    "interrupt": lambda world: world.buffer.interrupt(),
    "clear": lambda world: world.rng.random() < 0.3 and world.buffer.clear(),
    "rate": World.rate,
    "seed": lambda world: setattr(world.buffer, "seed", int(world.rng.integers(-(2**63), 2**63))),
    "window": World.set_window,
    "sequence": World.set_sequence,
    "view": World.set_view,
    "goals": lambda world: world.set(world.buffer.view, ratio=[0.0, 0.5, 1.0], finished_only=[True, False],
                                     strategy=["future", "final", "episode", "past", "random"]),
    "sampler": World.set_sampler,
    "returns": lambda world: isinstance(world.buffer.sampler, Recent) and world.buffer.sampler.observe(
        world.rng.normal()),
    "copy": lambda world: world.copied and world.take(copy.deepcopy(world.buffer)),
    "pickle": lambda world: world.copied and world.take(pickle.loads(pickle.dumps(world.buffer))),
    "more": World.draw_more,
    "read": lambda world: world.seen.append(facts(world.buffer.data())),
}  # fmt: skip


def facts(batch: Any) -> Any:
    """All that can be seen of a batch but the order of its fields, which depends on the memory of rows."""
    if isinstance(batch, Tensor):
        assert not batch.requires_grad
        return type(batch), batch.dtype, batch.shape, batch.device, batch.is_inference(), bits(batch)
    if isinstance(batch, SequenceBatch):
        leaves, known, hidden = batch.parts
        return type(batch), batch.shape, batch.time_first, facts(dict(leaves)), facts(dict(known)), facts(hidden)
    if batch is None:
        return None
    members = sorted(batch.items()) if isinstance(batch, dict) else enumerate(batch)
    return type(batch), [(name, facts(x)) for name, x in members]


def state(buffer: Any) -> Any:
    """All that a draw may change, and all rows, whatever memory they are in."""
    internals.repair(buffer)
    ring, come = internals.ring(buffer), internals.progress(buffer)
    places = ring.places()
    complete = places[ring.stamp[places] >= 0]  # other rows may be final observations alone
    rows = ring.take(complete) | ring.take(places, [path for path in ring.leaves if path[0] == "obs"])
    sampler = {name: np.asarray(value) for name, value in buffer.sampler.state_dict().items()}
    for name in sampler.keys() & {"errors", "inner.errors"}:  # those of rows that cannot be drawn mean nothing
        sampler[name] = sampler[name][ring.anchors()]
    drawn = buffer.sampler.draw_state()
    if isinstance(buffer.sampler, Fresh):  # these two counts tell apart the states of one object
        drawn = drawn[0]._replace(skips=0, kinds=0), drawn[1]
    return (
        facts(rows), ring.state.tobytes(), ring.counters.tobytes(), ring.rule, buffer.stats(),
        [(name, value.dtype, value.tobytes()) for name, value in sampler.items()],
        pickle.dumps(drawn),
        come.seed, come.first, come.draws, come.sampled, come.late,
    )  # fmt: skip


def assert_same(seen: list[Any], wanted: list[Any]) -> None:
    assert len(seen) == len(wanted)
    for one, other in zip(seen, wanted, strict=True):
        assert one == other


def seen_of(way: str, play: Callable[[World], Any], kind: str, seed: int = 0, **options: Any) -> list[Any]:
    """What is seen of a world that is played in one of WAYS. ``options`` are called, if they can be."""
    made = {name: x() if callable(x) else x for name, x in options.items()}
    with WAYS[way]() as make:
        world = World(kind, seed, make, way not in UNCOPIED, **made)
        play(world)
        return world.seen


def assert_same_in(ways: Iterable[str], play: Callable[[World], Any], kind: str, seed: int = 0, **options: Any) -> None:
    """A play is seen to be the same in these ways as in the first one."""
    wanted = seen_of("in one call", play, kind, seed, **options)
    for way in ways:
        assert_same(seen_of(way, play, kind, seed, **options), wanted)


def filled(kind: str = "flat", **options: Any) -> Any:
    world = World(kind, 0, **options)
    for _ in range(30):
        world.add()
    world.buffer.sample(2)  # the first batch of relabelled rows asks for the ends of episodes
    return world.buffer


def others_run_during(work: Callable[[int], Any], calls: int = 2000) -> bool:
    """Whether another thread of Python runs while ``work(1)``, ``work(2)``, ... do theirs, in so many calls.

    What the calls return is kept to the end, as torch lets threads run when a tensor is dropped.
    """
    begin, ran, kept = threading.Event(), threading.Event(), list[Any]()
    thread = threading.Thread(target=lambda: (begin.wait(), ran.set()))
    thread.start()
    time.sleep(0.1)  # until it waits
    gc.collect()
    gc.disable()
    switch, deadline = sys.getswitchinterval(), time.monotonic() + 20
    sys.setswitchinterval(1000)  # so that a thread runs only where another one lets it
    try:
        begin.set()
        while not ran.is_set() and time.monotonic() < deadline and len(kept) < calls:
            kept.append(work(len(kept) + 1))
        return ran.is_set()
    finally:
        sys.setswitchinterval(switch)
        gc.enable()
        thread.join()
