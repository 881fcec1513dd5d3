"""Hindsight: transitions relabelled with goals that were reached."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from operator import attrgetter
from typing import Any, Literal, get_args
from weakref import ref

import numpy as np
from torch import Tensor

from .. import kernels
from ..errors import ParameterError, ReliveError, SchemaError
from ..kernels.reference.hindsight import EPISODE, FINAL, FUTURE, OTHERS, PAST, RANDOM
from ..kernels.reference.random import key as stream
from ..kernels.reference.sample import Draw
from ..memory.layout import BatchLayout
from ..memory.store import Plan, require_rows, vector
from ..parameters import GAMMA_RULE, checked, is_count, is_flag, is_number, is_steps
from ..ring.ring import Ring
from ..steps.arrays import Array, Ints, numpy_dtype
from ..steps.schema import Field
from ..steps.trees import Path, dotted
from .copies import copied
from .goals import (
    Arrays,
    GoalBytes,
    GoalFunction,
    Scratch,
    arrays_of,
    put,
    read_info,
    refuse_reward,
    relabelled,
)

__all__ = ["Hindsight", "Strategy"]


Strategy = Literal["future", "final", "episode", "past", "random"]


STRATEGIES: dict[str, int] = {"future": FUTURE, "final": FINAL, "episode": EPISODE, "past": PAST, "random": RANDOM}


COPIES = 2**32 + 2
"""The number of an episode's further random stream, for copies."""

RESULTS = ("reward", "terminated", "truncated")
REWARD: Path = ("reward",)
FLOAT32 = np.dtype(np.float32)


_facts = attrgetter(
    "achieved", "desired", "info", "strategy", "finished_only", "reward_fn", "terminated_fn", "truncated_fn", "relabel"
)
"""The parameters on which it depends what is read, and how."""


def _has_numpy_dtype(field: Field) -> bool:
    """Whether NumPy has this dtype, and not only integers of the same bits."""
    kind = numpy_dtype(field.dtype).kind
    return kind in "fiub" and (kind == "f") == field.dtype.is_floating_point


def _is_function(function: Any) -> bool:
    return function is None or callable(function)


FUNCTION_RULE = (_is_function, "a function of arrays, (achieved, desired) or (achieved, desired, info), or None")


def _is_name(name: Any) -> bool:
    return isinstance(name, str)


NAME_RULE = (_is_name, "the name of a member of the observation")


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

    Raises:
        ParameterError: a parameter is out of range, here or when it is set later.
        SchemaError: when the view is set: the schema lacks such goals, or steps are stored without order.
        ShapeError, NotFiniteError: a function returned a wrong result; raised when a batch is drawn.
    """

    history = 0
    """No row before the anchor is needed."""

    def __init__(
        self,
        reward_fn: Callable[..., Any] | None = None,
        strategy: Strategy = "future",
        *,
        k: float | None = None,
        ratio: float | None = None,
        terminated_fn: Callable[..., Any] | None = None,
        truncated_fn: Callable[..., Any] | None = None,
        info: str | None = None,
        achieved: str = "achieved_goal",
        desired: str = "desired_goal",
        finished_only: bool = False,
        n: int = 1,
        gamma: float = 0.99,
        relabel: Callable[..., Any] | None = None,
    ) -> None:
        if k is not None and (ratio is not None or not is_number(k, 0)):
            raise ParameterError(
                f"Hindsight(k={k!r}, ratio={ratio!r}): pass k, a number of at least 0, or ratio, not both"
            )
        self.reward_fn, self.strategy = reward_fn, strategy
        self.ratio = ratio if ratio is not None else 0.8 if k is None else k / (k + 1)
        self.terminated_fn, self.truncated_fn, self.info = terminated_fn, truncated_fn, info
        self.achieved, self.desired, self.finished_only = achieved, desired, finished_only
        self.n, self.gamma, self.relabel = n, gamma, relabel
        self._fitted: tuple[Any, Any, Any, Any] = (lambda: None), None, None, None
        """The ring that was read last, the parameters then, and what :meth:`_fit` gave."""
        self._require_functions()

    def require(self, ring: Ring) -> None:
        """Refuse a ring whose steps lack such goals.

        Raises:
            SchemaError: steps are stored without order, a field is missing, or a field's name is taken.
        """
        self._require_functions()
        leaves = ring.leaves
        if ring.alone:
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
            found = {dotted(path): field for path, field in leaves.items() if path[0] == "obs"}
            raise SchemaError(
                f"Hindsight(achieved={self.achieved!r}, desired={self.desired!r}): expected an observation with "
                f"members of these names, of one shape and dtype that NumPy has, got {found}; name the members that "
                "hold goals, or pass relabel"
            )

    def _require_functions(self) -> None:
        functions = self.reward_fn, self.terminated_fn, self.truncated_fn, self.info
        if (self.relabel is None) == (self.reward_fn is None) or (self.relabel and any(functions)):
            raise ParameterError(
                "Hindsight: pass reward_fn (and terminated_fn, truncated_fn, info), or else relabel alone"
            )

    def __repr__(self) -> str:
        names = ("reward_fn", "strategy", "ratio", "terminated_fn", "truncated_fn", "info", "achieved", "desired",
                 "finished_only", "n", "gamma", "relabel")  # fmt: skip
        return f"Hindsight({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle: the parameters with their functions, which must be picklable."""
        names = [name for name in signature(Hindsight).parameters if name != "k"]
        return partial(Hindsight, **{name: getattr(self, name) for name in names}), ()

    # -- reading a replay ---------------------------------------------------------------------------------------

    def read(self, ring: Ring, places: Ints, key: int | None = None) -> dict[Path, Tensor]:
        """The fields ``[B, ...]`` of the windows that start at ``places``; ``key`` decides which get another goal.

        Raises:
            SchemaError: the ring has no such goals.
            ShapeError, DTypeError, NotFiniteError, FieldError: a function returned a wrong result.
        """
        fit, functions = self._fit(ring)
        store, kernel, n, gamma = ring.store, kernels.fast(), self.n, self.gamma
        plan = store.plan(vector(places), fit.batch)
        rows, last, places, batch = plan.rows, plan.last, plan.places, fit.batch.handle
        if key is None or self.ratio == 0:
            require_rows(places, kernel.windows(ring.handle, batch, places, n, gamma, rows, last), store.num_rows)
            plan.column("relabelled")[...] = False
            return store.fields(plan)
        scratch, pairs = fit.scratch(len(places), n), np.empty((2, len(places) * n, fit.nbytes), np.uint8)
        if not ring.notes_ends:
            ring.ends()
        others = ring.draw(len(places), stream(key, OTHERS)) if self.strategy == "random" else None
        found = kernel.plan_goals(
            ring.handle, batch, places, n, gamma, np.uint64(key), self.ratio, places if others is None else others,
            rows, last, scratch.handle, pairs,
        )  # fmt: skip
        if found < 0:
            require_rows(places, -1 - found, store.num_rows)
        changed = self._relabel(ring, plan, fit, functions, scratch, pairs, found) if found else None
        fields = store.fields(plan)
        if changed:
            put(ring, fields, changed, scratch.steps, found)
        fit.spare = scratch
        return fields

    def _relabel(
        self, ring: Ring, plan: Plan, fit: GoalBytes, functions: list[GoalFunction], scratch: Scratch, pairs: Array,
        found: int,
    ) -> Arrays:  # fmt: skip
        """Have the functions judge the steps of ``found`` rows, and then a kernel write the windows of these rows.

        Returns the fields that the kernel cannot write, by path, for each step.
        """
        total, rewards = scratch.steps.begin.item(found), scratch.steps.rewards
        if self.relabel is not None:
            changed = self._relabelled(self.relabel, ring, scratch, found, total)
            judged = ("reward",) in changed
            for name, kept in scratch.results.items():
                if (name,) in changed:
                    kept[:total] = changed.pop((name,))
        else:
            goals = fit.opened(pairs, total) if fit.packed else scratch.goals(ring, ("obs", self.achieved), found)
            rewards, judged, changed = self._judged(ring, fit, functions, scratch, goals, total), True, Arrays()
            if not fit.packed:
                changed = {(name, self.desired): goals[1] for name in ("obs", "next_obs")}
        bad = kernels.fast().relabel_windows(
            ring.handle, fit.batch.handle, self.gamma, found, judged, plan.rows, plan.last, scratch.handle, rewards
        )
        if bad >= 0:
            refuse_reward(functions[0] if functions else "Hindsight(relabel=...)", rewards[:total], bad)
        return changed

    def _judged(
        self, ring: Ring, fit: GoalBytes, functions: list[GoalFunction], scratch: Scratch, goals: list[Array],
        total: int,
    ) -> Array:  # fmt: skip
        """The rewards of ``total`` steps by these goals, ``[M]`` or more; flags are put into ``scratch``."""
        rewards: Array = scratch.steps.rewards
        info: Any = {} if self.info is None else read_info(ring, self.info, scratch.steps.now[:total])
        for function in functions:
            spare = fit.packed and function is functions[-1]  # nobody reads these goals afterwards
            achieved, desired = goals if spare else [x.copy() for x in goals]
            result = function(achieved, desired, info)
            if function.path == REWARD and result.dtype is FLOAT32 and result.flags.carray:
                rewards = result
            else:
                scratch.results[function.path[0]][:total] = result
        return rewards

    def batch_of(self, ring: Ring) -> BatchLayout | None:
        """See :class:`relive.views.contract.DirectReader`."""
        try:
            fit, _ = self._fit(ring)
        except ReliveError:  # read() raises it, once something was drawn
            return None
        if self.relabel is not None or not fit.packed or not ring.notes_ends:
            return None
        return fit.batch

    def sample(self, direct: Ints, ring: Ring, draw: Draw, count: int, rows: Tensor, found: Any) -> bool:
        """See :class:`relive.views.contract.DirectReader`. The functions of goals are called between two kernels.

        Raises:
            ShapeError, DTypeError, NotFiniteError: a function returned a wrong result.
        """
        _, _, fit, functions = self._fitted
        n, gamma, kernel = self.n, float(self.gamma), kernels.fast()
        scratch, pairs = fit.scratch(count, n), np.empty((2, count * n, fit.nbytes), np.uint8)
        chosen = kernel.sample_goals(direct, draw, n, gamma, float(self.ratio), id(rows), scratch.handle, pairs)
        if chosen < 0:
            return False
        rewards = scratch.steps.rewards
        if chosen:
            total = scratch.steps.begin.item(chosen)
            rewards = self._judged(ring, fit, functions, scratch, fit.opened(pairs, total), total)
        bad = kernel.finish_goals(direct, gamma, chosen, chosen > 0, id(rows), scratch.handle, rewards, id(found))
        if bad >= 0:
            refuse_reward(functions[0], rewards[: scratch.steps.begin.item(chosen)], bad)
        fit.spare = scratch
        return True

    def _fit(self, ring: Ring) -> tuple[GoalBytes, list[GoalFunction]]:
        """The offsets of the ring's goals, once checked, and the functions of goals; kept until a parameter changes."""
        now, (of, then, fit, functions) = _facts(self), self._fitted
        if of() is not ring or then != now:
            self.require(ring)
            strategy, finished = STRATEGIES[self.strategy], bool(self.finished_only)
            fit = GoalBytes(ring, ("obs", self.achieved), ("obs", self.desired), strategy, finished)
            functions = self._goal_functions()
            self._fitted = ref(ring), now, fit, functions
        return fit, functions

    def _goal_functions(self) -> list[GoalFunction]:
        """The functions of goals that were given."""
        functions = {name: getattr(self, f"{name}_fn") for name in RESULTS}
        return [
            GoalFunction(name, function, self.info is not None)
            for name, function in functions.items()
            if function is not None
        ]

    def _relabelled(self, relabel: Callable[..., Any], ring: Ring, scratch: Scratch, found: int, total: int) -> Arrays:
        """The fields of each step that ``relabel`` changes, ``[M, ...]``, by path."""
        obs, per, steps = [path for path in ring.leaves if path[0] == "obs"], scratch.owners(found), scratch.steps
        fields = arrays_of(ring, steps.now[:total])
        after = arrays_of(ring, steps.after[:total], obs)
        fields |= {("next_obs", *path[1:]): x for path, x in after.items()}
        seen = [arrays_of(ring, places[per], obs) for places in steps.spans]
        return relabelled(relabel, ring.leaves, fields, *seen)

    # -- without a replay in order ------------------------------------------------------------------------------

    def copies(self, episode: Mapping[str, Any], k: int = 4, *, seed: int, number: int = 0) -> dict[str, Any]:
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
        return copied(
            episode, self.strategy, k, stream(stream(seed, number), COPIES), relabel=self.relabel,
            functions=self._goal_functions(), info=self.info, achieved=self.achieved, desired=self.desired,
        )  # fmt: skip
