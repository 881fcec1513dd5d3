"""Finding and Report: what an audit found, as text, as JSON, and as an exit status."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np

from ..printable import printable

__all__ = ["Finding", "Report", "Sureness"]


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
        what: what was found, in a sentence.
        mend: what to do about it.
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
        rows = f"{self.rows:,} rows, {self.share:.1%}" if self.rows else "the whole source"
        shown = f" (rows {', '.join(map(str, self.examples))}{', ...' if self.rows > len(self.examples) else ''})"
        return rows + (shown if self.examples else "")

    def __str__(self) -> str:
        return f"{self.rule} [{self.sure}] {self.what}: {self.extent}\n    mend: {self.mend}"


@dataclass(frozen=True)
class Report:
    """The result of :func:`relive.audit`.

    Args:
        source: what was read.
        rows: how many steps.
        episodes: how many episodes ended.
        findings: the mistakes that were found, the surest first.
        lacks: what the source does not keep, so that it could not be looked at.
    """

    source: str
    rows: int
    episodes: int
    findings: tuple[Finding, ...]
    lacks: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was found that is certain or likely."""
        return all(finding.sure == "possible" for finding in self.findings)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = [f"{self.source}: {self.rows:,} steps, {self.episodes:,} episodes ended"]
        lines += [f"  not looked at: {lack}" for lack in self.lacks]
        lines += [f"  {str(finding).replace(chr(10), chr(10) + '  ')}" for finding in self.findings]
        return "\n".join(lines + ([] if self.findings else ["  no mistake was found"]))

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dicts, lists, numbers and strings."""
        return {**asdict(self), "ok": self.ok}

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.to_dict(), indent=2)


def found(
    rule: str,
    sure: Sureness,
    what: str,
    mend: str,
    rows: Any,
    looked: int,
    *,
    place: Any = None,
    field: str | None = None,
) -> Finding:
    """A finding about ``rows``, a mask or positions. ``looked`` is the number of rows that the rule looked at."""
    at = np.flatnonzero(rows) if getattr(rows, "dtype", None) == np.bool_ else np.asarray(rows, np.int64)
    shown = at[:SHOWN] if place is None else np.asarray(place)[at[:SHOWN]]
    share = len(at) / looked if looked else 0.0
    return Finding(
        rule, sure, printable(what), printable(mend), len(at), share, tuple(int(row) for row in shown), field
    )


def surest_first(findings: list[Finding]) -> tuple[Finding, ...]:
    """Findings in the order in which to mend them."""
    order = get_args(Sureness)
    return tuple(sorted(findings, key=lambda finding: (order.index(finding.sure), -finding.rows)))
