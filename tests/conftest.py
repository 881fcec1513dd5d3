"""What all tests share: one thread each, and how hard Hypothesis tries."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

# Before torch is imported: the workers of pytest-xdist fill the cores already, and the processes that tests start
# inherit this. Plots are drawn, never shown. torch is not imported here, because the process that
# waits for the workers does not need it.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", MPLBACKEND="Agg")
if "PYTEST_XDIST_WORKER" in os.environ:  # a process that has used a GPU cannot fork; `make test-gpu` has no workers
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
from hypothesis import HealthCheck, settings

from attacks import tally

gc.disable()  # until all is imported and collected: nothing of that is garbage

# `quick` and `ci` draw the same examples in every run, so that a red run is red again; `thorough` looks for new ones.
# No deadline in any: the first call of a process may import a package, and a busy machine is slow now and then.
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("quick", derandomize=True, max_examples=10, deadline=None, suppress_health_check=QUIET)
settings.register_profile("ci", derandomize=True, max_examples=40, deadline=None, suppress_health_check=QUIET)
settings.register_profile("thorough", max_examples=1000, deadline=None, suppress_health_check=QUIET)
settings.load_profile("quick")


@pytest.fixture
def tried(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """``tried(class_name, count=1)`` notes attacks that the test makes; if the test fails, one of them had its way."""
    made, failures = Counter[str](), request.session.testsfailed
    yield lambda class_name, count=1: made.update({class_name: count})
    for class_name, count in made.items():
        tally.record(class_name, count, int(request.session.testsfailed > failures))


def pytest_configure(config: pytest.Config) -> None:
    """Give this run, and the workers it starts, a file in which its attacks are counted."""
    if not hasattr(config, "workerinput") and tally.PLACE not in os.environ:
        descriptor, os.environ[tally.PLACE] = tempfile.mkstemp(prefix="attacks-")
        os.close(descriptor)
        config.add_cleanup(lambda: Path(os.environ.pop(tally.PLACE)).unlink(missing_ok=True))
    if hasattr(config, "workerinput") and config.option.durations is None:
        tell_news_alone(config)


def tell_news_alone(config: pytest.Config) -> None:
    """Have a worker of pytest-xdist tell the process that waits how a test ended, not that its fixtures did well.

    A third of what all tests but do nothing would cost is to write and to read these messages.
    """
    plugins = config.pluginmanager.get_plugins()
    worker: Any = next(plugin for plugin in plugins if type(plugin).__name__ == "WorkerInteractor")
    tell = worker.sendevent

    def tell_news(name: str, **what: Any) -> None:
        no_news = name == "testreport" and what["data"]["when"] != "call" and what["data"]["outcome"] == "passed"
        if name != "logstart" and not no_news:
            tell(name, **what)

    worker.sendevent = tell_news


def effort() -> Any:
    """The module, which asks for the profile: not before that is known."""
    return importlib.import_module("support.effort")


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: Any) -> list[pytest.Item] | None:
    """Leave out what is slow before items are made of it, where `-m "not slow"` would do so afterwards."""
    if name[:4].lower() != "test" or effort().makes_slow_ones(collector.config):
        return None
    return [] if effort().is_slow(collector, obj) else None


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Leave most cases of wide products to `.ci/run`."""
    yield
    effort().leave_cases_to_ci(metafunc)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what is loaded by now out of garbage collections, which would look at all of it, and make them rarer.

    A worker of pytest-xdist first imports what the first batch of a process would: its tests need all of that.
    """
    if hasattr(session.config, "workerinput"):
        importlib.import_module("support.forks").load()
        spare_the_system()
    gc.enable()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def spare_the_system() -> None:
    """Read once how much memory is free, not for each buffer; and do not wait for the disk: no test cuts the power."""
    estimate, mapped = (importlib.import_module(f"relive.{name}") for name in ("memory.estimate", "files.mapped"))
    estimate._text = cache(importlib.import_module("support.internals").text(estimate))
    os.fsync = mapped._sync_data = lambda descriptor: None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """End the processes that a test has left, as one that fails does.

    What is left of a file's tests is looked at by one garbage collection, and kept out of those of the next files.
    """
    if "support.children" in sys.modules:
        sys.modules["support.children"].end_all()
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show how many attacks were tried, and how many had their way."""
    found = tally.totals(Path(os.environ[tally.PLACE]))
    if found:
        terminalreporter.section("attacks")
        terminalreporter.write_line(tally.table(found))
