"""The features of the matrix of pairs: how each is set up, what it does meanwhile, and what it must leave behind."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, cast

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import relive.replay.buffer
from attacks.steps_of_pairs import CUT, ENVS, GAMMA, ROWS, SCHEMA, Steps, hindsight, observed, step
from relive import (
    Collector,
    FrameStack,
    Lanes,
    Mixture,
    NStep,
    Prioritized,
    ReplayBuffer,
    SchemaChanges,
    Sequence,
    Transition,
)
from relive.errors import LifecycleError
from relive.memory.device import DeviceRows
from support import internals
from support.twins import same_batches

__all__ = [
    "Copied", "Device", "Durable", "Feature", "Forks", "GoalsReached", "Laned", "Loads", "Mixed", "Pickled",
    "Priorities", "Saves", "Serve", "Server", "Shards", "Threads", "TwoOwners", "ViewChanges", "WarmUp",
]  # fmt: skip


class Feature:
    """One of two features of a world."""

    needs: tuple[str, ...] = ()
    """Features that come with it."""
    options: ClassVar[dict[str, Callable[[], Any]]] = {}
    """Arguments of the replay."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.random = world.random

    @property
    def steps(self) -> Steps:
        return self.world.steps

    @property
    def replay(self) -> Any:
        return self.world.replay

    def made(self, make: Callable[[], Any]) -> Callable[[], Any]:
        """How the replay is made, with this feature."""
        return make

    def begin(self) -> None:
        """The replay has been made, or another one has taken its place."""

    def act(self, turn: int) -> None:
        """Do it once."""

    def settle(self) -> None:
        """Have all steps that were added in the replay."""

    def recover(self) -> None:
        """A call was broken off."""

    def leave(self) -> None:
        """The replay is about to be replaced, or looked at for the last time."""

    def look(self) -> None:
        """Look at what this feature has left."""


# -- where a replay lives ---------------------------------------------------------------------------------------


class Durable(Feature):
    """A replay in files. It is flushed, closed and opened again, or dropped as by a kill."""

    def made(self, make: Callable[[], Any]) -> Callable[[], Any]:
        world, path = self.world, self.world.folder / "replay"

        def opened() -> Any:
            parts = world.parts()
            options: dict[str, Any] = {"schema": SCHEMA, "capacity": ENVS * ROWS, "num_envs": ENVS, "seed": 0, **parts}
            if (path / "manifest.json").exists():  # it goes on with what it has, but for a view with a function
                options = {"view": parts["view"]} if world.has("hindsight in mid-episode") else {}
            flush = timedelta(hours=1) if world.has("a clock that jumps") else None
            return ReplayBuffer.open(path, check_ends=False, flush=flush, **options)

        return opened

    def act(self, turn: int) -> None:
        if self.world.has("server"):
            self.replay.call("flush")
        elif self.world.has("shards"):
            self.replay.save(self.world.folder / "save").wait()
        elif turn % 3 == 1:
            self.world.leave()
            self.replay.close()
            self.world.begin()
        else:
            self.replay.flush()

    def recover(self) -> None:
        if self.world.has("server") or self.world.has("shards"):
            return
        if type(internals.ring(self.replay).pending).__name__ == "Ended":  # closed, and not yet opened again
            self.world.begin()
        self.replay.flush()


class Device(Feature):
    """The bookkeeping in torch operations, of rows on a device: the CPU goes for one."""

    def made(self, make: Callable[[], Any]) -> Callable[[], Any]:
        def on_device() -> Any:
            cpu, module = torch.empty(0).device, cast("Any", relive.replay.buffer)
            genuine = module.ReplayRows
            module.ReplayRows = lambda leaves, rows: DeviceRows(leaves, rows, cpu)
            try:
                return make()
            finally:
                module.ReplayRows = genuine

        return on_device

    def begin(self) -> None:
        self.world.as_tensors = True

    def act(self, turn: int) -> None:
        if len(self.replay):
            batch = self.replay.sample(8)
            self.world.look_at(batch)
            if self.replay.has_priorities:
                self.world.rate(batch)


class Shards(Feature):
    """A replay of two shards, behind a link that kills them."""

    def made(self, make: Callable[[], Any]) -> Callable[[], Any]:
        from attacks.remote import Sharded

        return partial(Sharded, self.world)

    def act(self, turn: int) -> None:
        if self.world.has("durable"):  # it comes back with all that it had confirmed
            self.replay.restart(turn % 2)
            self.steps.link[turn % 2, self.steps.stored(turn % 2)[-1:]] = CUT
        self.world.sampled(8)

    def settle(self) -> None:
        try:
            self.replay.writer.flush()  # what a call that was broken off has not sent
        except self.world.may_raise:  # the error of that call
            self.replay.writer.flush()


class Server(Feature):
    """A replay in a process of its own."""

    def made(self, make: Callable[[], Any]) -> Callable[[], Any]:
        from attacks.remote import Remote

        return partial(Remote, self.world, make)

    def act(self, turn: int) -> None:
        self.world.settle()
        self.world.sampled(8)

    def recover(self) -> None:
        self.replay.reconnect()

    def leave(self) -> None:
        self.replay.close()


# -- how steps come and batches go ---------------------------------------------------------------------------------


class Laned(Feature):
    """Steps come through a lane, and are drained."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self.lanes = Lanes(SCHEMA, 1, ENVS, steps=16, own_next_obs=False)
        self.writer: Any = None

    def begin(self) -> None:
        if self.writer is None:
            self.writer = self.lanes.writer(0, timeout=5.0)
        self.world.writer = self.writer

    def act(self, turn: int) -> None:
        if not self.world.has("server"):
            self.lanes.drain(self.replay)
            self.steps.came()

    def settle(self) -> None:
        if not self.world.has("server"):
            self.lanes.drain(self.replay)
        end = time.perf_counter() + 20
        while self.lanes.waiting != [0]:
            assert time.perf_counter() < end, "the lanes are not drained"
            time.sleep(0.001)


class Serve(Feature):
    """Batches that a thread draws ahead."""

    stream: Any = None

    def begin(self) -> None:
        self.stream = None

    def act(self, turn: int) -> None:
        if self.stream is None and len(self.replay):
            self.stream = self.replay.serve(8, 3, timeout=20.0)
        if self.stream is not None:
            for _ in range(2):
                self.world.look_at(next(self.stream))
            if turn % 4 == 3:
                self.leave()

    def recover(self) -> None:
        self.leave()

    def leave(self) -> None:
        if self.stream is not None:
            self.stream.close()
            self.stream = None


class Mixed(Feature):
    """Half of each batch is of another replay."""

    def begin(self) -> None:
        other = ReplayBuffer(SCHEMA, 40, ENVS, seed=1, check_ends=False, **self.world.parts())
        for number in range(8):
            other.add(step(number))
        self.other = Steps()
        self.other.take(8)
        self.other.came()
        self.mixture = Mixture({"own": self.replay, "other": other}, {"own": 0.5, "other": 0.5})

    def act(self, turn: int) -> None:
        self.mixture.buffers["other"].view = copy.deepcopy(self.replay.view)
        if len(self.replay):
            batch = self.mixture.sample(8)
            own = batch["source"] == 0
            assert int(own.sum()) == 4
            self.world.look_at(batch.rows(own))
            self.other.check_rows(batch.rows(~own))
            if self.replay.has_priorities:
                self.world.rate(batch.rows(own), lambda index, errors: self.mixture.update_priorities(
                    batch, torch.cat([errors, errors])))  # fmt: skip


class WarmUp(Feature):
    """A collector fills the replay from envs of its own."""

    def act(self, turn: int) -> None:
        count, steps = 5, self.steps
        steps.interrupt()  # its reset begins new episodes
        first = steps.take(count)[0]
        makers = [partial(Counted, env, first) for env in range(ENVS)]
        envs = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
        own = Collector(envs, acted, ReplayBuffer(SCHEMA, 100, ENVS, check_ends=False))
        envs = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
        own.warm(self.world.writer or self.replay, count, policy=acted, envs=envs)
        if self.world.writer is None:
            steps.came()
        steps.interrupt()


class Counted(gym.Env[Any, Any]):
    """An env that gives the steps of the model, from a number on."""

    def __init__(self, env: int, first: int) -> None:
        self.env, self.number = env, first
        box = partial(gym.spaces.Box, -np.inf, np.inf)
        self.observation_space = gym.spaces.Dict(
            {"tag": box((2,)), "achieved_goal": box((1,)), "desired_goal": box((1,))}
        )
        self.action_space = gym.spaces.Discrete(1 << 20)

    def _observed(self, number: float) -> Any:
        return {name: value[self.env] for name, value in observed([number] * ENVS).items()}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._observed(self.number), {}

    def step(self, action: Any) -> Any:
        known = step(self.number)
        self.number += 1
        after = {name: value[self.env] for name, value in known["next_obs"].items()}
        return after, float(known["reward"][0]), bool(known["terminated"][self.env]), bool(
            known["truncated"][self.env]), {}  # fmt: skip


def acted(obs: Any) -> Any:
    """The action that a step of the model has."""
    number = torch.as_tensor(np.asarray(obs["tag"]))[:, 1].long()
    return {"action": number, "note": -number}


# -- views and samplers ---------------------------------------------------------------------------------------------


class Priorities(Feature):
    """TD errors come a while after their batch."""

    options: ClassVar[dict[str, Callable[[], Any]]] = {"sampler": lambda: Prioritized(beta=(0.4, 1.0, 50))}
    batch: Any = None

    def begin(self) -> None:
        self.batch = None

    def act(self, turn: int) -> None:
        if self.batch is not None:
            self.world.rate(self.batch)
        self.batch = self.world.sampled(8)

    def recover(self) -> None:
        self.batch = None


class GoalsReached(Feature):
    """Goals that were reached, of episodes that go on."""

    options: ClassVar[dict[str, Callable[[], Any]]] = {"view": hindsight}

    def act(self, turn: int) -> None:
        self.world.sampled(8)


class ViewChanges(Feature):
    """The view is replaced, or its parameter set."""

    def act(self, turn: int) -> None:
        with self.replay.lock:  # another thread could meet the view of a moment
            self.change(turn)

    def change(self, turn: int) -> None:
        """The change number ``turn``."""
        replay, kind = self.replay, turn % 4
        if kind == 3:
            self.steps.errors[:] = np.nan  # what cannot be drawn meanwhile is new afterwards
            replay.view = Sequence(3, overlap="none", gamma=GAMMA)
            if len(replay):
                self.steps.check_sequences(replay.sample(4))
            replay.view = Transition(GAMMA)
        elif kind == 0 and isinstance(replay.view, NStep):
            replay.view.n = 1 + turn % 3
        else:
            replay.view = NStep(2, GAMMA) if kind == 1 else FrameStack(2, NStep(2, GAMMA))
        if len(replay):
            self.world.look_at(replay.sample(8))

    def recover(self) -> None:
        if isinstance(self.replay.view, Sequence):
            self.replay.view = Transition(GAMMA)


# -- copies -----------------------------------------------------------------------------------------------------


class Copied(Feature):
    """A copy is the same and goes its own way; it takes the place of the replay."""

    by: Any = staticmethod(copy.deepcopy)

    def act(self, turn: int) -> None:
        other = self.by(self.replay)
        self.world.check(other)
        if len(other):
            third = self.by(other)
            assert same_batches(other.sample(4), third.sample(4)), "two copies draw other batches"
        if turn % 2 and not self.world.has("durable"):
            self.world.leave()
            self.world.begin(other)
        else:
            private = self.steps.copy()
            other.add(step(private.take(1)[0]))
            private.came()
            self.world.check(other, private)


class Pickled(Copied):
    """The same by pickle."""

    by = staticmethod(lambda replay: pickle.loads(pickle.dumps(replay)))


class Saves(Feature):
    """A save beside the loop, and each says which steps it must have."""

    handle: Any = None
    background = True

    def act(self, turn: int) -> None:
        self.settled()
        path, number = self.world.folder / "save", self.world.counts[0]
        self.world.settle()
        self.steps.write(self.world.folder / f"steps-{number}.npz")
        self.world.counts[0] += 1
        self.handle, self.number = self.replay.save(path, extra=int(number), background=self.background), number
        if turn % 2:
            self.settled()

    def settled(self) -> None:
        """Wait for the save that is under way."""
        if self.handle is not None:
            handle, self.handle = self.handle, None
            try:
                handle.wait()
            except self.world.may_raise:  # it was begun under attack
                return
            self.world.counts[1] = self.number + 1

    def recover(self) -> None:
        handle, self.handle = self.handle, None
        if handle is not None:
            with suppress(Exception):
                handle.wait()

    def leave(self) -> None:
        self.settled()

    def look(self) -> None:
        path = self.world.folder / "save"
        if not (path / "manifest.json").exists() and not self.world.counts[1]:
            return
        loaded = self.world.loaded(path)
        assert loaded.extra + 1 >= self.world.counts[1], "an older save is there than one that was done"
        known = Steps().read(np.load(self.world.folder / f"steps-{loaded.extra}.npz"))
        self.world.check(loaded, known)


class Loads(Feature):
    """A save is loaded with other fields and another size, and goes on."""

    def act(self, turn: int) -> None:
        self.world.settle()
        self.replay.save(self.world.folder / "changed").wait()
        changes = SchemaChanges(drop=["note"], cast={"action": torch.int32}, add={"cost": 2.5})
        rows = ROWS - 10 if turn % 2 else ROWS + 10
        loaded = ReplayBuffer.load(
            self.world.folder / "changed", changes=changes, capacity=ENVS * rows, **self.world.own_view()
        )
        loaded.check_ends = False
        known = self.steps.copy()
        for env in range(ENVS):  # it has what fitted into the smaller of both
            known.gone[env] = max(known.gone[env], len(known.rows(env)) - min(rows, ROWS))
        self.world.check(loaded, known, rows)
        assert not len(loaded) or (loaded.data()["cost"] == 2.5).all()
        if self.world.writer is not None:  # an interrupt waits in the lane, and the save knows nothing of it
            known.interrupt()
            loaded.interrupt()
        for number in known.take(3):
            given = step(number)
            del given["note"]
            loaded.add(**given, cost=np.full(ENVS, 2.5, np.float32))
        known.came()
        self.world.check(loaded, known, rows)


# -- others at the same time -----------------------------------------------------------------------------------------


class Threads(Feature):
    """Another thread reads all the time."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self.error: BaseException | None = None
        self.over, self.thread = threading.Event(), None

    def begin(self) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self.read, daemon=True)
            self.thread.start()

    def read(self) -> None:
        while not self.over.wait(0.0005):
            try:
                replay = self.world.replay
                with replay.lock:  # the view must not change between these
                    if len(replay):
                        self.world.look_at(replay.sample(4))
                replay.stats()
            except LifecycleError:  # closed, and opened again under another name
                continue
            except BaseException as error:
                self.error = error
                return

    def act(self, turn: int) -> None:
        time.sleep(0.002)

    def look(self) -> None:
        self.over.set()
        if self.thread is not None:
            self.thread.join(30)
            assert not self.thread.is_alive(), "a thread waits for ever"
        if self.error is not None:
            raise self.error


class Forks(Feature):
    """A forked child has the replay as it is, goes on with it, and nobody else sees that."""

    def act(self, turn: int) -> None:
        self.world.settle()
        self.world.in_child(self.child)
        self.world.check()

    def child(self) -> None:
        world = self.world
        world.steps = world.steps.copy()
        if world.writer is not None:
            with suppress(LifecycleError):
                world.settle()
                world.writer.add(step(0))
                raise AssertionError("a child may write to its parent's lane")
            return
        if world.has("durable") or world.has("server"):
            with suppress(LifecycleError):
                self.replay.add(step(0))
                raise AssertionError("a child may use what belongs to its parent")
            return
        world.check()
        for number in world.steps.take(2):
            self.replay.add(step(number))
        world.steps.came()
        world.check()


class TwoOwners(Feature):
    """Whoever comes second is refused, here and in another process, and the first goes on."""

    def act(self, turn: int) -> None:
        self.world.settle()  # whoever drains a lane owns it
        self.refusals()
        self.world.in_child(self.refusals, True)

    def refusals(self, elsewhere: bool = False) -> None:
        world, tried = self.world, 0
        for feature in world.features:
            calls = list[Callable[[], Any]]()
            if isinstance(feature, Durable):
                calls += [partial(ReplayBuffer.open, world.folder / "replay")]
            if isinstance(feature, Laned):
                calls += [partial(feature.lanes.writer, 0, timeout=0)]
                if elsewhere:
                    calls += [partial(feature.lanes.drain, ReplayBuffer(SCHEMA, 60, ENVS))]
            if isinstance(feature, Serve) and feature.stream is not None and not elsewhere:
                calls += [partial(self.replay.serve, 4)]
            if isinstance(feature, Server):
                calls += [partial(self.replay.server.learner, 0, timeout=1.0)]
            for call in calls:
                try:
                    call()
                except LifecycleError:
                    tried += 1
                    continue
                raise AssertionError(f"a second owner is let in: {call}")
