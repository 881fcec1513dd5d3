"""The bar that shows how far long work has come."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from ..files.disk import has_room_for_thread
from ..parameters import Rule, is_flag, require

PROGRESS_RULE: Rule = (lambda wanted: wanted is None or is_flag(wanted), "expected True, False or None")
"""The rule for every argument that asks for a bar."""


LONG = 2.0
"""Seconds after which work shows its progress on a terminal."""

Item = TypeVar("Item")


class Counted(Protocol):
    """Gives items one after another, and counts each one once the next is asked for."""

    def __call__(self, items: Iterable[Item], /) -> Iterator[Item]:
        """Pass the items on."""
        ...


@contextmanager
def progress_bar(
    total: int | None, wanted: bool | None, doing: str = "collecting", unit: str = "steps"
) -> Generator[Counted]:
    """A Rich progress bar, which goes on by one for each item that passes through what it yields.

    Args:
        total: how many items there will be; None if that is not known.
        wanted: True shows it, False does not; None shows it only on a terminal, after LONG seconds.
        doing: the word before the bar.
        unit: what is counted.

    Raises:
        ParameterError: ``wanted`` is something else.
    """
    require("progress bar", PROGRESS_RULE, progress=wanted)
    if wanted is False:
        yield iter
        return
    try:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError as error:
        if wanted:
            raise ImportError("a progress bar needs Rich: pip install 'relive[progress]'") from error
        yield iter
        return
    console = Console(stderr=True)
    if wanted is None and not console.is_terminal:
        yield iter
        return
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=console.is_terminal)
    task = bar.add_task(doing, total=total)
    began = time.perf_counter()

    def counted(items: Iterable[Item]) -> Iterator[Item]:
        for item in items:
            yield item
            is_due = not bar.live.is_started and (wanted or time.perf_counter() - began > LONG)
            if is_due and has_room_for_thread():  # the bar is drawn in one
                bar.start()
            bar.advance(task)

    try:
        yield counted
    finally:
        bar.stop()
