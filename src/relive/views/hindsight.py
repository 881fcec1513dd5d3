"""Hindsight: transitions relabelled with goals that were reached."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import signature
from operator import attrgetter
from typing import Any, Literal, cast, get_args
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from .. import core
from ..core import Draw
from ..core import key as stream
from ..core.words import EPISODE, FINAL, FINALS, FUTURE, PAST, RANDOM
from ..device.contract import LONGEST_WINDOW, DeviceRead
from ..device.goals import RESULTS, GoalForm, read_goals
from ..device.ring import DeviceRing
from ..errors import DTypeError, FieldError, NotFiniteError, ParameterError, SchemaError, ShapeError
from ..memory.device import DeviceRows
from ..memory.layout import WEIGHED, BatchLayout
from ..memory.ram import ALWAYS_IN_RAM
from ..memory.store import require_rows, vector
from ..parameters import GAMMA_RULE, Rule, checked, is_count, is_flag, is_number, is_steps
from ..ring.ring import EVERY_ROW, Ring
from ..steps.arrays import Array, Ints, Leaf, as_host, as_tensor, check_castable, numpy_dtype, numpy_view
from ..steps.schema import Field, Path, dotted, flatten, nest, unknown_field

Arrays = dict[Path, Array]

Strategy = Literal["future", "final", "episode", "past", "random"]

STRATEGIES: dict[str, int] = {"future": FUTURE, "final": FINAL, "episode": EPISODE, "past": PAST, "random": RANDOM}
"""The numbers of the strategies for kernels."""

COPIES = 2**32 + 2
"""The number of an episode's further random stream, for copies."""

REWARD: Path = ("reward",)

settings: attrgetter[tuple[Any, ...]] = attrgetter(
    "achieved", "desired", "info", "strategy", "finished_only", "reward_fn", "terminated_fn", "truncated_fn", "relabel",
    "tensors",
)  # fmt: skip
"""The parameters that decide what is read, and how."""


def _is_function(function: object) -> bool:
    return function is None or callable(function)


FUNCTION_RULE: Rule = (_is_function, "a function of arrays, (achieved, desired) or (achieved, desired, info), or None")


NAME_RULE: Rule = (lambda name: isinstance(name, str), "the name of a member of the observation")


@checked(
    reward_fn=FUNCTION_RULE,
    terminated_fn=FUNCTION_RULE,
    truncated_fn=FUNCTION_RULE,
    relabel=(_is_function, "a function (steps, initial, final, chosen) -> changed fields, or None"),
    strategy=(lambda strategy: strategy in get_args(Strategy), f"strategy is one of {', '.join(get_args(Strategy))}"),
    k=(lambda _: False, "k is an argument of the constructor alone; set ratio = k / (k + 1)"),
    ratio=(lambda ratio: is_number(ratio, 0, 1), "ratio, the share that is relabelled, is a number from 0 to 1"),
    info=(lambda info: info is None or isinstance(info, str), "info is the name of a field of the schema, or None"),
    achieved=NAME_RULE,
    desired=NAME_RULE,
    finished_only=(is_flag, "finished_only is True or False"),
    tensors=(is_flag, "tensors is True or False"),
    n=(is_steps, "n is a whole number of at least 1 and below 2**30"),
    gamma=GAMMA_RULE,
)
class Hindsight:
    """Hindsight experience replay (Andrychowicz et al. 2017): some rows of a batch get a goal that was reached later.

    Each row is relabelled with probability ``ratio``. Its new goal is the one achieved *after* a step that ``strategy``
    chooses (section 4.5 of the paper), among the stored steps of the same episode:

    - "future": any step from the row's own on; "final": the last step; "episode": any step;
    - "past": any step before the row's own; an episode's first step keeps its goal;
    - "random": any transition of the whole replay.

    A running or interrupted episode ends at its newest observation. The new goal replaces the one in ``obs`` and
    ``next_obs``. ``reward_fn`` computes the reward of each step in the row's n-step window before they are summed.
    ``terminated_fn`` and ``truncated_fn`` compute the flags, and the window ends where one is True; without them the
    recorded flags stay. ``discount``, ``steps``, ``next_obs`` and ``next_index`` follow. The batch has the fields of
    :class:`relive.NStep`, and ``relabelled`` (bool ``[B]``). The other rows are as recorded, as are reads without a
    draw (:meth:`relive.ReplayBuffer.data`). Stored data never changes.

    The functions get NumPy arrays with all steps of all relabelled rows at once: the goal achieved after each step and
    the new goal, ``[M, ...]``, and info if they take a third argument. They return ``[M]``: rewards or bools.

    ``relabel(steps, initial, final, chosen)`` may change any field instead. ``steps`` holds the M steps as nested dicts
    of arrays ``[M, ...]``, with ``next_obs``. The others are observations ``[M, ...]``: the first one still stored of
    each step's episode, its last one, and the one after the chosen step. It returns a nested dict of changed fields.

    Args:
        reward_fn: (achieved, desired[, info]) -> ``[M]``, such as an environment's ``compute_reward``.
        strategy: how the step is chosen whose achieved goal is used.
        k: relabelled rows per unchanged row; it sets ``ratio`` to k / (k + 1). Default 4.
        ratio: the share of rows that are relabelled, from 0 to 1.
        terminated_fn: (achieved, desired[, info]) -> bool ``[M]``.
        truncated_fn: (achieved, desired[, info]) -> bool ``[M]``.
        info: the name of a stored field to pass as info; without it info is an empty dict.
        achieved: the member of the observation with the achieved goal.
        desired: the member with the desired goal, of the same shape and dtype.
        finished_only: rows of running episodes keep their goal.
        n: rewards per window.
        gamma: discount per step. All parameters but ``k`` may be changed at any time.
        relabel: a function of whole steps that replaces all functions above.
        tensors: the functions of goals get tensors on the replay's device, and return such, instead of NumPy arrays. A
            replay on a device then draws such batches without the host: ``M`` is the batch size times n for each batch,
            with steps among them whose results nobody uses. A reward that is NaN or infinite is found later, and there
            is a warning.

    Raises:
        ParameterError: a parameter is out of range, here or when it is set later.
        SchemaError: when the view is set: the schema lacks such goals, or steps are stored without order.
        ShapeError, NotFiniteError: a function returned a wrong result; raised when a batch is drawn.
    """

    history = 0
    """No row before the anchor is needed."""
    reads_draws = True
    nests = True
    rule = EVERY_ROW
    """Every complete transition is an anchor."""

    def __init__(
        self,
        reward_fn: Callable[..., object] | None = None,
        strategy: Strategy = "future",
        *,
        k: float | None = None,
        ratio: float | None = None,
        terminated_fn: Callable[..., object] | None = None,
        truncated_fn: Callable[..., object] | None = None,
        info: str | None = None,
        achieved: str = "achieved_goal",
        desired: str = "desired_goal",
        finished_only: bool = False,
        n: int = 1,
        gamma: float = 0.99,
        relabel: Callable[..., object] | None = None,
        tensors: bool = False,
    ) -> None:
        if k is not None and (ratio is not None or not is_number(k, 0)):
            raise ParameterError(
                f"Hindsight(k={k!r}, ratio={ratio!r}): pass k, a number of at least 0, or ratio, not both"
            )
        self.reward_fn = reward_fn
        self.strategy = strategy
        self.ratio: float = ratio if ratio is not None else 0.8 if k is None else k / (k + 1)
        self.terminated_fn = terminated_fn
        self.truncated_fn = truncated_fn
        self.info = info
        self.achieved = achieved
        self.desired = desired
        self.finished_only = finished_only
        self.n = n
        self.gamma = gamma
        self.relabel = relabel
        self.tensors = tensors
        self._fitted: tuple[Any, Any, Any, Any] = (lambda: None), None, None, None
        """The ring that was read last, the parameters then, and what :meth:`_fit` gave."""
        self._there: tuple[Callable[[], Ring | None], object, DeviceRead | None] = (lambda: None), None, None
        """The ring that a device read last, the parameters then, and how it read."""
        self._require_functions()

    def require(self, ring: Ring) -> None:
        """Refuse a ring whose steps lack such goals.

        Raises:
            SchemaError: steps are stored without order, a field is missing, or a field's name is taken.
        """
        self._require_functions()
        leaves = ring.leaves
        if ring.own_next:
            raise SchemaError(
                "Hindsight needs steps in order, to know what comes later; this replay stores single transitions: "
                "append the copies from Hindsight.copies(episode) instead"
            )
        if ("relabelled",) in leaves:
            raise SchemaError("field 'relabelled': Hindsight gives batches a field of that name; give yours another")
        if self.info is not None and not any(path[0] == self.info for path in leaves):
            known = ", ".join(sorted({path[0] for path in leaves}))
            raise SchemaError(f"Hindsight(info={self.info!r}): the schema has no such field; it has {known}")
        if self.relabel is not None:
            return
        achieved, desired = (leaves.get(("obs", name)) for name in (self.achieved, self.desired))
        if achieved is None or achieved != desired or not _has_numpy_dtype(achieved):
            members = {dotted(path): field for path, field in leaves.items() if path[0] == "obs"}
            raise SchemaError(
                f"Hindsight(achieved={self.achieved!r}, desired={self.desired!r}): expected an observation with "
                f"members of these names, of one shape and dtype that NumPy has, got {members}; name the members that "
                "hold goals, or pass relabel"
            )

    def _require_functions(self) -> None:
        functions = self.reward_fn, self.terminated_fn, self.truncated_fn, self.info
        if (self.relabel is None) == (self.reward_fn is None) or (self.relabel and any(functions)):
            raise ParameterError(
                "Hindsight: pass reward_fn (and terminated_fn, truncated_fn, info), or else relabel alone"
            )

    def __repr__(self) -> str:
        return f"Hindsight({', '.join(f'{name}={getattr(self, name)!r}' for name in NAMES)})"

    def __reduce__(self) -> tuple[partial[Hindsight], tuple[()]]:
        """For pickle: the parameters with their functions, which must be picklable."""
        return partial(Hindsight, **{name: getattr(self, name) for name in NAMES}), ()

    def read(
        self, ring: Ring, places: Ints | Draw, key: int | None = None, kind: type[dict[str, Any]] | None = None
    ) -> Any:
        """The fields ``[B, ...]`` of the windows that start at ``places``; ``key`` decides which get another goal.

        They come by path, or nested as this kind of dict. Places are those of anchors, or a draw; one by priority gives
        its ``weight`` and ``probability`` as well.

        Raises:
            SchemaError: the ring has no such goals.
            ShapeError, DTypeError, NotFiniteError, FieldError: a function returned a wrong result.
        """
        now, (of, then, fit, functions) = settings(self), self._fitted
        if of() is not ring or then != now:
            self.require(ring)
            fit = GoalBytes(
                ring, ("obs", self.achieved), ("obs", self.desired), STRATEGIES[self.strategy], bool(self.finished_only)
            )
            functions = self.goal_functions()
            self._fitted = ref(ring), now, fit, functions
        store, extras, ratio = ring.store, dict[str, Array](), 0.0 if key is None else self.ratio
        if ratio and not ring.notes_ends:
            ring.ends()
        chosen: Any = places
        if places.__class__ is not Draw:
            chosen = vector(places)
        elif store.apart is None:
            chosen, extras = chosen
        batch = fit.core.draw(chosen, self.n, self.gamma, key or 0, ratio)
        if batch.__class__ is int:
            require_rows(chosen, batch, store.num_rows)
        changed = self._relabel(ring, fit, functions, batch) if batch.chosen else None
        if store.apart is not None and not changed:
            return batch.fields(kind)
        fields = batch.fields() if store.apart is not None else fit.fields(ring, chosen, batch) | ring.extras(extras)
        if changed:
            _write_changed(ring, fields, changed, batch)
        return fields if kind is None else core.nested(fields, kind)

    def _relabel(self, ring: Ring, fit: GoalBytes, functions: list[GoalFunction], batch: core.GoalBatch) -> Arrays:
        """Have the functions judge the steps of the chosen rows, and then a kernel write the windows of these rows.

        Returns the fields that the kernel cannot write, by path, for each step.
        """
        results: list[Any] = [None] * len(RESULTS)
        changed = Arrays()
        if self.relabel is not None:
            changed = self._relabelled(self.relabel, ring, batch)
            results = [changed.pop(path, None) for path in RESULTS]
        else:
            goals: Sequence[Array] = batch.goals
            if not fit.packed:  # kernels cannot read them
                rows, path = (batch.after, batch.aim[_owners(batch)]), ("obs", self.achieved)
                goals = [_arrays_of(ring, places, [path])[path] for places in rows]
                changed = {(name, self.desired): goals[1] for name in ("obs", "next_obs")}
            info: object = {} if self.info is None else _info_of(ring, self.info, batch.now, self.tensors)
            for function in functions:
                spare = fit.packed and function is functions[-1]  # nobody reads these goals afterwards
                achieved, desired = goals if spare else [x.copy() for x in goals]
                if self.tensors:
                    achieved, desired = ring.tensors(achieved, desired)
                results[function.at] = function(achieved, desired, info)
        bad = batch.relabel(*results)
        if bad >= 0:
            raise _bad_reward(functions[0] if functions else "Hindsight(relabel=...)", results[0], bad)
        return changed

    def on_device(self, ring: Ring, rows: DeviceRing) -> DeviceRead | None:
        """How a device reads these windows; None if the host has to."""
        if not self.tensors or self.relabel is not None or rows.mode != FINALS:
            return None
        if (self.info,) in ALWAYS_IN_RAM or self.n > LONGEST_WINDOW:
            return None
        now, (of, known, read) = (settings(self), self.n, self.gamma, self.ratio), self._there
        if of() is not ring or known != now:  # made once: a compiler compiles again for other functions
            read = DeviceRead("goals", read_goals, self._form(ring))
            self._there = ref(ring), now, read
        return read

    def _form(self, ring: Ring) -> GoalForm:
        """The parameters of now, for a device."""
        info = tuple(path for path in ring.leaves if path[0] == self.info)
        order = cast("DeviceRows", ring.store).order_with({("relabelled",): Field((), torch.bool)})
        return GoalForm(
            self.n, float(self.gamma), float(self.ratio), STRATEGIES[self.strategy], bool(self.finished_only),
            ("obs", self.achieved), ("obs", self.desired), info, tuple(self.goal_functions()), order,
        )  # fmt: skip

    def goal_functions(self) -> list[GoalFunction]:
        """The functions of goals that were given."""
        functions = {path: getattr(self, f"{path[0]}_fn") for path in RESULTS}
        return [GoalFunction(path, f, self.info is not None) for path, f in functions.items() if f is not None]

    def _relabelled(self, relabel: Callable[..., object], ring: Ring, batch: core.GoalBatch) -> Arrays:
        """The fields of each step that ``relabel`` changes, ``[M, ...]``, by path."""
        obs, owners = [path for path in ring.leaves if path[0] == "obs"], _owners(batch)
        fields, after = _arrays_of(ring, batch.now), _arrays_of(ring, batch.after, obs)
        fields |= {("next_obs", *path[1:]): x for path, x in after.items()}
        begins = batch.now // ring.rows * ring.rows
        ends = [begins + (numbers % ring.rows)[owners] for numbers in (batch.first, batch.end)]
        ends = [_arrays_of(ring, places, obs) for places in (*ends, batch.aim[owners])]
        return _changed_fields(relabel, ring.leaves, fields, *ends)

    def copies(self, episode: Mapping[str, object], k: int = 4, *, seed: int, number: int = 0) -> dict[str, Any]:
        """Relabelled copies of an episode's steps. Append them, after the episode, to a replay without order.

        Each step is copied ``k`` times, with goals that ``strategy`` chooses among the steps given. With "past" the
        first step has no copies. The copies are single transitions for every ``n``.

        Args:
            episode: field -> ``[T, 1, ...]``, the steps of one env in order of time, each with its ``next_obs``, as
                for :meth:`relive.ReplayBuffer.extend`.
            k: copies of each step.
            seed: with ``number``, the seed of all random choices.
            number: the episode's number.

        Returns:
            field -> ``[K, 1, ...]`` NumPy arrays, nested as in ``episode``, in the order of the steps.

        Raises:
            ParameterError: the strategy is "random", which needs a replay, or ``k`` is not a number of at least 1.
            FieldError: the steps lack ``next_obs`` or the goals.
            ShapeError, DTypeError, NotFiniteError: a field is not ``[T, 1, ...]``, or a function's result is wrong.
        """
        self._require_functions()
        if self.strategy == "random" or not is_count(k, 1):
            raise ParameterError(
                "Hindsight.copies: expected k of at least 1 and a strategy of one episode, "
                f"got k={k!r}, {self.strategy!r}"
            )
        steps = _steps_of(episode, () if self.relabel is not None else (self.achieved, self.desired))
        at, aim = _goal_steps(self.strategy, len(steps["reward",]), k, stream(stream(seed, number), COPIES))
        copies = {path: array[at] for path, array in steps.items()}
        if self.relabel is not None:
            called: object = "Hindsight(relabel=...)"
            changed = _changed_copies(self.relabel, steps, copies, at, aim)
        else:
            called, changed = "Hindsight's function of reward", Arrays()
            stored = {path: torch.from_numpy(x) if self.tensors else x for path, x in copies.items()}
            info: object = nest(stored)[self.info] if self.info is not None else {}
            reached, goals = (steps["next_obs", self.achieved][rows] for rows in (at, aim))
            for function in self.goal_functions():
                achieved, desired = (torch.from_numpy(x.copy()) if self.tensors else x.copy() for x in (reached, goals))
                result = function(achieved, desired, info)
                changed[function.path] = np.array(result, np.float32 if function.path == REWARD else np.uint8)
            changed |= {(name, self.desired): goals for name in ("obs", "next_obs")}
        if REWARD in changed:
            bad = np.flatnonzero(~np.isfinite(changed[REWARD]))
            if len(bad):
                raise _bad_reward(called, changed[REWARD], int(bad[0]))
        flags = {path: x.view(np.bool_) for path, x in changed.items() if path[0] in ("terminated", "truncated")}
        return nest({path: array[:, None] for path, array in (copies | changed | flags).items()})


NAMES = [name for name in signature(Hindsight).parameters if name != "k"]
"""The parameters that rebuild a view: ``ratio`` stands for ``k``."""


class GoalFunction:
    """A user's function of goals, with checks of its results.

    Args:
        path: the field that it computes: reward, terminated or truncated.
        function: (achieved, desired[, info]) -> ``[M]``.
        stored: True if a stored field is passed as info.
    """

    def __init__(self, path: Path, function: Callable[..., Any], stored: bool) -> None:
        self.path = path
        self.at: int = RESULTS.index(path)
        """Where its result stands among those of all functions."""
        self._kinds = "fiub" if path == REWARD else "b"
        self._function, self._informed = function, _takes_info(function, stored)

    def __call__(self, achieved: Leaf, desired: Leaf, info: object) -> Array:
        """The results for M goals, ``[M]``. The function may have written to the goals, and may keep them.

        Rewards may still be NaN or infinite: see :func:`_bad_reward`.

        Raises:
            ShapeError: the function did not return one number per step.
            DTypeError: a flag is not a bool, or a reward not a number.
        """
        function = self._function  # not by way of `judge`: that would be one more call for each batch
        result = function(achieved, desired, info) if self._informed else function(achieved, desired)
        if result.__class__ is not np.ndarray:
            result = as_host(result)
        if result.shape != achieved.shape[:1] or result.dtype.kind not in self._kinds:
            self.require(len(achieved), tuple(result.shape), result.dtype, result.dtype.kind)
        return result

    def judge(self, achieved: Tensor, desired: Tensor, info: object) -> Any:
        """The results as the function gives them."""
        return self._function(achieved, desired, info) if self._informed else self._function(achieved, desired)

    def require(self, count: int, shape: tuple[int, ...], dtype: object, kind: str) -> None:
        """Refuse results of another form; ``kind`` is that of NumPy's dtypes.

        Raises:
            ShapeError, DTypeError: as for a call.
        """
        if shape != (count,):
            raise ShapeError(
                f"{self}: expected ({count},), one result for each of the {count} goals, got {shape}; it gets "
                "all goals at once, so compute along the last axis: np.linalg.norm(achieved - desired, axis=-1)"
            )
        if kind not in self._kinds:
            if self._kinds == "b":
                raise DTypeError(f"{self}: expected bools, got {dtype}; return a comparison, or .astype(bool)")
            raise DTypeError(f"{self}: expected numbers, got {dtype}")

    def __str__(self) -> str:
        return f"Hindsight's function of {self.path[0]}"


def _takes_info(function: Callable[..., object], stored: bool) -> bool:
    """True if a function of goals takes info as its third argument.

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


# Of the 59 µs of a hindsight batch, the user's function takes 9.5, 15 tensors 7.6, draw and read 15, choosing goals 9,
# and relive's Python 3.5. The functions may use the replay that calls them, even draw a batch: a draw is counted before
# it is made, and an inner batch gets memory of its own.
class GoalBytes:
    """The offsets of the goals in a ring's rows and in a batch's, their shape and dtype, and the layout of that batch.

    Args:
        ring: the ring.
        achieved: the field with the achieved goal.
        desired: the field with the desired goal.
        strategy: the number of the strategy, one of :mod:`relive.core.words`.
        finished: True if only episodes that are over count.
    """

    def __init__(self, ring: Ring, achieved: Path, desired: Path, strategy: int, finished: bool) -> None:
        store, following = ring.store, ("next_obs", *desired[1:])
        more = {("relabelled",): Field((), torch.bool), **WEIGHED}  # the weights of a draw by priority
        self.batch: BatchLayout = BatchLayout(store.groups, store.layout, False, more)
        batch = self.batch
        stored, written = store.layout.offsets, batch.offsets
        self.packed: bool = achieved in stored and desired in written
        """True if the kernels can read goals and write them into a batch."""
        field = ring.leaves[achieved] if self.packed else Field((0,), torch.uint8)
        places = (stored[achieved], field.nbytes, written[desired], written[following]) if self.packed else (0,) * 4
        goal_at, goal_bytes, into_obs, into_next = places
        self.layout: core.GoalLayout = core.GoalLayout(
            batch.core, goal_at=goal_at, goal_bytes=goal_bytes, into_obs=into_obs, into_next=into_next,
            mark=written["relabelled",], strategy=strategy, finished=finished,
        )  # fmt: skip
        columns, large = ring.large_fields() if store.large else ([], [])
        apart = {column[0]: column for column in columns}
        plain = [*(path for path in batch.fields if path not in WEIGHED), *apart]
        fields, weighed = batch.described(plain, apart=apart), batch.described([*plain, *WEIGHED], apart=apart)
        self.core: core.GoalWindows = core.GoalWindows(
            ring.core, self.layout, fields, weighed, **{f"{path[0]}_at": written[path] for path in WEIGHED},
            dtype=numpy_dtype(field.dtype), shape=field.shape, in_files=ring.undo is not None, large=large,
        )  # fmt: skip
        """Draws and reads the packed rows."""

    def fields(self, ring: Ring, places: Ints, batch: core.GoalBatch) -> dict[Path, Tensor]:
        """The fields of a batch of which a part is not in RAM."""
        plan = ring.store.plan(places, self.batch)
        plan.rows[...], plan.last[...] = batch.rows, batch.last
        return {path: field for path, field in ring.read(plan).items() if path not in WEIGHED}


def _owners(batch: core.GoalBatch) -> Ints:
    """For each step, the position of its row among the relabelled ones."""
    return np.repeat(np.arange(batch.chosen), np.diff(batch.begin, append=batch.total))


def _has_numpy_dtype(field: Field) -> bool:
    """True if NumPy has this dtype, and not only integers of the same bits."""
    kind = numpy_dtype(field.dtype).kind
    return kind in "fiub" and (kind == "f") == field.dtype.is_floating_point


def _arrays_of(ring: Ring, places: Ints, paths: Iterable[Path] | None = None) -> Arrays:
    """Fields of rows, as arrays in RAM."""
    return {path: numpy_view(tensor.cpu()) for path, tensor in ring.take(places, paths).items()}


def _info_of(ring: Ring, name: str, places: Ints, tensors: bool) -> object:
    """The field ``name`` of steps, with the members that it may have; as tensors, or as arrays in RAM."""
    paths = [path for path in ring.leaves if path[0] == name]
    return nest(ring.take(places, paths) if tensors else _arrays_of(ring, places, paths))[name]


def _write_changed(ring: Ring, fields: dict[Path, Tensor], changed: Arrays, batch: core.GoalBatch) -> None:
    """Write changed fields into the batch: those of each window's first step, and the observation after its last."""
    arrays = [x[batch.used if path[0] == "next_obs" else batch.begin] for path, x in changed.items()]
    rows, *values = ring.tensors(batch.which.copy(), *arrays)
    for path, value in zip(changed, values, strict=True):
        field = fields[path]
        field[rows] = value if value.dtype is field.dtype else value.view(field.dtype)


def _bad_reward(called: object, rewards: Array, at: int) -> NotFiniteError:
    """The error for the reward of step ``at``."""
    return NotFiniteError(f"{called}: step {at} of {len(rewards)} has a reward of {rewards[at]}, not a float32")


def _changed_fields(
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
    for path, value in flatten(result).items():
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


def _steps_of(episode: Mapping[str, object], members: Sequence[str]) -> Arrays:
    """The fields of an episode by path, ``[T, ...]``. Its observations must have these members."""
    steps = {path: as_host(value) for path, value in flatten(dict(episode)).items()}
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


def _goal_steps(strategy: str, count: int, k: int, key: int) -> tuple[Ints, Ints]:
    """Choose goals for ``k`` copies of each of an episode's ``count`` steps, by a strategy of one episode.

    Returns:
        for each copy, the step that it copies and the step after which its goal was achieved, int64 each. With "past"
        the first step has no copies.
    """
    at, draws = np.repeat(np.arange(count), k), np.empty(count * k)
    core.masses(key, False, 1.0, draws)
    low, high = {"future": (at, count), "final": (count - 1, count), "episode": (0, count), "past": (0, at)}[strategy]
    aim = np.asarray(low + (draws * (high - low)).astype(np.int64))
    some = np.broadcast_to(high - low > 0, at.shape)
    return at[some], aim[some]


def _changed_copies(relabel: Callable[..., object], steps: Arrays, copies: Arrays, at: Ints, aim: Ints) -> Arrays:
    """The fields of the copies that a function of whole steps changes, with goals after the steps ``aim``."""
    fields = {path: Field(array.shape[1:], torch.from_numpy(array[:0]).dtype) for path, array in steps.items()}
    after = {("obs", *path[1:]): array for path, array in steps.items() if path[0] == "next_obs"}
    first = {path: array[at * 0] for path, array in steps.items() if path[0] == "obs"}
    last = at * 0 + len(steps["reward",]) - 1
    observations = first, *({path: x[rows] for path, x in after.items()} for rows in (last, aim))
    return _changed_fields(relabel, fields, copies, *observations)
