"""What the chunks of a replay are, in plain Python: the rows of each env, written down one after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

Fields = Mapping[Any, Any]
"""The arrays of a step or of an observation, by path."""


class Step(NamedTuple):
    """A step of an env, and what came after it."""

    obs: Fields
    rest: Fields
    """All other fields."""
    next_obs: Fields
    terminated: bool
    truncated: bool
    cut: bool = False
    """True if the episode was interrupted after it."""


class Row(NamedTuple):
    """An observation, the step that was taken there, and the one that led there; None where there is none."""

    obs: Fields
    step: Step | None
    before: Step | None
    timestep: int
    over: bool
    """True if it is the last row of its episode."""
    number: int
    """Of the stored row that has the observation."""
    last: int
    """Of the step before."""


def written(steps: list[Step], own: bool) -> list[Row]:
    """The rows of an env. With ``own``, each step is stored with the observation after it."""
    rows, number, t, before = list[Row](), 0, 0, None
    for i, step in enumerate(steps):
        done = step.terminated or step.truncated
        lost = step.cut and not done and not own  # what the step led to is not known
        rows.append(Row(step.obs, None if lost else step, before, t, lost, number, number - 1))
        newest = i + 1 == len(steps)
        if done or (own and (step.cut or newest)):
            final = number if own else number + 1
            rows.append(Row(step.next_obs, None, step, t + 1, done or step.cut, final, number))
            number = final
        number += 1
        t, before = (0, None) if done or step.cut else (t + 1, step)
    return rows


def chunks(steps: list[Step], length: int, own: bool, oldest: int) -> Iterator[tuple[int, list[Row]]]:
    """The chunks of an env that can be drawn: the number of the last step, and the rows.

    ``oldest`` is the number of the oldest row that is stored.
    """
    rows = written(steps, own)
    first = {row.number for row in rows if row.timestep == 0}
    for end in range(length - 1, len(rows)):
        if rows[end].before is None:
            continue  # it begins an episode
        earliest = rows[end].last - length + 2  # as many stored rows as the chunk has, but for its last
        if earliest >= oldest + (earliest not in first):
            yield rows[end].last, rows[end - length + 1 : end + 1]


def columns(rows: list[Row], example: Step, last: dict[Any, Any], stored: dict[Any, Any]) -> dict[Any, Any]:
    """The fields ``[L, ...]`` of a chunk, by path. ``last`` and ``stored`` map names to those of fields of a step."""
    found: dict[Any, Any] = {path: [row.obs[path] for row in rows] for path in example.obs}

    def field(step: Step | None, path: Any, padding: bool = False) -> Any:
        return np.full_like(example.rest[path], padding) if step is None else step.rest[path]

    for path in example.rest:
        if path[0] != "hidden":
            found[path] = [field(row.step, path, path[0] == "action_mask") for row in rows]
    for path, of in last.items():
        found[path] = [field(row.before, of) for row in rows]
    for path, of in stored.items():  # each step has it already
        found[path] = [field(row.before, of) if row.step is None else row.step.rest[path] for row in rows]
    found["is_first",] = [row.timestep == 0 for row in rows]
    found["is_last",] = [row.over for row in rows]
    found["is_terminal",] = [row.over and row.before is not None and row.before.terminated for row in rows]
    found["mask",] = [True] * len(rows)
    found["timestep",] = [row.timestep for row in rows]
    return {path: np.stack(values) for path, values in found.items()}
