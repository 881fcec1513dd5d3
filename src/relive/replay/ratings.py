"""Ratings: the TD errors of batches, on their way to a prioritizing sampler."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from .. import kernels
from ..errors import LifecycleError, NotFiniteError, ParameterError, ShapeError
from ..ring.ring import Change, Ints, Ring
from ..samplers.contract import Sampler
from ..samplers.prioritized import LARGEST_ERROR, Prioritized
from ..samplers.recent import Recent
from ..steps.arrays import as_host
from ..views.contract import View, time_first_of
from .arguments import whole_numbers
from .progress import Progress

__all__ = ["Ratings", "doubles", "magnitudes"]


RATING = Change()
"""Neither rows nor what can be drawn changes: only the sampler may have to begin again."""


class Ratings:
    """Passes TD errors on to a sampler that can use them. The caller holds the replay's lock.

    Args:
        ring: it knows which transitions are still there.
        sampler: a :class:`relive.Prioritized`, one around it, or one without priorities.
        progress: counts the errors that came too late.
    """

    def __init__(self, ring: Ring, sampler: Sampler, progress: Progress) -> None:
        self.ring, self.sampler, self.progress = ring, sampler, progress

    @property
    def prioritized(self) -> Prioritized | None:
        """The sampler that has the priorities, if there is one."""
        sampler = self.sampler.inner if isinstance(self.sampler, Recent) else self.sampler
        return sampler if isinstance(sampler, Prioritized) else None

    def update(self, view: View, index: Any, td_error: Any, mask: Any) -> int:
        """Rate the transitions ``index`` that came through ``view``; returns how many ratings came too late."""
        ring, sampler = self.ring, self.prioritized
        if sampler is None:
            raise LifecycleError(f"{self.sampler!r} knows no priorities; create the buffer with sampler=Prioritized()")
        where = whole_numbers(index, "index")
        errors, real = _by_item(view, where, doubles(td_error), None if mask is None else as_host(mask))
        sizes = magnitudes(errors)
        places, unknown = ring.find(where)
        if unknown >= 0:
            raise ParameterError(f"index: entry {unknown}, {where[unknown]}, was never issued; pass batch['index']")
        if errors.ndim == 2:
            sizes = sampler.reduced(errors, real).astype(np.float32)
        alive = places >= 0
        late = len(places) - int(np.count_nonzero(alive))
        if late:
            places, sizes = places[alive], sizes[alive]
        ring.pending = RATING
        try:
            sampler.update(places, sizes)
        except NotFiniteError:  # before anything was changed
            ring.pending = None
            raise
        self.progress.late += late
        ring.pending = None
        return late


def magnitudes(errors: Any) -> Any:
    """The sizes of TD errors, item by item: float64 ``[B]`` or ``[B, L]`` -> float32 ``[B]`` or ``[B * L]``.

    Raises:
        NotFiniteError: one is NaN, infinite, or too large for float32. Names the first item with such an error.
    """
    sizes = np.empty(errors.size, np.float32)
    bad = kernels.fast().magnitudes(errors.reshape(-1), LARGEST_ERROR, sizes)
    if bad >= 0:
        entry = bad // errors[0].size
        raise NotFiniteError(
            f"td_error: entry {entry} is {errors[entry]}, not a finite float32; mend the loss before it spreads"
        )
    return sizes


def doubles(values: Any) -> Any:
    """Numbers of any dtype, on any device, as float64; NumPy does not know all of torch's dtypes."""
    return values.detach().double().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values, np.float64)


def _by_item(view: View, index: Ints, errors: Any, mask: Any) -> tuple[Any, Any]:
    """Errors ``[B]``, or those of sequences and their mask, item by item: ``[B, T]``, 0 where they do not count."""
    time_first, count = time_first_of(view), index.size
    if errors.ndim != 2 or time_first is None:
        if index.ndim != 1 or errors.shape != index.shape:
            raise ShapeError(_not_by_item(index.shape, errors.shape))
        if mask is not None:
            raise ShapeError(f"mask: errors [B] have none, got {mask.dtype} {mask.shape}; leave out what is not meant")
        return errors, None
    axes = "[T, B]" if time_first else "[B, T]"
    if index.ndim != 1 or errors.shape[1 if time_first else 0] != count:
        raise ShapeError(
            f"td_error: expected {axes} of {count} sequences, as the view has time "
            f"{'first' if time_first else 'second'}, got {errors.shape}"
        )
    if mask is None:
        raise ParameterError("mask: errors of sequences need one to tell which of them count; pass mask=seq['mask']")
    if mask.shape != errors.shape or mask.dtype != np.bool_:
        raise ShapeError(f"mask: expected bool {errors.shape} for errors {axes}, got {mask.dtype} {mask.shape}")
    errors = np.where(mask, errors, 0.0)  # what a network makes of padding may be NaN
    return (errors.T, mask.T) if time_first else (errors, mask)


def _not_by_item(index: tuple[int, ...], errors: tuple[int, ...]) -> str:
    """What is wrong with errors that are not one for each index."""
    message = f"update_priorities: expected an index [B] and errors [B], got {index}, {errors}"
    if len(index) == 1 and len(errors) == 2:
        message += (
            "; a target [B] minus a value [B, 1] is [B, B]: take value.squeeze(-1). "
            "Errors of two axes belong to a view that reads sequences, such as Sequence"
        )
    return message
