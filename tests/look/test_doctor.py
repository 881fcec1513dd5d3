"""What doctor says of machines of every kind: each piece of advice where its cause is there, and nowhere else."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from inspect import getsource
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import relive
from relive.cli import app
from relive.look import doctor

GIB = 1 << 30

FILES = {
    "/proc/cpuinfo": "processor: 0\nmodel name\t: A fast one\nflags\t\t: "
    + " ".join(sorted(set().union(*doctor.LEVELS.values())))
    + "\n",
    "/proc/meminfo": "MemTotal:  33554432 kB\nSwapTotal:  4194304 kB\nSwapFree:   4194304 kB\n",
    "/proc/self/cgroup": "0::/job/task\n",
    "/sys/fs/cgroup/cpu.max": "max 100000\n",
    doctor.HUGE_PAGES: "always [madvise] never\n",
}
"""The files of a machine that nothing slows down."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A machine of eight cores without fault, whose files a test may change."""
    files = dict(FILES)
    built = {"compiler": "GNU 12.2.0", "flags": "-O3 -DNDEBUG", "clones": True, "level": 4}
    monkeypatch.setattr(doctor, "_text", lambda path: files.get(path, ""))
    monkeypatch.setattr(doctor, "core", lambda: {**built, "file": "core.so", "processor": None, "processor_level": 4})
    monkeypatch.setattr(doctor, "free_memory", lambda: 8 * GIB)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 0.5, 0.5), raising=False)
    monkeypatch.setattr("os.path.exists", lambda path: False)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=8 * GIB, free=8 * GIB))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return files


Change = Callable[[pytest.MonkeyPatch, dict[str, str]], Any]


def built(**changes: Any) -> Change:
    known = {"compiler": "GNU 12.2.0", "flags": "-O3", "clones": True, "level": 4, "file": "core.so", "processor": None,
             "processor_level": 4}  # fmt: skip
    return lambda patch, files: patch.setattr(doctor, "core", lambda: {**known, **changes})


def replaced(name: str, value: Any) -> Change:
    return lambda patch, files: patch.setattr(name, value)


def written(path: str, text: str) -> Change:
    return lambda patch, files: files.update({path: text})


def one_thread(patch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    patch.setattr(torch, "get_num_threads", lambda: 1)
    patch.setenv("OMP_NUM_THREADS", "1")


def with_gpu(cuda: str | None) -> Change:
    def change(patch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
        patch.setattr("os.path.exists", lambda path: path == "/dev/nvidia0")
        patch.setattr(torch.version, "cuda", cuda)
        files["/proc/driver/nvidia/version"] = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.10  Mon\n"

    return change


def one_core(patch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    patch.setattr("os.sched_getaffinity", lambda _: {3}, raising=False)
    patch.setattr(torch, "get_num_threads", lambda: 1)


FAULTS: dict[str, tuple[str, Change, str]] = {
    "one core": ("one-core", one_core, "one core"),
    "a limit of the container": ("too-many-threads", written("/sys/fs/cgroup/job/cpu.max", "200000 100000"),
                                 "OMP_NUM_THREADS=2 before"),
    "a limit of the older kind": (
        "too-many-threads",
        lambda patch, files: files.update({
            "/proc/self/cgroup": "4:cpu,cpuacct:/\n", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "350000\n",
            "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}), "OMP_NUM_THREADS=4 before"),
    "few cores by affinity": ("too-many-threads", replaced("os.sched_getaffinity", lambda _: {0, 1, 2}), "3 cores"),
    "one thread": ("one-thread", one_thread, "because OMP_NUM_THREADS is 1, and 8 cores"),
    "other programs": ("busy", replaced("os.getloadavg", lambda: (11.0, 1.0, 1.0)), "11.0 processes"),
    "no huge pages": ("no-huge-pages", written(doctor.HUGE_PAGES, "always madvise [never]"), doctor.HUGE_PAGES),
    "little memory": ("little-memory", replaced("relive.look.doctor.free_memory", lambda: GIB // 2), "512.0 MiB"),
    "swap": ("swap", written("/proc/meminfo", "SwapTotal: 4194304 kB\nSwapFree: 2097152 kB\n"), "2.0 GiB"),
    "a container's shm": (
        "small-shm", replaced("shutil.disk_usage", lambda path: SimpleNamespace(total=64 << 20, free=64 << 20)),
        "--shm-size"),
    "no compiler": ("no-compiler", replaced("shutil.which", lambda name: None), "torch.compile"),
    "an old build": ("core-for-old-processors", built(clones=False, level=1), "x86-64-v4"),
    "a debug build": ("core-not-optimized", built(flags="-O0 -g"), "-O0 -g"),
    "sanitizers": ("core-not-optimized", built(flags="-O2 -fsanitize=address"), "-fsanitize"),
    "torch for the CPU": ("unused-gpu", with_gpu(None), "the CPU alone"),
    "an old driver": ("unused-gpu", with_gpu("13.0"), "driver 470.10"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_has_its_advice_and_no_other(
    name: str, machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, change, said = FAULTS[name]
    change(monkeypatch, machine)
    (advice,) = doctor.examine().advice
    assert advice.rule == rule
    assert said in f"{advice.what} {advice.do}"
    assert advice.what.endswith(".")


def test_every_rule_has_a_fault() -> None:
    assert len({rule for rule, _, _ in FAULTS.values()}) == getsource(doctor.advice_on).count("yield Advice(")


def test_a_machine_without_fault_has_no_advice(machine: dict[str, str]) -> None:
    found = doctor.examine()
    assert found.advice == ()
    assert found.facts["threads"]["limit"] is None
    assert found.facts["memory"]["huge_pages"] == "madvise"
    assert found.facts["memory"]["swap_used"] == 0
    assert found.facts["memory"]["total"] == 32 * GIB
    assert doctor.in_words(found)["gpu"] == {"name": "none that torch can use"}


def test_a_system_that_says_nothing_is_no_fault(machine: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise FileNotFoundError(path)

    machine.clear()
    monkeypatch.setattr(doctor, "free_memory", lambda: None)
    monkeypatch.setattr(shutil, "disk_usage", refuse)
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.delattr("os.getloadavg", raising=False)
    found = doctor.examine()
    assert found.advice == ()
    assert found.facts["memory"] == dict.fromkeys(("total", "free", "swap", "swap_used", "huge_pages", "shm",
                                                   "shm_free"))  # fmt: skip
    words = doctor.in_words(found)
    assert words["memory"] == {"swap": "none"}
    assert words["threads"]["usable"] == "8"


def test_a_gpu_is_named_with_what_it_can_do(machine: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu("13.0")(monkeypatch, machine)
    for name, value in {
        "is_available": True, "device_count": 1, "is_bf16_supported": False,
        "get_device_properties": SimpleNamespace(name="A card", total_memory=80 * GIB),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(doctor, "_captures", lambda: True)
    found = doctor.examine()
    assert found.advice == ()
    assert doctor.in_words(found)["gpu"] == {
        "name": "A card, 80.0 GiB", "driver": "470.10", "torch for CUDA": "13.0", "bfloat16": "no",
        "CUDA graphs": "yes",
    }  # fmt: skip


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_true_gpu_on_cuda_is_named() -> None:
    facts = doctor.gpu()
    assert facts["name"] == torch.cuda.get_device_name(0)
    assert facts["graphs"]
    assert facts["driver"]


def test_the_level_of_a_processor_is_the_highest_whose_parts_are_all_there(
    machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert doctor.processor_level() == 4
    machine["/proc/cpuinfo"] = machine["/proc/cpuinfo"].replace(" avx512vl", "")
    assert doctor.processor_level() == 3
    machine["/proc/cpuinfo"] = machine["/proc/cpuinfo"].replace(" bmi2", "")
    assert doctor.processor_level() == 2
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert doctor.processor_level() is None


def test_the_command_tells_of_this_machine() -> None:
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0, shown.output
    assert torch.__version__ in shown.output
    assert "…" not in shown.output
    told = CliRunner().invoke(app, ["doctor", "--json"])
    facts = json.loads(told.output)
    assert facts["versions"]["relive"] == relive.__version__
    assert facts["versions"]["python"] == sys.version.split()[0]
    assert facts["core"]["compiler"]
    assert facts["core"]["level"] in (1, 3, 4)
    assert facts["threads"]["torch"] == torch.get_num_threads()
    assert bool(facts["gpu"]["count"]) == torch.cuda.is_available()
