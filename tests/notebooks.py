"""Runs the notebooks of docs/notebooks, and writes what their cells show into them.

``make notebooks``, which is ``python tests/notebooks.py``, runs all and rewrites their outputs. Names of notebooks
choose some of them. Jupyter is not needed: a cell shows what it prints, the value of its last line, and its figures,
as it would there.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import linecache
import os
import sys
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parents[1] / "docs" / "notebooks"

Cell = dict[str, Any]
Output = dict[str, Any]


class CellError(Exception):
    """A cell of a notebook raised an error, which is the cause of this one."""


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, notebook: dict[str, Any]) -> None:
    """Write it as Jupyter does, so that saving it there changes nothing."""
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def code_cells(notebook: dict[str, Any]) -> list[Cell]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(path: Path) -> list[list[Output]]:
    """The outputs of each code cell, run from top to bottom in one namespace, in this process."""
    names: dict[str, Any] = {"__name__": "__main__"}
    return [
        run_cell("".join(cell["source"]), names, f"{path.name}, code cell {number}", number)
        for number, cell in enumerate(code_cells(read(path)), start=1)
    ]


def run_cell(source: str, names: dict[str, Any], where: str, number: int) -> list[Output]:
    """What one cell shows: text, errors' text, the value of its last line, figures."""
    body = ast.parse(source, where).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    linecache.cache[where] = len(source), None, source.splitlines(keepends=True), where  # for tracebacks
    out, err, value = io.StringIO(), io.StringIO(), None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            exec(compile(ast.Module(body, []), where, "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), where, "eval"), names)
    except Exception as error:
        line = next((f.tb_lineno for f in frames(error) if f.tb_frame.f_code.co_filename == where), 0)
        raise CellError(f"{where}, line {line}: {type(error).__name__}: {error}") from error
    streams = (("stdout", out.getvalue()), ("stderr", err.getvalue()))
    shown: list[Output] = [
        {"name": name, "output_type": "stream", "text": text.splitlines(keepends=True)}
        for name, text in streams
        if text
    ]
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        html = getattr(value, "_repr_html_", lambda: None)()
        data |= {"text/html": html.splitlines(keepends=True)} if html else {}
        shown.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return shown + figures()


def frames(error: BaseException) -> list[Any]:
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def figures() -> list[Output]:
    """The figures that a cell has drawn, as pictures; they are closed."""
    plt = sys.modules.get("matplotlib.pyplot")
    found: list[Output] = []
    for number in plt.get_fignums() if plt else ():
        figure, file = plt.figure(number), io.BytesIO()
        figure.savefig(file, format="png", dpi=80, metadata={"Software": None})
        size = "x".join(f"{side:.0f}" for side in figure.get_size_inches() * 80)
        data = {
            "image/png": base64.b64encode(file.getvalue()).decode() + "\n",
            "text/plain": [f"<Figure size {size} with {len(figure.axes)} Axes>"],
        }
        found.append({"data": data, "metadata": {}, "output_type": "display_data"})
        plt.close(figure)
    return found


def main(chosen: list[str]) -> None:
    os.environ["MPLBACKEND"] = "Agg"
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if not chosen or path.stem in chosen:
            print(f"{path.name} ...", flush=True)
            notebook = read(path)
            cells = code_cells(notebook)
            for number, (cell, outputs) in enumerate(zip(cells, run(path), strict=True), start=1):
                cell["execution_count"], cell["outputs"] = number, outputs
            write(path, notebook)


if __name__ == "__main__":
    main(sys.argv[1:])
