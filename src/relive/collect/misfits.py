"""Misfits: what an env returned that its vector env could not hold, named after the vector env has failed on it."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from ..errors import EnvError, ReliveError
from ..printable import shown
from ..steps.schema import Path, Schema, descend, dotted

COLUMNS = {"_rewards": "reward", "_terminations": "terminated", "_truncations": "truncated"}
"""The name of a column in Gymnasium's vector env -> the field."""


def refuse_misfit(error: Exception) -> None:
    """Name the field and the space, after a vector env of Gymnasium failed in this process on what an env returned.

    It is read from where the error was raised, so that steps cost nothing. Other errors stay the envs' own.

    Raises:
        EnvError: a reward or a flag is not one value, or an observation is not as the space says.
    """
    if isinstance(error, ReliveError):
        return
    walked = list(traceback.walk_tb(error.__traceback__))
    files = [frame.f_code.co_filename.replace("\\", "/") for frame, _ in walked]
    held = [k for k, file in enumerate(files) if file.endswith("gymnasium/vector/sync_vector_env.py")]
    if not held:
        return
    frame = walked[held[-1]][0]
    vector: Any = frame.f_locals.get("self")
    if held[-1] == len(walked) - 1:  # the vector env itself failed, as it took one env's answer apart
        line = traceback.extract_tb(error.__traceback__)[-1].line or ""
        field = next((field for name, field in COLUMNS.items() if f"{name}[" in line), None)
        if field is not None and isinstance(error, ValueError | TypeError):
            kind = "float" if field == "reward" else "bool"
            raise EnvError(
                f"field '{field}': step() of env {frame.f_locals.get('i')} returned something else than one {kind} "
                f"({error!s:.200}); return one without a shape, such as {kind}({field}[0]) of an array of shape (1,)"
            ) from error
    elif any("gymnasium/vector/utils/" in file for file in files[held[-1] :]):
        for env, obs in enumerate(getattr(vector, "_env_obs", ())):
            found = _misfit(vector.single_observation_space, obs, ("obs",))
            if found is not None:
                path, space, given = found
                raise EnvError(
                    f"field '{dotted(path)}': env {env} returned {given}, but its observation_space has {space!s:.200} "
                    "there; set observation_space in the env, or in the wrapper that changes the observation, to what "
                    "reset() and step() return"
                ) from error


def refuse_unlike(obs: object, schema: Schema, error: Exception) -> NoReturn:
    """Name the first field of an observation of the envs that is not nested as the schema, or is no array.

    Raises:
        EnvError: with what came; or the error itself, if it is another one.
    """
    for path, leaf in schema.leaves.items():
        if path[0] != "obs":
            continue
        try:
            given: Any = descend(obs, path[1:])
            fits = not isinstance(given, Mapping) and np.asarray(given).dtype != object
        except (KeyError, IndexError, ValueError, TypeError):
            given, fits = obs, False
        if not fits:
            raise EnvError(
                f"field '{dotted(path)}': the envs returned {_kind(given)}, but the schema, which follows their "
                f"observation_space, has {leaf!r} there; set observation_space to what reset() and step() return, and "
                "make the schema again"
            ) from error
    raise error


def _misfit(space: object, obs: Any, path: Path) -> tuple[Path, object, str] | None:
    """The first leaf that is not as its space, with the space and what came; None if all are."""
    members: Any = obs
    spaces: Any = getattr(space, "spaces", None)
    if spaces is not None:
        by_name = hasattr(spaces, "keys")
        if not isinstance(obs, Mapping if by_name else tuple | list):
            return path, space, _kind(obs)
        for key, inner in spaces.items() if by_name else enumerate(spaces):
            try:
                member = members[key]
            except (KeyError, IndexError):
                return (*path, str(key)), inner, f"none in {_kind(obs)}"
            found = _misfit(inner, member, (*path, str(key)))
            if found is not None:
                return found
        return None
    shape = getattr(space, "shape", None)
    same = shape is None or (not isinstance(obs, Mapping) and np.shape(obs) == shape)
    return None if same else (path, space, _kind(obs))


def _kind(given: Any) -> str:
    """A value in words."""
    names: Any = given
    if isinstance(given, Mapping):
        return f"a {given.__class__.__name__} of {shown(list(names), 200)}"
    shape = getattr(given, "shape", None)
    return type(given).__name__ if shape is None else f"an array of shape {tuple(shape)}"
