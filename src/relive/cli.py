"""The commands of ``relive``."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from .errors import ParameterError, ReliveError
from .exchange.convert import READERS, WRITERS, source_of
from .exchange.convert import convert as converted
from .look.audit import audit as audited
from .look.doctor import Examination, examine, in_words
from .look.experience import number, plain
from .look.findings import Report
from .look.inspection import Inspection, export
from .look.inspection import inspect as inspected
from .look.page import page
from .memory.estimate import readable
from .names import version
from .printable import brief, printable
from .steps.arrays import Array

app: typer.Typer = typer.Typer(
    help="Look at stored experience, or at this machine.", no_args_is_help=True, add_completion=False
)

PATH = (
    "a save of a ReplayBuffer or RolloutBuffer, a replay in files, open or not, an .npz file of arrays, "
    "or what convert reads: FORMAT:WHERE, or hf://USER/SET"
)

LONGEST = 1000
"""The most characters of a name or a sentence that are printed."""

CLEAN, FOUND, UNREADABLE = 0, 1, 2
"""Exit statuses."""


def tell_version(wanted: bool) -> None:
    """Print the version, and end the command."""
    if wanted:
        typer.echo(f"relive {version()}")
        raise typer.Exit


@app.callback()
def commands(
    _: Annotated[
        bool, typer.Option("--version", help="print the version", callback=tell_version, is_eager=True)
    ] = False,
) -> None:
    """Look at stored experience, and at the machine."""
    for stream in (sys.stdout, sys.stderr):  # a terminal may lack the letters of a name
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def tell(text: str, *, err: bool = False) -> None:
    """Print a line. Names in it may come from files."""
    typer.echo(printable(brief(text, LONGEST)), err=err)


def refuse(command: str, error: Exception) -> NoReturn:
    """Say why a command cannot do its work, and end it."""
    why = str(error)
    typer.echo(f"relive {command}: {why if isinstance(error, ReliveError) else printable(why)}", err=True)
    raise typer.Exit(UNREADABLE) from error


@app.command()
def audit(
    path: Annotated[str, typer.Argument(help=PATH)],
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
    max_episode_steps: Annotated[int | None, typer.Option(help="the time limit of the env, if you know it")] = None,
) -> None:
    """Report mistakes in stored steps. Exit status: 0 if there is none, 1 if there is, 2 if PATH cannot be read."""
    try:
        report = audited(source_of(path), max_episode_steps=max_episode_steps)
    except (ReliveError, OSError, ValueError, ModuleNotFoundError) as error:
        refuse("audit", error)
    if as_json:
        tell_json(report.to_json())
    else:
        show(report, Console())
    raise typer.Exit(CLEAN if report.ok else FOUND)


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help=PATH)],
    episode: Annotated[int | None, typer.Option(help="also print the steps of this episode, from 0")] = None,
    steps: Annotated[str | None, typer.Option(help="also print the steps A:B, from A up to, not including, B")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw the distributions into this file (.pdf, .png, .svg)")] = None,
    rerun: Annotated[Path | None, typer.Option(help="write a recording for the Rerun viewer (.rrd)")] = None,
    html: Annotated[Path | None, typer.Option(help="write a page that opens offline")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
) -> None:
    """Show what is stored. Exit status: 0, or 2 if PATH cannot be read or has no such steps."""
    try:
        inspection = inspected(source_of(path))
        chosen = _chosen(inspection, episode, steps)
        if plot is not None:
            inspection.plot(plot)
        if html is not None:
            html.write_text(page(inspection, audited(inspection.experience), episode), encoding="utf-8")
        if rerun is not None:
            for name in export(inspection, rerun, audited(inspection.experience)):
                tell(f"relive inspect: field '{name}' has no picture in Rerun and was left out", err=True)
    except (ReliveError, OSError, ValueError, ModuleNotFoundError) as error:
        refuse("inspect", error)
    if as_json:
        rows = {name: plain(column.tolist()) for name, column in chosen.items()}
        tell_json(json.dumps(inspection.to_dict() | ({"chosen": rows} if rows else {}), allow_nan=False))
    else:
        show_inspection(inspection, chosen, Console())


COLORS = {"certain": "bold red", "likely": "red", "possible": "yellow"}


def show(report: Report, console: Console) -> None:
    """Print a report."""
    console.print(clean(f"{report.source}: {report.rows:,} steps, {report.episodes:,} episodes ended"))
    for lack in report.lacks:
        console.print(clean(f"not looked at: {lack}"), style="dim")
    console.print(clean(report.summary), style="dim" if report.findings else "green", highlight=False)
    for finding in report.findings:
        color = COLORS[finding.sure]
        console.print(f"\n[{color}]{finding.sure}[/]  [bold]{finding.rule}[/]: {finding.extent}", highlight=False)
        for sentence in (finding.what, f"mend: {finding.mend}"):
            console.print(Padding(clean(sentence), (0, 0, 0, 4)))


def clean(text: str) -> Text:
    """Text for the console. Rich sees no markup and no emoji in it, and the terminal no control characters."""
    return Text(printable(brief(text, LONGEST)))


def tell_json(text: str) -> None:
    """Print JSON, which escapes all that a terminal acts on but one character."""
    typer.echo(text.replace("\x7f", r"\u007f"))


def _chosen(inspection: Inspection, episode: int | None, steps: str | None) -> dict[str, Array]:
    """The steps that the options name; none without them.

    Raises:
        ParameterError: there are no such steps, or both options are given.
    """
    if episode is not None and steps is not None:
        raise ParameterError("expected --episode or --steps, got both; leave one out")
    if episode is not None:
        return inspection.episode(episode)
    if steps is None:
        return {}
    first, colon, last = steps.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal()):
        raise ParameterError(f"--steps: expected A:B, such as 100:120, got {steps!r}")
    return inspection.steps(int(first), int(last))


def show_inspection(inspection: Inspection, chosen: dict[str, Array], console: Console) -> None:
    """Print an inspection as tables."""
    console.print(clean(inspection.source), style="bold")
    facts = Table.grid(padding=(0, 2))  # a long line goes on below its beginning
    for name, fact in inspection.facts().items():
        facts.add_row(f"  {name}", clean(fact))
    for lack in inspection.lacks:
        facts.add_row("  not known", clean(lack), style="dim")
    console.print(facts, highlight=False)
    console.print(_fields(inspection))
    if chosen:
        rows = Table(*(Column(clean(name), overflow="fold") for name in chosen), box=SIMPLE_HEAD, pad_edge=False)
        for row in zip(*chosen.values(), strict=True):
            rows.add_row(*(clean(np.array2string(x, precision=3, threshold=8, separator=" ")) for x in row))
        console.print(rows)


def _fields(inspection: Inspection) -> Table:
    """The fields as a table. Numbers that are not finite get a column only if there are any."""
    unclean = any(field.not_finite for field in inspection.fields)
    names = ("field", "dtype", "shape", "bytes", "min", "mean", "max", *(["not finite"] if unclean else []))
    table = Table(*(Column(name, overflow="fold") for name in names), box=SIMPLE_HEAD, pad_edge=False)
    for field in inspection.fields:
        numbers = (number(value) for value in (field.min, field.mean, field.max))
        shape = "×".join(map(str, field.shape)) or "-"
        missing = [f"{field.not_finite:,}"] if unclean else []
        table.add_row(clean(field.name), clean(field.dtype), shape, readable(field.nbytes), *numbers, *missing)
    return table


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False) -> None:
    """Show versions, threads, memory and GPU, what slows relive down on this machine, and what to do about it."""
    found = examine()
    if as_json:
        tell_json(json.dumps(found.to_dict(), indent=2))
    else:
        show_examination(found, Console())


def show_examination(found: Examination, console: Console) -> None:
    """Print an examination."""
    for part, facts in in_words(found).items():
        console.print(part, style="bold", highlight=False)
        table = Table.grid("name", Column("fact", overflow="fold"), padding=(0, 2))
        for name, fact in facts.items():
            table.add_row(f"  {name}", clean(fact))
        console.print(table, highlight=False)
    if not found.advice:
        console.print("\nnothing was found that slows relive down here", style="green", highlight=False)
    for advice in found.advice:
        console.print(f"\n[yellow]slow[/]  [bold]{advice.rule}[/]", highlight=False)
        for sentence in (advice.what, advice.do):
            console.print(Padding(clean(sentence), (0, 0, 0, 4)), highlight=False)


SIDE = "FORMAT:WHERE, or a path"
SOURCE = "FORMAT:WHERE, a path, or hf://USER/SET"
FROM = f"the format of SOURCE, if it is not to be found out: {', '.join(READERS)}"
TO = f"the format of TARGET: {', '.join(WRITERS)}; a save of relive without it"
DROP = "leave out episodes that still ran, were interrupted, or lack their first steps"


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help=SOURCE)],
    target: Annotated[str, typer.Argument(help=SIDE)],
    source_format: Annotated[str | None, typer.Option("--from", help=FROM)] = None,
    target_format: Annotated[str | None, typer.Option("--to", help=TO)] = None,
    images: Annotated[bool, typer.Option("--images", help="read and write the pictures of LeRobot data sets")] = False,
    drop_incomplete: Annotated[bool, typer.Option("--drop-incomplete", help=DROP)] = False,
) -> None:
    """Read experience in one format and write it in another. Exit status: 0, or 2 if that cannot be done."""
    try:
        log = converted(
            source, target, source_format=source_format, target_format=target_format, images=images,
            drop_incomplete=drop_incomplete,
        )  # fmt: skip
    except (ReliveError, OSError, ValueError, ModuleNotFoundError) as error:
        refuse("convert", error)
    tell(f"{len(log):,} steps of {log.source}")
    for lack in log.lacks:
        tell(f"not there: {lack}")
