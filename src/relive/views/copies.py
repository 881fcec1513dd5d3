"""Relabelled copies of an episode's steps, for a replay that stores single transitions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import FieldError, ShapeError
from ..steps.arrays import as_host
from ..steps.schema import Field
from ..steps.trees import Path, dotted, nest
from .goals import Arrays, GoalFunction, aims, first_not_finite, flat, refuse_reward, relabelled

__all__ = ["copied"]


def copied(
    episode: Mapping[str, Any], strategy: str, k: int, key: int, *, relabel: Callable[..., Any] | None,
    functions: Sequence[GoalFunction], info: str | None, achieved: str, desired: str,
) -> dict[str, Any]:  # fmt: skip
    """What :meth:`relive.Hindsight.copies` returns; ``key`` is the stream of its random numbers.

    Raises:
        FieldError, ShapeError, DTypeError, NotFiniteError: as that method.
    """
    steps = _steps_of(episode, () if relabel is not None else (achieved, desired))
    at, aim = aims(strategy, len(steps["reward",]), k, key)
    chosen = {path: array[at] for path, array in steps.items()}
    if relabel is not None:
        called, changed = "Hindsight(relabel=...)", _changed_by(relabel, steps, chosen, at, aim)
    else:
        called, changed = "Hindsight's function of reward", Arrays()
        given: Any = nest(chosen)[info] if info is not None else {}
        reached, goals = (steps["next_obs", achieved][rows] for rows in (at, aim))
        for function in functions:
            result = function(reached.copy(), goals.copy(), given)
            changed[function.path] = np.array(result, np.float32 if function.path == ("reward",) else np.uint8)
        changed |= {(name, desired): goals for name in ("obs", "next_obs")}
    if ("reward",) in changed:
        refuse_reward(called, changed["reward",], first_not_finite(changed["reward",]))
    flags = {path: x.view(np.bool_) for path, x in changed.items() if path[0] in ("terminated", "truncated")}
    return nest({path: array[:, None] for path, array in (chosen | changed | flags).items()})


def _changed_by(relabel: Callable[..., Any], steps: Arrays, chosen: Arrays, at: Any, aim: Any) -> Arrays:
    """What a function of whole steps changes in the copies ``chosen``, with goals after the steps ``aim``."""
    fields = {path: Field(array.shape[1:], torch.from_numpy(array[:0]).dtype) for path, array in steps.items()}
    after = {("obs", *path[1:]): array for path, array in steps.items() if path[0] == "next_obs"}
    first = {path: array[at * 0] for path, array in steps.items() if path[0] == "obs"}
    last = at * 0 + len(steps["reward",]) - 1
    seen = first, *({path: x[rows] for path, x in after.items()} for rows in (last, aim))
    return relabelled(relabel, fields, chosen, *seen)


def _steps_of(episode: Mapping[str, Any], members: Sequence[str]) -> Arrays:
    """The fields of an episode by path, ``[T, ...]``. Its observations must have these members."""
    steps = {path: as_host(value) for path, value in flat(dict(episode)).items()}
    wanted: list[Path] = [("reward",), ("terminated",), ("truncated",)]
    wanted += [(name, member) for name in ("obs", "next_obs") for member in members]
    wanted += [("next_obs", *path[1:]) for path in steps if path[0] == "obs"]
    missing = [dotted(path) for path in wanted if path not in steps]
    if missing:
        raise FieldError(f"Hindsight.copies: the episode lacks {', '.join(missing)}; pass every field of its steps")
    shapes = {array.shape[:2] for array in steps.values()}
    if len(shapes) != 1 or any(len(shape) < 2 or shape[0] < 1 or shape[1] != 1 for shape in shapes):
        raise ShapeError(f"Hindsight.copies: expected (steps, 1) in front of every field, got {sorted(shapes)}")
    return {path: array[:, 0] for path, array in steps.items()}
