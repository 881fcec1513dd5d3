"""relive's own samplers and views as JSON: their names and parameters."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from ..errors import FileFormatError
from ..samplers.prioritized import Prioritized
from ..samplers.recent import Recent
from ..samplers.uniform import Uniform, WithoutReplacement
from ..views.frames import FrameStack
from ..views.sequences import Sequence
from ..views.transitions import NStep

__all__ = ["PARAMETERS", "describe", "kinds", "plain", "rebuild"]


PARAMETERS: dict[type[Any], tuple[str, ...]] = {
    Uniform: (),
    WithoutReplacement: (),
    Prioritized: ("alpha", "beta", "eps", "stratified", "normalize", "default_error", "eta"),
    Recent: ("sharpest", "c_min", "inner", "adapt"),
    NStep: ("n", "gamma"),
    FrameStack: ("depth", "window", "pad", "keys"),
    Sequence: ("length", "burn_in", "overlap", "n", "gamma", "drop_tail", "time_first", "weigh", "last"),
}


POSITIONAL = {"sharpest": "eta"}
"""Where the constructor has another name for an attribute."""


LARGEST_PARAMETER = 2**53
"""Whole numbers up to here are floats as well."""


SAMPLERS = {part.__name__: part for part in (Uniform, WithoutReplacement, Prioritized, Recent)}


VIEWS = {part.__name__: part for part in (NStep, FrameStack, Sequence)}


PARTS: dict[str, dict[str, type[Any]]] = {"sampler": SAMPLERS, "inner": SAMPLERS, "view": VIEWS, "window": VIEWS}
"""Which parts there are, by what they are used as."""


def describe(part: Any) -> dict[str, Any] | None:
    """A sampler or view of relive's own as JSON; None for one that a user wrote, or that has a function of theirs.

    Such a one has to be passed to ``load``.
    """
    names = PARAMETERS.get(cast("type[Any]", type(part)))
    if names is None or getattr(part, "each_reward", None) is not None:  # a function of the user's
        return None
    values = {POSITIONAL.get(name, name): getattr(part, name) for name in names}
    inner = {name: describe(value) for name, value in values.items() if isinstance(value, tuple(PARAMETERS))}
    if None in inner.values():
        return None
    return {"part": type(part).__name__, **{name: plain(value) for name, value in (values | inner).items()}}


def plain(value: Any) -> Any:
    """A parameter as JSON takes it."""
    if isinstance(value, tuple):
        return [plain(member) for member in cast("tuple[Any, ...]", value)]
    return cast("Any", value).item() if isinstance(value, np.generic) else value


def rebuild(data: Any, what: str) -> Any:
    """The part that :func:`describe` described, which is used as ``what``.

    Raises:
        FileFormatError: there is no such part, or its parameters are not right.
    """
    given: dict[str, Any] = dict(cast("dict[str, Any]", data)) if isinstance(data, dict) else {}
    name = given.pop("part", None)
    part = PARTS.get(what, {}).get(name) if isinstance(name, str) else None
    if part is None:
        raise FileFormatError(
            f"the saved {what} is not one of relive's own, or has functions of yours, which no save holds "
            f"({data!r:.200}); pass load(..., {what}=...)"
        )
    known = {POSITIONAL.get(name, name) for name in PARAMETERS[part]}
    try:
        if given.keys() - known:
            raise ValueError(f"it has no {min(given.keys() - known)!r:.80}")
        return part(**{name: _value(value, name) for name, value in given.items()})
    except (TypeError, ValueError, OverflowError) as error:
        raise FileFormatError(
            f"the saved {what} has parameters that make no sense: {given!r:.200} ({error})"
        ) from error


def _value(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return rebuild(cast("dict[str, Any]", value), name)
    if isinstance(value, list):
        return tuple(_value(member, name) for member in cast("list[Any]", value))
    if type(value) is int and abs(value) > LARGEST_PARAMETER:
        raise ValueError(f"{name} is {value!r:.80}")
    return value


def kinds(part: Any) -> tuple[Any, ...]:
    """What kind a described sampler is of, and the one inside it; nothing for one that a user wrote."""
    return () if part is None else (part["part"], *kinds(part.get("inner")))
