"""Shards as Ray actors: the same replay over processes that die, and over nodes that go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support import internals

ray: Any = pytest.importorskip("ray")

from relive import Prioritized  # noqa: E402
from relive.cluster.ray import actors, queue_actor  # noqa: E402
from relive.cluster.replay import Replay  # noqa: E402
from relive.cluster.rollouts import Rollouts  # noqa: E402
from relive.errors import FileFormatError, LifecycleError, ShapeError  # noqa: E402
from support.clusters import SCHEMA, check, steps  # noqa: E402

pytestmark = pytest.mark.slow  # each actor imports torch, which takes seconds; test_shard.py is quick

PATHS = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}
LIMITS = {"include_dashboard": False, "logging_level": "error", "log_to_driver": False}


@pytest.fixture(scope="module")
def machine() -> Iterator[None]:
    """Ray on this machine, as a user starts it."""
    runtime = {"env_vars": PATHS}
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:  # a short path
        ray.init(num_cpus=2, object_store_memory=80 * 2**20, _temp_dir=folder, runtime_env=runtime, **LIMITS)
        yield
        ray.shutdown()


SMALL = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "resources": {"shard": 1}}
"""A node for one shard."""


@contextmanager
def nodes_of_shards() -> Iterator[tuple[Any, list[Any]]]:
    """A cluster of a head and of two nodes for a shard each."""
    from ray.cluster_utils import Cluster

    ray.shutdown()
    head = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "resources": {"head": 2}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = [cluster.add_node(**SMALL) for _ in range(2)]
        ray.init(address=cluster.address, runtime_env={"env_vars": PATHS}, logging_level="error", log_to_driver=False)
        yield cluster, nodes
    finally:
        ray.shutdown()
        cluster.shutdown()


def replay_of(**options: Any) -> Replay:
    return Replay(SCHEMA, **{"capacity": 4000, "num_envs": 4, "shards": 2, "seed": 0, "timeout": 60.0} | options)


def until(condition: Callable[[], bool], seconds: float = 180.0) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.1)


def play(writer: Any, begin: int, count: int, pause: float = 0.0) -> int:
    """A worker: sends numbered steps of its envs, and plays so long for each chunk of 8. Returns how many."""
    for start in range(begin, begin + count, 8):
        writer.extend(steps(8, writer.envs, start))
        time.sleep(pause)
    writer.flush()
    return count


def test_workers_send_steps_and_the_learner_draws_them_while_an_actor_is_killed(machine: None, tmp_path: Path):
    replay = replay_of(sampler=Prioritized(), path=tmp_path / "replay")
    worker: Any = ray.remote(num_cpus=0)(play)
    writers = [replay.writer([0, 1]), replay.writer([2, 3])]
    assert ray.get([worker.remote(writer, 0, 64) for writer in writers], timeout=300) == [64, 64]
    batch = replay.sample(200)
    check(batch)
    batch["obs"] += 1.0  # memory of its own, not Ray's
    replay.update_priorities(batch["index"], torch.rand(200))
    replay.save(extra={"step": 1})
    with pytest.raises(ShapeError):
        replay.extend({"obs": np.zeros((1, 3, 3))})
    ray.kill(internals.group(replay).link.handles[1], no_restart=False)
    for _ in range(10):
        check(replay.sample(100))
    until(lambda: replay.stats()["shards_up"] == 2)
    stats = replay.stats()
    assert (stats["restarts"], stats["size"], stats["lost_steps"]) == (1, len(replay), 0)
    again = Replay.load(tmp_path / "replay", shards=1, timeout=20.0)
    assert len(again) == len(replay)
    check(again.sample(100))
    for each in (replay, again):
        each.close()


def test_a_damaged_save_is_refused_with_its_reason(machine: None, tmp_path: Path):
    replay = replay_of(path=tmp_path / "replay")
    replay.extend(steps(20))
    replay.save()
    replay.close()
    for data in (tmp_path / "replay" / "shard-0").rglob("*.safetensors"):
        data.write_bytes(b"nothing")
    with pytest.raises(FileFormatError, match="shard-0"):
        Replay.load(tmp_path / "replay")


class Player:
    """A worker that keeps its writer."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def play(self, begin: int, count: int, pause: float = 0.0) -> int:
        return play(self.writer, begin, count, pause)


@pytest.mark.parametrize("durable", [False, True], ids=["in memory", "in files"])
def test_actors_killed_under_load_lose_only_what_the_statistics_count(durable: bool, machine: None, tmp_path: Path):
    """Two workers write and the learner draws while shards are killed at random; every step is accounted for."""
    replay = replay_of(capacity=400_000, path=tmp_path / "replay", commit_every=0.5, durable=durable)
    player: Any = ray.remote(num_cpus=0)(Player)
    count, rng, killed = 2000, np.random.default_rng(0), 0
    players = [player.remote(replay.writer(envs)) for envs in ([0, 1], [2, 3])]
    ray.get([each.play.remote(0, 8) for each in players])
    busy = [each.play.remote(8, count - 16) for each in players]
    while ray.wait(busy, num_returns=2, timeout=0.0)[1]:
        check(replay.sample(64))
        if killed == 0 or (rng.random() < 0.03 and killed < 6):  # an idle machine is done after few batches
            ray.kill(internals.group(replay).link.handles[int(rng.integers(2))], no_restart=False)
            killed += 1
    assert ray.get([each.play.remote(count - 8, 8) for each in players], timeout=300) == [8, 8]
    until(lambda: replay.stats()["shards_up"] == 2)
    stats = replay.stats()
    assert killed
    assert stats["restarts"] >= 1
    # A step is complete or lost, but for the last one of an episode that was cut, by a kill or at the end.
    assert 4 * (count - killed - 1) <= stats["completed"] + stats["lost_steps"] <= 4 * count
    assert not (durable and stats["lost_steps"])
    check(replay.sample(2000))
    replay.close()


def test_a_node_that_goes_takes_its_shard_along_and_another_node_brings_it_back(tmp_path: Path):
    with nodes_of_shards() as (cluster, nodes):
        replay = replay_of(path=tmp_path / "replay", timeout=30.0, connect=actors(resources={"shard": 1}))
        writer = replay.writer([0, 1, 2, 3], timeout=600.0)
        play(writer, 0, 64)
        replay.save()
        play(writer, 64, 32)
        cluster.remove_node(nodes[0], allow_graceful=False)
        for _ in range(5):
            check(replay.sample(64))
        assert replay.stats()["shards_up"] == 1
        cluster.add_node(**SMALL)
        play(writer, 96, 32)  # waits until the shard is back
        until(lambda: replay.stats()["shards_up"] == 2)
        stats = replay.stats()
        assert stats["lost_steps"] == 64  # 32 steps of two envs came after the save
        assert stats["restarts"] == 1
        batch = replay.sample(4000)
        check(batch)
        assert set(batch["obs"][:, 0].tolist()) == {0.0, 1.0, 2.0, 3.0}
        replay.close()


def test_a_shard_that_is_gone_for_good_leaves_the_others_to_the_learner(machine: None):
    replay = replay_of(timeout=30.0)
    replay.extend(steps(40))
    ray.kill(internals.group(replay).link.handles[0])
    check(replay.sample(64))
    assert replay.stats()["shards_up"] == 1
    with pytest.raises(LifecycleError, match="has not answered"):
        replay.writer([0], timeout=0.5).extend(steps(4, [0], 40))
    replay.close()


def test_a_node_that_goes_under_load_loses_only_what_the_statistics_count(tmp_path: Path):
    """Two workers write and the learner draws while a node is removed and another one comes."""
    with nodes_of_shards() as (cluster, nodes):
        replay = replay_of(path=tmp_path / "replay", timeout=30.0, connect=actors(resources={"shard": 1}))
        player: Any = ray.remote(num_cpus=0, resources={"head": 1})(Player)
        players = [player.remote(replay.writer(envs, timeout=600.0)) for envs in ([0, 1], [2, 3])]
        ray.get([each.play.remote(0, 64) for each in players])
        replay.save()
        busy = [each.play.remote(64, 640, pause=0.05) for each in players]  # the node goes before they are done
        check(replay.sample(64))
        cluster.remove_node(nodes[1], allow_graceful=False)
        for _ in range(20):
            check(replay.sample(64))
        cluster.add_node(**SMALL)
        assert ray.get(busy, timeout=400) == [640, 640]
        ray.get([each.play.remote(704, 8) for each in players], timeout=300)  # they come back and say what is lost
        until(lambda: replay.stats()["shards_up"] == 2)
        stats = replay.stats()
        assert stats["restarts"] == 1
        # A step is complete or lost, but for the last one of an episode that was cut, by the loss or at the end.
        assert 4 * 712 - 6 <= stats["completed"] + stats["lost_steps"] <= 4 * 712
        batch = replay.sample(4000)
        check(batch)
        assert set(batch["obs"][:, 0].tolist()) == {0.0, 1.0, 2.0, 3.0}
        replay.close()


LEARNER = """
import json, os, sys, time
import ray
from relive.cluster import Rollouts
from relive.cluster.ray import queue_actor

address, path = sys.argv[1:]
ray.init(address=address, namespace="learning", logging_level="error", log_to_driver=False)
rollouts = Rollouts(100, 16, settle_each=False, connect=queue_actor(name="rollouts", lifetime="detached"))
state = {"seen": [], "position": None}
if os.path.exists(path):
    with open(path) as file:
        state = json.load(file)
    rollouts.resume(state["position"])
seen = state["seen"]
print("ready", flush=True)
while len(seen) < 48:
    seen.append(int(rollouts.get(0, timeout=100).data["number"][0]))
    if len(seen) % 4 == 0:
        with open(path + ".new", "w") as file:
            json.dump({"seen": seen, "position": rollouts.position()}, file)
        os.replace(path + ".new", path)
        rollouts.settle()
    time.sleep(0.02)
"""


def test_a_learner_that_is_killed_and_started_again_consumes_each_rollout_once(tmp_path: Path):
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:  # a short path
        ray.shutdown()
        ray.init(num_cpus=2, object_store_memory=80 * 2**20, _temp_dir=folder, namespace="learning", **LIMITS)
        try:
            _kill_the_learner(tmp_path / "state.json")
        finally:
            ray.shutdown()


def _kill_the_learner(path: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    connect = queue_actor(name="rollouts", lifetime="detached")
    rollouts = Rollouts(100, 16, settle_each=False, connect=connect)
    sender, sent = rollouts.sender("one"), threading.Event()

    def send() -> None:
        for k in range(48):
            sender.put({"number": torch.tensor([float(k)])}, 0, timeout=300)
        sent.set()

    worker = threading.Thread(target=send, daemon=True)
    worker.start()
    for wanted in (6, 21, None):
        learner = subprocess.Popen([sys.executable, "-c", LEARNER, address, str(path)], env=os.environ | PATHS)
        try:
            if wanted is None:
                assert learner.wait(200) == 0
            else:
                until(lambda wanted=wanted: path.exists() and len(json.loads(path.read_text())["seen"]) >= wanted)
        finally:
            learner.kill()
            learner.wait()
    assert sent.wait(60)
    assert json.loads(path.read_text())["seen"] == list(range(48))
    rollouts.close()
