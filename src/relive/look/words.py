"""Numbers, distributions and tables in words, for people and for JSON."""

from __future__ import annotations

import math
from typing import Any, cast

__all__ = ["envs", "in_words", "number", "plain"]


def envs(count: int) -> str:
    """A number of envs in words."""
    return f"{count:,} env" if count == 1 else f"{count:,} envs"


def number(value: float | None) -> str:
    """A number for people."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if 10_000 <= abs(value) < 1e9 else f"{value:.4g}"


def in_words(numbers: dict[str, float]) -> str:
    """A distribution in one line."""
    return ", ".join(f"{name} {number(value)}" for name, value in numbers.items())


def plain(value: Any) -> Any:
    """Nested containers, with None for numbers that are not finite, and lists for tuples."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in cast("list[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
