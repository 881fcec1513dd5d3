"""An inspection as HTML that needs nothing from elsewhere: a page, or a part of a notebook."""

from __future__ import annotations

import io
import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib import resources
from typing import Any

from ..memory.estimate import readable
from ..printable import printable
from .findings import Report
from .words import number

__all__ = ["page", "part"]


ROWS = 1000
"""The most episodes that a page lists."""


def page(found: Any, report: Report) -> str:
    """An inspection and an audit of the same source as a whole page, with the picture if matplotlib is installed."""
    columns = ([_cell(value) for value in column[:ROWS].tolist()] for column in found.episodes.values())
    rows = list(zip(*columns, strict=True))
    return _rendered(found, whole=True, report=report, rows=rows, count=len(found.episodes["start"]))


def part(found: Any) -> str:
    """An inspection for a notebook."""
    return _rendered(found, whole=False)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _rendered(found: Any, **values: Any) -> str:
    return _template().render(
        found=found, picture=_picture(found), readable=readable, number=number, policy=policy, **values
    )


def policy(*parts: str) -> str:
    """A Content-Security-Policy for a page of these parts: it loads nothing, runs nothing, and has their styles alone.

    Attributes of style are allowed: each line of the picture has one.
    """
    sheets = (sheet for part in parts for sheet in re.findall("<style[^>]*>(.*?)</style>", part, re.DOTALL))
    hashes = (b64encode(sha256(sheet.encode()).digest()).decode() for sheet in sheets)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; style-src-elem {allowed}; style-src-attr 'unsafe-inline'; base-uri 'none'; "
        "form-action 'none'"
    )


@cache
def _template() -> Any:
    from jinja2 import Environment  # torch brings it

    text = resources.files(__package__ or "").joinpath("page.html.j2").read_text(encoding="utf-8")
    return Environment(autoescape=True, finalize=_shown).from_string(text)


def _shown(value: Any) -> Any:
    """A value of the page. Text is a name or a sentence; the picture is markup."""
    return printable(value) if type(value) is str else value


def _picture(found: Any) -> str:
    """The picture as SVG; empty without matplotlib."""
    from .plot import figure_of

    try:
        figure = figure_of(found)
    except ModuleNotFoundError:
        return ""
    memory = io.StringIO()
    figure.savefig(memory, format="svg")
    drawn = memory.getvalue()
    return drawn[drawn.index("<svg") :]
