"""The commands of ``relive``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from ..errors import ReliveError
from .audit import audit as audited
from .findings import Report

__all__ = ["app"]

app = typer.Typer(help="Look at stored experience.", no_args_is_help=True, add_completion=False)

CLEAN, FOUND, UNREADABLE = 0, 1, 2
"""Exit statuses."""


@app.callback()
def commands() -> None:
    """Look at stored experience."""


@app.command()
def audit(
    path: Annotated[Path, typer.Argument(help="a save of a ReplayBuffer or RolloutBuffer, or an .npz of arrays")],
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
    max_episode_steps: Annotated[int | None, typer.Option(help="the time limit of the env, if you know it")] = None,
) -> None:
    """Report what would teach wrongly: exit status 0 if nothing is, 1 if something is, 2 if PATH cannot be read."""
    try:
        report = audited(_source(path), max_episode_steps=max_episode_steps)
    except (ReliveError, OSError, ValueError) as error:
        typer.echo(f"relive audit: {error}", err=True)
        raise typer.Exit(UNREADABLE) from error
    if as_json:
        typer.echo(report.to_json())
    else:
        show(report, Console())
    raise typer.Exit(CLEAN if report.ok else FOUND)


def _source(path: Path) -> Any:
    """A save, or the arrays of an .npz file, none of which is ever unpickled."""
    if path.suffix != ".npz":
        return path
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


COLORS = {"certain": "bold red", "likely": "red", "possible": "yellow"}


def show(report: Report, console: Console) -> None:
    """Print a report as a table."""
    console.print(f"{report.source}: {report.rows:,} steps, {report.episodes:,} episodes ended", highlight=False)
    for lack in report.lacks:
        console.print(f"not looked at: {lack}", style="dim")
    if not report.findings:
        console.print("nothing found that would teach wrongly", style="green")
        return
    table = Table("rule", "sure", "rows", "share", "what, and how to mend it", show_lines=True)
    for finding in report.findings:
        what = f"{finding.what}\n[dim]{finding.mend}[/dim]"
        color = COLORS[finding.sure]
        table.add_row(finding.rule, f"[{color}]{finding.sure}[/]", f"{finding.rows:,}", f"{finding.share:.1%}", what)
    console.print(table)
