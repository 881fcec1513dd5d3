"""Measures shards over torch.distributed: the constants of a model of throughput, and runs that check it.

python benchmarks/bench_shards.py            measures, writes results/scaling/shards.json, rewrites docs/scaling.md
python benchmarks/bench_shards.py --quick    the same with few rounds; prints the tables and writes nothing
python benchmarks/bench_shards.py --page     rewrites docs/scaling.md from the recorded results

One round is what a rank of a prioritized DQN does: sample its rows of a batch of all ranks, backward pass, averaged
gradients, Adam, new priorities. Times are the shortest of all rounds, as other work on the machine only adds to them.
What one rank takes alone is the median of its processor time, which leaves such work out.
"""

import argparse
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import relive
from relive.cluster.distributed import ShardedReplay

ROOT = Path(__file__).parent.parent
RECORD, PAGE = ROOT / "benchmarks" / "results" / "scaling" / "shards.json", ROOT / "docs" / "scaling.md"
OBS, ACTION, HIDDEN = 17, 6, 64
ROWS, ENVS = 20_000, 8  # of each rank
RANKS, BATCHES = (1, 2, 3, 4), (256, 1024, 2048)
FLAG = relive.Field((), torch.bool)
SCHEMA = relive.Schema({"obs": (OBS,), "action": (ACTION,), "reward": (), "terminated": FLAG, "truncated": FLAG})


def timed(run: Callable[[], Any], rounds: int) -> float:
    """The time of one call, the shortest of some: other work on the machine only adds to it."""
    for _ in range(5):
        run()
    times = list[float]()
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def worked(run: Callable[[], Any], rounds: int) -> float:
    """The processor time of one call: the median of ten runs of calls, as its clock is coarse."""
    times = list[float]()
    for _ in range(10):
        began = time.process_time()
        for _ in range(rounds // 10):
            run()
        times.append((time.process_time() - began) / (rounds // 10))
    return float(np.median(times))


def replay_of(rank: int) -> relive.ReplayBuffer:
    replay = relive.ReplayBuffer(SCHEMA, ROWS, ENVS, sampler=relive.Prioritized(), seed=0, check_ends=False)
    steps, rng = ROWS // ENVS - 2, np.random.default_rng(rank)
    flags = np.zeros((steps, ENVS), np.bool_)
    obs, action = rng.random((steps, ENVS, OBS), np.float32), rng.random((steps, ENVS, ACTION), np.float32)
    replay.extend({"obs": obs, "action": action, "reward": obs[..., 0], "terminated": flags, "truncated": flags})
    return replay


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(OBS + ACTION, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)
    )


def learner(model: nn.Module) -> Callable[[Any], torch.Tensor]:
    """One update from a batch; gives the TD errors."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)

    def learn(batch: Any) -> torch.Tensor:
        error = model(torch.cat([batch["obs"], batch["action"]], 1)).squeeze(-1) - batch["reward"]
        optimizer.zero_grad()
        (batch["weight"] * error.square()).mean().backward()
        optimizer.step()
        return error.detach()

    return learn


def one_round(shards: ShardedReplay, learn: Callable[[Any], torch.Tensor], batch_size: int) -> None:
    batch = shards.sample(batch_size)
    shards.update_priorities(batch["index"], learn(batch))


def alone(effort: int) -> dict[str, float]:
    """What one rank takes for a round, in seconds: fixed, and for each row; and to store one transition."""

    def work(rank: int, count: int) -> dict[str, float]:
        shards, learn = ShardedReplay(replay_of(0)), learner(DistributedDataParallel(network()))
        sizes = (64, 128, 256, 512, 1024, 2048)
        times = [worked(partial(one_round, shards, learn, size), effort) for size in sizes]
        replay, rows = replay_of(0), np.zeros((ENVS, OBS), np.float32)
        step = {"obs": rows, "action": rows[:, :ACTION], "reward": rows[:, 0]}
        step |= {name: np.zeros(ENVS, np.bool_) for name in ("terminated", "truncated")}
        return {**line(sizes, times), "add": worked(lambda: replay.add(step), effort) / ENVS}

    return ranked(1, work)[0]


def line(sizes: Sequence[int], times: list[float]) -> dict[str, float]:
    """The fixed time and the time of each row that fit best, by relative error."""
    per_row, fixed = np.polyfit(sizes, times, 1, w=1 / np.array(times))
    return {"fixed": float(fixed), "row": float(per_row)}


# Several ranks


def ranked(count: int, work: Callable[[int, int], Any]) -> list[Any]:
    """The results of ``work`` on each of so many forked ranks."""
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_rank, args=(rank, count, work, folder)) for rank in range(count)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(count)]


def _rank(rank: int, count: int, work: Callable[[int, int], Any], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=count)
    Path(folder, str(rank)).write_text(json.dumps(work(rank, count)))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads, which DistributedDataParallel keeps, may abort a process that ends slowly


def all_reduces(ranks: int, sizes: Sequence[int], effort: int) -> list[float]:
    """Seconds of an all-reduce of float32 vectors of these sizes."""

    def work(rank: int, count: int) -> list[float]:
        return [timed(partial(dist.all_reduce, torch.zeros(size)), effort) for size in sizes]

    return np.max(ranked(ranks, work), 0).tolist()


def hops(effort: int) -> dict[str, float]:
    """Seconds of one hop of an all-reduce, and of each byte, from all-reduces of two ranks."""
    sizes = (16, 2**12, 2**16, 2**18)
    found = line([4 * size for size in sizes], all_reduces(2, sizes, effort))
    return {"hop": found["fixed"] / 2, "byte": found["row"]}


def round_time(ranks: int, batch_size: int, effort: int) -> float:
    """Seconds of a round, measured."""

    def work(rank: int, count: int) -> float:
        shards, learn = ShardedReplay(replay_of(rank)), learner(DistributedDataParallel(network()))
        return timed(partial(one_round, shards, learn, batch_size), effort)

    return float(np.max(ranked(ranks, work)))


def predicted(known: dict[str, float], ranks: int, batch_size: int, cores: float) -> float:
    """Seconds of a round by the model of docs/scaling.md; ``cores`` for all of the ranks together."""
    work = known["fixed"] + batch_size / ranks * known["row"]
    grads = 4 * sum(parameter.numel() for parameter in network().parameters())
    talk = 2 * (ranks - 1) * (3 * known["hop"] + known.get("wait", 0.0) + grads * known["byte"] / ranks)
    return (work + talk) * max(1.0, ranks / cores)


def with_wait(known: dict[str, float], runs: list[dict[str, float]], cores: int) -> dict[str, float]:
    """The constants, with ``wait`` from the first round of two ranks; the other rounds test the model."""
    first = next(run for run in runs if run["ranks"] == 2)
    without = predicted({**known, "wait": 0.0}, 2, int(first["batch_size"]), cores)
    return {**known, "wait": (first["measured"] - without) / max(1.0, 2 / cores) / 2}


def measure(effort: int) -> dict[str, Any]:
    load = os.getloadavg()[0]
    torch.set_num_threads(1)
    replay_of(0).sample(8)  # imports TensorDict, which the ranks then have from the fork
    known, cores = {**alone(effort), **hops(effort)}, os.cpu_count() or 1
    runs = list[dict[str, float]]()
    for ranks in RANKS:
        small = all_reduces(ranks, (16,), effort)[0] if ranks > 1 else 0.0
        for batch_size in BATCHES:
            runs.append({"ranks": ranks, "batch_size": batch_size, "all_reduce": small,
                         "measured": round_time(ranks, batch_size, effort)})  # fmt: skip
    where = f"{cores} cores, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    facts = {"where": where, "cores": cores, "date": date.today().isoformat(), "rounds": effort, "load": load}
    return {"constants": with_wait(known, runs, cores), "runs": runs, **facts}


# The page


def us(seconds: float) -> str:
    return f"{seconds * 1e6:,.3g}" if seconds < 1e-3 else f"{seconds * 1e6:,.0f}"


def tables(record: dict[str, Any]) -> dict[str, str]:
    """The tables of the page, by the name of their place."""
    known, names = record["constants"], {
        "fixed": "a round of one rank, without its rows",
        "row": "each row of the batch",
        "hop": "one hop of an all-reduce",
        "byte": "each byte of an all-reduce",
        "wait": "waking the ranks and waiting for the last one, per hop of a round",
        "add": "store one transition",
    }  # fmt: skip
    lines = ["| constant | what | µs |", "|---|---|---:|"]
    lines += [f"| `{name}` | {what} | {known[name] * 1e6:.3g} |" for name, what in names.items()]
    lines += ["", f"Measured with {record['rounds']} rounds each on {record['where']}; {record['date']}."]
    if record["load"] > 1:
        lines += [
            f"Other work kept the cores busy (load average {record['load']:.0f}), which makes every round longer."
        ]
    columns = "ranks", "batch of all ranks", "one all-reduce, µs", "round, µs", "model, µs", "model / measured"
    runs = [f"| {' | '.join(columns)} |", "|---:" * len(columns) + "|"]
    for run in record["runs"]:
        model = predicted(known, run["ranks"], run["batch_size"], record["cores"])
        ratio, times = model / run["measured"], " | ".join(map(us, (run["all_reduce"], run["measured"], model)))
        runs.append(f"| {run['ranks']} | {run['batch_size']} | {times} | {ratio:.2f} |")
    return {"constants": "\n".join(lines), "runs": "\n".join(runs), "hundred": hundred(known)}


def hundred(known: dict[str, float]) -> str:
    """What the model says about many nodes, each with cores of its own."""
    columns = "nodes", "batch of all", "one all-reduce, µs", "round, µs", "rows/s", "of so many times one node"
    lines = [f"| {' | '.join(columns)} |", "|---:" * len(columns) + "|"]
    for ranks in (1, 2, 10, 100):
        for batch_size in (4096, 409_600):
            seconds = predicted(known, ranks, batch_size, ranks)
            alone = predicted(known, 1, batch_size, 1)
            share = alone / seconds / ranks
            exchange = us(2 * (ranks - 1) * known["hop"])
            rows = f"{round(batch_size / seconds, -2):,.0f}"
            lines.append(f"| {ranks} | {batch_size:,} | {exchange} | {us(seconds)} | {rows} | {share:.0%} |")
    return "\n".join(lines)


def write_page(record: dict[str, Any]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables(record).items():
        place = re.compile(rf"(<!-- shards:{name} -->).*?(<!-- /shards:{name} -->)", re.DOTALL)
        text = place.sub(lambda match, table=table: f"{match[1]}\n\n{table}\n\n{match[2]}", text)
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure shards over torch.distributed.")
    parser.add_argument("--quick", action="store_true", help="few rounds; prints the tables, writes nothing")
    parser.add_argument("--page", action="store_true", help="only rewrite the page from the record")
    arguments = parser.parse_args()
    if arguments.page:
        write_page(json.loads(RECORD.read_text()))
        return
    record = measure(40 if arguments.quick else 200)
    print("\n\n".join(tables(record).values()))
    if not arguments.quick:
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        write_page(record)


if __name__ == "__main__":
    main()
