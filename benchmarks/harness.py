"""Measures contenders side by side: interleaved rounds, medians, and the floor of the same run.

A *workload* is one size of one job. A *contender* is one way to do that job: this library, a peer, or a
floor, which only moves the job's bytes. All contenders of a workload take turns in one process, so that a
noisy moment hits all of them.
"""

import argparse
import gc
import importlib.metadata
import json
import logging
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

import after
import calls
import neighbours

RESULTS = Path(__file__).parent / "results"
REPORTED = ("torch", "numpy", "tensordict", "gymnasium")
WARM_SECONDS = 0.2
MIN_ROUNDS = 7


class Contender(Protocol):
    """One line of a table.

    `setup` imports the package and builds everything that is not measured; `run` does the workload's work, by
    the calls that users of the package make; `check` says what is wrong with its result, "" if nothing.
    """

    label: str
    package: str  # the distribution whose version is recorded; "" for a floor
    role: str  # "ours", "hand" for what people write by hand, "peer" or "floor"
    note: str  # exactly what `run` calls

    def setup(self, data: Any) -> None: ...

    def run(self) -> None: ...

    def check(self) -> str: ...


@dataclass(frozen=True)
class Workload:
    """One size of a job: `data` goes to every contender's `setup`; one `run` does `units` units of work.

    With `after`, single units are timed right after a learner's step as well; then a `run` of several goes through
    them by `after.steps` or `after.batches`.
    """

    name: str
    data: Any
    units: int = 1
    after: bool = False


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds of `sample_seconds` per contender, fewer once the budget is spent.

    Then as many rounds of `after` operations, each right after a learner's step, with a budget of their own. `only`
    names the workloads that are wanted; None are all.
    """

    rounds: int = 41
    sample_seconds: float = 0.005
    budget_seconds: float = 40.0
    after: int = 9
    only: frozenset[str] | None = None

    @staticmethod
    def quick() -> "Effort":
        return Effort(rounds=5, sample_seconds=0.001, budget_seconds=3.0, after=5)


@dataclass
class Entry:
    """A contender that was set up, with the size of its inner loop and its samples in seconds per unit."""

    contender: Contender
    inner: int
    samples: list[float]
    after: list[float]  # samples of single operations, each right after a learner's step
    differs: str
    counts: dict[str, int]  # the function calls of one run
    failed: str = ""  # why it was given up while it was measured


def one_thread() -> None:
    """Holds torch to one thread; call it again after imports, for some packages set their own."""
    torch.set_num_threads(1)


def version_of(package: str) -> str:
    """The installed version of a distribution, or "working tree" for one that is only on the path."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "working tree"


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cpu_caches() -> dict[str, str]:
    """The sizes of the first core's caches by level, where the system tells."""
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            kind = (index / "type").read_text().strip()
            if kind != "Instruction":
                caches["L" + (index / "level").read_text().strip()] = (index / "size").read_text().strip()
        except OSError:
            continue
    return caches


def commit() -> str:
    """The commit that is measured, with a + if files differ from it; "" outside a repository."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "../src"], capture_output=True, check=False)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + "+" * bool(changed.returncode)


def environment() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "caches": cpu_caches(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in REPORTED},
        "torch_threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "neighbours": len(neighbours.running),
        "date": date.today().isoformat(),
        "commit": commit(),
    }


def reason(error: BaseException) -> str:
    """The first line of an error, without the paths of this machine."""
    text = (str(error).strip().splitlines() or [""])[0]
    for path in sorted({sys.prefix, str(Path.cwd()), str(Path.home())}, key=len, reverse=True):
        text = text.replace(path, "...")
    return text


def own_fault(contender: Contender, error: ImportError) -> bool:
    """Whether our own package is there and its import is broken, which is a failure rather than an absence."""
    return contender.role == "ours" and error.name != contender.package


def time_calls(run: Callable[[], None], calls: int) -> float:
    """Seconds for `calls` calls of `run`."""
    start = time.perf_counter_ns()
    for _ in range(calls):
        run()
    return (time.perf_counter_ns() - start) * 1e-9


def warm(run: Callable[[], None], effort: Effort) -> int:
    """Runs until nothing is compiled, imported or made for the first time; returns the calls that fill one sample."""
    run()
    once = time_calls(run, 1)
    calls = max(1, min(1000, math.ceil(WARM_SECONDS / max(once, 1e-7))))
    once = min(once, time_calls(run, calls) / calls)
    return max(1, math.ceil(effort.sample_seconds / max(once, 1e-9)))


def failure(contender: Contender, error: Exception) -> str:
    """The status of a line that failed, which is also told at once."""
    print(f"{contender.label}: {type(error).__name__}: {error}", file=sys.stderr)
    return f"failed: {type(error).__name__}: {reason(error)}"


def enter(contender: Contender, workload: Workload, effort: Effort) -> Entry | str:
    """Sets a contender up and warms it; a string says why it cannot take part."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            contender.setup(workload.data)
            one_thread()
            differs = contender.check()
            inner = warm(contender.run, effort)
            counts = calls.count(contender.run)
    except Exception as error:
        if isinstance(error, ImportError) and not own_fault(contender, error):
            return f"not installed: {reason(error)}"
        return failure(contender, error)
    return Entry(contender, inner, [], [], differs, counts)


def in_a_loop(units: int) -> Callable[[Entry], None]:
    """Takes one sample of a contender, of operations that follow each other."""

    def sample(entry: Entry) -> None:
        entry.samples.append(time_calls(entry.contender.run, entry.inner) / (entry.inner * units))

    return sample


def after_a_step(units: int, effort: Effort) -> Callable[[Entry], None]:
    """Takes some samples of a contender, of single operations that follow a learner's step."""
    learner = after.Learner()

    def sample(entry: Entry) -> None:
        entry.after += after.sample(entry.contender.run, learner, effort.after, units)

    return sample


def interleave(entries: Sequence[Entry], sample: Callable[[Entry], None], effort: Effort) -> int:
    """Samples all contenders in turn, each round beginning with another one; returns the number of rounds.

    One that raises is out, and says so in `failed`: there are packages that fail now and then.
    """
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            start = time.perf_counter()
            rounds = 0
            while rounds < effort.rounds:
                shift = rounds % max(len(entries), 1)
                for entry in [*entries[shift:], *entries[:shift]]:
                    if entry.failed:
                        continue
                    try:
                        sample(entry)
                    except Exception as error:
                        entry.failed = failure(entry.contender, error)
                rounds += 1
                least = min(MIN_ROUNDS, effort.rounds)
                if rounds >= least and time.perf_counter() - start > effort.budget_seconds:
                    break
    finally:
        gc.enable()
    return rounds


def quarters(samples: list[float]) -> dict[str, float]:
    """The median, the quartiles and the least."""
    first, _, third = statistics.quantiles(samples, n=4) if len(samples) > 1 else samples * 3
    return {"median": statistics.median(samples), "q1": first, "q3": third, "least": min(samples)}


def describe(contender: Contender, outcome: Entry | str, workload: Workload) -> dict[str, Any]:
    """The JSON of one line."""
    line: dict[str, Any] = {"label": contender.label, "role": contender.role, "note": contender.note}
    if contender.package:
        line["package"] = contender.package
    status = outcome if isinstance(outcome, str) else outcome.failed
    if isinstance(outcome, str) or status:
        return line | {"status": status}
    if contender.package:
        line["version"] = version_of(contender.package)
    line |= {"status": "ok"} | quarters(outcome.samples) | {"calls_per_round": outcome.inner}
    if outcome.after:
        line["after"] = quarters(outcome.after)
    if contender.role != "floor":
        if contender.role != "hand":  # whose functions are the benchmark's own, which are not counted
            line |= {name: number / workload.units for name, number in outcome.counts.items()}
        line["check"] = outcome.differs or "agrees"
    return line


def summarize(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Adds each line's multiple of the floor, and names the floor, the best peer and the best hand-written way."""
    loop = compare([line for line in lines if line["status"] == "ok"])
    paced = [line["after"] | {"label": line["label"], "role": line["role"]} for line in lines if "after" in line]
    if not paced:
        return loop
    later = compare(paced)
    for line, figures in zip((line for line in lines if "after" in line), paced, strict=True):
        line["after"]["times_floor"] = figures.get("times_floor")
    return loop | {"after": later}


def compare(done: list[dict[str, Any]]) -> dict[str, Any]:
    """The same for lines that were all measured in one way."""

    def fastest(role: str) -> dict[str, Any] | None:
        return min((line for line in done if line["role"] == role), key=lambda line: line["median"], default=None)

    floor = fastest("floor")
    ours = next((line for line in done if line["role"] == "ours"), None)  # the first of our lines stands for us
    if floor:
        for line in done:
            line["times_floor"] = line["median"] / floor["median"]
    found: dict[str, Any] = {"floor": floor and floor["label"]}
    for role in ("peer", "hand"):
        best = fastest(role)
        found[f"best_{role}"] = best and best["label"]
        found[f"best_{role}_over_ours"] = best["median"] / ours["median"] if best and ours else None
    return found


def measure(workload: Workload, contenders: Sequence[Contender], effort: Effort) -> dict[str, Any]:
    """Measures one workload; returns its JSON, which is empty for one that is not wanted."""
    if effort.only is not None and workload.name not in effort.only:
        return {}
    one_thread()
    logging.disable(logging.INFO)
    outcomes = [enter(contender, workload, effort) for contender in contenders]
    entries = [outcome for outcome in outcomes if isinstance(outcome, Entry)]
    rounds = interleave(entries, in_a_loop(workload.units), effort)
    if workload.after:
        interleave(entries, after_a_step(workload.units, effort), effort)
    lines = [describe(c, outcome, workload) for c, outcome in zip(contenders, outcomes, strict=True)]
    result = {"name": workload.name, "rounds": rounds} | summarize(lines) | {"lines": lines}
    print_workload(result)
    return result


def print_workload(result: dict[str, Any]) -> None:
    """Shows one workload's lines as they come in."""
    print(f"\n{result['name']}: medians of {result['rounds']} rounds")
    for line in result["lines"]:
        if line["status"] == "ok":
            spread = f"{line['q1'] * 1e6:.4g} to {line['q3'] * 1e6:.4g}"
            multiple = f"{line.get('times_floor', math.nan):.3g} x floor"
            remark = f"{line['calls']:.0f} calls; " if "calls" in line else ""
            remark += line.get("check", "")
            if "after" in line:
                remark = f"after a learner's step {line['after']['median'] * 1e6:.4g} us; {remark}"
            print(f"  {line['label']:<44}{line['median'] * 1e6:>12.4g} us  ({spread}; {multiple}) {remark}")
        else:
            print(f"  {line['label']:<44}{line['status']}")
    for role, what in {"peer": "best peer", "hand": "hand-written"}.items():
        for figures, when in (result, "in a loop"), (result.get("after", {}), "after a learner's step"):
            if figures.get(f"best_{role}_over_ours"):
                print(f"  {what} ({figures[f'best_{role}']}) / ours, {when}: {figures[f'best_{role}_over_ours']:.2f}")


def write(
    name: str,
    title: str,
    workloads: list[dict[str, Any]],
    folder: Path,
    unit: str = "s",
    where: dict[str, str] | None = None,
    command: str = "",
) -> None:
    """Writes `folder/name.json`, without what was not wanted.

    `where` adds to the environment, and `command` made it if `run.py` did not.
    """
    report = {
        "name": name,
        "title": title,
        "unit": unit,
        "environment": environment() | (where or {}),
        "workloads": [work for work in workloads if work],
    }
    report |= {"command": command} if command else {}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")


def alone(run: Callable[[Effort, Path], None], description: str) -> None:
    """Runs one benchmark as a program of its own; it prints its figures and changes no recorded result."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--short", action="store_true", help="small, in seconds")
    effort = Effort.quick() if parser.parse_args().short else Effort()
    with tempfile.TemporaryDirectory() as place:
        run(effort, Path(place))


# Floors


def aligned(size: int) -> np.ndarray:
    """`size` uninitialised bytes that begin on a page, where copies run fastest."""
    block = np.empty(size + 4096, np.uint8)
    start = -block.ctypes.data % 4096
    return block[start : start + size]


class CopyFloor:
    """Copies as many bytes as the workload must move, between two buffers of that size."""

    package, role = "", "floor"
    note = "numpy.copyto, which is memcpy, between two buffers of that size"

    def __init__(self, bytes_of: Callable[[Any], int], what: str) -> None:
        self.bytes_of = bytes_of
        self.label = f"memcpy of {what}"

    def setup(self, data: Any) -> None:
        self.source, self.target = aligned(self.bytes_of(data)), aligned(self.bytes_of(data))
        self.source[:], self.target[:] = 1, 0

    def run(self) -> None:
        np.copyto(self.target, self.source)

    def check(self) -> str:
        return ""


class PiecewiseCopyFloor(CopyFloor):
    """Copies as many bytes, 4 MB at a time, so that what is copied stays in the cache."""

    note = "numpy.copyto of those bytes, 4 MB at a time"
    PIECE = 2**22

    def setup(self, data: Any) -> None:
        self.times = -(-self.bytes_of(data) // self.PIECE)
        self.source, self.target = aligned(self.PIECE), aligned(self.PIECE)
        self.source[:], self.target[:] = 1, 0

    def run(self) -> None:
        for _ in range(self.times):
            np.copyto(self.target, self.source)
