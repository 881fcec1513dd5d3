"""The page of an inspection and an audit of the same source.

In order: the page and its parts; the tables and charts on it; the steps of some episodes, with their images.
"""

from __future__ import annotations

import io
import json
import math
from base64 import b64encode
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

import numpy as np

from ..memory.estimate import readable
from ..names import needed, version
from ..printable import printable
from ..steps.arrays import Array, Ints
from .experience import Experience, facts_of, number, plain, spreads_of
from .findings import Report, rendered

ROWS = 1000
"""The most episodes that a page lists, and the most dots of a chart."""


# The page draws its own charts, because they follow the colours of the reader's screen, and Matplotlib's do not.
def page(inspection: Any, report: Report, chosen: int | None = None) -> str:
    """An inspection and an audit of the same source as a whole page.

    Args:
        inspection: the inspection.
        report: the audit.
        chosen: an episode that the page shows step by step, besides those that it takes by itself.

    Raises:
        ModuleNotFoundError: there are images to show, and Pillow is not installed.
    """
    shown = shown_episodes(inspection, report, chosen)
    marked: set[int] = {row for episode in shown for row in episode["marks"]}
    named = [rows_of(inspection.experience, finding.examples).tolist() for finding in report.findings]
    jumps = {i: [row for row in rows if row in marked] for i, rows in enumerate(named)}
    data = json.dumps(plain(shown), allow_nan=False).replace("<", r"\u003c") if shown else ""
    return rendered(
        whole=True,
        number=number,
        inspection=inspection,
        report=report,
        rows=episode_rows(inspection.episodes),
        count=len(inspection.episodes["start"]),
        shown=data,
        jumps=jumps,
        version=version(),
        date=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        **_tables(inspection),
    )


def part_of_inspection(inspection: Any) -> str:
    """An inspection for a notebook."""
    return rendered(whole=False, report=None, inspection=inspection, number=number, **_tables(inspection))


def _tables(inspection: Any) -> dict[str, object]:
    numbers = spreads_of(inspection.experience, inspection.episodes)._asdict()
    known = {name: spread for name in numbers if (spread := getattr(inspection, name)) is not None}
    spreads = {name: {"numbers": spread, "bars": bars_of(numbers[name])} for name, spread in known.items()}
    facts = {name: fact for name, fact in inspection.facts().items() if name not in spreads}
    if inspection.never_sampled is not None:
        facts["never drawn"] = f"{inspection.never_sampled:.1%} of the steps"
    return {"facts": facts, "spreads": spreads, "fields": fields_of(inspection), "dots": dots_of(inspection.episodes)}


# -- tables and charts -------------------------------------------------------------------------------------------------

BINS = 24
"""Bars of a small histogram."""

SAMPLE = 1_000_000
"""A histogram of more numbers than this is one of a sample."""

DIMENSIONS = 16
"""A field of up to so many numbers has a line for each of them."""


def fields_of(inspection: Any) -> list[dict[str, object]]:
    """A line for each field, and for each number of a small field."""
    columns: dict[str, Array] = inspection.steps(0, inspection.num_steps) if inspection.num_steps else {}
    lines: list[dict[str, object]] = []
    for facts in inspection.fields:
        leaf = columns.get(facts.name, np.zeros(0))
        shape = "×".join(map(str, facts.shape))
        about = ", ".join([f"{facts.dtype} {shape}".strip(), readable(facts.nbytes)])
        lines.append({**asdict(facts), "about": about, "bars": bars_of(leaf)})
        if len(leaf) and 1 < math.prod(facts.shape) <= DIMENSIONS and leaf.dtype.kind in "biuf":
            for place in np.ndindex(*facts.shape):
                part = leaf[(slice(None), *place)]
                lines.append({**asdict(facts_of((f"{list(place)}",), part)), "part": True, "bars": bars_of(part)})
    return lines


def bars_of(numbers: Array) -> list[float]:
    """The heights of a histogram, up to 24 for the highest bar; none if all numbers are equal.

    Whole numbers of a small range have a bar each. A bar that is not empty can be seen.
    """
    if numbers.dtype.kind not in "biuf":
        return []
    flat = numbers.reshape(-1)
    sample = flat[:: -(-flat.size // SAMPLE) or 1]
    finite = sample[np.isfinite(sample)]
    if not len(finite) or finite.min() == finite.max():
        return []
    values = finite.astype(np.float64)
    low, high = float(values.min()), float(values.max())
    if numbers.dtype.kind in "biu" and high - low < BINS:
        edges = np.arange(low - 0.5, high + 1)
    else:
        edges = np.linspace(low, high, BINS + 1)
    counts = np.histogram(values, edges)[0]
    return [float(max(24 * count / counts.max(), 1)) if count else 0.0 for count in counts]


def dots_of(table: dict[str, Array]) -> dict[str, object] | None:
    """The returns of whole episodes as dots; None if there are fewer than three."""
    returns = table["return"][table["complete"] & np.isfinite(table["return"])]
    if len(returns) < 3:
        return None
    low, high = float(returns.min()), float(returns.max())
    at = np.arange(0, len(returns), -(-len(returns) // ROWS))
    heights = np.full(len(at), 80.0) if low == high else 154 - 148 * (returns[at] - low) / (high - low)
    across = 6 + 588 * at / (len(returns) - 1)
    points = [(f"{x:.1f}", f"{y:.1f}") for x, y in zip(across.tolist(), heights.tolist(), strict=True)]
    return {"low": "" if low == high else number(low), "high": number(high), "points": points}


def episode_rows(table: dict[str, Array]) -> list[tuple[str, ...]]:
    """The table of episodes for people: number, env, steps, return, and how it ended."""
    names = "env", "length", "return", "terminated", "truncated", "complete"
    rows: list[tuple[str, ...]] = []
    for i, values in enumerate(zip(*(table[name][:ROWS].tolist() for name in names), strict=True)):
        env, length, total, terminated, truncated, whole = values
        end = "terminated" if terminated else "truncated" if truncated else "goes on"
        begun = "" if whole or not (terminated or truncated) else ", first steps not stored"
        rows.append((str(i), str(env), f"{length:,}", number(total), end + begun))
    return rows


# -- steps -------------------------------------------------------------------------------------------------------------

EPISODES = 4
"""The most episodes that a page shows step by step, besides one that was asked for."""

STEPS = 300
"""The most steps of each."""

BEFORE = 50
"""The steps before one that the audit names, where an episode is too long for the page."""

IMAGE_BYTES = 8 << 20
"""The most bytes of images. What comes after them is left out."""

WIDEST = 64
"""A field of more numbers than this is not written out, and not drawn as lines."""

CHANNELS = 1, 3, 4


def shown_episodes(inspection: Any, report: Report, chosen: int | None) -> list[dict[str, Any]]:
    """The steps of some episodes: those that the audit names, the best, the worst, and the last one."""
    marks: dict[int, list[str]] = {}
    for finding in report.findings:
        for row in rows_of(inspection.experience, finding.examples).tolist():
            marks.setdefault(row, []).append(finding.rule)
    left, shown = IMAGE_BYTES, list[dict[str, Any]]()
    for name, start, before, steps in _stretches(inspection, sorted(marks), chosen):
        columns = inspection.steps(start, start + min(steps - before, STEPS))
        pictures: dict[str, list[str]] = {}
        for field, leaf in columns.items():
            images = pictures_of(leaf)
            if images is None:
                continue
            pictures[field] = []
            for image in images:
                if left <= 0:
                    break
                pictures[field].append(_png(image))
                left -= len(pictures[field][-1])
        length = min([len(columns["reward"]), *map(len, pictures.values())])
        if not length:
            continue
        shown.append({
            "name": name,
            "steps": steps,
            "first": start, "before": before, "pictures": pictures,
            "rewards": [float(x) for x in columns["reward"][:length].reshape(-1)],
            "values": {printable(field): _written(leaf[:length]) for field, leaf in columns.items()
                       if field != "step" and leaf[0].size <= WIDEST},
            "marks": {row: rules for row, rules in marks.items() if start <= row < start + length},
        })  # fmt: skip
    return shown


def _stretches(inspection: Any, named: list[int], chosen: int | None) -> list[tuple[str, int, int, int]]:
    """Episodes to show: name, the row to begin with, how many steps lie before that, and how many there are."""
    table = inspection.episodes
    starts, lengths, whole = table["start"], table["length"], np.flatnonzero(table["complete"])
    if not len(starts):
        return [("in no order", 0, 0, inspection.num_steps)] if inspection.num_steps else []
    notes: dict[int, tuple[str, int]] = {} if chosen is None else {chosen: ("", 0)}
    for row in named:
        episode = int(np.searchsorted(starts, row, "right")) - 1
        notes.setdefault(episode, (", named by the audit", row - int(starts[episode])))
    if len(whole):
        returns = np.nan_to_num(table["return"][whole])
        notes.setdefault(int(whole[returns.argmax()]), (", highest return", 0))
        notes.setdefault(int(whole[returns.argmin()]), (", lowest return", 0))
    notes.setdefault(len(starts) - 1, (", the last one", 0))
    parts: list[tuple[str, int, int, int]] = []
    for episode, (note, at) in list(notes.items())[: EPISODES + (chosen is not None)]:
        start, length = int(starts[episode]), int(lengths[episode])
        before = max(0, at - BEFORE) if length > STEPS else 0
        name = f"{episode:,}{note}, return {number(float(table['return'][episode]))}"
        parts.append((name, start + before, before, length))
    return parts


def _written(leaf: Array) -> list[str]:
    """Each row of a small field as text."""
    if leaf.ndim == 1 and leaf.dtype.kind in "buif":
        return [f"{value:.5g}" if isinstance(value, float) else str(value) for value in leaf.tolist()]
    return [np.array2string(row, precision=4, separator=", ", threshold=WIDEST) for row in leaf]


def rows_of(steps: Experience, places: tuple[int, ...]) -> Ints:
    """The positions of rows that a report names as the source does."""
    place = steps.place
    return np.array(places, np.int64) if place is None else np.flatnonzero(np.isin(place, places))


def pictures_of(leaf: Array) -> Array | None:
    """Images ``[S, H, W]`` or ``[S, H, W, C]`` from bytes, or None. Of a stack of frames the newest is shown."""
    if leaf.dtype != np.uint8 or min(leaf.shape[1:], default=0) < 1 or np.prod(leaf.shape[1:]) <= WIDEST:
        return None
    if leaf.ndim == 4 and leaf.shape[-1] in CHANNELS:
        return leaf if leaf.shape[-1] > 1 else leaf[..., 0]
    if leaf.ndim == 4 and leaf.shape[1] == 3:  # channels first
        return np.moveaxis(leaf, 1, -1)
    return leaf[:, -1] if leaf.ndim == 4 else leaf if leaf.ndim == 3 else None


def _png(image: Array) -> str:
    """An image ``[H, W]`` or ``[H, W, C]`` as a link that holds it."""
    with needed("a page with images needs Pillow: pip install 'relive[look]'"):
        from PIL import Image
    memory = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(memory, "PNG")
    return f"data:image/png;base64,{b64encode(memory.getvalue()).decode()}"
