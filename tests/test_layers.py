"""Imports point downwards: read off the syntax trees, so that lazy and type-only imports count too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from support.syntax_trees import tree_of

PACKAGE = "relive"
SOURCE = Path(__file__).resolve().parents[1] / "src" / PACKAGE

FLOORS: list[set[str]] = [
    {"printable"},
    {"errors", "names"},
    {"parameters", "core"},
    {"steps", "files"},
    {"memory", "returns", "batches"},
    {"turns"},
    {"ring", "rollout"},
    {"device"},
    {"samplers", "views"},
    {"replay"},
    {"collect", "compat", "processes"},
    {"cluster"},
    {"look"},
    {"exchange"},
    {"cli"},
    {"__main__"},
]
"""The rooms, from the ground up: a module or a folder imports what lies below it, and nothing beside or above it.

The flat face is above them all. The page of the rooms says what each is for.
"""

PLACES = {"ray": "cluster.ray"}
"""Heavy packages, and the one module or package that may import each."""

COMPILED = {"core._core"}
"""Modules that are not Python. They import nothing."""

HOSTS = (
    "agilerl",
    "embodichain",
    "fasttd3",
    "pytorchrl",
    "rsl_rl",
    "sb3_contrib",
    "skrl",
    "stable_baselines3",
    "velora",
)
"""Libraries that have a drop-in module: only the one of its name in `compat` may import each, or need not."""

Sources = dict[str, str]
"""Path inside the package -> source."""

DYNAMIC = re.compile(r"\b(import_module|__import__)\b")
HIDDEN = "<a name computed when it runs>"


@cache
def read_sources() -> Sources:
    paths = sorted(SOURCE.rglob("*.py"))
    return {path.relative_to(SOURCE).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def module_name(path: str) -> str:
    """The module's name inside the package: "" is the flat face, "core" the face of that package."""
    return path.removesuffix(".py").removesuffix("__init__").rstrip("/").replace("/", ".")


def part_of(name: str) -> str:
    return name.partition(".")[0]


def is_inside(module: str, place: str) -> bool:
    return module == place or module.startswith(place + ".")


def last_name(called: ast.expr) -> str:
    """The name of a function that is called, without what it is looked up in."""
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements, without the expressions in them, which are most of a tree."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(tree, name, ()):
            yield node
            yield from statements(node)


@cache
def imports_of(path: str, source: str) -> list[tuple[int, str]]:
    """Each (line, absolute name) that a module imports, wherever in it; `from a import b` counts as a.b."""
    folder = [PACKAGE, *path.split("/")[:-1]]

    def absolute(name: str, level: int) -> str:
        base = folder[: len(folder) - level + 1] if level else []
        assert base or not level, f"{path}: a relative import leaves the package"
        return ".".join([*base, name]).rstrip(".")

    found: list[tuple[int, str]] = []
    for node in ast.walk(tree_of(source)) if DYNAMIC.search(source) else statements(tree_of(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = absolute(node.module or "", node.level)
            found += [(node.lineno, f"{origin}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and last_name(node.func) in ("import_module", "__import__"):
            name = node.args[0] if node.args else None
            if isinstance(name, ast.JoinedStr) and re.match(r"f'\.\{", ast.unparse(name)):
                continue  # a module of the package that calls: its face names it for type checkers, which counts
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                bare = name.value.lstrip(".")
                found.append((node.lineno, absolute(bare, len(name.value) - len(bare))))
            elif path != "__init__.py":  # the flat face may look names up in a table: it is above them anyway
                found.append((node.lineno, HIDDEN))
    return sorted(found)


def violations(sources: Sources) -> list[str]:
    """Every way in which these modules break the floors, one sentence each; empty when all is well."""
    modules = {module_name(path) for path in sources} | COMPILED
    graph: dict[str, set[str]] = {module: set() for module in modules}
    wrong = [f"{module}: has no floor" for module in sorted(modules) if module and floor_of(module) is None]
    for path, source in sources.items():
        module = module_name(path)
        for line, name in imports_of(path, source):
            if part_of(name) == PACKAGE:
                target = name.removeprefix(PACKAGE).removeprefix(".")
                while target not in modules:  # what is left of a.b.Name after its last module
                    target = target.rpartition(".")[0]
                graph[module].add(target)
                complaint = upward(module, target)
            else:
                complaint = misplaced(module, name)
            if complaint:
                wrong.append(f"{path}:{line}: {complaint}")
    return wrong + [f"import cycle: {' -> '.join(cycle)}" for cycle in cycles(graph)]


def borrowed_names(sources: Sources) -> list[str]:
    """Every import of a name from a module that does not define it, or of a private name from another room.

    Faces of folders pass names on, and a module with an ``__all__`` those that it lists.
    """
    modules = {module_name(path): path for path in sources}
    wrong: list[str] = []
    for path, source in sources.items():
        for line, full in imports_of(path, source):
            target, name = full.removeprefix(PACKAGE).removeprefix("."), ""
            while part_of(full) == PACKAGE and target not in modules:
                target, _, name = target.rpartition(".")
            if not name or modules[target].endswith("__init__.py"):
                continue
            if name not in names_of(sources[modules[target]]):
                wrong.append(f"{path}:{line}: {target} does not define {name}")
            elif name.startswith("_") and part_of(target) != part_of(module_name(path)):
                wrong.append(f"{path}:{line}: {name} is private to {target}")
    return wrong


@cache
def names_of(source: str) -> set[str]:
    """The names that a module defines, or lists in its ``__all__``."""
    tree = tree_of(source)
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    defined |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assigned = {ast.unparse(node.targets): node.value for node in tree.body if isinstance(node, ast.Assign)}
    listed = set(ast.literal_eval(assigned["__all__"])) if "__all__" in assigned else set[str]()
    return defined | listed


def floor_of(module: str) -> int | None:
    return next((floor for floor, rooms in enumerate(FLOORS) if part_of(module) in rooms), None)


def upward(module: str, target: str) -> str | None:
    """What is wrong with this import of one of our own modules by another, if anything."""
    if not module:
        return None
    if not target:
        return "imports the flat face, which is above it"
    part, other = part_of(module), part_of(target)
    mine, its = floor_of(module), floor_of(target)
    if mine is None or its is None or its < mine or part == other:
        return None
    return f"floor {mine} imports {other}, floor {its}"


def misplaced(module: str, name: str) -> str | None:
    """What is wrong with this import of a foreign module, if anything."""
    if name == HIDDEN:
        return f"imports {HIDDEN}"
    package = part_of(name)
    if package in PLACES and not is_inside(module, PLACES[package]):
        return f"imports {package}, which only {PLACES[package]} may"
    if package in HOSTS and not is_inside(module, f"compat.{package}"):
        return f"imports {package}, which only compat.{package} may"
    return None


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """For each module that reaches itself through modules of later names only, one way round."""
    found: list[list[str]] = []
    for start in sorted(graph):
        paths, seen = [[start]], set[str]()
        while paths:
            path = paths.pop()
            if start in graph[path[-1]]:
                found.append([*path, start])
                break
            steps = {step for step in graph[path[-1]] if step > start} - seen
            seen |= steps
            paths += [[*path, step] for step in sorted(steps)]
    return found


def test_every_room_exists_and_its_page_says_what_it_is_for():
    rooms = {part_of(module_name(path)) for path in read_sources()} - {""}
    assert set().union(*FLOORS) == rooms
    table = (SOURCE.parents[1] / "docs" / "contributing" / "rooms.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)(?:/|\.py)` \|", table, re.MULTILINE)) == rooms


def test_imports_point_downwards_without_a_cycle():
    assert violations(read_sources()) == []


def test_a_name_is_imported_from_the_module_that_defines_it_and_no_private_one_from_another_room():
    assert borrowed_names(read_sources()) == []


def test_the_checker_catches_names_that_are_borrowed_or_private():
    lender = "from .errors import E\ndef a(): ...\ndef _b(): ..."
    for name, complaint in (("a", ""), ("_b", "_b is private"), ("E", "does not define E")):
        tree = {"errors.py": "E = 1", "parameters.py": lender, "steps/x.py": f"from ..parameters import {name}"}
        found = [line for line in borrowed_names(tree) if line.startswith("steps")]
        assert [complaint in line for line in found] == [True] * bool(complaint)


@pytest.mark.parametrize("package", PLACES)
def test_a_heavy_package_is_imported_exactly_where_it_belongs(package: str):
    place = PLACES[package]
    importers: set[str] = set()
    for path, source in read_sources().items():
        if any(part_of(name) == package for _, name in imports_of(path, source)):
            importers.add(module_name(path))
    assert all(is_inside(module, place) for module in importers), importers
    exists = any(is_inside(module_name(path), place) for path in read_sources())
    assert bool(importers) == exists, f"{place} is where {package} is imported"


@pytest.mark.parametrize("compiled", COMPILED)
def test_a_compiled_module_is_known_to_its_room_alone(compiled: str):
    rooms = {
        part_of(module_name(path))
        for path, source in read_sources().items()
        if any(is_inside(name, f"{PACKAGE}.{compiled}") for _, name in imports_of(path, source))
    }
    assert rooms == {part_of(compiled)}


GOOD = {
    "__init__.py": "from .steps.schema import Schema\nfrom . import errors\nimport_module(TABLE[name])",
    "errors.py": "",
    "steps/schema.py": "from ..errors import ReliveError",
    "files/format.py": "",
    "core/__init__.py": "from ._core import Ring\nfrom . import words\ndef f():\n    from . import grids",
    "core/words.py": "import numpy",
    "core/grids.py": "import torch\nfrom .words import HEAD",
    "returns/__init__.py": "from .. import core\nfrom relive.steps.schema import Schema\nimport relive.errors",
    "compat/__init__.py": "from ..returns import gae",
}


def test_the_checker_passes_a_sound_tree():
    assert violations(GOOD) == []


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("steps/schema.py", "from ..returns import gae", ":1: floor 3 imports returns, floor 4"),
        ("steps/schema.py", "from .. import returns", ":1: floor 3 imports returns, floor 4"),
        ("steps/schema.py", "from relive import returns", ":1: floor 3 imports returns, floor 4"),
        ("steps/schema.py", "import relive.returns as r", ":1: floor 3 imports returns, floor 4"),
        ("steps/schema.py", "def f():\n    import relive.returns", ":2: floor 3 imports returns, floor 4"),
        ("steps/schema.py", "if TYPE_CHECKING:\n    from .. import returns", ":2: floor 3 imports returns, floor 4"),
        ("steps/schema.py", "import_module('relive.returns')", ":1: floor 3 imports returns, floor 4"),
        ("steps/schema.py", "importlib.import_module('..returns', p)", ":1: floor 3 imports returns, floor 4"),
        ("steps/schema.py", "import_module(f'..{name}', p)", ":1: imports <a name computed when it runs>"),
        ("steps/schema.py", "__import__(name)", ":1: imports <a name computed when it runs>"),
        ("steps/schema.py", "from ..files import format", ":1: floor 3 imports files, floor 3"),
        ("errors.py", "import relive", ":1: imports the flat face"),
        ("errors.py", "from . import Schema", ":1: imports the flat face"),
        ("core/grids.py", "from relive import gae", ":1: imports the flat face"),
        ("core/grids.py", "from ..returns import gae", ":1: floor 2 imports returns, floor 4"),
        ("core/words.py", "from .grids import gae", "cycle: core.grids -> core.words ->"),
        ("core/words.py", "from . import Ring", "cycle: core -> core.words -> core"),
        ("returns/__init__.py", "def f():\n    import ray.util", ":2: imports ray, which only cluster.ray may"),
        ("returns/__init__.py", "from ray import get", ":1: imports ray, which only cluster.ray may"),
        ("replay.py", "def f():\n    import velora", ":2: imports velora, which only compat.velora may"),
        ("compat/agilerl.py", "from velora import x", ":1: imports velora, which only compat.velora may"),
        ("helpers.py", "", "helpers: has no floor"),
    ],
)
def test_the_checker_catches_each_kind_of_bad_tree(path: str, source: str, complaint: str):
    assert any(complaint in line for line in violations({**GOOD, path: source}))
