"""What other processes do to a limit: functions that a spawned process can import."""

from __future__ import annotations

from relive import SamplesPerInsert
from support.children import SECONDS


def sample_all(limit: SamplesPerInsert) -> None:
    """Take single samples until none is allowed."""
    while limit.try_to_sample(1):
        pass


def insert_some(limit: SamplesPerInsert, turns: int) -> None:
    """Insert 2 steps in each turn."""
    for _ in range(turns):
        limit.wait_to_insert(2, SECONDS)


def wait_for_ever(limit: SamplesPerInsert) -> None:
    """Wait for the first samples."""
    limit.wait_to_sample(4)
