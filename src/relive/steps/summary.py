"""The printed summary of a buffer: a few lines of text, and a table for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from .schema import Field, Path, dotted

__all__ = ["Summary", "described", "html", "text"]


Summary = tuple[str, dict[str, str]]
"""A title, and facts by name."""


def described(leaves: Mapping[Path, Field]) -> str:
    """Fields with their dtypes and shapes, in one line."""
    return ", ".join(
        f"{dotted(path)} {str(field.dtype).removeprefix('torch.')}{list(field.shape) if field.shape else ''}"
        for path, field in leaves.items()
    )


def text(summary: Summary) -> str:
    """The title, and a line for each fact."""
    title, facts = summary
    width = max(map(len, facts))
    return "\n".join([title, *(f"  {name:<{width}}  {fact}" for name, fact in facts.items())])


def html(summary: Summary) -> str:
    """The summary as an HTML table."""
    title, facts = summary
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th><td style='text-align:left'>{escape(fact)}</td></tr>"
        for name, fact in facts.items()
    )
    return f"<table><caption style='text-align:left'>{escape(title)}</caption>{rows}</table>"
