"""HTML of the template ``page.html.j2``: whole pages, and parts for notebooks."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib import resources
from typing import TYPE_CHECKING, Any

from ..printable import printable

if TYPE_CHECKING:
    from jinja2 import Template


def rendered(**values: object) -> str:
    """The template with values: ``whole`` for a page, ``report`` for an audit; the template names the others."""
    return _template().render(policy=policy, verdict=verdict, **values)


@cache
def _template() -> Template:
    from jinja2 import Environment  # torch brings it

    text = resources.files(__package__ or "").joinpath("page.html.j2").read_text(encoding="utf-8")
    return Environment(autoescape=True, finalize=_shown).from_string(text)


def _shown(value: object) -> object:
    """A value of the page. Text is a name or a sentence; what is safe already is markup."""
    return printable(value) if type(value) is str else value


def policy(*parts: str) -> str:
    """A Content-Security-Policy for a page of these parts. It loads nothing, and has their styles and scripts alone."""

    def hashes(tag: str) -> str:
        found = (text for part in parts for text in re.findall(f"<{tag}>(.*?)</{tag}>", part, re.DOTALL))
        return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in found) or "'none'"

    return (
        f"default-src 'none'; style-src {hashes('style')}; script-src {hashes('script')}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def verdict(report: Any) -> str:
    """The result of an audit in a few words."""
    if not report.findings:
        return "No mistake was found" if report.rows else "There is no step"
    found = [finding.sure for finding in report.findings]
    words = [f"{found.count(sure)} {sure}" for sure in dict.fromkeys(found)]  # the surest come first
    return f"{' and '.join(words)} {'mistake' if len(found) == 1 else 'mistakes'}"
