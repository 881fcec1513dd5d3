"""The flat face: what it offers, that all of it is documented and typed, and that importing it is cheap."""

from __future__ import annotations

import copy
import inspect
import pickle
import pkgutil
import re
import traceback
from collections.abc import Callable, Iterator
from inspect import cleandoc
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

import relive
from relive import Field, ReplayBuffer, RolloutBuffer, Schema, errors, returns
from relive.names import BUFFER_HINTS, MODULE_HINTS

ROOT = Path(__file__).resolve().parents[1]

FACE = [
    "GAE",
    "Batch",
    "Chunks",
    "Collector",
    "Field",
    "FrameStack",
    "Fresh",
    "GroupAdvantage",
    "Hindsight",
    "Lanes",
    "MinSize",
    "Mixture",
    "Monitor",
    "MonteCarlo",
    "NStep",
    "Prioritized",
    "Recent",
    "ReliveError",
    "ReplayBuffer",
    "ReplayServer",
    "ReturnsToGo",
    "RolloutBuffer",
    "SamplesPerInsert",
    "Schema",
    "SchemaChanges",
    "Sequence",
    "SequenceBatch",
    "TDLambda",
    "Transition",
    "Uniform",
    "VTrace",
    "ValueHeads",
    "Weights",
    "WithoutReplacement",
    "__version__",
    "audit",
    "errors",
    "inspect",
    "load_extra",
    "returns",
]
"""In the order that ruff keeps: constants and acronyms, classes, the rest."""

RETURNS = ["gae", "group_advantage", "lambda_returns", "monte_carlo", "normalize", "vtrace"]

HIERARCHY: dict[str, tuple[type[Exception], ...]] = {
    "ReliveError": (Exception,),
    "ParameterError": (errors.ReliveError, ValueError),
    "SchemaError": (errors.ReliveError, ValueError),
    "SpaceError": (errors.SchemaError,),
    "FieldError": (errors.SchemaError, KeyError),
    "ShapeError": (errors.SchemaError,),
    "DTypeError": (errors.SchemaError,),
    "DeviceError": (errors.SchemaError,),
    "NotFiniteError": (errors.ReliveError, ValueError),
    "LifecycleError": (errors.ReliveError, RuntimeError),
    "FullError": (errors.LifecycleError,),
    "EmptyError": (errors.LifecycleError,),
    "UnfinishedError": (errors.LifecycleError,),
    "WaitTimeoutError": (errors.LifecycleError, TimeoutError),
    "InvariantError": (errors.ReliveError, AssertionError),
    "EnvError": (errors.ReliveError, ValueError),
    "FileFormatError": (errors.ReliveError, ValueError),
    "NoSaveError": (errors.FileFormatError, FileNotFoundError),
    "EpisodeEndWarning": (UserWarning,),
}

CLASSES = [name for name in FACE if name[0].isupper()]


def test_the_flat_face_is_pinned():
    assert relive.__all__ == FACE
    for name in FACE:
        assert hasattr(relive, name), name
    assert set(FACE) <= set(dir(relive))


def test_a_star_import_gives_the_whole_face():
    names: dict[str, Any] = {}
    exec("from relive import *", names)
    assert set(FACE) <= set(names)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="NoSuchThing"):
        _ = relive.NoSuchThing  # pyright: ignore[reportAttributeAccessIssue]


# Names that are not there, and modules that come when they are used


WRITTEN = re.compile(r"(?<![\w./-])relive(?:\.[A-Za-z_]\w*)+")
HISTORY = {"CHANGELOG.md", "decisions.md"}
"""Pages that also name what is gone."""


def written_paths() -> set[str]:
    """Each path such as ``relive.cluster.Replay`` that the README or a page of the documents names."""
    pages = [ROOT / "README.md", ROOT / "examples" / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = [page.read_text(encoding="utf-8") for page in pages if page.name not in HISTORY]
    return {path for text in texts for path in WRITTEN.findall(text)}


def test_every_path_in_the_documents_is_there_after_import_relive():
    paths, missing = written_paths(), list[str]()
    assert {"relive.exchange", "relive.cluster.Replay", "relive.compat.velora"} <= paths
    for path in sorted(paths):
        try:
            pkgutil.resolve_name("relive:" + path.removeprefix("relive."))
        except AttributeError as error:
            if not isinstance(error.__cause__, ImportError):  # its library may not be installed
                missing.append(path)
    assert missing == []


def test_modules_that_come_when_they_are_used_are_listed():
    assert {"cluster", "compat", "exchange", "GAE"} <= {*dir(relive)}
    assert {"distributed", "plan", "ray", "Replay"} <= {*dir(relive.cluster)}
    assert {"agilerl", "stable_baselines3"} <= {*dir(relive.compat)}


def test_a_module_whose_library_is_missing_says_why_and_is_not_there(monkeypatch: pytest.MonkeyPatch):
    def fails(name: str, package: str) -> None:
        raise ModuleNotFoundError("No module named 'velora'")

    monkeypatch.setattr("relive.names.import_module", fails)
    monkeypatch.delattr(relive.compat, "velora", raising=False)
    with pytest.raises(AttributeError, match=r"'relive.compat.velora' cannot be imported: No module named 'velora'"):
        _ = relive.compat.velora
    assert not hasattr(relive.compat, "velora")


@pytest.mark.parametrize("name", MODULE_HINTS)
def test_a_name_of_another_library_says_what_to_use_and_that_exists(name: str):
    with pytest.raises(
        AttributeError, match=f"^module 'relive' has no attribute '{name}'; (use|call) relive"
    ) as caught:
        getattr(relive, name)
    for path in WRITTEN.findall(str(caught.value)):
        assert pkgutil.resolve_name("relive:" + path.removeprefix("relive.")), path
    assert not hasattr(relive, name)
    assert name not in dir(relive)


SCHEMA = Schema({"obs": (), "reward": (), "terminated": Field((), torch.bool), "truncated": Field((), torch.bool)})
BUFFERS: dict[str, Callable[[], Any]] = {
    "ReplayBuffer": lambda: ReplayBuffer(SCHEMA, 8, seed=0),
    "RolloutBuffer": lambda: RolloutBuffer(SCHEMA, 4, 1),
}


@pytest.mark.parametrize(("cls", "name"), [(cls, name) for cls, names in BUFFER_HINTS.items() for name in names])
def test_an_attribute_of_another_library_says_what_to_call_and_that_exists(cls: str, name: str):
    buffer = BUFFERS[cls]()
    for owner in (buffer, type(buffer)):
        with pytest.raises(AttributeError, match=f"^{cls} has no attribute '{name}'; ") as caught:
            getattr(owner, name)
        assert not hasattr(owner, name)
    hint = str(caught.value).partition("; ")[2]
    for called in re.findall(r"(?:call |, or call )(\w+)\(|(?:replay|rollout)\.(\w+)", hint):
        assert hasattr(buffer, "".join(called)), called
    assert "Did you mean" not in "".join(traceback.format_exception(caught.value))
    assert name not in dir(buffer)
    assert all(name not in vars(base) for base in type(buffer).__mro__[1:])


@pytest.mark.parametrize("cls", BUFFERS)
def test_hints_leave_subclasses_copies_and_unknown_names_alone(cls: str):
    buffer = BUFFERS[cls]()
    made = type("Own", (type(buffer),), {"push": lambda self: "mine"})
    assert "push" in dir(made.__new__(made))
    assert made.__new__(made).push() == "mine"
    behind = type("Own", (type(buffer), type("Mixin", (), {"push": lambda self: "its", "size": 3})), {})
    assert (behind.__new__(behind).push(), behind.size) == ("its", 3)
    buffer.size = 7
    assert (buffer.size, "size" in dir(buffer)) == (7, True)
    del buffer.size
    for again in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        assert (type(again), hasattr(again, "size")) == (type(buffer), False)
    with pytest.raises(AttributeError, match=f"^'{cls}' object has no attribute 'nothing'"):
        _ = buffer.nothing


def test_the_version_is_that_of_the_package():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert relive.__version__ == project["version"]


def test_the_error_hierarchy_is_pinned_and_drawn():
    assert sorted(errors.__all__) == sorted(HIERARCHY)
    for name, bases in HIERARCHY.items():
        assert getattr(errors, name).__bases__ == bases, name
        assert name in (errors.__doc__ or ""), f"{name} is missing from the drawing in errors' docstring"
    assert relive.ReliveError is errors.ReliveError


def test_the_page_of_errors_has_the_same_drawing():
    drawing = cleandoc(errors.__doc__ or "").split("::")[1].split("Each message")[0]
    assert dedent(drawing).strip() in (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")


def function_of(member: object) -> object:
    """The function behind a method or a property."""
    if isinstance(member, property):
        return member.fget
    return member.__func__ if isinstance(member, classmethod | staticmethod) else member


def public_callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function, class, method and property that a user can reach from the face."""
    for name in RETURNS:
        yield f"returns.{name}", getattr(returns, name)
    for name in errors.__all__:
        yield f"errors.{name}", getattr(errors, name)
    for name in CLASSES:
        cls = getattr(relive, name)
        yield name, cls
        for attribute, member in vars(cls).items():
            function = function_of(member)
            if not attribute.startswith("_") and inspect.isfunction(function):
                yield f"{name}.{attribute}", function


PUBLIC = dict(public_callables())


def test_everything_public_has_a_docstring_of_its_own():
    # A dataclass without a docstring is given its signature as one.
    docs = {name: value.__doc__ for name, value in PUBLIC.items()}
    assert [name for name, doc in docs.items() if not doc or doc.startswith(name.rpartition(".")[2] + "(")] == []


def test_every_public_argument_and_result_is_annotated():
    functions = {
        name: value.__init__ if inspect.isclass(value) else value
        for name, value in PUBLIC.items()
        if not (name.startswith("errors.") or (inspect.isclass(value) and issubclass(value, Exception)))
        and getattr(value, "__init__", None) is not dict.__init__  # a builtin, which has no annotations
    }
    bare = list[str]()
    for name, function in functions.items():
        signature = inspect.signature(function)
        for position, parameter in enumerate(signature.parameters.values()):
            if parameter.annotation is parameter.empty and not (position == 0 and parameter.name in {"self", "cls"}):
                bare.append(f"{name}: {parameter.name}")
        if signature.return_annotation is signature.empty:
            bare.append(f"{name}: the result")
    assert bare == []
