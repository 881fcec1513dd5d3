"""Live buffers and saves: the steps of any source that the audit reads, as a Log."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..look.experience import Experience, Leaves, same_rows
from ..look.readers import experience_of
from ..steps.arrays import Array
from ..steps.trees import nest
from .log import Log

__all__ = ["log_of"]


def log_of(source: Any) -> Log:
    """The steps of any source that :func:`relive.audit` reads, such as a live buffer of another library.

    Observations after steps are kept if the source has them. Rows are env by env, each env in the order of time. If the
    source has only the one after each env's last step, the others are those of the following rows, and after an end the
    step's own observation stands for it.

    Raises:
        FieldError, ShapeError: the source cannot be read.
    """
    steps = experience_of(source)
    fields: dict[str, Any] = nest(steps.others)
    fields |= {"reward": steps.reward, "terminated": steps.terminated, "obs": _tree(steps.obs)}
    if steps.action:
        fields["action"] = _tree(steps.action)
    after = _after(steps)
    if after is not None:
        fields["next_obs"] = _tree(after)
    fields["truncated"] = _cuts(steps, after)
    return Log(steps.source, fields, steps.lacks)


def _tree(leaves: Leaves) -> Any:
    """Leaves as a nested field."""
    return leaves[()] if () in leaves else nest(leaves)


def _after(steps: Experience) -> Leaves | None:
    """The observations after steps ``[S, ...]``, as :func:`log_of` says; None if they are not known."""
    if steps.next_obs is not None or steps.last_obs is None:
        return steps.next_obs
    row, last = np.arange(len(steps)), ~steps.follows
    following = row + (steps.follows & ~steps.ended)
    found = {path: leaf[following] for path, leaf in steps.obs.items()}
    for path, leaf in found.items():
        leaf[last] = steps.last_obs[path][steps.env[last]]
    return found


def _cuts(steps: Experience, after: Leaves | None) -> Array:
    """Which steps were truncated, bool ``[S]``.

    A running episode counts as truncated, too, if the observation after it is not known, or is by chance that of the
    following row, which is of another env or episode.
    """
    truncated = np.zeros(len(steps), np.bool_) if steps.truncated is None else steps.truncated.copy()
    running = ~steps.follows & ~steps.ended
    if after is not None:
        for path, leaf in steps.obs.items():
            running[:-1] &= same_rows(after[path][:-1], leaf[1:])
        running[-1:] = False
    return truncated | running
