"""Checks of arguments before anything changes: sizes, whole numbers, steps of many rows, finite numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import DTypeError, FieldError, NotFiniteError, ParameterError, SchemaError, ShapeError
from ..parameters import is_count
from ..steps.arrays import Ints, as_host
from ..steps.checker import refuse_unreadable
from ..steps.schema import Field
from ..steps.trees import Path, dotted

__all__ = ["flattened", "refuse_not_finite", "require_rows", "row_mask", "whole_numbers"]


MOST = 2**31 - 1
"""The most rows of a batch."""


FINITE = frozenset(("reward", "action", "obs", "next_obs"))
"""The fields checked in debug mode. Other fields may contain infinities on purpose."""


def require_rows(batch_size: int) -> None:
    """Require a possible size of a batch.

    Raises:
        ParameterError: it is not a whole number from 1 to ``MOST``.
    """
    if batch_size.__class__ is int and 1 <= batch_size <= MOST:  # the usual case; the full test takes 1 us
        return
    if not is_count(batch_size, 1) or batch_size > MOST:
        raise ParameterError(
            f"batch_size={batch_size!r}: ask for a whole number of rows, at least 1 and at most {MOST}"
        )


def require_alike(buffer: Any, other: Any, envs: Mapping[int, int] | None = None) -> None:
    """Refuse another buffer whose rows do not fit into this one.

    Args:
        buffer: the buffer that gets the rows.
        other: the buffer that has the rows.
        envs: env of ``other`` -> env of ``buffer``; None keeps every env's number.

    Raises:
        SchemaError: the buffers differ in their schema, number of envs or order.
        ParameterError: there is no such env.
    """
    for name in ("schema", "num_envs", "ordered", "own_next_obs"):
        if getattr(other, name) != getattr(buffer, name) and not (name == "num_envs" and envs is not None):
            raise SchemaError(
                f"append: expected a buffer of {name}={getattr(buffer, name)!r}, got {getattr(other, name)!r}"
            )
    for env, to in (envs or {}).items():
        if not (is_count(env) and env < other.num_envs and is_count(to) and to < buffer.num_envs):
            raise ParameterError(
                f"append(envs={{{env!r}: {to!r}}}): expected an env of {other.num_envs} and one of {buffer.num_envs}"
            )


def whole_numbers(values: Any, name: str) -> Ints:
    """A vector of whole numbers as int64.

    Raises:
        DTypeError: the numbers are not integers. Bools and floats are refused, too.
    """
    given = as_host(values, name)
    if given.size and given.dtype.kind not in "iu":
        raise DTypeError(f"{name}: expected integers, got {given.dtype}")
    return np.ascontiguousarray(given, np.int64)


def row_mask(mask: Any, count: int) -> Any:
    """The rows that are kept, bool ``[count]``.

    Raises:
        ShapeError: the mask has another shape or dtype.
    """
    kept = as_host(mask, "mask")
    if count == 1 and not kept.ndim:  # with one env, the leading axis may be left out
        kept = kept.reshape(1)
    if kept.shape != (count,) or kept.dtype != np.bool_:
        raise ShapeError(f"mask: expected bool ({count},), got {kept.dtype} {kept.shape}")
    return kept


def flattened(steps: Mapping[str, Any], width: tuple[int, ...]) -> tuple[dict[str, Any], int]:
    """Fields ``[T, N, ...]`` as ``[T * N, ...]``, and T.

    Args:
        steps: the fields.
        width: (N,).

    Raises:
        FieldError: ``steps`` is not a mapping.
        ShapeError: the fields do not all have the same T, or do not have this N.
    """
    if not hasattr(steps, "items"):
        raise FieldError(f"extend: expected a mapping of fields, got {type(steps).__name__}; pass {{'obs': ..., ...}}")
    fronts: set[tuple[int, ...]] = set()
    try:
        values = {name: _flattened(value, fronts) for name, value in steps.items()}
    except ValueError as error:
        raise ShapeError(f"extend: expected arrays, got lists of several lengths ({error})") from error
    except RuntimeError:
        refuse_unreadable(steps)
        raise
    if len(fronts) != 1 or any(front[1:] != width for front in fronts):
        raise ShapeError(f"extend: expected (steps, {width[0]}) in front of every field, got {sorted(fronts)}")
    ((count, _),) = fronts
    return values, count


def _flattened(tree: Any, fronts: set[tuple[int, ...]]) -> Any:
    """Arrays ``[T, N, ...]`` as ``[T * N, ...]``; adds the (T, N) of each, nested or not, to ``fronts``."""
    # the most common type first: isinstance of a tensor or a mapping is slow
    if type(tree) is not np.ndarray and not isinstance(tree, np.ndarray | Tensor):
        if isinstance(tree, Mapping) or hasattr(tree, "items"):
            return {name: _flattened(member, fronts) for name, member in cast("Any", tree).items()}
        if isinstance(tree, tuple):
            return tuple(_flattened(member, fronts) for member in cast("tuple[Any, ...]", tree))
        tree = np.asarray(tree)
    shape: tuple[int, ...] = cast("Any", tree).shape
    front = tuple(shape[:2])
    fronts.add(front)
    return cast("Any", tree).reshape((math.prod(front), *shape[2:]))


def refuse_not_finite(
    fields: Mapping[Path, Field],
    leaves: Sequence[Any],
    final: Sequence[Any] | None,
    envs: Ints,
    kept: NDArray[np.bool_],
) -> None:
    """Refuse NaN and infinity in rewards, actions and observations, and in the final observations of ended episodes.

    Args:
        fields: the stored fields, in order.
        leaves: the checked leaves ``[K, ...]``.
        final: the leaves of the final observations, if they were passed separately.
        envs: int64 ``[K]``, the env of each row.
        kept: bool ``[K]``, the rows that are stored.

    Raises:
        NotFiniteError: names the field, the row and its env.
    """
    by_path = dict(zip(fields, leaves, strict=True))
    done = as_host(by_path["terminated",]) | as_host(by_path["truncated",])
    looked = [(path, value, kept) for path, value in by_path.items() if path[0] in FINITE]
    if final is not None:
        obs = [path for path in by_path if path[0] == "obs"]
        looked += [(("next_obs", *path[1:]), x, kept & done) for path, x in zip(obs, final, strict=True)]
    for path, value, rows in looked:
        dtype = fields[("obs", *path[1:]) if path[0] == "next_obs" else path].dtype
        bad = np.flatnonzero(rows & ~_finite_rows(value, dtype))
        if len(bad):
            raise NotFiniteError(
                f"field '{dotted(path)}': row {bad[0]}, of env {envs[bad[0]]}, is {value[bad[0]]}, not finite as "
                f"{dtype}; fix the env or the policy"
            )


def _finite_rows(value: Any, dtype: torch.dtype) -> NDArray[np.bool_]:
    """Which rows of a checked leaf are finite in the dtype that they are stored in: bool ``[K]``."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return np.ones(len(value), np.bool_)
    given = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    stored = given.to(dtype) if given.is_floating_point() or given.is_complex() else given.view(dtype)  # its bits
    return as_host(stored.isfinite().reshape(len(given), -1).all(1))
