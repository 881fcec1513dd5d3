"""What src imports belongs to a requirement, and a missing package of an extra is an error that names the extra."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import relive
from relive import exchange
from relive.batches import as_dataframe
from relive.collect.progress import progress_bar
from relive.look import inspection
from support.syntax_trees import tree_of

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "relive"

PACKAGES = {"PIL": "pillow", "rerun": "rerun-sdk", "typing_extensions": "torch"}
"""Module -> the requirement that brings it, where the names differ. torch requires typing_extensions."""

HOSTS = {"rsl_rl", "sb3_contrib", "skrl", "stable_baselines3", "velora"}
"""Libraries whose own classes the drop-ins are for: who uses a drop-in has them."""

ELSEWHERE = {"tensorflow_datasets"}
"""Packages that are too large for an extra; the error names what to install."""


def imported(tree: ast.AST) -> set[str]:
    """The packages outside of Python's library and of relive that a module imports, lazily or not."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
            names |= {str(x.value) for x in node.args[:1] if isinstance(x, ast.Constant)}
    tops = {name.partition(".")[0] for name in names if name}
    return tops - sys.stdlib_module_names - {"relive"}


def requirements() -> tuple[set[str], dict[str, set[str]]]:
    """The packages that are always installed, and those of each extra."""
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def named(lines: list[str]) -> set[str]:
        return {re.split(r"[\[<>=~! ]", line, maxsplit=1)[0].lower() for line in lines}

    return named(project["dependencies"]), {
        name: named(lines) for name, lines in project["optional-dependencies"].items()
    }


def test_all_that_a_module_imports_is_required_or_in_an_extra_that_its_error_names() -> None:
    always, extras = requirements()
    for file in sorted(SOURCE.rglob("*.py")):
        text, where = file.read_text(encoding="utf-8"), file.relative_to(SOURCE).as_posix()
        for name in imported(tree_of(text)) - HOSTS - ELSEWHERE:
            package = PACKAGES.get(name, name)
            if package in always:
                continue
            having = {extra for extra, packages in extras.items() if package in packages}
            assert having, f"{where}: {name} is in no extra"
            command = file.name == "cli.py"  # __main__.py, which imports it, says the extra
            errors = (SOURCE / "__main__.py").read_text(encoding="utf-8") if command else text
            if where.startswith("compat/"):  # whose base imports it
                errors = (SOURCE / "compat" / "base.py").read_text(encoding="utf-8")
            told = set(re.findall(r"relive\[(\w+)\]", errors))
            assert told & having, f"{where}: {name} is in {sorted(having)}, and no error names one of these"


def open_bar() -> None:
    with progress_bar(3, True, "x", "y"):
        pass


CALLS: dict[str, tuple[str, Callable[[], Any]]] = {
    "pandas": ("pandas", lambda: as_dataframe({})),
    "minari": ("minari", lambda: exchange.from_minari("some/data-v0")),
    "pyarrow.parquet": ("lerobot", exchange.lerobot.arrow),
    "rich.console": ("progress", open_bar),
    "matplotlib.figure": ("plot", lambda: inspection.figure_of(None)),
    "rerun": ("rerun", lambda: inspection.export(cast("Any", None), "x.rrd")),
}
"""Module -> its extra, and a call that needs it."""


@pytest.mark.parametrize("module", CALLS)
def test_a_missing_package_is_an_error_that_names_its_extra(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    extra, call = CALLS[module]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install 'relive\[{extra}\]'"):
        call()


def test_shards_without_ray_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "relive.cluster.ray", raising=False)
    monkeypatch.delattr(relive.cluster, "ray", raising=False)
    with pytest.raises(AttributeError, match=r"pip install 'relive\[ray\]'"):
        _ = relive.cluster.ray


def test_the_command_line_without_its_packages_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from relive.__main__ import main

    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "relive.cli", raising=False)
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "pip install 'relive[look]'" in capsys.readouterr().err


def test_the_version_is_the_same_everywhere() -> None:
    import tag

    assert set(tag.versions().values()) == {relive.__version__}
    assert tag.complaints(f"v{relive.__version__}", f"\n## [{relive.__version__}] - 2027-01-01\n") == []
    assert len(tag.complaints("v9.9.9", "")) == len(tag.PLACES) + 1
    assert len(tag.complaints(f"v{relive.__version__}", f"\n## [{relive.__version__}], unreleased\n")) == 1


SINCE_3_11 = {
    "typing": {
        "LiteralString", "Never", "NotRequired", "ReadOnly", "Required", "Self", "TypeAliasType", "TypeIs",
        "TypeVarTuple", "Unpack", "assert_never", "assert_type", "dataclass_transform", "override", "reveal_type",
    },
    "enum": {"EnumType", "ReprEnum", "StrEnum", "member", "nonmember", "verify"},
    "datetime": {"UTC"},
    "contextlib": {"chdir"},
    "itertools": {"batched"},
    "tomllib": {"load", "loads"},
}  # fmt: skip
"""Module -> names that Python 3.10 lacks, and that a type checker may import nevertheless."""


def test_nothing_is_imported_at_run_time_that_python_3_10_lacks() -> None:
    wrong: list[str] = []
    for path in sorted((ROOT / "src" / "relive").rglob("*.py")):
        nodes = [*ast.walk(tree_of(path.read_text(encoding="utf-8")))]
        typed = [node for node in nodes if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
        unseen = {id(inner) for node in typed for inner in ast.walk(node)}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and id(node) not in unseen:
                names = {alias.name for alias in node.names} & SINCE_3_11.get(node.module or "", set())
                wrong += [f"{path.name}: {node.module}.{name}" for name in names]
            if isinstance(node, ast.ClassDef):  # Python 3.11 lets both be bases
                bases = {ast.unparse(base).split("[")[0] for base in node.bases}
                if "Generic" in bases and bases & {"NamedTuple", "TypedDict"}:
                    wrong.append(f"{path.name}: {node.name}")
    assert wrong == []
