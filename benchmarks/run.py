"""Runs the benchmarks, writes results/*.json, and rewrites the pages that show them.

At its end it compares what was measured with the tables of the last commit, as `gate.py` says.

python benchmarks/run.py                 everything, some minutes
python benchmarks/run.py --only gae      one of them, or several
python benchmarks/run.py --quick         a smoke run: few rounds, tables printed, nothing of record rewritten
python benchmarks/run.py --busy          what has peers, on a machine that other work keeps busy
"""

import argparse
import importlib
import os
import sys
import tempfile
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import busy
import gate
import history
import pages
import tables

# name -> the module whose `run` measures it, in the order of the tables
BENCHMARKS = {
    "trainings": "bench_trainings",
    "gae": "bench_gae",
    "add": "bench_add",
    "minibatches": "bench_minibatches",
    "sequences": "bench_sequences",
    "replay_add": "bench_replay_add",
    "replay_sample": "bench_replay_sample",
    "replay_sequences": "bench_replay_sequences",
    "hindsight": "bench_hindsight",
    "pixels": "bench_pixels",
    "capacity": "bench_capacity",
    "lanes": "bench_lanes",
    "saves": "bench_saves",
    "mapped": "bench_mapped",
    "mapped_half": "bench_mapped_half",
    "slots": "bench_slots",
    "compat_sb3": "bench_compat_sb3",
    "compat_pytorchrl": "bench_compat_pytorchrl",
    "import": "bench_import",
    "compat_agilerl": "bench_compat_agilerl",
    "compat_velora": "bench_compat_velora",
    "compat_rsl_rl": "bench_compat_rsl_rl",
    "compat_embodichain": "bench_compat_embodichain",
    "compat_fasttd3": "bench_compat_fasttd3",
    "cleanrl": "bench_cleanrl",
    "skrl": "bench_skrl",
    "rl_games": "bench_rl_games",
    "device": "bench_device",
}
THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


def main() -> int:
    """Returns 1 if a line of our own failed or is slower than recorded, else 0: peers may be missing."""
    parser = argparse.ArgumentParser(description="Measure relive beside its peers and the physical floor.")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, metavar="NAME", help="some of: %(choices)s")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--quick", action="store_true", help="a smoke run; prints the tables, leaves the pages alone")
    kind.add_argument("--busy", action="store_true", help="beside a process for each core that keeps it busy")
    arguments = parser.parse_args()
    names = arguments.only or (busy.NAMES if arguments.busy else list(BENCHMARKS))
    os.environ.update(dict.fromkeys(THREAD_SETTINGS, "1"))  # before anything that reads them is imported
    harness = importlib.import_module("harness")
    effort = harness.Effort.quick() if arguments.quick else harness.Effort()
    folder = tables.RESULTS / "quick" if arguments.quick else busy.RESULTS if arguments.busy else tables.RESULTS
    beside = harness.neighbours.neighbours(os.cpu_count() or 1) if arguments.busy else nullcontext()
    before = [] if arguments.busy else gate.committed()
    with beside:
        for name in names:
            importlib.import_module(BENCHMARKS[name]).run(effort, folder)
    found = tables.reports(folder, names)
    if arguments.quick:
        pages.show(folder, names)
    elif not arguments.busy:
        history.record(found)
    if not arguments.quick:
        pages.main()
    ours = [
        line for report in found for work in report["workloads"] for line in work["lines"] if line["role"] == "ours"
    ]
    failed = any(line["status"].startswith("failed") for line in ours)
    return int(failed or (not arguments.busy and slower(before, found, effort, quick=arguments.quick)))


def slower(before: Sequence[Any], found: Sequence[Any], effort: Any, *, quick: bool) -> bool:
    """Whether a figure is worse than recorded, also when it is measured again; prints which."""

    def again(name: str, works: Collection[str]) -> list[Any]:
        with tempfile.TemporaryDirectory() as place:
            module = importlib.import_module(BENCHMARKS[name])
            module.run(replace(effort, only=frozenset(works)), Path(place))
            return tables.reports(Path(place))

    seen = gate.compare(before, found, quick=quick)
    worse = [*seen.calls, *gate.slower(seen.timings, before, again)]
    print(gate.told(worse, seen.left, sum(1 for each in seen.timings if each.now)))
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main())
