"""What memory there is, and that it is asked for before it is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from relive import Field, ReplayBuffer, RolloutBuffer, Schema, errors
from relive.memory import estimate as plan
from support import internals

STEP = Schema({"obs": (4,), "reward": (), "terminated": Field((), torch.bool), "truncated": Field((), torch.bool)})


def grouped(root: Path, mine: str, files: dict[str, str]) -> int | None:
    """What is free in a process whose groups are ``mine``, where the system has these files."""
    for name, content in files.items():
        path = root / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (root / "cgroup").write_text(mine)
    return internals.free_in_groups(plan)(str(root / "cgroup"), str(root / "sys"))


def v2(limit: str, used: int, files: int = 0) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon 7\ninactive_file {files}\n",
    }


def v1(limit: int, used: int, files: int = 0) -> dict[str, str]:
    return {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{used}\n",
        "memory.stat": f"inactive_file 1\ntotal_inactive_file {files}\n",
    }


def under(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": content for name, content in files.items()}


def test_the_limit_of_a_control_group_is_respected_whatever_its_version(tmp_path: Path) -> None:
    new = under("app/job", v2("1000", 400, 50))
    assert grouped(tmp_path / "a", "0::/app/job\n", new) == 650
    old = under("memory/docker/x", v1(1000, 400, 50))
    assert grouped(tmp_path / "b", "9:cpu:/\n4:memory:/docker/x\n0::/\n", old) == 650
    assert grouped(tmp_path / "c", "4:cpu,memory:/docker/x\n", old) == 650
    assert grouped(tmp_path / "d", "0::/\n", v2("1000", 400)) == 600  # a container sees its own group as the root
    assert grouped(tmp_path / "e", "4:memory:/docker/x\n", under("memory", v1(1000, 400))) == 600


def test_the_tightest_limit_of_all_groups_above_counts(tmp_path: Path) -> None:
    files = under("app/job", v2("5000", 400)) | under("app", v2("1000", 700)) | v2("max", 9000)
    assert grouped(tmp_path / "a", "0::/app/job\n", files) == 300
    files = under("app/job", v2("100", 300))
    assert grouped(tmp_path / "b", "0::/app/job\n", files) == 0


@pytest.mark.parametrize(
    "mine",
    [
        "",
        "0::/app\n",
        "4:memory:/app\n",
        "nonsense",
        "0::/../..\n",
        "4:memory:/broken\n0::/broken\n",
        "4:memory:/none\n",
    ],
)
def test_without_a_limit_that_can_be_read_there_is_none(mine: str, tmp_path: Path) -> None:
    files = under("app", v2("max", 5)) | under("broken", {**v2("12", 5), "memory.current": "?"})
    files |= under("memory/none", v1(2**63 - 4096, 5))
    assert grouped(tmp_path, mine, files) is None
    assert internals.free_in_groups(plan)(str(tmp_path / "nothing"), str(tmp_path)) is None


def test_free_memory_is_no_more_than_a_group_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_free_in_groups", lambda: 5_000)
    assert plan.free_memory() == 5_000
    with pytest.raises(errors.ParameterError, match=r"would take [\d,]+ bytes and 5,000 are free"):
        ReplayBuffer(STEP, 1000)
    monkeypatch.setattr(plan, "_free_in_groups", lambda: None)
    assert (plan.free_memory() or 0) > 5_000


def test_a_rollout_asks_for_its_memory_to_the_byte_before_it_takes_any(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = STEP.extend(value=(), hidden=(2, 8))
    for options in ({}, {"columns": {"old": Field((3,))}}):
        probe = RolloutBuffer(schema, 16, 3, **options)
        columns = internals.columns(probe)
        size = sum(columns.view(path).nbytes for path in columns.own)
        monkeypatch.setattr(plan, "free_memory", lambda size=size: size)
        RolloutBuffer(schema, 16, 3, **options)
        monkeypatch.setattr(plan, "free_memory", lambda size=size: size - 1)
        message = rf"the rollout would take {size:,} bytes(.|\n)*obs(.|\n)*hidden"
        with pytest.raises(errors.ParameterError, match=message):
            RolloutBuffer(schema, 16, 3, **options)
        monkeypatch.undo()


def test_fields_that_are_added_later_are_asked_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = RolloutBuffer(STEP, 16, 3)
    monkeypatch.setattr(plan, "free_memory", lambda: 17 * 3 * 4)
    rollout.add_fields(more=())
    with pytest.raises(errors.ParameterError, match=r"the rollout would take 408 bytes and 204 are free"):
        rollout.add_fields(most=(2,))
    assert "most" not in rollout.schema


@pytest.mark.parametrize("size", [2**63, 10**30, 2**200])
def test_sizes_that_no_machine_has_are_refused_in_our_own_words(size: int) -> None:
    wrong: list[dict[str, Any]] = [{"capacity": size}, {"capacity_bytes": size}, {"capacity": 10, "num_envs": size}]
    for options in wrong:
        for make in (ReplayBuffer, ReplayBuffer.plan):
            with pytest.raises(errors.ParameterError, match=r"capacity|num_envs"):
                make(STEP, **options)
    for steps, envs in ((size, 1), (1, size), (2**40, 2)):
        with pytest.raises(errors.ParameterError, match="the rollout would take"):
            RolloutBuffer(STEP, steps, envs)
