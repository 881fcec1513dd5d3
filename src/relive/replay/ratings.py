"""Ratings: checks the TD errors of batches and passes them to a prioritizing sampler."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from .. import kernels
from ..errors import DTypeError, LifecycleError, NotFiniteError, ParameterError, ShapeError
from ..kernels.reference.priorities import LARGEST_ERROR, UNUSUAL
from ..kernels.tensor_calls import tensor_calls
from ..ring.ring import Ring
from ..samplers.contract import Sampler
from ..samplers.prioritized import Prioritized
from ..samplers.recent import Recent
from ..steps.arrays import Ints, as_host
from ..views.contract import View, time_first_of
from .arguments import whole_numbers
from .progress import Progress

__all__ = ["Ratings", "by_item", "doubles", "magnitudes"]


class Ratings:
    """Passes TD errors to a sampler that can use them. The caller holds the replay's lock.

    Args:
        ring: knows which transitions are still stored.
        sampler: a :class:`relive.Prioritized`, a sampler around one, or a sampler without priorities.
        progress: counts the errors of transitions that were overwritten meanwhile.
    """

    def __init__(self, ring: Ring, sampler: Sampler, progress: Progress) -> None:
        self.ring, self.sampler, self.progress = ring, sampler, progress
        inner = sampler.inner if isinstance(sampler, Recent) else sampler
        self.prioritized = inner if isinstance(inner, Prioritized) else None
        """The sampler that has the priorities, or None."""
        self._calls = tensor_calls()

    def update(self, view: View, index: Any, td_error: Any, mask: Any) -> int:
        """Set the errors of the transitions ``index``. Returns how many of them were overwritten meanwhile."""
        sampler = self.prioritized or self._require_priorities()
        late, calls, kernel = UNUSUAL, self._calls, kernels.fast()
        if calls is not None and type(index) is Tensor and type(td_error) is Tensor:
            given = calls.describe, id(index), id(td_error)
            if mask is None:
                late = sampler.rate(kernel.rate_tensors, *given)
            elif type(mask) is Tensor and (time_first := time_first_of(view)) is not None:
                late = sampler.rate(kernel.rate_sequences, *given, id(mask), bool(time_first), float(sampler.eta))
        if late == UNUSUAL:
            late = self._update_checked(sampler, view, index, td_error, mask)
        come = self.progress
        come.late += late
        if late:
            come.keep()
        return late

    def take_over(self, other: Ratings, env: int, to: int) -> None:
        """Give the newest transitions of env ``to`` the TD errors of their originals, in env ``env`` of ``other``."""
        mine, its = self.prioritized, other.prioritized
        if mine is None or its is None:
            return
        here, there = (_complete(ring, e) for ring, e in ((self.ring, to), (other.ring, env)))
        count = min(len(here), len(there))
        mine.take_over(its, there[len(there) - count :], here[len(here) - count :])

    def of(self, index: Ints) -> Any:
        """The priorities of the transitions ``index``, float64 ``[B]``; 0 for those that can no longer be drawn."""
        sampler, places = self._require_priorities(), self._places(index)
        found = sampler.weights(np.maximum(places, 0))
        found[places < 0] = 0.0
        return found

    def _require_priorities(self) -> Prioritized:
        """The sampler with the priorities.

        Raises:
            LifecycleError: there is none.
        """
        if self.prioritized is None:
            raise LifecycleError(f"{self.sampler!r} has no priorities; create the buffer with sampler=Prioritized()")
        return self.prioritized

    def _places(self, index: Ints) -> Ints:
        """The places of these indices, -1 for those that can no longer be drawn.

        Raises:
            ParameterError: one was never issued.
        """
        places, unknown = self.ring.find(index)
        if unknown >= 0:
            raise ParameterError(f"index: entry {unknown}, {index[unknown]}, was never issued; pass batch['index']")
        return places

    def _update_checked(self, sampler: Prioritized, view: View, index: Any, td_error: Any, mask: Any) -> int:
        """As :meth:`update`, with checks that raise an error for what is wrong."""
        if hasattr(index, "keys"):
            raise ParameterError(f"index: expected integers [B], got a {type(index).__name__}; pass batch['index']")
        where = whole_numbers(index, "index")
        errors, real = by_item(view, where, doubles(td_error), None if mask is None else as_host(mask, "mask"))
        sizes = magnitudes(errors)
        if errors.ndim == 2:
            sizes = sampler.reduced(errors, real)
        late = sampler.rate(kernels.fast().rate, len(where), _address(where), 1, _address(sizes), 1, False)
        if late != UNUSUAL:
            return late
        places = self._places(where)
        alive = places >= 0
        sampler.update(places[alive], sizes[alive])
        return len(places) - int(np.count_nonzero(alive))


def _complete(ring: Ring, env: int) -> Ints:
    """The places of an env's complete transitions, in the order of time."""
    places = ring.live_places(env)
    return places[ring.stamp[places] >= 0]


def _address(array: Any) -> int:
    """The address of a NumPy array in one piece."""
    return array.__array_interface__["data"][0]


def magnitudes(errors: Any) -> Any:
    """The sizes of TD errors, item by item: float64 ``[B]`` or ``[B, L]`` -> float32 ``[B]`` or ``[B * L]``.

    Raises:
        NotFiniteError: one is NaN, infinite, or too large for float32. Names the first item with such an error.
    """
    sizes = np.empty(errors.size, np.float32)
    bad = kernels.fast().magnitudes(errors.reshape(-1), LARGEST_ERROR, sizes)
    if bad >= 0:
        entry = bad // errors[0].size
        raise NotFiniteError(f"td_error: entry {entry} is {errors[entry]}, not a finite float32; fix the loss")
    return sizes


def doubles(numbers: Any, name: str = "td_error") -> Any:
    """Numbers, one for each row of a batch, of any real dtype and on any device, as float64.

    Raises:
        DTypeError: they are not real numbers.
        ShapeError: a list with rows of different lengths.
    """
    given = as_host(numbers, name)
    if given.size and given.dtype.kind not in "fiub":
        raise DTypeError(f"{name}: expected real numbers, got {given.dtype}; pass one float for each row of the batch")
    return np.asarray(given, np.float64) if given.size else np.zeros(given.shape)


def by_item(view: View, index: Ints, errors: Any, mask: Any) -> tuple[Any, Any]:
    """TD errors and their mask, item by item. Errors of transitions are ``[B]`` and have no mask. Errors of sequences
    and their mask become ``[B, T]``, with 0 for errors that do not count.

    Raises:
        ShapeError: the errors do not fit the items ``index`` as ``view`` reads them.
        ParameterError: errors of sequences come without their mask.
    """
    time_first, count = time_first_of(view), index.size
    if errors.ndim != 2 or time_first is None:
        if index.ndim != 1 or errors.shape != index.shape:
            raise ShapeError(_not_by_item(index.shape, errors.shape))
        if mask is not None:
            raise ShapeError(
                f"mask: errors [B] have none, got {mask.dtype} {mask.shape}; leave out the errors that do not count"
            )
        return errors, None
    axes = "[T, B]" if time_first else "[B, T]"
    if index.ndim != 1 or errors.shape[1 if time_first else 0] != count:
        raise ShapeError(
            f"td_error: expected {axes} of {count} sequences, as the view has time "
            f"{'first' if time_first else 'second'}, got {errors.shape}"
        )
    if mask is None:
        raise ParameterError("mask: errors of sequences need one, for the steps that count; pass mask=seq['mask']")
    if mask.shape != errors.shape or mask.dtype != np.bool_:
        raise ShapeError(f"mask: expected bool {errors.shape} for errors {axes}, got {mask.dtype} {mask.shape}")
    errors = np.where(mask, errors, 0.0)  # a network's output for padding may be NaN
    return (errors.T, mask.T) if time_first else (errors, mask)


def _not_by_item(index: tuple[int, ...], errors: tuple[int, ...]) -> str:
    """The message for errors that are not one for each index."""
    message = f"update_priorities: expected an index [B] and errors [B], got {index}, {errors}"
    if len(index) == 1 and len(errors) == 2:
        message += (
            "; a target [B] minus a value [B, 1] is [B, B]: take value.squeeze(-1). "
            "Errors of two axes belong to a view that reads sequences, such as Sequence"
        )
    return message
