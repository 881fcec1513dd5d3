"""doctor: the machine and the packages that relive runs on, what slows it down there, and what to do about it.

In order: the result; facts; advice, which follows from the facts alone; the facts in words.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..core import build_info
from ..memory.estimate import control_groups, free_memory, readable
from ..memory.graphs import capture
from ..names import version
from ..printable import printable


@dataclass(frozen=True)
class Advice:
    """Something that slows relive down here.

    Args:
        rule: its name, such as "small-shm".
        what: what was found, and what it slows down, in sentences.
        do: what to do about it.
    """

    rule: str
    what: str
    do: str


Facts = dict[str, Any]
"""The facts of one part, by name; None for one that is not known."""


@dataclass(frozen=True)
class Examination:
    """The findings of :func:`examine`: facts by part and name, None where one is not known, and advice."""

    facts: dict[str, Facts]
    advice: tuple[Advice, ...]

    def to_dict(self) -> dict[str, object]:
        """Plain dicts, lists, numbers and strings."""
        return {**self.facts, "advice": [asdict(one) for one in self.advice]}


def examine() -> Examination:
    """Look at this process, its packages and its machine. Nothing is changed; a GPU is used for a moment."""
    facts = {"versions": versions(), "core": core(), "threads": threads(), "memory": memory(), "gpu": gpu()}
    return Examination(facts, tuple(advice_on(facts)))


# -- facts -------------------------------------------------------------------------------------------------------------

REQUIRED = "torch", "numpy", "gymnasium", "safetensors"

OPTIONAL = (
    *("tensordict", "typer", "rich", "pillow", "matplotlib", "pandas", "ray", "minari", "pyarrow", "av"),
    *("huggingface_hub", "rerun-sdk"),
)

GROUPS = "/sys/fs/cgroup"

HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"

SHM = "/dev/shm"


def versions() -> Facts:
    """Versions, None for a package that is not installed."""
    own = {"relive": version(), "python": platform.python_version(), "system": platform.platform()}
    return own | {name: _version_of(name) for name in (*REQUIRED, *OPTIONAL)}


def _version_of(package: str) -> str | None:
    if package == "torch":
        return str(torch.__version__)  # also says for which device it was built
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def core() -> Facts:
    """How the compiled core was built, and how new the processor is: 1 to 4, as in x86-64-v3; None for others."""
    module = sys.modules[build_info.__module__]
    return {**build_info(), "file": module.__file__, "processor": _processor(), "processor_level": processor_level()}


def _processor() -> str | None:
    found = re.search(r"^model name\s*: (.*)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or None


LEVELS = {
    2: {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"},
    3: {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
    4: {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}
"""Level of x86-64 -> what a processor adds to that below, by the names that Linux has for it."""


def processor_level() -> int | None:
    """The highest level of x86-64 that the processor has whole; None where that is not known."""
    found = re.search(r"^flags\s*: (.*)$", _text("/proc/cpuinfo"), re.MULTILINE)
    if found is None or platform.machine() not in ("x86_64", "AMD64"):
        return None
    has, level = set(found[1].split()), 1
    while level + 1 in LEVELS and LEVELS[level + 1] <= has:
        level += 1
    return level


def threads() -> Facts:
    """Cores that this process may use, and the threads of torch."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    compilers = (os.environ.get("CXX"), "g++", "clang++", "c++")
    return {
        "cores": os.cpu_count(),
        "affinity": affinity,
        "limit": _quota(),
        "torch": torch.get_num_threads(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "compiler": next((found for name in compilers if name and (found := shutil.which(name))), None),
    }


def _quota() -> float | None:
    """How many cores the control groups of this process leave it; None without a limit."""
    limits: list[float] = []
    for folder, is_v1 in control_groups(_text("/proc/self/cgroup"), "cpu", GROUPS):
        if is_v1:
            numbers = [_text(f"{folder}/cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        else:
            numbers = _text(f"{folder}/cpu.max").split()
        if len(numbers) == 2 and all(number.isdecimal() for number in numbers):  # "max" and -1: no limit
            limits.append(int(numbers[0]) / int(numbers[1]))
    return min(limits, default=None)


def memory() -> Facts:
    """Bytes of memory, of swap and of ``/dev/shm``, and who gets huge pages: "always", "madvise" or "never"."""
    known = {
        name: int(size) * 1024 for name, size in re.findall(r"^(\w+): +(\d+) kB$", _text("/proc/meminfo"), re.MULTILINE)
    }
    mode = re.search(r"\[(\w+)\]", _text(HUGE_PAGES))
    try:
        shm = shutil.disk_usage(SHM)
    except OSError:
        shm = None
    swap = known.get("SwapTotal")
    return {
        "total": known.get("MemTotal"),
        "free": free_memory(),
        "swap": swap,
        "swap_used": None if swap is None else swap - known.get("SwapFree", swap),
        "huge_pages": mode[1] if mode else None,
        "shm": shm.total if shm else None,
        "shm_free": shm.free if shm else None,
    }


def gpu() -> Facts:
    """The GPU that torch would use. ``device_file`` says that the machine has one, even if torch cannot use it."""
    there = bool(torch.cuda.is_available())
    cuda: Any = torch.cuda
    properties = cuda.get_device_properties(0) if there else None
    driver = re.search(r"Kernel Module\D*([\d.]+)", _text("/proc/driver/nvidia/version"))
    return {
        "device_file": os.path.exists("/dev/nvidia0"),
        "torch_cuda": torch.version.cuda,
        "count": torch.cuda.device_count() if there else 0,
        "name": properties.name if properties else None,
        "memory": properties.total_memory if properties else None,
        "driver": driver[1] if driver else None,
        "bf16": bool(torch.cuda.is_bf16_supported(including_emulation=False)) if there else None,
        "graphs": _captures() if there else None,
    }


def _captures() -> bool:
    """True if a CUDA graph can be captured."""
    try:
        number = torch.zeros(1, device="cuda")
        capture(lambda: number.add_(1), number.device, None)
    except RuntimeError:
        return False
    return True


def _text(path: str) -> str:
    """A file of the system; empty if it has none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# -- advice ------------------------------------------------------------------------------------------------------------

LITTLE_SHM = 1 << 30
"""Less shared memory than this is little for batches of images."""

LITTLE_MEMORY = 1 << 30

MUCH_SWAP = 256 << 20


def usable(facts: dict[str, Facts]) -> int:
    """The cores that this process can keep busy."""
    known = facts["threads"]
    limits = [known["affinity"] or known["cores"] or 1]
    if known["limit"] is not None:
        limits.append(max(1, round(known["limit"])))
    return min(limits)


def advice_on(facts: dict[str, Facts]) -> Iterator[Advice]:
    """Advice, each piece of which follows from the facts alone."""
    core, threads, memory, gpu = (facts[part] for part in ("core", "threads", "memory", "gpu"))
    cores = usable(facts)
    if cores == 1:
        yield Advice(
            "one-core",
            "This process may use one core, so environments, batches and learning wait for each other.",
            "Ask for more cores, where the limit is set: taskset, a container's --cpus, or a job's request.",
        )
    if threads["torch"] > cores:
        yield Advice(
            "too-many-threads",
            f"torch starts {threads['torch']} threads, but this process may use "
            f"{cores} cores. Threads that wait for a core make every operation slow.",
            f"Set OMP_NUM_THREADS={cores} before Python starts.",
        )
    if threads["torch"] == 1 < cores:
        why = " because OMP_NUM_THREADS is 1" if threads["OMP_NUM_THREADS"] == "1" else ""
        yield Advice(
            "one-thread",
            f"torch computes on 1 thread{why}, and {cores} cores are there. "
            "That is best for small networks, and slow for large ones.",
            f"For large networks, set OMP_NUM_THREADS={cores}, or call torch.set_num_threads.",
        )
    if threads["load"] is not None and threads["load"] > (threads["cores"] or 1):
        yield Advice(
            "busy",
            f"{threads['load']:.1f} processes want to run on the machine's {threads['cores']} cores, so each one "
            "waits.",
            "See what runs with top, and measure nothing meanwhile.",
        )
    if memory["huge_pages"] == "never":
        yield Advice(
            "no-huge-pages",
            "Transparent huge pages are off. A random read from a large replay then spends most "
            "of its time finding the page.",
            f"As root: echo madvise > {HUGE_PAGES}",
        )
    if memory["free"] is not None and memory["free"] < LITTLE_MEMORY:
        yield Advice(
            "little-memory",
            f"{readable(memory['free'])} of memory are free.",
            "Lower the replay's capacity, end other programs, or keep the replay in files.",
        )
    if memory["swap_used"] is not None and memory["swap_used"] >= MUCH_SWAP:
        yield Advice(
            "swap",
            f"{readable(memory['swap_used'])} lie in swap. A batch with a row from there waits for the disk.",
            "Lower the replay's capacity, or end the programs that take the memory.",
        )
    if memory["shm"] is not None and memory["shm"] < LITTLE_SHM:
        yield Advice(
            "small-shm",
            f"{SHM} has {readable(memory['shm'])}. Ray, AsyncVectorEnv and torch's DataLoader share memory there, and "
            "fail or get slow once it is full. relive's own shared memory is elsewhere.",
            "In a container, start it with a larger one, such as docker run --shm-size=8g.",
        )
    if threads["compiler"] is None:
        yield Advice(
            "no-compiler",
            "There is no C++ compiler, which torch.compile needs.",
            "Install g++ or clang++, or name one in CXX.",
        )
    if not core["clones"] and (core["processor_level"] or 1) >= 3:
        yield Advice(
            "core-for-old-processors",
            "The core was built without versions for newer processors, and this "
            f"one is x86-64-v{core['processor_level']}. Returns and priorities are computed more slowly.",
            "Install relive again with g++ 12 or newer: CXX=g++ pip install --force-reinstall --no-deps .",
        )
    flags: list[str] = core["flags"].split()
    if not {"-O2", "-O3", "-Ofast"} & set(flags) or "-fsanitize" in core["flags"]:
        yield Advice(
            "core-not-optimized",
            f"The core was built for debugging, with '{' '.join(flags)}'.",
            "Install relive again, without CMAKE_BUILD_TYPE and CXXFLAGS in the environment.",
        )
    if gpu["device_file"] and not gpu["count"]:
        why, do = "torch was built for the CPU alone", "Install a torch that is built for CUDA."
        if gpu["torch_cuda"] is not None:
            why = f"torch, built for CUDA {gpu['torch_cuda']}, cannot use it; driver {gpu['driver'] or 'unknown'}"
            do = "Install a newer driver, or a torch for an older CUDA, and see nvidia-smi."
        yield Advice("unused-gpu", f"The machine has an NVIDIA GPU, but {why}.", do)


# -- in words ----------------------------------------------------------------------------------------------------------


def in_words(examination: Examination) -> dict[str, dict[str, str]]:
    """The facts for people: part -> name -> text. What is not known is left out."""
    versions, core, threads, memory, gpu = (
        examination.facts[part] for part in ("versions", "core", "threads", "memory", "gpu")
    )
    missing = [name for name, found in versions.items() if found is None]
    newest = f"yes, and it runs those for x86-64-v{core['level']}" if core["level"] > 1 else "yes"
    limits = [f"{threads['affinity']} by affinity"] if threads["affinity"] is not None else []
    limits += [f"{threads['limit']:g} by the control group"] if threads["limit"] is not None else []
    allowed = ", ".join(limits)
    load = f", load {threads['load']:.1f}" if threads["load"] is not None else ""
    shm = f"{readable(memory['shm'])}, {readable(memory['shm_free'])} free" if memory["shm"] is not None else None
    swap = f"{readable(memory['swap'])}, {readable(memory['swap_used'])} used" if memory["swap"] else None
    total = f"{readable(memory['total'])}, {readable(memory['free'])} free" if memory["total"] is not None else None
    parts: dict[str, dict[str, str | None]] = {
        "versions": {name: found for name, found in versions.items() if found is not None}
        | {"not installed": ", ".join(missing) or None},
        "core": {
            "file": core["file"],
            "built by": f"{core['compiler']}, {core['flags']}",
            "newer processors": newest if core["clones"] else "no versions for them",
            "processor": core["processor"],
        },
        "threads": {
            "cores": f"{threads['cores']}{load}",
            "usable": f"{usable(examination.facts)}{f' ({allowed})' if limits else ''}",
            "torch": f"{threads['torch']}, OMP_NUM_THREADS {threads['OMP_NUM_THREADS'] or 'is not set'}",
            "torch.compile": threads["compiler"] or "no C++ compiler",
        },
        "memory": {"memory": total, "swap": swap or "none", "huge pages": memory["huge_pages"], SHM: shm},
        "gpu": {
            "name": f"{gpu['name']}, {readable(gpu['memory'])}" if gpu["count"] else "none that torch can use",
            "driver": gpu["driver"],
            "torch for CUDA": gpu["torch_cuda"],
            "bfloat16": None if gpu["bf16"] is None else "yes" if gpu["bf16"] else "no",
            "CUDA graphs": None if gpu["graphs"] is None else "yes" if gpu["graphs"] else "no",
        },
    }
    return {part: {name: printable(text) for name, text in facts.items() if text is not None}
            for part, facts in parts.items()}  # fmt: skip
