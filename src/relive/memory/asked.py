"""AskedTensors: checks the tensors of a step where compiled code cannot read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from struct import Struct
from typing import Any

import torch
from torch import Tensor

__all__ = ["AskedTensors"]

_facts = attrgetter("__class__", "dtype", "shape", "is_cpu")
_is_contiguous, _is_negated, _address = Tensor.is_contiguous, Tensor.is_neg, Tensor.data_ptr


class AskedTensors:
    """Asks the tensors of a step for class, dtype, shape, device and address, all of them in a few calls.

    Older versions of torch have no functions that compiled code can call: see :mod:`relive.kernels.tensor_calls`.

    Args:
        places: which items of a step are tensors.
        dtypes: theirs.
        shapes: theirs.
        pointers: an int64 array that gets their addresses.
    """

    def __init__(
        self,
        places: Sequence[int],
        dtypes: Sequence[torch.dtype],
        shapes: Sequence[tuple[int, ...]],
        pointers: Any,
    ) -> None:
        self._pick = _picker(places)
        self._pick_floats = _picker([k for k, dtype in enumerate(dtypes) if dtype.is_floating_point])
        self._wanted = [(Tensor, dtype, shape, True) for dtype, shape in zip(dtypes, shapes, strict=True)]
        self._memory, self._packed = memoryview(pointers).cast("B"), Struct(f"{len(places)}q")

    def fit(self, values: Sequence[Any]) -> bool:
        """Whether the tensors of a step are as expected, in RAM, and without gaps; notes their addresses."""
        tensors = self._pick(values)
        try:
            if list(map(_facts, tensors)) != self._wanted or not all(map(_is_contiguous, tensors)):
                return False
            if any(map(_is_negated, self._pick_floats(tensors))):  # then their numbers are not what lies in memory
                return False
            self._packed.pack_into(self._memory, 0, *map(_address, tensors))
        except (AttributeError, RuntimeError):  # other things than tensors, or tensors without an address
            return False
        return True


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What gives the items at these places of a sequence, as a sequence."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0, 0))
