"""Compiled kernels on disk: found again, refused when damaged or foreign, and announced when they are compiled."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from numba.core import registry

from relive.kernels import cpu
from relive.kernels.cpu import jit as cache


def test_what_was_compiled_before_any_kernel_changed_is_compiled_again() -> None:
    kernels = [kernel for kernel in vars(cpu).values() if hasattr(kernel, "py_func")]
    assert len(kernels) > 20
    newest = max(path.stat().st_mtime for path in Path(cpu.__file__).parent.parent.rglob("*.py"))
    for kernel in kernels:
        assert kernel._cache._cache_file._source_stamp == cache.SOURCES
    assert cache.SOURCES[0] == newest


def test_two_threads_whose_first_calls_come_at_once_load_the_kernels_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside, most, second = 0, 0, threading.Event()

    def refresh() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if inside > 1:
            second.set()
        second.wait(0.1)
        inside -= 1

    monkeypatch.setattr(registry.cpu_target.target_context, "refresh", refresh)
    threads = [threading.Thread(target=cache.load_target) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


TWICE = "from relive.kernels.cpu.jit import jit\n\n\n@jit\ndef twice(x):\n    return 2 * x\n"


def compiled_in(folder: Path) -> Any:
    """A kernel of a module of its own, which is compiled or found in that module's cache."""
    (folder / "module.py").write_text(TWICE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("module", folder / "module.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.twice


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "truncated": lambda raw: raw[: len(raw) // 2],
    "one byte less": lambda raw: raw[:-1],
    "a flipped bit": lambda raw: raw[: len(raw) // 2] + bytes([raw[len(raw) // 2] ^ 16]) + raw[len(raw) // 2 + 1 :],
    "something else": lambda raw: b"\x80\x05." * 100,
}


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", ["empty", *[pytest.param(name, marks=pytest.mark.slow) for name in DAMAGE][1:]])
def test_a_damaged_cache_file_is_thrown_away_and_made_again(damage: str, ending: str, tmp_path: Path) -> None:
    assert compiled_in(tmp_path)(21) == 42
    (file,) = (tmp_path / "__pycache__").glob(f"*.{ending}")
    whole = file.read_bytes()
    file.write_bytes(DAMAGE[damage](whole))
    assert compiled_in(tmp_path)(21) == 42
    found = compiled_in(tmp_path)
    assert found(21) == 42
    assert sum(found.stats.cache_hits.values()) == 1, "what was compiled again was not kept"


def test_a_cache_that_cannot_be_written_any_more_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(cache.KernelCache, "_save_overload", full)
    assert compiled_in(tmp_path)(21) == 42


def test_the_directory_for_caches_is_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = cache.private_directory.__wrapped__()
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    assert cache.private_directory.__wrapped__() == folder
    folder.chmod(0o770)  # somebody may have put something there already
    with pytest.raises(RuntimeError, match="yours alone"):
        cache.private_directory.__wrapped__()
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RuntimeError, match="yours alone"):
        cache.private_directory.__wrapped__()


HOMELESS = """
import warnings
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    from relive import kernels
    assert kernels.permutation(5, 0, 0).tolist() == [2, 3, 0, 1, 4]
print(*[warning.message for warning in told if "relive" in str(warning.message)], sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("safe", [True, False])
def test_kernels_run_where_neither_the_package_nor_the_home_can_be_written(safe: bool, tmp_path: Path) -> None:
    source = Path(cpu.__file__).parents[2]
    shutil.copytree(source, tmp_path / "relive", ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("cpu", "reference"):
        (tmp_path / "relive" / "kernels" / part / "__pycache__").touch()  # no directory, not even for root
    (tmp_path / "tmp").mkdir()
    if not safe:
        (tmp_path / "tmp" / f"relive-kernels-{os.getuid()}").symlink_to(tmp_path)
    environment = {**os.environ, "HOME": os.devnull, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(tmp_path)}
    for name in ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-B", "-c", HOMELESS], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1, done.stdout
    assert ("caches kernels in" if safe else "compiled again in every process") in done.stdout


# The line that announces a long compilation.


def compilation(module: str = "relive.kernels.cpu.ring") -> Any:
    return SimpleNamespace(data={"dispatcher": SimpleNamespace(py_func=SimpleNamespace(__module__=module))})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that stands still until the test moves it."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(cache.time, "perf_counter", lambda: clock.now)
    return clock


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that the logger of compilations was given."""
    lines, logger = list[str](), logging.getLogger("relive.compile")
    monkeypatch.setattr(logger, "handle", lambda record: lines.append(record.getMessage()))
    return lines


def test_a_long_compilation_is_announced_once_and_a_short_one_never(clock: Any, logged: list[str]) -> None:
    progress = cache.Progress()
    for seconds, lines in ((0.4, 0), (0.4, 0), (0.4, 1), (0.4, 1)):  # together they are long
        progress.on_start(compilation())
        clock.now += seconds
        progress.on_end(compilation())
        clock.now += 100  # what lies between two compilations does not count
        assert len(logged) == lines
    assert progress.compiled == 4
    assert "python -m relive.compile" in logged[0]


def test_the_line_comes_while_the_first_kernel_compiles_what_it_calls(clock: Any, logged: list[str]) -> None:
    progress = cache.Progress()
    progress.on_start(compilation())
    for _ in range(3):
        clock.now += 0.5
        progress.on_start(compilation())
        progress.on_end(compilation())
    assert len(logged) == 1


def test_functions_that_the_user_compiles_are_not_counted(clock: Any, logged: list[str]) -> None:
    progress = cache.Progress()
    progress.on_start(compilation("__main__"))
    clock.now += 60
    progress.on_end(compilation("__main__"))
    assert progress.compiled == 0
    assert not logged


def test_the_line_is_silenced_by_the_level_of_its_logger(clock: Any, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("relive")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        progress = cache.Progress()
        progress.on_start(compilation())
        clock.now += 60
        progress.on_end(compilation())
    finally:
        logger.setLevel(before)
    assert capsys.readouterr().err == ""
