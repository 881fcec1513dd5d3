"""Finding, Check and Report: the result of an audit, as text, as JSON, as HTML, and as an exit status.

In order: findings, rules and reports; the HTML of the template ``page.html.j2``, whole pages and parts for notebooks.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from importlib import resources
from typing import TYPE_CHECKING, Generic, Literal, ParamSpec, TypeAlias, get_args

import numpy as np

from ..printable import printable
from ..steps.arrays import Array

if TYPE_CHECKING:
    from jinja2 import Template

Sureness = Literal["certain", "likely", "possible"]

SHOWN = 5
"""How many rows a finding names."""


@dataclass(frozen=True)
class Finding:
    """A mistake in stored steps, which would teach the wrong thing.

    Args:
        rule: the name of the rule, such as "reset-as-final-observation".
        sure: "certain" if the data proves it, "likely" if nothing else explains it well, "possible" if it may be meant.
            A "possible" finding alone does not fail an audit.
        what: the mistake, in a sentence.
        mend: the way to correct it.
        rows: how many rows are wrong.
        share: their share of all rows that the rule looked at, from 0 to 1.
        examples: the first few of these rows, as the source numbers them. The "n-step" rules look at ``batch``, and
            number its rows.
        field: the field that is wrong, if it is one field.
    """

    rule: str
    sure: Sureness
    what: str
    mend: str
    rows: int
    share: float
    examples: tuple[int, ...] = ()
    field: str | None = None

    @property
    def extent(self) -> str:
        """How many rows are wrong, and the first few of them, in words."""
        word = "row" if self.rows == 1 else "rows"
        rows = f"{self.rows:,} {word}, {self.share:.1%}" if self.rows else "the whole source"
        shown = f" ({word} {', '.join(map(str, self.examples))}{', ...' if self.rows > len(self.examples) else ''})"
        return rows + (shown if self.examples else "")

    def __str__(self) -> str:
        return f"{self.rule} [{self.sure}] {self.what}: {self.extent}\n    mend: {self.mend}"


class Lack(Exception):  # noqa: N818 - not an error
    """A rule cannot run.

    Args:
        why: the reason, in a sentence without a full stop.
        absent: whether the source simply has nothing of the kind, such as priorities.
    """

    def __init__(self, why: str, absent: bool = False) -> None:
        super().__init__(why)
        self.why: str = why
        self.absent: bool = absent


def skip_if(condition: object, why: str, absent: bool = False) -> None:
    """Raise a :class:`Lack` if a rule cannot run."""
    if condition:
        raise Lack(why, absent)


Look: TypeAlias = Generator[Finding, None, int]
"""A look at stored steps. It yields findings and returns how many rows were looked at, or raises a :class:`Lack`.

There is no third way, so a rule that did not run has said why."""


# Every rule gives a verdict: findings with the number of rows, or why it could not look. A rule that returned early
# would count as "no mistake".
@dataclass(frozen=True)
class Check:
    """One subject of an audit, and how much of it was looked at.

    Args:
        rules: the names of the findings that it can give.
        rows: how many rows were looked at; 0 if it was not looked at.
        lack: why it was not looked at; None if it was.
        absent: whether the source simply has nothing of the kind.
    """

    rules: tuple[str, ...]
    rows: int
    lack: str | None = None
    absent: bool = False


Verdict: TypeAlias = tuple[Check, tuple[Finding, ...]]
"""An entry of the report, and what was found."""

Given = ParamSpec("Given")


@dataclass(frozen=True)
class Rule(Generic[Given]):
    """A look, and the names of the findings that it can give."""

    names: tuple[str, ...]
    look: Callable[Given, Look]

    def __call__(self, *args: Given.args, **options: Given.kwargs) -> Verdict:
        """The verdict. What was found before the look raised a lack is left out.

        Raises:
            TypeError: it returned something else than a number of rows, or found what is not of its names.
            ValueError: it returned that it looked at no row.
        """
        rows: list[int] = []

        def looking() -> Iterator[Finding]:
            rows.append((yield from self.look(*args, **options)))

        try:
            findings, (verdict,) = tuple(looking()), rows
        except Lack as lack:
            return self.lacks(lack.why, lack.absent)
        named = f"the rule for {', '.join(self.names)}"
        if not hasattr(verdict, "__index__"):
            raise TypeError(f"{named} returned {verdict!r:.200}, which is no number of rows")
        foreign = [finding.rule for finding in findings if finding.rule not in self.names]
        if foreign:
            raise TypeError(f"{named} found {', '.join(foreign)}")
        if verdict < 1:
            raise ValueError(f"{named} looked at no row; then it raises a Lack, which says why")
        return Check(self.names, int(verdict)), findings

    def lacks(self, why: str, absent: bool = False) -> Verdict:
        """The verdict where the rule does not run."""
        return Check(self.names, 0, why, absent), ()


def rule(*names: str) -> Callable[[Callable[Given, Look]], Rule[Given]]:
    """Make a look the rule for findings of these names."""
    return lambda look: Rule(names, look)


@dataclass(frozen=True)
class Report:
    """The result of :func:`relive.audit`.

    Args:
        source: the name of the source.
        rows: how many steps.
        episodes: how many episodes ended.
        findings: the mistakes that were found, the surest first.
        lacks: sentences on what could not be looked at, and why: missing fields, and each rule that did not run.
            Rules on fields that the source does not have at all, such as priorities, are in ``checks`` only.
        checks: every rule, with the number of rows it looked at, or the reason why it did not.
    """

    source: str
    rows: int
    episodes: int
    findings: tuple[Finding, ...]
    lacks: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()

    @property
    def ok(self) -> bool:
        """True if nothing was found that is certain or likely."""
        return all(finding.sure == "possible" for finding in self.findings)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = [f"{self.source}: {self.rows:,} steps, {self.episodes:,} episodes ended"]
        lines += [f"  not looked at: {lack}" for lack in self.lacks]
        lines += [f"  {str(finding).replace(chr(10), chr(10) + '  ')}" for finding in self.findings]
        return "\n".join([*lines, f"  {self.summary}"])

    def _repr_html_(self) -> str:
        return rendered(whole=False, report=self)

    @property
    def summary(self) -> str:
        """How many rules ran, in a sentence. It says that no mistake was found only of those."""
        ran = sum(check.lack is None for check in self.checks)
        absent = sum(check.absent for check in self.checks)
        left = len(self.checks) - ran - absent
        counts = f"{ran} of {len(self.checks)} checks ran" + (f", {left} could not" if left else "")
        counts += f", {absent} had nothing to look at" if absent else ""
        return counts if self.findings else f"no mistake was found; {counts}"

    def to_dict(self) -> dict[str, object]:
        """The report as plain dicts, lists, numbers and strings."""
        return {**asdict(self), "ok": self.ok}

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.to_dict(), indent=2)


def finding(
    rule: str,
    sure: Sureness,
    what: str,
    mend: str,
    rows: Array,
    looked: int,
    *,
    place: Array | None = None,
    field: str | None = None,
) -> Iterator[Finding]:
    """The finding about ``rows``, a mask or positions, of ``looked`` rows; none if no row is wrong."""
    at = np.flatnonzero(rows) if getattr(rows, "dtype", None) == np.bool_ else np.asarray(rows, np.int64)
    if len(at):
        shown = at[:SHOWN] if place is None else np.asarray(place)[at[:SHOWN]]
        examples = tuple(int(row) for row in shown)
        yield Finding(rule, sure, printable(what), printable(mend), len(at), len(at) / looked, examples, field)


def surest_first(findings: list[Finding]) -> tuple[Finding, ...]:
    """Findings in the order in which to mend them. Of one mistake that two rules saw, the surer finding is kept."""
    order = get_args(Sureness)
    surest: dict[tuple[str, str | None], int] = {}
    for finding in findings:
        key, sure = (finding.rule, finding.field), order.index(finding.sure)
        surest[key] = min(surest.get(key, sure), sure)
    of_surest = [finding for finding in findings if order.index(finding.sure) == surest[finding.rule, finding.field]]
    return tuple(sorted(of_surest, key=lambda finding: (order.index(finding.sure), -finding.rows)))


# -- HTML --------------------------------------------------------------------------------------------------------------


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


def verdict(report: Report) -> str:
    """The result of an audit in a few words."""
    if not report.findings:
        return "No mistake was found" if report.rows else "There is no step"
    sures = [finding.sure for finding in report.findings]
    words = [f"{sures.count(sure)} {sure}" for sure in dict.fromkeys(sures)]  # the surest come first
    return f"{' and '.join(words)} {'mistake' if len(sures) == 1 else 'mistakes'}"
