"""The command ``relive convert``, beside those of :mod:`relive.look.cli`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import ReliveError
from ..look.cli import app, refuse, tell
from .convert import READERS, WRITERS
from .convert import convert as converted

__all__ = ["app"]

SIDE = "FORMAT:WHERE, or a path"
FROM = f"the format of SOURCE, if it is not to be found out: {', '.join(READERS)}"
TO = f"the format of TARGET: {', '.join(WRITERS)}; a save of relive without it"


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help=SIDE)],
    target: Annotated[str, typer.Argument(help=SIDE)],
    source_format: Annotated[str | None, typer.Option("--from", help=FROM)] = None,
    target_format: Annotated[str | None, typer.Option("--to", help=TO)] = None,
) -> None:
    """Read experience in one format and write it in another. Exit status: 0, or 2 if that cannot be done."""
    try:
        log = converted(source, target, source_format=source_format, target_format=target_format)
    except (ReliveError, OSError, ValueError, ModuleNotFoundError) as error:
        refuse("convert", error)
    tell(f"{len(log):,} steps of {log.source}")
    for lack in log.lacks:
        tell(f"not there: {lack}")
