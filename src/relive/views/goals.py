"""Steps with another goal: scratch memory for the kernels, and calls of the user's functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from ..errors import DTypeError, FieldError, NotFiniteError, ShapeError
from ..memory.store import Array, Ints, Store
from ..steps.arrays import as_host, as_tensor, check_castable, numpy_dtype, numpy_view
from ..steps.schema import Field, unknown_field
from ..steps.trees import Path, dotted, nest

__all__ = ["Arrays", "GoalBytes", "GoalFunction", "Steps", "arrays_of", "flat", "put", "relabelled"]


Arrays = dict[Path, Array]


class Steps(NamedTuple):
    """Memory for the steps in the windows of relabelled rows: see :func:`relive.kernels.reference.choose_goals`."""

    which: Ints
    begin: Ints
    now: Ints
    after: Ints
    spans: Ints
    rewards: Array
    flags: Array
    achieved: Array
    desired: Array
    used: Ints
    """The last step of each window, as :func:`relive.kernels.reference.relabel_windows` leaves it."""
    goals: list[Array]
    """``achieved`` and ``desired`` in their own dtype and shape; empty if kernels cannot read goals."""
    recorded: tuple[Array, Array, Array]
    """The recorded ``rewards`` and the two rows of ``flags``."""

    def owners(self, found: int) -> Ints:
        """For each step, the position of its row among the first ``found`` relabelled rows."""
        return np.repeat(np.arange(found), np.diff(self.begin[: found + 1]))


class GoalBytes:
    """The offsets, shape and dtype of the goals in a store's rows."""

    def __init__(self, store: Store, achieved: Path, desired: Path) -> None:
        planned, offsets = store.planned, store.layout.offsets
        self.packed = achieved in offsets and desired in planned.batch.offsets
        """Whether the kernels can read goals and write them into a batch."""
        field = store.leaves.get(achieved) if self.packed else None
        self.shape = (0,) if field is None else field.shape
        self.dtype = np.dtype(np.uint8) if field is None else numpy_dtype(field.dtype)
        self.goal = np.array([offsets[achieved] if field else 0, field.nbytes if field else 0], np.int64)
        places = [desired, ("next_obs", *desired[1:])] if self.packed else []
        self.goals = np.array([planned.batch.offsets[path] for path in places], np.int64)
        self._scratch: tuple[tuple[int, int], Steps] | None = None

    def scratch(self, count: int, n: int) -> Steps:
        """Memory for the steps of a batch, reused by the next batch."""
        if self._scratch is None or self._scratch[0] != (count, n):
            size = count * n
            which, begin, now, after, used = (
                np.empty(length, np.int64) for length in (count, count + 1, size, size, count)
            )
            rewards, flags = np.empty(size, np.float32), np.empty((2, size), np.uint8)
            achieved, desired = (np.empty((size, int(self.goal[1])), np.uint8) for _ in range(2))
            goals: list[Any] = [x.view(self.dtype).reshape(-1, *self.shape) for x in (achieved, desired) if self.packed]
            fresh = Steps(
                which, begin, now, after, np.empty((3, count), np.int64), rewards, flags, achieved, desired, used,
                goals, (rewards, flags[0], flags[1]),
            )  # fmt: skip
            self._scratch = (count, n), fresh
        return self._scratch[1]


class GoalFunction:
    """A user's function of goals, with checks of its results.

    Args:
        name: the field that it computes: "reward", "terminated" or "truncated".
        function: (achieved, desired[, info]) -> ``[M]``.
        stored: whether a stored field is passed as info.
    """

    def __init__(self, name: str, function: Callable[..., Any], stored: bool) -> None:
        self.path: Path = (name,)
        self._function, self._informed = function, _takes_info(function, stored)

    def __call__(self, achieved: Array, desired: Array, info: Any) -> Array:
        """The results for M steps: ``[M]``, float32 for the reward, else uint8.

        Raises:
            ShapeError: the function did not return one number per step.
            DTypeError: a flag is not a bool.
            NotFiniteError: a reward is NaN or infinite.
        """
        goals = achieved.copy(), desired.copy()  # the function may write to its arguments
        result = as_host(self._function(*goals, info) if self._informed else self._function(*goals))
        count, kind = len(achieved), result.dtype.kind
        if result.shape != (count,):
            raise ShapeError(
                f"{self}: expected ({count},), one result for each of the {count} goals, got {result.shape}; it gets "
                "all goals at once, so compute along the last axis: np.linalg.norm(achieved - desired, axis=-1)"
            )
        if self.path != ("reward",):
            if kind != "b":
                raise DTypeError(f"{self}: expected bools, got {result.dtype}; return a comparison, or .astype(bool)")
            return result.astype(np.uint8)
        if kind not in "fiub":
            raise DTypeError(f"{self}: expected numbers, got {result.dtype}")
        return _finite(result.astype(np.float32), self)

    def __str__(self) -> str:
        return f"Hindsight's function of {self.path[0]}"


def _takes_info(function: Callable[..., Any], stored: bool) -> bool:
    """Whether to call a function of goals with info as its third argument.

    Yes if a field is ``stored`` for it and the function accepts it, or if the function requires it.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some compiled functions have no signature
        return stored
    try:
        signature.bind(*([None] * (3 if stored else 2)))
    except TypeError:
        return not stored
    return stored


def _finite(rewards: Array, called: object) -> Array:
    good = np.isfinite(rewards)
    if np.count_nonzero(good) < len(good):  # takes a fifth of the time of all()
        at = int(np.argmin(good))
        raise NotFiniteError(f"{called}: step {at} of {len(rewards)} has a reward of {rewards[at]}, not a float32")
    return rewards


def arrays_of(store: Store, places: Ints, paths: Iterable[Path] | None = None) -> Arrays:
    """Fields of rows, as arrays in RAM."""
    return {path: numpy_view(tensor.cpu()) for path, tensor in store.read(places, paths).items()}


def put(store: Store, fields: dict[Path, Tensor], changed: Arrays, which: Ints, begin: Ints, used: Ints) -> None:
    """Write changed fields into the batch: those of each window's first step, and the observation after its last."""
    arrays = [x[used if path[0] == "next_obs" else begin] for path, x in changed.items()]
    rows, *values = store.tensors(which, *arrays)
    for path, value in zip(changed, values, strict=True):
        field = fields[path]
        field[rows] = value if value.dtype is field.dtype else value.view(field.dtype)


def flat(tree: Any, at: Path = ()) -> dict[Path, Any]:
    """The leaves of nested mappings and tuples, by path."""
    if isinstance(tree, tuple):
        tree = {str(i): member for i, member in enumerate(cast("tuple[Any, ...]", tree))}
    if not isinstance(tree, Mapping):
        return {at: tree}
    members = cast("Mapping[str, Any]", tree).items()
    return {path: leaf for name, member in members for path, leaf in flat(member, (*at, name)).items()}


def relabelled(
    function: Callable[..., Any], leaves: Mapping[Path, Field], steps: Arrays, *observations: Arrays
) -> Arrays:
    """The fields that a function of whole steps changes: arrays ``[M, ...]`` of the fields' dtypes, by path.

    Raises:
        FieldError: the function changes a field that does not exist.
        ShapeError, DTypeError: a changed field does not fit its declaration.
        NotFiniteError: a reward is NaN or infinite.
    """
    count = len(steps["reward",])
    nested = [nest({path[1:] or ("",): array for path, array in part.items()}) for part in observations]
    result = function(nest(steps), *(part.get("", part) for part in nested))
    if not isinstance(result, Mapping):
        raise FieldError(f"Hindsight(relabel=...): expected a dict of the fields that change, got {type(result)}")
    changed: Arrays = {}
    for path, value in flat(result).items():
        name = f"Hindsight(relabel=...), field '{dotted(path)}'"
        if path not in steps:
            raise FieldError(unknown_field(path, [dotted(known) for known in steps], "the steps given to relabel"))
        field = leaves[("obs", *path[1:]) if path[0] == "next_obs" else path]
        tensor = torch.from_numpy(as_host(value)) if isinstance(value, Tensor) else as_tensor(value, name)
        if tuple(tensor.shape) != (count, *field.shape):
            raise ShapeError(
                f"{name}: expected {(count, *field.shape)}, a row for each step, got {tuple(tensor.shape)}"
            )
        if tensor.dtype is not field.dtype:
            check_castable(tensor, field.dtype, name)
            tensor = tensor.to(field.dtype)
        changed[path] = numpy_view(tensor)
    if ("reward",) in changed:
        _finite(changed["reward",], "Hindsight(relabel=...)")
    return changed
