"""Checks of what a save contains, before anything uses it. Anyone who can write its files can write checksums, too.

Rings check their own rows and cursors in :meth:`relive.ring.Ring.check`.
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
from ..printable import shown
from ..ring.ring import Ring
from ..steps.schema import Field
from ..steps.trees import Path, dotted

__all__ = ["STEPS", "require_bools", "require_reach", "require_sampler_state"]


REACH = 2**16
"""The most rows that one item of a saved view may span. A save with more rows may have longer items."""


STEPS = 2**31 - 1
"""The most rewards of an n-step window: their number is stored as an int32."""


def require_bools(leaves: Mapping[Path, Field], rows: NDArray[np.uint8]) -> None:
    """Refuse packed rows with flags other than 0 and 1. Compiled code could take another byte for True or for False.

    Raises:
        FileFormatError: names the field.
    """
    layout, _ = row_layout(leaves)
    for path, array in layout.arrays(rows).items():
        if array.dtype == np.bool_ and array.view(np.uint8).max(initial=0) > 1:
            raise FileFormatError(f"field '{dotted(path)}' is bool and has bytes other than 0 and 1")


def require_reach(view: Any, rows: int) -> None:
    """Refuse a saved view whose items would be larger than the whole save, since a batch could take all memory.

    Raises:
        FileFormatError: names the view and the limit.
    """
    parts = [view]
    while hasattr(parts[-1], "window"):
        parts.append(parts[-1].window)
    reach = max(getattr(part, "rows", getattr(part, "depth", 1)) for part in parts)
    if reach > max(REACH, rows) or parts[-1].n > STEPS:
        raise FileFormatError(
            f"the saved view {view!s:.200} spans more rows than the {rows} of the save; if you want that, pass "
            "load(..., view=...)"
        )


def require_sampler_state(state: Mapping[str, Any], by_row: Iterable[str], ring: Ring) -> None:
    """Refuse values that none of relive's own samplers would save. Entries with unknown names are not checked.

    ``by_row`` names the arrays with an entry for each live row.

    Raises:
        FileFormatError: names the entry.
    """
    for name, value in state.items():
        known = name.removeprefix("inner.")
        if known in _STATE and not ((name in by_row) == (known == "errors") and _STATE[known](value, ring)):
            raise FileFormatError(f"the sampler's {shown(name)} is {shown(value)}, which it cannot be")


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
"""The check of each entry of a sampler's saved state."""
