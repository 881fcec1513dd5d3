"""Finisher: what ``finish`` does. It gives an estimator the columns it reads, and attaches those it returns."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..errors import FieldError, NotFiniteError, ParameterError, UnfinishedError
from ..parameters import FLAG_RULE, is_own, refuse_class, require
from ..returns import GAE, Estimator
from ..steps.arrays import Array
from ..steps.ends import MOST, EndCheck
from ..steps.schema import Field, unknown_field
from .columns import ADVANTAGE, KEPT_APART, Columns, NamedColumns
from .writer import Writer

__all__ = ["Finisher"]

RETURN = ("return",)
FLAGS = ("terminated", "truncated", "mask")


class Finisher:
    """Attaches what an estimator computes to the steps of a rollout.

    Args:
        columns: of the rollout.
        named: the same by name.
        writer: of the rollout; it knows whether the bootstrap row is written.
    """

    _ends: EndCheck | None = None
    """Checks the first ends of episodes; None once it has seen enough."""
    _left = 0
    """How many rollouts it may still look at."""
    _check_ends = True

    def __init__(self, columns: Columns, named: NamedColumns, writer: Writer) -> None:
        self._columns, self._named, self._writer = columns, named, writer
        self.check_ends = True
        self._layout: object = None
        """The layout of the columns that ``_places`` belongs to."""
        self._places: Any = None
        """Where the columns of GAE lie, as its kernel takes them; None if it cannot work in place."""

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: without addresses."""
        return {**self.__dict__, "_layout": None, "_places": None}

    @property
    def check_ends(self) -> bool:
        """Whether the first rollouts are checked for steps that the env ignored."""
        return self._check_ends

    @check_ends.setter
    def check_ends(self, check: bool) -> None:
        require("RolloutBuffer", FLAG_RULE, check_ends=check)
        leaves = {("obs",): Field(), **{(name,): Field((), torch.bool) for name in ("terminated", "truncated")}}
        # a rollout that wraps is finished again and again with the same ends; on a device it would wait
        looks = check and not self._columns.wrap and self._columns.device.type == "cpu"
        self._check_ends, self._ends, self._left = check, EndCheck(leaves) if looks else None, MOST

    def finish(self, estimator: Estimator, last_value: Any, partial: bool) -> None:
        """Attach what ``estimator`` computes.

        Raises:
            ParameterError, EmptyError, UnfinishedError, FieldError, NotFiniteError: as ``RolloutBuffer.finish`` says.
        """
        columns, writer = self._columns, self._writer
        in_place = estimator if type(estimator) is GAE and not estimator.normalize else None
        if in_place is None:
            _require_estimator(estimator)
        if partial is not False:  # a call less where time counts
            require("finish", FLAG_RULE, partial=partial)
        if not columns.count:
            self._named.require_steps()
        if not (columns.count == columns.num_steps or partial or columns.wrap):
            raise UnfinishedError(
                f"{columns.count} of {columns.num_steps} steps are written; add the rest, or finish(..., partial=True)"
            )
        if last_value is not None:
            writer.set_last({"value": last_value})
        ends = None if self._ends is None or partial or ADVANTAGE in columns else self._ends  # each rollout once
        if columns.layout is not self._layout:
            self._bind()
        if in_place is not None and self._places is not None and not columns.start:
            if not writer.has_last:
                self._require_ends()
            self._fill(in_place)
        else:
            self._attach(estimator)
        if ends is not None:
            self._look(ends)

    def _look(self, check: EndCheck) -> None:
        """Check the ends of truncated episodes, after which a rollout knows the value of the final observation."""
        named = self._named
        self._left -= 1
        columns = [named[name] for name in ("value", "final_value") if name in named]
        if not self._left or len(columns) < 2 or columns[0].dim() != 2:
            self._ends = None
            return
        terminated, truncated, real = (named[name].flatten().numpy() for name in FLAGS)
        cut, (value, final) = truncated & ~terminated, map(_coarse, columns)
        if len(np.unique(value[real])) < np.count_nonzero(real) / 2:  # in bfloat16, say, values are alike by chance
            return
        envs = np.tile(np.arange(self._columns.num_envs), self._columns.count)
        if not check.go_on(0, envs, [value, np.zeros_like(cut), cut], [final], real):
            self._ends = None
            check.warn_of_values()

    def _attach(self, estimator: Estimator) -> None:
        """Call the estimator with tensors, and copy what it returns."""
        for name in estimator.reads:
            if name not in KEPT_APART:
                self._require_column(name, type(estimator).__name__)
        if "value" in estimator.reads and not self._writer.has_last:
            self._require_ends()
        own, host = is_own(estimator), self._columns.device.type == "cpu"
        looks = host or not own
        found = estimator(**{name: self._read(name, looks) for name in estimator.reads})
        advantage = found["advantage"] if own and (host or self._writer.debug) else None
        if advantage is not None and not bool(advantage.isfinite().all()):
            self._refuse_not_finite(advantage, estimator)
        self._named.attach(found)

    def _require_column(self, name: str, reader: str) -> None:
        """Refuse an estimator that reads a column which is not there."""
        if not self._columns.below((name,)):
            lacking = unknown_field(name, self._named.keys(), "this rollout")
            instead = "" if name == "value" else f", or set rollout[{name!r}] first"
            raise FieldError(f"{reader} reads {name!r}: {lacking}. Declare it in the schema{instead}")
        self._named.leaves((name,))

    def _read(self, name: str, looks: bool) -> Any:
        """A column as estimators take it: ``value`` with its bootstrap row, bookkeeping only where it matters.

        Without ``looks`` bookkeeping always comes, because looking would wait for the device.
        """
        named = self._named
        if name == "mask" and looks and not named.has_mask():
            return None
        if name == "final_value" and (name not in named or (looks and not named.has_truncations())):
            return None
        return self._columns.with_last(("value",)) if name == "value" and name in named else named[name]

    def _require_ends(self) -> None:
        """Without a bootstrap value every env must just have finished an episode."""
        named = self._named
        going_on = ~(named["terminated"][-1] | named["truncated"][-1])
        if named.has_mask():
            going_on &= named["mask"][-1]
        if bool(going_on.any()):
            env = int(going_on.nonzero()[0])
            raise UnfinishedError(
                f"the episode of env {env} goes on after the last step and its bootstrap value is missing; "
                "pass finish(..., last_value=V(obs[T])), or set_last(value=...)"
            )

    def _refuse_not_finite(self, advantage: Tensor, estimator: Estimator) -> None:
        """Refuse an advantage ``[T, N]`` that is not finite at a real step, by the number that it comes from.

        Raises:
            NotFiniteError: names that field, its step and its env.
        """
        named = self._named
        terminated, truncated, real = (named[name] for name in FLAGS)
        wrong = ~advantage.isfinite() & real
        if not bool(wrong.any()):
            return
        self._columns.drop((ADVANTAGE, RETURN))
        valued = torch.cat([real, torch.zeros_like(real[:1])])
        valued[1:] |= real & ~(terminated | truncated)  # the value after a step that ended nothing
        used = {"value": valued, "final_value": real & truncated & ~terminated}
        for name in estimator.reads:
            if name in FLAGS or name not in named:
                continue
            column = self._columns.with_last(("value",)) if name == "value" else named[name]
            bad = (~column.isfinite() & used.get(name, real)).nonzero()
            if len(bad):
                step, env = bad[0].tolist()
                where = f"step {step} of" if step < len(real) else "the bootstrap row (last_value) of"
                raise NotFiniteError(
                    f"field '{name}': {where} env {env} is {float(column[step, env])}, so advantages would not be "
                    "finite either; mend what gives it, the env or the policy, and create the buffer with debug=True "
                    "to find it when it is added"
                )
        step, env = wrong.nonzero()[0].tolist()
        raise NotFiniteError(
            f"the advantage of step {step} of env {env} is {float(advantage[step, env])}, although all that it comes "
            "from is finite: rewards or values are too large; scale the rewards"
        )

    # -- in place -----------------------------------------------------------------------------------------------

    def _bind(self) -> None:
        """Find out where the columns of GAE lie, and whether its kernel can write them in place."""
        columns, self._places = self._columns, None
        named = {"reward", "value", "final_value", *FLAGS, "advantage", "return"}
        dtypes = {name: torch.bool if name in FLAGS else torch.float32 for name in named}
        if all(columns.is_plain((name,), dtype) for name, dtype in dtypes.items()):
            places = ((("return" if name == "ret" else name),) for name in kernels.fast().PLACES[2:])
            addresses = [columns.address(path) if path[0] in named else 0 for path in places]
            self._places = np.array([columns.num_envs, 0, *addresses], np.int64)
        self._layout = columns.layout  # last: after an interrupt the next call starts again

    def _fill(self, estimator: GAE) -> None:
        """Let the kernel write advantages and returns into their columns; after an error there are none.

        An interrupt comes before or after the kernel, so the two columns are both old or both new.
        """
        columns, places = self._columns, self._places
        places[1] = columns.count * columns.num_envs
        fast = kernels.fast()
        wrong = fast.fill_gae(places, float(estimator.gamma), float(estimator.lam))
        if wrong == fast.SPOILT:
            self._refuse_not_finite(columns.ordered(ADVANTAGE), estimator)
        if wrong >= 0:
            kernels.refuse_missing(wrong, columns.num_envs)
        columns.keep((ADVANTAGE, RETURN))


def _require_estimator(estimator: Any) -> None:
    refuse_class("estimator", estimator)
    if not (callable(estimator) and hasattr(estimator, "reads")):
        raise ParameterError(f"finish({estimator!r}): expected an estimator, such as relive.GAE(gamma=0.99, lam=0.95)")


def _coarse(values: Tensor) -> Array:
    """Values as float32 without the last 8 of 24 bits, flat: of one observation they may differ there from batch to
    batch.
    """
    bits: Array = values.float().flatten().numpy().view(np.int32)
    return ((bits + np.int32(128)) & np.int32(-256)).view(np.float32)
