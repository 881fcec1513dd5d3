"""Imports point downwards: read off the syntax trees, so that lazy and type-only imports count too."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = "relive"
SOURCE = Path(__file__).resolve().parents[1] / "src" / PACKAGE

LAYERS = {
    "errors": 0,
    "forks": 0,
    "schema": 0,
    "checks": 1,
    "kernels": 1,
    "memory": 1,
    "parameters": 1,
    "persist": 1,
    "progress": 1,
    "storage": 2,
    "layout": 2,
    "store": 2,
    "summary": 1,
    "returns": 2,
    "rows": 2,
    "device_rows": 2,
    "sumtree": 2,
    "limits": 2,
    "batching": 2,
    "ends": 3,
    "ring": 3,
    "plan": 3,
    "validate": 4,
    "sequences": 3,
    "vectors": 3,
    "samplers": 4,
    "views": 4,
    "sequence_view": 4,
    "relabelling": 3,
    "hindsight": 4,
    "weights": 3,
    "windows": 4,
    "random_policy": 4,
    "rollout": 5,
    "replay": 5,
    "saving": 5,
    "loader": 6,
    "collect": 6,
    "mixture": 6,
    "cluster": 7,
    "compat": 7,
    "cli": 8,
}
"""The layer of each part: a module, or a package with all its modules. The flat face is above them all."""

SEAM = {(part, "layout") for part in ("device_rows", "rows", "store", "windows")}
SEAM |= {("device_rows", "rows"), ("device_rows", "store"), ("rows", "store")}
SAME_LAYER = {
    ("schema", "errors"),
    ("storage", "layout"),
    ("weights", "ring"),
    ("hindsight", "views"),
    ("replay", "saving"),
    ("rollout", "saving"),
    *SEAM,
}
"""The imports within one layer that are wanted."""

PLACES = {"numba": "kernels.cpu", "triton": "kernels.gpu", "ray": "cluster"}
"""Heavy packages, and the one module or package that may import each."""

HOSTS = ("agilerl", "embodichain", "pytorchrl", "rsl_rl", "stable_baselines3", "velora")
"""Libraries that have a drop-in module: only the one of its name in `compat` may import each, or need not."""

Sources = dict[str, str]
"""Path inside the package -> source."""

DYNAMIC = re.compile(r"\b(import_module|__import__)$")
HIDDEN = "<a name computed when it runs>"


def read_sources() -> Sources:
    paths = sorted(SOURCE.rglob("*.py"))
    return {path.relative_to(SOURCE).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def module_name(path: str) -> str:
    """The module's name inside the package: "" is the flat face, "kernels" the face of that package."""
    return path.removesuffix(".py").removesuffix("__init__").rstrip("/").replace("/", ".")


def part_of(name: str) -> str:
    return name.partition(".")[0]


def is_inside(module: str, place: str) -> bool:
    return module == place or module.startswith(place + ".")


def imports_of(path: str, source: str) -> list[tuple[int, str]]:
    """Each (line, absolute name) that a module imports, wherever in it; `from a import b` counts as a.b."""
    folder = [PACKAGE, *path.split("/")[:-1]]

    def absolute(name: str, level: int) -> str:
        base = folder[: len(folder) - level + 1] if level else []
        assert base or not level, f"{path}: a relative import leaves the package"
        return ".".join([*base, name]).rstrip(".")

    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = absolute(node.module or "", node.level)
            found += [(node.lineno, f"{origin}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and re.search(r"\b(import_module|__import__)$", ast.unparse(node.func)):
            name = node.args[0] if node.args else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                bare = name.value.lstrip(".")
                found.append((node.lineno, absolute(bare, len(name.value) - len(bare))))
            elif path != "__init__.py":  # the flat face may look names up in a table: it is above them anyway
                found.append((node.lineno, HIDDEN))
    return sorted(found)


def violations(sources: Sources) -> list[str]:
    """Every way in which these modules break the layers, one sentence each; empty when all is well."""
    modules = {module_name(path) for path in sources}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    wrong = [f"{module}: has no layer" for module in sorted(modules) if module and layer_of(module) is None]
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


def layer_of(module: str) -> int | None:
    return LAYERS.get(part_of(module))


def upward(module: str, target: str) -> str | None:
    """What is wrong with this import of one of our own modules by another, if anything."""
    if not module:
        return None
    if not target:
        return "imports the flat face, which is above it"
    part, other = part_of(module), part_of(target)
    mine, its = layer_of(module), layer_of(target)
    if mine is None or its is None or its < mine or part == other or (part, other) in SAME_LAYER:
        return None
    return f"layer {mine} imports {other}, layer {its}"


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


def test_imports_point_downwards_without_a_cycle():
    assert violations(read_sources()) == []


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


GOOD = {
    "__init__.py": "from .schema import Schema\nfrom . import errors\nimport_module(TABLE[name])",
    "errors.py": "",
    "schema.py": "from .errors import ReliveError",
    "kernels/__init__.py": "from . import reference\ndef f():\n    from . import cpu",
    "kernels/reference.py": "import torch",
    "kernels/cpu.py": "import numba\nfrom .reference import gae",
    "returns.py": "from . import kernels\nfrom relive.schema import Schema\nimport relive.errors",
    "compat/__init__.py": "from ..returns import gae",
}


def test_the_checker_passes_a_sound_tree():
    assert violations(GOOD) == []


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("schema.py", "from .returns import gae", ":1: layer 0 imports returns, layer 2"),
        ("schema.py", "from . import returns", ":1: layer 0 imports returns, layer 2"),
        ("schema.py", "from relive import returns", ":1: layer 0 imports returns, layer 2"),
        ("schema.py", "import relive.returns as r", ":1: layer 0 imports returns, layer 2"),
        ("schema.py", "def f():\n    import relive.returns", ":2: layer 0 imports returns, layer 2"),
        ("schema.py", "if TYPE_CHECKING:\n    from . import returns", ":2: layer 0 imports returns, layer 2"),
        ("schema.py", "import_module('relive.returns')", ":1: layer 0 imports returns, layer 2"),
        ("schema.py", "importlib.import_module('.returns', p)", ":1: layer 0 imports returns, layer 2"),
        ("schema.py", "__import__(name)", ":1: imports <a name computed when it runs>"),
        ("errors.py", "from .schema import Schema", ":1: layer 0 imports schema, layer 0"),
        ("errors.py", "import relive", ":1: imports the flat face"),
        ("errors.py", "from . import Schema", ":1: imports the flat face"),
        ("kernels/cpu.py", "from relive import gae", ":1: imports the flat face"),
        ("kernels/cpu.py", "from ..returns import gae", ":1: layer 1 imports returns, layer 2"),
        (
            "kernels/reference.py",
            "from .cpu import gae",
            "cycle: kernels.cpu -> kernels.reference ->",
        ),
        ("kernels/reference.py", "from . import gae", "cycle: kernels -> kernels.reference -> kernels"),
        ("returns.py", "def f():\n    import numba.core", ":2: imports numba, which only kernels.cpu may"),
        ("kernels/cpu.py", "import triton", ":1: imports triton, which only kernels.gpu may"),
        ("returns.py", "from ray import get", ":1: imports ray, which only cluster may"),
        ("replay.py", "def f():\n    import velora", ":2: imports velora, which only compat.velora may"),
        ("compat/agilerl.py", "from velora import x", ":1: imports velora, which only compat.velora may"),
        ("helpers.py", "", "helpers: has no layer"),
    ],
)
def test_the_checker_catches_each_kind_of_bad_tree(path: str, source: str, complaint: str):
    assert any(complaint in line for line in violations({**GOOD, path: source}))
