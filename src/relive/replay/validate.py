"""What a save says, tested before anything relies on it: whoever can write its files can write checksums, too.

Rings test their own rows and cursors (:meth:`relive.ring.Ring.check`); here is the rest that comes out of files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..errors import FileFormatError
from ..files.entries import MOST
from ..kernels.reference.priorities import LARGEST_ERROR
from ..memory.layout import row_layout
from ..parameters import is_count, is_number
from ..ring.ring import Ring
from ..steps.schema import Field
from ..steps.trees import Path, dotted

__all__ = ["STEPS", "require_bools", "require_reach", "require_sampler_state"]


REACH = 2**16
"""Rows that an item of a saved view may reach over, or as many as the save holds if those are more."""


STEPS = 2**31 - 1
"""Rewards that an n-step window may have: their number is an int32."""


def require_bools(leaves: Mapping[Path, Field], rows: NDArray[np.uint8]) -> None:
    """Refuse packed rows whose flags are neither 0 nor 1: what becomes of others is up to the compiler.

    Raises:
        FileFormatError: naming the field.
    """
    layout, _ = row_layout(leaves)
    for path, array in layout.arrays(rows).items():
        if array.dtype == np.bool_ and array.view(np.uint8).max(initial=0) > 1:
            raise FileFormatError(f"field '{dotted(path)}' is bool and has bytes other than 0 and 1")


def require_reach(view: Any, rows: int) -> None:
    """Refuse a saved view whose items, be they few, would be larger than anything in the save.

    Raises:
        FileFormatError: naming the reach and the limit.
    """
    window = getattr(view, "window", view)
    reach = getattr(view, "rows", getattr(view, "depth", 1))
    if reach > max(REACH, rows) or window.n > STEPS:
        raise FileFormatError(
            f"the saved view is {view!s:.200}, of more than the {rows} rows of the save; if that is meant, pass "
            "load(..., view=...)"
        )


def require_sampler_state(state: Mapping[str, Any], by_row: Iterable[str], ring: Ring) -> None:
    """Refuse what no sampler of relive's own says of itself; names that those do not have are left alone.

    ``by_row`` are the names of arrays with an entry for each live row.

    Raises:
        FileFormatError: naming the entry.
    """
    for name, value in state.items():
        known = name.removeprefix("inner.")
        if known in _STATE and not ((name in by_row) == (known == "errors") and _STATE[known](value, ring)):
            raise FileFormatError(f"the sampler's {name!r:.80} is {value!s:.80}, which it cannot be")


def _are_numbers(values: Any, dtype: type[Any]) -> bool:
    if not isinstance(values, np.ndarray):
        return False
    array = cast("NDArray[Any]", values)
    return array.ndim == 1 and array.dtype == dtype and not (~np.isfinite(array)).any()


def _are_errors(values: Any, ring: Ring) -> bool:
    return _are_numbers(values, np.float32) and not (values < 0).any()


def _is_order(values: Any, ring: Ring) -> bool:
    if not _are_numbers(values, np.int64) or (values < 0).any():
        return False
    sorted_values = np.sort(values)
    issued = values // ring.num_envs < ring.heads[values % ring.num_envs]
    return bool(issued.all() and (sorted_values[1:] != sorted_values[:-1]).all())


def _is_count(value: Any, ring: Ring) -> bool:
    return is_count(value) and value <= MOST


def _is_error(value: Any, ring: Ring) -> bool:
    return is_number(value, 0, LARGEST_ERROR)


def _is_share(value: Any, ring: Ring) -> bool:
    return is_number(value, 0, 1)


def _are_slopes(values: Any, ring: Ring) -> bool:
    return _are_numbers(values, np.float64) and len(values) == 2 and bool((values >= 0).all())


def _are_returns(values: Any, ring: Ring) -> bool:
    return _are_numbers(values, np.float64) and len(values) <= 20


_STATE: dict[str, Callable[[Any, Ring], bool]] = {
    "errors": _are_errors,
    "largest": _is_error,
    "draws": _is_count,
    "order": _is_order,
    "eta": _is_share,
    "steepest": _are_slopes,
    "returns": _are_returns,
}
"""What each entry of a sampler's state has to be, as it is saved."""
