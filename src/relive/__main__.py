"""The command line: ``relive audit``, ``inspect``, ``convert`` and ``doctor``, also as ``python -m relive``."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run the command line; without its packages, say how to install them."""
    try:
        from .cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f"relive's command line needs the package {error.name}: pip install 'relive[look]'", file=sys.stderr)  # noqa: T201 - a command's message
        sys.exit(2)
    gc.freeze()  # modules live as long as the process: to search them for garbage as it ends takes half a second
    app()


if __name__ == "__main__":
    main()
