"""The steps of an inspection as a recording for the Rerun viewer."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import numpy as np

from ..collect.progress import progress_bar
from ..errors import ParameterError
from ..printable import printable
from ..steps.arrays import Array
from .findings import Finding, Report
from .inspection import Inspection, leaves_of_steps

__all__ = ["export"]


WIDEST = 64
"""A field of more numbers than this is not drawn as lines."""


COLORS = {1: "L", 3: "RGB", 4: "RGBA"}
"""Channels of an image -> their names."""


LEVELS = {"certain": "ERROR", "likely": "WARN", "possible": "INFO"}
"""How sure a finding is -> the level of its line in the log."""


def export(found: Inspection, path: str | os.PathLike[str], report: Report | None = None) -> tuple[str, ...]:
    """Write every step to a Rerun recording: ``rerun FILE`` opens it.

    Each env has its own entities: ``env_0/obs``, ``env_0/action``, ``env_0/reward`` and so on. Fields of up to 64
    numbers are lines, and fields of bytes with two or three axes are images. There are three timelines:
    ``write_order``, the order in which the steps were completed; ``episode``, the row of :attr:`Inspection.episodes`;
    and ``step``, the index within the episode.

    Args:
        found: what to draw.
        path: the file, which ends in ``.rrd``. It is replaced.
        report: an audit of the same source. Each finding becomes a line of the log at the rows that it names.

    Returns:
        the fields that were left out, since the viewer has no picture for them.

    Raises:
        ModuleNotFoundError: rerun-sdk is not installed; ``pip install 'relive[rerun]'``.
        ParameterError: the file has another ending.
        OSError: the file cannot be written.
    """
    if os.path.splitext(path)[1] != ".rrd":
        raise ParameterError(f"rerun: expected a file that ends in .rrd, got '{os.fspath(path)}'")
    try:
        rerun: Any = import_module("rerun")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("rerun needs rerun-sdk: pip install 'relive[rerun]'", name=error.name) from error
    recording = rerun.RecordingStream("relive", recording_id=found.source)
    try:
        recording.save(path)
    except RuntimeError as error:
        raise OSError(f"rerun: cannot write '{os.fspath(path)}' ({error})") from error
    times, leaves, left_out = timelines(found), leaves_of_steps(found.experience), list[str]()
    with progress_bar(len(leaves), None, "recording", "fields") as tick:
        for leaf_path, leaf in leaves.items():
            place = "/".join(rerun.escape_entity_path_part(printable(part)) for part in leaf_path)
            if not _send(rerun, recording, place, leaf, found.experience.env, times):
                left_out.append("/".join(leaf_path))
            tick()
    for finding in report.findings if report is not None else ():
        _log_finding(rerun, recording, finding, _at(rerun, times, _rows_of(found, finding.examples)))
    recording.disconnect()
    return tuple(left_out)


def _send(rerun: Any, recording: Any, place: str, leaf: Array, env: Array, times: dict[str, Array]) -> bool:
    """Write a field ``[S, ...]`` env by env. Returns False, and writes nothing, if there is no picture for it."""
    pictures = _pictures(leaf)
    if pictures is None and not _are_lines(leaf):
        return False
    for number in np.unique(env).tolist():
        rows = np.flatnonzero(env == number)
        if pictures is None:
            size = [leaf[0].size] * len(rows)
            columns = rerun.Scalars.columns(scalars=leaf[rows].reshape(-1).astype(np.float64)).partition(size)
        else:
            columns = rerun.Image.columns(buffer=pictures[rows].reshape(len(rows), -1))
            fields = rerun.Image.from_fields(format=_format(rerun, pictures))
            recording.log(f"env_{number}/{place}", fields, static=True, strict=True)
        recording.send_columns(f"env_{number}/{place}", _at(rerun, times, rows), columns, strict=True)
    return True


def timelines(found: Inspection) -> dict[str, Array]:
    """Timeline -> the time of each step, int64 ``[S]``."""
    steps, table, count = found.experience, found.episodes, np.arange(found.num_steps)
    times = {"write_order": count if steps.age is None else steps.age.max(initial=0) - steps.age}
    if len(table["start"]):
        episode = np.repeat(np.arange(len(table["start"])), table["length"])
        times |= {"episode": episode, "step": count - table["start"][episode] if steps.step is None else steps.step}
    return times


def _at(rerun: Any, times: dict[str, Array], rows: Array) -> list[Any]:
    """The times of some steps, as Rerun takes them."""
    return [rerun.TimeColumn(name, sequence=column[rows]) for name, column in times.items()]


def _rows_of(found: Inspection, places: tuple[int, ...]) -> Array:
    """The positions of rows that a report names as the source does."""
    place = found.experience.place
    return np.array(places, np.int64) if place is None else np.flatnonzero(np.isin(place, places))


def _log_finding(rerun: Any, recording: Any, finding: Finding, times: list[Any]) -> None:
    """One finding, at the rows that it names; at all times if it names none."""
    text, level, count = f"{finding}", LEVELS[finding.sure], len(finding.examples)
    if count:
        lines = rerun.TextLog.columns(text=[text] * count, level=[level] * count)
        recording.send_columns("audit", times, lines, strict=True)
    else:
        recording.log("audit", rerun.TextLog(text, level=level), static=True, strict=True)


def _are_lines(leaf: Array) -> bool:
    """Whether a field can be drawn as a few lines."""
    return leaf.dtype.kind in "biuf" and 0 < int(np.prod(leaf.shape[1:])) <= WIDEST


def _pictures(leaf: Array) -> Array | None:
    """Images ``[S, H, W]`` or ``[S, H, W, C]`` from bytes, or None. Of a stack of frames the newest is shown."""
    if leaf.dtype != np.uint8 or min(leaf.shape[1:], default=0) < 1 or np.prod(leaf.shape[1:]) <= WIDEST:
        return None
    if leaf.ndim == 4 and leaf.shape[-1] in COLORS:
        return leaf if leaf.shape[-1] > 1 else leaf[..., 0]
    if leaf.ndim == 4 and leaf.shape[1] == 3:  # channels first
        return np.moveaxis(leaf, 1, -1)
    return leaf[:, -1] if leaf.ndim == 4 else leaf if leaf.ndim == 3 else None


def _format(rerun: Any, pictures: Array) -> Any:
    """The format of images ``[S, H, W]`` or ``[S, H, W, C]``, as Rerun needs it."""
    height, width, channels = (*pictures.shape[1:], 1)[:3]
    colors = COLORS[channels]
    return rerun.components.ImageFormat(width=width, height=height, color_model=colors, channel_datatype="U8")
