"""Tests look into private parts in one place, ``internals.py``, so that a part can move without them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from support.syntax_trees import tree_of

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "src" / "relive"

OF_OTHERS = {
    *("_fields", "_replace", "_repr_html_", "_schema", "_sleep"),  # of Python, IPython and torch
    *("_get_samples", "_sample_goal_indices"),  # of Stable-Baselines3, whose algorithms call them
    *("_get_complete_sequences", "_convert_td_to_np_dict", "_extract_td_sequences"),  # of AgileRL
}
"""Private names that other libraries have as well."""


FOREIGN = re.compile(r"(?<!\bself)(?<!\bcls)\.(_[a-z]\w*)")
"""A private part of another object that a file reads; it saves the time to parse most files."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_own(node: ast.expr) -> bool:
    """True if an attribute is looked up in the object or class whose method this is."""
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def privates_of(tree: ast.Module) -> set[str]:
    """The private names that classes of a module define."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
    return {name for name in found if is_private(name)}


def foreign_reads(tree: ast.Module, names: set[str]) -> list[str]:
    """Every read of one of these names in another object, unless a class of this module defines it as well."""
    own = privates_of(tree)
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        if node.attr in names - own and not is_own(node.value)
        if not (isinstance(node.value, ast.Name) and node.value.id[:1].isupper())  # to replace a method of a class
    ]


def parsed(path: Path) -> ast.Module:
    return tree_of(path.read_text(encoding="utf-8"))


def test_private_parts_are_read_through_one_module() -> None:
    names = set[str]().union(*(privates_of(parsed(path)) for path in SOURCE.rglob("*.py"))) - OF_OTHERS
    wrong: list[str] = []
    for path in sorted(TESTS.rglob("*.py")):
        if path.name == "internals.py" or {"peers", "hosts"} & {*path.parts}:
            continue
        if names & {*FOREIGN.findall(path.read_text(encoding="utf-8"))}:
            wrong += [f"{path.relative_to(TESTS)}: {read}" for read in foreign_reads(parsed(path), names)]
    assert wrong == []


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("buffer._ring", 1),
        ("buffer._ring.check()", 1),
        ("buffer._ring = 1", 0),
        ("self._ring", 0),
        ("class A:\n    def _ring(self): ...\nA()._ring()", 0),
        ("Buffer._ring", 0),
        ("buffer.ring", 0),
    ],
)
def test_the_check_knows_a_read_from_what_is_none(source: str, reads: int) -> None:
    assert len(foreign_reads(ast.parse(source), {"_ring"})) == reads
