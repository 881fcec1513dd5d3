"""What the package is built of and by: the compiler that is taken, and the files of an sdist and of a wheel."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.effort import in_ci, in_ci_alone

ROOT = Path(__file__).parents[1]
CHOICE = """
include("{root}/src/core/compiler.cmake")
message("compiler: ${{CMAKE_CXX_COMPILER}}")
"""


MACRO = r"\b(?!PyArray_)(_?Py[A-Za-z]+_[A-Z][A-Z_]+)\b(?=\()"
"""A macro of Python's, as the ones that read a list or a tuple without a check are named."""


class Choice(NamedTuple):
    compiler: str
    """What CMake is told to take; empty if it finds it by itself. "refused" if there is none."""
    message: str
    folder: Path


@pytest.fixture
def choose(tmp_path: Path) -> Any:
    """A function that lets CMake choose among stand-ins of programs."""
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if cmake is None:
        pytest.skip("there is no cmake")

    def stand_in(name: str, line: str) -> Path:
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{line}\n")
        file.chmod(0o755)
        return file

    def chosen(*programs: str, ziglang: bool, options: tuple[str, ...] = (), **env: str) -> Choice:
        for name in programs:
            stand_in(name, "true")
        python = stand_in("python", "printf /of/ziglang" if ziglang else "exit 1")
        script = tmp_path / "choice.cmake"
        script.write_text(CHOICE.format(root=ROOT.as_posix()))
        done = subprocess.run(
            [cmake, f"-DPython_EXECUTABLE={python}", *options, "-P", str(script)],
            env={"PATH": str(tmp_path / "bin"), **env},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        compiler = done.stderr.rpartition("compiler: ")[2].strip() if done.returncode == 0 else "refused"
        return Choice(compiler, " ".join(done.stderr.split()), tmp_path)

    return chosen


def test_without_a_compiler_a_build_says_that_there_is_one_in_a_package(choose: Any) -> None:
    made = choose(ziglang=False, CXX="g++")  # as scikit-build-core sets it where nobody has
    assert made.compiler == "refused"
    for part in ("needs a C++20 compiler", "no c++, g++ or clang++ on PATH", "RELIVE_ZIG=1 pip install .", "`ziglang`"):
        assert part in made.message


def test_a_compiler_that_is_asked_for_and_not_there_is_an_error(choose: Any) -> None:
    made = choose("c++", ziglang=False, options=("-DRELIVE_ZIG=ON",))
    assert made.compiler == "refused"
    assert "cannot import `ziglang`" in made.message


@pytest.mark.parametrize("cxx", [{}, in_ci({"CXX": ""}), {"CXX": "c++ -pthread"}, in_ci({"CXX": "g++"})])
def test_what_is_on_path_or_in_cxx_is_taken_before_that_of_the_package(choose: Any, cxx: dict[str, str]) -> None:
    named = cxx.get("CXX", "").partition(" ")[0]
    made = choose("g++", "c++", ziglang=True, **cxx)
    assert made.compiler in {"", str(made.folder / "bin" / (named or "c++"))}
    assert not (made.folder / "zig").exists()


def test_a_compiler_of_another_name_than_pythons_own_is_found(choose: Any) -> None:
    made = choose("clang++", ziglang=False, CXX="x86_64-linux-gnu-g++")
    assert made.compiler == str(made.folder / "bin" / "clang++")


def test_visual_studio_has_to_be_told_to_take_clang(choose: Any) -> None:
    studio = "-DCMAKE_GENERATOR=Visual Studio 17 2022"
    made = choose("c++", ziglang=False, options=(studio,))
    assert made.compiler == "refused"
    assert "CMAKE_GENERATOR_TOOLSET=ClangCL" in made.message
    assert choose(ziglang=False, options=(studio, "-DCMAKE_GENERATOR_TOOLSET=ClangCL")).compiler == ""


@pytest.mark.parametrize("options", [(), ("-DRELIVE_ZIG=ON",)])
def test_the_compiler_of_the_package_is_taken_where_there_is_none_or_it_is_asked_for(
    choose: Any, options: tuple[str, ...]
) -> None:
    made = choose(*["c++"] if options else [], ziglang=True, options=options, CXX="g++")
    assert made.compiler == str(made.folder / "zig" / "c++")
    for tool in ("c++", "ar", "ranlib"):
        script = made.folder / "zig" / tool
        assert os.access(script, os.X_OK)
        assert f"exec '/of/ziglang/zig' {tool} " in script.read_text()
    assert "-mcpu=baseline" in (made.folder / "zig" / "c++").read_text()


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Any:
    """scikit-build-core, as pip calls it in the checkout."""
    build = pytest.importorskip("scikit_build_core.build")
    monkeypatch.chdir(ROOT)
    return build


def sources(folder: str) -> set[str]:
    """The files of a folder of the checkout, less what is built and cached in it."""
    files = (file for file in (ROOT / folder).rglob("*") if file.is_file())
    names = {file.relative_to(ROOT).as_posix() for file in files}
    return {name for name in names if "/__pycache__/" not in name and not name.endswith(".so")}


@in_ci_alone
def test_an_sdist_has_all_that_builds_and_tests_the_package_and_nothing_that_was_built(
    build: Any, tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / build.build_sdist(str(tmp_path), {})) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = set[str]().union(*map(sources, ("src", "tests", "examples", "docs")))
    pictures = {name for name in wanted if name.startswith("docs/assets/") and name.endswith((".png", ".svg"))}
    assert wanted - pictures <= names
    assert not (pictures | sources("benchmarks/results") | {"benchmarks/history.jsonl"}) & names
    assert {"CMakeLists.txt", "Makefile", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"} <= names
    assert {"src/core/module.cpp", "src/core/ring.hpp", "src/core/compiler.cmake"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc")) or name.startswith((".", "build/", "dist/"))]


def test_a_shell_reads_the_commands_of_wheels_as_they_are_meant() -> None:
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]
    for name in ("before-test", "test-command"):
        words = list(shlex.shlex(settings[name], posix=False, punctuation_chars=True))
        assert not [word for word in words if set(word) <= set("<>|&;()")], f"{name} redirects, or runs several"
    assert shlex.split(settings["before-test"])[-1] == "torch>=2.5"


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda file: file.name)
def test_every_action_is_pinned_by_a_commit_and_names_its_version(workflow: Path) -> None:
    """Who moves a tag could else publish in our name."""
    uses = re.findall(r"uses: (.*)", workflow.read_text(encoding="utf-8"))
    assert uses
    for line in uses:
        assert re.match(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


def test_versions_for_newer_processors_are_asked_of_the_compiler_together_with_the_question() -> None:
    """clang 14 to 17 compile the versions, but not the question which of them a processor has."""
    asked = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8").partition("check_cxx_source_compiles(")[2]
    asked = asked.partition("RELIVE_CLONES)")[0].replace("\\", "")
    source = (ROOT / "src" / "core" / "module.cpp").read_text(encoding="utf-8")
    questions = set(re.findall(r"__builtin_cpu_\w+\(.*?\)", source))
    assert len(questions) == 3
    for question in questions:
        assert question in asked


def test_the_core_uses_no_macro_of_python_that_the_stable_abi_lacks() -> None:
    """Such as ``PyTuple_GET_ITEM``: it compiles for the Python at hand, and not for the wheel of 3.12 and later."""
    sources = [*(ROOT / "src" / "core").glob("*.cpp"), *(ROOT / "src" / "core").glob("*.hpp")]
    used = {(path.name, name) for path in sources for name in re.findall(MACRO, path.read_text(encoding="utf-8"))}
    assert len(sources) > 10
    assert used == set()


def test_a_wheel_has_the_package_and_no_core_that_another_build_left(build: Any, tmp_path: Path) -> None:
    wheel = build.build_wheel(str(tmp_path), {"wheel.cmake": "false", "wheel.py-api": "py3"})
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {name.removeprefix("src/") for name in sources("src/relive")}
    assert {"relive/py.typed", "relive/core/__init__.py"} <= names


@pytest.mark.slow
def test_a_wheel_brings_the_core_for_the_python_that_built_it(build: Any, tmp_path: Path) -> None:
    wheel = build.build_wheel(str(tmp_path), {"build-dir": str(ROOT / "build" / "wheel")})
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        core = [name for name in archive.namelist() if name.startswith("relive/core/_core.") and name.endswith(".so")]
    assert len(core) == 1
    assert wheel.split("-")[2] in {f"cp{sys.version_info.major}{sys.version_info.minor}", "cp312"}
    assert ".abi3." in core[0] if "-abi3-" in wheel else sys.implementation.cache_tag in core[0]
