"""Several ranks that do the same work: as processes that talk through gloo, or as threads of this process."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from relive.cluster.distributed import Ranks

Work = Callable[[int, int], Any]
"""What a rank does, given its number and how many ranks there are; its result can be pickled."""

SECONDS = 60
"""How long ranks may take before they are taken to hang."""


def in_processes(count: int, work: Work, folder: Path) -> list[Any]:
    """The results of ``work`` on each rank, in forked processes that gloo connects; or the first failure."""
    context = multiprocessing.get_context("fork")
    outs = [folder / f"rank-{rank}" for rank in range(count)]
    processes = [context.Process(target=_rank, args=(rank, count, work, folder)) for rank in range(count)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.join()
    failed = [
        f"rank {rank}: {out.read_text()}" for rank, out in enumerate(outs) if not out.with_suffix(".done").exists()
    ]
    assert not failed, "\n".join(failed)
    return [pickle.loads(out.read_bytes()) for out in outs]


def _rank(rank: int, count: int, work: Work, folder: Path) -> None:
    out = folder / f"rank-{rank}"
    try:
        out.write_text("did not end in time")
        torch.set_num_threads(1)
        limit = datetime.timedelta(seconds=SECONDS / 2)
        dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=count, timeout=limit)
        out.write_bytes(pickle.dumps(work(rank, count)))
        dist.barrier()
        dist.destroy_process_group()
        out.with_suffix(".done").touch()
        os._exit(0)  # gloo's threads, which DistributedDataParallel keeps, may abort a process that ends slowly
    except BaseException:
        out.write_text(traceback.format_exc())
        os._exit(1)  # an ordinary end would wait for the other ranks


class Meeting:
    """Where threads exchange their tables."""

    def __init__(self, count: int) -> None:
        self.count, self.own = count, threading.local()
        self.barrier = threading.Barrier(count, timeout=SECONDS / 3)
        self.tables: list[Any] = [None] * count

    def sum(self, ranks: Ranks, sent: np.ndarray) -> np.ndarray:
        self.tables[ranks.rank] = sent
        self.barrier.wait()
        found = sum(self.tables)
        self.barrier.wait()
        return found
