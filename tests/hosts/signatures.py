"""What a host's class or function takes and has that ours does not: the way in which a drop-in ages unseen."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["lacking"]

STARS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
EMPTY = inspect.Parameter.empty
PLACED = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD


def lacking(name: str, host: Any, ours: Any) -> list[str]:
    """In words, each public method, attribute and argument of the host's that ours lacks, or has otherwise.

    Args:
        name: of the class or function, for the words.
        host: a class or a function.
        ours: what stands in for it: a class, or a function that says by its annotation which class it makes.
    """
    found = list(_arguments(name, host, ours))
    if not inspect.isclass(host):
        return found
    made = ours if inspect.isclass(ours) else vars(sys.modules[ours.__module__])[ours.__annotations__["return"]]
    for member, value in _public(host):
        where = f"{name}.{member}"
        if not hasattr(made, member):
            found.append(f"{where}: not here")
        elif inspect.isclass(value):
            found += lacking(where, value, getattr(made, member))
        elif callable(value):
            found += _arguments(where, value, getattr(made, member))
    return found


def _public(host: type) -> Iterator[tuple[str, Any]]:
    """The members that the host's own classes define, by name."""
    root = host.__module__.partition(".")[0]
    for name in dir(host):
        owner = next((kind for kind in host.__mro__ if name in vars(kind)), object)
        if not name.startswith("_") and owner.__module__.partition(".")[0] == root:
            yield name, getattr(host, name)


def _arguments(where: str, host: Any, ours: Any) -> Iterator[str]:
    """Arguments that ours does not take, or at another place, or with another default."""
    theirs, mine = (_parameters(call) for call in (host, ours))
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in mine.values())
    for place, (name, one) in enumerate(theirs.items()):
        if one.kind in STARS:
            continue
        if name not in mine:
            if not takes_all:
                yield f"{where}({name}=): no such argument here"
            continue
        other = mine[name]
        if one.kind in PLACED and (other.kind not in PLACED or list(mine).index(name) != place):
            yield f"{where}({name}=): argument {place + 1} there, not here"
        if one.default is not EMPTY and _shown(one.default) != _shown(other.default):
            yield f"{where}({name}=): the default is {_shown(one.default)} there, {_shown(other.default)} here"


def _shown(default: Any) -> str:
    """A default in words that do not change from run to run: two functions are not compared."""
    return "none" if default is EMPTY else "a function" if inspect.isfunction(default) else repr(default)


def _parameters(call: Any) -> dict[str, inspect.Parameter]:
    """Of a class, those of its constructor; ``self`` of a method counts on both sides."""
    try:
        return dict(inspect.signature(call).parameters)
    except ValueError:  # written in C: there is nothing to read
        return {}
