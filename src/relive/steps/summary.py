"""The printed summary of a buffer or a schema: a few lines of text, and a table for notebooks."""

from __future__ import annotations

Summary = tuple[str, dict[str, str]]
"""A title, and facts by name."""


def text(summary: Summary) -> str:
    """The title, and a line for each fact."""
    title, facts = summary
    width = max(map(len, facts))
    return "\n".join([title, *(f"  {name:<{width}}  {fact}" for name, fact in facts.items())])


def html(summary: Summary) -> str:
    """The summary as an HTML table."""
    from html import escape

    title, facts = summary
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th><td style='text-align:left'>{escape(fact)}</td></tr>"
        for name, fact in facts.items()
    )
    return f"<table><caption style='text-align:left'>{escape(title)}</caption>{rows}</table>"
