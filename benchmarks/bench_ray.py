"""A replay with shards over Ray: how long a batch takes, how fast steps come in, and whether Ape-X's load is held.

    python benchmarks/bench_ray.py              1, 2 and 4 shards; rewrites the table in docs/cluster.md
    python benchmarks/bench_ray.py --quick      one short round, printed only

It needs `pip install "relive[ray]"`. Two workers send steps of Atari-like size in chunks of 50, the learner draws
batches of 512 and returns their TD errors. Horgan et al. (2018) report 12.5 k transitions a second coming in and 19
batches of 512 a second going out; "load" paces both sides to these and shows what was reached.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

import relive
from relive.cluster import Replay

PAGE = Path(__file__).parent.parent / "docs" / "cluster.md"
SHARDS = (1, 2, 4)
WORKERS, NUM_ENVS, CHUNK, BATCH = 2, 4, 50, 512
TRANSITIONS_A_SECOND, BATCHES_A_SECOND = 12_500.0, 19.0  # Horgan et al. 2018, section 4.1
OBS = 128  # float32 numbers of an observation
SCHEMA = relive.Schema(
    {
        "obs": relive.Field((OBS,)),
        "action": relive.Field((), torch.int64),
        "reward": relive.Field(()),
        "terminated": relive.Field((), torch.bool),
        "truncated": relive.Field((), torch.bool),
    }
)


@ray.remote(num_cpus=0)
class Worker:
    """Sends the same chunk of steps again and again."""

    def __init__(self, writer: Any) -> None:
        torch.set_num_threads(1)
        rng, front = np.random.default_rng(0), (CHUNK, writer.num_envs)
        self.writer = writer
        self.steps = {
            "obs": rng.random((*front, OBS), dtype=np.float32),
            "action": rng.integers(0, 18, front),
            "reward": rng.random(front, dtype=np.float32),
            "terminated": np.arange(CHUNK)[:, None].repeat(writer.num_envs, 1) == CHUNK - 1,
            "truncated": np.zeros(front, np.bool_),
        }
        self.steps["next_obs"] = self.steps["obs"]

    def send(self, seconds: float, rate: float | None) -> float:
        """Send for so long, at most ``rate`` transitions a second; the rate that was reached."""
        begin, sent = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            self.writer.extend(self.steps)
            sent += CHUNK * self.writer.num_envs
            if rate is not None:
                time.sleep(max(begin + sent / rate - time.perf_counter(), 0.0))
        self.writer.flush()
        return sent / (time.perf_counter() - begin)


def learn(replay: Replay, seconds: float, rate: float | None) -> tuple[float, float]:
    """Draw and rate batches for so long; batches a second, and the median milliseconds of one."""
    begin, times = time.perf_counter(), list[float]()
    errors = torch.rand(BATCH)
    while time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        batch = replay.sample(BATCH)
        replay.update_priorities(batch["index"], errors)
        times.append(time.perf_counter() - start)
        if rate is not None:
            time.sleep(max(begin + len(times) / rate - time.perf_counter(), 0.0))
    return len(times) / (time.perf_counter() - begin), 1e3 * statistics.median(times)


def measure(shards: int, seconds: float) -> dict[str, float]:
    """Each side alone, and both at once at the published load."""
    sampler = relive.Prioritized(0.6, 0.4)
    replay = Replay(SCHEMA, 200_000, WORKERS * NUM_ENVS, shards=shards, sampler=sampler, seed=0)
    writers = [replay.writer(range(k * NUM_ENVS, (k + 1) * NUM_ENVS)) for k in range(WORKERS)]
    workers = [Worker.remote(writer) for writer in writers]
    send: Any = [worker.send for worker in workers]
    ray.get([each.remote(1.0, None) for each in send])  # imports, and fills
    learn(replay, 1.0, None)
    written = sum(ray.get([each.remote(seconds, None) for each in send]))
    drawn, took = learn(replay, seconds, None)
    coming = [each.remote(seconds, TRANSITIONS_A_SECOND / WORKERS) for each in send]
    loaded, slower = learn(replay, seconds, BATCHES_A_SECOND)
    result = {
        "written": written, "drawn": drawn, "ms": took,
        "load in": sum(ray.get(coming)), "load out": loaded, "load ms": slower,
    }  # fmt: skip
    kill: Any = ray.kill
    for worker in workers:
        kill(worker)
    replay.close()
    return result


def table(results: dict[int, list[dict[str, float]]]) -> str:
    """The medians of the rounds."""
    rows = [
        "| shards | transitions in, a second | batches out, a second | ms a batch | at Ape-X's load: in | out | ms |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for shards, rounds in results.items():
        m = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
        rows.append(
            f"| {shards} | {m['written']:,.0f} | {m['drawn']:,.0f} | {m['ms']:.1f} | {m['load in']:,.0f} | "
            f"{m['load out']:.1f} | {m['load ms']:.1f} |"
        )
    load = os.getloadavg()[1]
    note = (
        f"Medians of {len(next(iter(results.values())))} round(s) with {WORKERS} workers; {OBS} float32 numbers an "
        f"observation; {os.cpu_count()} cores, whose mean load was {load:.0f} over the last 5 minutes; "
        f"Ray {ray.__version__}, torch {torch.__version__}."
    )
    return "\n".join([*rows, "", note])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round; nothing of record is rewritten")
    parser.add_argument("--rounds", type=int, default=2, help="the tables have their medians (default 2)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=400 * 2**20, _temp_dir=folder)
        results: dict[int, list[dict[str, float]]] = {shards: [] for shards in SHARDS}
        for _ in range(1 if args.quick else args.rounds):  # rounds are interleaved
            for shards, rounds in results.items():
                rounds.append(measure(shards, 2.0 if args.quick else 4.0))
                print(shards, rounds[-1], flush=True)
        ray.shutdown()
    text = table(results)
    print(text)
    if not args.quick:
        page = PAGE.read_text(encoding="utf-8")
        marked = re.compile(r"(<!-- bench:ray -->).*?(<!-- /bench:ray -->)", re.DOTALL)
        PAGE.write_text(marked.sub(lambda match: f"{match[1]}\n\n{text}\n\n{match[2]}", page), encoding="utf-8")


if __name__ == "__main__":
    main()
