"""The flat face: what it offers, that all of it is documented and typed, and that importing it is cheap."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterator
from inspect import cleandoc
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import relive
from relive import errors, returns

ROOT = Path(__file__).resolve().parents[1]

FACE = [
    "GAE",
    "Collector",
    "Field",
    "FrameStack",
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
    "FieldError": (errors.SchemaError,),
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


def test_the_version_is_that_of_the_package():
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
