"""inspect: a summary of stored experience, and what can be made of it.

In order: the summary; a figure; a recording for the Rerun viewer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..batches import as_dataframe
from ..collect.progress import progress_bar
from ..errors import ParameterError
from ..files.disk import usable
from ..memory.estimate import readable
from ..names import needed
from ..parameters import is_count
from ..printable import printable
from ..steps.arrays import Array
from ..steps.schema import Path, dotted
from .experience import (
    Distribution,
    Experience,
    FieldFacts,
    distribution,
    envs,
    episodes_of,
    facts_of,
    in_words,
    number,
    plain,
    spreads_of,
)
from .findings import Finding, Report
from .page import WIDEST, part_of_inspection, pictures_of, rows_of
from .readers import experience_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def inspect(source: object) -> Inspection:
    """Look at stored experience: fields, episodes, distributions of returns, lengths, ages, priorities and draws.

    Nothing is changed. The newest step of a running episode is not a transition yet, so it is not among the steps.

    Args:
        source: a :class:`relive.ReplayBuffer` or :class:`relive.RolloutBuffer`; a :class:`relive.Monitor`, which also
            knows how often each step was drawn; the path of a save; or any other source of :func:`relive.audit`. Arrays
            are taken to begin with the first step of an episode.

    Raises:
        FieldError, ShapeError, FileFormatError: the source cannot be read.
    """
    steps = experience_of(source)
    table = episodes_of(steps)
    ended = table["terminated"] | table["truncated"]
    cut = table["truncated"] & ~table["terminated"]
    known = steps.truncated is not None and bool(ended.any())
    spreads = spreads_of(steps, table)
    draws = spreads.draws
    lacks = steps.lacks + (NOT_COUNTED if steps.age is not None and draws is None else ())
    return Inspection(
        source=printable(steps.source),
        num_steps=len(steps),
        num_envs=len(np.unique(steps.env)),
        fields=tuple(facts_of(path, leaf, steps.dtypes.get(path)) for path, leaf in leaves_of_steps(steps).items()),
        episodes=table,
        truncated_share=float(cut.sum() / ended.sum()) if known else None,
        never_sampled=(len(draws) - np.count_nonzero(draws)) / len(draws) if draws is not None and len(draws) else None,
        lacks=tuple(map(printable, lacks)),
        experience=steps,
        **{name: distribution(numbers) for name, numbers in spreads._asdict().items()},
    )


NOT_COUNTED = ("how often each step was drawn, which relive.Monitor(replay, counts=True) counts",)
"""The entry of ``lacks`` for a replay without a monitor that counts."""


@dataclass(frozen=True)
class Inspection:
    """The result of :func:`relive.inspect`.

    Args:
        source: the name of the source.
        num_steps: how many transitions there are.
        num_envs: from how many envs they are.
        fields: facts about each leaf.
        episodes: a table: column -> ``[E]``; ``env``, ``start``, ``length``, ``return``, ``terminated``, ``truncated``
            and ``complete``. :func:`relive.look.experience.episodes_of` explains the columns.
        returns: the returns of the complete episodes, without a discount; None if there is none.
        lengths: the lengths of the complete episodes, in steps; None if there is none.
        truncated_share: the share of the ended episodes that were truncated and did not terminate; None if none ended,
            or if the source does not keep it.
        ages: the age of a step is how many transitions were completed later; None if the source does not keep it.
        priorities: the priorities of a prioritized sampler; None if the source has none.
        draws: how often each step that can be drawn was drawn, since a monitor began to count; None if nobody counted.
        never_sampled: the share of these steps that were never drawn; None if nobody counted.
        lacks: sentences on what the source does not keep.
    """

    source: str
    num_steps: int
    num_envs: int
    fields: tuple[FieldFacts, ...]
    episodes: dict[str, Array]
    returns: Distribution | None
    lengths: Distribution | None
    truncated_share: float | None
    ages: Distribution | None
    priorities: Distribution | None
    draws: Distribution | None
    never_sampled: float | None
    lacks: tuple[str, ...]
    experience: Experience = field(repr=False)
    """The steps themselves."""

    @property
    def nbytes(self) -> int:
        """Bytes of all fields of all steps."""
        return sum(facts.nbytes for facts in self.fields)

    def steps(self, start: int, stop: int) -> dict[str, Array]:
        """Steps from ``start`` up to ``stop``: leaf -> ``[K, ...]``, also their position ``step`` and their ``env``.

        Raises:
            ParameterError: not ``0 <= start < stop <= num_steps``.
        """
        if not (is_count(start) and is_count(stop) and start < stop <= self.num_steps):
            raise ParameterError(
                f"steps: expected 0 <= start < stop <= {self.num_steps}, the number of steps, got {start}:{stop}"
            )
        rows = slice(start, stop)
        return {dotted(path): column[rows] for path, column in self._columns().items()}

    def episode(self, number: int) -> dict[str, Array]:
        """The steps of row ``number`` of :attr:`episodes`, as :meth:`steps` gives them.

        Raises:
            ParameterError: there is no such episode.
        """
        count = len(self.episodes["start"])
        if not (is_count(number) and number < count):
            raise ParameterError(f"episode: expected a number from 0 up to, not including, {count}, got {number!r}")
        start = int(self.episodes["start"][number])
        return self.steps(start, start + int(self.episodes["length"][number]))

    def to_pandas(self) -> Any:
        """All steps as a ``pandas.DataFrame``: their ``step`` and ``env``, and a column for each number of a field.

        Raises:
            ModuleNotFoundError: pandas is not installed; ``pip install 'relive[pandas]'``.
        """
        return as_dataframe(self._columns())

    def _columns(self) -> dict[Path, Array]:
        """The position of each step, its env, its draws if they are known, and its fields ``[S, ...]``."""
        steps = self.experience
        draws: dict[Path, Array] = {} if steps.draws is None else {("draws",): steps.draws}
        return {("step",): np.arange(self.num_steps), ("env",): steps.env} | draws | leaves_of_steps(steps)

    def _repr_html_(self) -> str:
        return part_of_inspection(self)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw returns, lengths, rewards, and ages or priorities; if a monitor counted, all of these and the draws.

        Args:
            path: the file to write. Its ending names its format. None writes no file.

        Returns:
            the ``matplotlib.figure.Figure``, which a notebook shows.

        Raises:
            ModuleNotFoundError: matplotlib is not installed; ``pip install 'relive[plot]'``.
            ParameterError: ``path`` is no path, or has no ending, or one of no format.
        """
        file = None if path is None else usable(path)
        figure = figure_of(self)
        if file is not None:
            known = sorted(figure.canvas.get_supported_filetypes())
            if file.suffix.removeprefix(".") not in known:
                raise ParameterError(
                    f"plot: expected a file that ends in .pdf, .png, .svg or one of {', '.join(known)}, got '{path}'"
                )
            figure.savefig(file)
        return figure

    def facts(self) -> dict[str, str]:
        """The summary in words: name -> fact."""
        columns = self.episodes
        ended = int((columns["terminated"] | columns["truncated"]).sum())
        counts = f"{len(columns['start']):,}, {ended:,} ended, {int(columns['complete'].sum()):,} stored as a whole"
        facts = {
            "steps": f"{self.num_steps:,} of {envs(self.num_envs)}, {readable(self.nbytes)}",
            "episodes": counts if self.experience.ordered else "none: the transitions have no order",
        }
        if self.truncated_share is not None:
            facts["truncated"] = f"{self.truncated_share:.1%} of the episodes that ended"
        named = {"returns": self.returns, "lengths": self.lengths, "ages": self.ages, "priorities": self.priorities}
        facts |= {name: in_words(numbers) for name, numbers in named.items() if numbers is not None}
        if self.draws is not None:
            facts["draws"] = f"{in_words(self.draws)}; {self.never_sampled:.1%} were never drawn"
        return facts

    def __str__(self) -> str:
        lines = [self.source, *(f"  {name:<10}  {fact}" for name, fact in self.facts().items())]
        lines += [f"  {printable(facts.name)}: {facts.dtype}{list(facts.shape) if facts.shape else ''}, "
                  f"{number(facts.min)} to {number(facts.max)}" for facts in self.fields]  # fmt: skip
        return "\n".join(lines + [f"  not known: {lack}" for lack in self.lacks])

    def to_dict(self) -> dict[str, Any]:
        """The inspection without the steps themselves, as plain dicts, lists, numbers and strings."""
        names = ("source", "num_steps", "num_envs", "nbytes", "returns", "lengths", "truncated_share", "ages",
                 "priorities", "draws", "never_sampled", "lacks")  # fmt: skip
        fields = [asdict(facts) for facts in self.fields]
        table = {name: column.tolist() for name, column in self.episodes.items()}
        return plain({name: getattr(self, name) for name in names} | {"fields": fields, "episodes": table})

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON. Numbers that are NaN or infinite are null."""
        return json.dumps(self.to_dict(), allow_nan=False)


def leaves_of_steps(steps: Experience) -> dict[Path, Array]:
    """All leaves of the steps ``[S, ...]`` that the source stores once per step."""
    return {path: leaf for path, leaf in steps.leaves.items() if path[0] != "next_obs"}


# -- a figure ----------------------------------------------------------------------------------------------------------

DARK, BLUE, RED, GREY = "#1f4e79", "#5b9bd5", "#c0504d", "#7f7f7f"


Panel: TypeAlias = "Callable[[Axes], None]"
"""Draws one part of the figure."""


def figure_of(inspection: Inspection) -> Figure:
    """Returns, lengths, rewards, and ages, priorities or draws of an inspection as a Matplotlib figure.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    with needed("plot needs matplotlib: pip install 'relive[plot]'"):
        from matplotlib.figure import Figure  # takes a second to import
    steps, table = inspection.experience, inspection.episodes
    returns, _, ages, priorities, draws = spreads_of(steps, table)
    panels: list[Panel] = [
        partial(_returns, returns=returns),
        partial(_lengths, table=table),
        partial(_histogram, numbers=steps.reward, name="reward of a step", of="steps"),
    ]
    weighed: list[Panel] = []
    if priorities is not None and len(priorities):
        weighed = [partial(_priorities, priorities=priorities)]
    by_age: list[Panel] = []
    if ages is not None:
        by_age = [partial(_histogram, numbers=ages, name="age: transitions completed later", of="steps")]
    if draws is not None and ages is not None and steps.draws is not None:
        drawn = partial(_draws_by_age, draws=draws, ages=ages[steps.draws >= 0])
        panels += [*by_age, *(weighed or [drawn]), partial(_draws, draws=draws)]
    else:  # if nothing is known about sampling: the returns once more, as a distribution
        panels += (
            weighed or by_age or [partial(_histogram, numbers=returns, name="return of a whole episode", of="episodes")]
        )
    columns = len(panels) // 2
    figure = Figure(figsize=(4 * columns, 5.4), dpi=200, layout="constrained")
    for axes, panel in zip(figure.subplots(2, columns).flat, panels, strict=True):
        panel(axes)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{inspection.num_steps:,} steps", x=0.01, ha="left", fontsize=11)
    return figure


def _returns(axes: Axes, returns: Array) -> None:
    """The return of each whole episode, in the order of storage."""
    axes.scatter(np.arange(len(returns)), returns, s=8, color=DARK, alpha=0.5, linewidths=0)
    axes.set(xlabel="whole episode, env by env", ylabel="return")


def _lengths(axes: Axes, table: dict[str, Array]) -> None:
    """The lengths of whole episodes, in one colour for each kind of end."""
    terminated, whole = table["terminated"], table["complete"]
    kinds = {"terminated": whole & terminated, "truncated": whole & ~terminated}
    groups = {name: table["length"][kept] for name, kept in kinds.items() if kept.any()}
    if groups:
        axes.hist(list(groups.values()), bins=30, stacked=True, label=list(groups), color=[BLUE, RED][: len(groups)])
        axes.legend(frameon=False, fontsize=8)
    axes.set(xlabel="length of a whole episode, steps", ylabel="episodes")


def _draws(axes: Axes, draws: Array) -> None:
    """How many steps were drawn 0, 1, 2, ... times, in bins of whole numbers."""
    most = int(draws.max(initial=0))
    width = most // 40 + 1
    axes.hist(draws, bins=(np.arange(0, most + width + 1, width) - 0.5).tolist(), color=BLUE)
    axes.locator_params("x", integer=True)
    axes.set(xlabel="times drawn", ylabel="steps")


def _draws_by_age(axes: Axes, draws: Array, ages: Array) -> None:
    """How often steps of an age were drawn: the mean of each of up to 40 groups of equally many steps."""
    groups = np.array_split(np.argsort(ages, kind="stable"), min(40, max(len(ages), 1)))
    x, y = ([values[group].mean() if len(group) else np.nan for group in groups] for values in (ages, draws))
    axes.plot(x, y, color=DARK, marker="o", markersize=3)
    axes.set(xlabel="age: transitions completed later", ylabel="times drawn, mean")
    axes.set_ylim(bottom=0)


def _priorities(axes: Axes, priorities: Array) -> None:
    """The probability of each transition, the largest first: a flat line is uniform sampling."""
    share = np.sort(priorities)[::-1] / max(priorities.sum(), 1e-300)
    axes.loglog(np.arange(1, len(share) + 1), np.maximum(share, 1e-300), color=DARK, label="prioritized")
    axes.axhline(1 / len(share), color=GREY, linestyle=":", label="uniform")
    axes.legend(frameon=False, fontsize=8)
    axes.set(xlabel="transition, by its priority", ylabel="probability of being drawn")


def _histogram(axes: Axes, numbers: Array, name: str, of: str) -> None:
    """A histogram of the finite numbers."""
    axes.hist(numbers[np.isfinite(numbers)].astype(np.float64), bins=40, color=BLUE)
    axes.set(xlabel=name, ylabel=of)


# -- a recording for Rerun ---------------------------------------------------------------------------------------------

COLORS = {1: "L", 3: "RGB", 4: "RGBA"}
"""Channels of an image -> their names."""

LEVELS = {"certain": "ERROR", "likely": "WARN", "possible": "INFO"}
"""How sure a finding is -> the level of its line in the log."""


def export(inspection: Inspection, path: str | os.PathLike[str], report: Report | None = None) -> tuple[str, ...]:
    """Write every step to a Rerun recording: ``rerun FILE`` opens it.

    Each env has its own entities: ``env_0/obs``, ``env_0/action``, ``env_0/reward`` and so on. Fields of up to 64
    numbers are lines, and fields of bytes with two or three axes are images. There are three timelines:
    ``write_order``, the order in which the steps were completed; ``episode``, the row of :attr:`Inspection.episodes`;
    and ``step``, the index within the episode.

    Args:
        found: the inspection.
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
    with needed("rerun needs rerun-sdk: pip install 'relive[rerun]'"):
        rerun: Any = import_module("rerun")
    recording = rerun.RecordingStream("relive", recording_id=inspection.source)
    try:
        recording.save(path)
    except RuntimeError as error:
        raise OSError(f"rerun: cannot write '{os.fspath(path)}' ({error})") from error
    times, leaves, left_out = timelines(inspection), leaves_of_steps(inspection.experience), list[str]()
    with progress_bar(len(leaves), None, "recording", "fields") as counted:
        for leaf_path, leaf in counted(leaves.items()):
            place = "/".join(rerun.escape_entity_path_part(printable(part)) for part in leaf_path)
            if not _send(rerun, recording, place, leaf, inspection.experience.env, times):
                left_out.append("/".join(leaf_path))
    for finding in report.findings if report is not None else ():
        _log_finding(rerun, recording, finding, _at(rerun, times, rows_of(inspection.experience, finding.examples)))
    recording.disconnect()
    return tuple(left_out)


def _send(rerun: Any, recording: Any, place: str, leaf: Array, env: Array, times: dict[str, Array]) -> bool:
    """Write a field ``[S, ...]`` env by env. Returns False, and writes nothing, if there is no picture for it."""
    pictures, size = pictures_of(leaf), prod(leaf.shape[1:])
    if pictures is None and not (leaf.dtype.kind in "biuf" and 0 < size <= WIDEST):  # a few lines, or nothing
        return False
    for env_number in np.unique(env).tolist():
        rows = np.flatnonzero(env == env_number)
        if pictures is None:
            numbers = leaf[rows].reshape(-1).astype(np.float64)
            columns = rerun.Scalars.columns(scalars=numbers).partition([size] * len(rows))
        else:
            columns = rerun.Image.columns(buffer=pictures[rows].reshape(len(rows), -1))
            height, width, channels = (*pictures.shape[1:], 1)[:3]
            shape = rerun.components.ImageFormat(
                width=width, height=height, color_model=COLORS[channels], channel_datatype="U8"
            )
            fields = rerun.Image.from_fields(format=shape)
            recording.log(f"env_{env_number}/{place}", fields, static=True, strict=True)
        recording.send_columns(f"env_{env_number}/{place}", _at(rerun, times, rows), columns, strict=True)
    return True


def timelines(inspection: Inspection) -> dict[str, Array]:
    """Timeline -> the time of each step, int64 ``[S]``."""
    steps, table, count = inspection.experience, inspection.episodes, np.arange(inspection.num_steps)
    times = {"write_order": count if steps.age is None else steps.age.max(initial=0) - steps.age}
    if len(table["start"]):
        episode = np.repeat(np.arange(len(table["start"])), table["length"])
        times |= {"episode": episode, "step": count - table["start"][episode] if steps.step is None else steps.step}
    return times


def _at(rerun: Any, times: dict[str, Array], rows: Array) -> list[Any]:
    """The times of some steps, as Rerun takes them."""
    return [rerun.TimeColumn(name, sequence=column[rows]) for name, column in times.items()]


def _log_finding(rerun: Any, recording: Any, finding: Finding, times: list[Any]) -> None:
    """One finding, at the rows that it names; at all times if it names none."""
    text, level, count = f"{finding}", LEVELS[finding.sure], len(finding.examples)
    if count:
        lines = rerun.TextLog.columns(text=[text] * count, level=[level] * count)
        recording.send_columns("audit", times, lines, strict=True)
    else:
        recording.log("audit", rerun.TextLog(text, level=level), static=True, strict=True)
