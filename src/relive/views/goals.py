"""Steps with another goal: scratch memory for the kernels, and calls of the user's functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..errors import DTypeError, FieldError, NotFiniteError, ShapeError
from ..kernels.reference.hindsight import RelabelledSteps
from ..memory.layout import BatchLayout
from ..ring.ring import Ring
from ..steps.arrays import Array, Ints, as_host, as_tensor, check_castable, numpy_dtype, numpy_view
from ..steps.schema import Field, unknown_field
from ..steps.trees import Path, dotted, nest

__all__ = [
    "Arrays",
    "GoalBytes",
    "GoalFunction",
    "Scratch",
    "aims",
    "arrays_of",
    "first_not_finite",
    "flat",
    "put",
    "read_info",
    "refuse_reward",
    "relabelled",
]


Arrays = dict[Path, Array]


class Scratch(NamedTuple):
    """Memory for the steps of relabelled rows."""

    size: tuple[int, int]
    """B and n."""
    steps: RelabelledSteps
    handle: Ints
    """What compiled kernels take for ``steps``."""
    results: dict[str, Array]
    """The rewards and flags of ``steps`` by the names of their fields."""

    def owners(self, found: int) -> Ints:
        """For each step, the position of its row among the first ``found`` relabelled rows."""
        return np.repeat(np.arange(found), np.diff(self.steps.begin[: found + 1]))

    def goals(self, ring: Ring, path: Path, found: int) -> list[Array]:
        """The goals achieved after each step, and the new goals, ``[M, ...]``, where kernels cannot read them."""
        places = self.steps.after[: self.steps.begin[found]], self.steps.spans[2][self.owners(found)]
        return [arrays_of(ring, rows, [path])[path] for rows in places]


class GoalBytes:
    """Where the goals are in a ring's rows and in a batch's, and their shape and dtype; and the layout of that batch.

    The handle of ``batch`` ends with the entries that :mod:`relive.kernels.reference.hindsight` lists.

    Args:
        ring: the ring.
        achieved: the field with the achieved goal.
        desired: the field with the desired goal.
        strategy: the number of the strategy, one of :mod:`relive.kernels.reference.hindsight`.
        finished: whether only episodes that are over count.
    """

    def __init__(self, ring: Ring, achieved: Path, desired: Path, strategy: int, finished: bool) -> None:
        store, following = ring.store, ("next_obs", *desired[1:])
        self.batch = BatchLayout(store.groups, store.layout, False, {("relabelled",): Field((), torch.bool)})
        stored, written = store.layout.offsets, self.batch.offsets
        self.packed = achieved in stored and desired in written
        """Whether the kernels can read goals and write them into a batch."""
        field = ring.leaves[achieved] if self.packed else Field((0,), torch.uint8)
        self.shape, self.dtype, self.nbytes = field.shape, numpy_dtype(field.dtype), field.nbytes
        places = (stored[achieved], field.nbytes, written[desired], written[following]) if self.packed else (0,) * 4
        own = *places, written["relabelled",], strategy, finished
        self.batch.handle = np.array([*self.batch.handle, *own], np.int64)
        self.spare: Scratch | None = None
        """Memory that a batch is done with."""

    def scratch(self, count: int, n: int) -> Scratch:
        """Memory for the steps of a batch. A batch that a function of goals draws gets other memory."""
        found, self.spare = self.spare, None
        if found is None or found.size != (count, n):
            size = count * n
            which, begin, now, after, used, places, last = (
                np.empty(length, np.int64) for length in (count, count + 1, size, size, count, count, count)
            )
            rewards, flags = np.empty(size, np.float32), np.empty((2, size), np.uint8)
            spans = np.empty((3, count), np.int64)
            steps = RelabelledSteps(which, begin, now, after, spans, rewards, flags, used, places, last)
            results: dict[str, Any] = {"reward": rewards, "terminated": flags[0], "truncated": flags[1]}
            found = Scratch((count, n), steps, kernels.fast().handle_of(steps), results)
        return found

    def opened(self, pairs: Any, total: int) -> list[Array]:
        """The first ``total`` achieved goals and new goals of ``pairs`` ``[2, M, nbytes]``, as arrays of goals."""
        shape, after = (total, *self.shape), pairs.shape[1] * self.nbytes
        return [np.ndarray(shape, self.dtype, pairs), np.ndarray(shape, self.dtype, pairs, after)]


class GoalFunction:
    """A user's function of goals, with checks of its results.

    Args:
        name: the field that it computes: "reward", "terminated" or "truncated".
        function: (achieved, desired[, info]) -> ``[M]``.
        stored: whether a stored field is passed as info.
    """

    def __init__(self, name: str, function: Callable[..., Any], stored: bool) -> None:
        self.path: Path = (name,)
        self._kinds = "fiub" if name == "reward" else "b"
        self._function, self._informed = function, _takes_info(function, stored)

    def __call__(self, achieved: Array, desired: Array, info: Any) -> Array:
        """The results for M goals, ``[M]``. The function may have written to the goals, and may keep them.

        Rewards may still be NaN or infinite: see :func:`refuse_reward`.

        Raises:
            ShapeError: the function did not return one number per step.
            DTypeError: a flag is not a bool, or a reward not a number.
        """
        result = self._function(achieved, desired, info) if self._informed else self._function(achieved, desired)
        if type(result) is not np.ndarray:
            result = as_host(result)
        count, kind = len(achieved), result.dtype.kind
        if result.shape != (count,):
            raise ShapeError(
                f"{self}: expected ({count},), one result for each of the {count} goals, got {result.shape}; it gets "
                "all goals at once, so compute along the last axis: np.linalg.norm(achieved - desired, axis=-1)"
            )
        if kind not in self._kinds:
            if self._kinds == "b":
                raise DTypeError(f"{self}: expected bools, got {result.dtype}; return a comparison, or .astype(bool)")
            raise DTypeError(f"{self}: expected numbers, got {result.dtype}")
        return result

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


def first_not_finite(rewards: Array) -> int:
    """The position of the first reward that is NaN or infinite, or -1."""
    good = np.isfinite(rewards)
    return -1 if good.all() else int(np.argmin(good))


def refuse_reward(called: object, rewards: Array, at: int) -> None:
    """Refuse the reward of step ``at``; -1 means that all are good.

    Raises:
        NotFiniteError: ``at`` is not -1.
    """
    if at >= 0:
        raise NotFiniteError(f"{called}: step {at} of {len(rewards)} has a reward of {rewards[at]}, not a float32")


def arrays_of(ring: Ring, places: Ints, paths: Iterable[Path] | None = None) -> Arrays:
    """Fields of rows, as arrays in RAM."""
    return {path: numpy_view(tensor.cpu()) for path, tensor in ring.take(places, paths).items()}


def read_info(ring: Ring, name: str, places: Ints) -> Any:
    """The field ``name`` of steps, with the members that it may have."""
    paths = [path for path in ring.leaves if path[0] == name]
    return nest(arrays_of(ring, places, paths))[name]


def put(ring: Ring, fields: dict[Path, Tensor], changed: Arrays, steps: RelabelledSteps, found: int) -> None:
    """Write changed fields into the batch: those of each window's first step, and the observation after its last."""
    begin, used = steps.begin[:found], steps.used[:found]
    arrays = [x[used if path[0] == "next_obs" else begin] for path, x in changed.items()]
    rows, *values = ring.tensors(steps.which[:found], *arrays)
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
    return changed


def aims(strategy: str, count: int, k: int, key: int) -> tuple[Ints, Ints]:
    """Choose goals for ``k`` copies of each of an episode's ``count`` steps, by a strategy of one episode.

    Returns:
        for each copy, the step that it copies and the step after which its goal was achieved, int64 each. With "past"
        the first step has no copies.
    """
    at, draws = np.repeat(np.arange(count), k), np.empty(count * k)
    kernels.fast().uniforms(np.uint64(key), draws)
    low, high = {"future": (at, count), "final": (count - 1, count), "episode": (0, count), "past": (0, at)}[strategy]
    aim = np.asarray(low + (draws * (high - low)).astype(np.int64))
    some = np.broadcast_to(high - low > 0, at.shape)
    return at[some], aim[some]
