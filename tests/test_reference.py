"""The reference has every public name, with an example, and docstrings tell what each argument is."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from typing import Any

import pytest

import relive
from test_docs import ROOT

REFERENCE = ROOT / "docs" / "reference"
MARK = re.compile(r"^<!-- reference: ([\w.]+)(?:, (alone|again)|, members: ([\w\s]+))? -->$", re.MULTILINE)

FACES = [
    *("cluster", "cluster.distributed", "collect", "errors", "exchange", "look", "returns", "samplers", "views"),
    *sorted(f"compat.{found.name}" for found in pkgutil.iter_modules(relive.compat.__path__) if found.name != "base"),
]
INTERNAL = {
    *("relive.errors", "relive.returns", "relive.__version__"),
    *(f"relive.returns.{name}" for name in ("EPS", "PER_RULE", "scale", "scaled")),
    *(f"relive.compat.velora.{name}" for name in ("checked", "read_files")),
}
"""Modules, and what a face exports for other modules of relive."""

ERRORS = {"relive.ReliveError", *(f"relive.errors.{name}" for name in vars(relive.errors))}
"""Users catch them, and one example at the top of their page shows how."""

MADE = {
    *(
        "relive.Batch",
        "relive.SequenceBatch",
        "relive.collect.CollectStats",
        "relive.look.Inspection",
        "relive.files.SaveHandle",
    ),
    *("relive.compat.velora.BatchExperience", "relive.compat.velora.RolloutBatch"),
    "relive.compat.stable_baselines3.PrioritizedReplayBufferSamples",
    "relive.compat.stable_baselines3.PrioritizedDictReplayBufferSamples",
}
"""What calls return. Nobody makes one, so it has no arguments to tell."""


def exported(module: str) -> list[str]:
    """The names in the ``__all__`` of a module, which is not imported: its library may not be installed."""
    path = ROOT.joinpath("src", *module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return [name for name in vars(import_module(module)) if name[0].isupper()]


def public() -> list[str]:
    """Each public name, where users find it first."""
    flat = [f"relive.{name}" for name in relive.__all__]
    deep = [f"relive.{face}.{name}" for face in FACES for name in exported(f"relive.{face}")]
    short = {name.rpartition(".")[2] for name in flat}
    deep = [name for name in deep if name.rpartition(".")[2] not in short or re.search(r"\.(compat|cluster)\.", name)]
    return [name for name in [*flat, *deep] if name not in INTERNAL and not name.endswith(".Any")]


def marked() -> dict[str, tuple[Path, re.Match[str]]]:
    """Each name that a reference page has, with the page and its mark."""
    pages = sorted(REFERENCE.rglob("*.md"))
    return {mark[1]: (page, mark) for page in pages for mark in MARK.finditer(page.read_text(encoding="utf-8"))}


MARKED = marked()


def value_of(name: str) -> Any:
    try:
        return pkgutil.resolve_name(":".join(name.rsplit(".", 1)))
    except ImportError as error:
        pytest.skip(f"{error}")


def documented(name: str) -> bool:
    """Whether a name has a mark, or stands on its module's page: constants do, and what is made on request."""
    page = REFERENCE.joinpath(*name.split(".")[1:-1]).with_suffix(".md")
    return name in MARKED or (page.exists() and f"`{name.rpartition('.')[2]}`" in page.read_text(encoding="utf-8"))


def test_every_public_name_stands_in_the_reference():
    assert [name for name in public() if not documented(name)] == []


def test_the_reference_has_no_name_that_is_gone():
    gone: list[str] = []
    for name in MARKED:
        module, _, attribute = name.rpartition(".")
        try:
            if not hasattr(import_module(module), attribute):
                gone.append(name)
        except ImportError:  # its library may not be installed
            if attribute not in exported(module):
                gone.append(name)
    assert gone == []


@pytest.mark.parametrize("page", sorted(REFERENCE.rglob("*.md")), ids=lambda page: page.stem)
def test_every_entry_has_an_example(page: Path):
    text = page.read_text(encoding="utf-8")
    marks = [*MARK.finditer(text)]
    ends = [*(mark.start() for mark in marks), len(text)][1:]
    plain = [mark[1] for mark, end in zip(marks, ends, strict=True) if "```python\n" not in text[mark.end() : end]]
    assert [name for name in plain if name not in ERRORS] == []


def told(doc: str) -> set[str]:
    """The arguments in the section ``Args:`` of a docstring."""
    found = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", doc, re.MULTILINE | re.DOTALL)
    entries = re.findall(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):", found[1], re.MULTILINE) if found else []
    return {name.strip(" *") for entry in entries for name in entry.split(",")}


def told_by(value: Any) -> set[str]:
    """The arguments that a function tells, or a class together with the classes that it inherits from."""
    if not isinstance(value, type):
        return told(inspect.getdoc(value) or "")
    return set().union(*(told(cleandoc(base.__doc__ or "")) for base in value.__mro__ if base is not object))


def arguments(value: Any) -> set[str]:
    try:
        given = inspect.signature(value).parameters
    except ValueError:
        return set()
    refused = {name for name, parameter in given.items() if parameter.annotation == "NoReturn"}
    return set(given) - refused - {"self", "cls", "_"}


def test_arguments_are_read_from_docstrings():
    assert told("A.\n\nArgs:\n    a, b: two.\n    *c: many,\n        d: not one.\n\nRaises:\n    E: x.") == {
        "a",
        "b",
        "c",
    }


CALLED = [name for name in MARKED if name not in MADE | ERRORS]


@pytest.mark.parametrize("name", CALLED)
def test_the_docstring_tells_every_argument(name: str):
    value = value_of(name)
    if getattr(value, "_is_protocol", False) or (isinstance(value, type) and issubclass(value, Enum | Exception)):
        return
    assert arguments(value) - told_by(value) == set()


def members(name: str) -> Iterator[tuple[str, Any]]:
    """The methods that the reference shows of a class."""
    value, mark = value_of(name), MARKED[name][1]
    if not isinstance(value, type) or mark[2]:
        return
    wanted = (mark[3] or "").split()
    for member in wanted or [member for member in dir(value) if not member.startswith("_")]:
        found = getattr(value, member, None)
        if callable(found) and (getattr(found, "__module__", None) or "").startswith("relive"):
            yield member, found


@pytest.mark.parametrize("name", [name for name in MARKED if not name.startswith("relive.compat.")])
def test_the_docstring_of_a_method_names_every_argument(name: str):
    silent: list[str] = []
    for member, found in members(name):
        doc = inspect.getdoc(found) or ""
        words = told(doc) | set(re.findall(r"\w+", doc))
        if not re.search(r"[Aa]rguments\b[^.]*:(meth|func):", doc):
            silent += [f"{member}({argument})" for argument in arguments(found) - words]
        silent += [] if doc else [f"{member} has no docstring"]
    assert silent == []
