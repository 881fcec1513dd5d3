"""convert: experience from one format into another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .. import exchange
from ..errors import ParameterError
from ..exchange.log import Log
from ..replay.buffer import ReplayBuffer
from ..steps.arrays import Array
from ..steps.trees import nest
from .experience import Experience, Leaves
from .readers import experience_of

__all__ = ["convert", "log_of"]


def log_of(source: Any) -> Log:
    """The steps of any source that :func:`relive.audit` reads, such as a live buffer of another library.

    Observations after steps are kept if the source has them. Rows are env by env, each env in the order of time.

    Raises:
        FieldError, ShapeError: the source cannot be read.
    """
    steps = experience_of(source)
    fields: dict[str, Any] = nest(steps.others)
    fields |= {"reward": steps.reward, "terminated": steps.terminated, "obs": _tree(steps.obs)}
    if steps.action:
        fields["action"] = _tree(steps.action)
    if steps.next_obs is not None:
        fields["next_obs"] = _tree(steps.next_obs)
    fields["truncated"] = _cuts(steps)
    return Log(steps.source, fields, steps.lacks)


def _tree(leaves: Leaves) -> Any:
    """Leaves as a nested field."""
    return leaves[()] if () in leaves else nest(leaves)


def _cuts(steps: Experience) -> Array:
    """Which steps were truncated. Where a row of another env follows, and nobody knows what came next, it is a cut."""
    truncated = np.zeros(len(steps), np.bool_) if steps.truncated is None else steps.truncated.copy()
    if steps.next_obs is None:
        truncated |= ~steps.follows & ~steps.ended
    return truncated


READERS: dict[str, Callable[[str], Log]] = {
    "minari": exchange.from_minari,
    "relive": lambda path: log_of(Path(path)),
}
"""Format -> what reads it from a path or an id."""


WRITERS: dict[str, Callable[[ReplayBuffer, str], Any]] = {
    "minari": exchange.to_minari,
    "relive": lambda replay, path: replay.save(path),
}
"""Format -> what writes it."""


def convert(source: str, target: str) -> Log:
    """Read experience in one format and write it in another; both are ``FORMAT:WHERE``, such as ``minari:my/set-v0``.

    Without a format, ``WHERE`` is a save of relive.

    Returns:
        what was read, with what the source lacks.

    Raises:
        ParameterError: there is no such format.
        FieldError, ShapeError, FileFormatError: the source cannot be read.
    """
    read, origin = _side(source, READERS)
    write, destination = _side(target, WRITERS)
    log = read(origin)
    write(log.replay(), destination)
    return log


def _side(text: str, known: dict[str, Any]) -> tuple[Any, str]:
    """What reads or writes one side, and where."""
    name, colon, where = text.partition(":")
    if not colon:
        return known["relive"], text
    if name not in known:
        raise ParameterError(f"convert: '{name}' in '{text}' is no format here; expected one of {', '.join(known)}")
    return known[name], where
