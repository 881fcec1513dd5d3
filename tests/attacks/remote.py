"""Replays that are elsewhere, with the methods of one that is here, as far as the matrix of pairs calls them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attacks.steps_of_pairs import ENVS, ROWS, SCHEMA
from relive import Batch, ReplayServer
from relive.cluster.replay import Replay, load_extra
from relive.errors import LifecycleError
from support.clusters import LocalLink

__all__ = ["Remote", "Sharded"]


class Sharded:
    """Two shards, each with one env."""

    def __init__(self, world: Any, path: Path | None = None, load: bool = False) -> None:
        self.world, self.link = world, None
        self.path = (world.folder / "save") if path is None else path
        options: dict[str, Any] = {"durable": world.has("durable"), "timeout": 5.0, "connect": self.connected}
        if load:
            self.whole = Replay.load(self.path, **options | {"durable": False})
            self.extra = load_extra(self.path)
        else:
            self.whole = Replay(SCHEMA, ENVS * ROWS, ENVS, shards=2, path=self.path, **options, **world.parts())
        self.writer = self.whole.writer(timeout=5.0)

    def connected(self, plans: Any) -> Any:
        self.link = LocalLink(plans)
        return self.link

    @property
    def own(self) -> list[Any]:
        """The replay of each shard, and so of each env."""
        return [shard.replay for shard in self.link.shards]

    def restart(self, shard: int) -> None:
        """A shard dies, and begins another life."""
        self.link.kill(shard)
        gc.collect()  # an error may have the old ring, and with it the files
        self.link.restart(shard)

    def add(self, fields: Mapping[str, Any]) -> None:
        self.extend(_one_more_axis(fields))

    def extend(self, fields: Mapping[str, Any]) -> None:
        self.writer.extend(fields)
        self.writer.flush()

    def interrupt(self) -> None:
        self.writer.interrupt()

    def sample(self, count: int) -> Any:
        return self.whole.sample(count)

    def update_priorities(self, index: Any, errors: Any) -> None:
        self.whole.update_priorities(index, errors)

    def __len__(self) -> int:
        return len(self.whole)

    def slice(self, env: int) -> Any:
        return self.own[env].slice(0)

    def data(self) -> Any:
        self.whole.stats()  # after all that is on its way
        parts = [replay.data() for replay in self.own]
        return Batch.joined(parts, set(parts[0]), {})

    def priorities(self, index: Any) -> Any:
        begin, found = 0, list[Any]()
        for replay in self.own:
            found.append(replay.priorities(index[begin : begin + len(replay)]))
            begin += len(replay)
        return torch.cat(found)

    @property
    def has_priorities(self) -> bool:
        return self.own[0].has_priorities

    @property
    def sampler(self) -> Any:
        return self.own[0].sampler

    @property
    def view(self) -> Any:
        return self.own[0].view

    def check(self) -> None:
        for replay in self.own:
            replay.check()

    def save(self, path: Path, extra: Any = None, background: bool = False) -> Any:
        assert path == self.path
        return _Done(self.whole.save(extra=extra, background=background))

    def close(self) -> None:
        self.whole.close()


class Remote:
    """A replay in a server's process, and this process as its learner."""

    def __init__(self, world: Any, make: Callable[[], Any]) -> None:
        lanes = next((feature.lanes for feature in world.features if hasattr(feature, "lanes")), None)
        self.world = world
        self.server = ReplayServer(make, 8, 2, context="fork", lanes=lanes)
        self.learner = self.server.learner(0, timeout=20.0)

    def reconnect(self) -> None:
        """Be a new learner, since a call of the old one was broken off."""
        self.learner.close()
        end = time.perf_counter() + 20
        while True:  # until the owner has seen that the old one is gone
            try:
                self.learner = self.server.learner(0, timeout=20.0)
                return
            except LifecycleError:
                assert time.perf_counter() < end, "the rank stays taken"
                time.sleep(0.01)

    def add(self, fields: Mapping[str, Any]) -> None:
        self.learner.add(fields)
        self.call("stats")  # after which it is in, and its errors have come

    def sample(self, count: int) -> Any:
        return next(self.learner).clone()

    def update_priorities(self, index: Any, errors: Any) -> None:
        self.learner.update_priorities(index, errors)
        self.call("stats")

    def call(self, name: str, /, *args: Any, **named: Any) -> Any:
        return self.learner.call(name, *args, **named)

    def extend(self, fields: Mapping[str, Any]) -> None:
        self.call("extend", fields)

    def save(self, path: Path, extra: Any = None, background: bool = False) -> Any:
        self.call("save", path, extra=extra)
        return _Done(None)

    def __len__(self) -> int:
        return int(self.call("stats")["size"])

    @property
    def sampler(self) -> Any:
        return self.world.parts()["sampler"]

    @property
    def view(self) -> Any:
        return self.world.parts()["view"]

    def __getattr__(self, name: str) -> Any:
        if name == "has_priorities":
            return self.call(name)
        if name in ("slice", "data", "priorities", "check", "interrupt", "stats"):
            return lambda *args, **named: self.call(name, *args, **named)
        raise AttributeError(name)

    def close(self) -> None:
        self.learner.close()
        self.server.close()


class _Done:
    """A save that may be done."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def wait(self) -> None:
        if self.handle is not None:
            self.handle.wait()


def _one_more_axis(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {name: _one_more_axis(value) for name, value in tree.items()}
    return tree[None] if isinstance(tree, torch.Tensor) else np.asarray(tree)[None]
