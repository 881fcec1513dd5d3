"""What ``finish`` does: gives an estimator the columns it reads, and attaches those it returns."""

from __future__ import annotations

from typing import Any

from ..errors import ParameterError, UnfinishedError
from ..parameters import refuse_class
from ..returns.estimators import Estimator
from .columns import Columns
from .fields import KEPT_APART
from .named import NamedColumns
from .writer import Writer

__all__ = ["finish"]


def finish(
    estimator: Estimator, columns: Columns, named: NamedColumns, writer: Writer, last_value: Any, partial: bool
) -> None:
    """Attach what an estimator computes to the steps of a rollout.

    Raises:
        ParameterError, EmptyError, UnfinishedError, FieldError: as ``RolloutBuffer.finish`` says.
    """
    refuse_class("estimator", estimator)
    if not (callable(estimator) and hasattr(estimator, "reads")):
        raise ParameterError(f"finish({estimator!r}): expected an estimator, such as relive.GAE(gamma=0.99, lam=0.95)")
    named.require_steps()
    if not (columns.is_full or partial or columns.wrap):
        raise UnfinishedError(
            f"{columns.count} of {columns.num_steps} steps are written; add the rest, or finish(..., partial=True)"
        )
    if last_value is not None:
        writer.set_last({"value": last_value})
    for name in estimator.reads:
        if name not in KEPT_APART:
            named.leaves((name,))
    if "value" in estimator.reads and not writer.has_last:
        _require_ends(named)
    named.attach(estimator(**{name: _read(name, columns, named) for name in estimator.reads}))


def _require_ends(named: NamedColumns) -> None:
    """Without a bootstrap value every env must just have finished an episode."""
    going_on = ~(named["terminated"][-1] | named["truncated"][-1])
    if named.has_mask():
        going_on &= named["mask"][-1]
    if bool(going_on.any()):
        env = int(going_on.nonzero()[0])
        raise UnfinishedError(
            f"the episode of env {env} goes on after the last step and its bootstrap value is missing; "
            "pass finish(..., last_value=V(obs[T])), or set_last(value=...)"
        )


def _read(name: str, columns: Columns, named: NamedColumns) -> Any:
    """A column as estimators take it: ``value`` with its bootstrap row, bookkeeping only where it matters."""
    if name == "mask" and not named.has_mask():
        return None
    if name == "final_value" and (name not in named or not named.has_truncations()):
        return None
    return columns.with_last(("value",)) if name == "value" and name in named else named[name]
