"""Other work on the same machine: what `run.py --busy` measures beside.

Each neighbour is a process that copies 64 MB, which takes the shared cache and the memory's bandwidth, and multiplies
matrices, which takes a core, in turns and without end. There is one for each core, so the benchmark never has a core
to itself.
"""

import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np

COPIED = 64 * 2**20
SIDE = 384
"""Rows and columns of the matrices: about a millisecond of work."""

running: list[subprocess.Popen[bytes]] = []
"""Those that run now."""


@contextmanager
def neighbours(count: int) -> Generator[None]:
    """Within this context, so many processes keep the machine busy."""
    command = [sys.executable, __file__, str(os.getpid())]
    try:
        running.extend(subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count))
        for process in running:
            if process.stdout is None or process.stdout.read(1) != b".":
                raise RuntimeError("a neighbour did not start; run python benchmarks/neighbours.py to see why")
        yield
    finally:
        while running:
            process = running.pop()
            process.kill()
            process.communicate()


def work(parent: int) -> None:
    """Work until the parent is gone."""
    source, target = np.ones(COPIED, np.uint8), np.empty(COPIED, np.uint8)
    matrix, product = np.eye(SIDE, dtype=np.float32), np.empty((SIDE, SIDE), np.float32)
    sys.stdout.write(".")
    sys.stdout.flush()
    while os.getppid() == parent:
        end = time.perf_counter() + 0.02
        while time.perf_counter() < end:
            np.copyto(target, source)
        while time.perf_counter() < end + 0.02:
            np.matmul(matrix, matrix, out=product)


if __name__ == "__main__":
    work(int(sys.argv[1]) if len(sys.argv) > 1 else os.getppid())
