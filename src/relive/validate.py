"""What a save says, tested before anything relies on it: whoever can write its files can write checksums, too.

Rings test their own rows and cursors (:meth:`relive.ring.Ring.check`); here is the rest that comes out of files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .errors import FileFormatError, LifecycleError, ReliveError
from .layout import row_layout
from .parameters import is_count, is_number
from .ring import Ring
from .schema import Field, Path, dotted

__all__ = [
    "contradictions",
    "entry",
    "fitting",
    "integers",
    "require_bools",
    "require_reach",
    "require_sampler_state",
    "require_tensors",
    "whole",
]

MOST = 2**62
"""No count in a save is larger: those that go on from it fit into 64 bits."""
REACH = 2**16
"""Rows that an item of a saved view may reach over, or as many as the save holds if those are more."""
STEPS = 2**31 - 1
"""Rewards that an n-step window may have: their number is an int32."""
LARGEST_ERROR = float(np.finfo(np.float32).max)


def entry(content: Any, name: str, kind: type[Any]) -> Any:
    """One entry of a save's JSON, of the kind that belongs there.

    Raises:
        FileFormatError: it is missing, or of another kind.
    """
    value = content.get(name)
    if type(value) is not kind:
        raise FileFormatError(
            f"the save's entry {name!r} is {value!r:.80}; expected a {kind.__name__}, as relive writes it"
        )
    return value


def whole(content: Any, name: str) -> int:
    """One entry of a save's JSON that counts something.

    Raises:
        FileFormatError: it is missing, or no such number.
    """
    value: int = entry(content, name, int)
    if not 0 <= value <= MOST:
        raise FileFormatError(f"the save's entry {name!r} is {value!r:.80}; expected a number from 0 to {MOST}")
    return value


def integers(content: Any, name: str, *shape: int) -> NDArray[np.int64]:
    """One entry of a save's JSON that is a list, or a list of lists, of such numbers.

    Raises:
        FileFormatError: it is of another shape, or has other members.
    """
    found = np.array(entry(content, name, list))
    if found.shape != shape or found.dtype != np.int64 or (found < 0).any() or (found > MOST).any():
        raise FileFormatError(
            f"the save's entry {name!r} is {content[name]!r:.80}; expected numbers from 0 to {MOST}, of shape {shape}"
        )
    return found


def require_tensors(tensors: Mapping[str, Tensor], lengths: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a save that lacks one of these tensors, has another, or one that does not begin with these lengths.

    Raises:
        FileFormatError: naming it.
    """
    if wrong := sorted(tensors.keys() ^ lengths.keys()):
        raise FileFormatError(
            f"the save has the tensors {list(tensors)!r:.200}; {wrong[0]!r:.80} is missing or foreign"
        )
    for name, front in lengths.items():
        fitting(tensors, name, front)


def fitting(
    tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> Tensor:
    """The tensor of a save that has this shape and dtype; without a dtype it only begins with that shape.

    Raises:
        FileFormatError: it is missing, or another.
    """
    tensor = tensors.get(name)
    if tensor is None:
        raise FileFormatError(f"the save has no tensor {name!r:.80}")
    found = tuple(tensor.shape if dtype is not None else tensor.shape[: len(shape)])
    if found != shape or (dtype is not None and tensor.dtype is not dtype):
        expected = f"{dtype} {shape}" if dtype is not None else f"{shape} in front"
        raise FileFormatError(f"tensor {name!r:.80}: expected {expected}, got {tensor.dtype} {tuple(tensor.shape)}")
    return tensor


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


_FAULTS = ReliveError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError, OSError


@contextmanager
def contradictions(path: str | os.PathLike[str]) -> Generator[None]:
    """Whatever goes wrong while a save is taken in, the save is at fault.

    Raises:
        FileFormatError: in place of the error.
        LifecycleError: a sampler or view to load it with is another buffer's, which is not the save's fault.
    """
    try:
        yield
    except (FileFormatError, LifecycleError):
        raise
    except MemoryError as error:
        raise FileFormatError(f"the save in '{path}' announces more than there is memory for") from error
    except (
        ReliveError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        ArithmeticError,
        RuntimeError,
        OSError,
    ) as error:
        raise FileFormatError(f"the save in '{path}' contradicts itself: {error!s:.2000}") from error
