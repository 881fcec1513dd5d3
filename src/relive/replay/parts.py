"""relive's own samplers and views as JSON: their names and parameters."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from ..errors import FileFormatError
from ..printable import shown
from ..samplers.prioritized import Prioritized
from ..samplers.recent import Recent
from ..samplers.uniform import Uniform, WithoutReplacement
from ..views.frames import FrameStack
from ..views.returns_to_go import ReturnsToGo
from ..views.sequences import Sequence
from ..views.transitions import NStep

__all__ = ["PARAMETERS", "describe", "kinds", "parts_of", "plain", "rebuild"]


PARAMETERS: dict[type[Any], tuple[str, ...]] = {
    Uniform: (),
    WithoutReplacement: (),
    Prioritized: ("alpha", "beta", "eps", "stratified", "normalize", "default_error", "eta"),
    Recent: ("sharpest", "c_min", "inner", "adapt"),
    NStep: ("n", "gamma"),
    FrameStack: ("depth", "window", "pad", "keys"),
    ReturnsToGo: ("gamma", "window"),
    Sequence: ("length", "burn_in", "overlap", "n", "gamma", "drop_tail", "time_first", "weigh", "last"),
}


POSITIONAL = {"sharpest": "eta"}
"""Attributes whose constructor argument has another name."""


LARGEST_PARAMETER = 2**53
"""Every whole number up to here is exactly a float."""


SAMPLERS = {part.__name__: part for part in (Uniform, WithoutReplacement, Prioritized, Recent)}


VIEWS = {part.__name__: part for part in (NStep, FrameStack, ReturnsToGo, Sequence)}


PARTS: dict[str, dict[str, type[Any]]] = {"sampler": SAMPLERS, "inner": SAMPLERS, "view": VIEWS, "window": VIEWS}
"""The classes that a save may name, by their use."""


def describe(part: Any) -> dict[str, Any] | None:
    """One of relive's own samplers or views as JSON. None for a user's own part, or one that holds a user's function.

    The user passes such a part to ``load``.
    """
    names = PARAMETERS.get(cast("type[Any]", type(part)))
    if names is None or getattr(part, "each_reward", None) is not None:  # a user's function
        return None
    values = {POSITIONAL.get(name, name): getattr(part, name) for name in names}
    inner = {name: describe(value) for name, value in values.items() if isinstance(value, tuple(PARAMETERS))}
    if None in inner.values():
        return None
    return {"part": type(part).__name__, **{name: plain(value) for name, value in (values | inner).items()}}


def plain(value: Any) -> Any:
    """A parameter as JSON."""
    if isinstance(value, tuple):
        return [plain(member) for member in cast("tuple[Any, ...]", value)]
    return cast("Any", value).item() if isinstance(value, np.generic) else value


def rebuild(data: Any, what: str) -> Any:
    """The part that :func:`describe` described. ``what`` is its use: "sampler" or "view".

    Raises:
        FileFormatError: there is no such part, or its parameters are invalid.
    """
    given: dict[str, Any] = dict(cast("dict[str, Any]", data)) if isinstance(data, dict) else {}
    name = given.pop("part", None)
    part = PARTS.get(what, {}).get(name) if isinstance(name, str) else None
    if part is None:
        raise FileFormatError(
            f"the saved {what} is your own, or holds your own functions, which saves do not contain "
            f"({shown(data, 200)}); pass {what}=... to load or open"
        )
    known = {POSITIONAL.get(name, name) for name in PARAMETERS[part]}
    try:
        if given.keys() - known:
            raise ValueError(f"it has no {shown(min(given.keys() - known))}")
        return part(**{name: _value(value, name) for name, value in given.items()})
    except (TypeError, ValueError, OverflowError) as error:
        raise FileFormatError(f"the saved {what} has invalid parameters: {shown(given, 200)} ({error})") from error


def _value(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return rebuild(cast("dict[str, Any]", value), name)
    if isinstance(value, list):
        return tuple(_value(member, name) for member in cast("list[Any]", value))
    if type(value) is int and abs(value) > LARGEST_PARAMETER:
        raise ValueError(f"{name} is {shown(value)}")
    return value


def parts_of(part: Any) -> list[Any]:
    """A sampler or a view, and the one inside of it, if there is one, and so on."""
    if isinstance(part, Recent):
        return [part, part.inner]
    return [part, *parts_of(part.window)] if isinstance(part, FrameStack | ReturnsToGo) else [part]


def kinds(part: Any) -> tuple[Any, ...]:
    """The class names of a described sampler and of its inner one; () for a user's own sampler."""
    return () if part is None else (part["part"], *kinds(part.get("inner")))
